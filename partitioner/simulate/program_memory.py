"""Peak memory of every rank of a plan, found by following its program instruction by instruction.

The search bounds the memory of stages by tables. These are faster to compute and give slightly higher values, because
they add up the maxima of all kinds of memory, which need not occur at the same time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from partitioner.optimizers import optimizer_bytes
from partitioner.passes.ir.serialize import dtype_of
from partitioner.plan import Estimate
from partitioner.runtime.program.analysis import ProgramFacts, value_bytes
from partitioner.runtime.program.instructions import Listing
from partitioner.runtime.program.memory import (
    MemoryMoment,
    find_fullest_moment,
    gradient_bytes,
    parameter_bytes,
    residual_bytes,
)
from partitioner.runtime.program.program import Program
from partitioner.runtime.program.state_bytes import list_host_states
from partitioner.topology.groups import stage_ranks

Sizes = dict[str, int]  # bytes by kind


def fixed_sizes(facts: ProgramFacts, stage: int, optimizer: str) -> Sizes:
    """Return the bytes that a rank of one pipeline stage holds during the whole step, by kind: ``parameters``,
    ``gradients``, ``optimizer`` (optimizer states), and, if gradients are compressed, ``residuals`` (rounding errors,
    which are added to the gradients of the next step). Data in host memory are not counted. ``facts``: figures derived
    from the program, such as the bytes of its parameters on a rank. ``stage``: index of the stage. ``optimizer``: name
    of the optimizer, such as ``"adamw"``."""
    program, hosted = facts.program, list_host_states(facts.program, stage)
    sizes = {"parameters": 0, "optimizer": 0, "gradients": 0}
    for name in facts.states_by_stage[stage]:
        sizes["parameters"] += parameter_bytes(facts, name)
        if name in facts.with_gradient:
            itemsize = dtype_of(program.states[name].dtype).itemsize
            sizes["gradients"] += gradient_bytes(facts, name)
            if name not in hosted:
                sizes["optimizer"] += optimizer_bytes(facts.piece_bytes(name) // itemsize, itemsize, optimizer)
    residuals = sum(residual_bytes(facts, bucket) for bucket in program.stages[stage].buckets)
    return {**sizes, "residuals": residuals} if residuals else sizes


def moving_sizes(moment: MemoryMoment, working: int) -> Sizes:
    """Return the bytes of temporary data at one moment of a step, by kind: ``saved`` (saved activations and tensors
    between blocks), ``flowing`` (gradients of tensors between blocks), ``recomputed`` (activations), ``working``
    (memory of running operators), ``gathered`` (parameters). ``moment``: the bytes of each kind at this moment, without
    working memory. ``working``: bytes of working memory of the block (such as a layer) that runs at this moment."""
    moving = {"saved": moment.saved, "flowing": moment.gradients, "recomputed": moment.recomputed, "working": working}
    return {**moving, "gathered": moment.gathered}


def compute_peak_sizes(facts: ProgramFacts, stage: int, optimizer: str, working: Mapping[str, int]) -> Sizes:
    """Return the bytes that a rank of one pipeline stage holds at the moment of its peak memory, by kind of data, such
    as ``parameters`` or ``saved``; kinds of 0 bytes are left out. ``facts``: figures derived from the program, such as
    the bytes of its values. ``stage``: index of the stage. ``optimizer``: name, such as ``"adamw"``. ``working``: bytes
    of working memory of each block (such as a layer) while it runs, by name of the block.
    """
    here = facts.program.stages[stage]
    needs = [working.get(call.block, 0) for call in here.calls]
    most = _find_fullest_moment(facts, stage, needs)
    return {k: size for k, size in {**fixed_sizes(facts, stage, optimizer), **moving_sizes(*most)}.items() if size}


def _find_fullest_moment(facts: ProgramFacts, stage: int, needs: Sequence[int]) -> tuple[MemoryMoment, int]:
    """Return the moment of peak memory on a rank of one pipeline stage (its temporary bytes by kind), and the bytes of
    working memory of the block (such as a layer) that runs at this moment. ``facts``: figures derived from the program,
    such as the bytes of its values. ``stage``: index of the stage. ``needs``: bytes of working memory of each block
    call of the stage.

    If the instructions contain repeated sections, the peak is first computed with each section run once, and run twice.
    The whole list is simulated only if these two peaks differ.
    """
    instructions = facts.program.stages[stage].instructions
    if isinstance(instructions, Listing) and instructions.steps > 2 and facts.grows:
        first, second = (_find_fullest_moment(facts.extend(steps), stage, needs) for steps in (1, 2))
        if _sum_moment_bytes(first) == _sum_moment_bytes(second):
            return second
    return find_fullest_moment(facts, stage, instructions, needs)


def replace_estimated_memory(
    estimate: Estimate,
    facts: ProgramFacts,
    optimizer: str,
    working: Mapping[str, int],
    resident: Collection[str] = (),
) -> Estimate:
    """Return ``estimate`` with the peak memory of every rank, in bytes, replaced by the peak that is computed from the
    rank's program. ``facts``: figures derived from the program, such as the bytes of its values. ``optimizer``: name,
    such as ``"adamw"``. ``working``: bytes of working memory of each block (such as a layer) while it runs, by name of
    the block. ``resident``: names of inputs, such as key/value caches, that a rank holds for all its microbatches all
    the time; their bytes are listed as the kind ``caches``.
    """
    moving = facts if not resident else ProgramFacts(_drop_sizes(facts.program, resident))
    sizes = [compute_peak_sizes(moving, stage, optimizer, working) for stage in range(len(facts.program.stages))]
    if resident:
        sizes = [found | {"caches": count_resident_bytes(facts.program, s, resident)} for s, found in enumerate(sizes)]
    memory, stages = list(estimate.memory), list(estimate.stages)
    for number, (ranks, found) in enumerate(zip(stage_ranks(facts.program.mesh), sizes, strict=True)):
        memory[ranks.start : ranks.stop] = [sum(found.values())] * len(ranks)
        stages[number] = stages[number].model_copy(update={"memory": found})
    return estimate.model_copy(update={"memory": tuple(memory), "stages": tuple(stages)})


def count_resident_bytes(program: Program, stage: int, names: Collection[str]) -> int:
    """Return the bytes of the inputs ``names`` (such as key/value caches) on a rank of one pipeline stage of
    ``program``, for all microbatches of the rank together. ``stage``: index of the stage."""
    loaded = {v for i in program.stages[stage].instructions if i.op == "LOAD" for v in i.values} & {*names}
    return sum(value_bytes(program.values[name]) for name in loaded) * program.num_microbatches


def _drop_sizes(program: Program, names: Collection[str]) -> Program:
    """Return a copy of ``program`` in which the tensors ``names`` between block calls (such as layers) have no
    elements, so that their bytes do not count."""
    values = {n: v.model_copy(update={"shape": (0,)}) if n in names else v for n, v in program.values.items()}
    return program.model_copy(update={"values": values})


def _sum_moment_bytes(found: tuple[MemoryMoment, int]) -> int:
    """Return the bytes of temporary data at one moment of a step, summed over all kinds. ``found``: a pair: the bytes
    of each kind that the program holds, and the bytes of working memory of the block (such as a layer) that runs."""
    moment, working = found
    return moment.saved + moment.gradients + moment.recomputed + moment.gathered + working
