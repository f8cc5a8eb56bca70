"""Hooks: those that only look are left out of the plan with a note, those on gradients that do more are refused by name
and line, those on forward that do more are traced."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn.modules import module as modules

from partitioner import Constraints, Topology, partition
from partitioner.passes.errors import UnsupportedError
from partitioner.passes.trace.hook_sources import GIVEN, describe_hook_effect
from partitioner.plans.reference import run_reference

pytestmark = pytest.mark.usefixtures("without_baselines")

HERE = r"test_hooks.py:\d+"


class Model(nn.Module):
    def __init__(self, within: Callable[[nn.Module, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.within = within
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            if self.within is not None:
                self.within(self, x)
        return x.square().mean()


INPUTS = (torch.randn(4, 4, generator=torch.Generator().manual_seed(0)),)
norms: dict[str, Any] = {}
lists: collections.defaultdict[str, list[Any]] = collections.defaultdict(list)
steps = 0
logger = logging.getLogger(__name__)


class Recorder:
    def __init__(self) -> None:
        self.norms: list[float] = []
        self.count = 0

    def record(self, name: str, value: float) -> None:
        self.count += 1
        self.norms.append(value)

    def __call__(self, grad: Tensor) -> None:
        self.record("grad", grad.norm().item())


recorder = Recorder()


# --- hooks that only look ---------------------------------------------------------------------------------------------


def keeps_norm(grad: Tensor) -> None:
    norms["weight"] = grad.detach().norm().item()


def counts(grad: Tensor) -> None:
    global steps
    steps += 1
    if torch.isnan(grad).any():
        print(f"nan after {steps} steps")


def keeps_all(grad: Tensor) -> None:
    for name, value in (("abs", grad.abs()), ("square", grad**2)):
        lists[name].append(value.max())


def tells(grad: Tensor, name: str = "weight") -> None:
    logger.info("%s: %s", name, grad.norm())
    return


def keeps_histogram(grad: Tensor) -> None:
    values = grad.cpu().clone()
    values = [v.item() for v in values.flatten() if v > 0]
    norms["histogram"] = sorted(values)[-3:]


LOOKING: dict[str, Callable[..., Any]] = {
    "a norm": keeps_norm,
    "a counter": counts,
    "a list for each": keeps_all,
    "a logger": tells,
    "a histogram": keeps_histogram,
    "a lambda": lambda grad: lists["lambda"].append(grad.norm()),
    "a lambda of nothing": lambda grad: None,
    "an object": recorder,
    "a method": recorder.__call__,
    "a partial": functools.partial(tells, name="other"),
    "print": lambda grad: print(grad.shape),
    "without gradients": torch.no_grad()(keeps_norm),
}


def on_parameter(hook: Any) -> nn.Module:
    model = Model()
    model.layers[0].weight.register_hook(hook)
    return model


@pytest.fixture(autouse=True)
def nothing_recorded() -> Iterator[None]:
    """No hook is called by a plan, nor by its verification."""
    yield
    assert not norms and steps == 0 and recorder.count == 0 and not recorder.norms
    assert not any(lists.values())


def mesh(**given: int) -> Constraints:
    return Constraints(**{"pp": 1, "dp": 1, "tp": 1, **given})


@pytest.mark.parametrize("way", LOOKING)
def test_what_only_looks(way: str):
    assert describe_hook_effect(LOOKING[way], (GIVEN,)) is None


def test_hooks_on_a_parameter_that_only_look_are_left_out():
    model = Model()
    for hook in LOOKING.values():
        model.layers[0].weight.register_hook(hook)
    plan = partition(model, Topology.local(1), INPUTS)
    notes = [n for n in plan.notes if "of the parameter 'layers.0.weight' only observes gradients" in n]
    assert all("test_hooks.py:" in n and "the plan does not call it" in n for n in notes)
    assert any("keeps_norm" in n for n in notes) and any("<lambda>" in n for n in notes)
    assert any("Recorder.__call__" in n for n in notes)
    assert plan.verify(model, INPUTS).ok
    assert len(model.layers[0].weight._backward_hooks) == len(LOOKING)  # the model is as it was


def of_module(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
    name = module.__class__.__name__
    for place, grad in enumerate(grad_output):
        if grad is not None:
            norms[f"{name}.{place}"] = (grad.norm().item(), module.weight.norm().item())


def before_module(module: nn.Module, grad_output: Any) -> None:
    lists["before"].append([g.abs().mean() for g in grad_output])


def after_accumulation(parameter: Tensor) -> None:
    norms["after"] = parameter.grad.norm() / parameter.norm()


def all_kinds() -> nn.Module:
    model = Model()
    model.layers[0].register_full_backward_hook(of_module)
    model.layers[1].register_full_backward_pre_hook(before_module)
    model.layers[2].weight.register_post_accumulate_grad_hook(after_accumulation)
    model.register_full_backward_hook(lambda module, given, taken: print(module, taken[0].norm()))
    return model


@pytest.mark.parametrize(
    "constraints", [{"dp": 2, "microbatch_size": 1}, {"tp": 2}, {"pp": 2, "microbatch_size": 2}], ids=str
)
def test_hooks_of_all_kinds_that_only_look(constraints: dict[str, int]):
    model = all_kinds()
    plan = partition(model, Topology.local(2), INPUTS, constraints=mesh(**constraints))
    notes = [n for n in plan.notes if "only observes gradients" in n]
    assert len(notes) == 4
    assert any("of_module" in n and "of the module 'layers.0'" in n for n in notes)
    assert any("of the model" in n for n in notes)
    assert plan.verify(model, INPUTS).ok


WITHIN: dict[str, Callable[[Any, Tensor], Any]] = {
    "register_hook": lambda model, x: x.register_hook(keeps_norm),
    "a lambda": lambda model, x: x.register_hook(lambda grad: lists["within"].append(grad.norm())),
    "multi": lambda model, x: graph.register_multi_grad_hook([x], lambda grads: print(len(grads))),
    "of a module": lambda model, x: model.layers[2].register_full_backward_hook(of_module),
    "to look at the graph": lambda model, x: x.grad_fn.name(),
}


@pytest.mark.parametrize("way", WITHIN)
def test_hooks_that_forward_registers_to_look(way: str):
    model = Model(WITHIN[way])
    plan = partition(model, Topology.local(1), INPUTS)
    assert any("only observes gradients" in n for n in plan.notes) == (way != "to look at the graph")
    if way not in ("multi", "of a module"):  # the reference is the model, which registers these
        assert plan.verify(model, INPUTS).ok


# --- hooks that act ---------------------------------------------------------------------------------------------------


def clips_large(grad: Tensor) -> Tensor | None:
    if grad.norm() > 1e6:
        return grad / grad.norm()
    return None


def helper(grad: Tensor) -> None:
    grad.clamp_(-1, 1)


def steps_optimizer(parameter: Tensor) -> None:
    optimizers[parameter].step()


optimizers: dict[Any, torch.optim.Optimizer] = {}
total = torch.zeros(4, 4)


def of_method(grad: Tensor) -> None:
    view = grad[0]
    view += 1


def writes_item(grad: Tensor) -> None:
    grad[0] = 0


def writes_out(grad: Tensor) -> None:
    torch.mul(grad, 2, out=grad)


def raises(grad: Tensor) -> None:
    if not torch.isfinite(grad).all():
        raise RuntimeError("not finite")


def hands_on(grad: Tensor) -> None:
    helper(grad)


def reduces(grad: Tensor) -> None:
    torch.distributed.all_reduce(grad)


def adds_up(grad: Tensor) -> None:
    global total
    total += grad


def unknown(grad: Tensor) -> None:
    find("sink")(grad)


def find(name: str) -> Any:
    return {"sink": helper}[name]


def evaluated() -> Any:
    made: dict[str, Any] = {}
    exec("def hook(grad): pass", made)
    return made["hook"]


def rates(grad: Tensor) -> None:
    optimizers["all"].param_groups[0]["lr"] = 0.1


def mapped(grad: Tensor) -> None:
    sorted(grad, key=lambda row: row.mul_(2).sum())


def through_numpy(grad: Tensor) -> None:
    np.multiply(grad.numpy(), 2, grad.numpy())


def hidden(grad: Tensor) -> None:
    globals()["helper"](grad)


def deletes(parameter: Tensor) -> None:
    del parameter.grad


def backwards(grad: Tensor) -> None:
    grad.sum().backward()


optimizers["all"] = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
ACTING: dict[str, tuple[Callable[..., Any], str]] = {
    "scaled": (lambda grad: 2 * grad, "returns a value"),
    "clipped where large": (clips_large, "returns a value"),
    "in place": (lambda grad: grad.zero_(), "zero_"),
    "of a view": (of_method, "changes view in place"),
    "an element": (writes_item, r"writes to grad\[0\]"),
    "out": (writes_out, "out="),
    "an error": (raises, "may raise an error"),
    "by a function": (hands_on, "clamp_"),
    "reduced": (reduces, "all_reduce"),
    "summed up": (adds_up, "changes total in place"),
    "an unknown function": (unknown, "cannot be read"),
    "clip_grad_norm_": (lambda grad: torch.nn.utils.clip_grad_value_([grad], 1.0), "clip_grad_value_"),
    "a learning rate": (rates, "writes to optimizers"),
    "mapped": (mapped, "mul_"),
    "numpy": (through_numpy, "multiply"),
    "hidden": (hidden, "globals"),
    "deleted": (deletes, "writes to parameter.grad"),
    "a further gradient": (backwards, "backward"),
    "without gradients": (torch.no_grad()(clips_large), "returns a value"),
    "without source": (evaluated(), "no source"),
}


@pytest.mark.parametrize("way", ACTING)
def test_a_hook_on_a_parameter_that_acts_is_refused(way: str):
    hook, reason = ACTING[way]
    with pytest.raises(UnsupportedError, match=rf"(?s)parameter 'layers.0.weight' has a hook.*; it .*{reason}"):
        partition(on_parameter(hook), Topology.local(1), INPUTS)


def of_a_module() -> nn.Module:
    model = Model()
    model.layers[1].register_full_backward_hook(lambda module, given, taken: given)
    return model


def before_a_module() -> nn.Module:
    model = Model()
    model.layers[1].register_full_backward_pre_hook(lambda module, taken: (2 * taken[0],))
    return model


def that_trains() -> nn.Module:
    model = Model()
    weight = model.layers[0].weight
    optimizers[weight] = torch.optim.SGD([weight], 0.1)
    weight.register_post_accumulate_grad_hook(steps_optimizer)
    return model


def that_scales_a_buffer() -> nn.Module:
    model = Model()

    def hook(module: nn.Module, given: Any, taken: Any) -> None:
        model.seen.add_(taken[0].norm())

    model.layers[1].register_full_backward_hook(hook)
    return model


def that_counts_in_a_module() -> nn.Module:
    def hook(module: Any, given: Any, taken: Any) -> None:
        module.calls = module.calls + 1

    model = Model()
    model.layers[1].register_full_backward_hook(hook)
    return model


WAYS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "of a module": (of_a_module, rf"the module 'layers.1' has a backward hook.*<lambda> \(.*{HERE}\); it returns"),
    "before a module": (before_a_module, rf"the module 'layers.1' has a backward hook.*{HERE}"),
    "an optimizer": (that_trains, r"the parameter 'layers.0.weight' has a hook.*steps_optimizer .*; it calls step"),
    "a buffer": (that_scales_a_buffer, r"the module 'layers.1'.*; it "),
    "a module's counter": (that_counts_in_a_module, r"the module 'layers.1'.*; it writes to module.calls"),
    "in forward": (
        lambda: Model(lambda model, x: x.register_hook(lambda grad: 2 * grad)),
        rf"forward gives a tensor a hook on its gradient at .*{HERE}",
    ),
    "of the graph": (
        lambda: Model(lambda model, x: x.grad_fn.register_hook(lambda given, taken: None)),
        rf"forward gives grad_fn a hook at .*{HERE}",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_hooks_on_gradients_that_act_are_refused(way: str):
    make, message = WAYS[way]
    with pytest.raises(UnsupportedError, match=f"(?s){message}"):
        partition(make(), Topology.local(2), INPUTS)


def test_without_training_hooks_do_nothing():
    model = on_parameter(lambda grad: grad * 0)
    assert partition(model, Topology.local(1), INPUTS, objective="infer").verify(model, INPUTS).ok
    model = of_a_module()
    assert partition(model, Topology.local(1), INPUTS, objective="infer").verify(model, INPUTS).ok


# --- hooks on forward -------------------------------------------------------------------------------------------------


def doubles(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output + module.weight.mean()


def shifts(module: nn.Module, args: Any) -> Any:
    return (args[0] + 1,)


def doubles_and_keeps(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    lists["activations"].append(output)
    norms["last"] = output
    return 2 * output


def doubles_and_tells(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    recorder.norms.append(output)  # type: ignore[arg-type]
    recorder.count += 1
    return 2 * output


def keeps(module: nn.Module, args: Any, output: Tensor) -> None:
    lists["activations"].append(output.detach())


def measures(module: nn.Module, args: Any, output: Tensor) -> None:
    norms[module.__class__.__name__] = output.abs().mean().item()


def forward_hooked(hook: Any, *, before: bool = False, **options: Any) -> nn.Module:
    model = Model()
    for layer in model.layers[:2]:
        (layer.register_forward_pre_hook if before else layer.register_forward_hook)(hook, **options)
    return model


FORWARD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "changes": (lambda: forward_hooked(doubles), ""),
    "changes before": (lambda: forward_hooked(shifts, before=True), ""),
    "changes, with names": (
        lambda: forward_hooked(lambda module, args, named, output: output * 3, with_kwargs=True), ""
    ),
    "changes and keeps": (lambda: forward_hooked(doubles_and_keeps), "stores values outside of the model"),
    "changes and tells": (lambda: forward_hooked(doubles_and_tells), "stores values outside of the model"),
    "keeps": (lambda: forward_hooked(keeps), "only observes the results of forward"),
    "measures": (lambda: forward_hooked(measures), "only observes the results of forward"),
    "looks before": (
        lambda: forward_hooked(lambda module, args: print(args[0].shape), before=True),
        "only observes the results of forward",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", FORWARD)
def test_hooks_on_forward(way: str):
    make, said = FORWARD[way]
    model = make()
    plan = partition(model, Topology.local(2), INPUTS, constraints=mesh(dp=2, microbatch_size=1))
    assert [n for n in plan.notes if "hook" in n and said in n] if said else not plan.notes
    assert plan.verify(model, INPUTS).ok


def test_hooks_on_the_forward_of_all_modules(request: pytest.FixtureRequest):
    handle = modules.register_module_forward_hook(measures)
    request.addfinalizer(handle.remove)
    model = Model()
    plan = partition(model, Topology.local(1), INPUTS)
    assert any("of all modules only observes the results of forward" in n for n in plan.notes)
    assert plan.verify(model, INPUTS).ok
    handle.remove()
    handle = modules.register_module_full_backward_hook(of_module)
    request.addfinalizer(handle.remove)
    plan = partition(model, Topology.local(1), INPUTS)
    assert any("of all modules only observes gradients" in n for n in plan.notes)
    assert plan.verify(model, INPUTS).ok


@pytest.mark.parametrize(
    ("register", "hook"),
    [
        (modules.register_module_forward_hook, lambda module, args, output: output * 2),
        (modules.register_module_forward_pre_hook, lambda module, args: args),
        (modules.register_module_full_backward_hook, lambda module, given, taken: given),
        (modules.register_module_full_backward_pre_hook, lambda module, taken: taken),
    ],
)
def test_hooks_of_all_modules_that_act_are_refused(register: Any, hook: Any, request: pytest.FixtureRequest):
    request.addfinalizer(register(hook).remove)
    with pytest.raises(UnsupportedError, match=rf"hook of all modules .* is set.*{HERE}"):
        partition(Model(), Topology.local(1), INPUTS)


# --- what is saved for backward ---------------------------------------------------------------------------------------


class Saving(Model):
    def __init__(self, saved: Callable[[], Any]) -> None:
        super().__init__()
        self.saved = saved

    def forward(self, x: Tensor) -> Tensor:
        with self.saved():
            return super().forward(x)


def test_what_is_saved_on_the_cpu_is_kept_where_it_is():
    model = Saving(graph.save_on_cpu)
    plan = partition(model, Topology.local(1), INPUTS)
    assert any("moves to host memory" in n for n in plan.notes)
    assert plan.verify(model, INPUTS).ok


def test_hooks_on_what_is_saved_are_refused():
    model = Saving(lambda: graph.saved_tensors_hooks(lambda x: x.half(), lambda x: x.float()))
    with pytest.raises(UnsupportedError, match=rf"changes tensors that are saved for backward .*{HERE}"):
        partition(model, Topology.local(1), INPUTS)


def test_the_reference_keeps_hooks_that_act():
    plain, hooked = Model(), of_a_module()
    hooked.load_state_dict(plain.state_dict())
    hooked.layers[1].register_full_backward_hook(lambda module, given, taken: (given[0] * 0,))
    assert float(run_reference(hooked, INPUTS).grads["layers.0.weight"].abs().max()) == 0.0
    assert float(run_reference(plain, INPUTS).grads["layers.0.weight"].abs().max()) > 0.0
