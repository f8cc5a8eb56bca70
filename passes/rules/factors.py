"""The data of a factor rule, which says how one operator call may be sharded, and helpers to write rules.

A *factor* is a named loop dimension of an operator, as in an einsum. ``linear(x, w)`` has the factors ``b s i o``::

    operands   x: b s i    w: o i
    results    b s o

A dim may hold several factors, outermost first, as in a reshape: ``(h d)``. A dim of size 1 holds none. Sharding a
factor shards every tensor dim that holds it. A result without the factor is then a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from partitioner.passes.ir.gradient_flow import is_differentiable
from partitioner.passes.ir.hashing import hashed_once
from partitioner.passes.ir.interpret import insert_operator_node
from partitioner.passes.ir.layouts import Layout, local_shape

Dims = tuple[tuple[str, ...], ...]  # the factors of each dim of one tensor

MAX_SECTIONS = 64  # an inner factor is sharded through that many equal sections at most


@hashed_once
@dataclass(frozen=True)
class Strategy:
    """One way to run an operator on one mesh axis.

    ``factor`` is the sharded factor, ``None`` where every rank computes the same (or its own addend of) everything.
    ``sections`` are the parts of the factor that are sharded each on its own, ``()`` for one. ``form`` is one of the
    operator's :attr:`OpFactors.forms`: a way to run it that shards more than one factor.
    """

    factor: str | None
    sections: tuple[int, ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    form: str = ""

    def __str__(self) -> str:
        sections = f"[{','.join(map(str, self.sections))}]" if self.sections else ""
        form = f" by {self.form}" if self.form else ""
        name = f"{self.factor}{sections}{form}: " if self.factor else ""
        return f"{name}{', '.join(map(str, self.operands))} -> {', '.join(map(str, self.results))}"


@dataclass(frozen=True)
class Lowering:
    """Special local operators for an operator if one of its factors is sharded.

    ``build`` appends the local operators. ``result``: the layout of a result without the factor. ``collectives``: the
    name and the number of elements per rank of each collective that forward and backward add. ``sections``: whether the
    factor may be sharded in sections. ``divides_work``: whether each rank does only its share of the work although the
    tensor shapes do not show it.
    """

    build: Callable[[Local], fx.Node]
    result: Layout
    collectives: tuple[tuple[str, int], ...] = ()
    sections: bool = False
    divides_work: bool = False


@dataclass(frozen=True)
class Form:
    """A way to run an operator over ranks that shards more than one factor, such as attention with sharded queries and
    keys.

    ``operands`` and ``results``: the sharded dim of each tensor; ``None`` if it is whole. ``build`` appends the local
    operators. ``factor``: name of the divided factor.
    """

    factor: str
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    build: Callable[[Local], fx.Node]


@dataclass(frozen=True)
class Spans:
    """A factor that some tensors hold only in part, as the pieces of ``split`` and ``cat`` do.

    ``sections``: the lengths into which the ends of all parts cut the factor. ``operands`` and ``results``: the part of
    each tensor as (start, length); ``None`` for the whole factor. A sharded factor uses these sections or finer ones.
    """

    factor: str
    sections: tuple[int, ...]
    operands: tuple[tuple[int, int] | None, ...]
    results: tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class OpFactors:
    """The factor rule of one operator call.

    ``operands`` and ``results`` have the factors of every dim; a dim larger than 1 without any is never sharded.
    ``linear``: sets of operand positions; if exactly these are partial sums and the others whole, so are the results.
    ``local`` writes the operator for local shapes where its own arguments do not fit them. ``forms``: further ways to
    run it along a sequence.
    """

    sizes: Mapping[str, int]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    lower: Mapping[str, Lowering] = field(default_factory=dict)
    local: Callable[[Local], fx.Node] | None = None
    spans: Spans | None = None
    forms: Mapping[str, Form] = field(default_factory=dict)

    def __str__(self) -> str:
        def dim(factors: tuple[str, ...]) -> str:
            names = [f + "!" * (f in self.whole) for f in factors]
            return "_" if not names else names[0] if len(names) == 1 else f"({' '.join(names)})"

        sides = [", ".join(" ".join(map(dim, dims)) for dims in side) for side in (self.operands, self.results)]
        return " -> ".join(sides)


@dataclass(frozen=True)
class Local:
    """What is at hand to write one operator for one rank: its local operands and the chosen strategy."""

    node: fx.Node
    factors: OpFactors
    strategy: Strategy
    axis: str
    num_ranks: int
    operands: Sequence[fx.Node]
    graph: fx.Graph

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Append the operator ``target`` with its meta value to the graph, and return its node."""
        node = insert_operator_node(self.graph, target, args, kwargs, like=self.node)
        node.meta["grad"] = bool(node.meta.get("grad", True)) and is_differentiable(node.meta["val"])
        return node

    def copy(self, **changes: Any) -> fx.Node:
        """Append the operator on its local operands, with some arguments changed (by schema name), and
        return its node.
        """
        args, kwargs = with_operands(self.node, self.operands)
        changed = list(args)
        for name, new in changes.items():
            index = _parameters_of(self.node.target).get(name, (-1, None))[0]
            if 0 <= index < len(changed):
                changed[index] = new
            else:
                kwargs[name] = new
        return self.call(_get_callable_target(self.node), *changed, **kwargs)

    def result_shape(self, index: int = 0) -> tuple[int, ...]:
        shape = tuple(results_of(self.node)[index].shape)
        return local_shape(self.strategy.results[index], shape, self.num_ranks)

    def size(self, factor: str) -> int:
        """Return the size of ``factor`` on one rank."""
        size = self.factors.sizes.get(factor, 1)
        return size // self.num_ranks if factor == self.strategy.factor else size


def _get_callable_target(node: fx.Node) -> Callable[..., Any]:
    assert callable(node.target), node
    return node.target


def operands_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the tensor operands of ``node``: every node in its args, then kwargs, depth first, once per occurrence."""
    found: list[fx.Node] = []
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, fx.Node):
            found.append(argument)
        elif isinstance(argument, list | tuple | dict):
            _collect_operands(argument, found)
    return tuple(found)


def _collect_operands(argument: Any, found: list[fx.Node]) -> None:
    if isinstance(argument, fx.Node):
        found.append(argument)
    elif isinstance(argument, list | tuple):
        for item in argument:
            _collect_operands(item, found)
    elif isinstance(argument, dict):
        for item in argument.values():
            _collect_operands(item, found)


def with_operands(node: fx.Node, operands: Sequence[fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the args and kwargs of ``node`` with its operands replaced, in the order of :func:`operands_of`."""
    rest = iter(operands)

    def replaced(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return next(rest)
        if isinstance(argument, tuple):
            return tuple(replaced(a) for a in argument)
        if isinstance(argument, list):
            return [replaced(a) for a in argument]
        if isinstance(argument, dict):
            return {k: replaced(a) for k, a in argument.items()}
        return argument

    return replaced(node.args), replaced(dict(node.kwargs))


def get_meta_tensor(node: fx.Node) -> Tensor:
    """Return the meta tensor of ``node``."""
    tensor: Tensor = node.meta["val"]
    return tensor


def get_meta_shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def results_of(node: fx.Node) -> tuple[Tensor, ...]:
    """Return the results of ``node`` as a tuple of meta tensors."""
    val = node.meta["val"]
    return tuple(v for v in val if isinstance(v, Tensor)) if isinstance(val, tuple | list) else (val,)


_parameters: dict[Any, dict[str, tuple[int, Any]]] = {}


def get_node_argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """Return an argument of ``node`` by its schema name, or its schema default; ``default`` if the schema lacks the
    name.
    """
    if name in node.kwargs:
        return node.kwargs[name]
    index, preset = _parameters_of(node.target).get(name, (-1, default))
    return node.args[index] if 0 <= index < len(node.args) else preset


def _parameters_of(target: Any) -> dict[str, tuple[int, Any]]:
    """Return the position (-1 if keyword-only) and default of each parameter of an operator, by name."""
    if target not in _parameters:
        schema = target._schema.arguments
        _parameters[target] = {a.name: (-1 if a.kwarg_only else i, a.default_value) for i, a in enumerate(schema)}
    return _parameters[target]


def as_dim(dim: int, rank: int) -> int:
    """Return ``dim`` counted from the front; a negative one counts from the end."""
    return dim + rank if dim < 0 else dim


def as_dims(dims: Any, rank: int) -> tuple[int, ...]:
    """Return the dims that an argument names, counted from the front.

    ``None`` and ``[]`` mean all dims. The result is empty for a 0-dimensional tensor.
    """
    if not rank:
        return ()
    if dims is None or (not isinstance(dims, int) and not dims):
        return tuple(range(rank))
    return tuple(d + rank if d < 0 else d for d in ((dims,) if isinstance(dims, int) else dims))


NAMES = tuple(f"d{i}" for i in range(64))

NONE = frozenset[str]()
FIRST = (frozenset((0,)),)  # linear in the first operand


def mark_linear_each(*positions: int) -> tuple[frozenset[int], ...]:
    """Return the ``linear`` entry of an operator that is linear in each of these operands while the
    others are fixed.
    """
    return tuple(frozenset((p,)) for p in positions)


def mark_linear_together(count: int) -> tuple[frozenset[int], ...]:
    """Return the ``linear`` entry of an operator that is linear in all ``count`` operands together,
    like an addition.
    """
    return (frozenset(range(count)),)


def build_factor_rule(
    node: fx.Node,
    operands: Sequence[Sequence[str | None]],
    results: Sequence[Sequence[str | None]],
    *,
    whole: frozenset[str] = NONE,
    linear: tuple[frozenset[int], ...] = (),
    lower: Mapping[str, Lowering] | None = None,
    local: Callable[[Local], fx.Node] | None = None,
    spans: Spans | None = None,
) -> OpFactors:
    """The rule that has at most one factor per dim; sizes are read off the tensors, dims of size 1 lose theirs.

    ``None`` is a dim without a factor, which is never sharded. A name that stands for two sizes (a gather's index
    shorter than its source) is no factor.
    """
    cut = None if spans is None else spans.factor
    sizes = {} if spans is None else {spans.factor: sum(spans.sections)}
    clash: set[str] = set()
    sides: list[tuple[Dims, ...]] = []
    shapes = [get_meta_shape(o) for o in operands_of(node)], [tuple(r.shape) for r in results_of(node)]
    for patterns, side in zip((operands, results), shapes, strict=True):
        tensors: list[Dims] = []
        for pattern, dims in zip(patterns, side, strict=True):
            factors: list[tuple[str, ...]] = []
            for name, size in zip(pattern, dims, strict=True):
                if name is None or (size == 1 and name != cut):
                    factors.append(())
                    continue
                if name != cut and sizes.setdefault(name, size) != size:
                    clash.add(name)
                factors.append((name,))
            tensors.append(tuple(factors))
        sides.append(tuple(tensors))
    if clash:
        sides = [tuple(tuple(() if clash & {*fs} else fs for fs in dims) for dims in side) for side in sides]
        sizes = {name: size for name, size in sizes.items() if name not in clash}
    return OpFactors(sizes, sides[0], sides[1], whole, linear, lower or {}, local, spans)


def everything_whole(node: fx.Node) -> OpFactors:
    """Return the rule of an operator that every rank must compute on whole tensors."""
    return OpFactors({}, tuple(() for _ in operands_of(node)), tuple(() for _ in results_of(node)))
