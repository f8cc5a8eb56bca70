"""The network cards of nodes: which device talks over which, and what each device gets of a card's bandwidth.

The bandwidth of a level that leaves a node is that of one card. A node has ``nics`` cards (one for each device, unless
it says otherwise), in the order of its devices: with fewer cards than devices, neighbours share one; with more, each
device has several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partitioner.topology.hardware import NodeGroup, NodeOverride

Floats = NDArray[np.float64]

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class NetworkCards:
    """The network cards that every device uses, all arrays of shape ``[num_devices]``; bandwidths in cards.

    ``port``: the number of the card that it uses (of several, one number for all of them). ``alone``: what it gets
    while no other device uses its port, ``share``: while all those do that have the port. ``left``: the fraction of
    ``share`` that is left of what it would be in a node of the same kind that is whole.
    """

    port: Ints
    alone: Floats
    share: Floats
    left: Floats

    @cached_property
    def users(self) -> Ints:
        """How many devices have the port of each device."""
        return np.asarray(np.bincount(self.port)[self.port], dtype=np.int64)

    @cached_property
    def are_shared(self) -> bool:
        """Whether several devices have the same port, somewhere."""
        return bool((self.users > 1).any())

    def among(self, devices: Ints, talking: Ints) -> Floats:
        """What each of ``devices`` gets if so many devices use its port at the same time; shapes are broadcast."""
        alone = self.alone[devices]
        whole = np.maximum(alone, self.share[devices] * self.users[devices])
        return np.minimum(alone, whole / talking)


def network_cards(nodes: tuple[NodeGroup, ...], overrides: Mapping[int, NodeOverride]) -> NetworkCards:
    """The cards of all nodes, some of which have lost cards or bandwidth (``overrides``, by number)."""
    ports, alone, shares, left = [], [], [], []
    node = first = 0
    for group in nodes:
        cards = group.num_cards
        each, count = cards / group.devices, min(cards, group.devices)
        home = np.arange(group.devices) * count // group.devices
        of_group = np.tile(home, (group.count, 1)) + first + np.arange(group.count)[:, None] * count
        own_alone = np.full((group.count, group.devices), max(1.0, each))
        own_left = np.ones((group.count, group.devices))
        for number in sorted(set(overrides) & set(range(node, node + group.count))):
            own, place = overrides[number], number - node
            used, strength = _assign_live_ports(group.devices, cards, own.dead(cards))
            of_group[place] += used - home
            own_alone[place] *= own.network * strength[used]
            own_left[place] = own.network * card_shares(group.devices, cards, own.dead(cards))
        ports.append(of_group.reshape(-1))
        alone.append(own_alone.reshape(-1))
        shares.append(own_left.reshape(-1) * each)
        left.append(own_left.reshape(-1))
        node += group.count
        first += group.count * count
    return NetworkCards(*map(np.concatenate, (ports, alone, shares, left)))


def card_shares(devices: int, cards: int, dead: frozenset[int]) -> Floats:
    """The fraction that each device is left with of what it has with all ``cards``: who lost them goes to the nearest.

    Devices share cards, or have several each, in order of their place. Adds up to the living cards' share of all.
    """
    used, strength = _assign_live_ports(devices, cards, dead)
    home = np.arange(devices) * len(strength) // devices
    before, now = np.bincount(home, minlength=len(strength)), np.bincount(used, minlength=len(strength))
    return np.asarray(strength[used] * np.minimum(1.0, before[used] / now[used]), dtype=np.float64)


def _assign_live_ports(devices: int, cards: int, dead: frozenset[int]) -> tuple[Ints, Floats]:
    """The port that each device uses, and the fraction of its cards that each port is left with."""
    ports = min(devices, cards)
    alive = np.array([card not in dead for card in range(cards)], dtype=float)
    strength = np.array([cards_of.mean() for cards_of in np.split(alive, np.arange(1, ports) * cards // ports)])
    living = np.flatnonzero(strength)
    home = np.arange(devices) * ports // devices
    used = np.array([living[np.abs(living - port).argmin()] for port in home.tolist()])
    return used, strength
