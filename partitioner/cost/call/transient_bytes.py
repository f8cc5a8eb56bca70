"""Transient bytes of sharded states on a rank: gathered weights, and gradients before they are scattered.

Under ZeRO-3 these are the weights and gradients of one call. Under ZeRO-1 and ZeRO-2 they are gradient buckets; this
module counts only the excess of a single gradient over the bucket size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from partitioner.cost.call.call_cost import CallCost
from partitioner.cost.call.states import StateCost, StateCosts
from partitioner.cost.call.zero3_gathers import GatheredBytes


class Scattering(NamedTuple):
    """``num_bytes`` of gradients in flight to their shards on every rank.

    They travel in buckets of ``bucket`` bytes, unless a single gradient is larger. ``whole``: the receive buffer is as
    large as the send buffer.
    """

    num_bytes: float = 0.0
    bucket: float = math.inf
    whole: bool = False


NOTHING_SENT = Scattering()


class AtEnds(NamedTuple):
    """Bytes of a call's sharded states at the ends of a stage. ``last``: while it runs backward as the last call of a
    stage, with all other working memory. ``lingering``: of its gradients until then, if it is the first call.
    ``closing``: when its gradients are sent at the end of a backward, which has freed everything else."""

    last: float = 0.0
    lingering: float = 0.0
    closing: float = 0.0


NOTHING_MORE = AtEnds()


def passing_bytes(
    cost: CallCost, names: Collection[str], states: StateCosts, scattering: Scattering, is_last: bool, several: bool
) -> tuple[GatheredBytes, AtEnds]:
    """Bytes of the states ``names`` that are temporarily whole in a call: anywhere in a stage, and at the ends of a
    stage.

    ``is_last``: the call may be the model's last. ``several``: the step has several microbatches, so each finds
    gradients of the previous microbatch in flight.
    """

    def at(own: GatheredBytes, copied: float = 0.0, lingers: bool = several) -> tuple[GatheredBytes, AtEnds]:
        """Add the working bytes at the ends of a stage. ``copied``: bytes of the copy from which gradients are sent."""
        closing = max(copied, own.sent)
        ends = AtEnds(cost.working_bytes + own.whole, own.sent * lingers, closing and closing + cost.working_bytes)
        return own, ends

    largest = max(map(states.scattered.get, names), key=_get_gradient_bytes, default=None) if states.scattered else None
    if largest is None:
        return at(cost.gathered_bytes)
    sent = 2.0 if scattering.whole else 1 + 1 / largest.replicas  # the receive buffer is additional
    if largest.stage == 3:
        return at(cost.gathered_bytes, 2 * cost.gathered_bytes.sent / sent)
    if largest.stage == 1:
        more = max(0.0, largest.gradient - scattering.bucket)
        # in the last backward, when stages before the last one have freed other microbatches
        return at(GatheredBytes(more * sent * is_last), more * sent, lingers=False)
    # others may be in its bucket that do not fill one
    more = max(0.0, min(largest.gradient, states.gradient - scattering.bucket))
    if not more:
        return at(GatheredBytes())
    # where a stage has one bucket, that of the microbatch before is under way until this one's is full
    often = 1 + sent if several else 2
    closing = often * (more + scattering.bucket) - scattering.num_bytes  # less the buckets that always exist
    return at(GatheredBytes(more, 0.0, more * sent), closing)


def _get_gradient_bytes(state: StateCost | None) -> float:
    return state.gradient if state is not None else -1.0


def gathered_beside(calls: Sequence[GatheredBytes], in_turns: bool) -> list[float]:
    """Bytes of gathered weights and whole gradients during each of consecutive calls.

    A call has its own weights and gradients; forward also the next call's weights; backward also the previous call's
    weights and the next call's gradients. ``in_turns``: the rank alternates between runs of calls, and the other runs
    are assumed to be like these.
    """
    none = GatheredBytes()
    if not any(map(any, calls)):
        return [0.0] * len(calls)
    result = []
    for before, own, after in zip([none, *calls], calls, [*calls[1:], none], strict=False):
        if in_turns:
            weights = max(before.weights, own.weights, after.weights)
            result.append(own.whole + weights + max(own.sent, after.sent))
        else:
            result.append(own.whole + max(before.weights + after.sent, after.weights))
    return result


__all__ = ["gathered_beside", "passing_bytes"]
