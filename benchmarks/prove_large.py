"""How long the prover takes on a large program: ``python benchmarks/prove_large.py [pp dp tp microbatches]``.

By default 1,024 ranks: 16 stages of 4 calls, 16 data-parallel by 4 tensor-parallel ranks, 32 microbatches, and 8
collectives in each call, forward and backward.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import fx

from partitioner.emit.program import Layouts, ProgramSpec, emit
from partitioner.passes.ir.collectives import ops
from partitioner.passes.ir.interpret import insert_operator_node
from partitioner.passes.ir.layouts import make_shard_layout
from partitioner.passes.ir.model import Block, Call, FoldedModel, ModelInput, ModelOutput, ModelState, TensorSpec
from partitioner.runtime.program.program import Program
from partitioner.runtime.prove.prove import prove

aten = torch.ops.aten
B, H, F, WIDTH = 1, 64, 256, 8


def layer(tp: int) -> Block:
    """Eight pairs of a column-parallel and a row-parallel product."""
    graph = fx.Graph()
    nodes = []
    for k in range(WIDTH):
        for name, shape in ((f"up{k}", (H, F // tp)), (f"down{k}", (F // tp, H))):
            node = graph.create_node("placeholder", name, name=name)
            node.meta["val"] = torch.empty(shape, device="meta")
            nodes.append(node)
    h = graph.create_node("placeholder", "h", name="h")
    h.meta["val"] = torch.empty((B, H), device="meta")
    states = tuple(n.name for n in nodes)
    for up, down in zip(nodes[::2], nodes[1::2], strict=True):
        x = insert_operator_node(graph, ops.copy.default, (h, "tp", tp))
        x = insert_operator_node(
            graph,
            aten.mm.default,
            (
                insert_operator_node(
                    graph, aten.relu.default, (insert_operator_node(graph, aten.mm.default, (x, up)),)
                ),
                down,
            ),
        )
        h = insert_operator_node(
            graph, aten.add.Tensor, (h, insert_operator_node(graph, ops.all_reduce.default, (x, "tp", tp, "copy")))
        )
    graph.output((h,))
    return Block("layer", graph, states, ("h",))


def loss() -> Block:
    graph = fx.Graph()
    h = graph.create_node("placeholder", "h", name="h")
    h.meta["val"] = torch.empty((B, H), device="meta")
    graph.output((insert_operator_node(graph, aten.sum.default, (h,)),))
    return Block("loss", graph, (), ("h",))


def large_program(pp: int, dp: int, tp: int, num_microbatches: int, calls_per_stage: int = 4) -> Program:
    block = layer(tp)
    states, layouts, calls = {}, {}, []
    number = pp * calls_per_stage
    for i in range(number):
        names = tuple(f"layers.{i}.{s}" for s in block.states)
        for name, node in zip(names, block.placeholders, strict=False):
            dim = 1 if ".up" in name else 0
            shape = tuple(s * tp if d == dim else s for d, s in enumerate(node.meta["val"].shape))
            states[name] = ModelState(name, TensorSpec(shape, torch.float32), "parameter", True)
            layouts[name] = make_shard_layout(dim)
        calls.append(Call("layer", f"layers.{i}", names, (f"h{i}",), (f"h{i + 1}",)))
    calls.append(Call("loss", "loss", (), (f"h{number}",), ("loss",)))
    spec = TensorSpec((B, H), torch.float32)
    values = {f"h{i}": spec for i in range(number + 1)} | {"loss": TensorSpec((), torch.float32)}
    whole = TensorSpec((B * dp * num_microbatches, H), torch.float32)
    model = FoldedModel(
        blocks={"layer": block, "loss": loss()},
        calls=calls,
        states=states,
        inputs=[ModelInput("h0", "h0", whole)],
        outputs=[ModelOutput("loss", "loss")],
        loss="loss",
        values=values,
    )
    stage_of_call = [i // calls_per_stage for i in range(number)] + [pp - 1]
    axes = dict.fromkeys(states, ("dp",))
    return emit(
        model,
        stage_of_call,
        ProgramSpec(
            mesh={"pp": pp, "dp": dp, "tp": tp},
            num_microbatches=num_microbatches,
            layouts=Layouts(layouts, {}, axes, {"h0": 0}, {"loss": "P"}),
        ),
    )


def main() -> None:
    torch.set_num_threads(1)
    numbers = [int(a) for a in sys.argv[1:]] or [16, 16, 4, 32]
    start = time.process_time()
    program = large_program(*numbers)
    print(f"emitted in {time.process_time() - start:.2f} s of processor time")
    start = time.process_time()
    print(prove(program))
    print(f"proven in {time.process_time() - start:.2f} s of processor time")
    # One rank frees a value a little later: its list is its own, and all ranks are followed one by one.
    rank = program.rank(5)
    code = list(rank.instructions)
    place = next(k for k, i in enumerate(code) if i.op == "FREE" and code[k + 1].op != "FREE")
    code[place], code[place + 1] = code[place + 1], code[place]
    start = time.process_time()
    print(prove(program, {5: rank.with_instructions(tuple(code))}))
    print(f"proven with one edited rank in {time.process_time() - start:.2f} s of processor time")


if __name__ == "__main__":
    main()
