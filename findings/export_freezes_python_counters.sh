#!/usr/bin/env bash
# torch.export keeps the value of a Python counter for good, puts the attribute back, and says nothing.
#
# Versions: torch 2.13.0 (CPU build), numpy 2.4.6, Python 3.11.
# What most would guess: an error or a warning about the attribute that forward assigns, or a counter that stands at 1 afterwards.
# What happens: the exported program multiplies by the number of the first call at every call, the module is reset to 0, and no
#   warning is given (one is given for tensors that are assigned).
# Output seen:
#   warnings about it: 0
#   step after export: 0
#   three calls of the module:  [1.0, 2.0, 3.0]
#   three calls of the program: [1.0, 1.0, 1.0]
# Fails (exit code 1) if this changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import warnings

import torch
from torch import nn


class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = 0

    def forward(self, x):
        self.step += 1
        return x * self.step


model = Annealed()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    program = torch.export.export(model, (torch.ones(1),), strict=False).module()
told = [str(w.message) for w in caught if "step" in str(w.message) or "assign" in str(w.message)]
print("warnings about it:", len(told))
print("step after export:", model.step)
print("three calls of the module: ", [model(torch.ones(1)).item() for _ in range(3)])
print("three calls of the program:", [program(torch.ones(1)).item() for _ in range(3)])
assert not told
assert [program(torch.ones(1)).item() for _ in range(3)] == [1.0, 1.0, 1.0]
PYTHON
