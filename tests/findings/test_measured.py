"""What a finding says is of what is accounted for: of all steps, or of one, never of a warm-up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import cptrace
from cptrace.report import Report
from cptrace.requests import AnalyzeOptions, ScopeRequest, WindowRequest
from tests.support.diagnosed import Key, findings
from tests.support.simulated_run import write
from tests.support.simulated_schemes import COMPUTE, KV, Ring

BROKEN = {
    ("single-buffer", None): Ring(n_buffers=1),
    ("shared-stream", None): Ring(kv_stream=COMPUTE),
    ("shared-communicator", None): Ring(dkv_stream=KV, transfer_ns=(800_000,)),
    ("missing-event", "host-sync"): Ring(blocks_host=True),
    ("missing-event", "race"): Ring(waits=False),
    ("late-launch", "in-steps"): Ring(pause_ns=300_000),
    ("required-order", "transfer-bound"): Ring(transfer_ns=(800_000,)),
}


@pytest.mark.parametrize("key", BROKEN, ids=lambda key: "-".join(filter(None, key)))
def test_what_is_said_of_all_steps_is_the_sum_of_what_is_said_of_each(key: Key, tmp_path: Path) -> None:
    """Three steps, each behind a synchronisation of the device: what is wrong in one is wrong in each."""
    path = write(BROKEN[key].but(n_steps=3, syncs_after_step=True).hosts(), tmp_path / "run.sqlite")
    report = cptrace.analyze(path)
    each = [_of(path, *_extent(report, step)) for step in range(3)]
    whole = findings(report)[key]
    parts = [findings(part)[key] for part in each]
    assert whole["value"] == sum(row["value"] for row in parts)
    if whole["unit"] != "ns" or re.match(r"\d+ transfers", whole["summary"]):
        assert _count(whole["summary"]) == sum(_count(row["summary"]) for row in parts)
    for step, row in enumerate(parts):
        start, end = _extent(report, step)
        assert start <= row["evidence"][0]["start_ns"] < end


def _extent(report: Report, step: int) -> tuple[int, int]:
    rows = [row for row in report.rows("steps") if row["step"] == step]
    return min(row["start_ns"] for row in rows), max(row["end_ns"] for row in rows)


def _of(path: Path, start_ns: int, end_ns: int) -> Report:
    return cptrace.analyze(
        path, AnalyzeOptions(ScopeRequest(window=WindowRequest(start_ns=start_ns, end_ns=end_ns)))
    )


def _count(summary: str) -> int:
    match = re.search(r"\d+", summary)
    assert match is not None
    return int(match.group())
