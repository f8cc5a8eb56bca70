"""Table of sharding rules by operator, and the parser of rules that are written as text.

The modules of this folder and the user add rules. Example of a text: ``"b s (h d), h d -> b s h"``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from partitioner.passes.allowed_operators import allow_operators
from partitioner.passes.errors import RuleError
from partitioner.passes.ir.interpret import build_argument_key, resolve_meta_values
from partitioner.passes.rules.factors import NAMES, Dims, OpFactors, get_meta_shape, operands_of, results_of

_TOKEN = re.compile(r"\s*(\.\.\.|->|[(),!]|1(?!\w)|[A-Za-z_]\w*)")

_HELP = 'expected text like "b s i, o i -> b s o", where "!" marks a factor that must be whole'


@dataclass(frozen=True)
class DimPattern:
    """The dims of one tensor in the text of a sharding rule. A factor is a named loop dimension of the operator, like a
    letter of an einsum.

    ``dims``: for each dim, the names of its factors, outermost first; an empty tuple for a dim of size 1. ``ellipsis``:
    whether the text has ``...`` before the dims, which stands for any number of leading dims.
    """

    dims: Dims
    ellipsis: bool = False


@dataclass(frozen=True)
class TextRule:
    """A sharding rule of an operator, parsed from a text such as ``"b s i, o i -> b s o"``. :meth:`fit` converts the
    text rule to the rule of one call with known tensor shapes.

    ``name``: the operator's name, for error messages. ``text``: the text itself. ``operands``, ``results``: the dims of
    each tensor in the text. ``whole``: the factors marked ``!``, which must not be sharded. ``linear``: sets of operand
    positions (from 0); if exactly the operands of one set are partial sums, so are the results.
    """

    name: str
    text: str
    operands: tuple[DimPattern, ...]
    results: tuple[DimPattern, ...]
    whole: frozenset[str]
    linear: tuple[frozenset[int], ...]

    @staticmethod
    def parse(text: str, name: str, linear: tuple[frozenset[int], ...] = ()) -> TextRule:
        """Parse ``text``, such as ``"b s i, o i -> b s o"``, and return the sharding rule of the operator with the name
        ``name``. Raise :class:`RuleError` if ``text`` is malformed.

        ``linear``: sets of operand positions (from 0); if exactly the operands of one set are partial sums, so are the
        results.
        """
        return _Parser(text, name).parse_rule(linear)

    def fit(self, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]], where: str) -> OpFactors:
        """Return the sharding rule of one call of the operator with the given tensor shapes. Raise :class:`RuleError`
        if the shapes do not fit the text of this rule.

        ``operands``, ``results``: the shapes of the tensors that the call reads and returns. ``where``: the name of the
        call, for error messages.
        """
        sides: list[tuple[Dims, ...]] = []
        pairs: list[tuple[tuple[str, ...], int]] = []
        for kind, patterns, shapes in (("operand", self.operands, operands), ("result", self.results, results)):
            if len(patterns) != len(shapes):
                raise self._create_rule_error(where, f"it has {len(patterns)} {kind}s, the call has {len(shapes)}")
            tensors: list[Dims] = []
            for i, (pattern, dim_sizes) in enumerate(zip(patterns, shapes, strict=True)):
                dims = self._expand_ellipsis(pattern, dim_sizes, f"{kind} {i}", where)
                kept = tuple(f if size != 1 else () for f, size in zip(dims, dim_sizes, strict=True))
                pairs.extend((f, size) for f, size in zip(kept, dim_sizes, strict=True) if f)
                for factors, size in zip(dims, dim_sizes, strict=True):
                    if not factors and size != 1:
                        raise self._create_rule_error(
                            where, f"a dim of {kind} {i}, shape {list(dim_sizes)}, must be of size 1"
                        )
                tensors.append(kept)
            sides.append(tuple(tensors))
        sizes = self._solve_factor_sizes(pairs, where)
        return OpFactors(sizes, sides[0], sides[1], self.whole & sizes.keys(), self.linear)

    def _expand_ellipsis(self, pattern: DimPattern, shape: tuple[int, ...], which: str, where: str) -> Dims:
        """Return the names of the factors (named loop dimensions) of each dim of a tensor with the shape ``shape``.
        ``pattern``: the tensor's dims in the text of this rule. If it has ``...``, the leading dims get names that
        count from the right, as in broadcasting.

        ``which``: the tensor, such as ``operand 0``, and ``where``: the name of the operator call, both for error
        messages. Raise :class:`RuleError` if the tensor's number of dims differs from the text.
        """
        extra = len(shape) - len(pattern.dims)
        if extra < 0 or (extra and not pattern.ellipsis):
            raise self._create_rule_error(
                where, f"{which} has {len(pattern.dims)} dims in the rule and {len(shape)}, {list(shape)}, in the call"
            )
        front = tuple((f"...{extra - i}",) for i in range(extra))  # aligned at the right, as in broadcasting
        return (*front, *pattern.dims)

    def _solve_factor_sizes(self, pairs: list[tuple[tuple[str, ...], int]], where: str) -> dict[str, int]:
        """Compute the sizes of factors (named loop dimensions) from the sizes of dims. Return a dict: name of a factor
        -> size.

        ``pairs``: for each dim, the names of its factors, and the dim's size, which is the product of the factors'
        sizes. ``where``: the name of the operator call, for error messages. Raise :class:`RuleError` if the sizes
        contradict each other or cannot be computed.
        """
        sizes: dict[str, int] = {}
        pending = pairs
        while pending:
            rest: list[tuple[tuple[str, ...], int]] = []
            for factors, size in pending:
                known, unknown = 1, [f for f in factors if f not in sizes]
                for f in factors:
                    known *= sizes.get(f, 1)
                if len(unknown) > 1:
                    rest.append((factors, size))
                elif (not known or size % known) if unknown else size != known:
                    raise self._create_rule_error(where, f"({' '.join(factors)}) cannot be both {known} and {size}")
                elif unknown:
                    sizes[unknown[0]] = size // known
            if len(rest) == len(pending):
                names = " ".join(rest[0][0])
                raise self._create_rule_error(
                    where, f"the sizes of ({names}) do not follow from its product {rest[0][1]}"
                )
            pending = rest
        return sizes

    def _create_rule_error(self, where: str, problem: str) -> RuleError:
        return RuleError(f"rule for {self.name}, {self.text!r}, does not fit the call {where!r}: {problem}")


class _Parser:
    """Parses ``text``, the text of a sharding rule such as ``"b s (h d!), h d! -> b s h"``. ``name``: the name of the
    operator, for error messages. ``whole``: the names marked ``!`` so far."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        self.whole: set[str] = set()

    def create_error(self, problem: str) -> RuleError:
        return RuleError(f"rule for {self.name}, {self.text!r}: {problem}; {_HELP}")

    def parse_rule(self, linear: tuple[frozenset[int], ...]) -> TextRule:
        """Return the sharding rule that the parser's text describes. Raise :class:`RuleError` if the text is malformed.

        ``linear``: sets of operand positions (from 0); if exactly the operands of one set are partial sums, so are the
        results.
        """
        sides = self.text.split("->")
        if len(sides) != 2:
            raise self.create_error(f"expected one '->', got {len(sides) - 1}")
        operands = tuple(map(self.parse_pattern, sides[0].split(","))) if sides[0].strip() else ()
        results = tuple(map(self.parse_pattern, sides[1].split(",")))  # empty text is a result without dims
        for positions in linear:
            if not positions or any(not 0 <= p < len(operands) for p in positions):
                raise self.create_error(
                    f"linear={sorted(positions)} names operands that are not among the {len(operands)}"
                )
        known = {f for p in operands for d in p.dims for f in d}
        new = {f for p in results for d in p.dims for f in d} - known
        # The operator creates a factor that only results have from its arguments, so it is correct only if not sharded.
        if new - self.whole:
            raise self.create_error(
                f"no operand has {', '.join(sorted(new - self.whole))}: mark it with '!', because it cannot be sharded"
            )
        return TextRule(self.name, self.text, operands, results, frozenset(self.whole), linear)

    def parse_pattern(self, text: str) -> DimPattern:
        """Parse ``text``, the part of a rule's text for one tensor, such as ``b s (h d!)``, and return the factors
        (named loop dimensions) of the tensor's dims.

        Add the names marked ``!``, whose factors must not be sharded, to ``self.whole``. Raise :class:`RuleError` if
        ``text`` is malformed.
        """
        dims: list[tuple[str, ...]] = []
        names: list[str] = []
        group: list[str] | None = None
        ellipsis, at = False, 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                raise self.create_error(f"cannot read {text[at:].strip()!r}")
            token, at = match[1], match.end()
            if token == "...":
                if dims or ellipsis or group is not None:
                    raise self.create_error("'...' stands for the leading dims; expected it before all other dims")
                ellipsis = True
            elif token == "(":
                if group is not None:
                    raise self.create_error("a group within a group")
                group = []
            elif token == ")":
                if not group:
                    raise self.create_error("an empty group" if group is not None else "')' without '('")
                dims.append(tuple(group))
                group = None
            elif token == "!":
                if not names or text[at - 2 : at - 1].isspace():
                    raise self.create_error("'!' must directly follow the name of a factor")
                self.whole.add(names[-1])
            elif token == "1":
                if group is not None:
                    raise self.create_error("'1' is a dim by itself; expected it separate from other names")
                dims.append(())
            elif token.isidentifier():
                if token in names:
                    raise self.create_error(f"{token!r} occurs twice in one tensor")
                names.append(token)
                if group is None:
                    dims.append((token,))
                else:
                    group.append(token)
            else:
                raise self.create_error(f"unexpected {token!r}")
        if group is not None:
            raise self.create_error("'(' without ')'")
        return DimPattern(tuple(dims), ellipsis)


Rule = Callable[[fx.Node], OpFactors | None]

R = TypeVar("R", bound=Rule)

_rules: dict[str, Rule] = {}  # "aten::view" for all overloads, "aten::view.dtype" for one

_found: dict[Any, Rule | None] = {}

_functions: set[str] = set()  # names whose rule is a user's function, which may depend on anything


def factors_of(node: fx.Node) -> OpFactors | None:
    """Return the sharding rule of the operator call ``node``: the factors (named loop dimensions, as in an einsum) of
    each tensor dim, and which of the factors may be sharded over ranks.

    Return ``None`` if the operator has no rule; none of its tensors may then be sharded. Raise :class:`RuleError` if
    the text of a rule does not fit the shapes of the operator.
    """
    target = node.target
    try:
        found = _found[target]
    except KeyError:
        found = _found[target] = _find_rule(target)
    return None if found is None else found(node)


def build_call_key(node: fx.Node) -> Hashable:
    """Return a cache key of the operator call ``node``; calls with equal keys have equal sharding rules. Calls with
    equal keys have the same operator and plain arguments, and their tensors have the same shapes, strides, dtypes and
    gradient flags.

    If the user gave the operator's rule as a function, the key is ``node`` itself, because the function may depend on
    anything.
    """
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and _functions:
        name = target._schema.name
        if name in _functions or f"{name}.{target._overloadname}" in _functions:
            return node
    try:
        given = build_argument_key((resolve_meta_values(node.args), tuple(resolve_meta_values(node.kwargs).items())))
        made = build_argument_key(node.meta["val"])
    except TypeError:  # an argument is not hashable
        return node
    return target, given, made, node.meta.get("grad"), tuple([o.meta.get("grad") for o in operands_of(node)])


def has_rule(target: Any) -> bool:
    """Return whether the operator ``target`` has a sharding rule, which may be one that forbids all sharding."""
    return _find_rule(target) is not None


def _find_rule(target: Any) -> Rule | None:
    """Return the function that takes a call of the operator ``target`` and returns its sharding rule; ``None`` if the
    operator has no rule. A rule for one overload has precedence over a rule for all overloads."""
    if target is operator.getitem:
        return _shard_getitem
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name
    return _rules.get(f"{name}.{target._overloadname}") or _rules.get(name)


def _shard_getitem(node: fx.Node) -> OpFactors:
    """Return the sharding rule of ``node``, an ``operator.getitem``, which selects one of several results of an
    operator: every dim of the selected result may be sharded. The rule treats this result as the only operand."""
    names = NAMES[: len(get_meta_shape(node))]
    dims = tuple((n,) if size > 1 else () for n, size in zip(names, get_meta_shape(node), strict=True))
    sizes = {n: size for n, size in zip(names, get_meta_shape(node), strict=True) if size > 1}
    return OpFactors(sizes, (dims,), (dims,), linear=(frozenset((0,)),))


def register_family(*names: str) -> Callable[[R], R]:
    """Return a decorator that registers a function as the sharding rule of several operators. The function gets the
    ``fx.Node`` of a call and returns its :class:`OpFactors`, or ``None`` for no sharding.

    ``names``: names of ATen operators (``view``, ``view.dtype``), or names with a namespace (``namespace::name``).
    """

    def register(function: R) -> R:
        for name in names:
            _rules[name if "::" in name else f"aten::{name}"] = function
        _found.clear()
        return function

    return register


def rule(target: Any, *texts: str, linear: Iterable[Collection[int]] = (), function: Rule | None = None) -> None:
    """Declare how an operator may be sharded, by a line like an einsum.

    >>> rule("mylib::swiglu", "b s f, b s f -> b s f")
    >>> rule("mylib::rope", "b h s d!, s d! -> b h s d!")

    The operands (every tensor argument in order) are left of the arrow, the results right of it. Each name is a factor,
    a loop dimension as in an einsum, and stands for one dim. ``d!`` is a factor that must not be sharded. ``(k r)`` is
    a dim of two factors, outermost first. ``...`` stands for any dims in front, broadcast from the right. ``1`` is a
    dim of size 1. A factor that no result has is summed over.

    Args:
        target: name of an operator, its overload or overload packet, or what ``torch.library.custom_op`` returned.
        texts: one line, or several for calls with different numbers of tensors.
        linear: sets of operands in which the operator is linear. If the operands of a set are partial sums and the
            others are whole, the result is a partial sum.
        function: replaces ``texts``: it gets the ``fx.Node`` and returns its :class:`OpFactors`.

    Plan files may name the operator from then on (:func:`allow_operators`).

    Raises :class:`RuleError` if a text is malformed or the operator does not exist. If a text does not fit the tensors
    of a call, the error is raised when a graph with the call is sharded.
    """
    name = _get_rule_name(target)
    if (function is None) == (not texts):
        got = "both" if texts else "neither"
        raise RuleError(f"rule for {name}: expected one or more texts, or a function; got {got}")
    if not name.startswith(("aten::", "partition::")):
        allow_operators(name)  # declared by the user, so plans may have it
    _rules[name] = function or _make_text_rule(name, texts, tuple(frozenset(s) for s in linear))
    (_functions.discard if function is None else _functions.add)(name)
    _found.clear()


def _make_text_rule(name: str, texts: tuple[str, ...], linear: tuple[frozenset[int], ...]) -> Rule:
    """Return a function that takes a call of the operator with the name ``name`` and returns its sharding rule.
    ``texts``: rules as texts, such as ``"b s i, o i -> b s o"``, with different numbers of operands; the function uses
    the text that has as many operands as the call.

    ``linear``: sets of operand positions (from 0); if exactly the operands of one set are partial sums, so are the
    results.
    """
    parsed = {len(t.operands): t for t in (TextRule.parse(text, name, linear) for text in texts)}

    def look_up(node: fx.Node) -> OpFactors:
        """Return the sharding rule of the operator call ``node``. Raise :class:`RuleError` if no text of the rule
        has as many operands as the call."""
        count = len(operands_of(node))
        if count not in parsed:
            raise RuleError(
                f"rule for {name}: the call {node.name!r} has {count} tensor operands, "
                f"the rule is for {' or '.join(map(str, sorted(parsed)))}; "
                "give one text for each number of tensors that the operator is called with"
            )
        return parsed[count].fit(
            [get_meta_shape(o) for o in operands_of(node)], [tuple(r.shape) for r in results_of(node)], node.name
        )

    return look_up


def _get_rule_name(target: Any) -> str:
    """Return the name under which the sharding rule of an operator is stored: ``namespace::name`` or
    ``namespace::name.overload``. Raise :class:`RuleError` if there is no such operator.

    ``target``: the operator's name, an overload, an overload packet or a ``torch.library.custom_op``.
    """
    overload = getattr(target, "_opoverload", None)  # torch.library.custom_op
    if isinstance(overload, torch._ops.OpOverload):
        return overload._schema.name
    if isinstance(target, torch._ops.OpOverload):
        return f"{target._schema.name}.{target._overloadname}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name
    if not isinstance(target, str):
        raise RuleError(
            f"rule for {target!r}: expected an operator (its name, torch.ops.<namespace>.<name>, or what "
            f"torch.library.custom_op returned), got {type(target).__name__}"
        )
    namespace, _, name = target.partition("::") if "::" in target else target.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name.split(".")[0], None) if namespace and name else None
    if packet is None:
        raise RuleError(
            f"rule for {target!r}: there is no such operator; expected 'namespace::name' of an operator that is "
            "registered before its rule"
        )
    if "." in name and name.split(".")[1] not in packet.overloads():
        raise RuleError(f"rule for {target!r}: the overloads of {packet} are {', '.join(packet.overloads())}")
    return f"{namespace}::{name}"
