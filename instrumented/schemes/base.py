"""What every scheme is to the code that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from instrumented.layout import Placement
from instrumented.problem import LayerState, Problem
from instrumented.runtime.api import Device
from instrumented.scores import ScoreMonitor
from instrumented.softmax import RunningMaxMonitor


@dataclass(slots=True)
class Monitors:
    """What a scheme watches while it runs.

    Attributes:
        running_max: The softmax statistic in every merge.
        fp8: The scores on which fp8 messages depend; None for schemes without them.
    """

    running_max: RunningMaxMonitor = field(default_factory=RunningMaxMonitor)
    fp8: ScoreMonitor | None = None

    def sends_fp8(self, layer: int) -> bool:
        """Return whether a layer's last step sent its keys and values as fp8."""
        return self.fp8 is not None and self.fp8.uses_fp8.get(layer, False)


class Attention(Protocol):
    """A scheme at work: queues passes of layers on its device."""

    monitors: Monitors

    def forward(self, layer: int) -> None:
        """Queue one layer's forward pass."""

    def backward(self, layer: int) -> None:
        """Queue one layer's backward pass."""


class AttentionFactory(Protocol):
    """Makes a scheme for one rank."""

    def __call__(self, device: Device, problem: Problem, layers: Sequence[LayerState]) -> Attention:
        """Return the scheme with its streams, communicators and buffers."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """A scheme's name and the code behind it.

    Attributes:
        name: Its name in `cptrace.schemes`.
        make: Makes the scheme for one rank.
        placement: Returns how a problem's whole tensors are cut into the ranks' parts.
    """

    name: str
    make: AttentionFactory
    placement: Callable[[Problem], Placement]
