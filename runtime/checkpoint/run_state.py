"""Collect the state of a training run on one rank from its engine, and restore it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from partitioner.runtime.checkpoint import load as loading
from partitioner.runtime.checkpoint.hyperparameters import describe_optimizers
from partitioner.runtime.checkpoint.save import MODEL, CheckpointContent, Saver, Saving, list_pieces, list_saved_states
from partitioner.runtime.checkpoint.training_state import (
    RESIDUAL,
    STATE,
    Optimizers,
    OptimizerState,
    Stateful,
    collect_random_state,
    hash_reduction,
    list_residual_pieces,
    load_residuals,
    set_random_state,
)
from partitioner.runtime.comm.group import Communicator
from partitioner.runtime.errors import CheckpointError
from partitioner.runtime.execute.flight_recorder import Phase
from partitioner.runtime.program.program import Program, RankProgram
from partitioner.runtime.state.gradients import RankGradients
from partitioner.runtime.state.loss import LossScale
from partitioner.runtime.state.parameters import MasterParameters


class CheckpointedEngine(Protocol):
    """Interface of an engine for checkpoints: this rank's tensors (parameters and buffers), its counters, and how to
    save and load.
    """

    rank_program: RankProgram
    communicator: Communicator
    device: torch.device
    seed: int
    steps: int
    optimizer_steps: int
    before_runs: list[Callable[[], None]]
    _masters: MasterParameters
    _saver: Saver
    _parameters: dict[str, nn.Parameter]
    _scale: LossScale | None
    _gradients: RankGradients

    @property
    def program(self) -> Program: ...
    def save(
        self,
        directory: str | Path,
        optimizer: Optimizers = None,
        *,
        extra: Mapping[str, Stateful] | None = None,
        wait: bool = True,
        then: Callable[[Path], None] | None = None,
    ) -> Saving: ...
    def load(
        self,
        directory: str | Path,
        optimizer: Optimizers = None,
        *,
        extra: Mapping[str, Stateful] | None = None,
        verify: bool = True,
    ) -> int | None: ...
    def wait_for_save(self) -> None: ...
    def settle_saves(self) -> None: ...
    def count_optimizer_step(self) -> None: ...
    def doing(self, phase: Phase) -> AbstractContextManager[None]: ...


def collect_common_state(engine: CheckpointedEngine) -> dict[str, Any]:
    """Return the part of the training state of ``engine`` that is equal on all ranks, as a dict of plain data. Its keys
    are ``steps`` and ``optimizer_steps`` (counters), ``seed``, ``scale`` (the state of the loss scale as a dict, or
    ``None``) and ``residuals``: a hash of how the plan reduces gradients. Stored rounding errors of gradient
    compression can be restored only under a plan with the same hash.
    """
    return {
        "steps": engine.steps,
        "optimizer_steps": engine.optimizer_steps,
        "seed": engine.seed,
        "scale": None if engine._scale is None else engine._scale.state_dict(),
        "residuals": hash_reduction(engine.program),
    }


def collect_rank_state(
    engine: CheckpointedEngine, optimizer: Optimizers, extra: Mapping[str, Stateful] | None
) -> dict[str, Any]:
    """Return the part of the training state of ``engine`` that belongs to this rank, without tensors and random states,
    as a dict: ``"optimizer"`` has the hyperparameters of its optimizers, and ``"extra"`` the states of further objects.

    ``optimizer``: the optimizer of the engine's parameters, a list of several, or ``None``. ``extra``: name -> object
    with ``state_dict()``, such as a data loader. Raise :class:`CheckpointError` if an object has no ``state_dict()``.
    """
    if extra is not None and not (isinstance(extra, Mapping) and all(hasattr(x, "state_dict") for x in extra.values())):
        raise CheckpointError(
            "extra must name objects with state_dict() and load_state_dict(), as {'scheduler': scheduler}"
        )
    return {
        "optimizer": describe_optimizers(optimizer, engine._parameters, engine.program),
        "extra": {name: source.state_dict() for name, source in (extra or {}).items()},
    }


def collect_content(
    engine: CheckpointedEngine, optimizer: Optimizers, extra: Mapping[str, Stateful] | None
) -> CheckpointContent:
    """Return everything that this rank of ``engine`` has to save to a checkpoint. ``optimizer``: the optimizer of the
    engine's parameters, a list of several, or ``None``. ``extra``: name -> another object whose state is saved, such as
    a data loader. Raise :class:`CheckpointError` if an optimizer has parameters that are not the engine's.
    """
    rank = engine.rank_program
    held = None if optimizer is None else OptimizerState(optimizer, engine._parameters)
    moving, still = list_pieces(rank, engine._masters.held, held)
    return CheckpointContent(
        rank,
        moving + list_residual_pieces(rank, engine._gradients.residuals),
        still,
        training=collect_common_state(engine),
        random=collect_random_state(engine.device),
        own=collect_rank_state(engine, optimizer, extra),
        steps=engine.steps,
    )


def load_run_state(
    engine: CheckpointedEngine,
    directory: Path,
    optimizer: Optimizers,
    extra: Mapping[str, Stateful] | None,
    verify: bool,
) -> None:
    """Restore the state of ``engine`` from the checkpoint ``directory``, which may be from any plan of the model:
    weights, optimizer state, rounding errors of gradient compression, counters, random state, and the objects in
    ``extra``. All ranks call this.

    ``extra``: name -> object. ``optimizer``: the optimizer whose state is restored, a list of several, or ``None``.
    ``verify``: whether to compare the checksums of the files first.
    """
    rank, residuals = engine.rank_program, engine._gradients.residuals
    held = None if optimizer is None else OptimizerState(optimizer, engine._parameters)
    found = loading.find_on_all_ranks(directory, rank, engine.communicator)
    training = loading.load_checkpoint(
        found, rank, engine._masters.held, held, engine.communicator, verify, tuple(extra or ())
    )
    load_residuals(found.folder, rank, residuals, training)
    generators = training["random"]
    random = generators["states"][generators["of"][rank.rank % len(generators["of"])]]
    restore_run(engine, training, random, extra, str(found.folder))


def restore_run(
    engine: CheckpointedEngine,
    run: Mapping[str, Any],
    random: Mapping[str, Any],
    extra: Mapping[str, Stateful] | None,
    origin: str,
) -> None:
    """Restore the counters, the loss scale and the random state of ``engine``, and the objects in ``extra``. The
    tensors must already be restored.

    Args:
        run: the saved state other than tensors, as a dict: counters, seed, loss scale, hyperparameters of optimizers
            and states of other objects.
        random: the states of this rank's random generators; used only if the program trains.
        extra: name -> object with ``load_state_dict()``, such as a data loader; ``None``: there are none.
        origin: the name of the checkpoint, for error messages.

    Raise :class:`CheckpointError` if ``run`` has no state of an object in ``extra``.
    """
    engine.steps, engine.seed = run["steps"], run["seed"]
    engine.optimizer_steps = run.get("optimizer_steps", run["steps"])  # earlier versions had only one counter
    if engine._scale is not None and run["scale"] is not None:
        engine._scale.load_state_dict(run["scale"])
        engine._gradients.rescale(engine._scale.value / run["scale"]["value"])
    if engine.program.objective == "train":  # otherwise another engine of the process may be training
        set_random_state(random, engine.device)
    for name, target in (extra or {}).items():
        if name not in run["extra"]:
            have = ", ".join(run["extra"]) or "nothing"
            raise CheckpointError(f"{origin} holds no state of {name!r}; beside the weights it has {have}")
        target.load_state_dict(run["extra"][name])


def list_rank_tensors(engine: CheckpointedEngine, optimizer: Optimizers) -> dict[str, Tensor]:
    """Return all tensors of ``engine`` that this rank must save, as a dict: name, with a prefix for the kind of tensor
    -> tensor. They are its shards of parameters and buffers, rounding errors of gradient compression, and the states of
    ``optimizer`` (one optimizer, a list of several, or ``None``).
    """
    held, parameters = engine._masters.held, engine._parameters
    tensors = {f"{MODEL}{n}": held[n].detach() for n in list_saved_states(engine.program) if n in held}
    tensors |= {f"{RESIDUAL}{place}": tensor for place, tensor in engine._gradients.residuals.items()}
    if optimizer is not None:
        state = OptimizerState(optimizer, parameters)
        tensors |= {f"{STATE}{n}.{key}": t.detach() for n in parameters for key, t in state.get_tensors(n).items()}
    return tensors


def take_tensors(engine: CheckpointedEngine, tensors: Mapping[str, Tensor], optimizer: Optimizers) -> None:
    """Copy ``tensors`` into ``engine`` and ``optimizer`` (one optimizer, a list of several, or ``None``). ``tensors``:
    name, with a prefix for the kind (parameter or buffer, rounding error, optimizer state) -> tensor, as saved by the
    same rank under the same plan.
    """
    with torch.no_grad():
        for name, held in list_rank_tensors(engine, None).items():
            held.copy_(tensors[name])
    if optimizer is None:
        return
    moments: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith(STATE):
            name, _, what = key.removeprefix(STATE).rpartition(".")
            moments.setdefault(name, {})[what] = tensor.clone()
    state = OptimizerState(optimizer, engine._parameters)
    for name in state.parameters:
        state.replace(name, moments.get(name, {}))
