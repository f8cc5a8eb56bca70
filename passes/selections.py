"""What forward selects, traced so that what is alike is seen to be alike, and losses that look at numbers.

``x[t > 0]`` and ``y[t > 0]`` have equally many rows, which torch.export does not see: each mask that is computed has a
number of rows of its own, and a loss of the two is refused. Inside :func:`selections_traced` masks that are computed
alike have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from passes.guards import node_of
from passes.known import memory_of, written_by
from passes.numbers import Numbers

_BY_MASK = frozenset(
    {
        Tensor.__getitem__, Tensor.__setitem__, Tensor.nonzero, torch.nonzero, Tensor.argwhere, torch.argwhere,
        torch.where, Tensor.index_put, Tensor.index_put_, torch.index_put,
    }
)  # fmt: skip
_BY_WHERE = frozenset({Tensor.masked_select, torch.masked_select})
_ANY_TYPE = frozenset({Tensor.nonzero, torch.nonzero, Tensor.argwhere, torch.argwhere, torch.where})


@contextmanager
def selections_traced() -> Iterator[None]:
    """Inside, masks that are computed alike select one number of rows."""
    with _Selections():
        yield


class _Selections(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.graph: fx.Graph | None = None  # of the trace that runs
        self.key = Numbers()
        self.counts: dict[int, Any] = {}  # by the number of a mask: how many rows it selects

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BY_WHERE:
            return self._by_where(*args, **kwargs)
        if func in _BY_MASK:
            return self._by_mask(func, args, kwargs)
        rule = _LOOKING.get(func)
        return func(*args, **kwargs) if rule is None else rule(func, *args, **kwargs)

    def _by_where(self, input: Tensor, mask: Tensor) -> Any:
        both = (input, mask) if input.shape == mask.shape else torch.broadcast_tensors(input, mask)
        return self._by_mask(Tensor.__getitem__, tuple(both), {})

    def _by_mask(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        masks = []
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, FakeTensor) and (tensor.dtype == torch.bool or func in _ANY_TYPE):
                key = self._key_of(tensor)
                if key is not None:
                    masks.append((tensor, key))
        for mask, key in masks:
            if key in self.counts and mask.nonzero_memo is None:
                mask.nonzero_memo = self.counts[key]
        made = func(*args, **kwargs)
        for mask, key in masks:
            if mask.nonzero_memo is not None:
                self.counts.setdefault(key, mask.nonzero_memo)
        return made

    def _key_of(self, mask: FakeTensor) -> int | None:
        """The same for masks that are computed alike of what is never written to; ``None``: that is not known."""
        node = node_of(mask)
        if node is None:
            return None
        if node.graph is not self.graph:
            self.graph, self.key, self.counts = node.graph, Numbers(), {}
        written = {memory_of(to) for other in node.graph.nodes for to in written_by(other)}
        return None if written and written.intersection(map(memory_of, _ancestors(node))) else self.key(node)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """``node``, and what it is computed from."""
    seen, waiting = {node}, [node]
    while waiting:
        before = [n for n in waiting.pop().all_input_nodes if n not in seen]
        seen.update(before)
        waiting += before
    return seen


# -- functions of torch that look at numbers ---------------------------------------------------------------------------


def _cross_entropy(func: Callable[..., Tensor], input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Of probabilities: torch looks whether there are rows before it averages."""
    plain = not _is_open(target) or not target.dtype.is_floating_point or kwargs.get("reduction", "mean") != "mean"
    if plain or len(args) > 1:
        return func(input, target, *args, **kwargs)
    return func(input, target, *args, **{**kwargs, "reduction": "none"}).mean()


def _logsumexp(func: Callable[..., Tensor], input: Tensor, dim: Any, keepdim: bool = False, **kwargs: Any) -> Tensor:
    """Torch looks whether there are rows."""
    if not _is_open(input) or kwargs:
        return func(input, dim, keepdim=keepdim, **kwargs)
    largest = input.detach().amax(dim, keepdim=True)
    largest = largest.masked_fill(largest.isinf(), 0)
    total = (input - largest).exp().sum(dim, keepdim=keepdim).log()
    return total + (largest if keepdim else largest.squeeze(dim))


def _gaussian_nll(func: Callable[..., Tensor], input: Tensor, target: Tensor, var: Any, **kwargs: Any) -> Tensor:
    """Torch looks whether a variance is negative, and raises an error; here the loss is then not a number."""
    if isinstance(var, Tensor):
        var = torch.where(var < 0, torch.nan, var)
    with mock.patch.object(torch, "any", return_value=False):
        return func(input, target, var, **kwargs)


def _is_open(tensor: Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


_LOOKING: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    F.gaussian_nll_loss: _gaussian_nll,
    torch.logsumexp: _logsumexp,
    Tensor.logsumexp: _logsumexp,
}
