"""One layer of a recurrent network, in one direction, as one operator.

``partition::lstm_layer`` is a layer of ``nn.LSTM``, ``partition::recurrent_layer`` one of ``nn.GRU`` or ``nn.RNN``. The
normal form replaces torch's operators by them (``passes/normalize/decompose.py``). A graph with one operator for each
layer does not grow with the number of time steps. Forward calls torch's own function, which is one kernel where a
device has one (cuDNN). Nothing but the operands is kept for backward, which runs forward a second time and
differentiates it.

The sequence comes first: inputs are ``[steps, batch, features]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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
    ``[4 hidden, in]`` and for the state ``[4 hidden, out]``; their biases ``[4 hidden]``, ``None`` for a layer without;
    and the projection of the output ``[out, hidden]``, ``None`` for a layer without, where ``out`` equals ``hidden``.
    The last says whether the layer reads its input from the last step to the first; step ``t`` of the output then
    belongs to step ``t`` of the input.
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
    the biases are ``None`` for a layer without. ``kind``: ``"gru"``, ``"rnn_tanh"`` or ``"rnn_relu"``. ``reverse``:
    whether the layer reads its input from the last step to the first.
    """
    output: Tensor = _run_layer(kind, reverse, x, [h], [w_ih, w_hh, b_ih, b_hh])[0]
    return output


def _run_layer(
    kind: str, reverse: bool, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Run one layer by torch's own function and return what it returns: the output, and the last states.

    ``kind``: the name of torch's function. ``states``: the initial states. ``weights``: weights and biases in torch's
    order, with ``None`` for those that the layer does not have. ``x``, ``reverse``: as in :func:`lstm_layer`.
    """
    given = [w for w in weights if w is not None]
    initial = list(states) if kind == LSTM else states[0]
    # biases, layers, dropout, training, both directions, batch first; nothing depends on `training` without dropout
    how = (weights[2] is not None, 1, 0.0, torch.is_grad_enabled(), False, False)
    output, *last = _FUNCTIONS[kind](x.flip(0) if reverse else x, initial, given, *how)
    return (output.flip(0) if reverse else output, *last)


def lstm_layer_backward(grad: Tensor | None, grad_cell: Tensor | None, *operands: Any) -> tuple[Tensor, ...]:
    """Return the gradients of the eight tensor operands of :func:`lstm_layer`; an empty tensor for each that the layer
    does not have.

    ``grad``, ``grad_cell``: the gradients of its output and of its last cell state; ``None`` for zeros. ``operands``:
    its arguments.
    """
    *tensors, reverse = operands
    return _differentiate(lambda *own: lstm_layer(*own, reverse), tensors, [grad, grad_cell])


def recurrent_layer_backward(grad: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    """Return the gradients of the six tensor operands of :func:`recurrent_layer`; an empty tensor for each that the
    layer does not have.

    ``grad``: the gradient of its output. ``operands``: its arguments.
    """
    *tensors, kind, reverse = operands
    layer: Callable[..., Tensor] = recurrent_layer
    return _differentiate(lambda *own: (layer(*own, kind, reverse),), tensors, [grad])


def _differentiate(
    run: Callable[..., tuple[Tensor, ...]], operands: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Run a layer and return the gradients of its operands, an empty tensor for each that is ``None``.

    ``run``: computes the results of the layer from the operands. ``grads``: the gradients of the results, ``None`` for
    zeros.
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
    operands of the layer, whose first is a tensor."""
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
    """Return the gradients of all arguments of a layer, ``None`` for those that need none. ``backward``: the operator
    that computes them. ``grads``: the gradients of the results."""
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
