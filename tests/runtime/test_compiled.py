"""Blocks through torch.compile: the same results, once per block type, and operator by operator where it cannot be."""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from partitioner import Constraints, Engine, LaunchError, Topology, partition
from partitioner.runtime.compile import inductor
from partitioner.runtime.compile.kernels import build_library
from partitioner.runtime.compile.segments import FixedSegment, Segment, choose_backend, compile_in_turns
from partitioner.runtime.execute.bind import BlockLibrary, find_gradient_needs
from partitioner.runtime.program.program import Program
from tests.helpers.every_rank import on_every_rank
from tests.helpers.models import CASES, float64, keep_layers
from tests.helpers.paths import ROOT
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net

pytestmark = pytest.mark.usefixtures("without_baselines")

CPU = torch.device("cpu")
MESHES: list[dict[str, Any]] = [
    {},
    {"pp": 2, "num_microbatches": 2, "halves": True},
    {"tp": 2, "checkpoint": True},
    {"dp": 2, "tp": 2},
]


def gradients(
    program: Program, model: torch.nn.Module, batch: Any, library: BlockLibrary | None
) -> list[dict[str, Tensor]]:
    def work(communicator: Any) -> dict[str, Tensor]:
        engine = Engine(program, model, communicator=communicator, library=library)
        loss = engine.step(batch)
        assert loss is not None
        found = {n: p.grad.clone() for n, p in engine.named_parameters() if p.grad is not None}
        return found | {"loss": loss.clone()}

    return on_every_rank(program, work)


def same(got: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for here, there in zip(got, expected, strict=True):
        assert here.keys() == there.keys()
        for name in here:
            torch.testing.assert_close(here[name], there[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("plan", MESHES, ids=str)
def test_compiled_blocks_compute_the_same(plan: dict[str, Any], backend: str):
    program, model = program_of_net(**plan), Net()
    library = BlockLibrary(program, CPU, backend)
    same(gradients(program, model, net_inputs(), library), gradients(program, model, net_inputs(), None))
    assert library._segments


@pytest.mark.parametrize("name", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_compiled_models_compute_the_same(name: str):
    case = CASES[name]
    model, batch = case.build(), case.inputs(4)
    if name == "llama":
        keep_layers(model, 2)
    plan = partition(model, Topology.local(2), batch, loss=case.loss, constraints=Constraints(tp=2, microbatch_size=2))
    library = BlockLibrary(plan.program, CPU, "aot_eager")
    same(gradients(plan.program, model, batch, library), gradients(plan.program, model, batch, None))


# With Inductor, or where there is no compiler with what it decomposes operators to.
BACKEND = "inductor" if any(map(shutil.which, ("g++", "clang++"))) else "aot_eager"
MATRIX: list[tuple[str, dict[str, Any]]] = [
    ("llama", dict(tp=2)),
    ("llama", dict(pp=2, schedule="1f1b", microbatch_size=2)),
    ("llama-tied", dict(dp=2, zero=3)),
    ("gpt2", dict(dp=2, zero=1, tp=2)),
    ("t5", dict(pp=2, microbatch_size=2)),
    ("bert", dict(tp=2)),
    ("transformer-encoder", dict(dp=2)),
    ("skip-mlp", dict(pp=2, microbatch_size=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), MATRIX, ids=str)
def test_compiled_models_compute_the_same_in_float64(name: str, mesh: dict[str, Any]):
    """Loss and every gradient are those of uncompiled blocks, and the same bit by bit in another engine."""
    case = CASES[name]
    with float64():
        model, batch = case.build(), case.inputs(8)
        ranks = math.prod(mesh.get(axis, 1) for axis in ("pp", "dp", "tp"))
        rest = {axis: 1 for axis in ("pp", "dp", "tp") if axis not in mesh}
        constraints = Constraints(**rest, **mesh)
        plan = partition(model, Topology.local(ranks), batch, loss=case.loss, constraints=constraints)
        library = BlockLibrary(plan.program, CPU, BACKEND)
        compiled, again = (gradients(plan.program, model, batch, library) for _ in range(2))
        expected = gradients(plan.program, model, batch, None)
    for here, there, other in zip(compiled, expected, again, strict=True):
        assert here.keys() == there.keys()
        for key, value in here.items():
            assert value.dtype == torch.float64
            torch.testing.assert_close(value, there[key], rtol=1e-9, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")
            assert torch.equal(value, other[key]), key
    assert not any(isinstance(s, FixedSegment) and s.falls_back for s in library._segments.values())


def pointwise() -> fx.GraphModule:
    """A graph of two pointwise operators, for a tensor ``[4, 8]``."""
    graph, aten = fx.Graph(), torch.ops.aten
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 8, dtype=torch.float64)
    graph.output((graph.call_function(aten.exp.default, (graph.call_function(aten.neg.default, (x,)),)),))
    return fx.GraphModule({}, graph)


def scaled_norm(epsilon: float = 1e-6) -> fx.GraphModule:
    """A graph with what a compiler fuses, for a tensor ``[4, 8]``."""
    graph, aten = fx.Graph(), torch.ops.aten
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 8, dtype=torch.float64)
    norm = graph.call_function(aten.mean.dim, (graph.call_function(aten.mul.Tensor, (x, x)), [-1], True))
    scale = graph.call_function(aten.rsqrt.default, (graph.call_function(aten.add.Tensor, (norm, epsilon)),))
    graph.output((graph.call_function(aten.mul.Tensor, (x, scale)),))
    return fx.GraphModule({}, graph)


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "inductor", reason="Inductor needs a C++ compiler")
def test_compiled_code_is_read_from_disk_and_fits_other_strides_and_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    module, x = scaled_norm(), torch.randn(4, 8, dtype=torch.float64)
    first = FixedSegment("part", module, CPU)
    first.compile()
    assert first.is_compiled
    (expected,) = module.forward(x)
    torch.testing.assert_close(first(x)[0], expected)
    assert len(list((tmp_path / "partitioner").glob("*.code"))) == 1

    with monkeypatch.context() as patch:
        patch.setattr(inductor, "_compile_by_inductor", None)
        second = FixedSegment("part", module, CPU)
        second.compile()
        assert torch.equal(second(x)[0], first(x)[0])
        assert not second.falls_back

    turned = x.t().contiguous().t()
    torch.testing.assert_close(first(turned)[0], expected)
    for rows in (6, 9):  # what the data decides on
        more = torch.randn(rows, 8, dtype=torch.float64)
        torch.testing.assert_close(first(more)[0], module.forward(more)[0])
    assert not first.falls_back


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "inductor", reason="Inductor needs a C++ compiler")
def test_damaged_files_are_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Files of this project, with functions or with a shared object, and files of Inductor."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    module, x = scaled_norm(), torch.randn(4, 8, dtype=torch.float64)
    (expected,) = FixedSegment("part", module, CPU)(x)
    (code,), (kernels,) = ((tmp_path / "partitioner").glob(f"*.{kind}") for kind in ("code", "kernels"))
    whole = kernels.read_bytes()
    assert b"\x7fELF" in whole
    middle = whole.index(b"\x7fELF") + 5000
    noise = bytes(b ^ 85 for b in whole[middle : middle + 500])
    for path, damaged in (
        (code, code.read_bytes()[:-7]),
        (kernels, whole[:middle]),
        (kernels, b""),
        (kernels, whole[:middle] + noise + whole[middle + 500 :]),
    ):
        path.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            segment = FixedSegment("part", module, CPU)
            assert torch.equal(segment(x)[0], expected)
        assert caplog.text.count(f"{path} is damaged") == 1
        assert not segment.falls_back
        assert {p for p in code.parent.iterdir() if p.suffix != ".lock"} == {code, kernels}
        assert inductor._load_function(code.stem) is not None
    assert [p for p in tmp_path.iterdir() if p.name != "partitioner"] == [], "files that Inductor would read"


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "inductor", reason="Inductor needs a C++ compiler")
def test_a_shared_object_that_cannot_be_loaded_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Such as one of another machine that shares the folder: its checksum is right. Or one without the kernel."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    module, x = scaled_norm(), torch.randn(4, 8, dtype=torch.float64)
    (expected,) = FixedSegment("part", module, CPU)(x)
    kept, (path,) = inductor.get_code_cache(), (tmp_path / "partitioner").glob("*.code")
    content = kept.read(path.name)
    assert content is not None
    functions, entries, library = pickle.loads(content)
    kept.write("other.kernels", b"no object")
    for damaged in (functions, entries, "other.kernels"), (functions, dict.fromkeys(entries, "another"), library):
        kept.write(path.name, pickle.dumps(damaged))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            segment = FixedSegment("part", module, CPU)
            assert torch.equal(segment(x)[0], expected)
        assert f"{path} is damaged" in caplog.text
        assert not segment.falls_back and inductor._load_function(path.stem) is not None


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "inductor", reason="Inductor needs a C++ compiler")
def test_kernels_of_several_functions_are_compiled_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Equal kernels once, and with Inductor's own results bit by bit."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    calls: list[int] = []

    def build(kernels: Any) -> bytes:
        calls.append(len(set(kernels)))
        return build_library(kernels)

    monkeypatch.setattr(inductor, "build_library", build)
    modules, x = [scaled_norm(), pointwise(), scaled_norm(1.0)], torch.randn(4, 8, dtype=torch.float64)
    segments = [FixedSegment(f"part{i}", module, CPU) for i, module in enumerate(modules)]
    compile_in_turns(segments)
    assert calls == [3] and len(list((tmp_path / "partitioner").glob("*.kernels"))) == 1
    for segment, module in zip(segments, modules, strict=True):
        assert segment.is_compiled and not segment.falls_back
        alone = inductor._compile_by_inductor(module, [x], CPU).current_callable([x])
        assert torch.equal(segment(x)[0], alone[0])


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "inductor", reason="Inductor needs a C++ compiler")
def test_a_kernel_that_does_not_compile_spares_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def build(kernels: Any) -> bytes:
        broken = [k._replace(source=f"{k.source} no c++") if ".exp" in k.source else k for k in kernels]
        return build_library(broken)

    monkeypatch.setattr(inductor, "build_library", build)
    norm, other = FixedSegment("norm", scaled_norm(), CPU), FixedSegment("other", pointwise(), CPU)
    with caplog.at_level(logging.WARNING):
        compile_in_turns([norm, other])
    assert other.falls_back and not norm.falls_back
    assert "other is not compiled, and runs operator by operator" in caplog.text
    x = torch.randn(4, 8, dtype=torch.float64)
    torch.testing.assert_close(norm(x)[0], scaled_norm().forward(x)[0])
    torch.testing.assert_close(other(x)[0], pointwise().forward(x)[0])


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "inductor", reason="Inductor needs a C++ compiler")
def test_without_a_folder_graphs_are_compiled_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "folder"))
    module, x = scaled_norm(), torch.randn(4, 8, dtype=torch.float64)
    with caplog.at_level(logging.WARNING):
        first, second = FixedSegment("part", module, CPU), FixedSegment("part", module, CPU)
        assert torch.equal(first(x)[0], second(x)[0])
    assert not first.falls_back and not second.falls_back
    assert "is not used to keep files" in caplog.text


_WARM = """
import json, logging, sys
from partitioner import Engine
from tests.helpers.runtime_programs import Net, net_inputs, program_of_net
logging.basicConfig(level=logging.WARNING)
engine = Engine(program_of_net(num_layers=2), Net(), compile=True)
engine.step(net_inputs())
heavy = [m for m in sys.modules if m in ("torch._inductor.graph", "torch._inductor.select_algorithm")]
gradients = {n: p.grad.double().sum().item() for n, p in engine.named_parameters()}
print(json.dumps([heavy, gradients]))
"""


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "inductor", reason="Inductor needs a C++ compiler")
def test_a_warm_start_imports_no_compiler(tmp_path: Path):
    """A second process computes the same bit by bit, and traces nothing."""

    def start() -> Any:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", _WARM]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
        return json.loads(ran.stdout.splitlines()[-1])

    (cold, first), (warm, second) = start(), start()
    assert "torch._inductor.graph" in cold
    assert warm == []
    assert first == second


def test_a_graph_has_a_hash_of_its_own_for_other_strides_and_operators():
    module, x = scaled_norm(), torch.empty(4, 8)
    known = inductor.describe_module(module, [x], CPU)
    assert known == inductor.describe_module(scaled_norm(), [torch.zeros(4, 8)], CPU)
    assert known != inductor.describe_module(module, [torch.empty(8, 4).t()], CPU)
    assert known != inductor.describe_module(module, [x.double()], CPU)
    assert known != inductor.describe_module(fx.symbolic_trace(torch.nn.ReLU()), [x], CPU)


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "inductor", reason="Inductor needs a C++ compiler")
def test_inductor_computes_the_same():
    program, model = program_of_net(num_microbatches=2), Net()
    library = BlockLibrary(program, CPU, True)
    assert library.backend == "inductor"
    same(gradients(program, model, net_inputs(), library), gradients(program, model, net_inputs(), None))
    assert library._segments
    assert not any(s.falls_back for s in library._segments.values() if isinstance(s, FixedSegment))


def test_a_block_type_is_compiled_once(monkeypatch: pytest.MonkeyPatch):
    """However many calls, microbatches and ranks of this process there are."""
    program = program_of_net(tp=2, num_layers=4, num_microbatches=2)
    compiled: list[int] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        compiled.append(len(list(module.graph.nodes)))
        return module.forward

    monkeypatch.setattr("partitioner.runtime.compile.segments.choose_backend", lambda asked, device: backend)
    library = BlockLibrary(program, CPU)
    gradients(program, Net(num_layers=4), net_inputs(), library)
    assert len(library._segments) == len(compiled)
    assert {key[0] for key in library._segments} <= set(program.blocks)


def test_what_cannot_be_compiled_runs_operator_by_operator(caplog: pytest.LogCaptureFixture):
    def broken(module: fx.GraphModule, inputs: Any) -> Any:
        raise RuntimeError("no such instruction")

    segment = Segment("layer.forward.0", fx.symbolic_trace(lambda x: torch.relu(x) + 1), broken)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        assert torch.equal(segment(torch.ones(2)), torch.full((2,), 2.0))
        assert torch.equal(segment(torch.ones(2)), torch.full((2,), 2.0))
    assert caplog.text.count("layer.forward.0 is not compiled, and runs operator by operator") == 1


def test_without_a_compiler_blocks_run_operator_by_operator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert choose_backend(True, CPU) is None
    assert "torch.compile needs a C++ compiler" in caplog.text


def test_a_backend_that_torch_does_not_know_is_refused():
    with pytest.raises(LaunchError, match=r"a bool or one of .*inductor.*; got 'nvcc'"):
        Engine(program_of_net(), Net(), compile="nvcc")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_are_called_while_other_threads_trace(backend: str):
    """Ranks that are threads: one runs its step while another derives its stage's blocks."""
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("x"),)),))
    segment, x = Segment("part", fx.GraphModule({}, graph), backend), torch.randn(4)
    stop, errors = threading.Event(), []

    def call() -> None:
        try:
            while not stop.is_set():
                segment(x)
                time.sleep(1e-4)  # a lock is not fair: a rank that never waits would keep it
        except BaseException as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    program = program_of_net()
    for _ in range(20):
        library = BlockLibrary(program, CPU)
        for stage_call in program.stages[0].calls:
            if needs := find_gradient_needs(program, stage_call):
                library.differentiated(stage_call.block, needs)
    stop.set()
    caller.join()
    assert not errors
