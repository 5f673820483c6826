"""Export `parquet`: one file per table, typed, with each column's unit and meaning in its metadata."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from cptrace import schema
from cptrace.classify import classify
from cptrace.launches import find_launches
from cptrace.trace import Trace, TraceMeta


def write(trace: Trace, path: Path) -> None:
    """Write the tables of a trace into a folder: ops with their roles, and the others as they are.

    Args:
        trace: Trace to write.
        path: Folder to make.
    """
    path.mkdir()
    trace = classify(trace, find_launches(trace.ops, trace.api_calls))
    for table in schema.TABLES:
        extra = schema.ROLES.columns if table is schema.OPS else ()
        frame = getattr(trace, table.name)
        pq.write_table(
            _arrow_table(table, (*table.columns, *extra), frame, trace.meta), path / f"{table.name}.parquet"
        )


def _arrow_table(
    table: schema.Table, columns: tuple[schema.Column, ...], frame: pd.DataFrame, meta: TraceMeta
) -> pa.Table:
    arrays = [pa.array(frame[column.name], from_pandas=True) for column in columns]
    described = [
        pa.field(
            column.name,
            array.type,
            nullable=column.is_nullable,
            metadata={"unit": column.unit, "meaning": column.meaning},
        )
        for column, array in zip(columns, arrays, strict=True)
    ]
    about = {
        "cptrace.table": table.name,
        "cptrace.meaning": table.meaning,
        "cptrace.meta": json.dumps(_about(meta)),
    }
    return pa.Table.from_arrays(arrays, schema=pa.schema(described, metadata=about))


def _about(meta: TraceMeta) -> dict[str, Any]:
    about = {field.name: getattr(meta, field.name) for field in fields(meta)}
    return {**about, "run": dict(meta.run), "notes": [asdict(note) for note in meta.notes]}
