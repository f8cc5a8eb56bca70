"""The engine: runs the training steps of one rank of a program, and holds its weights.

In a ``torchrun`` worker::

    engine = partitioner.Engine("plan.json", weights="model/")
    optimizer = torch.optim.AdamW(engine.parameters())
    for batch in batches:
        loss = engine.step(batch)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
    engine.save("checkpoint/")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from partitioner.passes.faults import typed_errors
from partitioner.runtime.checkpoint import load as loading
from partitioner.runtime.checkpoint.atomic_folder import restore_replaced_checkpoint
from partitioner.runtime.checkpoint.run_state import collect_content, load_run_state
from partitioner.runtime.checkpoint.save import Saver, Saving
from partitioner.runtime.checkpoint.training_state import Optimizers, Stateful
from partitioner.runtime.comm.failure_origin import is_rank_error
from partitioner.runtime.comm.group import Communicator, get_world_group
from partitioner.runtime.comm.torch_backend import TorchCommunicator
from partitioner.runtime.engine import export
from partitioner.runtime.engine.batches import convert_rank_batch, count_tokens_and_samples, get_share
from partitioner.runtime.engine.consistency import ConsistencyChecks
from partitioner.runtime.engine.defaults import create_default_communicator, create_disk
from partitioner.runtime.engine.execution import Execution, choose_execution
from partitioner.runtime.engine.further import EngineState, FurtherExecutors, LatestRun, prepare_programs
from partitioner.runtime.engine.generation import Sampling, TokenGenerator, find_generation
from partitioner.runtime.engine.optimizer_checks import OptimizerCheck
from partitioner.runtime.engine.outputs import RunOutputs
from partitioner.runtime.engine.padding import ChosenProgram, choose_program, fit_batch
from partitioner.runtime.errors import BatchError, LaunchError
from partitioner.runtime.execute.bind import BlockLibrary
from partitioner.runtime.execute.executor import Executor, ExecutorOptions
from partitioner.runtime.execute.flight_recorder import Phase
from partitioner.runtime.execute.step_replay import ReplayReport
from partitioner.runtime.family.load import load_family
from partitioner.runtime.program.load import load_execution_mode, load_placement
from partitioner.runtime.program.precision import allow_tf32_products, check_fp8
from partitioner.runtime.program.program import Program, RankProgram
from partitioner.runtime.state import loss as norms
from partitioner.runtime.state.disk_offload import keep_on_disk, require_states_on_disk
from partitioner.runtime.state.gradients import RankGradients
from partitioner.runtime.state.host_offload import HostCopier, HostParameters, TransientParameters
from partitioner.runtime.state.loss import Scale, StepLoss, create_loss_scale
from partitioner.runtime.state.parameters import MasterParameters, list_names_read, load_weights, make_parameters
from partitioner.runtime.state.sharded_parameters import ShardedParameters
from partitioner.runtime.state.weights import FileWeights, Source, is_weights_path, open_weights

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from partitioner.runtime.engine.export import DTensorViews

AnOptimizer = TypeVar("AnOptimizer", bound=torch.optim.Optimizer)


class Engine:
    """One rank of ``plan``: it has this rank's part of the weights, and runs training steps.

    Args:
        plan: a plan, a :class:`Program`, or the path of a plan's JSON file.
        weights: a module, a dict of tensors by name, or the path of a safetensors file or folder, of which this rank
            reads only its own slices; ``None``: small random values, and buffers as the model had them when it was
            planned (then :meth:`load` a checkpoint, or train from scratch).
        device: device of this rank; by default the local rank's GPU under NCCL, the CPU otherwise.
        seed: seed of the model's random operators; the same seed gives the same dropout masks under every plan.
        keep_outputs: whether to collect the model's results of each step in :attr:`outputs`.
        loss_scale: a factor that prevents gradients in float16 from underflowing: ``dynamic`` (adapted after each
            step), a fixed number, ``None`` (no factor), or ``auto``: dynamic if parameters in float16 are trained,
            otherwise no factor. Gradients are returned unscaled.
        offload_folder: folder on a disk of this node, for the optimizer states of a plan that keeps them on disk (see
            :meth:`on_disk`). Ranks may share one folder. By default the environment variable
            ``PARTITION_OFFLOAD_FOLDER``.
        compile: whether to compile the operators between collectives. ``True``: with Inductor, or operator by operator
            where Inductor cannot work; a string: by ``torch.compile`` with the backend of this name; ``False``: do not
            compile or record, unless ``execution`` says so; ``None``: as ``execution`` says.
        execution: how instructions are executed: ``eager``, operator by operator; ``compiled``, like ``compile=True``;
            ``graph``: one step is recorded and replayed afterwards, on a GPU as CUDA graphs of compiled parts
            (:attr:`execution_report` says which parts could not be recorded, and why). ``None``: ``compiled`` or
            ``eager`` as ``compile`` says. If ``compile`` is ``None``, too: as the plan's constraints say; without such
            a constraint, ``compiled`` on a GPU and ``eager`` on a CPU.
        communicator: connects this rank with the others; by default torch's default process group.
        library: graphs of the program's blocks, which engines of several ranks in one process can share; by default a
            new library.

    Attributes:
        steps: number of batches since the start of training, one per call of :meth:`step`, accumulated or not;
            :meth:`load` sets it to the checkpoint's number. Random numbers, names of checkpoints, metrics and errors
            are based on it.
        optimizer_steps: number of calls of :meth:`Checkpoints.after_step` since the start of training; fewer than
            ``steps`` if gradients are accumulated.
        steps_run: number of batches that this engine has run itself; loading does not change it.
        tokens_run: number of tokens in the batches that ``steps_run`` counts, each padded to the shape of the program
            that ran it; ``samples_run``: number of samples, counted in the same way.
        further_steps_run: number of the batches that ``steps_run`` counts which did not run in the plan's first
            program.
        before_runs: functions without arguments that all ranks call at the start of each :meth:`run` and
            :meth:`generate`. :class:`Checkpoints` adds one if it handles signals.

    Parameters that are trained in bfloat16 or float16 have float32 copies. :meth:`parameters` returns these copies, the
    optimizer updates them and checkpoints store them; their gradients are accumulated and reduced in float32. Under a
    plan that offloads the optimizer, :meth:`parameters` are in host memory, where an ordinary torch optimizer updates
    them.

    Raises :class:`LaunchError` if the process group does not fit the program, :class:`OffloadError` if states are on
    disk and there is no folder or too little space in it, and :class:`WeightsError` if the weights do not match the
    plan. All are raised before any communication.
    """

    @typed_errors("Engine()", passing=is_rank_error)
    def __init__(
        self,
        plan: Any,
        weights: Source | None = None,
        device: torch.device | str | None = None,
        *,
        seed: int = 0,
        keep_outputs: bool = False,
        loss_scale: Scale = "auto",
        compile: bool | str | None = None,
        execution: Execution | None = None,
        offload_folder: str | Path | None = None,
        communicator: Communicator | None = None,
        library: BlockLibrary | None = None,
    ) -> None:
        family = load_family(plan)
        program = family.first
        device = None if device is None else torch.device(device)
        if communicator is None:
            communicator = create_default_communicator(program, device, load_placement(plan))
        self.rank_program: RankProgram = program.rank(communicator.rank)
        self.share = get_share(self.rank_program)
        self.communicator = communicator
        self.device = communicator.device
        how = choose_execution(execution, compile, self.device, load_execution_mode(plan))
        channel = how.record(communicator)
        check_fp8(program, self.device)
        self.seed = seed
        self.steps = 0
        self.optimizer_steps = 0
        self.steps_run = self.tokens_run = self.samples_run = self.further_steps_run = 0
        self.before_runs: list[Callable[[], None]] = []
        self._counted_at = 0  # the value of ``steps_run`` when ``optimizer_steps`` was counted last
        self._disk = create_disk(self.rank_program, plan, offload_folder)
        source = None if weights is None else open_weights(weights, list_names_read(program))
        copier = HostCopier(self.device)
        self._masters = MasterParameters(self.rank_program, source, self.device, copier, self._disk)
        self._shards = self._masters.shards
        if isinstance(source, FileWeights) and source is not weights:  # the caller closes its own
            source.close()
        mine = self.rank_program
        prepare_programs(family, communicator)
        sharded = ShardedParameters(self.rank_program, self._shards, channel)
        self._masters.replace_pieces(sharded.pieces)
        self._views: DTensorViews | None = None
        self._saver = Saver(communicator, program.world_size)
        self._parameters = make_parameters(self.rank_program, self._masters.held)
        trains = any(p.requires_grad for p in self._parameters.values()) or program.objective != "train"
        self._nothing = None if trains else nn.Parameter(torch.empty(0, device=self.device))
        if self._disk is not None:
            require_states_on_disk(self, self._parameters.values())
        self._optimizers = OptimizerCheck(mine, self._parameters, [] if self._nothing is None else [self._nothing])
        self._optimizers.attach(self)
        self._scale = create_loss_scale(program, loss_scale)
        self._gradients = RankGradients(self.rank_program, self._shards, channel, copier)
        self._agreement = ConsistencyChecks(mine, self._parameters, self._gradients.owned, communicator)
        host_parameters = HostParameters(self.rank_program, self._masters.hosted, self._shards, sharded, copier)
        self._shards.update(host_parameters.whole)
        self._loss: StepLoss | None = None
        self._executor = Executor(
            self.rank_program,
            self._shards | sharded.whole,
            self._gradients,
            channel,
            library or BlockLibrary(program, self.device, how.compile),
            TransientParameters(sharded, host_parameters),
            ExecutorOptions(keep_outputs, tape=how.tape),
        )
        state = EngineState(self._shards, self._gradients, sharded, host_parameters)
        self._further = FurtherExecutors(family, channel, state, how, keep_outputs)
        self._latest = LatestRun(self._executor)
        self._generations = 0  # calls of :meth:`generate`

    @property
    def program(self) -> Program:
        return self.rank_program.program

    @property
    def outputs(self) -> dict[str, dict[int, Tensor]]:
        """Return this rank's part of the model's results in the last step or run, as value name -> microbatch ->
        tensor. Empty unless the engine was created, or :meth:`run` was called, with ``keep_outputs``.
        """
        return self.latest_outputs.trim()

    @property
    def latest_outputs(self) -> RunOutputs:
        """Return this rank's results of the last :meth:`step` or :meth:`run`, still with padded samples and positions,
        and the program that computed them.
        """
        executor, padding, real = self._latest
        return RunOutputs(executor.rank, executor.outputs, padding, real)

    @property
    def execution_report(self) -> dict[str, ReplayReport]:
        """Return how the steps of each program run on this rank under ``execution="graph"``, as a dict: name of the
        program (empty for the first) -> report. The dict is empty under another execution.
        """
        executors = {"": self._executor, **self._further.created}
        return {name: made.replay.report for name, made in executors.items() if made.replay is not None}

    @property
    def loss(self) -> Tensor | None:
        """Return the loss of the last global batch; ``None`` before the first step or without a loss. The loss does not
        have an autograd graph: ``backward`` on it raises :class:`BackwardError`.
        """
        return self._loss

    @property
    def overflowed(self) -> bool:
        """Return whether the scaled gradients of the last step overflowed float16. If they did, parameters have no
        gradients, and the optimizer skips the step.
        """
        return self._scale is not None and self._scale.overflowed

    @typed_errors("Engine.step()", passing=is_rank_error)
    def step(self, batch: Any, *, local: bool = False, accumulate: bool = False, weight: float = 1.0) -> Tensor | None:
        """Run forward and backward on a global batch, and reduce the gradients over all ranks. All ranks call this.

        Each batch adds ``weight`` times the gradients of its loss to the sum. With ``weight=1 / k`` in each of ``k``
        batches the sum is the mean over the batches. If the loss is a mean over targets (such as tokens), whose number
        differs between batches, ``weight=n / N``, with ``n`` targets in this batch and ``N`` in all batches, gives the
        mean over all targets.

        Args:
            batch: the whole global batch, the same on all ranks. If the plan has programs for several shapes
                (``shapes=``), the batch runs in the program with the least estimated time among those whose shape it
                fits; a smaller batch is padded, which does not change the result.
            local: if true, ``batch`` has only this rank's :attr:`share` of the global batch (as
                :class:`partitioner.Loader` returns it): ``[batch / dp, ...]`` for an input ``[batch, ...]``, or ``{}``
                if this rank does not read inputs. The global batch then has the largest shape.
            accumulate: if true, the gradients are added to those of earlier batches, unless ``zero_grad`` has cleared
                these; otherwise they replace the gradients of the last step. If the gradients of one batch overflow,
                the sum is lost (:attr:`overflowed`).
            weight: factor of the gradients of this batch.

        Returns the loss of the whole batch, a 0-dimensional tensor without an autograd graph, the same on all ranks,
        not multiplied by ``weight``; ``None`` if the program has no loss.

        Raises :class:`BatchError` if the batch does not match the plan, :class:`InstructionError` if an instruction
        fails, :class:`AgreementError` if ranks have diverged (checked at regular intervals of steps), and
        :class:`LaunchError` inside a region of ``torch.autocast``.
        """
        self._check_autocast("step()")
        if not isinstance(weight, Real) or not math.isfinite(weight):
            raise BatchError(
                f"weight is {weight!r}; expected a finite number, by which this batch's gradients are scaled"
            )
        chosen = ChosenProgram("", batch, None) if local else choose_program(self._further.family, batch)
        executor = self._further.executor(chosen.name) if chosen.name else self._executor
        rank = executor.rank
        inputs = convert_rank_batch(rank.program, get_share(rank) if chosen.name else self.share, chosen.batch, local)
        self._agreement.before_step(chosen.batch, local, rank)
        self._begin_run()
        owned = self._gradients.owned
        grads = {name: self._parameters[name].grad for name in owned} if accumulate else {}
        before = {name: grad.clone() for name, grad in grads.items() if grad is not None}
        if before:
            self._saver.check_between(self.steps, before.values())
        lost = accumulate and self.overflowed
        if self._scale is not None:
            executor.scale_loss(self._scale.value)
        for name in self._gradients.transient_names:
            self._parameters[name].grad = None
        self._latest = LatestRun(executor, self._further.get_padding(chosen.name), chosen.real)
        try:
            with self._doing_further(chosen.name), allow_tf32_products(rank.program, self.device):
                executor.run(inputs, self.steps)
        except BaseException:
            self._gradients.restore()
            raise
        self._loss = None if executor.loss is None else executor.loss.as_subclass(StepLoss)
        self.steps += 1
        self.steps_run += 1
        tokens, samples = count_tokens_and_samples(rank.program)
        self.tokens_run, self.samples_run = self.tokens_run + tokens, self.samples_run + samples
        self.further_steps_run += int(bool(chosen.name))
        if self._scale is not None:
            scaled = self._scale.value
            self._scale.unscale(
                [*owned.values()], get_world_group(self.communicator, self.program.world_size), self.device
            )
            self._gradients.rescale(0.0 if self._scale.overflowed else self._scale.value / scaled)
            self._scale.overflowed |= lost
        if weight != 1 and owned:
            torch._foreach_mul_([*owned.values()], float(weight))
        if before:
            torch._foreach_add_([owned[name] for name in before], [*before.values()])
        for name, gradient in owned.items():
            parameter = self._parameters[name]
            if not parameter.requires_grad:  # the script has frozen it in the meantime
                gradient.zero_()
            if self.overflowed or not parameter.requires_grad:
                parameter.grad = None
            elif parameter.grad is not gradient:
                parameter.grad = gradient
        if self._nothing is not None:
            self._nothing.grad = torch.empty_like(self._nothing)
        self._agreement.after_step()
        if self._disk is not None:
            self._disk.evict()
        return self.loss

    @typed_errors("Engine.run()", passing=is_rank_error)
    def run(self, name: str, batch: Any, *, local: bool = False, keep_outputs: bool | None = None) -> Tensor | None:
        """Run the plan's further program called ``name``, such as an evaluation, on a global batch. All ranks call
        this.

        The program reads the current weights of :meth:`step`. It does not change parameters, gradients, optimizer
        states, buffers, :attr:`steps`, or the random numbers of later steps. ``batch``: the whole global batch, the
        same on all ranks; if ``local`` is true, only this rank's :attr:`share` of it. ``keep_outputs``: whether to
        collect the results of this run in :attr:`outputs`; ``None``: as the engine's argument of this name says.

        Returns the loss of the whole batch, the same on all ranks; ``None`` if the program has no loss.

        Raises :class:`LaunchError` if the plan has no such program, :class:`BatchError` if the batch does not match it,
        and :class:`InstructionError` if an instruction fails.
        """
        self._check_autocast("run()")
        further = self._further.find(name, "evaluate")
        executor = self._further.executor(name, keep_outputs)
        batch, real = (batch, None) if local else fit_batch(further.program, further.padding, batch)
        inputs = convert_rank_batch(further.program, get_share(executor.rank), batch, local)
        self._agreement.before_run(name, batch, local, executor.rank)
        for call in self.before_runs:
            call()
        self._begin_run()
        self._latest = LatestRun(executor, further.padding, real)
        with self._doing_further(name), allow_tf32_products(further.program, self.device):
            executor.run(inputs, self.steps)
        return executor.loss

    @typed_errors("Engine.generate()", passing=is_rank_error)
    def generate(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
        attention_mask: Tensor | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        seed: int | None = None,
        program: str | None = None,
    ) -> Tensor:
        """Generate tokens that continue the prompts ``input_ids``. If the model has an encoder, it reads the prompts,
        and the decoder generates tokens from its result. All ranks call this with the same arguments, and get the same
        result.

        Generation reads the current weights of :meth:`step`. It does not change parameters, gradients, optimizer
        states, buffers, :attr:`steps`, or the random numbers of later steps.

        Args:
            input_ids: prompts, integers ``[batch, positions]``, with at most as many samples as planned. If the model
                has an encoder, the encoder reads them.
            max_new_tokens: maximum number of tokens to generate for each sample.
            attention_mask: ``[batch, positions]``: 0 at padding of shorter prompts, 1 elsewhere; ``None``: there is no
                padding. Padding must be on the left; if the model has an encoder, it may be anywhere.
            do_sample: if true, draw each token from the model's distribution; otherwise take the most probable one.
            temperature: a number above 0 that divides the logits before a token is drawn.
            top_k: draw from this number of the most probable tokens; ``None``: from all.
            top_p: draw from the smallest set of the most probable tokens whose probabilities sum to at least this
                number; ``None``: from all.
            eos_token_id: the token, or several tokens, after which a sample ends; ``None``: samples end only after
                ``max_new_tokens``.
            pad_token_id: the token that fills the positions after the end of a sample; ``None``: the first of
                ``eos_token_id``, or 0.
            seed: seed of the drawn tokens; ``None``: a different seed in each call.
            program: name of the generation, if the plan has several.

        Returns the prompts followed by the new tokens, ``[batch, positions + new]``, where ``new`` is at most
        ``max_new_tokens``. For a model with an encoder, returns the first token of the decoder followed by the new
        tokens, ``[batch, 1 + new]``.

        Raises :class:`LaunchError` if the plan has no such program, :class:`BatchError` if the prompts do not fit it,
        and :class:`InstructionError` if an instruction fails.
        """
        self._check_autocast("generate()")
        ends = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else [*eos_token_id]
        filling = (ends or [0])[0] if pad_token_id is None else pad_token_id
        sampling = Sampling(do_sample, temperature, top_k, top_p)
        name = find_generation(self._further.family, program)
        tokens = TokenGenerator(name, self._further.family, self.communicator, self._run_further)
        prompt = tokens.prepare_prompt(input_ids, attention_mask, max_new_tokens, filling)
        number = self.seed + self._generations if seed is None else seed
        generator = torch.Generator(self.device).manual_seed(number)
        self._generations += 1
        for call in self.before_runs:
            call()
        self._begin_run()
        with self._doing_further(name):
            made = tokens.generate(prompt, max_new_tokens, sampling, ends, filling, generator)
        before = input_ids.to(made) if tokens.first_token is None else made.new_full((len(made), 1), tokens.first_token)
        return torch.cat([before, made], 1)

    def _run_further(self, name: str, values: Mapping[str, Tensor]) -> Executor:
        """Run the further program of the plan called ``name``, such as an evaluation, on this rank. Return the executor
        that ran the program, which has its loss and outputs. ``values``: name of an input tensor in the program -> this
        rank's part of the tensor.
        """
        executor = self._further.executor(name)
        with allow_tf32_products(executor.program, self.device):
            executor.run(values, self.steps)
        return executor

    def _doing_further(self, name: str) -> AbstractContextManager[None]:
        return self.doing("in a further program") if name else nullcontext()

    def _check_autocast(self, method: str) -> None:
        """Raise :class:`LaunchError` inside a region of ``torch.autocast``. ``method``: name of the caller, for the
        message.
        """
        if torch.is_autocast_enabled(self.device.type):
            raise LaunchError(
                f"{method} is called inside torch.autocast, which would change what the plan's programs compute; call "
                "it outside: the precision is part of the plan, by partition(precision=...) or by regions in the "
                "model's forward"
            )

    def _begin_run(self) -> None:
        """Prepare to run a program: set the seed of random operators for this step, and copy the parameters that the
        optimizer updates, such as float32 copies, to the parameters with which the rank computes.
        """
        with torch.no_grad():
            self._further.seed.fill_(self.seed + self.steps)
        self._masters.refresh()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield pairs (name in the model, this rank's shard of the parameter); a tied parameter occurs once. See
        :meth:`parameters`.
        """
        yield from self._parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's shards of the parameters, for any torch optimizer. Parameters trained in bfloat16 or
        float16 are represented by float32 copies.

        Under tensor and expert parallelism a parameter is sharded along its dims. Under ZeRO that shard is flattened
        and divided, and the parameter has only this rank's elements, of shape ``[elements]``, possibly none. An
        optimizer that updates each element independently of the others (SGD, Adam, AdamW, Lion, RMSprop) gives the same
        result as for the whole parameter. An optimizer that reads a whole parameter, its rows or its norm (Muon,
        Shampoo, Adafactor, LAMB) would give another result. Therefore each optimizer is tried on small tensors before
        its first step, and refused with :class:`OptimizerError` if its updates of shards differ from those of whole
        tensors. It is accepted if the plan shards none of its parameters. Under pipeline parallelism, an optimizer that
        reads all parameters at once (LBFGS, SAM) is refused as well. :meth:`trust_optimizer` skips the trial.

        A parameter frozen by ``requires_grad_(False)`` gets no gradient from then on; freeze it on all ranks or none. A
        parameter that was frozen when the plan was made cannot be trained under the plan.

        If a rank of a training plan has no trainable parameter, the last yielded parameter is an empty one, because
        torch optimizers refuse an empty list.
        """
        yield from self._parameters.values()
        if self._nothing is not None:
            yield self._nothing

    def trust_optimizer(self, optimizer: AnOptimizer) -> AnOptimizer:
        """Accept ``optimizer`` without trying it on small tensors before its first step (see :meth:`parameters`), and
        return it. The caller is responsible for correct updates of this rank's shards. All ranks call this.
        """
        self._optimizers.trust(optimizer)
        return optimizer

    @typed_errors("Engine.on_disk()", passing=is_rank_error)
    def on_disk(self, optimizer: AnOptimizer) -> AnOptimizer:
        """If the plan keeps optimizer states on disk, move the states of ``optimizer`` there; return ``optimizer``.
        Call this before its first step, and before creating a learning-rate scheduler. ``optimizer``: an optimizer of
        :meth:`parameters`. Raises :class:`OffloadError` if the optimizer does not update each parameter independently
        of the others.
        """
        if self._disk is not None:
            keep_on_disk(optimizer, self._disk, self._saver.wait_until_copied)
        return optimizer

    @typed_errors("Engine.dtensors()", passing=is_rank_error)
    def dtensors(self, *, strict: bool = True) -> dict[str, DTensor]:
        """Return the parameters of :meth:`named_parameters` by name, as DTensors of the whole tensors, for torch's own
        tools. The DTensors share the parameters' memory and have the current gradients in ``grad``. All ranks call
        this.

        If a DTensor cannot express the layout of a parameter and ``strict`` is true, raises :class:`DTensorError` on
        all ranks; if ``strict`` is false, the parameter is left out. Raises :class:`LaunchError` if no device mesh of
        all ranks can be created.
        """
        return self._get_state_views(strict).view_parameters(self._parameters)

    @typed_errors("Engine.optimizer_dtensors()", passing=is_rank_error)
    def optimizer_dtensors(self, optimizer: torch.optim.Optimizer, *, strict: bool = True) -> dict[str, dict[str, Any]]:
        """Return the states of ``optimizer``, as parameter name -> state name -> DTensor of the whole tensor. States
        without the parameter's shape (step counts) are returned unchanged. All ranks call this.

        If a DTensor cannot express the layout of a parameter and ``strict`` is true, raises :class:`DTensorError` on
        all ranks; if ``strict`` is false, the parameter is left out. Raises :class:`CheckpointError` if the optimizer
        has other parameters than the engine, and :class:`LaunchError` if no device mesh of all ranks can be created.
        """
        return self._get_state_views(strict).view_optimizer(self._parameters, optimizer)

    def _get_state_views(self, strict: bool) -> DTensorViews:
        """Return the object that creates DTensors of this rank's parameters; it is created at the first call. All ranks
        call this. ``strict``: whether to raise :class:`DTensorError` if a DTensor cannot express the layout of some
        parameter.
        """
        from partitioner.runtime.engine.export import (  # its imports from torch are slow, and few callers need them
            DTensorViews,
            require_dtensor_views,
        )

        if strict:
            require_dtensor_views(self.program)
        if self._views is None:
            devices = {self.device.type, *(["cpu"] if self.program.offload else [])}
            ranks = range(self.program.world_size)
            processes = self.communicator.processes if isinstance(self.communicator, TorchCommunicator) else ranks
            self._views = DTensorViews(self.rank_program, processes, devices)
        return self._views

    def zero_grad(self) -> None:
        """Set all gradients to zero. Only needed before steps with ``accumulate``: other steps replace gradients."""
        self._agreement.drop_probes()
        for name, gradient in self._gradients.owned.items():
            gradient.zero_()
            self._parameters[name].grad = gradient
        if self._scale is not None:
            self._scale.overflowed = False

    @typed_errors("Engine.clip_grad_norm_()", passing=is_rank_error)
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their 2-norm over the whole model is at most ``max_norm``. Returns the norm
        before scaling. All ranks call this.

        Use this instead of ``torch.nn.utils.clip_grad_norm_``, which reads only this rank's part of the gradients; a
        later :meth:`step` detects such clipping and raises :class:`AgreementError`. Raises :class:`LaunchError` if
        ``max_norm`` is negative or not a number.
        """
        return norms.clip_gradients_(self.rank_program, self._gradients, self.communicator, max_norm)

    @typed_errors("Engine.state_dict()", passing=is_rank_error)
    def state_dict(self, *, full: bool = False) -> dict[str, Tensor]:
        """Return this rank's shards of parameters and buffers by name. If ``full`` is true, all ranks call this, and
        the first process gets every whole tensor, on the CPU, under all of the tensor's names; the other processes get
        an empty dict.
        """
        shards = self._masters.current()
        if full:
            return export.gather_all(self.rank_program, shards, self.communicator)
        return {n: s.detach() for n, s in shards.items() if self.program.states[n].kind != "constant"}

    @typed_errors("Engine.export_weights()", passing=is_rank_error)
    def export_weights(self, directory: str | Path) -> None:
        """Write the whole weights to the folder ``directory`` as safetensors files under the model's names, like
        published models. All ranks call this. The folder is complete afterwards or, if the export fails, unchanged.
        Other files in an existing folder are kept.
        """
        export.export_weight_files(Path(directory), self.rank_program, self._masters.current(), self.communicator)

    @typed_errors("Engine.save()", passing=is_rank_error)
    def save(
        self,
        directory: str | Path,
        optimizer: Optimizers = None,
        *,
        extra: Mapping[str, Stateful] | None = None,
        wait: bool = True,
        then: Callable[[Path], None] | None = None,
    ) -> Saving:
        """Write a checkpoint, which any plan of the model can load, to the folder ``directory``. All ranks call this,
        and must see the same file system.

        The folder is complete afterwards or, if the save fails, unchanged. An existing checkpoint in the folder is
        replaced once the new one is complete; other files in the folder are kept. A checkpoint holds the weights, the
        number of steps, the state of random generators, the state and hyperparameters of ``optimizer``, and the states
        of the objects in ``extra``.

        Args:
            optimizer: one optimizer or a list of several, in the same order on all ranks, with ``None`` for one that
                has no parameters on this rank.
            extra: further objects to save, by name.
            wait: if false, the state is copied to host memory and written while training continues; the next step of
                ``optimizer`` waits until the tensors that the step changes are copied. Errors are then raised by the
                ``wait`` method of the returned handle, or by the next save.
            then: function that is called on the first rank with the folder once it is complete.

        Returns the handle of the save, which tells whether the save has ended and can wait for it. Raises
        :class:`CheckpointError` if this save, or the previous one, failed on any rank.
        """
        with self.doing("saving"):
            return self._saver.save(
                Path(directory), lambda: collect_content(self, optimizer, extra), optimizer, wait=wait, then=then
            )

    def wait_for_save(self) -> None:
        """Wait until the last :meth:`save` is complete. Raises :class:`CheckpointError` if it failed."""
        self._saver.wait()

    def settle_saves(self) -> None:
        """Wait until the last :meth:`save` is complete, or has failed, on every rank. All ranks call this. Raises
        :class:`CheckpointError` on all ranks if the save failed on any rank.
        """
        self._saver.settle()

    @typed_errors("Engine.load()", passing=is_rank_error)
    def load(
        self,
        directory: str | Path,
        optimizer: Optimizers = None,
        *,
        extra: Mapping[str, Stateful] | None = None,
        verify: bool = True,
    ) -> int | None:
        """Load a checkpoint that :meth:`save` wrote under this or another plan, or a safetensors folder. All ranks call
        this. If a save to that folder is in progress, in any engine or process, waits for it.

        Args:
            directory: a checkpoint, or a folder of checkpoints, of which the latest is loaded.
            optimizer: the optimizer, or list of optimizers, whose state is restored.
            extra: further objects to restore, by name.
            verify: whether to compare all files with their checksums first.

        Returns the loaded step, which becomes :attr:`steps`; ``None`` if the folder has only weights. Raises
        :class:`CheckpointError`, which names the file and the previous checkpoint, if a file is damaged, and
        :class:`WeightsError` if the weights are of another model.
        """
        directory = Path(directory)
        self._saver.wait_until_idle(directory.resolve())
        self._agreement.drop_probes()
        restore_replaced_checkpoint(directory.resolve())
        if optimizer is None and not loading.is_checkpoint(directory) and is_weights_path(directory):
            load_weights(self.rank_program, directory, self._masters.held)
            self._gradients.rescale(0.0)
            return None
        with self.doing("loading"):
            load_run_state(self, directory, optimizer, extra, verify)
        return self.steps

    def count_optimizer_step(self) -> None:
        """Count an optimizer step; further calls before the next :meth:`step` are not counted. :class:`Checkpoints`
        calls this.
        """
        self.optimizer_steps += int(self._counted_at != self.steps_run)
        self._counted_at = self.steps_run

    def doing(self, phase: Phase) -> AbstractContextManager[None]:
        """Return a context manager that reports that this rank is in ``phase`` ("saving", "loading"). The phase is
        written to the rank's flight record: the files in which a rank records what it does at which time. If the rank
        has no flight record, the context manager does nothing.
        """
        recorder = self._executor.recorder
        return nullcontext() if recorder is None else recorder.phase(phase)

    def barrier(self) -> None:
        self.communicator.barrier()
