"""Compile a graph to one straight-line Python function, without an interpreter between the operators.

The function takes its arguments as a list and empties it, and deletes every value after its last use, so that no tensor
lives longer than needed. A collective starts when its operand is ready, and is waited for where its result is first
read; independent operators are moved in between. Every line of the function is associated with its node, so an error
names the node, the module's path and the source line, at no cost in a run without errors.

ATen operators are replaced by faster Python functions with the same result. ``torch.ops.aten.mm.default`` goes through
boxed arguments and takes 2 microseconds more than ``torch.mm`` (measured), which on small tensors is half of the
operator's time. A view that is impossible with its operand's strides becomes a copy, so gradients may have any strides.
"""

from __future__ import annotations

import itertools
import linecache
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import fx

from partitioner.passes.ops import cross_entropy
from partitioner.passes.ops.cpu_products import PRODUCTS, choose_product
from partitioner.runtime.execute.overlap import can_alias_operand, find_memory_owners, order_for_overlap

aten = torch.ops.aten

FAST: dict[Any, Callable[..., Any]] = {
    aten.view.default: torch.reshape,
    aten._unsafe_view.default: torch.reshape,
    aten.reshape.default: torch.reshape,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
    aten.expand.default: torch.Tensor.expand,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.squeeze.dim: torch.squeeze,
    aten.squeeze.dims: torch.squeeze,
    aten.select.int: torch.select,
    aten.cat.default: torch.cat,
    aten.stack.default: torch.stack,
    aten.split.Tensor: torch.split,
    aten.split_with_sizes.default: torch.split,
    aten.clone.default: torch.clone,
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.addmm.default: torch.addmm,
    aten.baddbmm.default: torch.baddbmm,
    aten.matmul.default: torch.matmul,
    aten.linear.default: torch.nn.functional.linear,
    aten.embedding.default: torch.embedding,
    aten.add.Tensor: torch.add,
    aten.add.Scalar: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.sub.Scalar: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.mul.Scalar: torch.mul,
    aten.div.Tensor: torch.div,
    aten.div.Scalar: torch.div,
    aten.neg.default: torch.neg,
    aten.exp.default: torch.exp,
    aten.log.default: torch.log,
    aten.sqrt.default: torch.sqrt,
    aten.rsqrt.default: torch.rsqrt,
    aten.reciprocal.default: torch.reciprocal,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.sin.default: torch.sin,
    aten.cos.default: torch.cos,
    aten.tanh.default: torch.tanh,
    aten.sigmoid.default: torch.sigmoid,
    aten.relu.default: torch.relu,
    aten.silu.default: torch.nn.functional.silu,
    aten.maximum.default: torch.maximum,
    aten.minimum.default: torch.minimum,
    aten.where.self: torch.where,
    aten.sum.dim_IntList: torch.sum,
    aten.sum.default: torch.sum,
    aten.mean.dim: torch.mean,
    aten.amax.default: torch.amax,
    aten.eq.Tensor: torch.eq,
    aten.eq.Scalar: torch.eq,
    aten.ne.Scalar: torch.ne,
    aten.lt.Tensor: torch.lt,
    aten.le.Tensor: torch.le,
    aten.gt.Tensor: torch.gt,
    aten.ge.Tensor: torch.ge,
    aten.gather.default: torch.gather,
    aten.index_select.default: torch.index_select,
    aten.logsumexp.default: torch.logsumexp,
    aten._softmax.default: torch._softmax,
    cross_entropy.ops.target_and_logsumexp.default: cross_entropy.target_and_logsumexp,
    cross_entropy.ops.target_and_logsumexp_backward.default: cross_entropy.target_and_logsumexp_backward,
}

_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def find_dim_sum(node: fx.Node) -> fx.Node | None:
    """Return the node that sums a tensor over some dims, if its sum is the value of ``node``: ``node`` itself, or the
    operand of ``node`` if ``node`` is a view that drops the summed dims. Otherwise return ``None``. The gradient of a
    bias has this form.
    """
    source = node.args[0] if node.target in _VIEWS else node
    if not isinstance(source, fx.Node) or source.target is not aten.sum.dim_IntList or source.kwargs:
        return None
    if source is not node and len(source.users) > 1:
        return None
    x, dims = source.args[:2]
    assert isinstance(x, fx.Node)
    if not isinstance(dims, list | tuple) or not dims or "val" not in x.meta or "val" not in node.meta:
        return None
    shape = x.meta["val"].shape
    dropped = {d % len(shape) for d in dims if isinstance(d, int)}
    kept = [s for d, s in enumerate(shape) if d not in dropped]
    return source if list(node.meta["val"].shape) == kept else None


META = torch.device("meta")

_LITERALS = (bool, int, str, type(None))


@dataclass(frozen=True)
class AliasBinding:
    """Tells the compiler of a graph that the value of a node is its operand, so that no function is called."""


@dataclass(frozen=True)
class ConstantBinding:
    """Tells the compiler of a graph that the value of a node is the constant ``value``, known at compile time."""

    value: Any


@dataclass(frozen=True)
class DirectBinding:
    """Tells the compiler of a graph to compute the value of a node by calling ``function`` with the node's tensor
    operands.
    """

    function: Callable[..., Any]


@dataclass(frozen=True)
class AsyncBinding:
    """Tells the compiler of a graph that a node is a collective. ``function`` starts the collective, given the node's
    operands, and returns a handle whose ``wait()`` returns the node's value. ``scratch`` is called instead of
    ``function`` if nothing else uses the operand; it may overwrite the operand.
    """

    function: Callable[..., Any]
    scratch: Callable[..., Any]


Binding = AliasBinding | ConstantBinding | DirectBinding | AsyncBinding


@dataclass(frozen=True)
class CompiledGraph:
    """A graph that is compiled to the Python function ``function(arguments, sinks)``. The function returns the graph's
    outputs, except gradients of parameters, which it adds to the accumulators ``sinks``. ``arguments`` is a list, which
    the function empties. ``name``: the graph's name. ``filename``: the file name of the function in tracebacks.
    ``code``: the function's source. ``nodes``: line number of ``code`` -> graph node.
    """

    name: str
    function: Callable[[list[Any], Sequence[Any]], tuple[Any, ...]]
    code: str
    filename: str
    nodes: dict[int, fx.Node] = field(repr=False)

    def node_at(self, traceback: TracebackType | None) -> fx.Node | None:
        """Return the graph node in whose line an error was raised, from the error's traceback; ``None`` if the error
        was not raised in this function.
        """
        found = None
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == self.filename:
                found = self.nodes.get(traceback.tb_lineno)
            traceback = traceback.tb_next
        return found


_numbers = itertools.count()


def compile_graph(
    graph: fx.Graph,
    name: str,
    bindings: Mapping[fx.Node, Binding],
    device: torch.device,
    num_sinks: int = 0,
) -> CompiledGraph:
    """Compile ``graph`` to a Python function, and return it with its source.

    Args:
        name: part of the file name in tracebacks.
        bindings: functions to call for nodes, such as collectives, that do not run their ATen operator.
        device: the device on which the graph creates tensors.
        num_sinks: number of outputs, at the end, that are not returned. They are added to the accumulators in the
            function's argument ``sinks`` as soon as they are computed: ``sink.add(value)``. If nothing else reads the
            value, the accumulator computes it: ``sink.addmm(a, b)``, ``sink.add_sum(x, dims)`` or
            ``sink.add_grouped_product(...)``.
    """
    return _CodeWriter(graph, name, bindings, device, num_sinks).compile_code()


class _CodeWriter:
    """Writes the source of the Python function for one graph, line by line, and compiles it. ``bindings``: functions to
    call for nodes that do not run their ATen operator. ``num_sinks``: number of outputs, at the end, that are
    accumulated instead of returned.
    """

    def __init__(
        self, graph: fx.Graph, name: str, bindings: Mapping[fx.Node, Binding], device: torch.device, num_sinks: int
    ) -> None:
        self.graph = graph
        self.name = name
        self.device = device
        nodes = list(graph.nodes)
        self.placeholders = [n for n in nodes if n.op == "placeholder"]
        results: tuple[Any, ...] = tuple(nodes[-1].args[0])
        split = len(results) - num_sinks
        self.returned, self.sunk = results[:split], results[split:]
        self.sums = {
            n: s
            for n in self.sunk
            if n is not None and self.is_only_accumulated(n) and (s := find_dim_sum(n)) is not None
        }
        # The accumulator computes the sum, so the node of the sum becomes an alias of its operand.
        self.bindings = {**bindings, **{s: AliasBinding() for n, s in self.sums.items() if s is not n}}
        self.stacks, passed = self.find_grouped_sums()
        self.bindings |= {n: AliasBinding() for n in passed}
        self.num_sinks = num_sinks
        self.steps = order_for_overlap([n for n in nodes if n.op == "call_function"], self.is_started)
        self.names: dict[fx.Node, str] = {}
        self.globals: dict[str, Any] = {"device": device}
        self.lines: list[str] = []
        self.line_nodes: dict[int, fx.Node] = {}

    def find_grouped_sums(self) -> tuple[dict[fx.Node, bool], list[fx.Node]]:
        """Find the gradients of stacked expert weights that only their accumulator reads, so that the accumulator can
        compute them in place. Return a dict: node that computes such a gradient -> whether the last two dims of its
        result are swapped afterwards; and a list of views and copies of gradients that need not run, because an
        accumulator accepts any strides.
        """
        stacks: dict[fx.Node, bool] = {}
        passed: list[fx.Node] = []
        for result in self.sunk:
            node, between, turned = result, [], False
            while node is not None and self.has_one_reader(node) and (step := _is_transposed_copy(node)) is not None:
                between.append(node)
                turned ^= step
                node = node.all_input_nodes[0]
            if node is None or not self.has_one_reader(node):
                continue
            if node.target is torch.ops.partition.grouped_mm_weight.default:
                stacks[node] = turned
                passed += between
            elif between and not turned and all(n.target is torch.ops.aten.clone.default for n in between):
                passed += between
        return stacks, passed

    def has_one_reader(self, node: fx.Node) -> bool:
        """Return whether exactly one operator, or one accumulator of gradients, reads the result of ``node``."""
        return len(node.users) == 1 and node not in self.returned and self.sunk.count(node) <= 1

    def is_started(self, node: fx.Node) -> bool:
        return isinstance(self.bindings.get(node), AsyncBinding)

    def compile_code(self) -> CompiledGraph:
        """Write the source of the Python function for the graph, compile it, and return the compiled function."""
        sinks = self.find_sinks()
        last = self.find_last_uses()
        overwritable = self.find_overwritable()
        self.lines.append("def run(arguments, sinks):")
        if self.num_sinks:
            names = ", ".join(f"sink_{i}" for i in range(self.num_sinks))
            self.lines.append(f"    {names}, = sinks")
        self.unpack_arguments(sinks)
        for index, (node, wait) in enumerate(self.steps):
            self.write_step(node, wait, sinks, overwritable)
            self.write_deletion(last.get(index, ()))
        outputs = "".join(f"{self.render_value(n)}, " for n in self.returned)
        self.lines.append(f"    return ({outputs})")
        code = "\n".join(self.lines) + "\n"
        filename = f"<partition {self.name} {next(_numbers)}>"
        exec(compile(code, filename, "exec"), self.globals)
        linecache.cache[filename] = (len(code), None, self.lines, filename)
        return CompiledGraph(self.name, self.globals["run"], code, filename, self.line_nodes)

    def unpack_arguments(self, sinks: Mapping[fx.Node, list[int]]) -> None:
        """Write the source lines that assign the function's arguments to variables, and that delete the variables that
        nothing reads. If an argument is itself the gradient of a parameter, also write the line that adds it to the
        parameter's accumulator (a sum over microbatches). ``sinks``: node -> indices of the accumulators to which the
        node's value is added.
        """
        for node in self.placeholders:
            self.names[node] = f"v{len(self.names)}"
        if self.placeholders:
            self.lines.append(f"    {', '.join(self.names[n] for n in self.placeholders)}, = arguments")
        self.lines.append("    arguments.clear()")
        for node in self.placeholders:
            self.lines += [f"    sink_{i}.add({self.names[node]})" for i in sinks.get(node, ())]
        read = {self.resolve_alias(o) for n in self.graph.nodes for o in n.all_input_nodes}
        self.write_deletion([n for n in self.placeholders if n not in read])

    def resolve_alias(self, node: fx.Node) -> fx.Node:
        """Return the node whose variable holds the value of ``node``: ``node`` itself or, if ``node`` only passes its
        operand through, the node of the operand.
        """
        while isinstance(self.bindings.get(node), AliasBinding):
            node = node.all_input_nodes[0]
        return node

    def find_sinks(self) -> dict[fx.Node, list[int]]:
        """Return a dict: node whose value is the gradient of a parameter from one microbatch -> indices, in the
        function's argument ``sinks``, of the accumulators (sums over microbatches) to which the compiled function adds
        the value.
        """
        sinks: dict[fx.Node, list[int]] = {}
        for i, result in enumerate(self.sunk):
            if result is not None:
                sinks.setdefault(self.resolve_alias(result), []).append(i)
        return sinks

    def find_last_uses(self) -> dict[int, list[fx.Node]]:
        """Return the values that the generated function deletes after each of its steps, because no later step reads
        them, as a dict: index of the step -> nodes of these values. A step is an operator that runs, or a wait for a
        collective.
        """
        last: dict[fx.Node, int] = {}
        for index, (node, wait) in enumerate(self.steps):
            last[self.resolve_alias(node)] = index
            if not wait:
                last.update((self.resolve_alias(o), index) for o in node.all_input_nodes)
        kept = {self.resolve_alias(n) for n in self.returned if n is not None}
        uses: dict[int, list[fx.Node]] = {}
        for node, index in last.items():
            if node not in kept and not isinstance(self.bindings.get(node), ConstantBinding):
                uses.setdefault(index, []).append(node)
        return uses

    def find_overwritable(self) -> set[fx.Node]:
        """Return the collectives of the graph (nodes) that may overwrite their operand, because the operand is computed
        in this graph and not used later.
        """
        family = find_memory_owners(
            self.graph, lambda n: can_alias_operand(n) or isinstance(self.bindings.get(n), AliasBinding | DirectBinding)
        )
        members: dict[fx.Node, list[fx.Node]] = {}
        for node, head in family.items():
            members.setdefault(head, []).append(node)
        place = {node: i for i, (node, wait) in enumerate(self.steps) if not wait}
        over = place | {node: i for i, (node, wait) in enumerate(self.steps) if wait}
        outside = {n for n in (*self.returned, *self.sunk) if n is not None}
        found = set()
        for node in place:
            if self.is_started(node):
                operand = node.all_input_nodes[0]
                users = {u for m in members[family[operand]] for u in m.users if u.op != "output"}
                own = family[operand].op == "call_function" and not self.is_constant(family[operand])
                last = all(over[u] < place[node] for u in users - {node})
                if own and last and not outside & set(members[family[operand]]):
                    found.add(node)
        return found

    def is_constant(self, node: fx.Node) -> bool:
        return isinstance(self.bindings.get(node), ConstantBinding)

    def write_step(
        self, node: fx.Node, wait: bool, sinks: Mapping[fx.Node, list[int]], overwritable: set[fx.Node]
    ) -> None:
        """If ``wait`` is false, write the lines that run or start ``node``; otherwise the line that waits for the
        collective ``node``. ``sinks``: node -> indices of the accumulators to which its value is added.
        ``overwritable``: collectives that may overwrite their operand.
        """
        binding = self.bindings.get(node)
        if wait:
            self.append_line(f"{self.names[node]} = {self.names[node]}.wait()", node)
        elif isinstance(binding, AliasBinding):
            return
        elif isinstance(binding, ConstantBinding):
            self.names[node] = self.add_constant(binding.value)
        elif sinks.get(node) and self.write_product(node, sinks[node]):
            return
        else:
            self.names[node] = f"v{len(self.names)}"
            self.append_line(f"{self.names[node]} = {self.write_expression(node, binding, overwritable)}", node)
        if not self.is_started(node) or wait:
            for sink in sinks.get(node, ()):
                self.append_line(f"sink_{sink}.add({self.names[node]})", node)

    def write_expression(self, node: fx.Node, binding: Binding | None, overwritable: set[fx.Node]) -> str:
        """Return the source of the expression that computes ``node``. ``binding``: the function to call instead of the
        operator of ``node``, or ``None``. ``overwritable``: collectives that may overwrite their operand.
        """
        if node.target is operator.getitem:
            return f"{self.render_value(node.args[0])}[{node.args[1]!r}]"
        if isinstance(binding, DirectBinding | AsyncBinding):
            function = binding.function
            if isinstance(binding, AsyncBinding) and node in overwritable:
                function = binding.scratch
            operands = ", ".join(self.render_value(o) for o in node.all_input_nodes)
            return f"{self.add_constant(function, node)}({operands})"
        function = self.choose_function(node)
        arguments = [self.render_value(a) for a in node.args]
        arguments += [f"{k}={self.render_value(v)}" for k, v in node.kwargs.items()]
        return f"{self.add_constant(function, node)}({', '.join(arguments)})"

    def choose_function(self, node: fx.Node) -> Any:
        """Return the fastest Python function or operator that computes ``node`` on the graph's device."""
        if self.device.type == "cpu" and node.target in PRODUCTS and not node.kwargs:
            faster = choose_product(node.target, tuple(o.meta.get("val") for o in node.args if isinstance(o, fx.Node)))
            if faster is not None:
                return faster
        return FAST.get(node.target, node.target)

    def write_product(self, node: fx.Node, to: list[int]) -> bool:
        """If ``node`` is a matrix product or sum that only an accumulator of gradients reads, write a line in which the
        accumulator computes it in place, and return ``True``; otherwise write nothing and return ``False``. ``to``:
        indices of the accumulators to which the result is added.
        """
        if len(to) > 1 or not (node in self.stacks or self.is_only_accumulated(node)):
            return False
        if node in self.sums:
            x, dims = self.sums[node].args[:2]
            self.append_line(f"sink_{to[0]}.add_sum({self.render_value(x)}, {self.render_value(dims)})", node)
        elif node.target is torch.ops.aten.mm.default:
            a, b = (self.render_value(x) for x in node.args)
            self.append_line(f"sink_{to[0]}.addmm({a}, {b})", node)
        elif node in self.stacks:
            rows, grads, ends = (self.render_value(x) for x in node.args)
            self.append_line(f"sink_{to[0]}.add_grouped_product({rows}, {grads}, {ends}, {self.stacks[node]})", node)
        else:
            return False
        self.names[node] = ""
        return True

    def is_only_accumulated(self, node: fx.Node) -> bool:
        return node not in self.returned and all(user.op == "output" for user in node.users)

    def write_deletion(self, nodes: Sequence[fx.Node]) -> None:
        names = [self.names[n] for n in nodes if self.names[n]]
        if names:
            self.lines.append(f"    del {', '.join(names)}")

    def append_line(self, text: str, node: fx.Node) -> None:
        self.lines.append(f"    {text}")
        self.line_nodes[len(self.lines)] = node

    def render_value(self, value: Any) -> str:
        """Return the source of ``value``, an argument of a node: a variable, a literal, or the name of a stored
        constant.
        """
        if isinstance(value, fx.Node):
            return self.names[self.resolve_alias(value)]
        if isinstance(value, list):
            return f"[{', '.join(map(self.render_value, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(self.render_value(v) + ', ' for v in value)})"
        if isinstance(value, _LITERALS):
            return repr(value)
        if isinstance(value, float) and value == value and abs(value) != float("inf"):
            return repr(value)
        if value == META:
            return "device"
        return self.add_constant(value)

    def add_constant(self, value: Any, node: fx.Node | None = None) -> str:
        name = f"{_name_operator(node)}_{len(self.globals)}"
        self.globals[name] = value
        return name


def _is_transposed_copy(node: fx.Node) -> bool | None:
    """Return ``True`` if ``node`` swaps the last two dims of a stack of matrices, ``False`` if it is a copy, and
    ``None`` if it is neither.
    """
    if node.target is torch.ops.aten.clone.default:
        return False
    if node.target is torch.ops.aten.transpose.int and node.meta["val"].dim() == 3:
        return True if {d % 3 for d in node.args[1:] if isinstance(d, int)} == {1, 2} else None
    return None


def _name_operator(node: fx.Node | None) -> str:
    """Return the short name of a node's operator, such as ``mm``, for tracebacks; "constant" for ``None``."""
    if node is None:
        return "constant"
    parts = str(node.target).split(".")  # aten.mm.default
    return re.sub(r"\W", "_", parts[1] if len(parts) == 3 else node.name)
