"""Which scheme a trace shows: by our labels, by the mix of its ops, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

import cptrace
from cptrace.report import Row
from cptrace.requests import AnalyzeOptions, ScopeRequest, WindowRequest
from tests.instrumented.conftest import run_apart
from tests.support.diagnosed import report_of
from tests.support.shared_traces import ROOT, require_trace
from tests.support.simulated_schemes import (
    COMPUTE,
    DKV,
    FORWARD_KERNEL,
    GEMM_KERNEL,
    KV,
    SEND_RECV_KERNEL,
    Ring,
    ulysses,
)
from tests.support.tiny_export import TinyExport, edit

SAMPLES = {
    "all-gather-sliced-virtual": "all_gather_sliced",
    "all-gather-virtual": "all_gather",
    "ring-causal-virtual": "ring",
    "ring-gqa-forward-virtual": "ring",
    "ring-paced": "ring",
    "ring-single-buffer-virtual": "ring",
    "ring-slow-link-virtual": "ring",
    "ring-straggler-virtual": "ring",
    "ring-virtual": "ring",
    "te-causal-virtual": "te",
    "ulysses-chunked-virtual": "ulysses_chunked",
    "ulysses-virtual": "ulysses",
    "zigzag-ring-causal-virtual": "zigzag_ring",
}


def scheme_of(path: Path) -> Row:
    (row,) = cptrace.analyze(path).rows("schemes")
    return row


@pytest.mark.parametrize("path", sorted((ROOT / "samples").glob("*.sqlite")), ids=lambda path: path.stem)
def test_labels_of_samples(path: Path) -> None:
    row = scheme_of(path)
    assert (row["scheme"], row["confidence"], row["basis"]) == (SAMPLES[path.stem], "high", "label")


@pytest.mark.parametrize("stream", [COMPUTE, KV])
def test_ulysses_without_labels(tmp_path: Path, stream: int) -> None:
    """
    stream 7    gemm [exchange x3][attention][exchange] gemm gemm [exchange x3][attention][exchange] gemm
    """
    (row,) = report_of(ulysses(stream), tmp_path, has_ranges=False).rows("schemes")
    assert (row["scheme"], row["confidence"], row["basis"]) == ("ulysses", "medium", "pattern")
    assert "1 attention + 4 all_to_all" in row["evidence"]


@pytest.mark.parametrize("streams", [(KV, DKV), (KV, KV), (COMPUTE, COMPUTE)])
@pytest.mark.parametrize("is_forward_only", [True, False])
def test_rings_without_labels(tmp_path: Path, streams: tuple[int, int], is_forward_only: bool) -> None:
    """
    stream 7    gemm [attention 0][attention 1][attention 2][attention 3] gemm
    stream 13        [kv 0]       [kv 1]       [kv 2]                          P attentions, P - 1 transfers
    """
    ring = Ring(
        kv_stream=streams[0],
        dkv_stream=streams[1],
        is_forward_only=is_forward_only,
        n_steps=3,
        has_gemms=True,
    )
    (row,) = report_of(ring.hosts(), tmp_path, has_ranges=False).rows("schemes")
    assert (row["scheme"], row["confidence"], row["basis"]) == ("ring", "medium", "pattern")


def test_a_transfer_beside_the_only_attention_is_no_exchange_of_ulysses(tmp_path: Path) -> None:
    """
    stream 7    gemm [attention      ] gemm
    stream 13          [send_recv  ]            attention cannot need what runs while it does
    """
    export = TinyExport().kernel(GEMM_KERNEL, 0, 50_000, launch=1)
    export.kernel(FORWARD_KERNEL, 50_000, 150_000, launch=2)
    export.kernel(SEND_RECV_KERNEL, 70_000, 140_000, stream=13, launch=3)
    (row,) = report_of(export.kernel(GEMM_KERNEL, 150_000, 200_000, launch=4), tmp_path).rows("schemes")
    assert (row["scheme"], row["confidence"]) == ("unknown", "low")


@pytest.mark.parametrize(
    "name", ["ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "ncclDevKernel_Broadcast_RING_LL"]
)
def test_data_parallel_training_is_no_scheme(tmp_path: Path, name: str) -> None:
    """
    stream 7    gemm [attention] gemm
    stream 13                         [all-reduce of gradients]
    """
    export = (
        TinyExport().kernel(GEMM_KERNEL, 0, 50_000, launch=1).kernel(FORWARD_KERNEL, 50_000, 99_000, launch=2)
    )
    export.kernel(GEMM_KERNEL, 99_000, 150_000, launch=3).kernel(name, 150_000, 250_000, stream=13, launch=4)
    (row,) = report_of(export, tmp_path).rows("schemes")
    assert (row["scheme"], row["confidence"]) == ("unknown", "low")


def test_without_attention_there_is_no_scheme(tmp_path: Path) -> None:
    export = TinyExport().kernel(GEMM_KERNEL, 0, 50_000, launch=1)
    export.kernel(SEND_RECV_KERNEL, 50_000, 99_000, stream=13, launch=2)
    (row,) = report_of(export, tmp_path).rows("schemes")
    assert row["scheme"] == "unknown"
    assert "no attention kernel" in row["evidence"]


def test_ulysses_on_two_gpus_of_someone_else() -> None:
    row = scheme_of(require_trace("nsys/nsys-2026.2-ulysses-2gpu.sqlite"))
    assert (row["scheme"], row["confidence"], row["basis"]) == ("ulysses", "medium", "pattern")
    assert "34 attention calls" in row["evidence"]


MODELS = {"ring": "ring", "ulysses": "ulysses", "all_gather": "all_gather"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return runs of whole models, without a single range."""
    import json

    folder = tmp_path_factory.mktemp("models")
    small = {
        "model": "llama", "clock": "virtual", "cp_size": 4, "seq_len": 64, "heads": 8, "kv_heads": 8, "head_dim": 8,
        "hidden": 64, "ffn": 96, "layers": 3, "warmup": 0, "steps": 1, "check": False,
    }  # fmt: skip
    run_apart("specs", json.dumps([{**small, "scheme": scheme} for scheme in MODELS]), folder)
    return {
        scheme: edit(folder / f"{n}.sqlite", "DELETE FROM NVTX_EVENTS") for n, scheme in enumerate(MODELS)
    }


@pytest.mark.parametrize("scheme", MODELS)
def test_models_without_labels(models: dict[str, Path], scheme: str) -> None:
    report = cptrace.analyze(
        models[scheme], AnalyzeOptions(scope=ScopeRequest(window=WindowRequest(is_all=True)))
    )
    (row,) = report.rows("schemes")
    assert (row["scheme"], row["basis"]) == (MODELS[scheme], "pattern")
    assert row["confidence"] != "high"
