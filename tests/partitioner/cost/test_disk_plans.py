"""Optimizer states on disk as they are planned: what is where, what that takes, what fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from partitioner import Constraints, Plan, Topology, partition
from partitioner.cost.call.states import kinds_of, state_costs
from partitioner.cost.step.offload import disk_seconds, update_seconds
from partitioner.errors import CapacityError, ConstraintError
from partitioner.passes.ir.model import ModelState, TensorSpec
from partitioner.runtime.program.analysis import ProgramFacts
from partitioner.runtime.program.memory import disk_bytes, host_bytes
from partitioner.simulate.program_time import plan_timeline
from partitioner.solve.search.fit_memory import _check_hosts
from partitioner.topology.hosts import HostShare, has_disks, host_shares
from tests.helpers.offload_plans import Wide, with_host
from tests.helpers.small_clusters import cluster

pytestmark = pytest.mark.usefixtures("without_baselines")

NUMBERS = 6 * (512 * 512 + 512)  # parameters of Wide()


def with_disk(topology: Topology, memory: str = "1 GB", disk: str = "1 GB", rate: str = "1 GB/s") -> Topology:
    (nodes,) = topology.model_dump(include={"nodes"})["nodes"]
    host = {"memory": memory, "bandwidth": "10 GB/s", "disk": disk, "disk_bandwidth": rate}
    return Topology(**(topology.model_dump(exclude_unset=True) | {"nodes": ({**nodes, "host": host},)}))


def plan(topology: Topology, offload: Any = None, **more: Any) -> Plan:
    pins = {"offload": offload, **more.pop("pins", {})}
    return partition(Wide(), topology, (torch.zeros(4, 512),), constraints=Constraints(**pins), **more)


def test_the_instructions_are_the_same():
    in_memory, on_disk = (plan(with_disk(cluster(64, devices=1)), kinds) for kinds in ("optimizer", "disk"))
    assert on_disk.program == in_memory.program.model_copy(update={"offload": ("optimizer", "disk")})
    assert on_disk.estimate.memory == in_memory.estimate.memory
    assert plan_timeline(on_disk).gradients_s == plan_timeline(in_memory).gradients_s  # up to the update
    updates = [p.estimate.breakdown["optimizer"] for p in (in_memory, on_disk)]
    others = [p.estimate.step_time - u for p, u in zip((in_memory, on_disk), updates, strict=True)]
    assert others[0] == pytest.approx(others[1]) and updates[1] > 10 * updates[0]


@pytest.mark.parametrize(
    ("precision", "host", "disk", "traffic"),
    [(None, 4 + 4, 8, 16), ("bf16", 4 + 2, 8 + 4, 2 * 12 + 4), ("fp64", 8 + 8, 16, 32)],
)
def test_what_is_where(precision: str | None, host: int, disk: int, traffic: int):
    """Bytes of each parameter: on the host its gradient and what is sent; on disk moments, and a copy in float32."""
    made = plan(with_disk(cluster(64, devices=1)), "optimizer+disk", precision=precision)
    (stage,) = made.estimate.stages
    assert (stage.host, stage.disk) == (host * NUMBERS, disk * NUMBERS)
    assert made.estimate.breakdown["optimizer"] == pytest.approx(traffic * NUMBERS / 1e9)
    facts = ProgramFacts(made.program)
    assert host_bytes(facts, 0, made.program.stages[0].instructions) == host * NUMBERS
    assert disk_bytes(facts, 0) == (4 * NUMBERS if precision == "bf16" else 0)


def test_ranks_share_states_and_the_disk():
    made = plan(with_disk(cluster(64, devices=4)), "optimizer+disk", pins=dict(dp=4, tp=1, pp=1, zero=1))
    assert made.estimate.stages[0].disk == 8 * NUMBERS / 4
    assert made.estimate.breakdown["optimizer"] == pytest.approx(16 * NUMBERS / 1e9)  # of all four
    whole = plan(with_disk(cluster(64, devices=4)), "optimizer+disk", pins=dict(dp=4, tp=1, pp=1, zero=0))
    assert whole.estimate.breakdown["optimizer"] == pytest.approx(4 * 16 * NUMBERS / 1e9)


def test_states_on_disk():
    model = {"w": ModelState("w", TensorSpec((10,), torch.bfloat16), "parameter", True)}
    cost = state_costs(kinds_of(model, {}), {}, offload=("optimizer", "disk"))["w"]
    assert cost.kept == {"parameters": 20, "gradients": 40, "optimizer": 0}
    assert (cost.in_host, cost.on_disk, cost.disk_traffic) == (10 * (4 + 2), 10 * (8 + 4), 10 * (24 + 4))
    assert cost.scaled(0.5).disk_traffic == cost.disk_traffic / 2
    plain = state_costs(kinds_of(model, {}), {}, offload=("optimizer",))["w"]
    assert (plain.on_disk, plain.disk_traffic) == (0, 0)
    fast, slow = (HostShare(update_bandwidth=1e3, disk_bandwidth=rate) for rate in (1e9, 1.0))
    assert update_seconds([cost], fast) == cost.update / 1e3
    assert update_seconds([cost], slow) == disk_seconds([cost], slow) == cost.disk_traffic
    frozen = state_costs(kinds_of(model, {}), {}, train=False, offload=("optimizer", "disk"))["w"]
    assert (frozen.on_disk, frozen.disk_traffic) == (0, 0)


def test_devices_share_their_nodes_disk():
    four = with_disk(cluster(64, devices=4), rate="8 GB/s")
    assert {share and share.disk_bandwidth for share in host_shares(four)} == {2e9}
    assert has_disks(four) and not has_disks(with_host(cluster(64))) and not has_disks(cluster(64))
    assert has_disks(Topology.preset("dgx-h100", nodes=1))


def test_the_report_has_it(tmp_path: Path):
    made = plan(with_disk(cluster(64, devices=1)), "optimizer+activations+disk")
    text, why = made.summary(), made.explain()
    assert " disk optimizer states: 12 MiB per rank" in " ".join(text.split())
    assert "the optimizer's parameters and gradients and activations: " in " ".join(text.split())
    assert "On disk: optimizer states: 12 MiB per rank." in why
    assert "Disk: the optimizer's update takes 25.2 ms; reading and writing its states on disk takes 25.2 ms" in why
    fast = plan(with_disk(cluster(64, devices=1), rate="1 TB/s"), "optimizer+disk")
    assert "The disk does not limit the plan: the optimizer's update takes" in fast.explain()
    made.to_svg(tmp_path / "memory.svg", view="memory")
    assert "On disk: optimizer states: 12 MiB per rank." in (tmp_path / "memory.svg").read_text()
    other = made.diff(plan(with_disk(cluster(64, devices=1)), "optimizer"))
    assert "on disk" in other and "nothing" in other
    loaded = Plan.load(made.save(tmp_path / "plan.json"))
    assert loaded.estimate.stages[0].disk == 8 * NUMBERS and loaded.offload == made.offload


def test_a_disk_that_is_too_small_is_said():
    with pytest.raises(
        CapacityError, match=r"the disk of node 0 has 7.63 MiB, but 12 MiB are offloaded to it"
    ) as caught:
        plan(with_disk(cluster(64, devices=1), disk="8 MB"), "disk")
    assert "offload=optimizer instead of optimizer+disk" in caught.value.changes[0].text
    with pytest.raises(CapacityError, match=r"the disk of node 0 has 26.7 MiB, but 48.1 MiB are offloaded to it"):
        plan(with_disk(cluster(64, devices=4), disk="28 MB"), "disk", pins=dict(dp=4, tp=1, pp=1, zero=0))


def test_the_program_itself_is_checked():
    made = plan(with_disk(cluster(64, devices=1)), "disk")

    class Job:
        topology = with_disk(cluster(64, devices=1), disk="8 MB")
        optimizer = "adamw"

    class Chosen:
        devices = made.devices

    facts: Any = ProgramFacts(made.program)
    with pytest.raises(CapacityError, match=r"the disk of node 0 has 7.63 MiB, but 12 MiB are offloaded to it"):
        _check_hosts(facts, Job, Chosen)  # type: ignore[arg-type]
    Job.topology = with_disk(cluster(64, devices=1), memory="13 MB")
    _check_hosts(facts, Job, Chosen)  # type: ignore[arg-type]
    in_memory = made.program.model_copy(update={"offload": ("optimizer",)})
    with pytest.raises(CapacityError, match="the host of node 0"):
        _check_hosts(ProgramFacts(in_memory), Job, Chosen)  # type: ignore[arg-type]


def test_disks_must_be_known():
    with pytest.raises(ConstraintError, match="small does not describe the disks of its nodes; add a disk") as caught:
        plan(with_host(cluster(64, devices=1)), "disk")
    assert caught.value.changes[0].constraints.offload in ((), ("optimizer",))
    with pytest.raises(ConstraintError, match="small does not describe the hosts of its nodes"):
        plan(cluster(64, devices=1), "disk")


def test_it_is_tried_where_a_host_is_too_small():
    small = cluster(16, devices=1)  # MiB: of 24 that training takes
    assert plan(with_disk(small)).offload == ("optimizer",)  # nothing goes to a disk that may stay in memory
    assert plan(with_disk(small, memory="20 MB")).offload == ("optimizer", "disk")
    with pytest.raises(CapacityError, match=r"the host of node 0|usable on a device"):
        plan(with_host(small, "20 MB"))
    with pytest.raises(CapacityError):
        plan(with_disk(small, memory="20 MB"), "none")
    with pytest.raises(CapacityError):
        plan(with_disk(small, memory="20 MB", disk="10 MB"))


def test_the_device_is_no_reason_for_a_disk(monkeypatch: pytest.MonkeyPatch):
    import partitioner.solve.search.search as explore

    asked: list[tuple[str, ...]] = []
    kept = explore._with_offload
    monkeypatch.setattr(explore, "_with_offload", lambda job, kinds: asked.append(kinds) or kept(job, kinds))
    with pytest.raises(CapacityError):
        plan(with_disk(cluster(1, devices=1)))
    assert asked and not any("disk" in kinds for kinds in asked)


def test_the_nearest_change_names_it():
    with pytest.raises(CapacityError, match="the host of node 0") as caught:
        plan(with_disk(cluster(16, devices=1), memory="20 MB"), "optimizer")
    first = caught.value.changes[0]
    assert first.text.startswith("offload=optimizer+disk instead of optimizer (a step then takes ")
    assert plan(first.topology, first.constraints.offload).offload == ("optimizer", "disk")


def test_the_bound_knows_the_disk():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(8)))
    inputs = (torch.empty(8, 8192, device="meta"),)
    pinned = Constraints(offload="optimizer+disk", pp=1)
    made = partition(model, Topology.preset("dgx-v100", nodes=1), inputs, loss=torch.sum, constraints=pinned)
    update = made.estimate.breakdown["optimizer"]
    assert update > 0.9 * made.estimate.step_time  # 2 GB/s for all eight
    bounds = [c.bound for c in made.certificate.candidates if c.status == "bounded"]
    assert bounds and all(update / 2 < bound for bound in bounds)
    assert made.certificate.bound <= made.certificate.objective
