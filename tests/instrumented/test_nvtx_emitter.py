"""Ranges reach the `nvtx` package where it is installed, with the module's functions that all versions have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from instrumented.runtime import nvtx_emitter
from instrumented.runtime.clocks import TimeModel, VirtualClock
from instrumented.runtime.cpu import CpuDevice

MODEL = TimeModel(1.0, 1.0, 1.0, 0.0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, object]]]:
    """Return what a stand-in for the package was called with."""
    seen: list[tuple[str, dict[str, object]]] = []
    package = SimpleNamespace(
        push_range=lambda **fields: seen.append(("push", fields)),
        pop_range=lambda **fields: seen.append(("pop", fields)),
    )
    monkeypatch.setattr(nvtx_emitter, "nvtx", package)
    return seen


def test_ranges_are_pushed_and_popped_in_our_domain(calls: list[tuple[str, dict[str, object]]]) -> None:
    device = CpuDevice(0, 1, VirtualClock(), MODEL, nvtx_emitter.make_emitter())
    with device.range("step", payload=2, category="step"), device.range("merge hop=1"):
        pass
    outer = {"message": "step", "domain": "cptrace", "category": "step", "payload": 2}
    inner = {"message": "merge hop=1", "domain": "cptrace", "category": None, "payload": None}
    end = ("pop", {"domain": "cptrace"})
    assert calls == [("push", outer), ("push", inner), end, end]


def test_a_range_is_closed_when_its_body_fails(calls: list[tuple[str, dict[str, object]]]) -> None:
    device = CpuDevice(0, 1, VirtualClock(), MODEL, nvtx_emitter.make_emitter())
    with pytest.raises(KeyError), device.range("step"):
        raise KeyError
    assert [name for name, _ in calls] == ["push", "pop"]
    assert [item.text for item in device.record().ranges] == ["step"]


def test_without_the_package_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvtx_emitter, "nvtx", None)
    device = CpuDevice(0, 1, VirtualClock(), MODEL, nvtx_emitter.make_emitter())
    with device.range("step"):
        pass
    assert len(device.record().ranges) == 1


def test_the_installed_package_takes_our_arguments() -> None:
    pytest.importorskip("nvtx")
    emitter = nvtx_emitter.PackageEmitter()
    emitter.push("step", 2, "step")
    emitter.push("merge hop=1", None, None)
    emitter.pop()
    emitter.pop()
