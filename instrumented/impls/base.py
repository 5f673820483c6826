"""A library's attention behind the calls of a scheme: one function of a rank's q, k and v, and torch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from cptrace import labels
from cptrace.labels import BACKWARD, FORWARD
from instrumented.layout import Placement, contiguous, zigzag
from instrumented.ops import ATTENTION_BACKWARD, ATTENTION_FORWARD, Place
from instrumented.problem import LayerState, Problem
from instrumented.runtime.api import Cost, Device
from instrumented.schemes.base import Monitors

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q_BLHD, k_BLGD, v_BLGD) -> out_BLHD of one rank, differentiable; it exchanges with other ranks itself."""

Around = Callable[[], AbstractContextManager[object]]
"""Returns a context that both passes need around them."""

_COST: Final = Cost()


@dataclass(frozen=True, slots=True)
class Library:
    """One library.

    Attributes:
        name: Its name in `cptrace.impls`.
        schemes: The schemes that it has.
        make: Returns its function for a scheme and a problem; every rank must call it at the same time.
        placement: Returns how it wants tokens placed, by scheme.
        around: Returns the context of a problem's passes, by problem.
    """

    name: str
    schemes: tuple[str, ...]
    make: Callable[[str, Problem], Attend]
    placement: Callable[[str, Problem], Placement]
    around: Callable[[Problem], Around] = lambda _problem: nullcontext


class LibraryAttention:
    """A library's attention of one rank. The library launches what it wants on streams and groups of its own."""

    def __init__(
        self, device: Device, layers: Sequence[LayerState], attend: Attend, around: Around = nullcontext
    ) -> None:
        """Let `attend` compute each layer, inside the context `around`."""
        self._device, self._layers, self._attend, self._around = device, layers, attend, around
        self._stream = device.stream()
        self._saved: dict[int, tuple[tuple[Tensor, ...], Tensor]] = {}
        self.monitors = Monitors()

    def forward(self, layer: int) -> None:
        """Queue one layer's forward pass into its `out_BLHD`."""
        state = self._layers[layer]

        def body() -> None:
            leaves = tuple(t.detach().requires_grad_() for t in (state.q_BLHD, state.k_BLGD, state.v_BLGD))
            with torch.enable_grad(), self._around():
                out_BLHD = self._attend(*leaves)
            state.out_BLHD.copy_(out_BLHD.detach())
            self._saved[layer] = (leaves, out_BLHD)

        self._launch(Place(FORWARD, layer, 0), ATTENTION_FORWARD, body)

    def backward(self, layer: int) -> None:
        """Queue one layer's backward pass into its `dq_BLHD`, `dk_BLGD` and `dv_BLGD`."""
        state = self._layers[layer]

        def body() -> None:
            leaves, out_BLHD = self._saved.pop(layer)
            with self._around():
                gradients = torch.autograd.grad(out_BLHD, leaves, state.dout_BLHD)
            for target, gradient in zip(
                (state.dq_BLHD, state.dk_BLGD, state.dv_BLGD), gradients, strict=True
            ):
                target.copy_(gradient)

        self._launch(Place(BACKWARD, layer, 0), ATTENTION_BACKWARD, body)

    def _launch(self, place: Place, name: str, body: Callable[[], None]) -> None:
        with self._device.range(place.label(labels.ATTENTION), payload=0, category=labels.ATTENTION):
            self._device.launch(self._stream, name, body, cost=_COST)


def new_group(ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Return an NCCL group of some ranks, or of all; every rank must call it, also one that is not a member."""
    group: dist.ProcessGroup = dist.new_group(None if ranks is None else list(ranks), backend="nccl")
    return group


def dual_chunks(_scheme: str, problem: Problem) -> Placement:
    """Return the zigzag under a causal mask, else contiguous chunks."""
    return (zigzag if problem.is_causal else contiguous)(problem.seq_len, problem.cp_size)
