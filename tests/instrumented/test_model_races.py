"""Every access of the model to every byte is ordered, around every scheme and on a mesh."""

from __future__ import annotations

import pytest

from cptrace.capture.run_spec import RunSpec
from cptrace.schemes import SCHEMES
from instrumented.comm import Channel
from instrumented.mesh import GroupDevice
from instrumented.model import LlamaModel, ModelPlan
from instrumented.runtime.api import Stream
from tests.instrumented.model_cases import SMALL
from tests.instrumented.tracing_device import TracingDevice

TINY = {**SMALL, "seq_len": 8, "heads": 8, "kv_heads": 8, "head_dim": 2, "hidden": 8, "ffn": 8}
CASES = [
    {"scheme": scheme.name, "causal": causal, "cp_size": scheme.max_cp_size or 2}
    for scheme in SCHEMES
    for causal in (False, True)
]
CASES += [
    {"scheme": scheme, "causal": True, "tp_size": 2} for scheme in ("zigzag_ring", "te", "all_gather", "usp")
]


def trace(options: dict[str, object], rank: int) -> TracingDevice:
    """Return a device on which one rank has run all steps of a model."""
    spec = RunSpec(**{**TINY, **options})
    spec.validate()
    device = TracingDevice(rank, spec.n_ranks)
    model = LlamaModel(device, ModelPlan.of(spec))
    for placed in (model._input_BLE, model._target_BLE, model._table_2LC):
        device.adopt(placed)
    for block in model.blocks:
        device.adopt(block.weights.norms_2E)  # all weights are one tensor
        device.adopt(block.gradients_flat[block.gradients_flat.numel() :])  # its filling is zeroed once
    for _ in range(2):
        for layer in range(spec.layers):
            model.forward(layer)
        for layer in reversed(range(spec.layers)):
            model.backward(layer)
        model.finish_step()
        device.synchronize()
    return device


@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(map(str, options.values())))
def test_the_model_has_no_race_and_reads_nothing_that_was_never_written(options: dict[str, object]) -> None:
    device = trace(options, 0)
    assert device.accesses
    assert device.races() == []
    assert device.unwritten == []


@pytest.mark.parametrize("options", [{"scheme": "ring"}, {"scheme": "ring", "tp_size": 2}], ids=["cp", "tp"])
def test_a_sum_that_nothing_waits_for_is_found(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Channel, "before", lambda *_: None)
    found = {first.partition(" ")[0] for first, _ in trace(options, 0).races()}
    assert "all_reduce" in found


def test_attention_on_a_stream_of_its_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is around attention must share its stream, or be ordered with it."""

    def stream(self: GroupDevice) -> Stream:
        return self._device.stream()

    monkeypatch.setattr(GroupDevice, "stream", stream)
    pairs = trace({"scheme": "ring"}, 0).races()
    assert any(first.startswith("rope") and second.startswith("attention") for first, second in pairs)
