"""K and V as one message of bytes: in their own type, or as fp8 with a scale for each block.

A block is one token of one head, D elements. Its largest value is scaled to the largest of fp8, so that no
block's small values are lost to another block's large ones.

Shapes: B batch, L local tokens, G key/value heads, D head dim; K stands for the two of k and v.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final, Protocol

import torch
from torch import Tensor

from cptrace.schemes.traffic import FP8_ALIGNMENT_BYTES
from instrumented.ops import Kernels, Place, Tensors
from instrumented.problem import Problem

QUANTISE: Final = "cptrace_cpu::quantise_fp8"
DEQUANTISE: Final = "cptrace_cpu::dequantise_fp8"

FP8: Final = torch.float8_e4m3fn
SCALE_TYPE: Final = torch.float32
_FP8_MAX: Final = torch.finfo(FP8).max


class KvMessage(Protocol):
    """A form in which K and V travel."""

    @property
    def n_bytes(self) -> int:
        """Length of a message."""

    def encode(self, kernels: Kernels, place: Place, message: Tensor, kv_BLGD: Tensors) -> None:
        """Launch the writing of (k, v) into a message."""

    def decode(self, kernels: Kernels, place: Place, message: Tensor, room_BLGD: Tensors) -> Tensors:
        """Return the (k, v) of a message: as views of it, or launched into `room_BLGD`."""


@dataclass(frozen=True, slots=True)
class PlainMessage:
    """K and V in their own type; reading costs nothing."""

    problem: Problem

    @property
    def n_bytes(self) -> int:
        """Length of a message."""
        return 2 * prod(self.problem.kv_shape) * self.problem.data_type.itemsize

    def encode(self, kernels: Kernels, place: Place, message: Tensor, kv_BLGD: Tensors) -> None:
        """Launch one copy of both."""
        kernels.pack(place, self.views(message), kv_BLGD, packs="kv")

    def decode(self, kernels: Kernels, place: Place, message: Tensor, room_BLGD: Tensors) -> Tensors:
        """Return views of the message."""
        return self.views(message)

    def views(self, message: Tensor) -> Tensors:
        """Return the (k, v) that a message consists of."""
        return message.view(self.problem.data_type).view(2, *self.problem.kv_shape).unbind(0)


@dataclass(frozen=True, slots=True)
class Fp8Message:
    """K and V as fp8: all scales in fp32, then all elements, filled up so that gradients can follow."""

    problem: Problem

    @property
    def n_bytes(self) -> int:
        """Length of a message."""
        n_bytes = self._scale_bytes + 2 * prod(self.problem.kv_shape)
        return -(-n_bytes // FP8_ALIGNMENT_BYTES) * FP8_ALIGNMENT_BYTES

    def encode(self, kernels: Kernels, place: Place, message: Tensor, kv_BLGD: Tensors) -> None:
        """Launch the quantisation of both."""
        scales_KBLG1, values_KBLGD = self._parts(message)

        def body() -> None:
            for scale_BLG1, value_BLGD, source_BLGD in zip(scales_KBLG1, values_KBLGD, kv_BLGD, strict=True):
                quantised_BLGD, block_scale_BLG1 = quantise(source_BLGD)
                scale_BLG1.copy_(block_scale_BLG1)
                value_BLGD.copy_(quantised_BLGD)

        kernels.move(place, QUANTISE, body, (message, *kv_BLGD), packs="kv")

    def decode(self, kernels: Kernels, place: Place, message: Tensor, room_BLGD: Tensors) -> Tensors:
        """Launch the conversion of both back to their own type."""
        scales_KBLG1, values_KBLGD = self._parts(message)

        def body() -> None:
            for scale_BLG1, value_BLGD, target_BLGD in zip(
                scales_KBLG1, values_KBLGD, room_BLGD, strict=True
            ):
                target_BLGD.copy_(dequantise(value_BLGD, scale_BLG1))

        kernels.move(place, DEQUANTISE, body, (message, *room_BLGD), unpacks="kv")
        return room_BLGD

    @property
    def _scale_bytes(self) -> int:
        return 2 * prod(self.problem.kv_shape[:-1]) * SCALE_TYPE.itemsize

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.problem.kv_shape
        scales = message[: self._scale_bytes].view(SCALE_TYPE).view(2, *shape[:-1], 1)
        values = message[self._scale_bytes :][: 2 * prod(shape)]
        return scales, values.view(FP8).view(2, *shape)


def quantise(source_BLGD: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor as fp8 and the scale of each block, BLG1 in fp32; a block of zeros has scale 1."""
    largest_BLG1 = source_BLGD.to(SCALE_TYPE).abs().amax(dim=-1, keepdim=True)
    scale_BLG1 = torch.where(largest_BLG1 > 0, largest_BLG1 / _FP8_MAX, 1.0)
    return (source_BLGD.to(SCALE_TYPE) / scale_BLG1).to(FP8), scale_BLG1


def dequantise(value_BLGD: Tensor, scale_BLG1: Tensor) -> Tensor:
    """Return the fp32 values of a quantised tensor."""
    return value_BLGD.to(SCALE_TYPE) * scale_BLG1


def fp8_round_trip(tensor_BLGD: Tensor) -> Tensor:
    """Return what a receiver sees of a tensor that travels as fp8, in the tensor's type."""
    return dequantise(*quantise(tensor_BLGD)).to(tensor_BLGD.dtype)
