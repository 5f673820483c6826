"""Libraries that compute the same schemes, behind the same calls; `cptrace.impls` describes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cptrace.capture.run_spec import RunSpec
from cptrace.errors import RunError, UsageError
from cptrace.impls import BUILTIN
from instrumented.impls import ring_flash_attn, torch_cp, transformer_engine, yunchang
from instrumented.impls.base import Library, LibraryAttention
from instrumented.layout import Placement
from instrumented.problem import LayerState, Problem
from instrumented.runtime.api import Device
from instrumented.schemes import Attention, Implementation, find

__all__ = ["LIBRARIES", "implementation_of"]

LIBRARIES: Final[tuple[Library, ...]] = (
    transformer_engine.LIBRARY,
    ring_flash_attn.LIBRARY,
    yunchang.LIBRARY,
    torch_cp.LIBRARY,
)


def implementation_of(spec: RunSpec) -> Implementation:
    """Return what computes a run's scheme.

    Raises:
        UsageError: A library would need padding, which none of them masks.
    """
    if spec.impl == BUILTIN:
        return find(spec.scheme)
    library = next(item for item in LIBRARIES if item.name == spec.impl)
    multiple = 2 * spec.cp_size if spec.causal else spec.cp_size
    if spec.seq_len % multiple:
        raise UsageError(
            f"--seq-len {spec.seq_len}: --impl {spec.impl} masks no padding; use a multiple of {multiple}, such as "
            f"{-(-spec.seq_len // multiple) * multiple}"
        )

    def make(device: Device, problem: Problem, layers: Sequence[LayerState]) -> Attention:
        try:
            attend, around = library.make(spec.scheme, problem), library.around(problem)
        except (ImportError, AttributeError) as error:
            raise RunError(
                f"--impl {spec.impl} cannot be used: {error}; its version here may not fit torch's or the kernel's"
            ) from error
        return LibraryAttention(device, layers, attend, around)

    def placement(problem: Problem) -> Placement:
        return library.placement(spec.scheme, problem)

    return Implementation(spec.scheme, make, placement)
