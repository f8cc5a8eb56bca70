"""Text for people: numbers with three significant digits and a unit, consoles for a string or a stream; divisors.

Every console of the package is made here. In a Jupyter kernel, on Colab or on Databricks, rich writes HTML to the
notebook instead of to the console's file; a function that returns a text would then return nothing.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import IO, Any

from rich.console import Console, RenderableType

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def format_digits(value: float, places: int = 3) -> str:
    """``value`` to ``places`` significant digits, never in scientific notation: 1234.5 -> 1,234; 0.01234 -> 0.0123."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, places - 1 - math.floor(math.log10(abs(value))))
    shown = f"{value:,.{decimals}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def bytes_text(num_bytes: float) -> str:
    """Bytes in powers of 1024: ``16 MiB``."""
    size, unit = float(num_bytes), 0
    while abs(size) >= 999.5 and unit < len(_BINARY) - 1:
        size, unit = size / 1024, unit + 1
    return f"{format_digits(size)} {_BINARY[unit]}"


def seconds_text(seconds: float) -> str:
    """Seconds in the unit that fits: ``12.3 ms``."""
    if seconds == 0:
        return "0 s"
    scale, unit = next((s for s in _SECONDS if abs(seconds) >= s[0] * 0.9995), _SECONDS[-1])
    return f"{format_digits(seconds / scale)} {unit}"


def count_text(count: float) -> str:
    """``8.03 B`` for 8,030,261,248; small numbers as they are."""
    for scale, unit in _COUNTS:
        if abs(count) >= scale * 0.9995 and count >= 10_000:
            return f"{format_digits(count / scale)} {unit}"
    return f"{count:,.0f}"


def format_percent(share: float) -> str:
    """A share of one as a percentage, with a decimal below ten."""
    value = 100 * share
    if 0 < value < 0.05:
        return "<0.1%"
    return f"{value:.1f}%" if 0 < abs(value) < 9.95 else f"{value:.0f}%"


def format_ranges(numbers: Sequence[int]) -> str:
    """``0–3, 8, 10–11`` for sorted integers."""
    parts: list[str] = []
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            first, last = numbers[start], numbers[i - 1]
            parts.append(str(first) if first == last else f"{first}–{last}")
            start = i
    return ", ".join(parts)


def format_plural(count: int, noun: str, many: str = "") -> str:
    """``1 rank``, ``2 ranks``; ``many`` where it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def list_divisors(number: int) -> list[int]:
    """What divides ``number``, smallest first."""
    return list(_list_divisors(number))


@cache
def _list_divisors(number: int) -> tuple[int, ...]:
    import sympy  # where it is used: it takes half a second

    return tuple(map(int, sympy.divisors(number)))


WIDTH = 110  # columns of the plain text


def text_console(file: IO[str], **options: Any) -> Console:
    """A console that writes to ``file``, in notebooks too. ``options``: of :class:`rich.console.Console`."""
    return Console(file=file, highlight=False, force_jupyter=False, **options)


def format_plain_text(parts: Iterable[RenderableType]) -> str:
    """``parts`` as text without colour, ``WIDTH`` columns wide, no spaces at the ends of lines."""
    written = io.StringIO()
    console = text_console(written, width=WIDTH, color_system=None, legacy_windows=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in written.getvalue().rstrip().splitlines())
