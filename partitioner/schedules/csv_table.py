"""Pipeline schedules as CSV tables, in the compute-only notation of ``torch.distributed.pipelining``.

Each row is a pipeline rank, from rank 0 on. Each cell is an action: ``3F0`` runs microbatch 0 forward through virtual
stage 3, ``3B0`` backward, and ``3I0`` and ``3W0`` are the two halves of the backward (gradients of inputs, gradients of
weights). An empty cell is idle. ``(0F4;7B1)OVERLAP_F_B`` holds two actions, which are executed one after the other
here. The row in which a virtual stage occurs determines its rank. ``_PipelineScheduleRuntime._load_csv`` reads and
``_dump_csv(..., format="compute_only")`` writes the same files (torch/distributed/pipelining/schedules.py).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from partitioner.runtime.files import write_text
from partitioner.runtime.program.instructions import Data
from partitioner.schedules.actions import Action, ScheduleError, Timetable, group_stages_by_rank, stuck_at
from partitioner.schedules.orders import merge_backward_halves

SUFFIX = ".csv"

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAP = re.compile(r"\((.*)\)\s*OVERLAP_F_B")
_OTHER = re.compile(r"\d+\s*(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
_HALVES = {"F": ("F",), "B": ("B", "I", "W"), "I": ("B", "I"), "W": ("B", "W")}  # actions that exclude each other


class _ScheduleCell(NamedTuple):
    """One action of a schedule table and its position there. ``kind``: ``F``, ``B``, ``I`` or ``W``. ``stage``: index
    of the virtual stage. ``microbatch``: index of the microbatch. ``row``, ``cell``: position of the cell in the file,
    counted from 1."""

    kind: Any  # "F", "B", "I" or "W"
    stage: int
    microbatch: int
    row: int
    cell: int

    @property
    def text(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def place(self) -> str:
        return f"row {self.row}, cell {self.cell}"


class ScheduleTable(Data):
    """A user-defined pipeline schedule for one fixed number of ranks and microbatches.

    The table is validated when it is first used, not when it is constructed. :class:`ScheduleError` is then raised if
    it is no valid schedule.
    """

    name: str = Field(description="What reports call it.")
    rows: tuple[tuple[str, ...], ...] = Field(
        description='The cells of each rank, such as "0F1": stage, kind of work and microbatch.'
    )

    @staticmethod
    def load(path: str | Path) -> ScheduleTable:
        """Read a schedule from a CSV file. Raise :class:`ScheduleError`, with row and cell, if the file cannot be read
        or is no schedule."""
        try:
            content = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ScheduleError(f"cannot read the schedule {str(path)!r}: {error}") from None
        return _parse_schedule_table(str(path), content)

    @staticmethod
    def of(schedule: str, num_ranks: int, num_microbatches: int, chunks: int | None = None) -> ScheduleTable:
        """Return the built-in ``schedule`` as a table for the given numbers of ranks and microbatches. ``chunks``:
        number of virtual stages of each rank, if the schedule leaves a choice."""
        from partitioner.schedules.registry import build_timetable

        found = build_timetable(schedule, num_ranks, num_microbatches, chunks)
        return ScheduleTable(name=schedule, rows=format_timetable_rows(found))

    def save(self, path: str | Path) -> Path:
        """Write the table as a CSV file and return its path."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.rows)
        return write_text(Path(path), text.getvalue())

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash((self.name, self.rows))

    @cached_property
    def own(self) -> Timetable:
        """The timetable that the rows describe: each rank's order of actions, and the rank of each virtual stage.
        Raises :class:`ScheduleError` if the table is no valid schedule."""
        return _ScheduleTableReader(self).parse_timetable()

    @cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches in one step of this schedule."""
        return 1 + max(action.microbatch for order in self.own.orders for action in order)

    def timetable(self, num_ranks: int, num_microbatches: int) -> Timetable:
        """Return the timetable of this schedule. Raises :class:`ScheduleError` unless the table has exactly
        ``num_ranks`` ranks and ``num_microbatches`` microbatches."""
        own = self.own
        if (len(own.orders), self.num_microbatches) != (num_ranks, num_microbatches):
            raise ScheduleError(
                f"the schedule {self.name!r} is for pp={len(own.orders)} with {self.num_microbatches} microbatches, "
                f"got pp={num_ranks} with {num_microbatches}: change them, or write the schedule for these"
            )
        return own


def table_of(schedule: str | ScheduleTable) -> ScheduleTable | None:
    """Return the table of ``schedule``: a table unchanged, or the table read from a file if the name ends in ``.csv``.
    ``None`` for the name of a built-in schedule."""
    if isinstance(schedule, ScheduleTable):
        return schedule
    return ScheduleTable.load(schedule) if schedule.endswith(SUFFIX) else None


def format_timetable_rows(timetable: Timetable) -> tuple[tuple[str, ...], ...]:
    """Return the CSV cells of ``timetable``, one row per rank, such as ``3F0`` for the forward of microbatch 0 in
    virtual stage 3."""
    return tuple(
        tuple(f"{timetable.held[s][a.chunk]}{a.kind}{a.microbatch}" for a in order)
        for s, order in enumerate(timetable.orders)
    )


@lru_cache(maxsize=16)
def _parse_schedule_table(name: str, content: str) -> ScheduleTable:
    rows = [tuple(cell.strip() for cell in row) for row in csv.reader(io.StringIO(content))]
    while rows and not any(rows[-1]):
        rows.pop()
    return ScheduleTable(name=name, rows=tuple(rows))


class _ScheduleTableReader:
    """Parser and validator of a schedule table, which turns the texts of its cells into a timetable. Its errors name
    the row and the cell."""

    def __init__(self, table: ScheduleTable) -> None:
        self.name = table.name
        self.rows = [list(self.parse_row(number, row)) for number, row in enumerate(table.rows, 1)]

    def create_schedule_error(self, message: str) -> ScheduleError:
        return ScheduleError(f"the schedule {self.name!r}, {message}")

    def parse_row(self, number: int, row: Sequence[str]) -> Iterator[_ScheduleCell]:
        for place, text in enumerate(row, 1):
            pair = _OVERLAP.fullmatch(text.strip())
            for part in pair[1].split(";") if pair else [text]:
                if part.strip():
                    yield self.parse_cell(part.strip(), number, place)

    def parse_cell(self, text: str, row: int, place: int) -> _ScheduleCell:
        """Return the action that the cell ``text`` describes, such as ``3F0``. ``row`` and ``place`` locate the cell
        in errors. Raise ``ScheduleError`` if the text is no action.
        """
        found = _ACTION.fullmatch(text)
        if found:
            return _ScheduleCell(found[2], int(found[1]), int(found[3]), row, place)
        hint = "<stage><F, B, I or W><microbatch>, like 3F0, or an empty cell"
        if _OTHER.fullmatch(text):
            hint += "; sends, receives and gathers are not written: they follow from the order (format compute_only)"
        raise self.create_schedule_error(f"row {row}, cell {place}: {text!r} is no action; expected {hint}")

    def parse_timetable(self) -> Timetable:
        """Return the timetable that the rows describe, one row per pipeline rank. Raise ``ScheduleError`` if an
        action is missing, occurs twice, or waits for one that comes after it.
        """
        cells = [cell for row in self.rows for cell in row]
        if not cells:
            raise ScheduleError(f"the schedule {self.name!r} has no actions; expected a row for each pipeline rank")
        home = self.find_first_actions(cells)
        self.check_once(cells)
        self.check_completeness(cells, home)
        ranks = tuple(home[k].row - 1 for k in range(len(home)))
        self.check_order()
        chunk = {k: place for stages in group_stages_by_rank(ranks, len(self.rows)) for place, k in enumerate(stages)}
        whole = [tuple(Action(c.kind, c.microbatch, chunk[c.stage]) for c in row) for row in self.rows]
        self.check_progress(Timetable(tuple(whole), ranks))
        orders = (merge_backward_halves(order, chunk[0]) if s == ranks[0] else order for s, order in enumerate(whole))
        return Timetable(tuple(orders), ranks)

    def find_first_actions(self, cells: Sequence[_ScheduleCell]) -> dict[int, _ScheduleCell]:
        """Return the first cell of each virtual stage (index of the stage -> cell). ``cells``: all cells of the table,
        row by row. Raise :class:`ScheduleError` if the actions of a stage are in several rows, a row is empty, or a
        stage index is missing."""
        first: dict[int, _ScheduleCell] = {}
        for cell in cells:
            other = first.setdefault(cell.stage, cell)
            if other.row != cell.row:
                raise self.create_schedule_error(
                    f"{cell.place}: {cell.text} runs stage {cell.stage}, which row {other.row} holds (cell "
                    f"{other.cell}: {other.text}); expected all of a stage in one row"
                )
        for number, row in enumerate(self.rows, 1):
            if not row:
                raise self.create_schedule_error(
                    f"row {number} has no actions; expected at least one stage for every rank"
                )
        for k in range(max(first)):
            if k not in first:
                largest = first[max(first)]
                raise self.create_schedule_error(
                    f"{largest.place}: {largest.text} runs stage {largest.stage}, but no row has stage {k}; expected "
                    "stages from 0 on without a gap"
                )
        return first

    def check_once(self, cells: Sequence[_ScheduleCell]) -> None:
        """Raise ``ScheduleError`` if two of ``cells`` compute the same part of the same virtual stage and
        microbatch.
        """
        seen: dict[tuple[str, int, int], _ScheduleCell] = {}
        for cell in cells:
            for kind in _HALVES[cell.kind]:
                other = seen.get((kind, cell.stage, cell.microbatch))
                if other is not None:
                    raise self.create_schedule_error(
                        f"{cell.place}: {cell.text} again; cell {other.cell} has {other.text}"
                    )
            seen[cell.kind, cell.stage, cell.microbatch] = cell

    def check_completeness(self, cells: Sequence[_ScheduleCell], first: dict[int, _ScheduleCell]) -> None:
        """Raise :class:`ScheduleError` unless every virtual stage runs every microbatch forward and backward.
        ``cells``: all cells of the table. ``first``: the first cell of each virtual stage (index of the stage ->
        cell)."""
        there = {(c.kind, c.stage, c.microbatch) for c in cells}
        last = max(cells, key=lambda c: c.microbatch)
        for k, home in sorted(first.items()):
            for i in range(last.microbatch + 1):
                if ("F", k, i) not in there:
                    what = f"{k}F{i}"
                elif not {("B", k, i), ("I", k, i)} & there:
                    what = f"{k}B{i} (or {k}I{i} and {k}W{i})"
                elif ("I", k, i) in there and ("W", k, i) not in there:
                    what = f"{k}W{i}, which follows {k}I{i}"
                elif ("W", k, i) in there and ("I", k, i) not in there:
                    what = f"{k}I{i}, which comes before {k}W{i}"
                else:
                    continue
                raise self.create_schedule_error(
                    f"row {home.row} lacks {what}; expected every microbatch from 0 to {last.microbatch} "
                    f"({last.place}: {last.text})"
                )

    def check_order(self) -> None:
        """Raise :class:`ScheduleError` unless each rank runs each forward before its backward, and the backward for
        inputs before the one for weights."""
        for row in self.rows:
            seen: set[tuple[str, int, int]] = set()
            for cell in row:
                before = {"F": None, "B": "F", "I": "F", "W": "I"}[cell.kind]
                if before and (before, cell.stage, cell.microbatch) not in seen:
                    wanted = f"{cell.stage}{before}{cell.microbatch}"
                    raise self.create_schedule_error(
                        f"{cell.place}: {cell.text} comes before {wanted}; expected it after"
                    )
                seen.add((cell.kind, cell.stage, cell.microbatch))

    def check_progress(self, timetable: Timetable) -> None:
        """Raise ``ScheduleError`` with the cells that wait for ever, if the order of ``timetable`` has a deadlock."""
        stuck = stuck_at(timetable)
        if stuck:
            cells = [self.rows[rank][place] for rank, place in stuck]
            shown = "; ".join(f"{c.place} ({c.text})" for c in cells[:4])
            raise self.create_schedule_error(
                f"{cells[0].place}: {cells[0].text} waits for ever, for what comes after it. Those that wait: {shown}"
            )
