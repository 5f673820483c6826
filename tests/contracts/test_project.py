"""What the project promises about itself: its top level, its README, its registries and its checks."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from cptrace.analyses import ANALYSES
from cptrace.capture.profilers import PROFILERS
from cptrace.cli.main import VERBS, cli
from cptrace.errors import CptraceError
from cptrace.exports import EXPORTS
from cptrace.renderers import RENDERERS
from cptrace.report import SECTIONS
from cptrace.sources import SOURCES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TOP_LEVEL = {"cptrace", "instrumented", "notebooks", "tests", "samples", "pyproject.toml", "README.md"}


def readme_commands() -> list[str]:
    done = subprocess.run([ROOT / ".ci/readme-commands"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_top_level_is_what_the_mission_names() -> None:
    tracked = subprocess.run(
        ["git", "ls-tree", "--name-only", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    assert {name for name in tracked.stdout.split() if not name.startswith(".")} <= TOP_LEVEL


def test_readme_has_two_commands_and_ci_runs_the_second() -> None:
    see, test = readme_commands()
    assert "cptrace run --scheme ring" in see
    assert "pytest" in test
    for command in (see, test):
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install")
    ci = (ROOT / ".ci/run").read_text()
    assert "readme-commands | sed -n 2p" in ci
    assert "ruff check" in ci
    assert "mypy" in ci


def test_readme_lists_every_exit_code() -> None:
    codes = {error.exit_code for error in CptraceError.__subclasses__()}
    rows = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    assert codes <= rows


def test_exit_codes_differ() -> None:
    codes = [error.exit_code for error in (CptraceError, *CptraceError.__subclasses__())]
    assert len(codes) == len(set(codes))


def test_what_readme_calls_in_python_is_there() -> None:
    """In a Python of its own: here other tests have imported modules that `import cptrace` alone does not."""
    section = README.split("### In Python")[1].split("\n## ")[0]
    names = sorted(set(re.findall(r"\bcptrace\.(\w+)[.(]", section)) | {"WhatIfOptions"})
    imports = re.findall(r"from cptrace[.\w]* import [\w, ]+", section)
    assert len(names) > 2
    assert len(imports) > 1
    program = "\n".join(["import cptrace", *(f"cptrace.{name}" for name in names), *imports])
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_verb_is_there_documented_and_in_the_readme(verb: click.Command) -> None:
    context = click.Context(cli)
    command = cli.get_command(context, verb.name)
    assert command is not None
    assert command.help
    assert f"cptrace {verb.name}" in README
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{verb.name} {parameter.opts} has no help"


def test_readme_documents_every_option_of_analyze() -> None:
    command = cli.get_command(click.Context(cli), "analyze")
    assert command is not None
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name != "force":
            assert any(f"`{option}" in README or f"{option} " in README for option in parameter.opts), (
                parameter.opts
            )


@pytest.mark.parametrize(
    "registry",
    [SOURCES, ANALYSES, RENDERERS, EXPORTS, PROFILERS],
    ids=["sources", "analyses", "renderers", "exports", "profilers"],
)
def test_registries_are_plain_tuples_with_unique_names(registry: tuple[object, ...]) -> None:
    assert isinstance(registry, tuple)
    names = [getattr(entry, "name") for entry in registry]  # noqa: B009
    assert len(names) == len(set(names))


def test_analyses_fill_sections_of_the_report() -> None:
    assert {analysis.section for analysis in ANALYSES} <= set(SECTIONS)


def test_core_dependencies_have_no_torch_and_dev_pins_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not any("torch" in name for name in project["dependencies"])
    assert "torch==2.13.0" in project["optional-dependencies"]["dev"]
    assert {"run", "gpu", "fleet", "notebook", "dev"} <= set(project["optional-dependencies"])
