"""Associative scans: traced as few operators on whole tensors, which compute what a loop over positions computes."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import JambaConfig, JambaForCausalLM, MambaConfig, MambaForCausalLM

from partitioner import Constraints, Topology, partition
from partitioner.passes.capture import capture as capture_module
from partitioner.passes.capture.capture import capture
from partitioner.passes.errors import UnrolledLoopWarning
from partitioner.passes.ir.interpret import run_graph
from partitioner.passes.normalize.pipeline import normalize

pytestmark = pytest.mark.usefixtures("without_baselines")

scans = importlib.import_module("torch._higher_order_ops.associative_scan")


class Decay(nn.Module):
    """The recurrence ``h[t] = a[t] * h[t - 1] + x[t]`` along ``dim``, or from the end with ``reverse``."""

    def __init__(self, dim: int, reverse: bool) -> None:
        super().__init__()
        self.dim, self.reverse = dim, reverse

    def forward(self, a: Tensor, x: Tensor) -> Tensor:
        def combine(left: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"a": left["a"] * right["a"], "x": right["a"] * left["x"] + right["x"]}

        found = scans.associative_scan(
            combine, {"a": a, "x": x}, self.dim, reverse=self.reverse, combine_mode="generic"
        )
        result: Tensor = found["x"]
        return result

    def loop(self, a: Tensor, x: Tensor) -> Tensor:
        dim, made, state = self.dim, [], torch.zeros_like(x.select(self.dim, 0))
        positions = range(x.shape[dim])
        for t in reversed(positions) if self.reverse else positions:
            state = a.select(dim, t) * state + x.select(dim, t)
            made.append(state)
        return torch.stack(made[::-1] if self.reverse else made, dim)


@given(st.integers(1, 21), st.sampled_from([0, 1, -1]), st.booleans())
def test_a_scan_computes_the_recurrence(length: int, dim: int, reverse: bool) -> None:
    shape = [2, 3]
    shape.insert(dim if dim >= 0 else 2, length)
    torch.manual_seed(length)
    a, x = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    model = Decay(dim, reverse)
    graph = normalize(capture(model, (a.detach(), x.detach()))).graph
    found, expected = run_graph(graph, [a, x]), model.loop(a, x)
    (result,) = found if isinstance(found, tuple | list) else (found,)
    several = []
    for value in (result, expected):
        gradients = torch.autograd.grad(value.cos().sum(), [a, x], allow_unused=True, materialize_grads=True)
        several.append([value, *gradients])
    torch.testing.assert_close(*several, rtol=1e-12, atol=1e-12)


def make_mamba() -> nn.Module:
    return MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=2, state_size=4))


def make_jamba() -> nn.Module:
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "mamba_d_state": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    return JambaForCausalLM(JambaConfig(**sizes, **heads, **experts))


@pytest.mark.parametrize("build", [make_mamba, make_jamba])
def test_state_space_models_equal_their_loops(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, tokens = build(), torch.randint(16, (4, 11))
    inputs = {"input_ids": tokens, "labels": tokens}
    plan = partition(model, Topology.local(4), inputs, constraints=Constraints(dp=2, tp=2))
    check = plan.verify(model, inputs)
    assert check.ok, check


def test_a_graph_grows_with_the_logarithm_of_the_length() -> None:
    sizes = []
    for length in (64, 128, 256):
        tokens = torch.zeros(2, length, dtype=torch.int64)
        sizes.append(len(capture(make_mamba(), {"input_ids": tokens, "labels": tokens}).graph.nodes))
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] < 60


class Cell(nn.Module):
    """A recurrence that is a Python loop over time steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, state = self.linear(x), torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = 0.5 * state + x[:, step]
        return state.square().mean()


def test_a_loop_over_many_steps_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "_MANY_OPERATORS", 50)
    told = r"a Python loop of forward is unrolled: .*test_scans\.py:\d+ becomes 50 operators aten\.\w+"
    with pytest.warns(UnrolledLoopWarning, match=told):
        capture(Cell(), (torch.randn(2, 50, 4),))
    capture(Cell(), (torch.randn(2, 49, 4),))  # a warning would be an error
