"""Data-parallel ranks with different numbers of microbatches: batches that do not split evenly, devices that differ."""

from __future__ import annotations

import json
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

import partitioner
from partitioner import Constraints, Engine, LocalRanks, Plan, RankError, Topology, partition
from partitioner.runtime.engine.batches import BatchShare
from partitioner.runtime.prove.errors import ProofError
from partitioner.runtime.prove.prove import prove
from partitioner.simulate.program_time import plan_timeline, simulate_plan
from partitioner.solve.evaluate.batch_shares import share_out
from partitioner.solve.stages.split import SLACK
from partitioner.topology import loads
from tests.example_counts import examples

pytestmark = pytest.mark.usefixtures("without_baselines")

WIDTH = 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Tower(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits, target, ignore_index=3), "logits": logits}


def batch(samples: int = 10) -> dict[str, Tensor]:
    torch.manual_seed(1)
    target = torch.randint(8, (samples,))
    target[samples // 2] = 3  # a sample that does not count
    return {"x": torch.randn(samples, WIDTH), "target": target}


def planned(ranks: int, samples: int = 10, **pins: Any) -> tuple[nn.Module, Plan]:
    torch.manual_seed(0)
    model = Tower()
    return model, partition(model, Topology.local(ranks), batch(samples), constraints=Constraints(**pins))


# --- how much each takes ----------------------------------------------------------------------------------------------


@given(
    parts=st.integers(1, 12),
    seconds=st.lists(st.sampled_from([0.5, 1.0, 1.7, 4.0]), min_size=1, max_size=4),
    fill=st.sampled_from([0.0, 1.0, 3.0]),
)
def test_no_other_shares_end_earlier(parts: int, seconds: list[float], fill: float):
    parts = max(parts, len(seconds))
    shares = share_out(parts, seconds, fill)
    assert sum(shares) == parts
    assert min(shares) >= 1

    def ends(shares: tuple[int, ...]) -> float:
        return max((n + fill) * s for n, s in zip(shares, seconds, strict=True))

    cuts = combinations_with_replacement(range(parts + 1), len(seconds) - 1)
    every = (tuple(b - a for a, b in zip((0, *cut), (*cut, parts), strict=True)) for cut in cuts)
    assert ends(shares) == min(ends(other) for other in every if min(other) >= 1)


# --- what the model computes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "pins", "shares"),
    [
        (3, {"dp": 3}, (2, 2, 1)),
        (4, {"dp": 4, "zero": 1, "microbatch_size": 1}, (3, 3, 2, 2)),
        pytest.param(7, {"dp": 7}, (2, 2, 2, 1, 1, 1, 1), marks=pytest.mark.slow),
        (3, {"data_shares": (1, 1, 3)}, (1, 1, 3)),
        pytest.param(3, {"dp": 3, "zero": 2}, (2, 2, 1), marks=pytest.mark.slow),
        (3, {"dp": 3, "zero": 3}, (2, 2, 1)),
        (4, {"dp": 4, "zero": 2, "dp_shard": 2, "microbatch_size": 1}, (3, 3, 2, 2)),
        (6, {"pp": 2, "dp": 3, "zero": 3, "microbatch_size": 1, "schedule": "zb-1p"}, (4, 3, 3)),
        pytest.param(
            6,
            {"pp": 2, "dp": 3, "zero": 2, "microbatch_size": 1, "schedule": "zb-v"},
            (4, 3, 3),
            marks=pytest.mark.slow,
        ),
        (3, {"dp": 3, "zero": 3, "offload": "parameters"}, (2, 2, 1)),
        (6, {"dp": 3, "tp": 2, "microbatch_size": 2}, (2, 2, 1)),
        pytest.param(
            6, {"pp": 2, "dp": 3, "microbatch_size": 1, "schedule": "1f1b"}, (4, 3, 3), marks=pytest.mark.slow
        ),
        (6, {"pp": 2, "dp": 3, "microbatch_size": 1, "schedule": "gpipe", "recompute": "full"}, (4, 3, 3)),
        pytest.param(
            6,
            {"pp": 2, "dp": 3, "microbatch_size": 1, "schedule": "zb-1p", "zero": 1},
            (4, 3, 3),
            marks=pytest.mark.slow,
        ),
        (6, {"pp": 2, "dp": 3, "microbatch_size": 1, "schedule": "interleaved", "virtual_stages": 2}, (4, 3, 3)),
        (8, {"pp": 2, "dp": 4, "microbatch_size": 1, "schedule": "dualpipe-v"}, (3, 3, 2, 2)),
        (6, {"pp": 2, "dp": 3, "microbatch_size": 2, "offload": "optimizer+activations"}, (2, 2, 1)),
    ],
    ids=str,
)
def test_the_step_is_that_of_the_model(ranks: int, pins: dict[str, Any], shares: tuple[int, ...]):
    model, plan = planned(ranks, **pins)
    assert plan.data_shares == shares
    report = plan.verify(model, batch())
    assert report.max_error < 1e-12, report.errors


def test_ranks_that_run_compute_it_too():
    model, plan = planned(6, pp=2, dp=3, microbatch_size=1)
    model.eval()
    plan = partition(model, Topology.local(6), batch(), constraints=Constraints(pp=2, dp=3, microbatch_size=1))
    assert plan.data_shares == (4, 3, 3)
    found = partitioner.run_local(plan, model, batch(), timeout=120)
    expected = model(**batch())
    expected["loss"].backward()
    assert found.loss is not None
    assert torch.allclose(found.loss, expected["loss"], rtol=1e-6)
    assert torch.allclose(found.outputs["logits"], expected["logits"], atol=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.allclose(found.grads[name], parameter.grad, atol=1e-6), name


def local_losses(path: str, rows: list[tuple[int, int]]) -> list[float]:
    """Two steps on the rows that this rank reads, given to it alone."""
    engine = Engine(path, Tower())
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    start, stop = rows[engine.rank_program.rank]
    losses = []
    for _ in range(2):
        losses.append(float(engine.step({k: v[start:stop] for k, v in batch().items()}, local=True)))
        optimizer.step()
    return losses


def test_every_rank_may_be_given_its_own_rows_alone(tmp_path: Path):
    model, plan = planned(3, dp=3, microbatch_size=2)
    path = str(plan.save(tmp_path / "plan.json"))
    with LocalRanks(3) as pool:
        rows = [(0, 4), (4, 8), (8, 10)]
        losses = pool.call(local_losses, path, rows)
        assert losses[0] == losses[1] == losses[2]
        assert losses[0][1] < losses[0][0]
        with pytest.raises(RankError, match="here 2 samples, from sample 8 on"):
            pool.call(local_losses, path, [(0, 4), (4, 8), (6, 10)])
    del model


def test_a_share_is_a_run_of_rows():
    share = BatchShare(frozenset({"x"}), range(4, 7), 10)
    assert share.rows(20) == range(8, 14)


# --- what is proven ---------------------------------------------------------------------------------------------------


def test_shares_that_are_not_the_batch_are_refused():
    _, plan = planned(3, dp=3, microbatch_size=2)
    for shares, text in (
        ((2, 2), "one for each of the 3 ranks"),
        ((3, 1, 1), "at most 2"),
        ((2, 2, 2), "has 6"),
    ):
        with pytest.raises(ProofError, match=text):
            prove(plan.program.model_copy(update={"data_shares": shares}))


def test_a_rank_that_leaves_out_one_more_is_refused():
    _, plan = planned(3, dp=3, microbatch_size=2)
    rank = plan.rank(2)
    assert len(rank.share) == 1
    less = tuple(i for i in rank.instructions if i.op not in ("F", "B") or i.microbatch != 0)
    with pytest.raises(ProofError, match=r"never runs forward|has not run|there is no|not there"):
        prove(plan.program, {2: rank.with_instructions(less)})


def test_a_rank_knows_where_it_is_in_its_stage_s_list():
    _, plan = planned(6, pp=2, dp=3, microbatch_size=1)
    for number in range(6):
        rank = plan.rank(number)
        assert tuple(rank.stage.instructions[k] for k in rank.places) == tuple(rank.instructions)
    _, even = planned(2, dp=2)
    assert even.rank(0).places == ()


def test_a_plan_with_shares_is_the_same_from_its_file(tmp_path: Path):
    _, plan = planned(6, pp=2, dp=3, microbatch_size=1)
    again = Plan.load(plan.save(tmp_path / "plan.json"))
    assert again.program == plan.program
    assert again.data_shares == (4, 3, 3)
    again.prove()
    last = json.loads(again.export_ranks(tmp_path / "ranks")[2].read_text())["program"]["stages"][0]["instructions"]
    assert {i["microbatch"] for i in last if "microbatch" in i} == {0, 1, 2}
    for view in ("graph", "timeline", "memory", "topology"):
        again.to_svg(tmp_path / f"{view}.svg", view=view)
    assert "4 on 1 rank of dp, 3 on 2" in again.explain()


# --- what is chosen ---------------------------------------------------------------------------------------------------

CLUSTER = """
types:
  fast: {{memory: 80 GB, peak: {{fp32: 100 TFLOP/s}}, memory_bandwidth: 2 TB/s}}
  slow: {{memory: 80 GB, peak: {{fp32: 40 TFLOP/s}}, memory_bandwidth: 0.8 TB/s}}
nodes: {nodes}
levels: [{{name: all, bandwidth: 200 GB/s, latency: 5 us}}]
"""


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return x.square().mean()


def wide(nodes: str, samples: int = 48, **pins: Any) -> Plan:
    with torch.device("meta"):
        model, x = Wide(), torch.empty(samples, 1024, 4096)
    return partition(model, loads(CLUSTER.format(nodes=nodes)), (x,), constraints=Constraints(**pins))


def test_one_device_more_is_no_slower_where_the_batch_does_not_split():
    six, seven = wide("[{type: fast, devices: 6}]", 64), wide("[{type: fast, devices: 7}]", 64)
    assert seven.data_shares
    assert seven.estimate.step_time < six.estimate.step_time
    assert seven.certificate.gap < 0.01


def test_faster_devices_get_more_of_the_batch():
    plan = wide("[{type: fast, devices: 2}, {type: slow, devices: 2}]", dp=4, microbatch_size=2)
    by_kind: dict[str, set[int]] = {}
    devices = plan.topology.devices
    for rank, device in enumerate(plan.devices):
        by_kind.setdefault(devices[device].kind, set()).add(len(plan.rank(rank).share))
    assert sum(plan.data_shares) == 24
    assert min(by_kind["fast"]) >= 2 * max(by_kind["slow"])
    even = wide("[{type: slow, devices: 4}]", dp=4, microbatch_size=2)
    assert plan.estimate.step_time < 0.7 * even.estimate.step_time
    assert plan_timeline(plan).step_time == pytest.approx(plan.estimate.step_time, rel=0.1)
    longest = simulate_plan(plan)
    assert all(plan.data_shares[place] == len(plan.program.share(place)) for place in longest.places)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(1024, 3 * 1024), nn.Linear(1024, 1024)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            q, k, v = self.into(x).unflatten(-1, (8, 384)).transpose(1, 2).chunk(3, -1)
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x.square().mean()


LINKS = """
types: {fast: {memory: 80 GB, peak: {fp32: 100 TFLOP/s}, memory_bandwidth: 2 TB/s}}
nodes: [{type: fast, devices: 3, count: 2}]
levels:
- {name: inside, bandwidth: 200 GB/s, latency: 5 us, nodes: 1}
- {name: network, bandwidth: 5 GB/s, latency: 20 us}
"""


@pytest.mark.parametrize("pins", [{"dp": 3, "tp": 2, "pp": 1}, {"dp": 3, "cp": 2, "tp": 1, "pp": 1}], ids=str)
def test_a_replica_whose_ranks_are_on_two_nodes_gets_less_of_the_batch(pins: dict[str, Any]):
    """Of three groups of two on nodes of three one talks over the network, and the others need not wait for it."""
    with torch.device("meta"):
        model, width = (Attending(), 1024) if "cp" in pins else (Wide(), 4096)
        inputs = (torch.empty(48, 4096, width),)
    zero = {"zero": 0, "microbatch_size": 1}
    plan = partition(model, loads(LINKS), inputs, constraints=Constraints(**pins, **zero))
    devices = np.array(plan.devices).reshape(3, 2)
    parted = [len({plan.topology.node_of[d] for d in pair.tolist()}) == 2 for pair in devices]
    assert sum(parted) == 1
    place = parted.index(True)
    assert plan.data_shares[place] < min(share for k, share in enumerate(plan.data_shares) if k != place)
    even = Constraints(**pins, **zero, data_shares=(sum(plan.data_shares) // 3,) * 3)
    alike = partition(model, loads(LINKS), inputs, constraints=even)
    assert plan.estimate.step_time < 0.9 * alike.estimate.step_time
    assert plan_timeline(plan).step_time == pytest.approx(plan.estimate.step_time, rel=0.02)
    waiting = partition(model, loads(LINKS), inputs, constraints=Constraints(**pins, zero=2, microbatch_size=1))
    assert not waiting.data_shares  # who meet in every microbatch
    assert plan.certificate.bound <= plan.estimate.step_time


@settings(max_examples=examples(3, quick=1))
@given(
    fast=st.integers(1, 3),
    slow=st.integers(1, 3),
    samples=st.sampled_from([6, 12, 20]),
    zero=st.sampled_from([None, 1]),
)
def test_no_pin_beats_the_bound(fast: int, slow: int, samples: int, zero: int | None):
    nodes = f"[{{type: fast, devices: {fast}}}, {{type: slow, devices: {slow}}}]"
    free, world = wide(nodes, samples, zero=zero), fast + slow
    assert free.certificate.bound <= free.certificate.objective * (1 + 1e-9)
    for pp in (d for d in (1, 2, 3, 4) if world % d == 0 and world // d <= samples):
        pinned = wide(nodes, samples, pp=pp, dp=world // pp, tp=1, zero=zero)
        assert free.certificate.bound <= pinned.estimate.step_time * (1 + 1e-9)
        assert free.estimate.step_time <= pinned.estimate.step_time * 1.02


def test_shares_that_are_given_are_taken_or_refused():
    nodes = "[{type: fast, devices: 4}]"
    plan = wide(nodes, 8, data_shares=(1, 1, 1, 5))
    even = wide(nodes, 8, data_shares=(2, 2, 2, 2))
    assert (plan.data_shares, even.data_shares) == ((1, 1, 1, 5), ())
    assert plan.estimate.step_time > 2 * even.estimate.step_time
    wrong = (
        {"data_shares": (1, 2)},
        {"dp": 2, "data_shares": (1, 1, 2)},
        {"microbatch_size": 4, "data_shares": (3, 1)},
    )
    for pins in wrong:
        with pytest.raises(ValueError, match="number of microbatches in the global batch of 8"):
            wide(nodes, 8, **pins)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)).square().mean()


def test_what_needs_the_whole_batch_needs_even_shares():
    with pytest.raises(ValueError, match="dp must divide the global batch of 10"):
        partition(Counting(), Topology.local(3), (torch.randn(10, WIDTH),), constraints=Constraints(dp=3))


def trained(path: str, folder: str, steps: int, resumed: str | None, saved: str | None) -> dict[str, Tensor]:
    """The parameters after some steps on the whole batch, clipped; of the whole model, on rank 0."""
    engine = Engine(path, folder)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    if resumed is not None:
        engine.load(resumed, optimizer)
    for _ in range(steps):
        engine.step({k: v.double() if k == "x" else v for k, v in batch().items()})
        engine.clip_grad_norm_(1.0)
        optimizer.step()
    if saved is not None:
        engine.save(saved, optimizer)
    return engine.state_dict(full=True)


@pytest.mark.slow
def test_training_that_goes_on_under_other_shares_is_that_of_one_process(tmp_path: Path):
    torch.manual_seed(0)
    model = Tower().double().eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    whole = {k: v.double() if k == "x" else v for k, v in batch().items()}
    paths = []
    for name, ranks, pins in (("a", 3, {"dp": 3, "zero": 1}), ("b", 4, {"dp": 4, "microbatch_size": 1})):
        plan = partition(model, Topology.local(ranks), whole, constraints=Constraints(**pins))
        assert plan.data_shares
        paths.append(str(plan.save(tmp_path / f"{name}.json")))
    folder, kept = str(tmp_path), str(tmp_path / "kept")
    with LocalRanks(3) as pool:
        pool.call(trained, paths[0], folder, 2, None, kept)
    with LocalRanks(4) as pool:
        found, *_ = pool.call(trained, paths[1], folder, 3, kept, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        model(**whole)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert (found[name] - parameter).abs().max() < 1e-12, name


@pytest.mark.parametrize("schedule", ["1f1b", "zb-1p", "zb-v"])
def test_a_device_that_is_faster_makes_no_step_longer(schedule: str):
    """Its pipeline gets more of the batch only where the other stages keep up with it."""
    steps = []
    for speed in (1, 10):
        cluster = (
            "nodes: [{type: a100-80gb, devices: 4}, {type: h100-sxm, devices: 4}]\n"
            "levels: [{like: nvlink3, nodes: 1}, {like: ib-hdr}]\n"
            f"overrides: {{node0/2: {{speed: 0.5}}, node1/1: {{speed: 0.5}}, node1/3: {{speed: {speed}}}}}"
        )
        pins = Constraints(pp=2, dp=4, microbatch_size=1, schedule=schedule, zero=1, placement="in_order")
        with torch.device("meta"):
            model, x = Wide(), torch.empty(16, 1024, 4096)
        steps.append(partition(model, loads(cluster), (x,), constraints=pins).estimate.step_time)
    assert steps[1] <= steps[0] * (1 + SLACK)


def test_an_estimate_says_how_many_microbatches_each_has(tmp_path: Path):
    model, plan = planned(3, dp=3)
    alone = partition(model, Topology.local(3), batch(), constraints=Constraints(dp=3), estimate_only=True)
    assert alone.data_shares == plan.data_shares == (2, 2, 1)
    assert alone.num_microbatches == plan.num_microbatches
    assert Plan.load(alone.save(tmp_path / "plan.json")).data_shares == plan.data_shares
    (said,) = {
        line.split(None, 1)[1] for p in (alone, plan) for line in p.summary().splitlines() if "global batch" in line
    }
    assert said.startswith("2 on 2 ranks of dp, 1 on 1 of 2 samples")
