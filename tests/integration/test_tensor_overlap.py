"""All-gathers before products and reduce-scatters after them, in pieces: the same results as the unmodified model."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner import Constraints, Engine, Plan, partition, run_reference
from partitioner.passes.shard.piece_counts import PieceCounts
from partitioner.runtime.execute.bind import BlockLibrary
from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.runtime.program.program import Program
from partitioner.runtime.prove.prove import prove
from tests.helpers import experts_zoo
from tests.helpers.every_rank import on_every_rank
from tests.helpers.models import CASES
from tests.helpers.reference_match import close
from tests.helpers.sharded_sequences import quick_links

pytestmark = pytest.mark.usefixtures("without_baselines")


@pytest.fixture(scope="module")
def ranks() -> Iterator[partitioner.LocalRanks]:
    with partitioner.LocalRanks(4) as pool:
        yield pool


def plan_of(name: str, num_ranks: int, overlap: bool | None = True, **mesh: Any) -> tuple[Plan, nn.Module, Any]:
    """The plan of a small model on processes of this machine, the model and its batch."""
    case = CASES[name]
    model, batch = case.build(), case.inputs(4)
    constraints = Constraints(**({"microbatch_size": 2} | mesh), overlap_tensor=overlap)
    return partition(model, quick_links(num_ranks), batch, loss=case.loss, constraints=constraints), model, batch


def count_operators(program: Program) -> tuple[Counter[str], Counter[str]]:
    """The collectives in forward and in backward, of all calls."""
    calls = [call for stage in ProgramFacts(program).stages for call in stage]
    return Counter(u.op for c in calls for u in c.forward), Counter(u.op for c in calls for u in c.backward)


def put_in_pieces(program: Program, *pieces: int) -> Program:
    changed = {n: b.model_copy(update={"pieces": PieceCounts(*pieces)}) for n, b in program.blocks.items()}
    return program.model_copy(update={"blocks": changed})


MESHES: list[tuple[str, dict[str, Any]]] = [
    ("llama", dict(tp=2, pp=1, dp=1)),
    ("gpt2", dict(tp=2, pp=1, dp=1)),  # products with a bias
    ("llama", dict(tp=4, pp=1, dp=1)),
    ("llama", dict(tp=2, pp=2, dp=1, schedule="1f1b")),
    ("qwen3", dict(tp=2, pp=2, dp=1, schedule="zb-1p")),  # backward in two halves
    ("t5", dict(tp=2, pp=1, dp=2, zero=3)),
    ("llama", dict(tp=2, pp=1, dp=1, recompute="full")),
    ("bert", dict(tp=2, pp=1, dp=1, recompute="selective")),
]


@pytest.mark.parametrize(("name", "mesh"), MESHES, ids=str)
def test_results_are_those_of_the_model(name: str, mesh: dict[str, Any], ranks: partitioner.LocalRanks) -> None:
    """Outputs, loss and every gradient in float64, on threads and on processes over Gloo."""
    num_ranks = mesh["tp"] * mesh["pp"] * mesh["dp"]
    plan, model, batch = plan_of(name, num_ranks, **mesh)
    forward, backward = count_operators(plan.program)
    assert forward["gather_products"] and forward["products_scatter"]
    assert backward["gather_products"] and backward["products_scatter"]
    prove(plan.program)
    reference = run_reference(model, batch, CASES[name].loss)
    close(plan, partitioner.run_threads(plan, model, batch, precision="fp64"), reference)
    close(plan, partitioner.run_local(plan, model, batch, precision="fp64", ranks=ranks, timeout=120), reference)


@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_any_number_of_pieces(pieces: int, ranks: partitioner.LocalRanks) -> None:
    """Several ranks' shards in a piece, one, or a part of one."""
    plan, model, batch = plan_of("llama", 4, False, tp=4, pp=1, dp=1)
    assert not any(any(block.pieces) for block in plan.program.blocks.values())
    program = put_in_pieces(plan.program, *[pieces] * 4)
    changed = plan.model_copy(update={"written": program})
    reference = run_reference(model, batch, CASES["llama"].loss)
    close(changed, partitioner.run_threads(changed, model, batch, precision="fp64"), reference)
    run = partitioner.run_local(changed, model, batch, precision="fp64", ranks=ranks, timeout=120)
    close(changed, run, reference)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_experts(family: str, ranks: partitioner.LocalRanks) -> None:
    model, batch = experts_zoo.build(family), experts_zoo.inputs(4)
    constraints = Constraints(tp=2, dp=2, ep=2, pp=1, microbatch_size=2, overlap_tensor=True)
    plan = partition(model, quick_links(4), batch, constraints=constraints)
    forward, backward = count_operators(plan.program)
    assert forward["gather_products"] and backward["gather_products"]
    reference = run_reference(model, batch)
    close(plan, partitioner.run_local(plan, model, batch, precision="fp64", ranks=ranks, timeout=120), reference)


def gradients(program: Program, model: nn.Module, batch: Any, **how: Any) -> list[dict[str, Tensor]]:
    library = how.pop("library", None)

    def work(communicator: Any) -> dict[str, Tensor]:
        engine = Engine(program, model, communicator=communicator, library=library, **how)
        for _ in range(3):  # recorded in the second step, replayed in the third
            for parameter in engine.parameters():
                parameter.grad = None
            loss = engine.step(batch)
        found = {n: p.grad.clone() for n, p in engine.named_parameters() if p.grad is not None}
        return found | ({} if loss is None else {"loss": loss.clone()})

    return on_every_rank(program, work)


def check_same(got: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for here, there in zip(got, expected, strict=True):
        assert here.keys() == there.keys()
        for name, value in here.items():
            torch.testing.assert_close(value, there[name], msg=lambda m, n=name: f"{n}: {m}")


def test_compiled_execution() -> None:
    backend = "inductor" if any(map(shutil.which, ("g++", "clang++"))) else "aot_eager"
    plan, model, batch = plan_of("llama", 2, tp=2, pp=1, dp=1)
    library = BlockLibrary(plan.program, torch.device("cpu"), backend)
    whole = put_in_pieces(plan.program, 0, 0, 0, 0)
    check_same(gradients(plan.program, model, batch, library=library), gradients(whole, model, batch))
    assert library._segments


def test_recorded_steps() -> None:
    plan, model, batch = plan_of("llama", 2, tp=2, pp=1, dp=1)
    eager = gradients(plan.program, model, batch)
    recorded = gradients(plan.program, model, batch, execution="graph")
    for here, there in zip(recorded, eager, strict=True):
        assert all(torch.equal(value, there[name]) for name, value in here.items())


def test_inference() -> None:
    case = CASES["llama"]
    model, batch = case.build(), case.inputs(4)
    constraints = Constraints(tp=2, pp=1, dp=1, overlap_tensor=True)
    plan = partition(model, quick_links(2), batch, objective="infer", constraints=constraints)
    forward, _ = count_operators(plan.program)
    assert forward["gather_products"] and forward["products_scatter"]
    run = partitioner.run_threads(plan, model, batch, precision="fp64")
    close(plan, run, run_reference(model, batch, case.loss, train=False))


def test_the_plan_file_keeps_the_pieces(tmp_path: Any) -> None:
    plan, *_ = plan_of("llama", 2, tp=2, pp=1, dp=1)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").program == plan.program
    without = put_in_pieces(plan.program, 0, 0, 0, 0)
    assert '"pieces"' not in without.model_dump_json() and '"pieces"' in plan.program.model_dump_json()
