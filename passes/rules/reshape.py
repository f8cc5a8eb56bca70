"""Sharding rules of operators that rearrange or repeat elements: views, permutations, expansions, repeats.

Each function returns the :class:`OpFactors` of one operator call, which says which dims may be sharded. A *factor* is a
named loop dimension; a dim that a reshape merges from several dims has several factors, outermost first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from partitioner.passes.rules.factors import (
    FIRST,
    NAMES,
    Dims,
    LocalBuilder,
    OpFactors,
    build_factor_rule,
    forbid_sharding,
    get_meta_shape,
    get_node_argument,
    normalize_dim,
    operands_of,
)
from partitioner.passes.rules.registry import register_family

aten = torch.ops.aten


def find_shared_factors(
    source: Sequence[int], target: Sequence[int]
) -> tuple[dict[str, int], Dims, Dims, frozenset[str]]:
    """Split the sizes of two shapes with the same number of elements into common factors, and name the factors. Each
    dim of each shape is the product of consecutive factors.

    Return four values: a dict (name of a factor -> its size); the factor names of each dim of ``source``; the factor
    names of each dim of ``target``; and the set of factors that only one of the two shapes has, which must not be
    sharded.

    >>> find_shared_factors((8, 4), (2, 16))
    ({'d0': 2, 'd1': 4, 'd2': 4}, (('d0', 'd1'), ('d2',)), (('d0',), ('d1', 'd2')), frozenset())
    """
    sides = (_SplitShape(source), _SplitShape(target))
    sizes: dict[str, int] = {}
    whole: set[str] = set()

    def add_factor(size: int, shapes: Sequence[_SplitShape]) -> str:
        """Create a factor of a reshape and split it off the current dim of each of ``shapes``. Return the factor's
        name.

        ``size``: the factor's size. ``shapes``: the shape before the reshape, the shape after it, or both.
        """
        name = NAMES[len(sizes)] if len(sizes) < len(NAMES) else f"d{len(sizes)}"
        sizes[name] = size
        for side in shapes:
            side.take_factor(name, size)
        return name

    while sides[0].advance_dim() and sides[1].advance_dim():
        common = math.gcd(sides[0].left, sides[1].left)
        if common > 1:
            add_factor(common, sides)
            if sides[0].left == 1 or sides[1].left == 1:
                continue
        # Neither size divides the other: there is no common factor until the products of the sizes so far agree again.
        done = [1, 1]
        while done[0] != done[1] or done[0] == 1:
            behind = 0 if done[0] <= done[1] else 1
            sides[behind].advance_dim()
            done[behind] *= sides[behind].left
            whole.add(add_factor(sides[behind].left, [sides[behind]]))
    return sizes, sides[0].dims, sides[1].dims, frozenset(whole)


class _SplitShape:
    """One of two shapes that are split into common factors from the outermost dim on, and how far it has been split.

    ``sizes``: the shape. ``at``: the index of the current dim (-1 before the first). ``left``: the size of the
    current dim, divided by the factors that were split off. ``found``: for each dim, the names of its factors so
    far.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.found: list[list[str]] = [[] for _ in sizes]
        self.at, self.left = -1, 1

    def advance_dim(self) -> bool:
        """If the current dim of this shape is split completely, advance to the next dim that is larger than 1. Return
        whether a dim is left to split."""
        while self.left == 1:
            self.at += 1
            if self.at == len(self.sizes):
                self.at -= 1
                return False
            self.left = self.sizes[self.at]
        return True

    def take_factor(self, name: str, size: int) -> None:
        """Split the factor ``name`` of the size ``size`` off the current dim of this shape. The size must divide what
        is left of the dim."""
        self.found[self.at].append(name)
        self.left //= size

    @property
    def dims(self) -> Dims:
        return tuple(map(tuple, self.found))


@register_family(
    "_reshape_alias", "_unsafe_view", "flatten", "ravel", "reshape", "squeeze", "squeeze_copy", "unflatten",
    "unsqueeze", "unsqueeze_copy", "view", "view_copy", "reshape_as", "view_as", "atleast_1d.default",
    "atleast_2d.default", "atleast_3d.default",
)  # fmt: skip
def shard_reshape(node: fx.Node) -> OpFactors | None:
    """Return the sharding rule of ``node``, a ``reshape``, ``view`` or similar operator: a dim may be sharded by each
    factor of its size that the operand and the result have in common. Return ``None`` (no sharding) if a dim has size
    0."""
    source, *shape_only = operands_of(node)
    if 0 in get_meta_shape(source):
        return None
    sizes, before, after, whole = find_shared_factors(get_meta_shape(source), tuple(node.meta["val"].shape))
    unread: list[Dims] = [((),) * len(get_meta_shape(o)) for o in shape_only]
    return OpFactors(sizes, (before, *unread), (after,), whole, FIRST, local=_lower_reshape)


def _lower_reshape(local: LocalBuilder) -> fx.Node:
    # reshape, not view: a shard may have gaps in memory that the whole tensor does not have.
    return local.call(aten.reshape.default, local.operands[0], list(local.result_shape()))


@register_family("view.dtype")
def view_dtype(node: fx.Node) -> OpFactors | None:
    names = NAMES[: len(get_meta_shape(operands_of(node)[0]))]
    same = get_meta_shape(operands_of(node)[0]) == tuple(node.meta["val"].shape)
    return build_factor_rule(node, [names], [names]) if same else None


@register_family("view_as_real", "view_as_complex", "view_as_real_copy", "view_as_complex_copy")
def shard_complex_view(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a conversion between complex numbers and a last dim of real and
    imaginary parts. This last dim must not be sharded, other dims may be."""
    before, after = len(get_meta_shape(operands_of(node)[0])), len(node.meta["val"].shape)
    names = NAMES[: min(before, after)]
    pair: list[str | None] = [*names, None]
    return build_factor_rule(node, [pair[:before]], [pair[:after]], linear=FIRST)


def _shard_permuted_dims(node: fx.Node, order: Sequence[int]) -> OpFactors:
    names = NAMES[: len(order)]
    return build_factor_rule(node, [names], [[names[d] for d in order]], linear=FIRST)


@register_family("permute", "permute_copy")
def shard_permute(node: fx.Node) -> OpFactors:
    rank = len(get_meta_shape(operands_of(node)[0]))
    return _shard_permuted_dims(node, [normalize_dim(d, rank) for d in get_node_argument(node, "dims")])


@register_family("transpose", "transpose_copy", "swapaxes", "swapdims")
def shard_transpose(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a ``transpose``: every dim may be sharded."""
    rank = len(get_meta_shape(operands_of(node)[0]))
    a, b = (
        get_node_argument(node, "dim0", get_node_argument(node, "axis0")),
        get_node_argument(node, "dim1", get_node_argument(node, "axis1")),
    )
    order = list(range(rank))
    if order:
        order[a], order[b] = order[b], order[a]
    return _shard_permuted_dims(node, order)


@register_family("t", "t_copy", "mT", "mH", "adjoint", "numpy_T", "matrix_H")
def transpose_last(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, an operator that swaps the last two dims (``numpy_T`` reverses all):
    every dim may be sharded."""
    order = list(range(len(get_meta_shape(operands_of(node)[0]))))
    if node.target == aten.numpy_T.default:
        order.reverse()
    elif len(order) >= 2:
        order[-2:] = order[-1], order[-2]
    return _shard_permuted_dims(node, order)


@register_family("movedim", "moveaxis")
def shard_movedim(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a ``movedim``: every dim may be sharded."""
    rank = len(get_meta_shape(operands_of(node)[0]))
    moves = [get_node_argument(node, side) for side in ("source", "destination")]
    source, target = ([m] if isinstance(m, int) else list(m) for m in moves)
    rest = iter(d for d in range(rank) if d not in {normalize_dim(s, rank) for s in source})
    placed = {normalize_dim(t, rank): normalize_dim(s, rank) for s, t in zip(source, target, strict=True)}
    return _shard_permuted_dims(node, [placed[d] if d in placed else next(rest) for d in range(rank)])


@register_family("expand", "expand_copy", "broadcast_to", "expand_as")
def shard_expand(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, an ``expand``: every dim of the result may be sharded. If the operand has
    the dim in full size, the operand is sharded with the result. If the dim is new or was expanded from size 1, every
    rank has the whole operand."""
    x, *like = operands_of(node)
    names = NAMES[: len(node.meta["val"].shape)]
    unread: list[tuple[None, ...]] = [(None,) * len(get_meta_shape(o)) for o in like]
    patterns = [names[len(names) - len(get_meta_shape(x)) :], *unread]
    return build_factor_rule(node, patterns, [names], linear=FIRST, local=_lower_expand)


def _lower_expand(local: LocalBuilder) -> fx.Node:
    return local.call(aten.expand.default, local.operands[0], list(local.result_shape()))


@register_family("repeat", "tile")
def shard_repeat(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a ``repeat``. A dim of the result is (number of copies) x (elements of the
    operand's dim), and may be sharded by either factor: each rank has some elements of every copy, or some of the
    copies."""
    (x,) = operands_of(node)
    result = tuple(node.meta["val"].shape)
    if 0 in result:
        return forbid_sharding(node)
    padded = (1,) * (len(result) - len(get_meta_shape(x))) + get_meta_shape(x)
    sizes: dict[str, int] = {}
    operand: list[tuple[str, ...]] = []
    made: list[tuple[str, ...]] = []
    for d, (before, after) in enumerate(zip(padded, result, strict=True)):
        kept = (NAMES[d],) if before > 1 else ()
        again = (f"r{d}",) if after > before else ()
        sizes |= dict.fromkeys(kept, before) | dict.fromkeys(again, after // max(before, 1))
        operand.append(kept)
        made.append((*again, *kept))
    dims = tuple(operand[len(result) - len(get_meta_shape(x)) :])
    return OpFactors(sizes, (dims,), (tuple(made),), linear=FIRST, local=_lower_repeat)


def _lower_repeat(local: LocalBuilder) -> fx.Node:
    """Append a ``repeat`` of this rank's operand, to the shape of this rank's result, to the graph of one rank, and
    return the new node. ``local``: the operator to replace, its layouts, and the graph of one rank."""
    made = local.result_shape()
    (x,) = local.operands
    padded = (1,) * (len(made) - len(get_meta_shape(x))) + get_meta_shape(x)
    times = [after // before for before, after in zip(padded, made, strict=True)]
    return local.call(aten.repeat.default, x, times)


@register_family("repeat_interleave.self_int")
def repeat_interleave(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a ``repeat_interleave`` with a fixed number of repeats. A dim of the result
    is (elements of the operand's dim) x (copies of each), and may be sharded by either factor."""
    (x,) = operands_of(node)
    if 0 in tuple(node.meta["val"].shape):
        return forbid_sharding(node)
    times, dim = get_node_argument(node, "repeats"), get_node_argument(node, "dim")
    names = NAMES[: len(get_meta_shape(x))]
    found = build_factor_rule(node, [names], [(None,) * len(node.meta["val"].shape)], linear=FIRST)
    (operand,) = found.operands
    again = ("again",) if times > 1 else ()
    if dim is None:
        made: Dims = ((*(f for dims in operand for f in dims), *again),)
    else:
        at = normalize_dim(dim, len(names))
        made = tuple((*dims, *again) if d == at else dims for d, dims in enumerate(operand))
    sizes = {**found.sizes, **dict.fromkeys(again, times)}
    return OpFactors(sizes, (operand,), (made,), linear=FIRST, local=_lower_interleave)


def _lower_interleave(local: LocalBuilder) -> fx.Node:
    dim = get_node_argument(local.node, "dim")
    return local.call(aten.repeat_interleave.self_int, local.operands[0], local.size("again"), dim)


@register_family("pixel_shuffle", "pixel_unshuffle")
def shard_pixel_shuffle(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a ``pixel_shuffle`` or its inverse ``pixel_unshuffle``.

    ``pixel_shuffle`` turns ``c * r * r`` channels into ``c`` channels of images that are ``r`` times as high and wide.
    Batch dims, the ``c`` channels and spatial dims may be sharded, the two factors ``r`` must not be.
    """
    (x,) = operands_of(node)
    shuffles = node.target == aten.pixel_shuffle.default
    few = tuple(node.meta["val"].shape) if shuffles else get_meta_shape(x)
    r = get_node_argument(node, "upscale_factor", get_node_argument(node, "downscale_factor"))
    front = NAMES[: len(few) - 3]
    sizes = {**dict(zip(front, few, strict=False)), "c": few[-3], "h": few[-2] // r, "w": few[-1] // r, "r": r, "s": r}
    batch = tuple((n,) for n in front)
    many: Dims = (*batch, ("c", "r", "s"), ("h",), ("w",))
    large: Dims = (*batch, ("c",), ("h", "r"), ("w", "s"))
    before, after = (many, large) if shuffles else (large, many)
    return OpFactors(sizes, (before,), (after,), frozenset("rs"), FIRST)
