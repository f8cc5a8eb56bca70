#!/usr/bin/env bash
# torch.export ignores a forward that was set on an fx.GraphModule, though calling the module uses it.
#
# Versions: torch 2.13.0 (CPU build), numpy 2.4.6, Python 3.11.
# What most would guess: what module(x) computes is what is exported, as for every other nn.Module (where an instance's forward counts).
# What happens: the graph is interpreted instead: the exported program has one output where the module has two.
# Output seen:
#   nn.Linear:      called 2 outputs, exported 2
#   fx.GraphModule: called 2 outputs, exported 1
# Fails (exit code 1) if this changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch import fx, nn


def with_sum(module):
    forward = module.forward
    module.forward = lambda x: (forward(x), forward(x).sum())
    return module


def outputs(module):
    program = torch.export.export(module, (torch.ones(2, 4),), strict=False)
    return len(program.graph_signature.user_outputs)


plain, traced = with_sum(nn.Linear(4, 4)), with_sum(fx.symbolic_trace(nn.Linear(4, 4)))
print("nn.Linear:      called", len(plain(torch.ones(2, 4))), "outputs, exported", outputs(plain))
print("fx.GraphModule: called", len(traced(torch.ones(2, 4))), "outputs, exported", outputs(traced))
assert outputs(plain) == 2
assert outputs(traced) == 1
PYTHON
