"""Published runs as jobs: a row's model by its dimensions, its machine as a topology."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from public_models import EXPERT_BIASES, HEAD_NORMS, completed, product_weights
from published_models import Shape
from published_plans import (
    PADS,
    Row,
    constraints_of,
    expert_kernels_of,
    flags_of,
    is_compiled,
    is_of,
    prices_fused_kernels,
    profile_of,
)

from partitioner import Constraints, ExecutionProfile, Topology
from partitioner.topology import catalogue
from partitioner.topology.quantities import parse_quantity

# The row's name of a device -> ours, its links inside a node and between nodes.
DEVICES = {
    "V100-32GB": ("v100-32gb", "nvlink2", "ib-edr"),
    "V100-16GB": ("v100-16gb", "nvlink2", "ib-edr"),
    "A100-80GB": ("a100-80gb", "nvlink3", "ib-hdr"),
    "A100-40GB": ("a100-40gb", "nvlink3", "ib-hdr"),
    "H100-80GB": ("h100-sxm", "nvlink4", "ib-ndr"),
    "H100-PCIe": ("h100-pcie", "pcie5", "ib-hdr"),
    "A800-80GB": ("a800-80gb", "nvlink3-a800", "ib-hdr"),
    "H800": ("h800", "nvlink4-h800", "ib-ndr"),
    "H20": ("h20", "nvlink4", "ib-ndr"),
    "H200": ("h200", "nvlink4", "ib-ndr"),
    "B200": ("b200", "nvlink5", "ib-ndr"),
    "B300": ("b300", "nvlink5", "ib-ndr"),
    "GB200": ("gb200", "nvlink5", "ib-ndr"),
    "GB300": ("gb300", "nvlink5", "ib-ndr"),
    "MI300X": ("mi300x", "xgmi", "ib-ndr"),
    "MI325X": ("mi325x", "xgmi", "ib-ndr"),
    "MI355X": ("mi355x", "xgmi4", "ib-ndr"),
    "GH200": ("gh200", "nvlink4", "ib-ndr"),
    "L40S": ("l40s", "pcie4", "ib-edr"),
}
# What rows call a network -> ours, where it is another than is common with their devices.
NETWORKS = {"Omni-Path": "omni-path"}
# Meshes of links inside a node as one level, for nodes of any size: all-reduces as measured on DGX-1; xGMI by its sum.
MESHES = {
    "nvlink2": {
        "bandwidth": "150 GB/s", "latency": "9 us", "step": "4 us", "base": "8.4 us", "efficiency": 0.9,
        "all_reduce": [[2, "23 us", "22.6 GB/s"], [4, "45 us", "86 GB/s"], [8, "67 us", "135 GB/s"]],
    },
    "xgmi": {"bandwidth": "448 GB/s", "latency": "9 us", "step": "4 us", "base": "10 us", "efficiency": 0.7},
    "xgmi4": {"bandwidth": "535 GB/s", "latency": "9 us", "step": "4 us", "base": "10 us", "efficiency": 0.7},
}  # fmt: skip
# Frameworks from before FlashAttention, or that did not have it on: they make the scores.
_UNFUSED = ("Megatron-LM", "Megatron-DeepSpeed")
# Fused attention of frameworks from before torch took today's cuDNN: the share of peak that it reaches by device, where
# that is not what the hardware file says. On H100 (Shah et al. 2024, figures 5 and 6): FlashAttention-2, 335 TFLOP/s
# forward and 322 backward, and cuDNN 9.1, 539 and 430; that of early 2025 reached on GB200 what it did on B200 (1,171
# and 943: NVIDIA/cudnn-frontend, sdpa_benchmark_training). FlashAttention 1 is half as fast, in llm-foundry's tables.
_HOPPER = ("H100", "H800", "H200", "H20", "GH200")
_KERNELS: dict[str, dict[str, float]] = {
    "flash-1": {"A100": 0.3, **dict.fromkeys(_HOPPER, 0.19)},
    "flash-2": dict.fromkeys(_HOPPER, 0.33),
    "cudnn-9.1": {"GB200": 0.47, **dict.fromkeys(_HOPPER, 0.46)},
    "today's": {},
}
_ATTENTION = {
    "Composer": "flash-1",
    **dict.fromkeys(("NeMo/Megatron-Core", "Megatron-Core (v0", "MaxText", "PaxML"), "cudnn-9.1"),
    **dict.fromkeys(("NeMo/Megatron-Bridge", "NeMo AutoModel", "Megatron-Core"), "today's"),
}
# Those with kernels of their own for norms and rotations, or a compiler; the others are PyTorch code that runs operator
# by operator, unless a row says that it was compiled.
_FUSES = ("Megatron", "NeMo", "MaxText", "PaxML", "Composer", "Primus", "InternEvo", "OneFlow")
# NeMo fine-tunes on SQuAD, packed: some 200 tokens of context, question and answer.
_DOCUMENT = 256
_SLOW = ("deepep", "alltoall")
_NODE = 8  # devices that DeepEP's kernels within a node are made for
_MORE_MEMORY = 1.1  # times a device's, as there are of some kinds: what a row states is then taken
_DEEPSEEK_RANKS = (1536, 512, 64)  # of latent attention, where rows give only its kind
_VOCAB = 50304  # where a row states none: GPT-2's, padded
# But the zero-bubble fork of Megatron-LM takes a SentencePiece tokenizer (examples/pretrain_zero_bubble.sh), and its
# models have the sizes that they are called by (6.2, 14.6 and 28.3 billion) with 32,000 tokens and not with 50,304.
_VOCABULARIES = {"Megatron-LM fork": 32000}


class Unstated(ValueError):
    """A row that lacks what a job needs."""


class Overfull(ValueError):
    """A row whose software keeps more on a device than it has memory, before any plan."""


@dataclass(frozen=True)
class PublishedJob:
    """What :func:`partitioner.partition` takes for a row."""

    shape: Shape
    length: int
    precision: str
    topology: Topology
    constraints: Constraints
    profile: ExecutionProfile
    global_batch: int
    optimizer: str


def published_job(row: Row) -> PublishedJob:
    """The job of ``row``. Raises :class:`Unstated` where the row lacks a dimension or a size that it needs, and
    :class:`Overfull` where nothing of the device's memory is left for a plan."""
    row = completed(row)
    missing = [k for k in ("layers", "hidden", "heads", "seq_len", "gpu", "num_gpus", "gbs") if not row.get(k)]
    if missing:
        raise Unstated(f"does not state {', '.join(missing)}")
    if "mamba" in str(row.get("attention", "")):
        raise Unstated("is no decoder of attention alone")
    if _predicts_ahead(row):
        row = {**row, "layers": row["layers"] + 1, "n_moe_layers": (row.get("n_moe_layers") or row["layers"]) + 1}
    return PublishedJob(
        shape=_shape(row),
        length=row["seq_len"],
        precision=_precision(row),
        topology=_topology(row),
        constraints=constraints_of(row),
        profile=profile_of(row),
        global_batch=row["gbs"],
        optimizer="none" if row.get("task") == "layer_microbench" else "adamw",
    )


def _shape(row: Row) -> Shape:
    hidden, heads = row["hidden"], row["heads"]
    latent = row.get("attention") == "mla"
    experts = row.get("experts") or 0
    dense, every = _dense_layers(row) if experts else (0, 1)
    fused = not row.get("framework", "").startswith(_UNFUSED) and "no flash" not in row.get("notes", "")
    ranks = _DEEPSEEK_RANKS if latent else (0, 0, 0)
    head_dim = row.get("head_dim") or hidden // heads
    return Shape(
        layers=row["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=row.get("kv_heads") or heads,
        head_dim=head_dim - ranks[2] if latent else head_dim,
        ffn=row.get("ffn") or 4 * hidden,
        vocab=0 if row.get("task") == "layer_microbench" else _vocabulary(row),
        gated=bool(row.get("gated_ffn")),
        tied=bool(row.get("tied_embeddings")),
        fused_attention=fused,
        document=_DOCUMENT if row.get("task") in ("sft", "lora") and row["seq_len"] % _DOCUMENT == 0 else 0,
        experts=experts,
        topk=row.get("topk") or 0,
        moe_ffn=row.get("moe_ffn") or row.get("ffn") or 0,
        shared_ffn=row.get("shared_ffn") or 0,
        dense_layers=dense,
        expert_every=every,
        q_rank=ranks[0],
        kv_rank=ranks[1],
        rope_dim=ranks[2],
        float_loss=is_of(row, _UNFUSED) or not is_of(row, _FUSES),  # their default, and how PyTorch code has it
        adapters=16 if row.get("task") == "lora" else 0,
        rotary=bool(row.get("gated_ffn")),
        ahead=_predicts_ahead(row),
        head_norm=str(row.get("model")).lower().startswith(HEAD_NORMS),
        plain=not is_of(row, _FUSES) and (prices_fused_kernels(row) or not is_compiled(row)),
        # Megatron-Core's head is no module of Transformer Engine (Megatron-LM, deepseek-v3-gb200-optimization, section
        # 1), torchtitan leaves its own out (``filter_fqns=["output"]``)
        outer_16=_precision(row) == "fp8",
        repeated=_repeats_keys(row),
        expert_bias=str(row.get("model")).lower().startswith(EXPERT_BIASES) and expert_kernels_of(row) == "each",
    )


def _repeats_keys(row: Row) -> bool:
    """Whether ranks exchange keys and values that are repeated for each query head: torchtitan's Llama of 2024 repeats
    them in the model (``repeat_kv``), and attention over ``cp`` takes the place of the operator behind that."""
    return (row.get("cp") or 1) > 1 and is_of(row, ("torchtitan",)) and "202412" in str(row.get("source"))


def _predicts_ahead(row: Row) -> bool:
    """Whether a row trains a layer that predicts one more token (multi-token prediction): where it says so, and in
    Megatron-Bridge's recipes of DeepSeek-V3 (``mtp_num_layers=1``)."""
    said = f"{flags_of(row)} {row.get('notes') or ''}"
    recipe = "deepseek-v3" in str(row.get("model")).lower() and is_of(row, ("NeMo/Megatron-Bridge",))
    return "no MTP" not in said and (recipe or "MTP 1" in said)


def _dense_layers(row: Row) -> tuple[int, int]:
    """How many layers come before those with experts, and every which of the others has them: where rows state only
    how many have, evenly spread if that comes out even (Llama 4), else the last ones (DeepSeek)."""
    layers, having = row["layers"], row.get("n_moe_layers") or row["layers"]
    return (layers - having, 1) if layers % having else (0, layers // having)


def _vocabulary(row: Row) -> int:
    """Rows of the embedding: Megatron-LM and what is built on it pad it to a multiple of 128 for each rank of ``tp``
    (``make_vocab_size_divisible_by``)."""
    stated = row.get("vocab") or _VOCABULARIES.get(str(row.get("framework")), _VOCAB)
    tp = row.get("tp") or 1
    configured = "vocab 50257" in row.get("notes", "") and "per repo config" in row["notes"]  # as it was run, unpadded
    multiple = 128 * tp if is_of(row, PADS) and (not configured or stated % tp) else 1
    return -(-stated // multiple) * multiple


def _precision(row: Row) -> str:
    stated = str(row.get("precision") or "bf16")
    name = next((p for p in ("fp8", "bf16", "fp16", "fp32") if p in stated), "bf16")
    return "fp16" if name == "bf16" and str(row["gpu"]).startswith("V100") else name


def _topology(row: Row) -> Topology:
    known = _known(row)
    if known is None:
        return _machine(row)
    kind, inside, between = known
    between = next((link for name, link in NETWORKS.items() if name in str(row.get("inter_link"))), between)
    links = {**_catalogue("links"), **MESHES}
    domain = min(row["num_gpus"], row.get("nvlink_domain") or row.get("gpus_per_node") or 8)
    per_node = max(d for d in range(1, domain + 1) if row["num_gpus"] % d == 0)  # 64 of 72 where that divides
    count = row["num_gpus"] // per_node
    own = {**links[inside], **_dispatched(row, domain)}
    levels = [{"name": inside, "nodes": 1, **own}] if per_node > 1 else []
    if count > 1:
        network = dict(links[between])
        stated = _network(str(row.get("inter_link") or ""), row.get("gpus_per_node") or 8)
        if stated:
            network["bandwidth"] = stated
        levels.append({"name": between, **network})
    return Topology(
        name=f"{count} x {per_node} {kind}",
        nodes=({"type": kind, "devices": per_node, "count": count},),
        types={kind: _device(row, kind)},
        levels=levels,
    )


def _dispatched(row: Row, domain: int) -> dict[str, Any]:
    """What DeepEP reaches of an NVLink domain of more than eight devices, for which it was not made: of 900 GB/s, 400
    ahead and 190 back, 258 on average; and NCCL's all-to-all, over which it was no faster (Megatron-LM,
    deepseek-v3-gb200-optimization, section 2.2.1)."""
    return {"efficiency": 258 / 900} if row.get("dispatcher") in _SLOW and domain > _NODE else {}


_catalogue = cache(catalogue)


def _known(row: Row) -> tuple[str, str, str] | None:
    """The entry of the row's device, or of one that is called alike, of as much memory if there is one."""
    alike = [name for name in DEVICES if re.split(r"[- ]", name)[0] == re.split(r"[- _]", row["gpu"])[0]]
    sized = [name for name in alike if f"-{row.get('gpu_mem_gb')}GB" in name]
    found = row["gpu"] if row["gpu"] in DEVICES else next(iter(sized or alike), None)
    return DEVICES[found] if found is not None else None


def _machine(row: Row) -> Topology:
    """Topology of a known machine, named by the row's GPU, with as many nodes as the row's devices fill."""
    known = {_letters(name): name for name in _catalogue("machines")}
    if _letters(row["gpu"]) not in known:
        raise Unstated(f"is on {row['gpu']}, which is not known here")
    name = known[_letters(row["gpu"])]
    return Topology.preset(name, nodes=-(-row["num_gpus"] // Topology.preset(name, nodes=1).num_devices))


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def copies_of_gradients(row: Row) -> float:
    """Bytes that DeepSpeed's ZeRO 1 and 2 of 2021 take while gradients are reduced: a flat copy of a rank's gradients,
    and that of NCCL's reduce-scatter of a list of tensors."""
    if "DeepSpeed" not in row.get("framework", "") or row.get("zero_stage") not in (1, 2):
        return 0.0
    return 2 * 2 * row.get("params_b", 0.0) * 1e9 / ((row.get("pp") or 1) * (row.get("tp") or 1))


def _device(row: Row, kind: str) -> dict[str, Any]:
    """The device, with what the row says of its memory and its power, and the attention that its framework had."""
    found = _catalogue("devices")[kind]
    copies = copies_of_gradients(row)
    found = {**found, "reserved": int(parse_quantity(found["reserved"]) + copies)}
    if 1e9 * (row.get("gpu_mem_gb") or 0) > _MORE_MEMORY * parse_quantity(found["memory"]):
        found["memory"] = f"{row['gpu_mem_gb']} GB"
    if found["reserved"] >= parse_quantity(found["memory"]):
        raise Overfull(
            f"copies of gradients of {copies / 1e9:.1f} GB and {(found['reserved'] - copies) / 1e9:.1f} GB of {kind}'s "
            f"own leave nothing of its {parse_quantity(found['memory']) / 1e9:.1f} GB; expected more ranks of tp or pp"
        )
    notes = str(row.get("notes"))
    if stated := re.search(r"([\d.]+) TB/s", notes):
        found["memory_bandwidth"] = f"{stated[1]} TB/s"
    if (stated := re.search(r"(\d+) W power limit", notes)) and "power_busy" in found:
        found["power_limit"] = f"{stated[1]} W"
    return {**found, **_attention(row)}


def _attention(row: Row) -> dict[str, Any]:
    """What the attention of the row's framework reaches, where that is not what the hardware file says."""
    framework = str(row.get("framework"))
    kernel = next((kernel for name, kernel in _ATTENTION.items() if framework.startswith(name)), "flash-2")
    reached = next((share for name, share in _KERNELS[kernel].items() if row["gpu"].startswith(name)), None)
    if reached is None:
        return {}
    # in lengths all of these are alike; in widths of heads FlashAttention is, which has 0.88 with 64 on H100
    alike = _catalogue("devices")["a100-80gb"]
    curves = ("attention_lengths", "attention_widths") if kernel.startswith("flash") else ("attention_lengths",)
    return {"attention_efficiency": reached, **{name: alike[name] for name in curves}}


def _network(text: str, per_node: int) -> float:
    """Bytes/s per device of a network as rows describe it; 0 where they do not."""
    if found := re.search(r"([\d.]+)\s*GB/s per GPU", text):
        return float(found[1]) * 1e9
    if found := re.search(r"(\d+)\s*x\s*(?:HDR\s*|NDR\s*)?(\d+)\s*Gb/s", text) or re.search(r"(\d+) Gb/s x(\d+)", text):
        return float(found[1]) * float(found[2]) * 1e9 / 8 / per_node
    if found := re.search(r"(\d+)\s*Gb/s[^,]*per node", text):
        return float(found[1]) * 1e9 / 8 / per_node
    return 0.0


def with_seconds(row: Row) -> Row:
    """``row``, which states a rate of the model's FLOPs, with the seconds of a step that it comes to.

    FLOPs: six for each weight of a product and token, and for all of attention's scores, as these rows count them.
    """
    heads, kv_heads = row["heads"], row.get("kv_heads") or row["heads"]
    width, gated = row.get("head_dim") or row["hidden"] // heads, bool(row.get("gated_ffn"))
    weights = product_weights(
        row["layers"], row["hidden"], (heads * width, kv_heads * width), row["ffn"], row["vocab"], gated
    )
    scores = 2 * row["layers"] * heads * width * row["seq_len"]
    flops = 6.0 * row["gbs"] * row["seq_len"] * (weights + scores)
    return {**row, "step_time_s": flops / (1e12 * row["tflops_per_gpu"] * row["num_gpus"])}


def states_a_rate(row: Row) -> bool:
    """Whether :func:`with_seconds` can say what a step of a row takes that does not say it itself."""
    stated = ("tflops_per_gpu", "layers", "hidden", "heads", "ffn", "vocab", "gbs", "seq_len", "tp", "num_gpus")
    plain = str(row.get("tflops_convention")).startswith("model") and not row.get("experts")
    return "step_time_s" not in row and not row.get("oom") and plain and all(row.get(k) for k in stated)
