"""`cptrace run`: run a scheme on an emulated device or on GPUs, write its report, and say what it shows."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from cptrace.capture.devices import AUTO as AUTO_DEVICE
from cptrace.capture.devices import CHOICES as DEVICE_CHOICES
from cptrace.capture.devices import choose_device
from cptrace.capture.launched import find_launched
from cptrace.capture.launcher import RunOutcome
from cptrace.capture.launcher import run as launch
from cptrace.capture.presets import PRESETS, find_preset
from cptrace.capture.profilers import AUTO, NSYS, PROFILERS, RECORDER, choose_profiler, describe_plan
from cptrace.capture.profilers import NAMES as PROFILER_NAMES
from cptrace.capture.run_spec import CLOCKS, MESSAGE_DTYPES, MODEL_OPTIONS, VIRTUAL, RunSpec
from cptrace.cli.output import fit_lines, terminal_width
from cptrace.cli.run_output import (
    DEFAULT_NAME,
    choose_output,
    claim_output,
    scratch_beside,
)
from cptrace.cli.run_text import describe_failure, describe_outcome
from cptrace.cli.settings import CONTEXT_SETTINGS, text_or_json
from cptrace.errors import RunError
from cptrace.faults import FAULTS
from cptrace.impls import IMPLS, require_impl
from cptrace.schemes import ELEMENT_BYTES, SCHEMES, find_scheme
from cptrace.schemes.transformer import FFN_MULTIPLE, LLAMA, MODELS, default_ffn

_DEFAULTS: Final = RunSpec()
_PROGRESS_WIDTH: Final = 60
_HELP_WIDTH: Final = 78  # click indents by two
_FAULT_LIST: Final = "\b\nFaults, and the finding that each must cause:\n" + "\n".join(
    fit_lines(f"  {fault.usage:<20}{fault.expected}\n    {fault.summary}", _HELP_WIDTH, hang=0)
    for fault in FAULTS
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
@click.option(
    "--layers", default=_DEFAULTS.layers, show_default=True, help="Layers of attention, or of the model."
)
@click.option(
    "--model",
    type=click.Choice(MODELS),
    default=_DEFAULTS.model,
    show_default=True,
    help="attention: layers of attention on random q, k and v. llama: a whole model around it (RMSNorm, RoPE, "
    "SwiGLU), its loss, and the all-reduce of its weight gradients.",
)
@click.option(
    "--preset",
    type=click.Choice([preset.name for preset in PRESETS]),
    help="Sizes that options here override. "
    + " ".join(f"{preset.name}: {preset.summary}." for preset in PRESETS),
)
@click.option(
    "--hidden", type=int, help="llama: elements of a token between blocks.  [default: --heads x --head-dim]"
)
@click.option(
    "--ffn",
    type=int,
    help="llama: columns of the feed-forward layer.  "
    f"[default: 8/3 of --hidden, rounded up to a multiple of {FFN_MULTIPLE}]",
)
@click.option(
    "--tp-size",
    default=_DEFAULTS.tp_size,
    show_default=True,
    help="llama: ranks that share the weights of one part of the sequence; the run has cp-size x tp-size ranks.",
)
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
    "--device",
    type=click.Choice(DEVICE_CHOICES),
    default=AUTO_DEVICE,
    show_default=True,
    help="cpu: the emulated device; cuda: one GPU per rank, or all ranks on the only one; auto: cuda where torch sees "
    "it and nothing else asks for emulation.",
)
@click.option(
    "--impl",
    default=_DEFAULTS.impl,
    show_default=True,
    metavar="NAME",
    help="Whose code computes the scheme. " + " ".join(f"{each.name}: {each.summary}." for each in IMPLS),
)
@click.option(
    "--impl-check",
    is_flag=True,
    help="Show each tensor's error beside that of one kernel that does the same maths.",
)
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
    help="Compare results with float64 on one device: out, dq, dk and dv, or a model's loss and gradients.",
)
@text_or_json("What to print: text with the analysis, or the run's description as JSON.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"Report to write.  [default: {DEFAULT_NAME}, or the next free report-N.sqlite]",
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
    impl_check: bool,
    preset: str | None,
    **options: Any,
) -> None:
    """Run one context-parallel attention step on this machine, no GPU needed, and analyse its trace.

    Each rank is a process with an emulated device: CUDA's streams and events on CPU threads, real attention
    and real transfers; or with a GPU. The report has the schema of an Nsight Systems SQLite export. Processes that
    torchrun or srun starts are one rank each.
    """
    require_impl(options["impl"])
    device = choose_device(options["device"], needs_emulation=_why_emulated(options))
    spec = _make_spec(options | {"device": device.name}, _given(click.get_current_context()), preset)
    spec.validate()
    if _is_one_of_many(spec):
        return
    choice = choose_profiler(profiler, device.kind)
    path = choose_output(output, force=force, has_original=choice.profiler is NSYS)
    if dry_run:
        click.echo(describe_plan(choice, spec, path, device.kind))
        return
    capture = launch if choice.profiler is RECORDER else choice.profiler.capture
    with _progress_line() as show, scratch_beside(path) as scratch:
        outcome = capture(spec, scratch, show)
        path = claim_output(scratch, output, path, force=force)
    outcome = replace(outcome, report=path)
    if output_format == "json":
        click.echo(json.dumps({"report": str(path), "run": outcome.metadata}, indent=2, allow_nan=False))
    else:
        text = describe_outcome(outcome, device.reason, has_impl_check=impl_check)
        click.echo(fit_lines(text, terminal_width()) + f"\nReport: {path}")
        _show_analysis(path)
    _require_passed(outcome)


def _why_emulated(options: Mapping[str, Any]) -> str | None:
    """Return why a run must have the emulated device even beside a GPU, None where it need not."""
    if options["clock"] == VIRTUAL:
        return "only the emulated device has a virtual clock"
    if options["faults"]:
        return "what a fault must cause is known on the emulated device"
    return None


def _is_one_of_many(spec: RunSpec) -> bool:
    """Run this process's rank, if a launcher started it and rank 0 is another one, which speaks for all."""
    launched = find_launched(os.environ)
    if launched is None or launched.rank == 0:
        return False
    launch(spec, Path(f".cptrace-rank-{launched.rank}.sqlite"), lambda _text: None)  # writes no report
    return True


def _given(context: click.Context) -> set[str]:
    """Return the options that the user gave."""
    return {
        name
        for name in context.params
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }


def _make_spec(options: dict[str, Any], given: set[str], preset: str | None) -> RunSpec:
    """Return what to run: what was given, else the preset's, else what follows from other options.

    Args:
        options: All options of the run, None where a default depends on others.
        given: Those that the user gave.
        preset: Name of a preset, if any.
    """
    if preset is not None:
        own = find_preset(preset).options
        options |= {name: value for name, value in own.items() if name not in given}
    derived: dict[str, Callable[[], int]] = {
        "cp_size": lambda: _default_cp_size(options["scheme"]),
        "kv_heads": lambda: options["heads"],
        "hidden": lambda: options["heads"] * options["head_dim"],
        "ffn": lambda: default_ffn(options["hidden"]),
    }
    for name, value_of in derived.items():
        if options[name] is None:
            is_used = options["model"] == LLAMA or name not in MODEL_OPTIONS
            options[name] = value_of() if is_used else getattr(_DEFAULTS, name)
    return RunSpec(**options)


def _default_cp_size(scheme: str) -> int:
    """Return the number of ranks of a run that does not say: as many as the scheme can have, up to the default."""
    most = find_scheme(scheme).max_cp_size
    return _DEFAULTS.cp_size if most is None else min(most, _DEFAULTS.cp_size)


def _require_passed(outcome: RunOutcome) -> None:
    """Turn a failed check into an error; the report is there all the same."""
    if not outcome.has_passed:
        raise RunError(f"{describe_failure(outcome)}; the report {outcome.report} shows what ran")


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
