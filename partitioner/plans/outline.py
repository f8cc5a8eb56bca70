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
from partitioner.passes.ir.layouts import REST, TOTALS
from partitioner.plans.block_outline import BlockCollective, Weight, block_collectives, block_weights
from partitioner.runtime.program.buckets import Bucket
from partitioner.runtime.program.instructions import Instruction, count_repetitions
from partitioner.runtime.program.program import CallData, Program, Stage
from partitioner.runtime.program.sharded_buckets import count_gradient_shards, list_all_reduce_axes, zero_axes
from partitioner.runtime.program.state_bytes import state_sizes
from partitioner.units import bytes_text, format_plural


def group_notes(calls: CallGroup) -> list[str]:
    """Return short texts for pictures on unusual properties of ``calls``, a group of block calls (such as layers): the
    calls are recomputed in backward, in full or in part; they run before the pipeline starts; or each stage that reads
    the results of the calls computes them for itself."""
    notes = (
        ("recomputed in backward", calls.recomputed),
        ("recomputed in part in backward", calls.selective),
        (_OF_TOTALS, calls.prologue and any(block.endswith(TOTALS) for block in calls.blocks)),
        ("before the pipeline starts", calls.prologue),
        ("computed by each stage that reads it", calls.everywhere and not calls.prologue),
    )
    return [note for note, holds in notes if holds]


_COMMON = "shared"  # name of the blocks that compute what several layers read, which a module can have, too
_OF_TOTALS = "such as the number of targets"

BUCKET_OPS = {"GATHER": "all_gather", "SCATTER": "reduce_scatter", "REDUCE": "all_reduce"}


def tensor_bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * get_dtype_itemsize(dtype)


def kept_bytes(program: Program, state: str) -> int:
    """Return the bytes of a parameter or buffer of ``program`` that a rank holds during the whole step: with ZeRO-3 the
    bytes of the rank's part of the flattened tensor, otherwise of its tensor-parallel shard. ``state``: name of the
    parameter or buffer.
    """
    sizes = state_sizes(program, state)
    return sizes.piece if program.zero == 3 else sizes.part


Exchange = tuple[str, str, str]  # collective, axes, what is moved


@dataclass(frozen=True)
class ExchangeTotal:
    """Totals of one rank in one step over all transfers of buckets (gradients or parameters that one collective moves)
    with the same collective, mesh axes and contents.

    ``transfers``: number of collectives. ``buckets``: number of different buckets that they move. ``num_bytes``: bytes
    of all transfers together.
    """

    transfers: int
    buckets: int
    num_bytes: int


def exchange_totals(program: Program, stage: Stage) -> dict[Exchange, ExchangeTotal]:
    """Return the totals of the transfers of gradient and parameter buckets (tensors that are communicated together)
    that each rank of ``stage``, a pipeline stage of ``program``, makes in one step. A key is (collective, axes joined
    by ``×``, what is moved), such as ``("all_reduce", "dp×cp", "gradients")``."""
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
    """Return two values on one transfer of ``bucket``, a group of parameters or gradients of ``program`` that are
    communicated together. The first is a tuple (collective, mesh axes joined by ``×``, contents such as ``gradients``);
    the second is the bytes of the transfer on one rank.

    ``op``: the instruction that transfers: ``GATHER`` (parameters), ``SCATTER`` or ``REDUCE`` (gradients). ``axes``:
    the mesh axes named in the instruction; empty: the axes over which the bucket is usually transferred.
    """
    level = bucket.levels.index(axes) if axes else len(bucket.levels)
    size = "gradient_piece" if axes or op == "REDUCE" else "part" if op == "GATHER" else "gradient"
    moved = sum(getattr(state_sizes(program, state), size) for state in bucket.states)
    if axes or op == "REDUCE":
        moved //= count_gradient_shards(program, bucket, level)
    axes = axes or (list_all_reduce_axes(program, bucket) if op == "REDUCE" else zero_axes(program, bucket.states))
    what, kind = "parameters" if size == "part" else "gradients", BUCKET_OPS[op]
    if bucket.compression and what == "gradients" and level == max(0, len(bucket.levels) - 1) and op != "REDUCE":
        from partitioner.runtime.program.codecs import wire_share  # imported late: it imports PyTorch

        moved = int(
            moved * wire_share(bucket.compression, get_dtype_itemsize(sum_type(program.states[bucket.states[0]].dtype)))
        )
        what = f"gradients in {bucket.compression}"
        kind = "all_to_all" if op == "SCATTER" else kind
    return (kind, "×".join(axes), what), moved


Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class CollectiveTotal:
    """Collectives of one kind on one rank, added up. Collectives inside block calls (such as layers) are counted for
    one microbatch, transfers of buckets (parameters or gradients that one collective moves) for one step.

    ``op``: the collective, such as ``all_reduce``. ``axis``: the mesh axis, or several joined by ``×``. ``direction``:
    ``forward`` or ``backward``. ``count``: number of collectives. ``num_bytes``: their total bytes. ``even``: whether
    all have the same size. For transfers of buckets, ``what`` says what is moved, such as ``gradients``, and
    ``buckets`` is the number of different buckets.
    """

    op: str
    axis: str
    direction: Direction
    count: int
    num_bytes: int
    even: bool = True
    what: str = ""
    buckets: int = 0

    @property
    def transfers(self) -> str:
        """The transfers of buckets as text: ``4 buckets`` if each is transferred once, and ``64 transfers of 4
        buckets`` if buckets are transferred several times in a step, such as once for each microbatch."""
        buckets = format_plural(self.buckets, "bucket")
        return f"{format_plural(self.count, 'transfer')} of {buckets}" if self.count > self.buckets else buckets

    def amount(self, calls: int = 1) -> str:
        """Return the number and the size of these collectives in one block call (such as a layer) as text:
        ``2 × 32 MiB`` if all have one size, ``24 MiB in 3`` if sizes differ. ``calls``: number of block calls over
        which the collectives are spread evenly; if they do not divide evenly, the text gives the total of all calls."""
        if self.count % calls:
            return f"{self.count} in {calls} calls, {bytes_text(self.num_bytes)}"
        count, total = self.count // calls, self.num_bytes / calls
        return f"{count} × {bytes_text(total / count)}" if self.even else f"{bytes_text(total)} in {count}"


@dataclass(frozen=True)
class CallGroup:
    """Consecutive block calls (such as decoder layers) of one stage in which a sequence of blocks is repeated.

    ``stage``: index of the stage. ``index``: index of the group in the stage. ``start``, ``stop``: the range ``[start,
    stop)`` of positions of its calls in the stage. ``blocks``: the names of the repeated blocks. ``title``: these names
    as text for reports, such as ``layers.* + norm``. ``count``: how often the sequence of blocks is repeated.
    ``paths``: the module paths of the calls as text. ``members``: the module path of the first call of each repetition.
    ``collectives``: totals over all calls of the group, for one rank and one microbatch. ``weights``: the parameters of
    one repetition.

    ``num_parameters``: elements of the parameters before sharding. ``parameter_bytes``: bytes of these parameters that
    one rank holds. ``recomputed``, ``selective``: whether the backward recomputes all of each call, or a part.
    ``prologue``: whether the calls run before the pipeline starts. ``everywhere``: whether each stage that reads the
    results computes them for itself. ``chunk``: which of its rank's virtual stages the calls belong to, from 0;
    ``None`` if they belong to none, because they run before the pipeline starts or on several stages.
    """

    stage: int
    index: int
    start: int
    stop: int
    blocks: tuple[str, ...]
    title: str
    count: int
    paths: str
    members: tuple[str, ...]
    collectives: tuple[CollectiveTotal, ...]
    weights: tuple[Weight, ...]
    num_parameters: int
    parameter_bytes: int
    recomputed: bool = False
    selective: bool = False
    prologue: bool = False
    everywhere: bool = False
    chunk: int | None = None


@dataclass(frozen=True)
class ValueFlow:
    """Values that one group of block calls (such as consecutive layers) of the model computes and another group reads.

    ``source``, ``target``: the group that computes them and the group that reads them, as (index of the stage, index of
    the group in it). ``values``: names of the values. ``forward_bytes``: bytes of the values on one rank for one
    microbatch. ``backward_bytes``: bytes of their gradients. ``hops``: index of the reading stage minus index of the
    computing stage; 0 inside a stage.
    """

    source: tuple[int, int]
    target: tuple[int, int]
    values: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int
    hops: int


@dataclass(frozen=True)
class StageTransfer:
    """The values or gradients that one stage sends to another for one microbatch, including those that it only
    forwards.

    ``source``, ``target``: indices of the two stages. ``direction``: ``forward`` for values, ``backward`` for their
    gradients. ``num_bytes``: bytes on one rank. ``values``: names of the values.
    """

    source: int
    target: int
    direction: Direction
    num_bytes: int
    values: tuple[str, ...]


@dataclass(frozen=True)
class TiedWeight:
    """A parameter that several groups of block calls (such as consecutive layers) of the model read, so that its
    gradients from all of them are summed.

    ``state``: name of the parameter. ``aliases``: its further names in the model. ``places``: the groups that read it,
    as (index of the stage, index of the group in it). ``num_bytes``: bytes of its gradient on one rank.
    """

    state: str
    aliases: tuple[str, ...]
    places: tuple[tuple[int, int], ...]
    num_bytes: int


@dataclass(frozen=True)
class StageOutline:
    """Summary of what each rank of one pipeline stage holds, computes and transfers.

    ``index``: index of the stage. ``ranks``: its ranks. ``groups``: its block calls (such as layers), as groups in
    which a sequence of blocks is repeated. ``num_calls``: number of block calls. ``num_parameters``: elements of the
    parameters before sharding. ``parameter_bytes``: bytes of these parameters that one rank holds. ``reductions``:
    transfers of gradient and parameter buckets in one step. ``loads``: paths of the model inputs that the stage reads.
    """

    index: int
    ranks: tuple[int, ...]
    groups: tuple[CallGroup, ...]
    num_calls: int
    num_parameters: int
    parameter_bytes: int
    reductions: tuple[CollectiveTotal, ...]  # transfers of gradients and parameters in one step
    loads: tuple[str, ...]


@dataclass(frozen=True)
class Outline:
    """Summary of a program (what each rank executes) for pictures and reports.

    ``stages``: a summary of each pipeline stage. ``flows``: values that groups of block calls (such as layers) pass to
    each other. ``links``: what stages send to each other for one microbatch. ``ties``: parameters that several groups
    of calls read. ``num_parameters``: elements of all parameters of the model.
    """

    stages: tuple[StageOutline, ...]
    flows: tuple[ValueFlow, ...]
    links: tuple[StageTransfer, ...]
    ties: tuple[TiedWeight, ...]
    num_parameters: int

    def group(self, place: tuple[int, int]) -> CallGroup:
        return self.stages[place[0]].groups[place[1]]


def outline_program(program: Program) -> Outline:
    """Return the outline of ``program`` (what each rank executes): a summary of each stage, and the values and tied
    weights that connect stages."""
    return _Outliner(program).build_outline()


def fold_runs(names: Sequence[Any], longest: int = 4) -> list[tuple[int, int, int]]:
    """Split ``names`` into parts in which a pattern repeats, as triples ``(start, period, repeats)``: from index
    ``start`` on, a pattern of ``period`` names (at most ``longest``) occurs ``repeats`` times.

    At each index the pattern is chosen whose repetitions cover the most names, and the shortest among equals. ``a b b b
    c d c d`` gives ``a`` once, ``b`` three times, ``c d`` twice.
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
    """Return ``paths``, the module paths of consecutive layers or other pieces of the model, as one text from the first
    to the last: ``model.layers.0–7``. If the two differ in more than one part, both are written in full.
    """
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


def describe_block(program: Program, name: str) -> str:
    """Return the name for reports of a block (such as a decoder layer) of ``program``. ``name``: its name in the
    program.

    A block that needs totals over the whole batch, such as the number of targets, is two blocks in the program. The
    first computes the totals before the pipeline starts, and is called ``sums over the batch for`` the undivided block.
    The second does the rest; it gets the name of the undivided block.

    A block that computes values for several layers, and that is not a module of the model, is called ``layer inputs``,
    with the path of the module that has most of its operators: ``layer inputs (model.rotary_emb)``.
    """
    if name.endswith(TOTALS):
        return f"sums over the batch for {name.removesuffix(TOTALS)}"
    if _is_common(program, name):
        paths = Counter(str(node["path"]) for node in program.blocks[name].nodes if node.get("path"))
        return f"layer inputs ({paths.most_common(1)[0][0]})" if paths else "layer inputs"
    if name.split("#")[0] == _COMMON:  # a module with this name
        return _COMMON
    own = name.removesuffix(REST)
    return own if own + TOTALS in program.blocks else name


def _describe_path(program: Program, call: CallData) -> str:
    """Return the module path of ``call``, or the name of its block for reports if the block computes totals over the
    batch or is not a module of the model."""
    named = call.block.split("#")[0] == _COMMON or call.block.endswith(TOTALS)
    return describe_block(program, call.block) if named else call.path


def _is_common(program: Program, name: str) -> bool:
    """Return whether the block ``name`` of ``program`` computes values that several layers read. False if it is a
    module of the model that happens to have such a name."""
    paths = (str(node.get("path", "")) for node in program.blocks[name].nodes)
    return name.split("#")[0] == _COMMON and all(path.split(".")[0] != _COMMON for path in paths)


def chunk_starts(stage: Stage) -> list[int]:
    """Return the index of the first block call (such as a layer) of each virtual stage of ``stage``, in increasing
    order. The indices are those of the stage's list of block calls."""
    starts: set[int] = set()
    spans: dict[int | None, list[tuple[int, int]]] = {}
    last: tuple[int | None, int] | None = None  # microbatch and end of the forward just before
    for instruction in stage.instructions:
        if instruction.op == "F" and instruction.calls:
            start, end = instruction.calls
            if last != (instruction.microbatch, start):
                starts.add(start)
            spans.setdefault(instruction.microbatch, []).append((start, end))
            last = instruction.microbatch, end
        elif instruction.op in ("RECV_F", "SEND_F", "B", "I", "W"):
            last = None
    # A forward instruction runs a whole virtual stage, or a part of one, such as one call. Most microbatches have whole
    # ones, which show where one virtual stage ends and the next one begins if a rank runs both without a pause.
    fewest = min(spans.values(), key=len, default=[])
    if all(end - start > 1 for start, end in fewest) or len(fewest) < max(map(len, spans.values())):
        starts.update(start for start, _ in fewest)
    return sorted(starts)


class _Outliner:
    """Builds the summary of ``program`` (what each rank executes) that pictures and reports show: its stages, and the
    values, transfers and shared parameters that connect them.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._collectives: dict[tuple[str, tuple[bool, ...]], tuple[BlockCollective, ...]] = {}

    def build_outline(self) -> Outline:
        """Return the summary of the program (what each rank executes): its stages, and the values, transfers and shared
        parameters that connect them.
        """
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
        """Return the names of the values that several pipeline stages compute, each for itself, so that nothing is
        sent."""
        made = Counter(v for stage in self.program.stages for call in stage.calls for v in call.outputs)
        return {value for value, times in made.items() if times > 1}

    def outline_stage(self, index: int) -> StageOutline:
        """Return the summary of the pipeline stage number ``index``."""
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
        """Return the block calls (such as layers) of the pipeline stage number ``index``, in order, as groups in which
        a sequence of blocks is repeated.
        """
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
            members = tuple(_describe_path(self.program, call) for call in calls[::period])
            made.append(
                CallGroup(
                    stage=index,
                    index=len(made),
                    start=start,
                    stop=stop,
                    blocks=tuple(c.block for c in calls[:period]),
                    title=" + ".join(describe_block(self.program, c.block) for c in calls[:period]),
                    count=repeats,
                    paths=path_range(members),
                    members=members,
                    collectives=self.sum_collective_traffic(index, range(start, stop)),
                    weights=tuple(w for call in calls[:period] for w in self.list_call_weights(call)),
                    num_parameters=sum(math.prod(self.program.states[s].shape) for s in parameters),
                    parameter_bytes=sum(kept_bytes(self.program, s) for s in parameters),
                    recomputed=start in recomputed,
                    selective=start in selective,
                    prologue=calls[0].prologue,
                    everywhere=any(v in self.shared for v in calls[0].outputs),
                    chunk=self.find_chunk(calls[0], start, starts),
                )
            )
        return tuple(made)

    def find_chunk(self, call: CallData, position: int, starts: Sequence[int]) -> int | None:
        """Return which of its rank's virtual stages ``call``, the block call at ``position`` of a pipeline stage,
        belongs to, from 0; ``None`` if it runs before the pipeline starts or on several stages. ``starts``: the
        positions at which the virtual stages begin.
        """
        if call.prologue or any(value in self.shared for value in call.outputs):
            return None
        return max(0, bisect_right(starts, position) - 1)

    def list_call_weights(self, call: Any) -> list[Weight]:
        gathered = self.program.zero == 3 and self.program.size("dp_shard") * self.program.size("cp") > 1
        return block_weights(self.program.blocks[call.block], call, self.program.states, gathered)

    def sum_collective_traffic(self, stage: int, calls: range) -> tuple[CollectiveTotal, ...]:
        """Return the totals of the collectives in some block calls (such as layers), one entry for each combination of
        collective, mesh axis and direction, for one rank and one microbatch. Collectives of recomputed forwards count
        as backward, too. ``stage``: index of the stage. ``calls``: positions of the calls in it.
        """
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
        """Return the collectives of one block call (such as a layer) of the program: those of its forward, then those
        of its backward. ``call``: the call, an entry of the list of calls of a stage."""
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
        """Return the values that one group of block calls (such as consecutive layers) computes and another one reads,
        one entry for each pair of groups. ``stages``: the summaries of all stages, which have the groups.
        """
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
        """Return the values and gradients that stages send for one microbatch, one entry for each sender, receiver and
        direction.
        """
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
        """Return the parameters that more than one group of block calls (such as consecutive layers) reads. ``stages``:
        the summaries of all stages, which have the groups.
        """
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
