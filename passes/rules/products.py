"""Sharding rules of matrix products, recurrent layers, convolutions, pooling, resizing, factorisations and solvers.

Each function returns the :class:`OpFactors` of one operator call, which says which dims may be sharded. A product whose
summed dim is sharded gives a partial sum. Convolutions, pooling and resizing may be sharded over samples and channels,
not over positions. Factorisations and solvers may be sharded over batch dims only, because they need whole matrices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from partitioner.passes.ops import recurrent  # noqa: F401 - registers operators that have a rule here
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
    mark_linear_each,
    operands_of,
    results_of,
)
from partitioner.passes.rules.registry import register_family, rule

aten = torch.ops.aten
_RECURRENT_STATES = {"partition::lstm_layer": 2, "partition::recurrent_layer": 1}  # initial states, after the input

_PRODUCT = mark_linear_each(0, 1)

rule("aten.mm", "m k, k n -> m n", linear=_PRODUCT)

rule("aten.bmm", "b m k, b k n -> b m n", linear=_PRODUCT)
rule("aten.mv", "m k, k -> m", linear=_PRODUCT)
rule("aten.dot", "k, k -> ", linear=_PRODUCT)
rule("aten.outer", "m, n -> m n", linear=_PRODUCT)
rule("aten.vdot", "k, k -> ")
rule("aten.cdist", "... p m!, ... r m! -> ... p r")
rule("aten.bilinear", "... i, ... j, o i j -> ... o", "... i!, ... j!, o i! j!, o -> ... o")

_ADDED = {"addmm": ("mk", "kn", "mn"), "addmv": ("mk", "k", "m"), "baddbmm": ("bmk", "bkn", "bmn"),
          "addbmm": ("bmk", "bkn", "mn")}  # fmt: skip


@register_family(*_ADDED)
def shard_added_product(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a matrix product plus an addend, such as ``addmm``.

    The dim over which the product sums must not be sharded, because every rank would add the addend to its partial sum.
    Other dims may be sharded.
    """
    left, right, made = _ADDED[node.target.__name__.split(".")[0]]  # type: ignore[union-attr]
    rank = len(get_meta_shape(operands_of(node)[0]))
    summed = frozenset(left) - frozenset(made)
    return build_factor_rule(node, [made[len(made) - rank :], left, right], [made], whole=summed)


@register_family(*_RECURRENT_STATES)
def shard_recurrent_layer(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, one direction of a recurrent layer. Samples may be sharded, in the input
    and in the states. Time steps must not be sharded, because each step reads the state of the previous one. Features
    must not be sharded, because each gate reads all features of the state."""
    states = _RECURRENT_STATES[node.target._schema.name]  # type: ignore[union-attr]
    rows: list[str | None] = [None, "b", None]
    weights: list[list[str | None]] = [[None] * len(get_meta_shape(o)) for o in operands_of(node)[1 + states :]]
    return build_factor_rule(node, [rows] * (1 + states) + weights, [rows] * states)


@register_family("linear")
def shard_linear(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``linear``: every dim may be sharded, except the input
    features if there is a bias. With sharded input features, the result is a partial sum."""
    x, weight, *bias = operands_of(node)
    front = NAMES[: len(get_meta_shape(x)) - 1]
    out = ("o",) if len(get_meta_shape(weight)) == 2 else ()
    operands = [(*front, "i"), (*out, "i"), *(out for _ in bias)]
    if bias:
        return build_factor_rule(node, operands, [(*front, *out)], whole=frozenset("i"))
    return build_factor_rule(node, operands, [(*front, *out)], linear=_PRODUCT)


@register_family("matmul")
def shard_matmul(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``matmul``: every dim may be sharded. If the summed dim is
    sharded, the result is a partial sum."""
    x, y = (len(get_meta_shape(o)) for o in operands_of(node))
    batch = max(x, y) - 2
    front = NAMES[: max(batch, 0)]
    rows = ("m",) if x > 1 else ()
    columns = ("n",) if y > 1 else ()
    left = front[batch - (x - 2) :] if x > 2 else ()
    right = front[batch - (y - 2) :] if y > 2 else ()
    operands = [(*left, *rows, "k"), (*right, "k", *columns)]
    return build_factor_rule(node, operands, [(*front, *rows, *columns)], linear=_PRODUCT)


@register_family("einsum")
def shard_einsum(node: fx.Node) -> OpFactors | None:
    """Return the sharding rule of ``node``, an ``einsum``: the dims of every label of the equation may be sharded. If a
    summed label is sharded, the result is a partial sum. Return ``None`` (no sharding) if the equation has no ``->``.
    """
    equation: Any = node.args[0]
    terms, _, result = equation.replace(" ", "").partition("->")
    count = len(operands_of(node))
    patterns = [
        _expand_einsum_labels(t, len(get_meta_shape(o)))
        for t, o in zip(terms.split(","), operands_of(node), strict=True)
    ]
    if "->" not in equation:
        return None
    made = _expand_einsum_labels(result, len(node.meta["val"].shape))
    return build_factor_rule(node, patterns, [made], linear=mark_linear_each(*range(count)))


def _expand_einsum_labels(term: str, rank: int) -> list[str]:
    """Return a list of names for the ``rank`` dims of one tensor in an einsum equation. ``term``: the tensor's labels,
    such as ``...ij``. Dims that ``...`` covers get names that count from the right, as in broadcasting."""
    front, dots, back = term.partition("...")
    hidden = rank - len(front) - len(back)
    return [*front, *(NAMES[hidden - 1 - i] for i in range(hidden) if dots), *back]


@register_family("conv1d", "conv2d", "conv3d", "convolution", "_convolution", "conv_transpose1d", "conv_transpose2d",
        "conv_transpose3d")  # fmt: skip
def shard_convolution(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a convolution: samples, groups, and input and output channels within a
    group may be sharded.

    With sharded input channels, the result is a partial sum; this is not allowed if there is a bias. Spatial dims must
    not be sharded. Weights are ``[groups * out, in, ...]``; weights of a transposed convolution are ``[groups * in,
    out, ...]``.
    """
    x, weight, *bias = operands_of(node)
    transposed = "transpose" in str(node.target) or bool(get_node_argument(node, "transposed", False))
    num_places = len(get_meta_shape(weight)) - 2
    has_batch = len(get_meta_shape(x)) == num_places + 2
    groups = get_node_argument(node, "groups", 1)
    num_inputs = get_meta_shape(x)[1 if has_batch else 0]
    num_outputs = node.meta["val"].shape[1 if has_batch else 0]
    sizes = {"g": groups, "i": num_inputs // groups, "o": num_outputs // groups}
    if has_batch:
        sizes["b"] = get_meta_shape(x)[0]
    batch: Dims = (("b",),) if has_batch else ()
    places: Dims = ((),) * num_places
    inputs, outputs = ("g", "i"), ("g", "o")
    kernel = (inputs, ("o",), *places) if transposed else (outputs, ("i",), *places)
    operands: tuple[Dims, ...] = ((*batch, inputs, *places), kernel, *((outputs,) for _ in bias))
    if bias:
        return OpFactors(sizes, operands, ((*batch, outputs, *places),), frozenset("i"), local=_lower_convolution)
    return OpFactors(
        sizes, operands, ((*batch, outputs, *places),), linear=mark_linear_each(0, 1), local=_lower_convolution
    )


def _lower_convolution(local: LocalBuilder) -> fx.Node:
    return local.copy(groups=local.size("g")) if local.strategy.factor == "g" else local.copy()


def _shard_leading_dims(node: fx.Node, num_places: int, is_linear: bool) -> OpFactors:
    """Return the sharding rule of the operator call ``node``, such as a pooling: its last ``num_places`` dims must not
    be sharded, other dims may be.

    ``is_linear``: whether the result is a partial sum if the operand is one.
    """
    (x,) = operands_of(node)
    names = [*NAMES[: len(get_meta_shape(x)) - num_places], *[None] * num_places]
    return build_factor_rule(node, [names], [names for _ in results_of(node)], linear=FIRST if is_linear else ())


for _places in (1, 2, 3):
    _averages = [f"avg_pool{_places}d", f"adaptive_avg_pool{_places}d"]
    _averages += [f"_adaptive_avg_pool{_places}d"] if _places > 1 else []
    _largest = [f"max_pool{_places}d", f"max_pool{_places}d_with_indices", f"adaptive_max_pool{_places}d"]
    register_family(*_averages)(lambda node, n=_places: _shard_leading_dims(node, n, True))
    register_family(*_largest)(lambda node, n=_places: _shard_leading_dims(node, n, False))

_RESIZED = {
    1: ("nearest1d", "_nearest_exact1d", "linear1d"),
    2: ("nearest2d", "_nearest_exact2d", "bilinear2d", "bicubic2d", "_bilinear2d_aa", "_bicubic2d_aa"),
    3: ("nearest3d", "_nearest_exact3d", "trilinear3d"),
}
for _places, _kinds in _RESIZED.items():
    _names = [f"_upsample{k}" if k.startswith("_") else f"upsample_{k}" for k in _kinds]
    register_family(*_names)(lambda node, n=_places: _shard_leading_dims(node, n, True))


@register_family("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def shard_grid_sampler(node: fx.Node) -> OpFactors:
    x, grid = (len(get_meta_shape(o)) for o in operands_of(node))
    images, places = ["b", "c", *[None] * (x - 2)], ["b", *[None] * (grid - 1)]
    return build_factor_rule(node, [images, places], [images], linear=FIRST)


for _places in (2, 3):
    _unpooled = f"max_unpool{_places}d"

    @register_family(_unpooled)
    def shard_max_unpool(node: fx.Node, n: int = _places) -> OpFactors:
        """Return the sharding rule of ``node``, a call of ``max_unpool2d`` or ``max_unpool3d``: samples and channels
        may be sharded, spatial dims must not be. This is correct because the operator's indices count within one
        channel of one sample.

        ``n``: the number of spatial dims.
        """
        x, _ = operands_of(node)
        names = [*NAMES[: len(get_meta_shape(x)) - n], *[None] * n]
        return build_factor_rule(node, [names, names], [names])


for _places in (2, 3):
    _fractional = f"fractional_max_pool{_places}d"

    @register_family(_fractional)
    def shard_fractional_max_pool(node: fx.Node, n: int = _places) -> OpFactors:
        """Return the sharding rule of ``node``, a call of ``fractional_max_pool2d`` or ``fractional_max_pool3d``:
        samples and channels may be sharded, spatial dims must not be. The operator reads random numbers for each
        channel of each sample, which are sharded together with samples and channels.

        ``n``: the number of spatial dims.
        """
        x, _ = operands_of(node)
        names = ["b", "c"] if len(get_meta_shape(x)) == n + 2 else ["c"]
        images = [*names, *[None] * n]
        return build_factor_rule(
            node, [images, [*([None] * (2 - len(names))), *names, None]], [images for _ in results_of(node)]
        )


@register_family("im2col", "col2im")
def shard_image_patches(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``im2col``, which turns ``c`` channels into ``c * k`` for patches
    of ``k`` pixels, or of its inverse ``col2im``.

    Samples and channels may be sharded. Spatial dims, the dim of patches, and ``k`` must not be.
    """
    (x,) = operands_of(node)
    result = tuple(node.meta["val"].shape)
    takes_apart = node.target == aten.im2col.default
    has_batch = len(get_meta_shape(x)) == (4 if takes_apart else 3)
    images, patches = (get_meta_shape(x), result) if takes_apart else (result, get_meta_shape(x))
    at = 1 if has_batch else 0
    batch_dims: Dims = (("b",),) if has_batch else ()
    sizes = {"c": images[at], "k": patches[at] // images[at], **({"b": images[0]} if has_batch else {})}
    image: Dims = (*batch_dims, ("c",), (), ())
    patch: Dims = (*batch_dims, ("c", "k"), ())
    before, after = (image, patch) if takes_apart else (patch, image)
    return OpFactors(sizes, (before,), (after,), frozenset("k"), FIRST)


@register_family("affine_grid_generator")
def shard_affine_grid(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``affine_grid_generator``: the dim of samples may be sharded,
    other dims must not be."""
    rank = len(node.meta["val"].shape)
    return build_factor_rule(
        node, [["n", None, None]], [["n", *[None] * (rank - 1)]], linear=FIRST, local=_lower_affine_grid
    )


def _lower_affine_grid(local: LocalBuilder) -> fx.Node:
    sizes = list(get_node_argument(local.node, "size"))
    return local.copy(size=[local.result_shape()[0], *sizes[1:]])


_MATRIX = 2  # number of dims of a matrix


@register_family(
    "_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "cholesky", "cholesky_inverse",
    "cholesky_solve", "linalg_cholesky_ex", "linalg_inv_ex", "linalg_lu", "linalg_lu_factor_ex", "linalg_lu_solve",
    "linalg_matrix_exp", "linalg_qr", "linalg_solve_triangular",
)  # fmt: skip
def shard_matrix_batch(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, an operator on batches of matrices, such as a factorisation or a solver.
    The batch dims in front of the matrix may be sharded if all operands and results have these dims; otherwise no dim
    may be sharded."""
    operands = [get_meta_shape(o) for o in operands_of(node)]
    results = [tuple(r.shape) for r in results_of(node)]
    first = max(operands, key=len)
    outer = first[:-_MATRIX]
    if any(tuple(s[: len(outer)]) != tuple(outer) for s in (*operands, *results)):
        return forbid_sharding(node)
    names = NAMES[: len(outer)]

    def format_pattern(sizes: tuple[int, ...]) -> list[str | None]:
        return [*names, *[None] * (len(sizes) - len(outer))]

    return build_factor_rule(node, [format_pattern(tuple(s)) for s in operands], [format_pattern(s) for s in results])
