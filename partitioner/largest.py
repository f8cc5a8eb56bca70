"""The largest microbatch, or the longest sequence, that fits in the memory of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from partitioner.api import partition
from partitioner.constraints import Constraints
from partitioner.draw.figures import memory_text, mesh_text
from partitioner.errors import ConstraintError
from partitioner.plan import Plan
from partitioner.prepared import prepare
from partitioner.topology import Topology
from partitioner.units import seconds_text
from passes.errors import InputsError, PartitionError
from passes.faults import typed_errors

Of = Literal["microbatch", "sequence"]
_WHAT = {"microbatch": "a microbatch of {:,} samples", "sequence": "a sequence of {:,} tokens"}
_DIM = 1  # of inputs: the sequence, behind the batch
_MULTIPLE = 1024  # of tokens, between sizes that are told apart; fewer for short sequences


@dataclass(frozen=True)
class Largest:
    """``size`` samples or tokens have the ``plan``; ``too_large``, the next that was tried, has none for the ``reason``
    (``None``: no limit was found); ``str()`` of it is for people."""

    of: Of
    size: int
    plan: Plan = field(repr=False)
    too_large: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        fits = (
            f"{_WHAT[self.of].format(self.size)} fits: {memory_text(self.plan)}, {mesh_text(self.plan.mesh)}, "
            f"{seconds_text(self.plan.estimate.step_time)} a step"
        )
        if self.too_large is None:
            return f"{fits}; no limit was found"
        return f"{fits}; {_WHAT[self.of].format(self.too_large)} does not: {self.reason}"


@typed_errors("largest_that_fits()")
def largest_that_fits(
    model: Any,
    topology: Topology,
    inputs: Any,
    of: Of = "sequence",
    *,
    most: int = 2**24,
    multiple: int | None = None,
    constraints: Constraints | None = None,
    **more: Any,
) -> Largest:
    """The largest size that has a plan. Sizes are doubled from the inputs' own (of a microbatch: from 1) up to the
    first that has none, and halved in between; plans are estimates.

    Args:
        inputs: a sample as for :func:`partitioner.partition`; dim 0 is the batch, and of what has a second dim that one
            the sequence, which is repeated to be longer.
        of: ``microbatch``: samples of one rank at a time, with one microbatch for each device's share of the batch, or
            ``sequence``.
        most: where the search ends.
        multiple: sizes are multiples of it; default: 1 for microbatches, up to 1,024 tokens for sequences.
        constraints, more: as :func:`partitioner.partition` takes them.

    Raises what :func:`partitioner.partition` does where not even the first size has a plan, and
    :class:`ConstraintError` or :class:`InputsError` for arguments that cannot be.
    """
    if of not in _WHAT:
        raise ConstraintError(f"of must be one of {', '.join(_WHAT)}; got {of!r}")
    asked = constraints or Constraints()
    if of == "microbatch" and asked.microbatch_size is not None:
        raise ConstraintError(
            f"microbatch_size={asked.microbatch_size}, of which the largest is asked for; leave it out"
        )
    plan_of = _of_microbatch if of == "microbatch" else _of_sequence
    plan = plan_of(model, topology, inputs, asked, more)
    first = 1 if of == "microbatch" else length_of(inputs)
    step = multiple or (1 if of == "microbatch" else min(_MULTIPLE, first))
    good, found = first, plan(first)
    bad: int | None = None
    reason = ""
    while bad is None or bad - good > step:
        size = 2 * good if bad is None else (good + bad) // 2 // step * step
        if size > most or size <= good:
            break
        try:
            good, found = size, plan(size)
        except PartitionError as error:
            bad, reason = size, getattr(error, "message", error.brief)
    return Largest(of, good, found, bad, reason)


def _of_microbatch(
    model: Any, topology: Topology, inputs: Any, asked: Constraints, more: dict[str, Any]
) -> Callable[[int], Plan]:
    own = ("loss", "objective", "precision")
    prepared = prepare(model, inputs, **{name: more[name] for name in own if name in more})
    others = {name: value for name, value in more.items() if name not in (*own, "global_batch")}

    def plan(size: int) -> Plan:
        pins = asked.model_copy(update={"microbatch_size": size})
        batch = size * topology.num_devices
        return partition(prepared, topology, global_batch=batch, constraints=pins, estimate_only=True, **others)

    return plan


def _of_sequence(
    model: Any, topology: Topology, inputs: Any, asked: Constraints, more: dict[str, Any]
) -> Callable[[int], Plan]:
    def plan(size: int) -> Plan:
        return partition(model, topology, longer(inputs, size), constraints=asked, estimate_only=True, **more)

    return plan


def length_of(inputs: Any) -> int:
    """The tokens of a sample. Raises :class:`InputsError` where no input has a second dim."""
    lengths = [leaf.shape[_DIM] for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > _DIM]
    if not lengths:
        raise InputsError("no input has a second dim, which would be the sequence; ask of='microbatch' instead")
    return int(lengths[0])


def longer(inputs: Any, size: int) -> Any:
    """``inputs`` with sequences of ``size`` tokens, their own ones repeated."""
    length = length_of(inputs)

    def stretched(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() <= _DIM or leaf.shape[_DIM] != length:
            return leaf
        return leaf.index_select(_DIM, torch.arange(size, device=leaf.device) % length)

    return tree_map(stretched, inputs)


__all__ = ["Largest", "largest_that_fits", "length_of", "longer"]
