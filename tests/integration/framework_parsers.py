"""Parse configurations with the frameworks' own code. A script: it runs in the environment of one framework.

``python framework_parsers.py FRAMEWORK FOLDER`` parses each file of ``FOLDER``, and prints one JSON object: file
name -> ``{"facts": {...}}`` with what the framework understood, by the names of the fields of a layout, or
``{"error": "..."}``.
The first line of a file ``NAME.devices`` is the number of devices of the layout in ``NAME``.
"""

import contextlib
import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Facts = dict[str, Any]


_FORMATS = {"fp4": "nvfp4", "fp8": "fp8", "bf16": "bf16", "fp16": "fp16"}  # option of Megatron -> precision


def parse_torchtitan(path: Path, devices: int) -> Facts:
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims

    sys.path.insert(0, str(path.parent))
    config = ConfigManager().parse_args(["--module", path.stem, "--config", "planned"])
    sizes = config.parallelism
    dims = ParallelDims(
        dp_replicate=sizes.data_parallel_replicate_degree, dp_shard=sizes.data_parallel_shard_degree,
        cp=sizes.context_parallel_degree, tp=sizes.tensor_parallel_degree, pp=sizes.pipeline_parallel_degree,
        ep=sizes.expert_parallel_degree, world_size=devices,
    )  # fmt: skip
    recompute = type(config.activation_checkpoint).__qualname__ if config.activation_checkpoint else "None"
    return {
        "tp": dims.tp, "pp": dims.pp, "cp": dims.cp, "ep": dims.ep, "dp": dims.dp_replicate * dims.dp_shard,
        "seq_length": config.training.seq_len, "global_batch": config.training.global_batch_size,
        "recompute": {"FullAC.Config": "full", "SelectiveAC.Config": "alternate", "None": "none"}[recompute],
    }  # fmt: skip


def parse_deepspeed(path: Path, devices: int) -> Facts:
    from deepspeed.runtime import config as runtime

    runtime.dist.get_world_size = lambda group=None: devices
    runtime.dist.is_initialized = lambda: True
    config = runtime.DeepSpeedConfig(str(path))
    experts = config.expert_parallel_config
    return {
        "tp": max(1, config.tensor_parallel_config.autotp_size),
        "cp": config._param_dict.get("sequence_parallel_size", 1),
        "ep": experts.autoep_size if experts.enabled else 1,
        "zero": int(config.zero_config.stage),
        "microbatch_size": config.train_micro_batch_size_per_gpu,
        "microbatches": config.gradient_accumulation_steps,
        "precision": "bf16" if config.bfloat16_config.enabled else "fp16" if config.float16_config.enabled else "fp32",
    }


def parse_megatron(path: Path, devices: int) -> Facts:
    """Of a configuration of Megatron-Bridge, the sections that are dataclasses of Megatron-Core."""
    import torch
    import yaml
    from megatron.core import utils
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig
    from packaging.version import Version

    utils.get_te_version = lambda: Version("2.10.0")  # which kernels are installed concerns the machine, not the file
    nested = yaml.safe_load(path.read_text())
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    given = {name: value for name, value in nested["model"].items() if name in fields}
    beside = {*nested["model"]} - fields - {"seq_length"}
    if beside:
        raise TypeError(f"fields of no model: {sorted(beside)}")
    kinds = {name: value for name, value in nested.get("mixed_precision", {}).items() if name in fields}
    if "pipeline_dtype" in given:
        given["pipeline_dtype"] = getattr(torch, given["pipeline_dtype"].removeprefix("torch."))
    experts = {"num_moe_experts": 8, "add_bias_linear": False} if given["expert_model_parallel_size"] > 1 else {}
    layers = int(os.environ["PARSED_LAYERS"])
    with contextlib.redirect_stdout(io.StringIO()):
        config = TransformerConfig(
            **{"num_layers": layers, "hidden_size": 64, "num_attention_heads": 8} | given | kinds | experts
        )
    ddp = DistributedDataParallelConfig(**nested.get("ddp", {}))
    OptimizerConfig(**nested.get("optimizer", {}))
    found: Facts = {
        "tp": config.tensor_model_parallel_size, "pp": config.pipeline_model_parallel_size,
        "cp": config.context_parallel_size, "ep": config.expert_model_parallel_size,
        "sharded": bool(ddp.use_distributed_optimizer),
        "precision": next((p for o, p in _FORMATS.items() if getattr(config, o, None)), "fp32"),
    }  # fmt: skip
    if config.pipeline_model_parallel_size > 1:
        found["virtual_stages"] = config.virtual_pipeline_model_parallel_size
    return found


def parse_accelerate(path: Path, devices: int) -> Facts:
    """As ``accelerate launch`` does: the file becomes arguments, these become variables of the environment."""
    from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.commands import launch
    from accelerate.utils import launch as variables

    variables.is_fp8_available = lambda: True  # kernels for fp8 concern the machine, not the file
    arguments = launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, _, _ = launch._validate_launch_command(arguments)
    made = variables.prepare_multi_gpu_env(arguments)
    kept = dict(os.environ)
    os.environ.update(made)
    try:
        sizes = ParallelismConfig() if arguments.use_parallelism_config else None
        found: Facts = {"devices": arguments.num_processes, "precision": {"no": "fp32"}.get(
            arguments.mixed_precision, arguments.mixed_precision)}  # fmt: skip
        if sizes is not None:
            found |= {"tp": sizes.tp_size, "cp": sizes.cp_size * sizes.sp_size}
            found["dp"] = sizes.dp_replicate_size * sizes.dp_shard_size
        if arguments.use_fsdp:
            plugin = FullyShardedDataParallelPlugin()
            found["zero"] = 3 if plugin.reshard_after_forward else 2
            found["recompute"] = "full" if plugin.activation_checkpointing else "none"
        return found
    finally:
        os.environ.clear()
        os.environ.update(kept)


def parse_transformers(path: Path, devices: int) -> Facts:
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(**json.loads(path.read_text()))
    return {
        "tp": config.tp_size or 1, "pp": config.pp_size or 1, "ep": config.ep_size or 1,
        "dp": (config.fsdp_size or 1) * (config.dp_replicate_size or 1),
    }  # fmt: skip


PARSERS: dict[str, Callable[[Path, int], Facts]] = {
    "torchtitan": parse_torchtitan,
    "deepspeed": parse_deepspeed,
    "megatron": parse_megatron,
    "accelerate": parse_accelerate,
    "transformers": parse_transformers,
}


def main() -> None:
    framework, folder = sys.argv[1], Path(sys.argv[2])
    found: dict[str, Facts] = {}
    for path in sorted(folder.iterdir()):
        count = path.with_name(f"{path.name}.devices")
        if not count.exists():
            continue
        try:
            with contextlib.redirect_stdout(sys.stderr):
                found[path.name] = {"facts": PARSERS[framework](path, int(count.read_text()))}
        except (Exception, SystemExit) as error:  # whatever the framework raises is the result
            found[path.name] = {"error": f"{type(error).__name__}: {error}"[:400]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
