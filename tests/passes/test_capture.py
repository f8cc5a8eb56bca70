"""Capture: any module, untouched, becomes a flat functional graph with names that people know."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.passes.capture.capture import capture
from partitioner.passes.errors import CaptureError, InputsError, UnsupportedError
from tests.helpers.folding import assert_equal_to_model
from tests.helpers.models import CASES

pytestmark = pytest.mark.usefixtures("without_baselines")


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class InPlace(nn.Module):
    """In-place operators on values and views, a region without gradients, constants of every kind, nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.register_buffer("shift", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> dict[str, object]:
        x = F.relu(self.up(x), inplace=True)
        with torch.no_grad():
            total = (x * 2).sum()
        x = x * self.scale + torch.tensor([1.0, 2.0, 3.0, 5.0]) + self.shift
        x += total
        x[:, 0] = 3.0
        return {"x": self.down(x) + x.detach() * 2, "rest": [total, None, 3]}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.middle = nn.Linear(8, 8)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.middle(self.middle(self.embedding(tokens)))
        return self.head(x), tokens, self.embedding.weight


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Selecting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0]


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.lock = threading.Lock()


class Changing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1))


def test_in_place_operators_and_constants_are_exact():
    model = assert_equal_to_model(InPlace(), (numbers(3, 4),), lambda o: o["x"].sum())
    assert [o.path for o in model.outputs] == ["x", "rest.0", "rest.1", "rest.2"]
    assert [o.constant for o in model.outputs[2:]] == [None, 3]
    assert model.states["shift"].kind == "buffer"
    assert model.states["scale"].kind == "constant"
    assert torch.equal(model.constants["shift"], torch.arange(4.0, dtype=torch.float64))


def test_tied_weights_are_one_state():
    model = assert_equal_to_model(Tied(), (torch.arange(6).view(2, 3),), lambda o: o[0].pow(2).sum())
    assert model.states["embedding.weight"].aliases == ("head.weight",)
    assert "head.weight" not in model.states
    assert model.outputs[1].value == "0"  # an input that is returned as it is


def test_the_model_is_left_alone():
    case = CASES["llama"]
    model = case.build()
    model.config.use_cache = True
    before = {name: id(p) for name, p in model.named_parameters()}
    captured = capture(model, case.inputs(2))
    assert model.config.use_cache
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert not any(p.is_meta for p in model.parameters())
    assert any("use_cache" in note for note in captured.notes)
    assert [o.path for o in captured.outputs] == ["loss", "logits"]


def test_operators_know_where_they_come_from():
    captured = capture(CASES["llama"].build(), CASES["llama"].inputs(2))
    silu = next(n for n in captured.graph.nodes if "silu" in str(n.target))
    assert silu.meta["path"].startswith("model.layers.0.mlp")
    assert silu.meta["stack"][:2] == ("model", "model.layers.0")
    assert silu.meta["source"].partition(":")[0].endswith(".py")
    assert captured.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default) == []
    devices = {a for n in captured.graph.nodes for a in n.kwargs.values() if isinstance(a, torch.device)}
    assert devices <= {torch.device("meta")}


def test_distributions_do_not_look_at_numbers_while_they_are_traced():
    class Mixture(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            parts = torch.distributions.Normal(x, x.exp())
            return (
                -torch.distributions.MixtureSameFamily(torch.distributions.Categorical(logits=x), parts)
                .log_prob(x.mean(-1))
                .mean()
            )

    before = torch.distributions.Distribution._validate_args
    captured = capture(Mixture(), (torch.randn(2, 4),))
    assert captured.loss is not None
    assert torch.distributions.Distribution._validate_args == before


def test_meta_models_and_one_tensor_given_twice():
    with torch.device("meta"):
        model = Tied()
    ids = torch.empty(2, 3, dtype=torch.int64, device="meta")

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.inner(tokens)[0].flatten(0, 1), labels.flatten())

    captured = capture(Pair(), {"tokens": ids, "labels": ids})
    readers = {n.name: n.users for n in captured.graph.nodes if n.op == "placeholder"}
    assert all("embedding" in str(u.target) for u in readers["tokens"])
    assert not any("embedding" in str(u.target) for u in readers["labels"])


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp64", torch.float64)]
)
def test_precision_casts_parameters_and_inputs(precision: str, dtype: torch.dtype):
    captured = capture(CASES["skip-mlp"].build(), CASES["skip-mlp"].inputs(2), precision=precision)
    assert {s.spec.dtype for s in captured.states.values()} == {i.spec.dtype for i in captured.inputs} == {dtype}
    floating = {n.meta["val"].dtype for n in captured.graph.nodes if n.op == "call_function"}
    assert floating == {dtype}


def test_fp64_turns_casts_inside_the_model():
    captured = capture(CASES["llama"].build(), CASES["llama"].inputs(2), precision="fp64")
    dtypes = {n.meta["val"].dtype for n in captured.graph.nodes if n.op == "call_function"}
    assert {d for d in dtypes if d.is_floating_point} == {torch.float64}


def test_a_sample_is_enlarged_to_the_global_batch():
    captured = capture(CASES["bert"].build(), CASES["bert"].inputs(2), global_batch=64)
    assert {i.spec.shape for i in captured.inputs} == {(64, 16)}


def test_own_sample_of_a_model_and_labels_that_give_a_loss():
    captured = capture(CASES["t5"].build(), None, global_batch=8)
    assert {"input_ids", "labels"} <= {i.path for i in captured.inputs}
    assert captured.loss is not None
    assert capture(CASES["t5"].build(), None, objective="infer").loss is None
    assert [i.spec.shape for i in capture(CASES["vit"].build(), None).inputs] == [(2, 3, 16, 16), (2,)]


def test_exported_programs():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(2, 4)
    static = torch.export.export(model, (x,))
    assert [i.spec.shape for i in capture(static, None).inputs] == [(2, 4)]
    assert [i.spec.shape for i in capture(static, x).inputs] == [(2, 4)]  # a tensor is one input, not a tuple of rows
    with pytest.raises(InputsError, match=r"tuple \(positional\) or a dict.*got str"):
        capture(static, "text")
    assert {s.spec.dtype for s in capture(static, None, precision="bf16").states.values()} == {torch.bfloat16}
    with pytest.raises(InputsError, match=r"shape \(2, 4\); got \(6, 4\)"):
        capture(static, None, global_batch=6)
    dynamic = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    captured = capture(dynamic, None, global_batch=6)
    assert [i.spec.shape for i in captured.inputs] == [(6, 4)]
    assert [n.meta["path"] for n in captured.graph.nodes if n.op == "call_function"] == ["0", "1", "2"]
    assert list(captured.states) == ["0.weight", "0.bias", "2.weight", "2.bias"]


LINEAR, X = nn.Linear(4, 4), torch.randn(2, 4)


class Differentiating(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        made = super().forward(input).tanh().sum()
        made.backward()
        return made


class Counting(nn.Module):
    """Has a layer that asks for a gradient, and a buffer that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Differentiating(4, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.layer(input)


class WritingData(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        made = super().forward(input)
        made.data.clamp_(0)
        return made.sum()


ERRORS = [
    ("no inputs", LINEAR, None, {}, InputsError, r"pass inputs=.*forward takes \(input\)"),
    ("too many", LINEAR, (X, X), {}, InputsError, r"too many positional arguments.*2 positional"),
    ("wrong name", LINEAR, {"y": X}, {}, InputsError, r"missing a required argument: 'input'.*\(y\)"),
    ("not inputs", LINEAR, "text", {}, InputsError, r"tuple \(positional\) or a dict.*got str"),
    ("wrong shape", LINEAR, (torch.randn(2, 5),), {}, InputsError, r"fails on these inputs.*\n.*0: \(2, 5\)"),
    ("no batch", nn.Tanh(), (torch.tensor(1.0),), {"global_batch": 4}, InputsError, "no input has a batch dim"),
    ("precision", LINEAR, (X,), {"precision": "int8"}, InputsError, "one of bf16, fp16, fp32, fp64"),
    ("vector loss", LINEAR, (X,), {"loss": lambda o: o}, InputsError, r"shape \(2, 4\).*floating-point scalar"),
    ("branch", Branching(), (X,), {}, CaptureError, r"test_capture.py:\d+ \(return x if x.sum.*\n.*data-dependent"),
    ("lock", Locked(), (X,), {}, CaptureError, "cannot be copied.*lock"),
    ("selection", Selecting(), (X,), {}, UnsupportedError, r"index.Tensor \(the model, .*depends on data"),
    ("gradient", Differentiating(4, 1), (X,), {}, UnsupportedError, r"calls backward\(\).*torch.autograd.grad"),
    (
        "gradient below",
        nn.Sequential(LINEAR, Differentiating(4, 1)),
        (X,),
        {},
        UnsupportedError,
        r"calls backward\(\).*torch.autograd.grad",
    ),
    ("gradient beside a buffer", Counting(), (X,), {}, UnsupportedError, r"calls backward\(\).*torch.autograd.grad"),
    ("written data", WritingData(4, 1), (X,), {}, UnsupportedError, r"without autograd's knowledge.*clamp_"),
    ("argument", Changing(4, 4), (X,), {}, UnsupportedError, "changes its argument 'x' in place"),
]


@pytest.mark.parametrize("case", ERRORS, ids=[e[0] for e in ERRORS])
def test_errors_say_what_to_do(case, capfd):
    _, model, inputs, options, error, message = case
    with pytest.raises(error, match=f"(?s){message}"):
        capture(model, inputs, **options)
    assert capfd.readouterr() == ("", "")


class PartlyRead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.spare, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x).sum()


def test_a_note_names_trained_parameters_that_forward_does_not_read() -> None:
    note = "forward does not read 2 of the trained parameters, which get no gradient: spare.weight, spare.bias"
    assert capture(PartlyRead(), torch.ones(2, 4)).notes == (note,)
    assert capture(PartlyRead(), torch.ones(2, 4), objective="infer").notes == ()
    assert capture(Tied(), torch.zeros(2, 4, dtype=torch.int64)).notes == ()
