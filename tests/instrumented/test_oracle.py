"""The float64 reference against autograd, and the verdict built on it against damaged results."""

from __future__ import annotations

import pytest
import torch

from cptrace.capture.run_spec import RunSpec
from instrumented import oracle
from instrumented.checks import ParityRow, parity_rows, running_max_json
from instrumented.layout import contiguous
from instrumented.model_weights import BlockSizes, make_weights
from instrumented.oracle import Results, dense_attention, one_kernel_attention
from instrumented.problem import Problem, make_inputs
from instrumented.softmax import RunningMaxMonitor


def problem(**options: object) -> Problem:
    """Return a small problem."""
    return Problem.of(
        RunSpec(**{"cp_size": 2, "seq_len": 12, "heads": 4, "kv_heads": 2, "head_dim": 8, **options})
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("slice_bytes", [1, 5 * 12 * 8, 1 << 20], ids=["rows", "uneven", "whole"])
def test_the_reference_agrees_with_autograd(
    is_causal: bool, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "_SLICE_BYTES", slice_bytes)
    inputs = make_inputs(problem(dtype="fp64"), seed=3, layer=0)
    leaves = [t.clone().requires_grad_() for t in (inputs.q_BSHD, inputs.k_BSGD, inputs.v_BSGD)]
    out_BSHD = torch.nn.functional.scaled_dot_product_attention(
        *(leaf.transpose(1, 2) for leaf in leaves), is_causal=is_causal, scale=0.4, enable_gqa=True
    ).transpose(1, 2)
    gradients = torch.autograd.grad(out_BSHD, leaves, inputs.dout_BSHD)
    reference = dense_attention(inputs, is_causal=is_causal, softmax_scale=0.4, with_backward=True)
    for actual, expected in zip(reference.named().values(), (out_BSHD.detach(), *gradients), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


def test_forward_alone_has_no_gradients() -> None:
    inputs = make_inputs(problem(), seed=3, layer=0)
    for attention in (dense_attention, one_kernel_attention):
        results = attention(inputs, is_causal=False, softmax_scale=0.4, with_backward=False)
        assert list(results.named()) == ["out"]


def test_inputs_are_the_same_on_every_rank_and_differ_by_layer_and_seed() -> None:
    small = problem()
    first = make_inputs(small, seed=3, layer=0)
    assert torch.equal(first.q_BSHD, make_inputs(small, seed=3, layer=0).q_BSHD)
    assert not torch.equal(first.q_BSHD, make_inputs(small, seed=3, layer=1).q_BSHD)
    assert not torch.equal(first.q_BSHD, make_inputs(small, seed=4, layer=0).q_BSHD)
    assert not torch.equal(first.k_BSGD, first.v_BSGD)


@pytest.mark.parametrize("seed", [2**40, 2**63 - 1])
def test_any_seed_that_a_run_takes_gives_inputs_and_weights_of_its_own(seed: int) -> None:
    RunSpec(seed=seed).validate()
    inputs = [make_inputs(problem(), seed=each, layer=1).q_BSHD for each in (seed, seed - 1)]
    sizes = BlockSizes(hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=16)
    weights = [make_weights(sizes, each, 1, torch.float32).qkv_EY for each in (seed, seed - 1)]
    for first, second in (inputs, weights):
        assert not torch.equal(first, second)


def rows_with(change: object) -> list[ParityRow]:
    """Return the parity rows of one kernel's results after `change` damaged rank 1's part of `out`."""
    inputs = make_inputs(problem(), seed=3, layer=0)
    options = {"is_causal": False, "softmax_scale": 0.4, "with_backward": True}
    reference, kernel = dense_attention(inputs, **options), one_kernel_attention(inputs, **options)
    layout = contiguous(12, 2)
    shards = {name: [layout.shard(t, rank) for rank in (0, 1)] for name, t in kernel.named().items()}
    change(shards["out"][1])
    return parity_rows(5, layout, shards, reference, kernel)


def test_one_kernel_passes_against_itself() -> None:
    rows = rows_with(lambda _: None)
    assert [(row.rank, row.layer, row.tensor) for row in rows] == [
        (rank, 5, name) for name in ("out", "dq", "dk", "dv") for rank in (0, 1)
    ]
    assert all(row.has_passed for row in rows)


@pytest.mark.parametrize("damage", [1e-3, torch.nan, torch.inf])
def test_damage_is_found_where_it_is(damage: float) -> None:
    failed = [row for row in rows_with(lambda part: part[0, 2, 1, 3].add_(damage)) if not row.has_passed]
    assert [(row.rank, row.tensor) for row in failed] == [(1, "out")]
    assert (failed[0].max_error is None) == (damage != 1e-3)
    assert failed[0].to_json()["passed"] is False


def test_an_exact_kernel_leaves_room_for_rounding() -> None:
    exact = Results(torch.ones(1, 4, 1, 1, dtype=torch.float32))
    reference = Results(torch.ones(1, 4, 1, 1, dtype=torch.float64))
    part = torch.tensor([1.0, 1.0 + torch.finfo(torch.float32).eps]).reshape(1, 2, 1, 1)
    (row, worse) = parity_rows(0, contiguous(4, 2), {"out": [part, part + 1e-5]}, reference, exact)
    assert row.one_kernel_max_error == row.one_kernel_rms_error == 0
    assert row.has_passed
    assert not worse.has_passed


def test_one_unhealthy_rank_fails_the_running_max() -> None:
    good, bad = (
        RunningMaxMonitor(n_merges=2, largest=1.0),
        RunningMaxMonitor(n_merges=2, n_decreased=1, largest=2.0),
    )
    assert running_max_json([good, good])["passed"]
    verdict = running_max_json([good, bad])
    assert (verdict["passed"], verdict["n_merges"], verdict["largest_lse"]) == (False, 4, 2.0)


def test_the_first_unhealthy_merge_is_named_by_rank_layer_and_step() -> None:
    """Two merges in each of four steps, the first of which is warm-up: merge 5 is in measured step 1."""
    good = RunningMaxMonitor(n_merges=8, largest=1.0)
    bad = RunningMaxMonitor(n_merges=8, n_decreased=1, largest=1.0, first_failure=(3, 5))
    assert running_max_json([good, bad], steps=3, warmup=1)["failures"] == [
        {"rank": 1, "layer": 3, "step": 1}
    ]
    early = RunningMaxMonitor(n_merges=8, n_decreased=1, largest=1.0, first_failure=(0, 1))
    assert running_max_json([early], steps=3, warmup=1)["failures"] == [{"rank": 0, "layer": 0, "step": None}]


def test_scores_are_scaled_by_the_root_of_the_head_dimension() -> None:
    assert problem(head_dim=16).softmax_scale == 0.25
