"""How a framework executes a layout: facts that the cost model reads, and named profiles of known frameworks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from partitioner.errors import ConstraintError
from partitioner.option_text import explain_validation_error, read_options
from partitioner.passes.documented_model import DocumentedModel
from partitioner.topology.validate import format_suggestion


class ExecutionProfile(BaseModel, metaclass=DocumentedModel):
    """How a framework executes a parallel layout, as far as this changes time or memory: for example whether gradients
    are reduced behind computation.

    The cost model reads the fields. The defaults describe the runtime of this project, and a plan with them can be run.
    A plan with any other profile predicts another framework; it has estimates and no program.
    ``ExecutionProfile.parse("megatron-core")`` is a named profile.
    ``ExecutionProfile.parse("megatron-core,overlap=true")`` is that profile with one field changed.

    Raises :class:`ConstraintError` for a malformed value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="ours", description="Name of the profile in reports; it has no effect on estimates.")

    # Communication of gradients, states and activations

    overlap: bool = Field(
        default=True,
        description="Whether gradient reductions and all-gathers of sharded states overlap with computation.",
    )

    gather: Literal["call", "parameter", "owner"] = Field(
        default="call",
        description="Granularity of the all-gathers of sharded states. call: all states of a block call (such as a "
        "layer) together. parameter: each parameter separately. owner (ZeRO-1): the one rank that owns "
        "a parameter broadcasts it before the next step.",
    )

    short_gradients: bool = Field(
        default=False,
        description="Whether gradients have the type of their parameter even if that has 16 bits. If false, "
        "gradients are float32.",
    )

    sends: Literal["whole", "parts"] = Field(
        default="whole",
        description="How activations that are replicated over tp are sent to the next pipeline stage. whole: each "
        "rank sends the whole tensor. parts: each rank of tp sends one part, and the receivers gather "
        "the parts. This matters only with sequence_parallel=False; otherwise these activations are "
        "sharded over tp.",
    )

    overlap_tensor: bool = Field(
        default=False,
        description="Whether all-gathers and reduce-scatters over tp are split into pieces that overlap with the "
        "matrix products before or after them.",
    )

    tensor_pieces: Literal["none", "faster", "all"] = Field(
        default="none",
        description="Which all-gathers before matrix products and reduce-scatters after them run in pieces beside "
        "these products in the runtime of this project: none, those that are estimated to be faster in "
        "pieces (faster), or all. Constraints(overlap_tensor=...) sets this field.",
    )

    regather: bool = Field(
        default=False,
        description="Whether activations that were gathered over tp are saved for backward as shards and gathered "
        "again in backward.",
    )

    # Experts

    expert_tensor: Literal["one_or_tp", "any"] = Field(
        default="one_or_tp",
        description="Numbers of ranks over which one expert can be sharded (etp). one_or_tp: 1 or the value of tp. "
        "any: every divisor of tp.",
    )

    dispatch: Literal["rows", "parts", "once"] = Field(
        default="rows",
        description="How tokens are sent to experts. rows: each rank that has a token sends it once for each of its "
        "experts. parts: the ranks of tp send different parts of the tokens, and the ranks of an "
        "expert gather the parts. once: a token is sent once to each node and rank, which forward it "
        "(as DeepEP and HybridEP do).",
    )

    overlap_experts: bool = Field(
        default=False,
        description="Whether sending tokens to experts and back overlaps with the computation of another microbatch.",
    )

    expert_kernels: Literal["grouped", "each", "fused"] = Field(
        default="grouped",
        description="How the matrix products of the experts of a rank are launched. grouped: all in one kernel. "
        "each: one launch for each expert and its casts (Transformer Engine's grouped linear layers). "
        "fused: in one kernel together with the operators between the products (Transformer Engine's "
        "grouped MLP).",
    )

    even_experts: Literal["none", "routed", "padded"] = Field(
        default="none",
        description="Reason why all experts get equally many tokens. routed: routing is forced to be even. padded: "
        "tokens beyond the capacity of an expert are dropped, and missing ones are padded. none: they "
        "do not; every expert is equally likely to get a token, so that some ranks have more tokens "
        "than others.",
    )

    # Kernels

    fused_casts: bool = Field(
        default=False,
        description="Whether, in fp8, the kernel before a matrix product writes the product's operand in fp8. If "
        "false, a separate kernel casts the operand for each product.",
    )

    fused_kernels: bool = Field(
        default=False,
        description="Whether a compiler fuses pointwise operators, norms and losses between matrix products and "
        "collectives, so that each tensor is read and written once.",
    )

    current_scaling: bool = Field(
        default=False,
        description="Whether, in fp8, each tensor is scaled by its current maximum. If false, tensors are scaled by "
        "earlier maxima, or block by block.",
    )

    fp8_scaling: Literal["tensor", "row", "block"] = Field(
        default="tensor",
        description="Granularity of the scales in fp8 in the runtime of this project: one scale for each tensor, "
        "row or block. It decides which matrix products are in fp8. Constraints(fp8_scaling=...) sets "
        "this field.",
    )

    fp8_products: Literal["all", "faster"] = Field(
        default="all",
        description="Blocks (such as layers) whose matrix products are in fp8 when the precision is fp8: all, or "
        "those that are estimated to be faster in fp8 (faster), as in the runtime of this project on "
        "GPUs.",
    )

    graphs: Literal["none", "part", "all"] = Field(
        default="none",
        description="Part of the step that is recorded in CUDA graphs, so that the host does not launch its "
        "operators one by one: none, everything except experts (part), or everything (all).",
    )

    def __init__(self, **data: Any) -> None:
        """Build the profile from ``data``, values of fields by name. Raise :class:`ConstraintError` for an unknown
        field or a wrong value.
        """
        try:
            super().__init__(**data)
        except ValidationError as error:
            known = [*ExecutionProfile.model_fields]
            raise ConstraintError(explain_validation_error(error, known, "profile field")) from error

    @classmethod
    def parse(cls, text: str) -> ExecutionProfile:
        """Return the execution profile that ``text`` describes in the form ``NAME``, ``NAME,FIELD=VALUE,...`` or
        ``FIELD=VALUE,...``: a named profile, by default that of this project's runtime, with some fields changed.

        Raise :class:`ConstraintError` for an unknown name or field, or a wrong value.
        """
        first, _, rest = text.partition(",")
        name, changes = (first.strip(), rest) if "=" not in first else (OURS.name, text)
        if name not in PROFILES:
            names = ", ".join(PROFILES)
            raise ConstraintError(f"unknown profile {name!r}; {format_suggestion(name, [*PROFILES])}expected {names}")
        given = read_options(changes)
        if not given:
            return PROFILES[name]
        return cls(**{**PROFILES[name].model_dump(), "name": text, **given})

    @classmethod
    def resolve(cls, profile: ExecutionProfile | str | None) -> ExecutionProfile:
        """Return the execution profile that an argument of ``partition`` stands for: a profile itself, the text of a
        name with changed fields such as ``"megatron-core,overlap=true"``, or ``None`` for the runtime of this project.

        Raise :class:`ConstraintError` for other types and unknown names.
        """
        if profile is None:
            return OURS
        if isinstance(profile, str):
            return cls.parse(profile)
        if not isinstance(profile, ExecutionProfile):
            kind = type(profile).__name__
            raise ConstraintError(f"profile must be a name or an ExecutionProfile, got {kind}; {', '.join(PROFILES)}")
        return profile

    def executed(
        self,
        execution: str | None,
        device: str,
        overlap_tensor: bool | None = False,
        fp8_scaling: Literal["tensor", "row", "block"] = "tensor",
    ) -> ExecutionProfile:
        """Return this profile, changed for the execution mode ``execution`` of this project's runtime on devices of
        torch's type ``device``, ``cuda`` or ``cpu``. A profile of another framework is returned unchanged, because its
        own fields say what is compiled and recorded. Other fields of this project's profile, such as ``dispatch``, keep
        their values.

        ``execution``: ``eager``; ``compiled``: a compiler merges operators; ``graph``: on GPUs operators are merged,
        and steps are replayed as CUDA graphs, so that the host launches only the operators of experts one by one; on
        CPUs as ``eager``. ``None``: ``compiled`` on GPUs, ``eager`` on CPUs, which is also what an engine does.

        ``overlap_tensor``: whether collectives over ``tp`` run in pieces next to products (``tensor_pieces``).
        ``None``: on GPUs, where this is estimated to be faster; never on CPUs, whose cores also communicate.
        ``fp8_scaling``: which numbers share a scale in fp8. On GPUs, blocks (such as layers) are in fp8 only where this
        is estimated to be faster; on CPUs, which compute fp8 for tests, everywhere.
        """
        if self.name != OURS.name:
            return self
        on_gpu = device == "cuda"
        changes: dict[str, Any] = {}
        if fp8_scaling != OURS.fp8_scaling:
            changes["fp8_scaling"] = fp8_scaling
        if on_gpu and self.fp8_products == OURS.fp8_products:
            changes["fp8_products"] = "faster"
        if overlap_tensor or (overlap_tensor is None and on_gpu):
            changes["tensor_pieces"] = "all" if overlap_tensor else "faster"
        if execution is None and on_gpu:
            changes["fused_kernels"] = True
        elif execution is not None:
            changes["fused_kernels"] = execution == "compiled" or (execution == "graph" and on_gpu)
            if self.graphs != "all":
                changes["graphs"] = "part" if execution == "graph" and on_gpu else "none"
        return self.model_copy(update=changes) if changes else self

    def executes_as(self, other: ExecutionProfile) -> bool:
        """Return whether layouts take the same time and memory under this profile as under ``other``."""
        return self.model_dump(exclude={"name"}) == other.model_dump(exclude={"name"})

    @property
    def differences(self) -> tuple[str, ...]:
        """Return the fields in which the profile differs from what the runtime of this project can execute, as texts
        ``field=value``.
        """
        executed = {"name"}
        if self.name == OURS.name:
            executed |= {"fused_kernels", "tensor_pieces", "fp8_scaling", "fp8_products"} | (
                {"graphs"} if self.graphs == "part" else set()
            )
        facts = ((name, getattr(self, name)) for name in type(self).model_fields if name not in executed)
        return tuple(f"{name}={value}" for name, value in facts if value != getattr(OURS, name))

    @property
    def reasons(self) -> dict[str, str]:
        """Return why the named profile sets its fields as it does: name of the field -> reason, as text. Fields that
        were changed from the named profile are left out.
        """
        facts = _FACTS.get(self.name.partition(",")[0], {})
        return {field: reason for field, (value, reason) in facts.items() if getattr(self, field) == value}


OURS = ExecutionProfile()

# Profile -> field -> value and the reason for it. A field that is not listed is as in the runtime of this project. The
# values are what the frameworks do by default; options that a user switches on are left to the user.
_FACTS: dict[str, dict[str, tuple[Any, str]]] = {
    "ours": {},
    "megatron-core": {
        "overlap": (False, "overlap_grad_reduce and overlap_param_gather of DistributedDataParallelConfig are False."),
        "sends": ("parts", "Megatron-LM's scatter_gather_tensors_in_pipeline is True."),
        "regather": (True, "The linear layers save the sharded input and gather it again in backward."),
        "expert_tensor": ("any", "expert_tensor_parallel_size is a size of its own, independent of tp."),
        "dispatch": ("parts", "The all-to-all dispatcher sends sharded rows, which the ranks of an expert gather."),
        "expert_kernels": ("each", "SequentialMLP and Transformer Engine's GroupedLinear launch a product per expert."),
        "fused_casts": (True, "Transformer Engine's LayerNormLinear writes its output in fp8."),
    },
    "torchtitan": {
        "fused_casts": (True, "Float8 training is meant for torch.compile, which fuses casts into the kernels before."),
        "current_scaling": (True, "torchao's default float8 recipe scales each tensor by its current maximum."),
    },
    "deepspeed": {  # overlap_comm is on by default under ZeRO-3 alone: overlap stays as it is
        "short_gradients": (True, "Under ZeRO, DeepSpeedEngine.get_data_types accumulates in the type of the model."),
        "sends": ("parts", "PipelineEngine.is_pipe_partitioned is True with tensor parallelism."),
        "expert_kernels": ("each", "deepspeed.moe.experts.Experts runs one expert after the other."),
        "even_experts": ("padded", "deepspeed.moe.layer.MoE has drop_tokens=True and pads to its capacity."),
    },
}  # fmt: skip

PROFILES: dict[str, ExecutionProfile] = {
    name: ExecutionProfile(name=name, **{field: value for field, (value, _) in facts.items()})
    for name, facts in _FACTS.items()
}
