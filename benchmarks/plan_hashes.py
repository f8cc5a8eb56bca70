"""Do two builds plan the same? ``python benchmarks/plan_hashes.py [--only NAME ...] [--compare FILE] [-o FILE]``.

Plans twelve small jobs of different kinds (dense, experts, encoder and decoder, context parallel, mixed cluster, no
plan at all, ...) and prints a hash of each program and one of each certificate. ``-o`` writes them to a JSON file;
``--compare`` reads such a file, of another build say, names the jobs whose hashes differ, and ends with 1 if any does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import nn

from partitioner import Constraints, PartitionError, Topology, partition

_TINY = dict(vocab_size=512, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)


@dataclass(frozen=True)
class Job:
    """A model on ``meta`` by its type and configuration, a cluster, and what is fixed."""

    family: str
    options: dict[str, Any]
    cluster: Callable[[], Topology]
    batch: int = 16
    seq: int = 64
    fixed: dict[str, Any] = field(default_factory=dict)
    objective: Literal["train", "infer"] = "train"


def _h100(nodes: int, devices: int = 8) -> Callable[[], Topology]:
    levels = [{"like": "nvlink4", "nodes": 1}, {"like": "ib-ndr"}]
    kinds = [{"type": "h100-sxm", "devices": devices, "count": nodes, "host": "dgx-h100"}]
    return lambda: _topology({"nodes": kinds, "levels": levels})


def _mixed() -> Topology:
    kinds = [{"type": name, "devices": 2, "count": 1, "host": "dgx-h100"} for name in ("h100-sxm", "a100-80gb")]
    return _topology({"nodes": kinds, "levels": [{"like": "nvlink3", "nodes": 1}, {"like": "ib-ndr"}]})


def _small_memory() -> Topology:
    topology = _h100(1, 2)()
    less = {"memory": 1_502_000_000}  # nearly all of it is reserved
    types = {name: kind.model_copy(update=less) for name, kind in topology.types.items()}
    return Topology(name="small", nodes=topology.nodes, types=types, levels=topology.levels)


def _topology(data: dict[str, Any]) -> Topology:
    from partitioner.topology import loads

    return loads(yaml.safe_dump(data))


_LLAMA = _TINY | dict(num_hidden_layers=4)
JOBS = {
    "dense": Job("llama", _LLAMA, _h100(1)),
    "dense-nodes": Job("llama", _LLAMA | dict(num_hidden_layers=8), _h100(4, 4)),
    "experts": Job("mixtral", _LLAMA | _EXPERTS, _h100(2, 4)),
    "encoder-decoder": Job(
        "t5",
        dict(d_model=128, d_ff=256, d_kv=32, num_layers=2, num_heads=4, vocab_size=512)
        | dict(decoder_start_token_id=0),
        _h100(1, 4),
    ),
    "encoder": Job(
        "bert", dict(vocab_size=512, hidden_size=128, num_hidden_layers=4, num_attention_heads=4), _h100(1, 4)
    ),
    "context": Job("llama", _LLAMA, _h100(2, 2), batch=2, seq=512, fixed=dict(cp=4)),
    "mixed-cluster": Job("llama", _LLAMA, _mixed),
    "no-plan": Job("llama", _LLAMA, _small_memory),
    "interleaved": Job(
        "llama", _LLAMA | dict(num_hidden_layers=8), _h100(1, 4), fixed=dict(pp=2, schedule="interleaved")
    ),
    "sharded": Job("llama", _LLAMA, _h100(2, 4), fixed=dict(zero=3, pp=1)),
    "offload": Job("llama", _LLAMA, _h100(1, 2), fixed=dict(offload=("optimizer",))),
    "inference": Job("llama", _LLAMA, _h100(1, 4), objective="infer"),
}


def _model(job: Job) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(job.family, use_cache=False, **job.options)
    kinds = {"t5": transformers.AutoModelForSeq2SeqLM, "bert": transformers.AutoModelForMaskedLM}
    with torch.device("meta"):
        model: nn.Module = kinds.get(job.family, transformers.AutoModelForCausalLM).from_config(config)
    return model


def hashes(name: str) -> dict[str, str]:
    """The hashes of a job's plan; of the error where it has none."""
    job = JOBS[name]
    ids = torch.empty((job.batch, job.seq), dtype=torch.int64, device="meta")
    batch = {"input_ids": ids} | ({"labels": ids} if job.objective == "train" else {})
    if job.family == "t5" and job.objective == "infer":
        batch["decoder_input_ids"] = ids
    try:
        plan = partition(
            _model(job),
            job.cluster(),
            batch,
            precision="bf16",
            constraints=Constraints(**job.fixed),
            objective=job.objective,
        )
    except PartitionError as error:
        return {"error": type(error).__name__, "text": _hash(str(error))}
    program = plan.program.model_dump_json() if plan.program is not None else ""
    return {"program": _hash(program), "certificate": _hash(plan.certificate.model_dump_json())}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS), metavar="NAME", help="these jobs")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="hashes of another build")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the hashes to this file")
    options = parser.parse_args()
    found = {}
    for name in options.only:
        found[name] = hashes(name)
        print(name, *(f"{k}={v}" for k, v in found[name].items()), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    if options.compare:
        other = json.loads(options.compare.read_text())
        changed = [n for n in found if n in other and other[n] != found[n]]
        print("the same" if not changed else f"differ: {', '.join(changed)}")
        sys.exit(bool(changed))


if __name__ == "__main__":
    main()
