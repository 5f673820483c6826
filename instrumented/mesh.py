"""Context parallelism times tensor parallelism: which ranks share the sequence, and which share the weights.

The sequence is cut first and the weights second: rank = cp_rank * T + tp_rank. Ranks that split the weights of one
part of the sequence are neighbours, since they exchange activations in every layer, twice per pass.

    T = 2          tp_rank 0   tp_rank 1
    cp_rank 0          0           1       <- a TP group: the same tokens, other weights
    cp_rank 1          2           3
                       ^ a CP group: the same weights, other tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from cptrace import labels
from cptrace.capture.run_spec import RunSpec
from instrumented.comm import Group
from instrumented.runtime.api import Communicator, Device, Message, Partition, Stream


@dataclass(frozen=True, slots=True)
class Mesh:
    """The two degrees.

    Attributes:
        cp_size: Ranks that share the sequence, P.
        tp_size: Ranks that share the weights, T.
    """

    cp_size: int
    tp_size: int

    @classmethod
    def of(cls, spec: RunSpec) -> Mesh:
        """Return the mesh of a run."""
        return cls(spec.sequence_ranks, spec.weight_ranks)

    def cp_rank(self, rank: int) -> int:
        """Return which part of the sequence a rank has."""
        return rank // self.tp_size

    def tp_rank(self, rank: int) -> int:
        """Return which part of the weights a rank has."""
        return rank % self.tp_size

    def sequence_groups(self, rank: int) -> Group:
        """Return the groups of ranks with the same weights."""
        n_ranks = self.cp_size * self.tp_size
        return Group(tuple(tuple(range(t, n_ranks, self.tp_size)) for t in range(self.tp_size)), rank)

    def weight_groups(self, rank: int) -> Group:
        """Return the groups of ranks with the same tokens."""
        starts = range(0, self.cp_size * self.tp_size, self.tp_size)
        return Group(tuple(tuple(range(start, start + self.tp_size)) for start in starts), rank)


class GroupDevice:
    """A device as one of its groups sees it: ranks are the members' numbers, and the first stream exists already.

    A scheme that runs on it needs not know that there are ranks outside its group, nor who computes before and
    after it on the same stream. Labels name the device's own ranks all the same.
    """

    def __init__(self, device: Device, group: Group, default_stream: Stream) -> None:
        """Look at `device` as a member of `group`.

        Args:
            device: The whole device.
            group: This rank's group, as one part of a partition of all ranks.
            default_stream: What the first call of `stream` returns.
        """
        self.rank, self.size = group.index, group.size
        self._device, self._group = device, group
        self._default_streams = [default_stream]

    def __getattr__(self, name: str) -> Any:
        """Return what groups change nothing about: buffers, events, launches and collectives."""
        return getattr(self._device, name)

    def stream(self) -> Stream:
        """Return the default stream first, then new ones."""
        return self._default_streams.pop() if self._default_streams else self._device.stream()

    def communicator(self, name: str, partition: Partition | None = None) -> Communicator:
        """Return a new communicator of a part of the group; every group makes the same."""
        parts = [range(self.size)] if partition is None else partition
        groups = [[ranks[i] for i in part] for ranks in self._group.partition for part in parts]
        return self._device.communicator(name, groups)

    def send_recv(
        self,
        stream: Stream,
        communicator: Communicator,
        sends: Sequence[Message],
        receives: Sequence[Message],
    ) -> None:
        """Queue one grouped exchange with other members."""
        self._device.send_recv(stream, communicator, self._outside(sends), self._outside(receives))

    def range(
        self, label: str, *, payload: int | None = None, category: str | None = None
    ) -> AbstractContextManager[object]:
        """Return a range on the device, with peers as the device numbers them."""
        return self._device.range(self._relabelled(label), payload=payload, category=category)

    def _outside(self, messages: Sequence[Message]) -> list[Message]:
        return [Message(message.tensor, self._group.ranks[message.peer]) for message in messages]

    def _relabelled(self, text: str) -> str:
        label = labels.parse_label(text)
        if label is None or "peers" not in label.fields:
            return text
        peers = tuple(self._group.ranks[int(peer)] for peer in label.fields["peers"].split(","))
        return labels.format_label(label.name, **{**label.fields, "peers": peers})
