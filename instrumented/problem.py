"""What is computed: the sizes of one run's attention, and its inputs.

Shapes: B batch, S sequence, L local sequence, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from cptrace.capture.run_spec import FP8, RunSpec
from cptrace.faults import UNBALANCED
from instrumented.layout import Placement
from instrumented.runtime.api import Device
from instrumented.softmax import accumulator_dtype

BATCH: Final = 1  # fixed: the question is how one long sequence is split

DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
)


@dataclass(frozen=True, slots=True)
class Problem:
    """The sizes of the attention of one rank.

    Attributes:
        cp_size: Ranks.
        seq_len: Tokens of the whole sequence, without padding.
        local_len: Tokens of one rank, with padding.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Elements per head.
        data_type: Type of q, k, v and out.
        is_causal: Whether a token sees only itself and earlier tokens.
        softmax_scale: Factor of the scores.
        ulysses_size: Ranks that split the heads, for schemes that split both heads and sequence.
        fp8_score_limit: Largest score up to which keys and values may travel as fp8; None if they never do.
        is_unbalanced: Whether chunks are contiguous also where another layout would balance a causal mask: a
            fault.
    """

    cp_size: int
    seq_len: int
    local_len: int
    heads: int
    kv_heads: int
    head_dim: int
    data_type: torch.dtype
    is_causal: bool
    softmax_scale: float
    ulysses_size: int = 1
    fp8_score_limit: float | None = None
    is_unbalanced: bool = False

    @classmethod
    def of(cls, spec: RunSpec) -> Problem:
        """Return the problem that a run's options describe."""
        return cls(
            cp_size=spec.cp_size,
            seq_len=spec.seq_len,
            local_len=spec.padded_len // spec.cp_size,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            data_type=DTYPES[spec.dtype],
            is_causal=spec.causal,
            softmax_scale=spec.head_dim**-0.5,
            ulysses_size=spec.ulysses_size,
            fp8_score_limit=spec.fp8_score_limit if spec.message_dtype == FP8 else None,
            is_unbalanced=UNBALANCED in spec.faults,
        )

    @property
    def is_balanced(self) -> bool:
        """Whether the layout balances a causal mask."""
        return self.is_causal and not self.is_unbalanced

    @property
    def padded_len(self) -> int:
        """Tokens of the whole sequence with padding."""
        return self.local_len * self.cp_size

    @property
    def sum_type(self) -> torch.dtype:
        """Type of accumulators."""
        return accumulator_dtype(self.data_type)

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Shape of a rank's q, out and their gradients, BLHD."""
        return BATCH, self.local_len, self.heads, self.head_dim

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Shape of a rank's k, v and their gradients, BLGD."""
        return BATCH, self.local_len, self.kv_heads, self.head_dim

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        """Shape of a rank's lse, BHL."""
        return BATCH, self.heads, self.local_len


@dataclass(frozen=True, slots=True)
class Inputs:
    """One layer's whole or local q, k, v and the gradient of its output."""

    q_BSHD: Tensor
    k_BSGD: Tensor
    v_BSGD: Tensor
    dout_BSHD: Tensor

    def to(self, place: torch.device) -> Inputs:
        """Return the same on a device."""
        tensors = (self.q_BSHD, self.k_BSGD, self.v_BSGD, self.dout_BSHD)
        return Inputs(*(tensor.to(place) for tensor in tensors))

    def shard(self, layout: Placement, rank: int) -> Inputs:
        """Return a rank's part."""
        tensors = (self.q_BSHD, self.k_BSGD, self.v_BSGD, self.dout_BSHD)
        return Inputs(*(layout.shard(tensor, rank) for tensor in tensors))


def make_inputs(problem: Problem, seed: int, layer: int) -> Inputs:
    """Return a layer's whole inputs, the same on every rank: standard normal, drawn in fp64."""
    generator = make_generator(seed, layer)
    q_shape = (BATCH, problem.seq_len, problem.heads, problem.head_dim)
    kv_shape = (BATCH, problem.seq_len, problem.kv_heads, problem.head_dim)
    shapes = (q_shape, kv_shape, kv_shape, q_shape)
    tensors = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return Inputs(*(tensor.to(problem.data_type) for tensor in tensors))


def make_generator(seed: int, number: int) -> torch.Generator:
    """Return the generator of one layer's numbers: of any seed that a run takes, within the 63 bits of torch's."""
    return torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer's tensors on one rank: inputs, and what a step writes."""

    q_BLHD: Tensor
    k_BLGD: Tensor
    v_BLGD: Tensor
    dout_BLHD: Tensor
    out_BLHD: Tensor
    dq_BLHD: Tensor
    dk_BLGD: Tensor
    dv_BLGD: Tensor

    @classmethod
    def allocate(cls, device: Device, inputs: Inputs) -> LayerState:
        """Return a layer on `device` with a rank's inputs copied in."""
        sources = (inputs.q_BSHD, inputs.k_BSGD, inputs.v_BSGD, inputs.dout_BSHD)
        placed = [device.empty(source.shape, source.dtype) for source in sources]
        for target, source in zip(placed, sources, strict=True):
            target.copy_(source)
        q_like, k_like, v_like, _ = placed
        results = [device.empty(like.shape, like.dtype) for like in (q_like, q_like, k_like, v_like)]
        return cls(*placed, *results)
