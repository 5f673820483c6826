"""Which device a run gets, and why; and what a launcher says."""

from __future__ import annotations

import pytest

from cptrace.capture.devices import DeviceChoice, choose_device, find_cuda
from cptrace.capture.launched import Launched, find_launched, first_host
from cptrace.capture.run_spec import RunSpec
from cptrace.errors import RunError, UsageError


def found(n_devices: int):
    return lambda: (n_devices, f"torch sees {n_devices}")


@pytest.mark.parametrize(
    ("name", "n_devices", "needs", "choice"),
    [
        ("auto", 0, None, DeviceChoice("cpu", "torch sees 0")),
        ("auto", 2, None, DeviceChoice("cuda", "torch sees 2")),
        ("auto", 2, "a virtual clock", DeviceChoice("cpu", "a virtual clock")),
        ("cpu", 2, None, DeviceChoice("cpu", "as asked for")),
        ("cuda", 2, "a virtual clock", DeviceChoice("cuda", "as asked for")),
    ],
)
def test_auto_takes_cuda_where_it_is_and_nothing_needs_emulation(
    name: str, n_devices: int, needs: str | None, choice: DeviceChoice
) -> None:
    assert choose_device(name, needs_emulation=needs, find=found(n_devices)) == choice
    assert choice.kind == ("cuda" if choice.name == "cuda" else "cpu-emulated")


def test_cuda_that_is_not_there_is_refused_with_what_was_found() -> None:
    with pytest.raises(RunError, match=r"--device cuda: torch sees 0; use --device cpu"):
        choose_device("cuda", find=found(0))


def test_a_hidden_device_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    n_devices, said = find_cuda()
    assert n_devices == 0
    assert "no CUDA device" in said or "CUDA_VISIBLE_DEVICES" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clock": "virtual"}, "only the emulated device computes times; use --device cpu"),
        ({"faults": ("straggler:1",)}, "straggler"),
        ({"scheme": "te", "impl": "ring-flash-attn"}, "has no scheme te; it has ring, zigzag_ring"),
        ({"impl": "ring-flash-attn", "model": "llama"}, "a library's attention runs alone"),
    ],
)
def test_what_a_gpu_cannot_do_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunSpec(device="cuda", **change).validate()  # type: ignore[arg-type]


def test_torchrun_tells_the_rank() -> None:
    environment = {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "1234",
    }
    launched = find_launched(environment)
    assert launched == Launched("torchrun", 3, 8, 1, "head", 1234)
    assert launched.environment() == environment


def test_slurm_tells_the_rank_and_the_first_host() -> None:
    environment = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "gpu[003-004]",
    }
    assert find_launched(environment) == Launched("Slurm", 3, 8, 1, "gpu003", 29500)
    assert find_launched({**environment, "SLURM_NTASKS": "1"}) is None  # a shell within an allocation


def test_a_process_started_by_hand_is_no_rank() -> None:
    assert find_launched({"HOME": "/root", "RANK": "0"}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "RANK=8, but WORLD_SIZE=8"),
        ({"RANK": "x"}, "RANK='x'; it must be a number"),
        ({"LOCAL_RANK": None}, "no LOCAL_RANK"),
    ],
)
def test_a_launcher_that_contradicts_itself_is_refused(change: dict[str, str | None], message: str) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", **change}
    with pytest.raises(UsageError, match=message):
        find_launched({name: value for name, value in environment.items() if value is not None})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node7", "node7"),
        ("a1,a2", "a1"),
        ("gpu[3,5-9],b1", "gpu3"),
        ("r[01-02]-ib", "r01-ib"),
        ("", "127.0.0.1"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host
