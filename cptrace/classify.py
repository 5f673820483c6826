"""Decides what each op is for: communication, compute, copy or other; and which collective.

One ordered table of rules, applied once per distinct name: the first rule that matches decides. A kernel that no rule
knows counts as compute, because most custom kernels are, and is marked `is_unclassified`, so that the report can say
how much of its figures rests on that.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from cptrace import labels, schema
from cptrace.launches import Launches, closed_ranges, distinct_names, innermost_ranges, names_match
from cptrace.names import function_name
from cptrace.trace import Trace

COMM: Final = "comm"
COMPUTE: Final = "compute"
COPY: Final = "copy"
OTHER: Final = "other"
ROLES: Final = (COMM, COMPUTE, COPY, OTHER)

OTHER_COLLECTIVE: Final = "other"
COLLECTIVES: Final = (*labels.COMMUNICATION, OTHER_COLLECTIVE)


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table: kernels whose function matches the pattern have the role.

    Attributes:
        name: Stable name, shown in reports.
        role: One of `ROLES`.
        pattern: Searched in the function's qualified name, without return type, template and call arguments.
    """

    name: str
    role: str
    pattern: re.Pattern[str]


def _rule(name: str, role: str, pattern: str) -> Rule:
    return Rule(name, role, re.compile(pattern))


_ATTENTION: Final = re.compile(r"(?i)flash|fmha|sdpa|attention|attn")
# Kernels of CUTLASS and CK are one function each; what they compute is its template argument (FlashAttention 3 is one).
_WRAPPER: Final = re.compile(r"cutlass::(device_kernel|Kernel2?)|ck_tile::kentry")

KERNEL_RULES: Final[tuple[Rule, ...]] = (
    # ncclKernel_*, ncclDevKernel_*, ncclSymDevKernel_*, ncclSymkDevKernel_*; ncclAllReduceRingLLKernel_* before 2.8;
    # RCCL keeps NCCL's names.
    _rule("nccl", COMM, r"^nccl\w*Kernel"),
    _rule("rccl", COMM, r"^(rccl|msccl)"),
    _rule("nvshmem", COMM, r"(^|::)nvshmem"),
    _rule("deep-ep", COMM, r"^(deep_ep|dpsk::ep)::"),
    _rule("userbuffers", COMM, r"userbuffers"),
    _rule("symmetric-memory", COMM, r"multimem|symm_mem|symmetric_memory|(one|two)_shot_all_?reduce"),
    _rule("custom-all-reduce", COMM, r"cross_device_reduce"),
    # Ops of our own devices, emulated or timed by CUDA events, as their own record names them.
    _rule("emulated-comm", COMM, r"^cptrace_(cpu::gloo|cuda::(nccl|d2d))_"),
    _rule("emulated-attention", COMPUTE, r"^cptrace_(cpu|cuda)::flash_attention"),
    _rule("emulated-compute", COMPUTE, r"^cptrace_(cpu|cuda)::"),
    # Names of fused kernels list the graph nodes they came from, collectives among them: they do not communicate.
    _rule("inductor", COMPUTE, r"^triton_([a-z]+_)?fused_|^triton_(poi|red|per|tem|mm|flex|bmm|for)_"),
    _rule("named-collective", COMM, r"(?i)all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|send_?recv"),
    Rule("attention", COMPUTE, _ATTENTION),
    _rule(
        "gemm", COMPUTE, r"(?i)gemm|nvjet|cutlass|cublas|xmma|wgmma|splitK|^Cijk_|gemv|(^|_)s\d+(16|88)[a-z]+"
    ),
    _rule(
        "pytorch", COMPUTE, r"^(at|c10|torch|caffe2)::|^(vectorized|unrolled|elementwise)_|elementwise_kernel"
    ),
    _rule("cudnn", COMPUTE, r"(?i)cudnn|winograd|convolve|(^|_)conv\d?d?_|wgrad|dgrad|nhwc|nchw"),
    _rule(
        "library",
        COMPUTE,
        r"^(cub|thrust|cask|ck|transformer_engine|nvte|apex|vllm|fused|magma|cufft|rocblas|hipblas|deep_gemm|liger)",
    ),
    _rule("triton", COMPUTE, r"^triton_|^_\w+_kernel$"),
    _rule(
        "common-name",
        COMPUTE,
        r"(?i)softmax|layer_?norm|rms_?norm|rotary|rope|swiglu|gelu|silu|embedding|cross_?entropy|multi_tensor_apply"
        r"|adam|dropout|reduce_kernel|transpose|CatArray|index(Select|_select|_put)|scatter|gather|topk|memset|fill",
    ),
)

PEER_COPY: Final = "peer-copy"
NCCL_COPY: Final = "copy-engine-collective"
LOCAL_TRANSFER: Final = "local-transfer"
PLAIN_COPY: Final = "copy"
FALLBACK: Final = "fallback"
GRAPH: Final = "whole-graph"
ATTENTION_RULES: Final = ("attention", "emulated-attention")
_EXTRA_RULES: Final = (
    (PEER_COPY, COMM),
    (NCCL_COPY, COMM),
    (LOCAL_TRANSFER, COMM),
    (PLAIN_COPY, COPY),
    (FALLBACK, COMPUTE),
    (GRAPH, OTHER),
)
RULE_NAMES: Final = (*(rule.name for rule in KERNEL_RULES), *(name for name, _ in _EXTRA_RULES))
_UNCLASSIFIED: Final = (RULE_NAMES.index(FALLBACK), RULE_NAMES.index(GRAPH))
_RULE_ROLES: Final = (*(rule.role for rule in KERNEL_RULES), *(role for _, role in _EXTRA_RULES))

_COLLECTIVE_PATTERNS: Final = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (labels.ALL_TO_ALL, r"all_?to_?all|a2a"),
        (labels.REDUCE_SCATTER, r"reduce_?scatter"),
        (labels.ALL_GATHER, r"all_?gather"),
        (labels.ALL_REDUCE, r"all_?reduce|cross_device_reduce"),
        (labels.BROADCAST, r"broadcast"),
        (labels.SEND_RECV, r"send_?recv|p2p|push_?recv|pull_?send|isend|irecv"),
    )
)
_ANY_COLLECTIVE: Final = "(?i)" + "|".join(pattern.pattern for _, pattern in _COLLECTIVE_PATTERNS)
_COMM_LABEL: Final = rf"^({'|'.join(labels.COMMUNICATION)})( |$)"
_NCCL_API: Final = r"^nccl[A-Z]\w*$"


def classify(trace: Trace, launches: Launches) -> Trace:
    """Return the trace with the columns of `schema.ROLES` added to its ops.

    Args:
        trace: Trace as a source read it.
        launches: The launching call of each op.
    """
    ops = trace.ops
    rule = _rules_by_name(ops)
    _mark_copy_engine_collectives(trace, launches, rule)
    _mark_local_transfers(trace, launches, rule)
    role = np.array([ROLES.index(r) for r in _RULE_ROLES], np.int8)[rule]
    collective = _collectives(trace, launches, role == ROLES.index(COMM))
    added: dict[str, Any] = {
        "role": _categorical(role, ROLES),
        "collective": _categorical(collective, COLLECTIVES),
        "rule": _categorical(rule, RULE_NAMES),
        "is_unclassified": np.isin(np.arange(len(RULE_NAMES)), _UNCLASSIFIED)[rule],
    }
    classified = ops.assign(**added)
    schema.check_frame(schema.OPS, classified, schema.ROLES.columns)
    return dataclasses.replace(trace, ops=classified)


def _categorical(codes: npt.NDArray[np.int8], texts: tuple[str, ...]) -> pd.Categorical:
    dtype = pd.CategoricalDtype(pd.Index(texts, dtype="str"))
    return pd.Categorical.from_codes(codes, dtype=dtype, validate=False)


def is_attention(ops: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Return which ops compute attention, bool of shape (N,).

    Args:
        ops: Classified device work of N rows.
    """
    return np.isin(ops["rule"].cat.codes.to_numpy(), [RULE_NAMES.index(name) for name in ATTENTION_RULES])


def _rules_by_name(ops: pd.DataFrame) -> npt.NDArray[np.int8]:
    """Return the index of the rule for each op, by its kind and name alone."""
    names = ops["name"].cat
    of_name = np.array([_rule_of_kernel(name) for name in names.categories], np.int8)
    rule = of_name[names.codes.to_numpy()] if len(of_name) else np.zeros(len(ops), np.int8)
    kinds = ops["kind"].cat
    for kind, name in (("memcpy", PLAIN_COPY), ("memset", PLAIN_COPY), ("graph", GRAPH)):
        if kind in kinds.categories:
            rule[kinds.codes.to_numpy() == kinds.categories.get_loc(kind)] = RULE_NAMES.index(name)
    rule[ops["is_peer_copy"].to_numpy()] = RULE_NAMES.index(PEER_COPY)
    return rule


def _rule_of_kernel(name: str) -> int:
    function = function_name(name)
    if _WRAPPER.fullmatch(function) and _ATTENTION.search(name):
        return RULE_NAMES.index("attention")
    return next(
        (index for index, rule in enumerate(KERNEL_RULES) if rule.pattern.search(function)),
        RULE_NAMES.index(FALLBACK),
    )


def _mark_copy_engine_collectives(trace: Trace, launches: Launches, rule: npt.NDArray[np.int8]) -> None:
    """Mark copies that NCCL itself launched: since 2.28 a collective may consist of copies alone, without a kernel."""
    copies = np.flatnonzero((rule == RULE_NAMES.index(PLAIN_COPY)) & launches.is_known)
    if not len(copies):
        return
    ranges = closed_ranges(trace.ranges[names_match(trace.ranges["name"], _NCCL_API)])
    if len(ranges):
        calls = launches.call[copies]
        thread, instant = (trace.api_calls[name].to_numpy()[calls] for name in ("thread", "start_ns"))
        rule[copies[innermost_ranges(ranges, thread, instant)[1]]] = RULE_NAMES.index(NCCL_COPY)


def _mark_local_transfers(trace: Trace, launches: Launches, rule: npt.NDArray[np.int8]) -> None:
    """Mark what our own transfers consist of where all ranks share one GPU: copies and sums within it."""
    if trace.meta.run.get("transport") != labels.LOCAL_D2D or not launches.is_known.any():
        return
    is_ours = (trace.ranges["domain"] == labels.DOMAIN).to_numpy(dtype=bool)
    ranges = closed_ranges(trace.ranges[is_ours & names_match(trace.ranges["name"], _COMM_LABEL)])
    ops = np.flatnonzero(launches.is_known & (rule != RULE_NAMES.index(GRAPH)))
    if len(ranges):
        calls = launches.call[ops]
        thread, instant = (trace.api_calls[name].to_numpy()[calls] for name in ("thread", "start_ns"))
        inside = ops[innermost_ranges(ranges, thread, instant)[1]]
        is_recorded = np.isin(rule[inside], [RULE_NAMES.index("emulated-comm")])
        rule[inside[~is_recorded]] = RULE_NAMES.index(LOCAL_TRANSFER)


def _collectives(trace: Trace, launches: Launches, is_comm: npt.NDArray[np.bool_]) -> npt.NDArray[np.int8]:
    """Return the code of the collective kind of each op, -1 for ops that do not communicate."""
    names = trace.ops["name"].cat
    of_name = np.array([_collective_in(name) for name in names.categories], np.int8)
    collective = np.full(len(is_comm), -1, np.int8)
    collective[is_comm] = of_name[names.codes.to_numpy()[is_comm]]
    # Send/receive kernels carry rings and all-to-alls alike; the range that they were launched in tells which.
    unsure = (COLLECTIVES.index(labels.SEND_RECV), COLLECTIVES.index(OTHER_COLLECTIVE))
    ops = np.flatnonzero(is_comm & launches.is_known)
    ops = ops[np.isin(collective[ops], unsure)]
    in_range = _collectives_of_ranges(trace, launches.call[ops])
    collective[ops] = np.where(in_range >= 0, in_range, collective[ops])
    return collective


def _collectives_of_ranges(trace: Trace, calls: npt.NDArray[np.int64]) -> npt.NDArray[np.int8]:
    """Return the collective that the innermost telling range around each call names, -1 where none does."""
    if not len(calls):
        return np.full(0, -1, np.int8)
    ranges = closed_ranges(trace.ranges[names_match(trace.ranges["name"], _ANY_COLLECTIVE)])
    if ranges.empty:
        return np.full(len(calls), -1, np.int8)
    texts, slot = distinct_names(ranges["name"])
    of_text = np.array([_collective_in(text or "", sure=True) for text in texts], np.int8)
    thread, instant = (trace.api_calls[name].to_numpy()[calls] for name in ("thread", "start_ns"))
    found, is_found = innermost_ranges(ranges, thread, instant)
    return np.where(is_found, of_text[slot[found]], -1).astype(np.int8)


def _collective_in(name: str, *, sure: bool = False) -> int:
    """Return the code of the collective that a name tells; where it tells none, `other`, or -1 if we must be sure."""
    text = name if sure else function_name(name)
    for kind, pattern in _COLLECTIVE_PATTERNS:
        if pattern.search(text):
            return COLLECTIVES.index(kind)
    return -1 if sure else COLLECTIVES.index(OTHER_COLLECTIVE)
