"""Tidy frames of a report, one row per thing that a figure draws; empty where there is nothing to draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import pandas as pd

from cptrace.comparison import METRICS, Comparison
from cptrace.names import finding_name
from cptrace.report import Report, Row
from cptrace.timeline import Timeline
from cptrace.units import format_ns, joined

PARTS: Final = {
    "compute": "compute_ns",
    "exposed comm": "exposed_comm_ns",
    "copy, other": "exposed_copy_ns",
    "idle": "idle_ns",
}
"""Parts of a window, which sum to it exactly."""


def rank_parts(report: Report) -> pd.DataFrame:
    """Return rank, part and duration_ns: what each rank's window consists of.

    Args:
        report: Report to read.
    """
    rows = [
        {"rank": row["rank"], "part": part, "duration_ns": row[field]}
        for row in report.rows("ranks")
        for part, field in PARTS.items()
    ]
    return pd.DataFrame(rows, columns=["rank", "part", "duration_ns"])


def step_overlap(report: Report) -> pd.DataFrame:
    """Return rank, step, overlap and exposed_comm_ns of each step; steps without communication are left out.

    Args:
        report: Report to read.
    """
    columns = ["rank", "step", "overlap", "exposed_comm_ns"]
    rows = [[row[name] for name in columns] for row in report.rows("steps") if row["overlap"] is not None]
    return pd.DataFrame(rows, columns=columns)


def start_causes(report: Report) -> pd.DataFrame:
    """Return rank, role, cause, count and exposed_ns: why operations started when they did.

    Args:
        report: Report to read.
    """
    columns = ["rank", "role", "cause", "count", "exposed_ns"]
    rows = [[row[name] for name in columns] for row in report.rows("start_causes")]
    return pd.DataFrame(rows, columns=columns)


def peer_waits(report: Report) -> pd.DataFrame:
    """Return rank, peer and wait_ns of every pair of ranks, 0 where one did not wait for the other.

    Args:
        report: Report to read.
    """
    waits = {(row["rank"], row["peer"]): row["wait_ns"] for row in report.rows("peer_waits")}
    ranks = sorted({rank for pair in waits for rank in pair} | {row["rank"] for row in report.rows("ranks")})
    pairs = [(rank, peer) for rank in ranks for peer in ranks] if waits else []
    return pd.DataFrame([(*pair, waits.get(pair, 0)) for pair in pairs], columns=["rank", "peer", "wait_ns"])


def bandwidth(report: Report) -> pd.DataFrame:
    """Return rank, kind, bytes, count and bytes_per_s of messages of known rate.

    Args:
        report: Report to read.
    """
    columns = ["rank", "kind", "bytes", "count", "bytes_per_s"]
    rows = [
        [row[name] for name in columns] for row in report.rows("messages") if row["bytes_per_s"] is not None
    ]
    return pd.DataFrame(rows, columns=columns)


def memory(report: Report) -> pd.DataFrame:
    """Return rank and peak_memory_bytes where that was recorded.

    Args:
        report: Report to read.
    """
    rows = [
        (row["rank"], row["peak_memory_bytes"])
        for row in report.rows("ranks")
        if row.get("peak_memory_bytes") is not None
    ]
    return pd.DataFrame(rows, columns=["rank", "peak_memory_bytes"])


def findings(report: Report) -> pd.DataFrame:
    """Return finding, recoverable_ns and predicted_step_ns of findings with a prediction, the largest first.

    Args:
        report: Report to read.
    """
    rows = [
        (_name_in_order(row), row["recoverable_ns"], row["predicted_step_ns"])
        for row in report.rows("findings")
        if row["recoverable_ns"] is not None
    ]
    frame = pd.DataFrame(rows, columns=["finding", "recoverable_ns", "predicted_step_ns"])
    return frame.sort_values("recoverable_ns", ascending=False, kind="stable", ignore_index=True)


def _name_in_order(row: Row) -> str:
    """Return a finding's name, with what is to be mended before it where it pays only then."""
    name = finding_name(row["code"], row["form"])
    return f"{name}, after {joined(row['after'])}" if row.get("after") else name


def by_gain(rows: Sequence[Row]) -> list[Row]:
    """Return findings, those that may make results wrong first, then by what mending them gives.

    What pays only once others are mended comes behind them.

    Args:
        rows: Rows of the section findings.
    """

    def key(row: Row) -> tuple[bool, bool, bool, float]:
        is_predicted = row["recoverable_ns"] is not None
        return (
            row["severity"] != "error", not is_predicted, bool(row.get("after")), -(row["recoverable_ns"] or 0)
        )  # fmt: skip

    return sorted(rows, key=key)


def gain(row: Row, *, has_steps: bool = True) -> str:
    """Return what mending a finding gives, in words; empty where nothing is predicted.

    Args:
        row: Row of the section findings.
        has_steps: Whether the report knows steps, or its whole window is one.
    """
    if row["severity"] == "error" and not row["recoverable_ns"]:
        return "Results may be wrong"
    if row["recoverable_ns"] is None:
        return ""
    of_what = "per step" if has_steps else "of the window"
    saved = f"{_mending(row)} is predicted to save {format_ns(row['recoverable_ns'])} {of_what}"
    after = row["predicted_step_ns"]
    if not after:
        return saved
    before = after + row["recoverable_ns"]
    return (
        f"{saved}: {format_ns(before)} to {format_ns(after)} ({-100 * row['recoverable_ns'] / before:.1f} %)"
    )


def _mending(row: Row) -> str:
    """Return the begin of a sentence about what mending a finding gives, by itself or on top of others."""
    names = row.get("after")
    if not names:
        return "Mending it"
    return f"Mending it, once {joined(names)} {'is' if len(names) == 1 else 'are'} mended too,"


def timeline(drawn: Timeline, rank: int) -> pd.DataFrame:
    """Return stream, name, role, start_ns, duration_ns and n_ops of a rank's operations.

    Args:
        drawn: Timeline of the report.
        rank: Rank to look at.
    """
    parts = [
        pd.DataFrame(
            {
                "stream": lane.stream,
                "name": [drawn.names[place] if place >= 0 else "several" for place in lane.name.tolist()],
                "role": [drawn.roles[place] for place in lane.role.tolist()],
                "start_ns": lane.start_ns,
                "duration_ns": lane.end_ns - lane.start_ns,
                "n_ops": lane.n_ops,
            }
        )
        for lane in drawn.lanes
        if lane.rank == rank
    ]
    columns = ["stream", "name", "role", "start_ns", "duration_ns", "n_ops"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def comparison_metrics(comparison: Comparison) -> pd.DataFrame:
    """Return run, metric, unit and value of each run, the baseline included.

    Args:
        comparison: Runs side by side.
    """
    rows = [
        (comparison.names[0], row["metric"], row["unit"], row["baseline"])
        for row in comparison.of_run("metrics", 1)
    ]
    rows += [
        (comparison.names[row["run"]], row["metric"], row["unit"], row["value"]) for row in comparison.metrics
    ]
    titles = {metric.name: metric.title for metric in METRICS}
    frame = pd.DataFrame(rows, columns=["run", "metric", "unit", "value"]).dropna(ignore_index=True)
    return frame.assign(metric=frame["metric"].map(titles))


FRAMES: Final[tuple[tuple[str, Callable[[Report], pd.DataFrame]], ...]] = (
    ("rank_parts", rank_parts),
    ("step_overlap", step_overlap),
    ("start_causes", start_causes),
    ("peer_waits", peer_waits),
    ("bandwidth", bandwidth),
    ("memory", memory),
    ("findings", findings),
)
"""Every tidy frame of a report, by name."""
