"""A small model, already sharded, with everything that makes programs hard, and programs of it.

``embed -> layer * n -> head -> loss``: the embedding's weight is tied to the head's, the embedding's output is read by
the head too (a long edge), every layer reads a mask that a shared call makes from the inputs, the loss divides by a
total over the batch; layers are cut over ``tp`` with collectives forward and backward, and have a parameter whose
gradient is a partial sum over ``tp`` as well.

B = samples of one microbatch on one rank, H = hidden size, F = inner size.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import fx

from partitioner.emit.program import Layouts, ProgramSpec, emit
from partitioner.passes.ir.collectives import ops
from partitioner.passes.ir.interpret import insert_operator_node
from partitioner.passes.ir.layouts import READ_SHARDED, make_shard_layout
from partitioner.passes.ir.model import Block, Call, FoldedModel, ModelInput, ModelOutput, ModelState, TensorSpec
from partitioner.runtime.program.program import Program
from partitioner.schedules.registry import build_timetable

aten = torch.ops.aten
B, H, F = 2, 4, 8


class Graph:
    """A block under construction: ``g(op, *args)`` appends an operator."""

    def __init__(self, name: str, states: dict[str, tuple[int, ...]], inputs: dict[str, tuple[int, ...]]) -> None:
        self.name, self.states, self.inputs = name, tuple(states), tuple(inputs)
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        for key, shape in {**states, **inputs}.items():
            node = self.graph.create_node("placeholder", key, name=key)
            node.meta["val"] = torch.empty(shape, device="meta")
            self.nodes[key] = node

    def __getitem__(self, name: str) -> fx.Node:
        return self.nodes[name]

    def __call__(self, op: Any, *args: Any) -> fx.Node:
        node = insert_operator_node(self.graph, op, args)
        node.meta["source"] = f"tiny.py:{len(self.graph.nodes)}"
        return node

    def block(self, *outputs: fx.Node) -> Block:
        self.graph.output(outputs)
        return Block(self.name, self.graph, self.states, self.inputs)


def layer_block(tp: int) -> Block:
    f = F // tp
    g = Graph("layer", {"up": (H, f), "down": (f, H), "bias": (H,), "gain": (H,)}, {"h": (B, H), "mask": (B, 1)})
    x = g(ops.copy.default, g["h"], "tp", tp)
    x = g(aten.add.Tensor, x, g["bias"])
    x = g(aten.relu.default, g(aten.mm.default, x, g["up"]))
    x = g(ops.all_reduce.default, g(aten.mm.default, x, g["down"]), "tp", tp, "copy")
    x = g(aten.mul.Tensor, g(aten.mul.Tensor, x, g["gain"]), g["mask"])
    return g.block(g(aten.add.Tensor, g["h"], x))


def embed_block() -> Block:
    g = Graph("embed", {"w": (H, H)}, {"x": (B, H)})
    return g.block(g(aten.mm.default, g["x"], g["w"]))


def head_block() -> Block:
    g = Graph("head", {"w": (H, H)}, {"h": (B, H), "skip": (B, H)})
    h = g(aten.add.Tensor, g["h"], g["skip"])
    return g.block(g(aten.mm.default, h, g(aten.t.default, g["w"])))


def mask_block() -> Block:
    g = Graph("mask", {}, {"x": (B, H)})
    total = g(aten.sum.dim_IntList, g["x"], [1], True)
    return g.block(g(aten._to_copy.default, g(aten.gt.Scalar, total, 0.0)))


def count_block() -> Block:
    g = Graph("count", {"one": ()}, {"t": (B, H)})
    return g.block(g(aten.add.Tensor, g(aten.sum.default, g(aten.abs.default, g["t"])), g["one"]))


def loss_block() -> Block:
    g = Graph("loss", {}, {"y": (B, H), "t": (B, H), "count": ()})
    d = g(aten.sub.Tensor, g["y"], g["t"])
    return g.block(g(aten.div.Tensor, g(aten.sum.default, g(aten.mul.Tensor, d, d)), g["count"]))


def tiny_model(num_layers: int = 4, tp: int = 1, num_pieces: int = 1, tied: bool = True) -> tuple[FoldedModel, Layouts]:
    """The local model of one microbatch of ``num_pieces``, and its layouts."""
    mask = mask_block()
    cast = next(n for n in mask.graph.nodes if n.target == aten._to_copy.default)
    cast.kwargs = {"dtype": torch.float32}
    cast.meta["val"] = torch.empty(B, 1, device="meta")
    blocks = {b.name: b for b in (embed_block(), layer_block(tp), head_block(), mask, count_block(), loss_block())}
    head = "embed.w" if tied else "head.w"
    shapes = {"embed.w": (H, H)} if tied else {"embed.w": (H, H), "head.w": (H, H)}
    states = {n: ModelState(n, TensorSpec(s, torch.float32), "parameter", True) for n, s in shapes.items()}
    states["one"] = ModelState("one", TensorSpec((), torch.float32), "constant")
    layouts: dict[str, Any] = {}
    calls = [
        Call("count", "count", ("one",), ("t",), ("count",), shared=True, prologue=True),
        Call("mask", "mask", (), ("x",), ("mask",), shared=True),
        Call("embed", "embed", ("embed.w",), ("x",), ("h0",)),
    ]
    for i in range(num_layers):
        names = {k: f"layers.{i}.{k}" for k in ("up", "down", "bias", "gain")}
        for k, shape in {"up": (H, F), "down": (F, H), "bias": (H,), "gain": (H,)}.items():
            states[names[k]] = ModelState(names[k], TensorSpec(shape, torch.float32), "parameter", True)
        layouts.update(
            {names["up"]: make_shard_layout(1), names["down"]: make_shard_layout(0), names["bias"]: READ_SHARDED}
        )
        calls.append(Call("layer", f"layers.{i}", tuple(names.values()), (f"h{i}", "mask"), (f"h{i + 1}",)))
    calls.append(Call("head", "head", (head,), (f"h{num_layers}", "h0"), ("y",)))
    calls.append(Call("loss", "loss", (), ("y", "t", "count"), ("loss",)))
    per_sample = TensorSpec((B, H), torch.float32)
    whole = TensorSpec((B * num_pieces, H), torch.float32)
    values = dict.fromkeys(("x", "t", "y", *(f"h{i}" for i in range(num_layers + 1))), per_sample)
    values["mask"] = TensorSpec((B, 1), torch.float32)
    values["count"] = values["loss"] = TensorSpec((), torch.float32)
    model = FoldedModel(
        blocks=blocks,
        calls=calls,
        states=states,
        inputs=[ModelInput("x", "x", whole), ModelInput("t", "t", whole)],
        outputs=[ModelOutput("loss", "loss"), ModelOutput("y", "y"), ModelOutput("mask", "mask")],
        loss="loss",
        values=values,
        constants={"one": torch.ones(())},
    )
    grad_axes = {n: ("dp", "tp") if layouts.get(n) == READ_SHARDED else ("dp",) for n in states}
    batch = {"loss": "P", "y": "S0", "mask": "S0"}
    return model, Layouts(layouts, {}, grad_axes, {"x": 0, "t": 0}, batch)


def even_stages(model: FoldedModel, num_stages: int) -> list[int]:
    """The calls that are not shared, cut into stages of about as many each."""
    own = sum(not c.shared for c in model.calls)
    stages, seen = [], 0
    for c in model.calls:
        stages.append(0 if c.shared else seen * num_stages // own)
        seen += not c.shared
    return stages


def tiny_program(
    pp: int = 2,
    dp: int = 1,
    tp: int = 1,
    num_microbatches: int = 2,
    num_layers: int = 4,
    schedule: str = "1f1b",
    objective: Literal["train", "infer"] = "train",
    tied: bool = True,
    chunks: int = 1,
    **options: Any,
) -> Program:
    model, layouts = tiny_model(num_layers, tp, dp * num_microbatches, tied)
    stages = len(build_timetable(schedule, pp, num_microbatches, chunks if chunks > 1 else None).ranks)
    return emit(
        model,
        even_stages(model, stages),
        ProgramSpec(
            mesh={"pp": pp, "dp": dp, "tp": tp},
            num_microbatches=num_microbatches,
            schedule=schedule,
            virtual_stages=chunks if chunks > 1 else None,
            objective=objective,
            layouts=layouts,
            **options,
        ),
    )


def listing(program: Program, stage: int) -> str:
    """A stage's instructions in one line."""
    return " ".join(str(i) for i in program.stages[stage].instructions)
