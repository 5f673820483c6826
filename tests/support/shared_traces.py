"""Finds the public traces that tests read: `shared/traces` beside the checkout, which may be absent."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
"""The repository root."""


def shared_traces() -> Path | None:
    """Return the folder of public traces, or None where this machine has none."""
    folder = ROOT.parent / "shared" / "traces"
    return folder if folder.is_dir() else None


def nsys_traces() -> tuple[Path, ...]:
    """Return the public Nsight Systems exports in name order; empty where the folder is absent."""
    folder = shared_traces()
    return () if folder is None else tuple(sorted((folder / "nsys").glob("*.sqlite")))


def require_trace(relative: str) -> Path:
    """Return one public trace, or skip the calling test where it is absent.

    Args:
        relative: Path below the folder of traces, such as `nsys/nsys-2023.3-one-kernel.sqlite`.
    """
    folder = shared_traces()
    if folder is None:
        pytest.skip("needs the public traces in ../shared/traces, which is absent")
    path = folder / relative
    if not path.exists():
        pytest.skip(f"needs the public trace {relative}, which is absent from ../shared/traces")
    return path
