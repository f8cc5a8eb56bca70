"""Run the further programs of a plan, such as an evaluation, on the tensors of one engine, without copies of
parameters.

An executor has instructions, and has its own tensors only during a run. Parameters and buffers are the engine's.
Programs that train add to the engine's gradients; programs that evaluate have no gradients. Each program has its own
constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from partitioner.passes.ops.random import SEED
from partitioner.runtime.comm.group import Communicator
from partitioner.runtime.engine.execution import ExecutionSetup
from partitioner.runtime.engine.padding import BatchShape
from partitioner.runtime.errors import LaunchError
from partitioner.runtime.execute.bind import BlockLibrary
from partitioner.runtime.execute.executor import Executor, ExecutorOptions
from partitioner.runtime.family.data import BatchPadding, FurtherProgram, ProgramFamily
from partitioner.runtime.program.membership import PipelineEdge, list_gather_groups, list_groups, list_links
from partitioner.runtime.program.program import Program, RankProgram, Stage
from partitioner.runtime.prove.layouts import prove_same_caches, prove_same_layout
from partitioner.runtime.state.gradients import RankGradients
from partitioner.runtime.state.host_offload import HostParameters, TransientParameters
from partitioner.runtime.state.parameters import load_constants
from partitioner.runtime.state.sharded_parameters import ShardedParameters


@dataclass
class EngineState:
    """The tensors of one rank that all programs of a plan (for training steps, and for evaluation) share. ``shards``:
    name -> this rank's shard of a parameter or buffer. ``gradients``: holds the gradients of the parameters.
    ``sharded``: manages the parameters that ZeRO divides. ``host_parameters``: manages the parameters in host memory.
    """

    shards: Mapping[str, Tensor]
    gradients: RankGradients
    sharded: ShardedParameters
    host_parameters: HostParameters


class LatestRun(NamedTuple):
    """The last run of a program on an engine. ``executor``: the object that ran the program (the training step, or a
    further program of the plan, such as an evaluation). ``padding``: the planned padding of this program's batches;
    ``None``: they are not padded. ``real``: the shape of the batch before padding; ``None``: it was not padded.
    """

    executor: Executor
    padding: BatchPadding | None = None
    real: BatchShape | None = None


@dataclass
class FurtherExecutors:
    """The executors on one rank of the further programs of a plan, such as an evaluation. Each is created at its first
    use. ``family``: all programs of the plan. ``communicator``: connects this rank with the others. ``state``: the
    tensors that all programs share, such as parameters. ``setup``: whether instructions run eagerly, compiled or
    replayed. ``keep_outputs``: whether the executors collect the model's results.
    """

    family: ProgramFamily
    communicator: Communicator
    state: EngineState
    setup: ExecutionSetup
    keep_outputs: bool = False
    _made: dict[tuple[str, bool], Executor] = field(default_factory=dict)

    @property
    def created(self) -> dict[str, Executor]:
        """Return the executors of the further programs of the plan (such as an evaluation) that were used so far, by
        name of the program.
        """
        return {name: executor for (name, _), executor in self._made.items()}

    @cached_property
    def seed(self) -> Tensor:
        """Return the tensor with the seed of random operators, which all programs of the plan (training, evaluation and
        so on) read.
        """
        return self.state.shards.get(SEED, torch.zeros((), dtype=torch.int64, device=self.communicator.device))

    def find(self, name: str, purpose: str) -> FurtherProgram:
        """Return the further program called ``name``. Raise :class:`LaunchError` if the plan has no program of this
        name, or if the program's purpose is not ``purpose``: "evaluate" for a program such as an evaluation, "step" for
        a training step on batches of another shape.
        """
        found = self.family.further.get(name)
        if found is None or found.purpose != purpose:
            known = [n for n, f in self.family.further.items() if f.purpose == purpose]
            raise LaunchError(
                f"the plan has no program {name!r} to {purpose}: it has {', '.join(map(repr, known)) or 'none'}; plan "
                f"with partition(..., programs={{{name!r}: Evaluate()}}) and create the engine from this plan or "
                "its file"
            )
        return found

    def executor(self, name: str, keep_outputs: bool | None = None) -> Executor:
        """Return the executor of the further program (such as an evaluation) called ``name``, created at the first
        call. ``keep_outputs``: whether the executor collects the model's results; ``None``: as the engine does for its
        training steps.
        """
        keep = self.keep_outputs if keep_outputs is None else keep_outputs
        if (name, keep) not in self._made:
            self._made[name, keep] = self._build_executor(self.family.further[name], keep)
        return self._made[name, keep]

    def get_padding(self, name: str) -> BatchPadding | None:
        """Return the batch shape of the program called ``name`` and the values with which smaller batches are padded;
        ``None`` if its batches are not padded. ``name``: empty for the first program of the plan.
        """
        return self.family.further[name].padding if name else self.family.padding

    def _build_executor(self, further: FurtherProgram, keep_outputs: bool) -> Executor:
        """Return an executor of the program of ``further`` on this rank, with the engine's parameters, buffers and
        gradients. ``keep_outputs``: whether the executor collects the model's results.
        """
        program: Program = further.program
        rank, state, device = program.rank(self.communicator.rank), self.state, self.communicator.device
        trains = program.objective == "train"
        kept = {n: t for n, t in state.shards.items() if n in self.family.first.states and not self._is_constant(n)}
        shards = kept | load_constants(rank, device)
        if SEED in shards:
            shards[SEED] = self.seed
        gradients = state.gradients if trains else RankGradients(rank, shards, self.communicator)
        sharded = state.sharded.for_buckets(self._map_bucket_numbers(rank))
        return Executor(
            rank,
            shards | sharded.whole,
            gradients,
            self.communicator,
            BlockLibrary(program, device, self.setup.compile),
            TransientParameters(sharded, state.host_parameters),
            ExecutorOptions(
                keep_outputs or bool(further.caches),
                frozenset(i.value for i in program.inputs if i.path in further.caches),
                self.setup.tape,
            ),
        )

    def _is_constant(self, name: str) -> bool:
        return self.family.first.states[name].kind == "constant"

    def _map_bucket_numbers(self, rank: RankProgram) -> dict[int, int]:
        """Return a dict: index of a bucket in the program of ``rank`` -> index of the bucket with the same parameters
        in the plan's first program. A bucket is a set of parameters that one collective gathers.
        """
        first: Stage = self.family.first.stages[rank.stage_index]
        places = {bucket.states: number for number, bucket in enumerate(first.buckets)}
        return {number: places[bucket.states] for number, bucket in enumerate(rank.stage.buckets)}


def prepare_programs(family: ProgramFamily, communicator: Communicator) -> None:
    """Create the process groups and pipeline links of all programs of the plan ``family``. All ranks call this.
    ``communicator``: connects this rank with the others. Raise :class:`partitioner.runtime.prove.layouts.LayoutError`
    if the programs place parameters or buffers differently.
    """
    groups: dict[tuple[int, ...], None] = {}
    links: dict[PipelineEdge, None] = {}
    gathers: dict[tuple[int, ...], None] = {}
    prove_same_caches(family.further)
    for name, further in family.further.items():
        prove_same_layout(family.first, name, further.program)
    for program in (family.first, *(further.program for further in family.further.values())):
        rank = program.rank(communicator.rank)
        groups |= dict.fromkeys(list_groups(rank))
        links |= dict.fromkeys(list_links(rank))
        gathers |= dict.fromkeys(list_gather_groups(rank))
    communicator.prepare([*groups], [*links], [*gathers])
