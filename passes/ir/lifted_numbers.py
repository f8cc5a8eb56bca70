"""Represent Python numbers as 0-dimensional tensors of the graph, so that a plan is valid for other numbers, too.

A training script schedules numbers: a loss weight, a temperature, the step itself. A trace would make the current
number a constant. ``forward`` therefore gets a :class:`LiftedNumber`, which computes with a 0-dimensional tensor of the
graph. As with Python numbers, it does not change the dtype of the tensors that it is combined with. A condition on the
number (``if beta > 0``) is evaluated with the planned number and becomes a :class:`Guard`. A run with another number
evaluates the guard again, and refuses the number if the outcome differs. A use that a tensor cannot represent
(``float(beta)``, ``range(n)``) raises :class:`NotLiftable`, and the number stays a constant.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

# ("number", value), ("given", path of an input), ("state", name of an attribute), or (operator, expression, ...)
Expression = Sequence[Any]
Number = int | float


class NotLiftable(Exception):
    """Raised if a model's forward uses a number in a way that a tensor cannot represent, such as ``range(n)``."""


@dataclass(frozen=True)
class Guard:
    """A condition on Python numbers that the traced forward branched on: ``expression`` evaluated to ``outcome``.

    ``expression``: a nested tuple such as ``("gt", ("given", "beta"), ("number", 0))`` for ``beta > 0``. ``"given"`` is
    followed by the path of an input, ``"state"`` by the name of an attribute that forward changes, and ``"number"`` by
    a constant. ``where`` is the source line in forward, as ``file:line``.
    """

    expression: Expression
    outcome: bool
    where: str = ""

    def holds(self, numbers: Mapping[str, Number]) -> bool:
        """Return whether the condition has its recorded outcome for the values ``numbers``, so that the plan is valid
        for them. The keys of ``numbers`` are paths of inputs or names of attributes.

        The result is true if a number of the condition is missing in ``numbers``, and false if the expression cannot be
        evaluated.
        """
        try:
            return bool(evaluate_expression(self.expression, numbers)) == self.outcome
        except KeyError:
            return True
        except (ArithmeticError, ValueError):
            return False

    @property
    def reads_state(self) -> bool:
        """Return whether this condition reads a number that forward itself changes, such as a step counter."""
        return _reads_state(self.expression)

    def __str__(self) -> str:
        text = format_expression(self.expression)
        return text if self.outcome else f"not ({text})"


def _reads_state(expression: Expression) -> bool:
    """Return whether ``expression``, a nested tuple such as ``("gt", ("state", "step"), ("number", 0))``, reads a
    number that forward itself changes (kind ``"state"``)."""
    kind, *operands = expression
    return kind == "state" or (kind not in ("number", "given") and any(map(_reads_state, operands)))


@dataclass
class LiftScope:
    """Record of how forward used its lifted numbers (Python numbers that are traced as tensors).

    ``flipped``: conditions whose outcome is inverted, to trace the other branch. ``guards``: all conditions so far.
    ``find_line``: returns the current source line of forward. ``problem``: the first use that a tensor cannot
    represent, as text; empty if there is none.
    """

    find_line: Callable[[], str]
    flipped: Sequence[Expression] = ()
    guards: list[Guard] = field(default_factory=list)
    problem: str = ""  # the first use that a tensor cannot represent, with its line

    def start(self) -> None:
        """Clear this record of how forward uses its numbers. Called when forward begins."""
        self.guards.clear()
        self.problem = ""

    def refuse(self, use: str) -> NotLiftable:
        """Record that forward uses a number in a way that a tensor cannot represent, and return the exception to raise.

        ``use``: the use as text, such as ``float()``.
        """
        self.problem = self.problem or f"{use}{self.find_line()}"
        return NotLiftable(self.problem)

    def decide(self, expression: Expression, outcome: bool) -> bool:
        """Record a condition on numbers that forward branches on, and return its outcome. If the condition is in
        ``flipped``, the conditions whose other branch is to be traced, the outcome is inverted before it is recorded
        and returned.

        ``expression``: the condition as a nested tuple, such as ``("gt", ("given", "beta"), ("number", 0))``, which
        says that the input ``beta`` is greater than 0. ``outcome``: its outcome for the numbers of the batch for which
        the plan is made.
        """
        outcome = outcome != (expression in self.flipped)
        guard = Guard(expression, outcome, self.find_line().strip(" ()"))
        if all(g.expression != expression for g in self.guards):
            self.guards.append(guard)
        return outcome


# --- operators: on Python numbers, and on 0-dimensional tensors -------------------------------------------------------
@dataclass(frozen=True)
class NumberOperator:
    """An operator that traced code can apply to Python numbers, such as ``+`` or ``math.sqrt``.

    ``on_numbers``: the Python function. ``on_tensors``: the equivalent function on 0-dimensional tensors of float64 or
    int64; ``None`` for comparisons. ``symbol``: how the operator is written in Python source; empty for a function.
    ``real``: whether operands are converted to float64 first.
    """

    on_numbers: Callable[..., Any]
    on_tensors: Callable[..., Tensor] | None
    symbol: str = ""
    real: bool = False  # operands are converted to float64 first


def _compute_minimum(*values: Any) -> Any:
    return builtins_min(*values)


def _compute_maximum(*values: Any) -> Any:
    return builtins_max(*values)


builtins_min, builtins_max = builtins.min, builtins.max


def _raise_to_power(base: Number, exponent: Number) -> Number:
    made = base**exponent
    if isinstance(made, complex):
        raise ValueError("a negative number to a fractional power")
    return made


OPERATORS: dict[str, NumberOperator] = {
    "add": NumberOperator(operator.add, torch.add, "+"),
    "sub": NumberOperator(operator.sub, torch.sub, "-"),
    "mul": NumberOperator(operator.mul, torch.mul, "*"),
    "truediv": NumberOperator(operator.truediv, torch.true_divide, "/", real=True),
    "floordiv": NumberOperator(operator.floordiv, torch.floor_divide, "//"),
    "mod": NumberOperator(operator.mod, torch.remainder, "%"),
    "pow": NumberOperator(_raise_to_power, torch.pow, "**"),
    "neg": NumberOperator(operator.neg, torch.neg, "-"),
    "abs": NumberOperator(abs, torch.abs),
    "min": NumberOperator(_compute_minimum, torch.minimum),
    "max": NumberOperator(_compute_maximum, torch.maximum),
    **{
        name: NumberOperator(getattr(math, name), getattr(torch, name), real=True)
        for name in ("exp", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan", "sinh", "cosh",
                     "tanh", "asin", "acos", "atan", "erf")
    },
    "float": NumberOperator(float, torch.Tensor.double, real=True),
    "floor": NumberOperator(math.floor, lambda x: torch.floor(x).long()),
    "ceil": NumberOperator(math.ceil, lambda x: torch.ceil(x).long()),
    "trunc": NumberOperator(math.trunc, lambda x: torch.trunc(x).long()),
    **{
        name: NumberOperator(getattr(operator, name), None, symbol)
        for name, symbol in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items()
    },
}  # fmt: skip
# Operators for which Python raises an error where a tensor has infinity or NaN -> (position of an operand, the
# comparison and the number that it must satisfy).
_DOMAINS: dict[str, tuple[int, str, Number]] = {
    **dict.fromkeys(("truediv", "floordiv", "mod"), (1, "ne", 0)),
    **dict.fromkeys(("log", "log2", "log10"), (0, "gt", 0)),
    "log1p": (0, "gt", -1),
    "sqrt": (0, "ge", 0),
}


def evaluate_expression(expression: Expression, numbers: Mapping[str, Number]) -> Any:
    """Evaluate ``expression``, a nested tuple such as ``("mul", ("given", "beta"), ("number", 2))`` for twice the input
    ``beta``, and return its value.

    ``numbers``: the values of inputs, by path (``"given"`` in the expression), and of attributes that forward changes,
    by name (``"state"``). Raises ``KeyError`` if one is missing.
    """
    kind, *operands = expression
    if kind == "number":
        return operands[0]
    if kind in ("given", "state"):
        return numbers[operands[0]]
    return OPERATORS[kind].on_numbers(*(evaluate_expression(o, numbers) for o in operands))


def format_expression(expression: Expression) -> str:
    """Return ``expression`` as Python source text, such as ``beta * 2`` for ``("mul", ("given", "beta"), ("number",
    2))``.
    """
    kind, *operands = expression
    if kind == "number":
        return repr(operands[0])
    if kind in ("given", "state"):
        return str(operands[0])
    texts = [format_expression(o) for o in operands]
    symbol = OPERATORS[kind].symbol
    if symbol and len(texts) == 2:
        nested = [
            f"({t})" if len(o) == 3 and OPERATORS[o[0]].symbol else t for t, o in zip(texts, operands, strict=True)
        ]
        return f"{nested[0]} {symbol} {nested[1]}"
    return f"{symbol or kind}({', '.join(texts)})" if not symbol else f"{symbol}{texts[0]}"


# --- the number -------------------------------------------------------------------------------------------------------
class LiftedNumber:
    """Replacement of a Python number while forward is traced; arithmetic on it appends operators to the graph.

    ``value``: the number in the batch for which the plan is made, with which conditions of forward are evaluated.
    ``tensor``: the 0-dimensional tensor that represents the number. ``expression``: how the number is computed from
    inputs and attributes, as a nested tuple. ``scope``: records conditions on the number.
    """

    __slots__ = ("expression", "scope", "tensor", "value")

    def __init__(self, tensor: Tensor, value: Number, expression: Expression, scope: LiftScope) -> None:
        self.tensor, self.value, self.expression, self.scope = tensor, value, expression, scope

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.value)

    def __repr__(self) -> str:
        return f"LiftedNumber({format_expression(self.expression)})"

    def __deepcopy__(self, memo: Any) -> LiftedNumber:
        return self

    # -- conditions and conversions that need the number itself

    def _decide_comparison(self, name: str, other: Any) -> Any:
        """Compare this number with the number ``other``, record the comparison, and return its outcome; return
        ``NotImplemented`` if ``other`` is not a number.

        ``name``: the comparison, such as ``lt``.
        """
        if not _is_number(other):
            return NotImplemented
        theirs, value = _get_expression(other), _get_number(other)
        outcome = bool(OPERATORS[name].on_numbers(self.value, value))
        return self.scope.decide((name, self.expression, theirs), outcome)

    def __lt__(self, other: Any) -> Any:
        return self._compare_with_value("lt", other)

    def __le__(self, other: Any) -> Any:
        return self._compare_with_value("le", other)

    def __gt__(self, other: Any) -> Any:
        return self._compare_with_value("gt", other)

    def __ge__(self, other: Any) -> Any:
        return self._compare_with_value("ge", other)

    def __eq__(self, other: Any) -> Any:
        return self._compare_with_value("eq", other)

    def __ne__(self, other: Any) -> Any:
        return self._compare_with_value("ne", other)

    def _compare_with_value(self, name: str, other: Any) -> Any:
        """Compare this number with ``other``. If ``other`` is a tensor, return a tensor. If it is a number, return the
        outcome for the batch for which the plan is made, which is recorded.

        ``name``: the comparison, such as ``lt``.
        """
        if isinstance(other, Tensor):
            return getattr(torch, name)(_match_number_dtype(self, [other]), other)
        return self._decide_comparison(name, other)

    def __bool__(self) -> bool:
        return bool(self._decide_comparison("ne", 0))

    def is_integer(self) -> bool:
        """Return whether this number is whole, like :meth:`float.is_integer`. The plan is valid only for inputs with
        the same result."""
        return bool(apply_number_operator("mod", self, 1) == 0)

    def _refuse_number_use(self, use: str) -> Any:
        raise self.scope.refuse(use)

    def __float__(self) -> float:
        return self._refuse_number_use("float()")  # type: ignore[no-any-return]

    def __int__(self) -> int:
        return self._refuse_number_use("int()")  # type: ignore[no-any-return]

    def __index__(self) -> int:
        return self._refuse_number_use("an index, a size or a count")  # type: ignore[no-any-return]

    def __hash__(self) -> int:
        return self._refuse_number_use("a key")  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return self._refuse_number_use("a text")  # type: ignore[no-any-return]

    def __format__(self, spec: str) -> str:
        return self._refuse_number_use("a text")  # type: ignore[no-any-return]

    def __complex__(self) -> complex:
        return self._refuse_number_use("complex()")  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse_number_use(f"the attribute {name!r}")

    # -- arithmetic

    def __neg__(self) -> Any:
        return apply_number_operator("neg", self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return apply_number_operator("abs", self)

    def __floor__(self) -> Any:
        return apply_number_operator("floor", self)

    def __ceil__(self) -> Any:
        return apply_number_operator("ceil", self)

    def __trunc__(self) -> Any:
        return apply_number_operator("trunc", self)

    def __round__(self, digits: int | None = None) -> Any:
        return self._refuse_number_use("round()")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the torch function ``func`` and return its result. Lifted numbers (Python numbers that are traced as
        tensors) in ``args`` and ``kwargs`` are replaced by their 0-dimensional tensors. ``types``: unused."""
        return func(*_replace_lifted_numbers(func, args), **_replace_lifted_numbers(func, args, kwargs or {}))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Apply the operator that is equivalent to the NumPy function ``ufunc`` to ``inputs``, one of which is this
        number, and return the result. ``method``: how NumPy calls the function. Raise :class:`NotLiftable` if there is
        no such operator, if ``method`` is not ``"__call__"``, or if there are keyword arguments."""
        name = _UFUNCS.get(ufunc.__name__)
        if method != "__call__" or kwargs or name is None or not all(map(_is_number, inputs)):
            return self._refuse_number_use(f"numpy.{ufunc.__name__}")
        return apply_number_operator(name, *inputs)


_UFUNCS = {
    **{name: name for name in OPERATORS},
    "subtract": "sub", "multiply": "mul", "divide": "truediv", "true_divide": "truediv", "floor_divide": "floordiv",
    "remainder": "mod", "power": "pow", "negative": "neg", "absolute": "abs", "minimum": "min", "maximum": "max",
    "arcsin": "asin", "arccos": "acos", "arctan": "atan",
}  # fmt: skip


def _make_binary_method(name: str, swapped: bool) -> Callable[[Any, Any], Any]:
    """Return a method of lifted numbers (Python numbers that are traced as tensors) for a binary operator: one such as
    ``__add__``, or, if ``swapped`` is true, one such as ``__radd__``. ``name``: the operator, such as ``add``."""

    def method(self: Any, other: Any) -> Any:
        """Apply one binary operator, such as ``+``, to this lifted number (a Python number that is traced as a tensor)
        and ``other``. The result is a tensor if ``other`` is a tensor, a lifted number if ``other`` is a number, and
        ``NotImplemented`` otherwise."""
        if isinstance(other, Tensor):
            mine = _match_number_dtype(self, [other])
            function = OPERATORS[name].on_tensors
            assert function is not None
            return function(other, mine) if swapped else function(mine, other)
        if not _is_number(other):
            return NotImplemented
        return apply_number_operator(name, other, self) if swapped else apply_number_operator(name, self, other)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(LiftedNumber, f"__{_name}__", _make_binary_method(_name, swapped=False))
    setattr(LiftedNumber, f"__r{_name}__", _make_binary_method(_name, swapped=True))


def is_lifted(value: Any) -> bool:
    """Return whether ``value`` is a :class:`LiftedNumber`, a Python number that is traced as a tensor.

    ``isinstance`` cannot be used, because a lifted number reports the class ``int`` or ``float``.
    """
    return type(value) is LiftedNumber


def _is_number(value: Any) -> bool:
    return is_lifted(value) or (isinstance(value, int | float) and not isinstance(value, Tensor))


def _get_number(value: Any) -> Number:
    """Return the Python number of ``value``. For a lifted number (a Python number that is traced as a tensor), this is
    the number in the batch for which the plan is made; otherwise it is ``value`` itself."""
    return value.value if is_lifted(value) else value  # type: ignore[no-any-return]


def _get_expression(value: Any) -> Expression:
    return value.expression if is_lifted(value) else ("number", value)


def apply_number_operator(name: str, *operands: Any) -> Any:
    """Apply an operator such as ``add`` or ``sqrt`` to ``operands``, Python numbers of which at least one is lifted
    (traced as a tensor), and return the result as a lifted number.

    ``name``: the operator's name, such as ``add`` for ``+``. Raises :class:`NotLiftable` if a tensor cannot represent
    the result.
    """
    scope = next(o.scope for o in operands if is_lifted(o))
    if name in _DOMAINS:
        place, question, bound = _DOMAINS[name]
        if is_lifted(operands[place]):
            operands[place]._decide_comparison(question, bound)
    used = OPERATORS[name]
    expression: Expression = (name, *map(_get_expression, operands))
    try:
        value = used.on_numbers(*map(_get_number, operands))
    except ValueError as error:
        raise scope.refuse(str(error)) from error
    if name == "pow" and not isinstance(value, float) and is_lifted(operands[1]):
        raise scope.refuse("a whole power of a whole number")  # Python returns a float if the exponent is negative
    assert used.on_tensors is not None
    real = used.real or any(isinstance(_get_number(o), float) for o in operands)
    tensors = [_make_tensor(o, real) for o in operands]
    return LiftedNumber(used.on_tensors(*tensors), value, expression, scope)


def _make_tensor(value: Any, real: bool) -> Tensor:
    """Return the Python number ``value``, which may be lifted (traced as a tensor), as a 0-dimensional tensor: float64
    if ``real`` is true, otherwise int64."""
    dtype = torch.float64 if real else torch.int64
    if is_lifted(value):
        tensor: Tensor = value.tensor
        return tensor if tensor.dtype == dtype else tensor.to(dtype)
    return torch.scalar_tensor(value, dtype=dtype)


# --- numbers among tensors --------------------------------------------------------------------------------------------
# functions that do not promote the dtypes of their operands
_OF_ONE_TYPE = frozenset({torch.lerp, Tensor.lerp, Tensor.lerp_})


def _match_number_dtype(number: LiftedNumber, others: Sequence[Tensor], same_dtype: bool = False) -> Tensor:
    """Return the tensor of ``number``, a lifted number (a Python number that is traced as a tensor), cast so that torch
    promotes dtypes as for a Python number.

    Args:
        others: the tensor operands with which the number is combined.
        same_dtype: whether the operator requires operands of the same dtype.
    """
    tensor = number.tensor
    real = [t for t in others if t.is_floating_point() or t.is_complex()]
    if tensor.dtype == torch.int64 and not same_dtype:
        whole = [t for t in others if not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool]
        small = whole and not real and all(t.dim() == 0 for t in whole)
        return tensor.to(_promote_tensor_dtypes(whole)) if small else tensor
    if not real:
        return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor
    if any(t.dim() for t in real) and not same_dtype:
        return tensor
    dtype = _promote_tensor_dtypes(real)
    return tensor.to(dtype.to_real() if dtype.is_complex else dtype)


def _promote_tensor_dtypes(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype to which torch promotes all ``tensors`` together."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _replace_lifted_numbers(func: Any, args: Any, tree: Any = None) -> Any:
    """Return the pytree ``tree`` (``args`` if it is ``None``) with lifted numbers (Python numbers that are traced as
    tensors) replaced by their 0-dimensional tensors.

    The tensors are cast so that ``func``, a torch function with the arguments ``args``, promotes dtypes as for Python
    numbers.
    """
    tree = args if tree is None else tree
    others = [leaf for leaf in pytree.tree_leaves((args, tree)) if isinstance(leaf, Tensor)]

    def replace(leaf: Any) -> Any:
        return _match_number_dtype(leaf, others, func in _OF_ONE_TYPE) if is_lifted(leaf) else leaf

    return pytree.tree_map(replace, tree)


class _ConstructorMode(TorchFunctionMode):
    """A torch function mode in which torch functions that require Python numbers, such as ``torch.full``, also accept
    lifted numbers (Python numbers that are traced as tensors)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the torch function ``func`` with ``args`` and ``kwargs`` and return its result. If an argument is a
        lifted number (a Python number that is traced as a tensor), call an equivalent function that accepts it.
        ``types``: unused."""
        kwargs = dict(kwargs or {})
        if func in _MAKERS and any(map(is_lifted, (*args, *kwargs.values()))):
            return _MAKERS[func](*args, **kwargs)
        return func(*args, **kwargs)


def _make_scalar(number: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Return a 0-dimensional tensor of ``number``, a lifted number (a Python number that is traced as a tensor).
    ``dtype``: the tensor's dtype; ``None`` for the dtype that torch gives to a Python number."""
    kind = torch.get_default_dtype() if isinstance(number.value, float) else torch.int64
    made: Tensor = number.tensor.to(dtype or kind)
    return made


def _make_full(size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _make_scalar(fill_value, dtype=dtype).expand(size).clone()


def _make_full_like(like: Tensor, fill_value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _make_scalar(fill_value, dtype=dtype or like.dtype).expand(like.shape).clone()


def _make_new_full(like: Tensor, size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _make_scalar(fill_value, dtype=dtype or like.dtype).expand(size).clone()


def _make_new_tensor(like: Tensor, data: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _make_scalar(data, dtype=dtype or like.dtype)


def _add_scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like ``function`` (torch's ``add`` or ``sub``) whose argument ``alpha`` may be a lifted number
    (a Python number that is traced as a tensor).
    """

    def scaled(x: Tensor, other: Any, *, alpha: Any = 1, **kwargs: Any) -> Any:
        return function(x, other * alpha, **kwargs)

    return scaled


_MAKERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.scalar_tensor), _make_scalar),
    torch.full: _make_full,
    torch.full_like: _make_full_like,
    Tensor.new_full: _make_new_full,
    Tensor.new_tensor: _make_new_tensor,
    **{f: _add_scaled(f) for f in (torch.add, torch.sub, Tensor.add, Tensor.sub, Tensor.add_, Tensor.sub_)},
}


# --- while the forward is traced --------------------------------------------------------------------------------------
@contextlib.contextmanager
def trace_number_functions() -> Iterator[None]:
    """Return a context in which ``min``, ``max``, functions of ``math``, and functions of torch such as ``torch.full``
    also accept lifted numbers (Python numbers that are traced as tensors)."""
    patches = [
        mock.patch.object(builtins, "min", _wrap_extreme_function("min", builtins_min)),
        mock.patch.object(builtins, "max", _wrap_extreme_function("max", builtins_max)),
        *(
            mock.patch.object(math, name, _wrap_math_function(name, getattr(math, name)))
            for name in OPERATORS
            if hasattr(math, name) and name not in ("floor", "ceil", "trunc")
        ),
        mock.patch.object(math, "pow", _wrap_math_function("pow", math.pow)),
        mock.patch.object(math, "fabs", _wrap_math_function("abs", math.fabs)),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(_ConstructorMode())
        yield


def _wrap_math_function(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of ``original``, a function of Python's module ``math``, that also accepts lifted numbers
    (Python numbers that are traced as tensors).

    ``name``: the operator to apply if an argument is lifted, such as ``sqrt``; otherwise, ``original`` is called.
    """

    def call(*args: Any) -> Any:
        """Return the value of a function of ``math`` for ``args``. If an argument is a lifted number (a Python number
        that is traced as a tensor), the equivalent operator of the graph is applied; otherwise, the function itself is
        called."""
        if not any(type(a) is LiftedNumber for a in args):
            return original(*args)
        if name == "log" and len(args) == 2:
            return apply_number_operator("log", args[0]) / (
                apply_number_operator("log", args[1]) if is_lifted(args[1]) else original(args[1])
            )
        return apply_number_operator(name, *args)

    return call


def _wrap_extreme_function(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of Python's ``min`` or ``max`` that also accepts lifted numbers (Python numbers that are traced
    as tensors).

    ``name``: ``min`` or ``max``. ``original``: the function itself, which is called if no value is lifted.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        """Return the smallest or largest of the given values, as ``min`` or ``max`` do. If a value is a lifted number
        (a Python number that is traced as a tensor), the result is a lifted number, too."""
        values = args
        if len(args) == 1 and isinstance(args[0], tuple | list):
            values = tuple(args[0])
        if not any(type(v) is LiftedNumber for v in values):
            return original(*args, **kwargs)
        if kwargs or not all(map(_is_number, values)):
            return original(*args, **kwargs)
        found = values[0]
        for value in values[1:]:
            found = (
                apply_number_operator(name, found, value)
                if is_lifted(found) or is_lifted(value)
                else original(found, value)
            )
        return found

    return call
