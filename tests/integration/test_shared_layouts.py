"""A plan with several programs has a layout of the state, and a mesh, that all of its programs can have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner import Constraints, Evaluate, Plan, Shapes, Topology, partition
from partitioner.candidate import MeshCandidate
from partitioner.errors import CapacityError, PlanError
from partitioner.programs.further import FirstProgram
from partitioner.solve.search.space import SearchSpace, list_mesh_shapes
from tests.helpers.every_rank import on_every_rank
from tests.helpers.shape_training import list_batches, train_alone, train_rank, writer, written

pytestmark = pytest.mark.usefixtures("without_baselines")

VOCAB, WIDTH, LONGEST, IGNORED, CLOSE = 40, 16, 16, -100, 1e-9


class Placed(nn.Module):
    """A decoder that reads as many rows of its tables as a batch has positions: all of them for the longest batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(1, LONGEST, WIDTH))
        self.scales: Tensor
        self.register_buffer("scales", torch.linspace(0.5, 1.5, LONGEST + 4)[None])
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        length = tokens.shape[1]
        x = self.tokens(tokens) * self.scales[:, :length, None] + self.places[:, :length]
        x = self.norm(x + self.down(F.gelu(self.up(x))))
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return {"loss": loss, "logits": logits}


def placed() -> nn.Module:
    torch.manual_seed(0)
    return Placed().double()


@pytest.mark.slow
@pytest.mark.parametrize("axes", [dict(tp=2, dp=1, pp=1), dict(tp=2, dp=2, pp=1), dict(tp=2, dp=1, pp=2)], ids=str)
def test_tables_are_read_by_programs_of_other_lengths(axes: dict[str, int]):
    """The longest batch reads whole tables, which it could shard along the positions; shorter ones read a part."""
    plan = partition(
        placed(),
        Topology.local(axes["tp"] * axes["dp"] * axes["pp"]),
        written(8, LONGEST),
        constraints=Constraints(**axes, sequence_parallel=True),  # type: ignore[arg-type]
        shapes=Shapes(batch=(4, 8), length=(7, 10, LONGEST)),
        programs={"eval": Evaluate(inputs=written(4, 6))},
    )
    plan.prove()
    batches, evaluated = list_batches(written), written(4, 6, seed=9)
    alone = train_alone(placed(), batches, evaluated)
    weights = placed()  # the threads of ranks share the random state
    runs = on_every_rank(plan.program, lambda ranks: train_rank(plan, weights, batches, evaluated, ranks))
    for run in runs:
        assert run.losses == pytest.approx(alone.losses, rel=CLOSE)
        assert run.evaluations == pytest.approx(alone.evaluations, rel=CLOSE)
    for name, gradient in alone.gradients.items():
        assert (runs[0].gradients[name] - gradient).abs().max() < CLOSE, name


def plan_writer(ranks: int, shapes: Shapes | None = None, samples: int = 8, **more: Any) -> Plan:
    return partition(writer(), Topology.local(ranks), written(samples, 16), shapes=shapes, **more)


@pytest.mark.parametrize(
    ("shapes", "programs"),
    [
        (Shapes(batch=(6, 8)), {}),
        (None, {"eval": Evaluate(inputs=written(6, 16))}),
        (None, {"eval": Evaluate(inputs=written(2, 16)), "more": Evaluate(inputs=written(10, 16))}),
    ],
    ids=["shapes", "evaluation", "evaluations"],
)
def test_meshes_that_do_not_divide_a_further_batch_are_left_out(shapes: Shapes | None, programs: dict[str, Evaluate]):
    plan = plan_writer(4, shapes, programs=programs)
    plan.prove()
    rows = plan.certificate.candidates
    assert {row.mesh["dp"] for row in rows if row.status != "infeasible"} == {1, 2}
    reasons = [row.reason for row in rows if row.mesh["dp"] == 4]
    assert all("further program" in reason for reason in reasons), reasons
    said = str(plan.why_not(dp=4))
    assert "further program" in said, said
    with pytest.raises(PlanError, match=r"batches of .*6.* samples of further programs|of 2, 10 samples of further"):
        plan_writer(4, shapes, programs=programs, constraints=Constraints(dp=4))


def test_lengths_that_ranks_of_cp_cannot_share_leave_out_the_mesh():
    size = dict(global_batch=8, num_calls=4, dims=frozenset([4096]), length=32768)
    free, limited = (
        {cp for *_, cp in list_mesh_shapes(SearchSpace(Topology.local(8), **size, **more))}  # type: ignore[arg-type]
        for more in ({}, {"further_samples": (8,), "further_positions": (4100, 8192)})
    )
    assert {1, 2, 4} <= free and limited == {1, 2}
    with pytest.raises(
        PlanError, match=r"program 'step 8x7' has no plan .* no input has a dim .* that is divisible by 2"
    ):
        plan_writer(2, Shapes(length=(7, 16)), constraints=Constraints(cp=2, dp=1, tp=1, pp=1))


def test_a_further_batch_has_microbatches_that_divide_over_dp():
    """The three largest divisors of 24 that are at most 8 give fewer microbatches than there are ranks of dp."""
    fixed = Constraints(dp=8, tp=1, pp=1, microbatch_size=8)
    plan = plan_writer(8, Shapes(batch=(24, 64)), samples=64, constraints=fixed)
    program = plan.further["step 24x16"].program
    plan.prove()
    assert (program.num_microbatches, program.mesh["dp"]) == (1, 8)


@pytest.mark.slow
def test_a_layout_in_which_a_further_program_does_not_fit_is_given_up(monkeypatch: pytest.MonkeyPatch):
    check = FirstProgram._check_memory
    lacking: set[str] = set()
    tried: list[MeshCandidate] = []

    def lacks(first: FirstProgram, name: str, *rest: Any) -> int:
        candidate = first.found.chosen.candidate
        tried.append(candidate)
        if not lacking or any(candidate.mesh[axis] > 1 for axis in lacking):
            raise CapacityError(f"program {name!r} takes more", stage=0, missing_bytes=1)
        return check(first, name, *rest)

    monkeypatch.setattr(FirstProgram, "_check_memory", lacks)
    fastest = plan_writer(2)
    lacking |= {axis for axis, size in fastest.mesh.items() if size > 1}
    plan = plan_writer(2, programs={"eval": Evaluate()})
    plan.prove()
    assert all(plan.mesh[axis] == 1 for axis in lacking) and plan.mesh != fastest.mesh
    assert any("a further program has no plan" in note for note in plan.notes)
    assert len({candidate.axes for candidate in tried}) > 1
    lacking.clear()
    with pytest.raises(CapacityError, match="program 'eval' takes more"):
        plan_writer(2, programs={"eval": Evaluate()})
