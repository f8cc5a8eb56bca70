"""Assign the block calls (such as layers) to ranks, and route each value and gradient from stage to stage.

The schedule determines which rank holds each virtual stage. A value that a call of virtual stage ``k`` computes is
forwarded to ``k + 1``, ``k + 2``, ... until all ranks that read the value have received it. Nothing is sent between
virtual stages of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partitioner.passes.errors import PartitionError
from partitioner.passes.ir.gradient_flow import GradientFlow
from partitioner.passes.ir.model import FoldedModel
from partitioner.schedules.actions import group_stages_by_rank


class EmitError(PartitionError):
    """Error: no program can be built, because the given stages, layouts or numbers do not describe a pipeline."""


@dataclass(frozen=True)
class StageCalls:
    """The block calls (such as layers) that one pipeline rank runs, and what they read from outside the pipeline.

    ``calls``: indices of the calls in the model, in three parts: ``num_prologue`` calls that run before the pipeline
    starts (prologue), the calls that every stage runs for itself, and the calls of each virtual stage of the rank.
    ``chunks``: for each virtual stage, the range ``[start, end)`` of its positions in ``calls``. ``loads``: for each
    virtual stage, the names of the model inputs that no earlier virtual stage of this rank reads. ``prologue_loads``:
    names of the model inputs that the prologue reads. ``totals``: names of the values that the prologue computes and
    that are summed over the global batch, such as the number of targets.
    """

    calls: tuple[int, ...]
    num_prologue: int
    chunks: tuple[tuple[int, int], ...]  # for each virtual stage, its range [start, end) of ``calls``
    loads: tuple[tuple[str, ...], ...]  # for each virtual stage, the model inputs that it is the first to read
    prologue_loads: tuple[str, ...]
    totals: tuple[str, ...]

    def chunk_of(self, position: int) -> int:
        """Return the index, on this pipeline rank, of the virtual stage to which a block call (such as a layer)
        belongs, from 0. ``position``: position of the call in ``calls``, the list of all calls that the rank runs. It
        must be a call of a virtual stage, not one of the calls at the start of the list, which run before the pipeline
        starts or which every rank runs for itself."""
        return next(c for c, (start, end) in enumerate(self.chunks) if start <= position < end)

    def forward_range(self, chunk: int) -> tuple[int, int]:
        """Return the range ``[start, end)`` of positions in ``calls``, the list of all block calls (such as layers) of
        this pipeline rank, that a forward of one virtual stage runs. ``chunk``: index of the virtual stage on the rank,
        from 0. A forward of the virtual stage 0 also runs the calls that every rank runs for itself."""
        start, end = self.chunks[chunk]
        return (self.num_prologue, end) if chunk == 0 else (start, end)


@dataclass(frozen=True)
class Routes:
    """The pipeline rank of each virtual stage, and the values that are sent between virtual stages.

    ``ranks[k]``: the rank of virtual stage ``k``. ``stages``: the block calls (such as layers) of each rank.
    ``arriving[k]``: names of the values that virtual stage ``k`` receives from ``k - 1``. ``returning[k]``: names of
    the values in ``arriving[k]`` whose gradients are sent back. ``home``: name of a value -> the rank that provides it,
    for model outputs, the loss and the new values of buffers.
    """

    ranks: tuple[int, ...]
    stages: tuple[StageCalls, ...]
    arriving: tuple[tuple[str, ...], ...]
    returning: tuple[tuple[str, ...], ...]
    home: dict[str, int]


def make_routes(
    model: FoldedModel, stage_of_call: Sequence[int], num_stages: int, ranks: Sequence[int], flow: GradientFlow
) -> Routes:
    """Return the block calls (such as layers) that each pipeline rank runs, and the values that are sent between
    virtual stages.

    ``stage_of_call``: virtual stage of each call of ``model``, from 0. ``num_stages``: number of pipeline ranks.
    ``ranks``: rank of each virtual stage. ``flow``: which values have gradients.

    Raises :class:`EmitError` if ``stage_of_call`` does not describe a pipeline.
    """
    check_stages(model, stage_of_call, len(ranks))
    own = [
        [i for i, c in enumerate(model.calls) if not c.shared and not c.prologue and stage_of_call[i] == k]
        for k in range(len(ranks))
    ]
    made_at = {v: k for k, calls in enumerate(own) for i in calls for v in model.calls[i].outputs}
    leaving = [o.value for o in model.outputs if o.value is not None] + ([model.loss] if model.loss else [])
    leaving += model.updates.values()
    home = {v: ranks[made_at[v]] if v in made_at else ranks[-1] for v in leaving}
    stages = tuple(
        _stage_calls(
            model,
            [own[k] for k in stages],
            [v for v, at in home.items() if at == s and v not in made_at],
        )
        for s, stages in enumerate(group_stages_by_rank(ranks, num_stages))
    )
    arriving: list[list[str]] = [[] for _ in own]
    returning: list[list[str]] = [[] for _ in own]
    readers: dict[str, set[int]] = {v: set() for v in made_at}
    adders: dict[str, set[int]] = {v: set() for v in made_at}
    for k, calls in enumerate(own):
        for i in calls:
            for v in model.calls[i].inputs:
                if v in made_at:
                    readers[v].add(k)
            for v in flow.inputs[i]:
                adders[v].add(k)
    for value, start in made_at.items():
        adding = {ranks[a] for a in adders[value]}
        hops = _find_value_hops(start, readers[value], ranks)
        for k in hops:
            arriving[k].append(value)
            if _find_reached_ranks(k, hops, ranks) & adding:
                returning[k].append(value)
    return Routes(tuple(ranks), stages, tuple(map(tuple, arriving)), tuple(map(tuple, returning)), home)


def _find_value_hops(start: int, readers: set[int], ranks: Sequence[int]) -> list[int]:
    """Return the indices of the virtual stages that receive a value from the previous virtual stage, in increasing
    order. Each rank that reads or forwards the value receives it once, at its first virtual stage after ``start``.

    ``start``: index of the virtual stage that computes the value. ``readers``: indices of the virtual stages that read
    the value. ``ranks``: pipeline rank of each virtual stage.
    """
    hops: set[int] = set()
    for reader in sorted(readers):
        rank = ranks[reader]
        while rank != ranks[start]:
            hop = ranks.index(rank, start + 1)
            if hop in hops:
                break
            hops.add(hop)
            rank = ranks[hop - 1]
    return sorted(hops)


def _find_reached_ranks(hop: int, hops: Sequence[int], ranks: Sequence[int]) -> set[int]:
    """Return the pipeline ranks that get a value through one of its transfers: the receiver, and all ranks to which the
    value is forwarded from there. If one of these ranks computes a gradient of the value, the gradient is sent back
    along this transfer.

    ``hop``: index of the virtual stage that receives the transfer. ``hops``: indices of all virtual stages that receive
    the value, in increasing order. ``ranks``: rank of each virtual stage.
    """
    found = {ranks[hop]}
    for later in hops:
        if later > hop and ranks[later - 1] in found:
            found.add(ranks[later])
    return found


def check_stages(model: FoldedModel, stage_of_call: Sequence[int], num_stages: int) -> None:
    """Raise :class:`EmitError` unless ``stage_of_call`` has one entry for each block call (such as a layer) of
    ``model``, each entry is a valid index of a virtual stage, and the entries never decrease. Entries of calls that
    every stage may run are not checked. ``num_stages``: number of virtual stages."""
    if len(stage_of_call) != len(model.calls):
        raise EmitError(
            f"stage_of_call has {len(stage_of_call)} entries for {len(model.calls)} calls; give one for each"
        )
    before, before_path = 0, ""
    for call, stage in zip(model.calls, stage_of_call, strict=True):
        if call.shared or call.prologue:
            continue
        if not 0 <= stage < num_stages:
            raise EmitError(
                f"call {call.path!r} is on stage {stage}; expected one of the stages 0 to {num_stages - 1} of the "
                "pipeline"
            )
        if stage < before:
            raise EmitError(
                f"call {call.path!r} is on stage {stage} but {before_path!r} before it is on stage {before}; "
                "expected stages that do not decrease in the order of the calls"
            )
        before, before_path = stage, call.path


def _stage_calls(model: FoldedModel, chunks: Sequence[Sequence[int]], leaving: Sequence[str]) -> StageCalls:
    """Return the block calls (such as layers) of ``model`` that one pipeline rank runs: the calls of its virtual
    stages, and the calls outside of stages whose results it needs. The latter run before the pipeline starts, or on
    every rank that needs their results.

    ``chunks``: for each virtual stage of the rank, the indices of its calls in the model. ``leaving``: names of values
    that this rank provides as outputs of the model and that no virtual stage computes. Raise :class:`EmitError` if a
    call before the pipeline reads anything but inputs of the model.
    """
    producer = {v: i for i, c in enumerate(model.calls) for v in c.outputs}
    inputs = {i.value for i in model.inputs}
    common: set[int] = set()
    stack = [v for calls in chunks for i in calls for v in model.calls[i].inputs] + list(leaving)
    while stack:
        i = producer.get(stack.pop())
        if i is not None and i not in common and (model.calls[i].shared or model.calls[i].prologue):
            common.add(i)
            stack.extend(model.calls[i].inputs)
    prologue = sorted(i for i in common if model.calls[i].prologue)
    shared = sorted(i for i in common if not model.calls[i].prologue)
    for i in prologue:
        unknown = set(model.calls[i].inputs) - inputs
        if unknown:
            raise EmitError(f"prologue call {model.calls[i].path!r} reads {sorted(unknown)}, not inputs of the model")
    position = len(prologue) + len(shared)
    ranges: list[tuple[int, int]] = []
    loads: list[tuple[str, ...]] = []
    known: set[str] = set()
    for c, calls in enumerate(chunks):
        ranges.append((position, position + len(calls)))
        position += len(calls)
        read = [v for i in ([*shared, *calls] if c == 0 else calls) for v in model.calls[i].inputs]
        read += leaving if c == 0 else []
        loads.append(tuple(v for v in dict.fromkeys(read) if v in inputs and v not in known))
        known |= set(loads[-1])
    return StageCalls(
        calls=(*prologue, *shared, *(i for calls in chunks for i in calls)),
        num_prologue=len(prologue),
        chunks=tuple(ranges),
        loads=tuple(loads),
        prologue_loads=tuple(dict.fromkeys(v for i in prologue for v in model.calls[i].inputs)),
        totals=tuple(v for i in prologue for v in model.calls[i].outputs),
    )
