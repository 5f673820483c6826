"""The exact account of a rank's time: every nanosecond of its window has one place, and the parts sum to it.

window = compute + exposed comm + exposed copy + idle
comm   = overlapped comm + exposed comm = transfer + peer wait
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from cptrace import intervals
from cptrace.analyses.device_samples import activity_shares, allocated_peaks
from cptrace.analyses.scope import Activity, Scope, Window, device_work_missing
from cptrace.intervals import BoolArray, Int64Array, Intervals
from cptrace.outcome import NotApplicable

TIMES: Final = (
    "window_ns",
    "compute_ns",
    "comm_ns",
    "overlapped_comm_ns",
    "exposed_comm_ns",
    "exposed_copy_ns",
    "idle_ns",
    "unclassified_ns",
    "transfer_ns",
)


def measure(activity: Activity, start_ns: Int64Array, end_ns: Int64Array) -> dict[str, Int64Array]:
    """Return the account of each of W windows: the fields of `TIMES`, int64 of shape (W,).

    Args:
        activity: What the rank's device does when.
        start_ns: Inclusive starts of the windows.
        end_ns: Exclusive ends of the windows.
    """

    def within(united: Intervals) -> Int64Array:
        return intervals.covered_ns(united, start_ns, end_ns)

    window, compute, comm = end_ns - start_ns, within(activity.compute), within(activity.comm)
    overlapped = within(activity.overlapped_comm)
    exposed, exposed_copy = comm - overlapped, within(activity.exposed_rest)
    return {
        "window_ns": window,
        "compute_ns": compute,
        "comm_ns": comm,
        "overlapped_comm_ns": overlapped,
        "exposed_comm_ns": exposed,
        "exposed_copy_ns": exposed_copy,
        "idle_ns": window - compute - exposed - exposed_copy,
        "unclassified_ns": within(activity.unclassified),
        "transfer_ns": within(activity.transfer or intervals.EMPTY),
    }


def with_peer_wait(accounts: pd.DataFrame, activities: Mapping[int, Activity]) -> pd.DataFrame:
    """Return accounts whose communication is split into transfer and waiting, both missing where that is not known.

    Args:
        accounts: Rows with the fields of `TIMES` and a rank.
        activities: Activity of each rank.
    """
    is_unknown = np.array([activities[rank].transfer is None for rank in accounts["rank"].tolist()], bool)
    transfer = accounts["transfer_ns"].to_numpy(np.int64)
    wait = accounts["comm_ns"].to_numpy(np.int64) - transfer
    return accounts.assign(
        transfer_ns=pd.arrays.IntegerArray(transfer, is_unknown),
        peer_wait_ns=pd.arrays.IntegerArray(wait, is_unknown),
    )


def with_fractions(accounts: pd.DataFrame, can_tell: BoolArray) -> pd.DataFrame:
    """Return accounts with their fractions, missing where one does not apply or cannot be told.

    Args:
        accounts: Rows with the fields of `TIMES`.
        can_tell: False for rows of ranks whose device work is hidden, so that what communicates is not known.
    """
    window, comm = accounts["window_ns"].to_numpy(), accounts["comm_ns"].to_numpy()
    return accounts.assign(
        comm_share=fraction(comm, window, can_tell),
        exposed_comm_share=fraction(accounts["exposed_comm_ns"].to_numpy(), window, can_tell),
        overlap=fraction(accounts["overlapped_comm_ns"].to_numpy(), comm, can_tell),
    )


def fraction(
    part: Int64Array | npt.NDArray[np.float64], whole: Int64Array, can_tell: BoolArray | None = None
) -> pd.arrays.FloatingArray:
    """Return part / whole, missing where the whole is zero or nothing can be told.

    Args:
        part: Numerators of shape (N,).
        whole: Denominators of shape (N,).
        can_tell: Which rows have an answer; None for all.
    """
    is_defined = (whole != 0) if can_tell is None else (whole != 0) & can_tell
    values = np.divide(part, whole, out=np.zeros(len(whole)), where=is_defined)
    return pd.arrays.FloatingArray(values, ~is_defined)


def by_rank(scope: Scope) -> pd.DataFrame | NotApplicable:
    """Return the account of each rank's window.

    Args:
        scope: What to look at.
    """
    if (missing := device_work_missing(scope.trace, "account")) is not None:
        return missing
    windows = [scope.windows[rank] for rank in scope.ranks]
    measured = [measure(scope.activities[r], *w.pieces) for r, w in zip(scope.ranks, windows, strict=True)]
    identity = scope.trace.ranks.set_index("rank").loc[list(scope.ranks)]
    accounts = pd.DataFrame(
        {
            "rank": scope.ranks,
            "device": identity["device"].to_numpy(),
            "pid": identity["pid"].to_numpy(),
            "window_basis": [window.basis for window in windows],
            "window_start_ns": [int(window.pieces.start_ns[0]) for window in windows],
            "window_end_ns": [int(window.pieces.end_ns[-1]) for window in windows],
            **{name: [int(times[name].sum()) for times in measured] for name in TIMES},
        }
    )
    accounts["peak_memory_bytes"] = _peak_memory(scope)
    accounts = accounts.assign(**activity_shares(scope))
    extent_ns = accounts["window_end_ns"] - accounts["window_start_ns"]
    accounts["between_steps_ns"] = extent_ns - accounts["window_ns"]
    return _finish(scope, accounts)


def _peak_memory(scope: Scope) -> pd.arrays.IntegerArray:
    """Return the most bytes in use on each rank's device: as the run recorded it, else of the allocations traced."""
    run = scope.trace.meta.run
    recorded, entries = run.get("peak_memory_bytes"), run.get("ranks")
    by_rank: dict[Any, Any] = {}
    if isinstance(recorded, list) and isinstance(entries, list):
        by_rank = {entry["rank"]: size for entry, size in zip(entries, recorded, strict=False)}
    traced = allocated_peaks(scope)
    sizes = [traced.get(rank) if (size := by_rank.get(rank)) is None else size for rank in scope.ranks]
    is_known = np.array([type(size) is int and 0 <= size < 2**63 for size in sizes], bool)
    values = np.array([size if known else 0 for size, known in zip(sizes, is_known, strict=True)], np.int64)
    return pd.arrays.IntegerArray(values, ~is_known)


def by_step(scope: Scope) -> pd.DataFrame | NotApplicable:
    """Return the account of each step of each rank, cut to the rank's window.

    Args:
        scope: What to look at.
    """
    if (missing := device_work_missing(scope.trace, "steps")) is not None:
        return missing
    if isinstance(scope.steps, NotApplicable):
        return scope.steps
    parts = []
    for rank in scope.ranks:
        steps = _cut(scope.steps[scope.steps["rank"] == rank], scope.windows[rank])
        times = measure(scope.activities[rank], steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy())
        parts.append(steps.assign(**times))
    return _finish(scope, pd.concat(parts, ignore_index=True))


def _finish(scope: Scope, accounts: pd.DataFrame) -> pd.DataFrame:
    accounts = with_peer_wait(accounts, scope.activities)
    return with_fractions(accounts, ~accounts["rank"].isin(hidden_ns(scope)).to_numpy())


def _cut(steps: pd.DataFrame, window: Window) -> pd.DataFrame:
    """Return the steps that reach into the window, cut to its outer edges."""
    low, high = window.pieces.start_ns[0], window.pieces.end_ns[-1]
    inside: pd.DataFrame = steps[(steps["end_ns"] > low) & (steps["start_ns"] < high)]
    return inside.assign(
        start_ns=np.maximum(inside["start_ns"], low), end_ns=np.minimum(inside["end_ns"], high)
    )


def hidden_ns(scope: Scope) -> dict[int, int]:
    """Return the time of each window that is hidden inside CUDA graphs traced as a whole, for the ranks that have any.

    Args:
        scope: What to look at.
    """
    ops = scope.trace.ops
    is_graph = (ops["kind"] == "graph").to_numpy()
    start, end, rank = (ops[name].to_numpy()[is_graph] for name in ("start_ns", "end_ns", "rank"))
    hidden = {r: intervals.union(Intervals(start[rank == r], end[rank == r])) for r in scope.ranks}
    inside = {
        r: int(intervals.covered_ns(united, *scope.windows[r].pieces).sum()) for r, united in hidden.items()
    }
    return {r: duration_ns for r, duration_ns in inside.items() if duration_ns}
