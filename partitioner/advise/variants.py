"""Variants of a job: without some fixed constraints, or with another batch, other devices or other techniques.

Each variant has an effort, by which variants are ordered, and a distance from the original request. For a job without a
plan, ``partitioner/advise/suggest.py`` plans the variants in this order. A *pin* is the name of a constraint that the
user fixed.
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

# Effort of giving up a constraint, by name. A change of a size adds half of its base-2 logarithm.
_WEIGHTS = {"recompute": 0.6, "microbatch_size": 0.7, "schedule": 0.8, "virtual_stages": 0.8}
_FEW_PINS = 7


def pins_of(constraints: Constraints) -> list[str]:
    """Return the names of those constraints in ``constraints`` that the user fixed and that decide the mesh, the
    microbatch size, the schedule, recomputation or the ZeRO stage. They are followed by ``stage_of:<module>`` for each
    module whose pipeline stage is fixed.
    """
    *others, zero, dp_shard = OF_POINT
    fixed = [n for n in (*others, "recompute", zero, dp_shard) if getattr(constraints, n) is not None]
    # with groups, it changes the loss
    fixed = [n for n in fixed if n != "microbatch_size" or constraints.group_size is None]
    return fixed + [f"stage_of:{m}" for m in constraints.stage_of]


def fixed_of(constraints: Constraints) -> list[str]:
    """Return the names of all constraints that the user fixed in ``constraints`` and that may be given up to make a
    plan possible.

    Three are left out: ``couple``, which changes the result of training; ``ahead``, which only makes the search
    consider more layouts; and a ``memory_margin`` of at most the default, because giving it up would leave less memory.
    """
    pins = pins_of(constraints)
    beside = {*OF_POINT, *pins, "stage_of", "couple", "ahead"}
    if constraints.memory_margin <= Constraints.model_fields["memory_margin"].default:
        beside.add("memory_margin")  # giving it up would leave plans less memory
    defaults = ((name, field.default) for name, field in Constraints.model_fields.items() if name not in beside)
    return pins + [name for name, default in defaults if getattr(constraints, name) != default]


def list_pin_subsets(pins: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the sets of ``pins`` (names of fixed constraints) that may be given up together, as tuples.

    If there are at most seven pins, all subsets are yielded. If there are more, only subsets of at most two pins, the
    set of all fixed stages of modules, and the set of all pins are yielded. More than seven fixed stages are only given
    up together.
    """
    places = tuple(p for p in pins if ":" in p)
    each = pins if len(places) <= _FEW_PINS else [p for p in pins if p not in places]
    few = len(each) if len(each) <= _FEW_PINS else 2
    for size in range(few + 1):
        yield from combinations(each, size)
    if few < len(pins):
        yield from {places, tuple(pins)} - {()}


def estimate_relaxation_effort(pins: Sequence[str]) -> float:
    """Return the effort of giving up the fixed constraints ``pins``: a number without a unit that orders changes, the
    smallest first. How far a value changes is not included. Each fixed stage of a module after the first adds little,
    since such stages are often wrong together.
    """
    places = sum(":" in pin for pin in pins)
    others = sum(_WEIGHTS.get(pin, 1.0) for pin in pins if ":" not in pin)
    return others + (0.8 + 0.2 * places if places else 0.0)


def relax_pins(constraints: Constraints, pins: Sequence[str]) -> Constraints:
    """Return ``constraints`` with those named in ``pins`` reset to their defaults."""
    places = {m: s for m, s in constraints.stage_of.items() if f"stage_of:{m}" not in pins}
    freed: dict[str, Any] = {pin: Constraints.model_fields[pin].default for pin in pins if ":" not in pin}
    return constraints.model_copy(update={**freed, "stage_of": places})


def is_pin_changed(constraints: Constraints, pin: str, candidate: MeshCandidate) -> bool:
    """Return whether ``candidate`` (a choice of mesh sizes, microbatch size, schedule and ZeRO stage) differs from the
    user's value of the constraint ``pin``. The result is true for constraints that a candidate does not have, such as
    recomputation and the stages of modules, since these are freed instead of changed.

    ``constraints``: the choices that the user fixed.
    """
    return not hasattr(candidate, pin) or getattr(candidate, pin) != getattr(constraints, pin)


def measure_pin_distance(constraints: Constraints, pin: str, candidate: MeshCandidate) -> float:
    """Return the distance between the value that ``candidate`` has for the constraint named ``pin`` and the user's
    value: half of the absolute base-2 logarithm of their ratio; 0 if the values are not whole numbers. ``candidate``:
    mesh sizes, microbatch size, schedule and ZeRO stage. ``constraints``: the choices that the user fixed."""
    old, new = getattr(constraints, pin, None), getattr(candidate, pin, None)
    if not isinstance(old, int) or not isinstance(new, int):
        return 0.0
    return 0.5 * abs(math.log2(max(new, 0.5) / max(old, 0.5)))


def format_given_pin(constraints: Constraints, pin: str) -> str:
    """Return the fixed constraint ``pin`` with its value as the user could write it, such as ``tp=8`` or
    ``stage_of['head']=1``. ``pin``: a constraint's name, or ``stage_of:<module>``. ``constraints``: the choices that
    the user fixed.
    """
    name, _, module = pin.partition(":")
    if module:
        return f"stage_of[{module!r}]={constraints.stage_of[module]}"
    given = getattr(constraints, name)
    return f"{name}={kinds_text(given)}" if name == "offload" else f"{name}={given}"


def kinds_text(kinds: Sequence[str]) -> str:
    """Return ``kinds``, kinds of data in host memory, as the user could write them: ``optimizer+activations`` or
    ``none``."""
    return "+".join(kinds) or "none"


def describe_pin_change(constraints: Constraints, pin: str, new: object) -> str:
    """Return a change of a fixed constraint as text, such as ``tp=4 instead of 8``. ``pin``: the constraint's name, or
    ``stage_of:<module>``. ``new``: its new value; ``None`` means that it is left free. ``constraints``: the choices
    that the user fixed.
    """
    name, _, module = pin.partition(":")
    if module:
        return f"no stage_of[{module!r}]"
    if new is None:
        return f"{name} left free instead of {getattr(constraints, name)}"
    return f"{name}={new} instead of {getattr(constraints, name)}"


# Efforts of a corrected or freed constraint, of other offload, of other devices, and of more memory.
_PLACE, _OFFLOAD, _ROOM, _MEMORY = 0.4, 0.6, 3.0, 4.0
_MARGIN = 0.5  # effort of ``memory_margin=0``
_UNASKED = 0.3  # effort of offload if the user did not fix it
# Constraints on how a technique is used; a plan need not use it at all.
_WAYS = ("context", "hierarchical", "grad_compression", "data_shares")
_MOST_DEVICES, _MOST_BATCHES = 32768, 12
_TIMES = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_FAR = (96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class RelaxationRequest:
    """A job (a model to be planned on a cluster) as the user requested it.

    ``topology``: the cluster. ``constraints``: the choices that the user fixed. ``global_batch``: samples of the global
    batch; ``None``: as many as the inputs have. ``prepare``: function that returns the job in the form that the planner
    needs, given a topology, constraints and a global batch. The function is also called with other values of these
    three, to plan variants of the job.
    """

    topology: Topology
    constraints: Constraints
    global_batch: int | None
    prepare: Callable[[Topology, Constraints, int | None], Job]


@dataclass(frozen=True)
class Variant:
    """The job (a model to be planned on a cluster) that the user requested, with zero or more changes.

    ``cost``: the summed effort of the changes, by which changed jobs are ordered. ``kinds``: one text for each change
    that says what kind it is, such as ``offload``. ``texts``: a description of each change. ``topology``,
    ``constraints``, ``global_batch``: the arguments of ``partition`` after the changes; ``None`` for ``global_batch``
    stands for the number of samples in the inputs.
    """

    cost: float
    kinds: frozenset[str]
    texts: tuple[str, ...]
    topology: Topology
    constraints: Constraints
    global_batch: int | None


def _extend_variant(variant: Variant, cost: float, kind: str, text: str, **changed: Any) -> Variant:
    """Return ``variant``, a variant of the requested job (model, global batch, cluster and constraints), with one more
    change. ``changed``: field of the variant that is replaced -> new value. ``cost``: the effort of this change; it is
    added to the effort of ``variant``. ``kind``: its kind as text, such as ``offload``. ``text``: its description.
    """
    return replace(
        variant, cost=variant.cost + cost, kinds=variant.kinds | {kind}, texts=(*variant.texts, text), **changed
    )


def list_variants(asked: RelaxationRequest, short_of_memory: bool) -> Iterator[Variant]:
    """Yield the job (model, global batch, cluster and constraints) as requested, and then variants of it with one or
    two changes each, such as other constraints. ``short_of_memory``: whether missing memory is the reason that the
    requested job has no plan; it decides which changes are tried. ``asked``: the job as the user requested it.
    """
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
    """Yield variants of a job (model, global batch, cluster and constraints) with up to 16,384 times as much memory per
    device, or as many nodes. They are tried if the job lacks memory even with smaller changes. ``asked``: the job as
    the user requested it."""
    base = next(list_variants(asked, True))
    yield from _list_memory_variants(base, (*_TIMES, *_FAR))
    yield from _list_node_variants(base, [math.ceil(base.topology.num_nodes * times) for times in (*_TIMES, *_FAR)])


def _list_stage_place_variants(asked: RelaxationRequest, base: Variant) -> Iterator[Variant]:
    """Yield variants of a job (model, global batch, cluster and constraints) in which one entry of the constraint
    ``stage_of`` is corrected. This constraint is a dict: module path -> pipeline stage. A path that does not exist
    becomes the most similar one, and a stage that does not exist becomes the first or the last. ``base``: the job that
    is varied. ``asked``: the job as the user requested it.
    """
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
    """Return the number of pipeline stages that the constraints ``given`` fix, virtual ones included; ``None`` if they
    leave it open.
    """
    if given.pp is None or (given.virtual_stages is None and given.schedule not in (None, *OF_ONE_STAGE)):
        return None
    return given.pp * (given.virtual_stages or 1)


def _replace_stage_places(base: Variant, places: dict[str, int], text: str) -> Variant:
    constraints = base.constraints.model_copy(update={"stage_of": places})
    return _extend_variant(base, _PLACE, text, text, constraints=constraints)


def _list_batch_variants(asked: RelaxationRequest, base: Variant) -> Iterator[Variant]:
    """Yield variants of a job (model, global batch, cluster and constraints) with other global batch sizes. These are
    the nearest multiples of two kinds of numbers: the fixed ``dp`` times the fixed microbatch size, and the divisors of
    the number of devices (times the group size, if samples interact in groups, as in batch norm).

    ``base``: the job that is varied. ``asked``: the job as the user requested it.
    """
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
    """Yield variants of a job (model, global batch, cluster and constraints) with another ``dp_shard`` (number of
    data-parallel ranks that ZeRO shards over), if the user fixed it. ``base``: the job that is varied.
    """
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
    """Yield variants of a job (model, global batch, cluster and constraints) with other kinds of data offloaded to host
    memory. ``base``: the job that is varied. ``short_of_memory``: whether missing memory is the reason that the job has
    no plan.

    If the user fixed the offload, the other kinds are tried; optimizer states in host memory may also move to disk. If
    the user fixed the mesh but not the offload, the kinds are tried too, because ``partition`` then tries none by
    itself. If the topology does not describe its hosts, only the job without offload is tried.
    """
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
    """Yield variants of a job (model, global batch, cluster and constraints) with other devices: without slower or
    smaller devices; with more nodes; or with another number of devices that is a power of two or a multiple of the
    product of the fixed mesh sizes.

    ``base``: the job that is varied. ``short_of_memory``: whether missing memory is the reason that the job has no
    plan; the last kind of change is then not tried.
    """
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
    """Yield variants of a job (model, global batch, cluster and constraints) with more nodes of the same kind.
    ``variant``: the job that is varied. ``counts``: total numbers of nodes to try.
    """
    topology = variant.topology
    for nodes in sorted({n for n in counts if n * topology.devices_per_node <= _MOST_DEVICES}):
        larger = with_nodes(topology, nodes) if topology != _build_local_topology(topology) else None
        if larger is not None:
            text = f"{format_plural(nodes, 'node')} instead of {topology.num_nodes} ({larger.num_devices} devices)"
            yield _extend_variant(
                variant, _ROOM + math.log2(nodes / topology.num_nodes), "nodes", text, topology=larger
            )


def _list_memory_variants(base: Variant, several: Sequence[float]) -> Iterator[Variant]:
    """Yield variants of a job (model, global batch, cluster and constraints) with more memory on every device.
    ``base``: the job that is varied. ``several``: factors by which the memory is multiplied.
    """
    for times in several:
        larger = with_memory(base.topology, times)
        if larger is not None:
            least, now = (bytes_text(min(d.memory for d in each.devices)) for each in (larger, base.topology))
            text = f"{times:g} times the memory on every device ({least} instead of {now} on the smallest)"
            yield _extend_variant(base, _MEMORY + math.log2(times), "memory", text, topology=larger)


def _build_local_topology(topology: Topology) -> Topology:
    return Topology.local(topology.num_devices)
