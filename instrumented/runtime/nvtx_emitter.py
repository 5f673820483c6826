"""Emits our ranges to real NVTX as well, where the Python package is installed, so that nsys shows them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from cptrace.labels import DOMAIN, format_label

try:
    import nvtx
except ImportError:  # optional: the recorder has the ranges anyway
    nvtx = None


_TOOL_VARIABLE: Final = "NVTX_INJECTION64_PATH"  # by which NVTX finds the tool that listens, if any


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


def has_listener() -> bool:
    """Return whether a tool listens to NVTX in this process."""
    return nvtx is not None and bool(os.environ.get(_TOOL_VARIABLE))


class Mirror:
    """Says calls and device work of an emulated device in ranges, for profilers that see nothing else of it.

    Without a listener it does nothing, so that a run which nobody watches does not pay for it.
    """

    def __init__(self, emitter: NvtxEmitter, *, is_on: bool) -> None:
        """Say it to `emitter`, if at all."""
        self._emitter = emitter
        self._is_on = is_on

    @contextmanager
    def shown(self, name: str, correlation_id: int, /, **fields: int | str | None) -> Iterator[None]:
        """Enclose a call or an op in a range of the calling thread.

        Args:
            name: One of `labels.MIRRORED`.
            correlation_id: Joins a call and its op; the range's payload.
            **fields: Fields of the label; those that are None are left out.
        """
        if not self._is_on:
            yield
            return
        label = format_label(name, **{key: value for key, value in fields.items() if value is not None})
        self._emitter.push(label, correlation_id, name)
        try:
            yield
        finally:
            self._emitter.pop()
