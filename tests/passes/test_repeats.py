"""Layers that are alike are traced once; the result is what the full trace gives, and what differs is told apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from partitioner.passes.capture import tracing
from partitioner.passes.errors import UnsupportedError
from partitioner.passes.ir.model import FoldedModel
from partitioner.passes.trace.layer_equality import describe_module_state, find_equal_layers
from partitioner.passes.trace.layer_reuse import Journal, LayerRepeats
from tests.helpers.folding import folded
from tests.helpers.models import CASES, Case, float64


def described(model: FoldedModel) -> dict[str, Any]:
    """All of a folded model, for comparison."""
    return {
        "blocks": {name: (b.states, b.inputs, _rows(b.graph)) for name, b in model.blocks.items()},
        "calls": model.calls,
        "states": model.states,
        "inputs": model.inputs,
        "outputs": model.outputs,
        "loss": model.loss,
        "values": model.values,
        "constants": sorted(model.constants),
        "tree": model.tree,
        "notes": model.notes,
    }


def _rows(graph: fx.Graph) -> list[Any]:
    return [(n.format_node(), _spec(n.meta.get("val")), n.meta.get("path"), n.meta.get("source")) for n in graph.nodes]


def _spec(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return [_spec(v) for v in value] if isinstance(value, tuple | list) else value


class Traces:
    """Counts what ``capture`` does: how often it exports, and how many layers the shortcut leaves out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exports, self.shortened = 0, 0
        export, expand = tracing.export_parameterless_copy, tracing.expand_layer_operators

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.exports += 1
            return export(*args, **kwargs)

        def shortened(captured: Any, *away: Any) -> Any:
            self.shortened = sum("partition.layer" in str(n.target) and not n.args[1] for n in captured.graph.nodes)
            return expand(captured, *away)

        monkeypatch.setattr(tracing, "export_parameterless_copy", counted)
        monkeypatch.setattr(tracing, "expand_layer_operators", shortened)


def both(monkeypatch: pytest.MonkeyPatch, model: nn.Module, inputs: Any, **options: Any) -> tuple[FoldedModel, Traces]:
    """The folded model, which must be that of the full trace."""
    with monkeypatch.context() as patch:
        traces = Traces(patch)
        short = folded(model, inputs, **options)
    with monkeypatch.context() as patch:
        patch.setattr(LayerRepeats, "find", classmethod(lambda cls, model: cls([])))
        full = folded(model, inputs, **options)
    expected = described(full)
    for part, found in described(short).items():
        assert found == expected[part], part
    return short, traces


# What the configurations call the number of layers.
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")


def deeper(case: Case, layers: int) -> nn.Module:
    """A case's model with more layers in each of its stacks."""
    import transformers

    small = case.build()
    config = getattr(small, "config", None)
    if config is None:
        return small
    kept = {k: v for k, v in config.to_dict().items() if k not in ("layer_types", "architectures", "dtype")}
    options = {**kept, **{name: layers for name in _DEPTHS if name in kept}}
    torch.manual_seed(0)
    made = type(config)(**options)
    auto: Any = getattr(transformers, type(small).__name__)
    return auto(made).eval()


# as another case, but for which weights are tied; T5's is traced in another precision with the usual tests
TIED_OTHERWISE = [name for name in CASES if name.endswith(("-tied", "-untied"))]
CAST = ("gemma2", "t5-untied")  # families that are traced in another precision as well, besides the long tests


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(pytest.param(name, None, marks=pytest.mark.slow if name in TIED_OTHERWISE else ()) for name in CASES),
        *(pytest.param(name, "bf16", marks=() if name in CAST else pytest.mark.slow) for name in CASES),
    ],
)
def test_families_are_traced_alike(name: str, precision: str | None, monkeypatch: pytest.MonkeyPatch):
    case = CASES[name]
    both(monkeypatch, case.build(), case.inputs(4), loss=case.loss, precision=precision)


SHORTENED = {"llama": 5, "qwen3": 5, "mistral": 5, "gpt2": 5, "opt": 5, "bloom": 5, "bert": 5, "vit": 5, "bart": 10}
SHORTENED |= {"roberta": 5, "t5": 8, "gemma2": 2}


# Models that set an attribute at their first call: a second trace shows that the next call computes what the first did.
SET_AT_FIRST_CALL = {"vit"}


ALIKE = {"mistral", "qwen3", "roberta"}  # layers like those of llama or of bert


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in SHORTENED])
def test_deeper_families_are_shortened(name: str, monkeypatch: pytest.MonkeyPatch):
    case = CASES[name]
    layers = 8 if name == "gemma2" else 7
    _, traces = both(monkeypatch, deeper(case, layers), case.inputs(4), loss=case.loss)
    assert traces.exports == 1 + (name in SET_AT_FIRST_CALL)
    assert traces.shortened >= SHORTENED[name], traces.shortened


# --- models that are almost regular -----------------------------------------------------------------------------------


class Layer(nn.Module):
    """A residual layer; ``extra`` is what a case adds to it, called with the layer and its value."""

    def __init__(self, index: int = 0, extra: Callable[[Layer, Tensor], Tensor] | None = None, **attributes: Any):
        super().__init__()
        self.index, self.extra = index, extra
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x if self.extra is None else self.extra(self, x)


def chain(model: nn.Module, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


class Stack(nn.Module):
    """``num`` layers; ``run`` says how they are called."""

    def __init__(
        self,
        make: Callable[[int], nn.Module],
        run: Callable[[Any, Tensor], Any] = chain,
        num: int = 8,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(i) for i in range(num))
        self.head = nn.Linear(8, 4)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        made = self.run(self, x)
        return self.head(made).sum() if isinstance(made, Tensor) else made


def scaled(layer: Any, x: Tensor) -> Tensor:
    return x * layer.scale


def by_index(layer: Any, x: Tensor) -> Tensor:
    return x * (layer.index + 1)


def odd_fifth(layer: Any, x: Tensor) -> Tensor:
    return x * 2 if layer.index == 5 else x


def by_type_of_index(layer: Any, x: Tensor) -> Tensor:
    return x * 2 if isinstance(layer.index, int) else x


def swallowed(layer: Any, x: Tensor) -> Tensor:
    try:
        return x * layer.index
    except Exception:
        return x


def remembered(layer: Any, x: Tensor) -> Tensor:
    layer.last = x
    return x


def counted(layer: Any, x: Tensor) -> Tensor:
    layer.shared["calls"] += 1
    return x * layer.shared["calls"]


def in_place(layer: Any, x: Tensor) -> Tensor:
    return x.add_(1)


def u_net(model: Any, x: Tensor) -> Tensor:
    made = []
    for i, layer in enumerate(model.layers):
        x = layer(x if i < 4 else x + made[7 - i])
        made.append(x)
    return x


def exits(model: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x)
        if i == 5:
            return x
    return x


def collected(model: Any, x: Tensor) -> Any:
    states = [x]
    for layer in model.layers:
        states.append(layer(states[-1]))
    return {"loss": model.head(states[-1]).sum(), "states": states}


def twice(model: Any, x: Tensor) -> Tensor:
    return chain(model, chain(model, x))


def out_of_order(model: Any, x: Tensor) -> Tensor:
    for i in (3, 1, 7, 5, 0, 2):
        x = model.layers[i](x)
    return x


def with_weights(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x) + layer.up.bias.sum()
    return x


def with_different_arguments(model: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x, None if i % 2 else x, i // 6)
    return x


def without_gradient(model: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        with torch.set_grad_enabled(i % 2 == 0):
            x = layer(x)
    return x


def last_of_each(model: Any, x: Tensor) -> Tensor:
    x = chain(model, x)
    return x + sum(layer.last for layer in model.layers)


def changed_between(model: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        layer.scale = 1.0 if i < 4 else 3.0
        x = layer(x)
    return x


def eps(i: int) -> nn.Module:
    layer = Layer(i)
    layer.norm.eps = 1e-5 * (i + 1)
    return layer


def hooked(i: int) -> nn.Module:
    layer = Layer(i)
    if i == 6:
        layer.up.register_forward_hook(lambda module, args, output: output * 2)
    return layer


def dropping(i: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1 * i), nn.Linear(8, 8)).train()


def frozen(i: int) -> nn.Module:
    layer = Layer(i)
    layer.up.weight.requires_grad_(i % 2 == 0)
    return layer


def tied(model: Stack) -> Stack:
    for layer in model.layers:
        layer.down.weight = model.layers[0].down.weight
    return model


def tied_pairs(model: Stack) -> Stack:
    for i, layer in enumerate(model.layers):
        layer.down.weight = model.layers[i - i % 2].down.weight
    return model


def reused(model: Stack) -> Stack:
    model.layers = nn.ModuleList([model.layers[i // 2] for i in range(8)])
    return model


# name -> (the model, whether some layer is left out)
def with_penalty(model: Any, x: Tensor) -> Tensor:
    return chain(model, x) + sum(p.square().sum() for p in model.parameters())


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "plain": (lambda: Stack(Layer), True),
    "index in forward": (lambda: Stack(lambda i: Layer(i, by_index)), False),
    "index in one layer": (lambda: Stack(lambda i: Layer(i, odd_fifth)), False),
    "type of the index": (lambda: Stack(lambda i: Layer(i, by_type_of_index)), False),
    "error swallowed": (lambda: Stack(lambda i: Layer(i, swallowed)), False),
    "scale": (lambda: Stack(lambda i: Layer(i, scaled, scale=1.0 + i)), False),
    "equal scale": (lambda: Stack(lambda i: Layer(i, scaled, scale=2.0)), True),
    "whole scale": (lambda: Stack(lambda i: Layer(i, scaled, scale=1 + i // 4)), True),
    "epsilon": (lambda: Stack(eps), False),
    "dropout": (lambda: Stack(dropping), False),
    "hook": (lambda: Stack(hooked), True),
    "frozen": (lambda: Stack(frozen), True),
    "alternating": (lambda: Stack(lambda i: Layer(i, scaled if i % 2 else None, scale=2.0), num=12), True),
    "in place": (lambda: Stack(lambda i: Layer(i, in_place)), True),
    "skips": (lambda: Stack(Layer, u_net), True),
    "early exit": (lambda: Stack(Layer, exits), True),
    "collected": (lambda: Stack(Layer, collected), True),
    "twice": (lambda: Stack(Layer, twice), True),
    "out of order": (lambda: Stack(Layer, out_of_order), True),
    "weights read outside": (lambda: Stack(Layer, with_weights), True),
    "penalty": (lambda: Stack(Layer, with_penalty), True),
    "arguments": (lambda: Stack(Layer, with_different_arguments, 12), True),
    "no gradient": (lambda: Stack(Layer, without_gradient), True),
    "tied": (lambda: tied(Stack(Layer)), True),
    "tied in pairs": (lambda: tied_pairs(Stack(Layer)), True),
    "reused": (lambda: reused(Stack(Layer)), False),
    "remembered": (lambda: Stack(lambda i: Layer(i, remembered), last_of_each), False),
    "nested": (lambda: Stack(lambda i: nn.Sequential(*(Layer(j) for j in range(5)))), True),
}


# Traced once more with all weights: layers are called in another order, or not all alike, or read elsewhere.
NEED_WEIGHTS = {"penalty", "twice", "out of order", "arguments", "weights read outside", "no gradient"}


@pytest.mark.parametrize("name", MODELS)
def test_almost_regular_models_are_exact(name: str, monkeypatch: pytest.MonkeyPatch):
    build, shortened = MODELS[name]
    _, traces = both(monkeypatch, build(), (torch.ones(4, 8),))
    exports = 2 if name in NEED_WEIGHTS else 1
    assert (traces.shortened > 0 and traces.exports == exports) == shortened


def test_attributes_changed_between_calls(monkeypatch: pytest.MonkeyPatch):
    both(monkeypatch, Stack(lambda i: Layer(i, scaled, scale=1.0), changed_between), (torch.ones(4, 8),))


def test_counters_are_seen(monkeypatch: pytest.MonkeyPatch):
    """Layers that count in one dictionary are not taken for one another; what they count is state, and refused."""
    shared = {"calls": 0}
    with pytest.raises(UnsupportedError, match=r"'shared' of the module 'layers\.0'"):
        both(monkeypatch, Stack(lambda i: Layer(i, counted, shared=shared)), (torch.ones(4, 8),))
    assert shared == {"calls": 0}


def test_counters_and_indices(monkeypatch: pytest.MonkeyPatch):
    """A trace that is given up leaves nothing behind."""

    def extra(layer: Any, x: Tensor) -> Tensor:
        return counted(layer, x) if layer.index == 0 else x * layer.shared["calls"]

    with pytest.raises(UnsupportedError, match=r"'shared' of the module 'layers\.0'"):
        both(monkeypatch, Stack(lambda i: Layer(i, extra, shared={"calls": 0})), (torch.ones(4, 8),))


def test_gpt2_scaled_by_its_index(monkeypatch: pytest.MonkeyPatch):
    case = CASES["gpt2"]
    model = case.build()
    for block in model.transformer.h:
        block.attn.scale_attn_by_inverse_layer_idx = True
    both(monkeypatch, model, case.inputs(2))


def test_the_model_is_left_alone_on_an_interrupt(monkeypatch: pytest.MonkeyPatch):
    model = Stack(Layer)
    before = [(vars(m).copy(), list(m.named_parameters())) for m in model.modules()]
    monkeypatch.setattr(tracing, "expand_layer_operators", lambda *captured: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        folded(model, (torch.ones(4, 8),))
    assert [(vars(m), list(m.named_parameters())) for m in model.modules()] == before


def test_one_call_is_traced_and_one_runs_beside_the_trace(monkeypatch: pytest.MonkeyPatch):
    traced = SimpleQueue[bool]()  # a list would be given back as it was

    def watched(layer: Any, x: Tensor) -> Tensor:
        traced.put(get_proxy_mode() is not None)
        return x * 2

    both_ways = Stack(lambda i: Layer(i, watched), num=6)
    with monkeypatch.context() as patch:
        traces = Traces(patch)
        folded(both_ways, (torch.ones(4, 8),))
    assert [traced.get() for _ in range(traced.qsize())] == [
        True,
        True,
        False,
    ]  # the first is of another kind: its input takes no gradient
    assert traces.exports == 1


def test_layers_are_shortened_where_the_user_has_entered_a_function_mode(monkeypatch: pytest.MonkeyPatch):
    """The call that runs beside the trace is under the mode, too, so that it equals the traced one."""
    with float64():
        case = CASES["llama"]
        short, traces = both(monkeypatch, case.build().double(), case.inputs(2))
    assert traces.exports == 1
    assert traces.shortened > 0
    assert all(
        v.dtype != torch.float32
        for block in short.blocks.values()
        for v in map(_value, block.graph.nodes)
        if v is not None
    )


def _value(node: fx.Node) -> Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def test_what_only_a_trace_allows_is_traced_in_full(monkeypatch: pytest.MonkeyPatch):
    def tracing_only(layer: Any, x: Tensor) -> Tensor:
        if get_proxy_mode() is None:
            raise RuntimeError("not traced")
        return x * 2

    _, traces = both(monkeypatch, Stack(lambda i: Layer(i, tracing_only), num=6), (torch.ones(4, 8),))
    assert traces.exports == 2


def test_journals_tell_operands_numbers_and_calls_apart():
    x, y = torch.ones(2), torch.ones(2)

    def journal(call: Callable[[Tensor, Tensor], Any]) -> Any:
        kept = Journal([x, y])
        with kept:
            call(x, y)
        return kept.entries

    def told_apart(one: Callable[[Tensor, Tensor], Any], other: Callable[[Tensor, Tensor], Any]) -> bool:
        assert journal(one) == journal(one)
        return bool(journal(one) != journal(other))

    assert told_apart(lambda a, b: a - b, lambda a, b: b - a)
    assert told_apart(lambda a, b: a * 2, lambda a, b: a * 2.0)
    assert told_apart(lambda a, b: (a * 2) + b, lambda a, b: (a * 2) + a)
    assert told_apart(lambda a, b: torch.stack([a, b]), lambda a, b: torch.stack((a, b, b)))
    assert told_apart(lambda a, b: a[:1], lambda a, b: a[1:])
    assert told_apart(lambda a, b: torch.ops.aten.add.Tensor(a, b), lambda a, b: torch.ops.aten.sub.Tensor(a, b))
    assert told_apart(lambda a, b: F.gelu(a), lambda a, b: F.gelu(a, approximate="tanh"))
    assert not told_apart(lambda a, b: a + torch.zeros(2), lambda a, b: a + torch.zeros(2))


def test_groups_name_what_each_member_has_for_itself():
    (group,) = find_equal_layers(Stack(Layer), 4)
    assert len(group.members) == 8
    assert group.own_attributes == (("", "index"),)


def test_experts_in_lists(monkeypatch: pytest.MonkeyPatch):
    def every_expert(layer: Any, x: Tensor) -> Tensor:
        return sum(expert(x) for expert in layer.experts)

    def make(i: int) -> nn.Module:
        return Layer(i, every_expert, experts=nn.ModuleList(Layer(j) for j in range(6)))

    _, traces = both(monkeypatch, Stack(make, num=6), (torch.ones(4, 8),))
    assert traces.exports == 1


class _Configured(nn.Module):
    def __init__(self, labels: dict[Any, Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.labels = labels


def test_dictionaries_are_told_apart_by_types_values_and_order():
    same = [{1: "a", 2: "b"}, {1: "a", 2: "b"}]
    others = [{1: "a", 2: "c"}, {True: "a", 2: "b"}, {2: "b", 1: "a"}, {1: "a"}, {1: "a", 2: ["b"]}, {1: "a", 2.0: "b"}]
    states = [describe_module_state(_Configured(labels)) for labels in (*same, *others)]
    assert states[0] == states[1] and hash(states[0]) == hash(states[1])
    assert len(set(states[1:])) == len(states) - 1


def test_a_dictionary_that_changes_between_calls_is_seen():
    labels: dict[Any, Any] = {"a": 1}
    module = _Configured(labels)
    before = describe_module_state(module)
    labels["a"] = True
    assert describe_module_state(module) != before
    labels["a"] = 1
    assert describe_module_state(module) == before


def test_a_configuration_that_all_parts_hold_is_looked_into_once():
    @dataclass
    class Config:
        labels: list[float]
        reads: ClassVar[int] = 0

        def __getattribute__(self, name: str) -> Any:
            Config.reads += name == "__dict__"
            return super().__getattribute__(name)

    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    config = Config([1.0, 2.0])
    for part in model:
        part.config = config
    Config.reads = 0
    describe_module_state(model)
    assert Config.reads < 10
