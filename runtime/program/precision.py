"""Convert a program to another floating type, for example to float64 to verify it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from partitioner.passes.errors import InputsError
from partitioner.passes.ir.model import Block
from partitioner.passes.ir.rewrite import cast_graph_dtype, replace_floating_dtype
from partitioner.passes.ir.serialize import block_from_data, block_to_data, dtype_name, dtype_of, target_name
from partitioner.passes.ops.fp8 import convert_products_to_fp8, ops, restore_products
from partitioner.runtime.errors import LaunchError
from partitioner.runtime.program.program import BlockGraph, Program, Stage

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

_WITH_FP8 = (8, 9)  # compute capability of the first NVIDIA devices with fp8 matrix products
_WITH_EXPERTS = (9, 0)  # compute capability of the devices with grouped fp8 products with one scale per row
_WITH_BLOCKS = (10, 0)  # compute capability of the first devices with one scale per 32 numbers, and with fp4


def convert_precision(program: Program, precision: str | None) -> Program:
    """Return a copy of ``program`` in which every floating dtype, of tensors and inside graphs, is replaced by
    ``precision``: "bf16", "fp16", "fp32" or "fp64". If ``precision`` is ``None``, return ``program`` itself. Raise
    ``InputsError`` for other names.
    """
    if precision is None:
        return program
    if precision not in PRECISIONS:
        raise InputsError(f"precision must be one of {', '.join(PRECISIONS)} or None; got {precision!r}")
    dtype = PRECISIONS[precision]
    return program.model_copy(
        update={
            "blocks": {name: _retype_block(name, block, dtype) for name, block in program.blocks.items()},
            "states": {name: _replace_dtype(s, dtype) for name, s in program.states.items()},
            "values": {name: _replace_dtype(v, dtype) for name, v in program.values.items()},
            "inputs": tuple(_replace_dtype(i, dtype) for i in program.inputs),
        }
    )


def convert_to_fp8(program: Program, scaling: str = "tensor", blocks: Collection[str] | None = None) -> Program:
    """Return a copy of ``program`` in which matrix products with weights are computed in fp8, where the kernels support
    the dtypes and shapes. ``scaling``: which numbers share a scale: ``"tensor"``, ``"row"`` or ``"block"``;
    ``"nvfp4"``: products are computed in 4-bit floats instead. ``blocks``: names of the blocks (such as layers) to
    convert; ``None``: all.
    """

    def round_input(name: str, data: BlockGraph) -> BlockGraph:
        if blocks is not None and name not in blocks:
            return data
        block = block_from_data(name, data.nodes, data.states, data.inputs)
        changed = convert_products_to_fp8(block, scaling)
        return data.model_copy(update={"nodes": block_to_data(block)}) if changed else data

    return program.model_copy(update={"blocks": {n: round_input(n, block) for n, block in program.blocks.items()}})


def list_fp8_blocks(program: Program) -> frozenset[str]:
    """Return the names of the blocks (such as layers) of ``program`` that compute matrix products in fp8."""
    linear, experts = target_name(ops.linear_fp8.default), target_name(ops.expert_mm.default)
    return frozenset(
        name
        for name, block in program.blocks.items()
        if any(n.get("target") == linear or (n.get("target") == experts and n["args"][3:]) for n in block.nodes)
    )


@contextmanager
def allow_tf32_products(program: Program, device: torch.device) -> Iterator[None]:
    """Return a context manager in which float32 matrix products are computed in TF32, if ``program.tf32`` is set and
    ``device`` is a GPU. Otherwise the context manager changes nothing. The previous setting is restored on exit.
    """
    if not program.tf32 or device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def check_fp8(program: Program, device: torch.device) -> None:
    """Raise :class:`LaunchError` if ``program`` multiplies in 8-bit or 4-bit floats and the GPU ``device`` has no
    kernels for this scaling of the operands. Other devices than GPUs are not checked.
    """
    if device.type != "cuda":
        return
    name, experts = target_name(ops.linear_fp8.default), target_name(ops.expert_mm.default)
    every = [n for block in program.blocks.values() for n in block.nodes]
    nodes = [n for n in every if n.get("target") == name]
    capability = torch.cuda.get_device_capability(device)
    if any(n.get("target") == experts and n["args"][3:] for n in every) and capability != _WITH_EXPERTS:
        found = ".".join(map(str, capability))
        raise LaunchError(
            f"the plan multiplies rows with the matrices of their experts in fp8, for which "
            f"{torch.cuda.get_device_name(device)} (compute capability {found}) has no kernel; expected 9.0 (Hopper): "
            'plan with precision="bf16", or with fp8_scaling="block", which leaves experts in 16 bits'
        )
    scalings = {scaling for n in nodes for scaling in n["args"][4:]}
    blocks, short = bool(scalings & {"block", "nvfp4"}), "nvfp4" in scalings
    if short and not (hasattr(torch.nn.functional, "scaled_mm") and hasattr(torch, "float4_e2m1fn_x2")):
        raise LaunchError(
            f"the plan multiplies in NVFP4, for which torch {torch.__version__} has no product; expected torch 2.10 or "
            'later: install it, or plan with precision="bf16"'
        )
    needed = _WITH_BLOCKS if blocks else _WITH_FP8
    if not nodes or capability >= needed:
        return
    found, expected = ".".join(map(str, capability)), ".".join(map(str, needed))
    what = "in NVFP4" if short else "in MXFP8 (fp8_scaling='block')" if blocks else "in fp8"
    kinds = "Blackwell" if blocks else "Ada, Hopper, Blackwell"
    finer = 'precision="fp8"' if short else "fp8_scaling='row'"
    advice = finer if blocks and capability >= _WITH_FP8 else 'precision="bf16"'
    raise LaunchError(
        f"the plan multiplies {what}, for which {torch.cuda.get_device_name(device)} (compute capability {found}) "
        f"has no kernels; expected {expected} or more ({kinds}): plan with {advice}"
    )


def remove_compression(program: Program) -> Program:
    """Return a copy of ``program`` that sends gradients uncompressed, with the same instructions."""

    def make_uncompressed(stage: Stage) -> Stage:
        buckets = tuple(bucket.model_copy(update={"compression": None}) for bucket in stage.buckets)
        return stage.model_copy(update={"buckets": buckets})

    return program.model_copy(update={"stages": tuple(map(make_uncompressed, program.stages))})


def _replace_dtype(data: Any, dtype: torch.dtype) -> Any:
    given = dtype_of(data.dtype)
    wanted = replace_floating_dtype(given, dtype)
    return data if wanted == given else data.model_copy(update={"dtype": dtype_name(wanted)})


def _retype_block(name: str, data: BlockGraph, dtype: torch.dtype) -> BlockGraph:
    block: Block = block_from_data(name, data.nodes, data.states, data.inputs)
    restore_products(block)
    cast_graph_dtype(block.graph, dtype)
    return data.model_copy(update={"nodes": block_to_data(block)})
