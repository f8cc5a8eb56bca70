"""Read a Python module that describes a configuration of torchtitan, without executing it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from partitioner.interop.layout import LayoutError

_LARGEST = 2**40  # largest number in a sum or product
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_MOST_CALLS = 50  # nested calls of functions of a module
_MOST_CALLS_IN_ALL = 1000
_SHOWN = 80  # characters of an expression in a message


class Unreadable(str):
    """The source text of an expression whose value cannot be known without running the module that contains it."""


def read_config_function(source: str, function: str | None, where: str) -> dict[str, Any]:
    """Return the options of the configuration that a function of a module returns, as nested sections.

    ``source``: the Python source of the module. ``function``: the function's name; ``None``: the only function of the
    module that returns a configuration. ``where``: the name of the module, for messages. The class of a component is
    under the key ``class``. Raise :class:`LayoutError` if there is no such function, or if its result is not known
    without running it.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise LayoutError(f"{where} is no Python module: {error}; correct the file") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if function is None:
        try:
            found = [name for name, node in functions.items() if _returns_config(node)]
        except RecursionError:
            raise LayoutError(f"{where} is nested too deeply; expected a configuration") from None
        if len(found) != 1:
            listed = ", ".join(found[:20]) or "none"
            raise LayoutError(
                f"{where} has {len(found)} functions that return a configuration ({listed}); expected one, or its name "
                "as FILE.py:FUNCTION"
            )
        function = found[0]
    if function not in functions:
        raise LayoutError(f"{where} has no function {function!r}; expected one of {', '.join(functions) or 'none'}")
    try:
        result = _Reader(functions, tree).call(function, 0)
    except RecursionError:
        raise LayoutError(f"{where} is nested too deeply; expected a configuration") from None
    if not isinstance(result, dict):
        shown = " ".join(str(result).split())[:_SHOWN] or "nothing"
        raise LayoutError(
            f"{where}: {function} returns {shown}, which is not known without running the module; expected "
            "Trainer.Config(...) with values written out, or the function that it builds on, as FILE.py:FUNCTION"
        )
    return result


def _returns_config(node: ast.FunctionDef) -> bool:
    """Return whether ``node``, the definition of a function, has no positional parameters and a return annotation whose
    name ends in ``Config``.
    """
    name = ast.unparse(node.returns).strip("'\"") if node.returns is not None else ""
    return name.endswith("Config") and not node.args.args


class _Reader:
    """Evaluates the functions of a Python module that build a configuration, without running it. Only literals,
    constructor calls and assignments are evaluated.
    """

    def __init__(self, functions: dict[str, ast.FunctionDef], tree: ast.Module) -> None:
        self._functions = functions
        self._num_calls = 0
        self._globals: dict[str, Any] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self._globals[node.targets[0].id] = self._value(node.value, {}, 0)

    def call(self, name: str, depth: int) -> Any:
        """Return the value that the function ``name`` of the module returns; configurations are dicts of their fields.
        ``depth``: number of calls of functions of the module that led to this one. Raise ``RecursionError`` if it
        exceeds a limit, or if there are too many calls in all."""
        self._num_calls += 1
        if depth > _MOST_CALLS or self._num_calls > _MOST_CALLS_IN_ALL:
            raise RecursionError
        names: dict[str, Any] = {}
        for node in self._functions[name].body:
            if isinstance(node, ast.Return):
                return self._value(node.value, names, depth) if node.value is not None else None
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._assign(node.targets[0], self._value(node.value, names, depth), names)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._assign(node.target, self._value(node.value, names, depth), names)
        return None

    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        """Store ``value`` under ``target``, the left side of an assignment. It is either a variable, or a field of a
        configuration object that a variable holds, such as ``config.training.steps``. Other targets are ignored.
        ``names``: variable -> value; it is changed in place.
        """
        if isinstance(target, ast.Name):
            names[target.id] = value
            return
        path: list[str] = []
        while isinstance(target, ast.Attribute):
            path.insert(0, target.attr)
            target = target.value
        place = names.get(target.id) if isinstance(target, ast.Name) else None
        for name in path[:-1]:
            place = place.setdefault(name, {}) if isinstance(place, dict) else None
        if isinstance(place, dict) and path:
            place[path[-1]] = value

    def _value(self, node: ast.expr, names: dict[str, Any], depth: int) -> Any:
        """Return the value of the expression ``node``; a configuration is a dict of its fields. If the value is not
        known without running the module, return the source text as :class:`Unreadable`. ``names``: variable -> value.
        ``depth``: number of calls around the expression.
        """
        if isinstance(node, ast.Name):
            known = names if node.id in names else self._globals
            return known.get(node.id, Unreadable(node.id))
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(each, names, depth) for each in node.elts]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in self._functions and not node.args:
                return self.call(called, depth + 1)
            if called == "replace" or called.endswith(".replace"):
                base = self._value(node.args[0], names, depth) if node.args else None
                return self._add_keywords(dict(base) if isinstance(base, dict) else {}, node, names, depth)
            if called.rpartition(".")[2].endswith("Config") or called.rpartition(".")[2] == "Config":
                return self._add_keywords({"class": called}, node, names, depth)
            return Unreadable(ast.unparse(node))
        if isinstance(node, ast.Attribute):
            base = self._value(node.value, names, depth)
            return (
                base.get(node.attr, Unreadable(ast.unparse(node)))
                if isinstance(base, dict)
                else Unreadable(ast.unparse(node))
            )
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = (self._value(each, names, depth) for each in (node.left, node.right))
            small = type(left) is int and type(right) is int and max(abs(left), abs(right)) < _LARGEST
            if small and (right or not isinstance(node.op, ast.FloorDiv)):
                return _OPERATORS[type(node.op)](left, right)
            return Unreadable(ast.unparse(node))
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, MemoryError, SyntaxError):
            return Unreadable(ast.unparse(node))

    def _add_keywords(self, found: dict[str, Any], node: ast.Call, names: dict[str, Any], depth: int) -> dict[str, Any]:
        for keyword in node.keywords:
            if keyword.arg is not None:
                found[keyword.arg] = self._value(keyword.value, names, depth)
        return found
