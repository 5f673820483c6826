"""Runs programs of several ranks in a process of their own, once for all tests that look at them."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cptrace.capture.run_spec import RunSpec

SCRIPT = Path(__file__).with_name("rank_programs.py")


def run_apart(kind: str, argument: str, folder: Path) -> Any:
    """Return what `rank_programs.py` made of its argument."""
    result = folder / "result.pickle"
    command = [sys.executable, "-W", "error", str(SCRIPT), kind, argument, str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return pickle.loads(result.read_bytes())


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return, by program, the ranks' records or the error's text."""
    names = (
        "late_rank",
        "one_communicator",
        "two_communicators",
        "crossed_streams",
        "failing_op",
        "killed_rank",
        "silent_rank",
    )
    results = run_apart("programs", ",".join(names), tmp_path_factory.mktemp("programs"))
    return {name: value for name, (value, _) in results.items()}


class RingRun(NamedTuple):
    """One run of the ring: its options, its description and its report."""

    spec: RunSpec
    metadata: dict[str, Any]
    report: Path


SMALL = {
    "clock": "virtual",
    "seq_len": 48,
    "heads": 8,
    "kv_heads": 8,
    "head_dim": 16,
    "steps": 1,
    "warmup": 0,
}

RING_SPECS = tuple(
    {**SMALL, "cp_size": cp_size, "causal": causal, "kv_heads": kv_heads, "layers": layers}
    for cp_size, layers in ((4, 2), (3, 1))  # an odd ring ends in the other buffer
    for causal in (False, True)
    for kv_heads in (8, 2)
)


@pytest.fixture(scope="session")
def ring_runs(tmp_path_factory: pytest.TempPathFactory) -> list[RingRun]:
    """Return a run for each of `RING_SPECS`, all made in one process."""
    folder = tmp_path_factory.mktemp("ring")
    runs = run_apart("specs", json.dumps(RING_SPECS), folder)
    return [
        RingRun(RunSpec(**spec), metadata, folder / f"{index}.sqlite")
        for index, (spec, metadata) in enumerate(zip(RING_SPECS, runs, strict=True))
    ]
