"""How long a compiled run takes from process start to its first completed step, against torch's own compilation.

* ``zero3``: two Gloo ranks train a Llama of eight layers with its states sharded, against FSDP2 over compiled layers.
* ``one``: one process trains a narrow Llama of 32 layers, against ``torch.compile(model)``.

Each start has fresh processes; a cold one also has an empty folder for what Inductor keeps on disk, and a warm one that
of the cold start before. (Inductor keeps its precompiled header elsewhere: only the peer of a machine's first start
makes it.) The plan is given. Beside the time, the processors' time of all ranks and of the compilers that they start is
compared, which depends less on other jobs of the machine.

    python benchmarks/compiled_start.py [--only zero3] [--starts 3] [--backend inductor] [--layers N] [--json] [--check]
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.common import Llama, LlamaConfig, Step, Workload, _free_port, _tokens, cross_entropy  # noqa: E402


@dataclass(frozen=True)
class Case:
    """A model on ``ranks`` ranks, our ``constraints``, the ``peer``, and the greatest accepted ratio of our time to the
    peer's for each kind of start that is measured.
    """

    config: LlamaConfig
    ranks: int
    constraints: dict[str, Any]
    peer: str
    limits: dict[str, float]

    @property
    def work(self) -> Workload:
        return Workload("llama", lambda: Llama(self.config), lambda: _tokens(self.config, 8), cross_entropy)


_NARROW = LlamaConfig(dim=128, num_heads=4, num_kv_heads=2, ffn_dim=256, vocab=512, num_layers=32)
CASES = {
    "zero3": Case(LlamaConfig(num_layers=8), 2, dict(pp=1, dp=2, tp=1, zero=3), "fsdp", {"cold": 0.6, "warm": 0.8}),
    "one": Case(_NARROW, 1, dict(pp=1, dp=1, tp=1), "compile", {"cold": 0.5}),
}


def _ours(case: Case, path: str, backend: str) -> Step:
    import partitioner

    plan, compiled = partitioner.Plan.load(path), True if backend == "inductor" else backend
    engine = partitioner.Engine(plan, weights=case.work.whole(), compile=compiled)
    optimizer = torch.optim.AdamW(engine.parameters())

    def step() -> float:
        loss = engine.step(case.work.batch()).item()
        optimizer.step()
        return loss

    return step


def _fsdp(case: Case, path: str, backend: str) -> Step:
    """Return a step of FSDP2 over layers that are compiled one by one, as torchtitan has it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = case.work.whole()
    assert isinstance(model.model, Llama)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        layer.compile(backend=backend)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> float:
        loss = model(*(t.chunk(2)[dist.get_rank()] for t in case.work.batch()))
        loss.backward()
        optimizer.step()
        whole = loss.detach() / 2
        dist.all_reduce(whole)
        return float(whole)

    return step


def _compile(case: Case, path: str, backend: str) -> Step:
    """Return a step of ``torch.compile(model)``."""
    model = case.work.whole()
    called = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> float:
        loss = called(*case.work.batch())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


_CONTENDERS: dict[str, Callable[[Case, str, str], Step]] = {"ours": _ours, "fsdp": _fsdp, "compile": _compile}


def _work(contender: str, case: Case, path: str, backend: str) -> None:
    """Run one step on a rank, and print the time at its end and the loss."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loss = _CONTENDERS[contender](case, path, backend)()
    end, used = time.time(), os.times()
    print(json.dumps({"end": end, "loss": loss, "cpu": sum(used[:4])}), flush=True)
    dist.barrier()
    os._exit(0)


def _start(contender: str, case: Case, path: str, backend: str, cache: str) -> dict[str, float]:
    """Return the seconds from the start of the processes to the end of the first step on all, the processors' seconds
    of all, and the loss.
    """
    count = str(case.ranks)
    shared = dict(WORLD_SIZE=count, LOCAL_WORLD_SIZE=count, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    shared |= dict(TORCHINDUCTOR_CACHE_DIR=cache, OMP_NUM_THREADS="1", PYTHONPATH=str(_ROOT))
    begin = time.time()
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank-of", contender, json.dumps(asdict(case)), path, backend],
            env=os.environ | shared | dict(RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(case.ranks)
    ]
    try:
        said = [json.loads(rank.communicate(timeout=600)[0].strip().splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return {"s": max(s["end"] for s in said) - begin, "cpu_s": sum(s["cpu"] for s in said), "loss": said[0]["loss"]}


_Pair = dict[str, dict[str, float]]  # of neighbouring starts: contender -> seconds, processors' seconds, loss


def _measure(case: Case, starts: int, backend: str) -> dict[str, list[_Pair]]:
    """Return the pairs of ``starts`` starts of ours and of the peer, by kind of start. Raise RuntimeError if their
    losses differ.
    """
    from partitioner import Constraints, Topology, partition

    found: dict[str, list[_Pair]] = {state: [] for state in case.limits}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "plan.json")
        pinned = Constraints(**case.constraints)
        partition(case.work.whole(), Topology.local(case.ranks), case.work.batch(), constraints=pinned).save(path)
        for turn in range(starts):
            for state, pairs in found.items():
                contenders = "ours", case.peer
                pair = {who: _start(who, case, path, backend, f"{folder}/{who}{turn}") for who in contenders}
                if abs(pair["ours"]["loss"] - pair[case.peer]["loss"]) > 1e-4:
                    raise RuntimeError(f"the losses differ: {pair}")
                pairs.append(pair)
                print(state, *(f"{who} {p['s']:.2f} s ({p['cpu_s']:.2f} s CPU)" for who, p in pair.items()), flush=True)
    return found


def _ratio(pairs: list[_Pair], peer: str, what: str) -> float:
    return statistics.median(pair["ours"][what] / pair[peer][what] for pair in pairs)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time to the first compiled step against torch's own compilation.")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--starts", type=int, default=3, help="how often each is started")
    parser.add_argument("--backend", default="inductor", help="torch's backend, of ours and of the peer")
    parser.add_argument("--layers", type=int, metavar="N", help="layers of the model, instead of the case's")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a ratio is above its limit")
    parser.add_argument("--rank-of", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank_of:
        contender, described, path, backend = options.rank_of
        given = json.loads(described)
        _work(contender, Case(**(given | {"config": LlamaConfig(**given["config"])})), path, backend)

    ratios: dict[str, float] = {}
    above = False
    for name, case in CASES.items():
        if options.only not in name:
            continue
        if options.layers:
            case = replace(case, config=replace(case.config, num_layers=options.layers))
        for state, pairs in _measure(case, options.starts, options.backend).items():
            time_, cpu = (_ratio(pairs, case.peer, what) for what in ("s", "cpu_s"))
            ratios |= {f"{name} {state} s": time_, f"{name} {state} cpu_s": cpu}
            limit = case.limits[state]
            above = above or time_ > limit
            print(f"{name} {state}: {time_:.3f} of {case.peer}'s time (at most {limit}), {cpu:.3f} of its CPU time")
    if options.json:
        print(json.dumps({"ratios": ratios}))
    return 1 if options.check and above else 0


if __name__ == "__main__":
    sys.exit(main())
