"""How long a compiled run takes from process start to its first completed step, against FSDP2 over compiled layers.

Two Gloo ranks train a Llama of eight layers with its states sharded. Each start has fresh processes; a cold one also
has an empty folder for what Inductor keeps on disk, and a warm one that of the cold start before. The plan is given.

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
    print(json.dumps({"end": time.time(), "loss": loss}), flush=True)
    dist.barrier()
    os._exit(0)


def _start(contender: str, path: str, cache: str) -> tuple[float, float]:
    """Return the seconds from the start of two processes to the end of the first step on both, and the loss."""
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
    return max(s["end"] for s in said) - begin, said[0]["loss"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Time to the first compiled step against compiled FSDP2.")
    parser.add_argument("--starts", type=int, default=3, help="how often each is started")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rank-of", nargs=2, metavar=("CONTENDER", "PLAN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        _work(*options.rank_of)
    from partitioner import Constraints, Topology, partition

    times: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "plan.json")
        pinned = Constraints(pp=1, dp=2, tp=1, zero=3)
        partition(WORK.whole(), Topology.local(2), WORK.batch(), constraints=pinned).save(path)
        for turn in range(options.starts):
            for state, found in times.items():
                took = {who: _start(who, path, f"{folder}/{who}{turn}") for who in ("ours", "fsdp")}
                if abs(took["ours"][1] - took["fsdp"][1]) > 1e-4:
                    raise RuntimeError(f"the losses differ: {took}")
                found.append({who: seconds for who, (seconds, _) in took.items()})
                print(state, found[-1], flush=True)
    ratios = {state: statistics.median(t["ours"] / t["fsdp"] for t in found) for state, found in times.items()}
    for state, ratio in ratios.items():
        print(f"{state} start, ours / FSDP2: {ratio:.3f} (at most {LIMITS[state]})")
    if options.json:
        print(json.dumps({"ratios": ratios, "seconds": times}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
