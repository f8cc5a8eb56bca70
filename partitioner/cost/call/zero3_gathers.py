"""Cost of ZeRO-3 for one call of a block, such as a layer. Its weights are gathered before it runs, and its gradients
are reduce-scattered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from partitioner.cost.call.block_profile import StateRead
from partitioner.cost.call.collectives import collective_time
from partitioner.cost.call.expert_parallel import Spread, compute_exposed_seconds
from partitioner.cost.call.roofline import copied_s
from partitioner.topology.hardware import DeviceType


class GatheredBytes(NamedTuple):
    """Bytes of the whole (unsharded) weights and gradients of a block call (such as a layer) under ZeRO-3.

    ``whole``: bytes of its gathered weights and its gradients while the call itself runs. ``weights``: bytes of its
    gathered weights while a neighbouring call runs, before or after it. ``sent``: bytes of its gradients that are still
    being reduce-scattered while the backward of the previous call runs.
    """

    whole: float = 0.0
    weights: float = 0.0
    sent: float = 0.0


NONE_GATHERED = GatheredBytes()


class HiddenCollectives(NamedTuple):
    """The ZeRO-3 collectives of a block call (such as a layer), and the waits for collectives that its cost contains.

    ``gather_s``: seconds of one all-gather of its weights; forward and backward each run one. ``scatter_s``: seconds to
    reduce-scatter its gradients. ``forward_s``, ``backward_s``: the seconds of its forward and of its backward in which
    the call waits for collectives. ``once_s``: how many seconds full recomputation takes less than the forward, because
    it waits for no gather of its own and hides some of the collectives of backward. ``slowdown``: factor on the seconds
    of computation and of collectives while both run. ``overlap``: whether both run at the same time. ``once``: whether
    recomputation and backward share one gather.
    """

    gather_s: float
    scatter_s: float
    forward_s: float = 0.0
    backward_s: float = 0.0
    once_s: float = 0.0
    slowdown: float = 1.0
    overlap: bool = True
    once: bool = True

    def paced(self, factor: float) -> HiddenCollectives:
        """Return these collectives with all seconds multiplied by ``factor``."""
        return self._replace(
            gather_s=self.gather_s * factor,
            scatter_s=self.scatter_s * factor,
            forward_s=self.forward_s * factor,
            backward_s=self.backward_s * factor,
            once_s=self.once_s * factor,
        )

    def wait(self, windows: tuple[float, float], ahead_s: float, back_s: float) -> HiddenCollectives:
        """Return these collectives with the waits of a call that computes for ``windows`` seconds (forward, backward),
        while collectives take ``ahead_s`` seconds during its forward and ``back_s`` seconds during its backward. A
        second window of 0 means that the call has no backward."""
        how = self.slowdown, self.overlap
        forward_s, backward_s, once_s = compute_exposed_seconds(windows[0], ahead_s, *how), 0.0, 0.0
        if windows[1] > 0:
            backward_s = compute_exposed_seconds(windows[1], back_s, *how)
            if self.once:  # recomputation waits for no gather of its own, and hides some of those of backward
                once_s = forward_s + backward_s - compute_exposed_seconds(sum(windows), back_s, *how)
        return self._replace(forward_s=forward_s, backward_s=backward_s, once_s=once_s)


def read_bytes(state: StateRead, spread: Spread) -> tuple[float, float]:
    """Return two numbers: the bytes of ``state``, a parameter or buffer that a block (such as a layer) reads, and the
    bytes of its gradient, as one rank has them before ZeRO shards them. ``spread``: how experts are distributed over
    ranks.
    """
    return state.sizes(spread.profile.short_gradients, spread.of_experts if state.expert else 1.0)


def gather_seconds(states: Iterable[StateRead], spread: Spread) -> tuple[float, float]:
    """Return the seconds of the ZeRO-3 collectives of a block call (such as a layer) as a pair (forward, backward).
    Forward all-gathers the weights. Backward all-gathers them again and reduce-scatters the gradients. ``states``: the
    parameters and buffers that the call reads. ``spread``: the groups over which they are sharded.

    Small parameters are not sharded and need no collective, except in a framework that shards and gathers each
    parameter by itself.
    """
    if spread.shards.size == 1:
        return 0.0, 0.0
    apart = spread.profile.gather == "parameter"
    # (belongs to experts, name) -> bytes of weights, bytes of gradients
    sizes: dict[tuple[bool, str], list[float]] = {}
    for state in (state for state in states if apart or not state.small):
        known = sizes.setdefault((state.expert, state.name if apart else ""), [0.0, 0.0])
        for kind, nbytes in enumerate(read_bytes(state, spread)):
            known[kind] += nbytes
    ahead = back = 0.0
    for (expert, _), (size, grads) in sizes.items():
        group = spread.expert_shards if expert else spread.shards
        ahead += collective_time("all_gather", size, group) if size else 0.0
        back += collective_time("reduce_scatter", grads, group) if grads else 0.0
    return ahead, ahead + back


def copy_seconds(states: Iterable[StateRead], spread: Spread, device: DeviceType) -> tuple[float, float, float]:
    """Return three durations in seconds of the copies on ``device`` that ZeRO-3 adds to a block call (such as a layer):
    of weights in forward, of weights in backward, and of gradients. Weights are copied out of the receive buffer of the
    all-gather, in which they are ordered by rank. Gradients are copied into the send buffer of the reduce-scatter.

    ``states``: the parameters and buffers that the call reads. ``spread``: the groups of ranks over which they are
    sharded.
    """
    if spread.shards.size == 1 or spread.profile.gather == "parameter":
        return 0.0, 0.0, 0.0
    weights = gradients = 0.0
    for state in (state for state in states if not state.small):
        if (spread.expert_shards if state.expert else spread.shards).size > 1:
            weight, gradient = read_bytes(state, spread)
            weights += copied_s(weight, device)
            gradients += copied_s(gradient, device)
    return weights, weights, gradients


def gathered_bytes(sizes: Sequence[tuple[float, float]], spread: Spread, saved: float) -> GatheredBytes:
    """Return the bytes of weights and gradients that ZeRO-3 holds unsharded for a block call (such as a layer).

    ``sizes``: for each sharded parameter, (its bytes, the bytes of its gradient). ``spread``: the groups over which
    they are sharded. ``saved``: bytes of saved activations, which are counted elsewhere. Backward frees the activations
    while it computes gradients, so the gradients add memory only as far as they exceed ``saved``; the largest gradient
    is always counted. While gradients are reduce-scattered they also need a receive buffer.
    """
    ranks = spread.shards.size
    if ranks == 1 or not sizes:
        return NONE_GATHERED
    if spread.profile.gather == "parameter":
        return GatheredBytes(2 * max(weight + gradient for weight, gradient in sizes))
    weights, gradients = (sum(of) for of in zip(*sizes, strict=True))
    largest = max(gradient for _, gradient in sizes)
    sent = gradients * (2 if spread.whole_scatter else 1 + 1 / ranks)
    return GatheredBytes(weights + max(largest, gradients - saved), weights, sent)
