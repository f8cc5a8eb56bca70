"""Constraints that the user sets, and their checks against a cluster, a batch and a model.

The search chooses everything that is not constrained.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from partitioner.errors import ConstraintError
from partitioner.option_text import explain_validation_error, read_options
from partitioner.passes.documented_model import DocumentedModel
from partitioner.runtime.program.buckets import Compression
from partitioner.runtime.program.mesh import AXES
from partitioner.runtime.program.program import OFFLOADS, Offload
from partitioner.schedules.csv_table import SUFFIX, ScheduleTable
from partitioner.schedules.registry import SCHEDULES
from partitioner.units import list_divisors

Recompute = Literal["none", "scores", "selective", "alternate", "full"]

# Constraints that decide a mesh candidate: mesh sizes, microbatch size, schedule and ZeRO.
OF_POINT = ("pp", "dp", "cp", "tp", "ep", "etp", "microbatch_size", "schedule", "virtual_stages", "zero", "dp_shard")
_NUMBERS = tuple(name for name in OF_POINT if name != "schedule")
_DECISIVE = 3  # fixed axes that decide the mesh: the fourth size follows from the number of devices
OF_ONE_STAGE = ("1f1b", "gpipe")  # schedules that a single stage may have

_WHY_NOT = {
    2: "the rounding error of a whole gradient would have to be kept, but under ZeRO-2 whole gradients are not kept",
    3: "gradients are sent as soon as a call has computed them, and are not kept",
}


class Constraints(BaseModel, metaclass=DocumentedModel):
    """Requirements on a plan. A field that is given is fixed; ``None`` leaves the choice to the search.

    The runtime of this project can execute every value. An :class:`partitioner.ExecutionProfile` describes how another
    framework executes a layout.

    Raises :class:`ConstraintError` for a malformed value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Mesh

    pp: PositiveInt | None = Field(
        default=None, description="Number of pipeline stages (ranks of a pipeline). None: the search chooses."
    )

    dp: PositiveInt | None = Field(
        default=None, description="Number of data-parallel ranks, each with its own samples. None: the search chooses."
    )

    cp: PositiveInt | None = Field(
        default=None,
        description="Number of context-parallel ranks, over which each sequence is sharded. None: the search chooses.",
    )

    tp: PositiveInt | None = Field(
        default=None,
        description="Tensor-parallel ranks: the number of ranks over which the operators of each layer are sharded. "
        "None: the search chooses.",
    )

    ep: PositiveInt | None = Field(
        default=None,
        description="Number of expert-parallel ranks, over which the experts of a layer are distributed. These "
        "ranks are taken from dp x cp x tp. None: the search chooses.",
    )

    etp: PositiveInt | None = Field(
        default=None,
        description="Number of ranks over which each expert is sharded: 1, or the value of tp. Other values can "
        "only be estimated, under the execution profile of a framework that supports them. None: the "
        "search chooses.",
    )

    placement: Literal["in_order"] | None = Field(
        default=None,
        description='Assignment of ranks to devices. "in_order": rank i runs on device i. None: the search chooses '
        "the fastest placement.",
    )

    # Pipeline

    microbatch_size: PositiveInt | None = Field(
        default=None,
        description="Number of samples of one microbatch on one data-parallel rank. None: the search chooses.",
    )

    data_shares: tuple[PositiveInt, ...] | None = Field(
        default=None,
        description="Number of microbatches of each data-parallel rank, such as (3, 2) for two ranks. None: equal "
        "numbers, or numbers in proportion to the speed of the ranks.",
    )

    schedule: str | ScheduleTable | None = Field(
        default=None,
        description='Pipeline schedule: "1f1b", "gpipe", "interleaved", "zb-1p", "zb-2p", "zb-v", "dualpipe-v", the '
        'path of a CSV file with a schedule, or a ScheduleTable. All except "1f1b" and "gpipe" need pp '
        "of at least 2. None: the search chooses.",
    )

    virtual_stages: PositiveInt | None = Field(
        default=None, description="Number of virtual pipeline stages on each pipeline rank. None: the search chooses."
    )

    stage_of: dict[str, int] = Field(
        default_factory=dict,
        description="Pipeline stage of modules: prefix of the module path -> index of the stage from 0 (of the "
        'virtual stage if a rank has several); -1 is the last stage. Example: {"embed": 0, "head": -1}. '
        "{}: the search chooses.",
    )

    overlap_steps: bool = Field(
        default=False,
        description="Whether a rank begins the next step as soon as its own part of the current step is done. The "
        "training script must then not synchronise all ranks between steps; gradient clipping by norm "
        "and loss scaling in float16 do.",
    )

    # Memory

    zero: int | None = Field(
        default=None,
        ge=0,
        le=3,
        description="ZeRO stage, the kinds of states that are sharded over dp and cp: 0 none, 1 optimizer states, 2 "
        "also gradients, 3 also parameters (as FSDP does). None: the search chooses.",
    )

    dp_shard: PositiveInt | None = Field(
        default=None,
        description="Number of neighbouring data-parallel ranks over which states are sharded (hybrid sharding, "
        "HSDP); the dp / dp_shard groups of such ranks are replicas of each other. None: the search "
        "chooses between all data-parallel ranks and groups of about one node or a few nodes.",
    )

    recompute: Recompute | None = Field(
        default=None,
        description='Activations that the backward pass recomputes: "none"; "scores", attention scores only; '
        '"selective", the results of all operators except matrix products, fused attention and '
        'communication; "alternate", in addition those of every second matrix product; "full", whole '
        "layers. None: the search chooses.",
    )

    offload: tuple[Offload, ...] | None = Field(
        default=None,
        description='Kinds of data that are in host memory between uses: "optimizer" (optimizer states, updated by '
        'the host), "activations" and "parameters" (which includes the optimizer), as a tuple or joined '
        'by +. "disk": optimizer states are on the disks of the nodes. (): no offload. None: no '
        "offload, unless no plan fits without it. If the mesh is fixed and does not fit, None raises a "
        "CapacityError, which says whether offload would help.",
    )

    memory_margin: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Fraction of the usable memory of each device that plans leave free for memory that the "
        "estimate does not contain, such as fragmentation and libraries. 0: plans may use all of it.",
    )

    # Communication

    context: Literal["all_gather", "ring", "ulysses"] | None = Field(
        default=None,
        description='Algorithm of attention over cp: "all_gather" gathers keys and values, "ring" passes them '
        'around a ring of ranks, "ulysses" exchanges the sharding of the sequence for a sharding of the '
        "heads. None: the fastest algorithm for each attention.",
    )

    sequence_parallel: bool | None = Field(
        default=None,
        description="Whether activations between layers are sharded over tp. False: they are replicated. True or "
        "None: they are sharded where this is faster.",
    )

    overlap_tensor: bool | None = Field(
        default=False,
        description="Whether collectives over tp (all-gathers before matrix products and reduce-scatters after "
        "them) are cut into pieces, so that one piece is communicated while another one is multiplied. "
        "False: none of them. True: all of them. None: on GPUs, those that are estimated to be faster "
        "in pieces. False is the default because the gain has not been measured.",
    )

    hierarchical: bool | None = Field(
        default=None,
        description="Whether gradients that are reduced over several nodes are first reduce-scattered within each "
        "node, then all-reduced between nodes, and then gathered within each node. None: the search "
        "chooses on networks where the communication library all-reduces over one ring, such as Gloo; "
        "on other networks it is not tried.",
    )

    grad_compression: Compression | None = Field(
        default=None,
        description='Type in which gradients are sent between the outermost groups of ranks, such as nodes: "bf16" '
        'or "int8". Compression changes the results of training. None: gradients are not compressed.',
    )

    # Execution

    execution: Literal["eager", "compiled", "graph"] | None = Field(
        default=None,
        description='Execution mode of the ranks, unless the engine is given another one. "eager": operator by '
        'operator. "compiled": compiled functions between collectives. "graph": a recorded step is '
        'replayed, on GPUs as CUDA graphs of compiled functions. None: "compiled" on GPUs, "eager" on CPUs, '
        'where compilation takes longer than it saves in a short run. Time estimates for "compiled", and '
        'for "graph" on GPUs, assume that a compiler fuses operators. Those for "graph" on GPUs also '
        "leave out the launch time of the host, except for operators of experts. Memory estimates are "
        'those of "eager" in all modes.',
    )

    fp8_scaling: Literal["tensor", "row", "block"] = Field(
        default="tensor",
        description='Granularity of the scales with precision="fp8". "tensor": one scale for each tensor. "row": '
        'one scale for all numbers that a matrix product sums up to one result. "block": one '
        "power-of-two scale for 32 of these numbers (MXFP8), on devices whose peak lists mxfp8, and on "
        "CPUs.",
    )

    # Search

    couple: Literal["batch", "microbatch"] = Field(
        default="batch",
        description="For models in which samples interact, as in load-balancing losses of experts or batch norm: "
        'whether samples interact within the whole global batch ("batch") or within each microbatch '
        '("microbatch"). With "microbatch", microbatch_size must be given, and loss and gradients are '
        "the mean over microbatches.",
    )

    ahead: bool = Field(
        default=False,
        description="Whether the search is larger: it then tries every schedule, tensor parallelism over two nodes, "
        "and every etp that the execution profile allows.",
    )

    @field_validator(*_NUMBERS, mode="before")
    @classmethod
    def _no_truth_value(cls, given: Any) -> Any:
        """Return ``given`` if it is not a boolean, which Python would accept as 0 or 1; otherwise raise a pydantic
        error."""
        if isinstance(given, bool):  # Python would accept it as 0 or 1
            raise PydanticCustomError("number", "input should be a whole number")
        return given

    @field_validator("offload", mode="before")
    @classmethod
    def _in_order(cls, given: Any) -> Any:
        """Return the kinds of data to offload as a tuple in a fixed order. ``given``: a text such as
        ``"optimizer+activations"``, ``"none"``, or a collection of kinds. ``optimizer`` is added if ``parameters`` or
        ``disk`` is among the kinds. Raise a pydantic error for an unknown kind."""
        if isinstance(given, str):
            given = () if given == "none" else given.split("+")
        if given is None or not isinstance(given, Collection) or not all(isinstance(kind, str) for kind in given):
            return given
        unknown = [kind for kind in given if kind not in OFFLOADS]
        if unknown:
            names = ", ".join(repr(name) for name in OFFLOADS)
            what = f"input should be of {names}, joined by +, or 'none'"
            raise PydanticCustomError("offload", "{what}", {"what": what, "values": OFFLOADS})
        wanted = {*given, "optimizer"} if {"parameters", "disk"} & {*given} else {*given}
        return tuple(kind for kind in OFFLOADS if kind in wanted)

    @field_validator("schedule")
    @classmethod
    def _is_schedule(cls, given: str | ScheduleTable | None) -> str | ScheduleTable | None:
        """Return ``given`` if it is a table, the name of a built-in schedule, a name ending in ``.csv``, or ``None``
        (no fixed schedule); otherwise raise a pydantic error.
        """
        if isinstance(given, str) and given not in SCHEDULES and not given.endswith(SUFFIX):
            names = ", ".join(repr(name) for name in SCHEDULES)
            what = f"input should be {names}, or a file that ends in {SUFFIX}"
            raise PydanticCustomError("schedule", "{what}", {"what": what, "values": tuple(SCHEDULES)})
        return given

    def __init__(self, **data: Any) -> None:
        """Build the constraints from ``data``, values of fields by name. Raise :class:`ConstraintError` for an unknown
        field or a wrong value.
        """
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConstraintError(explain_validation_error(error, [*Constraints.model_fields])) from error

    @classmethod
    def parse(cls, text: str) -> Constraints:
        """Return the constraints in a text like ``"tp=2,pp=2,schedule=gpipe"``; an empty text fixes nothing.

        Several values are joined by ``+`` (``"data_shares=3+2"``). In ``stage_of`` a module path is followed by its
        pipeline stage (``"stage_of=embed:0+head:-1"``). Raise :class:`ConstraintError` for a malformed text, an unknown
        name or a wrong value.
        """
        return cls(**read_options(text))

    @property
    def leaves_schedule(self) -> bool:
        """Return whether the user fixed neither the schedule nor the number of virtual stages, and did not request a
        larger search (the constraint ``ahead``). The search then tries 1F1B and ZB-1P on every mesh, and all other
        schedules only where an estimate promises a faster step.
        """
        return self.schedule is None and self.virtual_stages is None and not self.ahead

    @property
    def group_size(self) -> int | None:
        """Return the number of samples that interact in the loss or in batch norm, if that is one microbatch
        (``couple="microbatch"``); ``None`` if it is the whole batch.
        """
        return self.microbatch_size if self.couple == "microbatch" else None

    @property
    def given(self) -> dict[str, Any]:
        """Return the constraints that the user fixed: name of the field -> value. Fields that were set to ``None`` are
        left out.
        """
        return {name: value for name, value in self.model_dump(exclude_unset=True).items() if value is not None}

    @property
    def meaning(self) -> Constraints:
        """Return constraints with only those fields that change the results of a step and not just its speed; all other
        fields have their defaults. If samples interact (as in batch norm) only within a microbatch, these fields are
        ``couple`` and ``microbatch_size``; otherwise there are none."""
        if self.couple == "batch":
            return Constraints()
        return Constraints(couple=self.couple, microbatch_size=self.microbatch_size)

    @property
    def pinned(self) -> dict[str, int]:
        """Return the mesh sizes that the user fixed: name of the axis -> size. The axis ``ep`` is left out: its ranks
        are taken from the other axes, so ``ep`` is not a factor of the number of ranks."""
        return {axis: value for axis in AXES if axis != "ep" and (value := getattr(self, axis)) is not None}

    def fixes_mesh(self, world_size: int) -> bool:
        """Return whether the fixed mesh axes decide the mesh on ``world_size`` devices, except how the remaining ranks
        are divided between ``dp`` and ``cp``.

        If so, the search offloads data to host memory only if the user requests it. ``False`` for one device, where
        every axis has one rank.
        """
        pinned = self.pinned
        if math.prod(pinned.values()) == world_size or {"pp", "tp"} <= pinned.keys() or len(pinned) >= _DECISIVE:
            return world_size > 1
        return False

    def check_world(self, world_size: int) -> None:
        """Raise :class:`ConstraintError` unless the fixed mesh axes fit ``world_size`` ranks. If ``pp``, ``dp`` and
        ``tp`` are fixed, a free ``cp`` may take the remaining ranks."""
        pinned = self.pinned
        product = math.prod(pinned.values())
        shown = " x ".join(f"{axis}={value}" for axis, value in pinned.items())
        if all(axis in pinned for axis in ("pp", "dp", "tp")):
            if product != world_size and (self.cp is not None or world_size % product):
                raise ConstraintError(self.too_few(world_size))
        elif world_size % product:
            raise ConstraintError(
                f"{shown} needs a number of devices that is a multiple of {product}, but there are {world_size}; "
                f"expected {'a size that' if len(pinned) == 1 else 'sizes whose product'} divides {world_size}"
            )

    def too_few(self, world_size: int) -> str:
        """Return the error message for the case that the sizes of the fixed mesh axes multiply to another number than
        ``world_size``, the number of devices."""
        shown = " x ".join(f"{axis}={value}" for axis, value in self.pinned.items())
        made = math.prod(self.pinned.values())
        return (
            f"{shown} makes {made} ranks; expected {world_size}, one per device: change the size of an axis, or "
            "leave one out"
        )

    def check_batch(self, global_batch: int) -> None:
        """Raise :class:`ConstraintError` unless a batch of ``global_batch`` samples can be divided as the constraints
        require: into whole microbatches, at least one for each rank of ``dp``."""
        self._check_shares(global_batch)
        dp, size = self.dp or 1, self.microbatch_size or 1
        if global_batch % (dp * size) == 0:
            return
        given = [f"{n}={v}" for n, v in (("dp", self.dp), ("microbatch_size", self.microbatch_size)) if v]
        what = " x ".join(given) + (f" = {dp * size}" if len(given) > 1 else "")
        if global_batch % size:
            raise ConstraintError(
                f"the global batch of {global_batch} is not divisible by {what}; expected a divisor of {global_batch}"
            )
        if global_batch // size < dp:
            raise ConstraintError(
                f"the global batch of {global_batch} samples is not divisible by {what}: there would be fewer "
                f"microbatches than ranks; expected at most {global_batch}"
            )

    def _check_shares(self, global_batch: int) -> None:
        """Raise ``ConstraintError`` if ``data_shares`` (microbatches of each ``dp`` rank) does not match the given
        ``dp`` or ``microbatch_size``, or a batch of ``global_batch`` samples."""
        shares = self.data_shares
        if shares is None:
            return
        size = global_batch // sum(shares) if shares and global_batch % sum(shares) == 0 else None
        if size is None or self.dp not in (None, len(shares)) or self.microbatch_size not in (None, size):
            raise ConstraintError(
                f"data_shares={shares} is {sum(shares)} microbatches on {len(shares)} ranks of dp; expected one "
                "number for each rank of dp, whose sum is the number of microbatches in the global batch of "
                f"{global_batch}"
            )

    def check_tensor_axis(self, dims: Iterable[int]) -> None:
        """Raise :class:`ConstraintError` if ``tp`` is fixed and no weight can be divided into ``tp`` equal parts.
        ``dims``: the sizes of all dims of all weights."""
        sizes = sorted(set(dims))
        if self.tp is not None and self.tp > 1 and not any(size % self.tp == 0 for size in sizes):
            shown = ", ".join(map(str, sizes[:8])) + (", ..." if len(sizes) > 8 else "")
            raise ConstraintError(
                f"tp={self.tp} divides no dimension of any weight (sizes {shown or 'none'}); expected a divisor of "
                "one of these"
            )

    def check_experts(self, experts: int) -> None:
        """Raise :class:`ConstraintError` unless ``ep`` ranks can share the experts of the model evenly. ``experts``:
        number of experts; 0: the model has none, so that ``ep`` and ``etp`` must not exceed 1."""
        asked = next((name for name in ("ep", "etp") if (getattr(self, name) or 1) > 1), None)
        if asked is not None and not experts:
            raise ConstraintError(
                f"{asked}={getattr(self, asked)}, but no experts were recognised in the model; expected {asked}=1, "
                "or experts written in a form that docs/experts.md lists (other loops over experts can be sharded "
                "over tp only)"
            )
        if experts % (self.ep or 1):
            raise ConstraintError(
                f"ep={self.ep} does not divide the model's {experts} experts; expected a divisor of {experts}"
            )

    def check_coupling(self) -> None:
        """Raise :class:`ConstraintError` if samples are to interact (as in batch norm) only within a microbatch
        (``couple="microbatch"``), but no microbatch size is given."""
        if self.couple == "microbatch" and self.microbatch_size is None:
            raise ConstraintError(
                "couple='microbatch' without microbatch_size: the results of a step depend on microbatch_size, so "
                "the search cannot choose it; expected microbatch_size=N, a divisor of the global batch"
            )

    def check_groups(self, global_batch: int) -> None:
        """Raise :class:`ConstraintError` unless the samples can be divided into whole groups within which they interact
        (microbatches, if ``couple="microbatch"``). ``global_batch``: samples of the whole batch."""
        size = self.group_size
        if size is not None and global_batch % size:
            nearest = min(list_divisors(global_batch), key=lambda d: abs(math.log2(d / size)))
            raise ConstraintError(
                f"the global batch of {global_batch} is not divisible by microbatch_size={size}, the number of "
                f"samples that interact (couple='microbatch'); expected a divisor of {global_batch}, such as {nearest}"
            )

    def check_offload(self) -> None:
        """Raise :class:`ConstraintError` if parameters are to be offloaded to host memory under a ZeRO stage that keeps
        them whole on the device (1 or 2).
        """
        if self.offload and "parameters" in self.offload and self.zero in (1, 2):
            raise ConstraintError(
                f"offload of parameters with zero={self.zero}, under which parameters stay on the device; expected "
                "zero=0 or 3"
            )

    def check_reduction(self, num_nodes: int, train: bool) -> None:
        """Raise :class:`ConstraintError` if ``hierarchical`` or ``grad_compression``, which say how gradients are
        reduced, has no effect on this cluster or is impossible with the ZeRO stage. ``num_nodes``: nodes of the
        cluster. ``train``: whether the plan is for training."""
        given = {"hierarchical": self.hierarchical or None, "grad_compression": self.grad_compression}
        asked = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        if asked and not train:
            raise ConstraintError(
                f"{asked} is given, but the plan is for inference, which has no gradients; leave it out"
            )
        if self.hierarchical and num_nodes == 1:
            raise ConstraintError(
                "hierarchical=True on one node: there is nothing to reduce between nodes; leave it out"
            )
        if self.hierarchical and self.zero:
            raise ConstraintError(
                f"hierarchical=True with zero={self.zero}, under which gradients are already reduce-scattered; "
                "expected zero=0, or instead dp_shard=N, the number of dp ranks in a node, to reduce shards between "
                "nodes"
            )
        if self.zero is not None and self.dp_shard is None and not self.sends_compressed(self.zero, 0):
            raise ConstraintError(
                f"grad_compression={self.grad_compression} with zero={self.zero}: {_WHY_NOT[self.zero]}; expected "
                "zero=0 or 1, or dp_shard=N, so that only the communication between groups of N ranks is compressed"
            )

    def sends_compressed(self, zero: int, dp_shard: int) -> bool:
        """Return whether a ZeRO stage allows the compression of gradients that ``grad_compression`` requests; true if
        none is requested. ``zero``: the ZeRO stage, 0 to 3. ``dp_shard``: number of ranks of ``dp`` over which ZeRO
        shards; 0: all.
        """
        if self.grad_compression is None or zero < 2 or dp_shard:
            return True
        return zero == 2 and self.grad_compression == "bf16"

    def check_idle(self) -> None:
        """Raise :class:`ConstraintError` for a constraint without effect because a mesh axis is fixed to one rank, such
        as a pipeline schedule with ``pp=1``, and for a number of virtual stages that contradicts the schedule."""
        name = self.schedule
        if self.pp == 1 and isinstance(name, str) and name in SCHEDULES and name not in OF_ONE_STAGE:
            raise ConstraintError(
                f"schedule={name} with pp=1, but a single stage has no pipeline schedule; expected pp of 2 or "
                "more, or leave schedule out"
            )
        chunks = SCHEDULES[name].chunks if isinstance(name, str) and name in SCHEDULES else None
        if chunks is not None and self.virtual_stages not in (None, chunks):
            raise ConstraintError(
                f"schedule={name} with virtual_stages={self.virtual_stages}: this schedule has {chunks} per rank; "
                f"expected virtual_stages={chunks}, or leave it out, or choose a schedule for any number, like "
                "interleaved"
            )
        if self.cp == 1 and self.context is not None:
            raise ConstraintError(
                f"context={self.context} with cp=1, which shards no sequence; expected cp of 2 or more, or leave "
                "context out"
            )

    def check_expert_tensor(self) -> None:
        """Raise :class:`ConstraintError` if ``etp``, the number of ranks over which one expert is sharded, is neither 1
        nor ``tp``. The runtime of this project does not execute other numbers."""
        if self.etp not in (None, 1, self.tp) and self.tp is not None:
            raise ConstraintError(
                f"etp={self.etp} with tp={self.tp}: our runtime shards an expert over 1 rank or over all ranks of tp; "
                f"expected etp=1 or {self.tp}, or partition(..., profile=ExecutionProfile(expert_tensor='any')), which "
                "predicts another framework"
            )

    def check_sharding(self) -> None:
        """Raise :class:`ConstraintError` if ``dp_shard``, the number of ``dp`` ranks that shard, is given, but nothing
        is sharded (``zero=0``) or it does not divide ``dp``."""
        if self.dp_shard is None:
            return
        if self.zero == 0:
            raise ConstraintError(
                f"dp_shard={self.dp_shard} with zero=0: nothing would be sharded; expected zero=1, 2 or 3, or "
                "leave dp_shard out"
            )
        if self.dp is not None and self.dp % self.dp_shard:
            raise ConstraintError(
                f"dp_shard={self.dp_shard} does not divide dp={self.dp}; expected a divisor of {self.dp}"
            )

    def check(self, world_size: int, global_batch: int | None = None, dims: Iterable[int] | None = None) -> None:
        """Raise :class:`ConstraintError` if the constraints do not fit the cluster, batch or model. ``world_size``:
        number of ranks. ``global_batch``: samples of the batch; ``None``: not checked. ``dims``: sizes of the dims of
        all weights, of which ``tp`` must divide one; ``None``: not checked."""
        self.check_idle()
        self.check_world(world_size)
        if global_batch is not None:
            self.check_batch(global_batch)
        if dims is not None:
            self.check_tensor_axis(dims)


def pinned_calls(stage_of: Mapping[str, int], paths: Sequence[str], num_stages: int) -> dict[int, int]:
    """Return the pipeline stage of each block call (use of a piece of the model, such as a decoder layer) that
    ``stage_of`` fixes: index of the call -> index of the stage. The longest matching prefix decides.

    ``stage_of``: stage by module path prefix; negative stages count from the end. ``paths``: the module path of each
    call, in order of execution. ``num_stages``: number of stages. Raise :class:`ConstraintError` for a prefix that
    names no module, a stage that does not exist, or stages that decrease in the order of the calls.
    """
    pinned: dict[int, int] = {}
    for prefix, stage in sorted(stage_of.items(), key=lambda item: len(item[0])):
        if not -num_stages <= stage < num_stages:
            raise ConstraintError(
                f"stage_of[{prefix!r}] = {stage} with {num_stages} stages; expected {-num_stages} to {num_stages - 1}"
            )
        inside = [i for i, path in enumerate(paths) if _is_under_prefix(path, prefix)]
        inside = inside or [i for i, path in enumerate(paths) if path and _is_under_prefix(prefix, path)]
        if not inside:
            near = get_close_matches(prefix, sorted(set(paths)), n=3, cutoff=0.3) or sorted(set(paths))[:3]
            raise ConstraintError(
                f"stage_of[{prefix!r}] names no module of the model; similar names: {', '.join(near)}"
            )
        pinned |= dict.fromkeys(inside, stage % num_stages)
    ordered = sorted(pinned)
    for a, b in pairwise(ordered):
        if pinned[a] > pinned[b]:
            raise ConstraintError(
                f"stage_of puts {paths[a]!r} on stage {pinned[a]} and {paths[b]!r}, which runs after it, on stage "
                f"{pinned[b]}; expected stages that do not decrease in the order of execution"
            )
    return pinned


def _is_under_prefix(path: str, prefix: str) -> bool:
    """Return whether the module ``path`` is ``prefix`` or a submodule of it."""
    return path == prefix or path.startswith(prefix + ".")
