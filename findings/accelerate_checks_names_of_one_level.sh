#!/usr/bin/env bash
# accelerate refuses a misspelt name at the top of its configuration, and takes one inside fsdp_config without a word.
#
# Versions: accelerate 1.15.0, torch 2.13.0 (CPU build), numpy 2.4.6, Python 3.11.
# What most would guess: both levels are checked, since the top one is; or the launched job gets the value and refuses it.
# What happens: the name inside fsdp_config is kept as an attribute that nothing reads. The job is launched with the default: the
#   file says that parameters stay gathered after forward (ZeRO-2), and they are resharded (ZeRO-3).
# Output seen:
#   misspelt at the top: ValueError, unknown keys (['mixed_precison'])
#   misspelt in fsdp_config: accepted, FSDP_RESHARD_AFTER_FORWARD=true
#   spelt well: FSDP_RESHARD_AFTER_FORWARD=false
# Fails (exit code 1) if this changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  torch==2.13.0 numpy==2.4.6 accelerate==1.15.0
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
from pathlib import Path

from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

CONFIGURATION = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
{precision}: bf16
num_processes: 8
num_machines: 1
machine_rank: 0
use_cpu: false
fsdp_config:
  fsdp_version: 2
  {reshard}: false
"""
GOOD = {"precision": "mixed_precision", "reshard": "fsdp_reshard_after_forward"}


def launched_with(**names):
    path = Path("configuration.yaml")
    path.write_text(CONFIGURATION.format(**{**GOOD, **names}))
    load_config_from_file(str(path))
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    return prepare_multi_gpu_env(_validate_launch_command(arguments)[0])["FSDP_RESHARD_AFTER_FORWARD"]


try:
    launched_with(precision="mixed_precison")
    refused = ""
except ValueError as error:
    refused = str(error)
inside, good = launched_with(reshard="fsdp_reshard_after_foward"), launched_with()
print("misspelt at the top: ValueError, unknown keys", refused.partition("unknown keys ")[2].partition(",")[0])
print(f"misspelt in fsdp_config: accepted, FSDP_RESHARD_AFTER_FORWARD={inside}")
print(f"spelt well: FSDP_RESHARD_AFTER_FORWARD={good}")
assert "mixed_precison" in refused
assert (inside, good) == ("true", "false")
PYTHON
