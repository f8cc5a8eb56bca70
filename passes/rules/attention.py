"""Attention."""

from __future__ import annotations

from torch import fx

from passes.rules.algebra import NAMES, OpFactors, argument, everything_whole, operands_of, results_of, shape
from passes.rules.registry import family


@family(
    "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
)  # fmt: skip
def attention(node: fx.Node) -> OpFactors:
    """Batch dims and heads may be sharded, and query positions where no position is masked by its number.

    With grouped queries (``enable_gqa``) a query head is (kv rep): kv groups of rep heads that share one key head.
    The fused kernels also return the logarithms of the softmax's sums, and their random state.
    """
    if argument(node, "dropout_p"):
        return everything_whole(node)
    query, key, value, *mask = operands_of(node)
    rank = len(shape(query))
    batch: list[tuple[str, ...]] = [(n,) for n in NAMES[: rank - 2]]
    kv_batch = list(batch)
    sizes = dict(zip(NAMES, shape(query)[: rank - 2], strict=False))
    heads, kv_heads = (shape(query)[-3], shape(key)[-3]) if rank > 2 else (1, 1)
    if heads != kv_heads and rank > 2:
        sizes.update({batch[-1][0]: kv_heads, "rep": heads // kv_heads})
        batch[-1] = (*batch[-1], "rep")
    sizes.update(q=shape(query)[-2], k=shape(key)[-2], d=shape(query)[-1], v=shape(value)[-1])
    whole = {"k", "d", "v"} | ({"q"} if argument(node, "is_causal") else set())
    patterns = [[*batch, ("q",), ("d",)], [*kv_batch, ("k",), ("d",)], [*kv_batch, ("k",), ("v",)]]
    patterns += [[*batch, ("q",), ("k",)][rank - len(shape(m)) :] for m in mask]
    operands = tuple(
        tuple(f if size > 1 else () for f, size in zip(pattern, shape(o), strict=True))
        for pattern, o in zip(patterns, operands_of(node), strict=True)
    )
    result, *others = results_of(node)
    made = tuple(f if size > 1 else () for f, size in zip([*batch, ("q",), ("v",)], result.shape, strict=True))
    if others:
        whole.add("q")  # kernels pad the positions of their sums
    sums = tuple((*made[:2], *((),) * (r.dim() - 2)) if r.dim() > 2 else ((),) * r.dim() for r in others)
    return OpFactors(sizes, operands, (made, *sums), frozenset(whole))
