"""The difference of two JSON values, so that a plan file holds once what its programs have in common.

A difference is ``{"=": value}`` (another value), ``{"keys": {...}, "gone": [...]}`` for dicts, or
``{"items": {...}}`` for lists of one length, whose entries are differences again. ``{}`` is none.
"""

from __future__ import annotations

from typing import Any

Delta = dict[str, Any]


def make_delta(base: Any, other: Any) -> Delta:
    """The difference that :func:`apply_delta` adds to ``base`` to get ``other``."""
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
    return {"=": other}


def _is_nested(value: list[Any]) -> bool:
    return any(isinstance(entry, dict | list) for entry in value)


def apply_delta(base: Any, delta: Delta) -> Any:
    """``base`` with a difference added.

    Raises ``KeyError``, ``IndexError`` or ``TypeError`` for a difference from another base.
    """
    if "=" in delta:
        return delta["="]
    if "keys" in delta:
        gone, changed = set(delta.get("gone", ())), delta["keys"]
        kept = {k: apply_delta(v, changed[k]) if k in changed else v for k, v in base.items() if k not in gone}
        return kept | {k: d["="] for k, d in changed.items() if k not in base}
    if "items" in delta:
        return [apply_delta(v, delta["items"].get(str(i), {})) for i, v in enumerate(base)]
    return base
