"""Ways to spoil an export, and what a reader owes its user for each.

Every entry of `DAMAGES` makes a bad file from a good export that holds device work. Use it as

    @pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
    def test_it(damage, tmp_path):
        damage.make(good, tmp_path / "bad.sqlite")
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

Expectation = Literal["refused", "refused-or-counted", "no-device", "same-answer", "refused-or-same-answer"]
"""What must happen; in all cases in one line of text, without a traceback and without touching the file.

refused                   exit code 3 or 4
refused-or-counted        exit code 3 or 4, or an answer that says how many rows it left out
no-device                 exit code 0, and the analyses of device work are listed as not applicable
same-answer               the answer that the good export gives
refused-or-same-answer    exit code 3 or 4, or the answer that the good export gives: nothing in between
"""

KERNEL: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
DEVICE_TABLES: Final = (KERNEL, "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")


@dataclass(frozen=True, slots=True)
class Damage:
    """One way to spoil an export.

    Attributes:
        name: What was done, for test ids.
        make: Writes the bad file: `make(good, out)`. It may write a journal beside `out`.
        expect: What a reader must do with it.
    """

    name: str
    make: Callable[[Path, Path], None]
    expect: Expectation


def _write_bytes(make: Callable[[int], bytes], good: Path, out: Path) -> None:
    out.write_bytes(make(good.stat().st_size))


def _truncate(fraction: float, good: Path, out: Path) -> None:
    content = good.read_bytes()
    out.write_bytes(content[: int(len(content) * fraction)])


def _zero_tail(good: Path, out: Path) -> None:
    """Keep the first half, as an export that was killed after it had reserved its space does."""
    content = good.read_bytes()
    half = len(content) // 2
    out.write_bytes(content[:half] + bytes(len(content) - half))


def _overwrite_middle(good: Path, out: Path) -> None:
    content = bytearray(good.read_bytes())
    low, high = len(content) // 4, len(content) * 3 // 4
    content[low:high] = random.Random(0).randbytes(high - low)
    out.write_bytes(content)


def _other_database(_good: Path, out: Path) -> None:
    _run(out, "CREATE TABLE orders (id INTEGER, price REAL)", "INSERT INTO orders VALUES (1, 2.5)")


def _empty_database(_good: Path, out: Path) -> None:
    _run(out, "CREATE TABLE t (x)", "DROP TABLE t")


def _edit(statements: tuple[str, ...], good: Path, out: Path) -> None:
    shutil.copyfile(good, out)
    _run(out, *statements)


def _empty_device_tables(good: Path, out: Path) -> None:
    shutil.copyfile(good, out)
    with closing(sqlite3.connect(out, isolation_level=None)) as connection:
        present = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        for table in present.intersection(DEVICE_TABLES):
            connection.execute(f"DELETE FROM {table}")


def _loosen(statements: tuple[str, ...], good: Path, out: Path) -> None:
    """Edit the kernels after their NOT NULL constraints have been dropped."""
    copied = f"CREATE TABLE loose AS SELECT * FROM {KERNEL}"
    _edit((copied, f"DROP TABLE {KERNEL}", f"ALTER TABLE loose RENAME TO {KERNEL}", *statements), good, out)


def _closed_wal(good: Path, out: Path) -> None:
    """Leave a database in WAL mode with no journal: its readers want to create one beside it."""
    _edit(("PRAGMA journal_mode = WAL",), good, out)


def _pending_wal(good: Path, out: Path) -> None:
    """Leave a third of the kernels in the journal only; the main file alone misleads without any error."""
    live = out.with_name(f"{out.name}.live")
    shutil.copyfile(good, live)
    third = f"FROM {KERNEL} WHERE rowid % 3 = 0"
    with closing(sqlite3.connect(live, isolation_level=None)) as connection:
        connection.execute(f"CREATE TEMP TABLE held AS SELECT * {third}")
        connection.execute(f"DELETE {third}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute(f"INSERT INTO {KERNEL} SELECT * FROM held")
        # Copied while open, because closing would move the journal into the main file.
        shutil.copyfile(live, out)
        shutil.copyfile(live.with_name(f"{live.name}-wal"), out.with_name(f"{out.name}-wal"))
    live.unlink()


def _run(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def _drop(*tables: str) -> tuple[str, ...]:
    return tuple(f"DROP TABLE IF EXISTS {table}" for table in tables)


def _update(assignment: str, where: str = "1") -> tuple[str, ...]:
    return (f"UPDATE {KERNEL} SET {assignment} WHERE {where}",)


ONE_ROW: Final = f"rowid = (SELECT max(rowid) FROM {KERNEL})"

DAMAGES: Final = (
    Damage("empty-file", partial(_write_bytes, lambda _size: b""), "refused"),
    Damage("zeroed-file", partial(_write_bytes, bytes), "refused"),
    Damage("random-bytes", partial(_write_bytes, lambda size: random.Random(0).randbytes(size)), "refused"),
    Damage("text-file", partial(_write_bytes, lambda _size: b"start,end\n1,2\n"), "refused"),
    Damage("truncated-10", partial(_truncate, 0.10), "refused"),
    Damage("truncated-50", partial(_truncate, 0.50), "refused"),
    Damage("truncated-99", partial(_truncate, 0.99), "refused"),
    Damage("zeroed-tail", _zero_tail, "refused"),
    Damage("overwritten-middle", _overwrite_middle, "refused"),
    Damage("empty-database", _empty_database, "refused"),
    Damage("other-database", _other_database, "refused"),
    Damage("no-strings", partial(_edit, _drop("StringIds")), "refused-or-counted"),
    Damage("no-device-tables", partial(_edit, _drop(*DEVICE_TABLES)), "no-device"),
    Damage("empty-device-tables", _empty_device_tables, "no-device"),
    Damage("no-start-column", partial(_edit, (f"ALTER TABLE {KERNEL} RENAME start TO begin",)), "refused"),
    Damage(
        "reversed-times",
        partial(_edit, _update('start = "end", "end" = start', ONE_ROW)),
        "refused-or-counted",
    ),
    Damage(
        "all-times-reversed", partial(_edit, _update('start = "end", "end" = start')), "refused-or-counted"
    ),
    Damage(
        "negative-times",
        partial(_edit, _update('start = -"end", "end" = -start', ONE_ROW)),
        "refused-or-counted",
    ),
    Damage("null-end", partial(_loosen, _update('"end" = NULL', ONE_ROW)), "refused-or-counted"),
    Damage("null-times", partial(_loosen, _update('start = NULL, "end" = NULL')), "refused-or-counted"),
    Damage("text-in-integers", partial(_edit, _update("start = 'soon'", ONE_ROW)), "refused-or-counted"),
    Damage(
        "unknown-name-id",
        partial(_edit, _update("demangledName = 4000000000", ONE_ROW)),
        "refused-or-counted",
    ),
    Damage(
        "huge-times", partial(_edit, _update('"end" = 9223372036854775807', ONE_ROW)), "refused-or-counted"
    ),
    Damage("closed-wal", _closed_wal, "same-answer"),
    Damage("pending-wal", _pending_wal, "refused-or-same-answer"),
)
"""Every way, in the order of how much is left of the file."""
