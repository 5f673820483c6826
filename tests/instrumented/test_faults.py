"""Each fault breaks what it says and nothing else, as read back from what the runs recorded."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cptrace.capture.run_spec import RunSpec
from cptrace.faults import FAULTS, find_fault, parse_fault, reason_not_applicable
from cptrace.labels import Label, parse_label
from cptrace.schemes import SCHEMES
from tests.instrumented.conftest import run_apart
from tests.instrumented.test_races import spec_of, trace
from tests.support.emulated_report import (
    NONE_ID,
    TID_BITS,
    KernelRow,
    pass_overlap,
    query,
    read_kernels,
    run_metadata,
)

N_RANKS, SLOW = 4, 1  # ranks of a ring, and the one that is slow
COMPUTE, KV, DKV = 7, 13, 14  # streams of a ring

# Little arithmetic on a slow device: the virtual clock shows the shares of a run of real size.
SMALL: dict[str, Any] = {
    "clock": "virtual",
    "cp_size": N_RANKS,
    "seq_len": 64,
    "heads": 8,
    "kv_heads": 8,
    "head_dim": 4,
    "warmup": 1,
    "steps": 1,
    "compute_gflops": 0.0025,
    "link_gbps": 0.0032,
}
HALF_LINK = {"link_gbps": 0.0016}  # two transfers of a hop then outlast its attention
HOP_NS, SLOW_HOP_NS = 20_000 + 10_240_000, 80_000 + 40_960_000

RING_RUNS: dict[str, dict[str, Any]] = {
    "none": {},
    "shared-stream": {},
    "host-sync": {},
    "no-wait": {},
    "single-buffer": {},
    "late-launch": {},
    f"straggler:{SLOW}": {},
    f"slow-link:{SLOW}": {},
    f"single-buffer+straggler:{SLOW}": {},
    "none, half the link": HALF_LINK,
    "shared-communicator": HALF_LINK,
    "none, causal": {"scheme": "zigzag_ring", "causal": True},
    "unbalanced": {"scheme": "zigzag_ring", "causal": True, "seq_len": 61},
    "single-buffer, te": {"scheme": "te"},
    "none, 2 ranks": {"cp_size": 2},
    "shared-stream, 2 ranks": {"cp_size": 2},
}


def faults_of(name: str) -> tuple[str, ...]:
    """Return the faults of a run by its name."""
    words = name.partition(",")[0]
    return () if words == "none" else tuple(words.split("+"))


class Op(NamedTuple):
    """A kernel of the measured step and its label."""

    kernel: KernelRow
    label: Label

    @property
    def what(self) -> tuple[str, ...]:
        """What it is: name, tensor, pass and hop."""
        fields = self.label.fields
        return self.label.name, fields.get("tensor", ""), fields["pass"], fields["hop"]

    @property
    def duration(self) -> int:
        """How long it ran, ns."""
        return self.kernel.end - self.kernel.start


class Report:
    """One run's report, as tests look at it."""

    def __init__(self, path: Path) -> None:
        self.path, self.run = path, run_metadata(path)
        self._kernels = read_kernels(path)

    def ops(self, rank: int) -> list[Op]:
        """Return a rank's kernels of the measured step, in launch order."""
        mine = [k for k in self._kernels if k.pid == 1000 + rank and "step" in k.labels]
        mine.sort(key=lambda kernel: kernel.correlation)
        return [Op(kernel, parse_label(kernel.labels[-1])) for kernel in mine]

    def named(self, rank: int) -> dict[tuple[str, ...], Op]:
        """Return the same by what they are."""
        return {op.what: op for op in self.ops(rank)}

    def streams(self) -> dict[str, set[int]]:
        """Return the streams of transfers by tensor, and of everything else under an empty name."""
        streams: dict[str, set[int]] = {}
        for op in self.ops(0):
            streams.setdefault(op.label.fields.get("tensor", ""), set()).add(op.kernel.stream)
        return streams

    def api_calls(self, rank: int) -> Counter[str]:
        """Return how often each call of the host was made."""
        rows = query(
            self.path,
            "SELECT value FROM CUPTI_ACTIVITY_KIND_RUNTIME JOIN StringIds ON id = nameId "
            f"WHERE (globalTid >> 24) & {TID_BITS} = ?",
            1000 + rank,
        )
        return Counter(name.partition("_")[0] for (name,) in rows)

    def waits(self, rank: int) -> Counter[int]:
        """Return how often each stream waited for an event."""
        rows = query(
            self.path,
            "SELECT streamId FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION WHERE streamId != ? AND eventId != ? "
            f"AND (globalPid >> 24) & {TID_BITS} = ?",
            NONE_ID,
            NONE_ID,
            1000 + rank,
        )
        return Counter(stream for (stream,) in rows)

    def copies(self) -> set[tuple[int, int]]:
        """Return (stream, bytes) of the copies within a rank."""
        return set(query(self.path, "SELECT streamId, bytes FROM CUPTI_ACTIVITY_KIND_MEMCPY"))

    def step_ns(self) -> int:
        """Return how long the longest rank's step was on the device."""
        kernels = [[op.kernel for op in self.ops(rank)] for rank in range(self.run["cp_size"])]
        return max(max(k.end for k in mine) - min(k.start for k in mine) for mine in kernels)

    def exposed_ns(self, pass_name: str) -> int:
        """Return all ranks' communication of a pass beside which nothing ran."""
        return sum(comm - hidden for hidden, comm in pass_overlap(self.path, pass_name).values())


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """Return the report of each of `RING_RUNS`, all made in one process."""
    folder = tmp_path_factory.mktemp("faults")
    specs = [{**SMALL, **change, "faults": faults_of(name)} for name, change in RING_RUNS.items()]
    run_apart("specs", json.dumps(specs), folder)
    return {name: Report(folder / f"{index}.sqlite") for index, name in enumerate(RING_RUNS)}


def transfers_ns(report: Report, rank: int) -> list[int]:
    """Return how long each of a rank's transfers took once its neighbours in the ring had arrived."""
    near = [report.named((rank + distance) % N_RANKS) for distance in (-1, 0, 1)]
    transfers = [op for op in report.ops(rank) if op.kernel.is_comm]
    return [op.kernel.end - max(ops[op.what].kernel.start for ops in near) for op in transfers]


def schedule(report: Report, rank: int = 0) -> list[tuple[str, ...]]:
    """Return what a rank launched, in order."""
    return [op.what for op in report.ops(rank)]


@pytest.mark.parametrize("name", RING_RUNS)
def test_a_fault_is_in_the_description_and_all_but_a_race_compute_the_same(
    reports: dict[str, Report], name: str
) -> None:
    run = reports[name].run
    assert tuple(run["faults"]) == faults_of(name)
    assert run["layout"] == (
        "contiguous" if run["scheme"] != "zigzag_ring" or "unbalanced" in name else "zigzag"
    )
    if name == "no-wait":
        assert run["checks"]["parity"] is None
    else:
        assert len(run["checks"]["parity"]) == 4 * run["cp_size"]
        assert all(row["passed"] for row in run["checks"]["parity"])
        assert run["checks"]["running_max"]["passed"]


@pytest.mark.parametrize(
    "name", ["shared-stream", "host-sync", "no-wait", "single-buffer", "late-launch", f"straggler:{SLOW}"]
)
def test_a_fault_launches_the_same_kernels_in_the_same_order(reports: dict[str, Report], name: str) -> None:
    for rank in range(N_RANKS):
        assert schedule(reports[name], rank) == schedule(reports["none"], rank)


@pytest.mark.parametrize("name", set(RING_RUNS) - {"shared-stream", "shared-stream, 2 ranks"})
def test_other_faults_leave_transfers_their_streams(reports: dict[str, Report], name: str) -> None:
    shared = name == "shared-communicator"
    if reports[name].run["scheme"] != "te":
        assert reports[name].streams() == {"": {COMPUTE}, "kv": {KV}, "dkv": {KV if shared else DKV}}


@pytest.mark.parametrize("suffix", ["", ", 2 ranks"])
def test_a_shared_stream_orders_everything_without_events(reports: dict[str, Report], suffix: str) -> None:
    broken, sound = reports[f"shared-stream{suffix}"], reports[f"none{suffix}"]
    assert broken.streams() == {"": {COMPUTE}, "kv": {COMPUTE}, "dkv": {COMPUTE}}
    assert not broken.waits(0)
    assert "cudaStreamWaitEvent" not in broken.api_calls(0)
    for pass_name in ("forward", "backward"):
        assert all(hidden == 0 for hidden, _ in pass_overlap(broken.path, pass_name).values())
    assert broken.step_ns() > 1.1 * sound.step_ns()


def test_a_host_sync_takes_the_place_of_every_wait(reports: dict[str, Report]) -> None:
    broken, sound = reports["host-sync"], reports["none"]
    assert not broken.waits(0)
    calls, n_arrivals = broken.api_calls(0), sound.waits(0)[COMPUTE]
    assert calls["cudaEventSynchronize"] == n_arrivals > 0
    assert calls["cudaStreamSynchronize"] == sound.waits(0)[KV] + sound.waits(0)[DKV]
    assert sound.api_calls(0)["cudaEventSynchronize"] == 0
    ops = broken.named(0)
    for hop in range(1, N_RANKS):
        arrival = ops["send_recv", "kv", "forward", str(hop - 1)].kernel.end
        assert ops["attention", "", "forward", str(hop)].kernel.launch_start >= arrival
    for hop in range(N_RANKS - 1):
        attention = ops["attention", "", "forward", str(hop)].kernel
        assert ops["send_recv", "kv", "forward", str(hop)].kernel.launch_start >= attention.end
    hidden = [hidden / comm for hidden, comm in pass_overlap(broken.path, "forward").values()]
    assert max(hidden) < 0.01  # a merge that is as short as the host's calls


def test_a_race_leaves_out_every_wait_for_received_data_and_no_other(reports: dict[str, Report]) -> None:
    broken, sound = reports["no-wait"], reports["none"]
    n_hops = N_RANKS - 1
    assert sound.waits(0)[COMPUTE] == 2 * (3 * n_hops + 1)  # two steps: kv twice, dkv and its way home
    assert broken.waits(0) == Counter({stream: sound.waits(0)[stream] for stream in (KV, DKV)})
    before, after = sound.api_calls(0), broken.api_calls(0)
    assert before - after == Counter(cudaStreamWaitEvent=sound.waits(0)[COMPUTE])
    assert not after - before


def test_with_one_buffer_a_hop_waits_for_the_reader_of_the_chunk_before(reports: dict[str, Report]) -> None:
    broken, sound = reports["single-buffer"], reports["none"]
    ops = broken.named(0)
    for pass_name in ("forward", "backward"):
        for hop in range(1, N_RANKS - 1):  # hop 0 sends the rank's own chunk, which is in no buffer
            reader = ops["attention", "", pass_name, str(hop)].kernel
            transfer = ops["send_recv", "kv", pass_name, str(hop)].kernel
            assert transfer.start == reader.end
            assert ops["attention", "", pass_name, str(hop + 1)].kernel.start >= transfer.end
    assert broken.exposed_ns("forward") > 0.99 * N_RANKS * 2 * HOP_NS  # a merge lies beside each
    assert sound.exposed_ns("forward") == 0
    assert {stream for stream, _ in broken.copies()} == {KV, DKV}  # what is sent on is copied aside
    assert not sound.copies()


def test_with_one_buffer_te_posts_backward_hops_after_their_reader(reports: dict[str, Report]) -> None:
    """Where a hop is asked for before the attention that reads its buffer, it is queued behind that one."""
    ops = reports["single-buffer, te"].named(0)
    for hop in range(1, N_RANKS):
        tensor = "dkv" if hop == N_RANKS - 1 else "kv+dkv"
        transfer = ops["send_recv", tensor, "backward", str(hop)].kernel
        assert transfer.start >= ops["attention", "", "backward", str(hop)].kernel.end


def test_on_one_communicator_transfers_take_turns(reports: dict[str, Report]) -> None:
    broken, sound = reports["shared-communicator"], reports["none, half the link"]

    def transfers(report: Report) -> list[KernelRow]:
        kernels = (op.kernel for op in report.ops(0) if op.kernel.is_comm)
        return sorted(kernels, key=lambda kernel: kernel.start)

    assert all(a.end <= b.start for a, b in pairwise(transfers(broken)))
    assert any(a.end > b.start for a, b in pairwise(transfers(sound)))
    assert schedule(broken) == schedule(sound)
    assert broken.waits(0).total() == sound.waits(0).total()
    assert broken.step_ns() > 1.01 * sound.step_ns()


def test_a_late_launch_is_what_attention_waits_for(reports: dict[str, Report]) -> None:
    broken, sound = reports["late-launch"], reports["none"]
    for rank in range(N_RANKS):
        late, right = ([op for op in r.ops(rank) if op.label.name == "attention"] for r in (broken, sound))
        assert all(op.kernel.start == op.kernel.launch_end for op in late)
        assert all(op.kernel.start > op.kernel.launch_end for op in right[1:])
    assert broken.api_calls(0) == sound.api_calls(0)
    assert [op.duration for op in broken.ops(0) if not op.kernel.is_comm] == [
        op.duration for op in sound.ops(0) if not op.kernel.is_comm
    ]


@pytest.mark.parametrize("prefix", ["", "single-buffer+"])
def test_a_straggler_computes_at_half_the_speed(reports: dict[str, Report], prefix: str) -> None:
    broken = reports[f"{prefix}straggler:{SLOW}"]
    sound = reports["single-buffer" if prefix else "none"]
    for rank in range(N_RANKS):
        pairs = zip(broken.ops(rank), sound.ops(rank), strict=True)
        for slow, right in ((a, b) for a, b in pairs if not a.kernel.is_comm):
            expected = 2 * right.duration if rank == SLOW else right.duration
            assert abs(slow.duration - expected) <= 1  # nanosecond, rounded
    assert {ns for rank in range(N_RANKS) for ns in transfers_ns(broken, rank)} == {HOP_NS}


def test_a_slow_link_makes_one_ranks_transfers_four_times_as_long(reports: dict[str, Report]) -> None:
    broken = reports[f"slow-link:{SLOW}"]
    for rank in range(N_RANKS):
        pairs = list(zip(broken.ops(rank), reports["none"].ops(rank), strict=True))
        assert set(transfers_ns(broken, rank)) == {SLOW_HOP_NS if rank == SLOW else HOP_NS}
        assert all(a.duration == b.duration for a, b in pairs if not a.kernel.is_comm)


def test_combined_faults_both_show(reports: dict[str, Report]) -> None:
    both = reports[f"single-buffer+straggler:{SLOW}"]
    assert both.step_ns() > 1.05 * reports[f"straggler:{SLOW}"].step_ns()
    assert both.step_ns() > 1.05 * reports["single-buffer"].step_ns()
    ops = both.named(SLOW)
    reader = ops["attention", "", "forward", "1"].kernel
    assert ops["send_recv", "kv", "forward", "1"].kernel.start >= reader.end


def test_unbalanced_chunks_give_rank_r_the_work_of_r_plus_1_hops(reports: dict[str, Report]) -> None:
    for rank in range(N_RANKS):
        kinds = Counter(op.what[0::2] for op in reports["unbalanced"].ops(rank))
        assert kinds["attention", "forward"] == kinds["attention", "backward"] == rank + 1
        balanced = Counter(op.what[0::2] for op in reports["none, causal"].ops(rank))
        assert balanced["attention", "forward"] == N_RANKS


# ── all schemes ────────────────────────────────────────────────────────────────────────────────────────────


def example_of(name: str) -> str:
    """Return how a user asks for a fault."""
    return f"{name}:{SLOW}" if find_fault(name).takes_rank else name


def _applicable() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return, by name, the options of every run in which a fault means something, and of the one without it."""
    found = {}
    for scheme in SCHEMES:
        for size in (2, 4) if scheme.max_cp_size is None else (scheme.max_cp_size,):
            for fault in FAULTS:
                for forward_only in (False, True) if size == N_RANKS else (False,):
                    sound = {**SMALL, "scheme": scheme.name, "cp_size": size, "forward_only": forward_only}
                    sound |= {"link_gbps": 0.0003} if fault.name == "shared-communicator" else {}
                    sound |= {"causal": True} if fault.name == "unbalanced" else {}
                    broken = {**sound, "faults": (example_of(fault.name),)}
                    if reason_not_applicable(fault, RunSpec(**broken)) is None:
                        name = f"{scheme.name}-{size}-{'forward' if forward_only else 'both'}-{fault.name}"
                        found[name] = (sound, broken)
    return found


APPLICABLE = _applicable()


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return each run's longest step and verdict, by its options."""
    specs = {json.dumps(spec): spec for pair in APPLICABLE.values() for spec in pair}
    results = run_apart("cases", json.dumps([*specs.values()]), tmp_path_factory.mktemp("matrix"))
    return {
        key: {
            "step_ns": max(ns for rank in ranks for ns in rank["steps_ns"]),
            "parity": [row["passed"] for row in ranks[0]["parity"]],
        }
        for key, ranks in zip(specs, results, strict=True)
    }


@pytest.mark.parametrize("name", APPLICABLE)
def test_where_a_fault_is_accepted_it_costs_time_and_breaks_no_result(
    steps: dict[str, dict[str, Any]], name: str
) -> None:
    sound, broken = (steps[json.dumps(spec)] for spec in APPLICABLE[name])
    if name.endswith("no-wait"):
        assert broken["parity"] == []
        return
    assert broken["step_ns"] > 1.01 * sound["step_ns"]
    assert broken["parity"]
    assert all(broken["parity"])


RACE_CASES = sorted(
    {(options["scheme"], *options["faults"]) for _, options in APPLICABLE.values() if options["cp_size"] == 4}
)


@pytest.mark.parametrize(("scheme", "fault"), RACE_CASES)
def test_only_no_wait_leaves_anything_unordered(scheme: str, fault: str) -> None:
    options = {"scheme": scheme, "faults": (fault,), "causal": fault == "unbalanced", "link_gbps": 1e-5}
    races = trace(spec_of(options), 0).races()
    if parse_fault(fault).name != "no-wait":
        assert races == []
        return
    transfers = ("send_recv", "all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    assert races
    assert all(any(side.startswith(transfers) for side in pair) for pair in races)
