"""The engine: one rank of a program, with its weights, as a thing that trains.

In a ``torchrun`` worker::

    engine = runtime.Engine("plan.json", weights="model/")
    optimizer = torch.optim.AdamW(engine.parameters())
    for batch in batches:
        loss = engine.step(batch)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
    engine.save("checkpoint/")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from passes.faults import typed_errors
from passes.random import SEED
from runtime import export, norms
from runtime.agreement import Agreement
from runtime.batch import own_values, share_of
from runtime.bind import Library
from runtime.checkpoint import loading
from runtime.checkpoint.folders import recover
from runtime.checkpoint.run import content_of, load
from runtime.checkpoint.saving import Saver, Saving
from runtime.checkpoint.training import Optimizers, Stateful
from runtime.communicator import TorchCommunicator
from runtime.defaults import default_communicator, disk_for
from runtime.errors import LaunchError
from runtime.execute import Executor
from runtime.failures import is_of_ranks
from runtime.gradients import Gradients
from runtime.groups import Communicator, all_ranks
from runtime.losses import StepLoss
from runtime.masters import Masters
from runtime.membership import gathers_of, groups_of, links_of
from runtime.offload import Copier, HostParameters
from runtime.optimizers import OptimizerCheck
from runtime.parts import names_read
from runtime.planfile import placement_of, program_of
from runtime.precision import check_fp8, products_of
from runtime.program import Program, RankProgram
from runtime.recorder import Phase
from runtime.scaling import Scale, scale_of
from runtime.sharded import ShardedParameters
from runtime.state import load_weights, parameters_of
from runtime.weights import FileWeights, Source, is_weights, weights_of
from runtime.windows import expect_on_disk, keep_on_disk

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from runtime.dtensors import Views

AnOptimizer = TypeVar("AnOptimizer", bound=torch.optim.Optimizer)


class Engine:
    """One rank of ``plan``.

    Args:
        plan: a plan, a :class:`Program`, or the path of a plan's JSON file.
        weights: a module, a dict of tensors by name, or the path of a safetensors file or folder, of which this rank
            reads its own slices; ``None``: small random values, and buffers as the model had them when it was planned
            (then :meth:`load` a checkpoint, or train from scratch).
        device: of this rank; by default the local rank's GPU under NCCL, the CPU otherwise.
        seed: of the model's random operators; the same seed gives the same masks for every plan.
        keep_outputs: collect the model's results of each step in :attr:`outputs`.
        loss_scale: a factor that keeps gradients in float16 from vanishing: ``dynamic``, a number, ``None``; ``auto``:
            dynamic where parameters in float16 are trained. Gradients come without it.
        offload_folder: where a plan that keeps optimizer states on disk keeps them, see :meth:`on_disk`: a folder of
            this node's disk, the same for all ranks or one for each; by default what ``PARTITION_OFFLOAD_FOLDER`` in
            the environment says.
        compile: run blocks through ``torch.compile``: with Inductor (``True``; operator by operator where it cannot
            work), or with another of torch's backends by its name.

    Attributes:
        steps: the batches of the run, one for each call of :meth:`step`, accumulated or not; :meth:`load` sets it to
            that of the checkpoint. The numbers that the model draws, checkpoints' names, metrics and errors go by it.
        optimizer_steps: the calls of :meth:`Checkpoints.after_step`, of the whole run likewise: with accumulation there
            are fewer than ``steps``.
        steps_run: the batches that this engine has run itself, whatever was loaded.

    Parameters that are trained in bfloat16 or float16 have copies in float32: these are what :meth:`parameters` gives,
    the optimizer steps and checkpoints hold; their gradients are added up and reduced in float32. Under a plan that
    offloads the optimizer, :meth:`parameters` are in host memory, and an ordinary optimizer of torch steps them there.

    Raises :class:`LaunchError` where the process group does not fit the program, :class:`OffloadError` where there is
    no folder, or no room in it, for what is on disk, and :class:`WeightsError` where the weights are not the plan's,
    before anything is communicated.
    """

    @typed_errors("Engine()", passing=is_of_ranks)
    def __init__(
        self,
        plan: Any,
        weights: Source | None = None,
        device: torch.device | str | None = None,
        *,
        seed: int = 0,
        keep_outputs: bool = False,
        loss_scale: Scale = "auto",
        compile: bool | str = False,
        offload_folder: str | Path | None = None,
        communicator: Communicator | None = None,
        library: Library | None = None,
    ) -> None:
        program = program_of(plan)
        device = None if device is None else torch.device(device)
        if communicator is None:
            communicator = default_communicator(program, device, placement_of(plan))
        self.rank_program: RankProgram = program.rank(communicator.rank)
        self.share = share_of(self.rank_program)
        self.communicator = communicator
        self.device = communicator.device
        check_fp8(program, self.device)
        self.seed = seed
        self.steps = 0
        self.optimizer_steps = 0
        self.steps_run = 0
        self._counted_at = 0  # the value of ``steps_run`` when ``optimizer_steps`` was counted last
        self._disk = disk_for(self.rank_program, plan, offload_folder)
        source = None if weights is None else weights_of(weights, names_read(program))
        copier = Copier(self.device)
        self._masters = Masters(self.rank_program, source, self.device, copier, self._disk)
        self._shards = self._masters.shards
        if isinstance(source, FileWeights) and source is not weights:  # the caller's own stays open: others may read it
            source.close()
        mine = self.rank_program
        communicator.prepare(groups_of(mine), links_of(mine), gathers_of(mine))
        sharded = ShardedParameters(self.rank_program, self._shards, communicator)
        self._masters.take(sharded.pieces)
        self._views: Views | None = None
        self._saver = Saver(communicator, program.world_size)
        self._parameters = parameters_of(self.rank_program, self._masters.held)
        trains = any(p.requires_grad for p in self._parameters.values()) or program.objective != "train"
        self._nothing = None if trains else nn.Parameter(torch.empty(0, device=self.device))
        if self._disk is not None:
            expect_on_disk(self, self._parameters.values())
        self._optimizers = OptimizerCheck(mine, self._parameters, [] if self._nothing is None else [self._nothing])
        self._optimizers.attach(self)
        self._scale = scale_of(program, loss_scale)
        self._gradients = Gradients(self.rank_program, self._shards, communicator, copier)
        self._agreement = Agreement(mine, self._parameters, self._gradients.owned, communicator)
        hosted = HostParameters(self.rank_program, self._masters.hosted, self._shards, sharded, copier)
        self._shards.update(hosted.whole)
        self._loss: StepLoss | None = None
        self._executor = Executor(
            self.rank_program,
            self._shards | sharded.whole,
            self._gradients,
            communicator,
            library or Library(program, self.device, compile),
            keep_outputs,
            sharded,
            hosted,
            copier,
        )

    @property
    def program(self) -> Program:
        return self.rank_program.program

    @property
    def outputs(self) -> dict[str, dict[int, Tensor]]:
        """This rank's part of the model's results in the last step: value -> microbatch -> tensor."""
        return self._executor.outputs

    @property
    def loss(self) -> Tensor | None:
        """The whole loss of the last step. It has no graph: ``backward`` on it raises :class:`BackwardError`."""
        return self._loss

    @property
    def overflowed(self) -> bool:
        """Whether the last step's gradients, scaled, were beyond float16: it has none, and the optimizer skips it."""
        return self._scale is not None and self._scale.overflowed

    @typed_errors("Engine.step()", passing=is_of_ranks)
    def step(self, batch: Any, *, local: bool = False, accumulate: bool = False) -> Tensor | None:
        """Forward and backward on the whole global ``batch``, given alike on all ranks; gradients are whole afterwards.

        With ``local`` each rank gives only what it reads, :attr:`share` (a :class:`runtime.Loader` does): of inputs
        ``[batch, ...]`` its ``[batch / dp, ...]``, or ``{}`` where it reads none.
        Gradients are those of this batch: they replace the last step's, or with ``accumulate`` are added to them, as
        far as no ``zero_grad`` has taken them away; a sum of which a part has overflowed is lost (:attr:`overflowed`).
        Returns the loss of the whole batch, a 0-d tensor without a graph (see :attr:`loss`), the same on all ranks;
        ``None`` if the program has no loss.
        Raises :class:`BatchError` where the batch is not what was planned, :class:`InstructionError` where an
        instruction fails, :class:`AgreementError` where ranks have parted since the last step (now and then it looks),
        :class:`LaunchError` inside a region of ``torch.autocast``.
        """
        if torch.is_autocast_enabled(self.device.type):
            raise LaunchError(
                "step() is called inside torch.autocast, which would change what the plan's programs compute; expected "
                "outside: the precision is the plan's, by partition(precision=...) or by regions in the model's forward"
            )
        inputs = own_values(self.program, self.share, batch, local)
        self._agreement.before_step(batch, local)
        if SEED in self._shards:
            self._shards[SEED].fill_(self.seed + self.steps)
        self._masters.refresh()
        owned = self._gradients.owned
        grads = {name: self._parameters[name].grad for name in owned} if accumulate else {}
        before = {name: grad.clone() for name, grad in grads.items() if grad is not None}
        if before:
            self._saver.check_between(self.steps, before.values())
        lost = accumulate and self.overflowed
        if self._scale is not None:
            self._executor.scale_loss(self._scale.value)
        for name in self._gradients.passing:
            self._parameters[name].grad = None
        try:
            with products_of(self.program, self.device):
                self._executor.run(inputs, self.steps)
        except BaseException:
            self._gradients.restore()
            raise
        loss = self._executor.loss
        self._loss = None if loss is None else loss.as_subclass(StepLoss)
        self.steps += 1
        self.steps_run += 1
        if self._scale is not None:
            scaled = self._scale.value
            self._scale.unscale([*owned.values()], all_ranks(self.communicator, self.program.world_size), self.device)
            self._gradients.rescale(0.0 if self._scale.overflowed else self._scale.value / scaled)
            self._scale.overflowed |= lost
        if before:
            torch._foreach_add_([owned[name] for name in before], [*before.values()])
        for name, gradient in owned.items():
            parameter = self._parameters[name]
            if not parameter.requires_grad:  # frozen by the script since
                gradient.zero_()
            if self.overflowed or not parameter.requires_grad:
                parameter.grad = None
            elif parameter.grad is not gradient:
                parameter.grad = gradient
        if self._nothing is not None:
            self._nothing.grad = torch.empty_like(self._nothing)
        self._agreement.after_step()
        if self._disk is not None:
            self._disk.forget()
        return self.loss

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards by the model's names; a tied parameter once; copies in float32 of what is shorter.

        See :meth:`parameters`.
        """
        yield from self._parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's shards, for any optimizer of torch.

        Under tensor and expert parallelism a parameter is cut along its dims; under ZeRO what is left is shared flat,
        and the parameter is this rank's elements, of shape ``[elements]``, none at all perhaps. What an optimizer
        computes element by element (SGD, Adam, AdamW, Lion, RMSprop) is then what it would be for the whole. One that
        looks at a parameter as a whole, at its rows or its norm (Muon, Shampoo, Adafactor, LAMB), would see the shard
        alone and compute something else: before its first step it is tried on small tensors, and refused with
        :class:`OptimizerError` where its updates of parts are others. With plans that cut none of its parameters it
        is used as it is. Under pipeline parallelism an optimizer that looks at all parameters at once (LBFGS, SAM) is
        refused likewise. :meth:`trust_optimizer` leaves the trial out.

        What is frozen by ``requires_grad_(False)`` has no gradient from then on, on all ranks or none. What was frozen
        when the plan was made cannot be trained under it.

        Where a rank of a plan that trains has nothing to train, an empty parameter comes last: torch's optimizers
        refuse to have none.
        """
        yield from self._parameters.values()
        if self._nothing is not None:
            yield self._nothing

    def trust_optimizer(self, optimizer: AnOptimizer) -> AnOptimizer:
        """``optimizer``, which is not tried before its first step: what it does to this rank's parts of parameters is
        what is meant. All ranks call it."""
        self._optimizers.trust(optimizer)
        return optimizer

    @typed_errors("Engine.on_disk()", passing=is_of_ranks)
    def on_disk(self, optimizer: AnOptimizer) -> AnOptimizer:
        """``optimizer``, made of :meth:`parameters`, with its states on disk, where the plan keeps them there; else as
        it is. It is called before the first step, and before a learning-rate scheduler is made.

        Raises :class:`OffloadError` for one that does not update each parameter by itself.
        """
        if self._disk is not None:
            keep_on_disk(optimizer, self._disk, self._saver.wait_until_copied)
        return optimizer

    @typed_errors("Engine.dtensors()", passing=is_of_ranks)
    def dtensors(self, *, strict: bool = True) -> dict[str, DTensor]:
        """The parameters of :meth:`named_parameters` as torch's own tools see whole ones: in the same memory, with
        their gradients of now on ``grad``. All ranks call it.

        Raises :class:`DTensorError`, on all ranks, where a layout is no DTensor's; without ``strict`` these parameters
        are left out. Raises :class:`LaunchError` where there can be no mesh of all ranks.
        """
        return self._viewed(strict).of_parameters(self._parameters)

    @typed_errors("Engine.optimizer_dtensors()", passing=is_of_ranks)
    def optimizer_dtensors(self, optimizer: torch.optim.Optimizer, *, strict: bool = True) -> dict[str, dict[str, Any]]:
        """What ``optimizer`` holds for each parameter, by its own names, laid out as :meth:`dtensors` are."""
        return self._viewed(strict).of_optimizer(self._parameters, optimizer)

    def _viewed(self, strict: bool) -> Views:
        from runtime.dtensors import Views, check  # what it imports of torch takes a while, and few need it

        if strict:
            check(self.program)
        if self._views is None:
            devices = {self.device.type, *(["cpu"] if self.program.offload else [])}
            ranks = range(self.program.world_size)
            processes = self.communicator.processes if isinstance(self.communicator, TorchCommunicator) else ranks
            self._views = Views(self.rank_program, processes, devices)
        return self._views

    def zero_grad(self) -> None:
        """Set all gradients to zero. A step does not need it, unless with ``accumulate``: it starts anew."""
        self._agreement.forget()
        for name, gradient in self._gradients.owned.items():
            gradient.zero_()
            self._parameters[name].grad = gradient
        if self._scale is not None:
            self._scale.overflowed = False

    @typed_errors("Engine.clip_grad_norm_()", passing=is_of_ranks)
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that the norm of the whole model's is at most ``max_norm``; the norm before.

        Not ``torch.nn.utils.clip_grad_norm_``, which sees this rank's part alone: :meth:`step` refuses to go on then.

        Raises :class:`LaunchError` for a norm that cannot be.
        """
        return norms.clip_(self.rank_program, self._gradients, self.communicator, max_norm)

    @typed_errors("Engine.state_dict()", passing=is_of_ranks)
    def state_dict(self, *, full: bool = False) -> dict[str, Tensor]:
        """This rank's shards; with ``full``, on the first process, every whole tensor on the CPU under all of its names
        (the others take part and get nothing)."""
        shards = self._masters.current()
        if full:
            return export.gather_all(self.rank_program, shards, self.communicator)
        return {n: s.detach() for n, s in shards.items() if self.program.states[n].kind != "constant"}

    @typed_errors("Engine.export_weights()", passing=is_of_ranks)
    def export_weights(self, directory: str | Path) -> None:
        """Write the weights, whole, as a safetensors folder by the model's names, as published models are; all ranks
        call it. The folder appears complete or not at all. What it held besides weights stays."""
        export.export(Path(directory), self.rank_program, self._masters.current(), self.communicator)

    @typed_errors("Engine.save()", passing=is_of_ranks)
    def save(
        self,
        directory: str | Path,
        optimizer: Optimizers = None,
        *,
        extra: Mapping[str, Stateful] | None = None,
        wait: bool = True,
        then: Callable[[Path], None] | None = None,
    ) -> Saving:
        """Write a checkpoint that any plan of the model may load; all ranks call it, and see the same file system.

        The folder appears complete or not at all; one that it replaces stays until then, and what else that held stays
        for good. It holds the weights, the steps, the state of random generators, with ``optimizer`` (one, or several
        in a list, in the same order on all ranks; ``None`` for one of which this rank has no parameters) its state and
        hyperparameters, and the state of what ``extra`` names. With ``wait=False`` the state is copied to host memory,
        and written, while training goes on; the step of ``optimizer`` waits until what it changes is copied. An error
        is then raised by the result's ``wait``, or by the next save. ``then``: called on the first rank with the
        folder, when it is complete.

        Raises :class:`CheckpointError`: it could not be written here or on another rank, or the save before could not.
        """
        with self.doing("saving"):
            return self._saver.save(
                Path(directory), lambda: content_of(self, optimizer, extra), optimizer, wait=wait, then=then
            )

    def wait_for_save(self) -> None:
        """Until the last :meth:`save` is complete. Raises :class:`CheckpointError` where it failed."""
        self._saver.wait()

    def settle_saves(self) -> None:
        """As :meth:`wait_for_save`, on all ranks, which all call it: it is complete, or has failed, on each."""
        self._saver.settle()

    @typed_errors("Engine.load()", passing=is_of_ranks)
    def load(
        self,
        directory: str | Path,
        optimizer: Optimizers = None,
        *,
        extra: Mapping[str, Stateful] | None = None,
        verify: bool = True,
    ) -> int | None:
        """Go on from what :meth:`save` wrote under this plan or another one, or from a safetensors folder; all ranks
        call it.

        ``directory``: a checkpoint, or a folder of many, of which the latest is taken. ``verify``: compare all files
        with their checksums first. A save there that is under way, of any engine or process, is waited for.

        Returns the step that was loaded, which is :attr:`steps` then; ``None`` where there are weights alone. Raises
        :class:`CheckpointError`, naming the file and the checkpoint before, where one is damaged, and
        :class:`WeightsError` where it is another model's.
        """
        directory = Path(directory)
        self._saver.rest(directory.resolve())
        self._agreement.forget()
        recover(directory.resolve())
        if optimizer is None and not loading.is_checkpoint(directory) and is_weights(directory):
            load_weights(self.rank_program, directory, self._masters.held)
            self._gradients.rescale(0.0)
            return None
        with self.doing("loading"):
            load(self, directory, optimizer, extra, verify)
        return self.steps

    def count_optimizer_step(self) -> None:
        """The optimizer has stepped; once for all calls between two of :meth:`step`. :class:`Checkpoints` calls it."""
        self.optimizer_steps += int(self._counted_at != self.steps_run)
        self._counted_at = self.steps_run

    def doing(self, phase: Phase) -> AbstractContextManager[None]:
        """Tells who watches what is done outside of steps."""
        recorder = self._executor.recorder
        return nullcontext() if recorder is None else recorder.phase(phase)

    def barrier(self) -> None:
        self.communicator.barrier()
