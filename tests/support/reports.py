"""Makes reports by hand, for tests of what is done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cptrace.report import Report

Row = Mapping[str, Any]


def account(
    window_ns: int, compute_ns: int, comm_ns: int, overlapped_ns: int, *, is_hidden: bool = False
) -> dict[str, Any]:
    """Return the fields of an account that balances; what is hidden has no shares."""
    exposed = comm_ns - overlapped_ns
    has_shares = window_ns and not is_hidden
    return {
        "window_ns": window_ns,
        "compute_ns": compute_ns,
        "comm_ns": comm_ns,
        "overlapped_comm_ns": overlapped_ns,
        "exposed_comm_ns": exposed,
        "exposed_copy_ns": 0,
        "idle_ns": window_ns - compute_ns - exposed,
        "unclassified_ns": 0,
        "transfer_ns": comm_ns,
        "peer_wait_ns": 0,
        "comm_share": comm_ns / window_ns if has_shares else None,
        "exposed_comm_share": exposed / window_ns if has_shares else None,
        "overlap": overlapped_ns / comm_ns if comm_ns and not is_hidden else None,
    }


def input_row(path: str = "a.sqlite", run: Row | None = None, **fields: Any) -> dict[str, Any]:
    """Return a row of inputs, of a GPU trace unless fields say otherwise."""
    return {
        "path": path, "format": "nsys_sqlite", "tool_version": "2026.2", "schema_version": "3.25",
        "device_kind": "cuda", "clock": None, "session_start_utc_ns": None, "run": run, **fields,
    }  # fmt: skip


def finding(code: str, **fields: Any) -> dict[str, Any]:
    """Return a finding."""
    return {
        "code": code, "form": None, "severity": "high", "rank": 0, "step": None, "value": 0.5, "unit": "fraction",
        "recoverable_ns": 30, "predicted_step_ns": 90, "confidence": 0.9, "evidence": [], "advice": "mend it", **fields,
    }  # fmt: skip


def report_of_steps(
    steps: Sequence[Row], *, n_ranks: int = 1, path: str = "a.sqlite", run: Row | None = None, **sections: Any
) -> Report:
    """Return a report whose ranks all have the same steps, each an `account`."""
    names = steps[0].keys()
    summed = {
        name: sum(step[name] for step in steps) if name.endswith("_ns") else steps[0][name] for name in names
    }
    extent = {
        "window_basis": "steps", "window_start_ns": 0, "window_end_ns": summed["window_ns"], "between_steps_ns": 0
    }  # fmt: skip
    ranks = tuple({"rank": r, "device": r, "pid": 100 + r, **extent, **summed} for r in range(n_ranks))
    rows = tuple(
        {
            "rank": rank,
            "step": number,
            "name": f"step {number}",
            "start_ns": 0,
            "end_ns": step["window_ns"],
            "n_ops": 1,
            **step,
        }
        for rank in range(n_ranks)
        for number, step in enumerate(steps)
    )
    device = sections.pop("device", {})
    return Report((input_row(path, run, **device),), {"ranks": ranks, "steps": rows, **sections})
