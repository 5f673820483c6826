"""Where a rank's device time goes: by collective, by kernel and by stream, within its window."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from cptrace import intervals, labels
from cptrace.analyses.account import fraction
from cptrace.analyses.scope import Lane, Scope, device_work_missing
from cptrace.classify import COMM, ROLES
from cptrace.groups import group_rows, number_groups
from cptrace.intervals import Int64Array, Intervals
from cptrace.matching import comm_labels
from cptrace.outcome import NotApplicable
from cptrace.units import NS_PER_UNIT


def collectives(scope: Scope) -> pd.DataFrame | NotApplicable:
    """Return one row per rank, kind of collective and name: how long, how much of it overlapped, how many bytes.

    `bytes` and `bytes_per_s` (bytes over the summed duration, waiting for peers included) are given where the size of
    every op of the row is known.

    Args:
        scope: What to look at.
    """
    if (missing := device_work_missing(scope.trace, "collectives")) is not None:
        return missing
    ops = scope.trace.ops
    rows = np.flatnonzero((ops["role"] == COMM).to_numpy() & scope.is_inside)
    size, is_sized = op_sizes(scope, rows)
    kinds, names = (ops[name].cat for name in ("collective", "name"))
    key = (ops["rank"].to_numpy()[rows], kinds.codes.to_numpy()[rows], names.codes.to_numpy()[rows])
    table: dict[str, list[object]] = {name: [] for name in _COLLECTIVE_COLUMNS}
    for members in group_rows(*key):
        group, (rank, kind, name) = rows[members], (int(codes[members[0]]) for codes in key)
        mine = _united(scope, group)
        busy = _inside_ns(scope, rank, mine)
        overlapped = _inside_ns(scope, rank, intervals.intersect(mine, scope.activities[rank].compute))
        total_bytes = int(size[members].sum()) if is_sized[members].all() else None
        total = int(scope.inside_ns[group].sum())
        values = (rank, kinds.categories[kind], names.categories[name], len(group), total, busy, overlapped)
        for column, value in zip(table, (*values, busy - overlapped, total_bytes), strict=True):
            table[column].append(value)
    frame = pd.DataFrame(table).astype({"bytes": "Int64"})
    overlap = fraction(_int64(frame, "overlapped_ns"), _int64(frame, "busy_ns"))
    frame = frame.assign(overlap=overlap, bytes_per_s=_bandwidth(scope, frame))
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
    ops = scope.trace.ops
    rows = np.flatnonzero(scope.is_inside)
    texts = {name: ops[name].cat for name in ("kind", "name", "role", "rule")}
    keys = [ops["rank"].to_numpy()[rows], *(text.codes.to_numpy()[rows] for text in texts.values())]
    slot, first = number_groups(*(keys[place] for place in (0, 1, 2, 4)))  # the rule has decided the role
    inside_ns = scope.inside_ns[rows]
    total, longest = np.zeros(len(first), np.int64), np.zeros(len(first), np.int64)
    np.add.at(total, slot, inside_ns)
    np.maximum.at(longest, slot, inside_ns)
    frame = pd.DataFrame(
        {
            "rank": keys[0][first],
            **{
                name: text.categories.to_numpy()[code[first]]
                for (name, text), code in zip(texts.items(), keys[1:], strict=True)
            },
            "count": np.bincount(slot, minlength=len(first)),
            "total_ns": total,
            "longest_ns": longest,
        }
    )
    by = ["rank", "total_ns", "kind", "name", "role", "rule"]
    return frame.sort_values(by, ascending=[True, False, True, True, True, True], ignore_index=True)


def streams(scope: Scope) -> pd.DataFrame | NotApplicable:
    """Return one row per stream: how long it is busy, and with what. Streams are told apart by process and context.

    Args:
        scope: What to look at.
    """
    if (missing := device_work_missing(scope.trace, "streams")) is not None:
        return missing
    by_stream: dict[tuple[int, int, int], list[Lane]] = {}
    for lane in scope.lanes:
        by_stream.setdefault((lane.rank, lane.context, lane.stream), []).append(lane)
    table = []
    for (rank, context, stream), lanes in by_stream.items():
        n_ops = sum(int(np.count_nonzero(scope.is_inside[lane.rows])) for lane in lanes)
        if n_ops:
            busy_ns = _inside_ns(scope, rank, intervals.merge(*(lane.busy for lane in lanes)))
            identity = {"rank": rank, "context": context, "stream": stream, "n_ops": n_ops}
            table.append({**identity, "busy_ns": busy_ns, **_busy_by_role(scope, lanes)})
    return pd.DataFrame(table)


def _busy_by_role(scope: Scope, lanes: Sequence[Lane]) -> dict[str, int]:
    busy = {lane.role: _inside_ns(scope, lane.rank, lane.busy) for lane in lanes}
    return {f"{role}_ns": busy.get(role, 0) for role in ROLES}


def _united(scope: Scope, rows: Int64Array) -> Intervals:
    """Return the instants in which any of the ops at these rows runs, in or out of the window."""
    ops = scope.trace.ops
    return intervals.union(Intervals(ops["start_ns"].to_numpy()[rows], ops["end_ns"].to_numpy()[rows]))


def _inside_ns(scope: Scope, rank: int, united: Intervals) -> int:
    """Return how much of a united set lies in a rank's window."""
    return int(intervals.covered_ns(united, *scope.windows[rank].pieces).sum())


def _int64(frame: pd.DataFrame, name: str) -> Int64Array:
    return frame[name].to_numpy(dtype=np.int64, na_value=0)


def op_sizes(scope: Scope, rows: Int64Array) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Return the bytes that the ops at these rows send, and for which the trace tells: from our labels, or the copy."""
    trace = scope.trace
    copied = trace.ops["bytes"].iloc[rows]
    size, is_known = copied.to_numpy(dtype=np.int64, na_value=0), ~copied.isna().to_numpy()
    texts, has_label = comm_labels(trace, scope.launches, rows)
    of_name = [_bytes_in(text) for text in texts.categories]
    is_sized = np.array([value is not None for value in of_name] + [False])[texts.codes] & has_label
    size[is_sized] = np.array([value or 0 for value in of_name] + [0], np.int64)[texts.codes][is_sized]
    return size, is_known | is_sized


def _bytes_in(text: str) -> int | None:
    label = labels.parse_label(text)
    size = label.fields.get("bytes") if label is not None else None
    return int(size) if size is not None and re.fullmatch(r"[0-9]{1,18}", size) else None


def _bandwidth(scope: Scope, frame: pd.DataFrame) -> pd.arrays.FloatingArray:
    """Return bytes per second; none for one-GPU runs with virtual ranks, whose copies cross no link."""
    can_tell = ~frame["bytes"].isna().to_numpy() & (scope.trace.meta.run.get("transport") != labels.LOCAL_D2D)
    # As floats: what all steps of a long run send, times 1e9, is beyond 64 bits.
    size = _int64(frame, "bytes").astype(np.float64)
    return fraction(size * NS_PER_UNIT["s"], _int64(frame, "total_ns"), can_tell)
