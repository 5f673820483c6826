"""What ranks tell each other besides the work: barriers, one number, shards of results. Never recorded.

The functions go to the control of the calling thread: that of its process group, unless the thread is itself a
rank among others of its process and said so with `use`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Control(Protocol):
    """A way for all ranks of a run to talk, on tensors of the host."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""

    def gather(self, value: Any) -> list[Any] | None:
        """Return all ranks' values in rank order on rank 0, and None elsewhere."""


class GroupControl:
    """The default process group, whose backend is gloo."""

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any] | None:
        """Return all ranks' values on rank 0; tensors of one shape go without a copy through pickle."""
        is_root = dist.get_rank() == 0
        if isinstance(value, torch.Tensor):
            parts = [torch.empty_like(value) for _ in range(dist.get_world_size())] if is_root else None
            dist.gather(value, parts, dst=0)
            return parts
        values: list[Any] | None = [None] * dist.get_world_size() if is_root else None
        dist.gather_object(value, values, dst=0)
        return values


_GROUP = GroupControl()
_of_thread = threading.local()


@contextmanager
def use(control: Control) -> Iterator[None]:
    """Let the calling thread talk through `control` inside the block."""
    before = _current()
    _of_thread.control = control
    try:
        yield
    finally:
        _of_thread.control = before


def _current() -> Control:
    control: Control = getattr(_of_thread, "control", _GROUP)
    return control


def barrier() -> None:
    """Wait for all ranks."""
    _current().barrier()


def broadcast_int(value: int) -> int:
    """Return rank 0's value on every rank."""
    return int(_current().broadcast(value))


def gather_shards(shard: torch.Tensor) -> list[torch.Tensor] | None:
    """Return all ranks' tensors, on the host and in rank order, on rank 0, and None elsewhere."""
    return _current().gather(shard.contiguous().cpu())


def gather_objects(value: Any) -> list[Any] | None:
    """Return all ranks' values in rank order on rank 0, and None elsewhere."""
    return _current().gather(value)
