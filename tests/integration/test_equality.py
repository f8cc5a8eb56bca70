"""The unmodified model is the judge: outputs, loss and every gradient, in float64, on threads and on real processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner import Constraints, Topology, partition, run_reference
from partitioner.passes.errors import InputsError
from partitioner.plans.verify import TOLERANCE
from tests.helpers.models import CASES
from tests.helpers.reference_match import close

pytestmark = pytest.mark.usefixtures("without_baselines")

MESHES = [(1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 4), (2, 1, 2), (2, 2, 1), (1, 2, 2), (4, 1, 1), (2, 2, 2)]
SCHEDULES = ["gpipe", "1f1b"]
EVERY = list(product(sorted(CASES), MESHES, SCHEDULES))
# Each family on a mesh, and every mesh at least once; of each kind of model one with weights tied otherwise.
TIED_OTHERWISE = {"bert-untied", "llama-tied", "t5-untied"}
SAMPLE = [
    (name, MESHES[5 * i % len(MESHES)], SCHEDULES[i // 2 % 2])
    for i, name in enumerate(sorted(CASES))
    if "tied" not in name or name in TIED_OTHERWISE
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[partitioner.LocalRanks]:
    """Processes that stay for all tests of this file."""
    with partitioner.LocalRanks(8) as pool:
        yield pool


def check(name: str, mesh: tuple[int, int, int], schedule: str, ranks: partitioner.LocalRanks) -> None:
    case = CASES[name]
    model, inputs = case.build(), case.inputs(8)
    pp, dp, tp = mesh
    constraints = Constraints(pp=pp, dp=dp, tp=tp, schedule=schedule, microbatch_size=2 if dp * pp < 4 else 1)
    plan = partition(model, Topology.local(pp * dp * tp), inputs, loss=case.loss, constraints=constraints)
    assert {a: n for a, n in plan.mesh.items() if n > 1} == {
        a: n for a, n in zip(("pp", "dp", "tp"), mesh, strict=True) if n > 1
    }
    reference = run_reference(model, inputs, case.loss)
    threads = partitioner.run_threads(plan, model, inputs, precision="fp64")
    close(plan, threads, reference)
    processes = partitioner.run_local(plan, model, inputs, precision="fp64", ranks=ranks, timeout=120)
    close(plan, processes, reference)
    if tp > 1:
        assert plan.shares.matmul_sharded >= 0.95


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("name", "mesh", "schedule"), SAMPLE, ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else v
)
def test_programs_compute_what_the_model_computes(
    name: str, mesh: tuple[int, int, int], schedule: str, ranks: partitioner.LocalRanks
) -> None:
    check(name, mesh, schedule, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "schedule"),
    [c for c in EVERY if c not in SAMPLE],
    ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else v,
)
def test_every_model_mesh_and_schedule(
    name: str, mesh: tuple[int, int, int], schedule: str, ranks: partitioner.LocalRanks
) -> None:
    check(name, mesh, schedule, ranks)


class OfNumbers(nn.Module):
    """Keeps what is large, by a threshold that its code computes from a number, in float32 whatever the model is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        quantile = torch.erfinv(torch.tensor(0.9, dtype=torch.float32)).type(h.dtype)
        return self.down(torch.relu(h - h.mean(-1, keepdim=True) - quantile * h.std(-1, keepdim=True)))


def test_a_tensor_that_the_model_makes_of_a_number_is_no_less_exact_than_the_rest():
    torch.manual_seed(0)
    model, inputs = OfNumbers(), (torch.randn(8, 16),)
    plan = partition(model, Topology.local(2), inputs, loss=torch.sum, constraints=Constraints(tp=2, pp=1, dp=1))
    assert plan.verify(model, inputs, loss=torch.sum).max_error < TOLERANCE


class OfUntypedNumbers(nn.Module):
    """The same without saying the type: it is torch's default one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) * torch.tensor([0.1, 0.7]) + torch.tensor(0.3) + x.new_tensor([0.2, 0.6])


def test_numbers_without_a_type_are_rounded_as_the_model_rounds_them():
    torch.manual_seed(0)
    model, inputs = OfUntypedNumbers(), (torch.randn(8, 16),)
    plan = partition(model, Topology.local(1), inputs, loss=torch.sum)
    assert plan.verify(model, inputs, loss=torch.sum).max_error < TOLERANCE


def test_verify_without_the_loss_of_the_plan_says_so():
    model, inputs = nn.Linear(4, 4), (torch.randn(2, 4),)
    plan = partition(model, Topology.local(1), inputs, loss=torch.sum)
    with pytest.raises(InputsError, match="expected the same loss="):
        plan.verify(model, inputs)


class OfWholeNumbers(nn.Module):
    """Computes with whole numbers and truth values as fractions, of torch's default type."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 4)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        late = (steps / 7 + torch.arange(4).sqrt()) * ((steps > 2) * 0.3)
        return self.up(x) * late + torch.arange(4).pow(0.3)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}])
def test_whole_numbers_become_fractions_as_exact_as_the_rest(mesh: dict[str, int]):
    torch.manual_seed(0)
    model, inputs = OfWholeNumbers(), (torch.randn(8, 16), torch.arange(8)[:, None])
    plan = partition(model, Topology.local(2), inputs, loss=torch.sum, constraints=Constraints(pp=1, **mesh))
    assert plan.verify(model, inputs, loss=torch.sum).max_error < TOLERANCE


def of_two_parts() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(
            nn.utils.weight_norm(nn.Linear(16, 32)), nn.ReLU(), nn.utils.weight_norm(nn.Linear(32, 2))
        )
    model(torch.randn(2, 16))  # its weights are computed from now on
    return model


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(12, 16, sparse=True), nn.Linear(16, 4))


@pytest.mark.parametrize("mesh", [{"dp": 2, "microbatch_size": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize(
    ("make", "batch"),
    [(of_two_parts, torch.randn(8, 16)), (sparse, torch.randint(12, (8, 3)))],
    ids=["parts", "sparse"],
)
def test_weights_of_another_form_are_verified(make: Callable[[], nn.Module], batch: Tensor, mesh: dict[str, int]):
    torch.manual_seed(0)
    model, constraints = make(), Constraints(**{"pp": 1, "dp": 1, "tp": 1, **mesh})
    plan = partition(model, Topology.local(2), (batch,), loss=torch.sum, constraints=constraints)
    assert plan.verify(model, (batch,), loss=torch.sum).max_error < TOLERANCE
