"""Texts of figures: what plotly shows as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pandas as pd

MAX_LABEL: Final = 60


def plain(text: object, longest: int = MAX_LABEL) -> str:
    """Return a text that plotly shows as it is: cut, printable, and no markup, whatever a trace calls things.

    Args:
        text: Text to show.
        longest: How many characters of it to show.
    """
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text))
    shown = shown if len(shown) <= longest else shown[: longest - 1] + "…"
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def percent(fraction: float) -> str:
    """Return a fraction as a percentage."""
    return f"{100 * fraction:.1f} %"


def rank_texts(ranks: pd.Series) -> list[str]:
    """Return what ranks are called."""
    return [f"rank {rank}" for rank in ranks]


def texts(values: pd.Series, show: Callable[[Any], str]) -> list[str]:
    """Return values as text."""
    return [show(value) for value in values.tolist()]
