#!/usr/bin/env bash
# peft puts LoRA adapters on Mamba's dt_proj, counts them as trainable, and they change nothing.
#
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0 (CPU build), numpy 2.4.6, Python 3.11.
# What most would guess: peft knows the layers of Mamba whose weights are read directly, since it refuses out_proj and conv1d
#   with a ValueError. An adapter that it makes has an effect.
# What happens: Mamba also multiplies by dt_proj.weight itself and never calls that layer. An adapter adds to what a call
#   returns, so that of dt_proj gets no gradient, and the outputs do not depend on it. There is no warning.
# Output seen:
#   refused: conv1d, out_proj
#   trainable with a gradient: dt_proj none, in_proj yes, x_proj yes
#   outputs change with the adapter: dt_proj False, in_proj True, x_proj True
# Fails (exit code 1) if this changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  torch==2.13.0 numpy==2.4.6 transformers==5.23.0 peft==0.21.2
cd "$work"
HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from peft import LoraConfig, get_peft_model
from transformers import MambaConfig, MambaForCausalLM

torch.manual_seed(0)
config = MambaConfig(vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=2, time_step_rank=4)
refused = []
for target in ("conv1d", "out_proj"):
    try:
        get_peft_model(MambaForCausalLM(config), LoraConfig(r=4, target_modules=[target]))
    except ValueError:
        refused.append(target)
targets = ["in_proj", "x_proj", "dt_proj"]
model = get_peft_model(MambaForCausalLM(config), LoraConfig(r=4, target_modules=targets))
tokens = torch.randint(0, 64, (2, 16))
adapters = {n: p for n, p in model.named_parameters() if "lora_B" in n}
kinds = sorted({n.split(".lora_B")[0].rpartition(".")[2] for n in adapters})
model(input_ids=tokens, labels=tokens).loss.backward()


def gradient(kind):
    grads = [p.grad for n, p in adapters.items() if f".{kind}." in n]
    return "none" if all(g is None for g in grads) else "yes" if all(g.abs().max() > 0 for g in grads) else "some"


def matters(kind):
    before = model(input_ids=tokens).logits
    with torch.no_grad():
        for name, parameter in adapters.items():
            if f".{kind}." in name:
                parameter.normal_()
    return not torch.equal(before, model(input_ids=tokens).logits)


grads = {kind: gradient(kind) for kind in kinds}
changes = {kind: matters(kind) for kind in kinds}
print("refused:", ", ".join(refused))
print("trainable with a gradient:", ", ".join(f"{kind} {told}" for kind, told in grads.items()))
print("outputs change with the adapter:", ", ".join(f"{kind} {told}" for kind, told in changes.items()))
assert refused == ["conv1d", "out_proj"]
assert grads["dt_proj"] == "none" and not changes["dt_proj"]
assert grads["in_proj"] == "yes" and changes["in_proj"]
PYTHON
