"""Find reads by indices that belong to the original batch, by which a model reads one element of each sample.

An example is the index of the last token before padding. Such a read never returns a padded element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from partitioner.passes.padding.compare import get_operator_name
from partitioner.passes.padding.values import DimPart, PaddedValue
from partitioner.passes.rules.factors import get_meta_tensor, get_node_argument, normalize_dim, operands_of

_INDEXED = ("index", "_unsafe_index")
_GATHERED = ("gather", "index_select")


def find_lowest(node: fx.Node, operands: Sequence[PaddedValue]) -> float | None:
    """Return a lower bound of the elements of the result of the pointwise operator ``node``; ``None`` if none is known.
    ``operands``: the :class:`PaddedValue` of each operand."""
    if get_meta_tensor(node).dtype == torch.bool:
        return 0.0
    lowest = [o.lowest for o in operands]
    if get_operator_name(node) == "mul" and len(lowest) == 2 and all(n is not None and n >= 0 for n in lowest):
        return 0.0
    return None


def propagate_argmax(node: fx.Node, operands: Sequence[PaddedValue]) -> PaddedValue | None:
    """Return the :class:`PaddedValue` of the result of the ``argmax`` node ``node``: which dims grow if the batch is
    padded, and which value padded elements have. If the ``argmax`` may find a padded element, return ``None``: the
    caller then uses the operator's sharding rule.

    The ``argmax`` never finds a padded element if the value of padded elements is a lower bound of all elements: padded
    elements come last, and of several largest elements the first one is found. ``operands``: the :class:`PaddedValue`
    of the operand, as a sequence of one.
    """
    (x,) = operands
    if not isinstance(given := get_node_argument(node, "dim", None), int):
        return None
    dim = normalize_dim(given, len(x.dims))
    part = x.growing_part(dim)
    if part is None or part.fill is None or x.lowest is None or part.fill > x.lowest:
        return None
    keep = get_node_argument(node, "keepdim", False)
    dims = [(DimPart(1),) if d == dim else parts for d, parts in enumerate(x.dims) if keep or d != dim]
    kept = tuple(tuple(replace(p, fill=None) for p in parts) for parts in dims)
    return PaddedValue(kept, x.fault, lowest=0.0, real_places=True)


def fix_read_dims(node: fx.Node, operands: Sequence[PaddedValue]) -> Sequence[PaddedValue]:
    """Return ``operands`` with one change for the operator ``node``, which reads its first operand at indices along
    some dims: if the indices along a dim are known to belong to the original batch, this dim of the first operand
    counts as fixed, because no padded element is read. ``operands``: the :class:`PaddedValue` of each operand of
    ``node``."""
    name, read = get_operator_name(node), operands_of(node)
    if name not in (*_INDEXED, *_GATHERED) or not any(o.real_places for o in operands):
        return operands
    known = dict(zip(read, operands, strict=True))
    if name in _INDEXED:
        indices = get_node_argument(node, "indices")
    else:
        dim = normalize_dim(get_node_argument(node, "dim"), len(operands[0].dims))
        indices = [None] * dim + [get_node_argument(node, "index")]
    dims = list(operands[0].dims)
    for d, index in enumerate(indices):
        if isinstance(index, fx.Node) and known[index].real_places and operands[0].growing_part(d) is not None:
            dims[d] = tuple(DimPart(part.size) for part in dims[d])
    known[read[0]] = replace(operands[0], dims=tuple(dims), counts=None, causal=None, distance=None)
    return [known[operand] for operand in read]
