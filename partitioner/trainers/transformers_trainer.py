"""``PartitionedTrainer``: transformers' ``Trainer``, whose steps and evaluations run by a plan over all ranks.

The loop, its callbacks, logs, schedules and metrics are those of ``Trainer``. Three parts are replaced. The model is
planned and run by an :class:`partitioner.Engine`. Every rank reads the whole global batch. A checkpoint contains the
engine's state, from which training can continue under any plan of the model.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer
from transformers.trainer_utils import seed_worker
from transformers.utils.import_utils import is_datasets_available

from partitioner.api import partition
from partitioner.constraints import Constraints
from partitioner.plan import Plan
from partitioner.programs.requests import Evaluate, Shapes
from partitioner.runtime.checkpoint.training_state import collect_random_state, set_random_state
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.engine.outputs import select_outputs
from partitioner.topology import Topology
from partitioner.trainers.arguments import TrainerError, check_arguments, check_constructor
from partitioner.trainers.shared_plan import keep_generators, share_plan

EVALUATION = "eval"  # name of the plan's program that evaluates
ITEMS = "num_items_in_batch"  # input of models that divide the sum of their loss by it
STATE = "engine"  # folder of the engine's state in a checkpoint

# Methods of ``Trainer`` that are replaced here. If its loop did not call them, it would train without the plan.
_REPLACED = """
    _get_dataloader _clip_grad_norm _get_grad_norm _get_num_items_in_batch _track_num_input_tokens _wrap_model
    _move_model_to_device _save_optimizer_and_scheduler _save_rng_state _load_from_checkpoint
    _load_optimizer_and_scheduler _load_rng_state _load_best_model create_optimizer get_decay_parameter_names
    training_step floating_point_ops evaluation_loop prediction_step save_model
    """.split()


class PartitionedTrainer(Trainer):
    """A ``transformers.Trainer`` that trains by a plan: all ranks of this launch, such as that of torchrun, train one
    model together, and each has a part of it.

    The global batch of a step has ``per_device_train_batch_size`` samples for each rank, however the plan uses the
    ranks. Losses, gradients and updates are those of ``Trainer`` in one process with this whole batch. With gradient
    accumulation, the gradient is the mean over all targets of the accumulated batches if the model takes
    ``num_items_in_batch``, and otherwise the mean over the batches.

    Args:
        topology: the cluster; ``None``: the ranks of this launch, on this machine or on several equal nodes with GPUs.
        constraints: the choices that the plan must have, such as ``Constraints(tp=2)``; the planner makes all other
            choices. ``None``: the planner makes all choices.
        shapes: the lengths of batches to plan for. ``None``: the data sets are read once to find their longest sample,
            whose length is the largest length. A batch is padded to the next larger length.
        options: further arguments of ``Trainer``.

    Attributes: ``plan``, the plan, and ``engine``, this rank's :class:`partitioner.Engine`; both are made when they are
    first used. ``model`` keeps its initial weights; ``save_model`` writes the trained ones.

    Raises :class:`TrainerError` for options that cannot have their effect with a plan, before anything starts, and the
    errors of :func:`partitioner.partition` if there is no plan.
    """

    def __init__(
        self,
        *given: Any,
        topology: Topology | None = None,
        constraints: Constraints | None = None,
        shapes: Shapes | None = None,
        **options: Any,
    ) -> None:
        bound = inspect.signature(Trainer.__init__).bind(self, *given, **options).arguments
        check_constructor(bound)
        if bound.get("args") is not None:
            check_arguments(bound["args"])
        _check_library()
        _check_overridden(type(self))
        self._topology, self._constraints, self._shapes = topology, constraints, shapes
        self._plan: Plan | None = None
        self._engine: Engine | None = None
        self._runner: EngineModule | None = None
        self._unweighted: tuple[Tensor, int] | None = None  # loss of an evaluated batch, and its number of samples
        self._generators: dict[str, Any] | None = None  # random state of a loaded checkpoint
        super().__init__(*given, **options)
        if self.args.world_size > 1 and not dist.is_initialized():
            raise TrainerError(f"{self.args.world_size} ranks without a process group: start the script with torchrun")

    # -- the plan and its engine

    @property
    def plan(self) -> Plan:
        """Return the plan of the model. It is made at the first access: the first rank searches for it and sends it to
        the others. All ranks must therefore make this access, here or by a call of :meth:`train`.
        """
        if self._plan is None:
            self._plan = self._make_plan()
        return self._plan

    @property
    def engine(self) -> Engine:
        """Return the engine, which runs this rank's part of the model by the plan. It is created at the first access,
        which all ranks must make.
        """
        if self._engine is None:
            with keep_generators():
                compiled = (self.args.torch_compile_backend or True) if self.args.torch_compile else None
                device = self.args.device if self.args.device.type == "cuda" else "cpu"
                self._engine = Engine(self.plan, self.model, device, seed=self.args.seed, compile=compiled)
            self._runner = EngineModule(self._engine)
        return self._engine

    @property
    def runner(self) -> EngineModule:
        """Return the module that the training loop of ``Trainer`` gets in place of the model. Its parameters are this
        rank's parts of the model's parameters.
        """
        assert self.engine is not None and self._runner is not None
        return self._runner

    def _make_plan(self) -> Plan:
        """Search for the plan on the first rank, send it to the other ranks, and return it. All ranks must call this.

        If the search fails, the first rank raises its error, and the others raise :class:`TrainerError` with the text
        of this error. :class:`TrainerError` is also raised if the last batch of a data set is too small for the plan.
        """
        plan: Plan = share_plan(self._search_plan, self.args.process_index, self.args.world_size)[0]
        self._check_last_batches(plan)
        return plan

    def _search_plan(self) -> Plan:
        """Search on this rank for a plan that fits batches of the data sets: a training step and, if there are
        evaluation data, an evaluation. Raise :class:`TrainerError` if there are no data, or if samples have several
        lengths and shorter batches cannot be padded.
        """
        args = self.args
        has_gpus = args.device.type == "cuda"
        topology = self._topology or (Topology.detect() if has_gpus else Topology.local(args.world_size))
        evaluated = self._list_evaluation_datasets()
        datasets = [*([self.train_dataset] if self.train_dataset is not None else []), *evaluated]
        if not datasets:
            raise TrainerError("there is no data to plan for: pass train_dataset= or eval_dataset=")
        sample, lengths = self._sample_batch(datasets[:1], self._train_batch_size * args.world_size)
        programs: dict[str, Evaluate] = {}
        eval_lengths: tuple[int, ...] = ()
        if evaluated:
            inputs, eval_lengths = self._sample_batch(evaluated, args.eval_batch_size * args.world_size)
            programs[EVALUATION] = Evaluate(inputs=inputs)
        precision = "bf16" if args.bf16 else "tf32" if args.tf32 else None
        assert isinstance(self.model, nn.Module)
        plan = partition(
            self.model,
            topology,
            sample,
            shapes=self._shapes or Shapes(length=lengths),
            programs=programs,
            constraints=self._constraints,
            precision=precision,
            optimizer="sgd" if args.optim == "sgd" else "adamw",
        )
        found = [("train", lengths, plan.padding)]
        found += [("eval", eval_lengths, plan.further[EVALUATION].padding)] if evaluated else []
        for what, several, padding in found:
            if several and padding is not None and padding.shorter:
                raise TrainerError(
                    f"samples of the {what} data set have several lengths, and shorter batches cannot be padded "
                    f"exactly: {padding.shorter}; expected batches of one length: pad in the data collator, or cut "
                    "texts into blocks, or pass shapes=Shapes(length=...) with every length that batches have"
                )
        return plan

    def _list_evaluation_datasets(self) -> list[Any]:
        if self.eval_dataset is None:
            return []
        return [*self.eval_dataset.values()] if isinstance(self.eval_dataset, dict) else [self.eval_dataset]

    def _sample_batch(self, datasets: list[Any], size: int) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Return two values: an example batch of ``size`` samples to plan with, as a dict input name -> value; and the
        lengths of batches to plan for.

        The samples come from the data set in ``datasets`` that has the longest sample, and include this sample; they
        are repeated if the data set is smaller. The lengths are the length of the longest sample and, if it is a
        multiple of 4, a quarter and a half of it, in ascending order. No lengths are returned if all samples have equal
        lengths, or if lengths are not measured. Raise :class:`TrainerError` if a data set has no samples.
        """
        found: list[tuple[int, dict[str, Any]]] = []
        lengths: set[int] = set()
        for dataset in datasets:
            place = 0
            if not isinstance(dataset, IterableDataset):
                each = self._measure_samples(dataset)
                lengths |= {*each}
                place = each.index(max(each)) if each else 0
            order = [place, *(i % len(dataset) for i in range(size - 1))] if isinstance(dataset, Sized) else None
            loader = self._make_data_loader(dataset, size, order, is_training=False)
            try:
                batch = dict(next(iter(loader)))
            except StopIteration:
                raise TrainerError("a data set has no samples: expected at least one") from None
            batch = {n: _repeat_rows(x, size) for n, x in batch.items()}
            found.append(
                (max((x.shape[1] for x in batch.values() if isinstance(x, Tensor) and x.dim() > 1), default=0), batch)
            )
        longest, batch = max(found, key=lambda each: each[0])
        if self._takes_items(batch):
            batch[ITEMS] = float(size)
        several = (longest,) if len(lengths) < 2 or longest % 4 else (longest // 4, longest // 2, longest)
        return batch, several if len(lengths) > 1 else ()

    def _measure_samples(self, dataset: Any) -> list[int]:
        """Return the length of the model's main input in each sample of ``dataset``, such as the number of tokens in
        ``input_ids``. The list is empty if lengths are not needed, because the user gave ``shapes``, or if the first
        sample has no such input.
        """
        name = getattr(self.model, "main_input_name", "input_ids")
        if self._shapes is not None or not len(dataset) or not _has_length(dataset[0], name):
            return []
        return [len(dataset[i][name]) for i in range(len(dataset))]

    def _check_last_batches(self, plan: Plan) -> None:
        """Raise :class:`TrainerError` if the last batch of the training data or of an evaluation data set has fewer
        samples than a global batch, and ``plan`` cannot pad it without a change of the results. Training data are not
        checked if the last incomplete batch is dropped.
        """
        checks = []
        if self.train_dataset is not None and not self.args.dataloader_drop_last:
            checks.append((self.train_dataset, self._train_batch_size, plan.padding, "train"))
        further = plan.further.get(EVALUATION)
        if further is not None:
            checks += [
                (d, self.args.eval_batch_size, further.padding, "eval") for d in self._list_evaluation_datasets()
            ]
        for dataset, each, padding, what in checks:
            size = each * self.args.world_size
            rest = len(dataset) % size if isinstance(dataset, Sized) else 0
            if rest and padding is not None and padding.fewer:
                raise TrainerError(
                    f"the last batch of the {what} data set has {rest} samples instead of {size}, and cannot be "
                    f"padded without a change of the results: {padding.fewer}"
                    f"; expected whole batches: pass dataloader_drop_last=True, or another "
                    f"per_device_{what}_batch_size"
                )

    # -- data: every rank reads the whole global batch, in the order of one process

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader[Any]:
        """Return a data loader that yields the same global batches on all ranks, each with ``batch_size`` samples times
        the number of ranks. It replaces the method of ``Trainer`` with this name.

        ``dataset``: the data set. ``description``: a name for the kind of data, for error messages. ``sampler_fn``:
        returns the sampler of a data set; ``None``: samples are read in order. ``is_training``: whether the batches are
        for training. ``dataloader_key``: the name under which the loader is kept for later calls if its worker
        processes persist; ``None``: it is not kept.
        """
        kept = self.__dict__.setdefault("_eval_dataloaders", {})
        if dataloader_key in kept and self.args.dataloader_persistent_workers:
            return kept[dataloader_key]  # type: ignore[no-any-return]
        sampler = None
        if sampler_fn is not None and not isinstance(dataset, IterableDataset):
            sampler = sampler_fn(dataset)
        loader = self._make_data_loader(dataset, batch_size * self.args.world_size, sampler, is_training, description)
        if dataloader_key is not None and self.args.dataloader_persistent_workers:
            kept[dataloader_key] = loader
        return loader

    def _make_data_loader(
        self, dataset: Any, size: int, sampler: Any, is_training: bool, description: str = "Planning"
    ) -> DataLoader[Any]:
        """Return a data loader of batches of ``size`` samples of ``dataset``, with only those columns that the model
        reads.

        ``sampler``: the order of the samples, as an argument of ``DataLoader``; ``None``: they are read in order.
        ``is_training``: whether the batches are for training; worker processes are then seeded, equally on all ranks.
        ``description``: a name for the kind of data, for messages; ``"Planning"``: the loader is for one example batch,
        and has no worker processes.
        """
        args, collate = self.args, self.data_collator
        if is_datasets_available() and isinstance(dataset, _import_dataset_class()):
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            collate = self._get_collator_with_removed_columns(collate, description=description)
        planning = description == "Planning"
        options: dict[str, Any] = (
            {}
            if planning
            else {
                "num_workers": args.dataloader_num_workers,
                "persistent_workers": args.dataloader_persistent_workers,
                "multiprocessing_context": args.dataloader_multiprocessing_context,
                "prefetch_factor": args.dataloader_prefetch_factor,
                "in_order": args.dataloader_in_order,
                "pin_memory": args.dataloader_pin_memory,
            }
        )
        if not isinstance(dataset, IterableDataset):
            options |= {"sampler": sampler, "drop_last": args.dataloader_drop_last and not planning}
        if is_training:  # workers draw the same random numbers on all ranks
            options["worker_init_fn"] = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=0)
        loader = DataLoader(dataset, batch_size=size, collate_fn=collate, **options)
        if planning:
            return loader
        return prepare_data_loader(  # type: ignore[no-any-return]
            loader,
            num_processes=1,
            process_index=0,
            use_seedable_sampler=getattr(args.accelerator_config, "use_seedable_sampler", True),
            data_seed=args.data_seed,
        )

    # -- training

    def train(self, *given: Any, **options: Any) -> Any:
        """Make the plan and the engine if there are none yet; then train as ``Trainer.train`` does with the same
        arguments, and return its result. Raise :class:`TrainerError` if there are no training data, or if the
        checkpoint to resume from was not written by this class.
        """
        if self.train_dataset is None:
            raise TrainerError("training needs a data set: pass train_dataset=")
        resumed = given[0] if given else options.get("resume_from_checkpoint")
        if isinstance(resumed, str | Path):
            self._load_from_checkpoint(str(resumed))  # which only checks the folder
        assert self.engine is not None
        return super().train(*given, **options)

    def hyperparameter_search(self, *given: Any, **options: Any) -> Any:
        """Raise :class:`TrainerError`. A search is not supported, because it creates a new model for each trial, and
        the plan is for one model. The arguments are not used.
        """
        raise TrainerError("hyperparameter_search is not supported: create a trainer for each trial")

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return an optimizer of this rank's parts of the parameters. Its parameter groups (with and without weight
        decay) are the ones that ``Trainer`` makes. Its states are kept on disk if the plan requires it. ``model``: not
        used.
        """
        return self.engine.on_disk(super().create_optimizer(self.runner))

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Return the names of the parameters to which weight decay applies, which ``Trainer`` chooses by the layers of
        the whole model. ``model``: not used.
        """
        assert isinstance(self.model, nn.Module)
        return super().get_decay_parameter_names(self.model)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward of one global batch on all ranks. Return its contribution to the loss of the
        optimizer's step; the contributions of all accumulated batches add up to this loss.

        ``inputs``: input name -> value, for the whole global batch. ``num_items_in_batch``: the number of targets in
        all batches of the optimizer's step, by which the model divides the sum of its loss. If it is ``None``, or the
        model does not take it, the loss is divided by the number of accumulated batches instead. ``model``: not used.
        """
        batch, weight = dict(inputs), 1.0
        items = _read_items(num_items_in_batch)
        if items is not None and self.model_accepts_loss_kwargs:
            batch[ITEMS] = items
        else:
            weight = 1.0 / self.current_gradient_accumulation_steps
        loss = self.engine.step(batch, accumulate=self.runner.has_gradients, weight=weight)
        self.runner.has_gradients = True
        assert loss is not None
        return loss.detach().as_subclass(Tensor) * weight

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return self.engine.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.engine.clip_grad_norm_(math.inf) if grad_norm is None else grad_norm

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        found = super()._get_num_items_in_batch(batch_samples, device)  # added up over ranks, which have equal batches
        return None if found is None else found / self.args.world_size

    def _takes_items(self, batch: Mapping[str, Any]) -> bool:
        """Return whether the model gets the input ``num_items_in_batch``, the number of targets by which it divides the
        sum of its loss. It does if its forward accepts this input and ``batch`` has labels. ``batch``: input name ->
        value.
        """
        return self.model_accepts_loss_kwargs and "labels" in batch

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[no-untyped-call]
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.args.world_size

    def floating_point_ops(self, inputs: Any) -> Any:
        """Return the floating-point operations of a global batch divided by the number of ranks, because ``Trainer``
        adds up the results of all ranks. ``inputs``: input name -> value, for the whole global batch.
        """
        return super().floating_point_ops(inputs) / self.args.world_size

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self.runner

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing. ``Trainer`` would move the whole ``model`` to ``device`` here; the engine instead copies this
        rank's part there.
        """

    # -- evaluation

    def evaluation_loop(self, *given: Any, **options: Any) -> Any:
        """Evaluate as ``Trainer.evaluation_loop`` does with the same arguments, and return its result. Nothing is
        gathered over ranks, because every rank has the results of the whole global batch. Raise :class:`TrainerError`
        if the plan has no program for evaluation, since the trainer was made without ``eval_dataset``.
        """
        planned = self._plan is not None or self._list_evaluation_datasets()
        if not planned or EVALUATION not in self.plan.further:
            raise TrainerError("the plan has no evaluation: pass eval_dataset= when you create the trainer")
        self.gather_function = self._repeat_loss
        try:
            return super().evaluation_loop(*given, **options)
        finally:
            self._unweighted = None

    def _repeat_loss(self, data: Any) -> Any:
        """Return what the evaluation loop of ``Trainer`` would get by gathering ``data`` over ranks. The first call
        after a batch is for the loss of the batch; return it once for each sample of the batch. Later calls are for
        predictions and labels; return ``data`` unchanged, because every rank has all of them."""
        if self._unweighted is None:
            return data
        (loss, samples), self._unweighted = self._unweighted, None
        return loss.repeat(samples)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Evaluate one global batch, and return its loss, its predictions and its labels. The loss is ``None`` if the
        model computes none, the labels are ``None`` if the batch has none, and predictions and labels are ``None`` with
        ``prediction_loss_only``.

        ``inputs``: input name -> value, for the whole global batch. ``ignore_keys``: names of outputs that are not
        predictions; ``None``: those that the model's configuration lists. ``model``: not used.
        """
        batch = dict(inputs)
        names = self.label_names if all(batch.get(name) is not None for name in self.label_names) else []
        labels = tuple(batch[name] for name in names)
        if self.model_accepts_loss_kwargs:
            items = _read_items(self._get_num_items_in_batch([batch], self.args.device))
            batch |= {} if items is None else {ITEMS: items}
        loss = self.engine.run(EVALUATION, batch, keep_outputs=not prediction_loss_only)
        if loss is not None:
            loss = loss.detach().as_subclass(Tensor)
            self._unweighted = loss, next(len(x) for x in batch.values() if isinstance(x, Tensor) and x.dim())
        if prediction_loss_only:
            return loss, None, None
        if ignore_keys is None:
            ignore_keys = getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", [])
        found = self._gather_outputs()
        logits = self._prepare_input(tuple(x for name, x in found.items() if name not in [*ignore_keys, "loss"]))
        return loss, _unwrap_single(logits), _unwrap_single(self._prepare_input(labels)) if labels else None

    def _gather_outputs(self) -> dict[str, Any]:
        """Return the outputs of the batch that was evaluated last: path of an output -> whole tensor on the CPU. The
        parts of all ranks are joined, so all ranks must call this.
        """
        found = self.engine.latest_outputs
        mine = select_outputs(found.rank, found.shards)
        own = found.rank.rank, {value: {m: x.cpu() for m, x in parts.items()} for value, parts in mine.items()}
        everyone: list[Any] = [own] * self.args.world_size
        if self.args.world_size > 1:
            dist.all_gather_object(everyone, own)
        return {path: x for path, x in found.join(dict(everyone)).items() if x is not None}

    # -- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the trained weights of the whole model in the format that ``from_pretrained`` reads. All ranks must
        call this, because each has a part of the weights.

        ``output_dir``: the folder; ``None``: that of the training arguments. ``_internal_call``: whether ``Trainer``
        calls this itself; the model is then not pushed to the hub.
        """
        whole = self.engine.state_dict(full=True)
        folder = output_dir if output_dir is not None else self.args.output_dir
        if self.args.should_save:
            self._save(folder, state_dict=whole)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _list_saved(self) -> tuple[Any, dict[str, Any]]:
        """Return what the engine writes to a checkpoint besides the parameters: the torch optimizer, and a dict of
        further objects, name -> object. It has the learning-rate scheduler under the name ``schedule``.
        """
        return getattr(self.optimizer, "optimizer", self.optimizer), {"schedule": self.lr_scheduler}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer, extra = self._list_saved()
        self.engine.save(Path(output_dir) / STATE, optimizer, extra=extra)

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing. ``Trainer`` would write the states of the random generators to ``output_dir`` here, but the
        engine's checkpoint contains them already.
        """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Check a checkpoint without loading it; :meth:`_load_optimizer_and_scheduler` loads the weights later,
        together with the states of the optimizer. Raise :class:`TrainerError` if the folder ``resume_from_checkpoint``
        does not contain the state of an engine. ``model``: not used.
        """
        if not (Path(resume_from_checkpoint) / STATE).is_dir():
            raise TrainerError(
                f"{resume_from_checkpoint} has no folder {STATE!r}: expected a checkpoint that PartitionedTrainer "
                "wrote without save_only_model; load its weights by from_pretrained to start a new run from them"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        optimizer, extra = self._list_saved()
        self.engine.load(Path(checkpoint) / STATE, optimizer, extra=extra)
        self._generators = collect_random_state(self.engine.device)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._generators is not None:
            set_random_state(self._generators, self.engine.device)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint or "")
        self.engine.load(best / STATE if (best / STATE).is_dir() else best)


class EngineModule(nn.Module):
    """The module that the training loop of ``Trainer`` gets in place of the model. It has this rank's parts of the
    parameters, which belong to ``engine``, and cannot be called.

    ``has_gradients``: whether an earlier batch of the same optimizer step has left gradients, to which the gradients of
    the next batch are added.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.has_gradients = False

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield a pair for each parameter of which this rank has a part: its name in the model, and the part. The
        arguments are not used.
        """
        return self.engine.named_parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Record that the gradients belong to an earlier optimizer step, so that the next batch replaces them instead
        of adding to them. ``set_to_none``: not used.
        """
        self.has_gradients = False

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raise :class:`TrainerError`. This module cannot be called, because each rank has only a part of the model.
        The arguments are not used.
        """
        raise TrainerError(
            "the trained model cannot be called, because each rank has only shards of it: use trainer.evaluate or "
            "trainer.predict, or save_model and from_pretrained"
        )


def _check_library() -> None:
    """Raise :class:`TrainerError` if the ``Trainer`` of the installed version of transformers lacks a method that
    ``PartitionedTrainer`` replaces; its training loop would then ignore the plan.
    """
    missing = [name for name in _REPLACED if not hasattr(Trainer, name)]
    if missing:
        raise TrainerError(
            f"transformers {transformers.__version__} has no Trainer.{', Trainer.'.join(missing)}: expected a version "
            "whose training loop calls these methods, such as 5.23: in the folder of this repository, "
            "run pip install -e '.[trainer]'"
        )


def _check_overridden(trainer: type[Trainer]) -> None:
    """Raise :class:`TrainerError` if ``trainer``, a subclass of ``Trainer``, overrides a method that computes the loss,
    such as ``compute_loss``. A plan does not call it, because the loss is part of the model's graph.
    """
    for name in ("compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager"):
        if getattr(trainer, name) is not getattr(Trainer, name):
            raise TrainerError(
                f"{trainer.__name__} overrides {name}, which a plan does not call: expected none; compute the loss in "
                "the model's forward"
            )


def _repeat_rows(value: Any, size: int) -> Any:
    """Return ``value`` with ``size`` rows (entries of dim 0) if it is a tensor with fewer: its rows are repeated in
    order. Any other value is returned unchanged.
    """
    if not isinstance(value, Tensor) or not value.dim() or len(value) >= size:
        return value
    return value[torch.arange(size) % len(value)]


def _import_dataset_class() -> Any:
    """Import the package ``datasets``, and return its class of data sets whose samples have indices,
    ``datasets.Dataset``.
    """
    import datasets

    return datasets.Dataset


def _read_items(items: Any) -> float | None:
    """Return ``items``, the number of targets as a number or a tensor with one element, as a float; ``None`` for
    ``None``.
    """
    return None if items is None else float(items)


def _has_length(sample: Any, name: str) -> bool:
    return isinstance(sample, Mapping) and isinstance(sample.get(name), Sized)


def _unwrap_single(values: Iterable[Any]) -> Any:
    found = tuple(values)
    return found[0] if len(found) == 1 else found
