"""The notebooks run from a clean kernel, hold no outputs and no functions, and let a reader choose."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys

import pytest

from tests.support.shared_traces import ROOT, require_trace

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells_of(path, kind="code"):
    document = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in document["cells"] if cell["cell_type"] == kind]


def source(cell):
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


def test_there_are_the_four_that_are_promised():
    assert [path.stem for path in NOTEBOOKS] == [
        "01_explain_a_trace",
        "02_compare_schemes",
        "03_find_a_straggler",
        "04_what_if",
    ]


@EACH
def test_they_import_call_and_show(path):
    code = cells_of(path)
    for cell in code:
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
        tree = ast.parse(source(cell))
        assert not any(
            isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef) for node in ast.walk(tree)
        )
    assert any("interact(" in source(cell) for cell in code)
    assert source(cells_of(path, "markdown")[0]).startswith("# ")


@pytest.mark.slow
@EACH
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning")
def test_they_run_from_a_clean_kernel(path):
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat (in the extra dev)")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient (in the extra dev)")
    pytest.importorskip("ipykernel", reason="needs ipykernel (in the extra dev)")
    pytest.importorskip("ipywidgets", reason="needs ipywidgets (in the extra dev)")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=240, startup_timeout=240, resources=resources).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert "application/vnd.plotly.v1+json" in kinds
    assert "application/vnd.jupyter.widget-view+json" in kinds
    assert not [output for output in outputs if output.output_type in ("error", "stream")], (
        "nothing is printed"
    )


@pytest.mark.parametrize(
    "name",
    ["kineto/deepep-all-to-all.json.gz", "nsys/nsys-no-kernels.sqlite", "nsys/nsys-2023.3-one-kernel.sqlite"],
)
def test_the_first_explains_a_trace_put_in_place_of_the_sample(name, monkeypatch):
    """One of another job, one without device work, one without communication: shown as far as it goes."""
    widgets = pytest.importorskip("ipywidgets", reason="needs ipywidgets (in the extra dev)")
    trace = str(require_trace(name))
    monkeypatch.chdir(ROOT / "notebooks")
    monkeypatch.setattr(widgets, "interact", lambda view, **choices: shown.append(view))
    shown, names = [], {}
    for cell in cells_of(NOTEBOOKS[0]):
        code = source(cell).replace('samples / "ring-causal-virtual.sqlite"', repr(trace))
        exec(code, names)
    assert names["report"].inputs[0]["path"] == trace
    assert shown


def test_a_report_shows_itself_without_scripts():
    import cptrace

    shown = cptrace.analyze(ROOT / "samples/ring-causal-virtual.sqlite")._repr_html_()
    assert "<script" not in shown
    assert re.search("imbalance", shown)
    assert "ring-causal-virtual.sqlite" in shown
    code = "import cptrace; assert cptrace.Report(())._repr_html_(), 'the class alone knows how it is shown'"
    subprocess.run([sys.executable, "-c", code], check=True)
