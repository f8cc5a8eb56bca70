"""``PartitionedStrategy``: a strategy of Lightning whose ranks run the steps of a LightningModule by a plan.

The loop, hooks, callbacks, loggers and schedules are those of ``lightning.pytorch.Trainer``. Four parts are replaced.
Forward and backward of ``training_step``, and ``validation_step`` during ``fit``, are programs of an
:class:`partitioner.Engine`. The optimizer updates this rank's parts of the parameters. Gradients are clipped by their
norm over all ranks. A checkpoint contains the engine's state, from which training can continue under any plan of the
module.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from partitioner.api import partition
from partitioner.constraints import Constraints
from partitioner.plan import Plan
from partitioner.programs.requests import Evaluate, Shapes
from partitioner.runtime.checkpoint.training_state import collect_random_state, set_random_state
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.engine.outputs import select_outputs
from partitioner.topology import Topology
from partitioner.trainers.arguments import TrainerError
from partitioner.trainers.lightning_steps import (
    LOGGED,
    LOSS,
    RETURNED,
    TRAINING,
    VALIDATION,
    StepModel,
    StepRecords,
)
from partitioner.trainers.shared_plan import keep_generators, share_plan

EVALUATION = "eval"  # name of the plan's program that evaluates
STATE = "trainer"  # name of Lightning's part of a checkpoint

_REFUSED_CALLBACKS = (
    StochasticWeightAveraging,
    BaseFinetuning,
    BackboneFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
)


class EngineSteps:
    """Methods that replace methods of a Lightning precision plugin if a plan divides the model over ranks: the engine
    has computed the gradients already, and the engine clips them. :func:`_adapt_precision` mixes this class into the
    class of the plugin. ``engine``: the engine of this rank, which runs its part of the model."""

    engine: Engine

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing. Lightning calls this method for the backward, which the engine has run together with the forward.
        The arguments are not used."""

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Call ``closure``, which runs ``training_step`` on a global batch; then step ``optimizer``, to which
        ``kwargs`` are passed. Return the result of ``closure``. ``model``: the LightningModule.
        """
        result = closure()
        self._after_closure(model, optimizer)  # type: ignore[attr-defined]
        optimizer.step(**kwargs)
        return result

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Scale all gradients so that their norm over all parameters on all ranks is at most ``clip_val``.
        ``optimizer``: not used, because the engine holds the gradients."""
        self.engine.clip_grad_norm_(clip_val)


def _adapt_precision(plugin: Any, engine: Engine) -> Any:
    """Return a copy of ``plugin``, a precision plugin of Lightning, that leaves backward and gradient clipping to
    ``engine``, which runs this rank's part of the model.
    """
    adapted = copy.copy(plugin)
    adapted.__class__ = type(type(plugin).__name__, (EngineSteps, type(plugin)), {})
    adapted.engine = engine
    return adapted


class PartitionedStrategy(DDPStrategy):  # type: ignore[misc]
    """A Lightning strategy that trains by a plan: the ranks of this launch run one LightningModule together.

    The batch of a data loader is the global batch of a step, however the plan uses the ranks. Losses, gradients and
    updates are those of Lightning in one process. With ``accumulate_grad_batches`` the gradient is the mean over the
    accumulated batches, as in Lightning. ``training_step`` and ``validation_step`` are traced once: they may depend on
    the batch and the weights, and log scalars.

    Args:
        topology: the cluster; ``None``: the ranks of this launch, on this machine or on several equal nodes with GPUs.
        constraints: the choices that the plan must have, such as ``Constraints(tp=2)``; the planner makes all other
            choices. ``None``: the planner makes all choices.
        shapes: the shapes of batches, if they differ; a batch is padded to the next larger shape. ``None``: all batches
            have the shape of the first.
        precision: ``bf16``, ``fp16``, ``fp32``, ``fp64``, ``tf32`` or ``fp8``; ``None``: the precision of
            ``L.Trainer(precision=...)``, for which ``32-true``, ``64-true`` and ``bf16-mixed`` (bfloat16 parameters
            with float32 copies) are accepted.
        compile: whether to compile the operators between collectives with Inductor, or the name of another backend of
            ``torch.compile``; ``None``: what the plan says, which is to compile on GPUs by default.
        options: arguments of ``DDPStrategy``: ``process_group_backend``, ``timeout``, ``start_method``,
            ``cluster_environment``.

    Attributes: ``plan``, the plan, and ``engine``, this rank's :class:`partitioner.Engine`; ``fit`` creates both. The
    module keeps the weights that it was given until ``fit`` ends, and gets the trained ones then.

    Raises :class:`TrainerError` before training for options and methods that cannot have their effect with a plan, and
    the errors of :func:`partitioner.partition` if there is no plan.
    """

    def __init__(
        self,
        *,
        topology: Topology | None = None,
        constraints: Constraints | None = None,
        shapes: Shapes | None = None,
        precision: str | None = None,
        compile: bool | str | None = None,
        **options: Any,
    ) -> None:
        allowed = {"process_group_backend", "timeout", "start_method", "cluster_environment"}
        if unknown := sorted(options.keys() - allowed):
            raise TrainerError(f"PartitionedStrategy has no option {unknown[0]}: expected one of {sorted(allowed)}")
        super().__init__(**options)
        self.topology, self.constraints, self.shapes = topology, constraints, shapes
        self.plan: Plan | None = None
        self._engine: Engine | None = None
        self._asked_precision, self._compile = precision, compile
        self._records = StepRecords()
        self._plain_precision: Any = None  # Lightning's precision plugin, for runs without a plan
        self._has_gradients = False  # whether gradients of the next batch are added to earlier ones

    @property
    def engine(self) -> Engine:
        """Return the engine, which runs this rank's part of the model by the plan. Raise :class:`TrainerError` before
        ``fit``, which creates it."""
        if self._engine is None:
            raise TrainerError("there is no engine yet: call trainer.fit first, which creates it")
        return self._engine

    # -- set up

    def setup_distributed(self) -> None:
        """Create the process group of all ranks. The state of the random generators is restored afterwards, so that
        ranks that each run the whole script draw the same numbers as one process."""
        if self._start_method == "popen":
            with keep_generators():
                super().setup_distributed()
        else:
            super().setup_distributed()

    def setup(self, trainer: Any) -> None:
        """Prepare the run of ``trainer``. For ``fit``, search for a plan of the module and create the engine and the
        optimizer; for other runs, such as ``test``, move the whole module to the device of this rank."""
        module = self.lightning_module
        assert self.accelerator is not None and isinstance(module, LightningModule)
        self.accelerator.setup(trainer)
        trainer._accelerator_connector.use_distributed_sampler = False  # every rank has the global batch
        self._engine = None
        if self._plain_precision is not None:  # it was replaced by an earlier ``fit``
            self._precision_plugin = self._plain_precision
        if trainer.state.fn != TrainerFn.FITTING:
            self.precision_plugin.convert_module(module)
            module.to(self.root_device)
            return
        _check_trainer(trainer, module)
        precision = self._find_precision()
        if precision == "fp64":
            module.double()
        self.plan, self._records = share_plan(
            partial(self._search_plan, trainer, module, precision), self.global_rank, self.world_size, self._get_records
        )
        self._check_last_batches(trainer, module)
        with keep_generators():
            self._engine = Engine(
                self.plan,
                StepModel(module, StepRecords()),
                self.root_device,
                seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),
                keep_outputs=self._collects(TRAINING),
                compile=self._compile,
            )
        self._plain_precision = self.precision_plugin
        self._precision_plugin = _adapt_precision(self.precision_plugin, self._engine)
        self._has_gradients = False
        self.setup_optimizers(trainer)

    def _find_precision(self) -> str | None:
        """Return the precision to plan for: the argument ``precision`` of this strategy, or else the precision of the
        trainer's precision plugin. ``None``: the types of the parameters. Raise :class:`TrainerError` if a plan cannot
        have the precision that the user chose."""
        plugin = self.precision_plugin
        kind = str(plugin.precision)
        if type(plugin) in (Precision, DoublePrecision):
            found = "fp64" if kind == "64-true" else None
        elif isinstance(plugin, MixedPrecision) and kind == "bf16-mixed":
            found = "bf16"
        else:
            raise TrainerError(
                f"precision={kind!r} is not supported: expected '32-true', '64-true' or 'bf16-mixed', or "
                "PartitionedStrategy(precision=...) without precision of L.Trainer"
            )
        return self._asked_precision or found

    def _get_records(self) -> StepRecords:
        return self._records

    def _search_plan(self, trainer: Any, module: Any, precision: str | None) -> Plan:
        """Return a plan of ``training_step`` and, if ``fit`` of ``trainer`` validates, of ``validation_step`` of
        ``module``, a LightningModule. The first batches of the data loaders are the example inputs. ``precision``: the
        number format to compute in, such as ``bf16``; ``None``: the types of the parameters.
        """
        self._records = StepRecords()
        world = self.world_size
        on_gpus = self.root_device.type == "cuda"
        topology = self.topology or (Topology.detect() if on_gpus else Topology.local(world))
        epoch = trainer.fit_loop
        loaders = _list_loaders(epoch._data_source, "max_size_cycle")
        batch = self._sample_batch(module, loaders)
        programs: dict[str, Evaluate] = {}
        if _validates(trainer, module):
            evaluated = _list_loaders(epoch.epoch_loop.val_loop._data_source, "sequential")
            programs[EVALUATION] = Evaluate(inputs={"batch": self._sample_batch(module, evaluated)})
        model = StepModel(module, self._records)
        return partition(
            model.train(),
            topology,
            {"batch": batch},
            shapes=self.shapes or Shapes(),
            programs=programs,
            constraints=self.constraints,
            precision=precision,
        )

    def _check_last_batches(self, trainer: Any, module: Any) -> None:
        """Raise :class:`TrainerError` if the last batch of a data loader of ``trainer`` has fewer samples than the
        others, and the plan cannot pad it without a change of the results. ``module``: the LightningModule, which says
        whether ``fit`` also reads validation data."""
        assert self.plan is not None
        checks = [("train", trainer.fit_loop._data_source, self.plan.padding)]
        if _validates(trainer, module):
            checks.append(
                ("val", trainer.fit_loop.epoch_loop.val_loop._data_source, self.plan.further[EVALUATION].padding)
            )
        for what, source, padding in checks:
            for loader in pytree.tree_leaves(source.dataloader()):
                rest = _count_rest(loader)
                if rest and (padding is None or padding.fewer):
                    raise TrainerError(
                        f"the last batch of a {what} data loader has {rest} samples instead of {loader.batch_size}, "
                        "and cannot be padded without a change of the results: "
                        f"{padding.fewer if padding else 'the plan has no padding'}; "
                        "expected whole batches: pass drop_last=True to the DataLoader, or another batch_size"
                    )

    def _sample_batch(self, module: Any, loader: Any) -> Any:
        """Return the first batch of ``loader``, after the hooks of ``module`` that change batches, as ``training_step``
        would get it. It serves as the example to plan with."""
        for batch, _, __ in loader:
            batch = module._on_before_batch_transfer(self.precision_plugin.convert_input(batch), dataloader_idx=0)
            return _to_plain(module._apply_batch_transfer_handler(batch, torch.device("cpu"), 0))
        raise TrainerError("a data loader has no batch: expected at least one, because the plan is made for its shapes")

    def setup_optimizers(self, trainer: Any) -> None:
        """Create for ``trainer`` the optimizer and the learning-rate schedules that ``configure_optimizers`` of the
        module returns, and replace the parameters of the optimizer by this rank's parts of them."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise TrainerError(
                f"configure_optimizers returns {len(self.optimizers)} optimizers; expected one, with parameter groups"
            )
        optimizer, engine = self.optimizers[0], self.engine
        if optimizer.state:
            raise TrainerError(
                f"{type(optimizer).__name__} creates its states for whole parameters when it is constructed: "
                "expected an optimizer that creates them in its first step"
                ", such as AdamW, SGD or RMSprop"
            )
        names = {id(p): name for name, p in self.lightning_module.named_parameters(remove_duplicate=False)}
        own = dict(engine.named_parameters())
        rest = [p for p in engine.parameters() if all(p is not x for x in own.values())]
        taken: set[int] = set()
        for index, group in enumerate(optimizer.param_groups):
            if unknown := [p for p in group["params"] if id(p) not in names]:
                raise TrainerError(
                    f"the optimizer has a parameter of shape {list(unknown[0].shape)} that does not belong to the "
                    "module: "
                    "expected only parameters of the module"
                )
            parts = [own[names[id(p)]] for p in group["params"] if names[id(p)] in own]
            parts = [p for p in parts if id(p) not in taken and not taken.add(id(p))]  # type: ignore[func-returns-value]
            group["params"] = [*parts, *(rest if index == 0 else [])]
        optimizer.zero_grad = _keep_gradients  # the engine replaces gradients, or adds to them
        engine.on_disk(optimizer)
        for wrapper in self._lightning_optimizers:  # they step the optimizer itself, which is checked
            engine.trust_optimizer(wrapper)

    def model_to_device(self) -> None:
        """Do nothing. Lightning calls this method to move the whole module to the device; the engine instead copies
        this rank's part there."""

    # -- data

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a data loader with the data of ``dataloader`` that yields the same global batches on all ranks. Raise
        :class:`TrainerError` for a data loader that already gives each rank other samples.
        """
        if self._engine is not None and isinstance(getattr(dataloader, "sampler", None), DistributedSampler):
            raise TrainerError(
                "a data loader has a DistributedSampler: expected one that reads the whole data set, as shuffle=True "
                "does, because the strategy itself divides batches over ranks"
            )
        _auto_add_worker_init_fn(dataloader, 0)  # workers draw the same random numbers on all ranks
        return EqualLoader(dataloader, self)

    # -- steps

    def training_step(self, batch: Any, *given: Any) -> dict[str, Any]:
        """Run forward and backward of one global batch on all ranks. Log what ``training_step`` of the module logs, and
        return what it returns as a dict, with the loss of the global batch. ``batch``: the samples of the global batch
        or, if the data loader reads only this rank's samples, these samples. ``given``: not used."""
        trainer = self.lightning_module.trainer
        count = trainer.accumulate_grad_batches
        [loader] = trainer.fit_loop._combined_loader.flattened[:1]
        own = isinstance(loader, EqualLoader) and loader.reads_own
        batch = _to_plain(batch)
        loss = self.engine.step({"batch": batch}, local=own, accumulate=self._has_gradients, weight=1 / count)
        self._has_gradients = True
        assert loss is not None
        found: dict[str, Any] = self._finish_step(TRAINING, loss, loader.batch_size if own else _count_samples(batch))
        return found

    def validation_step(self, batch: Any, *given: Any) -> Any:
        """Run the forward of ``batch``, a global batch of validation data, on all ranks. Log what ``validation_step``
        of the module logs, and return what it returns. ``given``: not used."""
        if self._engine is None:
            return super().validation_step(batch, *given)
        batch = _to_plain(batch)
        with torch.inference_mode(False), torch.no_grad():
            loss = self.engine.run(EVALUATION, {"batch": batch}, keep_outputs=self._collects(VALIDATION))
            return self._finish_step(VALIDATION, loss, _count_samples(batch))

    def _collects(self, step: str) -> bool:
        """Return whether the method ``step`` of the module (``training_step`` or ``validation_step``) logs or returns
        values other than the loss, which must then be collected from the ranks."""
        return bool(self._records.logged.get(step) or self._records.returned.get(step))

    def _finish_step(self, step: str, loss: Tensor | None, size: int) -> Any:
        """Log, for one global batch, the values that the method ``step`` of the module (``training_step`` or
        ``validation_step``) logs, and return the result of ``step``. ``loss``: the loss of the batch; ``None`` if
        ``validation_step`` returns none. ``size``: number of its samples, by which Lightning weights averages.
        """
        if loss is not None:
            loss = loss.detach().as_subclass(Tensor).clone()
        logged, returned = self._records.logged.get(step, {}), self._records.returned.get(step)
        paths = [f"{LOGGED}.{name}" for name in logged] + [f"{RETURNED}.{name}" for name in returned or ()]
        values = self._read_results(paths, loss)
        self.__dict__["reduce"] = _keep_value  # the values are those of the global batch already
        try:
            for name, options in logged.items():
                options |= {"batch_size": size, "sync_dist": True}
                self.lightning_module.log(name, values[f"{LOGGED}.{name}"], **options)
        finally:
            del self.__dict__["reduce"]
        found = {} if loss is None else {LOSS: loss}
        found |= {name: values[f"{RETURNED}.{name}"] for name in returned or ()}
        return found if step == TRAINING or returned else loss

    def _read_results(self, paths: list[str], loss: Tensor | None) -> dict[str, Any]:
        """Return the outputs of the model at ``paths`` for the last global batch: path -> tensor or number. The parts
        of all ranks are joined, so the result is equal on all ranks. ``loss``: the loss of the batch, which is used for
        outputs that are the loss; ``None`` if there is no loss.
        """
        if not paths:
            return {}
        found = self.engine.latest_outputs
        outputs = {o.path: o for o in found.rank.program.outputs}
        of_loss = outputs[LOSS].value if LOSS in outputs else None
        values: dict[str, Any] = {}
        for path in paths:
            output = outputs[path]
            if output.value is None:
                values[path] = output.constant
            elif output.value == of_loss and loss is not None:
                values[path] = loss
        if len(values) == len(paths):
            return values
        mine = select_outputs(found.rank, found.shards)
        needed = {outputs[path].value for path in paths}
        own = found.rank.rank, {v: {m: x.cpu() for m, x in parts.items()} for v, parts in mine.items() if v in needed}
        everyone: list[Any] = [own] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(everyone, own)
        joined = found.join(dict(everyone))
        return {path: values.get(path, joined[path]) for path in paths}

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Call the hooks of Lightning that belong before and after a backward, and return the loss ``closure_loss``.
        The engine has run the backward itself together with the forward. The other arguments are not used.
        """
        module, plugin = self.lightning_module, self.precision_plugin
        return plugin.post_backward(plugin.pre_backward(closure_loss, module), module)  # type: ignore[no-any-return]

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Call ``closure``, which runs the last global batch of this optimizer step; then step ``optimizer``. Return
        the result of ``closure``. ``model``: the LightningModule. ``kwargs``: passed to the optimizer's step.
        """
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._has_gradients = False
        return result

    def on_train_end(self) -> None:
        """Copy the trained weights of the whole model into the LightningModule, on every rank. Lightning calls this at
        the end of ``fit``."""
        self._copy_weights(self.engine)

    def _copy_weights(self, engine: Engine) -> None:
        """Copy the whole weights of ``engine`` into the module. All ranks call it."""
        whole = engine.state_dict(full=True)
        known = self.broadcast({*whole})
        with torch.no_grad():
            for name, held in self.lightning_module.state_dict(keep_vars=True).items():
                if name not in known:
                    continue
                value = torch.empty_like(held, device=self.root_device)
                if self.is_global_zero:
                    value.copy_(whole[name])
                if self.world_size > 1:
                    dist.broadcast(value, 0)
                held.copy_(value)

    # -- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return true, which tells Lightning to load a checkpoint only after :meth:`setup`, because it is loaded into
        the engine that is created there."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return an empty dict during ``fit``: Lightning would add the weights of the module to a checkpoint here, but
        :meth:`save_checkpoint` writes the weights of all ranks. In other runs, return the weights of the module."""
        return {} if self._engine is not None else self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an empty dict. Lightning would add the states of ``optimizer`` to a checkpoint here, but
        :meth:`save_checkpoint` writes the states of all ranks."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint to the folder ``filepath``: the engine's weights and optimizer states, and the state of
        Lightning's loops and callbacks in ``checkpoint``. All ranks must call this, since each has a part of the
        weights. Raise :class:`TrainerError` unless ``storage_options`` is ``None``.
        """
        if storage_options is not None:
            raise TrainerError(
                "storage_options is not supported: expected a folder on a file system that all ranks share"
            )
        held = _Held(self.broadcast({k: v for k, v in checkpoint.items() if k != "state_dict"}))
        optimizer = self.optimizers[0] if "optimizer_states" in checkpoint else None
        self.engine.save(Path(filepath), optimizer, extra={STATE: held})

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the checkpoint in the folder ``checkpoint_path``. Outside of ``fit``, as for ``test``, the weights are
        copied into the whole module; during ``fit`` the engine and the optimizer get their states. Return the state of
        Lightning's loops and callbacks, with an empty ``state_dict``. All ranks must call this. ``weights_only``: not
        used. Raise :class:`TrainerError` if the folder does not exist, or if there is no plan yet to read it.
        """
        if not Path(checkpoint_path).is_dir():
            raise TrainerError(
                f"{checkpoint_path} is not a folder: expected a checkpoint that PartitionedStrategy wrote"
            )
        held = _Held({})
        if self._engine is not None:
            optimizer = self.optimizers[0] if self.optimizers else None
            self._engine.load(Path(checkpoint_path), optimizer, extra={STATE: held})
        elif self.plan is None:
            raise TrainerError(
                f"{checkpoint_path} is a sharded checkpoint, which only a plan can read: call fit first, or evaluate a "
                "module with whole weights, such as the one that fit has trained, with ckpt_path=None"
            )
        else:  # validate, test and predict run the whole module
            with keep_generators():
                whole = StepModel(self.lightning_module, StepRecords())
                engine = Engine(self.plan, whole, self.root_device, compile=False)  # runs no step
                engine.load(Path(checkpoint_path), extra={STATE: held})
            self._copy_weights(engine)
        return {**held.state, "state_dict": {}}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing. Lightning would load the weights into the module here, but :meth:`load_checkpoint` has loaded
        them already. The arguments are not used.
        """

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing. Lightning would load the states of the optimizers here, but :meth:`load_checkpoint` has loaded
        them already. ``checkpoint``: not used.
        """


class EqualLoader:
    """A data loader that yields the same global batches on all ranks: its random generators start in the state of the
    first rank's generators. ``loader``: the data loader to read from. ``strategy``: the Lightning strategy, which knows
    the plan.

    If it is certain which samples of a training batch this rank computes, the data loader reads only these samples.
    ``reads_own``: whether the iteration that was started last reads only these samples.
    """

    def __init__(self, loader: Any, strategy: PartitionedStrategy) -> None:
        self.loader = loader
        self.strategy = strategy
        self.reads_own = False

    def __iter__(self) -> Iterator[Any]:
        if self.strategy.world_size > 1:
            device = self.strategy.root_device
            set_random_state(self.strategy.broadcast(collect_random_state(device)), device)
        own = self._find_own()
        self.reads_own = own is not None
        return iter(self.loader if own is None else own)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _find_own(self) -> DataLoader[Any] | None:
        """Return a data loader that reads only this rank's samples of each training batch. Return ``None`` if this rank
        has to read whole batches, because a batch may be smaller or padded, or because user code combines the samples
        of a batch.
        """
        loader, module = self.loader, self.strategy.lightning_module
        if self.strategy._engine is None or self.strategy.shapes is not None or not isinstance(loader, DataLoader):
            return None
        combined = module.trainer.fit_loop._combined_loader
        if combined is None or [*combined.flattened] != [self] or _count_rest(loader):
            return None
        changed = any(is_overridden(f"on_{when}_batch_transfer", module) for when in ("before", "after"))
        if changed or module.trainer.datamodule is not None or loader.collate_fn is not default_collate:
            return None
        share = self.strategy.engine.share
        if type(loader.batch_sampler) is not BatchSampler or type(loader.sampler) not in _SAMPLERS:
            return None
        if share.count == 1 or loader.batch_sampler.batch_size % share.count:
            return None
        options = {name: getattr(loader, name) for name in _LOADER_OPTIONS}
        return DataLoader(
            loader.dataset, batch_sampler=_OwnRows(loader.batch_sampler, share.parts, share.count), **options
        )


_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)  # they draw from torch alone

_LOADER_OPTIONS = """
    num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator prefetch_factor
    persistent_workers
    """.split()


class _OwnRows:
    """Iterable of lists of sample indices, one list per batch, reduced to the samples that this rank reads.
    ``batches``: the lists of all sample indices of each batch. ``count``: number of equal parts into which a batch is
    divided. ``parts``: indices of the parts that this rank reads.
    """

    def __init__(self, batches: BatchSampler, parts: range, count: int) -> None:
        self.batches = batches
        self.parts = parts
        self.count = count

    def __iter__(self) -> Iterator[list[int]]:
        for indices in self.batches:
            each = len(indices) // self.count
            yield indices[self.parts.start * each : self.parts.stop * each]

    def __len__(self) -> int:
        return len(self.batches)


class _Held:
    """Wraps a state of Lightning, such as that of its loops, as an object with ``state_dict`` and ``load_state_dict``,
    so that the engine can write it to a checkpoint and read it back."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def _check_trainer(trainer: Any, module: Any) -> None:
    """Raise :class:`TrainerError` if an option or method in use cannot have its effect with a plan, which divides the
    model over ranks. ``trainer``: a Lightning trainer. ``module``: its LightningModule."""
    if not module.automatic_optimization:
        raise TrainerError(
            "the module has automatic_optimization=False, whose training_step runs backward itself: expected True"
        )
    if is_overridden("backward", module):
        raise TrainerError(
            f"{type(module).__name__} overrides backward, which a plan does not call: expected none; compute the loss "
            "in training_step"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, _REFUSED_CALLBACKS):
            raise TrainerError(
                f"the callback {type(callback).__name__} reads or changes parameters of the module, but each rank has "
                "only shards: leave it out"
            )
    if trainer._detect_anomaly:
        raise TrainerError("detect_anomaly=True is not supported: expected False; see partitioner.debug")


def _validates(trainer: Any, module: Any) -> bool:
    """Return whether ``fit`` of the Lightning ``trainer`` also evaluates ``module`` on validation data."""
    source = trainer.fit_loop.epoch_loop.val_loop._data_source
    return bool(is_overridden(VALIDATION, module) and source.is_defined() and trainer.limit_val_batches)


def _list_loaders(source: Any, mode: str) -> Any:
    """Return Lightning's ``CombinedLoader`` over the data loaders of ``source``. Iteration over it yields triples: a
    batch, its index, and the index of its data loader. ``source``: Lightning's description of where the data loaders
    come from. ``mode``: the order in which Lightning reads several loaders, such as ``"sequential"``. Raise
    :class:`TrainerError` if a data loader is an iterator, which can be read only once.
    """
    loaders = source.dataloader()
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, mode)
    for loader in combined.flattened:
        if iter(loader) is loader:
            raise TrainerError(
                f"a data loader is an iterator ({type(loader).__name__}), and planning would consume a batch: "
                "expected an object that starts from the beginning each time that it is iterated over"
                ", such as a DataLoader"
            )
    return combined


def _to_plain(batch: Any) -> Any:
    """Return a copy of ``batch`` in which every mapping, such as the output of a tokenizer, is a plain dict."""
    if isinstance(batch, Mapping):
        return {key: _to_plain(value) for key, value in batch.items()}
    return batch


def _count_samples(batch: Any) -> int:
    """Return the number of rows of the first tensor of ``batch``; 1 if it has none."""
    return next((len(x) for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.dim()), 1)


def _count_rest(loader: Any) -> int:
    """Return the number of samples in the last batch of ``loader`` if this batch is smaller than the others; 0 if it is
    not smaller, or if its size is not known."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None or loader.drop_last:
        return 0
    if isinstance(loader.dataset, IterableDataset):
        return 0
    return len(loader.sampler) % loader.batch_size  # type: ignore[arg-type]


def _keep_value(value: Any, *_: Any, **__: Any) -> Any:
    """Return ``value``. This function replaces a reduction over ranks of a value that is equal on all ranks already.
    The other arguments are not used."""
    return value


def _keep_gradients(set_to_none: bool = True) -> None:
    """Do nothing. This function replaces ``zero_grad`` of an optimizer, because the engine replaces the gradients of
    the step before. ``set_to_none``: not used."""
