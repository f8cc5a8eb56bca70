"""One layer of a recurrent network, in one direction, as one operator.

``partition::lstm_layer`` is a layer of ``nn.LSTM``, ``partition::recurrent_layer`` one of ``nn.GRU`` or ``nn.RNN``.
Traces call these operators instead of torch's functions (:func:`trace_recurrent_networks`). In exported programs, the
normal form replaces torch's operators by them (``passes/normalize/decompose.py``). A graph with one operator for each
layer does not grow with the number of time steps. Forward calls torch's own function, which runs a single kernel on
devices that have one (cuDNN). Only the operands are saved for backward, which runs forward again and differentiates it.

The dim of the sequence comes first: inputs are ``[steps, batch, features]``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from partitioner.passes.errors import UnsupportedError
from partitioner.passes.ir.collectives import NAMESPACE, _library

LSTM = "lstm"
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    LSTM: torch.lstm,
    "gru": torch.gru,
    "rnn_tanh": torch.rnn_tanh,
    "rnn_relu": torch.rnn_relu,
}


def lstm_layer(x: Tensor, h: Tensor, c: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    """Compute one direction of an LSTM layer. Return its output ``[steps, batch, out]`` and the last cell state ``[1,
    batch, hidden]``.

    ``x`` ``[steps, batch, in]``: the input. ``h`` ``[1, batch, out]``, ``c`` ``[1, batch, hidden]``: initial output and
    cell state. ``how``: six further arguments. Five are tensors as in ``nn.LSTM``: weights of the gates for the input
    ``[4 hidden, in]`` and for the state ``[4 hidden, out]``; their biases ``[4 hidden]``, or ``None``; and the
    projection of the output ``[out, hidden]``, or ``None`` if there is none (``out`` then equals ``hidden``). The sixth
    is a boolean: whether the layer reads its input from the last step to the first. Step ``t`` of the output belongs to
    step ``t`` of the input in both cases.
    """
    *weights, reverse = how
    output, _, cell = _run_layer(LSTM, reverse, x, [h, c], weights)
    return output, cell


def recurrent_layer(
    x: Tensor,
    h: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    kind: str,
    reverse: bool,
) -> Tensor:
    """Compute one direction of a GRU or RNN layer. Return its output ``[steps, batch, hidden]``, whose last step (the
    first, if ``reverse`` is true) is the last state.

    ``x`` ``[steps, batch, in]``: the input. ``h`` ``[1, batch, hidden]``: the initial state. ``w_ih`` ``[gates, in]``,
    ``w_hh`` ``[gates, hidden]``, ``b_ih``, ``b_hh`` ``[gates]``: weights and biases as in ``nn.GRU`` and ``nn.RNN``;
    the biases are ``None`` if the layer has none. ``kind``: ``"gru"``, ``"rnn_tanh"`` or ``"rnn_relu"``. ``reverse``:
    whether the layer reads its input from the last step to the first.
    """
    output: Tensor = _run_layer(kind, reverse, x, [h], [w_ih, w_hh, b_ih, b_hh])[0]
    return output


def _run_layer(
    kind: str, reverse: bool, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Run one direction of a recurrent layer by torch's own function. Return its output ``[steps, batch, features]``
    and the last states.

    ``kind``: the name of torch's function, such as ``"lstm"``. ``reverse``: whether the layer reads ``x``, the input
    ``[steps, batch, features]``, from the last step to the first. ``states``: the initial states. ``weights``: weights
    and biases in torch's order, with ``None`` for those that the layer does not have.
    """
    given = [w for w in weights if w is not None]
    initial = list(states) if kind == LSTM else states[0]
    # biases, layers, dropout, training, both directions, batch first; nothing depends on `training` without dropout
    how = (weights[2] is not None, 1, 0.0, torch.is_grad_enabled(), False, False)
    output, *last = _FUNCTIONS[kind](x.flip(0) if reverse else x, initial, given, *how)
    return (output.flip(0) if reverse else output, *last)


def lstm_layer_backward(grad: Tensor | None, grad_cell: Tensor | None, *operands: Any) -> tuple[Tensor, ...]:
    """Return the gradients of the eight tensor operands of :func:`lstm_layer`; an empty tensor for each operand that
    the layer does not have.

    ``grad``, ``grad_cell``: the gradients of the layer's output and of its last cell state; ``None`` means zeros.
    ``operands``: the arguments of :func:`lstm_layer`, in order.
    """
    *tensors, reverse = operands
    return _differentiate(lambda *own: lstm_layer(*own, reverse), tensors, [grad, grad_cell])


def recurrent_layer_backward(grad: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    """Return the gradients of the six tensor operands of :func:`recurrent_layer`; an empty tensor for each operand that
    the layer does not have.

    ``grad``: the gradient of the layer's output. ``operands``: the arguments of :func:`recurrent_layer`, in order.
    """
    *tensors, kind, reverse = operands
    layer: Callable[..., Tensor] = recurrent_layer
    return _differentiate(lambda *own: (layer(*own, kind, reverse),), tensors, [grad])


def _differentiate(
    run: Callable[..., tuple[Tensor, ...]], operands: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Run one layer of a recurrent network and return the gradients of its operands, with an empty tensor for each
    operand that is ``None``.

    ``run``: computes the results of the layer from the operands. ``grads``: the gradients of the results; ``None``
    means zeros.
    """
    with torch.enable_grad():
        own = [None if x is None else x.detach().requires_grad_() for x in operands]
        results = run(*own)
        given = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
        outputs, of_outputs = zip(*given, strict=True)
        sought = [x for x in own if x is not None]
        found = iter(torch.autograd.grad(outputs, sought, of_outputs, materialize_grads=True))
    return _fill_missing(operands, [None if x is None else next(found) for x in operands])


def _fill_missing(operands: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return ``gradients`` in contiguous memory, with an empty tensor in place of each ``None``. ``operands``: the
    operands of the layer; the empty tensors get the dtype and device of the first."""
    assert operands[0] is not None
    empty = operands[0].new_empty(0)
    return tuple(empty.clone() if g is None else g.contiguous() for g in gradients)


def _make_lstm_results(x: Tensor, h: Tensor, c: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:2], h.shape[-1]), torch.empty_like(c, memory_format=torch.contiguous_format)


def _make_recurrent_result(x: Tensor, h: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:2], h.shape[-1])


def _make_lstm_gradients(grad: Tensor | None, grad_cell: Tensor | None, *operands: Any) -> tuple[Tensor, ...]:
    return _fill_missing(operands[:8], [None if x is None else x.new_empty(x.shape) for x in operands[:8]])


def _make_recurrent_gradients(grad: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    return _fill_missing(operands[:6], [None if x is None else x.new_empty(x.shape) for x in operands[:6]])


_LSTM_OPERANDS = (
    "Tensor x, Tensor h, Tensor c, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor? w_hr, bool reverse"
)
_RECURRENT_OPERANDS = "Tensor x, Tensor h, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, str kind, bool reverse"
_library.define(f"lstm_layer({_LSTM_OPERANDS}) -> (Tensor, Tensor)")
_library.define(
    f"lstm_layer_backward(Tensor? grad, Tensor? grad_cell, {_LSTM_OPERANDS}) -> ({', '.join(['Tensor'] * 8)})"
)
_library.define(f"recurrent_layer({_RECURRENT_OPERANDS}) -> Tensor")
_library.define(f"recurrent_layer_backward(Tensor grad, {_RECURRENT_OPERANDS}) -> ({', '.join(['Tensor'] * 6)})")
for _name, _run, _fake in (
    ("lstm_layer", lstm_layer, _make_lstm_results),
    ("lstm_layer_backward", lstm_layer_backward, _make_lstm_gradients),
    ("recurrent_layer", recurrent_layer, _make_recurrent_result),
    ("recurrent_layer_backward", recurrent_layer_backward, _make_recurrent_gradients),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _run, _device)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)
recurrent_ops = torch.ops.partition


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.set_materialize_grads(False)
    ctx.given = [isinstance(x, Tensor) for x in inputs]
    ctx.kept = [None if isinstance(x, Tensor) else x for x in inputs]


def _compute_gradients(ctx: Any, backward: Callable[..., tuple[Tensor, ...]], *grads: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of all arguments of one layer of a recurrent network, with ``None`` for arguments that need
    no gradient. ``ctx``: the autograd context in which forward saved the arguments. ``backward``: the operator that
    computes the gradients. ``grads``: the gradients of the layer's results."""
    saved = iter(ctx.saved_tensors)
    operands = [next(saved) if given else kept for given, kept in zip(ctx.given, ctx.kept, strict=True)]
    found = () if all(grad is None for grad in grads) else backward(*grads, *operands)
    needed = [g if need else None for g, need in zip(found, ctx.needs_input_grad, strict=False)]
    return *needed, *(None,) * (len(operands) - len(needed))


def _compute_lstm_gradients(ctx: Any, grad: Tensor | None, grad_cell: Tensor | None) -> tuple[Any, ...]:
    return _compute_gradients(ctx, recurrent_ops.lstm_layer_backward, grad, grad_cell)


def _compute_recurrent_gradients(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    return _compute_gradients(ctx, recurrent_ops.recurrent_layer_backward, grad)


for _name, _gradients in (("lstm_layer", _compute_lstm_gradients), ("recurrent_layer", _compute_recurrent_gradients)):
    torch.library.register_autograd(f"{NAMESPACE}::{_name}", _gradients, setup_context=_save_operands, lib=_library)


class RecurrentLayers(NamedTuple):
    """The arguments of torch's recurrent functions (such as ``torch.lstm``) that follow the input, the initial state
    and the weights, in the order of the function.

    ``biased``: whether there are biases among the weights. ``layers``: the number of layers. ``p``: the probability of
    zeroing an element between layers (dropout). ``train``: whether dropout is on. ``both_ways``: whether each layer
    also reads its input from the end to the start. ``batch_first``: whether the batch is dim 0 of the input, instead of
    dim 1.
    """

    biased: bool
    layers: int
    p: float
    train: bool
    both_ways: bool
    batch_first: bool

    @property
    def has_dropout(self) -> bool:
        """Return whether the recurrent network applies dropout between its layers."""
        return bool(self.p) and self.train and self.layers > 1

    @property
    def num_directions(self) -> int:
        """Return the number of directions in which a layer of the recurrent network reads its input: 1 or 2."""
        return 2 if self.both_ways else 1

    @property
    def single_layer(self) -> RecurrentLayers:
        """Return a copy of these arguments for a recurrent network with a single layer, without dropout."""
        return self._replace(layers=1, p=0.0)


def call_recurrent_layers(
    call: Callable[..., Any], kind: str, x: Any, state: Any, weights: Sequence[Any], stack: RecurrentLayers, steps: int
) -> tuple[Any, ...]:
    """Compute a recurrent network by one operator for each layer and direction, with dropout operators between the
    layers. Return the output of the last layer, and the final state of all layers (two values for an LSTM). Inputs and
    results are tensors, or nodes of a graph to which ``call`` appends operators.

    ``call(operator, *arguments)``: calls the operator, or appends it to a graph. ``kind``: the name of torch's
    function, such as ``"lstm"``. ``x``: the input, of ``steps`` time steps. ``state``: the initial state of all layers;
    a list of two values for an LSTM. ``weights``: the weights and biases of all layers, in order. ``stack``: the
    further arguments of torch's function.
    """
    aten = torch.ops.aten
    states = list(state) if isinstance(state, list | tuple) else [state]
    each = len(weights) // (stack.layers * stack.num_directions)
    last: list[list[Any]] = []

    def swap(x: Any) -> Any:  # the layers read [steps, batch, features]
        return call(aten.transpose.int, x, 0, 1) if stack.batch_first else x

    x = swap(x)
    for layer in range(stack.layers):
        if layer and stack.has_dropout:
            x = swap(call(aten.dropout.default, swap(x), stack.p, True))
        outputs = []
        for way in range(stack.num_directions):
            place = layer * stack.num_directions + way
            first = [call(aten.slice.Tensor, s, 0, place, place + 1) for s in states]
            own = _name_weights(weights[place * each : (place + 1) * each], stack.biased)
            output, *ends = _call_layer(call, kind, x, first, own, reverse=way == 1)
            at = 0 if way == 1 else steps - 1
            outputs.append(output)
            last.append([call(aten.slice.Tensor, output, 0, at, at + 1), *ends])
        x = call(aten.cat.default, outputs, 2) if len(outputs) > 1 else outputs[0]
    return swap(x), *(call(aten.cat.default, list(ends)) for ends in zip(*last, strict=True))


def _name_weights(weights: Sequence[Any], biased: bool) -> tuple[Any, ...]:
    """Return a tuple of the five weights of one direction of a recurrent layer: the weight of the input, the weight of
    the state, the bias of each, and the projection of an LSTM's output. Missing ones are ``None``. ``weights``: the
    existing weights, in this order. ``biased``: whether ``weights`` has the two biases."""
    products, rest = weights[:2], list(weights[2:])
    biases = [rest.pop(0), rest.pop(0)] if biased else [None, None]
    return *products, *biases, rest[0] if rest else None


def _call_layer(
    call: Callable[..., Any], kind: str, x: Any, states: list[Any], weights: tuple[Any, ...], reverse: bool
) -> list[Any]:
    """Call the operator of one direction of a recurrent layer. Return a list of its output, and for an LSTM also of its
    last cell state.

    ``call(operator, *arguments)``: calls the operator and returns tensors, or appends it to a graph and returns nodes.
    ``kind``: the name of torch's function, such as ``"lstm"``. ``x``: the input ``[steps, batch, features]``.
    ``states``: the initial states. ``weights``: weights of the input and of the state, their biases, and the projection
    of an LSTM's output; ``None`` for missing ones. ``reverse``: whether the layer reads its input from the last step to
    the first.
    """
    if kind == LSTM:
        made = call(recurrent_ops.lstm_layer.default, x, *states, *weights, reverse)
        return [call(operator.getitem, made, 0), call(operator.getitem, made, 1)]
    return [call(recurrent_ops.recurrent_layer.default, x, *states, *weights[:4], kind, reverse)]


@contextmanager
def trace_recurrent_networks(line_now: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Return a context for tracing forward, in which recurrent networks are computed by one operator for each layer and
    direction. Without it, tracing would decompose torch's functions into operators for each time step.

    Inside it, :class:`UnsupportedError` is raised if forward packs sequences. ``line_now`` returns the current source
    line of the model, for error messages. In a region of ``torch.autocast``, torch's own functions are called, because
    they do the casts.
    """

    def refuse_packing(*_: Any) -> Any:
        raise UnsupportedError(
            f"forward packs sequences{line_now()}; expected padded ones, since the lengths of packed sequences are not "
            "fixed in a plan: leave pack_padded_sequence out, and mask outputs and losses behind the end of each sample"
        )

    with ExitStack() as stack:
        for owner in (torch, torch._VF):
            stack.enter_context(mock.patch.object(owner, "_pack_padded_sequence", refuse_packing))
            for kind in _FUNCTIONS:
                stack.enter_context(mock.patch.object(owner, kind, _make_traced_function(kind)))
        yield


def _make_traced_function(kind: str) -> Callable[..., Any]:
    """Return a function to use in place of torch's recurrent function ``kind``, such as ``"lstm"``, in a trace. It
    calls one operator for each layer and direction."""

    def run(x: Tensor, *given: Any, **named: Any) -> Any:
        autocast = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
        packed = named or len(given) != 2 + len(RecurrentLayers._fields) or isinstance(given[1], Tensor)
        if autocast or packed:
            return _FUNCTIONS[kind](x, *given, **named)
        state, weights, *how = given
        layers = RecurrentLayers(*how)
        steps = x.shape[1 if layers.batch_first else 0]
        return call_recurrent_layers(lambda target, *own: target(*own), kind, x, state, weights, layers, steps)

    return run
