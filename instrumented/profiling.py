"""Lets a profiler record the measured steps alone: nsys by the calls that it waits for, or torch's own profiler.

The choice is in the environment, so that every process of a run has it, whoever started that. Ranks that are threads
of one process share one recording, which rank 0 starts and ends while the others wait.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from instrumented.runtime.control import barrier
from instrumented.runtime.nvtx_emitter import has_listener

NSYS: Final = "nsys"
KINETO: Final = "kineto"

_NAME: Final = "CPTRACE_PROFILER"
_FOLDER: Final = "CPTRACE_TRACES"


def ask_for(name: str, folder: Path) -> None:
    """Ask all ranks that start from now on for a profiler.

    Args:
        name: `nsys` or `kineto`.
        folder: Where traces of torch's profiler go, one file per process.
    """
    os.environ[_NAME], os.environ[_FOLDER] = name, str(folder)


def is_kineto() -> bool:
    """Return whether torch's profiler was asked for."""
    return os.environ.get(_NAME) == KINETO


def measured_steps(rank: int) -> AbstractContextManager[object]:
    """Return a context for the measured steps of a rank in which the profiler asked for records, if any.

    Args:
        rank: The rank whose thread this is.
    """
    name = os.environ.get(_NAME)
    if not name and has_listener() and torch.cuda.is_available():
        name = NSYS  # around the launcher of the ranks
    if name not in (NSYS, KINETO):
        return nullcontext()
    is_one_of_many = threading.current_thread() is not threading.main_thread()
    if is_one_of_many and rank != 0:
        return _together(nullcontext())
    return _together(_CudaRange() if name == NSYS else _kineto(rank))


@contextmanager
def _together(recording: AbstractContextManager[object]) -> Iterator[None]:
    """Record from when all ranks are ready until all have finished."""
    barrier()
    with recording:
        barrier()
        yield
        barrier()
    barrier()


class _CudaRange:
    """What `nsys profile --capture-range=cudaProfilerApi` waits for."""

    def __enter__(self) -> None:
        torch.cuda.profiler.start()

    def __exit__(self, *_exception: object) -> None:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


@contextmanager
def _kineto(rank: int) -> Iterator[None]:
    """Record with torch's profiler and write its trace."""
    has_cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_cuda else [])]
    with profile(activities=activities, experimental_config=_config()) as recorder:
        yield
        if has_cuda:
            torch.cuda.synchronize()
    recorder.export_chrome_trace(str(Path(os.environ[_FOLDER], f"rank{rank}.json")))


def _config() -> Any:
    """Return what makes torch's profiler record synchronisations, and ranges of all threads where its version can."""
    config = torch._C._profiler._ExperimentalConfig
    wanted = {"enable_cuda_sync_events": True, "profile_all_threads": True}
    while wanted:
        try:
            return config(**wanted)
        except TypeError:  # an option that this version does not have: the last one is the youngest
            wanted.popitem()
    return None


class RecordFunctionEmitter:
    """Opens and closes ranges of torch's profiler; it has no domains, payloads and categories."""

    def __init__(self) -> None:
        """Start with no open range."""
        self._open = threading.local()

    def push(self, label: str, payload: int | None, category: str | None) -> None:
        """Open a range."""
        item = torch.profiler.record_function(label)
        item.__enter__()
        self._stack().append(item)

    def pop(self) -> None:
        """Close the innermost range."""
        self._stack().pop().__exit__(None, None, None)

    def _stack(self) -> list[Any]:
        if not hasattr(self._open, "items"):
            self._open.items = []
        items: list[Any] = self._open.items
        return items
