"""Exchanges between ranks, on the runtime: a stream and a communicator of their own for each purpose.

The ring exchange refuses an order of calls that would move wrong data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from functools import partial

from torch import Tensor, dtype

from cptrace import labels
from instrumented.ops import Place
from instrumented.runtime.api import Device, Event, Message, Stream


class ExchangeOrderError(RuntimeError):
    """An exchange was asked for that would read or overwrite data at the wrong time: a bug in a scheme."""


class _SlotState(Enum):
    FREE = "free"
    POSTED = "posted"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of what a slot holds: elements `span` of each of its tensors, which are flat then.

    Attributes:
        name: What it is, for labels.
        span: Which elements; None for all, of tensors of any shape.
    """

    name: str
    span: slice | None = None

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the part of each tensor."""
        return [tensor if self.span is None else tensor[self.span] for tensor in tensors]


class Slot:
    """A set of tensors that a ring exchange receives into, used again and again.

    Posted, it is being received; held, a stream may read it; free, it may be received into. The data of a
    free slot stays valid until the next post, so that it can still be sent on.
    """

    def __init__(self, device: Device, tensors: Sequence[Tensor]) -> None:
        """Make a free slot without data."""
        self.tensors = tuple(tensors)
        self.aside: tuple[
            Tensor, ...
        ] = ()  # room for a copy, where the slot is also sent from while it receives
        self.arrived = device.event()
        self.released = device.event()
        self.state = _SlotState.FREE
        self.has_data = False


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that exchange with each other, as one part of a partition of all ranks.

    Attributes:
        partition: All groups; every rank is in exactly one.
        rank: This rank.
    """

    partition: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def of_all(cls, device: Device) -> Group:
        """Return the one group of all ranks."""
        return cls((tuple(range(device.size)),), device.rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, in order."""
        return next(ranks for ranks in self.partition if self.rank in ranks)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """This rank's number among the members."""
        return self.ranks.index(self.rank)

    def neighbour(self, distance: int) -> int:
        """Return the rank that is `distance` places further round the ring of members."""
        return self.ranks[(self.index + distance) % self.size]


class Channel:
    """A stream and a communicator of a group, used by one purpose alone."""

    def __init__(self, device: Device, name: str, group: Group | None = None) -> None:
        """Create both; every rank must do so in the same order.

        Args:
            device: This rank's device.
            name: What the channel is for; also what travels, for labels.
            group: Who exchanges; None for all ranks.
        """
        self.group = group or Group.of_all(device)
        self._device = device
        self._name = name
        self._communicator = device.communicator(name, self.group.partition)
        self._stream = device.stream()  # made right after its communicator: so faults know whose it is
        self._produced, self._landed = device.event(), device.event()

    def after(self, producer: Stream) -> None:
        """Make later transfers wait for everything queued on `producer` so far."""
        self._device.record_event(self._produced, producer)
        self._device.wait_event(self._stream, self._produced)

    def before(self, consumer: Stream) -> None:
        """Make later work on `consumer` wait for every transfer queued so far."""
        self._device.record_event(self._landed, self._stream)
        self._device.wait_event(consumer, self._landed)

    def record(self, event: Event) -> None:
        """Make `event` stand for every transfer queued so far."""
        self._device.record_event(event, self._stream)

    def _range(
        self, place: Place, kind: str, tensor_name: str, n_bytes: int, peers: Iterable[int]
    ) -> AbstractContextManager[object]:
        others = tuple(sorted(set(peers) - {self._device.rank}))
        label = place.label(kind, tensor=tensor_name, bytes=n_bytes, peers=others)
        return self._device.range(label, payload=place.hop, category=kind)


class Collectives(Channel):
    """Collectives of a group, one after another; labels count the bytes that this rank sends to others."""

    def all_gather(
        self, place: Place, tensor_name: str, targets: Sequence[Sequence[Tensor]], sources: Sequence[Tensor]
    ) -> None:
        """Queue one grouped all-gather: `targets[i][m]` becomes what member m has as `sources[i]`."""
        n_bytes = (self.group.size - 1) * sum(source.nbytes for source in sources)
        with self._range(place, labels.ALL_GATHER, tensor_name, n_bytes, self.group.ranks):
            self._device.all_gather(self._stream, self._communicator, targets, sources)

    def reduce_scatter(
        self, place: Place, tensor_name: str, targets: Sequence[Tensor], sources: Sequence[Sequence[Tensor]]
    ) -> None:
        """Queue one grouped reduce-scatter: on member m, `targets[i]` becomes the sum of all `sources[i][m]`."""
        n_bytes = sum(self._bytes_to_others(row) for row in sources)
        with self._range(place, labels.REDUCE_SCATTER, tensor_name, n_bytes, self.group.ranks):
            self._device.reduce_scatter(self._stream, self._communicator, targets, sources)

    def all_reduce(self, place: Place, tensor_name: str, tensor: Tensor) -> None:
        """Queue one all-reduce in place, of a contiguous tensor that divides by the group."""
        n_bytes = 2 * (self.group.size - 1) * tensor.nbytes // self.group.size
        with self._range(place, labels.ALL_REDUCE, tensor_name, n_bytes, self.group.ranks):
            self._device.all_reduce(self._stream, self._communicator, tensor)

    def all_to_all(
        self, place: Place, tensor_name: str, targets: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> None:
        """Queue one all-to-all: `targets[m]` becomes the tensor that member m has for this rank."""
        n_bytes = self._bytes_to_others(sources)
        with self._range(place, labels.ALL_TO_ALL, tensor_name, n_bytes, self.group.ranks):
            self._device.all_to_all(self._stream, self._communicator, targets, sources)

    def _bytes_to_others(self, tensors: Sequence[Tensor]) -> int:
        return sum(tensor.nbytes for index, tensor in enumerate(tensors) if index != self.group.index)


class RingExchange(Channel):
    """Sends tensors to the next member of a group and receives from the previous one, or the other way round."""

    def __init__(
        self, device: Device, name: str, group: Group | None = None, *, is_reversed: bool = False
    ) -> None:
        """Create the stream and the communicator; every rank must do so in the same order.

        Args:
            device: This rank's device.
            name: What travels, for labels.
            group: Who exchanges; None for all ranks.
            is_reversed: Whether to send to the previous member.
        """
        super().__init__(device, name, group)
        self._held_up: dict[Slot, Callable[[], None]] = {}
        direction = -1 if is_reversed else 1
        self._target_rank = self.group.neighbour(direction)
        self._source_rank = self.group.neighbour(-direction)

    def slots(self, n_slots: int, shapes: Sequence[Sequence[int]], data_type: dtype) -> tuple[Slot, ...]:
        """Return `n_slots` new free slots that take turns, each with one tensor per shape.

        On a device with the fault `single-buffer` they are one slot: a hop into it waits for its reader, a
        hop that was posted before that reader is queued once it is, and what is sent on from it is copied aside.
        """
        if not getattr(self._device, "has_one_buffer", False):
            return self.kept_slots(n_slots, shapes, data_type)
        (slot,) = self.kept_slots(1, shapes, data_type)
        slot.aside = tuple(self._device.empty(shape, data_type) for shape in shapes)
        return (slot,) * n_slots

    def kept_slots(self, n_slots: int, shapes: Sequence[Sequence[int]], data_type: dtype) -> tuple[Slot, ...]:
        """Return `n_slots` new free slots whose data is kept; they never take turns."""
        return tuple(
            Slot(self._device, [self._device.empty(shape, data_type) for shape in shapes])
            for _ in range(n_slots)
        )

    def fill(self, slot: Slot) -> None:
        """Say that the caller writes into a free slot itself, and holds it."""
        if slot.state is not _SlotState.FREE:
            raise ExchangeOrderError(f"the slot to fill is {slot.state.value}, not free")
        slot.state, slot.has_data = _SlotState.HELD, True

    def post(
        self, place: Place, source: Slot | Sequence[Tensor], target: Slot, part: Part | None = None
    ) -> None:
        """Queue one hop: send `source` on and receive into `target`, as soon as its last reader is done.

        Args:
            place: Where in the step the hop belongs.
            source: What to send: a slot, or tensors like the target's.
            target: Where to receive.
            part: What to send and receive of slots; None for everything.

        Raises:
            ExchangeOrderError: The target has not been read yet, or the source has nothing to send.
        """
        if target.aside and target.state is _SlotState.HELD:
            self._held_up[target] = partial(self.post, place, source, target, part)
            return
        if target.state is not _SlotState.FREE:
            raise ExchangeOrderError(f"{place}: the slot to receive into is {target.state.value}, not free")
        if isinstance(source, Slot) and not source.has_data:
            raise ExchangeOrderError(f"{place}: the slot to send was never received into")
        part = part or Part(self._name)
        source = source.tensors if isinstance(source, Slot) else source
        sent = self._set_aside(place, target, part) if source is target.tensors else part.of(source)
        self._device.wait_event(self._stream, target.released)
        self._launch(place, part.name, sent, part.of(target.tensors))
        self._device.record_event(target.arrived, self._stream)
        target.state, target.has_data = _SlotState.POSTED, True

    def acquire(self, slot: Slot, reader: Stream) -> None:
        """Make `reader` wait until the slot's exchange has landed.

        Raises:
            ExchangeOrderError: No exchange into the slot is posted.
        """
        if slot.state is not _SlotState.POSTED:
            raise ExchangeOrderError(f"the slot to read is {slot.state.value}: no exchange into it is posted")
        self._device.wait_event(reader, slot.arrived)
        slot.state = _SlotState.HELD

    def release(self, slot: Slot, reader: Stream) -> None:
        """Say that everything queued on `reader` so far was the slot's last use there.

        Raises:
            ExchangeOrderError: The slot is not held.
        """
        if slot.state is not _SlotState.HELD:
            raise ExchangeOrderError(f"the slot to release is {slot.state.value}, not held")
        self._device.record_event(slot.released, reader)
        slot.state = _SlotState.FREE
        if slot in self._held_up:
            self._held_up.pop(slot)()

    def pass_over(self, slot: Slot) -> None:
        """Say that nobody here reads what was posted into the slot; it can still be sent on.

        Raises:
            ExchangeOrderError: No exchange into the slot is posted.
        """
        if slot.state is not _SlotState.POSTED:
            raise ExchangeOrderError(f"the slot to pass over is {slot.state.value}, not posted")
        slot.state = _SlotState.FREE

    def _set_aside(self, place: Place, slot: Slot, part: Part) -> Sequence[Tensor]:
        """Copy a part of a slot that is received into before it has been sent on; return the copy."""
        copies = part.of(slot.aside)
        label = place.label(labels.COPY, **{labels.PACKS: part.name})
        with self._device.range(label, payload=place.hop, category=labels.COPY):
            for target, origin in zip(copies, part.of(slot.tensors), strict=True):
                self._device.copy(self._stream, target, origin)
        return copies

    def _launch(
        self, place: Place, tensor_name: str, sent: Sequence[Tensor], received: Sequence[Tensor]
    ) -> None:
        n_bytes, peers = sum(tensor.nbytes for tensor in sent), (self._target_rank, self._source_rank)
        with self._range(place, labels.SEND_RECV, tensor_name, n_bytes, peers):
            self._device.send_recv(
                self._stream,
                self._communicator,
                [Message(tensor, self._target_rank) for tensor in sent],
                [Message(tensor, self._source_rank) for tensor in received],
            )
