"""What the calls of a block send, read from the serialised graph of a plan."""

from __future__ import annotations

import pytest
import torch

from partitioner import Constraints, Topology, partition
from partitioner.plans.block_outline import block_collectives
from tests.helpers.context_models import SEQ, VOCAB, Decoder

pytestmark = pytest.mark.usefixtures("without_baselines")


def test_a_ring_sends_the_keys_and_values_of_all_ranks():
    """Two samples of 48 positions with four key heads of four float64: keys have 2 x 48 x 4 x 4 x 8 bytes = 12 KiB, and
    values as many. Values are a transposed view in the graph."""
    tokens = torch.randint(VOCAB, (2, SEQ))
    inputs = {"tokens": tokens, "targets": tokens}
    constraints = Constraints(cp=2, context="ring", microbatch_size=2)
    plan = partition(Decoder(), Topology.local(2), inputs, constraints=constraints)
    every = [c for block in plan.program.blocks.values() for c in block_collectives(block, [True] * 99)]
    assert {(c.direction, c.num_bytes) for c in every if c.op == "ring"} == {("forward", 24576), ("backward", 24576)}
