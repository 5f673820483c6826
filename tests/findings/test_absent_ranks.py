"""Reports of some ranks only: what they show is found all the same, less surely, and the report says what lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.diagnosed import findings, not_looked_for, report_of
from tests.support.simulated_run import Host
from tests.support.simulated_schemes import COMPUTE, Ring, ulysses

FAULTS: dict[str, Callable[[], list[Host]]] = {
    "shared-stream": Ring(kv_stream=COMPUTE, dkv_stream=COMPUTE, attention_first=True).hosts,
    "single-buffer": Ring(n_buffers=1).hosts,
    "host-sync": Ring(blocks_host=True).hosts,
    "late-launch": Ring(pause_ns=900_000).hosts,
    "race": Ring(waits=False).hosts,
    "required-order": lambda: ulysses(COMPUTE, n_ranks=4),
}
LEVELS = ("low", "medium", "high")


def _of(fault: str, tmp_path: Path, ranks: Sequence[Host]) -> tuple[set, list[int], dict[str, str]]:
    report = report_of(ranks, tmp_path)
    found = findings(report)
    levels = [LEVELS.index(row["confidence"]) for _, row in sorted(found.items()) if row["unit"] != "share"]
    return set(found), levels, not_looked_for(report)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("n_present", [1, 2])
def test_the_same_is_found_less_surely(tmp_path: Path, fault: str, n_present: int) -> None:
    hosts = FAULTS[fault]()
    whole, whole_levels, whole_reasons = _of(fault, tmp_path, hosts)
    part, part_levels, part_reasons = _of(fault, tmp_path, hosts[:n_present])
    assert whole
    assert part == whole
    assert all(few < all_ for few, all_ in zip(part_levels, whole_levels, strict=True))
    assert "peer_wait" not in whole_reasons
    assert "take the other ranks as recorded" in part_reasons["peer_wait"]


def test_absent_ranks_are_named(tmp_path: Path) -> None:
    *_, reasons = _of("ring", tmp_path, Ring().hosts()[:2])
    assert "peers that were not found on ranks 2, 3," in reasons["peer_wait"]
    *_, reasons = _of("ring", tmp_path, Ring().hosts()[:3])
    assert "peers that were not found on rank 3," in reasons["peer_wait"]


def test_a_rank_with_fewer_transfers_is_not_absent(tmp_path: Path) -> None:
    """All ranks are there, but the capture of one began a step later."""
    hosts = Ring(n_steps=2).hosts()
    hosts[3] = Ring(n_steps=1).hosts()[3]
    *_, reasons = _of("ring", tmp_path, hosts)
    assert "not found in the trace" in reasons["peer_wait"]
    assert "record whole steps on all ranks" in reasons["peer_wait"]
