"""Derivatives of blocks that the ranks of a machine share: one rank traces a block, the others read what it found.

The ranks of a stage run the same functions, and stages of equal layers do. On a machine with fewer cores than ranks,
tracing them in each rank is most of what a short run takes.
"""

from __future__ import annotations

import fcntl
import hashlib
import pickle
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from passes.blocks import TensorSpec
from passes.differentiate import Differentiated, Piece
from passes.serialize import target_of
from runtime.files import write_bytes

_KEPT = ("path", "source")


class SharedDerivatives:
    """A folder in which ranks of one run and one machine find each other's derivatives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: tuple[Any, ...], make: Callable[[], Differentiated]) -> Differentiated:
        """What the first rank that came for ``key`` has made; those that come meanwhile wait for it.

        One that fails, or is killed, leaves its turn to the next.
        """
        path = self.folder / hashlib.sha256(repr(key).encode()).hexdigest()
        with path.with_suffix(".lock").open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)  # until it is closed, however this process ends
            if path.exists():
                return _from_data(pickle.loads(path.read_bytes()))
            made = make()
            write_bytes(path, pickle.dumps(_to_data(made)), durable=False)
            return made


def _to_data(made: Differentiated) -> dict[str, Any]:
    values = {f.name: getattr(made, f.name) for f in fields(made)}
    pieces = {n: (list(_nodes(v.graph)), v.inputs, v.outputs) for n, v in values.items() if isinstance(v, Piece)}
    return {"pieces": pieces, "values": {n: v for n, v in values.items() if n not in pieces}}


def _from_data(data: dict[str, Any]) -> Differentiated:
    pieces: dict[str, Any] = {name: Piece(_graph(nodes), *named) for name, (nodes, *named) in data["pieces"].items()}
    return Differentiated(**pieces, **data["values"])


class _Node(str):
    """The name of a node, among a node's arguments."""


def _nodes(graph: fx.Graph) -> Iterator[tuple[Any, ...]]:
    """Each node's kind, name, operator, arguments, tensor and place."""
    for node in graph.nodes:
        target = node.target
        operator = str(target) if isinstance(target, torch._ops.OpOverload) else target
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _Node(n.name))
        value = node.meta.get("val")
        spec = TensorSpec.of(value) if isinstance(value, Tensor) else None
        yield node.op, node.name, operator, args, kwargs, spec, {k: node.meta[k] for k in _KEPT if k in node.meta}


def _graph(nodes: list[tuple[Any, ...]]) -> fx.Graph:
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    for op, name, operator, args, kwargs, spec, place in nodes:
        target = target_of(operator) if op == "call_function" and isinstance(operator, str) else operator
        args, kwargs = fx.node.map_aggregate((args, kwargs), lambda a: made[a] if isinstance(a, _Node) else a)
        node = made[name] = graph.create_node(op, target, args, kwargs, name=name)
        assert node.name == name, f"{node.name} is not {name}"
        node.meta.update(place)
        if spec is not None:
            node.meta["val"] = spec.meta()
    return graph
