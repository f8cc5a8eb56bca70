"""State sharding (ZeRO): programs that train as one process does, and what they hold and say meanwhile."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import partitioner
from partitioner import Constraints, Plan, PlanError, Topology, partition, prepare
from partitioner.errors import ConstraintError
from partitioner.passes.errors import PartitionError
from partitioner.plans.outline import outline_program
from partitioner.plans.reference import run_reference
from partitioner.plans.verify import compare
from partitioner.runtime.checkpoint.dcp_files import ShardReader
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.errors import InstructionError
from partitioner.runtime.execute.calls import _copy_expanded
from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.runtime.program.instructions import Instruction, Listing
from partitioner.runtime.program.memory import peak_bytes, state_bytes
from partitioner.runtime.program.mesh import hybrid_mesh
from partitioner.runtime.program.program import Program
from partitioner.runtime.program.simulate import simulate
from partitioner.runtime.prove.errors import ProofError
from partitioner.runtime.prove.prove import prove
from partitioner.runtime.state.parameters import join_pieces, pad_piece, take_piece
from partitioner.simulate.program_time import PlanDurations
from tests.helpers.context_models import Decoder
from tests.helpers.context_models import inputs as decoder_inputs
from tests.helpers.every_rank import on_every_rank
from tests.helpers.infeasible_jobs import Infeasible
from tests.helpers.small_clusters import cluster
from tests.helpers.zero_training import (
    MESHES,
    SHARDINGS,
    STEPS,
    VOCAB,
    WIDTH,
    errors,
    planned,
    tied_inputs,
    tied_model,
    train,
)

pytestmark = pytest.mark.usefixtures("without_baselines")


def matrix() -> list[Any]:
    """All of it is slow; what meets every sharding and almost every mesh once is not."""
    quick = {
        ("dp4", "hybrid3", "none"),
        ("dp4", "zero1", "full"),
        ("dp2 tp2", "zero3", "full"),
        ("dp2 pp2", "zero3", "none"),
        ("dp2 pp2", "zero2", "full"),
        ("dp4 ep2", "hybrid2", "none"),
    }
    cases = itertools.product(MESHES, SHARDINGS, ("none", "full"))
    wanted = [c for c in cases if not c[1].startswith("hybrid") or MESHES[c[0]][1]["dp"] > 2]
    return [pytest.param(*c, marks=() if c in quick else pytest.mark.slow) for c in wanted]


@pytest.mark.parametrize(("mesh", "sharding", "recompute"), matrix())
def test_five_steps_are_those_of_one_process(mesh: str, sharding: str, recompute: str, tmp_path: Path):
    name = MESHES[mesh][0]
    plan = planned(mesh, sharding, recompute)
    assert plan.planned_only == ()
    assert plan.program.zero == SHARDINGS[sharding]["zero"]
    train(plan.program, name, tmp_path / "out")
    found = errors(tmp_path / "out", name)
    assert max(found.values()) < 1e-9, {n: e for n, e in found.items() if e > 1e-9}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param(("dp4", "zero3"), ("dp2 pp2", "zero2"), marks=pytest.mark.slow),
        (("dp2 pp2", "zero1"), ("dp4", "hybrid3")),
        pytest.param(("dp2 tp2", "zero0"), ("dp4", "zero3"), marks=pytest.mark.slow),
        pytest.param(("dp4", "hybrid2"), ("dp2 tp2", "zero0"), marks=pytest.mark.slow),
        pytest.param(("dp4 ep2", "hybrid3"), ("dp2 ep2", "zero1"), marks=pytest.mark.slow),
    ],
)
def test_any_plan_may_load_what_another_one_saved(saved: tuple[str, str], loaded: tuple[str, str], tmp_path: Path):
    name = MESHES[saved[0]][0]
    train(planned(*saved).program, name, tmp_path / "out", last=2)
    train(planned(*loaded).program, name, tmp_path / "out", first=2, load=True)
    found = errors(tmp_path / "out", name)
    assert max(found.values()) < 1e-9, {n: e for n, e in found.items() if e > 1e-9}


@pytest.mark.parametrize(
    "sharding",
    [
        dict(zero=3),
        pytest.param(dict(zero=1), marks=pytest.mark.slow),
        pytest.param(dict(zero=2), marks=pytest.mark.slow),
        pytest.param(dict(zero=3, dp_shard=1), marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_a_sequence_share_states(sharding: dict[str, int]):
    fixed = dict(dp=2, cp=2, tp=1, pp=1, microbatch_size=1) | sharding
    plan = partition(Decoder(), Topology.local(4), decoder_inputs(), constraints=Constraints(**fixed))
    wanted = ("cp",) if "dp_shard" in sharding else ("dp", "cp")
    assert plan.program.states["head.weight"].zero_axes == wanted
    report = plan.verify(Decoder(), decoder_inputs())
    assert report.ok, str(report)


def test_processes_over_gloo():
    plan = planned("dp4", "hybrid3")
    run = partitioner.run_local(plan, tied_model(), tied_inputs(), precision="fp64")
    found = compare(run, run_reference(tied_model(), tied_inputs()), plan.program)
    assert max(found.values()) < 1e-9, found


def test_a_frozen_model_is_gathered_for_inference():
    plan = partition(
        tied_model(),
        Topology.local(2),
        tied_inputs(),
        objective="infer",
        constraints=Constraints(dp=2, tp=1, pp=1, zero=3),
    )
    assert "GATHER" in {i.op for i in plan.program.stages[0].instructions}
    assert plan.verify(tied_model(), tied_inputs()).ok


# --- what a rank holds ------------------------------------------------------------------------------------------------


class Queries(nn.Module):
    """Parts of parameters that other layers read: one repeated for all samples, and one for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.mixes = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(4, 8, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        places = self.places[:4].expand(x.shape[0], -1, -1)
        for layer, mix in zip(self.layers, self.mixes.unbind(0), strict=True):
            x = torch.tanh(layer(x + places)) + x @ mix
        return nn.functional.mse_loss(x, y), places


@pytest.mark.parametrize(
    "pinned",
    [dict(dp=2, zero=3), dict(dp=2, pp=2, zero=3, recompute="full"), dict(pp=2, offload="parameters")],
    ids=str,
)
def test_parts_of_parameters_that_other_calls_read_outlive_them(pinned: dict[str, Any]):
    """A view of what was gathered would be of memory that has been given away."""
    torch.manual_seed(0)
    model, inputs = Queries(), {n: torch.randn(8, 4, 8) for n in "xy"}
    fixed = dict(microbatch_size=2) | {"pp": 1, "dp": 1, "tp": 1} | pinned
    plan = partition(
        model,
        Topology.local(fixed["pp"] * fixed["dp"]),
        inputs,
        loss=lambda out: out[0],
        constraints=Constraints(**fixed),
    )
    report = plan.verify(model, inputs, lambda out: out[0])
    assert report.ok, str(report)
    assert "output 1" in report.errors


def test_a_part_that_is_repeated_is_copied_once():
    part = torch.randn(1, 6).expand(4, 5, 6)
    copy = _copy_expanded(part)
    assert torch.equal(copy, part) and copy.untyped_storage().nbytes() == 6 * 4
    assert copy.untyped_storage().data_ptr() != part.untyped_storage().data_ptr()


def test_every_element_is_on_one_rank_and_counts_once():
    program, weights = planned("dp4", "zero3").program, tied_model()

    def work(communicator: Any) -> tuple[int, Tensor]:
        engine = Engine(program, weights, communicator=communicator)
        engine.step(tied_inputs())
        pieces = [p for n, p in engine.named_parameters() if n != "scale"]  # no dims: it is not worth sharing
        assert all(p.dim() == 1 and (p.grad is None or p.grad.shape == p.shape) for p in pieces)
        return sum(p.numel() for p in pieces), engine.clip_grad_norm_(1.0)

    found = on_every_rank(program, work)
    weights(**tied_inputs()).backward()
    norm = nn.utils.clip_grad_norm_(weights.parameters(), 1.0)
    assert sum(count for count, _ in found) == sum(p.numel() for p in weights.parameters()) - 1
    for _, mine in found:
        torch.testing.assert_close(mine, norm)


def test_what_is_gathered_is_gone_after_the_step():
    program, weights = planned("dp4", "zero3").program, tied_model()

    def work(communicator: Any) -> None:
        engine = Engine(program, weights, communicator=communicator)
        engine.step(tied_inputs())
        rooms = [r for b in engine._executor.gathered.values() for r in b.rooms]
        rooms += [r for b in engine._gradients.scattered.values() for r in b.rooms]
        assert rooms
        assert all(room.padded.untyped_storage().nbytes() == 0 for room in rooms)

    on_every_rank(program, work)


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
def test_gradients_can_be_looked_at_after_a_step_that_failed(sharding: str):
    """Under ZeRO 2 and 3 pieces have no memory while a step has not brought them."""
    program, weights = planned("dp4", sharding).program, tied_model()

    def work(communicator: Any) -> list[dict[str, Tensor]]:
        engine = Engine(program, weights, communicator=communicator)
        engine.step(tied_inputs())
        first = {n: p.grad.clone() for n, p in engine.named_parameters() if p.grad is not None}
        run = engine._executor.run
        engine._executor.run = lambda *given: (engine._gradients.begin(), 1 / 0)
        with pytest.raises(PartitionError, match="ZeroDivisionError"):
            engine.step(tied_inputs())
        engine._executor.run = run
        assert all(torch.isfinite(p.grad).all() for p in engine.parameters() if p.grad is not None)
        engine.zero_grad()
        assert float(engine.clip_grad_norm_(1.0)) == 0
        engine.step(tied_inputs(), accumulate=True)
        again = {n: p.grad.clone() for n, p in engine.named_parameters() if p.grad is not None}
        return [first, again]

    for first, again in on_every_rank(program, work):
        assert first.keys() == again.keys()
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
def test_a_step_that_fails_with_gradients_on_their_way_leaves_none_to_the_next(sharding: str):
    program, weights = planned("dp4", sharding).program, tied_model()
    sent = next(i for i, x in enumerate(program.stages[0].instructions) if x.op == "SCATTER")

    def work(communicator: Any) -> list[dict[str, Tensor]]:
        engine = Engine(program, weights, communicator=communicator)
        engine.step(tied_inputs())
        first = {n: p.grad.clone() for n, p in engine.named_parameters() if p.grad is not None}
        whole = engine._executor.actions[:]
        place = next(k for k, (index, _) in enumerate(whole) if index > sent)
        engine._executor.actions[place] = (sent, lambda: 1 / 0)
        with pytest.raises(InstructionError, match="division by zero"):
            engine.step(tied_inputs())
        engine._executor.actions[:] = whole
        engine.step(tied_inputs())
        return [first, {n: p.grad.clone() for n, p in engine.named_parameters() if p.grad is not None}]

    for first, again in on_every_rank(program, work):
        assert first.keys() == again.keys()
        assert all(torch.equal(first[name], again[name]) for name in first)


@given(shape=st.lists(st.integers(1, 5), max_size=3), ranks=st.integers(1, 9))
def test_pieces_make_the_whole(shape: list[int], ranks: int):
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    pieces = [take_piece(tensor, ranks, i) for i in range(ranks)]
    assert torch.equal(join_pieces(pieces, shape), tensor)
    padded = [pad_piece(p, tensor.numel(), ranks) for p in pieces]
    assert len({len(p) for p in padded}) == 1
    assert torch.equal(join_pieces(padded, shape), tensor)


def test_each_stage_keeps_less():
    kept, peaks = {}, {}
    for sharding in ("zero0", "zero2", "zero3"):
        program = planned("dp4", sharding).program
        facts = ProgramFacts(program)
        kept[sharding] = state_bytes(facts, 0)
        peaks[sharding] = peak_bytes(facts, 0, program.stages[0].instructions)[0]
        assert peaks[sharding] <= max(planned("dp4", sharding).estimate.memory)
    assert kept["zero0"] > kept["zero2"] > kept["zero3"]
    assert peaks["zero0"] > peaks["zero2"] > peaks["zero3"]


@pytest.mark.parametrize("microbatch_size", [2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_is_planned_is_enough(zero: int, precision: str, microbatch_size: int):
    """For a model that is almost all weights: what is gathered and scattered is most of what comes and goes."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    pinned = Constraints(dp=4, pp=1, tp=1, zero=zero, microbatch_size=microbatch_size)

    def made(estimate_only: bool) -> Plan:
        batch = (torch.randn(16, 256),)
        options = {"precision": precision, "constraints": pinned, "loss": lambda y: y.float().square().mean()}
        return partition(model, Topology.local(4), batch, estimate_only=estimate_only, **options)

    plan = made(estimate_only=False)
    (planned,) = (stage.memory for stage in made(estimate_only=True).estimate.stages)  # what the search went by
    peak, _ = peak_bytes(ProgramFacts(plan.program), 0, plan.program.stages[0].instructions)
    # with one microbatch, pieces come as buckets go, of which the planner knows the calls
    least, most = (0.0, 0.05) if microbatch_size == 2 else (-0.02, 0.12)
    assert least * peak <= sum(planned.values()) - planned["optimizer"] - peak < most * peak


def test_a_bucket_on_its_way_is_counted_once_where_stages_run_calls_of_their_own_too():
    """A rank's fullest call is charged for the bucket, and what all stages run for themselves is not once more."""
    torch.manual_seed(0)
    model, inputs = hf_llama()
    prepared, working = prepare(model, inputs), {}
    for zero in (0, 1):
        pinned = Constraints(dp=2, pp=1, tp=1, zero=zero)
        plan = partition(prepared, Topology.local(2), constraints=pinned)
        assert any(call.prologue or call.shared for call in plan.program.stages[0].calls)
        searched = partition(prepared, Topology.local(2), constraints=pinned, estimate_only=True)
        (stage,) = searched.estimate.stages
        working[zero] = stage.memory["working"]
    trained = sum(p.numel() * p.element_size() for p in model.parameters())
    assert working[1] - working[0] == pytest.approx(
        2.5 * trained, rel=1e-3
    )  # what is sent, over Gloo what comes, its sum


# --- programs ---------------------------------------------------------------------------------------------------------


def ops(program: Program, stage: int = 0) -> str:
    """The instructions that share, compute or end a step, in short."""
    shown = {"GATHER": "G", "SCATTER": "S", "REDUCE": "R", "F": "F", "B": "B", "STEP": ".", "SYNC": "="}
    words = []
    for i in program.stages[stage].instructions:
        if i.op == "FREE" and i.bucket is not None:
            words.append(f"-{i.bucket}")
        elif i.op in shown:
            words.append(shown[i.op] + ("" if i.bucket is None else str(i.bucket)))
    return " ".join(words)


def hf_llama() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    tokens = torch.randint(64, (4, 16))
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def tower(microbatch_size: int = 4, **sharding: int) -> Program:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    inputs, axes = (torch.randn(16, 8),), dict(dp=4 if "dp_shard" in sharding else 2, tp=1, pp=1)
    constraints = Constraints(**axes, **sharding, microbatch_size=microbatch_size)
    plan = partition(
        model, Topology.local(axes["dp"]), inputs, loss=lambda y: y.square().mean(), constraints=constraints
    )
    return plan.program


def test_parameters_are_gathered_one_call_ahead_and_scattered_behind():
    assert ops(tower(zero=3, microbatch_size=8)) == ("G2 G1 F -2 G0 F -1 F G1 B -0 S0 G2 B -1 S1 B -2 S2 .")


def test_the_first_stages_gather_once():
    assert ops(tower(zero=1)) == "G0 F B F B S0 ."
    assert ops(tower(zero=2)) == "G0 F B S0 F B S0 ."


def test_replicas_add_up_their_pieces_once():
    assert ops(tower(zero=2, dp_shard=2, microbatch_size=2)) == "G0 F B S0 F B S0 R0 ."


def test_many_microbatches_are_written_in_few_words():
    program = planned("dp2 pp2", "zero3").program
    inputs = {n: torch.cat([x] * 8) for n, x in tied_inputs().items()}
    plan = partition(
        tied_model(),
        Topology.local(4),
        inputs,
        constraints=Constraints(**MESHES["dp2 pp2"][1], microbatch_size=1, zero=3),
    )
    assert all(isinstance(stage.instructions, Listing) for stage in plan.program.stages)
    assert not isinstance(program.stages[0].instructions, Listing)
    assert plan.verify(tied_model(), inputs).ok


def edited(program: Program, change: Any) -> ProofError:
    """What the prover says where all ranks run a changed list."""
    stage = program.stages[0]
    stages = (stage.model_copy(update={"instructions": tuple(change([*stage.instructions]))}), *program.stages[1:])
    with pytest.raises(ProofError) as caught:
        prove(program.model_copy(update={"stages": stages}))
    return caught.value


def without(op: str, nth: int = 0) -> Any:
    def change(instructions: list[Instruction]) -> list[Instruction]:
        found = [k for k, i in enumerate(instructions) if i.op == op and i.bucket is not None]
        return [i for k, i in enumerate(instructions) if k != found[nth]]

    return change


def twice(op: str) -> Any:
    def change(instructions: list[Instruction]) -> list[Instruction]:
        first = next(k for k, i in enumerate(instructions) if i.op == op and i.bucket is not None)
        return [*instructions[: first + 1], *instructions[first:]]

    return change


@pytest.mark.parametrize(
    ("sharding", "change", "fault", "words"),
    [
        (dict(zero=3), without("GATHER"), "order", "reads '.*', which was never gathered"),
        (dict(zero=3), without("GATHER", -1), "order", "which was freed at instruction"),
        (dict(zero=3), without("FREE", -1), "leak", "is gathered here and never freed"),
        (dict(zero=3), without("SCATTER", -1), "order", "was reduce-scattered"),
        (dict(zero=3), twice("GATHER"), "twice", "was gathered at instruction"),
        (dict(zero=3), twice("FREE"), "twice", "was freed at instruction"),
        (dict(zero=2), twice("SCATTER"), "twice", "reduce-scatters bucket 0, to which nothing was added"),
        (dict(zero=1), without("GATHER"), "order", "never gathered"),
        (dict(zero=1), without("SCATTER"), "order", "was reduce-scattered"),
        (dict(zero=2, dp_shard=2, microbatch_size=2), without("REDUCE"), "missing", "is never reduced"),
        (dict(zero=2), lambda i: [*i[:-1], Instruction(op="REDUCE", stage=0, bucket=0), i[-1]], "fields", "nothing to"),
        (dict(zero=0), lambda i: [Instruction(op="GATHER", stage=0, bucket=0), *i], "fields", "is not sharded by ZeRO"),
    ],
)
def test_a_broken_program_is_refused(sharding: dict[str, int], change: Any, fault: str, words: str):
    error = edited(tower(**sharding), change)
    assert error.fault == fault, str(error)
    assert re.search(words, str(error)), str(error)


def test_ranks_that_gather_in_another_order_are_refused():
    program = tower(zero=3)
    mine = list(program.stages[0].instructions)
    first, second = [k for k, i in enumerate(mine) if i.op == "GATHER"][:2]
    mine[first], mine[second] = mine[second], mine[first]
    with pytest.raises(ProofError, match="enters all_gather of bucket"):
        prove(program, {1: program.rank(1).with_instructions(tuple(mine))})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(zero_axes=("tp",)), "is shared over .*; expected axes"),
        (dict(zero_axes=()), "has states that different ranks share"),
        (dict(zero_axes=("dp",), grad_axes=()), "its gradient is added up over"),
    ],
)
def test_states_that_cannot_be_shared_so_are_refused(changes: dict[str, Any], words: str):
    program = tower(zero=2)
    name = program.stages[0].buckets[0].states[-1]
    states = {**program.states, name: program.states[name].model_copy(update=changes)}
    with pytest.raises(ProofError, match=words):
        prove(program.model_copy(update={"states": states}))


def test_hybrid_groups_are_neighbours():
    program = tower(zero=2, dp_shard=2, microbatch_size=2)
    assert program.hybrid_mesh == {"dp_replicate": 2, "dp_shard": 2, "edp_replicate": 2, "edp_shard": 2}
    assert [program.group(r, ("dp_shard",)) for r in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert program.group(1, ("dp_replicate",)) == (1, 3)
    assert hybrid_mesh({"dp": 4, "ep": 2}, 0, 2) == {
        "dp_replicate": 2,
        "dp_shard": 2,
        "edp_replicate": 2,
        "edp_shard": 1,
    }


# --- plans ------------------------------------------------------------------------------------------------------------


def test_it_is_searched_where_nothing_fits_without():
    """4 MiB of states on devices of 3 MiB."""
    job = Infeasible(PlanError, "", cluster(3), pins=dict(pp=1, tp=1))
    plan = job.plan(job.topology, Constraints(**job.pins))
    assert plan.program.zero > 0
    assert max(plan.estimate.memory) <= 3 * 2**20
    assert {c.zero for c in plan.certificate.candidates} == {0, 1, 2, 3}
    with pytest.raises(PlanError):
        job.plan(job.topology, Constraints(**job.pins, zero=0))


def test_what_cannot_be_shared_is_said_before():
    def ask(**pinned: int) -> Plan:
        return partition(tied_model(), Topology.local(4), tied_inputs(), constraints=Constraints(**pinned))

    with pytest.raises(ConstraintError, match="dp_shard=3 does not divide dp=4; expected a divisor of 4"):
        ask(dp=4, zero=3, dp_shard=3)
    with pytest.raises(ConstraintError, match="dp_shard=2 with zero=0: nothing would be sharded"):
        ask(zero=0, dp_shard=2)
    assert ask(dp=4, pp=1, tp=1, dp_shard=2).program.zero > 0


def test_what_is_exchanged_is_told_in_the_type_in_which_it_is(tmp_path: Path):
    """Parameters in bfloat16, gradients in float32; of tied weights, like of replicas, pieces are added up."""
    pinned: dict[str, Any] = dict(dp=4, pp=2, tp=1, zero=3, dp_shard=2, microbatch_size=2, schedule="1f1b")
    places = {"embed": 0, "head": 1}
    plan = partition(
        tied_model(),
        Topology.local(8),
        tied_inputs(),
        precision="bf16",
        constraints=Constraints(**pinned, stage_of=places),
    )
    program = plan.program
    (tie,) = outline_program(program).ties
    whole = VOCAB * WIDTH
    assert tie.num_bytes == 4 * whole / 2
    names = {"GATHER": "all_gather", "SCATTER": "reduce_scatter", "REDUCE": "all_reduce"}
    for stage, told in zip(program.stages, outline_program(program).stages, strict=True):
        expected: Counter[str] = Counter()
        for i in stage.instructions:
            if i.op in names and i.bucket is not None:
                for state in stage.buckets[i.bucket].states:
                    numel, sharers = math.prod(program.states[state].shape), 2 if program.states[state].zero_axes else 1
                    size = {"GATHER": 2 * numel, "SCATTER": 4 * numel, "REDUCE": 4 * numel // sharers}
                    expected[names[i.op]] += size[i.op]
        found: Counter[str] = Counter()
        for moved in told.reductions:
            found[moved.op] += moved.num_bytes
        assert found == expected

    seen = []

    class Recorded(PlanDurations):
        def all_reduce(self, axes: tuple[str, ...], nbytes: int, stages: tuple[int, ...]) -> float:
            seen.append((axes, nbytes))
            return super().all_reduce(axes, nbytes, stages)

    simulate(program, Recorded(plan))
    assert {nbytes for axes, nbytes in seen if not axes} == {4 * whole // 2}


def test_pictures_and_reports_know_the_words(tmp_path: Path):
    plan = planned("dp4", "hybrid3")
    assert "gather of parameters" in plan.to_svg(tmp_path / "t.svg", view="timeline").read_text()
    assert "of layers in use (ZeRO)" in plan.to_svg(tmp_path / "m.svg", view="memory").read_text()
    assert "all-gather of parameters over dp_shard" in plan.to_svg(tmp_path / "g.svg").read_text()
    text = plan.explain()
    assert "all-gather of" in text and "of parameters over dp_shard" in text
    assert "of gradients over dp_replicate" in text
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
def test_pieces_of_float32_copies_train_as_whole_ones(sharding: str):
    """In bfloat16: what the optimizer steps is this rank's piece of the float32 copy."""

    def losses(sharding: str) -> list[float]:
        pinned = Constraints(dp=2, pp=1, tp=1, microbatch_size=2, **SHARDINGS[sharding])
        model = tied_model()
        plan = partition(model, Topology.local(2), tied_inputs(), precision="bf16", constraints=pinned)

        def work(communicator: Any) -> list[float]:
            engine = Engine(plan.program, model, communicator=communicator)
            assert {p.dtype for p in engine.parameters() if p.requires_grad} == {torch.float32}
            optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
            found = []
            for step in range(STEPS):
                loss = engine.step(tied_inputs(step))
                assert loss is not None
                found.append(loss.item())
                engine.clip_grad_norm_(0.5)
                optimizer.step()
            return found

        result: list[float] = on_every_rank(plan.program, work)[0]
        return result

    assert losses(sharding) == pytest.approx(losses("zero0"), rel=1e-3)


class WithNothing(nn.Module):
    """A parameter without elements, of which all ranks have as much."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.head = nn.Parameter(torch.zeros(0, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).square().mean() + self.nothing.sum()


def test_parameters_without_elements_are_saved_once(tmp_path: Path):
    model, x = WithNothing(), torch.randn(4, 4)
    plan = partition(model, Topology.local(2), (x,), constraints=Constraints(dp=2, zero=3))

    def work(communicator: Any, load: bool) -> set[str]:
        engine = Engine(plan, model, communicator=communicator)
        optimizer = torch.optim.AdamW(engine.parameters())
        if load:
            engine.load(tmp_path / "out", optimizer)
        else:
            engine.step((x,))
            optimizer.step()
            engine.save(tmp_path / "out", optimizer)
        return {key for state in optimizer.state.values() for key in state}

    on_every_rank(plan.program, lambda c: work(c, load=False))
    reader = ShardReader(tmp_path / "out")
    assert {k for k in reader.tensors if "nothing" in k} == {"model.nothing"} | {
        f"optimizer.state.nothing.{k}" for k in ("step", "exp_avg", "exp_avg_sq")
    }
    assert on_every_rank(plan.program, lambda c: work(c, load=True)) == [{"step", "exp_avg", "exp_avg_sq"}] * 2
