"""Regions of torch.autocast: the graph has the casts that eager makes, on the type of devices that the plan is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from partitioner import Constraints, Engine, LaunchError, Topology, partition, prepare
from partitioner.passes.capture.capture import capture
from partitioner.passes.errors import InputsError, UnsupportedError
from partitioner.runtime.comm.thread_backend import ThreadWorld
from partitioner.runtime.launch.local import run_threads
from partitioner.validate import torch_device

pytestmark = pytest.mark.usefixtures("without_baselines")

VOCABULARY, WIDTH, HEADS, LENGTH = 32, 16, 4, 6


class Block(nn.Module):
    """Attention and a feed-forward part in a region; rotations in an island of float32 inside it."""

    calls = 0

    def __init__(self, region: dict[str, Any]) -> None:
        super().__init__()
        self.region = region
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        with torch.autocast(**self.region):
            q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
            with torch.autocast(x.device.type, enabled=False):
                turns = torch.arange(LENGTH).float().outer(torch.ones(WIDTH // HEADS)).cos()
                q, k = (q.float() * turns).to(v.dtype), (k.float() * turns).to(v.dtype)
            weights = torch.einsum("bhtd,bhsd->bhts", q, k).softmax(-1)
            x = x + self.out((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """Blocks with regions of their own, and a loss in one; ``around``: one region around all of them."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, depth: int = 2) -> None:
        super().__init__()
        self.region = {"device_type": device, "dtype": dtype}
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList([Block(self.region) for _ in range(depth)])

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        with torch.autocast(**self.region):
            logits = self.head(x)
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(VOCABULARY, (4, LENGTH), generator=generator) for _ in range(2))
    labels[0], labels[1, :3] = -100, -100
    return tokens, labels


def first(outputs: tuple[Tensor, Tensor]) -> Tensor:
    return outputs[0]


def types_of(graph: fx.Graph) -> dict[str, set[torch.dtype]]:
    """What the operators make, by name."""
    found: dict[str, set[torch.dtype]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor):
            name = getattr(node.target, "overloadpacket", node.target).__name__
            found.setdefault(name, set()).add(node.meta["val"].dtype)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_casts_are_eagers(dtype: torch.dtype):
    """Cut between blocks alone, every number is what eager makes of it, and in float64 no cast rounds."""
    torch.manual_seed(0)
    model = Model(dtype=dtype)
    plan = partition(model, Topology.local(2), batch(), loss=first, constraints=Constraints(pp=2, microbatch_size=4))
    run = run_threads(plan, model, batch())
    loss, logits = model(*batch())
    loss.backward()
    assert run.leaves["1"].dtype == dtype
    assert torch.equal(run.leaves["1"], logits)
    torch.testing.assert_close(run.loss, loss, rtol=1e-6, atol=0.0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        scale = parameter.grad.abs().max().item()
        error = (run.grads[name] - parameter.grad).abs().max().item()
        assert error <= 4 * torch.finfo(dtype).eps * scale, name
    assert plan.verify(model, batch(), loss=first).ok


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(
    ("mesh", "device", "precision"),
    [
        ({"tp": 2, "pp": 2}, "cpu", None),
        ({"dp": 4, "tp": 2}, "cuda", None),
        ({"dp": 2, "pp": 2, "microbatch_size": 1}, "cpu", "bf16"),
    ],
    ids=str,
)
def test_plans_are_the_model(mesh: dict[str, Any], device: str, precision: str | None):
    model = Model(device, depth=1)
    topology = Topology.local(4) if device == "cpu" else Topology.preset("dgx-h100")
    plan = partition(model, topology, batch(), loss=first, constraints=Constraints(**mesh), precision=precision)
    verification = plan.verify(model, batch(), loss=first)
    assert verification.ok, verification


def test_each_type_of_devices_has_its_own_casts():
    on_gpu = types_of(capture(Model("cuda", torch.float16), batch(), loss=first, device="cuda").graph)
    assert on_gpu["linear"] == on_gpu["einsum"] == {torch.float16}
    assert on_gpu["softmax"] == on_gpu["layer_norm"] == {torch.float32}
    on_cpu = types_of(capture(Model("cpu"), batch(), loss=first).graph)
    assert on_cpu["linear"] == on_cpu["softmax"] == on_cpu["einsum"] == {torch.bfloat16}
    assert on_cpu["cross_entropy_loss"] == {torch.float32}
    elsewhere = types_of(capture(Model("cuda"), batch(), loss=first).graph)
    assert elsewhere["linear"] == {torch.float32}


def test_a_plan_casts_as_its_devices_do():
    """A region of the type of forward's own tensors is one of the devices planned for."""
    prepared = prepare(Model("cpu", torch.float16), batch(), loss=first)
    constraints = Constraints(tp=2, pp=1, dp=1)
    for topology, softmax in ((Topology.local(2), torch.float16), (Topology.preset("dgx-h100"), torch.float32)):
        folded = prepared.at(None, constraints, torch_device(topology))[0]
        made = [types_of(block.graph).get("softmax") for block in folded.blocks.values()]
        assert {softmax} in made


def test_layers_in_a_region_are_traced_once():
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model(depth=8)

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.inner(tokens, labels)[0]

    Block.calls = 0
    graph = capture(Around(), batch()).graph
    assert Block.calls <= 4
    assert len([n for n in graph.nodes if "softmax" in str(n.target)]) == 8
    assert types_of(graph)["linear"] == {torch.bfloat16}


def test_own_gradients_and_float64_have_no_casts_of_their_own():
    class Scaled(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return grad @ weight.T, 2 * x.T @ grad

    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return Scaled.apply(super().forward(input), self.weight).square().mean()

    x = torch.randn(8, 4)
    model = Own(4, 4)
    products = types_of(capture(model, (x,)).graph)
    assert products["matmul"] == {torch.float32}
    assert partition(model, Topology.local(2), (x,), constraints=Constraints(dp=2)).verify(model, (x,)).ok
    wide = types_of(capture(Model(), batch(), loss=first, precision="fp64").graph)
    assert {t for made in wide.values() for t in made if t.is_floating_point} == {torch.float64}


class Unsafe(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast("cuda"):
            return F.binary_cross_entropy(super().forward(input).sigmoid().float(), input)


def test_what_cannot_be_kept_is_refused():
    x = torch.rand(2, 4)
    with pytest.raises(UnsupportedError, match=r"aten::binary_cross_entropy \(.*test_autocast.py:\d+\).*unsafe"):
        capture(Unsafe(4, 4), (x,), device="cuda")
    exported = torch.export.export(Model(), batch())
    with pytest.raises(UnsupportedError, match=r"of an exported program.*pass the module"):
        capture(exported, None)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(InputsError, match=r"inside a region.*precision="):
        partition(nn.Linear(4, 4), Topology.local(2), (x,), loss=Tensor.sum)


def test_a_step_is_outside_of_regions():
    model, x = nn.Linear(4, 4), torch.rand(2, 4)
    plan = partition(model, Topology.local(1), (x,), loss=Tensor.sum)
    engine = Engine(plan, model, communicator=ThreadWorld(1, "cpu", 10.0).communicator(0))
    with torch.autocast("cpu"), pytest.raises(LaunchError, match=r"inside torch.autocast.*precision="):
        engine.step((x,))
    engine.step((x,))
