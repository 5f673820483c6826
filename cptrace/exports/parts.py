"""Parts of a trace, for exports of less than all."""

from __future__ import annotations

from dataclasses import replace

from cptrace.errors import UsageError
from cptrace.trace import Trace


def of_rank(trace: Trace, rank: int) -> Trace:
    """Return what a trace holds of one rank: its device work, and all that its process did on the host.

    Args:
        trace: Any trace.
        rank: One of its ranks.

    Raises:
        UsageError: The trace has no such rank.
    """
    ranks = trace.ranks[trace.ranks["rank"] == rank].reset_index(drop=True)
    if ranks.empty:
        there = ", ".join(map(str, trace.ranks["rank"].tolist())) or "(none)"
        raise UsageError(f"--rank {rank} is not in {trace.meta.path}; its ranks are {there}")
    (process,) = ranks["process"].tolist()
    tables = {
        name: frame[frame["process"] == process].reset_index(drop=True)
        for name in ("api_calls", "syncs", "event_records", "ranges")
        for frame in [getattr(trace, name)]
    }
    ops = trace.ops[trace.ops["rank"] == rank].reset_index(drop=True)
    n_ranks = max(trace.meta.n_job_ranks or 0, len(trace.ranks))
    return replace(trace, meta=replace(trace.meta, n_job_ranks=n_ranks), ops=ops, ranks=ranks, **tables)
