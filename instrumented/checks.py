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

_FLOOR_ULPS: Final = 4
"""Errors up to this many units in the last place of the largest value always pass: where one kernel happens
to be exact, twice its error would forbid any rounding at all."""


@dataclass(frozen=True, slots=True)
class ParityRow:
    """One tensor of one rank and layer against float64, as largest absolute errors.

    Attributes:
        rank: Whose part of the sequence.
        layer: Which layer.
        tensor: One of out, dq, dk, dv.
        max_error: The scheme's error over the rank's part; None where a value is not finite.
        one_kernel_error: One kernel's error over the whole sequence.
        limit: What `max_error` may be.
    """

    rank: int
    layer: int
    tensor: str
    max_error: float | None
    one_kernel_error: float
    limit: float

    @property
    def has_passed(self) -> bool:
        """Whether the error is within the limit."""
        return self.max_error is not None and self.max_error <= self.limit

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
        one_kernel_error = float((measure.double() - whole).abs().max())
        floor = _FLOOR_ULPS * torch.finfo(measure.dtype).eps * float(whole.abs().max())
        limit = max(MAX_ERROR_RATIO * one_kernel_error, floor)
        for rank, part in enumerate(parts):
            error = _max_error(part, layout.shard(whole, rank))
            rows.append(ParityRow(rank, layer, name, error, one_kernel_error, limit))
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


def _max_error(actual: Tensor, expected: Tensor) -> float | None:
    error = float((actual.double() - expected).abs().max())
    return error if error < float("inf") else None
