"""Ring attention: each rank keeps its queries; keys and values travel round the ring, one hop per block.

Hop i works on the chunk of rank r - i. While attention runs on it, the next chunk arrives in the other of two
buffers, so a transfer is ordered only by the arrival of what it sends and by the last reader of what it
overwrites. Backward, the gradients of K and V travel with their chunk, on a communicator of their own (one
communicator would run the two transfers one after another), and the last hop brings them home.

Which part of a chunk a rank sees depends on the layout alone; `zigzag_ring` and `striped_ring` run this loop.

Shapes: B batch, L local tokens, H query heads, G key/value heads, D head dim.
Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cptrace.labels import BACKWARD, FORWARD
from instrumented.blocks import Block, Visible, visible_blocks
from instrumented.comm import Group, RingExchange, Slot
from instrumented.layout import Layout, contiguous
from instrumented.ops import Kernels, Place, Tensors
from instrumented.problem import LayerState, Problem
from instrumented.runtime.api import Device, Stream
from instrumented.schemes.base import Monitors

N_BUFFERS = 2  # one is read while the other receives


def layout(problem: Problem) -> Layout:
    """Return the contiguous layout."""
    return contiguous(problem.seq_len, problem.cp_size)


def make(device: Device, problem: Problem, layers: Sequence[LayerState]) -> RingAttention:
    """Return the ring over contiguous chunks."""
    visible = visible_blocks(layout(problem), is_causal=problem.is_causal)
    return RingAttention(device, problem, layers, visible)


class RingAttention:
    """Ring attention of one rank over any number of layers."""

    def __init__(
        self,
        device: Device,
        problem: Problem,
        layers: Sequence[LayerState],
        visible: Visible,
        *,
        group: Group | None = None,
        compute: Stream | None = None,
    ) -> None:
        """Create streams, communicators and buffers; every rank must do so at the same time.

        Args:
            device: This rank's device.
            problem: Sizes; `cp_size` is that of the ring.
            layers: The tensors of each layer.
            visible: Which block of a chunk each rank sees, by their numbers in the ring.
            group: The ring; None for all ranks.
            compute: The stream to compute on; None for a new one.
        """
        self._problem, self._layers = problem, layers
        self._compute = device.stream() if compute is None else compute
        self._kernels = Kernels(device, self._compute, problem.softmax_scale)
        kv_shapes = (problem.kv_shape, problem.kv_shape)
        self._kv = RingExchange(device, "kv", group)
        self._kv_slots = self._kv.slots(N_BUFFERS, kv_shapes, problem.data_type)
        self._dkv = RingExchange(device, "dkv", group)
        self._dkv_slots = self._dkv.slots(N_BUFFERS, kv_shapes, problem.sum_type)
        self._lse_BHL = [device.empty(problem.lse_shape, problem.sum_type) for _ in layers]
        self._out_sum_BLHD = device.empty(problem.q_shape, problem.sum_type)
        self._dq_sum_BLHD = device.empty(problem.q_shape, problem.sum_type)
        self._part_BLHD = device.empty(problem.q_shape, problem.data_type)
        self._part_lse_BHL = device.empty(problem.lse_shape, problem.sum_type)
        self._part_dkv = tuple(device.empty(shape, problem.data_type) for shape in kv_shapes)
        me, size = self._kv.group.index, self._kv.group.size
        self._blocks = [visible(me, (me - hop) % size) for hop in range(size)]
        # Then the first hop replaces what the sums hold; else they must be emptied before it.
        self._starts_whole = self._blocks[0] is not None and self._blocks[0].is_whole(problem.local_len)
        self.monitors = Monitors()

    def forward(self, layer: int) -> None:
        """Queue one layer's forward pass into its `out_BLHD`."""
        state, n_hops = self._layers[layer], self._problem.cp_size
        total = (self._out_sum_BLHD, self._lse_BHL[layer])
        if not self._starts_whole:
            self._kernels.clear_result(Place(FORWARD, layer, 0), total)
        self._kv.after(self._compute)
        for hop, block in enumerate(self._blocks):
            place = Place(FORWARD, layer, hop)
            chunk_BLGD = self._acquire_kv(state, hop)
            if block:
                self._attend(place, block, state, chunk_BLGD)
            self._send_kv_on(place, chunk_BLGD)
            if block:
                self._merge(place, block, total)
        last = Place(FORWARD, layer, n_hops - 1)
        self._kernels.convert(last, (state.out_BLHD,), (self._out_sum_BLHD,))

    def backward(self, layer: int) -> None:
        """Queue one layer's backward pass into its `dq_BLHD`, `dk_BLGD` and `dv_BLGD`."""
        state, n_hops = self._layers[layer], self._problem.cp_size
        if not self._starts_whole:
            self._kernels.clear(Place(BACKWARD, layer, 0), (self._dq_sum_BLHD, *self._dkv_slots[0].tensors))
        self._kv.after(self._compute)
        for hop, block in enumerate(self._blocks):
            place = Place(BACKWARD, layer, hop)
            chunk_BLGD = self._acquire_kv(state, hop)
            if block:
                self._attend_backward(place, block, state, chunk_BLGD)
            self._send_kv_on(place, chunk_BLGD)
            self._add_gradients(place, block)
            self._send_dkv_on(place)
        home = self._dkv_slots[n_hops % N_BUFFERS]
        self._dkv.acquire(home, self._compute)
        results = (state.dq_BLHD, state.dk_BLGD, state.dv_BLGD)
        last = Place(BACKWARD, layer, n_hops - 1)
        self._kernels.convert(last, results, (self._dq_sum_BLHD, *home.tensors), unpacks="dkv")
        self._dkv.release(home, self._compute)

    def _acquire_kv(self, state: LayerState, hop: int) -> Tensors:
        """Return the (k, v) of a hop, for the compute stream to read; at hop 0 they are the rank's own."""
        if hop == 0:
            return state.k_BLGD, state.v_BLGD
        slot = self._kv_slots[hop % N_BUFFERS]
        if self._blocks[hop]:
            self._kv.acquire(slot, self._compute)
        else:
            self._kv.pass_over(slot)
        return slot.tensors

    def _send_kv_on(self, place: Place, chunk_BLGD: Tensors) -> None:
        """Free the hop's buffer for the hop after next, and send its chunk on unless this hop is the last."""
        hop, slot = place.hop, self._kv_slots[place.hop % N_BUFFERS]
        if hop > 0 and self._blocks[hop]:
            self._kv.release(slot, self._compute)
        if hop + 1 < self._problem.cp_size:
            source: Slot | Tensors = slot if hop > 0 else chunk_BLGD
            self._kv.post(place, source, self._kv_slots[(hop + 1) % N_BUFFERS])

    def _attend(self, place: Place, block: Block, state: LayerState, chunk_BLGD: Tensors) -> None:
        k_BLGD, v_BLGD = map(block.of_keys, chunk_BLGD)
        qkv = (block.of_queries(state.q_BLHD), k_BLGD, v_BLGD)
        part = block.of_result((self._part_BLHD, self._part_lse_BHL))
        self._kernels.attend(place, qkv, part, is_causal=block.is_causal)

    def _merge(self, place: Place, block: Block, total: tuple[Tensor, Tensor]) -> None:
        part = block.of_result((self._part_BLHD, self._part_lse_BHL))
        is_first, monitor = place.hop == 0 and self._starts_whole, self.monitors.running_max
        self._kernels.merge_out(place, block.of_result(total), part, is_first=is_first, monitor=monitor)

    def _attend_backward(self, place: Place, block: Block, state: LayerState, chunk_BLGD: Tensors) -> None:
        queries = (block.of_queries(state.dout_BLHD), block.of_queries(state.q_BLHD))
        k_BLGD, v_BLGD = map(block.of_keys, chunk_BLGD)
        result = block.of_result((state.out_BLHD, self._lse_BHL[place.layer]))
        parts = block.of_gradients((self._part_BLHD, *self._part_dkv))
        self._kernels.attend_backward(
            place, (*queries, k_BLGD, v_BLGD, *result), parts, is_causal=block.is_causal
        )

    def _add_gradients(self, place: Place, block: Block | None) -> None:
        """Add this hop's parts to dq, and to the dk and dv that arrived with the chunk."""
        slot, is_own = self._dkv_slots[place.hop % N_BUFFERS], place.hop == 0
        if block is None:
            if not is_own:
                self._dkv.pass_over(slot)
            return
        if not is_own:
            self._dkv.acquire(slot, self._compute)
        totals = block.of_gradients((self._dq_sum_BLHD, *slot.tensors))
        parts = block.of_gradients((self._part_BLHD, *self._part_dkv))
        self._kernels.merge_gradients(place, totals, parts, is_first=is_own and self._starts_whole)
        if not is_own:
            self._dkv.release(slot, self._compute)

    def _send_dkv_on(self, place: Place) -> None:
        """Send the gradients to the next holder of the chunk; after the last hop that is its owner."""
        if place.hop == 0 or self._blocks[place.hop]:
            self._dkv.after(self._compute)
        source = self._dkv_slots[place.hop % N_BUFFERS]
        target = self._dkv_slots[(place.hop + 1) % N_BUFFERS]
        self._dkv.post(place, source.tensors, target)
