"""The zoo's results for people: a table on a terminal, counts as data, and docs/zoo.md."""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.zoo_attention import masks_left
from benchmarks.zoo_models import architectures
from partitioner.runtime.files import write_text

_ROOT = Path(__file__).resolve().parents[1]  # where this copy lies is of no interest

Mesh = tuple[int, int, int]
Result = dict[str, Any]
Known = Mapping[tuple[str, Mesh], Result]

STATUSES = ("equal", "unequal", "refused", "crashed", "timeout", "unexported", "unbuilt")
_MEANING = {
    "equal": "planned, and equal to the model in float64: outputs, loss and all gradients within 1e-9",
    "unequal": "planned, and not equal",
    "refused": "exports, and is refused with a reason",
    "crashed": "exports, and an exception came that is not meant for users",
    "timeout": "not done within the time limit",
    "unexported": "torch.export refuses the model",
    "unbuilt": "no small model could be made here",
}


def summary(known: Known) -> dict[str, Any]:
    """Counts by mesh: statuses, the distribution of shares, masks, operators without a rule."""
    found: dict[str, Any] = {}
    for mesh, results in _by_mesh(known).items():
        counts = Counter(r["status"] for r in results)
        planned = [r for r in results if "share" in r]
        equal = [r for r in planned if r["status"] == "equal"]
        exported = [r for r in results if r["status"] not in ("unexported", "unbuilt", "timeout")]
        operators: dict[str, list[float]] = defaultdict(list)
        for r in planned:
            for name, share in r["without_rule"].items():
                operators[name].append(share)
        found[",".join(map(str, mesh))] = {
            "architectures": len(results),
            "model types": len({r["name"].split(":")[1] for r in results}),
            "exported": len(exported),
            "model types exported": len({r["name"].split(":")[1] for r in exported}),
            "statuses": {s: counts[s] for s in STATUSES if counts[s]},
            "shares": _distribution(r["share"] for r in planned) if mesh[2] > 1 else {},
            "largest error of equal": max((max(r["errors"].values()) for r in equal), default=0.0),
            "causal masks left": sorted(r["name"] for r in planned if masks_left(r.get("masks", {}))),
            "attention no longer fused": sorted(r["name"] for r in planned if _fused_lost(r)),
            "attention compared": sum("fused_by_model" in r for r in planned),
            "without rule": {n: [len(s), max(s)] for n, s in sorted(operators.items(), key=lambda i: -max(i[1]))},
        }  # fmt: skip
    return found


def _fused_lost(result: Result) -> bool:
    """Whether the model's own fused attention is taken apart in its graph."""
    return int(result.get("fused_by_model", 0)) > int(result.get("fused", 0))


def _by_mesh(known: Known) -> dict[Mesh, list[Result]]:
    found: dict[Mesh, list[Result]] = defaultdict(list)
    for (_, mesh), result in sorted(known.items()):
        found[mesh].append(result)
    return found


def _distribution(shares: Iterable[float]) -> dict[str, int]:
    """How many models have at least this share of their matrix products' work sharded."""
    found = list(shares)
    return {"all": len(found)} | {
        f">= {bar:.0%}": sum(s >= bar - 1e-9 for s in found) for bar in (0.99, 0.95, 0.8, 0.5)
    }


def print_report(known: Known) -> None:
    console = Console()
    for mesh, results in _by_mesh(known).items():
        console.print(_table(mesh, [r for r in results if not _is_fine(r)]))
    for mesh, counts in summary(known).items():
        console.print(f"[bold]mesh pp,dp,tp = {mesh}[/]")
        for name, value in counts.items():
            console.print(f"  {name}: {value}")


def _is_fine(result: Result) -> bool:
    sharded = result["mesh"][2] == 1 or result.get("share", 1.0) >= 0.95
    return result["status"] == "equal" and sharded and not result.get("without_rule")


def _table(mesh: Mesh, results: list[Result]) -> Table:
    table = Table(title=f"what is not equal, or not sharded, at pp,dp,tp = {','.join(map(str, mesh))}")
    for column in ("architecture", "status", "error", "share", "without a rule", "why"):
        table.add_column(column, overflow="fold")
    for result in results:
        table.add_row(*_row(result))
    return table


def _row(result: Result) -> tuple[str, ...]:
    errors = result.get("errors", {})
    operators = ", ".join(f"{n} {s:.0%}" for n, s in result.get("without_rule", {}).items())
    why = " ".join(filter(None, (result.get("reason", ""), result.get("export", "")))).replace(f"{_ROOT}/", "")
    worst = f"{max(errors.values()):.0e}" if errors else ""
    share = f"{result['share']:.0%}" if "share" in result and result["mesh"][2] > 1 else ""
    return result["name"], result["status"], worst, share, operators, why[:160]


# --- docs/zoo.md ------------------------------------------------------------------------------------------------------


def write_docs(known: Known, path: Path) -> Path:
    return write_text(path, "\n".join(_page(known)) + "\n")


def _page(known: Known) -> Iterable[str]:
    yield "# The zoo"
    yield ""
    yield (
        "Architectures that transformers maps to causal and masked language modelling, sequence to sequence, image and "
        "audio classification, and speech recognition: a tiny model of each, made from its default configuration by "
        "the kinds of its fields, is planned and verified in float64. No architecture is known by name, neither to the "
        "planner nor to the benchmark. Written by `python benchmarks/zoo.py --report --write-docs`, "
        f"{datetime.now(UTC):%Y-%m-%d}; torch {version('torch')}, transformers {version('transformers')}, "
        f"Python {platform.python_version()}."
    )
    yield ""
    yield (
        "The planner looks for no baselines here; models are in eval mode. Where only a model's own loss does not "
        "export, the loss is the mean square of what it gives first."
    )
    yield ""
    for status in STATUSES:
        yield f"- *{status}*: {_MEANING[status]}"
    for mesh, counts in summary(known).items():
        yield from ("", f"## pp,dp,tp = {mesh}", "")
        yield f"Of {len(architectures())} architectures {counts['architectures']} were tried, "
        yield f"of {counts['model types']} model types; {counts['exported']} are known to export, "
        yield f"of {counts['model types exported']} model types."
        yield from ("", "| status | architectures |", "|---|---|")
        yield from (f"| {s} | {n} |" for s, n in counts["statuses"].items())
        if counts["shares"]:
            yield from ("", "| share of matmul work sharded over tp | architectures |", "|---|---|")
            yield from (f"| {s} | {n} |" for s, n in counts["shares"].items())
        yield ""
        yield f"Largest relative error of those equal: {counts['largest error of equal']:.1e}. Causal masks that are "
        yield f"materialised: {', '.join(counts['causal masks left']) or 'none'}. Fused attention taken apart: "
        yield f"{', '.join(counts['attention no longer fused']) or 'none'}, of {counts['attention compared']} compared."
        if counts["without rule"]:
            yield from ("", "| operator without a rule | architectures | largest share of the time |", "|---|---|---|")
            yield from (f"| `{n}` | {many} | {share:.1%} |" for n, (many, share) in counts["without rule"].items())
    yield from ("", "## All", "", "| architecture | mesh | status | error | share | without a rule | why |")
    yield "|---|---|---|---|---|---|---|"
    for mesh, results in _by_mesh(known).items():
        for result in results:
            name, *rest = (cell.replace("|", "/") for cell in _row(result))
            yield f"| {name} | {','.join(map(str, mesh))} | {' | '.join(rest)} |"
