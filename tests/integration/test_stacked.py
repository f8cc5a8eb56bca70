"""Experts as modules in a list become one stack, and keep their own names outside."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from partitioner import Constraints, Plan, Topology, WeightsError, partition, run_local
from partitioner.passes.capture.capture import capture
from partitioner.passes.ir.interpret import run_graph
from partitioner.passes.normalize.pipeline import normalize
from partitioner.plans.reference import run_reference
from partitioner.plans.verify import compare
from partitioner.runtime.engine.engine import Engine
from tests.helpers.every_rank import on_every_rank
from tests.helpers.experts_zoo import HIDDEN, ListedExperts, listed, plain_inputs

pytestmark = pytest.mark.usefixtures("without_baselines")

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, dict(ep=1)),
    "ep2": (2, dict(ep=2, dp=2)),
    "within": (4, dict(ep=2, dp=2, tp=2)),
    "rows": (4, dict(ep=4, etp=1, dp=2, tp=2)),
}


@cache
def planned(mesh: str, form: str = "gates") -> Plan:
    ranks, pinned = MESHES[mesh]
    return partition(listed(form), Topology.local(ranks), plain_inputs(), constraints=Constraints(pp=1, **pinned))


@pytest.mark.parametrize("form", ["gates", "masks"])
@pytest.mark.parametrize("mesh", MESHES)
def test_equal_to_the_model(mesh: str, form: str):
    plan = planned(mesh, form)
    up = plan.program.states["experts.*.up.weight"]
    assert up.parts == tuple(f"experts.{i}.up.weight" for i in range(4)) and up.shape == (4, 96, HIDDEN)
    assert up.expert_layout == ("R" if mesh == "one" else "S0")
    report = plan.verify(listed(form), plain_inputs())
    assert report.ok, str(report)
    assert {f"grad experts.{i}.down.bias" for i in range(4)} <= report.errors.keys()


def products(model: nn.Module, batch: Any) -> list[str]:
    graph = normalize(capture(model, batch)).graph
    return [str(n.target) for n in graph.nodes if str(n.target) in ("aten.bmm.default", "aten.linear.default")]


def test_experts_are_one_product_each_way():
    assert products(listed(), plain_inputs()).count("aten.bmm.default") == 2


class Shared(ListedExperts):
    """Two of the experts are one module."""

    def __init__(self) -> None:
        super().__init__()
        self.experts[1] = self.experts[0]


class Watched(ListedExperts):
    """The first expert's output is read once more."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return super().forward(x, target) + self.experts[0].down.weight.sum()


class Branches(nn.Module):
    """Branches with gates of their own, among which nothing chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.gate = nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).sigmoid()
        return sum((branch(x) * gates[:, i : i + 1] for i, branch in enumerate(self.branches)), torch.zeros_like(x))


@pytest.mark.parametrize(
    ("make", "batch"),
    [(Shared, plain_inputs()), (Watched, plain_inputs()), (Branches, (torch.randn(6, HIDDEN),))],
    ids=["shared", "watched", "branches"],
)
def test_what_is_no_list_of_experts_stays(make: Any, batch: Any):
    torch.manual_seed(0)
    assert "aten.bmm.default" not in products(make(), batch)


def test_a_layer_may_have_other_addends():
    class Residual(ListedExperts):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            rows = x.flatten(0, 1)
            weights, chosen = self.router(rows).topk(1, -1)
            gates = torch.zeros(len(rows), 4).to(rows).scatter(1, chosen, weights)
            made = rows + sum(e(rows) * gates[:, i : i + 1] for i, e in enumerate(self.experts)) + self.experts[0](rows)
            return made.sum() + target.sum()

    torch.manual_seed(0)
    model = Residual()
    captured = normalize(capture(model, plain_inputs()))
    assert not any(state.parts for state in captured.states.values())  # the first expert is read twice
    known = dict(model.named_parameters()) | plain_inputs()
    leaves = [known[captured.placeholders[n.name]] for n in captured.graph.nodes if n.op == "placeholder"]
    torch.testing.assert_close(run_graph(captured.graph, leaves)[0], model(**plain_inputs()))


def test_weights_come_from_files_by_their_own_names(tmp_path: Path):
    model = listed()
    save_file({n: t.clone() for n, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    plan = planned("within")
    run = run_local(plan, tmp_path, plain_inputs(), precision="fp64")
    errors = compare(run, run_reference(model, plain_inputs()), plan.program)
    assert max(errors.values()) < 1e-9
    run = run_local(planned("ep2"), model, plain_inputs(), precision="fp64")
    assert max(compare(run, run_reference(model, plain_inputs()), planned("ep2").program).values()) < 1e-9
    state = dict(model.state_dict())
    state["experts.2.up.weight"] = torch.zeros(3, 3)
    with pytest.raises(WeightsError, match=r"experts\.\*\.up\.weight: expected parameter \[4, 96, 32\], got"):
        run_local(plan, state, plain_inputs())


@pytest.mark.parametrize(("saved", "loaded"), [("within", "ep2"), ("one", "rows")])
def test_a_checkpoint_has_the_models_names(tmp_path: Path, saved: str, loaded: str):
    """Two steps under one plan and two under another end where four steps of plain torch do."""

    def steps(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            engine.step(plain_inputs())
            optimizer.step()

    weights, first, second = listed(), planned(saved).program, planned(loaded).program  # made by one thread

    def save(communicator: Any) -> None:
        engine = Engine(first, weights, communicator=communicator)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
        steps(engine, optimizer)
        engine.save(tmp_path / "out", optimizer)

    def load(communicator: Any) -> dict[str, Tensor]:
        engine = Engine(second, None, communicator=communicator)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=1.0)
        engine.load(tmp_path / "out", optimizer)
        steps(engine, optimizer)
        return engine.state_dict(full=True)

    on_every_rank(first, save)
    got = on_every_rank(second, load)[0]
    model = listed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        model(**plain_inputs()).backward()
        optimizer.step()
    assert got.keys() == model.state_dict().keys()
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(got[name], expected, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
