"""What users do wrong: a typed error that says what was expected, what came and what to do, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner import (
    CapacityError,
    CaptureError,
    ConstraintError,
    Constraints,
    InputsError,
    PartitionError,
    Plan,
    PlanError,
    PlanFileError,
    Topology,
    TopologyError,
    partition,
    prepare,
)
from partitioner.errors import Advice
from tests.helpers.square_layers import Tower, inputs

pytestmark = pytest.mark.usefixtures("without_baselines")


class Detached(nn.Module):
    """What it gives to the loss has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).detach().square().mean()


def half_double() -> nn.Module:
    model = Tower()
    model.layers[2].double()
    return model


class Branching(Tower):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x.sum()


class Aligned(Tower):
    def forward(self, x: Tensor) -> Tensor:
        logs, length = self.layers[0](x).log_softmax(-1).unsqueeze(1), (x[:, 0] > -9).sum().unsqueeze(0)
        return nn.functional.ctc_loss(logs, torch.ones(1, 2).long(), length, torch.tensor([2]))


class Pair(Tower):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.layers[0](x), x


x = torch.randn(8, 12)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return partition(Tower(), Topology.local(2), inputs(), constraints=Constraints(pp=2))


def attempt(model: nn.Module | None = None, given: Any = None, world: int = 4, **constraints: Any) -> Plan:
    return partition(
        model or Tower(),
        Topology.local(world),
        inputs() if given is None else given,
        constraints=Constraints(**constraints),
    )


CASES: dict[str, tuple[type[PartitionError], str, Callable[[], Any]]] = {
    "tp divides nothing": (ConstraintError, r"tp=5 divides no dimension.*12", lambda: attempt(world=5, tp=5)),
    "more stages than calls": (PlanError, r"at most \d+ .*calls", lambda: attempt(world=16, pp=16)),
    "world is not the topology's": (ConstraintError, r"makes 2 .*expected 4", lambda: attempt(pp=2, dp=1, tp=1)),
    "mesh does not divide the world": (ConstraintError, r"a multiple of 3, but there are 4", lambda: attempt(pp=3)),
    "batch does not divide": (
        ConstraintError,
        r"batch of 7 is not divisible by dp=2 x microbatch_size=2 = 4; expected a divisor",
        lambda: attempt(given=inputs(7), dp=2, microbatch_size=2),
    ),
    "microbatch does not divide": (ConstraintError, r"batch of 8", lambda: attempt(dp=2, microbatch_size=3)),
    "negative tp": (ConstraintError, r"tp", lambda: Constraints(tp=-1)),
    "misspelt constraint": (ConstraintError, r"tensor_parallel", lambda: Constraints(tensor_parallel=2)),
    "unknown schedule": (ConstraintError, r"schedule", lambda: Constraints(schedule="zigzag")),
    "pinned module is unknown": (ConstraintError, r"head", lambda: attempt(pp=2, stage_of={"head": -1})),
    "pinned stage is unknown": (ConstraintError, r"layers\.0", lambda: attempt(pp=2, stage_of={"layers.0": 7})),
    "inputs do not fit the model": (InputsError, r"Tower\.forward", lambda: attempt(given={"y": torch.ones(8, 12)})),
    "inputs of a wrong width": (InputsError, r"square_layers\.py:\d+", lambda: attempt(given=inputs(width=5))),
    "no inputs": (InputsError, r"pass inputs=", lambda: partition(Tower(), Topology.local(2))),
    "no loss": (
        InputsError,
        r"needs a loss",
        lambda: partition(nn.Linear(4, 4), Topology.local(2), (torch.ones(4, 4),)),
    ),
    "loss among several": (
        InputsError,
        r"it has 0: \(8, 12\), 1: \(8, 12\); .*loss=lambda",
        lambda: partition(Pair(), Topology.local(1), inputs()),
    ),
    "inputs of another type": (InputsError, r"linear.*float64 and float32", lambda: attempt(given=(x.double(),))),
    "inputs of whole numbers": (InputsError, r"linear.*int64 and float32", lambda: attempt(given=(x.long(),))),
    "parameters of two types": (InputsError, r"layers\.2 .*float32 and float64", lambda: attempt(half_double())),
    "inputs of another kind": (
        InputsError,
        r"input '0' is a ndarray; expected tensors.*torch.from_numpy",
        lambda: attempt(given=(x.numpy(),)),
    ),
    "no samples": (InputsError, r"'0' has no samples", lambda: attempt(given=inputs(0))),
    "nothing is trained": (InputsError, r"none of 8", lambda: attempt(Tower().requires_grad_(False))),
    "no gradient reaches a parameter": (InputsError, r"none of 2", lambda: attempt(Detached())),
    "model does not export": (CaptureError, r"test_errors\.py:\d+", lambda: attempt(Branching())),
    "a loss that asks for numbers": (CaptureError, r"ctc_loss decide shapes", lambda: attempt(Aligned())),
    "topology is no topology": (InputsError, r"Topology\.local", lambda: partition(Tower(), 4, inputs())),  # type: ignore[arg-type]
    "model is no model": (InputsError, r"got function", lambda: attempt(lambda x: x)),  # type: ignore[arg-type]
    "no model": (InputsError, r"got NoneType", lambda: partition(None, Topology.local(2), inputs())),  # type: ignore[arg-type]
    "constraints are a dict": (
        ConstraintError,
        r"must be Constraints\(\.\.\.\), got dict",
        lambda: partition(Tower(), Topology.local(2), inputs(), constraints={"pp": 2}),  # type: ignore[arg-type]
    ),
    "more ranks than anybody has": (ConstraintError, r"but there are 4; expected", lambda: attempt(pp=2_000_000)),
    "larger microbatches than memory has numbers": (
        ConstraintError,
        r"is not divisible by microbatch_size=10000000000000000",
        lambda: attempt(microbatch_size=10**16),
    ),
    "shared experts of a model without": (ConstraintError, r"etp=2, but no experts", lambda: attempt(etp=2)),
    "unknown objective": (
        InputsError,
        r"train, infer",
        lambda: partition(Tower(), Topology.local(1), inputs(), objective="x"),
    ),  # type: ignore[arg-type]
    "unknown precision": (
        InputsError,
        r"bf16",
        lambda: partition(Tower(), Topology.local(1), inputs(), precision="int3"),
    ),
    "unknown optimizer": (
        ConstraintError,
        r"adamw",
        lambda: partition(Tower(), Topology.local(1), inputs(), optimizer="x"),
    ),
    "unknown preset": (TopologyError, r"dgx-h100", lambda: Topology.preset("dgx-z9")),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_requests_are_refused(case: str) -> None:
    kind, message, action = CASES[case]
    with pytest.raises(kind, match=message):  # which reads the whole message, advice and all
        action()


def test_memory_that_does_not_suffice_names_stage_shortage_and_a_change() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(32768, 32768) for _ in range(16)))
    small, inputs = Topology.preset("dgx-v100", nodes=1), (torch.empty(64, 32768, device="meta"),)
    prepared = prepare(model, inputs, loss=torch.sum)
    assert partition(prepared, small, constraints=Constraints(tp=1)).offload  # what its hosts have suffices
    with pytest.raises(CapacityError, match=r"stage \d") as error:
        partition(prepared, small, constraints=Constraints(tp=1, offload="none"))
    assert error.value.missing_bytes > 0
    assert "GiB" in str(error.value)


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layer(x), label)


def test_what_looking_for_advice_runs_into_is_told_and_hides_nothing() -> None:
    def fails() -> Advice:
        raise KeyError("stage 3")

    error = CapacityError("stage 1 lacks 2 GiB", advise=fails)
    assert (
        str(error) == "stage 1 lacks 2 GiB; error.suggest() searches for the smallest change with which there is a plan"
    )
    assert error.suggest() == Advice()
    assert str(error).startswith("stage 1 lacks 2 GiB; the search for a change with which there is a plan failed")
    assert str(error).endswith("KeyError: 'stage 3'")
    assert (error.changes, error.conflict) == ((), ())
    assert str(CapacityError("stage 1 lacks 2 GiB")) == "stage 1 lacks 2 GiB"


def test_a_model_that_fails_by_itself_is_said_to() -> None:
    given = (x, torch.zeros(8, dtype=torch.int32))  # torch asks for int64
    found = partition(Labelled(), Topology.local(1), given)
    with pytest.raises(InputsError, match=r"Labelled fails on these inputs.*test_errors\.py:\d+ .*cross_entropy"):
        found.verify(Labelled(), given)


def test_why_not_wants_the_plans_own_model(plan: Plan) -> None:
    with pytest.raises(InputsError, match=r"layers\.0\.bias, .* differ"):
        plan.why_not(pp=1, tp=2, model=Tower(16), inputs=inputs(width=16))


def truncated(text: str) -> str:
    return text[: len(text) // 2]


def older(text: str) -> str:
    return json.dumps({**json.loads(text), "version": 0})


def edited(text: str) -> str:
    content = json.loads(text)
    content["program"]["num_microbatches"] += 1
    return json.dumps(content)


def foreign(text: str) -> str:
    return json.dumps({"nodes": []})


@pytest.mark.parametrize(
    ("change", "message"),
    [(truncated, "truncated"), (older, "older"), (edited, "was changed"), (foreign, "not a plan file")],
)
def test_files_that_are_no_plan_are_refused(
    plan: Plan, tmp_path: Path, change: Callable[[str], str], message: str
) -> None:
    path = plan.save(tmp_path / "plan.json")
    assert Plan.load(path) == plan
    path.write_text(change(path.read_text()))
    with pytest.raises(PlanFileError, match=message):
        Plan.load(path)
    with pytest.raises(PartitionError):
        partitioner.Engine(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="cannot read"):
        Plan.load(tmp_path / "nothing.json")


def test_a_failed_save_leaves_the_last_good_file(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plan.save(tmp_path / "plan.json")
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        plan.save(path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_weights_of_another_model_are_refused(plan: Plan) -> None:
    with pytest.raises(partitioner.WeightsError, match=r"layers\.0\.weight"):
        partitioner.run_threads(plan, Tower(width=16), inputs())


def test_another_batch_size_is_refused(plan: Plan) -> None:
    with pytest.raises(partitioner.BatchError, match=r"expected .*8.*12"):
        partitioner.run_threads(plan, Tower(), inputs(batch=4))


class WithoutNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.detach().abs()
        return (x @ (self.weight * torch._standard_gamma_grad(weight, weight))).square().mean()


def test_an_operator_that_cannot_run_without_numbers_is_named() -> None:
    with pytest.raises(
        PartitionError, match=r"_standard_gamma_grad.* \(.*test_errors.py:\d+\) cannot be run on the meta device"
    ):
        partition(WithoutNumbers(), Topology.local(2), (torch.randn(4, 8),), constraints=Constraints(pp=1, dp=1, tp=2))
