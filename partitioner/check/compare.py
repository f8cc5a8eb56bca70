"""Find which elements of the plain model each rank holds, and compare outputs, loss and gradients with the plain model.

Every element of the plain parameters has its own value. A rank's element is the plain element with the equal value, so
that no placement has to be declared: slices of any dim, permuted, transposed, fused or flattened weights, uneven shards
and replicas are all found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from partitioner.check.plain_run import PlainResults
from partitioner.check.rank_run import RankOutcome, RankShard
from partitioner.check.setup import CheckSetupError
from partitioner.plans.verify import relative_error

TOLERANCE = 1e-9  # relative, in float64: nothing but the order of sums may differ

_ROUNDING_SCALE = 1e-3  # a gradient below this share of the largest one is compared with that share


@dataclass(frozen=True)
class HeldElements:
    """The elements of one parameter of the plain model (the user's model on one process) that one parameter of the
    distributed model holds on one rank.

    Attributes:
        rank: the rank.
        name: name of the parameter in the distributed model.
        index: index of each element in the flattened plain parameter, shape ``[elements]``.
        gradient: gradient of each element, shape ``[elements]``; ``None`` if there is none.
    """

    rank: int
    name: str
    index: Tensor
    gradient: Tensor | None


@dataclass(frozen=True)
class ForeignElements:
    """Elements of a parameter of a distributed model whose values do not occur in the plain model (the user's model on
    one process), such as padding rows.

    Attributes:
        rank, name: the rank, and the name of the parameter in the distributed model.
        count, total: number of such elements, and number of all elements of the parameter.
        beside: name of the plain model's parameter to which the remaining elements belong; ``None`` if there are none.
        largest_gradient: largest absolute gradient of such an element.
        constant: whether all such elements have the same value.
    """

    rank: int
    name: str
    count: int
    total: int
    beside: str | None
    largest_gradient: float
    constant: bool = False


@dataclass(frozen=True)
class PlacedShards:
    """Where the ranks of a distributed model hold the elements of the plain model (the user's model on one process).

    ``holders``: name of a plain parameter -> its elements on each rank that holds some. ``foreign``: elements on ranks
    that do not occur in the plain model."""

    holders: dict[str, list[HeldElements]]
    foreign: list[ForeignElements] = field(default_factory=list)


def place_shards(plain: PlainResults, outcomes: Sequence[RankOutcome]) -> PlacedShards:
    """Return which elements of the parameters of the plain model (the user's model on one process) every rank of the
    distributed model holds, and the elements that are not from the plain model. Elements are recognised by their
    values, which are all different.

    ``plain``: results and weights of the plain model. ``outcomes``: results and shards of each rank."""
    names = list(plain.weights)
    sizes = [plain.weights[n].numel() for n in names]
    ends = torch.tensor([0, *itertools.accumulate(sizes)])
    elements = torch.cat([plain.weights[n].flatten() for n in names])
    values, order = elements.sort()
    firsts = {alias: name for name, aliases in plain.aliases.items() for alias in aliases}
    holders: dict[str, list[HeldElements]] = {n: [] for n in names}
    foreign = []
    for outcome in outcomes:
        for shard in outcome.shards:
            if shard.of is not None:
                name, held = _take_given_gradient(plain, firsts, outcome.rank, shard)
                holders[name].append(held)
                continue
            assert shard.weight is not None
            flat = shard.weight.flatten().double().cpu()
            gradient = None if shard.gradient is None else shard.gradient.flatten().double().cpu()
            found, known = _find_elements(flat, elements, values, order)
            owner = torch.bucketize(found, ends, right=True) - 1
            owners = owner[known].unique().tolist()
            for i in owners:
                mask = known & (owner == i)
                part = None if gradient is None else gradient[mask]
                holders[names[i]].append(HeldElements(outcome.rank, shard.name, found[mask] - ends[i], part))
            if not bool(known.all()):
                other = 0.0 if gradient is None else float(gradient[~known].abs().max())
                beside = names[owners[0]] if owners else None
                more = flat[~known]
                constant = bool((more == more[0]).all())
                foreign.append(
                    ForeignElements(outcome.rank, shard.name, len(more), flat.numel(), beside, other, constant)
                )
    return PlacedShards(holders, foreign)


def _find_elements(flat: Tensor, elements: Tensor, values: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Look up the values of one rank's shard among all parameter values of the undistributed model. Return two tensors
    of the shape of ``flat``: the index of each value in ``elements``, and a mask that is true where the value was found
    (elsewhere the index has no meaning).

    ``flat``: values of the shard. ``elements``: all parameter values of the undistributed model, in one dim.
    ``values``: ``elements`` in sorted order. ``order``: the index in ``elements`` of each of ``values``.
    """
    first = order[torch.searchsorted(values, flat[:1]).clamp(max=len(values) - 1)]
    # a whole parameter, or some of its rows
    if len(flat) and torch.equal(elements[int(first) : int(first) + len(flat)], flat):
        return torch.arange(len(flat)) + first, torch.ones(len(flat), dtype=torch.bool)
    at = torch.searchsorted(values, flat).clamp(max=len(values) - 1)
    return order[at], values[at] == flat


def _take_given_gradient(
    plain: PlainResults, firsts: dict[str, str], rank: int, shard: RankShard
) -> tuple[str, HeldElements]:
    """Check a whole gradient that the user's step returned by name (not as ``.grad`` of a parameter). Return its name
    in the plain model (the user's model on one process), and its elements. Raise :class:`CheckSetupError` for an
    unknown name or a wrong shape.

    ``plain``: results of the plain model. ``firsts``: any name of a parameter -> its first name. ``rank``: the rank
    that returned the gradient. ``shard``: the gradient with its name.
    """
    name, gradient = firsts.get(str(shard.of)), shard.gradient
    assert gradient is not None
    if name is None or gradient.shape != plain.weights[name].shape:
        expected = (
            f"the shape {list(plain.weights[name].shape)}" if name else f"one of {', '.join(list(firsts)[:5])}, ..."
        )
        raise CheckSetupError(
            f"StepResult.gradients has {shard.of} with the shape {list(gradient.shape)}; expected {expected}"
        )
    return name, HeldElements(rank, shard.name, torch.arange(gradient.numel()), gradient.flatten().double().cpu())


def compare_gradient(plain: PlainResults, name: str, holders: Sequence[HeldElements]) -> float:
    """Return the largest relative error of the gradient of the parameter ``name`` on any rank; infinite if no rank
    holds some element, or if a gradient is missing. ``plain``: results of the plain model (the user's model on one
    process). ``holders``: the elements of the parameter on each rank, with their gradients.
    """
    expected = plain.grads[name]
    flat = None if expected is None else expected.flatten()
    size = plain.weights[name].numel()
    held = torch.zeros(size, dtype=torch.bool)
    worst = 0.0
    scale = max(
        0.0 if flat is None or size == 0 else float(flat.abs().max()), _ROUNDING_SCALE * largest_gradient(plain)
    )
    for holder in holders:
        held[holder.index] = True
        due = torch.zeros(len(holder.index)) if flat is None else flat[holder.index]
        if holder.gradient is None:
            worst = max(worst, 0.0 if not bool(due.any()) else math.inf)
        else:
            worst = max(worst, relative_error(holder.gradient, due, scale))
    return worst if bool(held.all()) else math.inf


def largest_gradient(plain: PlainResults) -> float:
    """Return the largest absolute element of all gradients in ``plain``, the results of the user's model on one
    process; 0 without gradients."""
    return max((float(g.abs().max()) for g in plain.grads.values() if g is not None and g.numel()), default=0.0)


def compare_loss(plain: PlainResults, outcomes: Sequence[RankOutcome]) -> tuple[float, str]:
    """Return two values: the relative error of the loss, and how the ranks' losses give the loss: ``equal``, ``mean``
    or ``sum`` over the ranks, whichever has the least error. Return ``(0, "none")`` if no rank returned a loss.

    ``plain``: results of the plain model (the user's model on one process). ``outcomes``: results of each rank.
    """
    losses = [o.loss for o in outcomes if o.loss is not None]
    if not losses:
        return 0.0, "none"
    stacked = torch.stack(losses)
    ways = {"equal": max(relative_error(x, plain.loss) for x in losses)}
    if float(stacked.max() - stacked.min()) > TOLERANCE * float(stacked.abs().max()):
        ways |= {"mean": relative_error(stacked.mean(), plain.loss), "sum": relative_error(stacked.sum(), plain.loss)}
    way = min(ways, key=ways.__getitem__)
    return ways[way], way


def compare_output(expected: Tensor, given: Tensor) -> float:
    """Return the relative error of ``given``, an output of one rank of a distributed model. It is compared with the
    nearest part of ``expected``, the output of the user's model on one process: all of it, a slice, or several slices
    along one dim in ascending order (such as the two chunks of a sequence that a rank has if causal attention is
    balanced over ranks). The result is infinite if ``given`` cannot be a part."""
    if given.dim() != expected.dim() or any(g > e for g, e in zip(given.shape, expected.shape, strict=True)):
        return math.inf
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    parts = _slices_with_element(expected, given, scale) or _aligned_slices(expected, given.shape)
    parts += _select_ascending(expected, given)
    return min((relative_error(given, part, scale) for part in parts), default=math.inf)


_MOST_SELECTED = 4096  # slices along a dim of an output among which those of a rank are searched
_MOST_SLICES = 256  # slices of the plain model's output that are compared with an output of a rank


def _slices_with_element(whole: Tensor, part: Tensor, scale: float) -> list[Tensor]:
    """Return slices of ``whole`` with the shape of ``part`` whose element at the position of the largest element of
    ``part`` equals that element; at most 256. ``scale``: largest absolute element of ``whole``, to which the rounding
    error is relative."""
    if part.numel() == 0 or part.dim() == 0:
        return []
    place = torch.unravel_index(part.abs().argmax(), part.shape)
    found = ((whole - part[place]).abs() <= 1e-6 * scale).nonzero() - torch.stack(place)
    room = torch.tensor(whole.shape) - torch.tensor(part.shape)
    offsets = found[((found >= 0) & (found <= room)).all(1)][:_MOST_SLICES]
    return [_cut_slice(whole, offset, part.shape) for offset in offsets.tolist()]


def _select_ascending(whole: Tensor, part: Tensor) -> list[Tensor]:
    """Return a list with one tensor of the shape of ``part``: for each slice of ``part`` along the only dim in which
    ``part`` is shorter than ``whole``, the nearest slice of ``whole``. The list is empty if the order of these slices
    in ``whole`` is not ascending, or if there is not exactly one such dim."""
    dims = [dim for dim, (w, p) in enumerate(zip(whole.shape, part.shape, strict=True)) if w != p]
    if len(dims) != 1 or part.numel() == 0 or max(whole.shape[dims[0]], part.shape[dims[0]]) > _MOST_SELECTED:
        return []
    rows, wanted = (tensor.movedim(dims[0], 0).flatten(1).double() for tensor in (whole, part))
    order = torch.cdist(wanted, rows).argmin(1)
    return [whole.index_select(dims[0], order)] if bool((order.diff() > 0).all()) else []


def _aligned_slices(whole: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Return the slices of ``whole`` with the shape ``shape`` whose offset in each dim is a multiple of the slice's
    size there; at most 256."""
    ranges = [range(0, w - s + 1, max(s, 1)) for w, s in zip(whole.shape, shape, strict=True)]
    return [_cut_slice(whole, offset, shape) for offset in itertools.islice(itertools.product(*ranges), _MOST_SLICES)]


def _cut_slice(whole: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    return whole[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]
