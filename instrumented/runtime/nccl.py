"""NCCL between processes, one GPU each, by torch.distributed; every communicator is a process group of its own.

Which stream. A collective with `async_op=False` runs on the current stream since torch 2.8; before, and point to
point always, torch puts it on a stream that the process group owns, and makes the current stream wait. So
everything here is a collective of that kind: an exchange is an all-to-all in which most pieces are empty. NCCL does
the same for both, a group of sends and receives, and gives the kernel the same name (`ncclDevKernel_SendRecv`).
Before torch 2.8 results and order are the same, but a trace shows the transfers on the groups' own streams.

What is sent. A gather or a reduce-scatter whose pieces lie one after another in memory is NCCL's own; one in another
order (zigzag) is a gather by direct exchange, or a reduce-scatter of a copy. Sums of 16-bit types are NCCL's, which
may round at every rank.

Source: https://github.com/pytorch/pytorch/pull/150398 (current stream); ProcessGroupNCCL.cpp (point to point).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from instrumented.runtime.api import Message, Partition

NAME: Final = "nccl"
CURRENT_STREAM_SINCE: Final = (2, 8)
"""The first version of torch whose synchronous collectives run on the current stream."""

_TIMEOUT: Final = timedelta(minutes=30)  # a guard only: the supervisor ends all ranks when one fails


def lands_on_current_stream(torch_version: str) -> bool:
    """Return whether transfers run on the stream that was asked for, by torch's version."""
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    return (major, minor) >= CURRENT_STREAM_SINCE


class NcclCommunicator:
    """One process group; `ranks` is the order in which collectives name members, torch's own is ascending."""

    def __init__(self, name: str, ranks: tuple[int, ...], group: Any) -> None:
        """Keep a group that exists."""
        self.name, self.ranks, self.group = name, ranks, group
        self.order = [ranks.index(rank) for rank in sorted(ranks)]

    @property
    def is_ascending(self) -> bool:
        """Whether both orders are the same."""
        return self.order == sorted(self.order)

    def sorted(self, of_members: Sequence[Tensor]) -> list[Tensor]:
        """Return a tensor per member in torch's order."""
        return [of_members[place] for place in self.order]


class NcclTransport:
    """Process groups over NCCL; implements `instrumented.runtime.transport.Transport`."""

    name = NAME
    kernel_prefix = "nccl_"
    shares_device = False

    def __init__(self, place: torch.device) -> None:
        """Move data of one device."""
        self._place = place

    def communicator(self, name: str, partition: Partition | None = None) -> NcclCommunicator:
        """Return a new communicator of this rank's group, connected: else its first transfer would pay for that."""
        rank = dist.get_rank()
        groups = [range(dist.get_world_size())] if partition is None else partition
        made = [(tuple(ranks), self._make_group(sorted(ranks))) for ranks in groups]
        ((ranks, group),) = ((ranks, group) for ranks, group in made if rank in ranks)
        dist.all_reduce(torch.zeros(1, device=self._place), group=group)
        return NcclCommunicator(name, ranks, group)

    def _make_group(self, ranks: Sequence[int]) -> Any:
        return dist.new_group(list(ranks), timeout=_TIMEOUT, backend="nccl")

    def send_recv(
        self,
        stream: Any,
        communicator: NcclCommunicator,
        sends: Sequence[Message],
        receives: Sequence[Message],
    ) -> None:
        """Queue one grouped exchange; for an empty piece NCCL sends nothing."""
        outgoing, incoming = _by_member(communicator, sends), _by_member(communicator, receives)
        n_rounds = max(map(len, (*outgoing, *incoming)))
        nothing = torch.empty(0, dtype=torch.uint8, device=self._place)
        rounds = [
            tuple(
                [row[number] if number < len(row) else nothing for row in rows]
                for rows in (outgoing, incoming)
            )
            for number in range(n_rounds)
        ]
        self._all_to_alls(communicator, rounds)

    def all_gather(
        self,
        stream: Any,
        communicator: NcclCommunicator,
        targets: Sequence[Sequence[Tensor]],
        sources: Sequence[Tensor],
    ) -> None:
        """Queue one grouped all-gather."""
        joined = [joined_in_memory(row) if communicator.is_ascending else None for row in targets]
        if any(whole is None for whole in joined):
            rounds = [
                ([source] * len(communicator.ranks), communicator.sorted(row))
                for row, source in zip(targets, sources, strict=True)
            ]
            self._all_to_alls(
                communicator, [([_flat(s) for s in a], [_flat(t) for t in b]) for a, b in rounds]
            )
            return
        with self._grouped(communicator, len(joined)):
            for whole, source in zip(joined, sources, strict=True):
                _all_gather_single()(whole, _flat_values(source), group=communicator.group)

    def reduce_scatter(
        self,
        stream: Any,
        communicator: NcclCommunicator,
        targets: Sequence[Tensor],
        sources: Sequence[Sequence[Tensor]],
    ) -> None:
        """Queue one grouped reduce-scatter."""
        whole = [_joined(communicator.sorted(row)) for row in sources]
        with self._grouped(communicator, len(whole)):
            for target, row in zip(targets, whole, strict=True):
                _reduce_scatter_single()(_flat_values(target), row, group=communicator.group)

    def all_reduce(self, stream: Any, communicator: NcclCommunicator, tensor: Tensor) -> None:
        """Queue one all-reduce in place."""
        dist.all_reduce(tensor, group=communicator.group)

    def all_to_all(
        self,
        stream: Any,
        communicator: NcclCommunicator,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
    ) -> None:
        """Queue one all-to-all."""
        outgoing, incoming = communicator.sorted(sources), communicator.sorted(targets)
        self._all_to_alls(communicator, [([_flat(t) for t in outgoing], [_flat(t) for t in incoming])])

    def close(self) -> None:
        """Leave the groups to the end of the process group that they are parts of."""

    def _all_to_alls(
        self, communicator: NcclCommunicator, rounds: Sequence[tuple[list[Tensor], ...]]
    ) -> None:
        """Queue all-to-alls of bytes, (outgoing, incoming) by member in torch's order, as one."""
        with self._grouped(communicator, len(rounds), has_fast_path=False):
            for outgoing, incoming in rounds:
                dist.all_to_all(incoming, outgoing, group=communicator.group)

    @contextmanager
    def _grouped(
        self, communicator: NcclCommunicator, n_calls: int, *, has_fast_path: bool = True
    ) -> Iterator[None]:
        """Let NCCL run several calls as one; torch has a form of its own for some, which needs no device here."""
        if n_calls < 2:
            yield
            return
        place = None if has_fast_path else self._place
        with dist.distributed_c10d._coalescing_manager(communicator.group, place, async_ops=False):
            yield


def joined_in_memory(pieces: Sequence[Tensor]) -> Tensor | None:
    """Return one flat tensor of pieces that follow each other in memory, None where they do not."""
    first, end = pieces[0], pieces[0].data_ptr()
    for piece in pieces:
        if piece.data_ptr() != end or not piece.is_contiguous() or piece.dtype != first.dtype:
            return None
        end += piece.nbytes
    return first.as_strided((sum(piece.numel() for piece in pieces),), (1,))


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    whole = joined_in_memory(pieces)
    return torch.cat([piece.reshape(-1) for piece in pieces]) if whole is None else whole


def _by_member(communicator: NcclCommunicator, messages: Sequence[Message]) -> list[list[Tensor]]:
    """Return the tensors that go to or come from each member, in torch's order, as bytes."""
    of_rank: dict[int, list[Tensor]] = {rank: [] for rank in sorted(communicator.ranks)}
    for message in messages:
        of_rank[message.peer].append(_flat(message.tensor))
    return list(of_rank.values())


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor's own bytes: messages of any type can then share an all-to-all."""
    return _flat_values(tensor).view(torch.uint8)


def _flat_values(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor in one dimension.

    Raises:
        ValueError: It is not contiguous, so that NCCL could not read or write it in place.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"a transfer needs contiguous tensors, not strides {tensor.stride()}")
    return tensor.view(-1)


def _all_gather_single() -> Callable[..., Any]:
    """Return the gather into one tensor, whose name changed in torch 2.13."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _reduce_scatter_single() -> Callable[..., Any]:
    """Return the reduce-scatter from one tensor, whose name changed in torch 2.13."""
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
