"""The check of rules finds every seeded fault that a plain comparison shows to be one."""

from __future__ import annotations

import random

import pytest
import torch

from partitioner.passes.rules.verify import check_strategies
from tests.helpers.rule_cases import operator
from tests.helpers.wrong_rules import CHANGES, draw, installed, is_wrong, wrong_rules

SEEDS, EACH = 10, 25  # rules that are shown to be wrong


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_wrong_rule_is_caught(seed: int):
    missed = []
    for wrong in wrong_rules(seed, EACH):
        torch.manual_seed(0)
        with installed(wrong):
            try:
                caught = check_strategies(operator(wrong.name), wrong.args, wrong.kwargs, grad=wrong.grad) != []
            except ValueError:
                caught = True
        if not caught:
            missed.append(f"{wrong.name} {wrong.kind}: {wrong.rule}")
    assert missed == []


def test_faults_are_of_every_kind():
    rng, seen = random.Random(1), set[str]()
    for _ in range(4000):
        wrong = draw(rng)
        if wrong is not None and wrong.kind not in seen and is_wrong(wrong):
            seen.add(wrong.kind)
    assert seen == CHANGES.keys()
