"""Products in float32 at the rate of TF32: planned so, run so on GPUs, and else as in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from partitioner import Constraints, Plan, Topology, partition
from partitioner.cost.call.operators import Kernel
from partitioner.cost.call.roofline import kernel_time
from partitioner.runtime.program.precision import allow_tf32_products
from partitioner.simulate.program_time import plan_timeline
from partitioner.topology.detect import build_machine_topology

pytestmark = pytest.mark.usefixtures("without_baselines")


@pytest.fixture(scope="module")
def a100() -> Topology:
    return build_machine_topology(["a100-80gb"], [80 << 30])


def planned(topology: Topology, precision: str | None, **pins: object) -> Plan:
    model, x = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))), torch.empty(4096, 4096)
    return partition(model, topology, (x,), loss=torch.sum, precision=precision, constraints=Constraints(**pins))


def test_products_take_the_rate_of_tf32_and_attention_that_of_float32(a100: Topology):
    before, after = a100.device_type(0), a100.in_tf32.device_type(0)
    product = Kernel("matmul", 0.0, 0.0, 1e12, 4096.0, "fp32")
    assert kernel_time(product, before) / kernel_time(product, after) == pytest.approx(156 / 19.5, rel=0.01)
    for unchanged in (
        Kernel("attention", 0.0, 0.0, 1e12, 4096.0, "fp32"),
        Kernel("matmul", 0.0, 0.0, 1e12, 4096.0, "bf16"),
    ):
        assert kernel_time(unchanged, before) == pytest.approx(kernel_time(unchanged, after))
    assert a100.in_tf32.in_tf32 == a100.in_tf32


def test_a_device_without_it_multiplies_as_in_float32():
    v100 = Topology.preset("dgx-v100")
    assert v100.in_tf32 == v100


def test_a_plan_in_tf32_is_faster_keeps_its_weights_in_float32_and_its_timeline_agrees(a100: Topology):
    plain, plan = planned(a100, None), planned(a100, "tf32")
    assert plan.estimate.step_time < 0.4 * plain.estimate.step_time
    assert plan.program.tf32 and not plain.program.tf32
    assert {state.dtype for state in plan.program.states.values()} == {"float32"}
    pinned = planned(a100, "tf32", microbatch_size=512)
    assert plan_timeline(pinned).step_time == pytest.approx(pinned.estimate.step_time, rel=0.05)
    assert 0 < plan.estimate.mfu <= 1


def test_a_plan_in_float32_says_that_tf32_is_faster_there(a100: Topology):
    assert 'precision="tf32"' in planned(a100, "fp32").explain()
    assert 'precision="tf32"' not in planned(a100, "tf32").explain()


def test_only_the_plans_own_steps_on_a_gpu_are_rounded(a100: Topology):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    program = planned(a100, "tf32").program
    with allow_tf32_products(program, torch.device("cuda", 0)):
        assert matmul.fp32_precision == "tf32"
    assert matmul.fp32_precision == before
    with pytest.raises(KeyError), allow_tf32_products(program, torch.device("cuda", 0)):
        raise KeyError
    assert matmul.fp32_precision == before
    for other in (program.model_copy(update={"tf32": False}), program):
        with allow_tf32_products(other, torch.device("cpu" if other.tf32 else "cuda")):
            assert matmul.fp32_precision == before
