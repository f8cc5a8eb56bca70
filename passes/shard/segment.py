"""Cut a flat graph into units: groups of consecutive operators that become the calls (such as layers) of a folded
model.

Requires: ``node.meta["stack"]`` of every operator (the module calls that enclose it). Provides: units in execution
order. A unit is one call of a module. If modules are repeated, units are the outermost repeated modules; otherwise,
they are the smallest modules in a container. Operators between units, and modules without parameters, are added to a
neighbouring unit, so that repeated units stay equal.

:func:`split_by_period` finds repetition that no module structure shows: layers that are written out in one ``forward``.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, fx

from partitioner.passes.ir.value_numbering import compute_signature
from partitioner.passes.products import is_product_name

_CANDIDATES = 16  # number of periods to try

_SHARE = 0.5  # minimum share of the operators that the repetition must cover


def split_by_period(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Cut ``nodes`` (operators, in order) into the repetitions of their most repeated pattern, such as layers that are
    written out one after the other. Return the pieces in order.

    The cuts are placed where the fewest values cross them. If no pattern covers at least half of the operators, the
    result is a single piece.
    """
    tokens = _number_operators(nodes)
    best = max((_find_longest_repetition(tokens, p) for p in _find_frequent_periods(tokens)), default=(0, 0, 0))
    length, start, period = best
    if length < 2 * period or length < _SHARE * len(nodes):
        return [list(nodes)]
    crossing = _count_crossing_values(nodes)
    shift = min(range(period), key=lambda s: (sum(crossing[start + s : start + length : period]), s))
    first = start + shift
    cuts = [first + i * period for i in range((start + length - first) // period + 1)]
    borders = sorted({0, *cuts, len(nodes)})
    return [list(nodes[a:b]) for a, b in itertools.pairwise(borders)]


def _number_operators(nodes: Sequence[fx.Node]) -> np.ndarray[Any, Any]:
    """Return an array with an integer for each operator in ``nodes``. Operators with equal targets, constants and
    shapes have equal integers."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(_build_operator_key(n), len(numbers)) for n in nodes])


def _build_operator_key(node: fx.Node) -> Any:
    """Return a hashable key of the operator ``node``. Operators with equal targets, constants and shapes have equal
    keys."""
    operands = tuple((n.op, _build_shape_key(n)) for n in node.all_input_nodes)
    constants = repr(fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: None))
    return node.target, constants, operands, _build_shape_key(node)


def _build_shape_key(node: fx.Node) -> Any:
    """Return a hashable key of the result of ``node``: shape and dtype of a tensor, or the shapes of several
    tensors."""
    value = node.meta["val"]
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return tuple(tuple(v.shape) for v in value if isinstance(v, Tensor))


def _find_frequent_periods(tokens: np.ndarray[Any, Any]) -> list[int]:
    """Return the most frequent distances between neighbouring equal elements of ``tokens``, most frequent first. These
    distances are candidates for the number of operators in a repeated layer. ``tokens``: a vector with an integer for
    each operator, equal for equal operators."""
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for position, token in enumerate(tokens.tolist()):
        if token in last:
            distances[position - last[token]] += 1
        last[token] = position
    return [d for d, _ in distances.most_common(_CANDIDATES)]


def _find_longest_repetition(tokens: np.ndarray[Any, Any], period: int) -> tuple[int, int, int]:
    """Return (length, start, ``period``) of the longest range of ``tokens`` that repeats with the period ``period``.
    Length and start are numbers of elements; the length is 0 if there is no such range.

    ``tokens``: a vector with an integer for each operator, equal for equal operators.
    """
    equal = np.concatenate([[False], tokens[:-period] == tokens[period:], [False]])
    edges = np.flatnonzero(equal[1:] != equal[:-1])
    starts, ends = edges[::2], edges[1::2]
    if len(starts) == 0:
        return 0, 0, period
    widest = int(np.argmax(ends - starts))
    return int(ends[widest] - starts[widest]) + period, int(starts[widest]), period


def _count_crossing_values(nodes: Sequence[fx.Node]) -> list[int]:
    """Return a list with the number of values that cross each position in the list of operators ``nodes`` (and its
    end): values computed before the position and read at or after it. If the graph is cut there, these values pass from
    one part to the next."""
    place = {n: i for i, n in enumerate(nodes)}
    change = [0] * (len(nodes) + 1)
    for i, node in enumerate(nodes):
        readers = [place.get(user, len(nodes)) for user in node.users]
        if readers:
            change[i + 1] += 1
            if max(readers) < len(nodes):
                change[max(readers) + 1] -= 1
    crossing, now = [], 0
    for delta in change:
        now += delta
        crossing.append(now)
    return crossing


_CONTAINERS = ("Sequential", "ModuleList")

_DOMINANT = 0.5  # share of a module's work that repeated children must do to count


@dataclass
class OperatorGroup:
    """A group of consecutive operators that becomes one call of the model, such as the run of one layer.

    ``path``: the path of the module of the operators. ``nodes``: the operators. ``connects_modules``: whether the
    operators lie between the modules that become calls and read no parameter; they are later added to a neighbouring
    group. ``leaf``: whether the group is the call of a module without submodules that have parameters.
    """

    path: str
    nodes: list[fx.Node]
    connects_modules: bool = False
    leaf: bool = False


@dataclass
class _ModuleCall:
    """One call of a module, with its operators and its calls of submodules.

    ``name``: the module's path, with ``@`` and a number appended for a repeated call. ``class_name``: the name of the
    module's class. ``parent``: the enclosing call; ``None`` for the call of the whole model. ``children``: name -> call
    of a submodule, in order. ``nodes``: all operators inside, in order. ``parameters``: how often the operators read a
    parameter. ``work``: a rough number of arithmetic operations. ``key``: an integer that is equal for calls of equal
    structure.
    """

    name: str
    class_name: str
    parent: _ModuleCall | None
    children: dict[str, _ModuleCall] = field(default_factory=dict)
    nodes: list[fx.Node] = field(default_factory=list)
    parameters: int = 0
    work: float = 0.0
    key: int = 0

    @property
    def path(self) -> str:
        return self.name.partition("@")[0]

    @property
    def list_prefix(self) -> str | None:
        """Return the path of the list that holds the module, such as ``model.layers`` for ``model.layers.3``; ``None``
        if no list holds it."""
        prefix, _, last = self.path.rpartition(".")
        return prefix if last.isdigit() else None

    @property
    def parts(self) -> list[_ModuleCall]:
        """Return the calls of direct submodules that read parameters, in order."""
        return [c for c in self.children.values() if c.parameters]


def segment_operators(nodes: Sequence[fx.Node], classes: Mapping[str, str]) -> list[OperatorGroup]:
    """Cut ``nodes`` (operators, in order) into consecutive groups, each of which becomes a call of the model, such as
    the run of one layer. Every node is in exactly one group. ``classes``: module path -> class name."""
    root = _call_tree(nodes, classes)
    atoms: list[_ModuleCall] = []
    _collect_unit_calls(root, atoms)
    owner: dict[fx.Node, _ModuleCall] = {n: atom for atom in atoms for n in atom.nodes}
    units: list[OperatorGroup] = []
    for unit in _group_nodes_by_call(nodes, owner):
        work = sum(map(_estimate_operator_work, unit.nodes))
        whole = unit.connects_modules or work < _DOMINANT * root.work
        pieces = [unit.nodes] if whole else split_by_period(unit.nodes)
        units += [OperatorGroup(unit.path, piece, unit.connects_modules, unit.leaf) for piece in pieces]
    return _merge_connecting_operators(units)


def _call_tree(nodes: Sequence[fx.Node], classes: Mapping[str, str]) -> _ModuleCall:
    """Return the module call of the whole model, which contains the calls of its submodules and their operators.
    ``nodes``: the operators, in order. ``classes``: module path -> class name."""
    root = _ModuleCall("", "", None)
    for node in nodes:
        work = _estimate_operator_work(node)
        parameters = sum(_is_parameter(n) for n in node.all_input_nodes)
        call = root
        for name in ("", *node.meta.get("stack", ())):
            if name:
                if name not in call.children:
                    call.children[name] = _ModuleCall(name, classes.get(name.partition("@")[0], ""), call)
                call = call.children[name]
            call.nodes.append(node)
            call.work += work
            call.parameters += parameters
    return root


def _is_parameter(node: fx.Node) -> bool:
    state = node.meta.get("state")
    return state is not None and state.kind == "parameter"


def _estimate_operator_work(node: fx.Node) -> float:
    """Return a rough number of arithmetic operations of the operator ``node``, estimated from shapes."""
    value = node.meta["val"]
    result = sum(math.prod(v.shape) for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, Tensor))
    if not is_product(node):
        return float(result)
    operands = [n.meta["val"].numel() for n in node.all_input_nodes if isinstance(n.meta["val"], Tensor)]
    # for a m k, k n -> m n: sqrt(mk * kn / mn) = k
    return (
        2.0 * result * max(1.0, math.sqrt(operands[0] * operands[-1] / max(1, result))) if operands else float(result)
    )


def is_product(node: fx.Node) -> bool:
    """Return whether the operator ``node`` is a product (matrix product, convolution, attention), which does many
    operations per operand element.
    """
    return is_product_name(getattr(getattr(node.target, "_schema", None), "name", "").rpartition("::")[2])


# --- which module calls are units -------------------------------------------------------------------------------------
def _collect_unit_calls(call: _ModuleCall, atoms: list[_ModuleCall]) -> None:
    """Choose the module calls inside of ``call`` that become calls of the folded model, such as one for each layer, and
    append them to ``atoms``. A submodule that contains the repeated layers is not chosen; its submodules are searched
    instead."""
    parts = call.parts
    for part in parts:
        part.key = hash(compute_signature(part.nodes).key)
    counts = Counter(p.key for p in parts)
    lists = {(p.list_prefix, p.class_name) for p in parts if counts[p.key] > 1 and p.list_prefix is not None}
    for part in parts:
        repeated = counts[part.key] > 1
        like_siblings = (part.list_prefix, part.class_name) in lists
        inside = _measure_longest_chain(part) if repeated else 0
        if (repeated and inside >= max(2, counts[part.key])) or (
            not repeated and not like_siblings and _is_unit_container(part)
        ):
            _collect_unit_calls(part, atoms)
        else:
            atoms.append(part)


def _is_unit_container(call: _ModuleCall) -> bool:
    """Return whether the module of ``call``, which occurs once in the model, only contains the layers: its submodules,
    instead of the module itself, then become calls of the folded model. This is the case if the module, or a submodule,
    holds a list of modules that run one after the other."""
    parts = call.parts
    if not parts:
        return False
    listed = [p for p in parts if p.list_prefix is not None]
    if call.class_name in _CONTAINERS or (call.list_prefix is None and listed and _is_call_chain(listed)):
        return True
    return _measure_longest_chain(call) > 1 or any(_is_unit_container(p) for p in parts)


def _measure_longest_chain(call: _ModuleCall) -> int:
    """Return the length of the longest chain of calls of equal submodules inside of the module call ``call``, such as
    the layers of the model; 0 if there is none. In a chain, each call reads a result of the one before. A chain counts
    only if it does at least half of the work of the call that encloses it, and only submodules that do at least half of
    the work of their parent are searched."""
    groups: dict[int, list[_ModuleCall]] = {}
    for part in call.parts:
        groups.setdefault(hash(compute_signature(part.nodes).key), []).append(part)
    repeated = [g for g in groups.values() if len(g) > 1 and _is_call_chain(g)]
    longest = sum(map(len, repeated))
    if sum(p.work for g in repeated for p in g) < _DOMINANT * call.work:
        longest = 0
    return max([longest, *(_measure_longest_chain(p) for p in call.parts if p.work >= _DOMINANT * call.work)])


def _is_call_chain(calls: Sequence[_ModuleCall]) -> bool:
    """Return whether each module call in ``calls`` reads, directly or indirectly, a result of its predecessor in the
    list."""
    for before, after in itertools.pairwise(calls):
        last = after.nodes[-1]
        reached = set(before.nodes)
        found = False
        node = before.nodes[0]
        members = set(after.nodes)
        while node is not last:
            node = node.next
            if node.op == "call_function" and any(o in reached for o in node.all_input_nodes):
                reached.add(node)
                if node in members:
                    found = True
                    break
        if not found:
            return False
    return True


# --- runs and glue ----------------------------------------------------------------------------------------------------
def _group_nodes_by_call(nodes: Sequence[fx.Node], owner: Mapping[fx.Node, _ModuleCall]) -> list[OperatorGroup]:
    """Cut ``nodes``, operators in order, into groups of consecutive operators that belong to the same module call or to
    none. ``owner``: operator -> the module call that it belongs to."""
    units: list[OperatorGroup] = []
    current: Any = ()
    for node in nodes:
        call = owner.get(node)
        if not units or call is not current:
            path = call.name if call is not None else _get_innermost_path(node)
            units.append(
                OperatorGroup(path, [], connects_modules=call is None, leaf=call is not None and not call.parts)
            )
            current = call
        units[-1].nodes.append(node)
    for unit in units:
        unit.connects_modules = unit.connects_modules and not any(
            _is_parameter(o) for n in unit.nodes for o in n.all_input_nodes
        )
    return units


def _get_innermost_path(node: fx.Node) -> str:
    """Return the name of the innermost module call that encloses the operator ``node``; an empty string if there is
    none."""
    stack = node.meta.get("stack", ())
    return stack[-1] if stack else ""


def _merge_connecting_operators(units: list[OperatorGroup]) -> list[OperatorGroup]:
    """Merge the operators between modules (groups with ``connects_modules``) into a neighbouring group, and return the
    new list of groups. Equal groups, such as equal layers, must stay equal. The operators are therefore added to the
    previous group if it has no equal groups, or if the same operators follow more than half of its equal groups.
    Otherwise, they are added to the next group if it has no equal groups. Otherwise, they become a group of their own.
    ``units``: consecutive groups of operators, such as layers."""
    keys = [hash(compute_signature(u.nodes).key) for u in units]
    counts = Counter(k for u, k in zip(units, keys, strict=True) if not u.connects_modules)
    repeated = [not u.connects_modules and not u.leaf and counts[k] > 1 for u, k in zip(units, keys, strict=True)]
    following = Counter(
        (keys[i], keys[i + 1]) for i in range(len(units) - 1) if repeated[i] and units[i + 1].connects_modules
    )
    merged: list[OperatorGroup] = []
    before: list[fx.Node] = []  # connecting operators that will be added to the next unit
    last: int | None = None  # index of the unit with which merged[-1] started
    for i, unit in enumerate(units):
        if not unit.connects_modules:
            merged.append(OperatorGroup(unit.path, [*before, *unit.nodes]))
            before, last = [], i
            continue
        often = last is not None and 2 * following[keys[last], keys[i]] > counts[keys[last]]
        if last is not None and (not repeated[last] or often):
            merged[-1].nodes += unit.nodes
        elif i + 1 < len(units) and not repeated[i + 1]:
            before = unit.nodes
        else:
            merged.append(unit)
            last = None
    if before:
        merged.append(OperatorGroup(units[-1].path, before))
    return merged
