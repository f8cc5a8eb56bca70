"""Low-rank adapters (LoRA, Hu et al. 2021): the weights of a model are frozen, and small additional matrices are
trained.

An adapted layer computes ``W x + alpha / r * B A d(x)``, where ``d`` is dropout. ``A`` has ``r`` rows, ``B`` has ``r``
columns. ``B`` starts as zero, so that the model computes at first what it computes without adapters. The model's own
weights keep their names. Other modules, such as a new classifier, may be trained as a whole.

:func:`save_adapters` writes a folder for PEFT, the adapter library of Hugging Face, and for servers that load such
folders: ``adapter_config.json``, the options, and ``adapter_model.safetensors``, the matrices ``A`` and ``B`` and the
modules that were trained as a whole. PEFT calls a tensor of the model ``base_model.model.NAME``.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.errors import ConstraintError
from partitioner.option_text import read_options
from partitioner.passes.faults import typed_errors
from partitioner.passes.ir.layouts import REPLICATED
from partitioner.pretrained.configuration import PretrainedError, import_transformers
from partitioner.runtime.files import write_text
from partitioner.runtime.state.weights import FileWeights, TensorWeights, write_weights
from partitioner.topology.validate import format_suggestion

_EXPECTED = (
    "expected r=RANK, and where wanted alpha=NUMBER, targets=NAME+NAME, dropout=NUMBER and modules_to_save=NAME+NAME, "
    "as in r=16,alpha=32,targets=q_proj"
)
_OTHER_NAMES = {"lora_alpha": "alpha", "target_modules": "targets", "lora_dropout": "dropout", "rank": "r"}  # PEFT's
_MATRICES = (".lora_A.weight", ".lora_B.weight")
_TASKS = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}  # the others have no wrapper that PEFT needs


@dataclass(frozen=True)
class Lora:
    """Options of low-rank adapters.

    Attributes:
        r: the rank: rows of ``A`` and columns of ``B``.
        alpha: the adapters' output is multiplied by ``alpha / r``; ``None``: the value of ``r``.
        targets: last parts of the paths of the linear layers that get adapters, such as ``q_proj``; empty: all linear
            layers but the output head.
        dropout: probability with which an input of an adapter is zero in training.
        modules_to_save: last parts of the paths of modules that are trained as a whole, such as ``classifier``; they
            get no adapters.
    """

    r: int
    alpha: float | None = None
    targets: tuple[str, ...] = ()
    dropout: float = 0.0
    modules_to_save: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.r, bool) or not isinstance(self.r, int) or self.r < 1:
            raise PretrainedError(f"lora: r must be a whole number, 1 or more; got {self.r!r}; {_EXPECTED}")
        number = isinstance(self.alpha, Real) and not isinstance(self.alpha, bool)
        if self.alpha is not None and not (number and 0 < float(self.alpha) < math.inf):
            raise PretrainedError(f"lora: alpha must be a positive number; got {self.alpha!r}; {_EXPECTED}")
        number = isinstance(self.dropout, Real) and not isinstance(self.dropout, bool)
        if not (number and 0 <= float(self.dropout) < 1):
            raise PretrainedError(
                f"lora: dropout must be a number from 0 to below 1; got {self.dropout!r}; {_EXPECTED}"
            )

    @property
    def scale(self) -> float:
        """Return the number by which the outputs of the adapters are multiplied."""
        return (self.alpha or self.r) / self.r

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
        for unknown in {*options} - {*known}:
            other = _OTHER_NAMES.get(unknown)
            hint = f"write {other}; " if other else format_suggestion(str(unknown), known)
            raise PretrainedError(f"lora: unknown option {unknown!r}; {hint}{_EXPECTED}")
        if "r" not in options:
            raise PretrainedError(f"lora: got {given!r}; {_EXPECTED}")
        for name in ("alpha", "dropout"):
            if isinstance(options.get(name), str):
                options[name] = _parse_number(name, options[name])
        for name in ("targets", "modules_to_save"):
            names = options.get(name, ())
            options[name] = tuple(names.split("+") if isinstance(names, str) else names)
        return cls(**options)


def _parse_number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise PretrainedError(f"lora: {name} must be a number; got {text!r}; {_EXPECTED}") from None


class AdaptedLinear(nn.Linear):
    """A linear layer whose weight and bias are frozen, with a low-rank adapter.

    ``transposed``: whether the weight has the shape ``[inputs, outputs]``, as in ``Conv1D`` of transformers, instead of
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
        self.lora_dropout = nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()
        self.scale = lora.scale

    def forward(self, x: Tensor) -> Tensor:
        whole = F.linear(x, self.weight.T if self.transposed else self.weight, self.bias)
        adapted: Tensor = whole + self.lora_B(self.lora_A(self.lora_dropout(x))) * self.scale
        return adapted


def add_adapters(model: nn.Module, lora: Lora, seed: int = 0, without: Collection[str] = ()) -> int:
    """Freeze the parameters of ``model``, a model of transformers, and add a low-rank adapter to each linear layer that
    ``lora`` selects, in place. Return the number of adapters. ``seed``: seed of the random initial values of the
    adapters' matrix ``A``. ``without``: paths of layers that get no adapter.

    Raise :class:`PretrainedError` if a target is not a linear layer of the model, or if a module to save has no
    parameters or does not exist.
    """
    saved = _find_saved_modules(model, lora)
    layers = _find_linear_layers(model)
    names = sorted({path.rpartition(".")[2] for path in layers})
    unknown = [name for name in lora.targets if name not in names]
    if unknown:
        raise PretrainedError(
            f"lora: the model has no linear layer {unknown[0]!r}; {format_suggestion(unknown[0], names)}expected "
            f"targets among {', '.join(names)}, the last parts of the layers' paths"
        )
    chosen = {
        path: layer
        for path, layer in layers.items()
        if (not lora.targets or path.rpartition(".")[2] in lora.targets)
        and path not in without
        and not any(path == whole or path.startswith(f"{whole}.") for whole in saved)
    }
    if not chosen:
        others = " and the modules to save" if saved else ""
        raise PretrainedError(f"lora: the model has no linear layer besides its output head{others}; leave lora out")
    model.requires_grad_(False)
    for module in saved.values():
        module.requires_grad_(True)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        for path, module in chosen.items():
            parent, _, name = path.rpartition(".")
            adapted = AdaptedLinear(module, lora, transposed=not isinstance(module, nn.Linear))
            setattr(model.get_submodule(parent), name, adapted.train(module.training))
    return len(chosen)


def list_bypassed_adapters(model: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """Return the paths of the adapted layers of ``model`` whose weight the model reads without calling the layer, so
    that their adapters have no effect. Layers that the run does not reach, because the model fails without values of
    tensors, are not in the list.

    ``inputs``: a batch by argument name, on the meta device like the model, which is run once.
    """
    adapted = {path: module for path, module in model.named_modules() if isinstance(module, AdaptedLinear)}
    called: set[int] = set()
    hooks = [m.register_forward_pre_hook(lambda module, _: called.add(id(module))) for m in adapted.values()]
    with _ReadTensors() as read, torch.no_grad(), contextlib.suppress(Exception):
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return [path for path, module in adapted.items() if id(module.weight) in read.ids and id(module) not in called]


class _ReadTensors(TorchDispatchMode):
    """A torch mode that records which parameters operators read. ``ids``: the ``id()`` of each of these parameters."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ids: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ids.update(id(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, nn.Parameter))
        return func(*args, **(kwargs or {}))


def _find_saved_modules(model: nn.Module, lora: Lora) -> dict[str, nn.Module]:
    """Return the modules of ``model`` that are trained as a whole, by path: those named in ``lora.modules_to_save``.
    Raise :class:`PretrainedError` for a name that no module with parameters has.
    """
    found: dict[str, nn.Module] = {}
    known = {path: m for path, m in model.named_modules() if path and next(m.parameters(), None) is not None}
    for name in lora.modules_to_save:
        modules = {path: m for path, m in known.items() if path.rpartition(".")[2] == name}
        if not modules:
            names = sorted({path.rpartition(".")[2] for path in known} - {str(i) for i in range(len(known))})
            raise PretrainedError(
                f"lora: modules_to_save: the model has no module {name!r} with parameters; "
                f"{format_suggestion(name, names)}expected some of {', '.join(names)}"
            )
        found |= modules
    inside = {id(p): path for path, module in found.items() for p in module.parameters()}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        whole = inside.get(id(parameter))
        if whole is not None and not any(path.startswith(f"{each}.") for each in found):
            raise PretrainedError(
                f"lora: modules_to_save: {whole} shares a weight with {path.rpartition('.')[0]}, which would be "
                "trained, too; expected both or neither, or tie_word_embeddings=false in the configuration"
            )
    return found


def _find_linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of ``model`` by path, without the output head."""
    transposed = import_transformers().pytorch_utils.Conv1D
    head = getattr(model, "get_output_embeddings", lambda: None)()
    plain = (nn.Linear, transposed)
    return {
        path: module
        for path, module in model.named_modules()
        if path and module is not head and (type(module) in plain or _computes_linear(module))
    }


def _computes_linear(module: nn.Module) -> bool:
    """Return whether the forward of ``module`` computes what a plain linear layer computes, ``x W^T + b``. This is
    tested on a small copy with random weights. Subclasses of ``nn.Linear`` that use their weight in another way, such
    as routers, fail the test."""
    if not isinstance(module, nn.Linear) or isinstance(module, NonDynamicallyQuantizableLinear):
        return False  # the latter's weight is read by nn.MultiheadAttention, which never calls it
    small = copy.copy(module)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        small.in_features, small.out_features = 5, 3
        bias = None if module.bias is None else nn.Parameter(torch.randn(3))
        small._parameters = {"weight": nn.Parameter(torch.randn(3, 5)), "bias": bias}
        x = torch.randn(2, 4, 5)
        try:
            result = small.forward(x)
        except Exception:
            return False
        expected = F.linear(x, small.weight, small.bias)
        return (
            isinstance(result, Tensor)
            and result.shape == expected.shape
            and torch.allclose(result, expected, rtol=1e-4, atol=1e-5)
        )


# --- files ------------------------------------------------------------------------------------------------------------


@typed_errors("save_adapters()")
def save_adapters(
    folder: str | Path,
    weights: Mapping[str, Tensor] | str | Path,
    lora: Lora | Mapping[str, Any] | str,
    *,
    base: str = "",
    task: str | None = None,
) -> Path:
    """Write trained low-rank adapters as a folder that ``peft.PeftModel.from_pretrained`` reads. Return the folder.

    Args:
        folder: the folder to write; it is created, and other files in it are kept.
        weights: the weights by the model's names: the folder that :meth:`Engine.export_weights` has written,
            ``engine.state_dict(full=True)`` on the first rank, or ``model.state_dict()``. Only those of the adapters,
            and of the modules that were trained as a whole, are read.
        lora: the options with which the adapters were made.
        base: name or folder of the model that the adapters belong to, which PEFT loads if it is not given a model.
        task: the task of the model, such as ``causal``; ``None``: PEFT adds no methods, such as ``generate``, to the
            model.

    Raises :class:`PretrainedError` if the weights have no adapters, or adapters of another rank than ``lora``.
    """
    options = Lora.parse(lora)
    source = FileWeights(Path(weights)) if isinstance(weights, str | Path) else TensorWeights(weights, "weights")
    shapes = {name: spec[0] for name in source.names() if (spec := source.spec(name)) is not None}
    adapted = sorted(name.removesuffix(_MATRICES[0]) for name in shapes if name.endswith(_MATRICES[0]))
    if not adapted:
        raise PretrainedError(
            "save_adapters: the weights have no adapters (names that end in .lora_A.weight); expected the weights of a "
            "model that was loaded with lora="
        )
    ranks = {shapes[path + _MATRICES[0]][0] for path in adapted}
    if ranks != {options.r}:
        raise PretrainedError(
            f"save_adapters: the adapters have the rank {', '.join(map(str, sorted(ranks)))}, and lora says "
            f"r={options.r}; give the lora= with which the model was loaded"
        )
    names = [path + matrix for path in adapted for matrix in _MATRICES]
    names += [name for name in shapes if {*name.split(".")[:-1]} & {*options.modules_to_save}]
    config = {
        "peft_type": "LORA",
        "task_type": _TASKS.get(task or ""),
        "base_model_name_or_path": base or None,
        "r": options.r,
        "lora_alpha": options.scale * options.r,
        "lora_dropout": options.dropout,
        "target_modules": _name_targets(adapted, shapes),
        "modules_to_save": [*options.modules_to_save] or None,
        "bias": "none",
        "inference_mode": True,
    }
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tensors = {f"base_model.model.{name}": source.read(name, REPLICATED, 1, 0) for name in names}
    write_weights(tensors, target / "adapter_model.safetensors")
    write_text(target / "adapter_config.json", json.dumps(config, indent=2) + "\n")
    return target


def _name_targets(adapted: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return PEFT's names of the adapted layers: the last parts of their paths if these name no other layer, else the
    whole paths.

    ``adapted``: paths of the adapted layers. ``shapes``: name of each weight of the model -> its shape.
    """
    last = {path.rpartition(".")[2] for path in adapted}
    matrices = {name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) > 1}
    named = {path for path in matrices if path.rpartition(".")[2] in last}
    return sorted(last if named <= {*adapted} else adapted)
