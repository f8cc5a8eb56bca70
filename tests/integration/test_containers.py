"""Results in containers that torch does not know."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import partitioner
from partitioner import Constraints, Topology, partition

pytestmark = pytest.mark.usefixtures("without_baselines")


@dataclass
class Scores:
    logits: Tensor
    hidden: list[Tensor] = field(default_factory=list)


@dataclass
class Output:
    loss: Tensor
    scores: Scores
    cache: None = None


class Attributes(dict[str, Any]):
    """A dict whose keys are attributes."""

    __getattr__ = dict.__getitem__


class Registered(Attributes):
    """A dict that torch was told about, but not how its entries are called, as the outputs of diffusers."""


pytree.register_pytree_node(
    Registered,
    lambda tree: (list(tree.values()), list(tree)),
    lambda values, keys: Registered(zip(keys, values, strict=True)),
)


KINDS: dict[str, Callable[..., Any]] = {
    "dataclass": lambda loss, logits, hidden: Output(loss, Scores(logits, [hidden])),
    "namespace": lambda loss, logits, hidden: SimpleNamespace(loss=loss, scores={"logits": logits, "hidden": [hidden]}),
    "dict": lambda loss, logits, hidden: Attributes(loss=loss, scores=Scores(logits, [hidden])),
    "registered": lambda loss, logits, hidden: Registered(loss=loss, scores=Registered(logits=logits, hidden=[hidden])),
    "mapping": lambda loss, logits, hidden: UserDict(loss=loss, scores=Scores(logits, [hidden])),
}


class Classifier(nn.Module):
    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(6, 8), nn.Linear(8, 4), kind

    def forward(self, x: Tensor, target: Tensor) -> Any:
        hidden = self.up(x).relu()
        logits = self.down(hidden)
        return self.kind(F.cross_entropy(logits, target), logits, hidden)


@pytest.mark.parametrize("given", [False, True], ids=["found", "given"])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_found_by_path(kind: str, given: bool):
    model, inputs = Classifier(KINDS[kind]), {"x": torch.randn(4, 6), "target": torch.arange(4)}
    loss = (lambda output: 2 * output.loss) if given and kind != "mapping" else None
    plan = partition(model, Topology.local(2), inputs, loss=loss, constraints=Constraints(tp=2, pp=1, dp=1))
    report = plan.verify(model, inputs, loss)
    assert report.ok
    assert {"loss", "output loss", "output scores.logits", "output scores.hidden.0"} <= report.errors.keys()


def test_they_are_returned_as_dicts():
    model, inputs = Classifier(KINDS["dataclass"]), {"x": torch.randn(4, 6), "target": torch.arange(4)}
    plan = partition(model, Topology.local(2), inputs, constraints=Constraints(tp=2, pp=1, dp=1))
    outputs, expected = partitioner.run_local(plan, model, inputs).outputs, model(**inputs)
    torch.testing.assert_close(outputs["scores"]["logits"], expected.scores.logits)
    assert pytree.tree_is_leaf(expected)  # torch was told nothing
