"""Choose a layout of the state that all programs of a plan can have, and plan all of them.

The search decides the layout by the main program, the training step for the largest batch shape. The search leaves out
meshes whose ranks cannot divide the batch of a further program evenly. If a further program has no plan in the layout
that was found, the search is repeated: first with the sharding of the main program and of that further program decided
together, then without the candidates in whose layout there was no plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from partitioner.candidate import MeshCandidate
from partitioner.constraints import Constraints
from partitioner.errors import CapacityError
from partitioner.passes.capture.capture import find_batch_dims
from partitioner.passes.capture.inputs import split_inputs
from partitioner.passes.errors import PartitionError
from partitioner.passes.ir.model import leaf_paths
from partitioner.programs.further import (
    FirstProgram,
    NoFurtherPlanError,
    choose_expected_layout,
    plan_further_programs,
)
from partitioner.programs.requests import Generate, Request
from partitioner.programs.shapes import ShapeFamily
from partitioner.runtime.family.data import FurtherProgram
from partitioner.solve.evaluate.job import Job
from partitioner.solve.evaluate.prepared_model import PreparedModel
from partitioner.solve.search.fit_memory import PlanFinder, plan_to_fit

_OF_ONE_MESH = 3  # excluded candidates of one mesh after which the whole mesh is excluded
_NOTE = (
    "the layout is the best one that was found for all programs together; a further program has no plan in the layout "
    "that is the fastest one for the first program"
)


class FurtherSizes(NamedTuple):
    """Batch sizes of a plan's further programs, such as evaluations. ``samples``: their numbers of samples.
    ``positions``: their numbers of positions (such as tokens of a sample). Each tuple is in ascending order without
    duplicates. A search for a plan leaves out meshes whose ranks cannot divide such a batch evenly."""

    samples: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()


def list_further_sizes(
    prepared: PreparedModel, family: ShapeFamily | None, programs: Mapping[str, Request], global_batch: int | None
) -> FurtherSizes:
    """Return the batch sizes of all programs of a plan besides the training step: evaluations, generation, and training
    steps for other batch shapes. ``prepared``: the model with the inputs of the training step. ``family``: the batch
    shapes that the plan trains on; ``None`` if there is only one. ``programs``: the requested evaluations and
    generations by name. ``global_batch``: samples of a training step; ``None``: the number of samples in the inputs.
    """
    samples, positions = set[int](), set[int]()
    for shape in () if family is None else family.shapes[1:]:
        samples.add(shape[0])
        positions.add(shape[1])
    for asked in programs.values():
        if isinstance(asked, Generate):
            samples.add(asked.batch)
        elif asked.inputs is None:
            own = 0 if prepared.inputs is None else find_batch_dims(prepared.model, prepared.inputs)[0]
            samples.add(global_batch or own)
        else:
            samples.add(find_batch_dims(prepared.model, asked.inputs)[0])
            positions.add(_count_positions(prepared.model, asked.inputs))
    return FurtherSizes(tuple(sorted(samples - {0})), tuple(sorted(positions - {0})))


def _count_positions(model: Any, inputs: Any) -> int:
    """Return the number of positions of a sample in ``inputs``, the arguments of ``model``: the largest size of dim 1
    of all inputs with two or three dims; 0 if there is no such input."""
    leaves = (leaf for part in split_inputs(model, inputs) for _, leaf in leaf_paths(part) if isinstance(leaf, Tensor))
    return max((int(leaf.shape[1]) for leaf in leaves if 1 < leaf.dim() < 4), default=0)


def plan_all_programs(
    first: FirstProgram,
    constraints: Constraints,
    find: PlanFinder,
    programs: Mapping[str, Request],
    time_limit_s: float | None = None,
) -> tuple[FirstProgram, dict[str, FurtherProgram]]:
    """Return the training program of a plan, and its further programs (such as evaluations) by name. All of them use
    the same mesh and the same sharding of parameters, called the layout.

    Further programs may be training steps with other batch shapes. The training program gets another layout than its
    fastest one if a further program has no plan in that, or if the expected time of a step over all batch shapes is
    lower in another one. ``first``: the training program in its fastest layout. ``constraints``: the user's
    constraints. ``find``: a function that returns the best plan of a planning problem. ``programs``: the requested
    further programs by name. ``time_limit_s``: seconds after which no further search is started; ``None``: no limit.

    Raise the error of the further program that has no plan in the fastest layout if no layout suits all programs;
    :class:`ConstraintError` if the plan cannot have further programs at all.
    """
    plan = partial(plan_to_fit, find=find, estimate_only=False, time_limit_s=time_limit_s)
    reason: PartitionError | None = None
    deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    together: set[str] = set()
    while True:
        chosen = choose_expected_layout(first, constraints, plan)
        try:
            return chosen, plan_further_programs(chosen, programs)
        except (NoFurtherPlanError, CapacityError) as error:
            reason = reason or error
            if time.monotonic() >= deadline:
                raise reason from None
            job = _exclude_layout(chosen, error, together)
        try:
            first = replace(first, job=job, found=plan(job), note=_NOTE)
        except PartitionError:
            raise reason from None


def _exclude_layout(first: FirstProgram, error: PartitionError, together: set[str]) -> Job:
    """Return a changed copy of the planning problem of the training program ``first``, whose best plan has another
    layout (mesh and sharding). ``error``: the error of a further program, such as an evaluation, that has no plan in
    the layout of ``first``.

    There are two kinds of change. If the sharding of the further program failed, and for the first time, the copy
    solves the sharding of both programs together. Otherwise the copy excludes the candidate of ``first`` (mesh sizes,
    microbatch size, schedule and ZeRO stage) or, after several excluded candidates of one mesh, this mesh.
    ``together``: names of the programs that are sharded together with the training program; this function adds to it.
    """
    job, candidate = first.job, first.found.chosen.candidate
    if isinstance(error, NoFurtherPlanError) and error.companions and error.name not in together:
        together.add(error.name)
        return replace(job, companions=(*job.companions, *error.companions))
    before = sum(isinstance(each, MeshCandidate) and each.axes == candidate.axes for each in job.unfollowed)
    refused = candidate if before + 1 < _OF_ONE_MESH else candidate.axes
    return replace(job, unfollowed={**job.unfollowed, refused: error})
