"""Find the likely cause of a wrong output or loss, and the module whose output is wrong first."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from partitioner.check.causes import CLOSE, UNKNOWN, Cause, fit_factor, list_groupings, name_factor
from partitioner.check.compare import compare_output
from partitioner.check.plain_run import PlainResults
from partitioner.check.rank_run import RankOutcome

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

_MOST_ROWS = 4096  # rows of a rank's output that are compared with all rows of the plain model's output


def name_output_cause(expected: Tensor, given: Sequence[Tensor], world_size: int) -> Cause:
    """Return the likely cause (its name and a sentence for the user) why an output or the loss of a distributed model
    is wrong; it has the kind ``unknown`` if no test explains the difference.

    ``expected``: the right tensor, from the plain model (the user's model on one process). ``given``: the tensor on
    each rank that has it. ``world_size``: number of ranks.
    """
    wide = expected.shape[-1] if expected.dim() else 0
    wider = [g for g in given if g.dim() == expected.dim() and g.dim() and g.shape[-1] > wide]
    if wider and all(compare_output(expected, g[..., :wide]) < CLOSE for g in wider):
        return Cause("padding", f"the output has {wider[0].shape[-1] - wide} columns beyond those of the plain model")
    if not given or any(g.shape != expected.shape for g in given):
        return UNKNOWN
    if len(given) > 1 and _is_equal(torch.stack([*given]).sum(0), expected):
        return Cause("unsummed", "the output is a partial sum: the sum over the ranks is right")
    factor = fit_factor(given[0].flatten(), expected.flatten())
    if factor is not None and all(_is_equal(g, factor * expected) for g in given):
        return name_factor(factor, world_size, "output") or UNKNOWN
    for dim, size in enumerate(expected.shape):
        for count in [c for c in range(2, min(size, 64) + 1) if size % c == 0]:
            orders = [_match_blocks(g, expected, dim, count) for g in given]
            if None not in orders and orders[0] != list(range(count)):
                told = ", ".join(map(str, orders[0] or ()))
                return Cause("permuted", f"the {count} blocks of dim {dim} are in a wrong order: {told}")
    return UNKNOWN


def _match_blocks(given: Tensor, expected: Tensor, dim: int, count: int) -> list[int] | None:
    """Return the order of the blocks of ``given``: for each of ``count`` equal blocks along ``dim``, the index of the
    equal block of ``expected``. Return ``None`` if a block has none."""
    blocks = expected.chunk(count, dim)
    order = [next((i for i, b in enumerate(blocks) if _is_equal(g, b)), -1) for g in given.chunk(count, dim)]
    return None if -1 in order else order


def find_first_wrong_module(plain: PlainResults, outcomes: Sequence[RankOutcome]) -> Cause | None:
    """Return a cause that names the first module of a distributed model with a wrong output, in the order in which
    modules return, and says what is wrong with that output. ``None`` if no output is found to be wrong. An output is
    right if each rank has a part of the plain model's output, or if a sum over a group of ranks is such a part.

    ``plain``: the results of the plain model (the user's model on one process), with the output of each module.
    ``outcomes``: the results of the distributed model on each rank, with the outputs of its modules.
    """
    by_rank = [{_match_name(plain, n): calls for n, calls in o.modules.items()} for o in outcomes]
    last = ""  # the last module whose output is right
    for name, expected in plain.modules.items():
        given = {o.rank: calls[name] for o, calls in zip(outcomes, by_rank, strict=True) if name in calls}
        if given and _is_right(expected, given, len(outcomes)):
            last = name
        if not given or last == name:
            continue
        cause = _name_bias(plain, name, given) or UNKNOWN
        if cause is UNKNOWN and all(len(calls) == len(expected) == 1 for calls in given.values()):
            cause = name_output_cause(expected[0], [calls[0] for calls in given.values()], len(outcomes))
        where = f"the output of {name or 'the model'} is wrong first"
        if _is_same_part(expected, given):
            return Cause("wrong-module", f"{where}: all ranks have the same part of it, and no rank has the rest")
        if cause is UNKNOWN and last:
            held = {o.rank: calls[last] for o, calls in zip(outcomes, by_rank, strict=True) if last in calls}
            fused = _name_fused_cut(plain, last, name, held)
            if fused is not None:
                return fused
        if cause is UNKNOWN:
            before = f"; that of {last}, which returns before it, is right" if last else ""
            return Cause("wrong-module", f"{where}{before}")
        return Cause(cause.kind, f"{where}: {cause.text}")
    return None


def find_first_wrong_backward(plain: PlainResults, outcomes: Sequence[RankOutcome]) -> Cause | None:
    """Return a cause that names the first module, in the order of backward, whose output gradient is wrong. This
    function is for models whose outputs are all right. ``None`` if there is no such module, or if no output gradient
    before it is right.

    ``plain``: the results of the plain model (the user's model on one process), with the gradient of the output of each
    module. ``outcomes``: the results of the distributed model on each rank. A gradient is right if, up to a constant
    factor, each rank has a part of the plain model's gradient, or if a sum over a group of ranks is such a part.
    """
    by_rank = [{_match_name(plain, n): calls for n, calls in o.module_gradients.items()} for o in outcomes]
    last, factor = "", 0.0
    for name, expected in plain.module_gradients.items():
        given = {o.rank: calls[name] for o, calls in zip(outcomes, by_rank, strict=True) if name in calls}
        if not given or len(expected) != 1 or any(len(calls) != 1 for calls in given.values()):
            continue
        factors = [factor] if factor else [1.0, float(len(outcomes)), 1.0 / len(outcomes)]
        right = next((f for f in factors if _is_right([f * expected[0]], given, len(outcomes))), 0.0)
        if right:
            last, factor = name, right
        elif last:
            return Cause(
                "wrong-backward",
                f"backward is wrong first at the output of {name}: the output is right on every rank and its gradient "
                f"is not, while the gradient of the output of {last}, which backward computes before, is right; a "
                "collective between them has no backward, or another one than its forward needs",
            )
        else:
            return None
    return None


def find_reduced_precision(outcomes: Sequence[RankOutcome]) -> Cause | None:
    """Return a cause (its name and a sentence for the user) that says that a module computed its output in another type
    than float64, such as under mixed precision; ``None`` if none did. ``outcomes``: for each rank, what the distributed
    model computed, with the outputs of its modules."""
    for outcome in outcomes:
        for name, calls in outcome.modules.items():
            narrow = next((call.dtype for call in calls if call.dtype != torch.float64), None)
            if narrow is not None:
                text = f"the output of {name or 'the model'} is {narrow}: leave mixed precision out of the check"
                return Cause("precision", text)
    return None


def _match_name(plain: PlainResults, name: str) -> str:
    """Return the name that a module of a distributed model has in the plain model, which is the user's model on one
    process. ``plain``: the results of the plain model; ``plain.modules`` has its module names. ``name``: the dotted
    name in the distributed model.

    ``name`` is returned unchanged if the plain model has it. Otherwise the parts are left out that
    DistributedDataParallel, FSDP, ``torch.compile`` and activation checkpointing add: ``module``,
    ``_fsdp_wrapped_module``, ``_orig_mod`` and ``_checkpoint_wrapped_module``. It is not checked that the plain model
    has a module of the resulting name.
    """
    if name in plain.modules:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _is_right(expected: Sequence[Tensor], given: dict[int, list[Tensor]], world_size: int) -> bool:
    """Return whether the outputs of one module on the ranks are right. They are right if each is a part of an output of
    the plain model (the user's model on one process), or if their sum over a group of ranks is such a part.

    ``expected``: the module's outputs in the plain model, one for each call. ``given``: rank -> the module's outputs on
    it, one for each call. ``world_size``: number of ranks.
    """
    if all(any(_is_part(whole, part) for whole in expected) for calls in given.values() for part in calls):
        return not _is_same_part(expected, given)
    if len({tuple(call.shape for call in calls) for calls in given.values()}) > 1:
        return False
    for groups in list_groupings(sorted(given), world_size):
        sums = [[torch.stack(call).sum(0) for call in zip(*(given[r] for r in g), strict=True)] for g in groups]
        if all(any(_is_part(whole, part) for whole in expected) for calls in sums for part in calls):
            return True
    return False


def _is_part(whole: Tensor, part: Tensor) -> bool:
    """Return whether ``part`` is a part of ``whole``, up to rounding: a slice of it, or some of its rows (vectors along
    the last dim) in any order.
    """
    if compare_output(whole, part) < CLOSE:
        return True
    if part.dim() < 2 or whole.dim() < 2 or part.shape[-1] != whole.shape[-1]:
        return False
    rows, parts = whole.flatten(0, -2), part.flatten(0, -2)
    if max(len(rows), len(parts)) > _MOST_ROWS:
        return False
    return bool((torch.cdist(parts, rows).amin(1) <= 1e-6 * max(float(rows.abs().max()), 1e-12)).all())


def _is_same_part(expected: Sequence[Tensor], given: dict[int, list[Tensor]]) -> bool:
    """Return whether all ranks have the same part of a module's output, so that no rank has the rest. Their parts
    together are as large as the whole output. ``expected``: the module's outputs in the plain model (the user's model
    on one process), one for each call. ``given``: rank -> the module's outputs on it.
    """
    if len(given) < 2 or len(expected) != 1 or any(len(calls) != 1 for calls in given.values()):
        return False
    whole, parts = expected[0], [calls[0] for calls in given.values()]
    first = parts[0]
    if not first.numel() < whole.numel() <= first.numel() * len(parts) or first.shape[-1:] != whole.shape[-1:]:
        return False
    rows, held = whole.flatten(0, -2), first.flatten(0, -2)
    if len(rows) > _MOST_ROWS or not all(_is_equal(part, first) for part in parts):
        return False
    return bool((torch.cdist(rows, held).amin(1) > 1e-6 * max(float(rows.abs().max()), 1e-12)).any())


def _name_bias(plain: PlainResults, name: str, given: dict[int, list[Tensor]]) -> Cause | None:
    """Return a cause (its name and a sentence for the user) that says that the module ``name`` has added its bias more
    than once, or not at all; ``None`` if neither explains its outputs. ``plain``: the results of the plain model (the
    user's model on one process), with the outputs and biases of modules. ``given``: rank -> the module's outputs on it,
    one for each call."""
    bias, expected = plain.biases.get(name), plain.modules[name]
    calls = [call for found in given.values() for call in found]
    if bias is None or len(expected) != 1 or any(call.shape != expected[0].shape for call in calls):
        return None
    added = [fit_factor((call - expected[0]).flatten(), bias.expand_as(call).flatten()) for call in calls]
    times = None if added[0] is None else round(added[0]) + 1
    if times is None or times == 1 or not all(_is_equal(c, expected[0] + (times - 1) * bias) for c in calls):
        return None
    return Cause("bias", f"its bias is added {times} times" if times else "its bias is not added")


def _name_fused_cut(plain: PlainResults, last: str, name: str, held: dict[int, list[Tensor]]) -> Cause | None:
    """Return the cause that a fused output (such as queries, keys and values together) was cut over the ranks as a
    whole, and not each part by itself. The cause applies if ranks have different numbers of columns of the first part.
    ``None`` if they have equal numbers, or if these cannot be determined.

    ``plain``: results of the plain model (the user's model on one process). ``last``: the module with the fused output.
    ``name``: the module with a wrong output that reads a combination of the parts; the width of its weight is the width
    of the first part. ``held``: rank -> the outputs of ``last`` on it.
    """
    weight, expected = plain.weights.get(f"{name}.weight"), plain.modules[last]
    if weight is None or weight.dim() != 2 or len(expected) != 1 or not expected[0].dim():
        return None
    whole, first = expected[0], weight.shape[1]
    if not first < whole.shape[-1] <= _MOST_ROWS:
        return None
    columns = whole.flatten(0, -2).T
    counts: dict[int, int] = {}
    for rank, calls in held.items():
        if len(calls) != 1 or calls[0].shape[:-1] != whole.shape[:-1]:
            return None
        distance, places = torch.cdist(calls[0].flatten(0, -2).T.to(columns.dtype), columns).min(1)
        if bool((distance > 1e-6 * max(float(columns.abs().max()), 1e-12)).any()):
            return None
        counts[rank] = int((places < first).sum())
    if len({*counts.values()}) < 2:
        return None
    told = ", ".join(f"{count} on rank {rank}" for rank, count in sorted(counts.items()))
    return Cause(
        "fused-cut",
        f"the output of {last} has several parts, of which {name} reads {first} columns, and is cut as a whole, so "
        f"that ranks have different parts (columns of the first part: {told}): cut each part by itself",
    )


def _is_equal(one: Tensor, other: Tensor) -> bool:
    scale = float(other.abs().max()) if other.numel() else 0.0
    error = float((one - other).abs().max()) if one.shape == other.shape else math.inf
    return error <= CLOSE * max(scale, 1e-12)
