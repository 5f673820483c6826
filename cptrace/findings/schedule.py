"""How much attention the schedule gives each rank, where the run's metadata tell."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from cptrace.findings.advice import run_number
from cptrace.findings.case import Case
from cptrace.intervals import Int64Array

_CONTIGUOUS: Final = "contiguous"
# Their ranks split heads, and each looks at the whole sequence: a mask is the same work for all.
_WHOLE_SEQUENCE: Final = ("ulysses", "ulysses_chunked", "tp", "single")
_OWN_CHUNK: Final = 0.5  # of a rank's own chunk a causal mask leaves half


def is_contiguous_causal(case: Case) -> bool:
    """Return whether each rank looks at all chunks before its own: the later the rank, the more work.

    Args:
        case: Case.
    """
    run = case.scope.trace.meta.run
    if (
        not run.get("causal")
        or run.get("layout") != _CONTIGUOUS
        or case.recognition.scheme in _WHOLE_SEQUENCE
    ):
        return False
    return run_number(case, "cp_size") > 1


def attention_shares(case: Case, n_attention: Int64Array) -> npt.NDArray[np.float64] | None:
    """Return the work in one attention op of each rank, to a common scale; None where it is the same on all.

    It differs where a rank looks at all keys up to its own chunk's end in one op: rank r of P at r whole chunks and
    half of its own. Where it has an op per chunk, ops of one hop are the same work.

    Args:
        case: Case.
        n_attention: Number of attention ops of each rank, int64 of shape (R,).

    Returns:
        float64 of shape (R,).
    """
    if not is_contiguous_causal(case) or len(set(n_attention.tolist())) > 1:
        return None
    sharing_weights = max(int(run_number(case, "tp_size")), 1)
    chunk = np.array(case.scope.ranks, np.int64) // sharing_weights
    return np.asarray(chunk + _OWN_CHUNK, np.float64)
