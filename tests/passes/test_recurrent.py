"""Recurrent layers: one operator for each layer and direction, which computes what torch's module computes."""

from __future__ import annotations

import operator
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from partitioner import Constraints, Topology, partition, run_local
from partitioner.passes.capture.capture import capture
from partitioner.passes.errors import InputsError, UnsupportedError
from partitioner.passes.ir.interpret import run_graph
from partitioner.passes.normalize.pipeline import normalize
from partitioner.plans.reference import run_reference
from tests.helpers.reference_match import close

pytestmark = pytest.mark.usefixtures("without_baselines")

KINDS = {
    "lstm": (nn.LSTM, {}),
    "projected": (nn.LSTM, {"proj_size": 3}),
    "gru": (nn.GRU, {}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}


def make_network(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    build, more = KINDS[kind]
    return build(4, 6, **more, **options).double()


def list_layer_operators(network: Any, x: Tensor) -> list[str]:
    """Return the names of the operators of layers in the traced graph of ``network``, which is not in normal form."""
    graph = capture(network, (x,)).graph
    return [n.target.__name__ for n in graph.nodes if "_layer" in str(n.target) and n.target is not operator.getitem]


@settings(max_examples=30)
@given(
    st.sampled_from(sorted(KINDS)),
    st.fixed_dictionaries(
        {
            "num_layers": st.sampled_from([1, 2]),
            "bias": st.booleans(),
            "batch_first": st.booleans(),
            "bidirectional": st.booleans(),
        }
    ),
    st.booleans(),
)
def test_a_network_of_layers_is_that_of_torch(kind: str, options: dict[str, Any], stated: bool) -> None:
    """Outputs, last states and all gradients in float64, with and without initial states."""
    network = make_network(kind, **options)
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    batch, ways = 3 if options["batch_first"] else 5, 1 + options["bidirectional"]
    sizes = [(3 if kind == "projected" else 6)] + [6] * (KINDS[kind][0] is nn.LSTM)
    first = [torch.randn(options["num_layers"] * ways, batch, size, dtype=torch.float64) for size in sizes]
    state = () if not stated else (tuple(first),) if len(first) > 1 else (first[0],)
    captured = normalize(capture(network, (x, *state)))

    given_inputs = [x, *(first if stated else [])]
    for value in given_inputs:
        value.requires_grad_()
    states, rest = dict(network.named_parameters()) | captured.constants, iter(given_inputs)
    values = [
        states[name] if (name := captured.placeholders[n.name]) in states else next(rest)
        for n in captured.graph.nodes
        if n.op == "placeholder"
    ]
    output, last = network(x, *state)
    expected = [output, *(last if isinstance(last, tuple) else (last,))]
    found = run_graph(captured.graph, values)
    sought = [*given_inputs, *network.parameters()]
    assert len(found) == len(expected)
    gradients = [torch.autograd.grad(sum(r.cos().sum() for r in results), sought) for results in (found, expected)]
    torch.testing.assert_close([*found, *gradients[0]], [*expected, *gradients[1]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "name"), [("lstm", "lstm_layer"), ("gru", "recurrent_layer")])
def test_the_number_of_operators_does_not_depend_on_the_steps(kind: str, name: str) -> None:
    network = make_network(kind, num_layers=2, bidirectional=True)
    for steps in (3, 300):
        assert list_layer_operators(network, torch.randn(steps, 2, 4).double()) == [f"{name}.default"] * 4


def test_layers_of_an_exported_program_are_operators_in_normal_form() -> None:
    x = torch.randn(3, 2, 4).double()
    network = make_network("gru")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(network, (x,), strict=False)
    assert list_layer_operators(exported, x) == []
    targets = [str(n.target) for n in normalize(capture(exported, (x,))).graph.nodes]
    assert targets.count("partition.recurrent_layer.default") == 1


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(4, 6, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.layers(packed)[1][0].square().mean()


def test_packed_sequences_are_refused_with_advice() -> None:
    told = r"forward packs sequences \(.*test_recurrent\.py:\d+\); expected padded ones.*leave pack_padded_sequence out"
    with pytest.raises(UnsupportedError, match=told):
        capture(Packing(), (torch.randn(2, 3, 4), torch.tensor([3, 2])))
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 3, 4), torch.tensor([3, 2]), batch_first=True)
    with pytest.raises(InputsError, match="packed sequence; expected the padded one"):
        capture(make_network("gru"), (packed,))


class Tagger(nn.Module):
    """Embeddings, recurrent layers with dropout between them, and a class for each token."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        build, more = KINDS[kind]
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(6 if kind == "projected" else 12, 5)
        self.layers = build(8, 6, num_layers=2, dropout=0.3, batch_first=True, bidirectional=True, **more)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        output, _ = self.layers(self.embedding(tokens))
        return nn.functional.cross_entropy(self.head(output).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(
    "mesh", [{"dp": 2, "pp": 1, "tp": 1}, {"pp": 2, "tp": 1, "dp": 1}, {"tp": 2, "pp": 1, "dp": 1}], ids=str
)
def test_layers_on_ranks(kind: str, mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = Tagger(kind)
    inputs = {"tokens": torch.randint(11, (4, 7)), "labels": torch.randint(5, (4, 7))}
    plan = partition(model, Topology.local(2), inputs, constraints=Constraints(**mesh, microbatch_size=2))
    check = plan.verify(model, inputs)
    assert check.ok, check


def test_layers_on_processes() -> None:
    """Two Gloo ranks, ZeRO-3, in float64, against one process."""
    torch.manual_seed(0)
    model = Tagger("lstm").double().eval()
    inputs = {"tokens": torch.randint(11, (4, 7)), "labels": torch.randint(5, (4, 7))}
    plan = partition(model, Topology.local(2), inputs, constraints=Constraints(dp=2, pp=1, tp=1, zero=3))
    close(plan, run_local(plan, model, inputs), run_reference(model, inputs))
