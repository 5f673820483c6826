"""Finding `late-launch`: the device waits for the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from cptrace.findings.late_launch import KEEPS_UP_NS
from tests.support.diagnosed import findings, lost_time, report_of, step_before
from tests.support.simulated_run import Host, step_ns
from tests.support.simulated_schemes import Ring

KEY = ("late-launch", "in-steps")
BETWEEN = ("late-launch", "between-steps")
PAUSE_NS = 600_000


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
