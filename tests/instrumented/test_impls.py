"""Libraries behind the verb: what they are called with, on one rank, by stand-ins that compute plain attention."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cptrace.capture.run_spec import RunSpec
from cptrace.errors import RunError, UsageError
from cptrace.labels import parse_label
from instrumented import backends
from instrumented.checks import ParityCheck
from instrumented.impls import LIBRARIES, implementation_of, torch_cp, transformer_engine, yunchang
from instrumented.impls import base as impls_base
from instrumented.problem import LayerState, Problem, make_inputs
from instrumented.runtime.clocks import TimeModel, VirtualClock
from instrumented.runtime.cpu import CpuDevice

CASES = [(library.name, scheme) for library in LIBRARIES for scheme in library.schemes]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Tensor:
    """Return differentiable attention of BSHD tensors."""
    n = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(n, dim=2), v.repeat_interleave(n, dim=2)
    scores = torch.einsum("blhd,bshd->bhls", q, k) * scale
    if is_causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf
        )
    return torch.einsum("bhls,bshd->blhd", scores.softmax(-1), v)


class Calls:
    """What the stand-ins were called with."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}
        self.n_contexts = 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Install stand-ins of all libraries."""
    calls = Calls()
    group = SimpleNamespace(name="group")
    monkeypatch.setattr(
        impls_base.dist,
        "new_group",
        lambda ranks, backend: calls.seen.setdefault("groups", []).append(ranks) or group,
    )
    for module in (yunchang, transformer_engine):
        monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    _install_ring_flash_attn(calls, monkeypatch)
    _install_yunchang(calls, monkeypatch)
    _install_transformer_engine(calls, monkeypatch)
    _install_torch(calls, monkeypatch)
    return calls


def _install_ring_flash_attn(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(name: str) -> Any:
        def attend(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, group: Any) -> Tensor:
            calls.seen["function"] = name
            return plain_attention(q, k, v, softmax_scale, causal)

        return attend

    package = ModuleType("ring_flash_attn")
    for name in ("ring_flash_attn_func", "zigzag_ring_flash_attn_func", "stripe_flash_attn_func"):
        setattr(package, name, function(name))
    monkeypatch.setitem(sys.modules, "ring_flash_attn", package)


def _install_yunchang(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("yunchang")
    package.set_seq_parallel_pg = lambda *numbers: calls.seen.update(mesh=numbers)  # type: ignore[attr-defined]

    class LongContextAttention:
        def __init__(self, scatter_idx: int, gather_idx: int, ring_impl_type: str) -> None:
            calls.seen["kind"] = ring_impl_type

        def __call__(self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> Tensor:
            return plain_attention(q, k, v, softmax_scale, causal)

    package.LongContextAttention = LongContextAttention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "yunchang", package)


def _install_transformer_engine(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    class DotProductAttention:
        def __init__(self, heads: int, head_dim: int, *, softmax_scale: float, attn_mask_type: str, **_: Any):
            self.scale, self.is_causal = softmax_scale, attn_mask_type == "causal"

        def set_context_parallel_group(self, group: Any, ranks: list[int], stream: Any, kind: str) -> None:
            calls.seen.update(ranks=ranks, kind=kind, n_groups=len(group) if isinstance(group, list) else 1)

        def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return plain_attention(q, k, v, self.scale, self.is_causal).flatten(2)

    package = ModuleType("transformer_engine.pytorch")
    package.DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "stream")


def _install_torch(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import device_mesh
    from torch.distributed.tensor import experimental
    from torch.distributed.tensor.experimental import _attention

    @contextmanager
    def context_parallel(
        mesh: Any, buffers: list[Tensor], buffer_seq_dims: list[int], no_restore_buffers: Any
    ):
        assert [tuple(buffer.shape) for buffer in buffers] == [(calls.seen["seq_len"],)]
        assert no_restore_buffers == set(buffers)
        calls.n_contexts += 1
        yield

    monkeypatch.setattr(torch_cp, "_DEVICE", "cpu")
    monkeypatch.setattr(device_mesh, "init_device_mesh", lambda device, shape: calls.seen.update(mesh=shape))
    monkeypatch.setattr(experimental, "context_parallel", context_parallel)
    monkeypatch.setattr(_attention, "set_rotate_method", lambda name: calls.seen.update(rotation=name))
    monkeypatch.setattr(torch_cp, "sdpa_kernel", contextmanager(lambda _backend: iter([None])))


def attend(name: str, scheme: str, calls: Calls, **options: Any) -> bool:
    """Run both passes of a library that takes the whole sequence for one rank's, and return whether they are right."""
    spec = RunSpec(
        **{
            "impl": name, "scheme": scheme, "device": "cuda", "cp_size": 4, "seq_len": 32, "heads": 8,
            "kv_heads": 4, "head_dim": 8, "causal": True, "dtype": "bf16" if name == "torch" else "fp32", **options,
        }
    )  # fmt: skip
    spec.validate()
    calls.seen["seq_len"] = spec.seq_len
    implementation, problem = implementation_of(spec), Problem.of(spec)
    device = CpuDevice(0, 4, VirtualClock(), TimeModel(1.0, 1.0, 1.0, 1.0))
    state = LayerState.allocate(device, make_inputs(problem, 0, 0))
    attention = implementation.make(device, problem, [state])
    attention.forward(0)
    attention.backward(0)
    device.synchronize()
    labels = [parse_label(item.text) for item in device.record().ranges]
    assert [label.name for label in labels if label] == ["attention", "attention"]
    device.close()

    class Whole:
        """All tokens on one rank, in order."""

        name = "whole"

        def n_tokens(self, rank: int) -> int:
            return spec.seq_len

        def shard(self, whole: Tensor, rank: int) -> Tensor:
            return whole

        def unshard(self, shards: Any) -> Tensor:
            return shards[0]

    shards = {"out": [state.out_BLHD], "dq": [state.dq_BLHD], "dk": [state.dk_BLGD], "dv": [state.dv_BLGD]}
    rows = ParityCheck(problem, Whole(), 0, with_backward=True).rows(0, shards, has_fp8_keys=False)
    return all(row.has_passed or (spec.dtype == "bf16" and (row.max_error or 1) < 0.1) for row in rows)


@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_a_library_computes_a_scheme_forward_and_backward(name: str, scheme: str, calls: Calls) -> None:
    assert attend(name, scheme, calls)


def test_each_scheme_asks_for_its_own_form(calls: Calls) -> None:
    attend("ring-flash-attn", "striped_ring", calls)
    assert calls.seen["function"] == "stripe_flash_attn_func"
    attend("transformer-engine", "usp", calls)
    assert (calls.seen["kind"], calls.seen["n_groups"], calls.seen["ranks"]) == ("a2a+p2p", 2, [0, 1, 2, 3])
    assert calls.seen["groups"][-4:] == [[0, 1], [2, 3], [0, 2], [1, 3]]
    attend("yunchang", "usp", calls)
    assert (calls.seen["mesh"], calls.seen["kind"]) == ((2, 2, 0, 4), "zigzag")
    attend("yunchang", "ulysses", calls)
    assert (calls.seen["mesh"], calls.seen["kind"]) == ((4, 1, 0, 4), "basic")
    attend("torch", "all_gather", calls)
    assert calls.seen["rotation"] == "allgather"
    assert calls.n_contexts == 2  # one for each pass


@pytest.mark.parametrize(
    ("name", "scheme", "options", "message"),
    [
        ("ring-flash-attn", "zigzag_ring", {"causal": False}, "is for causal attention alone; use --causal"),
        ("torch", "te", {"dtype": "fp32"}, "use --dtype bf16"),
        (
            "yunchang",
            "ulysses",
            {"seq_len": 30},
            "masks no padding; use a multiple of 8, such as 32",
        ),
    ],
)
def test_what_a_library_cannot_do_is_refused(
    name: str, scheme: str, options: dict[str, Any], message: str, calls: Calls
) -> None:
    with pytest.raises(UsageError, match=message):
        attend(name, scheme, calls, **options)


def test_a_library_of_another_version_is_an_error_in_one_line(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ring_flash_attn", ModuleType("ring_flash_attn"))
    with pytest.raises(RunError, match=r"--impl ring-flash-attn cannot be used: .*ring_flash_attn_func"):
        attend("ring-flash-attn", "ring", calls)


def test_a_library_needs_a_device_for_each_rank() -> None:
    spec = RunSpec(impl="torch", scheme="te", device="cuda")
    assert backends.choose_backend(spec, 4) is backends.NCCL
    with pytest.raises(RunError, match="needs a CUDA device for each of 4 ranks, and this host has 1"):
        backends.choose_backend(spec, 1)
