"""Frozen parameters that forward changes, and buffers that take sums: as eager leaves them, step after step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner import Constraints, Engine, LocalRanks, Plan, Topology, partition
from partitioner.passes.capture.capture import capture
from partitioner.passes.errors import PartitionError, UnsupportedError
from partitioner.runtime.comm.torch_backend import TorchCommunicator
from partitioner.runtime.program.program import Program
from tests.helpers.every_rank import on_every_rank
from tests.helpers.state_models import BATCH, DIM, OTHERS, SUMS, UPDATES, Contrast, Experts, Scheduled, Summing, Teacher

pytestmark = pytest.mark.usefixtures("without_baselines")

ONE = {"pp": 1, "dp": 1, "cp": 1, "tp": 1}


def planned(model: nn.Module, inputs: Any, **constraints: Any) -> Plan:
    given = ONE | constraints
    ranks = given["pp"] * given["dp"] * given["cp"] * given["tp"]
    return partition(model, Topology.local(ranks), inputs, constraints=Constraints(**given))


def batch_of(model: nn.Module, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, Experts):
        return tuple(torch.randn(BATCH, 4, DIM, generator=generator, dtype=torch.double) for _ in range(2))
    return (torch.randn(BATCH, DIM, generator=generator, dtype=torch.double),)


def judged(model: nn.Module, plan: Plan) -> set[str]:
    """The states that verify has compared; all is as the model computes it."""
    report = plan.verify(model, batch_of(model))
    assert report.ok, str(report)
    return {name for name in report.errors if name.startswith(("buffer ", "parameter "))}


def trained(model: nn.Module, plan: Plan, steps: int = 3, accumulate: bool = False) -> None:
    """Several steps of an optimizer leave every state as they do in one process."""
    judge = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=0.01)
    for step in range(steps):
        judge(*batch_of(model, step)).backward()
        if not accumulate or step == steps - 1:
            optimizer.step()
            optimizer.zero_grad()

    def work(communicator: Any) -> dict[str, Tensor]:
        engine = Engine(plan.program, model, communicator=communicator)
        mine = torch.optim.AdamW(engine.parameters(), lr=0.01)
        for step in range(steps):
            engine.step(batch_of(model, step), accumulate=accumulate and step > 0)
            if not accumulate or step == steps - 1:
                mine.step()
        return engine.state_dict(full=True)

    whole, expected = on_every_rank(plan.program, work)[0], judge.state_dict()
    assert whole.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(whole[name], tensor, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


# --- teachers ---------------------------------------------------------------------------------------------------------


TEACHERS = [
    ("data = ...", {"dp": 2, "zero": 3, "microbatch_size": 2}),
    ("data.mul_", {"pp": 2, "microbatch_size": 2}),
    ("mul_ add_", {"tp": 2, "microbatch_size": 4}),
    ("lerp_", {"pp": 2, "dp": 2, "microbatch_size": 2, "schedule": "zb-v"}),
    ("copy_", {"dp": 2, "zero": 1, "recompute": "full"}),
    ("foreach", {"pp": 2, "tp": 2, "microbatch_size": 2}),
    ("load_state_dict", {"dp": 2, "zero": 2}),
    ("vector_to_parameters", {"dp": 2, "tp": 2}),
    ("attribute", {"dp": 2, "microbatch_size": 2, "recompute": "full"}),
]


LESS_COMMON = {"foreach", "load_state_dict", "vector_to_parameters", "attribute"}
EACH_TEACHER = [
    pytest.param(*t, marks=[pytest.mark.slow] * (t[0] in LESS_COMMON), id=f"{t[0]}-{t[1]}") for t in TEACHERS
]


@pytest.mark.parametrize(("update", "mesh"), EACH_TEACHER)
def test_a_teacher_follows_its_student_once_a_step(update: str, mesh: dict[str, Any]):
    torch.manual_seed(0)
    number = [name for name, _ in TEACHERS].index(update)
    model = Teacher(update, before=number % 2 == 0, frozen=number % 3 > 0).double()
    plan = planned(model, batch_of(model), **mesh)
    assert judged(model, plan) == {f"parameter teacher.{name}" for name, _ in model.teacher.named_parameters()}
    trained(model, plan)


def test_every_way_to_update_is_tried():
    assert [name for name, _ in TEACHERS] == list(UPDATES)


@pytest.mark.parametrize(
    ("build", "states"), [(Scheduled, {"buffer keep"}), (Contrast, {"buffer queue", "buffer next"})]
)
def test_a_teacher_with_buffers(build: type[Teacher], states: set[str]):
    torch.manual_seed(0)
    model = build(layers=1).double()
    plan = planned(model, batch_of(model), dp=2, microbatch_size=2)
    assert plan.num_microbatches == 2
    assert {name for name in judged(model, plan) if name.startswith("buffer ")} == states
    trained(model, plan)


def test_a_teacher_is_saved_and_given_back(tmp_path: Path):
    torch.manual_seed(0)
    model = Teacher(layers=1).double()
    plan = planned(model, batch_of(model), dp=2)
    names = {name for name, _ in model.named_parameters() if name.startswith("teacher.")}
    one = planned(model, batch_of(model))
    assert set(partitioner.run_local(plan, model, batch_of(model)).buffers) == names
    engine = Engine(one, model)
    optimizer = torch.optim.AdamW(engine.parameters())
    for step in range(2):
        engine.step(batch_of(model, step))
        optimizer.step()
    engine.save(tmp_path / "run", optimizer)
    engine.export_weights(tmp_path / "weights")
    for path in ("run", "weights"):
        other = Engine(one, tmp_path / path if path == "weights" else model)
        if path == "run":
            other.load(tmp_path / path, torch.optim.AdamW(other.parameters()))
        found = other.state_dict(full=True)
        assert all(torch.equal(found[name], tensor) for name, tensor in engine.state_dict(full=True).items())


# --- memory -----------------------------------------------------------------------------------------------------------


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM).requires_grad_(False)
        self.register_buffer("one", torch.ones(DIM))
        self.register_buffer("two", torch.linspace(0, 2, DIM))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("none", None)
        self.plain = torch.ones(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.change(self.q(x))
        return (x * self.one + self.two).square().mean()

    def change(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Swapped(Held):
    def change(self, x: Tensor) -> Tensor:
        self.one, self.two = self.two, self.one
        return x


class Rotated(Held):
    def change(self, x: Tensor) -> Tensor:
        self.one, self.two = self.two, 0.9 * self.one + 0.1 * x.detach().mean(0)
        return x


class SwappedData(Held):
    def change(self, x: Tensor) -> Tensor:
        self.one.data, self.two.data = self.two.data, self.one.data
        return x


class OldData(Held):
    """What was read before ``.data`` was set shows the old numbers."""

    def change(self, x: Tensor) -> Tensor:
        old = self.k.weight.data
        self.k.weight.data = 0.9 * old + 0.1 * self.q.weight.data
        return x + self.k(x) + (self.k.weight - old).sum()


class UsedThenSet(Held):
    """Gradients are of the numbers that an operator has read."""

    def change(self, x: Tensor) -> Tensor:
        x = self.k(x) * self.one
        self.k.weight.data = self.k.weight.data * 0.5
        self.one = self.one * 0.5
        return x


class AddedThenChanged(Held):
    """The gradient of a sum needs no number."""

    def change(self, x: Tensor) -> Tensor:
        x = x + self.two
        self.two.data.mul_(0.5)
        return x


class OnlyRead(Held):
    def change(self, x: Tensor) -> Tensor:
        self.plain = x.detach()  # for others to look at
        return x / (x.data.abs().amax(-1, keepdim=True) + self.k.weight.data.norm())


@pytest.mark.parametrize("build", [Swapped, Rotated, SwappedData, OldData, UsedThenSet, AddedThenChanged, OnlyRead])
def test_what_is_set_is_written_at_the_end_of_forward(build: type[Held]):
    torch.manual_seed(0)
    model = build().double()
    plan = planned(model, batch_of(model))
    judged(model, plan)
    trained(model, plan, 2)


class SharesData(Held):
    def change(self, x: Tensor) -> Tensor:
        self.k.weight.data = self.q.weight.data
        return x + self.k(x)


class SharesBuffer(Held):
    def change(self, x: Tensor) -> Tensor:
        self.two.mul_(0.9)
        x = x * self.one
        self.one = self.two
        return x


class OtherType(Held):
    def change(self, x: Tensor) -> Tensor:
        self.count = self.count + x.detach().sum()
        return x


class OtherShape(Held):
    def change(self, x: Tensor) -> Tensor:
        self.k.weight.data = self.k.weight.data[:4]
        return x


class NoneBefore(Held):
    def change(self, x: Tensor) -> Tensor:
        self.none = x.detach().mean(0)
        return x


class Registers(Held):
    def change(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.zeros(DIM))
        self.late += 1
        return x * self.late


class PlainTensor(Held):
    def change(self, x: Tensor) -> Tensor:
        self.plain = 0.9 * self.plain
        return x * self.plain


class SetsTrained(Held):
    def change(self, x: Tensor) -> Tensor:
        self.q.weight = nn.Parameter(0.9 * self.q.weight)
        return x


class ClipsAfter(Held):
    def change(self, x: Tensor) -> Tensor:
        self.q.weight.data.clamp_(-0.1, 0.1)
        return x


class DecaysAfter(Held):
    def change(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.q.weight.mul_(0.9)
        return x


class SetsActivation(Held):
    def change(self, x: Tensor) -> Tensor:
        x.data = x.data.clamp(-1, 1)
        return x


class ChangedUnderGradient(Held):
    def change(self, x: Tensor) -> Tensor:
        x = self.k(x)
        self.k.weight.data.mul_(0.5)
        return x


REFUSED = [
    (SharesData, r"sets .data of 'k.weight' to memory that it then shares.*'q.weight'"),
    (SharesBuffer, r"sets the buffer 'one' to memory that it then shares.*'two'"),
    (OtherType, r"the buffer 'count', int64 of shape \(\), to float64.*the same type"),
    (OtherShape, r"'k.weight', float64 of shape \(8, 8\), to float64 of shape \(4, 8\).*the same shape"),
    (NoneBefore, r"the buffer 'none', None, to float64 of shape \(8,\)"),
    (Registers, r"registers the buffer 'late'"),
    (PlainTensor, r"reads 'plain', a tensor that is no buffer, and assigns a new one"),
    (SetsTrained, r"sets the parameter 'q.weight' to another tensor.*requires a gradient"),
    (ClipsAfter, r"changes the parameter 'q.weight', which is trained"),
    (DecaysAfter, r"changes the parameter 'q.weight', which is trained"),
    (SetsActivation, r"sets .data of a tensor, which requires a gradient, and reads it"),
    (ChangedUnderGradient, r"by .data or detach\(\) \(mul_.*after an operator has read it"),
]


@pytest.mark.parametrize(("build", "said"), REFUSED, ids=lambda of: getattr(of, "__name__", ""))
def test_what_cannot_be_kept_is_refused(build: type[Held], said: str):
    model = build().double()
    with pytest.raises(UnsupportedError, match=said):
        planned(model, batch_of(model))


def test_a_trace_leaves_the_model_as_it_was():
    model = Rotated().double()
    before = {id(t) for t in (*model.parameters(), *model.buffers())}
    capture(model, batch_of(model))
    assert {id(t) for t in (*model.parameters(), *model.buffers())} == before
    assert "forward" not in vars(model)


# --- sums -------------------------------------------------------------------------------------------------------------


SPLITS = ({"pp": 2, "microbatch_size": 2}, {"dp": 2, "microbatch_size": 2}, {"tp": 2, "microbatch_size": 1})


@pytest.mark.parametrize("name", SUMS)
def test_sums_over_samples_are_those_of_the_batch(name: str):
    torch.manual_seed(0)
    number = list(SUMS).index(name)
    model = Summing(SUMS[name]).double()
    plan = planned(model, batch_of(model), **SPLITS[number % 3])
    assert plan.num_microbatches == (4, 2, 8)[number % 3]
    assert judged(model, plan)
    if number % 3 == 1:
        trained(model, plan, 2)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_sum_wants_one_microbatch(name: str):
    torch.manual_seed(0)
    model = Summing(OTHERS[name]).double()
    with pytest.raises(PartitionError, match="combines samples across the batch"):
        planned(model, batch_of(model), dp=2, microbatch_size=2)
    assert judged(model, planned(model, batch_of(model), dp=2))


class Reads(Held):
    """The old value is there at any time, the new one needs the whole batch."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.before = before

    def change(self, x: Tensor) -> Tensor:
        old = self.two.clone()
        self.two += x.detach().sum(0)
        return x * (old if self.before else self.two.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.q(x)).square().mean()


@pytest.mark.parametrize("before", [True, False], ids=["old", "new"])
def test_a_sum_that_forward_reads(before: bool):
    torch.manual_seed(0)
    model = Reads(before).double()
    if not before:
        with pytest.raises(PartitionError, match="combines samples across the batch"):
            planned(model, batch_of(model), dp=2, microbatch_size=1)
    plan = planned(model, batch_of(model), dp=2, microbatch_size=1 if before else 4)
    assert judged(model, plan) == {"buffer two"}
    trained(model, plan, 2)


ROUTED = [
    ("layer", {"pp": 2, "dp": 2, "microbatch_size": 2}, False),
    ("layer", {"dp": 2, "zero": 3, "recompute": "full", "microbatch_size": 1}, True),
    ("layer", {"pp": 2, "schedule": "zb-v", "microbatch_size": 1}, False),
    pytest.param("layer", {"cp": 2, "microbatch_size": 2}, False, marks=pytest.mark.slow),
    pytest.param("layer", {"tp": 2, "microbatch_size": 4}, True, marks=pytest.mark.slow),
    ("model", {"pp": 2, "microbatch_size": 2}, False),
]


@pytest.mark.parametrize(("where", "mesh", "accumulate"), ROUTED, ids=str)
def test_counts_of_tokens_of_experts(where: str, mesh: dict[str, Any], accumulate: bool):
    """Layers that are alike stay one block, also where the model adds up what they count."""
    torch.manual_seed(0)
    model = Experts(where).double()
    plan = planned(model, batch_of(model), **mesh)
    assert plan.num_microbatches > 1
    assert "layers.*" in plan.program.blocks
    assert "buffer tokens" in judged(model, plan)
    trained(model, plan, 2, accumulate)


def _steps(program: Program, model: nn.Module, batches: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    communicator = TorchCommunicator(program.world_size, torch.device("cpu"))
    engine = Engine(program, model, communicator=communicator)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    for batch in batches:
        engine.step(batch)
        optimizer.step()
    return engine.state_dict(full=True)


@pytest.mark.slow
@pytest.mark.parametrize("build", [Experts, Teacher])
def test_real_ranks_leave_what_one_process_does(build: type[nn.Module]):
    torch.manual_seed(0)
    model = build(layers=3).double()
    plan = planned(model, batch_of(model), dp=2, zero=2, microbatch_size=2)
    batches = [batch_of(model, step) for step in range(3)]
    judge = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        judge(*batch).backward()
        optimizer.step()
    with LocalRanks(2) as ranks:
        found = ranks.call(_steps, plan.program, model, batches, timeout=240)[0]
    for name, tensor in judge.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9)
