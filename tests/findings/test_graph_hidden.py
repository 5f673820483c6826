"""Finding `graph-hidden`: kernels inside CUDA graphs that were traced as a whole."""

from __future__ import annotations

from pathlib import Path

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


def test_the_nodes_of_a_graph(tmp_path: Path) -> None:
    """
    stream 7    [nvjet 0 = 10) [nvjet of a graph 10 = 30)
    """
    export = TinyExport().kernel("nvjet", 0, 10).kernel("nvjet", 10, 30, graphNodeId=5)
    assert KEY not in findings(report_of(export, tmp_path))
