"""The algorithms, one file each, under the names that `cptrace.schemes` describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from instrumented.problem import LayerState, Problem
from instrumented.runtime.api import Device
from instrumented.schemes.ring import RingAttention
from instrumented.softmax import RunningMaxMonitor


class Attention(Protocol):
    """A scheme at work: queues passes of layers on its device."""

    monitor: RunningMaxMonitor

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
    """A scheme's name and the code behind it."""

    name: str
    make: AttentionFactory


IMPLEMENTATIONS: tuple[Implementation, ...] = (Implementation("ring", RingAttention),)
