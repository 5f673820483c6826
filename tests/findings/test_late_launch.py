"""Finding `late-launch`: the device waits for the host."""

from __future__ import annotations

from pathlib import Path

import pytest

import cptrace
from cptrace.findings.late_launch import KEEPS_UP_NS
from cptrace.report import Report
from tests.support.command_line import check_refused
from tests.support.command_line import cptrace as run
from tests.support.diagnosed import findings, lost_time, not_looked_for, report_of, step_before
from tests.support.simulated_run import Host, simulate, step_ns, write
from tests.support.simulated_schemes import Ring
from tests.support.tiny_export import edit

KEY = ("late-launch", "in-steps")
BETWEEN = ("late-launch", "between-steps")
PAUSE_NS = 600_000
ATTENTION_NS = 1_000_000
LAUNCH_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"


def test_a_host_that_takes_longer_than_the_work_it_launches(tmp_path: Path) -> None:
    """
    host        [pause    ]launch kv 0 [pause    ]launch attention 0 [pause    ]launch kv 1
    stream 7                                      [attention 0]
    stream 13              [kv 0    ]                                            [kv 1    ]
    """
    ring = Ring(pause_ns=PAUSE_NS)
    report = report_of(ring.hosts(), tmp_path)
    assert lost_time(report) == {KEY}
    row = findings(report)[KEY]
    assert step_before(row) == step_ns(ring.hosts())
    n_launches = 22  # of a rank: 8 attentions, 6 kv, 4 sums, 4 dkv
    mended = step_ns(ring.but(pause_ns=0).hosts())
    assert mended <= row["predicted_step_ns"] <= mended + n_launches * KEEPS_UP_NS
    assert 0 < row["value"] < 4 * n_launches * step_ns(ring.hosts())


@pytest.mark.parametrize("pause_ns", [0, 2_000, 15_000])
def test_a_host_that_keeps_up(tmp_path: Path, pause_ns: int) -> None:
    assert not lost_time(report_of(Ring(pause_ns=pause_ns).hosts(), tmp_path))


def test_a_host_that_is_blocked_is_not_slow(tmp_path: Path) -> None:
    assert KEY not in findings(report_of(Ring(blocks_host=True).hosts(), tmp_path))


@pytest.mark.parametrize(("pause_ns", "is_found"), [(10_000, False), (400_000, True)])
def test_a_host_that_pauses_between_steps(tmp_path: Path, pause_ns: int, is_found: bool) -> None:
    """
    host        launch attention  sync  [pause    ] launch attention  sync
    stream 7      [attention     ]                    [attention     ]
    """
    host = Host(0)
    for step in range(3):
        with host.scope(f"step {step}"):
            host.launch("flash_fwd_kernel", 1_000_000)
            host.sync()
        host.pause(pause_ns)
    row = findings(report_of([host], tmp_path)).get(BETWEEN)
    assert (row is not None) == is_found
    assert row is None or (row["recoverable_ns"] is None and row["value"] >= 2 * pause_ns)


@pytest.mark.parametrize(("work_ns", "pause_ns", "is_found"), [(0, 800_000, True), (800_000, 0, False)])
def test_a_pause_behind_a_blocked_host(tmp_path: Path, work_ns: int, pause_ns: int, is_found: bool) -> None:
    """
    host        launch  [sync           ] [pause, or one more sync     ] launch
    stream 7      [attention]                                              [attention]
    stream 13     [transfer             ]  [copy                     ]
                                         step ends
    """
    host = Host(0)
    for step in range(3):
        with host.scope(f"step {step}"):
            host.launch("flash_fwd_kernel", 200_000)
            host.launch("ncclDevKernel_AllReduce", 1_000_000, 13)
            host.sync()
        if work_ns:
            host.launch("copy_kernel", work_ns, 13)
            host.sync()
        host.pause(pause_ns)
    assert (BETWEEN in findings(report_of([host], tmp_path))) == is_found


def all_reduce_runs(pauses_ns: dict[int, tuple[int, int]]) -> list[Host]:
    """Return three steps of attention and a transfer among all ranks; some ranks pause before the last two."""
    hosts = [Host(rank) for rank in range(4)]
    for host in hosts:
        peers = tuple(rank for rank in range(4) if rank != host.rank)
        for step in range(3):
            if step:
                host.pause(pauses_ns.get(host.rank, (0, 0))[step - 1])
            with host.scope(f"step {step}"):
                host.launch("flash_fwd_kernel", ATTENTION_NS)
                what = f"all_reduce pass=forward layer=0 hop=0 tensor=out bytes=64 step={step}"
                host.transfer("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 200_000, 7, label=what, peers=peers)
                host.sync()
    return hosts


NOT_IN_STEPS = "step times do not contain it"
OTHERS_WAIT = "the other ranks wait for that within their steps"
LESS_WAIT = "ranks that pause less wait for the others within their steps"
LONG, SHORT = (2 * ATTENTION_NS,) * 2, (ATTENTION_NS,) * 2


@pytest.mark.parametrize(
    ("pauses_ns", "said"),
    [
        ({2: LONG}, ("the device of rank 2 is empty for 2.0", "(median)", OTHERS_WAIT)),
        ({2: (0, 9 * ATTENTION_NS)}, ("the device of rank 2 is empty for 9.0", "1 of 2 times", OTHERS_WAIT)),
        ({1: LONG, 2: SHORT}, ("devices of ranks 1, 2 are", OTHERS_WAIT)),
        ({0: LONG, 1: SHORT, 2: SHORT, 3: SHORT}, ("devices of ranks 0, 1, 2, 3 are", LESS_WAIT)),
        (dict.fromkeys(range(4), LONG), ("devices of ranks 0, 1, 2, 3 are empty for 2.0", NOT_IN_STEPS)),
    ],
)
def test_a_rank_is_judged_by_its_own_pauses(
    tmp_path: Path, pauses_ns: dict[int, tuple[int, int]], said: tuple[str, ...]
) -> None:
    """
    rank 2   [attention][transfer]   pause  [attention][transfer]
    others   [attention][transfer][attention][ .... transfer    ]      they wait in their step: no pause of theirs
    """
    row = findings(report_of(all_reduce_runs(pauses_ns), tmp_path))[BETWEEN]
    assert all(words in row["summary"] for words in said), row["summary"]
    assert sum(words in row["summary"] for words in (NOT_IN_STEPS, OTHERS_WAIT, LESS_WAIT)) == 1
    assert {entry["rank"] for entry in row["evidence"]} == pauses_ns.keys()
    assert row["rank"] == (next(iter(pauses_ns)) if len(pauses_ns) == 1 else None)
    paused_ns = sum(map(sum, pauses_ns.values()))
    assert paused_ns <= row["value"] <= paused_ns + 8 * 10_000


def test_a_pause_too_short_on_average_is_nothing(tmp_path: Path) -> None:
    assert BETWEEN not in findings(report_of(all_reduce_runs({2: (0, ATTENTION_NS // 20)}), tmp_path))


def longest_empty_ns(host: Host) -> int:
    """Return the longest time without ops of a host whose ops come one after another."""
    (times,) = simulate([host])
    return max(start - end for (_, end), (start, _) in zip(times.ops, times.ops[1:], strict=False))


@pytest.mark.parametrize("before_the_pause", [True, False])
@pytest.mark.parametrize("kernel", ["flash_fwd_kernel", "copy_kernel"])
def test_what_runs_between_steps_is_not_empty(tmp_path: Path, kernel: str, before_the_pause: bool) -> None:
    """An iteration without a range, or copies for the next step.

    host        launch   sync  launch 4   sync  [pause   ] launch   sync
    stream 7      [in step]      [x][x][x][x]               [in step]
    """
    host = Host(0)
    for step in range(3):
        with host.scope(f"step {step}"):
            host.launch("flash_fwd_kernel", ATTENTION_NS)
            host.sync()
        host.pause(0 if before_the_pause else PAUSE_NS)
        for _ in range(4):
            host.launch(kernel, ATTENTION_NS)
        host.sync()
        host.pause(PAUSE_NS if before_the_pause else 0)
    row = findings(report_of([host], tmp_path))[BETWEEN]
    assert row["value"] == 2 * longest_empty_ns(host)
    assert PAUSE_NS <= row["value"] / 2 < PAUSE_NS + 10_000


def test_ops_whose_launches_are_lost_are_no_pause(tmp_path: Path) -> None:
    """Half of each step's ops belong to no step, as nothing says when they were launched.

    host        launch, launch (launch, launch: lost) [something else  ]  launch, launch
    stream 7      [attention][attention][attention][attention]              [attention]
                   step                 step ends
    """
    host, lost = Host(0), []
    for step in range(3):
        with host.scope(f"step {step}"):
            for number in range(4):
                host.launch("flash_fwd_kernel", ATTENTION_NS)
                lost += (
                    [len(host.program) - 1] if number >= 2 else []
                )  # the range's end comes behind the launch
        host.pause(4 * ATTENTION_NS)
    path = write([host], tmp_path / "run.sqlite")
    assert BETWEEN not in findings(cptrace.analyze(path))
    edit(path, f"DELETE FROM {LAUNCH_CALLS} WHERE correlationId IN ({','.join(map(str, lost))})")
    report = cptrace.analyze(path)
    assert [row["n_ops"] for row in report.rows("steps")] == [2, 2, 2]
    assert BETWEEN not in findings(report)


def lossy(ring: Ring, folder: Path, *statements: str) -> Path:
    return edit(write(ring.hosts(), folder / "lossy.sqlite"), *statements)


def is_told(report: Report) -> bool:
    """Return whether a report finds late launches, or says that they could not be looked for."""
    return KEY in findings(report) or "late-launch" in not_looked_for(report)


@pytest.mark.parametrize(
    "statement", [f"DROP TABLE {LAUNCH_CALLS}", f"DELETE FROM {LAUNCH_CALLS} WHERE rowid % 4"]
)
def test_without_launches_nothing_can_be_said(tmp_path: Path, statement: str) -> None:
    path = lossy(Ring(pause_ns=PAUSE_NS), tmp_path, statement)
    reason = not_looked_for(cptrace.analyze(path))["late-launch"]
    assert "no launching call of" in reason
    assert "record again with: nsys profile --trace=cuda" in reason
    for wanted in ("late-launch", "late-launch:in-steps", "late-launch:between-steps"):
        done = run("analyze", path, "--fail-on", wanted, "-o", tmp_path / "out.txt", "--force")
        check_refused(done, 2, "cannot be decided", "no launching call of")
    done = run("whatif", path, "--fix", "late-launch")
    assert "no launching call of" in " ".join(done.out.split())


@pytest.mark.parametrize("nth", [3, 4, 5, 8, 50])
def test_lost_launches_hide_no_slow_host_silently(tmp_path: Path, nth: int) -> None:
    statement = f"DELETE FROM {LAUNCH_CALLS} WHERE rowid % {nth} = 0"
    assert is_told(cptrace.analyze(lossy(Ring(pause_ns=PAUSE_NS), tmp_path, statement)))


def test_a_host_that_keeps_up_needs_not_all_its_launches(tmp_path: Path) -> None:
    statement = f"DELETE FROM {LAUNCH_CALLS} WHERE rowid % 5 = 0"
    assert not is_told(cptrace.analyze(lossy(Ring(), tmp_path, statement)))
