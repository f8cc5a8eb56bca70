"""Low-rank adapters (LoRA, Hu et al. 2021): the weights of a model are frozen, and small matrices beside them trained.

An adapted layer computes ``W x + alpha / r * B A x``. ``A`` has ``r`` rows, ``B`` has ``r`` columns. ``B`` starts as
zero, so that the model computes at first what it computes without adapters. The names of the model's own weights stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner.errors import ConstraintError
from partitioner.option_text import read_options
from partitioner.pretrained.configuration import PretrainedError, import_transformers

_EXPECTED = "expected r=RANK, and where wanted alpha=NUMBER and targets=NAME+NAME, as in r=16,alpha=32,targets=q_proj"


@dataclass(frozen=True)
class Lora:
    """Options of low-rank adapters.

    Attributes:
        r: the rank: rows of ``A`` and columns of ``B``.
        alpha: the adapters' output is multiplied by ``alpha / r``; ``None``: the value of ``r``.
        targets: last parts of the paths of the linear layers that get adapters, such as ``q_proj``; empty: all linear
            layers but the output head.
    """

    r: int
    alpha: float | None = None
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.r, bool) or not isinstance(self.r, int) or self.r < 1:
            raise PretrainedError(f"lora: r must be a whole number, 1 or more; got {self.r!r}; {_EXPECTED}")
        number = isinstance(self.alpha, Real) and not isinstance(self.alpha, bool)
        if self.alpha is not None and not (number and 0 < float(self.alpha) < math.inf):
            raise PretrainedError(f"lora: alpha must be a positive number; got {self.alpha!r}; {_EXPECTED}")

    @classmethod
    def parse(cls, given: Lora | Mapping[str, Any] | str) -> Lora:
        """Return the options in ``given``: a text like ``r=16,alpha=32,targets=q_proj+v_proj``, a mapping of these
        names to values, or a :class:`Lora`, which is returned unchanged. Raise :class:`PretrainedError` for anything
        else.
        """
        if isinstance(given, Lora):
            return given
        try:
            options = dict(read_options(given) if isinstance(given, str) else given)
        except (ConstraintError, TypeError, ValueError):
            raise PretrainedError(f"lora: got {given!r}; {_EXPECTED}") from None
        known = [field.name for field in fields(cls)]
        if "r" not in options or not {*options} <= {*known}:
            raise PretrainedError(f"lora: got {given!r}; {_EXPECTED}")
        alpha, targets = options.get("alpha"), options.get("targets", ())
        if isinstance(alpha, str):
            options["alpha"] = _parse_number(alpha)
        options["targets"] = tuple(targets.split("+") if isinstance(targets, str) else targets)
        return cls(**options)


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise PretrainedError(f"lora: alpha must be a positive number; got {text!r}; {_EXPECTED}") from None


class AdaptedLinear(nn.Linear):
    """A linear layer whose weight and bias are frozen, with a low-rank adapter.

    ``transposed``: the weight has the shape ``[inputs, outputs]``, like ``Conv1D`` of transformers; otherwise
    ``[outputs, inputs]``.
    """

    def __init__(self, base: nn.Module, lora: Lora, *, transposed: bool) -> None:
        nn.Module.__init__(self)
        weight, bias = base.weight, base.bias
        assert isinstance(weight, nn.Parameter)
        assert bias is None or isinstance(bias, nn.Parameter)
        outputs, inputs = weight.shape[::-1] if transposed else weight.shape
        self.in_features, self.out_features, self.transposed = inputs, outputs, transposed
        self.nf = outputs  # the name that Conv1D has for it
        self.weight = weight
        self.register_parameter("bias", bias)
        as_weight: dict[str, Any] = {"bias": False, "device": weight.device, "dtype": weight.dtype}
        self.lora_A = nn.Linear(inputs, lora.r, **as_weight)
        self.lora_B = nn.Linear(lora.r, outputs, **as_weight)
        nn.init.zeros_(self.lora_B.weight)
        self.scale = (lora.alpha or lora.r) / lora.r

    def forward(self, x: Tensor) -> Tensor:
        whole = F.linear(x, self.weight.T if self.transposed else self.weight, self.bias)
        adapted: Tensor = whole + self.lora_B(self.lora_A(x)) * self.scale
        return adapted


def add_adapters(model: nn.Module, lora: Lora, seed: int = 0) -> int:
    """Freeze the parameters of ``model``, a model of transformers, and add a low-rank adapter to each linear layer that
    ``lora`` selects, in place. Return the number of adapters. ``seed``: seed of the random initial values of the
    adapters' matrix ``A``.

    Raise :class:`PretrainedError` if a target is no linear layer of the model.
    """
    layers = _find_linear_layers(model)
    names = sorted({path.rpartition(".")[2] for path in layers})
    unknown = [name for name in lora.targets if name not in names]
    if unknown:
        raise PretrainedError(
            f"lora: the model has no linear layer {unknown[0]!r}; expected targets among {', '.join(names)}"
        )
    chosen = {p: m for p, m in layers.items() if not lora.targets or p.rpartition(".")[2] in lora.targets}
    if not chosen:
        raise PretrainedError("lora: the model has no linear layer besides its output head; leave lora out")
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        for path, module in chosen.items():
            parent, _, name = path.rpartition(".")
            adapted = AdaptedLinear(module, lora, transposed=type(module) is not nn.Linear)
            setattr(model.get_submodule(parent), name, adapted.train(module.training))
    return len(chosen)


def _find_linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of ``model`` by path, without the output head. Instances of subclasses of ``nn.Linear``
    are left out, because they may use their weight in another way.
    """
    kinds = (nn.Linear, import_transformers().pytorch_utils.Conv1D)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {p: m for p, m in model.named_modules() if type(m) in kinds and m is not head and p}
