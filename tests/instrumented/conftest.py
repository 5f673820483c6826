"""Runs programs of several ranks in a process of their own, once for all tests that look at them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cptrace.capture.run_spec import RunSpec
from tests.instrumented.model_cases import RUNS
from tests.instrumented.scheme_cases import CASES, SMALL

SCRIPT = Path(__file__).with_name("rank_programs.py")


def run_apart(kind: str, argument: str, folder: Path, script: Path = SCRIPT) -> Any:
    """Return what `rank_programs.py`, or another script, made of its argument."""
    result = folder / "result.pickle"
    command = [sys.executable, "-W", "error", str(script), kind, argument, str(result)]
    # Some programs kill a rank, and gloo may log that it lost a peer: what counts is what Python and we say.
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
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
        "collectives",
        "groups",
        "low_precision",
        "uneven_all_reduce",
    )
    results = run_apart("programs", ",".join(names), tmp_path_factory.mktemp("programs"))
    return {name: value for name, (value, _) in results.items()}


class Case(NamedTuple):
    """One run of a scheme without a report: its options, and what each rank has to show."""

    spec: RunSpec
    ranks: list[dict[str, Any]]

    @property
    def parity(self) -> list[dict[str, Any]]:
        """All ranks' comparisons with float64."""
        return self.ranks[0]["parity"]


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Return a run for each of `scheme_cases.CASES`, by its name."""
    results = run_apart("cases", json.dumps([*CASES.values()]), tmp_path_factory.mktemp("cases"))
    return {
        name: Case(RunSpec(**options), ranks)
        for (name, options), ranks in zip(CASES.items(), results, strict=True)
    }


class ModelRun(NamedTuple):
    """One run of the model without a report: its options, its description, and what each rank has to show."""

    spec: RunSpec
    metadata: dict[str, Any]
    ranks: list[dict[str, Any]]


@pytest.fixture(scope="session")
def model_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRun]:
    """Return a run for each of `model_cases.RUNS`, by its name."""
    folder, script = tmp_path_factory.mktemp("models"), SCRIPT.with_name("model_programs.py")
    results = run_apart("models", json.dumps([*RUNS.values()]), folder, script)
    return {
        name: ModelRun(
            RunSpec.from_json(json.dumps({key: options[key] for key in options if key != "broken"})),
            result["run"],
            result["ranks"],
        )
        for (name, options), result in zip(RUNS.items(), results, strict=True)
    }


class RingRun(NamedTuple):
    """One run of the ring: its options, its description and its report."""

    spec: RunSpec
    metadata: dict[str, Any]
    report: Path


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
