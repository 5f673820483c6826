"""What a scheme may ask of a device: streams, events, launches and communicators, as on CUDA.

Every call returns at once except `synchronize`. Work on one stream runs in launch order; work on two streams
is ordered only by events, but a kernel that computes fills the device, so that two of them take turns. A
function launched on a stream writes into tensors that exist already and returns nothing. Every rank of a
group must launch the transfers of its communicator in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor, dtype


@dataclass(frozen=True, slots=True)
class Cost:
    """What an op takes, for clocks that model time: floating-point operations and bytes of memory traffic."""

    flops: int = 0
    memory_bytes: int = 0


class Message(NamedTuple):
    """A tensor and the rank that it goes to or comes from."""

    tensor: Tensor
    peer: int


Partition = Sequence[Sequence[int]]
"""Groups of ranks that together hold every rank once."""


class Stream(Protocol):
    """A queue of device work that runs in order."""

    @property
    def stream_id(self) -> int:
        """The number that identifies the stream in a trace."""


class Event(Protocol):
    """A point in a stream that other streams and the host can wait for; it may be recorded again."""

    @property
    def event_id(self) -> int:
        """The number that identifies the event in a trace; records of one event share it."""


class Communicator(Protocol):
    """Its transfers run one after another in launch order, whatever streams they are on.

    Every rank must launch the transfers of one communicator in the same order.
    """

    @property
    def name(self) -> str:
        """What the communicator is for."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its members, in the order in which collectives name them."""


class Range(Protocol):
    """A labelled piece of host time; entering and leaving it records an NVTX range."""

    def __enter__(self) -> object:
        """Open the range."""

    def __exit__(self, *exception: object) -> None:
        """Close the range."""


class Device(Protocol):
    """One rank's device."""

    rank: int
    size: int

    def empty(self, shape: Sequence[int], data_type: dtype) -> Tensor:
        """Return an uninitialised tensor on this device."""

    def stream(self) -> Stream:
        """Return a new stream; the first one is the device's default stream."""

    def event(self) -> Event:
        """Return a new event that was never recorded."""

    def communicator(self, name: str, partition: Partition | None = None) -> Communicator:
        """Return a new communicator of this rank's group.

        Args:
            name: What it is for.
            partition: All groups, every rank in exactly one; None for one group of all ranks. Every rank must
                create the same communicators in the same order, also those of groups it is not in.
        """

    def launch(
        self, stream: Stream, name: str, function: Callable[..., None], *arguments: object, cost: Cost
    ) -> None:
        """Queue `function(*arguments)` on a stream as one kernel called `name`."""

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """Queue a copy within this device, as one memcpy."""

    def send_recv(
        self,
        stream: Stream,
        communicator: Communicator,
        sends: Sequence[Message],
        receives: Sequence[Message],
    ) -> None:
        """Queue one grouped exchange; it starts to move data when all its peers have arrived."""

    def all_gather(
        self,
        stream: Stream,
        communicator: Communicator,
        targets: Sequence[Sequence[Tensor]],
        sources: Sequence[Tensor],
    ) -> None:
        """Queue one grouped all-gather: `targets[i][m]` becomes what member m has as `sources[i]`."""

    def reduce_scatter(
        self,
        stream: Stream,
        communicator: Communicator,
        targets: Sequence[Tensor],
        sources: Sequence[Sequence[Tensor]],
    ) -> None:
        """Queue one grouped reduce-scatter: on member m, `targets[i]` becomes the sum of all `sources[i][m]`."""

    def all_reduce(self, stream: Stream, communicator: Communicator, tensor: Tensor) -> None:
        """Queue one all-reduce: `tensor`, contiguous, becomes the sum of all members'."""

    def all_to_all(
        self,
        stream: Stream,
        communicator: Communicator,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
    ) -> None:
        """Queue one all-to-all: `targets[m]` becomes the tensor that member m has for this rank."""

    def record_event(self, event: Event, stream: Stream) -> None:
        """Make `event` stand for all work queued on `stream` so far."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Make later work on `stream` wait for the latest record of `event`; no record, no wait."""

    def synchronize(self, target: Stream | Event | None = None) -> None:
        """Block the host until the stream, the event or (None) the whole device has caught up."""

    def range(
        self, label: str, *, payload: int | None = None, category: str | None = None
    ) -> AbstractContextManager[object]:
        """Return a context manager that marks the enclosed host calls with an NVTX range."""
