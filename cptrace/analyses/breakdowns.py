"""Where a rank's device time goes: by collective, by kernel and by stream, within its window."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from cptrace import intervals, labels
from cptrace.analyses.account import fraction
from cptrace.analyses.scope import Scope, device_work_missing
from cptrace.classify import COMM, COMPUTE, COPY
from cptrace.intervals import Int64Array, Intervals
from cptrace.launches import closed_ranges, innermost_ranges
from cptrace.outcome import NotApplicable

_COMM_LABEL_PREFIXES: Final = tuple(f"{name} " for name in labels.COMMUNICATION)


def collectives(scope: Scope) -> pd.DataFrame | NotApplicable:
    """Return one row per rank, kind of collective and name: how long, how much of it overlapped, how many bytes.

    `bytes` and `bytes_per_s` (bytes over the summed duration, waiting for peers included) are given where the size of
    every op of the row is known.

    Args:
        scope: What to look at.
    """
    if (missing := device_work_missing(scope.trace, "collectives")) is not None:
        return missing
    ops = _inside(scope, scope.trace.ops[scope.trace.ops["role"] == COMM])
    size = _sizes(scope, ops)
    rows = []
    keys = ["rank", "collective", "name"]
    for (rank, kind, name), group in ops.groupby(keys, observed=True, sort=True):
        activity = scope.activities[int(rank)]
        mine = _within(scope, int(rank), group)
        overlapped = intervals.intersect(mine, activity.compute)
        total, sizes = int(group["inside_ns"].sum()), size[group.index]
        rows.append(
            {
                "rank": int(rank),
                "kind": str(kind),
                "name": str(name),
                "count": len(group),
                "total_ns": total,
                "busy_ns": intervals.total_ns(mine),
                "overlapped_ns": intervals.total_ns(overlapped),
                "exposed_ns": intervals.total_ns(mine) - intervals.total_ns(overlapped),
                "bytes": None if sizes.isna().any() else int(sizes.sum()),
            }
        )
    frame = pd.DataFrame(rows, columns=[*_COLLECTIVE_COLUMNS])
    frame["bytes"] = frame["bytes"].astype("Int64")
    busy = frame["busy_ns"].to_numpy(np.int64)
    frame.insert(
        frame.columns.get_loc("exposed_ns") + 1,
        "overlap",
        fraction(frame["overlapped_ns"].to_numpy(np.int64), busy),
    )
    frame["bytes_per_s"] = _bandwidth(scope, frame)
    return frame.sort_values(["rank", "total_ns", "name"], ascending=[True, False, True], ignore_index=True)


_COLLECTIVE_COLUMNS: Final = (
    "rank", "kind", "name", "count", "total_ns", "busy_ns", "overlapped_ns", "exposed_ns", "bytes",
)  # fmt: skip


def kernels(scope: Scope) -> pd.DataFrame | NotApplicable:
    """Return one row per rank and name of device work: role, the rule that decided it, count and summed duration.

    Args:
        scope: What to look at.
    """
    if (missing := device_work_missing(scope.trace, "kernels")) is not None:
        return missing
    ops = _inside(scope, scope.trace.ops)
    keys = ["rank", "kind", "name", "role", "rule"]
    frame = ops.groupby(keys, observed=True, sort=True)["inside_ns"].agg(["size", "sum", "max"]).reset_index()
    frame = frame.rename(columns={"size": "count", "sum": "total_ns", "max": "longest_ns"})
    frame = frame.astype(dict.fromkeys(keys[1:], str))
    return frame.sort_values(
        ["rank", "total_ns", "kind", "name"], ascending=[True, False, True, True], ignore_index=True
    )


def streams(scope: Scope) -> pd.DataFrame | NotApplicable:
    """Return one row per stream: how long it is busy, and with what. Streams are told apart by process and context.

    Args:
        scope: What to look at.
    """
    if (missing := device_work_missing(scope.trace, "streams")) is not None:
        return missing
    ops = _inside(scope, scope.trace.ops)
    rows = []
    for (rank, context, stream), group in ops.groupby(["rank", "context", "stream"], sort=True):
        busy = {
            f"{role}_ns": intervals.total_ns(_within(scope, int(rank), group[group["role"] == role]))
            for role in (COMPUTE, COMM, COPY)
        }
        total = intervals.total_ns(_within(scope, int(rank), group))
        rows.append(
            {
                "rank": int(rank),
                "context": int(context),
                "stream": int(stream),
                "n_ops": len(group),
                "busy_ns": total,
                **busy,
            }
        )
    return pd.DataFrame(rows)


def _inside(scope: Scope, ops: pd.DataFrame) -> pd.DataFrame:
    """Return the ops that run in their rank's window, with the part of their duration that lies in it."""
    start, end = ops["start_ns"].to_numpy(), ops["end_ns"].to_numpy()
    rank = ops["rank"].to_numpy()
    inside = np.zeros(len(ops), np.int64)
    is_in = np.zeros(len(ops), bool)
    for number in scope.ranks:
        pieces = scope.windows[number].pieces
        mine = rank == number
        inside[mine] = intervals.covered_ns(pieces, start[mine], end[mine])
        is_in |= mine
    is_in &= (inside > 0) | (start == end)
    return ops[is_in].assign(inside_ns=inside[is_in])


def _within(scope: Scope, rank: int, ops: pd.DataFrame) -> Intervals:
    """Return the instants of a rank's window in which any of its ops runs."""
    busy = intervals.union(Intervals(ops["start_ns"].to_numpy(), ops["end_ns"].to_numpy()))
    return intervals.intersect(busy, scope.windows[rank].pieces)


def _sizes(scope: Scope, ops: pd.DataFrame) -> pd.Series:
    """Return the bytes that each communication op sends, where the trace tells: from our labels, else from the copy."""
    sizes = ops["bytes"].copy()
    trace = scope.trace
    names = trace.ranges["name"].cat
    is_label = np.array([name.startswith(_COMM_LABEL_PREFIXES) for name in names.categories] + [False])
    is_ours = (trace.ranges["domain"] == labels.DOMAIN).to_numpy() & is_label[names.codes.to_numpy()]
    ranges = closed_ranges(trace.ranges[is_ours])
    launched = np.flatnonzero(scope.launches.is_known[ops.index])
    if ranges.empty or not len(launched):
        return sizes
    calls = scope.launches.call[ops.index[launched]]
    thread, instant = (trace.api_calls[name].to_numpy()[calls] for name in ("thread", "start_ns"))
    found, is_found = innermost_ranges(ranges, thread, instant)
    used = ranges["name"].cat.remove_unused_categories().cat
    of_name = pd.array([_bytes_in(name) for name in used.categories], dtype="Int64")
    sizes.iloc[launched[is_found]] = of_name[used.codes.to_numpy()[found[is_found]]]
    return sizes


def _bytes_in(text: str) -> int | None:
    label = labels.parse_label(text)
    size = label.fields.get("bytes") if label is not None else None
    return int(size) if size is not None and size.isdecimal() else None


def _bandwidth(scope: Scope, frame: pd.DataFrame) -> pd.arrays.FloatingArray:
    """Return bytes per second; none for one-GPU runs with virtual ranks, whose copies cross no link."""
    size = frame["bytes"].to_numpy(dtype=np.int64, na_value=0)
    total: Int64Array = frame["total_ns"].to_numpy(np.int64)
    can_tell = ~frame["bytes"].isna().to_numpy() & (scope.trace.meta.run.get("transport") != "local-d2d")
    return fraction(size * 1_000_000_000, total, can_tell)
