"""Whether each rank sent what its scheme's formula says, pass by pass and layer by layer.

What was sent is read from our labels, which count the bytes of every communication op; what should have been sent is
computed from what the run recorded about itself. Only measured steps count, and whole ones, whatever the window is.
Exchanges that are not attention's, such as the sum of weight gradients, are counted apart, and have a formula where the
run says which model they belong to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd

from cptrace import labels
from cptrace.analyses.scope import Scope, device_work_missing
from cptrace.impls import BUILTIN
from cptrace.launches import closed_ranges, distinct_names, innermost_ranges, names_match
from cptrace.outcome import NotApplicable
from cptrace.schemes import Traffic
from cptrace.schemes.expected import expected_around, expected_traffic
from cptrace.schemes.traffic import TENSORS
from cptrace.trace import Trace

ATTENTION: Final = "attention"
OTHER: Final = "other"

_ANALYSIS: Final = "traffic"
_STEP: Final = rf"^{labels.STEP}$"
_COMM: Final = rf"^({'|'.join(labels.COMMUNICATION)})( |$)"
_NO_FIELDS: Final[Mapping[str, str]] = {}
_NULLABLE: Final = ("layer", "expected_n_messages", "expected_bytes", "difference_bytes")
_COLUMNS: Final = (
    "rank",
    "part",
    "pass",
    "layer",
    "n_steps",
    "n_messages",
    "bytes",
    *_NULLABLE[1:],
    "by_tensor",
)
_Place = tuple[str, str, int]  # part, pass, layer
_LABELLED: Final = (BUILTIN, "reference")  # what older runs called it
_PASS_ORDER: Final = {name: number for number, name in enumerate(labels.PASSES)}


class _Sent(NamedTuple):
    """Messages of one kind that carry one tensor."""

    kind: str
    tensor: str | None
    n_messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step of a rank sent for one part of the work, in one pass of one layer."""

    rank: int
    part: str
    pass_name: str | None
    layer: int | None
    sent: tuple[_Sent, ...] = ()


def by_layer(scope: Scope) -> pd.DataFrame | NotApplicable:
    """Return one row per rank, pass and layer: messages and bytes of one step, beside those of the formula.

    Steps that sent the same share a row and are counted in `n_steps`. `part` is `attention`, or `other` for exchanges
    around it, whose expected fields are missing where the run names no model. `by_tensor` lists what the sums consist
    of.

    Args:
        scope: What to look at.
    """
    trace = scope.trace
    if not trace.meta.run:
        return device_work_missing(trace, _ANALYSIS) or NotApplicable(
            _ANALYSIS,
            "bytes sent are compared with a scheme's formula, and this trace does not say which scheme ran; traces of"
            " `cptrace run` do",
        )
    if (impl := trace.meta.run.get("impl", BUILTIN)) not in _LABELLED:
        return NotApplicable(
            _ANALYSIS, f"the exchanges of {impl} carry no labels that tell their bytes; those of {BUILTIN} do"
        )
    try:
        expected = {
            (ATTENTION, *place): wanted for place, wanted in expected_traffic(trace.meta.run).items()
        } | {(OTHER, *place): wanted for place, wanted in expected_around(trace.meta.run).items()}
    except ValueError as error:
        return NotApplicable(
            _ANALYSIS, f"the run's description in {trace.meta.path} does not suffice for a formula: {error}"
        )
    steps, comm = _steps_of(scope), _ours(trace, _COMM)
    if steps.empty:
        return NotApplicable(
            _ANALYSIS,
            f"it needs our ranges of measured steps (domain {labels.DOMAIN}), one process per rank, and"
            f" {trace.meta.path} has none; record with: {trace.meta.record_again}",
        )
    return _table(_merge(_observe(steps, comm, expected)), expected)


def _ours(trace: Trace, pattern: str) -> pd.DataFrame:
    """Return our closed ranges whose text matches a pattern."""
    if labels.DOMAIN not in trace.ranges["domain"].cat.categories:
        return trace.ranges.iloc[:0]
    ranges = closed_ranges(trace.ranges[(trace.ranges["domain"] == labels.DOMAIN).to_numpy()])
    return ranges[names_match(ranges["name"], pattern)]


def _steps_of(scope: Scope) -> pd.DataFrame:
    """Return the ranges of the measured steps of the ranks looked at; a process of several ranks tells none apart."""
    steps, ranks = _ours(scope.trace, _STEP), scope.trace.ranks
    alone = ranks[~ranks["process"].duplicated(keep=False)]
    place = pd.Index(alone["process"]).get_indexer(steps["process"])
    rank = np.append(alone["rank"].to_numpy(np.int64), -1)[place]
    steps = steps.assign(rank=rank)
    return steps[np.isin(rank, scope.ranks)].reset_index(drop=True)


def _observe(steps: pd.DataFrame, comm: pd.DataFrame, expected: Mapping[_Place, Traffic]) -> list[_Step]:
    """Return what each step sent, in every pass and layer that should have or has sent anything."""
    found, is_found = innermost_ranges(steps, comm["thread"].to_numpy(), comm["start_ns"].to_numpy())
    texts, slot = distinct_names(comm["name"])
    step_and_text = pd.DataFrame({"step": found[is_found], "text": slot[is_found]})
    counts = step_and_text.value_counts(sort=False).reset_index(name="count")
    ranks = steps["rank"].tolist()
    sent: dict[tuple[int, _Step], list[tuple[str, str | None, int, int]]] = {
        (number, _Step(rank, part, pass_name, layer)): []
        for number, rank in enumerate(ranks)
        for (part, pass_name, layer), wanted in expected.items()
        if part == ATTENTION or wanted.n_messages
    }
    parsed = [_parse(text or "") for text in texts]
    for number, text, count in counts.to_numpy(np.int64).tolist():
        part, pass_name, layer, kind, tensor, n_bytes = parsed[text]
        place = (number, _Step(ranks[number], part, pass_name, layer))
        sent.setdefault(place, []).append((kind, tensor, count, count * n_bytes))
    return [
        _Step(place.rank, place.part, place.pass_name, place.layer, _by_tensor(messages))
        for (_, place), messages in sent.items()
    ]


def _parse(text: str) -> tuple[str, str | None, int | None, str, str | None, int]:
    """Return the part, pass, layer, kind, tensor and bytes that a communication label tells."""
    label = labels.parse_label(text)
    kind, fields = (label.name, label.fields) if label is not None else (text.partition(" ")[0], _NO_FIELDS)
    tensor = fields.get("tensor")
    part = ATTENTION if tensor in TENSORS else OTHER
    return part, fields.get("pass"), _number(fields, "layer"), kind, tensor, _number(fields, "bytes") or 0


def _number(fields: Mapping[str, str], name: str) -> int | None:
    text = fields.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _by_tensor(messages: Sequence[tuple[str, str | None, int, int]]) -> tuple[_Sent, ...]:
    """Return the sums by kind and tensor, in the order of their names."""
    sums: dict[tuple[str, str | None], tuple[int, int]] = {}
    for kind, tensor, count, n_bytes in messages:
        n_before, bytes_before = sums.get((kind, tensor), (0, 0))
        sums[kind, tensor] = (n_before + count, bytes_before + n_bytes)
    ordered = sorted(sums.items(), key=lambda item: (item[0][0], item[0][1] or ""))
    return tuple(_Sent(*key, *numbers) for key, numbers in ordered)


def _merge(steps: Sequence[_Step]) -> list[tuple[_Step, int]]:
    """Return the distinct ones in order, and how many steps each stands for."""
    counts: dict[_Step, int] = {}
    for step in steps:
        counts[step] = counts.get(step, 0) + 1
    return sorted(counts.items(), key=lambda item: _order(item[0]))


def _order(step: _Step) -> tuple[Any, ...]:
    pass_number = _PASS_ORDER.get(step.pass_name or "", len(_PASS_ORDER))
    numbers = [(s.n_messages, s.bytes, s.kind, s.tensor or "") for s in step.sent]
    return step.rank, step.part, pass_number, -1 if step.layer is None else step.layer, numbers


def _table(merged: Sequence[tuple[_Step, int]], expected: Mapping[_Place, Traffic]) -> pd.DataFrame:
    rows = []
    covered = {ATTENTION, *(part for part, _, _ in expected)}
    for step, n_steps in merged:
        key = (step.part, step.pass_name or "", -1 if step.layer is None else step.layer)
        wanted = expected.get(key, Traffic(0, 0)) if step.part in covered else None
        n_messages, n_bytes = sum(s.n_messages for s in step.sent), sum(s.bytes for s in step.sent)
        rows.append(
            {
                "rank": step.rank,
                "part": step.part,
                "pass": step.pass_name,
                "layer": step.layer,
                "n_steps": n_steps,
                "n_messages": n_messages,
                "bytes": n_bytes,
                "expected_n_messages": None if wanted is None else wanted.n_messages,
                "expected_bytes": None if wanted is None else wanted.n_bytes,
                "difference_bytes": None if wanted is None else n_bytes - wanted.n_bytes,
                "by_tensor": [sent._asdict() for sent in step.sent],
            }
        )
    return pd.DataFrame(rows, columns=list(_COLUMNS)).astype(dict.fromkeys(_NULLABLE, "Int64"))
