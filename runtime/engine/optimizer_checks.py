"""Check an engine's optimizers before their first step: a shard must be updated like the same part of a whole
parameter.

If the plan shards a parameter, the optimizer of a rank sees only a part of it. An optimizer that updates each element
independently updates the part correctly. Other optimizers compute a wrong update, without raising an error. A trial
(``runtime/engine/optimizer_trials.py``) distinguishes the two kinds, for the ways in which the plan shards parameters.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.passes.ir.layouts import Layout
from partitioner.passes.ir.serialize import dtype_of
from partitioner.runtime.engine.optimizer_trials import (
    ParameterCut,
    Sample,
    StepCall,
    TrialFinding,
    find_optimizer_class,
    try_on_parts,
)
from partitioner.runtime.errors import OptimizerError
from partitioner.runtime.program.program import Program, RankProgram, list_shards
from partitioner.runtime.state.disk_offload import step_hook

Optimizer = torch.optim.Optimizer

_Seen = tuple[int, ...]  # number of parameters in each group of an optimizer


class OptimizerCheck:
    """Checks optimizers before they step. The parameters of one rank are shards of the model's parameters; an optimizer
    must update them like the same parts of whole parameters. ``parameters``: name -> this rank's shard. ``more``:
    further tensors that the engine gives to optimizers, such as an empty one on ranks without parameters.
    """

    def __init__(self, rank: RankProgram, parameters: Mapping[str, nn.Parameter], more: Sequence[nn.Parameter]) -> None:
        self.rank = rank
        self.parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._own = self._names.keys() | {id(parameter) for parameter in more}
        self._checked: weakref.WeakKeyDictionary[Optimizer, _Seen] = weakref.WeakKeyDictionary()
        self._trusted: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def attach(self, engine: object) -> None:
        """Install a hook on the ``step`` of all torch optimizers. Before an optimizer steps a parameter of this rank,
        the hook checks that it updates shards like the same parts of whole parameters. The hook is active as long as
        ``engine`` exists.
        """
        if self.rank.program.objective == "train":
            step_hook.add(engine, self.before_step)

    def trust(self, optimizer: Optimizer) -> None:
        self._trusted.add(optimizer)

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check ``optimizer`` before its first step, and again after parameters were added to it. Raise
        :class:`OptimizerError` if it updates the part of a parameter that a rank holds differently from the same part
        of the whole parameter. ``args``, ``kwargs``: the arguments of the call of ``optimizer.step``; the first of
        ``args`` is the optimizer.
        """
        seen = tuple(len(group["params"]) for group in optimizer.param_groups)
        if self._checked.get(optimizer) == seen:
            return
        if self._steps_rank_parameters(optimizer):
            self.check(optimizer, _record_step_call(args, kwargs))
            for outer in _find_enclosing_optimizers(optimizer):  # which may have changed gradients or parameters itself
                if self._steps_rank_parameters(outer):
                    self.check(outer, StepCall())
        self._checked[optimizer] = seen

    def check(self, optimizer: Optimizer, call: StepCall) -> None:
        """Try copies of ``optimizer`` on small tensors with random values, which represent its parameters. One copy
        updates the whole tensors, others update parts of them, cut as the plan shards the parameters. Raise
        :class:`OptimizerError` if the updates differ. ``call``: how the script calls ``step``.
        """
        if optimizer in self._trusted:
            return
        samples = self._sample_cuts(optimizer)
        stages = self._is_training_on_several_stages()
        if not samples or not (stages or any(not s.cut.is_whole for s in samples)):
            return
        found = try_on_parts(optimizer, samples, stages, call)
        if found is not None:
            raise OptimizerError(self._explain_refusal(optimizer, found))

    def _steps_rank_parameters(self, optimizer: Optimizer) -> bool:
        return any(id(p) in self._own for group in getattr(optimizer, "param_groups", ()) for p in group["params"])

    def _is_training_on_several_stages(self) -> bool:
        """Return whether trained parameters are on several pipeline stages, so that no rank has all of them."""
        trained = [s.stages for s in self.rank.program.states.values() if s.requires_grad and s.kind == "parameter"]
        return len({stage for stages in trained for stage in stages}) > 1

    def _sample_cuts(self, optimizer: Optimizer) -> list[Sample]:
        """Return descriptions of small tensors on which ``optimizer`` is tried in place of its parameters. One small
        tensor represents all parameters that are sharded in the same way, have equally many dims, and belong to
        parameter groups with the same kind of options. Its description is made from the largest of these parameters.
        """
        found: dict[tuple[Any, int, ParameterCut], tuple[int, Sample]] = {}
        first_of: dict[Any, int] = {}
        for index, names in enumerate(self._list_names_by_group(optimizer)):
            options = _build_options_key(optimizer.param_groups[index])
            group = first_of.setdefault(options, index)
            for name in names:
                sample = self._make_sample(name, group)
                key, numel = (options, len(sample.shape), sample.cut), torch.Size(sample.shape).numel()
                if numel and (key not in found or numel > found[key][0]):
                    found[key] = numel, sample
        return [sample for _, sample in found.values()]

    def _make_sample(self, name: str, group: int) -> Sample:
        """Return the description of a small tensor on which an optimizer is tried in place of the parameter called
        ``name``. ``group``: index of the optimizer's parameter group for the small tensor.
        """
        data, held = self.rank.program.states[name], self.parameters.get(name)
        some = held if held is not None else next(iter(self.parameters.values()), None)
        device = torch.device("cpu") if some is None else some.device
        dtype = dtype_of(data.dtype) if held is None else held.dtype
        return Sample(name, group, tuple(data.shape), find_parameter_cut(self.rank.program, name), dtype, device)

    def _list_names_by_group(self, optimizer: Optimizer) -> list[list[str]]:
        """Return, for each parameter group of ``optimizer``, the names of its trained parameters, including those of
        other pipeline stages.

        A parameter of another stage is assigned to the group of a parameter on this rank whose name differs only in
        numbers, such as ``layers.0.weight`` for ``layers.7.weight``. If the optimizer has a single group, with all of
        this rank's parameters, all other parameters are assigned to it.
        """
        groups = [
            [self._names[id(p)] for p in group["params"] if id(p) in self._names and p.requires_grad]
            for group in optimizer.param_groups
        ]
        owner = {_mask_numbers(name): index for index, names in enumerate(groups) for name in names}
        has_all = len(groups) == 1 and all(
            not p.requires_grad or any(name in names for names in groups) for name, p in self.parameters.items()
        )
        for name, data in self.rank.program.states.items():
            if data.kind == "parameter" and data.requires_grad and name not in self.parameters:
                index = owner.get(_mask_numbers(name), 0 if has_all else None)
                if index is not None:
                    groups[index].append(name)
        return groups

    def _explain_refusal(self, optimizer: Optimizer, found: TrialFinding) -> str:
        """Return the error text for the problem ``found`` of ``optimizer``: what the optimizer would do wrong with
        sharded parameters, and what the user can do instead.
        """
        sample, held = found.sample, self.parameters.get(found.sample.name)
        if found.unit == "stages":
            where = f"on each rank only the parameters of one pipeline stage (pp={self.rank.program.size('pp')})"
            whole = "all of them"
        else:
            here = "another rank has" if held is None else f"this rank has {list(held.shape)} of it"
            where = f"parts of parameters: {sample.name}, of shape {list(sample.shape)}, is {sample.cut}, and {here}"
            whole = "the whole"
        part = "some of them" if found.unit == "stages" else "a part"
        why = {
            "untried": f"whether its updates are those of {whole} could not be tried: {found.why}",
            "fails": f"in a trial it failed on {part}, and not on {whole}: {found.why}",
            "differs": f"in a trial its updates of {part} differ from those of {whole} {found.why}",
        }[found.kind]
        plan = self._list_uncut_constraints(found)
        return (
            f"{find_optimizer_class(optimizer).__name__} would step {where}; {why}. Expected an optimizer "
            "that updates each element from that element, its gradient and its state (SGD, Adam, AdamW, "
            f"Lion, RMSprop): use one of these{f', or plan with Constraints({plan})' if plan else ''}; if "
            f"{'it does so' if found.kind == 'untried' else 'this is intended'}, call "
            "engine.trust_optimizer(optimizer) before its first step"
        )

    def _list_uncut_constraints(self, found: TrialFinding) -> str:
        """Return constraints, such as ``tp=1, zero=0``, under which a plan would not shard the parameter that the
        optimizer updates wrongly. ``found``: the problem and the parameter.
        """
        program, data = self.rank.program, self.rank.program.states[found.sample.name]
        if found.unit == "stages":
            return "pp=1"
        cuts = (("ep", data.expert_layout), ("tp", data.layout))
        axes = [f"{axis}=1" for axis, text in cuts if Layout.parse(text).is_shard and program.size(axis) > 1]
        return ", ".join([*axes, *(["zero=0"] if data.zero_axes else [])])


def find_parameter_cut(program: Program, name: str) -> ParameterCut:
    """Return how the plan shards the parameter called ``name``: along which dims, and whether by ZeRO. The result is
    equal on all ranks. ``program``: the program of all ranks.
    """
    data = program.states[name]
    dims = {shard.layout.dim for shard in list_shards(program, name, 0)}
    return ParameterCut(tuple(sorted(dims)), bool(data.zero_axes), bool(data.parts))


def _mask_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _build_options_key(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a key that is equal for parameter groups whose options are of the same kind, so that an optimizer is tried
    once for all of them. Options are of the same kind if they are equal. Two numbers count as equal if both are zero or
    both are nonzero; learning rates and tensors are ignored. ``group``: a parameter group of a torch optimizer
    (``params`` and options by name).
    """
    kinds = []
    for name, value in sorted(group.items()):
        if name == "params" or isinstance(value, Tensor):
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        rate = name in ("lr", "initial_lr")
        kinds.append((name, None if rate else bool(value) if is_number else repr(value)[:200]))
    return tuple(kinds)


def _record_step_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StepCall:
    """Return a record of how an optimizer's ``step`` was called, so that a copy of the optimizer can be stepped in the
    same way. ``args``, ``kwargs``: the arguments of the call; the first of ``args`` is the optimizer.
    """
    given, named = [*args[1:]], dict(kwargs)
    closure = (bool(given) and callable(given[0])) or callable(named.get("closure"))
    named.pop("closure", None)
    return StepCall(tuple(given[1:]), named, closure)


def _find_enclosing_optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizers whose methods are on the current call stack, such as one that wraps ``optimizer``, except
    ``optimizer`` itself.
    """
    frame, seen = sys._getframe(2), {id(optimizer)}
    while frame is not None:
        first = frame.f_code.co_varnames[:1] if frame.f_code.co_argcount else ()
        owner = frame.f_locals.get(first[0]) if first else None
        if isinstance(owner, Optimizer) and id(owner) not in seen:
            seen.add(id(owner))
            yield owner
        frame = frame.f_back  # type: ignore[assignment]
