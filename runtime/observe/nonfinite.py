"""Find the origin of a NaN or infinity in a loss or gradient: run the step again and inspect every operator.

An operator is an origin if it makes a NaN from operands without one, or an infinity from finite operands. The first
origin in time, over all ranks, is reported. Masks contain intended infinities, so an infinity is reported only where no
NaN is found, or where the first NaN was made from it.
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

from partitioner.runtime.comm.group import Communicator, all_ranks
from partitioner.runtime.engine.batches import batch_values, own_values
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.errors import Failure, InstructionError
from partitioner.runtime.observe.operator_probe import ProbedOperation, probe_operators

KIND = "NonFinite"


class NonFiniteError(InstructionError):
    """The loss or a gradient is not finite; says which operator of which rank made it so."""


@dataclass(frozen=True)
class NonFiniteOrigin:
    """An operator that made the first NaN, or infinity, of its rank."""

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
    """After ``engine.step(batch, local=local)``: raise :class:`NonFiniteError` on all ranks if the loss or, with
    ``gradients``, a gradient of any rank is not finite. All ranks call it, before the gradients are used. Reads every
    gradient once."""
    engine._executor.updates.keep = True  # what a step to come read, should it be run again
    bad = engine.loss is not None and not bool(torch.isfinite(engine.loss))
    if gradients and not bad:
        grads = [p.grad for p in engine.parameters() if p.grad is not None]
        bad = bool(grads) and not all(bool(torch.isfinite(n)) for n in torch._foreach_norm(grads, math.inf))
    flag = torch.tensor(float(bad), device=engine.device)
    everyone = all_ranks(engine.communicator, engine.program.world_size)
    if everyone.all_reduce(flag, maximum=True).wait().item():
        raise NonFiniteError(find_nonfinite(engine, batch, local))


def find_nonfinite(engine: Engine, batch: Any, local: bool = False) -> Failure:
    """Run the last step again on ``batch`` and find what first was not finite: rank, instruction, graph node. All ranks
    call it, before the optimizer changes the weights; the engine's step count and its factor of the loss stay as they
    are, the gradients are those of ``batch`` again."""
    told = _of_all(engine, _find_nonfinite_inputs(engine, batch, local))  # one rank's own shard or samples may have it
    if not told:
        found = _NonFiniteFinder(engine.communicator.rank)
        with _replay_step(engine), probe_operators(engine, found.see):
            engine.step(batch, local=local)
        told = _of_all(engine, found.list_origins())
    return _origins_to_failure(told, engine.steps)


@contextmanager
def _replay_step(engine: Engine) -> Iterator[None]:
    """A step in the block is the last one again; what it leaves for those to come is as it was."""
    steps, residuals = engine.steps, engine._gradients.residuals
    kept = {place: residual.clone() for place, residual in residuals.items()}
    engine.steps -= 1
    try:
        scale = nullcontext() if engine._scale is None else engine._scale.again()
        with scale, engine._executor.updates.again():
            yield
    finally:
        engine.steps = steps
        for place, residual in kept.items():
            residuals[place].copy_(residual)


class _NonFiniteFinder:
    """Notes the first NaN and the first infinity that this rank makes."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.nan: NonFiniteOrigin | None = None
        self.infinity: NonFiniteOrigin | None = None

    def list_origins(self) -> list[NonFiniteOrigin]:
        return [o for o in (self.nan, self.infinity) if o is not None]

    def see(self, operation: ProbedOperation) -> None:
        if self.nan is not None:
            return
        made = [_find_nan_and_infinity(x) for x in operation.outputs]
        if not any(nan or infinite for nan, infinite in made):
            return
        # What an operator writes to is looked at too late to say what was there.
        given = [_find_nan_and_infinity(x) for x in operation.inputs if all(x is not out for out in operation.outputs)]
        had_infinity = any(infinite for _, infinite in given)
        if any(nan for nan, _ in made):
            if not any(nan for nan, _ in given):
                self.nan = self._make_origin(operation, True, had_infinity)
        elif self.infinity is None and not had_infinity and not _asked_for(operation):
            self.infinity = self._make_origin(operation, False, False)

    def _make_origin(self, operation: ProbedOperation, is_nan: bool, from_infinity: bool) -> NonFiniteOrigin:
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
    """Whether ``x`` holds a NaN, and an infinity."""
    if not (x.is_floating_point() or x.is_complex()) or x.numel() == 0:
        return False, False
    if bool(torch.isfinite(x).all()):
        return False, False
    return bool(torch.isnan(x).any()), bool(torch.isinf(x).any())


def _asked_for(operation: ProbedOperation) -> bool:
    """Whether an infinity was given as a number: ``masked_fill(mask, -inf)``."""
    return any(isinstance(s, float) and math.isinf(s) for s in operation.scalars)


def _find_nonfinite_inputs(engine: Engine, batch: Any, local: bool) -> list[NonFiniteOrigin]:
    """What is not a number before the step begins: a parameter, an input."""
    inputs = own_values(engine.program, engine.share, batch, True) if local else batch_values(engine.program, batch)
    tensors: Mapping[str, Tensor] = {
        **{f"parameter {n}": p.detach() for n, p in engine.named_parameters()},
        **{f"input {n}": x for n, x in inputs.items()},
    }
    names = [name for name, x in tensors.items() if _find_nan_and_infinity(x)[0]]
    if not names:
        return []
    what = f"{names[0]} holds a NaN before the step" + (f", as do {len(names) - 1} more" if len(names) > 1 else "")
    return [NonFiniteOrigin(0.0, engine.communicator.rank, None, "before the step", "", "", "", "", what, True)]


def _origins_to_failure(origins: list[NonFiniteOrigin], step: int) -> Failure:
    nans = sorted((o for o in origins if o.is_nan), key=lambda o: (o.at, o.rank))
    infinities = sorted((o for o in origins if not o.is_nan), key=lambda o: (o.at, o.rank))
    if not nans and not infinities:
        text = "the loss or a gradient is not finite; run again, the step is: what made it so does not recur"
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


def _of_all(engine: Engine, seen: list[NonFiniteOrigin]) -> list[NonFiniteOrigin]:
    """What all ranks have seen, on all ranks."""
    return [
        NonFiniteOrigin(**data)
        for found in _all_gather_json(engine, json.dumps([asdict(o) for o in seen]))
        for data in found
    ]


def _all_gather_json(engine: Engine, text: str) -> list[Any]:
    """The JSON value of every rank, on all ranks."""
    communicator = engine.communicator
    group = all_ranks(communicator, engine.program.world_size)
    content = text.encode()
    length = int(group.all_reduce(torch.tensor(float(len(content)), device=engine.device), maximum=True).wait().item())
    padded = _bytes_to_tensor(content.ljust(length), communicator)
    parts = group.all_gather(padded.unsqueeze(0), 0).wait()
    return [json.loads(bytes(part.cpu().tolist())) for part in parts.reshape(-1, length)]


def _bytes_to_tensor(content: bytes, communicator: Communicator) -> Tensor:
    return torch.tensor(list(content), dtype=torch.uint8, device=communicator.device)
