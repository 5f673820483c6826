"""The model around any scheme: as exact as one process, its gradients summed, and its checks able to fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cptrace import labels
from cptrace.capture.launcher import RunOutcome
from cptrace.classify import KERNEL_RULES
from cptrace.cli.run_text import describe_failure, describe_outcome
from cptrace.labels import Label, parse_label
from cptrace.schemes import find_scheme
from cptrace.schemes.transformer import block_memory, block_traffic
from instrumented import model_maths, model_ops
from instrumented.model_weights import WEIGHT_NAMES
from tests.instrumented.conftest import ModelRun
from tests.instrumented.model_cases import BROKEN_CASES, RUNS

SOUND = [name for name in RUNS if name not in BROKEN_CASES]
CHECKED = [name for name in SOUND if name not in ("fault", "unchecked")]
EACH = pytest.mark.parametrize("name", SOUND)


@pytest.mark.parametrize("name", CHECKED)
def test_results_are_as_exact_as_one_process(model_runs: dict[str, ModelRun], name: str) -> None:
    """What each block puts out and all its gradients: twice the error of the same maths in one process, at most."""
    run = model_runs[name]
    rows = run.metadata["checks"]["parity"]
    tensors = {"hidden"} | ({f"d{n}" for n in WEIGHT_NAMES} if not run.spec.forward_only else set())
    assert {(row["layer"], row["tensor"]) for row in rows} == {
        (layer, tensor) for layer in range(run.spec.layers) for tensor in tensors
    }
    assert {row["rank"] for row in rows if row["tensor"] != "hidden"} <= set(range(run.spec.n_ranks))
    assert [row for row in rows if not row["passed"]] == []


@pytest.mark.parametrize("name", CHECKED)
def test_the_loss_is_that_of_one_device_in_every_step(model_runs: dict[str, ModelRun], name: str) -> None:
    run = model_runs[name]
    loss = run.metadata["checks"]["loss"]
    assert loss["passed"], loss
    assert len(loss["losses"]) == run.spec.steps
    assert all(abs(value - loss["single_device_loss"]) <= loss["limit"] for value in loss["losses"])


@EACH
def test_all_ranks_that_share_the_sequence_have_the_same_gradient_norms(
    model_runs: dict[str, ModelRun], name: str
) -> None:
    run = model_runs[name]
    check = run.metadata["checks"]["grad_norm"]
    reasons = {
        "no ranks share the sequence": run.spec.sequence_ranks == 1,
        "a forward pass": run.spec.forward_only,
        "a fault": bool(run.spec.faults),
    }
    (reason,) = [reason for reason, applies in reasons.items() if applies] or [None]
    if reason is None:
        assert check["passed"]
        assert check["n_compared"] == run.spec.n_ranks * run.spec.layers * run.spec.steps
        assert check["largest_norm"] > 0
    else:
        assert check["passed"] is None
        assert check["not_applicable"].startswith(reason)


def comm_labels(rank: dict[str, Any]) -> Iterator[Label]:
    """Yield the labels of the communication ops that a rank launched."""
    for text in rank["ranges"]:
        label = parse_label(text)
        if label is not None and label.name in labels.COMMUNICATION:
            yield label


@pytest.mark.parametrize("name", [name for name in SOUND if name != "fp8"])
def test_every_rank_sends_what_the_formulas_say(model_runs: dict[str, ModelRun], name: str) -> None:
    """Attention what its scheme's formula says, and the model around it what its own says."""
    run = model_runs[name]
    spec, scheme = run.spec, find_scheme(run.spec.scheme)
    around = dict(zip(labels.PASSES, block_traffic(spec.block), strict=True))
    for rank in run.ranks:
        sent, n_ops = Counter[tuple[str, str, bool]](), Counter[tuple[str, str, bool]]()
        for label in comm_labels(rank):
            key = (
                label.fields["pass"],
                label.fields["layer"],
                label.fields["tensor"] in labels.MODEL_TENSORS,
            )
            sent[key] += int(label.fields["bytes"])
            n_ops[key] += 1
        n_steps = spec.steps + spec.warmup
        for pass_name in spec.passes:
            attention = getattr(scheme, pass_name)(spec.shape) if spec.layout != "heads" else (0, 0)
            for layer in range(spec.layers):
                for is_around, (n_bytes, n_messages) in ((False, attention), (True, around[pass_name])):
                    key = (pass_name, str(layer), is_around)
                    assert (sent[key], n_ops[key]) == (n_bytes * n_steps, n_messages * n_steps), key


@EACH
def test_memory_is_close_to_its_estimate(model_runs: dict[str, ModelRun], name: str) -> None:
    run = model_runs[name]
    block = run.spec.block
    scheme = find_scheme("single" if run.spec.layout == "heads" else run.spec.scheme)
    kept, around = scheme.memory(block.attention), block_memory(block)
    per_layer = (
        4 * (block.attention.query_bytes + block.attention.chunk_bytes) + kept.per_layer + around.per_layer
    )
    estimate = run.spec.layers * per_layer + kept.once + around.once
    for rank in run.ranks:
        assert rank["allocated_bytes"] == pytest.approx(estimate, rel=0.08)


def test_every_kernel_of_the_model_is_compute() -> None:
    names = [value for value in vars(model_ops).values() if str(value).startswith("cptrace_cpu::")]
    assert len(names) == 10
    for name in names:
        rule = next(rule for rule in KERNEL_RULES if rule.pattern.search(name))
        assert (rule.name, rule.role) == ("emulated-compute", "compute")


def test_a_layers_gradients_travel_while_the_layer_below_computes(model_runs: dict[str, ModelRun]) -> None:
    """compute   |backward 1|backward 0      |norms|
    gradients            |all-reduce 1|all-reduce 0|
    """
    ops = model_runs["ring-full"].ranks[0]["timed"]
    reduces = sorted((start, end, stream) for name, stream, start, end in ops if name.endswith("AllReduce"))
    computing = [(start, end) for name, _, start, end in ops if "gloo" not in name]
    first, last = reduces[-2:]
    assert len({stream for *_, stream in reduces}) == 1
    assert any(first[0] < start < first[1] for start, _ in computing)
    norms = [start for name, _, start, _ in ops if name == model_ops.GRAD_NORM][-2:]
    assert min(norms) >= last[1]


def test_every_op_of_the_model_has_its_label(model_runs: dict[str, ModelRun]) -> None:
    run = model_runs["ring-full"]
    found = Counter(label.name for label in map(parse_label, run.ranks[0]["ranges"]) if label is not None)
    n_steps, n_layers = run.spec.steps + run.spec.warmup, run.spec.layers
    assert {name: found[name] / n_steps for name in labels.MODEL_OPS} == {
        "gemm": 12 * n_layers,
        "norm": 4 * n_layers,
        "rope": 2 * n_layers,
        "activation": 4 * n_layers,
        "loss": 1,
        "grad_norm": n_layers,
    }


# ── what is broken must be found ──────────────────────────────────────────────────────────────────────


def outcome(run: ModelRun) -> RunOutcome:
    return RunOutcome(Path("report.sqlite"), run.metadata)


def test_gradients_that_are_not_reduced_are_found_by_rank_layer_and_step(
    model_runs: dict[str, ModelRun],
) -> None:
    """In the first measured step of two, so that the results of the last step, which are compared, are right."""
    run = model_runs["broken-gradients"]
    assert all(row["passed"] for row in run.metadata["checks"]["parity"])
    assert not outcome(run).has_passed
    message = describe_failure(outcome(run))
    assert message.startswith("rank 1, layer 1, step 0: the gradient norm is ")
    assert f"Gradient norms: {message}" in describe_outcome(outcome(run))


def test_gradients_that_are_averaged_agree_but_are_wrong(model_runs: dict[str, ModelRun]) -> None:
    run = model_runs["broken-mean"]
    assert run.metadata["checks"]["grad_norm"]["passed"]
    assert describe_failure(outcome(run)).startswith("rank 0, layer 0: dnorms is off by")


def test_a_wrong_merge_makes_the_loss_wrong(model_runs: dict[str, ModelRun]) -> None:
    run = model_runs["broken-merge"]
    loss = run.metadata["checks"]["loss"]
    assert {(row["rank"], row["layer"], row["step"]) for row in loss["failures"]} == {
        (rank, 0, step) for rank in range(2) for step in range(2)
    }
    assert "Loss: rank 0, layer 0 on, step 0: its part of the loss is off by" in describe_outcome(
        outcome(run)
    )
    assert not outcome(run).has_passed


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_positions_within_the_rank_are_wrong(model_runs: dict[str, ModelRun], layout: str) -> None:
    """So the sound runs of these layouts show that positions are those of the sequence."""
    run = model_runs[f"broken-positions-{layout}"]
    assert run.metadata["checks"]["loss"]["passed"] is False
    assert describe_failure(outcome(run)).startswith("rank 0, layer 0: hidden is off by")


# ── the maths ─────────────────────────────────────────────────────────────────────────────────────────


def test_written_out_gradients_are_autograds() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, gate_up, dy, dact = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((1, 3, 6), (6,), (1, 3, 8), (1, 3, 6), (1, 3, 4))
    )
    expected = torch.autograd.grad(model_maths.rms_norm(x, weight), (x, weight), dy)
    for actual, wanted in zip(model_maths.rms_norm_backward(dy, x, weight), expected, strict=True):
        torch.testing.assert_close(actual, wanted)
    (expected_gate_up,) = torch.autograd.grad(model_maths.swiglu(gate_up), gate_up, dact)
    torch.testing.assert_close(model_maths.swiglu_backward(dact, gate_up), expected_gate_up)
    loss, gradient = model_maths.squared_error(x, dy, 36)
    torch.testing.assert_close(gradient, torch.autograd.grad(loss, x)[0])


def test_scores_of_turned_heads_depend_on_distance_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn((1, 1, 1, 8), generator=generator, dtype=torch.float64) for _ in range(2))

    def score(i: int, j: int) -> torch.Tensor:
        turned = (
            model_maths.rotate(x, model_maths.rope_table(torch.tensor([at]), 8, torch.float64))
            for x, at in ((q, i), (k, j))
        )
        return torch.mul(*turned).sum()

    torch.testing.assert_close(score(5, 3), score(1005, 1003))
    assert abs(score(5, 3) - score(5, 4)) > 1e-3


def test_turning_back_undoes_turning() -> None:
    x = torch.randn((1, 4, 2, 6), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    table = model_maths.rope_table(torch.tensor([0, 7, 2, 90]), 6, torch.float64)
    turned = model_maths.rotate(x, table)
    torch.testing.assert_close(turned[:, 0], x[:, 0])  # position 0 is not turned
    torch.testing.assert_close(model_maths.rotate(turned, table, is_backward=True), x)
