"""Each damage does to the file what it says."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from tests.support.damage import DAMAGES, KERNEL
from tests.support.synthetic_nsys import write_synthetic

BY_NAME = {damage.name: damage for damage in DAMAGES}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "good.sqlite"
    write_synthetic(path, 2_000, 2_200, 400, n_steps=3)
    return path


def kernels(path, columns='start, "end", demangledName'):
    """Return rows of kernels, read as SQLite reads by default."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"SELECT {columns} FROM {KERNEL} ORDER BY rowid").fetchall()


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_it_writes_a_file_and_leaves_the_good_one(damage, good, tmp_path):
    before = good.read_bytes()
    damage.make(good, tmp_path / "bad.sqlite")
    assert good.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} <= {"bad.sqlite", "bad.sqlite-wal"}
    assert (tmp_path / "bad.sqlite").read_bytes() != before


def test_names_are_unique():
    assert len(BY_NAME) == len(DAMAGES)


@pytest.mark.parametrize("name", ["zeroed-file", "random-bytes", "text-file"])
def test_files_of_other_kinds_are_no_databases(name, good, tmp_path):
    BY_NAME[name].make(good, tmp_path / "bad.sqlite")
    with pytest.raises(sqlite3.DatabaseError):
        kernels(tmp_path / "bad.sqlite")


@pytest.mark.parametrize(
    "name", ["truncated-10", "truncated-50", "truncated-99", "zeroed-tail", "overwritten-middle"]
)
def test_partial_files_are_not_whole(name, good, tmp_path):
    BY_NAME[name].make(good, tmp_path / "bad.sqlite")
    with closing(sqlite3.connect(tmp_path / "bad.sqlite")) as connection:
        try:
            verdict = connection.execute("PRAGMA integrity_check").fetchone()
        except sqlite3.DatabaseError:
            return
    assert verdict != ("ok",)


@pytest.mark.parametrize(
    ("name", "n_changed"),
    [
        ("reversed-times", 1),
        ("all-times-reversed", 2_000),
        ("negative-times", 1),
        ("null-end", 1),
        ("null-times", 2_000),
        ("text-in-integers", 1),
        ("unknown-name-id", 1),
        ("huge-times", 1),
        ("closed-wal", 0),
    ],
)
def test_it_changes_as_many_kernels_as_it_says(name, n_changed, good, tmp_path):
    BY_NAME[name].make(good, tmp_path / "bad.sqlite")
    pairs = zip(kernels(good), kernels(tmp_path / "bad.sqlite"), strict=True)
    assert sum(before != after for before, after in pairs) == n_changed


def test_a_pending_journal_holds_a_third_of_the_kernels(good, tmp_path):
    BY_NAME["pending-wal"].make(good, tmp_path / "bad.sqlite")
    # Alone, and copied before the read below, which moves the journal into the file.
    (tmp_path / "alone.sqlite").write_bytes((tmp_path / "bad.sqlite").read_bytes())
    assert sorted(kernels(tmp_path / "bad.sqlite")) == sorted(kernels(good))
    assert kernels(tmp_path / "alone.sqlite", "count(*)") == [(1_334,)]
