"""K and V as bytes: what comes out is what went in, or its fp8 rounding with a scale per token and head."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cptrace.capture.run_spec import ELEMENT_BYTES, RunSpec
from cptrace.schemes.traffic import te_message_bytes
from instrumented.messages import Fp8Message, PlainMessage, dequantise, fp8_round_trip, quantise
from instrumented.ops import Kernels, Place
from instrumented.problem import Problem

PLACE = Place("forward", 0, 0)
E4M3_STEP = 2.0**-4  # three bits of mantissa: half of a unit in the last place, relative to the value


class EagerDevice:
    """Runs what is launched, at once."""

    def launch(self, stream: object, name: str, function: Callable[[], None], *, cost: Any) -> None:
        function()

    def range(self, label: str, **_: object) -> nullcontext[None]:
        return nullcontext()


def kernels() -> Kernels:
    """Return kernels that run at once."""
    return Kernels(EagerDevice(), None, 1.0)


def spec(**options: object) -> RunSpec:
    """Return the options of a small run."""
    return RunSpec(
        **{"scheme": "te", "cp_size": 2, "seq_len": 6, "heads": 3, "kv_heads": 3, "head_dim": 5, **options}
    )


def random_kv(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a k and a v."""
    k, v = torch.randn(2, *problem.kv_shape, dtype=torch.float64).to(problem.data_type)
    return k, v


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
@pytest.mark.parametrize("message_dtype", ["same", "fp8"])
def test_a_message_is_as_long_as_the_formula_says(dtype: str, message_dtype: str) -> None:
    of = spec(dtype=dtype, message_dtype=message_dtype)
    message = (PlainMessage if message_dtype == "same" else Fp8Message)(Problem.of(of))
    assert message.n_bytes == te_message_bytes(of.shape)


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_a_plain_message_holds_its_tensors(dtype: str) -> None:
    problem = Problem.of(spec(dtype=dtype))
    codec, kv = PlainMessage(problem), random_kv(problem)
    message = torch.zeros(codec.n_bytes, dtype=torch.uint8)
    codec.encode(kernels(), PLACE, message, kv)
    arrived = codec.decode(kernels(), PLACE, message, ())
    assert all(torch.equal(a, b) for a, b in zip(arrived, kv, strict=True))
    assert arrived[0].untyped_storage().data_ptr() == message.untyped_storage().data_ptr()  # no copy


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_an_fp8_message_holds_the_rounded_tensors(dtype: str) -> None:
    problem = Problem.of(spec(dtype=dtype))
    codec, kv = Fp8Message(problem), random_kv(problem)
    message = torch.zeros(codec.n_bytes, dtype=torch.uint8)
    room = tuple(torch.empty_like(tensor) for tensor in kv)
    codec.encode(kernels(), PLACE, message, kv)
    arrived = codec.decode(kernels(), PLACE, message, room)
    for actual, source in zip(arrived, kv, strict=True):
        assert actual.dtype == source.dtype
        assert torch.equal(actual, fp8_round_trip(source))
        assert not torch.equal(actual, source)


@settings(deadline=None)  # the first call warms torch up
@given(seed=st.integers(0, 10**6), exponent=st.integers(-30, 30))
def test_rounding_is_relative_to_each_value_whatever_its_blocks_size(seed: int, exponent: int) -> None:
    """Also with blocks of very different sizes beside each other, which one scale for all would flush to zero."""
    generator = torch.Generator().manual_seed(seed)
    source_BLGD = torch.randn(1, 4, 2, 16, generator=generator) * 2.0**exponent
    source_BLGD[0, 1] *= 1e-6
    rounded_BLGD = fp8_round_trip(source_BLGD)
    smallest_normal = source_BLGD.abs().amax(-1, keepdim=True) / 448 * 2.0**-6
    error_BLGD = (rounded_BLGD - source_BLGD).abs()
    assert torch.all(error_BLGD <= E4M3_STEP * torch.maximum(source_BLGD.abs(), smallest_normal) * 1.001)


def test_zeros_stay_zeros_and_the_largest_value_stays_finite() -> None:
    source_BLGD = torch.zeros(1, 2, 1, 4)
    source_BLGD[0, 1, 0, 0] = torch.finfo(torch.float32).max
    value_BLGD, scale_BLG1 = quantise(source_BLGD)
    assert scale_BLG1[0, 0, 0, 0] == 1.0
    assert torch.equal(dequantise(value_BLGD, scale_BLG1)[0, 0], source_BLGD[0, 0])
    assert torch.isfinite(dequantise(value_BLGD, scale_BLG1)).all()
