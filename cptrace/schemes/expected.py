"""What a run should have sent, by its scheme's formula and what the run recorded about itself (`cptrace.run/1`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cptrace import labels
from cptrace.errors import UsageError
from cptrace.schemes import ELEMENT_BYTES, HEADS, AttentionShape, SchemeInfo, Traffic, find_scheme
from cptrace.schemes.traffic import SCORE_BYTES
from cptrace.schemes.transformer import LLAMA, BlockShape, block_traffic


def expected_traffic(run: Mapping[str, Any]) -> dict[tuple[str, int], Traffic]:
    """Return what one rank sends in one step, for each pass and layer of a run.

    Args:
        run: The run's description.

    Raises:
        ValueError: The description lacks what the formula needs.
    """
    try:
        scheme, shape, layers = find_scheme(run["scheme"]), _shape_of(run), range(int(run["layers"]))
        fp8 = run["checks"]["fp8_messages"]
        fp8_layers = frozenset() if fp8 is None else frozenset(fp8["fp8_layers"])
        if scheme.layout == HEADS and run.get("model") == LLAMA:
            # The sums that the scheme stands for are the model's own then; attention itself sends nothing.
            return {(name, layer): Traffic(0, 0) for name in run["passes"] for layer in layers}
        return {
            (name, layer): _of_pass(
                scheme, name, shape, falls_back=fp8 is not None and layer not in fp8_layers
            )
            for name in run["passes"]
            for layer in layers
        }
    except KeyError as error:
        raise ValueError(f"it has no {error}") from error
    except (TypeError, AttributeError, ZeroDivisionError, UsageError) as error:
        raise ValueError(str(error)) from error


def expected_around(run: Mapping[str, Any]) -> dict[tuple[str, int], Traffic]:
    """Return what one rank sends in one step for the model around attention, for each pass and layer of a run.

    Args:
        run: The run's description.

    Returns:
        The traffic; empty where attention is all that ran.

    Raises:
        ValueError: The description lacks what the formula needs.
    """
    if run.get("model") != LLAMA:
        return {}
    try:
        of_pass = dict(zip(labels.PASSES, block_traffic(_block_of(run)), strict=True))
        return {(name, layer): of_pass[name] for name in run["passes"] for layer in range(int(run["layers"]))}
    except KeyError as error:
        raise ValueError(f"it has no {error}") from error
    except (TypeError, ZeroDivisionError, UsageError) as error:
        raise ValueError(str(error)) from error


def _block_of(run: Mapping[str, Any]) -> BlockShape:
    """Return the sizes of one rank's part of a block; a scheme that splits heads splits the weights alike."""
    splits_heads = find_scheme(run["scheme"]).layout == HEADS
    n_ranks = int(run["cp_size"] if splits_heads else run.get("tp_size", 1))
    shape = replace(
        _shape_of(run),
        cp_size=1 if splits_heads else int(run["cp_size"]),
        heads=int(run["heads"]) // n_ranks,
        kv_heads=int(run["kv_heads"]) // n_ranks,
    )
    return BlockShape(shape, int(run["hidden"]), int(run["ffn"]), n_ranks)


def _shape_of(run: Mapping[str, Any]) -> AttentionShape:
    """Return the sizes of attention in one context-parallel group; tensor parallelism around it splits heads."""
    tp_size = int(run.get("tp_size", 1))
    return AttentionShape(
        seq_len=int(run["seq_len"]) + int(run["padded_tokens"]),
        cp_size=int(run["cp_size"]),
        heads=int(run["heads"]) // tp_size,
        kv_heads=int(run["kv_heads"]) // tp_size,
        head_dim=int(run["head_dim"]),
        element_bytes=ELEMENT_BYTES[run["dtype"]],
        is_causal=bool(run["causal"]),
        ulysses_size=int(run["ulysses_size"]),
        has_fp8_messages=run["checks"]["fp8_messages"] is not None,
    )


def _of_pass(scheme: SchemeInfo, pass_name: str, shape: AttentionShape, *, falls_back: bool) -> Traffic:
    """Return what a pass of a layer sends.

    A layer whose scores are too large for fp8 sends the run's data type, and still tells its largest score.
    """
    count = {labels.FORWARD: scheme.forward, labels.BACKWARD: scheme.backward}[pass_name]
    if not falls_back:
        return count(shape)
    plain = count(replace(shape, has_fp8_messages=False))
    if pass_name == labels.BACKWARD:
        return plain
    return Traffic(plain.n_bytes + SCORE_BYTES * (shape.cp_size - 1), plain.n_messages + 1)
