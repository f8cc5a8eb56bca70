"""Would another global batch do more? One that does not divide over the devices leaves some of them idle: the report
says where one nearby takes less time for each sample."""

from __future__ import annotations

from collections.abc import Callable

from partitioner.cost.bounds import ModelBounds
from partitioner.job import Job
from partitioner.laggards import Best, SpaceOf
from partitioner.plan import Baseline
from partitioner.solve.points import points
from partitioner.units import divisors
from passes.errors import PartitionError

_FARTHEST = 0.25  # of the batch, that another one may differ by
_WORTH = 0.99  # of a sample's time: what is hardly faster is not worth a word

JobOf = Callable[[int], Job]  # of another global batch


def batches_near(global_batch: int, num_devices: int) -> list[int]:
    """Batches that divide over the devices, or their divisors, the nearest first; none where ``global_batch`` does."""
    if global_batch % num_devices == 0 or num_devices % global_batch == 0:
        return []
    step = max(part for part in divisors(num_devices) if part <= global_batch)
    both = {global_batch // step * step, -(-global_batch // step) * step} - {0, global_batch}
    near = [batch for batch in both if abs(batch - global_batch) <= _FARTHEST * global_batch]
    return sorted(near, key=lambda batch: (abs(batch - global_batch), batch))


def faster_batches(job: Job, best_s: float, job_of: JobOf, space_of: SpaceOf, best: Best) -> tuple[Baseline, ...]:
    """The nearest batch whose samples take less time than those of a step of ``best_s``, with its plan (``best``)."""
    pinned = job.constraints
    if not job.train or pinned.group_size is not None or pinned.data_shares is not None:
        return ()
    for batch in batches_near(job.global_batch, job.topology.num_devices):
        most_s = _WORTH * best_s * batch / job.global_batch
        try:
            other = job_of(batch)
            bounds = ModelBounds(other)
            if float(bounds.times(points(space_of(other, bounds))).min()) >= most_s:
                continue
            candidate = best(other, most_s)
        except PartitionError:
            continue
        if candidate.step_time is not None and candidate.step_time < most_s:
            return (Baseline(name=f"A global batch of {batch:,}", candidate=candidate, global_batch=batch),)
    return ()


__all__ = ["JobOf", "batches_near", "faster_batches"]
