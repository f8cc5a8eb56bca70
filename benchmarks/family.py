"""Batches of several lengths: the expected step time of a plan with several shapes, beside one that pads to the cap.

    python -m benchmarks.family [--count 6] [--batches 16] [--skip-model] [--planning]

Documents have log-normal lengths with a mean of about 1,000 tokens and at most 8,192. A sampler sorts them by length
and puts neighbours into a batch, so a batch is as long as its longest document. ``Shapes.of_lengths`` chooses the
lengths of the plan. Two comparisons use documents of one draw:

* by the cost model: a Llama of 8 billion parameters on 64 H100, with 64 documents in a batch;
* measured: a small Llama on four processes over Gloo, with 8 documents in a batch and lengths divided by 32. The two
  plans run each batch in turn, each in the same mesh, and their losses have to be equal.

With ``--planning``, the time of planning ten lengths is compared with that of one instead, in turn and three times
each, and so are the sizes of the plan files: for the same Llama on 8 and on 64 H100, and for a GPT-2 of 24 layers on 8.
The largest length is that of GPT-2's table of positions. It is then read as a whole, so that its graph differs.

The program ends with 1 if the ratio (several shapes to one) exceeds 0.6 by the model, 0.7 as measured, 2 for the time
of planning or 1.5 for the size of the file.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from partitioner import Constraints, Engine, LocalRanks, Plan, Shapes, Topology, partition

CAP, MEAN, SIGMA, SCALE = 8192, 1000, 1.0, 32
RANKS, SAMPLES, VOCAB, IGNORED = 4, 8, 512, -100
MOST_MODELLED, MOST_MEASURED, CLOSE = 0.6, 0.7, 1e-3
MOST_PLANNING, MOST_FILE, TURNS = 2.0, 1.5, 3
TEN = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, CAP)


def draw_documents(number: int) -> list[int]:
    """Return the lengths of ``number`` documents in tokens, in random order."""
    generator = torch.Generator().manual_seed(0)
    log = torch.randn(number, generator=generator) * SIGMA + torch.log(torch.tensor(float(MEAN))) - SIGMA**2 / 2
    return [int(length) for length in log.exp().clamp(1, CAP).round()]


def make_batches(documents: list[int], samples: int) -> list[list[int]]:
    """Return batches of ``samples`` documents of similar length each; remaining documents are left out."""
    ordered = sorted(documents)
    return [ordered[at : at + samples] for at in range(0, len(ordered) - samples + 1, samples)]


def build_large() -> nn.Module:
    """Return a Llama of 8 billion parameters without weights."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=CAP,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def build_table() -> nn.Module:
    """Return a GPT-2 of 24 layers without weights, whose table of positions has ``CAP`` rows."""
    config = GPT2Config(n_embd=1024, n_layer=24, n_head=16, n_positions=CAP, use_cache=False)
    with torch.device("meta"):
        return GPT2LMHeadModel(config).to(torch.bfloat16)


def time_planning(build_model: Callable[[], nn.Module], nodes: int) -> bool:
    """Compare the time of planning ten lengths with that of one, on ``nodes`` nodes of eight H100, and the sizes of the
    files. Print both, and return whether they are within the limits. ``build_model`` returns the model."""
    cluster = Topology.preset("dgx-h100", nodes=nodes)
    tokens = torch.zeros(64, CAP, dtype=torch.long, device="meta")
    seconds: dict[tuple[int, ...], list[float]] = {(CAP,): [], TEN: []}
    sizes = {}
    for _ in range(TURNS):
        for lengths, taken in seconds.items():
            model = build_model()
            start = time.perf_counter()
            plan = partition(model, cluster, {"input_ids": tokens, "labels": tokens}, shapes=Shapes(length=lengths))
            taken.append(time.perf_counter() - start)
            with tempfile.TemporaryDirectory() as folder:
                plan.save(Path(folder, "plan.json"))
                sizes[lengths] = Path(folder, "plan.json").stat().st_size
    one, ten = (statistics.median(taken) for taken in seconds.values())
    larger = sizes[TEN] / sizes[CAP,]
    print(
        f"planning {type(model).__name__} on {8 * nodes} GPUs: {ten:.2f} s for ten lengths beside {one:.2f} s for one, "
        f"ratio {ten / one:.2f}"
    )
    print(f"plan files: {sizes[TEN]} bytes beside {sizes[CAP,]}, ratio {larger:.2f}")
    return ten / one <= MOST_PLANNING and larger <= MOST_FILE


def model_ratio(count: int) -> float:
    """Return the expected step time of ``count`` shapes over that of one, by the cost model."""
    model = build_large()
    batches = make_batches(draw_documents(4096), 64)
    shapes = Shapes.of_lengths([max(batch) for batch in batches], count=count, multiple=128)
    tokens = torch.zeros(64, CAP, dtype=torch.long, device="meta")
    inputs, cluster = {"input_ids": tokens, "labels": tokens}, Topology.preset("dgx-h100", nodes=8)
    one = partition(model, cluster, inputs).estimate.step_time
    family = partition(model, cluster, inputs, shapes=shapes).expected_step_time
    print(f"cost model, lengths {list(shapes.length)}: {family:.3f} s beside {one:.3f} s, ratio {family / one:.2f}")
    return family / one


def build() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_inputs(batch: list[int]) -> dict[str, Tensor]:
    """Return random documents of the lengths ``batch``, padded to the longest; padded targets are ignored."""
    longest = max(batch)
    tokens = torch.randint(VOCAB, (len(batch), longest), generator=torch.Generator().manual_seed(longest))
    padded = torch.arange(longest)[None] >= torch.tensor(batch)[:, None]
    return {"input_ids": tokens, "labels": tokens.masked_fill(padded, IGNORED)}


def make_plan(shapes: Shapes) -> Plan:
    inputs = make_inputs([shapes.length[-1]] * SAMPLES)
    return partition(build(), Topology.local(RANKS), inputs, constraints=Constraints(dp=2, tp=2, pp=1), shapes=shapes)


def time_rank(paths: tuple[str, str], batches: list[list[int]]) -> list[tuple[float, float, float]]:
    """One rank: for each batch the seconds of a step of either plan, and the relative difference of the losses."""
    engines = [Engine(path, build()) for path in paths]
    found = []
    for turn in range(2):  # the first one compiles kernels and allocates
        found = []
        for number, batch in enumerate(batches):
            seconds, losses, inputs = [0.0, 0.0], [0.0, 0.0], make_inputs(batch)
            for which in (0, 1) if (number + turn) % 2 else (1, 0):
                start = time.perf_counter()
                losses[which] = float(engines[which].step(inputs))  # type: ignore[arg-type]
                seconds[which] = time.perf_counter() - start
            found.append((seconds[0], seconds[1], abs(losses[0] - losses[1]) / abs(losses[1])))
    return found


def measure_ratio(count: int, number: int) -> float:
    """Return the measured time of all batches with ``count`` shapes over that with one shape."""
    documents = [max(2, length // SCALE) for length in draw_documents(number * SAMPLES)]
    batches = make_batches(documents, SAMPLES)
    lengths = [max(batch) for batch in batches]
    family = Shapes.of_lengths([*lengths, CAP // SCALE], count=count, multiple=8)
    with tempfile.TemporaryDirectory() as folder:
        paths = (f"{folder}/family.json", f"{folder}/one.json")
        make_plan(family).save(Path(paths[0]))
        make_plan(Shapes(length=CAP // SCALE)).save(Path(paths[1]))
        with LocalRanks(RANKS) as ranks:
            from benchmarks.family import time_rank as on_rank  # ranks import it by its name

            rows = ranks.call(on_rank, paths, batches)[0]
    several, one, error = (sum(r[0] for r in rows), sum(r[1] for r in rows), max(r[2] for r in rows))
    print(f"measured, lengths {list(family.length)}: {several:.2f} s beside {one:.2f} s, ratio {several / one:.2f}")
    print(f"largest relative difference of losses {error:.1e}")
    if error > CLOSE:
        raise SystemExit("the losses differ")
    return several / one


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=6, help="number of lengths of a plan")
    parser.add_argument("--batches", type=int, default=16, help="number of measured batches")
    parser.add_argument("--skip-model", action="store_true", help="measure only")
    parser.add_argument("--planning", action="store_true", help="compare the time of planning instead")
    options = parser.parse_args()
    if options.planning:
        kept = [time_planning(*job) for job in ((build_large, 1), (build_large, 8), (build_table, 1))]
        return int(not all(kept))
    measured = measure_ratio(options.count, options.batches)
    modelled = 0.0 if options.skip_model else model_ratio(options.count)
    return int(measured > MOST_MEASURED or modelled > MOST_MODELLED)


if __name__ == "__main__":
    raise SystemExit(main())
