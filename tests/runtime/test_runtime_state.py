"""Weights and checkpoints: read by slice, checked against the plan, exchanged between plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from partitioner import Constraints, Engine, LaunchError, Plan, Topology, WeightsError, partition, run_threads
from partitioner.passes.ir.layouts import Layout, take_shard, take_shards
from partitioner.runtime.program.program import Program
from partitioner.runtime.state.parameters import check_weights, load_states
from partitioner.runtime.state.weights import FileWeights, open_weights
from tests.helpers.every_rank import on_every_rank
from tests.helpers.net_training import train
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net

pytestmark = pytest.mark.usefixtures("without_baselines")

CPU = torch.device("cpu")


def sharded_folder(path: Path, model: nn.Module) -> Path:
    """The model's weights in two files with an index, as large models are published."""
    state = model.state_dict()
    names = list(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({n: state[n] for n in part}, path / file)
    index = {"weight_map": {n: file for file, part in parts.items() for n in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize("layout", ["R", "S0", "S1", "S0[8,4,4]"])
def test_a_file_gives_the_same_shards_as_the_tensor(tmp_path: Path, layout: str):
    tensor = torch.arange(16 * 6).reshape(16, 6).float()
    save_file({"w": tensor}, tmp_path / "w.safetensors")
    file, parsed = FileWeights(tmp_path / "w.safetensors"), Layout.parse(layout)
    for index in range(2):
        assert torch.equal(file.read("w", parsed, 2, index), take_shard(tensor, parsed, 2, index))


def test_a_rank_reads_its_own_slices_of_a_sharded_folder(tmp_path: Path):
    model = Net()
    weights = FileWeights(sharded_folder(tmp_path, model))
    program = program_of_net(pp=2, tp=2)
    for number in range(4):
        rank = program.rank(number)
        from_file = load_states(rank, weights, CPU)
        from_module = load_states(rank, open_weights(model), CPU)
        assert from_file.keys() == from_module.keys() == rank.states.keys()
        assert all(torch.equal(from_file[n], from_module[n]) for n in from_file)


def test_a_run_from_files_equals_one_from_the_module(tmp_path: Path):
    model = Net()
    program = program_of_net(tp=2)
    folder = sharded_folder(tmp_path, model)
    for _ in range(10):  # ranks that read one open file must not close it for each other
        one = run_threads(program, folder, net_inputs())
    assert torch.equal(one.loss, run_threads(program, model, net_inputs()).loss)


def test_a_tied_parameter_may_stand_in_the_file_under_any_of_its_names(tmp_path: Path):
    model = Net(tied=True)
    state = {n: t for n, t in model.state_dict().items() if n != "first.weight"}
    save_file({n: t.clone() for n, t in state.items()}, tmp_path / "model.safetensors")
    program = program_of_net(tied=True)
    states = load_states(program.rank(0), FileWeights(tmp_path), CPU)
    assert torch.equal(states["first.weight"], model.first.weight)


def differences(program: Program, model: nn.Module | dict[str, Tensor]) -> str:
    with pytest.raises(WeightsError) as caught:
        check_weights(program, open_weights(model))
    return str(caught.value)


def test_wrong_weights_are_told_by_name_and_shape():
    state = dict(Net().state_dict())
    state["first.weight"] = torch.zeros(3, 3)
    del state["head.weight"]
    state["layers.0.up.bias"] = state["layers.0.up.bias"].long()
    message = differences(program_of_net(), state)
    assert "first.weight: expected shape [8, 8], got [3, 3]" in message
    assert "head.weight: expected parameter [8, 8], got nothing" in message
    assert "layers.0.up.bias: expected float32, got int64" in message


def test_only_the_first_differences_are_listed():
    assert "and 3 more" in differences(program_of_net(), {})


def test_ties_must_be_those_of_the_plan():
    assert "head.weight: expected the same tensor as first.weight" in differences(program_of_net(tied=True), Net())
    assert "tied" in differences(program_of_net(), Net(tied=True))


def test_weights_without_values_are_refused():
    with torch.device("meta"):
        model = Net()
    with pytest.raises(WeightsError, match="is on the meta device"):
        open_weights(model)


def test_a_folder_without_weights_is_refused(tmp_path: Path):
    with pytest.raises(WeightsError, match=r"has neither model.safetensors.index.json nor a .safetensors file"):
        open_weights(tmp_path)
    with pytest.raises(WeightsError, match="does not exist"):
        open_weights(tmp_path / "nothing")
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(WeightsError, match="cannot be read as safetensors"):
        open_weights(tmp_path)


def test_random_weights_agree_between_plans():
    """Replicas start alike, and a layout that shards nothing starts like any other that does not."""
    one = load_states(program_of_net(dp=2).rank(0), None, CPU)
    other = load_states(program_of_net(dp=2).rank(1), None, CPU)
    assert all(torch.equal(one[n], other[n]) for n in one)


CHANGES = [
    ({"tp": 2}, {"pp": 2}),
    ({"pp": 2, "dp": 2}, {"tp": 2}),
    ({}, {"pp": 2, "tp": 2, "num_microbatches": 2}),
]


@pytest.mark.parametrize(("saved", "loaded"), CHANGES, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_any_plan_may_load_what_another_one_saved(
    tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any], tied: bool
):
    """Two steps under one plan and two under another end where four under the first do."""
    model, folder = Net(tied=tied), tmp_path / "checkpoint"

    def save(communicator: Any) -> dict[str, Tensor]:
        engine = Engine(program_of_net(**saved, tied=tied), model, communicator=communicator)
        optimizer = train(engine)
        engine.save(folder, optimizer)
        train(engine, optimizer=optimizer)
        return engine.state_dict(full=True)

    def load(communicator: Any) -> tuple[int, dict[str, Tensor]]:
        engine = Engine(program_of_net(**loaded, tied=tied), None, communicator=communicator)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=1.0)
        engine.load(folder, optimizer)
        steps = engine.steps
        train(engine, optimizer=optimizer)
        return steps, engine.state_dict(full=True)

    expected = on_every_rank(program_of_net(**saved, tied=tied), save)[0]
    steps, got = on_every_rank(program_of_net(**loaded, tied=tied), load)[0]
    assert steps == 2
    assert got.keys() == expected.keys() == model.state_dict().keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], msg=lambda m, n=name: f"{n}: {m}")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint"]


def test_exported_weights_are_a_folder_of_whole_tensors_by_the_models_names(tmp_path: Path):
    model = Net()

    def export(communicator: Any) -> None:
        Engine(program_of_net(pp=2, tp=2), model, communicator=communicator).export_weights(tmp_path / "out")

    on_every_rank(program_of_net(pp=2, tp=2), export)
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= load_file(tmp_path / "out" / file)
    assert tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in tensors.items())


def test_an_engine_loads_exported_weights(tmp_path: Path):
    trained = Engine(program_of_net(), Net())
    train(trained)
    trained.export_weights(tmp_path / "out")
    engine = Engine(program_of_net(), Net())
    engine.load(tmp_path / "out")
    assert all(torch.equal(t, trained.state_dict()[n]) for n, t in engine.state_dict().items())
    with pytest.raises(WeightsError, match=r"it has no manifest.json"):
        engine.load(tmp_path / "out", torch.optim.AdamW(engine.parameters()))


def test_a_checkpoint_replaces_an_older_one_whole(tmp_path: Path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "__7_0.distcp").touch()  # of more ranks than there are now
    engine = Engine(program_of_net(), Net())
    engine.save(folder)
    assert not (folder / "__7_0.distcp").exists()
    with pytest.raises(WeightsError, match="holds no optimizer state"):
        engine.load(folder, torch.optim.AdamW(engine.parameters()))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path):
    Engine(program_of_net(num_layers=1), Net(num_layers=1)).save(tmp_path / "out")
    with pytest.raises(WeightsError, match=r"layers\.1\.up\.weight"):
        Engine(program_of_net(), Net()).load(tmp_path / "out")


@pytest.mark.parametrize("plan", [{"pp": 2}, {"tp": 2}, {}], ids=str)
def test_what_a_script_freezes_stays_and_counts_no_more(plan: dict[str, Any]):
    """As of a module: neither momentum nor decay moves it, and its gradient is no part of the norm."""
    frozen = {"first.weight", "layers.1.up.weight"}

    def work(communicator: Any) -> Any:
        engine = Engine(program_of_net(**plan), Net(), communicator=communicator)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        norms = []
        for step in range(3):
            for name, parameter in engine.named_parameters():
                parameter.requires_grad_(step == 0 or name not in frozen)
            engine.step(net_inputs())
            norms.append(float(engine.clip_grad_norm_(0.5)))
            optimizer.step()
        return norms, engine.state_dict(full=True)

    norms, got = on_every_rank(program_of_net(**plan), work)[0]
    model, expected = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    for step in range(3):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(step == 0 or name not in frozen)
        optimizer.zero_grad()
        model(**net_inputs())["loss"].backward()
        expected.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    assert norms == pytest.approx(expected, rel=1e-5)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-6)


def test_what_was_planned_frozen_cannot_be_trained():
    program = program_of_net()
    states = {n: s.model_copy(update={"requires_grad": n != "head.weight"}) for n, s in program.states.items()}
    model = Net()
    model.head.requires_grad_(False)
    engine = Engine(program.model_copy(update={"states": states}), model)
    train(engine)
    dict(engine.named_parameters())["head.weight"].requires_grad_(True)
    with pytest.raises(LaunchError, match=r"head\.weight was frozen when the plan was made"):
        engine.step(net_inputs())


class Counted(nn.Module):
    """Buffers of every kind: of one value, of few, of many, of whole numbers, of none, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("gain", torch.full((8,), 3.0))
        self.register_buffer("slopes", torch.linspace(1, 2, 8))
        self.register_buffer("table", torch.linspace(1, 2, 512).reshape(64, 8))
        self.register_buffer("unsaved", torch.linspace(3, 4, 8), persistent=False)
        self.register_buffer("limit", torch.tensor(float("inf")))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x)) * self.gain * self.slopes * self.unsaved + self.table[:1]
        return self.last(y.clamp_max(self.limit)).square().mean()


@pytest.mark.parametrize("tp", [1, 2])
def test_without_weights_buffers_are_as_the_model_had_them(tp: int, tmp_path: Path):
    """Those that few numbers say; of others nothing is known. Read from a file, since that is how plans travel."""
    model = Counted()
    pinned = Constraints(pp=1, dp=1, tp=tp)
    plan = partition(model, Topology.local(tp), (torch.randn(8, 8),), constraints=pinned)
    program = Plan.load(plan.save(tmp_path / "plan.json")).program
    held = on_every_rank(program, lambda world: Engine(program, None, communicator=world).state_dict())
    expected = dict(model.named_buffers())
    for rank, states in enumerate(held):
        for name, buffer in expected.items():
            shards = program.rank(rank).shards(name)
            part = take_shards(buffer, shards)
            assert torch.equal(states[name], torch.zeros_like(part) if name == "table" else part), name


def test_a_model_without_values_says_nothing_of_its_buffers():
    with torch.device("meta"):
        model = Counted()
    plan = partition(model, Topology.local(1), (torch.randn(8, 8, device="meta"),))
    assert plan.program.initial == {}
