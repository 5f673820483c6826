"""Ulysses: all-to-alls give each rank all tokens of a part of the heads, and attention needs no exchange.

Forward, q, k and v are brought into rank order (a copy), exchanged, attended to, and the output goes back the
same way. Backward runs the same in the opposite direction; the exchanged q, k, v and out are kept for it, which
is the memory that the scheme costs. Attention cannot start before its inputs are there nor the last exchange
before attention ends: data flow puts each all-to-all where nothing can hide it.

With several chunks (`ulysses_chunked`) heads are cut further, and one chunk's exchanges run beside another
one's attention. What attends is any scheme over the exchanged tensors; `usp` puts a ring there.

Shapes: B batch, L local tokens, S the group's tokens, H query heads, G key/value heads, D head dim, N ranks of
the group; h, g the heads of one rank and chunk.
Source: Jacobs et al., "DeepSpeed Ulysses", 2023, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from cptrace.labels import BACKWARD, FORWARD
from cptrace.schemes.traffic import HeadChunks
from instrumented.comm import Collectives, Group
from instrumented.exchanged import Exchange, make_exchanges, make_states
from instrumented.layout import Layout, contiguous
from instrumented.ops import Kernels, Place
from instrumented.problem import LayerState, Problem
from instrumented.runtime.api import Device, Stream
from instrumented.schemes.base import Attention
from instrumented.schemes.single import SingleAttention

MakeInner = Callable[[Problem, Sequence[LayerState], Stream, int], Attention]
"""Makes what attends to exchanged tensors: from sizes, layers, the compute stream and the chunk's number."""


def layout(problem: Problem) -> Layout:
    """Return the contiguous layout, which exchanged heads see in order."""
    return contiguous(problem.seq_len, problem.cp_size)


def make(device: Device, problem: Problem, layers: Sequence[LayerState]) -> UlyssesAttention:
    """Return Ulysses over all ranks, all heads at once."""
    return UlyssesAttention(device, problem, layers, make_single(device))


def make_single(device: Device) -> MakeInner:
    """Return what attends where a group holds the whole sequence."""

    def make_inner(
        problem: Problem, layers: Sequence[LayerState], compute: Stream, chunk: int
    ) -> SingleAttention:
        return SingleAttention(device, replace(problem, cp_size=1), layers, compute=compute, hop=chunk)

    return make_inner


class UlyssesAttention:
    """Ulysses attention of one rank."""

    def __init__(
        self,
        device: Device,
        problem: Problem,
        layers: Sequence[LayerState],
        make_inner: MakeInner,
        *,
        group: Group | None = None,
        chunks: HeadChunks = HeadChunks(1, 1),  # noqa: B008 - a tuple of numbers
    ) -> None:
        """Create streams, communicators and buffers; every rank must do so at the same time.

        Args:
            device: This rank's device.
            problem: Sizes of one rank.
            layers: The tensors of each layer.
            make_inner: Makes what attends to exchanged tensors.
            group: The ranks that exchange heads; None for all.
            chunks: Into how many parts a rank's heads are cut.
        """
        self._device, self._problem, self._layers, self._chunks = device, problem, layers, chunks
        self._compute = device.stream()
        self._kernels = Kernels(device, self._compute, problem.softmax_scale)
        self._in = Collectives(device, "in", group)
        # Work that waits for attention must not hold up inputs that need not: a chunked run needs two.
        self._out = self._in if chunks.queries == 1 else Collectives(device, "out", group)
        self._n_ranks = size = self._in.group.size
        self._queries = make_exchanges(device, problem, size, problem.heads, chunks.queries)
        self._k, self._v = (
            make_exchanges(device, problem, size, problem.kv_heads, chunks.keys) for _ in ("k", "v")
        )
        self._arrived = [device.event() for _ in range(chunks.queries)]
        heads, kv_heads = self._queries[0].heads, self._k[0].heads
        sizes = replace(problem, local_len=problem.local_len * size, heads=heads, kv_heads=kv_heads)
        self._states = make_states(device, sizes, len(layers), chunks)
        self._inner = [make_inner(sizes, s, self._compute, c) for c, s in enumerate(self._states)]
        self.monitors = self._inner[0].monitors

    def forward(self, layer: int) -> None:
        """Queue one layer's forward pass into its `out_BLHD`."""
        state = self._layers[layer]
        for chunk in range(self._chunks.queries):
            place, inner = Place(FORWARD, layer, chunk), self._states[chunk][layer]
            self._send_heads(place, "q", self._queries[chunk], state.q_BLHD, inner.q_BLHD)
            if chunk < self._chunks.keys:
                self._send_heads(place, "k", self._k[chunk], state.k_BLGD, inner.k_BLGD)
                self._send_heads(place, "v", self._v[chunk], state.v_BLGD, inner.v_BLGD)
            self._in.record(self._arrived[chunk])
        for chunk, attention in enumerate(self._inner):
            self._device.wait_event(self._compute, self._arrived[chunk])
            attention.forward(layer)
            out_BShD = self._states[chunk][layer].out_BLHD
            self._return_heads(Place(FORWARD, layer, chunk), "out", self._queries[chunk], out_BShD)
        self._out.before(self._compute)
        for chunk, exchange in enumerate(self._queries):
            self._unpack(Place(FORWARD, layer, chunk), "out", exchange, state.out_BLHD)

    def backward(self, layer: int) -> None:
        """Queue one layer's backward pass into its `dq_BLHD`, `dk_BLGD` and `dv_BLGD`."""
        state = self._layers[layer]
        for chunk, exchange in enumerate(self._queries):
            place, inner = Place(BACKWARD, layer, chunk), self._states[chunk][layer]
            self._send_heads(place, "dout", exchange, state.dout_BLHD, inner.dout_BLHD)
            self._in.record(self._arrived[chunk])
        for chunk, attention in enumerate(self._inner):
            self._device.wait_event(self._compute, self._arrived[chunk])
            attention.backward(layer)
            self._return_gradients(Place(BACKWARD, layer, chunk))
        self._out.before(self._compute)
        for chunk, exchange in enumerate(self._queries):
            self._unpack(Place(BACKWARD, layer, chunk), "dq", exchange, state.dq_BLHD)
        for name, exchanges, own_BLGD in (("dk", self._k, state.dk_BLGD), ("dv", self._v, state.dv_BLGD)):
            for chunk, exchange in enumerate(exchanges):
                self._unpack(Place(BACKWARD, layer, chunk), name, exchange, own_BLGD)

    def _return_gradients(self, place: Place) -> None:
        """Send a chunk's gradients back; where chunks share keys, their sum after the last one."""
        chunk, inner = place.hop, self._states[place.hop][place.layer]
        self._return_heads(place, "dq", self._queries[chunk], inner.dq_BLHD)
        first = self._states[0][place.layer]
        if self._chunks.keys == 1 and chunk > 0:
            sums, parts = (first.dk_BLGD, first.dv_BLGD), (inner.dk_BLGD, inner.dv_BLGD)
            self._kernels.merge_gradients(place, sums, parts, is_first=False)
        if self._chunks.keys == 1 and chunk + 1 < self._chunks.queries:
            return
        source = first if self._chunks.keys == 1 else inner
        number = min(chunk, self._chunks.keys - 1)
        self._return_heads(place, "dk", self._k[number], source.dk_BLGD)
        self._return_heads(place, "dv", self._v[number], source.dv_BLGD)

    def _send_heads(
        self, place: Place, name: str, exchange: Exchange, own_BLHD: Tensor, whole_BShD: Tensor
    ) -> None:
        """Pack heads in rank order and send each rank its own; tokens arrive in the order of the ranks."""
        self._kernels.pack_heads(place, exchange.part, exchange.buffer_NBLhD, own_BLHD, packs=name)
        self._in.after(self._compute)
        self._in.all_to_all(place, name, whole_BShD.chunk(self._n_ranks, dim=1), exchange.pieces)

    def _return_heads(self, place: Place, name: str, exchange: Exchange, whole_BShD: Tensor) -> None:
        """Send each rank the tokens that are its own; heads arrive in the order of the ranks."""
        self._out.after(self._compute)
        self._out.all_to_all(place, name, exchange.pieces, whole_BShD.chunk(self._n_ranks, dim=1))

    def _unpack(self, place: Place, name: str, exchange: Exchange, own_BLHD: Tensor) -> None:
        self._kernels.unpack_heads(place, exchange.part, own_BLHD, exchange.buffer_NBLhD, unpacks=name)
