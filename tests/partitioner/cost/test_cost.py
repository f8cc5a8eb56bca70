"""Costs: operators, collectives, what is kept, states, calls, and the bounds that follow from them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from partitioner.cost.call.block_profile import asked_by
from partitioner.cost.call.call_cost import call_costs
from partitioner.cost.call.collectives import collective_time
from partitioner.cost.call.operators import Kernel, Operand, backward_kernels, forward_kernels
from partitioner.cost.call.roofline import kernels_time, matmul_efficiency
from partitioner.cost.call.saved_activations import kept_by
from partitioner.cost.call.states import StateCost, kinds_of, state_costs
from partitioner.cost.step.gradient_reduction import (
    GradientReduction,
    Reducer,
    compute_gradient_reduction,
    reduction_of,
)
from partitioner.cost.step.relaxed_mesh import best_type
from partitioner.emit.buckets import AT_ONCE
from partitioner.errors import ConstraintError, TopologyError
from partitioner.optimizers import optimizer_bytes
from partitioner.passes.capture.capture import capture
from partitioner.passes.ir.collectives import ops
from partitioner.passes.ir.gradient_flow import mark_gradients
from partitioner.passes.ir.interpret import META
from partitioner.passes.ir.layouts import PARTIAL, READ_SHARDED, REPLICATED, Layout, make_shard_layout
from partitioner.passes.ir.model import Block, ModelState, TensorSpec
from partitioner.passes.normalize.pipeline import normalize
from partitioner.passes.ops import score_changes
from partitioner.passes.rules.factors import Strategy
from partitioner.passes.shard.differentiate import differentiate
from partitioner.passes.shard.fold import fold
from partitioner.solve.bounds.block_work import block_work
from partitioner.solve.sharding.costs import TensorCosts
from partitioner.solve.sharding.local_model import unmark_stopped
from partitioner.topology import Topology, axis_group
from partitioner.topology.groups import stage_capacity
from tests.helpers.cost_devices import ACROSS, BF16, DEVICE, H100, NVLINK, block
from tests.helpers.models import CASES

aten = torch.ops.aten


def kernels(node: fx.Node) -> tuple[list[Kernel], list[Kernel]]:
    operands = [Operand(tuple(n.meta["val"].shape), n.meta["val"].dtype) for n in node.all_input_nodes]
    results = [Operand(tuple(node.meta["val"].shape), node.meta["val"].dtype)]
    return forward_kernels(node, operands, results), backward_kernels(node, operands, results, [True] * len(operands))


def last(made: Block) -> fx.Node:
    return made.outputs[0]


def test_changed_scores_are_passed_over_block_by_block():
    """16 heads of 4,096 positions, half of the pairs: 134,250,496 scores of 4 bytes. A cap is 4 more passes over them
    in forward and 7 in backward, slopes are 2, and their gradient is 3. A block has 1,024 queries and keys, so there
    are 8.002 of them: 9."""
    scores, traffic = 16 * 4096 * 4097 // 2, {}
    x = {name: torch.empty(1, 16, 4096, 128, dtype=torch.bfloat16) for name in "qkv"}
    for cap in (None, 50.0):
        for slopes in (False, True):

            def attend(f: Any, q: Any, k: Any, v: Any, s: Any, cap: Any = cap, slopes: bool = slopes) -> Any:
                marks = None, None, s if slopes else None
                target = torch.ops.partition.scored_attention.default
                return f(operator.getitem, f(target, q, k, v, *marks, [], -1, -1, 0, None, cap), 0)

            made = block(attend, {}, {**x, "s": torch.empty(16)})
            node = next(n for n in made.graph.nodes if "scored" in str(n.target))
            operands = [Operand((1, 16, 4096, 128), torch.bfloat16)] * 3 + [Operand((16,), torch.float32)] * slopes
            forward = forward_kernels(node, operands, operands[:1])
            backward = backward_kernels(node, operands, operands[:1], [True] * 3 + [False] * slopes)
            trained = backward_kernels(node, operands, operands[:1], [True] * len(operands))
            assert trained[1].num_bytes - backward[1].num_bytes == 4 * scores * 3 * slopes
            assert [k.kind for k in (*forward, *backward)] == ["attention", "pointwise"] * 2
            traffic[cap, slopes] = forward[1].num_bytes / scores / 4, backward[1].num_bytes / scores / 4
            assert (forward[1].launches, backward[1].launches) == (16 * 9, 26 * 9)
    assert traffic[None, True] == (11 + 2, 19 + 2)
    assert traffic[50.0, False] == (11 + 4, 19 + 7)
    assert traffic[50.0, True] == (11 + 6, 19 + 9)


def test_a_recurrent_layer_is_a_product_of_each_step() -> None:
    """100 steps of 8 samples, 32 features, 64 hidden ones, 4 x 64 gates: 2 * 8 * 256 * 32 FLOPs of a step are for the
    input, in one product, and 2 * 8 * 256 * 64 for the state, in 100 products of two launches. Backward runs forward
    again and has two products for each."""
    weights = {"w": torch.empty(256, 32), "u": torch.empty(256, 64)}
    state = torch.empty(1, 8, 64)

    def run(f: Any, w: Any, u: Any, x: Any, h: Any, c: Any) -> Any:
        return f(operator.getitem, f(torch.ops.partition.lstm_layer.default, x, h, c, w, u, None, None, None, False), 0)

    made = block(run, weights, {"x": torch.empty(100, 8, 32), "h": state, "c": state})
    node = next(n for n in made.graph.nodes if "lstm" in str(n.target))
    shapes = [(100, 8, 32), (1, 8, 64), (1, 8, 64), (256, 32), (256, 64)]
    operands = [Operand(shape, torch.float32) for shape in shapes]
    forward = forward_kernels(node, operands, [Operand((100, 8, 64), torch.float32), operands[2]])
    assert [(k.kind, k.flops, k.launches) for k in forward] == [
        ("matmul", 100 * 2 * 8 * 256 * 32, 1),
        ("matmul", 100 * 2 * 8 * 256 * 64, 200),
    ]
    backward = backward_kernels(node, operands, [Operand((100, 8, 64), torch.float32), operands[2]], [True] * 5)
    assert [k.flops for k in backward] == [3 * k.flops for k in forward]


def test_a_product_is_two_products_backward():
    made = block(
        lambda f, w, x: f(aten.linear.default, x, w), {"w": torch.empty(512, 256)}, {"x": torch.empty(4, 64, 256)}
    )
    forward, backward = kernels(last(made))
    assert [k.flops for k in forward] == [2 * 4 * 64 * 256 * 512]
    assert sum(k.flops for k in backward) == 2 * forward[0].flops
    assert forward[0].smallest == 256
    assert forward[0].num_bytes == 4 * (4 * 64 * 256 + 512 * 256 + 4 * 64 * 512)


def test_time_is_launch_and_work_and_traffic():
    kernel = Kernel(
        "matmul", 3.35e12 * 0.82, flops=989e12 * matmul_efficiency(4096, DEVICE), smallest=4096, precision="bf16"
    )
    assert kernels_time([kernel], DEVICE) == pytest.approx(5e-6 + 1.0 + 1.0)
    assert matmul_efficiency(8, DEVICE) < matmul_efficiency(16, DEVICE) == matmul_efficiency(1e9, DEVICE)


def test_a_causal_mask_leaves_half_of_attention():
    q = torch.empty(2, 8, 1024, 64, dtype=BF16)
    attention = aten.scaled_dot_product_attention.default
    full = block(lambda f, q, k, v: f(attention, q, k, v), {}, {"q": q, "k": q, "v": q})
    causal = block(lambda f, q, k, v: f(attention, q, k, v, None, 0.0, True), {}, {"q": q, "k": q, "v": q})
    whole, half = (kernels(last(b))[0][0].flops for b in (full, causal))
    assert whole == 2 * 2 * 2 * 8 * 1024 * 1024 * 64
    assert half == pytest.approx(whole / 2, rel=1e-3)


def test_views_are_free_and_a_reshape_with_gaps_copies():
    x = {"x": torch.empty(8, 16, 32)}
    view = block(lambda f, x: f(aten.permute.default, x, [1, 0, 2]), {}, x)
    copy = block(lambda f, x: f(aten.reshape.default, f(aten.permute.default, x, [1, 0, 2]), [16, 256]), {}, x)
    assert kernels(last(view))[0] == []
    assert kernels(last(copy))[0][0].num_bytes == 2 * 4 * 8 * 16 * 32


@pytest.mark.parametrize(
    ("target", "args", "sizes"),
    [
        (aten.to.dtype, (torch.float32,), 4 + 2),  # bytes of an element: read and written
        (aten.mul.Tensor, (0.5,), 2 + 2),
        (aten.exp.default, (), 2 + 2 + 2),  # which reads what it gave
    ],
)
def test_the_gradient_of_what_is_linear_reads_no_operand(target: object, args: tuple[object, ...], sizes: int):
    made = block(lambda f, x: f(target, x, *args), {}, {"x": torch.empty(64, 32, dtype=BF16)})
    assert [k.num_bytes for k in kernels(last(made))[1]] == [64 * 32 * sizes]


def test_the_gradient_of_a_look_up_is_filled_as_fast_as_memory_is_written():
    made = block(
        lambda f, x, i: f(aten.gather.default, x, 1, i), {}, {"x": torch.empty(64, 500), "i": torch.zeros(64, 1).long()}
    )
    x, i, y = Operand((64, 500), torch.float32), Operand((64, 1), torch.int64), Operand((64, 1), torch.float32)
    backward = backward_kernels(last(made), [x, i], [y], [True, False])
    assert [(k.kind, k.num_bytes) for k in backward] == [("pointwise", 64 * 500 * 4), ("lookup", 64 * 4 * 2)]


def test_the_gradient_of_a_square_reads_it():
    made = block(lambda f, x: f(aten.mul.Tensor, x, x), {}, {"x": torch.empty(64, 32, dtype=BF16)})
    backward = asked_by(made, train=True).kernels
    assert backward.num_bytes[backward.way == 1].max() == 64 * 32 * 6


@pytest.mark.parametrize("group", [NVLINK, ACROSS], ids=["one node", "two nodes"])
def test_an_all_reduce_moves_twice_as_much(group: object):
    size = 1e9
    both = collective_time("all_reduce", size, group) - collective_time("all_reduce", 0, group)  # type: ignore[arg-type]
    one = collective_time("all_gather", size, group) - collective_time("all_gather", 0, group)  # type: ignore[arg-type]
    assert both == pytest.approx(2 * one)


def test_links_between_nodes_are_slower():
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert collective_time(op, 1e8, ACROSS) > collective_time(op, 1e8, NVLINK)
    assert collective_time("all_reduce", 1e9, NVLINK) == pytest.approx(29e-6 + 2 * 7 / 8 * 1e9 / 345e9)


@given(st.floats(0, 1e12), st.floats(0, 1e12), st.sampled_from(["all_reduce", "all_gather", "all_to_all"]))
def test_more_bytes_take_no_less_time_and_less_together(a: float, b: float, op: str):
    """What the floors of the search build on: t(a) <= t(a + b) <= t(a) + t(b)."""
    both = collective_time(op, a + b, ACROSS)
    assert collective_time(op, a, ACROSS) <= both * (1 + 1e-12)
    assert both <= (collective_time(op, a, ACROSS) + collective_time(op, b, ACROSS)) * (1 + 1e-12)


def saved_by_autograd(made: Block) -> tuple[int, tuple[bool, ...]]:
    """Bytes of the storages that autograd keeps while it runs the block, besides the inputs that it keeps."""
    env: dict[fx.Node, object] = {}
    for node in made.placeholders:
        value = node.meta["val"]
        real = (
            torch.randn(value.shape, dtype=value.dtype)
            if value.is_floating_point()
            else torch.zeros_like(value, device="cpu")
        )
        env[node] = real.requires_grad_() if node.meta["grad"] else real
    saved: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        for node in made.graph.nodes:
            if node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
                kwargs = {k: torch.device("cpu") if v == META else v for k, v in kwargs.items()}
                result = node.target(*args, **kwargs)
                env[node] = result
    given_ = [env[n].untyped_storage().data_ptr() for n in made.placeholders]  # type: ignore[attr-defined]
    inside = sum(size for pointer, size in saved.items() if pointer not in given_)
    return inside, tuple(pointer in saved for pointer in given_[len(made.states) :])


@pytest.mark.parametrize("name", ["gemma2", "t5", "vit", "skip-mlp"])
def test_what_is_kept_is_what_autograd_keeps(name: str):
    case = CASES[name]
    model = fold(normalize(capture(case.build(), case.inputs(8), loss=case.loss)))
    mark_gradients(model)
    for made in model.blocks.values():
        inside, inputs = saved_by_autograd(made)
        kept = kept_by(made)
        assert kept.inside == pytest.approx(inside, rel=0.02, abs=64), made.name
        assert kept.inputs == inputs, made.name


def test_without_training_nothing_is_kept():
    made = block(lambda f, w, x: f(aten.mm.default, x, w), {"w": torch.empty(8, 8)}, {"x": torch.empty(8, 8)})
    assert kept_by(made, train=False).inside == 0
    assert kept_by(made, train=False).inputs == (False,)
    cost = call_costs(made, DEVICE, {}, train=False)
    assert (cost.backward_s, cost.output_grads) == (0.0, (False,))


@pytest.mark.parametrize(
    ("collective", "args", "forward", "backward"),
    [
        (ops.all_gather.default, (1, "tp", 8, "reduce"), "all_gather", "reduce_scatter"),
        (ops.all_gather.default, (1, "tp", 8, "slice"), "all_gather", None),
        (ops.reduce_scatter.default, (1, "tp", 8), "reduce_scatter", "all_gather"),
        (ops.all_reduce.default, ("tp", 8, "copy"), "all_reduce", None),
        (ops.all_reduce.default, ("tp", 8, "reduce"), "all_reduce", "all_reduce"),
        (ops.copy.default, ("tp", 8), None, "all_reduce"),
        (ops.shard_slice.default, (1, "tp", 8), None, "all_gather"),
        (ops.shard_narrow.default, (1, "tp", 8), None, None),
    ],
)
def test_a_collective_is_transposed_backward(
    collective: object, args: tuple[object, ...], forward: str | None, backward: str | None
):
    x = torch.empty(1, 4096, 4096, dtype=BF16)
    made = block(lambda f, x: f(collective, x, *args), {}, {"x": x})
    cost = call_costs(made, DEVICE, {"tp": NVLINK})
    whole = x.nbytes * (8 if collective is ops.all_gather.default else 1)
    assert cost.forward_comm_s == pytest.approx(collective_time(forward, whole, NVLINK) if forward else 0.0)
    assert cost.backward_comm_s == pytest.approx(collective_time(backward, whole, NVLINK) if backward else 0.0)


@pytest.mark.parametrize(
    ("source", "target", "sent"),
    [
        (make_shard_layout(0), make_shard_layout(0), []),
        (make_shard_layout(0), make_shard_layout(2), ["all_to_all", "all_to_all"]),
        (make_shard_layout(0), READ_SHARDED, ["all_gather", "reduce_scatter"]),
        (REPLICATED, READ_SHARDED, ["all_reduce"]),
        (READ_SHARDED, make_shard_layout(1), []),
        (PARTIAL, make_shard_layout(0), ["reduce_scatter", "all_gather"]),
        (PARTIAL, REPLICATED, ["all_reduce"]),
        (READ_SHARDED, REPLICATED, None),
        (make_shard_layout(0), PARTIAL, None),
    ],
    ids=str,
)
def test_a_reshard_costs_its_collectives(source: Layout, target: Layout, sent: list[str] | None):
    spec = TensorSpec((64, 512, 512), BF16)
    cost = TensorCosts(DEVICE, NVLINK).reshard(spec, source, target, True)
    if sent is None:
        assert math.isinf(cost)
        return
    expected = sum(collective_time(op, spec.nbytes, NVLINK) for op in sent)
    copies = 0.0 if not sent or target.dim in (0, -1) else len(sent) * (5e-6 + 2 * spec.nbytes / 3.35e12)
    cut = 2 * spec.nbytes / 8 / (0.87 * 3.35e12) if not sent and target.dim == 1 else 0.0  # a rank copies its part
    assert cost == pytest.approx(expected + copies + cut, abs=6e-6)


def test_sharded_work_takes_a_share_of_the_time():
    big = {"x": torch.empty(8192, 8192, dtype=BF16)}
    made = block(lambda f, w, x: f(aten.linear.default, x, w), {"w": big["x"]}, big)
    node, costs = last(made), TensorCosts(DEVICE, NVLINK)
    whole = costs.node(node, Strategy(None, (), (REPLICATED, REPLICATED), (REPLICATED,)), 8)
    columns = costs.node(node, Strategy("n", (), (READ_SHARDED, make_shard_layout(0)), (make_shard_layout(1),)), 8)
    assert whole / 8 < columns < whole / 6


def test_a_state_read_as_a_partial_sum_pays_for_its_gradient():
    costs = TensorCosts(DEVICE, NVLINK, num_microbatches=2)
    spec = TensorSpec((4096, 4096), BF16)
    extra = costs.state(spec, READ_SHARDED, 8) - costs.state(spec, REPLICATED, 8)
    assert extra == pytest.approx(collective_time("all_reduce", 2 * spec.nbytes, NVLINK) / 2)  # in float32
    short = TensorCosts(DEVICE, NVLINK, num_microbatches=2, short_gradients=True)
    extra = short.state(spec, READ_SHARDED, 8) - short.state(spec, REPLICATED, 8)
    assert extra == pytest.approx(collective_time("all_reduce", spec.nbytes, NVLINK) / 2)
    assert costs.state(spec, make_shard_layout(0), 8) < costs.state(spec, REPLICATED, 8)
    assert math.isinf(TensorCosts(DEVICE, NVLINK, sequence_parallel=False).boundary(spec, make_shard_layout(0)))


def test_adam_takes_eighteen_bytes_per_short_parameter():
    states = {
        "w": ModelState("w", TensorSpec((64, 64), BF16), "parameter", True),
        "frozen": ModelState("frozen", TensorSpec((64, 64), BF16), "parameter", False),
        "norm": ModelState("norm", TensorSpec((64,), torch.float32), "parameter", True),
    }
    layouts = {"w": make_shard_layout(0), "norm": READ_SHARDED}
    costs = state_costs(kinds_of(states, layouts), {"dp": 2, "tp": 4})
    assert costs["w"].total == 18 * 64 * 64 / 4
    assert costs["w"].grad_axes == ("dp",)
    assert costs["frozen"].total == 2 * 64 * 64
    assert costs["norm"].total == 16 * 64
    assert costs["norm"].grad_axes == ("dp", "tp")
    assert (
        state_costs(kinds_of(states, layouts), {"dp": 1, "tp": 4}, optimizer="sgd")["w"].total
        == (2 + 4 + 4) * 64 * 64 / 4
    )
    assert [optimizer_bytes(1, size, "adamw") for size in (2, 4, 8)] == [12, 8, 16]
    with pytest.raises(ConstraintError, match="unknown optimizer 'lion'; expected one of adamw"):
        optimizer_bytes(1, 2, "lion")


def test_reductions_hide_behind_the_backward():
    work = GradientReduction(total_s=1.0, last_s=0.1)
    assert work.exposed(math.inf, 1.0) == pytest.approx(0.1)
    assert work.exposed(0.0, 1.13) == pytest.approx(1.0)
    assert work.exposed(10.0, 1.13) == pytest.approx(0.1 + 0.13 * 0.9)
    reducer = Reducer(lambda axes: NVLINK, AT_ONCE, DEVICE)
    made = compute_gradient_reduction([StateCost(100e6, 100e6, 0, ("dp",)), StateCost(1e6)], reducer)
    assert made.total_s > collective_time("all_reduce", 100e6, NVLINK)
    assert made.last_s < made.total_s / 3
    at_once = compute_gradient_reduction([StateCost(100e6, 100e6, 0, ("dp",))], reducer, overlap=False)
    assert at_once.total_s == collective_time("all_reduce", 100e6, NVLINK)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("family", ["gemma2", "bloom", "t5", "bert", "vit", "gpt2"])
def test_blocks_take_at_most_in_proportion_to_the_batch(
    family: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds scale the time of a large batch down. The scores of an attention without a fused kernel are computed in
    blocks, several here: a smaller batch has fewer."""
    for name, number in {"_MOST_SCORES": 2**7, "_ON_CPU": 1, "_ELSEWHERE": 8}.items():
        monkeypatch.setattr(score_changes, name, number)
    case = CASES[family]
    build = partial(capture, case.build())
    whole, part = (fold(normalize(build(case.inputs(n)))) for n in (8, batch))
    for model in (whole, part):
        mark_gradients(model)
    for name, made in whole.blocks.items():
        if name == "shared":  # bounds do not count blocks that run once for all microbatches
            continue
        for device in (DEVICE, DEVICE.model_copy(update={"dispatch": 28e-6})):
            bound = block_work(made, device).at(batch / 8, 1, batch > 1)
            cost, of_all = call_costs(part.blocks[name], device, {}), call_costs(made, device, {})
            for taken in ("forward_s", "backward_s"):
                told = getattr(cost, taken) * (1 + 1e-9)
                assert getattr(bound, taken) <= told, (name, taken)
                assert getattr(of_all, taken) * batch / 8 <= told, (name, taken)


@pytest.mark.parametrize("heads", [1, 3, 16, 100, 4096, 10**6])
@pytest.mark.parametrize("times", [2, 3, 5, 8, 12])
def test_blocks_of_scores_grow_at_most_with_the_heads(heads: int, times: int) -> None:
    for scores in (1.0, 2048.0**2, 8192.0 * 8191 / 2):
        few, many = (score_changes.estimate_num_blocks(scores, n) for n in (heads, heads * times))
        assert 1 <= few <= many <= times * few


@pytest.mark.parametrize("batch", [1, 8])
def test_a_share_of_a_block_costs_no_less_than_its_bound(batch: int):
    """A block's work scales linearly: what it takes for part of the batch is never below the bound for that part."""
    case = CASES["llama"]
    build = partial(capture, case.build())
    whole, part = (fold(normalize(build(case.inputs(n)))) for n in (8, batch))
    for model in (whole, part):
        mark_gradients(model)
    for name, made in whole.blocks.items():
        bound = block_work(made, DEVICE).at(batch / 8, 1, batch > 1)
        cost = call_costs(part.blocks[name], DEVICE, {})
        issuing = DEVICE.model_copy(update={"dispatch": 28e-6})
        slow, least = call_costs(part.blocks[name], issuing, {}), block_work(made, issuing).at(batch / 8, 1, batch > 1)
        assert least.forward_s <= slow.forward_s, name
        assert least.backward_s <= slow.backward_s, name
        assert least.backward_s - least.later_s <= slow.backward_s - slow.later_s, name
        assert slow.forward_s > cost.forward_s, name
        assert bound.forward_s <= cost.forward_s * (1 + 1e-9), name
        assert bound.backward_s <= cost.backward_s * (1 + 1e-9), name
        assert bound.backward_s - bound.later_s <= (cost.backward_s - cost.later_s) * (1 + 1e-9), name
        assert bound.saved_bytes <= cost.saved_bytes + 1, name
        if batch == 8:
            assert bound.forward_s == pytest.approx(cost.forward_s)
            assert bound.backward_s == pytest.approx(cost.backward_s)
            assert bound.later_s == pytest.approx(cost.later_s)
            assert (cost.later_s > 0) == any(n.meta["grad"] for n in made.placeholders if n.name in made.states)


@pytest.mark.parametrize("name", ["gemma2", "t5", "vit", "skip-mlp"])
def test_gradients_of_weights_are_the_products_of_their_half_of_the_backward(name: str):
    case = CASES[name]
    model = fold(normalize(capture(case.build(), case.inputs(8), loss=case.loss)))
    mark_gradients(model)
    looked_at = 0
    for made in model.blocks.values():
        needs = [[bool(n.meta["grad"]) for n in nodes] for nodes in (made.placeholders, made.outputs)]
        of_states, of_inputs = needs[0][: len(made.states)], needs[0][len(made.states) :]
        if not any(of_inputs):
            continue  # nobody waits for this backward
        pieces = differentiate(made, torch.device("cpu"), of_inputs, of_states, needs[1])
        columns = asked_by(made, True).kernels
        flops = sum(kernel.flops for node in pieces.backward_weight.graph.nodes for kernel in made_of(node))
        assert columns.flops[columns.learned].sum() == pytest.approx(flops), made.name
        cost = call_costs(made, DEVICE, {})
        assert cost.weights_s > 0 or not any(of_states), made.name
        looked_at += bool(flops)
    assert looked_at


def made_of(node: fx.Node) -> list[Kernel]:
    """The kernels of an operator of a traced graph, whose values are fake."""
    values = [n.meta["val"] for n in (node, *node.all_input_nodes)] if node.op == "call_function" else [()]
    return kernels(node)[0] if all(isinstance(value, Tensor) for value in values) else []


def test_gradients_of_weights_that_are_cast_belong_to_their_half():
    def products(f: Callable[..., fx.Node], w: fx.Node, x: fx.Node) -> fx.Node:
        return f(aten.mm.default, x, f(aten.t.default, f(aten._to_copy.default, w, dtype=BF16)))

    made = block(products, {"w": torch.empty(512, 256)}, {"x": torch.empty(64, 256, dtype=BF16)})
    columns = asked_by(made, True).kernels
    assert columns.flops[columns.learned].sum() == 2 * 64 * 256 * 512
    assert columns.flops[(columns.way == 1) & ~columns.learned].sum() == 2 * 64 * 256 * 512


def test_rows_that_are_not_whole_sixteen_bytes_slow_a_product():
    def product(columns: int) -> Block:
        weight, x = torch.empty(columns, 512, dtype=BF16), torch.empty(1024, 512, dtype=BF16)
        return block(lambda run, w, x: run(aten.linear.default, x, w), {"w": weight}, {"x": x})

    work_alone = DEVICE.model_copy(update={"launch": 0.0, "memory_bandwidth": 1e30})
    whole, odd = (call_costs(product(n), work_alone, {}) for n in (4096, 4095))
    assert 0 < DEVICE.unaligned < 1
    assert odd.forward_s / odd.flops == pytest.approx(whole.forward_s / whole.flops / DEVICE.unaligned)
    assert odd.backward_s / odd.flops == pytest.approx(whole.backward_s / whole.flops / DEVICE.unaligned)


def test_groups_of_ranks_take_room():
    device = H100.device_type(0)
    alone, inside, both = (
        stage_capacity(H100, mesh)[0] for mesh in ({"pp": 1}, {"dp": 8, "cp": 2}, {"dp": 2, "tp": 8})
    )
    assert alone == H100.devices[0].usable
    assert (alone - inside, alone - both) == (device.communicator, 2 * device.communicator)
    assert device.communicator > 0


def test_what_a_lowering_detaches_has_no_backward():
    def shifted(run: Callable[..., fx.Node], x: fx.Node) -> fx.Node:
        return run(aten.sub.Tensor, x, run(aten.amax.default, run(aten.detach.default, x), [-1], True))

    made = block(shifted, {}, {"x": torch.empty(8, 8)})
    for node in made.graph.nodes:  # as nodes that stand for one operator are marked: like that one
        node.meta["grad"] = True
    marks = [n.meta["grad"] for n in unmark_stopped(made).graph.nodes if n.op == "call_function"]
    assert marks == [False, False, True]


def test_the_host_issues_a_copy_over_tp_only_backward():
    slow = DEVICE.model_copy(update={"dispatch": 1.0})

    def cost(target: Callable[..., object], *args: object) -> tuple[float, float]:
        made = block(lambda run, x: run(aten.relu.default, run(target, x, *args)), {}, {"x": torch.empty(8, 8)})
        found = call_costs(made, slow, {})
        return found.forward_total_s, found.backward_total_s

    assert cost(ops.copy.default, "tp", 8) == pytest.approx((1, 2))  # an all-reduce backward
    assert cost(ops.all_reduce.default, "tp", 8, "copy") == pytest.approx((2, 1))


@pytest.fixture(scope="module")
def llama_blocks() -> list[Block]:
    case = CASES["llama"]
    model = fold(normalize(capture(case.build(), case.inputs(8), loss=case.loss)))
    mark_gradients(model)
    return list(model.blocks.values())


@given(
    st.floats(0, 100e-6), st.floats(1, 10), st.sampled_from(["memory_bandwidth", "launch", "peak"]), st.floats(1e-4, 1)
)
def test_no_part_of_a_call_is_slower_on_a_faster_device(
    llama_blocks: list[Block], dispatch: float, factor: float, what: str, share: float
):
    """Also where the host is the slower one for some of it: the gradients of inputs, which others wait for, do not wait
    for what those of weights no longer take."""
    slow = DEVICE.model_copy(
        update={"dispatch": dispatch, "memory_bandwidth": share * DEVICE.memory_bandwidth, "launch": 5e-6}
    )
    faster: dict[str, object] = {
        "memory_bandwidth": slow.memory_bandwidth * factor,
        "launch": slow.launch / factor,
        "peak": {name: rate * factor for name, rate in slow.peak.items()},
    }
    fast = slow.model_copy(update={what: faster[what]})
    for made in llama_blocks:
        before, after = call_costs(made, slow, {}), call_costs(made, fast, {})
        assert after.forward_s <= before.forward_s * (1 + 1e-9)
        assert after.backward_s <= before.backward_s * (1 + 1e-9)
        assert after.later_s <= before.later_s * (1 + 1e-9)
        assert after.backward_s - after.later_s <= (before.backward_s - before.later_s) * (1 + 1e-9)


def test_a_device_that_is_held_to_less_power_multiplies_more_slowly():
    """500 of 700 W, of which 75 do no work: its clock is the cube root of 0.68. Memory is as fast as it was."""
    held = DEVICE.model_copy(update={"power_limit": 500.0})
    assert held.clock == pytest.approx(0.68 ** (1 / 3))
    assert DEVICE.model_copy(update={"power_limit": 800.0}).clock == DEVICE.clock == 1.0
    product = Kernel("matmul", 0.0, flops=1e12, smallest=8192, precision="bf16")
    moved = Kernel("pointwise", 1e9)
    launch = DEVICE.launch
    ratio = (kernels_time([product], held) - launch) / (kernels_time([product], DEVICE) - launch)
    assert ratio == pytest.approx(1 / held.clock)
    assert kernels_time([moved], held) == kernels_time([moved], DEVICE)
    best = best_type([held, DEVICE.model_copy(update={"memory_bandwidth": 1e12})])
    for kernel in (product, moved):
        assert kernels_time([kernel], best) <= kernels_time([kernel], held)
    assert kernels_time([product], best_type([held, held.model_copy(update={"launch": 0.0})])) > 1.1 * (
        kernels_time([product], DEVICE) - launch
    )


def test_power_limits_that_cannot_be(tmp_path: Path):
    path = tmp_path / "held.yaml"
    lines = ["types: {mine: {like: h100-sxm, power_limit: 60 W}}", "nodes: [{type: mine, devices: 1}]"]
    path.write_text("\n".join(lines))
    with pytest.raises(TopologyError, match=r"power_limit of 60 W with power_busy 700\.0 and power_idle 75\.0"):
        Topology.load(path)


def test_buckets_of_gradients_grow_with_all_ranks_that_add_them_up():
    """Gradients are scattered over the 8 ranks of a node, and what is left of a bucket is added up over 16 nodes: 2 MB
    for each of 128 ranks fill a bucket, so that steps around 16 nodes are not most of it."""
    topology = Topology.preset("dgx-h100", nodes=16)
    inside, nodes = (axis_group(topology, {"dp": 16, "tp": 8}, axis) for axis in ("tp", "dp"))
    groups = {("dp_shard",): inside, ("dp_replicate",): nodes}
    reducer = Reducer(groups.__getitem__, AT_ONCE, H100.device_type(0))
    pieces = 1e9
    found = reduction_of({("all_reduce", ("dp_replicate",), 0, ("dp_shard",)): pieces}, {}, reducer)
    count = math.ceil(8 * pieces / (2e6 * 128))
    assert found.total_s == pytest.approx(count * collective_time("all_reduce", pieces / count, nodes))
