"""Whether a report can be compared: it has an account, and its numbers can be those of a run.

An analysis makes accounts that balance; a saved report is a file, which anything may have written.
"""

from __future__ import annotations

from typing import Final

from cptrace.errors import SourceError, TraceError
from cptrace.report import Report, Row

_SECTIONS: Final = ("ranks", "steps", "collectives", "kernels", "findings")
# Not how long, but when: a trace may begin before its zero. And a gain, which may be a loss.
_SIGNED: Final = ("start_ns", "end_ns", "recoverable_ns")
_BEYOND: Final = 2**63
_SUMS: Final = (
    ("window_ns", ("compute_ns", "exposed_comm_ns", "exposed_copy_ns", "idle_ns")),
    ("comm_ns", ("overlapped_comm_ns", "exposed_comm_ns")),
    ("comm_ns", ("transfer_ns", "peer_wait_ns")),
)
_SHARES: Final = ("comm_share", "exposed_comm_share", "overlap")


def check_account(report: Report, name: str) -> None:
    """Check that there is something to compare, and that saved numbers can be those of a run.

    Args:
        report: Report to look at.
        name: What the comparison calls it.

    Raises:
        SourceError: It has no account of any rank, and why.
        TraceError: Its numbers contradict themselves; the message names the row.
    """
    if not report.rows("ranks"):
        reasons = {entry.analysis: entry.reason for entry in report.not_applicable}
        reason = reasons.get("account") or next(iter(reasons.values()), "`cptrace analyze` shows what it has")
        raise SourceError(f"cannot compare {name}, which has no account of any rank: {reason}")
    for section in _SECTIONS:
        for number, row in enumerate(report.rows(section), 1):
            if (wrong := _contradiction(row)) is not None:
                parts = (
                    f"{key} {row[key]}" for key in ("rank", "step", "kind", "name", "code") if key in row
                )
                raise TraceError(
                    f"{name}: the report contradicts itself, row {number} of {section} ({', '.join(parts)}) has"
                    f" {wrong}; save it again with `cptrace analyze --format json`"
                )


def _contradiction(row: Row) -> str | None:
    """Return what no run can have of a row's numbers, None where they fit together."""
    for name, value in row.items():
        if isinstance(value, (int, float)) and not abs(value) < _BEYOND:
            return (
                f"{name} {value:.3g}, which no trace holds"
                if isinstance(value, float)
                else f"{name} of over 64 bits"
            )
        if name.endswith("_ns") and not name.endswith(_SIGNED) and value is not None and value < 0:
            return f"{name} {value}, and no time is negative"
        if name in _SHARES and not (value is None or (isinstance(value, (int, float)) and 0 <= value <= 1)):
            return f"{name} {value}, and a share is between 0 and 1"
    for whole, parts in _SUMS:
        values = [row.get(name) for name in (whole, *parts)]
        known = [value for value in values if value is not None]
        if len(known) == len(values) and known[0] != sum(known[1:]):
            return f"{whole} {known[0]}, and its parts ({', '.join(parts)}) sum to {sum(known[1:])}"
    return None
