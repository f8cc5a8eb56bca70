"""Recognise constant attention masks: causal ones become ``is_causal``, all-true ones are dropped.

Requires: a graph in normal form. A mask counts where it depends on nothing but constants. Its value is found without
ever making it: a tensor is held with size 1 in every dim along which it does not change, and a comparison of something
that varies along one dim with something that varies along another stays a pair of vectors. So the cost grows with the
sequence's length, not its square, and a window that is as long as the sequence counts as causal.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes.rewrite import aten, shape, val

_LIMIT = 1 << 22  # elements of a tensor that is evaluated as it is
_MASKED = -6e4  # what is added to a score to hide it is at most this: the type's smallest number, or -inf


@dataclass(frozen=True)
class _Term:
    """``compare(a, b)``, broadcast; size 1 wherever it does not change."""

    compare: str
    a: Tensor
    b: Tensor


# A tensor of size 1 where it does not change; or terms that must all hold; or (terms, value where true, where false).
_Value = Tensor | tuple[_Term, ...] | tuple[tuple[_Term, ...], Tensor, Tensor]


class _Unknown(Exception):
    """The value cannot be found at this cost."""


def drop_constant_masks(graph: fx.Graph, constants: Mapping[str, Tensor]) -> None:
    """Rewrite attention under constant masks in place; ``constants``: values of placeholders, by name."""
    evaluator = _Evaluator(constants)
    changed = False
    for node in graph.nodes:
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        kind = evaluator.kind(mask, shape(node.args[0])[-2]) if isinstance(mask, fx.Node) else None
        if kind is not None:
            node.args = (*node.args[:3], None, 0.0, kind == "causal")
            node.kwargs = {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}
            changed = True
    if changed:
        graph.eliminate_dead_code()


class _Evaluator:
    def __init__(self, constants: Mapping[str, Tensor]) -> None:
        self.constants = constants
        self.values: dict[fx.Node, _Value | None] = {}
        self.kinds: dict[tuple[fx.Node, int], str | None] = {}

    def kind(self, mask: fx.Node, num_queries: int) -> str | None:
        """``causal``, ``all`` or ``None`` of a mask ``[..., queries, keys]``."""
        if (mask, num_queries) not in self.kinds:
            value = self.value(mask)
            self.kinds[mask, num_queries] = None if value is None else _classify(value, num_queries, shape(mask)[-1])
        return self.kinds[mask, num_queries]

    def value(self, node: fx.Node) -> _Value | None:
        """The node's value, ``None`` where it depends on more than constants or costs too much."""
        stack = [node]
        while stack:
            top = stack[-1]
            waiting = [n for n in top.all_input_nodes if n not in self.values]
            if waiting and top not in self.values:
                stack += waiting
            else:
                stack.pop()
                if top not in self.values:
                    self.values[top] = self.evaluate(top)
        return self.values[node]

    def evaluate(self, node: fx.Node) -> _Value | None:
        if node.op == "placeholder":
            constant = self.constants.get(node.name)
            return None if constant is None or constant.numel() > _LIMIT else _squeeze(constant)
        operands = [self.values[n] for n in node.all_input_nodes]
        if node.op != "call_function" or any(v is None for v in operands):
            return None
        try:
            args = fx.node.map_arg(node.args, self.values.__getitem__)
            rule = _RULES.get(node.target, _dense)
            result = rule(node, *args, **fx.node.map_arg(node.kwargs, self.values.__getitem__))
            return _squeeze(result) if isinstance(result, Tensor) else result
        except (_Unknown, RuntimeError, IndexError, TypeError):
            return None


def _squeeze(tensor: Tensor) -> Tensor:
    """Size 1 in every dim along which ``tensor`` does not change."""
    for dim in range(tensor.dim()):
        first = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
        if tensor.shape[dim] > 1 and bool((tensor == first).all()):
            tensor = first
    return tensor


def _whole(tensor: Any, sizes: list[int]) -> Tensor:
    if not isinstance(tensor, Tensor) or torch.Size(sizes).numel() > _LIMIT:
        raise _Unknown
    return tensor.expand(sizes)


def _along(tensor: Any, dim: int, size: int) -> Tensor:
    """``tensor`` with its true size along ``dim``."""
    if not isinstance(tensor, Tensor):
        raise _Unknown
    sizes = list(tensor.shape)
    sizes[dim] = size
    return _whole(tensor, sizes)


# --- operators --------------------------------------------------------------------------------------------------------


def _dense(node: fx.Node, *_: Any, **__: Any) -> Tensor:
    raise _Unknown


def _full(node: fx.Node, sizes: list[int], value: Any, **_: Any) -> Tensor:
    return torch.full([1] * len(sizes), value, dtype=val(node).dtype)


def _arange(node: fx.Node, start: Any, end: Any, step: Any, **_: Any) -> Tensor:
    if shape(node)[0] > _LIMIT:
        raise _Unknown
    return torch.arange(start, end, step, dtype=val(node).dtype)


def _pointwise(node: fx.Node, *args: Any, **kwargs: Any) -> Tensor:
    tensors = [a for a in args if isinstance(a, Tensor)]
    if any(isinstance(a, tuple) for a in args):
        raise _Unknown
    if torch.broadcast_shapes(*(t.shape for t in tensors)).numel() > _LIMIT:
        raise _Unknown
    result: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return result.reshape([1] * (val(node).dim() - result.dim()) + list(result.shape))


def _compare(node: fx.Node, a: Any, b: Any) -> _Value:
    if isinstance(a, tuple) or isinstance(b, tuple):
        raise _Unknown
    given = a, b
    a, b = (torch.as_tensor(x) for x in given)
    if torch.broadcast_shapes(a.shape, b.shape).numel() <= _LIMIT:
        return _pointwise(node, *given)
    name = str(node.target._schema.name).rpartition("::")[2]  # type: ignore[union-attr]
    rank = val(node).dim()
    a, b = (x.reshape([1] * (rank - x.dim()) + list(x.shape)) for x in (a, b))
    return (_Term(name, a, b),)


def _terms(value: Any) -> tuple[_Term, ...]:
    if isinstance(value, tuple) and all(isinstance(t, _Term) for t in value):
        return value
    raise _Unknown


def _and(node: fx.Node, a: Any, b: Any) -> _Value:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _pointwise(node, a, b)
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Tensor) and one.numel() == 1 and bool(one):
            return _map(other, lambda t: t.reshape([1] * (val(node).dim() - t.dim()) + list(t.shape)))
    return _terms(a) + _terms(b)


def _where(node: fx.Node, condition: Any, a: Any, b: Any) -> _Value:
    a, b = (torch.as_tensor(x, dtype=val(node).dtype) for x in (a, b))
    if isinstance(condition, Tensor):
        if torch.broadcast_shapes(condition.shape, a.shape, b.shape).numel() > _LIMIT:
            raise _Unknown
        result = torch.where(condition, a, b)
        return result.reshape([1] * (val(node).dim() - result.dim()) + list(result.shape))
    if a.numel() == b.numel() == 1:
        return _terms(condition), a.reshape(()), b.reshape(())
    raise _Unknown


def _structural(operation: Callable[..., Tensor]) -> Callable[..., _Value]:
    """An operator that only moves dims: it does so to every part of a value."""

    def rule(node: fx.Node, value: _Value, *args: Any) -> _Value:
        return _map(value, lambda t: operation(t, *args))

    return rule


def _map(value: _Value, move: Callable[[Tensor], Tensor]) -> _Value:
    if isinstance(value, Tensor):
        return move(value)
    if all(isinstance(t, _Term) for t in value):
        return tuple(_Term(t.compare, move(t.a), move(t.b)) for t in value if isinstance(t, _Term))
    terms, a, b = value
    return _map(terms, move), a, b  # type: ignore[arg-type, return-value]


def _expand(node: fx.Node, value: _Value, _: Any) -> _Value:
    rank = val(node).dim()
    return _map(value, lambda t: t.reshape([1] * (rank - t.dim()) + list(t.shape)))


def _reshape(node: fx.Node, value: _Value, sizes: list[int]) -> _Value:
    old = shape(node.args[0])  # type: ignore[arg-type]
    if [s for s in old if s != 1] != [s for s in sizes if s != 1]:
        return _whole(value, old).reshape(sizes)
    wide = [d for d, s in enumerate(old) if s != 1]

    def move(t: Tensor) -> Tensor:
        held = iter([t.shape[d] for d in wide])
        return t.reshape([1 if s == 1 else next(held) for s in sizes])

    return _map(value, move)


def _slice(node: fx.Node, value: _Value, dim: int, start: int, end: int, step: int) -> _Value:
    if shape(node)[dim] == 0:
        raise _Unknown
    return _map(value, lambda t: t if t.shape[dim] == 1 else aten.slice.Tensor(t, dim, start, end, step))


def _select(node: fx.Node, value: _Value, dim: int, index: int) -> _Value:
    return _map(value, lambda t: t.select(dim, 0 if t.shape[dim] == 1 else index))


def _index(node: fx.Node, source: Any, indices: list[Any]) -> Tensor:
    """Indices into a dim along which ``source`` does not change do not matter."""
    if not isinstance(source, Tensor) or len(indices) != source.dim() or any(not isinstance(i, Tensor) for i in indices):
        raise _Unknown
    zero = torch.zeros((), dtype=torch.int64)
    used = [zero if size == 1 else i for size, i in zip(source.shape, indices, strict=True)]
    if torch.broadcast_shapes(*(i.shape for i in used)).numel() > _LIMIT:
        raise _Unknown
    result = source[tuple(used)]
    return result.reshape([1] * (val(node).dim() - result.dim()) + list(result.shape))


def _cumsum(node: fx.Node, x: Any, dim: int, **kwargs: Any) -> Tensor:
    return torch.cumsum(_along(x, dim, shape(node)[dim]), dim, **kwargs)


def _diff(node: fx.Node, x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    def whole(position: int, value: Any) -> Tensor | None:
        given = node.args[position] if len(node.args) > position else None
        return _along(value, dim, shape(given)[dim]) if isinstance(given, fx.Node) else None

    parts = [p for p in (whole(3, prepend), whole(0, x), whole(4, append)) if p is not None]
    sizes = torch.broadcast_shapes(*([*p.shape[:dim], 1, *p.shape[dim % p.dim() + 1 :]] for p in parts))
    parts = [p.expand([p.shape[d] if d == dim % p.dim() else s for d, s in enumerate(sizes)]) for p in parts]
    return torch.diff(torch.cat(parts, dim), n, dim)


def _triangle(node: fx.Node, x: Any, diagonal: int = 0) -> _Value:
    """``tril`` and ``triu``; of a constant also where it is too large to be made."""
    lower = node.target is aten.tril.default
    rows, columns = shape(node)[-2:]
    if isinstance(x, Tensor) and x[..., :1, :1].numel() * rows * columns <= _LIMIT:
        return aten.tril(x.expand([*x.shape[:-2], rows, columns]), diagonal) if lower else aten.triu(
            x.expand([*x.shape[:-2], rows, columns]), diagonal
        )
    if not isinstance(x, Tensor) or x.numel() != 1:
        raise _Unknown
    rank = val(node).dim()
    row = torch.arange(rows).reshape([1] * (rank - 2) + [rows, 1])
    column = torch.arange(columns).reshape([1] * (rank - 1) + [columns])
    terms = (_Term("le" if lower else "ge", column, row + diagonal),)
    if val(node).dtype is torch.bool and bool(x):
        return terms
    return terms, x.reshape(()), torch.zeros((), dtype=x.dtype)


_COMPARISONS = [getattr(getattr(aten, name), kind) for name in ("lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar")]
_POINTWISE = [
    getattr(getattr(aten, name), kind)
    for name, kinds in {
        "eq": ("Tensor", "Scalar"),
        "ne": ("Tensor", "Scalar"),
        "add": ("Tensor", "Scalar"),
        "sub": ("Tensor", "Scalar"),
        "rsub": ("Tensor", "Scalar"),
        "mul": ("Tensor", "Scalar"),
        "div": ("Tensor", "Scalar", "Tensor_mode", "Scalar_mode"),
        "floor_divide": ("default", "Scalar"),
        "remainder": ("Tensor", "Scalar"),
        "maximum": ("default",),
        "minimum": ("default",),
        "clamp": ("default",),
        "abs": ("default",),
        "neg": ("default",),
        "bitwise_or": ("Tensor",),
        "bitwise_xor": ("Tensor",),
        "bitwise_not": ("default",),
        "logical_not": ("default",),
        "logical_or": ("default",),
        "masked_fill": ("Scalar", "Tensor"),
        "to": ("dtype",),
    }.items()
    for kind in kinds
]

_RULES: dict[Any, Callable[..., _Value]] = {
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(_COMPARISONS, _compare),
    aten.bitwise_and.Tensor: _and,
    aten.logical_and.default: _and,
    aten.where.self: _where,
    aten.where.ScalarSelf: _where,
    aten.where.ScalarOther: _where,
    aten.where.Scalar: _where,
    aten.full.default: _full,
    aten.arange.start_step: _arange,
    aten.unsqueeze.default: _structural(torch.unsqueeze),
    aten.transpose.int: _structural(torch.transpose),
    aten.permute.default: _structural(torch.permute),
    aten.t.default: _structural(torch.t),
    aten.expand.default: _expand,
    aten.reshape.default: _reshape,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.index.Tensor: _index,
    aten.cumsum.default: _cumsum,
    aten.diff.default: _diff,
    aten.tril.default: _triangle,
    aten.triu.default: _triangle,
}


# --- what a mask is ---------------------------------------------------------------------------------------------------


def _classify(value: _Value, queries: int, keys: int) -> str | None:
    if isinstance(value, Tensor):
        return _classify_tensor(value, queries, keys)
    if all(isinstance(t, _Term) for t in value):
        terms = _terms(value)
    else:
        terms, shown, hidden = value  # type: ignore[assignment, misc]
        if shown != 0 or hidden > _MASKED:
            return None
    sides = [_sides(t, queries, keys) for t in terms]
    if any(s is None for s in sides):
        return None
    known = [s for s in sides if s is not None]
    if all(_holds_everywhere(*s) for s in known):
        return "all"
    if queries == keys and all(_holds_below(*s) for s in known) and any(_fails_above(*s) for s in known):
        return "causal"
    return None


def _classify_tensor(value: Tensor, queries: int, keys: int) -> str | None:
    while value.dim() < 2:
        value = value.unsqueeze(0)
    if value.numel() != value.shape[-2] * value.shape[-1]:
        return None
    value = value.reshape(value.shape[-2:])
    shown = value if value.dtype is torch.bool else value == 0
    if bool(shown.all()):
        return "all"
    if queries != keys or queries * keys > _LIMIT:
        return None
    causal = torch.ones(queries, keys, dtype=torch.bool).tril()
    hidden = ~value if value.dtype is torch.bool else value <= _MASKED
    return "causal" if torch.equal(shown.expand(queries, keys), causal) and bool((shown | hidden).all()) else None


def _sides(term: _Term, queries: int, keys: int) -> tuple[bool, Tensor, Tensor] | None:
    """(strict, vector over keys, vector over queries) of a term written as keys < or <= queries."""
    a, b = term.a, term.b
    if term.compare in ("gt", "ge"):
        a, b = b, a
    strict = term.compare in ("lt", "gt")
    if any(x.numel() != x.shape[-1] * x.shape[-2] for x in (a, b)):
        return None
    a, b = (x.reshape(x.shape[-2:]) for x in (a, b))
    if a.shape[0] > 1 or b.shape[1] > 1:  # queries <= keys: -keys <= -queries
        a, b = -b, -a
    if a.shape[0] > 1 or b.shape[1] > 1:
        return None
    return strict, a[0].expand(keys), b[:, 0].expand(queries)


def _less(strict: bool) -> Callable[[Tensor, Tensor], Tensor]:
    return operator.lt if strict else operator.le


def _holds_everywhere(strict: bool, over_keys: Tensor, over_queries: Tensor) -> bool:
    return bool(_less(strict)(over_keys.max(), over_queries.min()))


def _holds_below(strict: bool, over_keys: Tensor, over_queries: Tensor) -> bool:
    """Whether every query sees all keys up to itself."""
    return bool(_less(strict)(over_keys.cummax(0).values, over_queries).all())


def _fails_above(strict: bool, over_keys: Tensor, over_queries: Tensor) -> bool:
    """Whether no query sees a key after itself."""
    smallest_after = over_keys.flip(0).cummin(0).values.flip(0)[1:]
    return not bool(_less(strict)(smallest_after, over_queries[:-1]).any())
