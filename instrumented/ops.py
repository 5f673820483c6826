"""The ops that schemes launch: each has a name, a label, a cost and a body that fills given tensors.

Costs: attention counts two matrix products forward and five backward, 2*L*S*H*D operations each, half of
that on a causal diagonal block. The others are bound by memory traffic, every operand once.

Shapes: B batch, L query tokens, S key tokens, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from cptrace import labels
from instrumented.block import block_attention_backward, block_attention_forward
from instrumented.runtime.api import Cost, Device, Stream
from instrumented.softmax import RunningMaxMonitor, merge_into

ATTENTION_FORWARD: Final = "cptrace_cpu::flash_attention_forward"
ATTENTION_BACKWARD: Final = "cptrace_cpu::flash_attention_backward"
MERGE_OUT: Final = "cptrace_cpu::merge_partial_out"
MERGE_GRADIENTS: Final = "cptrace_cpu::merge_partial_gradients"
CONVERT: Final = "cptrace_cpu::convert_dtype"

_PRODUCTS_FORWARD: Final = 2
_PRODUCTS_BACKWARD: Final = 5


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a step an op belongs."""

    pass_name: str
    layer: int
    hop: int

    def label(self, name: str, **fields: int | str | tuple[int, ...]) -> str:
        """Return the NVTX label of an op here."""
        where: dict[str, int | str | tuple[int, ...]] = {
            "pass": self.pass_name,
            "layer": self.layer,
            "hop": self.hop,
        }
        return labels.format_label(name, **where, **fields)


def attention_forward(
    device: Device,
    stream: Stream,
    place: Place,
    qkv: tuple[Tensor, Tensor, Tensor],
    result: tuple[Tensor, Tensor],
    *,
    is_causal: bool,
    softmax_scale: float,
) -> None:
    """Launch a block's forward pass from (q, k, v) into (out_BLHD, lse_BHL)."""

    def body() -> None:
        block = block_attention_forward(*qkv, is_causal=is_causal, softmax_scale=softmax_scale)
        _store(result, block)

    cost = Cost(flops=_attention_flops(qkv[0], qkv[1], _PRODUCTS_FORWARD, is_causal))
    with device.range(place.label(labels.ATTENTION), payload=place.hop, category=labels.ATTENTION):
        device.launch(stream, ATTENTION_FORWARD, body, cost=cost)


def attention_backward(
    device: Device,
    stream: Stream,
    place: Place,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    result: tuple[Tensor, Tensor, Tensor],
    *,
    is_causal: bool,
    softmax_scale: float,
) -> None:
    """Launch a block's backward pass from (dout, q, k, v, out, lse) into its parts of (dq, dk, dv)."""

    def body() -> None:
        block = block_attention_backward(*saved, is_causal=is_causal, softmax_scale=softmax_scale)
        _store(result, block)

    cost = Cost(flops=_attention_flops(saved[1], saved[2], _PRODUCTS_BACKWARD, is_causal))
    with device.range(place.label(labels.ATTENTION), payload=place.hop, category=labels.ATTENTION):
        device.launch(stream, ATTENTION_BACKWARD, body, cost=cost)


def merge_out(
    device: Device,
    stream: Stream,
    place: Place,
    total: tuple[Tensor, Tensor],
    part: tuple[Tensor, Tensor],
    *,
    is_first: bool,
    monitor: RunningMaxMonitor,
) -> None:
    """Launch the merge of a block's (out, lse) into the running ones; the first block replaces them."""

    def body() -> None:
        if is_first:
            _store(total, part)
            monitor.observe(part[1], part[1], total[1])
            return
        before_BHL = total[1].clone()
        merge_into(*total, *part)
        monitor.observe(before_BHL, part[1], total[1])

    n_total = 1 if is_first else 2  # written, or read and written
    cost = Cost(memory_bytes=n_total * _n_bytes(*total) + _n_bytes(*part))
    with device.range(place.label(labels.MERGE), payload=place.hop, category=labels.MERGE):
        device.launch(stream, MERGE_OUT, body, cost=cost)


def merge_gradients(
    device: Device,
    stream: Stream,
    place: Place,
    totals: tuple[Tensor, ...],
    parts: tuple[Tensor, ...],
    are_first: tuple[bool, ...],
) -> None:
    """Launch the addition of parts to running sums; where it is the first part, it replaces the sum."""

    def body() -> None:
        for total, part, is_first in zip(totals, parts, are_first, strict=True):
            if is_first:
                total.copy_(part)
            else:
                total.add_(part)

    reads = (total for total, is_first in zip(totals, are_first, strict=True) if not is_first)
    cost = Cost(memory_bytes=_n_bytes(*totals, *parts, *reads))
    with device.range(place.label(labels.MERGE), payload=place.hop, category=labels.MERGE):
        device.launch(stream, MERGE_GRADIENTS, body, cost=cost)


def convert(
    device: Device, stream: Stream, place: Place, targets: tuple[Tensor, ...], sources: tuple[Tensor, ...]
) -> None:
    """Launch the conversion of running sums into the results' data type."""
    cost = Cost(memory_bytes=_n_bytes(*targets, *sources))
    with device.range(place.label(labels.COPY), payload=place.hop, category=labels.COPY):
        device.launch(stream, CONVERT, _store, targets, sources, cost=cost)


def _store(targets: tuple[Tensor, ...], sources: tuple[Tensor, ...]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _attention_flops(q_BLHD: Tensor, k_BSGD: Tensor, n_products: int, is_causal: bool) -> int:
    batch, n_queries, heads, head_dim = q_BLHD.shape
    flops = n_products * 2 * batch * n_queries * k_BSGD.shape[1] * heads * head_dim
    return flops // 2 if is_causal else flops


def _n_bytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)
