"""Wrong configurations: typed errors that say what is wrong, what was expected, what was given and what to do."""

import json
import random
from pathlib import Path

import pytest

from partitioner import (
    ContradictionError,
    LayoutError,
    OptionValueError,
    PartitionError,
    TrainingLayout,
    UnknownOptionError,
    read_layout,
)
from partitioner.passes.errors import InternalError

MEGATRON = "--micro-batch-size 2 --bf16 "


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("--tensor-model-paralel-size 2", UnknownOptionError, "tensor-model-parallel-size"),
        ("--tensor-model-parallel-size two", OptionValueError, "whole number"),
        ("--tensor-model-parallel-size 0", OptionValueError, "1 or more"),
        ("--tensor-model-parallel-size --lr 1", OptionValueError, "no value"),
        ("--tensor-model-parallel-size $TP", OptionValueError, "whole number"),
        ("--lr 1 2", OptionValueError, "follows no option"),
        ("--recompute-granularity half", OptionValueError, "full, selective"),
        ("--recompute-granularity full", ContradictionError, "recompute-method"),
        ("--recompute-granularity selective --recompute-num-layers 2", ContradictionError, "neither"),
        ("--fp16", ContradictionError, "one of them"),
        ("--global-batch-size 3", ContradictionError, "multiple of 2"),
        ("--num-virtual-stages-per-pipeline-rank 2", ContradictionError, "2 or more ranks"),
        ("--overlap-param-gather", ContradictionError, "both"),
        ("--num-distributed-optimizer-instances 2", ContradictionError, "distributed optimizer"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout EtxtL", OptionValueError, "stages like"),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3 --num-layers 16",
            ContradictionError,
            "multiple of 6",
        ),
        ("--pipeline-model-parallel-size 4 --num-layers 30", ContradictionError, "pipeline-model-parallel-layout"),
        ("--context-parallel-size 4 --seq-length 1020", ContradictionError, "multiple"),
    ],
)
def test_megatron_errors(text: str, kind: type[LayoutError], words: str) -> None:
    with pytest.raises(kind, match=words):
        read_layout(MEGATRON + text)


@pytest.mark.parametrize(
    ("name", "text", "kind", "words"),
    [
        ("a.toml", "[parallelism]\ntensor_paralel_degree = 2", UnknownOptionError, "tensor_parallel_degree"),
        ("a.toml", "[paralellism]\ntensor_parallel_degree = 2", UnknownOptionError, "did you mean parallelism"),
        ("a.toml", "[training]\npipeline_parallel_degree = 2", UnknownOptionError,
         "parallelism.pipeline_parallel_degree"),
        ("a.toml", "[training]\ndata_parallel_degree = 0", OptionValueError, "-1 for the rest"),
        ("a.toml", "[training]\ndata_parallel_type = 'fspd'", OptionValueError, "did you mean fsdp"),
        ("a.toml", "[training]\ndata_parallel_degree = 4\n[parallelism]\ndata_parallel_shard_degree = 4",
         ContradictionError, "expected data_parallel_shard_degree alone"),
        ("a.toml", "[training]\nlocal_batch_size = 'x'", OptionValueError, "whole number"),
        ("a.toml", "[training]\nlocal_batch_size = 3\nglobal_batch_size = 8", ContradictionError, "multiple"),
        ("a.toml", "[parallelism\n", LayoutError, "TOML"),
        ("a.toml", "[training]\nbatch_size = 8\nlocal_batch_size = 4", ContradictionError, "name in older versions"),
        ("a.toml", "[parallelism]\ntensor_parallel_degree = 4\n[training]\ntensor_parallel_degree = 2",
         ContradictionError, "training.tensor_parallel_degree=2"),
        ("a.toml", "[activation_checkpoint]\nmode = 'ful'", OptionValueError, "did you mean full. expected one of"),
        ("a.json", '{"train_batch_size": 4, "bf16": true}', OptionValueError, "a section such as"),
        ("a.json", '{"model_type": "llama", "hidden_size": 64}', LayoutError, "is the configuration of a model"),
        ("a.json", '{"format": "partitioner-plan", "program": {}}', LayoutError, "is a plan of this project"),
        ("a.py", "def f() -> Trainer.Config:\n  return Trainer.Config(parallelism=ParallelismConfig("
         "pipeline_parallel_degree=2))", ContradictionError, "disable_cuda_graphs"),
        ("a.py", "import os\n", LayoutError, "0 functions"),
        ("a.py", "def f(:", LayoutError, "Python module"),
        ("a.json", '{"train_batch_size": 4, "train_batch_size": 8}', LayoutError, "twice"),
        ("a.json", '{"zero_optimization": {"stage": 4}}', OptionValueError, "0, 1, 2 or 3"),
        ("a.json", '{"zero_optimization": {"stag": 3}}', UnknownOptionError, "stage"),
        ("a.json", '{"zero_optimization": 3}', OptionValueError, "section"),
        ("a.json", '{"train_batch_size": 6, "train_micro_batch_size_per_gpu": 4}', ContradictionError, "multiple of 4"),
        ("a.json", '{"train_batch_size": 6, "bf16": {"enabled": true}, "fp16": {"enabled": true}}',
         ContradictionError, "one of them"),
        ("a.json", '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}',
         ContradictionError, "stage 3"),
        ("a.json", "[1, 2]", LayoutError, "mapping"),
        ("a.json", '{"tp_size": 2, "pp_size": 2, "fsdp_size": 2}', ContradictionError, "alone"),
        ("a.json", '{"output_dir": "x", "per_device_train_batchsize": 2}', UnknownOptionError, "batch_size"),
        ("a.yaml", "distributed_type: FSPD\n", OptionValueError, "FSDP"),
        ("a.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_shard: 1}\n", UnknownOptionError, "fsdp_config"),
        ("a.yaml", "distributed_type: FSDP\nnum_processes: 3\nnum_machines: 2\n", ContradictionError, "multiple"),
        ("a.yaml", "model: {tensor_model_parallel: 2}\n", UnknownOptionError, "tensor_model_parallel_size"),
        ("a.yaml", "model: {bf16: true}\nmixed_precision: fp17_mixed\n", OptionValueError, "recipe"),
        ("a.yaml", "a: [\n", LayoutError, "YAML"),
        ("a.yaml", "!!python/object/apply:os.system ['true']\n", LayoutError, "YAML"),
        ("a.txt", "nothing here", LayoutError, "format"),
    ],
)  # fmt: skip
def test_errors_of_files(tmp_path: Path, name: str, text: str, kind: type[LayoutError], words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(kind, match=words):
        read_layout(tmp_path / name)


def test_sources_that_are_no_configurations(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="cannot read"):
        read_layout(tmp_path / "none.json")
    with pytest.raises(LayoutError, match="the configuration is empty"):
        read_layout(" ")
    with pytest.raises(LayoutError, match="expected one of megatron"):
        read_layout("--lr 1", "megatrn")
    with pytest.raises(LayoutError, match="int"):
        read_layout(3)  # type: ignore[arg-type]


def test_sizes_that_do_not_fit_the_devices() -> None:
    layout = TrainingLayout(framework="any", tp=4, pp=2, microbatch_size=2, global_batch=12)
    with pytest.raises(ContradictionError, match="multiple of 8 devices"):
        layout.at(12)
    with pytest.raises(ContradictionError, match="microbatch_size=2 x dp=4"):
        layout.at(32)
    assert layout.at(16).microbatches == 3
    with pytest.raises(ContradictionError, match="dp_replicate=3"):
        layout.replace(dp_replicate=3).at(16)
    with pytest.raises(ContradictionError, match="ep=3"):
        layout.replace(ep=3).at(16)
    with pytest.raises(ContradictionError, match="for 8 devices"):
        TrainingLayout(framework="any", devices=8).at(16)
    with pytest.raises(LayoutError, match="layout field"):
        TrainingLayout(framework="any", tensor=2)


SEEDS = {
    "megatron": MEGATRON + "--tensor-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttL --cp-comm-type p2p",
    "a.toml": "[training]\nseq_len = 128\n[parallelism]\ntensor_parallel_degree = 2\n",
    "a.py": "def f() -> Trainer.Config:\n    return Trainer.Config(training=TrainingConfig(seq_len=128))\n",
    "a.json": json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}),
    "b.json": json.dumps({"tp_size": 2, "fsdp_size": 2}),
    "a.yaml": "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n",
    "b.yaml": "model: {tensor_model_parallel_size: 2}\ntrain: {micro_batch_size: 1}\n",
}


@pytest.mark.parametrize("name", SEEDS)
def test_damaged_configurations_end_with_typed_errors(tmp_path: Path, name: str) -> None:
    """300 random changes of each configuration: characters that are removed, doubled, or replaced."""
    draw = random.Random(name)
    letters = "-= \n\t\"'[](){}|:,.*$\\#&!%0123456789abEtL\x00é"
    read, messages = 0, []
    for _ in range(300):
        text = SEEDS[name]
        for _ in range(draw.randint(1, 6)):
            at = draw.randrange(len(text))
            text = text[:at] + draw.choice(["", draw.choice(letters), text[at : at + 9] * 2]) + text[at + 1 :]
        try:
            if name == "megatron":
                read_layout(text, "megatron")
            else:
                (tmp_path / name).write_text(text)
                read_layout(tmp_path / name)
            read += 1
        except InternalError as error:
            raise AssertionError(f"a fault for {text!r}") from error
        except PartitionError as error:
            messages.append(str(error))
    assert read + len(messages) == 300
    assert messages and min(map(len, messages)) > 20


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--fp8-format e5m9", "expected one of none, e4m3, hybrid, e5m2, got 'e5m9'"),
        ("--fp8-format hybrid --fp8-recipe blockwize", "did you mean blockwise"),
        ("--fp4-format e2m2", "did you mean e2m1.*expected one of none, e2m1"),
        ("--fp4-format e2m1 --fp4-recipe nvfp5", "did you mean nvfp4"),
        ("--fp8-format hybrid --fp4-format e2m1", "together; expected products in one format"),
        ("--cuda-graph-impl foo", "expected one of none, local, transformer_engine, full_iteration"),
        ("--recompute-granularity selective --recompute-modules core_atn", "did you mean core_attn"),
        ("--tensor-model-parallel-size 2 --sequence-parallel --seq-length 4097", "not divisible by tp=2 under"),
        ("--tensor-model-parallel-size 16 --num-attention-heads 40", "=40 is not divisible by .*=16"),
        ("--expert-model-parallel-size 4 --num-experts 6", "=6 is not divisible by .*=4"),
    ],
)
def test_values_that_megatron_refuses(text: str, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        read_layout(f"{MEGATRON} {text}", "megatron")


RATIO = '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"ratio": 2}}}'
SELECTIVE = "[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = "


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", RATIO, "expected a number from 0 to 1"),
        ("a.toml", f"{SELECTIVE}'opp'", "expected op, or a whole number"),
        ("a.toml", f"{SELECTIVE}'0'", "expected op, or a whole number"),
    ],
)
def test_values_that_other_frameworks_refuse(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(OptionValueError, match=words):
        read_layout(tmp_path / name)
