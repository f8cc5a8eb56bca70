"""A training script for torchrun: a plan, its engine, any torch optimizer, clipping, metrics, and checkpoints.

    torchrun --nproc-per-node 4 --max-restarts 3 examples/train.py --steps 20
    torchrun --nproc-per-node 2 examples/train.py --steps 40 --resume     # another plan, the same checkpoints

The first rank plans; the others read the plan. Every rank is given the whole global batch and takes its own part. A
rank that fails, dies or stands still is named by one line, all leave, and what torchrun starts anew goes on from the
newest checkpoint.
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

import runtime
from partitioner import Plan, Topology, partition

BATCH, SEQ, VOCAB = 8, 64, 512
LEARNING_RATE = 3e-3


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


def batch(step: int) -> dict[str, Tensor]:
    """Sequences that count upwards, each from its own start by its own stride."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCAB, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 5, (BATCH, 1), generator=generator)
    tokens = (start + stride * torch.arange(SEQ)) % VOCAB
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="in all, those before a restart included")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--lr", type=float, default=LEARNING_RATE)
    parser.add_argument("--folder", type=Path, default=Path("out/train"))
    parser.add_argument("--resume", action="store_true", help="go on from the folder's newest checkpoint")
    options = parser.parse_args()

    runtime.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    path = options.folder / f"plan-{world_size}.json"
    model = build()
    if rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        plan = partition(model, Topology.local(world_size), batch(0))
        plan.save(path)
        print(plan.summary())
    dist.barrier()

    engine = runtime.Engine(Plan.load(path), weights=model)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=options.lr)
    checkpoints = options.folder / "checkpoints"
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    with runtime.Watch(engine), runtime.StepLog(engine, path, options.folder if rank == 0 else None) as log:
        if options.resume or restarted:
            engine.resume(checkpoints, optimizer)
        while engine.steps < options.steps:
            loss = engine.step(batch(engine.steps))
            norm = engine.clip_grad_norm_(1.0)
            optimizer.step()
            metrics = log.step(loss, norm=norm.item())
            if rank == 0:
                print(metrics, f"gradient norm {norm.item():.3f}", sep="  ", flush=True)
            if engine.steps % options.every == 0 or engine.steps == options.steps:
                engine.checkpoint(checkpoints, optimizer)  # whole tensors: a plan for other ranks loads it, too

    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's tear-down may abort after all is done


if __name__ == "__main__":
    main()
