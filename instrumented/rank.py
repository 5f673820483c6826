"""What one rank does: set up, run the steps, check the results, hand in the record."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from cptrace import labels
from cptrace.capture.records import ProcessRecord
from cptrace.capture.run_spec import RunSpec
from cptrace.faults import has_undefined_results
from instrumented.checks import ParityRow
from instrumented.devices import MakeDevice, make_device
from instrumented.model_checks import ModelFigures
from instrumented.processes import RankLink
from instrumented.profiling import measured_steps
from instrumented.runtime.api import Device
from instrumented.runtime.control import barrier
from instrumented.runtime.gloo import start_gloo, stop_gloo
from instrumented.schemes import Monitors
from instrumented.workloads import Comparison, Workload, make_workload


class Link(Protocol):
    """Where a rank says what it does now."""

    def progress(self, text: str) -> None:
        """Say it."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """What a rank hands in.

    Attributes:
        record: What its device did.
        monitors: What its scheme watched.
        allocated_bytes: Bytes of all tensors that it made.
        peak_memory_bytes: Bytes of those that lived at once; None where ranks share a device.
        comparison: How all ranks' results compare with the reference, on rank 0; empty elsewhere.
        figures: Losses and gradient norms of a model; None without one.
    """

    record: ProcessRecord
    monitors: Monitors
    allocated_bytes: int
    peak_memory_bytes: int | None
    comparison: Comparison
    figures: ModelFigures | None

    @property
    def parity(self) -> Sequence[ParityRow]:
        """All ranks' parity rows on rank 0, none elsewhere."""
        return self.comparison.parity


def run_rank(spec: RunSpec, folder: Path, rank: int, link: RankLink) -> None:
    """Run one rank from start to end.

    Args:
        spec: What to run.
        folder: An empty folder that all ranks share.
        rank: This rank.
        link: Where progress and the result go.
    """
    torch.set_num_threads(1)  # ranks share the cores; a second thread each would only add noise
    start_gloo(folder, rank, spec.n_ranks)
    link.result(execute(spec, rank, link))
    stop_gloo()


def execute(
    spec: RunSpec,
    rank: int,
    link: Link,
    *,
    make: MakeDevice = make_device,
    profiling: AbstractContextManager[object] | None = None,
) -> RankResult:
    """Return what one rank has to show for a run, where ranks can talk already.

    Args:
        spec: What to run.
        rank: This rank.
        link: Where progress goes.
        make: Makes the rank's device.
        profiling: Entered before the measured steps and left after them, where a profiler is to record them alone.
    """
    device = make(spec, rank)
    workload = make_workload(spec, device)
    device.settle()
    barrier()  # so that no rank's first step waits for another's setup
    _run_steps(spec, device, workload, link, profiling or measured_steps(rank))
    record, allocated_bytes, peak_bytes = device.record(), device.allocated_bytes, device.peak_memory_bytes
    device.close()
    workload.monitors.running_max.settle()
    is_checked = spec.check and not has_undefined_results(spec.faults)
    comparison = workload.compare(link.progress) if is_checked else Comparison()
    return RankResult(record, workload.monitors, allocated_bytes, peak_bytes, comparison, workload.figures())


def _run_steps(
    spec: RunSpec, device: Device, workload: Workload, link: Link, profiling: AbstractContextManager[object]
) -> None:
    def run(name: str, n_steps: int) -> None:
        for index in range(n_steps):
            if device.rank == 0:
                link.progress(f"{name} {index + 1} of {n_steps}")
            with device.range(labels.format_label(name), payload=index, category=name):
                _run_step(spec, device, workload)

    run(labels.WARMUP, spec.warmup)
    with profiling:
        run(labels.STEP, spec.steps)


def _run_step(spec: RunSpec, device: Device, workload: Workload) -> None:
    for layer in range(spec.layers):
        with _pass_range(device, labels.FORWARD, layer):
            workload.forward(layer)
    if not spec.forward_only:
        for layer in reversed(range(spec.layers)):
            with _pass_range(device, labels.BACKWARD, layer):
                workload.backward(layer)
    workload.finish_step()
    device.synchronize()


def _pass_range(device: Device, name: str, layer: int) -> AbstractContextManager[object]:
    return device.range(labels.format_label(name, layer=layer), payload=layer, category=name)
