"""What one rank does: set up, run the steps, check the results, hand in the record."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from cptrace import labels
from cptrace.capture.records import ProcessRecord
from cptrace.capture.run_spec import RunSpec
from cptrace.faults import has_undefined_results
from instrumented.checks import ParityCheck, ParityRow
from instrumented.faults import break_device, slow_down
from instrumented.oracle import TENSOR_NAMES
from instrumented.problem import LayerState, Problem, make_inputs
from instrumented.processes import RankLink
from instrumented.runtime.api import Device
from instrumented.runtime.clocks import TimeModel, make_clock
from instrumented.runtime.cpu import CpuDevice
from instrumented.runtime.gloo import barrier, broadcast_int, gather_shards, start_gloo, stop_gloo
from instrumented.runtime.nvtx_emitter import make_emitter
from instrumented.schemes import Attention, Monitors, find

_N_FORWARD_RESULTS: Final = 1


@dataclass(frozen=True, slots=True)
class RankResult:
    """What a rank hands in; `parity` holds all ranks' rows on rank 0 and is empty elsewhere."""

    record: ProcessRecord
    monitors: Monitors
    allocated_bytes: int
    peak_memory_bytes: int
    parity: Sequence[ParityRow]


def run_rank(spec: RunSpec, folder: Path, rank: int, link: RankLink) -> None:
    """Run one rank from start to end.

    Args:
        spec: What to run.
        folder: An empty folder that all ranks share.
        rank: This rank.
        link: Where progress and the result go.
    """
    torch.set_num_threads(1)  # ranks share the cores; a second thread each would only add noise
    start_gloo(folder, rank, spec.cp_size)
    link.result(execute(spec, rank, link))
    stop_gloo()


def execute(spec: RunSpec, rank: int, link: RankLink) -> RankResult:
    """Return what one rank has to show for a run, within a process group that exists already."""
    device = _make_device(spec, rank)
    problem, scheme = Problem.of(spec), find(spec.scheme)
    layout = scheme.placement(problem)
    layers = [
        LayerState.allocate(device, make_inputs(problem, spec.seed, layer).shard(layout, rank))
        for layer in range(spec.layers)
    ]
    attention = scheme.make(device, problem, layers)
    barrier()  # so that no rank's first step waits for another's setup
    _run_steps(spec, device, attention, link)
    record, allocated_bytes, peak_bytes = device.record(), device.allocated_bytes, device.peak_memory_bytes
    device.close()
    check = ParityCheck(problem, layout, spec.seed, with_backward=not spec.forward_only)
    parity = (
        _check(spec, check, layers, attention.monitors, link)
        if spec.check and not has_undefined_results(spec.faults)
        else []
    )
    return RankResult(record, attention.monitors, allocated_bytes, peak_bytes, parity)


def _make_device(spec: RunSpec, rank: int) -> CpuDevice:
    session_start_ns = broadcast_int(time.monotonic_ns())
    model = TimeModel(spec.compute_gflops, spec.memory_gbytes_per_s, spec.link_gbps, spec.link_latency_us)
    model, clock = slow_down(model, spec.faults, rank), make_clock(spec.clock, session_start_ns)
    device = CpuDevice(rank, spec.cp_size, clock, model, make_emitter())
    return break_device(device, spec.faults, clock, model)


def _run_steps(spec: RunSpec, device: Device, attention: Attention, link: RankLink) -> None:
    names = [(labels.WARMUP, index) for index in range(spec.warmup)]
    names += [(labels.STEP, index) for index in range(spec.steps)]
    for name, index in names:
        if device.rank == 0:
            link.progress(f"{name} {index + 1} of {spec.warmup if name == labels.WARMUP else spec.steps}")
        with device.range(labels.format_label(name), payload=index, category=name):
            _run_step(spec, device, attention)


def _run_step(spec: RunSpec, device: Device, attention: Attention) -> None:
    for layer in range(spec.layers):
        with _pass_range(device, labels.FORWARD, layer):
            attention.forward(layer)
    if not spec.forward_only:
        for layer in reversed(range(spec.layers)):
            with _pass_range(device, labels.BACKWARD, layer):
                attention.backward(layer)
    device.synchronize()


def _pass_range(device: Device, name: str, layer: int) -> AbstractContextManager[object]:
    return device.range(labels.format_label(name, layer=layer), payload=layer, category=name)


def _check(
    spec: RunSpec, check: ParityCheck, layers: Sequence[LayerState], monitors: Monitors, link: RankLink
) -> list[ParityRow]:
    """Return all ranks' parity rows on rank 0, which computes the references; nothing elsewhere."""
    rows: list[ParityRow] = []
    n_tensors = _N_FORWARD_RESULTS if spec.forward_only else len(TENSOR_NAMES)
    for layer, state in enumerate(layers):
        tensors = (state.out_BLHD, state.dq_BLHD, state.dk_BLGD, state.dv_BLGD)[:n_tensors]
        shards = {name: gather_shards(t) for name, t in zip(TENSOR_NAMES, tensors, strict=False)}
        whole = {name: parts for name, parts in shards.items() if parts is not None}
        if whole:
            link.progress(f"checking layer {layer + 1} of {len(layers)} against float64")
            rows += check.rows(layer, whole, has_fp8_keys=monitors.sends_fp8(layer))
    return rows
