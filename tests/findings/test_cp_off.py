"""Finding `cp-off`: context parallelism is claimed, and nothing of it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.diagnosed import findings, report_of
from tests.support.simulated_schemes import FORWARD_KERNEL, SEND_RECV_KERNEL
from tests.support.tiny_export import TinyExport

KEY = ("cp-off", None)


def attention_only() -> TinyExport:
    """
    stream 7    [flash][flash]
    """
    export = TinyExport().range("step 0", 0, 50)
    return export.kernel(FORWARD_KERNEL, 100, 50_000, launch=10).kernel(
        FORWARD_KERNEL, 50_000, 99_000, launch=20
    )


@pytest.mark.parametrize("text", ["CP_P2P attention", "ring_attn forward", "context_parallel", "Ulysses"])
def test_a_range_that_claims_it(tmp_path: Path, text: str) -> None:
    row = findings(report_of(attention_only().range(text, 5, 40), tmp_path))[KEY]
    assert row["confidence"] == "medium"
    assert text in row["summary"]


@pytest.mark.parametrize("text", ["attention", "string_attention", "monitoring.attn", "copy"])
def test_a_range_that_claims_nothing(tmp_path: Path, text: str) -> None:
    assert KEY not in findings(report_of(attention_only().range(text, 5, 40), tmp_path))


def test_a_run_that_states_it(tmp_path: Path) -> None:
    row = findings(report_of(attention_only().run(scheme="ring", cp_size=4), tmp_path))[KEY]
    assert row["confidence"] == "high"
    assert "ring on 4 ranks" in row["summary"]


@pytest.mark.parametrize(("scheme", "cp_size"), [("single", 4), ("ring", 1)])
def test_a_run_that_states_none(tmp_path: Path, scheme: str, cp_size: int) -> None:
    assert KEY not in findings(report_of(attention_only().run(scheme=scheme, cp_size=cp_size), tmp_path))


def test_with_traffic_the_claim_is_true(tmp_path: Path) -> None:
    export = attention_only().range("ring_attn forward", 5, 40)
    export.kernel(SEND_RECV_KERNEL, 100, 30_000, stream=13, launch=15)
    assert KEY not in findings(report_of(export, tmp_path))


def test_traffic_outside_the_steps_is_none_of_theirs(tmp_path: Path) -> None:
    export = attention_only().range("ring_attn forward", 5, 40)
    export.kernel(SEND_RECV_KERNEL, 200_000, 230_000, stream=13, launch=150_000)
    assert KEY in findings(report_of(export, tmp_path))
