"""A stream of the CPU device: a thread that takes one task after another.

A `Point` is a place in a stream's order that others can wait for. Tasks:

    run    does its work, once the stream's tail, its launch call and its communicator's turn allow it
    mark   fires a point at the stream's tail
    wait   holds the stream until a point of another stream has fired

After an error a stream runs nothing more but still fires its points, so that nobody waits for ever; the
error is raised where the host synchronises.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Point:
    """A place in a stream's order: `time_ns` is valid once it has fired."""

    def __init__(self) -> None:
        """Make a point that has not fired."""
        self.time_ns = 0
        self._fired = threading.Event()

    def fire(self, time_ns: int) -> None:
        """Let all waiters go."""
        self.time_ns = time_ns
        self._fired.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True when the point has fired, False when the time is over."""
        return self._fired.wait(timeout_s)


class DeviceFault:
    """The first error on any stream of a device; it stays, as on CUDA."""

    def __init__(self) -> None:
        """Start without an error."""
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def set(self, error: BaseException) -> None:
        """Keep the first error."""
        with self._lock:
            self.error = self.error or error


class CpuStream:
    """One stream; its methods are called by the host thread, its tasks run on its own thread."""

    def __init__(self, stream_id: int, fault: DeviceFault) -> None:
        """Start the stream's thread."""
        self.stream_id = stream_id
        self._fault = fault
        self._has_failed = False
        self._tail_ns = 0
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"stream-{stream_id}", daemon=True)
        self._thread.start()

    def run(self, launched_ns: int, work: Callable[[int], int]) -> None:
        """Queue `work(ready_ns) -> end_ns`, which may start when its launch call is over."""

        def task() -> None:
            if not self._has_failed:
                self._tail_ns = work(max(self._tail_ns, launched_ns))

        self._tasks.put(task)

    def finally_run(self, task: Callable[[], None]) -> None:
        """Queue a task that runs even after an error; it must not raise."""
        self._tasks.put(task)

    def mark(self, point: Point) -> None:
        """Queue a point: it fires when everything queued before is done."""
        self._tasks.put(lambda: point.fire(self._tail_ns))

    def wait(self, point: Point) -> None:
        """Queue a wait: nothing queued after it starts before the point has fired."""

        def task() -> None:
            point.wait()
            self._tail_ns = max(self._tail_ns, point.time_ns)

        self._tasks.put(task)

    def close(self) -> None:
        """End the thread after what is queued."""
        self._tasks.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException as error:  # noqa: BLE001 - any failure of user work must reach the host thread
                self._has_failed = True
                self._fault.set(error)
