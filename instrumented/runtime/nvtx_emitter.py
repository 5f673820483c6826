"""Emits our ranges to real NVTX as well, where the Python package is installed, so that nsys shows them."""

from __future__ import annotations

from typing import Any, Protocol

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
    """Goes through the `nvtx` package, in the domain `cptrace`."""

    def __init__(self) -> None:
        """Create the domain."""
        self._domain: Any = nvtx.get_domain(DOMAIN)

    def push(self, label: str, payload: int | None, category: str | None) -> None:
        """Open a range."""
        attributes = self._domain.get_event_attributes(message=label, payload=payload, category=category)
        self._domain.push_range(attributes)

    def pop(self) -> None:
        """Close the innermost range."""
        self._domain.pop_range()


def make_emitter() -> NvtxEmitter:
    """Return an emitter that reaches nsys where the package allows it."""
    return SilentEmitter() if nvtx is None else PackageEmitter()
