"""The ring as Transformer Engine runs it (its p2p technique), which differs from `ring` in five ways.

1. K and V are one message in one piece, packed once.
2. Attention of hop i runs on stream i mod 2, so that small work around one hop can run beside another's.
3. Partial outputs of all hops are kept and summed after the loop, which takes the sums off the hops' path.
4. Backward the ring turns round. It starts on the chunk that the forward pass ended on, which is still here, and
   ends at home: P messages, of which the first holds K and V, the last dK and dV, the others all four.
5. dK and dV travel in the data type: they are rounded at every hop, and 16-bit types send half of fp32's bytes.

K and V can also travel as fp8, unless a layer's scores are too large for that; see `scores`.

Shapes: B batch, L local tokens, H query heads, G key/value heads, D head dim.
Source: NVIDIA's documentation of Transformer Engine, `cp_comm_type="p2p"`; Liu et al., "Ring Attention", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

from cptrace.labels import BACKWARD, FORWARD
from instrumented.blocks import Block, visible_blocks
from instrumented.comm import RingExchange, Slot
from instrumented.kv_slots import BOTH, GRADIENTS, KV, N_BUFFERS, KvSlots
from instrumented.layout import Layout, contiguous, zigzag
from instrumented.ops import Kernels, Place, Tensors
from instrumented.problem import LayerState, Problem
from instrumented.runtime.api import Device, Event
from instrumented.schemes.base import Monitors
from instrumented.scores import ScoreWatch


def layout(problem: Problem) -> Layout:
    """Return contiguous chunks, or the zigzag that balances a causal mask."""
    cut = zigzag if problem.is_balanced else contiguous
    return cut(problem.seq_len, problem.cp_size, problem.padded_len)


class TeAttention:
    """Transformer-Engine-style ring attention of one rank."""

    def __init__(self, device: Device, problem: Problem, layers: Sequence[LayerState]) -> None:
        """Create streams, communicators and buffers; every rank must do so at the same time."""
        self._device, self._problem, self._layers = device, problem, layers
        size, rank = problem.cp_size, device.rank
        visible = visible_blocks(layout(problem), is_causal=problem.is_causal)
        self._blocks = [visible(rank, (rank - hop) % size) for hop in range(size)]
        self._back_blocks = [visible(rank, (rank + 1 + hop) % size) for hop in range(size)]
        self._starts_whole = self._blocks[0] is not None and self._blocks[0].is_whole(problem.local_len)
        self._kernels = [Kernels(device, device.stream(), problem.softmax_scale) for _ in range(2)]
        self._main = self._kernels[0]
        self._forked, self._joined = device.event(), device.event()
        self._ring = RingExchange(device, "kv")
        self._back_ring = RingExchange(device, "kv+dkv", is_reversed=True)
        self._slots = KvSlots(device, self._ring, problem, len(layers))
        limit = problem.fp8_score_limit
        self._watch = None if limit is None else ScoreWatch(device, len(layers), limit)
        self.monitors = Monitors(fp8=self._watch.monitor if self._watch else None)
        self._make_buffers()

    def _make_buffers(self) -> None:
        """Create sums, a partial result for each hop, and rooms for decoded messages, one on each stream."""
        problem, empty = self._problem, self._device.empty
        kv_pairs = [tuple(empty(problem.kv_shape, problem.data_type) for _ in "kv") for _ in range(3)]
        *self._rooms, self._part_dkv = kv_pairs
        self._parts = [
            (empty(problem.q_shape, problem.data_type), empty(problem.lse_shape, problem.sum_type))
            for _ in self._blocks
        ]
        self._part_dq_BLHD = empty(problem.q_shape, problem.data_type)
        self._lse_BHL = [empty(problem.lse_shape, problem.sum_type) for _ in self._layers]
        self._out_sum_BLHD, self._dq_sum_BLHD = (empty(problem.q_shape, problem.sum_type) for _ in range(2))

    def forward(self, layer: int) -> None:
        """Queue one layer's forward pass into its `out_BLHD`."""
        state, first = self._layers[layer], Place(FORWARD, layer, 0)
        if self._watch:
            self._slots.choose_form(layer, is_fp8=self._watch.allows_fp8(layer))
        slots = self._slots.forward(layer, len(self._blocks))
        self._ring.fill(slots[0])
        self._slots.encode(self._main, first, slots[0], (state.k_BLGD, state.v_BLGD))
        self._ring.after(self._main.stream)
        self._order(self._main, self._forked, self._kernels[1])
        for hop, block in enumerate(self._blocks):
            self._attend(first.at(hop), block, slots[hop])
            if hop + 1 < len(slots):
                self._ring.post(first.at(hop), slots[hop], slots[hop + 1], self._slots.part(layer, KV))
        self._order(self._kernels[1], self._joined, self._main)
        self._sum_parts(layer)

    def backward(self, layer: int) -> None:
        """Queue one layer's backward pass into its `dq_BLHD`, `dk_BLGD` and `dv_BLGD`."""
        state, last = self._layers[layer], len(self._back_blocks) - 1
        held = self._slots.forward(layer, len(self._blocks))[-1]
        self._main.clear(Place(BACKWARD, layer, 0), (self._dq_sum_BLHD,))
        for hop, block in enumerate(self._back_blocks):
            place, arriving = Place(BACKWARD, layer, hop), self._slots.turns[(hop + 1) % N_BUFFERS]
            name = KV if hop == 0 else GRADIENTS if hop == last else BOTH
            self._back_ring.after(self._main.stream)  # the gradients to send have been added
            self._back_ring.post(place, held, arriving, self._slots.part(layer, name))
            if block:
                self._attend_backward(place, block, held)
            if hop > 0:
                self._back_ring.release(held, self._main.stream)
            self._back_ring.acquire(arriving, self._main.stream)
            self._add_gradients(place, block, self._slots.gradients(place, arriving))
            held = arriving
        results = (state.dq_BLHD, state.dk_BLGD, state.dv_BLGD)
        sums = (self._dq_sum_BLHD, *self._slots.gradients(place, held))
        self._main.convert(place, results, sums, unpacks=GRADIENTS)
        self._back_ring.release(held, self._main.stream)

    def _attend(self, place: Place, block: Block | None, slot: Slot) -> None:
        """Launch attention of a hop on the stream whose turn it is, and free the hop's slot after it.

        Also a hop without work waits for its chunk: the backward ring, on another stream, sends the last one.
        """
        kernels, room = self._kernels[place.hop % 2], self._rooms[place.hop % 2]
        if place.hop > 0:
            self._ring.acquire(slot, kernels.stream)
        if block:
            k_BLGD, v_BLGD = map(block.of_keys, self._slots.decode(kernels, place, slot, room))
            q_BLHD = block.of_queries(self._layers[place.layer].q_BLHD)
            part = block.of_result(self._parts[place.hop])
            kernels.attend(place, (q_BLHD, k_BLGD, v_BLGD), part, is_causal=block.is_causal)
        self._ring.release(slot, kernels.stream)

    def _sum_parts(self, layer: int) -> None:
        """Launch the merging of all hops' results, once they are all there."""
        total, state = (self._out_sum_BLHD, self._lse_BHL[layer]), self._layers[layer]
        if not self._starts_whole:
            self._main.clear_result(Place(FORWARD, layer, 0), total)
        for hop, block in enumerate(self._blocks):
            if block:
                part, is_first = block.of_result(self._parts[hop]), hop == 0 and self._starts_whole
                place, monitor = Place(FORWARD, layer, hop), self.monitors.running_max
                self._main.merge_out(place, block.of_result(total), part, is_first=is_first, monitor=monitor)
        last = Place(FORWARD, layer, len(self._blocks) - 1)
        self._main.convert(last, (state.out_BLHD,), (self._out_sum_BLHD,))
        if self._watch:
            self._watch.measure(self._main, last, self._lse_BHL[layer])

    def _attend_backward(self, place: Place, block: Block, slot: Slot) -> None:
        state = self._layers[place.layer]
        queries = (block.of_queries(state.dout_BLHD), block.of_queries(state.q_BLHD))
        k_BLGD, v_BLGD = map(block.of_keys, self._slots.decode(self._main, place, slot, self._rooms[0]))
        saved = (*queries, k_BLGD, v_BLGD, *block.of_result((state.out_BLHD, self._lse_BHL[place.layer])))
        parts = block.of_gradients((self._part_dq_BLHD, *self._part_dkv))
        self._main.attend_backward(place, saved, parts, is_causal=block.is_causal)

    def _add_gradients(self, place: Place, block: Block | None, dkv_BLGD: Tensors) -> None:
        """Add a hop's parts to dq, and to the dk and dv of its chunk, which nobody had before at hop 0."""
        if place.hop == 0:
            self._main.clear(place, dkv_BLGD, unpacks=GRADIENTS)  # they lie in what has just arrived
        if block:
            totals = block.of_gradients((self._dq_sum_BLHD, *dkv_BLGD))
            parts = block.of_gradients((self._part_dq_BLHD, *self._part_dkv))
            self._main.merge_gradients(place, totals, parts, is_first=False)

    def _order(self, earlier: Kernels, event: Event, later: Kernels) -> None:
        """Make later work of one compute stream wait for the other's so far."""
        self._device.record_event(event, earlier.stream)
        self._device.wait_event(later.stream, event)
