"""Captured decoders that many rows share: few layers are traced, the others repeat the last, and files keep what was.

The layers of a decoder of ``published_models`` are alike but for the first ``dense_layers``, and ``fold`` says so: of
such a model more layers are more calls of the same block. So four are captured and the last one's call is repeated,
which gives the folded model that all of them would have given (``tests/test_captures.py`` compares the two).
"""

from __future__ import annotations

import hashlib
import io
import operator
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from published_models import Shape, build
from torch import fx

from partitioner import PreparedModel, prepare
from passes.blocks import FoldedModel
from runtime.files import write_bytes

_LAYERS = 4  # as many are alike before capture traces fewer than all
_KNOWN_AT_A_TIME = 8
_ROOT = Path(__file__).resolve().parents[1]
# What decides how a decoder is captured: its code, and every pass.
_SOURCES = ("passes/**/*.py", "partitioner/prepared.py", "benchmarks/published_models.py", "benchmarks/captures.py")
FILES = Path(tempfile.gettempdir()) / "partitioner-captures"


def prepared(shape: Shape, length: int, dtype: torch.dtype, global_batch: int, precision: str | None) -> PreparedModel:
    """The decoder of ``shape``, prepared and already captured at ``global_batch``."""
    few = replace(shape, layers=min(shape.layers, shape.dense_layers + _LAYERS))
    model, inputs = build(few, length, dtype)
    made = prepare(model, inputs, precision=precision)
    return made.captured_as(global_batch, with_layers(_captured(few, length, dtype, global_batch), shape.layers))


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


def with_layers(model: FoldedModel, layers: int) -> FoldedModel:
    """``model`` with as many calls of its last layer more as make ``layers``."""
    numbers = [int(call.path.split(".")[1]) for call in model.calls if call.path.startswith("layers.")]
    last = max(numbers)
    if layers == last + 1:
        return model
    assert layers > last, (layers, last)
    own = f"layers.{last}"
    body = [call for call in model.calls if call.path == own or call.path.startswith(own + ".")]
    start = model.calls.index(body[0])
    assert model.calls[start : start + len(body)] == body, "a layer's calls are not in a row"
    before = [name for name in body[0].inputs if name not in {i.value for i in model.inputs}]
    [entry] = before
    [leaving] = {
        n for c in model.calls[start + len(body) :] for n in c.inputs if n in {o for b in body for o in b.outputs}
    }

    def at(number: int) -> Callable[[str], str]:
        """What a name of the last layer, or of what it reads, is in layer ``number``."""

        def renamed(name: str) -> str:
            if name == entry and number > last:
                return at(number - 1)(leaving)
            return (
                f"layers.{number}" + name[len(own) :]
                if name == own or name.startswith((own + ".", own + ":"))
                else name
            )

        return renamed

    calls, states, values = model.calls[: start + len(body)], dict(model.states), dict(model.values)
    for number in range(last + 1, layers):
        name = at(number)
        for call in body:
            named = {k: tuple(map(name, getattr(call, k))) for k in ("states", "inputs", "outputs")}
            calls = [*calls, replace(call, path=name(call.path), **named)]
            states |= {name(s): replace(model.states[s], name=name(s)) for s in call.states}
            values |= {name(v): model.values[v] for v in call.outputs}
    for call in model.calls[start + len(body) :]:
        inputs = tuple(at(layers - 1)(leaving) if n == leaving else n for n in call.inputs)
        calls.append(replace(call, inputs=inputs))
    return model.with_(calls=calls, states=states, values=values)


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
