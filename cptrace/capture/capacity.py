"""Whether this machine can hold a run: a refusal with numbers before it starts, instead of an OOM kill."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from cptrace.capture.run_spec import RunSpec
from cptrace.errors import RunError
from cptrace.schemes import ELEMENT_BYTES, find_scheme
from cptrace.units import format_bytes

RANKS_PER_CORE: Final = 8
"""Emulated ranks take turns on the cores; beyond this the paced clock measures the scheduler."""

_PROCESS_BYTES: Final = (
    80 << 20
)  # what a rank's process holds besides tensors; the rest is shared by the fork
_CGROUP: Final = Path("/sys/fs/cgroup")
_SLICE_BYTES: Final = 256 << 20  # score slices of the float64 reference


def require_capacity(spec: RunSpec) -> None:
    """Check that cores and memory suffice for all ranks of a run on this machine.

    Raises:
        RunError: They do not; the message says what would.
    """
    _require_cores(spec.cp_size, os.cpu_count() or 1)
    needed, available = estimate_bytes(spec), available_bytes()
    if available is not None and needed > available:
        raise RunError(
            f"{spec.cp_size} ranks with {spec.seq_len} tokens need about {format_bytes(needed)}, this "
            f"machine has {format_bytes(available)} available; "
            "use a shorter --seq-len, fewer --layers or --no-check"
        )


def _require_cores(cp_size: int, n_cores: int) -> None:
    most = RANKS_PER_CORE * n_cores
    if cp_size > most:
        raise RunError(
            f"--cp-size {cp_size}: {n_cores} cores can emulate at most {most} ranks "
            f"({RANKS_PER_CORE} per core); use --cp-size {most} or fewer"
        )


def estimate_bytes(spec: RunSpec) -> int:
    """Return about how many bytes a run of `spec` takes at its peak, all ranks together.

    Per rank: inputs, results and gradients of every layer, what the scheme keeps, and one layer's whole inputs
    while they are drawn in float64. Once: the float64 reference and one kernel's results.
    """
    element, shape = ELEMENT_BYTES[spec.dtype], spec.shape
    q_whole = spec.padded_len * spec.heads * spec.head_dim
    kv_whole = spec.padded_len * spec.kv_heads * spec.head_dim
    layer_bytes = 4 * (shape.query_bytes + shape.chunk_bytes)
    kept = find_scheme(spec.scheme).memory(shape)
    drawing_bytes = 2 * (q_whole + kv_whole) * (8 + element)
    rank_bytes = _PROCESS_BYTES + spec.layers * (layer_bytes + kept.per_layer) + kept.once + drawing_bytes
    check_bytes = 4 * (q_whole + kv_whole) * (8 + element) + _SLICE_BYTES if spec.check else 0
    return spec.cp_size * rank_bytes + check_bytes


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
