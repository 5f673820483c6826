"""Traffic formulas against hand-worked figures, and the list against the code behind it."""

from __future__ import annotations

import pytest

from cptrace.errors import UsageError
from cptrace.schemes import SCHEMES, AttentionShape, find_scheme

MIB = 1 << 20


def test_ring_bytes_of_a_worked_example() -> None:
    """128 Ki tokens over 8 ranks, 8 KV heads of 128, bf16: one chunk of K is 32 MiB, of its fp32 gradient 64."""
    shape = AttentionShape(128 * 1024, 8, 32, 8, 128, 2)
    ring = find_scheme("ring")
    assert ring.forward_bytes(shape) == 7 * 2 * 32 * MIB == 448 * MIB
    assert ring.backward_bytes(shape) == 448 * MIB + 8 * 2 * 64 * MIB == 1472 * MIB
    assert ring.forward_messages(shape) == 7
    assert ring.backward_messages(shape) == 15


def test_gradients_of_fp64_travel_as_fp64() -> None:
    shape = AttentionShape(8, 2, 1, 1, 1, 8)
    assert find_scheme("ring").backward_bytes(shape) == 2 * 4 * 8 + 2 * 2 * 4 * 8


def test_an_unknown_scheme_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no such scheme; choose one of ring"):
        find_scheme("rung")


def test_names_and_code_agree() -> None:
    from instrumented.schemes import IMPLEMENTATIONS

    assert [item.name for item in IMPLEMENTATIONS] == [scheme.name for scheme in SCHEMES]
