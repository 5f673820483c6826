"""What each scheme hides of its traffic, and how evenly it works: the default run in the virtual clock.

There a hop of the ring takes 10.5 ms and its attention 13.4 ms forward, half of that under a causal mask; the
gather of all K and V takes 31.5 ms.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cptrace.schemes import SCHEMES
from tests.instrumented.conftest import run_apart
from tests.instrumented.scheme_cases import NAMES, SIZES, SMALL
from tests.support.emulated_report import pass_overlap, read_kernels

DEFAULT = {"clock": "virtual", "check": False, "steps": 1, "warmup": 0}


def run_all(folder: Path, options: list[dict[str, Any]]) -> list[Path]:
    """Return one report for each run, all made in one process."""
    run_apart("specs", json.dumps(options), folder)
    return [folder / f"{index}.sqlite" for index in range(len(options))]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """Return the default run's report of each scheme and mask."""
    keys = [(name, causal) for name in NAMES for causal in (False, True)]
    specs = [
        {**DEFAULT, "scheme": name, "causal": causal, "cp_size": SIZES[name][-1]} for name, causal in keys
    ]
    paths = run_all(tmp_path_factory.mktemp("schedules"), specs)
    return dict(zip(keys, paths, strict=True))


def overlaps(report: Path, pass_name: str) -> list[float]:
    """Return each rank's overlapped share of its communication."""
    return [part / whole for part, whole in pass_overlap(report, pass_name).values()]


def busy_ns(report: Path) -> list[int]:
    """Return the summed time of each rank's compute kernels."""
    kernels = [kernel for kernel in read_kernels(report) if not kernel.is_comm]
    pids = sorted({kernel.pid for kernel in kernels})
    return [sum(kernel.end - kernel.start for kernel in kernels if kernel.pid == pid) for pid in pids]


def window_ns(report: Path) -> int:
    """Return the time from the first to the last op of any rank."""
    kernels = read_kernels(report)
    return max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("all_gather", (0.0, 0.0), (0.0, 0.0)),
        ("all_gather_sliced", (0.87, 0.88), (0.79, 0.81)),  # 7 of 8 slices; 14 of 16 transfers, some at once
        ("ring", (1.0, 1.0), (0.83, 0.84)),  # all but the way home of dK and dV
        ("zigzag_ring", (1.0, 1.0), (0.83, 0.84)),
        ("striped_ring", (1.0, 1.0), (0.83, 0.84)),
        ("te", (1.0, 1.0), (1.0, 1.0)),  # the backward ring ends at home
        ("ulysses", (0.0, 0.01), (0.0, 0.01)),  # only the packing of one tensor beside another's transfer
        ("ulysses_chunked", (0.5, 0.52), (0.5, 0.52)),  # one of two chunks, in and out
        ("usp", (0.49, 0.52), (0.49, 0.52)),  # the ring's half
        ("tp", (0.0, 0.0), (0.0, 0.0)),
    ],
)
def test_what_is_hidden_follows_from_the_data_flow(
    reports: dict[tuple[str, bool], Path],
    name: str,
    forward: tuple[float, float],
    backward: tuple[float, float],
) -> None:
    for pass_name, (least, most) in (("forward", forward), ("backward", backward)):
        for share in overlaps(reports[name, False], pass_name):
            assert least <= share <= most


def test_a_single_rank_communicates_nothing(reports: dict[tuple[str, bool], Path]) -> None:
    for causal in (False, True):
        assert not any(kernel.is_comm for kernel in read_kernels(reports["single", causal]))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("ring", "single")])
def test_a_causal_mask_leaves_all_ranks_with_equal_work(
    reports: dict[tuple[str, bool], Path], name: str
) -> None:
    """Half of what there is without a mask, up to merges and diagonals."""
    causal, full = busy_ns(reports[name, True]), busy_ns(reports[name, False])
    assert max(causal) <= 1.01 * min(causal)
    assert max(causal) == pytest.approx(max(full) / 2, rel=0.02)


def test_contiguous_chunks_leave_low_ranks_idle_under_a_causal_mask(
    reports: dict[tuple[str, bool], Path],
) -> None:
    """Rank r works on the diagonal and r whole blocks: 1, 3, 5 and 7 halves."""
    work = busy_ns(reports["ring", True])
    assert [round(ns / work[0]) for ns in work] == [1, 3, 5, 7]
    for balanced in ("zigzag_ring", "striped_ring", "te"):
        assert window_ns(reports[balanced, True]) < 0.7 * window_ns(reports["ring", True])


def test_hiding_more_makes_a_run_shorter(reports: dict[tuple[str, bool], Path]) -> None:
    for causal in (False, True):
        times = {name: window_ns(reports[name, causal]) for name in NAMES}
        assert times["all_gather_sliced"] < times["all_gather"]
        assert times["ulysses_chunked"] < times["ulysses"]
        assert times["te"] < times["zigzag_ring"]
        assert times["zigzag_ring"] <= times["ring"]


def test_attention_alternates_between_two_streams_in_te(reports: dict[tuple[str, bool], Path]) -> None:
    kernels = [k for k in read_kernels(reports["te", False]) if k.pid == 1000]
    forward = [k for k in kernels if "attention_forward" in k.name]
    assert len({kernel.stream for kernel in forward}) == 2
    assert [kernel.stream for kernel in forward[:2]] * 2 == [kernel.stream for kernel in forward]
    last_end = max(kernel.end for kernel in forward)
    assert all(kernel.start >= last_end for kernel in kernels if "merge_partial_out" in kernel.name)


@pytest.mark.parametrize("name", ["ulysses", "ulysses_chunked", "usp"])
def test_layout_copies_are_ops(reports: dict[tuple[str, bool], Path], name: str) -> None:
    """Four per pass and chunk: q, k, v and out, or their gradients."""
    n_chunks = 2 if name == "ulysses_chunked" else 1
    names = [kernel.name for kernel in read_kernels(reports[name, False]) if kernel.pid == 1000]
    assert sum("pack_heads" in name for name in names) == 2 * 4 * n_chunks


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, bytes]]:
    """Return two reports of the same small run for each scheme."""
    specs = [
        {**SMALL, "scheme": name, "cp_size": SIZES[name][-1], "causal": True, "check": False, "layers": 2}
        for name in NAMES
    ]
    paths = run_all(tmp_path_factory.mktemp("pairs"), [*specs, *specs])
    data = [path.read_bytes() for path in paths]
    return dict(zip(NAMES, zip(data, data[len(NAMES) :], strict=False), strict=True))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_the_same_run_gives_the_same_bytes(pairs: dict[str, tuple[bytes, bytes]], scheme: Any) -> None:
    first, second = pairs[scheme.name]
    assert first == second
