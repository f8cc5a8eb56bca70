"""One rank of a distributed model: its weights, its gradients and its results, as plain tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from partitioner.check.plain_run import ModuleTrace, WithoutDropout
from partitioner.check.setup import CheckSetupError, Setup, StepResult, load_setup, loss_of, run_model, seed_generators
from partitioner.passes.errors import UserCodeError
from partitioner.runtime.engine.batches import flatten_by_path


@dataclass(frozen=True)
class RankShard:
    """The elements of one parameter of a distributed model that one rank holds.

    Attributes:
        name: name in the distributed model.
        weight: values of the elements before the step; ``None`` for a gradient that the user's step returned by name.
        gradient: gradient of the elements; ``None`` if there is none.
        of: for a gradient that the user's step returned by name, the parameter's name in the plain model (the user's
            model on one process); else ``None``.
    """

    name: str
    weight: Tensor | None
    gradient: Tensor | None
    of: str | None = None


@dataclass(frozen=True)
class RankOutcome:
    """What one rank of a distributed model computed in one step.

    Attributes:
        rank: its number.
        digest: hash of the weights and inputs that the user's function made on this rank.
        loss: the loss that the step returned, or ``None``.
        outputs: path in the model's result -> tensor.
        shards: the elements of each parameter that this rank holds, with their gradients.
        modules: module name -> its output at each call, if they were recorded.
        module_gradients: module name -> gradient of its output at each call, if they were recorded.
    """

    rank: int
    digest: str
    loss: Tensor | None
    outputs: dict[str, Tensor]
    shards: list[RankShard]
    modules: dict[str, list[Tensor]]
    module_gradients: dict[str, list[Tensor]]


def run_rank(target: str, dropout: bool = False, trace: bool = False) -> RankOutcome:
    """Distribute the user's model on this rank, run one step, and return what this rank computed.

    ``target``: the function that returns the model and says how it is distributed, as ``FILE.py:FUNCTION``.
    ``dropout``: whether dropout is active. ``trace``: whether to record the outputs of all modules.
    """
    setup, digest = load_setup(target)
    seed_generators(0)
    with _unwrapped_groups_for_ddp():
        distributed = _call_users(setup.distribute, setup.plain)
    modules = [m for m in pytree.tree_leaves(distributed, is_leaf=_is_module) if _is_module(m)]
    traced = ModuleTrace(modules if trace else [])
    before = [{name: _local_part(p).clone() for name, p in m.named_parameters()} for m in modules]
    if dropout:
        result = _run_step(setup, distributed, modules)
    else:
        with WithoutDropout():
            result = _run_step(setup, distributed, modules)
    traced.close()
    shards = [s for m, weights in zip(modules, before, strict=True) for s in _read_shards(m, weights)]
    given = {} if result.gradients is None else result.gradients
    shards += [RankShard(name, None, _whole_tensor(g), of=name) for name, g in given.items() if g is not None]
    if not shards:
        raise CheckSetupError(
            "distribute() returned no module with parameters, and step() no gradients; expected a module, a tuple or "
            "dict that contains it, or StepResult(gradients={name: tensor})"
        )
    outputs = {} if result.outputs is None else flatten_by_path(result.outputs)
    return RankOutcome(
        rank=dist.get_rank(),
        digest=digest,
        loss=None if result.loss is None else torch.as_tensor(_whole_tensor(result.loss)).detach().double().reshape(()),
        outputs={p: _whole_tensor(x).detach().clone() for p, x in outputs.items() if isinstance(x, Tensor)},
        shards=shards,
        modules=traced.outputs,
        module_gradients=traced.gradients,
    )


@contextmanager
def _unwrapped_groups_for_ddp() -> Iterator[None]:
    """Return a context manager within which ``DistributedDataParallel`` uses a process group whose collectives are not
    verified.

    torch 2.13 ends the process by a segmentation fault if ``DistributedDataParallel`` is created on a Gloo group under
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL``: its logger takes the verifying group for another class.
    """
    make = nn.parallel.DistributedDataParallel.__init__

    @functools.wraps(make)
    def make_on_plain_group(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("process_group") is None and kwargs.get("device_mesh") is None and len(args) < 6:
            level = dist.get_debug_level()  # type: ignore[attr-defined]
            dist.set_debug_level(dist.DebugLevel.OFF)  # type: ignore[attr-defined]
            try:
                kwargs["process_group"] = dist.new_group()
            finally:
                dist.set_debug_level(level)  # type: ignore[attr-defined]
        make(self, *args, **kwargs)

    with mock.patch.object(nn.parallel.DistributedDataParallel, "__init__", make_on_plain_group):
        yield


def _run_step(setup: Setup, distributed: Any, modules: list[nn.Module]) -> StepResult:
    """Run one training step on this rank, and return its results. The step is the user's ``setup.step`` or, without
    one, forward and backward of the only module on the whole batch. ``distributed``: the value that
    ``setup.distribute`` returned. ``modules``: the modules in it.
    """
    if setup.step is None:
        if len(modules) != 1:
            raise CheckSetupError(
                f"distribute() returned {len(modules)} modules; expected one, or step=... that runs them"
            )
        output = run_model(modules[0], setup.inputs)
        loss = loss_of(output, setup.loss)
        loss.backward()
        return StepResult(loss, output if setup.loss is not None else None)
    made = _call_users(setup.step, distributed, setup.inputs)
    if isinstance(made, StepResult):
        return made
    if isinstance(made, tuple):
        if len(made) != 2:
            raise CheckSetupError(f"step() returned {len(made)} values; expected the loss, or (loss, outputs)")
        return StepResult(*made)
    return StepResult(made)


def _call_users(function: Any, *arguments: Any) -> Any:
    """Return ``function(*arguments)``, a call of the user's code. Convert exceptions of programming errors, such as
    ``TypeError``, to :class:`UserCodeError`; others, such as lost connections, are raised unchanged."""
    try:
        return function(*arguments)
    except (TypeError, AttributeError, KeyError, IndexError, AssertionError, NotImplementedError) as error:
        name = getattr(function, "__name__", str(function))
        raise UserCodeError(f"{name}() failed with {type(error).__name__}: {error}") from error


def _read_shards(module: nn.Module, weights: Mapping[str, Tensor]) -> list[RankShard]:
    """Return the elements that this rank holds of each parameter of ``module``, with their gradients. ``weights``: name
    -> values of these elements before the step; parameters that are not in it are left out. Raise
    :class:`CheckSetupError` if a gradient has another shape than its parameter."""
    found = []
    for name, parameter in module.named_parameters():
        if name not in weights:
            continue
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
                gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
            gradient = _local_part(gradient)
        weight = weights[name]
        if gradient is not None and gradient.shape != weight.shape:
            raise CheckSetupError(
                f"the gradient of {name} has the shape {list(gradient.shape)} and the parameter {list(weight.shape)}; "
                "expected equal shapes, or StepResult(gradients={name: tensor})"
            )
        needed = parameter.requires_grad
        found.append(RankShard(name, weight, gradient.detach().clone() if needed and gradient is not None else None))
    return found


def _local_part(tensor: Tensor) -> Tensor:
    """Return the elements of ``tensor`` that this rank holds: its shard of a ``DTensor``, all of another tensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _whole_tensor(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)
