"""How long planning takes at scale: ``python benchmarks/planning.py [--json] [--only NAME ...] [--list]``.

Each job is a model on ``meta`` and a cluster, planned in a process of its own, so that nothing is warm and the memory
is that of one plan. Imports of torch and transformers are not counted. ``capture``: until the model is a flat graph,
``rest``: from there to the proven plan; ``processor``: seconds of both processes, where the second worked ahead. A job
that has no plan is reported with the reason, which must come as fast.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import yaml
from torch import nn


@dataclass(frozen=True)
class Job:
    """A model by its type and configuration; samples of ``seq`` tokens on ``nodes`` nodes of eight GPUs."""

    family: str
    options: dict[str, Any]
    nodes: int
    global_batch: int
    seq: int = 8192
    nvlink: float | None = None  # bytes/s inside a node, where it is not the preset's
    slow: int = 0  # so many of the nodes are of A100
    network: float = 1.0  # of the bandwidth between nodes that the first one has
    preset: str = "dgx-h100"
    precision: str = "bf16"


@dataclass(frozen=True)
class Result:
    """Seconds by the clock and of the processor, bytes, and what the certificate says."""

    job: str
    num_ranks: int
    capture_s: float
    rest_s: float
    processor_s: float
    peak_rss: int
    candidates: int
    solved: int
    step_time: float | None
    bound: float | None
    gap: float | None
    mesh: dict[str, int] | None
    reason: str = ""


def _llama(layers: int, hidden: int, ffn: int, heads: int) -> dict[str, Any]:
    return dict(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    )


_405B = _llama(126, 16384, 53248, 128)
_8B = _llama(32, 4096, 14336, 32)
_MIXTRAL = _llama(56, 6144, 16384, 48) | dict(vocab_size=32768, num_local_experts=8, num_experts_per_tok=2)

_GPT_OSS = dict(num_hidden_layers=36, num_local_experts=128, vocab_size=201088)
_K2 = dict(num_hidden_layers=61, n_routed_experts=384, num_attention_heads=64, n_group=1, topk_group=1)
_MAVERICK = dict(num_hidden_layers=48, num_local_experts=128, interleave_moe_layer_step=2, intermediate_size_mlp=16384)
_QWEN3 = dict(
    num_hidden_layers=94, hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536, num_experts=128
) | dict(num_experts_per_tok=8, num_attention_heads=64, num_key_value_heads=4, head_dim=128, vocab_size=151936)

JOBS = {
    "llama-405b-16384": Job("llama", _405B, 2048, 2048),
    "llama-8b-64": Job("llama", _8B, 8, 512),
    "mixtral-8x22b-128": Job("mixtral", _MIXTRAL, 16, 1024),
    "deepseek-v3-2048": Job("deepseek_v3", dict(num_hidden_layers=61), 256, 4096, nvlink=200e9),
    "llama-8b-8": Job("llama", _8B, 1, 512),
    "llama-8b-65536": Job("llama", _8B, 8192, 65536),
    "llama-405b-65536": Job("llama", _405B, 8192, 8192),
    "qwen3-235b-1024": Job("qwen3_moe", _QWEN3, 128, 2048),
    "gpt-oss-120b-256": Job("gpt_oss", _GPT_OSS, 32, 1024),
    "llama4-maverick-512": Job("llama4_text", _MAVERICK, 64, 1024),
    "kimi-k2-4096": Job("deepseek_v3", _K2 | dict(first_k_dense_replace=1), 512, 8192, nvlink=200e9),
    "llama-8b-h100-a100": Job("llama", _8B, 8, 128, 4096, slow=4),
    "llama-8b-slow-network": Job("llama", _8B, 8, 128, 4096, network=0.1),
}


def make_job_model(job: Job) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(job.family, use_cache=False, **job.options)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    getattr(model, "loss_function", None)  # an import of transformers' own, and of all of SciPy, at first use
    return model


def make_job_topology(job: Job) -> Any:
    from partitioner import Topology
    from partitioner.topology import loads

    if job.slow or job.network < 1:
        kinds = [{"type": "h100-sxm", "devices": 8, "count": job.nodes - job.slow, "host": "dgx-h100"}]
        kinds += [{"type": "a100-80gb", "devices": 8, "count": job.slow, "host": "dgx-a100"}] if job.slow else []
        levels = [{"like": "nvlink4", "nodes": 1}, {"like": "ib-ndr"}]
        return loads(
            yaml.safe_dump({"nodes": kinds, "levels": levels, "node_overrides": {0: {"network": job.network}}})
        )
    topology = Topology.preset(job.preset, nodes=job.nodes)
    if job.nvlink is None:
        return topology
    first, *rest = topology.levels
    slower = first.model_copy(update={"bandwidth": job.nvlink})
    return Topology(name="h800", nodes=topology.nodes, types=topology.types, levels=(slower, *rest))


def _processor_s() -> float:
    """Processor seconds of this process and of its child processes that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(of.ru_utime + of.ru_stime for of in used)


def measure(name: str) -> Result:
    """Plan one job in this process."""
    import partitioner.solve.evaluate.prepared_model as prepared
    from partitioner import partition
    from partitioner.passes.errors import PartitionError

    job = JOBS[name]
    model, topology = make_job_model(job), make_job_topology(job)
    spent = [0.0]
    prepared.capture = _timed(prepared.capture, spent)  # type: ignore[attr-defined]
    ids = torch.empty((1, job.seq), dtype=torch.int64, device="meta")
    start, processor = time.perf_counter(), _processor_s()
    reason, plan = "", None
    try:
        plan = partition(
            model, topology, {"input_ids": ids, "labels": ids}, global_batch=job.global_batch, precision=job.precision
        )
    except PartitionError as error:
        reason = str(error).partition("\n")[0]
    seconds, processor = time.perf_counter() - start, _processor_s() - processor
    rows = plan.certificate.candidates if plan is not None else ()
    certificate = plan.certificate if plan is not None else None
    return Result(
        job=name,
        num_ranks=topology.num_devices,
        capture_s=spent[0],
        rest_s=seconds - spent[0],
        processor_s=processor,
        peak_rss=max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        * 1024,
        candidates=len(rows),
        solved=sum(row.status in ("solved", "chosen") for row in rows),
        step_time=certificate.objective if certificate else None,
        bound=certificate.bound if certificate else None,
        gap=certificate.gap if certificate else None,
        mesh=dict(plan.mesh) if plan is not None else None,
        reason=reason,
    )


def _timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - start

    return timed


def _line(r: Result) -> str:
    plan = f"{r.step_time:8.3f} {r.bound:8.3f} {r.gap:6.2%}" if r.step_time is not None else f"  {r.reason[:60]}"
    return (
        f"{r.job:20} {r.num_ranks:6d} {r.capture_s:8.2f} {r.rest_s:8.2f} {r.processor_s:9.2f} {r.peak_rss / 1e9:6.2f} "
        f"{r.candidates:6d} {r.solved:6d} {plan}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a job instead of the table")
    parser.add_argument("--only", nargs="+", choices=JOBS, help="these jobs")
    parser.add_argument("--list", action="store_true", help="the jobs' names")
    options = parser.parse_args()
    if options.list:
        print("\n".join(JOBS))
        return
    if not options.json:
        print(
            f"{'job':20} {'ranks':>6} {'capture':>8} {'rest':>8} {'processor':>9} {'GB':>6} {'cands':>6} {'solved':>6} "
            f"{'step':>8} {'bound':>8} {'gap':>6}"
        )
    for name in options.only or JOBS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            result = pool.apply(measure, (name,))
        print(json.dumps(asdict(result)) if options.json else _line(result), flush=True)


if __name__ == "__main__":
    main()
