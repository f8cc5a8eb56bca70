"""Rewrite random operators so that every element's number depends on its index in the whole tensor only.

The numbers are then equal under every plan, because each rank draws exactly the numbers of its own shard. The operators
and formulas are in ``passes/ops/random.py``. ``RANDOM`` maps each operator to its rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, fx

from partitioner.passes.errors import UnsupportedError
from partitioner.passes.ir.interpret import META
from partitioner.passes.ir.rewrite import KEEP, Builder, Rule, format_node_location, get_node_tensor, list_node_sizes
from partitioner.passes.ops import random
from partitioner.passes.ops.random import (
    SEED,
    Sampler,
    bind_arguments,
    find_sampling_function,
    format_stream_name,
    is_stream_name,
    list_drawing_operators,
    ops,
    sample_gamma,
)
from partitioner.passes.ops.random import native_dropout as native

aten = torch.ops.aten


def rewrite_dropout(build: Builder, x: fx.Node, p: float, train: bool) -> Any:
    return x if not train or p == 0 else _build_dropout(build, x, p)[0]


def rewrite_native_dropout(build: Builder, x: fx.Node, p: float, train: bool | None) -> Any:
    """Rewrite ``aten.native_dropout`` of ``x``. Return two nodes: the result, and the boolean mask of elements that are
    not zeroed.

    ``build``: appends operators to the graph. ``p``: the probability of zeroing an element. ``train``: whether dropout
    is on; ``None`` means true. If dropout is off or ``p`` is 0, the result is ``x`` and the mask is true everywhere.
    """
    if train is False or p == 0:
        return x, build(aten.ones_like.default, x, dtype=torch.bool, device=META)
    return _build_dropout(build, x, p)


def _build_dropout(build: Builder, x: fx.Node, p: float) -> tuple[fx.Node, fx.Node]:
    dropped, kept = native(_create_sampler(build, {"input": x, "p": p, "train": True}, get_node_tensor(x)))
    return dropped, kept


def rewrite_random_draw(build: Builder, *args: Any, **kwargs: Any) -> Any:
    """Replace a random operator of torch by operators that compute each element's random number from the element's
    index in the whole tensor, and return the node of the result. All plans then draw the same numbers. Return ``KEEP``
    (the operator stays) if this project has no such computation for the operator, or for these arguments.

    ``build``: appends operators to the graph. ``args``, ``kwargs``: the arguments of the replaced operator.
    """
    assert build.node is not None
    formula = find_sampling_function(build.node.target, args, kwargs)
    if formula is None:
        return KEEP
    value = build.node.meta["val"]
    result = value[0] if isinstance(value, tuple | list) else value
    return formula(_create_sampler(build, bind_arguments(build.node.target, args, kwargs), result))  # type: ignore[arg-type]


def _create_sampler(build: Builder, given: Mapping[str, Any], result: Tensor) -> Sampler:
    """Return a :class:`Sampler` for a function that imitates one of torch's random operators on a graph. Through the
    sampler, the function reads the operator's arguments, appends operators to the graph and draws random numbers.
    ``build``: appends operators to the graph. ``given``: the arguments of torch's operator by name. ``result``: a meta
    tensor with the shape and dtype of the operator's result."""

    def numbers(distribution: torch._ops.OpOverload, sizes: Sequence[int], *parameters: fx.Node) -> fx.Node:
        return _draw_random_numbers(build, list(sizes), distribution, *parameters)

    def run(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = target in (aten.zeros_like.default, aten.ones_like.default)
        return build(target, *args, **kwargs, **({"device": META} if new else {}))

    return Sampler(run, numbers, given, result)


def rewrite_gamma(build: Builder, concentration: fx.Node, generator: Any = None) -> Any:
    """Rewrite ``_standard_gamma`` as operators that compute each sample from the element's index in the whole tensor,
    and return the node of the samples. The gradient with respect to ``concentration`` is torch's, by implicit
    differentiation.

    ``build``: appends operators to the graph. ``concentration``: the node of the shape parameter of each element's
    gamma distribution. ``generator``: if it is given, return ``KEEP`` (the operator stays)."""
    if generator is not None:
        return KEEP
    sample = sample_gamma(_create_sampler(build, {"self": concentration}, get_node_tensor(concentration)))
    fixed = build(aten.detach.default, concentration)
    slope = build(ops.gamma_grad.default, fixed, sample)
    change = build(aten.sub.Tensor, concentration, fixed)
    return build(aten.add.Tensor, sample, build(aten.mul.Tensor, change, slope))


def rewrite_dirichlet(build: Builder, concentration: fx.Node, generator: Any = None) -> Any:
    """Rewrite ``_sample_dirichlet`` as operators that compute each sample from the element's index in the whole tensor,
    and return the node of the samples. The gradient with respect to ``concentration`` is torch's, by implicit
    differentiation.

    ``build``: appends operators to the graph. ``concentration``: the node of the parameters of each Dirichlet
    distribution, along the last dim. ``generator``: if it is given, return ``KEEP`` (the operator stays)."""
    if generator is not None:
        return KEEP
    sample = random.sample_dirichlet(_create_sampler(build, {"self": concentration}, get_node_tensor(concentration)))
    fixed = build(aten.detach.default, concentration)
    total = build(aten.sum.dim_IntList, fixed, [-1], True)
    slope = build(ops.dirichlet_grad.default, sample, fixed, total)
    change = build(aten.mul.Tensor, build(aten.sub.Tensor, concentration, fixed), slope)
    shared = build(aten.mul.Tensor, sample, build(aten.sum.dim_IntList, change, [-1], True))
    return build(aten.add.Tensor, sample, build(aten.sub.Tensor, change, shared))


def rewrite_rrelu(
    build: Builder,
    x: fx.Node,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    """Rewrite the randomized leaky ReLU of ``x`` as a product with randomly drawn slopes, and return the node of the
    result. ``build``: appends operators to the graph. ``lower``, ``upper``: the bounds of the slope of negative
    elements. ``training``: whether slopes are drawn; otherwise the mean of the bounds is used. ``generator``: if it is
    given, return ``KEEP`` (the operator stays)."""
    if generator is not None:
        return KEEP
    given = {"self": x, "lower": lower, "upper": upper, "training": training}
    return random.apply_random_relu(_create_sampler(build, given, get_node_tensor(x)))[0]


def _draw_random_numbers(
    build: Builder, sizes: list[int], distribution: Any = ops.uniform.default, *parameters: fx.Node
) -> fx.Node:
    """Append a draw of one random number for each element of a tensor of the shape ``sizes`` to the graph, and return
    its node.

    A number is a hash of a seed, the element's index and a stream number, an integer that identifies the draw. Every
    call adds a constant with a new stream number to the graph, so that no two draws give the same numbers. ``build``:
    appends operators to the graph. ``distribution``: the operator that draws, such as ``partition::uniform`` (numbers
    from 0 to 1). ``parameters``: its further operands, such as a rate.
    """
    stream = format_stream_name(sum(is_stream_name(name) for name in build.constants))
    seed = build.constant(SEED, torch.tensor(0))
    own = build.constant(stream, torch.tensor(int(stream.rsplit(".", 1)[1])))
    return build(distribution, _build_element_index(build, sizes), seed, own, *parameters)


def _build_element_index(build: Builder, sizes: list[int]) -> fx.Node:
    """Append operators to the graph that compute each element's index, from 0, in the flattened whole tensor of the
    shape ``sizes``. Return their int64 node, of a shape that broadcasts to ``sizes``.

    The index is a sum of ``arange`` operators, so that any dim can be sharded and each rank gets the indices of its own
    elements. ``build``: appends operators to the graph.
    """
    total: fx.Node | None = None
    stride = 1
    for dim in reversed(range(len(sizes))):
        place = build(aten.arange.default, sizes[dim], dtype=torch.int64, device=META)
        place = place if stride == 1 else build(aten.mul.Tensor, place, stride)
        if dim < len(sizes) - 1:
            place = build(aten.reshape.default, place, [sizes[dim]] + [1] * (len(sizes) - 1 - dim))
        total = place if total is None else build(aten.add.Tensor, place, total)
        stride *= sizes[dim]
    return total if total is not None else build(aten.zeros.default, [], dtype=torch.int64, device=META)


class AttentionOptions(TypedDict, total=False):
    """Options of ``aten.scaled_dot_product_attention``. ``scale``: the factor of the scores; ``None`` means ``1 /
    sqrt(width of a head)``. ``enable_gqa``: whether each head of keys and values serves several heads of queries."""

    scale: float | None
    enable_gqa: bool


def rewrite_attention_dropout(
    build: Builder,
    q: fx.Node,
    k: fx.Node,
    v: fx.Node,
    mask: fx.Node | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Rewrite scaled dot-product attention with dropout as matrix products and a softmax, because dropout needs the
    attention weights as a tensor. Return the node of the result, or ``KEEP`` (the operator stays) if ``dropout_p`` is
    0.

    ``build``: appends operators to the graph. ``q``, ``k``, ``v``: queries, keys and values ``[..., heads, positions,
    width]``. ``mask``: boolean (true where a query sees a key) or numbers to add to the scores; ``None`` for none.
    ``dropout_p``: the probability of zeroing a weight. ``is_causal``: whether a query sees only the keys up to its own
    position; ``mask`` is then not used. ``options``: ``scale`` and ``enable_gqa``, as in
    ``aten.scaled_dot_product_attention``.
    """
    if not dropout_p:
        return KEEP
    groups = list_node_sizes(q)[-3] // list_node_sizes(k)[-3] if options.get("enable_gqa") else 1
    if groups > 1:
        k, v = (_repeat_key_heads(build, x, groups) for x in (k, v))
    given = options.get("scale")
    scale = 1.0 / math.sqrt(list_node_sizes(q)[-1]) if given is None else given
    scores = build(aten.matmul.default, build(aten.mul.Tensor, q, scale), build(aten.transpose.int, k, -2, -1))
    if is_causal:
        mask = _build_causal_mask(build, list_node_sizes(q)[-2], list_node_sizes(k)[-2])
    if mask is not None and get_node_tensor(mask).dtype == torch.bool:
        scores = build(aten.where.ScalarOther, mask, scores, -math.inf)
    elif mask is not None:
        scores = build(aten.add.Tensor, scores, mask)
    weights = build(aten.softmax.int, scores, -1)
    return build(aten.matmul.default, rewrite_dropout(build, weights, dropout_p, True), v)


def _repeat_key_heads(build: Builder, x: fx.Node, groups: int) -> fx.Node:
    *outer, heads, length, width = list_node_sizes(x)
    x = build(aten.unsqueeze.default, x, -3)
    x = build(aten.expand.default, x, [*outer, heads, groups, length, width])
    return build(aten.reshape.default, x, [*outer, heads * groups, length, width])


def _build_causal_mask(build: Builder, rows: int, columns: int) -> fx.Node:
    row = build(aten.arange.default, rows, dtype=torch.int64, device=META)
    column = build(aten.arange.default, columns, dtype=torch.int64, device=META)
    return build(aten.ge.Tensor, build(aten.unsqueeze.default, row, 1), column)


_SWITCHES = ("train", "training", "dropout", "dropout_p")  # arguments that switch the drawing off if false or 0


def refuse_torch_random_operators(graph: fx.Graph) -> None:
    """Raise :class:`UnsupportedError` if ``graph`` still has a random operator of torch that no rewrite rule has
    replaced. The numbers of such an operator would differ between plans."""
    for node in graph.nodes:
        if node.op == "call_function" and _is_random_draw(node):
            raise _create_draw_error(node)


def _is_random_draw(node: fx.Node) -> bool:
    """Return whether ``node`` draws random numbers. Its operator must be tagged as random or take a generator (torch
    does not tag all random operators), and must not be switched off by an argument such as ``train=False`` or
    ``dropout_p=0``."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    arguments = target._schema.arguments
    if torch.Tag.nondeterministic_seeded not in target.tags and all("Generator" not in str(a.type) for a in arguments):
        return False
    given = bind_arguments(target, node.args, node.kwargs)
    return all(given.get(name, True) for name in _SWITCHES)


def _create_draw_error(node: fx.Node) -> UnsupportedError:
    """Return the error to raise for the random operator ``node``, which no rule could rewrite so that it draws the same
    numbers under every plan. The message names the operator, its location and what to do instead.
    """
    whole = "random" in str(node.target) or "randint" in str(node.target)
    instead = "give whole bounds that are at most 2**40 apart, or " if whole else ""
    return UnsupportedError(
        f"{node.target} at {format_node_location(node)} draws random numbers that would differ between "
        f"plans; {instead}draw them "
        "outside of the model and pass them as an input, or call model.eval()"
    )


def rewrite_channel_dropout(build: Builder, x: fx.Node, p: float, train: bool) -> Any:
    """Rewrite dropout of ``x`` that zeroes whole channels (dim 1) of a sample, and return the node of the result.

    ``build``: appends operators to the graph. ``p``: the probability with which a channel is zeroed. ``train``: whether
    dropout is on; if not, ``x`` is returned.
    """
    if not train or p == 0:
        return x
    if p == 1:
        return build(aten.zeros_like.default, x, device=META)
    return build(
        aten.mul.Tensor, x, build(aten.mul.Tensor, _draw_kept_mask(build, x, p, whole_channels=True), 1 / (1 - p))
    )


def make_alpha_dropout_rule(whole_channels: bool) -> Rule:
    """Return the function that rewrites alpha dropout, which keeps the mean and variance of its input (Klambauer et al.
    2017), as elementary operators.

    ``whole_channels``: whether whole channels (dim 1) of a sample are dropped, instead of single elements.
    """

    def rule(build: Builder, x: fx.Node, p: float, train: bool) -> Any:
        """Append alpha dropout of ``x``, which keeps the mean and variance of its input, to the graph and return the
        node of the result. Return ``x`` itself if ``train`` is false or ``p`` is 0. ``build``: appends operators to the
        graph. ``p``: the probability of dropping an element or channel."""
        if not train or p == 0:
            return x
        if p == 1:
            return build(aten.zeros_like.default, x, device=META)
        kept = _draw_kept_mask(build, x, p, whole_channels)
        scale = 1 / math.sqrt((_SATURATED * _SATURATED * p + 1) * (1 - p))
        instead = build(aten.mul.Tensor, build(aten.sub.Tensor, kept, 1.0), _SATURATED * scale)
        instead = build(aten.add.Tensor, instead, _SATURATED * scale * p)
        return build(aten.add.Tensor, build(aten.mul.Tensor, x, build(aten.mul.Tensor, kept, scale)), instead)

    return rule


_SATURATED = 1.7580993408473766  # the negated limit of SELU at minus infinity


def _draw_kept_mask(build: Builder, x: fx.Node, p: float, whole_channels: bool) -> fx.Node:
    """Append a random mask for dropout of ``x`` to the graph: 1 with probability ``1 - p``, otherwise 0. Return its
    node. ``build``: appends operators to the graph. ``p``: the probability of zeroing. ``whole_channels``: if true, one
    number is drawn for each channel (dim 1) of a sample, and the mask has size 1 in every dim behind dim 1; if false,
    the mask has the shape of ``x``."""
    sizes = list_node_sizes(x)
    sizes = sizes[:2] + [1] * (len(sizes) - 2) if whole_channels else sizes
    kept: fx.Node = random.sample_bernoulli(_create_sampler(build, {"p": 1 - p}, get_node_tensor(x).new_empty(sizes)))
    return kept


RANDOM: dict[Any, Rule] = {
    **dict.fromkeys(list_drawing_operators(), rewrite_random_draw),
    aten._standard_gamma.default: rewrite_gamma,
    aten._sample_dirichlet.default: rewrite_dirichlet,
    aten.rrelu.default: rewrite_rrelu,
    aten.feature_dropout.default: rewrite_channel_dropout,
    aten.alpha_dropout.default: make_alpha_dropout_rule(whole_channels=False),
    aten.feature_alpha_dropout.default: make_alpha_dropout_rule(whole_channels=True),
    aten.dropout.default: rewrite_dropout,
    aten.native_dropout.default: rewrite_native_dropout,
    aten.scaled_dot_product_attention.default: rewrite_attention_dropout,
}
