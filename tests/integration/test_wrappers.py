"""A model inside of wrappers that say how to run it: the same plan as without them, by the same names, with a note."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)
from transformers import LlamaConfig, LlamaForCausalLM

import partitioner
from partitioner import Constraints, Plan, Topology, WeightsError, partition, run_threads, size_cluster
from partitioner.cli.options import TargetModel
from partitioner.cli.train import train_on_target
from partitioner.passes.errors import CaptureError, UnsupportedError

pytestmark = pytest.mark.usefixtures("without_baselines")

WIDTH = 8
INPUTS = (torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH),)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.linear(self.norm(x)).relu()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def planned(model: nn.Module, **more: Any) -> Plan:
    return partition(model, Topology.local(1), INPUTS, loss=loss, **more)


def notes_of(model: nn.Module) -> str:
    return " | ".join(planned(model, estimate_only=True).notes)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group of this process alone, for the wrappers that want one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# --- wrappers that are left out ---------------------------------------------------------------------------------------


def of_layer(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = Model()
    model.layers[1] = wrap(model.layers[1])
    return model


def of_layers(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = Model()
    for number, layer in enumerate(model.layers):
        model.layers[number] = wrap(layer)
    return model


def compiled_in_place(*paths: str) -> nn.Module:
    model = Model()
    for path in paths:
        model.get_submodule(path).compile()
    return model


def compiled_forward(path: str) -> nn.Module:
    model = Model()
    module = model.get_submodule(path)
    module.forward = torch.compile(module.forward)
    return model


class Decorated(Model):
    @torch.compile
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


WRAPPED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "compiled": (lambda: torch.compile(Model()), "torch.compile in the model (the whole model) is left out"),
    "a layer compiled": (lambda: of_layer(torch.compile), "torch.compile in the model (layers.1)"),
    "layers compiled": (lambda: of_layers(torch.compile), "(layers.0, layers.1, layers.2)"),
    "a compiled layer in a compiled model": (
        lambda: torch.compile(of_layer(torch.compile)),
        "(the whole model, layers.1)",
    ),
    "compiled in place": (lambda: compiled_in_place(""), "torch.compile in the model (the whole model)"),
    "layers compiled in place": (lambda: compiled_in_place("layers.0", "layers.2"), "(layers.0, layers.2)"),
    "forward compiled": (lambda: compiled_forward(""), "torch.compile in the model (the whole model)"),
    "a layer's forward compiled": (lambda: compiled_forward("layers.2"), "torch.compile in the model (layers.2)"),
    "a decorated forward": (Decorated, "torch.compile in the model (the whole model)"),
    "DataParallel": (lambda: nn.DataParallel(Model()), "DataParallel (the whole model) is left out"),
    "DataParallel of a compiled model": (
        lambda: nn.DataParallel(torch.compile(Model())),
        "torch.compile in the model (the whole model) is left out",
    ),
    "checkpointed": (
        lambda: of_layers(checkpoint_wrapper),
        "checkpointing in the model (layers.0, layers.1, layers.2)",
    ),
    "checkpointed as a whole": (lambda: checkpoint_wrapper(Model()), "checkpointing in the model (the whole model)"),
    "checkpointed, reentrant": (
        lambda: of_layer(functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)),
        "activation checkpointing in the model (layers.1) is left to the plan",
    ),
    "checkpointed and compiled": (
        lambda: of_layer(lambda layer: torch.compile(checkpoint_wrapper(layer))),
        "activation checkpointing in the model (layers.1)",
    ),
    "offloaded": (lambda: of_layer(offload_wrapper), "moves to host memory (layers.1) are left to the plan"),
}


@pytest.fixture(scope="module")
def bare() -> Plan:
    return planned(Model())


@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_model_is_planned_as_the_one_inside(name: str, bare: Plan) -> None:
    make, note = WRAPPED[name]
    model = make()
    plan = planned(model)
    assert note in " | ".join(plan.notes)
    assert note in " ".join(plan.summary().split())
    assert note in " ".join(plan.explain().split())
    assert {k: v.shape for k, v in plan.program.states.items()} == {k: v.shape for k, v in bare.program.states.items()}
    assert plan.program.fingerprint == bare.program.fingerprint
    assert plan.estimate == bare.estimate
    assert [c.path for s in plan.program.stages for c in s.calls] == [
        c.path for s in bare.program.stages for c in s.calls
    ]
    assert (plan.model == "Model") == (name != "a decorated forward")
    verified = plan.verify(model, INPUTS, loss)
    assert verified.ok, str(verified)


@pytest.mark.parametrize("name", ["compiled", "a layer compiled", "DataParallel", "checkpointed", "forward compiled"])
def test_weights_come_from_a_wrapped_model_too(name: str, bare: Plan) -> None:
    wrapped = WRAPPED[name][0]()
    run, expected = run_threads(bare, wrapped, INPUTS), run_threads(bare, Model(), INPUTS)
    assert torch.equal(run.loss, expected.loss)
    assert run.grads.keys() == expected.grads.keys()


SAVED: dict[str, Callable[[], nn.Module]] = {
    "compiled": lambda: torch.compile(Model()),
    "layers compiled": lambda: of_layers(torch.compile),
    "replicated": lambda: nn.DataParallel(Model()),
    "replicated and compiled": lambda: torch.compile(nn.DataParallel(Model())),
    "compiled and replicated": lambda: nn.DataParallel(torch.compile(Model())),
    "checkpointed": lambda: of_layers(checkpoint_wrapper),
    "bare": Model,
}


@pytest.mark.parametrize("name", SAVED)
def test_saved_weights_are_read_in_any_spelling(name: str, bare: Plan, tmp_path: Path) -> None:
    state = {key: value.clone() for key, value in SAVED[name]().state_dict().items()}
    expected = run_threads(bare, Model(), INPUTS).loss
    assert torch.equal(run_threads(bare, state, INPUTS).loss, expected)
    save_file(state, tmp_path / "model.safetensors")
    assert torch.equal(run_threads(bare, tmp_path, INPUTS).loss, expected)


def test_weights_of_another_model_are_still_refused(bare: Plan) -> None:
    state = {f"module.{key}": value for key, value in Model().state_dict().items()}
    del state["module.head.weight"]
    with pytest.raises(WeightsError, match=r"head\.weight: expected parameter"):
        run_threads(bare, state, INPUTS)
    some = {f"module.{k}" if k.startswith("head") else k: v for k, v in Model().state_dict().items()}
    with pytest.raises(WeightsError, match=r"head\.weight: expected parameter"):  # the prefix is of all names
        run_threads(bare, some, INPUTS)


def test_a_model_of_one_module_keeps_its_names() -> None:
    """What looks like a wrapper's prefix and is the model's own."""
    model = torch.optim.swa_utils.AveragedModel(Model())
    plan = planned(model)
    assert "module.head.weight" in plan.program.states
    assert not plan.notes
    assert plan.verify(model, INPUTS, loss).ok
    assert torch.equal(
        run_threads(plan, model.state_dict(), INPUTS).loss,
        run_threads(plan, model, INPUTS).loss,
    )


def test_the_model_that_was_given_is_not_changed() -> None:
    model = torch.compile(of_layer(torch.compile))
    before = [*model.state_dict()], [type(module) for module in model.modules()]
    planned(model)
    assert ([*model.state_dict()], [type(module) for module in model.modules()]) == before


def test_what_else_takes_a_model_takes_a_wrapped_one(bare: Plan) -> None:
    model = torch.compile(Model())
    assert str(bare.why_not(recompute="full", model=model, inputs=INPUTS, loss=loss))
    sizing = size_cluster(model, lambda nodes: Topology.local(nodes), INPUTS, loss=loss, nodes=1)
    assert sizing.plan.model == "Model"


@pytest.mark.slow
def test_the_command_trains_a_wrapped_model(bare: Plan) -> None:
    losses = list(train_on_target(bare, TargetModel(torch.compile(Model()), INPUTS, loss), 3, 1e-2))
    assert losses[2] < losses[0]


def test_checkpoints_of_a_compiled_program_are_read(tmp_path: Path) -> None:
    """torch.export keeps the names of a compiled module, which the checkpoint then has."""

    class WithLoss(Model):
        def forward(self, x: Tensor) -> Tensor:
            return loss(super().forward(x))

    exported = torch.export.export(torch.compile(WithLoss()), INPUTS)
    spelt = partition(exported, Topology.local(1), INPUTS)
    assert any(name.startswith("_orig_mod.") for name in spelt.program.states)
    engine = partitioner.Engine(spelt, WithLoss())
    first = torch.optim.AdamW(engine.parameters())
    engine.step(INPUTS)
    first.step()
    engine.save(tmp_path / "saved", first)
    after = engine.step(INPUTS)
    other = partitioner.Engine(partition(WithLoss(), Topology.local(1), INPUTS))
    other.load(tmp_path / "saved", torch.optim.AdamW(other.parameters()))
    assert torch.equal(other.step(INPUTS), after)


# --- checkpointing in forward -----------------------------------------------------------------------------------------


class Checkpointed(Model):
    """``call`` runs a layer."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.head(x)
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(x)


def saving_all(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


CALLS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "of a method": lambda layer, x: checkpoint(layer.forward, x, use_reentrant=False),
    "of a partial function": lambda layer, x: checkpoint(functools.partial(layer), x, use_reentrant=False),
    "of a lambda": lambda layer, x: checkpoint(lambda x: layer(x), x, use_reentrant=False),
    "sequential": lambda layer, x: checkpoint_sequential([layer, layer], 2, x, use_reentrant=False),
    "selective": lambda layer, x: checkpoint(
        layer,
        x,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, saving_all),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_checkpointing_in_forward_is_left_to_the_plan(name: str) -> None:
    model = Checkpointed(CALLS[name])
    plan = planned(model)
    (note,) = plan.notes
    assert "activation checkpointing in the model (" in note
    assert "test_wrappers.py:" in note
    assert ("Layer at" in note) == (name not in ("of a lambda", "sequential"))
    assert plan.verify(model, INPUTS, loss).ok
    full = planned(model, constraints=Constraints(recompute="full"), estimate_only=True)
    assert all(stage.recomputed for stage in full.estimate.stages)


def test_what_torch_gives_no_gradients_is_said() -> None:
    """A reentrant checkpoint of inputs that ask for no gradients detaches its result, with a warning of torch's."""

    class First(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.layers[0], x, use_reentrant=True))

    assert "torch gives no gradients to what is checkpointed" in notes_of(First())


def test_inference_has_no_checkpointing_to_speak_of() -> None:
    model = Checkpointed(CALLS["checkpoint"])
    assert not partition(model, Topology.local(1), INPUTS, objective="infer", estimate_only=True).notes


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_transformers_is_said(reentrant: bool) -> None:
    def notes(on: bool, training: bool = True) -> str:
        config = LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        model = LlamaForCausalLM(config).train(training)
        if on:
            model._set_gradient_checkpointing(True, functools.partial(checkpoint, use_reentrant=reentrant))
            model.enable_input_require_grads()
        ids = torch.arange(16).reshape(2, 8)
        inputs = {"input_ids": ids, "labels": ids}
        return " | ".join(partition(model, Topology.local(1), inputs, estimate_only=True).notes)

    assert "activation checkpointing in the model (LlamaDecoderLayer at transformers/" in notes(True)
    assert "checkpoint" not in notes(False)
    assert "checkpoint" not in notes(True, training=False)  # it is off in evaluation


# --- what is saved for gradients --------------------------------------------------------------------------------------


class Saving(Model):
    def __init__(self, hooks: Callable[[], Any]) -> None:
        super().__init__()
        self.hooks = hooks

    def forward(self, x: Tensor) -> Tensor:
        with self.hooks():
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


class InHalf(saved_tensors_hooks):
    """Rounds what is saved, so that gradients are others."""

    def __init__(self) -> None:
        super().__init__(Tensor.half, Tensor.float)


def test_moving_what_is_saved_is_left_to_the_plan() -> None:
    model = Saving(save_on_cpu)
    plan = planned(model)
    assert "activations that the model moves to host memory" in " | ".join(plan.notes)
    assert plan.verify(model, INPUTS, loss).ok


@pytest.mark.parametrize("hooks", [InHalf, lambda: saved_tensors_hooks(Tensor.half, Tensor.float)])
def test_changing_what_is_saved_is_refused(hooks: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"changes tensors that are saved for backward .*at .*test_wrappers\.py"):
        planned(Saving(hooks))
    assert partition(Saving(hooks), Topology.local(1), INPUTS, objective="infer")


# --- wrappers that are refused ----------------------------------------------------------------------------------------


def hooked(wrapper: nn.Module) -> nn.Module:
    wrapper.register_forward_hook(lambda module, arguments, output: 2 * output)
    return wrapper


def compressed(model: nn.parallel.DistributedDataParallel) -> nn.Module:
    model.register_comm_hook(None, fp16_compress_hook)
    return model


def fully_sharded(model: nn.Module) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def column_parallel() -> nn.Module:
    return parallelize_module(Model(), init_device_mesh("cpu", (1,)), {"head": ColwiseParallel()})


CPU = torch.device("cpu")
REFUSED: dict[str, tuple[Callable[[], nn.Module], type[ValueError], str]] = {
    "FSDP": (
        lambda: FullyShardedDataParallel(Model(), device_id=CPU),
        UnsupportedError,
        "the model is already sharded",
    ),
    "FSDP of a layer": (
        lambda: of_layer(functools.partial(FullyShardedDataParallel, device_id=CPU)),
        UnsupportedError,
        "'layers.1' is already sharded",
    ),
    "fully_shard": (lambda: fully_sharded(Model()), UnsupportedError, "already sharded by fully_shard"),
    "tensor parallel": (column_parallel, UnsupportedError, "'head' is already sharded by DTensors"),
    "TorchScript": (lambda: torch.jit.script(Model()), CaptureError, "the model is TorchScript"),
    "a traced layer": (
        lambda: of_layer(lambda layer: torch.jit.trace(layer, INPUTS)),
        CaptureError,
        "'layers.1' is TorchScript",
    ),
    "a hook on a compiled model": (
        lambda: hooked(torch.compile(Model())),
        UnsupportedError,
        "around the model has hooks",
    ),
    "a hook on a compiled layer": (
        lambda: of_layer(lambda layer: hooked(torch.compile(layer))),
        UnsupportedError,
        "around 'layers.1' has hooks",
    ),
    "a communication hook": (
        lambda: compressed(nn.parallel.DistributedDataParallel(Model())),
        UnsupportedError,
        "grad_compression",
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_more_than_a_wrapper_is_refused(name: str, group: None) -> None:
    make, error, said = REFUSED[name]
    with pytest.raises(error, match=said):
        planned(make())


def test_distributed_data_parallel_is_left_out(group: None, bare: Plan) -> None:
    for make in (
        lambda: nn.parallel.DistributedDataParallel(Model()),
        lambda: torch.compile(nn.parallel.DistributedDataParallel(Model())),
        lambda: nn.parallel.DistributedDataParallel(torch.compile(Model())),
    ):
        model = make()
        plan = planned(model)
        assert "DistributedDataParallel (the whole model) is left out" in " | ".join(plan.notes)
        assert plan.program.fingerprint == bare.program.fingerprint
        assert plan.verify(model, INPUTS, loss).ok


# --- functions that hold modules --------------------------------------------------------------------------------------


def twice_by_closure(model: Model) -> None:
    inner = model.layers[0].forward
    model.layers[0].forward = lambda x: 2 * inner(x)


def whole_by_closure(model: Model) -> None:
    inner = model.forward
    model.forward = lambda x: 2 * inner(x)


def twice_by_default(model: Model) -> None:
    model.layers[0].forward = lambda x, inner=model.layers[0].forward: 2 * inner(x)


def twice_by_partial(model: Model) -> None:
    inner = model.layers[0].forward
    model.layers[0].forward = functools.partial(lambda module, x: 2 * inner(x), model.layers[0])


def twice_by_method(model: Model) -> None:
    model.layers[0].forward = types.MethodType(lambda self, x: 2 * Layer.forward(self, x), model.layers[0])


def other_in_hook(model: Model) -> None:
    model.layers[0].register_forward_hook(lambda module, arguments, output: output + model.head(output))


def other_in_nested_function(model: Model) -> None:
    def outer(x: Tensor) -> Tensor:
        return inner(x) + model.head(x)

    inner = model.layers[0].forward
    model.layers[0].forward = outer


def in_list(model: Model) -> None:
    model.layers[0].__dict__["others"] = [model.head]
    model.layers[0].forward = types.MethodType(lambda self, x: self.others[0](x), model.layers[0])


HOLDING = (
    twice_by_closure,
    whole_by_closure,
    twice_by_default,
    twice_by_partial,
    twice_by_method,
    other_in_hook,
    other_in_nested_function,
    in_list,
)


@pytest.mark.parametrize("change", HOLDING)
def test_a_function_that_holds_modules_is_traced_with_their_weights(change: Callable[[Model], None]) -> None:
    model = Model()
    change(model)
    verified = planned(model).verify(model, INPUTS, loss)
    assert verified.ok, str(verified)


class ReadOnly(dict[str, Any]):
    """A dict that nobody may change, as the configurations of diffusers."""

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("read-only")


def test_a_model_that_holds_a_read_only_dict_is_traced() -> None:
    model = Model()
    model.config = ReadOnly(activation=nn.functional.relu, kind=Layer)
    assert planned(model).verify(model, INPUTS, loss).ok


def test_a_model_with_a_forward_that_is_compiled_whole_is_verified() -> None:
    class Compiled(Layer):
        forward = torch.compile(Layer.forward, fullgraph=True, backend="eager")

    model = Model()
    model.layers[1] = Compiled()
    assert planned(model).verify(model, INPUTS, loss).ok


OUTSIDE = nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize("objective", ["train", "infer"])
def test_a_parameter_that_is_read_past_the_model_is_refused(objective: Any) -> None:
    class Global(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(OUTSIDE(x))

    model = Global()
    model.outside = OUTSIDE
    with pytest.raises(UnsupportedError, match=r"reads 'outside\.\w+' through a closure, a global"):
        partition(model, Topology.local(1), INPUTS, loss=loss, objective=objective)


# --- hooks of the outermost module ------------------------------------------------------------------------------------


def doubled(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    return 2 * output


def before(module: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
    return (arguments[0] + 1,)


def bare_before(module: nn.Module, arguments: tuple[Tensor]) -> Tensor:
    return arguments[0] + 1


def with_names(module: nn.Module, arguments: Any, named: dict[str, Tensor]) -> Any:
    return arguments, {name: value + 1 for name, value in named.items()}


def behind_with_names(module: nn.Module, arguments: Any, named: dict[str, Tensor], output: Tensor) -> Tensor:
    return output + sum(named.values())


def watching(module: nn.Module, arguments: Any, output: Tensor) -> None:
    return None


ROOT_HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "on the output": lambda model: model.register_forward_hook(doubled),
    "two": lambda model: (model.register_forward_hook(doubled), model.register_forward_hook(doubled)),
    "on the inputs": lambda model: model.register_forward_pre_hook(before),
    "on the one input": lambda model: model.register_forward_pre_hook(bare_before),
    "on named inputs": lambda model: model.register_forward_pre_hook(with_names, with_kwargs=True),
    "with named inputs": lambda model: model.register_forward_hook(behind_with_names, with_kwargs=True),
    "that changes nothing": lambda model: model.register_forward_hook(watching),
    "prepended": lambda model: (
        model.register_forward_hook(doubled),
        model.register_forward_hook(behind_with_names, with_kwargs=True, prepend=True),
    ),
}


@pytest.mark.parametrize("name", ROOT_HOOKS)
def test_the_loss_is_of_what_the_hooks_make(name: str) -> None:
    model = Model()
    ROOT_HOOKS[name](model)
    inputs = {"x": INPUTS[0]} if "named" in name or name == "prepended" else INPUTS
    plan = partition(model, Topology.local(1), inputs, loss=loss)
    verified = plan.verify(model, inputs, loss)
    assert verified.ok, str(verified)
    assert torch.allclose(
        run_threads(plan, model, inputs).loss,
        loss(model(**inputs) if isinstance(inputs, dict) else model(*inputs)),
    )
