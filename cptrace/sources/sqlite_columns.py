"""Reads columns of an SQLite file as arrays, read-only, in parallel, and refuses damaged files with a reason.

Bulk columns go through the ADBC driver (C to Arrow, several times faster than Python's own cursor), cut into chunks
of rowids that a small pool of threads reads. Everything small goes through Python's `sqlite3`. Both open the file
`mode=ro&immutable=1`: no lock, no journal, no index and no cache ever appears beside it.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from threading import Lock
from typing import Any, Final
from urllib.parse import quote

import adbc_driver_manager
import adbc_driver_sqlite
import pyarrow as pa

from cptrace.errors import SourceError
from cptrace.sources.column_buffers import ColumnBuffers, Columns

MAGIC: Final = b"SQLite format 3\x00"
Progress = Callable[[int, int], None]

_ROWS_PER_STRETCH: Final = 131_072  # two batches: small enough that threads end together
_MIN_ROW_BYTES: Final = 8
_MAX_THREADS: Final = 4
_PARAMETERS_PER_QUERY: Final = 500
_BATCH_ROWS: Final = 65_536
# Mapped, pages are not copied one by one. Each stretch maps for itself: what it has read counts no longer afterwards.
_MAPPED_BYTES: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class Query:
    """Columns to read from one table: result name -> SQL expression over one row."""

    table: str
    columns: Mapping[str, str]


class SqliteFile:
    """One SQLite file, opened read-only.

    Args:
        path: Path of the file, already known to exist.

    Raises:
        SourceError: The file is damaged, cut short, or has changes that are not in it yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_header(path)
        _check_no_pending_changes(path)
        self._uri = f"file:{quote(os.fsencode(path.resolve()))}?mode=ro&immutable=1"
        # One connection for all small queries: each new one reads the whole schema again.
        self._connection = sqlite3.connect(self._uri, uri=True, check_same_thread=False)
        self._connection.text_factory = decode_text
        self._lock = Lock()
        try:
            self.columns: dict[str, frozenset[str]] = self._read_table_columns()
        except SourceError:
            self.close()
            raise

    def rows(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a small query.

        Args:
            sql: One SELECT statement.
            parameters: Values for its placeholders.

        Raises:
            SourceError: The file is damaged.
        """
        with self.explaining_damage(), self._lock:
            return self._connection.execute(sql, parameters).fetchall()

    def close(self) -> None:
        """Let go of the file; columns that are being read go on."""
        self._connection.close()

    def has_rows(self, table: str) -> bool:
        """Return whether the table exists and has a row.

        Args:
            table: Name of the table.
        """
        return table in self.columns and bool(self.rows(f'SELECT 1 FROM "{table}" LIMIT 1'))

    def strings(self, table: str, ids: Iterable[int]) -> dict[int, str]:
        """Return the texts of a table (id, value), for the ids that it has.

        Args:
            table: Name of the table.
            ids: Ids to look up.
        """
        found: dict[int, str] = {}
        remaining = iter(ids)
        while some := tuple(islice(remaining, _PARAMETERS_PER_QUERY)):
            marks = ",".join("?" * len(some))
            found.update(self.rows(f'SELECT id, value FROM "{table}" WHERE id IN ({marks})', some))
        return {key: value for key, value in found.items() if isinstance(value, str)}

    def start_reading(self, queries: Mapping[str, Query], progress: Progress | None = None) -> PendingColumns:
        """Start to read columns in the background; the first queries are read first.

        Args:
            queries: What to read, by a name for each.
            progress: Called with the number of rows read so far and in all, from any thread.
        """
        return PendingColumns(self, queries, progress)

    def stretches(self, table: str) -> list[tuple[int, int]]:
        """Return half-open ranges of rowids that together cover a table; none where it is empty.

        Args:
            table: Name of the table.
        """
        # Two statements: SQLite answers each from one end of the tree, but scans the table for both at once.
        low, high = (self.rows(f'SELECT {edge}(rowid) FROM "{table}"')[0][0] for edge in ("min", "max"))
        if low is None:
            return []
        if high - low > self.path.stat().st_size // _MIN_ROW_BYTES:
            # More rowids than rows can be in the file: they do not count the rows.
            return [(low, high + 1)]
        return list(pairwise([*range(low, high + 1, _ROWS_PER_STRETCH), high + 1]))

    def n_rows(self, table: str) -> int:
        """Return the number of rows of a table; takes a scan of it.

        Args:
            table: Name of the table.
        """
        return int(self.rows(f'SELECT count(*) FROM "{table}"')[0][0])

    @contextmanager
    def batches(self, query: Query, low: int, high: int) -> Iterator[Iterator[pa.RecordBatch]]:
        """Yield the columns of the rows whose rowid is in a half-open range, batch by batch.

        Args:
            query: What to read.
            low: First rowid.
            high: Rowid after the last.
        """
        columns = ", ".join(f'{expression} AS "{name}"' for name, expression in query.columns.items())
        sql = f'SELECT {columns} FROM "{query.table}" WHERE rowid >= {low} AND rowid < {high}'
        # The driver's own interface, not its DB-API one: that imports all of pyarrow.dataset, which takes longer than
        # reading half a million rows.
        with (
            adbc_driver_sqlite.connect(self._uri) as database,
            adbc_driver_manager.AdbcConnection(database) as connection,
            adbc_driver_manager.AdbcStatement(connection) as statement,
        ):
            statement.set_options(**{"adbc.sqlite.query.batch_rows": str(_BATCH_ROWS)})
            _run(statement, f"PRAGMA mmap_size = {_MAPPED_BYTES}").read_all()
            yield iter(_run(statement, sql))

    def _read_table_columns(self) -> dict[str, frozenset[str]]:
        rows = self.rows(
            "SELECT m.name, p.name FROM sqlite_schema AS m, pragma_table_info(m.name) AS p WHERE m.type = 'table'"
        )
        columns: dict[str, set[str]] = {}
        for table, column in rows:
            columns.setdefault(table, set()).add(column)
        return {table: frozenset(names) for table, names in columns.items()}

    @contextmanager
    def explaining_damage(self) -> Iterator[None]:
        """Turn what SQLite says of a damaged file into an error that says what to do."""
        try:
            yield
        except UnicodeDecodeError as error:  # of SQLite's own message, which quotes the damaged text
            raise SourceError(
                f"{self.path}: SQLite cannot read it (its schema is no text); the file is damaged: export the report"
                " again"
            ) from error
        except (sqlite3.Error, adbc_driver_manager.Error) as error:
            reason = str(error).strip().splitlines()[0]
            raise SourceError(
                f"{self.path}: SQLite cannot read it ({reason}); the file is damaged or not fully written:"
                " export the report again"
            ) from error


class PendingColumns:
    """Columns of a file that threads are reading.

    Args:
        file: File to read.
        queries: What to read, by a name for each.
        progress: Called with the number of rows read so far and in all, from any thread.
    """

    def __init__(self, file: SqliteFile, queries: Mapping[str, Query], progress: Progress | None) -> None:
        self._file = file
        self._queries = queries
        stretches = {name: file.stretches(query.table) for name, query in queries.items()}
        self._n_rows = sum(high - low for ranges in stretches.values() for low, high in ranges)
        self._n_done = 0
        self._progress = progress
        self._lock = Lock()
        self._buffers: dict[str, ColumnBuffers] = {}
        self._jobs: dict[str, list[Future[None]]] = {}
        pool = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
        for name, ranges in stretches.items():
            first, last = ranges[0][0], ranges[-1][1]
            n_slots = last - first if len(ranges) > 1 else file.n_rows(queries[name].table)
            self._buffers[name] = ColumnBuffers(n_slots)
            self._jobs[name] = [pool.submit(self._read, name, low - first, low, high) for low, high in ranges]
        pool.shutdown(wait=False)  # its threads end with the last job

    def pop(self, name: str) -> Columns | None:
        """Return the columns of a query once they are read, and forget them; None where it was not asked for.

        Args:
            name: Name of the query.

        Raises:
            SourceError: The file is damaged, or a column mixes types.
        """
        if name not in self._jobs:
            return None
        table = self._queries[name].table
        try:
            for job in self._jobs.pop(name):
                job.result()
            return self._buffers.pop(name).finish()
        except TypeError as error:
            raise SourceError(
                f"{self._file.path}: {table}, column {error}, where Nsight Systems writes integers; the file was"
                " changed after the export: export the report again"
            ) from error

    def cancel(self) -> None:
        """Give up what has not been read yet."""
        for jobs in self._jobs.values():
            for job in jobs:
                job.cancel()

    def _read(self, name: str, slot: int, low: int, high: int) -> None:
        query, buffers = self._queries[name], self._buffers[name]
        with self._file.explaining_damage(), self._file.batches(query, low, high) as batches:
            for batch in batches:
                slot = buffers.write(slot, batch)
        if self._progress is not None:
            with self._lock:
                self._n_done += high - low
                self._progress(self._n_done, self._n_rows)


def _run(statement: adbc_driver_manager.AdbcStatement, sql: str) -> pa.RecordBatchReader:
    statement.set_sql_query(sql)
    stream, _ = statement.execute_query()
    return pa.RecordBatchReader.from_stream(stream)


def decode_text(raw: bytes) -> str:
    """Return the text of bytes that should be UTF-8; traces hold whatever a program gave to NVTX.

    Args:
        raw: Bytes from the file.
    """
    return raw.decode("utf-8", "replace")


def _check_header(path: Path) -> None:
    """Refuse what SQLite would read without complaint although part of it is gone."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(100)
    if not any(header):
        what = "empty" if size == 0 else "filled with zeros"
        raise SourceError(f"{path}: the file is {what}; its export was interrupted: export the report again")
    if not header.startswith(MAGIC) or len(header) < 100:
        raise SourceError(
            f"{path}: not an SQLite file; export it with: nsys export --type sqlite REPORT.nsys-rep"
        )
    page_size = int.from_bytes(header[16:18], "big")
    page_size = 65_536 if page_size == 1 else page_size
    n_pages = int.from_bytes(header[28:32], "big")
    # SQLite itself trusts the page count only where these two counters agree.
    is_count_valid = header[24:28] == header[92:96]
    if is_count_valid and size < n_pages * page_size:
        raise SourceError(
            f"{path}: the file is cut short: {size:,} of {n_pages * page_size:,} bytes are there; copy it again"
        )


def _check_no_pending_changes(path: Path) -> None:
    """Refuse a file whose newest content is still in a journal beside it: read alone it would be stale or torn."""
    real = path.resolve()  # SQLite keeps them beside the file that a link points to
    for suffix in ("-wal", "-journal"):
        journal = real.with_name(real.name + suffix)
        if journal.is_file() and journal.stat().st_size > 0:
            raise SourceError(
                f"{path}: {journal.name} beside it holds changes that are not in the file yet; close the program that"
                f" writes it, or settle them with: sqlite3 {path.name} 'PRAGMA wal_checkpoint(TRUNCATE)'"
            )
