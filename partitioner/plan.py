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
OPEN = "open"  # candidates without a row in a certificate whose lower bound is below the plan's step time
_ROUNDING = 1e-9  # fraction of a step: less is a rounding error


class StageEstimate(Data):
    """The estimate of the cost model for one pipeline stage: seconds per step, without time spent waiting, and bytes of
    memory per rank."""

    first: str = Field(description="Module path of the first call of the stage; empty: it has none.")
    last: str = Field(description="Module path of its last call.")
    num_calls: int = Field(description="Number of its calls.")
    recomputed: int = Field(description="How many of the calls run again for their backward.")
    forward_s: float = Field(description="Seconds of its forward.")
    backward_s: float = Field(description="Seconds of its backward, with what is recomputed.")
    memory: dict[str, int] = Field(
        description="What the peak of a rank consists of, in bytes by kind: parameters, gradients, "
        "optimizer, saved, recomputed, working, flowing, gathered; buffers where the plan has "
        "no program.",
    )
    selective: bool = Field(
        default=False, description="Whether calls that do not run again recompute what is quick, all or some of them."
    )
    in_part: int = Field(
        default=0, description="How many calls that do not run again recompute what is quick; 0 where it is unknown."
    )
    host: int = Field(default=0, description="Bytes of a rank in host memory.")
    disk: int = Field(default=0, description="Bytes of a rank on disk.")

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
        description="Seconds from the start of a step to the end of the update by the optimizer; where "
        "consecutive steps overlap, from one such end to the next.",
    )
    mfu: float = Field(
        description="Model FLOPs utilisation: FLOPs of the model per second over the peak of the devices, 0 to 1.",
    )
    bubble: float = Field(
        description="Share of the step in which the slowest rank waits for other pipeline stages, 0 to 1; other ranks "
        "wait longer.",
    )
    memory: tuple[int, ...] = Field(description="Peak bytes, one per rank.")
    breakdown: dict[str, float] = Field(description="Seconds of the step by kind; they add up to the step time.")
    stages: tuple[StageEstimate, ...] = Field(default=(), description="What is expected of each pipeline stage.")
    simulated: float | None = Field(
        default=None,
        description="Seconds at which the simulation of the program ends: step_time to 1 %, or fewer. "
        "None: there is no program.",
    )
    kinds: dict[str, float] = Field(
        default_factory=dict,
        description="Kind of operator to its seconds of a microbatch, on the stage that computes longest; empty where "
        "the devices are used well.",
    )
    exchanges: dict[str, float] = Field(
        default_factory=dict,
        description="Purpose to the seconds of a step of communication inside layers, on the busiest stage, with what "
        "computation hides of it; empty where it takes little of the step.",
    )


class Candidate(Data):
    """One candidate of the search for a plan (mesh, microbatch size, schedule, ZeRO stage) and its outcome: chosen,
    solved (its step time was computed), bounded (not solved, because a lower bound on its step time is too high) or
    infeasible."""

    mesh: dict[str, int] = Field(description="Ranks per axis.")
    microbatch_size: int = Field(description="Samples of a microbatch.")
    schedule: str = Field(description="Name of the pipeline schedule.")
    status: Literal["chosen", "solved", "bounded", "infeasible"] = Field(
        description="What became of it: the plan; solved and no better; not solved, because of its bound; "
        "without a plan.",
    )
    bound: float = Field(default=0.0, description="Seconds below which no plan of the candidate can be.")
    step_time: float | None = Field(default=None, description="Seconds of a step, if it was solved.")
    memory: int | None = Field(
        default=None,
        description="Bytes on the fullest rank: of the chosen one by its program, else by the tables of the search.",
    )
    reason: str = Field(default="", description="Why it has no plan.")
    zero: int = Field(default=0, description="Stage of state sharding, 0 to 3.")
    dp_shard: int = Field(default=0, description="Ranks of dp that share states; 0: all.")
    virtual_stages: int = Field(default=1, description="Stages on each pipeline rank.")
    etp: int = Field(default=1, description="Ranks that share one expert.")
    breakdown: dict[str, float] | None = Field(
        default=None, description="Seconds of the step by kind, if it was solved."
    )
    missing: int | None = Field(default=None, description="Bytes that a rank lacks.")
    beside: bool = Field(
        default=False,
        description="Whether it was tried after the search, so that the bound of all others leaves it out.",
    )


class Baseline(Data):
    """A standard layout, such as plain data parallelism, that every report shows for comparison."""

    name: str = Field(description="What it is called.")
    candidate: Candidate | None = Field(default=None, description="The candidate that it is; None: there is none here.")
    excluded: str = Field(default="", description="Why the search could not choose it; empty: it could.")
    offload: tuple[str, ...] = Field(default=(), description="What it keeps in host memory.")
    global_batch: int = Field(
        default=0, description="Its batch, where that differs from the batch of the plan; else 0."
    )


class Limits(Data):
    """Properties of the model that limit which candidates the search considers, such as the number of block calls that
    can be divided among pipeline stages."""

    calls: int = Field(description="Calls that stages can hold.")
    dims: tuple[int, ...] = Field(description="Sizes of the dims of weights.")
    experts: int = Field(default=0, description="Ranks that share experts are a divisor of it.")
    length: int = Field(default=0, description="Tokens of a sample; 0 without attention.")
    repeated: int = Field(default=0, description="Calls of blocks that repeat; 0: all.")
    even: bool = Field(default=False, description="Whether all ranks of dp must have equally many microbatches.")
    further_samples: tuple[int, ...] = Field(
        default=(), description="Samples in a batch of each further program; dp divides all of them."
    )
    further_positions: tuple[int, ...] = Field(
        default=(), description="Positions of a sample in further programs; cp is searched where it divides them."
    )
    tokens: int = Field(
        default=0,
        description="Tokens of a sample, as length, also if attention was not recognized; 0 without token ids.",
    )


class Certificate(Data):
    """How close the plan is to the optimum under the cost model: its step time, and a lower bound on the step time of
    every plan that the search covers.
    """

    objective: float = Field(description="Seconds of a step of the plan.")
    bound: float = Field(description="Seconds below which no plan can be.")
    gap: float = Field(description="The difference of the two over the objective, 0 to 1.")
    candidates: tuple[Candidate, ...] = Field(
        default=(), description="The candidates of the search; of many, the worst are only counted in left."
    )
    baselines: tuple[Baseline, ...] = Field(default=(), description="The layouts that every report has.")
    left: dict[str, int] = Field(
        default_factory=dict,
        description='Status to the number of candidates without a row; "open" counts those of them whose '
        "bound is below the objective.",
    )
    cut_off: Literal["time limit", "interruption"] | None = Field(
        default=None, description="What ended the search before it was done. None: nothing did."
    )
    limits: Limits | None = Field(default=None, description="What limited the candidates.")
    covered_bound: float | None = Field(
        default=None,
        description="Seconds below which no plan under a schedule that the bound covers can be, where the plan's own "
        "schedule is not covered: then the bound also holds for the plan's own layout. None: its schedule is covered.",
    )
    beyond: dict[str, str] = Field(
        default_factory=dict,
        description="Constraint to what of it the bound does not cover: plans with that fixed may be "
        "faster, whatever the gap.",
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

    algorithm: str = Field(description="Its name: all_gather, ring or ulysses.")
    calls: int = Field(default=0, description="Calls of attention that run by it in the plan.")
    step_time: float | None = Field(
        default=None, description="Seconds of a step if every attention runs by it. None: it cannot."
    )
    reason: str = Field(default="", description="Why it cannot.")


class OperatorShare(Data):
    """The fraction of the model's work that tensor or context parallelism shards over ranks, and the operators that it
    cannot shard."""

    matmul_sharded: float = Field(description="Share of the work of matrix products that is sharded, 0 to 1.")
    without_rule: dict[str, float] = Field(description="Operators that have no rule: name to share of the work.")


class Plan(Data):
    """The result of :func:`partitioner.partition`: the programs of all ranks, the estimates, and the certificate of the
    search.
    """

    written: Program | None = Field(
        default=None,
        alias="program",
        description="The programs of all ranks. None: the plan is not executed, see planned_only.",
    )
    topology: Topology = Field(description="The cluster.")
    devices: tuple[int, ...] = Field(description="The device of the topology on which each rank runs.")
    constraints: Constraints = Field(description="What the user fixed.")
    profile: ExecutionProfile = Field(
        OURS,
        description="How the plan is executed: by our runtime, or by the framework for which it is predicted.",
    )
    estimate: Estimate = Field(description="Time and memory of a step.")
    certificate: Certificate = Field(description="How good the plan is, and what else there was.")
    shares: OperatorShare = Field(description="How much of the work is sharded.")
    model: str = Field(description="Class name of the model.")
    precision: str | None = Field(default=None, description="The type that was asked for. None: as the parameters are.")
    optimizer: str = Field(default="adamw", description="The optimizer whose states are counted.")
    notes: tuple[str, ...] = Field(
        default=(), description="What to know about the model and the plan, a sentence each."
    )
    context: tuple[ContextWay, ...] = Field(
        default=(), description="The algorithms of attention that were compared, where cp is more than 1."
    )
    objective: Literal["train", "infer"] = Field(default="train", description="What a step is: training, or inference.")
    global_batch: int = Field(default=0, description="Samples of a step.")
    planned_only: tuple[str, ...] = Field(
        default=(), description='What of the plan is not executed, as "dispatch=once"; such a plan has no program.'
    )
    in_host: tuple[str, ...] = Field(
        default=(), description="Of a plan without a program: kinds of what is kept in host memory."
    )
    of_replicas: tuple[int, ...] = Field(
        default=(), description="Of a plan without a program: microbatches of each rank of dp, where they differ."
    )
    lacking: str = Field(
        default="",
        description="What did not fit on the devices alone, where offload was chosen without being asked for.",
    )

    further: dict[str, FurtherProgram] = Field(
        default_factory=dict, description="Name to a further program over the layout of the state of program."
    )
    padding: BatchPadding | None = Field(
        default=None, description="The shape of the batches of program. None: batches are as they were planned."
    )
    weights: str = Field(
        default="", description="The folder with the model's weights, if it was planned from its configuration."
    )

    @property
    def program(self) -> Program:
        """Return the programs of all ranks. Raises :class:`PlanError` if the plan has only estimates, because it needs
        something that this version can plan but not execute.
        """
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
        """Return what a training run takes: steps, days, device hours, money and energy. Its length is given as one of
        a number of ``tokens``, of ``samples`` or of ``steps``. ``price``: US dollars per device and hour; ``None``:
        that of the hardware file."""
        from partitioner.plans.training_run import training_run

        return training_run(self, tokens=tokens, samples=samples, steps=steps, price=price)

    @typed_errors("Plan.prove()")
    def prove(self) -> Proof:
        """Prove that the programs of all ranks are consistent and cannot deadlock, and return the proof. A plan may
        have further programs on the same weights, such as for evaluation: they are proven, too, and must store
        parameters and optimizer states as the main program does.

        Raise :class:`partitioner.runtime.prove.errors.ProofError` with rank, instruction and graph node, or
        :class:`partitioner.runtime.prove.layouts.LayoutError`, if this is not so.
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
        """Return a plan whose only program is the program ``name`` of this plan; this plan itself for ``None``. Besides
        its main program, a plan may have further programs on the same weights, for evaluation or for other batch
        shapes. The result has the step time and the peak memory of that program. It keeps the other figures of this
        plan's estimate, and this plan's certificate (how far the plan can be from the optimum).

        ``name``: a key of :attr:`further`, or the name that the main program has by the shape of its batches, such as
        ``step 8x4096``. Raise :class:`PlanError` for another name.
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
        explanation. It is under 5 MB, and replaced atomically.
        """
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
