"""Predictions of layouts, and exports of plans."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from partitioner import (
    CapacityError,
    Constraints,
    ContradictionError,
    LayoutError,
    Plan,
    Topology,
    TrainingLayout,
    partition,
    predict_layout,
    read_layout,
    write_layout,
)
from partitioner.interop.plan_layout import describe_plan_layout
from tests.helpers.command_line import invoke

pytestmark = pytest.mark.usefixtures("without_baselines")


class Tower(nn.Module):
    """Layers in a list, with a head."""

    def __init__(self, width: int = 64, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().mean()


INPUTS = {"x": torch.zeros(16, 64)}
MEGATRON = "--micro-batch-size 1 --global-batch-size 16 --bf16 "


def stages_of(plan: Plan) -> list[tuple[str, str]]:
    return [(stage.first, stage.last) for stage in plan.estimate.stages]


def test_a_prediction_is_the_plan_of_the_same_constraints() -> None:
    """A layout is priced as ``partition`` prices its constraints under its profile."""
    layout = read_layout(MEGATRON + "--tensor-model-parallel-size 2 --use-distributed-optimizer")
    found = predict_layout(layout, Tower(), Topology.preset("dgx-h100"), INPUTS)
    same = partition(
        Tower(), Topology.preset("dgx-h100"), INPUTS, global_batch=16, precision="bf16", profile="megatron-core",
        constraints=Constraints(tp=2, pp=1, cp=1, ep=1, dp=4, microbatch_size=1, zero=1, recompute="none", offload=(),
                                memory_margin=0, placement="in_order", sequence_parallel=False),
    )  # fmt: skip
    assert found.step_time == same.estimate.step_time
    assert found.plan.estimate.memory == same.estimate.memory
    assert found.fits and found.ours is not None and found.gain is not None
    assert found.gain == pytest.approx(found.step_time / found.ours.estimate.step_time)
    assert "Does it fit?" in str(found) and "optimizer states" in str(found)


def test_the_gain_says_what_compilation_alone_would_give() -> None:
    """The layout is priced once more with fused operators, under the framework's own profile."""
    layout = read_layout(MEGATRON)
    fused = layout.replace(profile=layout.profile.model_copy(update={"fused_kernels": True}))
    model, topology = Tower(width=1024), Topology.preset("dgx-h100")
    inputs = {"x": torch.zeros(16, 1024)}
    found = predict_layout(layout, model, topology, inputs)
    compiled = predict_layout(fused, model, topology, inputs)
    assert found.compiled_s == compiled.step_time < found.step_time
    assert compiled.compiled_s is None
    assert predict_layout(layout, model, Topology.local(8), inputs).compiled_s is None
    assert "with torch.compile, a step of the configuration would take" in " ".join(str(found).split())
    assert "torch.compile" not in str(compiled)


def test_stages_are_cut_as_the_framework_cuts_them() -> None:
    words = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttttttL"
    found = predict_layout(read_layout(MEGATRON + words), Tower(), Topology.preset("dgx-h100"), INPUTS, compare=False)
    assert stages_of(found.plan)[0][1].startswith("layers.1")
    assert stages_of(found.plan)[1][0].startswith("layers.2")
    even = predict_layout(
        read_layout(MEGATRON + "--pipeline-model-parallel-size 2"), Tower(), Topology.preset("dgx-h100"), INPUTS,
        compare=False,
    )  # fmt: skip
    assert stages_of(even.plan)[1][0].startswith("layers.4")
    with pytest.raises(ContradictionError, match="8 layers together"):
        predict_layout(read_layout(MEGATRON + words), Tower(layers=6), Topology.preset("dgx-h100"), INPUTS)


def test_layers_of_a_stage_decide_the_virtual_stages() -> None:
    layout = read_layout(MEGATRON + "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2")
    found = predict_layout(layout, Tower(), Topology.preset("dgx-h100"), INPUTS, compare=False)
    assert (found.plan.chosen.virtual_stages, found.plan.schedule) == (2, "interleaved")


def test_a_layout_that_does_not_fit_says_by_how_much() -> None:
    with torch.device("meta"):
        model = Tower(width=16384, layers=60)
    inputs = {"x": torch.zeros(8, 16384, device="meta")}
    layout = read_layout("--micro-batch-size 1 --global-batch-size 8 --bf16")
    topology = Topology.preset("dgx-h100")
    found = predict_layout(layout, model, topology, inputs)
    assert not found.fits
    peak = max(found.plan.estimate.memory)
    with pytest.raises(CapacityError) as error:
        partition(
            model, topology, inputs, global_batch=8, precision="bf16", constraints=layout.at(8).constraints,
            profile=layout.profile, estimate_only=True,
        )  # fmt: skip
    assert 0 < found.missing_bytes < peak
    assert found.missing_bytes == pytest.approx(error.value.missing_bytes, rel=0.05)
    assert found.ours is not None and "It fits" in str(found)


def test_a_different_length_of_samples_is_noted() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, 16)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.layer(self.embedding(tokens)).square().mean()

    layout = read_layout(MEGATRON + "--seq-length 64")
    inputs = {"tokens": torch.zeros(16, 32, dtype=torch.long)}
    found = predict_layout(layout, Attention(), Topology.preset("dgx-h100"), inputs, compare=False)
    assert any("64 tokens" in note and "32" in note for note in found.notes)


def test_a_configuration_of_another_model_is_noted() -> None:
    """Against the layers of the model, and against its configuration if it has one."""
    model, topology = Tower(), Topology.preset("dgx-h100")
    layers = len(model.layers)
    model.config = SimpleNamespace(hidden_size=64)  # type: ignore[assignment]

    def notes(text: str) -> list[str]:
        found = predict_layout(read_layout(MEGATRON + text), model, topology, INPUTS, compare=False)
        return [note for note in found.notes if "another model" in note]

    assert notes(f"--num-layers {layers} --hidden-size 64 --num-experts 8") == []
    assert notes(f"--num-layers {layers + 1} --hidden-size 4096") == [
        "The configuration is of another model: --hidden-size is 4,096, and the given model has 64. The prediction is "
        "for the given model.",
        f"The configuration is of another model: --num-layers is {layers + 1}, and the given model has {layers}. The "
        "prediction is for the given model.",
    ]


def test_a_plan_is_exported_and_read_back(tmp_path: Path) -> None:
    pins = Constraints.parse("pp=2,tp=2,dp=2,microbatch_size=2,zero=1,schedule=1f1b,recompute=none")
    plan = partition(Tower(), Topology.preset("dgx-h100"), INPUTS, constraints=pins, precision="bf16")
    layout, _ = describe_plan_layout(plan)
    assert sum(layout.stage_layers) == 8
    missing = plan.export("megatron", tmp_path / "arguments.txt")
    assert {each.option for each in missing} <= {"operators", "stage_of"}
    back = read_layout(tmp_path / "arguments.txt").at(8)
    assert {n: (v, back.facts[n]) for n, v in layout.at(8).facts.items() if v != back.facts[n]} == {}
    found = predict_layout(back, Tower(), Topology.preset("dgx-h100"), INPUTS, compare=False)
    assert stages_of(found.plan) == stages_of(plan)
    lost = {each.option for each in plan.export("torchtitan", tmp_path / "planned.py")}
    assert {"zero", "stage_layers"} <= lost
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("format_name", "name", "expected"),
    [
        ("torchtitan", "planned.json", ".py or .toml"),
        ("deepspeed", "ds.yaml", ".json"),
        ("accelerate", "accelerate.json", ".yaml or .yml"),
        ("transformers", "distributed.toml", ".json"),
        ("megatron", "arguments.json", ".sh or .txt or .yaml or .yml"),
    ],
)
def test_the_ending_of_another_syntax_is_refused(tmp_path: Path, format_name: str, name: str, expected: str) -> None:
    """A framework that goes by the ending could not read the file."""
    layout = read_layout(MEGATRON)
    with pytest.raises(LayoutError, match=re.escape(f"expected a file whose name ends in {expected}")):
        write_layout(layout, format_name, tmp_path / name)
    assert not any(tmp_path.iterdir())
    write_layout(layout, format_name, tmp_path / "without_an_ending")


def test_plans_that_cannot_be_exported(tmp_path: Path) -> None:
    plan = partition(Tower(), Topology.local(2), INPUTS, objective="infer")
    with pytest.raises(LayoutError, match="inference"):
        plan.export("megatron", tmp_path / "a.txt")
    trained = partition(Tower(), Topology.local(2), INPUTS)
    with pytest.raises(LayoutError, match="did you mean torchtitan"):
        trained.export("torchtitn", tmp_path / "a.txt")
    assert [*tmp_path.iterdir()] == []


def test_fields_that_a_configuration_leaves_open_are_chosen() -> None:
    layout = TrainingLayout(framework="deepspeed", zero=3, precision="bf16")
    found = predict_layout(layout, Tower(), Topology.preset("dgx-h100"), INPUTS, compare=False)
    assert found.plan.chosen.mesh["dp"] == 8 and found.plan.chosen.zero == 3


MODEL = """
import torch
from torch import nn
class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()
def make():
    return Tower(), {"x": torch.zeros(16, 64)}
"""


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("towers.py").write_text(MODEL)
    Path("ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "steps_per_print": 5}))
    done = invoke("predict", "towers.py:make", "-t", "dgx-h100", "--deepspeed", "ds.json", "--set", "recompute=none",
                  "-o", "plan.json")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "steps_per_print=5" in done.stdout and "our plan" in done.stdout
    done = invoke("export", "plan.json", "torchtitan", "planned.toml")
    assert done.exit_code == 0, done.stderr
    assert Path("planned.toml").is_file()
    done = invoke("predict", "towers.py:make", "-t", "dgx-h100", "--torchtitan", "planned.toml", "--alone")
    assert done.exit_code == 0, done.stderr
    done = invoke("predict", "towers.py:make", "-t", "dgx-h100")
    assert done.exit_code == 2 and "exactly one" in done.stderr
    done = invoke("predict", "towers.py:make", "-t", "dgx-h100", "--megatron", "--tensor-model-parallel-sise 2")
    assert done.exit_code == 2 and "tensor-model-parallel-size" in done.stderr
