"""Which faults there are, how they are asked for, and where each one is refused because it would change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cptrace.capture.run_spec import RunSpec
from cptrace.errors import UsageError
from cptrace.faults import (
    FAULTS,
    FaultRequest,
    check_faults,
    find_fault,
    has_undefined_results,
    parse_fault,
    reason_not_applicable,
)
from cptrace.schemes import SCHEMES

SLOW_LINK_GBPS = 0.05  # a transfer takes longer than the attention beside it

RINGS = {"ring", "zigzag_ring", "striped_ring"}
APPLICABLE = {
    "shared-stream": {*RINGS, "te", "all_gather_sliced", "ulysses_chunked", "usp"},
    "host-sync": {*RINGS, "te", "usp"},
    "no-wait": {scheme.name for scheme in SCHEMES} - {"single"},
    "single-buffer": {*RINGS, "te"},
    "shared-communicator": {*RINGS, "all_gather_sliced", "usp"},
    "late-launch": {scheme.name for scheme in SCHEMES},
    "straggler": {scheme.name for scheme in SCHEMES} - {"single"},
    "unbalanced": {"zigzag_ring", "striped_ring", "te", "all_gather", "all_gather_sliced", "usp"},
    "slow-link": {scheme.name for scheme in SCHEMES} - {"single"},
}
"""The schemes for which each fault means something on 4 ranks, backward pass and causal mask included."""

FINDINGS = {
    "shared-stream": ("shared-stream", None),
    "host-sync": ("missing-event", "host-sync"),
    "no-wait": ("missing-event", "race"),
    "single-buffer": ("single-buffer", None),
    "shared-communicator": ("shared-communicator", None),
    "late-launch": ("late-launch", None),
    "straggler": ("peer-wait", "straggler"),
    "unbalanced": ("imbalance", None),
    "slow-link": ("peer-wait", "slow-link"),
}

EACH = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


def spec_of(scheme: str, *faults: str, **options: object) -> RunSpec:
    """Return the options of a run with faults, causal and over a slow link."""
    size = 1 if scheme == "single" else 4
    values = {"cp_size": size, "causal": True, "link_gbps": SLOW_LINK_GBPS, **options}
    return RunSpec(scheme=scheme, faults=faults, **values)


def example_of(name: str) -> str:
    """Return how a user asks for a fault."""
    return f"{name}:1" if find_fault(name).takes_rank else name


def test_every_fault_says_what_it_breaks_and_what_it_must_cause() -> None:
    assert {fault.name: (fault.finding, fault.form) for fault in FAULTS} == FINDINGS
    assert len({fault.summary for fault in FAULTS}) == len(FAULTS)
    assert {fault.name for fault in FAULTS if fault.takes_rank} == {"straggler", "slow-link"}
    assert [fault.name for fault in FAULTS if fault.has_undefined_results] == ["no-wait"]
    names = {fault.name for fault in FAULTS}
    assert all(set(fault.hidden_by) <= names - {fault.name} for fault in FAULTS)


@EACH
def test_a_fault_is_asked_for_as_its_usage_says(fault) -> None:
    text = fault.usage.replace("RANK", "2")
    assert parse_fault(text) == FaultRequest(fault.name, 2 if fault.takes_rank else None)
    assert find_fault(fault.name) is fault


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--fault : no such fault; choose one of shared-stream, .*straggler:RANK"),
        ("shared_stream", "--fault shared_stream: no such fault; choose one of"),
        ("shared-stream:1", "it is all ranks'; use --fault shared-stream"),
        ("no-wait:", "it is all ranks'; use --fault no-wait"),
        ("straggler", "it is one rank's; say which, for example --fault straggler:1"),
        ("straggler:", "it is one rank's"),
        ("straggler:one", "it is one rank's"),
        ("straggler:-1", "it is one rank's"),
        ("slow-link:²", "it is one rank's"),
        ("slow-link:1:2", "it is one rank's"),
    ],
)
def test_what_is_no_fault_is_refused_with_those_there_are(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_fault(text)


@EACH
def test_a_fault_is_refused_with_a_reason_where_data_flow_makes_it_mean_nothing(fault) -> None:
    applicable = set()
    for scheme in SCHEMES:
        spec = spec_of(scheme.name, fault.usage.replace("RANK", "0"))
        reason = reason_not_applicable(fault, spec)
        if reason is None:
            check_faults(spec)
            applicable.add(scheme.name)
        else:
            with pytest.raises(UsageError, match=f"--fault {fault.name}.* would change nothing: "):
                check_faults(spec)
    assert applicable == APPLICABLE[fault.name]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (spec_of("ring", "straggler:4"), "--fault straggler:4: the ranks are 0 to 3"),
        (spec_of("single", "straggler:0"), "one rank has no transfers"),
        (spec_of("ring", "straggler:1", clock="real"), "the real clock has no model .* use --clock paced"),
        (spec_of("ring", "slow-link:1", clock="real"), "the real clock has no model"),
        (spec_of("ring", "no-wait", "no-wait"), "asked for twice"),
        (spec_of("ring", "no-wait", "shared-stream"), "shared-stream puts everything into the order"),
        (spec_of("ring", "shared-stream", "single-buffer"), "single-buffer would change nothing"),
        (spec_of("ring", "no-wait", "host-sync"), "no-wait would change nothing: host-sync puts"),
        (
            spec_of("ulysses", "shared-stream"),
            "data flow needs every transfer where it is .*use --scheme ring",
        ),
        (
            spec_of("ulysses_chunked", "host-sync"),
            "what overlaps has been queued before .*; use --scheme ring",
        ),
        (spec_of("ring", "single-buffer", cp_size=2), "a ring of 2 .*; use more ranks"),
        (spec_of("te", "single-buffer", cp_size=2, forward_only=True), "a ring of 2 .*; use more ranks"),
        (spec_of("usp", "single-buffer"), "a ring of 2 .*; use more ranks"),
        (spec_of("usp", "shared-stream", cp_size=2), "data flow needs every transfer where it is"),
        (spec_of("all_gather_sliced", "shared-stream", kv_heads=1), "data flow needs every transfer"),
        (spec_of("ring", "shared-communicator", forward_only=True), "leave out --forward-only"),
        (spec_of("te", "shared-communicator"), "no two independent transfers under way at once"),
        (spec_of("ring", "unbalanced"), "scheme ring is that already; use --scheme zigzag_ring"),
        (spec_of("ulysses", "unbalanced"), "does the same work on every rank anyway"),
        (spec_of("te", "unbalanced", causal=False), "use --causal"),
        (spec_of("ulysses", "shared-stream", model="llama"), "data flow needs every transfer where it is"),
        (spec_of("tp", "shared-stream", model="llama", layers=2), "data flow needs every transfer"),
        (spec_of("ulysses", "host-sync", model="llama", layers=2), "what overlaps has been queued before"),
        (spec_of("single", "straggler:2", model="llama", tp_size=2), "the ranks are 0 to 1"),
    ],
    ids=lambda value: "-".join([value.scheme, *value.faults]) if isinstance(value, RunSpec) else "",
)
def test_a_request_that_cannot_be_meant_is_refused(spec: RunSpec, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spec.validate()


@pytest.mark.parametrize(
    "spec",
    [
        spec_of("te", "single-buffer", cp_size=2),
        spec_of("usp", "single-buffer", cp_size=6, heads=6, kv_heads=6),
        spec_of("usp", "single-buffer", ulysses_size=1),
        spec_of("ring", "single-buffer", "straggler:1", "late-launch"),
        spec_of("ring", "slow-link:1", "slow-link:2"),
        spec_of("ring", "shared-communicator", clock="real", link_gbps=1e9),
        spec_of("single", "late-launch", clock="real"),
        spec_of("ulysses", "shared-stream", model="llama", layers=2),
        spec_of("single", "no-wait", "straggler:1", model="llama", tp_size=2),
    ],
    ids=lambda spec: "-".join([spec.scheme, *spec.faults]),
)
def test_a_request_that_means_something_is_accepted(spec: RunSpec) -> None:
    spec.validate()


@pytest.mark.parametrize("scheme", ["ring", "zigzag_ring", "usp"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_link_that_the_advice_names_is_slow_enough(scheme: str, dtype: str) -> None:
    """Where both transfers of a hop hide behind its attention, one communicator for both costs nothing."""
    fast = spec_of(scheme, "shared-communicator", dtype=dtype, link_gbps=100.0)
    reason = reason_not_applicable(find_fault("shared-communicator"), fast)
    assert reason is not None
    advised_gbps = float(reason.partition("use --link-gbps ")[2].partition(",")[0])
    replace(fast, link_gbps=advised_gbps).validate()
    with pytest.raises(UsageError, match="fits behind attention one after another too"):
        replace(fast, link_gbps=2 * advised_gbps).validate()


def test_only_a_race_leaves_results_undefined() -> None:
    for fault in FAULTS:
        assert has_undefined_results([example_of(fault.name)]) == (fault.name == "no-wait")
    assert has_undefined_results(["late-launch", "no-wait"])
    assert not has_undefined_results([])
