"""Bytes of sharded states that a rank holds temporarily: gathered weights, and gradients before they are
reduce-scattered.

Under ZeRO-3 these are the weights and gradients of one call. Under ZeRO-1 and ZeRO-2 they are buckets of gradients;
this module counts only the bytes by which a single gradient exceeds the bucket size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from partitioner.cost.call.call_cost import CallCost
from partitioner.cost.call.states import StateCost, StateCosts
from partitioner.cost.call.zero3_gathers import GatheredBytes


class Scattering(NamedTuple):
    """Bytes of gradients that every rank holds while they are sent to the ranks that own their shards (ZeRO-1 and
    ZeRO-2).

    ``num_bytes``: bytes of all buckets (buffers that collect gradients before they are sent). ``bucket``: bytes of one
    bucket; a larger gradient has a bucket of its own. ``whole``: whether the receive buffer of a reduce-scatter is as
    large as its send buffer, instead of one shard.
    """

    num_bytes: float = 0.0
    bucket: float = math.inf
    whole: bool = False


NOTHING_SENT = Scattering()


class AtEnds(NamedTuple):
    """Bytes of memory of a block call (such as a layer) if it is the first or the last call of a pipeline stage.

    ``last``: if it is the last call, all temporary bytes during its backward: its working memory, gathered weights and
    gradients. ``lingering``: if it is the first call, bytes of its gradients that are still being sent while the last
    call runs the backward of the next microbatch. ``closing``: if it is the first call, bytes while its gradients are
    sent after the last backward of the step, when all saved activations are freed.
    """

    last: float = 0.0
    lingering: float = 0.0
    closing: float = 0.0


NOTHING_MORE = AtEnds()


def passing_bytes(
    cost: CallCost, names: Collection[str], states: StateCosts, scattering: Scattering, is_last: bool, several: bool
) -> tuple[GatheredBytes, AtEnds]:
    """Return the bytes of gathered weights and of gradients that one call of a block (such as a layer) holds
    temporarily because ZeRO shards its parameters. The first result is for a call inside a pipeline stage. The second
    has the bytes that count if the call is the first or the last of its stage.

    ``cost``: the cost of the call. ``names``: names of the parameters that the call reads. ``states``: name -> cost of
    a parameter. ``scattering``: the bytes of the rank's gradient buckets. ``is_last``: whether the call may be the
    model's last. ``several``: whether the step has several microbatches, so that gradients of the previous microbatch
    may still be in flight.
    """

    def at(own: GatheredBytes, copied: float = 0.0, lingers: bool = several) -> tuple[GatheredBytes, AtEnds]:
        """Return the two results of the enclosing function: ``own``, and the bytes of the call as the first or the last
        call of a pipeline stage. ``own``: bytes of gathered weights and of gradients of the block call (such as a
        layer) inside a stage. ``copied``: bytes of the copy from which its gradients are sent. ``lingers``: whether its
        gradients are still being sent during the next microbatch."""
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
        # in the last backward: stages before the last one have freed other microbatches by then
        return at(GatheredBytes(more * sent * is_last), more * sent, lingers=False)
    # its bucket may contain other gradients that do not fill one
    more = max(0.0, min(largest.gradient, states.gradient - scattering.bucket))
    if not more:
        return at(GatheredBytes())
    # if a stage has one bucket, the previous microbatch's is in flight until this one is full
    often = 1 + sent if several else 2
    closing = often * (more + scattering.bucket) - scattering.num_bytes  # less the buckets that always exist
    return at(GatheredBytes(more, 0.0, more * sent), closing)


def _get_gradient_bytes(state: StateCost | None) -> float:
    return state.gradient if state is not None else -1.0


def gathered_beside(calls: Sequence[GatheredBytes], in_turns: bool) -> list[float]:
    """Return, for each of several consecutive block calls (such as layers), the bytes of gathered weights and unsharded
    gradients on the rank while this call runs. They include bytes of the previous and of the next call. ``calls``: for
    each call, the bytes of this call alone.

    A call needs its own weights and gradients. In forward, the next call's weights are gathered at the same time. In
    backward, the previous call's weights are gathered and the next call's gradients are reduced. ``in_turns``: whether
    the rank alternates between several sequences of calls (virtual stages), so that the neighbour may belong to any
    sequence.
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
