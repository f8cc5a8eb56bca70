"""Transpose a traced ``backward`` function.

``backward`` maps gradients of results to gradients of inputs: ``g -> B g + c``. The transpose multiplies changes of the
inputs by the matrix ``B`` transposed, which gives changes of the results; it also returns ``c``. It is derived from the
graph of ``backward`` alone, without values of the gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from partitioner.passes.ir.linearity import NOT_LINEAR, AffinePart, NotAffine, find_affine_parts, replace_shape_reads
from partitioner.passes.ir.rewrite import drop_unused
from partitioner.passes.rules import has_rule

__all__ = ["ASKS_NUMBERS", "NotAffine", "TransposedBackward", "transpose_backward"]

aten = torch.ops.aten

Backward = Callable[..., Sequence[Tensor | None]]  # gradients of results -> gradients of inputs; ``None`` is zero

_MOST_RESULTS = 5  # most gradients whose combinations with None are all tried

_MATERIALIZE = "leave out ctx.set_materialize_grads(False), and take zeros"
ASKS_NUMBERS = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)


@dataclass(frozen=True)
class TransposedBackward:
    """The transpose of a ``backward`` function. ``backward(g) = B g + c`` maps gradients ``g`` of another function's
    results to gradients of its inputs; ``B`` is a matrix, and ``c`` does not depend on ``g``. The transpose multiplies
    changes (tangents) of the inputs by the transpose of ``B``, which gives changes of the results.

    ``graph``: takes a change of each input, then the tensors ``captured_tensors``, which ``backward`` reads. It returns
    ``num_results`` changes of the results, then the parts ``c`` for the inputs with the indices ``constant``.
    ``complete``: whether every change of a result depends on the change of every input, and there is no ``c``.
    """

    graph: fx.GraphModule
    captured_tensors: Sequence[Tensor]
    num_results: int
    constant: tuple[int, ...]
    complete: bool

    def __call__(self, changes: Sequence[Tensor]) -> tuple[Sequence[Tensor], dict[int, Tensor]]:
        """Apply the transpose of ``backward(g) = B g + c`` to ``changes``, one tensor for each input of the
        differentiated function. Return a sequence of the changes of the function's results, and a dict: index of an
        input -> its part ``c``, for the inputs that have such a part."""
        found: Any = self.graph(*changes, *self.captured_tensors)
        return found[: self.num_results], dict(zip(self.constant, found[self.num_results :], strict=True))


def transpose_backward(
    backward: Backward, results: Sequence[Tensor], inputs: Sequence[Tensor], *, some: bool = False
) -> TransposedBackward:
    """Trace ``backward``, which maps gradients of ``results`` to gradients of ``inputs``, and return its transpose, a
    linear map from changes (tangents) of the inputs to changes of the results. Raise :class:`NotAffine` if ``backward``
    is not a linear function of the gradients plus a part that does not depend on them.

    ``some``: whether autograd may call ``backward`` with ``None`` in place of a gradient of zero. If so,
    :class:`NotAffine` is also raised if ``backward`` treats ``None`` and zero differently.
    """
    seeds = [torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in results]
    changes = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
    traced = _TracedBackward.trace(backward, seeds)
    if some:
        _check_none_is_zero(backward, seeds, traced)
    graph_module, captured_tensors = _trace_functional_graph(
        lambda *given: traced.transpose(given[: len(seeds)], given[len(seeds) :]), seeds + changes
    )
    _drop_seeds(graph_module, len(seeds))
    output: Any = graph_module.graph.output_node().args[0]
    given = [n for n in graph_module.graph.nodes if n.op == "placeholder"][: len(changes)]
    complete = not traced.constant_results and all(_collect_read_nodes(node).issuperset(given) for node in output)
    return TransposedBackward(graph_module, captured_tensors, len(seeds), traced.constant_results, complete)


@dataclass(frozen=True)
class _TracedBackward:
    """The graph, without in-place operators, of a ``backward`` function, which maps gradients of results to gradients
    of inputs.

    ``graph``: the graph. ``seeds``: the placeholders of the incoming gradients. ``captured_tensors``: placeholder ->
    tensor, for the other tensors that the function reads. ``results``: the nodes of the gradients that the function
    returns; ``None`` is zero. ``parts``: for each node, whether its value depends on the incoming gradients, and
    whether its value is zero if all incoming gradients are zero.
    """

    graph: fx.Graph
    seeds: list[fx.Node]
    captured_tensors: Mapping[fx.Node, Tensor]
    results: Sequence[fx.Node | None]
    parts: Mapping[fx.Node, AffinePart]

    @classmethod
    def trace(cls, backward: Backward, seeds: Sequence[Tensor]) -> _TracedBackward:
        """Return the graph of the function ``backward``. ``seeds``: tensors of the shapes and dtypes of the incoming
        gradients. Raise :class:`NotAffine` if ``backward`` reads values of tensors as numbers, has side effects, or is
        not a linear function of the gradients plus a part that does not depend on them."""
        try:
            module, tensors = _trace_functional_graph(backward, seeds)
        except ASKS_NUMBERS as error:
            raise NotAffine("branches on the values of tensors", "choose by torch.where, or in forward") from error
        graph = module.graph
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        given, read = placeholders[: len(seeds)], placeholders[len(seeds) :]
        captured_tensors = dict(zip(read, tensors, strict=True))
        _check_effects(graph, given)
        for node in graph.nodes:
            if node.target is aten.detach.default:  # gradients of the derivative must pass through it
                node.replace_all_uses_with(node.args[0])
        replace_shape_reads(graph)
        drop_unused(graph)
        zeros = [n for n, tensor in captured_tensors.items() if _is_zero(tensor)]
        results: Any = graph.output_node().args[0]
        return cls(graph, given, captured_tensors, results, find_affine_parts(graph, given, zeros))

    @property
    def constant_results(self) -> tuple[int, ...]:
        """Return the indices of those gradients returned by the traced ``backward`` function that have a part which
        does not depend on the incoming gradients."""
        return tuple(i for i, n in enumerate(self.results) if n is not None and not self.parts[n].zero)

    def transpose(self, seeds: Sequence[Tensor], changes: Sequence[Tensor]) -> list[Tensor]:
        """Multiply ``changes``, one tensor for each input of a function, by the transpose of the matrix ``B`` of its
        ``backward(g) = B g + c``. Return a list: first the products, one for each result of the function; then, for
        each index in :attr:`constant_results`, the part ``c`` of the gradient of the input with this index.

        ``seeds``: tensors of the shapes and dtypes of the incoming gradients ``g``.
        """
        grads = [g.detach().requires_grad_() for g in seeds]
        env: dict[fx.Node, Any] = {**self.captured_tensors, **dict(zip(self.seeds, grads, strict=True))}
        for node in self.graph.nodes:
            if node.op == "call_function":
                with torch.set_grad_enabled(self.parts[node].depends):
                    env[node] = _run_node_target(node, env.__getitem__)
        found = [(env[n], c) for n, c in zip(self.results, changes, strict=True) if n is not None]
        found = [(x, c) for x, c in found if x.requires_grad]
        moved: Sequence[Tensor | None] = [None] * len(grads)
        if found:
            try:
                moved = torch.autograd.grad([x for x, _ in found], grads, [c for _, c in found], allow_unused=True)
            except (RuntimeError, NotImplementedError) as error:
                raise NotAffine(f"cannot be transposed ({error})", "write it with plain operators") from error
        linear = [_make_zeros_like(g) if m is None else m for g, m in zip(grads, moved, strict=True)]
        start = _ZeroGradientValues(self.parts, env)
        return [*linear, *(start.get_value(self.results[i]) for i in self.constant_results)]


def _check_none_is_zero(backward: Backward, seeds: Sequence[Tensor], whole: _TracedBackward) -> None:
    """Raise :class:`NotAffine` if ``backward`` treats an incoming gradient ``None`` differently from a gradient of
    zero.

    ``seeds``: tensors of the shapes and dtypes of the incoming gradients. ``whole``: the graph of ``backward`` for a
    call in which no gradient is ``None``.
    """
    numbers = range(len(seeds))
    if len(seeds) > _MOST_RESULTS:
        raise NotAffine("gets None for some of several gradients", _MATERIALIZE)
    for given in itertools.chain.from_iterable(itertools.combinations(numbers, size) for size in numbers[1:]):

        def is_partly_none(*grads: Tensor, given: Sequence[int] = given) -> Sequence[Tensor | None]:
            by_place = dict(zip(given, grads, strict=True))
            return backward(*(by_place.get(k) for k in numbers))

        try:
            part = _TracedBackward.trace(is_partly_none, [seeds[k] for k in given])
        except NotAffine:
            raise
        except Exception:  # backward itself fails for this None, so no training step has it
            continue
        names = _ExpressionNumbers()
        zeros = [n for k, n in enumerate(whole.seeds) if k not in given]
        if names.number_results(part, given, ()) != names.number_results(whole, numbers, zeros):
            raise NotAffine("treats gradients that are None differently from zero", _MATERIALIZE)


class _ExpressionNumbers:
    """Gives the values of graph nodes integer identifiers. Two values have equal identifiers if they are computed by
    equal operators from equal operands. ``numbers``: key of a computation -> identifier of its value."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def number_results(self, traced: _TracedBackward, names: Sequence[int], zeros: Sequence[fx.Node]) -> list[Any]:
        """Return a list with an identifier for each result of ``traced``, the graph of a ``backward`` function. Results
        of equal computations have equal identifiers; ``None`` stands for a result of zero.

        ``names``: an integer for each incoming gradient, in order, that identifies this gradient. ``zeros``:
        placeholders of incoming gradients that are assumed to be zero.
        """
        held_zero = [n for n, tensor in traced.captured_tensors.items() if _is_zero(tensor)]
        parts = find_affine_parts(traced.graph, zeros, held_zero)
        env: dict[fx.Node, Any] = {n: ("tensor", id(tensor)) for n, tensor in traced.captured_tensors.items()}
        env |= {n: ("gradient", name) for n, name in zip(traced.seeds, names, strict=True)}
        for node in traced.graph.nodes:
            if node.op == "output":
                continue
            other = _find_other_addend(node, parts)
            if parts[node].zero:
                env[node] = None
            elif other is not None:
                env[node] = env[other]
            elif node.op == "call_function":
                read = fx.node.map_aggregate(
                    (node.args, dict(node.kwargs)), lambda a: ("value", env[a]) if isinstance(a, fx.Node) else a
                )
                env[node] = self.numbers.setdefault(repr((node.target, read)), len(self.numbers))
        return [None if n is None else env[n] for n in traced.results]


class _ZeroGradientValues:
    """Computes the values that nodes in the graph of a ``backward`` function have if all incoming gradients are zero.

    ``parts``: for each node, whether its value depends on the incoming gradients, and whether its value is zero if all
    incoming gradients are zero. ``env``: node -> value in a run of the graph with other incoming gradients, of which
    only the values that do not depend on the gradients are used.
    """

    def __init__(self, parts: Mapping[fx.Node, AffinePart], env: Mapping[fx.Node, Any]) -> None:
        self.parts = parts
        self.known = {n: value for n, value in env.items() if not parts[n].depends}

    def get_value(self, node: fx.Node | None) -> Any:
        """Return the value that ``node``, a node of the graph of a ``backward`` function, has if all incoming gradients
        are zero. ``node`` must not be ``None``."""
        assert node is not None
        if node not in self.known:
            self.known[node] = (
                self._make_zero_value(node) if self.parts[node].zero else self._compute_value_at_zero(node)
            )
        return self.known[node]

    def _make_zero_value(self, node: fx.Node) -> Any:
        return _make_zeros_like(node.meta["val"])

    def _compute_value_at_zero(self, node: fx.Node) -> Any:
        """Return the value of the operator ``node`` of the graph of a ``backward`` function if all incoming gradients
        are zero. The operator runs on the values of its operands for this case. If ``node`` is a sum of which one
        operand is then zero, the value of the other operand is returned instead, and the sum is not run."""
        other = _find_other_addend(node, self.parts)
        if other is not None:
            return self.get_value(other)
        with torch.no_grad():
            return _run_node_target(node, self.get_value)


def _has_values(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has real values: it is neither fake nor on the meta device."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def _is_number(tensor: Tensor) -> bool:
    return _has_values(tensor) and tensor.dim() == 0


def _read_tensor_numbers(tensor: Tensor) -> Any:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return tensor.tolist()


def _is_zero(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has real values and all of them are zero."""
    if not _has_values(tensor):
        return False
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return not tensor.any()


def _make_zeros_like(value: Tensor) -> Tensor:
    return torch.zeros(value.shape, dtype=value.dtype, device=value.device)


def _find_other_addend(node: fx.Node, parts: Mapping[fx.Node, AffinePart]) -> fx.Node | None:
    """If the sum ``node`` has an operand that is zero whenever all incoming gradients of a ``backward`` function are
    zero, return the other operand, which then equals the sum. Return ``None`` if ``node`` is not such a sum, or if the
    other operand differs from the sum in shape or dtype.

    ``parts``: node of the graph of the ``backward`` function -> two flags: whether the node's value depends on the
    incoming gradients, and whether it is zero if they are zero.
    """
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    wanted = node.meta["val"]
    for zero, other in (node.args[:2], node.args[1::-1]):
        if isinstance(zero, fx.Node) and isinstance(other, fx.Node) and parts[zero].zero:
            value = other.meta["val"]
            if (value.shape, value.dtype) == (wanted.shape, wanted.dtype):
                return other
    return None


def _run_node_target(node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    """Run the operator ``node`` and return its result. ``value``: a function that returns the value of an operand
    node."""
    assert callable(node.target), node
    return node.target(*fx.node.map_arg(node.args, value), **fx.node.map_arg(node.kwargs, value))


def _trace_functional_graph(
    function: Callable[..., Any], arguments: Sequence[Tensor]
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Trace ``function``, called with ``arguments``, as a graph without in-place operators. Return the graph and a list
    of the other tensors that the function reads, which are inputs of the graph after ``arguments``. Raise
    :class:`NotAffine` if the function calls operators that take functions, such as ``torch.cond``."""
    with sdpa_kernel(SDPBackend.MATH):  # other kernels have no second derivative
        raw = make_fx(function, tracing_mode="real")(*arguments)
    read = {str(n.target): getattr(raw, str(n.target)) for n in raw.graph.nodes if n.op == "get_attr"}
    if not all(isinstance(tensor, Tensor) for tensor in read.values()):
        raise NotAffine("contains functions (torch.cond, a compiled function)", "write it with plain operators")
    numbers = {
        name: (_read_tensor_numbers(tensor), tensor.dtype) for name, tensor in read.items() if _is_number(tensor)
    }
    tensors = {name: tensor for name, tensor in read.items() if name not in numbers}

    def run(*given: Tensor) -> Any:
        captured_tensors = dict(zip(tensors, given[len(arguments) :], strict=True))
        captured_tensors |= {name: torch.full((), value, dtype=dtype) for name, (value, dtype) in numbers.items()}
        return _ConstantInterpreter(raw, captured_tensors).run(*given[: len(arguments)], enable_io_processing=False)

    functional = torch.func.functionalize(run, remove="mutations")
    return make_fx(functional, _list_backward_decompositions(), tracing_mode="real")(*arguments, *tensors.values()), [
        *tensors.values()
    ]


@cache
def _list_backward_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return a dict: backward operator -> decomposition, a function that computes it with simpler operators. The dict
    has each backward operator that torch can decompose and that has no sharding rule, and ``convolution_backward``."""
    known = [op for op in decomposition_table if isinstance(op, torch._ops.OpOverload)]
    table = {op: decomposition_table[op] for op in known if "_backward" in op._schema.name and not has_rule(op)}
    return table | {aten.convolution_backward.default: _convolution_input_gradient}


class ConvolutionGeometry(NamedTuple):
    """Parameters of a convolution, in the order in which torch's operators take them. ``stride``, ``padding``,
    ``dilation`` and ``output_padding`` have one entry, in elements, for each spatial dim. ``transposed``: whether it is
    a transposed convolution. ``groups``: the number of channel groups."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


def _convolution_input_gradient(grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *options: Any) -> Any:
    """Decompose ``convolution_backward`` into a convolution that does not read the input, if only the gradient of the
    input is wanted. Return (gradient of the input, ``None``, ``None``). If other gradients are wanted, too, return
    ``NotImplemented``.

    ``grad``: the gradient of the convolution's result. ``x``, ``weight``: its operands. ``bias_sizes``: the shape of
    its bias, or ``None``. ``options``: stride, padding, dilation, whether the convolution is transposed, output
    padding, number of groups, and three booleans: whether the gradients of input, weight and bias are wanted.
    """
    *geometry, output_mask = options
    if list(output_mask) != [True, False, False]:
        return NotImplemented
    stride, padding, dilation, transposed, _, groups = ConvolutionGeometry(*geometry)
    added = [0] * len(padding)
    if not transposed:
        moves = zip(x.shape[2:], grad.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
        added = [size - ((n - 1) * step - 2 * pad + apart * (k - 1) + 1) for size, n, k, step, pad, apart in moves]
    made = aten.convolution(grad, weight, None, stride, padding, dilation, not transposed, added, groups)
    return made, None, None


class _ConstantInterpreter(fx.Interpreter):
    """Runs a graph, ``module``, but reads its constants (``get_attr`` nodes) from the dict ``captured_tensors``, name
    -> tensor, instead of from the module."""

    def __init__(self, module: fx.GraphModule, captured_tensors: Mapping[str, Tensor]) -> None:
        super().__init__(module)
        self.held = captured_tensors

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.held[target]


def _check_effects(graph: fx.Graph, seeds: Sequence[fx.Node]) -> None:
    """Raise :class:`NotAffine` if ``graph``, the graph of a ``backward`` function, has side effects: it draws random
    numbers, or writes in place to a tensor other than ``seeds``, its placeholders of incoming gradients. Writes to
    ``seeds`` are removed from the graph: in a graph that was made functional, they come last, and no result depends on
    them."""
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags and not _is_inactive_dropout(node):
            raise NotAffine(f"draws random numbers ({node.target})", "draw them in forward and save them for backward")
        if node.target._schema.is_mutable:  # a functional graph writes back to its inputs at the end
            if node.args[0] not in seeds:
                raise NotAffine("changes a tensor in place that it did not create", "change a copy (clone()) of it")
            graph.erase_node(node)


def _is_inactive_dropout(node: fx.Node) -> bool:
    """Return whether the random operator ``node`` is a dropout that draws no random numbers, because its probability is
    0 or it is not in training."""
    given = dict(zip([a.name for a in node.target._schema.arguments], node.args, strict=False)) | node.kwargs  # type: ignore[union-attr]
    return bool(given.get("dropout_p", given.get("p")) == 0 or given.get("train", True) is False)


# Backward operators that read only the shape of their second operand.
_SHAPE_ALONE = frozenset(
    f"aten::{name}_backward"
    for name in (
        "avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d "
        "replication_pad1d replication_pad2d replication_pad3d reflection_pad1d reflection_pad2d reflection_pad3d"
    ).split()
)


def _drop_seeds(graph_module: fx.GraphModule, num_seeds: int) -> None:
    """Remove the first ``num_seeds`` placeholders from ``graph_module``, in place. ``graph_module`` is the transpose of
    a ``backward`` function, and these placeholders are the function's incoming gradients. If the function is linear in
    them, the transpose does not read their values; if it does read them, raise :class:`NotAffine`. Operators that read
    only their shape are changed to read zeros."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _SHAPE_ALONE:
            value = node.args[1].meta["val"]
            with graph.inserting_before(node):
                options = {"dtype": value.dtype, "device": value.device}
                node.update_arg(1, graph.call_function(aten.zeros.default, (list(value.shape),), options))
    drop_unused(graph)
    for seed in [n for n in graph.nodes if n.op == "placeholder"][:num_seeds]:
        for user in seed.users:
            raise NotAffine(NOT_LINEAR.format(f"the derivative of {user.target}"))
        graph.erase_node(seed)
    graph.set_codegen(fx.graph.CodeGen())
    graph_module.recompile()


def _collect_read_nodes(node: fx.Node) -> set[fx.Node]:
    """Return the set of all nodes on which ``node`` depends, and ``node`` itself."""
    seen = {node}
    waiting = [node]
    while waiting:
        new = [n for n in waiting.pop().all_input_nodes if n not in seen]
        seen.update(new)
        waiting += new
    return seen
