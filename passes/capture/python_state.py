"""Record state of forward outside of tensors: attributes, globals, closures, random generators and the clock.

A trace runs forward once. In the plan, a counter, a number drawn from Python's or NumPy's generator, or the time of day
would keep its value from the trace. :class:`PythonState` is recorded before a trace and compared after it. For each
change, ``passes/capture/tracing.py`` turns the changed number into a buffer, shows that the change has no effect, or
raises an error. The caller's own objects are restored afterwards.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import hashlib
import itertools
import random
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, fx, nn

from partitioner.passes.capture.export import format_frame_line
from partitioner.passes.faults import is_user_file
from partitioner.passes.ir.lifted_numbers import is_lifted
from partitioner.passes.ir.model import Captured

_PLAIN = (bool, type(None), int, float, str, complex, bytes, torch.dtype, torch.device, torch.Size)

_CONTAINERS = (list, tuple, set, frozenset, collections.deque, dict)
_MOST_ELEMENTS = 4096  # larger containers are not inspected
_DEPTH = 6
_MODULE_ATTRIBUTES = frozenset({*vars(nn.Module()), "forward"}) - {
    "training"
}  # attributes that every module has; they are inspected elsewhere
_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")
_FIRST_DRAWS = (0.02, 0.98)  # first draws of two traces, which show whether a draw changes what is computed
_SEEDS = 4096
_MOST_NUMBERS = 1 << 22  # most elements of a value that is computed for a comparison

Attributes = dict[tuple[str, str], tuple[Any, Any]]  # (module path, attribute name) -> (comparison key, value)


@dataclass(frozen=True)
class StateChange:
    """A change of Python state (anything except tensors) by forward, such as an attribute or a global variable.

    ``description``: the changed state, as text for messages. ``module`` (a module path) and ``name``: set for an
    attribute of a module. ``before``, ``after``: the values if they are Python numbers, otherwise ``None``.
    ``generator``: whether the changed state is that of a random generator.
    """

    description: str
    module: str | None = None
    name: str = ""
    before: int | float | None = None
    after: int | float | None = None
    generator: bool = False

    @property
    def is_number(self) -> bool:
        """Return whether an attribute of a module changed that is a Python number both before and after forward. Only
        such an attribute can become a buffer."""
        return self.module is not None and self.before is not None and self.after is not None


@dataclass
class _Variable:
    """A Python variable, such as a global, that forward can change and that the traced copy of the model shares with
    the caller.

    ``description``: the variable, as text for messages. ``read``, ``write``: get and set its present value. ``value``:
    the value before forward. ``content``: if the value is a container, a copy of its elements; otherwise ``None``.
    ``key``: the comparison key of the value before forward; the variable has changed if its later value has another
    key.
    """

    description: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    value: Any
    content: Any
    key: Any

    def restore(self) -> None:
        """Set this Python variable, and the elements of its container, back to their state before forward."""
        if self.read() is not self.value:
            self.write(self.value)
        if self.content is not None and not _have_same_elements(self.value, self.content):
            self.value.clear()
            if isinstance(self.value, set | dict):
                self.value.update(self.content)
            else:
                self.value.extend(self.content)


def _have_same_elements(one: Any, other: Any) -> bool:
    """Return whether ``one`` and ``other``, two containers of one type, hold the same objects (by identity) in the same
    order."""
    if isinstance(one, dict):
        one, other = [*one.keys(), *one.values()], [*other.keys(), *other.values()]
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


@dataclass
class PythonState:
    """Snapshot of everything besides tensors that the code of a model can change.

    ``attributes``: attributes of the traced copy's modules, by (module path, attribute name). ``places``: variables
    outside of the modules, such as globals. ``generators``: random generators of Python and NumPy, each as
    (description, generator, state).
    """

    attributes: Attributes
    places: list[_Variable]
    generators: list[tuple[str, Any, Any]]  # (description, generator, state)

    @classmethod
    def take(cls, module: nn.Module, *functions: Any) -> PythonState:
        """Return a snapshot of the Python state that forward can change: the attributes of ``module``, a copy of the
        model, the variables, such as globals, that its code can change, and random generators. ``functions``: further
        code that forward runs, such as the loss, whose variables are recorded, too."""
        generators: dict[int, tuple[str, Any, Any]] = {}
        for name, generator in (("Python's random", random), ("NumPy's random", np.random)):
            generators[id(generator)] = (name, generator, _get_generator_state(generator))
        places = list(_iterate_reachable_variables(module, functions))
        for place in places:
            if _get_generator_state(place.value) is not None:
                generators.setdefault(
                    id(place.value), (place.description, place.value, _get_generator_state(place.value))
                )
        return cls(collect_attributes(module), places, list(generators.values()))

    def find_changes(self, attributes: Attributes) -> list[StateChange]:
        """Return the differences between the snapshot and the present state: one :class:`StateChange` for each variable
        whose value differs.

        Args:
            attributes: attributes of the traced copy of the model after its forward: (module path, attribute name) ->
                (comparison key, value).
        """
        found = list[StateChange]()
        for (path, name), (told, value) in attributes.items():
            before = self.attributes.get((path, name))
            if before is None or before[0] != told:
                of = f"the attribute {name!r} of {f'the module {path!r}' if path else 'the model'}"
                was = None if before is None else before[1]
                generator = _get_generator_state(value) is not None
                found.append(StateChange(of, path, name, _get_plain_number(was), _get_plain_number(value), generator))
        found += [StateChange(p.description) for p in self.places if _build_value_key(p.read(), {}) != p.key]
        found += [
            StateChange(description, generator=True)
            for description, generator, state in self.generators
            if not _are_states_equal(_get_generator_state(generator), state)
        ]
        return found

    def restore(self) -> None:
        """Set the Python variables and random generators that the traced copy shares with the caller back to their
        values in this snapshot. Attributes of the traced copy are not restored."""
        for place in self.places:
            place.restore()
        for _, generator, state in self.generators:
            _set_generator_state(generator, state)

    def draw_first(self, module: nn.Module, below: bool) -> None:
        """Seed all random generators of Python and NumPy, including those that are attributes of ``module``, so that
        the first uniform number that each draws is near 0 if ``below`` is true, otherwise near 1. If traces after these
        two seeds differ, the drawn numbers have an effect on what forward computes."""
        own = [value for part in module.modules() for value in vars(part).values()]
        for generator in (
            *(g for _, g, _ in self.generators),
            *(v for v in own if _get_generator_state(v) is not None),
        ):
            _seed_generator(generator, below)


# --- what can be changed ----------------------------------------------------------------------------------------------
def collect_attributes(module: nn.Module) -> Attributes:
    """Return a dict of the attributes of ``module`` and its submodules: (module path, attribute name) -> (comparison
    key, value). Equal keys mean that a value has not changed. Attributes that every module has are left out, except
    ``training``."""
    known: dict[int, Any] = {}
    return {
        (path, name): (_build_value_key(value, known), value)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in _MODULE_ATTRIBUTES
    }


def _iterate_reachable_variables(module: nn.Module, functions: tuple[Any, ...]) -> Iterator[_Variable]:
    """Yield the variables that the user's code can change: class attributes, closure variables, defaults and globals.

    Args:
        module: the model; the code of its classes is searched.
        functions: further code to search, such as the loss.
    """
    seen: set[int] = set()
    classes = {cls for part in module.modules() for cls in type(part).__mro__ if _has_code_of_users(cls.__module__)}
    codes = [f for f in functions if f is not None]
    codes += [
        v for part in module.modules() for n, v in vars(part).items() if n not in _MODULE_ATTRIBUTES and _is_function(v)
    ]
    for cls in classes:
        for name, value in list(vars(cls).items()):
            if not name.startswith("__") and _is_data(value):
                description = f"the attribute {name!r} of the class {cls.__qualname__}"
                yield _make_settable_variable(description, vars(cls), name, functools.partial(setattr, cls, name))
            elif _is_function(value):
                codes.append(value)
    names = {cls.__module__ for cls in classes}
    for function in _yield_user_functions(codes):
        names.add(function.__module__ or "")
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            if id(cell) not in seen and _cell_has_data(cell):
                seen.add(id(cell))
                description = f"the variable {variable!r} that {function.__qualname__} closes over"
                yield _make_settable_variable(
                    description, cell, "cell_contents", functools.partial(setattr, cell, "cell_contents")
                )
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), vars(function)):
            if isinstance(value, list | dict | set | collections.deque) and id(value) not in seen:
                seen.add(id(value))
                yield _make_fixed_variable(f"a default value of {function.__qualname__}", value)
    for name in names:
        file = sys.modules.get(name)
        for variable, value in list(vars(file).items()) if file is not None and _has_code_of_users(name) else ():
            if not variable.startswith("__") and _is_data(value):
                description = f"the global {variable!r} of {name}"
                yield _make_settable_variable(
                    description, vars(file), variable, functools.partial(setattr, file, variable)
                )


def _make_settable_variable(description: str, holder: Any, name: str, write: Callable[[Any], None]) -> _Variable:
    """Return a record of the entry or attribute ``name`` of ``holder``, with its present value. ``description``: the
    variable, as text for messages. ``write``: sets the variable to a value."""

    def read() -> Any:
        return holder[name] if isinstance(holder, Mapping) else getattr(holder, name)

    value = read()
    return _Variable(description, read, write, value, _copy_mutable_value(value), _build_value_key(value, {}))


def _make_fixed_variable(description: str, value: Any) -> _Variable:
    """Return a record of the object ``value``, such as the default of a parameter, that code can change in place but
    not replace. ``description``: the object, as text for messages."""
    return _Variable(
        description, lambda: value, lambda _: None, value, _copy_mutable_value(value), _build_value_key(value, {})
    )


def _copy_mutable_value(value: Any) -> Any:
    """Return a shallow copy of ``value`` if it is a list, set, dict or deque of at most ``_MOST_ELEMENTS`` (4096)
    elements; otherwise return ``None``."""
    mutable = isinstance(value, list | set | dict | collections.deque) and len(value) <= _MOST_ELEMENTS
    return type(value)(value) if mutable and type(value) in (list, set, dict, collections.deque) else None


def _yield_user_functions(codes: list[Any]) -> Iterator[types.FunctionType]:
    """Yield the Python functions of the user's code among ``codes``, and those that they wrap or refer to in closures.
    Each function is yielded once.

    ``codes``: functions, methods, partials and callable objects; anything else is ignored.
    """
    left, seen = list(codes), set[int]()
    while left:
        code = left.pop()
        if id(code) in seen:
            continue
        seen.add(id(code))
        if isinstance(code, functools.partial):
            left += [code.func, *code.args, *code.keywords.values()]
        elif isinstance(code, types.MethodType | staticmethod | classmethod):
            left.append(code.__func__)
        elif isinstance(code, types.FunctionType):
            if not _has_code_of_users(code.__module__ or ""):
                continue
            yield code
            left += [getattr(code, "__wrapped__", None)]
            left += [c.cell_contents for c in code.__closure__ or () if _cell_has_function(c)]
        elif callable(code) and not isinstance(code, type | nn.Module) and _has_code_of_users(type(code).__module__):
            left.append(type(code).__call__)


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType | types.MethodType | functools.partial | staticmethod | classmethod)


def _cell_has_function(cell: Any) -> bool:
    with contextlib.suppress(ValueError):  # the closure cell may be empty
        return _is_function(cell.cell_contents)
    return False


def _cell_has_data(cell: Any) -> bool:
    with contextlib.suppress(ValueError):
        return _is_data(cell.cell_contents)
    return False


def _is_data(value: Any) -> bool:
    """Return whether ``value``, the value of a Python variable, may be state that forward changes, such as a number, a
    list, a random generator or an object of a user's class. Classes, functions, modules and tensors do not count."""
    if isinstance(value, type | types.ModuleType | nn.Module | Tensor | enum.Enum) or _is_function(value):
        return False
    told = isinstance(value, (*_PLAIN, *_CONTAINERS, itertools.count)) or _get_generator_state(value) is not None
    return told or _has_attributes(value)


def _has_attributes(value: Any) -> bool:
    """Return whether ``value`` is an object whose attributes may be state that forward changes: an object of a user's
    class, a dataclass or a namespace.
    """
    plain_object = isinstance(value, types.SimpleNamespace) or dataclasses.is_dataclass(value)
    return plain_object or (hasattr(value, "__dict__") and _has_code_of_users(type(value).__module__))


@functools.lru_cache(maxsize=4096)
def _has_code_of_users(module: str) -> bool:
    """Return whether the Python module with the name ``module`` is the user's code: a notebook, a script, or a file
    that does not belong to Python, this project or a library that this project calls."""
    if module.split(".")[0] in ("torch", "builtins", "numpy", "functools", "collections", "typing", "pytest", "abc"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or is_user_file(file)


def _build_value_key(value: Any, known: dict[int, Any], depth: int = 0) -> Any:
    """Return a hashable key of ``value``. A later, different key shows that the value has changed. An object of an
    unknown class is represented by its type alone.

    Args:
        known: keys of objects that were visited already, by ``id``.
        depth: number of containers and objects around ``value``; beyond a limit, a value is represented by its type
            alone.
    """
    kind = type(value)
    if kind in _PLAIN:
        return kind, repr(value)
    if is_lifted(value):
        return "number"
    if isinstance(value, Tensor):
        return "tensor"
    if depth > _DEPTH or isinstance(value, nn.Module | type | types.ModuleType):
        return kind
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = kind  # used if the value contains itself
    told: Any = kind
    if isinstance(value, itertools.count):
        told = repr(value)
    elif _get_generator_state(value) is not None:
        told = kind, repr(_convert_arrays_to_lists(_get_generator_state(value)))
    elif isinstance(value, dict) and len(value) <= _MOST_ELEMENTS:
        told = (
            kind,
            tuple(
                (_build_value_key(k, known, depth + 1), _build_value_key(v, known, depth + 1)) for k, v in value.items()
            ),
        )
    elif isinstance(value, set | frozenset) and len(value) <= _MOST_ELEMENTS:
        told = kind, len(value), frozenset(repr(v) for v in value if type(v) in _PLAIN)
    elif isinstance(value, list | tuple | collections.deque) and len(value) <= _MOST_ELEMENTS:
        told = kind, tuple(_build_value_key(v, known, depth + 1) for v in value)
    elif isinstance(value, _CONTAINERS):
        told = kind, len(value)
    elif not _is_function(value) and _has_attributes(value):
        told = (
            kind,
            tuple((n, _build_value_key(v, known, depth + 1)) for n, v in getattr(value, "__dict__", {}).items()),
        )
    known[id(value)] = told
    return told


def _get_plain_number(value: Any) -> int | float | None:
    return value if type(value) in (int, float) else None


# --- generators -------------------------------------------------------------------------------------------------------
def _get_generator_state(generator: Any) -> Any:
    """Return the state of a random generator of Python or NumPy; ``None`` if ``generator`` is something else."""
    if generator is random or (isinstance(generator, random.Random) and type(generator) is not random.SystemRandom):
        return generator.getstate()
    if generator is np.random:
        return np.random.get_state(legacy=False)
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else None


def _set_generator_state(generator: Any, state: Any) -> None:
    """Set the state of ``generator``, a random generator of Python or NumPy. ``state``: the state of a generator of the
    same type."""
    if generator is random or isinstance(generator, random.Random):
        generator.setstate(state)
    elif generator is np.random or isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _are_states_equal(one: Any, other: Any) -> bool:
    return repr(_convert_arrays_to_lists(one)) == repr(_convert_arrays_to_lists(other))


def _convert_arrays_to_lists(state: Any) -> Any:
    """Return ``state``, the state of a random generator, with lists in place of NumPy arrays."""
    if isinstance(state, Mapping):
        return {k: _convert_arrays_to_lists(v) for k, v in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _seed_generator(generator: Any, below: bool) -> None:
    """Seed ``generator``, a random generator of Python or NumPy, so that its first uniform draw is near 0 if ``below``,
    otherwise near 1."""
    low, high = _FIRST_DRAWS
    for seed in range(_SEEDS):
        if generator is random or isinstance(generator, random.Random):
            generator.seed(seed)
            first = generator.random()
            generator.seed(seed)
        elif generator is np.random or isinstance(generator, np.random.RandomState):
            generator.seed(seed)
            first = generator.random_sample()
            generator.seed(seed)
        else:
            state = type(generator.bit_generator)(seed).state
            generator.bit_generator.state = state
            first = generator.random()
            generator.bit_generator.state = state
        if first < low if below else first > high:
            return


def find_draw(run: Callable[[], Any]) -> str:
    """Call ``run`` and return `` at file:line (code)`` of the first draw of the user's code from a random generator of
    Python or NumPy. Return an empty text if there is none. Exceptions of ``run`` are ignored."""
    found: list[str] = []
    generators = (random.Random, np.random.RandomState, np.random.Generator)

    def watch(frame: types.FrameType, event: str, argument: Any) -> None:
        """If a profiling event is a call of a random generator's method, record the user's line. Only the first one is
        recorded. ``frame``, ``event``, ``argument``: what Python passes to a profiling function: the stack frame, the
        kind of event, and the called function."""
        if found:
            return
        owner = getattr(argument, "__self__", None) if event == "c_call" else frame.f_locals.get("self")
        if event in ("call", "c_call") and isinstance(owner, generators):
            at: types.FrameType | None = frame
            while at is not None and not is_user_file(at.f_code.co_filename):
                at = at.f_back
            if at is not None:
                found.append(format_frame_line(at))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        with contextlib.suppress(Exception):
            run()
    finally:
        sys.setprofile(before)
    return found[0] if found else ""


# --- the clock --------------------------------------------------------------------------------------------------------
@dataclass
class ClockObserver:
    """Observes whether traced code reads the clock, and shifts the time that it reads by ``shift_s`` seconds.

    ``asked_at``: the first line of the user's code that reads the clock, as `` at file:line (code)``; empty if no line
    does.
    """

    shift_s: int = 0
    asked_at: str = ""
    _originals: dict[str, Callable[[], Any]] = field(default_factory=dict, repr=False)

    @contextlib.contextmanager
    def observe(self, module: nn.Module) -> Iterator[None]:
        """Return a context in which the functions of ``time`` return the shifted time to the user's code and record
        where they were called.

        ``module``: the model; functions of ``time`` that the files of its classes import by name are replaced too.
        """
        originals = {name: getattr(time, name) for name in _CLOCKS}
        by_function = {id(f): name for name, f in originals.items()}
        watched = {name: self._wrap_clock_function(name, f) for name, f in originals.items()}
        with contextlib.ExitStack() as stack:
            for name, function in watched.items():
                stack.enter_context(mock.patch.object(time, name, function))
            files = {type(part).__module__ for part in module.modules()}
            for file in (sys.modules.get(f) for f in files if _has_code_of_users(f)):
                for variable, value in list(vars(file).items()) if file is not None else ():
                    if id(value) in by_function and not variable.startswith("__"):
                        stack.enter_context(mock.patch.object(file, variable, watched[by_function[id(value)]]))
            yield

    def _wrap_clock_function(self, name: str, function: Callable[[], Any]) -> Callable[[], Any]:
        """Return a replacement for ``function``, the function of ``time`` with the name ``name``. The replacement
        returns the shifted time to the user's code, and the true time to any other code."""
        shift = self.shift_s * (10**9 if name.endswith("_ns") else 1)

        def now() -> Any:
            frame = sys._getframe(1)
            if not self.asked_at and is_user_file(frame.f_code.co_filename):
                self.asked_at = format_frame_line(frame)
            return function() + shift if is_user_file(frame.f_code.co_filename) else function()

        return now


# --- whether a change has an effect -----------------------------------------------------------------------------------
def are_computations_equal(one: Captured, other: Captured) -> bool:
    """Return whether ``one`` and ``other``, two captured graphs of a model, compute the same results from the same
    parameters, buffers and inputs.

    Values that depend on constants alone are compared by value, because one capture may contain a precomputed table
    that the other one computes.
    """
    return bool(_build_capture_key(one) == _build_capture_key(other))


def _build_capture_key(captured: Captured) -> Any:
    """Return a key of the graph of ``captured``. Graphs with the same operators, outputs, updates of buffers and loss
    have equal keys. Values that depend on constants alone are represented by a hash of their elements."""
    fixed = _evaluate_constants(captured)
    places: dict[fx.Node, str] = {}
    rows: list[tuple[str, str, str, str]] = []
    for node in captured.graph.nodes:
        if node in fixed:
            places[node] = _digest_constant_value(fixed[node])
            continue
        target = captured.placeholders.get(node.name, "") if node.op == "placeholder" else str(node.target)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), places.__getitem__)
        places[node] = f"%{len(rows)}"
        rows.append((node.op, target, repr(args), repr(sorted(kwargs.items()))))
    by_name = {n.name: place for n, place in places.items()}
    outputs = [(o.path, by_name.get(o.value or ""), repr(o.constant)) for o in captured.outputs]
    updates = sorted((name, by_name[value]) for name, value in captured.updates.items())
    output_row = [row for row in rows if row[0] != "output"]  # ``outputs`` has the outputs, in the order of the leaves
    return output_row, outputs, updates, by_name.get(captured.loss or "")


def _evaluate_constants(captured: Captured) -> dict[fx.Node, Any]:
    """Return the values of the nodes of ``captured`` that depend on constants alone: node -> value. Results of more
    than ``_MOST_NUMBERS`` (2**22) elements, and all values that are computed from them, are left out."""
    values: dict[fx.Node, Any] = {}
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            name = captured.placeholders.get(node.name, "")
            state = captured.states.get(name)
            if state is not None and state.kind == "constant" and name in captured.constants:
                values[node] = captured.constants[name]
        elif node.op == "call_function" and all(n in values for n in node.all_input_nodes) and _is_repeatable(node):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            args, kwargs = fx.node.map_aggregate((args, kwargs), _to_cpu)
            with contextlib.suppress(Exception), torch.no_grad():
                values[node] = node.target(*args, **kwargs)
    return values


def _is_repeatable(node: fx.Node) -> bool:
    """Return whether ``node`` is a deterministic operator of torch whose result has at most ``_MOST_NUMBERS`` (2**22)
    elements. Captured graphs are compared by the values of such nodes if these depend on constants alone."""
    tags, given = getattr(node.target, "tags", ()), node.meta.get("val")
    small = not isinstance(given, Tensor) or given.numel() <= _MOST_NUMBERS
    of_torch = getattr(node.target, "namespace", "aten") == "aten"
    return small and of_torch and torch.Tag.nondeterministic_seeded not in tags


def _to_cpu(argument: Any) -> Any:
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _digest_constant_value(value: Any) -> str:
    """Return a text that represents ``value``, the result of a graph node; equal values have equal texts. A tensor is
    represented by its shape, its dtype and a hash of its bytes, a tuple or list by its elements."""
    if isinstance(value, tuple | list):
        return repr([_digest_constant_value(v) for v in value])
    if not isinstance(value, Tensor):
        return repr(value)
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(value.shape)} {value.dtype} {hashlib.sha256(data).hexdigest()}"
