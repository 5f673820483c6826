"""Views for notebooks: a report and a choice in, a figure or a frame out.

from ipywidgets import fixed, interact

interact(views.rank_timeline, report=fixed(report), rank=views.ranks(report), step=views.steps(report))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from cptrace import figures, tidy
from cptrace.comparison import Comparison
from cptrace.errors import UsageError
from cptrace.report import Report
from cptrace.requests import WhatIfOptions
from cptrace.trace import Trace
from cptrace.what_if import whatif

if TYPE_CHECKING:
    import plotly.graph_objects as go


def ranks(report: Report) -> list[int]:
    """Return the ranks of a report, for a control.

    Args:
        report: Report to look at.
    """
    return sorted({row["rank"] for row in report.rows("ranks")})


def steps(report: Report) -> list[int]:
    """Return the steps of a report, for a control.

    Args:
        report: Report to look at.
    """
    return sorted({row["step"] for row in report.rows("steps")})


def rank_timeline(report: Report, rank: int, step: int | None = None) -> go.Figure:
    """Return what a rank's streams do in a step.

    Args:
        report: Report made with `AnalyzeOptions(has_timeline=True)`.
        rank: Rank to look at.
        step: Step to look at; None for the whole trace.

    Raises:
        UsageError: The report has no timeline, or no such step.
    """
    if report.timeline is None:
        raise UsageError("the report has no timeline; analyze with AnalyzeOptions(has_timeline=True)")
    ops = tidy.timeline(report.timeline, rank)
    if step is not None:
        row = _step_of(report, rank, step)
        ops = ops[
            (ops["start_ns"] < row["end_ns"]) & (ops["start_ns"] + ops["duration_ns"] > row["start_ns"])
        ]
    return figures.timeline(ops)


def step_parts(report: Report, step: int) -> go.Figure:
    """Return what each rank's time in one step consists of.

    Args:
        report: Report to look at.
        step: Step to look at.
    """
    rows = tuple(row for row in report.rows("steps") if row["step"] == step)
    return figures.rank_bars(tidy.rank_parts(Report(report.inputs, {"ranks": rows})))


def scheme_parts(reports: Mapping[str, Report], scheme: str) -> go.Figure:
    """Return what each rank's time consists of under one scheme.

    Args:
        reports: Report of each scheme.
        scheme: Scheme to look at.
    """
    return figures.rank_bars(tidy.rank_parts(reports[scheme]))


def findings(report: Report) -> pd.DataFrame:
    """Return the findings, those that cost most first, without their evidence.

    Args:
        report: Report to look at.
    """
    columns = ["code", "form", "rank", "recoverable_ns", "predicted_step_ns", "confidence", "advice"]
    return pd.DataFrame(
        [{c: row[c] for c in columns} for row in tidy.by_gain(report.rows("findings"))], columns=columns
    )


def evidence(report: Report, code: str | None = None) -> pd.DataFrame:
    """Return the operations that show the findings of a code; none where there is no such finding.

    Args:
        report: Report to look at.
        code: Code of the findings; None for that of the first of `findings`.
    """
    if code is None:
        code = next((row["code"] for row in tidy.by_gain(report.rows("findings"))), None)
    rows = [entry for row in report.rows("findings") if row["code"] == code for entry in row["evidence"]]
    return pd.DataFrame(rows)


def metrics(comparison: Comparison) -> pd.DataFrame:
    """Return metrics by run, with the verdict on each.

    Args:
        comparison: Runs side by side.
    """
    frame = pd.DataFrame(list(comparison.metrics))
    return frame.assign(run=[comparison.names[run] for run in frame["run"]])


def prediction(
    trace: Trace, fix: str | None = None, transfer_scale: float = 1.0, compute_scale: float = 1.0
) -> go.Figure:
    """Return each rank's mean step time, recorded and predicted with some changes.

    Args:
        trace: Trace of the recorded run.
        fix: Finding whose cause is taken out, as CODE or CODE:FORM; None for none.
        transfer_scale: Factor on the time of each transfer.
        compute_scale: Factor on the time of each compute operation.
    """
    options = WhatIfOptions(
        fixes=() if fix is None else (fix,), transfer_scale=transfer_scale, compute_scale=compute_scale
    )
    predicted = whatif(trace, options)
    rows = [
        (run, f"rank {rank.rank}", "ns", step_ns)
        for rank in predicted.ranks
        for run, step_ns in (("recorded", rank.recorded_step_ns), ("predicted", rank.predicted_step_ns))
    ]
    return figures.comparison(pd.DataFrame(rows, columns=["run", "metric", "unit", "value"]))


def fixes(report: Report) -> list[str]:
    """Return the findings of a report that a prediction can take out, for a control.

    Args:
        report: Report to look at.
    """
    rows = [row for row in tidy.by_gain(report.rows("findings")) if row["predicted_step_ns"] is not None]
    return list(dict.fromkeys(row["code"] + (f":{row['form']}" if row["form"] else "") for row in rows))


def _step_of(report: Report, rank: int, step: int) -> Mapping[str, int]:
    for row in report.rows("steps"):
        if row["rank"] == rank and row["step"] == step:
            return row
    raise UsageError(
        f"rank {rank} has no step {step}; the steps are {', '.join(map(str, steps(report))) or '(none)'}"
    )
