"""Every architecture that transformers maps to a task: does it export, is its plan equal to it, how much is sharded.

Builds a tiny model of each (``zoo_models.py``), plans it on the given meshes and verifies the plans in float64. Each
model has a process of its own, with a time limit. Results go to a file of JSON lines, from which a sweep goes on where
it was left; ``--retry`` takes up again what failed.

    python benchmarks/zoo.py [--mesh 1,1,2 --mesh 2,1,2] [--only causal:llama ...] [--limit 20] [--retry] [--json]
    python benchmarks/zoo.py --report --write-docs
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing as mp
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402

Mesh = tuple[int, int, int]
Key = tuple[str, Mesh]
Result = dict[str, Any]

MESHES: list[Mesh] = [(1, 1, 2), (2, 1, 1), (2, 1, 2), (1, 2, 2)]  # unless others are asked for
_MOST_WALL = 20  # times the processor time that is allowed: other programs may have the processors
_RESULTS = _ROOT / "out" / "zoo.jsonl"
# What every process needs: loaded once, before the processes are forked.
_PRELOAD = [
    "torch", "torch.export", "torch._dynamo", "torch.distributed", "torch.fx.experimental.validator", "networkx",
    "ortools.math_opt.python.mathopt", "pydantic", "scipy.optimize", "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama",
    "transformers.models.bart.modeling_bart", "transformers.models.vit.modeling_vit", "benchmarks.zoo_worker",
]  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", action="append", metavar="PP,DP,TP", help="may be repeated; default: the usual ones")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="KIND:NAME", help="with wildcards")
    parser.add_argument("--limit", type=int, help="that many architectures, drawn by chance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=int, default=180, help="processor seconds per architecture and mesh")
    parser.add_argument("--retry", action="store_true", help="take up again what is not equal")
    parser.add_argument("--again", action="store_true", help="take up again everything that is asked for")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="file of JSON lines")
    parser.add_argument("--report", action="store_true", help="only report what is there")
    parser.add_argument("--write-docs", action="store_true", help="write docs/zoo.md")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    return parser.parse_args()


def main() -> None:
    options = _arguments()
    meshes = [_mesh(text) for text in options.mesh] if options.mesh else MESHES
    known = load(options.results)
    if not options.report:
        wanted = _wanted(options)
        done = {k for k, r in known.items() if not options.again and (r["status"] == "equal" or not options.retry)}
        wanted.sort(key=lambda name: _turn([known[name, m] for m in MESHES if (name, m) in known]))
        sweep([(n, [m for m in meshes if (n, m) not in done]) for n in wanted], options.results, options.timeout)
        known = load(options.results)
    from benchmarks.zoo_report import print_report, summary, write_docs

    if options.write_docs:
        Console().print(f"wrote {write_docs(known, _ROOT / 'docs' / 'zoo.md')}")
    chosen = {key: r for key, r in known.items() if any(fnmatch.fnmatch(key[0], p) for p in options.only)}
    if options.json:
        print(json.dumps(summary(chosen), indent=2))
    else:
        print_report(chosen)


def _mesh(text: str) -> Mesh:
    pp, dp, tp = map(int, text.split(","))
    return pp, dp, tp


def _turn(results: list[Result]) -> tuple[bool, bool]:
    """What was never tried comes first, and what failed on another mesh last."""
    return bool(results), any(r["status"] != "equal" for r in results)


def _wanted(options: argparse.Namespace) -> list[str]:
    from benchmarks.zoo_models import architectures

    names = [n for n in architectures() if any(fnmatch.fnmatch(n, p) for p in options.only)]
    random.Random(options.seed).shuffle(names)
    return names[: options.limit]


# --- results ----------------------------------------------------------------------------------------------------------


def load(path: Path) -> dict[Key, Result]:
    """The last result of each architecture and mesh. A last line that was cut off is left out."""
    found: dict[Key, Result] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            result = json.loads(line)
        except ValueError:
            continue
        found[result["name"], _mesh(",".join(map(str, result["mesh"])))] = result
    return found


def _append(path: Path, result: Result) -> None:
    """Add a whole line at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(result) + "\n")
        file.flush()
        os.fsync(file.fileno())


# --- the sweep --------------------------------------------------------------------------------------------------------


def sweep(work: Iterable[tuple[str, list[Mesh]]], path: Path, timeout_s: int) -> None:
    work = [(name, meshes) for name, meshes in work if meshes]
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    counts: Counter[str] = Counter()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("zoo", total=sum(len(meshes) for _, meshes in work))
        for name, meshes in work:
            for result in _run(context, name, meshes, timeout_s):
                _append(path, result)
                counts[result["status"]] += 1
                shown = ", ".join(f"{n} {status}" for status, n in counts.most_common())
                progress.update(task, advance=1, description=f"{name} | {shown}")


def _run(context: Any, name: str, meshes: list[Mesh], timeout_s: int) -> Iterator[Result]:
    """The results of one architecture, whatever happens to its process."""
    from benchmarks.zoo_child import child

    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(name, meshes, theirs, timeout_s), daemon=True)
    process.start()
    theirs.close()
    left, start = list(meshes), time.monotonic()
    status, reason = "timeout", f"more than {timeout_s} processor seconds"
    while left:
        if not ours.poll(_MOST_WALL * timeout_s):  # it waits for something that does not come
            reason = f"more than {_MOST_WALL * timeout_s} s"
            break
        try:
            result = ours.recv()
        except EOFError:
            process.join(5)
            if process.exitcode != -signal.SIGXCPU:
                status, reason = "crashed", f"the process ended with {process.exitcode}"
            break
        if result is None:
            break
        left.remove(_mesh(",".join(map(str, result["mesh"]))))
        yield result
    process.kill()
    process.join()
    for mesh in left:
        yield dict(name=name, mesh=list(mesh), seconds=round(time.monotonic() - start, 2), status=status, reason=reason)


if __name__ == "__main__":
    main()
