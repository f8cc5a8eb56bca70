"""The zoo itself is sound: each model runs in float64 throughout, and every parameter gets a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.models import BATCH, CASES, IGNORED, Case, float64, run, whole_loss

UNUSED = {  # parameters that nothing reads
    "bert-untied": ["cls.predictions.bias"],
    "roberta-untied": ["lm_head.bias"],
    "t5-untied": ["shared.weight"],
    "bart-untied": ["model.shared.weight"],
}


class _Dtypes(TorchDispatchMode):
    """Records the floating dtypes that operators produce."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[torch.dtype, str] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.seen.setdefault(leaf.dtype, str(func))
        return result


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_model_runs_in_float64(case: Case):
    with float64():
        model, inputs = case.build().double(), case.inputs(BATCH)
        with _Dtypes() as dtypes:
            loss = whole_loss(case, run(case, model, inputs))
            loss.backward()
    assert loss.shape == ()
    assert torch.isfinite(loss)
    assert set(dtypes.seen) == {torch.float64}, dtypes.seen
    assert [n for n, p in model.named_parameters() if p.grad is None] == UNUSED.get(case.name, [])


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_builds_are_the_same(case: Case):
    first, second = case.build(), case.build()
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("tied")])
def test_variants_differ_in_tying(name: str):
    family = name.split("-")[0]
    tied, untied = (CASES[n].build() for n in ((name, family) if name.endswith("-tied") else (family, name)))
    assert sum(p.numel() for p in tied.parameters()) < sum(p.numel() for p in untied.parameters())


def test_ignored_targets_are_uneven():
    labels = CASES["llama"].inputs(BATCH)["labels"]
    counts = (labels != IGNORED).sum(1).tolist()
    assert counts[0] == labels.shape[1]
    assert counts[-1] == 0
    assert len(set(counts)) > 4
