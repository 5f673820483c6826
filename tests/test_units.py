"""What people read and type, to the digit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cptrace import units
from cptrace.errors import UsageError


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (None, "-"),
        (0, "0 ns"),
        (7, "7 ns"),
        (999, "999 ns"),
        (1_000, "1.00 us"),
        (12_345, "12.3 us"),
        (999_400, "999 us"),
        (1_000_000, "1.00 ms"),
        (299_848_812, "300 ms"),
        (7_811_000_000, "7.81 s"),
        (3_600_000_000_000, "3,600 s"),
        (-12_345, "-12.3 us"),
        (1.5, "2 ns"),
        (999_980_000, "1.00 s"),
        (999_500, "1.00 ms"),
        (99_960_000, "100 ms"),
        (9_996_000, "10.0 ms"),
        (-999_999_999, "-1.00 s"),
    ],
)
def test_format_ns(ns, text):
    assert units.format_ns(ns) == text


@given(st.integers(-(2**63), 2**63 - 1))
def test_format_ns_is_short_and_true(ns):
    """Three digits or the whole number: what is shown is within half a percent of the truth."""
    number, unit = units.format_ns(ns).split(" ")
    shown = float(number.replace(",", "")) * units.NS_PER_UNIT[unit]
    assert abs(shown - ns) <= abs(ns) * 0.005 + 0.5
    if unit != "s":
        assert abs(float(number.replace(",", ""))) < 1000
    assert len(number.lstrip("-").replace(".", "").lstrip("0")) <= 3 or unit == "s"


@pytest.mark.parametrize(("ns", "text"), [(None, "-"), (0, "0 ns"), (1_500, "+1.50 us"), (-7, "-7 ns")])
def test_format_change_ns(ns, text):
    assert units.format_change_ns(ns) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1000, "1,000 steps")]
)
def test_plural(count, text):
    assert units.plural(count, "step") == text


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0.000000 s"),
        (1_499, "0.000001 s"),
        (1_234_567_890, "1.234568 s"),
        (86_400 * 10**9, "86400.000000 s"),
    ],
)
def test_format_instant(ns, text):
    assert units.format_instant(ns) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1_048_576, "1.0 MiB"),
        (448 * 2**20, "448.0 MiB"),
        (3 * 2**60, "3072.0 PiB"),
    ],
)
def test_format_bytes(size, text):
    assert units.format_bytes(size) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(None, "-"), (0, "0.0 MB/s"), (5e7, "50.0 MB/s"), (4.5e11, "450.0 GB/s")]
)
def test_format_bytes_per_s(rate, text):
    assert units.format_bytes_per_s(rate) == text


@pytest.mark.parametrize(
    ("fraction", "text"), [(None, "n/a"), (0.0, "0.0 %"), (0.18, "18.0 %"), (1.0, "100.0 %")]
)
def test_format_fraction(fraction, text):
    assert units.format_fraction(fraction) == text


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("0ns", 0),
        ("1ns", 1),
        ("1.5us", 1_500),
        ("2 ms", 2_000_000),
        (" 1.2s ", 1_200_000_000),
        ("3µs", 3_000),
        ("3\N{GREEK SMALL LETTER MU}s", 3_000),
        ("0.000000001s", 1),
        ("9223372036854775807ns", 2**63 - 1),
        ("1790000000.000000001s", 1_790_000_000_000_000_001),
    ],
)
def test_parse_ns(text, ns):
    assert units.parse_ns(text) == ns


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "5", "ms", "1,5ms", "1e3ms", "-5ms", "+5ms", "5 minutes", "5MS", "5Ms", "1.ms", ".5ms", "5msms",
        "0x5ms", "٣ms", "5ms\n5", "inf s", "nan s", "0.5ns", "1.2345us", "9223372036854775808ns",
        "99999999999999999999s",
    ],
)  # fmt: skip
def test_parse_ns_refuses(text):
    with pytest.raises(UsageError):
        units.parse_ns(text)


@given(st.integers(0, 2**63 - 1))
def test_parse_ns_reads_every_whole_number(ns):
    assert units.parse_ns(f"{ns}ns") == ns
    assert units.parse_ns(f"{ns // 10**9}.{ns % 10**9:09}s") == ns
