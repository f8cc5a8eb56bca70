"""The model's results of one run: a rank's shards of them, and whole tensors joined from the shards of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from partitioner.passes.ir.layouts import Layout, join_shards
from partitioner.runtime.engine.padding import BatchShape, trim_outputs
from partitioner.runtime.family.data import BatchPadding
from partitioner.runtime.program.program import OutputData, Program, RankProgram

Shards = Mapping[str, Mapping[int, Tensor]]  # value name -> microbatch -> a rank's shard


@dataclass(frozen=True)
class RunOutputs:
    """One rank's results of the last training step, or of the last run of another program of the plan, such as an
    evaluation.

    ``rank``: the rank's program that ran. ``shards``: name of an output tensor in the program -> microbatch -> this
    rank's shard, still with padded samples and positions. ``padding``: the planned padding of the program's batches;
    ``None``: they are not padded. ``real``: the shape of the batch before padding; ``None``: the batch was not padded.
    """

    rank: RankProgram
    shards: Shards
    padding: BatchPadding | None
    real: BatchShape | None

    def trim(self) -> dict[str, dict[int, Tensor]]:
        """Return this rank's shards of the model's results without padded samples and positions, as a nested dict:
        value name -> microbatch -> tensor.
        """
        if self.real is None or self.padding is None:
            return {value: dict(parts) for value, parts in self.shards.items()}
        return trim_outputs(self.rank, self.padding, self.real, self.shards)

    def join(self, parts: Mapping[int, Shards]) -> dict[str, Any]:
        """Return the model's whole results without padded samples and positions, as a dict: path in the result ->
        tensor or constant; ``None`` for a result that no rank has. ``parts``: rank -> name of an output tensor in the
        program -> microbatch -> the shard that this rank contributes, still with padded samples and positions.
        """
        return {path: self._trim_whole(path, x) for path, x in join_outputs(self.rank.program, parts).items()}

    def _trim_whole(self, path: str, whole: Any) -> Any:
        """Return ``whole``, one tensor or constant of the model's result, without padded samples and positions.
        ``path``: path of ``whole`` in the model's result.
        """
        if not isinstance(whole, Tensor) or self.real is None or self.padding is None:
            return whole
        batch_dim, length_dim = self.padding.outputs.get(path, (None, None))
        if batch_dim is not None:
            whole = whole.narrow(batch_dim, 0, self.real.batch)
        if length_dim is not None:
            whole = whole.narrow(length_dim, 0, self.real.length + self.padding.trimmed.get(path, 0))
        if path in self.padding.target_outputs:
            dim, more = self.padding.target_outputs[path]
            whole = whole.narrow(dim, 0, self.real.targets + more)
        return whole


def select_outputs(rank: RankProgram, outputs: Shards) -> dict[str, dict[int, Tensor]]:
    """Return the part of ``outputs`` that ``rank`` contributes to the whole results. Of several ranks with equal
    replicas, only one contributes. ``outputs`` and the result are nested dicts: name of an output tensor in the program
    -> microbatch -> this rank's shard.
    """
    layouts = {o.value: (Layout.parse(o.layout), Layout.parse(o.context)) for o in rank.program.outputs if o.value}
    at = rank.coordinates
    return {
        value: dict(by_microbatch)
        for value, by_microbatch in outputs.items()
        if all(at[a] == 0 or not to.is_whole for a, to in zip(("tp", "cp"), layouts[value], strict=True))
    }


def join_outputs(program: Program, parts: Mapping[int, Shards]) -> dict[str, Any]:
    """Return the whole results of the model, as a dict: path in the result -> tensor or constant; ``None`` for a result
    that no rank has. ``program``: the program of all ranks. ``parts``: rank -> name of the tensor in the program ->
    microbatch -> the shard that this rank contributes; only one rank of several replicas contributes. Shards along a
    dim have equal sizes.
    """
    return {o.path: _join_output(program, o, parts) for o in program.outputs}


def _join_output(program: Program, output: OutputData, parts: Mapping[int, Shards]) -> Any:
    """Return one tensor or constant of the model's result, joined from the shards of the ranks: over ``tp``, then
    ``cp``, then ``dp`` and microbatches. Return ``None`` if no rank has a part of it. ``program``: the program of all
    ranks. ``output``: describes the tensor and how it is sharded. ``parts``: rank -> name of the tensor in the program
    -> microbatch -> the rank's shard.
    """
    if output.value is None:
        return output.constant
    pieces = []
    for dp in range(program.mesh.get("dp", 1)):
        held = []  # for each cp coordinate: a list over the tp ranks of dicts, microbatch -> shard
        for cp in range(program.mesh.get("cp", 1)):
            ranks = program.group(program.rank_at({"pp": output.stage or 0, "dp": dp, "cp": cp}), ("tp",))
            along_tp = [parts[r][output.value] for r in ranks if output.value in parts[r]]
            held += [along_tp] if along_tp else []
        if not held:
            return None
        for m in range(len(program.share(dp))):
            along_cp = [join_shards([h[m] for h in along_tp], Layout.parse(output.layout)) for along_tp in held]
            pieces.append(join_shards(along_cp, Layout.parse(output.context)))
    if output.batch == "R":
        return pieces[0]
    return join_shards(pieces, Layout.parse(output.batch))
