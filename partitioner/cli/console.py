"""Console output of commands: error panels, progress on a terminal, exit codes.

Modules of commands import PyTorch inside the commands. Help then appears at once, and Ctrl-C works while PyTorch loads.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from typer import BadParameter
from typer.core import TyperGroup

from partitioner.errors import InfeasibleError
from partitioner.passes.errors import InternalError, PartitionError
from partitioner.passes.faults import typed_errors
from partitioner.units import WIDTH, format_plain_text, text_console

USER_ERROR, INTERNAL_ERROR, INTERRUPTED = 2, 3, 130

UsageError: type[Exception] = BadParameter.__mro__[1]  # the class of click, or of typer's own copy of click


class Commands(TyperGroup):
    """The commands of the command line, as a group that shows errors as panels. The exit code is 2 for errors of the
    user, 3 for faults of the partitioner, and 130 for Ctrl-C.

    ``--debug`` anywhere on the line before ``--`` makes errors show their traceback.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ours, passed_on = args[:end], args[end:]
        ctx.meta["debug"] = "--debug" in ours
        ctx.meta["words"] = ours = [word for word in ours if word != "--debug"]
        self._reject_repeated_options(ctx, ours)
        return super().parse_args(ctx, [*ours, *passed_on])

    def _reject_repeated_options(self, ctx: Any, words: list[str]) -> None:
        """Raise ``BadParameter`` if ``words``, a command with its arguments, contain an option twice. typer would
        silently use the last value. ``ctx``: the context of typer."""
        command = self.get_command(ctx, words[0]) if words else None
        for option in getattr(command, "params", ()):
            if option.param_type_name != "option" or option.multiple or option.is_flag:
                continue
            given = [word.partition("=")[0] for word in words if word.partition("=")[0] in option.opts]
            if len(given) > 1:
                names = " and ".join(dict.fromkeys(given))
                same = " are one option, which" if len({*given}) > 1 else ""
                raise BadParameter(f"{names}{same} is given {len(given)} times; give it once", ctx=ctx)

    def invoke(self, ctx: Any) -> Any:
        """Run the command of ``ctx``, a context of typer, and return its result. Errors are shown as panels, and end
        the process with an exit code.
        """
        try:
            with typed_errors("the command", passing=_is_of_the_command_line):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            build_error_console().print("Interrupted.", style="dim")
            ctx.exit(INTERRUPTED)
        except PartitionError as error:
            if ctx.meta["debug"]:
                raise
            if isinstance(error, InfeasibleError):
                with show_spinner("looking for the nearest change that fits"):
                    error.suggest()
            show_error(error)
            ctx.exit(INTERNAL_ERROR if isinstance(error, InternalError) else USER_ERROR)
        except UsageError as error:
            from partitioner.option_text import written_here

            _name_wrong_number(error, ctx.meta["words"])
            unknown = getattr(error, "option_name", "").lstrip("-")
            here = written_here(unknown, "N")
            if not here or not takes_constraints(getattr(error, "ctx", None)):
                raise
            how = "as --constraints NAME=VALUE or as an option of its own, see --help"
            if "profile=" in here:
                how = "as --profile NAME,FIELD=VALUE"
            show_error(OptionError(f"there is no option --{unknown}; here it is {here}: {how}"))
            ctx.exit(USER_ERROR)
        except OSError as error:
            if ctx.meta["debug"] or error.filename is None:  # a closed pipe has no name
                raise
            show_error(FileError(f"{error.filename2 or error.filename}: {error.strerror}; give another file or folder"))
            ctx.exit(USER_ERROR)


def _name_wrong_number(error: Exception, words: list[str]) -> None:
    """Replace the message of ``error``, an error of the command line, by one that shows the wrong value and the
    expected kind of number, if the error is a malformed number. ``words``: the command with its arguments."""
    kinds = {"valid integer": "a whole number, such as 4096", "valid number": "a number, such as 2.5"}
    expected = next((kind for text, kind in kinds.items() if text in getattr(error, "message", "")), None)
    names = getattr(getattr(error, "param", None), "opts", ())
    values = [value for name, value in pairwise(words) if name in names]
    values += [word.partition("=")[2] for word in words if word.partition("=")[0] in names and "=" in word]
    if expected and values:
        error.message = f"expected {expected}, got {values[-1]!r}"  # type: ignore[attr-defined]


def takes_constraints(ctx: Any) -> bool:
    """Return whether the command of ``ctx``, a context of typer, has the option ``--constraints``."""
    options = [option for each in getattr(getattr(ctx, "command", None), "params", ()) for option in each.opts]
    return "--constraints" in options


def _is_of_the_command_line(error: Exception) -> bool:
    """Return whether the command line itself reports ``error``: an ``OSError``, or an exception with which typer ends a
    command. Other exceptions are converted to errors of this project before they are reported."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in ("click", "typer")


class OptionError(PartitionError):
    """Error: a command has no option of the given name. The message says how to give a value of this name instead."""


class FileError(PartitionError):
    """Error: a file cannot be read or written."""


def check_outputs(*paths: Path | None) -> None:
    """Raise :class:`FileError` if a file cannot be written at one of ``paths``; ``None`` is skipped. Commands call this
    before they start to compute.
    """
    for path in filter(None, paths):
        if path.is_dir():
            raise FileError(f"{path} is a folder; expected the name of a file to write")
        there = next(folder for folder in path.absolute().parents if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            kind = "cannot be written to" if there.is_dir() else "is no folder"
            raise FileError(f"cannot write {path}: {there} {kind}; give a file in another folder")


def show_error(error: PartitionError) -> None:
    title = "".join(f" {c.lower()}" if c.isupper() else c for c in type(error).__name__).strip()
    note = Text("\nRun again with --debug for the traceback.", style="dim")
    build_error_console().print(
        Panel(Text(error.brief) + note, title=title.capitalize(), title_align="left", border_style="red")
    )


def build_output_console() -> Console:
    """Return a console that prints results to the standard output. It is created for each use, because tests replace
    ``sys.stdout``.
    """
    console = text_console(sys.stdout)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def print_parts(parts: Iterable[RenderableType]) -> None:
    """Print ``parts``, tables and texts of the library rich, to the standard output, with colours on a terminal and as
    plain text elsewhere.
    """
    console = build_output_console()
    if not console.is_terminal:
        console.out(format_plain_text(parts))
        return
    for part in parts:
        console.print(part)


def build_error_console() -> Console:
    """Return a console for errors and progress on the standard error."""
    return text_console(sys.stderr)


@contextlib.contextmanager
def show_spinner(doing: str) -> Iterator[Callable[[str], None]]:
    """Show the text ``doing`` with a spinner while the block runs. The block receives a function that takes a new text
    and shows it instead. Nothing is shown if the standard error is not a terminal."""
    console = build_error_console()
    if console.is_terminal:
        with console.status(doing) as status:
            yield status.update
    else:
        yield lambda words: None


@contextlib.contextmanager
def show_progress_bar(doing: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar with the text ``doing`` while the block runs. The block receives a function that takes (text,
    steps done, total steps) and updates the bar. Nothing is shown if the standard error is not a terminal."""
    console = build_error_console()
    if not console.is_terminal:
        yield lambda words, done, total: None
        return
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda words, done, total: bar.update(task, description=words, completed=done, total=total)
