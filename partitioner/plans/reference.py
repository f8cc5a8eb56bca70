"""The reference of a verification: the unmodified model, run eagerly in one process, in float64 on request."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.passes.capture.buffers import find_state_aliases
from partitioner.passes.capture.capture import PRECISIONS
from partitioner.passes.capture.export import convert_to_containers, locate_error
from partitioner.passes.capture.wrappers import copy_model
from partitioner.passes.errors import InputsError, PartitionError
from partitioner.passes.ir.rewrite import replace_floating_dtype
from partitioner.passes.ops.fake_quantize import FORMULAS, trace_fused_quantizers
from partitioner.passes.ops.random import (
    Sampler,
    apply_dropout,
    bind_arguments,
    draw_whole_tensor,
    find_sampling_function,
)
from partitioner.passes.ops.recurrent import RecurrentLayers
from partitioner.passes.trace.autograd_functions import drop_looking_hooks, skip_observing_hooks, undo_hook_changes
from partitioner.runtime.engine.batches import flatten_by_path
from partitioner.runtime.state.weights import get_number_attribute

_REDUCED = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex32})


@dataclass(frozen=True)
class Reference:
    """What the unmodified model computes on one process.

    Attributes:
        outputs: path in the model's result -> value.
        loss: the loss; ``None`` if the model has none.
        grads: gradient of each parameter by name.
        buffers: value of each buffer and parameter by name, after the forward.
        changed: names of the buffers and parameters that forward changed.
        parameters: names of the parameters among ``buffers``.
    """

    outputs: dict[str, Any]
    loss: Tensor | None
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]
    changed: frozenset[str]
    parameters: frozenset[str] = frozenset()


class _Float64(TorchDispatchMode):
    """A torch mode in which operators that are called with a floating dtype narrower than float64, such as
    ``to(torch.float32)``, use float64 instead.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(_widen_reduced_dtype, (args, kwargs or {}))
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float64:
            return _grouped_mm(*args)
        return func(*args, **kwargs)


class _DoubleData(TorchFunctionMode):
    """A torch mode for tensors that the model's code creates from Python numbers while the model runs in float64. Their
    values are rounded to the type that the code requests and then stored as float64, because plans treat such constants
    in the same way.

    ``default``: the type to round to if the code requests no type. ``planned``: the type of the model's tensors in the
    plan. Where the code requests the type of one of the model's tensors, which is float64 only in this run, the values
    are rounded to ``planned``.
    """

    def __init__(self, default: torch.dtype, planned: torch.dtype) -> None:
        super().__init__()
        self.default, self.planned = default, planned

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        quantize = FORMULAS.get(getattr(func, "__name__", ""))
        if quantize is not None:
            return quantize(_run_operator, *args, **kwargs)
        if func is Tensor.__setitem__ and isinstance(args[2], float):
            args = (*args[:2], torch.tensor(args[2], dtype=self.planned).item())
        args, kwargs = _all_doubled(getattr(func, "__name__", ""), args, kwargs)
        made = func(*args, **kwargs)
        if func not in _OF_NUMBERS or not made.is_floating_point():
            return made
        of_own = func is Tensor.new_tensor  # this function takes the type of a tensor of the model
        source, given = args[1 if of_own else 0] if args else None, kwargs.get("dtype")
        if of_own or given == torch.float64:
            given = self.planned if given in (None, torch.float64) else given
        elif given is None and not isinstance(source, Tensor) and not hasattr(source, "__array__"):
            given = self.default
        return (made if given is None else func(*args, **{**kwargs, "dtype": given})).double()


def _all_doubled(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return ``(args, kwargs)`` of a call of the function named ``name``. If some of the tensors are float64, the
    tensors of narrower floating types are converted to float64, too; they come from outside the model, such as globals.
    Arguments of functions that write to a tensor (whose names end in ``_``) are unchanged.
    """
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    types = {x.dtype for x in leaves}
    if not types & _REDUCED or not types & {torch.float64, torch.complex128} or name.endswith("_"):
        return args, kwargs
    doubled: tuple[Any, Any] = pytree.tree_map(_double_foreign, (args, kwargs))
    return doubled


def _double_foreign(value: Any) -> Any:
    return _tensor_to_float64(value.detach()) if isinstance(value, Tensor) and value.dtype in _REDUCED else value


_OF_NUMBERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, Tensor.new_tensor})


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any) -> Tensor:
    """Return the result of ``torch._grouped_mm`` of ``a`` and ``b``, computed in float64, for which PyTorch has no
    kernel. ``offs``: the end index of each group of rows of ``a``, of columns of ``b``, or of the dim that is summed
    over; ``None`` for a batched product.
    """
    if offs is None:
        return a @ b
    ends = offs.tolist()
    groups = list(enumerate(slice(start, end) for start, end in zip([0, *ends], ends, strict=False)))
    if a.dim() == b.dim() == 2:
        return torch.stack([a[:, g] @ b[g] for _, g in groups])
    if a.dim() == 2:
        made = a.new_zeros(a.shape[0], b.shape[2])
        for e, g in groups:
            made[g] = a[g] @ b[e]
        return made
    made = a.new_zeros(a.shape[1], b.shape[1])
    for e, g in groups:
        made[:, g] = a[e] @ b[:, g]
    return made


def _widen_reduced_dtype(value: Any) -> Any:
    return (
        replace_floating_dtype(value, torch.float64) if isinstance(value, torch.dtype) and value in _REDUCED else value
    )


class _Drawing(TorchDispatchMode):
    """A torch mode in which each call of an operator that draws random numbers uses a random stream of its own, as in
    the programs of plans. ``streams``: provides the streams, numbered in the order of calls."""

    def __init__(self, streams: _ByPlace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = find_sampling_function(func, args, kwargs)
        if formula is None:
            return func(*args, **kwargs)
        given = bind_arguments(func, args, kwargs)
        if func._schema.is_mutable:
            given = {n: v.clone() if isinstance(v, Tensor) else v for n, v in given.items()}
        made = func(*args, **kwargs)
        written = [v for a, v in zip(func._schema.arguments[1:], args[1:], strict=False) if _is_written(a)]
        targets = [*(made if isinstance(made, tuple | list) else [made]), *written]
        found = formula(Sampler(_run_operator, self.streams.numbers(targets[0].device), given, targets[0]))
        for target, value in zip(targets, found if isinstance(found, tuple) else (found,), strict=False):
            if value is not None:
                target.copy_(value)
        return made


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _run_operator(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)


class _ByPlace(TorchFunctionMode):
    """A torch mode in which each call of a function with dropout draws from a stream of random numbers of its own, as
    in the programs of plans. Streams are numbered in the order of calls. ``seed``: seed of the streams. ``group``:
    index of the group of samples on which the model runs; random numbers differ by group."""

    def __init__(self, seed: int, group: int) -> None:
        super().__init__()
        self.seed, self.group = seed, group
        self.streams = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replacement = _DROPPING.get(getattr(func, "__name__", ""))
        bound = _bind_arguments(replacement, args, kwargs) if replacement is not None else None
        if replacement is not None and bound is not None:
            return replacement(self, **bound)
        if getattr(func, "__name__", "") in _RECURRENT and len(args) == 9 and RecurrentLayers(*args[3:]).has_dropout:
            x, state, weights, *layers = args
            return self.recurrent(func, x, state, weights, RecurrentLayers(*layers))
        if getattr(func, "__module__", "") == nn.functional.__name__:
            with self.inside():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Return a context manager within which the functions with dropout in ``torch.nn.functional`` are replaced by
        the functions of this mode. It is needed while another function of that module runs: PyTorch reports only the
        outer call to modes, and not the calls of dropout inside it."""
        known = {name: getattr(nn.functional, name) for name in _DROPPING if hasattr(nn.functional, name)}

        def shown(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                return self.__torch_function__(known[name], (), args, kwargs)

            return call

        try:
            for name in known:
                setattr(nn.functional, name, shown(name))
            yield
        finally:
            for name, function in known.items():
                setattr(nn.functional, name, function)

    def recurrent(
        self,
        func: Callable[..., Any],
        x: Tensor,
        state: Any,
        weights: Sequence[Tensor],
        stack: RecurrentLayers,
    ) -> tuple[Tensor, ...]:
        """Run recurrent layers one by one, with dropout on the output of each layer before the next reads it, and
        return the outputs and final states as PyTorch does.

        ``func``: PyTorch's function for the stack of layers. ``x``: the input sequence. ``state``: the initial hidden
        state, or a pair of states. ``weights``: the weights of all layers. ``stack``: the number of layers and their
        options.
        """
        each, ways = len(weights) // stack.layers, stack.num_directions
        several = not isinstance(state, Tensor)
        last: list[tuple[Tensor, ...]] = []
        for layer in range(stack.layers):
            if layer:
                x = self.drop(x, stack.p)
            first = [s[layer * ways : (layer + 1) * ways] for s in (state if several else [state])]
            own = weights[layer * each : (layer + 1) * each]
            x, *ends = func(x, first if several else first[0], own, *stack.single_layer)
            last.append(tuple(ends))
        return x, *(torch.cat(ends) for ends in zip(*last, strict=True))

    def next(self) -> int:
        """Return the number of a new stream of random numbers, for the next operator that draws random numbers. Numbers
        count up.
        """
        self.streams += 1
        return self.streams - 1

    def numbers(self, device: torch.device) -> Callable[..., Tensor]:
        """Return a function ``draw(distribution, sizes, *parameters)`` that returns a tensor of random numbers on
        ``device``. Each call of it uses a new stream of random numbers."""

        def draw(distribution: torch._ops.OpOverload, sizes: Sequence[int], *parameters: Tensor) -> Tensor:
            return draw_whole_tensor(
                distribution, tuple(sizes), device, [self.seed, self.next()], self.group, parameters
            )

        return draw

    def drop(self, x: Tensor, p: float) -> Tensor:
        return apply_dropout(x, p, self.seed, self.next(), self.group)

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        dropped = self.drop(input, p)
        return input.copy_(dropped) if inplace else dropped

    def dropout_(self, input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
        return self.dropout(input, p, training, inplace=True)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Return the result of ``scaled_dot_product_attention`` of ``query``, ``key`` and ``value``, where dropout
        draws from a random stream of its own. ``attn_mask``: boolean (true where a query sees a key) or numbers to add
        to the scores; ``None`` for none. ``dropout_p``: probability of zeroing a weight. ``is_causal``: a query sees
        only keys up to its own position. ``options``: the keyword arguments ``scale`` and ``enable_gqa``.
        """
        scale: float | None = options.get("scale")
        if options.get("enable_gqa", False):
            groups = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
        scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.transpose(-2, -1)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            masked = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + attn_mask
        return self.drop(scores.softmax(-1), dropout_p) @ value


_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
# Functions with dropout, by name -> the methods that replace them.
_DROPPING: dict[str, Callable[..., Tensor]] = {
    "dropout": _ByPlace.dropout,
    "dropout_": _ByPlace.dropout_,
    "scaled_dot_product_attention": _ByPlace.attention,
}


def _bind_arguments(replacement: Callable[..., Tensor], args: Any, kwargs: Any) -> dict[str, Any] | None:
    """Return the arguments of a call of a function with dropout, as a dict by parameter name. Return ``None`` if they
    switch dropout off (probability 0, or no training), so that PyTorch's own function can run. ``replacement``: the
    method that would replace PyTorch's function and has its parameter names. ``args``, ``kwargs``: arguments of the
    call.
    """
    names = list(inspect.signature(replacement).parameters)[1:]
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    if "train" in bound:
        bound["training"] = bound.pop("train")
    p = bound.get("dropout_p", 0.0) if "dropout_p" in names else bound.get("p", 0.5)
    return None if p == 0.0 or bound.get("training", True) is False else bound


@contextmanager
def keep_in_float64(dtype: torch.dtype = torch.float64) -> Iterator[None]:
    """Return a context manager within which float64 models compute in float64, although their code asks for float32.

    ``dtype``: the floating type in which the plan computes, to which the float64 results are compared. In the context
    ``torch.finfo`` gives the limits of this type, and numbers in the model's code are rounded to it, as in the plan.
    """
    default, finfo = torch.get_default_dtype(), torch.finfo

    def limits(asked: torch.dtype | None = None) -> torch.finfo:
        asked = default if asked is None else asked
        return finfo(dtype if asked == torch.float64 else asked)

    torch.set_default_dtype(torch.float64)
    try:
        with (
            _Float64(),
            _DoubleData(default, dtype),
            mock.patch.object(torch, "finfo", limits),
            trace_fused_quantizers(),
        ):
            yield
    finally:
        torch.set_default_dtype(default)


def run_reference(
    model: nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    loss: Callable[[Any], Tensor] | None = None,
    *,
    train: bool = True,
    double: bool = True,
    seed: int = 0,
    group: int = 0,
    buffers: Mapping[str, Tensor] | None = None,
    counters: Collection[str] = (),
    precision: str | None = None,
) -> Reference:
    """Run the unmodified ``model`` on ``inputs``, one whole global batch, and return what it computes. The gradients of
    ``model`` itself do not change.

    Args:
        loss: computes the loss from the model's result; ``None`` if the result contains it.
        train: whether to run a backward, too, for the gradient of every parameter.
        double: run a copy of the model in float64; otherwise run ``model`` as it is.
        seed: seed of the random operators. Each call of such an operator draws from its own stream, as in plans.
        group: if a batch is run as several groups of samples one after the other: index of the group that ``inputs``
            are. Random numbers differ by group. 0 for a whole batch.
        buffers: initial values of buffers, parameters and ``counters``; ``None``: the values in the model.
        counters: names of attributes that are Python numbers; they are returned among the buffers.
        precision: name of the dtype that the plan computes in, such as ``bf16``; ``None``: the dtype of the model's
            parameters. Even if the model runs in float64, ``torch.finfo`` gives the limits of this dtype, and numbers
            in the model's code are rounded to it, as in the plan.
    """
    if not isinstance(model, nn.Module):
        raise InputsError(
            f"the unmodified model is run as the reference; expected an nn.Module, got {type(model).__name__}"
        )
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, tuple | list | Mapping):
        raise InputsError(f"inputs must be a tuple or a dict, one whole global batch; got {type(inputs).__name__}")
    planned = PRECISIONS[precision] if precision is not None else _get_parameter_dtype(model)
    run = _ReferenceRun(model, inputs, loss, train, planned if double else None, seed, group, buffers or {}, counters)
    try:
        return run.with_gradients(train)
    except InputsError as error:  # forward itself may compute gradients although nothing is trained
        if train or "does not require grad" not in str(error.__cause__):
            raise
        return run.with_gradients(True)


@dataclass(frozen=True)
class _ReferenceRun:
    """The arguments of one run of the unmodified model.

    ``model``: the model. ``inputs``: one global batch. ``loss``: computes the loss from the result; ``None`` if the
    result contains it. ``train``: whether to run a backward. ``planned``: the floating type of the plan if the model
    runs in float64; ``None`` if the model runs in its own type. ``seed``: seed of random operators. ``group``: index of
    the group of samples in ``inputs``; random numbers differ by group. ``buffers``: initial values of buffers.
    ``counters``: names of attributes that are Python numbers and count as buffers.
    """

    model: nn.Module
    inputs: Any
    loss: Callable[[Any], Tensor] | None
    train: bool
    planned: torch.dtype | None
    seed: int
    group: int
    buffers: Mapping[str, Tensor]
    counters: Collection[str]

    def with_gradients(self, grad: bool) -> Reference:
        """Run a copy of the unmodified model once and return what it computes: outputs, loss, gradients, and buffers.
        ``grad``: whether autograd is on while it runs; without, there are no gradients."""
        model, double = _copy_model_by_value(self.model), self.planned is not None
        drop_looking_hooks(model)
        if double:
            aliases = find_state_aliases(model)
            model = model._apply(_build_tensor_doubler())
            for alias in aliases:
                alias.update()
        inputs = dict(self.inputs) if isinstance(self.inputs, Mapping) else self.inputs
        inputs = pytree.tree_map(functools.partial(_as_input, double=double), inputs)
        held = _list_model_tensors(model)
        with torch.no_grad():
            for name, value in self.buffers.items():
                if name in held:
                    held[name].copy_(value)
                else:
                    path, _, attribute = name.rpartition(".")
                    setattr(model.get_submodule(path), attribute, value.item())
        with (
            keep_in_float64(self.planned) if self.planned is not None else nullcontext(),
            _ByPlace(self.seed, self.group) as streams,
            _Drawing(streams),
            _nothing_recomputed(),
            _nothing_compiled(),
            skip_observing_hooks(),
            undo_hook_changes(self.model, []),
        ):
            return _run_copied_model(model, inputs, self.loss, self.train, grad, self.counters)


def _get_parameter_dtype(model: nn.Module) -> torch.dtype:
    """Return the floating type of the parameters of ``model``; float64 if the parameters have different types, or if
    there are none.
    """
    found = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return found.pop() if len(found) == 1 else torch.float64


def _copy_model_by_value(model: nn.Module) -> nn.Module:
    """Return a deep copy of ``model``. Tensors that its modules have computed and stored, such as a weight made of two
    parts, are replaced by copies without autograd graph, because PyTorch refuses to deep-copy tensors that have one."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        kept = [v for v in vars(module).values() if isinstance(v, Tensor) and not v.is_leaf]
        memo |= {id(value): value.detach().clone() for value in kept}
    return copy_model(model, memo)


@contextmanager
def _nothing_recomputed() -> Iterator[None]:
    """Return a context manager within which activation checkpointing is disabled. If the backward ran checkpointed
    functions a second time, they would draw other random numbers than in the forward."""

    def once(*_: Any, **__: Any) -> Iterator[None]:
        yield

    def apply(function: Callable[..., Any], keeps: bool, *args: Any) -> Any:
        return function(*args)

    with (
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", once),
        mock.patch.object(checkpoint.CheckpointFunction, "apply", apply),
    ):
        yield


def _nothing_compiled() -> AbstractContextManager[Any]:
    """Return a context manager within which functions that ``torch.compile`` wraps run without a compiler. A compiler
    would refuse the torch modes that a run of the reference uses."""
    wrapped = "torch._dynamo" in sys.modules  # not imported here: that takes seconds
    return torch.compiler.set_stance("force_eager") if wrapped else nullcontext()


def _build_tensor_doubler() -> Callable[[Tensor], Tensor]:
    """Return a function that converts a tensor to float64. For the same tensor object it always returns the same
    result, so that a tensor with several names stays a single tensor."""
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def double(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = tensor, _tensor_to_float64(tensor)
        return known[id(tensor)][1]

    return double


def _as_input(value: Any, double: bool) -> Any:
    """Return ``value``, an argument of the model, detached from the autograd graph that computed it. A tensor keeps
    ``requires_grad``. ``double``: whether tensors become float64.
    """
    if not isinstance(value, Tensor):
        return value
    made = value.detach()
    return (_tensor_to_float64(made) if double else made).requires_grad_(value.requires_grad)


def _tensor_to_float64(value: Any) -> Any:
    return value.to(replace_floating_dtype(value.dtype, torch.float64)) if isinstance(value, Tensor) else value


def _run_copied_model(
    model: nn.Module,
    inputs: Any,
    loss: Callable[[Any], Tensor] | None,
    train: bool,
    grad: bool,
    counters: Collection[str],
) -> Reference:
    """Run ``model`` once, with a backward if ``train`` is set and there is a loss, and return outputs, loss, gradients,
    and the parameters and buffers afterwards.

    ``inputs``: arguments of the model: one global batch. ``loss``: computes the loss from the model's result; ``None``
    if the result contains it. ``grad``: whether autograd is on. ``counters``: names of attributes that are Python
    numbers; they are returned among the buffers.
    """
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    model.zero_grad()
    before = {name: held.detach().clone() for name, held in _list_model_tensors(model).items()}
    with torch.set_grad_enabled(grad), _label_model_failures(model):
        output = model(*args, **kwargs)
        total = loss(output) if loss is not None else find_loss(output)
        if train and total is not None:
            total.backward()
    named = dict(model.named_parameters(remove_duplicate=False))
    grads = {
        name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in named.items() if p.requires_grad
    }
    grads = {name: grad.to_dense() if grad.is_sparse else grad for name, grad in grads.items()}
    found = {"": output} if isinstance(output, Tensor) else flatten_by_path(convert_to_containers(output))
    leaves = {path: v.detach() if isinstance(v, Tensor) else v for path, v in found.items()}
    after = {name: held.detach() for name, held in _list_model_tensors(model).items()}
    numbers = {name: get_number_attribute(model, name) for name in counters}
    after |= {name: number for name, number in numbers.items() if number is not None}
    changed = frozenset(name for name, held in after.items() if not _is_tensor_unchanged(held, before.get(name)))
    total = None if total is None else total.detach()
    return Reference(leaves, total, grads if train else {}, after, changed, frozenset(named))


def _list_model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of ``model`` by name; a tensor with several names has one entry for
    each name.
    """
    held = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return dict(held)


@contextmanager
def _label_model_failures(model: nn.Module) -> Iterator[None]:
    """Return a context manager within which the unmodified ``model`` runs. Exceptions that are raised in it are
    converted to :class:`InputsError`, whose message says that the model itself fails on the inputs, independently of
    any plan."""
    try:
        yield
    except PartitionError:
        raise
    except Exception as error:
        raise InputsError(
            f"{type(model).__name__} fails on these inputs, without a "
            f"plan{locate_error(error, excluded_file=__file__)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _is_tensor_unchanged(held: Tensor, before: Tensor | None) -> bool:
    """Return whether the buffer or parameter ``held`` equals ``before``, its earlier value; NaN equals NaN. False if
    ``before`` is ``None``, because there was no such tensor.
    """
    if before is None or before.shape != held.shape:
        return False
    return torch.allclose(held, before, rtol=0.0, atol=0.0, equal_nan=True)


def find_loss(output: Any) -> Tensor | None:
    """Return the loss in ``output``, a model's result: its attribute ``loss``, or else its only tensor. ``None`` if
    there is no such tensor, or if the tensor is not a scalar."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(output, Tensor) or not isinstance(found, Tensor):
        leaves = pytree.tree_leaves(convert_to_containers(output))
        found = leaves[0] if len(leaves) == 1 else None
    return found if isinstance(found, Tensor) and found.dim() == 0 and found.is_floating_point() else None
