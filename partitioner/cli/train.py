"""Train a plan on this machine, for the command ``run``. Ranks are processes; the optimizer is PyTorch's AdamW on the
whole model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import partitioner
from partitioner.cli.options import TargetModel
from partitioner.errors import PlanError
from partitioner.passes.capture.wrappers import unwrap_model
from partitioner.plan import Plan
from partitioner.user_function import TargetError


def train_on_target(plan: Plan, target: TargetModel, steps: int, lr: float) -> Iterator[float]:
    """Train ``target``'s model by ``plan`` on this machine, and yield the loss before each of ``steps`` optimizer
    steps. All steps use the inputs of ``target``, and AdamW with the learning rate ``lr``.

    Raise :class:`PlanError` if the plan does not train, and :class:`TargetError` if ``target`` has no inputs.
    """
    if plan.program.objective != "train" or plan.program.loss is None:
        raise PlanError("this plan is for inference; make one with --objective train to run it")
    if target.inputs is None:
        raise TargetError("the function returned no inputs; expected (model, inputs), with one whole global batch")
    parameters = dict(unwrap_model(target.model)[0].named_parameters(remove_duplicate=False))
    optimizer = torch.optim.AdamW(target.model.parameters(), lr=lr)
    with partitioner.LocalRanks(plan.program.world_size) as ranks:
        for _ in range(steps):
            done = partitioner.run_local(plan, target.model, target.inputs, outputs=False, ranks=ranks)
            assert done.loss is not None
            yield float(done.loss)
            for name, gradient in done.grads.items():
                if name in parameters:
                    parameters[name].grad = gradient.to(parameters[name].device, parameters[name].dtype)
            optimizer.step()
