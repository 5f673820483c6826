"""The data flow of each scheme against runs of it: every need is there, and kept by edges and in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cptrace import open_trace
from cptrace.analyses import make_scope
from cptrace.dependencies.reach import is_ordered
from cptrace.findings import Case, make_case
from cptrace.recognition.flow import bind
from cptrace.requests import ScopeRequest
from cptrace.schemes.dataflow import FLOWS, DataFlow, Need, find_flow
from tests.instrumented.conftest import run_apart

# Little arithmetic on a slow device: the virtual clock shows the shares of a run of real size.
SMALL: dict[str, Any] = {
    "clock": "virtual", "seq_len": 64, "heads": 8, "kv_heads": 8, "head_dim": 4, "warmup": 0, "steps": 1,
    "compute_gflops": 0.0025, "link_gbps": 0.0032, "layers": 2, "check": False,
}  # fmt: skip
RUNS = tuple((scheme, size) for scheme, _ in FLOWS for size in (2, 4))
# Options that bring ops which a plain run does not have.
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("te", {"message_dtype": "fp8", "warmup": 1}),
    ("all_gather_sliced", {"causal": True}),
    ("ulysses_chunked", {"kv_heads": 4}),
    ("ring", {"faults": ["single-buffer"]}),
    ("te", {"faults": ["single-buffer"]}),
)
# What a scheme is when its limits make it another one.
SAME_AS = {("usp", 2): "ulysses"}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Case]:
    """Return each run ready for diagnosis, those with options of their own under numbers below zero."""
    folder = tmp_path_factory.mktemp("dataflow")
    specs = [{**SMALL, "scheme": scheme, "cp_size": size} for scheme, size in RUNS]
    specs += [{**SMALL, "scheme": scheme, "cp_size": 4, **options} for scheme, options in VARIANTS]
    run_apart("specs", json.dumps(specs), folder)
    names = [*RUNS, *((scheme, -number) for number, (scheme, _) in enumerate(VARIANTS, 1))]
    return {run: _case(folder / f"{number}.sqlite") for number, run in enumerate(names)}


def _case(path: Path) -> Case:
    return make_case(make_scope(open_trace(path), ScopeRequest()))


def flow_of(run: tuple[str, int]) -> DataFlow:
    flow = find_flow(SAME_AS.get(run, run[0]))
    assert flow is not None
    return flow


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]}-{run[1]}")
def test_labels_tell_the_scheme(cases: dict[tuple[str, int], Case], run: tuple[str, int]) -> None:
    found = cases[run].recognition
    assert (found.scheme, found.confidence, found.places.basis) == (SAME_AS.get(run, run[0]), "high", "label")


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]}-{run[1]}")
def test_every_need_is_kept(cases: dict[tuple[str, int], Case], run: tuple[str, int]) -> None:
    case = cases[run]
    flow = bind(flow_of(run), case.places)
    consumer, producer = (case.places.rows[positions] for positions in flow.edges())
    assert len(consumer)
    assert (case.end_ns[producer] <= case.start_ns[consumer]).all()
    assert is_ordered(case.dependencies, case.start_ns, case.end_ns, producer, consumer).all()
    assert flow.is_needed(*flow.edges()).all()


NEEDS = tuple(dict.fromkeys(need for _, flow in FLOWS for need in flow.needs))


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: f"{need.consumer.what}-{need.producer.what}")
def test_every_need_is_there_in_a_run_on_four_ranks(cases: dict[tuple[str, int], Case], need: Need) -> None:
    """A line that no pair of ops has, in any scheme that states it, would be about something that does not exist."""
    having = [scheme for scheme, flow in FLOWS if need in flow.needs]
    runs = [cases[name] for name in cases if name[0] in having and name[1] != 2]
    found = [len(bind(DataFlow((need,)), case.places).edges()[0]) for case in runs]
    assert any(found), f"{need} of {having}"


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]}-{run[1]}")
def test_blocks_are_passes_of_layers(cases: dict[tuple[str, int], Case], run: tuple[str, int]) -> None:
    """Two layers, two passes, one step: four blocks on each rank, each with ops of its own rank and pass alone."""
    case = cases[run]
    places, rank = case.places, case.rank[case.places.rows]
    assert len(np.unique(places.block)) == 4 * run[1]
    for values in (rank, places.layer, places.is_backward):
        pairs = np.unique(np.stack([places.block, values]), axis=1)
        assert len(pairs.T) == 4 * run[1]
