"""Parameters as DTensors: torch's own tools, over Gloo, see what the model has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partitioner import Constraints, DTensorError, Engine, LaunchError, LocalRanks, Topology, partition
from partitioner.passes.ir.layouts import Layout
from partitioner.runtime.comm.torch_backend import TorchCommunicator
from partitioner.runtime.engine.export import find_placements
from partitioner.runtime.program.precision import convert_precision
from partitioner.runtime.program.program import Program, shard_shape
from partitioner.runtime.state.parameters import stack_weights
from partitioner.runtime.state.weights import open_weights
from tests.helpers.experts_zoo import plain, plain_inputs
from tests.helpers.zero_training import tied_inputs, tied_model

pytestmark = pytest.mark.usefixtures("without_baselines")

CPU = torch.device("cpu")


class Packed(nn.Module):
    """A projection of parts that are cut each on its own, as of queries, keys and values; and one of few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, rest = self.into(x).split([8, 8, 8], -1)
        return self.out(torch.sigmoid(gate) * up + rest).square().mean()


def packed_model() -> nn.Module:
    torch.manual_seed(0)
    return Packed()


def packed_inputs() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(0))}


MODELS: dict[str, tuple[Any, Any]] = {
    "tied": (tied_model, tied_inputs),
    "experts": (plain, plain_inputs),
    "packed": (packed_model, packed_inputs),
}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensors": ("tied", dict(dp=2, tp=2, pp=1)),
    "stages": ("tied", dict(dp=2, tp=1, pp=2)),
    "optimizer states": ("tied", dict(dp=2, tp=2, pp=1, zero=1)),
    "parameters": ("tied", dict(dp=4, tp=1, pp=1, zero=3)),
    "parameters, cut": ("tied", dict(dp=2, tp=2, pp=1, zero=3)),
    "parts of replicas": ("tied", dict(dp=4, tp=1, pp=1, zero=2, dp_shard=2)),
    "experts": ("experts", dict(ep=2, dp=4, tp=1, pp=1, microbatch_size=1)),
    "experts, cut": ("experts", dict(ep=2, dp=2, tp=2, pp=1)),
    "experts over tp": ("experts", dict(ep=4, etp=1, dp=2, tp=2, pp=1)),
    "packed": ("packed", dict(dp=2, tp=2, pp=1)),
    "packed, stages": ("packed", dict(dp=1, tp=2, pp=2)),
    "uneven": ("packed", dict(dp=4, tp=1, pp=1, zero=2)),
}


def planned(name: str) -> Program:
    model, pinned = PLANS[name]
    make, inputs = MODELS[model]
    plan = partition(make(), Topology.local(4), inputs(), constraints=Constraints(**pinned))
    return convert_precision(plan.program, "fp64")


def batch(model: str) -> dict[str, Tensor]:
    return {n: x.double() if x.is_floating_point() else x for n, x in MODELS[model][1]().items()}


def engine_of(written: str, model: str, placement: tuple[int, ...] = ()) -> Engine:
    program = Program.model_validate_json(written)
    communicator = TorchCommunicator(program.world_size, CPU, placement=placement)
    return Engine(program, MODELS[model][0]().double(), communicator=communicator)


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    with LocalRanks(4) as pool:
        yield pool


def whole(written: str, model: str, placement: tuple[int, ...]) -> dict[str, Any]:
    """Whole tensors of this rank's views after a step, and what it has no views of."""
    engine = engine_of(written, model, placement)
    engine.step(batch(model))
    views = engine.dtensors(strict=False)
    named = dict(engine.named_parameters())
    assert all(view.to_local().data_ptr() == named[name].data_ptr() for name, view in views.items())
    try:
        engine.dtensors()
        refused = ""
    except DTensorError as error:
        refused = str(error)
    return {
        "values": {name: view.full_tensor().detach() for name, view in views.items()},
        "grads": {name: view.grad.full_tensor() for name, view in views.items() if view.grad is not None},
        "without": sorted(named.keys() - views.keys()),
        "refused": refused,
    }


def is_rows(program: Program, name: str) -> bool:
    """Whether what a rank has of a parameter is one block of it."""
    data = program.states[name]
    rows = shard_shape(program, name)[0] if data.shape else 1
    return not Layout.parse(data.layout).sections and rows % len(program.rank(data.stages[0]).zero_group(name)) == 0


@pytest.mark.parametrize(
    ("name", "placement"), [*((name, ()) for name in PLANS), ("tensors", (0, 2, 1, 3))], ids=[*PLANS, "transposed"]
)
def test_whole_tensors_are_the_models(ranks: LocalRanks, name: str, placement: tuple[int, ...]):
    program, model = planned(name), PLANS[name][0]
    alone = MODELS[model][0]().double()
    alone(**batch(model)).backward()
    held = stack_weights(program, open_weights(alone))
    gradients = {id(p): p.grad for p in alone.parameters()}
    found = ranks.call(whole, program.model_dump_json(), model, placement)
    seen: set[str] = set()
    for rank, got in enumerate(found):
        mine = [n for n in program.rank(rank).states if program.states[n].kind == "parameter"]
        assert got["without"] == sorted(n for n in mine if not is_rows(program, n))
        assert got["refused"] == found[0]["refused"]
        assert all(f"{n}: " in got["refused"] for n in got["without"])
        for n, tensor in got["values"].items():
            torch.testing.assert_close(tensor, held.read(n, Layout("R"), 1, 0), rtol=0, atol=0)
        for n, tensor in got["grads"].items():
            parts = program.states[n].parts
            grads = [gradients[id(alone.get_parameter(part))] for part in parts or (n,)]
            torch.testing.assert_close(tensor, torch.stack(grads) if parts else grads[0], rtol=1e-10, atol=1e-12)
        seen |= got["values"].keys()
        assert got["grads"].keys() == {n for n in got["values"] if program.states[n].requires_grad}
    assert seen
    assert bool(found[0]["without"]) == bool(found[0]["refused"]) == (name in ("packed", "packed, stages", "uneven"))


def through_checkpoint(first: str, second: str, folder: str) -> list[str]:
    """Write what ``first`` has after two steps by torch's own means, and read it into ``second``. What differs."""
    engine = engine_of(first, "tied")
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    for _ in range(2):
        engine.step(batch("tied"))
        optimizer.step()
    saved = {"model": engine.dtensors(), "optimizer": engine.optimizer_dtensors(optimizer)}
    dcp.save(saved, checkpoint_id=folder)
    other = engine_of(second, "tied")
    another = torch.optim.AdamW(other.parameters(), lr=0.01)
    other.step(batch("tied"))  # so that the optimizer has states to be filled
    another.step()
    read = {"model": other.dtensors(), "optimizer": other.optimizer_dtensors(another)}
    dcp.load(read, checkpoint_id=folder)
    return [*different(saved["model"], read["model"]), *different(flat(saved["optimizer"]), flat(read["optimizer"]))]


def flat(states: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{name}.{key}": held for name, of in states.items() for key, held in of.items()}


def different(some: dict[str, Any], others: dict[str, Any]) -> list[str]:
    def of(held: Any) -> Tensor:
        return held.full_tensor() if isinstance(held, DTensor) else held

    common = sorted(some.keys() & others.keys())  # full_tensor is a collective: in one order on all ranks
    assert len(common) == max(len(some), len(others)) > 4
    return [name for name in common if not torch.equal(of(some[name]), of(others[name]))]


@pytest.mark.parametrize(
    ("first", "second"),
    [("tensors", "parameters"), ("parameters, cut", "tensors"), ("parts of replicas", "parameters, cut")],
)
def test_torchs_own_checkpoints(ranks: LocalRanks, tmp_path: Path, first: str, second: str):
    written = [planned(name).model_dump_json() for name in (first, second)]
    assert ranks.call(through_checkpoint, *written, str(tmp_path / "torch")) == [[]] * 4


def norms(written: str, model: str) -> tuple[float, float, float, float]:
    """By torch over the views, and of all; then torch clips, and again."""
    engine = engine_of(written, model)
    engine.step(batch(model))
    found = []
    for _ in range(2):
        views = engine.dtensors().values()
        norm = nn.utils.get_total_norm([view.grad for view in views if view.grad is not None])
        found += [norm.full_tensor().item(), engine.clip_grad_norm_(1e9).item()]
        nn.utils.clip_grad_norm_(views, 0.01)
    return found[0], found[1], found[2], found[3]


@pytest.mark.parametrize("name", ["tensors", "stages", "parameters, cut"])
def test_norms_are_of_a_stage(ranks: LocalRanks, name: str):
    program = planned(name)
    found = ranks.call(norms, program.model_dump_json(), "tied")
    for before, of_all, after, clipped in found:
        if name == "stages":
            assert before < of_all
            assert after == pytest.approx(0.01, rel=1e-3)
        else:
            assert before == pytest.approx(of_all, rel=1e-12)
            assert after == pytest.approx(clipped, rel=1e-12) == pytest.approx(0.01, rel=1e-3)


def test_axes_that_no_mesh_has_together_are_refused():
    program = planned("experts over tp")
    states = program.states | {
        "up": program.states["up"].model_copy(update={"zero_axes": ("cp",)}),
        "down": program.states["down"].model_copy(update={"layout": "S1"}),
    }
    changed = program.model_copy(update={"states": states, "mesh": program.mesh | {"cp": 2, "dp": 1}})
    named, reasons = find_placements(changed)
    assert reasons.keys() == {"up", "down"}
    assert "cp, ep, over which it is sharded, are not axes of one mesh" in reasons["up"]
    assert "it is sharded over ep and over tp, which are not axes of one mesh" in reasons["down"]
    assert "up_bias" in named


def refusal(written: str, placement: tuple[int, ...]) -> str:
    engine = engine_of(written, "tied", placement)
    try:
        engine.dtensors()
    except LaunchError as error:
        return str(error)
    return ""


def test_ranks_that_torch_would_take_for_others_are_refused(ranks: LocalRanks):
    """Along tp, rank 0 is on a later process than rank 1."""
    told = ranks.call(refusal, planned("tensors").model_dump_json(), (1, 0, 2, 3))
    assert all("the plan has ranks along tp on processes in another order, [1, 0, 2, 3]" in text for text in told)


def test_without_processes_there_is_no_mesh():
    program = convert_precision(
        partition(tied_model(), Topology.local(1), tied_inputs(), constraints=Constraints()).program, "fp64"
    )
    with pytest.raises(LaunchError, match="need a process group of the plan's 1 ranks, there is none: start with"):
        Engine(program, tied_model().double()).dtensors()
