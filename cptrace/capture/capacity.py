"""Whether this machine can hold a run: a refusal with numbers before it starts, instead of an OOM kill."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from cptrace.capture.run_spec import RunSpec
from cptrace.errors import RunError
from cptrace.schemes import ELEMENT_BYTES, HEADS, find_scheme
from cptrace.schemes.memory import Memory
from cptrace.schemes.transformer import ATTENTION, block_memory
from cptrace.units import format_bytes

RANKS_PER_CORE: Final = 8
"""Emulated ranks take turns on the cores; beyond this the paced clock measures the scheduler."""

_PROCESS_BYTES: Final = (
    80 << 20
)  # what a rank's process holds besides tensors; the rest is shared by the fork
_CGROUP: Final = Path("/sys/fs/cgroup")
_SINGLE: Final = "single"  # what attends where all tokens are on one rank
_REFERENCE_BYTES: Final = 8  # of an element in float64
_SLICE_BYTES: Final = 256 << 20  # score slices of the float64 reference


def require_capacity(spec: RunSpec) -> None:
    """Check that cores and memory suffice for all ranks of a run on this machine.

    Raises:
        RunError: They do not; the message says what would.
    """
    _require_cores(spec, os.cpu_count() or 1)
    needed, available = estimate_bytes(spec), available_bytes()
    if available is not None and needed > available:
        raise RunError(
            f"{spec.n_ranks} ranks with {spec.seq_len} tokens need about {format_bytes(needed)} "
            f"({_describe_rank(spec)}), this machine has {format_bytes(available)} available; "
            "use a shorter --seq-len, fewer --layers or --no-check"
        )


def _require_cores(spec: RunSpec, n_cores: int) -> None:
    most = RANKS_PER_CORE * n_cores
    if spec.n_ranks > most:
        asked = f"--cp-size {spec.cp_size}" + (f" --tp-size {spec.tp_size}" if spec.tp_size > 1 else "")
        other = f" with --tp-size {spec.tp_size}" if spec.tp_size > 1 else ""
        raise RunError(
            f"{asked}: {n_cores} cores can emulate at most {most} ranks "
            f"({RANKS_PER_CORE} per core); use --cp-size {max(1, most // spec.tp_size)} or fewer{other}"
        )


def _describe_rank(spec: RunSpec) -> str:
    """Return what one rank takes, and how much of that are a model's weights."""
    text = f"{format_bytes(estimate_rank_bytes(spec))} per rank"
    if spec.model == ATTENTION:
        return text
    weights = 2 * spec.layers * spec.block.weight_bytes
    return f"{text}, {format_bytes(weights)} of it weights and their gradients"


def estimate_bytes(spec: RunSpec) -> int:
    """Return about how many bytes a run of `spec` takes at its peak: all ranks, and once the reference."""
    return spec.n_ranks * estimate_rank_bytes(spec) + (_check_bytes(spec) if spec.check else 0)


def _check_bytes(spec: RunSpec) -> int:
    """Return the bytes of the float64 reference and of the same in one process and the run's type.

    A model's keep the whole of every layer, and autograd about as much again.
    """
    element = ELEMENT_BYTES[spec.dtype]
    n_elements = 4 * spec.padded_len * (spec.heads + spec.kv_heads) * spec.head_dim
    if spec.model != ATTENTION:
        whole = block_memory(replace(spec, scheme=_SINGLE, cp_size=1, tp_size=1).block)
        around = (spec.layers * whole.per_layer + whole.once) // element
        n_elements = 2 * (spec.layers * n_elements + around)
    return n_elements * (_REFERENCE_BYTES + element) + _SLICE_BYTES


def estimate_rank_bytes(spec: RunSpec) -> int:
    """Return about how many bytes one rank takes at its peak.

    Inputs, results and gradients of every layer, what the scheme keeps, and one layer's whole inputs (of a model
    its weights) while they are drawn in float64.
    """
    both = _REFERENCE_BYTES + ELEMENT_BYTES[spec.dtype]
    if spec.model == ATTENTION:
        shape, around = spec.shape, Memory(0, 0)
        drawing_bytes = 2 * spec.padded_len * (spec.heads + spec.kv_heads) * spec.head_dim * both
        kept = find_scheme(spec.scheme).memory(shape)
    else:
        shape, around = spec.block.attention, block_memory(spec.block)
        n_drawn = max(spec.block.n_weights * spec.weight_ranks, 2 * spec.padded_len * spec.hidden)
        drawing_bytes = n_drawn * both
        kept = find_scheme(_SINGLE if spec.layout == HEADS else spec.scheme).memory(shape)
    layer_bytes = 4 * (shape.query_bytes + shape.chunk_bytes) + kept.per_layer + around.per_layer
    return _PROCESS_BYTES + spec.layers * layer_bytes + kept.once + around.once + drawing_bytes


def available_bytes() -> int | None:
    """Return the memory that programs can still take here, None where the system does not say.

    A container's limit counts where it is lower than what the machine has left.
    """
    machine, limit, used = (
        _number_in(Path("/proc/meminfo"), "MemAvailable:"),
        _number_in(_CGROUP / "memory.max"),
        _number_in(_CGROUP / "memory.current"),
    )
    known = [] if machine is None else [machine * 1024]
    if limit is not None and used is not None:
        known.append(max(0, limit - used))
    return min(known, default=None)


def _number_in(path: Path, field: str | None = None) -> int | None:
    """Return the first number in a file of the kernel's, or after `field`; None where there is none."""
    try:
        words = path.read_text(encoding="ascii").split()
    except OSError:
        return None
    if field is not None:
        words = words[words.index(field) + 1 :] if field in words else []
    return int(words[0]) if words and words[0].isdigit() else None
