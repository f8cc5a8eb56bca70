"""How well the cost model predicts one GPU: step time and peak memory of pinned plans, predicted and measured.

Profiles the GPU (or reads a topology file), plans three Hugging Face models of random weights (a Llama whose products
fill the GPU, one whose kernels are shorter than their launches, and a Mixtral) under microbatch sizes, recomputations
and precisions on one rank, and runs each plan's steps with AdamW. A step's time is the median of several, memory the
most that torch's allocator has given out in one of them. Each plan is predicted twice: by the profile, and by the
catalogue's figures for such a GPU (``Topology.detect()``).

    python benchmarks/gpu_accuracy.py [--topology gpu.yaml] [--save gpu.yaml] [--quick] [--only MODEL ...] [--json FILE]
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

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import partitioner
from benchmarks import local_steps
from benchmarks.local_accuracy import pinned, spearman, written
from partitioner import Plan, Topology, partition, prepare
from partitioner.profile.profile import profile_machine
from partitioner.runtime.files import write_text

Form = tuple[int, str, str]  # microbatch size, recomputation, precision


@dataclass(frozen=True)
class Model:
    """A family of Hugging Face models with its dimensions, a batch of sequences, and the plans to run."""

    family: str
    options: dict[str, Any]
    batch: int
    seq: int
    plans: tuple[Form, ...]

    def make(self) -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        config = AutoConfig.for_model(self.family, use_cache=False, vocab_size=32000, **self.options)
        tokens = torch.randint(config.vocab_size, (self.batch, self.seq))
        return AutoModelForCausalLM.from_config(config), {"input_ids": tokens, "labels": tokens.clone()}


def _sizes(hidden: int, ffn: int, layers: int, heads: int) -> dict[str, int]:
    names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
    return dict(zip(names, (hidden, ffn, layers, heads, heads // 2), strict=True))


MODELS = {
    "llama": Model(
        "llama",
        _sizes(2048, 5632, 8, 16),
        8,
        2048,
        (
            *((size, "none", "bf16") for size in (1, 2, 4, 8)),
            (2, "full", "bf16"),
            (8, "full", "bf16"),
            (4, "selective", "bf16"),
            (2, "none", "fp32"),
            (8, "none", "fp32"),
            (8, "full", "fp32"),
            (2, "none", "tf32"),
            (8, "none", "tf32"),
            (2, "none", "fp8"),
            (8, "none", "fp8"),
        ),
    ),
    "llama-small": Model(
        "llama",
        _sizes(512, 1408, 8, 8),
        32,
        256,
        ((1, "none", "bf16"), (4, "none", "bf16"), (32, "none", "bf16"), (4, "full", "bf16"), (32, "none", "fp32")),
    ),
    "mixtral": Model(
        "mixtral",
        _sizes(1024, 3584, 6, 16) | dict(num_local_experts=8, num_experts_per_tok=2),
        8,
        1024,
        ((1, "none", "bf16"), (2, "none", "bf16"), (8, "none", "bf16"), (8, "full", "bf16"), (8, "none", "fp32")),
    ),
}


@dataclass(frozen=True)
class Row:
    """One plan: seconds per step, bytes of tensors; ``catalogue_s``: predicted without a profile."""

    model: str
    plan: str
    predicted_s: float
    catalogue_s: float
    measured_s: float
    predicted_bytes: int
    measured_bytes: int
    breakdown: dict[str, float]


def measure(plans: list[Plan], model: nn.Module, inputs: dict[str, Tensor], steps: int) -> list[tuple[float, int]]:
    with tempfile.TemporaryDirectory() as folder, partitioner.LocalRanks(1) as pool:
        files = written(plans, model, inputs, Path(folder))
        found: list[tuple[float, int]] = pool.call(local_steps.measure_apart, *files, steps, timeout=900)[0]
        return found


def rows_of(name: str, topologies: tuple[Topology, Topology], steps: int) -> list[Row]:
    """The plans of one model, predicted by each topology and run."""
    model, inputs = MODELS[name].make()
    plans: list[tuple[Plan, Plan]] = []
    for precision in dict.fromkeys(form[-1] for form in MODELS[name].plans):
        prepared = prepare(model, inputs, precision=precision)
        for size, recompute, _ in (form for form in MODELS[name].plans if form[-1] == precision):
            constraints = pinned(1, 1, 1, size, recompute=recompute)
            first, second = (partition(prepared, t, constraints=constraints) for t in topologies)
            plans.append((first, second))
    measured = measure([plan for plan, _ in plans], model, inputs, steps)
    return [
        Row(
            name,
            f"mb{plan.constraints.microbatch_size} {plan.constraints.recompute} {plan.precision}",
            plan.estimate.step_time,
            other.estimate.step_time,
            seconds,
            plan.estimate.memory[0],
            num_bytes,
            plan.estimate.breakdown,
        )
        for (plan, other), (seconds, num_bytes) in zip(plans, measured, strict=True)
    ]


def figures(rows: list[Row]) -> dict[str, float]:
    measured = [r.measured_s for r in rows]
    found = {}
    for name, predicted in (
        ("profile", [r.predicted_s for r in rows]),
        ("catalogue", [r.catalogue_s for r in rows]),
    ):
        found[f"{name}_spearman"] = spearman(predicted, measured)
        errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
        found[f"{name}_mean_error"] = statistics.fmean(errors)
        found[f"{name}_worst_error"] = max(errors)
    found["worst_memory_error"] = max(abs(r.predicted_bytes / r.measured_bytes - 1) for r in rows)
    return found


def show(rows: list[Row]) -> None:
    table = Table(
        "model", "plan", "profile ms", "catalogue ms", "measured ms", "ratio", "ratio", "GB", "measured", "error"
    )
    for r in rows:
        table.add_row(
            r.model,
            r.plan,
            *(f"{s * 1e3:.1f}" for s in (r.predicted_s, r.catalogue_s, r.measured_s)),
            *(f"{s / r.measured_s:.2f}" for s in (r.predicted_s, r.catalogue_s)),
            *(f"{b / 1e9:.2f}" for b in (r.predicted_bytes, r.measured_bytes)),
            f"{r.predicted_bytes / r.measured_bytes - 1:+.1%}",
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for model in dict.fromkeys(r.model for r in rows):
        of_model = figures([r for r in rows if r.model == model])
        console.print(f"{model}: " + ", ".join(f"{k.replace('_', ' ')} {v:.3f}" for k, v in of_model.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", help="a topology file; without it the GPU is profiled")
    parser.add_argument("--save", help="where to write the profile")
    parser.add_argument("--quick", action="store_true", help="a quick profile")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--json", help="a file for the rows")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if options.topology:
        topology = Topology.load(options.topology)
    else:
        found = profile_machine(1, device="cuda", quick=options.quick)
        topology = found.topology
        if options.save:
            found.save(options.save)
    both = topology, Topology.detect()
    rows = [row for name in options.only for row in rows_of(name, both, options.steps)]
    if options.json:
        write_text(Path(options.json), json.dumps([asdict(r) for r in rows], indent=1))
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
