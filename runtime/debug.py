"""Tools to inspect every operator of a step: find the origin of a NaN, record hashes of results, compare two runs. An
inspected step runs more slowly.
"""

from __future__ import annotations

from partitioner.runtime.observe.nonfinite import NonFiniteError, check_finite, find_nonfinite
from partitioner.runtime.observe.operator_probe import Difference, compare_runs, record_hashes

__all__ = ["Difference", "NonFiniteError", "check_finite", "compare_runs", "find_nonfinite", "record_hashes"]
