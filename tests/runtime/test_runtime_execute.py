"""Hand-made programs over all axes compute what the module computes: values, loss, every gradient."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from partitioner import BackwardError, BatchError, Engine, InstructionError, LaunchError, RankError, run_threads
from partitioner.runtime.comm.thread_backend import ThreadWorld
from partitioner.runtime.program.instructions import Instruction
from tests.helpers.net_runs import broken, check, in_threads, infer_only, reference
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net

SHAPES: list[dict[str, Any]] = [
    {},
    {"tp": 2},
    {"dp": 2},
    {"pp": 2},
    {"num_microbatches": 4},
    {"pp": 2, "num_microbatches": 4},
    {"pp": 4, "num_microbatches": 2},
    {"pp": 2, "tied": True, "num_microbatches": 2},
    {"pp": 4, "tied": True, "dp": 2},
    {"pp": 2, "dp": 2, "tp": 2, "num_microbatches": 2, "tied": True},
    {"tp": 2, "checkpoint": True, "num_microbatches": 2},
    {"pp": 2, "halves": True, "num_microbatches": 2},
    {"pp": 2, "tp": 2, "halves": True, "checkpoint": True},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_program_computes_what_the_module_does(shape: dict[str, Any]):
    model, output = reference(shape.get("tied", False))
    check(run_threads(program_of_net(**shape), model, net_inputs()), model, output)


def test_in_float64_the_numbers_agree_to_float64():
    model = Net().double()
    inputs = {k: v.double() for k, v in net_inputs().items()}
    output = model(**inputs)
    output["loss"].backward()
    run = run_threads(program_of_net(pp=2, tp=2), Net(), net_inputs(), precision="fp64")
    assert run.loss.dtype == torch.float64
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(run.grads[name], parameter.grad, rtol=1e-12, atol=1e-12)


def test_a_step_starts_anew_and_training_goes_on_as_in_one_process():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**net_inputs())["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        expected.append(loss.item())

    def train(engine: Engine) -> list[float]:
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
        losses = []
        for _ in range(3):
            losses.append(engine.step(net_inputs()).item())
            engine.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()  # sets the gradients to None: the next step puts them back
        return losses

    for losses in in_threads(program_of_net(pp=2, tp=2, num_microbatches=2), train):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shape", [{"tp": 2}, {"dp": 2, "tp": 2}, {"pp": 2}], ids=str)
def test_the_norm_counts_every_parameter_once(shape: dict[str, Any]):
    model, _ = reference()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def clip(engine: Engine) -> tuple[Tensor, dict[str, Tensor]]:
        engine.step(net_inputs())
        norm = engine.clip_grad_norm_(0.1)
        return norm, {n: p.grad.clone() for n, p in engine.named_parameters()}

    for norm, grads in in_threads(program_of_net(**shape), clip):
        torch.testing.assert_close(norm, expected)
        if "first.weight" in grads:
            torch.testing.assert_close(grads["first.weight"], model.first.weight.grad)


def test_a_tied_parameter_counts_once_in_the_norm():
    model, _ = reference(tied=True)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    program = program_of_net(pp=2, tied=True)
    world = ThreadWorld(2, timeout=20)
    norms: list[Tensor] = []

    def work(rank: int) -> None:
        engine = Engine(program, model, communicator=world.communicator(rank))
        engine.step(net_inputs())
        norms.append(engine.clip_grad_norm_(1e9))

    threads = [threading.Thread(target=work, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(norms, [expected, expected])


def test_another_batch_size_is_refused_with_both_sizes():
    engine = Engine(program_of_net(), Net())
    inputs = net_inputs()
    with pytest.raises(BatchError, match=r"input 'x': expected shape \[8, 8\], got \[4, 8\].*another batch size"):
        engine.step({k: v[:4] for k, v in inputs.items()})


def test_a_batch_without_samples_is_not_to_be_planned_for():
    inputs = {name: value[:0] for name, value in net_inputs().items()}
    with pytest.raises(BatchError, match=r"got \[0, 8\]: the batch has no samples; leave it out, on all ranks$"):
        Engine(program_of_net(), Net()).step(inputs)


def test_a_missing_input_is_named():
    inputs = net_inputs()
    del inputs["target"]
    with pytest.raises(BatchError, match=r"input 'target' is missing.*the batch has x, weight"):
        Engine(program_of_net(), Net()).step(inputs)


def test_an_input_of_another_kind_is_refused():
    inputs = net_inputs()
    inputs["x"] = inputs["x"].long()
    with pytest.raises(BatchError, match="input 'x': expected type float32, got int64"):
        Engine(program_of_net(), Net()).step(inputs)


def test_several_ranks_need_a_process_group():
    with pytest.raises(LaunchError, match="2 ranks and there is no process group"):
        Engine(program_of_net(tp=2), Net())


def test_inference_gives_outputs_and_no_gradients():
    model, output = reference()
    run = run_threads(infer_only(program_of_net(pp=2, tp=2)), model, net_inputs())
    torch.testing.assert_close(run.outputs["prediction"], output["prediction"])
    torch.testing.assert_close(run.loss, output["loss"])
    assert run.grads == {}


def test_a_failing_node_is_told_with_its_instruction_and_source_and_releases_the_others():
    program = broken(infer_only(program_of_net(pp=2)), 1)
    with pytest.raises(RankError) as caught:
        run_threads(program, Net(), net_inputs(), timeout=60)
    failure = caught.value.failure
    assert (failure.rank, failure.instruction, failure.call, failure.path) == (1, "1F0", "layers.1", "layer")
    assert failure.node.endswith("(aten.mm.default)")
    assert failure.source.startswith("net.py:")
    assert str(caught.value).splitlines()[-1].startswith("first cause: rank 1, instruction")


def test_ranks_that_enter_different_collectives_are_told_apart():
    program = program_of_net(dp=2)
    lists = [program.rank(r).instructions for r in range(2)]
    other = tuple(i for i in lists[1] if i.op != "REDUCE")
    world = ThreadWorld(2, timeout=0.5)
    errors: list[InstructionError] = []

    def work(rank: int) -> None:
        from partitioner.runtime.engine.batches import convert_rank_batch, get_share
        from partitioner.runtime.execute.bind import BlockLibrary
        from partitioner.runtime.execute.executor import Executor
        from partitioner.runtime.state.gradients import RankGradients
        from partitioner.runtime.state.parameters import load_states
        from partitioner.runtime.state.weights import open_weights

        mine = program.rank(rank).with_instructions(lists[0] if rank == 0 else other)
        communicator = world.communicator(rank)
        states = load_states(mine, open_weights(Net()), torch.device("cpu"))
        gradients = RankGradients(mine, states, communicator)
        executor = Executor(mine, states, gradients, communicator, BlockLibrary(program, torch.device("cpu")))
        try:
            executor.run(convert_rank_batch(program, get_share(mine), net_inputs()))
        except InstructionError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 1
    assert errors[0].failure.rank == 0
    assert "ranks [1] of the group did not enter it within 0.5 s" in str(errors[0])


def test_instructions_print_in_the_notation_of_torch():
    assert str(Instruction(op="SEND_F", stage=1, microbatch=2, peer=2)) == "1SEND_F2"


BACKWARDS: dict[str, Callable[[Tensor], Any]] = {
    "of the loss": lambda loss: loss.backward(),
    "of a part, as in accumulation": lambda loss: (loss / 4).backward(),
    "scaled": lambda loss: torch.amp.GradScaler("cpu").scale(loss).backward(),
    "by autograd": lambda loss: torch.autograd.backward([loss]),
    "of gradients": lambda loss: torch.autograd.grad(loss, [torch.ones(1, requires_grad=True)]),
    "of a mean": lambda loss: torch.stack([loss, loss.detach()]).mean().backward(retain_graph=True),
    "of a copy": lambda loss: copy.deepcopy(loss).double().cpu().clone().backward(gradient=torch.ones(())),
}


@pytest.mark.parametrize("backward", BACKWARDS.values(), ids=BACKWARDS.keys())
def test_backward_of_a_steps_loss_is_refused(backward: Callable[[Tensor], Any]):
    engine = Engine(program_of_net(), Net())
    loss = engine.step(net_inputs())
    assert loss is not None
    with pytest.raises(BackwardError, match=r"step\(\) has already run forward and backward"):
        backward(loss)
    assert engine.loss is not None
    with pytest.raises(BackwardError, match="leave backward out"):
        backward(engine.loss)


def test_a_steps_loss_is_otherwise_a_number():
    loss = Engine(program_of_net(), Net()).step(net_inputs())
    expected = reference()[1]["loss"]
    assert loss is not None and not loss.requires_grad and loss.grad_fn is None
    assert loss.item() == float(loss) == loss.numpy() == loss.detach().tolist()
    assert f"{loss:.3f}" == f"{expected:.3f}" and repr(loss) == repr(loss.detach().as_subclass(Tensor))
    assert torch.isfinite(loss) and loss < 1e9 and bool(loss) and max(loss, expected) >= expected
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(expected, loss)
    total = 0.0
    total += loss
    torch.testing.assert_close(sum([loss, loss]) / 2 + total, 2 * expected)
    kept = io.BytesIO()
    torch.save({"loss": loss}, kept)
    kept.seek(0)
    assert type(torch.load(kept, weights_only=True)["loss"]) is Tensor  # as scripts load what they have saved


def test_what_has_a_graph_beside_a_steps_loss_has_its_gradient():
    loss = Engine(program_of_net(), Net()).step(net_inputs())
    weight = torch.full((3,), 2.0, requires_grad=True)
    (loss + (weight**2).sum()).backward()
    assert weight.grad is not None and weight.grad.tolist() == [4.0, 4.0, 4.0]
