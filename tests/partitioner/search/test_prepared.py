"""A prepared model: captured once, planned as the model itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from partitioner import Constraints, InputsError, PlanError, Topology, partition, prepare
from partitioner.plan import Estimate
from partitioner.solve.evaluate import prepared_model as module
from partitioner.solve.search import fit_memory

pytestmark = pytest.mark.usefixtures("without_baselines")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def test_it_is_captured_once_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    times = []
    monkeypatch.setattr(module, "capture", lambda *a, _real=module.capture, **k: (times.append(1), _real(*a, **k))[1])
    prepared = prepare(_model(), (torch.zeros(8, 8),), loss=_loss)
    for dp in (1, 2):
        partition(prepared, Topology.local(2), constraints=Constraints(dp=dp), global_batch=8)
    assert len(times) == 1
    partition(prepared, Topology.local(2), global_batch=16)
    assert len(times) == 2


def test_its_plan_is_the_models() -> None:
    model, inputs = _model(), (torch.zeros(8, 8),)
    own = partition(model, Topology.local(2), inputs, loss=_loss)
    again = partition(prepare(model, inputs, loss=_loss), Topology.local(2))
    assert again.program == own.program
    assert (again.model, again.estimate) == (own.model, own.estimate)
    assert again.verify(model, inputs, loss=_loss).ok


def test_arguments_that_it_was_not_prepared_with_are_refused() -> None:
    prepared = prepare(_model(), (torch.zeros(8, 8),), loss=_loss, precision="bf16")
    with pytest.raises(
        InputsError, match="was called with another precision; expected the same value here: leave precision out"
    ):
        partition(prepared, Topology.local(2), precision="fp32")


def test_an_estimate_alone_has_the_same_figures() -> None:
    model, inputs = _model(), (torch.zeros(8, 8),)
    plan = partition(model, Topology.local(2), inputs, loss=_loss, estimate_only=True)
    whole = partition(model, Topology.local(2), inputs, loss=_loss).estimate

    def timed(estimate: Estimate) -> Estimate:
        stages = tuple(stage.model_copy(update={"memory": {}}) for stage in estimate.stages)
        return estimate.model_copy(update={"memory": (), "stages": stages, "simulated": None})

    assert timed(plan.estimate) == timed(whole)
    assert max(whole.memory) <= max(plan.estimate.memory) <= 1.2 * max(whole.memory)  # tables, and a program followed
    assert plan.certificate.baselines == ()
    assert plan.planned_only == ("estimate_only=True",)
    with pytest.raises(PlanError, match="estimate_only"):
        plan.rank(0)


def test_the_fastest_simulated_plan_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plan is slower than estimated when its program is simulated, the second more so than the first, and so on:
    the first is the fastest when no more are tried."""
    simulated, emit = list[float](), fit_memory._emit_found_plan

    def emit_slower(*arguments: Any) -> Any:
        found = emit(*arguments)
        simulated.append(found.estimate.step_time * (1.5 + len(simulated)))
        return replace(found, estimate=found.estimate.model_copy(update={"simulated": simulated[-1]}))

    monkeypatch.setattr(fit_memory, "_emit_found_plan", emit_slower)
    plan = partition(_model(), Topology.local(4), (torch.zeros(8, 8),), loss=_loss)
    assert len(simulated) > 1
    assert plan.estimate.step_time == min(simulated) == simulated[0]


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "8"])
def test_no_batch_is_refused(size: Any) -> None:
    prepared = prepare(_model(), (torch.zeros(8, 8),), loss=_loss)
    with pytest.raises(InputsError, match="global_batch must be"):
        partition(prepared, Topology.local(2), global_batch=size)


@pytest.mark.parametrize("training", [True, False])
def test_inference_that_changes_buffers_is_told(training: bool) -> None:
    """With what to do about it only where there is something to do."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return self.inner(x)

    plan = partition(Counting().train(training), Topology.local(1), (torch.zeros(8, 8),), objective="infer")
    (note,) = [note for note in plan.notes if "inference changes" in note]
    assert note.startswith("inference changes 1 buffer (calls), as the model's forward does")
    assert note.endswith("call model.eval() before planning if this is not intended") == training
