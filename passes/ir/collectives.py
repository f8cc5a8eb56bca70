"""Define the collectives of a sharded graph as operators, with their transposes as gradients.

Every operator names a mesh *axis* and the number of ranks on it, so that a graph is equal on all ranks of a pipeline
stage. The operators are traced, never executed: the runtime binds them to a communicator
(``runtime/comm/torch_backend.py``). The table uses the layouts of ``passes/ir/layouts.py``: ``S`` sharded, ``R`` whole
on every rank, ``R'`` whole and read by a sharded operator, ``P`` a partial sum.

===================================  =======================  ==============================================
operator                             backward                 change of layout
===================================  =======================  ==============================================
``all_gather(grad="slice")``         ``shard_slice``          ``S -> R``
``all_gather(grad="reduce")``        ``reduce_scatter``       ``S -> R'``
``shard_slice``                      ``all_gather``           ``R -> S``
``shard_narrow``                     ``shard_pad``            ``R' -> S`` (nothing is sent)
``copy``                             ``all_reduce``           ``R -> R'``
``reduce_scatter``                   ``all_gather``           ``P -> S``
``all_reduce(grad="copy")``          nothing                  ``P -> R``
``all_reduce(grad="reduce")``        ``all_reduce``           ``P -> R'``
``all_to_all``                       ``all_to_all`` back      ``S -> S``
``gather_products``                  not differentiated       ``all_gather``, and matrix products of its result
``products_scatter``                 not differentiated       ``reduce_scatter`` of a sum of matrix products
``axis_index``                       (an integer)             this rank's index on the axis, a 0-d int64 tensor
``dispatch``                         ``combine``              sends rows to the ranks of their experts
``combine``                          ``dispatch``             sends the rows back to their ranks
``context_attention``                its ``_backward``        local queries attend to the keys of all ranks
``context_document_attention``       its ``_backward``        ``context_attention`` within documents; ids are exchanged
``context_scored_attention``         its ``_backward``        ``context_document_attention`` with scores or prefixes
===================================  =======================  ==============================================

The number of rows (tokens) that go to an expert depends on data. ``route`` determines it and returns three results: the
order of the rows by expert; the numbers of rows sent to and received from each rank (two rows of counts on the CPU,
exchanged once at a fixed size); and the expert of every received row, counted from this rank's first expert.
``dispatch`` and ``combine`` read these results, in forward and backward. Every rank takes part in all three operators,
even if it has no rows. In a graph, the number of received rows is that of a balanced router; tracing for gradients
(``passes/shard/differentiate.py``) makes this number symbolic.

``gather_products`` and ``products_scatter`` communicate in pieces while they multiply. They occur only in forward and
backward graphs, where ``passes/shard/overlap_products.py`` inserts them. ``weights`` are ``[in, out]``; all dims but
the last of the operands count as rows. ``gather_products`` returns the gathered tensor and one product for each weight,
to which the vector at the same position of ``biases`` is added. ``products_scatter`` multiplies ``x`` and each tensor
of ``more`` by its own weight; ``shape`` is the shape of the sum before it is scattered along ``dim``. ``pieces``: the
number of pieces, a multiple or a divisor of the number of ranks.

``context_attention`` is attention within a band of positions (``passes/ops/attention.py``) over a sequence of which
each rank has a part, contiguous or ``zigzag`` (one piece from the start and one from the end). ``algorithm`` says how
keys and values are exchanged: by an ``all_gather``, or by sends in a ``ring``. It is a single operator because the
computation depends on the rank's index, and the graph must be equal on all ranks. Backward exchanges keys and values
again, so that a rank saves only its own part. ``context_document_attention`` restricts attention to documents
(``passes/ops/documents.py``); every rank gathers the document ids of all positions, which are small.
``context_scored_attention`` also changes scores and has prefixes (``passes/ops/scored_attention.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

NAMESPACE = "partition"

_library = torch.library.Library(NAMESPACE, "DEF")

_SCHEMAS = {
    "all_gather": "(Tensor x, int dim, str axis, int size, str grad) -> Tensor",
    "shard_slice": "(Tensor x, int dim, str axis, int size) -> Tensor",
    "shard_narrow": "(Tensor x, int dim, str axis, int size) -> Tensor",
    "shard_pad": "(Tensor x, int dim, str axis, int size) -> Tensor",
    "copy": "(Tensor x, str axis, int size) -> Tensor",
    "reduce_scatter": "(Tensor x, int dim, str axis, int size) -> Tensor",
    "all_reduce": "(Tensor x, str axis, int size, str grad) -> Tensor",
    "all_reduce_max": "(Tensor x, str axis, int size) -> Tensor",
    "all_to_all": "(Tensor x, int split_dim, int concat_dim, str axis, int size) -> Tensor",
    "gather_products": "(Tensor x, Tensor[] weights, Tensor?[] biases, int dim, str axis, int size, int pieces) "
    "-> Tensor[]",
    "products_scatter": "(Tensor x, Tensor[] more, Tensor[] weights, int[] shape, int dim, str axis, int size, "
    "int pieces) -> Tensor",
    "axis_index": "(str axis, int size) -> Tensor",
    "route": "(Tensor experts, int num_experts, str axis, int size) -> (Tensor, Tensor, Tensor)",
    "dispatch": "(Tensor x, Tensor order, Tensor counts, Tensor experts, str axis, int size) -> Tensor",
    "combine": "(Tensor x, Tensor order, Tensor counts, Tensor experts, str axis, int size) -> Tensor",
    "context_attention": "(Tensor q, Tensor k, Tensor v, int before, int after, float? scale, str axis, int size, "
    "bool zigzag, str algorithm) -> (Tensor, Tensor)",
    "context_attention_backward": "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int before, "
    "int after, float? scale, str axis, int size, bool zigzag, str algorithm) -> (Tensor, Tensor, Tensor)",
    "context_document_attention": "(Tensor q, Tensor k, Tensor v, Tensor ids, int[] lengths, int before, int after, "
    "float? scale, str axis, int size, bool zigzag, str algorithm) -> (Tensor, Tensor)",
    "context_document_attention_backward": "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor ids, Tensor out, "
    "Tensor lse, int before, int after, float? scale, str axis, int size, bool zigzag, str algorithm) "
    "-> (Tensor, Tensor, Tensor)",
    "context_scored_attention": "(Tensor q, Tensor k, Tensor v, Tensor? ids, Tensor? prefix, Tensor? slopes, "
    "int[] lengths, int ahead, int before, int after, float? scale, float? cap, str axis, int size, bool zigzag, "
    "str algorithm, int[] reach=[]) -> (Tensor, Tensor)",
    "context_scored_attention_backward": "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? ids, Tensor? prefix, "
    "Tensor? slopes, Tensor out, Tensor lse, int before, int after, float? scale, float? cap, str axis, int size, "
    "bool zigzag, str algorithm, int[] reach=[], bool trained=False) -> (Tensor, Tensor, Tensor, Tensor)",
}
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema)

ops = torch.ops.partition


def _make_scaled_result(x: Tensor, dim: int, times: int, over: int) -> Tensor:
    """Return an empty result of a collective along one dim, for shape inference: it has the shape of ``x``, with the
    size of ``dim`` multiplied by ``times`` and divided by ``over``. ``times``: the number of ranks for an all-gather,
    otherwise 1. ``over``: the number of ranks for a reduce-scatter, otherwise 1."""
    shape = list(x.shape)
    shape[dim] = shape[dim] * times // over
    return x.new_empty(shape)


def _make_attention_results(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return two empty results of attention for shape inference: the output ``[b, h, s, d_v]``, and the logsumexp of
    each query's scores, ``[b, h, s]``. The operator's other arguments are ignored.

    ``q``, ``k``, ``v``: queries, keys and values ``[b, h, s, d]`` (batch, heads, positions, width) of one rank.
    """
    sums = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    return _make_position_major(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=sums)


def _create_attention_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three empty gradients of queries, keys and values ``[b, h, s, d]``, for shape inference of attention's
    backward. ``q``, ``k``, ``v``: queries, keys and values of one rank. All other arguments are ignored."""
    return (
        _make_position_major(q, q.shape[-1]),
        _make_position_major(k, k.shape[-1]),
        _make_position_major(v, v.shape[-1]),
    )


def create_scored_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, prefix: Tensor | None, slopes: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return four empty gradients of queries, keys, values and ALiBi slopes of an attention with changed scores, for
    shape inference of its backward. The last of ``options`` says whether the slopes are trained; if not, their gradient
    has no elements. All other arguments are ignored.

    ``q``, ``k``, ``v``: queries, keys and values ``[b, h, s, d]`` of one rank. ``slopes`` ``[h]``: the slope of each
    head, or ``None``.
    """
    sums = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    like = q.new_empty(0, dtype=sums) if slopes is None else slopes
    return *_create_attention_gradients(grad, q, k, v), like.new_empty(q.shape[1] if options[-1] is True else 0)


def _make_position_major(like: Tensor, width: int) -> Tensor:
    """Return an empty tensor of shape ``[b, h, s, width]`` stored in memory as ``[b, s, h, width]``, like the results
    of attention kernels.

    ``like``: a tensor ``[b, h, s, d]``, from which ``b``, ``h``, ``s``, dtype and device are taken. ``width``: the size
    of the last dim.
    """
    batch, heads, length, _ = like.shape
    return like.new_empty((batch, length, heads, width)).transpose(1, 2)


def _make_route_results(experts: Tensor, num_experts: int, axis: str, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return three empty results, for shape inference, of the operator ``route``, which determines the rank to which
    each row (token) is sent: the order of the rows by expert ``[t]``; the counts ``[2, size]`` of rows sent to, and
    received from, each rank; and the expert number of each received row.

    ``experts`` ``[t]``: the expert number of each row. ``size``: the number of ranks. If the trace has symbolic shapes,
    the number of received rows is symbolic; otherwise it is ``t``. The other arguments are ignored.
    """
    rows: Any = experts.shape[0]
    device: Any = experts.device
    if isinstance(experts, FakeTensor):
        device = "cpu"
        if experts.fake_mode.shape_env is not None:
            rows = torch.library.get_ctx().new_dynamic_size()
    counts = torch.empty((2, size), dtype=torch.int64, device=device)
    return torch.empty_like(experts, dtype=torch.int64), counts, experts.new_empty(rows)


def _make_gathered_products(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], dim: int, axis: str, size: int, pieces: int
) -> list[Tensor]:
    """Return the empty results of ``gather_products`` for shape inference: the tensor that an all-gather concatenates
    from the ranks' shards, and the product ``[rows, out]`` of its rows with each matrix of ``weights`` ``[in, out]``.

    ``x``: one rank's shard. ``dim``: the dim along which shards are concatenated. ``size``: the number of ranks. The
    other arguments are ignored.
    """
    whole = _make_scaled_result(x, dim, size, 1)
    return [whole, *(whole.new_empty((whole.numel() // whole.shape[-1], w.shape[1])) for w in weights)]


_FAKES: dict[str, Callable[..., Any]] = {
    "all_gather": lambda x, dim, axis, size, grad: _make_scaled_result(x, dim, size, 1),
    "shard_slice": lambda x, dim, axis, size: _make_scaled_result(x, dim, 1, size),
    "shard_narrow": lambda x, dim, axis, size: _make_scaled_result(x, dim, 1, size),
    "shard_pad": lambda x, dim, axis, size: _make_scaled_result(x, dim, size, 1),
    "copy": lambda x, axis, size: torch.empty_like(x),
    "reduce_scatter": lambda x, dim, axis, size: _make_scaled_result(x, dim, 1, size),
    "all_reduce": lambda x, axis, size, grad: torch.empty_like(x, memory_format=torch.contiguous_format),
    "all_reduce_max": lambda x, axis, size: torch.empty_like(x, memory_format=torch.contiguous_format),
    "all_to_all": lambda x, split_dim, concat_dim, axis, size: _make_scaled_result(
        _make_scaled_result(x, split_dim, 1, size), concat_dim, size, 1
    ),
    "gather_products": _make_gathered_products,
    "products_scatter": lambda x, more, weights, shape, dim, axis, size, pieces: _make_scaled_result(
        x.new_empty(shape), dim, 1, size
    ),
    "axis_index": lambda axis, size: torch.empty((), dtype=torch.int64),
    "route": _make_route_results,
    "dispatch": lambda x, order, counts, experts, axis, size: x.new_empty((experts.shape[0], *x.shape[1:])),
    "combine": lambda x, order, counts, experts, axis, size: x.new_empty((order.shape[0], *x.shape[1:])),
    "context_attention": _make_attention_results,
    "context_attention_backward": _create_attention_gradients,
    "context_document_attention": _make_attention_results,
    "context_document_attention_backward": _create_attention_gradients,
    "context_scored_attention": _make_attention_results,
    "context_scored_attention_backward": create_scored_gradients,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)
# The operator has no tensor among its arguments, so there is no device to dispatch on.
_library.impl("axis_index", lambda axis, size: torch.empty((), dtype=torch.int64, device="meta"), "BackendSelect")


def _make_argument_saver(*names: str) -> Any:
    """Return a function that is the ``setup_context`` of an operator's autograd function. It stores the operator's
    arguments after the first for backward, as a dict in ``ctx.kept``. ``names``: the keys of the dict, one for each of
    these arguments."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.kept = dict(zip(names, inputs[1:], strict=True))

    return setup


def _all_gather_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    k = ctx.kept
    back = ops.reduce_scatter if k["grad"] == "reduce" else ops.shard_slice
    return back(grad, k["dim"], k["axis"], k["size"]), None, None, None, None


def _all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    k = ctx.kept
    if k["grad"] == "reduce":
        grad = ops.all_reduce(grad, k["axis"], k["size"], "copy")
    return grad, None, None, None


def _gather_dim(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    k = ctx.kept
    return ops.all_gather(grad, k["dim"], k["axis"], k["size"], "slice"), None, None, None


def _narrow_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    k = ctx.kept
    return ops.shard_pad(grad, k["dim"], k["axis"], k["size"]), None, None, None


def _pad_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    k = ctx.kept
    return ops.shard_narrow(grad, k["dim"], k["axis"], k["size"]), None, None, None


def _copy_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    k = ctx.kept
    return ops.all_reduce(grad, k["axis"], k["size"], "copy"), None, None


def _all_to_all_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    k = ctx.kept
    return ops.all_to_all(grad, k["concat_dim"], k["split_dim"], k["axis"], k["size"]), None, None, None, None


def _save_routing_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, order, counts, experts, axis, size = inputs
    ctx.save_for_backward(order, counts, experts)
    ctx.kept = axis, size


def _dispatch_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return ops.combine(grad, *ctx.saved_tensors, *ctx.kept), None, None, None, None, None


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return ops.dispatch(grad, *ctx.saved_tensors, *ctx.kept), None, None, None, None, None


_BACKWARD = {
    "all_gather": (_all_gather_backward, ("dim", "axis", "size", "grad")),
    "shard_slice": (_gather_dim, ("dim", "axis", "size")),
    "shard_narrow": (_narrow_backward, ("dim", "axis", "size")),
    "shard_pad": (_pad_backward, ("dim", "axis", "size")),
    "reduce_scatter": (_gather_dim, ("dim", "axis", "size")),
    "copy": (_copy_backward, ("axis", "size")),
    "all_reduce": (_all_reduce_backward, ("axis", "size", "grad")),
    "all_to_all": (_all_to_all_backward, ("split_dim", "concat_dim", "axis", "size")),
}
for _name, (_backward, _names) in _BACKWARD.items():
    torch.library.register_autograd(
        f"{NAMESPACE}::{_name}", _backward, setup_context=_make_argument_saver(*_names), lib=_library
    )

torch.library.register_autograd(
    f"{NAMESPACE}::dispatch", _dispatch_backward, setup_context=_save_routing_context, lib=_library
)

torch.library.register_autograd(
    f"{NAMESPACE}::combine", _combine_backward, setup_context=_save_routing_context, lib=_library
)


def _save_attention_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.set_materialize_grads(False)
    ctx.kept = inputs[3:]


def _attention_backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    rest = (None,) * len(ctx.kept)
    if grad is None:
        return None, None, None, *rest
    return *ops.context_attention_backward(grad, *ctx.saved_tensors, *ctx.kept), *rest


torch.library.register_autograd(
    f"{NAMESPACE}::context_attention", _attention_backward, setup_context=_save_attention_context, lib=_library
)


def _save_document_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.set_materialize_grads(False)
    ctx.kept = inputs[5:]


def _document_backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    rest = (None,) * (2 + len(ctx.kept))
    if grad is None:
        return None, None, None, *rest
    return *ops.context_document_attention_backward(grad, *ctx.saved_tensors, *ctx.kept), *rest


torch.library.register_autograd(
    f"{NAMESPACE}::context_document_attention", _document_backward, setup_context=_save_document_context, lib=_library
)


def _save_scored_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.set_materialize_grads(False)
    ctx.kept = inputs[8:]


def _scored_backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * (8 + len(ctx.kept))
    trained = ctx.needs_input_grad[5]
    found = ops.context_scored_attention_backward(grad, *ctx.saved_tensors, *ctx.kept, trained)
    return *found[:3], None, None, found[3] if trained else None, *(None,) * (2 + len(ctx.kept))


torch.library.register_autograd(
    f"{NAMESPACE}::context_scored_attention", _scored_backward, setup_context=_save_scored_context, lib=_library
)

ROUTED = frozenset({"route", "dispatch", "combine"})  # communicate a data-dependent number of rows

CONTEXT = frozenset(
    {
        "context_attention", "context_attention_backward",
        "context_document_attention", "context_document_attention_backward",
        "context_scored_attention", "context_scored_attention_backward",
    }
)  # fmt: skip
IN_PIECES = frozenset({"gather_products", "products_scatter"})  # they communicate while they multiply
COMMUNICATING = (
    frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_reduce_max", "all_to_all"})
    | ROUTED
    | CONTEXT
    | IN_PIECES
)


def collective_name(target: Any) -> str | None:
    """If the node target ``target`` is a collective operator of this project, return its name, such as ``all_gather``;
    otherwise return ``None``."""
    if isinstance(target, torch._ops.OpOverload):
        name = str(target._overloadpacket.__name__)
        return name if name in _SCHEMAS and target.namespace == NAMESPACE else None
    return None


def is_collective_over(node: fx.Node, axes: Collection[str]) -> bool:
    """Return whether ``node`` is a collective operator of this project over one of the mesh ``axes``, such as
    ``tp``.
    """
    return collective_name(node.target) is not None and any(isinstance(a, str) and a in axes for a in node.args)
