"""Define a training step as the mean over groups of consecutive samples, and derive the model of one group and its
share of the mean.

This is for models whose samples interact, as in batch statistics or contrastive losses: only samples of the same group
interact. Requires: a captured graph in normal form, of one group. Provides: an equivalent graph whose loss, and whose
results without a dim of samples, are the group's share of the mean over all groups. Random numbers are drawn by the
index of the group, so they do not depend on the rank or microbatch that computes it.

Buffers that forward changes are recurrences over the groups. If the new value of a buffer is ``a * old + b``, with a
number ``a`` and a ``b`` that does not depend on such buffers (running statistics, averages, counters, the last group's
values), the recurrence is replaced by a sum: after groups 0 to n - 1 the buffer is ``a^n * old`` plus the sum of ``a^(n
- 1 - i) * b_i``. The addends are computed on any rank and in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from partitioner.passes.errors import UnsupportedError
from partitioner.passes.ir.collectives import ops
from partitioner.passes.ir.gradient_flow import is_differentiable
from partitioner.passes.ir.layouts import PARTIAL, REPLICATED, Layout, make_shard_layout
from partitioner.passes.ir.model import Captured, ModelState
from partitioner.passes.ir.rewrite import Builder, aten, get_node_tensor, list_node_sizes
from partitioner.passes.ops.random import DRAWS
from partitioner.passes.shard.split_batch import DATA

_SAME = (aten.detach.default, aten.alias.default, aten.clone.default)


@dataclass
class Recurrences:
    """The buffers that forward changes in a training step of several groups of samples.

    ``updates``: buffer name -> name of the node with its new value; for a buffer that is a sum over the groups, the
    node with the addend of one group. ``keeps``: name of each such buffer -> number by which its old value is
    multiplied, once per step, before the addends are added.
    """

    updates: dict[str, str] = field(default_factory=dict)
    keeps: dict[str, float] = field(default_factory=dict)


def rewrite_buffer_recurrences(group: Captured, num_groups: int, sample_nodes: Collection[fx.Node]) -> Recurrences:
    """Rewrite the buffer updates in the graph of ``group``, the model of one group of samples, in place, so that groups
    can run in any order. If the new value of a buffer is ``a * old + b``, with a number ``a``, each group computes an
    addend, and the new value is a sum of the addends. Return the new updates.

    ``num_groups``: the number of groups in a step. ``sample_nodes``: the nodes whose values differ between groups,
    because they depend on samples or random numbers. Raise :class:`UnsupportedError` for a buffer whose new value is
    not ``a * old + b``, whose old value forward also uses otherwise, or whose dtype does not allow the sum (booleans;
    integers if ``a`` is neither 0 nor 1).
    """
    found = Recurrences(dict(group.updates))
    if num_groups == 1 or not group.updates:
        return found
    nodes = {n.name: n for n in group.graph.nodes}
    held = {state: nodes[name] for name, state in group.placeholders.items() if state in group.updates}
    output = group.graph.output_node()
    given = {nodes[name] for name in (group.loss, *(o.value for o in group.outputs)) if name is not None}
    for state, name in group.updates.items():
        new, old = nodes[name], held.get(state)
        chain = _collect_dependent_nodes(old, output) if old is not None else set()
        read = next((n for n in chain if n in given or (output in n.users and n is not new)), None)
        if read is None and chain and new not in chain:
            read = next(iter(chain))
        if read is not None or old in given:
            raise UnsupportedError(
                _format_buffer_refusal(group.states[state], _READ.format(line=_format_source_line(read)))
            )
        if new is old:
            continue
        factor = _find_linear_factor(new, old, chain)
        if factor is None:
            raise UnsupportedError(
                _format_buffer_refusal(group.states[state], _OTHER.format(line=_format_source_line(new)))
            )
        if new not in chain and new not in sample_nodes:
            continue  # equal after every group
        if new.meta["val"].dtype == torch.bool or (
            factor not in (0.0, 1.0) and not get_node_tensor(new).dtype.is_floating_point
        ):
            raise UnsupportedError(
                _format_buffer_refusal(group.states[state], _KIND.format(kind=get_node_tensor(new).dtype))
            )
        found.updates[state] = _build_group_addend(group.graph, new, old, chain, factor, num_groups).name
        found.keeps[state] = factor**num_groups
    return found


_READ = (
    "forward also reads it for other purposes than its new value{line}: it would read the value that the "
    "previous group has left, but ranks compute groups at the same time"
)
_OTHER = (
    "its new value{line} is not a constant times the old value plus a term that does not depend on the old "
    "value, so that the contributions of groups cannot be added up"
)
_KIND = "contributions of groups of type {kind} cannot be added up"


def _format_buffer_refusal(state: ModelState, reason: str) -> str:
    """Return an error message: the buffer ``state`` would get a wrong value, because a plan computes groups of samples
    at the same time, not one after the other as the model expects. ``reason``: why this changes the value."""
    return (
        f"forward changes the buffer {state.name!r}: with couple='microbatch' each group of samples changes "
        f"it after the previous group, and {reason}; plan with couple='batch', or keep the buffer unchanged "
        "(model.eval())"
    )


def _format_source_line(node: fx.Node | None) -> str:
    """Return a text such as ``" (model.py:12)"`` with the source line of ``node``; an empty text if the line is not
    known."""
    source = node.meta.get("source") if node is not None else None
    return f" ({source})" if source else ""


def _collect_dependent_nodes(old: fx.Node, output: fx.Node) -> set[fx.Node]:
    """Return all nodes that depend on the node ``old``, directly or indirectly, except ``output``, the graph's
    output node."""
    found, stack = set[fx.Node](), [old]
    while stack:
        for user in stack.pop().users:
            if user is not output and user not in found:
                found.add(user)
                stack.append(user)
    return found


def _find_linear_factor(node: Any, old: fx.Node | None, chain: Collection[fx.Node]) -> float | None:
    """If the value of ``node`` has the form ``a * old + b``, where ``b`` does not depend on ``old``, return the number
    ``a``; otherwise return ``None``.

    ``node``: an operator node. ``old``: the node of a buffer's old value; ``None`` if forward does not read it.
    ``chain``: all nodes that depend on ``old``.
    """
    if node is old:
        return 1.0
    if node not in chain:
        return 0.0
    of = [_find_linear_factor(a, old, chain) if isinstance(a, fx.Node) else 0.0 for a in node.args]
    if any(f is None for f in of):
        return None
    known = [f for f in of if f is not None]
    numbers = [a for a in node.args if isinstance(a, int | float) and not isinstance(a, bool)]
    if get_node_tensor(node).shape != get_node_tensor(old).shape if old is not None else False:
        return None
    match node.target:
        case aten.add.Tensor | aten.sub.Tensor:
            sign = 1.0 if node.target == aten.add.Tensor else -1.0
            return known[0] + sign * float(node.kwargs.get("alpha", 1)) * known[1]
        case aten.mul.Tensor | aten.div.Tensor if len(numbers) == 1 and isinstance(node.args[0], fx.Node):
            return known[0] * numbers[0] if node.target == aten.mul.Tensor else known[0] / numbers[0]
        case aten.neg.default:
            return -known[0]
        case aten.lerp.Scalar:
            return known[0] + float(numbers[0]) * (known[1] - known[0])
        case aten._to_copy.default if (
            get_node_tensor(node).dtype.is_floating_point and get_node_tensor(node.args[0]).dtype.is_floating_point
        ):
            return known[0]
    return known[0] if node.target in _SAME else None


def _build_group_addend(
    graph: fx.Graph, new: fx.Node, old: fx.Node | None, chain: Collection[fx.Node], factor: float, num_groups: int
) -> fx.Node:
    """Append operators to ``graph``, the model of one group of samples, that compute the group's addend of a buffer,
    and return the node of the result.

    If the buffer's new value is ``factor * old + b``, the addend of group ``i`` (from 0, known when the group runs) is
    ``factor**(num_groups - 1 - i) * b``: after all groups, the buffer is the sum of the addends plus
    ``factor**num_groups`` times its old value. ``new``, ``old``: the nodes of the new and the old value; ``old`` is
    ``None`` if forward does not read the buffer. ``chain``: all nodes that depend on ``old``. ``num_groups``: the
    number of groups in a step.
    """
    build = Builder(graph, new)
    if old is not None and new in chain:
        with graph.inserting_before(next(n for n in graph.nodes if n in chain)):
            nothing = Builder(graph, new)(aten.zeros_like.default, old)
        for node in chain:
            node.replace_input_with(old, nothing)
    with graph.inserting_before(new.next):
        if factor == 1.0:
            return build(aten.detach.default, new)
        index = build(ops.axis_index.default, DATA, num_groups)
        if factor == 0.0:
            last = build(aten.eq.Scalar, index, num_groups - 1)
            return build(aten.where.self, last, new, build(aten.zeros_like.default, new))
        after = build(aten.add.Tensor, build(aten.mul.Tensor, index, -1), num_groups - 1)
        kind = torch.float64 if get_node_tensor(new).dtype == torch.float64 else torch.float32
        weight = build(aten.pow.Scalar, factor, build(aten._to_copy.default, after, dtype=kind))
        return build(aten.mul.Tensor, new, weight)


@dataclass(frozen=True)
class GroupModel:
    """The model of one group of consecutive samples, and how inputs are cut into groups and results of groups are
    combined.

    ``captured``: the model of one group as one graph. ``inputs``: path of each input in the arguments of forward ->
    index of its dim of samples; ``None`` if every group reads the whole input. ``outputs``: path of each output in the
    result of forward -> layout: sharded if the groups' results are concatenated along a dim, partial if they are added,
    replicated if they are equal.
    """

    captured: Captured
    inputs: dict[str, int | None]
    outputs: dict[str, Layout]

    def whole_shape(self, path: str, count: int) -> tuple[int, ...]:
        """Return the shape of an input of the model for ``count`` groups of samples: the dim of samples is ``count``
        times as large as for one group. ``path``: the path of the input in the arguments of forward."""
        part = next(i.spec.shape for i in self.captured.inputs if i.path == path)
        return tuple(size * count if d == self.inputs[path] else size for d, size in enumerate(part))


def average_over_groups(
    group: Captured, dims: Mapping[str, int | None], num_groups: int, capture_twice: Callable[[], Captured]
) -> GroupModel:
    """Return the model of one group of consecutive samples, whose loss is the group's share of the mean over
    ``num_groups`` groups. Results with a dim of samples are concatenated along this dim. Other results are averaged, or
    left unchanged if they do not depend on samples.

    ``group``: the captured model of one group; samples of different groups do not interact. ``dims``: path of an input
    -> index of its dim of samples (0 if absent); ``None`` if every group reads the whole input. ``capture_twice``:
    captures the model with twice the samples, which shows the dims of samples in its results. Raise
    :class:`UnsupportedError` for a result or changed buffer that cannot be combined in these ways.
    """
    inputs = {i.path: dims.get(i.path, 0) if i.spec.shape else None for i in group.inputs}
    nodes = {n.name: n for n in group.graph.nodes}
    apart = _find_sample_dependent_nodes(group, {p for p, dim in inputs.items() if dim is not None})
    results = [(o.path, nodes[o.value]) for o in group.outputs if o.value is not None]
    shapes = _map_result_shapes(capture_twice()) if any(list_node_sizes(node) for _, node in results) else {}
    outputs = {path: _find_output_layout(path, node, shapes.get(path), node in apart) for path, node in results}
    averaged = [o.value for o in group.outputs if outputs.get(o.path) == PARTIAL] + [group.loss]
    recurrences = rewrite_buffer_recurrences(group, num_groups, apart)
    moved = _divide_by_group_count(
        group.graph, [nodes[name] for name in dict.fromkeys(averaged) if name is not None], num_groups
    )
    _separate_random_draws(group.graph, num_groups)
    cut = ", ".join(f"{p} (dim {dim})" for p, dim in inputs.items() if dim is not None)
    whole = ", ".join(p for p, dim in inputs.items() if dim is None)
    note = (
        f"samples interact only within a microbatch: loss and gradients are the mean over {num_groups} groups "
        f"of consecutive samples; inputs that are split into groups: {cut}"
        + (f"; inputs that every group reads whole: {whole}" if whole else "")
    )
    captured = group.with_(
        notes=(*group.notes, note),
        outputs=[replace(o, value=moved.get(o.value or "", o.value)) for o in group.outputs],
        loss=moved.get(group.loss or "", group.loss),
        updates=recurrences.updates,
        keeps=recurrences.keeps,
    )
    return GroupModel(captured, inputs, outputs)


def _map_result_shapes(captured: Captured) -> dict[str, list[int]]:
    """Return a dict: path of an output in the result of forward -> shape of the output. ``captured``: the model as one
    graph."""
    by_name = {n.name: n for n in captured.graph.nodes}
    return {o.path: list_node_sizes(by_name[o.value]) for o in captured.outputs if o.value is not None}


def _find_sample_dependent_nodes(captured: Captured, paths: Collection[str]) -> set[fx.Node]:
    """Return the nodes in the graph of the model ``captured`` that depend on samples or on random numbers.
    ``paths``: the paths, in the arguments of forward, of the inputs that have a dim of samples."""
    values = {i.value for i in captured.inputs if i.path in paths}
    found: set[fx.Node] = set()
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            if captured.placeholders[node.name] in values:
                found.add(node)
        elif node.target in DRAWS or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _find_output_layout(path: str, node: fx.Node, larger: list[int] | None, depends_on_samples: bool) -> Layout:
    """Return how the values of the model's output ``node`` for different groups of samples are combined, as a layout:
    sharded if they are concatenated along a dim, partial if they are added, replicated if they are equal in all groups.
    Raise :class:`UnsupportedError` if they cannot be combined.

    ``path``: the path of the output in the result of forward, for error messages. ``larger``: the shape of the output
    with twice the samples, which differs in the dim of samples; ``None`` if unknown. ``depends_on_samples``: whether
    the output depends on samples.
    """
    one = list_node_sizes(node)
    if larger is not None and len(larger) != len(one):
        raise UnsupportedError(
            f"the output {path!r} has {len(one)} dims in a group ({one}) and {len(larger)} in a larger one, so that "
            "the outputs of groups cannot be concatenated; keep the batch dim if its size is 1 (squeeze(-1) instead "
            "of squeeze()), or plan with couple='batch'"
        )
    dim = next((d for d, (few, many) in enumerate(zip(one, larger or one, strict=True)) if few != many), None)
    if dim is not None:
        return make_shard_layout(dim)
    if not depends_on_samples:
        return REPLICATED
    if is_differentiable(get_node_tensor(node)):
        return PARTIAL
    kind = str(get_node_tensor(node).dtype).removeprefix("torch.")
    raise UnsupportedError(
        f"the output {path!r} ({kind}, shape {one}) depends on the samples of a group but has no batch dim, so "
        "that the outputs of several groups can be neither concatenated nor averaged; do not return it from "
        "forward, return it as a floating-point tensor (which is averaged), or plan with couple='batch'"
    )


def _divide_by_group_count(graph: fx.Graph, nodes: Collection[fx.Node], num_groups: int) -> dict[str, str]:
    """Divide the outputs ``nodes`` of ``graph`` by ``num_groups``, in place. Return a dict: old node name -> new node
    name."""
    if num_groups == 1:
        return {}
    output = graph.output_node()
    moved: dict[str, str] = {}
    with graph.inserting_before(output):
        for node in nodes:
            share = Builder(graph, node)(aten.mul.Tensor, node, 1.0 / num_groups)
            output.replace_input_with(node, share)
            moved[node.name] = share.name
    return moved


def _separate_random_draws(graph: fx.Graph, num_groups: int) -> None:
    """Change ``graph``, the graph of one group of samples, in place, so that random operators draw different numbers
    for each group. Random numbers are functions of element indices, so the number of elements of all earlier groups is
    added to the indices. ``num_groups``: the number of groups in a step."""
    for node in list(graph.nodes) if num_groups > 1 else ():
        if node.target not in DRAWS:
            continue
        build, index = Builder(graph, node), node.args[0]
        with graph.inserting_before(node):
            group = build(ops.axis_index.default, DATA, num_groups)
            before = build(aten.mul.Tensor, group, get_node_tensor(node).numel())
            node.replace_input_with(index, build(aten.add.Tensor, index, before))
