"""All-gather attention: every rank gathers all keys and values and computes its own queries against them.

No partial outputs, so nothing to merge; the price is that all K and V must be there before attention starts.
Backward they are gathered again in place of being kept, and the gradients of all K and V go to their owners in
a reduce-scatter. With `kv_heads` slices (`all_gather_sliced`) the same work is done one KV head at a time, in
two sets of buffers, and the next head is gathered while attention runs on this one.

Under a causal mask rank r holds chunks r and 2P-1-r, and attention runs once per chunk, on the keys up to the
chunk's end.

Shapes: B batch, L local tokens, S all tokens, H query heads, G key/value heads, D head dim; h, g of one slice.
Source: Meta, "The Llama 3 Herd of Models", 2024, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from cptrace.labels import BACKWARD, FORWARD
from instrumented.comm import Collectives
from instrumented.kv_slices import KvSlices, Piece
from instrumented.layout import Layout, contiguous, zigzag
from instrumented.ops import Kernels, Place, Tensors
from instrumented.problem import BATCH, LayerState, Problem
from instrumented.runtime.api import Device
from instrumented.schemes.base import Monitors

N_BUFFERS: Final = 2  # one is read while the other is gathered into


def layout(problem: Problem) -> Layout:
    """Return contiguous chunks, or the zigzag that balances a causal mask."""
    cut = zigzag if problem.is_balanced else contiguous
    return cut(problem.seq_len, problem.cp_size, problem.padded_len)


def make(device: Device, problem: Problem, layers: Sequence[LayerState]) -> AllGatherAttention:
    """Return all-gather attention of all heads at once."""
    return AllGatherAttention(device, problem, layers, n_slices=1)


class AllGatherAttention:
    """All-gather attention of one rank, in slices of KV heads."""

    def __init__(
        self, device: Device, problem: Problem, layers: Sequence[LayerState], *, n_slices: int
    ) -> None:
        """Create streams, communicators and buffers; every rank must do so at the same time."""
        self._device, self._problem, self._layers, self._n_slices = device, problem, layers, n_slices
        self._cut = KvSlices(problem, layout(problem), n_slices)
        self._pieces = self._cut.pieces(device.rank)
        self._compute = device.stream()
        self._kernels = Kernels(device, self._compute, problem.softmax_scale)
        self._gather, self._scatter = Collectives(device, "kv"), Collectives(device, "dkv")
        self._scattered = [device.event() for _ in range(N_BUFFERS)]
        kv_heads = problem.kv_heads // n_slices
        own_shape = (BATCH, problem.local_len, kv_heads, problem.head_dim)
        whole_shape = (BATCH, problem.local_len * problem.cp_size, kv_heads, problem.head_dim)
        if n_slices > 1:  # else the layer's own tensors are sent and received into
            self._own, self._own_gradients = self._buffers(own_shape), self._buffers(own_shape)
        self._kv_BSgD, self._dkv_BSgD = self._buffers(whole_shape), self._buffers(whole_shape)
        self._part_dkv_BSgD = self._pair(whole_shape) if self._cut.n_pieces > 1 else ()
        self._lse_BHL = [device.empty(problem.lse_shape, problem.sum_type) for _ in layers]
        self.monitors = Monitors()

    def forward(self, layer: int) -> None:
        """Queue one layer's forward pass into its `out_BLHD`."""
        self._start_gather(Place(FORWARD, layer, 0))
        for index in range(self._n_slices):
            place = Place(FORWARD, layer, index)
            self._finish_gather(place)
            for piece in self._pieces:
                self._attend(place, piece)

    def backward(self, layer: int) -> None:
        """Queue one layer's backward pass into its `dq_BLHD`, `dk_BLGD` and `dv_BLGD`."""
        self._start_gather(Place(BACKWARD, layer, 0))
        for index in range(self._n_slices):
            place = Place(BACKWARD, layer, index)
            self._finish_gather(place)
            if index >= N_BUFFERS:
                self._finish_scatter(place.at(index - N_BUFFERS))
            for piece in reversed(self._pieces):  # the last one sees the most keys
                self._attend_backward(place, piece)
            self._start_scatter(place)
        for index in range(max(0, self._n_slices - N_BUFFERS), self._n_slices):
            self._finish_scatter(Place(BACKWARD, layer, index))

    def _start_gather(self, place: Place) -> None:
        """Gather a slice, once its own part is packed and the slice two before it is no longer read."""
        state, number = self._layers[place.layer], place.hop % N_BUFFERS
        own: Tensors = (state.k_BLGD, state.v_BLGD)
        if self._n_slices > 1:
            self._kernels.pack(place, self._own[number], self._cut.heads(place.hop, *own), packs="kv")
            own = self._own[number]
        self._gather.after(self._compute)
        whole = self._cut.by_owner(self._kv_BSgD[number])
        self._gather.all_gather(place, "kv", whole, self._cut.by_piece(own))

    def _finish_gather(self, place: Place) -> None:
        """Let attention wait for a slice, and start to gather the next one beside it."""
        self._gather.before(self._compute)
        if place.hop + 1 < self._n_slices:
            self._start_gather(place.at(place.hop + 1))

    def _start_scatter(self, place: Place) -> None:
        """Send the gradients of a slice to their owners."""
        number = place.hop % N_BUFFERS
        self._scatter.after(self._compute)
        own, whole = self._own_gradients_of(place), self._dkv_BSgD[number]
        self._scatter.reduce_scatter(place, "dkv", self._cut.by_piece(own), self._cut.by_owner(whole))
        self._scatter.record(self._scattered[number])

    def _finish_scatter(self, place: Place) -> None:
        """Wait for a slice's gradients and put them where the result wants them."""
        state = self._layers[place.layer]
        self._device.wait_event(self._compute, self._scattered[place.hop % N_BUFFERS])
        if self._n_slices > 1:
            results = self._cut.heads(place.hop, state.dk_BLGD, state.dv_BLGD)
            self._kernels.pack(place, results, self._own_gradients_of(place), unpacks="dkv")

    def _attend(self, place: Place, piece: Piece) -> None:
        (q_BLhD,) = self._cut.queries(place.hop, piece, self._layers[place.layer].q_BLHD)
        k_BSgD, v_BSgD = (tensor[:, piece.keys] for tensor in self._kv_BSgD[place.hop % N_BUFFERS])
        result = self._result_of(place, piece)
        self._kernels.attend(place, (q_BLhD, k_BSgD, v_BSgD), result, is_causal=self._problem.is_causal)

    def _attend_backward(self, place: Place, piece: Piece) -> None:
        """Write the gradients of the keys that a piece sees: the last piece's as they are, others' added."""
        state, number = self._layers[place.layer], place.hop % N_BUFFERS
        is_first, end = piece is self._pieces[-1], piece.keys.stop
        kv_BSgD, dkv_BSgD = self._kv_BSgD[number], self._dkv_BSgD[number]
        if is_first and end < kv_BSgD[0].shape[1]:
            self._kernels.clear(place, tuple(tensor[:, end:] for tensor in dkv_BSgD), packs="dkv")
        totals, parts = (tuple(t[:, :end] for t in pair) for pair in (dkv_BSgD, self._part_dkv_BSgD))
        tensors = (state.dout_BLHD, state.q_BLHD, state.dq_BLHD)
        dout_BLhD, q_BLhD, dq_BLhD = self._cut.queries(place.hop, piece, *tensors)
        k_BSgD, v_BSgD = (tensor[:, :end] for tensor in kv_BSgD)
        saved = (dout_BLhD, q_BLhD, k_BSgD, v_BSgD, *self._result_of(place, piece))
        gradients = (dq_BLhD, *(totals if is_first else parts))
        self._kernels.attend_backward(place, saved, gradients, is_causal=self._problem.is_causal)
        if not is_first:
            self._kernels.merge_gradients(place, totals, parts, is_first=False)

    def _result_of(self, place: Place, piece: Piece) -> tuple[Tensor, Tensor]:
        out_BLHD, lse_BHL = self._layers[place.layer].out_BLHD, self._lse_BHL[place.layer]
        return self._cut.result(place.hop, piece, out_BLHD, lse_BHL)

    def _own_gradients_of(self, place: Place) -> Tensors:
        """Return where a slice's reduced gradients arrive: at once in the result where it is all heads."""
        if self._n_slices > 1:
            return self._own_gradients[place.hop % N_BUFFERS]
        return self._layers[place.layer].dk_BLGD, self._layers[place.layer].dv_BLGD

    def _buffers(self, shape: Sequence[int]) -> list[Tensors]:
        """Return as many pairs of tensors as slices can be under way."""
        return [self._pair(shape) for _ in range(min(N_BUFFERS, self._n_slices))]

    def _pair(self, shape: Sequence[int]) -> Tensors:
        return tuple(self._device.empty(shape, self._problem.data_type) for _ in ("k", "v"))
