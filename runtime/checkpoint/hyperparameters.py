"""Save and restore optimizer hyperparameters, such as learning rates, by the names of the parameters.

A rank's optimizer has only the parameters of the rank's pipeline stage. If parameter groups are formed by layer, the
first group of one rank differs from that of another rank, and from that of the same rank under another plan. Groups are
therefore matched by their parameters' names instead of their positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.runtime.checkpoint.training_state import Optimizers, is_equal_data, list_optimizers
from partitioner.runtime.errors import CheckpointError
from partitioner.runtime.program.program import Program
from partitioner.runtime.state.parameters import list_model_names

_PLAIN = (bool, int, float, str, type(None), list, tuple, Tensor)


def describe_optimizers(
    given: Optimizers, parameters: Mapping[str, nn.Parameter], program: Program
) -> list[dict[str, Any] | None] | None:
    """Return a description of each optimizer of this rank for a checkpoint, without its state: a dict with its class
    name, the names of its hyperparameters, such as ``lr``, and its parameter groups with the values of the
    hyperparameters. An item is ``None`` if this rank does not have the optimizer. The result is ``None`` if there are
    no optimizers.

    ``given``: one optimizer, a list of optimizers, or ``None``. ``parameters``: name in the program -> parameter of
    this rank. ``program``: the program, which has the parameters' names in the model; the groups contain these names.
    """
    optimizers = list_optimizers(given)
    return (
        [None if o is None else _describe_optimizer(o, parameters, program) for o in optimizers] if optimizers else None
    )


def _describe_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], program: Program
) -> dict[str, Any]:
    """Return a dict of plain data: the class name of ``optimizer`` (``kind``), the names of its hyperparameters
    (``defaults``), and its parameter ``groups``. A group has ``names`` of parameters in the model and ``values`` of
    hyperparameters. ``parameters``: name in ``program`` -> parameter of this rank. ``program``: the program, which has
    the parameters' names in the model.
    """
    return {
        "kind": type(optimizer).__name__,
        "defaults": sorted(optimizer.defaults),
        "groups": [
            {"names": names, "values": {k: v for k, v in group.items() if k != "params" and isinstance(v, _PLAIN)}}
            for group, names in zip(
                optimizer.param_groups, _name_group_parameters(optimizer, parameters, program), strict=True
            )
        ],
    }


def merge_rank_descriptions(rank_descriptions: Sequence[Sequence[Mapping[str, Any] | None] | None]) -> Any:
    """Combine the descriptions of optimizers of all ranks, as returned by :func:`describe_optimizers`. The result is
    ``None`` if no rank has an optimizer, one description for one optimizer, and a list of descriptions for several.

    ``rank_descriptions``: for each rank, its list of descriptions (one for each optimizer) or ``None``. A description
    is a dict with the optimizer's class name (``kind``), the names of its hyperparameters (``defaults``), and its
    parameter ``groups``, each a dict with the ``names`` of the parameters and the ``values`` of hyperparameters. Raise
    :class:`CheckpointError` if ranks have different numbers of optimizers.
    """
    found = [d for d in rank_descriptions if d is not None]
    if len({len(d) for d in found}) > 1:
        raise CheckpointError(
            f"ranks have {' and '.join(sorted({str(len(d)) for d in found}))} optimizers: expected the same number on "
            "each rank, in the same order, with None on a rank that has no parameters for an optimizer"
        )
    several = [_merge_descriptions([d for d in same if d is not None]) for same in zip(*found, strict=True)]
    return several if len(several) > 1 else (several or [None])[0]


def _merge_descriptions(descriptions: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Merge the descriptions of one optimizer into one, which has the parameter groups of all ranks; ``None`` if no
    rank has the optimizer. ``descriptions``: for each rank that has the optimizer, a dict with its class name
    (``kind``), the names of its hyperparameters (``defaults``) and its parameter ``groups``.
    """
    if not descriptions:
        return None
    groups = {tuple(g["names"]): g for d in reversed(descriptions) for g in reversed(d["groups"])}
    return {**descriptions[0], "groups": list(reversed(groups.values()))}


def match_by_names(
    given: Optimizers, parameters: Mapping[str, nn.Parameter], program: Program, saved: Any
) -> list[list[Mapping[str, Any]]]:
    """Return the saved hyperparameters of each parameter group of each optimizer, matched by parameter names, as a list
    over optimizers of lists over groups of dicts: name -> value. If none of the parameters of a group were saved, its
    dict is empty.

    ``given``: one optimizer, a list of optimizers, or ``None``. ``parameters``: name in ``program`` -> parameter of
    this rank. ``program``: the program, which has the parameters' names in the model. ``saved``: a result of
    :func:`merge_rank_descriptions`: for each optimizer, a dict with its class name and its parameter groups. Raise
    :class:`CheckpointError` if the number, the order or the classes of the optimizers, or their groups, differ from the
    saved ones.
    """
    optimizers, kept = list_optimizers(given), [saved] if isinstance(saved, Mapping) else list(saved)
    if len(optimizers) != len(kept):
        raise CheckpointError(
            f"the checkpoint has the state of {len(kept)} optimizers ({', '.join(_get_saved_kind(k) for k in kept)}), "
            f"{len(optimizers)} were given: create the same optimizers in the same order, or load without optimizers "
            "to start with new states"
        )
    owner = {n: number for number, k in enumerate(kept) if k is not None for g in k["groups"] for n in g["names"]}
    found: list[list[Mapping[str, Any]]] = []
    for number, (optimizer, held) in enumerate(zip(optimizers, kept, strict=True)):
        found.append([])
        if optimizer is None:
            continue
        moved = [
            n
            for names in _name_group_parameters(optimizer, parameters, program)
            for n in names
            if owner.get(n, number) != number
        ]
        if moved:
            raise CheckpointError(
                f"{moved[0]} was saved as a parameter of optimizer {owner[moved[0]]} "
                f"({_get_saved_kind(kept[owner[moved[0]]])}), and is one of optimizer {number} "
                f"({type(optimizer).__name__}) now: pass the optimizers in the same order, and with the same "
                "parameters, as when they were saved"
            )
        if held is None:
            found[-1] = [{}] * len(optimizer.param_groups)
            continue
        check_kind(optimizer, held)
        found[-1] = match_saved_groups(optimizer, parameters, program, held)
    return found


def _get_saved_kind(saved: Mapping[str, Any] | None) -> str:
    return "none" if saved is None else str(saved["kind"])


def check_kind(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise :class:`CheckpointError` if the class of ``optimizer`` differs from the saved optimizer's, so that the
    saved state cannot be loaded. Different classes with the same hyperparameters, such as Adam and AdamW, are allowed.
    ``saved``: a dict with the saved optimizer's class name (``kind``) and the names of its hyperparameters
    (``defaults``).
    """
    kind = type(optimizer).__name__
    if kind != saved["kind"] and sorted(optimizer.defaults) != saved["defaults"]:
        raise CheckpointError(
            f"the checkpoint has the state of {saved['kind']}, which {kind} cannot use: create the same kind of "
            "optimizer, or load without an optimizer to start with a new state"
        )


def match_saved_groups(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    program: Program,
    saved: Mapping[str, Any],
) -> list[Mapping[str, Any]]:
    """Return the saved hyperparameters of each parameter group of ``optimizer``, one dict (name -> value) for each
    group, in the order of the groups. Groups are matched by the names of their parameters. If none of the parameters of
    a group were saved, its dict is empty.

    ``parameters``: name in ``program`` -> parameter of this rank. ``program``: the program, which has the parameters'
    names in the model. ``saved``: the saved description of one optimizer, whose ``groups`` are dicts with parameter
    ``names`` and ``values`` of hyperparameters. Raise :class:`CheckpointError` if parameters of one saved group are now
    in several groups, or if a group has parameters of saved groups with different values.
    """
    owner = {name: number for number, group in enumerate(saved["groups"]) for name in group["names"]}
    went_to: dict[int, int] = {}
    result: list[Mapping[str, Any]] = []
    for index, names in enumerate(_name_group_parameters(optimizer, parameters, program)):
        numbers = sorted({owner[n] for n in names if n in owner})
        for number in numbers:
            other = went_to.setdefault(number, index)
            if other != index:
                raise CheckpointError(
                    f"the optimizer's groups are not those of the checkpoint: one of them has been split into groups "
                    f"{other} and {index}; create the groups as they were saved"
                )
        found = [saved["groups"][number]["values"] for number in numbers]
        for values in found[1:]:
            for key in found[0]:
                if not is_equal_data(found[0][key], values.get(key)):
                    raise CheckpointError(
                        f"the optimizer's groups are not those of the checkpoint: group {index} has parameters saved "
                        f"with {key}={found[0][key]} and with {key}={values.get(key)}; create the groups as they were "
                        "saved"
                    )
        result.append(found[0] if found else {})
    return result


def match_by_position(given: Optimizers, groups: Sequence[Any] | None) -> list[list[Mapping[str, Any]]]:
    """Return the saved hyperparameters of each parameter group of each optimizer, matched by position, for checkpoints
    without parameter names. The result is a list over optimizers of lists over groups of dicts: name -> value.

    ``given``: one optimizer, a list of optimizers, or ``None``. ``groups``: for each optimizer, the saved dicts of its
    groups; if ``None``, all dicts in the result are empty. Raise :class:`CheckpointError` if the numbers of optimizers
    or groups differ.
    """
    optimizers = list_optimizers(given)
    if groups is None:
        return [[{}] * (0 if o is None else len(o.param_groups)) for o in optimizers]
    of_each = [(len(o.param_groups) if o is not None else 0, kept) for o, kept in zip(optimizers, groups, strict=False)]
    if len(optimizers) != len(groups) or any(number != len(kept or ()) for number, kept in of_each):
        saved = [len(kept or ()) for kept in groups]
        here = [0 if o is None else len(o.param_groups) for o in optimizers]
        raise CheckpointError(
            f"the optimizers in the checkpoint have {saved} parameter groups, the optimizers of this run have {here}: "
            "create them with the same groups in the same order as in the run that saved the checkpoint"
        )
    return [list(kept or ()) for kept in groups]


def set_hyperparameters(optimizers: Optimizers, values: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Set the hyperparameters of ``optimizers``: one optimizer, a list, or ``None``. ``values[i][k]`` is for group
    ``k`` of optimizer ``i``, as a dict: name of the hyperparameter -> value.
    """
    for optimizer, of_groups in zip(list_optimizers(optimizers), values, strict=True):
        for group, saved in zip([] if optimizer is None else optimizer.param_groups, of_groups, strict=True):
            for key, value in saved.items():
                if isinstance(group.get(key), Tensor):
                    group[key].copy_(torch.as_tensor(value))
                else:
                    group[key] = value


def _name_group_parameters(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], program: Program
) -> list[list[str]]:
    """Return, for each parameter group of ``optimizer``, the names of its parameters in the model. ``parameters``: name
    in ``program`` -> parameter of this rank. ``program``: the program, which has the parameters' names in the model.
    """
    names = {id(p): list_model_names(name, program.states[name]) for name, p in parameters.items()}
    return [[n for p in group["params"] for n in names.get(id(p), ())] for group in optimizer.param_groups]
