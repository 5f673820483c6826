"""Places of ops without labels, found from the order and mix of kernels.

Between the hops of one attention call there are merges and copies, but no matrix product; between the attention of one
layer and that of the next there are several. So a block is a run of attention kernels, and of the communication around
them, without a matrix product in between:

    gemm | comm attention comm | gemm gemm | comm attention comm | gemm      all-to-all before and after: Ulysses
    gemm | attention comm attention comm attention | gemm                    P attentions, P - 1 transfers: a ring

Communication that runs beside the matrix products of a neighbouring layer is put into the block nearest in launch
order on its own stream, so the count of transfers per block is right where most blocks are alike.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from cptrace import labels
from cptrace.classify import ATTENTION_RULES, COMM, RULE_NAMES
from cptrace.intervals import BoolArray, Int64Array
from cptrace.launches import names_match
from cptrace.recognition.places import BY_PATTERN, Kinds, Places, no_places
from cptrace.trace import Trace

# One attention call launches several kernels; one of them does the work.
_HELPER: Final = (
    r"(?i)dot_do_o|convert_d[qkv]|preprocess|postprocess|combine|bwd_dot|zero_?fill|OGradDotO|delta_kernel"
)
_BACKWARD: Final = r"(?i)bwd|backward|bprop"
_SCHEME_COLLECTIVES: Final = (
    labels.SEND_RECV,
    labels.ALL_TO_ALL,
    labels.ALL_GATHER,
    labels.REDUCE_SCATTER,
)
_GEMM_RULE: Final = "gemm"

BEFORE: Final = "qkv"
AFTER: Final = "out"
HOP: Final = "kv"


def places_by_pattern(trace: Trace) -> Places:
    """Return the places of attention, and of the communication that attention schemes use, on each rank.

    Args:
        trace: Classified trace.
    """
    ops = trace.ops
    rule = ops["rule"].cat.codes.to_numpy()
    attention = np.isin(rule, [RULE_NAMES.index(name) for name in ATTENTION_RULES])
    attention &= ~names_match(ops["name"], _HELPER)
    is_comm = (ops["role"] == COMM).to_numpy() & ops["collective"].isin(_SCHEME_COLLECTIVES).to_numpy()
    if not attention.any() or not is_comm.any():
        return no_places()
    rows, block = _blocks(ops, attention, is_comm, rule == RULE_NAMES.index(_GEMM_RULE))
    return _placed(ops, rows, block, attention)


def _blocks(
    ops: pd.DataFrame, attention: BoolArray, is_comm: BoolArray, is_gemm: BoolArray
) -> tuple[Int64Array, Int64Array]:
    """Return the rows that have a block, ascending, and the number of each one's block."""
    rank = ops["rank"].to_numpy()
    rows, blocks = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    n_blocks = 0
    for number in np.unique(rank[attention]):
        mine = np.flatnonzero((rank == number) & (attention | is_comm | is_gemm))
        run = np.cumsum(is_gemm[mine])
        chosen = ~is_gemm[mine]
        # Only runs that hold attention are blocks of it.
        has_attention = np.isin(run, run[attention[mine]])
        chosen &= has_attention
        number_of_run, _ = pd.factorize(run[chosen])
        rows.append(mine[chosen])
        blocks.append(number_of_run + n_blocks)
        n_blocks += int(number_of_run.max(initial=-1)) + 1
    row, block = np.concatenate(rows), np.concatenate(blocks)
    order = np.argsort(row, kind="stable")
    return row[order], block[order].astype(np.int64)


def _placed(ops: pd.DataFrame, rows: Int64Array, block: Int64Array, attention: BoolArray) -> Places:
    """Return the places of rows in blocks: hops by order, and what travels by its side of the attention."""
    is_attention = attention[rows]
    order = pd.DataFrame({"block": block, "is_attention": is_attention})
    number = order.groupby(["block", "is_attention"]).cumcount().to_numpy()
    n_attention = order.groupby("block")["is_attention"].transform("sum").to_numpy()
    n_attention_before = order.groupby("block")["is_attention"].cumsum().to_numpy() - is_attention
    collective = ops["collective"].astype(object).to_numpy()[rows]
    what = np.where(is_attention, labels.ATTENTION, collective)
    is_exchange = ~is_attention & (n_attention == 1) & np.isin(what, (labels.SEND_RECV, labels.ALL_TO_ALL))
    what[is_exchange] = labels.ALL_TO_ALL
    side = np.where(n_attention_before == 0, BEFORE, AFTER)
    tensor = np.where(is_attention, "", np.where(is_exchange, side, HOP))
    hop: Int64Array = np.where(is_exchange, 0, number).astype(np.int64)
    texts = pd.Series(what.astype(str)) + " " + pd.Series(tensor.astype(str))
    kind, names = pd.factorize(texts)
    pairs = [str(name).partition(" ") for name in names]
    kinds = Kinds(tuple(first for first, _, _ in pairs), tuple(last for _, _, last in pairs))
    is_backward = _is_backward_block(ops, rows, block, is_attention)
    n_bytes = ops["bytes"].to_numpy(dtype=np.int64, na_value=0)[rows]
    layer = np.full(len(rows), -1, np.int64)
    return Places(
        rows, block, np.asarray(kind, np.int64), hop, layer, is_backward, n_bytes, kinds, BY_PATTERN
    )


def _is_backward_block(
    ops: pd.DataFrame, rows: Int64Array, block: Int64Array, is_attention: BoolArray
) -> BoolArray:
    """Return which ops lie in a block whose attention goes backward."""
    backward = names_match(ops["name"], _BACKWARD)[rows] & is_attention
    return np.isin(block, block[backward])
