"""Whose code computes a scheme: our own, or a library's behind the same verb. It imports none of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cptrace.errors import RunError, UsageError

BUILTIN: Final = "builtin"


@dataclass(frozen=True, slots=True)
class ImplInfo:
    """One implementation.

    Attributes:
        name: What `--impl` calls it.
        summary: One line for help.
        import_name: Package to import; empty for our own.
        pip_line: How to install it.
        schemes: Schemes that it covers; empty for all.
        needs_cuda: Whether it runs on CUDA alone.
    """

    name: str
    summary: str
    import_name: str = ""
    pip_line: str = ""
    schemes: tuple[str, ...] = ()
    needs_cuda: bool = True

    def covers(self, scheme: str) -> bool:
        """Return whether it has an implementation of a scheme."""
        return not self.schemes or scheme in self.schemes


IMPLS: Final[tuple[ImplInfo, ...]] = (
    ImplInfo(BUILTIN, "this project's own code, on any device", needs_cuda=False),
    ImplInfo(
        "transformer-engine",
        "NVIDIA Transformer Engine (cp_comm_type p2p, all_gather, a2a, a2a+p2p)",
        "transformer_engine",
        "pip install 'transformer-engine[pytorch]>=1.11'",
        ("te", "all_gather", "ulysses", "usp"),
    ),
    ImplInfo(
        "ring-flash-attn",
        "zhuzilin/ring-flash-attention (plain, zigzag and striped rings)",
        "ring_flash_attn",
        "pip install ring-flash-attn",
        ("ring", "zigzag_ring", "striped_ring"),
    ),
    ImplInfo(
        "yunchang",
        "feifeibear/long-context-attention (Ulysses, and Ulysses around a ring)",
        "yunchang",
        "pip install yunchang",
        ("ulysses", "usp"),
    ),
    ImplInfo(
        "torch",
        "PyTorch's experimental context_parallel (ring, or all-gather of K and V)",
        "torch",
        "pip install 'torch>=2.7'",
        ("te", "all_gather"),
    ),
)
NAMES: Final = tuple(impl.name for impl in IMPLS)


def find_impl(name: str) -> ImplInfo:
    """Return the implementation called `name`.

    Raises:
        UsageError: There is none.
    """
    for impl in IMPLS:
        if impl.name == name:
            return impl
    raise UsageError(f"--impl {name}: no such implementation; choose one of {', '.join(NAMES)}")


def check_impl(name: str, scheme: str, *, is_cuda: bool, model: str = "attention") -> None:
    """Check that an implementation covers a scheme, on this kind of device.

    Raises:
        UsageError: It does not; the message says which schemes it has.
    """
    impl = find_impl(name)
    if not impl.covers(scheme):
        others = ", ".join(other.name for other in IMPLS if other.covers(scheme))
        raise UsageError(
            f"--impl {name} has no scheme {scheme}; it has {', '.join(impl.schemes)}; "
            f"{scheme} is in --impl {others}"
        )
    if name != BUILTIN and model != "attention":
        raise UsageError(
            f"--impl {name} --model {model}: a library's attention runs alone; use --impl {BUILTIN}"
        )
    if impl.needs_cuda and not is_cuda:
        raise UsageError(f"--impl {name} runs on CUDA alone, and this run has none; use --impl {BUILTIN}")


def require_impl(name: str, is_installed: Callable[[str], bool] | None = None) -> None:
    """Check that the package behind an implementation is installed.

    Args:
        name: One of `NAMES`.
        is_installed: Tells whether a package can be imported; None to look.

    Raises:
        RunError: It is not; the message has the line that installs it.
    """
    impl = find_impl(name)
    if impl.import_name and not (is_installed or _is_installed)(impl.import_name):
        raise RunError(
            f"--impl {name} needs the package {impl.import_name}, which is not installed: {impl.pip_line}"
        )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
