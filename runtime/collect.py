"""From what each rank holds after a step to what the model would have given: outputs, loss, gradients, whole."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.layouts import Layout, join_shards
from runtime.engine import Engine
from runtime.parts import by_model_names, model_names
from runtime.pieces import join_pieces
from runtime.program import OutputData, Program, shard_shape, updated_states


@dataclass(frozen=True)
class Part:
    """One rank's share of the results: what no other rank gives as well."""

    rank: int
    loss: Tensor | None
    outputs: dict[str, dict[int, Tensor]]  # value -> microbatch -> tensor
    grads: dict[str, Tensor]  # state -> this rank's shard
    buffers: dict[str, Tensor] = field(default_factory=dict)  # those that the step changed, likewise


@dataclass(frozen=True)
class Run:
    """What one step of a program computed.

    ``outputs`` has the structure of the model's result where that can be rebuilt, else it is a dict by path. ``grads``
    has every parameter that takes a gradient, ``buffers`` every buffer that the step changed, under each of its names.
    """

    outputs: Any
    loss: Tensor | None
    grads: dict[str, Tensor] = field(repr=False)
    leaves: dict[str, Any] = field(repr=False)  # the outputs by path
    buffers: dict[str, Tensor] = field(default_factory=dict, repr=False)


def part_of(engine: Engine, outputs: bool = True, grads: bool = True) -> Part:
    """What ``engine``'s rank contributes after a step; replicas contribute once."""
    rank = engine.rank_program
    program, at = rank.program, rank.coordinates
    layouts = {o.value: (Layout.parse(o.layout), Layout.parse(o.context)) for o in program.outputs if o.value}
    made = {
        value: by_microbatch
        for value, by_microbatch in engine.outputs.items()
        if outputs and all(at[a] == 0 or not to.is_whole for a, to in zip(("tp", "cp"), layouts[value], strict=True))
    }
    mine = {
        name
        for name, state in program.states.items()
        if rank.stage_index == min(state.stages, default=None) and rank.is_first_holder(name)
    }
    shards = {
        name: parameter.grad
        for name, parameter in engine.named_parameters()
        if grads and parameter.grad is not None and name in mine
    }
    held = engine.state_dict()
    buffers = {name: held[name].clone() for name in updated_states(program) if name in mine}
    return Part(rank.rank, engine.loss, made, shards, buffers)


def joined(program: Program, parts: Sequence[Part], extra: Mapping[str, Tensor] | None = None) -> Run:
    """The whole results. ``extra``: gradients of parameters that the program computes none of."""
    by_rank = {p.rank: p for p in parts}
    leaves = {o.path: _leaf(program, o, by_rank) for o in program.outputs}
    grads: dict[str, Tensor] = dict(extra or {})
    buffers: dict[str, Tensor] = {}
    for name, state in program.states.items():
        for whole, kind in ((grads, "grads"), (buffers, "buffers")):
            found = {r: getattr(p, kind)[name] for r, p in sorted(by_rank.items()) if name in getattr(p, kind)}
            if found:
                whole.update(by_model_names(name, state, _whole(program, name, found)))
    return Run(_rebuilt(program, leaves), parts[0].loss, grads, leaves, buffers)


def _whole(program: Program, state: str, held: Mapping[int, Tensor]) -> Tensor:
    """A state of which ``held`` is what its first holders have, by rank in order: cut over ep, then tp, then shared."""
    data = program.states[state]
    shared: dict[tuple[int, ...], list[Tensor]] = {}  # the ranks that share a part -> their pieces, in order of rank
    for rank, tensor in held.items():
        shared.setdefault(program.group(rank, data.zero_axes), []).append(tensor)
    shape = shard_shape(program, state)
    parts = [join_pieces(p, shape) if data.zero_axes else p[0] for p in shared.values()]
    by_expert, by_tensor = Layout.parse(data.expert_layout), Layout.parse(data.layout)
    count = program.size("ep") if by_expert.is_shard else 1
    each = len(parts) // count
    of_experts = [parts[i * each : (i + 1) * each] for i in range(count)]
    return join_shards([join_shards([*h], by_tensor) if each > 1 else h[0] for h in of_experts], by_expert)


def _leaf(program: Program, output: OutputData, parts: Mapping[int, Part]) -> Any:
    """One leaf of the model's result: shards joined over ``tp``, then ``cp``, then over ``dp`` and microbatches."""
    if output.value is None:
        return output.constant
    pieces = []
    for dp in range(program.mesh.get("dp", 1)):
        held = []  # along cp: what the ranks along tp have, by microbatch
        for cp in range(program.mesh.get("cp", 1)):
            ranks = program.group(program.rank_at({"pp": output.stage or 0, "dp": dp, "cp": cp}), ("tp",))
            along_tp = [parts[r].outputs[output.value] for r in ranks if output.value in parts[r].outputs]
            held += [along_tp] if along_tp else []
        if not held:
            return None
        for m in range(len(program.share(dp))):
            along_cp = [join_shards([h[m] for h in along_tp], Layout.parse(output.layout)) for along_tp in held]
            pieces.append(join_shards(along_cp, Layout.parse(output.context)))
    if output.batch == "R":
        return pieces[0]
    return join_shards(pieces, Layout.parse(output.batch))


def _rebuilt(program: Program, leaves: dict[str, Any]) -> Any:
    if program.tree is not None:
        # A tree of a class that this process does not know stays a dict by path.
        with contextlib.suppress(Exception):
            return pytree.tree_unflatten(list(leaves.values()), pytree.treespec_loads(program.tree))
    return leaves


def unread_gradients(program: Program, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros for the parameters of the model that no gradient reaches in the program, as far as they take some."""
    known = {n for name, s in program.states.items() if s.requires_grad for n in model_names(name, s)}
    unread = {n: p for n, p in parameters.items() if n not in known and p.requires_grad}
    return {n: torch.zeros(p.shape, dtype=p.dtype) for n, p in unread.items()}
