"""Written configurations are accepted by the frameworks' own parsers. The packages are installed into a folder of their
own, without their dependencies on CUDA.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from partitioner import TrainingLayout, write_layout
from tests.helpers.paths import ROOT

PACKAGES = (
    *("accelerate==1.15.0", "torchtitan==0.3.0", "megatron-core==0.16.1", "psutil"),
    *("tyro", "docstring-parser", "shtab", "typeguard", "spmd_types"),
)
OF_DEEPSPEED = ("deepspeed==0.19.8", "hjson", "py-cpuinfo", "einops", "msgpack", "psutil")

LAYOUTS = {
    "fsdp": TrainingLayout(
        framework="any", dp=8, dp_shard=8, zero=3, microbatch_size=2, microbatches=2, recompute="full",
        precision="bf16", optimizer="adamw", seq_length=2048,
    ),
    "hybrid": TrainingLayout(
        framework="any", dp=4, dp_shard=2, dp_replicate=2, tp=2, zero=3, microbatch_size=1, microbatches=4,
        sequence_parallel=True, recompute="alternate", precision="bf16", optimizer="adamw", seq_length=2048,
    ),
    "pipeline": TrainingLayout(
        framework="any", dp=2, pp=2, tp=2, zero=1, microbatch_size=1, microbatches=4, schedule="interleaved",
        virtual_stages=2, sequence_parallel=True, recompute="none", precision="bf16", optimizer="adamw",
        seq_length=2048,
    ),
    "uneven": TrainingLayout(
        framework="any", dp=4, pp=2, zero=1, microbatch_size=1, microbatches=4, schedule="1f1b", stage_layers=(3, 5),
        recompute="scores", precision="bf16", optimizer="adamw", seq_length=2048,
    ),
    "context": TrainingLayout(
        framework="any", dp=2, cp=4, zero=3, microbatch_size=1, microbatches=1, context="all_gather", recompute="full",
        precision="bf16", optimizer="adamw", seq_length=4096,
    ),
    "experts": TrainingLayout(
        framework="any", dp=8, ep=4, etp=1, zero=3, microbatch_size=1, microbatches=2, recompute="none",
        precision="bf16", optimizer="adamw", seq_length=2048,
    ),
    "replicas": TrainingLayout(
        framework="any", dp=8, zero=0, microbatch_size=4, microbatches=1, recompute="none",
        precision="bf16", optimizer="adamw", seq_length=2048,
    ),
    "offload": TrainingLayout(
        framework="any", dp=8, zero=3, offload=("optimizer", "parameters"), microbatch_size=4, microbatches=1,
        recompute="full", precision="bf16", optimizer="adamw", seq_length=2048,
    ),
}  # fmt: skip

# Modules that the trainer of torchtitan imports for data and logs, which have nothing to do with its options.
_STAND_INS = """
import importlib.abc, importlib.machinery, sys, types
NAMES = ("datasets", "torchdata", "tensorboard", "wandb", "torchao", "tokenizers")
FOLDERS = ("torch.utils.tensorboard", "torchtitan.distributed.minimal_async_ep")  # the latter are kernels of GPUs
class StandIn(types.ModuleType):
    __path__, __version__ = [], "99.0"
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init_subclass__": classmethod(lambda cls, **given: None)})
        setattr(self, name, made)
        return made
class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in NAMES or name.startswith(FOLDERS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return StandIn(spec.name)
    def exec_module(self, module):
        pass
sys.meta_path.insert(0, StandIns())
"""

CHECKS = {
    "accelerate": """
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
arguments = launch_command_parser().parse_args(["--config_file", FILE, "train.py"])
arguments, _, _ = _validate_launch_command(arguments)
assert arguments.num_processes > 0, arguments.num_processes
""",
    "torchtitan": _STAND_INS
    + """
import importlib.util
spec = importlib.util.spec_from_file_location("planned", FILE)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
config = module.planned()
sizes = config.parallelism
from torchtitan.distributed import ParallelDims
dims = ParallelDims(
    dp_replicate=sizes.data_parallel_replicate_degree, dp_shard=sizes.data_parallel_shard_degree,
    cp=sizes.context_parallel_degree, tp=sizes.tensor_parallel_degree, pp=sizes.pipeline_parallel_degree,
    ep=sizes.expert_parallel_degree, world_size=8,
)
""",
    "deepspeed": """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed.runtime.config import DeepSpeedConfig
config = DeepSpeedConfig(FILE)
assert config.gradient_accumulation_steps, config
""",
    "megatron": """
import torch, yaml
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
given = yaml.safe_load(open(FILE))
model = given["model"]
model.pop("seq_length", None)
model["pipeline_dtype"] = torch.bfloat16 if model.get("pipeline_dtype") else None
more = {"num_moe_experts": 8} if model["expert_model_parallel_size"] > 1 else {}
more |= {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "bf16": True, "add_bias_linear": False}
TransformerConfig(**model, **more)
DistributedDataParallelConfig(**given.get("ddp", {}))
optimizer = given.get("optimizer", {})
for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):  # ask for Transformer Engine
    optimizer.pop(name, None)
OptimizerConfig(**optimizer)
""",
}
FILES = {
    "accelerate": "a.yaml",
    "torchtitan": "planned.py",
    "deepspeed": "ds.json",
    "megatron": "megatron.yaml",
}


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the frameworks; the test is skipped if they cannot be installed."""
    folder = tmp_path_factory.mktemp("frameworks")
    for names in (PACKAGES, OF_DEEPSPEED):
        more = ["--no-build-isolation"] if names is OF_DEEPSPEED else []
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", *more, "--target", folder, *names],
            capture_output=True,
            text=True,
            env={**os.environ, "DS_BUILD_OPS": "0", "DS_IGNORE_CUDA_DETECTION": "1"},
        )
        if done.returncode:
            pytest.skip(f"pip cannot install {', '.join(names)}: {done.stderr.strip()[-200:]}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_frameworks_accept_what_is_written(name: str, packages: Path, tmp_path: Path) -> None:
    failed = []
    for case, layout in LAYOUTS.items():
        file = tmp_path / case / FILES[name]
        write_layout(layout.at(8), name, file)
        script = tmp_path / case / "check.py"
        script.write_text(CHECKS[name].replace("FILE", repr(str(file))))
        done = subprocess.run(
            [sys.executable, script],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)])},
        )
        if done.returncode:
            failed.append((case, done.stderr.strip().splitlines()[-1]))
    assert failed == []


@pytest.mark.parametrize("case", LAYOUTS)
def test_transformers_accepts_what_is_written(case: str, tmp_path: Path) -> None:
    import json

    distributed = pytest.importorskip("transformers.distributed")
    write_layout(LAYOUTS[case].at(8), "transformers", tmp_path / "a.json")
    config = distributed.DistributedConfig(**json.loads((tmp_path / "a.json").read_text()))
    assert config.tp_size == LAYOUTS[case].tp
