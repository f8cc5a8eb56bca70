"""The network cards of nodes: which device uses which card, and how much of a card's bandwidth each device gets.

The bandwidth of a level that connects nodes is that of one card. A node has ``nics`` cards (by default one for each
device), in the order of its devices. With fewer cards than devices, neighbouring devices share one. With more, each
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
    """The network card that each device uses, and the bandwidth that the device gets. All arrays have the shape
    ``[num_devices]``. Bandwidths are multiples of the bandwidth of one card.

    ``port``: the number of the card that a device uses; a device with several cards has one number for all of them.
    ``alone``: the bandwidth of a device while no other device uses its port. ``share``: its bandwidth while all devices
    with that port communicate. ``left``: the remaining fraction of ``share`` after failures: ``share`` divided by its
    value if no card had failed and no node had lost bandwidth.
    """

    port: Ints
    alone: Floats
    share: Floats
    left: Floats

    @cached_property
    def users(self) -> Ints:
        """Return for each device how many devices use the same port (network card), shape ``[num_devices]``."""
        return np.asarray(np.bincount(self.port)[self.port], dtype=np.int64)

    @cached_property
    def are_shared(self) -> bool:
        """Return whether any port (network card) is used by several devices."""
        return bool((self.users > 1).any())

    def among(self, devices: Ints, talking: Ints) -> Floats:
        """Return the bandwidth of each of ``devices`` (indices) while some devices use its port, as a multiple of the
        bandwidth of one network card. ``talking``: for each of ``devices``, the number of devices that use its port.
        The shapes of the two arguments are broadcast."""
        alone = self.alone[devices]
        whole = np.maximum(alone, self.share[devices] * self.users[devices])
        return np.minimum(alone, whole / talking)


def network_cards(nodes: tuple[NodeGroup, ...], overrides: Mapping[int, NodeOverride]) -> NetworkCards:
    """Return which network card each device uses, and the bandwidth that the device gets. ``nodes``: the groups of
    equal nodes, in the order of devices. ``overrides``: node number (from 0) -> failed cards and lost bandwidth of that
    node."""
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
    """Return the fraction of its network bandwidth that each device of a node retains if some cards fail, shape
    ``[devices]``. If all cards of a device failed, the device uses the cards of the nearest device that has working
    ones. ``devices``, ``cards``: numbers of devices and cards of the node. ``dead``: indices of the failed cards, from
    0.

    Cards are assigned to devices in order of their index in the node. If there are fewer cards than devices, several
    devices use one card; otherwise a device may have several.
    """
    used, strength = _assign_live_ports(devices, cards, dead)
    home = np.arange(devices) * len(strength) // devices
    before, now = np.bincount(home, minlength=len(strength)), np.bincount(used, minlength=len(strength))
    return np.asarray(strength[used] * np.minimum(1.0, before[used] / now[used]), dtype=np.float64)


def _assign_live_ports(devices: int, cards: int, dead: frozenset[int]) -> tuple[Ints, Floats]:
    """Return the port that each device of a node uses, and for each port the fraction of its cards that work. A port is
    one network card, or all cards of one device if there are more cards than devices. ``devices``, ``cards``: numbers
    of devices and cards of the node. ``dead``: indices of the failed cards, from 0."""
    ports = min(devices, cards)
    alive = np.array([card not in dead for card in range(cards)], dtype=float)
    strength = np.array([cards_of.mean() for cards_of in np.split(alive, np.arange(1, ports) * cards // ports)])
    living = np.flatnonzero(strength)
    home = np.arange(devices) * ports // devices
    used = np.array([living[np.abs(living - port).argmin()] for port in home.tolist()])
    return used, strength
