"""Ring attention: each rank keeps its queries; keys and values travel round the ring, one hop per block.

Hop i works on the chunk of rank r - i. While attention runs on it, the next chunk arrives in the other of two
buffers, so a transfer is ordered only by the arrival of what it sends and by the last reader of what it
overwrites. Backward, the gradients of K and V travel with their chunk, on a communicator of their own (one
communicator would run the two transfers one after another), and the last hop brings them home.

Shapes: B batch, L local tokens, H query heads, G key/value heads, D head dim.
Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cptrace.labels import BACKWARD, FORWARD
from instrumented import ops
from instrumented.comm import RingExchange, Slot
from instrumented.ops import Place
from instrumented.problem import LayerState, Problem
from instrumented.runtime.api import Device
from instrumented.softmax import RunningMaxMonitor

N_BUFFERS = 2  # one is read while the other receives


class RingAttention:
    """Ring attention of one rank over any number of layers, contiguous layout."""

    def __init__(self, device: Device, problem: Problem, layers: Sequence[LayerState]) -> None:
        """Create streams, communicators and buffers; every rank must do so at the same time."""
        self._device, self._problem, self._layers = device, problem, layers
        self._compute = device.stream()
        kv_shapes = (problem.kv_shape, problem.kv_shape)
        self._kv = RingExchange(device, "kv")
        self._kv_slots = self._kv.slots(N_BUFFERS, kv_shapes, problem.data_type)
        self._dkv = RingExchange(device, "dkv")
        self._dkv_slots = self._dkv.slots(N_BUFFERS, kv_shapes, problem.sum_type)
        self._kv_ready, self._dkv_ready = device.event(), device.event()
        self._out_sum_BLHD = device.empty(problem.q_shape, problem.sum_type)
        self._dq_sum_BLHD = device.empty(problem.q_shape, problem.sum_type)
        self._part_BLHD = device.empty(problem.q_shape, problem.data_type)
        self._part_lse_BHL = device.empty(problem.lse_shape, problem.sum_type)
        self._part_dkv = tuple(device.empty(shape, problem.data_type) for shape in kv_shapes)
        self.monitor = RunningMaxMonitor()

    def forward(self, layer: int) -> None:
        """Queue one layer's forward pass into its `out_BLHD` and `lse_BHL`."""
        state = self._layers[layer]
        total, part = (self._out_sum_BLHD, state.lse_BHL), (self._part_BLHD, self._part_lse_BHL)
        self._announce_own_kv()
        for hop in range(self._problem.cp_size):
            place = Place(FORWARD, layer, hop)
            chunk_BLGD = self._acquire_kv(state, hop)
            if not self._is_masked(hop):
                self._attend(place, (state.q_BLHD, *chunk_BLGD), part)
            self._send_kv_on(place, chunk_BLGD)
            if not self._is_masked(hop):
                ops.merge_out(
                    self._device, self._compute, place, total, part, is_first=hop == 0, monitor=self.monitor
                )
        last = Place(FORWARD, layer, self._problem.cp_size - 1)
        ops.convert(self._device, self._compute, last, (state.out_BLHD,), (self._out_sum_BLHD,))

    def backward(self, layer: int) -> None:
        """Queue one layer's backward pass into its `dq_BLHD`, `dk_BLGD` and `dv_BLGD`."""
        state, n_hops = self._layers[layer], self._problem.cp_size
        self._announce_own_kv()
        for hop in range(n_hops):
            place = Place(BACKWARD, layer, hop)
            chunk_BLGD = self._acquire_kv(state, hop)
            if not self._is_masked(hop):
                self._attend_backward(place, state, chunk_BLGD)
            self._send_kv_on(place, chunk_BLGD)
            self._add_gradients(place)
            self._send_dkv_on(place)
        home = self._dkv_slots[n_hops % N_BUFFERS]
        self._dkv.acquire(home, self._compute)
        results = (state.dq_BLHD, state.dk_BLGD, state.dv_BLGD)
        last = Place(BACKWARD, layer, n_hops - 1)
        ops.convert(self._device, self._compute, last, results, (self._dq_sum_BLHD, *home.tensors))
        self._dkv.release(home, self._compute)

    def _is_masked(self, hop: int) -> bool:
        """Whether this hop's chunk lies wholly after this rank's queries."""
        return self._problem.is_causal and hop > self._device.rank

    def _is_diagonal(self, hop: int) -> bool:
        return self._problem.is_causal and hop == 0

    def _announce_own_kv(self) -> None:
        """Let the first exchange wait for what computed this layer's k and v."""
        self._device.record_event(self._kv_ready, self._compute)
        self._kv.wait_for(self._kv_ready)

    def _kv_slot(self, hop: int) -> Slot:
        return self._kv_slots[hop % N_BUFFERS]

    def _acquire_kv(self, state: LayerState, hop: int) -> tuple[Tensor, ...]:
        """Return the (k, v) of a hop, for the compute stream to read; at hop 0 they are the rank's own."""
        if hop == 0:
            return state.k_BLGD, state.v_BLGD
        slot = self._kv_slot(hop)
        if self._is_masked(hop):
            self._kv.pass_over(slot)
        else:
            self._kv.acquire(slot, self._compute)
        return slot.tensors

    def _send_kv_on(self, place: Place, chunk_BLGD: tuple[Tensor, ...]) -> None:
        """Free the hop's buffer for the hop after next, and send its chunk on unless this hop is the last."""
        hop = place.hop
        if hop > 0 and not self._is_masked(hop):
            self._kv.release(self._kv_slot(hop), self._compute)
        if hop + 1 < self._problem.cp_size:
            source = self._kv_slot(hop) if hop > 0 else chunk_BLGD
            self._kv.post(place, source, self._kv_slot(hop + 1))

    def _attend(self, place: Place, qkv: tuple[Tensor, ...], part: tuple[Tensor, Tensor]) -> None:
        scale = self._problem.softmax_scale
        causal = self._is_diagonal(place.hop)
        ops.attention_forward(
            self._device, self._compute, place, qkv, part, is_causal=causal, softmax_scale=scale
        )

    def _attend_backward(self, place: Place, state: LayerState, chunk_BLGD: tuple[Tensor, ...]) -> None:
        saved = (state.dout_BLHD, state.q_BLHD, *chunk_BLGD, state.out_BLHD, state.lse_BHL)
        parts = (self._part_BLHD, *self._part_dkv)
        scale = self._problem.softmax_scale
        causal = self._is_diagonal(place.hop)
        ops.attention_backward(
            self._device, self._compute, place, saved, parts, is_causal=causal, softmax_scale=scale
        )

    def _add_gradients(self, place: Place) -> None:
        """Add this hop's parts to dq, and to the dk and dv that arrived with the chunk."""
        slot, is_first = self._dkv_slots[place.hop % N_BUFFERS], place.hop == 0
        if self._is_masked(place.hop):
            self._dkv.pass_over(slot)
            return
        if not is_first:
            self._dkv.acquire(slot, self._compute)
        totals = (self._dq_sum_BLHD, *slot.tensors)
        parts = (self._part_BLHD, *self._part_dkv)
        ops.merge_gradients(self._device, self._compute, place, totals, parts, (is_first,) * 3)
        if not is_first:
            self._dkv.release(slot, self._compute)

    def _send_dkv_on(self, place: Place) -> None:
        """Send the gradients to the next holder of the chunk; after the last hop that is its owner."""
        if not self._is_masked(place.hop):
            self._device.record_event(self._dkv_ready, self._compute)
            self._dkv.wait_for(self._dkv_ready)
        source = self._dkv_slots[place.hop % N_BUFFERS]
        target = self._dkv_slots[(place.hop + 1) % N_BUFFERS]
        self._dkv.post(place, source.tensors, target)
