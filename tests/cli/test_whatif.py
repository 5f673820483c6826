"""`cptrace whatif`: what it prints, writes and refuses; the predictions themselves are tested in `test_what_if`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cptrace.cli.whatif import FIXABLE
from cptrace.gates import CODES
from cptrace.what_if import fixable
from tests.support.command_line import check_refused, cptrace
from tests.support.shared_traces import ROOT
from tests.support.simulated_run import Host, write
from tests.support.tiny_export import TinyExport

BROKEN = ROOT / "samples" / "ring-single-buffer-virtual.sqlite"
SOUND = ROOT / "samples" / "ring-virtual.sqlite"


def test_a_fix_is_told_with_what_it_gives_and_assumes() -> None:
    done = cptrace("whatif", BROKEN, "--fix", "single-buffer", "--fix", "shared-stream")
    assert done.exit_code == 0
    words = " ".join(done.out.split())
    assert "CPU EMULATION: no figure below is a GPU's" in words
    assert "single-buffer: mended; alone it gives a step of" in words
    assert "shared-stream was not found; nothing to fix" in words
    assert "single-buffer mended: Allocate a second" in words
    assert "rank recorded predicted change 0 " in words
    assert max(map(len, done.out.splitlines())) <= 80


def test_nothing_to_fix_is_no_error() -> None:
    done = cptrace("whatif", SOUND, "--fix", "single-buffer")
    assert (done.exit_code, done.err) == (0, "")
    assert "single-buffer was not found; nothing to fix" in done.out
    assert "(+0.0 %): slowest rank" in done.out


@pytest.mark.parametrize("has_steps", [True, False])
def test_what_is_predicted_is_called_what_analyze_calls_it(tmp_path: Path, has_steps: bool) -> None:
    """Kernels of a host that needs 100 us to launch each."""
    export = TinyExport()
    for number in range(5):
        export.kernel(
            "nvjet", 100_000 * number + 5_000, 100_000 * number + 9_000, launch=100_000 * number + 4_000
        )
    if has_steps:
        export.range("step 0", 0, 500_000)
    path = export.write(tmp_path / "late.sqlite")
    what, other = ("step", "window") if has_steps else ("window", "step")
    done = cptrace("whatif", path, "--fix", "late-launch")
    change = next(line for line in done.out.splitlines() if " -> " in line)
    assert change.startswith(f"{what} ")
    assert f"alone it gives a {what} of" in done.out
    assert f"{other} " not in change.replace("no steps", "")
    assert change.split(":")[0] in cptrace("analyze", path).out


def test_pauses_between_steps_are_nothing_that_a_fix_mends(tmp_path: Path) -> None:
    """The first transfer of a step waits in a stream of its own, which was free long before the pause.

    host        launch both           [pause           ] launch both
    stream 7      [attention ]                             [attention ]
    stream 13      [transfer   ]                            [transfer   ]
    """
    host = Host(0)
    for step in range(3):
        with host.scope(f"step {step}"):
            host.launch("flash_fwd_kernel", 800_000)
            host.launch("ncclDevKernel_AllReduce", 1_000_000, 13)
            host.sync()
        host.pause(500_000)
    path = write([host], tmp_path / "pauses.sqlite")
    assert "between steps" in cptrace("analyze", path).out
    check_refused(
        cptrace("whatif", path, "--fix", "late-launch:between-steps"), 2, "no gain is predicted", "in-steps"
    )
    done = cptrace("whatif", path, "--fix", "late-launch")
    assert done.exit_code == 0
    assert "(+0.0 %)" in done.out
    assert "mended" not in done.out
    assert "CUDA graphs" not in done.out


def test_help_names_what_can_be_fixed_and_nothing_else() -> None:
    assert fixable() == FIXABLE
    said = cptrace("whatif", "--help").out.partition("can be mended:")[2]
    named = "".join(said.partition(";")[0].split()).split(",")
    assert tuple(named) == FIXABLE
    assert {name.partition(":")[0] for name in named} < set(CODES)


def test_json_in_a_file_that_is_not_replaced_unasked(tmp_path: Path) -> None:
    target = tmp_path / "what.json"
    options = ("--scale-transfer", 2, "--scale-compute", 0.5, "--rank", 1, "--format", "json", "-o", target)
    assert cptrace("whatif", SOUND, *options).exit_code == 0
    document = json.loads(target.read_text())
    assert document["schema"] == "cptrace.whatif/1"
    assert document["predicted_step_ns"] != document["recorded_step_ns"]
    check_refused(cptrace("whatif", SOUND, *options), 5, "it exists", "--force")
    assert cptrace("whatif", SOUND, *options, "--force").exit_code == 0


def test_an_input_is_never_written_to() -> None:
    check_refused(cptrace("whatif", SOUND, "--link-gbps", 1, "-o", SOUND, "--force"), 5, "it is an input")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("nothing was asked for", "--fix CODE", "single-buffer")),
        (("--fix", "nonsense"), ("there is no finding 'nonsense'", "the codes are")),
        (("--fix", "padding"), ("no gain is predicted", "cptrace explain padding")),
        (("--fix", "late-launch:between-steps"), ("no gain is predicted", "late-launch:in-steps")),
        (("--link-gbps", "x"), ("'x' is not a valid float",)),
        (("--rank", 9, "--scale-compute", 2), ("--rank 9", "ranks 0, 1, 2, 3")),
    ],
)
def test_refusals(arguments: tuple[object, ...], words: tuple[str, ...]) -> None:
    check_refused(cptrace("whatif", SOUND, *arguments), 2, *words)


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("nothing")
    check_refused(cptrace("whatif", path, "--scale-compute", 2), 3, "not a known trace format")
