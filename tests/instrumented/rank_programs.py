"""Programs of several ranks, run in a process of their own: `python rank_programs.py NAME RESULT.pickle`.

Ranks are forked, which is only safe where no torch op has run yet, so never inside the test process.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cptrace.capture.nsys_sqlite_writer import write_report
from cptrace.capture.run_spec import RunSpec
from cptrace.errors import RunError
from instrumented.processes import RankLink, run_ranks
from instrumented.rank import RankResult, execute
from instrumented.run import describe, run
from instrumented.runtime.api import Cost, Message
from instrumented.runtime.clocks import TimeModel, VirtualClock
from instrumented.runtime.cpu import CpuDevice
from instrumented.runtime.gloo import barrier, start_gloo, stop_gloo

MODEL = TimeModel(compute_gflops=1.0, memory_gbytes_per_s=1.0, link_gbps=8.0, link_latency_us=1.0)

CASES_PER_GROUP = 40  # a case leaves its communicators' sockets open until its processes end

Program = Callable[[CpuDevice, RankLink], None]


def nothing() -> None:
    """Do nothing."""


def on_device(program: Program, folder: Path, rank: int, link: RankLink, size: int) -> None:
    """Run a program on one rank's virtual device and hand in its record."""
    torch.set_num_threads(1)
    start_gloo(folder, rank, size)
    device = CpuDevice(rank, size, VirtualClock(), MODEL)
    program(device, link)
    device.synchronize()
    link.result(device.record())
    device.close()
    stop_gloo()


def ring_hop(device: CpuDevice, stream: Any, communicator: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Queue one hop and return the tensor that it fills."""
    received = torch.zeros_like(tensor)
    send = [Message(tensor, (device.rank + 1) % device.size)]
    receive = [Message(received, (device.rank - 1) % device.size)]
    device.send_recv(stream, communicator, send, receive)
    return received


def late_rank(device: CpuDevice, _link: RankLink) -> None:
    """Rank 1 of 4 computes 100 us before a hop of 1000 bytes, the others nothing."""
    stream, communicator = device.stream(), device.communicator("kv")
    if device.rank == 1:
        device.launch(stream, "work", nothing, cost=Cost(flops=100_000))
    received = ring_hop(device, stream, communicator, torch.full((250,), float(device.rank)))
    device.synchronize()
    if not torch.all(received == (device.rank - 1) % device.size):
        raise ValueError(f"wrong data: {received[:3]}")


def one_communicator(device: CpuDevice, _link: RankLink) -> None:
    """Two hops on two streams of one communicator."""
    first, second, communicator = device.stream(), device.stream(), device.communicator("both")
    for stream in (first, second):
        ring_hop(device, stream, communicator, torch.zeros(25_000))


def two_communicators(device: CpuDevice, _link: RankLink) -> None:
    """Two hops on two streams, each with its communicator."""
    for name in ("kv", "dkv"):
        ring_hop(device, device.stream(), device.communicator(name), torch.zeros(25_000))


def crossed_streams(device: CpuDevice, _link: RankLink) -> None:
    """Ranks queue the hops of two communicators in opposite orders, which only independent groups survive."""
    streams, names = [device.stream(), device.stream()], ["a", "b"]
    communicators = [device.communicator(name) for name in names]
    order = (0, 1) if device.rank == 0 else (1, 0)
    for index in order:
        ring_hop(device, streams[index], communicators[index], torch.zeros(8))


def failing_op(device: CpuDevice, _link: RankLink) -> None:
    """An op of rank 2 raises before a hop that all others wait for."""
    stream, communicator = device.stream(), device.communicator("kv")
    if device.rank == 2:

        def fail() -> None:
            raise ArithmeticError("no such number\nsecond line")

        device.launch(stream, "fail", fail, cost=Cost())
    ring_hop(device, stream, communicator, torch.zeros(8))


def killed_rank(device: CpuDevice, _link: RankLink) -> None:
    """Rank 1 is killed while the others wait for it in a hop."""
    stream, communicator = device.stream(), device.communicator("kv")
    barrier()
    if device.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ring_hop(device, stream, communicator, torch.zeros(8))


def silent_rank(device: CpuDevice, _link: RankLink) -> None:
    """Rank 0 leaves without a word while the others sleep."""
    if device.rank == 0:
        os._exit(3)
    time.sleep(60)


def numbers(device: CpuDevice, count: int) -> torch.Tensor:
    """Return a tensor that tells its rank: rank * 100, rank * 100 + 1, ..."""
    return torch.arange(count, dtype=torch.float32) + 100 * device.rank


def require(actual: torch.Tensor, expected: list[float]) -> None:
    """Fail the rank if a tensor is not as expected."""
    if actual.flatten().tolist() != expected:
        raise ValueError(f"got {actual.flatten().tolist()}, expected {expected}")


def collectives(device: CpuDevice, _link: RankLink) -> None:
    """All four collectives on 3 ranks, two tensors at once where they are grouped; rank 2 arrives late."""
    stream, communicator, ranks = device.stream(), device.communicator("all"), range(device.size)
    if device.rank == 2:
        device.launch(stream, "work", nothing, cost=Cost(flops=100_000))
    own, gathered = numbers(device, 2), torch.zeros(2, device.size, 2)
    device.all_gather(stream, communicator, [list(rows) for rows in gathered], [own, -own])
    parts = [numbers(device, 2) + 10 * rank for rank in ranks]
    reduced = torch.zeros(2)
    device.reduce_scatter(stream, communicator, [reduced], [parts])
    everyone = numbers(device, 6)
    device.all_reduce(stream, communicator, everyone)
    received = torch.zeros(device.size, 2)
    device.all_to_all(stream, communicator, list(received), parts)
    device.synchronize()
    rows = [[100.0 * rank, 100.0 * rank + 1] for rank in ranks]
    require(gathered[0], [value for row in rows for value in row])
    require(gathered[1], [-value for row in rows for value in row])
    require(reduced, [300.0 + 30 * device.rank, 303.0 + 30 * device.rank])
    require(everyone, [300.0 + 3 * index for index in range(6)])
    require(received, [value + 10 * device.rank for row in rows for value in row])


def groups(device: CpuDevice, _link: RankLink) -> None:
    """Two groups of an uneven partition: ranks 0 and 2 gather, and ranks 3 and 1, in that order; late rank 1."""
    stream = device.stream()
    communicator = device.communicator("half", [(0, 2), (3, 1)])
    if device.rank == 1:
        device.launch(stream, "work", nothing, cost=Cost(flops=100_000))
    gathered = torch.zeros(2, 1)
    device.all_gather(stream, communicator, [list(gathered)], [numbers(device, 1)])
    device.synchronize()
    require(gathered, [0.0, 200.0] if device.rank in (0, 2) else [300.0, 100.0])


def low_precision(device: CpuDevice, _link: RankLink) -> None:
    """A sum of bf16 over 3 ranks: 256 + 1 + 1 is 258 if it is rounded once, and 256 if after every addition."""
    stream, communicator = device.stream(), device.communicator("all")
    tensor = torch.full((3,), 256.0 if device.rank == 0 else 1.0, dtype=torch.bfloat16)
    device.all_reduce(stream, communicator, tensor)
    device.synchronize()
    require(tensor, [258.0] * 3)


def uneven_all_reduce(device: CpuDevice, _link: RankLink) -> None:
    """A tensor that does not divide by the ranks is refused."""
    device.all_reduce(device.stream(), device.communicator("all"), torch.zeros(5))


PROGRAMS: dict[str, tuple[int, Program]] = {
    "late_rank": (4, late_rank),
    "one_communicator": (2, one_communicator),
    "two_communicators": (2, two_communicators),
    "crossed_streams": (2, crossed_streams),
    "failing_op": (4, failing_op),
    "killed_rank": (3, killed_rank),
    "silent_rank": (2, silent_rank),
    "collectives": (3, collectives),
    "groups": (4, groups),
    "low_precision": (3, low_precision),
    "uneven_all_reduce": (2, uneven_all_reduce),
}


def run_program(name: str) -> Any:
    """Return the ranks' records, or the error's text."""
    size, program = PROGRAMS[name]
    with tempfile.TemporaryDirectory() as folder:
        body = partial(_with_size, program, Path(folder), size)
        try:
            return run_ranks(size, body, lambda _text: None)
        except RunError as error:
            return str(error)


def _with_size(program: Program, folder: Path, size: int, rank: int, link: RankLink) -> None:
    on_device(program, folder, rank, link, size)


def run_specs(specs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Run each spec into `folder/INDEX.sqlite` and return the runs' descriptions."""
    return [
        run(RunSpec(**spec), folder / f"{index}.sqlite", lambda _text: None)
        for index, spec in enumerate(specs)
    ]


class QuietLink:
    """Drops what a rank says about its progress."""

    def progress(self, text: str) -> None:
        """Say nothing."""


def run_cases(specs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Run specs without reports, as many as possible in one process group; return each one's ranks' summaries."""
    results: dict[int, list[dict[str, Any]]] = {}
    for size in sorted({spec["cp_size"] for spec in specs}):
        numbers = [number for number, spec in enumerate(specs) if spec["cp_size"] == size]
        for start in range(0, len(numbers), CASES_PER_GROUP):
            batch = numbers[start : start + CASES_PER_GROUP]
            by_rank = run_batch(size, [RunSpec(**specs[number]) for number in batch])
            results |= {
                number: list(ranks) for number, ranks in zip(batch, zip(*by_rank, strict=True), strict=True)
            }
    return [results[number] for number in range(len(specs))]


def run_batch(
    size: int, specs: list[RunSpec], keep: Callable[[RankResult], Any] | None = None
) -> list[list[Any]]:
    """Return, by rank, what is kept of each spec's result, a summary by default; all run in one process group."""

    def body(rank: int, link: RankLink) -> None:
        torch.set_num_threads(1)
        start_gloo(Path(folder), rank, size)
        link.result([(keep or summary)(execute(spec, rank, QuietLink())) for spec in specs])
        stop_gloo()

    for spec in specs:
        spec.validate()
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(size, body, lambda _text: None)


def write_reports(specs: list[dict[str, Any]], folder: Path) -> None:
    """Write the report of each spec to `folder/INDEX.sqlite`, as many runs as possible in one process group."""
    for size in sorted({spec["cp_size"] for spec in specs}):
        batch = {n: RunSpec(**spec) for n, spec in enumerate(specs) if spec["cp_size"] == size}
        for start in range(0, len(batch), CASES_PER_GROUP):
            some = dict(list(batch.items())[start : start + CASES_PER_GROUP])
            by_rank = run_batch(size, list(some.values()), keep=lambda result: result)
            for (number, spec), results in zip(some.items(), zip(*by_rank, strict=True), strict=True):
                records = [result.record for result in results]
                write_report(
                    folder / f"{number}.sqlite", records, describe(spec, results), session_start_ns=0
                )


def summary(result: RankResult) -> dict[str, Any]:
    """Return what tests look at of one rank."""
    return {
        "parity": [row.to_json() for row in result.parity],
        "ranges": [item.text for item in result.record.ranges],
        "ops": [op.name for op in result.record.ops],
        "running_max": result.monitors.running_max,
        "fp8": result.monitors.fp8,
        "allocated_bytes": result.allocated_bytes,
        "steps_ns": [r.end_ns - r.start_ns for r in result.record.ranges if r.text == "step"],
    }


def main(kind: str, argument: str, result: str) -> None:
    """Run programs (names with commas), or cases, specs or reports (JSON), and write what came of them."""
    if kind == "programs":
        value: Any = {name: (run_program(name), time.monotonic()) for name in argument.split(",")}
    elif kind == "cases":
        value = run_cases(json.loads(argument))
    elif kind == "reports":
        value = write_reports(json.loads(argument), Path(result).parent)
    else:
        value = run_specs(json.loads(argument), Path(result).parent)
    Path(result).write_bytes(pickle.dumps(value))


if __name__ == "__main__":
    main(*sys.argv[1:])
