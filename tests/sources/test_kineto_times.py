"""Decimal microseconds become nanoseconds without passing through binary floating point."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from math import floor

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cptrace.sources.kineto_times import parse_spans

LIMIT_NS = 2**63 - 1


def one(start: str, duration: str = "0"):
    """Return (start, end) of one event in ns, or None where it has no possible times."""
    spans = parse_spans([start.encode()], [duration.encode()])
    return (int(spans.start_ns[0]), int(spans.end_ns[0])) if spans.is_valid[0] else None


def nearest_ns(microseconds: Fraction) -> int:
    return floor(microseconds * 1000 + Fraction(1, 2))


@given(st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**40)), max_size=40))
def test_times_as_kineto_writes_them_are_exact(spans):
    texts = [(f"{s // 1000}.{s % 1000:03}".encode(), f"{d // 1000}.{d % 1000:03}".encode()) for s, d in spans]
    found = parse_spans([s for s, _ in texts], [d for _, d in texts])
    assert found.start_ns.tolist() == [start for start, _ in spans]
    assert found.end_ns.tolist() == [start + duration for start, duration in spans]
    assert found.is_valid.all()


@given(st.integers(0, 2**62 // 1000), st.integers(0, 2**40))
def test_whole_microseconds_are_exact(start, duration):
    assert one(str(start), str(duration)) == (1000 * start, 1000 * (start + duration))


@given(st.integers(0, 2**62 // 1000), st.text("0123456789", max_size=25), st.text("0123456789", max_size=25))
@example(0, "0005", "0004999999999999999999999")
@example(1, "9995", "")
def test_digits_below_a_nanosecond_are_rounded_after_the_sum(whole, fraction, other):
    start, duration = f"{whole}.{fraction}0", f"3.{other}0"
    expected = nearest_ns(Fraction(start)), nearest_ns(Fraction(start) + Fraction(duration))
    assert one(start, duration) == expected


@given(st.decimals(min_value=-(10**15), max_value=10**15, allow_nan=False, allow_infinity=False))
def test_any_notation_of_a_number_is_exact(number):
    text = str(number)
    assert one(text) == (nearest_ns(Fraction(text)),) * 2 if len(text) <= 64 else True
    assert one(f'"{text}"') == one(text) or len(text) > 62


@given(st.floats(min_value=0, max_value=9e15, allow_nan=False))
def test_what_python_writes_again_is_read_as_written(value):
    text = json.dumps(value)
    assert one(text) == (nearest_ns(Fraction(Decimal(text))),) * 2


def test_a_float_would_be_wrong_here():
    """The reason for all this: a double holds 53 bits, a time of today in ns needs 61."""
    text = "1740461679479712.123"
    assert int(float(text) * 1000) != 1740461679479712123
    assert one(text, "0.001") == (1740461679479712123, 1740461679479712124)


def test_neighbours_that_touch_stay_neighbours():
    starts = [f"{number}.{number % 10}{number % 7}{number % 3}{number % 9}" for number in range(1, 500)]
    gaps = [str(Decimal(b) - Decimal(a)) for a, b in pairwise(starts)]
    spans = parse_spans([text.encode() for text in starts[:-1]], [text.encode() for text in gaps])
    assert np.array_equal(spans.end_ns[:-1], spans.start_ns[1:])


@pytest.mark.parametrize(
    "text",
    ["", "null", "true", "{}", "[1]", '"soon"', '"1\n2"', "1.2.3", "NaN", "1e999999999", "-1e999999999", "1e17",
     "9" * 17, "9" * 65, "1" * 5000, '"\\u0031"', "\u0663"],
)  # fmt: skip
def test_what_is_no_time_is_not_valid_and_leaves_the_others_alone(text):
    texts = [b"1.5", text.encode(), b"2"]
    for spans in (
        parse_spans(texts, [b"1"] * 3),
        parse_spans([b"1.5", b"0", b"2"], [b"1", text.encode(), b"1"]),
    ):
        assert spans.is_valid.tolist() == [True, False, True]
        assert spans.start_ns.tolist() == [1500, 0, 2000]
        assert spans.end_ns.tolist() == [2500, 0, 3000]


def test_the_latest_time_of_64_bits_is_read_and_the_next_one_is_not():
    last, next_one = Decimal(LIMIT_NS) / 1000, Decimal(LIMIT_NS + 1) / 1000
    assert one(str(last)) == (LIMIT_NS, LIMIT_NS)
    assert one(str(next_one)) is None
    assert one(str(last), "0.001") is None
    assert one("4600000000000000", "4600000000000000") == (46 * 10**17, 92 * 10**17)


def test_negative_times_are_numbers():
    assert one("-1.5", "1") == (-1500, -500)
    assert one("-0.0005") == (0, 0)


def test_no_events():
    spans = parse_spans([], [])
    assert [len(column) for column in spans] == [0, 0, 0]
