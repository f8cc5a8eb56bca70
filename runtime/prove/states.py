"""Check states and gradient buckets, and track the collectives of a rank in the order of its instructions.

Parameters, buffers and constants must have valid layouts, stages and buckets. :class:`Parameters` checks that a sharded
parameter is gathered before a call reads it. :class:`PendingReductions` tracks the reductions in progress, and which of
them must end before another one starts. :func:`list_collective_bundles` groups consecutive collectives of a call over
the same axes, because a rank that enters one of them enters all.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator
from itertools import groupby
from operator import itemgetter

from partitioner.passes.ir.layouts import Layout, can_shard_evenly
from partitioner.passes.ir.serialize import dtype_of
from partitioner.runtime.program.analysis import CallFacts, ProgramFacts
from partitioner.runtime.program.buckets import Bucket
from partitioner.runtime.program.mesh import AXES, EXPERT_AXES, HYBRID_AXES
from partitioner.runtime.program.program import Program, StateData
from partitioner.runtime.program.sharded_buckets import (
    GATHERING,
    ScatterQueue,
    Turn,
    find_level_problem,
    split_axes,
    zero_axes,
)
from partitioner.runtime.prove.errors import FaultLocation, Refusal, format_collective_use


def check_state(facts: ProgramFacts, name: str) -> None:
    """Raise :class:`Refusal` unless the layouts, pipeline stages and ZeRO axes of the parameter, buffer or constant
    called ``name`` are valid, and its gradient is summed over the right mesh axes. ``facts``: the program of all ranks,
    with the gradients, collectives and memory of its block calls (such as layers).
    """
    problem = _find_state_problem(facts, name)
    if problem:
        stages = [s for s in facts.program.states[name].stages if 0 <= s < len(facts.program.stages)]
        raise Refusal(
            "structure", f"the state {name!r} {problem}", FaultLocation(stage=min(stages, default=0), state=name)
        )


def _find_state_problem(facts: ProgramFacts, name: str) -> str:
    """Return why the description of the parameter, buffer or constant called ``name`` is not valid, as the end of an
    error message; empty if it is valid. ``facts``: the program of all ranks, with the gradients, collectives and memory
    of its block calls (such as layers).
    """
    program, state = facts.program, facts.program.states[name]
    tp = program.mesh.get("tp", 1)
    try:
        layout, over_ep = Layout.parse(state.layout), Layout.parse(state.expert_layout)
        dtype_of(state.dtype)
    except ValueError as error:
        return f"is malformed: {error}"
    if layout.kind == "P" or not can_shard_evenly(layout, state.shape, tp):
        return f"of shape {state.shape} cannot be {layout} over tp={tp}"
    if over_ep.kind not in ("S", "R") or not can_shard_evenly(over_ep, state.shape, program.size("ep")):
        return f"of shape {state.shape} cannot be {over_ep} over ep={program.size('ep')}"
    if over_ep.is_shard and layout.is_shard and over_ep.dim == layout.dim:
        return f"is cut on dim {layout.dim} both over tp and over ep"
    if tuple(sorted(set(state.stages))) != state.stages or not set(range(len(program.stages))) >= set(state.stages):
        return f"is on the stages {state.stages}; expected some of 0 to {len(program.stages) - 1}, in order"
    readers = set(facts.reading_stages.get(name, ()))
    if state.update:
        readers |= {s for s, stage in enumerate(program.stages) for c in stage.calls if state.update in c.outputs}
    held = set(state.stages)  # without training, it may also be on stages where only other programs read it
    if not held or readers - held or (readers and readers != held and program.objective == "train"):
        return f"is on the stages {state.stages} and read on {tuple(sorted(readers))}"
    known = (*AXES[1:], *EXPERT_AXES)
    if set(state.grad_axes) - set(known):
        return f"has a gradient to be added up over {state.grad_axes}; expected some of {', '.join(known)}"
    if name in facts.with_gradient and not _is_gradient_summed(program, state, layout, over_ep):
        where = f"{layout} over tp" + (f" and {over_ep} over ep" if over_ep.is_shard else "")
        return f"is {where}, but its gradient is added up over {state.grad_axes or 'no axis'}"
    shared = _zero_problem(facts, name)
    if shared:
        return shared
    if state.kind == "constant" and compute_nested_shape(program.constants.get(name)) != state.shape:
        return f"has shape {state.shape}, its data {compute_nested_shape(program.constants.get(name))}"
    return ""


def _zero_problem(facts: ProgramFacts, name: str) -> str:
    """Return why ZeRO cannot divide the parameter called ``name`` as the program says, as the end of an error message;
    empty if it can. Ranks that divide a parameter must hold the same shard of it, and must sum its gradient over the
    mesh axes of ZeRO. ``facts``: the program of all ranks, with the gradients, collectives and memory of its block
    calls (such as layers).
    """
    program, state = facts.program, facts.program.states[name]
    if not state.zero_axes:
        return ""
    axes = split_axes(program, state.zero_axes)
    experts = bool(state.expert_layout != "R" and program.size("ep") > 1)
    known = {"edp", *HYBRID_AXES[2:]} if experts else {"dp", "cp", *HYBRID_AXES[:2]}
    if axes != state.zero_axes or set(axes) - known:
        return (
            f"is shared over {state.zero_axes}; expected axes with more than one rank among {', '.join(sorted(known))}"
        )
    if not program.zero:
        return f"is shared over {axes}, but the program shares no states (zero=0)"
    if state.kind != "parameter" or not state.shape:
        return f"is a {state.kind} of shape {state.shape} and shared over {axes}; expected a parameter with dims"
    if name not in facts.with_gradient:
        gathered = program.zero == 3 or program.objective == "infer"  # another program may train it
        return "" if gathered else f"takes no gradient, but is shared over {axes} under zero={program.zero}"
    added = {*state.grad_axes, *(p for a in state.grad_axes for p in (f"{a}_shard", f"{a}_replicate"))}
    if not set(axes) <= added:
        return f"is shared over {axes}, but its gradient is added up over {state.grad_axes}"
    return ""


def _is_gradient_summed(program: Program, state: StateData, layout: Layout, over_ep: Layout) -> bool:
    """Return whether the gradient of the parameter that ``state`` describes is summed over exactly the mesh axes over
    which it is a partial sum. For an expert, these are ``edp`` (its replicas) and, if its gradient is a partial sum
    over the ranks that share it, ``etp``. For other parameters only ``tp`` is checked. ``layout``, ``over_ep``: the
    parameter's layouts over ``tp`` and ``ep``. ``program``: the program of all ranks.
    """
    axes = split_axes(program, state.grad_axes)
    partial = layout.kind == "R'"
    if over_ep.is_shard and program.size("ep") > 1:
        return axes == split_axes(program, ("edp", "etp") if partial else ("edp",))
    return not set(axes) & set(EXPERT_AXES) and ("tp" in axes) == (partial and program.size("tp") > 1)


def compute_nested_shape(data: object) -> tuple[int, ...] | None:
    """Return the shape of the nested lists ``data``, the stored values of a constant, as a tuple of sizes; ``None`` if
    ``data`` is ``None``. Only the first element of each list is inspected.
    """
    shape: list[int] = []
    while isinstance(data, list | tuple):
        shape.append(len(data))
        data = data[0] if data else 0
    return None if data is None else tuple(shape)


def check_buckets(facts: ProgramFacts, stage: int) -> None:
    """Raise :class:`Refusal` if the gradient buckets of the pipeline stage ``stage`` (an index), or its lists of
    recomputed calls, are wrong. A bucket is a set of parameters whose gradients are reduced together. Each gradient
    that is a partial sum over mesh axes must be in exactly one bucket, with those axes. Each parameter that ZeRO shards
    must be in exactly one bucket, together with parameters that are sharded over the same axes. ``facts``: the program
    of all ranks, with the gradients, collectives and memory of its block calls (such as layers).
    """
    program, here = facts.program, facts.program.stages[stage]
    wanted: dict[str, tuple[str, ...]] = {}
    for name in facts.states_by_stage[stage]:
        state = program.states[name]
        axes = split_axes(program, state.grad_axes) if name in facts.with_gradient else ()
        if axes or state.zero_axes:
            wanted[name] = axes
    found: set[str] = set()
    for number, bucket in enumerate(here.buckets):
        problem = ""
        for name in bucket.states:
            if name not in wanted:
                problem = f"has {name!r}, which has no gradient to add up on this stage"
            elif name in found:
                problem = f"has {name!r} a second time"
            elif set(bucket.axes) - {*AXES, *EXPERT_AXES} or split_axes(program, bucket.axes) != wanted[name]:
                problem = f"is added up over {bucket.axes}, but the gradient of {name!r} is a sum over {wanted[name]}"
            elif program.states[name].dtype != program.states[bucket.states[0]].dtype:
                problem = "has gradients of several types"
            elif program.states[name].zero_axes != program.states[bucket.states[0]].zero_axes:
                problem = "has states that different ranks share"
            found.add(name)
        if not problem:
            problem = find_level_problem(program, bucket) if bucket.states else "has no gradients"
        if problem:
            raise Refusal("structure", f"bucket {number} {problem}", FaultLocation(stage=stage, bucket=number))
    for name, axes in wanted.items():
        if name not in found:
            shared = program.states[name].zero_axes
            what = f"which is shared over {shared}" if shared else f"whose gradient is a sum over {axes}"
            problem = f"no bucket has {name!r}, {what}"
            raise Refusal("structure", problem, FaultLocation(stage=stage, state=name))
    for position in here.checkpoint_calls:
        if not 0 <= position < len(here.calls):
            problem = f"call {position} is to be recomputed; the stage has {len(here.calls)} calls"
            raise Refusal("structure", problem, FaultLocation(stage=stage))
    for position in here.selective_calls:
        problem = ""
        if not 0 <= position < len(here.calls):
            problem = f"call {position} is to be recomputed in part; the stage has {len(here.calls)} calls"
        elif position in here.checkpoint_calls:
            problem = f"call {position} is to be recomputed whole, and in part"
        elif unknown := set(program.blocks[here.calls[position].block].again) - _list_node_names(
            program, stage, position
        ):
            problem = f"call {position} is to recompute {min(unknown)!r}, which its block does not have"
        if problem:
            raise Refusal("structure", problem, FaultLocation(stage=stage))


def _list_node_names(program: Program, stage: int, position: int) -> set[str]:
    """Return the names of the nodes in the graph of the block call (such as a layer) at ``position`` on the pipeline
    stage ``stage`` (an index). ``program``: the program of all ranks.
    """
    return {node["name"] for node in program.blocks[program.stages[stage].calls[position].block].nodes}


class Parameters:
    """Checks that parameters that ZeRO shards are gathered before a block call (such as a layer) reads them, and freed
    afterwards under ZeRO 3. Parameters that are gathered together form a bucket, identified by its index on the
    pipeline stage.
    """

    def __init__(self, facts: ProgramFacts, stage: int) -> None:
        """Start before the first instruction of a rank of the pipeline stage ``stage`` (an index), when nothing is
        gathered. ``facts``: the program of all ranks, with the gradients, collectives and memory of its block calls
        (such as layers).
        """
        self.program = facts.program
        self.here = facts.program.stages[stage]
        self.shared = {n: b.states for n, b in enumerate(self.here.buckets) if zero_axes(self.program, b.states)}
        home = {state: number for number, states in self.shared.items() for state in states}
        self.needs = [sorted({home[s] for s in call.states if s in home}) for call in self.here.calls]
        self.there: dict[int, int] = {}  # bucket -> the instruction that gathered it
        self.freed: dict[int, int] = {}
        self.times: Counter[int] = Counter()
        self.under_way: dict[int, Hashable] = {}  # bucket -> key of an all-gather that was not waited for

    def states(self, number: int) -> tuple[str, ...]:
        return self.here.buckets[number].states

    def axes(self, number: int) -> tuple[str, ...]:
        return split_axes(self.program, zero_axes(self.program, self.states(number)))

    def gather(self, number: int, index: int) -> Hashable:
        """Record an all-gather of the parameters of bucket ``number`` (index of a set of parameters that are gathered
        together). Return a key of the collective, which must be equal on all ranks that take part. ``index``: position
        of the instruction. Raise :class:`Refusal` if the parameters are not sharded, or are already gathered.
        """
        if number not in self.shared:
            raise Refusal("fields", f"gathers bucket {number}, which is not sharded by ZeRO: remove the GATHER")
        if number in self.there:
            raise Refusal(
                "twice", f"bucket {number} was gathered at instruction {self.there[number]}: remove one GATHER"
            )
        self.there[number] = index
        self.times[number] += 1
        self.under_way[number] = "GATHER", self.shared[number], self.times[number]
        return self.under_way[number]

    def read(self, position: int) -> Iterator[Hashable]:
        """Yield the keys of the all-gathers that must end before a block call (such as a layer) runs. ``position``: the
        call's position on the stage. Raise :class:`Refusal` if a parameter that the call reads is not gathered.
        """
        for number in self.needs[position]:
            if number not in self.there:
                gone = f"freed at instruction {self.freed[number]}" if number in self.freed else "never gathered"
                state = next(s for s in self.here.calls[position].states if s in self.shared[number])
                raise Refusal(
                    "order", f"{self.here.calls[position].path!r} reads {state!r}, which was {gone}: add a GATHER"
                )
            if number in self.under_way:
                yield self.under_way.pop(number)

    def free(self, number: int, index: int) -> Hashable:
        """Record that the instruction at position ``index`` frees the gathered parameters of bucket ``number`` (index
        of a set of parameters that are gathered together). If their all-gather has not been waited for, return its key,
        because it must end first; otherwise return ``None``. Raise :class:`Refusal` if the parameters are not gathered,
        or must stay gathered.
        """
        if number not in self.shared or self.program.zero < 3:
            raise Refusal("fields", f"frees bucket {number}, whose parameters stay on the device: remove the FREE")
        if number not in self.there:
            what = f"was freed at instruction {self.freed[number]}" if number in self.freed else "was never gathered"
            raise Refusal(
                "twice" if number in self.freed else "order", f"frees bucket {number}, which {what}: remove the FREE"
            )
        del self.there[number]
        self.freed[number] = index
        return self.under_way.pop(number, None)

    def finish(self) -> None:
        for number, index in self.there.items():
            if self.program.zero == 3:
                raise Refusal(
                    "leak", f"bucket {number} is gathered here and never freed: add a FREE", FaultLocation(index=index)
                )


class PendingReductions:
    """Tracks the collectives in progress on one rank that reduce gradients. Methods that start a collective return the
    keys of the earlier ones that must end first.
    """

    def __init__(self) -> None:
        self._scatters: Counter[int] = Counter()
        self._scattering = ScatterQueue[tuple[int, Hashable]]()  # (bucket, key)
        # bucket -> key of a collective of its reduction that was not waited for
        self._turning: dict[int, Hashable] = {}
        self._gathering: deque[int] = deque()  # buckets whose last collective is an all-gather that was not waited for

    def scatter(self, number: int, bucket: Bucket) -> tuple[list[Hashable], Hashable]:
        """Record the reduce-scatter over ZeRO axes of the gradients of ``bucket``, parameters that are reduced
        together. Return the keys of the collectives that must end first, and the key of this one, on which all
        participants must agree. ``number``: index of the bucket.
        """
        waits = [what for _, what in self._scattering.list_blocking()]
        self._scatters[number] += 1
        what = "SCATTER", bucket.states, bucket.compression, self._scatters[number]
        self._scattering.begin((number, what))
        return waits, what

    def computed(self) -> None:
        """Record that a backward instruction has run. The next reduce-scatter then starts only after all in progress
        have ended.
        """
        self._scattering.computed()

    def add_collective(self, number: int, bucket: Bucket, turn: Turn) -> tuple[list[Hashable], Hashable]:
        """Record the next collective that reduces the gradients of ``bucket``, parameters that are reduced together.
        Return the keys of the collectives that must end first, and the key of this one, on which all participants must
        agree. ``number``: index of the bucket. ``turn``: (SCATTER, REDUCE or GATHER; mesh axes).
        """
        waits = [*self.ended(number)]
        if turn[0] == "GATHER" and turn[1] == bucket.levels[0]:
            while len(self._gathering) >= GATHERING:
                waits += self._end_turning_reduction(self._gathering.popleft())
            self._gathering.append(number)
        what = turn[0], bucket.states, bucket.compression, turn[1]
        self._turning[number] = what
        return waits, what

    def ended(self, number: int) -> Iterator[Hashable]:
        """Mark the collectives in progress for the gradients of bucket ``number`` (index of a set of parameters that
        are reduced together) as ended, and yield the key of each. Reduce-scatters that were started earlier end, too,
        also those of other buckets.
        """
        while any(bucket == number for bucket, _ in self._scattering):
            yield self._scattering.end_first()[1]
        yield from self._end_turning_reduction(number)

    def _end_turning_reduction(self, number: int) -> Iterator[Hashable]:
        if number in self._turning:
            yield self._turning.pop(number)


# axes, key on which ranks must agree, description, node, number of collectives
Bundle = tuple[tuple[str, ...], Hashable, str, str, int]


def list_collective_bundles(program: Program, call: CallFacts, op: str, position: int) -> list[Bundle]:
    """Return the groups of consecutive collectives over the same mesh axes that one run of ``call``, an execution of a
    block, starts. Each group is a tuple (axes, key on which all ranks must agree, description of the first collective,
    name of its graph node, number of collectives). ``op``: the part that runs: "F" forward, "B" backward, "I" the half
    of the backward for inputs, "W" its half for weights. ``position``: the call's position on its pipeline stage.
    ``program``: the program of all ranks.
    """
    uses = [(split_axes(program, (u.axis,)), u) for u in call.collectives(op)]
    found: list[Bundle] = []
    for axes, group in groupby((pair for pair in uses if pair[0]), key=itemgetter(0)):
        row = [use for _, use in group]
        what = op, position, tuple((u.op, u.shape, u.dtype) for u in row)
        found.append(
            (axes, what, f"{format_collective_use(row[0])} in {op} of {call.data.path!r}", row[0].node, len(row))
        )
    return found
