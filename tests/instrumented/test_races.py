"""Every access of every scheme to every byte is ordered: by streams and events, not by luck."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from cptrace.capture.run_spec import RunSpec
from cptrace.schemes import SCHEMES
from instrumented.comm import Channel, RingExchange, Slot
from instrumented.faults import break_device
from instrumented.problem import LayerState, Problem, make_inputs
from instrumented.runtime.clocks import VirtualClock
from instrumented.schemes import find
from tests.instrumented.rank_programs import MODEL
from tests.instrumented.tracing_device import TracingDevice

N_STEPS, N_LAYERS = 2, 2  # buffers are used again within a step and in the next one

CASES = [
    {"scheme": scheme.name, "causal": causal, "seq_len": seq_len}
    for scheme in SCHEMES
    for causal in (False, True)
    for seq_len in (16, 9)  # 9 leaves a rank with nothing but padding
]
CASES += [
    {"scheme": "ulysses", "kv_heads": 2, "causal": True},
    {"scheme": "ulysses_chunked", "kv_heads": 4, "causal": False},  # chunks that share their keys
    {"scheme": "usp", "kv_heads": 1, "causal": True},
    {"scheme": "te", "message_dtype": "fp8", "causal": True},
    {"scheme": "te", "dtype": "bf16", "cp_size": 2, "causal": False},
    {"scheme": "ring", "cp_size": 3, "causal": False},
    {"scheme": "te", "cp_size": 3, "causal": True},
]


def trace(spec: RunSpec, rank: int) -> TracingDevice:
    """Return a device on which one rank has run all steps of a scheme."""
    problem, device = Problem.of(spec), TracingDevice(rank, spec.cp_size)
    scheme = find(spec.scheme)
    layout = scheme.placement(problem)
    layers = []
    for layer in range(spec.layers):
        inputs = make_inputs(problem, spec.seed, layer).shard(layout, rank)
        given = [device.adopt(getattr(inputs, field.name)) for field in fields(inputs)]
        like = (given[0], *given[:3])
        layers.append(LayerState(*given, *(device.empty(t.shape, t.dtype) for t in like)))
    attention = scheme.make(break_device(device, spec.faults, VirtualClock(), MODEL), problem, layers)
    for _ in range(N_STEPS):
        for layer in range(spec.layers):
            attention.forward(layer)
        for layer in reversed(range(spec.layers)):
            attention.backward(layer)
        device.synchronize()
    return device


def spec_of(options: dict[str, object]) -> RunSpec:
    """Return the options of a small run."""
    size = 1 if options["scheme"] == "single" else 4
    small = {"cp_size": size, "seq_len": 16, "heads": 8, "kv_heads": 8, "head_dim": 4, "layers": N_LAYERS}
    spec = RunSpec(**{**small, **options})
    spec.validate()
    return spec


@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(map(str, options.values())))
def test_a_scheme_has_no_race_and_reads_nothing_that_was_never_written(options: dict[str, object]) -> None:
    spec = spec_of(options)
    for rank in sorted({0, spec.cp_size - 1}):
        device = trace(spec, rank)
        assert device.accesses
        assert device.races() == []
        assert device.unwritten == []


def test_a_reader_that_does_not_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire_at_once(exchange: RingExchange, slot: Slot, reader: object) -> None:
        slot.state = slot.state.HELD

    monkeypatch.setattr(RingExchange, "acquire", acquire_at_once)
    races = trace(spec_of({"scheme": "ring"}), 0).races()
    assert any(a.startswith("send_recv") and b.startswith("attention") for a, b in races)


@pytest.mark.parametrize("scheme", ["ring", "te", "all_gather_sliced", "ulysses", "usp", "tp"])
def test_a_transfer_that_does_not_wait_for_its_data_is_found(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Channel, "after", lambda *_: None)
    assert trace(spec_of({"scheme": scheme}), 0).races()


def test_the_tracer_orders_by_streams_events_and_the_host() -> None:
    device = TracingDevice(0, 1)
    first, second, event = device.stream(), device.stream(), device.event()
    tensor = device.empty((4,), torch.float32)
    for target in (tensor[:2], tensor[2:], tensor[1:3]):
        with device.range(str(target.storage_offset())):
            device.launch(first if target is tensor[:2] else second, "fill", target.fill_, 1.0, cost=None)
    assert device.races() == []  # the first two do not overlap, the last two are on one stream
    with device.range("late"):
        device.launch(first, "read", lambda: tensor.sum() and None, cost=None)
    assert {second for _, second in device.races()} == {"late"}
    device.accesses.clear()
    device.launch(first, "fill", tensor.zero_, cost=None)
    device.record_event(event, first)
    device.wait_event(second, event)
    device.launch(second, "read", lambda: tensor.sum() and None, cost=None)
    device.synchronize()
    device.launch(first, "fill", tensor.zero_, cost=None)
    assert device.races() == []
