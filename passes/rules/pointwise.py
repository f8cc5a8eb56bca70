"""Sharding rules of elementwise operators and of operators that create tensors.

Each function returns the :class:`OpFactors` of one operator call, which says which dims may be sharded. If an operator
is *linear* in an operand, the operand may be a partial sum; the result is then a partial sum, too. Every result dim of
an elementwise operator may be sharded. A created tensor is sharded if each rank can create its own part; torch's own
random operators are not sharded.
"""

from __future__ import annotations

import torch
from torch import fx

from partitioner.passes.ir.collectives import ops as collective
from partitioner.passes.ir.gradient_flow import is_differentiable
from partitioner.passes.ir.layouts import list_sections
from partitioner.passes.rules.factors import (
    FIRST,
    NAMES,
    LocalBuilder,
    OpFactors,
    build_factor_rule,
    forbid_sharding,
    get_meta_shape,
    get_node_argument,
    mark_linear_each,
    mark_linear_together,
    operands_of,
    results_of,
)
from partitioner.passes.rules.registry import register_family

aten = torch.ops.aten

Linear = tuple[frozenset[int], ...]

NONLINEAR = """
    _conj_physical abs absolute acos acosh addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh
    asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
    ceil celu clamp clamp_max clamp_min clip complex copysign cos cosh digamma elu eq erf erfc erfinv exp exp2 expm1
    fix float_power floor floor_divide fmax fmin fmod frac ge gelu greater greater_equal gt hardshrink hardsigmoid
    hardswish hardtanh heaviside hypot i0 isclose isfinite isinf isnan isneginf isposinf ldexp le leaky_relu lerp less
    less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or
    logical_xor logit lt maximum minimum mish mvlgamma nan_to_num ne nextafter not_equal polar polygamma pow reciprocal
    relu relu6 remainder round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_entr
    special_erf special_expit special_log1p special_logit sqrt square tan tanh threshold trunc xlogy
    __and__ __or__ __xor__ __lshift__ __rshift__ special_xlog1py max.other min.other gcd lcm
    special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtri
    gelu_backward hardtanh_backward hardswish_backward sigmoid_backward softplus_backward tanh_backward
    threshold_backward
""".split()

# Operators that are linear in their (first) operand.
LINEAR = """
    neg negative positive clone contiguous alias detach lift_fresh_copy lift_fresh conj real imag deg2rad rad2deg
    _conj _neg_view resolve_conj resolve_neg
""".split()


def shard_elementwise(node: fx.Node, linear: Linear = ()) -> OpFactors:
    """Return the sharding rule of ``node``, an elementwise operator: every dim of the result may be sharded, together
    with the matching dims of the operands, except those of size 1, which are broadcast.

    ``linear``: sets of operand positions (from 0). If exactly the operands of one set are partial sums, so is the
    result.
    """
    results = results_of(node)
    rank = len(results[0].shape)
    names = NAMES[:rank]
    operands = [names[rank - len(get_meta_shape(o)) :] for o in operands_of(node)]
    return build_factor_rule(node, operands, [names] * len(results), linear=linear)


register_family(*NONLINEAR)(shard_elementwise)


@register_family(*LINEAR)
def shard_linear_elementwise(node: fx.Node) -> OpFactors:
    return shard_elementwise(node, FIRST)


@register_family("add", "sub", "subtract", "rsub")
def shard_addition(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, an addition or subtraction: every dim may be sharded, and the sum of two
    partial sums is a partial sum.

    Adding a Python number to a partial sum is not allowed, because every rank would add it.
    """
    return shard_elementwise(node, mark_linear_together(2) if len(operands_of(node)) == 2 else ())


@register_family("mul", "multiply")
def shard_multiplication(node: fx.Node) -> OpFactors:
    return shard_elementwise(node, mark_linear_each(*range(len(operands_of(node)))))


@register_family("div", "divide", "true_divide")
def shard_division(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a division: every dim may be sharded.

    If the numerator is a partial sum, so is the result, unless the quotient is rounded.
    """
    is_linear = isinstance(node.args[0], fx.Node) and get_node_argument(node, "rounding_mode") is None
    return shard_elementwise(node, FIRST if is_linear else ())


@register_family("to", "_to_copy", "type_as")
def shard_dtype_cast(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a cast: every dim may be sharded.

    If the operand is a partial sum, so is the result, provided that the new dtype is floating-point or complex, or
    equal to the old one. A second operand, which only provides the dtype, is not sharded.
    """
    source, *others = operands_of(node)
    names = NAMES[: len(get_meta_shape(source))]
    keeps = is_differentiable(node.meta["val"]) or node.meta["val"].dtype == source.meta["val"].dtype
    unread: list[tuple[None, ...]] = [(None,) * len(get_meta_shape(o)) for o in others]
    return build_factor_rule(node, [names, *unread], [names], linear=FIRST if keeps else ())


@register_family("copy")
def shard_copy(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``copy(x, source)``, whose result has the shape and dtype of
    ``x`` and the data of ``source``.

    Every dim may be sharded. If ``x`` is floating-point or complex and ``source`` is a partial sum, so is the
    result.
    """
    return shard_elementwise(node, mark_linear_each(1) if is_differentiable(node.meta["val"]) else ())


@register_family("where")
def shard_where(node: fx.Node) -> OpFactors | None:
    """Return the sharding rule of ``node``, a call of ``where(condition, a, b)``: every dim may be sharded.

    If ``a`` and ``b`` are both partial sums, so is the result. Return ``None`` (no sharding) for
    ``where(condition)``, which lists the indices of true elements.
    """
    if str(node.target).endswith(".default"):
        return None  # ``where(condition)`` lists the indices of true elements
    return shard_elementwise(node, (frozenset((1, 2)),) if len(operands_of(node)) == 3 else ())


@register_family("masked_fill")
def shard_masked_fill(node: fx.Node) -> OpFactors:
    return shard_elementwise(node, FIRST if get_node_argument(node, "value") == 0 else ())


@register_family("dropout", "native_dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def shard_dropout(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, one of torch's dropout operators.

    If dropout does nothing (not in training, or ``p`` is 0), every dim may be sharded. Otherwise no dim may be sharded,
    because the random mask must be the same on every rank.
    """
    if get_node_argument(node, "train") is False or get_node_argument(node, "p") == 0:
        return shard_elementwise(node, FIRST)
    return forbid_sharding(node)


@register_family("prelu", "_prelu_kernel")
def shard_prelu(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a PReLU: every dim may be sharded.

    If the weight has one slope per channel (dim 1), it is sharded together with the channels; a single slope is not
    sharded.
    """
    x, weight = operands_of(node)
    if not get_meta_shape(x):
        return forbid_sharding(node)
    names = NAMES[: len(get_meta_shape(x))]
    slopes = names if len(get_meta_shape(weight)) == len(names) else names[1 : 1 + len(get_meta_shape(weight))]
    return build_factor_rule(node, [names, slopes], [names])


@register_family("fill")
def shard_fill(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``fill``, which sets all elements to one value: every dim may
    be sharded."""
    names = NAMES[: len(node.meta["val"].shape)]
    return build_factor_rule(node, [names, *([] for _ in operands_of(node)[1:])], [names])


@register_family("bucketize", "isin")
def shard_lookup(node: fx.Node) -> OpFactors | None:
    """Return the sharding rule of ``node``, a call of ``bucketize`` or ``isin``, which look up each element in a second
    tensor.

    The dims of the elements may be sharded; the second tensor must not be. Return ``None`` (no sharding) if the
    elements are a Python number instead of a tensor.
    """
    if not isinstance(node.args[0], fx.Node):
        return None
    elements, *others = operands_of(node)
    names = NAMES[: len(get_meta_shape(elements))]
    return build_factor_rule(node, [names, *([None] * len(get_meta_shape(o)) for o in others)], [names])


@register_family("searchsorted")
def shard_searchsorted(node: fx.Node) -> OpFactors | None:
    """Return the sharding rule of ``node``, a call of ``searchsorted``, which finds the position of each element in a
    sorted row.

    The last dim of the sorted tensor must not be sharded. If the sorted tensor has one row for each row of elements,
    its leading dims may be sharded together with those of the elements. Return ``None`` (no sharding) if the elements
    are a Python number instead of a tensor.
    """
    if len(node.args) < 2 or not isinstance(node.args[1], fx.Node):
        return None
    ordered, elements, *sorter = operands_of(node)
    names = NAMES[: len(get_meta_shape(elements))]
    row = [*names[:-1], None] if len(get_meta_shape(ordered)) > 1 else [None]
    return build_factor_rule(node, [row, names, *(row for _ in sorter)], [names])


@register_family("glu")
def shard_glu(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, a call of ``glu``, which multiplies the first half of a dim by the sigmoid
    of the second half.

    All dims may be sharded. Each half of the split dim is divided over the ranks separately, so that a rank has
    matching parts of both halves.
    """
    (x,) = operands_of(node)
    rank = len(get_meta_shape(x))
    dim = get_node_argument(node, "dim", -1) % rank
    names = NAMES[:rank]
    found = build_factor_rule(node, [[n if d != dim else None for d, n in enumerate(names)]], [names])
    halves = tuple(dims if d != dim else ("half", names[dim]) for d, dims in enumerate(found.operands[0]))
    sizes = {**found.sizes, "half": 2, names[dim]: get_meta_shape(x)[dim] // 2}
    return OpFactors(sizes, (halves,), found.results, frozenset(("half",)))


@register_family(
    *(f"partition::{name}" for name in ("uniform", "normal", "exponential", "bits", "fraction")),
    *(f"partition::{name}" for name in ("gamma", "poisson", "binomial", "gamma_grad", "dirichlet_grad")),
)
def shard_random_draw(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, one of this project's random operators, such as ``partition::uniform``:
    every dim may be sharded.

    Each number depends only on a seed, the element's index in the whole tensor and the element's own parameters.
    """
    return shard_elementwise(node)


@register_family("full", "zeros", "ones", "empty", "new_full", "new_zeros", "new_ones", "new_empty", "scalar_tensor")
def shard_full(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, an operator that creates a constant tensor of given sizes, such as
    ``zeros``: every dim may be sharded.

    Tensor operands only provide the dtype and are not sharded.
    """
    unread = [[None] * len(get_meta_shape(o)) for o in operands_of(node)]
    return build_factor_rule(node, unread, [NAMES[: len(node.meta["val"].shape)]], local=_lower_fill)


def _lower_fill(local: LocalBuilder) -> fx.Node:
    return local.copy(size=list(local.result_shape()))


@register_family("full_like", "zeros_like", "ones_like", "empty_like")
def shard_full_like(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, an operator that creates a constant tensor of an operand's sizes, such
    as ``zeros_like``: every dim may be sharded, in the result together with the operand."""
    names = NAMES[: len(node.meta["val"].shape)]
    return build_factor_rule(node, [names], [names])


@register_family("arange")
def shard_arange(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, an ``arange``: its dim may be sharded. Each rank creates its own part of
    the sequence of numbers."""
    return build_factor_rule(node, [], [NAMES[:1]], local=_lower_arange)


def _lower_arange(local: LocalBuilder) -> fx.Node:
    """Append this rank's part of an ``arange`` to the graph of one rank, and return the node of the result. If the rank
    has several ranges of the dim, they are concatenated: one range of each section (a part of the dim that is divided
    over all ranks), and, for a zigzag shard, one range from each end. ``local``: the ``arange`` to replace, its layout,
    and the graph of one rank."""
    val = local.node.meta["val"]
    start, step = get_node_argument(local.node, "start", 0), get_node_argument(local.node, "step", 1)
    if not val.dtype.is_floating_point:  # for integers, torch rounds start and step first
        start, step = int(start), int(step)
    options = {**local.node.kwargs, "dtype": val.dtype}
    rank = local.call(collective.axis_index.default, local.axis, local.num_ranks)
    layout = local.strategy.results[0]
    pieces: list[fx.Node] = []
    for section in list_sections(layout, val.shape[0]):
        length = section // (local.num_ranks * (1 + layout.zigzag))
        for from_end in (False, True) if layout.zigzag else (False,):
            piece = local.call(aten.arange.default, length, **options)
            place = local.call(aten.mul.Tensor, rank, -length if from_end else length)
            piece = local.call(aten.add.Tensor, piece, place)
            if step != 1:
                piece = local.call(aten.mul.Tensor, piece, step)
            first = start + (section - length) * step if from_end else start
            pieces.append(local.call(aten.add.Tensor, piece, first) if first else piece)
        start += section * step
    return pieces[0] if len(pieces) == 1 else local.call(aten.cat.default, pieces)


@register_family(
    "bernoulli", "eye", "hann_window", "linspace", "logspace", "multinomial", "normal", "poisson", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "randperm", "tril_indices", "triu_indices", "exponential",
    "uniform", "rrelu", "rrelu_with_noise",
)  # fmt: skip
def replicate_operator(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, an operator whose tensors must not be sharded along any dim. The elements
    depend on each other, or on a random generator that must have the same state on all ranks."""
    return forbid_sharding(node)
