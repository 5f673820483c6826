"""Figures: a tidy frame in, a plotly Figure out. Nothing is shown, read or computed here.

Parts differ in lightness and pattern as well as in hue, so that a figure can be read in grey and by colour-blind eyes;
backgrounds are transparent, so that it can be read on a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cptrace.figure_texts import percent, plain, rank_texts, texts
from cptrace.names import function_name
from cptrace.tidy import PARTS
from cptrace.units import format_bytes, format_bytes_per_s, format_ns

COLOURS: Final = {
    "compute": "#1f5a8a",
    "comm": "#e08a1e",
    "exposed comm": "#e08a1e",
    "copy": "#7a9e7e",
    "copy, other": "#7a9e7e",
    "other": "#a58bb5",
    "idle": "#c9c9c9",
}
_PATTERNS: Final = {
    "exposed comm": "/", "comm": "/", "copy, other": "x", "copy": "x", "other": "x", "idle": "."
}  # fmt: skip
_SERIES: Final = ("#1f5a8a", "#e08a1e", "#4f9d69", "#8b5fa8", "#c2534a", "#4aa3b8", "#8a7a3c", "#707070")
_ROLE_FILLS: Final = (("#1f5a8a", ""), ("#e08a1e", "/"), ("#4f9d69", "x"), ("#8b5fa8", "."))
_SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down")
_DASHES: Final = ("solid", "dash", "dot", "dashdot")
_AXIS: Final = {
    "automargin": True,
    "gridcolor": "rgba(128,128,128,0.3)",
    "zeroline": False,
    "ticks": "outside",
    "ticklen": 6,
    "tickcolor": "rgba(0,0,0,0)",
}
_MAX_SERIES: Final = 8
_MAX_NOTE: Final = 120
_ROW_PX: Final = 30
_PLAIN_HEIGHT: Final = 340


def rank_bars(parts: pd.DataFrame) -> go.Figure:
    """Return a stacked bar per rank: compute, exposed communication, copies and idle.

    Args:
        parts: `tidy.rank_parts`.
    """
    figure = go.Figure()
    for part in PARTS:
        rows = parts[parts["part"] == part]
        figure.add_bar(
            name=part,
            y=rank_texts(rows["rank"]),
            x=rows["duration_ns"] / 1e6,
            orientation="h",
            marker=_fill(COLOURS[part], _PATTERNS.get(part, "")),
            customdata=texts(rows["duration_ns"], format_ns),
            hovertemplate=f"%{{y}}<br>{part} %{{customdata}}<extra></extra>",
        )
    figure.update_layout(barmode="stack", height=_height(parts["rank"].nunique()))
    return _finish(figure, "milliseconds", "", is_list=True)


def step_overlap(steps: pd.DataFrame) -> go.Figure:
    """Return overlap against step, one line per rank, or the range over ranks where there are many.

    Args:
        steps: `tidy.step_overlap`.
    """
    figure = go.Figure()
    ranks = steps["rank"].drop_duplicates().tolist()
    if len(ranks) > _MAX_SERIES:
        by_step = steps.groupby("step")["overlap"].agg(["min", "median", "max"])
        for number, name in enumerate(by_step.columns):
            _add_line(figure, number, f"{name} of {len(ranks)} ranks", by_step.index, 100 * by_step[name])
    else:
        for number, rank in enumerate(ranks):
            rows = steps[steps["rank"] == rank]
            _add_line(figure, number, f"rank {rank}", rows["step"], 100 * rows["overlap"])
    figure.update_yaxes(range=[-4, 104])
    n_steps = int(steps["step"].max() - steps["step"].min()) if len(steps) else 0
    figure.update_xaxes(tickformat="d", dtick=max(1, math.ceil(n_steps / 10)))
    return _finish(figure, "step", "overlap, % of comm")


def _add_line(figure: go.Figure, number: int, name: str, x: Any, y: Any) -> None:
    figure.add_scatter(
        name=name,
        x=x,
        y=y,
        mode="lines+markers",
        line={"color": _SERIES[number % len(_SERIES)], "dash": _DASHES[number % len(_DASHES)]},
        marker={"symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 8},
    )


def start_causes(causes: pd.DataFrame) -> go.Figure:
    """Return the exposed time of each start cause, stacked by role, summed over ranks.

    Args:
        causes: `tidy.start_causes`.
    """
    figure = go.Figure()
    totals = causes.groupby(["role", "cause"], as_index=False)[["count", "exposed_ns"]].sum()
    order = totals.groupby("cause")["exposed_ns"].sum().sort_values().index.tolist()
    for number, (role, rows) in enumerate(totals.groupby("role")):
        figure.add_bar(
            name=str(role),
            y=rows["cause"],
            x=rows["exposed_ns"] / 1e6,
            orientation="h",
            marker=_fill(*_ROLE_FILLS[number % len(_ROLE_FILLS)]),
            customdata=[
                f"{n} ops, {format_ns(t)}" for n, t in zip(rows["count"], rows["exposed_ns"], strict=True)
            ],
            hovertemplate="%{y}<br>%{customdata}<extra></extra>",
        )
    figure.update_layout(barmode="stack", height=_height(len(order)))
    figure.update_yaxes(categoryorder="array", categoryarray=order)
    return _finish(figure, "exposed milliseconds, all ranks", "", is_list=True)


def peer_waits(waits: pd.DataFrame) -> go.Figure:
    """Return a matrix of who waited how long for whom.

    Args:
        waits: `tidy.peer_waits`.
    """
    table = waits.pivot_table(index="rank", columns="peer", values="wait_ns", sort=True)
    texts = [[format_ns(int(value)) for value in row] for row in table.to_numpy()]
    is_small = len(table) <= _MAX_SERIES
    figure = go.Figure(
        go.Heatmap(
            z=table.to_numpy() / 1e6,
            x=[f"rank {peer}" for peer in table.columns],
            y=[f"rank {rank}" for rank in table.index],
            text=texts,
            texttemplate="%{text}" if is_small else "",
            hovertemplate="%{y} waited for %{x}: %{text}<extra></extra>",
            colorscale=[[0, "#f2f2f2"], [1, "#8a4b08"]],
            colorbar={"title": {"text": "ms"}, "thickness": 12},
            xgap=1,
            ygap=1,
        )
    )
    figure.update_layout(height=max(240, min(640, 110 + 36 * len(table))))
    return _finish(figure, "waited for", "this rank", is_list=True)


def bandwidth(messages: pd.DataFrame) -> go.Figure:
    """Return bandwidth against message size, both logarithmic, one symbol per kind of collective.

    Args:
        messages: `tidy.bandwidth`.
    """
    figure = go.Figure()
    for number, (kind, rows) in enumerate(messages.groupby("kind")):
        figure.add_scatter(
            name=str(kind),
            x=rows["bytes"],
            y=rows["bytes_per_s"],
            mode="markers",
            marker={
                "symbol": _SYMBOLS[number % len(_SYMBOLS)],
                "color": _SERIES[number % len(_SERIES)],
                "size": 10,
            },
            customdata=[
                f"rank {rank}: {n} of {format_bytes(size)}, {format_bytes_per_s(rate)}"
                for rank, n, size, rate in zip(
                    *(rows[c] for c in ("rank", "count", "bytes", "bytes_per_s")), strict=True
                )
            ],
            hovertemplate="%{customdata}<extra></extra>",
        )
    figure.update_xaxes(**_log_axis(messages["bytes"], format_bytes, 4))
    figure.update_yaxes(**_log_axis(messages["bytes_per_s"], format_bytes_per_s, 10))
    figure.update_layout(showlegend=True)
    return _finish(figure, "message size", "")


def _log_axis(values: pd.Series, show: Any, base: int) -> dict[str, Any]:
    """Return a logarithmic axis between the powers of the base around the values, with at most eight marks."""
    low = math.floor(math.log(float(values.min()), base))
    high = max(low + 1, math.ceil(math.log(float(values.max()), base)))
    powers = range(low, high + 1, math.ceil((high - low) / 7))
    marks = [float(base) ** power for power in powers]
    edge = 0.05 * (high - low) * math.log10(base)
    limits = [low * math.log10(base) - edge, high * math.log10(base) + edge]
    return {"type": "log", "tickvals": marks, "ticktext": [show(mark) for mark in marks], "range": limits}


def memory(peaks: pd.DataFrame) -> go.Figure:
    """Return a bar per rank: its peak memory.

    Args:
        peaks: `tidy.memory`.
    """
    figure = go.Figure(
        go.Bar(
            y=rank_texts(peaks["rank"]),
            x=peaks["peak_memory_bytes"] / 2**20,
            orientation="h",
            marker={"color": COLOURS["compute"]},
            text=texts(peaks["peak_memory_bytes"], format_bytes),
            showlegend=False,
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y}: %{text}<extra></extra>",
        )
    )
    figure.update_layout(height=_height(len(peaks)), showlegend=False)
    _leave_room_for_labels(figure)
    return _finish(figure, "MiB", "", is_list=True)


def findings(recoverable: pd.DataFrame) -> go.Figure:
    """Return a bar per finding: the time per step that mending it is predicted to give.

    Args:
        recoverable: `tidy.findings`.
    """
    figure = go.Figure(
        go.Bar(
            y=[plain(name) for name in recoverable["finding"]],
            x=recoverable["recoverable_ns"] / 1e6,
            orientation="h",
            marker=_fill(COLOURS["comm"], "/"),
            text=texts(recoverable["recoverable_ns"], format_ns),
            textposition="outside",
            cliponaxis=False,
            showlegend=False,
            hovertemplate="%{y}: %{text}<extra></extra>",
        )
    )
    figure.update_layout(height=_height(len(recoverable)), showlegend=False)
    figure.update_yaxes(autorange="reversed")
    _leave_room_for_labels(figure)
    return _finish(figure, "recoverable milliseconds per step", "", is_list=True)


def timeline(ops: pd.DataFrame) -> go.Figure:
    """Return a rank's operations over time, one line per stream.

    Args:
        ops: `tidy.timeline` of a part of a trace; more than a few thousand operations make a slow figure.
    """
    figure = go.Figure()
    origin = int(ops["start_ns"].min()) if len(ops) else 0
    for role, rows in ops.groupby("role"):
        figure.add_bar(
            name=str(role),
            y=[f"stream {stream}" for stream in rows["stream"]],
            x=rows["duration_ns"] / 1e6,
            base=(rows["start_ns"] - origin) / 1e6,
            orientation="h",
            marker={
                **_fill(COLOURS[str(role)], _PATTERNS.get(str(role), "")),
                "line": {"width": 0.5, "color": "#fff"},
            },
            customdata=[
                f"{plain(function_name(name))}<br>{format_ns(duration)}"
                for name, duration in zip(rows["name"], rows["duration_ns"], strict=True)
            ],
            hovertemplate="%{y}<br>%{customdata}<extra></extra>",
        )
    figure.update_layout(barmode="overlay", height=_height(ops["stream"].nunique()))
    return _finish(figure, "milliseconds", "", is_list=True)


def comparison(metrics: pd.DataFrame, unit: str = "ns") -> go.Figure:
    """Return the metrics of one unit side by side, one bar per run.

    Args:
        metrics: `tidy.comparison_metrics`.
        unit: `ns` or `fraction`.
    """
    rows = metrics[metrics["unit"] == unit]
    figure = go.Figure()
    scale = 1e-6 if unit == "ns" else 100.0
    for number, run in enumerate(rows["run"].drop_duplicates()):
        of_run = rows[rows["run"] == run]
        show = format_ns if unit == "ns" else percent
        figure.add_bar(
            name=plain(run),
            y=of_run["metric"],
            x=scale * of_run["value"],
            orientation="h",
            marker=_fill(_SERIES[number % len(_SERIES)], ("", "/", "x", ".")[number % 4]),
            customdata=texts(of_run["value"], show),
            hovertemplate="%{y}: %{customdata}",
        )
    n_bars = rows["metric"].nunique() * max(1, rows["run"].nunique())
    figure.update_layout(barmode="group", height=_height(n_bars))
    figure.update_yaxes(autorange="reversed")
    return _finish(figure, "milliseconds" if unit == "ns" else "%", "", is_list=True)


def overview(drawn: Sequence[tuple[str, go.Figure]], note: str = "") -> go.Figure:
    """Return several figures below each other, as one.

    Args:
        drawn: Title and figure of each, at least one, all with ordinary axes and bars put together in one way.
        note: What to say above all of them.
    """
    heights = [float(figure.layout.height or _PLAIN_HEIGHT) for _, figure in drawn]
    whole = make_subplots(
        rows=len(drawn),
        cols=1,
        subplot_titles=[plain(title) for title, _ in drawn],
        row_heights=[height / sum(heights) for height in heights],
        vertical_spacing=min(0.12, 90 / sum(heights)),
    )
    for row, (_, figure) in enumerate(drawn, start=1):
        for trace in figure.data:
            whole.add_trace(trace, row=row, col=1)
        for axis, place in (("xaxis", whole.update_xaxes), ("yaxis", whole.update_yaxes)):
            place(figure.layout[axis].to_plotly_json(), row=row, col=1)
    whole.update_layout(barmode=drawn[0][1].layout.barmode, height=sum(heights) + 80)
    whole.update_layout(template="none", paper_bgcolor="#ffffff", plot_bgcolor="#ffffff")
    whole.update_layout(margin={"l": 90, "r": 24, "t": 60, "b": 60}, bargap=0.3, showlegend=True)
    if note:
        whole.update_layout(
            title={"text": f"<b>{plain(note, _MAX_NOTE)}</b>", "font": {"size": 15, "color": "#8a3b00"}}
        )
        whole.update_layout(margin_t=90)
    # Each figure keeps its own legend beside it: one for all would mix parts, ranks and roles.
    for row in range(1, len(drawn) + 1):
        key = "legend" if row == 1 else f"legend{row}"
        top = whole.layout["yaxis" if row == 1 else f"yaxis{row}"].domain[1]
        whole.update_layout(
            {key: {"traceorder": "normal", "x": 1.01, "xanchor": "left", "y": top, "yanchor": "top"}}
        )
        whole.update_traces(legend=key, row=row, col=1)
    return whole


def _fill(colour: str, shape: str) -> dict[str, Any]:
    """Return a colour with a pattern on it, which tells it apart where colours do not show."""
    return {"color": colour, "pattern": {"shape": shape, "bgcolor": colour, "fgcolor": "#222", "size": 8}}


def _leave_room_for_labels(figure: go.Figure) -> None:
    """Make the axis of bars end where the words beside the longest one do, on a phone too."""
    longest = max((float(value) for value in figure.data[0].x), default=0.0)
    figure.update_xaxes(range=[0, 1.35 * longest or 1])


def _height(n_rows: int) -> int:
    """Return the height of a list; even one row leaves room for a legend of several lines."""
    return max(200, min(1400, 110 + _ROW_PX * n_rows))


def _finish(figure: go.Figure, x_title: str, y_title: str, *, is_list: bool = False) -> go.Figure:
    """Return the figure with titles and a layout that fits pages, notebooks and phones."""
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 8, "r": 12, "t": 34, "b": 8},
        legend={
            "traceorder": "normal",
            "orientation": "h",
            "x": 0,
            "y": 1,
            "yanchor": "bottom",
            "xanchor": "left",
        },
        font={"family": "system-ui, sans-serif", "size": 13},
        hoverlabel={"align": "left"},
        bargap=0.3,
    )
    figure.update_xaxes(title={"text": x_title, "font": {"size": 13}}, **_AXIS)
    figure.update_yaxes(title={"text": y_title, "font": {"size": 13}}, **_AXIS)
    if is_list:
        figure.update_yaxes(showgrid=False)
        if figure.layout.yaxis.autorange is None and figure.layout.yaxis.categoryorder is None:
            figure.update_yaxes(autorange="reversed")
    return figure
