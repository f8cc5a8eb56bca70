"""Layouts that are written in the formats of other frameworks are accepted by these frameworks' own parsers, which
understand them as they are meant, and are read back; every import can be priced.

The frameworks lie in environments of their own, in the folder ``PARSERS`` (by default ``.parsers``); ``make parsers``
builds them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Topology, predict_layout
from partitioner.interop.formats import read_layout, write_layout
from partitioner.interop.layout import TrainingLayout
from tests.helpers.paths import ROOT
from tests.helpers.random_layouts import draw_priced_layout

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.usefixtures("without_baselines"),
]

ENVIRONMENTS = Path(os.environ.get("PARSERS", ROOT / ".parsers"))
COUNT, LAYERS, EXPERTS, LENGTH, WIDTH = 40, 8, 8, 64, 64
ENDINGS = {
    "torchtitan": ".py",
    "deepspeed": ".json",
    "megatron": ".yaml",
    "accelerate": ".yaml",
    "transformers": ".json",
}
# fields that follow from others: with an axis that a format lacks, they are those of fewer devices
FOLLOWS = {"dp", "dp_shard", "dp_replicate", "zero", "microbatches", "global_batch", "devices", "etp"}
LAYOUTS = [draw_priced_layout(seed, LAYERS, EXPERTS if seed % 2 else 0, LENGTH) for seed in range(COUNT)]


class Block(nn.Module):
    """Attention, and a product or experts with a router."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.router = nn.Linear(WIDTH, experts, bias=False) if experts else None
        shape = (experts, WIDTH, WIDTH) if experts else (WIDTH, WIDTH)
        self.up, self.down = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (8, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        if self.router is None:
            return x + torch.relu(x @ self.up) @ self.down
        return x + self.spread(x.flatten(0, 1), self.router).view_as(x)

    def spread(self, x: Tensor, router: nn.Module) -> Tensor:
        weights, chosen = router(x).softmax(-1).topk(2, -1)
        by_expert, order = chosen.reshape(-1).sort()
        ends = torch.cumsum(torch.histc(by_expert.float(), bins=EXPERTS, min=0, max=EXPERTS - 1), 0, dtype=torch.int32)
        inner = torch.relu(torch._grouped_mm(x[order // 2], self.up, offs=ends))
        made = torch._grouped_mm(inner * weights.reshape(-1)[order].unsqueeze(-1), self.down, offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=x.device)
        return made[back].view(-1, 2, x.shape[-1]).sum(1)


class Model(nn.Module):
    """Blocks of one kind, and a loss."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(experts) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def find_python(framework: str) -> str:
    """The interpreter that has the framework; the test is skipped where there is none."""
    if framework in ("accelerate", "transformers"):
        pytest.importorskip(framework)
        return sys.executable
    name = {"megatron": "megatron-core"}.get(framework, framework)
    python = ENVIRONMENTS / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{framework} is not installed in {ENVIRONMENTS}: `make parsers` does it")
    return str(python)


def parse_all(framework: str, folder: Path) -> dict[str, dict[str, Any]]:
    """What the framework's own parser says about each file of ``folder``, from one process."""
    script = ROOT / "tests" / "integration" / "framework_parsers.py"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PARSED_LAYERS": str(LAYERS)}
    done = subprocess.run(
        [find_python(framework), str(script), framework, str(folder)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def different_facts(layout: TrainingLayout, back: TrainingLayout, missing: set[str]) -> dict[str, tuple[Any, Any]]:
    """The fields of a layout that are others after the way through a file, and that the writer did not list."""
    lost = {"pp", "tp", "cp", "dp"} & missing
    skipped = missing | (FOLLOWS if lost else set())
    if missing & {"microbatch_size", "microbatches", "global_batch"}:
        skipped |= {"microbatches", "global_batch"}
    if "zero" in missing:
        skipped |= {"dp_shard", "dp_replicate"}
    back = back if lost else back.at(layout.devices or 1)
    facts = {name: value for name, value in layout.facts.items() if name not in skipped}
    return {name: (value, back.facts[name]) for name, value in facts.items() if value != back.facts[name]}


def understood_facts(back: TrainingLayout, found: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The facts that the framework understood otherwise than our own reader."""
    own = back.facts | {"sharded": bool(back.zero)}
    return {name: (own[name], value) for name, value in found.items() if own[name] is not None and own[name] != value}


@pytest.mark.parametrize("framework", ENDINGS)
def test_own_parsers_accept_what_is_written(framework: str, tmp_path: Path) -> None:
    missing: dict[str, set[str]] = {}
    for index, layout in enumerate(LAYOUTS):
        path = tmp_path / f"plan{index:02}{ENDINGS[framework]}"
        missing[path.name] = {each.option for each in write_layout(layout, framework, path)}
        devices = layout.devices
        path.with_name(f"{path.name}.devices").write_text(str(devices))
    parsed = parse_all(framework, tmp_path)
    assert len(parsed) == COUNT
    assert {name: each["error"] for name, each in parsed.items() if "error" in each} == {}
    for layout, (name, each) in zip(LAYOUTS, sorted(parsed.items()), strict=True):
        back = read_layout(tmp_path / name, framework)
        assert different_facts(layout, back, missing[name]) == {}, name
        full = back if {"pp", "tp", "cp", "dp"} & missing[name] else back.at(layout.devices or 1)
        assert understood_facts(full, each["facts"]) == {}, name


@pytest.mark.parametrize("framework", ENDINGS)
def test_what_is_read_back_is_priced(framework: str, tmp_path: Path) -> None:
    models = {}
    with torch.device("meta"):
        models = {experts: Model(experts) for experts in (0, EXPERTS)}
    for index, layout in enumerate(LAYOUTS):
        path = tmp_path / f"plan{index:02}{ENDINGS[framework]}"
        write_layout(layout, framework, path)
        back = read_layout(path, framework)
        size, dp = back.microbatch_size or 1, back.dp or layout.dp or 1
        devices = back.devices or layout.devices or 1
        inputs = {
            "x": torch.zeros(back.global_batch or size * dp * (back.microbatches or 1), LENGTH, WIDTH, device="meta")
        }
        found = predict_layout(
            back, models[EXPERTS if index % 2 else 0], Topology.local(devices), inputs, compare=False
        )
        assert found.step_time > 0 and max(found.plan.estimate.memory) > 0, path.name
