"""What the README shows and the examples do, runs."""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import time
import warnings
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

from examples.train import LEARNING_RATE, WARMUP, batch, build
from partitioner import Constraints, Topology, partition
from partitioner.passes.ir.layouts import Layout
from partitioner.runtime.engine.data_loader import SampleOrder, Samples
from partitioner.runtime.state.weights import FileWeights
from tests.helpers.command_line import execute
from tests.helpers.paths import ROOT

SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
YAML = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES_WITH_CODE = [page for page in PAGES if SNIPPET.search(page.read_text())]


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=[page.stem for page in PAGES_WITH_CODE])
def test_snippets_of_a_page_run_in_order(page: Path, tmp_path: Path):
    """Each page stands alone; ``cluster.yaml`` is the first topology file that it shows."""
    text = page.read_text()
    for shown in YAML.findall(text)[:1]:
        (tmp_path / "cluster.yaml").write_text(shown)
    script = tmp_path / "page.py"
    script.write_text("\n".join(SNIPPET.findall(text)))
    execute(str(script), cwd=tmp_path)
    if "plan.save(" in text:
        assert (tmp_path / "plan.json").exists()
        assert (tmp_path / "plan.svg").read_text().startswith("<")


def test_readme_and_tour_have_code():
    assert {"README", "tour"} <= {page.stem for page in PAGES_WITH_CODE}


def printed_by(name: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Standard output of an example that is run here, as a script, which need not import all anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *arguments])
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["plain_module", "hf_llama", "t5"])
def test_example_prints_its_plan(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Of several virtual stages on a rank the bound leaves out a little of what follows the pipeline."""
    monkeypatch.chdir(tmp_path)
    printed = " ".join(printed_by(name, capsys).split())
    assert re.search(r"[^t] proven (fastest|optimal).* under the cost model|gap (0%|<0\.1%)", printed)


MODELS = ["unet", "gnn", "dlrm", "diffusion_transformer"]
MESHES = {"tp4": Constraints(dp=1, tp=4), "pp2-tp2": Constraints(pp=2, tp=2), "pp4": Constraints(pp=4)}
FIRST = [("unet", "tp4"), ("unet", "pp2-tp2"), ("gnn", "pp2-tp2"), ("dlrm", "tp4"), ("dlrm", "pp4")]
FIRST += [("diffusion_transformer", "tp4"), ("diffusion_transformer", "pp4")]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case not in FIRST)) for case in product(MODELS, MESHES)],
)
def test_models_of_other_kinds_are_exact(name: str, mesh: str):
    model, inputs = importlib.import_module(f"examples.{name}").example()
    plan = partition(model, Topology.local(4), inputs, constraints=MESHES[mesh])
    report = plan.verify(model, inputs)
    assert report.ok, report.errors


def test_tables_are_sharded():
    """Large tables by row or column, equal ones by table or column: none is whole on a rank."""
    model, inputs = importlib.import_module("examples.dlrm").example()
    plan = partition(model, Topology.local(4), inputs, constraints=Constraints(tp=4))
    tables = {name: state.layout for name, state in plan.program.states.items() if name.startswith(("large", "small"))}
    assert len(tables) == 3
    assert all(layout.startswith("S") for layout in tables.values()), tables


@pytest.mark.slow
def test_texts_of_several_lengths_train_in_one_layout(tmp_path: Path):
    """The script compares every loss and evaluation with one process."""
    printed = execute(str(ROOT / "examples" / "lengths.py"), cwd=tmp_path, timeout=500)
    assert "step 8x64: 8 samples of 64 positions" in printed
    assert "expected step time over the shapes" in printed
    assert (tmp_path / "out" / "lengths.json").exists()


def test_a_script_for_trainer_trains_by_a_plan_and_goes_on(tmp_path: Path):
    example = str(ROOT / "examples" / "finetune_trainer.py")
    for options in ("--steps 10 --mesh tp=2", "--steps 20 --mesh dp=2,zero=1 --resume"):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        printed = execute(*launch, example, *options.split(), cwd=tmp_path, timeout=300)
        assert "eval_loss" in printed and "global batch 8" in printed
    assert {"checkpoint-10", "checkpoint-20", "model.safetensors"} <= {
        p.name for p in (tmp_path / "out/trainer").iterdir()
    }


def test_a_trained_model_generates_as_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The script compares every generated token with the model's own ``generate``."""
    monkeypatch.chdir(tmp_path)
    printed = printed_by("generate", capsys)
    assert "144 generated tokens, all as one process has them" in printed
    assert (tmp_path / "out" / "generate.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_a_policy_that_samples_between_steps_learns_as_in_one_process(name: str, tmp_path: Path):
    """The script compares every answer, loss and gradient with one process in float64."""
    printed = execute(str(ROOT / "examples" / f"{name}.py"), cwd=tmp_path, timeout=500)
    assert "all answers and losses are those of one process" in printed
    assert (tmp_path / "out" / f"{name}.json").exists()


@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_a_policy_on_two_ranks_learns_as_in_one_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Two steps of the scripts above."""
    monkeypatch.chdir(tmp_path)
    printed = printed_by(name, capsys, "--mesh", "pp=1,tp=2,dp=1", "--steps", "2")
    assert "all answers and losses are those of one process" in printed
    assert (tmp_path / "out" / f"{name}.json").exists()


def test_packed_texts_train_as_texts_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The script compares every loss with one process that runs each text alone."""
    monkeypatch.chdir(tmp_path)
    printed = printed_by("finetune_packed", capsys)
    assert (
        "4 attention calls restricted to packed documents; the cost model assumes documents of 39 positions, the mean"
        in " ".join(printed.split())
    )
    assert (tmp_path / "out" / "packed.json").exists()


def test_a_rule_shards_the_users_operator(tmp_path: Path):
    before, after = execute(str(ROOT / "examples" / "custom_rule.py"), cwd=tmp_path).split("--- with a rule")
    assert "example.swiglu" in before
    assert "example.swiglu" not in after


@pytest.mark.slow
def test_training_is_the_models_and_goes_on_under_another_plan(tmp_path: Path):
    def train(processes: int, *arguments: str) -> list[float]:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
        script = str(ROOT / "examples" / "train.py")
        printed = execute(*launcher, script, "--save-every", "2", "--folder", "train", *arguments, cwd=tmp_path)
        return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]

    losses = train(2, "--steps", "3") + train(1, "--steps", "6", "--export", "weights")
    assert len(losses) == 6

    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    expected = []
    for step in range(6):
        loss = model(**batch(step)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-3)
    exported = FileWeights(tmp_path / "weights")
    assert set(exported.names()) <= set(model.state_dict())
    for name in exported.names():
        torch.testing.assert_close(
            exported.read(name, Layout("R"), 1, 0), model.state_dict()[name], rtol=0.02, atol=2e-3
        )


def one_process(
    model: torch.nn.Module,
    dataset: Samples,
    batch_size: int,
    learning_rate: float,
    steps: int,
    warmup: int = 1,
) -> list[float]:
    """The losses of AdamW on the unmodified ``model`` in float64, over the samples that a loader of seed 0 gives."""
    model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    order, losses = SampleOrder(len(dataset), seed=0), []
    for step in range(steps):
        samples = [dataset[i] for i in order.get_indices(range(step * batch_size, (step + 1) * batch_size))]
        inputs = default_collate(samples)
        out = model(**{name: x.double() if x.is_floating_point() else x for name, x in inputs.items()})
        loss = out if isinstance(out, torch.Tensor) else out.loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def logged(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(1200)  # Ray takes its time to start workers on a busy machine
def test_ray_train_restarts_workers_when_one_is_killed(tmp_path: Path):
    """In float64 the losses are those of one process; steps that are done again give the same bits."""
    pytest.importorskip("ray", reason="needs ray[train]")
    psutil = pytest.importorskip("psutil")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ray's own, when it is imported
        example = importlib.import_module("examples.ray_train")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    options = "--workers 4 --mesh pp=2,dp=2 --cpus 0.25 --steps 20 --save-every 3 --report-every 2 --precision fp64"
    command = [sys.executable, str(ROOT / "examples" / "ray_train.py"), *options.split(), "--folder", "run"]
    metrics = tmp_path / "run" / "metrics.jsonl"
    with (tmp_path / "log").open("w+") as log:
        driver = psutil.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            while driver.poll() is None and len(logged(metrics)) < 7:
                time.sleep(0.05)
            processes = [p for p in driver.children(recursive=True) if "RayTrainWorker" in " ".join(p.cmdline())]
            assert len(processes) == 4, processes
            processes[-1].kill()
            status = driver.wait(timeout=1000)
        finally:
            for process in [*driver.children(recursive=True), driver] if driver.is_running() else []:
                process.kill()
        log.seek(0)
        said = log.read()
        assert status == 0, said

    assert said.count("Started training worker group") == 2, "one restart"
    found = logged(metrics)
    assert [m["step"] for m in found] == [*range(1, 21)], "the line of a step that is done again is replaced"
    losses = {m["step"]: m["loss"] for m in found}
    expected = one_process(
        example.build(), example.Points(), example.BATCH, learning_rate=example.LEARNING_RATE, steps=20
    )
    assert [losses[step] for step in range(1, 21)] == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_lightning_trains_a_plan_and_goes_on_under_another(tmp_path: Path):
    """In float64 the losses that Lightning logs are those of one process."""
    pytest.importorskip("lightning", reason="needs lightning")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lightning's own, when it is imported
        example = importlib.import_module("examples.lightning_style")

    def train(devices: int, mesh: str, steps: int) -> list[tuple[int, float]]:
        before = set(tmp_path.glob("run/metrics/*"))
        options = f"--devices {devices} --mesh {mesh} --steps {steps} --precision fp64 --accelerator cpu --folder run"
        execute(str(ROOT / "examples" / "lightning_style.py"), *options.split(), cwd=tmp_path, timeout=500)
        (folder,) = set(tmp_path.glob("run/metrics/*")) - before
        with (folder / "metrics.csv").open() as file:
            return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]

    found = train(4, "pp=2,dp=2", 4) + train(2, "tp=2", 8)
    assert [step for step, _ in found] == [*range(1, 9)]
    expected = one_process(
        example.build(),
        example.Counting(),
        example.BATCH,
        learning_rate=example.LEARNING_RATE,
        warmup=example.WARMUP,
        steps=8,
    )
    # transformers computes its loss in float32, whatever the model's type
    assert [loss for _, loss in found] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_benchmark_ends_with_one_line_of_json(tmp_path: Path):
    printed = execute(
        str(ROOT / "benchmarks" / "overhead.py"), "--quick", "--json", "--only", "dp2/mlp64", cwd=tmp_path
    )
    ratios = json.loads(printed.splitlines()[-1])["ratios"]
    assert list(ratios) == ["dp2/mlp64/ddp", "dp2/mlp64/fsdp"]


@pytest.mark.slow
def test_injected_faults_are_named_and_the_resumed_runs_are_equal(tmp_path: Path):
    printed = execute(str(ROOT / "benchmarks" / "faults.py"), "--seed", "5", "--count", "9", "--json", cwd=tmp_path)
    found = json.loads(printed.splitlines()[-1])
    assert found["injected"] == found["named"] == 9
    assert found["hangs"] == 0
    assert found["resumed"] == found["resumed_equal"] == 8  # a slow rank ends nothing


@pytest.mark.slow
def test_demo(tmp_path: Path):
    printed = execute(str(ROOT / "examples" / "demo.py"), cwd=tmp_path)
    assert printed.count("all losses agree") == 2
