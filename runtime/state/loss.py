"""The loss of the global batch on every rank, loss scaling, and the gradient norm of the whole model.

The loss is summed over microbatches and ``dp``, and then sent from stage to stage. This overlaps with the rest of the
step: the loss is all-reduced while backward runs, and sent to the neighbouring stages. Each of them has posted its
receive at the start, and forwards the loss once the gradients from the same direction have arrived. A rank does not
wait for the remaining work of other ranks, which may begin the next step.

Loss scaling prevents underflow of float16 gradients: the loss is multiplied by a large factor, by which the gradients
are divided in float32. The factor is halved when a gradient overflows on any rank, and doubled after many steps without
an overflow (Micikevicius et al. 2018, section 3.2; the constants are those of ``torch.amp.GradScaler``). After a step
that overflowed there are no gradients. Since torch's optimizers skip parameters without a gradient, the training loop
needs no special case.

The norm is computed from shards, with every element counted once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from partitioner.passes.ir.serialize import dtype_of
from partitioner.runtime.comm.group import Communicator, Pending, RankGroup, TransferHandle
from partitioner.runtime.comm.wait_clock import wait_for
from partitioner.runtime.errors import BackwardError, LaunchError
from partitioner.runtime.program.instructions import Instruction
from partitioner.runtime.program.membership import CHANNEL, find_loss_stage, find_neighbour_stages
from partitioner.runtime.program.mesh import AXES
from partitioner.runtime.program.program import Program, RankProgram
from partitioner.runtime.state.gradients import RankGradients

_BACKWARD = frozenset({"B", "I"})
_NARROW = frozenset({torch.float16, torch.bfloat16})  # summed in float32


class LossSum:
    """Sums the loss of the current training step over microbatches and ranks. After :meth:`finish`, ``value`` is the
    loss of the global batch on every rank. ``communicator``: connects this rank with the others.
    """

    def __init__(self, rank: RankProgram, communicator: Communicator) -> None:
        program = rank.program
        assert program.loss is not None
        self.communicator = communicator
        self.count = len(rank.share)
        self.late = communicator.device.type == "cuda"
        self.at_end = bool(program.data_shares)  # ranks end at different microbatches, with collectives in between
        dtype = dtype_of(program.values[program.loss].dtype)
        self.dtype = torch.float32 if dtype in _NARROW else dtype
        self.group = communicator.group(rank.group("dp"))
        source, targets = find_neighbour_stages(rank.stage_index, find_loss_stage(program), len(program.stages))
        self.source = None if source is None else rank.peer(source)
        self.targets = [rank.peer(t) for t in targets]
        self.passed_at = None if self.at_end else _find_forwarding_index(rank.instructions, source)
        self.begin()

    def begin(self) -> None:
        """Prepare the sum of the loss for a new training step: drop the loss and the transfers of the last step."""
        self.value: Tensor | None = None
        self._left = self.count
        self._pending: Pending | None = None
        self._receive: TransferHandle | None = None
        self._sends: list[TransferHandle] = []

    def start(self) -> None:
        """Post the receive of the loss on a pipeline stage that does not compute it. On a GPU do nothing: a receive is
        a kernel that runs until the message arrives, so :meth:`forward_loss` posts it when the loss is needed.
        """
        if self.source is not None and not self.late:
            self._post_receive()

    def _post_receive(self) -> None:
        if self.source is not None:
            self.value = torch.empty((), dtype=self.dtype, device=self.communicator.device)
            self._receive = self.communicator.recv(self.value, self.source, CHANNEL)

    def add(self, value: Tensor) -> None:
        """Add ``value``, the loss of one microbatch. After the last microbatch, start to sum the loss over the ``dp``
        ranks.
        """
        value = value.to(self.dtype)
        self.value = value.clone() if self.value is None else self.value + value
        self._left -= 1
        if self._left == 0 and not self.at_end:
            self._start_all_reduce()

    def forward_loss(self) -> None:
        """Wait for the complete loss, and start to send it to the neighbouring pipeline stages that receive it from
        this stage.
        """
        if self.value is None and self.late:
            self._post_receive()
        if self._pending is not None:
            self.value, self._pending = self._pending.wait(), None
        if self._receive is not None:
            wait_for(self._receive)
            self._receive = None
        if not self._sends:
            self._send_to_targets()

    def finish(self) -> None:
        """Wait until this rank has the loss of the global batch and has sent it to its neighbours."""
        if self.at_end and self.source is None:
            self._start_all_reduce()
        self.forward_loss()
        for work in self._sends:
            wait_for(work)

    def _start_all_reduce(self) -> None:
        assert self.value is not None
        self._pending = self.group.all_reduce(self.value)
        if self.group.size == 1 and not self.late:
            self._send_to_targets()

    def _send_to_targets(self) -> None:
        assert self.value is not None, "the program's loss is computed on no stage"
        self._sends = [self.communicator.send(self.value, target, CHANNEL) for target in self.targets]


def _find_forwarding_index(instructions: Sequence[Instruction], source: int | None) -> int | None:
    """Return the index in ``instructions``, the list of one rank, of the backward instruction after which the rank
    forwards the loss to other pipeline stages; ``None`` if there is none. If the rank receives the loss from the
    pipeline stage ``source``, it is the backward that uses the last gradient from that stage. If the rank computes the
    loss (``source`` is ``None``), it is the first backward after all forwards.
    """
    wanted = ("F", None) if source is None else ("RECV_B", source)
    last: Instruction | None = None
    found: int | None = None
    for place, i in enumerate(instructions):
        if (i.op, i.peer) == wanted:
            last, found = i, None
        elif found is None and last is not None and i.op in _BACKWARD:
            found = place if source is None or i.microbatch == last.microbatch else None
    return found


class StepLoss(Tensor):
    """The loss that :meth:`Engine.step` returns: a tensor without an autograd graph, whose ``backward`` raises an
    error, which explains that the step has already run backward. Tensors computed from it have this class, too.
    ``backward`` of a sum with another tensor that requires a gradient is allowed.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the torch function ``func`` with ``args`` and ``kwargs``, and return its result. ``types``: the tensor
        types among the arguments. Raise :class:`BackwardError` if ``func`` is a backward and none of its tensors has a
        graph.
        """
        if func in _BACKWARD_FUNCTIONS and args and not any(_has_graph(t) for t in pytree.tree_leaves(args[0])):
            raise BackwardError(
                "backward is called on a loss that engine.step(batch) has returned, or on a value computed from "
                "it, which has no autograd graph: step() has already run forward and backward, and parameters have "
                "their gradients; leave backward out. Scale the loss in the model's forward"
                ", or the gradients before optimizer.step(); losses "
                "in float16 are scaled by the engine itself (loss_scale)"
            )
        return super().__torch_function__(func, types, args, dict(kwargs or {}))  # type: ignore[no-untyped-call]

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return str(self.as_subclass(Tensor).__repr__(**kwargs))

    def __format__(self, spec: str) -> str:
        return str(self.as_subclass(Tensor).__format__(spec))  # torch formats a scalar only if its class is Tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to pickle the loss: as a plain ``torch.Tensor``. ``protocol``: number of the pickle protocol."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepLoss:
        return self.as_subclass(Tensor).detach().clone().as_subclass(StepLoss)


def _has_graph(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.requires_grad


_BACKWARD_FUNCTIONS = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})

FIRST = 2.0**16

GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000

Scale = float | Literal["auto", "dynamic"] | None


class LossScale:
    """The factor by which one rank's loss is multiplied, so that float16 gradients do not underflow. The factor is
    equal on all ranks. ``value``: the factor. ``dynamic``: whether the factor is adapted after each step, up to
    ``limit``. ``overflowed``: whether a gradient of the last step was infinite or NaN on any rank.
    """

    def __init__(self, value: float, dynamic: bool, limit: float) -> None:
        self.value = min(value, limit)
        self.dynamic = dynamic
        self.limit = limit
        self.good_steps = 0
        self.overflowed = False
        self.applied = self.value  # the factor of the last step

    def unscale(self, gradients: Sequence[Tensor], world_group: RankGroup, device: torch.device) -> None:
        """Divide ``gradients`` by the loss scale in place, and set :attr:`overflowed` to whether a gradient of any rank
        is infinite or NaN. A dynamic loss scale is then adapted. All ranks call this. ``world_group``: the process
        group of all ranks. ``device``: device of the tensors that are exchanged.
        """
        self.applied = self.value
        where = gradients[0].device if gradients else device  # the CPU if the optimizer runs on the host
        found = torch.zeros(1, dtype=torch.float32, device=where)
        inverse = torch.full((1,), 1.0 / self.value, dtype=torch.float32, device=where)
        if gradients:
            torch._amp_foreach_non_finite_check_and_unscale_([*gradients], found, inverse)
        self.overflowed = bool(world_group.all_reduce(found.to(device), maximum=True).wait().item())
        if self.dynamic:
            self._adapt_scale()

    @contextmanager
    def repeat_last(self) -> Iterator[None]:
        """Return a context manager in which the loss scale is that of the last step, so that the step can be repeated.
        On exit the current loss scale is restored.
        """
        before = self.value, self.good_steps, self.overflowed
        self.value = self.applied
        try:
            yield
        finally:
            self.value, self.good_steps, self.overflowed = before

    def _adapt_scale(self) -> None:
        """Halve the loss scale if the step overflowed; double it after 2000 steps in a row without overflow."""
        if self.overflowed:
            self.value, self.good_steps = self.value * BACKOFF, 0
            return
        self.good_steps += 1
        if self.good_steps == INTERVAL:
            self.value, self.good_steps = min(self.value * GROWTH, self.limit), 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.dynamic:
            self.value, self.good_steps = min(state["value"], self.limit), state["good_steps"]


def create_loss_scale(program: Program, requested: Scale) -> LossScale | None:
    """Return the loss scaling for ``program``; ``None`` if the loss is not scaled. ``requested``: the user's option: a
    fixed factor, ``"dynamic"``, ``None``, or ``"auto"``, which is dynamic if a float16 parameter is trained, otherwise
    ``None``. Raise :class:`LaunchError` for another value.
    """
    if program.objective != "train" or program.loss is None or requested is None:
        return None
    short = any(s.requires_grad and s.dtype == "float16" for s in program.states.values())
    if requested == "auto" and not short:
        return None
    limit = torch.finfo(dtype_of(program.values[program.loss].dtype)).max / 2
    if requested in ("auto", "dynamic"):
        return LossScale(FIRST, True, limit)
    if isinstance(requested, str) or not requested > 0:
        raise LaunchError(f"loss_scale is 'auto', 'dynamic', a positive number or None; got {requested!r}")
    return LossScale(float(requested), False, limit)


_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


def clip_gradients_(rank: RankProgram, gradients: RankGradients, communicator: Communicator, max_norm: float) -> Tensor:
    """Scale the gradients of all ranks in place so that their 2-norm, over all ranks together, is at most ``max_norm``.
    Return the norm before scaling, which is equal on all ranks. All ranks call this. ``rank``: the program of this
    rank. ``gradients``: the gradients of this rank. ``communicator``: connects this rank with the others. Raise
    :class:`LaunchError` if ``max_norm`` is negative or not a number.
    """
    if not isinstance(max_norm, Real | Tensor):
        raise LaunchError(f"the largest norm must be a number, got {type(max_norm).__name__}")
    if not max_norm >= 0:
        raise LaunchError(
            f"the largest norm must be at least 0, got {max_norm}; do not call it if gradients should not be clipped"
        )
    norm = compute_total_norm(rank, gradients, communicator)
    scale = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for view in gradients.owned.values():
        view.mul_(scale.to(view.device, view.dtype))
    return norm


def compute_total_norm(rank: RankProgram, gradients: RankGradients, communicator: Communicator) -> Tensor:
    """Return the 2-norm of the gradients of the whole model, over all ranks, as a 0-dimensional tensor that is equal on
    all ranks. All ranks call this. ``rank``: the program of this rank. ``gradients``: the gradients of this rank.
    ``communicator``: connects this rank with the others.
    """
    device = communicator.device
    owned = [view for name, view in gradients.owned.items() if _is_counted_shard(rank, name)]
    # from all parameters of the program, so that all ranks return the same dtype
    double = any(s.requires_grad and dtype_of(s.dtype) == torch.float64 for s in rank.program.states.values())
    squares = torch.zeros((), dtype=torch.float64 if double else torch.float32, device=device)
    for norm in torch._foreach_norm([v.to(squares.dtype) for v in owned]) if owned else ():
        squares += (norm * norm).to(device)
    # All ranks sum the same numbers in the same order.
    total = squares.to(torch.float64)
    return communicator.group(rank.group(*_list_norm_axes(rank))).all_reduce(total).wait().sqrt().to(squares.dtype)


def _list_norm_axes(rank: RankProgram) -> tuple[str, ...]:
    """Return the mesh axes over which the squared gradient norms of ranks are summed, because the ranks hold different
    gradients. Over ``dp`` and ``cp`` only the gradients of experts, and of parameters that ZeRO divides, differ.
    ``rank``: the program of this rank.
    """
    return AXES if rank.program.size("ep") > 1 or rank.program.zero else ("pp", "tp")


def _is_counted_shard(rank: RankProgram, state: str) -> bool:
    """Return whether this rank adds its shard of the parameter named ``state`` to the gradient norm of the whole model.
    Of several ranks with equal shards, or several stages with a tied parameter, only one adds it. ``rank``: the program
    of this rank.
    """
    data = rank.program.states[state]
    first_stage = not data.stages or rank.stage_index == min(data.stages)
    if "dp" in _list_norm_axes(rank):
        return first_stage and rank.is_first_holder(state)
    return first_stage and (rank.states[state].is_shard or rank.coordinates["tp"] == 0)
