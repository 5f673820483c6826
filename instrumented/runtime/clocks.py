"""Three ways to tell the time on the emulated device.

real      what the machine's monotonic clock shows.
paced     the same, but every op lasts at least as long as the model says: the stream sleeps the rest.
virtual   no clock at all: a time is computed from the times it depends on, so it is the same on every run.

A clock is asked at the edges of host calls (by the host thread) and of ops (by stream threads). In the
virtual clock an op starts when the latest thing it waits for is over and ends a modelled duration later.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, Protocol

from instrumented.runtime.api import Cost

# Host time of one call in the virtual clock, nanoseconds: the size of a CUDA call on a current server.
LAUNCH_NS: Final = 3_000
COLLECTIVE_LAUNCH_NS: Final = 4_000
EVENT_NS: Final = 2_000
SYNCHRONIZE_NS: Final = 2_000
RANGE_NS: Final = 100  # not 0, so that a range lies strictly inside the one around it


@dataclass(frozen=True, slots=True)
class TimeModel:
    """How long an op takes on the modelled device.

    Compute and memory traffic of an op overlap, so the longer counts. A transfer takes the link's latency
    and then its bytes one after another; transfers of different communicators do not slow each other.

    Attributes:
        compute_gflops: 10^9 floating-point operations per second, which is operations per nanosecond.
        memory_gbytes_per_s: 10^9 bytes per second, which is bytes per nanosecond.
        link_gbps: Gigabits per second in each direction.
        link_latency_us: Microseconds.
    """

    compute_gflops: float
    memory_gbytes_per_s: float
    link_gbps: float
    link_latency_us: float

    def op_ns(self, cost: Cost) -> int:
        """Return the nanoseconds that a kernel or copy takes."""
        return max(
            1, round(cost.flops / self.compute_gflops), round(cost.memory_bytes / self.memory_gbytes_per_s)
        )

    def transfer_ns(self, n_bytes: int) -> int:
        """Return the nanoseconds that `n_bytes` take over a link once both sides are there."""
        return max(1, round(self.link_latency_us * 1_000 + n_bytes * 8 / self.link_gbps))


class Clock(Protocol):
    """Tells the host's time and when ops start and end; nanoseconds since the session's start."""

    name: str

    def host_now(self) -> int:
        """Return the host's time."""

    def host_advance(self, cost_ns: int, not_before_ns: int = 0) -> int:
        """Return the host's time after a call of `cost_ns` that ends no earlier than `not_before_ns`."""

    def op_start(self, ready_ns: int) -> int:
        """Return when an op starts whose last dependency was over at `ready_ns` and that may run now."""

    def op_end(self, begin_ns: int, model_ns: int) -> int:
        """Return when an op ends that has done its work and could do it from `begin_ns` on."""


class RealClock:
    """The machine's clock."""

    name = "real"

    def __init__(self, session_start_ns: int) -> None:
        """Count from `session_start_ns`, a value of the monotonic clock that all ranks share."""
        self._session_start_ns = session_start_ns

    def host_now(self) -> int:
        """Return the monotonic time since the session's start."""
        return time.monotonic_ns() - self._session_start_ns

    def host_advance(self, cost_ns: int, not_before_ns: int = 0) -> int:
        """Return the time now."""
        return self.host_now()

    def op_start(self, ready_ns: int) -> int:
        """Return the time now."""
        return self.host_now()

    def op_end(self, begin_ns: int, model_ns: int) -> int:
        """Return the time now."""
        return self.host_now()


class PacedClock(RealClock):
    """The machine's clock, with every op stretched to its modelled duration."""

    name = "paced"

    def op_end(self, begin_ns: int, model_ns: int) -> int:
        """Sleep until `model_ns` after `begin_ns` and return the time then."""
        while (rest_ns := begin_ns + model_ns - self.host_now()) > 0:
            time.sleep(rest_ns / 1e9)
        return self.host_now()


class VirtualClock:
    """Computes every time from the times it depends on."""

    name = "virtual"

    def __init__(self) -> None:
        """Start at zero."""
        self._host_ns = 0

    def host_now(self) -> int:
        """Return the host's time."""
        return self._host_ns

    def host_advance(self, cost_ns: int, not_before_ns: int = 0) -> int:
        """Move the host's time on by a call, or to what the call waited for where that is later."""
        self._host_ns = max(self._host_ns + cost_ns, not_before_ns)
        return self._host_ns

    def op_start(self, ready_ns: int) -> int:
        """Return `ready_ns`: nothing else can hold an op up."""
        return ready_ns

    def op_end(self, begin_ns: int, model_ns: int) -> int:
        """Return the modelled end."""
        return begin_ns + model_ns


def make_clock(name: str, session_start_ns: int) -> Clock:
    """Return the clock called `name`.

    Raises:
        ValueError: There is no such clock.
    """
    if name == VirtualClock.name:
        return VirtualClock()
    for clock in (RealClock, PacedClock):
        if name == clock.name:
            return clock(session_start_ns)
    raise ValueError(f"no clock is called {name!r}")
