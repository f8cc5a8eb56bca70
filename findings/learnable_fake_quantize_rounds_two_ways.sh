#!/usr/bin/env bash
# Learnable fake quantisation rounds one way in forward and another in backward; and float64 is computed in float32.
#
# Versions: torch 2.13.0 (CPU build), numpy 2.4.6, Python 3.11.
# What most would guess: the gradient is zero exactly where forward has clamped, and float64 inputs give float64 accuracy.
# What happens: forward computes round(x / scale) + zero_point, backward round(x / scale + zero_point): at ties a value that
#   forward clamps passes its gradient, or the other way round. fake_quantize_per_tensor_affine of float64 rounds
#   the scale to float32.
# Output seen:
#   x:                       [-6.5, -5.5, 4.5, 5.5]
#   not clamped by forward:  [True, True, True, False]
#   gradient passes:         [False, True, True, True]
#   0.3 in float64, step 0.1: 0.30000001192092896
# Fails (exit code 1) if this changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch

low, high = -5, 6
x = torch.tensor([-6.5, -5.5, 4.5, 5.5], requires_grad=True)
scale, zero = torch.tensor([1.0], requires_grad=True), torch.tensor([1.0], requires_grad=True)
y = torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero, low, high, 1.0)
y.sum().backward()
inside = [low <= v <= high for v in (torch.round(x.detach()) + 1).tolist()]
passed = [g != 0 for g in x.grad.tolist()]
print("x:                      ", x.tolist())
print("not clamped by forward: ", inside)
print("gradient passes:        ", passed)
assert inside != passed

wide = torch.tensor([0.3], dtype=torch.float64)
got = torch.fake_quantize_per_tensor_affine(wide, 0.1, 0, -128, 127).item()
print("0.3 in float64, step 0.1:", repr(got))
assert abs(got - 0.3) > 1e-9
PYTHON
