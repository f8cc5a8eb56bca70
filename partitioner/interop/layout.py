"""A training layout that another framework's configuration describes, and the errors of reading one."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from partitioner.constraints import Constraints, Recompute
from partitioner.execution_profile import OURS, ExecutionProfile
from partitioner.option_text import explain_validation_error
from partitioner.passes.documented_model import DocumentedModel
from partitioner.passes.errors import PartitionError
from partitioner.runtime.program.program import Offload

Precision = Literal["bf16", "fp16", "fp32", "fp8", "nvfp4"]

# The fields that say how a model is trained. The others say where the layout comes from and how it is executed.
FACTS = (
    "pp", "dp", "cp", "tp", "ep", "etp", "dp_shard", "dp_replicate", "devices", "microbatch_size", "microbatches",
    "global_batch", "schedule", "virtual_stages", "layers_per_stage", "stage_layers", "first_less", "last_less", "zero",
    "sequence_parallel", "context", "recompute", "offload", "precision", "optimizer", "seq_length",
)  # fmt: skip


class LayoutError(PartitionError):
    """Error: a configuration of another framework cannot be read or cannot be written."""


class UnknownOptionError(LayoutError):
    """Error: a configuration has an option that its framework does not know. The message names similar options."""


class OptionValueError(LayoutError):
    """Error: an option of a configuration has a value of a wrong type, or one that its framework does not know."""


class ContradictionError(LayoutError):
    """Error: options of a configuration contradict each other, the number of devices or the model."""


class UnusedOption(BaseModel, metaclass=DocumentedModel):
    """An option of a configuration that has no effect on the plan, or a property that a configuration format cannot
    express, with its value and the reason.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    option: str = Field(description="Option as it is written in the configuration.")
    value: str = Field(description="Value of the option in the configuration, as text; empty if there is none.")
    reason: str = Field(
        description="Reason why the option has no effect on the plan, or why the configuration format cannot "
        "express it."
    )

    def __str__(self) -> str:
        return f"{self.option}={self.value}: {self.reason}" if self.value else f"{self.option}: {self.reason}"


class TrainingLayout(BaseModel, metaclass=DocumentedModel):
    """How a framework's configuration divides a training step over devices.

    :func:`partitioner.read_layout` returns a layout. A field is ``None`` if the configuration does not set it.

    Raises :class:`LayoutError` for a malformed value, and :class:`ContradictionError` for values that exclude each
    other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    framework: str = Field(description="Format of the configuration, such as megatron, torchtitan or deepspeed.")

    # Mesh

    pp: PositiveInt = Field(default=1, description="Number of pipeline ranks.")
    dp: PositiveInt | None = Field(
        default=None, description="Number of data-parallel ranks. None: the number of devices divided by pp x cp x tp."
    )
    cp: PositiveInt = Field(
        default=1, description="Number of context-parallel ranks, over which each sequence is sharded."
    )
    tp: PositiveInt = Field(default=1, description="Number of tensor-parallel ranks.")
    ep: PositiveInt = Field(
        default=1, description="Number of expert-parallel ranks, over which the experts of a layer are distributed."
    )
    etp: PositiveInt | None = Field(
        default=None,
        description="Number of ranks over which each expert is sharded. None: the configuration does not say it.",
    )
    dp_shard: PositiveInt | None = Field(
        default=None,
        description="Number of data-parallel ranks over which states are sharded. None: dp / dp_replicate, or dp if "
        "dp_replicate is not given.",
    )
    dp_replicate: PositiveInt | None = Field(
        default=None,
        description="Number of groups of data-parallel ranks that each hold all states. None: the configuration "
        "does not say it.",
    )
    devices: PositiveInt | None = Field(
        default=None, description="Number of devices. None: the configuration does not say it."
    )

    # Batch and pipeline

    microbatch_size: PositiveInt | None = Field(
        default=None,
        description="Number of samples of a microbatch on one data-parallel rank. None: the configuration does not "
        "say it.",
    )
    microbatches: PositiveInt | None = Field(
        default=None,
        description="Number of microbatches per step on each data-parallel rank. None: the configuration does not "
        "say it.",
    )
    global_batch: PositiveInt | None = Field(
        default=None, description="Number of samples per step, over all ranks. None: the configuration does not say it."
    )
    schedule: str | None = Field(
        default=None,
        description="Pipeline schedule, by its name in this project, such as 1f1b. None: the configuration does not "
        "say it.",
    )
    virtual_stages: PositiveInt | None = Field(
        default=None,
        description="Number of pipeline stages on each pipeline rank. None: the configuration does not say it.",
    )
    layers_per_stage: PositiveInt | None = Field(
        default=None,
        description="Number of layers of each pipeline stage (of each virtual stage if a rank has several). None: "
        "the configuration does not say it.",
    )
    stage_layers: tuple[NonNegativeInt, ...] = Field(
        default=(),
        description="Number of layers of each pipeline stage (or virtual stage), if these numbers differ. (): the "
        "layers are divided evenly.",
    )
    first_less: NonNegativeInt = Field(
        default=0, description="Number of layers by which the first pipeline stage is smaller than the others."
    )
    last_less: NonNegativeInt = Field(
        default=0, description="Number of layers by which the last pipeline stage is smaller than the others."
    )

    # Memory and numbers

    zero: int | None = Field(
        default=None,
        ge=0,
        le=3,
        description="ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters (FSDP). "
        "None: the configuration does not say it.",
    )
    sequence_parallel: bool | None = Field(
        default=None,
        description="Whether activations between layers are sharded over tp. None: the configuration does not say it.",
    )
    context: Literal["all_gather", "ring", "ulysses"] | None = Field(
        default=None, description="Algorithm of attention over cp. None: the configuration does not say it."
    )
    recompute: Recompute | None = Field(
        default=None,
        description="Activations that the backward pass recomputes, with the values of Constraints.recompute. None: "
        "the configuration does not say it.",
    )
    offload: tuple[Offload, ...] = Field(
        default=(),
        description="Kinds of data in host memory between uses: optimizer, activations, parameters; disk means that "
        "optimizer states are on disk.",
    )
    precision: Precision | None = Field(
        default=None, description="Precision of matrix products. None: the configuration does not say it."
    )
    optimizer: str | None = Field(
        default=None,
        description="Optimizer, by the name in this project whose states have the same size, such as adamw. None: "
        "the configuration does not say it.",
    )
    seq_length: PositiveInt | None = Field(
        default=None, description="Number of tokens of a sample. None: the configuration does not say it."
    )

    # Execution

    profile: ExecutionProfile = Field(default=OURS, description="How the framework executes the layout.")
    unused: tuple[UnusedOption, ...] = Field(
        default=(),
        description="Options of the configuration that have no effect on the plan, and options that a layout cannot "
        "express.",
    )

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise LayoutError(
                explain_validation_error(error, [*TrainingLayout.model_fields], "layout field")
            ) from error
        self._check()

    def _check(self) -> None:
        """Raise :class:`ContradictionError` if fields of the layout contradict each other, such as sizes that do not
        divide, or if the layout does not fit the number of devices that it names.
        """
        shard, replicate = self.dp_shard, self.dp_replicate
        if shard and replicate and self.dp not in (None, shard * replicate):
            raise ContradictionError(
                f"dp={self.dp}, but dp_replicate={replicate} x dp_shard={shard} is {shard * replicate}; expected the "
                "product of the two, or one of the three left out"
            )
        for name, part in (("dp_shard", shard), ("dp_replicate", replicate)):
            if self.dp and part and self.dp % part:
                raise ContradictionError(f"{name}={part} does not divide dp={self.dp}; expected a divisor of it")
        size, dp = self.microbatch_size, self.dp
        if self.global_batch and size and self.global_batch % (size * (dp or 1)):
            parts = f"microbatch_size={size}" + (f" x dp={dp}" if dp else "")
            raise ContradictionError(
                f"the global batch of {self.global_batch} is not divisible by {parts}; expected a multiple of "
                f"{size * (dp or 1)}"
            )
        if self.global_batch and size and self.microbatches and self.global_batch % (size * self.microbatches):
            raise ContradictionError(
                f"the global batch of {self.global_batch} is not divisible by microbatch_size={size} x "
                f"{self.microbatches} microbatches; expected a multiple of {size * self.microbatches}, or one of the "
                "three left out"
            )
        if self.devices:
            self._check_devices(self.devices)
        chunks = self.virtual_stages or 1
        if self.stage_layers and len(self.stage_layers) % self.pp:
            raise ContradictionError(
                f"{len(self.stage_layers)} stages with pp={self.pp}; expected a multiple of {self.pp}, as many for "
                "each pipeline rank"
            )
        if self.stage_layers and self.virtual_stages and len(self.stage_layers) != self.pp * chunks:
            raise ContradictionError(
                f"{len(self.stage_layers)} stages with pp={self.pp} and {chunks} virtual stages; expected "
                f"{self.pp * chunks}"
            )
        if self.pp == 1 and chunks > 1:
            raise ContradictionError(
                f"{chunks} virtual stages with pp=1, which has no pipeline; expected pp of 2 or more"
            )

    def _check_devices(self, num_devices: int) -> int:
        """Return the number of data-parallel ranks if the layout is used on ``num_devices`` devices. Raise
        :class:`ContradictionError` if the sizes of the mesh axes do not divide this number.
        """
        ranks = self.pp * self.tp * self.cp
        shown = f"pp={self.pp} x cp={self.cp} x tp={self.tp}"
        if num_devices % ranks:
            raise ContradictionError(
                f"{shown} is {ranks} ranks, which does not divide the {num_devices} devices; expected sizes whose "
                f"product divides {num_devices}, or a multiple of {ranks} devices"
            )
        dp = num_devices // ranks
        if self.dp not in (None, dp):
            raise ContradictionError(
                f"{shown} x dp={self.dp} is {ranks * (self.dp or 1)} ranks; expected the {num_devices} devices: change "
                "a size, or the number of devices"
            )
        return dp

    def at(self, num_devices: int) -> TrainingLayout:
        """Return the layout for ``num_devices`` devices, with all sizes that follow from this number, such as ``dp``.
        Fields that have no effect because a mesh axis has one rank, such as the schedule with ``pp=1``, are reset to
        their defaults.

        Raise :class:`ContradictionError` if the layout does not fit this number of devices.
        """
        if self.devices not in (None, num_devices):
            raise ContradictionError(
                f"the configuration is for {self.devices} devices; expected a topology of as many, got {num_devices}: "
                "change one of them"
            )
        dp = self._check_devices(num_devices)
        shard, replicate = self.dp_shard, self.dp_replicate
        part = shard or replicate or 1
        if dp % part or (shard and replicate and shard * replicate != dp):
            given = " x ".join(f"{n}={v}" for n, v in (("dp_replicate", replicate), ("dp_shard", shard)) if v)
            raise ContradictionError(
                f"{given} on {num_devices} devices, of which pp={self.pp} x cp={self.cp} x tp={self.tp} leaves {dp} "
                f"data-parallel ranks; expected a product of {dp}"
            )
        shard = shard or dp // (replicate or 1)
        experts = self.ep * (self.etp or 1)
        if dp * self.cp * self.tp % experts:
            raise ContradictionError(
                f"ep={self.ep}{f' x etp={self.etp}' if self.etp else ''} does not divide dp={dp} x cp={self.cp} x "
                f"tp={self.tp} = {dp * self.cp * self.tp} ranks; expected a divisor"
            )
        zero = 0 if self.zero and shard * self.cp == 1 else self.zero
        idle: dict[str, Any] = {}
        if self.pp == 1:
            idle |= {"schedule": None, "virtual_stages": None, "layers_per_stage": None}
            idle |= {"stage_layers": (), "first_less": 0, "last_less": 0}
        if self.virtual_stages == 1:
            idle["virtual_stages"] = None
        idle |= {"sequence_parallel": None} if self.tp == 1 else {}
        idle |= {"context": None} if self.cp == 1 else {}
        idle |= {"etp": None} if self.ep == 1 else {}
        return self.replace(
            dp=dp,
            devices=num_devices,
            dp_shard=shard if zero else None,
            dp_replicate=dp // shard if zero else None,
            zero=zero,
            **idle,
            **self._resolve_batch(dp),
        )

    def _resolve_batch(self, dp: int) -> dict[str, Any]:
        """Return two fields of the layout as a dict: ``global_batch`` (samples in a step) and ``microbatches`` (number
        of microbatches on each of ``dp`` data-parallel ranks). A field is ``None`` if it does not follow from the other
        sizes. Raise :class:`ContradictionError` if the sizes contradict each other."""
        batch, size, count = self.global_batch, self.microbatch_size, self.microbatches
        if size and count and batch not in (None, size * count * dp):
            raise ContradictionError(
                f"the global batch is {batch}, but microbatch_size={size} x {count} microbatches x dp={dp} is "
                f"{size * count * dp}; expected them to be equal: change one"
            )
        if size and count:
            batch = size * count * dp
        if batch and size and batch % (size * dp):
            raise ContradictionError(
                f"the global batch of {batch} is not divisible by microbatch_size={size} x dp={dp} = {size * dp}; "
                f"expected a multiple of {size * dp}"
            )
        return {"global_batch": batch, "microbatches": count or (batch // (size * dp) if batch and size else None)}

    def replace(self, **changes: Any) -> TrainingLayout:
        """Return a copy of this training layout in which some fields have new values. ``changes``: name of a field ->
        new value.
        """
        kept = {name: getattr(self, name) for name in type(self).model_fields}
        return TrainingLayout(**(kept | changes))

    @property
    def constraints(self) -> Constraints:
        """Return the layout as constraints of :func:`partitioner.partition`. The constraints lack the cuts between
        stages, which need the model. They also lack batch, precision and optimizer, which are separate arguments of
        ``partition``.

        All usable memory may be used (``memory_margin=0``), and ranks are placed on devices in order.
        """
        known: dict[str, Any] = {"pp": self.pp, "cp": self.cp, "tp": self.tp, "ep": self.ep, "dp": self.dp}
        known |= {"microbatch_size": self.microbatch_size, "recompute": self.recompute, "zero": self.zero}
        if self.etp is not None and self.ep > 1:
            known["etp"] = self.etp
        if self.pp > 1:
            known |= {"schedule": self.schedule, "virtual_stages": self.virtual_stages}
        if self.cp > 1:
            known["context"] = self.context
        if self.tp > 1 and self.sequence_parallel is False:
            known["sequence_parallel"] = False
        shard = self.dp_shard or (self.dp // self.dp_replicate if self.dp and self.dp_replicate else None)
        if self.zero and shard and shard != self.dp:
            known["dp_shard"] = shard
        return Constraints(
            **{name: value for name, value in known.items() if value is not None},
            offload=self.offload,
            placement="in_order",
            memory_margin=0.0,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Return the fields that say how a model is trained (mesh, batch, schedule and so on), name -> value. The name
        of the framework, its execution profile and the list of options without effect are left out.
        """
        return {name: getattr(self, name) for name in FACTS}

    def __str__(self) -> str:
        plain = {name: field.default for name, field in TrainingLayout.model_fields.items()}
        shown = [f"{name}={_show_value(value)}" for name, value in self.facts.items() if value != plain[name]]
        return f"{self.framework}: {', '.join(shown) or 'one rank'}"


def _show_value(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def divide_layers(layout: TrainingLayout, num_layers: int) -> tuple[int, ...]:
    """Return the number of layers in each (virtual) pipeline stage, if a model of ``num_layers`` layers is divided as
    ``layout`` says: as listed in its ``stage_layers`` or else equally.

    In an equal division, the first stage has ``first_less`` and the last stage ``last_less`` layers fewer than the
    others, and a remainder goes to the first stages. Raise :class:`ContradictionError` if the layers cannot be divided
    in this way.
    """
    if layout.stage_layers:
        if sum(layout.stage_layers) != num_layers:
            raise ContradictionError(
                f"the stages have {sum(layout.stage_layers)} layers together, but the model has {num_layers}; expected "
                "a configuration of this model"
            )
        return layout.stage_layers
    weight = num_layers + layout.first_less + layout.last_less
    count = layout.pp * (layout.virtual_stages or 1)
    if layout.layers_per_stage:
        count = -(-weight // layout.layers_per_stage)
        if count % layout.pp:
            raise ContradictionError(
                f"{num_layers} layers with {layout.layers_per_stage} on each stage are {count} stages; expected a "
                f"multiple of pp={layout.pp}"
            )
    each, more = divmod(weight, count)
    sizes = [each + (index < more) for index in range(count)]
    sizes[0] -= layout.first_less
    sizes[-1] -= layout.last_less
    if min(sizes) < 0 or max(sizes) == 0:
        raise ContradictionError(f"{num_layers} layers do not divide into {count} stages; expected fewer stages")
    return tuple(sizes)
