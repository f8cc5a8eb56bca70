"""Check that all programs of a plan have the same layout of parameters and buffers, so that one engine can run them on
the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.passes.errors import PartitionError
from partitioner.passes.ir.layouts import Layout
from partitioner.runtime.family.data import FurtherProgram
from partitioner.runtime.program.program import Program, Stage, StateData

_LAYOUT = ("shape", "dtype", "kind", "aliases", "parts", "layout", "expert_layout", "stages", "zero_axes")
_WRITE = "partition.write_cache.default"
_MESH = ("mesh", "etp", "zero", "dp_shard", "offload", "schedule")


class LayoutError(PartitionError):
    """Raised if the programs of one plan place parameters or buffers differently on the ranks, so that the programs
    cannot use the same tensors.
    """


def prove_same_layout(first: Program, name: str, further: Program) -> None:
    """Raise :class:`LayoutError` unless ``further``, a further program of the plan (such as an evaluation) called
    ``name``, can run on the parameters and buffers of the program ``first``.

    Both must have the same mesh and the same way of sharding. Every parameter and buffer of ``further`` must also be in
    ``first``, with the same shape, dtype, layout, stages and ZeRO axes. Constants may differ. If ``further`` trains,
    gradients must be summed over the same axes and in the same buckets.
    """
    for what in _MESH:
        if getattr(first, what) != getattr(further, what):
            expected, got = getattr(first, what), getattr(further, what)
            raise LayoutError(f"program {name!r} has {what}={got}; expected {expected}, as in the first program")
    for state, data in further.states.items():
        if data.kind == "constant":
            continue
        if state not in first.states:
            raise LayoutError(
                f"program {name!r} has the {data.kind} {state!r}, which the first program does not have; expected "
                "the same states"
            )
        difference = _find_difference(first.states[state], data, further.objective == "train")
        if difference:
            raise LayoutError(f"{state!r} in program {name!r} {difference}, as in the first program")
    for s, (own, other) in enumerate(zip(first.stages, further.stages, strict=True)):
        known = {bucket.states for bucket in own.buckets}
        if further.objective == "train" and own.buckets != other.buckets:
            raise LayoutError(
                f"stage {s} of program {name!r} reduces gradients in other buckets than the first program; expected "
                "the same"
            )
        if any(bucket.states not in known for bucket in other.buckets):
            raise LayoutError(
                f"stage {s} of program {name!r} gathers parameters in other buckets than the first program; expected "
                "the same"
            )


def prove_same_caches(programs: Mapping[str, FurtherProgram]) -> None:
    """Raise :class:`LayoutError` unless the programs that generate text together (prefill and decode) place their
    key/value caches in the same way and write to them in place.

    Their caches must have the same shapes, dtypes and layouts, and be loaded by the same pipeline stages. The operand
    of each write must be a cache itself, not a copy of it, such as one from a collective. Programs without caches are
    skipped. ``programs``: name of a further program of a plan -> program; programs whose names differ only in the last
    word, such as ``generate prefill`` and ``generate decode``, belong together.
    """
    known: dict[tuple[str, str], tuple[str, tuple[object, ...]]] = {}
    for name, further in programs.items():
        program, generation = further.program, name.rpartition(" ")[0]
        for data in program.inputs:
            if data.path not in further.caches:
                continue
            value = program.values[data.value]
            stages = tuple(s for s, stage in enumerate(program.stages) if _has_load(stage, data.value))
            own = data.shape, data.dtype, data.batch_dim, value.layout, value.context, stages
            other, expected = known.setdefault((generation, data.path), (name, own))
            if own != expected:
                raise LayoutError(
                    f"{data.path!r} is placed as {own} in program {name!r}, and as {expected} in {other!r}"
                )
        for block, graph in program.blocks.items():
            inputs = {node["name"] for node in graph.nodes if node["op"] == "placeholder"}
            for node in graph.nodes:
                if node.get("target") == _WRITE and node["args"][0]["node"] not in inputs:
                    raise LayoutError(f"block {block!r} of program {name!r} writes to a copy of a key/value cache")


def _has_load(stage: Stage, value: str) -> bool:
    """Return whether the ranks of the pipeline stage ``stage`` have an instruction that loads the batch input called
    ``value``.
    """
    return any(i.op == "LOAD" and value in i.values for i in stage.instructions)


def _find_difference(expected: StateData, got: StateData, trained: bool) -> str:
    """Return the first difference between ``expected`` and ``got``, two descriptions of one parameter or buffer, as the
    end of an error message; empty if both place it on the ranks in the same way. ``trained``: whether the axes over
    which gradients are summed are compared, too.
    """
    for what in (*_LAYOUT, *(("requires_grad", "grad_axes") if trained else ())):
        if what == "layout" and not trained and all(Layout.parse(s.layout).is_whole for s in (expected, got)):
            continue  # R and R' differ only in the gradient
        if getattr(expected, what) != getattr(got, what):
            return f"has {what}={getattr(got, what)}; expected {getattr(expected, what)}"
    return ""
