"""What configurations of each framework mean: mesh, batch, schedule, states, recomputation, types, profile."""

import json
from pathlib import Path
from typing import Any

import pytest

from partitioner import ContradictionError, OptionValueError, TrainingLayout, read_layout
from partitioner.interop.layout import divide_layers
from partitioner.interop.options import NO_EFFECT, NOT_USED, OF_MODEL
from partitioner.interop.predict import group_unused
from partitioner.interop.transformers_arguments import read_transformers


def read_file(tmp_path: Path, name: str, text: str, format_name: str | None = None) -> TrainingLayout:
    (tmp_path / name).write_text(text)
    return read_layout(tmp_path / name, format_name)


def unused_of(layout: TrainingLayout) -> dict[str, str]:
    return {option.option: option.reason for option in layout.unused}


MEGATRON = "--micro-batch-size 1 --global-batch-size 64 --bf16 "


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("--tensor-model-parallel-size 4 --sequence-parallel", {"tp": 4, "sequence_parallel": True}),
        ("--tensor-model-parallel-size 4", {"sequence_parallel": False, "zero": 0, "recompute": "none"}),
        ("--context_parallel_size=2 --cp-comm-type a2a", {"cp": 2, "context": "ulysses"}),
        ("--expert-model-parallel-size 4 --tensor-model-parallel-size 2", {"ep": 4, "etp": 2}),
        ("--pipeline-model-parallel-size 4", {"pp": 4, "schedule": "1f1b", "virtual_stages": None}),
        (
            "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 --num-layers 32",
            {"schedule": "interleaved", "virtual_stages": 4, "layers_per_stage": 2},
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E(t|)*3tttL",
            {"stage_layers": (1, 1, 1, 3), "virtual_stages": 2, "schedule": "interleaved"},
        ),
        (
            "--pipeline-model-parallel-size 4 --num-layers 14 --decoder-first-pipeline-num-layers 2 "
            "--decoder-last-pipeline-num-layers 4",
            {"stage_layers": (2, 4, 4, 4)},
        ),
        ("--recompute-activations", {"recompute": "scores"}),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", {"recompute": "full"}),
        ("--recompute-granularity selective --recompute-modules layernorm moe_act", {"recompute": "selective"}),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", {"zero": 1, "dp_replicate": 2}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", {"zero": 2}),
        ("--use-torch-fsdp2", {"zero": 3}),
        ("--fp8-format hybrid", {"precision": "fp8"}),
        ("--bf16 --fp4-format e2m1 --fp4-recipe nvfp4", {"precision": "nvfp4"}),
        ("--optimizer sgd --sgd-momentum 0", {"optimizer": "sgd"}),
        ("--optimizer-cpu-offload", {"offload": ("optimizer",)}),
    ],
)
def test_megatron_options(text: str, facts: dict[str, Any]) -> None:
    layout = read_layout(MEGATRON + text)
    assert {name: getattr(layout, name) for name in facts} == facts


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("--overlap-grad-reduce --overlap-param-gather", {"overlap": True}),
        ("--grad-reduce-in-bf16", {"short_gradients": True}),
        ("", {"overlap": False, "short_gradients": False, "dispatch": "parts", "graphs": "none"}),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep", {"dispatch": "once"}),
        ("--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0", {"even_experts": "padded"}),
        ("--fp8-format e4m3 --fp8-recipe tensorwise", {"current_scaling": True}),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", {"graphs": "all"}),
        ("--no-scatter-gather-tensors-in-pipeline", {"sends": "whole"}),
    ],
)
def test_megatron_profile(text: str, facts: dict[str, Any]) -> None:
    profile = read_layout(MEGATRON + text).profile
    assert {name: getattr(profile, name) for name in facts} == facts


def test_every_given_option_is_read_or_listed() -> None:
    layout = read_layout(MEGATRON + "--lr 3e-4 --num-layers 32 --rampup-batch-size 16 16 1000 --moe-grouped-gemm")
    found = unused_of(layout)
    assert {"--lr", "--num-layers", "--rampup-batch-size"} == found.keys()
    assert "model" in found["--num-layers"]


def test_a_shell_script_is_read_and_not_executed(tmp_path: Path) -> None:
    trap = tmp_path / "touched"
    script = f"""#!/bin/bash
set -euo pipefail   # a comment
NODES=2
PER_NODE=8
TP=${{1:-"4"}}
MODE=${{2:-"bf16"}}
touch {trap}
SIZES=(
    --tensor-model-parallel-size $TP
    --micro-batch-size 1   # small
    --global-batch-size $((16 * 8))
)
if [[ "$MODE" == "fp8" ]]; then
    TYPES="--fp8-format hybrid"
elif [[ "$MODE" == "bf16" ]]; then
    TYPES="--bf16"
else
    TYPES="--fp16"
fi
SIZES+=(--save "$(touch {trap})/checkpoints of a run")
torchrun --nproc_per_node $PER_NODE --nnodes $NODES \\
    train.py ${{SIZES[@]}} $TYPES
"""
    layout = read_file(tmp_path, "train.sh", script)
    assert (layout.tp, layout.devices, layout.global_batch, layout.precision) == (4, 16, 128, "bf16")
    assert not trap.exists()


BRIDGE = """
model:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: 2
  sequence_parallel: true
  recompute_granularity: selective
  recompute_modules: [core_attn]
train: {micro_batch_size: 1, global_batch_size: 256, train_iters: 100}
ddp: {use_distributed_optimizer: true, overlap_grad_reduce: true, overlap_param_gather: true}
mixed_precision: bf16_with_fp8_current_scaling_mixed
dataset: {sequence_length: 4096, path: somewhere}
"""


def test_megatron_bridge(tmp_path: Path) -> None:
    layout = read_file(tmp_path, "recipe.yaml", BRIDGE)
    assert (layout.tp, layout.pp, layout.virtual_stages, layout.schedule) == (2, 4, 2, "interleaved")
    assert (layout.precision, layout.zero, layout.recompute, layout.seq_length) == ("fp8", 1, "scores", 4096)
    assert layout.profile.current_scaling and layout.profile.overlap and layout.profile.short_gradients
    assert {"train.train_iters", "dataset.path"} <= unused_of(layout).keys()


def test_core_fields_without_sections(tmp_path: Path) -> None:
    layout = read_file(tmp_path, "core.yaml", "tensor_model_parallel_size: 2\nbf16: true\nnum_layers: 4\n")
    assert (layout.framework, layout.tp, layout.precision) == ("megatron-bridge", 2, "bf16")


TOML = """
[training]
local_batch_size = 4
seq_len = 8192
steps = 1000
[parallelism]
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
data_parallel_replicate_degree = 2
[activation_checkpoint]
mode = "full"
[optimizer]
name = "AdamW"
lr = 3e-4
"""


def test_torchtitan_toml(tmp_path: Path) -> None:
    layout = read_file(tmp_path, "train.toml", TOML).at(16)
    assert (layout.dp, layout.dp_shard, layout.dp_replicate, layout.zero) == (4, 2, 2, 2)
    assert (layout.microbatch_size, layout.microbatches, layout.global_batch) == (1, 4, 16)
    assert (layout.schedule, layout.virtual_stages, layout.recompute) == ("interleaved", 2, "full")
    assert divide_layers(layout, 14) == (3, 4, 4, 3)
    assert "optimizer.lr" in unused_of(layout)


MODULE = """
LENGTH = 4096
def base() -> Trainer.Config:
    return Trainer.Config(
        model_spec=registry("small", converters=[Float8LinearConverter.Config()]),
        optimizer=default_adamw(lr=8e-4),
        training=TrainingConfig(local_batch_size=2, seq_len=LENGTH),
        parallelism=ParallelismConfig(tensor_parallel_degree=2, fsdp_reshard_after_forward="never"),
        activation_checkpoint=SelectiveAC.Config(),
    )
def larger() -> Trainer.Config:
    config = base()
    config.parallelism.pipeline_parallel_degree = 2
    config.training.disable_cuda_graphs = True
    config.training.steps = os.environ["STEPS"]
    config.activation_checkpoint = None
    return config
"""


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ("data_parallel_degree = 4", {"dp": 4, "dp_shard": 4, "dp_replicate": 1, "zero": 3}),
        ("data_parallel_degree = -1", {"dp": None, "dp_shard": None, "dp_replicate": 1, "zero": 3}),
        ("data_parallel_degree = 4\ndata_parallel_type = 'ddp'", {"dp": 4, "dp_shard": None, "zero": 0}),
        ("data_parallel_type = 'ddp'", {"dp": None, "dp_shard": None, "zero": 0}),
    ],
)
def test_the_data_parallel_degree_of_early_torchtitan(
    training: str, expected: dict[str, int | None], tmp_path: Path
) -> None:
    path = tmp_path / "train.toml"
    path.write_text(f"[training]\n{training}\ntensor_parallel_degree = 2\n")
    layout = read_layout(path)
    assert {name: getattr(layout, name) for name in expected} == expected
    assert layout.tp == 2 and not layout.unused


@pytest.mark.parametrize(
    ("converter", "precision"), [("nvfp4", "nvfp4"), ("mx", "fp8"), ("quantize.linear.float8", "fp8")]
)
def test_torchtitan_converters(converter: str, precision: str, tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(f"[training]\nlocal_batch_size = 2\n[model]\nconverters = ['{converter}']\n")
    assert read_layout(path).precision == precision


def test_nvfp4_of_named_recipes_and_modules(tmp_path: Path) -> None:
    (tmp_path / "bridge.yaml").write_text(
        "model: {tensor_model_parallel_size: 2}\nmixed_precision: bf16_with_nvfp4_mixed\n"
    )
    layout = read_layout(tmp_path / "bridge.yaml")
    assert layout.precision == "nvfp4" and not [name for name in unused_of(layout) if "fp4" in name]
    (tmp_path / "configs.py").write_text(MODULE.replace("Float8LinearConverter", "NVFP4LinearConverter"))
    assert read_layout(f"{tmp_path / 'configs.py'}:base").precision == "nvfp4"


def test_a_custom_recipe_of_fp4_is_noted() -> None:
    layout = read_layout(MEGATRON + "--bf16 --fp4-format e2m1 --fp4-recipe custom")
    assert layout.precision == "nvfp4"
    assert "priced as those of nvfp4" in next(u.reason for u in layout.unused if "fp4" in u.option)


def test_torchtitan_module(tmp_path: Path) -> None:
    (tmp_path / "configs.py").write_text(MODULE)
    base = read_layout(f"{tmp_path / 'configs.py'}:base")
    assert (base.tp, base.zero, base.precision, base.recompute, base.profile.graphs) == (
        2,
        2,
        "fp8",
        "alternate",
        "all",
    )
    larger = read_layout(f"{tmp_path / 'configs.py'}:larger")
    assert (larger.pp, larger.seq_length, larger.recompute, larger.profile.graphs) == (2, 4096, "none", "none")
    assert "without running" in unused_of(larger)["training.steps"]


def test_torchtitan_flags() -> None:
    layout = read_layout("--training.local_batch_size 2 --parallelism.tensor_parallel_degree=4", "torchtitan")
    assert (layout.tp, layout.microbatch_size) == (4, 2)


DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "stage3_param_persistence_threshold": 1e5,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "gradient_clipping": 1.0,
}


def test_deepspeed(tmp_path: Path) -> None:
    layout = read_file(tmp_path, "ds.json", json.dumps(DEEPSPEED)).at(8)
    assert (layout.zero, layout.offload, layout.precision) == (3, ("optimizer", "parameters"), "bf16")
    assert (layout.dp, layout.global_batch, layout.profile.overlap) == (8, 64, True)
    assert {"gradient_clipping", "optimizer.params"} <= unused_of(layout).keys()


@pytest.mark.parametrize(("old", "zero"), [("true", 1), ("false", 0)])
def test_deepspeed_reads_the_old_form_of_zero(tmp_path: Path, old: str, zero: int) -> None:
    """``zero_optimization: true`` is stage 1; it was read as no ZeRO, and listed as an option without effect."""
    file = tmp_path / "ds.json"
    file.write_text(f'{{"zero_optimization": {old}, "train_micro_batch_size_per_gpu": 2}}')
    found = read_layout(file)
    assert (found.zero, found.unused) == (zero, ())


def test_deepspeed_axes_and_automatic_values(tmp_path: Path) -> None:
    given = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": "1", "overlap_comm": True},
        "tensor_parallel": {"autotp_size": 2},
        "sequence_parallel_size": 2,
        "expert_parallel": {"enabled": True, "autoep_size": 2},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    layout = read_file(tmp_path, "ds.json", json.dumps(given))
    assert (layout.tp, layout.cp, layout.context, layout.ep, layout.etp) == (2, 2, "ulysses", 2, 1)
    assert (layout.zero, layout.microbatch_size, layout.profile.overlap) == (1, None, True)
    assert not layout.profile.short_gradients
    assert "launcher" in unused_of(layout)["train_micro_batch_size_per_gpu"]


FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config:
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_offload_params: false
  fsdp_activation_checkpointing: true
  fsdp_state_dict_type: FULL_STATE_DICT
"""


def test_accelerate_with_hybrid_shards(tmp_path: Path) -> None:
    layout = read_file(tmp_path, "fsdp.yaml", FSDP).at(16)
    assert (layout.zero, layout.dp_shard, layout.dp_replicate, layout.recompute) == (3, 8, 2, "full")
    assert (layout.precision, layout.profile.short_gradients) == ("bf16", True)


def test_accelerate_names_a_file_of_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "inner.json").write_text(json.dumps(DEEPSPEED))
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\n"
        "deepspeed_config: {deepspeed_config_file: inner.json}\n"
    )
    layout = read_file(tmp_path, "ds.yaml", text).at(8)
    assert (layout.framework, layout.zero, layout.global_batch) == ("accelerate", 3, 64)


def test_accelerate_mesh(tmp_path: Path) -> None:
    text = (
        "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n"
        "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}\nparallelism_config:\n"
        "  parallelism_config_dp_shard_size: 2\n  parallelism_config_tp_size: 2\n  parallelism_config_cp_size: 2\n"
        "  parallelism_config_cp_comm_strategy: alltoall\n"
    )
    layout = read_file(tmp_path, "nd.yaml", text).at(8)
    assert (layout.dp, layout.tp, layout.cp, layout.context, layout.zero) == (2, 2, 2, "ring", 2)


def test_transformers_arguments(tmp_path: Path) -> None:
    given = {
        "output_dir": "out", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "bf16": True,
        "fsdp": "full_shard auto_wrap offload", "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": True},
        "gradient_checkpointing": True, "learning_rate": 1e-4,
    }  # fmt: skip
    layout = read_file(tmp_path, "args.json", json.dumps(given)).at(4)
    assert (layout.zero, layout.offload, layout.recompute) == (3, ("optimizer", "parameters"), "full")
    assert (layout.global_batch, layout.precision) == (64, "bf16")
    assert "learning_rate" in unused_of(layout)


ACCELERATE = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n"
ARGUMENTS = {"output_dir": "out", "per_device_train_batch_size": 2}


@pytest.mark.parametrize(
    ("file", "text", "compiled", "unused"),
    [
        ("a.toml", TOML, False, set()),
        ("a.toml", TOML + "[compile]\nenable = true\n", True, set()),
        ("a.toml", TOML + "[compile]\nenable = false\n", False, set()),
        ("a.toml", TOML + "[compile]\nenable = true\ncomponents = ['loss']\n", False, set()),
        ("a.toml", TOML + "[compile]\nenable = true\nbackend = 'aot_eager'\n", False, {"compile.backend"}),
        ("a.toml", "[training]\nbatch_size = 2\ncompile = true\n", True, set()),
        ("b.yaml", ACCELERATE + "dynamo_config: {dynamo_backend: INDUCTOR}\n", True, set()),
        ("b.yaml", ACCELERATE + "dynamo_backend: 'NO'\n", False, set()),
        ("b.yaml", ACCELERATE + "dynamo_config: {dynamo_backend: EAGER}\n", False, {"dynamo_config.dynamo_backend"}),
        ("b.yaml", "distributed_type: MEGATRON_LM\nnum_processes: 8\ndynamo_backend: INDUCTOR\n", True, set()),
        ("c.json", json.dumps(ARGUMENTS), False, set()),
        ("c.json", json.dumps(ARGUMENTS | {"torch_compile": True}), True, set()),
        ("c.json", json.dumps(ARGUMENTS | {"torch_compile_backend": "inductor"}), True, set()),
        ("c.json", json.dumps(ARGUMENTS | {"torch_compile_mode": "max-autotune"}), True, {"torch_compile_mode"}),
        ("c.json", json.dumps(ARGUMENTS | {"torch_compile_backend": "eager"}), False, {"torch_compile_backend"}),
    ],
)
def test_the_compiler_that_a_configuration_switches_on(
    file: str, text: str, compiled: bool, unused: set[str], tmp_path: Path
) -> None:
    layout = read_file(tmp_path, file, text)
    assert layout.profile.fused_kernels is compiled
    assert {name for name in unused_of(layout) if "compile" in name or "dynamo" in name} == unused


def test_components_to_compile_are_a_list(tmp_path: Path) -> None:
    with pytest.raises(OptionValueError, match=r"compile\.components.*expected a list"):
        read_file(tmp_path, "a.toml", TOML + "[compile]\ncomponents = 'model'\n")


def test_transformers_mesh(tmp_path: Path) -> None:
    given = {"tp_size": 2, "tp_plan": {"layers.*.mlp": "colwise"}, "fsdp_size": 4, "fsdp_mixed_precision": True}
    layout = read_file(tmp_path, "mesh.json", json.dumps(given)).at(8)
    assert (layout.tp, layout.dp, layout.zero, layout.precision) == (2, 4, 3, "bf16")
    assert "tp_plan" in unused_of(layout)


def test_options_of_the_training_script(tmp_path: Path) -> None:
    layout = read_layout(MEGATRON + "--my-data a b --my-switch", ignore=["my-data", "my_switch"])
    assert "training script" in unused_of(layout)["--my-data"]
    text = json.dumps(DEEPSPEED | {"cuda_visible_devices": "0"})
    (tmp_path / "ds.json").write_text(text)
    assert "cuda_visible_devices" in unused_of(read_layout(tmp_path / "ds.json", ignore=["cuda_visible_devices"]))


def test_first_and_last_layers_are_those_of_a_pipeline_rank() -> None:
    """Megatron divides the layers of each pipeline rank by the number of virtual stages, those of the first and the
    last rank, too: 28 layers on 4 ranks, 6 on the first, 6 on the last and 8 on both others, in two virtual stages.
    """
    text = (
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --num-layers 28 "
        "--decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 6"
    )
    assert read_layout(MEGATRON + text).stage_layers == (3, 4, 4, 3, 3, 4, 4, 3)
    with pytest.raises(ContradictionError, match="7 layers on a pipeline rank do not divide into its 2 virtual"):
        read_layout(MEGATRON + text.replace("28", "30").replace("num-layers 6", "num-layers 7"))


@pytest.mark.parametrize(
    ("nodes", "devices"),
    [("2", 16), ("${SLURM_NNODES:-2}", None), ("$SLURM_NNODES", None), ('"${COUNT-2}"', None)],
)
def test_nodes_that_the_environment_may_set_are_open(nodes: str, devices: int | None) -> None:
    script = f"NODES={nodes}\ntorchrun --nproc_per_node 8 --nnodes $NODES pretrain_gpt.py {MEGATRON}"
    assert read_layout(script, "megatron").devices == devices


def test_deepspeed_pipeline_recomputes_by_its_interval(tmp_path: Path) -> None:
    """DeepSpeed's pipeline engine takes the interval from the file."""
    text = '{"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 4, "activation_checkpoint_interval": 1}}'
    assert read_file(tmp_path, "ds.json", text, "deepspeed").recompute == "full"
    zero = text[:-1] + ', "zero_optimization": {"stage": 2}}'
    with pytest.raises(ContradictionError, match="stage=2, which DeepSpeed's pipeline engine refuses"):
        read_file(tmp_path, "ds.json", zero, "deepspeed")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"model.layers.*.mlp.up_proj": "colwisee"}, "did you mean colwise"),
        ({"model.layers.3.mlp.up_proj": "colwise"}, r"with \* for the number: model.layers.\*.mlp.up_proj"),
        ("colwise", "expected auto, or a mapping"),
    ],
)
def test_plans_that_transformers_refuses(plan: Any, message: str) -> None:
    with pytest.raises(OptionValueError, match=message):
        read_transformers(json.dumps({"tp_size": 2, "tp_plan": plan}))


def test_unused_options_are_not_said_to_have_no_effect() -> None:
    """An option that may change time or memory is not called harmless, and one of the model is called so."""
    text = (
        "--outer-dp-sharding-strategy optim --moe-layer-recompute --fsdp-double-buffer --lr 1e-4 --wandb-project x "
        "--log-memory-to-tensorboard --q-lora-rank 512 --normalization RMSNorm --attention-backend unfused"
    )
    found = unused_of(read_layout(MEGATRON + text))
    matters = ("--outer-dp-sharding-strategy", "--moe-layer-recompute", "--fsdp-double-buffer", "--attention-backend")
    assert {found[name] for name in matters} == {NOT_USED}
    assert {found[name] for name in ("--lr", "--wandb-project", "--log-memory-to-tensorboard")} == {NO_EFFECT}
    assert {found[name] for name in ("--q-lora-rank", "--normalization")} == {OF_MODEL}


def test_a_capacity_other_than_the_mean_is_listed() -> None:
    text = "--num-experts 8 --moe-pad-expert-input-to-capacity --moe-expert-capacity-factor "
    assert "mean number of tokens" in unused_of(read_layout(MEGATRON + text + "2.0"))["--moe-expert-capacity-factor"]
    assert "--moe-expert-capacity-factor" not in unused_of(read_layout(MEGATRON + text + "1.0"))


def test_options_of_one_reason_are_on_one_line() -> None:
    text = "--lr 1e-4 --seed 3 --fsdp-double-buffer --rampup-batch-size 8 8 1000 --hidden-size 64"
    assert group_unused(read_layout(MEGATRON + text).unused) == [
        "--rampup-batch-size=['8', '8', '1000']: the steps with smaller batches at the start are not predicted",
        f"--fsdp-double-buffer: {NOT_USED}",
        f"--hidden-size=64: {OF_MODEL}",
        f"each of these {NO_EFFECT}: --lr=1e-4, --seed=3",
    ]
