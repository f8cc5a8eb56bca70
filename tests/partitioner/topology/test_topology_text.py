"""Figures as people write them in a topology file: ratios, odd numbers, letters, and what is too odd to be meant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from partitioner import Topology
from partitioner.cli.app import app
from partitioner.errors import TopologyError
from partitioner.topology import loads

NET = "nodes: [{type: h100-sxm, count: 4}]\nlevels:\n  - {name: net, bandwidth: 25 GB/s, %s}\n"


@pytest.mark.parametrize(
    ("written", "read"), [("4:1", 4), ("'4:1'", 4), ("64:1", 64), ("3:2", 1.5), ("2.5:1", 2.5), ("4", 4), ("'4'", 4)]
)
def test_oversubscription_may_be_a_ratio(written: str, read: float):
    assert loads(NET % f"oversubscription: {written}").levels[0].oversubscription == read


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("oversubscription: 1:4", "line 3.*oversubscription.*greater than or equal to 1.*got '1:4'"),
        ("oversubscription: 4:0", "line 3.*'4:0' divides by zero; write it like 4 or 4:1"),
        ("efficiency: 1:30", "line 3.*efficiency: expected a number.*got '1:30'"),
        ("latency: 1:30", "line 3.*latency: '1:30' is not a number with a unit; write it like 5 us or 2 ms"),
        ("nodes: 1:30", "line 3.*nodes: expected a whole number.*got '1:30'"),
        ("latency: 1:30.5", "line 3.*latency: '1:30.5' is not a number"),
    ],
)
def test_no_number_is_taken_for_minutes_and_seconds(field: str, message: str):
    with pytest.raises(TopologyError, match="(?s)cluster.yaml.*" + message):
        loads(NET % field, "cluster.yaml")


def test_a_leading_zero_does_not_make_a_number_octal():
    assert loads("nodes: [{type: l40s, devices: 010}]\nlevels: [{like: pcie4}]").num_devices == 10


@pytest.mark.parametrize("micro", ["u", "\N{MICRO SIGN}", "\N{GREEK SMALL LETTER MU}"])
def test_every_letter_for_a_millionth_is_read(micro: str):
    assert loads(NET % f"latency: 5 {micro}s").levels[0].latency == 5e-6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NET.replace("25 GB/s, %s", "5e-324"), "line 3.*bandwidth: .* B/s is too small to be meant; expected 1 to 1e"),
        (NET.replace("25 GB/s, %s", "1e30 GB/s"), "line 3.*bandwidth: .* too large to be meant.*like 50 GB/s"),
        (
            NET % "latency: 1e300",
            "line 3.*latency: 1e.300 s is too large to be meant; expected 0 to 1e.06 s, like 5 us",
        ),
        (NET % "step: 1e9 s", "line 3.*step: .*too large"),
        (NET % "efficiency: 1" + "types: {h100-sxm: {like: h100-sxm, peak: {bf16: 1e-300}}}", "peak.*too small"),
        (NET % "efficiency: 1" + "node_overrides: {1: {speed: 1e-300}}", "line 4.*speed: .*too small"),
        (NET % "efficiency: 1" + "types: {h100-sxm: {like: h100-sxm, memory: 1e300}}", "not a size of memory"),
    ],
)
def test_what_no_machine_has_is_refused(text: str, message: str):
    with pytest.raises(TopologyError, match="(?s)cluster.yaml.*" + message):
        loads(text, "cluster.yaml")


@pytest.mark.parametrize("text", ["dgx-h100:", "local:", "detect:", "dgx-h100: without node0/1"])
def test_nothing_behind_the_colon_is_refused(text: str):
    with pytest.raises(TopologyError, match="expected a number after the colon, got nothing; write it like "):
        Topology.parse(text)


@pytest.mark.parametrize("given", ["abc", "", "0", "-2", "2.5"])
def test_a_launcher_that_gives_no_number_is_told(given: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", given)
    with pytest.raises(TopologyError, match=f"WORLD_SIZE='{given}'; expected a number of ranks from 1 on.*unset it"):
        Topology.detect()


def test_the_table_tells_nodes_apart(tmp_path: Path):
    file = tmp_path / "mixed.yaml"
    file.write_text("""
    nodes: [{type: l40s, devices: 3, count: 5}, {type: l40s, devices: 5, names: [a, b, c, d, left], host: pcie4}]
    levels: [{like: pcie4, nodes: 1}, {like: ib-ndr}]
    overrides: {left: {memory: 40 GB, speed: 0.5}}
    node_overrides: {1: {memory: 20 GiB, dead_nics: 1}}
    """)
    shown = CliRunner().invoke(app, ["topology", str(file)]).stdout
    assert re.search(r"5 x l40s +3 *\n", shown) and re.search(r"1 x l40s +5 +25 GB/s", shown)
    assert "left: memory 37.3 GiB, speed 0.5" in shown
    assert re.search(r"node 1: .*memory 20 GiB", shown)
