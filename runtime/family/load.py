"""Read all programs of a plan, in memory or in a plan's file.

A file holds once what its programs have in common: a further program is there as its difference from an earlier one,
which resembles it. ``base`` is the number of that program; 0 is the first. A difference is ``{"=": value}`` (another
value), ``{"keys": {...}, "gone": [...]}`` for dicts, ``{"items": {...}}`` for lists of one length, whose entries are
differences again, or ``{"splices": [[start, end, entries]]}`` for lists of different lengths. ``{}`` is none. Programs
for two lengths differ in the same numbers everywhere; ``{"numbers": {"512": 256}, "rest": ...}`` replaces these first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from partitioner.runtime.errors import LaunchError
from partitioner.runtime.family.data import BatchPadding, FurtherProgram, ProgramFamily
from partitioner.runtime.program.load import check_program, load_program, read_plan_content
from partitioner.runtime.program.program import Program

Delta = dict[str, Any]

_MAX_SPLICED = 4096  # entries of two lists that are compared entry by entry; the time grows with the square


def load_family(plan: Any) -> ProgramFamily:
    """Return all programs of ``plan``: a :class:`Program`, a plan, or the path of a plan file.

    Raise :class:`LaunchError` if there is no program, or if the file cannot be read, and
    :class:`UntrustedOperatorError` if a program in the file calls an operator that is not allowed in plan files.
    """
    first = load_program(plan)
    if isinstance(plan, Program):
        return ProgramFamily(first, None, {})
    if not isinstance(plan, str | Path):
        return ProgramFamily(first, getattr(plan, "padding", None), getattr(plan, "further", {}))
    content = unfold_programs(read_plan_content(Path(plan)))
    try:
        further = {n: FurtherProgram.model_validate(data) for n, data in content.get("further", {}).items()}
        padding = content.get("padding")
        family = ProgramFamily(first, None if padding is None else BatchPadding.model_validate(padding), further)
    except (ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise LaunchError(
            f"{plan} does not have programs that this version can read: {error}; make the plan again"
        ) from None
    for one in further.values():
        check_program(one.program, plan)
    return family


def fold_programs(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a plan file in its compact form, where each program of ``"further"`` is stored as its
    difference from the earlier program that it resembles most.

    ``content``: the content with whole programs, as JSON data. Returned unchanged if it has one program only.
    """
    if not content.get("further"):
        return content
    programs, folded = [content["program"]], {}
    for name, data in content["further"].items():
        base = max(range(len(programs)), key=lambda n: (_count_similar_blocks(programs[n], data["program"]), n))
        folded[name] = {**data, "program": {"base": base, **_fold_program(programs[base], data["program"])}}
        programs.append(data["program"])
    return {**content, "further": folded}


def _count_similar_blocks(base: Any, program: Any) -> int:
    """Return how many block types (such as layers) have graphs with equally many nodes in two programs, given as JSON
    data. Such graphs are likely to differ in sizes only."""
    sizes = [{name: len(block["nodes"]) for name, block in one["blocks"].items()} for one in (base, program)]
    return sum(sizes[1].get(name) == size for name, size in sizes[0].items())


def _fold_program(base: Any, program: Any) -> Delta:
    """Return the difference of ``program`` from ``base``, two whole programs as JSON data: the numbers that change
    everywhere, and the rest of the difference."""
    numbers = find_changed_numbers(base, program)
    rest = make_delta(replace_numbers(base, numbers), program)
    return {"numbers": {str(a): b for a, b in numbers.items()}, "rest": rest}


def unfold_programs(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a plan file in which each program under ``"further"`` is stored as a whole, as JSON data.

    ``content``: the compact content, in which each of these programs is stored as its difference from an earlier one.
    Raise :class:`LaunchError` if a difference does not fit.
    """
    if not content.get("further"):
        return content
    programs, whole = [content["program"]], {}
    try:
        for name, data in content["further"].items():
            folded = data["program"]
            numbers = {int(a): b for a, b in folded["numbers"].items()}
            base = programs[folded.get("base", -1)]  # files of earlier versions do not name it: the program before
            programs.append(apply_delta(replace_numbers(base, numbers), folded["rest"]))
            whole[name] = {**data, "program": programs[-1]}
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise LaunchError(f"the further programs of the plan do not follow from its first one ({error})") from None
    return {**content, "further": whole}


def find_changed_numbers(base: Any, other: Any) -> dict[int, int]:
    """Return the integers of ``base`` that become another integer in ``other``, as old -> new, such as the old and the
    new batch size. With this, the difference between two programs is stored compactly.

    ``base`` and ``other``: JSON data of similar structure. Positions that both have are compared; for each integer of
    ``base`` the most frequent counterpart in ``other`` counts.
    """
    counts: dict[int, Counter[int]] = {}
    _count_numbers(base, other, counts)
    found = {number: places.most_common(1)[0][0] for number, places in counts.items()}
    return {number: new for number, new in found.items() if new != number}


def _count_numbers(base: Any, other: Any, counts: dict[int, Counter[int]]) -> None:
    """Count in ``counts`` (integer of ``base`` -> counter of integers of ``other``) which integers are at equal
    positions.

    ``base`` and ``other``: JSON data. Dict keys that only one has, and lists of different lengths, are skipped.
    """
    if isinstance(base, dict) and isinstance(other, dict):
        for key in base.keys() & other.keys():
            _count_numbers(base[key], other[key], counts)
    elif isinstance(base, list) and isinstance(other, list) and len(base) == len(other):
        for a, b in zip(base, other, strict=True):
            _count_numbers(a, b, counts)
    elif type(base) is int and type(other) is int:
        counts.setdefault(base, Counter())[other] += 1


def replace_numbers(value: Any, numbers: Mapping[int, int]) -> Any:
    """Return a copy of the JSON data ``value`` in which each integer that is a key of ``numbers`` is replaced by the
    key's value.
    """
    if not numbers:
        return value
    if isinstance(value, dict):
        return {key: replace_numbers(entry, numbers) for key, entry in value.items()}
    if isinstance(value, list):
        return [replace_numbers(entry, numbers) for entry in value]
    return numbers.get(value, value) if type(value) is int else value


def make_delta(base: Any, other: Any) -> Delta:
    """Return the difference between two pieces of JSON data, from which :func:`apply_delta` computes ``other`` out of
    ``base``.

    It is ``{}`` for equal data, ``{"=": other}``, ``{"keys": {key: difference}, "gone": [key]}`` for dicts,
    ``{"items": {index: difference}}`` for lists of equal length, or ``{"splices": [[start, end, entries]]}`` for lists
    of different lengths, where ``entries`` take the place of those from ``start`` to ``end`` of ``base``.
    """
    if type(base) is type(other):
        if base == other and repr(base) == repr(other):  # 1, 1.0 and True are equal, but other JSON
            return {}
        if isinstance(base, dict):
            changed = {k: make_delta(base[k], v) if k in base else {"=": v} for k, v in other.items()}
            gone = [k for k in base if k not in other]
            delta: Delta = {"keys": {k: d for k, d in changed.items() if d}}
            return delta | ({"gone": gone} if gone else {})
        if isinstance(base, list) and len(base) == len(other):
            items = {str(i): d for i, pair in enumerate(zip(base, other, strict=True)) if (d := make_delta(*pair))}
            return {"items": items} if len(items) <= len(base) / 2 or _is_nested(other) else {"=": other}
        if isinstance(base, list) and len(base) + len(other) <= _MAX_SPLICED:
            splices = _list_splices(base, other)
            if sum(len(entries) for _, _, entries in splices) + len(splices) <= len(other) / 2:
                return {"splices": splices}
    return {"=": other}


def _list_splices(base: list[Any], other: list[Any]) -> list[list[Any]]:
    """Return the changes that turn the list ``base`` into ``other``, in order: ``[start, end, entries]`` puts
    ``entries`` in the place of ``base[start:end]``."""
    matcher = SequenceMatcher(None, list(map(repr, base)), list(map(repr, other)), autojunk=False)
    return [[i, j, other[k:n]] for tag, i, j, k, n in matcher.get_opcodes() if tag != "equal"]


def _is_nested(value: list[Any]) -> bool:
    return any(isinstance(entry, dict | list) for entry in value)


def apply_delta(base: Any, delta: Delta) -> Any:
    """Return the JSON data ``base`` with the difference ``delta`` applied, which :func:`make_delta` returned for
    ``base``: ``{}`` for no difference, ``{"=": value}`` for another value, ``{"keys": {key: difference}, "gone":
    [key]}`` for a dict, and ``{"items": {index: difference}}`` or ``{"splices": [[start, end, entries]]}`` for a list.

    Raise ``KeyError``, ``IndexError``, ``TypeError`` or ``ValueError`` if ``delta`` is a difference from other data.
    """
    if "=" in delta:
        return delta["="]
    if "keys" in delta:
        gone, changed = set(delta.get("gone", ())), delta["keys"]
        kept = {k: apply_delta(v, changed[k]) if k in changed else v for k, v in base.items() if k not in gone}
        return kept | {k: d["="] for k, d in changed.items() if k not in base}
    if "items" in delta:
        return [apply_delta(v, delta["items"].get(str(i), {})) for i, v in enumerate(base)]
    if "splices" in delta:
        found, at = list[Any](), 0
        for start, end, entries in delta["splices"]:
            if not at <= start <= end <= len(base):
                raise IndexError(f"a list of {len(base)} entries has none from {start} to {end} after {at}")
            found += [*base[at:start], *entries]
            at = end
        return found + base[at:]
    return base
