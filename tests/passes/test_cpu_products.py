"""Products of float32 matrices on a CPU by the faster library, and cross entropy as operators that are fused."""

from __future__ import annotations

import math

import pytest
import torch

from partitioner.passes.ops import cpu_products, cross_entropy

aten = torch.ops.aten
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")


@needs_onednn
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("fresh", [True, False])
def test_products_are_those_of_torch(turned: tuple[bool, bool], fresh: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_products, "is_onednn_faster", lambda: True)
    a, b = torch.randn(144, 128), torch.randn(128, 160)
    a, b = (x.t().contiguous().t() if t else x for x, t in zip((a, b), turned, strict=True))
    assert cpu_products.should_use_onednn(a, b)
    total = torch.randn(144, 160)
    expected = (a.double() @ b.double() + (0 if fresh else total.double())).float()
    cpu_products.multiply_into(total, a, b, fresh)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cpu_products.multiply(a, b), (a.double() @ b.double()).float(), rtol=1e-4, atol=1e-4)


@needs_onednn
def test_products_with_biases_are_those_of_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_products, "is_onednn_faster", lambda: True)
    x, weight, bias = torch.randn(3, 64, 128), torch.randn(160, 128), torch.randn(160)
    function = cpu_products.choose_product(aten.linear.default, (x, weight, bias))
    torch.testing.assert_close(
        function(x, weight, bias), torch.nn.functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4
    )
    rows = x.flatten(0, 1)
    function = cpu_products.choose_product(aten.addmm.default, (bias, rows, weight.t()))
    expected = torch.addmm(bias, rows, weight.t())
    torch.testing.assert_close(function(bias, rows, weight.t()), expected, rtol=1e-4, atol=1e-4)


def test_small_products_and_other_types_stay_with_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_products, "is_onednn_faster", lambda: True)
    large = torch.empty(512, 512, device="meta")
    assert cpu_products.choose_product(aten.mm.default, (large, large)) is cpu_products.multiply
    assert cpu_products.choose_product(aten.mm.default, (large.double(), large.double())) is None
    assert cpu_products.choose_product(aten.mm.default, (large[:8, :8], large[:8, :8])) is None
    assert cpu_products.choose_product(aten.bmm.default, (large[None], large[None])) is None
    monkeypatch.setattr(cpu_products, "is_onednn_faster", lambda: False)
    assert cpu_products.choose_product(aten.mm.default, (large, large)) is None


@pytest.mark.parametrize("dim", [-1, 1])
def test_decomposed_cross_entropy_is_the_same(dim: int):
    logits = torch.randn(5, 7, 7, dtype=torch.float64)
    logits[0, 0] = -math.inf
    logits[1, 1, 1] = -math.inf
    index = torch.randint(7, (5, 7, 1) if dim == -1 else (5, 1, 7))
    expected = cross_entropy.target_and_logsumexp(logits, index, dim)
    found = cross_entropy.decompose_target_and_logsumexp(logits, index, dim)
    for here, there in zip(found, expected, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-12)
    given = torch.randn_like(expected[0]), torch.randn_like(expected[0]), logits, index, expected[1], dim
    torch.testing.assert_close(
        cross_entropy.decompose_backward(*given),
        cross_entropy.target_and_logsumexp_backward(*given),
        rtol=1e-12,
        atol=1e-12,
    )
