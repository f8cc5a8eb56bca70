"""Looking closely at a step: every operator's results, at the price of a slow step."""

from runtime.debug.compare import Difference, compare_runs
from runtime.debug.hashes import record_hashes
from runtime.debug.nonfinite import NonFiniteError, check_finite, find_nonfinite

__all__ = ["Difference", "NonFiniteError", "check_finite", "compare_runs", "find_nonfinite", "record_hashes"]
