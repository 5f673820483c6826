"""All ranks in one process on one GPU: transfers are copies within the device, on the stream of the receiving rank.

NCCL refuses two ranks on one device (before 2.30). Here each rank is a host thread with streams of its own, and a
transfer has the order that a communication kernel would have:

    rank 0's stream   [ own work ] ready ── copies from rank 1 ── done ── waits for rank 1's done ──
    rank 1's stream   [ own work ] ready ── copies from rank 0 ── done ── waits for rank 0's done ──

A rank copies when its peers are ready, and goes on when its peers have copied from it. The hosts meet, so that
each knows the other's tensors and events, but never wait for the device. No data crosses a link: the report is
labelled `local-d2d`, and no bandwidth is told for it.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from cptrace.labels import LOCAL_D2D
from instrumented.runtime import collectives
from instrumented.runtime.api import Message, Partition
from instrumented.runtime.collectives import Member, Round


class MeetingBroken(RuntimeError):
    """A rank waited for another one that has failed: a consequence, not the cause."""


class Meeting:
    """Where the ranks of one process leave values for each other."""

    def __init__(self, size: int) -> None:
        """Make a meeting of `size` ranks."""
        self.size = size
        self._values: dict[Hashable, tuple[Any, int]] = {}
        self._changed = threading.Condition()
        self._is_broken = False

    def leave(self, key: Hashable, value: Any, n_readers: int) -> None:
        """Leave a value for so many readers; each takes it once."""
        with self._changed:
            if n_readers:
                self._values[key] = (value, n_readers)
                self._changed.notify_all()

    def take(self, key: Hashable) -> Any:
        """Return a value once it is there.

        Raises:
            MeetingBroken: A rank has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self._is_broken)
            if key not in self._values:
                raise MeetingBroken("another rank has failed")
            value, n_readers = self._values.pop(key)
            if n_readers > 1:
                self._values[key] = (value, n_readers - 1)
            return value

    def break_off(self) -> None:
        """Let nobody wait any longer: a rank has failed."""
        with self._changed:
            self._is_broken = True
            self._changed.notify_all()


class MeetingControl:
    """What the ranks of one process tell each other besides the work; implements `control.Control`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        """Speak for one rank."""
        self._meeting, self._rank = meeting, rank
        self._calls = count()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._share(None)

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        return self._share(value)[0]

    def gather(self, value: Any) -> list[Any] | None:
        """Return all ranks' values in rank order on rank 0, and None elsewhere."""
        values = self._share(value)
        return values if self._rank == 0 else None

    def _share(self, value: Any) -> list[Any]:
        call, size = next(self._calls), self._meeting.size
        self._meeting.leave(("control", call, self._rank), value, size)
        return [self._meeting.take(("control", call, rank)) for rank in range(size)]


class LocalCommunicator:
    """A group of the process's ranks; its transfers are numbered, since all ranks queue them in the same order."""

    def __init__(self, number: int, name: str, ranks: tuple[int, ...]) -> None:
        """Make the communicator that is the `number`-th of its rank."""
        self.name, self.ranks = name, ranks
        self._number, self._calls = number, count()

    def next_key(self) -> tuple[int, int]:
        """Return what names the next transfer, on every member alike."""
        return self._number, next(self._calls)


class LocalTransport:
    """Copies between the ranks of one process; implements `instrumented.runtime.transport.Transport`."""

    name = LOCAL_D2D
    kernel_prefix = "d2d_"
    shares_device = True

    def __init__(self, meeting: Meeting, rank: int) -> None:
        """Move one rank's data."""
        self._meeting, self._rank = meeting, rank
        self._numbers = count()

    def communicator(self, name: str, partition: Partition | None = None) -> LocalCommunicator:
        """Return a new communicator of this rank's group."""
        groups = [tuple(range(self._meeting.size))] if partition is None else [tuple(g) for g in partition]
        (ranks,) = (group for group in groups if self._rank in group)
        return LocalCommunicator(next(self._numbers), name, ranks)

    def send_recv(
        self,
        stream: Any,
        communicator: LocalCommunicator,
        sends: Sequence[Message],
        receives: Sequence[Message],
    ) -> None:
        """Queue one grouped exchange."""
        self._transfer(stream, communicator, collectives.send_recv(sends, receives))

    def all_gather(
        self,
        stream: Any,
        communicator: LocalCommunicator,
        targets: Sequence[Sequence[Tensor]],
        sources: Sequence[Tensor],
    ) -> None:
        """Queue one grouped all-gather."""
        rounds = collectives.all_gather(self._member(communicator), targets, sources)
        self._transfer(stream, communicator, rounds)

    def reduce_scatter(
        self,
        stream: Any,
        communicator: LocalCommunicator,
        targets: Sequence[Tensor],
        sources: Sequence[Sequence[Tensor]],
    ) -> None:
        """Queue one grouped reduce-scatter; sums are taken in rank order and rounded once."""
        rounds = collectives.reduce_scatter(self._member(communicator), targets, sources)
        self._transfer(stream, communicator, rounds)

    def all_reduce(self, stream: Any, communicator: LocalCommunicator, tensor: Tensor) -> None:
        """Queue one all-reduce in place."""
        self._transfer(stream, communicator, collectives.all_reduce(self._member(communicator), tensor))

    def all_to_all(
        self,
        stream: Any,
        communicator: LocalCommunicator,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
    ) -> None:
        """Queue one all-to-all."""
        rounds = collectives.all_to_all(self._member(communicator), targets, sources)
        self._transfer(stream, communicator, rounds)

    def close(self) -> None:
        """Leave nothing behind: there is nothing to leave."""

    def _member(self, communicator: LocalCommunicator) -> Member:
        return Member(communicator.ranks, self._rank)

    def _transfer(self, stream: Any, communicator: LocalCommunicator, rounds: Sequence[Round]) -> None:
        for step in rounds:
            self._exchange(stream, communicator.next_key(), step)

    def _exchange(self, stream: Any, key: tuple[int, int], step: Round) -> None:
        """Copy from every peer that is ready, and let later work wait until every peer has copied from here."""
        outgoing: dict[int, list[Tensor]] = {}
        for message in step.sends:
            outgoing.setdefault(message.peer, []).append(message.tensor)
        sources = dict.fromkeys(message.peer for message in step.receives)
        ready = _recorded(stream)
        self._meeting.leave(("ready", *key, self._rank), (ready, outgoing), len(outgoing))
        incoming = {peer: self._take_ready(stream, key, peer) for peer in sources}
        step.finish([next(incoming[message.peer]) for message in step.receives])
        done = _recorded(stream)
        self._meeting.leave(("done", *key, self._rank), done, len(sources))
        for peer in outgoing:
            stream.wait_event(self._meeting.take(("done", *key, peer)))

    def _take_ready(self, stream: Any, key: tuple[int, int], peer: int) -> Any:
        """Return the tensors that a peer has for this rank, in order, and let the stream wait for them."""
        ready, outgoing = self._meeting.take(("ready", *key, peer))
        stream.wait_event(ready)
        return iter(outgoing[self._rank])


def _recorded(stream: Any) -> Any:
    """Return a new event that stands for all work on a stream so far."""
    event = torch.cuda.Event()
    event.record(stream)
    return event
