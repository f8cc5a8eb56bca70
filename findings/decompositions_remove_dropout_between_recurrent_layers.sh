#!/usr/bin/env bash
# ExportedProgram.run_decompositions() removes the dropout between the layers of nn.LSTM, nn.GRU and nn.RNN from a program in
# training mode, and says nothing.
#
# Versions: torch 2.13.0 (CPU build), numpy 2.4.6, Python 3.11.
# What most would guess: decompositions keep what a program computes. nn.Dropout, in the same program, is kept.
# What happens: the exported program draws dropout at every call, as the module does. The decomposed one has no operator that
#   draws, for the network: each call returns what the module returns in evaluation mode.
# Output seen:
#   LSTM: module draws True, exported True, decomposed False, decomposed equals evaluation True
#   GRU: module draws True, exported True, decomposed False, decomposed equals evaluation True
#   RNN: module draws True, exported True, decomposed False, decomposed equals evaluation True
#   Dropout: decomposed draws True
# Fails (exit code 1) if this changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch import nn


def draws(run, x):
    """Whether two calls differ."""
    first, second = (run(x) for _ in range(2))
    first, second = (y[0] if isinstance(y, tuple) else y for y in (first, second))
    return not torch.equal(first, second)


torch.manual_seed(0)
x = torch.randn(5, 3, 8)
for kind in (nn.LSTM, nn.GRU, nn.RNN):
    network = kind(8, 8, num_layers=2, dropout=0.5).train()
    program = torch.export.export(network, (x,))
    decomposed = program.run_decompositions().module()
    found = draws(network, x), draws(program.module(), x), draws(decomposed, x)
    same = torch.allclose(decomposed(x)[0], network.eval()(x)[0])
    print(f"{kind.__name__}: module draws {found[0]}, exported {found[1]}, decomposed {found[2]}, "
          f"decomposed equals evaluation {same}")
    assert found == (True, True, False) and same

dropout = torch.export.export(nn.Dropout(0.5).train(), (x,)).run_decompositions().module()
print(f"Dropout: decomposed draws {draws(dropout, x)}")
assert draws(dropout, x)
PYTHON
