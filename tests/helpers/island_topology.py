"""A topology file with two kinds of nodes, links between single pairs, and devices that are slow."""

from __future__ import annotations

ISLANDS = """
name: islands
nodes:
  - {type: h100-sxm, devices: 4, count: 2, nics: 2, host: dgx-h100}
  - {type: v100-32gb, devices: 8, island: old, pattern: hybrid-cube-mesh}
levels:
  - {like: nvlink4, nodes: 1, only: [h100-sxm]}
  - {like: pcie3, nodes: 1, only: [old]}
  - {name: spine, bandwidth: 20 GB/s, latency: 20 us, oversubscription: 4}
overrides: {node2/7: {speed: 0.5}}
node_overrides: {1: {dead_nics: 1, speed: 0.9}}
links: [{between: [node0/0, node2/0], bandwidth: 40 GB/s, latency: 3 us}]
"""
