"""Format numbers with units as text, create consoles, and list divisors.

Every console of the package is created here. In a Jupyter kernel, on Colab or on Databricks, rich writes HTML to the
notebook instead of to the console's file, so that a function which formats text would return an empty string.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from typing import IO, Any

from rich.console import Console, RenderableType

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def format_digits(value: float, places: int = 3) -> str:
    """Return ``value`` as text with ``places`` significant digits, never in scientific notation: 1234.5 gives ``1,234``
    and 0.01234 gives ``0.0123``.
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, places - 1 - math.floor(math.log10(abs(value))))
    shown = f"{value:,.{decimals}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def bytes_text(num_bytes: float) -> str:
    """Return ``num_bytes`` as text with three significant digits in powers of 1024, such as ``16 MiB``."""
    size, unit = float(num_bytes), 0
    while abs(size) >= 999.5 and unit < len(_BINARY) - 1:
        size, unit = size / 1024, unit + 1
    return f"{format_digits(size)} {_BINARY[unit]}"


def seconds_text(seconds: float, places: int = 3) -> str:
    """Return ``seconds`` as text in s, ms, µs or ns, such as ``12.3 ms``. ``places``: number of significant digits."""
    if seconds == 0:
        return "0 s"
    scale, unit = next((s for s in _SECONDS if abs(seconds) >= s[0] * 0.9995), _SECONDS[-1])
    return f"{format_digits(seconds / scale, places)} {unit}"


_MOST_PLACES, _ALIKE = 6, 5e-7  # digits of a time; relative difference below which two times are equal


def list_distinct_seconds_texts(*seconds: float) -> list[str]:
    """Return the texts of several times, in the order of ``seconds``, with as many significant digits (three to six) as
    it takes to tell different times apart. Times that six digits do not tell apart have three."""
    for places in range(3, _MOST_PLACES + 1):
        texts = [seconds_text(each, places) for each in seconds]
        pairs = ((i, j) for i in range(len(seconds)) for j in range(i))
        if all(texts[i] != texts[j] or abs(seconds[i] - seconds[j]) <= _ALIKE * abs(seconds[i]) for i, j in pairs):
            return texts
    return [seconds_text(each) for each in seconds]


def count_text(count: float) -> str:
    """Return ``count`` as text with a suffix k, M, B or T, such as ``8.03 B`` for 8,030,261,248. Counts below 10,000
    are written in full."""
    for scale, unit in _COUNTS:
        if abs(count) >= scale * 0.9995 and count >= 10_000:
            return f"{format_digits(count / scale)} {unit}"
    return f"{count:,.0f}"


def format_flops(count: float) -> str:
    """Return ``count``, floating-point operations, as text with an SI prefix, such as ``142 G`` for 142,000,000,000."""
    return count_text(count).replace(" B", " G")


def format_percent(share: float) -> str:
    """Return ``share``, a fraction of 1, as a percentage, such as ``45%``. Values below 10 % have one decimal."""
    value = 100 * share
    if 0 < value < 0.05:
        return "<0.1%"
    return f"{value:.1f}%" if 0 < abs(value) < 9.95 else f"{value:.0f}%"


def format_ranges(numbers: Sequence[int]) -> str:
    """Return integers as text, with ranges for consecutive ones, such as ``0–3, 8, 10–11``. ``numbers``: in ascending
    order, without duplicates."""
    parts: list[str] = []
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            first, last = numbers[start], numbers[i - 1]
            parts.append(str(first) if first == last else f"{first}–{last}")
            start = i
    return ", ".join(parts)


def format_plural(count: int, noun: str, many: str = "") -> str:
    """Return ``count`` with its ``noun``, such as ``1 rank`` or ``2 ranks``. ``many``: the plural, if it is not the
    noun with an s.
    """
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def list_divisors(number: int) -> list[int]:
    """Return the divisors of ``number`` in ascending order."""
    return list(_list_divisors(number))


@cache
def _list_divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of ``number`` in ascending order. The result is cached."""
    import sympy  # imported late: it takes half a second

    return tuple(map(int, sympy.divisors(number)))


WIDTH = 110  # columns of the plain text


def text_console(file: IO[str], **options: Any) -> Console:
    """Return a console of the library rich that writes to ``file``, also in notebooks. ``options``: further arguments
    of :class:`rich.console.Console`."""
    return Console(file=file, highlight=False, force_jupyter=False, **options)


def format_plain_text(parts: Iterable[RenderableType]) -> str:
    """Return renderable objects of the library rich, such as tables, as text without colours. Lines have at most 110
    columns and no spaces at their ends. ``parts``: the objects, from top to bottom.
    """
    written = io.StringIO()
    console = text_console(written, width=WIDTH, color_system=None, legacy_windows=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in written.getvalue().rstrip().splitlines())


def format_html_figures(title: str, rows: Iterable[tuple[str, str]], more: str = "") -> str:
    """Return a table in HTML with the heading ``title``, for notebooks. ``rows``: (name, value) of each row of the
    table. ``more``: HTML that follows the table."""
    body = "".join(
        f'<tr><th scope="row" style="text-align:left;font-weight:normal;opacity:.75">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<div><p><strong>{escape(title)}</strong></p><table><tbody>{body}</tbody></table>{more}</div>"
