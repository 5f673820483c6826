"""Runs under a real `nsys profile`: the report is genuine, and says what the device's own record of that run says."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import cptrace
from cptrace.capture.marked import marked, new_mark, wait_for_end
from cptrace.capture.nsys_capture import Recorded, nvtx_version, record_into
from cptrace.capture.nsys_command import NsysTool, find_nsys, lost_ranges
from cptrace.capture.run_spec import RunSpec
from cptrace.report import Report

pytestmark = [
    pytest.mark.nsys,
    pytest.mark.skipif(
        shutil.which("nsys") is None, reason="nsys is not on PATH; .ci/install-nsys installs it"
    ),
]

# Long ops: what a busy machine adds to each is little beside them.
SPEC = RunSpec(
    cp_size=2, seq_len=256, heads=2, kv_heads=2, steps=2, warmup=1, link_gbps=0.02, compute_gflops=0.5
)
MAX_OVERLAP_DIFFERENCE = 0.05
MAX_TIME_DIFFERENCE = 0.05


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Return one run as nsys and as the device itself recorded it."""
    return record_into(tmp_path_factory.mktemp("nsys"), SPEC, lambda _text: None)


@pytest.fixture(scope="module")
def reports(recorded: Recorded) -> tuple[Report, Report]:
    """Return the analysis of both."""
    return cptrace.analyze(recorded.export), cptrace.analyze(recorded.own_record)


def test_the_report_is_one_of_nsys_itself(recorded: Recorded, reports: tuple[Report, Report]) -> None:
    tool = find_nsys()
    assert isinstance(tool, NsysTool)
    assert recorded.report.stat().st_size > 0
    (entry,) = reports[0].inputs
    assert entry["tool_version"].startswith(tool.version.partition("-")[0])
    assert (entry["device_kind"], entry["clock"]) == ("cpu-emulated", "paced")
    assert entry["run"]["capture"]["flags"][0] == "--trace=nvtx"


def test_ranks_and_ops_of_each_step_are_the_same(reports: tuple[Report, Report]) -> None:
    ranks, steps = (
        [[(row[a], row[b], row.get("n_ops")) for row in report.rows(section)] for report in reports]
        for section, a, b in (("ranks", "rank", "device"), ("steps", "rank", "step"))
    )
    assert ranks[0] == ranks[1]
    assert steps[0] == steps[1]
    assert len(steps[0]) == SPEC.cp_size * SPEC.steps


def test_ops_of_each_stream_come_in_the_same_order(recorded: Recorded) -> None:
    orders = []
    for path in (recorded.export, recorded.own_record):
        ops = cptrace.open_trace(path).ops
        queues = ops.groupby(["rank", "stream"], observed=True)
        orders.append(
            {key: queue[["name", "correlation_id"]].astype(str).to_numpy().tolist() for key, queue in queues}
        )
    assert orders[0] == orders[1]
    assert orders[0]


def test_calls_waits_and_records_are_the_same(recorded: Recorded) -> None:
    traces = [cptrace.open_trace(path) for path in (recorded.export, recorded.own_record)]
    for name, columns in (
        ("api_calls", ["correlation_id", "name"]),
        ("syncs", ["correlation_id", "kind", "stream", "event_id", "event_sync_id"]),
        ("event_records", ["correlation_id", "stream", "event_id", "event_sync_id"]),
    ):
        rows = [sorted(getattr(trace, name)[columns].astype(str).to_numpy().tolist()) for trace in traces]
        assert rows[0] == rows[1], name
        assert rows[0]


def test_overlap_and_times_agree(reports: tuple[Report, Report]) -> None:
    for ours, theirs in zip(*(report.rows("ranks") for report in reports), strict=True):
        assert ours["overlap"] == pytest.approx(theirs["overlap"], abs=MAX_OVERLAP_DIFFERENCE)
        for name in ("window_ns", "compute_ns", "comm_ns"):
            assert ours[name] == pytest.approx(theirs[name], rel=MAX_TIME_DIFFERENCE), name


def test_processes_are_those_that_ran(recorded: Recorded) -> None:
    pids = [rank["pid"] for rank in recorded.metadata["ranks"]]
    assert cptrace.open_trace(recorded.export).ranks["pid"].tolist() == pids
    assert len(set(pids)) == SPEC.cp_size


def test_the_installed_packages_fit_together() -> None:
    tool = find_nsys()
    assert isinstance(tool, NsysTool)
    assert lost_ranges(nvtx_version(), tool) is None


AS_A_USER = ("-m", "cptrace")
WITHOUT_GRACE = (
    "-c",
    "from cptrace.capture import launcher; launcher._GRACE_S = 0.0; from cptrace.cli.main import main; main()",
)


def call(
    folder: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    start: Sequence[str] = AS_A_USER,
) -> subprocess.Popen[str]:
    """Start `cptrace run --profiler nsys` in a folder."""
    command = [sys.executable, "-W", "error", *start, "run", "--profiler", "nsys", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )


SMALL = ("--cp-size", "2", "--seq-len", "64", "--heads", "2", "--head-dim", "8", "--warmup", "0")


def test_the_command_leaves_both_reports_and_nothing_else(tmp_path: Path) -> None:
    process = call(tmp_path, *SMALL, "--steps", "1", "-o", "run.sqlite")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "Report: run.sqlite" in output
    assert "stream threads" in " ".join(output.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.nsys-rep", "run.sqlite"]


SEED = 20261130
MARK = f'"seed": {SEED},'
"""What the command lines of a run's processes hold."""


LONG = ("--steps", "1000", "--link-gbps", "0.001", "--seed", str(SEED), "-o", "x.sqlite")


@pytest.fixture
def session_of_another(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Return the mark of a session that is none of ours."""
    mark = new_mark()
    report = tmp_path_factory.mktemp("other") / "other"
    command = ["nsys", "profile", "--trace=nvtx", "--sample=none", "--cpuctxsw=none", f"--output={report}"]
    with subprocess.Popen(
        [*command, "sleep", "120"],
        env={**os.environ, mark[0]: mark[1]},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as other:
        try:
            wait_until(lambda: bool(agents(mark)))
            yield mark
        finally:
            other.terminate()
    assert wait_for_end(mark, 30.0)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Return a folder whose path is as short as that of most folders for temporary files."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("moment", "is_forced"), [("nsys starts", False), ("ranks run", False), ("ranks run", True)]
)
def test_an_interrupt_leaves_no_process_and_no_file(
    moment: str, is_forced: bool, tmp_path: Path, short_folder: Path, session_of_another: tuple[str, str]
) -> None:
    """Nor an agent, which is in no group and no child of the run's, nor temporary files, even if ended by force."""
    mark = ("CPTRACE_TEST", new_mark()[1])
    env = {**os.environ, mark[0]: mark[1], "TMPDIR": str(short_folder)}
    process = call(tmp_path, *SMALL, *LONG, env=env, start=WITHOUT_GRACE if is_forced else AS_A_USER)
    wait_until(lambda: any(("nsys" in words[0]) == (moment == "nsys starts") for words in marked_commands()))
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "interrupted" in output
    assert list(tmp_path.iterdir()) == []
    assert wait_for_end(mark, 1.0), "at once, not when the agent has waited for minutes"
    assert len(agents(session_of_another)) == 1
    assert list(short_folder.iterdir()) == []


def agents(mark: tuple[str, str]) -> list[int]:
    """Return the ids of the agents of nsys that carry a mark."""
    return [pid for pid in marked(mark) if "--start-agent" in psutil.Process(pid).cmdline()]


def marked_commands() -> list[list[str]]:
    """Return the command lines of all processes of the run."""
    commands = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            commands.append(process.cmdline())
    return [command for command in commands if any(MARK in word for word in command)]


def wait_until(is_so: Callable[[], bool]) -> None:
    """Return when something is so; fail when it is not within half a minute."""
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)
