"""Find equal modules, which run the same operators on equal inputs, and hide their parameters from the tracer.

Two modules are equal if they have the same class, the same tree of submodules, parameters and buffers of the same
shapes, dtypes and flags, tied in the same way, no hooks, and equal attributes. An integer or text attribute may differ
between all members of a group (a layer's index or name). ``passes/trace/layer_reuse.py`` finds out during the trace
whether ``forward`` reads such an attribute.

The time of a trace grows with the number of the model's parameters. If a single operator replaces the call of a module
in the graph (``passes/trace/layer_reuse.py``), :class:`ParkedParameters` therefore removes the module's parameters
while the model is traced. If code looks for such a parameter meanwhile, :class:`ParkedParameterError` is raised, and
the model is traced with all parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_SPECIAL_ATTRIBUTES = ("_parameters", "_buffers", "_modules", "forward")  # compared separately, not as attributes

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format})
_EXACT = frozenset({type(None), bool, int, str, bytes})  # types of whose objects those with equal repr are equal

_Member = tuple[str, nn.Module, dict[tuple[str, str], Any]]  # name, module, its integer and text attributes


class NotEquivalent(Exception):
    """Raised if two modules of a model that should compute the same, or two calls of such modules, differ or cannot be
    compared."""


class UnreadableAttribute:
    """Placeholder for the value of a module attribute that differs between modules that should compute the same, so
    that forward must not read it. Every use except an ``is`` test raises :class:`NotEquivalent`. ``kept``: the
    attribute's real value."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept  # real value of the attribute

    def _refuse_attribute_use(self, *args: Any, **kwargs: Any) -> Any:
        """Raise :class:`NotEquivalent`. This method replaces every use of the attribute for which this placeholder
        stands. The arguments are not used."""
        raise NotEquivalent("forward reads an attribute that each layer has for itself")

    __getattr__ = __call__ = __bool__ = __int__ = __index__ = __float__ = __str__ = __repr__ = __format__ = (
        _refuse_attribute_use
    )
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __len__ = __iter__ = __getitem__ = (
        _refuse_attribute_use
    )
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __neg__ = __abs__ = (
        _refuse_attribute_use
    )
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = __contains__ = (
        _refuse_attribute_use
    )
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rshift__ = __invert__ = (
        _refuse_attribute_use
    )


@dataclass(frozen=True)
class ModuleGroup:
    """Modules of a model that compute the same with different weights, such as the decoder layers.

    ``members``: the modules. ``names``: the path of each member in the model. ``own_attributes``: the attributes whose
    values differ between the members, such as a layer's index, as (path of a submodule in the member, attribute name).
    """

    members: tuple[nn.Module, ...]
    names: tuple[str, ...]
    own_attributes: tuple[tuple[str, str], ...] = ()


def find_equal_layers(model: nn.Module, minimum: int) -> list[ModuleGroup]:
    """Return groups of equal modules that are in lists (``nn.ModuleList``, ``nn.Sequential``) of ``model``.
    ``minimum``: the smallest number of modules of a group.

    Modules are equal if they have the same class, submodules, attributes, and shapes of parameters and buffers. An
    integer or text attribute, such as an index, may have a different value in each module of a group.
    """
    counts: dict[int, int] = {}
    for name, _ in model.named_modules(remove_duplicate=False):
        module = model.get_submodule(name)
        counts[id(module)] = counts.get(id(module), 0) + 1
    found: dict[Any, list[_Member]] = {}
    for name, module in model.named_modules():
        if not name.rpartition(".")[2].isdigit() or not _is_layer(module):
            continue
        if any(counts[id(m)] > counts[id(module)] or id(m) == id(model) for m in module.modules()):
            continue  # it shares a submodule with another module
        try:
            described = describe_layer_module(module)
        except NotEquivalent:
            continue
        found.setdefault(described.key, []).append((name, module, described.texts))
    groups: list[ModuleGroup] = []
    for members in found.values():
        groups += _split_by_own_attributes(members, minimum)
    return groups


def _split_by_own_attributes(members: Sequence[_Member], minimum: int) -> Iterable[ModuleGroup]:
    """Split ``members``, modules that are equal except for integer and text attributes, into groups, and yield each
    group of at least ``minimum`` modules. Within a group, an attribute, such as a layer's index, either has a different
    value in each member or the same value in all.

    ``members``: each as (name, module, values of its integer and text attributes by (submodule path, attribute name)).
    """
    if len(members) < minimum:
        return
    own = []
    for place in members[0][2]:
        values = [repr(texts[place]) for _, _, texts in members]
        if len(set(values)) == len(values):
            own.append(place)
    rest: dict[Any, list[tuple[str, nn.Module]]] = {}
    for name, module, texts in members:
        key = tuple((type(v), v) for place, v in texts.items() if place not in own)
        rest.setdefault(key, []).append((name, module))
    for found in rest.values():
        if len(found) >= minimum:
            yield ModuleGroup(tuple([m for _, m in found]), tuple([n for n, _ in found]), tuple(own))


def _is_layer(module: nn.Module) -> bool:
    """Return whether ``module`` has parameters and is not just a single operator of ``torch.nn``, such as
    ``nn.Linear``."""
    single = type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None
    return not single and next(module.parameters(), None) is not None


def has_call_hooks(module: nn.Module) -> bool:
    """Return whether a hook of any kind is registered on ``module`` or on one of its submodules."""
    return any(value for m in module.modules() for name, value in vars(m).items() if name.endswith("_hooks"))


@dataclass(frozen=True)
class Description:
    """A description of the computation of a module, for comparison with other modules.

    ``key``: a hashable value, equal for modules that are equal except for the values of integer and text attributes.
    ``texts``: (submodule path, attribute name) -> value, for these attributes.
    """

    key: Any
    texts: dict[tuple[str, str], Any]


def describe_layer_module(module: nn.Module) -> Description:
    """Return a description of the computation of ``module``, for comparison with other modules. Raise
    :class:`NotEquivalent` if the module has hooks, or a ``forward`` that is set on the instance."""
    if has_call_hooks(module) or any("forward" in vars(m) for m in module.modules()):
        raise NotEquivalent("hooked")
    texts: dict[tuple[str, str], Any] = {}
    return Description(describe_module_state(module, texts), texts)


def describe_module_state(module: nn.Module, texts: dict[tuple[str, str], Any] | None = None) -> Any:
    """Return a hashable value that describes ``module``: its submodules, attributes, and shapes and flags of its
    parameters and buffers.

    ``texts``: a dict to which integer and text attributes are added, (submodule path, attribute name) -> value. Of
    these attributes, the returned value then contains only the types. If ``texts`` is ``None``, it contains their
    values.
    """
    parts = list(module.named_modules(remove_duplicate=False))
    inside = {id(m): name for name, m in reversed(parts)}  # a module with several names has the first one
    tensors: dict[int, int] = {}
    frozen = _AttributeKeys(inside)
    rows = []
    for path, part in parts:
        attributes = []
        for name, value in sorted(vars(part).items()):
            if name in _SPECIAL_ATTRIBUTES:
                continue
            value = value.kept if type(value) is UnreadableAttribute else value
            if texts is not None and type(value) in (int, str):
                texts[path, name] = value
                attributes.append((name, type(value)))
            else:
                attributes.append((name, frozen.build_key(value)))
        held = [*part._parameters.items(), *part._buffers.items()]
        states = [
            (name, None if t is None else (*tensor_spec(t), tensors.setdefault(id(t), len(tensors))))
            for name, t in held
        ]
        rows.append((path, type(part), inside[id(part)], tuple(attributes), tuple(states)))
    return tuple(rows)


def tensor_spec(tensor: Tensor) -> tuple[Any, ...]:
    """Return a tuple of everything about ``tensor``, except its values, on which a trace can depend: whether it is a
    parameter, shape, strides, dtype, device, layout, and whether it requires a gradient."""
    return (
        type(tensor) is nn.Parameter,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tensor.requires_grad,
    )


def is_simple(value: Any) -> bool:
    """Return whether ``value`` is of a plain type (number, text, dtype and the like), which its ``repr`` describes
    completely.
    """
    return type(value) in _PLAIN


def build_value_key(value: Any, key_of_tensor: Callable[[Tensor], Any]) -> Any:
    """Return a hashable key of ``value``, an argument of a function. Keys are equal for equal arguments in two runs. An
    object that cannot be compared is identified by its ``id``. ``key_of_tensor``: returns the key of a tensor."""
    if isinstance(value, Tensor):
        return key_of_tensor(value)
    if is_simple(value):
        return type(value), repr(value)
    if isinstance(value, tuple | list):
        return type(value), tuple([build_value_key(item, key_of_tensor) for item in value])
    if isinstance(value, dict):
        return dict, tuple([(key, build_value_key(item, key_of_tensor)) for key, item in value.items()])
    if isinstance(value, slice):
        return slice, build_value_key((value.start, value.stop, value.step), key_of_tensor)
    return type(value), id(value)


class _AttributeKeys:
    """Builds hashable keys of the attribute values of one module, so that modules can be compared. Equal values have
    equal keys.

    ``inside``: ``id`` of each submodule of the module -> its path. The key of an attribute value that is such a
    submodule is this path, so that it equals the key of the corresponding submodule of another module. The key of any
    other unknown object is its ``id``.
    """

    def __init__(self, inside: dict[int, str]) -> None:
        self._inside = inside
        self._known: dict[int, tuple[Any, Any]] = {}  # id of a value -> (value, key): submodules share one config

    def build_key(self, value: Any) -> Any:
        """Return a hashable key of ``value``, an attribute value of a module. Equal values have equal keys. Containers
        and dataclasses are described by their contents, an unknown object by its ``id``."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, repr(value)
        if (kind is dict or kind is OrderedDict) and not value:  # a quick answer: most dicts of a module are empty
            return kind, ()
        if isinstance(value, nn.Module):
            return ("part", self._inside[id(value)]) if id(value) in self._inside else ("other", id(value))
        if kind in (tuple, list, torch.Size):
            return kind, tuple([self.build_key(v) for v in value])
        if kind in (set, frozenset):
            return kind, frozenset([self.build_key(v) for v in value])
        if isinstance(value, types.MethodType):
            return "method", value.__func__, self.build_key(value.__self__)
        if kind is functools.partial:
            return "partial", *(self.build_key(v) for v in (value.func, value.args, value.keywords))
        if isinstance(value, dict) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
            if id(value) not in self._known:
                self._known[id(value)] = (
                    value,
                    self._build_dict_key(value) if isinstance(value, dict) else self._build_dataclass_key(value),
                )
            return self._known[id(value)][1]
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict) and not isinstance(value, type | types.FunctionType | types.ModuleType | Tensor):
            return kind, id(value), tuple([(k, id(v)) for k, v in held.items()])
        return kind, id(value)

    def _build_dict_key(self, value: dict[Any, Any]) -> Any:
        """Return a hashable key of the dict ``value``, for comparison with others: its type, and keys of its items in
        order."""
        columns = tuple(value), tuple(value.values())
        # a quick answer: a dict of labels may have tens of thousands of entries
        if all(_EXACT.issuperset(map(type, column)) for column in columns):
            return type(value), columns, tuple([tuple(map(type, column)) for column in columns])
        return type(value), tuple([(self.build_key(k), self.build_key(v)) for k, v in value.items()])

    def _build_dataclass_key(self, value: Any) -> Any:
        """Return a hashable key of the dataclass instance ``value``, for comparison with others: its type, and keys of
        its field values in order."""
        return type(value), self.build_key(
            tuple([_read_stored_field(value, f.name) for f in dataclasses.fields(value)])
        )


def _read_stored_field(value: Any, name: str) -> Any:
    """Return the value of the field ``name`` of the dataclass instance ``value``. The value is taken from the
    instance's ``__dict__`` if it is there, because reading it through a descriptor may raise an error."""
    held = getattr(value, "__dict__", {})
    return held[name] if name in held else getattr(value, name)


class ParkedParameterError(NotEquivalent):
    """Raised if traced code reads a parameter that is removed from its module during the trace."""


class _ParkedParameterDict(dict[str, Any]):
    """Empty dict that replaces the ``_parameters`` of a module whose parameters are removed while the model is traced.
    While the model's forward runs, listing this dict or looking up a removed parameter raises
    :class:`ParkedParameterError`.

    ``names``: the names of the removed parameters. ``running``: returns whether the model's forward runs.
    """

    def __init__(self, names: Sequence[str], running: Callable[[], bool]) -> None:
        super().__init__()
        self._names, self._running = frozenset(names), running

    def __contains__(self, name: object) -> bool:
        if name in self._names and self._running():
            raise ParkedParameterError(f"the weight {name!r} is read outside of its layer's call")
        return False

    def _list_as_empty_dict(self) -> dict[str, Any]:
        """Return an empty dict in place of the removed parameters of a module. Raise :class:`ParkedParameterError`
        while the model's forward runs."""
        if self._running():
            raise ParkedParameterError("a layer's weights are listed outside of its call")
        return {}

    def items(self) -> Any:
        return self._list_as_empty_dict().items()

    def keys(self) -> Any:
        return self._list_as_empty_dict().keys()

    def values(self) -> Any:
        return self._list_as_empty_dict().values()

    def __iter__(self) -> Iterator[str]:
        return iter(self._list_as_empty_dict())

    def __len__(self) -> int:
        return len(self._list_as_empty_dict())


@dataclass
class ParkedParameters:
    """Removes parameters of modules while a model is traced, because the time of a trace grows with the number of
    parameters.

    ``model``: the model. ``names``: ``id`` of each module whose parameters are removed -> names of its parameters and
    buffers in order, with ``None`` for a buffer, which is not removed. ``numbers``: ``id`` of each such module -> its
    number, from 0. ``parameters``: the removed parameters by name.
    """

    model: nn.Module
    # id of a module -> names of its parameters and buffers
    names: dict[int, tuple[str | None, ...]] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    _held: dict[int, list[tuple[nn.Module, nn.Module, Any]]] = field(default_factory=dict)
    _running: bool = False

    def select(self, module: nn.Module, name: str, like: nn.Module) -> None:
        """Select all parameters of ``module`` to be removed during the trace. If another module shares one of them,
        select none.

        ``name``: the path of ``module`` in the model. ``like``: a module of equal structure, whose parameters
        :meth:`lend` can put in place of the removed ones.
        """
        inside = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        if any(self._uses[p] != count for p, count in inside.items()):
            return
        names: list[str | None] = []
        for path, part in module.named_modules():
            prefix = ".".join(p for p in (name, path) if p)
            for key, parameter in part._parameters.items():
                if parameter is not None:
                    names.append(f"{prefix}.{key}")
                    self.parameters[f"{prefix}.{key}"] = parameter
            names += [None for b in part._buffers.values() if b is not None]
        self.names[id(module)] = tuple(names)
        self.numbers[id(module)] = len(self.numbers)
        parts = zip(module.modules(), like.modules(), strict=True)
        self._held[id(module)] = [(part, twin, part._parameters) for part, twin in parts]

    def __post_init__(self) -> None:
        self._uses = Counter(id(p) for _, p in self.model.named_parameters(remove_duplicate=False))

    def list_names_by_number(self) -> dict[int, tuple[str | None, ...]]:
        """Return a dict from the number of each module whose parameters are removed to the names of its parameters and
        buffers in order, with ``None`` for a buffer, because buffers are not removed."""
        return {self.numbers[module]: names for module, names in self.names.items()}

    def remove_selected(self) -> None:
        """Remove the parameters that :meth:`select` has selected from their modules, until :meth:`restore` puts them
        back."""
        for held in self._held.values():
            for part, _, own in held:
                names = [n for n, p in own.items() if p is not None]
                part.__dict__["_parameters"] = _ParkedParameterDict(names, lambda: self._running)

    def restore(self) -> None:
        """Put all parameters that :meth:`remove_selected` removed back into their modules."""
        for held in self._held.values():
            for part, _, own in held:
                part.__dict__["_parameters"] = own

    def lend(self, module: nn.Module) -> list[tuple[nn.Module, Any]]:
        """Give ``module``, whose parameters are removed, the parameters of a module of equal structure, so that
        ``module`` can be called. Return a list of (submodule, its parameter table before), which :meth:`take_back`
        needs to undo this."""
        lent = []
        for part, twin, _ in self._held[id(module)]:
            lent.append((part, part.__dict__["_parameters"]))
            part.__dict__["_parameters"] = twin._parameters
        return lent

    def take_back(self, lent: list[tuple[nn.Module, Any]]) -> None:
        """Undo :meth:`lend`: take the lent parameters out of the module again. ``lent``: the result of :meth:`lend`, a
        list of (submodule, its parameter table before)."""
        for part, parked in lent:
            part.__dict__["_parameters"] = parked

    def guard_reads(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward``, the model's forward, wrapped so that reading removed parameters while it runs raises
        :class:`ParkedParameterError`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            """Run the model's forward and return its result. While it runs, reading removed parameters raises an
            error."""
            self._running = True
            try:
                return forward(*args, **kwargs)
            finally:
                self._running = False

        return run
