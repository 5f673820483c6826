"""What the doctor finds: sound, missing and broken installations, each with its cost and its mend."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from cptrace import doctor
from cptrace.capture import nsys_command
from cptrace.capture.nsys_command import NoNsys, NsysTool
from cptrace.doctor import (
    BROKEN,
    MISSING,
    OK,
    QUESTIONS,
    Finding,
    describe_links,
    examine,
    read_links,
    torch_facts,
)

TOOL = NsysTool("/opt/nsys", "2022.4.2.1", "", False)
NO_NSYS = NoNsys("nsys is not on PATH", "install it", is_there=False)
GPU_FACTS = {
    "torch": "2.13.0+cu128",
    "cuda": {"built_for": "12.8", "is_available": True, "devices": ["H100", "H100"]},
    "nccl": "2.27.3",
    "packages": {
        "flash-attn": {"version": "2.8.3", "error": None},
        "transformer-engine": {"version": "2.5", "error": "OSError: libcudnn.so.9"},
    },
}
TOPOLOGY = """\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-31
GPU1\tNV18\t X \tSYS\tPXB\t0-31
GPU2\tSYS\tSYS\t X \tNODE\t32-63
NIC0\tPXB\tPXB\tNODE\t X

Legend:
  X    = Self
"""


@pytest.fixture
def no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take nsys and nvidia-smi away."""
    monkeypatch.setattr(doctor, "find_nsys", lambda: NO_NSYS)
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)


def by_name(facts: doctor.Facts) -> dict[str, Finding]:
    return {finding.name: finding for finding in (question(facts) for question in QUESTIONS)}


@pytest.mark.usefixtures("no_tools")
def test_a_machine_with_gpus_is_sound_but_for_a_package_that_does_not_import() -> None:
    found = by_name(GPU_FACTS)
    assert (found["cuda"].state, found["cuda"].found) == (OK, "2 x H100, torch built for 12.8")
    assert found["nccl"].state == found["flash-attn"].state == OK
    assert found["transformer-engine"].state == BROKEN
    assert "libcudnn.so.9" in found["transformer-engine"].found


@pytest.mark.usefixtures("no_tools")
def test_whatever_lacks_says_what_that_costs_and_how_to_mend_it() -> None:
    for finding in by_name({}).values():
        assert finding.found
        assert (finding.state == OK) == (not finding.cost) == (not finding.mend), finding


@pytest.mark.usefixtures("no_tools")
def test_a_torch_that_crashes_is_an_answer() -> None:
    found = by_name({"error": "it ended with code -11"})
    assert (found["torch"].state, found["torch"].found) == (BROKEN, "it ended with code -11")
    assert found["cuda"].state == MISSING


def module(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module with a text, which child processes find."""
    (folder / "answer.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return "answer"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import os; os.kill(os.getpid(), 11)", "it ended with code -11"),
        ("raise OSError('libcuda.so.1: no such file')", "OSError: libcuda.so.1: no such file"),
        ("import time; time.sleep(60)", "no answer within 0.5 s"),
        ("print('[1]')", "an answer of another form"),
        ("print('hello')", "it ended with code 0"),
    ],
)
def test_a_child_that_gives_no_answer_is_explained(
    text: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = 0.5 if "sleep" in text else 60.0
    assert torch_facts(module(tmp_path, text, monkeypatch), limit_s) == {"error": error}


def test_the_child_tells_what_torch_it_has() -> None:
    torch = pytest.importorskip("torch")
    facts = torch_facts()
    assert facts["torch"] == torch.__version__
    assert set(facts["packages"]) == {"flash-attn", "transformer-engine"}


def test_a_pair_that_loses_ranges_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_nsys", lambda: TOOL)
    monkeypatch.setattr(doctor, "nvtx_version", lambda: "0.2.17")
    finding = doctor._nvtx({})
    assert finding.state == BROKEN
    assert "records no range" in finding.found


def test_a_pair_that_should_work_and_does_not_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_nsys", lambda: TOOL)
    monkeypatch.setattr(doctor, "nvtx_version", lambda: "0.2.11")
    monkeypatch.setattr(doctor, "_has_probe", lambda: False)
    assert "did not record a range" in doctor._nvtx({}).found


@pytest.mark.parametrize(("value", "state"), [(None, OK), ("1", BROKEN), ("8", OK)])
def test_one_connection_for_all_streams_is_a_finding(
    value: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if value is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, value)
    assert doctor._connections({}).state == state


def test_links_are_those_between_gpus_alone() -> None:
    links = read_links(TOPOLOGY)
    assert {pair: link for pair, link in links.items() if pair[0] < pair[1]} == {
        (0, 1): "NV18",
        (0, 2): "SYS",
        (1, 2): "SYS",
    }
    assert describe_links(links).startswith("NV18 between 1 pairs, SYS between 2 pairs")


def test_one_gpu_and_no_answer_have_no_links() -> None:
    assert describe_links(read_links("\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n")) == "one GPU"
    assert read_links("NVIDIA-SMI has failed") == {}


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("exit 3", "ended with code 3 and said nothing"),
        (
            "echo libssl.so.3: no such file >&2; exit 127",
            "ended with code 127 and said 'libssl.so.3: no such file'",
        ),
        ("echo NVIDIA", "ended with code 0 and said 'NVIDIA'"),
        ("kill -SEGV $$", "ended with code -11 and said nothing"),
        ("sleep 60", "no answer within 0.5 s"),
        ("trap '' TERM; sleep 60 & sleep 60", "no answer within 0.5 s"),
    ],
)
def test_an_nsys_that_is_there_and_does_not_run_says_what_it_did(
    script: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "nsys"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert nsys_command._VERSION_ANSWER_S <= 10.0
    monkeypatch.setattr(nsys_command, "_VERSION_ANSWER_S", 0.5)
    start = time.monotonic()
    finding = doctor._nsys({})
    assert time.monotonic() - start < 30.0, "what it has started is not waited for"
    assert finding.state == BROKEN
    assert finding.found.startswith(f"{fake} is on PATH but does not run: ")
    assert found in finding.found
    assert finding.cost
    assert f"{fake} --version" in finding.mend
    assert doctor._nvtx({}).state in (OK, MISSING)


def test_an_nsys_that_cannot_be_started_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nsys"
    fake.write_bytes(b"\x7fELF of another machine")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "it cannot be started (Exec format error)" in doctor._nsys({}).found


def test_no_nsys_at_all_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = doctor._nsys({})
    assert (finding.state, finding.found) == (MISSING, "nsys is not on PATH")
    assert "developer.nvidia.com" in finding.mend


@pytest.mark.nsys
@pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not on PATH; .ci/install-nsys installs it")
def test_a_real_nsys_is_tried_the_whole_way() -> None:
    found = {finding.name: finding for finding in examine()}
    assert found["nsys"].state == OK, found["nsys"]
    assert found["nvtx"].state == OK, found["nvtx"]


@pytest.mark.nsys
@pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not on PATH; .ci/install-nsys installs it")
def test_an_nsys_that_records_nothing_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "nsys_command", lambda *_arguments: ["sh", "-c", "echo importer not found; exit 1"]
    )
    finding = doctor._nsys({})
    assert finding.state == BROKEN
    assert "importer not found" in finding.found
