"""The time model's arithmetic and what each clock does with it."""

from __future__ import annotations

import time

import pytest

from instrumented.runtime.api import Cost
from instrumented.runtime.clocks import PacedClock, RealClock, TimeModel, VirtualClock, make_clock

MODEL = TimeModel(compute_gflops=5.0, memory_gbytes_per_s=10.0, link_gbps=0.4, link_latency_us=20.0)


def test_compute_takes_its_operations_over_the_speed() -> None:
    assert MODEL.op_ns(Cost(flops=5_000_000)) == 1_000_000


def test_memory_traffic_takes_its_bytes_over_the_bandwidth() -> None:
    assert MODEL.op_ns(Cost(memory_bytes=10_000)) == 1_000


def test_the_longer_of_compute_and_memory_counts() -> None:
    assert MODEL.op_ns(Cost(flops=5_000, memory_bytes=10_000)) == 1_000
    assert MODEL.op_ns(Cost(flops=50_000, memory_bytes=10_000)) == 10_000


def test_bandwidth_is_in_bits() -> None:
    """0.4 Gbit/s is 0.05 bytes per ns: 1000 bytes take 20 us, after 20 us of latency."""
    assert MODEL.transfer_ns(1000) == 20_000 + 20_000


def test_nothing_takes_no_time() -> None:
    assert MODEL.op_ns(Cost()) == 1
    assert TimeModel(1, 1, 1, 0).transfer_ns(0) == 1


def test_virtual_host_time_moves_by_cost_or_to_what_was_waited_for() -> None:
    clock = VirtualClock()
    assert clock.host_advance(30) == 30
    assert clock.host_advance(30, not_before_ns=500) == 500
    assert clock.host_advance(30, not_before_ns=5) == 530
    assert (clock.op_start(7), clock.op_end(7, 3), clock.host_now()) == (7, 10, 530)


def test_paced_ops_last_at_least_as_modelled() -> None:
    clock = PacedClock(time.monotonic_ns())
    start = clock.op_start(0)
    assert clock.op_end(start, 20_000_000) - start >= 20_000_000
    slow_start = start - 10**9  # an op that already took a second is not stretched
    before = clock.host_now()
    assert clock.op_end(slow_start, 20_000_000) - before < 10_000_000


def test_real_ops_are_not_stretched() -> None:
    clock = RealClock(time.monotonic_ns())
    before = clock.host_now()
    assert clock.op_end(before, 10**10) - before < 10**9


def test_clocks_by_name() -> None:
    names = ("real", "paced", "virtual")
    assert [make_clock(name, 0).name for name in names] == list(names)
    with pytest.raises(ValueError, match="no clock is called 'sundial'"):
        make_clock("sundial", 0)
