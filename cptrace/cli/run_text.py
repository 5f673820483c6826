"""What a finished run says of itself: what ran, how exact it was, and which of its checks failed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cptrace.capture.launcher import RunOutcome
from cptrace.faults import find_fault, has_undefined_results, parse_fault
from cptrace.labels import CUDA, LOCAL_D2D
from cptrace.schemes import HEADS
from cptrace.schemes.transformer import ATTENTION
from cptrace.units import format_fraction, plural


def describe_outcome(
    outcome: RunOutcome, device_reason: str | None = None, *, has_impl_check: bool = False
) -> str:
    """Return what ran and how exact it was.

    Args:
        outcome: The finished run.
        device_reason: Why it ran on its device; None where nobody chose.
        has_impl_check: Whether to show each tensor's error beside one kernel's.
    """
    run_of = outcome.metadata
    parity = run_of["checks"]["parity"]
    parts = [_describe_run(run_of)]
    parts += [f"  device {run_of['device']}: {device_reason}"] if device_reason else []
    parts += [_describe_faults(run_of["faults"])] if run_of["faults"] else []
    parts += [_describe_padding(run_of)] if run_of["padded_tokens"] else []
    parts += [_describe_parity(parity)] if parity is not None else [_why_not_checked(run_of)]
    parts += [_describe_impl_check(run_of["impl"], parity)] if has_impl_check and parity else []
    parts += [_describe_running_max(run_of["checks"]["running_max"])]
    fp8 = run_of["checks"]["fp8_messages"]
    parts += [_describe_fp8(fp8)] if fp8 is not None else []
    parts += [_describe_grad_norm(run_of["checks"]["grad_norm"]), _describe_loss(run_of["checks"]["loss"])]
    return "\n".join(parts)


def _describe_run(run_of: Mapping[str, Any]) -> str:
    mask = "causal" if run_of["causal"] else "full"
    heads = f"{run_of['heads']} heads" + (
        f" ({run_of['kv_heads']} for K and V)" if run_of["kv_heads"] != run_of["heads"] else ""
    )
    return (
        f"Ran {_what(run_of)}, {' + '.join(run_of['passes'])}, on {_ranks(run_of)}.\n"
        f"  {_describe_device(run_of)}\n"
        f"  {run_of['seq_len']} tokens ({_tokens_per_rank(run_of)} per rank), {heads} of "
        f"{run_of['head_dim']}, {plural(run_of['layers'], 'layer')}, {run_of['dtype']}, {mask} attention\n"
        f"  {plural(run_of['steps'], 'step')} after {run_of['warmup']} warm-up\n" + _describe_model(run_of)
    )


def _describe_device(run_of: Mapping[str, Any]) -> str:
    """Return whose times the figures are, and what the data crossed."""
    if run_of["device_kind"] != CUDA:
        return f"CPU emulation, {run_of['clock']} clock: {_whose_times(run_of)}, not a GPU's"
    if run_of["transport"] == LOCAL_D2D:
        return f"All on one {run_of['gpu']} (local-d2d): transfers are copies within the device and cross no link"
    return f"One {run_of['gpu']} each, transfers by NCCL"


def _what(run_of: Mapping[str, Any]) -> str:
    """Return the scheme, and the model around it."""
    if run_of["model"] == ATTENTION:
        return str(run_of["scheme"])
    return f"{run_of['scheme']} in {run_of['model']} (hidden {run_of['hidden']}, ffn {run_of['ffn']})"


def _ranks(run_of: Mapping[str, Any]) -> str:
    tp_size = run_of.get("tp_size", 1)
    n_ranks = run_of["cp_size"] * tp_size
    mesh = f" ({run_of['cp_size']} share the sequence, {tp_size} the weights)" if tp_size > 1 else ""
    return plural(n_ranks, "rank") + mesh


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
        f"  padding: {n_padded} of {padded} tokens ({format_fraction(run_of['padded_share'])}) are masked but"
        f" computed; --seq-len {lengths}" + (f" or --cp-size {sizes}" if sizes else "") + " needs none"
    )


def _whose_times(run_of: Mapping[str, Any]) -> str:
    return "times are this machine's" if run_of["clock"] == "real" else "times are a model's"


def _describe_model(run_of: Mapping[str, Any]) -> str:
    if run_of["device_kind"] == CUDA:
        return "  no model: times are the GPU's"
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


def _describe_impl_check(impl: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the errors per tensor, the worst of all ranks and layers, beside one kernel's there."""
    lines = [
        f"Implementation {impl}, errors against dense float64 beside those of the same maths in one kernel:"
    ]
    columns = ("largest", "one kernel", "rms", "one kernel")
    lines.append("  tensor" + "".join(f"{name:>12}" for name in columns))
    for name in dict.fromkeys(row["tensor"] for row in rows):
        cells = []
        for error, one_kernel in (
            ("max_error", "one_kernel_max_error"),
            ("rms_error", "one_kernel_rms_error"),
        ):
            own = [row for row in rows if row["tensor"] == name]
            worst = max(own, key=lambda row: math.inf if row[error] is None else row[error])
            cells += [
                "not finite" if worst[error] is None else f"{worst[error]:.2e}",
                f"{worst[one_kernel]:.2e}",
            ]
        lines.append(f"  {name:<6}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


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
        f"in {check['n_merges']} merges. First: {_running_max_failure(check)}."
    )


def _describe_fp8(fp8: Mapping[str, Any]) -> str:
    """Return how many layers sent fp8, and why others did not."""
    used, others = len(fp8["fp8_layers"]), len(fp8["fallback_layers"])
    largest = "unknown" if fp8["largest_score"] is None else f"{fp8['largest_score']:.3g}"
    where, limit = f"{used} of {plural(used + others, 'layer')}", format(fp8["score_limit"], "g")
    text = f"fp8 messages in {where}: largest score {largest}, limit {limit}"
    return text + (", so the others fell back to the run's data type." if others else ".")


def _describe_grad_norm(check: Mapping[str, Any]) -> str:
    if check["passed"] is None:
        return f"Gradient norms: not applicable, {check['not_applicable']}."
    if check["passed"]:
        return (
            f"Gradient norms: the same on all ranks that share the sequence, {check['n_compared']} compared "
            f"(largest {check['largest_norm']:.3g})."
        )
    others = len(check["failures"]) - 1
    return f"Gradient norms: {_grad_norm_failure(check)}" + (f", and {others} more." if others else ".")


def _describe_loss(check: Mapping[str, Any]) -> str:
    if check["passed"] is None:
        return f"Loss: not applicable, {check['not_applicable']}."
    if check["passed"]:
        exact = check["single_device_loss"]
        error = max(abs(loss - exact) for loss in check["losses"])
        return (
            f"Loss: {check['losses'][-1]:.6g}, on one device in float64 {exact:.6g} "
            f"(off by {error:.2e}, limit {check['limit']:.2e})."
        )
    others = len(check["failures"]) - 1
    return f"Loss: {_loss_failure(check)}" + (f", and {others} more." if others else ".")


def describe_failure(outcome: RunOutcome) -> str:
    """Return what the first failed check of a run says, with rank, layer and step where they are known."""
    checks = outcome.metadata["checks"]
    for row in outcome.failed_parity:
        return _parity_failure(row)
    if checks["grad_norm"]["passed"] is False:
        return _grad_norm_failure(checks["grad_norm"])
    if checks["loss"]["passed"] is False:
        return _loss_failure(checks["loss"])
    return _running_max_failure(checks["running_max"])


def _running_max_failure(check: Mapping[str, Any]) -> str:
    if not check["failures"]:
        return "the running softmax statistic is damaged"
    first = check["failures"][0]
    step = "warm-up" if first["step"] is None else f"step {first['step']}"
    where = f"rank {first['rank']}, layer {first['layer']}, {step}"
    return f"{where}: the running softmax statistic is not finite, or fell"


def _grad_norm_failure(check: Mapping[str, Any]) -> str:
    first = check["failures"][0]
    norm = "is not finite" if first["norm"] is None else f"is {first['norm']:.9g}"
    where = f"rank {first['rank']}, layer {first['layer']}, step {first['step']}"
    others = "" if first["expected"] is None else f", that of its group {first['expected']:.9g}"
    return f"{where}: the gradient norm {norm}{others}: were the gradients all-reduced?"


def _loss_failure(check: Mapping[str, Any]) -> str:
    first = check["failures"][0]
    layer = "" if first["layer"] is None else f", layer {first['layer']} on"
    where = f"rank {first['rank']}{layer}, step {first['step']}"
    if first["loss"] is None:
        return f"{where}: the loss is not finite"
    off = abs(first["loss"] - first["expected"])
    return f"{where}: its part of the loss is off by {off:.3g}, the limit is {first['limit']:.3g}"


def _parity_failure(row: Mapping[str, Any]) -> str:
    where = f"rank {row['rank']}, layer {row['layer']}: {row['tensor']}"
    if row["max_error"] is None or row["rms_error"] is None:
        return f"{where} is not finite"
    if row["max_error"] > row["max_limit"]:
        return f"{where} is off by {row['max_error']:.3g}, the limit is {row['max_limit']:.3g}"
    return f"{where} is off by {row['rms_error']:.3g} (rms), the limit is {row['rms_limit']:.3g}"
