"""Faults: are they named, does everybody leave, does the run go on where it was?

    python benchmarks/faults.py --seed 0 --count 40 --json

Every case trains a small model under a random plan of two to four ranks, as processes over Gloo, with one fault in one
rank: killed, stopped, an error in forward, backward or a collective, a NaN, cut connections, a full disk, a slow rank.
The rank and the instruction that the watch names are compared with where the fault was put; then the run is started
again, resumes from its newest checkpoint, and its weights and moments are compared with those of a run without faults,
bit by bit. The last line is one JSON object:

``injected``       cases
``named``          with the right rank and instruction (and the graph node, where the fault was put at one);
                   of connections that were cut the rank, or both ends of the link
``hangs``          that nobody noticed, until the time for the case was out
``resumed``        of those that the fault ended, how many went on from a checkpoint (``resumable``: how many should)
``resumed_equal``  of these, how many ended in the same bits as the run without faults
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import save_file

from benchmarks.faults_inject import KINDS, Fault, wipe
from benchmarks.faults_worker import EVERY, SLOW_STEPS, STEPS, Data, Model, train
from partitioner import Constraints, LocalRanks, Monitor, RankError, RankTimeout, Topology, partition
from partitioner.runtime.checkpoint.save import list_saved_states
from partitioner.runtime.checkpoint.shards import list_written_states
from partitioner.runtime.errors import LOST, Failure
from partitioner.runtime.program.program import Program
from partitioner.runtime.watch.status_board import StatusBoard
from partitioner.runtime.watch.stragglers import SlowRank, SlowRanks

MESHES = [
    {"pp": 2}, {"dp": 2}, {"tp": 2}, {"pp": 3}, {"dp": 3}, {"tp": 3}, {"pp": 4}, {"dp": 4}, {"tp": 4},
    {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}, {"dp": 2, "tp": 2},
    # ranks that have not as many microbatches
    {"dp": 4, "microbatch_size": 2}, {"dp": 2, "microbatch_size": 4, "zero": 3},
    {"pp": 2, "dp": 2, "microbatch_size": 4}, {"dp": 2, "tp": 2, "microbatch_size": 4},
]  # fmt: skip
_LONG_S = 60.0  # of patience with a run without a fault, on a machine that others use


@dataclass(frozen=True)
class Planned:
    mesh: dict[str, int]
    path: str
    program: Program

    @property
    def ranks(self) -> int:
        return self.program.world_size


class Bench:
    """Plans, references and ranks, each made once."""

    def __init__(self, folder: Path, patience_s: float) -> None:
        self.folder = folder
        self.patience_s = patience_s
        torch.manual_seed(0)
        self.model = Model()
        self.weights = str(folder / "weights.safetensors")
        save_file(self.model.state_dict(), self.weights)
        self._plans: dict[str, Planned] = {}
        self._references: dict[str, list[Any]] = {}
        self._pools: dict[int, LocalRanks] = {}

    def plan(self, mesh: dict[str, int]) -> Planned:
        key = json.dumps(mesh)
        if key not in self._plans:
            axes = {"pp": 1, "dp": 1, "tp": 1, "microbatch_size": 12 // mesh.get("dp", 1) // 3 or 1, **mesh}
            topology = Topology.local(axes["pp"] * axes["dp"] * axes["tp"])
            plan = partition(self.model, topology, next(Data()), constraints=Constraints(**axes))
            path = self.folder / f"plan-{len(self._plans)}.json"
            plan.save(path)
            self._plans[key] = Planned(mesh, str(path), plan.program)
        return self._plans[key]

    def pool(self, ranks: int) -> LocalRanks:
        return self._pools.setdefault(ranks, LocalRanks(ranks))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def train(
        self, plan: Planned, root: Path, watch: Path, fault: Fault | None, limit: float, steps: int = STEPS
    ) -> list[Any]:
        watch.mkdir(exist_ok=True)
        wipe(watch)
        ends = fault is not None and fault.kind != "slow"
        monitor = Monitor(watch, self.patience_s if ends else _LONG_S)
        arguments = (plan.path, self.weights, str(root), str(watch), fault, steps)
        return self.pool(plan.ranks).call(train, *arguments, timeout=limit, watch=monitor)

    def reference(self, plan: Planned, steps: int = STEPS) -> list[Any]:
        key = f"{plan.path} {steps}"
        if key not in self._references:
            root = self.folder / f"reference-{len(self._references)}"
            self._references[key] = self.train(plan, root, self.folder / "watch", None, 300.0, steps)
        return self._references[key]


@dataclass
class Outcome:
    kind: str
    mesh: dict[str, int]
    struck: dict[str, Any] | None = None
    told: str = ""
    named: bool = False
    hang: bool = False
    ended: bool = True
    resumed: bool = False
    equal: bool = False
    detect_s: float = 0.0


def draw(random_: random.Random, bench: Bench, kind: str) -> tuple[Planned, Fault]:
    """A plan in which the fault is possible, and the fault."""
    meshes = [m for m in MESHES if kind != "raise_collective" or m.get("tp", 1) > 1]
    plan = bench.plan(random_.choice(meshes))
    ranks = list(range(plan.ranks))
    if kind == "disk":  # one that writes
        states = list_saved_states(plan.program)
        ranks = [r for r in ranks if list_written_states(plan.program.rank(r), states)]
    if kind == "slow":
        return plan, Fault(kind, random_.choice(ranks), random_.randrange(16, 20), random_.random())
    return plan, Fault(kind, random_.choice(ranks), random_.randrange(EVERY, STEPS - 1), random_.random())


def one(bench: Bench, plan: Planned, fault: Fault, number: int) -> Outcome:
    outcome = Outcome(fault.kind, plan.mesh)
    if fault.kind == "slow":
        return slow(bench, plan, fault, number)
    expected = bench.reference(plan)
    root, watch = bench.folder / f"checkpoints-{number}", bench.folder / "watch"
    failure: Failure | None = None
    start = time.monotonic()
    try:
        done = bench.train(plan, root, watch, fault, 120.0)
        outcome.ended = False
    except RankError as error:
        failure = error.failure
    except RankTimeout as error:
        outcome.hang, outcome.told = True, str(error)
    outcome.detect_s = time.monotonic() - start
    struck_file = watch / "struck.json"
    outcome.struck = json.loads(struck_file.read_text()) if struck_file.exists() else None
    if failure is not None:
        outcome.told = str(failure)
        outcome.named = outcome.struck is not None and _named(failure, outcome.struck, fault)
    if not outcome.ended:
        outcome.named, outcome.told = False, "the run went on to its end"
        outcome.equal = [d["hash"] for d in done] == [e["hash"] for e in expected]
        return outcome
    done = bench.train(plan, root, watch, None, 120.0)
    outcome.resumed = all(d["resumed"] > 0 for d in done)
    outcome.equal = [d["hash"] for d in done] == [e["hash"] for e in expected]
    return outcome


def slow(bench: Bench, plan: Planned, fault: Fault, number: int) -> Outcome:
    """A run that goes on: the slow rank is told while it does."""
    outcome = Outcome(fault.kind, plan.mesh, ended=False)
    expected = bench.reference(plan, SLOW_STEPS)
    root, watch = bench.folder / f"checkpoints-{number}", bench.folder / "watch"
    told: list[SlowRank] = []
    end = threading.Event()

    def look() -> None:
        ranks = None
        while not end.wait(0.02):
            if ranks is None and len(list(watch.glob("rank-*.times"))) == plan.ranks:
                ranks = SlowRanks(StatusBoard(watch), factor=3.0)
            told.extend(ranks.look() if ranks is not None else ())

    watch.mkdir(exist_ok=True)
    wipe(watch)
    looking = threading.Thread(target=look)
    looking.start()
    try:
        done = bench.train(plan, root, watch, fault, 300.0, SLOW_STEPS)
    except RankTimeout as error:
        outcome.hang, outcome.told = True, str(error)
        return outcome
    finally:
        end.set()
        looking.join()
    outcome.struck = json.loads((watch / "struck.json").read_text())
    outcome.told = "; ".join(map(str, told)) or "no rank was told to be slow"
    outcome.named = {(s.rank, s.index) for s in told} == {(outcome.struck["rank"], outcome.struck["index"])}
    outcome.equal = [d["hash"] for d in done] == [e["hash"] for e in expected]
    return outcome


def _named(failure: Failure, struck: dict[str, Any], fault: Fault) -> bool:
    """Whether the line says rank, instruction and node as they were."""
    if fault.kind == "disk":
        return failure.rank == struck["rank"] and failure.instruction == "saving"
    if fault.kind == "close":  # noticed where the connection is next used, by either end; of two, both are named
        ends = re.match(r"lost its connection to rank (\d+), and", failure.error)
        return failure.kind == LOST and struck["rank"] in (failure.rank, int(ends[1]) if ends else None)
    right = failure.rank == struck["rank"] and failure.index == struck["index"] and failure.step == fault.step + 1
    return right and (not struck["node"] or failure.node.split(" ")[0] == struck["node"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--patience", type=float, default=8.0, help="seconds without movement that count as a stall")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    options = parser.parse_args()
    random_ = random.Random(options.seed)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="faults-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        bench = Bench(Path(name), options.patience)
        for number in range(options.count):
            kind = options.kinds[number % len(options.kinds)]
            plan, fault = draw(random_, bench, kind)
            outcome = one(bench, plan, fault, number)
            outcomes.append(outcome)
            if not options.json:
                told = "" if outcome.named and (outcome.equal or not outcome.ended) else f"\n  struck {outcome.struck}"
                words = "named" if outcome.named else "NOT NAMED"
                words += ", equal" if outcome.equal else ", NOT EQUAL"
                print(f"{number:3} {kind} {plan.mesh} {fault.step}: {words}, {outcome.detect_s:.1f} s{told}")
                print(f"  {outcome.told[:600]}", flush=True)
        bench.close()
    print(json.dumps(summary(outcomes, options)))


def summary(outcomes: list[Outcome], options: argparse.Namespace) -> dict[str, Any]:
    ended = [o for o in outcomes if o.ended]
    kinds: dict[str, Counter[str]] = {}
    for o in outcomes:
        kinds.setdefault(o.kind, Counter()).update(injected=1, named=int(o.named), equal=int(o.equal))
    return {
        "seed": options.seed,
        "injected": len(outcomes),
        "named": sum(o.named for o in outcomes),
        "hangs": sum(o.hang for o in outcomes),
        "resumable": len(ended),
        "resumed": sum(o.resumed for o in ended),
        "resumed_equal": sum(o.resumed and o.equal for o in ended),
        "kinds": {k: dict(c) for k, c in kinds.items()},
    }


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
