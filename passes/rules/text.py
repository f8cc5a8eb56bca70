"""Rules as text: ``"b s (h d), h d -> b s h"``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from passes.errors import RuleError
from passes.rules.algebra import Dims, OpFactors

_TOKEN = re.compile(r"\s*(\.\.\.|->|[(),!]|1(?!\w)|[A-Za-z_]\w*)")
_HELP = 'expected text like "b s i, o i -> b s o", where "!" marks a factor that must be whole'


@dataclass(frozen=True)
class Pattern:
    """One tensor's dims; ``ellipsis`` is the place of ``...`` among them, ``None`` where there is none."""

    dims: Dims
    ellipsis: bool = False


@dataclass(frozen=True)
class TextRule:
    """A parsed rule; :meth:`fit` makes it the rule of one call."""

    name: str
    text: str
    operands: tuple[Pattern, ...]
    results: tuple[Pattern, ...]
    whole: frozenset[str]
    linear: tuple[frozenset[int], ...]

    @staticmethod
    def parse(text: str, name: str, linear: tuple[frozenset[int], ...] = ()) -> TextRule:
        """Raises :class:`RuleError` on malformed text."""
        return _Parser(text, name).parse(linear)

    def fit(self, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]], where: str) -> OpFactors:
        """The factors of a call on tensors of these shapes. Raises :class:`RuleError` where they do not fit."""
        sides: list[tuple[Dims, ...]] = []
        pairs: list[tuple[tuple[str, ...], int]] = []
        for kind, patterns, shapes in (("operand", self.operands, operands), ("result", self.results, results)):
            if len(patterns) != len(shapes):
                raise self._error(where, f"it has {len(patterns)} {kind}s, the call has {len(shapes)}")
            tensors: list[Dims] = []
            for i, (pattern, dim_sizes) in enumerate(zip(patterns, shapes, strict=True)):
                dims = self._expand(pattern, dim_sizes, f"{kind} {i}", where)
                kept = tuple(f if size != 1 else () for f, size in zip(dims, dim_sizes, strict=True))
                pairs.extend((f, size) for f, size in zip(kept, dim_sizes, strict=True) if f)
                for factors, size in zip(dims, dim_sizes, strict=True):
                    if not factors and size != 1:
                        raise self._error(where, f"a dim of {kind} {i}, shape {list(dim_sizes)}, must be of size 1")
                tensors.append(kept)
            sides.append(tuple(tensors))
        sizes = self._solve(pairs, where)
        return OpFactors(sizes, sides[0], sides[1], self.whole & sizes.keys(), self.linear)

    def _expand(self, pattern: Pattern, shape: tuple[int, ...], which: str, where: str) -> Dims:
        extra = len(shape) - len(pattern.dims)
        if extra < 0 or (extra and not pattern.ellipsis):
            raise self._error(
                where, f"{which} has {len(pattern.dims)} dims in the rule and {len(shape)}, {list(shape)}, in the call"
            )
        front = tuple((f"...{extra - i}",) for i in range(extra))  # aligned at the right, as in broadcasting
        return (*front, *pattern.dims)

    def _solve(self, pairs: list[tuple[tuple[str, ...], int]], where: str) -> dict[str, int]:
        """The size of each factor from the sizes of the dims that hold it."""
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
                    raise self._error(where, f"({' '.join(factors)}) cannot be both {known} and {size}")
                elif unknown:
                    sizes[unknown[0]] = size // known
            if len(rest) == len(pending):
                names = " ".join(rest[0][0])
                raise self._error(where, f"the sizes of ({names}) do not follow from its product {rest[0][1]}")
            pending = rest
        return sizes

    def _error(self, where: str, what: str) -> RuleError:
        return RuleError(f"rule for {self.name}, {self.text!r}, does not fit the call {where!r}: {what}")


class _Parser:
    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        self.whole: set[str] = set()

    def error(self, what: str) -> RuleError:
        return RuleError(f"rule for {self.name}, {self.text!r}: {what}; {_HELP}")

    def parse(self, linear: tuple[frozenset[int], ...]) -> TextRule:
        sides = self.text.split("->")
        if len(sides) != 2:
            raise self.error(f"expected one '->', got {len(sides) - 1}")
        operands = tuple(map(self.pattern, sides[0].split(","))) if sides[0].strip() else ()
        results = tuple(map(self.pattern, sides[1].split(",")))  # nothing is a result without dims
        for positions in linear:
            if not positions or any(not 0 <= p < len(operands) for p in positions):
                raise self.error(f"linear={sorted(positions)} names operands that are not among the {len(operands)}")
        known = {f for p in operands for d in p.dims for f in d}
        new = {f for p in results for d in p.dims for f in d} - known
        # A factor that only results have was made by the operator from its arguments: only whole is it surely right.
        if new - self.whole:
            raise self.error(f"no operand has {', '.join(sorted(new - self.whole))}: mark it '!', it must be whole")
        return TextRule(self.name, self.text, operands, results, frozenset(self.whole), linear)

    def pattern(self, text: str) -> Pattern:
        dims: list[tuple[str, ...]] = []
        names: list[str] = []
        group: list[str] | None = None
        ellipsis, at = False, 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                raise self.error(f"cannot read {text[at:].strip()!r}")
            token, at = match[1], match.end()
            if token == "...":
                if dims or ellipsis or group is not None:
                    raise self.error("'...' stands for dims in front of all others")
                ellipsis = True
            elif token == "(":
                if group is not None:
                    raise self.error("a group within a group")
                group = []
            elif token == ")":
                if not group:
                    raise self.error("an empty group" if group is not None else "')' without '('")
                dims.append(tuple(group))
                group = None
            elif token == "!":
                if not names or text[at - 2 : at - 1].isspace():
                    raise self.error("'!' stands right behind a factor's name")
                self.whole.add(names[-1])
            elif token == "1":
                if group is not None:
                    raise self.error("'1' is a dim of its own")
                dims.append(())
            elif token.isidentifier():
                if token in names:
                    raise self.error(f"{token!r} stands twice in one tensor")
                names.append(token)
                if group is None:
                    dims.append((token,))
                else:
                    group.append(token)
            else:
                raise self.error(f"unexpected {token!r}")
        if group is not None:
            raise self.error("'(' without ')'")
        return Pattern(tuple(dims), ellipsis)
