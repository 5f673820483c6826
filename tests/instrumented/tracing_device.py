"""A device that runs every op at once and writes down what it touched, to find accesses that nothing orders.

Each op gets a vector clock: how many ops of each stream happened before it, by stream order, events and host
synchronization alone. Two accesses to one byte, one of them a write, are a race if neither clock contains the
other, even where luck makes results right. A dispatch mode sees which tensors an op's body reads and writes, so
nothing has to be declared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from instrumented.runtime.api import Message

Clock = dict[int, int]  # ops that happened before, by stream


class EventNumber(int):
    """An event, which is no stream's number."""


class Access(NamedTuple):
    """One op's use of some bytes of one storage."""

    op: str
    stream: int
    number: int
    clock: Clock
    storage: int
    bytes_touched: np.ndarray
    is_write: bool

    def is_before(self, other: Access) -> bool:
        """Whether something orders this access before another."""
        return other.clock.get(self.stream, 0) >= self.number


class _Watch(TorchDispatchMode):
    """Collects the tensors that ops read and write; making a view touches no data."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: list[tuple[Tensor, bool]] = []  # and whether it is written, in order

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        schema = func._schema
        result = func(*args, **(kwargs or {}))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if is_view:
            return result
        named = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **(kwargs or {})}
        writes = []
        for argument in schema.arguments:
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            tensors = _tensors_in(named.get(argument.name))
            writes += [(tensor, True) for tensor in tensors if is_write]
            if not is_write or not _overwrites(func):
                self.touched += [(tensor, False) for tensor in tensors]
        self.touched += writes
        return result


def _overwrites(func: Any) -> bool:
    """Whether an op that writes an argument does not look at it: it fills the first one, or the one called `out`."""
    filling = (torch.ops.aten.copy_, torch.ops.aten.zero_, torch.ops.aten.fill_)
    return func.overloadpacket in filling or func._overloadname == "out"


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors_in(item)]
    return []


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """Return the positions in its storage of the bytes that a tensor, however strided, consists of."""
    size = tensor.element_size()
    starts = np.array([tensor.storage_offset()])
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        starts = (starts[:, None] + stride * np.arange(length if stride else 1)).reshape(-1)
    return (starts[:, None] * size + np.arange(size)).reshape(-1)


class TracingDevice:
    """One rank of many; what it receives never arrives, only its own order counts."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.accesses: list[Access] = []
        self.unwritten: list[str] = []
        self._streams: list[Clock] = []
        self._host: Clock = {}
        self._events: list[Clock] = []
        self._storages: dict[int, np.ndarray] = {}  # which bytes were written, by storage
        self._kept: list[Tensor] = []
        self._label = ""

    def adopt(self, tensor: Tensor) -> Tensor:
        """Watch a tensor that has its data already."""
        self._kept.append(tensor)
        self._storages[tensor.untyped_storage().data_ptr()] = np.ones(tensor.untyped_storage().nbytes(), bool)
        return tensor

    def empty(self, shape: Sequence[int], data_type: torch.dtype) -> Tensor:
        tensor = torch.zeros(tuple(shape), dtype=data_type)
        self._kept.append(tensor)
        self._storages[tensor.untyped_storage().data_ptr()] = np.zeros(tensor.nbytes, bool)
        return tensor

    def stream(self) -> int:
        self._streams.append({})
        return len(self._streams) - 1

    def event(self) -> EventNumber:
        self._events.append({})
        return EventNumber(len(self._events) - 1)

    def communicator(self, name: str, partition: Any = None) -> str:
        return name

    def launch(
        self, stream: int, name: str, function: Callable[..., None], *arguments: Any, cost: Any
    ) -> None:
        with _Watch() as watch:
            function(*arguments)
        self._op(stream, watch.touched)

    def copy(self, stream: int, target: Tensor, source: Tensor) -> None:
        self._transfer(stream, source, target)

    def send_recv(self, stream: int, _: str, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self._transfer(stream, [m.tensor for m in sends], [m.tensor for m in receives])

    def all_gather(self, stream: int, _: str, targets: Any, sources: Any) -> None:
        self._transfer(stream, sources, targets)

    def reduce_scatter(self, stream: int, _: str, targets: Any, sources: Any) -> None:
        self._transfer(stream, sources, targets)

    def all_to_all(self, stream: int, _: str, targets: Any, sources: Any) -> None:
        self._transfer(stream, sources, targets)

    def all_reduce(self, stream: int, _: str, tensor: Tensor) -> None:
        self._transfer(stream, tensor, tensor)

    def record_event(self, event: EventNumber, stream: int) -> None:
        self._events[event] = dict(self._streams[stream])

    def wait_event(self, stream: int, event: EventNumber) -> None:
        _join(self._streams[stream], self._events[event])

    def synchronize(self, target: int | None = None) -> None:
        if isinstance(target, EventNumber):
            _join(self._host, self._events[target])
            return
        for clock in self._streams if target is None else [self._streams[target]]:
            _join(self._host, clock)

    @contextmanager
    def range(self, label: str, **_: Any) -> Iterator[None]:
        before, self._label = self._label, label
        yield
        self._label = before

    def races(self) -> list[tuple[str, str]]:
        """Return the labels of pairs of ops that touch the same bytes in no order."""
        by_storage: dict[int, list[Access]] = {}
        for access in self.accesses:
            by_storage.setdefault(access.storage, []).append(access)
        return [
            (first.op, second.op)
            for accesses in by_storage.values()
            for first, second in combinations(accesses, 2)
            if (first.is_write or second.is_write)
            and not first.is_before(second)
            and not second.is_before(first)
            and np.intersect1d(first.bytes_touched, second.bytes_touched).size
        ]

    def _transfer(self, stream: int, sources: Any, targets: Any) -> None:
        reads, writes = (
            [(t, is_write) for t in _tensors_in(x)] for x, is_write in ((sources, False), (targets, True))
        )
        self._op(stream, [*reads, *writes])

    def _op(self, stream: int, touched: Sequence[tuple[Tensor, bool]]) -> None:
        clock = self._streams[stream]
        _join(clock, self._host)
        number = clock.get(stream, 0) + 1
        clock[stream] = number
        for tensor, is_write in touched:
            self._touch(tensor, stream, number, dict(clock), is_write=is_write)

    def _touch(self, tensor: Tensor, stream: int, number: int, clock: Clock, *, is_write: bool) -> None:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in self._storages or tensor.numel() == 0:
            return  # a temporary of the op's own
        touched = _bytes_of(tensor)
        self.accesses.append(Access(self._label, stream, number, clock, storage, touched, is_write))
        if is_write:
            self._storages[storage][touched] = True
        elif not self._storages[storage][touched].all():
            self.unwritten.append(self._label)


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)
