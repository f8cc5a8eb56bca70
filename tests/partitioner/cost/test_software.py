"""What the software that runs a plan does with collectives, kernels and buckets, in the cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from partitioner import Constraints, ExecutionProfile, partition
from partitioner.cost.call.call_cost import CallCost, call_costs
from partitioner.cost.call.collectives import collective_time, link_of_parts, message_time
from partitioner.cost.call.expert_parallel import Spread, in_pieces
from partitioner.cost.call.operators import Kernel
from partitioner.cost.call.roofline import kernels_time, memory_rate
from partitioner.cost.call.saved_activations import find_gathered_activations, kept_by
from partitioner.emit.buckets import bucket_limit
from partitioner.passes.ir.collectives import ops
from partitioner.passes.ir.model import Block
from partitioner.topology.hardware import Link
from tests.helpers.cost_devices import ACROSS, BF16, DEVICE, NVLINK, block
from tests.helpers.small_clusters import cluster

pytestmark = pytest.mark.usefixtures("without_baselines")

aten = torch.ops.aten
X = torch.empty(4, 256, 1024, dtype=BF16)  # a rank's part of a sequence of 2048 over tp=8
W = torch.empty(512, 1024, dtype=BF16)


def sequence_parallel() -> Block:
    """A sequence is gathered over ``tp`` for a column-parallel product."""

    def build(call, w: fx.Node, x: fx.Node) -> fx.Node:
        whole = call(ops.all_gather.default, call(aten.gelu.default, x), 1, "tp", 8, "reduce")
        return call(aten.linear.default, whole, w)

    return block(build, {"w": W}, {"x": X})


def cost_of(profile: ExecutionProfile):
    spread = Spread(tp=8, profile=profile)
    return call_costs(sequence_parallel(), DEVICE, {"tp": NVLINK}, spread=spread)


def test_what_is_gathered_again_is_kept_sharded():
    made = sequence_parallel()
    kept, again = kept_by(made).inside, kept_by(made, True, find_gathered_activations(made)).inside
    assert (kept, again) == (8 * X.nbytes, X.nbytes)
    assert cost_of(ExecutionProfile(regather=True)).saved_bytes == X.nbytes
    assert cost_of(ExecutionProfile(regather=True)).backward_comm_s > cost_of(ExecutionProfile()).backward_comm_s


def test_gathers_in_pieces_run_behind_products():
    whole, pieces = cost_of(ExecutionProfile()), cost_of(ExecutionProfile(overlap_tensor=True))
    assert pieces.forward_comm_s < whole.forward_comm_s
    assert pieces.forward_comm_s > whole.forward_comm_s / 8  # nothing hides the first piece
    assert in_pieces(0.0, 8.0, 8, 1.1) == pytest.approx(8.0)
    assert in_pieces(100.0, 8.0, 8, 1.1) == pytest.approx(1.0 + 0.1 * 7.0)


def test_states_that_are_gathered_one_by_one_start_more_often():
    both = block(
        lambda call, a, b, x: call(aten.linear.default, call(aten.linear.default, x, a), b),
        {"a": torch.empty(1024, 1024, dtype=BF16), "b": W},
        {"x": X},
    )
    spread = Spread(shards=ACROSS, profile=ExecutionProfile(overlap=False))
    together = call_costs(both, DEVICE, {}, spread=spread)
    one_by_one = ExecutionProfile(overlap=False, gather="parameter")
    apart = call_costs(both, DEVICE, {}, spread=replace(spread, profile=one_by_one))
    assert apart.forward_comm_s - together.forward_comm_s == pytest.approx(collective_time("all_gather", 0, ACROSS))
    # of both calls whose weights are there, and their gradients in float32, the larger one alone is whole at a time
    larger, gradients = 2 * 1024 * 1024, 2 * (2 * 1024 * 1024 + W.nbytes)
    assert apart.gathered_bytes == (2 * (larger + 2 * larger), 0, 0)
    # else all of a call's; what is sent comes in pieces, and gradients come as what is saved goes
    coming = max(2 * larger, gradients - together.saved_bytes)
    assert together.gathered_bytes == (gradients / 2 + coming, gradients / 2, gradients * (1 + 1 / ACROSS.size))
    assert call_costs(both, DEVICE, {}).gathered_bytes == (0, 0, 0)


def test_what_is_gathered_together_is_copied_apart():
    """As the runtime does: out of what was gathered forward and backward, and gradients into what is scattered."""
    weights = block(lambda call, w, x: call(aten.linear.default, x, w), {"w": W}, {"x": X})
    alone, shards = call_costs(weights, DEVICE, {}), Spread(shards=ACROSS)
    rate = memory_rate("pointwise", DEVICE)
    ahead, back = (DEVICE.launch * n + 2 * moved / rate for n, moved in ((1, W.nbytes), (2, 3 * W.nbytes)))
    together = call_costs(weights, DEVICE, {}, spread=shards)
    assert together.forward_s - alone.forward_s == pytest.approx(ahead)
    assert together.backward_s - alone.backward_s == pytest.approx(back)  # gradients are in float32
    assert together.weights_s > alone.weights_s
    apart = call_costs(weights, DEVICE, {}, spread=replace(shards, profile=ExecutionProfile(gather="parameter")))
    assert (apart.forward_s, apart.backward_s) == (alone.forward_s, alone.backward_s)


def test_short_gradients_are_scattered_as_they_are():
    weights = block(lambda call, w, x: call(aten.linear.default, x, w), {"w": W}, {"x": X})

    def cost(short: bool) -> CallCost:
        return call_costs(
            weights,
            DEVICE,
            {},
            spread=Spread(shards=ACROSS, profile=ExecutionProfile(overlap=False, short_gradients=short)),
        )

    long, short = cost(False), cost(True)
    assert long.forward_comm_s == short.forward_comm_s
    sent = [collective_time("reduce_scatter", n * W.nbytes, ACROSS) for n in (2, 1)]
    assert long.backward_comm_s - short.backward_comm_s == pytest.approx(sent[0] - sent[1])
    more = [a - b for a, b in zip(long.gathered_bytes, short.gathered_bytes, strict=True)]
    assert more == [W.nbytes, 0, (1 + 1 / ACROSS.size) * W.nbytes]


def test_attention_reaches_less_on_short_sequences():
    short, long = (Kernel("attention", 0.0, flops=1e12, smallest=keys, precision="bf16") for keys in (512, 16384))
    assert kernels_time([short], DEVICE) > 1.5 * kernels_time([long], DEVICE)
    assert kernels_time([long], DEVICE) == kernels_time([long._replace(smallest=1e6)], DEVICE)


def test_attention_reaches_less_where_heads_are_narrow():
    wide = Kernel("attention", 0.0, flops=1e12, smallest=8192.0, precision="bf16", width=128.0)
    narrow, half = (kernels_time([wide._replace(width=width)], DEVICE) for width in (64.0, 96.0))
    assert narrow > half > kernels_time([wide], DEVICE)
    assert narrow == kernels_time([wide._replace(width=32.0)], DEVICE)
    plain = DEVICE.model_copy(update={"attention_widths": ()})
    assert kernels_time([wide._replace(width=64.0)], plain) == kernels_time([wide], DEVICE)

    def attended(width: int) -> CallCost:  # as many FLOPs
        value = torch.empty(1, 8192 // width, 4096, width, dtype=BF16)
        attend = block(lambda call, x: call(aten.scaled_dot_product_attention.default, x, x, x), {}, {"x": value})
        return call_costs(attend, DEVICE, {})

    assert attended(64).flops == attended(128).flops
    for part in ("forward_s", "backward_s"):
        assert getattr(attended(64), part) > 1.3 * getattr(attended(128), part)


def test_buckets_grow_with_the_ranks_that_reduce_them():
    assert bucket_limit(2) == 25 * 2**20
    assert bucket_limit(512) == 1_024_000_000


def test_what_goes_in_parts_is_sent_once_and_gathered():
    between, nbytes = Link(name="nic", bandwidth=25e9, latency=19e-6, level=1), 64e6
    seconds = message_time(nbytes, link_of_parts(between, NVLINK.size, NVLINK))
    assert seconds == pytest.approx(message_time(nbytes / 8, between) + collective_time("all_gather", nbytes, NVLINK))
    assert seconds < message_time(nbytes, between) / 3
    assert seconds > message_time(nbytes, link_of_parts(between, NVLINK.size, None))  # which nothing beats


def test_stages_on_two_nodes_wait_less_for_parts():
    """Nothing else of the plan changes; what is sharded between stages needs no parts."""

    def plan(sends: str, sharded: bool):
        mesh = dict(pp=2, dp=1, tp=4, microbatch_size=1, schedule="1f1b", zero=0, recompute="none", execution="eager")
        pins, profile = Constraints(**mesh, sequence_parallel=sharded), ExecutionProfile(sends=sends)
        ask = dict(loss=torch.sum, constraints=pins, profile=profile, estimate_only=True)
        return partition(Scores(), cluster(2**20, nodes=2), (torch.zeros(4, 512, 16),), **ask)

    whole, parts = (plan(sends, False) for sends in ("whole", "parts"))
    assert {*parts.planned_only} - {*whole.planned_only} == {"sends=parts"}
    assert parts.estimate.step_time < whole.estimate.step_time
    assert parts.estimate.breakdown["compute"] == pytest.approx(whole.estimate.breakdown["compute"])
    sharded = {plan(sends, True).estimate.step_time for sends in ("whole", "parts")}
    assert len(sharded) == 1


class Scores(torch.nn.Module):
    """Attention that makes its scores, in four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            x = x + torch.softmax(y @ y.transpose(1, 2), -1) @ y
        return x


def test_scores_that_are_made_again_do_not_bound_memory():
    """A plan fits that would not fit with the scores."""

    def plan(recompute: str, memory: int) -> int:
        topology = cluster(memory / 2**20, devices=1)
        inputs = (torch.zeros(4, 512, 16),)
        found = partition(
            Scores(), topology, inputs, loss=torch.sum, constraints=Constraints(recompute=recompute, microbatch_size=4)
        )
        return max(found.estimate.memory)

    slim, whole = plan("selective", 2**40), plan("none", 2**40)
    assert slim < whole
    assert plan("selective", slim + 4096) == slim
