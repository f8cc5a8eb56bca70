"""Profiles: fits find what synthetic times were made from; a measured machine is a topology that plans use."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from partitioner import Constraints, Topology, partition
from partitioner.cli.app import app
from partitioner.cost.call.collectives import collective_time, moved_share
from partitioner.cost.call.operators import Kernel
from partitioner.cost.call.roofline import kernel_time, matmul_efficiency, memory_rate
from partitioner.errors import TopologyError
from partitioner.profile import transfers
from partitioner.profile.fit import (
    FitError,
    device_errors,
    fit_concurrent,
    fit_device,
    fit_level,
    fit_line,
    fit_overlap,
)
from partitioner.profile.host_overhead import open_issuing_plan, time_issuing
from partitioner.profile.kernels import SIZES, build_case_tensors, list_attention_cases, list_product_cases, on_rows
from partitioner.profile.profile import profile_machine
from partitioner.profile.report import machine_yaml, profile_parts
from partitioner.profile.timer import CollectiveSample, KernelSample, Measurements, Overlap
from partitioner.runtime.comm.group import SoloGroup
from partitioner.runtime.launch.process_pool import LocalRanks
from partitioner.topology import axis_group
from partitioner.topology.hardware import COLLECTIVES, DeviceType, Level
from tests.helpers.paths import ROOT

positive = st.floats(0.1, 10.0)
SIZES_BYTES = [2.0**k for k in range(14, 27, 2)]


def device(launch: float = 2e-6, bandwidth: float = 1e10, peak: float = 1e11, low: float = 0.3) -> DeviceType:
    return DeviceType(
        memory=1 << 30,
        peak={"fp32": peak, "bf16": peak / 4},
        memory_bandwidth=bandwidth,
        launch=launch,
        matmul_efficiency=((16, low), (64, (1 + low) / 2), (256, 1.0)),
        attention_efficiency=0.4,
        memory_efficiency={"default": 0.7, "pointwise": 1.0, "norm": 0.3, "matmul": 1.0},
    )


def kernels() -> list[Kernel]:
    """Those of a profile, as far as the fit tells them apart."""
    made = [Kernel("pointwise", 0.0)]
    made += [Kernel(kind, size) for kind in ("pointwise", "norm", "default") for size in SIZES_BYTES]
    for precision, dims in (("fp32", (16, 64, 256)), ("bf16", (256,))):
        for smallest in dims:
            for large in (512, 1024):
                num_bytes = 4.0 * (2 * smallest * large + large * large)
                flops = 2.0 * smallest * large * large
                made.append(Kernel("matmul", num_bytes, 0.0, flops, smallest, precision))
    return [*made, Kernel("attention", 1e6, 0.0, 1e9, 64)]


def times(of: DeviceType, disturbed: int = 0) -> list[KernelSample]:
    """What ``of`` takes; every ``disturbed``-th time is three times as long."""
    return [
        KernelSample(k.kind, k, kernel_time(k, of) * (3 if disturbed and i % disturbed == 3 else 1))
        for i, k in enumerate(kernels())
    ]


@given(start=positive, per=positive, worse=st.floats(2, 100), place=st.integers(0, 6))
def test_a_line_is_found_whatever_two_of_nine_points_say(start: float, per: float, worse: float, place: int):
    sizes = [float(k) for k in range(1, 10)]
    seconds = [start + per * size for size in sizes]
    for k in (place, place + 2):
        seconds[k] *= worse
    assert fit_line(sizes, seconds) == pytest.approx((start, per), rel=1e-6)


@given(seconds=st.lists(positive, min_size=1, max_size=6))
def test_a_line_never_has_a_negative_start_or_slope(seconds: list[float]):
    start, per = fit_line([float(i + 1) for i in range(len(seconds))], seconds)
    assert start >= 0 and per >= 0


@settings(max_examples=25)
@given(launch=positive, bandwidth=positive, peak=positive, low=st.floats(0.1, 0.9))
def test_a_device_is_found_from_its_own_times(launch: float, bandwidth: float, peak: float, low: float):
    made = device(1e-6 * launch, 1e10 * bandwidth, 1e11 * peak, low)
    found = fit_device(times(made), memory=made.memory)
    for sample in times(made):
        assert kernel_time(sample.kernel, found) == pytest.approx(sample.seconds, rel=0.1)
    assert found.launch == pytest.approx(made.launch, rel=0.01)
    assert found.memory_bandwidth == pytest.approx(made.memory_bandwidth, rel=0.01)


def test_a_few_disturbed_times_do_not_count():
    made = device()
    found = fit_device(times(made, disturbed=9), memory=made.memory)
    assert found.memory_bandwidth == pytest.approx(made.memory_bandwidth, rel=0.1)
    assert found.peak["fp32"] == pytest.approx(made.peak["fp32"], rel=0.2)


def test_more_work_in_every_dim_is_never_slower():
    samples = [s for s in times(device()) if s.kernel.precision == "fp32"]
    slow = [replace(s, seconds=3 * s.seconds) if s.kernel.smallest == 64 else s for s in samples]
    found = fit_device(slow, memory=1)
    curve = [matmul_efficiency(k, found) for k in (16, 64, 256)]
    assert curve == sorted(curve)


def test_caches_bound_only_the_kinds_that_are_fast_enough():
    made = device().model_copy(
        update={
            "memory_efficiency": {"default": 0.5, "pointwise": 4.0, "special": 0.5},
            "memory_sizes": ((2.0**16, 4.0), (2.0**20, 2.0), (2.0**24, 1.0)),
        }
    )
    assert memory_rate("pointwise", made, 2.0**16) == 4 * made.memory_bandwidth
    assert memory_rate("pointwise", made, 2.0**18) == pytest.approx(3 * made.memory_bandwidth)
    assert memory_rate("pointwise", made, 2.0**26) == made.memory_bandwidth
    assert memory_rate("special", made, 2.0**16) == memory_rate("special", made, 2.0**26)
    assert memory_rate("pointwise", made) == memory_rate("pointwise", made, 2.0**16), "the best size"


@given(latency=positive, bandwidth=positive, start=positive, bus=positive)
def test_a_level_is_found_from_its_own_times(latency: float, bandwidth: float, start: float, bus: float):
    latency, start, bandwidth, bus = 1e-4 * latency, 1e-4 * start, 1e9 * bandwidth, 1e9 * bus
    samples = [CollectiveSample("send", 2, int(b), latency + b / bandwidth) for b in SIZES_BYTES]
    for op in COLLECTIVES:
        for n in (2, 4):
            samples += [CollectiveSample(op, n, int(b), n * start + moved_share(op, n) * b / bus) for b in SIZES_BYTES]
    level = fit_level(samples, "wire")
    topology = Topology(name="four", nodes=[{"type": "d", "devices": 4}], types={"d": device()}, levels=[level])
    assert level.bandwidth == pytest.approx(bandwidth)
    for op in COLLECTIVES:
        for n, mesh in ((2, {"dp": 2, "tp": 2}), (4, {"tp": 4})):
            expected = n * start + moved_share(op, n) * 1e6 / bus
            assert collective_time(op, 1e6, axis_group(topology, mesh, "tp")) == pytest.approx(expected)


@given(st.lists(st.floats(0.8, 1.2), min_size=3, max_size=3), st.sampled_from(COLLECTIVES))
def test_times_that_do_not_grow_say_nothing_of_a_bandwidth(noise: list[float], op: str):
    sizes = (2.0**14, 2.0**18, 2.0**21)
    samples = [CollectiveSample("send", 2, int(b), 1e-4 + b / 3e9) for b in sizes]
    samples += [CollectiveSample(op, 2, int(b), 1.3e-3 * n) for b, n in zip(sizes, sorted(noise)[::-1], strict=True)]
    level = fit_level(samples, "wire")
    ((_, start, bandwidth),) = getattr(level, op)
    assert bandwidth <= level.bandwidth * (1 + 1e-9) == pytest.approx(3e9 * (1 + 1e-9))
    assert 0 <= start <= 1.6e-3
    late = fit_level([CollectiveSample("send", 2, int(b), 1e-3) for b in sizes], "wire")
    assert late.bandwidth == pytest.approx(2**21 / 1e-3)  # what was seen to pass


def test_what_was_not_measured_follows_from_all_reduce():
    plain = Level(name="wire", bandwidth=1e9, latency=1e-4, all_reduce=((2, 2e-4, 5e8),))
    measured = plain.model_copy(update={"all_gather": ((2, 1e-3, 1e9),)})
    gathers, scatters = [], []
    for level in (plain, measured):
        two = Topology(name="two", nodes=[{"type": "d", "devices": 2}], types={"d": device()}, levels=[level])
        group = axis_group(two, {"tp": 2}, "tp")
        gathers.append(collective_time("all_gather", 1e6, group))
        scatters.append(collective_time("reduce_scatter", 1e6, group))
    assert gathers == pytest.approx([1e-4 + 1e-3, 1e-3 + 5e-4])
    assert scatters[0] == scatters[1]


def test_overlap_and_sharing():
    assert fit_overlap([Overlap(2.0, 1.0, 2.5)]) == 1.5
    assert fit_overlap([Overlap(2.0, 1.0, 1.9)]) == 1.0, "never faster for it"
    assert fit_overlap([]) == 1.0
    assert fit_concurrent(Measurements(few_s=[1.0, 1.0, 5.0], all_s=[1.25, 1.25, 5.0]), cores=2) == 1.6
    assert fit_concurrent(Measurements(), cores=2) is None


def test_a_device_without_products_is_refused():
    with pytest.raises(TopologyError, match="times of matrix products"):
        fit_device([KernelSample("add", Kernel("pointwise", 1e6), 1e-3)], memory=1)
    with pytest.raises(TopologyError, match="times of messages"):
        fit_level([], "wire")


def test_every_case_can_be_built_and_run():
    cpu, sizes = torch.device("cpu"), SIZES["cpu", True]
    small = replace(sizes, knots=(4,), large=(8,), rows=(2,), attention=((1, 2, 8, 16),), precisions=("fp32", "bf16"))
    for case in [*list_product_cases(small), *list_attention_cases(small), *on_rows(small)]:
        built = build_case_tensors(case, cpu)
        assert built.kernel.num_bytes > 0
        built.run()
        built.run()


# --- ranks that share cores -------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def _four(concurrent: float | None) -> Topology:
    return Topology(
        name="four",
        nodes=[{"type": "d", "devices": 4, "concurrent": concurrent}],
        types={"d": device()},
        levels=[Level(name="wire", bandwidth=1e9, latency=1e-6)],
    )


def _plan(concurrent: float | None, **mesh: int):
    return partition(Tiny(), _four(concurrent), (torch.randn(8, 64),), constraints=Constraints(**mesh))


def test_ranks_that_share_cores_take_turns():
    mesh = dict(pp=1, dp=4, tp=1, microbatch_size=2)
    alone, shared = _plan(None, **mesh).estimate, _plan(2.0, **mesh).estimate
    work = alone.breakdown["compute"] + alone.breakdown["optimizer"]
    assert shared.breakdown["contention"] == pytest.approx(work)
    assert shared.step_time == pytest.approx(alone.step_time + work)
    assert sum(shared.breakdown.values()) == pytest.approx(shared.step_time)


def test_stages_that_wait_for_each_other_leave_cores_to_each_other():
    """One microbatch is on one stage at a time; with several, those that compute at a time share two cores."""
    mesh = dict(pp=4, dp=1, tp=1)
    one, many = dict(**mesh, microbatch_size=8), dict(**mesh, microbatch_size=1)
    alone, shared = _plan(None, **one).estimate, _plan(2.0, **one).estimate
    updates = shared.breakdown["optimizer"]  # of all stages, at the same time
    assert shared.breakdown["contention"] == pytest.approx(updates)
    assert shared.step_time == pytest.approx(alone.step_time + updates)
    alone, shared = _plan(None, **many).estimate, _plan(2.0, **many).estimate
    assert updates < shared.breakdown["contention"] < alone.step_time
    assert sum(shared.breakdown.values()) == pytest.approx(shared.step_time)


class _Clock:
    """A clock that moves by what is done: products, and a transfer that takes longer where the ranks come from one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.fresh = 0.0, True
        monkeypatch.setattr(transfers.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(transfers.torch, "mm", self.product)

    def product(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.now += 1e-4
        self.fresh = False

    def transfer(self, times: int = 1) -> None:
        self.now += times * (1e-5 if self.fresh else 3e-4)
        self.fresh = True


def test_a_transfer_takes_what_computation_takes_longer_with_it(monkeypatch: pytest.MonkeyPatch):
    clock = _Clock(monkeypatch)
    timer = transfers._Timer(SoloGroup(), torch.device("cpu"))

    def collective(compute: Callable[[], None]) -> None:
        compute()
        clock.transfer()

    def there_and_back(compute: Callable[[], None]) -> None:
        compute()  # this rank's; its peer's comes before the answer
        clock.transfer()
        compute()
        clock.transfer()

    assert timer.seconds(transfers._TransferRun(collective), 5, 0.1) == pytest.approx(3e-4)
    assert timer.seconds(transfers._TransferRun(there_and_back, 2), 5, 0.1) == pytest.approx(3e-4)
    hidden = transfers._TransferRun(lambda compute: compute() or clock.transfer(0))
    assert timer.seconds(hidden, 5, 0.1) == 0.0


# --- the machine at hand ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_quick_profile_is_a_topology_that_plans(tmp_path: Path):
    steps: list[tuple[str, int, int]] = []
    found = profile_machine(2, device="cpu", quick=True, progress=lambda *step: steps.append(step))
    path = found.save(tmp_path / "machine.yaml")
    assert "# Median error" in path.read_text()
    topology = Topology.load(path)
    assert topology.num_devices == 2
    assert [n for n, _, _ in topology.levels[0].all_gather] == [2]
    plan = partition(Tiny(), topology, (torch.randn(8, 64),))
    assert plan.estimate.step_time > 0
    assert [done for _, done, _ in steps] == list(range(steps[0][2] + 1))
    assert {"matmul fp32", "pointwise", "all_reduce over 2"} <= {e.what for e in found.errors}


def test_a_file_says_what_was_measured_and_keeps_every_figure(tmp_path: Path):
    topology = _four(1.5)
    text = machine_yaml(topology, [], "a machine")
    (tmp_path / "machine.yaml").write_text(text)
    assert text.startswith("# Measured by `partitioner profile` on a machine.")
    assert Topology.load(tmp_path / "machine.yaml") == topology


def test_fits_that_are_far_off_are_said():
    errors = [FitError("softmax", 6, 5.42), FitError("norm", 6, 0.05)]
    parts = [str(part) for part in profile_parts(_four(1.5), errors)]
    warning = next(part for part in parts if part.startswith("Warning"))
    assert "softmax (542%)" in warning and "norm" not in warning and "without --quick" in warning
    assert "# Warning: " in machine_yaml(_four(1.5), errors, "a machine")
    assert "Warning" not in machine_yaml(_four(1.5), errors[1:], "a machine")


def test_an_interrupted_profile_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalRanks, "call", interrupted)
    result = CliRunner().invoke(app, ["profile", "-o", str(tmp_path / "machine.yaml"), "--ranks", "2"])
    assert result.exit_code == 130
    assert list(tmp_path.iterdir()) == []


def test_ranks_and_devices_that_are_not_there():
    with pytest.raises(TopologyError, match="profile of 0 ranks; expected at least 1"):
        profile_machine(0)
    with pytest.raises(TopologyError, match="unknown device 'tpu'; expected 'cpu' or 'cuda'"):
        profile_machine(2, device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(TopologyError, match="torch sees no GPU"):
            profile_machine(2, device="cuda")


# --- GPUs -------------------------------------------------------------------------------------------------------------


@cache
def h200() -> tuple[list[KernelSample], float]:
    """What a profile measured on an H200 (torch 2.11, CUDA 13), and the seconds of its host for an operator."""
    data = json.loads((ROOT / "tests" / "helpers" / "h200_kernels.json").read_text())
    samples = []
    for row in data["kernels"]:
        one = {name: math.inf if value is None else value for name, value in zip(data["columns"], row, strict=True)}
        name, seconds = one.pop("name"), one.pop("seconds")
        samples.append(KernelSample(name, Kernel(**one), seconds))
    return samples, statistics.median(data["issued_s"])


def test_a_gpu_is_what_its_sheet_says_less_what_it_loses():
    samples, dispatch = h200()
    found = fit_device(samples, memory=1, dispatch=dispatch)
    sheet = Topology.preset("dgx-h200").device_type(0)
    assert 0.8 * sheet.memory_bandwidth < found.memory_bandwidth < sheet.memory_bandwidth
    for precision in ("bf16", "fp16", "tf32", "fp32", "fp64", "fp8"):
        assert 0.7 * sheet.peak_of(precision) < found.peak[precision] < sheet.peak_of(precision)
    assert 1e-6 < found.launch < 3e-6 < dispatch
    curve = [share for _, share in found.matmul_efficiency]
    assert curve == sorted(curve) and curve[-1] == 1
    errors = {e.what: e.median for e in device_errors(samples, found)}
    assert all(errors[what] < 0.1 for what in ("matmul bf16", "attention", "pointwise", "special", "optimizer"))


def test_what_the_host_hides_counts_for_nothing():
    samples, dispatch = h200()
    hidden = [
        replace(s, seconds=s.seconds * 3) if s.kernel.kind == "norm" and s.seconds < dispatch / 3 else s
        for s in samples
    ]
    assert hidden != samples
    found = fit_device(hidden, memory=1, dispatch=dispatch)
    assert found.memory_efficiency["norm"] == fit_device(samples, memory=1, dispatch=dispatch).memory_efficiency["norm"]
    told = {e.what: e.num_samples for e in device_errors(samples, found)}
    assert 0 < told["norm"] < sum(s.kernel.kind == "norm" for s in samples)


def test_every_precision_that_is_measured_can_be_in_a_file(tmp_path: Path):
    samples, dispatch = h200()
    found = fit_device(samples, memory=80 << 30, dispatch=dispatch)
    topology = Topology(name="one", nodes=({"type": "cuda", "devices": 1},), types={"cuda": found})
    (tmp_path / "gpu.yaml").write_text(machine_yaml(topology, [], "a GPU"))
    read = Topology.load(tmp_path / "gpu.yaml").types["cuda"]
    assert read.peak.keys() == found.peak.keys() >= set(SIZES["cuda", False].precisions)
    assert read.dispatch == pytest.approx(dispatch, rel=1e-3)


@pytest.mark.slow
def test_the_host_is_timed_by_what_the_engine_issues():
    with open_issuing_plan() as plan, LocalRanks(1) as ranks:
        ((one, *_),) = ranks.call(time_issuing, plan, "cpu", 2, timeout=120)
    assert plan.operators > 1000 and plan.operators == pytest.approx(round(plan.operators))
    assert 1e-7 < one < 1e-3
