"""What this machine can run and record, what each lack costs, and how to mend it.

Every question is asked of another process with a time limit, so that a broken installation is an answer too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cptrace.capture.launcher import module_command
from cptrace.capture.nsys_capture import nvtx_version
from cptrace.capture.nsys_command import NoNsys, ask, find_nsys, lost_ranges, nsys_command
from cptrace.errors import CptraceError
from cptrace.labels import CPU_EMULATED, DOMAIN

OK: Final = "ok"
MISSING: Final = "missing"
BROKEN: Final = "broken"
"""States of a finding."""

_ANSWER_S: Final = 90.0
_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
_GPU: Final = re.compile(r"GPU\d+")
_LINK: Final = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")
_PROBE: Final = (
    f"import nvtx; nvtx.push_range(message='probe', domain='{DOMAIN}'); nvtx.pop_range(domain='{DOMAIN}')"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        name: Stable name.
        state: `ok`, `missing` or `broken`.
        found: What was found, in a few words.
        cost: What its lack costs; empty where nothing lacks.
        mend: How to mend it; empty where nothing is to be mended.
    """

    name: str
    state: str
    found: str
    cost: str = ""
    mend: str = ""


Facts = Mapping[str, Any]


def examine() -> list[Finding]:
    """Return what was found on this machine, in the order of `QUESTIONS`."""
    facts = torch_facts()
    return [question(facts) for question in QUESTIONS]


def torch_facts(module: str = "instrumented.doctor", limit_s: float = _ANSWER_S) -> Facts:
    """Return what a process of its own says about torch; under `error` why it says nothing.

    Args:
        module: Module to run.
        limit_s: Seconds to wait for it.
    """
    if importlib.util.find_spec("torch") is None:
        return {}
    try:
        done = subprocess.run(
            module_command(module),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {limit_s:g} s"}
    except (OSError, ValueError, IndexError):
        lines = [line.strip() for line in (done.stderr or "").splitlines() if line.strip()]
        return {"error": lines[-1] if lines else f"it ended with code {done.returncode}"}
    return answer if isinstance(answer, dict) else {"error": "an answer of another form"}


def _torch(facts: Facts) -> Finding:
    cost = "no run: `cptrace run` needs it; analysing traces does not"
    if not facts:
        return Finding("torch", MISSING, "not installed", cost, "pip install 'cptrace[run]'")
    if "error" in facts:
        mend = "python -c 'import torch' shows the whole error; install torch again"
        return Finding("torch", BROKEN, str(facts["error"]), cost, mend)
    return Finding("torch", OK, str(facts["torch"]))


def _cuda(facts: Facts) -> Finding:
    cuda = facts.get("cuda") or {}
    devices = cuda.get("devices") or []
    if devices:
        return Finding("cuda", OK, f"{len(devices)} x {devices[0]}, torch built for {cuda['built_for']}")
    cost = "runs use the emulated device: its times are a model's, not a GPU's"
    if not cuda.get("built_for"):
        mend = "on a machine with a GPU: install a CUDA build of torch (pytorch.org)"
        return Finding(
            "cuda", MISSING, "no CUDA in this torch" if cuda else "unknown without torch", cost, mend
        )
    return Finding(
        "cuda", MISSING, "torch sees no device", cost, "make nvidia-smi list one, and show it to this process"
    )


def _nccl(facts: Facts) -> Finding:
    if facts.get("nccl"):
        return Finding("nccl", OK, str(facts["nccl"]))
    cost = "no transfers between GPUs; the emulated device uses gloo"
    return Finding(
        "nccl", MISSING, "not in this torch", cost, "install a CUDA build of torch, which brings it"
    )


def _package(name: str, cost: str, mend: str) -> Callable[[Facts], Finding]:
    def question(facts: Facts) -> Finding:
        entry = (facts.get("packages") or {}).get(name) or {}
        if entry.get("error"):
            return Finding(name, BROKEN, f"{entry['version']} does not import: {entry['error']}", cost, mend)
        if entry.get("version"):
            return Finding(name, OK, str(entry["version"]))
        return Finding(name, MISSING, "not installed", cost, mend)

    return question


def _nsys(_facts: Facts) -> Finding:
    """Try the whole way on a tiny report: record, import, export."""
    cost = "no --profiler nsys, and .nsys-rep files cannot be read; SQLite exports can"
    tool = find_nsys()
    if isinstance(tool, NoNsys):
        return Finding("nsys", BROKEN if tool.is_there else MISSING, tool.reason, cost, tool.mend)
    if (said := _try_export()) is None:
        return Finding("nsys", OK, f"{tool.version}, records, imports and exports")
    mend = "its importer, the folder host-linux-x64, must lie beside its target folder: link it there, or reinstall"
    return Finding("nsys", BROKEN, f"{tool.version}: {said}", cost, mend)


def _try_export() -> str | None:
    """Return what nsys says where it cannot make an SQLite export, None where it can."""
    from cptrace.sources.nsys_rep import export_report

    with tempfile.TemporaryDirectory(prefix="cptrace-") as folder:
        report, export = Path(folder, "probe.nsys-rep"), Path(folder, "probe.sqlite")
        said = _record(report, [sys.executable, "-c", "pass"])
        if not report.exists():
            return _last_line(said) or "it recorded nothing"
        try:
            export_report(report, export)
        except CptraceError as error:
            return str(error)
    return None


def _record(report: Path, program: list[str]) -> str:
    tool = find_nsys()
    return "" if isinstance(tool, NoNsys) else ask(*nsys_command(tool, CPU_EMULATED, report, program))


def _nvtx(_facts: Facts) -> Finding:
    """Look at versions first, then try: ranges are lost without any error."""
    cost = "reports of nsys hold none of a run's ranges: no steps, no passes, nothing at all on an emulated device"
    version, tool = nvtx_version(), find_nsys()
    if version is None:
        return Finding("nvtx", MISSING, "not installed", cost, "pip install 'nvtx==0.2.11'")
    if isinstance(tool, NoNsys):
        return Finding("nvtx", OK, f"{version}; there is no nsys that runs to try it with")
    reason = lost_ranges(version, tool)
    if reason is None and not _has_probe():
        reason = f"nsys {tool.version} did not record a range of nvtx {version}"
    if reason is not None:
        return Finding("nvtx", BROKEN, reason, cost, "pip install 'nvtx==0.2.11', or a newer Nsight Systems")
    return Finding("nvtx", OK, f"{version}, and nsys {tool.version} records its ranges")


def _has_probe() -> bool:
    """Return whether nsys records a range that a tiny program emits."""
    from cptrace.sources import read_trace

    with tempfile.TemporaryDirectory(prefix="cptrace-") as folder:
        report = Path(folder, "probe.nsys-rep")
        _record(report, [sys.executable, "-c", _PROBE])
        try:
            return "probe" in read_trace(report).ranges["name"].astype(str).tolist()
        except CptraceError:
            return False


def _connections(_facts: Facts) -> Finding:
    value = os.environ.get(_CONNECTIONS)
    if value is None:
        return Finding(_CONNECTIONS, OK, "not set: streams run beside each other")
    if value == "1":
        cost = "all streams share one queue: work that could overlap waits for launches of other streams"
        return Finding(
            _CONNECTIONS, BROKEN, "1", cost, f"unset {_CONNECTIONS}, unless a framework needs the order"
        )
    return Finding(_CONNECTIONS, OK, value)


def _topology(_facts: Facts) -> Finding:
    cost = "how GPUs are connected is not known, so a scheme cannot be recommended by it"
    if shutil.which("nvidia-smi") is None:
        return Finding(
            "topology", MISSING, "no nvidia-smi", cost, "on a machine with GPUs: install NVIDIA's driver"
        )
    rows = read_links(ask("nvidia-smi", "topo", "-m"))
    if not rows:
        return Finding(
            "topology", BROKEN, "nvidia-smi does not show it", cost, "nvidia-smi topo -m shows why"
        )
    return Finding("topology", OK, describe_links(rows))


def read_links(text: str) -> dict[tuple[int, int], str]:
    """Return the link between each pair of GPUs, such as NV18 or PHB.

    Args:
        text: What `nvidia-smi topo -m` prints: a row and a column per GPU, then columns of network cards and CPUs.
    """
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    links = {
        int(row[0][3:]): row[1:]
        for row in rows
        if len(row) > 1 and _GPU.fullmatch(row[0]) and _LINK.fullmatch(row[1])
    }
    return {(gpu, other): row[other] for gpu, row in links.items() for other in links if other < len(row)}


def describe_links(links: Mapping[tuple[int, int], str]) -> str:
    """Return how many pairs of GPUs each kind of link joins.

    Args:
        links: Link of each pair.
    """
    pairs = [link for (a, b), link in links.items() if a < b]
    if not pairs:
        return "one GPU"
    counts = {link: pairs.count(link) for link in dict.fromkeys(pairs)}
    words = ", ".join(f"{link} between {count} pairs" for link, count in counts.items())
    return f"{words} (NVn: n NVLinks; others go over PCIe)"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


QUESTIONS: Final[tuple[Callable[[Facts], Finding], ...]] = (
    _torch,
    _cuda,
    _nccl,
    _package(
        "flash-attn",
        "attention runs on torch's own kernels, which differ from those of training",
        "pip install flash-attn, on a machine with a GPU and a CUDA compiler",
    ),
    _package(
        "transformer-engine",
        "scheme te runs our reference, not the library",
        "pip install 'transformer-engine[pytorch]', on a machine with a GPU",
    ),
    _nsys,
    _nvtx,
    _connections,
    _topology,
)
"""What is looked for, in the order in which it is shown."""
