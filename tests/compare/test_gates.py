"""Conditions that stop a check: what they mean, when they hold, and what is no condition."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cptrace.comparison import METRICS, compare_reports
from cptrace.errors import UsageError
from cptrace.findings import FINDINGS
from cptrace.gates import CODES, FORMS, Wanted, failures, found, parse_codes, parse_condition
from cptrace.outcome import NotApplicable
from tests.support.reports import account, finding, report_of_steps


def runs_of(before, after, n_steps=4):
    """Return two runs of equal steps, each given as (window, comm, overlapped)."""
    accounts = [
        account(window, window - comm, comm, overlapped) for window, comm, overlapped in (before, after)
    ]
    return compare_reports([report_of_steps([each] * n_steps) for each in accounts], names=["old", "new"])


def holds(condition, before, after, n_steps=4):
    return bool(failures(runs_of(before, after, n_steps), [parse_condition(condition)]))


BASE = (1000, 200, 100)  # exposed 100: share 10 %, overlap 50 %


@pytest.mark.parametrize(
    ("condition", "after", "expected"),
    [
        ("step_ns > +5%", (1051, 200, 100), True),
        ("step_ns > +5%", (1050, 200, 100), False),
        ("step_ns > +5%", (900, 200, 100), False),
        ("step_ns < -5%", (900, 200, 100), True),
        ("step_ns > 1us", (1020, 200, 100), True),
        ("step_ns > 1us", (1000, 200, 100), False),
        ("step_ns>+20ns", (1021, 200, 100), True),
        ("step_ns > +21 ns", (1021, 200, 100), False),
        ("exposed_comm_share > +5%", (1000, 300, 100), True),
        ("exposed_comm_share > 15%", (1000, 300, 100), True),
        ("exposed_comm_share > 0.25", (1000, 300, 100), False),
        ("exposed_comm_share > +5pp", (1000, 240, 100), False),
        ("exposed_comm_share > +5pp", (1000, 260, 100), True),
        ("overlap < -5pp", (1000, 200, 80), True),
        ("overlap < 80%", (1000, 200, 100), True),
        ("overlap < 0.5", (1000, 200, 100), False),
    ],
)
def test_conditions(condition, after, expected):
    assert holds(condition, BASE, after) is expected


def test_noise_is_no_change_but_a_value_is_a_value():
    assert not holds("step_ns > +0.1%", BASE, (1009, 200, 100)), "less than a hundredth of the step"
    assert holds("step_ns > 1us", BASE, (1009, 200, 100))


def test_with_one_step_the_limit_alone_decides():
    assert holds("step_ns > +0.1%", BASE, (1009, 200, 100), n_steps=1)


def test_from_nothing_any_change_is_large():
    assert holds("exposed_comm_ns > +500%", (1000, 100, 100), (1000, 150, 100))
    assert not holds("exposed_comm_ns > +500%", (1000, 100, 100), (1000, 100, 100))


def test_the_message_says_what_was_and_is():
    (line,) = failures(runs_of(BASE, (2000, 200, 100)), [parse_condition(" step_ns > +5% ")])
    assert line == "new: step_ns is 2.00 us, was 1.00 us; 'step_ns > +5%' holds"


def test_each_run_is_checked():
    steps = [report_of_steps([account(window, window, 0, 0)] * 3) for window in (100, 300, 100, 400)]
    comparison = compare_reports(steps, names=["a", "b", "c", "d"])
    assert [line[0] for line in failures(comparison, [parse_condition("step_ns > +5%")])] == ["b", "d"]


def test_what_is_not_known_does_not_pass():
    with pytest.raises(UsageError, match="cannot be decided: overlap is not known in new"):
        holds("overlap < 50%", (1000, 0, 0), (1000, 0, 0))


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_can_be_a_condition(metric):
    assert parse_condition(f"{metric.name} > +1%").metric == metric.name
    assert not parse_condition(f"{metric.name} < {'5ms' if metric.unit == 'ns' else '5%'}").is_change


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read"), ("step_ns", "cannot read"), ("step_ns >= 5ms", "cannot read"),
        ("step_ns > five", "cannot read"),
        ("step_ns > +5% and overlap < 5%", "cannot read"), ("step_ns == 5ms", "cannot read"), ("> 5ms", "cannot read"),
        ("step_time > 5ms", "names no metric"), ("step_ns > 5", "no unit"), ("step_ns > 5%", "no unit"),
        ("step_ns > +5pp", "no unit"), ("overlap < 5ms", "no unit"), ("overlap > 1e99%", "cannot read"),
    ],
)  # fmt: skip
def test_what_is_no_condition(text, message):
    with pytest.raises(UsageError, match=message):
        parse_condition(text)


def test_codes_and_forms():
    text = "shared-stream, missing-event:race,shared-stream,missing-event,,missing-event:race"
    assert parse_codes(text) == (
        Wanted("shared-stream", None), Wanted("missing-event", "race"), Wanted("missing-event", None),
    )  # fmt: skip
    for diagnosis in FINDINGS:
        for form in (None, *diagnosis.forms):
            (wanted,) = parse_codes(diagnosis.code + (f":{form}" if form else ""))
            assert (wanted.code, wanted.form) == (diagnosis.code, form)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--fail-on '' names no code; the codes are: shared-stream, "),
        (" , ", "--fail-on ' , ' names no code; the codes are: shared-stream, "),
        ("shared-stream,typo", "there is no finding 'typo'; the codes are: shared-stream, "),
        ("typo:race", "there is no finding 'typo'; the codes are: shared-stream, "),
        (":race", "there is no finding ''; the codes are: shared-stream, "),
        (
            "missing-event:typo",
            "--fail-on missing-event:typo: missing-event has no form 'typo'; its forms are: host-sync, race",
        ),
        ("missing-event:", "missing-event has no form ''; its forms are: host-sync, race"),
        ("missing-event:race:x", "missing-event has no form 'race:x'; its forms are: host-sync, race"),
        ("missing-event:skew", "missing-event has no form 'skew'; its forms are: host-sync, race"),
        ("padding:race", "padding has no form 'race'; its forms are: none"),
    ],
)
def test_what_is_no_finding(text, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_codes(text)


def report_with(*findings, missing=()):
    """Return a report with findings, each CODE or CODE:FORM, and names of what could not be looked for."""
    rows = tuple(finding(each.code, form=each.form) for text in findings for each in parse_codes(text))
    lacking = tuple(NotApplicable(name, "it needs two ranks") for name in missing)
    return replace(report_of_steps([account(10, 10, 0, 0)], findings=rows), not_applicable=lacking)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("peer-wait,padding,late-launch", ["peer-wait", "late-launch"]),  # in the order asked for
        ("peer-wait:skew", ["peer-wait:skew"]),
        ("peer-wait:straggler", []),
        ("peer-wait:straggler,peer-wait", ["peer-wait"]),
        ("peer-wait:skew,peer-wait", ["peer-wait:skew", "peer-wait"]),
        ("missing-event:race,imbalance:work", []),
        ("padding", []),
    ],
)
def test_a_code_stops_at_any_form_and_a_form_at_itself(text, expected):
    report = report_with("late-launch:in-steps", "peer-wait:skew", "peer-wait:slow-link")
    assert list(map(str, found(report, parse_codes(text)))) == expected
    assert found(report, ()) == ()


@pytest.mark.parametrize("code", CODES)
def test_what_decides_a_form_is_the_form_the_code_and_all_findings(code):
    """Every form of every code, against every name that a report gives to what it could not look for."""
    names = [code, code.replace("-", "_"), "findings", f"padding, {code}", f"traffic, {code}"]
    for form in (None, *FORMS[code]):
        wanted = (Wanted(code, form),)
        own = [f"{code} ({other})" for other in FORMS[code] if form in (None, other)]
        for name in [*names, *own]:
            with pytest.raises(UsageError, match=f"--fail-on {wanted[0]} cannot be decided: .*two ranks"):
                found(report_with(missing=[name]), wanted)
        foreign = [f"{code} ({other})" for other in FORMS[code] if form not in (None, other)]
        others = [other for other in CODES if other != code]
        assert found(report_with(missing=[*foreign, *others, "traffic", "steps"]), wanted) == ()
        there = report_with(f"{code}:{form}" if form else code, missing=[*names, *own])
        assert found(there, wanted) == wanted, "what is there is there"
