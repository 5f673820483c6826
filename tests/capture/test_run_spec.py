"""The options of a run: what is refused, with what advice, and that they survive the way to the child."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cptrace.capture.run_spec import CLOCKS, ELEMENT_BYTES, RunSpec
from cptrace.errors import UsageError
from cptrace.schemes import SCHEMES

DEFAULT = RunSpec()


@given(
    seq_len=st.integers(1, 10**9),
    causal=st.booleans(),
    dtype=st.sampled_from(tuple(ELEMENT_BYTES)),
    clock=st.sampled_from(CLOCKS),
    link_gbps=st.floats(min_value=1e-6, max_value=1e9),
    faults=st.lists(st.sampled_from(["no-wait", "straggler:1"])).map(tuple),
)
def test_json_round_trip(
    seq_len: int, causal: bool, dtype: str, clock: str, link_gbps: float, faults: tuple[str, ...]
) -> None:
    spec = RunSpec(
        seq_len=seq_len, causal=causal, dtype=dtype, clock=clock, link_gbps=link_gbps, faults=faults
    )
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
        ('{"faults": "no-wait"}', "faults is 'no-wait', not of type tuple"),
        ('{"faults": [1]}', r"faults is \[1\], not of type tuple"),
        ('{"scheme": ["ring"]}', r"scheme is \['ring'\], not of type str"),
    ],
)
def test_json_of_another_shape_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunSpec.from_json(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheme": "rong"}, "--scheme rong: no such scheme; choose one of single, .*ring"),
        ({"cp_size": 1}, "--cp-size 1: scheme ring needs at least 2 ranks"),
        ({"cp_size": 0}, "--cp-size 0: must be at least 1"),
        ({"steps": 0}, "--steps 0: must be at least 1"),
        ({"warmup": -1}, "--warmup -1: must be at least 0 and finite"),
        ({"link_gbps": 0.0}, "--link-gbps 0.0: must be greater than 0"),
        ({"link_gbps": math.nan}, "--link-gbps nan: must be greater than 0"),
        ({"compute_gflops": math.inf}, "--compute-gflops inf: must be greater than 0 and finite"),
        ({"link_latency_us": -1.0}, "--link-latency-us -1.0: must be at least 0 and finite"),
        ({"dtype": "fp8"}, "--dtype fp8: choose one of fp32, bf16, fp16, fp64"),
        ({"clock": "sundial"}, "--clock sundial: choose one of paced, real, virtual"),
        ({"heads": 6, "kv_heads": 4}, "--kv-heads 4 does not divide --heads 6; choose one of 1, 2, 3, 6"),
        ({"kv_heads": 16}, "--kv-heads 16 does not divide --heads 8; choose one of 1, 2, 4, 8"),
        ({"message_dtype": "fp4"}, "--message-dtype fp4: choose one of same, fp8"),
        ({"ulysses_size": 0}, "--ulysses-size 0: must be at least 1"),
        ({"scheme": "single"}, "--cp-size 4: scheme single runs on 1; use --cp-size 1"),
        (
            {"scheme": "ulysses", "heads": 6, "kv_heads": 6},
            "--heads 6 cannot .* 4; use --cp-size 2, 3, 6, or --heads 8",
        ),
        (
            {"scheme": "ulysses", "heads": 12, "kv_heads": 6},
            "--kv-heads 6 can neither be split over nor replicated to --cp-size 4; "
            "use --cp-size 2, 3, 6, 12, or --kv-heads 4",
        ),
        (
            {"scheme": "ulysses_chunked", "heads": 4, "kv_heads": 4},
            "--heads 4: .* needs heads to pipeline, and 1 per rank .* use --heads 8, or --scheme ulysses",
        ),
        (
            {"scheme": "usp", "cp_size": 3},
            "--ulysses-size 2 does not divide --cp-size 3; use --ulysses-size 1",
        ),
        (
            {"scheme": "usp", "heads": 6, "kv_heads": 6, "ulysses_size": 4},
            "--heads 6 cannot be split over --ulysses-size 4; use --ulysses-size 1, 2, or --heads 8",
        ),
        ({"scheme": "tp", "kv_heads": 2}, "--kv-heads 2 .* --cp-size 4; use --cp-size 2, or --kv-heads 4"),
        ({"ulysses_size": 4}, "--ulysses-size 4: scheme ring has no such option; it belongs to --scheme usp"),
        ({"message_dtype": "fp8"}, "--message-dtype fp8: scheme ring has no such option; .* --scheme te"),
        ({"faults": ("no-weight",)}, "--fault no-weight: no such fault"),
        ({"faults": ("straggler:4",)}, "--fault straggler:4: the ranks are 0 to 3"),
        ({"scheme": "ulysses", "faults": ("single-buffer",)}, "has no ring buffers here; use --scheme ring"),
        ({"scheme": "te", "message_dtype": "fp8", "warmup": 0}, "fp8 --warmup 0: .*; use --warmup 1"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_with_advice(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        replace(DEFAULT, **change).validate()


@pytest.mark.parametrize("name", ["seed", "seq_len", "link_latency_us"])
def test_a_limit_that_a_message_names_is_taken_as_it_stands_there(name: str) -> None:
    with pytest.raises(UsageError, match="must be at most") as refused:
        replace(DEFAULT, **{name: 2**80}).validate()
    replace(DEFAULT, **{name: int(str(refused.value).rpartition(" ")[2])}).validate()


@pytest.mark.parametrize("scheme", [scheme.name for scheme in SCHEMES if scheme.min_cp_size > 1])
@pytest.mark.parametrize("seq_len", [30, 37, 48])
def test_advised_numbers_of_ranks_can_be_meant_and_need_no_padding(scheme: str, seq_len: int) -> None:
    advised = replace(DEFAULT, scheme=scheme, seq_len=seq_len, heads=12, kv_heads=6)
    for n_ranks in advised.fits_without_padding:
        other = replace(advised, cp_size=n_ranks)
        other.validate()
        assert other.padded_len == seq_len
    if seq_len == 48:
        assert advised.fits_without_padding


def test_the_default_can_be_meant() -> None:
    DEFAULT.validate()


def test_a_length_that_does_not_divide_is_padded_and_the_advice_would_avoid_it() -> None:
    spec = replace(DEFAULT, seq_len=1001)
    spec.validate()
    assert (spec.padded_len, spec.padding_multiple, spec.shape.seq_len) == (1004, 4, 1004)
    assert spec.fits_without_padding == (7, 11, 13)
    for cp_size in spec.fits_without_padding:
        assert replace(spec, cp_size=cp_size).padded_len == 1001


def test_a_layout_of_two_chunks_pads_to_twice_the_ranks() -> None:
    spec = replace(DEFAULT, scheme="te", seq_len=2999, causal=True)
    assert (spec.layout, spec.padded_len) == ("zigzag", 3000)
    assert replace(spec, seq_len=3001).padded_len == 3008
    assert replace(spec, seq_len=3001, causal=False).padded_len == 3004


def test_the_fault_unbalanced_makes_any_layout_contiguous_and_pads_as_before() -> None:
    spec = replace(DEFAULT, scheme="te", seq_len=3001, causal=True, faults=("unbalanced",))
    spec.validate()
    assert (spec.layout, spec.padded_len) == ("contiguous", 3008)
