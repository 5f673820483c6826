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
from instrumented.checks import ParityRow, parity_rows
from instrumented.layout import Layout, contiguous
from instrumented.oracle import TENSOR_NAMES, dense_attention, one_kernel_attention
from instrumented.problem import LayerState, Problem, make_inputs
from instrumented.processes import RankLink
from instrumented.runtime.api import Device
from instrumented.runtime.clocks import TimeModel, make_clock
from instrumented.runtime.cpu import CpuDevice
from instrumented.runtime.gloo import barrier, broadcast_int, gather_shards, start_gloo, stop_gloo
from instrumented.runtime.nvtx_emitter import make_emitter
from instrumented.schemes import IMPLEMENTATIONS, Attention, AttentionFactory
from instrumented.softmax import RunningMaxMonitor

_N_FORWARD_RESULTS: Final = 1


@dataclass(frozen=True, slots=True)
class RankResult:
    """What a rank hands in; `parity` holds all ranks' rows on rank 0 and is empty elsewhere."""

    record: ProcessRecord
    monitor: RunningMaxMonitor
    allocated_bytes: int
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
    device = _make_device(spec, rank)
    problem, layout = Problem.of(spec), contiguous(spec.seq_len, spec.cp_size)
    layers = [
        LayerState.allocate(device, problem, make_inputs(problem, spec.seed, layer).shard(layout, rank))
        for layer in range(spec.layers)
    ]
    attention = _find(spec.scheme)(device, problem, layers)
    barrier()  # so that no rank's first step waits for another's setup
    _run_steps(spec, device, attention, link)
    record, allocated_bytes = device.record(), device.allocated_bytes
    parity = _check(spec, problem, layout, layers, link) if spec.check else []
    link.result(RankResult(record, attention.monitor, allocated_bytes, parity))
    device.close()
    stop_gloo()


def _find(name: str) -> AttentionFactory:
    return next(item.make for item in IMPLEMENTATIONS if item.name == name)


def _make_device(spec: RunSpec, rank: int) -> CpuDevice:
    session_start_ns = broadcast_int(time.monotonic_ns())
    model = TimeModel(spec.compute_gflops, spec.memory_gbytes_per_s, spec.link_gbps, spec.link_latency_us)
    return CpuDevice(rank, spec.cp_size, make_clock(spec.clock, session_start_ns), model, make_emitter())


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
    spec: RunSpec, problem: Problem, layout: Layout, layers: Sequence[LayerState], link: RankLink
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
            rows += _check_layer(spec, problem, layout, layer, whole)
    return rows


def _check_layer(
    spec: RunSpec, problem: Problem, layout: Layout, layer: int, shards: dict[str, list[torch.Tensor]]
) -> list[ParityRow]:
    inputs = make_inputs(problem, spec.seed, layer)
    options = {
        "is_causal": problem.is_causal,
        "softmax_scale": problem.softmax_scale,
        "with_backward": not spec.forward_only,
    }
    reference = dense_attention(inputs, **options)
    return parity_rows(layer, layout, shards, reference, one_kernel_attention(inputs, **options))
