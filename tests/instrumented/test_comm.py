"""A ring exchange refuses every order of calls that would move wrong data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from instrumented.comm import ExchangeOrderError, RingExchange, Slot
from instrumented.ops import Place

PLACE = Place("forward", 0, 1)


class LoggingDevice:
    """Rank 1 of 4, which only writes down what it is asked for."""

    rank, size = 1, 4

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self._n = 0

    def _name(self, kind: str) -> str:
        self._n += 1
        return f"{kind}{self._n}"

    def empty(self, shape: tuple[int, ...], data_type: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=data_type)

    def stream(self) -> str:
        return self._name("stream")

    def event(self) -> str:
        return self._name("event")

    def communicator(self, name: str, partition: tuple[tuple[int, ...], ...]) -> str:
        assert partition == ((0, 1, 2, 3),)
        return name

    def send_recv(self, stream: str, communicator: str, sends: list, receives: list) -> None:
        self.log.append(
            ("send_recv", stream, communicator, [m.peer for m in sends], [m.peer for m in receives])
        )

    def record_event(self, event: str, stream: str) -> None:
        self.log.append(("record", event, stream))

    def wait_event(self, stream: str, event: str) -> None:
        self.log.append(("wait", stream, event))

    @contextmanager
    def range(self, label: str, *, payload: int, category: str) -> Iterator[None]:
        self.log.append(("range", label, payload, category))
        yield


@pytest.fixture
def device() -> LoggingDevice:
    """Return a device that logs."""
    return LoggingDevice()


@pytest.fixture
def ring(device: LoggingDevice) -> RingExchange:
    """Return an exchange on that device; its stream is stream1."""
    return RingExchange(device, "kv")


@pytest.fixture
def slots(ring: RingExchange) -> tuple[Slot, ...]:
    """Return two slots of one tensor of 8 bytes."""
    return ring.slots(2, [(2,)], torch.float32)


def test_a_post_waits_for_the_last_reader_and_says_when_it_has_landed(
    device: LoggingDevice, ring: RingExchange, slots: tuple[Slot, ...]
) -> None:
    ring.post(PLACE, [torch.zeros(2)], slots[0])
    assert device.log == [
        ("wait", "stream1", slots[0].released),
        ("range", "send_recv pass=forward layer=0 hop=1 tensor=kv bytes=8 peers=0,2", 1, "send_recv"),
        ("send_recv", "stream1", "kv", [2], [0]),
        ("record", slots[0].arrived, "stream1"),
    ]


def test_a_round_of_post_acquire_release(
    device: LoggingDevice, ring: RingExchange, slots: tuple[Slot, ...]
) -> None:
    ring.post(PLACE, [torch.zeros(2)], slots[0])
    ring.acquire(slots[0], "compute")
    ring.post(PLACE, slots[0], slots[1])  # sent on while it is read
    ring.release(slots[0], "compute")
    device.log.clear()
    ring.acquire(slots[1], "compute")
    ring.post(PLACE, slots[1], slots[0])  # and received into again
    assert ("wait", "stream1", slots[0].released) in device.log


def test_a_second_post_into_a_slot_is_refused(ring: RingExchange, slots: tuple[Slot, ...]) -> None:
    ring.post(PLACE, [torch.zeros(2)], slots[0])
    with pytest.raises(ExchangeOrderError, match="slot to receive into is posted, not free"):
        ring.post(PLACE, [torch.zeros(2)], slots[0])


def test_a_post_into_a_slot_that_is_read_is_refused(ring: RingExchange, slots: tuple[Slot, ...]) -> None:
    ring.post(PLACE, [torch.zeros(2)], slots[0])
    ring.acquire(slots[0], "compute")
    with pytest.raises(ExchangeOrderError, match="slot to receive into is held, not free"):
        ring.post(PLACE, [torch.zeros(2)], slots[0])


def test_sending_what_never_arrived_is_refused(ring: RingExchange, slots: tuple[Slot, ...]) -> None:
    with pytest.raises(ExchangeOrderError, match="slot to send was never received into"):
        ring.post(PLACE, slots[1], slots[0])


@pytest.mark.parametrize("call", ["acquire", "release", "pass_over"])
def test_using_a_slot_without_an_exchange_is_refused(
    ring: RingExchange, slots: tuple[Slot, ...], call: str
) -> None:
    arguments = (slots[0],) if call == "pass_over" else (slots[0], "compute")
    with pytest.raises(ExchangeOrderError, match="is free"):
        getattr(ring, call)(*arguments)


def test_a_slot_that_is_passed_over_can_be_sent_on(
    device: LoggingDevice, ring: RingExchange, slots: tuple[Slot, ...]
) -> None:
    ring.post(PLACE, [torch.zeros(2)], slots[0])
    ring.pass_over(slots[0])
    ring.post(PLACE, slots[0], slots[1])
    assert [entry[0] for entry in device.log].count("send_recv") == 2
    assert not any(entry[0] == "record" and entry[1] == slots[0].released for entry in device.log)
