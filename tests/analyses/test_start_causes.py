"""Why an op started when it did: one drawn timeline per cause, and every op of an emulated run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cptrace.analyses import make_scope
from cptrace.analyses.start_causes import CAUSES, StartCauses, by_cause, find_start_causes
from cptrace.api import open_trace
from cptrace.dependencies import find_dependencies
from cptrace.requests import ScopeRequest
from tests.support.shared_traces import ROOT, require_trace
from tests.support.tiny_export import NONE, SYNCHRONIZATION, TinyExport, global_pid

COMM = "ncclDevKernel_SendRecv()"


def causes_of(export: TinyExport, path: Path) -> dict[str, tuple[str, int, str | None]]:
    """Return the cause, residual and culprit of each op by its name."""
    trace, found = load(export.write(path))
    names = trace.ops["name"].astype(str).tolist()
    culprits = [names[c] if has else None for c, has in zip(found.culprit, found.has_culprit, strict=True)]
    texts = [CAUSES[code] for code in found.cause]
    return dict(zip(names, zip(texts, found.residual_ns.tolist(), culprits, strict=True), strict=True))


def load(path: Path) -> tuple[object, StartCauses]:
    scope = make_scope(open_trace(path), ScopeRequest())
    return scope.trace, find_start_causes(scope.trace.ops, find_dependencies(scope.trace, scope.launches))


def test_stream_order(tmp_path: Path) -> None:
    """
    stream 7    [-- a --] [-- comm --]      both launched at once
    """
    export = TinyExport().kernel("a", 10_000, 50_000, launch=1).kernel(COMM, 51_000, 60_000, launch=2)
    assert causes_of(export, tmp_path / "t.sqlite")[COMM] == ("stream-order", 1000, "a")


def test_event_wait(tmp_path: Path) -> None:
    """
    stream 7    [-- a --]  record e
    stream 13            wait e  [-- comm --]
    """
    export = (
        TinyExport().kernel("a", 10_000, 50_000, launch=1).kernel(COMM, 52_000, 60_000, stream=13, launch=20)
    )
    export.call("cudaEventRecord_v3020", 5, 6, correlation=90).record(1, correlation=90)
    export.sync(10, 11, stream=13, event=1)
    assert causes_of(export, tmp_path / "t.sqlite")[COMM] == ("event-wait", 2000, "a")


def test_launch(tmp_path: Path) -> None:
    """
    host         launch a                     launch comm
    stream 7     [-- a --]                     [-- comm --]
    """
    export = TinyExport().kernel("a", 10_000, 50_000, launch=1).kernel(COMM, 91_000, 99_000, launch=90_000)
    assert causes_of(export, tmp_path / "t.sqlite")[COMM] == ("launch", 999, None)


@pytest.mark.parametrize("is_poll", [False, True])
def test_host_sync(tmp_path: Path, is_poll: bool) -> None:
    """
    host         launch a  launch b  [ synchronize stream 8          ] launch comm
    stream 8               [------------ b ------------]
    stream 7     [-- a --]                                              [-- comm --]
    """
    export = TinyExport().kernel("a", 1_000, 20_000, launch=1).kernel("b", 1_000, 80_000, stream=8, launch=3)
    export.kernel(COMM, 91_000, 99_000, launch=90_000)
    where = {"contextId": 1, "globalPid": global_pid(100), "syncType": 0, "correlationId": 91}
    export.add(SYNCHRONIZATION, start=10, end=85_000, streamId=8, eventId=NONE, **where)
    export.call("cudaStreamQuery" if is_poll else "cudaStreamSynchronize_v3020", 10, 85_000, correlation=91)
    expected = ("launch", 999, None) if is_poll else ("host-sync", 999, "b")
    assert causes_of(export, tmp_path / "t.sqlite")[COMM] == expected


def test_queue_order(tmp_path: Path) -> None:
    """
    stream 7    [-- a --]          nothing to wait for          [-- comm --]
    stream 8    [b][b][b][b]       the usual residual of this trace is 1 us
    """
    export = TinyExport().kernel("a", 10_000, 50_000, launch=1).kernel(COMM, 150_000, 160_000, launch=2)
    for start in range(1_000, 31_000, 10_000):
        export.kernel("b", start, start + 9_000, stream=8, launch=0)
    assert causes_of(export, tmp_path / "t.sqlite")[COMM] == ("queue-order", 100_000, None)


def test_unknown_where_nothing_was_recorded(tmp_path: Path) -> None:
    assert causes_of(TinyExport().kernel(COMM, 10, 20), tmp_path / "t.sqlite")[COMM] == ("unknown", 0, None)


def test_starts_before_a_dependency_ended_are_counted(tmp_path: Path) -> None:
    export = TinyExport().kernel("a", 0, 50_000).kernel(COMM, 40_000, 60_000)
    _, found = load(export.write(tmp_path / "t.sqlite"))
    assert found.n_violations == 1


@pytest.mark.parametrize(
    "path", sorted((ROOT / "samples").glob("*virtual.sqlite")), ids=lambda path: path.stem
)
def test_in_the_virtual_clock_every_start_is_explained_to_the_nanosecond(path: Path) -> None:
    _, found = load(path)
    assert (found.residual_ns == 0).all()
    assert not np.isin(found.cause, [CAUSES.index("unknown"), CAUSES.index("queue-order")]).any()


def test_ulysses_on_two_gpus_waits_for_its_own_stream() -> None:
    scope = make_scope(open_trace(require_trace("nsys/nsys-2026.2-ulysses-2gpu.sqlite")), ScopeRequest())
    causes = find_start_causes(scope.trace.ops, find_dependencies(scope.trace, scope.launches))
    table = by_cause(scope, causes)
    comm = table[table["role"] == "comm"]
    assert comm["cause"].tolist() == ["stream-order", "stream-order"]
    assert comm["count"].tolist() == [33, 33]
    assert comm["exposed_ns"].tolist() == [17_172_652, 8_229_100]
    assert (comm["median_residual_ns"] < 5_000).all()
