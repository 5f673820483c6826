"""Predictions: against simulated runs that really have the change, and against runs of the schemes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cptrace
from cptrace import WhatIf, WhatIfOptions
from cptrace.errors import SourceError, UsageError
from cptrace.what_if import SCHEMA, fixable, parse_fixes
from tests.support.shared_traces import ROOT
from tests.support.simulated_run import Host, step_ns, write
from tests.support.simulated_schemes import COMPUTE, DKV, KV, Ring
from tests.support.tiny_export import TinyExport

CALLS_NS = 2_000  # a mended run makes an event's record more or less


def predicted(ring: Ring, folder: Path, **options: object) -> WhatIf:
    path = write(ring.hosts(), folder / "run.sqlite")
    return cptrace.whatif(path, WhatIfOptions(**options))


@pytest.mark.parametrize(
    ("ring", "fixes", "mended"),
    [
        (Ring(n_buffers=1), ("single-buffer",), Ring()),
        (Ring(dkv_stream=KV), ("shared-communicator",), Ring()),
        (Ring(kv_stream=COMPUTE, dkv_stream=COMPUTE), ("shared-stream", "shared-communicator"), Ring()),
        (Ring(n_buffers=1, dkv_stream=KV), ("single-buffer", "shared-communicator"), Ring()),
        (
            Ring(n_buffers=1, dkv_stream=KV, aside_ns=20_000),
            ("single-buffer", "shared-communicator"),
            Ring(aside_ns=20_000),
        ),
        (Ring(n_buffers=1, dkv_stream=KV), ("single-buffer",), Ring(dkv_stream=KV)),
        (Ring(n_buffers=1, dkv_stream=KV), ("shared-communicator",), Ring(n_buffers=1)),
        (Ring(blocks_host=True), ("missing-event:host-sync",), Ring()),
        (Ring(blocks_host=True), ("missing-event",), Ring()),
        (Ring(attention_ns=(500_000, 500_000, 1_000_000, 500_000)), ("peer-wait:straggler",), Ring()),
        (
            Ring(attention_ns=(500_000, 500_000, 1_000_000, 500_000), n_buffers=1),
            ("peer-wait", "single-buffer"),
            Ring(),
        ),
        (Ring(attention_ns=(200_000, 400_000, 600_000, 800_000)), ("imbalance",), Ring()),
        (Ring(held_ns=200_000), ("queue-order",), Ring()),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
def test_fixes_alone_and_together(tmp_path: Path, ring: Ring, fixes: tuple[str, ...], mended: Ring) -> None:
    found = predicted(ring, tmp_path, fixes=fixes)
    assert found.recorded_step_ns == step_ns(ring.hosts())
    most_off = 10_000 if ring.blocks_host or ring.held_ns else CALLS_NS
    assert found.predicted_step_ns == pytest.approx(step_ns(mended.hosts()), abs=most_off)
    assert {fix.status for fix in found.fixes} == {"applied"}
    assert [row.rank for row in found.ranks] == [0, 1, 2, 3]
    assert max(row.predicted_step_ns for row in found.ranks) == found.predicted_step_ns


def test_a_fix_alone_is_told_beside_all_together(tmp_path: Path) -> None:
    ring = Ring(n_buffers=1, dkv_stream=KV)
    found = predicted(ring, tmp_path, fixes=("single-buffer", "shared-communicator"))
    alone = [fix.alone_step_ns for fix in found.fixes]
    truth = [step_ns(ring.but(n_buffers=2).hosts()), step_ns(ring.but(dkv_stream=DKV).hosts())]
    assert alone == pytest.approx(truth, abs=CALLS_NS)


def test_a_prediction_is_that_of_the_finding(tmp_path: Path) -> None:
    path = write(Ring(n_buffers=1).hosts(), tmp_path / "run.sqlite")
    found = {row["code"]: row for row in cptrace.analyze(path).rows("findings")}
    mended = cptrace.whatif(path, WhatIfOptions(fixes=("single-buffer",)))
    assert mended.predicted_step_ns == found["single-buffer"]["predicted_step_ns"]


def test_what_is_not_there_needs_no_fix(tmp_path: Path) -> None:
    found = predicted(Ring(), tmp_path, fixes=("single-buffer", "missing-event:host-sync"))
    assert [fix.reason for fix in found.fixes] == [
        "single-buffer was not found; nothing to fix",
        "missing-event (host-sync) was not found; nothing to fix",
    ]
    assert found.predicted_step_ns == found.recorded_step_ns


def test_what_could_not_be_looked_for_is_said_with_the_reason(tmp_path: Path) -> None:
    export = TinyExport().kernel("nvjet", 0, 10_000, launch=1)
    found = cptrace.whatif(export.write(tmp_path / "t.sqlite"), WhatIfOptions(fixes=("single-buffer",)))
    assert found.fixes[0].status == "not-applicable"
    assert "no context-parallel scheme was recognised" in found.fixes[0].reason


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 2.0])
def test_transfers_that_take_another_time(tmp_path: Path, factor: float) -> None:
    found = predicted(Ring(), tmp_path, transfer_scale=factor)
    truth = step_ns(Ring(transfer_ns=(int(400_000 * factor),)).hosts())
    assert found.predicted_step_ns == pytest.approx(truth, abs=CALLS_NS)


def test_one_rank_with_another_link(tmp_path: Path) -> None:
    found = predicted(Ring(), tmp_path, transfer_scale=4.0, ranks=(1,))
    truth = step_ns(Ring(transfer_ns=(400_000, 1_600_000, 400_000, 400_000)).hosts())
    assert found.predicted_step_ns == pytest.approx(truth, abs=CALLS_NS)
    assert "on rank 1" in found.assumptions[-1]


def test_one_rank_with_another_device(tmp_path: Path) -> None:
    ring = Ring(attention_ns=(500_000, 500_000, 1_000_000, 500_000))
    found = predicted(ring, tmp_path, compute_scale=0.5, ranks=(2,))
    assert found.predicted_step_ns == step_ns(Ring().hosts())


def test_a_factor_and_a_fix_of_the_same_ops(tmp_path: Path) -> None:
    """A straggler at its peers' speed, and all devices twice as fast."""
    ring = Ring(attention_ns=(500_000, 500_000, 1_000_000, 500_000), is_forward_only=True)
    found = predicted(ring, tmp_path, fixes=("peer-wait",), compute_scale=0.5)
    assert found.predicted_step_ns == step_ns(ring.but(attention_ns=(250_000,)).hosts())


SAMPLES = ROOT / "samples"


def test_another_link_is_what_a_run_with_it_takes() -> None:
    """The samples differ in their link alone: 0.1 and 0.4 Gbit/s."""
    slow, fast = SAMPLES / "ring-slow-link-virtual.sqlite", SAMPLES / "ring-virtual.sqlite"
    there = cptrace.whatif(fast, WhatIfOptions(link_gbps=0.1))
    back = cptrace.whatif(slow, WhatIfOptions(link_gbps=0.4))
    assert there.predicted_step_ns == pytest.approx(recorded_step(slow), rel=1e-6)
    assert back.predicted_step_ns == pytest.approx(recorded_step(fast), rel=1e-6)


def recorded_step(path: Path) -> int:
    """Return the recorded step time of a run."""
    return cptrace.whatif(path, WhatIfOptions(transfer_scale=1.0)).recorded_step_ns


@pytest.mark.parametrize("is_emulated", [False, True])
def test_a_link_that_was_not_recorded_cannot_be_compared(tmp_path: Path, is_emulated: bool) -> None:
    """Neither a real link, nor an emulated run on the real clock, whose link is that of the machine."""
    export = TinyExport().kernel("nvjet", 0, 10_000, launch=1)
    if is_emulated:
        export.run(device_kind="cpu-emulated", clock="real", link_gbps=0.4)
    with pytest.raises(UsageError, match="--scale-transfer"):
        cptrace.whatif(export.write(tmp_path / "t.sqlite"), WhatIfOptions(link_gbps=1.0))


def test_a_trace_without_device_work_predicts_nothing(tmp_path: Path) -> None:
    path = TinyExport().call("cudaFree", 0, 1).write(tmp_path / "t.sqlite")
    with pytest.raises(SourceError, match="needs device work"):
        cptrace.whatif(path, WhatIfOptions(transfer_scale=0.5))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "nothing was asked for"),
        ({"fixes": ("single",)}, "there is no finding 'single'"),
        ({"fixes": ("missing-event:never",)}, "its forms are: host-sync, race"),
        ({"fixes": ("missing-event:race",)}, "no gain is predicted"),
        ({"fixes": ("required-order",)}, "no gain is predicted"),
        ({"link_gbps": 1.0, "transfer_scale": 1.0}, "give one of them"),
        ({"link_gbps": 1e9}, "cannot be meant"),
        ({"transfer_scale": 0.0}, "above 0"),
        ({"compute_scale": float("nan")}, "above 0"),
        ({"compute_scale": 1e6}, "between 0.001 and 1000"),
        ({"fixes": ("single-buffer",), "ranks": (0,)}, "--rank says whose"),
        ({"transfer_scale": 0.5, "ranks": (7,)}, "it has ranks 0, 1, 2, 3"),
    ],
)
def test_what_cannot_be_meant(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        cptrace.whatif(SAMPLES / "ring-virtual.sqlite", WhatIfOptions(**options))


def test_everything_that_can_be_fixed_can_be_asked_for() -> None:
    assert len(parse_fixes(fixable())) == len(fixable()) >= 8


def test_json_is_the_same_bytes_and_has_all() -> None:
    options = WhatIfOptions(fixes=("single-buffer",), transfer_scale=0.5)
    path = SAMPLES / "ring-single-buffer-virtual.sqlite"
    text = cptrace.whatif(path, options).to_json()
    assert text == cptrace.whatif(cptrace.open_trace(path), options).to_json()
    document = json.loads(text)
    assert document["schema"] == SCHEMA == "cptrace.whatif/1"
    assert set(document) == {
        "schema", "path", "device_kind", "scheme", "n_steps", "recorded_step_ns", "predicted_step_ns", "ranks",
        "fixes", "assumptions",
    }  # fmt: skip
    assert set(document["ranks"][0]) == {"rank", "recorded_step_ns", "predicted_step_ns"}
    assert set(document["fixes"][0]) == {"code", "form", "status", "reason", "alone_step_ns"}


def test_what_is_found_but_has_no_gain_is_not_called_absent(tmp_path: Path) -> None:
    """
    host        launch attention  sync  [pause    ] launch attention  sync
    stream 7      [attention     ]                    [attention     ]       step times do not contain the pause
    """
    host = Host(0)
    for number in range(3):
        with host.scope(f"step {number}"):
            host.launch("flash_fwd_kernel", 1_000_000)
            host.sync()
        host.pause(400_000)
    found = cptrace.whatif(write([host], tmp_path / "run.sqlite"), WhatIfOptions(fixes=("late-launch",)))
    (fix,) = found.fixes
    assert fix.status == "not-applicable"
    assert fix.reason == "late-launch (between-steps) was found, and no gain can be predicted for it"
