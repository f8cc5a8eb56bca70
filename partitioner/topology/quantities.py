"""Parse numbers with units in topology files, such as ``80 GB``, ``50 GB/s``, ``5 us`` and ``989 TFLOP/s``."""

from __future__ import annotations

import re
from decimal import Decimal
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}

_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

# What is measured -> its units, and an example of how it is written.
_DIMENSIONS: dict[str, tuple[dict[str, float], str]] = {
    "bytes": ({f"{prefix}B": scale for prefix, scale in {**_PREFIXES, **_BINARY}.items()}, "80 GB or 80 GiB"),
    "bytes per second": (
        {
            **{f"{prefix}B/s": scale for prefix, scale in {**_PREFIXES, **_BINARY}.items()},
            **{f"{prefix}b/s": scale / 8 for prefix, scale in _PREFIXES.items()},
            **{f"{prefix}bit/s": scale / 8 for prefix, scale in _PREFIXES.items()},
        },
        "50 GB/s or 400 Gbit/s",
    ),
    "operations per second": ({f"{prefix}FLOP/s": s for prefix, s in _PREFIXES.items()}, "989 TFLOP/s"),
    "watts": ({"W": 1.0, "kW": 1e3}, "700 W or 0.7 kW"),
    "dollars per hour": ({"USD/h": 1.0}, "2.80 USD/h, the one unit of money"),
    "time": ({"s": 1.0, "ms": 1e-3, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ns": 1e-9}, "5 us or 2 ms"),
    "a number": ({}, "0.9, without a unit"),
}
UNITS: dict[str, float] = {unit: scale for units, _ in _DIMENSIONS.values() for unit, scale in units.items()}
_KINDS = {unit: kind for kind, (units, _) in _DIMENSIONS.items() for unit in units}
_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([^\s:]*)\s*")
_RATIO = re.compile(r"\s*(\d+\.?\d*)\s*:\s*(\d+\.?\d*)\s*")
_MOST_BYTES = 1 << 60  # sums over all devices stay within 64 bits


def parse_quantity(value: Any, kind: str | None = None) -> Any:
    """Return ``value``, a text like ``80 GB``, as a number in the base unit (bytes, bytes/s, s, FLOP/s, W, USD/h).
    Other values are returned unchanged, except booleans.

    ``kind``: what the text must measure, such as ``"bytes"`` or ``"time"``; ``None`` allows any unit. Raise
    ``ValueError`` for booleans, text that is not a number, unknown units and units that measure something else.
    """
    like = "'80 GB', '50 GB/s', '5 us'" if kind is None else _DIMENSIONS[kind][1]
    if isinstance(value, bool):  # Python would accept it as 0 or 1
        raise ValueError(f"{str(value).lower()} is not a number; write it like {like}")
    if not isinstance(value, str):
        return value
    match = _NUMBER.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not a number with a unit; write it like {like}")
    number, unit = match.groups()
    if unit and unit not in UNITS:
        units = f"; write it like {like}" if kind else "; use one like GB, GiB, GB/s, Gbit/s, us, TFLOP/s"
        raise ValueError(f"{value!r} has the unknown unit {unit!r}{units}")
    if unit and kind is not None and _KINDS[unit] != kind:
        raise ValueError(f"{value!r} measures {_KINDS[unit]}; expected {kind}, like {like}")
    try:
        # exact: 7.6 us is 7.6e-06
        return float(Decimal(number) * Decimal(repr(UNITS[unit]))) if unit else float(number)
    except ArithmeticError as error:
        raise ValueError(f"{value!r} is too large or too small a number; write it like {like}") from error


def parse_ratio(value: Any) -> Any:
    """Return the quotient of ``value``, a text like ``4:1`` (4.0). Text like ``4`` becomes a number, and other values
    are returned unchanged. Raise ``ValueError`` for booleans, text that is not a number, and a division by zero."""
    match = _RATIO.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return parse_quantity(value, "a number")
    above, below = map(float, match.groups())
    if not below:
        raise ValueError(f"{value!r} divides by zero; write it like 4 or 4:1")
    return above / below


def reject_boolean(value: Any) -> Any:
    """Return ``value``, or raise ``ValueError`` if it is a boolean, which Python would accept as an integer."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a number; expected a whole number, like 2")
    return value


def _whole_bytes(value: Any) -> Any:
    """Return ``value``, a text like ``80 GB`` or a number, as a whole number of bytes. Other values are returned
    unchanged. Raise ``ValueError`` for text that is not a number of bytes, and for more than 2**60 bytes.
    """
    value = parse_quantity(value, "bytes")
    if isinstance(value, int | float) and not abs(value) <= _MOST_BYTES:  # also for inf and nan
        raise ValueError(f"{value:g} is not a size of memory; expected at most 2**60 bytes, written like 80 GB")
    return round(value) if isinstance(value, float) else value


def _make_quantity_validator(kind: str) -> BeforeValidator:
    """Return a pydantic validator that turns text with a unit, such as ``"80 GB"``, into a number in the base unit.
    ``kind``: what the text must measure, such as ``bytes per second``."""
    return BeforeValidator(partial(parse_quantity, kind=kind))


def _require_rising_rows(table: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
    """Return ``table``, the rows of a table of measurements. Raise ``ValueError`` if their first numbers do not
    increase strictly, as interpolation needs."""
    for (before, *_), (after, *_) in pairwise(table):
        if after <= before:
            raise ValueError(f"{after:g} after {before:g}; expected rows in order of their first number, each once")
    return table


def _make_range_validator(least: float, most: float, unit: str, like: str) -> AfterValidator:
    """Return a pydantic validator that raises an error for numbers outside ``least`` to ``most``, the range of real
    hardware, because they are probably typing errors or wrong units. For the error message, ``unit`` is the name of the
    unit and ``like`` an example of a correct value."""

    def check(value: float) -> float:
        """Return ``value``; raise ``ValueError`` if it is outside the range from ``least`` to ``most``, arguments of
        the enclosing function."""
        if not least <= value <= most:
            limits = f"{least:g} to {most:g}{unit}"
            raise ValueError(
                f"{value:g}{unit} is too {_describe_deviation(value, least)} to be meant; expected "
                f"{limits}, like {like}"
            )
        return value

    return AfterValidator(check)


def _describe_deviation(value: float, least: float) -> str:
    """Return ``"small"`` if ``value`` is below ``least``, the lower limit of the allowed range, and ``"large"``
    otherwise."""
    return "small" if value < least else "large"


_POSITIVE, _NOT_NEGATIVE = Field(gt=0, allow_inf_nan=False), Field(ge=0, allow_inf_nan=False)

Count = Annotated[int, BeforeValidator(reject_boolean), Field(gt=0)]
Number = Annotated[float, _make_quantity_validator("a number"), _POSITIVE]
Ratio = Annotated[float, BeforeValidator(parse_ratio), Field(ge=1, allow_inf_nan=False)]
Factor = Annotated[float, _make_quantity_validator("a number"), _POSITIVE, _make_range_validator(1e-6, 1e6, "", "0.5")]
Rate = Annotated[
    float, _make_quantity_validator("bytes per second"), _POSITIVE, _make_range_validator(1.0, 1e18, " B/s", "50 GB/s")
]
Flops = Annotated[
    float,
    _make_quantity_validator("operations per second"),
    _POSITIVE,
    _make_range_validator(1.0, 1e24, " FLOP/s", "989 TFLOP/s"),
]
Seconds = Annotated[
    float, _make_quantity_validator("time"), _NOT_NEGATIVE, _make_range_validator(0.0, 1e6, " s", "5 us")
]
Price = Annotated[float, _make_quantity_validator("dollars per hour"), _NOT_NEGATIVE]
Power = Annotated[float, _make_quantity_validator("watts"), _POSITIVE]
PowerOrNone = Annotated[float, _make_quantity_validator("watts"), _NOT_NEGATIVE]
Size = Annotated[float, _make_quantity_validator("bytes"), _POSITIVE]  # bytes that need not be whole
Bytes = Annotated[int, BeforeValidator(_whole_bytes), Field(gt=0)]
BytesOrNone = Annotated[int, BeforeValidator(_whole_bytes), Field(ge=0)]
_Table = TypeVar("_Table", bound=tuple[tuple[float, ...], ...])
Rising = Annotated[_Table, AfterValidator(_require_rising_rows)]
