"""Packed documents: time and memory of a training step, beside the same step with a mask of every pair of positions.

    python benchmarks/packed.py [--documents 16] [--positions 4096] [--width 128] [--pairs 5]

One rank on the CPU trains a Llama of four layers on one row of documents of equal length. The two plans differ in one
thing: in ``masked`` the mask is left as the model computes it. Steps alternate, and each is timed alone. Each plan runs
in a process of its own, which also reports how far steps raise the peak of its resident memory. ``module`` is the model
itself, run by PyTorch with the same mask, for comparison. Activations, which both plans keep, grow with ``--width``;
the mask does not. The program ends with 1 if the packed step takes more than half of the time or memory of the masked
one, or if the losses differ.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import Constraints, Engine, Topology, partition
from partitioner.passes.normalize import attention_masks

VOCAB, KINDS, MOST = 512, ("packed", "masked", "module"), 0.5


def build(width: int) -> nn.Module:
    """Return the model with random weights. ``width``: the size of its hidden states; a head has 32 of them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=4,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        max_position_embeddings=8192,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_batch(documents: int, positions: int) -> dict[str, Tensor]:
    """One row of ``documents`` random documents of equal length, with ``positions`` tokens in all."""
    tokens = torch.randint(VOCAB, (1, positions), generator=torch.Generator().manual_seed(1))
    places = torch.arange(positions).remainder(positions // documents)[None]
    return {"input_ids": tokens, "labels": tokens.masked_fill(places == 0, -100), "position_ids": places}


def make_step(kind: str, width: int, batch: dict[str, Tensor]) -> Callable[[], float]:
    """Return a function that runs one step without an optimizer and returns its loss. ``kind``: one of ``KINDS``.
    ``width``: that of the model.
    """
    model = build(width)
    if kind == "module":

        def step_module() -> float:
            model.zero_grad()
            loss: Tensor = model(**batch).loss
            loss.backward()
            return float(loss.detach())

        return step_module
    pinned = Constraints(pp=1, dp=1, tp=1, cp=1, recompute="none")
    if kind == "masked":
        with mock.patch.object(attention_masks, "find_document_mask", return_value=None):
            plan = partition(model, Topology.local(1), batch, constraints=pinned)
    else:
        plan = partition(model, Topology.local(1), batch, constraints=pinned)
    engine = Engine(plan, model)

    def step_plan() -> float:
        for parameter in engine.parameters():
            parameter.grad = None
        return float(engine.step(batch))

    return step_plan


def serve(kind: str, documents: int, positions: int, width: int, pipe: Connection) -> None:
    """Run one step for each message from ``pipe`` and send back its seconds, loss and the growth of peak memory in
    bytes. ``None`` ends the process.
    """
    torch.set_num_threads(1)
    step = make_step(kind, width, make_batch(documents, positions))
    before = _read_status("VmRSS")
    pipe.send(None)
    while pipe.recv() is not None:
        start = time.perf_counter()
        loss = step()
        pipe.send((time.perf_counter() - start, loss, _peak_bytes() - before))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _read_status(name: str) -> int:
    """Return a field of ``/proc/self/status`` in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def measure(documents: int, positions: int, width: int, pairs: int) -> dict[str, list[tuple[float, float, int]]]:
    """Return for each kind its steps as (seconds, loss, bytes). ``pairs``: the number of timed steps of each kind; a
    step before them is not timed.
    """
    context, ends, workers = multiprocessing.get_context("spawn"), {}, []
    for kind in KINDS:
        ours, theirs = context.Pipe()
        worker = context.Process(target=serve, args=(kind, documents, positions, width, theirs), daemon=True)
        worker.start()
        workers.append(worker)
        ours.recv()
        ends[kind] = ours
    found: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in KINDS}
    for turn in range(pairs + 1):
        for kind, pipe in ends.items():
            pipe.send(True)
            result = pipe.recv()
            if turn:
                found[kind].append(result)
    for pipe in ends.values():
        pipe.send(None)
    for worker in workers:
        worker.join()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    found = measure(given.documents, given.positions, given.width, given.pairs)
    print(
        f"{given.documents} documents in {given.positions} positions, width {given.width}, {given.pairs} pairs of steps"
    )
    print(f"{'step':<8} {'seconds':>8} {'MiB':>8} {'loss':>10}   packed / this, time: median (least to most), memory")
    worst_time = worst_memory = 0.0
    for kind, rows in found.items():
        times = [ours[0] / other[0] for ours, other in zip(found["packed"], rows, strict=True)]
        memory = found["packed"][-1][2] / rows[-1][2]
        middle = statistics.median(times)
        seconds = statistics.median(row[0] for row in rows)
        print(
            f"{kind:<8} {seconds:8.3f} {rows[-1][2] / 2**20:8.0f} {rows[-1][1]:10.6f}   "
            f"{middle:.3f} ({min(times):.3f} to {max(times):.3f}), {memory:.3f}"
        )
        if kind == "masked":
            worst_time, worst_memory = middle, memory
    losses = [rows[-1][1] for rows in found.values()]
    alike = max(losses) - min(losses) <= 1e-4 * max(losses)
    return int(worst_time > MOST or worst_memory > MOST or not alike)


if __name__ == "__main__":
    raise SystemExit(main())
