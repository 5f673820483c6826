"""Ring attention on several ranks: exact results, counted traffic, and a schedule that hides its transfers."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from cptrace.labels import parse_label
from tests.instrumented.conftest import RING_SPECS, RingRun, run_apart
from tests.support.emulated_report import KernelRow, pass_overlap, query, read_kernels, run_metadata

CASES = pytest.mark.parametrize(
    "index",
    range(len(RING_SPECS)),
    ids=[f"{s['cp_size']}ranks-{'causal' if s['causal'] else 'full'}-{s['kv_heads']}kv" for s in RING_SPECS],
)

DEFAULT = {"clock": "virtual", "check": False}


@CASES
def test_results_are_as_exact_as_one_kernels(ring_runs: list[RingRun], index: int) -> None:
    """At most twice the error of one kernel in the same type, both against dense float64."""
    spec, metadata, _ = ring_runs[index]
    rows = metadata["checks"]["parity"]
    assert {(row["rank"], row["layer"], row["tensor"]) for row in rows} == {
        (rank, layer, name)
        for rank in range(spec.cp_size)
        for layer in range(spec.layers)
        for name in ("out", "dq", "dk", "dv")
    }
    assert all(row["rms_error"] <= 2 * row["one_kernel_rms_error"] for row in rows), rows
    assert all(row["passed"] for row in rows), rows
    assert all(row["max_error"] > 0 for row in rows)


@CASES
def test_the_running_maximum_is_watched_in_every_merge(ring_runs: list[RingRun], index: int) -> None:
    spec, metadata, _ = ring_runs[index]
    size = spec.cp_size
    blocks_per_layer = size * (size + 1) // 2 if spec.causal else size * size
    check = metadata["checks"]["running_max"]
    assert check["passed"]
    assert check["n_merges"] == blocks_per_layer * spec.layers * spec.steps


def attention_hops(kernels: list[KernelRow], rank: int, pass_name: str) -> list[int]:
    """Return the hops in which a rank computes attention, in order of start."""
    labels = (
        parse_label(k.labels[-1]) for k in kernels if k.pid == 1000 + rank and "flash_attention" in k.name
    )
    return [int(label.fields["hop"]) for label in labels if label.fields["pass"] == pass_name]


@CASES
def test_a_causal_rank_skips_what_it_may_not_see(ring_runs: list[RingRun], index: int) -> None:
    spec, _, report = ring_runs[index]
    kernels = read_kernels(report)
    for rank in range(spec.cp_size):
        hops = list(range(rank + 1 if spec.causal else spec.cp_size))
        for name in spec.passes:
            assert attention_hops(kernels, rank, name) == hops * spec.layers


@pytest.fixture(scope="module")
def default_reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Return reports of the default run and of one with two layers and grouped heads, both virtual."""
    return make_reports(tmp_path_factory, [DEFAULT, {**DEFAULT, "layers": 2, "kv_heads": 2, "steps": 2}])


def make_reports(
    tmp_path_factory: pytest.TempPathFactory, specs: list[dict[str, object]]
) -> tuple[Path, ...]:
    """Return one report per spec, all made in one process."""
    folder = tmp_path_factory.mktemp("reports")
    run_apart("specs", json.dumps(specs), folder)
    return tuple(folder / f"{index}.sqlite" for index in range(len(specs)))


def test_a_busy_machine_gives_the_same_bytes(
    default_reports: tuple[Path, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        (again,) = make_reports(tmp_path_factory, [DEFAULT])
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert again.read_bytes() == default_reports[0].read_bytes()


def test_the_paced_clock_hides_most_of_the_forward_transfers(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    (report,) = make_reports(tmp_path_factory, [{**DEFAULT, "clock": "paced"}])
    parts, wholes = zip(*pass_overlap(report, "forward").values(), strict=True)
    assert sum(parts) > 0.5 * sum(wholes)


def test_a_default_report_is_small(default_reports: tuple[Path, ...]) -> None:
    assert default_reports[0].stat().st_size <= 256 * 1024


@pytest.mark.parametrize("index", [0, 1])
def test_the_forward_pass_hides_every_transfer(default_reports: tuple[Path, ...], index: int) -> None:
    overlaps = pass_overlap(default_reports[index], "forward")
    assert len(overlaps) == 4
    for overlapped, comm in overlaps.values():
        assert overlapped == comm > 0


def test_the_backward_pass_shows_its_last_transfer_alone(default_reports: tuple[Path, ...]) -> None:
    """Of 2P - 1 transfers the last one, which brings dK and dV home, has nothing to hide behind.

    KV and dKV transfers run side by side on two communicators, so their union is shorter than their sum.
    """
    hop_ns = 20_000 + 524_288 * 20
    for overlapped, comm in pass_overlap(default_reports[0], "backward").values():
        assert comm - overlapped == 3 * hop_ns  # three measured steps


def test_ops_that_must_not_overlap_do_not(default_reports: tuple[Path, ...]) -> None:
    kernels = read_kernels(default_reports[0])
    for pid in {kernel.pid for kernel in kernels}:
        for stream in {kernel.stream for kernel in kernels}:
            mine = sorted(k for k in kernels if (k.pid, k.stream) == (pid, stream))
            mine.sort(key=lambda kernel: kernel.start)
            assert all(a.end <= b.start for a, b in pairwise(mine))
            assert all(kernel.start >= kernel.launch_end for kernel in mine)


def test_every_transfer_into_a_buffer_waits_for_its_reader(default_reports: tuple[Path, ...]) -> None:
    """KV hop i overwrites what attention i - 1 read, and attention i + 1 reads what hop i brought."""
    kernels = [k for k in read_kernels(default_reports[0]) if k.pid == 1000 and "step" in k.labels]
    by_label = {}
    for kernel in kernels:
        label = parse_label(kernel.labels[-1])
        key = (label.name, label.fields.get("tensor"), int(label.fields["hop"]))
        if label.fields["pass"] == "forward" and key not in by_label:
            by_label[key] = kernel
    for hop in range(3):
        transfer = by_label["send_recv", "kv", hop]
        assert by_label["attention", None, hop + 1].start >= transfer.end
        if hop > 1:  # the first two overwrite what the step before read
            assert transfer.start >= by_label["attention", None, hop - 1].end


def test_the_run_is_described_in_the_report(default_reports: tuple[Path, ...]) -> None:
    run = run_metadata(default_reports[1])
    assert run["schema"] == "cptrace.run/1"
    assert run["device_kind"] == "cpu-emulated"
    assert (run["scheme"], run["clock"], run["layers"], run["kv_heads"]) == ("ring", "virtual", 2, 2)
    assert run["passes"] == ["forward", "backward"]
    assert run["checks"]["parity"] is None
    assert [(r["rank"], r["pid"], r["device"]) for r in run["ranks"]] == [(r, 1000 + r, r) for r in range(4)]


def test_kv_and_dkv_have_streams_of_their_own(default_reports: tuple[Path, ...]) -> None:
    rows = query(
        default_reports[0],
        "SELECT DISTINCT streamId, value LIKE '%gloo%' FROM CUPTI_ACTIVITY_KIND_KERNEL "
        "JOIN StringIds ON id = demangledName ORDER BY streamId",
    )
    assert rows == [(7, 0), (13, 1), (14, 1)]


def test_warm_up_is_not_a_step(default_reports: tuple[Path, ...]) -> None:
    kernels = [kernel for kernel in read_kernels(default_reports[0]) if kernel.pid == 1000]
    outermost = [kernel.labels[0] for kernel in kernels]
    assert outermost.count("step") == 3 * outermost.count("warmup") > 0
    assert set(outermost) == {"step", "warmup"}
