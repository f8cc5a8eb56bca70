"""How long a compiled training step takes, against ``torch.compile`` with torch's own ways to distribute a model.

Every contender compiles with Inductor and ends its step with AdamW. One Gloo rank, or two with one thread each, run
ours and the peers in turns; a figure is a median of ratios of neighbouring repetitions. The loss of the first step is
checked against the unmodified model's.

    python benchmarks/compiled.py [--quick] [--only dp2/llama] [--json] [--check]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import partitioner
from benchmarks import common, peers
from benchmarks.common import Step, Workload
from benchmarks.experts_peer import experts_model
from partitioner import Constraints, Plan, Topology, partition
from partitioner.passes.ops import cpu_products

_RATE = 1e-4  # the learning rate


@dataclass(frozen=True)
class Case:
    """A workload on ``ranks`` ranks, our constraints, and the greatest accepted ratio of our time to each peer's."""

    mesh: str
    workload: str
    ranks: int
    constraints: dict[str, Any]
    limits: dict[str, float]
    ours: bool = True  # whether ours is compiled


_MESHES: dict[str, tuple[int, dict[str, Any], dict[str, float]]] = {
    "one": (1, dict(pp=1, dp=1, tp=1), {"compile": 0.97}),
    "eager": (1, dict(pp=1, dp=1, tp=1), {"eager": 1.0}),
    "dp2": (2, dict(pp=1, dp=2, tp=1, zero=0), {"ddp": 0.92}),
    "zero3": (2, dict(pp=1, dp=2, tp=1, zero=3), {"fsdp": 0.85}),
    "tp2": (2, dict(pp=1, dp=1, tp=2, sequence_parallel=False), {"dtensor": 0.6}),
    "pp2": (2, dict(pp=2, dp=1, tp=1, schedule="1f1b"), {"1f1b": 0.85}),
    "ep2": (2, dict(pp=1, dp=2, tp=1, ep=2, zero=0), {"all-to-all": 0.9}),
}


def _cases(only: str) -> list[Case]:
    """Return the cases whose name, such as ``dp2/llama``, contains ``only``."""
    found = []
    for mesh, (ranks, given, limits) in _MESHES.items():
        for workload in ("experts",) if mesh == "ep2" else ("llama",):
            pinned = dict(given)
            if mesh == "pp2":
                size = len(common.WORKLOADS[workload].batch()[0]) // peers.NUM_MICROBATCHES
                pinned["microbatch_size"] = size
            if only in f"{mesh}/{workload}":
                found.append(Case(mesh, workload, ranks, pinned, limits, mesh != "eager"))
    return found


def _trained(run: Callable[[], float], parameters: list[nn.Parameter]) -> Step:
    """Return a step: ``run`` computes the loss and all gradients, and AdamW updates ``parameters``."""
    optimizer = torch.optim.AdamW(parameters, lr=_RATE)

    def step() -> float:
        loss = run()
        optimizer.step()
        return loss

    return step


def _ours(work: Workload, path: str, compiled: bool) -> Step:
    engine = partitioner.Engine(Plan.load(path), weights=work.whole(), compile=compiled)
    batch = work.batch()
    return _trained(lambda: engine.step(batch).item(), list(engine.parameters()))


def _whole(work: Workload, compiled: bool) -> Step:
    """Return a step of the model on one process."""
    model = work.whole()
    called = torch.compile(model) if compiled else model
    batch = work.batch()

    def run() -> float:
        model.zero_grad(set_to_none=True)
        loss = called(*batch)
        loss.backward()
        return loss.item()

    return _trained(run, list(model.parameters()))


def _of_model(work: Workload, build: Callable[[Workload], tuple[nn.Module, tuple[Tensor, ...], bool]]) -> Step:
    """Return a step of a distributed model. ``build(work)``: returns the model, this rank's batch, and whether the loss
    is a part of the ranks' mean."""
    model, batch, shared = build(work)
    called, size = torch.compile(model), dist.get_world_size()

    def run() -> float:
        model.zero_grad(set_to_none=True)
        loss = called(*batch)
        whole = loss.detach() / size if shared else loss.detach()
        under_way = dist.all_reduce(whole, async_op=True) if shared else None
        loss.backward()
        if under_way is not None:
            under_way.wait()
        return float(whole)

    return _trained(run, [p for p in model.parameters() if p.requires_grad])


def _fsdp(work: Workload) -> tuple[nn.Module, tuple[Tensor, ...], bool]:
    """FSDP2 over layers that are compiled one by one, as torchtitan has it."""
    whole = work.whole()
    layers = whole.model.layers
    assert isinstance(layers, nn.ModuleList)
    for layer in layers:
        layer.compile()
    return peers.fsdp_model(whole), peers.own_batch(work), True


def _dtensor(work: Workload) -> tuple[nn.Module, tuple[Tensor, ...], bool]:
    return peers.dtensor_model(work), work.batch(), False


def _ddp(work: Workload) -> tuple[nn.Module, tuple[Tensor, ...], bool]:
    return peers.ddp_model(work), peers.own_batch(work), True


def _experts(work: Workload) -> tuple[nn.Module, tuple[Tensor, ...], bool]:
    """Experts by hand. Dynamo knows grouped products in bfloat16 alone, so they stay outside of its graphs."""
    torch._dynamo.disallow_in_graph(torch._grouped_mm)
    return experts_model(work), peers.own_batch(work), True


def _pipelined(work: Workload) -> Step:
    """Torch's 1F1B over stages that are compiled."""
    model, run = peers.pipelined(peers.Schedule1F1B, work, torch.compile)
    return _trained(run, list(model.parameters()))


_PEERS: dict[str, Callable[[Workload], Step]] = {
    "compile": partial(_whole, compiled=True),
    "eager": partial(_whole, compiled=False),
    "ddp": partial(_of_model, build=_ddp),
    "fsdp": partial(_of_model, build=_fsdp),
    "dtensor": partial(_of_model, build=_dtensor),
    "1f1b": _pipelined,
    "all-to-all": partial(_of_model, build=_experts),
}


def _measure(
    case: Case, path: str, same_products: bool, repetitions: int, budget_s: float
) -> tuple[dict[str, list[float]], float]:
    """Return what a rank measures: contender -> seconds per step by repetition, and the largest relative difference of
    a contender's first loss from the unmodified model's. ``same_products``: ours multiplies by ``torch.mm``, too."""
    if same_products:
        cpu_products.is_onednn_faster = lambda: False  # type: ignore[assignment]
    work = common.WORKLOADS[case.workload]
    steps = {"ours": _ours(work, path, case.ours)} | {name: _PEERS[name](work) for name in case.limits}
    losses = {name: step() for name, step in steps.items()}
    expected = peers.single(work)()
    times = common.interleaved(steps, repetitions=repetitions, block_s=0.2, budget_s=budget_s)
    return times, max(abs(loss - expected) / abs(expected) for loss in losses.values())


def run_case(case: Case, same_products: bool, repetitions: int, budget_s: float) -> dict[str, list[float]]:
    """Plan and measure a case; return contender -> seconds per step by repetition. Raise RuntimeError if a rank fails
    or a loss is not the model's. ``same_products``: ours multiplies by ``torch.mm``, as the peers do."""
    work = common.WORKLOADS[case.workload]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "plan.json")
        pinned = Constraints(**case.constraints)
        partition(work.whole(), Topology.local(case.ranks), work.batch(), constraints=pinned).save(path)
        ranks = common.run_ranks(case.ranks, _measure, case, path, same_products, repetitions, budget_s)
    wrong = max(difference for _, difference in ranks)
    if not math.isclose(wrong, 0.0, abs_tol=1e-4):
        raise RuntimeError(f"a loss differs from the model's by {wrong:.1e} of it")
    times: dict[str, list[float]] = ranks[0][0]
    return times


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compiled training steps against torch.compile.")
    parser.add_argument("--quick", action="store_true", help="a quarter of the repetitions and of the time")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--same-products", action="store_true", help="ours multiplies by torch.mm, as the peers do")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a ratio is above its limit")
    options = parser.parse_args(arguments)

    console = Console(width=None if sys.stdout.isatty() else 100)
    table = Table(title="compiled step with AdamW, one thread for each rank")
    table.add_column("case", no_wrap=True)
    for heading in ("ours (ms)", "peer (ms)", "ours / peer", "at most"):
        table.add_column(heading, justify="right")
    ratios: dict[str, float] = {}
    failed, above = 0, False
    for case in _cases(options.only):
        name = f"{case.mesh}/{case.workload}"
        with console.status(name):
            try:
                times = run_case(case, options.same_products, 10 if options.quick else 40, 20 if options.quick else 90)
            except (RuntimeError, ValueError) as error:
                failed += 1
                console.print(f"[red]{name}[/]", str(error)[-2000:], markup=True)
                continue
        for peer, limit in case.limits.items():
            ratio = ratios[f"{name}/{peer}"] = round(common.median_ratio(times["ours"], times[peer]), 4)
            above = above or ratio > limit
            middle = (f"{sorted(times[who])[len(times[who]) // 2] * 1e3:.2f}" for who in ("ours", peer))
            table.add_row(
                f"{name}/{peer}", *middle, f"[{'green' if ratio <= limit else 'red'}]{ratio:.3f}[/]", f"{limit:.2f}"
            )
    console.print(table)
    if options.json:
        print(json.dumps({"ratios": ratios}))
    return 1 if failed or (options.check and above) else 0


if __name__ == "__main__":
    sys.exit(main())
