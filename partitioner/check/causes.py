"""Find the likely cause of a wrong gradient in a distributed model. Each cause is a numerical relation between the
wrong and the right gradients, such as a constant factor.

Every test is a comparison in float64. A cause is only reported if its relation holds; otherwise the cause is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor

from partitioner.check.compare import HeldElements, PlacedShards, largest_gradient
from partitioner.check.plain_run import GradientParts, PlainResults

CLOSE = 1e-7  # relative error up to which a relation between gradients holds


_FITTED_ROWS = 100_000  # elements from which weights of pieces are computed; the result is compared on all elements


_PERMUTED_ELEMENTS = 1_000_000  # elements of the largest gradient in which permuted blocks are searched


@dataclass(frozen=True)
class Cause:
    """A likely cause why results of a distributed model differ from those of the plain model, the user's model on one
    process.

    Attributes:
        kind: identifier, such as ``unsummed``; the documentation of ``partitioner check`` explains each.
        text: what was found, in a sentence. Results with equal ``kind`` and ``text`` are reported together.
        detail: a further sentence on one result; it is not compared. Empty if there is none.
    """

    kind: str
    text: str
    detail: str = field(default="", compare=False)


UNKNOWN = Cause("unknown", "no known relation to the results of the plain model holds")


class CauseFinder:
    """Finds the likely cause why the gradient of a parameter in a distributed model differs from its gradient in the
    plain model (the user's model on one process).

    Args:
        plain: results of the plain model: outputs, loss and gradients.
        parts: the terms that the gradients of the plain model are sums of, such as the gradient through each sample.
        placed: which elements of the plain model's parameters each rank holds, and their gradients there.
        world_size: number of ranks.
        differing: names of the parameters whose gradients differ.
    """

    def __init__(
        self,
        plain: PlainResults,
        parts: GradientParts,
        placed: PlacedShards,
        world_size: int,
        differing: Sequence[str],
    ) -> None:
        self.plain = plain
        self.parts = parts
        self.placed = placed
        self.world_size = world_size
        self.differing = differing

    def explain_gradient(self, name: str) -> Cause:
        """Return the likely cause why the gradient of the parameter ``name`` (its name in the plain model, the user's
        model on one process) is wrong on some rank. The cause has the kind ``unknown`` if no test explains it."""
        tests: tuple[Callable[[str], Cause | None], ...] = (
            self._find_unheld,
            self._find_missing,
            self._find_untied,
            self._find_local_clipping,
            self._find_factor,
            self._find_unsummed,
            self._find_swapped,
            self._find_rounded,
            self._find_reweighted,
        )
        cause = next((cause for test in tests if (cause := test(name)) is not None), None)
        return self._describe_unknown(name) if cause is None else cause

    def expected(self, name: str) -> Tensor:
        """Return the right gradient of the parameter ``name`` as a flat tensor: its gradient in the plain model (the
        user's model on one process), or zeros if it has no gradient.
        """
        grad = self.plain.grads[name]
        return torch.zeros(self.plain.weights[name].numel()) if grad is None else grad.flatten()

    def is_close(self, one: Tensor, other: Tensor, scale: float) -> bool:
        """Return whether ``one`` and ``other`` have the same shape and are equal except for rounding. ``scale``:
        largest absolute element of the whole gradient, to which the rounding error is relative."""
        if one.shape != other.shape:
            return False
        least = max(scale, 1e-6 * self.largest)
        return one.numel() == 0 or float((one - other).abs().max()) <= CLOSE * least

    @cached_property
    def largest(self) -> float:
        return largest_gradient(self.plain)

    def _describe_unknown(self, name: str) -> Cause:
        """Return the cause ``unknown`` for the wrong gradient of the parameter ``name``. Its detail says how the
        gradient on the first rank compares with the right one: the cosine of the angle between both and the ratio of
        their norms, or that it is not finite."""
        holder = next((h for h in self.placed.holders[name] if h.gradient is not None), None)
        if holder is None or holder.gradient is None:
            return UNKNOWN
        due, given = self.expected(name)[holder.index], holder.gradient
        if not bool(given.isfinite().all()):
            return Cause(UNKNOWN.kind, UNKNOWN.text, f"That of {name} on rank {holder.rank} is not finite.")
        lengths = float(due.norm()), float(given.norm())
        if min(lengths) == 0.0:
            return UNKNOWN
        cosine = float(due @ given) / lengths[0] / lengths[1]
        told = f"has cosine {cosine:.4f} with the right gradient, and {lengths[1] / lengths[0]:.4g} times its length"
        return Cause(UNKNOWN.kind, UNKNOWN.text, f"That of {name} on rank {holder.rank} {told}.")

    def _find_unheld(self, name: str) -> Cause | None:
        shape = self.plain.weights[name].shape
        held = torch.zeros(shape.numel(), dtype=torch.bool)
        for holder in self.placed.holders[name]:
            held[holder.index] = True
        if bool(held.all()):
            return None
        if not bool(held.any()):
            return Cause("not-held", "no rank holds the parameter with the values of the plain model")
        share = f"{int((~held).sum())} of {held.numel()} elements"
        rows = (~held.view(shape[0], -1).any(1)).nonzero().flatten().tolist()
        where = f" (rows {_format_ranges(rows)} of dim 0)" if rows else ""
        text = "no rank holds some elements of the parameter: shards are missing, stale or duplicated"
        return Cause("not-held", text, f"Of {name}, these are {share}{where}.")

    def _find_missing(self, name: str) -> Cause | None:
        """Return the cause (its name and a sentence for the user) if the gradient of the parameter ``name`` is ``None``
        on some rank or zero on all ranks, although the right gradient of the elements on these ranks is not zero;
        ``None`` otherwise."""
        holders = self.placed.holders[name]
        expected = self.expected(name)
        without = [h for h in holders if h.gradient is None and bool(expected[h.index].any())]
        zero = [
            h
            for h in holders
            if h.gradient is not None and not bool(h.gradient.any()) and bool(expected[h.index].any())
        ]
        if not without and not zero:
            return None
        kind, ranks = ("None", without) if without else ("zero", zero)
        if len(ranks) < len(holders) and not without:
            return None  # the other ranks may have the sum
        on = "every rank" if len(ranks) == len(holders) else format_ranks(h.rank for h in ranks)
        return Cause(
            "missing",
            f"the gradient is {kind} on {on}: the path from the loss is cut (detach, no_grad, frozen, unused)",
        )

    def _find_untied(self, name: str) -> Cause | None:
        """Return the cause (its name and a sentence for the user) if the parameter ``name`` is tied in the plain model
        (the user's model on one process), but each rank has only the gradient through one of its uses; ``None``
        otherwise."""
        uses = self.parts.uses.get(name, {})
        if len(uses) < 2:
            return None
        scale = float(self.expected(name).abs().max())
        found: dict[str, list[int]] = {}
        for holder in self.placed.holders[name]:
            if holder.gradient is None:
                return None
            use = next(
                (u for u, g in uses.items() if self.is_close(holder.gradient, g.flatten()[holder.index], scale)), None
            )
            if use is None:
                return None
            found.setdefault(use, []).append(holder.rank)
        told = "; ".join(f"{format_ranks(ranks)} only through {use}" for use, ranks in found.items())
        return Cause(
            "untied", f"the weights {' and '.join(uses)} are no longer tied: the gradient is that of one use: {told}"
        )

    def _find_local_clipping(self, name: str) -> Cause | None:
        """Return the cause (its name and a sentence for the user) if the gradient of the parameter ``name`` was clipped
        on each rank by the norm of that rank's own gradients instead of the norm over all ranks; ``None`` otherwise."""
        most = self.plain.clip_norm
        if most is None:
            return None
        whole = self.parts.grads[name].flatten()
        holders = self.placed.holders[name]
        norms = {h.rank: self._local_norms[h.rank] for h in holders}
        for holder in holders:
            factor = min(1.0, most / (norms[holder.rank] + 1e-6))
            due = whole[holder.index] * factor
            if holder.gradient is None or not self.is_close(holder.gradient, due, float(whole.abs().max())):
                return None
        total = math.sqrt(sum(float(g.square().sum()) for g in self.parts.grads.values()))
        told = ", ".join(f"{norm:.4g} on rank {rank}" for rank, norm in sorted(self._local_norms.items()))
        return Cause(
            "local-clip",
            f"the gradient is clipped by the norm of a rank's own gradients ({told}), not of all ({total:.4g})",
        )

    @cached_property
    def _local_norms(self) -> dict[int, float]:
        """Return rank -> L2 norm of a gradient vector: the right gradients, before clipping, of all parameter elements
        that the rank holds.
        """
        squares = dict.fromkeys(range(self.world_size), 0.0)
        for name, whole in self.parts.grads.items():
            for holder in self.placed.holders[name]:
                squares[holder.rank] += float(whole.flatten()[holder.index].square().sum())
        return {rank: math.sqrt(square) for rank, square in squares.items()}

    def _find_factor(self, name: str) -> Cause | None:
        """Return the cause (its name and a sentence for the user) if, on every rank, the gradient of the parameter
        ``name`` is a constant times the right gradient; the constant may differ by rank. Return ``None`` otherwise."""
        expected = self.expected(name)
        scale = float(expected.abs().max())
        factors: dict[int, float] = {}
        for holder in self.placed.holders[name]:
            if holder.gradient is not None and not bool(expected[holder.index].any() | holder.gradient.any()):
                continue  # such as rows of an embedding that no token of the batch reads
            factor = fit_factor(holder.gradient, expected[holder.index])
            if factor is None or holder.gradient is None:
                return None
            if not self.is_close(holder.gradient, factor * expected[holder.index], scale * max(abs(factor), 1.0)):
                return None
            factors[holder.rank] = factor
        if not factors:
            return None
        values = sorted(factors.values())
        if values[-1] - values[0] > CLOSE * max(map(abs, values)):
            told = ", ".join(f"{_format_factor(f)} on rank {r}" for r, f in sorted(factors.items()))
            return Cause("factor-by-rank", f"the gradient is right but for a factor that differs by rank: {told}")
        return name_factor(values[-1], self.world_size)

    def _find_unsummed(self, name: str) -> Cause | None:
        """Return the cause (its name and a sentence for the user) if a reduction of the gradient of the parameter
        ``name`` is missing, and ``None`` otherwise. It is missing if the sum of the gradients over ranks that hold the
        same elements, their mean, or a multiple of their sum equals the right gradient.
        """
        holders = [h for h in self.placed.holders[name] if h.gradient is not None]
        expected = self.expected(name)
        scale = float(expected.abs().max())
        for group in list_groupings(sorted({h.rank for h in holders}), self.world_size):
            total, count = torch.zeros((2, len(group), len(expected)), dtype=torch.float64).unbind()
            for row, ranks in enumerate(group):
                for holder in (h for h in holders if h.rank in ranks):
                    assert holder.gradient is not None
                    total[row].index_add_(0, holder.index, holder.gradient)
                    count[row].index_add_(0, holder.index, torch.ones(len(holder.index), dtype=torch.float64))
            if not bool((count > 1).any()):
                continue
            due = torch.where(count > 0, expected.expand_as(total), 0.0)
            own = self._describe_shares(name, holders)
            over = "all ranks that hold it" if len(group) == 1 else f"the ranks {_format_groups(group)}"
            if self.is_close(total, due, scale):
                return Cause("unsummed", f"the gradient is a partial sum: the sum over {over} is right", own)
            if self.is_close(total / count.clamp(min=1), due, scale):
                return Cause("unaveraged", f"each rank has its own gradient: the mean over {over} is right", own)
            factor = fit_factor(total.flatten(), due.flatten())
            if factor is not None and self.is_close(total, factor * due, scale * max(1.0, abs(factor))):
                return Cause(
                    "unsummed-scaled",
                    f"the gradient is a partial sum with a wrong factor: the sum over {over} is "
                    f"{_format_factor(factor)} times the right gradient",
                    own,
                )
        return None

    def _describe_shares(self, name: str, holders: Sequence[HeldElements]) -> str:
        """Return a sentence that says which samples, or which parts of the sequence, contribute to the gradient of the
        parameter ``name`` on each rank. Return an empty text if this cannot be determined, or if it is equal on all
        ranks. ``holders``: the elements of the parameter on each rank, with their gradients.
        """
        if not self.parts.labels or self.plain.weights[name].numel() < 2 * len(self.parts.labels):
            return ""
        shares: dict[int, set[tuple[int, int]]] = {}
        for rank in sorted({h.rank for h in holders}):
            weights = self._solve_weights(rank, [name])
            if weights is None:
                return ""  # pieces are mixed on the way to the output, or divided in another way
            shares[rank] = {label for label, w in weights.items() if abs(w) > 1e-6}
        everything = set().union(*shares.values())
        if all(share == everything for share in shares.values()):
            return ""
        samples = {rank: {sample for sample, _ in share} for rank, share in shares.items()}
        chunks = {rank: {chunk for _, chunk in share} for rank, share in shares.items()}
        if all(s == {sample for sample, _ in everything} for s in samples.values()):
            told = "; ".join(f"rank {r}: part {_format_ranges(sorted(c))}" for r, c in chunks.items())
            return f"At {name}, each rank has only its own part of the sequence ({told})."
        told = "; ".join(f"rank {r}: {_format_ranges(sorted(s))}" for r, s in samples.items())
        return f"At {name}, each rank has only its own samples ({told})."

    def _find_swapped(self, name: str) -> Cause | None:
        """Return the cause (its name and a sentence for the user) if the gradient of the parameter ``name`` is right
        except for the order of its elements, and ``None`` otherwise. Two causes are distinguished: each rank with a
        wrong gradient has the right gradient of another rank's elements; or equal blocks along one dim are in a wrong
        order."""
        expected = self.expected(name)
        scale = float(expected.abs().max())
        holders = [h for h in self.placed.holders[name] if h.gradient is not None]
        moved = []
        for holder in holders:
            assert holder.gradient is not None
            if self.is_close(holder.gradient, expected[holder.index], scale):
                continue
            other = next(
                (
                    o.rank
                    for o in holders
                    if len(o.index) == len(holder.index) and self.is_close(holder.gradient, expected[o.index], scale)
                ),
                None,
            )
            if other is None:
                return self._find_permuted(name)
            moved.append(f"rank {holder.rank} has that of rank {other}")
        if not moved:
            return None
        return Cause("swapped", f"shards are in a wrong order of ranks: of the gradient, {'; '.join(moved)}")

    def _find_permuted(self, name: str) -> Cause | None:
        """Return the cause (its name and a sentence for the user) if the gradient of the parameter ``name`` has equal
        blocks along one dim in a wrong order and is right otherwise; ``None`` if it is wrong in another way. All
        numbers of blocks from 2 to 64 are tried.
        """
        holders = [h for h in self.placed.holders[name] if h.gradient is not None]
        shape = self.plain.weights[name].shape
        expected = self.expected(name)
        scale = float(expected.abs().max())
        for dim, size in enumerate(shape if len(expected) <= _PERMUTED_ELEMENTS else ()):
            for count in [c for c in range(2, min(size, 64) + 1) if size % c == 0]:
                orders = []
                for holder in holders:
                    assert holder.gradient is not None
                    given = torch.full_like(expected, math.nan)
                    given[holder.index] = holder.gradient
                    order = self._match_blocks(given.view(shape), expected.view(shape), dim, count, scale)
                    if order is None:
                        break
                    orders.append(order)
                if len(orders) == len(holders) and orders:
                    told = ", ".join(map(str, orders[0]))
                    return Cause("permuted", f"the {count} blocks of dim {dim} are in a wrong order: {told}")
        return None

    def _match_blocks(self, given: Tensor, expected: Tensor, dim: int, count: int, scale: float) -> list[int] | None:
        """Return the order of the blocks in a wrong gradient: for each of ``count`` equal blocks of ``given`` along
        ``dim``, the index of the equal block of ``expected``. Return ``None`` if a block has none.

        ``given``: the gradient on one rank, NaN where the rank holds no elements; blocks of NaN are skipped.
        ``expected``: the right gradient, of the same shape. ``scale``: largest absolute element of the right gradient,
        to which the rounding error is relative.
        """
        blocks = expected.chunk(count, dim)
        order = []
        for block in given.chunk(count, dim):
            if bool(block.isnan().all()):
                continue
            match = next((i for i, b in enumerate(blocks) if self.is_close(block, b, scale)), None)
            if match is None:
                return None
            order.append(match)
        return order

    def _find_rounded(self, name: str) -> Cause | None:
        """Return the cause (its name and a sentence for the user) if the gradient of the parameter ``name`` was rounded
        to a shorter dtype than float64. Then it differs from the right gradient by rounding errors of that dtype, and
        all its elements are numbers of that dtype, possibly times or divided by the number of ranks. ``None``
        otherwise."""
        expected = self.expected(name)
        least = max(float(expected.abs().max()), 1e-6 * self.largest)
        given = {h.rank: (h.gradient, expected[h.index]) for h in self.placed.holders[name] if h.gradient is not None}
        if not given or not all(bool(gradient.isfinite().all()) for gradient, _ in given.values()):
            return None
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            most = self.world_size * torch.finfo(dtype).eps * least
            near = all(float((g - due).abs().max()) <= most for g, due in given.values() if g.numel())
            short = any(
                all(_is_rounded(gradient * factor, dtype) for gradient, _ in given.values())
                for factor in (1, self.world_size, 1 / self.world_size)
            )
            if near and short:
                narrow = str(dtype).removeprefix("torch.")
                text = f"the gradient is rounded to {narrow}, such as by a reduction in this type"
                return Cause("precision", text)
        return None

    def _find_reweighted(self, name: str) -> Cause | None:
        """Return the cause (its name and a sentence for the user) if the gradient of the parameter ``name`` is a sum of
        the gradients through single samples or tokens of the batch with wrong weights (not all are 1); ``None`` if the
        gradient is not such a sum."""
        ranks = sorted({h.rank for h in self.placed.holders[name]})
        fits = {rank: self._fit_pieces(rank) for rank in ranks}
        found = {rank: weights for rank, weights in fits.items() if weights is not None}
        if len(found) < len(ranks) or not found:
            return None
        first = found[ranks[0]]
        if all(_is_same_fit(first, weights) for weights in found.values()):
            return _name_weights(first, self.parts.labels)
        shares = {
            rank: ", ".join(f"sample {s} part {c} {_format_factor(w)}" for (s, c), w in [*weights.items()][:4])
            for rank, weights in found.items()
        }
        told = "; ".join(f"rank {rank}: {share}" for rank, share in shares.items())
        return Cause("reweighted", f"the gradient of each rank is another weighted sum of parts of the batch ({told})")

    def _fit_pieces(self, rank: int) -> dict[tuple[int, int], float] | None:
        """Return the weights with which the pieces of the batch contribute to all differing gradients of ``rank``:
        (sample, part of the sequence) -> weight, 1 if right. ``None`` if the gradients are no weighted sum of the
        gradients through the pieces. The result is cached."""
        if rank not in self._fits:
            self._fits[rank] = self._solve_weights(rank, self.differing)
        return self._fits[rank]

    @cached_property
    def _fits(self) -> dict[int, dict[tuple[int, int], float] | None]:
        return {}

    def _solve_weights(self, rank: int, names: Sequence[str]) -> dict[tuple[int, int], float] | None:
        """Return the weights with which the pieces of the batch contribute to the gradients of the parameters ``names``
        on ``rank``: (sample, part of the sequence) -> weight, 1 if right. They are computed by least squares. ``None``
        if the gradients are no weighted sum of the gradients through the pieces.
        """
        columns, targets = [], []
        for name in names:
            for holder in self.placed.holders[name]:
                if holder.rank == rank and holder.gradient is not None and name in self.parts.pieces:
                    columns.append(self.parts.pieces[name][:, holder.index])
                    targets.append(holder.gradient)
        if not columns:
            return None
        matrix, target = torch.cat(columns, 1).T, torch.cat(targets)
        used = matrix.abs().amax(0) > 1e-12 * max(float(matrix.abs().max()), 1e-300)
        if not bool(used.any()) or matrix.shape[0] < 2 * int(used.sum()):
            return None
        step = max(1, len(matrix) // _FITTED_ROWS)
        equations = torch.linalg.lstsq(matrix[::step, used], target[::step, None], driver="gelsd")
        solution = equations.solution[:, 0]
        if not self.is_close(matrix[:, used] @ solution, target, float(target.abs().max())):
            return None
        labels = [label for label, u in zip(self.parts.labels, used.tolist(), strict=True) if u]
        return dict(zip(labels, solution.tolist(), strict=True))


def _is_rounded(values: Tensor, dtype: torch.dtype) -> bool:
    """Return whether all ``values`` are numbers of ``dtype``, to within the rounding of float64."""
    return bool(
        ((values - values.to(dtype).to(values.dtype)).abs() <= 4 * torch.finfo(values.dtype).eps * values.abs()).all()
    )


def name_factor(factor: float, world_size: int, what: str = "gradient") -> Cause | None:
    """Return the cause (its name and a sentence for the user) why a result is ``factor`` times the right result, for
    example because ranks were summed instead of averaged; ``None`` if the factor is 1. ``world_size``: number of ranks.
    ``what``: name of the result in the text, such as ``output``.
    """
    if abs(factor - 1.0) < CLOSE:
        return None
    for n in range(2, world_size + 1):
        over = f"over {n} ranks (or microbatches)"
        if world_size % n == 0 and abs(factor - n) < CLOSE * n:
            return Cause("summed", f"the {what} is {n} times the right one: a sum {over} where the mean is due")
        if world_size % n == 0 and abs(factor * n - 1.0) < CLOSE:
            return Cause("averaged", f"the {what} is 1/{n} of the right one: a mean {over} where the sum is due")
    return Cause("factor", f"the {what} is {_format_factor(factor)} times the right one")


def _is_same_fit(one: Mapping[tuple[int, int], float], other: Mapping[tuple[int, int], float]) -> bool:
    return one.keys() == other.keys() and all(abs(one[label] - other[label]) < 1e-6 for label in one)


def _name_weights(weights: Mapping[tuple[int, int], float], labels: Sequence[tuple[int, int]]) -> Cause | None:
    """Return the cause (its name and a sentence for the user) why pieces of the batch contribute to gradients with
    wrong ``weights``; ``None`` if all are 1. ``weights``: (sample, part of the sequence) -> weight, 1 if right.
    ``labels``: (sample, part of the sequence) of all pieces, including pieces without a target, which have no weight.
    """
    samples = sorted({sample for sample, _ in weights})
    by_sample = {s: [w for (sample, _), w in weights.items() if sample == s] for s in samples}
    if all(max(w) - min(w) < 1e-6 for w in by_sample.values()):
        means, pieces = {s: w[0] for s, w in by_sample.items()}, sorted({sample for sample, _ in labels})
        unit = "sample"
    else:
        chunks = sorted({chunk for _, chunk in weights})
        by_chunk = {c: [w for (_, chunk), w in weights.items() if chunk == c] for c in chunks}
        if any(max(w) - min(w) > 1e-6 for w in by_chunk.values()):
            told = ", ".join(f"sample {s} part {c}: {_format_factor(w)}" for (s, c), w in [*weights.items()][:8])
            return Cause("reweighted", f"parts of the batch have wrong weights in the gradient: {told}")
        means, pieces = {c: w[0] for c, w in by_chunk.items()}, sorted({chunk for _, chunk in labels})
        unit = "part of the sequence"
    if all(abs(w - 1.0) < 1e-6 for w in means.values()):
        return None
    told = ", ".join(f"{unit} {i}: {_format_factor(w)}" for i, w in [*means.items()][:8])
    groups = _split_equal_weights(means, pieces)
    if groups is not None:
        return Cause(
            "mean-of-means",
            f"a mean of {groups} means is taken where the parts have unequal numbers of targets; weights in the "
            f"gradient: {told}",
        )
    dropped = [i for i, w in means.items() if abs(w) < 1e-6]
    if dropped and all(abs(w - 1.0) < 1e-6 or i in dropped for i, w in means.items()):
        return Cause("dropped", f"{unit} {_format_ranges(dropped)} does not count: weights in the gradient: {told}")
    return Cause("reweighted", f"parts of the batch have wrong weights in the gradient: {told}")


def _split_equal_weights(means: Mapping[int, float], pieces: Sequence[int]) -> int | None:
    """Find out whether a gradient is a mean of means over groups of the batch where a mean over all targets is right.
    Return the number of groups; ``None`` if the weights do not show this.

    ``means``: index of a sample (or part of the sequence) in the batch -> its weight in the gradient, 1 if right.
    ``pieces``: the indices of all samples (or parts), including samples that have no target and therefore no weight. If
    group i of n groups has the fraction f_i of all targets, the mean of means gives it the weight 1 / (n f_i). The
    fractions add up to 1, so the inverse weights of the groups add up to n.
    """
    if any(weight <= 1e-6 for weight in means.values()):
        return None
    for n in range(2, len(pieces) + 1):
        each, rest = divmod(len(pieces), n)
        if rest:
            continue
        blocks = [pieces[i * each : (i + 1) * each] for i in range(n)]
        strided = [pieces[i::n] for i in range(n)]
        for groups in (blocks, strided):
            known = [[means[piece] for piece in group if piece in means] for group in groups]
            known = [weights for weights in known if weights]
            equal = all(max(weights) - min(weights) < 1e-6 for weights in known)
            if equal and abs(sum(1 / weights[0] for weights in known) - n) < 1e-6 * n:
                return n
    return None


def list_groupings(ranks: Sequence[int], world_size: int) -> list[list[list[int]]]:
    """Return all ways to divide ``ranks`` into groups over which a reduction may be missing. Each way is a list of
    groups, and a group is a list of ranks. A group has consecutive ranks, or ranks at equal distances, and its size
    divides ``world_size`` (the number of all ranks). The last way is a single group of all ``ranks``."""
    found = []
    for size in range(2, world_size):
        if world_size % size:
            continue
        near = [[r for r in ranks if r // size == g] for g in range(world_size // size)]
        stride = world_size // size
        far = [[r for r in ranks if r % stride == g] for g in range(stride)]
        found += [[g for g in groups if g] for groups in (near, far)]
    return [*found, [list(ranks)]]


def fit_factor(given: Tensor | None, right: Tensor) -> float | None:
    """Return the factor f for which f times ``right`` is nearest to ``given`` (both one-dimensional) by least squares;
    ``None`` if ``given`` is ``None`` or not finite, or ``right`` is zero."""
    if given is None or not bool(given.isfinite().all()):
        return None
    square = float(right @ right)
    return float(given @ right) / square if square > 0.0 else None


def _format_factor(value: float) -> str:
    """Return ``value`` as text: a fraction such as ``1/4`` if it equals one with a denominator of at most 64, otherwise
    six significant digits."""
    if abs(value) < 1e-9:
        return "0"
    near = Fraction(value).limit_denominator(64)
    if near.denominator > 1 and abs(float(near) - value) < 1e-7 * max(1.0, abs(value)):
        return f"{near.numerator}/{near.denominator}"
    return f"{value:.6g}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ``ranks`` as text, such as ``ranks 0-2, 5``."""
    numbers = sorted(set(ranks))
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {_format_ranges(numbers)}"


def _format_groups(groups: Sequence[Sequence[int]]) -> str:
    return " and ".join(_format_ranges(g) for g in groups)


def _format_ranges(numbers: Sequence[int]) -> str:
    """Return ``numbers``, integers in ascending order, as text with ranges, such as ``0-2, 5``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
