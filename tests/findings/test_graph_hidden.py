"""Finding `graph-hidden`: kernels inside CUDA graphs that were traced as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.diagnosed import findings, report_of
from tests.support.tiny_export import TinyExport

KEY = ("graph-hidden", None)


def test_a_graph_traced_as_a_whole(tmp_path: Path) -> None:
    """
    stream 7    [nvjet 0 = 10) [ graph 10 ===== 30)
    """
    row = findings(report_of(TinyExport().kernel("nvjet", 0, 10).graph(10, 30), tmp_path))[KEY]
    assert (row["value"], row["unit"], row["rank"]) == (20, "ns", 0)
    assert "--cuda-graph-trace=node" in row["advice"]


def test_a_graph_is_not_called_kernels_that_count_as_compute(tmp_path: Path) -> None:
    """
    stream 7    [nvjet 0 ====== 40)         known work beside the graph, and a kernel that no rule knows behind it
    stream 8       [ graph 10 ===== 30) [mystery 50 = 60)
    """
    export = TinyExport().kernel("nvjet", 0, 40, stream=7).graph(10, 30, stream=8)
    found = findings(report_of(export, tmp_path))
    assert KEY in found
    assert ("low-coverage", "unclassified") not in found
    export.kernel("mystery", 50, 60, stream=8)
    row = findings(report_of(export, tmp_path))["low-coverage", "unclassified"]
    assert row["value"] == pytest.approx(10 / 60)


def test_the_nodes_of_a_graph(tmp_path: Path) -> None:
    """
    stream 7    [nvjet 0 = 10) [nvjet of a graph 10 = 30)
    """
    export = TinyExport().kernel("nvjet", 0, 10).kernel("nvjet", 10, 30, graphNodeId=5)
    assert KEY not in findings(report_of(export, tmp_path))
