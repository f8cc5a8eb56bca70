"""Solves a public instance of the sharding problem, of the contest on intra-operator parallelism (google/iopddl).

    python benchmarks/iopddl.py ../shared/iopddl/G.json.gz --seconds 60

Prints one line of JSON: ``cost``, ``bound``, ``seconds`` (with imports and reading the file),
``processor_seconds`` and ``peak_mb`` (of all processes), ``choice`` (strategy per node).
"""

from __future__ import annotations

import time

START = time.perf_counter()  # the time that the imports take counts as well

import argparse  # noqa: E402
import gzip  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402

from benchmarks.iopddl_solver.solve import solve_within_memory  # noqa: E402
from partitioner.solve.pairwise.assignment import AssignmentProblem  # noqa: E402
from partitioner.solve.pairwise.live_memory import MemoryConstraint  # noqa: E402

FORBIDDEN = 1e18  # costs from here on mean that a choice is not allowed


def read(path: Path) -> AssignmentProblem:
    """The instance of a ``.json`` or ``.json.gz`` file. Tables that are equal are one array."""
    raw = path.read_bytes()
    data = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["problem"]
    arrays: dict[tuple[float, ...], np.ndarray] = {}

    def numbers(values: list[float]) -> np.ndarray:
        key = tuple(values)
        if key not in arrays:
            array = np.array(values, np.float64)
            arrays[key] = np.where(array >= FORBIDDEN, np.inf, array)
        return arrays[key]

    nodes, edges = data["nodes"], data["edges"]
    costs = [numbers(c) for c in nodes["costs"]]
    tables = [
        (i, j, numbers(table).reshape(len(costs[i]), len(costs[j])))
        for (i, j), table in zip(edges["nodes"], edges["costs"], strict=True)
    ]
    intervals = [(start, end) for start, end in nodes["intervals"]]
    limit = data.get("usage_limit")
    memory = None
    if limit is not None:
        memory = MemoryConstraint(intervals, [np.array(u, np.float64) for u in nodes["usages"]], float(limit))
    return AssignmentProblem(costs, tables, memory=memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="for everything, reading the file included")
    arguments = parser.parse_args()
    problem = read(arguments.file)
    margin = 1.0 + 0.02 * arguments.seconds  # to check and print the answer
    left = arguments.seconds - (time.perf_counter() - START) - margin
    answer = solve_within_memory(problem, time_limit_s=max(left, 0.5))
    seconds = time.perf_counter() - START
    result = {"cost": answer.objective, "bound": answer.bound, "seconds": seconds}
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    result |= {"processor_seconds": sum(u.ru_utime + u.ru_stime for u in used)}
    result |= {"peak_mb": sum(u.ru_maxrss for u in used) // 1024, "choice": answer.choice}
    print(json.dumps(result), flush=True)
    os._exit(0)  # the interpreter's own way out was seen to hang for minutes after many solves


if __name__ == "__main__":
    main()
