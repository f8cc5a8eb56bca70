"""The programs of a plan have one layout of the state, so that one engine runs them all on the same tensors."""

from __future__ import annotations

from partitioner.passes.errors import PartitionError
from partitioner.passes.ir.layouts import Layout
from partitioner.runtime.program.program import Program, StateData

_LAYOUT = ("shape", "dtype", "kind", "aliases", "parts", "layout", "expert_layout", "stages", "zero_axes")
_MESH = ("mesh", "etp", "zero", "dp_shard", "offload", "schedule")


class LayoutError(PartitionError):
    """Raised if the programs of one plan place parameters or buffers differently on the ranks, so that the programs
    cannot use the same tensors.
    """


def prove_same_layout(first: Program, name: str, further: Program) -> None:
    """Raise :class:`LayoutError` unless the program ``further``, called ``name``, can run on the parameters and buffers
    of ``first``.

    Both have the same mesh and the same way of sharding. Every parameter and buffer of ``further`` is one of ``first``,
    with the same shape, type, layout, stages and ZeRO axes. Constants are each program's own. In training, gradients
    are summed over the same axes and in the same groups of parameters.
    """
    for what in _MESH:
        if getattr(first, what) != getattr(further, what):
            expected, got = getattr(first, what), getattr(further, what)
            raise LayoutError(f"program {name!r} has {what}={got}; expected {expected}, as the first program")
    for state, data in further.states.items():
        if data.kind == "constant":
            continue
        if state not in first.states:
            raise LayoutError(f"program {name!r} has the {data.kind} {state!r}, which the first has not")
        difference = _find_difference(first.states[state], data, further.objective == "train")
        if difference:
            raise LayoutError(f"{state!r} in program {name!r} {difference}, as in the first program")
    for s, (own, other) in enumerate(zip(first.stages, further.stages, strict=True)):
        known = {bucket.states for bucket in own.buckets}
        if further.objective == "train" and own.buckets != other.buckets:
            raise LayoutError(f"stage {s} of program {name!r} reduces gradients in other buckets")
        if any(bucket.states not in known for bucket in other.buckets):
            raise LayoutError(f"stage {s} of program {name!r} gathers parameters in other buckets")


def _find_difference(expected: StateData, got: StateData, trains: bool) -> str:
    """Return in which field ``expected`` and ``got``, two descriptions of a parameter or buffer, differ, as text; empty
    if their layouts are equal.

    ``trains``: whether gradients are compared, too.
    """
    for what in (*_LAYOUT, *(("requires_grad", "grad_axes") if trains else ())):
        if what == "layout" and not trains and all(Layout.parse(s.layout).is_whole for s in (expected, got)):
            continue  # whole with either kind of gradient
        if getattr(expected, what) != getattr(got, what):
            return f"has {what}={getattr(got, what)}; expected {getattr(expected, what)}"
    return ""
