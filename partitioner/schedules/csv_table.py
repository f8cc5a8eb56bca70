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

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_OVERLAP = re.compile(r"\((.*)\)\s*OVERLAP_F_B")
_OTHER = re.compile(r"\d+\s*(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
_HALVES = {"F": ("F",), "B": ("B", "I", "W"), "I": ("B", "I"), "W": ("B", "W")}  # actions that exclude each other


class _ScheduleCell(NamedTuple):
    """One action (forward or backward of one microbatch) of a schedule table, and its position in the table.

    ``kind``: ``F`` forward, ``B`` backward, ``I`` or ``W`` the half of the backward for input or weight gradients.
    ``stage``: index of the virtual stage, from 0. ``microbatch``: index of the microbatch, from 0. ``row``, ``cell``:
    row and column in the file, counted from 1.
    """

    kind: Any  # "F", "B", "I" or "W"
    stage: int
    microbatch: int
    row: int
    cell: int

    @property
    def text(self) -> str:
        """Return the action as it is written in a table, such as ``3F0``: virtual stage, kind (``F`` forward),
        microbatch."""
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def place(self) -> str:
        """Return the position in the table for error messages, such as ``row 1, cell 2``."""
        return f"row {self.row}, cell {self.cell}"


class ScheduleTable(Data):
    """A user-defined pipeline schedule for one fixed number of ranks and microbatches, written as a table. ``name``:
    its name in reports. ``rows``: for each pipeline rank its actions in order, such as ``3F0`` for the forward of
    microbatch 0 through virtual stage 3.

    The table is validated when it is first used, not when it is constructed. :class:`ScheduleError` is then raised if
    it is not a valid schedule.
    """

    name: str = Field(description="Name of the schedule in reports.")
    rows: tuple[tuple[str, ...], ...] = Field(
        description='Actions of each pipeline rank, in order. An action such as "0F1" has the virtual stage (0), '
        "the kind (F forward, B backward, I backward of inputs, W backward of weights) and the "
        "microbatch (1)."
    )

    @staticmethod
    def load(path: str | Path) -> ScheduleTable:
        """Return the schedule that the CSV file ``path`` contains, one row per pipeline rank. Raise
        :class:`ScheduleError` if the file cannot be read. The cells are validated when the schedule is first used."""
        try:
            content = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ScheduleError(f"cannot read the schedule {str(path)!r}: {error}") from None
        return _parse_schedule_table(str(path), content)

    @staticmethod
    def of(schedule: str, num_ranks: int, num_microbatches: int, chunks: int | None = None) -> ScheduleTable:
        """Return the built-in schedule with the name ``schedule`` as a table. ``num_ranks``, ``num_microbatches``:
        numbers of pipeline ranks and of microbatches. ``chunks``: number of virtual stages of each rank; ``None``: the
        default of the schedule."""
        from partitioner.schedules.registry import build_timetable

        found = build_timetable(schedule, num_ranks, num_microbatches, chunks)
        return ScheduleTable(name=schedule, rows=format_timetable_rows(found))

    def save(self, path: str | Path) -> Path:
        """Write the table to ``path`` as a CSV file, one row per pipeline rank, and return its path."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.rows)
        return write_text(Path(path), text.getvalue())

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash((self.name, self.rows))

    @cached_property
    def own(self) -> Timetable:
        """Return the timetable that the rows describe: each rank's order of actions (forwards and backwards of one
        microbatch), and the rank of each virtual stage. The timetable is built and checked at the first access, which
        raises :class:`ScheduleError` if the table is not a valid schedule."""
        return _ScheduleTableReader(self).parse_timetable()

    @cached_property
    def num_microbatches(self) -> int:
        """Return the number of microbatches in one step of this schedule."""
        return 1 + max(action.microbatch for order in self.own.orders for action in order)

    def timetable(self, num_ranks: int, num_microbatches: int) -> Timetable:
        """Return each rank's order of actions (forwards and backwards of one microbatch) and the rank of each virtual
        stage under this schedule. Raise :class:`ScheduleError` unless the table has exactly ``num_ranks`` pipeline
        ranks and ``num_microbatches`` microbatches."""
        own = self.own
        if (len(own.orders), self.num_microbatches) != (num_ranks, num_microbatches):
            raise ScheduleError(
                f"the schedule {self.name!r} is for pp={len(own.orders)} with {self.num_microbatches} microbatches, "
                f"got pp={num_ranks} with {num_microbatches}: change them, or write the schedule for these"
            )
        return own


def table_of(schedule: str | ScheduleTable) -> ScheduleTable | None:
    """Return ``schedule`` as a table: a table is returned unchanged, and a path that ends in ``.csv`` is read. Return
    ``None`` if ``schedule`` is the name of a built-in schedule."""
    if isinstance(schedule, ScheduleTable):
        return schedule
    return ScheduleTable.load(schedule) if schedule.endswith(SUFFIX) else None


def format_timetable_rows(timetable: Timetable) -> tuple[tuple[str, ...], ...]:
    """Return the CSV cells of ``timetable``, one row per pipeline rank, with its actions in the order of execution.
    ``3F0`` is the forward (``F``) of microbatch 0 through virtual stage 3."""
    return tuple(
        tuple(f"{timetable.held[s][a.chunk]}{a.kind}{a.microbatch}" for a in order)
        for s, order in enumerate(timetable.orders)
    )


@lru_cache(maxsize=16)
def _parse_schedule_table(name: str, content: str) -> ScheduleTable:
    """Return the schedule table in the CSV text ``content``, without empty rows at its end. ``name``: name of the
    table. The cells are not validated."""
    rows = [tuple(cell.strip() for cell in row) for row in csv.reader(io.StringIO(content))]
    while rows and not any(rows[-1]):
        rows.pop()
    return ScheduleTable(name=name, rows=tuple(rows))


class _ScheduleTableReader:
    """Parser of a schedule table: it validates the texts of the cells and builds a timetable from them. Errors name the
    row and the cell. ``table``: the table. The constructor raises :class:`ScheduleError` if a cell is not an action
    (forward or backward of one microbatch)."""

    def __init__(self, table: ScheduleTable) -> None:
        self.name = table.name
        self.rows = [list(self.parse_row(number, row)) for number, row in enumerate(table.rows, 1)]

    def create_schedule_error(self, message: str) -> ScheduleError:
        """Return an error whose text is the name of the schedule followed by ``message``, for the caller to raise."""
        return ScheduleError(f"the schedule {self.name!r}, {message}")

    def parse_row(self, number: int, row: Sequence[str]) -> Iterator[_ScheduleCell]:
        """Yield the actions (forwards and backwards of one microbatch) of one row in order; a cell with a pair of
        overlapped actions yields both, and an empty cell none. ``number``: number of the row, from 1. ``row``: the
        texts of its cells."""
        for place, text in enumerate(row, 1):
            pair = _OVERLAP.fullmatch(text.strip())
            for part in pair[1].split(";") if pair else [text]:
                if part.strip():
                    yield self.parse_cell(part.strip(), number, place)

    def parse_cell(self, text: str, row: int, place: int) -> _ScheduleCell:
        """Return the action that the cell ``text`` describes, such as ``3F0`` (virtual stage 3, forward, microbatch 0).
        ``row`` and ``place``: row and column of the cell, counted from 1, for errors. Raise ``ScheduleError`` if the
        text is not an action."""
        found = _ACTION.fullmatch(text)
        if found:
            return _ScheduleCell(found[2], int(found[1]), int(found[3]), row, place)
        hint = "<stage><F, B, I or W><microbatch>, like 3F0, or an empty cell"
        if _OTHER.fullmatch(text):
            hint += "; sends, receives and gathers are not written: they follow from the order (format compute_only)"
        raise self.create_schedule_error(f"row {row}, cell {place}: {text!r} is not an action; expected {hint}")

    def parse_timetable(self) -> Timetable:
        """Return the timetable that the rows describe, one row per pipeline rank: each rank's order of actions
        (forwards and backwards of one microbatch), and the rank of each virtual stage. Raise ``ScheduleError`` if an
        action is missing or occurs twice, or if the ranks deadlock."""
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
        """Return index of a virtual stage -> the first cell with an action (forward or backward of one microbatch) of
        this stage. The row of this cell tells which pipeline rank runs the stage. ``cells``: all cells of the table,
        row by row. Raise :class:`ScheduleError` if the actions of a virtual stage are in several rows, a row is empty,
        or an index between 0 and the largest one has no actions."""
        first: dict[int, _ScheduleCell] = {}
        for cell in cells:
            other = first.setdefault(cell.stage, cell)
            if other.row != cell.row:
                raise self.create_schedule_error(
                    f"{cell.place}: {cell.text} runs stage {cell.stage}, but row {other.row} runs this stage, "
                    f"too (cell {other.cell}: {other.text}); expected all actions of a stage in one row"
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
        """Raise ``ScheduleError`` if an action occurs twice: two of ``cells`` have the same virtual stage, the same
        microbatch, and the same forward or the same half of the backward. ``cells``: all cells of the table."""
        seen: dict[tuple[str, int, int], _ScheduleCell] = {}
        for cell in cells:
            for kind in _HALVES[cell.kind]:
                other = seen.get((kind, cell.stage, cell.microbatch))
                if other is not None:
                    raise self.create_schedule_error(
                        f"{cell.place}: {cell.text} repeats an action: cell {other.cell} already has "
                        f"{other.text}; expected every action once"
                    )
            seen[cell.kind, cell.stage, cell.microbatch] = cell

    def check_completeness(self, cells: Sequence[_ScheduleCell], first: dict[int, _ScheduleCell]) -> None:
        """Raise :class:`ScheduleError` unless every virtual stage runs every microbatch forward and backward. The
        microbatches are 0 to the largest number in the table. ``cells``: all cells of the table. ``first``: index of a
        virtual stage -> its first cell."""
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
        """Raise :class:`ScheduleError` unless each row has each forward before its backward, and each backward for
        input gradients before the one for weight gradients."""
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
        """Raise ``ScheduleError`` if the ranks of ``timetable`` deadlock: each deadlocked rank waits for an action
        (forward or backward of one microbatch) that comes later in the order of another rank. The error names the cells
        that wait."""
        stuck = stuck_at(timetable)
        if stuck:
            cells = [self.rows[rank][place] for rank, place in stuck]
            shown = "; ".join(f"{c.place} ({c.text})" for c in cells[:4])
            raise self.create_schedule_error(
                f"{cells[0].place}: {cells[0].text} can never start, because it needs an action that is "
                f"listed after it. Waiting actions: {shown}"
            )
