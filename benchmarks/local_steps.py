"""What the ranks of ``local_accuracy.py`` run: real steps of several plans in turns, and the memory that one takes."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.memory import peak_bytes
from partitioner import Engine, Program
from partitioner.runtime.comm.torch_backend import TorchCommunicator
from partitioner.runtime.program.load import load_program


@dataclass(frozen=True)
class Measured:
    """Figures of one rank: seconds of each timed step, seconds of its optimizer, and peak bytes of tensors."""

    step_s: list[float]
    optimizer_s: list[float]
    memory: int


class Trainer:
    """One plan's engine with AdamW as everybody uses it."""

    def __init__(self, program: Program, weights: str, batch: dict[str, Tensor], device: str = "cpu") -> None:
        communicator = TorchCommunicator(program.world_size, torch.device(device))
        self.engine = Engine(program, weights, communicator=communicator)
        self.optimizer = torch.optim.AdamW(
            [p for p in self.engine.parameters() if p.requires_grad], lr=1e-5, fused=device == "cuda" or None
        )
        self.batch = batch

    def step(self) -> float:
        """One step; the seconds of the optimizer's part."""
        self.engine.step(self.batch)
        start = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - start


def measure(plans: Sequence[str], weights: str, batch: str, rounds: int, block_s: float) -> list[Measured | None]:
    """What each plan takes this rank; ``None`` for a plan of fewer ranks.

    Plans take turns, in an order that rotates, so that a machine that slows down does so for all of them.
    """
    programs = [load_program(path) for path in plans]
    inputs: dict[str, Any] = torch.load(batch, weights_only=True)
    rank = dist.get_rank()
    trainers = [Trainer(p, weights, inputs) if rank < p.world_size else None for p in programs]
    first = torch.zeros(len(plans))
    for i, trainer in enumerate(trainers):
        dist.barrier()
        for _ in range(2):
            start = time.perf_counter()
            if trainer is not None:
                trainer.step()
            first[i] = time.perf_counter() - start
    dist.all_reduce(first, dist.ReduceOp.MAX)
    counts = [max(1, round(block_s / s)) for s in first.tolist()]
    steps: list[list[float]] = [[] for _ in plans]
    updates: list[list[float]] = [[] for _ in plans]
    for turn in range(rounds):
        for place in range(len(plans)):
            i = (place + turn) % len(plans)
            trainer = trainers[i]
            dist.barrier()
            start = time.perf_counter()
            spent = [trainer.step() for _ in range(counts[i])] if trainer is not None else [0.0]
            steps[i].append((time.perf_counter() - start) / counts[i])
            updates[i].append(statistics.fmean(spent))
    took = [rank < p.world_size for p in programs]
    trainers.clear()
    peaks = []
    for program, runs in zip(programs, took, strict=True):
        dist.barrier()
        peaks.append(peak_bytes(lambda p=program: Trainer(p, weights, inputs).step) if runs else 0)
    return [Measured(*found) if runs else None for runs, *found in zip(took, steps, updates, peaks, strict=True)]


def measure_apart(plans: Sequence[str], weights: str, batch: str, steps: int, device: str = "cuda") -> list[Any]:
    """Median seconds of a step and peak bytes of tensors, for plans of one rank, each alone on the GPU."""
    inputs: dict[str, Any] = torch.load(batch, weights_only=True)
    found: list[tuple[float, int]] = []
    for path in plans:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        trainer = Trainer(load_program(path), weights, inputs, device)
        for _ in range(3):
            trainer.step()
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(steps):
            torch.cuda.synchronize()
            start = time.perf_counter()
            trainer.step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        found.append((statistics.median(seconds), torch.cuda.max_memory_allocated() - before))
        del trainer
    return found
