"""Variants of a job: constraints that may be relaxed, and changes of the batch, the devices and the allowed techniques.

Each variant has an effort, by which variants are ordered, and a distance from the original request. For a job that has
no plan, ``partitioner/advise/suggest.py`` plans the variants in this order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import combinations
from typing import Any

from partitioner.candidate import MeshCandidate
from partitioner.constraints import OF_ONE_STAGE, OF_POINT, Constraints
from partitioner.solve.evaluate.job import Job
from partitioner.solve.search.search import OFFLOAD_SETS
from partitioner.solve.search.smaller_clusters import is_even, smaller_clusters
from partitioner.topology import Topology
from partitioner.topology.files import with_devices, with_memory, with_nodes
from partitioner.topology.hosts import can_offload, has_disks
from partitioner.units import bytes_text, format_plural, list_divisors

# What it takes to give up a constraint; a change of size costs half of its logarithm more.
_WEIGHTS = {"recompute": 0.6, "microbatch_size": 0.7, "schedule": 0.8, "virtual_stages": 0.8}
_FEW_PINS = 7


def pins_of(constraints: Constraints) -> list[str]:
    """Return the names of the constraints that the user fixed, with one entry ``stage_of:<module>`` for each placed
    module."""
    *others, zero, dp_shard = OF_POINT
    fixed = [n for n in (*others, "recompute", zero, dp_shard) if getattr(constraints, n) is not None]
    fixed = [n for n in fixed if n != "microbatch_size" or constraints.group_size is None]  # else it is another loss
    return fixed + [f"stage_of:{m}" for m in constraints.stage_of]


def fixed_of(constraints: Constraints) -> list[str]:
    """All that the user fixed: :func:`pins_of`, and what of the rest says how, not what, is computed."""
    pins = pins_of(constraints)
    beside = {*OF_POINT, *pins, "stage_of", "couple", "ahead"}
    if constraints.memory_margin <= Constraints.model_fields["memory_margin"].default:
        beside.add("memory_margin")  # left free it would leave plans less memory
    defaults = ((name, field.default) for name, field in Constraints.model_fields.items() if name not in beside)
    return pins + [name for name, default in defaults if getattr(constraints, name) != default]


def list_pin_subsets(pins: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """What of ``pins`` may be given up together: anything of a few; of many up to two, all places, or all. Of many
    places none by itself."""
    places = tuple(p for p in pins if ":" in p)
    each = pins if len(places) <= _FEW_PINS else [p for p in pins if p not in places]
    few = len(each) if len(each) <= _FEW_PINS else 2
    for size in range(few + 1):
        yield from combinations(each, size)
    if few < len(pins):
        yield from {places, tuple(pins)} - {()}


def estimate_relaxation_effort(pins: Sequence[str]) -> float:
    """What it takes to give up ``pins``, before by how much: places of modules are often wrong together."""
    places = sum(":" in pin for pin in pins)
    others = sum(_WEIGHTS.get(pin, 1.0) for pin in pins if ":" not in pin)
    return others + (0.8 + 0.2 * places if places else 0.0)


def relax_pins(constraints: Constraints, pins: Sequence[str]) -> Constraints:
    """Return ``constraints`` with those named in ``pins`` reset to their defaults."""
    places = {m: s for m, s in constraints.stage_of.items() if f"stage_of:{m}" not in pins}
    freed: dict[str, Any] = {pin: Constraints.model_fields[pin].default for pin in pins if ":" not in pin}
    return constraints.model_copy(update={**freed, "stage_of": places})


def is_pin_changed(constraints: Constraints, pin: str, candidate: MeshCandidate) -> bool:
    """Whether ``candidate`` is otherwise than pinned; recomputation and places of modules are freed, not changed."""
    return not hasattr(candidate, pin) or getattr(candidate, pin) != getattr(constraints, pin)


def measure_pin_distance(constraints: Constraints, pin: str, candidate: MeshCandidate) -> float:
    """How far ``candidate`` is from what is pinned: half of the logarithm of a change of size."""
    old, new = getattr(constraints, pin, None), getattr(candidate, pin, None)
    if not isinstance(old, int) or not isinstance(new, int):
        return 0.0
    return 0.5 * abs(math.log2(max(new, 0.5) / max(old, 0.5)))


def format_given_pin(constraints: Constraints, pin: str) -> str:
    """``pin`` as the user wrote it."""
    name, _, module = pin.partition(":")
    if module:
        return f"stage_of[{module!r}]={constraints.stage_of[module]}"
    given = getattr(constraints, name)
    return f"{name}={kinds_text(given)}" if name == "offload" else f"{name}={given}"


def kinds_text(kinds: Sequence[str]) -> str:
    """What is kept in host memory, as the user may write it."""
    return "+".join(kinds) or "none"


def describe_pin_change(constraints: Constraints, pin: str, new: object) -> str:
    """What to say of ``new`` in the place of what is pinned; ``None``: it is left free."""
    name, _, module = pin.partition(":")
    if module:
        return f"no stage_of[{module!r}]"
    if new is None:
        return f"{name} left free instead of {getattr(constraints, name)}"
    return f"{name}={new} instead of {getattr(constraints, name)}"


# a stage_of entry put right, other kinds in host memory, other devices, larger ones
_PLACE, _OFFLOAD, _ROOM, _MEMORY = 0.4, 0.6, 3.0, 4.0
_MARGIN = 0.5  # nothing left free on devices
_UNASKED = 0.3  # offload where nothing was said of it
# Ways of doing what a plan may not do at all.
_WAYS = ("context", "hierarchical", "grad_compression", "data_shares")
_MOST_DEVICES, _MOST_BATCHES = 32768, 12
_TIMES = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_FAR = (96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class RelaxationRequest:
    """A job as it was asked for. ``prepare``: the job of these constraints, on this topology, with this batch."""

    topology: Topology
    constraints: Constraints
    global_batch: int | None
    prepare: Callable[[Topology, Constraints, int | None], Job]


@dataclass(frozen=True)
class Variant:
    """The job with something else than its pins changed."""

    cost: float
    kinds: frozenset[str]
    texts: tuple[str, ...]
    topology: Topology
    constraints: Constraints
    global_batch: int | None


def _extend_variant(variant: Variant, cost: float, kind: str, text: str, **changed: Any) -> Variant:
    """``variant`` with one thing more ``changed``."""
    return replace(
        variant, cost=variant.cost + cost, kinds=variant.kinds | {kind}, texts=(*variant.texts, text), **changed
    )


def list_variants(asked: RelaxationRequest, short_of_memory: bool) -> Iterator[Variant]:
    """The job as it is, and with more and more changed; ``short_of_memory``: why there is no plan."""
    base = Variant(0.0, frozenset(), (), asked.topology, asked.constraints, asked.global_batch)
    yield base
    yield from _list_stage_place_variants(asked, base)
    for name in _WAYS:
        if (given := getattr(asked.constraints, name)) is not None:
            freed = asked.constraints.model_copy(update={name: None})
            without = _extend_variant(base, _PLACE, name, f"{name} left free instead of {given}", constraints=freed)
            yield without
            yield from _list_offload_pin_variants(without, short_of_memory)
    yield from _list_dp_shard_variants(base)
    hosted = [*_list_offload_pin_variants(base, short_of_memory)]
    yield from hosted
    if not short_of_memory:
        yield from _list_batch_variants(asked, base)
    elif margin := asked.constraints.memory_margin:
        whole = asked.constraints.model_copy(update={"memory_margin": 0.0})
        yield _extend_variant(base, _MARGIN, "margin", f"memory_margin=0 instead of {margin:g}", constraints=whole)
    for variant in (base, *(hosted if short_of_memory else ())):
        yield from _list_device_variants(variant, short_of_memory)
    yield from _list_memory_variants(base, _TIMES if short_of_memory else ())


def far_variants(asked: RelaxationRequest) -> Iterator[Variant]:
    """With more memory, and with more nodes, where it is memory that lacks: also with more than :func:`list_variants`
    have, among whose many others there may have been no time for these."""
    base = next(list_variants(asked, True))
    yield from _list_memory_variants(base, (*_TIMES, *_FAR))
    yield from _list_node_variants(base, [math.ceil(base.topology.num_nodes * times) for times in (*_TIMES, *_FAR)])


def _list_stage_place_variants(asked: RelaxationRequest, base: Variant) -> Iterator[Variant]:
    """Entries of ``stage_of`` with the nearest name, or the nearest stage that there is."""
    given = base.constraints.stage_of
    stages = _num_stages(base.constraints)
    job = asked.prepare(base.topology, asked.constraints.meaning, base.global_batch)
    paths = sorted({call.path for call in job.model.calls})
    for name, stage in given.items():
        for near in get_close_matches(name, paths, n=1, cutoff=0.5):
            if near not in given:
                places = {near if n == name else n: s for n, s in given.items()}
                yield _replace_stage_places(base, places, f"stage_of {near!r} instead of {name!r}")
        if stages is not None and not -stages <= stage < stages:
            places = {**given, name: stages - 1 if stage > 0 else 0}
            yield _replace_stage_places(base, places, f"stage_of[{name!r}]={places[name]} instead of {stage}")


def _num_stages(given: Constraints) -> int | None:
    """The stages, virtual ones included, that ``stage_of`` may name; ``None`` where that is left open."""
    if given.pp is None or (given.virtual_stages is None and given.schedule not in (None, *OF_ONE_STAGE)):
        return None
    return given.pp * (given.virtual_stages or 1)


def _replace_stage_places(base: Variant, places: dict[str, int], text: str) -> Variant:
    constraints = base.constraints.model_copy(update={"stage_of": places})
    return _extend_variant(base, _PLACE, text, text, constraints=constraints)


def _list_batch_variants(asked: RelaxationRequest, base: Variant) -> Iterator[Variant]:
    """Batches that divide as pinned, or over the devices."""
    given = base.constraints
    batch = asked.prepare(base.topology, given.meaning, base.global_batch).global_batch
    groups = given.group_size or 1
    parts = {(given.dp or 1) * (given.microbatch_size or 1)}
    parts |= {groups * part for part in list_divisors(base.topology.num_devices)}
    near = {n for part in parts for n in (batch // part * part, -(-batch // part) * part)} - {0, batch}
    for size in sorted(near, key=lambda n: abs(math.log2(n / batch)))[:_MOST_BATCHES]:
        text = f"global_batch={size} instead of {batch}"
        kind = "more" if size > batch else "less"
        yield _extend_variant(base, 1.0 + abs(math.log2(size / batch)), kind, text, global_batch=size)


def _list_dp_shard_variants(base: Variant) -> Iterator[Variant]:
    """States shared by as many ranks as there can be: candidates have all of them, or those that are pinned."""
    given = base.constraints.dp_shard
    if given is None:
        return
    for size in list_divisors(base.constraints.dp or base.topology.num_devices)[1:]:
        if size != given:
            cost = _PLACE + 0.5 * abs(math.log2(size / given))
            constraints = base.constraints.model_copy(update={"dp_shard": size})
            text = f"dp_shard={size} instead of {given}"
            yield _extend_variant(base, cost, "dp_shard", text, constraints=constraints)


def _list_offload_pin_variants(base: Variant, short_of_memory: bool) -> Iterator[Variant]:
    """Other kinds in host memory than those that are pinned; none, where it is not described. With optimizer states on
    disk, where they are pinned to host memory. Where the mesh is pinned and offload is not, the kinds that
    ``partition`` does not try unasked."""
    given, known = base.constraints.offload, can_offload(base.topology)
    if given is None and known and short_of_memory and base.constraints.fixes_mesh(base.topology.num_devices):
        for number, unasked in enumerate(OFFLOAD_SETS):
            if "parameters" not in unasked or base.constraints.zero not in (1, 2):
                constraints = base.constraints.model_copy(update={"offload": unasked})
                text = f"offload={kinds_text(unasked)}"
                yield _extend_variant(base, _UNASKED + 0.1 * number, "offload", text, constraints=constraints)
    if given is None or not (short_of_memory or (given and not (known and _has_its_disk(base)))):
        return
    sets: list[tuple[str, ...]] = [(), *OFFLOAD_SETS] if known else [()]
    if "optimizer" in given and known and has_disks(base.topology):
        sets.append(tuple(dict.fromkeys((*given, "disk"))))
    for kinds in sets:
        constraints = base.constraints.model_copy(update={"offload": kinds})
        if kinds == given or ("parameters" in kinds and constraints.zero in (1, 2)):
            continue
        text = f"offload={kinds_text(kinds)} instead of {kinds_text(given)}"
        cost = _OFFLOAD + 0.1 * len(set(kinds) ^ set(given))
        yield _extend_variant(base, cost, "offload", text, constraints=constraints)


def _has_its_disk(base: Variant) -> bool:
    return "disk" not in (base.constraints.offload or ()) or has_disks(base.topology)


def _list_device_variants(base: Variant, short_of_memory: bool) -> Iterator[Variant]:
    """Without devices that differ, more nodes of the same kind, or as many devices as the pinned axes ask for."""
    topology, now = base.topology, base.topology.num_devices
    for smaller in () if is_even(topology) else smaller_clusters(topology):
        text = f"{format_plural(smaller.num_devices, 'device')} instead of {now} ({smaller.name})"
        yield _extend_variant(base, _ROOM + math.log2(now / smaller.num_devices), "smaller", text, topology=smaller)
    yield from _list_node_variants(
        base, [topology.num_nodes + 1, *(math.ceil(topology.num_nodes * times) for times in _TIMES)]
    )
    if short_of_memory:
        return
    pinned = math.prod(base.constraints.pinned.values())
    sizes = {pinned * -(-now // pinned), max(1, now // pinned) * pinned} | {1 << n for n in range(now.bit_length())}
    sizes -= {now}
    for size in sorted(sizes):
        other = with_devices(topology, size)
        if other is None and size % topology.devices_per_node == 0:
            other = with_nodes(topology, size // topology.devices_per_node)
        if other is not None:
            text = f"{format_plural(size, 'device')} instead of {now}"
            kind = "larger" if size > now else "smaller"
            yield _extend_variant(base, _ROOM + abs(math.log2(size / now)), kind, text, topology=other)


def _list_node_variants(variant: Variant, counts: Sequence[int]) -> Iterator[Variant]:
    """Yield variants with more nodes of the same kind. ``counts``: numbers of nodes."""
    topology = variant.topology
    for nodes in sorted({n for n in counts if n * topology.devices_per_node <= _MOST_DEVICES}):
        larger = with_nodes(topology, nodes) if topology != _build_local_topology(topology) else None
        if larger is not None:
            text = f"{format_plural(nodes, 'node')} instead of {topology.num_nodes} ({larger.num_devices} devices)"
            yield _extend_variant(
                variant, _ROOM + math.log2(nodes / topology.num_nodes), "nodes", text, topology=larger
            )


def _list_memory_variants(base: Variant, several: Sequence[float]) -> Iterator[Variant]:
    """Yield variants with more memory on every device. ``several``: factors of the memory."""
    for times in several:
        larger = with_memory(base.topology, times)
        if larger is not None:
            least, now = (bytes_text(min(d.memory for d in each.devices)) for each in (larger, base.topology))
            text = f"{times:g} times the memory on every device ({least} instead of {now} on the smallest)"
            yield _extend_variant(base, _MEMORY + math.log2(times), "memory", text, topology=larger)


def _build_local_topology(topology: Topology) -> Topology:
    return Topology.local(topology.num_devices)
