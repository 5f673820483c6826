"""Whether a run computed attention: its results against float64, and the health of the running maximum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor

from instrumented.layout import Layout
from instrumented.oracle import Results
from instrumented.softmax import RunningMaxMonitor

MAX_ERROR_RATIO: Final = 2.0
"""A scheme may be off by this many times the error of one kernel in the same type."""

_MAX_FLOOR_ULPS: Final = 8
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
        tensor: One of out, dq, dk, dv.
        max_error: The scheme's largest error over the rank's part; None where a value is not finite.
        max_limit: What it may be.
        one_kernel_max_error: One kernel's largest error over the whole sequence.
        rms_error: The scheme's root mean square error over the rank's part; None where not finite.
        rms_limit: What it may be.
        one_kernel_rms_error: One kernel's root mean square error over the whole sequence.
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


def parity_rows(
    layer: int,
    layout: Layout,
    shards: Mapping[str, Sequence[Tensor]],
    reference: Results,
    one_kernel: Results,
) -> list[ParityRow]:
    """Return a row for each rank and tensor.

    Args:
        layer: Which layer the tensors are of.
        layout: Which tokens each rank holds.
        shards: Each tensor's parts, in rank order.
        reference: The float64 results of the whole sequence.
        one_kernel: One kernel's results of the whole sequence.
    """
    rows = []
    for name, parts in shards.items():
        whole, measure = reference.named()[name], one_kernel.named()[name]
        one_kernel_max = _largest(measure.double() - whole)
        ulp = torch.finfo(measure.dtype).eps
        floor_ulps = _RMS_FLOOR_ULPS_FP64 if measure.dtype == torch.float64 else _RMS_FLOOR_ULPS
        one_kernel_rms = _rms(measure.double() - whole)
        max_limit = max(MAX_ERROR_RATIO * one_kernel_max, _MAX_FLOOR_ULPS * ulp * _largest(whole))
        rms_limit = max(MAX_ERROR_RATIO * one_kernel_rms, floor_ulps * ulp * _rms(whole))
        for rank, part in enumerate(parts):
            error = part.double() - layout.shard(whole, rank)
            max_figures = (_finite(_largest(error)), max_limit, one_kernel_max)
            rms_figures = (_finite(_rms(error)), rms_limit, one_kernel_rms)
            rows.append(ParityRow(rank, layer, name, *max_figures, *rms_figures))
    return rows


def running_max_json(monitors: Sequence[RunningMaxMonitor]) -> dict[str, Any]:
    """Return the ranks' monitors as one record."""
    largest = [monitor.largest for monitor in monitors if monitor.largest is not None]
    return {
        "passed": all(monitor.is_healthy for monitor in monitors),
        "n_merges": sum(monitor.n_merges for monitor in monitors),
        "n_not_finite": sum(monitor.n_not_finite for monitor in monitors),
        "n_decreased": sum(monitor.n_decreased for monitor in monitors),
        "largest_lse": max(largest) if largest and all(value < float("inf") for value in largest) else None,
    }


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
