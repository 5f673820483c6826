"""The ops that schemes launch: each has a name, a label, a cost and a body that fills given tensors.

Costs: attention counts two matrix products forward and five backward, 2*L*S*H*D operations each, half of that
for the square that a causal diagonal cuts. The others are bound by memory traffic, every operand once.

Shapes: B batch, L query tokens, S key tokens, H query heads, G key/value heads, D head dim, N ranks,
h heads of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from cptrace import labels
from instrumented import heads
from instrumented.block import block_attention_backward, block_attention_forward
from instrumented.heads import HeadPart
from instrumented.runtime.api import Cost, Device, Stream
from instrumented.softmax import RunningMaxMonitor, merge_into

ATTENTION_FORWARD: Final = "cptrace_cpu::flash_attention_forward"
ATTENTION_BACKWARD: Final = "cptrace_cpu::flash_attention_backward"
MERGE_OUT: Final = "cptrace_cpu::merge_partial_out"
MERGE_GRADIENTS: Final = "cptrace_cpu::merge_partial_gradients"
CONVERT: Final = "cptrace_cpu::convert_dtype"
FILL: Final = "cptrace_cpu::fill"
PACK: Final = "cptrace_cpu::pack"
PACK_HEADS: Final = "cptrace_cpu::pack_heads"
UNPACK_HEADS: Final = "cptrace_cpu::unpack_heads"

_PRODUCTS_FORWARD: Final = 2
_PRODUCTS_BACKWARD: Final = 5

Tensors = tuple[Tensor, ...]


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

    def at(self, hop: int) -> Place:
        """Return the place of another hop of the same pass and layer."""
        return Place(self.pass_name, self.layer, hop)


@dataclass(frozen=True, slots=True)
class Kernels:
    """Launches ops on one stream of a device."""

    device: Device
    stream: Stream
    softmax_scale: float

    def attend(
        self, place: Place, qkv: tuple[Tensor, Tensor, Tensor], result: Tensors, *, is_causal: bool
    ) -> None:
        """Launch a block's forward pass from (q, k, v) into (out_BLHD, lse_BHL)."""

        def body() -> None:
            block = block_attention_forward(*qkv, is_causal=is_causal, softmax_scale=self.softmax_scale)
            _store(result, block)

        cost = Cost(flops=_attention_flops(qkv[0], qkv[1], _PRODUCTS_FORWARD, is_causal))
        self._launch(place, labels.ATTENTION, ATTENTION_FORWARD, body, cost)

    def attend_backward(
        self,
        place: Place,
        saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        result: Tensors,
        *,
        is_causal: bool,
    ) -> None:
        """Launch a block's backward pass from (dout, q, k, v, out, lse) into its parts of (dq, dk, dv)."""

        def body() -> None:
            block = block_attention_backward(*saved, is_causal=is_causal, softmax_scale=self.softmax_scale)
            _store(result, block)

        cost = Cost(flops=_attention_flops(saved[1], saved[2], _PRODUCTS_BACKWARD, is_causal))
        self._launch(place, labels.ATTENTION, ATTENTION_BACKWARD, body, cost)

    def merge_out(
        self,
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
                monitor.observe(part[1], part[1], total[1], layer=place.layer)
                return
            before_BHL = total[1].clone()
            merge_into(*total, *part)
            monitor.observe(before_BHL, part[1], total[1], layer=place.layer)

        n_total = 1 if is_first else 2  # written, or read and written
        cost = Cost(memory_bytes=n_total * _n_bytes(*total) + _n_bytes(*part))
        self._launch(place, labels.MERGE, MERGE_OUT, body, cost)

    def merge_gradients(self, place: Place, totals: Tensors, parts: Tensors, *, is_first: bool) -> None:
        """Launch the addition of parts to running sums; the first parts replace them."""

        def body() -> None:
            for total, part in zip(totals, parts, strict=True):
                if is_first:
                    total.copy_(part)
                else:
                    total.add_(part)

        n_total = 1 if is_first else 2
        cost = Cost(memory_bytes=n_total * _n_bytes(*totals) + _n_bytes(*parts))
        self._launch(place, labels.MERGE, MERGE_GRADIENTS, body, cost)

    def convert(self, place: Place, targets: Tensors, sources: Tensors, **purpose: str) -> None:
        """Launch the conversion of running sums into the results' data type."""
        self.move(place, CONVERT, lambda: _store(targets, sources), (*targets, *sources), **purpose)

    def pack(self, place: Place, targets: Tensors, sources: Tensors, **purpose: str) -> None:
        """Launch a copy between tensors of which one side is scattered in memory."""
        self.move(place, PACK, lambda: _store(targets, sources), (*targets, *sources), **purpose)

    def clear(self, place: Place, tensors: Tensors, **purpose: str) -> None:
        """Launch the filling of tensors with zeros."""

        def body() -> None:
            for tensor in tensors:
                tensor.zero_()

        self.move(place, FILL, body, tensors, **purpose)

    def clear_result(self, place: Place, result: tuple[Tensor, Tensor]) -> None:
        """Launch the emptying of a running (out, lse): the result of attention to no key."""

        def body() -> None:
            result[0].zero_()
            result[1].fill_(-math.inf)

        self.move(place, FILL, body, result)

    def pack_heads(
        self, place: Place, part: HeadPart, target_NBLhD: Tensor, source_BLHD: Tensor, **purpose: str
    ) -> None:
        """Launch the copy that brings heads into the order in which an all-to-all sends them."""
        touched = (target_NBLhD, part.view(source_BLHD))
        self.move(place, PACK_HEADS, lambda: heads.pack(part, target_NBLhD, source_BLHD), touched, **purpose)

    def unpack_heads(
        self, place: Place, part: HeadPart, target_BLHD: Tensor, source_NBLhD: Tensor, **purpose: str
    ) -> None:
        """Launch the copy that brings heads back from the order in which they arrive."""
        touched = (part.view(target_BLHD), source_NBLhD)
        self.move(
            place, UNPACK_HEADS, lambda: heads.unpack(part, target_BLHD, source_NBLhD), touched, **purpose
        )

    def move(
        self, place: Place, name: str, body: Callable[[], None], touched: Tensors, **purpose: str
    ) -> None:
        """Launch a kernel that moves data, and touches each of the given tensors once.

        Args:
            place: Where in the step it belongs.
            name: The kernel's name.
            body: Moves the data.
            touched: What it reads and writes.
            **purpose: `packs` or `unpacks`, and which transfer's data it prepares, or reads once it has arrived.
        """
        self._launch(place, labels.COPY, name, body, Cost(memory_bytes=_n_bytes(*touched)), **purpose)

    def _launch(
        self, place: Place, label: str, name: str, body: Callable[[], None], cost: Cost, **fields: str
    ) -> None:
        with self.device.range(place.label(label, **fields), payload=place.hop, category=label):
            self.device.launch(self.stream, name, body, cost=cost)


def _store(targets: Tensors, sources: Tensors) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _attention_flops(q_BLHD: Tensor, k_BSGD: Tensor, n_products: int, is_causal: bool) -> int:
    batch, n_queries, n_heads, head_dim = q_BLHD.shape
    n_pairs = n_queries * k_BSGD.shape[1]
    if is_causal:
        n_pairs -= n_queries * n_queries // 2
    return n_products * 2 * batch * n_pairs * n_heads * head_dim


def _n_bytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)
