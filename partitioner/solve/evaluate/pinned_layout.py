"""The layout that the main program of a plan fixes for further programs: how parameters and buffers are sharded over
``tp``, and on which pipeline stage each call runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from partitioner.passes.ir.layouts import READ_SHARDED, REPLICATED, Layout
from partitioner.passes.ir.model import FoldedModel
from partitioner.runtime.program.program import Program
from partitioner.solve.sharding.choices import LayoutRules
from partitioner.solve.sharding.local_model import LocalModel
from partitioner.solve.stages.problem import StageCall


@dataclass(frozen=True)
class PinnedLayout:
    """The layout of the main program of a plan, such as training. Further programs over the same parameters and buffers
    (states), such as one for evaluation, have to keep it.

    ``states``: name -> layout over ``tp``. ``stages``: module path -> the (virtual) stage indices of its block calls
    (such as layers), in order. ``home``: for each state that only one stage reads, name -> index of that stage.
    ``program``: the main program. ``inputs``: name of an input that the ranks keep in shards, such as a key/value cache
    -> layout over ``tp``; other inputs are whole on every rank. ``outputs``: name of an output -> layout over ``tp``;
    other outputs may have any layout."""

    states: Mapping[str, Layout]
    stages: Mapping[str, tuple[int, ...]]
    home: Mapping[str, int]
    program: Program
    inputs: Mapping[str, Layout] = field(default_factory=dict)
    outputs: Mapping[str, Layout] = field(default_factory=dict)

    @staticmethod
    def of(local: LocalModel, stage_of_call: Sequence[int], program: Program) -> PinnedLayout:
        """Return the layout of ``program``, the main program of a plan (such as training), which further programs of
        the plan have to keep. ``local``: the graphs of one rank from which ``program`` was written. ``stage_of_call``:
        the stage index of each block call (such as a layer) of ``local``."""
        stages: dict[str, list[int]] = defaultdict(list)
        readers: dict[str, set[int]] = defaultdict(set)
        for call, stage in zip(local.model.calls, stage_of_call, strict=True):
            if not (call.shared or call.prologue):
                stages[call.path].append(stage)
                for name in call.states:
                    readers[name].add(stage)
        kept = {n: s for n, s in local.sharding.states.items() if local.model.states[n].kind != "constant"}
        home = {name: min(found) for name, found in readers.items() if len(found) == 1}
        return PinnedLayout(kept, {path: tuple(found) for path, found in stages.items()}, home, program)

    def rules(self, model: FoldedModel, train: bool) -> LayoutRules:
        """Return the layouts of parameters and buffers that the sharding of ``model`` over ``tp`` has to keep, because
        the main program of the plan (such as training) has them. ``train``: whether parameters receive gradients.
        ``model``: the model as calls of blocks; equal layers share one block."""
        found = {n: layout for n, layout in self.states.items() if n in model.states}
        if not train:
            found = {n: REPLICATED if layout == READ_SHARDED else layout for n, layout in found.items()}
        inputs, outputs = ({n: (x,) for n, x in pinned.items()} for pinned in (self.inputs, self.outputs))
        return LayoutRules(inputs, outputs, states=found)

    def pinned_calls(self, calls: Sequence[StageCall]) -> dict[int, int]:
        """Return the stages that the plan's main program (such as training) fixes for calls of a further program (such
        as an evaluation), as a dict: index among ``calls`` -> stage index. If the main program calls the same module
        path equally often, the stage of a block call (such as a layer) is that of the main program's call. Otherwise it
        is the last of the stages that alone have parameters or buffers of the call; a call without such a stage is left
        out. The result is empty if these stage indices do not ascend in the order of ``calls``."""
        seen: dict[str, int] = defaultdict(int)
        counts: dict[str, int] = defaultdict(int)
        for call in calls:
            counts[call.path] += 1
        pinned = {}
        for place, call in enumerate(calls):
            known, number = self.stages.get(call.path, ()), seen[call.path]
            seen[call.path] += 1
            homes = {self.home[s] for s in call.states if s in self.home}
            if len(known) == counts[call.path]:
                pinned[place] = known[number]
            elif homes:
                pinned[place] = max(homes)
        ordered = sorted(pinned)
        return pinned if all(pinned[a] <= pinned[b] for a, b in pairwise(ordered)) else {}
