"""Runs one spec on all ranks and writes its report.

    python -m instrumented.run --spec JSON --output PATH

What it says goes to standard output as one JSON object per line: with `--progress` what happens now, and at
the end the outcome, whose `status` is "ok" or the name of the error and whose `message` is the error's
line.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from cptrace.capture.launched import find_launched
from cptrace.capture.nsys_sqlite_writer import EMULATED as EMULATED_DEVICE
from cptrace.capture.nsys_sqlite_writer import write_report
from cptrace.capture.run_spec import MODEL_OPTIONS, RunSpec
from cptrace.errors import CptraceError, UsageError
from cptrace.faults import has_undefined_results
from cptrace.labels import CUDA, RUN_METADATA_SCHEMA
from cptrace.schemes.transformer import ATTENTION
from instrumented import profiling
from instrumented.backends import EMULATED, Backend, choose_backend, describe_cuda, run_launched
from instrumented.checks import fp8_json, running_max_json
from instrumented.model_checks import checks_json
from instrumented.processes import die_with_parent
from instrumented.rank import RankResult

TIMED_BY_EVENTS: Final = "timed by CUDA events, not recorded by nsys"


def run(
    spec: RunSpec,
    output: Path,
    on_progress: Callable[[str], None],
    on_started: Callable[[Sequence[int]], None] | None = None,
) -> dict[str, Any] | None:
    """Run all ranks, write the report and return the run's metadata.

    A process that a launcher (torchrun, Slurm) started is one rank, and all but rank 0 write and return nothing.

    Args:
        spec: What to run.
        output: Where the report goes.
        on_progress: Called with a line about what happens now.
        on_started: Called with the process id of each rank.

    Raises:
        CptraceError: The run could not start or finish, or the report could not be written.
    """
    spec.validate()
    session_start_ns = 0 if spec.clock == "virtual" else time.time_ns()
    launched = find_launched(os.environ)
    if launched is None:
        backend = choose_backend(spec)
        results: Sequence[RankResult] | None = backend.run(spec, on_progress, on_started)
    else:
        backend, results = run_launched(spec, launched, on_progress)
    if results is None:
        return None  # rank 0 writes for all
    metadata = describe(spec, results, backend)
    write_report(
        output,
        [result.record for result in results],
        metadata,
        session_start_ns=session_start_ns,
        recorded_by=TIMED_BY_EVENTS if backend.device_kind == CUDA else EMULATED_DEVICE,
    )
    return metadata


def describe(spec: RunSpec, results: Sequence[RankResult], backend: Backend = EMULATED) -> dict[str, Any]:
    """Return the run's metadata, schema `cptrace.run/1`."""
    options = asdict(spec)
    for name in ("check", "forward_only", *(MODEL_OPTIONS if spec.model == ATTENTION else ())):
        del options[name]
    parity = [row.to_json() for result in results for row in result.parity]
    return {
        "schema": RUN_METADATA_SCHEMA,
        "device_kind": backend.device_kind,
        "transport": backend.transport,
        "layout": spec.layout,
        "torch_version": torch.__version__,
        "passes": list(spec.passes),
        "padded_tokens": spec.padded_len - spec.seq_len,
        "padded_share": (spec.padded_len - spec.seq_len) / spec.padded_len,
        "padding_multiple": spec.padding_multiple,
        "fits_without_padding": list(spec.fits_without_padding),
        **options,
        **(describe_cuda(backend) if backend.device_kind == CUDA else {}),
        "ranks": [_describe_rank(result) for result in results],
        "peak_memory_bytes": [result.peak_memory_bytes for result in results],
        "checks": {
            "parity": parity if spec.check and not has_undefined_results(spec.faults) else None,
            "running_max": running_max_json(
                [result.monitors.running_max for result in results], steps=spec.steps, warmup=spec.warmup
            ),
            "fp8_messages": fp8_json(results[0].monitors.fp8),
            **checks_json(
                spec,
                [result.figures for result in results],
                results[0].parity,
                results[0].comparison.loss_limits,
            ),
        },
    }


def _describe_rank(result: RankResult) -> dict[str, int]:
    record = result.record
    return {
        "rank": record.rank,
        "pid": record.pid,
        "device": record.device,
        "allocated_bytes": result.allocated_bytes,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line and return the exit code."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, _exit_on_signal)  # so that cleaning up happens on the way out
    if options.parent_pid is not None:
        die_with_parent(signal.SIGTERM, options.parent_pid or os.getppid())
    try:
        spec = RunSpec.from_json(_read(options.spec))
        if options.profiler is not None:
            profiling.ask_for(options.profiler, options.output.parent.absolute())
        pids: list[int] = []
        metadata = run(spec, options.output, _say_progress if options.progress else _ignore, pids.extend)
    except CptraceError as error:
        _say({"status": type(error).__name__, "message": str(error)})
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    _say({"status": "ok", "report": str(options.output), "run": metadata, "pids": pids})
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m instrumented.run", description="Run one spec on all ranks."
    )
    parser.add_argument(
        "--spec", required=True, help="the run's options as JSON, a file with them, or - for standard input"
    )
    parser.add_argument("--output", type=Path, required=True, help="where the report goes")
    parser.add_argument(
        "--profiler",
        choices=(profiling.NSYS, profiling.KINETO),
        help="what records the measured steps; traces of torch's own go beside the report",
    )
    parser.add_argument("--progress", action="store_true", help="say what happens now")
    parser.add_argument("--parent-pid", type=int, help="end when this parent ends; 0 for any parent")
    return parser.parse_args(arguments)


def _read(path: str) -> str:
    if path.startswith("{"):
        return path
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the run's options: {error}") from error


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message, allow_nan=False) + "\n")
    sys.stdout.flush()


def _say_progress(text: str) -> None:
    _say({"progress": text})


def _ignore(text: str) -> None:
    return


def _exit_on_signal(signal_number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signal_number)


if __name__ == "__main__":
    sys.exit(main())
