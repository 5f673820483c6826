"""Joining attention over disjoint sets of keys: the online softmax on (out, lse) pairs.

Shapes: B batch, L query tokens, H heads, D head dim. `lse` is the natural logarithm of the softmax
denominator, -inf where a query saw no key; `out` is then 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


def accumulator_dtype(data_type: torch.dtype) -> torch.dtype:
    """Return the type that sums are kept in: fp32, or fp64 where the inputs are fp64."""
    return torch.float64 if data_type == torch.float64 else torch.float32


def merge_into(out_BLHD: Tensor, lse_BHL: Tensor, part_out_BLHD: Tensor, part_lse_BHL: Tensor) -> None:
    """Merge a part into the running result, in place.

    With w = sigmoid(part_lse - lse), the part's share of the joint denominator, the joint output is
    out + w (part_out - out) and the joint lse is lse - logsigmoid(lse - part_lse). Where both are -inf the
    difference is undefined and the result stays empty.

    Args:
        out_BLHD: Running output, in the accumulator's type.
        lse_BHL: Running lse, same type.
        part_out_BLHD: The part's output, any type.
        part_lse_BHL: The part's lse.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.
    """
    is_empty_BHL = torch.isneginf(lse_BHL) & torch.isneginf(part_lse_BHL)
    difference_BHL = torch.where(is_empty_BHL, 0.0, part_lse_BHL.to(lse_BHL.dtype) - lse_BHL)
    weight_BLH1 = torch.sigmoid(difference_BHL).transpose(1, 2).unsqueeze(-1)
    out_BLHD.add_(weight_BLH1 * (part_out_BLHD.to(out_BLHD.dtype) - out_BLHD))
    joint_BHL = lse_BHL - torch.nn.functional.logsigmoid(-difference_BHL)
    # An infinite difference means that the running part is empty: lse - logsigmoid(-inf) would be inf - inf.
    joint_BHL = torch.where(torch.isneginf(lse_BHL), part_lse_BHL.to(lse_BHL.dtype), joint_BHL)
    lse_BHL.copy_(joint_BHL)


@dataclass(slots=True)
class RunningMaxMonitor:
    """Watches the running softmax statistic: it must stay finite and never fall.

    A wrong running maximum shows first as an lse that falls or overflows, long before the loss does.

    Attributes:
        n_merges: Merges seen.
        n_not_finite: Entries that were NaN or +inf after a merge, or -inf although the part was not empty.
        n_decreased: Entries that fell by more than rounding.
        largest: The largest lse seen, None before the first merge.
        first_failure: Layer and number of the first merge that was not healthy; None without one.

    On a GPU a look at a number would hold the host up until the merge is done: the numbers wait on the device, and
    are not counted before `settle`.
    """

    n_merges: int = 0
    n_not_finite: int = 0
    n_decreased: int = 0
    largest: float | None = None
    first_failure: tuple[int, int] | None = None
    _waiting: list[tuple[int, int, Tensor, Tensor, Tensor]] = field(default_factory=list, repr=False)

    @property
    def is_healthy(self) -> bool:
        """Whether every merge kept the statistic finite and monotone."""
        return self.n_not_finite == 0 and self.n_decreased == 0

    def observe(self, before_BHL: Tensor, part_BHL: Tensor, after_BHL: Tensor, *, layer: int = 0) -> None:
        """Look at one merge of a layer: the lse before it, the part's, and the lse after it."""
        slack = 8 * torch.finfo(after_BHL.dtype).eps
        is_lost = torch.isneginf(after_BHL) & ~(torch.isneginf(before_BHL) & torch.isneginf(part_BHL))
        is_bad = torch.isnan(after_BHL) | torch.isposinf(after_BHL) | is_lost
        floor_BHL = torch.maximum(before_BHL, part_BHL.to(after_BHL.dtype))
        has_decreased = after_BHL < floor_BHL - slack * (1 + floor_BHL.abs())
        figures = (is_bad.sum(), (has_decreased & ~is_bad).sum(), after_BHL.max())
        self._waiting.append((layer, self.n_merges, *figures))
        self.n_merges += 1
        if not after_BHL.is_cuda:
            self.settle()

    def settle(self) -> None:
        """Count what waits on the device."""
        for layer, number, n_bad, n_decreased, maximum in self._waiting:
            self.n_not_finite += int(n_bad)
            self.n_decreased += int(n_decreased)
            if not self.is_healthy and self.first_failure is None:
                self.first_failure = (layer, number)
            largest = float(maximum)
            self.largest = largest if self.largest is None else max(self.largest, largest)
        self._waiting.clear()
