"""The benchmark of published runs: a row that cannot be planned is reported with the reason, and the run goes on."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import accuracy

ROW: dict[str, Any] = dict(
    id="row", family="family", framework="Megatron-DeepSpeed", model="gpt", layers=2, hidden=64, heads=2, vocab=128,
    seq_len=16, gpu="V100-32GB", num_gpus=2, gpus_per_node=2, gbs=2, tp=1, pp=1, dp=2, mbs=1, step_time_s=1.0,
)  # fmt: skip


def test_copies_of_gradients_beyond_the_memory_are_no_plan():
    """DeepSpeed's ZeRO-1 keeps two copies of two bytes: 200e9 parameters take 800 GB of 34.1 GB."""
    found = accuracy.predict({**ROW, "zero_stage": 1, "params_b": 200.0})
    assert "copies of gradients of 800.0 GB" in found.infeasible, found
    assert "34.1 GB" in found.infeasible


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"gpu": "unheard-of"}, "skipped", "unheard-of"),
        ({"seq_len": "sixteen"}, "failed", "TypeError"),
    ],
)
def test_rows_that_cannot_be_built_are_reported(changes: dict[str, Any], kind: str, reason: str):
    row = {**ROW, **changes}
    found = {row["id"]: accuracy.predict(row)}
    [line] = accuracy.unplanned([row], found)
    assert line.startswith(f"row: {kind}: ") and reason in line
    scores = accuracy.score([row], found)
    assert scores["families"]["family"][kind] == 1 and scores["families"]["family"]["timed"] == 0
    assert scores["fitting_called_infeasible"] == 0.0, "what was not planned is neither feasible nor infeasible"
