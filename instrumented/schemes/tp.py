"""Tensor parallelism: the baseline without context parallelism. Every rank has all tokens and its own heads.

In a transformer each rank multiplies its heads' output with its rows of the output projection, and an
all-reduce sums the ranks' partial results, S x hidden elements; backward, another one sums the partial
gradients of the block's input. Attention alone has no projection. Here each rank's part is zero but for its own
heads, in a tensor of the same size, so that the all-reduce moves the bytes of the real one at the same place,
and its sum is the output (backward: dq) of all heads. A real block has one more of each, after its MLP.

Attention needs no exchange, and the all-reduce stands between it and everything that follows: it is exposed.

Shapes: B batch, S tokens, H all query heads, h, g the query and key/value heads of one rank, D head dim.
Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from cptrace.labels import BACKWARD, FORWARD
from instrumented.comm import Collectives
from instrumented.layout import HeadLayout
from instrumented.ops import Kernels, Place
from instrumented.problem import BATCH, LayerState, Problem
from instrumented.runtime.api import Device
from instrumented.schemes.single import SingleAttention


def layout(problem: Problem) -> HeadLayout:
    """Return the split of the heads."""
    return HeadLayout(problem.seq_len, problem.cp_size)


class TensorParallelAttention:
    """Attention of one rank's heads, and the all-reduce after it."""

    def __init__(self, device: Device, problem: Problem, layers: Sequence[LayerState]) -> None:
        """Create streams, the communicator and the buffer; every rank must do so at the same time."""
        size = problem.cp_size
        self._layers = layers
        self._compute = device.stream()
        self._kernels = Kernels(device, self._compute, problem.softmax_scale)
        self._sum = Collectives(device, "hidden")
        sizes = replace(
            problem,
            cp_size=1,
            local_len=problem.seq_len,
            heads=problem.heads // size,
            kv_heads=problem.kv_heads // size,
        )
        self._attention = SingleAttention(device, sizes, layers, compute=self._compute)
        shape = (BATCH, problem.seq_len, problem.heads, problem.head_dim)
        self._hidden_BSHD = device.empty(shape, problem.data_type)
        self._own_BShD = self._hidden_BSHD.chunk(size, dim=2)[device.rank]
        self.monitors = self._attention.monitors

    def forward(self, layer: int) -> None:
        """Queue one layer's forward pass into its `out_BLHD`."""
        self._attention.forward(layer)
        self._all_reduce(Place(FORWARD, layer, 0), "out", self._layers[layer].out_BLHD)

    def backward(self, layer: int) -> None:
        """Queue one layer's backward pass into its `dq_BLHD`, `dk_BLGD` and `dv_BLGD`."""
        self._attention.backward(layer)
        self._all_reduce(Place(BACKWARD, layer, 0), "dq", self._layers[layer].dq_BLHD)

    def _all_reduce(self, place: Place, name: str, own_BShD: Tensor) -> None:
        """Sum all ranks' parts and keep this rank's heads of the sum."""
        self._kernels.clear(place, (self._hidden_BSHD,))
        self._kernels.pack(place, (self._own_BShD,), (own_BShD,), packs=name)
        self._sum.after(self._compute)
        self._sum.all_reduce(place, name, self._hidden_BSHD)
        self._sum.before(self._compute)
        self._kernels.pack(place, (own_BShD,), (self._own_BShD,), unpacks=name)
