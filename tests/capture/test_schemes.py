"""Traffic formulas against hand-worked figures, limits, and the list against the code behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cptrace.errors import UsageError
from cptrace.schemes import SCHEMES, AttentionShape, find_scheme, names_with_option
from cptrace.schemes.traffic import head_chunks

MIB = 1 << 20

WORKED = AttentionShape(128 * 1024, 8, 32, 8, 128, 2, ulysses_size=4)
"""128 Ki tokens over 8 ranks, 8 KV heads of 128, bf16: a chunk of K has 32 MiB, of Q 128, of fp32 dK 64."""


@pytest.mark.parametrize(
    ("name", "forward_mib", "backward_mib", "messages"),
    [
        ("single", 0, 0, (0, 0)),
        ("all_gather", 7 * 2 * 32, 2 * 7 * 2 * 32, (1, 2)),
        ("all_gather_sliced", 7 * 2 * 32, 2 * 7 * 2 * 32, (8, 16)),
        ("ring", 7 * 2 * 32, 7 * 2 * 32 + 8 * 2 * 64, (7, 15)),
        ("zigzag_ring", 448, 1472, (7, 15)),
        ("striped_ring", 448, 1472, (7, 15)),
        ("te", 448, 4 * 7 * 32, (7, 8)),
        ("ulysses", 7 * (2 * 128 + 2 * 32) // 8, 280, (4, 4)),
        # One KV head and four query heads per rank: the queries are cut in four, the keys are not.
        ("ulysses_chunked", 280, 280, (10, 10)),
        # 3/4 of 2q + 2c, and one hop over two groups whose chunk of a quarter of the heads has 32 MiB.
        ("usp", 3 * 320 // 4 + 2 * 32, 240 + 2 * 32 + 2 * 2 * 64, (5, 7)),
        # 128 Ki tokens x 4096 x 2 bytes are a GiB, of which 7/8 are sent twice.
        ("tp", 2 * 7 * 1024 // 8, 1792, (1, 1)),
    ],
)
def test_bytes_of_a_worked_example(
    name: str, forward_mib: int, backward_mib: int, messages: tuple[int, int]
) -> None:
    scheme = find_scheme(name)
    shape = replace(WORKED, cp_size=1) if name == "single" else WORKED
    assert scheme.forward(shape) == (forward_mib * MIB, messages[0])
    assert scheme.backward(shape) == (backward_mib * MIB, messages[1])


def test_fp8_messages_have_a_byte_per_element_and_a_scale_per_token_and_head() -> None:
    """16 Ki tokens and 8 heads: K and V are 2 x 16 MiB and 2 x 128 Ki scales; gradients stay bf16."""
    shape, hop = replace(WORKED, has_fp8_messages=True), 2 * (16 * MIB + 4 * 128 * 1024)
    assert find_scheme("te").forward(shape) == (7 * (hop + 4), 8)
    assert find_scheme("te").backward(shape) == (7 * (hop + 2 * 32 * MIB), 8)


def test_gradients_of_fp64_travel_as_fp64() -> None:
    shape = AttentionShape(8, 2, 1, 1, 1, 8)
    assert find_scheme("ring").backward(shape).n_bytes == 2 * 4 * 8 + 2 * 2 * 4 * 8


def test_too_few_kv_heads_are_replicated_to_one_per_rank() -> None:
    few, enough = replace(WORKED, kv_heads=2), WORKED
    assert find_scheme("ulysses").forward(few) == find_scheme("ulysses").forward(enough)


@given(cp_size=st.integers(2, 16), kv_per_rank=st.integers(1, 3), group=st.integers(1, 12))
def test_the_ring_sends_less_than_ulysses_while_p_hkv_is_below_hq_plus_hkv(
    cp_size: int, kv_per_rank: int, group: int
) -> None:
    """Where no KV head is replicated: 2(P-1)c against (P-1)/P (2q + 2c)."""
    kv_heads = cp_size * kv_per_rank
    shape = AttentionShape(64 * cp_size, cp_size, kv_heads * group, kv_heads, 8, 2)
    ring, ulysses = (find_scheme(name).forward(shape).n_bytes for name in ("ring", "ulysses"))
    assert (ring < ulysses) == (cp_size * kv_heads < shape.heads + kv_heads)


@pytest.mark.parametrize("u", [1, 8])
def test_usp_is_ulysses_or_the_ring_at_its_ends(u: int) -> None:
    shape, usp = replace(WORKED, ulysses_size=u), find_scheme("usp")
    other = find_scheme("ring" if u == 1 else "ulysses")
    assert (usp.forward(shape), usp.backward(shape)) == (other.forward(shape), other.backward(shape))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cp_size", "chunks"),
    [
        (8, 8, 4, (2, 2)),
        (8, 4, 4, (2, 1)),
        (32, 8, 2, (4, 4)),
        (32, 1, 8, (4, 1)),
        (12, 12, 2, (3, 3)),
        (4, 4, 4, (1, 1)),
    ],
)
def test_heads_are_cut_by_kv_groups_where_a_rank_has_several(
    heads: int, kv_heads: int, cp_size: int, chunks: tuple[int, int]
) -> None:
    assert head_chunks(AttentionShape(64, cp_size, heads, kv_heads, 8, 2)) == chunks


@pytest.mark.parametrize(
    ("name", "is_causal", "multiple"),
    [
        ("single", True, 1),
        ("tp", True, 1),
        ("ring", True, 6),
        ("striped_ring", True, 6),
        ("zigzag_ring", False, 12),
        ("te", False, 6),
        ("te", True, 12),
        ("all_gather", True, 12),
        ("usp", False, 6),
        ("usp", True, 12),  # u = 3: two groups of three, so four chunks, and six ranks
    ],
)
def test_a_layout_needs_a_multiple(name: str, is_causal: bool, multiple: int) -> None:
    shape = AttentionShape(1000, 6, 6, 6, 8, 2, is_causal=is_causal, ulysses_size=3)
    assert find_scheme(name).multiple(shape) == multiple


def test_usp_pads_no_more_than_it_must() -> None:
    """u = 2 of 4 ranks: two groups, so four chunks, each on two ranks."""
    shape = AttentionShape(1000, 4, 8, 8, 8, 2, is_causal=True, ulysses_size=2)
    assert find_scheme("usp").multiple(shape) == 4


def test_an_unknown_scheme_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no such scheme; choose one of single, all_gather, .*ring"):
        find_scheme("rung")


def test_options_of_single_schemes_are_known() -> None:
    assert names_with_option("ulysses_size") == ("usp",)
    assert names_with_option("message_dtype") == names_with_option("fp8_score_limit") == ("te",)
    assert names_with_option("seq_len") == ()


def test_names_and_code_agree() -> None:
    from instrumented.schemes import IMPLEMENTATIONS

    assert [item.name for item in IMPLEMENTATIONS] == [scheme.name for scheme in SCHEMES]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seq_len", [1, 7, 40, 41])
def test_layouts_and_padding_are_those_of_the_code(is_causal: bool, seq_len: int) -> None:
    from cptrace.capture.run_spec import RunSpec
    from instrumented.problem import Problem
    from instrumented.schemes import find

    for scheme in SCHEMES:
        size = scheme.max_cp_size or 4
        spec = RunSpec(scheme=scheme.name, cp_size=size, seq_len=seq_len, causal=is_causal)
        placement = find(scheme.name).placement(Problem.of(spec))
        assert placement.name == spec.layout
        assert (
            getattr(placement, "local_len", seq_len) * (size if spec.layout != "heads" else 1)
            == spec.padded_len
        )
