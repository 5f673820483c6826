"""The options of a run: what is refused, with what advice, and that they survive the way to the child."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cptrace.capture.run_spec import CLOCKS, ELEMENT_BYTES, RunSpec
from cptrace.errors import UsageError

DEFAULT = RunSpec()


@given(
    seq_len=st.integers(1, 10**9),
    causal=st.booleans(),
    dtype=st.sampled_from(tuple(ELEMENT_BYTES)),
    clock=st.sampled_from(CLOCKS),
    link_gbps=st.floats(min_value=1e-6, max_value=1e9),
)
def test_json_round_trip(seq_len: int, causal: bool, dtype: str, clock: str, link_gbps: float) -> None:
    spec = RunSpec(seq_len=seq_len, causal=causal, dtype=dtype, clock=clock, link_gbps=link_gbps)
    assert RunSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "one JSON object"),
        ('{"cp_sise": 4}', "unknown names: cp_sise"),
        ('{"cp_size": "4"}', "cp_size is '4', not of type int"),
        ('{"cp_size": true}', "cp_size is True, not of type int"),
        ('{"causal": 1}', "causal is 1, not of type bool"),
    ],
)
def test_json_of_another_shape_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunSpec.from_json(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheme": "rong"}, "--scheme rong: no such scheme; choose one of ring"),
        ({"cp_size": 1}, "--cp-size 1: scheme ring needs at least 2 ranks"),
        ({"cp_size": 0}, "--cp-size 0: must be at least 1"),
        ({"steps": 0}, "--steps 0: must be at least 1"),
        ({"warmup": -1}, "--warmup -1: must not be negative"),
        ({"link_gbps": 0.0}, "--link-gbps 0.0: must be greater than 0"),
        ({"link_gbps": math.nan}, "--link-gbps nan: must be greater than 0"),
        ({"compute_gflops": math.inf}, "--compute-gflops inf: must be greater than 0 and finite"),
        ({"link_latency_us": -1.0}, "--link-latency-us -1.0: must not be negative"),
        ({"dtype": "fp8"}, "--dtype fp8: choose one of fp32, bf16, fp64"),
        ({"clock": "sundial"}, "--clock sundial: choose one of paced, real, virtual"),
        ({"heads": 6, "kv_heads": 4}, "--kv-heads 4 does not divide --heads 6; choose one of 1, 2, 3, 6"),
        ({"kv_heads": 8}, "--kv-heads 8 does not divide --heads 4; choose one of 1, 2, 4"),
        (
            {"seq_len": 1001},
            "--seq-len 1001 cannot be split evenly over --cp-size 4: use --seq-len 1000 or 1004, "
            "or keep the length and use --cp-size 7, 11, 13",
        ),
        ({"seq_len": 3}, "--seq-len 3 .*: use --seq-len 4, or keep the length and use --cp-size 3"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_with_advice(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        replace(DEFAULT, **change).validate()


def test_the_default_can_be_meant() -> None:
    DEFAULT.validate()


def test_lengths_in_the_advice_are_accepted() -> None:
    for seq_len in (1000, 1004):
        replace(DEFAULT, seq_len=seq_len).validate()
    for cp_size in (7, 11, 13):
        replace(DEFAULT, seq_len=1001, cp_size=cp_size).validate()
