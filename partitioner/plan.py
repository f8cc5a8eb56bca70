"""The plan: the program of all ranks, why it was chosen, and what it is expected to cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from partitioner.constraints import Constraints
from partitioner.errors import PlanError
from partitioner.execution_profile import OURS, ExecutionProfile
from partitioner.passes.faults import typed_errors
from partitioner.runtime.files import write_text
from partitioner.runtime.program.instructions import Data
from partitioner.runtime.program.program import Program, RankProgram
from partitioner.topology import Topology

if TYPE_CHECKING:
    from torch import nn

    from partitioner.advise.why_not import WhyNot
    from partitioner.plans.training_run import TrainingRun
    from partitioner.plans.verify import Verification
    from partitioner.runtime.prove.prove import Proof
    from partitioner.solve.sharding.sharding import ShardingSolution

NEAR = 0.05  # of a device's memory: a plan may exceed it by less, where nothing else was found

WITHOUT = "Without"  # begins the name of a baseline that leaves devices out
OPEN = "open"  # among what a certificate leaves out: bounded, and its bound below the plan's cost
_ROUNDING = 1e-9  # of a step: no difference


class StageEstimate(Data):
    """What the cost model expects of one pipeline stage: of ``num_calls`` calls, from the module ``first`` to ``last``.

    ``recomputed``: how many of them run again for their backward; ``selective``: of all, what is
    quickly made again. Seconds are of one step, without waiting; ``backward_s`` has what is recomputed. ``memory``:
    what the peak of a rank consists of, in bytes by kind (``parameters``, ``gradients``, ``optimizer``, ``saved``,
    ``recomputed``, ``working``, ``flowing``, ``gathered``; without a program ``buffers``); ``host``: bytes of a rank in
    host memory; ``disk``: on disk.
    """

    first: str
    last: str
    num_calls: int
    recomputed: int
    forward_s: float
    backward_s: float
    memory: dict[str, int]
    selective: bool = False
    host: int = 0
    disk: int = 0

    @property
    def again(self) -> str:
        """What backward makes again of its calls, in words; empty: nothing."""
        if not self.recomputed:
            return "recomputed in part" if self.selective else ""
        return f"{self.recomputed} recomputed" + (", the others in part" if self.selective else "")


class Estimate(Data):
    """What the cost model expects of one step. ``memory``: peak bytes, one per rank; ``breakdown``: seconds by kind.

    ``step_time``: seconds from the start of a step to the end of the optimizer's update; where consecutive steps
    overlap, from one such end to the next. ``simulated``: those at which the simulation of the program ends, which
    are ``step_time`` to 1 % unless they are fewer; ``None`` without a program.
    """

    step_time: float
    mfu: float
    bubble: float
    memory: tuple[int, ...]
    breakdown: dict[str, float]
    stages: tuple[StageEstimate, ...] = ()
    simulated: float | None = None


class Candidate(Data):
    """One point of the search and what became of it. ``breakdown``: seconds by kind, of what was solved."""

    mesh: dict[str, int]
    microbatch_size: int
    schedule: str
    status: Literal["chosen", "solved", "bounded", "infeasible"]
    bound: float = 0.0  # no plan of this candidate can take fewer seconds
    step_time: float | None = None
    memory: int | None = (
        None  # bytes on the fullest rank: of the chosen one by its program, else by the search's tables
    )
    reason: str = ""
    zero: int = 0
    dp_shard: int = 0
    virtual_stages: int = 1
    etp: int = 1
    breakdown: dict[str, float] | None = None
    missing: int | None = None  # bytes that a rank lacks


class Baseline(Data):
    """A layout that every report has, for comparison. ``excluded``: why it is no candidate (empty: it is one).
    ``offload``: what it keeps in host memory; ``global_batch``: its batch, where that is another one (0: it is not)."""

    name: str
    candidate: Candidate | None = None
    excluded: str = ""
    offload: tuple[str, ...] = ()
    global_batch: int = 0


class Limits(Data):
    """What of a model limits the candidates. ``calls``: that stages can hold; ``dims``: sizes of weights' dims;
    ``experts``: ranks that share them are a divisor of it; ``length``: a sample's tokens, 0 without attention;
    ``repeated``, ``even``: see :class:`partitioner.solve.search.space.SearchSpace`."""

    calls: int
    dims: tuple[int, ...]
    experts: int = 0
    length: int = 0
    repeated: int = 0
    even: bool = False


class Certificate(Data):
    """``objective`` is the plan's cost in seconds under the model, ``bound`` what no plan can go below.

    ``left``: by status, the candidates that are counted and have no row, the worst of many; ``open``: bounded, with a
    bound below the objective. ``cut_off``: what ended the search before it was done. ``limits``: of what
    candidates there could be. ``beyond``: constraint -> what of it the bound does not speak of: plans with that fixed
    may be faster, whatever the gap.
    """

    objective: float
    bound: float
    gap: float
    candidates: tuple[Candidate, ...] = ()
    baselines: tuple[Baseline, ...] = ()
    left: dict[str, int] = Field(default_factory=dict)
    cut_off: Literal["time limit", "interruption"] | None = None
    limits: Limits | None = None
    beyond: dict[str, str] = Field(default_factory=dict)

    def is_open(self, candidate: Candidate) -> bool:
        """Whether a candidate was not solved, though its bound does not say that it takes as long as the plan."""
        return candidate.status == "bounded" and candidate.bound < self.objective * (1 - _ROUNDING)

    @property
    def num_open(self) -> int:
        """Candidates that were not solved and may be faster than the plan."""
        return sum(map(self.is_open, self.candidates)) + self.left.get(OPEN, 0)


class ContextWay(Data):
    """One algorithm of attention over ``cp``: the step's seconds if every attention runs by it, or why none does.

    ``calls``: of attention that run by it in the plan.
    """

    algorithm: str
    calls: int = 0
    step_time: float | None = None
    reason: str = ""


class OperatorShare(Data):
    """How much of the model's matrix-multiply work is sharded, and which operators have no rule (name -> share)."""

    matmul_sharded: float
    without_rule: dict[str, float]


class Plan(Data):
    """What :func:`partitioner.partition` returns: programs, and the reasons for them.

    ``devices[rank]`` is the topology's device on which a rank runs. ``planned_only``: what of it this version plans but
    does not execute, as ``zero=3``; such a plan has no program.
    """

    written: Program | None = Field(default=None, alias="program")
    topology: Topology
    devices: tuple[int, ...]
    constraints: Constraints
    profile: ExecutionProfile = OURS
    estimate: Estimate
    certificate: Certificate
    shares: OperatorShare
    model: str
    precision: str | None = None
    optimizer: str = "adamw"
    notes: tuple[str, ...] = ()
    context: tuple[ContextWay, ...] = ()  # what was chosen among, where cp is more than 1
    objective: Literal["train", "infer"] = "train"
    global_batch: int = 0
    planned_only: tuple[str, ...] = ()
    # of a plan without a program: kinds of what is kept in host memory, and microbatches of ranks of dp that differ
    in_host: tuple[str, ...] = ()
    of_replicas: tuple[int, ...] = ()
    lacking: str = ""  # what did not fit on the devices alone, where offload was chosen without being asked for

    @property
    def program(self) -> Program:
        """The programs of all ranks. Raises :class:`PlanError` for a plan that this version does not execute."""
        if self.written is None:
            under = f" under the profile {self.profile.name}" if self.profile.differences else ""
            raise PlanError(
                f"this plan is an estimate{under}: {', '.join(self.planned_only)} is planned but not executed here; "
                "plan without it to run, prove, verify or draw programs"
            )
        return self.written

    @property
    def chosen(self) -> Candidate:
        """The candidate that this plan is."""
        return next(c for c in self.certificate.candidates if c.status == "chosen")

    @property
    def mesh(self) -> dict[str, int]:
        """Ranks per axis: ``{"pp": 2, "dp": 2, "cp": 1, "tp": 4, "ep": 1}``; ``ep`` is folded over dp x cp x tp."""
        return self.chosen.mesh if self.written is None else self.written.mesh

    @property
    def offload(self) -> tuple[str, ...]:
        """What is kept in host memory; ``disk``: optimizer states on disk instead."""
        if self.written is None:
            return self.in_host or self.constraints.offload or ()
        return self.written.offload

    @property
    def world_size(self) -> int:
        """Ranks of the plan."""
        return len(self.devices)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one step, the most that a rank has."""
        if self.written is not None:
            return self.written.num_microbatches
        each = -(-self.global_batch // (self.chosen.mesh["dp"] * self.chosen.microbatch_size))
        return max(self.of_replicas, default=each)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, all samples as long as those that were planned; 0 where the model has no sequences."""
        limits = self.certificate.limits
        return self.global_batch * limits.length if limits is not None else 0

    @property
    def data_shares(self) -> tuple[int, ...]:
        """The microbatches of each rank of ``dp``; empty where all have :attr:`num_microbatches`."""
        return self.of_replicas if self.written is None else self.written.data_shares

    @property
    def schedule(self) -> str:
        """The pipeline's schedule."""
        return self.chosen.schedule if self.written is None else self.written.schedule

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return self.mesh.get("pp", 1)

    def rank(self, rank: int) -> RankProgram:
        """The program of one rank. Raises :class:`PlanError` for one that is not there."""
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise PlanError(f"the plan has ranks 0 to {self.world_size - 1}; got {rank!r}")
        return self.program.rank(rank)

    @typed_errors("Plan.summary()")
    def summary(self) -> str:
        """The plan in a table or two, for a terminal."""
        from partitioner.explain.explain import format_summary

        return format_summary(self)

    @typed_errors("Plan.explain()")
    def explain(self) -> str:
        """The plan in plain words: what binds, where the time goes, what else was considered."""
        from partitioner.explain.explain import format_explanation

        return format_explanation(self)

    @typed_errors("Plan.why_not()")
    def why_not(
        self, *, model: nn.Module | None = None, inputs: Any = None, loss: Any = None, **constraints: Any
    ) -> WhyNot:
        """Why the plan is not as ``constraints`` say, as ``why_not(tp=8)``: what it would cost, or what forbids it.

        ``model``, with ``inputs`` and ``loss`` as for ``partition``: to plan again where the certificate does not say.
        """
        from partitioner.advise.why_not import why_not

        return why_not(self, constraints, model, inputs, loss)

    @typed_errors("Plan.diff()")
    def diff(self, other: Plan) -> str:
        """What ``other`` does otherwise, and what that changes in time and memory, for a terminal."""
        from partitioner.explain.diff import format_plan_diff

        if not isinstance(other, Plan):
            raise PlanError(f"expected a plan to compare with, got {type(other).__name__}")
        return format_plan_diff(self, other)

    @typed_errors("Plan.training_run()")
    def training_run(
        self,
        *,
        tokens: float | None = None,
        samples: float | None = None,
        steps: int | None = None,
        price: float | None = None,
    ) -> TrainingRun:
        """Steps, days, device hours, money and energy of a run over so many ``tokens``, ``samples`` or ``steps``;
        ``price``: US dollars for one device and hour, in place of the hardware file's."""
        from partitioner.plans.training_run import training_run

        return training_run(self, tokens=tokens, samples=samples, steps=steps, price=price)

    @typed_errors("Plan.prove()")
    def prove(self) -> Proof:
        """Prove the programs of all ranks.

        Raises :class:`partitioner.runtime.prove.errors.ProofError` with rank, instruction and graph node.
        """
        from partitioner.runtime.prove.prove import prove

        return prove(self.program)

    @typed_errors("Plan.verify()")
    def verify(self, model: nn.Module, inputs: Any, loss: Any = None) -> Verification:
        """Run all ranks on this machine in float64 against the unmodified ``model``."""
        from partitioner.plans.verify import verify

        return verify(self, model, inputs, loss)

    @typed_errors("Plan.to_svg()")
    def to_svg(self, path: str | Path, view: str = "graph") -> Path:
        """Draw ``view`` ("graph", "timeline", "topology", "memory") to ``path``; ``DrawError`` for another view."""
        from partitioner.draw import draw

        return write_text(Path(path), draw(self, view))

    @typed_errors("Plan.save()")
    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON; the file is complete or absent."""
        from partitioner.plans.files import save_plan

        return save_plan(self, Path(path))

    @staticmethod
    @typed_errors("Plan.load()")
    def load(path: str | Path) -> Plan:
        """The plan that :meth:`save` wrote. Raises :class:`PlanFileError` on any other file."""
        from partitioner.plans.files import load_plan

        return load_plan(Path(path))

    @typed_errors("Plan.export_ranks()")
    def export_ranks(self, folder: str | Path) -> list[Path]:
        """Write one self-contained JSON file per rank to ``folder``."""
        from partitioner.plans.files import export_ranks

        return export_ranks(self, Path(folder))


def operator_share(
    batch: ShardingSolution, tensor: ShardingSolution, context: ShardingSolution | None = None
) -> OperatorShare:
    """The shares of a plan: of matrix products that ``tp`` or ``cp`` divides, and of operators that no rule covers."""
    divided = max(tensor.matmul_sharded, 0.0 if context is None else context.matmul_sharded)
    return OperatorShare(matmul_sharded=divided, without_rule=batch.without_rule)
