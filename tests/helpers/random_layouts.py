"""Random layouts, as strategies of hypothesis and by seed: all sizes fit the number of devices."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import strategies as st

from partitioner.interop.layout import TrainingLayout

SIZES = st.sampled_from([1, 1, 2, 3, 4])
OFFLOADS = st.sampled_from([(), (), ("optimizer",), ("optimizer", "parameters"), ("activations",)])
RECOMPUTES = st.sampled_from([None, "none", "scores", "selective", "alternate", "full"])
SCHEDULES = st.sampled_from([None, "1f1b", "gpipe", "interleaved", "zb-1p"])


@st.composite
def layouts(draw: st.DrawFn) -> TrainingLayout:
    """A layout on some number of devices, with all that follows from it."""
    pp, tp, cp, dp = draw(SIZES), draw(SIZES), draw(SIZES), draw(SIZES)
    ranks = dp * cp * tp
    ep = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    etp = draw(st.sampled_from([None, *(n for n in (1, tp) if ranks % (ep * n) == 0)])) if ep > 1 else None
    schedule = draw(SCHEDULES)
    form = draw(st.sampled_from(["even", "weighted", "layers", "listed"]))
    chunks = draw(st.sampled_from([None, 2, 3])) if schedule in (None, "interleaved", "zb-1p") else None
    stages: dict[str, object] = {"virtual_stages": chunks}
    if form == "weighted":
        stages |= {"first_less": draw(st.integers(0, 2)), "last_less": draw(st.integers(0, 2))}
    elif form == "layers":
        stages = {"layers_per_stage": draw(st.integers(1, 4))}
    elif form == "listed":
        stages["stage_layers"] = tuple(draw(st.lists(st.integers(1, 4), min_size=pp * (chunks or 1),
                                                     max_size=pp * (chunks or 1))))  # fmt: skip
    size, count = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    return TrainingLayout(
        framework="any", pp=pp, tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, schedule=schedule if pp > 1 else None,
        dp_replicate=draw(st.sampled_from([n for n in range(1, dp + 1) if dp % n == 0])),
        microbatch_size=size, microbatches=count, zero=draw(st.sampled_from([0, 1, 2, 3])),
        sequence_parallel=draw(st.sampled_from([None, True, False])),
        context=draw(st.sampled_from([None, "all_gather", "ring", "ulysses"])), recompute=draw(RECOMPUTES),
        offload=draw(OFFLOADS), precision=draw(st.sampled_from(["bf16", "fp16", "fp32", "fp8", "nvfp4"])),
        optimizer=draw(st.sampled_from(["adamw", "adam", "sgd", "sgd_momentum", "none"])),
        seq_length=draw(st.sampled_from([None, 1152, 2304])), **(stages if pp > 1 else {}),
    ).at(pp * tp * cp * dp)  # fmt: skip


def draw_priced_layout(seed: int, layers: int, experts: int, length: int) -> TrainingLayout:
    """A layout that fits a model of ``layers`` layers with at most four tensor-parallel ranks, with all sizes given.
    ``experts``: number of experts of each layer, 0 for a dense model. ``length``: tokens of a sample.
    """
    draw = random.Random(seed)
    pp, tp, cp, dp = draw.choice([1, 2, 4]), draw.choice([1, 2, 4]), draw.choice([1, 1, 2]), draw.choice([1, 2, 4])
    ranks = dp * cp * tp
    ep = draw.choice([n for n in (1, 2, 4) if ranks % n == 0]) if experts else 1
    etp = draw.choice([n for n in {1, tp} if ranks % (ep * n) == 0]) if ep > 1 else None
    schedule = draw.choice(["1f1b", "gpipe", "interleaved", "zb-1p"]) if pp > 1 else None
    chunks = 2 if schedule == "interleaved" else None
    cuts: dict[str, object] = {}
    if pp > 1:
        form = draw.choice(["even", "even", "listed", "ends"])
        if form == "listed":
            ends = sorted(draw.sample(range(1, layers), pp * (chunks or 1) - 1))
            starts = [0, *ends, layers]
            cuts = {"stage_layers": tuple(b - a for a, b in pairwise(starts))}
        elif form == "ends" and pp * (chunks or 1) < layers:
            cuts = {"first_less": draw.choice([0, 1]), "last_less": draw.choice([0, 1])}
    zero = draw.choice([0, 1, 2, 3])
    moved = ("optimizer", "parameters") if zero == 3 else ("optimizer",)  # others keep parameters whole: no plan
    return TrainingLayout(
        framework="any", pp=pp, tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, schedule=schedule, virtual_stages=chunks,
        dp_replicate=draw.choice([n for n in (1, 2) if dp % n == 0]),
        microbatch_size=draw.choice([1, 2]), microbatches=draw.choice([1, 2]) * (pp if pp > 1 else 1), zero=zero,
        sequence_parallel=draw.choice([True, False]) if tp > 1 else None,
        context=draw.choice(["all_gather", "ring", "ulysses"]) if cp > 1 else None,
        recompute=draw.choice(["none", "scores", "selective", "alternate", "full"]),
        offload=draw.choice([(), (), ("optimizer",), moved]) if zero else (),
        precision=draw.choice(["bf16", "bf16", "fp16", "fp32", "fp8"]), optimizer=draw.choice(["adamw", "sgd"]),
        seq_length=length, **cuts,
    ).at(pp * tp * cp * dp)  # fmt: skip
