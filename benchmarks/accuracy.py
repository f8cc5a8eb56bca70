"""Score the cost model on published runs: ``python benchmarks/accuracy.py [--rows FILE] [--json]``.

Each row becomes a model by its dimensions, a topology and a plan in which what it states is pinned, and goes through
``partitioner.partition``. Errors are averaged within a family, then over families. Within groups of plans of the same
model and machine, ``regret`` is the time of the plan ranked first over the best measured, minus 1; within those of five
and more ``tau`` is Kendall's, and ``regret_of_five`` the same.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from captures import prepared
from published_models import Shape
from published_plans import FUSED, is_compiled
from published_rows import Overfull, Row, Unstated, published_job, states_a_rate, with_seconds
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from partitioner import PreparedModel, partition
from partitioner.passes.errors import PartitionError
from partitioner.runtime.files import write_text
from partitioner.topology.groups import num_communicators

ROWS = Path(__file__).resolve().parents[2] / "shared" / "published" / "runs.jsonl"
_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp32": torch.float32}
_LEAST_GROUP = 5


@dataclass(frozen=True)
class Prediction:
    """What the planner says of a row: seconds of a step, bytes of the fullest and of the first rank, or why there is
    no plan. ``skipped``: the row lacks what a job needs; ``failed``: no job or no plan could be made of it."""

    id: str
    step_time: float | None = None
    memory: int | None = None
    first_memory: int | None = None
    infeasible: str = ""
    skipped: str = ""
    failed: str = ""
    breakdown: dict[str, float] | None = None


@lru_cache(maxsize=4)
def prepared_model(shape: Shape, length: int, precision: str, global_batch: int) -> PreparedModel:
    return prepared(shape, length, _TYPES[precision], global_batch, "fp8" if precision == "fp8" else None)


def predict(row: Row) -> Prediction:
    """The plan of ``row`` by the public call; one row's error does not end the run."""
    try:
        return _predicted(row)
    except Unstated as reason:
        return Prediction(row["id"], skipped=str(reason))
    except Overfull as reason:
        return Prediction(row["id"], infeasible=str(reason))
    except Exception as error:  # of any kind: the others are still to be planned
        return Prediction(row["id"], failed=f"{type(error).__name__}: {error}")


def _predicted(row: Row) -> Prediction:
    job = published_job(row)
    try:
        model = prepared_model(job.shape, job.length, job.precision, job.global_batch)
        plan = partition(
            model,
            job.topology,
            global_batch=job.global_batch,
            constraints=job.constraints,
            profile=job.profile,
            optimizer=job.optimizer,
            estimate_only=True,
        )
    except PartitionError as error:
        return Prediction(row["id"], infeasible=str(error))
    estimate = plan.estimate
    return Prediction(
        row["id"], estimate.step_time, max(estimate.memory), estimate.memory[0], breakdown=estimate.breakdown
    )


def predictions(rows: Sequence[Row], processes: int) -> Iterator[Prediction]:
    """All rows, those of one model, and of them those of one batch, after each other."""
    work = by_model(rows)
    if processes == 1:
        for chunk in work:
            yield from map(predict, chunk)
        return
    with multiprocessing.get_context("spawn").Pool(processes, _quiet) as pool:
        for found in pool.imap_unordered(_predict_all, work):
            yield from found


def by_model(rows: Sequence[Row]) -> list[list[Row]]:
    """Lists of the rows of one model, those of one batch after each other; the longest first."""
    chunks: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda r: json.dumps([r.get(k) for k in (*_MODEL_KEYS, "gbs")], default=str)):
        chunks[json.dumps([row.get(k) for k in _MODEL_KEYS], default=str)].append(row)
    return sorted(chunks.values(), key=len, reverse=True)


_MODEL_KEYS = (
    "layers hidden heads kv_heads head_dim ffn gated_ffn vocab seq_len experts topk precision task framework".split()
)


def _predict_all(rows: list[Row]) -> list[Prediction]:
    return [predict(row) for row in rows]


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def score(rows: Iterable[Row], found: dict[str, Prediction]) -> dict[str, Any]:
    """The measures of all families and their mean."""
    families: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        families[row["family"]].append(row)
    by_family = {name: _family(members, found) for name, members in families.items()}
    whole: dict[str, Any] = {}
    for measure in ("mape", "tau", "regret", "regret_of_five", "memory_error"):
        values = [scores[measure] for scores in by_family.values() if scores[measure] is not None]
        whole[measure] = statistics.mean(values) if values else None
    planned = [r for r in rows if r["id"] in found and not found[r["id"]].skipped and not found[r["id"]].failed]
    oom = [r for r in planned if r.get("oom")]
    ran = [r for r in planned if "step_time_s" in r and not r.get("oom")]
    whole["oom_called_feasible"] = sum(not found[r["id"]].infeasible for r in oom)
    infeasible = sum(bool(found[r["id"]].infeasible) for r in ran)
    whole["fitting_called_infeasible"] = infeasible / len(ran) if ran else 0.0
    whole["families"] = by_family
    return whole


def _family(rows: Sequence[Row], found: dict[str, Prediction]) -> dict[str, Any]:
    pairs = [(r, found[r["id"]]) for r in rows]
    timed = [
        (r, p, p.step_time) for r, p in pairs if "step_time_s" in r and p.step_time is not None and not r.get("oom")
    ]
    errors = [abs(seconds / r["step_time_s"] - 1) for r, _, seconds in timed]
    ratios = [seconds / r["step_time_s"] for r, _, seconds in timed]
    memory = [
        abs(_reported(r, p) / (r["memory_gb_per_gpu"] * 1e9) - 1)
        for r, p in pairs
        if r.get("memory_gb_per_gpu") and p.memory is not None and not r.get("oom")
    ]
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row, _, seconds in timed:
        if row.get("plan_group"):
            groups[row["plan_group"]].append((seconds, row["step_time_s"]))
    ranked = [group for group in groups.values() if len(group) >= _LEAST_GROUP]
    taus = [tau for group in ranked if (tau := kendall(group)) is not None]
    regrets, of_five = (
        [min(group)[1] / min(m for _, m in group) - 1 for group in several]
        for several in ([group for group in groups.values() if len(group) > 1], ranked)
    )
    return {
        "rows": len(rows),
        "timed": len(timed),
        "mape": statistics.mean(errors) if errors else None,
        "ratio": statistics.median(ratios) if ratios else None,
        "tau": statistics.mean(taus) if taus else None,
        "regret": statistics.mean(regrets) if regrets else None,
        "regret_of_five": statistics.mean(of_five) if of_five else None,
        "memory_error": statistics.mean(memory) if memory else None,
        "skipped": sum(bool(p.skipped) for _, p in pairs),
        "failed": sum(bool(p.failed) for _, p in pairs),
        "infeasible": sum(bool(p.infeasible) and not r.get("oom") and "step_time_s" in r for r, p in pairs),
    }


def _reported(row: Row, found: Prediction) -> float:
    """Bytes as the row reports them: of the fullest rank, or where it is the driver's figure ("GB"), which counts more
    than tensors, of the first: such figures stay far below the size of devices that the same plan overflows."""
    assert found.memory is not None and found.first_memory is not None, found
    if row.get("memory_kind") != "GB":
        return found.memory
    job = published_job(row)
    kept = num_communicators(job.constraints.pinned) * job.topology.device_type(0).communicator
    return found.first_memory + job.topology.devices[0].reserved + kept


def kendall(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's tau-b of (predicted, measured)."""
    concordant = discordant = first = second = 0
    for i, (a, b) in enumerate(pairs):
        for c, d in pairs[:i]:
            agreement = (a - c) * (b - d)
            concordant += agreement > 0
            discordant += agreement < 0
            first += a != c
            second += b != d
    if not first or not second:
        return None
    return (concordant - discordant) / float(first * second) ** 0.5


def table(scores: dict[str, Any]) -> Table:
    headings = ("rows", "timed", "infeasible", "error", "median ratio", "tau", "regret", "of five", "memory")
    made = Table("family", *headings)
    for name, s in {**scores["families"], "mean over families": scores}.items():
        numbers = [_percent(s.get("mape")), _number(s.get("ratio")), _number(s.get("tau"))]
        numbers += [_percent(s.get(name)) for name in ("regret", "regret_of_five", "memory_error")]
        made.add_row(name, *(str(s.get(k, "")) for k in ("rows", "timed", "infeasible")), *numbers)
    return made


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=Path, default=ROWS, help="JSON lines; default: the published runs")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--family", action="append", help="only this family; may be given again")
    parser.add_argument("--every", type=int, default=1, help="only every so many rows of a family")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--details", type=Path, help="write every row's prediction to this file as it is found")
    parser.add_argument(
        "--resume", action="store_true", help="keep the predictions of --details and plan only the rows it lacks"
    )
    parser.add_argument("--scores", action="store_true", help="plan nothing: score the predictions that --details has")
    parser.add_argument(
        "--rates", action="store_true", help="instead, the rows that state FLOP/s and not what a step takes"
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="only rows of compiled models, with the prices of compiled plans",
    )
    options = parser.parse_args()
    rows: list[Row] = [json.loads(line) for line in options.rows.read_text().splitlines() if line.strip()]
    if options.compiled:
        rows = [{**row, FUSED: True} for row in rows if is_compiled(row)]
    if options.rates:
        rows = [with_seconds(r) for r in rows if states_a_rate(r)]
    rows = [r for r in rows if ("step_time_s" in r or r.get("oom")) and options.family in (None, *_only(options, r))]
    counts: dict[str, int] = defaultdict(int)
    kept = []
    for row in rows:
        counts[row["family"]] += 1
        if counts[row["family"]] % options.every == 0:
            kept.append(row)
    started = time.monotonic()
    console = Console(file=sys.stderr)
    of = {row["id"]: row for row in kept}
    if (options.resume or options.scores) and options.details is None:
        parser.error("--resume and --scores read the file of --details: give that too")
    known = _read(options.details) if options.resume or options.scores else {}
    found = {name: prediction for name, prediction in known.items() if name in of}
    if options.scores:
        _print([of[name] for name in found], found, f"{len(found)} of {len(kept)} rows", options.json)
        return
    with Progress(console=console) as progress, _lines(options.details, options.resume) as write:
        task = progress.add_task("planning published runs", total=len(kept), completed=len(found))
        for prediction in predictions([row for row in kept if row["id"] not in found], options.processes):
            found[prediction.id] = prediction
            write({**of[prediction.id], **{f"predicted_{k}": v for k, v in asdict(prediction).items()}})
            progress.advance(task)
    _print(kept, found, f"{len(kept)} rows in {time.monotonic() - started:.0f} s", options.json)


def unplanned(rows: Iterable[Row], found: dict[str, Prediction]) -> Iterator[str]:
    """A line for every row that was not planned, with the reason."""
    for row in rows:
        prediction = found[row["id"]]
        for kind in ("skipped", "failed"):
            if reason := getattr(prediction, kind):
                yield f"{row['id']}: {kind}: {reason}"


def _print(rows: Sequence[Row], found: dict[str, Prediction], title: str, as_json: bool) -> None:
    for line in unplanned(rows, found):
        print(line)
    scores = score(rows, found)
    Console(width=120).print(table(scores))
    infeasible = _percent(scores["fitting_called_infeasible"])
    print(f"{title}; OOM called feasible: {scores['oom_called_feasible']}; that ran called infeasible: {infeasible}")
    if as_json:
        print(json.dumps(scores))


@contextmanager
def _lines(path: Path | None, add: bool) -> Iterator[Callable[[Row], None]]:
    """Inside, each call adds a line of JSON to the file, which ``add`` keeps; without a file it does nothing."""
    if path is None:
        yield lambda row: None
        return
    with path.open("a" if add else "w", encoding="utf-8", buffering=1) as file:
        yield lambda row: print(json.dumps(row), file=file)


def _read(path: Path) -> dict[str, Prediction]:
    """The predictions in a file of ``--details`` by row; a last line that was cut off is not one."""
    found = {}
    if not path.exists():
        return found
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        write_text(path, whole)
    for line in whole.splitlines():
        row = json.loads(line)
        known = {k: row[f"predicted_{k}"] for k in Prediction.__dataclass_fields__ if f"predicted_{k}" in row}
        prediction = Prediction(**known)
        found[prediction.id] = prediction
    return found


def _only(options: argparse.Namespace, row: Row) -> tuple[Any, ...]:
    return (options.family,) if options.family and row["family"] in options.family else ()


if __name__ == "__main__":
    main()
