"""Traffic against formula: what differs is named, what is not attention's stays apart, what cannot be told says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cptrace
from cptrace.renderers import RenderOptions, find_renderer
from cptrace.report import Report
from tests.support.tiny_export import TinyExport

RUN: dict[str, Any] = {
    "scheme": "ring", "cp_size": 2, "seq_len": 7, "padded_tokens": 1, "heads": 2, "kv_heads": 1, "head_dim": 4,
    "dtype": "fp32", "causal": False, "ulysses_size": 2, "layers": 1, "passes": ["forward"],
    "checks": {"fp8_messages": None},
}  # fmt: skip
HOP_BYTES = 2 * 4 * 1 * 4 * 4  # k and v, four tokens, one head of four fp32


def analyze(path: Path, sent: list[str], *, steps: int = 1, **changes: Any) -> Report:
    """Return the report of one rank whose every step has the given labels.

    host      step [0 ............ 20) step [20 ...
                  label [1 2) label [3 4)
    stream 7        kernel          kernel
    """
    export = TinyExport().domain(1, "cptrace").run(**{**RUN, **changes})
    for step in range(steps):
        begin = 20 * step
        export.range("step", begin, begin + 20, domain=1, payload=step)
        for number, label in enumerate(sent):
            at = begin + 2 * number + 1
            export.range(label, at, at + 1, domain=1).kernel("ncclDevKernel_SendRecv", at, at + 1, launch=at)
    return cptrace.analyze(export.write(path / "run.sqlite"))


def hop(n_bytes: int, tensor: str = "kv", *, layer: int = 0) -> str:
    return f"send_recv pass=forward layer={layer} hop=0 tensor={tensor} bytes={n_bytes} peers=1"


def text_of(report: Report) -> str:
    """Return the report's text in one line."""
    return " ".join(find_renderer("text").render(report, RenderOptions(width=200)).split())


def reason_in(report: Report) -> str:
    (entry,) = [entry for entry in report.not_applicable if entry.analysis == "traffic"]
    assert not report.rows("traffic")
    return entry.reason


def test_equal_traffic_takes_one_line(tmp_path: Path) -> None:
    report = analyze(tmp_path, [hop(HOP_BYTES)], steps=3)
    (row,) = report.rows("traffic")
    assert row == {
        "rank": 0, "part": "attention", "pass": "forward", "layer": 0, "n_steps": 3, "n_messages": 1,
        "bytes": HOP_BYTES, "expected_n_messages": 1, "expected_bytes": HOP_BYTES, "difference_bytes": 0,
        "by_tensor": [{"kind": "send_recv", "tensor": "kv", "n_messages": 1, "bytes": HOP_BYTES}],
    }  # fmt: skip
    assert "as the scheme's formula says, to the byte: forward 128 B in 1 message" in text_of(report)


@pytest.mark.parametrize(
    ("sent", "difference", "n_messages"),
    [([hop(HOP_BYTES + 4)], 4, 1), ([hop(HOP_BYTES // 2)] * 2, 0, 2), ([], -HOP_BYTES, 0)],
)
def test_a_difference_in_bytes_or_messages_is_shown(
    tmp_path: Path, sent: list[str], difference: int, n_messages: int
) -> None:
    if not sent:  # some other op, so that there is a step at all
        sent = ["merge pass=forward layer=0 hop=0"]
    report = analyze(tmp_path, sent)
    (row,) = report.rows("traffic")
    assert (row["difference_bytes"], row["n_messages"], row["expected_n_messages"]) == (
        difference,
        n_messages,
        1,
    )
    assert "NOT what the formula says" in text_of(report)


def test_steps_that_differ_have_rows_of_their_own(tmp_path: Path) -> None:
    export = TinyExport().domain(1, "cptrace").run(**RUN)
    for begin, n_bytes in ((0, HOP_BYTES), (20, HOP_BYTES + 8), (40, HOP_BYTES)):
        export.range("step", begin, begin + 20, domain=1)
        export.range(hop(n_bytes), begin + 1, begin + 2, domain=1)
        export.kernel("ncclDevKernel_SendRecv", begin + 1, begin + 2, launch=begin + 1)
    rows = cptrace.analyze(export.write(tmp_path / "run.sqlite")).rows("traffic")
    assert [(row["n_steps"], row["difference_bytes"]) for row in rows] == [(2, 0), (1, 8)]


def test_only_measured_steps_count(tmp_path: Path) -> None:
    export = TinyExport().domain(1, "cptrace").run(**RUN)
    for name, begin in (("warmup", 0), ("step", 20)):
        export.range(name, begin, begin + 20, domain=1)
        export.range(hop(HOP_BYTES), begin + 1, begin + 2, domain=1)
        export.kernel("ncclDevKernel_SendRecv", begin + 1, begin + 2, launch=begin + 1)
    (row,) = cptrace.analyze(export.write(tmp_path / "run.sqlite")).rows("traffic")
    assert (row["n_steps"], row["n_messages"]) == (1, 1)


def test_other_exchanges_are_counted_apart(tmp_path: Path) -> None:
    grads = "all_reduce pass=backward layer=0 tensor=grads bytes=1000 peers=1"
    report = analyze(tmp_path, [hop(HOP_BYTES), grads, grads])
    attention, other = report.rows("traffic")
    assert attention["difference_bytes"] == 0
    assert (other["part"], other["bytes"], other["n_messages"]) == ("other", 2000, 2)
    assert (other["expected_bytes"], other["difference_bytes"]) == (None, None)
    assert "besides attention, in a step of rank 0: all_reduce grads 2.0 KiB in 2 messages" in text_of(report)


def test_tensor_parallelism_splits_the_heads(tmp_path: Path) -> None:
    report = analyze(tmp_path, [hop(HOP_BYTES)], tp_size=2, heads=4, kv_heads=2)
    assert report.rows("traffic")[0]["difference_bytes"] == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scheme": "rung"}, "no such scheme"),
        ({"dtype": None}, "it has no None"),
        ({"checks": None}, "does not suffice"),
        ({"cp_size": 0}, "does not suffice"),
        ({"layers": "many"}, "does not suffice"),
        ({"passes": ["sideways"]}, "it has no 'sideways'"),
    ],
)
def test_a_description_without_what_the_formula_needs_is_no_error(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    assert said in reason_in(analyze(tmp_path, [hop(HOP_BYTES)], **changes))


def test_traces_of_others_have_no_formula(tmp_path: Path) -> None:
    export = TinyExport().kernel("ncclDevKernel_SendRecv", 1, 2, launch=1)
    reason = reason_in(cptrace.analyze(export.write(tmp_path / "other.sqlite")))
    assert "does not say which scheme ran; traces of `cptrace run` do" in reason


def test_a_run_without_its_ranges_cannot_be_counted(tmp_path: Path) -> None:
    export = TinyExport().run(**RUN).kernel("ncclDevKernel_SendRecv", 1, 2, launch=1)
    reason = reason_in(cptrace.analyze(export.write(tmp_path / "run.sqlite")))
    assert "our ranges of measured steps (domain cptrace)" in reason


def test_ranks_not_asked_for_are_left_out(tmp_path: Path) -> None:
    from cptrace.requests import AnalyzeOptions, ScopeRequest

    export = TinyExport().domain(1, "cptrace", pid=1).domain(1, "cptrace", pid=2).run(**RUN)
    for pid in (1, 2):
        export.range("step", 0, 20, domain=1, pid=pid).range(hop(HOP_BYTES), 1, 2, domain=1, pid=pid)
        export.kernel("ncclDevKernel_SendRecv", 1, 2, launch=1, pid=pid, device=pid)
    options = AnalyzeOptions(scope=ScopeRequest(ranks=(1,)))
    rows = cptrace.analyze(export.write(tmp_path / "run.sqlite"), options).rows("traffic")
    assert [row["rank"] for row in rows] == [1]


MODEL: dict[str, Any] = {"model": "llama", "hidden": 8, "ffn": 16}
SUM_BYTES = 2 * 8 * 8 * 4 // 2  # an all-reduce over two ranks of eight tokens, eight fp32 of hidden each


def block_sum(n_bytes: int, tensor: str = "attention_out", pass_name: str = "forward") -> str:
    return f"all_reduce pass={pass_name} layer=0 hop=0 tensor={tensor} bytes={n_bytes} peers=1"


@pytest.mark.parametrize(
    ("sent", "difference", "n_messages"),
    [
        ([SUM_BYTES, SUM_BYTES], 0, 2),
        ([SUM_BYTES, SUM_BYTES + 4], 4, 2),
        ([2 * SUM_BYTES], 0, 1),
        ([], -2 * SUM_BYTES, 0),
    ],
)
def test_what_a_model_sends_around_attention_has_a_formula(
    tmp_path: Path, sent: list[int], difference: int, n_messages: int
) -> None:
    """Heads split over the two ranks of scheme `tp`: attention itself sends nothing, two sums around it are due."""
    labels = [block_sum(n_bytes) for n_bytes in sent] or ["merge pass=forward layer=0 hop=0"]
    report = analyze(tmp_path, labels, scheme="tp", kv_heads=2, **MODEL)
    rows = {row["part"]: row for row in report.rows("traffic")}
    assert (rows["attention"]["bytes"], rows["attention"]["expected_bytes"]) == (0, 0)
    other = rows["other"]
    assert (other["n_messages"], other["expected_n_messages"]) == (n_messages, 2)
    assert (other["expected_bytes"], other["difference_bytes"]) == (2 * SUM_BYTES, difference)
    text = text_of(report)
    is_right = (difference, n_messages) == (0, 2)
    assert ("as the model's formula says on all ranks" in text) == is_right
    assert ("NOT what the formula says" in text) == (not is_right)
    assert "tp in llama: 2 ranks," in text


def test_gradients_are_due_once_in_the_backward_pass(tmp_path: Path) -> None:
    n_weights = 8 * ((2 * 2 + 2 * 1) * 4 + 3 * 16 + 2)
    sent = [hop(HOP_BYTES), block_sum(4 * n_weights, "grads", "backward")]
    report = analyze(tmp_path, sent, passes=["forward", "backward"], **MODEL)
    (other,) = [row for row in report.rows("traffic") if row["part"] == "other"]
    assert (other["pass"], other["n_messages"], other["difference_bytes"]) == ("backward", 1, 0)


def test_a_model_without_its_sizes_has_no_formula(tmp_path: Path) -> None:
    assert "it has no 'hidden'" in reason_in(analyze(tmp_path, [hop(HOP_BYTES)], model="llama"))


def test_the_mesh_is_told(tmp_path: Path) -> None:
    assert "ring in llama: 2 ranks x 4 that share the weights," in text_of(
        analyze(tmp_path, [hop(HOP_BYTES)], model="llama", tp_size=4, heads=8, kv_heads=4)
    )


def test_a_librarys_exchanges_have_no_labels(tmp_path: Path) -> None:
    assert "the exchanges of yunchang carry no labels" in reason_in(analyze(tmp_path, [], impl="yunchang"))
