"""Switch generation (key/value) caches off, and decide whether forward computes the same without them.

If ``use_cache`` is set in a configuration, forward keeps keys and values for the next call of generation. A training
step has no such call, so the cache is redundant unless something else depends on it: some models mask padding only if
they make no cache.

:func:`do_caches_matter` runs forward once without caches and once with them. It gives every tensor an integer
identifier that stands for the operations that computed it. If the results of the two runs have different identifiers,
the caches matter, and the model is traced with them. Inputs and weights are fake tensors. Tensors that depend on
neither have real values (up to a size), so that forward can read them, and are identified by their values. Of equal
layers only one is run; the results of the others are identified by their operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from partitioner.passes.ir.model import leaf_paths
from partitioner.passes.trace.layer_equality import ModuleGroup, build_value_key, find_equal_layers, tensor_spec

_MIN_GROUP_SIZE = 2  # fewest equal modules of which only one is run
# Functions whose result has the values of their first operand.
_SAME = frozenset({Tensor.contiguous, Tensor.clone, torch.clone, Tensor.detach, torch.detach})
_CONCATENATIONS = frozenset({torch.cat, torch.concat, torch.concatenate})
_WRITES = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__"})
_MOST_NUMBERS = 1 << 22  # most elements of a tensor that keeps real values
_MAX_IDENTIFIED_ELEMENTS = 1 << 16  # most elements of a tensor that is identified by its values


def switch_caches_off(model: nn.Module) -> tuple[Any, ...]:
    """Set ``use_cache`` to False in all configuration objects in the modules of ``model``. Return a tuple of the
    configuration objects in which it was True."""
    found = []
    for module in model.modules():
        config = getattr(module, "config", None)
        nested = [v for v in vars(config).values() if hasattr(v, "use_cache")] if hasattr(config, "__dict__") else []
        for part in (config, *nested):
            if getattr(part, "use_cache", False) is True:
                part.use_cache = False
                found.append(part)
    return tuple(found)


def do_caches_matter(model: nn.Module, mode: FakeTensorMode, configs: Sequence[Any], run: Callable[[], Any]) -> bool:
    """Return whether the results of ``model`` depend on whether its forward fills caches of keys and values for
    generation. Forward is run with and without caches on fake tensors, and the results are compared by the operations
    that compute them.

    Args:
        model: the model.
        mode: the fake tensor mode of the model's tensors.
        configs: configuration objects in which ``use_cache`` was set to False.
        run: calls forward, and returns its result or the exception that it raises. If both runs raise exceptions of the
            same type, their last calls of torch functions are compared instead of results.
    """
    names: dict[Any, int] = {}
    for groups in (find_equal_layers(model, _MIN_GROUP_SIZE), []):
        without, last = _name_output_tensors(model, groups, _TensorNamingMode(mode, names), run)
        with _enable_caches(configs):
            result, also = _name_output_tensors(model, groups, _TensorNamingMode(mode, names), run)
        if isinstance(without, dict) and isinstance(result, dict):
            return any(result.get(path) != name for path, name in without.items())
        if isinstance(without, Exception) and isinstance(result, Exception):
            return type(without) is type(result) and last != also
        # Only one run failed: perhaps a layer reads what another layer stores, which was not run. Try again with all
        # layers.
    return isinstance(without, Exception)


@contextmanager
def _enable_caches(configs: Sequence[Any]) -> Iterator[None]:
    """Return a context in which ``use_cache`` is True in all the configuration objects ``configs``. It is False after
    the context."""
    for config in configs:
        config.use_cache = True
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = False


def _name_output_tensors(
    model: nn.Module, groups: Sequence[ModuleGroup], named: _TensorNamingMode, run: Callable[[], Any]
) -> tuple[dict[Any, int] | Exception, Any]:
    """Run a model's forward and identify its results by the operations that computed them. Return two values. The first
    is a dict: path of an output tensor in the result -> integer; integers are equal for tensors that were computed by
    the same operations. If forward raised an exception, the first value is the exception instead. The second is a
    hashable key of the last torch function that forward called and of its arguments.

    Args:
        model: the model.
        groups: groups of equal modules, of which only one member is run.
        named: the torch function mode that gives tensors these integers.
        run: calls forward, and returns its result or the exception that it raises.
    """
    for place, tensor in enumerate([*model.parameters(), *model.buffers()]):
        named.assign_id(tensor, ("state", place))
    with _reuse_equal_calls(groups, named), named:
        output = run()
    if isinstance(output, Exception):
        return output, named.last
    with torch._C.DisableTorchFunction():
        return {path: named.get_id(leaf) for path, leaf in leaf_paths(output) if isinstance(leaf, Tensor)}, named.last


@contextmanager
def _reuse_equal_calls(groups: Sequence[ModuleGroup], named: _TensorNamingMode) -> Iterator[None]:
    """Return a context that makes a run of a model faster. Of the calls of equal modules with arguments of the same
    shapes and types, only the first is run. Every other call returns new tensors of the same shapes as the first; their
    identifiers depend on the call's operands.

    ``groups``: the groups of equal modules. ``named``: the mode that gives every tensor an identifier.
    """
    try:
        for group in groups:
            first: dict[Any, Any] = {}
            for module in group.members:
                module.__dict__["forward"] = functools.partial(_run_once_per_kind, named, first, module, module.forward)
        yield
    finally:
        for group in groups:
            for module in group.members:
                module.__dict__.pop("forward", None)


def _run_once_per_kind(
    named: _TensorNamingMode,
    first: dict[Any, Any],
    module: nn.Module,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call ``forward`` of ``module`` with ``args`` and ``kwargs`` and return its result. If an equal module was called
    before with arguments of the same shapes and types, do not call ``forward``, but return new tensors of the shapes of
    the earlier result. The identifiers of the new tensors depend on the operands.

    ``first``: key of the shapes and types of arguments -> result of the first call; a first call is added to it.
    ``named``: the mode that gives every tensor an identifier.
    """
    with torch._C.DisableTorchFunction():
        leaves, tree = pytree.tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        kind = repr([tensor_spec(leaf) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]), repr(tree)
    if kind not in first:
        first[kind] = forward(*args, **kwargs)
        return first[kind]
    with torch._C.DisableTorchFunction():
        operands = tuple(named.get_id(tensor) for tensor in given)

        def like(place: int, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return named.assign_id(torch.empty_like(leaf), ("layer", id(module), operands, place))

        values, tree = pytree.tree_flatten(first[kind])
        return pytree.tree_unflatten([like(place, leaf) for place, leaf in enumerate(values)], tree)


class _TensorNamingMode(TorchFunctionMode):
    """Torch function mode that gives every tensor an integer identifier. Two tensors have the same identifier if they
    were computed by the same operations from the same tensors.

    ``mode``: the fake tensor mode of the model's tensors. ``names``: hashable key of a computation -> identifier of its
    result; two runs of a model whose results are compared share this dict. ``last``: a key of the last call of a torch
    function.
    """

    def __init__(self, mode: FakeTensorMode, names: dict[Any, int]) -> None:
        """Start with no tensor identified. ``mode``: the fake tensor mode of the model's tensors. ``names``: key of a
        computation -> identifier of its result; new identifiers are added to this dict."""
        super().__init__()
        self.mode, self.names = mode, names
        self.last: Any = None  # key of the last call of a torch function
        self._by_id: dict[int, int] = {}
        self._held: list[Tensor] = []  # tensors that are kept alive, so that their ids are not reused
        self._written: dict[int, int] = {}  # memory -> identifier of what was written to it
        self._instead: dict[int, Tensor] = {}  # id of a tensor with values -> the fake tensor that replaces it

    def assign_id(self, tensor: Tensor, key: Any) -> Tensor:
        """Give ``tensor`` an integer identifier if it has none, and return ``tensor``. If the tensor is small and has
        real values, the identifier stands for these values; otherwise for ``key``, a key of the computation of the
        tensor."""
        if id(tensor) not in self._by_id:
            self._held.append(tensor)
            self._by_id[id(tensor)] = self._assign_key_number(_read_small_tensor(tensor) or key)
        return tensor

    def get_id(self, tensor: Tensor) -> int:
        """Return the integer identifier of ``tensor``, which stands for the computation of its present values. If a
        call has written in place to its memory, the identifier depends on this call, too. A tensor of unknown origin
        gets an identifier of its own."""
        self.assign_id(tensor, ("other", id(tensor)))
        name, written = self._by_id[id(tensor)], self._written.get(_identify_storage(tensor))
        return name if written is None else self._assign_key_number((name, written))

    def _assign_key_number(self, key: Any) -> int:
        """Return the integer identifier for ``key``, a hashable key of a computation; equal keys get equal integers."""
        return self.names.setdefault(key, len(self.names))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the torch function ``func`` with ``args`` and ``kwargs`` and return its result. The function runs on
        tensors with real values if all operands have them, otherwise on fake tensors. New tensors, and tensors to which
        the function has written, get new identifiers. ``types`` is not used."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            if self._instead:
                args, kwargs = pytree.tree_map_only(Tensor, lambda t: self._instead.get(id(t), t), (args, kwargs))
            operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            versions = [tensor._version for tensor in operands]
            self.last = asked = func, self._build_argument_key(args), self._build_argument_key(kwargs)
            if not any(isinstance(tensor, FakeTensor) for tensor in operands):
                result = self._call_with_values(func, args, kwargs)
            else:
                if _is_in_place_function(func) and not isinstance(operands[0], FakeTensor):
                    args = (self._replace_by_fake(operands[0], asked), *args[1:])
                with self.mode:  # intermediate tensors need no identifiers
                    result = func(*args, **kwargs)
            changed = [t for t, version in zip(operands, versions, strict=True) if t._version != version]
            for memory in {_identify_storage(tensor) for tensor in changed}:
                self._written[memory] = self._assign_key_number((self._written.get(memory), asked))
            source = _find_value_source(func, args, result)
            for place, made in enumerate(pytree.tree_leaves(result)):
                if isinstance(made, Tensor):
                    self.assign_id(made, (asked, place)) if source is None else self._record_same_numbers(made, source)
        return result

    def _call_with_values(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``func`` with ``args`` and ``kwargs``, whose tensors have real values, and return the result. If a
        result would be too large, return fake tensors, which have no values."""
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        try:
            given, named = pytree.tree_map_only(Tensor, self._make_fake_tensor, (args, kwargs))
            with self.mode:
                shape = func(*given, **named)
        except Exception:  # the function reads values of tensors
            return func(*args, **kwargs)
        large = any(isinstance(t, Tensor) and t.numel() > _MOST_NUMBERS for t in pytree.tree_leaves(shape))
        return shape if large else func(*args, **kwargs)

    def _make_fake_tensor(self, tensor: Tensor) -> Tensor:
        return self.mode.from_tensor(tensor, static_shapes=True)

    def _replace_by_fake(self, tensor: Tensor, asked: Any) -> Tensor:
        """Return a fake copy (without values) of ``tensor``, which replaces ``tensor`` in all later calls. This is
        needed before a call of a torch function writes unknown values into ``tensor``. ``asked``: a key of this call;
        the new identifiers of the copy and of other views of the memory depend on it."""
        fake = self._make_fake_tensor(tensor.clone())
        self._held.append(fake)
        self._by_id[id(fake)] = self.get_id(tensor)
        self._instead[id(tensor)] = fake
        # the write also changes views of the memory
        for memory in (_identify_storage(fake), _identify_storage(tensor)):
            self._written[memory] = self._assign_key_number((self._written.get(memory), asked))
        return fake

    def _record_same_numbers(self, result: Tensor, source: Tensor) -> None:
        """Give the tensor ``result`` the identifier of the tensor ``source``, because both have equal values."""
        if id(result) not in self._by_id:
            self._held.append(result)
            self._by_id[id(result)] = self.get_id(source)

    def _build_argument_key(self, value: Any) -> Any:
        """Return a hashable key of ``value``, an argument of a torch function, that is equal for equal arguments in
        two runs of a model."""
        return build_value_key(value, lambda tensor: ("tensor", self.get_id(tensor)))


def _find_value_source(func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> Tensor | None:
    """If the result of a call of the torch function ``func`` has the same values as one of its operands, return this
    operand; otherwise return ``None``. Examples are a clone, and a concatenation of one tensor with empty ones.
    ``args``: the arguments of the call. ``result``: its result."""
    first: Any = args[0] if args else None
    if func in _SAME and isinstance(first, Tensor):
        return first
    if func in _CONCATENATIONS and isinstance(first, tuple | list):
        filled: list[Tensor] = [part for part in first if part.numel()]
        if len(filled) == 1 and filled[0].shape == result.shape and filled[0].dtype == result.dtype:
            return filled[0]
    return None


def _read_small_tensor(tensor: Tensor) -> Any:
    """Return (dtype, shape, values as bytes) of a small tensor; ``None`` if ``tensor`` is large or has no values."""
    if (
        isinstance(tensor, FakeTensor)
        or type(tensor) is not Tensor
        or tensor.numel() > _MAX_IDENTIFIED_ELEMENTS
        or tensor.is_meta
    ):
        return None
    numbers = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), numbers


def _is_in_place_function(func: Callable[..., Any]) -> bool:
    """Return whether the torch function ``func`` writes to its first operand in place, judged by its name."""
    name = getattr(func, "__name__", "")
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def _identify_storage(tensor: Tensor) -> int:
    """Return an integer that identifies the memory of ``tensor``; tensors that share their memory have the same
    integer."""
    return int(tensor.untyped_storage()._cdata)
