"""The plan: the programs of all ranks, the reasons for the choice, and the estimates of time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from pydantic import Field

from partitioner.constraints import Constraints
from partitioner.errors import PlanError
from partitioner.execution_profile import OURS, ExecutionProfile
from partitioner.passes.faults import typed_errors
from partitioner.runtime.family.data import BatchPadding, FurtherProgram, name_shape
from partitioner.runtime.files import write_text
from partitioner.runtime.program.instructions import Data
from partitioner.runtime.program.program import Program, RankProgram
from partitioner.topology import Topology
from partitioner.units import bytes_text, format_percent, seconds_text

if TYPE_CHECKING:
    from torch import nn

    from partitioner.advise.why_not import WhyNot
    from partitioner.interop.layout import UnusedOption
    from partitioner.plans.training_run import TrainingRun
    from partitioner.plans.verify import Verification
    from partitioner.runtime.prove.prove import Proof
    from partitioner.solve.sharding.sharding import ShardingSolution

NEAR = 0.05  # fraction of a device's memory by which a plan may exceed it if no other plan was found

WITHOUT = "Without"  # first word of the name of a baseline that leaves devices out
# names of the well-known layouts with which every report compares the plan
DATA_PARALLEL, FULLY_SHARDED, MEGATRON = "Plain data parallelism", "ZeRO-3", "Megatron's layout"
LAYOUT_MEANINGS = {
    FULLY_SHARDED: "the best layout found with zero 3 over as many ranks of dp as the batch allows, without a pipeline",
    MEGATRON: "the best layout found of the kind that users of Megatron-LM choose: tp inside a node, any number of "
    "stages under 1f1b or interleaved, and zero 0 or 1",
}
OPEN = "open"  # candidates without a row in a certificate whose lower bound is below the plan's step time
_ROUNDING = 1e-9  # fraction of a step: less is a rounding error


class StageEstimate(Data):
    """The estimate of the cost model for one pipeline stage: seconds per step, without time spent waiting, and bytes of
    memory per rank."""

    first: str = Field(
        description="Module path of the first block call of the stage, such as a decoder layer; empty if the stage "
        "has no calls."
    )
    last: str = Field(description="Module path of the last block call of the stage; empty if the stage has no calls.")
    num_calls: int = Field(description="Number of block calls (such as decoder layers) of the stage.")
    recomputed: int = Field(description="Number of block calls whose whole forward is recomputed in the backward pass.")
    forward_s: float = Field(description="Forward time of the stage in seconds per step, summed over all microbatches.")
    backward_s: float = Field(
        description="Backward time of the stage in seconds per step, summed over all microbatches, including "
        "recomputation."
    )
    memory: dict[str, int] = Field(
        description="Peak memory of one rank in bytes, by kind: parameters (with buffers of the model), gradients, "
        "optimizer (states), residuals (rounding errors of compressed gradients), saved (activations "
        "for backward), recomputed (activations), working (temporary tensors of operators), flowing "
        "(gradients of activations), gathered (unsharded parameters and gradients under ZeRO). buffers "
        "is a remainder, for communication between stages; it occurs only if the plan has no program.",
    )
    selective: bool = Field(
        default=False,
        description="Whether block calls that are not recomputed as a whole recompute their cheap operators "
        "(selective recomputation); true if at least some of them do.",
    )
    in_part: int = Field(
        default=0,
        description="Number of block calls that recompute only their cheap operators (selective recomputation); 0 "
        "if there are none or if the number is unknown.",
    )
    host: int = Field(default=0, description="Host memory that one rank uses for offloaded data, in bytes.")
    disk: int = Field(default=0, description="Disk space that one rank uses for offloaded optimizer states, in bytes.")

    @property
    def again(self) -> str:
        """Return, as text such as ``3 recomputed``, the number of block calls (such as layers) of the stage whose
        activations are recomputed in backward; ``""`` if nothing is recomputed.
        """
        if not self.recomputed:
            return f"{self.in_part or ''} recomputed in part".strip() if self.selective else ""
        return f"{self.recomputed} recomputed" + (f", {self.in_part or 'others'} in part" if self.selective else "")


class Estimate(Data):
    """The estimate of the cost model for one step: seconds, peak bytes of each rank, the share of time spent waiting
    for other pipeline stages (bubble), and model FLOPs utilisation (MFU)."""

    step_time: float = Field(
        description="Time of a step in seconds, from its start to the end of the optimizer's update. If consecutive "
        "steps overlap, the time from the end of one step to the end of the next.",
    )
    mfu: float = Field(
        description="Model FLOPs utilisation, from 0 to 1: FLOPs of the model per second, divided by the summed "
        "peak FLOP/s of the devices.",
    )
    bubble: float = Field(
        description="Share of the step in which the slowest pipeline stage waits for other stages, from 0 to 1. The "
        "other stages wait at least as long.",
    )
    memory: tuple[int, ...] = Field(description="Peak memory of each rank in bytes, in the order of the ranks.")
    breakdown: dict[str, float] = Field(
        description="Seconds of the step by kind, such as compute, recompute, tp_communication, pp_communication, "
        "bubble, reduction or optimizer. The values add up to the step time."
    )
    stages: tuple[StageEstimate, ...] = Field(default=(), description="Estimate of each pipeline stage, in order.")
    simulated: float | None = Field(
        default=None,
        description="Step time in seconds according to a simulation of the emitted program. None if there is no "
        "program or no simulation.",
    )
    kinds: dict[str, float] = Field(
        default_factory=dict,
        description="Computation time of one microbatch in seconds by kind of operator, such as norms, on the stage "
        "that computes longest. Filled in only if computation is a large part of the step and MFU is "
        "low; otherwise empty.",
    )
    exchanges: dict[str, float] = Field(
        default_factory=dict,
        description="Communication time inside layers in seconds per step by purpose, such as tensor parallelism, "
        "on the busiest stage; time that is hidden behind computation is included. Filled in only if "
        "this communication is a large part of the step; otherwise empty.",
    )


class Candidate(Data):
    """One candidate of the search for a plan (mesh, microbatch size, schedule, ZeRO stage) and its outcome: chosen,
    solved (its step time was computed), bounded (not solved, because a lower bound on its step time is too high) or
    infeasible."""

    mesh: dict[str, int] = Field(
        description='Number of ranks along each mesh axis, such as {"pp": 2, "dp": 4, "cp": 1, "tp": 8, "ep": 1}.'
    )
    microbatch_size: int = Field(description="Number of samples in a microbatch on one data-parallel rank.")
    schedule: str = Field(description="Name of the pipeline schedule, such as 1f1b.")
    status: Literal["chosen", "solved", "bounded", "infeasible"] = Field(
        description="Outcome for this candidate: chosen (it is the plan), solved (its step time was computed, and "
        "it was not chosen), bounded (not solved, because of its lower bound or because the search "
        "ended early) or infeasible (it has no valid plan).",
    )
    bound: float = Field(
        default=0.0,
        description="Lower bound in seconds on the step time of every plan of this candidate; 0 if none was computed.",
    )
    step_time: float | None = Field(
        default=None,
        description="Step time in seconds of the best plan of this candidate; None if the candidate was not solved.",
    )
    memory: int | None = Field(
        default=None,
        description="Peak memory in bytes of the rank that needs most. For the chosen candidate it is computed from "
        "its program if there is one, otherwise it is the estimate of the search. None if the "
        "candidate was not solved.",
    )
    reason: str = Field(default="", description="Reason why the candidate is infeasible; empty for other candidates.")
    zero: int = Field(
        default=0, description="ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters."
    )
    dp_shard: int = Field(
        default=0,
        description="Number of neighbouring data-parallel ranks over which ZeRO shards states (hybrid sharding); 0 "
        "means all data-parallel ranks.",
    )
    virtual_stages: int = Field(
        default=1, description="Number of pipeline stages on each pipeline rank; more than 1 in interleaved schedules."
    )
    etp: int = Field(
        default=1,
        description="Number of ranks over which each expert is sharded; it has no effect on a model without experts.",
    )
    breakdown: dict[str, float] | None = Field(
        default=None,
        description="Seconds of the step by kind, such as compute or bubble; None if the candidate was not solved.",
    )
    missing: int | None = Field(
        default=None,
        description="Bytes by which the need of a rank exceeds its usable memory, for a candidate that does not fit "
        "in memory. None for every other candidate.",
    )
    beside: bool = Field(
        default=False,
        description="Whether the candidate was tried outside the main search, for example with another pipeline "
        "schedule. The lower bound of the main search does not cover such candidates.",
    )


class Baseline(Data):
    """A standard layout, such as plain data parallelism, that every report shows for comparison."""

    name: str = Field(description='Name of the layout in reports, such as "Plain data parallelism".')
    candidate: Candidate | None = Field(
        default=None,
        description="Mesh, step time and outcome of this layout; None if the layout cannot be formed for this model "
        "and cluster, or if a search for it found no faster plan.",
    )
    excluded: str = Field(
        default="",
        description="Reason why the search did not choose this layout, such as constraints of the user or that no "
        "plan with it is faster; empty if it was allowed to choose it.",
    )
    offload: tuple[str, ...] = Field(
        default=(),
        description="Kinds of data that this layout keeps in host memory: optimizer, activations or parameters. If "
        "disk is among them, optimizer states are on disk.",
    )
    global_batch: int = Field(
        default=0,
        description="Number of samples per step in this layout, if it differs from that of the plan; otherwise 0.",
    )


class Limits(Data):
    """Properties of the model that limit which candidates the search considers, such as the number of block calls that
    can be divided among pipeline stages."""

    calls: int = Field(
        description="Number of block calls (such as decoder layers) that can be distributed over pipeline stages."
    )
    dims: tuple[int, ...] = Field(
        description="Sizes of all dims of the model's parameters. The tensor-parallel size tp must divide at least "
        "one of them."
    )
    experts: int = Field(
        default=0,
        description="Number of experts per layer (the greatest common divisor if layers differ), which the "
        "expert-parallel size ep must divide; 0 for a model without experts.",
    )
    length: int = Field(
        default=0,
        description="Sequence length in tokens that context parallelism can shard; 0 if no attention was recognized.",
    )
    repeated: int = Field(
        default=0,
        description="Number of calls of repeated blocks, such as decoder layers; 0 means that all calls count.",
    )
    even: bool = Field(
        default=False, description="Whether all data-parallel ranks must have the same number of microbatches."
    )
    further_samples: tuple[int, ...] = Field(
        default=(),
        description="Number of samples in a batch of each further program, such as an evaluation. The data-parallel "
        "size dp must divide all of them.",
    )
    further_positions: tuple[int, ...] = Field(
        default=(),
        description="Sequence lengths of the further programs, such as an evaluation. Twice the context-parallel "
        "size cp must divide all of them.",
    )
    tokens: int = Field(
        default=0,
        description="Sequence length in tokens by which the throughput is computed, also if no attention was "
        "recognized; 0 if the model reads no token ids.",
    )


class Certificate(Data):
    """How close the plan is to the optimum under the cost model: its step time, and a lower bound on the step time of
    every plan that the search covers.
    """

    objective: float = Field(description="Step time of the plan in seconds.")
    bound: float = Field(description="Lower bound in seconds on the step time of every plan that the search covers.")
    gap: float = Field(
        description="Relative gap (objective - bound) / objective, from 0 to 1; 0 means that the plan is optimal "
        "under the cost model."
    )
    candidates: tuple[Candidate, ...] = Field(
        default=(),
        description="Outcomes of the candidates, best first. If there are very many, the worst are left out and "
        "counted in the field left.",
    )
    baselines: tuple[Baseline, ...] = Field(
        default=(), description="Standard layouts for comparison, such as plain data parallelism."
    )
    left: dict[str, int] = Field(
        default_factory=dict,
        description='Number of candidates that are left out of the field candidates, by status. The key "open" '
        "counts bounded candidates whose lower bound is below the plan's step time, so that they may be "
        "faster.",
    )
    cut_off: Literal["time limit", "interruption"] | None = Field(
        default=None, description="Reason why the search ended early; None if it was completed."
    )
    limits: Limits | None = Field(
        default=None,
        description="Properties of the model that limited the candidates, such as the number of experts; None if "
        "they were not recorded.",
    )
    covered_bound: float | None = Field(
        default=None,
        description="Set if the plan's schedule is not among those that the search covers: a lower bound in seconds "
        "on the step time of every plan under a covered schedule. The field bound then also accounts "
        "for the plan's own layout. None if the plan's schedule is covered.",
    )
    beyond: dict[str, str] = Field(
        default_factory=dict,
        description="Constraints whose values the search did not all try: name of the constraint -> sentence that "
        "says which values were not tried. Plans with such values may be faster than the lower bound.",
    )

    def is_open(self, candidate: Candidate) -> bool:
        """Return whether ``candidate`` was not solved and may be faster than the plan, because its lower bound on the
        step time is below the plan's step time."""
        return candidate.status == "bounded" and candidate.bound < self.objective * (1 - _ROUNDING)

    @property
    def num_open(self) -> int:
        """Return the number of candidates that were not solved and may be faster than the plan."""
        return sum(map(self.is_open, self.candidates)) + self.left.get(OPEN, 0)


class ContextWay(Data):
    """One algorithm of attention for sequences that are sharded over the mesh axis ``cp``, and the step time of the
    plan if every attention used it."""

    algorithm: str = Field(description="Algorithm of context-parallel attention: all_gather, ring or ulysses.")
    calls: int = Field(default=0, description="Number of attention calls for which the plan uses this algorithm.")
    step_time: float | None = Field(
        default=None,
        description="Step time in seconds if every attention call uses this algorithm; None if that is not possible.",
    )
    reason: str = Field(
        default="", description="Reason why not every attention call can use this algorithm; empty if every call can."
    )


class OperatorShare(Data):
    """The fraction of the model's work that tensor or context parallelism shards over ranks, and the operators that it
    cannot shard."""

    matmul_sharded: float = Field(
        description="Fraction of the matrix-multiply FLOPs that tensor or context parallelism shards, from 0 to 1."
    )
    without_rule: dict[str, float] = Field(
        description="Operators that have no sharding rule: name -> fraction of the compute time."
    )


class Plan(Data):
    """The result of :func:`partitioner.partition`: the programs of all ranks, the estimates, and the certificate of the
    search.
    """

    written: Program | None = Field(
        default=None,
        alias="program",
        description="Programs of all ranks. None if the plan has estimates only; the field planned_only says why.",
    )
    topology: Topology = Field(description="Cluster for which the plan was made.")
    devices: tuple[int, ...] = Field(
        description="Index of the device of each rank, in the order of the ranks. Devices of the topology are "
        "numbered from 0."
    )
    constraints: Constraints = Field(description="Choices that the user fixed.")
    profile: ExecutionProfile = Field(
        OURS,
        description="How the plan is executed: by the runtime of this project, or by another framework whose step "
        "time and memory are predicted.",
    )
    estimate: Estimate = Field(description="Estimated time and memory of a step.")
    certificate: Certificate = Field(
        description="Optimality gap of the plan, lower bound, and outcomes of the other candidates."
    )
    shares: OperatorShare = Field(
        description="Fraction of the model's work that is sharded, and operators that cannot be sharded."
    )
    model: str = Field(description="Class name of the model.")
    precision: str | None = Field(
        default=None,
        description="Precision that the user requested, such as bf16 or fp8. None means the types of the parameters.",
    )
    optimizer: str = Field(
        default="adamw", description="Optimizer whose states the memory estimate contains, such as adamw."
    )
    notes: tuple[str, ...] = Field(default=(), description="Remarks on the model and the plan, one sentence each.")
    context: tuple[ContextWay, ...] = Field(
        default=(),
        description="Step times with each algorithm of context-parallel attention; empty without context "
        "parallelism (cp=1).",
    )
    objective: Literal["train", "infer"] = Field(
        default="train", description="Kind of step: training (train), or forward only (infer)."
    )
    global_batch: int = Field(default=0, description="Number of samples per step, over all ranks.")
    planned_only: tuple[str, ...] = Field(
        default=(),
        description='Reasons why the plan has estimates but no program, such as "dispatch=once" or '
        '"estimate_only=True"; empty if it has a program.',
    )
    in_host: tuple[str, ...] = Field(
        default=(),
        description="Kinds of data in host memory (optimizer, activations, parameters, disk); used only if the plan "
        "has no program.",
    )
    of_replicas: tuple[int, ...] = Field(
        default=(),
        description="Number of microbatches of each data-parallel rank, if these numbers differ; otherwise empty. "
        "Used only if the plan has no program.",
    )
    lacking: str = Field(
        default="",
        description="Shortage of device memory for which the search chose offload although the user did not request "
        "it; empty if it did not.",
    )

    further: dict[str, FurtherProgram] = Field(
        default_factory=dict,
        description='Further programs on the same sharded parameters, by name, such as an evaluation ("eval") or a '
        'step for another batch shape ("step 8x512").',
    )
    padding: BatchPadding | None = Field(
        default=None,
        description="Batch shape of the main program, and how smaller batches are padded to it. None if batches "
        "have exactly the planned shape.",
    )
    weights: str = Field(
        default="",
        description="Folder with the model's weights, if the plan was made from a model configuration; otherwise "
        "empty.",
    )

    @property
    def program(self) -> Program:
        """Return the programs of all ranks. Raise :class:`PlanError` if the plan has only estimates, because this
        version can plan it but not execute it."""
        if self.written is None:
            under = f" under the profile {self.profile.name}" if self.profile.differences else ""
            raise PlanError(
                f"this plan is an estimate{under}: {', '.join(self.planned_only)} is planned but not executed here; "
                "plan without it to run, prove, verify or draw programs"
            )
        return self.written

    @property
    def expected_step_time(self) -> float:
        """Return the mean seconds of a step if batches have several shapes, each with a program of its own: the seconds
        of these programs, weighted by how often each shape occurs.
        """
        steps = [(f.padding, f.seconds) for f in self.further.values() if f.purpose == "step"]
        every = [(self.padding, self.estimate.step_time), *steps]
        weights = [1.0 if padding is None else padding.weight for padding, _ in every]
        return sum(w * s for w, (_, s) in zip(weights, every, strict=True)) / (sum(weights) or 1.0)

    @property
    def chosen(self) -> Candidate:
        """Return the candidate of the search that this plan realises, with its mesh, schedule and status ``chosen``."""
        return next(c for c in self.certificate.candidates if c.status == "chosen")

    @property
    def mesh(self) -> dict[str, int]:
        """Return the number of ranks per axis: ``{"pp": 2, "dp": 2, "cp": 1, "tp": 4, "ep": 1}``. ``ep`` reuses the
        ranks of dp x cp x tp.
        """
        return self.chosen.mesh if self.written is None else self.written.mesh

    @property
    def offload(self) -> tuple[str, ...]:
        """Return the kinds of data in host memory between uses: ``optimizer`` (its states), ``activations`` or
        ``parameters``; empty if there are none. ``disk``: optimizer states are on disk instead.
        """
        if self.written is None:
            return self.in_host or self.constraints.offload or ()
        return self.written.offload

    @property
    def world_size(self) -> int:
        """Return the number of ranks, one per device."""
        return len(self.devices)

    @property
    def num_microbatches(self) -> int:
        """Return the number of microbatches per step of the data-parallel rank that has the most."""
        if self.written is not None:
            return self.written.num_microbatches
        each = -(-self.global_batch // (self.chosen.mesh["dp"] * self.chosen.microbatch_size))
        return max(self.of_replicas, default=each)

    @property
    def tokens_per_step(self) -> int:
        """Return the number of tokens of a step, if all samples are as long as the planned ones; 0 if the model reads
        no sequences, such as images alone.
        """
        return self.global_batch * self.tokens_per_sample

    @property
    def tokens_per_sample(self) -> int:
        """Return the length of a planned sample in tokens; 0 if the model reads no sequences."""
        limits = self.certificate.limits
        return 0 if limits is None else limits.length or limits.tokens

    @property
    def data_shares(self) -> tuple[int, ...]:
        """Return the number of microbatches of each data-parallel rank; an empty tuple if all ranks have the same
        number, :attr:`num_microbatches`."""
        return self.of_replicas if self.written is None else self.written.data_shares

    @property
    def schedule(self) -> str:
        """Return the name of the pipeline schedule, such as ``1f1b``."""
        return self.chosen.schedule if self.written is None else self.written.schedule

    @property
    def num_stages(self) -> int:
        """Return the number of pipeline ranks, the size of the axis ``pp``."""
        return self.mesh.get("pp", 1)

    def rank(self, rank: int) -> RankProgram:
        """Return the program of one rank. ``rank``: number of the rank, from 0. Raise :class:`PlanError` if there is no
        such rank."""
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise PlanError(f"the plan has ranks 0 to {self.world_size - 1}; got {rank!r}")
        return self.program.rank(rank)

    @typed_errors("Plan.summary()")
    def summary(self) -> str:
        """Return a summary of the plan as text with tables, for a terminal."""
        from partitioner.explain.explain import format_summary

        return format_summary(self)

    @typed_errors("Plan.explain()")
    def explain(self) -> str:
        """Return an explanation of the plan as text: the constraints that limit it, the parts of the step time, and the
        alternatives.
        """
        from partitioner.explain.explain import format_explanation

        return format_explanation(self)

    @typed_errors("Plan.why_not()")
    def why_not(
        self, *, model: nn.Module | None = None, inputs: Any = None, loss: Any = None, **constraints: Any
    ) -> WhyNot:
        """Return the answer to why the plan does not have other ``constraints``, as in ``why_not(tp=8)``: what they
        would cost, or why they are impossible.

        ``model``, ``inputs`` and ``loss``: the arguments of ``partition`` with which this plan was made. With them, a
        plan with ``constraints`` is searched for if the certificate (the outcomes of the first search) has no answer.
        """
        from partitioner.advise.why_not import why_not

        return why_not(self, constraints, model, inputs, loss)

    @typed_errors("Plan.diff()")
    def diff(self, other: Plan) -> str:
        """Return a text for a terminal: the differences between this plan and the plan ``other``, and how they change
        time and memory."""
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
        """Return what a training run takes: steps, days, device hours, money and energy. The length of the run is
        exactly one of ``tokens``, ``samples`` and ``steps``. ``price``: US dollars per device and hour; ``None``: the
        price in the hardware file."""
        from partitioner.plans.training_run import training_run

        return training_run(self, tokens=tokens, samples=samples, steps=steps, price=price)

    @typed_errors("Plan.prove()")
    def prove(self) -> Proof:
        """Prove that the programs of all ranks are consistent and cannot deadlock, and return the proof. A plan may
        have further programs on the same weights, such as for evaluation: they are proven, too, and must store
        parameters and optimizer states as the main program does.

        Raise :class:`partitioner.runtime.prove.errors.ProofError` with rank, instruction and graph node, or
        :class:`partitioner.runtime.prove.layouts.LayoutError`, if a program is not consistent.
        """
        from partitioner.runtime.prove.layouts import prove_same_caches, prove_same_layout
        from partitioner.runtime.prove.prove import prove

        prove_same_caches(self.further)
        for name, further in self.further.items():
            prove_same_layout(self.program, name, further.program)
            prove(further.program)
        return prove(self.program)

    @typed_errors("Plan.verify()")
    def verify(self, model: nn.Module, inputs: Any, loss: Any = None, program: str | None = None) -> Verification:
        """Run all ranks on this machine in float64. Return the differences of outputs, loss and gradients from those of
        the unmodified ``model``, which is put into evaluation mode meanwhile if the program is an evaluation.

        ``inputs``: one global batch. ``loss``: the function that computes the loss from the output, if one was given to
        ``partition``. ``program``: name of one of the plan's further programs, such as ``eval`` (evaluation) or ``step
        8x512`` (training on batches of another shape, which ``inputs`` has); ``None``: :attr:`program`, the main one.
        Raise :class:`PlanError` for an unknown name.
        """
        from partitioner.plans.verify import verify
        from partitioner.programs.further import in_evaluation_mode

        further = None if program is None else self.further.get(program)
        evaluates = further is not None and further.purpose == "evaluate" and hasattr(model, "modules")
        with in_evaluation_mode(model) if evaluates else nullcontext():
            return verify(self.select_program(program), model, inputs, loss)

    def select_program(self, name: str | None) -> Plan:
        """Return a copy of this plan whose only program is ``name``; for ``None``, return this plan itself. (Besides
        its main program, a plan may have further programs on the same weights, for evaluation or for other batch
        shapes.) The copy has the step time and the peak memory of that program. It keeps the other figures of this
        plan's estimate, and this plan's certificate (how far the plan can be from the optimum).

        ``name``: a key of :attr:`further`, or the name of the main program, which is its batch shape, such as ``step
        8x4096``. Raise :class:`PlanError` for another name.
        """
        if name is None:
            return self
        shape = None if self.padding is None else name_shape((self.padding.batch, self.padding.length))
        if name == shape:
            return self.model_copy(update={"further": {}})
        if name not in self.further:
            known = ", ".join(map(repr, [*([shape] if shape else []), *self.further]))
            raise PlanError(f"the plan has no program {name!r}; expected {known or 'None: it has a single program'}")
        chosen = self.further[name]
        memory = (chosen.memory,) * chosen.program.world_size
        timed = {"step_time": chosen.seconds, "simulated": chosen.seconds, "memory": memory}
        return self.model_copy(
            update={
                "written": chosen.program,
                "estimate": self.estimate.model_copy(update=timed),
                "objective": chosen.program.objective,
                "padding": chosen.padding,
                "global_batch": self.global_batch if chosen.padding is None else chosen.padding.batch,
                "further": {},
            }
        )

    @overload
    def to_svg(self, path: str | Path, view: str = "graph", program: str | None = None) -> Path: ...

    @overload
    def to_svg(self, path: None = None, view: str = "graph", program: str | None = None) -> str: ...

    @typed_errors("Plan.to_svg()")
    def to_svg(self, path: str | Path | None = None, view: str = "graph", program: str | None = None) -> Path | str:
        """Draw ``view`` (``graph``, ``timeline``, ``topology`` or ``memory``) to the SVG file ``path`` and return the
        path. Without a path, return the text of the picture. Raise ``DrawError`` for another view.

        ``program``: name of one of the plan's further programs, such as ``eval`` (evaluation) or ``step 8x512``
        (training on batches of another shape); ``None``: the main one. Raise :class:`PlanError` for an unknown name.
        """
        from partitioner.draw import draw

        picture = draw(self.select_program(program), view)
        return picture if path is None else write_text(Path(path), picture)

    @typed_errors("Plan.to_html()")
    def to_html(self, path: str | Path) -> Path:
        """Write a report of the plan to the HTML file ``path`` and return the path. The file contains everything that
        it needs: summary, pictures that can be searched and zoomed, candidates, why-not answers, costs of operators,
        explanation. The file is under 5 MB, and replaced atomically."""
        from partitioner.report.page import build_report

        return write_text(Path(path), build_report(self))

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook displays: the main figures and the graph."""
        from partitioner.report.notebook import format_plan_html

        return format_plan_html(self)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield (name, value) of what ``repr`` shows: the main figures, and not the programs."""
        yield "model", self.model
        yield "mesh", {axis: size for axis, size in self.mesh.items() if size > 1}
        yield "ranks", self.world_size
        yield "step_time", seconds_text(self.estimate.step_time)
        if self.estimate.memory:
            yield "memory", bytes_text(max(self.estimate.memory))
        yield "gap", format_percent(self.certificate.gap)

    @typed_errors("Plan.save()")
    def save(self, path: str | Path) -> Path:
        """Write the plan to the JSON file ``path`` and return the path. The file is replaced atomically: it is never
        incomplete."""
        from partitioner.plans.files import save_plan

        return save_plan(self, Path(path))

    @staticmethod
    @typed_errors("Plan.load()")
    def load(path: str | Path) -> Plan:
        """Return the plan in the JSON file ``path``, which :meth:`save` wrote. Raise :class:`PlanFileError` for any
        other file.
        """
        from partitioner.plans.files import load_plan

        return load_plan(Path(path))

    @typed_errors("Plan.export_ranks()")
    def export_ranks(self, folder: str | Path, program: str | None = None) -> list[Path]:
        """Write one JSON file per rank to ``folder``, with all that the rank needs to run, and return their paths in
        the order of the ranks. ``program``: name of one of the plan's further programs, such as ``eval`` (evaluation)
        or ``step 8x512`` (training on batches of another shape); ``None``: the main one. Raise :class:`PlanError` for
        an unknown name."""
        from partitioner.plans.files import export_ranks

        return export_ranks(self.select_program(program), Path(folder))

    @typed_errors("Plan.export()")
    def export(self, format: str, path: str | Path) -> tuple[UnusedOption | str, ...]:
        """Write the plan to the file ``path`` for another program, atomically. Return what is not in the file.

        ``format``: ``megatron``, ``torchtitan``, ``deepspeed``, ``accelerate`` or ``transformers``: the plan's layout
        as a configuration of that framework; the result has the options of the plan that the format cannot express.
        ``perfetto``: the simulated step as a trace for ui.perfetto.dev. ``model-explorer``: stages, blocks and
        operators as graphs for Google's Model Explorer. Both are under 5 MB; the result has a sentence for each thing
        that was left out. Raise :class:`LayoutError` for another format, or for a configuration of a plan of inference.
        """
        from partitioner.report.viewers import VIEWERS, export_for_viewer

        if format in VIEWERS:
            return export_for_viewer(self, format, path)
        from partitioner.interop.formats import find_format
        from partitioner.interop.plan_layout import export_plan

        find_format(format, others=VIEWERS)
        return export_plan(self, format, path)


def operator_share(
    batch: ShardingSolution, tensor: ShardingSolution, context: ShardingSolution | None = None
) -> OperatorShare:
    """Return the fraction of the work of matrix products that is sharded by tensor parallelism or by context
    parallelism, whichever shards more, and the operators for which no sharding rule exists. ``batch``: the chosen
    sharding of the batch, which lists these operators. ``tensor``, ``context``: the chosen shardings over the mesh axes
    ``tp`` and ``cp``; ``context`` is ``None`` without context parallelism.
    """
    divided = max(tensor.matmul_sharded, 0.0 if context is None else context.matmul_sharded)
    return OperatorShare(matmul_sharded=divided, without_rule=batch.without_rule)
