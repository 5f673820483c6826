"""Merging parts of a softmax gives the softmax, also where a part or the whole is empty."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from instrumented.softmax import RunningMaxMonitor, accumulator_dtype, merge_into


def attend(scores_BHLS: Tensor, v_BSHD: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) by definition; a row without keys gives 0 and -inf."""
    lse_BHL = torch.logsumexp(scores_BHLS, dim=-1)
    p_BHLS = torch.exp(scores_BHLS - torch.where(torch.isneginf(lse_BHL), 0.0, lse_BHL).unsqueeze(-1))
    return torch.einsum("bhls,bshd->blhd", p_BHLS, v_BSHD), lse_BHL


@settings(deadline=None)  # the first call warms torch up
@given(
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    scale=st.sampled_from([1.0, 300.0]),
)
def test_parts_in_any_cut_merge_to_the_whole(seed: int, cuts: list[int], scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores_BHLS = scale * torch.randn(1, 2, 5, 12, generator=generator, dtype=torch.float64)
    scores_BHLS[0, 0, 3] = -torch.inf  # one query sees nothing at all
    scores_BHLS[0, 1, 2, :7] = -torch.inf
    v_BSHD = torch.randn(1, 12, 2, 4, generator=generator, dtype=torch.float64)
    expected_out, expected_lse = attend(scores_BHLS, v_BSHD)
    edges = [0, *sorted(cuts), 12]
    out_BLHD, lse_BHL = (
        torch.zeros(1, 5, 2, 4, dtype=torch.float64),
        torch.full((1, 2, 5), -torch.inf, dtype=torch.float64),
    )
    for start, end in pairwise(edges):
        merge_into(out_BLHD, lse_BHL, *attend(scores_BHLS[..., start:end], v_BSHD[:, start:end]))
    torch.testing.assert_close(out_BLHD, expected_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse_BHL, expected_lse, rtol=1e-12, atol=1e-12)


def test_two_empty_parts_stay_empty_and_finite() -> None:
    out_BLHD, lse_BHL = torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf)
    merge_into(out_BLHD, lse_BHL, torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf))
    assert torch.isneginf(lse_BHL).all()
    assert torch.equal(out_BLHD, torch.zeros(1, 1, 1, 2))


def test_large_scores_do_not_overflow() -> None:
    """exp(1000) is inf in every type: only differences may be exponentiated."""
    out_BLHD, lse_BHL = torch.full((1, 1, 1, 1), 2.0), torch.full((1, 1, 1), 1000.0)
    merge_into(out_BLHD, lse_BHL, torch.full((1, 1, 1, 1), 4.0), torch.full((1, 1, 1), 1000.0))
    assert out_BLHD.item() == 3.0
    assert lse_BHL.item() == pytest.approx(1000.0 + torch.log(torch.tensor(2.0)).item())


@pytest.mark.parametrize(
    ("data_type", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_sums_are_kept_in_fp32_or_wider(data_type: torch.dtype, expected: torch.dtype) -> None:
    assert accumulator_dtype(data_type) == expected


def observe(before: float, part: float, after: float) -> RunningMaxMonitor:
    """Return a monitor that saw one merge of one value."""
    monitor = RunningMaxMonitor()
    monitor.observe(*(torch.full((1, 1, 1), value) for value in (before, part, after)))
    return monitor


@pytest.mark.parametrize(
    ("before", "part", "after"),
    [(1.0, 2.0, 2.31326), (-torch.inf, -torch.inf, -torch.inf), (-torch.inf, 3.0, 3.0)],
)
def test_a_healthy_merge_passes(before: float, part: float, after: float) -> None:
    assert observe(before, part, after).is_healthy


@pytest.mark.parametrize("after", [torch.nan, torch.inf, -torch.inf])
def test_a_lost_or_overflowed_value_is_counted(after: float) -> None:
    monitor = observe(1.0, 2.0, after)
    assert (monitor.n_not_finite, monitor.n_decreased) == (1, 0)
    assert not monitor.is_healthy


def test_a_falling_value_is_counted() -> None:
    """The maximum must reach the largest part: 1.9 after a part of 2 means that it was not updated."""
    monitor = observe(1.0, 2.0, 1.9)
    assert (monitor.n_not_finite, monitor.n_decreased) == (0, 1)


def test_the_first_unhealthy_merge_is_remembered() -> None:
    monitor = RunningMaxMonitor()
    values = ((1.0, 2.0, 2.5), (1.0, 2.0, 1.9), (1.0, 2.0, torch.nan))
    for layer, merge in enumerate(values):
        monitor.observe(*(torch.full((1, 1, 1), value) for value in merge), layer=layer)
    assert monitor.first_failure == (1, 1)
    assert monitor.n_merges == 3
