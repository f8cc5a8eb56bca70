"""Compare two ways to predict published runs: ``python benchmarks/predict_accuracy.py [--rows FILE...] [--docs FILE]``.

Of each run of Megatron that states its layout, the command line is written, read by ``read_layout`` and priced by
``predict_layout``, as ``partitioner predict --megatron`` does. The other way is that of ``accuracy.py``, which pins
what the row states. A table has, for each family of runs, the mean absolute error of the step time by both, and how
many of the predictions are equal. What a row says of software, and no option of the command line does, is only known to
the second way. ``--docs docs/accuracy.md`` writes the table into that page.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accuracy import _TYPES, ROWS, predict
from published_models import build
from published_rows import Overfull, Row, Unstated, published_job
from rich.console import Console
from rich.table import Table

from partitioner import predict_layout, read_layout, write_layout
from partitioner.interop.layout import TrainingLayout
from partitioner.passes.errors import PartitionError
from partitioner.runtime.files import write_text
from partitioner.units import format_plural

_FRAMEWORKS = ("Megatron-LM", "Megatron-Core", "NeMo/Megatron-Core", "NeMo/Megatron-Bridge", "Megatron/FlagScale")
_SAME = 0.01  # relative difference of two predictions that count as equal
_BEGIN, _END = "<!-- table: written by benchmarks/predict_accuracy.py -->", "<!-- end of table -->"
_SHARED = """
    pp dp cp tp ep etp dp_shard microbatch_size schedule virtual_stages zero sequence_parallel context recompute
    """.split()


@dataclass(frozen=True)
class Compared:
    """Predicted seconds of a run: by its command line and by its row; ``why``: reason if there is none by the first."""

    row: Row
    by_configuration: float | None
    by_row: float | None
    why: str = ""

    @property
    def measured(self) -> float:
        return float(self.row["step_time_s"])


def compare(row: Row) -> Compared:
    """Predict ``row`` in both ways."""
    by_row = predict(row).step_time
    try:
        return Compared(row, predict_by_configuration(row), by_row)
    except (PartitionError, Unstated, Overfull) as error:
        return Compared(row, None, by_row, f"{type(error).__name__}: {error}")


def predict_by_configuration(row: Row) -> float:
    """Return the seconds of a step of ``row`` that ``predict_layout`` gives for its command line of Megatron-LM. What
    the row does not say is left open, as in the other way.
    """
    job = published_job(row)
    pins = job.constraints
    known = {name: value for name in _SHARED if (value := getattr(pins, name)) is not None}
    layout = TrainingLayout(
        framework="megatron",
        devices=job.topology.num_devices,
        global_batch=job.global_batch,
        seq_length=job.length,
        precision=job.precision,  # type: ignore[arg-type]
        optimizer=job.optimizer,
        profile=job.profile,
        **{"sequence_parallel": True, **known},
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arguments.sh"
        write_layout(layout, "megatron", path)
        path.write_text(" ".join([path.read_text(), *_list_flags(layout)]))
        read = read_layout(path, "megatron")
    read = read.replace(optimizer=job.optimizer)  # "none" for a layer that was measured without its update
    read = read.replace(**{name: None for name in ("recompute", "etp", "context") if getattr(pins, name) is None})
    model, inputs, *_ = build(job.shape, job.length, _TYPES[job.precision])
    return predict_layout(read, model, job.topology, inputs, compare=False).step_time


def _list_flags(layout: TrainingLayout) -> list[str]:
    """Return the options for how the framework of a row executes ``layout``, which an export of a plan lacks."""
    how, experts = layout.profile, layout.ep > 1
    flags = {
        "--tp-comm-overlap": how.overlap_tensor and layout.tp > 1,
        "--grad-reduce-in-bf16": how.short_gradients and layout.precision in ("bf16", "fp8"),
        "--no-scatter-gather-tensors-in-pipeline": how.sends == "whole" and layout.pp > 1,
        "--moe-use-legacy-grouped-gemm": how.expert_kernels == "grouped" and experts,
        "--moe-token-dispatcher-type flex --moe-enable-deepep": how.dispatch == "once" and experts,
        "--overlap-moe-expert-parallel-comm": how.overlap_experts and experts,
        "--moe-router-force-load-balancing": how.even_experts == "routed" and experts,
        "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0": how.even_experts == "padded" and experts,
        "--enable-cuda-graph --cuda-graph-scope full": how.graphs == "all",
        "--enable-cuda-graph --cuda-graph-scope attn": how.graphs == "part",
    }
    return [flag for flag, given in flags.items() if given]


def choose_rows(rows: Sequence[Row], most: int) -> list[Row]:
    """Return at most ``most`` of the runs of Megatron with a measured time, evenly over each family: none of forks,
    whose schedules Megatron's options do not have.
    """
    found = [
        r for r in rows
        if r["framework"].startswith(_FRAMEWORKS) and not re.search("ZeRO|fork", r["framework"])
        and r.get("step_time_s") and not r.get("oom")
    ]  # fmt: skip
    step = max(1, -(-len(found) // most))
    return sorted(found, key=lambda r: r["family"])[::step]


def summarize(found: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return for each family its number of runs, both mean absolute errors, and the number of equal predictions."""
    families: dict[str, list[Compared]] = defaultdict(list)
    for each in found:
        families[each.row["family"]].append(each)
    summary = []
    for name, members in [*sorted(families.items()), ("all", [*found])]:
        both = [(c.by_configuration, c.by_row, c.measured) for c in members if c.by_configuration and c.by_row]
        summary.append(
            {
                "family": name,
                "runs": len(members),
                "priced": len(both),
                "error_by_configuration": _mean_error([(a, m) for a, _, m in both]),
                "error_by_row": _mean_error([(b, m) for _, b, m in both]),
                "equal": sum(abs(a / b - 1) <= _SAME for a, b, _ in both),
            }
        )
    return summary


def _mean_error(pairs: Sequence[tuple[float, float]]) -> float | None:
    return statistics.mean(abs(seconds / measured - 1) for seconds, measured in pairs) if pairs else None


def insert_table(page: str, summary: Sequence[dict[str, Any]], reasons: Mapping[str, int]) -> str:
    """Return the text ``page`` with the table between the two markers written again. ``summary``: what ``summarize``
    returned. ``reasons``: why runs have no prediction by their command line, with the number of runs.
    """
    if _BEGIN not in page or _END not in page:
        raise SystemExit(f"the page has no lines {_BEGIN!r} and {_END!r}; expected both, around the table")
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    rows = ["| runs | priced | error by command line | error by row | equal within 1 % |", "|---|---|---|---|---|"]
    for line in summary:
        name = "**all**" if line["family"] == "all" else line["family"]
        errors = (_format_error(line[key]) for key in ("error_by_configuration", "error_by_row"))
        rows.append(f"| {name} | {line['priced']} of {line['runs']} | {' | '.join(errors)} | {line['equal']} |")
    lacking = [f"- Without a prediction: {format_plural(count, 'run')}, {why}." for why, count in reasons.items()]
    return f"{before}{_BEGIN}\n\n" + "\n".join([*rows, *(["", *lacking] if lacking else [])]) + f"\n\n{_END}{after}"


def count_reasons(found: Sequence[Compared]) -> dict[str, int]:
    """Return why runs have no prediction by their command line -> how many, the most frequent reason first."""
    reasons = (each.why.partition(": ")[2].partition(";")[0] for each in found if each.why)
    return dict(Counter(reasons).most_common())


def _format_error(error: float | None) -> str:
    return "" if error is None else f"{100 * error:.1f} %"


def _differs(found: Compared) -> bool:
    """Return whether a run lacks one of its predictions, or has two that are not equal."""
    first, second = found.by_configuration, found.by_row
    return not first or not second or abs(first / second - 1) > _SAME


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", type=Path, nargs="+", default=[ROWS], help="the published runs: files with a JSON object in each line"
    )
    parser.add_argument("--most", type=int, default=1_000, metavar="N", help="runs to compare")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the table into this page, between its markers")
    options = parser.parse_args()
    rows = [json.loads(line) for path in options.rows for line in path.read_text().splitlines() if line]
    found = []
    for row in choose_rows(rows, options.most):
        last = compare(row)
        found.append(last)
        if _differs(last):
            way = f"{last.by_configuration} by configuration, {last.by_row} by row"
            print(f"{row['id']}: {way} {last.why[:200]}", file=sys.stderr, flush=True)
    summary = summarize(found)
    if options.docs is not None:
        write_text(options.docs, insert_table(options.docs.read_text(), summary, count_reasons(found)))
    if options.json:
        print(json.dumps(summary))
        return
    table = Table("family", "runs", "priced", "error by configuration", "error by row", "equal within 1 %")
    for line in summary:
        errors = (_format_error(line[key]) for key in ("error_by_configuration", "error_by_row"))
        table.add_row(line["family"], str(line["runs"]), str(line["priced"]), *errors, str(line["equal"]))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
