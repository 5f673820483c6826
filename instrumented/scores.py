"""Whether a layer's scores are small enough for its keys and values to travel as fp8.

A score of size s is off by a part of s when its key was rounded to fp8, and the softmax turns that difference
into a factor: large scores forbid it. The lse of a row is at least its largest score, so the largest lse bounds
them all, and it is there for free. All ranks must send in the same form, so they tell each other theirs, and
what they decide takes effect one step later: nobody waits for it.

Source: the delayed scaling of NVIDIA's Transformer Engine, whose largest values are also one step old.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from torch import Tensor, float32

from instrumented.comm import Collectives
from instrumented.ops import Kernels, Place
from instrumented.runtime.api import Device

LARGEST_SCORE: Final = "cptrace_cpu::largest_score"


@dataclass(slots=True)
class ScoreMonitor:
    """What was measured and decided.

    Attributes:
        limit: Largest bound at which fp8 is allowed.
        largest: The bound of each layer in the step before its last, by layer; empty before the second step.
        uses_fp8: Whether each layer's last step sent fp8, by layer.
    """

    limit: float
    largest: dict[int, float] = field(default_factory=dict)
    uses_fp8: dict[int, bool] = field(default_factory=dict)

    def decide(self, layer: int, largest: float | None) -> bool:
        """Return whether a step may send fp8: not before one was measured, not above the limit, not for NaN."""
        if largest is not None:
            self.largest[layer] = largest
        self.uses_fp8[layer] = largest is not None and largest <= self.limit
        return self.uses_fp8[layer]


class ScoreWatch:
    """Measures each layer's largest score over all ranks, and says whether it allows fp8."""

    def __init__(self, device: Device, n_layers: int, limit: float) -> None:
        """Create the communicator and the buffers; every rank must do so at the same time."""
        self.monitor = ScoreMonitor(limit)
        self._channel = Collectives(device, "score")
        self._own_1 = [device.empty((1,), float32) for _ in range(n_layers)]
        self._all_P = [device.empty((device.size,), float32) for _ in range(n_layers)]
        self._is_measured = [False] * n_layers

    def allows_fp8(self, layer: int) -> bool:
        """Return the decision for a step; the device must have caught up with the step before."""
        largest = float(self._all_P[layer].max()) if self._is_measured[layer] else None
        return self.monitor.decide(layer, largest)

    def measure(self, kernels: Kernels, place: Place, lse_BHL: Tensor) -> None:
        """Launch the measurement of a layer and its exchange, beside whatever follows."""
        own_1 = self._own_1[place.layer]
        kernels.move(place, LARGEST_SCORE, lambda: own_1.copy_(lse_BHL.max()), (lse_BHL, own_1))
        self._channel.after(kernels.stream)
        self._channel.all_gather(place, "score", [list(self._all_P[place.layer].split(1))], [own_1])
        self._is_measured[place.layer] = True
