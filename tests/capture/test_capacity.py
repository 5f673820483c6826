"""A run that this machine cannot hold is refused before it starts, with numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cptrace.capture import capacity
from cptrace.capture.presets import find_preset
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
        RunError,
        match=r"need about .* GiB \(.* per rank\), this machine has 3.0 GiB available; use a shorter",
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


LLAMA_7B = replace(DEFAULT, **find_preset("llama-7b").options, kv_heads=32)


def test_a_model_that_does_not_fit_is_refused_with_what_each_rank_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """32 blocks of 4 x 4096^2 + 3 x 4096 x 11008 weights and as many gradients in fp32: 48.3 GiB on every rank."""
    monkeypatch.setattr(capacity, "available_bytes", lambda: 64 << 30)
    with pytest.raises(RunError, match=r"4 ranks .* \(5\d\.\d GiB per rank, 48\.3 GiB of it weights and"):
        capacity.require_capacity(LLAMA_7B)
    with pytest.raises(RunError, match=r"8 ranks .* 24\.1 GiB of it weights"):
        capacity.require_capacity(replace(LLAMA_7B, tp_size=2, check=False))


def test_ranks_are_those_of_both_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity.os, "cpu_count", lambda: 1)
    capacity.require_capacity(replace(DEFAULT, model="llama", tp_size=2))
    with pytest.raises(RunError, match=r"--cp-size 4 --tp-size 4: 1 cores .* use --cp-size 2 or fewer with"):
        capacity.require_capacity(replace(DEFAULT, model="llama", tp_size=4))


@pytest.mark.parametrize("change", [{"hidden": 512}, {"ffn": 4096}, {"layers": 2}, {"tp_size": 1}])
def test_more_of_a_model_needs_more(change: dict[str, int]) -> None:
    model = replace(DEFAULT, model="llama", tp_size=2, check=False)
    assert capacity.estimate_rank_bytes(replace(model, **change)) > capacity.estimate_rank_bytes(model)
