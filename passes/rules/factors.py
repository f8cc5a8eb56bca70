"""Data types of sharding rules, which say how one operator call may be sharded, and helpers to write rules.

A *factor* is a named loop dimension of an operator, as in an einsum. ``linear(x, w)`` has the factors ``b s i o``::

    operands   x: b s i    w: o i
    results    b s o

A dim may consist of several factors, outermost first, as in a reshape: ``(h d)``. A dim of size 1 has no factor.
Sharding a factor shards every tensor dim that has it. A result without the factor is then a partial sum.
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

MAX_SECTIONS = 64  # most sections into which a factor is cut


@hashed_once
@dataclass(frozen=True)
class Strategy:
    """One way to run an operator on the ranks of one mesh axis: the layouts of its operands and results. A layout is
    sharded along a dim, whole on every rank, or a partial sum.

    ``factor``: the name of the sharded factor (named loop dimension of the operator), or ``None``. ``sections``: the
    sizes, in elements, of the parts of the factor that are each divided over all ranks (such as queries, keys and
    values in one weight); ``()`` if the factor is divided as a whole. ``operands``, ``results``: the layouts, in order.
    ``form``: the name of a form, which shards several factors at once, in the operator's sharding rule; empty for an
    ordinary strategy.
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
    """Special operators that replace an operator on one rank if one of its factors (named loop dimensions) is sharded,
    because the operator itself would compute a wrong result from the shards.

    ``build``: appends the special operators to the graph of one rank and returns the node of the result. ``result``:
    the layout of results that do not have the sharded factor, such as the result of a sum over it. ``collectives``:
    (name, number of elements per rank) of each additional collective of forward and backward. ``sections``: whether
    ``build`` also works if the factor is cut into parts that are each divided over all ranks. ``divides_work``: true if
    each rank does only its share of the work although the tensor shapes do not show this.
    """

    build: Callable[[LocalBuilder], fx.Node]
    result: Layout
    collectives: tuple[tuple[str, int], ...] = ()
    sections: bool = False
    divides_work: bool = False


@dataclass(frozen=True)
class MultiFactorForm:
    """A way to run an operator that shards several of its factors (named loop dimensions) at once, such as attention
    with sharded queries and keys.

    ``factor``: the name of one of the factors, which becomes :attr:`Strategy.factor`. ``operands``, ``results``: for
    each tensor, the index of its sharded dim; ``None`` if the tensor is not sharded. ``build``: appends the operators
    of one rank to its graph and returns the node of the result.
    """

    factor: str
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    build: Callable[[LocalBuilder], fx.Node]


@dataclass(frozen=True)
class Spans:
    """The part of one factor (named loop dimension) that each tensor of an operator covers. In ``split`` and ``cat``,
    for example, the pieces cover parts of a dim, and the other tensor covers all of it.

    ``factor``: the name of the factor. ``sections``: the lengths, in elements, of the consecutive sections into which
    the borders of all parts cut the factor. ``operands``, ``results``: the part that each tensor covers, as (start,
    length) in elements; ``None`` for the whole factor. A sharded factor has each section (or a finer division) divided
    over all ranks, so that a rank has matching shares of all tensors.
    """

    factor: str
    sections: tuple[int, ...]
    operands: tuple[tuple[int, int] | None, ...]
    results: tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class OpFactors:
    """The sharding rule of one operator call: which dims of its tensors may be sharded over ranks, and what one rank
    runs. Dims are described by factors, the named loop dimensions of the operator, as in an einsum.

    ``sizes``: name of each factor -> its size. ``operands``, ``results``: for each tensor and each of its dims, the
    names of the dim's factors; a dim larger than 1 without a factor is never sharded. ``whole``: factors that must not
    be sharded. ``linear``: sets of operand positions (from 0); if exactly the operands of one set are partial sums, so
    are the results. ``lower``: factor -> special operators that one rank runs if this factor is sharded. ``local``: a
    function that appends the operator with arguments for the shapes on one rank; ``None`` if the call's own arguments
    fit. ``spans``: which part of one factor each tensor covers; ``None`` if every tensor covers all of its factors.
    ``forms``: name -> a way to run the operator that shards several factors at once.
    """

    sizes: Mapping[str, int]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    lower: Mapping[str, Lowering] = field(default_factory=dict)
    local: Callable[[LocalBuilder], fx.Node] | None = None
    spans: Spans | None = None
    forms: Mapping[str, MultiFactorForm] = field(default_factory=dict)

    def __str__(self) -> str:
        def dim(factors: tuple[str, ...]) -> str:
            names = [f + "!" * (f in self.whole) for f in factors]
            return "_" if not names else names[0] if len(names) == 1 else f"({' '.join(names)})"

        sides = [", ".join(" ".join(map(dim, dims)) for dims in side) for side in (self.operands, self.results)]
        return " -> ".join(sides)


@dataclass(frozen=True)
class LocalBuilder:
    """The inputs of a sharding rule's function that appends, to the graph of one rank, the replacement of the operator
    call ``node``.

    ``factors``: the sharding rule of ``node``. ``strategy``: the layouts of the operands and results of ``node``.
    ``axis``, ``num_ranks``: the mesh axis over which they are sharded, and its size. ``operands``: the nodes in
    ``graph`` that have this rank's operands. ``graph``: the graph of one rank.
    """

    node: fx.Node
    factors: OpFactors
    strategy: Strategy
    axis: str
    num_ranks: int
    operands: Sequence[fx.Node]
    graph: fx.Graph

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call of the operator ``target`` with ``args`` and ``kwargs`` to the graph of one rank, infer its
        ``meta["val"]``, and return the new node."""
        node = insert_operator_node(self.graph, target, args, kwargs, like=self.node)
        node.meta["grad"] = bool(node.meta.get("grad", True)) and is_differentiable(node.meta["val"])
        return node

    def copy(self, **changes: Any) -> fx.Node:
        """Append the operator call that is being replaced, with this rank's operands, to the graph of one rank, and
        return the node of the result.

        ``changes``: name of an argument in the operator's schema -> its new value.
        """
        args, kwargs = replace_operands(self.node, self.operands)
        changed = list(args)
        for name, new in changes.items():
            index = _list_parameters(self.node.target).get(name, (-1, None))[0]
            if 0 <= index < len(changed):
                changed[index] = new
            else:
                kwargs[name] = new
        return self.call(_get_callable_target(self.node), *changed, **kwargs)

    def result_shape(self, index: int = 0) -> tuple[int, ...]:
        shape = tuple(results_of(self.node)[index].shape)
        return local_shape(self.strategy.results[index], shape, self.num_ranks)

    def size(self, factor: str) -> int:
        """Return the size of ``factor``, a named loop dimension of the operator, on one rank; 1 if the sharding rule
        has no such factor."""
        size = self.factors.sizes.get(factor, 1)
        return size // self.num_ranks if factor == self.strategy.factor else size


def _get_callable_target(node: fx.Node) -> Callable[..., Any]:
    assert callable(node.target), node
    return node.target


def operands_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the nodes that ``node`` reads, in the order of its args, then its kwargs, with nested values depth
    first. A node that is read several times is listed several times."""
    found: list[fx.Node] = []
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, fx.Node):
            found.append(argument)
        elif isinstance(argument, list | tuple | dict):
            _collect_operands(argument, found)
    return tuple(found)


def _collect_operands(argument: Any, found: list[fx.Node]) -> None:
    """Append every graph node in ``argument``, a possibly nested argument of an operator, to the list ``found``, depth
    first."""
    if isinstance(argument, fx.Node):
        found.append(argument)
    elif isinstance(argument, list | tuple):
        for item in argument:
            _collect_operands(item, found)
    elif isinstance(argument, dict):
        for item in argument.values():
            _collect_operands(item, found)


def replace_operands(node: fx.Node, operands: Sequence[fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of ``node`` with its tensor operands replaced by the nodes ``operands``, which are in the
    order of :func:`operands_of`."""
    rest = iter(operands)

    def replace(argument: Any) -> Any:
        """Return ``argument``, a possibly nested argument of an operator, with each graph node replaced by the next new
        operand."""
        if isinstance(argument, fx.Node):
            return next(rest)
        if isinstance(argument, tuple):
            return tuple(replace(a) for a in argument)
        if isinstance(argument, list):
            return [replace(a) for a in argument]
        if isinstance(argument, dict):
            return {k: replace(a) for k, a in argument.items()}
        return argument

    return replace(node.args), replace(dict(node.kwargs))


def get_meta_tensor(node: fx.Node) -> Tensor:
    """Return ``node.meta["val"]``: a tensor without data that has the shape and dtype of the result of ``node``."""
    tensor: Tensor = node.meta["val"]
    return tensor


def get_meta_shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def results_of(node: fx.Node) -> tuple[Tensor, ...]:
    """Return a tuple with a tensor without data for each result of ``node``, which has the result's shape and dtype."""
    val = node.meta["val"]
    return tuple(v for v in val if isinstance(v, Tensor)) if isinstance(val, tuple | list) else (val,)


_parameters: dict[Any, dict[str, tuple[int, Any]]] = {}


def get_node_argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """Return the argument ``name`` of the operator call ``node``. If the call does not have the argument, return its
    default in the operator's schema. If the schema has no such argument, return ``default``."""
    if name in node.kwargs:
        return node.kwargs[name]
    index, preset = _list_parameters(node.target).get(name, (-1, default))
    return node.args[index] if 0 <= index < len(node.args) else preset


def _list_parameters(target: Any) -> dict[str, tuple[int, Any]]:
    """Return a dict: name of each parameter of the operator ``target`` -> (its position from 0, or -1 if it is
    keyword-only; its default)."""
    if target not in _parameters:
        schema = target._schema.arguments
        _parameters[target] = {a.name: (-1 if a.kwarg_only else i, a.default_value) for i, a in enumerate(schema)}
    return _parameters[target]


def normalize_dim(dim: int, rank: int) -> int:
    """Return ``dim`` as a nonnegative index; a negative ``dim`` counts from the end. ``rank``: the tensor's number of
    dims."""
    return dim + rank if dim < 0 else dim


def normalize_dims(dims: Any, rank: int) -> tuple[int, ...]:
    """Return an operator's argument ``dims`` (an int or several) as a tuple of nonnegative indices. ``rank``: the
    tensor's number of dims.

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
    """Return the property :attr:`OpFactors.linear` of an operator that is linear in each of the operands at
    ``positions`` (from 0) separately, such as a product: if one of these operands is a partial sum, so is the result.
    The property is a tuple of sets of operand positions."""
    return tuple(frozenset((p,)) for p in positions)


def mark_linear_together(count: int) -> tuple[frozenset[int], ...]:
    """Return the property :attr:`OpFactors.linear` of an operator that is linear in its first ``count`` operands
    together, such as an addition: if all of them are partial sums, so is the result. The property is a tuple of sets of
    operand positions."""
    return (frozenset(range(count)),)


def build_factor_rule(
    node: fx.Node,
    operands: Sequence[Sequence[str | None]],
    results: Sequence[Sequence[str | None]],
    *,
    whole: frozenset[str] = NONE,
    linear: tuple[frozenset[int], ...] = (),
    lower: Mapping[str, Lowering] | None = None,
    local: Callable[[LocalBuilder], fx.Node] | None = None,
    spans: Spans | None = None,
) -> OpFactors:
    """Return the sharding rule of the operator call ``node`` whose dims have at most one factor (named loop dimension,
    as in an einsum) each. Factor sizes are taken from the tensors, and dims of size 1 have no factor.

    ``operands``, ``results``: for each tensor, the name of the factor of each dim; ``None`` for a dim that is never
    sharded. If dims with the same name differ in size, as in a gather whose index is shorter than its source, none of
    them is ever sharded.

    ``whole``: factors that must not be sharded. ``linear``: sets of operand positions (from 0); if exactly the operands
    of one set are partial sums, so are the results. ``lower``: factor -> special operators that one rank runs if this
    factor is sharded; ``None`` for none. ``local``: a function that appends the operator with arguments for the shapes
    on one rank; ``None`` if the call's own arguments fit. ``spans``: which part of one factor each tensor covers;
    ``None`` if every tensor covers all of its factors.
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


def forbid_sharding(node: fx.Node) -> OpFactors:
    """Return a sharding rule for the operator call ``node`` that allows no sharding of any tensor."""
    return OpFactors({}, tuple(() for _ in operands_of(node)), tuple(() for _ in results_of(node)))
