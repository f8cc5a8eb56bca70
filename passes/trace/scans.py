"""Trace associative scans, such as the recurrence of a state-space model, as few operators on whole tensors.

``torch.associative_scan`` computes all prefixes of a sequence under an associative function. Traced here, it becomes a
number of operators that grows with the logarithm of the length (Blelloch 1990). transformers runs such a scan only
under a compiler that does not export. Otherwise it runs a Python loop over all positions, which a trace would unroll.
During the trace, its modules are therefore made to see an active compiler.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.utils import _pytree as pytree

_ANSWERS = {"is_torchdynamo_compiling": True, "is_torchdynamo_exporting": False}
_SCAN = "associative_scan"
# not by an import statement: torch has a function of the same path
scans = importlib.import_module(f"torch._higher_order_ops.{_SCAN}")


@contextmanager
def trace_scans(model: nn.Module) -> Iterator[None]:
    """Return a context in which ``torch.associative_scan`` runs as operators on whole tensors, and in which the modules
    of ``model`` that come from transformers scan in this way instead of by a Python loop over positions."""
    with ExitStack() as stack:
        # other versions of torch lack these functions
        if hasattr(scans, _SCAN) and hasattr(scans, "generic_associative_scan"):
            stack.enter_context(mock.patch.object(scans, _SCAN, _scan_whole_tensors))
            for file in {type(module).__module__ for module in model.modules()}:
                source = sys.modules.get(file)
                if source is not None and all(hasattr(source, name) for name in _ANSWERS) and _has_scan(source):
                    for name, answer in _ANSWERS.items():
                        stack.enter_context(mock.patch.object(source, name, functools.partial(bool, answer)))
        yield


@functools.cache
def _has_scan(source: ModuleType) -> bool:
    """Return whether the Python module ``source`` mentions associative scans."""
    try:
        return _SCAN in inspect.getsource(source)
    except OSError:  # the module has no source
        return False


def _scan_whole_tensors(
    combine_fn: Callable[[Any, Any], Any], xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
) -> Any:
    """Return the results of ``torch.associative_scan`` with the same arguments: each element of ``xs`` along ``dim`` is
    replaced by the combination of all elements up to it, or, if ``reverse`` is true, of it and all later elements.
    ``combine_fn``: an associative function of two elements. ``xs``: a tensor or a container of tensors.
    ``combine_mode``: a choice of kernels, which does not change the results."""
    leaves, spec = pytree.tree_flatten(xs)
    number, dim = len(leaves), dim % leaves[0].dim()

    def combine(*tensors: Tensor) -> Any:
        return combine_fn(*(pytree.tree_unflatten(list(part), spec) for part in (tensors[:number], tensors[number:])))

    given = [x.flip(dim) if reverse else x for x in leaves]
    found = scans.generic_associative_scan(combine, given, dim)
    return pytree.tree_unflatten([x.flip(dim) if reverse else x for x in found], spec)
