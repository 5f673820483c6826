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
from dataclasses import dataclass, replace

from torch import Tensor

from cptrace.labels import BACKWARD, FORWARD
from cptrace.schemes.traffic import HeadChunks
from instrumented.comm import Collectives, Group
from instrumented.heads import HeadPart
from instrumented.layout import Layout, contiguous
from instrumented.ops import Kernels, Place
from instrumented.problem import BATCH, LayerState, Problem
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


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one tensor's all-to-all needs: which heads go where, and a buffer NBLhD of them in rank order."""

    part: HeadPart
    buffer_NBLhD: Tensor


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
        self._n_ranks = self._in.group.size
        self._queries = [self._exchange(problem.heads, chunks.queries, c) for c in range(chunks.queries)]
        self._keys = [
            tuple(self._exchange(problem.kv_heads, chunks.keys, c) for _ in ("k", "v"))
            for c in range(chunks.keys)
        ]
        self._arrived = [device.event() for _ in range(chunks.queries)]
        sizes = self._inner_problem()
        self._states = self._make_states(sizes)
        self._inner = [make_inner(sizes, s, self._compute, c) for c, s in enumerate(self._states)]
        self.monitors = self._inner[0].monitors

    def forward(self, layer: int) -> None:
        """Queue one layer's forward pass into its `out_BLHD`."""
        state = self._layers[layer]
        for chunk in range(self._chunks.queries):
            place, inner = Place(FORWARD, layer, chunk), self._states[chunk][layer]
            self._send_heads(place, "q", self._queries[chunk], state.q_BLHD, inner.q_BLHD)
            if chunk < self._chunks.keys:
                k, v = self._keys[chunk]
                self._send_heads(place, "k", k, state.k_BLGD, inner.k_BLGD)
                self._send_heads(place, "v", v, state.v_BLGD, inner.v_BLGD)
            self._in.record(self._arrived[chunk])
        for chunk, attention in enumerate(self._inner):
            self._device.wait_event(self._compute, self._arrived[chunk])
            attention.forward(layer)
            out_BShD = self._states[chunk][layer].out_BLHD
            self._return_heads(Place(FORWARD, layer, chunk), "out", self._queries[chunk], out_BShD)
        self._out.before(self._compute)
        for chunk, exchange in enumerate(self._queries):
            self._unpack(Place(FORWARD, layer, chunk), exchange, state.out_BLHD)

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
            self._unpack(Place(BACKWARD, layer, chunk), exchange, state.dq_BLHD)
        for chunk, (k, v) in enumerate(self._keys):
            place = Place(BACKWARD, layer, chunk)
            self._unpack(place, k, state.dk_BLGD)
            self._unpack(place, v, state.dv_BLGD)

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
        k, v = self._keys[min(chunk, self._chunks.keys - 1)]
        self._return_heads(place, "dk", k, source.dk_BLGD)
        self._return_heads(place, "dv", v, source.dv_BLGD)

    def _send_heads(
        self, place: Place, name: str, exchange: Exchange, own_BLHD: Tensor, whole_BShD: Tensor
    ) -> None:
        """Pack heads in rank order and send each rank its own; tokens arrive in the order of the ranks."""
        self._kernels.pack_heads(place, exchange.part, exchange.buffer_NBLhD, own_BLHD)
        self._in.after(self._compute)
        sent = exchange.buffer_NBLhD.unbind(0)
        self._in.all_to_all(place, name, whole_BShD.chunk(self._n_ranks, dim=1), sent)

    def _return_heads(self, place: Place, name: str, exchange: Exchange, whole_BShD: Tensor) -> None:
        """Send each rank the tokens that are its own; heads arrive in the order of the ranks."""
        self._out.after(self._compute)
        received = exchange.buffer_NBLhD.unbind(0)
        self._out.all_to_all(place, name, received, whole_BShD.chunk(self._n_ranks, dim=1))

    def _unpack(self, place: Place, exchange: Exchange, own_BLHD: Tensor) -> None:
        self._kernels.unpack_heads(place, exchange.part, own_BLHD, exchange.buffer_NBLhD)

    # ── sizes and buffers ──────────────────────────────────────────────────────────────────────────

    def _exchange(self, heads: int, n_chunks: int, chunk: int) -> Exchange:
        part = HeadPart(self._n_ranks, max(1, self._n_ranks // heads), n_chunks, chunk)
        shape = (self._n_ranks, BATCH, self._problem.local_len, part.piece_heads(heads))
        return Exchange(part, self._device.empty((*shape, self._problem.head_dim), self._problem.data_type))

    def _inner_problem(self) -> Problem:
        queries, keys = self._queries[0].buffer_NBLhD, self._keys[0][0].buffer_NBLhD
        return replace(
            self._problem,
            local_len=self._problem.local_len * self._n_ranks,
            heads=queries.shape[3],
            kv_heads=keys.shape[3],
        )

    def _make_states(self, sizes: Problem) -> list[list[LayerState]]:
        """Return the exchanged tensors by chunk and layer.

        Inputs and output are kept per layer for the backward pass, whose own tensors all layers share. Chunks
        share k and v where the keys are not cut.
        """
        kv = [self._tensors(sizes, sizes.kv_shape, 2) for _ in self._layers for _ in range(self._chunks.keys)]
        states = []
        for chunk in range(self._chunks.queries):
            dout, dq = self._tensors(sizes, sizes.q_shape, 2)
            dk, dv = self._tensors(sizes, sizes.kv_shape, 2)
            own_kv = kv[min(chunk, self._chunks.keys - 1) :: self._chunks.keys]
            own_q = [self._tensors(sizes, sizes.q_shape, 2) for _ in self._layers]
            pairs = zip(own_q, own_kv, strict=True)
            states.append([LayerState(q, k, v, dout, out, dq, dk, dv) for (q, out), (k, v) in pairs])
        return states

    def _tensors(self, sizes: Problem, shape: Sequence[int], count: int) -> list[Tensor]:
        return [self._device.empty(shape, sizes.data_type) for _ in range(count)]
