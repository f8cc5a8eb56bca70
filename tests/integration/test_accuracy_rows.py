"""The benchmark of published runs: a row that cannot be planned is reported with the reason, and the run goes on."""

import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import accuracy
import predict_accuracy
import torch
from published_models import Experts, Shape, build

from partitioner import prepare
from partitioner.cost.call.expert_parallel import expert_region
from partitioner.cost.call.fp8 import products_in_fp8
from partitioner.cost.call.operators import is_product

SHAPE = Shape(layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=64, vocab=128, gated=True, tied=False)

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


def test_the_head_and_routers_stay_in_16_bits():
    """In fp8 all products of a layer are, but for the router's; the head's is not."""
    shape = replace(SHAPE, experts=4, topk=2, moe_ffn=64, outer_16=True)
    blocks = prepare(*build(shape, 32, torch.bfloat16)).at(2)[0].blocks
    short = {name: products_in_fp8(block, "tensor", expert_region(block)) for name, block in blocks.items()}
    products = {name: [n for n in block.graph.nodes if is_product(n)] for name, block in blocks.items()}
    assert len(short["layers.*"]) == 7 and len(products["layers.*"]) == 9, "four of attention, three of experts"
    assert not short["head"] and len(products["head"]) == 1


def test_biases_of_experts_count_by_the_weights_of_rows():
    """With products of zero, what a token gets is the biases of its two experts, each times its weight for it."""
    torch.manual_seed(0)
    experts = Experts(replace(SHAPE, experts=4, topk=2, moe_ffn=64, expert_bias=True)).bfloat16().requires_grad_(False)
    assert experts.bias is not None and not experts.down.any()
    torch.nn.init.normal_(experts.bias)
    x = torch.randn(1, 8, 64, dtype=torch.bfloat16)
    weights, chosen = torch.topk(torch.softmax(experts.router(x[0]), -1), 2)
    expected = (weights.unsqueeze(-1).float() * experts.bias[chosen].float()).sum(1)
    torch.testing.assert_close(experts(x)[0].float(), expected, rtol=0.02, atol=0.02)


SC21: dict[str, Any] = dict(
    id="sc21", family="megatron-sc21", framework="Megatron-LM", model="GPT-39.1B", layers=48, hidden=8192, heads=64,
    kv_heads=64, head_dim=128, ffn=32768, gated_ffn=False, vocab=51200, tied_embeddings=True, seq_len=2048,
    gpu="A100-80GB", gpu_mem_gb=80, num_gpus=512, gpus_per_node=8, tp=8, pp=2, cp=1, dp=32, mbs=4, gbs=1536,
    sequence_parallel=False, zero_stage=0, recompute="full", schedule="1f1b", precision="fp16", step_time_s=14.69,
)  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pp": 1, "dp": 64, "schedule": "none", "mbs": 2},
        {"framework": "NeMo/Megatron-Core", "gpu": "H100-80GB", "precision": "fp8", "zero_stage": 1, "recompute": None}
        | {"schedule": "1f1b-interleaved", "vpp": 4, "mbs": 1, "sequence_parallel": True},
    ],
    ids=["pipeline", "no pipeline", "interleaved fp8"],
)
def test_a_published_run_is_predicted_equally_from_its_command_line(changes: dict[str, Any]):
    """The command line of a run, through ``predict_layout``, gives the step time of the benchmark of published runs."""
    found = predict_accuracy.compare(SC21 | changes)
    assert found.why == ""
    assert found.by_configuration == pytest.approx(found.by_row, rel=1e-6)
    (family, everything) = predict_accuracy.summarize([found])
    page = f"before\n{predict_accuracy._BEGIN}\nold\n{predict_accuracy._END}\nafter\n"
    written = predict_accuracy.insert_table(page, [family, everything], {"no layers": 2})
    error = f"{100 * family['error_by_row']:.1f} %"
    assert f"| {SC21['family']} | 1 of 1 | {error} | {error} | 1 |" in written.splitlines()
    assert "- Without a prediction: 2 runs, no layers." in written.splitlines()
    assert written.startswith("before\n") and written.endswith("after\n") and "old" not in written
    with pytest.raises(SystemExit, match="the page has no lines"):
        predict_accuracy.insert_table("before\nafter\n", [family], {})
    assert everything["equal"] == 1 and family["error_by_row"] == pytest.approx(family["error_by_configuration"])
