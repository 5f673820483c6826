"""The only place where nanoseconds and bytes become what people read, and where what people type becomes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Final

from cptrace.errors import UsageError

NS_PER_UNIT: Final = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}

_QUANTITY: Final = re.compile(
    r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z\N{MICRO SIGN}\N{GREEK SMALL LETTER MU}]*)\s*"
)
_LONGEST_NS: Final = 2**63 - 1
_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_ns(duration_ns: float | None) -> str:
    """Return a duration with three digits in the unit that fits, or `-` where it is missing.

    Args:
        duration_ns: Duration in nanoseconds.
    """
    if duration_ns is None:
        return "-"
    # What it is rounded to decides: 999.98 ms are 1.00 s, not 1,000 ms.
    magnitude = abs(float(f"{duration_ns:.3g}"))
    unit = next((u for u in ("s", "ms", "us") if magnitude >= NS_PER_UNIT[u]), "ns")
    digits = 0 if unit == "ns" else max(0, 3 - len(str(int(magnitude / NS_PER_UNIT[unit]))))
    return f"{duration_ns / NS_PER_UNIT[unit]:,.{digits}f} {unit}"


def format_change_ns(change_ns: float | None) -> str:
    """Return a duration by which something changed, with its sign, or `-` where it is missing.

    Args:
        change_ns: Change in nanoseconds.
    """
    return ("+" if change_ns is not None and change_ns > 0 else "") + format_ns(change_ns)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: `1 step`, `3 steps`.

    Args:
        count: How many.
        noun: What of, one of them; its plural ends in s.
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def joined(names: Sequence[str]) -> str:
    """Return names as one enumeration: `a`, `a and b`, `a, b and c`.

    Args:
        names: At least one.
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def format_instant(instant_ns: int) -> str:
    """Return a time of a trace in seconds, to the microsecond, as timelines show it.

    Args:
        instant_ns: Time since the trace began, in ns.
    """
    return f"{instant_ns / NS_PER_UNIT['s']:.6f} s"


def format_bytes(size_bytes: float | None) -> str:
    """Return a size in binary units with about four digits, or `-` where it is missing.

    Args:
        size_bytes: Size in bytes.
    """
    if size_bytes is None:
        return "-"
    value, unit = float(size_bytes), _BYTE_UNITS[0]
    for unit in _BYTE_UNITS:
        if abs(value) < 1024 or unit == _BYTE_UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def format_bytes_per_s(rate_bytes_per_s: float | None) -> str:
    """Return a bandwidth in decimal gigabytes or megabytes per second, or `-` where it is missing.

    Args:
        rate_bytes_per_s: Bandwidth in bytes per second.
    """
    if rate_bytes_per_s is None:
        return "-"
    if rate_bytes_per_s >= 1e9:
        return f"{rate_bytes_per_s / 1e9:.1f} GB/s"
    return f"{rate_bytes_per_s / 1e6:.1f} MB/s"


def format_fraction(fraction: float | None) -> str:
    """Return a fraction of 0..1 as percent, or `n/a` where it does not apply.

    Args:
        fraction: Fraction between 0 and 1.
    """
    return "n/a" if fraction is None else f"{100 * fraction:.1f} %"


def parse_ns(text: str) -> int:
    """Return the nanoseconds that a time with a unit means.

    Args:
        text: A non-negative decimal number followed by ns, us, ms or s, such as `1.5ms`.

    Raises:
        UsageError: There is no unit, the unit is unknown, or the value is no whole number of nanoseconds in 64 bits.
    """
    match = _QUANTITY.fullmatch(text)
    unit = re.sub(r"[^a-z]", "u", match[2]) if match else ""
    if match is None or unit not in NS_PER_UNIT:
        raise UsageError(
            f"cannot read {text!r} as a time; write a number with a unit: {', '.join(NS_PER_UNIT)} (such as 1.5ms)"
        )
    nanoseconds = Decimal(match[1]) * NS_PER_UNIT[unit]
    if nanoseconds != nanoseconds.to_integral_value():
        raise UsageError(f"{text!r} is not a whole number of nanoseconds; give at most nanosecond precision")
    if nanoseconds > _LONGEST_NS:
        raise UsageError(f"{text!r} is longer than any trace; give a time of at most {_LONGEST_NS} ns")
    return int(nanoseconds)
