"""Work on tokens that are only there to make the sequence divide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cptrace.findings.advice import run_number
from cptrace.findings.case import MIN_SHARE, Case
from cptrace.findings.finding import HIGH, INFO, WARNING, Diagnosis, Explanation, Finding
from cptrace.units import format_fraction

CODE: Final = "padding"

_LARGE_SHARE: Final = 0.05


def find(case: Case) -> Sequence[Finding]:
    """Return the finding that part of the work is padding.

    Args:
        case: Case.
    """
    share = run_number(case, "padded_share")
    if share <= MIN_SHARE:
        return ()
    length, padded, multiple = (
        int(run_number(case, name)) for name in ("seq_len", "padded_tokens", "padding_multiple")
    )
    fitting = case.scope.trace.meta.run.get("fits_without_padding")
    sizes = ", ".join(map(str, fitting)) if isinstance(fitting, (list, tuple)) else ""
    return [
        Finding(
            code=CODE,
            form=None,
            severity=WARNING if share > _LARGE_SHARE else INFO,
            summary=(
                f"{padded} of {length + padded} tokens ({format_fraction(share)}) are padding: masked, but computed and"
                " sent"
            ),
            value=share,
            unit="fraction",
            confidence=HIGH,
            advice=(
                f"Use a sequence length that is a multiple of {multiple or 'what the scheme needs'}"
                + (f", or one of these numbers of ranks: {sizes}" if sizes else "")
                + "."
            ),
        )
    ]


DIAGNOSIS: Final = Diagnosis(
    CODE,
    "padded tokens are computed",
    Explanation(
        what="A sequence that does not divide by what the scheme needs is padded. The padding is masked, but ranks"
        " compute and send it all the same.",
        detected="The run's metadata state the padded share.",
        looks="Nothing in the timeline tells padding from tokens.",
        fix="A length, or a number of ranks, that divides.",
    ),
    find,
)
