"""Configurations in the spelling of other frameworks' recipes are read, or an error says what to do."""

from pathlib import Path
from typing import Any

import pytest

from partitioner import LayoutError, read_layout

# name -> file name, text, what is read; in place of the last a part of the message of a typed error
READ: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepspeed: values that the launcher fills in": (
        "zero3.json",
        """{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "overlap_comm": true,
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "sub_group_size": 1e9,
        "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": true},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false}""",
        {"zero": 3, "optimizer": "adamw", "microbatch_size": None, "global_batch": None},
    ),
    "deepspeed: comments and a comma at the end": (
        "commented.json",
        """{
  // two steps of accumulation
  "train_micro_batch_size_per_gpu": 4, # samples
  "gradient_accumulation_steps": 2,
  /* states of the optimizer
     in host memory */
  "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true},},
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16},
}
""",
        {"zero": 2, "offload": ("optimizer",), "precision": "fp16", "microbatch_size": 4, "microbatches": 2},
    ),
    "deepspeed: numbers as text": (
        "text.json",
        '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": "1"}}',
        {"zero": 1, "microbatch_size": 8, "global_batch": 64},
    ),
    "deepspeed: tensor parallelism": (
        "autotp.json",
        """{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "tensor_parallel": {"autotp_size": 4,
        "partition_config": {"use_default_specs": false, "layer_specs": [{"patterns": [".*\\\\.o_proj\\\\.weight$"],
        "partition_type": "row"}]}}, "zero_optimization": {"stage": 1}}""",
        {"tp": 4, "zero": 1, "precision": "bf16"},
    ),
    "accelerate: FSDP 2": (
        "fsdp2.yaml",
        """compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LayerOfTheModel
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
""",
        {"zero": 3, "devices": 16, "recompute": "full", "precision": "bf16"},
    ),
    "accelerate: FSDP 1, words for booleans": (
        "fsdp1.yaml",
        """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD, fsdp_backward_prefetch: BACKWARD_PRE, fsdp_use_orig_params: 'true',
  fsdp_forward_prefetch: 'no', fsdp_sync_module_states: yes, fsdp_state_dict_type: FULL_STATE_DICT}
mixed_precision: 'no'
num_machines: 2
num_processes: 16
""",
        {"zero": 3, "dp_shard": 8, "precision": "fp32"},
    ),
    "accelerate: DeepSpeed": (
        "ds.yaml",
        """compute_environment: LOCAL_MACHINE
deepspeed_config: {deepspeed_multinode_launcher: standard, gradient_accumulation_steps: 4, gradient_clipping: 1.0,
  offload_optimizer_device: none, offload_param_device: none, zero3_init_flag: true, zero3_save_16bit_model: true,
  zero_stage: 3}
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
""",
        {"zero": 3, "microbatches": 4, "precision": "bf16", "devices": 8},
    ),
    "accelerate: Megatron-LM": (
        "megatron.yaml",
        """distributed_type: MEGATRON_LM
megatron_lm_config: {megatron_lm_gradient_clipping: 1.0, megatron_lm_num_micro_batches: 4, megatron_lm_pp_degree: 2,
  megatron_lm_recompute_activations: true, megatron_lm_sequence_parallelism: true, megatron_lm_tp_degree: 2,
  megatron_lm_use_distributed_optimizer: true}
mixed_precision: bf16
num_processes: 8
""",
        {"tp": 2, "pp": 2, "microbatches": 4, "zero": 1, "sequence_parallel": True},
    ),
    "torchtitan 0.3: a registry of configurations": (
        "config_registry.py",
        """from . import model_registry
def base() -> Trainer.Config:
    spec = model_registry("8B")
    return Trainer.Config(model_spec=spec, hf_assets_path="./assets", optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(local_batch_size=2, seq_len=8 * 1024, steps=1000),
        parallelism=ParallelismConfig(tensor_parallel_degree=2), activation_checkpoint=FullAC.Config())

def wide() -> Trainer.Config:
    config = base()
    config.training.disable_cuda_graphs = True
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism = dataclasses.replace(config.parallelism, pipeline_parallel_schedule="Interleaved1F1B")
    return config
""",
        {"tp": 2, "pp": 2, "seq_length": 8192, "recompute": "full", "schedule": "interleaved", "microbatches": 2},
    ),
    "torchtitan of August 2026: tokens instead of samples": (
        "config_registry.py",
        """def wide() -> Trainer.Config:
    return Trainer.Config(model_spec=model_registry("8B"), tokenizer=HuggingFaceTokenizer.Config(path="x"),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=4 * 8192, max_context_length=8192,
            num_tokens_per_train_step=64 * 4 * 8192, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(pipeline_parallel_degree=2, num_pp_microbatches=8))
""",
        {"pp": 2, "microbatch_size": 4, "seq_length": 8192, "global_batch": 256, "microbatches": None},
    ),
    "torchtitan of August 2026: a microbatch of one sample that is cut": (
        "config_registry.py",
        """def wide() -> Trainer.Config:
    return Trainer.Config(training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=4096, max_context_length=8192))
""",
        {"microbatch_size": 1, "seq_length": 4096, "microbatches": 1},
    ),
    "torchtitan: a trainer with fields of its own": (
        "config_registry.py",
        """def wide() -> ImageTrainer.Config:
    return ImageTrainer.Config(encoder=EncoderConfig(path="x"), parallelism=ParallelismConfig(tensor_parallel_degree=2),
        training=TrainingConfig(local_batch_size=4, seq_len=512))
""",
        {"tp": 2, "microbatch_size": 4, "seq_length": 512},
    ),
    "torchtitan 0.2: TOML": (
        "train.toml",
        """# a comment
[job]
dump_folder = "./outputs"
[model]
name = "some"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 1
seq_len = 8192
steps = 1_000
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8  # of a node
enable_async_tensor_parallel = false
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
components = ["model", "loss"]
""",
        {"tp": 8, "zero": 3, "recompute": "alternate", "seq_length": 8192},
    ),
    "torchtitan 0.1: older places": (
        "old.toml",
        """[training]
batch_size = 4
seq_len = 2048
tensor_parallel_degree = 2
data_parallel_shard_degree = 4
[experimental]
pipeline_parallel_degree = 2
pipeline_parallel_microbatches = 4
""",
        {"tp": 2, "pp": 2, "dp": 4, "microbatch_size": 1, "microbatches": 4},
    ),
    "megatron: arrays that grow": (
        "pretrain.sh",
        """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"2"}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
CHECKPOINT_PATH=$1
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
)
MODEL_ARGS=( --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096
    --moe-layer-freq [0]*3+[1]*29 )
TRAINING_ARGS=(
    --micro-batch-size 1 \\
    --global-batch-size $((WORLD_SIZE * 16)) \\
    --bf16
    --save $CHECKPOINT_PATH
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --use-distributed-optimizer
)
if [ -n "${WANDB_API_KEY}" ]; then
    TRAINING_ARGS+=(--wandb-project ${WANDB_PROJECT:-"none"})
fi
PARALLEL_ARGS=(
    "${PARALLEL_ARGS[@]}"
    --sequence-parallel
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} \\
    "${TRAINING_ARGS[@]}" ${PARALLEL_ARGS[@]}
""",
        {"tp": 2, "devices": 16, "global_batch": 256, "zero": 1, "sequence_parallel": True, "precision": "bf16"},
    ),
    "megatron: one long string": (
        "old.sh",
        """OPTIONS=" \\
    --tensor-model-parallel-size 4 \\
    --pipeline-model-parallel-size 2 \\
    --recompute-activations \\
    --micro-batch-size 2 --global-batch-size 64 --fp16"
python -m torch.distributed.launch --nproc_per_node=8 pretrain_gpt.py $OPTIONS --lr 1e-4 2>&1 | tee log.txt
""",
        {"tp": 4, "pp": 2, "recompute": "scores", "precision": "fp16", "devices": 8},
    ),
    "megatron: srun and cat": (
        "slurm.sh",
        """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
options=" --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4 --num-layers 64 \\
 --micro-batch-size 1 --global-batch-size 512 --bf16"
run_cmd="python -u pretrain_gpt.py ${options}"
srun -l --container-image "image" sh -c "${run_cmd}"
""",
        {"pp": 4, "virtual_stages": 4, "global_batch": 512, "precision": "bf16"},
    ),
    "megatron: what the caller adds, a folder to fill in, options of 2.5": (
        "old.sh",
        """OUTPUT="<path to the output>/run"
options=" --tensor-model-parallel-size 8 --activations-checkpoint-method uniform --micro-batch-size 1 --fp16 "
torchrun --nproc_per_node=8 pretrain_gpt.py $options --global-batch-size 16 --save ${OUTPUT} --use-flash-attn "$@"
""",
        {"tp": 8, "recompute": "full", "precision": "fp16", "global_batch": 16, "devices": 8},
    ),
    "megatron: a function that starts the script": (
        "function.sh",
        """#!/usr/bin/env bash
set -euxo pipefail
: "${NUM_NODES:=16}"
TP=${TP:=2}; PP=8; EP=32
let GBS=1024*8
declare -a PAR
PAR+=( --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size=${PP} )
PAR+=( --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1 )
[[ $TP -gt 1 ]] && PAR+=( --sequence-parallel )
function run() {
  local NAME=$1
  shift
  echo "$NAME doesn't use more than $NUM_NODES nodes"
  torchrun --nproc-per-node 8 --nnodes ${NUM_NODES} pretrain_gpt.py --seq-length 4096 "$@"
}
run first "${PAR[@]}" --num-experts 256 --num-layers 64 --num-virtual-stages-per-pipeline-rank 2 \\
  --micro-batch-size 1 --global-batch-size $GBS --moe-layer-freq '([0]*3+[1]*61)' --bf16
""",
        {
            "tp": 2,
            "pp": 8,
            "ep": 32,
            "etp": 1,
            "virtual_stages": 2,
            "global_batch": 8192,
            "sequence_parallel": True,
            "seq_length": 4096,
            "microbatch_size": 1,
            "precision": "bf16",
        },
    ),
    "megatron: sizes by the branches of a condition": (
        "sizes.sh",
        """MODEL_SIZE=${1:-7}
if [[ ${MODEL_SIZE} == 7 ]]; then
  NUM_HEAD=32; NUM_LAYERS=32
  TP=2
elif [[ ${MODEL_SIZE} == 70 ]]; then
  NUM_HEAD=64; NUM_LAYERS=80
  TP=8
else
  echo "invalid MODEL_SIZE: ${MODEL_SIZE}"; exit 1
fi
PP=1 MICRO=4
if [ $PP -gt 1 ]; then MORE="--num-layers-per-virtual-pipeline-stage 2"; fi
cmd="torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py \\
  --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --num-layers $NUM_LAYERS \\
  --num-attention-heads $NUM_HEAD --micro-batch-size $MICRO --global-batch-size $(( MICRO * 8 * (15 + PP) )) $MORE"
eval $cmd
""",
        {"tp": 2, "pp": 1, "microbatch_size": 4, "global_batch": 512, "devices": 8},
    ),
    "megatron: sizes by cases": (
        "cases.sh",
        """SIZE=${SIZE:-70b}
cat <<EOF > ds_config.json
{"train_batch_size": 1, "it's": "--no-option"
EOF
case "$SIZE" in
  7b) TP=1; PP=1 ;;
  13b|70b)
    TP=8
    PP=4
    ;;
  *) TP=16
     PP=16;;
esac
(cd /tmp && torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py --tensor-model-parallel-size $TP \\
  --pipeline-model-parallel-size $PP --micro-batch-size 1 --global-batch-size 64 --bf16 )
""",
        {"tp": 8, "pp": 4, "devices": 32, "global_batch": 64},
    ),
    "megatron: options as a mapping": (
        "model_config.yaml",
        """ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1}
MODEL_ARGS:
  --num-layers: 24
  --micro-batch-size: 4
  --global-batch-size: 128
  --pipeline-model-parallel-size: 2
  --bf16: true
  --sequence-parallel: false
  --moe-layer-freq: ([0]*3+[1]*21)
  --data-path: ${DATA_PATH}/text
TEST_TYPE: regular
""",
        {"pp": 2, "global_batch": 128, "microbatch_size": 4, "precision": "bf16", "sequence_parallel": None},
    ),
    "megatron-bridge": (
        "recipe.yaml",
        """_target_: megatron.bridge.training.config.ConfigContainer
model: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, pipeline_dtype: torch.bfloat16,
  context_parallel_size: 2, sequence_parallel: true, expert_model_parallel_size: 4, expert_tensor_parallel_size: 1}
train: {micro_batch_size: 1, global_batch_size: 128, train_iters: 1000}
mixed_precision: bf16_mixed
ddp: {use_distributed_optimizer: true, overlap_grad_reduce: true, overlap_param_gather: true}
""",
        {"tp": 2, "pp": 2, "cp": 2, "ep": 4, "etp": 1, "zero": 1, "precision": "bf16"},
    ),
    "transformers: DistributedConfig": (
        "distributed.json",
        '{"tp_size": 4, "tp_plan": {"model.layers.*.self_attn.q_proj": "colwise"}, "fsdp_size": 2}',
        {"tp": 4, "dp": 2, "zero": 3, "devices": 8},
    ),
    "transformers: TrainingArguments": (
        "arguments.json",
        """{"output_dir": "out", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "bf16": true,
        "gradient_checkpointing": true, "fsdp": "full_shard auto_wrap", "learning_rate": 2e-5, "optim": "adamw_torch",
        "fsdp_config": {"transformer_layer_cls_to_wrap": ["LayerOfTheModel"], "activation_checkpointing": false}}""",
        {"microbatch_size": 2, "microbatches": 8, "zero": 3, "recompute": "full", "precision": "bf16"},
    ),
    "transformers: TrainingArguments in YAML": (
        "sft.yaml",
        """### train
output_dir: saves/full/sft
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
num_train_epochs: 3.0
bf16: true
""",
        {"framework": "transformers", "microbatch_size": 1, "microbatches": 2, "precision": "bf16"},
    ),
    "deepspeed: a comment as an option": (
        "autotp.json",
        """{"_comment": "with tensor parallelism", "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": "auto"},
        "compile": {"disable": false, "backend": "inductor"}, "tensor_parallel": {"autotp_size": 2}}""",
        {"tp": 2, "microbatch_size": 1, "precision": None},
    ),
    "megatron: functions whose output is options": (
        "functions.sh",
        """#!/bin/bash
model() {
  local size=$1
  case $size in
    small) echo "--num-layers 2 --hidden-size 64 --num-attention-heads 8" ;;
    large) echo "--num-layers 32 --hidden-size 4096 --num-attention-heads 32" ;;
  esac
  echo "a model of size $size" >&2
}
tp() { if [ "$1" -gt 8 ]; then printf '%s\\n' 4; return; fi; echo -n 2; }
NODES=2
TP=$(tp $((NODES * 8)))
DAY=`date +%Y-%m-%d`
torchrun --nproc_per_node 8 --nnodes $NODES a.py $(model large) --tensor-model-parallel-size "$TP" \\
  --micro-batch-size `echo 1` --global-batch-size $((8 * $(echo 8))) --data-path <(cat a b) --save runs/$(date +%s)/$DAY
""",
        {"tp": 4, "global_batch": 64, "microbatch_size": 1, "devices": 16},
    ),
    "megatron: a module in place of a script": (
        "module.sh",
        "NPROC=${NPROC:-4}\npython -m torch.distributed.run --nproc-per-node 4 -m examples.train \\\n"
        "  --tensor-model-parallel-size 2 --micro-batch-size 1 --bf16\n",
        {"tp": 2, "microbatch_size": 1, "devices": 4},
    ),
    "megatron: a list of words in a text of YAML": (
        "model_config.yaml",
        """MODEL_ARGS:
  --micro-batch-size: 4
  --tensor-model-parallel-size: 2
  --recompute-granularity: selective
  --recompute-modules: "[layernorm moe_act]"
  --moe-layer-freq: "[0, 1]"
""",
        {"tp": 2, "microbatch_size": 4, "recompute": "selective"},
    ),
}
REFUSED: dict[str, tuple[str, str, str]] = {
    "megatron: options that are the output of a command": (
        "output.sh",
        "cd /tmp\nF=args.txt\ntorchrun a.py \\\n  $(cat $F) \\\n  --bf16\n",
        r"got '\$\(cat args.txt\)' in line 4, the output of a command that is not run here; run the script once with "
        "`bash -x`",
    ),
    "megatron: a size that is the output of a command": (
        "size.sh",
        "TP=$(nvidia-smi -L | wc -l)\ntorchrun a.py --tensor-model-parallel-size $TP\n",
        r"parallel-size: expected a whole number of 1 or more, got '\$\(nvidia-smi -L \| wc -l\)' in line 1",
    ),
    "megatron: arithmetic with the output of a command": (
        "nodes.sh",
        "set -e\nN=`cat hosts | wc -l`\ntorchrun a.py --micro-batch-size 1 --global-batch-size $((N * 8))\n",
        "--global-batch-size: expected a whole number of 1 or more, got '`cat hosts . wc -l`' in line 2",
    ),
    "megatron: a function that does more than echo": (
        "function.sh",
        "f() {\n  touch met\n  echo 2\n}\ntorchrun a.py --tensor-model-parallel-size $(f)\n",
        r"got '\$\(f\)' in line 5, the output of a command",
    ),
    "megatron: a function that prints in a loop": (
        "loop.sh",
        "f() {\n  for x in 1 2; do echo $x; done\n}\ntorchrun a.py --tensor-model-parallel-size $(f)\n",
        r"got '\$\(f\)' in line 4, the output of a command",
    ),
    "megatron: a function whose output is that of itself": (
        "endless.sh",
        "f() {\n  echo $(f)\n}\ntorchrun a.py --tensor-model-parallel-size $(f)\n",
        r"got '\$\(f\)' in line 2, the output of a command",
    ),
    "megatron: arithmetic with a variable that is not set": (
        "unset.sh",
        "torchrun a.py --micro-batch-size 1 --global-batch-size $((8 * N)) --bf16\n",
        r"-batch-size: expected a whole number of 1 or more, got '\$\(\(8 \* N\)\)', in which a variable is not",
    ),
    "megatron: several options of the training script": (
        "own.sh",
        "torchrun train.py --bf16 --freeze-tower --tile-size 4 8 --micro-batch-size 1 --tower-type vit\n",
        "give ignore=freeze-tower,tile-size,tower-type if they belong .*also unknown: --tile-size, --tower-type",
    ),
    "megatron: options in a variable that is not set": (
        "variable.sh",
        "torchrun pretrain_gpt.py --bf16 ${MODEL_ARGS}\n",
        "'..MODEL_ARGS.', which is not set in the script; set the variable MODEL_ARGS there",
    ),
    "megatron: a function that calls itself": (
        "endless.sh",
        "run() {\n run $@\n}\nrun --bf16\n",
        "function run of the script calls itself",
    ),
    "megatron: functions that start more and more": (
        "many.sh",
        "".join(f"f{n}() {{ {f'f{n + 1} $@; ' * 9} }}\n" for n in range(9)) + "f0 --bf16\n",
        "runs more than 20000 commands",
    ),
    "megatron: no case for the value": (
        "cases.sh",
        "case $1 in\n 7b) TP=1;;\n 70b) TP=8;;\nesac\ntorchrun a.py --tensor-model-parallel-size $TP --bf16\n",
        "--tensor-model-parallel-size has no value",
    ),
    "megatron-bridge: changes to a recipe": (
        "recipe.sh",
        "torchrun run_recipe.py --recipe small train.global_batch_size=64 model.tensor_model_parallel_size=2\n",
        "to_yaml",
    ),
    "yaml: of no known framework": (
        "other.yaml",
        "base: small\nadapter: none\nsequence_len: 4096\nmicro_batch: 2\nlearning_rate: 0.1\n",
        "fields of no format that is known, such as base, adapter",
    ),
    "torchtitan: a controller of several trainers": (
        "controller.py",
        "def made() -> Controller.Config:\n    return Controller.Config(trainer=Trainer.Config())\n",
        "neither training nor parallelism",
    ),
    "torchtitan: a function of another module": (
        "wrapped.py",
        "def made() -> Trainer.Config:\n    return compiled(base(), registry)\n",
        r"returns compiled\(base\(\), registry\)",
    ),
    "torchtitan: tokens and samples": (
        "both.py",
        "def made() -> Trainer.Config:\n"
        "    return Trainer.Config(training=TrainingConfig(max_context_length=512, local_batch_size=2))\n",
        "options of one version",
    ),
    "megatron: a size that the caller gives": (
        "arguments.sh",
        "torchrun pretrain_gpt.py --tensor-model-parallel-size $TP --micro-batch-size 1 --global-batch-size 8\n",
        "TP",
    ),
    "torchtitan 0.3: a pipeline under graphs": (
        "pipeline.py",
        "def made() -> Trainer.Config:\n"
        "    return Trainer.Config(parallelism=ParallelismConfig(pipeline_parallel_degree=2))\n",
        "disable_cuda_graphs",
    ),
    "deepspeed: a misspelt option": (
        "misspelt.json",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_com": true}}',
        "overlap_comm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_spellings_of_recipes_are_read(name: str, tmp_path: Path) -> None:
    file, text, facts = READ[name]
    (tmp_path / file).write_text(text)
    source = f"{tmp_path / file}:wide" if file == "config_registry.py" else tmp_path / file
    layout = read_layout(source)
    assert {field: getattr(layout, field) for field in facts} == facts


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_what_to_do(name: str, tmp_path: Path) -> None:
    file, text, part = REFUSED[name]
    (tmp_path / file).write_text(text)
    with pytest.raises(LayoutError, match=part) as error:
        read_layout(tmp_path / file)
    assert "expected" in str(error.value)


def test_conditions_that_are_not_known_are_listed() -> None:
    text = """if [ -n "${LONG}" ]; then
MORE="--seq-length 8192"
fi
source sizes.sh
if check_nodes; then TP=2; fi
[ "$MODE" == fp16 ] || TYPE=--bf16
if [ -n "$OTHER" ]; then echo other; fi
case $SCHEDULE in fast) MORE=--overlap-grad-reduce;; esac
torchrun train.py --tensor-model-parallel-size $TP $MORE $TYPE --micro-batch-size 1
"""
    layout = read_layout(text)
    assert (layout.tp, layout.precision, layout.seq_length) == (2, "bf16", None)
    assert {option.option: option.reason for option in layout.unused} == {
        'if [ -n "${LONG}" ]': "LONG may be set outside of the script; taken as false",
        "source sizes.sh": "what the file sets is not known",
        "if check_nodes": "is not known without running it; taken as true",
        'if [ "$MODE" == fp16 ]': "MODE may be set outside of the script; taken as false",
        "case $SCHEDULE": "SCHEDULE may be set outside of the script; taken to be empty",
    }


def test_entries_beside_the_options_of_a_mapping_are_listed(tmp_path: Path) -> None:
    file, text, _ = READ["megatron: options as a mapping"]
    (tmp_path / file).write_text(text)
    listed = {option.option: option.reason for option in read_layout(tmp_path / file).unused}
    assert "of the script that starts it" in listed["ENV_VARS"] and "TEST_TYPE" in listed
    assert "--data-path" in listed


def test_options_that_a_caller_or_a_subclass_adds_are_listed(tmp_path: Path) -> None:
    for name, option in (
        ("megatron: what the caller adds, a folder to fill in, options of 2.5", "$@"),
        ("torchtitan: a trainer with fields of its own", "encoder"),
    ):
        file, text, _ = READ[name]
        (tmp_path / file).write_text(text)
        assert option in {each.option for each in read_layout(tmp_path / file).unused}


def test_a_deepspeed_file_is_found_from_the_folder_where_a_script_starts(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "examples" / "sft.yaml").write_text("output_dir: x\nbf16: true\ndeepspeed: examples/ds.json\n")
    monkeypatch.chdir(tmp_path)
    assert read_layout(tmp_path / "examples" / "sft.yaml").zero == 3


def test_an_output_that_depends_on_the_environment_is_listed(tmp_path: Path) -> None:
    script = tmp_path / "maybe.sh"
    script.write_text(
        'f() {\n  if [ "$WIDE" = yes ]; then echo 4; return; fi\n  echo 2\n}\n'
        "torchrun a.py --tensor-model-parallel-size $(f)\n"
    )
    layout = read_layout(script)
    assert layout.tp == 2
    assert ('if [ "$WIDE" = yes ]', "WIDE may be set outside of the script; taken as false") in {
        (each.option, each.reason) for each in layout.unused
    }
