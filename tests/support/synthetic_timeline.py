"""A made-up timeline that looks like training: what hosts and devices of several processes did, and when.

Per step, a host thread issues launches, event records, stream waits, copies and one closing synchronize; the
device runs them in stream order. The timeline keeps what real hardware keeps:

    host      |launch launch record wait launch ...                     synchronize-------|
    stream 0     [gemm)[elementwise)[attention)     [gemm)...
    stream 1                 [elementwise)   [copy)
    stream 2                 .........[SendRecv)

- an op starts after its launch call and after the previous op of its stream;
- a transfer starts after the compute that its stream waits for, and ends at once on all processes;
- correlation ids are per process and collide between processes;
- NVTX ranges nest, and hold the calls that they enclose in time and thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np


class Kernel(NamedTuple):
    """One kernel function, and how long it usually runs in ns."""

    demangled: str
    short: str
    mangled: str
    duration_ns: int
    grid: int
    block: int


def _nccl(short: str, duration_ns: int) -> Kernel:
    argument = "ncclDevKernelArgsStorage<(unsigned long)4096>"
    mangled = f"_Z{len(short)}{short}24ncclDevKernelArgsStorageILm4096EE"
    return Kernel(f"{short}({argument})", short, mangled, duration_ns, 32, 640)


_FLASH = "Flash_{0}_kernel_traits<(int)128, (int)64, (int)128, (int)8, cutlass::bfloat16_t>, (bool)0, (bool)1"
_ELEMENTWISE = "at::native::vectorized_elementwise_kernel<(int)8, at::native::{0}>(int, T2, T3)"

KERNELS: Final = (
    Kernel("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", "nvjet_tst_192x192", "nvjet", 12_000, 132, 384),
    Kernel(f"void {_ELEMENTWISE.format('CUDAFunctor_add<c10::BFloat16>')}", "vectorized_elementwise_kernel",
           "_ZN2at6native29vectorized_elementwise_kernelILi8ENS0_15CUDAFunctor_addEEE", 3_000, 23_400, 128),
    Kernel(f"void {_ELEMENTWISE.format('bfloat16_copy_kernel_cuda')}", "vectorized_elementwise_kernel",
           "_ZN2at6native29vectorized_elementwise_kernelILi8ENS0_13bfloat16_copyEEE", 2_400, 11_700, 128),
    Kernel(f"void flash::flash_fwd_kernel<{_FLASH.format('fwd')}>(flash::Flash_fwd_params)",
           "flash_fwd_kernel",
           "_ZN5flash16flash_fwd_kernelI23Flash_fwd_kernel_traitsEEvNS_7_paramsE", 40_000, 244, 128),
    Kernel(f"void flash::flash_bwd_dq_dk_dv_loop_kernel<{_FLASH.format('bwd')}>(flash::Flash_bwd_params)",
           "flash_bwd_dq_dk_dv_loop_kernel",
           "_ZN5flash30flash_bwd_dq_dk_dv_loop_kernelI23Flash_bwd_kernel_traitsEEvNS_16Flash_bwd_paramsE",
           70_000, 244, 256),
    _nccl("ncclDevKernel_SendRecv", 18_000),
    _nccl("ncclDevKernel_AllGather_RING_LL", 25_000),
    _nccl("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 30_000),
)  # fmt: skip
GEMM, ADD, CAST, ATTENTION, ATTENTION_BACKWARD, SEND_RECV, ALL_GATHER, REDUCE_SCATTER = range(len(KERNELS))

LAYER: Final = np.array(
    [GEMM, CAST, ADD, GEMM, CAST, SEND_RECV, CAST, ADD, ATTENTION, ADD, CAST, GEMM,
     ADD, CAST, GEMM, ADD, CAST, SEND_RECV, ADD, GEMM, CAST, ADD, GEMM, ADD]
)  # fmt: skip
"""The kernels of one layer, in the order of their launches."""

TRANSFERS: Final = np.array([SEND_RECV, SEND_RECV, ALL_GATHER, SEND_RECV, REDUCE_SCATTER])
"""What a layer's transfers are, by layer."""

LAUNCH, LAUNCH_COMM, COPY, RECORD, WAIT, SYNC = range(6)
API_NAMES: Final = (
    "cudaLaunchKernel_v7000",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync_v3020",
    "cudaEventRecord_v3020",
    "cudaStreamWaitEvent_v3020",
    "cudaDeviceSynchronize_v3020",
)
"""The host calls, in the order of the constants above."""

REGISTERED: Final = ("aten::mm", "aten::add", "aten::to", "aten::_flash_attention_forward")
"""Range names that go through StringIds; `text` holds all others."""

SESSION_START_NS: Final = 2_000_000_000
QUEUE_GAP_NS: Final = 900
"""From the end of one op to the start of the next in a stream that never runs dry."""

Array = np.ndarray
Rows = dict[str, Array]


@dataclass(frozen=True, slots=True)
class Layout:
    """How the rows are spread.

    Attributes:
        n_processes: Processes, each with one GPU.
        n_streams: Streams per process, at least two: the first computes, the last communicates.
        n_steps: Measured steps, each with a range `step N` per process.
        seed: Seed of all variation.
        is_shuffled: True writes the rows of every table in random order, False by start time.
    """

    n_processes: int = 2
    n_streams: int = 3
    n_steps: int = 20
    seed: int = 0
    is_shuffled: bool = False


class Calls(NamedTuple):
    """Host calls of one process in one step, in order: kind, times in ns and correlation id of each."""

    kind: Array
    start: Array
    end: Array
    correlation: Array


class Ops(NamedTuple):
    """Device work of one process in one step, in launch order; `kernel` is -1 for a copy, times are in ns."""

    call: Array
    slot: Array
    kernel: Array
    start: Array
    end: Array


def simulate(n_kernels: int, n_api_calls: int, n_ranges: int, shape: Layout) -> dict[str, Rows]:
    rng = np.random.default_rng(shape.seed)
    kernels, calls, ranges = (_spread(total, shape) for total in (n_kernels, n_api_calls, n_ranges))
    collected: dict[str, list[Rows]] = {name: [] for name in ("kernel", "copy", "call", "range")}
    now = SESSION_START_NS
    last_correlation = [1_000 + 5 * process for process in range(shape.n_processes)]
    for step in range(shape.n_steps):
        parts = [
            _host(rng, n_launches, n_calls, now, last_correlation[process])
            for process, (n_launches, n_calls) in enumerate(
                zip(kernels[:, step], calls[:, step], strict=True)
            )
        ]
        devices = _devices(rng, parts, shape)
        for process, (part, ops) in enumerate(zip(parts, devices, strict=True)):
            _close_step(part, ops)
            _collect(collected, process, part, ops)
            collected["range"].append(_ranges(part, step, process, int(ranges[process, step])))
            last_correlation[process] = int(part.correlation[-1])
            now = max(now, int(part.end[-1]), int(ops.end.max()))
        now += 50_000
    return {name: _concatenate(rows) for name, rows in collected.items()}


def _spread(total: int, shape: Layout) -> Array:
    """Return how many rows each process and step gets, shape (n_processes, n_steps)."""
    n_parts = shape.n_processes * shape.n_steps
    edges = np.arange(n_parts + 1, dtype=np.int64) * total // n_parts
    return np.diff(edges).reshape(shape.n_processes, shape.n_steps)


def _host(rng: np.random.Generator, n_launches: int, n_calls: int, now: int, last_correlation: int) -> Calls:
    kind = np.full(n_calls, LAUNCH)
    n_extra = n_calls - n_launches
    if n_extra:
        at = np.arange(1, n_extra + 1) * n_calls // n_extra - 1
        kind[at] = np.array([RECORD, WAIT, COPY])[np.arange(n_extra) % 3]
        kind[-1] = SYNC
    duration = rng.integers(2_500, 5_500, n_calls)
    # The gaps leave room for the ends of the ranges around a call, which lie up to 600 ns outside it.
    end = now + np.cumsum(duration + rng.integers(1_400, 3_000, n_calls))
    correlation = last_correlation + np.cumsum(rng.integers(1, 4, n_calls))
    return Calls(kind, end - duration, end, correlation)


def _devices(rng: np.random.Generator, parts: Sequence[Calls], shape: Layout) -> list[Ops]:
    n_common = min(int(np.count_nonzero(part.kind == LAUNCH)) for part in parts)
    planned = [_plan(rng, part, n_common, shape) for part in parts]
    devices = [_run_alone(ops, shape.n_streams - 1) for ops in planned]
    is_transfer = [ops.slot == shape.n_streams - 1 for ops in devices]
    ready = [
        np.maximum(ops.start[mask], _producer_end(part, ops, mask))
        for part, ops, mask in zip(parts, devices, is_transfer, strict=True)
    ]
    duration = devices[0].end[is_transfer[0]]
    together = _queue(np.maximum.reduce(ready), duration) + duration
    for ops, mask, own_ready in zip(devices, is_transfer, ready, strict=True):
        previous_end = np.concatenate([[0], together[:-1] + QUEUE_GAP_NS])[: together.size]
        ops.start[mask] = np.maximum(own_ready, previous_end)
        ops.end[mask] = together
    return devices


def _plan(rng: np.random.Generator, calls: Calls, n_common: int, shape: Layout) -> Ops:
    """Return the device work with the time it may start at in `start` and its duration in `end`, both in ns.

    Only the first `n_common` kernels of a step hold transfers, because each needs its peer on every process.
    """
    call = np.flatnonzero((calls.kind == LAUNCH) | (calls.kind == COPY))
    is_kernel = calls.kind[call] == LAUNCH
    index = np.cumsum(is_kernel) - 1
    layer, kernel = index // LAYER.size, LAYER[index % LAYER.size]
    kernel = np.where((kernel == ATTENTION) & (index > index[-1] // 2), ATTENTION_BACKWARD, kernel)
    is_transfer = is_kernel & (kernel == SEND_RECV)
    kernel = np.where(is_transfer, np.where(index < n_common, TRANSFERS[layer % TRANSFERS.size], ADD), kernel)
    is_transfer &= kernel >= SEND_RECV
    calls.kind[call[is_transfer]] = LAUNCH_COMM

    n_side = shape.n_streams - 2
    on_side = ~is_kernel | (index % LAYER.size % 12 == 10)
    slot = np.where(on_side & (n_side > 0), 1 + layer % max(n_side, 1), 0)
    slot = np.where(is_transfer, shape.n_streams - 1, slot)

    usual = np.array([each.duration_ns for each in KERNELS])
    duration = np.where(is_kernel, usual[kernel], 5_000) * rng.integers(85, 116, call.size) // 100
    latency = rng.integers(900, 3_000, call.size)
    return Ops(call, slot, np.where(is_kernel, kernel, -1), calls.end[call] + latency, duration)


def _run_alone(ops: Ops, comm_slot: int) -> Ops:
    """Return the ops with real times, except those of the comm stream, which wait for other streams."""
    start, end = ops.start.copy(), ops.end.copy()
    for slot in range(comm_slot):
        mask = ops.slot == slot
        start[mask] = _queue(ops.start[mask], ops.end[mask])
        end[mask] = start[mask] + ops.end[mask]
    return ops._replace(start=start, end=end)


def _queue(ready: Array, duration: Array) -> Array:
    """Return the start of each op of one stream: when it is ready and the previous one has ended, in ns."""
    busy = duration + QUEUE_GAP_NS
    passed = np.cumsum(busy) - busy
    return np.maximum.accumulate(ready - passed) + passed if ready.size else ready


def _producer_end(calls: Calls, ops: Ops, is_transfer: Array) -> Array:
    """Return the end of the compute that each transfer's stream waits for, in ns; 0 where there is none."""
    records, waits = np.flatnonzero(calls.kind == RECORD), np.flatnonzero(calls.kind == WAIT)
    record_of_wait = records[: waits.size]
    compute = ops.slot == 0
    compute_call = np.concatenate([[-1], ops.call[compute]])
    compute_end = np.concatenate([[0], ops.end[compute]])
    recorded_end = compute_end[np.searchsorted(compute_call, record_of_wait) - 1]
    wait = np.searchsorted(waits, ops.call[is_transfer])
    return np.concatenate([[0], recorded_end])[wait]


def _close_step(calls: Calls, ops: Ops) -> None:
    if calls.kind[-1] == SYNC:
        calls.end[-1] = max(int(calls.end[-1]), int(ops.end.max()) + 3_000)


def _ranges(calls: Calls, step: int, process: int, n_ranges: int) -> Rows:
    """Return one range for the step, and ranges in it that nest two deep and share out its calls."""
    n_outer = (n_ranges - 1) // 5
    n_inner = n_ranges - 1 - n_outer
    inner = np.arange(n_inner + 1) * calls.start.size // max(n_inner, 1)
    outer = inner[np.arange(n_outer + 1) * n_inner // max(n_outer, 1)]
    spans = [(np.array([0, calls.start.size]), 900), (outer, 600), (inner, 300)]
    number = np.arange(n_ranges)
    return {
        "start": np.concatenate([calls.start[edges[:-1]] - margin for edges, margin in spans]),
        "end": np.concatenate([calls.end[edges[1:] - 1] + margin for edges, margin in spans]),
        "process": np.full(n_ranges, process),
        "step": np.where(number == 0, step, -1),
        "registered": np.where((number > 0) & (number % 2 == 1), number // 2 % len(REGISTERED), -1),
    }


def _collect(collected: dict[str, list[Rows]], process: int, calls: Calls, ops: Ops) -> None:
    rows = {
        "start": ops.start,
        "end": ops.end,
        "process": np.full(ops.start.size, process),
        "slot": ops.slot,
        "correlation": calls.correlation[ops.call],
        "kernel": ops.kernel,
    }
    is_kernel = ops.kernel >= 0
    collected["kernel"].append({name: column[is_kernel] for name, column in rows.items()})
    collected["copy"].append({name: column[~is_kernel] for name, column in rows.items()})
    collected["call"].append({**calls._asdict(), "process": np.full(calls.start.size, process)})


def _concatenate(parts: Sequence[Rows]) -> Rows:
    narrow = ("process", "slot", "kernel", "kind")
    return {
        name: np.concatenate([part[name].astype(np.int16 if name in narrow else np.int64) for part in parts])
        for name in parts[0]
    }
