"""Whether a run computed attention: its results against float64, and the health of the running maximum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from instrumented.layout import Placement
from instrumented.messages import fp8_round_trip
from instrumented.oracle import Results, dense_attention, one_kernel_attention
from instrumented.problem import Problem, make_inputs
from instrumented.scores import ScoreMonitor
from instrumented.softmax import RunningMaxMonitor

_HOST: Final = torch.device("cpu")

MAX_ERROR_RATIO: Final = 2.0
"""A scheme may be off by this many times the error of one kernel in the same type."""

MAX_FLOOR_ULPS: Final = 8
_RMS_FLOOR_ULPS: Final = 1
_RMS_FLOOR_ULPS_FP64: Final = 8  # the float64 reference rounds as much itself, and much alike one kernel
"""Errors up to this many units in the last place always pass: of the largest value for the largest error, of
the root mean square for the root mean square. The largest of a few thousand rounding errors is a matter of
luck, for one kernel as for a ring, and where one kernel is exact, twice its error forbids any rounding."""


@dataclass(frozen=True, slots=True)
class ParityRow:
    """One tensor of one rank and layer against float64: the largest error, and the root mean square error.

    The root mean square is the sharp measure of rounding; the largest error finds a single damaged value.

    Attributes:
        rank: Whose part of the sequence.
        layer: Which layer.
        tensor: One of out, dq, dk, dv; of a model `hidden`, what a block puts out, or the gradient of weights.
        max_error: The scheme's largest error over the rank's part; None where a value is not finite.
        max_limit: What it may be.
        one_kernel_max_error: One kernel's largest error over the whole sequence.
        rms_error: The scheme's root mean square error over the rank's part; None where not finite.
        rms_limit: What it may be, by one kernel's root mean square error over the same part (under a causal mask
            gradients of early tokens are larger than those of late ones, and so are their errors) or over the
            whole sequence where that is larger (on a few tokens a kernel may be lucky).
        one_kernel_rms_error: One kernel's root mean square error over the same part.
    """

    rank: int
    layer: int
    tensor: str
    max_error: float | None
    max_limit: float
    one_kernel_max_error: float
    rms_error: float | None
    rms_limit: float
    one_kernel_rms_error: float

    @property
    def has_passed(self) -> bool:
        """Whether both errors are within their limits."""
        return (
            self.max_error is not None
            and self.rms_error is not None
            and self.max_error <= self.max_limit
            and self.rms_error <= self.rms_limit
        )

    def to_json(self) -> dict[str, Any]:
        """Return the row with its verdict."""
        return {**asdict(self), "passed": self.has_passed}


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What one whole tensor should be, and how far one process is off in the run's own type.

    Attributes:
        layer: Which layer.
        tensor: Its name.
        exact: The float64 values.
        kernel_error: By how much one process's differ from them.
        data_type: The run's type, in which that process computed.
    """

    layer: int
    tensor: str
    exact: Tensor
    kernel_error: Tensor
    data_type: torch.dtype

    @classmethod
    def of(cls, layer: int, tensor: str, exact: Tensor, one_kernel: Tensor) -> Yardstick:
        """Return the yardstick of a tensor, from its float64 values and those of one process."""
        return cls(layer, tensor, exact, one_kernel.double() - exact, one_kernel.dtype)

    def row(self, rank: int, part: Tensor, cut: Callable[[Tensor], Tensor]) -> ParityRow:
        """Return the comparison of a rank's part.

        Args:
            rank: Whose part.
            part: What the rank has, without padding.
            cut: Returns the same part of a whole tensor.
        """
        ulp, is_fp64 = torch.finfo(self.data_type).eps, self.data_type == torch.float64
        rms_ulps = _RMS_FLOOR_ULPS_FP64 if is_fp64 else _RMS_FLOOR_ULPS
        one_kernel_max = _largest(self.kernel_error)
        max_limit = max(MAX_ERROR_RATIO * one_kernel_max, MAX_FLOOR_ULPS * ulp * _largest(self.exact))
        exact, one_kernel_rms = cut(self.exact), _rms(cut(self.kernel_error))
        error, rms_scale = part.double() - exact, max(one_kernel_rms, _rms(self.kernel_error))
        rms_limit = max(MAX_ERROR_RATIO * rms_scale, rms_ulps * ulp * _rms(exact))
        max_figures = (_finite(_largest(error)), max_limit, one_kernel_max)
        rms_figures = (_finite(_rms(error)), rms_limit, one_kernel_rms)
        return ParityRow(rank, self.layer, self.tensor, *max_figures, *rms_figures)

    def token_rows(self, layout: Placement, parts: Sequence[Tensor]) -> list[ParityRow]:
        """Return a row for each rank that holds any of the sequence; `parts` are in rank order, with padding."""
        rows = []
        for rank, part in enumerate(parts):
            tokens = slice(0, layout.n_tokens(rank))
            if tokens.stop == 0:
                continue  # all padding
            rows.append(self.row(rank, part[:, tokens], partial(_tokens_of, layout, rank, tokens)))
        return rows


def _tokens_of(layout: Placement, rank: int, tokens: slice, whole: Tensor) -> Tensor:
    return layout.shard(whole, rank)[:, tokens]


def parity_rows(
    layer: int,
    layout: Placement,
    shards: Mapping[str, Sequence[Tensor]],
    reference: Results,
    one_kernel: Results,
) -> list[ParityRow]:
    """Return a row for each tensor and each rank that holds any of the sequence.

    Args:
        layer: Which layer the tensors are of.
        layout: Which tokens each rank holds.
        shards: Each tensor's parts, in rank order.
        reference: The float64 results of the whole sequence.
        one_kernel: One kernel's results of the whole sequence.
    """
    rows = []
    for name, parts in shards.items():
        yardstick = Yardstick.of(layer, name, reference.named()[name], one_kernel.named()[name])
        rows += yardstick.token_rows(layout, parts)
    return rows


@dataclass(frozen=True, slots=True)
class ParityCheck:
    """Compares a run's results with references that it computes.

    Attributes:
        problem: What was computed.
        layout: Which part of the results each rank holds.
        seed: Seed of the inputs.
        with_backward: Whether there are gradients.
        place: Device of the kernel that sets the limits: the run's own, since kernels round differently.
    """

    problem: Problem
    layout: Placement
    seed: int
    with_backward: bool
    place: torch.device = _HOST

    def rows(
        self, layer: int, shards: Mapping[str, Sequence[Tensor]], *, has_fp8_keys: bool
    ) -> list[ParityRow]:
        """Return the rows of one layer.

        Args:
            layer: Which layer.
            shards: Each tensor's parts, in rank order.
            has_fp8_keys: Whether keys and values were rounded to fp8. The kernel that sets the limits then gets
                rounded ones too: it does the same maths, and the reference shows what fp8 costs both.
        """
        inputs = make_inputs(self.problem, self.seed, layer)
        rounded = inputs
        if has_fp8_keys:
            k_BSGD, v_BSGD = fp8_round_trip(inputs.k_BSGD), fp8_round_trip(inputs.v_BSGD)
            rounded = replace(inputs, k_BSGD=k_BSGD, v_BSGD=v_BSGD)
        is_causal, scale = self.problem.is_causal, self.problem.softmax_scale
        reference, one_kernel = (
            attention(of, is_causal=is_causal, softmax_scale=scale, with_backward=self.with_backward)
            for attention, of in (
                (dense_attention, inputs),
                (one_kernel_attention, rounded.to(self.place)),
            )
        )
        return parity_rows(layer, self.layout, shards, reference, one_kernel.to(_HOST))


def running_max_json(
    monitors: Sequence[RunningMaxMonitor], *, steps: int = 1, warmup: int = 0
) -> dict[str, Any]:
    """Return the ranks' monitors as one record.

    Args:
        monitors: By rank.
        steps: Measured steps, each with as many merges.
        warmup: Steps before them; a failure there has no step.
    """
    largest = [monitor.largest for monitor in monitors if monitor.largest is not None]
    return {
        "passed": all(monitor.is_healthy for monitor in monitors),
        "n_merges": sum(monitor.n_merges for monitor in monitors),
        "n_not_finite": sum(monitor.n_not_finite for monitor in monitors),
        "n_decreased": sum(monitor.n_decreased for monitor in monitors),
        "largest_lse": max(largest) if largest and all(value < float("inf") for value in largest) else None,
        "failures": [
            {"rank": rank, "layer": layer, "step": step if step >= 0 else None}
            for rank, monitor in enumerate(monitors)
            if monitor.first_failure is not None
            for layer, number in [monitor.first_failure]
            for step in [number * (steps + warmup) // monitor.n_merges - warmup]
        ],
    }


def fp8_json(monitor: ScoreMonitor | None) -> dict[str, Any] | None:
    """Return what decided about fp8 messages, which is the same on all ranks; None for runs without them."""
    if monitor is None:
        return None
    largest = [value for value in monitor.largest.values() if value < float("inf")]
    return {
        "score_limit": monitor.limit,
        "largest_score": max(largest, default=None),
        "fp8_layers": [layer for layer, is_used in monitor.uses_fp8.items() if is_used],
        "fallback_layers": [layer for layer, is_used in monitor.uses_fp8.items() if not is_used],
    }


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
