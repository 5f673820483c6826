"""`cptrace run`: run a scheme on an emulated device, write its report, and say what it shows."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

import click

from cptrace.capture.launcher import RunOutcome
from cptrace.capture.launcher import run as launch
from cptrace.capture.nsys_capture import original_of
from cptrace.capture.nsys_command import REPORT_SUFFIX
from cptrace.capture.profilers import AUTO, PROFILERS, RECORDER, choose_profiler, describe_plan
from cptrace.capture.profilers import NAMES as PROFILER_NAMES
from cptrace.capture.run_spec import CLOCKS, MESSAGE_DTYPES, RunSpec
from cptrace.cli.output import check_output
from cptrace.cli.settings import CONTEXT_SETTINGS
from cptrace.errors import RenderError, RunError
from cptrace.faults import FAULTS, find_fault, has_undefined_results, parse_fault
from cptrace.labels import CPU_EMULATED
from cptrace.schemes import ELEMENT_BYTES, HEADS, SCHEMES, find_scheme

_DEFAULTS: Final = RunSpec()
_DEFAULT_NAME: Final = "report.sqlite"
_PROGRESS_WIDTH: Final = 60
_FAULT_LIST: Final = "\b\nFaults, and the finding that each must cause:\n" + "\n".join(
    f"  {fault.usage:<20}{fault.expected}\n    {fault.summary}" for fault in FAULTS
)


@click.command(context_settings=CONTEXT_SETTINGS, epilog=_FAULT_LIST)
@click.option(
    "--scheme",
    default=_DEFAULTS.scheme,
    show_default=True,
    metavar="NAME",
    help=f"Context-parallel scheme: {', '.join(scheme.name for scheme in SCHEMES)}.",
)
@click.option(
    "--cp-size",
    type=int,
    help=f"Ranks that share the sequence.  [default: {_DEFAULTS.cp_size}; 1 for a scheme of one rank]",
)
@click.option(
    "--seq-len",
    default=_DEFAULTS.seq_len,
    show_default=True,
    help="Tokens of the whole sequence; padded where the scheme cannot split them evenly.",
)
@click.option("--heads", default=_DEFAULTS.heads, show_default=True, help="Query heads.")
@click.option(
    "--kv-heads", type=int, help="Key and value heads; fewer is grouped-query attention.  [default: --heads]"
)
@click.option("--head-dim", default=_DEFAULTS.head_dim, show_default=True, help="Elements per head.")
@click.option("--layers", default=_DEFAULTS.layers, show_default=True, help="Attention layers in sequence.")
@click.option(
    "--dtype",
    type=click.Choice(tuple(ELEMENT_BYTES)),
    default=_DEFAULTS.dtype,
    show_default=True,
    help="Data type of q, k, v and out.",
)
@click.option(
    "--causal/--no-causal",
    default=_DEFAULTS.causal,
    show_default=True,
    help="Mask later tokens. A contiguous ring is unbalanced then: rank r works on r+1 of P hops.",
)
@click.option(
    "--ulysses-size",
    default=_DEFAULTS.ulysses_size,
    show_default=True,
    help="usp: ranks of a Ulysses group; the groups form a ring.",
)
@click.option(
    "--message-dtype",
    type=click.Choice(MESSAGE_DTYPES),
    default=_DEFAULTS.message_dtype,
    show_default=True,
    help="te: type in which K and V travel. fp8 has a scale per token and head.",
)
@click.option(
    "--fp8-score-limit",
    default=_DEFAULTS.fp8_score_limit,
    show_default=True,
    help="te: a layer with larger scores does not use fp8.",
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="NAME[:RANK]",
    help="Break something on purpose, so that the diagnosis is known; may be repeated. See the list below.",
)
@click.option("--steps", default=_DEFAULTS.steps, show_default=True, help="Measured steps.")
@click.option(
    "--warmup", default=_DEFAULTS.warmup, show_default=True, help="Steps before them, not measured."
)
@click.option("--forward-only", is_flag=True, help="Leave out the backward pass.")
@click.option(
    "--clock",
    type=click.Choice(CLOCKS),
    default=_DEFAULTS.clock,
    show_default=True,
    help="paced: ops last as long as the model below says; real: as long as they take on this machine; "
    "virtual: times are computed, the same on every run.",
)
@click.option(
    "--link-gbps",
    default=_DEFAULTS.link_gbps,
    show_default=True,
    help="Modelled link bandwidth, gigabits (not bytes) per second, each direction.",
)
@click.option(
    "--link-latency-us",
    default=_DEFAULTS.link_latency_us,
    show_default=True,
    help="Modelled link latency, microseconds.",
)
@click.option(
    "--compute-gflops",
    default=_DEFAULTS.compute_gflops,
    show_default=True,
    help="Modelled compute speed of a rank, GFLOP/s.",
)
@click.option("--seed", default=_DEFAULTS.seed, show_default=True, help="Seed of the random inputs.")
@click.option(
    "--check/--no-check",
    default=_DEFAULTS.check,
    show_default=True,
    help="Compare out, dq, dk and dv with dense float64 attention.",
)
@click.option(
    "--format",
    "output_format",
    type=click.Choice(("text", "json")),
    default="text",
    show_default=True,
    help="What to print: text with the analysis, or the run's description as JSON.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"Report to write.  [default: {_DEFAULT_NAME}, or the next free report-N.sqlite]",
)
@click.option("--force", is_flag=True, help="Replace the file given with --output.")
@click.option(
    "--profiler",
    type=click.Choice(PROFILER_NAMES),
    default=AUTO,
    show_default=True,
    help="What to record with. " + " ".join(f"{each.name}: {each.summary}." for each in PROFILERS),
)
@click.option("--dry-run", is_flag=True, help="Print the command that would be run, and run nothing.")
def run(
    output_format: str,
    output: Path | None,
    force: bool,
    profiler: str,
    dry_run: bool,
    cp_size: int | None,
    kv_heads: int | None,
    **options: Any,
) -> None:
    """Run one context-parallel attention step on this machine, no GPU needed, and analyse its trace.

    Each rank is a process with an emulated device: CUDA's streams and events on CPU threads, real attention
    and real transfers. The report has the schema of an Nsight Systems SQLite export.
    """
    spec = RunSpec(
        cp_size=_default_cp_size(options["scheme"]) if cp_size is None else cp_size,
        kv_heads=options["heads"] if kv_heads is None else kv_heads,
        **options,
    )
    spec.validate()
    choice = choose_profiler(profiler, CPU_EMULATED)
    path = choose_output(output, force=force)
    if dry_run:
        click.echo(describe_plan(choice, spec, path, CPU_EMULATED))
        return
    capture = launch if choice.profiler is RECORDER else choice.profiler.capture
    original = path.with_suffix(REPORT_SUFFIX)
    if choice.profiler is not RECORDER:
        check_output(original, force=force)
    with _progress_line() as show, scratch_beside(path) as scratch:
        outcome = capture(spec, scratch, show)
        path = claim_output(scratch, output, path, force=force)
        keep_original(scratch, path)
    outcome = replace(outcome, report=path)
    if output_format == "json":
        click.echo(json.dumps({"report": str(path), "run": outcome.metadata}, indent=2, allow_nan=False))
    else:
        click.echo(describe_outcome(outcome))
        _show_analysis(path)
    _require_passed(outcome)


def _default_cp_size(scheme: str) -> int:
    """Return the number of ranks of a run that does not say: as many as the scheme can have, up to the default."""
    most = find_scheme(scheme).max_cp_size
    return _DEFAULTS.cp_size if most is None else min(most, _DEFAULTS.cp_size)


def choose_output(output: Path | None, *, force: bool) -> Path:
    """Return where the report goes: the path asked for, or the first free default name.

    Raises:
        RenderError: The path asked for exists and is not to be replaced, or its folder cannot be written to.
    """
    path = output or next(path for path in _default_names() if not path.exists())
    check_output(path, force=force)
    return path


def _default_names() -> Iterator[Path]:
    return map(Path, chain([_DEFAULT_NAME], (f"report-{number}.sqlite" for number in count(2))))


@contextmanager
def scratch_beside(path: Path) -> Iterator[Path]:
    """Yield a name of this process's own in the folder of a report; nothing is left there afterwards."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield scratch
    finally:
        scratch.unlink(missing_ok=True)
        original_of(scratch).unlink(missing_ok=True)


def keep_original(scratch: Path, path: Path) -> None:
    """Give the profiler's own report, where it has made one, the name of the report that was made of it."""
    if original_of(scratch).exists():
        os.replace(original_of(scratch), path.with_suffix(REPORT_SUFFIX))


def claim_output(scratch: Path, output: Path | None, path: Path, *, force: bool) -> Path:
    """Give a written report its name and return that: a name that another run has taken meanwhile stays its own.

    Args:
        scratch: Where the report is now.
        output: The path asked for; None for the first free default name.
        path: The name chosen before the run.
        force: A file at the path asked for is to be replaced.

    Raises:
        RenderError: The path asked for was taken while the run went on.
    """
    if output is not None and force:
        os.replace(scratch, path)
        return path
    for name in (path,) if output is not None else _default_names():
        try:
            os.link(scratch, name)
        except FileExistsError:
            continue
        return name
    raise RenderError(f"cannot write {path}: another program made it during the run; choose another name")


def describe_outcome(outcome: RunOutcome) -> str:
    """Return what ran, how exact it was, and where the report is."""
    run_of = outcome.metadata
    parity = run_of["checks"]["parity"]
    parts = [_describe_run(run_of)]
    parts += [_describe_faults(run_of["faults"])] if run_of["faults"] else []
    parts += [_describe_padding(run_of)] if run_of["padded_tokens"] else []
    parts += [_describe_parity(parity)] if parity is not None else [_why_not_checked(run_of)]
    parts += [_describe_running_max(run_of["checks"]["running_max"])]
    fp8 = run_of["checks"]["fp8_messages"]
    parts += [_describe_fp8(fp8)] if fp8 is not None else []
    return "\n".join([*parts, f"Report: {outcome.report}"])


def _describe_run(run_of: Mapping[str, Any]) -> str:
    mask = "causal" if run_of["causal"] else "full"
    heads = f"{run_of['heads']} heads" + (
        f" ({run_of['kv_heads']} for K and V)" if run_of["kv_heads"] != run_of["heads"] else ""
    )
    return (
        f"Ran {run_of['scheme']}, {' + '.join(run_of['passes'])}, on {run_of['cp_size']} ranks. "
        f"CPU emulation, {run_of['clock']} clock: {_whose_times(run_of)}, not a GPU's.\n"
        f"  {run_of['seq_len']} tokens ({_tokens_per_rank(run_of)} per rank), {heads} of "
        f"{run_of['head_dim']}, {run_of['layers']} layer(s), {run_of['dtype']}, {mask} attention, "
        f"{run_of['steps']} step(s) after {run_of['warmup']} warm-up\n" + _describe_model(run_of)
    )


def _tokens_per_rank(run_of: Mapping[str, Any]) -> int:
    whole: int = run_of["seq_len"] + run_of["padded_tokens"]
    return whole if run_of["layout"] == HEADS else whole // int(run_of["cp_size"])


def _describe_faults(names: Sequence[str]) -> str:
    """Return what is broken on purpose, and what should be found."""
    lines = (f"{name} ({find_fault(parse_fault(name).name).expected})" for name in names)
    return f"  broken on purpose: {', '.join(lines)}"


def _why_not_checked(run_of: Mapping[str, Any]) -> str:
    for name in run_of["faults"]:
        if has_undefined_results([name]):
            return f"Parity: not checked, since --fault {name} makes results undefined."
    return "Parity: not checked (--no-check)."


def _describe_padding(run_of: Mapping[str, Any]) -> str:
    """Return what the padding costs, and which length or number of ranks needs none."""
    n_padded, n_tokens = run_of["padded_tokens"], run_of["seq_len"]
    padded = n_tokens + n_padded
    below = padded - run_of["padding_multiple"]
    lengths = " or ".join(str(n) for n in (below, padded) if n)
    sizes = ", ".join(map(str, run_of["fits_without_padding"]))
    return (
        f"  padding: {n_padded} of {padded} tokens ({run_of['padded_share']:.1%}) are masked but computed; "
        f"--seq-len {lengths}" + (f" or --cp-size {sizes}" if sizes else "") + " needs none"
    )


def _whose_times(run_of: Mapping[str, Any]) -> str:
    return "times are this machine's" if run_of["clock"] == "real" else "times are a model's"


def _describe_model(run_of: Mapping[str, Any]) -> str:
    if run_of["clock"] == "real":
        return "  no model: ops take what they take on this machine's cores, which the ranks share"
    return (
        f"  model: link {run_of['link_gbps']:g} Gbit/s + {run_of['link_latency_us']:g} us, "
        f"compute {run_of['compute_gflops']:g} GFLOP/s, memory {run_of['memory_gbytes_per_s']:g} GB/s"
    )


def _describe_parity(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the largest error per tensor and rank over all layers, against its limit."""
    names = list(dict.fromkeys(row["tensor"] for row in rows))
    ranks = sorted({row["rank"] for row in rows})
    lines = ["Parity with dense float64, largest error (limit: 2x one kernel's, or rounding):"]
    lines.append("  rank  " + "".join(f"{name:>12}" for name in names))
    lines += [f"  {rank:>4}  " + "".join(_worst(rows, rank, name) for name in names) for rank in ranks]
    limits = (min(row["max_limit"] for row in rows if row["tensor"] == name) for name in names)
    return "\n".join([*lines, "  limit " + "".join(f"{limit:>12.2e}" for limit in limits)])


def _worst(rows: Sequence[Mapping[str, Any]], rank: int, tensor: str) -> str:
    cells = [row for row in rows if row["rank"] == rank and row["tensor"] == tensor]
    if any(row["max_error"] is None for row in cells):
        return f"{'not finite':>12}"
    mark = "" if all(row["passed"] for row in cells) else "!"
    return f"{mark + format(max(row['max_error'] for row in cells), '.2e'):>12}"


def _describe_running_max(check: Mapping[str, Any]) -> str:
    if not check["n_merges"]:
        return "Running softmax statistic: nothing to merge in this scheme."
    if check["passed"]:
        return f"Running softmax statistic: finite and monotone in {check['n_merges']} merges."
    return (
        f"Running softmax statistic: {check['n_not_finite']} values not finite, {check['n_decreased']} fell, "
        f"in {check['n_merges']} merges."
    )


def _describe_fp8(fp8: Mapping[str, Any]) -> str:
    """Return how many layers sent fp8, and why others did not."""
    used, others = len(fp8["fp8_layers"]), len(fp8["fallback_layers"])
    largest = "unknown" if fp8["largest_score"] is None else f"{fp8['largest_score']:.3g}"
    text = f"fp8 messages in {used} of {used + others} layer(s): largest score {largest}, limit {fp8['score_limit']:g}"
    return text + (", so the others fell back to the run's data type." if others else ".")


def _require_passed(outcome: RunOutcome) -> None:
    """Turn a failed check into an error; the report is there all the same."""
    for row in outcome.failed_parity:
        raise RunError(f"{_describe_failure(row)}; the report {outcome.report} shows what ran")
    if not outcome.has_passed:
        raise RunError(
            f"the running softmax statistic is damaged; the report {outcome.report} shows what ran"
        )


def _describe_failure(row: Mapping[str, Any]) -> str:
    where = f"rank {row['rank']}, layer {row['layer']}: {row['tensor']}"
    if row["max_error"] is None or row["rms_error"] is None:
        return f"{where} is not finite"
    if row["max_error"] > row["max_limit"]:
        return f"{where} is off by {row['max_error']:.3g}, the limit is {row['max_limit']:.3g}"
    return f"{where} is off by {row['rms_error']:.3g} (rms), the limit is {row['rms_limit']:.3g}"


def _show_analysis(path: Path) -> None:
    """Print the analysis of a report."""
    # Only here: a run that fails should not wait for pandas.
    from cptrace.api import analyze
    from cptrace.cli.show import show_report

    click.echo()
    show_report(analyze(path))


@contextmanager
def _progress_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what happens now, on standard error where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return

    def show(text: str) -> None:
        click.echo(f"\r{text[:_PROGRESS_WIDTH]:<{_PROGRESS_WIDTH}}", nl=False, err=True)

    try:
        yield show
    finally:
        click.echo("\r" + " " * _PROGRESS_WIDTH + "\r", nl=False, err=True)
