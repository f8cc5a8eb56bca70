"""Figures as people write them in a topology file: ratios, odd numbers, letters, and what is too odd to be meant."""

from __future__ import annotations

import pytest

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
        ("oversubscription: 4:0", "line 3.*'4:0' divides by nothing; write it like 4 or 4:1"),
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
