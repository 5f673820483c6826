"""Where the ranks of a run live: processes with emulated devices, processes with a GPU each, or threads on one GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from cptrace.capture.launched import Launched
from cptrace.capture.run_spec import CPU, RunSpec
from cptrace.errors import RunError
from cptrace.impls import BUILTIN
from cptrace.labels import CPU_EMULATED, CUDA, LOCAL_D2D
from instrumented.devices import make_shared
from instrumented.processes import FORK, SPAWN, run_ranks
from instrumented.rank import RankResult, execute, run_rank
from instrumented.runtime import nccl
from instrumented.runtime.control import gather_objects, use
from instrumented.runtime.local_d2d import Meeting, MeetingBroken, MeetingControl
from instrumented.runtime.nvtx_emitter import has_listener
from instrumented.threads import ThreadLink, run_threads

LOOPBACK: Final = "gloo-loopback"

Say = Callable[[str], None]
OnStarted = Callable[[Sequence[int]], None] | None


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to run all ranks.

    Attributes:
        device_kind: `cuda` or `cpu-emulated`.
        transport: What data between ranks crosses.
        run: Runs a spec and returns the ranks' results in order.
    """

    device_kind: str
    transport: str
    run: Callable[[RunSpec, Say, OnStarted], list[RankResult]]


def choose_backend(spec: RunSpec, n_devices: int | None = None) -> Backend:
    """Return the backend that a run's device and size ask for.

    Args:
        spec: What to run.
        n_devices: CUDA devices of this host; None to ask torch.

    Raises:
        RunError: There are no CUDA devices, or some but not one for each rank.
    """
    if spec.device == CPU:
        return EMULATED
    n_devices = torch.cuda.device_count() if n_devices is None else n_devices
    if n_devices == 0:
        raise RunError(f"--device cuda: torch {torch.__version__} sees no CUDA device; use --device cpu")
    if spec.impl != BUILTIN and n_devices < spec.n_ranks:
        raise RunError(
            f"--impl {spec.impl}: a library needs a CUDA device for each of {spec.n_ranks} ranks, and this host has "
            f"{n_devices}; use --impl {BUILTIN}, which can share one"
        )
    if spec.impl == BUILTIN and (spec.n_ranks == 1 or n_devices == 1):
        return ONE_GPU
    if n_devices < spec.n_ranks:
        raise RunError(
            f"{spec.n_ranks} ranks need a CUDA device each, and this host has {n_devices}; use --cp-size {n_devices}, "
            "torchrun on several hosts, or CUDA_VISIBLE_DEVICES=0 to let all ranks share one"
        )
    return NCCL


def run_launched(spec: RunSpec, launched: Launched, say: Say) -> tuple[Backend, list[RankResult] | None]:
    """Run the rank that this process is, started by torchrun or Slurm; return all ranks' results on rank 0.

    Args:
        spec: What to run, the same on all ranks.
        launched: What the launcher said.
        say: Called with a line about what happens now.

    Raises:
        RunError: The launcher started another number of ranks.
    """
    if launched.n_ranks != spec.n_ranks:
        raise RunError(
            f"{launched.by} started {launched.n_ranks} processes, and the run has {spec.n_ranks} ranks; "
            f"start as many, or use --cp-size {launched.n_ranks}"
        )
    os.environ.update(launched.environment())
    if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == launched.n_ranks:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all on this host, whose name may not resolve
    dist.init_process_group("gloo", init_method="env://")
    try:
        link = ThreadLink(say)
        return EMULATED if spec.device == CPU else NCCL, gather_objects(execute(spec, launched.rank, link))
    finally:
        dist.destroy_process_group()


def _run_emulated(spec: RunSpec, say: Say, on_started: OnStarted) -> list[RankResult]:
    return _run_processes(spec, say, on_started, SPAWN if has_listener() else FORK)


def _run_nccl(spec: RunSpec, say: Say, on_started: OnStarted) -> list[RankResult]:
    return _run_processes(spec, say, on_started, SPAWN)  # CUDA does not survive a fork


def _run_processes(spec: RunSpec, say: Say, on_started: OnStarted, start_method: str) -> list[RankResult]:
    with tempfile.TemporaryDirectory(prefix="cptrace-") as folder:
        body = partial(run_rank, spec, Path(folder))
        return run_ranks(spec.n_ranks, body, say, start_method=start_method, on_started=on_started)


def _run_on_one_gpu(spec: RunSpec, say: Say, on_started: OnStarted) -> list[RankResult]:
    if on_started is not None:
        on_started([os.getpid()])
    meeting = Meeting(spec.n_ranks)
    body = partial(_run_thread, spec, meeting)
    return run_threads(spec.n_ranks, body, say, meeting.break_off, MeetingBroken)


def _run_thread(spec: RunSpec, meeting: Meeting, rank: int, link: ThreadLink) -> None:
    with use(MeetingControl(meeting, rank)):
        link.result(execute(spec, rank, link, make=partial(make_shared, meeting)))


def describe_cuda(backend: Backend) -> dict[str, Any]:
    """Return what a run on CUDA says about its software and device; without a clock, which is the emulated one's."""
    is_here = backend.transport == LOCAL_D2D  # else the ranks' memory is that of other processes
    return {
        "clock": None,
        "gpu": torch.cuda.get_device_name(0),
        "cuda_version": torch.version.cuda,
        "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
        "transfers_on_asked_stream": is_here or nccl.lands_on_current_stream(torch.__version__),
        "device_peak_memory_bytes": torch.cuda.max_memory_allocated(0) if is_here else None,
        "timed_by": "cuda-events",
    }


EMULATED: Final = Backend(CPU_EMULATED, LOOPBACK, _run_emulated)
NCCL: Final = Backend(CUDA, nccl.NAME, _run_nccl)
ONE_GPU: Final = Backend(CUDA, LOCAL_D2D, _run_on_one_gpu)
