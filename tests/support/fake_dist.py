"""A stand-in for `torch.distributed` whose ranks are threads: it checks what NCCL would check, and moves the data.

NCCL wants contiguous tensors of one type in a call, a piece for each member in ascending order of ranks, and pieces
of equal length on both sides; an empty piece sends nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from instrumented.runtime.local_d2d import Meeting


class FakeGroup:
    """One rank's side of a process group."""

    def __init__(self, meeting: Meeting, key: tuple[Any, ...], ranks: Sequence[int], rank: int) -> None:
        self.meeting, self.key, self.ranks, self.rank = meeting, key, sorted(ranks), rank
        self.calls = count()

    def swap(self, value: Any) -> list[Any]:
        """Return all members' values, in ascending order of ranks."""
        call, size = next(self.calls), len(self.ranks)
        self.meeting.leave((*self.key, call, self.rank), value, size)
        return [self.meeting.take((*self.key, call, rank)) for rank in self.ranks]

    @property
    def index(self) -> int:
        return self.ranks.index(self.rank)


class FakeDist:
    """The functions of `torch.distributed` that the NCCL transport uses, and what was called on each rank."""

    def __init__(self, size: int) -> None:
        self.meeting, self.size = Meeting(size), size
        self.calls: dict[int, list[str]] = {rank: [] for rank in range(size)}
        self._of_thread = threading.local()
        self.distributed_c10d = SimpleNamespace(_coalescing_manager=self._coalescing_manager)

    def be(self, rank: int) -> None:
        """Let the calling thread be a rank."""
        self._of_thread.rank, self._of_thread.n_groups = rank, count()

    def get_rank(self) -> int:
        return int(self._of_thread.rank)

    def get_world_size(self) -> int:
        return self.size

    def new_group(self, ranks: Sequence[int], timeout: Any, backend: str) -> FakeGroup:
        assert backend == "nccl"
        number = next(self._of_thread.n_groups)
        return FakeGroup(self.meeting, ("group", number), ranks, self.get_rank())

    def all_reduce(self, tensor: Tensor, group: FakeGroup) -> None:
        self._note("all_reduce", tensor)
        tensor.copy_(torch.stack(group.swap(tensor.clone())).sum(dim=0))

    def all_to_all(self, targets: list[Tensor], sources: list[Tensor], group: FakeGroup) -> None:
        self._note("all_to_all", *targets, *sources)
        assert len(targets) == len(sources) == len(group.ranks)
        for target, row in zip(targets, group.swap([source.clone() for source in sources]), strict=True):
            assert target.shape == row[group.index].shape
            target.copy_(row[group.index])

    def all_gather_single(self, target: Tensor, source: Tensor, group: FakeGroup) -> None:
        self._note("all_gather_single", target, source)
        target.copy_(torch.cat(group.swap(source.clone())))

    def reduce_scatter_single(self, target: Tensor, source: Tensor, group: FakeGroup) -> None:
        self._note("reduce_scatter_single", target, source)
        pieces = [whole.chunk(len(group.ranks))[group.index] for whole in group.swap(source.clone())]
        target.copy_(torch.stack(pieces).sum(dim=0))

    def _note(self, name: str, *tensors: Tensor) -> None:
        assert all(tensor.is_contiguous() for tensor in tensors)
        assert len({tensor.dtype for tensor in tensors}) == 1
        self.calls[self.get_rank()].append(name)

    @contextmanager
    def _coalescing_manager(self, group: FakeGroup, device: Any, async_ops: bool) -> Iterator[None]:
        assert not async_ops  # else the transfers would leave the current stream
        calls = self.calls[self.get_rank()]
        before = len(calls)
        yield
        # Torch has a form of its own for several gathers or reduce-scatters, and takes no device then.
        assert (device is None) == (calls[before] != "all_to_all")
        calls[before:] = [f"{len(calls) - before} x {calls[before]}"]
