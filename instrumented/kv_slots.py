"""Slots for messages in one piece: K and V in the form that the layer uses, their gradients after them."""

from __future__ import annotations

from typing import Final

from torch import Tensor, uint8

from instrumented.comm import Part, RingExchange, Slot
from instrumented.messages import Fp8Message, KvMessage, PlainMessage
from instrumented.ops import Kernels, Place, Tensors
from instrumented.problem import Problem
from instrumented.runtime.api import Device

N_BUFFERS: Final = 2  # one is read while the other receives

KV: Final = "kv"
GRADIENTS: Final = "dkv"
BOTH: Final = "kv+dkv"


class KvSlots:
    """Two slots that take turns, and for each layer one that keeps its last K and V for the backward pass."""

    def __init__(self, device: Device, ring: RingExchange, problem: Problem, n_layers: int) -> None:
        """Create the slots of a ring."""
        self._plain, self._fp8 = PlainMessage(problem), Fp8Message(problem)
        self._forms: list[KvMessage] = [self._plain for _ in range(n_layers)]
        has_fp8 = problem.fp8_score_limit is not None
        kv_bytes = max(self._plain.n_bytes, self._fp8.n_bytes if has_fp8 else 0)
        self.turns = ring.slots(N_BUFFERS, [(kv_bytes + self._plain.n_bytes,)], uint8)
        self._last = ring.kept_slots(n_layers, [(kv_bytes,)], uint8)

    def choose_form(self, layer: int, *, is_fp8: bool) -> None:
        """Decide how a layer's K and V travel, until the next decision."""
        self._forms[layer] = self._fp8 if is_fp8 else self._plain

    def forward(self, layer: int, n_hops: int) -> list[Slot]:
        """Return the slot of each hop of a forward pass."""
        return [*(self.turns[hop % N_BUFFERS] for hop in range(n_hops - 1)), self._last[layer]]

    def part(self, layer: int, name: str) -> Part:
        """Return the part of a slot that a message carries: `KV`, `GRADIENTS` or `BOTH`."""
        kv_end = self._forms[layer].n_bytes
        start = kv_end if name == GRADIENTS else 0
        end = kv_end if name == KV else kv_end + self._plain.n_bytes
        return Part(name, slice(start, end))

    def encode(self, kernels: Kernels, place: Place, slot: Slot, kv_BLGD: Tensors) -> None:
        """Launch the writing of (k, v) into a slot."""
        self._forms[place.layer].encode(kernels, place, self._bytes(place, slot, KV), kv_BLGD)

    def decode(self, kernels: Kernels, place: Place, slot: Slot, room_BLGD: Tensors) -> Tensors:
        """Return the (k, v) in a slot: as views, or launched into `room_BLGD`."""
        return self._forms[place.layer].decode(kernels, place, self._bytes(place, slot, KV), room_BLGD)

    def gradients(self, place: Place, slot: Slot) -> Tensors:
        """Return the (dk, dv) in a slot, as views in the data type."""
        return self._plain.views(self._bytes(place, slot, GRADIENTS))

    def _bytes(self, place: Place, slot: Slot, name: str) -> Tensor:
        (message,) = self.part(place.layer, name).of(slot.tensors)
        return message
