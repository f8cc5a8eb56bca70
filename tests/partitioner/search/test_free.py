"""What can be pinned is in the search: no pinned plan is expected to be faster than the free one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from partitioner import Constraints, Topology, partition, prepare
from partitioner.errors import PlanError
from partitioner.solve.evaluate.prepared_model import PreparedModel

pytestmark = pytest.mark.usefixtures("without_baselines")


def llama() -> PreparedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=12, num_attention_heads=16)
    config = LlamaConfig(**sizes, num_key_value_heads=16, vocab_size=32000, use_cache=False)
    return prepared(LlamaForCausalLM, config)


def mixtral() -> PreparedModel:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=16)
    config = MixtralConfig(**sizes, num_key_value_heads=4, num_local_experts=4, vocab_size=8192, use_cache=False)
    return prepared(MixtralForCausalLM, config)


def prepared(kind: Any, config: Any) -> PreparedModel:
    with torch.device("meta"):
        model = kind(config)
    ids = torch.empty((1, 2048), dtype=torch.int64, device="meta")
    return prepare(model, {"input_ids": ids, "labels": ids}, precision="bf16")


def random_pins(rng: random.Random, experts: int) -> dict[str, Any]:
    """A mesh of 16 ranks and the rest, as somebody may have published it."""
    tp = rng.choice([1, 2, 4, 8, 16])
    pp = rng.choice([d for d in (1, 2, 4) if 16 // tp % d == 0])
    cp = rng.choice([d for d in (1, 2) if 16 // tp // pp % d == 0])
    pins: dict[str, Any] = dict(pp=pp, tp=tp, cp=cp, dp=16 // tp // pp // cp, microbatch_size=rng.choice([1, 2]))
    pins["recompute"] = rng.choice([None, "none", "selective", "full"])
    pins["zero"] = rng.choice([0, 1, 2, 3])
    if pp > 1:
        schedule = rng.choice(["1f1b", "interleaved", "zb-1p", "gpipe"])
        pins.update(schedule=schedule, virtual_stages=rng.choice([2, 3]) if schedule == "interleaved" else None)
    if experts:
        pins["ep"] = rng.choice([d for d in (1, 2, 4) if pins["dp"] * cp * tp % (d * tp) == 0])
    return pins


@pytest.mark.parametrize(("model", "count"), [(llama, 8), pytest.param(mixtral, 10, marks=pytest.mark.slow)])
def test_no_pinned_plan_is_expected_to_be_faster(model: Any, count: int):
    rng, work = random.Random(0), model()
    topology = Topology.preset("dgx-a100", nodes=2)
    options: dict[str, Any] = dict(global_batch=64, estimate_only=True)
    free = partition(work, topology, constraints=Constraints(ahead=True), **options)
    planned = 0
    while planned < count:
        pins = random_pins(rng, experts=4 if model is mixtral else 0)
        try:
            pinned = partition(work, topology, constraints=Constraints(**pins), **options)
        except PlanError:  # does not fit in memory, or has more stages than layers
            continue
        planned += 1
        assert free.estimate.step_time <= pinned.estimate.step_time * (1 + 1e-6), pins
    assert free.certificate.bound <= free.estimate.step_time
