"""Makes a rank's device: the emulated one, or a CUDA device of its own, or its share of one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final, Protocol

import torch

from cptrace.capture.records import ProcessRecord
from cptrace.capture.run_spec import CPU, RunSpec
from instrumented.faults import break_device, slow_down
from instrumented.profiling import RecordFunctionEmitter, is_kineto
from instrumented.runtime.api import Device
from instrumented.runtime.clocks import RealClock, TimeModel, make_clock
from instrumented.runtime.control import broadcast_int
from instrumented.runtime.cpu import CpuDevice
from instrumented.runtime.cuda import CudaDevice, HostClock
from instrumented.runtime.local_d2d import LocalTransport, Meeting
from instrumented.runtime.nccl import NcclTransport
from instrumented.runtime.nvtx_emitter import make_emitter
from instrumented.runtime.transport import Transport

SHARED_PLACE: Final = torch.device("cuda", 0)


class RankDevice(Device, Protocol):
    """A device as the code that runs a rank sees it.

    Attributes:
        allocated_bytes: Bytes of all tensors that were made.
    """

    allocated_bytes: int

    @property
    def peak_memory_bytes(self) -> int | None:
        """The most bytes of tensors at once, None where that cannot be told."""

    def settle(self) -> None:
        """Wait for what setup has queued; not recorded."""

    def record(self) -> ProcessRecord:
        """Return what was recorded; the device must have been synchronised."""

    def close(self) -> None:
        """End the device."""


MakeDevice = Callable[[RunSpec, int], RankDevice]
"""Makes a rank's device; every rank must do so at the same time."""


def make_device(spec: RunSpec, rank: int) -> RankDevice:
    """Return the device of a rank that is a process: emulated, or the CUDA device of its number on this host."""
    if spec.device == CPU:
        return _make_emulated(spec, rank)
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(place)
    return make_cuda(spec, rank, place, NcclTransport(place))


def make_shared(meeting: Meeting, spec: RunSpec, rank: int) -> RankDevice:
    """Return the share of the one CUDA device that a rank has which is a thread."""
    return make_cuda(spec, rank, SHARED_PLACE, LocalTransport(meeting, rank))


def _make_emulated(spec: RunSpec, rank: int) -> RankDevice:
    session_start_ns = broadcast_int(time.monotonic_ns())
    model, clock = slow_down(_time_model(spec), spec.faults, rank), make_clock(spec.clock, session_start_ns)
    device = CpuDevice(rank, spec.n_ranks, clock, model, make_emitter())
    return break_device(device, spec.faults, clock, model)


def make_cuda(spec: RunSpec, rank: int, place: torch.device, transport: Transport) -> RankDevice:
    """Return a rank's device on a place of torch's, with the run's faults."""
    clock = HostClock(broadcast_int(time.time_ns()))
    emitter = RecordFunctionEmitter() if is_kineto() else make_emitter()
    device = CudaDevice(rank, spec.n_ranks, place, transport, clock, emitter)
    return break_device(device, spec.faults, RealClock(0), _time_model(spec))


def _time_model(spec: RunSpec) -> TimeModel:
    return TimeModel(spec.compute_gflops, spec.memory_gbytes_per_s, spec.link_gbps, spec.link_latency_us)
