#!/usr/bin/env bash
# torch.export takes rows that one and the same mask selects for rows of two different numbers.
#
# Versions: torch 2.13.0 (CPU build), numpy 2.4.6, Python 3.11.
# What most would guess: z[m] and t[m] have as many rows as each other, so F.mse_loss(z[m], t[m]) exports as (z[m] - t[m]).pow(2).mean()
#   does.
# What happens: a mask that is computed twice, and masked_select even of one mask tensor, gives a new unbacked size each time;
#   F.mse_loss compares the sizes in Python and cannot decide.
# Output seen:
#   mse_loss(z[m], t[m]), m an input: exports
#   mse_loss(z[t > 0], t[t > 0]): Could not guard on data-dependent expression Eq(u1, u0) (unh
#   mse_loss of masked_select by one m: Could not guard on data-dependent expression Eq(u1, u0) (unh
#   the difference, written out: exports
# Fails (exit code 1) if this changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
import torch.nn.functional as F
from torch import nn


class Loss(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def forward(self, z, t, m):
        return self.compute(z, t, m)


CASES = {
    "mse_loss(z[m], t[m]), m an input": (lambda z, t, m: F.mse_loss(z[m], t[m]), True),
    "mse_loss(z[t > 0], t[t > 0])": (lambda z, t, m: F.mse_loss(z[t > 0], t[t > 0]), False),
    "mse_loss of masked_select by one m": (
        lambda z, t, m: F.mse_loss(torch.masked_select(z, m), torch.masked_select(t, m)),
        False,
    ),
    "the difference, written out": (lambda z, t, m: (z[m] - t[m]).pow(2).mean(), True),
}
z, t, m = torch.randn(8), torch.randn(8), torch.rand(8) > 0.5
for name, (compute, expected) in CASES.items():
    try:
        torch.export.export(Loss(compute), (z, t, m), strict=False)
        exports = True
    except Exception as error:
        exports = False
        reason = str(error).splitlines()[0][:60]
    print(f"{name}: {'exports' if exports else reason}")
    assert exports == expected, name
PYTHON
