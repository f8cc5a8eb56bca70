"""Options by the names that other libraries give them: the answer says what to write here."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from partitioner import Constraints, ExecutionProfile, Topology, partition
from partitioner.cli.app import app
from partitioner.errors import ConstraintError
from partitioner.option_text import _BY_NAME, _list_name_stems

# Another library's option -> what to write, of the value 2.
NUMBERS = {
    "tensor_parallel": "tp=2",
    "tensor_parallel_size": "tp=2",
    "tensor_model_parallel_size": "tp=2",
    "tensor_parallel_degree": "tp=2",
    "tensorModelParallelSize": "tp=2",
    "tensor-parallel-size": "tp=2",
    "tp_size": "tp=2",
    "tp_degree": "tp=2",
    "model_parallel_size": "tp=2",
    "mp_size": "tp=2",
    "pipeline_parallel": "pp=2",
    "pipeline_model_parallel_size": "pp=2",
    "pipeline_parallel_degree": "pp=2",
    "pp_size": "pp=2",
    "num_stages": "pp=2",
    "num_pipeline_stages": "pp=2",
    "data_parallel": "dp=2",
    "data_parallel_size": "dp=2",
    "dp_degree": "dp=2",
    "dp_size": "dp=2",
    "context_parallel_size": "cp=2",
    "context_parallel_degree": "cp=2",
    "cp_size": "cp=2",
    "expert_parallel": "ep=2",
    "expert_model_parallel_size": "ep=2",
    "expert_parallel_degree": "ep=2",
    "ep_size": "ep=2",
    "expert_tensor_parallel_size": "etp=2",
    "data_parallel_shard_degree": "dp_shard=2",
    "zero_hpz_partition_size": "dp_shard=2",
    "zero_stage": "zero=2",
    "stage": "zero=2",
    "micro_batch_size": "microbatch_size=2",
    "train_micro_batch_size_per_gpu": "microbatch_size=2",
    "per_device_train_batch_size": "microbatch_size=2",
    "mbs": "microbatch_size=2",
    "global_batch_size": "partition(..., global_batch=2)",
    "max_grad_norm": "engine.clip_grad_norm_(2)",
}
# Another library's option -> the option here that the answer names.
NAMES = {
    "gradient_accumulation_steps": "microbatch_size",
    "accumulate_grad_batches": "microbatch_size",
    "num_microbatches": "microbatch_size",
    "activation_checkpointing": "recompute",
    "gradient_checkpointing": "recompute",
    "recompute_granularity": "recompute",
    "recompute_activations": "recompute",
    "selective_ac_option": "recompute",
    "remat": "recompute",
    "cpu_offload": "offload",
    "offload_optimizer": "offload",
    "fine_grained_activation_offloading": "offload",
    "seq_parallel": "sequence_parallel",
    "sequence_parallel_size": "cp",
    "ulysses_degree": "cp",
    "cp_comm_type": "context",
    "fsdp": "zero",
    "fully_shard": "zero",
    "use_distributed_optimizer": "zero",
    "sharding_strategy": "zero",
    "reshard_after_forward": "zero",
    "data_parallel_replicate_degree": "dp_shard",
    "pipeline_parallel_schedule": "schedule",
    "virtual_pipeline_model_parallel_size": "virtual_stages",
    "num_layers_per_virtual_pipeline_stage": "virtual_stages",
    "split_points": "stage_of",
    "device_map": "stage_of",
    "overlap_grad_reduce": "overlap",
    "overlap_comm": "overlap",
    "tp_comm_overlap": "overlap_tensor",
    "moe_token_dispatcher_type": "dispatch",
    "communication_data_type": "grad_compression",
    "grad_reduce_in_fp32": "short_gradients",
    "bf16": "precision",
    "mixed_precision": "precision",
    "torch_dtype": "precision",
    "torch_compile": "Engine",
    "world_size": "topology",
    "num_nodes": "topology",
    "gradient_clipping": "clip_grad_norm_",
}


def answer(name: str, value: Any = 2) -> str:
    with pytest.raises(ConstraintError, match=f"unknown constraint '{re.escape(name)}'") as caught:
        Constraints(**{name: value})
    return str(caught.value)


@pytest.mark.parametrize(("name", "here"), NUMBERS.items())
def test_the_answer_has_the_value(name: str, here: str) -> None:
    assert f"here it is {here}" in answer(name)


@pytest.mark.parametrize(("name", "here"), NAMES.items())
def test_the_answer_names_the_option(name: str, here: str) -> None:
    told = answer(name, True).partition("; expected")[0]
    assert re.search(rf"here it is .*\b{here}\b", told), told


def test_what_is_misspelt_is_found_as_before() -> None:
    assert "did you mean schedule" in answer("schedul", "gpipe")
    assert "did you mean" in answer("microbatchsize")


def test_what_nothing_is_like_lists_what_there_is() -> None:
    told = answer("colour")
    assert "here it is" not in told
    assert "did you mean" not in told
    assert "expected pp, dp, cp" in told


def test_no_constraint_is_taken_for_another() -> None:
    """A name of this library's own never comes to the table."""
    assert not set(Constraints.model_fields) & set(_BY_NAME)


def test_what_moved_to_the_profile_is_answered_with_its_field() -> None:
    """Every fact of a profile is a word that ``Constraints`` answers with ``ExecutionProfile(...)``."""
    constraints = {"overlap_tensor", "tensor_pieces", "fp8_scaling", "fp8_products"}  # what our runtime executes, too
    for name in set(ExecutionProfile.model_fields) - {"name", "expert_tensor"} - constraints:
        assert re.search(rf"profile=ExecutionProfile\({name}=", answer(name, True)), name


def test_options_that_an_answer_names_are_there() -> None:
    """Every ``name=`` of the table is a constraint, or an argument of the call that is named."""
    calls = {"precision", "optimizer", "global_batch", "objective", "loss", "time_limit_s", "compile", "loss_scale"}
    calls |= {"profile"}
    for here in set(_BY_NAME.values()):
        named = set(re.findall(r"\b([a-z_]+)=", here)) - {"nodes"}
        assert named <= {*Constraints.model_fields, *ExecutionProfile.model_fields, *calls}, here


def test_constraints_are_read_from_text() -> None:
    read = Constraints.parse(
        "tp=2, pp=2,schedule=gpipe, sequence-parallel=false,data_shares=3+2,offload=optimizer+disk"
    )
    assert read == Constraints(
        tp=2, pp=2, schedule="gpipe", sequence_parallel=False, data_shares=(3, 2), offload=("optimizer", "disk")
    )
    assert Constraints.parse("stage_of=model.embed:0+head:-1").stage_of == {"model.embed": 0, "head": -1}
    assert Constraints.parse("") == Constraints()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "'tp' is no option; expected name=value, as in tp=8,schedule=gpipe"),
        ("tp=two", "constraint tp: input should be a whole number, got 'two'"),
        ("tensor_parallel=2", "unknown constraint 'tensor_parallel'; here it is tp=2"),
        ("stage_of=head", "stage_of=head names no stages; expected PREFIX:STAGE"),
    ],
)
def test_text_of_another_form_is_a_constraint_error(text: str, message: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(message)):
        Constraints.parse(text)


def test_what_says_nothing_is_left_out_of_names() -> None:
    assert _list_name_stems("num_tensor_parallel_size")[-1] == "tensor_parallel"


def test_why_not_has_the_answer_too() -> None:
    plan = partition(nn.Linear(4, 4), Topology.local(2), (torch.ones(4, 4),), loss=lambda output: output.sum())
    with pytest.raises(ConstraintError, match="here it is tp=2"):
        plan.why_not(tensor_parallel=2)


@pytest.mark.parametrize(
    ("arguments", "here"),
    [
        (("plan", "model.py:make", "--constraints", "tensor_parallel=2"), "here it is tp=2"),
        (("plan", "model.py:make", "--constraints", "zero-stage=2"), "here it is zero=2"),
        (("plan", "model.py:make", "--tensor-parallel-size", "2"), "here it is tp=N"),
        (("plan", "model.py:make", "--pipeline_parallel=2"), "here it is pp=N"),
        (("plan", "model.py:make", "--gradient-checkpointing"), "here it is recompute="),
        (("size", "model.py:make", "dgx-h100", "--micro-batch-size", "2"), "here it is microbatch_size=N"),
        (("plan", "model.py:make", "--tp-comm-overlap"), "here it is overlap_tensor="),
        (("plan", "model.py:make", "--moe-grouped-gemm"), "which predicts another framework: as --profile"),
        (("plan", "model.py:make", "--colour"), "No such option: --colour"),
        (("show", "plan.json", "--tp-size", "2"), "No such option: --tp-size"),
    ],
)
def test_commands_have_the_answer_too(arguments: tuple[str, ...], here: str) -> None:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2
    assert here in " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ("AdamW", "unknown optimizer 'AdamW'; did you mean adamw"),
        ("SGD", "unknown optimizer 'SGD'; did you mean sgd"),
        (torch.optim.SGD, "unknown optimizer 'SGD'; did you mean sgd"),
        (torch.optim.AdamW([torch.zeros(1, requires_grad=True)]), "unknown optimizer 'AdamW'"),
        ("muon", "unknown optimizer 'muon'; expected one of adamw"),
        (None, "unknown optimizer 'NoneType'; did you mean none"),
    ],
)
def test_optimizers_go_by_a_name_of_this_library(optimizer: Any, said: str) -> None:
    with pytest.raises(ConstraintError, match=said):
        partition(nn.Linear(4, 4), Topology.local(1), (torch.ones(4, 4),), loss=torch.sum, optimizer=optimizer)
