"""Numbers with units, as people write them in a cluster file: ``80 GB``, ``50 GB/s``, ``5 us``, ``989 TFLOP/s``."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
UNITS: dict[str, float] = {
    **{f"{prefix}B": scale for prefix, scale in {**_PREFIXES, **_BINARY}.items()},
    **{f"{prefix}B/s": scale for prefix, scale in {**_PREFIXES, **_BINARY}.items()},
    **{f"{prefix}b/s": scale / 8 for prefix, scale in _PREFIXES.items()},
    **{f"{prefix}bit/s": scale / 8 for prefix, scale in _PREFIXES.items()},
    **{f"{prefix}FLOP/s": scale for prefix, scale in _PREFIXES.items()},
    **{f"{prefix}W": _PREFIXES[prefix] for prefix in ("", "k")},
    "USD/h": 1.0,
    **_TIMES,
}
_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S*)\s*")


def quantity(value: Any) -> Any:
    """``value`` in the base unit (bytes, seconds, FLOP/s, watts, ...) if it is text with one; else as it is."""
    if not isinstance(value, str):
        return value
    match = _NUMBER.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not a number with a unit; write it like '80 GB', '50 GB/s', '5 us'")
    number, unit = match.groups()
    if unit and unit not in UNITS:
        raise ValueError(f"{value!r} has the unknown unit {unit!r}; use one like GB, GiB, GB/s, Gbit/s, us, TFLOP/s")
    return float(Decimal(number) * Decimal(repr(UNITS[unit]))) if unit else float(number)  # 7.6 us is 7.6e-06


def _whole(value: Any) -> Any:
    value = quantity(value)
    return round(value) if isinstance(value, float) and value == value else value


Positive = Annotated[float, BeforeValidator(quantity), Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, BeforeValidator(quantity), Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, BeforeValidator(_whole), Field(gt=0)]
BytesOrNone = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
