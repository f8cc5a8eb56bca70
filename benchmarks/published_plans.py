"""Published runs as constraints and profiles: what of a plan is pinned, and how its framework executes it."""

from __future__ import annotations

import re
from typing import Any, Literal

from partitioner import Constraints, ExecutionProfile
from partitioner.constraints import Recompute

Row = dict[str, Any]
FUSED = "fused_kernels"  # key of a row whose operators the cost model fuses

SCHEDULES = {
    "interleaved-1f1b": "interleaved",
    "1f1b-interleaved": "interleaved",
    "interleaved": "interleaved",
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "zb-1p": "zb-1p",
    "zb-h1": "zb-1p",
    "zb-2p": "zb-2p",
    "zb-h2": "zb-2p",
    "zb-v": "zb-v",
}
# Selective recomputation in Megatron-LM is of attention scores (Korthikanti et al. 2022).
RECOMPUTE: dict[str, Recompute] = {
    "full": "full",
    "none": "none",
    "selective": "scores",
    "selective-attention": "scores",
    "minimal": "selective",  # MaxText's policy that keeps the results of products
}
# Frameworks whose tensor parallelism gathers again in backward what it gathered (Korthikanti et al. 2022), and those
# that run its gathers and scatters behind products (user buffers, on in NVIDIA's recipes).
_REGATHERS = ("Megatron", "NeMo", "MaxText")
_USER_BUFFERS = ("NeMo/",)
_NATIVE = ("torchtitan",)  # whose selective recomputation keeps every second product, and the rest is made again
PADS = ("Megatron", "NeMo")
_GATHERS_KEYS = ("torchtitan",)  # over cp: its default, ``context_parallel_rotate_method``
# Under FSDP they reduce gradients in float32: Megatron-Core by default, torchtitan (``mixed_precision_reduce``) and
# KempnerForge (``default_mp_policy``). NeMo AutoModel (``FSDP2Manager``) and fms-fsdp reduce in bf16.
_REDUCES_FLOAT32 = ("Megatron", "torchtitan", "KempnerForge")
# Those that send what all ranks of tp have in parts, which the next stage gathers: Megatron-LM
# (``scatter_gather_tensors_in_pipeline``, on by default) and DeepSpeed's pipeline engine (``is_pipe_partitioned``).
_SENDS_PARTS = ("Megatron",)
# Its ranks step their optimizers when they have ended their own part of a step; whether all gradients were finite, and
# their norm, is looked at afterwards (Qi et al. 2023, section 4; ``enable_optimizer_post_validation``).
_OVERLAPS_STEPS = ("Megatron-LM fork",)
# Those that shard activations over tp between layers, whatever a row says.
_SHARDS = ("MaxText",)
_QUICK = ("norm", "act")  # modules that Megatron-Core makes again: what is quickly made
# What sends a row to experts once to a node and a rank; Megatron-Core's all-to-all sends copies, a part of them from
# each rank that shares an expert.
_ONCE = ("deepep", "hybridep")
# The steps of Megatron-LM's optimization of DeepSeek-V3 on GB200 from the one that records graphs on, each with all
# before it.
_AFTER_GRAPHS = (
    "partial cuda graphs",
    "DeepEP tuned",
    "CPU-side",
    "PDL for",
    "graphs capture",
    "HybridEP",
    "fused into",
)
# What sends rows where a row does not say: AMD-AGI/Primus, examples/megatron/configs/MI355X (``use_turbo_deepep``).
_DISPATCHERS = {"Primus": "deepep"}


def constraints_of(row: Row) -> Constraints:
    pp, tp, cp = row.get("pp") or 1, row.get("tp") or 1, row.get("cp") or 1
    virtual = row.get("vpp") or None
    schedule = SCHEDULES.get(str(row.get("schedule") or ""))
    unsaid = _recipe(row) and row["layers"] % pp == 0 and row["layers"] > pp
    if pp > 1 and schedule is None and "VPP" not in row.get("notes", ""):  # else it is said not to be published
        schedule = "interleaved" if (virtual and virtual > 1) or (unsaid and not virtual) else "1f1b"
    if pp == 1 or schedule != "interleaved":
        virtual = None
    elif not virtual:
        virtual = max(2, row["layers"] // pp)  # one layer for each chunk, as far as nothing else is stated
    return Constraints(
        pp=pp,
        dp=row.get("dp") or row["num_gpus"] // (pp * tp * cp),
        cp=cp,
        context="all_gather" if cp > 1 and is_of(row, _GATHERS_KEYS) else None,
        tp=tp,
        ep=row.get("ep") or 1,
        etp=row.get("etp"),
        microbatch_size=_microbatch(row),
        schedule=schedule if pp > 1 else None,
        virtual_stages=virtual,
        recompute=_recompute(row),
        zero=_zero(row),
        memory_margin=0.0,  # it ran
        dp_shard=_sharers(row),
        # before May 2022 none had it
        sequence_parallel=None if row.get("sequence_parallel") or tp == 1 or is_of(row, _SHARDS) else False,
        placement=None if is_of(row, _SHARDS) else "in_order",
        overlap_steps=is_of(row, _OVERLAPS_STEPS),
        stage_of=_stages(row["layers"], pp, virtual or 1),
    )


def profile_of(row: Row) -> ExecutionProfile:
    """How the framework of a row executes its plan."""
    tp, zero = row.get("tp") or 1, _zero(row)
    return ExecutionProfile(
        name=str(row.get("framework") or "unknown"),
        overlap=_overlap(row),
        overlap_tensor=tp > 1
        and is_of(row, PADS)
        and (is_of(row, _USER_BUFFERS) or "tp-comm-overlap" in flags_of(row)),
        regather=tp > 1 and is_of(row, _REGATHERS),
        sends="parts" if tp > 1 and not row.get("sequence_parallel") and is_of(row, _SENDS_PARTS) else "whole",
        gather=_gather(row, zero),
        expert_tensor="any" if row.get("etp") else "one_or_tp",
        dispatch=_dispatch(row),
        overlap_experts=bool(re.search(r"1f1b overlap|(?<!no )EP overlap", flags_of(row))),
        expert_kernels=expert_kernels_of(row),
        graphs=_graphs(row),
        even_experts=_even_experts(row),
        # float32 ones came with bf16; what ZeRO-3 and FSDP scatter stayed short, but in the frameworks whose default
        # they are there too; NeMo's recipes for performance set ``grad_reduce_in_fp32=False``
        short_gradients=row.get("precision") == "fp16"
        or (zero == 3 and not is_of(row, _REDUCES_FLOAT32))
        or "NeMo" in row.get("framework", ""),
        current_scaling=_current_scaling(row),
        fused_casts=True,  # Transformer Engine, XLA and Inductor all do
        fused_kernels=prices_fused_kernels(row),
    )


def _zero(row: Row) -> int:
    """The stage of state sharding; FSDP is stage 3 where a row states none."""
    return 3 if row.get("fsdp") and row.get("zero_stage") is None else row.get("zero_stage") or 0


def _recompute(row: Row) -> Recompute | None:
    """What backward makes again; ``None``, as memory asks for it, where that is not stated or not known here."""
    stated = str(row.get("recompute"))
    if stated.startswith("selective") and is_of(row, _NATIVE):
        return "alternate"
    if stated.startswith("selective") and is_of(row, PADS):
        modules = re.findall(r"\w+", stated)[1:]
        if modules and all(name.endswith(_QUICK) for name in modules):
            return "selective"
    return RECOMPUTE.get(stated)


def _dispatch(row: Row) -> Literal["rows", "parts", "once"]:
    """How rows travel to experts."""
    if (row.get("ep") or 1) == 1:
        return "rows"
    stated = row.get("dispatcher") or _DISPATCHERS.get(str(row.get("framework")).split("/")[0])
    if any(name in f"{stated} {flags_of(row)}".lower() for name in _ONCE):
        return "once"
    return "parts" if is_of(row, PADS) else "rows"


def _sharers(row: Row) -> int | None:
    """The ranks that share states where a row's notes say that these are those of a node."""
    stated = re.search(r"sharded over (\d+) ranks of a node|zero1=(\d+) \(in a node\)", str(row.get("notes")))
    sharers = int(stated[1] or stated[2]) if stated else 0
    return sharers if 1 < sharers < (row.get("dp") or 0) else None


def _gather(row: Row, zero: int) -> Literal["call", "parameter", "owner"]:
    """How a row's sharded states go out: ZeRO-3 of 2021 gathers each parameter by itself, InternEvo's ZeRO-1 has each
    on one rank, which broadcasts it (``HybridZeroOptimizer.broadcast_params``)."""
    if "DeepSpeed ZeRO-3" in row.get("framework", ""):
        return "parameter"
    return "owner" if is_of(row, ("InternEvo",)) and zero == 1 else "call"


def expert_kernels_of(row: Row) -> Literal["grouped", "each", "fused"]:
    """How the products of a rank's experts run: Megatron-Core takes Transformer Engine's grouped linear layers, which
    launch a product and a cast for each expert, or its grouped MLP, without which a whole iteration, whose experts have
    as many rows as come, cannot be recorded in a graph. Primus has grouped products, and says where the activation is
    fused with them."""
    if row.get("experts") and is_of(row, ("Primus",)):
        return "fused" if re.search(r"fused act|all fusions", str(row.get("notes"))) else "grouped"
    if not row.get("experts") or not is_of(row, ("Megatron", "NeMo/Megatron")):
        return "grouped"
    return "fused" if re.search(r"fused grouped MLP|full-iteration", flags_of(row)) else "each"


def _graphs(row: Row) -> Literal["none", "part", "all"]:
    """What a row records in CUDA graphs: the whole iteration, or attention and what comes before experts; also all
    where rows are dropped and padded, whose sizes allow it, in recipes of Megatron-Bridge 25.09 for GB200, and for B200
    without stages (``scripts/performance/configs/qwen3``; not those of DeepSeek-V3, whose attention is latent)."""
    if "full-iteration" in flags_of(row):
        return "all"
    recorded = row["gpu"] == "GB200" or (row["gpu"] == "B200" and (row.get("pp") or 1) == 1)
    if _even_experts(row) == "padded" and recorded and row.get("attention") != "mla":
        return "all"
    later = "cumulative" in flags_of(row) and any(step in flags_of(row) for step in _AFTER_GRAPHS)
    return "part" if later or re.search(r"graphs \(attn", flags_of(row)) else "none"


def _current_scaling(row: Row) -> bool:
    """Whether tensors are cast to fp8 by their own largest numbers: in recipes of Megatron-Bridge that do not say MXFP8
    (``fp8_cs``), and by torchao, whose default it is."""
    return row.get("precision") == "fp8" and is_of(row, ("NeMo/Megatron-Bridge", *_NATIVE))


def _even_experts(row: Row) -> Literal["none", "routed", "padded"]:
    """How a row's experts all have as many rows: routing is forced to that, or what is beyond a share is dropped and
    what lacks is filled up (Megatron-Bridge, ``apply_moe_token_drop``)."""
    said = f"{flags_of(row)} {row.get('notes') or ''}"
    if "token drop" in said:
        return "padded"
    return "routed" if re.search(r"force balance|balanced gate|even routing", said) else "none"


def flags_of(row: Row) -> str:
    return str(row.get("flags") or "")


def is_compiled(row: Row) -> bool:
    """Whether it says so, or runs torchao's float8, which is compiled where it is to gain anything."""
    if is_of(row, _NATIVE) and "fp8" in str(row.get("precision")):
        return True
    said = f"{flags_of(row)} {row.get('notes') or ''}"
    return "compile" in said and not re.search(r"\b(no|not|without) (torch\.)?compile", said)


def prices_fused_kernels(row: Row) -> bool:
    """Whether the row is priced as PyTorch's operators, which the cost model fuses (``--compiled``). Otherwise compiled
    rows have a model with fused norms and rotary embeddings."""
    return bool(row.get(FUSED))


def _microbatch(row: Row) -> int | None:
    """``None``, the best one, where none is stated; MaxText takes all samples of a device at once."""
    whole = row["gbs"] // row["dp"] if is_of(row, _SHARDS) and row.get("dp") else None
    return row.get("mbs") or (1 if _recipe(row) else whole)


def _recipe(row: Row) -> bool:
    """Whether a row of Megatron-Core with experts leaves out its microbatches, as virtual stages then: its recipes have
    one sample, and a layer for each virtual stage."""
    return bool(row.get("experts")) and not row.get("mbs") and is_of(row, PADS)


def _stages(layers: int, pp: int, virtual: int) -> dict[str, int]:
    """(Virtual) stages as the frameworks of all rows cut them: as many layers on each, with the embedding and the head
    besides; where that does not come out even these two count as a layer each (Qi et al. 2023; Megatron-Core's
    ``account_for_embedding_in_pipeline_split``). Free where neither does."""
    ends = 0 if layers % pp == 0 else 1
    if pp == 1 or (layers + 2 * ends) % (pp * virtual):
        return {}
    per_stage = (layers + 2 * ends) // (pp * virtual)
    return {f"layers.{i}": (i + ends) // per_stage for i in range(layers)} | {"tokens": 0, "head": -1}


def is_of(row: Row, frameworks: tuple[str, ...]) -> bool:
    return str(row.get("framework", "")).startswith(frameworks)


def _overlap(row: Row) -> bool:
    """``False`` where collectives of gradients and weights wait: as the row says, in ZeRO-3 of 2021, in DeepSpeed's
    pipeline engine, which reduces gradients after the last microbatch (``_exec_reduce_grads``), and in Megatron-LM,
    unless it is told otherwise (``--overlap-grad-reduce``)."""
    local = "NOT overlapped" in row.get("notes", "") and row["layers"] >= 48
    waits = is_of(row, ("Megatron-DeepSpeed", "Megatron-LM")) and "overlap-grad-reduce" not in flags_of(row)
    return not (local or waits or "DeepSpeed ZeRO-3" in row.get("framework", ""))
