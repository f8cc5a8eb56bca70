"""Trace gradients that forward itself computes (``torch.autograd.grad``, ``torch.func``) as ordinary operators.

A trace records the operators that forward calls, but none that the autograd engine calls. For example, a force that is
the gradient of an energy would become a constant without values in the graph. Inside :func:`trace_inner_gradients`, a
call that computes a gradient takes the traced operators between its inputs and its outputs, differentiates them, and
calls the derivative, which is traced like everything else. The derivative consists of operators that can be
differentiated again, as the backward of the whole model needs.

The operators between inputs and outputs are computed a second time for the derivative. Later reads of the outputs use
the second result, so the first is dropped if nothing else needs it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._C import _TorchDispatchModeKey
from torch._C._functorch import get_dynamic_layer_stack_depth
from torch._decomp import decomposition_table
from torch._functorch import eager_transforms
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_slot, make_fx, track_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from partitioner.passes.errors import UnsupportedError
from partitioner.passes.ir.inplace import find_functional_operator, is_view
from partitioner.passes.ir.rewrite import drop_unused

aten = torch.ops.aten

_plain_engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
_plain_requires_grad_ = Tensor.requires_grad_
_PLAIN_FLAG: Any = torch._C.TensorBase.requires_grad


def _restrict_to_real(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the decomposition ``function`` of an operator, restricted to real tensors. For complex ones, it returns
    ``NotImplemented``, because some operators in the decomposition have no derivative for complex tensors."""

    def simpler(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Tensor) and x.is_complex() for x in args):
            return NotImplemented
        return function(*args, **kwargs)

    return simpler


# Decompositions of backward operators into simpler operators, which have derivatives and sharding rules. Norms are
# decomposed, too: their backward reads a mean and a deviation, results of the norm that torch would treat as constants.
_NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "_fused_rms_norm")
_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    target: _restrict_to_real(function)
    for target, function in decomposition_table.items()
    if isinstance(target, torch._ops.OpOverload)
    and ("backward" in target._schema.name or target._schema.name.removeprefix("aten::") in _NORMS)
}
_DETACHES = {aten.detach.default, aten.detach_.default}
# Operators that update running statistics -> positions of the running mean and variance, and of the flag that says so.
_UPDATING = {aten.batch_norm.default: (3, 4, 5), aten.instance_norm.default: (3, 4, 5)}
_EPS_OF_RMS = 3  # position of ``eps`` among the arguments of the RMS norm
_UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is "
    "the desired behavior."
)


@contextlib.contextmanager
def trace_inner_gradients(line: Callable[[], str]) -> Iterator[None]:
    """Return a context for tracing a model's forward, in which forward itself can compute gradients by
    ``torch.autograd.grad``, ``torch.func`` and ``torch.autograd.functional``. The context raises
    :class:`UnsupportedError` for gradients that cannot be traced, such as those inside of ``torch.vmap``.

    ``line``: returns the line of forward that is running, as text for error messages.
    """
    gradients = _InnerGradients(line)
    with (
        mock.patch.object(torch.autograd, "_engine_run_backward", gradients.run_engine),
        mock.patch.object(
            Tensor, "requires_grad_", lambda self, requires_grad=True: gradients.request_gradient(self, requires_grad)
        ),
        mock.patch.object(
            Tensor, "requires_grad", property(_PLAIN_FLAG.__get__, gradients.assign_requires_grad), create=True
        ),
        mock.patch.object(
            eager_transforms, "grad_and_value_impl", gradients.refuse_inside_vmap(_compute_grad_and_value)
        ),
        mock.patch.object(eager_transforms, "_vjp_with_argnums", gradients.refuse_inside_vmap(_compute_output_and_vjp)),
        mock.patch.object(eager_transforms, "_jvp_with_argnums", gradients.refuse_inside_vmap(_compute_output_and_jvp)),
        mock.patch.object(eager_transforms, "vmap", gradients.refuse_inside_vmap(_unroll_vmap_rows)),
    ):
        yield


@dataclass
class _InnerGradients:
    """Replacements of torch's gradient functions during one trace of a model's forward.

    ``line``: returns the line of forward that is running, as text for error messages. ``node_counts``: node of a tensor
    that forward has set to require a gradient -> the number of nodes that the graph had at that time. As in autograd,
    operators before this point that read the tensor pass no gradient to it.
    """

    line: Callable[[], str]
    node_counts: dict[fx.Node, int] = field(default_factory=dict)

    def request_gradient(self, tensor: Tensor, flag: bool = True) -> Tensor:
        """Set whether ``tensor`` requires a gradient to ``flag``, and return ``tensor``. This replaces
        ``tensor.requires_grad_(flag)``. If the tensor begins to require a gradient, the present number of nodes of the
        traced graph is stored in :attr:`node_counts`, because earlier operators that read the tensor must pass no
        gradient to it."""
        tracer = _find_active_tracer()
        node = _get_node(tensor, tracer) if tracer is not None else None
        if node is not None and flag and not _PLAIN_FLAG.__get__(tensor):
            self.node_counts[node] = len(node.graph.nodes)
        return _plain_requires_grad_(tensor, flag)

    def assign_requires_grad(self, tensor: Tensor, flag: bool) -> None:
        """Set whether ``tensor`` requires a gradient to ``flag``. This replaces the assignment ``tensor.requires_grad =
        flag``. If the tensor begins to require a gradient, the present number of nodes of the traced graph is stored in
        :attr:`node_counts`, because earlier operators that read the tensor must pass no gradient to it."""
        self.request_gradient(tensor, flag)

    def run_engine(
        self,
        outputs: Sequence[Any],
        grad_outputs: Sequence[Any],
        keep_graph: Any = None,
        create_graph: bool = False,
        inputs: Sequence[Any] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> tuple[Any, ...]:
        """Compute gradients by traced operators, in place of torch's autograd engine. Return a tuple with the gradient
        of ``outputs`` with respect to each of ``inputs``; ``None`` for an input on which no output depends. Outside of
        a trace, torch's engine is called.

        ``grad_outputs``: the gradient of each output. ``create_graph``: whether the results can be differentiated
        again. ``allow_unreachable``: if false, raise :class:`RuntimeError` for a ``None`` in the result.
        ``accumulate_grad``: if true, gradients are to be stored on tensors, as ``backward()`` does, and
        :class:`UnsupportedError` is raised. ``keep_graph`` is not used during a trace.
        """
        tracer = _find_active_tracer()
        if tracer is None:
            made: tuple[Any, ...] = _plain_engine(
                outputs, grad_outputs, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
            )
            return made
        if accumulate_grad:
            raise self.create_error(
                "calls backward()",
                "leaves gradients on tensors as a side effect; expected torch.autograd.grad(outputs, inputs, "
                "create_graph=True), which returns them",
            )
        self.check_unmapped()
        found = _GradientBody.extract(tracer, self, [*outputs], [*inputs])
        grads = found.differentiate(tracer, self, [*grad_outputs], create_graph)
        if not allow_unreachable and any(g is None for g in grads):
            raise RuntimeError(_UNUSED)
        return tuple(g if create_graph or g is None else g.detach() for g in grads)

    def refuse_inside_vmap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` wrapped so that a call inside of ``torch.vmap`` raises :class:`UnsupportedError`."""

        def checked(*args: Any, **kwargs: Any) -> Any:
            self.check_unmapped()
            return function(*args, **kwargs)

        return checked

    def check_unmapped(self) -> None:
        """Raise :class:`UnsupportedError` if the caller is inside of a transform such as ``torch.vmap``, where a
        gradient cannot be traced."""
        if get_dynamic_layer_stack_depth():
            raise self.create_error(
                "takes a gradient inside of torch.vmap",
                "is not supported there; expected one gradient of the sum over the samples, or a loop over them",
            )

    def create_error(self, action: str, reason: str) -> UnsupportedError:
        """Return the error which says that the model's forward cannot be traced. ``action``: what forward does at the
        line that is running, as text. ``reason``: the reason, as text."""
        return UnsupportedError(f"forward {action}{self.line()}, which {reason}")


@dataclass(frozen=True)
class _GradientBody:
    """The part of a traced graph through which forward takes a gradient itself.

    ``outputs``: the nodes of the tensors whose gradient is taken. ``inputs``: the nodes of the tensors with respect to
    which it is taken. Both have ``None`` for a tensor that is not in the trace. ``body``: the operators between inputs
    and outputs, in graph order. ``external_nodes``: the nodes that ``body`` reads from outside, and the inputs that do
    not depend on another input. ``tensors``: the outputs as tensors.
    """

    outputs: list[fx.Node | None]
    inputs: list[fx.Node | None]
    body: list[fx.Node]
    external_nodes: list[fx.Node]
    tensors: list[Tensor]  # the outputs as tensors

    @classmethod
    def extract(cls, tracer: Any, gradients: _InnerGradients, outputs: list[Any], inputs: list[Any]) -> _GradientBody:
        """Return the part of the traced graph between the tensors ``inputs`` and ``outputs``. Raise
        :class:`UnsupportedError` if one of its operators cannot be computed a second time.

        ``tracer``: torch's object that records the traced operators. ``gradients``: the replacements of torch's
        gradient functions in this trace.
        """
        if not all(isinstance(x, Tensor) for x in (*outputs, *inputs)):
            raise gradients.create_error("takes the gradient of a GradientEdge", "is supported for tensors only")
        ends, starts = ([_get_node(x, tracer) for x in tensors] for tensors in (outputs, inputs))
        nodes = list(tracer.graph.nodes)
        place = {node: index for index, node in enumerate(nodes)}
        reached: set[fx.Node] = {n for n in starts if n is not None}
        enabled = True
        for index, node in enumerate(nodes):
            if node.target is torch._C._set_grad_enabled:
                enabled = bool(node.args[0])
            if node in reached or not enabled or node.op != "call_function":
                continue
            before = [n for n in node.all_input_nodes if n in reached and gradients.node_counts.get(n, 0) <= index]
            if before and not _is_gradient_stopped(node):
                _check_recomputable(node, reached, gradients)
                reached.add(node)
        wanted = {n for n in ends if n is not None and n in reached}
        for node in reversed(nodes):
            if node in wanted:
                wanted |= {n for n in node.all_input_nodes if n in reached}
        heads = {n for n in starts if n is not None and not any(m in wanted for m in n.all_input_nodes)}
        body = [n for n in nodes if n in wanted and n not in heads]
        read = {n for node in body for n in node.all_input_nodes} | {n for n in ends if n is not None}
        external_nodes = sorted((read | heads) - set(body), key=place.__getitem__)
        return cls(ends, starts, body, external_nodes, outputs)

    def differentiate(
        self, tracer: Any, gradients: _InnerGradients, grad_outputs: list[Any], create_graph: bool
    ) -> list[Any]:
        """Return a list of the gradients of the inputs, computed by traced operators; ``None`` for an input on which no
        output depends.

        Args:
            tracer: torch's object that records the traced operators.
            gradients: the replacements of torch's gradient functions in this trace.
            grad_outputs: the gradient of each output.
            create_graph: whether the gradients can be differentiated again.
        """
        values = [n.meta["val"] for n in self.external_nodes]
        seeds = [g for g in grad_outputs if g is not None]
        reached: list[bool] = []

        def derivative(*flat: Tensor) -> list[Tensor]:
            """Compute the operators between inputs and outputs again, and the gradients of the inputs. Return a list of
            the gradients of those inputs that have one, followed by the outputs. ``flat``: the values of the nodes that
            these operators read from outside, followed by the gradients of the outputs."""
            env: dict[fx.Node, Any] = dict(zip(self.external_nodes, flat, strict=False))
            for node in self.inputs:
                if node in env:
                    env[node] = env[node].detach().requires_grad_()
            tangents = list(flat[len(self.external_nodes) :])
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                for node in self.body:
                    _replay_without_writes(node, env)
                pairs = [(env[n], t) for n, t in zip(self.outputs, tangents, strict=True) if n in env]
                pairs = [(o, t) for o, t in pairs if isinstance(o, Tensor) and o.requires_grad]
                targets = [env[n] for n in self.inputs if n in env]
                found: list[Any] = [None] * len(targets)
                if pairs and targets:
                    ends, tangents = [o for o, _ in pairs], [t for _, t in pairs]
                    found = [
                        *torch.autograd.grad(ends, targets, tangents, create_graph=create_graph, allow_unused=True)
                    ]
            reached[:] = [g is not None for g in found]
            return [*(g for g in found if g is not None), *(env[n] for n in self.outputs if n in self.body)]

        with disable_proxy_modes_tracing():
            examples = [*map(_make_empty_like, values), *map(_make_empty_like, seeds)]
            traced = make_fx(derivative, decomposition_table=_DECOMPOSITIONS, tracing_mode="real")(*examples)
            if any(_is_mutating_node(node) for node in traced.graph.nodes):
                traced = _functionalize_graph(traced, examples)
            _take_out_detached(traced)
            _check_derivable(traced, examples, gradients)
            operands = [
                _make_tracked_tensor(tracer, node, value)
                for node, value in zip(self.external_nodes, values, strict=True)
            ]
        results = iter(traced(*operands, *seeds))
        found = iter(reached)
        grads = [
            next(results) if n in (*self.external_nodes, *self.body) and next(found) else None for n in self.inputs
        ]
        for tensor, node in zip(self.tensors, self.outputs, strict=True):
            if node in self.body:
                self._redirect_reads(tracer, tensor, next(results))
        return grads

    @staticmethod
    def _redirect_reads(tracer: Any, tensor: Tensor, again: Tensor) -> None:
        """Change the trace so that operators that are recorded from now on and use ``tensor`` read the node of
        ``again`` instead. This is called for the tensors whose gradient was taken, because they were computed again
        together with the gradient.

        ``again``: the traced tensor with equal values from the second computation. ``tracer``: torch's object that
        records the traced operators.
        """
        track_tensor(tensor, get_proxy_slot(again, tracer).proxy, constant=None, tracer=tracer)


def _find_active_tracer() -> Any:
    """Return torch's object that records the operators of the active trace; ``None`` if nothing is being traced."""
    mode = _get_dispatch_mode_pre_dispatch(_TorchDispatchModeKey.PROXY)
    return None if mode is None else mode.tracer


def _get_node(tensor: Tensor, tracer: Any) -> fx.Node | None:
    """Return the graph node of ``tensor`` in the trace that ``tracer`` records; ``None`` if the tensor is not in the
    trace."""
    slot: Any = get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy.node


def _make_empty_like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _make_tracked_tensor(tracer: Any, node: fx.Node, value: Tensor) -> Tensor:
    """Return a new tensor that stands for the result of ``node`` in the trace that ``tracer`` records. ``value``: a
    tensor whose shape, strides and dtype the new tensor gets. The new tensor requires a gradient if its dtype allows
    this."""
    made = _make_empty_like(value)
    if made.is_floating_point() or made.is_complex():
        _plain_requires_grad_(made)
    track_tensor(made, fx.Proxy(node, tracer), constant=None, tracer=tracer)
    return made


# --- operators --------------------------------------------------------------------------------------------------------
def _is_gradient_stopped(node: fx.Node) -> bool:
    """Return whether no gradient flows from the result of ``node`` to its operands, as for ``detach``, integer results
    and random fills.
    """
    value = node.meta.get("val")
    leaves = [v for v in pytree.tree_leaves(value) if isinstance(v, Tensor)]
    if node.target in _DETACHES or not any(v.is_floating_point() or v.is_complex() for v in leaves):
        return True
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    return name.endswith("_like") or name in ("aten::bernoulli", "aten::multinomial") or "::new_" in name


def _check_recomputable(node: fx.Node, reached: set[fx.Node], gradients: _InnerGradients) -> None:
    """Raise :class:`UnsupportedError` if the operator ``node`` cannot be computed a second time with an equal result,
    which is necessary if forward itself takes a gradient through it.

    ``reached``: nodes that depend on the tensors with respect to which the gradient is taken. ``gradients``: the object
    that creates the error.
    """
    if node.target is operator.getitem:
        return
    action = "takes a gradient"
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        raise gradients.create_error(
            action, f"leads through {node.target}, which is not a differentiable operator of torch"
        )
    if _is_random_operator(node):
        raise gradients.create_error(
            action,
            f"leads through {node.target}, which draws random numbers: draw them outside of the gradient, or "
            "switch it off (eval())",
        )
    if node.target is aten.rms_norm.default and len(node.args) <= _EPS_OF_RMS:
        raise gradients.create_error(
            action, "leads through an RMS norm whose eps depends on the dtype: set it, for example eps=1e-6"
        )
    if node.target._schema.is_mutable:
        *_, base = _find_written_values(node)
        if find_functional_operator(node.target) is None or base not in reached or is_view(base):
            raise gradients.create_error(
                action, f"leads through {node.target}, which writes in place: write to a copy instead"
            )


def _find_written_values(node: fx.Node) -> list[fx.Node]:
    """If ``node`` is an in-place operator, return the nodes that stand for the same tensor before its writes: the
    operand to which ``node`` writes; if this is the result of an in-place operator, its operand; and so on, back to the
    node that created the tensor. Return an empty list for any other node."""
    found = []
    while isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        node = node.args[0]  # type: ignore[assignment]
        found.append(node)
    return found


def _is_random_operator(node: fx.Node) -> bool:
    """Return whether the operator ``node`` draws random numbers. Dropout that is switched off draws none."""
    tagged = torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr]
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    rate = next((given.get(name, 0.0) for name in ("dropout_p", "dropout") if name in names), None)
    if rate is not None:
        return bool(rate)
    if "dropout" in node.target._schema.name:  # type: ignore[union-attr]
        return bool(given.get("train", given.get("training", True))) and given.get("p", 0.5) != 0
    return tagged and bool(given.get("training", True))


def _replay_without_writes(node: fx.Node, env: dict[fx.Node, Any]) -> None:
    """Compute the operator ``node`` again, out of place, so that no operand is changed, and store its value in ``env``.
    ``env``: node -> value; it has the values of the operands."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
    target: Any = node.target
    if target in _UPDATING and len(args) > _UPDATING[target][-1] and args[_UPDATING[target][-1]]:
        first, last, _ = _UPDATING[target]
        args = tuple(None if first <= i <= last else a for i, a in enumerate(args))
    kin = find_functional_operator(target)
    env[node] = (kin or target)(*args, **kwargs)
    env.update(dict.fromkeys(_find_written_values(node), env[node]))


def _is_mutating_node(node: fx.Node) -> bool:
    """Return whether the operator ``node`` writes in place."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _functionalize_graph(traced: fx.GraphModule, arguments: list[Tensor]) -> fx.GraphModule:
    """Return a graph that computes the same as ``traced``, without operators that write in place. ``arguments``:
    tensors of the shapes and dtypes of its inputs."""

    def run(*flat: Tensor) -> list[Any]:
        return list(fx.Interpreter(traced).run(*flat, enable_io_processing=False))

    return make_fx(torch.func.functionalize(run, remove="mutations"), tracing_mode="real")(*arguments)


def _take_out_detached(traced: fx.GraphModule) -> None:
    """Remove ``detach`` operators from ``traced``, the graph of a derivative, in place. They come from tensors that
    autograd saved, and would stop gradients if the derivative is differentiated again."""
    for node in list(traced.graph.nodes):
        if node.target in _DETACHES:
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)
    drop_unused(traced.graph)
    traced.recompile()


def _check_derivable(traced: fx.GraphModule, arguments: list[Tensor], gradients: _InnerGradients) -> None:
    """Raise :class:`UnsupportedError` if torch would compute wrong second derivatives. ``traced``: the graph of a first
    derivative, which is to be differentiated again.

    Second derivatives are wrong if the graph reads a secondary result of an operator, such as the mean that a norm
    returns: torch treats some of these as constants although they depend on the operands. ``arguments``: tensors of the
    shapes and dtypes of the graph's inputs. ``gradients``: the object that creates the error, whose message names the
    line of the model's code.
    """
    env: dict[fx.Node, Any] = {}
    floating = (
        a.requires_grad_() if a.is_floating_point() or a.is_complex() else a for a in map(_make_empty_like, arguments)
    )
    with torch.enable_grad():
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(floating)
            elif node.op == "call_function":
                env[node] = node.target(*fx.node.map_arg(node.args, env.get), **fx.node.map_arg(node.kwargs, env.get))
            if node.target is not operator.getitem or not isinstance(env[node], Tensor):
                continue
            parts = [x for x in env[node.args[0]] if isinstance(x, Tensor)]
            if env[node].is_floating_point() and not env[node].requires_grad and any(x.requires_grad for x in parts):
                raise gradients.create_error(
                    "takes a gradient",
                    f"leads through {node.args[0].target}, whose second derivative torch cannot compute: write it "
                    "with simpler operators",
                )


def _decompose_convolution_backward(
    grad: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any, *options: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None] | Any:
    """Decompose ``convolution_backward`` into a transposed convolution if only the gradient of the input is wanted.
    Return (gradient of the input, ``None``, ``None``). If other gradients are wanted, too, return ``NotImplemented``.

    ``grad``: the gradient of the convolution's result. ``input``, ``weight``: its operands. ``bias_sizes``: the shape
    of its bias, or ``None``. ``options``: stride, padding, dilation, whether the convolution is transposed, output
    padding, number of groups, and three booleans: whether the gradients of input, weight and bias are wanted.
    """
    stride, padding, dilation, transposed, _, groups, wanted = options
    if list(wanted) != [True, False, False]:
        return NotImplemented
    kernel, dims = weight.shape[2:], range(weight.dim() - 2)
    if transposed:
        more = [0] * len(dims)
    else:
        reached = [
            (grad.shape[2 + d] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (kernel[d] - 1) + 1 for d in dims
        ]
        more = [input.shape[2 + d] - reached[d] for d in dims]
    made = aten.convolution.default(grad, weight, None, stride, padding, dilation, not transposed, more, groups)
    return made, None, None


_DECOMPOSITIONS[aten.convolution_backward.default] = _decompose_convolution_backward


# --- torch.func -------------------------------------------------------------------------------------------------------
def _compute_grad_and_value(
    func: Callable[..., Any], argnums: Any, has_aux: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Compute ``torch.func.grad_and_value(func, argnums, has_aux)(*args, **kwargs)`` by ``torch.autograd.grad``, which
    can be traced. Return (gradients, output), or (gradients, (output, auxiliary result of ``func``)) with ``has_aux``.

    ``argnums``: the index or indices of the arguments that are differentiated.
    """
    with torch.enable_grad():
        args, chosen = _separate_arguments(args, argnums)
        output = func(*args, **kwargs)
        output, aux = output if has_aux else (output, None)
        if not isinstance(output, Tensor) or output.dim():
            raise RuntimeError("grad(f)(*args): expected f(*args) to return a scalar tensor")
        leaves, spec = pytree.tree_flatten(chosen)
        grads = _replace_none_by_zeros(
            torch.autograd.grad(output, leaves, create_graph=True, allow_unused=True), leaves
        )
    return pytree.tree_unflatten(grads, spec), (output, aux) if has_aux else output


def _compute_output_and_vjp(
    func: Callable[..., Any], *primals: Any, argnums: Any = None, has_aux: bool = False
) -> tuple[Any, ...]:
    """Compute ``torch.func.vjp`` in a way that can be traced. Return (the output of ``func`` for the arguments
    ``primals``, a function that maps gradients of the output to gradients of the arguments). If ``has_aux`` is true,
    also return the auxiliary result of ``func``.

    ``argnums``: the index or indices of the arguments that are differentiated; ``None`` means all.
    """
    with torch.enable_grad():
        primals, chosen = _separate_arguments(primals, argnums)
        output = func(*primals)
        output, aux = output if has_aux else (output, None)
    leaves, spec = pytree.tree_flatten(chosen)
    ends = pytree.tree_leaves(output)

    def pull_back(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        given = pytree.tree_leaves(cotangents)
        with torch.enable_grad():
            grads = torch.autograd.grad(ends, leaves, given, create_graph=True, allow_unused=True)
        return pytree.tree_unflatten(_replace_none_by_zeros(grads, leaves), spec)

    return (output, pull_back, aux) if has_aux else (output, pull_back)


def _compute_output_and_jvp(
    func: Callable[..., Any], primals: Any, tangents: Any, argnums: Any, *, strict: bool = False, has_aux: bool = False
) -> tuple[Any, ...]:
    """Compute ``torch.func.jvp`` in a way that can be traced. Return (the output of ``func``, its directional
    derivative along ``tangents``). If ``has_aux`` is true, also return the auxiliary result of ``func``.

    ``primals``: the arguments of ``func``. ``tangents``: a direction for each differentiated argument. ``argnums``: the
    index or indices of these arguments. ``strict`` is not used. The Jacobian-vector product is computed as the gradient
    of the vector-Jacobian product, which is linear in its vector.
    """
    output, pull_back, *aux = _compute_output_and_vjp(func, *primals, argnums=argnums, has_aux=has_aux)
    ends, spec = pytree.tree_flatten(output)
    with torch.enable_grad():
        seeds = [torch.zeros_like(end).requires_grad_() for end in ends]
        grads = pytree.tree_leaves(pull_back(pytree.tree_unflatten(seeds, spec)))
        moved = torch.autograd.grad(grads, seeds, pytree.tree_leaves(tangents), create_graph=True, allow_unused=True)
    return (output, pytree.tree_unflatten(_replace_none_by_zeros(moved, seeds), spec), *aux)


def _unroll_vmap_rows(func: Callable[..., Any], in_dims: Any = 0, out_dims: int = 0, **_: Any) -> Callable[..., Any]:
    """Return a function that computes ``torch.vmap(func)`` by a loop: it calls ``func`` for each index along dim 0 of
    its arguments, and stacks the results along ``out_dims``. ``torch.func`` uses it to compute Jacobians. ``in_dims``
    is not used; ``torch.func`` passes 0."""

    def call_per_row(*args: Any) -> Any:
        """Call the function that was passed to ``torch.vmap`` once for each index along dim 0 of the tensors in
        ``args``, and return the stacked results."""
        leaves, spec = pytree.tree_flatten(args)
        rows = [func(*pytree.tree_unflatten([x[i] for x in leaves], spec)) for i in range(leaves[0].shape[0])]
        parts = [pytree.tree_flatten(row) for row in rows]
        return pytree.tree_unflatten(
            [torch.stack(same, out_dims) for same in zip(*(found for found, _ in parts), strict=True)], parts[0][1]
        )

    return call_per_row


def _separate_arguments(args: tuple[Any, ...], argnums: Any) -> tuple[tuple[Any, ...], Any]:
    """Replace the differentiated arguments by separate tensors that require gradients. Return (``args`` with these
    replacements, a tuple of the replacements alone). If ``argnums`` is an integer, the second value is the single
    replacement instead of a tuple.

    ``argnums``: the index or indices of the arguments that are differentiated; ``None`` means all.
    """
    numbers = range(len(args)) if argnums is None else (argnums,) if isinstance(argnums, int) else argnums
    numbers = [number % len(args) for number in numbers]
    made = tuple(pytree.tree_map(_make_separate_tensor, a) if i in numbers else a for i, a in enumerate(args))
    if isinstance(argnums, int):
        return made, made[numbers[0]]
    return made, tuple(made[i] for i in numbers)


def _make_separate_tensor(value: Any) -> Any:
    """Return a new tensor with the values of ``value`` that requires a gradient. If ``value`` requires a gradient,
    gradients also flow on to ``value``. A value that is not a tensor is returned unchanged."""
    if not isinstance(value, Tensor):
        return value
    return aten.alias.default(value) if value.requires_grad else value.detach().requires_grad_()


def _replace_none_by_zeros(grads: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return ``grads`` with each ``None`` replaced by zeros in the shape of the tensor at the same position of
    ``tensors``."""
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, tensors, strict=True)]
