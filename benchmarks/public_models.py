"""Dimensions of public models, for rows that state how much work a token is but not of which model."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

_KEYS = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "gated_ffn", "tied_embeddings")
# Source: the configurations that NVIDIA's NeMo 24.07 ships for the models of its performance summary.
_MODELS: dict[str, tuple[int, int, int, int, int, int, bool, bool]] = {
    "gpt3-5b": (24, 4096, 32, 32, 16384, 51200, False, True),
    "gpt3-20b": (44, 6144, 48, 48, 24576, 51200, False, True),
    "gpt3-175b": (96, 12288, 96, 96, 49152, 51200, False, True),
    "llama2-7b": (32, 4096, 32, 32, 11008, 32000, True, False),
    "llama2-13b": (40, 5120, 40, 40, 13824, 32000, True, False),
    "llama2-70b": (80, 8192, 64, 8, 28672, 32000, True, False),
    "llama3-8b": (32, 4096, 32, 8, 14336, 128256, True, False),
    "llama3-70b": (80, 8192, 64, 8, 28672, 128256, True, False),
    "nemotron-8b": (32, 4096, 32, 32, 16384, 256000, False, False),
    "nemotron-15b": (32, 6144, 48, 8, 24576, 256000, False, False),
    "nemotron-22b": (40, 6144, 48, 48, 24576, 256000, False, False),
    "nemotron-340b": (96, 18432, 96, 8, 73728, 256000, False, False),
}
# Families whose public configurations norm the heads of queries and keys (Qwen3 technical report, arXiv 2505.09388).
HEAD_NORMS = ("qwen3",)
# Families whose public configurations have biases in their experts' products (OpenAI, gpt-oss model card).
# Megatron-Core adds them to each expert's rows by the weights of these, in float32 (``TEGroupedMLP._apply_bias``).
EXPERT_BIASES = ("gpt-oss",)
_NEAR = 0.02


def completed(row: Row) -> Row:
    """``row`` with the dimensions of the public model whose FLOPs per token are nearest to what its rates give; as it
    is where it states its dimensions or none is near."""
    rates = row.get("tflops_per_gpu"), row.get("tokens_per_s_per_gpu")
    if row.get("layers") or row.get("model") or not all(rates) or not row.get("seq_len"):
        return row
    stated = 1e12 * rates[0] / rates[1]
    found = {name: abs(flops_per_token(name, row) / stated - 1) for name in _MODELS}
    name = min(found, key=lambda n: found[n])
    if found[name] > _NEAR:
        return row
    return {**row, "model": name, **dict(zip(_KEYS, _MODELS[name], strict=True))}


def flops_per_token(name: str, row: Row) -> float:
    """FLOPs of the model per token: 6 for each weight of a product (4 where the base is frozen), and in pretraining
    all of attention's scores."""
    layers, hidden, heads, kv_heads, ffn, vocab, gated, _ = _MODELS[name]
    weights = product_weights(layers, hidden, (hidden, hidden * kv_heads / heads), ffn, vocab, gated)
    pretraining = row.get("task") == "pretrain"  # NeMo leaves scores out in fine-tuning
    scores = 2 * layers * hidden * int(row["seq_len"]) if pretraining else 0
    return (4 if row.get("task") == "lora" else 6) * (weights + scores)


def product_weights(layers: int, hidden: int, widths: tuple[float, float], ffn: int, vocab: int, gated: bool) -> float:
    """Weights of a dense decoder that are in products; ``widths``: of all queries together, and of all keys."""
    attention = 2 * hidden * sum(widths)
    return layers * (attention + (3 if gated else 2) * hidden * ffn) + hidden * vocab


__all__ = ["EXPERT_BIASES", "HEAD_NORMS", "completed", "flops_per_token", "product_weights"]
