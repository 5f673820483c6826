"""A run that this machine cannot hold is refused before it starts, with numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cptrace.capture import capacity
from cptrace.capture.run_spec import RunSpec
from cptrace.errors import RunError

DEFAULT = RunSpec()


def test_the_default_fits() -> None:
    capacity.require_capacity(DEFAULT)


def test_too_many_ranks_for_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity.os, "cpu_count", lambda: 2)
    capacity.require_capacity(replace(DEFAULT, cp_size=16))
    with pytest.raises(RunError, match="--cp-size 32: 2 cores can emulate at most 16 ranks"):
        capacity.require_capacity(replace(DEFAULT, cp_size=32))


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_bytes", lambda: 3 << 30)
    with pytest.raises(
        RunError, match=r"need about .* GiB, this machine has 3.0 GiB available; use a shorter"
    ):
        capacity.require_capacity(replace(DEFAULT, seq_len=1 << 20))


def test_a_machine_that_does_not_say_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_bytes", lambda: None)
    capacity.require_capacity(replace(DEFAULT, seq_len=1 << 30))


@pytest.mark.parametrize("change", [{"seq_len": 2048}, {"layers": 8}, {"heads": 16}, {"dtype": "fp64"}])
def test_more_of_anything_needs_more(change: dict[str, object]) -> None:
    assert capacity.estimate_bytes(replace(DEFAULT, **change)) > capacity.estimate_bytes(DEFAULT)


@pytest.mark.parametrize(
    "change", [{"scheme": "te", "cp_size": 8}, {"scheme": "all_gather"}, {"kv_heads": 4}]
)
def test_a_scheme_counts_with_what_it_keeps(change: dict[str, object]) -> None:
    """Of long sequences: the whole K and V of an all-gather, a partial output per hop, fewer KV heads."""
    long = replace(DEFAULT, seq_len=1 << 16)
    grows = change != {"kv_heads": 4}
    assert (capacity.estimate_bytes(replace(long, **change)) > capacity.estimate_bytes(long)) == grows


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_CGROUP", tmp_path)
    machine = capacity.available_bytes()
    assert machine is not None
    assert machine > 1 << 26
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert capacity.available_bytes() > 1 << 26
    (tmp_path / "memory.max").write_text("5000\n")
    assert capacity.available_bytes() == 4000
