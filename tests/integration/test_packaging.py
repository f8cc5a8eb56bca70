"""The wheel works from another folder, beside a user's modules that have the names of this repository's folders."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import partitioner
from tests.helpers.paths import ROOT

SCRIPT = """
import runtime, passes  # the user's own
import partitioner, torch
from torch import nn
from partitioner import Topology, partition, run_threads

assert partitioner.__file__.startswith(runtime.WHEEL), partitioner.__file__
model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)
plan = partition(model, Topology.local(2), (x,), objective="infer")
torch.testing.assert_close(run_threads(plan, model, (x,)).outputs, model(x))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that a copy of the repository's tracked files gives."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    source = folder / "source"
    for name in filter(None, listed.decode().split("\0")):
        path = ROOT / name
        if path.parts[len(ROOT.parts)] in (
            "passes",
            "runtime",
            "partitioner",
            "pyproject.toml",
            "README.md",
            "LICENSE",
        ):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                (source / name).symlink_to(path.readlink())
            else:
                (source / name).write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(source)], check=True)
    return next(folder.glob("*.whl"))


def test_a_wheel_has_one_package(wheel: Path):
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert {name.partition("/")[0] for name in names} == {
        "partitioner",
        f"partitioner-{partitioner.__version__}.dist-info",
    }
    packed = {name for name in names if name.endswith(".py")}
    for folder, inside in (("partitioner", ""), ("passes", "passes/"), ("runtime", "runtime/")):
        modules = [path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.py")]
        assert {f"partitioner/{inside}{path}" for path in modules} <= packed
    data = {"py.typed", "topology/data/devices.yaml", "report/page.css", "report/page.js"}
    assert {f"partitioner/{name}" for name in data} <= set(names)


def test_a_script_with_modules_of_the_same_names_uses_the_wheel(wheel: Path, tmp_path: Path):
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(installed)
    user = tmp_path / "user"
    user.mkdir()
    (user / "runtime.py").write_text(f"WHEEL = {str(installed)!r}\n")
    (user / "passes.py").write_text("")
    (user / "script.py").write_text(SCRIPT)
    environment = {"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "script.py"], cwd=user, env=environment, check=True, timeout=300)


def test_the_public_names_are_those_of_the_package():
    assert set(dir(partitioner)) == {*partitioner.__all__, *partitioner.OPTIONAL, "__version__"}
    for name in partitioner.__all__:
        assert getattr(partitioner, name) is not None
