"""A layout that is written to a format and read back is the same, except for what the writer lists."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from partitioner.execution_profile import OURS
from partitioner.interop.formats import read_layout, write_layout
from partitioner.interop.layout import FACTS, TrainingLayout
from partitioner.interop.options import NO_EFFECT, NOT_USED, OF_MODEL
from tests.helpers.random_layouts import layouts

FILES = {
    "words": ("megatron", "arguments.txt"),
    "yaml": ("megatron", "megatron.yaml"),
    "toml": ("torchtitan", "train.toml"),
    "module": ("torchtitan", "planned.py"),
    "deepspeed": ("deepspeed", "ds.json"),
    "accelerate": ("accelerate", "accelerate.yaml"),
    "transformers": ("transformers", "distributed.json"),
}


@pytest.mark.parametrize("case", FILES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts())
def test_a_written_layout_is_read_back(case: str, layout: TrainingLayout, tmp_path: Path) -> None:
    format_name, file = FILES[case]
    missing = {each.option for each in write_layout(layout, format_name, tmp_path / file)}
    assert missing <= set(FACTS)
    read = read_layout(tmp_path / file, format_name)
    # sizes of a mesh that lacks an axis are those of another number of devices
    lost = {"pp", "tp", "cp", "dp"} & missing
    back = read if lost else read.at(layout.devices)
    follows = (
        {"dp", "dp_shard", "dp_replicate", "zero", "microbatches", "global_batch", "devices", "etp"} if lost else set()
    )
    batch = {"microbatches", "global_batch"} if missing & {"microbatch_size", "microbatches", "global_batch"} else set()
    skipped = missing | follows | batch | ({"dp_shard", "dp_replicate"} if "zero" in missing else set())
    found = {name: (value, back.facts[name]) for name, value in layout.facts.items() if name not in skipped}
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}


@pytest.mark.parametrize("case", FILES)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts())
def test_what_is_written_has_an_effect(case: str, layout: TrainingLayout, tmp_path: Path) -> None:
    """The reader of a format knows the meaning of each option that its writer writes."""
    format_name, file = FILES[case]
    write_layout(layout, format_name, tmp_path / file)
    for option in read_layout(tmp_path / file, format_name).unused:
        assert option.reason not in (NO_EFFECT, NOT_USED, OF_MODEL), option


@pytest.mark.parametrize("case", ["toml", "module", "accelerate"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_compiled_layout_is_written_as_compiled(case: str, compiled: bool, tmp_path: Path) -> None:
    format_name, file = FILES[case]
    profile = OURS.model_copy(update={"fused_kernels": compiled})
    layout = TrainingLayout(framework="partitioner", dp=4, devices=4, zero=3, microbatch_size=1, profile=profile)
    write_layout(layout, format_name, tmp_path / file)
    assert read_layout(tmp_path / file, format_name).profile.fused_kernels is compiled
