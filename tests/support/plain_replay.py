"""A replay that can be checked by eye: one op at a time, by recursion over what it waits for.

It reads the same edges as the analyzer (`Dependencies`, `Arrivals`), and shares nothing with it behind that: no runs,
no network, no arrays.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from statistics import median
from typing import Any

from cptrace.dependencies import Dependencies
from cptrace.outcome import NotApplicable
from cptrace.peers import Arrivals
from cptrace.replay import Changes
from cptrace.trace import Trace

ATTENTION = ("attention", "emulated-attention")


class WaitsForItself(Exception):
    """Something waits for itself."""


class PlainReplay:
    """One recording; `times` replays it."""

    def __init__(self, trace: Trace, dependencies: Dependencies, arrivals: Arrivals | NotApplicable) -> None:
        self.ops = trace.ops.to_dict("records")
        self.n_ops = len(self.ops)
        self.launch = {
            i: (int(thread), int(start), int(end))
            for i, (thread, start, end, is_known) in enumerate(
                zip(
                    dependencies.launch_thread,
                    dependencies.launch_start_ns,
                    dependencies.launch_end_ns,
                    dependencies.is_launch_known,
                    strict=True,
                )
            )
            if is_known
        }
        self.queue = dependencies.queue.tolist()
        self.previous = {
            i: int(dependencies.previous[i]) for i in range(self.n_ops) if dependencies.has_previous[i]
        }
        self._find_participants(arrivals)
        events = dependencies.events
        self.events = {
            number: (p, c)
            for number, (p, c) in enumerate(
                zip(events.producer.tolist(), events.consumer.tolist(), strict=True)
            )
            if p < c and self.arrival[p] <= self.start(c)
        }
        self._find_resources()
        self._find_calls(trace, dependencies)

    def start(self, i: int) -> int:
        return int(self.ops[i]["start_ns"])

    def end(self, i: int) -> int:
        return int(self.ops[i]["end_ns"])

    def _find_participants(self, arrivals: Arrivals | NotApplicable) -> None:
        partners = defaultdict(list)
        if not isinstance(arrivals, NotApplicable):
            for i, j in zip(arrivals.partner_op.tolist(), arrivals.partner.tolist(), strict=True):
                partners[i].append(j)
        following = {p: i for i, p in self.previous.items()}
        self.participants: dict[int, list[int]] = {}
        self.arrival = [self.start(i) for i in range(self.n_ops)]
        for i, others in partners.items():
            last = max(self.start(j) for j in [i, *others])
            makes_room = self.start(following[i]) if i in following else last
            if last <= self.end(i) and last <= makes_room:
                self.participants[i], self.arrival[i] = [i, *others], last

    def _waits(self, i: int) -> list[int]:
        """Return the recorded times of all that an op waits for, without resources."""
        times = [self.end(self.previous[i])] if i in self.previous else []
        times += [self.launch[i][2]] if i in self.launch else []
        return times + [self.end(p) for p, c in self.events.values() if c == i]

    def _find_resources(self) -> None:
        self.resources: list[tuple[int, int]] = []
        attention = [i for i in range(self.n_ops) if self.ops[i]["rule"] in ATTENTION]
        comm = [i for i in range(self.n_ops) if self.ops[i]["role"] == "comm"]
        for rank in sorted({op["rank"] for op in self.ops}):
            mine = [i for i in attention if self.ops[i]["rank"] == rank]
            for a, b in pairwise(mine):
                if self.queue[a] != self.queue[b] and self.end(a) <= self.start(b):
                    self.resources.append((a, b))
        for b in comm:
            waits = self._waits(b)
            if not waits or self.start(b) - max(waits) <= 2_000:
                continue
            done = [
                a for a in comm if self.ops[a]["rank"] == self.ops[b]["rank"] and self.end(a) <= self.start(b)
            ]
            if done:
                a = max(done, key=lambda a: (self.end(a), a))
                if a < b and self.queue[a] != self.queue[b] and self.start(b) - self.end(a) <= 2_000:
                    self.resources.append((a, b))

    def _find_calls(self, trace: Trace, dependencies: Dependencies) -> None:
        blocking, syncs = dependencies.blocking, trace.syncs.to_dict("records")
        self.calls: list[dict[str, Any]] = []
        for b, row in enumerate(blocking.sync.tolist()):
            sync = syncs[row]
            call = {
                "thread": int(blocking.thread[b]),
                "process": int(sync["process"]),
                "context": int(sync["context"]),
                "is_device": sync["kind"] == "context",
                "start": int(blocking.start_ns[b]),
                "end": int(blocking.end_ns[b]),
            }
            producers = [int(blocking.producer[b])] if blocking.has_producer[b] else []
            if sync["kind"] == "context":
                producers = self._last_of_each_stream(sync, call["start"])
            call["producers"] = [p for p in producers if self.arrival[p] <= call["end"]]
            self.calls.append(call)
        for b, call in enumerate(self.calls):
            is_later = b > 0 and self.calls[b - 1]["thread"] == call["thread"]
            call["before"] = b - 1 if is_later else None
            call["done"] = max((self.end(p) for p in call["producers"]), default=None)
        quick = [c["end"] - c["start"] for c in self.calls if c["done"] is None or c["done"] <= c["start"]]
        typical = int(median(quick)) if quick else 2_000
        late = []
        for call in self.calls:
            duration = call["end"] - call["start"]
            call["blocks"] = call["done"] is not None and call["done"] > call["start"] and duration > typical
            call["cost"] = typical if call["blocks"] else duration
            call["late"] = max(call["end"] - call["done"], 0) if call["done"] is not None else 0
            late += [call["late"]] if call["blocks"] else []
        usual = int(median(late)) if late else 0
        for call in self.calls:
            call["late"] = call["late"] if call["blocks"] else min(call["late"], usual)

    def _last_of_each_stream(self, sync: dict[str, Any], before_ns: int) -> list[int]:
        last: dict[int, int] = {}
        for i in range(self.n_ops):  # by start, so by stream order within each stream
            is_mine = (self.ops[i]["process"], self.ops[i]["context"]) == (sync["process"], sync["context"])
            if is_mine and i in self.launch and self.launch_order[i] < before_ns:
                last[self.queue[i]] = i
        return list(last.values())

    @property
    def launch_order(self) -> dict[int, int]:
        """Launch of each op, but never before that of one ahead in its stream."""
        latest: dict[int, int] = {}
        order = {}
        for i in range(self.n_ops):
            if i in self.launch:
                latest[self.queue[i]] = max(latest.get(self.queue[i], self.launch[i][1]), self.launch[i][1])
                order[i] = latest[self.queue[i]]
        return order

    def _anchor(self, i: int) -> int | None:
        thread, launch_start, _ = self.launch[i]
        blockers = {call["thread"] for call in self.calls}
        if thread not in blockers:
            mates = {c["thread"] for c in self.calls if c["process"] == self.ops[i]["process"]}
            if len(mates) != 1:
                return None
            (thread,) = mates
        earlier = [b for b, c in enumerate(self.calls) if c["thread"] == thread and c["end"] <= launch_start]
        if not earlier or self.calls[max(earlier)]["end"] > self.start(i):
            return None
        return max(earlier)

    def times(self, changes: Changes) -> list[tuple[int, int]]:
        """Return start and end of each op.

        Raises:
            WaitsForItself: An op waits for itself.
        """
        return _Times(self, changes).all()


def _is_dropped(mask: Any, place: int) -> bool:
    return mask is not None and bool(mask[place])


class _Times:
    """One replay: each time is found once, from the times that it hangs on."""

    def __init__(self, recording: PlainReplay, changes: Changes) -> None:
        self.recorded, self.changes = recording, changes
        self.known: dict[tuple[str, int], int | None] = {}
        self.anchors = {i: recording._anchor(i) for i in recording.launch}

    def all(self) -> list[tuple[int, int]]:
        return [(self.time("start", i), self.time("end", i)) for i in range(self.recorded.n_ops)]

    def time(self, what: str, number: int) -> int:
        key = (what, number)
        if key not in self.known:
            self.known[key] = None
            self.known[key] = getattr(self, what)(number)
        found = self.known[key]
        if found is None:
            raise WaitsForItself(key)
        return found

    def end(self, i: int) -> int:
        recorded, new = self.recorded, self.changes.duration_ns
        duration = recorded.end(i) - recorded.arrival[i] if new is None else int(new[i])
        return max(self.time("start", j) for j in recorded.participants.get(i, [i])) + duration

    def start(self, i: int) -> int:
        recorded, changes = self.recorded, self.changes
        waits = recorded._waits(i)
        residual = self._residual(i)
        found = []
        for p in self._producers(i):
            slack = recorded.start(i) - recorded.end(p)
            found.append(self.time("end", p) + min(residual, slack))
        for p, c in zip(changes.added_producer.tolist(), changes.added_consumer.tolist(), strict=True):
            if c == i:
                found.append(self.time("end", p) + residual)
        is_launched = not _is_dropped(changes.drop_launch, i)
        if is_launched and i in recorded.launch:
            slack = recorded.start(i) - recorded.launch[i][2]
            found.append(self.time("launched", i) + min(residual, slack))
        elif is_launched and not waits:
            found.append(recorded.start(i))
        return max(found) if found else recorded.start(i)

    def _residual(self, i: int) -> int:
        recorded = self.recorded
        waits = recorded._waits(i)
        if not waits or _is_dropped(self.changes.drop_residual, i):
            return 0
        waits += [recorded.end(p) for p, c in recorded.resources if c == i]
        return max(recorded.start(i) - max(waits), 0)

    def _producers(self, i: int) -> list[int]:
        """Return the recorded ops that an op still waits for."""
        recorded, changes = self.recorded, self.changes
        found = []
        if i in recorded.previous and not _is_dropped(changes.drop_previous, i):
            found.append(recorded.previous[i])
        for mask, edges in (
            (changes.drop_event, recorded.events.items()),
            (changes.drop_resource, enumerate(recorded.resources)),
        ):
            found += [p for number, (p, c) in edges if c == i and not _is_dropped(mask, number)]
        return found

    def launched(self, i: int) -> int:
        thread, _, end = self.recorded.launch[i]
        anchor, gap = self.anchors[i], self.changes.host_gap_ns
        origin = None if anchor is None else (self.recorded.calls[anchor]["end"], self.time("call", anchor))
        if gap is None:
            return end if origin is None else origin[1] + end - origin[0]
        ahead = self._launched_before(i, thread, anchor)
        if ahead is not None:
            return self.time("launched", ahead) + min(end - self.recorded.launch[ahead][2], gap)
        return end if origin is None else origin[1] + min(end - origin[0], gap)

    def _launched_before(self, i: int, thread: int, anchor: int | None) -> int | None:
        """Return the launch just before on the same thread and behind the same call."""
        ends = {
            j: (end, j)
            for j, (other, _, end) in self.recorded.launch.items()
            if other == thread and self.anchors[j] == anchor
        }
        earlier = [order for order in ends.values() if order < ends[i]]
        return max(earlier)[1] if earlier else None

    def call(self, b: int) -> int:
        call, gap = self.recorded.calls[b], self.changes.host_gap_ns
        before = call["before"]
        free = call["start"]
        if before is not None:
            distance = call["start"] - self.recorded.calls[before]["end"]
            free = self.time("call", before) + (distance if gap is None else min(distance, gap))
        if gap is not None:
            mine = [
                (end, j)
                for j, (thread, _, end) in self.recorded.launch.items()
                if thread == call["thread"] and self.anchors[j] == before
            ]
            if mine:
                end, j = max(mine)
                free = self.time("launched", j) + min(call["start"] - end, gap)
        found = [free + call["cost"]]
        if not _is_dropped(self.changes.drop_blocking, b):
            lags = {p: min(call["late"], call["end"] - self.recorded.end(p)) for p in call["producers"]}
            found += [self.time("end", p) + lag for p, lag in lags.items()]
            found += [self.time("end", i) + min(lags.values()) for i in self._loose(b)]
        return max(found)

    def _loose(self, b: int) -> list[int]:
        """Return the ops that nothing in their stream waits for any more, and that this call is first to wait for."""
        loose = []
        for k, i in self.recorded.previous.items():
            if _is_dropped(self.changes.drop_previous, k) and i in self.recorded.launch:
                place = (self.recorded.ops[i]["process"], self.recorded.ops[i]["context"])
                later = [
                    (call["start"], number)
                    for number, call in enumerate(self.recorded.calls)
                    if call["is_device"]
                    and call["producers"]
                    and (call["process"], call["context"]) == place
                    and call["start"] > self.recorded.launch[i][1]
                ]
                loose += [i] if later and min(later)[1] == b else []
        return loose
