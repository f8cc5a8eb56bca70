"""Compute the difference between two pieces of JSON data, such as the programs of a plan for two sequence lengths. The
difference is small if the data are similar.

A difference is one of:

* ``{}``: equal data;
* ``{"=": value}``: another value;
* ``{"keys": {key: difference}, "gone": [key]}``: a dict with changed and removed keys;
* ``{"items": {index: difference}}``: a list of the same length with changed entries;
* ``{"pieces": [...]}``: a list that is built from pieces. ``[start, end]`` copies entries of the base list,
  ``{"of": index, ...}`` is one of its entries with the difference ``...`` applied, ``{"=": entry}`` is a new entry.

Pieces are in the order of the base, and none is used twice, so that the data cannot become much larger than the file
that describes them. If several forms are possible, the shortest one is used.

Numbers and names that change everywhere, such as a length or the number at the end of a name, are replaced beforehand
(:func:`replace_scalars`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

Delta = dict[str, Any]

_MAX_MATCHES = 50_000  # pairs of similar entries of two lists that are compared; the time grows with them
_LONG_DELTA = 200  # characters of a difference above which another form is tried
_COUNTER = re.compile(r"(_\d+)+$")


def make_delta(base: Any, other: Any) -> Delta:
    """Return the difference from ``base`` to ``other``, two pieces of JSON data, as a dict of JSON data, from which
    :func:`apply_delta` computes ``other`` when given ``base``. Equal data give ``{}``.
    """
    if type(base) is not type(other):
        return {"=": other}
    if base == other and repr(base) == repr(other):  # 1, 1.0 and True are equal, but other JSON
        return {}
    forms: list[Delta] = [{"=": other}]
    if isinstance(base, dict):
        changed = {k: make_delta(base[k], v) if k in base else {"=": v} for k, v in other.items()}
        gone = [k for k in base if k not in other]
        forms.append({"keys": {k: d for k, d in changed.items() if d}} | ({"gone": gone} if gone else {}))
    elif isinstance(base, list):
        if len(base) == len(other):
            pairs = zip(base, other, strict=True)
            forms.append({"items": {str(i): d for i, pair in enumerate(pairs) if (d := make_delta(*pair))}})
        if count_characters(forms[-1]) > _LONG_DELTA:
            forms.append({"pieces": _list_pieces(base, other)})
    return min(forms, key=count_characters)


def apply_delta(base: Any, delta: Delta) -> Any:
    """Return the JSON data ``base`` with the difference ``delta`` applied, which :func:`make_delta` returned for
    ``base``. Raise ``KeyError``, ``IndexError``, ``TypeError`` or ``ValueError`` if ``delta`` is a difference from
    other data.
    """
    if "=" in delta:
        return delta["="]
    if "keys" in delta:
        gone, changed = set(delta.get("gone", ())), delta["keys"]
        kept = {k: apply_delta(v, changed[k]) if k in changed else v for k, v in base.items() if k not in gone}
        return kept | {k: d["="] for k, d in changed.items() if k not in base}
    if "items" in delta:
        return [apply_delta(v, delta["items"].get(str(i), {})) for i, v in enumerate(base)]
    if "pieces" in delta:
        return _join_pieces(base, delta["pieces"])
    if "splices" in delta:  # files of earlier versions: [start, end, entries] replaces base[start:end]
        pieces, at = list[Any](), 0
        for start, end, entries in delta["splices"]:
            pieces += [[at, start], *({"=": entry} for entry in entries)]
            at = _check_range(base, start, end, start)
        return _join_pieces(base, [*pieces, [at, len(base)]])
    return base


def count_characters(data: Any) -> int:
    """Return the number of characters of ``data`` as JSON text."""
    return len(json.dumps(data))


def find_changed_scalars(base: Any, other: Any) -> dict[int | str, int | str]:
    """Return the integers and strings of ``base`` that are replaced by another one in ``other``, as a dict: old -> new,
    such as the old and the new batch size. ``base`` and ``other``: JSON data of similar structure. Values at the same
    position are compared; entries of lists are first matched by similarity. If a value of ``base`` has several
    counterparts in ``other``, the most frequent one counts.
    """
    counts: dict[int | str, Counter[int | str]] = {}
    for old, new in _pair_scalars(base, other):
        counts.setdefault(old, Counter())[new] += 1
    found = {old: places.most_common(1)[0][0] for old, places in counts.items()}
    return {old: new for old, new in found.items() if new != old}


def replace_scalars(value: Any, scalars: Mapping[int | str, int | str]) -> Any:
    """Return a copy of the JSON data ``value`` in which each integer and string that is a key of ``scalars`` is
    replaced by its value in ``scalars``. Keys of dicts are not replaced.
    """
    if not scalars:
        return value
    if isinstance(value, dict):
        return {key: replace_scalars(entry, scalars) for key, entry in value.items()}
    if isinstance(value, list):
        return [replace_scalars(entry, scalars) for entry in value]
    return scalars.get(value, value) if type(value) is int or type(value) is str else value


def describe_form(value: Any) -> str:
    """Return a text that is equal for pieces of JSON data of the same form: data that differ only in integers, in the
    numbers at the end of names, or in the length of a list of equal entries. For example, stored graph nodes with the
    same operator and the same position in the model's source code have the same text. ``value``: the JSON data.
    """
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{describe_form(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        forms = [describe_form(entry) for entry in value]
        return "[" + ",".join(form for i, form in enumerate(forms) if not i or form != forms[i - 1]) + "]"
    return "0" if type(value) is int else _COUNTER.sub("", value) if isinstance(value, str) else repr(value)


def _pair_scalars(base: Any, other: Any) -> Iterator[tuple[int | str, int | str]]:
    """Yield a pair (integer or string in ``base``, integer or string in ``other``) for each position that two pieces of
    JSON data have in common. Entries of lists are matched by their form.
    """
    if isinstance(base, dict) and isinstance(other, dict):
        for key in base.keys() & other.keys():
            yield from _pair_scalars(base[key], other[key])
    elif isinstance(base, list) and isinstance(other, list):
        for start, end, first, _ in _match_entries(base, other):
            for i in range(start, end):
                yield from _pair_scalars(base[i], other[first + i - start])
    elif type(base) is type(other) and type(base) in (int, str):
        yield base, other


def _list_pieces(base: list[Any], other: list[Any]) -> list[Any]:
    """Return a list of pieces of JSON data, in order, from which the list ``other`` can be built, given the list
    ``base``. A piece is one of: ``[start, end]``, the entries ``base[start:end]`` unchanged; ``{"of": i, ...}``, the
    entry ``base[i]`` changed by the difference in the other keys; ``{"=": entry}``, a new entry.
    """
    pieces, at = list[Any](), 0
    for start, end, first, last in _match_entries(base, other):
        pieces += [{"=": entry} for entry in other[at:first]]
        for i in range(start, end):
            delta = make_delta(base[i], other[first + i - start])
            if not delta and pieces and isinstance(pieces[-1], list) and pieces[-1][1] == i:
                pieces[-1][1] = i + 1
            else:
                pieces.append((delta if "=" in delta else {"of": i, **delta}) if delta else [i, i + 1])
        at = last
    return pieces + [{"=": entry} for entry in other[at:]]


def _match_entries(base: list[Any], other: list[Any]) -> Iterator[tuple[int, int, int, int]]:
    """Yield tuples (start, end, first, last), in order: the entries ``base[start:end]`` resemble ``other[first:last]``,
    one by one, and both ranges have the same length.
    """
    for describe in (describe_form, repr):
        forms = [describe(entry) for entry in base], [describe(entry) for entry in other]
        if forms[0] == forms[1]:
            yield 0, len(base), 0, len(other)
            return
        counts = Counter(forms[0]), Counter(forms[1])
        if sum(counts[0][form] * counts[1][form] for form in counts[0]) <= _MAX_MATCHES:
            for i, j, size in SequenceMatcher(None, *forms, autojunk=False).get_matching_blocks():
                if size:
                    yield i, i + size, j, j + size
            return


def _join_pieces(base: list[Any], pieces: list[Any]) -> list[Any]:
    """Return the list that is built from ``pieces`` and entries of the list ``base``. A piece is one of: ``[start,
    end]``, the entries ``base[start:end]`` unchanged; ``{"of": i, ...}``, the entry ``base[i]`` changed by the
    difference in the other keys; ``{"=": entry}``, a new entry. Raise ``IndexError`` if the pieces do not follow the
    order of ``base``.
    """
    found, at = list[Any](), 0
    for piece in pieces:
        if isinstance(piece, list):
            start, end = piece
            at = _check_range(base, start, end, at)
            found += base[start:end]
        elif "of" in piece:
            at = _check_range(base, piece["of"], piece["of"] + 1, at)
            found.append(apply_delta(base[at - 1], piece))
        else:
            found.append(piece["="])
    return found


def _check_range(base: list[Any], start: int, end: int, at: int) -> int:
    """Return ``end``. Raise ``IndexError`` unless the range ``[start, end)`` lies in the list ``base`` and begins at
    the index ``at`` or later.
    """
    if not at <= start <= end <= len(base):
        raise IndexError(f"a list of {len(base)} entries has none from {start} to {end} after {at}")
    return end
