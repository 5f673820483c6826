"""Runs of the model, some of them broken on purpose: `python model_programs.py models RUNS.json RESULT.pickle`.

Ranks are forked, which is only safe where no torch op has run yet, so never inside the test process.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rank_programs import run_batch, summary

from cptrace.capture.run_spec import RunSpec
from instrumented import model, ops, softmax
from instrumented.comm import Collectives
from instrumented.rank import RankResult
from instrumented.run import describe

RUNS_PER_GROUP = 24  # a run leaves its communicators' sockets open until its processes end


def without_gradients_of_layer_1_in_step_0() -> AbstractContextManager[object]:
    """Leave out the second all-reduce of layer 1's gradients, on all ranks."""
    all_reduce, n_calls = Collectives.all_reduce, [0]

    def broken(self: Collectives, place: Any, tensor_name: str, tensor: torch.Tensor) -> None:
        n_calls[0] += tensor_name == "grads" and place.layer == 1
        if tensor_name == "grads" and place.layer == 1 and n_calls[0] == 2:
            return
        all_reduce(self, place, tensor_name, tensor)

    return patch.object(Collectives, "all_reduce", broken)


def mean_of_gradients() -> AbstractContextManager[object]:
    """Take the mean of the ranks' gradients in place of their sum, as data parallelism does: all agree, all wrong."""
    squared_error = model.ModelKernels.loss

    def broken(self: Any, place: Any, result: Any, x_and_target: Any, share: Any) -> None:
        squared_error(self, place, result, x_and_target, share)
        self.device.launch(self.stream, "cptrace_cpu::halve", lambda: result[1].mul_(0.5), cost=ops.Cost())

    return patch.object(model.ModelKernels, "loss", broken)


def merge_without_weights() -> AbstractContextManager[object]:
    """Add partial outputs with equal weights."""

    def broken(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
        before = out.clone()
        softmax.merge_into(out, lse, part_out, part_lse)
        out.copy_((before + part_out) / 2)

    return patch.object(ops, "merge_into", broken)


def positions_of_the_rank() -> AbstractContextManager[object]:
    """Number tokens within the rank in place of within the sequence."""
    rope_table = model.rope_table

    def broken(positions: torch.Tensor, *others: Any) -> torch.Tensor:
        return rope_table(torch.arange(len(positions)), *others)

    return patch.object(model, "rope_table", broken)


BREAKS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "": nullcontext,
    "gradients": without_gradients_of_layer_1_in_step_0,
    "mean": mean_of_gradients,
    "merge": merge_without_weights,
    "positions": positions_of_the_rank,
}


def keep(result: RankResult) -> tuple[RankResult, dict[str, Any]]:
    """Return all of a rank's result, and what tests look at."""
    timed = [(op.name, op.stream, op.start_ns, op.end_ns) for op in result.record.ops]
    return result, {**summary(result), "timed": timed, "figures": result.figures}


def spec_of(run: dict[str, Any]) -> RunSpec:
    """Return the options of a run, without what is broken in it."""
    return RunSpec.from_json(json.dumps({name: value for name, value in run.items() if name != "broken"}))


def run_models(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each run's checks and its ranks' summaries; `broken` names what is broken in it."""
    results: dict[int, dict[str, Any]] = {}
    specs = [spec_of(run) for run in runs]
    keys = [(spec.n_ranks, run.get("broken", "")) for spec, run in zip(specs, runs, strict=True)]
    for size, broken in sorted(set(keys)):
        numbers = [number for number, key in enumerate(keys) if key == (size, broken)]
        for start in range(0, len(numbers), RUNS_PER_GROUP):
            batch = numbers[start : start + RUNS_PER_GROUP]
            with BREAKS[broken]():
                by_rank = run_batch(size, [specs[number] for number in batch], keep)
            for number, ranks in zip(batch, zip(*by_rank, strict=True), strict=True):
                metadata = describe(specs[number], [result for result, _ in ranks])
                results[number] = {"run": metadata, "ranks": [shown for _, shown in ranks]}
    return [results[number] for number in range(len(runs))]


if __name__ == "__main__":
    _, _kind, _runs, _result = sys.argv
    Path(_result).write_bytes(pickle.dumps(run_models(json.loads(_runs))))
