"""Check lower bounds against plans at scale: ``python -m benchmarks.check_bounds [--only NAME ...] [--random N]``.

For each job of ``benchmarks/planning.py``, or for random jobs, candidates are drawn at random, with preference for
those whose first bound is low, and planned. No lower bound that the search may use for a candidate may exceed the step
time of its plan, and none may refuse a candidate that has a plan. Exits with 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import sys
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from benchmarks.planning import JOBS, Job, make_job_model, make_job_topology

_MOST_DRAWS = 8  # for each plan to compare, since most candidates of a large model do not fit in memory
_PRESETS = "dgx-h100", "dgx-a100", "dgx-a100-40gb", "dgx-b200", "mi300x", "l40s-pcie", "h100-pcie"
_FAMILIES = "llama", "mistral", "gemma2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"


class _Checked(BaseException):
    """Ends the planning of a job once its bounds are checked; not an error that is turned into another one."""


def draw_job(seed: int) -> Job:
    """Return a random job: a model type with random sizes, on a random number of nodes of a random kind."""
    rng = random.Random(seed)
    family, heads = rng.choice(_FAMILIES), rng.choice([8, 16, 32, 64])
    options: dict[str, Any] = {
        "num_hidden_layers": rng.randint(6, 64),
        "hidden_size": heads * rng.choice([64, 128]),
        "intermediate_size": heads * rng.choice([256, 448, 512]),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if family == "deepseek_v3" else rng.choice([4, 8]),
        "vocab_size": rng.choice([32000, 128256, 151936]),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if family == "mixtral":
        options |= {"num_local_experts": rng.choice([8, 16])}
    elif family in ("qwen3_moe", "deepseek_v3"):
        count = rng.choice([16, 64, 128])
        options |= {"moe_intermediate_size": 64 * heads // 4, "num_experts_per_tok": 4}
        options |= {"num_experts": count} if family == "qwen3_moe" else {"n_routed_experts": count, "n_group": 1}
        options |= {"topk_group": 1} if family == "deepseek_v3" else {}
    nodes = rng.choice([1, 1, 2, 4, 8, 16])
    preset, precision = rng.choice(_PRESETS), rng.choice(["bf16", "bf16", "fp32", "fp8"])
    precision = precision if preset in ("dgx-h100", "dgx-b200") else precision.replace("fp8", "bf16")
    seq, batch = rng.choice([512, 2048, 4096, 8192]), nodes * 8 * rng.choice([1, 2, 4, 12])
    network = rng.choice([1.0, 1.0, 1.0, 0.2]) if preset == "dgx-h100" and nodes > 1 else 1.0
    return Job(family, options, nodes, batch, seq, network=network, preset=preset, precision=precision)


def check_job(job: Job, num: int, seed: int) -> tuple[int, list[str]]:
    """Return how many plans of ``job`` were compared with their bounds, and a line for each bound that is wrong.
    ``num``: number of plans to compare, at most."""
    import partitioner.solve.search.search as search
    from partitioner import partition
    from partitioner.passes.errors import PartitionError

    model, topology = make_job_model(job), make_job_topology(job)
    result: list[tuple[int, list[str]]] = []

    def check(planned: Any, evaluator: Any, *_: Any, **__: Any) -> Any:
        result.append(_check_candidates(planned, evaluator, num, seed))
        raise _Checked

    search._search_candidates = check
    ids = torch.empty((1, job.seq), dtype=torch.int64, device="meta")
    with suppress(_Checked, PartitionError):  # some random jobs have no candidates
        examples = {"input_ids": ids, "labels": ids}
        partition(model, topology, examples, global_batch=job.global_batch, precision=job.precision)
    return result[0] if result else (0, [])


def _check_candidates(job: Any, evaluator: Any, num: int, seed: int) -> tuple[int, list[str]]:
    from partitioner.passes.errors import PartitionError
    from partitioner.solve.bounds.model_bounds import ModelBounds
    from partitioner.solve.search.bound_steps import BoundCascade
    from partitioner.solve.search.space import build_search_space, list_candidates

    bounds = ModelBounds(job, evaluator.placements)
    space = build_search_space(job)
    candidates = list_candidates(space)
    cascade = BoundCascade(bounds, evaluator, candidates, space)
    every = list(dict.fromkeys(member for c in candidates for member in cascade.members([c])))
    first = bounds.times(every)
    order = sorted(range(len(every)), key=lambda k: float(first[k]))
    rng = random.Random(seed)
    compared, wrong = 0, []
    for _ in range(_MOST_DRAWS * num):
        if compared == num:
            break
        candidate = every[order[int(len(order) * rng.random() ** 3)]]
        try:
            solved = evaluator.solve(candidate)
        except PartitionError:
            continue
        compared += 1
        step = solved.estimate.step_time * (1 + 1e-9)
        if (quick := float(bounds.times([candidate])[0])) > step:
            wrong.append(f"{candidate}: times {quick} > {step}")
        members = cascade.members([candidate])
        steps = {f"family bound {k}": partial(bound, members) for k, bound in enumerate(cascade.family_bounds)}
        steps |= {f"bound {k}": partial(bound, candidate) for k, bound in enumerate(cascade.candidate_bounds)}
        for what, bound in steps.items():
            for cutoff_s in (math.inf, step):
                try:
                    found = bound(cutoff_s)
                except PartitionError as error:
                    wrong.append(f"{candidate}: {what} refuses a plan of {step}: {error}")
                    continue
                if found > step:
                    wrong.append(f"{candidate}: {what} {found} > {step} (cutoff {cutoff_s})")
        if (tight := cascade.bound_tightly(candidate)) > step:
            wrong.append(f"{candidate}: bound_tightly {tight} > {step}")
    return compared, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=JOBS, help="these jobs")
    parser.add_argument("--num", type=int, default=60, help="plans to compare for each job, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--random", type=int, default=0, help="so many random jobs instead")
    options = parser.parse_args()
    total, seeds = 0, range(options.seed, options.seed + options.random)
    jobs = {f"random {seed}": draw_job(seed) for seed in seeds} or {name: JOBS[name] for name in options.only or JOBS}
    for name, job in jobs.items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            compared, wrong = pool.apply(check_job, (job, options.num, options.seed))
        if wrong:
            print(job)
        total += len(wrong)
        print(f"{name:24} {compared:4d} plans compared, {len(wrong)} bounds wrong", flush=True)
        for line in wrong:
            print(f"  {line}", flush=True)
    sys.exit(bool(total))


if __name__ == "__main__":
    main()
