"""A step as the mean over groups of samples that follow one another: the model of one group, and its part of the mean.

Requires: a captured graph in normal form, of one group. Provides: the same graph, whose loss and whose results without
samples are their share of the mean over all groups, and which draws its own random numbers for each group: those of its
place among them, so that they do not depend on which rank or microbatch a group falls to. No sample of one group meets
one of another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from torch import fx

from passes.capture import Captured
from passes.collectives import ops
from passes.errors import UnsupportedError
from passes.gradients import differentiable
from passes.layouts import PARTIAL, REPLICATED, Layout, shard
from passes.microbatch import DATA
from passes.random import DRAWS
from passes.recurrence import over_groups
from passes.rewrite import Builder, aten, shape, val


@dataclass(frozen=True)
class GroupModel:
    """``captured`` is of one group. ``inputs``: by path the dim of samples, ``None`` where each group reads it whole;
    ``outputs``: by path how the groups' results make the whole."""

    captured: Captured
    inputs: dict[str, int | None]
    outputs: dict[str, Layout]

    def whole_shape(self, path: str, count: int) -> tuple[int, ...]:
        """The shape of an input for ``count`` groups."""
        part = next(i.spec.shape for i in self.captured.inputs if i.path == path)
        return tuple(size * count if d == self.inputs[path] else size for d, size in enumerate(part))


def mean_over_groups(
    group: Captured, dims: Mapping[str, int | None], num_groups: int, twice: Callable[[], Captured]
) -> GroupModel:
    """The part of one ``group`` in a mean over ``num_groups``.

    ``dims``: in which dims of the inputs the samples are, by path; the first, where it is not told. ``twice``: captures
    the model with twice the samples, which tells where in its results they are.

    Results that grow with the samples are joined along the first dim that does, others are averaged, those that depend
    on no sample left alone. Buffers that forward changes are changed group after group. Raises
    :class:`UnsupportedError` for a result, or such a buffer, that none of this holds for.
    """
    inputs = {i.path: dims.get(i.path, 0) if i.spec.shape else None for i in group.inputs}
    nodes = {n.name: n for n in group.graph.nodes}
    apart = _by_sample(group, {p for p, dim in inputs.items() if dim is not None})
    results = [(o.path, nodes[o.value]) for o in group.outputs if o.value is not None]
    shapes = _result_shapes(twice()) if any(shape(node) for _, node in results) else {}
    outputs = {path: _joined(path, node, shapes.get(path), node in apart) for path, node in results}
    averaged = [o.value for o in group.outputs if outputs.get(o.path) == PARTIAL] + [group.loss]
    recurrences = over_groups(group, num_groups, apart)
    moved = _scaled(group.graph, [nodes[name] for name in dict.fromkeys(averaged) if name is not None], num_groups)
    _draw_apart(group.graph, num_groups)
    cut = ", ".join(f"{p} (dim {dim})" for p, dim in inputs.items() if dim is not None)
    whole = ", ".join(p for p, dim in inputs.items() if dim is None)
    note = (
        f"samples meet within a microbatch alone: the step is the mean over {num_groups} groups of samples that follow "
        f"one another; they are cut from {cut}" + (f", and each reads all of {whole}" if whole else "")
    )
    captured = group.with_(
        notes=(*group.notes, note),
        outputs=[replace(o, value=moved.get(o.value or "", o.value)) for o in group.outputs],
        loss=moved.get(group.loss or "", group.loss),
        updates=recurrences.updates,
        keeps=recurrences.keeps,
    )
    return GroupModel(captured, inputs, outputs)


def _result_shapes(captured: Captured) -> dict[str, list[int]]:
    by_name = {n.name: n for n in captured.graph.nodes}
    return {o.path: shape(by_name[o.value]) for o in captured.outputs if o.value is not None}


def _by_sample(captured: Captured, paths: Collection[str]) -> set[fx.Node]:
    """What depends on samples, or on what is drawn for them. ``paths``: of the inputs that have samples."""
    values = {i.value for i in captured.inputs if i.path in paths}
    found: set[fx.Node] = set()
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            if captured.placeholders[node.name] in values:
                found.add(node)
        elif node.target in DRAWS or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _joined(path: str, node: fx.Node, larger: list[int] | None, apart: bool) -> Layout:
    """How the groups' results of ``node`` make the whole; ``larger``: its shape with twice the samples."""
    one = shape(node)
    if larger is not None and len(larger) != len(one):
        raise UnsupportedError(
            f"the output {path!r} has {len(one)} dims in a group ({one}) and {len(larger)} in a larger one, so that "
            "what the groups give cannot be joined; keep the dim of samples where it is 1 (squeeze(-1) for squeeze()), "
            "or plan with couple='batch'"
        )
    dim = next((d for d, (few, many) in enumerate(zip(one, larger or one, strict=True)) if few != many), None)
    if dim is not None:
        return shard(dim)
    if not apart:
        return REPLICATED
    if differentiable(val(node)):
        return PARTIAL
    kind = str(val(node).dtype).removeprefix("torch.")
    raise UnsupportedError(
        f"the output {path!r} ({kind}, shape {one}) depends on a group's samples and has no dim of them, so "
        "that what the groups give can be neither joined nor averaged; leave it out of what forward returns, return it "
        "as a floating tensor (the mean is then taken), or plan with couple='batch'"
    )


def _scaled(graph: fx.Graph, nodes: Collection[fx.Node], num_groups: int) -> dict[str, str]:
    """Return each of ``nodes`` divided by the number of groups; which name went where."""
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


def _draw_apart(graph: fx.Graph, num_groups: int) -> None:
    """Count the elements of what is drawn through all groups, as if they stood one behind the other."""
    for node in list(graph.nodes) if num_groups > 1 else ():
        if node.target not in DRAWS:
            continue
        build, index = Builder(graph, node), node.args[0]
        with graph.inserting_before(node):
            group = build(ops.axis_index.default, DATA, num_groups)
            before = build(aten.mul.Tensor, group, val(node).numel())
            node.replace_input_with(index, build(aten.add.Tensor, index, before))
