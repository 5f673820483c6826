"""The NCCL transport against a stand-in for `torch.distributed`: the right call, the right pieces, the right data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cptrace.capture.run_spec import RunSpec
from instrumented.devices import make_cuda
from instrumented.rank import RankResult, execute
from instrumented.runtime import nccl
from instrumented.runtime.api import Message
from instrumented.runtime.control import use
from instrumented.runtime.local_d2d import Meeting, MeetingBroken, MeetingControl
from instrumented.runtime.nccl import NcclTransport, joined_in_memory, lands_on_current_stream
from instrumented.threads import run_threads
from tests.instrumented.scheme_cases import NAMES, SMALL
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_dist import FakeDist

HOST = torch.device("cpu")


def on_ranks(size: int, program: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeDist, list[Any]]:
    """Run a program of (rank, transport) on each rank and return what was called and what it returned."""
    dist, meeting = FakeDist(size), Meeting(size)
    monkeypatch.setattr(nccl, "dist", dist)

    def body(rank: int, link: Any) -> None:
        dist.be(rank)
        with use(MeetingControl(meeting, rank)):
            link.result(program(rank, NcclTransport(HOST)))

    def break_off() -> None:
        meeting.break_off()
        dist.meeting.break_off()

    return dist, run_threads(size, body, lambda _text: None, break_off, MeetingBroken)


def numbers(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 100 * rank


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scheme", [name for name in NAMES if name != "single"])
def test_every_scheme_computes_what_it_should(
    scheme: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RunSpec(
        **{**SMALL, "clock": "paced", "scheme": scheme, "kv_heads": 4, "causal": causal, "device": "cuda"}
    )
    spec.validate()
    monkeypatch.setattr(torch, "cuda", FakeCuda())

    def program(rank: int, transport: NcclTransport) -> RankResult:
        class Quiet:
            def progress(self, text: str) -> None:
                """Say nothing."""

        return execute(spec, rank, Quiet(), make=lambda spec, rank: make_cuda(spec, rank, HOST, transport))

    _, results = on_ranks(spec.cp_size, program, monkeypatch)
    assert results[0].parity
    assert all(row.has_passed for row in results[0].parity)


def test_a_hop_of_two_tensors_is_one_group_of_all_to_alls(monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V go to the next rank in one call that is not asynchronous, so that it stays on the current stream."""

    def program(rank: int, transport: NcclTransport) -> list[float]:
        communicator = transport.communicator("kv")
        own, received = [numbers(rank, 2), -numbers(rank, 3)], [torch.zeros(2), torch.zeros(3)]
        sends = [Message(tensor, (rank + 1) % 3) for tensor in own]
        transport.send_recv(
            None, communicator, sends, [Message(tensor, (rank - 1) % 3) for tensor in received]
        )
        return torch.cat(received).tolist()

    dist, results = on_ranks(3, program, monkeypatch)
    assert results[0] == [200.0, 201.0, -200.0, -201.0, -202.0]
    assert dist.calls[0] == ["all_reduce", "2 x all_to_all"]  # the first connects the communicator


def test_messages_of_different_types_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(rank: int, transport: NcclTransport) -> float:
        received = torch.zeros(1, dtype=torch.float64)
        sends = [Message(torch.ones(1, dtype=torch.float64) + rank, 1 - rank)]
        transport.send_recv(None, transport.communicator("kv"), sends, [Message(received, 1 - rank)])
        return float(received)

    _, results = on_ranks(2, program, monkeypatch)
    assert results == [2.0, 1.0]


@pytest.mark.parametrize(
    ("is_reversed", "call"), [(False, "2 x all_gather_single"), (True, "2 x all_to_all")]
)
def test_a_gather_is_nccls_own_where_its_pieces_follow_each_other(
    is_reversed: bool, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(rank: int, transport: NcclTransport) -> list[float]:
        whole = torch.zeros(2, 3, 2)
        rows = [list(row) for row in whole]
        targets = [row[::-1] for row in rows] if is_reversed else rows
        own = [numbers(rank, 2), -numbers(rank, 2)]
        transport.all_gather(None, transport.communicator("kv"), targets, own)
        return torch.stack([torch.cat(list(row)) for row in targets]).flatten().tolist()

    dist, results = on_ranks(3, program, monkeypatch)
    wanted = [100.0 * rank + n for rank in range(3) for n in range(2)]
    assert results[0] == wanted + [-value for value in wanted]
    assert dist.calls[0] == ["all_reduce", call]


def test_members_of_a_group_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch orders members by rank, ours may be 3, 1: pieces go by ours."""

    def program(rank: int, transport: NcclTransport) -> tuple[list[float], list[float], list[float]]:
        communicator = transport.communicator("half", [(0, 2), (3, 1)])
        gathered, exchanged, reduced = torch.zeros(2), torch.zeros(2), torch.zeros(1)
        transport.all_gather(None, communicator, [list(gathered.split(1))], [numbers(rank, 1)])
        pieces = list((numbers(rank, 2)).split(1))
        transport.all_to_all(None, communicator, list(exchanged.split(1)), pieces)
        transport.reduce_scatter(None, communicator, [reduced], [pieces])
        return gathered.tolist(), exchanged.tolist(), reduced.tolist()

    _, results = on_ranks(4, program, monkeypatch)
    assert results[3] == ([300.0, 100.0], [300.0, 100.0], [400.0])  # the first of the group
    assert results[1] == ([300.0, 100.0], [301.0, 101.0], [402.0])


def test_a_tensor_with_holes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = NcclTransport(HOST)
    communicator = nccl.NcclCommunicator("kv", (0, 1), None)
    with pytest.raises(ValueError, match="needs contiguous tensors"):
        transport.send_recv(None, communicator, [Message(torch.zeros(4, 4)[:, :2], 1)], [])


def test_pieces_are_joined_only_where_they_follow_each_other_in_memory() -> None:
    whole = torch.arange(12).view(3, 4)
    joined = joined_in_memory(list(whole))
    assert joined is not None
    assert joined.data_ptr() == whole.data_ptr()
    assert joined.tolist() == list(range(12))
    assert joined_in_memory([whole[1], whole[0]]) is None
    assert joined_in_memory([whole[0], whole[2]]) is None
    assert joined_in_memory([whole[:, :2], whole[:, 2:]]) is None
    tail = joined_in_memory([whole[1], whole[2]])  # not at the start of its storage
    assert tail is not None
    assert tail.tolist() == list(range(4, 12))


@pytest.mark.parametrize(
    ("version", "lands"), [("2.7.1+cu128", False), ("2.8.0", True), ("2.13.0+cu130", True), ("3.0", True)]
)
def test_transfers_stay_on_the_current_stream_since_torch_2_8(version: str, lands: bool) -> None:
    assert lands_on_current_stream(version) is lands
