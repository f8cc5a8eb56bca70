"""Insert the instructions that gather (GATHER) and free (FREE) sharded parameters under ZeRO into a stage's
instructions.

- ZeRO-1 and ZeRO-2: the step starts with a GATHER of every bucket, in the order in which the buckets are read, because
  the optimizer has changed the shards since the last step. The forward hides the gathers. Nothing is freed.
- ZeRO-3: the parameters of a block call are gathered one computation ahead and freed after it, in forward and in
  backward, unless the next computation reads them as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partitioner.passes.ir.model import FoldedModel
from partitioner.runtime.program.instructions import Instruction
from partitioner.runtime.program.program import CallData

_COMPUTING = frozenset({"F", "B", "I", "W", "TOTAL_F"})

_BACKWARD = frozenset({"B", "I", "W"})

SMALL = 2**-12  # fraction of the bytes of the parameters and buffers that a call reads

Needs = Sequence[frozenset[int]]  # for each call of the stage, the numbers of the buckets that it reads


def zero_axes(grad_axes: Sequence[str], trained: bool, *, zero: int, expert: bool, hybrid: bool) -> tuple[str, ...]:
    """Return the mesh axes over which ZeRO shards a parameter; empty if it is not sharded.

    ``grad_axes``: the mesh axes over which its gradient is summed. ``trained``: whether it has a gradient; if so, it is
    sharded only over axes in ``grad_axes``. ``zero``: the ZeRO stage, 0 to 3; below 3, only parameters with a gradient
    are sharded. ``expert``: whether the parameter belongs to an expert. ``hybrid``: whether only a part of the
    data-parallel ranks shards it.
    """
    if not zero or (zero < 3 and not trained):
        return ()
    among = ("edp",) if expert else ("dp", "cp")
    shared = [a for a in among if a in grad_axes or not trained]
    return tuple(f"{a}_shard" if hybrid and a != "cp" else a for a in shared)


def small_states(sizes: Mapping[str, int]) -> frozenset[str]:
    """Return the names of the parameters and buffers that ZeRO-3 does not shard because they have only a small part of
    the bytes of their block (such as a layer), for example the weights of a norm. ``sizes``: bytes of the parameters
    and buffers of one block, by name.

    Gathering them in a separate collective would cost its latency and save next to no memory (compare DeepSpeed's
    persistent parameters).
    """
    most = SMALL * sum(sizes.values())
    return frozenset(name for name, nbytes in sizes.items() if nbytes <= most)


def states_left_whole(model: FoldedModel) -> frozenset[str]:
    """Return the names of the parameters and buffers of ``model`` that ZeRO-3 does not shard, because they have few
    bytes in every block (such as a layer) that reads them. ``model`` has the shapes of one rank before ZeRO."""
    small: set[str] = set()
    large: set[str] = set()
    of_block: dict[str, frozenset[str]] = {}
    for name, block in model.blocks.items():
        placeholders = {node.name: node for node in block.placeholders}
        of_block[name] = small_states({own: placeholders[own].meta["val"].nbytes for own in block.states})
    for call in model.calls:
        for own, name in zip(model.blocks[call.block].states, call.states, strict=True):
            (small if own in of_block[call.block] else large).add(name)
    return frozenset(small - large)


def bucket_needs(calls: Sequence[CallData], buckets: Mapping[int, Sequence[str]]) -> Needs:
    """Return, for each of the block calls (such as layers) ``calls``, the numbers of the buckets whose parameters it
    reads. A bucket consists of parameters that ZeRO shards and that are all-gathered together. ``buckets``: number of a
    bucket -> names of its parameters."""
    home = {state: number for number, states in buckets.items() for state in states}
    return [frozenset(home[s] for s in call.states if s in home) for call in calls]


def with_sharding(
    instructions: Sequence[Instruction],
    calls: Sequence[CallData],
    runs: Sequence[bool],
    buckets: Mapping[int, Sequence[str]],
    zero: int,
) -> list[Instruction]:
    """Return ``instructions``, the list of one pipeline rank, with instructions that all-gather sharded parameters
    before they are read (GATHER) and, under ZeRO-3, free them afterwards (FREE).

    ``calls``: the block calls (such as layers) of the stage. ``runs``: for each call, whether it has a backward.
    ``buckets``: the sharded parameters in buckets that are gathered together: number of a bucket -> names of its
    parameters. ``zero``: the ZeRO stage, 1 to 3.
    """
    if not buckets or not instructions:
        return [*instructions]
    needs = bucket_needs(calls, buckets)
    prologue = [p for p, call in enumerate(calls) if call.prologue]
    if zero == 3:
        return _insert_gather_per_call(instructions, needs, runs, prologue)
    return _insert_single_gather(instructions, needs, prologue)


def _find_read_buckets(
    instruction: Instruction, needs: Needs, runs: Sequence[bool], calls: Sequence[int]
) -> frozenset[int]:
    """Return the numbers of the buckets (sharded parameters that are all-gathered together) whose parameters
    ``instruction`` reads.

    ``needs``: for each block call (such as a layer) of the stage, the numbers of the buckets that it reads. ``runs``:
    for each call, whether it has a backward. ``calls``: positions in the stage of the calls that the instruction runs.
    """
    backward = instruction.op in _BACKWARD
    return frozenset().union(*(needs[p] for p in calls if runs[p] or not backward))


def _insert_gather_per_call(
    instructions: Sequence[Instruction], needs: Needs, runs: Sequence[bool], prologue: Sequence[int]
) -> list[Instruction]:
    """Return ``instructions``, the list of one pipeline rank, with the gathers of ZeRO-3. A bucket (sharded parameters
    that are gathered together) is all-gathered (GATHER) one computation ahead of the computation that reads its
    parameters. The bucket is freed (FREE) after this computation, unless the next one reads the bucket, too.

    ``needs``: for each block call (such as a layer) of the stage, the numbers of the buckets whose sharded parameters
    it reads. ``runs``: for each call, whether it has a backward. ``prologue``: positions of the calls that run before
    the pipeline starts.
    """
    places, reads = [], []
    for index, i in enumerate(instructions):
        if i.op in _COMPUTING:
            calls = range(*i.calls) if i.calls is not None else prologue
            places.append(index)
            reads.append(_find_read_buckets(i, needs, runs, calls))
    before: dict[int, list[Instruction]] = {}
    after: dict[int, list[Instruction]] = {}
    there: frozenset[int] = frozenset()
    stage = instructions[0].stage
    for k, (index, read) in enumerate(zip(places, reads, strict=True)):
        following = reads[k + 1] if k + 1 < len(reads) else frozenset()
        first = 0 if k == 0 else index
        for number in (*sorted(read - there), *sorted(following - read - there)):
            before.setdefault(first, []).append(Instruction(op="GATHER", stage=stage, bucket=number))
        there |= read | following
        for number in sorted(there - following):
            after.setdefault(index, []).append(Instruction(op="FREE", stage=stage, bucket=number))
        there = following
    result: list[Instruction] = []
    for index, instruction in enumerate(instructions):
        result += [*before.get(index, ()), instruction, *after.get(index, ())]
    return result


def _insert_single_gather(
    instructions: Sequence[Instruction], needs: Needs, prologue: Sequence[int]
) -> list[Instruction]:
    """Return ``instructions``, the list of one pipeline rank, with one GATHER (all-gather) of each bucket (sharded
    parameters that are gathered together) at the start of the step (ZeRO-1 and ZeRO-2). Forwards are split before a
    block call (such as a layer) that reads a bucket that no earlier call reads, so that they do not wait for all
    gathers.

    ``needs``: for each block call of the stage, the numbers of the buckets whose sharded parameters it reads.
    ``prologue``: positions in the stage of the calls that run before the pipeline starts.
    """
    known: dict[int, None] = {}
    result: list[Instruction] = []
    for instruction in instructions:
        if instruction.op == "TOTAL_F":
            known |= dict.fromkeys(n for position in prologue for n in sorted(needs[position]))
        if instruction.op != "F" or instruction.calls is None:
            result.append(instruction)
            continue
        start, end = instruction.calls
        for position in range(start, end):
            if needs[position] - known.keys():
                if position > start:
                    result.append(instruction.model_copy(update={"calls": (start, position)}))
                    start = position
                known |= dict.fromkeys(sorted(needs[position]))
        whole = (start, end) == instruction.calls
        result.append(instruction if whole else instruction.model_copy(update={"calls": (start, end)}))
    return [Instruction(op="GATHER", stage=instructions[0].stage, bucket=number) for number in known] + result
