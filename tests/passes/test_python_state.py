"""Python state that forward changes: it becomes state of the plan, has no effect and is noted, or is refused."""

from __future__ import annotations

import collections
import copy
import itertools
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, Engine, Plan, Topology, partition, run_local, run_threads
from partitioner.passes.errors import UnsupportedError
from partitioner.runtime.launch.process_pool import LocalRanks

pytestmark = pytest.mark.usefixtures("without_baselines")

ONE = {"pp": 1, "dp": 1, "cp": 1, "tp": 1}
CALLS = 0
HISTORY: list[float] = []
DRAWS = random.Random(3)


def x(seed: int = 0) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Stateful(nn.Module):
    """Two layers, and a loss that ``compute(module, z)`` makes of what they give."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.a, self.b, self.compute = nn.Linear(4, 8), nn.Linear(8, 4), compute
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, self.b(torch.tanh(self.a(x))))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def planned(model: nn.Module, **constraints: int) -> Plan:
    given = ONE | constraints
    ranks = math.prod(given[axis] for axis in ONE)
    return partition(model, Topology.local(ranks), {"x": x()}, constraints=Constraints(**given))


# --- numbers that forward counts --------------------------------------------------------------------------------------


def counting(model: Any, z: Tensor) -> Tensor:
    model.step += 1
    return z.square().mean() * min(1.0, model.step / 10)


def cosine(model: Any, z: Tensor) -> Tensor:
    model.step += 1
    return z.square().mean() * 0.5 * (1 + math.cos(math.pi * model.step / 20))


def decaying(model: Any, z: Tensor) -> Tensor:
    model.scale *= 0.9
    return z.square().mean() * max(model.scale, 0.05)


def read_first(model: Any, z: Tensor) -> Tensor:
    loss = z.square().mean() * (1 - math.exp(-0.1 * model.step))
    model.step = model.step + 1
    return loss + z.mean()


def cycling(model: Any, z: Tensor) -> Tensor:
    model.step = (model.step + 1) % 3
    return (z / (1 + model.step)).softmax(-1)[:, 0].mean() + z.square().mean()


def of_both(model: Any, z: Tensor) -> Tensor:
    model.step += 2
    model.scale = model.scale / 2 + model.step
    return z.square().mean() * model.scale


COUNTED: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Any]]] = {
    "a counter that is a weight": (counting, {"step": 0}),
    "a cosine schedule": (cosine, {"step": 3}),
    "a fraction that decays": (decaying, {"scale": 1.0}),
    "a counter that is read before it counts": (read_first, {"step": 1}),
    "a counter that starts anew": (cycling, {"step": 2}),
    "two numbers": (of_both, {"step": 0, "scale": 1.0}),
}


MESHES = [
    pytest.param({}, marks=pytest.mark.slow),
    {"dp": 2, "microbatch_size": 2},
    pytest.param({"tp": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("case", COUNTED)
def test_what_forward_counts_is_counted_once_a_step(case: str, mesh: dict[str, int]):
    compute, attributes = COUNTED[case]
    model = seeded(lambda: Stateful(compute, **attributes))
    plan = planned(model, **mesh)
    assert any("forward changes the Python numbers" in note for note in plan.notes)
    assert "forward changes the Python numbers" in " ".join(plan.summary().split())
    assert all(getattr(model, name) == value for name, value in attributes.items())
    report = plan.verify(model, {"x": x(1)})
    assert report.ok, str(report)
    assert {f"buffer {name}" for name in attributes} <= report.errors.keys()


@pytest.mark.parametrize("case", COUNTED)
def test_an_engine_counts_as_the_model_does(case: str):
    compute, attributes = COUNTED[case]
    model = seeded(lambda: Stateful(compute, **attributes))
    engine = Engine(planned(model), weights=model)
    eager = copy.deepcopy(model)
    for seed in range(4):
        loss, expected = engine.step({"x": x(seed)}), eager(x(seed))
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)


def test_a_run_starts_from_the_numbers_of_the_model_that_it_is_given(tmp_path: Path):
    model = seeded(lambda: Stateful(counting, step=0))
    plan = planned(model)
    for _ in range(2):
        model(x())
    expected = copy.deepcopy(model)(x(1)).item()
    with LocalRanks(1) as ranks:
        assert run_local(plan, model, {"x": x(1)}, ranks=ranks).loss == pytest.approx(expected, rel=1e-12)
    assert plan.verify(model, {"x": x(1)}).ok
    assert run_threads(plan, model.state_dict(), {"x": x(1)}).loss == pytest.approx(expected / 3, rel=1e-12)


def test_checkpoints_hold_what_is_counted_and_exported_weights_do_not(tmp_path: Path):
    model = seeded(lambda: Stateful(counting, step=0))
    plan = planned(model)
    engine = Engine(plan, weights=model)
    for _ in range(3):
        engine.step({"x": x()})
    engine.save(tmp_path / "checkpoint")
    engine.export_weights(tmp_path / "weights")
    resumed = Engine(plan)
    resumed.load(tmp_path / "checkpoint")
    assert resumed.state_dict()["step"].item() == 3
    assert torch.equal(resumed.step({"x": x(1)}), engine.step({"x": x(1)}))  # type: ignore[arg-type]
    assert "step" not in engine.state_dict(full=True)
    assert not any("step" in path.read_text() for path in (tmp_path / "weights").glob("*.json"))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return x + torch.tanh(self.linear(x)) / self.step


def test_layers_that_are_alike_count_each_for_itself():
    model = seeded(lambda: nn.Sequential(*[Layer() for _ in range(4)]))
    plan = partition(model, Topology.local(2), (x(),), loss=lambda o: o.square().mean(), constraints=Constraints(pp=2))
    assert plan.verify(model, (x(1),), loss=lambda o: o.square().mean()).ok
    assert {f"{k}.step" for k in range(4)} <= plan.program.states.keys()


# --- what has no effect -----------------------------------------------------------------------------------------------


def log(model: Any, z: Tensor) -> Tensor:
    model.calls += 1
    if model.calls % 100 == 0:
        print("a hundred calls")
    return z.square().mean()


def remember(model: Any, z: Tensor) -> Tensor:
    model.seen.append(z.detach().mean())
    model.last = z
    return z.square().mean()


def count_in_globals(model: Any, z: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    HISTORY.append(1.0)
    Stateful.classwide = getattr(Stateful, "classwide", 0) + 1  # type: ignore[attr-defined]
    return z.square().mean()


def measure(model: Any, z: Tensor) -> Tensor:
    start = time.perf_counter()
    loss = z.square().mean()
    model.seconds = time.perf_counter() - start
    return loss


def draw_for_nothing(model: Any, z: Tensor) -> Tensor:
    return z.square().mean() if random.random() < 2.0 else z.mean()


UNUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Any], str]] = {
    "a counter for a log": (log, {"calls": 0}, "'calls'"),
    "a list of results": (remember, {"seen": [], "last": None}, "'seen'"),
    "globals": (count_in_globals, {}, "'CALLS'"),
    "a stopwatch": (measure, {"seconds": 0.0}, "asks for the time"),
    "draws that decide nothing": (draw_for_nothing, {}, "draws from Python's random"),
}


@pytest.mark.parametrize("case", UNUSED)
def test_state_without_an_effect_is_noted_and_given_back(case: str):
    compute, attributes, note = UNUSED[case]
    model = seeded(lambda: Stateful(compute, **copy.deepcopy(attributes)))
    Stateful.classwide = 0  # type: ignore[attr-defined]
    before, generator = (CALLS, list(HISTORY)), random.getstate()
    plan = planned(model)
    assert any(note in text for text in plan.notes), plan.notes
    assert before == (CALLS, HISTORY) and random.getstate() == generator and Stateful.classwide == 0  # type: ignore[attr-defined]
    assert {name: getattr(model, name) for name in attributes} == attributes
    assert plan.verify(model, {"x": x(1)}).ok


def cache_table(model: Any, z: Tensor) -> Tensor:
    if model.table is None or model.length < z.shape[0]:
        model.length, model.table = z.shape[0], torch.arange(4, dtype=z.dtype).cos()
    return (z * model.table).square().mean()


def test_a_table_that_is_computed_once_is_no_state():
    model = seeded(lambda: Stateful(cache_table, table=None, length=0))
    plan = planned(model)
    assert not plan.notes
    assert model.table is None and plan.verify(model, {"x": x(1)}).ok


# --- what cannot be part of a plan ------------------------------------------------------------------------------------


def drop_layer(model: Any, z: Tensor) -> Tensor:
    return (z if random.random() < 0.5 else z * 2).square().mean()


def draw_scale(model: Any, z: Tensor) -> Tensor:
    return z.square().mean() * np.random.uniform(0.5, 1.5)


def draw_of_its_own(model: Any, z: Tensor) -> Tensor:
    return z.square().mean() * model.rng.random()


def draw_of_a_global(model: Any, z: Tensor) -> Tensor:
    return z.roll(DRAWS.randrange(8), 0)[:4].square().mean()


def ask_the_time(model: Any, z: Tensor) -> Tensor:
    return z.square().mean() * (time.time() % 1.0)


def decide_by_count(model: Any, z: Tensor) -> Tensor:
    model.step += 1
    return z.square().mean() if model.step > 1000 else z.abs().mean()


def alternate(model: Any, z: Tensor) -> Tensor:
    model.odd = not model.odd
    return z.square().mean() if model.odd else z.abs().mean()


def initialise(model: Any, z: Tensor) -> Tensor:
    if model.first:
        model.first, model.shift = False, z.detach().mean()
    return (z - model.shift).square().mean()


def recall(model: Any, z: Tensor) -> Tensor:
    loss = (z - (0 if model.last is None else model.last)).square().mean()
    model.last = z.detach()
    return loss


def count_in_a_list(model: Any, z: Tensor) -> Tensor:
    model.counts[0] += 1
    return z.square().mean() / model.counts[0]


def count_in_an_object(model: Any, z: Tensor) -> Tensor:
    model.state.step += 1
    return z.square().mean() / model.state.step


def count_in_a_dict(model: Any, z: Tensor) -> Tensor:
    model.seen["n"] = model.seen.get("n", 0) + 1
    return z.square().mean() / model.seen["n"]


def count_by_iterator(model: Any, z: Tensor) -> Tensor:
    return z.square().mean() * (1 + next(model.counter))


def count_by_length(model: Any, z: Tensor) -> Tensor:
    model.queue.append(1)
    return z.square().mean() / len(model.queue)


def count_in_a_global(model: Any, z: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return z.square().mean() / CALLS


def count_in_the_class(model: Any, z: Tensor) -> Tensor:
    Stateful.classwide += 1  # type: ignore[attr-defined]
    return z.square().mean() / Stateful.classwide  # type: ignore[attr-defined]


def count_in_a_default(model: Any, z: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(1)
    return z.square().mean() / len(seen)


def count_in_a_closure() -> Callable[[Any, Tensor], Tensor]:
    calls = 0

    def compute(model: Any, z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return z.square().mean() / calls

    return compute


def decide_late(model: Any, z: Tensor) -> Tensor:
    model.step += 1
    for number in range(12):
        if model.step > 1000 + number:
            z = z * 2 if number == 11 else z
    return z.square().mean()


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Any], str]] = {
    "a layer dropped by Python": (
        drop_layer,
        {},
        r"draws random numbers from Python's random at tests/passes/test_python_state.py:\d+",
    ),
    "a draw of NumPy": (draw_scale, {}, "draws random numbers from NumPy's random"),
    "a generator of the model": (
        draw_of_its_own,
        {"rng": np.random.default_rng(0)},
        "draws random numbers from the attribute 'rng'",
    ),
    "a generator of the file": (draw_of_a_global, {}, "draws random numbers from the global 'DRAWS'"),
    "the time": (ask_the_time, {}, r"reads the time at tests/passes/test_python_state.py:\d+"),
    "a decision by a count": (decide_by_count, {"step": 0}, r"branches on not \(\(step \+ 1\) > 1000\)"),
    "the last of many decisions": (decide_late, {"step": 0}, r"branches on .*\(\(step \+ 1\) > 1011\)"),
    "a flag that alternates": (alternate, {"odd": False}, "'odd'"),
    "an initialisation by data": (initialise, {"first": True, "shift": None}, "'first'|'shift'"),
    "the last batch's result": (recall, {"last": None}, "'last'"),
    "a count in a list": (count_in_a_list, {"counts": [0]}, "'counts'"),
    "a count in an object": (count_in_an_object, {"state": SimpleNamespace(step=0)}, "'state'"),
    "a count in a dict": (count_in_a_dict, {"seen": {}}, "'seen'"),
    "an iterator": (count_by_iterator, {"counter": itertools.count(1)}, "'counter'"),
    "the length of a queue": (count_by_length, {"queue": collections.deque()}, "'queue'"),
    "a global": (count_in_a_global, {}, "the global 'CALLS'"),
    "the class": (count_in_the_class, {}, "the attribute 'classwide' of the class Stateful"),
    "a default value": (count_in_a_default, {}, "a default value of count_in_a_default"),
    "a closure": (count_in_a_closure(), {}, "'calls' that .*compute closes over"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_state_that_decides_what_is_computed_is_refused(case: str):
    compute, attributes, message = REFUSED[case]
    Stateful.classwide = 1  # type: ignore[attr-defined]
    model = seeded(lambda: Stateful(compute, **copy.deepcopy(attributes)))
    before = CALLS, Stateful.classwide, random.getstate(), DRAWS.getstate()  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match=message):
        planned(model)
    assert before == (CALLS, Stateful.classwide, random.getstate(), DRAWS.getstate())  # type: ignore[attr-defined]


def test_a_hook_that_counts_is_refused():
    seen: list[int] = []

    def scale(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        seen.append(1)
        return output / len(seen)

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    model[0].register_forward_hook(scale)
    with pytest.raises(UnsupportedError, match=r"the variable 'seen' that .*scale closes over"):
        partition(model, Topology.local(1), (x(),), loss=lambda o: o.square().mean())
    assert seen == []


def test_a_loss_that_counts_is_refused():
    seen: list[int] = []

    def loss(output: Tensor) -> Tensor:
        seen.append(1)
        return output.square().mean() / len(seen)

    model = nn.Sequential(nn.Linear(4, 4)).double()
    with pytest.raises(UnsupportedError, match=r"the variable .seen. that .*loss closes over"):
        partition(model, Topology.local(1), (x(),), loss=loss)
    assert seen == []
