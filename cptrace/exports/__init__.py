"""Exports: a trace in the formats of other tools. `EXPORTS` is the list that help and tests go by."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cptrace.errors import UsageError
from cptrace.exports.base import Export

if TYPE_CHECKING:
    from cptrace.trace import Trace


def _export(name: str, summary: str, *, is_folder: bool = False) -> Export:
    def write(trace: Trace, path: Path) -> None:
        # Only here: what writes needs pandas, which takes its time to import.
        import_module(f"{__name__}.{name}").write(trace, path)

    return Export(name, summary, is_folder, write)


EXPORTS: Final[tuple[Export, ...]] = (
    _export("perfetto", "timeline for ui.perfetto.dev (Chrome trace JSON)"),
    _export("kineto", "JSON of the PyTorch profiler, for its tools and `cptrace analyze`"),
    _export("parquet", "a folder with one Parquet file per table", is_folder=True),
)

__all__ = ["EXPORTS", "Export", "find_export"]


def find_export(name: str) -> Export:
    """Return the export of a name.

    Args:
        name: Name of one of `EXPORTS`.

    Raises:
        UsageError: There is none of that name.
    """
    for export in EXPORTS:
        if export.name == name:
            return export
    raise UsageError(f"--to {name}: choose one of {', '.join(e.name for e in EXPORTS)}")
