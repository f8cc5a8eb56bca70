"""A training step on one GPU: ours against PyTorch's own ways to run the unmodified model.

Contenders run one after another, each in a process with a time-out: the Hugging Face model operator by operator and
through ``torch.compile``, FSDP2 and tensor-parallel DTensor (as they are, and compiled), and ours operator by operator,
compiled, and recorded as CUDA graphs. The models are a Llama of 0.5B and of 1.2B parameters, a small Mixtral and a ViT,
of random weights. A step is forward, backward and AdamW. Parameters are computed with in bfloat16 and updated in
float32. What fails or takes too long is reported, and the rest goes on.

    python benchmarks/gpu_step.py [--only llama-0.5b ...] [--contenders eager ...] [--budget 420] [--docs FILE] [--cpu]

A table goes to the standard error, and with ``--docs`` to a Markdown page. The last line of the standard output is one
line of JSON. ``--cpu`` runs tiny models in float32 on the CPU, which checks the script and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partitioner import Constraints, Engine, Plan, Topology, partition, prepare
from partitioner.runtime.files import write_text

Step = Callable[[], float]  # one whole step; the loss

WARM_UP, STEPS = 4, 20
SIZES = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"


@dataclass(frozen=True)
class Job:
    """A Hugging Face model of random weights, and the shape of its batch. ``seq``: tokens of a sample; 0: images."""

    family: str
    options: dict[str, Any]
    batch: int
    seq: int

    def build(self, device: str) -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

        torch.manual_seed(0)
        config = AutoConfig.for_model(self.family, **self.options)
        kind = AutoModelForCausalLM if self.seq else AutoModelForImageClassification
        if self.seq:
            config.use_cache = False
        with torch.device(device):
            model: nn.Module = kind.from_config(config)
        return model.train()

    def inputs(self, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        if self.seq:
            tokens = torch.randint(self.options["vocab_size"], (self.batch, self.seq), generator=generator).to(device)
            return {"input_ids": tokens, "labels": tokens.clone()}
        size = self.options["image_size"]
        pixels = torch.randn(self.batch, 3, size, size, generator=generator).to(device, dtype)
        return {"pixel_values": pixels, "labels": torch.arange(self.batch, device=device) % 2}


def _decoder(sizes: Sequence[int], kv_heads: int, vocab: int, **more: int) -> dict[str, Any]:
    return dict(zip(SIZES, sizes, strict=True)) | dict(num_key_value_heads=kv_heads, vocab_size=vocab) | more


JOBS = {
    "llama-0.5b": Job("llama", _decoder((1536, 4096, 14, 12), 6, 32000), 2, 2048),
    "llama-1.2b": Job("llama", _decoder((2048, 8192, 16, 32), 8, 65536), 2, 2048),
    "mixtral": Job(
        "mixtral", _decoder((1024, 3584, 6, 16), 8, 32000, num_local_experts=8, num_experts_per_tok=2), 4, 1024
    ),
    "vit": Job("vit", dict(zip(SIZES, (768, 3072, 12, 12), strict=True)) | dict(image_size=224), 64, 0),
}
TINY = {
    "llama-0.5b": Job("llama", _decoder((32, 64, 2, 4), 2, 64), 2, 16),
    "mixtral": Job("mixtral", _decoder((32, 64, 2, 4), 2, 64, num_local_experts=4, num_experts_per_tok=2), 2, 16),
    "vit": Job("vit", dict(zip(SIZES, (32, 64, 2, 4), strict=True)) | dict(image_size=32, patch_size=16), 4, 0),
}


@dataclass(frozen=True)
class Machine:
    """Where contenders run: ``device`` and the type in which they compute; ``backend`` of ``torch.compile``."""

    device: str
    dtype: torch.dtype
    backend: str

    @classmethod
    def choose(cls, cpu: bool) -> Machine:
        return cls("cpu", torch.float32, "aot_eager") if cpu else cls("cuda", torch.bfloat16, "inductor")

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


@dataclass
class Row:
    """One contender on one model. Times in seconds, memory in bytes; ``kernels``: of a step (operators on a CPU);
    ``mfu``: fraction of the device's peak; ``flops``: of a step, counted on the plain model; ``error``: why there
    are no figures."""

    job: str
    contender: str
    step_s: float = 0.0
    peak_bytes: int = 0
    mfu: float = 0.0
    kernels: int = 0
    loss: float = 0.0
    flops: int = 0
    predicted_s: float = 0.0
    predicted_bytes: int = 0
    note: str = ""
    error: str = ""


# --- contenders -------------------------------------------------------------------------------------------------------


def _adamw(parameters: Any, machine: Machine) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-5, fused=machine.device == "cuda" or None)


class WideUpdates:
    """AdamW on float32 copies of parameters in a shorter type, as ours keeps them."""

    def __init__(self, model: nn.Module, machine: Machine) -> None:
        self.short = [p for p in model.parameters() if p.requires_grad]
        self.wide = [nn.Parameter(p.detach().float()) for p in self.short]
        self.optimizer = _adamw(self.wide, machine)

    def step(self) -> None:
        for short, wide in zip(self.short, self.wide, strict=True):
            wide.grad = None if short.grad is None else short.grad.float()
            short.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for short, wide in zip(self.short, self.wide, strict=True):
                short.copy_(wide)


def _step_of(model: Callable[..., Any], inputs: dict[str, Tensor], update: Callable[[], None]) -> Step:
    def step() -> float:
        loss = model(**inputs).loss
        loss.backward()
        update()
        return float(loss.detach().float())

    return step


def run_plain(job: Job, machine: Machine, plan: str, compiled: bool = False) -> Step:
    """The model as it is, in the type of the machine."""
    model = job.build(machine.device).to(machine.dtype)
    updates = WideUpdates(model, machine)
    run = torch.compile(model, backend=machine.backend) if compiled else model
    return _step_of(run, job.inputs(machine.device, machine.dtype), updates.step)


def _layers(model: nn.Module) -> nn.ModuleList:
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def _join_alone(machine: Machine) -> Any:
    """A device mesh of this one process."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group(
        "nccl" if machine.device == "cuda" else "gloo", rank=0, world_size=1, store=dist.HashStore()
    )
    return init_device_mesh(machine.device, (1,))


def run_fsdp(job: Job, machine: Machine, plan: str, compiled: bool = False) -> Step:
    """FSDP2 over one rank: float32 parameters, computed with in the type of the machine."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, model = _join_alone(machine), job.build(machine.device)
    policy = MixedPrecisionPolicy(param_dtype=machine.dtype, reduce_dtype=torch.float32)
    for layer in _layers(model):
        if compiled:
            layer.compile(backend=machine.backend)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = _adamw(model.parameters(), machine)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return _step_of(model, job.inputs(machine.device, machine.dtype), update)


COLUMNS = "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1"
ROWS = "o_proj", "down_proj", "fc2"


def run_dtensor(job: Job, machine: Machine, plan: str, compiled: bool = False) -> Step:
    """Tensor parallelism over one rank by DTensor: its overhead, and its layouts, without communication."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, model = _join_alone(machine), job.build(machine.device).to(machine.dtype)
    for layer in _layers(model):
        names = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
        styles: dict[str, Any] = {n: ColwiseParallel() for n in names if n.endswith(COLUMNS)}
        parallelize_module(layer, mesh, styles | {n: RowwiseParallel() for n in names if n.endswith(ROWS)})
        if compiled:
            layer.compile(backend=machine.backend)
    updates = WideUpdates(model, machine)
    return _step_of(model, job.inputs(machine.device, machine.dtype), updates.step)


def run_ours(job: Job, machine: Machine, plan: str, execution: str) -> Step:
    """The plan of one rank under ``execution``."""
    compile = machine.backend if execution == "compiled" else None
    model = job.build(machine.device)
    engine = Engine(Plan.load(plan), model, execution=execution, compile=compile)  # type: ignore[arg-type]
    del model
    optimizer = _adamw(engine.parameters(), machine)
    inputs = job.inputs(machine.device, torch.float32)

    def step() -> float:
        loss = engine.step(inputs)
        optimizer.step()
        assert loss is not None
        return float(loss)

    step.engine = engine  # type: ignore[attr-defined]  # for its report
    return step


Mode = Literal["eager", "compiled", "graph"]
OURS: dict[str, Mode] = {  # contender -> its execution mode, for which the plan predicts a step time
    "ours eager": "eager",
    "ours compiled": "compiled",
    "ours replayed": "graph",
}
CONTENDERS: dict[str, Callable[[Job, Machine, str], Step]] = {
    "eager": run_plain,
    "ours eager": partial(run_ours, execution="eager"),
    "torch.compile": partial(run_plain, compiled=True),
    "ours compiled": partial(run_ours, execution="compiled"),
    "ours replayed": partial(run_ours, execution="graph"),
    "FSDP2": run_fsdp,
    "FSDP2 compiled": partial(run_fsdp, compiled=True),
    "DTensor": run_dtensor,
    "DTensor compiled": partial(run_dtensor, compiled=True),
}


# --- measuring, in a process of its own -------------------------------------------------------------------------------


def count_kernels(step: Step, machine: Machine) -> int:
    """Kernels of one step on a GPU, without copies; operators of PyTorch on a CPU."""
    from torch.autograd.profiler import DeviceType
    from torch.profiler import ProfilerActivity, profile

    cuda = machine.device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        step()
        machine.synchronize()
    events = [e.name for e in found.events() or () if e.device_type == (DeviceType.CUDA if cuda else DeviceType.CPU)]
    return sum(not n.startswith(("Memcpy", "Memset")) if cuda else n.startswith("aten::") for n in events)


def measure(name: str, contender: str, cpu: bool, plan: str, steps: int, out: str) -> None:
    """Run one contender, and write its :class:`Row` to the file ``out`` as JSON."""
    from torch.utils.flop_counter import FlopCounterMode

    job, machine, row = (TINY if cpu else JOBS)[name], Machine.choose(cpu), Row(name, contender)
    try:
        torch.set_float32_matmul_precision("high")
        step = CONTENDERS[contender](job, machine, plan)
        row.loss = step()  # of the first weights: all contenders have the same
        for _ in range(WARM_UP - 1):
            step()
        machine.synchronize()
        if not cpu:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            step()
            machine.synchronize()
            times.append(time.perf_counter() - start)
        row.step_s = statistics.median(times)
        row.peak_bytes = 0 if cpu else torch.cuda.max_memory_allocated()
        row.kernels = count_kernels(step, machine)
        if contender == "eager":
            with FlopCounterMode(display=False) as counter:
                step()
            row.flops = counter.get_total_flops()
        if (engine := getattr(step, "engine", None)) is not None:
            row.note = "; ".join(map(str, engine.execution_report.values()))
    except Exception as error:
        row.error = f"{type(error).__name__}: {' '.join(str(error).split()[:60])}"
        traceback.print_exc()
    write_text(Path(out), json.dumps(asdict(row)))
    sys.stdout.flush()
    os._exit(0)  # process groups and compilers need not be taken down


def make_plan(name: str, cpu: bool, path: str) -> None:
    """Plan one model for one rank, and save the plan and its estimates for each execution mode."""
    job = (TINY if cpu else JOBS)[name]
    topology = Topology.local(1) if cpu else Topology.detect()
    model = job.build("meta")
    inputs = job.inputs("cpu", torch.float32)
    prepared = prepare(model, inputs, precision="fp32" if cpu else "bf16")
    about = {}
    for contender, execution in OURS.items():
        fixed = Constraints(dp=1, tp=1, pp=1, microbatch_size=job.batch, recompute="none", execution=execution)
        plan = partition(prepared, topology, constraints=fixed)
        about[contender] = {"step_s": plan.estimate.step_time, "bytes": plan.estimate.memory[0]}
    plan.save(path)  # the programs are the same
    write_text(Path(path + ".about"), json.dumps(about))


# --- the parent -------------------------------------------------------------------------------------------------------


def call(function: Callable[..., None], *arguments: Any, timeout_s: float) -> str:
    """Run ``function`` in a new process; why it did not end well, or an empty text."""
    process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments)
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
        return f"not ready after {timeout_s:.0f} s"
    return "" if process.exitcode == 0 else f"the process ended with {process.exitcode}"


def peak_of(cpu: bool) -> float:
    """FLOP/s of the device in the type of the contenders."""
    topology = Topology.local(1) if cpu else Topology.detect()
    peaks = topology.types[topology.devices[0].kind].peak
    return peaks["fp32" if cpu else "bf16"]


def compare(names: Sequence[str], contenders: Sequence[str], cpu: bool, budget_s: float, steps: int) -> list[Row]:
    """The rows of all contenders on all models, as far as the time goes."""
    multiprocessing.get_context("forkserver")
    multiprocessing.set_forkserver_preload(["torch", "transformers", "benchmarks.gpu_step"])
    end, rows = time.monotonic() + budget_s, []
    peak = peak_of(cpu)
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            plan = str(Path(folder) / f"{name}.json")
            share = (end - time.monotonic()) / (len(names) - number)
            until = time.monotonic() + share
            failure = call(make_plan, name, cpu, plan, timeout_s=share / 3)
            about: dict[str, dict[str, Any]] = {}
            flops = 0
            with contextlib.suppress(OSError):
                about = json.loads(Path(plan + ".about").read_text())
            for place, contender in enumerate(contenders):
                row, out = Row(name, contender), Path(folder) / "row.json"
                out.unlink(missing_ok=True)
                if failure and contender.startswith("ours"):
                    row.error = f"no plan: {failure}"
                    rows.append(row)
                    continue
                left = max(until - time.monotonic(), 0.0)
                if left < 1:
                    row.error = "no time left"
                    rows.append(row)
                    continue
                # a slow contender leaves half of what the others have
                allowed = left if place == len(contenders) - 1 else left / 2
                wrong = call(measure, name, contender, cpu, plan, steps, str(out), timeout_s=allowed)
                if out.exists():
                    row = Row(**json.loads(out.read_text()))
                else:
                    row.error = wrong or "it wrote no figures"
                flops = flops or row.flops
                if row.step_s:
                    row.mfu = flops / row.step_s / peak
                if contender in about:
                    row.predicted_s, row.predicted_bytes = about[contender]["step_s"], about[contender]["bytes"]
                rows.append(row)
                print(f"{name}, {contender}: {row.error or f'{row.step_s * 1e3:.2f} ms'}", file=sys.stderr, flush=True)
    return rows


def write_table(rows: Sequence[Row]) -> str:
    """A Markdown table: step time, its ratio to ``torch.compile``, memory, MFU, kernels, loss, and the prediction."""
    lines = [
        "| model | contender | step | of `torch.compile` | memory | MFU | kernels | first loss | predicted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    compiled = {r.job: r.step_s for r in rows if r.contender == "torch.compile" and r.step_s}
    for row in rows:
        if row.error:
            lines.append(f"| {row.job} | {row.contender} | {row.error.replace('|', '/')} | | | | | | |")
            continue
        ratio = f"{row.step_s / compiled[row.job]:.2f}" if row.job in compiled else ""
        memory = f"{row.peak_bytes / 1e9:.2f} GB" if row.peak_bytes else ""
        predicted = f"{row.predicted_s * 1e3:.2f} ms, {row.predicted_bytes / 1e9:.2f} GB" if row.predicted_s else ""
        lines.append(
            f"| {row.job} | {row.contender} | {row.step_s * 1e3:.2f} ms | {ratio} | {memory} | {row.mfu:.1%} "
            f"| {row.kernels} | {row.loss:.4f} | {predicted} |"
        )
    return "\n".join(lines)


def write_page(rows: Sequence[Row], device: str, steps: int) -> str:
    """The page for the documentation."""
    notes = [f"- {r.job}, {r.contender}: {r.note}" for r in rows if r.note]
    return (
        "# A step on one GPU\n\n"
        f"Written by `python benchmarks/gpu_step.py --docs FILE` on {device}, torch {torch.__version__}, "
        f"{time.strftime('%d %B %Y')}.\nMedians of {steps} steps with AdamW. Compiled peers compile the model, not the "
        "optimizer.\n\n" + write_table(rows) + "\n\n" + "\n".join([*notes, ""])
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(JOBS), help="models; by default all")
    parser.add_argument("--contenders", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--budget", type=float, default=420.0, help="seconds for everything")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--docs", help="a Markdown file for the table")
    parser.add_argument("--cpu", action="store_true", help="tiny models on the CPU, to check the script")
    options = parser.parse_args(arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if not options.cpu and not torch.cuda.is_available():
        parser.error("there is no GPU; expected one, or --cpu, which checks the script with tiny models")
    names = [n for n in (TINY if options.cpu else JOBS) if options.only is None or n in options.only]
    rows = compare(names, options.contenders, options.cpu, options.budget, options.steps)
    device = platform.processor() or "a CPU" if options.cpu else torch.cuda.get_device_name()
    print(write_table(rows), file=sys.stderr)
    if options.docs:
        write_text(Path(options.docs), write_page(rows, device, options.steps))
    print(json.dumps({"device": device, "torch": torch.__version__, "rows": [asdict(r) for r in rows]}))
    return int(any(r.error for r in rows))


if __name__ == "__main__":
    from benchmarks import gpu_step  # processes find its functions under this name

    sys.exit(gpu_step.main())
