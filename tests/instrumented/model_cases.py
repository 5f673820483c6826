"""The runs of the model that tests look at."""

from __future__ import annotations

from typing import Any, Final

from cptrace.schemes import SCHEMES

SMALL: Final = {
    "model": "llama",
    "clock": "virtual",
    "cp_size": 2,
    "seq_len": 32,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 8,
    "hidden": 24,
    "ffn": 48,
    "layers": 2,
    "steps": 2,
    "warmup": 1,
}

SCHEME_CASES: Final = {
    f"{scheme.name}-{'causal' if causal else 'full'}": {
        "scheme": scheme.name,
        "causal": causal,
        "cp_size": scheme.max_cp_size or 2,
    }
    for scheme in SCHEMES
    for causal in (False, True)
}

OTHER_CASES: Final[dict[str, dict[str, Any]]] = {
    "gqa": {"scheme": "zigzag_ring", "causal": True, "kv_heads": 2},
    "gqa-replicated": {"scheme": "ulysses", "causal": True, "kv_heads": 1},
    "bf16": {"scheme": "ring", "dtype": "bf16"},
    "bf16-te": {"scheme": "te", "dtype": "bf16", "causal": True},
    "fp64": {"scheme": "striped_ring", "dtype": "fp64", "causal": True},
    "fp8": {"scheme": "te", "message_dtype": "fp8", "causal": True},
    "padded": {"scheme": "zigzag_ring", "causal": True, "seq_len": 29},
    "padded-full": {"scheme": "all_gather", "seq_len": 29},
    "forward": {"scheme": "ring", "forward_only": True},
    "one-layer": {"scheme": "usp", "layers": 1},
    "uneven-weights": {"scheme": "ring", "cp_size": 3, "seq_len": 30, "hidden": 26, "ffn": 50},
    "four": {"scheme": "usp", "cp_size": 4, "causal": True},
    "nothing-but-padding": {"scheme": "ring", "cp_size": 4, "seq_len": 5, "causal": True},
    "fault": {"scheme": "ring", "faults": ["no-wait"]},
    "unchecked": {"scheme": "ring", "check": False},
}

TP_CASES: Final[dict[str, dict[str, Any]]] = {
    **{
        f"tp-{scheme}": {"scheme": scheme, "causal": True, "tp_size": 2, "heads": 8, "kv_heads": 4}
        for scheme in ("all_gather", "ring", "zigzag_ring", "striped_ring", "te", "ulysses", "usp")
    },
    "tp-chunked": {"scheme": "ulysses_chunked", "tp_size": 2, "heads": 8, "kv_heads": 8},
    "tp-bf16": {"scheme": "zigzag_ring", "causal": True, "tp_size": 2, "dtype": "bf16"},
    "tp-padded": {"scheme": "zigzag_ring", "causal": True, "tp_size": 2, "seq_len": 29},
    "tp-alone": {"scheme": "single", "cp_size": 1, "tp_size": 4},
    "tp-scheme": {"scheme": "tp", "cp_size": 4},
}

BROKEN_CASES: Final[dict[str, dict[str, Any]]] = {
    "broken-gradients": {"scheme": "ring", "broken": "gradients"},
    "broken-mean": {"scheme": "ring", "broken": "mean"},
    "broken-merge": {"scheme": "ring", "broken": "merge"},
    "broken-positions-zigzag": {"scheme": "zigzag_ring", "causal": True, "broken": "positions"},
    "broken-positions-striped": {"scheme": "striped_ring", "causal": True, "broken": "positions"},
}

RUNS: Final = {
    name: {**SMALL, **case}
    for name, case in {**SCHEME_CASES, **OTHER_CASES, **TP_CASES, **BROKEN_CASES}.items()
}
