"""Find the origin of a NaN or infinity in a loss or gradient: repeat the step and inspect the result of every operator.

An operator is an origin if it produces a NaN from operands without NaN, or an infinity from finite operands. The first
origin in time, over all ranks, is reported. Since attention masks contain intended infinities, an infinity is reported
only if there is no NaN, or if the first NaN was computed from it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from partitioner.runtime.comm.group import Communicator, get_world_group
from partitioner.runtime.engine.batches import convert_batch, convert_rank_batch
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.errors import Failure, InstructionError
from partitioner.runtime.observe.operator_probe import ProbedOperation, probe_operators

KIND = "NonFinite"


class NonFiniteError(InstructionError):
    """Raised if the loss or a gradient is NaN or infinite. The message names the rank and the operator that first
    produced such a value.
    """


@dataclass(frozen=True)
class NonFiniteOrigin:
    """An operator that produced the first NaN, or the first infinity, on its rank. ``at``: time in seconds of the
    host's monotonic clock. ``index``, ``instruction``: position and printed form of the instruction. ``node``,
    ``path``, ``source``: the graph node, the path of its module, and its source line. ``call``: path of the larger
    module (such as a layer) that ran. ``what``: description for the message. ``is_nan``: whether the operator produced
    a NaN; otherwise it produced an infinity. ``from_infinity``: whether an operand of the operator was infinite.
    """

    at: float
    rank: int
    index: int | None
    instruction: str
    node: str
    path: str
    source: str
    call: str
    what: str
    is_nan: bool
    from_infinity: bool = False


def check_finite(engine: Engine, batch: Any, *, gradients: bool = True, local: bool = False) -> None:
    """Raise :class:`NonFiniteError` on all ranks if the loss or, if ``gradients`` is true, a gradient of any rank is
    NaN or infinite. All ranks call this after ``engine.step(batch, local=local)`` and before they use the gradients.
    The check reads every gradient once.

    ``batch``: the batch of that step. ``local``: whether it has only this rank's samples; otherwise it is the whole
    global batch. If a value is not finite, the step is repeated to find the operator that produced it.
    """
    engine._executor.updates.keep = True  # store the buffers that later steps read, so that they can be repeated
    bad = engine.loss is not None and not bool(torch.isfinite(engine.loss))
    if gradients and not bad:
        grads = [p.grad for p in engine.parameters() if p.grad is not None]
        bad = bool(grads) and not all(bool(torch.isfinite(n)) for n in torch._foreach_norm(grads, math.inf))
    flag = torch.tensor(float(bad), device=engine.device)
    everyone = get_world_group(engine.communicator, engine.program.world_size)
    if everyone.all_reduce(flag, maximum=True).wait().item():
        raise NonFiniteError(find_nonfinite(engine, batch, local))


def find_nonfinite(engine: Engine, batch: Any, local: bool = False) -> Failure:
    """Repeat the last step of ``engine`` on ``batch``, and return a description of the first operator that produced a
    NaN or infinity, with rank, instruction and graph node. All ranks call this before the optimizer changes the
    weights. The engine's step count and loss scale are not changed; the gradients are computed again. ``local``:
    whether ``batch`` has only this rank's samples; otherwise it is the whole global batch.
    """
    told = _gather_records(
        engine, _find_nonfinite_inputs(engine, batch, local)
    )  # only one rank's shard or samples may have a NaN
    if not told:
        found = _NonFiniteFinder(engine.communicator.rank)
        with _replay_step(engine), probe_operators(engine, found.see):
            engine.step(batch, local=local)
        told = _gather_records(engine, found.list_origins())
    return _describe_origins(told, engine.steps)


@contextmanager
def _replay_step(engine: Engine) -> Iterator[None]:
    """Return a context manager in which a step of ``engine`` repeats the last one, with the same random numbers, loss
    scale and buffers. On exit, step count, loss scale, buffers and rounding errors of gradient compression are
    restored.
    """
    steps, residuals = engine.steps, engine._gradients.residuals
    kept = {place: residual.clone() for place, residual in residuals.items()}
    engine.steps -= 1
    try:
        scale = nullcontext() if engine._scale is None else engine._scale.repeat_last()
        with scale, engine._executor.updates.repeat_last():
            yield
    finally:
        engine.steps = steps
        for place, residual in kept.items():
            residuals[place].copy_(residual)


class _NonFiniteFinder:
    """Records the first operator on this rank with a NaN among its results, and the first with an infinity."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.nan: NonFiniteOrigin | None = None
        self.infinity: NonFiniteOrigin | None = None

    def list_origins(self) -> list[NonFiniteOrigin]:
        return [o for o in (self.nan, self.infinity) if o is not None]

    def see(self, operation: ProbedOperation) -> None:
        """Record ``operation`` if it is the first on this rank that produces a NaN or an infinity which its operands do
        not have.
        """
        if self.nan is not None:
            return
        made = [_find_nan_and_infinity(x) for x in operation.outputs]
        if not any(nan or infinite for nan, infinite in made):
            return
        # Operands that the operator overwrites are left out, because their previous values are lost.
        given = [_find_nan_and_infinity(x) for x in operation.inputs if all(x is not out for out in operation.outputs)]
        had_infinity = any(infinite for _, infinite in given)
        if any(nan for nan, _ in made):
            if not any(nan for nan, _ in given):
                self.nan = self._make_origin(operation, True, had_infinity)
        elif self.infinity is None and not had_infinity and not _operation_creates_nonfinite(operation):
            self.infinity = self._make_origin(operation, False, False)

    def _make_origin(self, operation: ProbedOperation, is_nan: bool, from_infinity: bool) -> NonFiniteOrigin:
        """Return the record of ``operation``. ``is_nan``: whether the operator produced a NaN; otherwise it produced an
        infinity. ``from_infinity``: whether one of its operands was infinite.
        """
        place = operation.place()
        return NonFiniteOrigin(
            at=time.monotonic(),
            rank=self.rank,
            index=operation.index,
            instruction=operation.instruction,
            node=place.node or operation.operator,
            path=place.path,
            source=place.source,
            call=place.call,
            what="the first NaN" if is_nan else "the first infinity",
            is_nan=is_nan,
            from_infinity=from_infinity,
        )


def _find_nan_and_infinity(x: Tensor) -> tuple[bool, bool]:
    """Return whether ``x`` contains a NaN, and whether it contains an infinity."""
    if not (x.is_floating_point() or x.is_complex()) or x.numel() == 0:
        return False, False
    if bool(torch.isfinite(x).all()):
        return False, False
    return bool(torch.isnan(x).any()), bool(torch.isinf(x).any())


def _operation_creates_nonfinite(operation: ProbedOperation) -> bool:
    """Return whether an argument of the operator in ``operation`` is an infinite number, as in ``masked_fill(mask,
    -inf)``. The infinity in its result is then intended, and is not reported.
    """
    return any(isinstance(s, float) and math.isinf(s) for s in operation.scalars)


def _find_nonfinite_inputs(engine: Engine, batch: Any, local: bool) -> list[NonFiniteOrigin]:
    """Return a list with one record if a parameter of ``engine`` or an input in ``batch`` contains a NaN before the
    step; otherwise an empty list. ``local``: whether ``batch`` has only this rank's samples; otherwise it is the global
    batch.
    """
    inputs = (
        convert_rank_batch(engine.program, engine.share, batch, True) if local else convert_batch(engine.program, batch)
    )
    tensors: Mapping[str, Tensor] = {
        **{f"parameter {n}": p.detach() for n, p in engine.named_parameters()},
        **{f"input {n}": x for n, x in inputs.items()},
    }
    names = [name for name, x in tensors.items() if _find_nan_and_infinity(x)[0]]
    if not names:
        return []
    what = f"{names[0]} holds a NaN before the step" + (f", as do {len(names) - 1} more" if len(names) > 1 else "")
    return [NonFiniteOrigin(0.0, engine.communicator.rank, None, "before the step", "", "", "", "", what, True)]


def _describe_origins(origins: list[NonFiniteOrigin], step: int) -> Failure:
    """Return the description of the first operator, over all ranks, that produced a NaN or infinity. ``origins``: the
    records of all ranks. ``step``: number of the step, from 1.
    """
    nans = sorted((o for o in origins if o.is_nan), key=lambda o: (o.at, o.rank))
    infinities = sorted((o for o in origins if not o.is_nan), key=lambda o: (o.at, o.rank))
    if not nans and not infinities:
        text = (
            "the loss or a gradient is not finite, but it is finite when the step is repeated, so the cause "
            "cannot be located"
        )
        return Failure(0, text, KIND, instruction="end of the step", step=step)
    first = nans[0] if nans else infinities[0]
    if nans and first.from_infinity and infinities and infinities[0].at <= first.at:
        first = infinities[0]
        what = f"{first.what}, of which {nans[0].instruction} of rank {nans[0].rank} makes a NaN at {nans[0].node}"
    else:
        what = first.what
    alike = [o for o in origins if (o.index, o.node, o.what) == (first.index, first.node, first.what)]
    first = min(alike, key=lambda o: o.rank)
    return Failure(
        rank=first.rank,
        error=what,
        kind=KIND,
        instruction=first.instruction,
        index=first.index,
        call=first.call,
        node=first.node,
        path=first.path,
        source=first.source,
        step=step,
    )


def _gather_records(engine: Engine, seen: list[NonFiniteOrigin]) -> list[NonFiniteOrigin]:
    """Return the records, of all ranks, of operators that first produced a NaN or infinity. All ranks call this.
    ``seen``: the records of this rank. ``engine``: the engine of this rank, which connects it with the others.
    """
    return [
        NonFiniteOrigin(**data)
        for found in _all_gather_json(engine, json.dumps([asdict(o) for o in seen]))
        for data in found
    ]


def _all_gather_json(engine: Engine, text: str) -> list[Any]:
    """Return the parsed JSON ``text`` of every rank, in the order of ranks. All ranks call this. ``engine``: the engine
    of this rank, which connects it with the others.
    """
    communicator = engine.communicator
    group = get_world_group(communicator, engine.program.world_size)
    content = text.encode()
    length = int(group.all_reduce(torch.tensor(float(len(content)), device=engine.device), maximum=True).wait().item())
    padded = _bytes_to_tensor(content.ljust(length), communicator)
    parts = group.all_gather(padded.unsqueeze(0), 0).wait()
    return [json.loads(bytes(part.cpu().tolist())) for part in parts.reshape(-1, length)]


def _bytes_to_tensor(content: bytes, communicator: Communicator) -> Tensor:
    return torch.tensor(list(content), dtype=torch.uint8, device=communicator.device)
