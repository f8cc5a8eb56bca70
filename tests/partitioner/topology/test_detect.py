"""The machine at hand, from what torch and ``nvidia-smi`` say of it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from partitioner.errors import TopologyError
from partitioner.topology import Topology, axis_group, detect, loads
from partitioner.topology.detect import read_wiring

A100, V100, H100 = "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-32GB", "NVIDIA H100 80GB HBM3"
LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""

# DGX-1 V100, driver 450: four cards, tabs, an underlined header
CUBE_MESH = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tmlx5_0\tmlx5_1\tmlx5_2\tmlx5_3"
    "\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \tNV1\tNV1\tNV2\tNV2\tSYS\tSYS\tSYS\tPIX\tPHB\tSYS\tSYS\t0-19,40-59\t0\n"
    "GPU1\tNV1\t X \tNV2\tNV1\tSYS\tNV2\tSYS\tSYS\tPIX\tPHB\tSYS\tSYS\t0-19,40-59\t0\n"
    "GPU2\tNV1\tNV2\t X \tNV2\tSYS\tSYS\tNV1\tSYS\tPHB\tPIX\tSYS\tSYS\t0-19,40-59\t0\n"
    "GPU3\tNV2\tNV1\tNV2\t X \tSYS\tSYS\tSYS\tNV1\tPHB\tPIX\tSYS\tSYS\t0-19,40-59\t0\n"
    "GPU4\tNV2\tSYS\tSYS\tSYS\t X \tNV1\tNV1\tNV2\tSYS\tSYS\tPIX\tPHB\t20-39,60-79\t1\n"
    "GPU5\tSYS\tNV2\tSYS\tSYS\tNV1\t X \tNV2\tNV1\tSYS\tSYS\tPIX\tPHB\t20-39,60-79\t1\n"
    "GPU6\tSYS\tSYS\tNV1\tSYS\tNV1\tNV2\t X \tNV2\tSYS\tSYS\tPHB\tPIX\t20-39,60-79\t1\n"
    "GPU7\tSYS\tSYS\tSYS\tNV1\tNV2\tNV1\tNV2\t X \tSYS\tSYS\tPHB\tPIX\t20-39,60-79\t1\n"
    "mlx5_0\tPIX\tPIX\tPHB\tPHB\tSYS\tSYS\tSYS\tSYS\t X \tPHB\tSYS\tSYS\t\t\n" + LEGEND
)

PAIR_BY_PCIE = """\
        GPU0    GPU1    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      PHB     0-63    0               N/A
GPU1    PHB      X      0-63    0               N/A
"""

BRIDGED = """\
        GPU0    GPU1    GPU2    CPU Affinity    NUMA Affinity
GPU0     X      NV12    NODE    0-31    0
GPU1    NV12     X      NODE    0-31    0
GPU2    NODE    NODE     X      0-31    0
"""


def all_to_all(count: int, links: int, nics: int = 0) -> str:
    """As ``topo -m`` shows ``count`` devices of which each pair counts ``links`` NVLinks."""
    names = [f"GPU{i}" for i in range(count)] + [f"NIC{i}" for i in range(nics)]
    rows = ["\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"]
    for i in range(count):
        cells = [" X " if i == j else f"NV{links}" for j in range(count)] + [
            "PXB" if n == i else "SYS" for n in range(nics)
        ]
        rows.append(f"GPU{i}\t" + "\t".join(cells) + "\t0-51,104-155\t0\t\tN/A")
    return "\n".join(rows) + LEGEND


def status(name: str, count: int, ports: int, speed: str) -> str:
    """As ``nvlink --status`` shows them, the last link of each down."""
    lines = []
    for i in range(count):
        lines.append(f"GPU {i}: {name} (UUID: GPU-{uuid(i)})")
        lines += [f"\t Link {k}: {speed} GB/s" for k in range(ports)] + [f"\t Link {ports}: <inactive>"]
    return "\n".join(lines)


def uuid(i: int) -> str:
    return f"{i:08d}-6d5b-03bd-3a71-f85b47a61bde"


def query(count: int, gen: int = 4) -> str:
    return "".join(f"{i}, GPU-{uuid(i)}, {gen}, 16\n" for i in range(count))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Makes this machine one with the devices ``names`` (torch's view) whose tool answers the texts."""

    def make(
        names: Sequence[str], topo: str = "", nvlink: str = "", cards: str = "", shown: Sequence[int] = ()
    ) -> None:
        places = list(shown) or list(range(len(names)))
        seen = [
            SimpleNamespace(name=n, total_memory=80 * 2**30, uuid=uuid(i)) for n, i in zip(names, places, strict=True)
        ]
        answers = {"topo": topo, "nvlink": nvlink, detect.QUERY[0]: cards}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: seen[i])
        monkeypatch.setattr(detect, "run_nvidia_smi", lambda *arguments: answers[arguments[0]])
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)

    return make


def test_the_matrix_is_read_whatever_its_spacing():
    wires = read_wiring(CUBE_MESH)
    assert wires is not None
    assert wires.nvlinks.sum(axis=1).tolist() == [6] * 8
    assert (wires.num_nics, wires.speed, wires.pcie) == (4, None, None)
    plain = read_wiring(PAIR_BY_PCIE, "", query(2))
    assert plain is not None
    assert plain.nvlinks.tolist() == [[0, 0], [0, 0]]
    assert plain.pcie == pytest.approx(31.5e9, rel=0.01)
    assert read_wiring("Failed to initialize NVML: Driver/library version mismatch") is None


def test_links_that_are_down_do_not_count():
    wires = read_wiring(all_to_all(8, 12), status(A100, 8, 12, "25.781"))
    assert wires is not None
    assert (wires.ports, wires.speed) == (12, 25e9)


@pytest.mark.parametrize(
    ("name", "links", "speed", "level", "bandwidth"),
    [
        (A100, 12, "25.781", "nvlink3", 300e9),
        (H100, 18, "26.562", "nvlink4", 450e9),
        (H100, 8, "26.562", "nvlink", 200e9),  # an H100 of which ten links are off
    ],
)
def test_switches_are_one_level(machine, name: str, links: int, speed: str, level: str, bandwidth: float):
    machine([name] * 8, all_to_all(8, links, nics=8), status(name, 8, links, speed), query(8, 5))
    found = Topology.detect()
    assert (found.num_devices, found.pattern_of.max()) == (8, -1)
    assert (found.link(0, 7).name, found.link(0, 7).bandwidth) == (level, bandwidth)
    assert loads(found.to_yaml()) == found


def test_direct_links_are_a_pattern(machine):
    machine([A100] * 4, all_to_all(4, 4), status(A100, 4, 12, "25.781"), query(4))
    four = Topology.detect()
    assert four.link(0, 3).bandwidth == 100e9
    assert axis_group(four, {"tp": 4}, "tp").bus_bandwidth == pytest.approx(0.9 * 300e9)
    assert axis_group(four, {"dp": 2, "tp": 2}, "tp").bus_bandwidth == pytest.approx(0.9 * 100e9)


def test_the_cube_mesh_is_recognised_and_shares_its_cards(machine, monkeypatch: pytest.MonkeyPatch):
    machine([V100] * 8, CUBE_MESH, status(V100, 8, 6, "25.781"), query(8, 3))
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    found, preset = Topology.detect(), Topology.preset("dgx-v100", 2)
    assert found.num_nodes == 2
    assert found.patterns == preset.patterns
    assert [found.link(0, j).bandwidth for j in (1, 3, 8)] == [preset.link(0, j).bandwidth for j in (1, 3, 8)]


def test_without_links_it_is_pcie_at_the_slots_speed(machine):
    machine(["NVIDIA L40S"] * 2, PAIR_BY_PCIE, "", query(2))
    assert Topology.detect().link(0, 1).bandwidth == pytest.approx(31.5e9, rel=0.01)


def test_devices_that_differ_are_described(machine):
    machine([A100, A100, "NVIDIA L40S"], BRIDGED, status(A100, 2, 12, "25.781"), query(3))
    mixed = Topology.detect()
    assert (mixed.link(0, 1).bandwidth, mixed.link(1, 2).name) == (300e9, "pcie4")
    assert [d.kind for d in mixed.devices] == ["a100-80gb", "a100-80gb", "l40s"]
    assert mixed.device_type(2).peak_of("bf16") == 362e12


def test_without_the_tool_it_is_the_machine_that_is_known(machine):
    machine([H100] * 8)
    assert Topology.detect().link(0, 1).name == "nvlink4"
    machine(["NVIDIA GeForce RTX 4090"] * 2)
    assert Topology.detect().link(0, 1).name == "pcie4"
    machine([V100] * 4)  # which four of the eight is not known
    assert Topology.detect().link(0, 3).name == "pcie3"


def test_only_visible_devices_count(machine):
    machine([V100] * 2, CUBE_MESH, status(V100, 8, 6, "25.781"), query(8, 3), shown=[7, 4])
    assert Topology.detect().link(0, 1).bandwidth == 50e9
    machine([V100] * 2, CUBE_MESH, status(V100, 8, 6, "25.781"), query(8, 3), shown=[0, 5])
    assert Topology.detect().link(0, 1).name == "pcie3"


def test_what_cannot_be_described_is_refused(machine, monkeypatch: pytest.MonkeyPatch):
    machine(["NVIDIA Quantum 9000"])
    with pytest.raises(TopologyError, match="unknown device 'NVIDIA Quantum 9000'; describe it"):
        Topology.detect()
    machine([A100] * 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(TopologyError, match="4 ranks on this node, which has 2 CUDA devices"):
        Topology.detect()


def test_without_devices_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert Topology.detect() == Topology.local(3)


def test_no_tool_is_no_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    assert detect.run_nvidia_smi("topo", "-m") == ""
