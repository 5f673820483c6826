"""How busy a device's units were by its own counters, and the most memory in use on it."""

from __future__ import annotations

import numpy as np
import pandas as pd

from cptrace.analyses.scope import Scope, Window
from cptrace.intervals import BoolArray, Int64Array

SHARES = ("sm_active", "tensor_active")
"""Metrics that reports have: the mean share of SMs, and of tensor cores, that were active at a sample."""


def activity_shares(scope: Scope) -> dict[str, pd.arrays.FloatingArray]:
    """Return the mean of each of `SHARES` over the samples in each rank's window, missing where there is none.

    This is the field's "GPU utilisation" (DCGM's SM activity), where a kernel's running says nothing of how full it is.

    Args:
        scope: What to look at.
    """
    samples = scope.trace.gpu_samples
    device_of = dict(
        zip(scope.trace.ranks["rank"].tolist(), scope.trace.ranks["device"].tolist(), strict=True)
    )
    shares = {}
    for name in SHARES:
        rows = samples[(samples["metric"] == name).to_numpy(bool)]
        means = [_mean(rows[rows["device"] == device_of[rank]], scope.windows[rank]) for rank in scope.ranks]
        is_missing = np.array([mean is None for mean in means], bool)
        shares[name] = pd.arrays.FloatingArray(
            np.array([mean or 0.0 for mean in means], np.float64), is_missing
        )
    return shares


def _mean(samples: pd.DataFrame, window: Window) -> float | None:
    values = samples["share"].to_numpy()[_is_inside(samples["time_ns"].to_numpy(), window)]
    return float(values.mean()) if len(values) else None


def _is_inside(instant: Int64Array, window: Window) -> BoolArray:
    place = np.searchsorted(window.pieces.start_ns, instant, side="right") - 1
    is_inside: BoolArray = (place >= 0) & (instant < window.pieces.end_ns[np.maximum(place, 0)])
    return is_inside


def allocated_peaks(scope: Scope) -> dict[int, int]:
    """Return the most bytes in use at once on each rank's device, of what its process allocated during the capture.

    Ranks whose allocations were not traced are left out.

    Args:
        scope: What to look at.
    """
    table = scope.trace.allocations
    ranks = scope.trace.ranks
    peaks = {}
    for rank, process, device in zip(
        *(ranks[n].tolist() for n in ("rank", "process", "device")), strict=True
    ):
        mine = table[(table["process"] == process) & (table["device"] == device)]
        if not mine.empty:
            peaks[rank] = max(0, int(mine["change_bytes"].cumsum().max()))
    return peaks
