"""Write new keys or values into the static cache of an attention, in place.

The cache ``[batch, heads, length, d]`` is an input of a program that generates text. The operator writes ``new``
``[batch, heads, positions, d]`` at the positions from ``start`` on, and returns the cache itself. Graphs treat the
operator as a function without side effects. This is correct because no other operator reads the cache before the write.
"""

from __future__ import annotations

import torch
from torch import Tensor

from partitioner.passes.ir.collectives import NAMESPACE, _library

CACHE_DIM = 2  # the dim of positions of a cache [batch, heads, length, d]


def _write_on_cpu(cache: Tensor, new: Tensor, start: Tensor) -> Tensor:
    cache.narrow(CACHE_DIM, int(start), new.shape[CACHE_DIM]).copy_(new)
    return cache


def _write_on_cuda(cache: Tensor, new: Tensor, start: Tensor) -> Tensor:
    """Write ``new`` ``[batch, heads, positions, d]`` into the key or value cache ``cache`` ``[batch, heads, length,
    d]``, in place, and return ``cache``. ``start``: the first position to write, a 0-dimensional tensor. It is not read
    on the host, because this would wait for the device."""
    cache.index_copy_(CACHE_DIM, torch.arange(new.shape[CACHE_DIM], device=cache.device) + start, new)
    return cache


_library.define("write_cache(Tensor cache, Tensor new, Tensor start) -> Tensor")
_library.impl("write_cache", _write_on_cpu, "CPU")
_library.impl("write_cache", _write_on_cuda, "CUDA")
torch.library.register_fake(
    f"{NAMESPACE}::write_cache", lambda cache, new, start: torch.empty_like(cache), lib=_library
)
write_cache = torch.ops.partition.write_cache.default
