"""What is imported when: PyTorch, solvers and drawing take seconds to load, and are loaded only where they are used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from partitioner import Constraints, Topology, partition
from partitioner.passes.dtypes import FLOATING, OTHERS, get_dtype_itemsize, is_floating, sum_type
from partitioner.passes.ir.gradient_flow import accumulated_in
from partitioner.passes.ir.serialize import GraphFormatError, dtype_of
from tests.helpers.paths import ROOT

BENCHMARKS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__")
HEAVY = (
    "torch", "transformers", "ortools", "sympy", "pygraphviz", "graphviz", "networkx", "scipy", "pandas", "matplotlib",
)  # fmt: skip
RUN = f"""
import contextlib, io, json, sys
found = []
for code in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        try:
            exec(code)
        except Exception as error:
            print(error)
        except SystemExit:
            pass
    found.append((printed.getvalue(), [name for name in {HEAVY} if name in sys.modules]))
print(json.dumps(found))
"""


def run_all(codes: list[str], folder: Path) -> list[tuple[str, list[str]]]:
    """What each of ``codes`` prints, and the heavy packages that are loaded after it, in one fresh interpreter."""
    command = [sys.executable, "-c", RUN, json.dumps(codes)]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return [(" ".join(printed.replace("│", " ").split()), loaded) for printed, loaded in json.loads(ran.stdout)]


def commands(lines: list[str]) -> list[str]:
    """Lines of the command line as code."""
    return [f"from partitioner.cli.app import app\napp({line.split()!r})" for line in lines]


def test_names_topologies_and_constraints_load_nothing_heavy(tmp_path: Path):
    told = {
        "import partitioner, partitioner.runtime": "",
        "from partitioner import Plan, Topology, Constraints, PlanError": "",
        "import partitioner\npartitioner.particion": "no attribute 'particion'",
        "from partitioner import Engin": "cannot import name 'Engin'",
        "from partitioner import Topology\nTopology.preset('dgx-h10')": "did you mean dgx-h100",
        "from partitioner import Constraints\nConstraints(tensor=2)": "tensor",
        "from partitioner import Topology\nprint(Topology.preset('dgx-h100', nodes=2).num_devices)": "16",
        "from partitioner import Plan\nPlan.load('absent.json')": "absent.json",
    }
    for (code, words), (printed, loaded) in zip(told.items(), run_all(list(told), tmp_path), strict=True):
        assert words in printed
        assert not loaded, code


def test_commands_with_a_wrong_name_load_nothing_heavy(tmp_path: Path):
    (tmp_path / "plain.py").write_text("def make():\n    raise AssertionError('is not called')\n")
    told = {
        "plan absent.py:make --topology dgx-h100:2": "there is no file absent.py",
        "plan absent.py:make --topology dgx-h10": "neither a file nor a known topology",
        "plan absent.py --topology local:2": "names no model",
        "plan plain.py:mak --topology local:2": "has no function 'mak'",
        "plan plain.py:make --topology local:2 --schedule 1f1c": "1f1c",
        "size absent.py:make --price 1": "",
        "topology dgx-h100:2": "H100",
        "explain absent.json": "absent.json",
    }
    for (line, words), (printed, loaded) in zip(told.items(), run_all(commands(list(told)), tmp_path), strict=True):
        assert words.lower() in printed.lower()
        assert not loaded, line


def test_a_plan_is_read_explained_and_drawn_without_torch(tmp_path: Path):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    inputs, pins = (torch.zeros(8, 64),), Constraints(pp=2, dp=2)
    plan = partition(model, Topology.local(4), inputs, loss=lambda output: output.square().mean(), constraints=pins)
    fast = plan.estimate.model_copy(
        update={"mfu": 0.5}
    )  # of slow ones the cost model says which operators take longest
    plan.model_copy(update={"estimate": fast}).save(tmp_path / "plan.json")
    lines = [
        "show plan.json",
        "explain plan.json",
        "explain plan.json --why-not dp=4",
        "show plan.json --rank 0",
        "show plan.json --topology picture.svg",
        "diff plan.json plan.json",
    ]
    for line, (printed, loaded) in zip(lines, run_all(commands(lines), tmp_path), strict=True):
        assert "internal error" not in printed
        assert len(printed) > 20
        assert not loaded, line
    [(_, loaded)] = run_all(commands(["show plan.json --svg picture.svg"]), tmp_path)
    assert sorted(loaded) == ["graphviz", "pygraphviz"]


def test_sizes_of_types_are_those_of_torch():
    """For example a bfloat16 has 2 bytes and is added up in float32, an int8 has 1 and stays an int8."""
    assert (get_dtype_itemsize("bfloat16"), sum_type("bfloat16"), sum_type("int8")) == (2, "float32", "int8")
    for name in (*FLOATING, *OTHERS):
        dtype = dtype_of(name)
        assert (get_dtype_itemsize(name), is_floating(name)) == (dtype.itemsize, dtype.is_floating_point), name
        assert dtype_of(sum_type(name)) == accumulated_in(dtype), name
    for function in (get_dtype_itemsize, is_floating, sum_type):
        with pytest.raises(GraphFormatError, match="float33"):
            function("float33")


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_can_be_imported_alone(name: str):
    """No module counts on another one to have registered an operator first."""
    code = f"import sys; sys.path[:0] = ['benchmarks', '.']; import {name}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)
