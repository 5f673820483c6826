"""Every scheme on a real GPU, all ranks on one; and the script behind it on any machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cptrace
from cptrace.schemes import SCHEMES
from instrumented import devices
from tests.gpu.all_schemes import MOST_BYTES, run_all, run_one, specs
from tests.support.fake_cuda import FakeCuda

NO_GPU = "torch sees no CUDA device here"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
def test_every_scheme_is_right_on_one_gpu(tmp_path: Path) -> None:
    results, left_out = run_all(tmp_path, list(specs()), budget_s=420)
    assert all(result["passed"] for result in results), [r for r in results if not r["passed"]]
    assert {result["scheme"] for result in results} == {scheme.name for scheme in SCHEMES}, left_out
    for result in results:
        assert result["transport"] == "local-d2d"
        assert result["bytes"] <= MOST_BYTES, result
        report = cptrace.analyze(tmp_path / result["report"])
        assert report.inputs[0]["device_kind"] == "cuda"
        assert all(row["difference_bytes"] in (0, None) for row in report.rows("traffic"))
        assert all(row["bytes_per_s"] is None for row in report.rows("collectives"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
@pytest.mark.parametrize("kernel", ["flash-attn", "aten-flash", "aten-efficient", "dense"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_each_attention_kernel_agrees_with_float64(kernel: str, is_causal: bool) -> None:
    from instrumented import block_cuda

    chosen = next(item for item in block_cuda.KERNELS if item.name == kernel)
    data_type = torch.bfloat16 if "flash" in kernel else torch.float32
    q, k, v, dout = (
        torch.randn(1, 96, heads, 64, dtype=torch.float64, device="cuda") for heads in (8, 2, 2, 8)
    )
    if not chosen.takes(q.to(data_type)):
        pytest.skip(f"{kernel} is not installed")
    exact = block_cuda.KERNELS[-1]
    out, lse = exact.forward(q, k, v, is_causal, 0.125)
    wanted = (out, lse, *exact.backward((dout, q, k, v, out, lse), is_causal, 0.125))
    low = [t.to(data_type) for t in (q, k, v, dout)]
    low_out, low_lse = chosen.forward(*low[:3], is_causal, 0.125)
    gradients = chosen.backward((low[3], *low[:3], low_out, low_lse), is_causal, 0.125)
    tolerance = 3e-2 if data_type == torch.bfloat16 else 1e-3
    for actual, reference in zip((low_out, low_lse, *gradients), wanted, strict=True):
        torch.testing.assert_close(actual.double(), reference, rtol=tolerance, atol=tolerance)


def test_the_script_writes_small_reports_and_says_what_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stand-in for the GPU, with the longest of the runs: the most ops, and so the largest report."""
    monkeypatch.setattr(torch, "cuda", FakeCuda())
    monkeypatch.setattr(devices, "SHARED_PLACE", torch.device("cpu"))
    wanted = {spec.scheme: spec for spec in specs() if spec.dtype == "fp32"}
    results, left_out = run_all(tmp_path, [wanted["te"], wanted["ulysses_chunked"]], budget_s=300)
    assert [result["passed"] for result in results] == [True, True], results
    assert all(0 < result["bytes"] <= MOST_BYTES for result in results)
    assert left_out == []
    assert run_all(tmp_path, [wanted["te"]], budget_s=-1) == ([], ["te fp32"])
    assert (tmp_path / "results.json").exists()


def test_a_run_that_cannot_start_is_a_result_too(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    result = run_one(next(specs()), tmp_path / "x.sqlite")
    assert result["passed"] is False
    assert "sees no CUDA device" in result["error"]


def test_the_script_covers_every_scheme() -> None:
    assert {spec.scheme for spec in specs()} == {scheme.name for scheme in SCHEMES}
    for spec in specs():
        spec.validate()
