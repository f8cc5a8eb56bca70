"""Samples that meet within a microbatch alone: the step is the mean over groups, on any mesh the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from partitioner import Constraints, Plan, PreparedModel, Topology, partition, prepare, run_reference
from partitioner.errors import ConstraintError, PlanError
from partitioner.passes.errors import InputsError, UnsupportedError
from partitioner.plans.reference import keep_in_float64
from partitioner.plans.verify import run_groups
from partitioner.runtime.launch.local import run_threads
from tests.helpers.expert_layers import limited
from tests.helpers.torchrun import torchrun

pytestmark = pytest.mark.usefixtures("without_baselines")

SAMPLES, SIZE, LENGTH, VOCABULARY = 8, 2, 6, 32
SMALL: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    vocab_size=VOCABULARY, max_position_embeddings=LENGTH,
)  # fmt: skip
Made = tuple[nn.Module, dict[str, Tensor]]


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def ignoring() -> dict[str, Tensor]:
    """The groups have 10, 8, 5 and 3 targets that count."""
    inputs = tokens()
    for sample, left_out in enumerate((0, 0, 1, 1, 2, 3, 3, 4)):
        inputs["labels"][sample, LENGTH - left_out :] = -100
    return inputs


def mixtral() -> Made:
    """Rows to its experts are uneven, and their balance counts in the loss."""
    torch.manual_seed(0)
    experts = dict(num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.5)
    return MixtralForCausalLM(MixtralConfig(**SMALL, **experts)), ignoring()


def llama(inputs: Callable[[], dict[str, Tensor]] = ignoring) -> Made:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)), inputs()


class Pairs(nn.Module):
    """Two towers whose results are told from those of the other samples."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, 8)) for _ in "ab")
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        a, b = (F.normalize(tower(z), dim=-1) for tower, z in zip(self.towers, (x, y), strict=True))
        logits = self.scale.exp() * a @ b.T
        target = torch.arange(x.shape[0])
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        return {"loss": loss, "logits": logits, "spread": a.std(), "scale": self.scale}


class Normed(nn.Module):
    """Batch norm by the statistics of the samples that are there, and samples that are repeated and split again."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width, track_running_stats=False) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + norm(layer(x)).tanh()
        first, again = torch.cat([x, x.flip(0)]).chunk(2)
        each = torch.stack([(first[i] + again[i - 1]).square().sum() for i in range(x.shape[0])])
        return each.sqrt().mean() + (x - y).square().mean()


def pairs() -> Made:
    torch.manual_seed(0)
    return Pairs(), {"x": torch.randn(SAMPLES, 8), "y": torch.randn(SAMPLES, 8)}


def normed() -> Made:
    torch.manual_seed(0)
    return Normed(), {"x": torch.randn(SAMPLES, 8), "y": torch.randn(SAMPLES, 8)}


def capacity() -> Made:
    return limited(3)  # of the 8 tokens of a group


MODELS: dict[str, Callable[[], Made]] = {
    "mixtral": mixtral, "llama": llama, "pairs": pairs, "normed": normed, "capacity": capacity,
}  # fmt: skip


def in_groups(**axes: Any) -> Constraints:
    return Constraints(**{"couple": "microbatch", "microbatch_size": SIZE, **axes})


def ranks_of(axes: dict[str, Any]) -> int:
    return int(torch.tensor([axes.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")]).prod())


@cache
def prepared(name: str) -> PreparedModel:
    return prepare(*MODELS[name]())


@cache
def planned(name: str, axes: tuple[tuple[str, Any], ...]) -> Plan:
    pinned = {"pp": 1, "dp": 1, "tp": 1} | dict(axes)
    return partition(prepared(name), Topology.local(ranks_of(pinned)), constraints=in_groups(**pinned))


def plan_of(name: str, **axes: Any) -> Plan:
    return planned(name, tuple(axes.items()))


QUICK: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", dict(tp=2)),
    ("mixtral", dict(pp=2, dp=2, ep=2, zero=1)),
    ("mixtral", dict(dp=2, ep=2, zero=3)),
    ("llama", dict(pp=2, dp=2)),
    ("llama", dict(dp=2, tp=2, zero=2)),
    ("pairs", dict(pp=2)),
    ("pairs", dict(dp=4, zero=2)),
    ("pairs", dict(tp=2)),
    ("normed", dict(pp=2, dp=2, schedule="zb-1p")),
    ("capacity", dict(dp=2, ep=2)),
    ("capacity", dict(tp=2)),
]
EVERY: list[dict[str, Any]] = [dict(pp=2), dict(dp=2), dict(tp=2)]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    *(("mixtral", axes) for axes in (dict(pp=2), dict(dp=2), dict(dp=2, ep=2), dict(dp=2, tp=2, ep=4, etp=1))),
    *(("mixtral", dict(dp=2, ep=2, zero=zero)) for zero in (1, 2)),
    *(("mixtral", dict(pp=2, schedule=name)) for name in ("interleaved", "zb-1p", "zb-v")),
    ("mixtral", dict(pp=2, recompute="full")),
    ("mixtral", dict(cp=2)),
    *((name, axes) for name in ("llama", "normed") for axes in EVERY),
    *(("llama", dict(dp=2, zero=zero)) for zero in (1, 3)),
    ("llama", dict(cp=2, pp=2)),
    ("pairs", dict(dp=2)),
    *(("capacity", axes) for axes in (dict(dp=2), dict(dp=2, ep=2, zero=3))),
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]


@pytest.mark.parametrize(("name", "axes"), CASES, ids=str)
def test_equal_to_the_mean_over_groups(name: str, axes: dict[str, Any]):
    plan = plan_of(name, **axes)
    assert (plan.chosen.microbatch_size, plan.global_batch) == (SIZE, SAMPLES)
    assert plan.num_microbatches * plan.mesh["dp"] == SAMPLES // SIZE
    assert not any(call.prologue for stage in plan.program.stages for call in stage.calls), (
        "groups have totals in common"
    )
    report = plan.verify(*MODELS[name]())
    assert report.ok, str(report)
    trained = [n for n, p in MODELS[name]()[0].named_parameters() if p.requires_grad]
    assert {f"grad {n}" for n in trained} <= report.errors.keys()


def accumulated(model: nn.Module, inputs: dict[str, Tensor], size: int = SIZE) -> Tensor:
    """The mean loss of the groups, as a loop in one process finds it; its gradients are left in ``model``."""
    count = SAMPLES // size
    total = torch.zeros(())
    for group in range(count):
        output = model(**{name: x[group * size : (group + 1) * size] for name, x in inputs.items()})
        loss = (output if isinstance(output, Tensor) else output["loss"]) / count
        loss.backward()
        total = total + loss.detach()
    return total


@pytest.mark.parametrize("name", MODELS)
def test_the_judge_is_gradient_accumulation(name: str):
    plan = plan_of(name, dp=2)
    judged = run_groups(*MODELS[name](), None, plan.program, SIZE)
    model, inputs = MODELS[name]()
    with keep_in_float64():
        model = model.double()
        loss = accumulated(model, {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()})
    torch.testing.assert_close(judged.loss, loss)
    for parameter, value in model.named_parameters():
        torch.testing.assert_close(judged.grads[parameter], value.grad)


@pytest.mark.slow
def test_trained_over_gloo_as_by_gradient_accumulation(tmp_path: Path):
    """Three steps of AdamW, in processes."""
    model, inputs = mixtral()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    save_file(inputs, tmp_path / "batch.safetensors")
    plan = plan_of("mixtral", pp=2, dp=2, ep=2)
    plan.save(tmp_path / "plan.json")
    options = ["--weights", str(tmp_path), "--batch", str(tmp_path / "batch.safetensors"), "--lr", "0.01"]
    done = torchrun(4, str(tmp_path / "plan.json"), *options, "--steps", "3", "--save", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(accumulated(model, inputs).item())
        optimizer.step()
    printed = [float(x) for x in re.findall(r"^step \d+  loss (\S+)  .* ms$", done.stdout, re.MULTILINE)]
    assert printed == pytest.approx(losses, rel=1e-4)
    saved: dict[str, Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        saved |= load_file(file)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(saved[name], parameter.detach(), rtol=1e-3, atol=1e-4)


# --- next to what all samples give together ---------------------------------------------------------------------------


def test_a_mean_over_targets_that_count_is_each_groups_own():
    """With as many in each it is that of the batch; else it is not."""
    for inputs, same in ((tokens, True), (ignoring, False)):
        model, batch = llama(inputs)
        plan = partition(model, Topology.local(2), batch, constraints=in_groups(pp=2, dp=1, tp=1))
        found = run_threads(plan, model, batch, precision="fp64")
        whole = run_reference(model, batch)
        assert whole.loss is not None and found.loss is not None
        assert (abs(float(found.loss / whole.loss) - 1) < 1e-12) == same
        weight = "model.layers.0.mlp.up_proj.weight"
        assert torch.allclose(found.grads[weight], whole.grads[weight], rtol=1e-9, atol=1e-12) == same


def test_one_group_is_the_batch():
    model, inputs = pairs()
    plan = partition(model, Topology.local(2), inputs, constraints=in_groups(pp=1, dp=1, tp=2, microbatch_size=SAMPLES))
    found, whole = run_threads(plan, model, inputs, precision="fp64"), run_reference(model, inputs)
    torch.testing.assert_close(found.loss, whole.loss)
    assert plan.verify(model, inputs).ok


def test_the_groups_do_not_depend_on_the_mesh():
    model, inputs = mixtral()
    plans = [plan_of("mixtral", **axes) for name, axes in QUICK if name == "mixtral"]
    losses = [float(run_threads(plan, model, inputs, precision="fp64").loss) for plan in plans]
    assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-12)


def test_groups_of_another_size_are_another_step():
    model, inputs = pairs()
    two, four = (
        run_threads(
            partition(prepared("pairs"), Topology.local(2), constraints=in_groups(pp=2, microbatch_size=size)),
            model,
            inputs,
            precision="fp64",
        )
        for size in (2, 4)
    )
    assert float(two.loss) != pytest.approx(float(four.loss), rel=0.1)


# --- what is drawn ----------------------------------------------------------------------------------------------------


class Drawing(nn.Module):
    """Noise for each element, for each sample, and one of a kind, that two layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        common = torch.randn(8)
        for layer in self.layers:
            x = F.dropout(layer(x) + common, 0.4) + torch.rand(x.shape[0], 1)
        return {"loss": x.square().mean(), "common": common, "x": x}


@pytest.mark.parametrize("axes", [dict(pp=3), dict(dp=2), dict(tp=2), dict(dp=4, zero=3)], ids=str)
def test_groups_draw_numbers_of_their_own(axes: dict[str, Any]):
    torch.manual_seed(0)
    model, inputs = Drawing(), (torch.randn(1, 8).expand(SAMPLES, 8).contiguous(),)
    constraints = in_groups(**{"pp": 1, "dp": 1, "tp": 1} | axes)
    plan = partition(model, Topology.local(ranks_of(axes)), inputs, constraints=constraints)
    report = plan.verify(model, inputs)
    assert report.ok, str(report)
    rows = run_threads(plan, model, inputs, precision="fp64").leaves["x"]
    assert len({tuple(row) for row in rows.tolist()}) == SAMPLES


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.then = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.then(F.dropout(self.first(x).tanh(), 0.4)).square().mean()


def test_what_is_drawn_for_samples_is_that_of_the_batch():
    """Where their dim is the outermost of what is drawn: as under ``couple="batch"``, number for number."""
    torch.manual_seed(0)
    model, inputs = Dropping(), (torch.randn(SAMPLES, 3, 8),)
    ready = prepare(model, inputs)
    apart, together = (
        partition(ready, Topology.local(2), constraints=in_groups(couple=couple, pp=1, dp=2, tp=1))
        for couple in ("microbatch", "batch")
    )
    found, expected = (run_threads(plan, model, inputs, precision="fp64", seed=3) for plan in (apart, together))
    torch.testing.assert_close(found.loss, expected.loss)
    for name, gradient in expected.grads.items():
        torch.testing.assert_close(found.grads[name], gradient)


# --- inputs and results -----------------------------------------------------------------------------------------------


def test_results_are_joined_averaged_or_left_alone():
    model, inputs = pairs()
    plan = plan_of("pairs", dp=2)
    assert {o.path: o.batch for o in plan.program.outputs} == {"loss": "P", "logits": "S0", "spread": "P", "scale": "R"}
    found = run_threads(plan, model, inputs, precision="fp64").leaves
    with keep_in_float64():
        model = model.double()
        parts = [model(inputs["x"][i : i + SIZE].double(), inputs["y"][i : i + SIZE].double()) for i in (0, 2, 4, 6)]
    torch.testing.assert_close(found["logits"], torch.cat([part["logits"] for part in parts]).detach())
    torch.testing.assert_close(found["spread"], torch.stack([part["spread"] for part in parts]).mean().detach())
    torch.testing.assert_close(found["scale"], model.scale.detach())


class Counting(nn.Module):
    """``of``: what it returns beside its loss."""

    def __init__(self, of: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.of = nn.Linear(6, 6), of

    def forward(self, x: Tensor, table: Tensor) -> dict[str, Any]:
        x = self.layer(x) + table
        return {"loss": x.square().mean().sqrt(), "beside": self.of(x)}


def counting(of: Callable[[Tensor], Any], **more: Any) -> tuple[Plan, nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = Counting(of), {"x": torch.randn(SAMPLES, 6), "table": torch.randn(1, 6)}
    plan = partition(model, Topology.local(2), inputs, constraints=in_groups(pp=1, dp=2, tp=1, **more))
    return plan, model, inputs


BESIDE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a number of each sample": (lambda x: x.sum(1), "S0"),
    "the last dim": (lambda x: x.T, "S1"),
    "a mean of each feature": (lambda x: x.mean(0), "P"),
    "whole numbers of each sample": (lambda x: x.argmax(1), "S0"),
    "whole numbers of none": (lambda x: torch.arange(3), "R"),
}


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("size", [1, 2])
def test_where_the_samples_of_a_result_are_does_not_depend_on_sizes(name: str, size: int):
    """A group of one sample has inputs and results of one row that are no samples."""
    of, way = BESIDE[name]
    plan, model, inputs = counting(of, microbatch_size=size)
    assert {i.path: i.batch_dim for i in plan.program.inputs} == {"x": 0, "table": None}
    assert next(o.batch for o in plan.program.outputs if o.path == "beside") == way
    report = plan.verify(model, inputs)
    assert report.ok, str(report)


def test_a_result_that_cannot_be_joined_is_refused():
    with pytest.raises(UnsupportedError, match=r"the output 'beside' has 1 dims in a group .* and 2 in a larger one"):
        counting(lambda x: x[:, :3].squeeze(), microbatch_size=1)
    with pytest.raises(UnsupportedError, match=r"the output 'beside' \(int64, shape \[6\]\) depends .* couple='batch'"):
        counting(lambda x: (x > 0).sum(0))


class Sized(nn.Module):
    """Pairs of a number of samples that is written into the model."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.pairs, self.whole = Pairs(), whole
        self.register_buffer("target", torch.arange(SIZE))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        made = self.pairs(x, y)
        loss = made["loss"] + F.cross_entropy(made["logits"], self.target)
        return {"loss": loss, "logits": made["logits"]} if self.whole else loss


def test_a_model_of_as_many_samples_as_a_group():
    """Where its results are to be joined, what of them are samples is told by a model of others."""
    _, inputs = pairs()
    torch.manual_seed(0)
    model = Sized(whole=False)
    plan = partition(model, Topology.local(2), inputs, constraints=in_groups(pp=2))
    assert plan.verify(model, inputs).ok
    with pytest.raises(
        InputsError,
        match=r"with 4 samples, the size of a microbatch, and the model fails .*: Sized.forward fails",
    ):
        partition(Sized(whole=True), Topology.local(2), inputs, constraints=in_groups(pp=2))


def test_a_sample_of_the_batch_is_enough():
    model, inputs = pairs()
    few = {name: x[:1] for name, x in inputs.items()}
    plan = partition(model, Topology.local(2), few, global_batch=SAMPLES, constraints=in_groups(pp=2))
    assert plan.global_batch == SAMPLES and plan.verify(model, inputs).ok


def test_an_exported_program_with_a_dynamic_batch():
    model, inputs = pairs()
    batch = {0: torch.export.Dim("batch")}
    exported = torch.export.export(model, (), inputs, dynamic_shapes={"x": batch, "y": batch})
    plan = partition(exported, Topology.local(2), constraints=in_groups(dp=2))
    assert plan.global_batch == SAMPLES and plan.verify(model, inputs).ok
    with pytest.raises(InputsError, match="dynamic batch dim"):
        partition(torch.export.export(model, (), inputs), Topology.local(2), constraints=in_groups(dp=2))


def test_inference_in_groups():
    model, inputs = normed()
    plan = partition(model, Topology.local(2), inputs, objective="infer", constraints=in_groups(pp=2))
    assert plan.num_microbatches == SAMPLES // SIZE and plan.verify(model, inputs).ok


# --- asking for it ----------------------------------------------------------------------------------------------------


def test_it_is_asked_for_with_a_size_that_divides():
    model, inputs = pairs()
    for axes, message in (
        (dict(microbatch_size=None), r"couple='microbatch' without microbatch_size.*expected microbatch_size=N"),
        (dict(microbatch_size=3), r"batch of 8 is not divisible by microbatch_size=3.*8, such as [24]"),
        (dict(dp=8), r"is not divisible by dp=8 x microbatch_size=2"),
        (dict(pp=1, dp=8, tp=1), r"is not divisible by dp=8 x microbatch_size=2"),
    ):
        with pytest.raises(ConstraintError, match=message):
            partition(model, Topology.local(8), inputs, constraints=in_groups(**axes))
    with pytest.raises(ConstraintError, match="couple"):
        Constraints(couple="sample")


def test_a_refusal_of_several_microbatches_says_that_there_is_another_loss():
    model, inputs = pairs()
    with pytest.raises(PlanError, match=r"use one microbatch: .*, or couple='microbatch'"):
        partition(model, Topology.local(2), inputs, constraints=Constraints(pp=2, microbatch_size=2))


def test_changes_keep_what_is_computed():
    model, inputs = pairs()
    with pytest.raises(ConstraintError) as caught:
        partition(model, Topology.local(4), inputs, constraints=in_groups(pp=3))
    assert caught.value.changes
    for change in caught.value.changes:
        assert (change.constraints.couple, change.constraints.microbatch_size) == ("microbatch", SIZE)
        plan = partition(
            model, change.topology, inputs, global_batch=change.global_batch, constraints=change.constraints
        )
        assert plan.chosen.microbatch_size == SIZE


def test_why_not_in_other_groups_says_that_it_is_another_step():
    model, inputs = pairs()
    plan = plan_of("pairs", dp=2)
    assert "Its step has other results" in str(plan.why_not(microbatch_size=4, model=model, inputs=inputs))
    assert "Its step has other results" not in str(plan.why_not(zero=2, model=model, inputs=inputs))


def test_the_search_is_free_but_for_the_groups():
    model, inputs = MODELS["mixtral"]()
    plan = partition(prepared("mixtral"), Topology.local(4), constraints=in_groups())
    tried = [*plan.certificate.candidates, *(b.candidate for b in plan.certificate.baselines if b.candidate)]
    assert {c.microbatch_size for c in tried} == {SIZE}
    assert {axis for c in tried for axis, ranks in c.mesh.items() if ranks > 1} == {"pp", "dp", "tp", "ep"}
    assert plan.certificate.bound <= plan.certificate.objective == plan.estimate.step_time
    assert plan.verify(model, inputs).ok
    assert "mean over 4 groups of consecutive samples" in " ".join(plan.explain().split())


def test_it_goes_with_the_plan(tmp_path: Path):
    plan = plan_of("pairs", dp=2)
    loaded = Plan.load(plan.save(tmp_path / "plan.json"))
    assert loaded.constraints.group_size == SIZE
    assert loaded.verify(*pairs()).ok
    other = partition(nn.Linear(4, 4), Topology.local(1), (torch.ones(2, 4),), loss=torch.sum)
    assert "couple" not in other.save(tmp_path / "other.json").read_text()
