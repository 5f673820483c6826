"""What attention must give: the dense computation in float64, and one kernel's answer in the run's own type.

The second is the scale for errors: a scheme may be off by rounding, and this says how much rounding there is.

Shapes: B batch, S sequence, H query heads, G key/value heads, D head dim, C rows of one slice of the queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from instrumented.block import block_attention_backward, block_attention_forward
from instrumented.problem import Inputs

TENSOR_NAMES: Final = ("out", "dq", "dk", "dv")

_SLICE_BYTES: Final = 64 << 20  # of scores at a time, so that long sequences fit


@dataclass(frozen=True, slots=True)
class Results:
    """Output and gradients of the whole sequence; gradients are None for a forward pass alone."""

    out_BSHD: Tensor
    dq_BSHD: Tensor | None = None
    dk_BSGD: Tensor | None = None
    dv_BSGD: Tensor | None = None

    def to(self, place: torch.device) -> Results:
        """Return the same on a device."""
        tensors = (self.out_BSHD, self.dq_BSHD, self.dk_BSGD, self.dv_BSGD)
        return Results(*(None if tensor is None else tensor.to(place) for tensor in tensors))

    def named(self) -> dict[str, Tensor]:
        """Return the tensors that exist, by the names in `TENSOR_NAMES`."""
        tensors = (self.out_BSHD, self.dq_BSHD, self.dk_BSGD, self.dv_BSGD)
        pairs = zip(TENSOR_NAMES, tensors, strict=True)
        return {name: tensor for name, tensor in pairs if tensor is not None}


def dense_attention(inputs: Inputs, *, is_causal: bool, softmax_scale: float, with_backward: bool) -> Results:
    """Return softmax(q k^T scale) v and its gradients, computed in float64 one head and slice at a time."""
    q_BSHD, k_BSGD, v_BSGD, dout_BSHD = (tensor.double() for tensor in _tensors(inputs))
    out_BSHD, dq_BSHD = torch.empty_like(q_BSHD), torch.empty_like(q_BSHD)
    dk_BSGD, dv_BSGD = torch.zeros_like(k_BSGD), torch.zeros_like(v_BSGD)
    n_queries_per_kv = q_BSHD.shape[2] // k_BSGD.shape[2]
    for head in range(q_BSHD.shape[2]):
        group = head // n_queries_per_kv
        k_BSD, v_BSD = k_BSGD[:, :, group], v_BSGD[:, :, group]
        for rows in _slices(q_BSHD.shape[1]):
            p_BCS = _probabilities(q_BSHD[:, rows, head], k_BSD, rows, is_causal, softmax_scale)
            out_BSHD[:, rows, head] = p_BCS @ v_BSD
            if not with_backward:
                continue
            dout_BCD = dout_BSHD[:, rows, head]
            dv_BSGD[:, :, group] += p_BCS.mT @ dout_BCD
            delta_BC1 = (dout_BCD * out_BSHD[:, rows, head]).sum(dim=-1, keepdim=True)
            dscores_BCS = p_BCS * (dout_BCD @ v_BSD.mT - delta_BC1) * softmax_scale
            dq_BSHD[:, rows, head] = dscores_BCS @ k_BSD
            dk_BSGD[:, :, group] += dscores_BCS.mT @ q_BSHD[:, rows, head]
    return Results(out_BSHD, dq_BSHD, dk_BSGD, dv_BSGD) if with_backward else Results(out_BSHD)


def one_kernel_attention(
    inputs: Inputs, *, is_causal: bool, softmax_scale: float, with_backward: bool
) -> Results:
    """Return the same from one call of the attention kernel on the whole sequence, in the inputs' type."""
    q_BSHD, k_BSGD, v_BSGD, dout_BSHD = _tensors(inputs)
    options = {"is_causal": is_causal, "softmax_scale": softmax_scale}
    out_BSHD, lse_BHS = block_attention_forward(q_BSHD, k_BSGD, v_BSGD, **options)
    if not with_backward:
        return Results(out_BSHD)
    gradients = block_attention_backward(dout_BSHD, q_BSHD, k_BSGD, v_BSGD, out_BSHD, lse_BHS, **options)
    return Results(out_BSHD, *gradients)


def _tensors(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return inputs.q_BSHD, inputs.k_BSGD, inputs.v_BSGD, inputs.dout_BSHD


def _slices(seq_len: int) -> list[slice]:
    n_rows = max(1, _SLICE_BYTES // (8 * seq_len))
    return [slice(start, min(start + n_rows, seq_len)) for start in range(0, seq_len, n_rows)]


def _probabilities(
    q_BCD: Tensor, k_BSD: Tensor, rows: slice, is_causal: bool, softmax_scale: float
) -> Tensor:
    scores_BCS = q_BCD @ k_BSD.mT * softmax_scale
    if is_causal:
        queries_C1 = torch.arange(rows.start, rows.stop).unsqueeze(1)
        scores_BCS.masked_fill_(torch.arange(k_BSD.shape[1]) > queries_C1, -torch.inf)
    return torch.softmax(scores_BCS, dim=-1)
