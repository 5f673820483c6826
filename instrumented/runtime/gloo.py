"""Gloo process groups on the loopback interface: one per communicator, and one for control.

The control group carries barriers and gathers, which are never recorded.

With a transfer all sides tell each other when they arrived. That is what a rendezvous protocol does, and it
gives every clock the moment from which data could move. Data need not wait for it: one wait is enough for both,
and on busy cores each wait costs milliseconds.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from instrumented.runtime.api import Message, Partition
from instrumented.runtime.control import barrier, broadcast_int, gather_shards
from instrumented.runtime.turns import TurnOrder

__all__ = ["GlooCommunicator", "barrier", "broadcast_int", "gather_shards", "start_gloo", "stop_gloo"]

_TIMEOUT: Final = timedelta(minutes=30)  # a guard only: the supervisor ends all ranks when one fails
_ARRIVAL_TAG: Final = 1
_FIRST_DATA_TAG: Final = 2
_LOOPBACK: Final = "lo"


def start_gloo(folder: Path, rank: int, size: int) -> None:
    """Join the control group of `size` ranks; to be called after the fork, once per rank.

    Args:
        folder: An empty folder that all ranks see; it holds the rendezvous file.
        rank: This rank.
        size: Number of ranks.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    store = dist.FileStore(str(folder / "rendezvous"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)


def stop_gloo() -> None:
    """Leave all groups."""
    dist.destroy_process_group()


class Arrivals:
    """When the ranks of a transfer arrived."""

    def __init__(self, boxes: Sequence[torch.Tensor], works: Sequence[Any]) -> None:
        """Wait for `works` to fill `boxes`, one arrival each."""
        self._boxes, self._works = boxes, works

    def latest(self) -> int:
        """Return the latest arrival of all, once all are known."""
        for work in self._works:
            work.wait()
        return max(int(box.item()) for box in self._boxes)


class GlooCommunicator:
    """One process group whose transfers run in launch order."""

    def __init__(self, name: str, partition: Partition | None = None) -> None:
        """Create all groups of a partition and keep this rank's; every rank must do so in the same order.

        Args:
            name: What the communicator is for.
            partition: The groups; None for one of all ranks.
        """
        self.name = name
        self.turns = TurnOrder()
        groups = [range(dist.get_world_size())] if partition is None else partition
        for ranks in groups:
            group = dist.new_group(list(ranks), timeout=_TIMEOUT)
            if dist.get_rank() in ranks:
                self.ranks, self._group = tuple(ranks), group

    def announce(self, arrival_ns: int, peers: Sequence[int]) -> Arrivals:
        """Tell the other ranks of a transfer when this rank arrived, and start to hear when they did.

        Args:
            arrival_ns: When this rank was ready.
            peers: The other ranks, without repetition.
        """
        mine = torch.tensor([arrival_ns], dtype=torch.int64)
        boxes = [mine, *(torch.zeros_like(mine) for _ in peers)]
        works = [self._receive(box, peer, _ARRIVAL_TAG) for box, peer in zip(boxes[1:], peers, strict=True)]
        works += [self._send(mine, peer, _ARRIVAL_TAG) for peer in peers]
        return Arrivals(boxes, works)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[torch.Tensor]:
        """Move the data and return what arrived, in the order of `receives`, whose tensors stay untouched.

        So a target changes only when all data is there, as the caller decides.
        """
        staged = [torch.empty_like(message.tensor).contiguous() for message in receives]
        outgoing = [message.tensor.contiguous() for message in sends]
        works = [
            self._receive(box, message.peer, tag)
            for box, message, tag in zip(staged, receives, _tags(receives), strict=True)
        ]
        works += [
            self._send(box, message.peer, tag)
            for box, message, tag in zip(outgoing, sends, _tags(sends), strict=True)
        ]
        for work in works:
            work.wait()
        return staged

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return dist.isend(tensor, peer, group=self._group, tag=tag)

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return dist.irecv(tensor, peer, group=self._group, tag=tag)


def _tags(messages: Sequence[Message]) -> list[int]:
    """Return each message's tag: its number among those of one peer, in which both sides agree."""
    n_before: Counter[int] = Counter()
    tags = []
    for message in messages:
        tags.append(_FIRST_DATA_TAG + n_before[message.peer])
        n_before[message.peer] += 1
    return tags
