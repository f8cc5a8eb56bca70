"""A cluster without some of its devices, and when the report advises it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from partitioner import Constraints, Plan, Topology, partition
from partitioner.errors import InfeasibleError, PlanError, TimeLimitError, TopologyError
from partitioner.explain.tables import fewer_text
from partitioner.passes.errors import PartitionError
from partitioner.plan import Baseline, Candidate
from partitioner.solve.search import smaller_clusters as smaller_clusters_module
from partitioner.solve.search.smaller_clusters import (
    describe_offload_comparison,
    faster_with_offload,
    is_even,
    rounder_clusters,
    smaller_clusters,
)
from partitioner.topology import loads
from partitioner.units import seconds_text
from tests.example_counts import examples
from tests.helpers.sample_programs import llama, plan_of
from tests.helpers.small_clusters import cluster

MIXED = """
name: lab
types:
  fast: {memory: 80 GB, peak: {fp32: 100 TFLOP/s}, memory_bandwidth: 2 TB/s}
  slow: {memory: 16 GB, peak: {fp32: 2 TFLOP/s}, memory_bandwidth: 0.2 TB/s}
nodes:
  - {type: fast, devices: 4, count: 2, nics: 2}
  - {type: slow, devices: 2, names: [left, right]}
levels:
  - {name: inside, nodes: 1, bandwidth: 200 GB/s, latency: 5 us}
  - {name: all, bandwidth: 50 GB/s, latency: 10 us}
overrides: {node1/3: {speed: 0.5}, left: {memory: 8 GB}}
links: [{between: [node0/0, left], bandwidth: 10 GB/s, latency: 20 us}]
node_overrides: {1: {speed: 0.9}}
"""


def test_what_is_left_keeps_its_name_its_kind_and_what_it_has_of_its_own():
    topology = loads(MIXED)
    fewer = topology.without("node0/1", "node0/2", "left")
    assert fewer.names == ("node0/0", "node0/3", "node1/0", "node1/1", "node1/2", "node1/3", "right")
    assert fewer.name == "lab without node0/1, node0/2, left"
    assert [fewer.devices[fewer.index["node1/3"]].speed, fewer.devices[0].speed] == [0.45, 1.0]
    assert fewer.links == ()
    assert loads(fewer.to_yaml()) == fewer


def test_a_whole_node_goes_by_its_name_and_on_the_command_line_too():
    whole = Topology.preset("dgx-h100", nodes=3)
    fewer = Topology.parse("dgx-h100:3 without node1, node2/7")
    assert fewer == whole.without("node 1", "node2/7")
    assert fewer.names == (*whole.names[:8], *whole.names[16:23])


def test_a_node_that_is_gone_moves_the_numbers_of_the_others():
    fewer = loads(MIXED).without(*(f"node0/{k}" for k in range(4)))
    assert fewer.num_nodes == 2
    assert fewer.node_overrides.keys() == {0}
    assert fewer.names[0] == "node1/0"
    assert "without node 0" in fewer.name


@settings(max_examples=60)
@given(name=st.sampled_from(["mixed", "dgx-h100", "dgx-v100", "mi300x"]), seed=st.integers(0, 10_000))
def test_links_among_what_is_left_stay(name: str, seed: int):
    topology = loads(MIXED) if name == "mixed" else Topology.preset(name, nodes=2)
    rng = np.random.default_rng(seed)
    gone = rng.random(topology.num_devices) < rng.choice([0.1, 0.5])
    if gone.all():
        gone[0] = False
    names = [topology.names[d] for d in np.flatnonzero(gone)]
    try:
        fewer = topology.without(*names)
    except TopologyError:
        with pytest.raises(TopologyError, match=r"leave|describe"):
            topology.without(*names)
        return
    kept = np.flatnonzero(~gone)
    assert fewer.names == tuple(topology.names[d] for d in kept)
    assert [d.memory for d in fewer.devices] == [topology.devices[d].memory for d in kept]
    direct = np.array([[topology.link(i, j).name != "routed" for j in kept] for i in kept])
    (rates, seconds), (rates_left, seconds_left) = topology.links_between(kept), fewer.links_between(range(len(kept)))
    assert np.array_equal(seconds[direct], seconds_left[direct])
    node = topology.node_of[kept]
    inside = direct & ((node[:, None] == node) | (not topology.cards.are_shared))
    assert np.array_equal(rates[inside], rates_left[inside])
    assert (rates_left[direct] >= rates[direct] * (1 - 1e-9)).all()  # fewer devices share a network card


def test_what_cannot_be_left_out_is_said():
    topology = loads(MIXED)
    with pytest.raises(TopologyError, match="no device or node 'node7/0'; it has the devices 'node0/0' to"):
        topology.without("node7/0")
    with pytest.raises(TopologyError, match="no device or node 'node3'"):
        topology.without("node3")
    with pytest.raises(TopologyError, match="keep at least one"):
        topology.without(*topology.names)
    pairs = MIXED.replace("name: inside, nodes: 1", "name: inside, devices: 2")
    with pytest.raises(TopologyError, match="joins groups of consecutive devices"):
        loads(pairs).without("node0/1")


def test_smaller_clusters_lack_what_is_slow_small_or_far():
    found = [fewer.name for fewer in smaller_clusters(loads(MIXED))]
    assert "lab without node 2" in found
    assert is_even(Topology.preset("dgx-h100", nodes=3))
    assert not is_even(loads(MIXED))


class Tower(nn.Module):
    def __init__(self, width: int = 2048, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return x.square().mean()


def planned(topology: Topology, samples: int = 16, width: int = 2048, **pins: int) -> Plan:
    with torch.device("meta"):
        model, x = Tower(width), torch.empty(samples, 512, width)
    return partition(model, topology, (x,), constraints=Constraints(**pins))


def test_the_report_says_what_the_others_do_without_the_slow_ones():
    topology = loads(MIXED)
    plan = planned(topology, tp=2, pp=1)
    (row,) = [b for b in plan.certificate.baselines if b.name.startswith("Without")]
    assert row.name == "Without node 2"
    assert row.candidate is not None
    alone = planned(topology.without("left", "right"), tp=2, pp=1)
    # by the search alone: its best plan's program takes longer, and another one is best then
    assert row.candidate.step_time == pytest.approx(alone.estimate.step_time, rel=0.05)
    assert alone.estimate.step_time < plan.estimate.step_time
    assert 'topology.without("node1/3", ...)' in plan.explain()


def test_nothing_is_said_where_all_help():
    names = [b.name for b in planned(Topology.preset("dgx-h100")).certificate.baselines]
    assert not any(name.startswith("Without") for name in names)


def slow_network(bandwidth: str, devices: int = 4) -> Topology:
    inside = "{name: inside, nodes: 1, like: nvlink4}"
    across = f"{{name: across, bandwidth: {bandwidth}, latency: 10 us}}"
    return loads(f"nodes: [{{type: h100-sxm, devices: {devices}, count: 4}}]\nlevels: [{inside}, {across}]")


def test_a_node_that_is_faster_alone_than_over_a_slow_network_is_named():
    plan = planned(slow_network("0.2 GB/s"))
    rows = {b.name: b.candidate for b in plan.certificate.baselines if b.name.startswith("Without")}
    alone = planned(slow_network("0.2 GB/s").without("node1", "node2", "node3")).estimate.step_time
    assert alone < plan.estimate.step_time
    row = rows["Without 12 of the 16 devices"]
    assert row is not None
    assert row.step_time == pytest.approx(alone, rel=0.02)


@given(slower=st.sampled_from([0.01, 0.3, 1.0, 2.0, 3.0, 10.0]), times=st.sampled_from([1.2, 2.0, 10.0]))
@settings(max_examples=examples(5, quick=1))
def test_what_an_axis_divides_does_not_depend_on_how_slow_the_links_are(slower: float, times: float):
    """Work that is left whole takes no time on the links: a faster network must not make a step longer."""
    took = [
        planned(slow_network(f"{rate:g} GB/s", devices=2), tp=8).estimate.step_time for rate in (slower, slower * times)
    ]
    assert took[1] <= took[0] * (1 + 1e-9)


@pytest.mark.slow
def test_a_device_that_is_too_small_may_be_left_out_for_there_to_be_a_plan():
    small = loads(MIXED.replace("memory: 16 GB", "memory: 20 MB").replace("left: {memory: 8 GB}", "left: {speed: 1}"))
    with pytest.raises(InfeasibleError) as caught:
        planned(small)
    (change,) = [c for c in caught.value.changes if "without node 2" in c.text]
    assert planned(change.topology).world_size == 8


def test_fewer_nodes_that_are_a_power_of_two_are_told_where_they_are_as_fast() -> None:
    """Of 8 samples on 6 ranks some have two, and the others wait for them: 4 ranks, each of two, take no longer, and
    add up gradients of fewer."""
    with torch.device("meta"):
        model, inputs = Tower(1024, 4), (torch.empty(8, 1024),)
    pins = Constraints(pp=1, tp=1, zero=0, microbatch_size=1)
    plan = partition(model, cluster(4096, 2, 3), inputs, constraints=pins)
    (fewer,) = [b.candidate for b in plan.certificate.baselines if b.name == "Without 2 of the 6 devices"]
    assert fewer is not None and fewer.step_time is not None
    assert fewer.step_time <= plan.estimate.step_time
    alone = partition(model, cluster(4096, 2, 2), inputs, constraints=pins, estimate_only=True)
    assert fewer.step_time == pytest.approx(alone.estimate.step_time)
    assert re.match(r"on \d of the 6 a step takes ", fewer_text(plan))


def test_what_fewer_devices_take_is_in_the_summary() -> None:
    """A plan of 3 s on 10 devices, and 2.7 s on 8 of them: a tenth less."""
    plan = plan_of(llama(pp=1, dp=2, tp=1))
    one = Candidate(
        mesh={"pp": 1, "dp": 8, "cp": 1, "tp": 1, "ep": 4}, microbatch_size=1, schedule="1f1b", status="solved",
        step_time=0.9 * plan.certificate.objective,
    )  # fmt: skip
    baselines = (Baseline(name="Without 2 of the 10 devices", candidate=one),)
    told = plan.model_copy(update={"certificate": plan.certificate.model_copy(update={"baselines": baselines})})
    seconds = seconds_text(0.9 * plan.certificate.objective)
    text = f"on 8 of the {plan.world_size} a step takes {seconds}, 10% less (dp 8, ep 4)"
    assert fewer_text(told) == text
    assert " ".join(text.split()) in " ".join(told.summary().split())
    assert fewer_text(plan) == ""


def test_rounder_clusters_are_of_fewer_nodes() -> None:
    assert [t.num_nodes for t in rounder_clusters(Topology.preset("dgx-h100", nodes=1250))] == [1024]
    assert not list(rounder_clusters(Topology.preset("dgx-h100", nodes=1024)))


class Recomputed(nn.Module):
    """Eight layers that save much for the backward, and compute most of it again in little time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(F.gelu(F.gelu(layer(x))))
        return x.square().mean()


def test_optimizer_states_in_host_memory_are_told_of_where_they_save_recomputation() -> None:
    """Devices of 1.45 GiB recompute for 16 % of a step. Without the 256 MiB of AdamW's states they need not."""
    whole = Topology.preset("dgx-h100")
    less = {"memory": int(1.45 * 2**30), "reserved": 0}
    types = {name: kind.model_copy(update=less) for name, kind in whole.types.items()}
    topology = Topology(name="small", nodes=whole.nodes, types=types, levels=whole.levels, patterns=whole.patterns)
    with torch.device("meta"):
        model, x = Recomputed(), torch.empty(1024, 2048, 2048)

    def plan(**pins: object) -> Plan:
        fixed = Constraints(pp=1, tp=1, zero=0, memory_margin=0, **pins)
        return partition(model, topology, (x,), constraints=fixed)

    free = plan()
    (told,) = [b for b in free.certificate.baselines if b.offload]
    assert told.candidate is not None and told.candidate.step_time is not None
    assert told.candidate.step_time < 0.99 * free.estimate.step_time
    assert free.estimate.breakdown["recompute"] > 0.1 * free.estimate.step_time
    assert 'offload="optimizer"' in free.summary()
    assert "in host memory" in free.explain()
    assert "with optimizer states there, a step takes" in free.certificate.beyond["offload"]
    assert "not tried" not in free.certificate.beyond["offload"]
    hosted = plan(offload="optimizer")
    assert told.candidate.step_time == pytest.approx(hosted.estimate.step_time)
    assert not [b for b in plan(offload=()).certificate.baselines if b.offload]


def test_the_certificate_says_what_the_comparison_with_offload_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of 10 s is compared with plans that keep optimizer states in host memory: one of 8 s, none of less than
    9.9 s, and none in the given time. Nothing is said of plans if they were not compared."""
    monkeypatch.setattr(smaller_clusters_module, "_bound_job_seconds", lambda _: 1.0)
    hosted = SimpleNamespace(constraints=Constraints(offload=("optimizer",)))
    row = Candidate(mesh={"dp": 8}, microbatch_size=1, schedule="1f1b", status="solved", step_time=8.0)

    def compare(outcome: Candidate | PartitionError) -> tuple[Baseline, ...]:
        def best(*_: object) -> Candidate:
            if isinstance(outcome, PartitionError):
                raise outcome
            return outcome

        return faster_with_offload(hosted, 10.0, best)  # type: ignore[arg-type]

    told = describe_offload_comparison(compare(row), 10.0)
    assert "with optimizer states there, a step takes 20% less" in told
    assert 'you did not ask for it (offload="optimizer")' in told
    for outcome in (PlanError("no plan takes less"), row.model_copy(update={"step_time": 9.95})):
        told = describe_offload_comparison(compare(outcome), 10.0)
        assert "found no plan whose step is at least 1% shorter" in told
    assert compare(TimeLimitError("late")) == ()
    assert describe_offload_comparison((), 10.0) == ""
