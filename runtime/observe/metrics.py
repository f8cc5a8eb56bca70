"""Metrics of each step of a run: a line of text, a JSON line in a file, TensorBoard if installed, and loss spikes.

::

    log = partitioner.StepLog(engine, plan="plan.json", folder="metrics/")
    for batch in batches:
        loss = engine.step(batch)
        optimizer.step()
        print(log.step(loss))

Unknown metrics are left out: tokens if no input consists of integers, MFU if the plan has no estimate, or if a step had
another shape than the largest.

:class:`LossSpikes` detects sudden increases of the loss by comparison with the median of earlier losses, so that one
bad step does not hide the next.
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
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.execute.flight_recorder import MeasuredStep, list_recordings
from partitioner.runtime.files import parse_json, write_text

FILE = "metrics.jsonl"

_METRIC_FORMATS = (  # parts of a step's line: the metric, its format, and its unit
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
    """Metrics of one optimizer step, over all batches whose gradients it uses. ``str()`` formats them as one line.

    Args:
        step: number of batches so far: ``engine.steps``.
        seconds: time since the previous metrics, including all work of the training script.
        loss: the loss that the script passed to :meth:`StepLog.step`; ``None`` if it did not pass one.
        tokens_per_s: tokens per second of the batches, padded to the shapes that ran; ``None`` if the number of tokens
            is unknown.
        samples_per_s: samples per second; ``None`` if the number of samples is unknown.
        mfu: the model's FLOPs per second as a share of the peak of all devices, from 0 to 1; ``None`` if the log has no
            plan with an estimate, or if a batch did not run in the plan's first program.
        memory: peak bytes on this rank so far: allocated on the CUDA device, or resident in a process on the CPU.
        bubble: the share of the last batch's time in which ranks wait for others, from 0 to 1: the mean over the ranks
            on this host if they record the times of their steps in files (flight records), otherwise this rank's share.
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
        return "  ".join(text.format(known[name] / unit) for name, text, unit in _METRIC_FORMATS if name in known)


class StepLog:
    """Measures the training steps of ``engine``. Create one on every rank, or only on the first rank.

    Args:
        plan: the plan or the path of its file, whose estimate is needed for the MFU; ``None``: the MFU is left out.
        folder: folder for ``metrics.jsonl`` and TensorBoard's event files, which are continued if they exist; ``None``:
            nothing is written. The file has one line for each step. If a step is repeated, after a restart or a return
            to an earlier checkpoint, its line is replaced.
        watch: the folder of :class:`partitioner.Watch`, from which the waiting times of all ranks are read; ``None``:
            only those of this rank are known.
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
        self.full_speed_s = _compute_peak_step_seconds(plan)
        self._lines = None if folder is None else _MetricsWriter(Path(folder))
        self._counts = self._read_counts()
        self._last = time.perf_counter()
        self._waited = waited.ns

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def step(self, loss: Tensor | float | None = None, **more: float) -> StepMetrics:
        """Return the metrics of the time since the last call, or since the log was created, and write them to the
        files. Call this once per optimizer step, before or after ``optimizer.step()``. ``loss``: the loss of the step;
        on a GPU, reading it waits for the device. ``more``: further numbers for the files, by name.
        """
        value = float(loss) if loss is not None else None
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        waiting, self._waited = (waited.ns - self._waited) * 1e-9, waited.ns
        before, self._counts = self._counts, self._read_counts()
        steps, tokens, samples, further = (
            (now - then) / seconds for now, then in zip(self._counts, before, strict=True)
        )
        found = StepMetrics(
            step=self.engine.steps,
            seconds=seconds,
            loss=value,
            tokens_per_s=tokens or None,
            samples_per_s=samples or None,
            mfu=(steps * self.full_speed_s or None) if self.full_speed_s and not further else None,
            memory=measure_peak_memory(self.engine.device),
            bubble=self._measure_bubble(seconds, waiting),
        )
        content = {k: v for k, v in (asdict(found) | more).items() if v is not None}
        if self._lines is not None:
            self._lines.write(found.step, content)
        return found

    def _read_counts(self) -> tuple[int, int, int, int]:
        """Return four numbers of the engine so far: training steps, tokens in them, samples in them, and steps that did
        not run in the plan's first program but in a further program for another batch shape.
        """
        engine = self.engine
        return engine.steps_run, engine.tokens_run, engine.samples_run, engine.further_steps_run

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()

    def _measure_bubble(self, seconds: float, waiting: float) -> float | None:
        """Return the share of time, from 0 to 1, in which ranks wait for others: the mean over the ranks on this host
        that record the times of their steps in files (flight records); if there are none, the share of this rank.
        ``seconds``, ``waiting``: the time since the last call, and the part of it in which this rank has waited, in
        seconds.
        """
        if self.engine.program.world_size == 1:
            return 0.0
        steps = [] if self.watch is None else [s for r in list_recordings(self.watch).values() if (s := r.last_step())]
        shares = [compute_waiting_share(s) for s in steps]
        return sum(shares) / len(shares) if shares else min(1.0, waiting / seconds)


class _MetricsWriter:
    """Writes one entry per step, in order, to ``metrics.jsonl`` in ``folder`` and to TensorBoard, if it is
    installed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE
        folder.mkdir(parents=True, exist_ok=True)
        self.path.open("a").close()  # raises an error now if it cannot be written
        self._file: TextIO | None = None
        self._board: Any = None
        self._step = 0  # step of the last entry

    def write(self, step: int, content: Mapping[str, Any]) -> None:
        """Write the entry of ``step`` (a number) to ``metrics.jsonl`` and to TensorBoard. Existing entries of this and
        later steps are replaced. ``content``: name of the metric -> number.
        """
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
        """Open ``metrics.jsonl`` and TensorBoard's event file for writing from ``step`` (a number) on. Existing entries
        of this step and of later ones are removed.
        """
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
    """Return whether ``line`` of ``metrics.jsonl`` is complete and its step is before ``step``. A line without a step
    counts as before.
    """
    try:
        found = parse_json(line) if line.endswith("\n") else None
    except ValueError:
        return False
    return isinstance(found, dict) and not (isinstance(found.get("step"), int) and found["step"] >= step)


def compute_waiting_share(step: MeasuredStep) -> float:
    """Return the share of the measured step ``step``, from 0 to 1, in which its rank waits for other ranks."""
    total = step.starts[-1] - step.starts[0]
    return (step.waited[-1] - step.waited[0]) / total if total else 0.0


def measure_peak_memory(device: torch.device) -> int:
    """Return the peak bytes of this process so far: if ``device`` is a GPU, those allocated by torch on it; otherwise
    those resident in memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _compute_peak_step_seconds(plan: Any) -> float | None:
    """Return the seconds that a step would take at the peak FLOPs of all devices: the estimated step time times the
    estimated MFU. ``None`` if ``plan`` has no estimate. ``plan``: a plan or the path of its file.
    """
    estimate: Any = getattr(plan, "estimate", None)
    if estimate is not None:
        found = float(estimate.step_time) * float(estimate.mfu)
    elif isinstance(plan, str | Path):
        content: Mapping[str, Any] = parse_json(Path(plan).read_text()).get("estimate", {})
        found = float(content.get("step_time", 0.0)) * float(content.get("mfu", 0.0))
    else:
        return None
    return found or None


def _open_tensorboard(folder: Path, step: int) -> Any:
    """Return a TensorBoard writer to ``folder`` that hides existing entries of step ``step`` and later, because these
    steps are written again; ``None`` if TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step)


_NORMAL = 1.4826  # ratio of standard deviation and median absolute deviation of a normal distribution


@dataclass(frozen=True)
class LossSpike:
    """A loss that is far above the recent losses. ``step``: number of the step with this loss. ``usual``: the median of
    the recent losses. ``deviations``: distance of the loss from this median, in robust standard deviations.
    """

    step: int
    loss: float
    usual: float
    deviations: float

    def __str__(self) -> str:
        return (
            f"step {self.step}: the loss {self.loss:.4g} is {self.deviations:.1f} standard deviations above "
            f"{self.usual:.4g}, the median of recent losses"
        )


class LossSpikes:
    """Detects losses that are far above the recent losses.

    Args:
        window: number of recent losses to compare with.
        deviations: number of robust standard deviations above the median of these from which a loss is a spike.
        least: number of losses before the first spike can be reported.

    A spike is not added to the recent losses, unless the loss stays high for a quarter of the window.
    """

    def __init__(self, window: int = 64, deviations: float = 8.0, least: int = 8) -> None:
        self.deviations = deviations
        self.least = least
        self._usual: deque[float] = deque(maxlen=window)
        self._above: deque[float] = deque(maxlen=max(1, window // 4))

    def see(self, step: int, loss: float) -> LossSpike | None:
        """Add the loss of ``step``. If it is far above the recent losses, NaN or infinite, return a :class:`LossSpike`;
        otherwise ``None``.
        """
        found = self._detect_spike(step, loss)
        if found is None:
            self._usual.append(loss)
            self._above.clear()
        elif math.isfinite(loss):
            self._above.append(loss)
            if len(self._above) == self._above.maxlen:  # the loss stays high: a new level
                self._usual.extend(self._above)
                self._above.clear()
        return found

    def _detect_spike(self, step: int, loss: float) -> LossSpike | None:
        """Return a :class:`LossSpike` if ``loss``, the loss of the step with number ``step``, is not finite or far
        above the recent losses; otherwise ``None``.
        """
        if not math.isfinite(loss):
            return LossSpike(step, loss, median(self._usual) if self._usual else math.nan, math.inf)
        if len(self._usual) < self.least:
            return None
        usual = median(self._usual)
        deviation = _NORMAL * median(abs(x - usual) for x in self._usual)
        away = (loss - usual) / max(deviation, 1e-3 * abs(usual), 1e-12)
        return LossSpike(step, loss, usual, away) if away > self.deviations else None
