"""Choose candidates that the search evaluates first, because a good plan known early prunes most of the other
candidates.

First comes the best candidate of each standard layout and, as long as it does not fit, candidates that need less
memory. For mixtures of experts, the textbook layout with distributed experts follows: ``tp`` inside a node, experts
distributed over many ranks, few stages. From the plans found, the search then goes to neighbours that differ in one
number (ZeRO stage, ``ep``, ``tp``, microbatch size, number of stages), as long as one is better.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from partitioner.candidate import MeshCandidate, in_order
from partitioner.errors import CapacityError
from partitioner.passes.errors import PartitionError
from partitioner.solve.bounds.model_bounds import ModelBounds
from partitioner.solve.search.baselines import MOST_TRIED, StandardLayout
from partitioner.solve.search.space import SearchSpace
from partitioner.units import list_divisors

_MOST_SPREAD = 64  # greatest ep of the first layouts of a mixture of experts

_MOST_QUICK = 3  # candidates without a pipeline that are tried for a first plan
_MOST_WIDE = 8  # greatest tp of these layouts
_MOST_DEPTHS = 3  # how many different numbers of stages of these layouts are tried
_MOST_STEPS = 40  # greatest number of evaluated candidates while neighbours are tried


@dataclass
class WarmStart:
    """Generates the first candidates of a search. The caller evaluates each candidate of :meth:`list_first_candidates`
    and reports the outcome with :meth:`tell` before it requests the next. A candidate is a combination of mesh sizes,
    microbatch size, schedule and ZeRO stage.

    ``space``: the search space. ``candidates``: the candidates that may be evaluated. ``bounds``: computes quick lower
    bounds. ``standards``: the standard layouts that the report shows, such as ZeRO-3. ``deadline``: time
    (:func:`time.monotonic`) after which no more neighbours are tried. ``cutoff_s``: plans that take at least this many
    seconds per step are of no interest. ``coming``: the neighbours of the best plan that will be yielded next, in this
    order, unless one of them turns out to be better; empty if they are not known yet."""

    space: SearchSpace
    candidates: Collection[MeshCandidate]
    bounds: ModelBounds
    standards: Sequence[StandardLayout]
    deadline: float
    cutoff_s: float = math.inf
    coming: Sequence[MeshCandidate] = ()
    _found: dict[MeshCandidate, float | PartitionError] = field(default_factory=dict)

    def tell(self, candidate: MeshCandidate, found: float | PartitionError) -> None:
        """Record the outcome of ``candidate``. ``found``: the seconds of a step of its best plan, or the error that
        says why it has no plan. ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        self._found[candidate] = found

    def list_first_candidates(self) -> Iterator[MeshCandidate]:
        """Yield the candidates (mesh sizes, microbatch size, schedule and ZeRO stage) that the search evaluates first,
        so that it soon has a good plan: candidates with the standard layouts of the report, such as ZeRO-3. For models
        with experts, for which the search itself is slow to find good plans, textbook layouts with distributed experts
        follow, and then neighbours of the plans found."""
        # those without a pipeline are quick to plan, and their plans prune the others
        for standard in sorted(self.standards, key=_begins_with_pipeline):
            if _begins_with_pipeline(standard) and not self.space.experts and math.isinf(self._best_s):
                yield from self._list_quick_candidates()
            yield from self._yield_until_one_fits(standard)
        if not self.space.experts:  # without experts the search itself finds good plans quickly
            return
        yield from self._list_expert_layouts()
        plans = {candidate: seconds for candidate, seconds in self._found.items() if isinstance(seconds, float)}
        for candidate in sorted(plans, key=plans.__getitem__):
            yield from self._climb_from_candidate(candidate)

    @property
    def _best_s(self) -> float:
        return min((s for s in self._found.values() if isinstance(s, float)), default=self.cutoff_s)

    def _list_quick_candidates(self) -> Iterator[MeshCandidate]:
        """Yield candidates (mesh sizes, microbatch size, schedule and ZeRO stage) without a pipeline, those with the
        least lower bounds first. Stop when the caller reports a plan for one of them, or after a few without a plan."""
        quick = sorted((candidate for candidate in self.candidates if candidate.pp == 1), key=in_order)
        order = self.bounds.times(quick).argsort(kind="stable").tolist() if quick else []
        worth = (quick[number] for number in order if self._is_worth(quick[number]))
        for candidate in islice(worth, _MOST_QUICK):
            yield candidate
            if isinstance(self._found.get(candidate), float):
                return

    def _yield_until_one_fits(self, standard: StandardLayout) -> Iterator[MeshCandidate]:
        """Yield candidates (mesh sizes, microbatch size, schedule and ZeRO stage) that have the well-known layout
        ``standard``, such as ZeRO-3, one after the other, until the caller reports a plan for one. The first is always
        yielded, because the report shows it; the others only if they may be better than the best plan so far.
        """
        tried = 0
        for candidate in standard.candidates[: 1 if standard.excluded else None]:
            if tried and not self._is_worth(candidate):
                continue
            yield candidate
            tried += 1
            if isinstance(self._found.get(candidate), float) or tried == MOST_TRIED:
                return

    def _is_worth(self, candidate: MeshCandidate) -> bool:
        """Return whether ``candidate`` should be evaluated: it belongs to the candidates of the search, was not tried
        yet, and may be better than the best plan so far by its quick lower bounds. ``candidate``: mesh sizes,
        microbatch size, schedule and ZeRO stage.
        """
        if candidate in self._found or candidate not in self.candidates:
            return False
        try:
            self.bounds.check_states(candidate)
            self.bounds.check_microbatch(candidate)
        except PartitionError:
            return False
        return bool(self.bounds.times([candidate])[0] < self._best_s)

    def _list_expert_layouts(self) -> Iterator[MeshCandidate]:
        """Yield candidates (mesh sizes, microbatch size, schedule and ZeRO stage) with textbook layouts of a mixture of
        experts, with as few pipeline stages and as large a microbatch as fit in memory.
        """
        depths, pinned = 0, self.space.constraints
        for pp in list_divisors(self.space.world_size):
            room = self.space.world_size // pp
            inside = math.gcd(room, self.space.topology.devices_per_node)
            tp = pinned.tp or max(n for n in list_divisors(inside) if n <= _MOST_WIDE)
            ep = pinned.ep or max(n for n in list_divisors(math.gcd(self.space.experts, room)) if n <= _MOST_SPREAD)
            if room % tp or pinned.pp not in (None, pp):
                continue
            zero = int(room > tp) if pinned.zero is None else pinned.zero
            etp = int(tp > 1 < ep) if pinned.etp is None else pinned.etp % tp
            candidate = MeshCandidate(pp, room // tp, tp, 1, ep=ep, etp=etp, zero=zero)
            worth = [s for s in self.space.sizes(candidate.dp) if self._is_worth(replace(candidate, microbatch_size=s))]
            depths += bool(worth)
            while worth:
                times = self.bounds.times([replace(candidate, microbatch_size=s) for s in worth])
                size = worth[int(times.argmin())]
                yield (tried := replace(candidate, microbatch_size=size))
                found = self._found.get(tried)
                if isinstance(found, float):
                    return
                most = self._estimate_fitting_microbatch(tried, found) if isinstance(found, CapacityError) else 0
                worth = [s for s in worth if s <= most]
            if depths == _MOST_DEPTHS:
                return

    def _estimate_fitting_microbatch(self, candidate: MeshCandidate, error: CapacityError) -> int:
        """Return a microbatch size that probably fits, given the shortage ``error`` of ``candidate``. It is assumed
        that all memory except parameters, gradients and optimizer states is proportional to the microbatch size.
        ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage.
        """
        room = self.bounds.capacity(candidate) - self.bounds.state_bytes(candidate)
        share = max(0.0, room) / max(1.0, room + error.missing_bytes)
        return min(candidate.microbatch_size - 1, max(1, int(candidate.microbatch_size * share)))

    def _climb_from_candidate(self, start: MeshCandidate) -> Iterator[MeshCandidate]:
        """Yield neighbours of ``start``, a candidate that has a plan, one at a time; a neighbour differs in one number,
        such as ``tp``. When the caller reports a better plan for a neighbour, the neighbours of that neighbour follow
        instead. The iteration ends if no neighbour is better, after a number of steps, or when time runs out.
        ``start``: mesh sizes, microbatch size, schedule and ZeRO stage."""
        here = start
        while True:
            neighbours = dict.fromkeys(self._list_neighbour_candidates(here))
            self.coming = [candidate for candidate in neighbours if self._is_worth(candidate)]
            for candidate in self.coming:
                if len(self._found) > _MOST_STEPS or time.monotonic() > self.deadline:
                    return
                if self._is_worth(candidate):
                    yield candidate
                    found, known = self._found.get(candidate), self._found[here]
                    if isinstance(found, float) and isinstance(known, float) and found < known:
                        here = candidate
                        break
            else:
                return

    def _list_neighbour_candidates(self, candidate: MeshCandidate) -> Iterator[MeshCandidate]:
        """Yield candidates that differ from ``candidate`` in one number, such as the ZeRO stage, ``tp`` or the
        microbatch size. Candidates with the same graphs on a rank come first, because they are quick to plan.
        ``candidate``: mesh sizes, microbatch size, schedule and ZeRO stage."""
        if candidate.dp > 1:
            yield from (candidate.sharing(zero) for zero in (3, 2, 1, 0))
        for ep in _find_adjacent_numbers(list_divisors(self.space.experts), candidate.ep):
            etp = 1 if candidate.tp > 1 and ep > 1 and (candidate.etp or candidate.ep == 1) else candidate.etp
            yield replace(candidate, ep=ep, etp=etp if ep > 1 else 0)
        for tp in _find_adjacent_numbers(
            list_divisors(math.gcd(candidate.dp * candidate.tp, self.space.widest)), candidate.tp
        ):
            dp, etp = (
                candidate.dp * candidate.tp // tp,
                1 if tp > 1 and candidate.ep > 1 and (candidate.etp or candidate.tp == 1) else 0,
            )
            sizes = self.space.sizes(dp)
            size = max([s for s in sizes if s * candidate.tp <= candidate.microbatch_size * tp], default=1)
            yield replace(candidate, tp=tp, dp=dp, etp=etp, microbatch_size=size)
        for size in _find_adjacent_numbers(self.space.sizes(candidate.dp), candidate.microbatch_size):
            yield replace(candidate, microbatch_size=size)
        for pp in _find_adjacent_numbers(list_divisors(candidate.pp * candidate.dp), candidate.pp):
            yield replace(candidate, pp=pp, dp=candidate.pp * candidate.dp // pp)


def _begins_with_pipeline(standard: StandardLayout) -> bool:
    """Return whether the first candidate of the well-known layout ``standard``, such as ZeRO-3, has several pipeline
    stages; ``False`` if the layout has no candidates."""
    return any(candidate.pp > 1 for candidate in standard.candidates[:1])


def _find_adjacent_numbers(numbers: Sequence[int], number: int) -> list[int]:
    """Return the neighbours of ``number`` among the ascending ``numbers``, as a list: the greatest number below it and
    the least above it, if they exist."""
    below, above = [n for n in numbers if n < number], [n for n in numbers if n > number]
    return [*below[-1:], *above[:1]]


__all__ = ["WarmStart"]
