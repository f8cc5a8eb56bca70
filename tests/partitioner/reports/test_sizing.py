"""How many machines a job needs."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from partitioner import Plan, PlanError, Size, Topology, partition, size_cluster
from partitioner.cli.app import app
from partitioner.cluster_size import SizeError
from partitioner.errors import ConstraintError, TimeLimitError
from partitioner.passes.errors import InputsError
from partitioner.plans.training_run import energy_of, money_of
from partitioner.units import count_text, format_percent
from tests.helpers.models import CASES

pytestmark = pytest.mark.usefixtures("without_baselines")

CASE = next(case for name, case in CASES.items() if "mlp" in name)


def job() -> tuple[torch.nn.Module, object]:
    return CASE.build(), CASE.inputs(16)


def machines(nodes: int) -> Topology:
    return Topology(
        name="lab",
        nodes=({"type": "gpu", "devices": 2, "count": nodes},),
        types={
            "gpu": {
                "memory": "16 GB", "peak": {"fp32": 1e9}, "memory_bandwidth": "1 GB/s", "price": 2.0,
                "power_busy": 300, "power_idle": 50,
            }
        },
        levels=[{"name": "net", "bandwidth": "10 GB/s", "latency": "1 us"}],
    )  # fmt: skip


def test_the_smallest_cluster_that_is_fast_enough():
    model, inputs = job()
    every = size_cluster(model, machines, inputs, loss=CASE.loss, minimise="time", nodes=(1, 2, 4))
    times = {size.nodes: size.step_time for size in every.tried}
    assert every.chosen.step_time == min(times.values())
    assert times[4] < times[2] < times[1]  # the work divides
    found = size_cluster(model, machines, inputs, loss=CASE.loss, step_time=times[2], nodes=(1, 2, 4))
    assert (found.chosen.nodes, len(found.tried)) == (2, 2)
    with pytest.raises(PlanError, match="no size reaches a step of 1e-09 s: the fastest is 4 nodes"):
        size_cluster(model, machines, inputs, loss=CASE.loss, step_time=1e-9, nodes=(1, 4))


def test_money_and_energy_are_of_all_devices():
    model, inputs = job()
    found = size_cluster(model, machines, inputs, loss=CASE.loss, minimise="money", nodes=(1, 2, 4))
    for size in found.tried:
        assert size.plan is not None
        assert size.money == money_of(size.plan) == pytest.approx(2 * size.nodes * 2.0 * size.step_time / 3600)
        assert size.energy == energy_of(size.plan)
        assert 50 <= size.energy / size.step_time / (2 * size.nodes) <= 300 * (1 + 1e-9)
    assert found.chosen.money == min(size.money for size in found.tried if size.money is not None)
    thrifty = size_cluster(model, machines, inputs, loss=CASE.loss, minimise="energy", nodes=(1, 2, 4))
    assert thrifty.chosen.energy == min(size.energy for size in thrifty.tried if size.energy is not None)


def test_what_was_tried_is_told_in_a_line_each():
    model, inputs = job()
    found = size_cluster(model, machines, inputs, loss=CASE.loss, minimise="time", nodes=(1, 2))
    lines = str(found).splitlines()
    assert [line.split(":")[0] for line in lines] == ["1 node", "2 nodes"]
    assert [line.endswith("(chosen)") for line in lines] == [size is found.chosen for size in found.tried]
    assert all(" USD, " in line and " J per step, " in line for line in lines)
    assert len(repr(found)) < 1000
    assert str(Size(4, reason="stage 0 lacks 1 B")) == "4 nodes: no plan (stage 0 lacks 1 B)"


def test_the_command_line_sizes_clusters(tmp_path: Path):
    (tmp_path / "small.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(64, 64), (torch.empty(64, 64),), lambda out: out.sum()\n"
    )
    out, model = tmp_path / "plan.json", f"{tmp_path / 'small.py'}:make"
    given = ["size", model, "dgx-h100", "--nodes", "2,1", "--constraints", "zero=0", "-o", str(out)]
    told = CliRunner().invoke(app, given)
    assert told.exit_code == 0, told.output
    assert "1 node: " in told.output
    assert "(chosen)" in told.output
    assert "2 nodes" not in told.output  # the fewest that there are
    assert Plan.load(out).topology.num_nodes == 1
    for wrong, message in (("1,two", "expected numbers of nodes, like 1,2,4"), ("0", "positive whole numbers")):
        refused = CliRunner().invoke(app, ["size", model, "dgx-h100", "--nodes", wrong])
        assert refused.exit_code == 2
        assert message in " ".join(refused.output.split())


def test_what_cannot_be_asked():
    model, inputs = job()
    with pytest.raises(ConstraintError, match="minimise must be one of nodes, money, energy, time; got 'speed'"):
        size_cluster(model, machines, inputs, loss=CASE.loss, minimise="speed")  # type: ignore[arg-type]
    with pytest.raises(InputsError, match="machine must be a preset's name or a function"):
        size_cluster(model, 3, inputs, loss=CASE.loss)  # type: ignore[arg-type]
    with pytest.raises(InputsError, match="topology must be a Topology, got str"):
        size_cluster(model, lambda nodes: "x", inputs, loss=CASE.loss, nodes=1)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConstraintError, match="nodes must be positive"):
        size_cluster(model, machines, inputs, loss=CASE.loss, nodes=(0, 1))
    for wrong in (2.5, True, "2"):
        with pytest.raises(ConstraintError, match="nodes must be positive whole numbers of machines"):
            size_cluster(model, machines, inputs, loss=CASE.loss, nodes=(wrong,))  # type: ignore[arg-type]
    for name in ("step_time", "time_limit_s"):
        for seconds in (0, -1.0, float("nan"), "1"):
            with pytest.raises(InputsError, match=f"{name} must be a positive number of seconds, or None; got "):
                size_cluster(model, machines, inputs, loss=CASE.loss, **{name: seconds})  # type: ignore[arg-type]
    with pytest.raises(ConstraintError, match=r"has no price; set price \(in dollars"):
        size_cluster(model, Topology.local, inputs, loss=CASE.loss, minimise="money", nodes=(1, 2))


def test_that_there_was_no_time_is_no_word_that_there_is_no_plan(monkeypatch: pytest.MonkeyPatch):
    """Of two sizes one has a plan, too slow, and for the other there was no time."""
    model, inputs = job()

    def planned(model: torch.nn.Module, topology: Topology, **more: Any) -> Plan:
        if topology.num_nodes == 2:
            raise TimeLimitError("no plan was found in time")
        return partition(model, topology, **more)

    monkeypatch.setattr("partitioner.cluster_size.partition", planned)
    with pytest.raises(TimeLimitError, match=r"in time with 2 nodes, .*; the fastest found is 1 node with .*larger"):
        size_cluster(model, machines, inputs, loss=CASE.loss, nodes=(1, 2), step_time=1e-12)


def test_all_sizes_are_told_where_none_qualifies():
    model, inputs = job()
    with pytest.raises(SizeError, match="no size reaches a step of 1e-09 s") as raised:
        size_cluster(model, machines, inputs, loss=CASE.loss, step_time=1e-9, nodes=(1, 2, 4))
    first, *lines = str(raised.value).splitlines()
    assert "the fastest is" in first
    assert [line.partition(":")[0] for line in lines] == ["1 node", "2 nodes", "4 nodes"]
    assert [size.nodes for size in raised.value.tried] == [1, 2, 4]
    assert all(" samples/s, " in line and " MFU, " in line for line in lines)


def test_how_it_scales_is_drawn(tmp_path: Path):
    """One point for each size on either chart; throughput is that of the global batch of 16 over the step."""
    model, inputs = job()
    found = size_cluster(model, machines, inputs, loss=CASE.loss, nodes=(1, 2, 4), every=True)
    assert [size.nodes for size in found.tried] == [1, 2, 4]
    assert found.chosen.nodes == 1
    root = ET.fromstring(found.to_svg(tmp_path / "scaling.svg").read_text())
    tips = [e.text or "" for e in root.iter() if e.tag.endswith("title") and "ranks:" in (e.text or "")]
    assert len(tips) == 2 * 3
    for size in found.tried:
        assert size.plan is not None
        (tip,) = {t for t in tips if t.startswith(f"{2 * size.nodes} ranks")}
        assert f"{count_text(16 / size.step_time)} samples/s, {format_percent(size.plan.estimate.mfu)} MFU" in tip
        assert tip.endswith("chosen") is (size is found.chosen)
