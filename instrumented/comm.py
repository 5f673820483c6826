"""Exchanges between ranks, on the runtime. Each refuses an order of calls that would move wrong data."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

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


class Slot:
    """A set of tensors that a ring exchange receives into, used again and again.

    Posted, it is being received; held, a stream may read it; free, it may be received into. The data of a
    free slot stays valid until the next post, so that it can still be sent on.
    """

    def __init__(self, device: Device, tensors: Sequence[Tensor]) -> None:
        """Make a free slot without data."""
        self.tensors = tuple(tensors)
        self.arrived = device.event()
        self.released = device.event()
        self.state = _SlotState.FREE
        self.has_data = False


class RingExchange:
    """Sends tensors to the next rank, receives from the previous; has its own stream and communicator."""

    def __init__(self, device: Device, tensor_name: str) -> None:
        """Create the stream and the communicator; every rank must do so in the same order.

        Args:
            device: This rank's device.
            tensor_name: What travels, for labels.
        """
        self._device = device
        self._tensor_name = tensor_name
        self._stream = device.stream()
        self._communicator = device.communicator(tensor_name)
        self._next_rank = (device.rank + 1) % device.size
        self._previous_rank = (device.rank - 1) % device.size

    def slots(self, n_slots: int, shapes: Sequence[Sequence[int]], data_type: dtype) -> tuple[Slot, ...]:
        """Return `n_slots` new free slots, each with one tensor per shape."""
        return tuple(
            Slot(self._device, [self._device.empty(shape, data_type) for shape in shapes])
            for _ in range(n_slots)
        )

    def wait_for(self, event: Event) -> None:
        """Make later exchanges wait for an event, such as the one that says that what they send is ready."""
        self._device.wait_event(self._stream, event)

    def post(self, place: Place, source: Slot | Sequence[Tensor], target: Slot) -> None:
        """Queue one hop: send `source` on and receive into `target`, as soon as its last reader is done.

        Raises:
            ExchangeOrderError: The target has not been read yet, or the source has nothing to send.
        """
        if target.state is not _SlotState.FREE:
            raise ExchangeOrderError(f"{place}: the slot to receive into is {target.state.value}, not free")
        if isinstance(source, Slot) and not source.has_data:
            raise ExchangeOrderError(f"{place}: the slot to send was never received into")
        tensors = source.tensors if isinstance(source, Slot) else tuple(source)
        self._device.wait_event(self._stream, target.released)
        self._launch(place, tensors, target.tensors)
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

    def pass_over(self, slot: Slot) -> None:
        """Say that nobody here reads what was posted into the slot; it can still be sent on.

        Raises:
            ExchangeOrderError: No exchange into the slot is posted.
        """
        if slot.state is not _SlotState.POSTED:
            raise ExchangeOrderError(f"the slot to pass over is {slot.state.value}, not posted")
        slot.state = _SlotState.FREE

    def _launch(self, place: Place, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        label = place.label(
            labels.SEND_RECV,
            tensor=self._tensor_name,
            bytes=sum(tensor.nbytes for tensor in sent),
            peers=tuple(sorted({self._next_rank, self._previous_rank})),
        )
        with self._device.range(label, payload=place.hop, category=labels.SEND_RECV):
            self._device.send_recv(
                self._stream,
                self._communicator,
                [Message(tensor, self._next_rank) for tensor in sent],
                [Message(tensor, self._previous_rank) for tensor in received],
            )
