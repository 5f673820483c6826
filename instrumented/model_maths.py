"""What a block computes besides matrix products and attention, forward and backward, as functions of tensors.

Everything is computed in the accumulator's type and rounded once. Gradients are written out: an op must say what
it reads and writes, and autograd would hide that.

Shapes: B batch, L local tokens, E hidden, H heads, D head dim, F ffn, Z = 2F.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import silu

from instrumented.softmax import accumulator_dtype

NORM_EPSILON: Final = 1e-5
ROPE_BASE: Final = 10_000.0


def rms_norm(x_BLE: Tensor, weight_E: Tensor) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * weight, in the type of x.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
    """
    n_BLE, _ = _normalised(x_BLE)
    return (n_BLE * weight_E).to(x_BLE.dtype)


def rms_norm_backward(dy_BLE: Tensor, x_BLE: Tensor, weight_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight, in the accumulator's type.

    With n = x r and r = 1 / sqrt(mean(x^2) + epsilon): dx = r (g - n mean(g n)) where g = dy * weight.
    """
    n_BLE, r_BL1 = _normalised(x_BLE)
    g_BLE = dy_BLE.to(n_BLE.dtype) * weight_E
    dx_BLE = r_BL1 * (g_BLE - n_BLE * (g_BLE * n_BLE).mean(dim=-1, keepdim=True))
    return dx_BLE, (dy_BLE * n_BLE).sum(dim=(0, 1))


def _normalised(x_BLE: Tensor) -> tuple[Tensor, Tensor]:
    """Return x divided by its root mean square, and what it was multiplied with."""
    x_BLE = x_BLE.to(accumulator_dtype(x_BLE.dtype))
    r_BL1 = torch.rsqrt(x_BLE.square().mean(dim=-1, keepdim=True) + NORM_EPSILON)
    return x_BLE * r_BL1, r_BL1


def rope_table(positions_L: Tensor, head_dim: int, data_type: torch.dtype) -> Tensor:
    """Return the cosines and sines of the angles position * base^(-2i/D), shape [2, L, D/2].

    Args:
        positions_L: Positions of the tokens in the whole sequence, which a rank's own numbering is not.
        head_dim: Elements per head, even.
        data_type: Type of the result.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, section 3.2.2.
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64)
    angles = torch.outer(positions_L.double(), ROPE_BASE ** (-pairs / head_dim))
    return torch.stack([angles.cos(), angles.sin()]).to(data_type)


def rotate(x_BLHD: Tensor, table_2LC: Tensor, *, is_backward: bool = False) -> Tensor:
    """Return x with each pair (i, i + D/2) of a head turned by its token's angle, in the type of x.

    A rotation's gradient is turned back by the same angle.
    """
    cos_L1C, sin_L1C = table_2LC.unsqueeze(2)
    if is_backward:
        sin_L1C = -sin_L1C
    first, second = x_BLHD.to(table_2LC.dtype).chunk(2, dim=-1)
    turned = (first * cos_L1C - second * sin_L1C, second * cos_L1C + first * sin_L1C)
    return torch.cat(turned, dim=-1).to(x_BLHD.dtype)


def swiglu(gate_up_BLZ: Tensor) -> Tensor:
    """Return silu(gate) * up, in the type of the two.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, equation 6.
    """
    gate_BLF, up_BLF = gate_up_BLZ.to(accumulator_dtype(gate_up_BLZ.dtype)).chunk(2, dim=-1)
    return (silu(gate_BLF) * up_BLF).to(gate_up_BLZ.dtype)


def swiglu_backward(dact_BLF: Tensor, gate_up_BLZ: Tensor) -> Tensor:
    """Return the gradients of gate and up, side by side, in their type."""
    gate_BLF, up_BLF = gate_up_BLZ.to(accumulator_dtype(gate_up_BLZ.dtype)).chunk(2, dim=-1)
    sigmoid_BLF = torch.sigmoid(gate_BLF)
    slope_BLF = sigmoid_BLF * (1 + gate_BLF * (1 - sigmoid_BLF))
    both = (dact_BLF * up_BLF * slope_BLF, dact_BLF * gate_BLF * sigmoid_BLF)
    return torch.cat(both, dim=-1).to(gate_up_BLZ.dtype)


def squared_error(x_BLE: Tensor, target_BLE: Tensor, n_elements: int) -> tuple[Tensor, Tensor]:
    """Return these tokens' share of the mean squared error, and its gradient, in the accumulator's type.

    Args:
        x_BLE: What the last block put out.
        target_BLE: What it should have.
        n_elements: Elements of the whole sequence, of all ranks.
    """
    error_BLE = x_BLE.to(accumulator_dtype(x_BLE.dtype)) - target_BLE
    return error_BLE.square().sum() / n_elements, error_BLE * (2 / n_elements)
