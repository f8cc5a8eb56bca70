"""Runs of the small net of ``runtime_programs`` on threads, its results in one process, and programs that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from partitioner import Engine
from partitioner.runtime.program.program import Program, Stage
from tests.helpers.every_rank import on_every_rank
from tests.helpers.runtime_programs import Net, net_inputs


def reference(tied: bool = False) -> tuple[Net, dict[str, Tensor]]:
    model = Net(tied=tied)
    output = model(**net_inputs())
    output["loss"].backward()
    return model, {k: v.detach() for k, v in output.items()}


def check(run: Any, model: Net, output: dict[str, Tensor]) -> None:
    torch.testing.assert_close(run.loss, output["loss"])
    torch.testing.assert_close(run.outputs["prediction"], output["prediction"])
    torch.testing.assert_close(run.outputs["loss"], output["loss"])
    grads = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}
    assert run.grads.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(run.grads[name], grad, msg=lambda m, n=name: f"{n}: {m}")


def in_threads(program: Program, work: Callable[[Engine], Any]) -> list[Any]:
    """``work(engine)`` on every rank; raises the first error."""
    model = Net()
    return on_every_rank(program, lambda communicator: work(Engine(program, model, communicator=communicator)))


def broken(program: Program, stage: int) -> Program:
    """``program`` whose layers multiply shapes that do not fit, on one stage."""
    block = program.blocks["layer"]
    down = [n["name"] for n in block.nodes if n.get("target") == "aten.linear.default"][-1]
    nodes = tuple({**n, "target": "aten.mm.default"} if n["name"] == down else n for n in block.nodes)
    blocks = {**program.blocks, "bad": block.model_copy(update={"nodes": nodes})}
    calls = tuple(
        c.model_copy(update={"block": "bad"}) if c.path == "layers.1" else c for c in program.stages[stage].calls
    )
    stages = list(program.stages)
    stages[stage] = stages[stage].model_copy(update={"calls": calls})
    return program.model_copy(update={"blocks": blocks, "stages": tuple(stages)})


def infer_only(program: Program) -> Program:
    """The forward half of ``program``."""
    forward = ("LOAD", "TOTAL_F", "TOTAL", "RECV_F", "F", "SEND_F", "FREE")

    def half(stage: Stage) -> Stage:
        kept = tuple(i for i in stage.instructions if i.op in forward and not i.gradients)
        return stage.model_copy(update={"instructions": kept, "buckets": ()})

    return program.model_copy(update={"objective": "infer", "stages": tuple(map(half, program.stages))})
