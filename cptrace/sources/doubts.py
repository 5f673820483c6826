"""What in the device work of a trace cannot be, whatever the format: found, and said to the reader of its figures."""

from __future__ import annotations

import pandas as pd

from cptrace.launches import without_shared_ids
from cptrace.trace import Note


def forget_ambiguous_launches(ops: pd.DataFrame, shared: pd.DataFrame, notes: list[Note]) -> pd.DataFrame:
    """Return device work without the correlation ids that do not tell its launch.

    Args:
        ops: Device work, as `schema.OPS`.
        shared: Correlation ids of several launches, as `launches.shared_ids` returns them.
        notes: Where to say how much work that concerns.
    """
    ops, n_ambiguous = without_shared_ids(ops, shared)
    if n_ambiguous:
        text = (
            "device work has a correlation id that several launches of its process have: its launch is not known, so it"
            " is in no step and has no launch latency"
        )
        notes.append(Note("ambiguous-launches", text, n_ambiguous))
    return ops
