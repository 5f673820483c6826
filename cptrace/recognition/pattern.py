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
import numpy.typing as npt
import pandas as pd

from cptrace import labels
from cptrace.classify import COMM, COMPUTE, ROLES, RULE_NAMES, is_attention
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
_GEMM: Final = r"(?i)(^|[^a-z])gemm"

BEFORE: Final = "qkv"
AFTER: Final = "out"
HOP: Final = "kv"
GRADIENTS: Final = "dkv"
UNKNOWN: Final = "unknown"


def places_by_pattern(trace: Trace) -> Places:
    """Return the places of attention, and of the communication that attention schemes use, on each rank.

    Args:
        trace: Classified trace.
    """
    ops = trace.ops
    role = ops["role"].cat.codes.to_numpy()
    any_attention = is_attention(ops)
    attention = any_attention & ~names_match(ops["name"], _HELPER)
    is_comm = (role == ROLES.index(COMM)) & ops["collective"].isin(_SCHEME_COLLECTIVES).to_numpy()
    if not attention.any() or not is_comm.any():
        return no_places()
    is_gemm = find_gemms(ops)
    is_between = (role == ROLES.index(COMPUTE)) & ~is_gemm & ~attention
    rows, block = _blocks(ops, attention, attention | is_comm | is_between, is_gemm)
    return _placed(ops, rows, block, attention, is_comm)


def find_gemms(ops: pd.DataFrame) -> BoolArray:
    """Return which ops are matrix products, bool of shape (N,).

    Args:
        ops: Classified device work of N rows.
    """
    by_rule = ops["rule"].cat.codes.to_numpy() == RULE_NAMES.index(_GEMM_RULE)
    return np.asarray(by_rule | (names_match(ops["name"], _GEMM) & ~is_attention(ops)), bool)


def _blocks(
    ops: pd.DataFrame, attention: BoolArray, is_member: BoolArray, is_gemm: BoolArray
) -> tuple[Int64Array, Int64Array]:
    """Return the rows that have a block, ascending, and the number of each one's block.

    A change of direction, from forward to backward, begins a block too, where no matrix product has begun one.
    """
    rank = ops["rank"].to_numpy()
    backward = names_match(ops["name"], _BACKWARD) & attention
    rows, blocks = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    n_blocks = 0
    for number in np.unique(rank[attention]):
        mine = np.flatnonzero((rank == number) & (is_member | is_gemm))
        turns = np.zeros(len(mine), bool)
        of_attention = np.flatnonzero(attention[mine])
        n_gemms = np.cumsum(is_gemm[mine])
        turned = np.diff(backward[mine[of_attention]].astype(np.int8)) != 0
        turns[of_attention[1:]] = turned & (np.diff(n_gemms[of_attention]) == 0)
        run = n_gemms + np.cumsum(turns)
        # Only runs that hold attention are blocks of it.
        chosen = ~is_gemm[mine] & np.isin(run, run[attention[mine]])
        number_of_run, _ = pd.factorize(run[chosen])
        rows.append(mine[chosen])
        blocks.append(number_of_run + n_blocks)
        n_blocks += int(number_of_run.max(initial=-1)) + 1
    row, block = np.concatenate(rows), np.concatenate(blocks)
    order = np.argsort(row, kind="stable")
    return row[order], block[order].astype(np.int64)


def _placed(
    ops: pd.DataFrame, rows: Int64Array, block: Int64Array, attention: BoolArray, is_comm: BoolArray
) -> Places:
    """Return the places of rows in blocks: hops by order, and what travels by its side of the attention."""
    is_attention, is_transfer = attention[rows], is_comm[rows]
    order = pd.DataFrame({"block": block, "attention": is_attention, "transfer": is_transfer})
    totals = order.groupby("block")[["attention", "transfer"]].transform("sum")
    n_attention, n_transfers = (totals[name].to_numpy() for name in ("attention", "transfer"))
    n_before = order.groupby("block")["attention"].cumsum().to_numpy() - is_attention
    # What computes between two attentions of a block merges the part of the first; before and behind all is no merge.
    is_merge = ~is_attention & ~is_transfer & (n_before > 0) & (n_attention > 1)
    is_placed = is_attention | is_transfer | is_merge
    is_exchange = is_transfer & (n_attention == 1) & ~_is_beside_attention(ops, rows, block, is_attention)
    collective = ops["collective"].astype(object).to_numpy()[rows]
    exchanges = np.isin(collective, (labels.SEND_RECV, labels.ALL_TO_ALL)) & is_exchange
    what = np.where(is_attention, labels.ATTENTION, np.where(is_merge, labels.MERGE, collective))
    what[exchanges] = labels.ALL_TO_ALL
    is_backward = _is_backward_block(ops, rows, block, is_attention)
    tensor = np.where(is_transfer, _ring_tensor(ops, rows, order, is_backward, n_attention, n_transfers), "")
    tensor = np.where(exchanges, np.where(n_before == 0, BEFORE, AFTER), tensor)
    what[~is_placed] = ""
    number = order.assign(what=what, tensor=tensor).groupby(["block", "what", "tensor"]).cumcount().to_numpy()
    hop: Int64Array = np.where(exchanges, 0, np.where(is_merge, n_before - 1, number)).astype(np.int64)
    texts = pd.Series(what.astype(str)) + " " + pd.Series(tensor.astype(str))
    kind, names = pd.factorize(texts[is_placed])
    pairs = [str(name).partition(" ") for name in names]
    kinds = Kinds(tuple(first for first, _, _ in pairs), tuple(last for _, _, last in pairs))
    n_bytes = ops["bytes"].to_numpy(dtype=np.int64, na_value=0)[rows]
    return Places(
        rows=rows[is_placed],
        block=block[is_placed],
        kind=np.asarray(kind, np.int64),
        hop=hop[is_placed],
        layer=np.full(int(is_placed.sum()), -1, np.int64),
        is_backward=is_backward[is_placed],
        n_bytes=n_bytes[is_placed],
        kinds=kinds,
        basis=BY_PATTERN,
    )


def _is_beside_attention(
    ops: pd.DataFrame, rows: Int64Array, block: Int64Array, is_attention: BoolArray
) -> BoolArray:
    """Return which rows run while attention of their block does: attention cannot need them, nor they it."""
    start, end = (ops[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
    n_blocks = int(block.max(initial=-1)) + 1
    first, last = np.full(n_blocks, np.iinfo(np.int64).max), np.full(n_blocks, np.iinfo(np.int64).min)
    np.minimum.at(first, block[is_attention], start[is_attention])
    np.maximum.at(last, block[is_attention], end[is_attention])
    return np.asarray((start < last[block]) & (end > first[block]), bool)


def _ring_tensor(
    ops: pd.DataFrame,
    rows: Int64Array,
    order: pd.DataFrame,
    is_backward: BoolArray,
    n_attention: Int64Array,
    n_transfers: Int64Array,
) -> npt.NDArray[np.object_]:
    """Return what travels in each row's transfer, where a ring's pattern tells.

    Forward only K and V do. Backward the gradients take one hop more than K and V, P and P - 1 of 2P - 1; where each
    has a stream of its own, that tells which is which.
    """
    stream = ops["stream"].to_numpy()[rows]
    per_stream = (
        order.assign(stream=stream).groupby(["block", "stream"])["transfer"].transform("sum").to_numpy()
    )
    is_mixed = is_backward & (n_transfers == 2 * n_attention - 1)
    is_known = ~is_mixed | (per_stream < n_transfers)
    is_gradient = is_mixed & (per_stream == n_attention)
    return np.where(is_known, np.where(is_gradient, GRADIENTS, HOP), UNKNOWN).astype(object)


def _is_backward_block(
    ops: pd.DataFrame, rows: Int64Array, block: Int64Array, is_attention: BoolArray
) -> BoolArray:
    """Return which ops lie in a block whose attention goes backward."""
    backward = names_match(ops["name"], _BACKWARD)[rows] & is_attention
    return np.isin(block, block[backward])
