"""A trace that claims context parallelism and shows none of its traffic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cptrace import labels
from cptrace.findings.advice import run_number
from cptrace.findings.case import Case
from cptrace.findings.finding import HIGH, MEDIUM, WARNING, Diagnosis, Explanation, Finding
from cptrace.launches import names_match

CODE: Final = "cp-off"

_CLAIM: Final = (
    r"(?i)context.?parallel|(^|[^a-z])ring.?att(n|ention)|ulysses|cp_(p2p|a2a|all_gather)|\bcp_size"
)
_NO_TRAFFIC: Final = ("single",)
_EXCHANGES: Final = (
    labels.SEND_RECV,
    labels.ALL_TO_ALL,
    labels.ALL_GATHER,
    labels.REDUCE_SCATTER,
    labels.ALL_REDUCE,
)


def find(case: Case) -> Sequence[Finding]:
    """Return the finding that context parallelism is claimed and does not take place.

    Args:
        case: Case.
    """
    claim, is_stated = _claim(case)
    is_exchange = case.is_comm & case.ops["collective"].isin(_EXCHANGES).to_numpy() & case.scope.is_inside
    if not claim or is_exchange.any() or not case.scope.is_inside.any():
        return ()
    return [
        Finding(
            code=CODE,
            form=None,
            severity=WARNING,
            summary=f"{claim}, but no communication of a context-parallel scheme is in the window",
            value=0,
            unit="count",
            confidence=HIGH if is_stated else MEDIUM,
            advice=(
                "Check that the process group of context parallelism has more than one rank and is passed to attention"
                " (Transformer Engine: set_context_parallel_group and cp_comm_type; Megatron:"
                " --context-parallel-size), that each rank gets its own part of the sequence, and that the trace holds"
                " communication at all (nsys profile --trace=cuda,nvtx on every rank)."
            ),
        )
    ]


def _claim(case: Case) -> tuple[str, bool]:
    """Return what claims context parallelism, empty for nothing, and whether the run itself states it."""
    run = case.scope.trace.meta.run
    size, scheme = int(run_number(case, "cp_size")), str(run.get("scheme", ""))
    if run:
        return (
            (f"the run states {scheme} on {size} ranks", True)
            if size > 1 and scheme not in _NO_TRAFFIC
            else ("", True)
        )
    names = case.scope.trace.ranges["name"]
    claiming = names_match(names, _CLAIM)
    if not claiming.any():
        return "", False
    return f"ranges are called {str(names[claiming].iloc[0])!r}", False


DIAGNOSIS: Final = Diagnosis(
    CODE,
    "context parallelism is claimed, not seen",
    Explanation(
        what="The run was meant to be context-parallel, and nothing of it is in the trace: every rank computes"
        " attention over what it has, which is slow, or wrong.",
        detected="The run's metadata or the names of ranges claim context parallelism, and no exchange, gather or"
        " reduction lies in the window.",
        looks="Attention kernels that are as long as without context parallelism, and no nccl kernels near them.",
        fix="Pass the process group; check the launcher's flags.",
    ),
    find,
)
