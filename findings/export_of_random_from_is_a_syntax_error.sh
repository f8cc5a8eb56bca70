#!/usr/bin/env bash
# torch.export of x.random_(low, high) ends in a SyntaxError of Python.
#
# Versions: torch 2.13.0 (CPU build), numpy 2.4.6, Python 3.11.
# What most would guess: the operator is traced like x.random_(high) or x.uniform_(low, high).
# What happens: the overload is called "from", a keyword of Python; the code that export writes for the graph cannot be parsed.
#   x.random_(high) exports.
# Output seen:
#   random_(5): exported
#   random_(0, 5): SyntaxError
#   overloads of aten.random: ['from', 'from_out', 'to', 'to_out', 'default', 'out']
# Fails (exit code 1) if this changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch import nn


class Drawing(nn.Module):
    def __init__(self, *bounds):
        super().__init__()
        self.bounds = bounds

    def forward(self, x):
        return x + torch.empty_like(x).random_(*self.bounds)


x = torch.ones(4)
torch.export.export(Drawing(5), (x,), strict=False)
print("random_(5): exported")
try:
    torch.export.export(Drawing(0, 5), (x,), strict=False)
except SyntaxError as error:
    print("random_(0, 5):", type(error).__name__)
else:
    raise SystemExit("random_(0, 5) exports now")
print("overloads of aten.random:", torch.ops.aten.random.overloads())
PYTHON
