"""Emits our ranges to real NVTX as well, where the Python package is installed, so that nsys shows them."""

from __future__ import annotations

from typing import Protocol

from cptrace.labels import DOMAIN

try:
    import nvtx
except ImportError:  # optional: the recorder has the ranges anyway
    nvtx = None


class NvtxEmitter(Protocol):
    """Opens and closes ranges of one domain."""

    def push(self, label: str, payload: int | None, category: str | None) -> None:
        """Open a range."""

    def pop(self) -> None:
        """Close the innermost range."""


class SilentEmitter:
    """Does nothing."""

    def push(self, label: str, payload: int | None, category: str | None) -> None:
        """Do nothing."""

    def pop(self) -> None:
        """Do nothing."""


class PackageEmitter:
    """Goes through the `nvtx` package, in the domain `cptrace`.

    The module's functions and not the domain object's: those came after 0.2.11, the last version whose ranges
    Nsight Systems 2022.4 and 2023.4 record.
    """

    def push(self, label: str, payload: int | None, category: str | None) -> None:
        """Open a range."""
        nvtx.push_range(message=label, domain=DOMAIN, category=category, payload=payload)

    def pop(self) -> None:
        """Close the innermost range."""
        nvtx.pop_range(domain=DOMAIN)


def make_emitter() -> NvtxEmitter:
    """Return an emitter that reaches nsys where the package allows it."""
    return SilentEmitter() if nvtx is None else PackageEmitter()
