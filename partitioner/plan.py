"""The plan: the program of all ranks, why it was chosen, and what it is expected to cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from partitioner.constraints import Constraints
from partitioner.topology import Topology
from runtime.files import write_text
from runtime.program import Data, Program, RankProgram

if TYPE_CHECKING:
    from torch import nn

    from partitioner.solve.sharding import ShardingSolution
    from partitioner.verify import Verification
    from runtime.prove import Proof


class Estimate(Data):
    """What the cost model expects of one step. ``memory``: peak bytes, one per rank; ``breakdown``: seconds by kind."""

    step_time: float
    mfu: float
    bubble: float
    memory: tuple[int, ...]
    breakdown: dict[str, float]


class Candidate(Data):
    """One point of the search and what became of it."""

    mesh: dict[str, int]
    microbatch_size: int
    schedule: str
    status: Literal["chosen", "solved", "bounded", "infeasible"]
    bound: float = 0.0  # no plan of this candidate can take fewer seconds
    step_time: float | None = None
    memory: int | None = None  # bytes on the fullest rank
    reason: str = ""


class Certificate(Data):
    """``objective`` is the plan's cost in seconds under the model, ``bound`` what no plan can go below."""

    objective: float
    bound: float
    gap: float
    candidates: tuple[Candidate, ...] = ()


class OperatorShare(Data):
    """How much of the model's matrix-multiply work is sharded, and which operators have no rule (name -> share)."""

    matmul_sharded: float
    without_rule: dict[str, float]


class Plan(Data):
    """What :func:`partitioner.partition` returns: programs, and the reasons for them.

    ``devices[rank]`` is the topology's device on which a rank runs.
    """

    program: Program
    topology: Topology
    devices: tuple[int, ...]
    constraints: Constraints
    estimate: Estimate
    certificate: Certificate
    shares: OperatorShare
    model: str
    precision: str | None = None
    optimizer: str = "adamw"
    notes: tuple[str, ...] = ()

    @property
    def mesh(self) -> dict[str, int]:
        """Ranks per axis: ``{"pp": 2, "dp": 2, "cp": 1, "tp": 4, "ep": 1}``."""
        return self.program.mesh

    def rank(self, rank: int) -> RankProgram:
        """The program of one rank."""
        return self.program.rank(rank)

    def summary(self) -> str:
        """The plan in a table or two, for a terminal."""
        from partitioner.explain import summary

        return summary(self)

    def explain(self) -> str:
        """The plan in plain words: what binds, where the time goes, what else was considered."""
        from partitioner.explain import explain

        return explain(self)

    def prove(self) -> Proof:
        """Prove the programs of all ranks. Raises :class:`runtime.ProofError` with rank, instruction and graph node."""
        from runtime.prove import prove

        return prove(self.program)

    def verify(self, model: nn.Module, inputs: Any, loss: Any = None) -> Verification:
        """Run all ranks on this machine in float64 against the unmodified ``model``."""
        from partitioner.verify import verify

        return verify(self, model, inputs, loss)

    def to_svg(self, path: str | Path, view: str = "graph") -> Path:
        """Draw ``view`` ("graph", "timeline" or "topology") to ``path``."""
        from partitioner.draw import draw

        return write_text(Path(path), draw(self, view))

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON; the file is complete or absent."""
        from partitioner.planfile import save_plan

        return save_plan(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """The plan that :meth:`save` wrote. Raises :class:`PlanFileError` on any other file."""
        from partitioner.planfile import load_plan

        return load_plan(Path(path))

    def export_ranks(self, folder: str | Path) -> list[Path]:
        """Write one self-contained JSON file per rank to ``folder``."""
        from partitioner.planfile import export_ranks

        return export_ranks(self, Path(folder))


def operator_share(batch: ShardingSolution, tensor: ShardingSolution) -> OperatorShare:
    """The shares of a plan: of matrix products that ``tp`` divides, and of operators that no rule covers."""
    return OperatorShare(matmul_sharded=tensor.matmul_sharded, without_rule=batch.without_rule)
