"""Which scheme a trace shows: by our labels, by the mix of its ops, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import cptrace
from cptrace.analyses import make_scope
from cptrace.recognition import recognise
from cptrace.report import Row
from cptrace.requests import AnalyzeOptions, ScopeRequest, WindowRequest
from tests.instrumented.conftest import run_apart
from tests.support.diagnosed import findings, lost_time, report_of
from tests.support.shared_traces import ROOT, require_trace
from tests.support.simulated_run import Host, write
from tests.support.simulated_schemes import (
    ALL_GATHER_KERNEL,
    CAUSAL_KERNEL,
    COMPUTE,
    DKV,
    FORWARD_KERNEL,
    FULL_KERNEL,
    GEMM_KERNEL,
    KV,
    SECOND,
    SEND_RECV_KERNEL,
    Ring,
    TeRing,
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


def places_of(hosts: Sequence[Host], path: Path, *, has_ranges: bool) -> tuple[str, pd.DataFrame]:
    """Return the scheme of a run, and what each of its ops is, by row."""
    trace = cptrace.open_trace(write(hosts, path, has_ranges=has_ranges))
    scope = make_scope(trace, ScopeRequest())
    found = recognise(scope.trace, scope.launches)
    places, kinds = found.places, found.places.kinds
    what, tensor = (np.array(names, object)[places.kind] for names in (kinds.what, kinds.tensor))
    columns = {"what": what, "tensor": tensor, "hop": places.hop, "is_backward": places.is_backward}
    return found.scheme, pd.DataFrame(columns, index=places.rows)


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
@pytest.mark.parametrize("is_forward_only", [True, False])
@pytest.mark.parametrize("corrects_in_loop", [True, False])
@pytest.mark.parametrize("sends_apart", [True, False])
def test_transformer_engine_without_labels(
    tmp_path: Path, n_ranks: int, is_forward_only: bool, corrects_in_loop: bool, sends_apart: bool
) -> None:
    """
    stream 7    gemm [attention 0]     [attention 2]     [merges] gemm [attention 0][merge][attention 1][merge] gemm
    stream 9           [attention 1]     [attention 3]
    stream 13        [kv 0]  [kv 1]  [kv 2]                            [kv  ]               [kv+dkv]
    """
    ring = TeRing(
        n_ranks=n_ranks,
        is_forward_only=is_forward_only,
        corrects_in_loop=corrects_in_loop,
        sends_apart=sends_apart,
    )
    report = report_of(ring.hosts(), tmp_path, has_ranges=False)
    (row,) = report.rows("schemes")
    assert (row["scheme"], row["confidence"], row["basis"]) == ("te", "medium", "pattern")
    assert f"alternates between two streams in {n_ranks} of {n_ranks} forward calls" in row["evidence"]
    assert not lost_time(report)


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("streams", [(COMPUTE, SECOND, KV), (COMPUTE, COMPUTE, COMPUTE)])
def test_messages_of_transformer_engine_are_what_labels_say(
    tmp_path: Path, n_ranks: int, streams: tuple[int, int, int]
) -> None:
    """
    stream 7    [attention 0][merge 0][attention 1][merge 1][attention 2][merge 2][attention 3][merge 3]
    stream 13   [kv 0      ]          [kv+dkv 1  ]          [kv+dkv 2  ]          [dkv 3     ]
    """
    hosts = TeRing(n_ranks=n_ranks, streams=streams[:2], kv_stream=streams[2]).hosts()
    labelled = places_of(hosts, tmp_path / "labelled.sqlite", has_ranges=True)[1]
    scheme, found = places_of(hosts, tmp_path / "plain.sqlite", has_ranges=False)
    assert scheme == "te"
    behind_the_loop = (labelled["what"] == "merge") & ~labelled["is_backward"]
    assert behind_the_loop.sum() == n_ranks**2
    expected = labelled[~behind_the_loop]
    pd.testing.assert_frame_equal(found.loc[expected.index], expected)
    # Which of the merges behind the loop is of which hop cannot be told: each may read all that is before it.
    assert set(found.loc[behind_the_loop.index[behind_the_loop], "hop"]) == {n_ranks - 1}


def test_a_correction_in_the_loop_is_of_the_hop_that_has_ended(tmp_path: Path) -> None:
    """
    stream 7    [attention 0][c 0][attention 2   ][c 2]
    stream 9      [attention 1          ][c 1]          attention 1 still runs when c 0 starts
    """
    hosts = TeRing(n_ranks=3, corrects_in_loop=True, is_forward_only=True).hosts()
    _, found = places_of(hosts, tmp_path / "run.sqlite", has_ranges=False)
    merges = found[found["what"] == "merge"]
    assert merges["hop"].value_counts().to_dict() == {0: 3, 1: 3, 2: 3 * 3}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"n_buffers": 1}, "single-buffer"),
        ({"streams": (COMPUTE, COMPUTE), "kv_stream": COMPUTE}, "shared-stream"),
    ],
)
def test_what_is_wrong_with_transformer_engine_is_found_without_labels(
    tmp_path: Path, changes: dict[str, object], key: str
) -> None:
    """
    one buffer  stream 7   [attention 0]             [attention 2]
                stream 9              [attention 1]              [attention 3]
                stream 13  [kv 0]                [kv 1]      [kv 2]
    one stream  stream 7   [kv 0][attention 0][kv 1][attention 1]
    """
    hosts = TeRing().but(**changes).hosts()
    labelled, plain = (
        findings(report_of(hosts, tmp_path, has_ranges=has_ranges)) for has_ranges in (True, False)
    )
    assert plain[key, None]["predicted_step_ns"] == labelled[key, None]["predicted_step_ns"]
    assert (labelled[key, None]["confidence"], plain[key, None]["confidence"]) == ("high", "medium")


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("streams", [(COMPUTE, COMPUTE), (COMPUTE, SECOND)])
@pytest.mark.parametrize("what", ["sends_behind", "sends_ahead"])
def test_other_messages_than_those_of_transformer_engine(
    tmp_path: Path, n_ranks: int, streams: tuple[int, int], what: str
) -> None:
    """
    stream 7    [attention 0]           [attention 1]           [attention 2]
    behind                   [kv+dkv 0]              [kv+dkv 1]               [dkv 2]     gradients of its own hop
    ahead       [0 ][1 ][2 ]                                                              no gradients at all
    """
    ring = TeRing(n_ranks=n_ranks, streams=streams).but(**{what: True})
    (row,) = report_of(ring.hosts(), tmp_path, has_ranges=False).rows("schemes")
    assert (row["scheme"], row["confidence"]) == ("unknown", "low")


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_with_attention_in_one_stream_late_messages_may_carry_gradients_of_their_own_hop(
    tmp_path: Path, n_ranks: int
) -> None:
    """
    stream 7    [attention 0][attention 1]
    stream 13   [kv]                      [dkv]     back home from attention 1, or of attention 0 and late?
    """
    ring = TeRing(n_ranks=n_ranks, streams=(COMPUTE, COMPUTE), n_buffers=1)
    (row,) = report_of(ring.hosts(), tmp_path, has_ranges=False).rows("schemes")
    assert (row["scheme"], row["confidence"]) == ("unknown", "low")


def test_exchanges_of_heads_around_it_are_no_messages_of_transformer_engine(tmp_path: Path) -> None:
    """
    stream 7    gemm            [attention 0]     [attention 2]     [merges]       gemm
    stream 9                      [attention 1]     [attention 3]
    stream 13                   [kv 0]  [kv 1]  [kv 2]                               3 here, and 3 there: were these
    stream 14        [q  ][kv  ]                                            [out]    sent and received in two streams?
    """
    ring = TeRing(exchanges_heads=True, is_forward_only=True)
    (row,) = report_of(ring.hosts(), tmp_path, has_ranges=False).rows("schemes")
    assert (row["scheme"], row["confidence"]) == ("unknown", "low")


def test_sharded_weights_hide_no_transformer_engine(tmp_path: Path) -> None:
    """
    stream 7    gemm [attention 0]     [attention 2]     [merges] gemm
    stream 9           [attention 1]     [attention 3]
    stream 13        [kv 0]  [kv 1]  [kv 2]
    stream 14        [all-gather of weights]                              is not the scheme's
    """
    scheme, found = places_of(TeRing(gathers_weights=True).hosts(), tmp_path / "run.sqlite", has_ranges=False)
    assert scheme == "te"
    assert set(found["what"]) == {"attention", "send_recv", "merge"}


def test_forward_alone_and_in_one_stream_transformer_engine_is_a_ring(tmp_path: Path) -> None:
    """
    stream 7    gemm [attention 0][attention 1][attention 2][attention 3][merges] gemm
    stream 13        [kv 0]       [kv 1]       [kv 2]
    """
    ring = TeRing(streams=(COMPUTE, COMPUTE), is_forward_only=True)
    (row,) = report_of(ring.hosts(), tmp_path, has_ranges=False).rows("schemes")
    assert row["scheme"] == "ring"


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_a_causal_zigzag_without_labels(tmp_path: Path, n_ranks: int) -> None:
    """
    stream 7    gemm [causal 0][full 1][full 2][full 3] gemm        on every rank
    stream 13        [kv 0]    [kv 1]  [kv 2]
    """
    ring = Ring(n_ranks=n_ranks, has_gemms=True, kernels=(CAUSAL_KERNEL, FULL_KERNEL))
    (row,) = report_of(ring.hosts(), tmp_path, has_ranges=False).rows("schemes")
    assert (row["scheme"], row["confidence"], row["basis"]) == ("zigzag_ring", "medium", "pattern")
    assert "the causal one" in row["evidence"]


@pytest.mark.parametrize(
    "kernels", [(FULL_KERNEL,), (CAUSAL_KERNEL,), (CAUSAL_KERNEL, CAUSAL_KERNEL, FULL_KERNEL)]
)
def test_other_rings_are_not_taken_for_a_zigzag(tmp_path: Path, kernels: tuple[str, ...]) -> None:
    """
    no mask     gemm [full 0  ][full 1  ][full 2  ][full 3  ] gemm
    stripes     gemm [causal 0][causal 1][causal 2][causal 3] gemm
    other       gemm [causal 0][causal 1][full 2  ][full 3  ] gemm
    """
    (row,) = report_of(Ring(has_gemms=True, kernels=kernels).hosts(), tmp_path, has_ranges=False).rows(
        "schemes"
    )
    assert row["scheme"] == "ring"


def test_one_rank_does_not_show_a_zigzag(tmp_path: Path) -> None:
    """
    stream 7    gemm [causal 0][full 1][full 2][full 3] gemm        of one rank: with contiguous chunks, the last one
    """
    hosts = Ring(has_gemms=True, kernels=(CAUSAL_KERNEL, FULL_KERNEL)).hosts()
    (row,) = report_of(hosts[-1:], tmp_path, has_ranges=False).rows("schemes")
    assert row["scheme"] == "ring"


def test_a_causal_ring_of_contiguous_chunks_is_no_zigzag(tmp_path: Path) -> None:
    """
    rank 0      gemm [causal 0] gemm
    rank 1      gemm [causal 0][full 1] gemm
    """
    ring = Ring(has_gemms=True, kernels=(CAUSAL_KERNEL, FULL_KERNEL), skips_masked=True)
    (row,) = report_of(ring.hosts(), tmp_path, has_ranges=False).rows("schemes")
    assert row["scheme"] == "unknown"


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


MODELS = {"ring": "ring", "te": "te", "ulysses": "ulysses", "all_gather": "all_gather"}


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


@pytest.mark.parametrize("is_ahead", [True, False])
def test_gathers_of_sharded_weights_are_no_scheme(tmp_path: Path, is_ahead: bool) -> None:
    """
    stream 7    [gemm][gather of K, V][attention][gemm]      a scheme: made by the first, needed by the second
    or          [gemm        ][attention][gemm        ]
    stream 13      [weights]                [weights]        ahead of time: of the next layer's weights
    """
    export = TinyExport()
    for layer in range(6):
        at = 1_000_000 * layer
        export.kernel(GEMM_KERNEL, at, at + 300_000, launch=8 * layer + 1)
        start = at + (100_000 if is_ahead else 300_000)
        export.kernel(ALL_GATHER_KERNEL, start, start + 150_000, stream=13, launch=8 * layer + 2)
        export.kernel(FORWARD_KERNEL, at + 500_000, at + 700_000, launch=8 * layer + 3)
        export.kernel(GEMM_KERNEL, at + 700_000, at + 990_000, launch=8 * layer + 4)
    row = scheme_of(export.write(tmp_path / "t.sqlite"))
    assert row["scheme"] == ("unknown" if is_ahead else "all_gather")


@pytest.mark.parametrize(("n_attention", "scheme"), [(3, "all_gather_sliced"), (6, "unknown")])
def test_gathers_in_slices(tmp_path: Path, n_attention: int, scheme: str) -> None:
    """
    stream 7    [gemm]          [attention 0][attention 1][attention 2][gemm]
    stream 13         [gather 0][gather 1]   [gather 2]
    """
    export = TinyExport()
    for layer in range(4):
        at, number = 1_000_000 * layer, 20 * layer
        export.kernel(GEMM_KERNEL, at, at + 100_000, launch=number)
        each = 600_000 // n_attention
        for part in range(n_attention):
            start = at + 200_000 + each * part
            export.kernel(FORWARD_KERNEL, start, start + each - 1_000, launch=number + 1 + part)
        for part in range(3):
            start = at + 100_000 + 200_000 * part
            export.kernel(ALL_GATHER_KERNEL, start, start + 90_000, stream=13, launch=number + 10 + part)
    assert scheme_of(export.write(tmp_path / "t.sqlite"))["scheme"] == scheme
