"""Gloo process groups on the loopback interface: one per communicator, and one for control.

The control group carries barriers and gathers, which are never recorded.

Before a transfer both sides tell each other when they arrived. That is what a rendezvous protocol does, and
it gives every clock the moment from which data could move.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from instrumented.runtime.api import Message

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


def barrier() -> None:
    """Wait for all ranks, on the control group."""
    dist.barrier()


def broadcast_int(value: int) -> int:
    """Return rank 0's value on every rank, over the control group."""
    box = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(box, src=0)
    return int(box.item())


def gather_shards(shard: torch.Tensor) -> list[torch.Tensor] | None:
    """Return all ranks' tensors in rank order on rank 0, over the control group, and None elsewhere."""
    is_root = dist.get_rank() == 0
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())] if is_root else None
    dist.gather(shard.contiguous(), parts, dst=0)
    return parts


class GlooCommunicator:
    """One process group whose transfers run in launch order."""

    def __init__(self, name: str) -> None:
        """Create the group; every rank must do so in the same order."""
        self.name = name
        self._group: Any = dist.new_group(timeout=_TIMEOUT)
        self._tail = _Turn()
        self._tail.finish(0)

    def take_turn(self) -> tuple[_Turn, _Turn]:
        """Return the turn to wait for and the turn to finish; called by the host in launch order."""
        before, self._tail = self._tail, _Turn()
        return before, self._tail

    def exchange_arrivals(self, arrival_ns: int, peers: Sequence[int]) -> int:
        """Return the latest arrival of this rank and its peers.

        Args:
            arrival_ns: When this rank was ready.
            peers: The other ranks of the transfer, without repetition.
        """
        mine = torch.tensor([arrival_ns], dtype=torch.int64)
        theirs = [torch.zeros_like(mine) for _ in peers]
        works = [self._receive(box, peer, _ARRIVAL_TAG) for box, peer in zip(theirs, peers, strict=True)]
        works += [self._send(mine, peer, _ARRIVAL_TAG) for peer in peers]
        for work in works:
            work.wait()
        return max([arrival_ns, *(int(box.item()) for box in theirs)])

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Move the data, through staging copies, so that a target changes only when all of it is there."""
        staged = [torch.empty_like(message.tensor).contiguous() for message in receives]
        outgoing = [message.tensor.contiguous() for message in sends]
        works = [
            self._receive(box, message.peer, _FIRST_DATA_TAG + index)
            for index, (box, message) in enumerate(zip(staged, receives, strict=True))
        ]
        works += [
            self._send(box, message.peer, _FIRST_DATA_TAG + index)
            for index, (box, message) in enumerate(zip(outgoing, sends, strict=True))
        ]
        for work in works:
            work.wait()
        for box, message in zip(staged, receives, strict=True):
            message.tensor.copy_(box)

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return dist.isend(tensor, peer, group=self._group, tag=tag)

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return dist.irecv(tensor, peer, group=self._group, tag=tag)


class _Turn:
    """One transfer's place in the order of its communicator."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._end_ns = 0

    def finish(self, end_ns: int) -> None:
        self._end_ns = end_ns
        self._done.set()

    def release(self) -> None:
        """Let the next transfer go even though this one failed."""
        self._done.set()

    def wait(self) -> int:
        self._done.wait()
        return self._end_ns
