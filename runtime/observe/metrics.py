"""Metrics of a run, step by step: a line on the screen, JSONL in a file, TensorBoard if installed, and loss spikes.

::

    log = partitioner.StepLog(engine, plan="plan.json", folder="metrics/")
    for batch in batches:
        loss = engine.step(batch)
        optimizer.step()
        print(log.step(loss))

An unknown figure is left out: tokens if no input consists of integers, MFU if the plan has no estimate.

``LossSpikes`` detects jumps of the loss by comparison with the median of earlier losses, so that one bad step does not
hide the next.
"""

from __future__ import annotations

import json
import math
import resource
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self, TextIO

import torch
from torch import Tensor

from partitioner.runtime.comm.wait_clock import waited
from partitioner.runtime.engine.batches import batch_size
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.execute.flight_recorder import MeasuredStep, list_recordings
from partitioner.runtime.files import write_text

FILE = "metrics.jsonl"

_WORDS = (  # of a step's line: the figure, how it is written, and in which unit
    ("step", "step {:.0f}", 1),
    ("loss", "loss {:.6f}", 1),
    ("tokens_per_s", "{:,.0f} tokens/s", 1),
    ("samples_per_s", "{:,.1f} samples/s", 1),
    ("mfu", "MFU {:.1%}", 1),
    ("memory", "memory {:.2f} GiB", 2**30),
    ("bubble", "bubble {:.1%}", 1),
    ("seconds", "{:.1f} ms", 1e-3),
)


@dataclass(frozen=True)
class StepMetrics:
    """One step of the optimizer, and all batches that it is made of; whatever else the script does included.

    ``step``: the batches so far, ``engine.steps``; ``tokens_per_s``: of all of these batches, whole; ``mfu``: a share
    of the peak of all devices; ``memory``: the most bytes so far on this rank (of the device, or resident on a CPU);
    ``bubble``: the share of the time that ranks wait for others, the mean of all ranks, in the last batch, where they
    are watched on this host, else this rank's.
    """

    step: int
    seconds: float
    loss: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    mfu: float | None = None
    memory: int | None = None
    bubble: float | None = None

    def __str__(self) -> str:
        known = {name: value for name, value in asdict(self).items() if value is not None}
        if "tokens_per_s" in known:
            known.pop("samples_per_s", None)
        return "  ".join(text.format(known[name] / unit) for name, text, unit in _WORDS if name in known)


class StepLog:
    """Measures the steps of ``engine``. Make one on every rank, or on the first rank alone.

    Args:
        plan: the plan, or its file. Its estimate says what a step computes, for the MFU.
        folder: folder of ``metrics.jsonl`` and of TensorBoard's events; existing files are continued. There is one line
            for each step. The line of a step that is done again, after a restart or a return to an earlier checkpoint,
            is replaced.
        watch: folder of :class:`partitioner.Watch`, for the bubble of all ranks.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Any = None,
        folder: str | Path | None = None,
        watch: str | Path | None = None,
    ) -> None:
        self.engine = engine
        self.watch = None if watch is None else Path(watch)
        self.tokens, self.samples = batch_size(engine.program)
        self.full_speed_s = _full_speed(plan)
        self._lines = None if folder is None else _Lines(Path(folder))
        self._steps_run = engine.steps_run
        self._last = time.perf_counter()
        self._waited = waited.ns

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def step(self, loss: Tensor | float | None = None, **more: float) -> StepMetrics:
        """Measure the time since the last call, or since the log was made: one batch, or several whose gradients were
        added up. Call it before or after the optimizer's step.

        ``more``: further numbers for the files. The loss is read, which waits for it on a CUDA device.
        """
        value = float(loss) if loss is not None else None
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        waiting, self._waited = (waited.ns - self._waited) * 1e-9, waited.ns
        steps_run, self._steps_run = self.engine.steps_run - self._steps_run, self.engine.steps_run
        rate = steps_run / seconds
        found = StepMetrics(
            step=self.engine.steps,
            seconds=seconds,
            loss=value,
            tokens_per_s=rate * self.tokens or None,
            samples_per_s=rate * self.samples or None,
            mfu=(rate * self.full_speed_s or None) if self.full_speed_s else None,
            memory=peak_memory(self.engine.device),
            bubble=self._measure_bubble(seconds, waiting),
        )
        content = {k: v for k, v in (asdict(found) | more).items() if v is not None}
        if self._lines is not None:
            self._lines.write(found.step, content)
        return found

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()

    def _measure_bubble(self, seconds: float, waiting: float) -> float | None:
        if self.engine.program.world_size == 1:
            return 0.0
        steps = [] if self.watch is None else [s for r in list_recordings(self.watch).values() if (s := r.last_step())]
        shares = [waiting_share(s) for s in steps]
        return sum(shares) / len(shares) if shares else min(1.0, waiting / seconds)


class _Lines:
    """The entries of a run in ``folder``: JSONL, and TensorBoard's events. Each step has one, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE
        folder.mkdir(parents=True, exist_ok=True)
        self.path.open("a").close()  # where it cannot be written it is told now
        self._file: TextIO | None = None
        self._board: Any = None
        self._step = 0  # of the last entry

    def write(self, step: int, content: Mapping[str, Any]) -> None:
        if self._file is None or step <= self._step:
            self._resume_at_step(step)
        assert self._file is not None
        self._file.write(json.dumps(content) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, number in content.items():
                if name != "step":
                    self._board.add_scalar(name, number, step)
        self._step = step

    def _resume_at_step(self, step: int) -> None:
        """Go on with ``step``: what is there of it and of later ones was of steps that are done again."""
        self.close()
        lines = self.path.read_text(errors="replace").splitlines(keepends=True) if self.path.exists() else []
        kept = [line for line in lines if _is_before(line, step)]
        if kept != lines:
            write_text(self.path, "".join(kept))
        self._file = self.path.open("a")
        self._board = _open_tensorboard(self.folder, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _is_before(line: str, step: int) -> bool:
    """Whether an entry is whole, and of a step before ``step``; others than of steps stay."""
    try:
        found = json.loads(line) if line.endswith("\n") else None
    except ValueError:
        return False
    return isinstance(found, dict) and not (isinstance(found.get("step"), int) and found["step"] >= step)


def waiting_share(step: MeasuredStep) -> float:
    """The share of a measured step in which its rank waits for others."""
    total = step.starts[-1] - step.starts[0]
    return (step.waited[-1] - step.waited[0]) / total if total else 0.0


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has had: of the device's allocator, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _full_speed(plan: Any) -> float | None:
    """The seconds that a step would take at the peak of all devices: the estimate's time times its MFU."""
    estimate: Any = getattr(plan, "estimate", None)
    if estimate is not None:
        found = float(estimate.step_time) * float(estimate.mfu)
    elif isinstance(plan, str | Path):
        content: Mapping[str, Any] = json.loads(Path(plan).read_text()).get("estimate", {})
        found = float(content.get("step_time", 0.0)) * float(content.get("mfu", 0.0))
    else:
        return None
    return found or None


def _open_tensorboard(folder: Path, step: int) -> Any:
    """A writer that goes on with ``step``: later ones that were written before are shown no more."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step)


_NORMAL = 1.4826  # times the median deviation is the standard deviation, of a normal distribution


@dataclass(frozen=True)
class LossSpike:
    """``deviations``: by how many (robust) standard deviations the loss is above ``usual``."""

    step: int
    loss: float
    usual: float
    deviations: float

    def __str__(self) -> str:
        return (
            f"step {self.step}: the loss {self.loss:.4g} is {self.deviations:.1f} deviations above the usual "
            f"{self.usual:.4g}"
        )


class LossSpikes:
    """Finds losses that are far above the recent ones.

    Args:
        window: number of recent losses that say what is usual.
        deviations: number of deviations above the usual loss from which a loss is a spike.
        least: number of losses before the first spike is reported.

    A spike does not count among the usual losses, unless it lasts for a quarter of the window.
    """

    def __init__(self, window: int = 64, deviations: float = 8.0, least: int = 8) -> None:
        self.deviations = deviations
        self.least = least
        self._usual: deque[float] = deque(maxlen=window)
        self._above: deque[float] = deque(maxlen=max(1, window // 4))

    def see(self, step: int, loss: float) -> LossSpike | None:
        """Add the loss of ``step``. Returns a :class:`LossSpike` if it is one. NaN counts as infinitely far."""
        found = self._detect_spike(step, loss)
        if found is None:
            self._usual.append(loss)
            self._above.clear()
        elif math.isfinite(loss):
            self._above.append(loss)
            if len(self._above) == self._above.maxlen:  # it stays: a new level
                self._usual.extend(self._above)
                self._above.clear()
        return found

    def _detect_spike(self, step: int, loss: float) -> LossSpike | None:
        if not math.isfinite(loss):
            return LossSpike(step, loss, median(self._usual) if self._usual else math.nan, math.inf)
        if len(self._usual) < self.least:
            return None
        usual = median(self._usual)
        deviation = _NORMAL * median(abs(x - usual) for x in self._usual)
        away = (loss - usual) / max(deviation, 1e-3 * abs(usual), 1e-12)
        return LossSpike(step, loss, usual, away) if away > self.deviations else None
