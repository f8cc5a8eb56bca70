"""How long a compiled run takes from process start to its first completed step, against FSDP2 over compiled layers.

Two Gloo ranks train a Llama of eight layers with its states sharded. Each start has fresh processes; a cold one also
has an empty folder for what Inductor keeps on disk, and a warm one that of the cold start before. The plan is given.
Beside the time, the processors' time of both ranks and of the compilers that they start is compared, which depends less
on other jobs of the machine.

    python benchmarks/compiled_start.py [--starts 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.common import Llama, LlamaConfig, Step, Workload, _free_port, _tokens, cross_entropy  # noqa: E402

CONFIG = LlamaConfig(num_layers=8)
WORK = Workload("llama8", lambda: Llama(CONFIG), lambda: _tokens(CONFIG, 8), cross_entropy)
LIMITS = {"cold": 0.6, "warm": 0.8}


def _ours(path: str) -> Step:
    import partitioner

    engine = partitioner.Engine(partitioner.Plan.load(path), weights=WORK.whole(), compile=True)
    optimizer = torch.optim.AdamW(engine.parameters())

    def step() -> float:
        loss = engine.step(WORK.batch()).item()
        optimizer.step()
        return loss

    return step


def _fsdp(path: str) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = WORK.whole()
    assert isinstance(model.model, Llama)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        layer.compile()
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> float:
        loss = model(*(t.chunk(2)[dist.get_rank()] for t in WORK.batch()))
        loss.backward()
        optimizer.step()
        whole = loss.detach() / 2
        dist.all_reduce(whole)
        return float(whole)

    return step


def _work(contender: str, path: str) -> None:
    """Run one step on a rank, and print the time at its end and the loss."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loss = {"ours": _ours, "fsdp": _fsdp}[contender](path)()
    end, used = time.time(), os.times()
    print(json.dumps({"end": end, "loss": loss, "cpu": sum(used[:4])}), flush=True)
    dist.barrier()
    os._exit(0)


def _start(contender: str, path: str, cache: str) -> dict[str, float]:
    """Return the seconds from the start of two processes to the end of the first step on both, the processors' seconds
    of both, and the loss.
    """
    shared = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    shared |= dict(TORCHINDUCTOR_CACHE_DIR=cache, OMP_NUM_THREADS="1", PYTHONPATH=str(_ROOT))
    begin = time.time()
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank-of", contender, path],
            env=os.environ | shared | dict(RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [json.loads(rank.communicate(timeout=600)[0].strip().splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return {"s": max(s["end"] for s in said) - begin, "cpu_s": sum(s["cpu"] for s in said), "loss": said[0]["loss"]}


def _ratio(pairs: list[dict[str, dict[str, float]]], what: str) -> float:
    return statistics.median(pair["ours"][what] / pair["fsdp"][what] for pair in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description="Time to the first compiled step against compiled FSDP2.")
    parser.add_argument("--starts", type=int, default=3, help="how often each is started")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rank-of", nargs=2, metavar=("CONTENDER", "PLAN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        _work(*options.rank_of)
    from partitioner import Constraints, Topology, partition

    found: dict[str, list[dict[str, dict[str, float]]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "plan.json")
        pinned = Constraints(pp=1, dp=2, tp=1, zero=3)
        partition(WORK.whole(), Topology.local(2), WORK.batch(), constraints=pinned).save(path)
        for turn in range(options.starts):
            for state, pairs in found.items():
                pair = {who: _start(who, path, f"{folder}/{who}{turn}") for who in ("ours", "fsdp")}
                if abs(pair["ours"]["loss"] - pair["fsdp"]["loss"]) > 1e-4:
                    raise RuntimeError(f"the losses differ: {pair}")
                pairs.append(pair)
                print(state, *(f"{who} {p['s']:.2f} s ({p['cpu_s']:.2f} s CPU)" for who, p in pair.items()), flush=True)
    ratios = {f"{state} {what}": _ratio(pairs, what) for state, pairs in found.items() for what in ("s", "cpu_s")}
    for state, limit in LIMITS.items():
        time_, cpu = ratios[f"{state} s"], ratios[f"{state} cpu_s"]
        print(f"{state} start, ours / FSDP2: {time_:.3f} of the time (at most {limit}), {cpu:.3f} of the CPU time")
    if options.json:
        print(json.dumps({"ratios": ratios, "starts": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
