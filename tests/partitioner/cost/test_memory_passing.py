"""The search's tables count what a program holds, also where one gradient is larger than a bucket."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import Constraints, ExecutionProfile, PlanError, Topology, partition, prepare
from partitioner.plans.figures import device_memory, list_usable_bytes
from partitioner.solve.evaluate.prepared_model import PreparedModel
from partitioner.topology.files import with_margin
from partitioner.topology.groups import stage_capacity
from tests.helpers.experts_zoo import PlainExperts, plain_inputs

pytestmark = pytest.mark.usefixtures("without_baselines")


@cache
def large_vocabulary(tied: bool) -> PreparedModel:
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=2**17, use_cache=False, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        ids = torch.zeros(1, 256, dtype=torch.int64)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    return prepare(model, {"input_ids": ids, "labels": ids})


PINS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 8},
    "dp-tp": {"dp": 4, "tp": 2},
    "pp-dp": {"pp": 2, "dp": 4, "schedule": "1f1b"},
}
# Every two of zero, pins, tied and microbatches meet in one of these.
PAIRS = [
    (1, "dp", False, 1), (1, "dp-tp", True, 4), (1, "pp-dp", False, 4),
    (2, "dp", True, 4), (2, "dp-tp", False, 1), (2, "pp-dp", True, 1),
    (3, "dp", False, 4), (3, "dp-tp", True, 1), (3, "pp-dp", True, 4),
]  # fmt: skip


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("zero", "pins", "tied", "microbatches"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in PAIRS))
        for case in product((1, 2, 3), PINS, (False, True), (1, 4))
    ],
)
def test_programs_take_no_more_than_tables_say(zero: int, pins: str, tied: bool, microbatches: int) -> None:
    """Gradients of the embedding are still under way when those of the head are made again."""
    asked = Constraints(**{"pp": 1, "tp": 1} | PINS[pins], cp=1, zero=zero, microbatch_size=1, recompute="none")
    batch = microbatches * PINS[pins]["dp"]
    tables, whole = (
        partition(
            large_vocabulary(tied),
            Topology.preset("dgx-h100"),
            constraints=asked,
            global_batch=batch,
            estimate_only=only,
        )
        for only in (True, False)
    )
    told, taken = max(tables.estimate.memory), max(whole.estimate.memory)
    assert 0.75 * told <= taken <= 1.03 * told


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 1, 2), (2, 1, 1), (2, 2, 4)])
def test_ranks_that_share_an_expert_have_the_same_rows(tp: int, ep: int, etp: int) -> None:
    with torch.device("meta"):
        model, inputs = PlainExperts(), plain_inputs(8)
    pins, profile = Constraints(pp=1, tp=tp, ep=ep, etp=etp), ExecutionProfile(expert_tensor="any")
    with pytest.raises(PlanError, match=f"etp={etp} with ep={ep}, tp={tp}: .* expected"):
        partition(model, Topology.local(8), inputs, constraints=pins, profile=profile)


def test_what_groups_take_is_no_room_of_a_plan() -> None:
    """The search plans on a cluster without the margin; reports use the same bytes. With 4 × 2 ranks a device is in two
    groups. Of 85,520,809,984 bytes 1.5e9 are reserved, 2 × 690e6 for groups, and 5 % of the 84,020,809,984 not
    reserved are 4,201,040,499.2, so 4,201,040,500 of margin: 78,439,769,484 are left."""
    plan = partition(
        large_vocabulary(True), Topology.preset("dgx-h100"), constraints=Constraints(dp=4, tp=2), global_batch=8
    )
    room = stage_capacity(with_margin(plan.topology, 0.05), plan.mesh, plan.devices)[0]
    assert set(list_usable_bytes(plan)) == {room} == {78_439_769_484}
    parts = device_memory(plan, 0)
    assert (parts.device, parts.reserved, parts.groups) == (85_520_809_984, 1_500_000_000, 1_380_000_000)
    assert parts.margin == 4_201_040_500
    assert room < plan.topology.devices[0].usable
