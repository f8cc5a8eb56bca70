"""What a certificate promises: no plan with something fixed takes less than the bound of the plan with all left free,
unless the certificate names what was fixed as beyond its bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from partitioner import Constraints, Plan, partition
from partitioner.candidate import MeshCandidate
from partitioner.passes.errors import PartitionError
from partitioner.plan import Certificate
from partitioner.solve.search.outcomes import EvaluatedCandidate, build_candidate_report
from partitioner.solve.search.outside_search import keep_faster_plan
from partitioner.topology import loads
from tests import example_counts
from tests.helpers.context_models import repeat_kv

pytestmark = pytest.mark.usefixtures("without_baselines")


class Layer(nn.Module):
    """A decoder layer whose query heads share ``kv`` key heads. ``cap``: the greatest attention score, if limited."""

    def __init__(self, heads: int, kv: int, width: int, ffn: int, cap: float | None) -> None:
        super().__init__()
        self.heads, self.kv, self.cap = heads, kv, cap
        dim = width // heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, kv * dim, bias=False) for _ in range(2))
        self.up, self.down = nn.Linear(width, ffn, bias=False), nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norms[0](x)

        def split(made: Tensor, heads: int) -> Tensor:
            return made.view(batch, length, heads, width // self.heads).transpose(1, 2)

        times = self.heads // self.kv
        key, value = (repeat_kv(split(f(y), self.kv), times) for f in (self.key, self.value))
        query = split(self.query(y), self.heads)
        if self.cap is None:
            seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:  # as the eager attention of Gemma 2
            scores = torch.tanh(query @ key.transpose(2, 3) / query.shape[-1] ** 0.5 / self.cap) * self.cap
            hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            seen = torch.softmax(scores.masked_fill(hidden, float("-inf")).float(), -1).to(value.dtype) @ value
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.silu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    def __init__(
        self, layers: int, heads: int, kv: int, width: int, ffn: int, vocab: int, cap: float | None, tied: bool
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(heads, kv, width, ffn, cap) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


@st.composite
def jobs(draw: st.DrawFn, small: bool = False) -> dict[str, Any]:
    """``small``: two layers on two or four devices with all of their memory."""
    heads = draw(st.sampled_from([4, 8, 16]))
    larger = [] if small else [(1, 8), (2, 4), (4, 2)]
    nodes, per_node = draw(st.sampled_from([(1, 2), (1, 4), (2, 2), *larger]))
    network = draw(st.sampled_from([{"like": "ib-ndr"}, {"name": "network", "bandwidth": 3e9, "latency": 1e-5}]))
    kind = draw(st.sampled_from(["h100-sxm", "a100-80gb", "b200"]))
    levels = [{"like": "nvlink4", "nodes": 1}, *([network] if nodes > 1 else [])]
    other = draw(st.sampled_from([None, None, "a100-80gb", "h100-sxm"])) if nodes > 1 else None
    counts = {kind: nodes} if other in (None, kind) else {kind: nodes // 2, other: nodes - nodes // 2}
    short = {("h100-sxm",): ["fp8"], ("b200",): ["fp8", "nvfp4", "nvfp4"]}.get(tuple(counts), [])
    slower = draw(st.sampled_from([None, None, None, 0.5]))
    return {
        "layers": 2 if small else draw(st.sampled_from([2, 4, 6])),
        "heads": heads,
        "kv": draw(st.sampled_from([k for k in (1, 2, 4, 8, 16) if heads % k == 0])),
        "width": heads * draw(st.sampled_from([64, 128])),
        "grows": draw(st.sampled_from([2, 4])),
        "length": draw(st.sampled_from([256, 1024, 4096, 16384, 32768])),
        "batch": draw(st.sampled_from([1, 2, 4, 8, 16, 32])),
        "vocab": draw(st.sampled_from([1024, 32000])),
        "memory": None if small else draw(st.sampled_from([None, None, 3, 4, 8])),
        "precision": draw(st.sampled_from(["bf16", "bf16", "fp32", *short])),
        "cap": draw(st.sampled_from([None, None, 50.0])),
        "tied": draw(st.booleans()),
        "frozen": draw(st.sampled_from([None, None, None, "first", "alternate", "all but head"])),
        "execution": draw(st.sampled_from([None, None, "eager"])),
        "cluster": {
            "nodes": [
                {"type": of_nodes, "devices": per_node, "count": count, "host": "dgx-h100"}
                for of_nodes, count in counts.items()
            ],
            "levels": levels,
            "overrides": {"node0/0": {"speed": slower}} if slower else {},
        },
    }


PINS: dict[str, list[Any]] = {
    "context": ["ring", "all_gather", "ulysses"],
    "schedule": ["1f1b", "gpipe", "interleaved", "zb-1p", "zb-2p", "zb-v"],
    "recompute": ["none", "selective", "full"],
    "zero": [0, 1, 2, 3],
    "microbatch_size": [1, 2, 4],
    "sequence_parallel": [False, True],
    "hierarchical": [False, True],
    "placement": ["in_order"],
    "offload": [(), ("optimizer",)],
}


@st.composite
def pins(draw: st.DrawFn) -> dict[str, Any]:
    """Fixed axes, which the free plan's may be (``True``), and a few other constraints."""
    axes = draw(st.sets(st.sampled_from(["pp", "dp", "cp", "tp"]), max_size=4))
    sizes = {axis: draw(st.sampled_from([True, 1, 2, 4])) for axis in sorted(axes)}
    names = draw(st.sets(st.sampled_from(sorted(PINS)), max_size=3))
    return sizes | {name: draw(st.sampled_from(PINS[name])) for name in sorted(names)}


def freeze(model: Decoder, which: str | None) -> None:
    """Freeze a part of the parameters of ``model``: the embedding and the first half of the layers, every other layer,
    or all but the head (and the embedding, if it is tied to the head)."""
    layers = list(model.layers)
    frozen: list[nn.Module] = {
        "first": [model.embed, *layers[: len(layers) // 2]],
        "alternate": layers[::2],
        "all but head": [*([] if model.head.weight is model.embed.weight else [model.embed]), *layers],
    }.get(which or "", [])
    for module in frozen:
        module.requires_grad_(False)


def planned(job: dict[str, Any], **fixed: Any) -> Plan:
    with torch.device("meta"):
        width = job["width"]
        sizes = job["layers"], job["heads"], job["kv"], width, width * job["grows"], job["vocab"]
        model = Decoder(*sizes, job.get("cap"), job.get("tied", False))
    freeze(model, job.get("frozen"))
    topology = loads(yaml.safe_dump(job["cluster"]))
    if job["memory"]:
        less = {"memory": job["memory"] << 30}
        types = {name: kind.model_copy(update=less) for name, kind in topology.types.items()}
        topology = topology.changed(types=types)
    ids = torch.empty((1, job["length"]), dtype=torch.int64, device="meta")
    return partition(
        model,
        topology,
        {"ids": ids, "labels": ids},
        global_batch=job["batch"],
        precision=job["precision"],
        constraints=Constraints(execution=job.get("execution"), **fixed),
        estimate_only=True,
    )


def check(job: dict[str, Any], pinned: Sequence[dict[str, Any]]) -> None:
    """Plan ``job`` free, and with each of ``pinned``, and compare the plans. Pins without a plan, and those that the
    certificate names as beyond its bound, are left out; there must be others."""
    try:
        free = planned(job)
    except PartitionError:
        assume(False)
    assume([fixed for fixed in pinned if is_held_to_bound(job, fixed, free)])


def is_held_to_bound(job: dict[str, Any], fixed: dict[str, Any], free: Plan) -> bool:
    """Assert that no plan with the constraints ``fixed`` is below the bound of ``free``, and return whether there was
    one that the bound covers."""
    mesh, ranks = free.mesh, math.prod(free.mesh.values())
    fixed = {name: mesh[name] if value is True and name in mesh else value for name, value in fixed.items()}
    fixed = {name: value for name, value in fixed.items() if name not in free.certificate.beyond}
    for axis in ("tp", "dp", "pp", "cp"):  # leave out the sizes that would be too many ranks
        if axis in fixed and ranks % fixed[axis]:
            del fixed[axis]
        ranks //= fixed.get(axis, 1)
    if job["batch"] % fixed.get("microbatch_size", 1):
        del fixed["microbatch_size"]
    if not fixed:
        return False
    try:
        pinned = planned(job, **fixed)
    except PartitionError:
        return False
    if pinned.mesh["cp"] > 1 and "cp" in free.certificate.beyond:
        return False  # fixed sizes of the other axes can leave only context parallelism to fill the devices
    if pinned.offload and "offload" in free.certificate.beyond:
        return False  # what is fixed may not fit without it
    assert pinned.estimate.step_time >= free.certificate.bound * (1 - 1e-9), (fixed, free.mesh, pinned.mesh)
    return True


OFTEN = dict(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])


@settings(max_examples=2, **OFTEN)
@given(jobs(small=not example_counts.runs_slow_tests), st.lists(pins(), min_size=1, max_size=1))
def test_no_pinned_plan_goes_below_the_bound(job: dict[str, Any], pinned: list[dict[str, Any]]):
    check(job, pinned)


@pytest.mark.slow
@pytest.mark.timeout(14400)
@settings(max_examples=500, **OFTEN)
@given(jobs(), st.lists(pins(), min_size=4, max_size=4))
def test_no_pinned_plan_of_many_goes_below_the_bound(job: dict[str, Any], pinned: list[dict[str, Any]]):
    check(job, pinned)


def test_what_is_beyond_the_bound_is_named():
    """On two nodes with schedules, context and offload left free they are named; what is fixed is not."""
    job = dict(layers=2, heads=4, kv=2, width=256, grows=2, length=256, batch=8, vocab=1024, memory=None)
    levels = [{"like": "nvlink4", "nodes": 1}, {"like": "ib-ndr"}]
    job |= dict(precision="bf16", cluster={"nodes": [{"type": "h100-sxm", "devices": 2, "count": 2}], "levels": levels})
    free = planned(job).certificate.beyond
    assert {"schedule", "virtual_stages", "cp"} <= free.keys()
    fixed = planned(job, schedule="1f1b", cp=1, dp_shard=None).certificate.beyond
    assert not {"schedule", "virtual_stages", "cp"} & fixed.keys()


def test_other_shardings_are_tried_where_activations_are_recomputed():
    """With 4 GiB a rank recomputes. Activations that are sharded along the sequence between layers take less time
    without recomputation, but whole ones save less memory and repeat less communication."""
    job = dict(layers=6, heads=16, kv=1, width=2048, grows=4, length=256, batch=32, vocab=32000, memory=4)
    job |= dict(precision="bf16", cap=50.0, tied=True)
    levels = [{"like": "nvlink4", "nodes": 1}, {"like": "ib-ndr"}]
    kinds = [{"type": "a100-80gb", "devices": 2, "count": 2, "host": "dgx-h100"}]
    job |= dict(cluster={"nodes": kinds, "levels": levels})
    sharded, whole = (planned(job, tp=4, sequence_parallel=how).estimate for how in (True, False))
    assert min(sharded.breakdown["recompute"], whole.breakdown["recompute"]) > 0
    assert whole.step_time < sharded.step_time
    free = planned(job)
    assert free.mesh["tp"] == 4
    assert free.estimate.step_time == pytest.approx(whole.step_time, rel=1e-9)
    assert free.certificate.bound <= free.certificate.objective == free.estimate.step_time
    assert "sequence_parallel" in free.certificate.beyond
    assert "sequence_parallel" not in planned(job, tp=4, sequence_parallel=False).certificate.beyond
    assert "sequence_parallel" not in planned(job, tp=4, recompute="none", microbatch_size=1).certificate.beyond


def test_a_fixed_axis_finds_no_better_cut_or_placement_of_virtual_stages():
    """One of two devices is slow, and half of the layers are frozen. Once dp=2 is known, no pipeline without virtual
    stages can be faster. One with virtual stages is, on the other order of the devices, and with cuts that are improved
    by 15 %."""
    job = dict(layers=4, heads=4, kv=1, width=256, grows=2, length=4096, batch=8, vocab=32000, memory=None)
    job |= dict(precision="bf16", cap=50.0, tied=True, frozen="first")
    kinds = [{"type": "a100-80gb", "devices": 2, "count": 1, "host": "dgx-h100"}]
    levels, slow = [{"like": "nvlink4", "nodes": 1}], {"node0/0": {"speed": 0.5}}
    job |= dict(cluster={"nodes": kinds, "levels": levels, "overrides": slow})
    free, pinned = planned(job), planned(job, pp=2, tp=1)
    assert free.estimate.step_time == pytest.approx(pinned.estimate.step_time, rel=1e-9)


@pytest.mark.parametrize("beside", [False, True])
def test_a_faster_plan_of_the_chosen_candidate_stays_covered_or_not(beside: bool):
    """A second plan of a candidate takes 1.8 s, the first 2 s, with a bound of 1.9 s: the bound falls, too."""
    candidate = MeshCandidate(2, 2, 1, 1)
    row = build_candidate_report(candidate, EvaluatedCandidate(2.0, 7))
    row = row.model_copy(update={"status": "chosen", "bound": 1.9, "beside": beside})
    certificate = Certificate(objective=2.0, bound=1.9, gap=0.05, candidates=(row,))
    found, again = (
        cast(Any, SimpleNamespace(candidate=candidate, lower_bound_s=0.0, estimate=estimate))
        for estimate in (SimpleNamespace(step_time=s, memory=(7,), breakdown={}) for s in (2.0, 1.8))
    )
    assert keep_faster_plan(certificate, found, found) == (found, certificate)
    plan, told = keep_faster_plan(certificate, found, again)
    assert plan is again and (told.objective, told.bound, told.gap) == (1.8, 1.8, 0.0)
    (chosen,) = told.candidates
    assert (chosen.status, chosen.step_time, chosen.bound, chosen.beside) == ("chosen", 1.8, 1.8, beside)
