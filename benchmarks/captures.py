"""Captured decoders that many rows share: few layers are traced, the others repeat the last, and files keep what was.

The layers of a decoder of ``published_models`` are alike but for the first ``dense_layers`` and, where only some of the
others have experts, in turns; ``fold`` says so: of such a model more layers are more calls of the same blocks. So four
of a kind are captured and the last ones' calls are repeated, which gives the folded model that all of them would have
given (``tests/integration/test_captures.py`` compares the two).
"""

from __future__ import annotations

import hashlib
import io
import operator
import pickle
import tempfile
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from published_models import Shape, build
from torch import fx

from partitioner import PreparedModel, prepare
from partitioner.passes.ir.model import FoldedModel
from partitioner.runtime.files import write_bytes

_LAYERS = 4  # as many are alike before capture traces fewer than all
_KNOWN_AT_A_TIME = 8
_ROOT = Path(__file__).resolve().parents[1]
# What decides how a decoder is captured: its code, and every pass.
_SOURCES = (
    "passes/**/*.py",
    "partitioner/solve/evaluate/prepared_model.py",
    "benchmarks/published_models.py",
    "benchmarks/captures.py",
)
FILES = Path(tempfile.gettempdir()) / "partitioner-captures"


def prepared(shape: Shape, length: int, dtype: torch.dtype, global_batch: int, precision: str | None) -> PreparedModel:
    """The decoder of ``shape``, prepared and already captured at ``global_batch``."""
    some = (shape.layers - shape.dense_layers) % shape.expert_every  # so that the last ones are those of the whole
    few = replace(shape, layers=min(shape.layers, shape.dense_layers + _LAYERS * shape.expert_every + some))
    model, inputs = build(few, length, dtype)
    made = prepare(model, inputs, precision=precision)
    return made.captured_as(global_batch, with_layers(_captured(few, length, dtype, global_batch), shape))


@lru_cache(maxsize=_KNOWN_AT_A_TIME)
def _captured(shape: Shape, length: int, dtype: torch.dtype, global_batch: int) -> FoldedModel:
    """From a file of an earlier run if there is one."""
    key = hashlib.sha256(repr((shape, length, dtype, global_batch, _version())).encode()).hexdigest()
    path = FILES / key[:32]
    if path.exists():
        loaded: FoldedModel = pickle.loads(path.read_bytes())
        return loaded
    folded = prepare(*build(shape, length, dtype)).at(global_batch)[0]
    buffer = io.BytesIO()
    _Pickler(buffer).dump(folded)
    write_bytes(path, buffer.getvalue())
    return folded


@cache
def _version() -> str:
    """Changes with the code that captures."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(p for pattern in _SOURCES for p in _ROOT.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def with_layers(model: FoldedModel, shape: Shape) -> FoldedModel:
    """``model``, of the first layers of ``shape``, with as many calls like its last ones' more as there are layers."""
    of_call = [int(c.path.split(".")[1]) if c.path.startswith("layers.") else None for c in model.calls]
    last = max(n for n in of_call if n is not None)
    if shape.layers == last + 1:
        return model
    assert shape.layers > last, (shape, last)
    calls, states, values = list(model.calls), dict(model.states), dict(model.values)
    end = max(i for i, n in enumerate(of_call) if n is not None) + 1
    calls, rest = calls[:end], calls[end:]
    [leaving] = _passed(model, last)
    for number in range(last + 1, shape.layers):
        like = number - shape.expert_every * -(-(number - last) // shape.expert_every)  # a layer of the last turn
        old, new = f"layers.{like}", f"layers.{number}"
        [entry] = _passed(model, like - 1)

        def name(text: str, old: str = old, new: str = new, entry: str = entry, number: int = number) -> str:
            if text == entry:
                return leaving.replace(f"layers.{last}", f"layers.{number - 1}", 1)
            return new + text[len(old) :] if text == old or text.startswith((old + ".", old + ":")) else text

        for call, of in zip(model.calls, of_call, strict=True):
            if of == like:
                named = {k: tuple(map(name, getattr(call, k))) for k in ("states", "inputs", "outputs")}
                calls.append(replace(call, path=name(call.path), **named))
                states |= {name(s): replace(model.states[s], name=name(s)) for s in call.states}
                values |= {name(v): model.values[v] for v in call.outputs}
    final = leaving.replace(f"layers.{last}", f"layers.{shape.layers - 1}", 1)
    calls += [replace(c, inputs=tuple(final if n == leaving else n for n in c.inputs)) for c in rest]
    return model.with_(calls=calls, states=states, values=values)


def _passed(model: FoldedModel, layer: int) -> set[str]:
    """The values that a layer's calls make and later calls read."""
    own = [i for i, c in enumerate(model.calls) if c.path == f"layers.{layer}" or c.path.startswith(f"layers.{layer}.")]
    made = {value for i in own for value in model.calls[i].outputs}
    return made & {value for call in model.calls[own[-1] + 1 :] for value in call.inputs}


# --- graphs in files --------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Writes graphs as lists of nodes that name each other by place, and operators by name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, fx.Graph):
            return _graph, (_lines(value),), [dict(n.meta) for n in value.nodes], None, None, _set_meta
        if isinstance(value, torch._ops.OpOverload):
            return _operator, (value.namespace, value._opname, value._overloadname)
        return NotImplemented


class _Place(int):
    """A node, by its place in its graph."""


def _lines(graph: fx.Graph) -> list[tuple[Any, ...]]:
    place = {node: _Place(i) for i, node in enumerate(graph.nodes)}

    def encoded(argument: Any) -> Any:
        return fx.map_arg(argument, place.__getitem__)

    return [(n.op, n.target, encoded(n.args), encoded(n.kwargs), n.name) for n in graph.nodes]


def _graph(lines: list[tuple[Any, ...]]) -> fx.Graph:
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def decoded(argument: Any) -> Any:
        if isinstance(argument, _Place):
            return nodes[argument]
        if isinstance(argument, tuple | list):
            return type(argument)(map(decoded, argument))
        return {k: decoded(v) for k, v in argument.items()} if isinstance(argument, dict) else argument

    for op, target, args, kwargs, name in lines:
        nodes.append(graph.create_node(op, target, decoded(args), decoded(kwargs), name=name))
    return graph


def _set_meta(graph: fx.Graph, metas: list[dict[str, Any]]) -> None:
    for node, meta in zip(graph.nodes, metas, strict=True):
        node.meta = meta


def _operator(namespace: str, name: str, overload: str) -> Any:
    return operator.attrgetter(f"{namespace}.{name}.{overload}")(torch.ops)
