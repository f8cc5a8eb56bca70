"""Another global batch whose samples take less time is told."""

from __future__ import annotations

import pytest
import torch

from partitioner import Constraints, Plan, partition
from partitioner.explain.tables import other_batch_text
from partitioner.solve.search.smaller_clusters import batches_near
from partitioner.units import seconds_text
from tests.helpers.linear_towers import Tokens
from tests.helpers.small_clusters import cluster


def planned(batch: int, devices: int) -> Plan:
    with torch.device("meta"):
        model, inputs = Tokens(), (torch.empty(batch, 16384, 256),)
    pins = Constraints(pp=1, tp=1, zero=0, microbatch_size=1)
    return partition(model, cluster(8192, devices), inputs, constraints=pins)


def test_batches_near() -> None:
    """2,048 samples on 10,000 devices: 2,000 divides them, 4,000 is too far. 100 on 8: 96 and 104 do."""
    assert batches_near(2048, 10000) == [2000]
    assert batches_near(100, 8) == [96, 104]
    assert batches_near(512, 64) == batches_near(16, 64) == []


def test_a_batch_that_divides_is_faster_for_each_sample() -> None:
    """Of 9 samples on 4 ranks one rank has three, of 8 all have two: a sample takes 2 / 8 of one's time, not 3 / 9."""
    plan = planned(9, 4)
    (found,) = [b for b in plan.certificate.baselines if b.global_batch]
    assert found.global_batch == 8 and found.candidate is not None and found.candidate.step_time is not None
    assert found.candidate.step_time == pytest.approx(2 / 3 * plan.estimate.step_time, rel=0.05)
    text = other_batch_text(plan)
    assert text.startswith(f"of 8 samples: a step takes {seconds_text(found.candidate.step_time)}, 2")
    assert text.endswith("% less per sample")
    assert text in " ".join(plan.summary().split()) and f"A global batch {text}." in " ".join(plan.explain().split())
    assert not other_batch_text(planned(8, 4))
