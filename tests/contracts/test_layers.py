"""The folder list is the data flow: lower layers never import higher ones."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# From the lowest to the highest. A module may import modules of its own line and of the lines above it here.
LAYERS = (
    ("cptrace",),  # the package itself: it imports lazily, only what its public names need
    ("cptrace.errors", "cptrace.labels", "cptrace.names", "cptrace.outcome", "cptrace.schemes"),
    ("cptrace.process_groups",),
    ("cptrace.faults", "cptrace.impls"),
    ("cptrace.units",),
    ("cptrace.requests",),
    ("cptrace.intervals",),
    ("cptrace.groups",),
    ("cptrace.schema",),
    ("cptrace.trace",),
    ("cptrace.launches",),
    ("cptrace.classify", "cptrace.dependencies"),
    ("cptrace.recognition",),
    ("cptrace.matching",),
    ("cptrace.peers", "cptrace.clocks"),
    ("cptrace.replay",),
    ("cptrace.noise", "cptrace.timeline", "cptrace.report"),
    ("cptrace.comparison", "cptrace.gates"),
    ("cptrace.sources",),
    ("cptrace.joined",),
    ("cptrace.job",),
    ("cptrace.analyses",),
    ("cptrace.findings",),
    ("cptrace.what_if",),
    ("cptrace.tidy",),
    ("cptrace.figure_texts", "cptrace.figures"),
    ("cptrace.renderers",),
    ("cptrace.exports",),
    ("cptrace.capture",),
    ("cptrace.doctor",),
    ("cptrace.api", "cptrace.views"),
    ("cptrace.cli", "cptrace.__main__"),
)
ONLY_IN = {
    "click": ("cptrace.cli",),
    "plotly": ("cptrace.figures", "cptrace.renderers.html"),
    "rich": ("cptrace.renderers", "cptrace.cli"),
    "sqlite3": ("cptrace.sources", "cptrace.capture"),
}
FORBIDDEN = ("torch", "instrumented", "tests")
BY_NAME = ("import_module", "__import__")
SPEAKING = ("print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write")


def modules() -> list[tuple[str, Path]]:
    """Return the name and path of every module of cptrace."""
    found = []
    for path in sorted((ROOT / "cptrace").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def imports_of(path: Path) -> set[str]:
    """Return the names of the modules that a file imports, also inside functions, but not for type checkers alone."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_NAME:
            # By name is an import all the same.
            names |= {
                arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            }
    return names


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def layer_of(name: str) -> int:
    """Return the number of the layer of a module, or of a name imported from it."""
    places = [
        (len(package), number)
        for number, layer in enumerate(LAYERS)
        for package in layer
        if is_within(name, package)
    ]
    return max(places)[1]


@pytest.mark.parametrize(
    ("name", "path"), modules(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_imports_point_down(name: str, path: Path) -> None:
    assert name == "cptrace" or layer_of(name) > 0, f"{name} has no place in LAYERS"
    for imported in imports_of(path):
        if is_within(imported, "cptrace") and name != "cptrace":
            # `from cptrace import x` names the module x.
            assert layer_of(imported) <= layer_of(name), f"{name} imports {imported} of a higher layer"
        assert not any(is_within(imported, package) for package in FORBIDDEN), f"{name} imports {imported}"
        for package, homes in ONLY_IN.items():
            if is_within(imported, package):
                assert any(is_within(name, home) for home in homes), f"{name} imports {imported}"


@pytest.mark.parametrize(
    ("name", "path"), modules(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_nothing_prints_outside_the_command_line(name: str, path: Path) -> None:
    if is_within(name, "cptrace.cli"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in SPEAKING, f"{path}:{node.lineno} writes to the terminal"


@pytest.mark.parametrize(
    ("name", "path"), modules(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_modules_are_small_and_rows_are_not_looped_over(name: str, path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400, f"{name} has more than 400 lines"
    for habit in (".iterrows(", ".itertuples(", ".apply(", "set_option("):
        assert habit not in text, f"{name} uses {habit}"


def test_help_and_import_do_not_wait_for_pandas_or_torch() -> None:
    code = (
        "import sys, cptrace, cptrace.cli.main, cptrace.cli.analyze\n"
        "print(sorted({'pandas', 'torch', 'plotly', 'instrumented'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_analyzer_works_without_torch_installed() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import cptrace.api, cptrace.cli.main, cptrace.cli.analyze, cptrace.cli.run, cptrace.cli.schemes\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
