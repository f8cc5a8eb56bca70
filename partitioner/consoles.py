"""Text for people: as a string, or written to a stream.

Every console of the package is made here. rich writes HTML to the notebook instead of to the console's file where it
runs in a Jupyter kernel, on Colab or on Databricks; a function that returns a text would then return nothing.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, RenderableType

WIDTH = 110  # columns of the plain text


def text_console(file: IO[str], **options: Any) -> Console:
    """A console that writes to ``file``, in notebooks too. ``options``: of :class:`rich.console.Console`."""
    return Console(file=file, highlight=False, force_jupyter=False, **options)


def plain(parts: Iterable[RenderableType]) -> str:
    """``parts`` as text without colour, ``WIDTH`` columns wide, no spaces at the ends of lines."""
    written = io.StringIO()
    console = text_console(written, width=WIDTH, color_system=None, legacy_windows=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in written.getvalue().rstrip().splitlines())
