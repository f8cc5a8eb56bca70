"""A training script for torchrun: a plan, its engine, any torch optimizer, a schedule, clipping, metrics, checkpoints.

    torchrun --nproc-per-node 4 --max-restarts 3 examples/train.py --steps 20 --save-every 5
    torchrun --nproc-per-node 2 examples/train.py --steps 40              # another plan, on from the last checkpoint
    torchrun --nproc-per-node 4 examples/train.py --precision bf16 --export out/weights

The first rank plans; the others read the plan. Every rank is given the whole global batch and takes its own part. A
rank that fails, dies or stands still is named by one line, and all leave. Started again it goes on where the last
complete checkpoint was: weights, optimizer, schedule, data.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import Checkpoints, Engine, Plan, StepLog, Topology, Watch, init_process_group, partition

BATCH, SEQ, VOCAB = 8, 64, 512
LEARNING_RATE, WARMUP = 3e-3, 2


def build() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Batches:
    """The training data, and where in them the run is."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> dict[str, Tensor]:
        self.position += 1
        return batch(self.position - 1)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def batch(step: int) -> dict[str, Tensor]:
    """Sequences that count upwards, each from its own start by its own stride."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCAB, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 5, (BATCH, 1), generator=generator)
    tokens = (start + stride * torch.arange(SEQ)) % VOCAB
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="in all, those before the last checkpoint too")
    parser.add_argument("--lr", type=float, default=LEARNING_RATE)
    parser.add_argument("--folder", type=Path, default=Path("out/train"))
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--keep", type=int, default=3, help="how many of the last checkpoints stay")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--export", type=Path, help="write the weights there at the end, as safetensors")
    options = parser.parse_args()

    init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    path = options.folder / f"plan-{world_size}-{options.precision}.json"
    model = build()
    if rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        plan = partition(model, Topology.local(world_size), batch(0), precision=options.precision)
        plan.save(path)
        print(plan.summary())
    dist.barrier()

    engine = Engine(Plan.load(path), weights=model)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    batches = Batches()
    checkpoints = Checkpoints(
        options.folder / "checkpoints",
        engine,
        optimizer,
        every=options.save_every,
        keep_last=options.keep,
        extra={"schedule": schedule, "data": batches},
    )
    if checkpoints.restore() is not None and rank == 0:
        print(f"going on from step {engine.steps}")

    with Watch(engine), StepLog(engine, path, options.folder if rank == 0 else None) as log:
        while engine.steps < options.steps:
            loss = engine.step(next(batches))
            norm = engine.clip_grad_norm_(1.0)
            optimizer.step()
            schedule.step()
            metrics = log.step(loss, norm=norm.item())
            if rank == 0:
                print(metrics, f"gradient norm {norm.item():.3f}", sep="  ", flush=True)
            checkpoints.after_step()  # copied to host memory, and written while training goes on
        checkpoints.close()  # the last step, too; a plan for another number of ranks may go on from it
    if options.export:
        engine.export_weights(options.export)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's tear-down may abort after all is done


if __name__ == "__main__":
    main()
