"""Buffers that forward changes: as the unmodified model leaves them, on every mesh, step after step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partitioner
from partitioner import Checkpoints, Constraints, Engine, LocalRanks, Plan, PlanError, Topology, partition
from partitioner.passes.capture.capture import capture
from partitioner.passes.errors import UnsupportedError
from partitioner.runtime.comm.torch_backend import TorchCommunicator
from partitioner.runtime.debug import NonFiniteError, check_finite
from partitioner.runtime.program.instructions import Instruction
from partitioner.runtime.program.program import Program, hash_weights
from partitioner.runtime.prove.errors import ProofError
from partitioner.runtime.prove.prove import prove
from tests.helpers.buffer_models import (
    ALONE,
    TOGETHER,
    Across,
    Around,
    Counter,
    Deep,
    FunctionalNorm,
    ResNet,
    Steps,
    inputs_of,
)
from tests.helpers.every_rank import on_every_rank
from tests.helpers.mutations import with_stage

pytestmark = pytest.mark.usefixtures("without_baselines")

ONE = {"pp": 1, "dp": 1, "cp": 1, "tp": 1}


def planned(model: nn.Module, inputs: Any, **constraints: Any) -> Plan:
    given = ONE | constraints
    ranks = given["pp"] * given["dp"] * given["cp"] * given["tp"]
    return partition(model, Topology.local(ranks), inputs, constraints=Constraints(**given))


def judged(model: nn.Module, inputs: Any, plan: Plan) -> list[str]:
    """The buffers that verify has compared; all is as the model computes it, which is left as it was."""
    before = {name: t.clone() for name, t in [*model.named_buffers(), *model.named_parameters()]}
    report = plan.verify(model, inputs)
    assert report.ok, str(report)
    after = dict([*model.named_buffers(), *model.named_parameters()])
    assert {name for name, t in before.items() if not torch.equal(t, after[name])} == set()
    return [name.removeprefix("buffer ") for name in report.errors if name.startswith("buffer ")]


def changed_by(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_buffers(remove_duplicate=False)]


MESHES = ({"dp": 2, "tp": 2}, {"pp": 2, "dp": 2})
UNCHANGED = {"num_batches_tracked"}  # instance norm counts nothing
SUMS = {"instance norm", "instance norm, no momentum", "queue"}  # of samples, which nothing reads in the same step


@pytest.mark.parametrize("number", range(len(TOGETHER)), ids=[*TOGETHER])
def test_what_depends_on_samples_is_that_of_the_whole_batch(number: int):
    torch.manual_seed(0)
    name, build = list(TOGETHER.items())[number]
    model = build()
    inputs = inputs_of(model)
    plan = planned(model, inputs, **MESHES[number % 2])
    assert plan.num_microbatches == 1 or name in SUMS
    expected = {n for n in changed_by(model) if "instance" not in name or n.rpartition(".")[2] not in UNCHANGED}
    assert set(judged(model, inputs, plan)) == expected


@pytest.mark.parametrize("name", ALONE)
def test_what_depends_on_no_sample_is_right_with_any_number_of_microbatches(name: str):
    torch.manual_seed(0)
    model = ALONE[name]()
    inputs = inputs_of(model)
    plan = planned(model, inputs, pp=2, dp=2, microbatch_size=1)
    assert plan.num_microbatches == 4
    assert set(judged(model, inputs, plan)) == set(changed_by(model))


def test_samples_that_meet_in_a_buffer_want_one_microbatch():
    model = TOGETHER["average by lerp_"]()
    with pytest.raises(PlanError, match="combines samples across the batch") as caught:
        planned(model, inputs_of(model), pp=2, microbatch_size=2)
    assert "microbatch_size=8 instead of 2" in caught.value.changes[0].text


CONFIGS = [
    {"pp": 4},
    {"pp": 2, "schedule": "zb-v"},
    pytest.param({"pp": 2, "schedule": "dualpipe-v"}, marks=pytest.mark.slow),
    {"dp": 2, "zero": 3, "recompute": "full"},
    pytest.param({"dp": 2, "zero": 1, "offload": "optimizer+activations"}, marks=pytest.mark.slow),
    {"dp": 2, "offload": "optimizer+parameters"},
    pytest.param({"tp": 4}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_layers_that_are_alike_stay_one_block(config: dict[str, Any]):
    torch.manual_seed(0)
    model = Deep()
    inputs = inputs_of(model)
    plan = planned(model, inputs, **config)
    assert "layers.*" in plan.program.blocks
    assert set(judged(model, inputs, plan)) == set(changed_by(model))


@pytest.mark.parametrize("norm", [FunctionalNorm, Steps, lambda: nn.InstanceNorm1d(8, track_running_stats=True)])
def test_each_of_many_layers_changes_its_own(norm: Callable[[], nn.Module]):
    """Of layers that are alike one is traced, and stands for others; not where these change something."""
    torch.manual_seed(0)
    model = Deep(norm, layers=6)
    plan = planned(model, inputs_of(model), pp=2)
    found = judged(model, inputs_of(model), plan)
    assert len([n for n in found if not n.endswith("num_batches_tracked")]) == 6 * (2 if norm is not Steps else 1)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-1p"])
def test_a_steady_state_leaves_the_update_where_it_is(schedule: str):
    torch.manual_seed(0)
    model = Deep(Counter)
    inputs = inputs_of(model, batch=64)
    plan = planned(model, inputs, pp=2, microbatch_size=1, schedule=schedule, virtual_stages=1)
    assert all(hasattr(stage.instructions, "parts") for stage in plan.program.stages)
    assert set(judged(model, inputs, plan)) == set(changed_by(model))


@pytest.mark.parametrize("last", [True, False], ids=["changed last", "changed first"])
def test_stages_that_share_a_buffer_change_it_together(last: bool):
    torch.manual_seed(0)
    model = Across(last)
    inputs = inputs_of(model)
    plan = planned(model, inputs, pp=2, microbatch_size=2)
    assert plan.program.states["scale"].stages == (0, 1)
    assert set(judged(model, inputs, plan)) == {"scale", "flags"}
    assert set(partitioner.run_local(plan, model, inputs).buffers) == {"scale", "flags"}


def test_a_sequence_that_ranks_share():
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
            self.register_buffer("by_place", torch.zeros(16))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = torch.relu(self.a(x))
            self.by_place.mul_(0.9).add_(x.detach().mean((0, 2)))
            return nn.functional.mse_loss(self.b(self.norm(x.transpose(1, 2)).transpose(1, 2)), y)

    torch.manual_seed(0)
    model, inputs = Positions(), (torch.randn(4, 16, 8), torch.randn(4, 16, 8))
    assert len(judged(model, inputs, planned(model, inputs, cp=2, dp=2))) == 4


def image_models() -> dict[str, Callable[[], nn.Module]]:
    import transformers as t

    small = {"num_channels": 3, "embedding_size": 8, "num_labels": 4}
    resnet = t.ResNetConfig(hidden_sizes=[8, 8, 16, 16], depths=[2, 1, 1, 1], layer_type="basic", **small)
    regnet = t.RegNetConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 2, 1, 1], groups_width=8, **small)
    mobile = t.MobileNetV2Config(image_size=32, depth_multiplier=0.25, classifier_dropout_prob=0.0, num_labels=4)
    return {
        "resnet": lambda: t.ResNetForImageClassification(resnet),
        "regnet": lambda: t.RegNetForImageClassification(regnet),
        "mobilenet": lambda: t.MobileNetV2ForImageClassification(mobile),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("resnet", {"pp": 2, "dp": 2}),
        pytest.param("resnet", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("regnet", {"dp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("mobilenet", {"pp": 2, "dp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_published_convolutional_nets_in_training(name: str, mesh: dict[str, int]):
    torch.manual_seed(0)
    model = image_models()[name]().train()
    inputs = {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(4, (8,))}
    plan = planned(model, inputs, **mesh)
    assert {i.batch_dim for i in plan.program.inputs} == {0}, "samples are divided, not channels"
    assert set(judged(model, inputs, plan)) == set(changed_by(model))


# --- what cannot be kept ----------------------------------------------------------------------------------------------


class Cache(nn.Module):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        if persistent:
            self.register_buffer("n", torch.zeros(8))
        else:
            self.n = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self._buffers.get("n"), Tensor):
            self.n = torch.cat([self.n, self.n])[:9]
        else:
            self.n.add_(1)
        return x


@pytest.mark.parametrize(
    ("held", "said"), [(True, "to float32 of shape .9,.; expected the same shape"), (False, "no buffer")]
)
def test_other_shapes_and_plain_tensors_are_refused(held: bool, said: str):
    model = Around(Cache(held))
    with pytest.raises(UnsupportedError, match=said):
        capture(model, inputs_of(model))


def test_inference_in_train_mode_says_so():
    torch.manual_seed(0)
    model = Deep()
    inputs = inputs_of(model)
    for told in (True, False):
        model.train(told)
        plan = partition(model, Topology.local(2), inputs, objective="infer", constraints=Constraints(pp=2))
        assert any("model.eval()" in note for note in plan.notes) is told
        assert bool(judged(model, inputs, plan)) is told


# --- the prover -------------------------------------------------------------------------------------------------------


def _moved(code: list[Instruction], program: Program) -> list[Instruction]:
    """The update before what reads the old value last: a forward or its recomputation."""
    update = next(i for i in code if i.op == "UPDATE")
    last = max(k for k, i in enumerate(code) if i.op == "B")
    return [*code[:last], update, *(i for i in code[last:] if i is not update)]


def _twice(code: list[Instruction], program: Program) -> list[Instruction]:
    place = next(k for k, i in enumerate(code) if i.op == "UPDATE")
    return [*code[: place + 1], *code[place:]]


def _without(code: list[Instruction], program: Program) -> list[Instruction]:
    return [i for i in code if i.op != "UPDATE"]


def _of_another(code: list[Instruction], program: Program) -> list[Instruction]:
    wrong = {"states": ("layers.0.a.weight",)}
    return [i.model_copy(update=wrong) if i.op == "UPDATE" else i for i in code]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (_moved, "which was updated at"),
        (_twice, "was updated at"),
        (_without, "never updated"),
        (_of_another, "no buffer of the stage"),
    ],
)
def test_a_wrong_update_is_refused(edit: Callable[[list[Instruction], Program], list[Instruction]], said: str):
    model = Deep()
    program = planned(model, inputs_of(model), dp=2, recompute="full").program
    code = edit(list(program.stages[0].instructions), program)
    with pytest.raises(ProofError, match=said):
        prove(with_stage(program, 0, instructions=tuple(code)))
    with pytest.raises(ProofError, match=said):
        prove(program, {1: program.rank(1).with_instructions(tuple(code))})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"update": "layers.0:9"}, "does not exist"),
        ({"update": "inside:0"}, "which differs|but takes|made on"),
        ({"kind": "parameter"}, "only buffers do"),
    ],
)
def test_a_value_that_is_not_the_buffers_is_refused(change: dict[str, Any], said: str):
    model = Deep()
    program = planned(model, inputs_of(model), dp=2).program
    name = "layers.0.norm.running_mean"
    states = program.states | {name: program.states[name].model_copy(update=change)}
    with pytest.raises(ProofError, match=said):
        prove(program.model_copy(update={"states": states, "fingerprint": hash_weights(states)}))


def test_a_value_that_differs_between_ranks_is_refused():
    """The mean of a rank's own samples."""
    model = Around(FunctionalNorm())
    program = planned(model, inputs_of(model), dp=2).program
    blocks = {}
    for name, block in program.blocks.items():
        nodes = [dict(n) for n in block.nodes]
        for node in nodes:
            if node.get("target") == "partition.all_reduce.default":
                node |= {"target": "aten.mul.Tensor", "args": [node["args"][0], 1.0]}
        blocks[name] = block.model_copy(update={"nodes": tuple(nodes)})
    with pytest.raises(ProofError, match="differs between parts of the batch"):
        prove(program.model_copy(update={"blocks": blocks}))


def test_stages_that_do_not_meet_are_refused():
    model = Across(True)
    program = planned(model, inputs_of(model), pp=2, microbatch_size=2).program
    code = list(program.stages[1].instructions)
    places = [k for k, i in enumerate(code) if i.op == "UPDATE"]
    split = [code[places[0]].model_copy(update={"states": (s,)}) for s in code[places[0]].states]
    code[places[0] : places[0] + 1] = split
    with pytest.raises(ProofError):
        prove(with_stage(program, 1, instructions=tuple(code)))


# --- training ---------------------------------------------------------------------------------------------------------


def net() -> ResNet:
    torch.manual_seed(0)
    return ResNet().double()


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    return [(x.double(), y) for x, y in (inputs_of(ResNet(1), seed) for seed in range(steps))]


def train(program: Program, folder: str, steps: int, resume: str | None, compile: bool = False) -> dict[str, Tensor]:
    if dist.get_rank() >= program.world_size:
        return {}
    communicator = TorchCommunicator(program.world_size, torch.device("cpu"))
    engine = Engine(program, net(), communicator=communicator, compile="aot_eager" if compile else False)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    if resume is not None:
        engine.load(resume, optimizer)
    for batch in batches(5)[engine.steps : engine.steps + steps]:
        engine.step(batch)
        optimizer.step()
    engine.save(folder, optimizer)
    engine.export_weights(folder + "-weights")
    return engine.state_dict(full=True)


def close(mine: dict[str, Tensor], judge: dict[str, Tensor]) -> None:
    assert mine.keys() == judge.keys()
    for name, tensor in judge.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_training_on_real_ranks_is_that_of_one_process(tmp_path: Path):
    """Parameters, buffers and the optimizer's moments; a run goes on under another mesh."""
    judge = net()
    optimizer = torch.optim.AdamW(judge.parameters(), lr=0.01)
    for x, y in batches(5):
        optimizer.zero_grad()
        judge(x, y).backward()
        optimizer.step()
    expected = {name: tensor.detach() for name, tensor in judge.state_dict().items()}
    assert int(expected["layers.0.1.num_batches_tracked"]) == 5
    programs = [planned(net(), batches(1)[0], **mesh).program for mesh in ({"pp": 2, "dp": 2}, {"dp": 4}, {"tp": 2})]
    with LocalRanks(4) as ranks:
        for number, program in enumerate(programs):
            whole = ranks.call(train, program, str(tmp_path / f"{number}"), 5, None, number == 2, timeout=240)
            close(whole[0], expected)
        ranks.call(train, programs[0], str(tmp_path / "half"), 2, None, timeout=240)
        close(
            ranks.call(train, programs[2], str(tmp_path / "rest"), 3, str(tmp_path / "half"), timeout=240)[0], expected
        )
    one = Engine(planned(net(), batches(1)[0]), None)
    moments = torch.optim.AdamW(one.parameters(), lr=0.01)
    one.load(tmp_path / "0", moments)
    close(one.state_dict(full=True), expected)
    theirs = {name: optimizer.state[p] for name, p in judge.named_parameters()}
    for name, parameter in one.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(moments.state[parameter][key], theirs[name][key], rtol=1e-9, atol=1e-9)
    exported = Engine(planned(net(), batches(1)[0]), tmp_path / "1-weights")
    close(exported.state_dict(full=True), expected)


def test_steps_that_add_up_gradients_each_change_buffers():
    model = net()
    plan = planned(model, batches(1)[0])
    engine = Engine(plan, model)
    for number, batch in enumerate(batches(3)):
        engine.step(batch, accumulate=number > 0)
    for x, y in batches(3):
        model(x, y)
    close(engine.state_dict(full=True), {name: t.detach() for name, t in model.state_dict().items()})


def test_what_no_state_dict_has_comes_back_with_a_checkpoint(tmp_path: Path):
    model = Around(Steps())
    program = planned(model, inputs_of(model), dp=2).program

    def work(communicator: Any) -> Tensor:
        engine = Engine(program, model, communicator=communicator)
        checkpoints = Checkpoints(tmp_path / "run", engine, torch.optim.SGD(engine.parameters()), every=1, behind=False)
        checkpoints.restore()
        for _ in range(2):
            engine.step(inputs_of(model))
            checkpoints.after_step()
        checkpoints.close()
        return engine.state_dict()["t.n"].clone()

    for count in (2, 4):
        for held in on_every_rank(program, work):
            assert held.tolist() == [count] * 8


def test_a_step_that_is_run_again_reads_what_it_read():
    """The first NaN is told where it is made, though an average has become one by then."""
    model = TOGETHER["average by lerp_"]()
    engine = Engine(planned(model, inputs_of(model)), model)
    x, y = inputs_of(model)
    engine.step((x, y))
    check_finite(engine, (x, y))
    held = engine.state_dict()["t.m"].clone()
    bad = x.clone()
    bad[3, 2] = 3e38  # overflows in the first product
    engine.step((bad * 10, y))
    with pytest.raises(NonFiniteError, match=r"holds a|first"):
        check_finite(engine, (bad * 10, y))
    assert not engine.state_dict()["t.m"].isfinite().all()
    with engine._executor.updates.repeat_last():
        assert torch.equal(engine.state_dict()["t.m"], held)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_types_are_those_that_the_model_would_have(precision: str):
    torch.manual_seed(0)
    model = Deep()
    inputs = inputs_of(model)
    plan = partition(model, Topology.local(2), inputs, precision=precision, constraints=Constraints(dp=2, pp=1, tp=1))
    mine = partitioner.run_threads(plan, model, inputs).buffers
    judge = Deep().to({"bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    judge.load_state_dict(model.state_dict())
    judge(inputs[0].to(judge.out.weight.dtype), inputs[1])
    for name, buffer in judge.named_buffers():
        torch.testing.assert_close(mine[name], buffer, rtol=0.02, atol=0.01)
