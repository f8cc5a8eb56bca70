"""Check that ranks have not diverged: in the scaling of gradients, in replicas of parameters, and in their batches.

A rank holds a part of the gradients. ``torch.nn.utils.clip_grad_norm_`` would compute the norm of only this part, and
scale by a different factor on every rank. Replicas would then diverge silently, and parameters that only one rank has
would learn at a different rate. Any other change that a script makes to the parameters of one rank has a similar
effect. If ranks that compute one result together read different samples, the result is meaningless. If the global batch
differs between ranks, each rank takes its part of its own batch, and the other samples are lost.

All three checks run before the second, third, fifth, ninth step and so on; the check of batches also runs before the
first step. A check reads the parameters and a batch once and all-reduces a few numbers over all ranks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partitioner.passes.ir.layouts import Layout
from partitioner.runtime.comm.group import Communicator, get_world_group
from partitioner.runtime.engine.batches import convert_batch, convert_rank_batch, get_share
from partitioner.runtime.errors import AgreementError, BatchError, LaunchError
from partitioner.runtime.program.mesh import subtract_axes
from partitioner.runtime.program.program import RankProgram
from partitioner.runtime.state.disk_offload import release_pages

EVERY = 1024  # maximum number of steps between checks; before, checks follow steps whose number is a power of two

_PROBES = 8  # number of gradients that are probed
_SAME, _OTHER = 1e-4, 1e-3  # relative differences: rounding stays below the first, different factors exceed the second
_MASK = (1 << 62) - 1
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SKETCH = 16
_CHUNK = 1 << 20  # numbers of a batch that are hashed at a time
_MAX_DISTANCE = 1e-3  # tolerated distance of replicas / norm, for kernels with a non-deterministic order of sums

_GLOBAL = (
    "expected the same global batch, in the same order, on all ranks, because each rank takes its own part "
    "of it: draw batches from a generator with the same seed on all ranks, without a DistributedSampler; or "
    "pass only this rank's samples (engine.share) with step(batch, local=True), as partitioner.Loader does"
)
_LOCAL = (
    "these ranks compute one result together: expected the same samples (engine.share), in the same order, "
    "on all ranks with the same dp coordinate: draw them from generators with the same seed, or use "
    "partitioner.Loader"
)

_Kind = tuple[tuple[str, ...], tuple[int, ...]]


class _GradientProbe(NamedTuple):
    """The element of a gradient with the largest magnitude, copied right after backward. A later comparison of the same
    element with the copy gives the factor by which the training script has scaled the gradient, such as by clipping.
    ``gradient``: the gradient, flat. ``place``: index of the element. ``value``: the copy of the element.
    """

    gradient: Tensor
    place: Tensor
    value: Tensor


class ConsistencyChecks:
    """Checks at regular intervals of steps that the ranks are consistent: that replicas of parameters are equal, that
    the training script scaled the gradients of all ranks by the same factor (such as by clipping), and that all ranks
    got the same batch. Every rank has one instance. ``parameters``: name -> this rank's parameter, as optimizers update
    it. ``gradients``: name -> gradient that optimizers read. ``communicator``: connects this rank with the others.
    """

    def __init__(
        self,
        rank: RankProgram,
        parameters: Mapping[str, nn.Parameter],
        gradients: Mapping[str, Tensor],
        communicator: Communicator,
    ) -> None:
        program = rank.program
        self.rank = rank
        self.communicator = communicator
        self.active = program.objective == "train" and program.world_size > 1
        self._parameters = {n: p for n, p in parameters.items() if program.states[n].requires_grad}
        self._frozen = {n: p for n, p in parameters.items() if not p.requires_grad}
        self._gradients = gradients
        self._steps = 0
        self._ran: set[str] = set()
        self._probes: list[_GradientProbe] = []

    def before_step(self, batch: Any, local: bool, rank: RankProgram | None = None) -> None:
        """Run the checks that are due before this step: that replicas of parameters are equal, that the training script
        scaled the gradients of all ranks by the same factor (such as by clipping), and that ranks got the same batch.
        All ranks call this.

        ``batch``: the batch of the step. ``local``: if true, it has only this rank's samples; otherwise it is the
        global batch. ``rank``: the program of the step; ``None``: the first program of the plan. Raise
        :class:`AgreementError` or, for batches, :class:`BatchError` on all ranks. Raise :class:`LaunchError` if the
        script enables gradients of parameters that were frozen when the plan was made.
        """
        thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if thawed:
            raise LaunchError(
                f"{thawed[0]} was frozen when the plan was made, so the plan computes no gradient for it, but it "
                "requires one now: plan again with this requires_grad, and load the checkpoint under that plan"
            )
        if self.active and self._is_time(self._steps):
            self.check()
        if self.rank.program.world_size > 1 and (self._steps == 0 or self._is_time(self._steps)):
            self._check_batch(batch, local, rank or self.rank)

    def before_run(self, name: str, batch: Any, local: bool, rank: RankProgram) -> None:
        """Check that ranks got the same batch, before the plan's further program called ``name`` (such as an
        evaluation) runs for the first time. All ranks call this. ``local``: whether ``batch`` has only this rank's
        samples; otherwise it is the global batch. ``rank``: this rank's part of that program. Raise :class:`BatchError`
        on all ranks.
        """
        if name not in self._ran and rank.program.world_size > 1:
            self._check_batch(batch, local, rank)
        self._ran.add(name)

    def after_step(self) -> None:
        self._steps += 1
        self._probes = list(self._probe_gradients()) if self.active and self._is_time(self._steps) else []

    def drop_probes(self) -> None:
        """Drop the copies of gradient elements that were made after backward to detect scaling by the training script,
        such as clipping. Call this when gradients change in another way: when a checkpoint is loaded, and in
        ``zero_grad``.
        """
        self._probes = []

    def check(self) -> None:
        """Check now that the training script scaled the gradients of all ranks by the same factor, such as by clipping,
        and that replicas of parameters are equal. All ranks call this. Raise :class:`AgreementError` on all ranks.
        """
        self._check_scaling()
        self._check_replicas()

    @staticmethod
    def _is_time(steps: int) -> bool:
        return steps > 0 and (steps & (steps - 1) == 0 if steps < EVERY else steps % EVERY == 0)

    def _probe_gradients(self) -> Iterator[_GradientProbe]:
        """Yield, for some of this rank's gradients, the position and a copy of the element with the largest magnitude,
        right after backward. A later comparison with the copies gives the factor by which the training script has
        scaled the gradients, such as by clipping.
        """
        held = [g for g in self._gradients.values() if g.numel()]
        for gradient in held[:: max(1, len(held) // _PROBES)][:_PROBES]:
            flat = gradient.reshape(-1)
            place = flat.abs().argmax()
            yield _GradientProbe(flat, place, flat[place].clone())

    def _check_scaling(self) -> None:
        """Raise :class:`AgreementError` if ranks scaled their gradients by different factors, as happens if each rank
        clips by the norm of its own part of the gradients. Only warn if some ranks scaled by one factor and the others
        did not scale. All ranks call this.
        """
        factor = self._measure_scale_factor()
        told = torch.zeros(self.rank.program.world_size, 2, dtype=torch.float64, device=self.communicator.device)
        if factor is not None:
            norms = torch._foreach_norm([g for g in self._gradients.values() if g.numel()])
            told[self.rank.rank, 0] = factor
            told[self.rank.rank, 1] = torch.stack([n.double().cpu() for n in norms]).norm()
        factors, norms_now = self._sum_over_ranks(told).T.tolist()
        there = [r for r, f in enumerate(factors) if f > 0]
        scaled = [r for r in there if factors[r] < 1 - _OTHER]
        if not scaled:
            return
        low, high = (pick(there, key=factors.__getitem__) for pick in (min, max))
        largest = max(norms_now[r] for r in there)
        if factors[high] - factors[low] <= _OTHER * factors[high] or any(
            abs(norms_now[r] - largest) > _OTHER * largest for r in scaled
        ):
            return
        text = (
            f"gradients were clipped with different factors ({factors[low]:.4g} on rank {low}, "
            f"{factors[high]:.4g} on rank {high}), on each rank to a norm of at most {largest:.4g} of its own "
            "gradients: expected one factor from the norm of the whole model; call "
            "engine.clip_grad_norm_(max_norm), because torch.nn.utils.clip_grad_norm_ sees the gradients of "
            "one rank only"
        )
        if max(factors[r] for r in scaled) - factors[low] > _OTHER * factors[low]:
            raise AgreementError(f"{text}. The last step was wrong: resume from the last checkpoint before it")
        self._warn_on_first_rank(
            f"{text}. Ignore this warning if the difference is intended"
        )  # one factor on some ranks, none on others

    def _measure_scale_factor(self) -> float | None:
        """Return the factor by which the training script has multiplied all of this rank's gradients since backward,
        such as by clipping; ``None`` if the gradients have no common factor. The factor is measured on a few elements
        that were copied right after backward. If no elements were copied, return ``None``.
        """
        ratios = [
            float(gradient[place]) / float(value) for gradient, place, value in self._probes if torch.is_nonzero(value)
        ]
        if not ratios or not 0 < ratios[0] < float("inf"):
            return None
        return ratios[0] if all(abs(r - ratios[0]) <= _SAME * ratios[0] for r in ratios) else None

    def _check_replicas(self) -> None:
        """Raise :class:`AgreementError` if ranks that hold the same part of a parameter have different values. All
        ranks call this.
        """
        world, kinds = self.rank.program.world_size, self._list_replica_kinds()
        sums = {
            kind: _hash_tensors(self._parameters[n] for n in names)
            for kind, names in self._group_parameters_by_kind(kinds).items()
        }
        high, low = self._find_extremes(
            {k * world + self._find_first_holder(kind): sums[kind] for k, kind in enumerate(kinds) if kind in sums},
            len(kinds) * world,
        )
        differ = (high != low).nonzero().flatten().tolist()
        if differ:
            order, first = divmod(int(differ[0]), world)
            self._report_replica_difference(order, first, kinds)

    def _check_batch(self, batch: Any, local: bool, rank: RankProgram) -> None:
        """Raise :class:`BatchError` if ranks got different samples. All ranks call this.

        ``batch``: this rank's batch. ``local``: if true, the batch has only this rank's samples, and all ranks with the
        same ``dp`` coordinate that read an input must have the same samples of it; otherwise all ranks must have the
        same global batch. ``rank``: this rank's part of the program that reads the batch.
        """
        program, share = rank.program, get_share(rank)
        paths = [data.path for data in program.inputs]
        if local:
            values, at = convert_rank_batch(program, share, batch, True), self.rank.coordinates["dp"]
        else:  # coordinate -1: stored behind the numbers of all dp coordinates
            values, at = convert_batch(program, batch), -1
        given = {paths.index(d.path): _hash_in_order(values[d.value]) for d in program.inputs if d.value in values}
        count = program.size("dp")
        place_of = {k: (at % (count + 1)) * len(paths) + k for k in given}
        high, low = self._find_extremes({place_of[k]: h for k, h in given.items()}, (count + 1) * len(paths))
        differ = (high != low).nonzero().flatten().tolist()
        if not differ:
            return
        first = int(differ[0])
        own = next((given[k] for k in given if place_of[k] == first), None)
        told, _ = self._find_extremes({} if own is None else {self.rank.rank: own}, program.world_size)
        ranks: dict[int, list[int]] = {}
        for other, number in enumerate(told.tolist()):
            if number > -_MASK - 1:
                ranks.setdefault(number, []).append(other)
        some, others = (", ".join(map(str, same[:8])) for same in list(ranks.values())[:2])
        names = list(dict.fromkeys(paths[int(place) % len(paths)] for place in differ))
        more = f", and for {', '.join(map(repr, names[1:9]))} too" if len(names) > 1 else ""
        expected = _GLOBAL if first // len(paths) == count else _LOCAL
        raise BatchError(
            f"input {names[0]!r}: ranks {some} got other samples than ranks {others}{more}: {expected}"
            f"{'. The steps before may have had such batches too' if self._steps else ''}"
        )

    def _report_replica_difference(self, order: int, first: int, kinds: list[_Kind]) -> None:
        """Find the parameter and the ranks whose replicas differ, and raise :class:`AgreementError`. Only warn if the
        difference is so small that a different order of sums explains it. All ranks call this. ``kinds``: pairs (mesh
        axes along which ranks hold equal shards, pipeline stages that share the parameter). ``order``: index in
        ``kinds`` of the kind of replication for which a difference was detected. ``first``: lowest rank of the group of
        replicas.
        """
        kind, program = kinds[order], self.rank.program
        mine = self._group_parameters_by_kind(kinds).get(kind, []) if self._find_first_holder(kind) == first else []
        names = [*program.states]
        high, low = self._find_extremes(
            {names.index(n): _hash_tensors([self._parameters[n]]) for n in mine}, len(names)
        )
        differ = [names[i] for i in (high != low).nonzero().flatten().tolist()]
        if not differ:
            return
        name = differ[0]
        told = torch.zeros(program.world_size, 2 + _SKETCH, dtype=torch.float64, device=self.communicator.device)
        if name in mine:
            told[self.rank.rank] = _sketch_tensor(self._parameters[name]).to(told.device)
        told = self._sum_over_ranks(told).cpu().nan_to_num(nan=math.inf)
        holders = told[:, 0].nonzero().flatten().tolist()
        norms, sketches = told[holders, 1], told[holders, 2:]
        distances = (sketches - sketches.median(0).values).square().mean(1).sqrt().nan_to_num(nan=math.inf)
        index = int(distances.argmax())
        far, apart = holders[index], float(distances[index] / norms.max().clamp(min=1e-300))
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        text = (
            f"ranks {', '.join(map(str, holders[:8]))} should have equal values of {name}{more}, but they "
            f"differ: those of rank {far} deviate by about {apart:.1e} of the norm"
        )
        if apart <= _MAX_DISTANCE:
            self._warn_on_first_rank(
                f"{text}; kernels with a non-deterministic order of sums can cause this, and loading a "
                "checkpoint makes the values equal again"
            )
            return
        raise AgreementError(
            f"{text}. Change parameters, gradients and learning rates in the same way on all ranks, clip with "
            "engine.clip_grad_norm_, and resume from the last checkpoint"
        )

    def _list_replica_kinds(self) -> list[_Kind]:
        """Return the distinct ways in which the trained parameters are replicated, sorted; the list is equal on all
        ranks. Each is a pair: the mesh axes along which ranks hold equal shards of a parameter, and the pipeline stages
        that share the parameter because it is tied (empty if only one stage has it).
        """
        return sorted({self._find_replica_kind(n) for n, s in self.rank.program.states.items() if s.requires_grad})

    def _find_replica_kind(self, name: str) -> _Kind:
        """Return two tuples: the mesh axes along which ranks hold equal shards of the parameter called ``name``, and
        the pipeline stages that share the parameter because it is tied (empty if only one stage has it).
        """
        state = self.rank.program.states[name]
        experts = Layout.parse(state.expert_layout).is_shard
        alike = ["edp", "etp"] if experts else ["dp", "cp", "tp"]
        if Layout.parse(state.layout).is_shard:
            alike.pop()
        return subtract_axes(alike, state.zero_axes), tuple(sorted(state.stages)) if len(state.stages) > 1 else ()

    def _group_parameters_by_kind(self, kinds: list[_Kind]) -> dict[_Kind, list[str]]:
        """Return the names of this rank's trained parameters by kind of replication, in the order of ``kinds``. A kind
        is a pair: the mesh axes along which ranks hold equal shards, and the pipeline stages that share the parameter
        (empty if only one stage has it).
        """
        found: dict[_Kind, list[str]] = {}
        for name in sorted(self._parameters):
            found.setdefault(self._find_replica_kind(name), []).append(name)
        return {kind: found[kind] for kind in kinds if kind in found}

    def _find_first_holder(self, kind: _Kind) -> int:
        """Return the lowest rank that holds the same shards as this rank, for parameters with the kind of replication
        ``kind``: a pair of the mesh axes along which ranks hold equal shards, and the pipeline stages that share the
        parameters.
        """
        axes, stages = kind
        first = min(self.rank.group(*axes))
        return first + (stages[0] - self.rank.stage_index) * self.rank.program.strides["pp"] if stages else first

    def _warn_on_first_rank(self, text: str) -> None:
        if self.rank.rank == 0:
            warnings.warn(text, stacklevel=6)

    def _sum_over_ranks(self, numbers: Tensor) -> Tensor:
        return get_world_group(self.communicator, self.rank.program.world_size).all_reduce(numbers).wait()

    def _find_extremes(self, numbers: Mapping[int, int], length: int) -> tuple[Tensor, Tensor]:
        """Return the maximum and the minimum over all ranks of the numbers at each of ``length`` positions, as two
        int64 tensors of ``length`` elements. If no rank has a number at a position, both have the same value there.
        ``numbers``: position -> number of this rank. All ranks call this.
        """
        bounds = torch.full((2, length), -_MASK - 1, dtype=torch.int64, device=self.communicator.device)
        for place, number in numbers.items():
            bounds[0, place], bounds[1, place] = number, -number
        everyone = get_world_group(self.communicator, self.rank.program.world_size)
        high, low = everyone.all_reduce(bounds, maximum=True).wait()
        return high, torch.where(high == -_MASK - 1, high, -low)


def _hash_tensors(tensors: Iterator[Tensor] | list[Tensor]) -> int:
    """Return a hash of the bits of ``tensors``. The order of the tensors matters; the order of elements in a tensor
    does not.
    """
    found = 0
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1)
        data = torch.view_as_real(data).reshape(-1) if data.is_complex() else data
        bits = data.view(_BITS[data.element_size()])
        found = (found * 1000003 + int(bits.sum(dtype=torch.int64))) & _MASK
        release_pages(tensor)
    return found


def _hash_in_order(tensor: Tensor) -> int:
    """Return a hash of the bits of ``tensor``. The order of the elements matters."""
    data = tensor.detach().cpu().contiguous().reshape(-1)
    data = torch.view_as_real(data).reshape(-1) if data.is_complex() else data
    found = 0
    for number, bits in enumerate(data.view(_BITS[data.element_size()]).split(_CHUNK)):
        odd = torch.arange(1, 2 * len(bits), 2)
        found += int((bits.long() * (odd + 2 * _CHUNK * number)).sum())
    return found & _MASK


def _sketch_tensor(tensor: Tensor) -> Tensor:
    """Return a vector of 18 numbers: 1, which marks that a rank has the tensor; the norm of ``tensor``; and 16 sums of
    its elements with random signs. The signs are equal on all ranks. Ranks exchange these vectors to estimate how much
    their tensors differ: the expected mean square difference between the sums of two tensors is the square of the
    tensors' distance.
    """
    data = tensor.detach().cpu().double().reshape(-1)
    generator = torch.Generator().manual_seed(0)
    signs = (torch.randint(0, 2, data.shape, generator=generator).double() * 2 - 1 for _ in range(_SKETCH))
    return torch.stack([torch.ones((), dtype=torch.float64), data.norm(), *(data @ s for s in signs)])
