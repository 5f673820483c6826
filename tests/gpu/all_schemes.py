"""Runs every scheme with all its ranks on one GPU: `python tests/gpu/all_schemes.py FOLDER`.

Says how exact each was. Each run writes its report into the folder, timed by CUDA events and small enough to keep, and
all of them `results.json`. It takes some minutes; `--budget-s` ends it earlier, and then says what it left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from cptrace.capture.run_spec import RunSpec
from cptrace.errors import CptraceError
from cptrace.schemes import SCHEMES
from instrumented.run import run

MOST_BYTES: Final = 256 << 10  # of a report

MIDDLE: Final = {"seq_len": 2048, "heads": 8, "kv_heads": 8, "head_dim": 64, "dtype": "bf16"}
GROUPED: Final = {**MIDDLE, "kv_heads": 4, "causal": True}
SINGLE_PRECISION: Final = {"seq_len": 510, "heads": 8, "kv_heads": 8, "head_dim": 32, "dtype": "fp32"}
VARIANTS: Final = (GROUPED, MIDDLE, SINGLE_PRECISION)


def specs() -> Iterator[RunSpec]:
    """Yield what to run, the most telling first."""
    for variant in VARIANTS:
        for scheme in SCHEMES:
            size = 4 if scheme.max_cp_size is None else scheme.max_cp_size
            yield RunSpec(**{**variant, "scheme": scheme.name, "cp_size": size, "steps": 1, "device": "cuda"})
    yield RunSpec(**{**GROUPED, "scheme": "te", "message_dtype": "fp8", "steps": 1, "device": "cuda"})
    yield RunSpec(
        **{**GROUPED, "scheme": "ring", "model": "llama", "hidden": 1024, "steps": 1, "device": "cuda"}
    )
    yield RunSpec(
        **{**GROUPED, "scheme": "ring", "dtype": "fp64", "seq_len": 256, "steps": 1, "device": "cuda"}
    )


def run_one(spec: RunSpec, path: Path) -> dict[str, Any]:
    """Return what a run came to, with its report at `path`."""
    start = time.monotonic()
    summary: dict[str, Any] = {"report": path.name, "scheme": spec.scheme, "dtype": spec.dtype}
    try:
        spec.validate()
        metadata = run(spec, path, lambda _text: None)
    except CptraceError as error:
        return {**summary, "passed": False, "error": str(error), "seconds": time.monotonic() - start}
    assert metadata is not None
    rows = metadata["checks"]["parity"]
    worst = max(rows, key=lambda row: (row["rms_error"] or 1e9) / max(row["rms_limit"], 1e-300))
    return {
        **summary,
        "passed": all(row["passed"] for row in rows) and metadata["checks"]["running_max"]["passed"],
        "transport": metadata["transport"],
        "gpu": metadata.get("gpu"),
        "worst": worst,
        "bytes": path.stat().st_size,
        "seconds": time.monotonic() - start,
    }


def run_all(
    folder: Path, wanted: Sequence[RunSpec], budget_s: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what the runs came to, and the names of those for which there was no time."""
    end, results, left_out = time.monotonic() + budget_s, [], []
    for number, spec in enumerate(wanted):
        if time.monotonic() > end:
            left_out.append(f"{spec.scheme} {spec.dtype}")
            continue
        results.append(run_one(spec, folder / f"{number:02}-{spec.scheme}-{spec.dtype}.sqlite"))
    (folder / "results.json").write_text(json.dumps({"runs": results, "left_out": left_out}, indent=1))
    return results, left_out


def main() -> int:
    """Run from the command line; the exit code is 1 where a run failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where reports go")
    parser.add_argument("--budget-s", type=float, default=420, help="when to begin no further run")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    results, left_out = run_all(options.folder, list(specs()), options.budget_s)
    for result in results:
        sys.stdout.write(json.dumps({key: value for key, value in result.items() if key != "worst"}) + "\n")
    sys.stdout.write(
        f"{sum(r['passed'] for r in results)} of {len(results)} passed, {len(left_out)} left out\n"
    )
    return int(not all(result["passed"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
