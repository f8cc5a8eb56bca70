"""Outline of a program for pictures and text: the states, computation and transfers of each stage.

Everything is read from the program's data: no graph is built, and no operator has to be registered. ``exchange_totals``
gives the traffic of a stage's gradient buckets over data-parallel ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from partitioner.passes.dtypes import get_dtype_itemsize, sum_type
from partitioner.plans.block_outline import BlockCollective, Weight, block_collectives, block_weights
from partitioner.runtime.program.buckets import Bucket
from partitioner.runtime.program.instructions import Instruction, count_repetitions
from partitioner.runtime.program.program import Program, Stage
from partitioner.runtime.program.sharded_buckets import count_gradient_shards, rest_axes, zero_axes
from partitioner.runtime.program.state_bytes import state_sizes
from partitioner.units import bytes_text


def group_notes(calls: CallGroup) -> list[str]:
    """What is unusual about when and where these calls run."""
    notes = (
        ("recomputed in backward", calls.recomputed),
        ("recomputed in part in backward", calls.selective),
        ("before the pipeline starts", calls.prologue),
        ("computed by each stage that reads it", calls.everywhere and not calls.prologue),
    )
    return [note for note, holds in notes if holds]


BUCKET_OPS = {"GATHER": "all_gather", "SCATTER": "reduce_scatter", "REDUCE": "all_reduce"}


def tensor_bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * get_dtype_itemsize(dtype)


def kept_bytes(program: Program, state: str) -> int:
    """The bytes of a state on a rank, all the time."""
    sizes = state_sizes(program, state)
    return sizes.piece if program.zero == 3 else sizes.part


Exchange = tuple[str, str, str]  # the collective, the axes it runs over, what it moves


@dataclass(frozen=True)
class ExchangeTotal:
    """What the transfers of one kind move on one rank in one step. ``buckets``: how many different ones are moved."""

    transfers: int
    buckets: int
    num_bytes: int


def exchange_totals(program: Program, stage: Stage) -> dict[Exchange, ExchangeTotal]:
    """The totals of a stage's buckets. A list repeats few different transfers many times: each is looked at once."""
    transfers = Counter[tuple[int, str, tuple[str, ...]]]()
    for instruction, times in count_repetitions(stage.instructions):
        if instruction.op in BUCKET_OPS and instruction.bucket is not None:
            transfers[instruction.bucket, instruction.op, instruction.axes] += times
    found: dict[Exchange, list[tuple[int, int, int]]] = {}
    for (bucket, op, axes), times in transfers.items():
        exchange, num_bytes = describe_bucket_exchange(program, stage.buckets[bucket], op, axes)
        found.setdefault(exchange, []).append((bucket, times, times * num_bytes))
    return {
        exchange: ExchangeTotal(
            transfers=sum(times for _, times, _ in parts),
            buckets=len({bucket for bucket, _, _ in parts}),
            num_bytes=sum(num_bytes for _, _, num_bytes in parts),
        )
        for exchange, parts in found.items()
    }


def describe_bucket_exchange(program: Program, bucket: Bucket, op: str, axes: tuple[str, ...]) -> tuple[Exchange, int]:
    """What a GATHER, SCATTER or REDUCE of a bucket is, over which axes, of what, and its bytes on a rank."""
    level = bucket.levels.index(axes) if axes else len(bucket.levels)
    size = "gradient_piece" if axes or op == "REDUCE" else "part" if op == "GATHER" else "gradient"
    moved = sum(getattr(state_sizes(program, state), size) for state in bucket.states)
    if axes or op == "REDUCE":
        moved //= count_gradient_shards(program, bucket, level)
    axes = axes or (rest_axes(program, bucket) if op == "REDUCE" else zero_axes(program, bucket.states))
    what, kind = "parameters" if size == "part" else "gradients", BUCKET_OPS[op]
    if bucket.compression and what == "gradients" and level == max(0, len(bucket.levels) - 1) and op != "REDUCE":
        from partitioner.runtime.program.codecs import wire_share  # where gradients are compressed: it imports PyTorch

        moved = int(
            moved * wire_share(bucket.compression, get_dtype_itemsize(sum_type(program.states[bucket.states[0]].dtype)))
        )
        what = f"gradients in {bucket.compression}"
        kind = "all_to_all" if op == "SCATTER" else kind
    return (kind, "×".join(axes), what), moved


Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class CollectiveTotal:
    """Collectives of one kind: ``count`` of them, ``num_bytes`` in all, per rank (and per microbatch inside calls).

    ``even``: all of the same size. ``what``: is moved, where it is not of a call; ``buckets``: how many buckets of it.
    """

    op: str
    axis: str
    direction: Direction
    count: int
    num_bytes: int
    even: bool = True
    what: str = ""
    buckets: int = 0

    def amount(self, calls: int = 1) -> str:
        """How many and how large, for one of ``calls``: ``2 × 32 MiB``, or ``24 MiB in 3`` of unequal ones."""
        if self.count % calls:
            return f"{self.count} in {calls} calls, {bytes_text(self.num_bytes)}"
        count, total = self.count // calls, self.num_bytes / calls
        return f"{count} × {bytes_text(total / count)}" if self.even else f"{bytes_text(total)} in {count}"


@dataclass(frozen=True)
class CallGroup:
    """Calls ``start:stop`` of a stage that repeat the pattern ``blocks`` ``count`` times; drawn as one node.

    ``num_parameters`` counts the elements of the whole weights; ``parameter_bytes`` is one rank's part.
    ``everywhere``: every stage that reads the results computes them for itself.
    """

    stage: int
    index: int
    start: int
    stop: int
    blocks: tuple[str, ...]
    count: int
    paths: str
    collectives: tuple[CollectiveTotal, ...]
    weights: tuple[Weight, ...]
    num_parameters: int
    parameter_bytes: int
    recomputed: bool = False
    selective: bool = False
    prologue: bool = False
    everywhere: bool = False


@dataclass(frozen=True)
class ValueFlow:
    """Values that pass from one group of calls to another; bytes are one rank's per microbatch.

    ``hops``: how many stages away the reader is (0: the same stage).
    """

    source: tuple[int, int]
    target: tuple[int, int]
    values: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int
    hops: int


@dataclass(frozen=True)
class StageTransfer:
    """What a stage sends to another per microbatch, relayed values included."""

    source: int
    target: int
    direction: Direction
    num_bytes: int
    values: tuple[str, ...]


@dataclass(frozen=True)
class TiedWeight:
    """A weight that several places read: its gradients are added up."""

    state: str
    aliases: tuple[str, ...]
    places: tuple[tuple[int, int], ...]
    num_bytes: int


@dataclass(frozen=True)
class StageOutline:
    """One pipeline stage; all of its ranks do the same."""

    index: int
    ranks: tuple[int, ...]
    groups: tuple[CallGroup, ...]
    num_calls: int
    num_parameters: int
    parameter_bytes: int
    reductions: tuple[CollectiveTotal, ...]  # of gradients and parameters, in one step
    loads: tuple[str, ...]


@dataclass(frozen=True)
class Outline:
    stages: tuple[StageOutline, ...]
    flows: tuple[ValueFlow, ...]
    links: tuple[StageTransfer, ...]
    ties: tuple[TiedWeight, ...]
    num_parameters: int

    def group(self, place: tuple[int, int]) -> CallGroup:
        return self.stages[place[0]].groups[place[1]]


def outline_program(program: Program) -> Outline:
    """The outline of ``program``; see the classes above."""
    return _Outliner(program).build_outline()


def fold_runs(names: Sequence[Any], longest: int = 4) -> list[tuple[int, int, int]]:
    """Split ``names`` into runs ``(start, period, repeats)`` of a repeating pattern of at most ``longest`` names.

    At each place the pattern that covers most wins, the shortest among equals: ``a b b b c d c d`` gives
    ``a``, ``b`` three times, ``c d`` twice.
    """
    runs: list[tuple[int, int, int]] = []
    start = 0
    while start < len(names):
        period, repeats = 1, _count_repeats(names, start, 1)
        if repeats == 1:
            for candidate in range(2, longest + 1):
                times = _count_repeats(names, start, candidate)
                if times > 1 and times * candidate > period * repeats:
                    period, repeats = candidate, times
        runs.append((start, period, repeats))
        start += period * repeats
    return runs


def _count_repeats(names: Sequence[Any], start: int, period: int) -> int:
    pattern, times = names[start : start + period], 1
    while len(pattern) == period and names[start + times * period : start + (times + 1) * period] == pattern:
        times += 1
    return times


def path_range(paths: Sequence[str]) -> str:
    """``model.layers.0 – 7`` for the paths of consecutive layers; the ends in full where they differ in more."""
    first, last = paths[0], paths[-1]
    if first == last:
        return first
    head, tail = first.split("."), last.split(".")
    differing = [i for i, (a, b) in enumerate(zip(head, tail, strict=False)) if a != b]
    if len(head) == len(tail) and len(differing) == 1:
        i = differing[0]
        middle = f"{head[i]}–{tail[i]}"
        return ".".join([*head[:i], middle, *head[i + 1 :]])
    return f"{first} – {last}"


def chunk_starts(stage: Stage) -> list[int]:
    """The positions of the calls with which the stage's chunks (its virtual stages) begin."""
    starts: set[int] = set()
    fresh = True
    for instruction in stage.instructions:
        if instruction.microbatch != 0:
            continue
        if instruction.op == "F" and instruction.calls:
            if fresh:
                starts.add(instruction.calls[0])
            fresh = False
        elif instruction.op in ("RECV_F", "SEND_F", "B", "I"):
            fresh = True
    return sorted(starts)


class _Outliner:
    def __init__(self, program: Program) -> None:
        self.program = program
        self._collectives: dict[tuple[str, tuple[bool, ...]], tuple[BlockCollective, ...]] = {}

    def build_outline(self) -> Outline:
        program = self.program
        stages = tuple(self.outline_stage(i) for i in range(len(program.stages)))
        parameters = [s for s in program.states.values() if s.kind == "parameter"]
        return Outline(
            stages=stages,
            flows=tuple(self.find_value_flows(stages)),
            links=tuple(self.list_stage_transfers()),
            ties=tuple(self.find_tied_weights(stages)),
            num_parameters=sum(math.prod(s.shape) for s in parameters),
        )

    @cached_property
    def shared(self) -> set[str]:
        """Values that several stages compute for themselves."""
        made = Counter(v for stage in self.program.stages for call in stage.calls for v in call.outputs)
        return {value for value, times in made.items() if times > 1}

    def outline_stage(self, index: int) -> StageOutline:
        program = self.program
        stage = program.stages[index]
        per_stage = program.world_size // max(1, program.mesh.get("pp", 1))
        held = {n: s for n, s in program.states.items() if index in s.stages and s.kind == "parameter"}
        loads = [v for i in stage.instructions if i.op == "LOAD" and not i.microbatch for v in i.values]
        inputs = {i.value: i.path for i in program.inputs}
        return StageOutline(
            index=index,
            ranks=tuple(range(index * per_stage, (index + 1) * per_stage)),
            groups=self.group_stage_calls(index),
            num_calls=len(stage.calls),
            num_parameters=sum(math.prod(s.shape) for s in held.values()),
            parameter_bytes=sum(kept_bytes(program, s) for s in held),
            reductions=tuple(
                CollectiveTotal(
                    op, over, "backward", total.transfers, total.num_bytes, what=what, buckets=total.buckets
                )
                for (op, over, what), total in exchange_totals(program, stage).items()
            ),
            loads=tuple(dict.fromkeys(inputs.get(v, v) for v in loads)),
        )

    def group_stage_calls(self, index: int) -> tuple[CallGroup, ...]:
        stage = self.program.stages[index]
        recomputed, selective = set(stage.checkpoint_calls), set(stage.selective_calls)
        starts = chunk_starts(stage)
        kinds = [
            (call.block, i in recomputed, i in selective, call.prologue, bisect_right(starts, i))
            for i, call in enumerate(stage.calls)
        ]
        made: list[CallGroup] = []
        for start, period, repeats in fold_runs(kinds):
            stop = start + period * repeats
            calls = stage.calls[start:stop]
            states = dict.fromkeys(s for call in calls for s in call.states)
            parameters = [s for s in states if self.program.states[s].kind == "parameter"]
            ends = [calls[0].path, calls[-1].path] if period == 1 else [calls[0].path, calls[-period].path]
            made.append(
                CallGroup(
                    stage=index,
                    index=len(made),
                    start=start,
                    stop=stop,
                    blocks=tuple(c.block for c in calls[:period]),
                    count=repeats,
                    paths=path_range(ends),
                    collectives=self.sum_collective_traffic(index, range(start, stop)),
                    weights=tuple(w for call in calls[:period] for w in self.list_call_weights(call)),
                    num_parameters=sum(math.prod(self.program.states[s].shape) for s in parameters),
                    parameter_bytes=sum(kept_bytes(self.program, s) for s in parameters),
                    recomputed=start in recomputed,
                    selective=start in selective,
                    prologue=calls[0].prologue,
                    everywhere=any(v in self.shared for v in calls[0].outputs),
                )
            )
        return tuple(made)

    def list_call_weights(self, call: Any) -> list[Weight]:
        gathered = self.program.zero == 3 and self.program.size("dp_shard") * self.program.size("cp") > 1
        return block_weights(self.program.blocks[call.block], call, self.program.states, gathered)

    def sum_collective_traffic(self, stage: int, calls: range) -> tuple[CollectiveTotal, ...]:
        sizes: dict[tuple[str, str, Direction], list[int]] = {}
        for i in calls:
            call = self.program.stages[stage].calls[i]
            recomputed = i in self.program.stages[stage].checkpoint_calls
            for use in self.list_call_collectives(call):
                directions: list[Direction] = [use.direction]
                if use.direction == "forward" and recomputed:
                    directions.append("backward")
                for direction in directions:
                    sizes.setdefault((use.op, use.axis, direction), []).append(use.num_bytes)
        return tuple(CollectiveTotal(*key, len(all_), sum(all_), len(set(all_)) == 1) for key, all_ in sizes.items())

    def list_call_collectives(self, call: Any) -> tuple[BlockCollective, ...]:
        program = self.program
        train = program.objective == "train"
        grads = tuple(train and program.states[s].requires_grad for s in call.states) + tuple(
            train and v in program.values and program.values[v].requires_grad for v in call.inputs
        )
        key = (call.block, grads)
        if key not in self._collectives:
            self._collectives[key] = block_collectives(program.blocks[call.block], grads)
        return self._collectives[key]

    def value_bytes(self, names: Sequence[str], gradients: bool = False) -> int:
        values = [self.program.values[n] for n in names if n in self.program.values]
        return sum(tensor_bytes(v.shape, v.dtype) for v in values if v.requires_grad or not gradients)

    def find_value_flows(self, stages: Sequence[StageOutline]) -> list[ValueFlow]:
        program = self.program
        made: dict[str, list[tuple[int, int]]] = {}
        for stage in stages:
            for group in stage.groups:
                for call in program.stages[stage.index].calls[group.start : group.stop]:
                    for value in call.outputs:
                        made.setdefault(value, []).append((stage.index, group.index))
        between: dict[tuple[tuple[int, int], tuple[int, int]], dict[str, None]] = {}
        for stage in stages:
            for group in stage.groups:
                target = (stage.index, group.index)
                for call in program.stages[stage.index].calls[group.start : group.stop]:
                    for value in call.inputs:
                        places = made.get(value, [])
                        source = next((p for p in places if p[0] == stage.index), places[0] if places else target)
                        if source != target:
                            between.setdefault((source, target), {})[value] = None
        train = program.objective == "train"
        return [
            ValueFlow(
                source,
                target,
                tuple(values),
                self.value_bytes(tuple(values)),
                self.value_bytes(tuple(values), gradients=True) if train else 0,
                hops=target[0] - source[0],
            )
            for (source, target), values in between.items()
        ]

    def list_stage_transfers(self) -> list[StageTransfer]:
        directions: dict[str, Direction] = {"SEND_F": "forward", "SEND_B": "backward"}
        values: dict[tuple[int, int, Direction], dict[str, None]] = {}
        for index, stage in enumerate(self.program.stages):
            for instruction in stage.instructions:
                if instruction.op in directions and _is_first_microbatch(instruction) and instruction.peer is not None:
                    key = (index, instruction.peer, directions[instruction.op])
                    values.setdefault(key, {}).update(dict.fromkeys(instruction.values))
        return [
            StageTransfer(source, target, direction, self.value_bytes(tuple(names)), tuple(names))
            for (source, target, direction), names in values.items()
        ]

    def find_tied_weights(self, stages: Sequence[StageOutline]) -> list[TiedWeight]:
        readers: dict[str, dict[tuple[int, int], None]] = {}
        for stage in stages:
            for group in stage.groups:
                for call in self.program.stages[stage.index].calls[group.start : group.stop]:
                    for state in call.states:
                        readers.setdefault(state, {})[stage.index, group.index] = None
        return [
            TiedWeight(name, state.aliases, tuple(readers[name]), state_sizes(self.program, name).gradient_piece)
            for name, state in self.program.states.items()
            if state.kind == "parameter" and len(readers.get(name, ())) > 1
        ]


def _is_first_microbatch(instruction: Instruction) -> bool:
    return instruction.microbatch in (0, None)
