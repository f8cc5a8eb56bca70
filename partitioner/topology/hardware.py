"""The parts of a topology: device types, levels of links, nodes, hosts, and overrides of single devices and links."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from partitioner.passes.documented_model import DocumentedModel
from partitioner.topology.quantities import (
    Bytes,
    BytesOrNone,
    Count,
    Factor,
    Flops,
    Number,
    Power,
    PowerOrNone,
    Price,
    Rate,
    Ratio,
    Rising,
    Seconds,
    Size,
)


class TopologyPart(BaseModel, metaclass=DocumentedModel):
    """Base class of the parts of a topology: a frozen pydantic model for which unknown keys are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


PRECISIONS = ("nvfp4", "mxfp8", "fp8", "fp16", "bf16", "tf32", "fp32", "fp64")


class DeviceType(TopologyPart):
    """The capabilities of a type of device. Peaks are in FLOP/s by precision (``bf16``), bandwidth in bytes/s, times in
    seconds, memory in bytes.

    ``reserved``: memory that programs cannot use. ``communicator``: memory that the communication library needs for
    each communication group of which a device is a member. ``launch``: seconds to launch a kernel on the device.
    ``dispatch``: seconds in which the host issues one operator. ``overlap_slowdown``: factor on the time of computation
    and communication while both run. ``price``: US dollars per device and hour. ``matches``: the names by which the
    driver reports the device. ``torch``: PyTorch's device type.

    Five tables and factors describe how near kernels come to the peak. ``matmul_efficiency``: (smallest of M, N, K;
    fraction of peak) of matrix products, interpolated over the logarithm. ``unaligned``: factor on this efficiency if
    rows of 16-bit matrices are not multiples of 16 bytes. ``attention_efficiency``: fraction of peak of a fused
    attention over long sequences. ``attention_lengths``: (number of keys; factor on ``attention_efficiency``),
    interpolated over the logarithm, also below the first; empty: equal at all lengths. ``attention_widths``: (width of
    a head; factor on ``attention_efficiency``), interpolated in the same way.

    ``memory_efficiency``: kind of kernel -> fraction of the memory bandwidth; ``default`` for kinds that are not
    listed. ``memory_sizes``: (bytes that a kernel moves; greatest multiple of the memory bandwidth that it reaches),
    interpolated over the logarithm, since data in caches are faster; empty: no such limits.

    ``fused_attention``: whether no attention kernel stores the matrix of attention scores; kernels for CPUs store it if
    heads of queries and of values differ in width. ``whole_scatter``: whether in a reduce-scatter a rank receives every
    rank's whole buffer before it sums them, as over Gloo. ``single_ring``: whether an all-reduce is one ring through
    all ranks, as over Gloo, so that only one device of a node at a time sends to the next node; NCCL's rings use all
    network cards.

    ``power_busy``, ``power_idle``: watts of one device; ``None``: not known. ``power_limit``: power cap in watts; below
    ``power_busy`` it lowers the clock, see :attr:`clock`.
    """

    memory: Bytes
    reserved: BytesOrNone = 0
    communicator: BytesOrNone = 0
    peak: dict[str, Flops]
    memory_bandwidth: Rate
    launch: Seconds = 0.0
    dispatch: Seconds = 0.0
    matmul_efficiency: Rising[tuple[tuple[Number, Number], ...]] = ((1.0, 1.0),)
    unaligned: float = Field(default=1.0, gt=0, le=1)
    attention_efficiency: Number = 1.0
    attention_lengths: Rising[tuple[tuple[Number, Number], ...]] = ()
    attention_widths: Rising[tuple[tuple[Number, Number], ...]] = ()
    memory_efficiency: dict[str, Number] = Field(default_factory=lambda: {"default": 1.0})
    memory_sizes: Rising[tuple[tuple[Size, Number], ...]] = ()
    overlap_slowdown: float = Field(default=1.0, ge=1.0, allow_inf_nan=False)
    fused_attention: bool = True
    whole_scatter: bool = False
    single_ring: bool = False
    matches: tuple[str, ...] = ()
    torch: Literal["cuda", "cpu"] = "cuda"
    price: Price | None = None
    power_busy: Power | None = None
    power_idle: PowerOrNone | None = None
    power_limit: Power | None = None

    @field_validator("peak")
    @classmethod
    def _some_peak(cls, peak: dict[str, float]) -> dict[str, float]:
        """Return ``peak``, the FLOP/s by precision. Raise ``ValueError`` if it is empty or has an unknown precision."""
        if not peak:
            raise ValueError("give the peak of at least one precision, like {bf16: 989 TFLOP/s}")
        for name in peak:
            if name not in PRECISIONS:
                raise ValueError(
                    f"unknown precision {name!r}; expected {', '.join(PRECISIONS)}, like bf16: 989 TFLOP/s"
                )
        return peak

    @model_validator(mode="after")
    def _some_memory(self) -> Self:
        """Return this device type. Raise ``ValueError`` if all of its memory is reserved."""
        if self.reserved >= self.memory:
            raise ValueError(
                f"memory of {self.memory} bytes, of which {self.reserved} are reserved: no usable memory is left; "
                "expected reserved below memory"
            )
        return self

    @model_validator(mode="after")
    def _some_power(self) -> Self:
        """Return this device type. Raise ``ValueError`` if it takes more power when idle than when busy, or if its
        power limit is not above the idle power or is given without the busy power."""
        if self.power_busy is not None and (self.power_idle or 0.0) > self.power_busy:
            raise ValueError(
                f"power_idle of {self.power_idle:g} W above power_busy of {self.power_busy:g} W: expected power_idle "
                "of at most power_busy; are the two swapped?"
            )
        if self.power_limit is None:
            return self
        if self.power_busy is None or self.power_limit <= (self.power_idle or 0.0):
            raise ValueError(
                f"power_limit of {self.power_limit:g} W with power_busy {self.power_busy} and power_idle "
                f"{self.power_idle}: expected power_busy to be given, and a power_limit above power_idle"
            )
        return self

    @property
    def clock(self) -> float:
        """Return the fraction of the full clock at which a device runs under ``power_limit``; 1 without an effective
        limit. Power above idle is assumed proportional to the cube of the clock, since voltage is proportional to
        frequency."""
        if self.power_limit is None or self.power_busy is None or self.power_limit >= self.power_busy:
            return 1.0
        idle = self.power_idle or 0.0
        return float(((self.power_limit - idle) / (self.power_busy - idle)) ** (1 / 3))

    @property
    def has_fp8(self) -> bool:
        """Return whether the device can multiply in fp8. GPUs can if they list an fp8 peak. CPUs always can, slowly,
        for experiments."""
        return "fp8" in self.peak or self.torch == "cpu"

    @property
    def has_mxfp8(self) -> bool:
        """Return whether the device can multiply in MXFP8, with a scale for every 32 numbers. GPUs can if they list an
        mxfp8 peak. CPUs always can, slowly, for experiments."""
        return "mxfp8" in self.peak or self.torch == "cpu"

    @property
    def has_nvfp4(self) -> bool:
        """Return whether the device can multiply in NVFP4, 4-bit numbers with a scale for every 16. GPUs can if they
        list an nvfp4 peak. CPUs always can, slowly, for experiments."""
        return "nvfp4" in self.peak or self.torch == "cpu"

    @property
    def in_tf32(self) -> DeviceType:
        """Return a copy of this device type in which float32 matrix products run at the TF32 rate, if it has one. The
        rate of float32 attention stays the same, because fused attention does not use TF32 (torch 2.11 on H200)."""
        faster = self.peak_of("tf32") / self.peak_of("fp32")
        return self.model_copy(
            update={
                "peak": {**self.peak, "fp32": self.peak_of("tf32")},
                "attention_efficiency": self.attention_efficiency / faster,
            }
        )

    def peak_of(self, precision: str) -> float:
        """Return the peak FLOP/s in ``precision``, such as ``bf16``. If the device does not list it, return the peak of
        the most similar precision that it lists."""
        for name in (precision, *_STAND_INS.get(precision, ())):
            if name in self.peak:
                return self.peak[name]
        return min(self.peak.values())


_STAND_INS = {
    "nvfp4": ("mxfp8", "fp8", "fp16", "bf16", "fp32"),
    "mxfp8": ("fp8", "fp16", "bf16", "fp32"),
    "fp8": ("fp16", "bf16", "fp32"),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "tf32": ("fp32",),
    "fp64": ("fp32",),
}


def _is_whole(value: Any) -> bool:
    """Return whether ``value`` is an integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


Measured = Rising[tuple[tuple[Count, Seconds, Rate], ...]]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")  # collectives with measured tables


class Level(TopologyPart):
    """Links of one kind between the devices of each group of devices or nodes. ``name``: such as ``nvlink3``.
    ``bandwidth``: bytes/s per direction, of a device inside a node and of a network card between nodes. ``latency``:
    seconds for one message.

    ``devices``: the number of consecutive devices of a node in each connected group. ``nodes``: the number of
    consecutive whole nodes in each connected group. If neither is given, the links connect all devices. ``only``: the
    islands (named sets of nodes) that have these links; empty: all.

    ``step``: seconds per step of a collective (``None``: the latency). ``base``: seconds to start a collective.
    ``efficiency``: the fraction of the bandwidth that large collectives reach. ``all_reduce``: rows of (ranks, start-up
    seconds, bytes/s through each rank), measured inside one group; ``all_gather``, ``reduce_scatter`` and
    ``all_to_all`` have the same form, and are derived from ``all_reduce`` and the bandwidth if they are not given.
    ``oversubscription``: divisor of the bandwidth when all devices communicate (``4:1`` is 4).
    """

    name: str
    devices: Count | None = None
    nodes: Count | None = None
    bandwidth: Rate
    latency: Seconds = 0.0
    step: Seconds | None = None
    base: Seconds = 0.0
    efficiency: float = Field(default=1.0, gt=0, le=1)
    oversubscription: Ratio = 1.0
    only: tuple[str, ...] = ()
    all_reduce: Measured = ()
    all_gather: Measured = ()
    reduce_scatter: Measured = ()
    all_to_all: Measured = ()

    @model_validator(mode="after")
    def _one_extent(self) -> Self:
        """Return this level. Raise ``ValueError`` if it gives both ``devices`` and ``nodes``, only one of which can be
        its reach."""
        if self.devices is not None and self.nodes is not None:
            raise ValueError(f"level {self.name!r} gives both devices and nodes; give one, or none for all devices")
        return self

    @property
    def step_s(self) -> float:
        """Return the seconds of latency of one step of a collective over these links, in which each rank sends one
        message to another: ``step``, or ``latency`` if that is ``None``. The time to move the bytes of the message is
        not included. A level is the set of links of one kind, such as those inside nodes or those between nodes."""
        return self.latency if self.step is None else self.step

    def shared(self, share: float = 1.0) -> Level:
        """Return a copy of these links with the bandwidth that each device gets while all devices communicate: the
        bandwidth times ``share`` (a fraction of 1), divided by the oversubscription of the links. Measured bandwidths
        of collectives are multiplied by the same factor."""
        share /= self.oversubscription
        if share == 1.0:
            return self
        tables = {
            op: tuple((ranks, start, bandwidth * share) for ranks, start, bandwidth in getattr(self, op))
            for op in COLLECTIVES
        }
        return self.model_copy(update={"bandwidth": self.bandwidth * share, "oversubscription": 1.0, **tables})


class PatternLink(TopologyPart):
    """Direct links of ``bandwidth`` bytes/s per direction inside a node. ``pairs``: pairs of device indices in the
    node, from 0, or ``"all"`` for every pair."""

    pairs: Literal["all"] | tuple[tuple[int, int], ...]
    bandwidth: Rate

    @field_validator("pairs", mode="before")
    @classmethod
    def _all_or_pairs(cls, pairs: Any) -> Any:
        """Return ``pairs``. Raise ``ValueError`` unless it is ``"all"`` or a list of pairs of integers."""
        listed = isinstance(pairs, list | tuple) and all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs)
        if pairs != "all" and not (listed and all(_is_whole(place) for pair in pairs for place in pair)):
            raise ValueError(
                f"expected all, or pairs of device indices in the node, like [[0, 1], [2, 3]]; got {pairs!r}"
            )
        return pairs


class Pattern(TopologyPart):
    """The direct links inside one node, for nodes in which pairs of devices have different links. Several groups of
    nodes can use one pattern. A pair that is not listed communicates over the levels of links.

    ``links``: the links with their pairs of devices; later ones replace earlier ones. ``latency``: seconds for one
    message. ``step``: seconds per step of a collective (``None``: the latency). ``base``: seconds to start a
    collective. ``efficiency``: the fraction of the bandwidth that large collectives reach. ``starts``: rows of (ranks,
    seconds) of a measured all-reduce of zero bytes.
    """

    links: tuple[PatternLink, ...] = Field(min_length=1)
    latency: Seconds = 0.0
    step: Seconds | None = None
    base: Seconds = 0.0
    efficiency: float = Field(default=1.0, gt=0, le=1)
    starts: Rising[tuple[tuple[Count, Seconds], ...]] = ()

    @property
    def step_s(self) -> float:
        """Return the seconds of latency of one step of a collective over the direct links inside a node, in which each
        rank sends one message to another: ``step``, or ``latency`` if that is ``None``. The time to move the bytes of
        the message is not included."""
        return self.latency if self.step is None else self.step


class Host(TopologyPart):
    """The host of a node: ``memory`` and ``disk`` in bytes per node (0: no disk).

    ``bandwidth``: bytes/s between each device and the host's memory, per direction (PCIe, C2C). ``latency``: seconds of
    a copy of zero bytes. ``memory_bandwidth``: bytes/s of host memory under the host's own processors (``None``: not
    known). ``shared``: whether host memory is the devices' own memory, so that offloading gains nothing.
    ``disk_bandwidth``: bytes/s of the node's local disks together, for reads and for writes.
    """

    memory: Bytes
    bandwidth: Rate
    latency: Seconds = 0.0
    memory_bandwidth: Rate | None = None
    shared: bool = False
    disk: BytesOrNone = 0
    disk_bandwidth: Rate | None = None

    @model_validator(mode="after")
    def _disk_has_a_rate(self) -> Self:
        """Return this host. Raise ``ValueError`` if it has a disk without a bandwidth."""
        if self.disk and self.disk_bandwidth is None:
            raise ValueError("a disk without disk_bandwidth; give both, like {disk: 30 TB, disk_bandwidth: 20 GB/s}")
        return self


class NodeGroup(TopologyPart):
    """``count`` equal nodes of ``devices`` devices each, all of the device type ``type``. ``names``: a name for each
    device; default: ``node<n>/<k>`` for device ``k`` of node ``n``.

    ``island``: a name for this set of nodes, by which a level of links can restrict its links to the set; default: the
    type. ``pattern``: name of the pattern of direct links inside a node; ``None``: there are none. ``nics``: number of
    network cards of a node, each with the bandwidth of the levels that connect nodes; the devices of a node share the
    cards evenly; ``None``: one card for each device. ``concurrent``: number of devices of a node that can compute at
    full speed at the same time, for example because ranks compete for CPU cores; more devices share that capacity
    evenly; ``None``: all. ``host``: memory and disk of a node; ``None``: not known.
    """

    type: str
    devices: Count = 1
    count: Count = 1
    concurrent: Number | None = None
    names: tuple[str, ...] = ()
    island: str = ""
    pattern: str | None = None
    nics: Count | None = None
    host: Host | None = None

    @property
    def island_name(self) -> str:
        """Return the name by which levels of links refer to these nodes: the island, or the device type if none is
        given."""
        return self.island or self.type

    @property
    def num_cards(self) -> int:
        """Return the number of network cards of one node of this group."""
        return self.nics or self.devices

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        """Return these nodes. Raise ``ValueError`` if names are given, but not one for each device."""
        if self.names and len(self.names) != self.devices * self.count:
            expected = f"{self.count} x {self.devices} devices"
            raise ValueError(f"{len(self.names)} names for {expected}; name every device or none")
        return self


class DeviceOverride(TopologyPart):
    """The fields in which one device differs from the other devices of its node. ``type``: name of its device type.
    ``memory``: bytes. ``speed``: factor on compute rate and memory bandwidth. ``None``: no difference."""

    type: str | None = None
    memory: Bytes | None = None
    speed: Factor = 1.0


class NodeOverride(TopologyPart):
    """The fields in which one node differs from the other nodes of its group.

    ``network``: the remaining fraction of its bandwidth to other nodes. ``dead_nics``: the number of failed network
    cards (counted from the last), or a list of their indices from 0; their devices share the nearest working card.
    ``memory``: bytes of each of its devices; ``None``: no difference. ``speed``: factor on the compute rate and memory
    bandwidth of each of its devices.
    """

    network: Factor = Field(default=1.0, le=1)
    dead_nics: int | tuple[int, ...] = 0
    memory: Bytes | None = None
    speed: Factor = 1.0

    @field_validator("dead_nics", mode="before")
    @classmethod
    def _how_many_or_which(cls, dead: Any) -> Any:
        """Return ``dead``, a number of failed network cards or a list of their indices in the node. Raise
        ``ValueError`` for other values."""
        cards = dead if isinstance(dead, list | tuple) else [dead]
        if not all(_is_whole(card) and card >= 0 for card in cards):
            raise ValueError(
                f"expected the number of broken cards, like 1, or a list of them, like [0, 3]; got {dead!r}"
            )
        return dead

    def dead(self, nics: int) -> frozenset[int]:
        """Return the indices of the failed network cards of a node that has ``nics`` cards."""
        if isinstance(self.dead_nics, int):
            return frozenset(range(nics - self.dead_nics, nics))
        return frozenset(self.dead_nics)


class LinkOverride(TopologyPart):
    """A direct link between two devices, which replaces their other link in both directions. ``between``: the names of
    the devices. ``bandwidth``: bytes/s. ``latency``: seconds for one message. ``efficiency``: the fraction of the
    bandwidth that large collectives reach.

    If ``latency`` or ``efficiency`` is ``None``, the value of the replaced link is used. If no link is replaced, the
    latency is 0 and the efficiency 1.
    """

    between: tuple[str, str]
    bandwidth: Rate
    latency: Seconds | None = None
    efficiency: float | None = Field(default=None, gt=0, le=1)


class Link(TopologyPart):
    """The link between two devices. ``name``: name of its level or pattern. ``bandwidth``: bytes/s. ``latency``:
    seconds. ``level``: index of its level of links, from the innermost; -1 for direct links, routes and a device's own
    memory."""

    name: str
    bandwidth: float
    latency: float
    level: int

    def time(self, num_bytes: float) -> float:
        """Return the seconds that one message of ``num_bytes`` bytes takes over this link."""
        return self.latency + num_bytes / self.bandwidth


class Hop(NamedTuple):
    """A step of a ring, in which every rank sends a message to the rank a fixed number of positions further, all at the
    same time. ``latency``: seconds of the slowest message without data. ``bandwidth``: bytes/s of the slowest message.
    """

    latency: float
    bandwidth: float

    def time(self, num_bytes: float) -> float:
        """Return the seconds until all messages of this step, each of ``num_bytes`` bytes, have arrived; 0 for 0
        bytes."""
        return self.latency + num_bytes / self.bandwidth if num_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a topology. ``index``: its number, from 0. ``node``: number of its node, from 0. ``kind``: name of
    its device type. ``memory``: bytes in total. ``reserved``: bytes that no process can use, such as those of the
    driver. ``speed``: factor on the compute rate and memory bandwidth of its type."""

    index: int
    name: str
    node: int
    kind: str
    memory: int
    reserved: int
    speed: float = 1.0

    @property
    def usable(self) -> int:
        """Return the bytes of the device's memory that processes can use."""
        return self.memory - self.reserved


def margin_bytes(usable: int, margin: float) -> int:
    """Return how many of the ``usable`` bytes of a device's memory a plan must leave free: the fraction ``margin`` of
    them, rounded up."""
    return math.ceil(margin * max(0, usable))
