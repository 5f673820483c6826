"""Collectives as rounds of messages, for a backend that can only exchange.

Every member sends to every other directly, so a rank sends no more than the best algorithm would: (P - 1) n
bytes for an all-gather of n bytes each, the same for its inverse, the reduce-scatter, and both after one
another, on a P-th of the tensor each, for an all-reduce. Sums are taken in rank order in the accumulator's
type and rounded once, so that all members get the same bits.

Model: a round takes the link's latency once and then the larger of what the rank sends and receives, since
its one link is full duplex and shared by all its peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from instrumented.runtime.api import Message
from instrumented.softmax import accumulator_dtype


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange: what this rank sends and receives, and what it does with what has arrived.

    Attributes:
        sends: Tensors and where they go; they are read when the round begins.
        receives: Tensors of the shape and type to receive, and where from; `finish` decides what is written.
        finish: Called with the received tensors, in the order of `receives`.
    """

    sends: Sequence[Message]
    receives: Sequence[Message]
    finish: Callable[[Sequence[Tensor]], None]

    @property
    def link_bytes(self) -> int:
        """What the busier direction of the rank's link carries."""
        return max(_total_bytes(self.sends), _total_bytes(self.receives))

    @property
    def peers(self) -> set[int]:
        """The other ranks that take part."""
        return {message.peer for message in (*self.sends, *self.receives)}


@dataclass(frozen=True, slots=True)
class Member:
    """A rank's place among the members of a group."""

    ranks: tuple[int, ...]
    rank: int

    @property
    def index(self) -> int:
        """The rank's number within the group."""
        return self.ranks.index(self.rank)

    def to_others(self, tensors: Sequence[Tensor]) -> list[Message]:
        """Return a message for each other member; `tensors` has one per member."""
        pairs = zip(tensors, self.ranks, strict=True)
        return [Message(tensor, rank) for tensor, rank in pairs if rank != self.rank]


def send_recv(sends: Sequence[Message], receives: Sequence[Message]) -> list[Round]:
    """Return the rounds of a grouped point-to-point exchange."""
    return [_moving(sends, receives)]


def all_gather(member: Member, targets: Sequence[Sequence[Tensor]], sources: Sequence[Tensor]) -> list[Round]:
    """Return the rounds of a grouped all-gather of each of `sources` into its row of `targets`."""
    sends = [message for source in sources for message in member.to_others([source for _ in member.ranks])]
    receives = [message for row in targets for message in member.to_others(row)]
    own = [(row[member.index], source) for row, source in zip(targets, sources, strict=True)]
    return [_moving(sends, receives, own)]


def all_to_all(member: Member, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> list[Round]:
    """Return the rounds of an all-to-all; both sequences have a tensor per member."""
    own = [(targets[member.index], sources[member.index])]
    return [_moving(member.to_others(sources), member.to_others(targets), own)]


def reduce_scatter(
    member: Member, targets: Sequence[Tensor], sources: Sequence[Sequence[Tensor]]
) -> list[Round]:
    """Return the rounds of a grouped reduce-scatter of each row of `sources` into its one of `targets`."""
    n_others = len(member.ranks) - 1

    def finish(arrived: Sequence[Tensor]) -> None:
        for number, (target, row) in enumerate(zip(targets, sources, strict=True)):
            parts = list(arrived[number * n_others : (number + 1) * n_others])
            parts.insert(member.index, row[member.index])
            target.copy_(_sum(parts))

    sends = [message for row in sources for message in member.to_others(row)]
    receives = [message for target in targets for message in member.to_others([target for _ in member.ranks])]
    return [Round(sends, receives, finish)]


def all_reduce(member: Member, tensor: Tensor) -> list[Round]:
    """Return the rounds of an all-reduce in place: a reduce-scatter of equal parts, then their all-gather.

    Raises:
        ValueError: The tensor is not contiguous, or does not divide into a part per member.
    """
    if not tensor.is_contiguous() or tensor.numel() % len(member.ranks):
        raise ValueError(
            f"an all-reduce needs a contiguous tensor that divides into {len(member.ranks)} parts, "
            f"not {tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    parts = list(tensor.view(-1).chunk(len(member.ranks)))
    mine = parts[member.index]
    return reduce_scatter(member, [mine], [parts]) + all_gather(member, [parts], [mine])


def _moving(
    sends: Sequence[Message], receives: Sequence[Message], own: Sequence[tuple[Tensor, Tensor]] = ()
) -> Round:
    """Return a round that stores what arrives, and copies `own` (target, source) pairs within the rank."""

    def finish(arrived: Sequence[Tensor]) -> None:
        for message, tensor in zip(receives, arrived, strict=True):
            message.tensor.copy_(tensor)
        for target, source in own:
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)

    return Round(sends, receives, finish)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0], dtype=accumulator_dtype(parts[0].dtype))
    for part in parts:
        total += part
    return total


def _total_bytes(messages: Sequence[Message]) -> int:
    return sum(message.tensor.nbytes for message in messages)
