"""The NVTX vocabulary that instrumented runs write and the analyzer reads. It imports nothing of ours.

Every range of ours lies in the NVTX domain `cptrace`. Its text is a *label*: a name, then `key=value` fields,
separated by single spaces:

    step                                       one measured step, payload = step index
    warmup                                     one unmeasured step, payload = step index
    forward layer=0                            one pass of one layer, payload = layer
    backward layer=0
    attention pass=forward layer=0 hop=2       the launch of one op, payload = hop (0 where there are no hops)
    send_recv pass=forward layer=0 hop=2 tensor=kv bytes=1048576 peers=1,3
    copy pass=forward layer=0 hop=0 packs=kv      a copy that prepares what is sent; unpacks=kv: that reads what came

Around attention a model has ops of its own: `gemm` a matrix product, `norm` an RMSNorm, `rope` the rotation of q
and k, `activation` what is computed per element, `loss`, and `grad_norm` the norm of a layer's gradients after their
all-reduce. What the model sends, and attention does not, is told by its tensor: see `MODEL_TENSORS`.

The payload repeats one field as an integer, because Python's `nvtx` can carry a number and no structure, and
because `nsys stats` shows it. `bytes` counts what this rank sends. The ranges enclose host calls; the device time
of an op is found through the launch inside its range.

On the emulated device no profiler sees device work and calls, since there is no CUDA. Where a profiler listens, the
device therefore says them in ranges too, with the correlation id as payload. They are told from the ranges above by
their names, and from each other by their threads: the last one lies on the thread of its stream.

    call api=cudaLaunchKernel_v7000                                       a host call
    record api=cudaEventRecord_v3020 stream=7 event=2 event_sync_id=5     one that records an event
    wait api=cudaStreamWaitEvent_v3020 stream=13 event=2 event_sync_id=5  one that orders work: which fields it has
                                                                          tells its sort, as in `schema.SYNCS`
    execute kind=kernel device=0 stream=7 name=cptrace_cpu::fill          the op itself, from its start to its end
    execute kind=memcpy device=0 stream=7 bytes=64
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

DOMAIN: Final = "cptrace"

STEP: Final = "step"
WARMUP: Final = "warmup"
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
PASSES: Final = (FORWARD, BACKWARD)

ATTENTION: Final = "attention"
MERGE: Final = "merge"
COPY: Final = "copy"
GEMM: Final = "gemm"
NORM: Final = "norm"
ROPE: Final = "rope"
ACTIVATION: Final = "activation"
LOSS: Final = "loss"
GRAD_NORM: Final = "grad_norm"
SEND_RECV: Final = "send_recv"
ALL_GATHER: Final = "all_gather"
REDUCE_SCATTER: Final = "reduce_scatter"
ALL_REDUCE: Final = "all_reduce"
ALL_TO_ALL: Final = "all_to_all"
BROADCAST: Final = "broadcast"

COMMUNICATION: Final = (SEND_RECV, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, BROADCAST)
"""Labels that enclose the launch of a communication op; each is also the name of its collective kind."""

GRADS: Final = "grads"
ATTENTION_OUT: Final = "attention_out"
FFN_OUT: Final = "ffn_out"
ATTENTION_DX: Final = "attention_dx"
FFN_DX: Final = "ffn_dx"
MODEL_TENSORS: Final = (GRADS, ATTENTION_OUT, FFN_OUT, ATTENTION_DX, FFN_DX)
"""What a model's own all-reduces carry: weight gradients over the ranks that share the sequence, and over the ranks
that share the weights the outputs of both halves of a block, and the gradients of their inputs."""

PACKS: Final = "packs"
UNPACKS: Final = "unpacks"
PURPOSES: Final = (PACKS, UNPACKS)
"""Fields of a copy that say which transfer's data it prepares, or reads once it has arrived."""

SCOPES: Final = (STEP, WARMUP, *PASSES)
MODEL_OPS: Final = (GEMM, NORM, ROPE, ACTIVATION, LOSS, GRAD_NORM)
OPS: Final = (ATTENTION, MERGE, COPY, *MODEL_OPS, *COMMUNICATION)

CALL: Final = "call"
RECORD: Final = "record"
WAIT: Final = "wait"
EXECUTE: Final = "execute"
MIRRORED: Final = (CALL, RECORD, WAIT, EXECUTE)
"""Labels that stand for what a profiler of CUDA would record by itself."""

NAMES: Final = (*SCOPES, *OPS, *MIRRORED)

RUN_METADATA_KEY: Final = "CPTRACE_RUN"
"""Name of the row in META_DATA_CAPTURE whose value describes the run as JSON (schema `cptrace.run/1`)."""

RUN_METADATA_SCHEMA: Final = "cptrace.run/1"


LOCAL_D2D: Final = "local-d2d"
"""Transport of a run whose ranks share one GPU: copies within it, which cross no link and have no bandwidth to tell."""

CUDA: Final = "cuda"
CPU_EMULATED: Final = "cpu-emulated"
"""Kinds of device: a run says which one it had, and no figure of an emulated one is a GPU's."""


@dataclass(frozen=True, slots=True)
class Label:
    """One parsed label: its name and its fields as text, in the order written."""

    name: str
    fields: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def format_label(name: str, /, **fields: int | str | tuple[int, ...]) -> str:
    """Return the text of a label.

    Args:
        name: One of `NAMES`.
        **fields: Values without spaces; a tuple of integers is written with commas.

    Raises:
        ValueError: The name is not in the vocabulary, or a value holds a space.

    Example:
        >>> format_label("send_recv", layer=0, hop=2, peers=(1, 3))
        'send_recv layer=0 hop=2 peers=1,3'
    """
    if name not in NAMES:
        raise ValueError(f"label name {name!r} is not in the vocabulary {NAMES}")
    words = [name]
    for key, value in fields.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if " " in text or not text:
            raise ValueError(f"label field {key}={text!r} must be one non-empty word")
        words.append(f"{key}={text}")
    return " ".join(words)


def parse_label(text: str) -> Label | None:
    """Return the label that a range's text holds, or None where the text is not one of ours.

    Args:
        text: Text of an NVTX range in the domain `cptrace`.

    Example:
        >>> parse_label("attention layer=0 hop=2").fields["hop"]
        '2'
    """
    name, *words = text.split(" ")
    pairs = [word.partition("=") for word in words]
    if name not in NAMES or any(not key or not equals for key, equals, _ in pairs):
        return None
    return Label(name, MappingProxyType({key: value for key, _, value in pairs}))
