"""One rank, one kernel per pass: the baseline without communication, and the inside of Ulysses.

Shapes: B batch, S tokens with padding, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

from cptrace.labels import BACKWARD, FORWARD
from instrumented.layout import Layout, contiguous
from instrumented.ops import Kernels, Place
from instrumented.problem import LayerState, Problem
from instrumented.runtime.api import Device, Stream
from instrumented.schemes.base import Monitors


def layout(problem: Problem) -> Layout:
    """Return the layout of one rank."""
    return contiguous(problem.seq_len, problem.cp_size)


class SingleAttention:
    """Attention over tokens that are all here."""

    def __init__(
        self,
        device: Device,
        problem: Problem,
        layers: Sequence[LayerState],
        *,
        compute: Stream | None = None,
        hop: int = 0,
    ) -> None:
        """Create a stream and what the backward pass needs.

        Args:
            device: This rank's device.
            problem: Sizes; keys from `seq_len` on are padding.
            layers: The tensors of each layer.
            compute: The stream to compute on; None for a new one.
            hop: Number of this part of the work in labels.
        """
        self._problem, self._layers, self._hop = problem, layers, hop
        stream = device.stream() if compute is None else compute
        self._kernels = Kernels(device, stream, problem.softmax_scale)
        self._lse_BHS = [device.empty(problem.lse_shape, problem.sum_type) for _ in layers]
        # A causal mask hides padding already: it comes after all tokens.
        self._keys = slice(0, problem.local_len if problem.is_causal else problem.seq_len)
        self.monitors = Monitors()

    def forward(self, layer: int) -> None:
        """Queue one layer's forward pass into its `out_BLHD`."""
        state, place = self._layers[layer], Place(FORWARD, layer, self._hop)
        qkv = (state.q_BLHD, state.k_BLGD[:, self._keys], state.v_BLGD[:, self._keys])
        result = (state.out_BLHD, self._lse_BHS[layer])
        self._kernels.attend(place, qkv, result, is_causal=self._problem.is_causal)

    def backward(self, layer: int) -> None:
        """Queue one layer's backward pass into its `dq_BLHD`, `dk_BLGD` and `dv_BLGD`."""
        state, keys, place = self._layers[layer], self._keys, Place(BACKWARD, layer, self._hop)
        if keys.stop < self._problem.local_len:
            self._kernels.clear(place, (state.dk_BLGD[:, keys.stop :], state.dv_BLGD[:, keys.stop :]))
        qkv = (state.q_BLHD, state.k_BLGD[:, keys], state.v_BLGD[:, keys])
        saved = (state.dout_BLHD, *qkv, state.out_BLHD, self._lse_BHS[layer])
        gradients = (state.dq_BLHD, state.dk_BLGD[:, keys], state.dv_BLGD[:, keys])
        self._kernels.attend_backward(place, saved, gradients, is_causal=self._problem.is_causal)
