"""`cptrace export`: write a trace in the format of another tool."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from cptrace.cli.output import check_output, refuse_dash
from cptrace.cli.progress import loading
from cptrace.cli.settings import CONTEXT_SETTINGS
from cptrace.errors import RenderError
from cptrace.exports import EXPORTS, find_export
from cptrace.requests import ReadOptions
from cptrace.sources import Readings

_FORMATS = "\b\n" + "\n".join(f"  {export.name:10} {export.summary}" for export in EXPORTS)


@click.command(
    context_settings=CONTEXT_SETTINGS,
    help=f"""Write a trace in the format of another tool.

Formats:

{_FORMATS}""",
)
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "format_name",
    type=click.Choice([export.name for export in EXPORTS]),
    required=True,
    help="Format to write.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="File to write, or folder for parquet; JSON is compressed where the name ends in .gz.",
)
@click.option("--force", is_flag=True, help="Replace the output if it exists.")
@click.option("--rank", type=int, help="Only this rank, as one process of a job writes it.")
@click.option(
    "--drop-invalid", is_flag=True, help="Leave out device work with impossible times, and count it."
)
def export(
    path: Path, format_name: str, output: Path, force: bool, rank: int | None, drop_invalid: bool
) -> None:
    refuse_dash(output, "name a file with -o, or a folder for parquet")
    chosen = find_export(format_name)
    if chosen.is_folder:
        _check_folder(output, force=force)
    else:
        check_output(output, force=force, inputs=[path])
    with loading() as progress, Readings([path], ReadOptions(drop_invalid, progress)) as readings:
        from cptrace.exports.parts import of_rank  # here: pandas takes its time to import

        trace = next(iter(readings))
        trace = trace if rank is None else of_rank(trace, rank)
        _write_whole(output, lambda target: chosen.write(trace, target))


def _check_folder(output: Path, *, force: bool) -> None:
    """Check that a folder may be made, and that replacing it would remove nothing but an export."""
    if not output.parent.is_dir():
        raise RenderError(f"cannot write {output}: there is no folder {output.parent}; make it first")
    if not output.exists():
        return
    if not output.is_dir():
        raise RenderError(f"cannot write {output}: it is a file; name a folder")
    if not force:
        raise RenderError(
            f"cannot write {output}: it exists; choose another name, or replace it with --force"
        )
    others = sorted(item.name for item in output.iterdir() if item.suffix != ".parquet")
    if others:
        raise RenderError(
            f"cannot replace {output}: it holds other files too, such as {others[0]}; name another folder"
        )


def _write_whole(output: Path, write: Callable[[Path], None]) -> None:
    """Write a file or a folder under a name of this process's own, then put it into its place."""
    try:
        with tempfile.TemporaryDirectory(prefix=".cptrace-", dir=output.parent) as scratch:
            target = Path(scratch, output.name)
            write(target)
            if output.is_dir():
                shutil.rmtree(output)
            os.replace(target, output)
    except OSError as error:
        raise RenderError(f"cannot write {output}: {error.strerror}; choose another place") from error
