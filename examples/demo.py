"""From two unmodified Hugging Face models to proven programs that train on four local processes.

For a Llama (left to the planner) and a T5 (told to be a pipeline), both with random weights: plan for four ranks,
show the plan, write ``out/<model>/plan.json``, ``plan.svg`` and ``timeline.svg``, prove the programs free of deadlock,
verify them against the model, and train 20 steps on four Gloo processes next to the same training on one process. The
plans are float64, where rounding is too small to grow large in 20 steps: all losses must agree to 1e-6, which is what
the unmodified model leaves by computing its norms and losses in float32.

    python examples/demo.py

The four workers know nothing but ``plan.json`` and a folder of safetensors: neither the model's class nor the planner.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANKS, STEPS, TOLERANCE = 4, 20, 1e-6
BATCH, SEQ, VOCAB = 8, 32, 4096
OUT = Path(__file__).resolve().parent.parent / "out"


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=256,
        d_kv=32,
        d_ff=512,
        num_layers=4,
        num_heads=8,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "t5": t5}
GIVEN: dict[str, dict[str, int]] = {  # what is not left to the planner
    "llama": {},
    "t5": {"pp": 2, "tp": 2, "microbatch_size": 2},
}


def batch(step: int) -> dict[str, Tensor]:
    """Sequences that count upwards; each sample ignores another number of its first targets."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(64, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    tokens = (start + stride * torch.arange(SEQ)) % 64
    ignored = torch.arange(SEQ) < torch.randint(SEQ // 2, (BATCH, 1), generator=generator)
    return {"input_ids": tokens, "labels": tokens.masked_fill(ignored, -100)}


def optimizer_of(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    # The large eps keeps Adam from dividing rounding noise by rounding noise where a gradient is nearly zero.
    return torch.optim.AdamW(parameters, lr=1e-4, eps=1e-4)


# --- a worker ---------------------------------------------------------------------------------------------------------


def work(folder: Path) -> None:
    """One of the four processes: train, and let the first write the losses."""
    from partitioner import Engine

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    engine = Engine(folder / "plan.json", weights=folder / "weights")
    optimizer = optimizer_of(engine.parameters())
    losses = []
    for step in range(STEPS):
        loss = engine.step(batch(step))
        optimizer.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    os._exit(0)  # Gloo's tear-down may abort after all is done


def train_on_processes(folder: Path) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, __file__, str(folder)], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the workers failed:\n{done.stdout}{done.stderr}")
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


def train_here(model: nn.Module) -> list[float]:
    """Train the unmodified model in this process."""
    model.double()
    optimizer = optimizer_of(model.parameters())
    losses = []
    for step in range(STEPS):
        loss = model(**batch(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- the show ---------------------------------------------------------------------------------------------------------


@dataclass
class Show:
    """What is printed while the demo runs."""

    def __post_init__(self) -> None:
        from rich.console import Console

        self.console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.console.status(what):
            yield
        self.console.print(f"[green]done[/] {what} [dim]({time.perf_counter() - start:.1f} s)[/]")

    def compare(self, ours: list[float], single: list[float]) -> float:
        from rich.table import Table

        table = Table(title=f"training loss, AdamW, float64: {RANKS} processes next to one")
        for heading in ("step", f"{RANKS} processes", "1 process", "relative difference"):
            table.add_column(heading, justify="right")
        differences = [abs(a - b) / abs(b) for a, b in zip(ours, single, strict=True)]
        for step, (a, b, difference) in enumerate(zip(ours, single, differences, strict=True)):
            colour = "green" if difference <= TOLERANCE else "red"
            table.add_row(str(step), f"{a:.8f}", f"{b:.8f}", f"[{colour}]{difference:.1e}[/]")
        self.console.print(table)
        return max(differences)


def show(name: str, out: Show) -> bool:
    """Everything for one model; whether all of it held."""
    from transformers.utils.logging import disable_progress_bar

    from partitioner import Constraints, Topology, partition

    torch.manual_seed(0)
    model, inputs = MODELS[name](), batch(0)
    disable_progress_bar()
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    out.console.rule(f"[bold]{type(model).__name__}, {millions:.0f} million parameters")
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)

    with out.step(f"planned for {RANKS} ranks"):
        constraints = Constraints(**GIVEN[name])
        plan = partition(model, Topology.local(RANKS), inputs, constraints=constraints, precision="fp64")
    print(plan.summary())
    with out.step(f"wrote plan.json, plan.svg and timeline.svg to {folder.relative_to(OUT.parent)}/"):
        plan.save(folder / "plan.json")
        plan.to_svg(folder / "plan.svg")
        plan.to_svg(folder / "timeline.svg", view="timeline")
        model.save_pretrained(folder / "weights")
    with out.step("proved: no deadlock, all shapes and groups agree, memory fits"):
        plan.prove()
    with out.step("verified all ranks in float64 against the unmodified model"):
        report = plan.verify(model, inputs)
    out.console.print(f"     largest relative error of outputs, loss and gradients: {report.max_error:.1e}")
    with out.step(f"trained {STEPS} steps on {RANKS} Gloo processes, from plan.json and safetensors alone"):
        ours = train_on_processes(folder)
    with out.step(f"trained {STEPS} steps with the unmodified model on one process"):
        single = train_here(model)
    difference = out.compare(ours, single)
    return report.ok and difference <= TOLERANCE


def main() -> int:
    start = time.perf_counter()
    out = Show()
    results = {name: show(name, out) for name in MODELS}
    out.console.rule()
    for name, ok in results.items():
        out.console.print(f"{name}: {'[green]all losses agree[/]' if ok else '[red]FAILED[/]'}, see out/{name}/")
    out.console.print(f"[dim]{time.perf_counter() - start:.0f} s[/]")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(Path(sys.argv[1]))
    else:
        sys.exit(main())
