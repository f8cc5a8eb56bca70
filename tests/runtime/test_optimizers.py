"""Optimizers that look at more than an element are refused on parts of parameters before they step; others pass."""

from __future__ import annotations

import copy
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

from partitioner import Engine, OptimizerError
from partitioner.runtime.comm.thread_backend import ThreadWorld
from partitioner.runtime.engine.optimizer_trials import ParameterCut, Sample, StepCall, try_on_parts
from partitioner.runtime.program.program import Program
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net

Made = Callable[[list[Any]], optim.Optimizer]
ROWS, COLUMNS, FLAT, ROWS_FLAT, STACK = (
    ParameterCut((0,)),
    ParameterCut((1,)),
    ParameterCut(flat=True),
    ParameterCut((0,), flat=True),
    ParameterCut(stacked=True),
)


class Each(optim.Optimizer):
    """An optimizer that takes ``rate`` times ``update(gradient, parameter)``; what it is made of is no default."""

    def __init__(self, params: Any, update: Callable[..., Tensor], rate: float = 0.01) -> None:
        super().__init__(params, {"lr": rate})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.update(p.grad, p))


class Lion(optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.lerp(p.grad, average, first).sign_())
                average.lerp_(p.grad, 1 - second)


class Lookahead(optim.Optimizer):
    """Steps another optimizer, and keeps slow weights that it makes when it is made."""

    def __init__(self, optimizer: optim.Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.param_groups = optimizer.param_groups
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    s.lerp_(p.detach(), self.alpha)
                    p.data.copy_(s)


class SAM(optim.Optimizer):
    """Sharpness-aware minimization, as it is commonly written around another optimizer."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base = base(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old"] = p.detach().clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))

    @torch.no_grad()
    def second_step(self) -> None:
        for p, state in self.state.items():
            if "old" in state:
                p.copy_(state["old"])
        self.base.step()

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM needs a closure"
        with torch.enable_grad():
            closure()
            self.first_step()
            closure()
        self.second_step()


class Clipping(optim.AdamW):
    """Adam that clips each tensor's gradient by its norm first."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                nn.utils.clip_grad_norm_([p], 1.0)
        return super().step(closure)


class LAMB(optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                square = self.state[p].setdefault("square", torch.zeros_like(p))
                square.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = p.grad / (square.sqrt() + 1e-6)
                p.sub_(group["lr"] * p.norm() / (update.norm() + 1e-9) * update)


class Shampoo(optim.Optimizer):
    """Preconditions a matrix from its second step on, as it begins with the statistics of the first."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state, update = self.state[p], p.grad
                if "left" in state and p.dim() == 2:
                    update = torch.linalg.solve(state["left"] + torch.eye(len(p), dtype=p.dtype), p.grad)
                if p.dim() == 2:
                    state["left"] = state.get("left", 0.0) + p.grad @ p.grad.T
                p.sub_(group["lr"] * update)


class Late(optim.SGD):
    """Normalizes by the tensor from its tenth step on."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if self.count >= 10:
            for p in (p for g in self.param_groups for p in g["params"]):
                p.grad = p.grad / p.grad.norm()
        return super().step(closure)


class Global(optim.SGD):
    """Divides by a norm over all of its tensors."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        return super().step(closure)


def centralized(gradient: Tensor, parameter: Tensor) -> Tensor:
    return (
        gradient - gradient.mean(dim=tuple(range(1, gradient.dim())), keepdim=True) if gradient.dim() > 1 else gradient
    )


def lars(gradient: Tensor, parameter: Tensor) -> Tensor:
    return gradient * parameter.norm() / (gradient.norm() + 1e-9)


def sums_of_rows(gradient: Tensor, parameter: Tensor) -> Tensor:
    return gradient / (1 + gradient.abs().sum(0, keepdim=True))


ELEMENTWISE: dict[str, Made] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "a rate of zero, as a warm-up begins": lambda p: optim.SGD(
        p, lr=0.0, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "adam": lambda p: optim.Adam(p, amsgrad=True),
    "adamw, maximized": lambda p: optim.AdamW(p, maximize=True),
    "adamw, fused": lambda p: optim.AdamW(p, fused=True),
    "adamw, foreach": lambda p: optim.AdamW(p, foreach=True),
    "adamw, rates that are tensors": lambda p: optim.AdamW([{"params": [q], "lr": torch.tensor(1e-5)} for q in p]),
    "nadam": lambda p: optim.NAdam(p, decoupled_weight_decay=True),
    "radam": optim.RAdam,
    "adamax": optim.Adamax,
    "rmsprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": optim.Rprop,
    "adagrad, whose state is made with it": lambda p: optim.Adagrad(p, initial_accumulator_value=0.1),
    "adadelta": optim.Adadelta,
    "asgd": optim.ASGD,
    "lion": Lion,
    "lookahead": lambda p: Lookahead(optim.AdamW(p)),
    "of an attribute": lambda p: Each(p, lambda gradient, parameter: gradient.sign() * parameter.abs()),
}
WHOLE: dict[str, Made] = {
    "adafactor": optim.Adafactor,
    "lamb": LAMB,
    "lars": lambda p: Each(p, lars),
    "clipped by tensor": Clipping,
    "normalized later": lambda p: Late(p, lr=0.1),
    "sam": lambda p: SAM(p, optim.SGD, lr=0.1),
    "lookahead of adafactor": lambda p: Lookahead(optim.Adafactor(p)),
    "lbfgs": lambda p: optim.LBFGS(p, lr=0.1),
    "global norm": lambda p: Global(p, lr=0.1),
    "random": lambda p: Each(p, lambda gradient, parameter: gradient * torch.rand(()) + torch.randn_like(gradient)),
}


def sample(cut: ParameterCut, **changes: Any) -> Sample:
    shape = (4, 48, 40) if cut.stacked else (48, 40)
    given = dict(name="w", group=0, shape=shape, cut=cut, dtype=torch.float32, device=torch.device("cpu"))
    return Sample(**(given | changes))


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(48, 40)), nn.Parameter(torch.randn(40))]


@pytest.mark.parametrize("made", ELEMENTWISE.values(), ids=ELEMENTWISE.keys())
def test_what_updates_each_element_by_itself_passes_for_every_cut(made: Made):
    optimizer = made(parameters())
    for cut in (ROWS, COLUMNS, FLAT, ROWS_FLAT, STACK):
        assert try_on_parts(optimizer, [sample(cut)], True, StepCall()) is None, cut


@pytest.mark.parametrize("made", WHOLE.values(), ids=WHOLE.keys())
def test_what_looks_at_a_whole_tensor_is_found_for_every_cut(made: Made):
    optimizer = made(parameters())
    for cut in (ROWS, COLUMNS, FLAT, ROWS_FLAT):
        found = try_on_parts(optimizer, [sample(cut)], False, StepCall())
        assert found is not None and found.kind == "differs" and found.unit == "parts", cut


@pytest.mark.parametrize(
    ("made", "found_for", "passes_for"),
    [
        (lambda p: Each(p, centralized), (COLUMNS, FLAT), (ROWS,)),  # means of rows
        (lambda p: Each(p, sums_of_rows), (ROWS, FLAT), (COLUMNS,)),
        (Shampoo, (ROWS, COLUMNS, FLAT), ()),
        (lambda p: optim.Muon(p[:1]), (ROWS, COLUMNS, FLAT, STACK), ()),
        (optim.Adafactor, (STACK,), ()),
        (lambda p: Global(p, lr=0.1), (), (STACK,)),  # all parameters, however they are kept
    ],
)
def test_only_the_cuts_of_the_plan_count(
    made: Made, found_for: Iterable[ParameterCut], passes_for: Iterable[ParameterCut]
):
    optimizer = made(parameters())
    assert all(try_on_parts(optimizer, [sample(cut)], False, StepCall()) for cut in found_for)
    assert not any(try_on_parts(optimizer, [sample(cut)], False, StepCall()) for cut in passes_for)


def test_what_couples_parameters_is_found_where_stages_have_different_ones():
    for made in (lambda p: SAM(p, optim.SGD, lr=0.1), lambda p: optim.LBFGS(p, lr=0.1), lambda p: Global(p, lr=0.1)):
        found = try_on_parts(made(parameters()), [sample(ParameterCut())], True, StepCall())
        assert found is not None and (found.kind, found.unit) == ("differs", "stages")
    assert (
        try_on_parts(optim.Adafactor(parameters()), [sample(ParameterCut())], True, StepCall()) is None
    )  # each tensor by itself


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bfloat16], ids=str)
def test_parameters_of_other_types(dtype: torch.dtype):
    given = [nn.Parameter(torch.zeros(48, 40, dtype=dtype))]
    assert try_on_parts(optim.AdamW(given), [sample(ROWS, dtype=dtype)], False, StepCall()) is None
    assert try_on_parts(Clipping(given), [sample(ROWS, dtype=dtype)], False, StepCall()) is not None


def test_a_trial_leaves_everything_as_it_was():
    given = parameters()
    for p in given:
        p.grad = torch.ones_like(p)
    calls: list[int] = []
    noise = torch.Generator().manual_seed(3)
    optimizer = Each(given, lambda gradient, _: gradient + torch.randn(gradient.shape, generator=noise))
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.step()
    states = copy.deepcopy([given, [p.grad for p in given]]), noise.get_state(), torch.get_rng_state()
    python, numpy = random.getstate(), np.random.get_state()[1].copy()
    for made in (
        optimizer,
        SAM(given, optim.Adam, lr=0.1),
        Each(given, lambda gradient, _: torch.randn_like(gradient)),
    ):
        assert try_on_parts(made, [sample(ROWS)], False, StepCall()) is not None
        assert "old" not in str(made.state)
    assert calls == [1]
    assert all(torch.equal(a, b) for a, b in zip(states[0][0], given, strict=True))
    assert all(torch.equal(a, p.grad) for a, p in zip(states[0][1], given, strict=True))
    assert torch.equal(states[1], noise.get_state())
    assert torch.equal(states[2], torch.get_rng_state())
    assert random.getstate() == python and (np.random.get_state()[1] == numpy).all()


class OfAModel(optim.SGD):
    """Reads a model that it holds."""

    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params, lr=0.1)
        self.model = model

    def step(self, closure: Any = None) -> Any:
        self.model.zero_grad()
        return super().step(closure)


def on_ranks(program: Program, work: Callable[[Engine], Any]) -> list[Any]:
    """What ``work`` returns, or the :class:`OptimizerError` that it raises, on each rank."""
    world = ThreadWorld(program.world_size, timeout=20)
    results: list[Any] = [None] * program.world_size

    def run(rank: int) -> None:
        try:
            results[rank] = work(Engine(program, Net(), communicator=world.communicator(rank)))
        except OptimizerError as error:
            results[rank] = error
        except BaseException as error:
            results[rank] = error
            world.abort(str(error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(program.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    others = [e for e in results if isinstance(e, BaseException) and not isinstance(e, OptimizerError)]
    if others:
        raise others[0]
    return results


def trained(made: Made, trust: bool = False) -> Callable[[Engine], bool]:
    """Two steps; whether the parameters have changed."""

    def work(engine: Engine) -> bool:
        before = [p.detach().clone() for p in engine.parameters()]
        optimizer = made([*engine.parameters()])
        if trust:
            assert engine.trust_optimizer(optimizer) is optimizer
        try:
            for _ in range(2):
                engine.step(net_inputs())
                optimizer.step()
        finally:
            changed = any(not torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True))
            assert changed or not trust
        return changed

    return work


def test_all_ranks_refuse_before_anything_has_changed():
    def work(engine: Engine) -> tuple[str, bool]:
        before = [p.detach().clone() for p in engine.parameters()]
        optimizer = optim.Adafactor(engine.parameters())
        engine.step(net_inputs())
        with pytest.raises(OptimizerError) as error:
            optimizer.step()
        same = all(torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True))
        return str(error.value), same and not optimizer.state

    for text, unchanged in on_ranks(program_of_net(tp=2), work):
        assert unchanged
        assert text.startswith("Adafactor would step parts of parameters: layers.0.up.weight, of shape [16, 8], is cut")
        assert "of the largest update" in text and "plan with Constraints(tp=1)" in text
        assert "engine.trust_optimizer(optimizer)" in text


@pytest.mark.parametrize("name", ["adamw, fused", "lion", "adagrad, whose state is made with it", "lookahead"])
@pytest.mark.parametrize("plan", [{"tp": 2}, {"pp": 2, "tp": 2, "halves": True}], ids=str)
def test_elementwise_optimizers_train_on_shards(name: str, plan: dict[str, Any]):
    assert all(result is True for result in on_ranks(program_of_net(**plan), trained(ELEMENTWISE[name])))


@pytest.mark.parametrize("name", ["adafactor", "lamb", "clipped by tensor", "global norm", "lookahead of adafactor"])
def test_others_train_where_every_rank_has_all_of_every_parameter(name: str):
    for plan in ({}, {"dp": 2}):
        assert all(result is True for result in on_ranks(program_of_net(**plan), trained(WHOLE[name])))


def test_with_stages_only_what_couples_parameters_is_refused():
    assert on_ranks(program_of_net(pp=2), trained(WHOLE["adafactor"])) == [True, True]
    for error in on_ranks(program_of_net(pp=2), trained(WHOLE["global norm"])):
        assert isinstance(error, OptimizerError)
        assert "on each rank only the parameters of one pipeline stage (pp=2)" in str(error)
        assert "Constraints(pp=1)" in str(error)


def test_a_group_of_parameters_that_are_whole_may_have_any_optimizer():
    def work(engine: Engine) -> bool:
        whole = [p for n, p in engine.named_parameters() if n in ("first.weight", "head.weight")]
        rest = [p for n, p in engine.named_parameters() if n not in ("first.weight", "head.weight")]
        muon, adamw = optim.Muon(whole), optim.AdamW(rest)
        for _ in range(2):
            engine.step(net_inputs())
            muon.step()
            adamw.step()
        return True

    assert on_ranks(program_of_net(tp=2), work) == [True, True]


def test_options_of_groups_count():
    """An optimizer that does one thing or another, by an option of the group."""

    class Both(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if group["normalize"]:
                        p.grad = p.grad / p.grad.norm()
            return super().step(closure)

    def made(cut_too: bool) -> Callable[[Engine], bool]:
        def work(engine: Engine) -> bool:
            named = dict(engine.named_parameters())
            whole = [named.pop(n) for n in ("first.weight", "head.weight")]
            groups = [{"params": whole, "normalize": True}, {"params": [*named.values()], "normalize": cut_too}]
            optimizer = Both(groups, lr=0.1)
            engine.step(net_inputs())
            optimizer.step()
            return True

        return work

    assert on_ranks(program_of_net(tp=2), made(False)) == [True, True]
    assert all("layers.0.up.weight" in str(error) for error in on_ranks(program_of_net(tp=2), made(True)))


def test_a_wrapper_that_steps_in_two_parts_is_found_around_the_optimizer_that_it_steps():
    def work(engine: Engine) -> None:
        optimizer = SAM([*engine.parameters()], optim.SGD, lr=0.1)
        engine.step(net_inputs())
        optimizer.first_step()
        optimizer.second_step()

    assert all("SAM would step" in str(error) for error in on_ranks(program_of_net(tp=2), work))


def test_parameters_that_are_added_later_are_tried_too():
    def work(engine: Engine) -> None:
        named = dict(engine.named_parameters())
        optimizer = LAMB([named["first.weight"]])
        engine.step(net_inputs())
        optimizer.step()
        optimizer.add_param_group({"params": [named["layers.1.down.weight"]]})
        optimizer.step()

    assert all("layers.1.down.weight" in str(error) for error in on_ranks(program_of_net(tp=2), work))


def test_what_cannot_be_tried_is_refused_unless_it_is_trusted():
    def made(p: list[Any]) -> optim.Optimizer:
        return OfAModel(p, Net())

    for error in on_ranks(program_of_net(tp=2), trained(made)):
        assert "could not be tried: it uses a Net, of which a trial has no copy" in str(error)
        assert "if it does so, call engine.trust_optimizer(optimizer)" in str(error)
    assert on_ranks(program_of_net(tp=2), trained(made, trust=True)) == [True, True]
    assert on_ranks(program_of_net(tp=2), trained(WHOLE["lamb"], trust=True)) == [True, True]
    assert on_ranks(program_of_net(dp=2), trained(made)) == [True, True]  # whole: nothing to try


class Delegating:
    """A wrapper as Lightning's: it has the class of the optimizer, its attributes are those of the optimizer, and its
    step is that of an ``owner``, which it has behind a weak reference.
    """

    def __init__(self, optimizer: optim.Optimizer, owner: Any) -> None:
        self.optimizer = optimizer
        self.owner = weakref.proxy(owner)
        self.__class__ = type("Delegating", (Delegating, type(optimizer)), {})  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def step(self, closure: Any = None) -> Any:
        return self.owner.step(self.optimizer)


class Owner:
    def step(self, optimizer: optim.Optimizer) -> Any:
        return optimizer.step()


@pytest.mark.parametrize("trust", [False, True])
def test_a_wrapper_that_has_its_owner_behind_a_weak_reference_can_be_trusted(trust: bool):
    owner = Owner()

    def work(engine: Engine) -> bool:
        wrapper: Any = Delegating(optim.AdamW(engine.parameters()), owner)
        if trust:
            engine.trust_optimizer(wrapper)
        engine.step(net_inputs())
        wrapper.step()
        return True

    found = on_ranks(program_of_net(tp=2), work)
    if trust:
        assert found == [True, True]
    else:
        assert all("could not be tried: it uses a Owner, of which a trial has no copy" in str(e) for e in found)


def test_a_schedule_that_replaces_step_is_looked_through():
    def work(engine: Engine) -> bool:
        optimizer = optim.AdamW(engine.parameters())
        schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)  # from zero on
        engine.step(net_inputs())
        optimizer.step()
        schedule.step()
        return True

    def refused(engine: Engine) -> None:
        optimizer = optim.Adafactor(engine.parameters())
        optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        engine.step(net_inputs())
        optimizer.step()

    assert on_ranks(program_of_net(tp=2), work) == [True, True]
    assert all(isinstance(error, OptimizerError) for error in on_ranks(program_of_net(tp=2), refused))


def test_lbfgs_is_refused_within_its_first_step():
    def work(engine: Engine) -> None:
        optimizer = optim.LBFGS([*engine.parameters()])

        def closure() -> Any:
            return engine.step(net_inputs())

        optimizer.step(closure)

    assert all("LBFGS would step parts" in str(error) for error in on_ranks(program_of_net(tp=2), work))


def test_a_trial_is_made_once_and_is_quick(monkeypatch: pytest.MonkeyPatch):
    calls: list[float] = []
    from partitioner.runtime.engine import optimizer_checks

    def timed(*args: Any) -> Any:
        start = time.thread_time()
        try:
            return try_on_parts(*args)
        finally:
            calls.append(time.thread_time() - start)

    monkeypatch.setattr(optimizer_checks, "try_on_parts", timed)

    def work(engine: Engine) -> bool:
        optimizer = optim.AdamW(engine.parameters())
        for _ in range(3):
            engine.step(net_inputs())
            optimizer.step()
        return True

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert on_ranks(program_of_net(tp=2), work) == [True, True]
    assert len(calls) == 2 and max(calls) < 1.0
