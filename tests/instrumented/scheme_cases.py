"""The runs that tests of all schemes look at: every scheme in every mask, head grouping and type, and odd ones."""

from __future__ import annotations

from itertools import product
from typing import Any, Final

from cptrace.capture.run_spec import ELEMENT_BYTES
from cptrace.schemes import SCHEMES

SMALL: Final = {
    "clock": "virtual",
    "seq_len": 48,
    "heads": 8,
    "kv_heads": 8,
    "head_dim": 16,
    "steps": 1,
    "warmup": 0,
}

NAMES: Final = tuple(scheme.name for scheme in SCHEMES)
SIZES: Final = {
    scheme.name: (2, 4) if scheme.max_cp_size is None else (scheme.max_cp_size,) for scheme in SCHEMES
}


def name_of(options: dict[str, Any]) -> str:
    """Return a case's name: what differs from `SMALL`."""
    shown = {key: value for key, value in options.items() if SMALL.get(key) != value}
    words = {True: "causal", False: "full"}
    return "-".join(
        words[value] if key == "causal" else str(value) if isinstance(value, str) else f"{key}{value}"
        for key, value in shown.items()
    )


def _matrix() -> list[dict[str, Any]]:
    return [
        {"scheme": scheme, "cp_size": size, "causal": causal, "kv_heads": kv_heads, "dtype": dtype}
        for scheme in NAMES
        for size in SIZES[scheme]
        for causal, kv_heads, dtype in product((False, True), (8, 4), ELEMENT_BYTES)
        if dtype != "fp16" or size != 2  # the more ranks, the more there is to round
    ]


def _padded() -> list[dict[str, Any]]:
    """Lengths that do not divide; 5 over 4 ranks leaves the last one, or its half, nothing but padding."""
    return [
        {"scheme": scheme, "cp_size": SIZES[scheme][-1], "causal": causal, "seq_len": seq_len}
        for scheme, causal, seq_len in product(NAMES, (False, True), (5, 7, 47))
    ] + [
        {"scheme": scheme, "cp_size": 2, "causal": True, "seq_len": 7}
        for scheme in NAMES
        if len(SIZES[scheme]) > 1
    ]


def _sizes() -> list[dict[str, Any]]:
    """Other numbers of ranks, among them odd ones and those that do not divide the heads."""
    pairs = [("ring", 3), ("zigzag_ring", 3), ("striped_ring", 5), ("te", 3), ("te", 5), ("all_gather", 3)]
    pairs += [("all_gather_sliced", 6), ("te", 8), ("ulysses", 8), ("usp", 8), ("zigzag_ring", 8), ("tp", 8)]
    return [{"scheme": scheme, "cp_size": size, "causal": True} for scheme, size in pairs]


def _others() -> list[dict[str, Any]]:
    four = {"cp_size": 4, "causal": True}
    fewer_kv_heads = [
        {**four, "scheme": scheme, "kv_heads": kv_heads, "dtype": dtype}
        for scheme, kv_heads, dtype in product(
            ("ulysses", "ulysses_chunked", "usp"), (1, 2), ("fp32", "bf16")
        )
    ]
    repeated = [{**four, "scheme": s, "cp_size": SIZES[s][-1], "layers": 2, "steps": 2} for s in NAMES]
    meshes = [{**four, "scheme": "usp", "ulysses_size": u} for u in (1, 4)]
    meshes += [{**four, "scheme": "usp", "cp_size": 6, "heads": 12, "kv_heads": 3, "ulysses_size": 3}]
    meshes += [{**four, "scheme": "usp", "cp_size": 6, "ulysses_size": 2, "seq_len": 31}]
    fp8 = [
        {
            **four,
            "scheme": "te",
            "message_dtype": "fp8",
            "warmup": 1,
            "layers": 2,
            "dtype": dtype,
            "causal": causal,
        }
        for dtype, causal in product(ELEMENT_BYTES, (False, True))
    ]
    fp8 += [
        {**fp8[0], "fp8_score_limit": 1.0},
        {**fp8[0], "head_dim": 5, "kv_heads": 1, "heads": 3, "seq_len": 23},
    ]
    long = [
        {
            "scheme": scheme,
            "cp_size": 4,
            "causal": causal,
            "seq_len": 2999,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 4,
        }
        for scheme, causal in (("zigzag_ring", True), ("ulysses", False))
    ]
    return [*fewer_kv_heads, *repeated, *meshes, *fp8, *long]


CASES: Final = {name_of(case): {**SMALL, **case} for case in (*_matrix(), *_padded(), *_sizes(), *_others())}
