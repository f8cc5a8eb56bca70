"""Jobs of published runs: the search contains every plan that can be pinned."""

from __future__ import annotations

import json
import sys

import pytest

from tests.helpers.paths import ROOT

ROWS = ROOT.parent / "shared" / "published" / "runs.jsonl"
sys.path.insert(0, str(ROOT / "benchmarks"))

pytestmark = pytest.mark.skipif(not ROWS.exists(), reason="the published runs are not beside the repository")

FEW = ["vtrain-1000"]
MANY = [
    "vtrain-0400",
    "zero-bubble-0000",
    "mosaicml-llmfoundry-0189",
    "dgxc-recipes-0239",
    "vtrain-0100",
    "vtrain-1300",
]


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in MANY)])
def test_the_free_plan_is_never_slower_than_the_published_one(name: str) -> None:
    from free_plans import freed

    row = next(r for r in map(json.loads, ROWS.read_text().splitlines()) if r["id"] == name)
    found = freed(row)
    assert found is not None
    assert found.free <= found.pinned * (1 + 1e-9), f"{found.chosen} takes {found.free}, as published {found.pinned}"
    assert "What would other layouts take?" in found.explanation
