"""Which rule an operator has: one table, filled by the families beside this file and by users."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import torch
from torch import fx

from passes.errors import RuleError
from passes.rules.algebra import NAMES, OpFactors, operands_of, results_of, shape
from passes.rules.text import TextRule

Rule = Callable[[fx.Node], OpFactors | None]
R = TypeVar("R", bound=Rule)

_rules: dict[str, Rule] = {}  # "aten::view" for all overloads, "aten::view.dtype" for one
_found: dict[Any, Rule | None] = {}


def factors_of(node: fx.Node) -> OpFactors | None:
    """The factor rule of an operator call; ``None`` where there is none and everything must be whole.

    Raises :class:`RuleError` where a rule's text does not fit the operator's shapes.
    """
    target = node.target
    try:
        found = _found[target]
    except KeyError:
        found = _found[target] = _look_up(target)
    return None if found is None else found(node)


def has_rule(target: Any) -> bool:
    """Whether an operator is known, be it as one that must be whole."""
    return _look_up(target) is not None


def _look_up(target: Any) -> Rule | None:
    if target is operator.getitem:
        return _getitem
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name
    return _rules.get(f"{name}.{target._overloadname}") or _rules.get(name)


def _getitem(node: fx.Node) -> OpFactors:
    """One of several results: the layouts are those of the producer's result of that number."""
    names = NAMES[: len(shape(node))]
    dims = tuple((n,) if size > 1 else () for n, size in zip(names, shape(node), strict=True))
    sizes = {n: size for n, size in zip(names, shape(node), strict=True) if size > 1}
    return OpFactors(sizes, (dims,), (dims,), linear=(frozenset((0,)),))


def family(*names: str) -> Callable[[R], R]:
    """Give operators one rule function: of ``aten`` (``view``, ``view.dtype``), or of ``namespace::name``."""

    def register(function: R) -> R:
        for name in names:
            _rules[name if "::" in name else f"aten::{name}"] = function
        _found.clear()
        return function

    return register


def rule(target: Any, *texts: str, linear: Iterable[Collection[int]] = (), function: Rule | None = None) -> None:
    """Say how an operator may be sharded, in a line of einsum-like text.

    >>> rule("mylib::swiglu", "b s f, b s f -> b s f")
    >>> rule("mylib::rope", "b h s d!, s d! -> b h s d!")

    One name per dim, the operands (every tensor argument in order) left of the arrow, the results right of it.
    ``d!``: the factor must be whole; ``(k r)``: a dim of two factors, outermost first; ``...``: any dims in front,
    broadcast from the right; ``1``: a dim of size 1. A factor that no result has is summed over. Several texts are for
    calls with different numbers of tensors. ``linear`` gives the sets of operands in which the operator is linear:
    where they are partial sums and the others whole, so is the result. ``function`` takes the place of texts: it gets
    the ``fx.Node`` and returns its :class:`OpFactors`.

    ``target``: an operator's name, overload, overload packet, or what ``torch.library.custom_op`` returned.

    Raises :class:`RuleError` where the text is malformed or the operator does not exist, and, when a graph with the
    operator is sharded, where the text does not fit its tensors.
    """
    name = _name_of(target)
    if (function is None) == (not texts):
        got = "both" if texts else "neither"
        raise RuleError(f"rule for {name}: expected one or more texts, or a function; got {got}")
    _rules[name] = function or _text_rule(name, texts, tuple(frozenset(s) for s in linear))
    _found.clear()


def _text_rule(name: str, texts: tuple[str, ...], linear: tuple[frozenset[int], ...]) -> Rule:
    parsed = {len(t.operands): t for t in (TextRule.parse(text, name, linear) for text in texts)}

    def look_up(node: fx.Node) -> OpFactors:
        count = len(operands_of(node))
        if count not in parsed:
            raise RuleError(
                f"rule for {name}: the call {node.name!r} has {count} tensor operands, "
                f"the rule is for {' or '.join(map(str, sorted(parsed)))}; "
                "give one text for each number of tensors that the operator is called with"
            )
        return parsed[count].fit(
            [shape(o) for o in operands_of(node)], [tuple(r.shape) for r in results_of(node)], node.name
        )

    return look_up


def _name_of(target: Any) -> str:
    """``namespace::name`` or ``namespace::name.overload`` of whatever a user calls an operator."""
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
