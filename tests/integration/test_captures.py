"""The models that benchmarks share among rows are those that capture would have given."""

import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import captures
from published_models import Shape, build

from partitioner import Constraints, Topology, partition, prepare

pytestmark = pytest.mark.usefixtures("without_baselines")

DENSE = Shape(7, 64, 4, 4, 16, 256, 512)
EXPERTS = Shape(7, 64, 4, 2, 16, 256, 512, gated=True, tied=False, experts=8, topk=2, moe_ffn=64, dense_layers=1)


TURNS = Shape(11, 64, 4, 2, 16, 256, 512, gated=True, tied=False, experts=8, topk=1, moe_ffn=64, expert_every=2)


@pytest.mark.parametrize("shape", [DENSE, EXPERTS, TURNS], ids=["dense", "experts", "experts in turns"])
@pytest.mark.parametrize("again", [False, True], ids=["captured", "from a file"])
def test_a_model_of_repeated_layers_is_the_whole_one(
    shape: Shape, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "FILES", tmp_path)
    captures._captured.cache_clear()
    shared = captures.prepared(shape, 128, torch.bfloat16, 16, None)
    if again:
        assert len(list(tmp_path.iterdir())) == 1
        captures._captured.cache_clear()
        shared = captures.prepared(shape, 128, torch.bfloat16, 16, None)
    whole = prepare(*build(shape, 128, torch.bfloat16))
    ours, theirs = shared.at(16)[0], whole.at(16)[0]
    assert sorted(map(str, ours.calls)) == sorted(map(str, theirs.calls))
    assert (ours.states, ours.values, ours.inputs) == (theirs.states, theirs.values, theirs.inputs)
    assert {k: str(b.graph) for k, b in ours.blocks.items()} == {k: str(b.graph) for k, b in theirs.blocks.items()}
    ask = dict(
        topology=Topology.preset("dgx-h100", nodes=1),
        global_batch=16,
        constraints=Constraints(pp=2, tp=2, microbatch_size=1),
        estimate_only=True,
    )
    assert partition(shared, **ask).estimate == partition(whole, **ask).estimate
