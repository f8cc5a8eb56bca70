"""Small programs made by hand, with the module that each of them computes: the judge of the runtime's
tests.

``Net``: ``x -> first -> residual layers -> head``, a squared error over the targets that count (``weight`` 1). With
``tied``, first and head share one square matrix. :func:`program_of_net` cuts it over any ``pp``, ``dp``, ``tp`` and
number of microbatches, with a GPipe-like schedule.
"""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from partitioner.passes.ir.collectives import ops
from partitioner.passes.ir.interpret import insert_operator_node
from partitioner.passes.ir.model import Block
from partitioner.passes.ir.serialize import block_to_data
from partitioner.runtime.program.buckets import Bucket
from partitioner.runtime.program.instructions import Instruction
from partitioner.runtime.program.program import (
    BlockGraph,
    CallData,
    InputData,
    OutputData,
    Program,
    Stage,
    StateData,
    Value,
    hash_weights,
)

aten = torch.ops.aten
DIM, INNER, BATCH = 8, 16, 8
_DRAWING = threading.Lock()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, INNER)
        self.down = nn.Linear(INNER, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, num_layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        with _DRAWING:  # ranks that are threads have one generator
            torch.manual_seed(0)
            self.first = nn.Linear(DIM, DIM, bias=False)
            self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
            self.head = nn.Linear(DIM, DIM, bias=False)
        if tied:
            self.head.weight = self.first.weight

    def forward(self, x: Tensor, target: Tensor, weight: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        prediction = self.head(x)
        loss = ((prediction - target) ** 2 * weight[:, None]).sum() / weight.sum()
        return {"loss": loss, "prediction": prediction}


def net_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(BATCH, DIM, generator=generator) for _ in range(2))
    weight = (torch.arange(BATCH) % 3 != 0).to(torch.float32)
    return {"x": x, "target": target, "weight": weight}


class _Graph:
    """A block under construction."""

    def __init__(self, path: str) -> None:
        self.graph = fx.Graph()
        self.path = path
        self.states: list[str] = []
        self.inputs: list[str] = []

    def placeholder(self, name: str, *shape: int) -> fx.Node:
        node = self.graph.create_node("placeholder", name, name=name)
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    def state(self, name: str, *shape: int) -> fx.Node:
        self.states.append(name)
        return self.placeholder(name, *shape)

    def input(self, name: str, *shape: int) -> fx.Node:
        self.inputs.append(name)
        return self.placeholder(name, *shape)

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        node = insert_operator_node(self.graph, target, args)
        node.meta.update(path=self.path, source=f"net.py:{len(self.graph.nodes)}")
        return node

    def data(self, *outputs: fx.Node) -> BlockGraph:
        self.graph.output(outputs)
        block = Block(self.path, self.graph, tuple(self.states), tuple(self.inputs))
        return BlockGraph(nodes=block_to_data(block), states=block.states, inputs=block.inputs)


def _linear_block(batch: int) -> BlockGraph:
    g = _Graph("first")
    weight, x = g.state("weight", DIM, DIM), g.input("x", batch, DIM)
    return g.data(g(aten.linear.default, x, weight))


def _layer_block(batch: int, tp: int) -> BlockGraph:
    g = _Graph("layer")
    up, bias = g.state("up", INNER // tp, DIM), g.state("bias", INNER // tp)
    down, x = g.state("down", DIM, INNER // tp), g.input("x", batch, DIM)
    inner = g(ops.copy.default, x, "tp", tp) if tp > 1 else x
    inner = g(aten.gelu.default, g(aten.add.Tensor, g(aten.linear.default, inner, up), bias))
    out = g(aten.linear.default, inner, down)
    if tp > 1:
        out = g(ops.all_reduce.default, out, "tp", tp, "copy")
    return g.data(g(aten.add.Tensor, x, out))


def _head_block(batch: int) -> BlockGraph:
    g = _Graph("head")
    head, x, target = g.state("head", DIM, DIM), g.input("x", batch, DIM), g.input("target", batch, DIM)
    weight, count = g.input("weight", batch), g.input("count")
    prediction = g(aten.linear.default, x, head)
    error = g(aten.pow.Tensor_Scalar, g(aten.sub.Tensor, prediction, target), 2)
    total = g(aten.sum.default, g(aten.mul.Tensor, error, g(aten.unsqueeze.default, weight, 1)))
    return g.data(g(aten.div.Tensor, total, count), prediction)


def _count_block(batch: int) -> BlockGraph:
    g = _Graph("count")
    return g.data(g(aten.sum.default, g.input("weight", batch)))


def program_of_net(
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    num_microbatches: int = 1,
    num_layers: int = 2,
    tied: bool = False,
    checkpoint: bool = False,
    halves: bool = False,
) -> Program:
    """``Net`` over ``pp * dp * tp`` ranks; ``halves``: backward in two parts, weights last."""
    local = BATCH // (dp * num_microbatches)
    activations = ["h0", *(f"h{i + 1}" for i in range(num_layers))]
    head = "first.weight" if tied else "head.weight"
    layers = [
        CallData(
            block="layer",
            path=f"layers.{i}",
            states=(f"layers.{i}.up.weight", f"layers.{i}.up.bias", f"layers.{i}.down.weight"),
            inputs=(activations[i],),
            outputs=(activations[i + 1],),
        )
        for i in range(num_layers)
    ]
    last = ("loss", "prediction")
    calls = [
        CallData(block="first", path="first", states=("first.weight",), inputs=("x",), outputs=("h0",)),
        *layers,
        CallData(
            block="head",
            path="head",
            states=(head,),
            inputs=(activations[-1], "target", "weight", "count"),
            outputs=last,
        ),
    ]
    cut = [round(i * len(calls) / pp) for i in range(pp + 1)]
    parts = [calls[a:b] for a, b in pairwise(cut)]
    count = CallData(block="count", path="count", inputs=("weight",), outputs=("count",), prologue=True)
    parts[-1] = [count, *parts[-1]]
    states = _states(num_layers, tied, tp, parts)
    stages = tuple(_stage(s, parts, states, num_microbatches, dp, checkpoint, halves) for s in range(pp))
    vector = ("x", "target", *activations, "prediction")
    values = {v: Value(shape=(local, DIM), dtype="float32", requires_grad=v in activations) for v in vector}
    values["weight"] = Value(shape=(local,), dtype="float32")
    values["count"] = Value(shape=(), dtype="float32")
    values["loss"] = Value(shape=(), dtype="float32", requires_grad=True)
    shapes = {"x": (BATCH, DIM), "target": (BATCH, DIM), "weight": (BATCH,)}
    return Program(
        mesh={"pp": pp, "dp": dp, "cp": 1, "tp": tp, "ep": 1},
        objective="train",
        num_microbatches=num_microbatches,
        schedule="gpipe",
        blocks={
            "first": _linear_block(local),
            "layer": _layer_block(local, tp),
            "head": _head_block(local),
            "count": _count_block(local),
        },
        states=states,
        values=values,
        inputs=tuple(InputData(value=v, path=v, shape=s, dtype="float32") for v, s in shapes.items()),
        outputs=(
            OutputData(path="loss", value="loss", batch="P", stage=pp - 1),
            OutputData(path="prediction", value="prediction", batch="S0", stage=pp - 1),
        ),
        loss="loss",
        stages=stages,
        fingerprint=hash_weights(states),
    )


def _states(num_layers: int, tied: bool, tp: int, parts: list[list[CallData]]) -> dict[str, StateData]:
    shapes: dict[str, tuple[tuple[int, ...], str]] = {"first.weight": ((DIM, DIM), "R")}
    for i in range(num_layers):
        shapes[f"layers.{i}.up.weight"] = ((INNER, DIM), "S0" if tp > 1 else "R")
        shapes[f"layers.{i}.up.bias"] = ((INNER,), "S0" if tp > 1 else "R")
        shapes[f"layers.{i}.down.weight"] = ((DIM, INNER), "S1" if tp > 1 else "R")
    if not tied:
        shapes["head.weight"] = ((DIM, DIM), "R")
    return {
        name: StateData(
            shape=shape,
            dtype="float32",
            kind="parameter",
            requires_grad=True,
            aliases=("head.weight",) if tied and name == "first.weight" else (),
            layout=layout,
            stages=tuple(s for s, part in enumerate(parts) if any(name in c.states for c in part)),
            grad_axes=("dp",),
        )
        for name, (shape, layout) in shapes.items()
    }


def _stage(
    index: int,
    parts: list[list[CallData]],
    states: dict[str, StateData],
    num_microbatches: int,
    dp: int,
    checkpoint: bool,
    halves: bool,
) -> Stage:
    calls = parts[index]
    first = sum(c.prologue for c in calls)
    span = (first, len(calls))
    stage, last = index, len(parts) - 1
    loads = tuple(v for v in ("x", "target", "weight") if any(v in c.inputs for c in calls))
    handed = parts[index][-1].outputs if index < last else ()
    taken = parts[index - 1][-1].outputs if index else ()
    mine = tuple(n for n, s in states.items() if index in s.stages)
    tied = tuple(n for n in mine if len(states[n].stages) > 1)
    out: list[Instruction] = []

    def add(op: Any, **fields: Any) -> None:
        out.append(Instruction(op=op, stage=stage, **fields))

    for m in range(num_microbatches):
        if loads:
            add("LOAD", microbatch=m, values=loads)
    if index == last:
        for m in range(num_microbatches):
            add("TOTAL_F", microbatch=m, values=("count",))
        add("TOTAL", values=("count",), axes=("dp",))
    for m in range(num_microbatches):
        if taken:
            add("RECV_F", microbatch=m, values=taken, peer=index - 1)
        add("F", microbatch=m, calls=span)
        if handed:
            add("SEND_F", microbatch=m, values=handed, peer=index + 1)
        add("FREE", microbatch=m, values=tuple(dict.fromkeys((*loads, *taken, *(v for c in calls for v in c.outputs)))))
    for m in reversed(range(num_microbatches)):
        if handed:
            add("RECV_B", microbatch=m, values=handed, peer=index + 1)
        add("I" if halves else "B", microbatch=m, calls=span)
        if taken:
            add("SEND_B", microbatch=m, values=taken, peer=index - 1)
        add("FREE", microbatch=m, values=(*taken, *handed), gradients=True)
        if halves:
            add("W", microbatch=m, calls=span)
    if tied:
        add("SYNC", states=tied)
    buckets = (Bucket(states=mine, axes=("dp",)),) if dp > 1 else ()
    if buckets:
        add("REDUCE", bucket=0)
    add("STEP")
    checkpoints = tuple(i for i, c in enumerate(calls) if c.block == "layer") if checkpoint else ()
    return Stage(calls=tuple(calls), instructions=tuple(out), buckets=buckets, checkpoint_calls=checkpoints)
