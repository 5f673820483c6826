"""Decimal microseconds as text -> int64 nanoseconds, exactly.

A trace of today holds times such as 1740461679479712.123 µs. In binary floating point such a number of nanoseconds is
off by up to 256, so no value passes through a float here: digits become integers, in whole arrays for the plain
notation that Kineto writes, through Python's `decimal` for anything else that JSON allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_FLOOR, Context, Decimal, InvalidOperation
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cptrace.intervals import BoolArray, Int64Array

if TYPE_CHECKING:
    import msgspec

Text: TypeAlias = "bytes | msgspec.Raw"

LATEST_NS: Final = 2**62
"""146 years: times count from 1970 at most."""

_NS_PER_US: Final = 1000
_MAX_WHOLE_DIGITS: Final = 16
# Two of them, in ns, add up within 64 bits; what is larger goes the slow way, which checks.
_MAX_PLAIN_US: Final = 4_600_000_000_000_000
_MAX_FRACTION_DIGITS: Final = 18
_FRACTIONS_PER_NS: Final = 10 ** (_MAX_FRACTION_DIGITS - 3)
# What a text may hold besides digits before it needs the slow way; longer ones cannot be times.
_MAX_TEXT: Final = 64
_EXACT: Final = Context(prec=200)
_NEWLINE, _DOT, _ZERO = 10, 46, 48


class Spans(NamedTuple):
    """Start and end of N events.

    Attributes:
        start_ns: Int64 of shape (N,); 0 where not valid.
        end_ns: Int64 of shape (N,); 0 where not valid.
        is_valid: Whether both numbers were there and fit into 64 bits of ns, bool of shape (N,).
    """

    start_ns: Int64Array
    end_ns: Int64Array
    is_valid: BoolArray


class _Decimals(NamedTuple):
    """N numbers: whole + fraction / 10**18, where the notation is plain, bool of shape (N,)."""

    whole: Int64Array
    fraction: Int64Array
    is_plain: BoolArray


def parse_spans(start_us: Sequence[Text], duration_us: Sequence[Text]) -> Spans:
    """Return starts and ends in ns of events given as JSON texts in µs.

    The end is the exact sum of both numbers. Where a time has digits below a nanosecond it is rounded to the nearest
    one, half a nanosecond up, after the sum: neighbours that touch in the text touch in ns too.

    Args:
        start_us: N texts; empty where the event has none.
        duration_us: N texts.

    Example:
        >>> parse_spans([b"1740461679479712.123"], [b"1.25"]).end_ns.tolist()
        [1740461679479713373]
    """
    start, duration = _split(start_us), _split(duration_us)
    start_ns = _to_ns(start.whole, start.fraction)
    end_ns = _to_ns(start.whole + duration.whole, start.fraction + duration.fraction)
    is_valid = start.is_plain & duration.is_plain
    for row in np.flatnonzero(~is_valid).tolist():
        span = _exact_span(start_us[row], duration_us[row])
        is_valid[row] = span is not None
        start_ns[row], end_ns[row] = span or (0, 0)
    return Spans(start_ns, end_ns, is_valid)


def _to_ns(whole: Int64Array, fraction: Int64Array) -> Int64Array:
    return whole * _NS_PER_US + (fraction + _FRACTIONS_PER_NS // 2) // _FRACTIONS_PER_NS


def _split(texts: Sequence[Text]) -> _Decimals:
    """Return numbers in the notation digits[.digits]; others are marked as not plain."""
    data = np.frombuffer(b"\n".join([*texts, b""]), np.uint8)
    stop = np.flatnonzero(data == _NEWLINE)
    if len(stop) != len(texts):  # a line break inside a text: no number
        zeros = np.zeros(len(texts), np.int64)
        return _Decimals(zeros, zeros, np.zeros(len(texts), bool))
    start = np.concatenate(([0], stop[:-1] + 1))
    dots = np.flatnonzero(data == _DOT)
    owner = np.searchsorted(stop, dots)
    point = stop.copy()
    point[owner] = dots
    is_plain = np.ones(len(texts), bool)
    is_plain[owner[1:][owner[1:] == owner[:-1]]] = False
    strange = np.flatnonzero((data - _ZERO > 9) & (data != _DOT) & (data != _NEWLINE))
    is_plain[np.searchsorted(stop, strange)] = False
    n_whole, n_fraction = point - start, np.maximum(stop - point - 1, 0)
    is_plain &= (n_whole > 0) & (n_whole <= _MAX_WHOLE_DIGITS) & (n_fraction <= _MAX_FRACTION_DIGITS)
    n_whole, n_fraction = np.where(is_plain, n_whole, 0), np.where(is_plain, n_fraction, 0)
    whole = _digits(data, point - n_whole, n_whole)
    fraction = _digits(data, point + 1, n_fraction) * _power_of_ten(_MAX_FRACTION_DIGITS - n_fraction)
    return _Decimals(whole, fraction, is_plain & (whole <= _MAX_PLAIN_US))


def _digits(data: npt.NDArray[np.uint8], first: Int64Array, n_digits: Int64Array) -> Int64Array:
    """Return the integer that the digits from each first position on spell."""
    value = np.zeros(len(first), np.int64)
    for place in range(int(n_digits.max(initial=0))):
        is_there = place < n_digits
        digit = data[np.where(is_there, first + place, 0)] - np.uint8(_ZERO)
        value = np.where(is_there, value * 10 + digit, value)
    return value


def _power_of_ten(exponent: Int64Array) -> Int64Array:
    return (10 ** np.arange(_MAX_FRACTION_DIGITS + 1, dtype=np.int64))[exponent]


def _exact_span(start_us: Text, duration_us: Text) -> tuple[int, int] | None:
    """Return start and end in ns of one event in any notation, None where they are no numbers or too large."""
    start, duration = _decimal(start_us), _decimal(duration_us)
    if start is None or duration is None:
        return None
    span = _round_to_ns(start), _round_to_ns(_EXACT.add(start, duration))
    limits = np.iinfo(np.int64)
    return span if all(limits.min <= instant <= limits.max for instant in span) else None


def _round_to_ns(instant_us: Decimal) -> int:
    halfway_up = _EXACT.fma(instant_us, Decimal(_NS_PER_US), Decimal("0.5"))
    return int(halfway_up.to_integral_value(ROUND_FLOOR))


def _decimal(text: Text) -> Decimal | None:
    """Return the number in a JSON text, which some tools write as a string; None where there is none."""
    raw = bytes(text)
    if len(raw) > _MAX_TEXT:
        return None
    try:
        number = Decimal(raw.decode("ascii").strip('"'))
    except (InvalidOperation, UnicodeDecodeError):
        return None
    # Far exponents would make integers of any length: such a number is no time, or nothing beside one.
    if not number.is_finite() or number.adjusted() > _MAX_TEXT:
        return None
    return number if number.adjusted() > -_MAX_TEXT else Decimal(0)
