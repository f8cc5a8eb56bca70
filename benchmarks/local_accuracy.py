"""How well the cost model predicts this machine: step time and peak memory of pinned plans, predicted and measured.

Profiles the machine (or reads a topology file), plans a small Hugging Face Llama under twenty pinned meshes, microbatch
sizes, schedules and recomputations on one, two and four ranks, and runs each one's steps over Gloo with AdamW. Plans
take turns; a step's time is the slowest rank's, the median over the turns. Memory is the high-water mark of what
torch's allocator has given out on a rank: what lives between steps, counted by storage, and the rise during a step,
from the profiler's record of allocations.

Times mean something on a quiet machine only: the load average before and after is printed with them, and should be
that of the ranks alone.

    python benchmarks/local_accuracy.py [--topology machine.yaml] [--ranks 4] [--quick] [--json] [--check]
    python benchmarks/local_accuracy.py --memory   # memory alone, with state sharding and other schedules too
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import partitioner
from benchmarks import local_steps
from partitioner import Constraints, Plan, Topology, partition
from partitioner.profile.profile import profile_machine

MIN_CORRELATION = 0.8
MAX_MEMORY_ERROR = 0.15
BATCH, SEQ = 8, 64


def make() -> tuple[nn.Module, dict[str, Tensor]]:
    """A Llama of four million parameters with random weights, and one global batch."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    tokens = torch.randint(config.vocab_size, (BATCH, SEQ))
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens.clone()}


def pinned(
    pp: int, dp: int, tp: int, microbatch: int, schedule: str = "1f1b", recompute: str = "none", **others: Any
) -> Constraints:
    return Constraints(
        pp=pp,
        dp=dp,
        tp=tp,
        microbatch_size=microbatch,
        schedule=schedule,
        recompute=recompute,
        sequence_parallel=None,
        zero=others.pop("zero", 0),
        **others,
    )


PLANS = [
    pinned(1, 1, 1, 8),
    pinned(1, 1, 1, 2),
    pinned(1, 1, 1, 1),
    pinned(1, 1, 1, 2, recompute="full"),
    pinned(2, 1, 1, 1),
    pinned(2, 1, 1, 2, "gpipe"),
    pinned(2, 1, 1, 8),
    pinned(1, 2, 1, 4),
    pinned(1, 2, 1, 1),
    pinned(1, 2, 1, 4, recompute="full"),
    pinned(1, 1, 2, 8),
    pinned(1, 1, 2, 2),
    pinned(4, 1, 1, 1),
    pinned(4, 1, 1, 2, "gpipe"),
    pinned(1, 4, 1, 2),
    pinned(1, 1, 4, 8),
    pinned(2, 2, 1, 2),
    pinned(2, 1, 2, 4),
    pinned(1, 2, 2, 4),
    pinned(2, 1, 2, 2, recompute="full"),
]

OF_MEMORY = [  # what their steps take on one machine says little
    pinned(1, 4, 1, 1, zero=1),
    pinned(1, 4, 1, 1, zero=2),
    pinned(1, 4, 1, 1, zero=3),
    pinned(1, 4, 1, 2, recompute="full", zero=3),
    pinned(1, 4, 1, 1, zero=3, dp_shard=2),
    pinned(1, 2, 2, 2, zero=1),
    pinned(1, 2, 2, 2, zero=3),
    pinned(2, 2, 1, 1, zero=2),
    pinned(2, 1, 1, 1, "zb-1p"),
    pinned(4, 1, 1, 1, "zb-1p"),
    pinned(2, 1, 2, 2, "zb-v", virtual_stages=2),
    pinned(2, 1, 1, 1, "interleaved", virtual_stages=2),
    pinned(2, 2, 1, 1, "interleaved", virtual_stages=2),
    pinned(2, 1, 1, 1, "zb-1p", "full"),
    pinned(1, 1, 1, 4, cp=2),
    pinned(1, 2, 1, 2, cp=2),
    pinned(1, 1, 2, 4, cp=2),
]


def num_ranks(c: Constraints) -> int:
    return (c.pp or 1) * (c.dp or 1) * (c.tp or 1) * (c.cp or 1)


@dataclass(frozen=True)
class Row:
    """One plan. Seconds per step; bytes on the fullest rank, and the largest error of any rank's."""

    name: str
    predicted_s: float
    measured_s: float
    fastest_s: float
    predicted_bytes: int
    measured_bytes: int
    worst_rank: float

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def first_devices(topology: Topology, count: int) -> Topology:
    """The first ``count`` devices of a topology of one node."""
    fields = topology.model_dump()
    return Topology(**{**fields, "nodes": [{**fields["nodes"][0], "devices": count}]})


def written(plans: list[Plan], model: nn.Module, inputs: dict[str, Tensor], folder: Path) -> tuple[list[str], str, str]:
    """The files that ranks read: plans, weights and batch."""
    paths = [str(plan.save(folder / f"{i}.json")) for i, plan in enumerate(plans)]
    weights, batch = folder / "weights.safetensors", folder / "batch.pt"
    save_file({k: v.detach().clone().contiguous() for k, v in model.state_dict().items()}, weights)
    torch.save(inputs, batch)
    return paths, str(weights), str(batch)


def measure(plans: list[Plan], model: nn.Module, inputs: dict[str, Tensor], rounds: int) -> list[list[Any]]:
    """By rank and plan. Raises :class:`partitioner.runtime.RankError` where a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        files = written(plans, model, inputs, Path(folder))
        with partitioner.LocalRanks(max(p.program.world_size for p in plans)) as pool:
            return pool.call(local_steps.measure, *files, rounds, 0.2, timeout=900)


def row(constraints: Constraints, plan: Plan, measured: list[local_steps.Measured]) -> Row:
    per_turn = [max(turn) for turn in zip(*(m.step_s for m in measured), strict=True)]
    memory = [m.memory for m in measured]
    worst = max((p / m - 1 for p, m in zip(plan.estimate.memory, memory, strict=True)), key=abs)  # of the same rank
    again = " recompute" if constraints.recompute == "full" else ""
    others = {"cp": constraints.cp, "zero": constraints.zero, "dp_shard": constraints.dp_shard}
    more = [f"{name}{value}" for name, value in others.items() if value]
    return Row(
        f"pp{constraints.pp} dp{constraints.dp} tp{constraints.tp}{' '.join(['', *more])} "
        f"mb{constraints.microbatch_size} {constraints.schedule}{again}",
        plan.estimate.step_time,
        statistics.median(per_turn),
        min(per_turn),
        max(plan.estimate.memory),
        max(memory),
        worst,
    )


def ranks_of(values: list[float]) -> np.ndarray:
    """Places in order; equal values share theirs."""
    found = np.asarray(values)
    return np.asarray([(found < v).sum() + ((found == v).sum() - 1) / 2 for v in found])


def spearman(a: list[float], b: list[float]) -> float:
    return float(np.corrcoef(ranks_of(a), ranks_of(b))[0, 1])


def kendall(a: list[float], b: list[float]) -> float:
    """Tau-a: pairs in the same order less those in the other, over all pairs."""
    x, y = np.asarray(a), np.asarray(b)
    signs = np.sign(x[:, None] - x[None, :]) * np.sign(y[:, None] - y[None, :])
    return float(signs.sum() / (len(x) * (len(x) - 1)))


def summary(rows: list[Row]) -> dict[str, float]:
    predicted, measured = [r.predicted_s for r in rows], [r.measured_s for r in rows]
    errors = [abs(r.memory_error) for r in rows]
    return {
        "spearman": spearman(predicted, measured),
        "kendall": kendall(predicted, measured),
        "spearman_fastest": spearman(predicted, [r.fastest_s for r in rows]),
        "median_time_error": statistics.median(abs(r.predicted_s / r.measured_s - 1) for r in rows),
        "median_memory_error": statistics.median(errors),
        "worst_memory_error": max(errors),
        "worst_rank_memory_error": max(abs(r.worst_rank) for r in rows),
    }


def show(rows: list[Row], figures: dict[str, float]) -> None:
    table = Table(
        "plan", "predicted ms", "measured ms", "fastest", "ratio", "predicted MB", "measured MB", "error", "rank"
    )
    for r in sorted(rows, key=lambda r: r.measured_s):
        table.add_row(
            r.name,
            f"{r.predicted_s * 1e3:.0f}",
            f"{r.measured_s * 1e3:.0f}",
            f"{r.fastest_s * 1e3:.0f}",
            f"{r.predicted_s / r.measured_s:.2f}",
            f"{r.predicted_bytes / 1e6:.1f}",
            f"{r.measured_bytes / 1e6:.1f}",
            f"{r.memory_error:+.1%}",
            f"{r.worst_rank:+.1%}",
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for name, value in figures.items():
        console.print(f"{name.replace('_', ' ')}: {value:.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", help="a topology file; without it the machine is profiled")
    parser.add_argument("--ranks", type=int, default=4, help="plans of up to so many ranks")
    parser.add_argument("--quick", action="store_true", help="a quick profile, and fewer turns")
    parser.add_argument("--turns", type=int, help="measurements of each plan, of which the median counts")
    parser.add_argument("--memory", action="store_true", help="memory alone, of more kinds of plans")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="fail below the correlation or above the error we accept")
    options = parser.parse_args()
    if options.topology:
        topology = Topology.load(options.topology)
    elif options.memory:
        topology = Topology.local(options.ranks)
    else:
        topology = profile_machine(options.ranks, device="cpu", quick=options.quick).topology
    most = min(options.ranks, topology.num_devices)
    model, inputs = make()
    chosen = [c for c in (PLANS + OF_MEMORY if options.memory else PLANS) if num_ranks(c) <= most]
    plans = [partition(model, first_devices(topology, num_ranks(c)), inputs, constraints=c) for c in chosen]
    before = os.getloadavg()[0]
    measured = measure(plans, model, inputs, options.turns or (1 if options.memory else 5 if options.quick else 9))
    rows = [row(c, p, [m[i] for m in measured if m[i]]) for i, (c, p) in enumerate(zip(chosen, plans, strict=True))]
    figures = summary(rows) | {"load_before": before, "load_after": os.getloadavg()[0]}
    if options.json:
        print(json.dumps({"rows": [asdict(r) for r in rows], **figures}, indent=1))
    else:
        show(rows, figures)
    good = options.memory or figures["spearman"] >= MIN_CORRELATION
    good = good and figures["worst_memory_error"] <= MAX_MEMORY_ERROR
    return 0 if good or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
