"""The plain model on one process: its results, and the terms of its gradients."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from partitioner.check.setup import CheckSetupError, Setup, load_setup, loss_of, run_model, seed_generators
from partitioner.runtime.engine.batches import flatten_by_path

MAX_PIECES = 64

_MAX_PIECE_ELEMENTS = 1 << 26  # elements of the gradients through all pieces: 512 MiB


@dataclass(frozen=True)
class PlainResults:
    """What the plain model (the user's model on one process) computes in one step, and its weights.

    Attributes:
        weights: parameter name -> value, in the order in which forward uses them. A tied parameter has only its first
            name.
        grads: parameter name -> gradient; ``None`` if the loss does not depend on the parameter.
        outputs: path in the model's result -> tensor.
        loss: the loss, as a tensor without dims.
        aliases: first name of a parameter -> all of its names.
        uses_random: whether the loss depends on the seed of the random generators, because of dropout.
        digest: hash of weights and inputs as the user's function made them.
        clip_norm: largest L2 norm of all gradients, if they were clipped; else ``None``.
        modules: module name -> its output at each call, in the order in which modules returned.
        biases: module name -> its bias.
        module_gradients: module name -> gradient of its output at each call, in the order in which backward has
            computed them.
    """

    weights: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    outputs: dict[str, Tensor]
    loss: Tensor
    aliases: dict[str, list[str]]
    uses_random: bool
    digest: str
    clip_norm: float | None
    modules: dict[str, list[Tensor]]
    biases: dict[str, Tensor]
    module_gradients: dict[str, list[Tensor]]


class ModuleTrace:
    """Records the outputs of ``modules`` and all modules inside them while their forward runs, and the gradients of
    these outputs while backward runs, until :meth:`close`.

    Attributes:
        outputs: module name -> the output at each call, in the order in which modules returned. Modules that return
            something other than a floating-point tensor are left out. Of a ``DTensor``, this rank's part is kept.
        gradients: module name -> the gradient of the output at each call, in the order in which backward computes them.
            Those of a ``DTensor`` are left out.
        entered: names of the modules in the order in which they were first called.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.outputs: dict[str, list[Tensor]] = {}
        self.gradients: dict[str, list[Tensor]] = {}
        self.entered: list[str] = []
        self._handles: list[RemovableHandle] = []
        for root in modules:
            for name, module in root.named_modules():
                self._handles.append(module.register_forward_pre_hook(partial(self._enter, name)))
                self._handles.append(module.register_forward_hook(partial(self._keep, name), prepend=True))

    def _enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        if name not in self.entered:
            self.entered.append(name)

    def _keep(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if _is_number(output):
            local = output.to_local() if isinstance(output, DTensor) else output
            self.outputs.setdefault(name, []).append(local.detach().clone())
            if output.requires_grad and not isinstance(output, DTensor):
                self._handles.append(output.register_hook(partial(self._keep_gradient, name)))

    def _keep_gradient(self, name: str, gradient: Tensor) -> None:
        if not isinstance(gradient, DTensor):
            self.gradients.setdefault(name, []).append(gradient.detach().clone())

    def close(self) -> None:
        """Stop recording: remove the hooks from modules and outputs."""
        for handle in self._handles:
            handle.remove()


@dataclass(frozen=True)
class GradientParts:
    """The gradients of the plain model (the user's model on one process) before clipping, and the terms that they are
    sums of.

    Attributes:
        labels: (sample, part) of each piece of the batch, as indices from 0. The parts are equal parts of dim 1 of the
            output; there is one if the output has fewer than 3 dims.
        pieces: parameter name -> tensor of shape ``[pieces, elements]``: the gradient through each piece of the output.
        uses: first name of a tied parameter -> each of its names -> gradient through the use under this name.
        grads: parameter name -> whole gradient.
    """

    labels: list[tuple[int, int]]
    pieces: dict[str, Tensor]
    uses: dict[str, dict[str, Tensor]]
    grads: dict[str, Tensor]


class WithoutDropout(TorchFunctionMode):
    """A torch function mode in which dropout changes nothing, so that results of different runs can be compared."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        return func(*args, **kwargs)


_DROPOUTS: frozenset[Callable[..., Any]] = frozenset(
    {
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        torch.dropout,
        torch.dropout_,
        torch.alpha_dropout,
        torch.feature_dropout,
    }
)


def run_plain(target: str) -> PlainResults:
    """Run one step of the plain model (the user's model on one process), without dropout, and return its results.
    ``target``: the function that returns the model, as ``FILE.py:FUNCTION``. Raise :class:`CheckSetupError` if the loss
    is not finite."""
    setup, digest = load_setup(target)
    model = setup.plain
    seed_generators(0)
    trace = ModuleTrace([model])
    with WithoutDropout():
        output = run_model(model, setup.inputs)
        loss = loss_of(output, setup.loss)
        loss.backward()
    trace.close()
    named = dict(model.named_parameters())
    used = {id(p): name for name, p in named.items()}
    order = [used[id(p)] for m in trace.entered for p in model.get_submodule(m).parameters(recurse=False)]
    weights = {name: named[name].detach().clone() for name in dict.fromkeys([*order, *named])}
    if not bool(loss.isfinite()):
        raise CheckSetupError(
            f"the loss of the plain model is {loss.item()}, so that nothing can be compared; expected a finite one"
        )
    if setup.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), setup.clip_norm)
    return PlainResults(
        weights=weights,
        grads={n: _copy_gradient(named[n]) for n in weights if named[n].requires_grad},
        outputs={path: leaf.detach().clone() for path, leaf in flatten_by_path(output).items() if _is_number(leaf)},
        loss=loss.detach().clone().reshape(()),
        aliases=_alias_groups(model),
        uses_random=_depends_on_seed(target),
        digest=digest,
        clip_norm=setup.clip_norm,
        modules=trace.outputs,
        biases={n: m.bias.detach().clone() for n, m in model.named_modules() if _has_bias(m)},
        module_gradients=trace.gradients,
    )


def split_gradients(target: str, num_ranks: int) -> GradientParts:
    """Split the gradients of the plain model (the user's model on one process), without dropout, into terms: the
    gradient through each piece of the batch, and through each use of a tied parameter. A piece is one sample, or one of
    ``num_ranks`` equal parts of dim 1 of a sample. There are no pieces if the output has no batch dim, or if there
    would be more than 64.

    ``target``: the function that returns the model, as ``FILE.py:FUNCTION``.
    """
    setup, _ = load_setup(target)
    with WithoutDropout():
        uses = _gradients_by_use(setup)
        labels, pieces, grads = _gradients_by_piece(setup, num_ranks)
    return GradientParts(labels, pieces, uses, grads)


def _gradients_by_piece(
    setup: Setup, num_ranks: int
) -> tuple[list[tuple[int, int]], dict[str, Tensor], dict[str, Tensor]]:
    """Split the gradients of the plain model (the user's model on one process) in ``setup`` by pieces of the batch. A
    piece is a sample, or one of ``num_ranks`` equal parts of a sample along dim 1 of the output.

    Return three values: the label of each piece, as (sample, part); parameter name -> gradients through each piece,
    shape ``[pieces, elements]``; and parameter name -> whole gradient. The first two are empty if the output has no
    batch dim or there would be too many pieces.
    """
    named = dict(_trained(setup.plain))
    output = run_model(setup.plain, setup.inputs)
    loss = loss_of(output, setup.loss)
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    wholes = torch.autograd.grad(loss, [*leaves, *named.values()], retain_graph=True, allow_unused=True)
    to_leaves, to_parameters = wholes[: len(leaves)], wholes[len(leaves) :]
    grads = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), to_parameters, strict=True)}
    used = [(leaf, g) for leaf, g in zip(leaves, to_leaves, strict=True) if g is not None and leaf.dim() > 0]
    sizes = {leaf.shape[0] for leaf, _ in used}
    if len(sizes) != 1:
        return [], {}, grads
    batch = sizes.pop()
    length = min((leaf.shape[1] for leaf, _ in used if leaf.dim() > 2), default=1)
    most = min(MAX_PIECES, _MAX_PIECE_ELEMENTS // max(1, sum(p.numel() for p in named.values())))
    if batch > most:
        return [], {}, grads
    chunks = num_ranks if length >= num_ranks and batch * num_ranks <= most else 1
    labels = [(sample, chunk) for sample in range(batch) for chunk in range(chunks)]
    rows = []
    for sample, chunk in labels:
        masked = [_keep_piece(g, sample, chunk, chunks) for _, g in used]
        found = torch.autograd.grad(
            [leaf for leaf, _ in used], [*named.values()], masked, retain_graph=True, allow_unused=True
        )
        rows.append([torch.zeros_like(p) if g is None else g for p, g in zip(named.values(), found, strict=True)])
    pieces = {name: torch.stack([row[i].flatten() for row in rows]) for i, name in enumerate(named)}
    return labels, pieces, grads


def _keep_piece(gradient: Tensor, sample: int, chunk: int, chunks: int) -> Tensor:
    """Return a copy of ``gradient``, the gradient of a model's output, with zeros outside of one piece of the batch.
    ``sample``: index of the piece in dim 0. ``chunk``: index of the piece among ``chunks`` equal parts of dim 1. If the
    output has fewer than 3 dims, a sample is not divided, and all of it belongs to ``chunk`` 0.
    """
    kept = torch.zeros_like(gradient)
    if chunks == 1 or gradient.dim() < 3:
        if chunk == 0:
            kept[sample] = gradient[sample]
        return kept
    part = torch.arange(gradient.shape[1]).tensor_split(chunks)[chunk]
    kept[sample, part] = gradient[sample, part]
    return kept


def _gradients_by_use(setup: Setup) -> dict[str, dict[str, Tensor]]:
    """Return the gradient of each tied parameter through each of its uses: first name of the parameter -> name under
    which it is used -> gradient. Empty if no parameter is tied. ``setup``: the plain model (the user's model on one
    process) with its inputs and loss.
    """
    groups = {name: names for name, names in _alias_groups(setup.plain).items() if len(names) > 1}
    if not groups:
        return {}
    model = copy.deepcopy(setup.plain)
    for names in groups.values():
        for name in names[1:]:
            where, _, last = name.rpartition(".")
            owner = model.get_submodule(where)
            setattr(owner, last, nn.Parameter(getattr(owner, last).detach().clone()))
    loss_of(run_model(model, setup.inputs), setup.loss).backward()
    found = dict(model.named_parameters())
    uses: dict[str, dict[str, Tensor]] = {}
    for first, names in groups.items():
        parts = {name: found[name].grad for name in names}
        uses[first] = {name: grad.detach() for name, grad in parts.items() if grad is not None}
    return uses


def _depends_on_seed(target: str) -> bool:
    """Return whether two runs of the plain model (the user's model on one process) with different seeds of the random
    generators have different losses. ``target``: the function that returns the model, as ``FILE.py:FUNCTION``."""
    losses = []
    for seed in (1, 2):
        setup, _ = load_setup(target)
        seed_generators(seed)
        with torch.no_grad():
            losses.append(float(loss_of(run_model(setup.plain, setup.inputs), setup.loss)))
    return losses[0] != losses[1]


def _alias_groups(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter of ``model``: first name -> list of all names. A tied parameter has
    several."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {group[0]: group for group in names.values()}


def _trained(model: nn.Module) -> Sequence[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _copy_gradient(parameter: nn.Parameter) -> Tensor | None:
    return None if parameter.grad is None else parameter.grad.detach().clone()


def _has_bias(module: nn.Module) -> bool:
    return isinstance(getattr(module, "bias", None), Tensor)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
