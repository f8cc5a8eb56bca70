"""An optimizer's hyperparameters in a checkpoint: by parameter, since groups are others on other ranks.

A rank's optimizer has the parameters of its stage. Where groups go by layer, the first group of one rank is not that of
another, and under another plan not that of the same rank; what belongs together is told by the parameters' names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtime.checkpoint.plain import alike
from runtime.errors import CheckpointError
from runtime.parts import model_names
from runtime.program import Program

_PLAIN = (bool, int, float, str, type(None), list, tuple, Tensor)


def described(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], program: Program
) -> dict[str, Any]:
    """What kind of optimizer it is, and of each group the hyperparameters and the model's names of its parameters."""
    return {
        "kind": type(optimizer).__name__,
        "defaults": sorted(optimizer.defaults),
        "groups": [
            {"names": names, "values": {k: v for k, v in group.items() if k != "params" and isinstance(v, _PLAIN)}}
            for group, names in zip(optimizer.param_groups, _names(optimizer, parameters, program), strict=True)
        ],
    }


def joined(of_ranks: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """What all ranks have described, as one; ``None`` where no rank has an optimizer."""
    described = [d for d in of_ranks if d is not None]
    if not described:
        return None
    groups = {tuple(g["names"]): g for d in reversed(described) for g in reversed(d["groups"])}
    return {**described[0], "groups": list(reversed(groups.values()))}


def check_kind(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise :class:`CheckpointError` where the state of the saved optimizer is no state of this one.

    Optimizers of other names are taken for the same kind where they have the same hyperparameters: Adam and AdamW.
    """
    kind = type(optimizer).__name__
    if kind != saved["kind"] and sorted(optimizer.defaults) != saved["defaults"]:
        raise CheckpointError(
            f"the checkpoint has the state of {saved['kind']}, which {kind} cannot go on with: make the optimizer as "
            "it was, or load without one, so that the new one starts afresh"
        )


def given_back(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    program: Program,
    saved: Mapping[str, Any],
) -> list[Mapping[str, Any]]:
    """The saved hyperparameters of each group of ``optimizer``; of one whose parameters none were saved, its own.

    Raises :class:`CheckpointError` where its groups are not those that were saved.
    """
    owner = {name: number for number, group in enumerate(saved["groups"]) for name in group["names"]}
    went_to: dict[int, int] = {}
    result: list[Mapping[str, Any]] = []
    for index, names in enumerate(_names(optimizer, parameters, program)):
        numbers = sorted({owner[n] for n in names if n in owner})
        for number in numbers:
            other = went_to.setdefault(number, index)
            if other != index:
                raise CheckpointError(
                    f"the optimizer's groups are not those of the checkpoint: one of them has been split into groups "
                    f"{other} and {index}; make the groups as they were saved"
                )
        found = [saved["groups"][number]["values"] for number in numbers]
        for values in found[1:]:
            for key in found[0]:
                if not alike(found[0][key], values.get(key)):
                    raise CheckpointError(
                        f"the optimizer's groups are not those of the checkpoint: group {index} has parameters saved "
                        f"with {key}={found[0][key]} and with {key}={values.get(key)}; make the groups as they were "
                        "saved"
                    )
        result.append(found[0] if found else {})
    return result


def by_place(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]] | None
) -> Sequence[Mapping[str, Any]]:
    """The hyperparameters of each group where they were saved without names; nothing where none were."""
    if groups is None:
        return [{}] * len(optimizer.param_groups)
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(groups)} parameter groups, this one has "
            f"{len(optimizer.param_groups)}: make it as the one that was saved, with its groups in the same order"
        )
    return groups


def take(optimizer: torch.optim.Optimizer, values: Sequence[Mapping[str, Any]]) -> None:
    """Set the hyperparameters of each group."""
    for group, saved in zip(optimizer.param_groups, values, strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), Tensor):
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = value


def _names(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], program: Program
) -> list[list[str]]:
    """The model's names of each group's parameters."""
    names = {id(p): model_names(name, program.states[name]) for name, p in parameters.items()}
    return [[n for p in group["params"] for n in names.get(id(p), ())] for group in optimizer.param_groups]
