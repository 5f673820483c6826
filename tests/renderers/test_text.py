"""The screen: what it says, that it fits, and that no name in a trace can harm it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.cells import cell_len

import cptrace
from cptrace.errors import UsageError
from cptrace.renderers import RENDERERS, RenderOptions, find_renderer
from cptrace.renderers.text import render
from cptrace.report import Report
from cptrace.requests import AnalyzeOptions, ScopeRequest, WindowRequest
from tests.support.shared_traces import ROOT, nsys_traces
from tests.support.simulated_run import Clock, write_each
from tests.support.simulated_schemes import Ring
from tests.support.tiny_export import TinyExport

TRACES = [*nsys_traces(), *sorted((ROOT / "samples").glob("*.sqlite"))]

GOLDEN = """\
tiny.sqlite
  nsys_sqlite, 2026.2.1.210, schema 3.25.0

100 us step (median of 1, slowest rank)
comm 40.0 % of it, overlap 50.0 % of comm, exposed comm 20.0 % (20.0 us)

Findings
scheme: not recognised: no known pattern fits 80 % of 1 calls; typically 1
attention + 1 send_recv
No finding: none of missing-event, late-launch, queue-order, imbalance, cp-off,
padding, graph-hidden, low-coverage is there, or none costs a hundredth of the
step. Could not be looked for (see Could not tell): peer-wait, missing-event
(race), shared-stream, single-buffer, shared-communicator, required-order.

Time of each rank
 rank  window  compute     comm  overlap  exposed comm  copy, other     idle
    0  100 us  60.0 us  40.0 us   50.0 %       20.0 us      10.0 us  10.0 us
dev 0   steps   60.0 %   40.0 %  of comm        20.0 %       10.0 %   10.0 %
    0  ███████████████████████████████████████████▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒+++++++·······
       █ compute  ▒ exposed comm  + copy, other  · idle
rank 0: compute 60,000 + exposed comm 20,000 + exposed copy 10,000 + idle 10,000
= window 100,000 ns (every rank sums exactly)
its window runs from 0 to 100,000 ns of the trace

Steps (slowest rank of each)
step    rank    time  compute     comm  exposed comm     idle  overlap
step 0     0  100 us  60.0 us  40.0 us       20.0 us  10.0 us   50.0 %

Collectives (all ranks)
name               kind       ops     time  overlap  exposed      sent      rate
ncclDevKernel_Se…  send_recv    1  40.0 us   50.0 %  20.0 us  64.0 KiB  1.6 GB/s

Streams
rank  context  stream  ops     busy  compute     comm     copy  other
   0        1       7    3  70.0 us  60.0 us     0 ns  10.0 us   0 ns
   0        1      13    1  40.0 us     0 ns  40.0 us     0 ns   0 ns

Why communication and attention started when they did
rank  role       waited last for  ops  exposed
   0  comm       launch             1  20.0 us
   0  attention  launch             1     0 ns

Longest device work (all ranks)
name                    role     ops     time  longest
flash_fwd_kernel        compute    1  40.0 us  40.0 us
ncclDevKernel_SendRecv  comm       1  40.0 us  40.0 us
nvjet_hsh_64x32         compute    1  20.0 us  20.0 us
memcpy HtoD             copy       1  10.0 us  10.0 us

Could not tell
 - peer_wait: it needs the communication of at least two ranks on one clock, and
 this file has that of one, so predictions take the other ranks as recorded and
 are less sure; a report of a whole node has it (nsys profile around the
 launcher, not around each rank), or analyze the reports of all ranks together
 - traffic: bytes sent are compared with a scheme's formula, and this trace does
 not say which scheme ran; traces of `cptrace run` do
 - missing-event (race), shared-stream, single-buffer, shared-communicator,
 required-order: which order is needed cannot be told, because no
 context-parallel scheme was recognised: no known pattern fits 80 % of 1 calls;
 typically 1 attention + 1 send_recv; mark ops with ranges of the domain cptrace
 (cptrace/labels.py) to name it
"""

HOSTILE = {
    "ansi": "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "newline": "first\nsecond\r\nthird\tfourth",
    "markup": "[red]kernel[/red] [/] [bold]",
    "long": "k" * 10_000,
    "template": "void f<" + "g<" * 3_000 + ">" * 3_000 + ">(int)",
    "emoji": "kernel 😀👩‍👩‍👧‍👦 :smile:",
    "wide": "内核" * 60,
    "rtl": "\u202egnp.exe \u05e9\u05dc\u05d5\u05dd",
    "combining": "e" + "\u0301" * 500,
    "null": "a\x00b\x7f\x9b31m",
    "separators": "a\u2028b\u2029c\x0bd\x0ce\x85f",
    "braces": "{0} %s {name} \\",
    "surrogate text": "caf\N{REPLACEMENT CHARACTER}",
    "blank": "   ",
    "parentheses": "((((",
    "closing": ">>>>))))",
}


def text_of(export: TinyExport, tmp_path: Path, width: int = 80) -> str:
    return render(cptrace.analyze(export.write(tmp_path / "t.sqlite")), RenderOptions(width))


def check_screen(text: str, width: int = 80) -> None:
    """Nothing but printable characters and line feeds, no line wider than the terminal, none that ends blank."""
    for line in text.split("\n"):
        assert line.isprintable(), ascii(line)
        assert cell_len(line) <= width, line
        assert line == line.rstrip()
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
@pytest.mark.parametrize("scope", ["steps", "all"])
def test_real_traces_fit_80_columns(path, scope, monkeypatch):
    monkeypatch.chdir(path.parent)
    window = WindowRequest(is_all=True) if scope == "all" else None
    report = cptrace.analyze(path.name, AnalyzeOptions(scope=ScopeRequest(window=window)))
    text = render(report, RenderOptions())
    check_screen(text)
    assert text.startswith(path.name)
    assert "NOT EXACT" not in text


@pytest.mark.parametrize("width", [1, 5, 20, 40, 60, 79, 81, 120, 300])
def test_any_width_works(width, tmp_path):
    text = text_of(golden_export(), tmp_path, width)
    if width >= 60:
        check_screen(text, width)
    assert "NOT EXACT" not in text


def golden_export() -> TinyExport:
    """
    us          0    10   20   30   40   50   60   70   80   90  100
    stream 7    [========= flash =========)    [HtoD)    [= nvjet =)
    stream 13             [==== send ====)
    """
    us = 1_000
    export = TinyExport().domain(1, "cptrace").range("step", 0, 10, domain=1)
    export.kernel("void flash_fwd_kernel<T<4>>(P)", 0, 40 * us, launch=1)
    export.range("send_recv pass=forward layer=0 hop=0 bytes=65536 peers=1", 3, 6, domain=1)
    export.kernel("ncclDevKernel_SendRecv(ncclArgs)", 20 * us, 60 * us, stream=13, launch=4)
    export.copy(60 * us, 70 * us, kind=1, launch=7)
    return export.kernel("nvjet_hsh_64x32", 80 * us, 100 * us, launch=8)


def test_golden(tmp_path, monkeypatch):
    """Compute 0-40 and 80-100, communication 20-60, a copy 60-70, nothing 70-80: see the picture above."""
    golden_export().write(tmp_path / "tiny.sqlite")
    monkeypatch.chdir(tmp_path)
    assert render(cptrace.analyze("tiny.sqlite"), RenderOptions()) == GOLDEN


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE.keys())
def test_names_cannot_harm_the_screen(name, tmp_path):
    """As kernel, range, step and collective; in the path and the metadata."""
    export = (
        TinyExport()
        .kernel(name, 0, 50_000, launch=1)
        .kernel(f"nccl{name}Kernel_AllReduce", 60, 70_000, launch=2)
    )
    export.kernel(f"ncclDevKernel_{name}", 0, 90_000, stream=9, launch=3).range(f"step 1 {name}", 0, 4)
    export.add("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value=name)
    export.add("DIAGNOSTIC_EVENT", severity=3, text=name)
    export.run(device_kind="cpu-emulated", clock=name, scheme=name, dtype=name, cp_size=name)
    report = cptrace.analyze(export.write(tmp_path / "t.sqlite"))
    check_screen(render(report, RenderOptions()))
    for width in (20, 80):
        plain = render(report, RenderOptions(width))
        assert all(line.isprintable() for line in plain.split("\n"))
        # Our own colours are the only escapes: without them the two are the same.
        assert _without_colors(render(report, RenderOptions(width, has_color=True))) == plain


def _without_colors(text: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return "\n".join(line.rstrip() for line in plain.split("\n"))


def test_other_range_names_in_messages_cannot_harm_either(tmp_path):
    export = TinyExport().kernel("nvjet", 0, 10, launch=1)
    for position, name in enumerate(HOSTILE.values()):
        export.range(name, 2 * position, 2 * position + 1)
    check_screen(text_of(export, tmp_path))


@pytest.mark.parametrize(
    ("count", "said"), [(1, "1 rank, 1 token, 1 head (1 KV)"), (2, "2 ranks, 2 tokens, 2 heads (2 KV)")]
)
def test_what_a_run_had_stands_with_its_nouns(count, said, tmp_path):
    names = ("cp_size", "seq_len", "heads", "kv_heads", "layers")
    export = TinyExport().kernel("cptrace_cpu::attention", 0, 10).run(**dict.fromkeys(names, count))
    words = " ".join(text_of(export, tmp_path).split())
    assert said in words
    assert f"{count} layer{'s' * (count > 1)}," in words


def test_an_emulated_device_is_named_first(tmp_path):
    export = (
        TinyExport().kernel("cptrace_cpu::attention", 0, 10).run(device_kind="cpu-emulated", clock="virtual")
    )
    lines = text_of(export, tmp_path).splitlines()
    assert any("CPU EMULATION, virtual clock: no figure below is a GPU's" in line for line in lines[:4])


def test_colour_is_only_where_it_was_asked_for(tmp_path):
    report = cptrace.analyze(golden_export().write(tmp_path / "t.sqlite"))
    assert "\x1b" not in render(report, RenderOptions(has_color=False))
    assert "\x1b[1m" in render(report, RenderOptions(has_color=True))


def test_missing_shares_are_not_zero(tmp_path):
    text = text_of(TinyExport().kernel("nvjet", 0, 10_000).graph(10_000, 30_000), tmp_path)
    assert "n/a" in text
    assert "Could not tell" in text
    assert "--cuda-graph-trace=node" in text


def test_a_trace_without_device_work_still_says_something(tmp_path):
    text = text_of(TinyExport().call("cudaFree", 0, 1), tmp_path)
    check_screen(text)
    names = "account, steps, collectives, streams, kernels, messages, traffic, findings"
    assert f"{names}: it needs device work" in " ".join(text.split())
    assert "No finding" not in text  # none was looked for


def test_long_lists_are_cut_and_say_so(tmp_path):
    export = TinyExport()
    for number in range(20):
        at = 100 * number
        export.kernel(f"nvjet_{number:02}", at, at + 50 + number, launch=at, pid=100 + number)
        export.kernel(f"ncclDevKernel_AllGather_{number:02}", at, at + 9, stream=9, pid=100 + number)
        export.range(f"step {number}", at - 1, at + 5)
    text = text_of(export, tmp_path)
    check_screen(text)
    for rest in ("and 4 more ranks", "and 12 more collectives", "and 32 more names", "and 24 more streams"):
        assert rest in text, text


def test_bars_are_as_long_as_the_window_of_the_longest(tmp_path):
    """
    rank 0  [nvjet 0 ======== 72)
    rank 1  [nvjet 0 == 36)
    """
    export = TinyExport().kernel("nvjet", 0, 72).kernel("nvjet", 0, 36, pid=200)
    bars = [line for line in text_of(export, tmp_path).splitlines() if "██" in line]
    assert [len(bar) - 7 for bar in bars] == [72, 36]


def test_find_renderer():
    for renderer in RENDERERS:
        assert find_renderer(renderer.name) is renderer
        assert renderer.summary
    with pytest.raises(UsageError, match="there is no format 'xml'; the formats are: text, json"):
        find_renderer("xml")


def test_json_is_the_report(tmp_path):
    report = cptrace.analyze(golden_export().write(tmp_path / "t.sqlite"))
    assert find_renderer("json").render(report, RenderOptions(width=3, has_color=True)) == report.to_json()


def test_a_report_read_back_looks_the_same(tmp_path):
    report = cptrace.analyze(golden_export().write(tmp_path / "t.sqlite"))
    assert render(Report.from_json(report.to_json()), RenderOptions()) == render(report, RenderOptions())


def test_files_that_are_alike_are_described_once(tmp_path: Path) -> None:
    paths = write_each(
        Ring(n_ranks=3).hosts(), tmp_path, (Clock(),) * 3, device_kind="cpu-emulated", clock="paced"
    )
    shown = render(cptrace.analyze(paths), RenderOptions(width=200))
    head = shown.partition("\n\n")[0].splitlines()
    assert head[:3] == [str(path) for path in paths]
    assert len(head) == 6
    assert shown.count("CPU EMULATION") == 1
