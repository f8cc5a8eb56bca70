"""Numbers that forward asks for: told where no input decides them, refused where one does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, Topology, partition
from partitioner.passes.capture.capture import capture
from partitioner.passes.errors import CaptureError, UnsupportedError

pytestmark = pytest.mark.usefixtures("without_baselines")

DIM, LENGTH = 8, 5


def causal(length: int = LENGTH) -> Tensor:
    return torch.full((length, length), -torch.inf).triu(1)


class Translation(nn.Module):
    """torch's own encoder-decoder, which looks whether the mask that it is given is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(DIM, 2, 1, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = self.net.generate_square_subsequent_mask(target.size(1))
        return self.net(source, target, tgt_mask=mask).square().mean()


class Encoder(nn.Module):
    """A mask that ``mask`` makes of the module, given to torch's encoder."""

    def __init__(self, mask: Callable[[Encoder, Tensor], Tensor]) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True)
        self.net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.mask = mask
        self.register_buffer("kept", causal())
        self.attribute = causal()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x, mask=self.mask(self, x)).square().mean()


def written(module: Encoder, x: Tensor) -> Tensor:
    """Causal but for one place, which is written through a view after it was looked at."""
    mask = causal()
    rows = mask.t()
    assert not bool(rows.sum() == 0)
    rows[4, 0] = 0.0
    return mask


MASKS = {
    "made": (lambda module, x: causal(x.size(1)), True),
    "buffer": (lambda module, x: module.kept, True),
    "attribute": (lambda module, x: module.attribute, True),
    "written": (written, False),
}


def samples(seed: int) -> Tensor:
    return torch.randn(4, LENGTH, DIM, generator=torch.Generator().manual_seed(seed))


def is_causal(model: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    nodes = capture(model, inputs).graph.nodes
    calls = [n for n in nodes if n.target is torch.ops.aten.scaled_dot_product_attention.default]
    assert calls
    return all(len(n.args) > 5 and n.args[5] is True for n in calls)


@pytest.mark.parametrize("name", MASKS)
def test_torch_is_told_whether_a_mask_of_the_model_is_causal(name: str):
    mask, expected = MASKS[name]
    model, inputs = Encoder(mask), (samples(0),)
    assert is_causal(model, inputs) == expected
    plan = partition(model, Topology.local(2), inputs, constraints=Constraints(tp=2, pp=1, dp=1))
    assert plan.verify(model, inputs).ok
    assert any("kept" in note for note in plan.notes) == (name == "buffer")


def test_torchs_transformer_is_planned_without_a_word_about_its_mask():
    model, inputs = Translation(), (samples(0), samples(1))
    plan = partition(model, Topology.local(4), inputs, constraints=Constraints(tp=2, pp=2, dp=1))
    assert plan.verify(model, inputs).ok


class Given(nn.Module):
    """Torch's encoder with a mask that is an input."""

    def __init__(self, causal: bool | None) -> None:
        super().__init__()
        self.net, self.causal = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True), causal
        self.net = nn.TransformerEncoder(self.net, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.net(x, mask=mask, is_causal=self.causal).square().mean()


def test_what_to_say_of_a_mask_that_is_an_input():
    inputs = (samples(0), causal())
    with pytest.raises(CaptureError, match=r"say so \(is_causal="):
        capture(Given(None), inputs)
    model = Given(False)
    assert partition(model, Topology.local(2), inputs, constraints=Constraints(tp=2)).verify(model, inputs).ok


class Asking(nn.Module):
    """Forward's way depends on what ``asks`` finds."""

    def __init__(self, asks: Callable[[Asking, Tensor], bool]) -> None:
        super().__init__()
        self.linear, self.asks = nn.Linear(DIM, DIM), asks
        self.register_buffer("started", torch.tensor(0))
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return (x * 2 if self.asks(self, x) else x).square().mean()


def changed_before(module: Asking, x: Tensor) -> bool:
    module.scale.mul_(2)
    return bool(module.scale.sum() > 9)


def starts(module: Asking, x: Tensor) -> bool:
    if module.started == 0:
        module.started.fill_(1)
        return True
    return False


@pytest.mark.parametrize(
    "asks",
    [
        lambda module, x: x.sum() > 0,
        lambda module, x: module.linear.bias.sum() > 0,
    ],
    ids=["input", "parameter"],
)
def test_what_more_than_the_model_decides_is_refused(asks: Callable[[Asking, Tensor], bool]):
    with pytest.raises(CaptureError, match="must not depend on tensors' numbers"):
        capture(Asking(asks), (samples(0),))


def test_a_draw_that_decides_is_refused():
    with pytest.raises(CaptureError, match=r"A random number \(aten.rand.default\) decides here what forward computes"):
        capture(Asking(lambda module, x: torch.rand(()) > 0.5), (samples(0),))


@pytest.mark.parametrize("asks", [starts, changed_before])
def test_a_way_that_another_step_would_not_take_is_refused(asks: Callable[[Asking, Tensor], bool]):
    model = Asking(asks)
    with pytest.raises(UnsupportedError, match="a buffer that it changes"):
        capture(model, (samples(0),))
    assert model.started.item() == 0
    assert model.scale.tolist() == [2.0, 3.0]


def test_no_numbers_no_answer():
    with torch.device("meta"):
        model = Asking(lambda module, x: module.started == 0)
    with pytest.raises(CaptureError, match="must not depend on tensors' numbers"):
        capture(model, (samples(0).to("meta"),))


def test_what_has_started_is_planned():
    model, inputs = Asking(starts), (samples(0),)
    model.started.fill_(1)
    captured = capture(model, inputs)
    assert not captured.updates
    assert captured.notes == ("forward decides by the numbers of started: the plan is for those that it has now",)


@pytest.mark.parametrize("asked", [lambda s: s.sum().item(), lambda s: int(s[0]) + 3, lambda s: max(s.tolist()) + 2])
def test_numbers_are_told(asked: Callable[[Tensor], float]):
    assert capture(Asking(lambda module, x: asked(module.scale) == 5), (samples(0),)).notes


class Gated(nn.Module):
    def __init__(self, gate: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("gate", torch.tensor(gate))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu() if self.gate else x - self.linear(x)


def test_layers_that_go_different_ways_are_not_alike():
    model, inputs = nn.Sequential(*(Gated(gate) for gate in (True, True, False, True))), (samples(0),)
    plan = partition(model, Topology.local(2), inputs, loss=torch.mean, constraints=Constraints(tp=2))
    assert plan.verify(model, inputs, torch.mean).ok
