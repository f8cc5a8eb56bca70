"""What a checkpoint holds besides weights comes back to whom it belongs, or is refused."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from partitioner import CheckpointError, Checkpoints, Engine, Topology, partition
from partitioner.passes.errors import UserCodeError
from tests.helpers.every_rank import on_every_rank
from tests.helpers.net_runs import infer_only
from tests.helpers.net_training import Loader, one_rank, train
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net

pytestmark = pytest.mark.usefixtures("without_baselines")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def test_state_that_was_not_there_is_gone_after_loading(tmp_path: Path):
    engine, optimizer, _ = one_rank(tmp_path)
    engine.save(tmp_path / "before", optimizer)
    train(engine, optimizer=optimizer)
    engine.load(tmp_path / "before", optimizer)
    assert not optimizer.state
    again, other, _ = one_rank(tmp_path)
    for e, o in ((engine, optimizer), (again, other)):
        train(e, optimizer=o)
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(("saved", "loaded"), [("adamw", "sgd"), ("sgd", "adamw")])
def test_the_state_of_another_optimizer_is_refused(tmp_path: Path, saved: str, loaded: str):
    engine, _, _ = one_rank(tmp_path)
    engine.save(tmp_path / "out", train(engine, optimizer=OPTIMIZERS[saved](engine.parameters())))
    other, _, _ = one_rank(tmp_path)
    before = [p.detach().clone() for p in other.parameters()]
    with pytest.raises(CheckpointError, match="load without an optimizer"):
        other.load(tmp_path / "out", OPTIMIZERS[loaded](other.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), before, strict=True))
    other.load(tmp_path / "out")
    assert other.steps == engine.steps


def test_an_optimizer_of_the_same_hyperparameters_goes_on(tmp_path: Path):
    engine, _, _ = one_rank(tmp_path)
    engine.save(tmp_path / "out", train(engine, optimizer=OPTIMIZERS["adam"](engine.parameters())))
    optimizer = OPTIMIZERS["adamw"](engine.parameters())
    engine.load(tmp_path / "out", optimizer)
    assert {float(s["step"]) for s in optimizer.state.values()} == {2.0}


def by_layer(engine: Engine, factor: float) -> torch.optim.Optimizer:
    """A group, with a rate of its own, for each top-level module of those that the rank has: layerwise decay, say."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in engine.named_parameters():
        groups.setdefault(".".join(name.split(".")[:-2]) or name, []).append(parameter)
    rates = {name: factor * (1 + sum(map(ord, name)) % 100) for name in groups}
    return torch.optim.AdamW([{"params": held, "lr": rates[name]} for name, held in groups.items()])


def rates(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    names = {id(p): name for name, p in engine.named_parameters()}
    return {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("loaded", [{"pp": 2}, {}, {"tp": 2}], ids=str)
def test_hyperparameters_come_back_to_their_parameters(tmp_path: Path, loaded: dict[str, Any]):
    """Whichever stage had them: the first groups of two stages are groups of different layers."""

    def save(communicator: Any) -> dict[str, float]:
        engine = Engine(program_of_net(pp=2), Net(), communicator=communicator)
        optimizer = by_layer(engine, 0.001)
        engine.save(tmp_path / "out", optimizer)
        return rates(engine, optimizer)

    def load(communicator: Any) -> dict[str, float]:
        engine = Engine(program_of_net(**loaded), None, communicator=communicator)
        optimizer = by_layer(engine, 1.0)
        engine.load(tmp_path / "out", optimizer)
        return rates(engine, optimizer)

    saved: dict[str, float] = {}
    for part in on_every_rank(program_of_net(pp=2), save):
        saved |= part
    assert len(set(saved.values())) > 2
    for part in on_every_rank(program_of_net(**loaded), load):
        assert part == {name: saved[name] for name in part}


def test_groups_that_were_split_or_joined_are_refused(tmp_path: Path):
    engine, optimizer, _ = one_rank(tmp_path)
    first, *rest = engine.parameters()
    two = torch.optim.AdamW([{"params": [first], "lr": 0.5}, {"params": rest}])
    engine.save(tmp_path / "one", optimizer)
    with pytest.raises(CheckpointError, match="split into groups 0 and 1"):
        engine.load(tmp_path / "one", two)
    engine.save(tmp_path / "two", two)
    with pytest.raises(CheckpointError, match=r"group 0 has parameters saved with lr=0\.5 and with lr=0\.001"):
        engine.load(tmp_path / "two", optimizer)


def test_parameters_of_another_owner_are_refused(tmp_path: Path):
    model = Net()
    engine = Engine(program_of_net(), model)
    with pytest.raises(CheckpointError, match=r"create the optimizer from engine\.parameters\(\)"):
        engine.save(tmp_path / "out", torch.optim.AdamW(model.parameters()))
    assert not (tmp_path / "out").exists()


def test_what_differs_among_ranks_comes_back_to_each(tmp_path: Path):
    """A scheduler whose optimizer has other groups on each stage, say."""

    def position(communicator: Any, plan: dict[str, Any], at: int | None) -> int:
        engine = Engine(program_of_net(**plan), Net(), communicator=communicator)
        loader = Loader()
        if at is None:
            engine.load(tmp_path / "out", extra={"data": loader})
        else:
            loader.position = at + communicator.rank
            engine.save(tmp_path / "out", extra={"data": loader})
        return loader.position

    two = program_of_net(pp=2)
    on_every_rank(two, lambda c: position(c, {"pp": 2}, 7))
    assert on_every_rank(two, lambda c: position(c, {"pp": 2}, None)) == [7, 8]
    with pytest.raises(CheckpointError, match=r"the state of .data. in .* differed between ranks"):
        on_every_rank(program_of_net(tp=2), lambda c: position(c, {"tp": 2}, None))


@pytest.mark.parametrize(
    ("odd", "told"),
    [(np.int64(3), "of type numpy.int64"), (object(), "of type builtins.object")],
    ids=["numpy", "object"],
)
def test_state_that_is_no_plain_data_is_refused_by_name(tmp_path: Path, odd: Any, told: str):
    engine, optimizer, _ = one_rank(tmp_path)

    class Odd(Loader):
        def state_dict(self) -> dict[str, Any]:
            return {"at": [1, odd]}

    with pytest.raises(
        CheckpointError, match=rf"extra\.data\.at\.1 is {told}\): it may contain numbers, strings, tensors"
    ):
        engine.save(tmp_path / "out", optimizer, extra={"data": Odd()})
    assert not (tmp_path / "out").exists()


def test_factors_of_whole_parameters_are_kept(tmp_path: Path):
    """Of Adafactor, whose states are rows and columns; on stages that cut nothing, and on one rank."""

    def trained(communicator: Any, plan: dict[str, Any], load: bool) -> dict[str, Any]:
        engine = Engine(program_of_net(**plan), Net(), communicator=communicator)
        optimizer = engine.trust_optimizer(torch.optim.Adafactor(engine.parameters(), lr=0.01))  # else refused on parts
        if load:
            engine.load(tmp_path / "out", optimizer)
        else:
            engine.save(tmp_path / "out", train(engine, optimizer=optimizer))
        return {f"{n}.{k}": v for n, p in engine.named_parameters() for k, v in optimizer.state[p].items()}

    first, second = on_every_rank(program_of_net(pp=2), lambda c: trained(c, {"pp": 2}, False))
    expected = first | second
    assert any(name.endswith("row_var") for name in expected)
    [got] = on_every_rank(program_of_net(), lambda c: trained(c, {}, True))
    assert got.keys() == expected.keys()
    assert all(torch.equal(torch.as_tensor(got[name]), torch.as_tensor(expected[name])) for name in got)
    for load in (True, False):
        with pytest.raises(CheckpointError, match="use this optimizer with a plan that shards nothing"):
            on_every_rank(program_of_net(tp=2), lambda c, load=load: trained(c, {"tp": 2}, load))


def test_tensors_that_the_model_does_not_have_are_told(tmp_path: Path):
    """Of a model of more layers, say, whose first ones would otherwise be taken without a word."""

    def engine(layers: int) -> Engine:
        model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))), (torch.randn(4, 4),)
        return Engine(partition(model, Topology.local(1), x, loss=torch.sum), model)

    engine(3).save(tmp_path / "out")
    with pytest.warns(UserWarning, match=r"has 2 tensors that the plan's model does not have \(2\.bias, 2\.weight\)"):
        engine(2).load(tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(3).load(tmp_path / "out")


def two_optimizers(engine: Engine, swapped: bool = False) -> list[torch.optim.Optimizer | None]:
    """Momentum for matrices, AdamW for the rest; ``None`` where a stage has nothing for it."""
    parameters = [*dict(engine.named_parameters()).values()]
    matrices = [p for p in parameters if p.dim() > 1]
    rest = [p for p in parameters if p.dim() < 2]
    first = torch.optim.SGD(matrices, lr=0.05, momentum=0.9) if matrices else None
    second = torch.optim.AdamW(rest, lr=0.01) if rest else None
    return [second, first] if swapped else [first, second]


def step_of(engine: Engine, optimizers: list[torch.optim.Optimizer | None], count: int) -> None:
    for _ in range(count):
        engine.step(net_inputs())
        for optimizer in optimizers:
            if optimizer is not None:
                optimizer.step()


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [({}, {"tp": 2}), ({"pp": 4, "num_microbatches": 2}, {}), ({"tp": 2}, {"pp": 4, "num_microbatches": 2})],
    ids=str,
)
def test_two_optimizers_go_on_under_any_plan(tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any], wait: bool):
    """The first and the last of four stages have no vector, so that AdamW has nothing to do there."""

    def work(plan: dict[str, Any], first: bool) -> Callable[[Any], Any]:
        def run(communicator: Any) -> dict[str, torch.Tensor] | None:
            engine = Engine(program_of_net(**plan), Net(), communicator=communicator)
            optimizers = two_optimizers(engine)
            if not first:
                for optimizer in optimizers:
                    for group in [] if optimizer is None else optimizer.param_groups:
                        group["lr"] = 0.5
                engine.load(tmp_path / "out", optimizers)
            step_of(engine, optimizers, 2)
            if first:
                engine.save(tmp_path / "out", optimizers, wait=wait)
                engine.settle_saves()
            return engine.state_dict(full=True) if not first else None

        return run

    on_every_rank(program_of_net(**saved), work(saved, True))
    got = on_every_rank(program_of_net(**loaded), work(loaded, False))[0]
    engine = Engine(program_of_net(), Net())
    step_of(engine, two_optimizers(engine), 4)
    for name, tensor in engine.state_dict(full=True).items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_several_optimizers_that_do_not_fit_are_refused(tmp_path: Path):
    engine, *_ = one_rank(tmp_path)
    both, swapped = two_optimizers(engine), two_optimizers(engine, swapped=True)
    step_of(engine, both, 1)
    engine.save(tmp_path / "out", both)
    matrices = torch.optim.SGD([p for p in engine.parameters() if p.dim() > 1], lr=0.1)
    for given, words in (
        ([*both, torch.optim.AdamW(engine.parameters())], "first.weight is a parameter of two optimizers, 0 .SGD. and"),
        ([matrices, None], "2 trained parameters are in none of the 2 optimizers, the first layers.0.up.bias"),
        ([both[0], torch.optim.AdamW(nn.Linear(2, 2).parameters())], "of the optimizer's 2 parameters are not this"),
        ([both[0], "adamw"], "expected an optimizer of torch.optim, or a list of optimizers, got str"),
    ):
        for use in (engine.save, engine.load):
            with pytest.raises(CheckpointError, match=words):
                use(tmp_path / "out", given)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=r"was saved as a parameter of optimizer 1 \(AdamW\)"):
        engine.load(tmp_path / "out", swapped)
    with pytest.raises(CheckpointError, match=r"the state of 2 optimizers \(SGD, AdamW\), 1 were given"):
        engine.load(tmp_path / "out", torch.optim.AdamW(engine.parameters()))
    engine.load(tmp_path / "out", both)


def test_a_stage_with_nothing_to_train_has_an_optimizer_like_the_others(tmp_path: Path):
    program = program_of_net(pp=4, num_microbatches=2)
    frozen = {n: s.model_copy(update={"requires_grad": s.stages != (1,)}) for n, s in program.states.items()}
    program = program.model_copy(update={"states": frozen})
    model = Net()
    model.layers[0].requires_grad_(False)

    def work(communicator: Any) -> int:
        engine = Engine(program, model, communicator=communicator)
        optimizer = torch.optim.AdamW(p for p in engine.parameters() if p.requires_grad)
        for _ in range(2):
            engine.step(net_inputs())
            nn.utils.clip_grad_value_(engine.parameters(), 1.0)
            optimizer.step()
        engine.save(tmp_path / "out", optimizer)
        engine.load(tmp_path / "out", optimizer)
        return sum(p.numel() for group in optimizer.param_groups for p in group["params"])

    counts = on_every_rank(program, work)
    assert [n == 0 for n in counts] == [False, True, False, False]


def test_all_ranks_may_load_at_once_what_all_have_just_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``latest`` is the first rank's to write, and may take it long."""
    real = Checkpoints._publish_checkpoint

    def late(self: Checkpoints, directory: Path) -> None:
        time.sleep(0.3)
        real(self, directory)

    monkeypatch.setattr(Checkpoints, "_publish_checkpoint", late)

    def work(communicator: Any) -> list[int]:
        engine = Engine(program_of_net(tp=2), Net(), communicator=communicator)
        optimizer = torch.optim.AdamW(engine.parameters())
        found = []
        for behind in (False, True):
            checkpoints = Checkpoints(tmp_path / str(behind), engine, optimizer, behind=behind)
            for _ in range(2):
                train(engine, 1, optimizer)
                checkpoints.save()
                steps = engine.steps
                engine.load(tmp_path / str(behind), optimizer)
                found.append(engine.steps - steps)
            checkpoints.close()
            found.append(int((tmp_path / str(behind) / "latest").read_text().removeprefix("step-")) - engine.steps)
        return found

    assert on_every_rank(program_of_net(tp=2), work) == [[0] * 6] * 2


def test_what_a_state_dict_raises_on_one_rank_ends_the_save_on_all(tmp_path: Path):
    class Broken(Loader):
        def state_dict(self) -> dict[str, Any]:
            raise ZeroDivisionError

    def work(communicator: Any) -> str:
        engine = Engine(program_of_net(tp=2), Net(), communicator=communicator)
        kind = Broken if communicator.rank else Loader
        with pytest.raises((CheckpointError, UserCodeError)) as caught:
            engine.save(tmp_path / "out", extra={"data": kind()})
        engine.save(tmp_path / "out", extra={"data": Loader()})
        return f"{type(caught.value).__name__} {type(caught.value.__cause__).__name__}"

    raised = on_every_rank(program_of_net(tp=2), work)
    assert raised == ["CheckpointError NoneType", "UserCodeError ZeroDivisionError"]


def average(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """As docs/training.md has it."""
    for parameter, state in optimizer.state.items():
        state.setdefault("average", parameter.detach().clone()).lerp_(parameter.detach(), 0.1)


def test_an_average_beside_the_moments_goes_on_under_another_plan(tmp_path: Path):
    def work(plan: dict[str, Any], load: bool) -> Callable[[Any], dict[str, torch.Tensor]]:
        def run(communicator: Any) -> dict[str, torch.Tensor]:
            engine = Engine(program_of_net(**plan), Net(), communicator=communicator)
            optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
            optimizer.register_step_post_hook(average)
            if load:
                engine.load(tmp_path / "out", optimizer)
            train(engine, 2, optimizer)
            engine.save(tmp_path / "out", optimizer)
            with torch.no_grad():
                for parameter in engine.parameters():
                    parameter.copy_(optimizer.state[parameter]["average"])
            return engine.state_dict(full=True)

        return run

    on_every_rank(program_of_net(pp=2, tp=2), work({"pp": 2, "tp": 2}, False))
    got = on_every_rank(program_of_net(dp=2), work({"dp": 2}, True))[0]
    model, kept = Net(), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        model(**net_inputs())["loss"].backward()
        optimizer.step()
        for name, p in model.named_parameters():
            kept[name] = (kept[name] if step else p.detach()).lerp(p.detach(), 0.1)
    for name, tensor in kept.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-6)


def test_an_engine_for_inference_that_loads_leaves_the_runs_generators_alone(tmp_path: Path):
    engine, optimizer, _ = one_rank(tmp_path)
    engine.save(tmp_path / "out", optimizer)
    evaluation = Engine(infer_only(program_of_net()), None)
    drawn = torch.rand(1), random.random(), np.random.rand()
    state = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    evaluation.load(tmp_path / "out")
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (random.getstate(), str(np.random.get_state())) == state[1:]
    engine.load(tmp_path / "out", optimizer)
    assert (torch.rand(1), random.random(), np.random.rand()) == drawn, "the run's own engine takes them back"


def test_a_save_amid_gradients_that_are_added_up_is_told(tmp_path: Path):
    engine, optimizer, checkpoints = one_rank(tmp_path)
    checkpoints.every = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            engine.step(net_inputs())
            engine.step(net_inputs(), accumulate=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            checkpoints.after_step()
            engine.step(net_inputs(), accumulate=True)
    engine.step(net_inputs())
    engine.step(net_inputs(), accumulate=True)
    checkpoints.after_step()
    with pytest.warns(UserWarning, match="step 8 was saved while its gradients were still being accumulated"):
        engine.step(net_inputs(), accumulate=True)
    checkpoints.close()
