"""In a notebook, what gives a text gives it: nothing is displayed instead."""

from __future__ import annotations

import ast
import builtins
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import rich.console
import torch
from torch import nn

from partitioner import Constraints, Plan, Topology, partition, size_cluster
from partitioner.cli.console import build_output_console, print_parts
from partitioner.cli.show import rank_parts, topology_parts
from partitioner.units import format_plain_text
from tests.helpers.paths import ROOT


class ZMQInteractiveShell:
    """The class that IPython has in a Jupyter kernel: rich goes by its name."""


class TerminalInteractiveShell:
    """The class that IPython has in a terminal: no notebook."""


class Shell:
    """IPython's class on Databricks, which sets a variable in the environment besides."""


ColabShell = type("Shell", (), {"__module__": "google.colab._shell"})

NOTEBOOKS: dict[str, tuple[type, dict[str, str]]] = {
    "Jupyter": (ZMQInteractiveShell, {}),
    "Jupyter with few columns": (ZMQInteractiveShell, {"JUPYTER_COLUMNS": "20", "JUPYTER_LINES": "5"}),
    "Jupyter with colours": (ZMQInteractiveShell, {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}),
    "Colab": (ColabShell, {}),
    "Databricks": (Shell, {"DATABRICKS_RUNTIME_VERSION": "15.4"}),
    "IPython in a terminal": (TerminalInteractiveShell, {}),
}


@contextmanager
def in_notebook(name: str) -> Iterator[None]:
    """Inside, rich takes this process for a kernel of the kind ``name``, and fails where it displays something."""
    shell, environment = NOTEBOOKS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "get_ipython", shell, raising=False)
        for key, value in environment.items():
            patch.setenv(key, value)
        patch.setattr("rich.jupyter.display", lambda *parts: pytest.fail("rich displays HTML"))
        yield


def planned(**constraints: Any) -> Plan:
    torch.manual_seed(0)
    return partition(*JOB, loss=loss, constraints=Constraints(**constraints))


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


MODEL, INPUTS = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.ones(8, 8),)
JOB = MODEL, Topology.local(2), INPUTS
PLAN, OTHER = planned(pp=2, dp=1, tp=1), planned(tp=2, pp=1, dp=1)

TEXTS: dict[str, Callable[[], str]] = {
    "summary": PLAN.summary,
    "explain": PLAN.explain,
    "diff": lambda: PLAN.diff(OTHER),
    "why_not": lambda: str(PLAN.why_not(tp=2)),
    "why_not with the model": lambda: str(PLAN.why_not(tp=2, pp=1, model=MODEL, inputs=INPUTS, loss=loss)),
    "verify": lambda: str(PLAN.verify(MODEL, INPUTS, loss)),
    "prove": lambda: str(PLAN.prove()),
    "size_cluster": lambda: str(size_cluster(MODEL, "dgx-h100", INPUTS, nodes=(1,), loss=loss, step_time=1.0)),
    "a rank's program": lambda: format_plain_text(rank_parts(PLAN, 0)),
    "a topology": lambda: format_plain_text(topology_parts(Topology.local(2))),
    "a topology's YAML": lambda: Topology.local(2).to_yaml(),
}


@pytest.fixture(scope="module")
def in_a_terminal() -> dict[str, str]:
    return {name: text() for name, text in TEXTS.items()}


def test_rich_sees_the_notebooks() -> None:
    """What is simulated here is what rich looks at."""
    for name in NOTEBOOKS:
        with in_notebook(name):
            assert rich.console.Console(file=io.StringIO()).is_jupyter == ("terminal" not in name)


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_texts_are_those_of_a_terminal(notebook: str, in_a_terminal: dict[str, str]) -> None:
    with in_notebook(notebook):
        for name, text in in_a_terminal.items():
            if name != "why_not with the model" or notebook == "Jupyter":  # it plans again
                assert TEXTS[name]() == text, name
                assert text, name


def test_commands_print_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    with in_notebook("Jupyter"):
        print_parts([PLAN.summary()])
        build_output_console().print("done")
    assert "certificate" in stream.getvalue()
    assert stream.getvalue().endswith("done\n")


def test_all_consoles_are_made_in_one_place() -> None:
    """A console that is made elsewhere would look for a notebook again."""
    made = {
        str(path.relative_to(ROOT))
        for package in ("partitioner", "runtime", "passes")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("Console", "get_console")
    }
    assert made == {str(Path("partitioner", "units.py"))}


CELLS = """
from partitioner import Constraints, Topology, partition
import torch
from torch import nn
seen = []
topology = Topology.local(2)
plan = partition(
    nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), topology, (torch.ones(8, 8),),
    constraints=Constraints(pp=2, dp=1, tp=1), progress=seen.append, loss=lambda output: output.square().mean(),
)
---
plan
---
topology
---
seen[-1]
---
from IPython.display import SVG
SVG(plan.to_svg())
"""


def test_a_notebook_displays_plans_topologies_and_progress(tmp_path: Path) -> None:
    """Cells that end with an object show its HTML, with a short text beside it."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (the extra `notebook`)")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed (the extra `notebook`)")
    nbformat = pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(text.strip()) for text in CELLS.split("---")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    made, plan, topology, progress, picture = ([dict(o.get("data", {})) for o in c.outputs] for c in notebook.cells)
    assert made == []
    for (shown,), word in ((plan, "pp 2"), (topology, "2 devices"), (progress, "Search in progress")):
        assert word in shown["text/html"]
        assert len(shown["text/plain"]) < 300
    assert 'src="data:image/svg+xml;base64,' in plan[0]["text/html"]
    assert picture[0]["image/svg+xml"].startswith("<svg")


def test_displayed_html_is_a_table_with_escaped_texts() -> None:
    seen: list[Any] = []
    partition(*JOB, loss=loss, progress=seen.append)
    for shown, words in (
        (PLAN, ["Sequential", "pp 2", "base64"]),
        (Topology.local(2).changed(name="<b>"), ["&lt;b&gt;: 2 devices", "devices of"]),
        (seen[-1], ["Search in progress", "open"]),
    ):
        html = shown._repr_html_()
        assert all(word in html for word in words), html[:500]
        assert html.startswith("<div>")
        assert html.endswith("</div>")
        assert len(repr(shown)) < 300
