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

from cptrace.capture.run_spec import RunSpec
from cptrace.errors import RunError
from instrumented.processes import RankLink, run_ranks
from instrumented.run import run
from instrumented.runtime.api import Cost, Message
from instrumented.runtime.clocks import TimeModel, VirtualClock
from instrumented.runtime.cpu import CpuDevice
from instrumented.runtime.gloo import barrier, start_gloo, stop_gloo

MODEL = TimeModel(compute_gflops=1.0, memory_gbytes_per_s=1.0, link_gbps=8.0, link_latency_us=1.0)

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


PROGRAMS: dict[str, tuple[int, Program]] = {
    "late_rank": (4, late_rank),
    "one_communicator": (2, one_communicator),
    "two_communicators": (2, two_communicators),
    "crossed_streams": (2, crossed_streams),
    "failing_op": (4, failing_op),
    "killed_rank": (3, killed_rank),
    "silent_rank": (2, silent_rank),
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


def main(kind: str, argument: str, result: str) -> None:
    """Run programs (names with commas) or specs (JSON) and write what came of them."""
    if kind == "programs":
        value: Any = {name: (run_program(name), time.monotonic()) for name in argument.split(",")}
    else:
        value = run_specs(json.loads(argument), Path(result).parent)
    Path(result).write_bytes(pickle.dumps(value))


if __name__ == "__main__":
    main(*sys.argv[1:])
