"""A stand-in for the command ``scontrol`` of Slurm."""

from __future__ import annotations

SCONTROL = """#!/bin/bash
echo "$*" >> "$CALLS/scontrol"
if [ "$1" = show ]; then for ((n = 0; n < SLURM_JOB_NUM_NODES; n++)); do echo "${HOST_NAME:-node$n}"; done; fi
"""
