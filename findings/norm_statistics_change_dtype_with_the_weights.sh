#!/usr/bin/env bash
# The statistics that torch's norms save for backward have a dtype that depends on the kind of norm, on the dtype of the weights
# and on the device: on the device "meta", whose results stand for those of all others, layer_norm has another one than on CPU.
#
# Versions: torch 2.13.0 (CPU build), numpy 2.4.6, Python 3.11.
# What most would guess: mean and rstd of a bfloat16 input are float32 everywhere, as in the CUDA kernels, and what an operator
#   returns on meta tensors has the dtypes that it returns on CPU.
# What happens: on CPU, native_layer_norm saves bfloat16 statistics if the weights are bfloat16, too, and float32 ones if the weights
#   are float32. On meta it always saves float32, and a fake CPU tensor promises bfloat16 in both cases: each of the two is wrong
#   about the real CPU once. native_group_norm saves bfloat16 everywhere, and _fused_rms_norm float32.
#   So bytes of saved tensors that are counted on meta or on fake tensors are not those of a CPU.
# Output seen:
#   layer_norm, bfloat16 weights: cpu bfloat16 bfloat16, fake cpu bfloat16 bfloat16, meta float32 float32
#   layer_norm, float32 weights: cpu float32 float32, fake cpu bfloat16 bfloat16, meta float32 float32
#   group_norm, bfloat16 weights: cpu bfloat16 bfloat16, fake cpu bfloat16 bfloat16, meta bfloat16 bfloat16
#   rms_norm, bfloat16 weights: cpu float32, fake cpu float32, meta float32
# Fails (exit code 1) if this changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten
SHORT, LONG = torch.bfloat16, torch.float32
# name -> (operator on input, weight and bias; dtype of the weights; expected dtypes on CPU, on fake CPU tensors, and on meta)
CASES = {
    "layer_norm, bfloat16 weights": (lambda x, w, b: aten.native_layer_norm(x, [8], w, b, 1e-5)[1:], SHORT, SHORT, SHORT, LONG),
    "layer_norm, float32 weights": (lambda x, w, b: aten.native_layer_norm(x, [8], w, b, 1e-5)[1:], LONG, LONG, SHORT, LONG),
    "group_norm, bfloat16 weights": (
        lambda x, w, b: aten.native_group_norm(x.unsqueeze(-1), w, b, 4, 8, 1, 2, 1e-5)[1:],
        SHORT,
        SHORT,
        SHORT,
        SHORT,
    ),
    "rms_norm, bfloat16 weights": (lambda x, w, b: aten._fused_rms_norm(x, [8], w, 1e-5)[1:], SHORT, LONG, LONG, LONG),
}


def dtypes(results):
    return " ".join(str(each.dtype).removeprefix("torch.") for each in results)


for name, (norm, kind, on_cpu, on_fake, on_meta) in CASES.items():
    given = torch.randn(4, 8).to(SHORT), torch.ones(8, dtype=kind), torch.zeros(8, dtype=kind)
    cpu = norm(*given)
    meta = norm(*(each.to("meta") for each in given))
    with FakeTensorMode() as mode:
        fake = norm(*map(mode.from_tensor, given))
    print(f"{name}: cpu {dtypes(cpu)}, fake cpu {dtypes(fake)}, meta {dtypes(meta)}")
    assert {each.dtype for each in cpu} == {on_cpu} and {each.dtype for each in fake} == {on_fake}, name
    assert {each.dtype for each in meta} == {on_meta}, name
PYTHON
