"""Decide from a hook's source code, without calling it, whether the hook only observes its arguments.

A hook that only observes returns ``None``, and changes neither its arguments nor the model. Calling the hook would not
decide this: it may act only on large gradients, and it may store its arguments. Instead, its source is interpreted
abstractly: each value has one of a few kinds (``Kind``), and the kind decides which operations are allowed on the
value. If no decision is possible, the hook is treated as one that acts.
"""

from __future__ import annotations

import ast
import builtins
import collections
import functools
import linecache
import logging
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import getattr_static
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

# Origin of a value. ``given``: an argument of the hook, or a view of one. ``model``: a module and what it holds.
# ``known``: an object that exists already. ``fresh``: a value that the hook makes. ``none``: ``None``. ``unknown``:
# anything.
Kind = Literal["given", "model", "known", "fresh", "none", "unknown"]
_MOST_OBJECTS, _MOST_DEPTH, _MOST_ROUNDS = 256, 6, 8


@dataclass(frozen=True)
class HookValue:
    """The origin of a value in the source of a hook, which is analysed without running the hook.

    ``kind``: "given" for an argument of the hook or a view of one; "model" for a module, or an object that a module
    holds; "known" for an object that existed before the hook runs and is one of ``objects``; "fresh" for a new value
    that the hook makes; "none" for ``None``; or "unknown".
    """

    kind: Kind
    objects: tuple[Any, ...] = ()  # the objects that a ``known`` value may be

    def join(self, other: HookValue) -> HookValue:
        """Return one origin that covers two alternative values in the source of a hook, this one and ``other``, such as
        those of ``a if c else b``."""
        if self.kind == other.kind:
            return HookValue("known", (*self.objects, *other.objects)[:_MOST_OBJECTS]) if self.kind == "known" else self
        kinds = {self.kind, other.kind}
        if "none" in kinds:
            return other if self.kind == "none" else self
        return GIVEN if kinds == {"given", "fresh"} else UNKNOWN


GIVEN, MODEL, FRESH, NONE, UNKNOWN = (
    HookValue("given"),
    HookValue("model"),
    HookValue("fresh"),
    HookValue("none"),
    HookValue("unknown"),
)


class _SideEffect(Exception):
    """Raised if the source of a hook shows that it may change something or return a value. The message says how."""


def describe_hook_effect(hook: Callable[..., Any], given: Sequence[HookValue]) -> str | None:
    """Return a text that says what ``hook`` does or may do besides observing its arguments. Return ``None`` if it only
    observes, that is, returns ``None`` and changes nothing. The hook is not called; its source is analysed.

    ``given``: for each argument of the hook, whether it is a module or a value.
    """
    try:
        returned = _evaluate_call(hook, list(given), {}, 0)
    except _SideEffect as found:
        return str(found)
    return None if returned.kind == "none" else "returns a value, or may return one"


def find_code(hook: Callable[..., Any]) -> tuple[str, types.CodeType | None]:
    """Return (qualified name, code object) of the function behind ``hook``, which may be a partial, a bound method or a
    callable object. The code object is ``None`` if the function is not a Python function."""
    function, _, _ = _unwrap_callable(hook)
    return getattr(function, "__qualname__", type(hook).__qualname__), getattr(function, "__code__", None)


def _unwrap_callable(called: Any) -> tuple[Any, list[HookValue], dict[str, HookValue]]:
    """Return three values for ``called``, a function, partial, bound method or callable object: the function behind it;
    and the origins of the arguments that ``called`` itself adds to a call, such as ``self``, as a list of positional
    and a dict of keyword arguments. An origin is a :class:`HookValue`, such as "known" (an existing object)."""
    first: list[HookValue] = []
    named: dict[str, HookValue] = {}
    for _ in range(_MOST_DEPTH):
        if isinstance(called, functools.partial):
            first = [*map(_classify_object, called.args), *first]
            named = {**{name: _classify_object(v) for name, v in called.keywords.items()}, **named}
            called = called.func
        elif isinstance(called, types.FunctionType) and called.__code__ is _IN_CONTEXT:
            called = called.__wrapped__  # type: ignore[attr-defined]
        elif isinstance(called, types.MethodType):
            first = [_classify_object(called.__self__), *first]
            called = called.__func__
        elif not isinstance(called, types.FunctionType | types.BuiltinFunctionType | type) and isinstance(
            getattr_static(type(called), "__call__", None), types.FunctionType
        ):
            called = called.__call__
        else:
            break
    return called, first, named


_IN_CONTEXT = torch.no_grad()(lambda: None).__code__  # code of a function decorated with ``@torch.no_grad()``

_PLAIN = (str, bytes, int, float, complex, bool, torch.dtype, torch.device, torch.Size)


def _classify_object(value: Any) -> HookValue:
    """Return the origin (a :class:`HookValue`) of the existing object ``value``, such as a closure variable of a hook:
    "none" for ``None``; "fresh", as for new values, for a number, text or another object that a hook cannot change;
    otherwise "known", with the object itself."""
    if value is None:
        return NONE
    return FRESH if isinstance(value, _PLAIN) else HookValue("known", (value,))


# --- calls ------------------------------------------------------------------------------------------------------------

# Functions that neither write to their arguments nor pass them on.
_READING_METHODS = {
    print, len, float, int, str, repr, format, isinstance, issubclass, abs, any, all, bool, round, id, type, hash,
    hasattr, callable, range, divmod, ord, chr, open, complex, bytes, slice,
}  # fmt: skip
_FORWARDING_FUNCTIONS = {
    list, tuple, dict, set, frozenset, zip, enumerate, reversed, iter, next, sorted, getattr, map, filter, min, max,
    sum, super,
}  # fmt: skip
_OPAQUE_FUNCTIONS = {"globals", "locals", "vars", "exec", "eval", "compile", "exit", "_exit", "abort", "kill", "quit"}
_CONTAINERS = (list, dict, set, collections.deque)
_FILLING = {"append", "appendleft", "add", "update", "extend", "insert", "clear", "remove", "discard", "write"}
# Methods of tensors and functions of torch that return new tensors or numbers.
_MEASURING = {
    "item", "tolist", "norm", "mean", "sum", "std", "var", "clone", "any", "all", "isnan", "isfinite", "isinf", "numel",
    "size", "dim", "square", "sqrt", "histc", "count_nonzero", "argmax", "argmin", "amax", "amin", "median", "quantile",
    "vector_norm", "is_floating_point", "element_size", "nelement", "data_ptr", "get_device", "stack", "cat", "max",
    "min", "linalg_vector_norm", "allclose", "equal", "new_tensor", "tensor", "zeros_like", "ones_like",
}  # fmt: skip
# Methods and functions that write to a tensor or an array although their names do not end in "_", or that take part in
# training.
_WRITING = {
    "fill", "sort", "partition", "put", "itemset", "resize", "setfield", "setflags", "byteswap", "copyto", "place",
    "putmask", "fill_diagonal", "share_memory", "__setitem__", "__setattr__", "__iadd__", "__imul__",
}  # fmt: skip
_TRAINING = {"backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
_MODEL_READS = {
    "named_parameters", "parameters", "named_modules", "modules", "named_children", "children", "named_buffers",
    "buffers", "extra_repr", "get_parameter", "get_submodule", "get_buffer", "state_dict", "_get_name",
}  # fmt: skip
_TORCH_MODULES_WITHOUT_EFFECTS = ("torch.utils.tensorboard", "torch.cuda.memory", "torch.autograd.grad_mode")
_TORCH_MODULES_WITH_EFFECTS = (
    "torch.distributed",
    "torch.optim",
    "torch.amp",
    "torch.autograd",
    "torch.nn.init",
    "torch.random",
)


def _is_state(value: Any) -> bool:
    """Return whether ``value`` is a part of training that a hook must not change: a module, tensor, generator,
    optimizer or gradient scaler."""
    acting = type(value).__module__.startswith(("torch.optim", "torch.amp", "torch.distributed"))
    return isinstance(value, nn.Module | Tensor | torch.Generator | torch.optim.Optimizer) or acting


def _is_inplace_name(name: str) -> bool:
    """Return whether ``name`` is the name of a method or function that writes to its tensor in place or takes part in
    training, such as ``add_`` or ``backward``."""
    return name in _WRITING or name in _TRAINING or (name.endswith("_") and not name.endswith("__"))


def _evaluate_call(called: Any, args: list[HookValue], named: dict[str, HookValue], depth: int) -> HookValue:
    """Return the origin (a :class:`HookValue`, such as "given" for an argument of the hook) of the result of a call in
    a hook's source, without running it. Raise :class:`_SideEffect` if the call may change its arguments, the model or
    other state.

    Args:
        called: the function or object that is called.
        args: the origin of each positional argument.
        named: the origin of each keyword argument, by name.
        depth: number of calls that enclose this one; the analysis stops at a limit.
    """
    function, first, more = _unwrap_callable(called)
    args, named = [*first, *args], {**more, **named}
    values = [*args, *named.values()]
    protected = [v for v in values if v.kind in ("given", "model", "unknown") or any(map(_is_state, v.objects))]
    name, module_name = getattr(function, "__name__", type(function).__name__), _find_home_module(function)
    if _set_contains_hashable(function, _READING_METHODS):
        return NONE if function is print else FRESH
    if name in _OPAQUE_FUNCTIONS:
        raise _SideEffect(f"calls {name}, so that what it does cannot be read")
    if _set_contains_hashable(function, _FORWARDING_FUNCTIONS):
        if any(
            v.kind == "unknown" or any(callable(o) and o not in _READING_METHODS for o in v.objects) for v in values
        ):
            raise _SideEffect(f"calls {name} with what cannot be read")
        return functools.reduce(HookValue.join, map(_join_value_elements, values), FRESH)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, _CONTAINERS):
        return NONE if name in _FILLING else _join_object_elements(owner)
    if isinstance(owner, Tensor | nn.Module) or module_name == "torch" or module_name.startswith("torch."):
        return _call_torch(name, module_name, owner, values, protected)
    if module_name in ("logging", "warnings", "_warnings"):
        return NONE
    if (
        module_name.startswith("numpy")
        and not _is_inplace_name(name)
        and len(args) <= getattr(function, "nin", len(args))
    ):
        return GIVEN if protected else FRESH
    if isinstance(function, types.FunctionType) and _is_user_code(function):
        if depth == _MOST_DEPTH:
            raise _SideEffect(f"calls {name}, which is too deep to be read")
        return _HookReader(function, depth).find_returned_value(args, named)
    if not protected and not _is_state(owner):
        return FRESH
    if isinstance(function, type) and issubclass(function, tuple | BaseException):
        return GIVEN
    raise _SideEffect(f"hands what it is given to {name}, which may change it")


def _set_contains_hashable(function: Any, table: set[Any]) -> bool:
    """Return whether ``function`` is in the set ``table``; false for an object that cannot be hashed."""
    try:
        return function in table
    except TypeError:
        return False


def _find_home_module(function: Any) -> str:
    """Return the name of the Python module in which ``function`` is defined, or, for a method without one, the module
    of its object's class."""
    owner = getattr(function, "__self__", None)
    module_name = getattr(function, "__module__", None) or type(owner if owner is not None else function).__module__
    return str(module_name)


def _is_user_code(function: types.FunctionType) -> bool:
    """Return whether ``function`` is the user's own code, whose source can be analysed, and not from an installed
    package or from Python."""
    file = function.__code__.co_filename
    return "site-packages" not in file and not file.startswith(_PYTHON)


_PYTHON = str(Path(logging.__file__).parent.parent)


def _call_torch(
    name: str, module_name: str, owner: Any, values: list[HookValue], protected: list[HookValue]
) -> HookValue:
    """Return the origin (a :class:`HookValue`, such as "given" for an argument of the hook) of the result of a call, in
    a hook's source, of a torch function or of a method of a tensor or module. Raise :class:`_SideEffect` if the call
    may change something.

    ``name``: the function's name. ``module_name``: the name of its Python module. ``owner``: the object of a method;
    ``None`` for a function. ``values``: the origin of each argument. ``protected``: those of ``values`` that the call
    must not change.
    """
    if module_name.startswith(_TORCH_MODULES_WITHOUT_EFFECTS):
        return FRESH
    if isinstance(owner, nn.Module) or any(isinstance(o, nn.Module) for v in values[:1] for o in v.objects):
        if name not in _MODEL_READS:
            raise _SideEffect(f"calls {name} of a module")
        return MODEL
    if (
        _is_inplace_name(name)
        or module_name.startswith(_TORCH_MODULES_WITH_EFFECTS)
        or (_is_state(owner) and not isinstance(owner, Tensor))
    ):
        raise _SideEffect(f"calls {name}, which may change what it is given")
    return FRESH if name in _MEASURING or not protected else GIVEN


def _join_value_elements(value: HookValue) -> HookValue:
    """Return the origin (a :class:`HookValue`) of an element of ``value``, the origin of a value in a hook's source,
    such as a container."""
    if value.kind != "known":
        return FRESH if value.kind == "none" else value
    return functools.reduce(HookValue.join, map(_join_object_elements, value.objects))


def _join_object_elements(owner: Any) -> HookValue:
    """Return the origin (a :class:`HookValue`) of an element of the existing object ``owner``, which the source of a
    hook reads. For a container with at least one element and not too many, the result covers all elements. For a
    tensor, it is the tensor itself, because its elements share its memory. For any other object, it is "unknown"."""
    if isinstance(owner, Tensor):
        return HookValue("known", (owner,))
    held = (
        list(owner.values() if isinstance(owner, dict) else owner) if isinstance(owner, (*_CONTAINERS, tuple)) else []
    )
    if isinstance(owner, collections.defaultdict) and owner.default_factory in (list, dict, set, int, float, str):
        held.append(owner.default_factory())
    if not held or len(held) > _MOST_OBJECTS:
        return UNKNOWN
    return functools.reduce(HookValue.join, map(_classify_object, held))


# --- one function -----------------------------------------------------------------------------------------------------
class _HookReader:
    """Analyses the source of one Python function, such as a hook, without running it. ``depth``: the number of calls
    that enclose the call of this function.

    The reader finds the origin (a :class:`HookValue`) of each value. A local name has one origin in the whole function,
    and the statements are analysed again until no origin changes. The order of statements and the number of loop
    iterations therefore do not matter.
    """

    def __init__(self, function: types.FunctionType, depth: int) -> None:
        self.function, self.depth = function, depth
        self.node = _find_code_definition(function.__code__)
        self.names: dict[str, HookValue] = {}
        self.result: HookValue | None = None

    def find_returned_value(self, args: list[HookValue], named: dict[str, HookValue]) -> HookValue:
        """Return the origin (a :class:`HookValue`, such as "given" for an argument of the hook) of the value that the
        analysed function returns.

        ``args``, ``named``: the origin of its positional arguments and, by name, of its keyword arguments. Raise
        :class:`_SideEffect` if the function may change something, or cannot be analysed.
        """
        self._bind_parameters(args, named)
        for _ in range(_MOST_ROUNDS):
            before, self.result = dict(self.names), None
            if isinstance(self.node, ast.Lambda):
                return self.evaluate_node(self.node.body)
            self.read_statements(self.node.body)
            if self.names == before:
                return self.result or NONE
        raise _SideEffect("is too involved to be read")

    def _bind_parameters(self, args: list[HookValue], named: dict[str, HookValue]) -> None:
        """Record the origin (a :class:`HookValue`) of each parameter of the analysed function in one call. A parameter
        without an argument gets the origin of its default; if it has no default, "unknown".

        ``args``, ``named``: the origin of the call's positional arguments and, by name, of its keyword arguments.
        """
        parameters = self.node.args
        names = [a.arg for a in (*parameters.posonlyargs, *parameters.args)]
        defaults = dict(zip(reversed(names), reversed(self.function.__defaults__ or ()), strict=False))
        defaults |= self.function.__kwdefaults__ or {}
        bound = {
            **{n: _classify_object(v) for n, v in defaults.items()},
            **dict(zip(names, args, strict=False)),
            **named,
        }
        for name in (*names, *(a.arg for a in parameters.kwonlyargs)):
            self.names[name] = bound.get(name, UNKNOWN)
        for extra, rest in ((parameters.vararg, args[len(names) :]), (parameters.kwarg, list(named.values()))):
            if extra is not None:
                self.names[extra.arg] = functools.reduce(HookValue.join, rest, FRESH)

    def create_side_effect(self, effect: str, node: ast.AST) -> _SideEffect:
        """Return the exception which says that the analysed function may change something. ``effect``: what it may do,
        as text. ``node``: the part of the syntax tree that does it, for the line number."""
        return _SideEffect(f"{effect} (line {getattr(node, 'lineno', '?')})")

    # statements

    def read_statements(self, body: Sequence[ast.stmt]) -> None:
        """Analyse the statements ``body`` of the function, without running them. Raise :class:`_SideEffect` if one may
        change something."""
        for statement in body:
            self.read_statement(statement)

    def read_statement(self, node: ast.stmt) -> None:
        """Analyse the statement ``node`` of a hook's source, and record the origins (:class:`HookValue`) of the values
        that it assigns to names or returns. Raise :class:`_SideEffect` if the statement may change something, raise an
        error, or cannot be analysed."""
        match node:
            case ast.Return():
                found = NONE if node.value is None else self.evaluate_node(node.value)
                self.result = found if self.result is None else self.result.join(found)
            case ast.Assign():
                found = self.evaluate_node(node.value)
                for target in node.targets:
                    self.store_value(target, found)
            case ast.AnnAssign():
                if node.value is not None:
                    self.store_value(node.target, self.evaluate_node(node.value))
            case ast.AugAssign():
                held, added = self.evaluate_node(node.target), self.evaluate_node(node.value)
                if held.kind not in ("fresh", "none") and not _is_existing_container(held):
                    raise self.create_side_effect(f"changes {ast.unparse(node.target)} in place", node)
                self.store_value(node.target, held.join(added))
            case ast.For():
                self.store_value(node.target, _join_value_elements(self.evaluate_node(node.iter)))
                self.read_statements([*node.body, *node.orelse])
            case ast.While() | ast.If():
                self.evaluate_node(node.test)
                self.read_statements([*node.body, *node.orelse])
            case ast.With():
                for item in node.items:
                    found = self.evaluate_node(item.context_expr)
                    if item.optional_vars is not None:
                        self.store_value(item.optional_vars, found)
                self.read_statements(node.body)
            case ast.Try():
                self.read_statements(
                    [*node.body, *(s for h in node.handlers for s in h.body), *node.orelse, *node.finalbody]
                )
            case ast.Expr():
                self.evaluate_node(node.value)
            case ast.Import() | ast.ImportFrom():
                self._bind_imported_names(node)
            case ast.Delete():
                for target in node.targets:
                    if not isinstance(target, ast.Name):
                        self.store_value(target, FRESH)
            case ast.Pass() | ast.Break() | ast.Continue() | ast.Global() | ast.Nonlocal():
                pass
            case ast.Raise() | ast.Assert():
                raise self.create_side_effect("may raise an error", node)
            case _:
                raise self.create_side_effect(f"has a statement that is not read ({type(node).__name__.lower()})", node)

    def _bind_imported_names(self, node: ast.Import | ast.ImportFrom) -> None:
        """Record the object for which each name stands that ``node``, an import statement in a hook's source, binds. If
        the module is not loaded, the name's origin is "unknown"."""
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            if isinstance(node, ast.Import):
                found = sys.modules.get(alias.name if alias.asname else name)
            else:
                found = getattr(sys.modules.get(node.module or ""), alias.name, None)
            self.names[name] = UNKNOWN if found is None else HookValue("known", (found,))

    def store_value(self, target: ast.expr, found: HookValue) -> None:
        """Record an assignment in a hook's source, without running it. A name gets the origin ``found``, or, if it
        already has another one, an origin that covers both. Raise :class:`_SideEffect` for an assignment to an
        attribute or element of an object that the hook has not made and that did not exist before, or that is a part of
        training.

        ``target``: the expression to which a value is assigned. ``found``: the origin (a :class:`HookValue`) of this
        value.
        """
        match target:
            case ast.Name():
                held = self.names.get(target.id)
                self.names[target.id] = found if held is None or held == found else held.join(found)
            case ast.Tuple() | ast.List():
                for part in target.elts:
                    self.store_value(part, _join_value_elements(found))
            case ast.Starred():
                self.store_value(target.value, found)
            case ast.Attribute() | ast.Subscript():
                base = self.evaluate_node(target.value)
                if base.kind not in ("fresh", "known") or any(map(_is_state, base.objects)):
                    raise self.create_side_effect(f"writes to {ast.unparse(target)}", target)
            case _:
                raise self.create_side_effect(f"writes to {ast.unparse(target)}", target)

    # expressions

    def evaluate_node(self, node: ast.expr) -> HookValue:
        """Return the origin (a :class:`HookValue`, such as "given" for an argument of the hook) of the value of the
        expression ``node`` in a hook's source. Raise :class:`_SideEffect` if evaluating it may change something, or if
        it cannot be analysed."""
        match node:
            case ast.Constant():
                return NONE if node.value is None else FRESH
            case ast.Name():
                return self.evaluate_name(node.id)
            case ast.Attribute():
                return self.evaluate_attribute(self.evaluate_node(node.value), node.attr)
            case ast.Subscript():
                self.evaluate_node(node.slice)
                return _join_value_elements(self.evaluate_node(node.value))
            case ast.Call():
                return self.evaluate_call(node)
            case ast.IfExp():
                self.evaluate_node(node.test)
                return self.evaluate_either(node.body, node.orelse)
            case ast.BoolOp():
                return self.evaluate_either(*node.values)
            case ast.NamedExpr():
                found = self.evaluate_node(node.value)
                self.store_value(node.target, found)
                return found
            case ast.Starred():
                return _join_value_elements(self.evaluate_node(node.value))
            case ast.Lambda():  # anything may call it, with any arguments
                for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                    self.store_value(ast.Name(parameter.arg), GIVEN)
                self.evaluate_node(node.body)
                return FRESH
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self.evaluate_comprehension(node)
            case ast.Await() | ast.Yield() | ast.YieldFrom():
                raise self.create_side_effect("is a generator", node)
        parts = [self.evaluate_node(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return FRESH if isinstance(node, ast.Compare | ast.JoinedStr | ast.FormattedValue) else _join_held_values(parts)

    def evaluate_either(self, *nodes: ast.expr) -> HookValue:
        """Return the origin (a :class:`HookValue`) of an expression in a hook's source that has the value of one of
        ``nodes``, such as ``a if c else b``. It is "none" only if all of ``nodes`` are ``None``."""
        found = [self.evaluate_node(n) for n in nodes]
        if all(f.kind == "none" for f in found):
            return NONE
        return functools.reduce(HookValue.join, [FRESH if f.kind == "none" else f for f in found])

    def evaluate_comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> HookValue:
        """Return the origin (a :class:`HookValue`) of the value of the comprehension ``node`` in a hook's source, and
        record the origin of its loop names."""
        for loop in node.generators:
            self.store_value(loop.target, _join_value_elements(self.evaluate_node(loop.iter)))
            for test in loop.ifs:
                self.evaluate_node(test)
        parts = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        return _join_held_values([self.evaluate_node(p) for p in parts])

    def evaluate_name(self, name: str) -> HookValue:
        """Return the origin (a :class:`HookValue`) of the value of ``name`` in the analysed function: a local name, a
        closure variable, a global or a builtin. It is "unknown" if ``name`` is none of these."""
        if name in self.names:
            return self.names[name]
        cells = dict(zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True))
        try:
            if name in cells:
                return _classify_object(cells[name].cell_contents)
        except ValueError:  # the closure variable has no value yet
            return UNKNOWN
        for place in (self.function.__globals__, vars(builtins)):
            if name in place:
                return _classify_object(place[name])
        return UNKNOWN

    def evaluate_attribute(self, base: HookValue, name: str) -> HookValue:
        """Return the origin (a :class:`HookValue`) of the attribute ``name`` of an object in a hook's source. ``base``:
        the origin of the object."""
        if base.kind != "known":
            return FRESH if base.kind == "none" or name in _DESCRIBING else base
        found = FRESH
        for n, owner in enumerate(base.objects):
            if _is_state(owner):
                one = FRESH if name in _DESCRIBING else MODEL
            elif isinstance(getattr_static(owner, name, property()), property):
                one = UNKNOWN
            else:
                one = _classify_object(getattr(owner, name))
            found = one if n == 0 else found.join(one)
        return found

    def evaluate_call(self, node: ast.Call) -> HookValue:
        """Return the origin (a :class:`HookValue`) of the result of the call ``node`` in a hook's source. Raise
        :class:`_SideEffect`, with the line of the call, if the call may change something or cannot be analysed."""
        args = [self.evaluate_node(a) for a in node.args]
        named = {k.arg or "**": self.evaluate_node(k.value) for k in node.keywords}
        text = ast.unparse(node.func)
        if named.get("out", FRESH).kind not in ("fresh", "none"):
            raise self.create_side_effect(f"writes to what {text} is given as out=", node)
        try:
            if isinstance(node.func, ast.Attribute):
                base = self.evaluate_node(node.func.value)
                if base.kind == "known" and any(map(_is_state, base.objects)):
                    base = GIVEN if all(isinstance(o, Tensor) for o in base.objects) else MODEL
                if base.kind != "known" or not base.objects:
                    return self.evaluate_method_call(node.func, base, [*args, *named.values()])
            called = self.evaluate_node(node.func)
            if called.kind != "known":
                raise _SideEffect(f"calls {text}, which cannot be read")
            found = [_evaluate_call(c, list(args), dict(named), self.depth + 1) for c in called.objects]
            if all(f.kind == "none" for f in found):
                return NONE
            return functools.reduce(HookValue.join, [FRESH if f.kind == "none" else f for f in found])
        except _SideEffect as found_out:
            raise found_out if "(line " in str(found_out) else self.create_side_effect(str(found_out), node) from None

    def evaluate_method_call(self, function: ast.Attribute, base: HookValue, values: list[HookValue]) -> HookValue:
        """Return the origin (a :class:`HookValue`) of the result of a method call in a hook's source, on an object that
        does not exist before the hook runs. Raise :class:`_SideEffect` if the method may change an argument of the hook
        or the model, or cannot be analysed.

        Args:
            function: the expression ``object.method`` of the call.
            base: the origin of the object.
            values: the origin of each argument.
        """
        name = function.attr
        if base.kind in ("unknown", "none"):
            raise _SideEffect(f"calls {ast.unparse(function)}, which cannot be read")
        if base.kind == "model":
            if name in _MODEL_READS or name in _MEASURING:
                return MODEL
            raise _SideEffect(f"calls {name} of a module")
        if name in _TRAINING or (base.kind == "given" and _is_inplace_name(name)):
            raise _SideEffect(f"changes what it is given, or the model ({name})")
        held = _join_held_values([base, *values])
        if base.kind == "fresh" and name in _FILLING:
            if isinstance(function.value, ast.Name):
                self.store_value(function.value, held)
            return NONE
        return FRESH if name in _MEASURING else held


_DESCRIBING = {
    "shape", "dtype", "device", "ndim", "is_cuda", "requires_grad", "is_leaf", "layout", "itemsize", "nbytes",
    "training", "__name__", "__qualname__",
}  # fmt: skip


def _join_held_values(values: Sequence[HookValue]) -> HookValue:
    """Return the origin (a :class:`HookValue`) of a new value in a hook's source that is made of ``values`` or holds
    them, such as a list. It covers all ``values``. In it, an existing object that is not a part of training (a module,
    tensor, optimizer) counts as "fresh", that is, as a value that the hook may change. ``values``: origins."""
    plain = [
        FRESH if v.kind == "none" or (v.kind == "known" and not any(map(_is_state, v.objects))) else v for v in values
    ]
    return functools.reduce(HookValue.join, plain, FRESH)


def _is_existing_container(value: HookValue) -> bool:
    """Return whether ``value``, the origin of a value in a hook's source, shows that the value is a list, dict, set or
    deque that exists before the hook runs."""
    return value.kind == "known" and all(isinstance(o, _CONTAINERS) for o in value.objects)


# --- source -----------------------------------------------------------------------------------------------------------
Definition = ast.FunctionDef | ast.Lambda


def _find_code_definition(code: types.CodeType) -> Definition:
    """Return the syntax tree node of the function from which the code object ``code`` was compiled. Raise
    :class:`_SideEffect` if its source is not found."""
    text = "".join(linecache.getlines(code.co_filename))
    try:
        tree, compiled = _parse_and_compile(text, code.co_filename)
    except SyntaxError:
        raise _SideEffect("has no source that can be read") from None
    same = [
        c
        for c in compiled
        if (c.co_name, c.co_firstlineno, c.co_code) == _build_code_key(code) and c.co_names == code.co_names
    ]
    found = [
        node
        for node in _iterate_function_nodes(tree)
        if _first_line(node) == code.co_firstlineno and _has_name_of_code(node, code)
    ]
    inside = [p for p in code.co_positions() if p[0] is not None and p[2] is not None and p[2:] != (0, 0)]
    if len(found) > 1:
        found = [n for n in found if all(_has_position_inside(n, p) for p in inside)]
    if not same or not found:
        raise _SideEffect("has no source that can be read")
    return min(found, key=lambda n: (n.end_lineno or 0, n.end_col_offset or 0))


def _build_code_key(code: types.CodeType) -> tuple[str, int, bytes]:
    """Return (name, first line, bytecode) of the code object ``code``, for comparison with other code objects."""
    return code.co_name, code.co_firstlineno, code.co_code


@lru_cache(maxsize=64)
def _parse_and_compile(text: str, file: str) -> tuple[ast.Module, tuple[types.CodeType, ...]]:
    """Return the syntax tree of ``text``, the source of the file ``file``, and a tuple of the code objects of all
    functions in it."""
    whole = compile(text, file, "exec", dont_inherit=True)
    return ast.parse(text), tuple(_iterate_nested_code(whole))


def _iterate_nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code objects of all functions defined inside ``code``. The code object of a function comes before those
    defined inside it."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _iterate_nested_code(constant)


def _iterate_function_nodes(tree: ast.Module) -> Iterator[Definition]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda))


def _first_line(node: Definition) -> int:
    """Return the first line (from 1) of the function definition ``node``, with its decorators."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return min([node.lineno, *(d.lineno for d in decorators)])


def _has_name_of_code(node: Definition, code: types.CodeType) -> bool:
    """Return whether the function definition ``node`` has the same name as the code object ``code``. The name of a
    lambda is ``<lambda>``."""
    return code.co_name == (node.name if isinstance(node, ast.FunctionDef) else "<lambda>")


def _has_position_inside(node: Definition, place: tuple[int | None, int | None, int | None, int | None]) -> bool:
    """Return whether a position of source code starts inside the definition ``node``. ``place``: (line, end line,
    column, end column), as ``code.co_positions()`` yields it. An unknown line or column is ``None`` and counts as 0."""
    line, _, column, _ = place
    start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    return start <= (line or 0, column or 0) <= end
