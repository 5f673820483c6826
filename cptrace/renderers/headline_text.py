"""The headline of a report as text: what ran, what a step takes, and how much of it is exposed communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from cptrace.comparison import medians
from cptrace.report import Report, Row
from cptrace.schemes.transformer import ATTENTION
from cptrace.units import format_bytes, format_fraction, format_ns


def headline(report: Report) -> Iterable[Text]:
    """Yield the step time, the communication share, the overlap and the exposed communication, medians over steps.

    The time is the slowest rank's; shares and exposed time are those of all ranks together, and say so.

    Args:
        report: Report to show.
    """
    if not report.rows("ranks"):
        return
    n_steps = len({row["step"] for row in report.rows("steps")})
    middle = medians(report)
    what = f"step (median of {n_steps}, slowest rank)" if n_steps else "window (slowest rank)"
    exposed = format_fraction(middle["exposed_comm_share"])
    # Where no share can be told, what shows is the least that there is.
    exposed += "" if middle["exposed_comm_share"] is None else f" ({format_ns(middle['exposed_comm_ns'])})"
    comm, overlap = format_fraction(middle["comm_share"]), format_fraction(middle["overlap"])
    n_ranks = len(report.rows("ranks"))
    yield Text(f"\n{format_ns(middle['step_ns'])} {what}", style="bold")
    if n_ranks == 1:
        yield Text(f"comm {comm} of it, overlap {overlap} of comm, exposed comm {exposed}")
    else:
        yield Text(f"mean of {n_ranks} ranks: comm {comm}, overlap {overlap} of it, exposed {exposed}")


def peak_memory(rows: Sequence[Row]) -> Iterable[Text]:
    """Yield the ranks' peak memory where it was recorded: once where all have the same, else largest and smallest.

    Args:
        rows: Rows of the section ranks.
    """
    peaks = {
        row["rank"]: row["peak_memory_bytes"] for row in rows if row.get("peak_memory_bytes") is not None
    }
    if not peaks:
        return
    largest, smallest = max(peaks, key=lambda r: (peaks[r], -r)), min(peaks, key=lambda r: (peaks[r], r))
    text = f"{format_bytes(peaks[largest])} on rank {largest}"
    if peaks[largest] == peaks[smallest]:
        text = f"{format_bytes(peaks[largest])} on " + ("every rank" if len(peaks) > 1 else f"rank {largest}")
    else:
        text += f", {format_bytes(peaks[smallest])} on rank {smallest}"
    yield Text(f"peak memory: {text}")


def run_line(run: Row) -> str:
    """Return what ran: scheme, ranks and sizes.

    Args:
        run: The run's description.
    """
    order = "causal" if run.get("causal") else "full attention"
    return (
        f"{_scheme_and_ranks(run)}, {_counted(run, 'seq_len', 'token')}, {_counted(run, 'heads', 'head')}"
        f" ({run.get('kv_heads')} KV) of {run.get('head_dim')}, {_counted(run, 'layers', 'layer')},"
        f" {run.get('dtype')}, {order}"
    )


def _scheme_and_ranks(run: Row) -> str:
    model = "" if run.get("model") in (None, ATTENTION) else f" in {run['model']}"
    tp_size = run.get("tp_size", 1)
    mesh = "" if tp_size == 1 else f" x {tp_size} that share the weights"
    return f"{run.get('scheme')}{model}: {_counted(run, 'cp_size', 'rank')}{mesh}"


def _counted(run: Row, name: str, noun: str) -> str:
    """Return what a run says of itself, with its noun; it may say anything."""
    count = run.get(name)
    return f"{count} {noun}{'' if count == 1 else 's'}"
