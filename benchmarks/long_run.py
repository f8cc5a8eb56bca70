"""Does a run that is killed and resumed train what one process trains?

    python benchmarks/long_run.py --steps 200 --kills 2 --seed 0 --json

Trains ``examples/corpus.py`` (a Llama of 2.3 million parameters, sequences of 128 bytes) on four processes under
torchrun, pp=2 x dp=2 with ZeRO-1 in bfloat16, and kills it at random moments. The first kill, and every other one, hits
one random rank, and torchrun starts all of them again; the others hit all ranks and torchrun at once, and the run goes
on under the next mesh. The losses are compared with those of the unmodified model in one process: in bfloat16 with
float32 copies, and in float32. What rounding alone does is measured, too: one process sums the gradients of other
microbatches, which is the same mathematics. Draws both (``--svg``); the last line is one JSON object:

``max_distance``, ``mean_distance``  between the losses of the run and of one process, over all steps
``spread_max``, ``spread_mean``      the same between runs of one process which differ by rounding: the two farthest
``quarters``                         mean distance and mean spread in each quarter of the run: both grow, since training
                                     carries every difference on
``fp32_max``, ``fp32_mean``          the same between one process in bfloat16 and in float32
``resumed``                          for every kill: who, after which step, from which step it went on, on which mesh
``repeated``, ``repeated_equal``     steps done again after a kill under the same mesh, and how many of these have the
                                     same loss and gradient norm, bit by bit
``moved``, ``moved_max``             steps done again under another mesh, and how far their losses are apart
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil

from benchmarks.curves import Curves, Mark, draw_curves
from benchmarks.long_run_single import single
from examples.corpus import BATCH, Corpus
from partitioner.runtime.files import write_text
from partitioner.runtime.observe.metrics import FILE

ROOT = Path(__file__).resolve().parent.parent
RANKS = 4
MESHES = ("pp=2,dp=2", "tp=2,dp=2", "pp=4")  # one after the other, and again, where all ranks are lost
PLAN = "zero=1,microbatch_size=1"
EVERY = 20  # steps between checkpoints
_PAUSE_S = 0.05


@dataclass(frozen=True)
class Resumption:
    """``after``: the last step that was seen before the kill; ``start``: of the checkpoint that was gone on from."""

    killed: str
    after: int
    start: int
    mesh: str


Step = dict[str, float]  # a line of metrics.jsonl: step, loss, norm, seconds; start: of the checkpoint gone on from


@dataclass(frozen=True)
class Told:
    """What a run has written: the steps of each attempt, and what was done to it between."""

    attempts: list[list[Step]]
    resumptions: list[Resumption]

    def losses(self) -> list[float]:
        """The loss of every step, as it was done last."""
        last = {int(s["step"]): s["loss"] for attempt in self.attempts for s in attempt}
        return [last[k] for k in sorted(last)]


def attempts_of(steps: list[Step]) -> list[list[Step]]:
    """A new one has another start, or goes back."""
    attempts: list[list[Step]] = []
    for step in steps:
        last = attempts[-1][-1] if attempts else None
        if last is None or step["start"] != last["start"] or step["step"] <= last["step"]:
            attempts.append([])
        attempts[-1].append(step)
    return attempts


class Run:
    """The processes of a run, launched again under other meshes, in one folder."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.log = folder / "log.txt"
        self.launches = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def mesh(self) -> str:
        return MESHES[(self.launches - 1) % len(MESHES)]

    def launch(self) -> None:
        self.launches += 1
        options = self.options
        command = [
            sys.executable,
            "-m",
            "partitioner.runtime.launch.torchrun",
            "--standalone",
            f"--nproc-per-node={RANKS}",
        ]
        command += [f"--max-restarts={options.kills + 1}", "--monitor-interval=0.2"]
        command += [str(ROOT / "examples" / "corpus.py"), "--mesh", f"{self.mesh},{PLAN}", "--folder", str(self.folder)]
        command += ["--steps", str(options.steps), "--save-every", str(options.every), "--size", options.size]
        command += ["--batch", str(options.batch), "--precision", options.precision]
        with self.log.open("ab") as log:
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def attempts(self) -> list[list[Step]]:
        path = self.folder / FILE
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return attempts_of([json.loads(line) for line in lines if line.endswith("\n")])

    def wait(self, ready: Callable[[], bool]) -> None:
        """Until ``ready()``. Raises ``RuntimeError`` where the run ends before, or nothing comes for too long."""
        assert self.process is not None
        seen, since = -1, time.monotonic()
        while not ready():
            if self.process.poll() is not None:
                if ready():
                    return
                raise RuntimeError(f"the run ended early, see the end of its log:\n{self.log.read_text()[-4000:]}")
            size = self.log.stat().st_size
            if size != seen:
                seen, since = size, time.monotonic()
            if time.monotonic() - since > self.options.patience:
                raise RuntimeError(f"no word for {self.options.patience} s:\n{self.log.read_text()[-4000:]}")
            time.sleep(_PAUSE_S)

    def wait_for_end(self) -> None:
        """Raises ``RuntimeError`` where it fails."""
        process = self.process
        assert process is not None
        self.wait(lambda: process.poll() == 0)

    def ranks(self) -> dict[int, psutil.Process]:
        assert self.process is not None
        found = {}
        for child in psutil.Process(self.process.pid).children():
            rank = child.environ().get("RANK")
            if rank is not None:
                found[int(rank)] = child
        return found

    def kill(self, rank: int | None) -> None:
        """With SIGKILL ``rank``, or all ranks and torchrun."""
        assert self.process is not None
        victims = self.ranks()
        if rank is not None:
            victims[rank].send_signal(signal.SIGKILL)
            return
        self.process.kill()  # first, so that it starts nobody anew
        for victim in victims.values():
            victim.send_signal(signal.SIGKILL)
        self.process.wait()
        psutil.wait_procs(victims.values(), timeout=60)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill(None)


def train(folder: Path, options: argparse.Namespace, random_: random.Random) -> Told:
    """Train to the end, killed on the way."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run, resumptions = Run(folder, options), list[Resumption]()
    part = options.steps / (
        options.kills + 1
    )  # one kill in each, half a part late: neither at the start nor at the end
    moments = [int((k + 0.5 + random_.random()) * part) + 1 for k in range(options.kills)]
    run.launch()
    try:
        for number, moment in enumerate(moments):
            run.wait(lambda n=number, m=moment: len(found := run.attempts()) > n and found[n][-1]["step"] >= m)
            last = run.attempts()[number][-1]
            time.sleep(random_.random() * last["seconds"])  # anywhere in the step
            rank = random_.randrange(RANKS) if number % 2 == 0 else None
            after = int(run.attempts()[number][-1]["step"])
            run.kill(rank)
            if rank is None:
                run.launch()
            run.wait(lambda n=number: len(run.attempts()) > n + 1)
            start = int(run.attempts()[number + 1][0]["start"])
            killed = "all ranks" if rank is None else f"rank {rank}"
            resumptions.append(Resumption(killed, after, start, run.mesh))
            say(options, f"{killed} killed after step {after}; went on from step {start} as {run.mesh}")
        run.wait_for_end()
        attempts = run.attempts()
    finally:
        run.close()
    if len(attempts) != options.kills + 1:
        raise RuntimeError(f"{options.kills} kills and {len(attempts)} attempts: see {run.log}")
    return Told(attempts, resumptions)


def repeats(told: Told) -> tuple[list[bool], list[float]]:
    """For repeated steps: whether loss and norm have equal bits (same mesh), and how far they differ (another mesh)."""
    same, moved = list[bool](), list[float]()
    before: dict[int, tuple[str, Step]] = {}
    meshes = [MESHES[0], *(r.mesh for r in told.resumptions)]
    for mesh, attempt in zip(meshes, told.attempts, strict=True):
        for new in attempt:
            step = int(new["step"])
            if step in before:
                where, old = before[step]
                if where == mesh:
                    same.append((old["loss"], old["norm"]) == (new["loss"], new["norm"]))
                else:
                    moved.append(abs(old["loss"] - new["loss"]))
            before[step] = mesh, new
    return same, moved


def distance(one: list[float], other: list[float]) -> tuple[float, float]:
    """The largest and the mean."""
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return max(apart), statistics.fmean(apart)


def references(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Losses of one process: what is in ``folder`` of these settings is taken."""
    sizes = [n for n in range(options.batch, 0, -1) if options.batch % n == 0]
    asked = [(options.precision, size) for size in sizes]
    asked += [("fp32", options.batch)] if options.precision != "fp32" else []
    found = {}
    for precision, microbatch in asked:
        name = f"{precision} in microbatches of {microbatch}"
        path = folder / f"single-{options.size}-{precision}-{options.batch}-{microbatch}.json"
        losses: list[float] = json.loads(path.read_text()) if path.exists() else []
        if len(losses) < options.steps:
            say(options, f"one process: {name}")
            losses = single(options.size, precision, options.batch, microbatch, options.steps)
            write_text(path, json.dumps(losses))
        found[f"{precision}/{microbatch}"] = losses[: options.steps]
    return found


def say(options: argparse.Namespace, words: str) -> None:
    if not options.json:
        print(words, flush=True)


def summary(told: Told, singles: dict[str, list[float]], options: argparse.Namespace) -> dict[str, Any]:
    losses = told.losses()
    judge = singles[f"{options.precision}/{options.batch}"]
    alike = [curve for name, curve in singles.items() if name.startswith(f"{options.precision}/")]
    spreads = [distance(a, b) for a, b in combinations(alike, 2)]
    quarters = [slice(k * options.steps // 4, (k + 1) * options.steps // 4) for k in range(4)]
    same, moved = repeats(told)
    largest, mean = distance(losses, judge)
    found: dict[str, Any] = {
        "steps": options.steps,
        "seed": options.seed,
        "corpus": hashlib.sha256(Corpus().content).hexdigest()[:16],
        "first_loss": losses[0],
        "last_loss": statistics.fmean(losses[-10:]),
        "last_loss_single": statistics.fmean(judge[-10:]),
        "max_distance": largest,
        "mean_distance": mean,
        "spread_max": max((s[0] for s in spreads), default=0.0),
        "spread_mean": max((s[1] for s in spreads), default=0.0),
        "quarters": [
            [
                distance(losses[q], judge[q])[1],
                max((distance(a[q], b[q])[1] for a, b in combinations(alike, 2)), default=0),
            ]
            for q in quarters
        ],
    }
    if options.precision != "fp32":
        found["fp32_max"], found["fp32_mean"] = distance(judge, singles[f"fp32/{options.batch}"])
    return found | {
        "kills": len(told.resumptions),
        "resumed": [asdict(r) for r in told.resumptions],
        "repeated": len(same),
        "repeated_equal": sum(same),
        "moved": len(moved),
        "moved_max": max(moved, default=0.0),
    }


def curves(told: Told, singles: dict[str, list[float]], options: argparse.Namespace) -> Curves:
    alike = [curve for name, curve in singles.items() if name.startswith(f"{options.precision}/")]
    marks = [
        Mark(r.after, f"{r.killed} killed, on from step {r.start} as {r.mesh.replace(',', ' ')}")
        for r in told.resumptions
    ]
    return Curves(
        run=told.losses(),
        single=singles[f"{options.precision}/{options.batch}"],
        alike=alike[1:],
        exact=singles.get(f"fp32/{options.batch}"),
        marks=marks,
        precision=options.precision,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and ranks of the kills")
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences in a global batch")
    parser.add_argument("--every", type=int, default=EVERY, help="steps between checkpoints")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--size", choices=["small", "tiny"], default="small")
    parser.add_argument("--folder", type=Path, default=Path("out/long_run"))
    parser.add_argument("--svg", type=Path, help="draw the losses to this file")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds without a word that end it")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    options = parser.parse_args()
    if not 0 <= options.kills <= options.steps // 4:
        parser.error(f"--kills must be between 0 and {options.steps // 4}, a quarter of --steps")
    told = train(options.folder / "run", options, random.Random(options.seed))
    singles = references(options.folder, options)
    if options.svg:
        write_text(options.svg, draw_curves(curves(told, singles, options)))
    print(json.dumps(summary(told, singles, options)))


if __name__ == "__main__":
    main()
