"""Starts a run in a process of its own: cptrace itself never imports torch.

The child leads a process group of its own, so that Ctrl-C reaches only this process, which then ends the
child and waits for it. The kernel ends the child when this process dies without doing so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cptrace.capture.capacity import require_capacity
from cptrace.capture.marked import end_marked, new_mark, wait_for_end
from cptrace.capture.nsys_sqlite_writer import partial_path
from cptrace.capture.run_spec import RunSpec
from cptrace.errors import CptraceError, RenderError, RunError, UsageError
from cptrace.faults import has_undefined_results

_MODULE: Final = "instrumented.run"
FOLLOWED: Final = ("--progress",)
"""Arguments of a child that is followed: it says what it does."""

# What a profiler says at its end, and lines of a traceback: neither explains a death.
_SAYS_NOTHING: Final = re.compile(r"\s|Generat(ing|ed)\b|\[\d+/\d+\]|$")
_GRACE_S: Final = 10.0  # for the child to end its ranks and clean up
_FORCE_S: Final = 2.0  # for what is left of it then
_ERRORS: Final[Mapping[str, type[CptraceError]]] = {
    error.__name__: error for error in (UsageError, RenderError, RunError)
}


class RunInterrupted(RunError):
    """The user stopped the run; no process and no partial report is left of it."""

    exit_code = 130


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """A finished run.

    Attributes:
        report: The report that was written.
        metadata: The run's description, schema `cptrace.run/1`.
    """

    report: Path
    metadata: Mapping[str, Any]

    @property
    def failed_parity(self) -> list[Mapping[str, Any]]:
        """The parity rows that are over their limit."""
        return [row for row in self.metadata["checks"]["parity"] or [] if not row["passed"]]

    @property
    def has_passed(self) -> bool:
        """Whether all checks that ran have passed."""
        checks = self.metadata["checks"]
        is_healthy: bool = checks["running_max"]["passed"] or has_undefined_results(self.metadata["faults"])
        has_failed = any(checks[name]["passed"] is False for name in ("grad_norm", "loss"))
        return is_healthy and not has_failed and not self.failed_parity


def run(spec: RunSpec, output: Path, on_progress: Callable[[str], None] | None = None) -> RunOutcome:
    """Run `spec` and write its report to `output`, replacing a file that is there.

    Args:
        spec: What to run.
        output: Where the report goes; nothing is left there when the run fails.
        on_progress: Called with a line about what happens now.

    Raises:
        UsageError: The options cannot be meant.
        RunError: The run could not start or did not finish.
        RunInterrupted: The user stopped it.
        RenderError: The report could not be written.
    """
    require_ready(spec)
    command = [*child_command(spec, output), *FOLLOWED, "--parent-pid", str(os.getpid())]
    return RunOutcome(output, run_child(command, output, on_progress or _ignore)["run"])


def require_ready(spec: RunSpec) -> None:
    """Check that a run can start.

    Args:
        spec: What to run.

    Raises:
        UsageError: The options cannot be meant.
        RunError: A package that runs need is not installed, or the machine is too small.
    """
    spec.validate()
    require_capacity(spec)
    _require_packages()


def child_command(spec: RunSpec, output: Path) -> list[str]:
    """Return the command that runs `spec` in a process of its own.

    Args:
        spec: What to run.
        output: Where its own report goes.
    """
    return [*module_command(_MODULE), "--spec", spec.to_json(), "--output", str(output)]


def module_command(module: str) -> list[str]:
    """Return the command that runs a module in a Python of its own, whatever the folder of the user holds.

    Python looks for modules in the current folder first, unless told not to: a `random.py` or `cptrace/` there
    would take the place of what a run needs.

    Args:
        module: Name of the module.
    """
    return [sys.executable, "-P", "-m", module]


def _require_packages() -> None:
    for package in ("torch", "instrumented"):
        if importlib.util.find_spec(package) is None:
            raise RunError(
                f"running a scheme needs the package {package}, which is not installed: "
                "pip install 'cptrace[run]'"
            )


def run_child(
    command: Sequence[str],
    output: Path,
    on_progress: Callable[[str], None],
    variables: Mapping[str, str] | None = None,
) -> Mapping[str, Any]:
    """Run a command that says what it does as `instrumented.run` does, and return its outcome.

    Args:
        command: Program and arguments.
        output: Report that it writes.
        on_progress: Called with a line about what happens now.
        variables: What its environment has beside ours.

    Raises:
        CptraceError: The run could not start or did not finish.
    """
    mark = new_mark()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
        env={**os.environ, **(variables or {}), mark[0]: mark[1]},
    )
    with _ended_at_exit(child, mark, output):
        outcome, last_line = _follow(child, on_progress)
        child.wait()
    if outcome is None:
        raise RunError(f"the run ended without an outcome, exit code {child.returncode}: {last_line}")
    if outcome["status"] != "ok":
        raise _ERRORS.get(outcome["status"], RunError)(outcome["message"])
    return outcome


@contextmanager
def _ended_at_exit(child: subprocess.Popen[str], mark: tuple[str, str], output: Path) -> Iterator[None]:
    """Leave no process of the run's and no partial report, whatever happens inside."""
    try:
        yield
    except KeyboardInterrupt:
        raise RunInterrupted("interrupted; all ranks were ended") from None
    finally:
        with _interrupts_ignored():
            _end(child, mark)
            with suppress(OSError):
                partial_path(output).unlink(missing_ok=True)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Keep a second Ctrl-C from cutting the cleaning up short."""
    try:
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread: no Ctrl-C arrives here
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _end(child: subprocess.Popen[str], mark: tuple[str, str]) -> None:
    if child.poll() is None:
        child.terminate()
    # nsys ends before what it has started: what were killed too early would never end its agent.
    wait_for_end(mark, _GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    end_marked(mark, _FORCE_S)
    child.wait()
    if child.stdout is not None:
        with suppress(OSError):
            child.stdout.close()


def _follow(
    child: subprocess.Popen[str], on_progress: Callable[[str], None]
) -> tuple[Mapping[str, Any] | None, str]:
    """Pass on the child's progress; return its outcome, and its last other line, which explains a death."""
    outcome, last_line = None, ""
    for line in child.stdout or ():
        message = _parse_message(line)
        if message is None:
            last_line = last_line if _SAYS_NOTHING.match(line) else line.strip()
        elif "progress" in message:
            on_progress(str(message["progress"]))
        else:
            outcome = message
    return outcome, last_line


def _parse_message(line: str) -> Mapping[str, Any] | None:
    """Return the message that a line of the child's output holds, None for anything else it printed."""
    try:
        message = json.loads(line)
    except json.JSONDecodeError:
        return None
    is_message = isinstance(message, dict) and bool({"progress", "status"} & message.keys())
    return message if is_message else None


def _ignore(text: str) -> None:
    return
