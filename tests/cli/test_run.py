"""`cptrace run` and `cptrace schemes` as a user calls them."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cptrace.capture.launcher import RunOutcome
from cptrace.capture.run_spec import RunSpec
from cptrace.cli import run as cli_run
from cptrace.cli.run import choose_output, claim_output, describe_outcome
from cptrace.cli.run import run as run_command
from cptrace.cli.schemes import schemes
from cptrace.errors import CptraceError, RenderError, RunError, UsageError
from cptrace.faults import FAULTS
from cptrace.schemes import SCHEMES
from cptrace.units import plural

SMALL = [
    "--cp-size",
    "2",
    "--seq-len",
    "64",
    "--heads",
    "2",
    "--head-dim",
    "8",
    "--steps",
    "1",
    "--warmup",
    "0",
]


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Return what the installed command does in a folder."""
    command = [sys.executable, "-W", "error", "-m", "cptrace", "run", *SMALL, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Return the folder and the result of a run in the virtual clock."""
    folder = tmp_path_factory.mktemp("cli")
    return folder, call(folder, "--clock", "virtual", "--causal")


def test_a_run_says_what_ran_how_exact_it_was_and_where_the_report_is(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = finished
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "Ran ring, forward + backward, on 2 ranks.",
        "  CPU emulation, virtual clock: times are a model's, not a GPU's",
        "  64 tokens (32 per rank), 2 heads of 8, 1 layer, fp32, causal attention",
        "  1 step after 0 warm-up",
    ]
    assert max(map(len, lines)) <= 80
    assert "Report: report.sqlite" in lines
    assert [path.name for path in folder.iterdir()] == ["report.sqlite"]


def test_a_run_ends_with_the_analysis_of_its_report(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, _, analysis = finished[1].stdout.partition("Report: report.sqlite\n")
    assert "overlap" in analysis
    assert "gloo_SendRecv" in analysis or "send_recv" in analysis


def test_json_holds_the_runs_description(tmp_path: Path) -> None:
    done = call(tmp_path, "--clock", "virtual", "--format", "json", "--kv-heads", "1", "-o", "my.sqlite")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["report"] == "my.sqlite"
    assert (result["run"]["heads"], result["run"]["kv_heads"]) == (2, 1)
    assert all(row["passed"] for row in result["run"]["checks"]["parity"])
    with closing(sqlite3.connect(tmp_path / "my.sqlite")) as connection:
        (text,) = connection.execute(
            "SELECT value FROM META_DATA_CAPTURE WHERE name = 'CPTRACE_RUN'"
        ).fetchone()
    assert json.loads(text) == result["run"]


def test_the_next_free_name_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        names.append(choose_output(None, force=False).name)
        Path(names[-1]).touch()
    assert names == ["report.sqlite", "report-2.sqlite", "report-3.sqlite"]


@pytest.mark.parametrize("there", ["report.sqlite", "report.nsys-rep"])
def test_a_default_name_is_free_only_if_all_its_files_are(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(there).write_text("mine")
    Path("report-2.nsys-rep").symlink_to("nowhere")  # nothing is there, and yet the name is taken
    for has_original in (False, True):
        assert choose_output(None, force=False, has_original=has_original) == Path("report-3.sqlite")


@pytest.mark.parametrize("has_original", [False, True])
def test_only_what_has_an_original_needs_its_name(has_original: bool, tmp_path: Path) -> None:
    path = tmp_path / "my.sqlite"
    path.with_suffix(".nsys-rep").write_text("mine")
    if not has_original:
        assert choose_output(path, force=False) == path
        return
    with pytest.raises(RenderError, match=r"my\.nsys-rep: it exists"):
        choose_output(path, force=False, has_original=True)
    assert choose_output(path, force=True, has_original=True) == path


def test_a_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    path.write_text("old")
    with pytest.raises(RenderError, match=r"old.sqlite: it exists; .* --force"):
        choose_output(path, force=False)
    assert choose_output(path, force=True) == path
    assert path.read_text() == "old"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RenderError, match="permission denied"):
        choose_output(tmp_path / "report.sqlite", force=False)


def invoke(*arguments: str) -> BaseException | None:
    """Return the error that the command ends with, in this process."""
    return CliRunner().invoke(run_command, [*arguments]).exception


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing start: an error must come before."""

    def start(*_: object) -> None:
        raise AssertionError("the run was started")

    monkeypatch.setattr(cli_run, "launch", start)


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--kv-heads", "3"], UsageError, "choose one of 1, 2, 4, 8"),
        (["--scheme", "rong"], UsageError, "choose one of single"),
        (["--scheme", "ulysses", "--cp-size", "3"], UsageError, "use --cp-size 2, 4, 8, or --heads 9"),
        (["--scheme", "single", "--cp-size", "2"], UsageError, "use --cp-size 1"),
        (["--ulysses-size", "4"], UsageError, "it belongs to --scheme usp"),
        (["--fault", "no-weight"], UsageError, "choose one of shared-stream, host-sync, no-wait"),
        (["--fault", "straggler:7"], UsageError, "the ranks are 0 to 3"),
        (["--scheme", "tp", "--fault", "shared-stream"], UsageError, "would change nothing"),
        (["--fault", "no-wait", "--fault", "shared-stream"], UsageError, "would change nothing"),
        (["-o", "/no/such/folder/x.sqlite"], RenderError, "there is no folder /no/such/folder"),
        (["-o", "-"], UsageError, "leave -o out for report.sqlite"),
        (["-o", "-", "--force"], UsageError, "leave -o out for report.sqlite"),
        (["-o", "-", "--dry-run"], UsageError, "leave -o out for report.sqlite"),
        *(
            (["-o", name, "--profiler", profiler, *more], UsageError, f"use -o {use}")
            for name, use in (
                ("b.nsys-rep", "b.sqlite"),
                ("/no/b.qdrep", "/no/b.sqlite"),
                (".nsys-rep", "NAME.sqlite"),
            )
            for profiler in ("recorder", "auto")
            for more in ([], ["--force"], ["--dry-run"])
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(
    arguments: list[str], error: type[CptraceError], message: str
) -> None:
    raised = invoke(*arguments)
    assert isinstance(raised, error)
    assert message in str(raised)


@pytest.mark.usefixtures("no_start")
def test_kv_heads_are_the_heads_unless_given() -> None:
    assert isinstance(invoke("--heads", "6", "--kv-heads", "4"), UsageError)
    assert "the run was started" in str(invoke("--heads", "6", "-o", "unused.sqlite"))


def parity_row(**change: object) -> dict[str, Any]:
    """Return a parity row that passes, changed."""
    errors = {"max_error": 1e-7, "max_limit": 2e-7, "rms_error": 1e-8, "rms_limit": 2e-8}
    return {"rank": 2, "layer": 1, "tensor": "dk", **errors, "passed": True, **change}


def outcome_with(row: dict[str, Any], *, running_max: bool = True) -> RunOutcome:
    """Return the outcome of a run with one parity row."""
    failures = [] if running_max else [{"rank": 3, "layer": 1, "step": 2}]
    check = {
        "passed": running_max,
        "n_merges": 4,
        "n_not_finite": 0 if running_max else 3,
        "n_decreased": 0,
        "failures": failures,
    }
    metadata = {
        "device_kind": "cpu-emulated",
        "transport": "gloo-loopback",
        "device": "cpu",
        "impl": "builtin",
        "scheme": "ring",
        "passes": ["forward", "backward"],
        "cp_size": 4,
        "clock": "paced",
        "seq_len": 1024,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "layers": 1,
        "dtype": "fp32",
        "layout": "contiguous",
        "padded_tokens": 0,
        "causal": False,
        "steps": 3,
        "warmup": 1,
        "link_gbps": 0.4,
        "link_latency_us": 20.0,
        "compute_gflops": 5.0,
        "memory_gbytes_per_s": 10.0,
        "faults": [],
        "model": "attention",
        "checks": {
            "parity": [row],
            "running_max": check,
            "fp8_messages": None,
            "grad_norm": {"passed": None, "not_applicable": "attention alone has no weights"},
            "loss": {"passed": None, "not_applicable": "attention alone has no loss"},
        },
    }
    return RunOutcome(Path("report.sqlite"), metadata)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (parity_row(max_error=1e-3, passed=False), "rank 2, layer 1: dk is off by 0.001, the limit is 2e-07"),
        (parity_row(rms_error=1e-3, passed=False), r"dk is off by 0.001 \(rms\), the limit is 2e-08"),
        (parity_row(max_error=None, passed=False), "rank 2, layer 1: dk is not finite"),
    ],
)
def test_failed_parity_exits_with_6_and_keeps_the_report(
    row: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shown: list[Path] = []
    monkeypatch.setattr(cli_run, "launch", ended_with(outcome_with(row)))
    monkeypatch.setattr(cli_run, "_show_analysis", shown.append)
    result = CliRunner().invoke(run_command, ["-o", "report-of-this-test.sqlite"])
    assert isinstance(result.exception, RunError)
    assert result.exception.exit_code == 6
    with pytest.raises(RunError, match=message):
        raise result.exception
    assert shown == [Path("report-of-this-test.sqlite")]
    assert [path.name for path in tmp_path.iterdir()] == ["report-of-this-test.sqlite"]


def test_a_damaged_running_statistic_fails_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = outcome_with(parity_row(), running_max=False)
    monkeypatch.setattr(cli_run, "launch", ended_with(outcome))
    monkeypatch.setattr(cli_run, "_show_analysis", lambda _path: None)
    result = CliRunner().invoke(run_command, ["-o", "unused.sqlite"])
    assert isinstance(result.exception, RunError)
    assert "3 values not finite" in result.output
    assert str(result.exception).startswith("rank 3, layer 1, step 2: the running softmax statistic")


def test_the_table_marks_what_failed() -> None:
    text = describe_outcome(outcome_with(parity_row(max_error=1e-3, passed=False)))
    assert "!1.00e-03" in text
    assert "4 heads (2 for K and V) of 64" in text


def ended_with(outcome: RunOutcome) -> Callable[..., RunOutcome]:
    """Return what stands in for a run: it writes a report and ends with the outcome."""

    def run_of(_spec: RunSpec, output: Path, *_: object) -> RunOutcome:
        output.write_bytes(b"report")
        return outcome

    return run_of


def outcome_of(**change: object) -> RunOutcome:
    """Return the outcome of a run with a changed description."""
    outcome = outcome_with(parity_row())
    return RunOutcome(outcome.report, {**outcome.metadata, **change})


def test_padding_is_told_with_what_would_avoid_it() -> None:
    padding = {"padded_tokens": 3, "padded_share": 3 / 1004, "padding_multiple": 4}
    text = describe_outcome(outcome_of(seq_len=1001, **padding, fits_without_padding=[7, 11, 13]))
    assert "1001 tokens (251 per rank)" in text
    assert (
        "padding: 3 of 1004 tokens (0.3 %) are masked but computed; "
        "--seq-len 1000 or 1004 or --cp-size 7, 11, 13 needs none"
    ) in text
    prime = describe_outcome(
        outcome_of(seq_len=3, padded_tokens=1, padded_share=0.25, padding_multiple=4, fits_without_padding=[])
    )
    assert "1 of 4 tokens (25.0 %) are masked but computed; --seq-len 4 needs none" in prime


def test_a_run_without_padding_says_nothing_about_it() -> None:
    assert "padding" not in describe_outcome(outcome_of())


def test_split_heads_leave_all_tokens_on_every_rank() -> None:
    assert "1024 tokens (1024 per rank)" in describe_outcome(outcome_of(layout="heads"))


def test_fp8_messages_and_fallbacks_are_told() -> None:
    fp8 = {"score_limit": 50.0, "largest_score": 61.25, "fp8_layers": [0, 2], "fallback_layers": [1]}
    checks = {**outcome_of().metadata["checks"], "fp8_messages": fp8}
    text = describe_outcome(outcome_of(checks=checks))
    assert "fp8 messages in 2 of 3 layers: largest score 61.2, limit 50, so the others fell back" in text
    checks["fp8_messages"] = {**fp8, "largest_score": None, "fallback_layers": []}
    assert "fp8 messages in 2 of 2 layers: largest score unknown, limit 50." in describe_outcome(
        outcome_of(checks=checks)
    )


@pytest.mark.parametrize(("count", "said"), [(1, "1 layer, "), (2, "2 layers, ")])
def test_counts_stand_with_their_nouns(count: int, said: str) -> None:
    text = describe_outcome(outcome_of(layers=count, steps=count, cp_size=count))
    for noun in ("layer", "step", "rank"):
        assert plural(count, noun) in text
    assert said in text
    assert "(s)" not in text


def test_a_scheme_without_merges_says_so() -> None:
    checks = outcome_of().metadata["checks"]
    checks["running_max"] = {**checks["running_max"], "n_merges": 0}
    assert "nothing to merge in this scheme" in describe_outcome(outcome_of(checks=checks))


def test_the_ranks_are_as_many_as_the_scheme_can_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[int] = []

    def start(spec: RunSpec, output: Path, *_: object) -> RunOutcome:
        seen.append(spec.cp_size)
        return ended_with(outcome_of())(spec, output)

    monkeypatch.setattr(cli_run, "launch", start)
    monkeypatch.setattr(cli_run, "_show_analysis", lambda _path: None)
    for arguments in (["--scheme", "single"], [], ["--cp-size", "2"]):
        assert invoke(*arguments, "-o", "unused.sqlite", "--force") is None
    assert seen == [1, 4, 2]


def test_schemes_lists_every_scheme() -> None:
    output = " ".join(CliRunner().invoke(schemes, []).output.split())
    for scheme in SCHEMES:
        assert scheme.name in output
        assert scheme.summary in output
        assert scheme.limits in output
        assert scheme.forward_formula in output
        assert scheme.backward_formula in output
    assert "contiguous; zigzag with --causal" in output


def test_schemes_as_json_have_the_same_entries() -> None:
    entries = json.loads(CliRunner().invoke(schemes, ["--format", "json"]).output)
    assert [entry["name"] for entry in entries] == [scheme.name for scheme in SCHEMES]
    assert all(entry["forward_bytes"] and entry["backward_bytes"] for entry in entries)
    (te,) = (entry for entry in entries if entry["name"] == "te")
    assert te["options"] == ["message_dtype", "fp8_score_limit"]


def test_help_names_every_option_of_a_run() -> None:
    output = CliRunner().invoke(run_command, ["--help"]).output
    for option in ("--scheme", "--cp-size", "--causal / --no-causal", "--link-gbps", "--clock", "--force"):
        assert option in output
    assert "gigabits (not bytes)" in " ".join(output.split())
    assert "A contiguous ring is unbalanced then" in " ".join(output.split())


def test_a_name_taken_during_the_run_stays_the_other_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scratch = tmp_path / ".report.sqlite.1"
    for taken, expected in (([], "report.sqlite"), (["report.sqlite"], "report-2.sqlite")):
        for path in tmp_path.glob("report*"):
            path.unlink()
        scratch.write_text("new")
        for name in taken:
            (tmp_path / name).write_text("old")
        claimed = claim_output(scratch, None, Path("report.sqlite"), force=False)
        assert (claimed.name, claimed.read_text()) == (expected, "new")
        assert all((tmp_path / name).read_text() == "old" for name in taken)


def test_a_report_and_its_original_get_one_name_or_none(tmp_path, monkeypatch):
    """Another run takes either name after ours was chosen: both of its files stay its own."""
    monkeypatch.chdir(tmp_path)
    for taken in ("report.sqlite", "report.nsys-rep"):
        for path in tmp_path.iterdir():
            path.unlink()
        scratch = tmp_path / ".scratch"
        scratch.write_text("new")
        (tmp_path / ".scratch.nsys-rep").write_text("new original")
        (tmp_path / taken).write_text("old")
        assert claim_output(scratch, None, Path("report.sqlite"), force=False) == Path("report-2.sqlite")
        assert Path("report-2.nsys-rep").read_text() == "new original"
        with pytest.raises(RenderError, match="during the run"):
            claim_output(scratch, Path("report.sqlite"), Path("report.sqlite"), force=False)
        assert [path.name for path in tmp_path.glob("report.*")] == [taken]
        assert (tmp_path / taken).read_text() == "old"
        claim_output(scratch, Path("report.sqlite"), Path("report.sqlite"), force=True)
        assert (tmp_path / "report.nsys-rep").read_text() == "new original"


def test_an_output_that_appears_during_the_run_is_not_replaced_unless_forced(tmp_path):
    scratch, output = tmp_path / ".x", tmp_path / "x.sqlite"
    scratch.write_text("new")
    output.write_text("old")
    with pytest.raises(RenderError, match="during the run"):
        claim_output(scratch, output, output, force=False)
    assert output.read_text() == "old"
    assert claim_output(scratch, output, output, force=True).read_text() == "new"


BEYOND_ALL_BOUNDS = (
    "--seed 99999999999999999999",
    "--steps 100000000",
    "--compute-gflops 1e-30",
    "--link-gbps 1e-12",
    "--link-latency-us nan",
)


@pytest.mark.parametrize("option", BEYOND_ALL_BOUNDS)
def test_numbers_beyond_all_bounds_are_refused_before_anything_starts(option):
    outcome = CliRunner().invoke(run_command, option.split())
    assert isinstance(outcome.exception, UsageError)
    assert option.split()[0] in str(outcome.exception)


def test_help_lists_every_fault_with_the_finding_that_it_must_cause():
    lines = [line.strip() for line in CliRunner().invoke(run_command, ["--help"]).output.splitlines()]
    for fault in FAULTS:
        at = next(
            number
            for number, line in enumerate(lines)
            if line.split() == [fault.usage, *fault.expected.split()]
        )
        assert " ".join(lines[at + 1 :]).startswith(fault.summary)


def test_faults_are_told_with_what_they_must_cause():
    text = describe_outcome(outcome_of(faults=["single-buffer", "straggler:2"]))
    assert "broken on purpose: single-buffer (single-buffer), straggler:2 (peer-wait: straggler)" in text
    assert "broken" not in describe_outcome(outcome_of())


def test_a_race_ends_well_whatever_it_computed(tmp_path):
    """With a link this slow, attention reads its buffer long before anything is in it."""
    options = ("--clock", "virtual", "--link-gbps", "0.001", "--fault", "no-wait", "--fault", "straggler:1")
    done = call(tmp_path, *options, "-o", "race.sqlite")
    assert (done.returncode, done.stderr) == (0, "")
    said = " ".join(done.stdout.split())  # folded to the width of the terminal
    assert "broken on purpose: no-wait (missing-event: race), straggler:1 (peer-wait: straggler)" in said
    assert "Parity: not checked, since --fault no-wait makes results undefined." in done.stdout


@pytest.mark.parametrize(("faults", "passes"), [(["no-wait"], True), (["late-launch"], False), ([], False)])
def test_only_where_results_are_undefined_may_the_running_statistic_be_damaged(faults, passes):
    outcome = outcome_with(parity_row(), running_max=False)
    assert RunOutcome(outcome.report, {**outcome.metadata, "faults": faults}).has_passed is passes


def test_a_run_says_which_device_it_had_and_why(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    assert "  device cpu: only the emulated device has a virtual clock" in finished[1].stdout.splitlines()


@pytest.mark.parametrize(
    ("transport", "said"),
    [
        (
            "local-d2d",
            "All on one H200 (local-d2d): transfers are copies within the device and cross no link",
        ),
        ("nccl", "One H200 each, transfers by NCCL"),
    ],
)
def test_a_run_on_gpus_says_what_its_transfers_cross(transport: str, said: str) -> None:
    outcome = outcome_with(parity_row())
    on_gpu = {"device_kind": "cuda", "device": "cuda", "transport": transport, "gpu": "H200", "clock": None}
    text = describe_outcome(RunOutcome(outcome.report, {**outcome.metadata, **on_gpu}), "torch sees 1 device")
    assert said in text
    assert "times are the GPU's" in text
    assert "device cuda: torch sees 1 device" in text
    assert "emulat" not in text.lower()


def test_impl_check_shows_both_columns() -> None:
    one_kernel = {"one_kernel_max_error": 3e-7, "one_kernel_rms_error": 4e-8}
    rows = [parity_row(rank=0, **one_kernel), parity_row(rank=1, max_error=1.5e-7, **one_kernel)]
    outcome = outcome_with(rows[0])
    outcome.metadata["checks"]["parity"] = rows  # type: ignore[index]
    text = describe_outcome(outcome, has_impl_check=True)
    (line,) = (line for line in text.splitlines() if line.startswith("  dk "))
    assert line.split() == ["dk", "1.50e-07", "3.00e-07", "1.00e-08", "4.00e-08"]
    assert "Implementation builtin" in text
    assert "Implementation" not in describe_outcome(outcome)


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            ["--impl", "yunchang"],
            RunError,
            "needs the package yunchang, which is not installed: pip install yunchang",
        ),
        (["--impl", "megatron"], UsageError, "choose one of builtin, transformer-engine"),
        (
            ["--impl", "torch", "--scheme", "ring"],
            UsageError,
            "it has te, all_gather; ring is in --impl builtin",
        ),
        (["--impl", "torch", "--scheme", "te", "--device", "cpu"], UsageError, "runs on CUDA alone"),
    ],
)
def test_an_implementation_that_is_not_there_is_refused(
    arguments: list[str], error: type[CptraceError], message: str
) -> None:
    raised = invoke(*arguments)
    assert isinstance(raised, error)
    assert message in str(raised)


def test_a_rank_that_a_launcher_started_leaves_the_speaking_to_rank_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    started = []
    monkeypatch.setattr(cli_run, "launch", lambda spec, *_: started.append(spec.cp_size))
    result = CliRunner().invoke(run_command, ["--device", "cpu"])
    assert (result.exception, result.output, started) == (None, "", [4])
    assert list(tmp_path.iterdir()) == []
