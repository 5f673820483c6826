"""The figures of a report's page: what each shows, and how it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pandas as pd

from cptrace import figures, tidy
from cptrace.report import Report


class Chart(NamedTuple):
    """One figure.

    Attributes:
        identifier: Its id on the page.
        title: Its heading.
        caption: What it shows, in a sentence.
        frame: Makes the tidy frame; empty where there is nothing to show.
        draw: Makes the figure of it.
    """

    identifier: str
    title: str
    caption: str
    frame: Callable[[Report], pd.DataFrame]
    draw: Callable[[pd.DataFrame], Any]


CHARTS: Final[tuple[Chart, ...]] = (
    Chart(
        "rank-bars",
        "Time of each rank",
        "Parts of the window; they sum to it exactly.",
        tidy.rank_parts,
        figures.rank_bars,
    ),
    Chart(
        "step-overlap",
        "Overlap per step",
        "Share of communication that runs beside compute.",
        tidy.step_overlap,
        figures.step_overlap,
    ),
    Chart(
        "start-causes",
        "Why operations started when they did",
        "Exposed time by the last thing that an operation waited for.",
        tidy.start_causes,
        figures.start_causes,
    ),
    Chart(
        "peer-waits",
        "Who waited for whom",
        "Sum over operations, from a rank's start to the start of the last peer.",
        tidy.peer_waits,
        figures.peer_waits,
    ),
    Chart(
        "bandwidth",
        "Bandwidth against message size",
        "From the arrival of the last participant, where that is known.",
        tidy.bandwidth,
        figures.bandwidth,
    ),
    Chart("memory", "Peak memory", "Most bytes of tensors at once.", tidy.memory, figures.memory),
)
