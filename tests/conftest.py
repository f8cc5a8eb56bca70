"""One thread per process: the tests start several processes on few cores, and results stay the same everywhere.

And few passes of the cycle collector, each of which looks at all that torch, transformers and 5,000 tests are made of.

Of a test function with many cases, ``make test`` runs as many as fit in a budget of time, evenly spaced over the list
of cases; the others are marked slow, so that ``make test-all`` runs them. ``case_costs.json`` has the seconds of a case
of each function that takes long; ``make test ARGS=--record-costs`` writes it anew. Only their proportions matter.
Functions marked ``all_cases`` run whole.
"""

from __future__ import annotations

import gc
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What the test files import, once for all ranks that a process forks.
os.environ.setdefault(
    "PARTITIONER_PRELOAD", "partitioner.api,transformers.models.llama.modeling_llama,hypothesis,pytest"
)

import networkx  # noqa: F401  # the package imports it late; what is imported here is frozen below
import pytest
import sympy  # noqa: F401  # as networkx
import torch
from hypothesis import settings

from partitioner import background
from partitioner.solve.evaluate import prefetch
from partitioner.solve.search import search
from tests import example_counts

settings.register_profile("untimed", deadline=None)  # an example takes longer where other processes run
settings.load_profile("untimed")
torch.set_num_threads(1)
gc.set_threshold(50_000, 20, 20)

_COSTS = Path(__file__).parent / "case_costs.json"
_BUDGET_S = 2.5  # for the cases of one function
_RECORDED_S = 2.0  # functions that take less are not recorded, and run whole

_seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))  # function -> case -> seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-costs", action="store_true", help="write tests/case_costs.json anew (all cases run)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow the cases of each test function that do not fit in the budget of ``make test``."""
    if config.getoption("--record-costs"):
        return
    costs: dict[str, float] = json.loads(_COSTS.read_text())
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not (item.get_closest_marker("slow") or item.get_closest_marker("all_cases")):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, of_function in cases.items():
        for item in _list_beyond_budget(of_function, costs.get(name, 0.0)):
            item.add_marker(pytest.mark.slow)


def _list_beyond_budget(cases: list[pytest.Item], seconds: float) -> list[pytest.Item]:
    """Return the cases of one test function that do not fit in the budget. ``seconds``: the time of one case."""
    kept = max(1, int(_BUDGET_S / seconds)) if seconds else len(cases)
    if kept >= len(cases):
        return []
    chosen = {round(k * (len(cases) - 1) / max(1, kept - 1)) for k in range(kept)}
    return [item for index, item in enumerate(cases) if index not in chosen]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid.partition("[")[0]][report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the seconds of a case of each function that takes long, if that was asked for."""
    if not session.config.getoption("--record-costs") or "PYTEST_XDIST_WORKER" in os.environ:
        return
    mean = {name: sum(of.values()) / len(of) for name, of in sorted(_seconds.items()) if sum(of.values()) > _RECORDED_S}
    _COSTS.write_text(json.dumps({name: round(seconds, 2) for name, seconds in mean.items()}, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Tell test files whether slow tests are run, which decides how many examples properties have.

    Where each processor has a worker, plans are made by one process: a second one would take another's time.
    """
    example_counts.runs_slow_tests = "not slow" not in config.getoption("markexpr")
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")) >= processors:
        for module in (prefetch, background):
            module.can_help = lambda: False


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def without_baselines() -> Iterator[None]:
    """For tests of what plans compute: the search is complete, but a report has nothing to compare the plan with."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("compare_standard_layouts", "without_laggards", "faster_batches", "faster_with_offload"):
            patch.setattr(search, name, lambda *_, **__: ())
        yield
