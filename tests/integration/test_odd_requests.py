"""Odd models, inputs and arguments end in a plan that is equal to the model, or in a typed refusal that says why."""

from __future__ import annotations

import dataclasses
import re
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import partitioner
from partitioner import (
    BatchError,
    CaptureError,
    Constraints,
    Engine,
    InputsError,
    InternalError,
    PartitionError,
    Topology,
    UnsupportedError,
    WeightsError,
    partition,
    run_local,
    run_threads,
)
from partitioner.runtime.comm.thread_backend import ThreadWorld

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("without_baselines"),
]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def net(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())

    def forward(self, x: Any) -> Any:
        return self.net(x).square().mean()


class Fields(Base):
    def forward(self, b: Any) -> Tensor:
        return (self.net(b.x) - b.y).square().mean()


class Named(Base):
    def forward(self, x: Tensor, names: Any) -> Tensor:
        return self.net(x).square().mean() * len(names)


class Narrow(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.float()).square().mean()


class Parts(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.real + x.imag).square().mean()


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Batch:
    x: Tensor
    y: Tensor


def rows() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 8)


def twice() -> tuple[Tensor, ...]:
    x = rows()
    return Pair(x, x), x  # type: ignore[return-value]


class Twice(Base):
    def forward(self, pair: Any, x: Tensor) -> Tensor:
        return (self.net(pair.x + x) - pair.y).square().mean()


def plan_of(model: nn.Module, inputs: Any, world: int = 1, **options: Any) -> Any:
    mesh = {"pp": 1, "dp": 1, "tp": world, "cp": 1}
    return partition(model, Topology.local(world), inputs, constraints=Constraints(**mesh), **options)


def check(model: nn.Module, inputs: Any, **options: Any) -> None:
    found = plan_of(model, inputs, **options).verify(model, inputs, options.get("loss"))
    assert found.ok, str(found)


# --- inputs -----------------------------------------------------------------------------------------------------------

TAKEN: dict[str, tuple[type[nn.Module], Callable[[], Any]]] = {
    "a named tuple": (Fields, lambda: (Pair(rows(), rows()),)),
    "a tensor twice": (Twice, twice),
    "a tensor that requires a gradient": (Base, lambda: (rows().requires_grad_(),)),
    "the result of a computation": (Base, lambda: (rows().requires_grad_() * 2,)),
    "a parameter": (Base, lambda: (nn.Parameter(rows()),)),
    "a conjugate": (Parts, lambda: (torch.complex(rows(), rows()).conj(),)),
    "not contiguous": (Base, lambda: (torch.randn(8, 4).t(),)),
    "expanded": (Base, lambda: (torch.randn(1, 8).expand(4, 8),)),
    "float8": (Narrow, lambda: (rows().to(torch.float8_e4m3fn),)),
    "uint16": (Narrow, lambda: (torch.ones(4, 8, dtype=torch.uint16),)),
    "bool": (Narrow, lambda: (rows() > 0,)),
}


@pytest.mark.parametrize("case", TAKEN)
def test_inputs_that_are_taken(case: str):
    build, inputs = TAKEN[case]
    check(build(), inputs())


def fake_rows() -> Tensor:
    with FakeTensorMode():
        return torch.randn(4, 8)


REFUSED_INPUTS: dict[str, tuple[type[nn.Module], Callable[[], Any], str]] = {
    "an array": (Base, lambda: (np.ones((4, 8)),), r"input '0' is a ndarray.*torch.from_numpy"),
    "numbers in lists": (Base, lambda: ([[1.0] * 8] * 4,), r"fails on these inputs.*and 24 more\.$"),
    "nothing": (Base, lambda: (None,), r"must be Tensor, not NoneType"),
    "text": (Base, lambda: "x", r"inputs must be a tuple .* or a dict .*; got str"),
    "a set of inputs": (Base, lambda: {1}, r"inputs must be a tuple .* or a dict .*; got set"),
    "a set": (Named, lambda: (rows(), {"a"}), r"input '1' is a set; .*pass a list"),
    "bytes": (Named, lambda: (rows(), b"ab"), r"input '1' is a bytes"),
    "a range": (Named, lambda: (rows(), range(2)), r"input '1' is a range"),
    "a dataclass": (Fields, lambda: (Batch(rows(), rows()),), r"input '0' is a Batch; .*its fields as a dict"),
    "a namespace": (Fields, lambda: (types.SimpleNamespace(x=rows(), y=rows()),), r"is a SimpleNamespace; .*fields"),
    "sparse": (Base, lambda: (rows().to_sparse(),), r"a sparse tensor \(sparse_coo\).*to_dense\(\)"),
    "sparse rows": (Base, lambda: (rows().to_sparse_csr(),), r"a sparse tensor \(sparse_csr\).*to_dense\(\)"),
    "nested": (Base, lambda: (torch.nested.nested_tensor([torch.ones(3, 8)]),), r"a nested tensor.*to_padded_tensor"),
    "no samples": (Base, lambda: (torch.randn(0, 8),), r"has no samples"),
}


@pytest.mark.parametrize("case", REFUSED_INPUTS)
def test_inputs_that_are_refused(case: str):
    build, inputs, message = REFUSED_INPUTS[case]
    with pytest.raises(InputsError, match=f"(?s){message}"):
        plan_of(build(), inputs())


@pytest.mark.parametrize("inputs", [lambda: rows().to("meta"), fake_rows], ids=["meta", "fake"])
def test_a_plan_needs_no_numbers_and_a_run_does(inputs: Callable[[], Tensor]):
    plan = plan_of(Base(), (inputs(),))
    with pytest.raises(BatchError, match="has no values"):
        run_threads(plan, Base(), (inputs(),))


# --- models -----------------------------------------------------------------------------------------------------------


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LazyLinear(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x).square().mean()


class Holding(Base):
    """Holds anything besides."""

    def __init__(self, thing: Any = None, buffer: Tensor | None = None) -> None:
        super().__init__()
        self.thing = thing
        self.register_buffer("buffer", buffer)


class OnlyCalled(Base):
    forward = None  # type: ignore[assignment]


class Raising(Base):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError("by itself")


class Endless(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.forward(x)


class Closing(Base):
    """A weight that only a function knows, which copies of the model do not follow."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.up.weight
        self.function = lambda x: x @ weight.t()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x).square().mean() + super().forward(x)


class Generating(Base):
    def forward(self, x: Tensor) -> Any:
        yield x


class Nothing(Base):
    def forward(self, x: Tensor) -> Any:
        return "nothing"


REFUSED_MODELS: dict[str, tuple[Callable[[], nn.Module], type[PartitionError], str]] = {
    "lazy": (Lazy, InputsError, "'last.weight' has no shape yet.*once on inputs"),
    "uninitialized": (
        lambda: Holding(buffer=nn.parameter.UninitializedBuffer()),
        InputsError,
        "'buffer' has no shape yet",
    ),
    "scripted": (lambda: torch.jit.script(nn.Linear(8, 8)), CaptureError, "the model is TorchScript"),
    "traced": (lambda: torch.jit.trace(Base(), rows()), CaptureError, "the model is TorchScript"),
    "sparse": (lambda: Holding(buffer=torch.eye(8).to_sparse()), UnsupportedError, "'buffer' .* sparse tensor"),
    "quantized": (
        lambda: Holding(buffer=torch.quantize_per_tensor(torch.eye(8), 0.1, 0, torch.qint8)),
        UnsupportedError,
        r"'buffer' of the model is quantized \(qint8\).*dequantize",
    ),
    "packed": (
        lambda: torch.ao.quantization.quantize_dynamic(Base(), {nn.Linear}),
        UnsupportedError,
        "holds packed weights",
    ),
    "no forward": (OnlyCalled, InputsError, "OnlyCalled has no method forward"),
    "a lock": (lambda: Holding(threading.Lock()), CaptureError, "cannot be copied.*lock"),
    "a file": (lambda: Holding(Path(__file__).open()), CaptureError, "cannot be copied"),  # noqa: SIM115
    "raising": (Raising, InputsError, r"fails on these inputs at .*test_odd_requests.py:\d+.*ZeroDivisionError"),
    "endless": (Endless, CaptureError, "RecursionError.*sys.setrecursionlimit"),
    "a closure": (Closing, UnsupportedError, "forward reads 'up.weight' through a closure"),
    "a generator": (Generating, CaptureError, "Forward must return tensors"),
    "nothing": (Nothing, InputsError, "training needs a loss"),
    "a branch of torch.cond": (
        lambda: _Returning(lambda y: torch.cond(y.sum() > 0, lambda y: y * 2, lambda y: y - 1, (y,)).mean()),
        UnsupportedError,
        "the operator cond .*test_odd_requests.py.* contains a function.*write it without torch.cond",
    ),
    "a check for finite values": (
        lambda: _Returning(lambda y: y.clamp(-1, 1).mean() if not torch.isfinite(y).all() else y.mean()),
        UnsupportedError,
        r"branches on whether values are finite \(.*test_odd_requests.py:\d+\).*remove the check",
    ),
    "NumPy": (
        lambda: _Returning(lambda y: torch.from_numpy(np.exp(y.detach().numpy())).mean()),
        CaptureError,
        r"cannot be traced at .*test_odd_requests.py:\d+.*Functions of NumPy are not part of a graph",
    ),
    "a count": (
        lambda: _Returning(lambda y: (y.argmax(-1) != 0).sum()),
        InputsError,
        "a loss that has a gradient: the model returns a scalar of torch.int64; expected a floating-point scalar",
    ),
}


class _Returning(nn.Module):
    """Returns ``shape(y)`` of a linear layer's result ``y``, such as a tuple."""

    def __init__(self, shape: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.shape = nn.Linear(8, 8), shape

    def forward(self, x: torch.Tensor) -> Any:
        return self.shape(self.up(x))


RETURNED = {
    "a pair": (lambda y: (y, y.mean()), "output[1]"),
    "nested": (lambda y: {"logits": y, "aux": {"z": y.sum()}}, 'output["aux"]["z"]'),
    "a count": (lambda y: (y, y.argmax()), "output[0].mean()"),
    "a tensor": (lambda y: y, "output.mean()"),
}


@pytest.mark.parametrize("case", RETURNED)
def test_a_missing_loss_is_told_with_an_expression_for_this_output(case: str):
    shape, example = RETURNED[case]
    with pytest.raises(InputsError, match=re.escape(f"loss=lambda output: {example}")):
        plan_of(_Returning(shape), (rows(),))


@pytest.mark.parametrize("case", REFUSED_MODELS)
def test_models_that_are_refused(case: str):
    build, kind, message = REFUSED_MODELS[case]
    with pytest.raises(kind, match=f"(?s){message}"):
        plan_of(build(), (rows(),))


def test_a_model_that_computes_nothing_is_refused():
    with pytest.raises(InputsError, match="the model computes nothing"):
        plan_of(Nothing(), (rows(),), objective="infer")


class InList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"weights": [self.up.weight], "counts": types.SimpleNamespace()}
        self.register_buffer("seen", torch.zeros(16))
        self.kept["counts"].seen = self.seen

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.kept["weights"][0].t()
        self.kept["counts"].seen.add_(hidden.detach().mean(0))
        return self.down((hidden * self.kept["counts"].seen).tanh()).square().mean()


class Inferring(Base):
    """A part under inference mode takes no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            hidden = self.frozen(x)
        return super().forward(x + hidden.clone())


OUTSIDE = torch.nn.Linear(8, 8)


class Global(Base):
    """What is no part of the model is a constant."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(OUTSIDE(x))


class Listed(Base):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [super().forward(x)]


class Scalars(Base):
    def __init__(self) -> None:
        super().__init__()
        self.none, self.scale = nn.Parameter(torch.ones(0, 4)), nn.Parameter(torch.tensor(2.0))
        self.unread = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale) + self.none.sum()


@pytest.mark.parametrize("build", [InList, Inferring, Global, Listed, Scalars], ids=lambda build: build.__name__)
def test_models_that_are_taken(build: type[nn.Module]):
    check(build(), (rows(),))


def test_a_loss_that_is_not_a_number_is_told():
    model = Base()
    nn.init.constant_(model.up.weight, float("nan"))
    with pytest.raises(InputsError, match=r"loss is not a number \(nan\)"):
        plan_of(model, (rows(),)).verify(model, (rows(),))


def test_a_loss_that_is_no_function_is_refused():
    with pytest.raises(InputsError, match=r"loss must be a function, or None; got int"):
        plan_of(Base(), (rows(),), loss=3)


# --- caches of keys and values ----------------------------------------------------------------------------------------


class Cache:
    """Tensors that a plain object holds and forward writes to, as static generation caches do."""

    def __init__(self) -> None:
        self.keys, self.length = torch.zeros(2, 6, 8), torch.zeros((), dtype=torch.int64)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.cache = Cache()
        self.register_buffer("keys", self.cache.keys, persistent=False)
        self.register_buffer("length", self.cache.length, persistent=False)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.cache.length.copy_(position[0])
        at = torch.arange(1) + self.cache.length
        self.cache.length.add_(1)
        self.cache.keys.index_copy_(1, at, self.key(x))
        return self.query(x) @ self.cache.keys.transpose(1, 2)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("exported", [False, True], ids=["module", "program"])
def test_a_static_cache_is_updated(exported: bool, world: int):
    torch.manual_seed(0)
    model, inputs = Decoder().eval(), (torch.randn(2, 1, 8), torch.tensor([3]))
    with torch.no_grad():
        given = torch.export.export(model, inputs, strict=False) if exported else model
    plan = plan_of(given, inputs, world=world, objective="infer")
    run = run_threads(plan, model, inputs)
    with torch.no_grad():
        expected = model(*inputs)
    torch.testing.assert_close(run.leaves[""], expected)
    torch.testing.assert_close(run.buffers["keys"], model.keys)
    assert int(run.buffers["length"]) == 4


# --- types ------------------------------------------------------------------------------------------------------------


class Typed(nn.Module):
    def __init__(self, parameter: torch.dtype, buffer: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128).to(parameter))
        self.register_buffer("mask", torch.ones(8, 8).to(buffer))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.view_as_real(self.mask.to(torch.complex64)).sum(-1) if self.mask.is_complex() else self.mask
        made = torch.complex(x, 2 * x).to(torch.complex128) @ self.weight.to(torch.complex128)
        return (made.abs().square() @ mask.double()).mean()


TYPES = [
    torch.complex32, torch.complex64, torch.complex128, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.bool,
    torch.int16, torch.uint64,
]  # fmt: skip
MORE_TYPES = [
    torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.int8,
    torch.uint8, torch.uint16, torch.uint32,
]  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Any:
    with partitioner.LocalRanks(2) as pool:
        yield pool


@pytest.mark.parametrize(
    "dtype", [*TYPES, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in MORE_TYPES)], ids=str
)
def test_buffers_of_every_type_run_on_ranks(dtype: torch.dtype, ranks: partitioner.LocalRanks):
    torch.manual_seed(0)
    model, inputs = Typed(torch.complex128, dtype), (rows(),)
    run = run_local(plan_of(model, inputs, world=2), model, inputs, ranks=ranks)
    loss = model(*inputs)
    loss.backward()
    torch.testing.assert_close(run.loss, loss.detach())
    torch.testing.assert_close(run.grads["weight"], model.weight.grad)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32], ids=str)
def test_complex_parameters_are_saved(dtype: torch.dtype, tmp_path: Path):
    model, inputs = Typed(dtype, torch.uint16), (rows(),)
    plan = plan_of(model, inputs)
    engine = Engine(plan, model, communicator=ThreadWorld(1).communicator(0))
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1, momentum=0.9)
    engine.step(inputs)
    engine.save(tmp_path / "checkpoint", optimizer)
    before = engine.state_dict(full=True)["weight"].clone()
    optimizer.step()
    engine.load(tmp_path / "checkpoint", optimizer)
    torch.testing.assert_close(engine.state_dict(full=True)["weight"], before)
    if dtype == torch.complex64:
        engine.export_weights(tmp_path / "weights")
        torch.testing.assert_close(run_threads(plan, tmp_path / "weights", inputs).loss, model(*inputs).detach())
    else:
        with pytest.raises(WeightsError, match=r"weight has dtype complex\d+, which safetensors cannot store"):
            engine.export_weights(tmp_path / "weights")
        assert not (tmp_path / "weights").exists()


def test_weights_that_are_no_tensors_are_refused():
    plan = plan_of(Base(), (rows(),))
    checkpoint = {"model": Base().state_dict(), "epoch": 3}
    with pytest.raises(WeightsError, match="holds 'model', a OrderedDict; expected a dict of tensors by name"):
        run_threads(plan, checkpoint, (rows(),))
    with pytest.raises(WeightsError, match=r"up.weight is a sparse tensor"):
        run_threads(plan, {**Base().state_dict(), "up.weight": torch.eye(16, 8).to_sparse()}, (rows(),))


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan() -> Any:
    return plan_of(Base(), (rows(),))


@pytest.fixture(scope="module")
def engine(plan: Any) -> Engine:
    return Engine(plan, Base(), communicator=ThreadWorld(1).communicator(0))


ARGUMENTS: dict[str, Callable[[Any, Engine], Any]] = {
    "no path to save": lambda plan, engine: plan.save(None),
    "a number to load": lambda plan, engine: type(plan).load(3),
    "a number to draw to": lambda plan, engine: plan.to_svg(3),
    "no path of a report": lambda plan, engine: plan.to_html(None),
    "no plan to compare": lambda plan, engine: plan.diff(None),
    "a state dict to verify": lambda plan, engine: plan.verify(Base().state_dict(), (rows(),)),
    "an unknown device": lambda plan, engine: run_threads(plan, Base(), (rows(),), device="abacus"),
    "an engine on an unknown device": lambda plan, engine: Engine(plan, Base(), device="abacus"),
    "a number of ranks": lambda plan, engine: run_local(plan, Base(), (rows(),), ranks=3),
    "no plan": lambda plan, engine: run_threads(None, Base(), (rows(),)),
    "no weights": lambda plan, engine: run_threads(plan, None, (rows(),)),
    "no batch": lambda plan, engine: engine.step(None),
    "no folder": lambda plan, engine: engine.save(None),
    "an object without a state": lambda plan, engine: engine.save("nowhere", extra={"a": 3}),
    "a text to clip by": lambda plan, engine: engine.clip_grad_norm_("x"),
    "progress that is no function": lambda plan, engine: partition(Base(), Topology.local(1), (rows(),), progress=3),
    "a text of ranks": lambda plan, engine: Topology.local("a"),
    "a number of a preset": lambda plan, engine: Topology.preset(3),
    "no text": lambda plan, engine: Topology.parse(None),
    "no topology": lambda plan, engine: partition(Base(), None, (rows(),)),
    "constraints as a dict": lambda plan, engine: partition(
        Base(), Topology.local(1), (rows(),), constraints={"tp": 1}
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_of_a_wrong_kind_are_refused(case: str, plan: Any, engine: Engine):
    with pytest.raises(PartitionError) as caught:
        ARGUMENTS[case](plan, engine)
    assert not isinstance(caught.value, InternalError), str(caught.value)
