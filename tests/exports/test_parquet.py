"""Tables as Parquet: every column typed, with its unit and meaning."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import cptrace
from cptrace import schema
from cptrace.exports import find_export
from tests.support.shared_traces import ROOT

SAMPLE = sorted((ROOT / "samples").glob("*.sqlite"))[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parquet") / "tables"
    find_export("parquet").write(cptrace.open_trace(SAMPLE), path)
    return path


def test_there_is_one_file_per_table(folder: Path) -> None:
    assert sorted(path.stem for path in folder.iterdir()) == sorted(table.name for table in schema.TABLES)


@pytest.mark.parametrize("table", schema.TABLES, ids=lambda table: table.name)
def test_rows_types_units_and_meanings_are_those_of_the_schema(folder: Path, table: schema.Table) -> None:
    stored = pq.read_table(folder / f"{table.name}.parquet")
    frame = getattr(cptrace.open_trace(SAMPLE), table.name)
    assert stored.num_rows == len(frame)
    for column in table.columns:
        field = stored.schema.field(column.name)
        assert field.metadata[b"unit"].decode() == column.unit
        assert field.metadata[b"meaning"].decode() == column.meaning
        assert field.nullable == column.is_nullable
        assert (
            stored[column.name].to_pylist()
            == frame[column.name].astype(object).where(frame[column.name].notna(), None).tolist()
        )
    assert json.loads(stored.schema.metadata[b"cptrace.meta"])["device_kind"] == "cpu-emulated"


def test_ops_have_their_roles(folder: Path) -> None:
    roles = set(pq.read_table(folder / "ops.parquet")["role"].to_pylist())
    assert {"comm", "compute"} <= roles
