"""All ranks as threads on one device: every scheme, its results, its traffic, and the order that transfers have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import cptrace
from cptrace.capture.nsys_sqlite_writer import write_report
from cptrace.capture.run_spec import RunSpec
from cptrace.errors import RunError
from cptrace.schemes import SCHEMES
from instrumented import backends, devices
from instrumented.rank import RankResult
from instrumented.run import describe
from instrumented.runtime.api import Cost, Message
from instrumented.runtime.cuda import CudaDevice, HostClock
from instrumented.runtime.local_d2d import LocalTransport, Meeting, MeetingBroken
from instrumented.threads import run_threads
from tests.instrumented.scheme_cases import SIZES, SMALL, name_of
from tests.support.fake_cuda import FakeCuda, is_before

CASES = [
    {"scheme": scheme.name, "cp_size": SIZES[scheme.name][-1], "causal": causal, "kv_heads": kv_heads}
    for scheme in SCHEMES
    for causal, kv_heads in ((False, 8), (True, 4))
]
CASES += [
    {"scheme": "te", "cp_size": 2, "message_dtype": "fp8", "warmup": 1, "causal": True},
    {"scheme": "zigzag_ring", "cp_size": 3, "seq_len": 31, "causal": True},
    {"scheme": "ring", "cp_size": 2, "faults": ("shared-stream",)},
    {"scheme": "usp", "cp_size": 4, "model": "llama", "hidden": 128, "ffn": 64, "causal": True},
    {"scheme": "ring", "cp_size": 2, "tp_size": 2, "model": "llama", "hidden": 128, "ffn": 64},
]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Return the stand-in in place of `torch.cuda`, with host memory as the device's."""
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(devices, "SHARED_PLACE", torch.device("cpu"))
    return fake


def run(spec: RunSpec) -> list[RankResult]:
    spec.validate()
    backend = backends.choose_backend(spec)
    assert backend is backends.ONE_GPU
    return backend.run(spec, lambda _text: None, None)


@pytest.mark.parametrize("options", CASES, ids=[name_of(case) for case in CASES])
@pytest.mark.usefixtures("cuda")
def test_every_scheme_computes_and_sends_what_it_should(options: dict[str, Any], tmp_path: Path) -> None:
    spec = RunSpec(**{**SMALL, "clock": "paced", **options, "device": "cuda"})
    results = run(spec)
    rows = results[0].parity
    assert rows
    assert all(row.has_passed for row in rows), [row for row in rows if not row.has_passed]
    metadata = describe(spec, results, backends.ONE_GPU)
    path = tmp_path / "run.sqlite"
    write_report(path, [result.record for result in results], metadata, session_start_ns=0)
    report = cptrace.analyze(path)
    attention = [row for row in report.rows("traffic") if row["part"] == "attention"]
    assert [row["difference_bytes"] for row in attention] == [0] * (2 * spec.n_ranks)
    ranks = report.rows("ranks")
    assert [row["rank"] for row in ranks] == list(range(spec.n_ranks))
    assert all(metadata["checks"][name]["passed"] in (None, True) for name in ("loss", "grad_norm"))
    assert all(row["peak_memory_bytes"] is None and row["unclassified_ns"] == 0 for row in ranks)
    comm = report.rows("collectives")
    assert all(row["bytes_per_s"] is None for row in comm)  # these copies cross no link
    assert all(row["bytes"] is not None for row in comm)
    assert bool(comm) == (spec.scheme != "single")


def test_a_failing_rank_is_named_and_the_others_do_not_wait() -> None:
    meeting = Meeting(3)

    def body(rank: int, _link: object) -> None:
        if rank == 1:
            raise ArithmeticError("no such number\nsecond line")
        meeting.take(("never", rank))

    with pytest.raises(
        RunError, match=r"^rank 1 failed: ArithmeticError: no such number; all ranks were ended$"
    ):
        run_threads(3, body, lambda _text: None, meeting.break_off, MeetingBroken)


def on_ranks(size: int, program: Any) -> None:
    """Run a program on devices of ranks that share one."""
    meeting = Meeting(size)

    def body(rank: int, _link: object) -> None:
        transport = LocalTransport(meeting, rank)
        program(CudaDevice(rank, size, torch.device("cpu"), transport, HostClock(0)))

    run_threads(size, body, lambda _text: None, meeting.break_off, MeetingBroken)


def test_a_transfer_is_ordered_after_the_senders_work_and_before_its_next(cuda: FakeCuda) -> None:
    """
    sender     fill ── [send ........] ── overwrite
    receiver          [ ...... receive] ── read
    """
    clocks: dict[str, dict[int, int]] = {}
    streams: dict[int, int] = {}
    received = {}

    def note(name: str) -> None:
        clocks[name] = cuda.current_stream().step()

    def program(device: CudaDevice) -> None:
        stream, communicator = device.stream(), device.communicator("kv")
        streams[device.rank] = stream.raw.number
        tensor = torch.full((4,), float(device.rank))
        if device.rank == 0:
            device.launch(stream, "fill", note, "fill", cost=Cost())
            device.send_recv(stream, communicator, [Message(tensor, 1)], [])
            device.launch(stream, "overwrite", note, "overwrite", cost=Cost())
        else:
            device.launch(stream, "before", note, "before", cost=Cost())
            device.send_recv(stream, communicator, [], [Message(tensor, 0)])
            device.launch(stream, "read", note, "read", cost=Cost())
            received[1] = tensor.tolist()

    on_ranks(2, program)
    assert received[1] == [0.0] * 4
    assert is_before(clocks["fill"], streams[0], clocks["read"])
    assert is_before(clocks["before"], streams[1], clocks["overwrite"])  # so after the copy that follows it
    assert not is_before(clocks["overwrite"], streams[0], clocks["read"])


def test_collectives_of_uneven_groups(cuda: FakeCuda) -> None:
    """Ranks 0 and 2 gather, and ranks 3 and 1, in that order; then all sum, rounding once."""
    seen = {}

    def program(device: CudaDevice) -> None:
        stream = device.stream()
        half, everyone = device.communicator("half", [(0, 2), (3, 1)]), device.communicator("all")
        gathered = torch.zeros(2)
        device.all_gather(stream, half, [list(gathered.split(1))], [torch.tensor([100.0 * device.rank])])
        total = torch.full((4,), 256.0 if device.rank == 0 else 1.0, dtype=torch.bfloat16)
        device.all_reduce(stream, everyone, total)
        seen[device.rank] = (gathered.tolist(), total.tolist())

    on_ranks(4, program)
    assert [seen[rank][0] for rank in range(4)] == [[0, 200], [300, 100], [0, 200], [300, 100]]
    assert all(total == [260.0] * 4 for _, total in seen.values())  # 256 + 1 + 1 + 1 = 259, in bf16 260


@pytest.mark.parametrize(
    ("n_devices", "n_ranks", "transport"), [(1, 4, "local-d2d"), (4, 4, "nccl"), (8, 4, "nccl")]
)
def test_the_number_of_devices_decides_where_ranks_live(n_devices: int, n_ranks: int, transport: str) -> None:
    backend = backends.choose_backend(RunSpec(device="cuda", cp_size=n_ranks), n_devices)
    assert (backend.transport, backend.device_kind) == (transport, "cuda")


@pytest.mark.parametrize(
    ("n_devices", "said"), [(0, "sees no CUDA device"), (2, "use --cp-size 2, torchrun")]
)
def test_too_few_devices_are_refused(n_devices: int, said: str) -> None:
    with pytest.raises(RunError, match=said):
        backends.choose_backend(RunSpec(device="cuda", cp_size=4), n_devices)
