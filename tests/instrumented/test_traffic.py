"""What every scheme's report says was sent is what its formula says, read back by the analyzer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cptrace
from cptrace.schemes import SCHEMES
from tests.instrumented.conftest import run_apart
from tests.instrumented.scheme_cases import SIZES, SMALL, name_of

VARIANTS: tuple[dict[str, Any], ...] = (
    {"kv_heads": 8},
    {"kv_heads": 4, "causal": True, "seq_len": 47, "layers": 2, "steps": 2, "warmup": 1},
    {"kv_heads": 4, "forward_only": True, "dtype": "bf16"},
)
SPECS = [
    {**SMALL, "scheme": scheme.name, "cp_size": size, "check": False, **variant}
    for scheme in SCHEMES
    for size in SIZES[scheme.name]
    for variant in VARIANTS
]
SPECS += [
    {**SMALL, "scheme": "te", "cp_size": 2, "message_dtype": "fp8", "warmup": 1, "layers": 2, **limit}
    for limit in ({}, {"fp8_score_limit": 0.001})
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the report of each of `SPECS`."""
    folder = tmp_path_factory.mktemp("traffic")
    run_apart("reports", json.dumps(SPECS), folder)
    return [folder / f"{number}.sqlite" for number in range(len(SPECS))]


@pytest.mark.parametrize("number", range(len(SPECS)), ids=[name_of(spec) for spec in SPECS])
def test_every_rank_pass_and_layer_sent_what_the_formula_says(reports: list[Path], number: int) -> None:
    spec, rows = SPECS[number], cptrace.analyze(reports[number]).rows("traffic")
    passes = ("forward",) if spec.get("forward_only") else ("forward", "backward")
    assert [(row["rank"], row["pass"], row["layer"]) for row in rows] == [
        (rank, name, layer)
        for rank in range(spec["cp_size"])
        for name in passes
        for layer in range(spec.get("layers", 1))
    ]
    for row in rows:
        assert (row["bytes"], row["n_messages"]) == (row["expected_bytes"], row["expected_n_messages"])
        assert (row["difference_bytes"], row["n_steps"], row["part"]) == (0, spec["steps"], "attention")
        assert sum(sent["bytes"] for sent in row["by_tensor"]) == row["bytes"]
        assert (row["bytes"] > 0) == (spec["scheme"] != "single")


def test_fp8_and_its_fallback_are_told_apart(reports: list[Path]) -> None:
    used, fallen_back = (
        sum(row["bytes"] for row in cptrace.analyze(path).rows("traffic")) for path in reports[-2:]
    )
    assert used < fallen_back
