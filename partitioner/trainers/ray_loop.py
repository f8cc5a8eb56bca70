"""``PartitionedLoop``: the function that each worker of Ray Train runs, which trains a model by a plan.

Ray places, starts and restarts the workers, makes their process group, and gathers what they report. The engine takes
the process group as it is: neither ``prepare_model`` nor ``prepare_data_loader`` is called. Checkpoints are those of
the engine, in a folder that all nodes see; a restarted run goes on from the last one, under another plan if there are
fewer workers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import ray.train
import torch.distributed as dist
from ray.train.torch import get_device
from torch import nn
from torch.utils.data import default_collate

from partitioner.api import partition
from partitioner.constraints import Constraints
from partitioner.plan import Plan
from partitioner.runtime.checkpoint.series import Checkpoints
from partitioner.runtime.engine.data_loader import Loader, Samples
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.observe.metrics import StepLog
from partitioner.runtime.watch.watchdog import Watch
from partitioner.topology import Topology
from partitioner.trainers.arguments import TrainerError
from partitioner.trainers.shared_plan import share_plan


@dataclass(frozen=True)
class PartitionedLoop:
    """A ``train_loop_per_worker`` for ``ray.train.torch.TorchTrainer``: each worker is one rank of a plan::

        loop = PartitionedLoop(build, make_dataset, make_optimizer, "/shared/run", batch_size=256, steps=1000)
        TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=8, use_gpu=True)).fit()

    Losses and updates are those of one process with the whole global batch. ``train_loop_config`` of ``TorchTrainer``
    replaces fields by name, such as ``{"steps": 2000}``. Worker ``i`` drives the topology's ``i``-th device.

    Args:
        model: returns the model, with equal weights in every process.
        dataset: returns the data: a dataset with ``__len__`` and ``__getitem__``, or an ``IterableDataset``. A sample
            is a dict of the model's inputs by name, or any object if ``collate`` makes such a dict from a list of
            samples.
        optimizer: takes a list of parameters (this rank's parts of the model's parameters) and returns an optimizer of
            them.
        folder: where the plan, checkpoints and ``metrics.jsonl`` are written; all nodes must be able to read it.
        steps: number of optimizer steps of the whole run, including those before a restart.
        batch_size: samples of a global batch.
        plan: path of a plan file that all nodes can read; ``None``: the first worker searches for a plan for the
            present number of workers.
        topology: the cluster; ``None``: the workers of this launch, on this machine or on several equal nodes with
            GPUs.
        constraints: choices that the plan must have, such as ``Constraints(tp=2)``. ``precision``: ``bf16``, ``fp16``,
            ``fp32``, ``fp64``, ``tf32`` or ``fp8``; ``None``: the type of the parameters.
        schedule: takes the optimizer and returns its learning-rate schedule; ``None``: the rate is constant.
        collate: takes a list of samples and returns a batch; torch's ``default_collate`` by default.
        accumulate: number of global batches in an optimizer step; their gradients are averaged.
        max_norm: largest norm of the gradients over the whole model, to which larger gradients are scaled; ``None``:
            they are not clipped.
        seed: of the order of samples and of the model's random operators.
        save_every: optimizer steps between checkpoints. report_every: optimizer steps between reports of metrics to
            Ray, at which all workers wait for each other.
        patience_s: seconds without progress after which a worker is ended as hanging; Ray then restarts all workers.

    A call raises :class:`TrainerError` on all workers before training if the plan is for another number of workers or
    places workers on other nodes than Ray.
    """

    model: Callable[[], nn.Module]
    dataset: Callable[[], Samples | Iterable[Any]]
    optimizer: Callable[[list[nn.Parameter]], Any]
    folder: str | Path
    batch_size: int
    steps: int
    plan: str | Path | None = None
    topology: Topology | None = None
    constraints: Constraints | None = None
    precision: str | None = None
    schedule: Callable[[Any], Any] | None = None
    collate: Callable[[list[Any]], Any] = field(default=default_collate)
    accumulate: int = 1
    max_norm: float | None = None
    seed: int = 0
    save_every: int = 100
    report_every: int = 10
    patience_s: float = 300.0

    def __call__(self, config: Mapping[str, Any]) -> None:
        """Train on this worker of a Ray trainer. ``config``: name of a field of this object -> value that replaces
        it.
        """
        loop = self._replace_fields(config)
        context = ray.train.get_context()
        loop._train(context.get_world_rank(), context.get_world_size(), context.get_node_rank())

    def _replace_fields(self, config: Mapping[str, Any]) -> PartitionedLoop:
        known = {f.name for f in fields(self)}
        if unknown := sorted(config.keys() - known):
            raise TrainerError(
                f"train_loop_config has {unknown[0]!r}, which is not a field of PartitionedLoop; expected fields among "
                f"{', '.join(sorted(known))}"
            )
        return replace(self, **config)

    def _train(self, rank: int, world_size: int, node: int) -> None:
        """Train as the worker ``rank`` of ``world_size``, on the node with index ``node``."""
        device, folder = get_device(), Path(self.folder)
        plan = self._get_plan(rank, world_size, device.type == "cuda")
        _check_places(plan, world_size, node)
        engine = Engine(plan, self.model(), device, seed=self.seed)
        optimizer = engine.on_disk(self.optimizer([*engine.parameters()]))
        schedule = None if self.schedule is None else self.schedule(optimizer)
        loader = Loader(self.dataset(), engine, seed=self.seed, collate=self.collate, batch_size=self.batch_size)
        extra = {"data": loader} | ({} if schedule is None else {"schedule": schedule})
        checkpoints = Checkpoints(folder / "checkpoints", engine, optimizer, every=self.save_every, extra=extra)
        checkpoints.restore()
        # Ray sees a process that is gone, the watch one that hangs. The watch has a folder that all nodes see, since it
        # would otherwise find the hosts in torchrun's environment.
        with (
            Watch(engine, folder / "watch", patience_s=self.patience_s),
            StepLog(engine, plan, folder if rank == 0 else None) as log,
        ):
            found: dict[str, Any] = {"optimizer_step": engine.optimizer_steps}
            while engine.optimizer_steps < self.steps:
                total = 0.0
                for index in range(self.accumulate):
                    loss = engine.step(next(loader), local=True, accumulate=index > 0, weight=1 / self.accumulate)
                    total += 0.0 if loss is None else float(loss) / self.accumulate
                more = {} if self.max_norm is None else {"norm": float(engine.clip_grad_norm_(self.max_norm))}
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                metrics = log.step(total, **more)
                checkpoints.after_step()
                found = {**asdict(metrics), "optimizer_step": engine.optimizer_steps, **more}
                if engine.optimizer_steps % self.report_every == 0 and engine.optimizer_steps < self.steps:
                    ray.train.report(found)
            checkpoints.close()
        _report_end(found, folder if rank == 0 else None)

    def _get_plan(self, rank: int, world_size: int, has_gpus: bool) -> Plan:
        """Return the plan in the file that the field ``plan`` names. If the field is ``None``, the first worker
        searches for a plan, writes it to ``plan.json``, and sends it to the others; all workers must then call this.
        ``rank``: number of this worker. ``world_size``: number of workers. ``has_gpus``: whether workers compute on
        GPUs."""
        if self.plan is not None:
            return Plan.load(self.plan)
        plan: Plan = share_plan(lambda: self._search_plan(world_size, has_gpus), rank, dist.get_world_size())[0]
        return plan

    def _search_plan(self, world_size: int, has_gpus: bool) -> Plan:
        topology = self.topology or (Topology.detect() if has_gpus else Topology.local(world_size))
        dataset: Any = self.dataset()
        rows = islice(iter(dataset), self.batch_size) if not hasattr(dataset, "__getitem__") else ()
        samples = [*rows] or [dataset[i % len(dataset)] for i in range(self.batch_size)]
        plan = partition(
            self.model(), topology, self.collate(samples), constraints=self.constraints, precision=self.precision
        )
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        plan.save(Path(self.folder) / "plan.json")
        return plan


def _report_end(metrics: dict[str, Any], folder: Path | None) -> None:
    """Report ``metrics`` to Ray as the final metrics of this worker. ``folder``: on the first worker, the folder of the
    run; the report then has a Ray checkpoint with a file that names the folder of the checkpoints, and the weights are
    not copied. ``None`` on the other workers.
    """
    if folder is None:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "partitioner.json").write_text(json.dumps({"checkpoints": str(folder / "checkpoints")}))
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(place))


def _check_places(plan: Plan, world_size: int, node: int) -> None:
    """Raise :class:`TrainerError` on all workers if ``plan`` is for another number of workers, or if a worker does not
    run on the node on which ``plan`` places it. ``node``: index of the node on which this worker runs. ``world_size``:
    number of workers."""
    planned = plan.program.world_size
    if planned != world_size:
        raise TrainerError(
            f"Ray has started {world_size} workers, but the plan is for {planned} ranks: expected "
            f"ScalingConfig(num_workers={planned}), or plan=None to make a plan for these workers"
        )
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, node)
    for worker, place in enumerate(found):
        if place != plan.topology.node_of[worker]:
            raise TrainerError(
                f"worker {worker} is on node {place}, and the plan's device {worker} on node "
                f"{plan.topology.node_of[worker]}: give each node as many workers as the topology has devices on it"
            )
