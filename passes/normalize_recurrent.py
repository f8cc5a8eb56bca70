"""Recurrent nets that drop out between their layers, taken layer by layer: torch's own parts leave the dropout out."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from passes.rewrite import KEEP, Builder, Rule, aten


def layer_by_layer(
    build: Builder,
    x: fx.Node,
    state: Any,
    weights: list[fx.Node],
    biased: bool,
    layers: int,
    p: float,
    train: bool,
    both_ways: bool,
    batch_first: bool,
) -> Any:
    """What one layer gives, dropped out, is the next one's input; the last states of all layers are joined."""
    if not p or not train or layers == 1:
        return KEEP
    assert build.node is not None
    each, ways = len(weights) // layers, 2 if both_ways else 1
    several = isinstance(state, list | tuple)
    states = list(state) if several else [state]
    last: list[list[fx.Node]] = []
    for layer in range(layers):
        x = build(aten.dropout.default, x, p, True) if layer else x
        first = [build(aten.slice.Tensor, s, 0, layer * ways, (layer + 1) * ways) for s in states]
        own = weights[layer * each : (layer + 1) * each]
        given = first if several else first[0]
        made = build(build.node.target, x, given, own, biased, 1, 0.0, True, both_ways, batch_first)
        x, *ends = (build(operator.getitem, made, i) for i in range(1 + len(first)))
        last.append(ends)
    return x, *(build(aten.cat.default, list(ends)) for ends in zip(*last, strict=True))


RECURRENT: dict[Any, Rule] = dict.fromkeys(
    (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input), layer_by_layer
)
