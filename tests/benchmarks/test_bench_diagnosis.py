"""The benchmark of the diagnosis: its tables, and a few runs through all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cptrace.capture.run_spec import RunSpec
from tests.benchmarks.bench_diagnosis import (
    Trial,
    Verdict,
    confusion,
    main,
    parse,
    prediction_errors,
    report,
    trials,
    with_sound_runs,
)

SPEC = RunSpec(clock="virtual")


def verdict(
    *findings: str, faults: tuple[str, ...] = (), ranks=None, predicted=None, step_ns=None
) -> Verdict:
    spec = replace(SPEC, faults=faults)
    n, step_ns = len(findings), step_ns or (150.0 if faults else 100.0)
    return Verdict(
        Trial(spec, faults), findings, ranks or (None,) * n, step_ns, predicted or (None,) * n, 0, 0
    )


@pytest.mark.parametrize(
    ("found", "is_right"),
    [
        (verdict(), True),
        (verdict("required-order:transfer-bound"), True),
        (verdict("single-buffer"), False),
        (verdict("single-buffer", faults=("single-buffer",)), True),
        (verdict("shared-stream", "single-buffer", faults=("single-buffer",)), False),
        (verdict("missing-event:race", faults=("host-sync",)), False),
        (verdict("peer-wait:straggler", faults=("straggler:1",), ranks=(1,)), True),
        (verdict("peer-wait:straggler", faults=("straggler:1",), ranks=(2,)), False),
        (verdict("single-buffer", "shared-stream", faults=("shared-stream", "single-buffer")), True),
        (verdict("single-buffer", "imbalance:work", faults=("shared-stream", "single-buffer")), False),
    ],
)
def test_a_verdict_is_right_if_what_was_injected_is_on_top(found: Verdict, is_right: bool) -> None:
    assert found.is_right == is_right


def test_a_false_alarm_and_a_wrong_cause_miss_the_target() -> None:
    right = [verdict(), verdict("single-buffer", faults=("single-buffer",), predicted=(101,))]
    assert report(right, "virtual")[1]
    assert not report([*right, verdict("shared-stream")], "virtual")[1]
    assert not report([*right, verdict("shared-stream", faults=("single-buffer",))], "virtual")[1]
    assert any("single-buffer" in line and "1" in line for line in confusion(right))


def test_predictions_are_compared_with_the_run_without_the_fault() -> None:
    found = [verdict(), verdict("single-buffer", faults=("single-buffer",), predicted=(103,), step_ns=150.0)]
    ((error, _),) = prediction_errors(found)["single-buffer"]
    assert error == pytest.approx(0.03)
    assert not report(found, "virtual")[1]
    assert report(
        [replace(v, trial=Trial(replace(v.trial.spec, clock="paced"), v.trial.faults)) for v in found],
        "paced",
    )[1]


def test_every_fault_is_tried_in_some_scheme_and_beside_its_sound_run() -> None:
    todo = with_sound_runs(list(trials(parse(["--seeds", "0", "--cp-sizes", "4"]))))
    assert {trial.injected for trial in todo} == {
        "(none)", "shared-stream", "host-sync", "no-wait", "single-buffer", "shared-communicator", "late-launch",
        "straggler", "unbalanced", "slow-link",
    }  # fmt: skip
    sound = {trial.spec for trial in todo if not trial.faults}
    assert all(replace(t.spec, faults=()) in sound for t in todo if t.injected == "shared-communicator")


def test_a_few_runs_are_diagnosed(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--schemes ring --faults single-buffer --cp-sizes 4 --seeds 0 --steps 1 --workers 1 --check"
    assert main(options.split()) == 0
    assert "single-buffer" in capsys.readouterr().out


def test_a_fault_that_costs_nothing_need_not_be_found() -> None:
    hidden = verdict(faults=("slow-link:1",), step_ns=100.5)
    assert report([verdict(), hidden], "virtual")[1]
    assert not report([verdict(), replace(hidden, step_ns=102.0)], "virtual")[1]
    assert not report([verdict(), verdict(faults=("no-wait",), step_ns=100.0)], "virtual")[1]


def test_what_one_fault_costs_beside_another_is_counted_beside_that_one() -> None:
    """Without waits the shared communicator delays nobody: on this link nothing of it shows."""
    both = ("no-wait", "shared-communicator")
    race = verdict("missing-event:race", faults=("no-wait",), step_ns=100.0)
    pair = verdict("missing-event:race", faults=both, step_ns=100.5)
    assert report([verdict(), race, pair], "virtual")[1]
    assert not report([verdict(), race, replace(pair, step_ns=102.0)], "virtual")[1]
    assert not report([verdict(), pair], "virtual")[1], "what it costs was not measured"


def test_pairs_are_tried_beside_each_of_their_faults_on_the_same_link() -> None:
    pairs = list(
        trials(parse(["--pairs", "--seeds", "0", "--cp-sizes", "4", "--schemes", "all_gather_sliced"]))
    )
    links = {trial.spec.link_gbps for trial in pairs if trial.injected == "no-wait + shared-communicator"}
    assert len(links) == 2
    there = {trial.spec for trial in with_sound_runs(pairs)}
    assert all(replace(pair.spec, faults=(fault,)) in there for pair in pairs for fault in pair.faults)
