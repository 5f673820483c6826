"""`cptrace run` with a model: options, presets, and what is told of its checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cptrace.capture.launcher import RunOutcome
from cptrace.capture.presets import PRESETS
from cptrace.capture.run_spec import RunSpec
from cptrace.cli import run as cli_run
from cptrace.cli.run import run as run_command
from cptrace.cli.run_text import describe_failure, describe_outcome
from cptrace.errors import UsageError

SIZES = {"seq-len": 32, "heads": 4, "head-dim": 8, "cp-size": 2, "steps": 1, "warmup": 0, "clock": "virtual"}
SMALL = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[RunSpec]:
    """Return where the options of runs go, none of which starts."""
    specs: list[RunSpec] = []

    def start(spec: RunSpec, *_: object) -> None:
        specs.append(spec)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_run, "launch", start)
    return specs


def spec_of(asked: list[RunSpec], *arguments: str) -> RunSpec:
    result = CliRunner().invoke(run_command, [*arguments, "-o", "unused.sqlite"])
    assert asked, result.exception
    return asked.pop()


def test_sizes_follow_from_each_other_unless_given(asked: list[RunSpec]) -> None:
    spec = spec_of(asked, "--model", "llama", "--heads", "4", "--head-dim", "16")
    assert (spec.hidden, spec.ffn, spec.kv_heads, spec.tp_size) == (64, 176, 4, 1)
    spec = spec_of(asked, "--model", "llama", "--hidden", "96", "--kv-heads", "2")
    assert (spec.hidden, spec.ffn, spec.heads, spec.kv_heads) == (96, 256, 8, 2)
    spec = spec_of(asked, "--model", "llama", "--hidden", "96", "--ffn", "100", "--tp-size", "2")
    assert (spec.ffn, spec.n_ranks, spec.sequence_ranks, spec.weight_ranks) == (100, 8, 4, 2)


def test_a_preset_sets_defaults_that_options_override(asked: list[RunSpec]) -> None:
    spec = spec_of(asked, "--preset", "llama-7b")
    sizes = (spec.model, spec.hidden, spec.heads, spec.kv_heads, spec.layers, spec.head_dim, spec.ffn)
    assert sizes == ("llama", 4096, 32, 32, 32, 128, 11008)
    spec = spec_of(asked, "--preset", "llama-7b", "--layers", "1", "--kv-heads", "8", "--ffn", "1024")
    assert (spec.layers, spec.kv_heads, spec.ffn, spec.hidden) == (1, 8, 1024, 4096)
    # An option that is given its default value is given all the same.
    assert spec_of(asked, "--preset", "tiny", "--layers", "1").layers == RunSpec().layers


def test_a_run_without_a_model_is_as_before(asked: list[RunSpec]) -> None:
    assert spec_of(asked) == RunSpec()
    assert spec_of(asked, "--heads", "2").hidden == RunSpec().hidden


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--hidden 64", "--hidden 64: --model attention has no weights; it belongs to --model llama"),
        ("--tp-size 2", "--tp-size 2: --model attention has no weights"),
        ("--model llama --tp-size 3", "does not divide --heads 8 and --kv-heads 8 and --hidden 256"),
        ("--model llama --tp-size 3", "use --tp-size 1, 2, 4, 8"),
        ("--model llama --kv-heads 2 --tp-size 4", "does not divide --kv-heads 2; use --tp-size 1, 2"),
        ("--model llama --ffn 98 --tp-size 4", "--tp-size 4 does not divide --ffn 98; use --tp-size 1, 2"),
        ("--model llama --head-dim 7", "--head-dim 7: .* use --head-dim 8"),
        ("--model llama --dtype fp16", "use --dtype bf16"),
        ("--model llama --scheme tp --tp-size 2", "use --scheme single --tp-size 8, or --cp-size 8 alone"),
        ("--model llama --scheme tp --cp-size 3", "--cp-size 3 does not divide --heads 8"),
        (
            "--model llama --scheme ulysses --tp-size 4",
            "of each of --tp-size 4 ranks: --heads 2 cannot be split",
        ),
        ("--model gpt", "'gpt' is not one of"),
        ("--preset llama-8b", "'llama-8b' is not one of 'tiny', 'llama-7b'"),
        ("--model llama --hidden 0", "--hidden 0: must be at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_could(
    asked: list[RunSpec], arguments: str, message: str
) -> None:
    result = CliRunner().invoke(run_command, [*arguments.split(), "-o", "unused.sqlite"])
    text = str(result.exception) if isinstance(result.exception, UsageError) else result.output
    with pytest.raises(UsageError, match=message):
        raise UsageError(" ".join(text.split()))
    assert not asked


def test_help_lists_presets() -> None:
    output = " ".join(CliRunner().invoke(run_command, ["--help"]).output.split())
    for preset in PRESETS:
        assert f"{preset.name}: {preset.summary}." in output
    assert "rounded up to a multiple of 16" in output


def run_model(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "cptrace", "run", "--model", "llama", *SMALL, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_model_on_a_mesh_tells_its_checks(tmp_path: Path) -> None:
    done = run_model(tmp_path, "--tp-size", "2", "--scheme", "zigzag_ring", "--causal")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(done.stdout.split()).startswith(
        "Ran zigzag_ring in llama (hidden 32, ffn 96), forward + backward, "
        "on 4 ranks (2 share the sequence, 2 the weights). "
    )
    assert "  32 tokens (16 per rank), 4 heads of 8" in done.stdout
    (header,) = (line.split() for line in lines if line.split()[:2] == ["rank", "hidden"])
    assert header == ["rank", "hidden", "dnorms", "dqkv", "dproj", "dgate_up", "ddown"]
    (norms,) = (line for line in lines if line.startswith("Gradient norms: "))
    assert norms.startswith("Gradient norms: the same on all ranks that share the sequence, 4 compared")
    (loss,) = (line for line in lines if line.startswith("Loss: "))
    assert "on one device in float64" in loss


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the description of a model's forward pass."""
    done = run_model(tmp_path_factory.mktemp("model"), "--format", "json", "-o", "m.sqlite", "--forward-only")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["run"]


def test_the_description_has_the_models_options_and_checks(metadata: dict[str, Any]) -> None:
    assert [metadata[name] for name in ("model", "hidden", "ffn", "tp_size")] == ["llama", 32, 96, 1]
    assert metadata["checks"]["loss"]["passed"]
    assert metadata["checks"]["grad_norm"] == {
        "passed": None,
        "not_applicable": "a forward pass alone has no gradients",
    }


SOUND = {
    "parity": [],
    "running_max": {"passed": True, "n_merges": 4, "n_not_finite": 0, "n_decreased": 0, "failures": []},
    "fp8_messages": None,
    "grad_norm": {"passed": True, "n_compared": 8, "largest_norm": 0.25, "failures": []},
    "loss": {"passed": True, "losses": [1.5, 1.5], "single_device_loss": 1.5, "limit": 1e-6, "failures": []},
}
PLACE = {"rank": 3, "layer": 1, "step": 0}
LOSS = {**PLACE, "loss": 1.25, "expected": 1.0, "limit": 1e-6}


def outcome_with(metadata: dict[str, Any], **checks: Any) -> RunOutcome:
    return RunOutcome(Path("report.sqlite"), {**metadata, "checks": {**SOUND, **checks}})


@pytest.mark.parametrize(
    ("name", "failure", "message"),
    [
        (
            "grad_norm",
            {**PLACE, "norm": 0.5, "expected": 0.25},
            "rank 3, layer 1, step 0: the gradient norm is 0.5, that of its group 0.25: were the gradients",
        ),
        ("grad_norm", {**PLACE, "norm": None, "expected": 0.25}, "rank 3, layer 1, step 0: .* is not finite"),
        ("loss", LOSS, "rank 3, layer 1 on, step 0: its part of the loss is off by 0.25, the limit is 1e-06"),
        ("loss", {**LOSS, "layer": None}, "rank 3, step 0: its part of the loss is off by 0.25"),
        ("loss", {**LOSS, "loss": None}, "rank 3, layer 1 on, step 0: the loss is not finite"),
    ],
)
def test_a_failed_check_names_rank_layer_and_step_and_exits_with_6(
    name: str,
    failure: dict[str, Any],
    message: str,
    metadata: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    outcome = outcome_with(
        metadata, **{name: {**SOUND[name], "passed": False, "failures": [failure, failure]}}
    )
    assert not outcome.has_passed
    assert f"{describe_failure(outcome)}, and 1 more." in describe_outcome(outcome)

    def run_of(_spec: RunSpec, output: Path, *_: object) -> RunOutcome:
        output.write_bytes(b"report")
        return outcome

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_run, "launch", run_of)
    monkeypatch.setattr(cli_run, "_show_analysis", lambda _path: None)
    error = CliRunner().invoke(run_command, ["-o", "kept.sqlite"]).exception
    assert getattr(error, "exit_code", None) == 6
    with pytest.raises(type(error), match=f"{message}.*; the report kept.sqlite shows what ran"):
        raise error
    assert (tmp_path / "kept.sqlite").exists()


def test_a_sound_model_passes(metadata: dict[str, Any]) -> None:
    assert outcome_with(metadata).has_passed
    text = describe_outcome(outcome_with(metadata))
    assert "8 compared (largest 0.25)." in text
    assert "Loss: 1.5, on one device in float64 1.5 (off by 0.00e+00, limit 1.00e-06)." in text
