"""Training in short types: float32 copies that are stepped, float32 gradients, scaled losses; and what is planned."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import BatchError, Constraints, Engine, LaunchError, Topology, partition
from partitioner.runtime.checkpoint.dcp_files import ShardReader
from partitioner.runtime.comm.thread_backend import ThreadWorld
from partitioner.runtime.program.precision import convert_precision
from partitioner.runtime.program.program import Program
from partitioner.runtime.state.loss import BACKOFF, FIRST, GROWTH, INTERVAL, LossScale
from tests.helpers.every_rank import on_every_rank
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net

pytestmark = pytest.mark.usefixtures("without_baselines")

MESHES: list[dict[str, Any]] = [
    {},
    {"pp": 2, "num_microbatches": 4},
    {"dp": 2, "num_microbatches": 2},
    {"tp": 2},
    {"pp": 2, "dp": 2},
]


def short(precision: str = "bf16", **plan: Any) -> Program:
    return convert_precision(program_of_net(**plan), precision)


def losses(program: Program, model: nn.Module, steps: int, **options: Any) -> list[float]:
    def work(communicator: Any) -> list[float]:
        engine = Engine(program, model, communicator=communicator, **options)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=3e-3)
        found = []
        for _ in range(steps):
            loss = engine.step(net_inputs())
            assert loss is not None
            found.append(loss.item())
            engine.clip_grad_norm_(1.0)
            optimizer.step()
        return found

    return on_every_rank(program, work)[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("plan", MESHES, ids=str)
def test_training_in_a_short_type_follows_float32(plan: dict[str, Any], precision: str):
    model = Net()
    expected = losses(program_of_net(**plan), model, 12)
    got = losses(short(precision, **plan), model, 12, loss_scale=64.0 if precision == "fp16" else "auto")
    assert got == pytest.approx(expected, rel=2e-2)
    assert got[-1] < 0.95 * got[0]


def test_small_updates_are_not_lost():
    """256 updates, each less than half of the last bit of a bfloat16, are what they add up to."""
    engine = Engine(short(), Net())
    weight = dict(engine.named_parameters())["head.weight"]
    assert weight.dtype == torch.float32
    start, used = weight.detach().clone(), engine.state_dict()["head.weight"].clone()
    assert used.dtype == torch.bfloat16
    with torch.no_grad():
        for _ in range(256):
            weight.mul_(1 + 1e-4)
            engine.step(net_inputs())
    torch.testing.assert_close(weight.detach(), start * (1 + 1e-4) ** 256)
    torch.testing.assert_close(engine.state_dict()["head.weight"], weight.detach().bfloat16())
    assert not torch.equal(engine.state_dict()["head.weight"], used)


def test_copies_are_read_in_float32():
    """Not by way of the short type."""
    model = Net()
    engine = Engine(short(), model)
    assert all(torch.equal(p, model.state_dict()[n]) for n, p in engine.named_parameters())


def test_gradients_are_added_up_in_float32():
    engine = Engine(short(num_microbatches=8), Net())
    engine.step(net_inputs())
    for name, parameter in engine.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert not torch.equal(parameter.grad, parameter.grad.bfloat16().float()), f"{name}: rounded to bfloat16"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("plan", [{}, {"dp": 2, "pp": 2}], ids=str)
def test_steps_accumulate(plan: dict[str, Any], precision: str):
    model, batches = Net(), [{n: t * f for n, t in net_inputs().items()} for f in (1.0, 0.5)]
    program = short(precision, **plan)

    def work(communicator: Any) -> None:
        engine = Engine(program, model, communicator=communicator)
        parts, losses = [], []
        for batch in batches:
            losses.append(engine.step(batch))
            parts.append({n: p.grad.clone() for n, p in engine.named_parameters() if p.grad is not None})
        engine.step(batches[0])
        engine.step(batches[1], accumulate=True)
        for name, parameter in engine.named_parameters():
            torch.testing.assert_close(parameter.grad, parts[0][name] + parts[1][name])
        for number, (batch, weight) in enumerate(zip(batches, (0.25, 0.75), strict=False)):
            assert engine.step(batch, accumulate=number > 0, weight=weight) == losses[number]
        for name, parameter in engine.named_parameters():
            torch.testing.assert_close(parameter.grad, 0.25 * parts[0][name] + 0.75 * parts[1][name])
        with pytest.raises(BatchError, match="weight is nan"):
            engine.step(batches[0], weight=float("nan"))

    on_every_rank(program, work)


def test_gradients_that_were_taken_away_are_not_added_to():
    engine = Engine(program_of_net(), Net())
    optimizer = torch.optim.AdamW(engine.parameters())
    engine.step(net_inputs())
    expected = [p.grad.clone() for p in engine.parameters() if p.grad is not None]
    for zero_grad in (optimizer.zero_grad, engine.zero_grad):
        zero_grad()
        engine.step(net_inputs(), accumulate=True)
        torch.testing.assert_close([p.grad for p in engine.parameters()], expected)


def test_after_an_overflow_accumulation_starts_anew():
    engine = Engine(short("fp16"), Net(), loss_scale=64.0)
    large = {n: t * 1e4 if n == "target" else t for n, t in net_inputs().items()}
    engine.step(large)
    assert engine.overflowed
    engine.step(net_inputs(), accumulate=True)
    assert engine.overflowed, "what was to be added to is lost"
    engine.zero_grad()
    engine.step(net_inputs(), accumulate=True)
    assert not engine.overflowed
    assert all(p.grad is not None for p in engine.parameters())


@pytest.mark.parametrize("plan", [{}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_the_norm_counts_every_parameter_once(plan: dict[str, Any], tied: bool):
    model = Net(tied=tied)
    model(**net_inputs())["loss"].backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    program = convert_precision(program_of_net(**plan, tied=tied), "bf16")

    def work(communicator: Any) -> tuple[Tensor, Tensor]:
        engine = Engine(program, model, communicator=communicator)
        engine.step(net_inputs())
        return engine.clip_grad_norm_(0.1), engine.clip_grad_norm_(0.1)

    for before, after in on_every_rank(program, work):
        torch.testing.assert_close(before, expected, rtol=2e-2, atol=0)
        torch.testing.assert_close(after, torch.tensor(0.1), rtol=1e-3, atol=0)


class Faint(nn.Module):
    """Its gradients are of the order of 1e-9; what float16 can say ends at 6e-8."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).float().mul(2.0**-30).sum()


def faint(loss_scale: Any) -> Tensor:
    plan = partition(Faint(), Topology.local(1), (torch.ones(4, 16),), precision="fp16")
    engine = Engine(plan.program, Faint(), communicator=ThreadWorld(1).communicator(0), loss_scale=loss_scale)
    engine.step((torch.ones(4, 16),))
    gradient = dict(engine.named_parameters())["inner.bias"].grad
    assert gradient is not None
    return gradient


def test_scaling_keeps_small_gradients():
    assert torch.equal(faint(None), torch.zeros(16))
    for scale in ("auto", "dynamic", 2.0**14):
        torch.testing.assert_close(faint(scale), torch.full((16,), 4 * 2.0**-30))


@pytest.mark.parametrize("plan", [{}, {"pp": 2, "dp": 2}, {"tp": 2}], ids=str)
def test_a_step_that_overflows_is_skipped_on_all_ranks(plan: dict[str, Any]):
    """The factor comes down until gradients are finite; till then nothing moves, the optimizer's state neither."""
    model, program = Net(), short("fp16", **plan)
    large = {n: t * 300 if n == "target" else t for n, t in net_inputs().items()}

    def work(communicator: Any) -> int:
        engine = Engine(program, model, communicator=communicator)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
        start = [p.detach().clone() for p in engine.parameters()]
        skipped = 0
        while True:
            engine.step(large)
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            if not engine.overflowed:
                break
            skipped += 1
            assert all(torch.equal(a, b) for a, b in zip(start, engine.parameters(), strict=True))
            assert not optimizer.state
        assert all(not torch.equal(a, b) for a, b in zip(start, engine.parameters(), strict=True))
        return skipped

    counts = on_every_rank(program, work)
    assert len(set(counts)) == 1
    assert counts[0] > 1


def test_the_factor_halves_and_doubles():
    from partitioner.runtime.comm.group import SoloGroup

    scale, cpu = LossScale(FIRST, True, FIRST * 4), torch.device("cpu")
    scale.unscale([torch.tensor([1.0, torch.inf])], SoloGroup(), cpu)
    assert (scale.overflowed, scale.value) == (True, FIRST * BACKOFF)
    gradient = torch.tensor([scale.value])
    scale.unscale([gradient], SoloGroup(), cpu)
    assert gradient.item() == 1.0
    for _ in range(INTERVAL - 1):
        scale.unscale([], SoloGroup(), cpu)
    assert scale.value == FIRST * BACKOFF * GROWTH


def test_a_factor_that_is_none_is_refused():
    with pytest.raises(LaunchError, match="'auto', 'dynamic', a positive number or None; got -1"):
        Engine(short("fp16"), Net(), loss_scale=-1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_checkpoints_hold_the_copies(tmp_path: Path, precision: str):
    model = Net()

    def save(communicator: Any) -> tuple[dict[str, Tensor], Tensor | None]:
        engine = Engine(short(precision, tp=2), model, communicator=communicator)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
        for _ in range(3):
            engine.step(net_inputs())
            optimizer.step()
        engine.save(tmp_path / "out", optimizer)
        return {n: p.detach().clone() for n, p in engine.named_parameters()}, engine.step(net_inputs())

    def load(communicator: Any) -> dict[str, Tensor]:
        engine = Engine(short(precision, pp=2), None, communicator=communicator)
        engine.load(tmp_path / "out", torch.optim.AdamW(engine.parameters()))
        torch.testing.assert_close(engine.step(net_inputs()), saved[0][1], rtol=1e-2, atol=0)
        return {n: p.detach() for n, p in engine.named_parameters()}

    saved = on_every_rank(short(precision, tp=2), save)
    tensors = ShardReader(tmp_path / "out").tensors
    assert {t.properties.dtype for t in tensors.values()} == {torch.float32}
    found = {n: t for part in on_every_rank(short(precision, pp=2), load) for n, t in part.items()}
    assert found.keys() == saved[0][0].keys()
    for name in ("first.weight", "head.weight"):
        assert torch.equal(found[name], saved[0][0][name])
    up = "layers.0.up.weight"
    assert torch.equal(found[up], torch.cat([part[up] for part, _ in saved]))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.cross_entropy(x, target)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "sgd_momentum"])
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_what_is_planned_is_what_is_held(precision: str, optimizer: str):
    """Parameters with their copies, gradients and the optimizer's state: to the byte."""
    model, inputs = Mlp(), (torch.randn(16, 64), torch.randint(64, (16,)))
    inputs = (inputs[0].double(), inputs[1]) if precision == "fp64" else inputs
    fixed = Constraints(pp=2, dp=2, tp=1, zero=0)
    plan = partition(model, Topology.local(4), inputs, constraints=fixed, precision=precision, optimizer=optimizer)
    kinds = {
        "adamw": lambda p: torch.optim.AdamW(p),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    }

    def work(communicator: Any) -> tuple[int, int, int]:
        engine = Engine(plan.program, model, communicator=communicator)
        made = kinds[optimizer](engine.parameters())
        engine.step(inputs)
        made.step()
        parameters = [(p, engine.state_dict()[n]) for n, p in engine.named_parameters()]
        copies = sum(p.nbytes for p, used in parameters if used.dtype != p.dtype)
        state = sum(t.nbytes for held in made.state.values() for t in held.values() if t is not None and t.dim())
        gradients = sum(p.grad.nbytes for p, _ in parameters if p.grad is not None)
        return sum(used.nbytes for _, used in parameters), gradients, copies + state

    held = on_every_rank(plan.program, work)
    for stage, estimate in enumerate(plan.estimate.stages):
        planned = tuple(estimate.memory.get(k, 0) for k in ("parameters", "gradients", "optimizer"))
        assert {held[r] for r in range(4) if plan.rank(r).stage_index == stage} == {planned}


@pytest.mark.parametrize("norm", [-1.0, math.nan])
def test_a_norm_that_cannot_be_is_refused(norm: float):
    """A negative one would turn all gradients round."""
    engine = Engine(program_of_net(), Net())
    engine.step(net_inputs())
    before = [p.grad.clone() for p in engine.parameters() if p.grad is not None]
    with pytest.raises(LaunchError, match="must be at least 0"):
        engine.clip_grad_norm_(norm)
    assert all(torch.equal(p.grad, g) for p, g in zip(engine.parameters(), before, strict=True) if p.grad is not None)
