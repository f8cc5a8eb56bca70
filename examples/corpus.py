"""Train a small Llama, in bfloat16 with ZeRO, on text that every machine has: Python's own standard library.

    torchrun --nproc-per-node 4 --max-restarts 3 examples/corpus.py --mesh pp=2,dp=2,zero=1 --steps 200
    torchrun --nproc-per-node 4 examples/corpus.py --mesh tp=2,dp=2,zero=1 --steps 400       # on, under another mesh

As a long run should be: every rank loads only the samples that it reads, a rank that fails is named and all are started
again, and what was killed goes on from its last checkpoint, data included. ``benchmarks/long_run.py`` kills it and
compares its losses with those of one process.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import (
    Checkpoints,
    Constraints,
    Engine,
    Loader,
    Plan,
    StepLog,
    Topology,
    Watch,
    init_process_group,
    partition,
)

SEQ, VOCAB = 128, 256
BATCH = 4
LEARNING_RATE, WARMUP, CLIP = 1e-3, 20, 1.0
MODULES = """
argparse ast base64 bdb calendar cgitb cmd code codecs configparser contextlib copy csv dataclasses datetime difflib dis
doctest enum fileinput fnmatch fractions ftplib functools gettext glob gzip hashlib heapq imaplib inspect ipaddress
keyword linecache locale mailbox mimetypes netrc ntpath numbers opcode operator optparse os pathlib pdb pickle
pickletools pkgutil platform plistlib poplib posixpath pprint profile pstats py_compile pyclbr queue random reprlib
sched selectors shelve shlex shutil site smtplib socket socketserver ssl stat statistics string subprocess symtable
sysconfig tarfile tempfile textwrap threading timeit token tokenize trace traceback tracemalloc turtle types typing uuid
warnings wave weakref webbrowser zipapp zipfile
""".split()


def build(size: str = "small") -> nn.Module:
    """A Llama over bytes with random weights, of 2.5 million parameters; ``tiny``: of some thousand."""
    torch.manual_seed(0)
    width, inner, layers = (224, 576, 4) if size == "small" else (16, 32, 4)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Corpus:
    """The sources of ``MODULES`` in this order, those that this Python has as one file, cut into pieces of ``SEQ``."""

    def __init__(self) -> None:
        paths = [spec.origin for name in MODULES if (spec := importlib.util.find_spec(name)) and spec.origin]
        self.content = b"".join(Path(p).read_bytes() for p in paths if p.endswith(".py"))
        self._bytes = torch.frombuffer(bytearray(self.content), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._bytes) // SEQ

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self._bytes[index * SEQ : (index + 1) * SEQ].long()
        return {"input_ids": tokens, "labels": tokens}


def optimizer_of(parameters: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW, and its warm-up."""
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--mesh", default="", metavar="NAME=VALUE,...", help="constraints on the plan, pp=2,dp=2,zero=1"
    )
    parser.add_argument("--steps", type=int, default=200, help="in all, those before the last checkpoint too")
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences in a global batch")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--size", choices=["small", "tiny"], default="small")
    parser.add_argument("--folder", type=Path, default=Path("out/corpus"))
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    options = parser.parse_args()

    init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = options.mesh or "free"
    path = options.folder / f"plan-{world_size}-{mesh.replace('=', '')}.json"
    model = build(options.size)
    if rank == 0 and not path.exists():
        inputs = {name: torch.zeros(options.batch, SEQ, dtype=torch.long) for name in ("input_ids", "labels")}
        constraints = Constraints.parse(options.mesh or "")
        plan = partition(
            model, Topology.local(world_size), inputs, precision=options.precision, constraints=constraints
        )
        plan.save(path)
        print(plan.summary())
    dist.barrier()

    engine = Engine(Plan.load(path), weights=model)
    optimizer, schedule = optimizer_of([*engine.parameters()])
    loader = Loader(Corpus(), engine, seed=0)
    checkpoints = Checkpoints(
        options.folder / "checkpoints",
        engine,
        optimizer,
        every=options.save_every,
        extra={"schedule": schedule, "data": loader},
    )
    start = checkpoints.restore() or 0
    if rank == 0:
        print(f"going on from step {start}", flush=True)

    with Watch(engine), StepLog(engine, path, options.folder if rank == 0 else None) as log:
        while engine.steps < options.steps:
            loss = engine.step(next(loader), local=True)
            norm = engine.clip_grad_norm_(CLIP)
            optimizer.step()
            schedule.step()
            metrics = log.step(loss, norm=norm.item(), start=start)
            if rank == 0:
                print(metrics, f"gradient norm {norm.item():.3f}", sep="  ", flush=True)
            checkpoints.after_step()
        checkpoints.close()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's tear-down may abort after all is done


if __name__ == "__main__":
    main()
