"""Whether ranks still agree: gradients that a script scaled otherwise on each, replicas of a parameter that differ.

A rank has a part of the gradients. ``torch.nn.utils.clip_grad_norm_`` takes its norm for that of the whole model's, and
divides by another number on every rank: replicas part, and what is on one rank alone learns at another rate, silently.
So does whatever else a script does to one rank's parameters. Ranks that compute one result of different samples learn
nothing, as silently; of global batches that are not the same on all ranks each rank takes a part, and the rest of what
it was given is lost. All three are looked for before the second, third, fifth, ninth step and so on, batches before the
first one too, at the cost of reading the parameters and a batch once and of adding up a few numbers over all ranks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from passes.layouts import Layout
from runtime.batch import batch_values, own_values, share_of
from runtime.disk import forget
from runtime.errors import AgreementError, BatchError, LaunchError
from runtime.groups import Communicator, all_ranks
from runtime.meshes import axes_beside
from runtime.program import RankProgram

EVERY = 1024  # steps, once powers of two are farther apart
_PROBES = 8  # gradients that are looked at
_SAME, _OTHER = 1e-4, 1e-3  # relative differences: of what rounding makes, and of factors that are not the same
_MASK = (1 << 62) - 1
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SKETCH = 16
_CHUNK = 1 << 20  # numbers of a batch that are looked at at a time
_APART = 1e-3  # of a parameter's norm: more than kernels that add up in any order make of it

_GLOBAL = (
    "expected the same global batch on all ranks, in the same order, of which each takes its part: draw it from a "
    "generator of the same seed on each, without a DistributedSampler; or give each rank its own samples alone, those "
    "of engine.share, with step(batch, local=True), as runtime.Loader does"
)
_LOCAL = (
    "they compute one result: expected the same samples, those of engine.share, in the same order on all ranks of one "
    "place on dp: draw them from a generator of the same seed on each, or use runtime.Loader"
)

_Kind = tuple[tuple[str, ...], tuple[int, ...]]


class _Probe(NamedTuple):
    """The largest element of a gradient when it was made: where it is, and what it was."""

    gradient: Tensor
    place: Tensor
    value: Tensor


class Agreement:
    """That of one rank with the others. ``parameters``: what optimizers step; ``gradients``: what they see."""

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
        self._probes: list[_Probe] = []

    def before_step(self, batch: Any, local: bool) -> None:
        """Look, if it is time; all ranks call it. Raises :class:`AgreementError` or, for their batches,
        :class:`BatchError` on all of them, and :class:`LaunchError` where a script wants gradients that the plan has
        not."""
        thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if thawed:
            raise LaunchError(
                f"{thawed[0]} was frozen when the plan was made, which has no gradient for it, and takes one now: plan "
                "again with requires_grad as it is to be, and load the checkpoint under that plan"
            )
        if self.active and self._is_time(self._steps):
            self.check()
        if self.rank.program.world_size > 1 and (self._steps == 0 or self._is_time(self._steps)):
            self._check_batch(batch, local)

    def after_step(self) -> None:
        self._steps += 1
        self._probes = list(self._probed()) if self.active and self._is_time(self._steps) else []

    def forget(self) -> None:
        """What parameters and gradients are now is none of a step's doing."""
        self._probes = []

    def check(self) -> None:
        """Look now; all ranks call it. Raises :class:`AgreementError` on all of them."""
        self._check_scaling()
        self._check_replicas()

    @staticmethod
    def _is_time(steps: int) -> bool:
        return steps > 0 and (steps & (steps - 1) == 0 if steps < EVERY else steps % EVERY == 0)

    def _probed(self) -> Iterator[_Probe]:
        held = [g for g in self._gradients.values() if g.numel()]
        for gradient in held[:: max(1, len(held) // _PROBES)][:_PROBES]:
            flat = gradient.reshape(-1)
            place = flat.abs().argmax()
            yield _Probe(flat, place, flat[place].clone())

    def _check_scaling(self) -> None:
        """Whether every rank's gradients were scaled to a norm that is that of none but its own."""
        factor = self._factor()
        told = torch.zeros(self.rank.program.world_size, 2, dtype=torch.float64, device=self.communicator.device)
        if factor is not None:
            norms = torch._foreach_norm([g for g in self._gradients.values() if g.numel()])
            told[self.rank.rank, 0] = factor
            told[self.rank.rank, 1] = torch.stack([n.double().cpu() for n in norms]).norm()
        factors, norms_now = self._total(told).T.tolist()
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
            f"gradients were scaled by {factors[low]:.4g} on rank {low} and by {factors[high]:.4g} on rank {high}, "
            f"each to a norm of at most {largest:.4g} of its own: expected one factor, of the whole model's norm, as "
            "engine.clip_grad_norm_(max_norm) takes it; torch.nn.utils.clip_grad_norm_ sees the part of one rank alone"
        )
        if max(factors[r] for r in scaled) - factors[low] > _OTHER * factors[low]:
            raise AgreementError(f"{text}. Go on from the last checkpoint before: the last step was wrong")
        self._warn(f"{text}, unless this was meant")  # one factor on some ranks, none on others

    def _factor(self) -> float | None:
        """By what all of this rank's gradients were multiplied since they were made; ``None``: by nothing in common."""
        ratios = [
            float(gradient[place]) / float(value) for gradient, place, value in self._probes if torch.is_nonzero(value)
        ]
        if not ratios or not 0 < ratios[0] < float("inf"):
            return None
        return ratios[0] if all(abs(r - ratios[0]) <= _SAME * ratios[0] for r in ratios) else None

    def _check_replicas(self) -> None:
        """Whether ranks that hold the same part of a parameter hold the same numbers."""
        world, kinds = self.rank.program.world_size, self._kinds()
        sums = {kind: _hash(self._parameters[n] for n in names) for kind, names in self._held(kinds).items()}
        high, low = self._extremes(
            {k * world + self._first_holder(kind): sums[kind] for k, kind in enumerate(kinds) if kind in sums},
            len(kinds) * world,
        )
        differ = (high != low).nonzero().flatten().tolist()
        if differ:
            order, first = divmod(int(differ[0]), world)
            self._tell(order, first, kinds)

    def _check_batch(self, batch: Any, local: bool) -> None:
        """Whether ranks were given the same samples: of a global batch all ranks all of them, with ``local`` those of
        one place on ``dp`` that read an input."""
        program, share = self.rank.program, share_of(self.rank)
        paths = [data.path for data in program.inputs]
        if local:
            values, at = own_values(program, share, batch, True), self.rank.coordinates["dp"]
        else:  # behind those of all places
            values, at = batch_values(program, batch), -1
        given = {paths.index(d.path): _hash_in_order(values[d.value]) for d in program.inputs if d.value in values}
        count = program.size("dp")
        place_of = {k: (at % (count + 1)) * len(paths) + k for k in given}
        high, low = self._extremes({place_of[k]: h for k, h in given.items()}, (count + 1) * len(paths))
        differ = (high != low).nonzero().flatten().tolist()
        if not differ:
            return
        first = int(differ[0])
        own = next((given[k] for k in given if place_of[k] == first), None)
        told, _ = self._extremes({} if own is None else {self.rank.rank: own}, program.world_size)
        ranks: dict[int, list[int]] = {}
        for rank, number in enumerate(told.tolist()):
            if number > -_MASK - 1:
                ranks.setdefault(number, []).append(rank)
        some, others = (", ".join(map(str, same[:8])) for same in list(ranks.values())[:2])
        names = list(dict.fromkeys(paths[int(place) % len(paths)] for place in differ))
        more = f", and for {', '.join(map(repr, names[1:9]))} too" if len(names) > 1 else ""
        expected = _GLOBAL if first // len(paths) == count else _LOCAL
        raise BatchError(
            f"input {names[0]!r}: ranks {some} were given other samples than ranks {others}{more}: {expected}"
            f"{'. The steps before may have had such batches too' if self._steps else ''}"
        )

    def _tell(self, order: int, first: int, kinds: list[_Kind]) -> None:
        """Name the parameter and the ranks: raise, or, where it is about what sums in another order make, warn."""
        kind, program = kinds[order], self.rank.program
        mine = self._held(kinds).get(kind, []) if self._first_holder(kind) == first else []
        names = [*program.states]
        high, low = self._extremes({names.index(n): _hash([self._parameters[n]]) for n in mine}, len(names))
        differ = [names[i] for i in (high != low).nonzero().flatten().tolist()]
        if not differ:
            return
        name = differ[0]
        told = torch.zeros(program.world_size, 2 + _SKETCH, dtype=torch.float64, device=self.communicator.device)
        if name in mine:
            told[self.rank.rank] = _sketch(self._parameters[name]).to(told.device)
        told = self._total(told).cpu().nan_to_num(nan=math.inf)
        holders = told[:, 0].nonzero().flatten().tolist()
        norms, sketches = told[holders, 1], told[holders, 2:]
        distances = (sketches - sketches.median(0).values).square().mean(1).sqrt().nan_to_num(nan=math.inf)
        index = int(distances.argmax())
        far, apart = holders[index], float(distances[index] / norms.max().clamp(min=1e-300))
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        text = (
            f"ranks {', '.join(map(str, holders[:8]))} hold the same part of {name}{more}, and not the same numbers: "
            f"rank {far} is about {apart:.1e} of its norm away"
        )
        if apart <= _APART:
            self._warn(f"{text}; kernels that add up in any order do that, and loading a checkpoint ends it")
            return
        raise AgreementError(
            f"{text}. Change parameters, gradients and learning rates alike on all ranks, clip by "
            "engine.clip_grad_norm_, and go on from the last checkpoint before"
        )

    def _kinds(self) -> list[_Kind]:
        """The axes over which parameters have replicas, and, of tied ones, the stages; the same on all ranks."""
        return sorted({self._kind(n) for n, s in self.rank.program.states.items() if s.requires_grad})

    def _kind(self, name: str) -> _Kind:
        state = self.rank.program.states[name]
        experts = Layout.parse(state.expert_layout).is_shard
        alike = ["edp", "etp"] if experts else ["dp", "cp", "tp"]
        if Layout.parse(state.layout).is_shard:
            alike.pop()
        return axes_beside(alike, state.zero_axes), tuple(sorted(state.stages)) if len(state.stages) > 1 else ()

    def _held(self, kinds: list[_Kind]) -> dict[_Kind, list[str]]:
        found: dict[_Kind, list[str]] = {}
        for name in sorted(self._parameters):
            found.setdefault(self._kind(name), []).append(name)
        return {kind: found[kind] for kind in kinds if kind in found}

    def _first_holder(self, kind: _Kind) -> int:
        """Of the ranks that hold the same as this one: the first, which stands for all of them."""
        axes, stages = kind
        first = min(self.rank.group(*axes))
        return first + (stages[0] - self.rank.stage_index) * self.rank.program.strides["pp"] if stages else first

    def _warn(self, text: str) -> None:
        if self.rank.rank == 0:
            warnings.warn(text, stacklevel=6)

    def _total(self, numbers: Tensor) -> Tensor:
        return all_ranks(self.communicator, self.rank.program.world_size).all_reduce(numbers).wait()

    def _extremes(self, numbers: Mapping[int, int], length: int) -> tuple[Tensor, Tensor]:
        """The largest and the smallest number of all ranks in each of ``length`` places; alike where none has any."""
        bounds = torch.full((2, length), -_MASK - 1, dtype=torch.int64, device=self.communicator.device)
        for place, number in numbers.items():
            bounds[0, place], bounds[1, place] = number, -number
        everyone = all_ranks(self.communicator, self.rank.program.world_size)
        high, low = everyone.all_reduce(bounds, maximum=True).wait()
        return high, torch.where(high == -_MASK - 1, high, -low)


def _hash(tensors: Iterator[Tensor] | list[Tensor]) -> int:
    """A number that the bits of ``tensors`` give, in their order."""
    found = 0
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1)
        data = torch.view_as_real(data).reshape(-1) if data.is_complex() else data
        bits = data.view(_BITS[data.element_size()])
        found = (found * 1000003 + int(bits.sum(dtype=torch.int64))) & _MASK
        forget(tensor)
    return found


def _hash_in_order(tensor: Tensor) -> int:
    """As :func:`_hash`, of a few numbers: another one where they are in another order."""
    data = tensor.detach().cpu().contiguous().reshape(-1)
    data = torch.view_as_real(data).reshape(-1) if data.is_complex() else data
    found = 0
    for number, bits in enumerate(data.view(_BITS[data.element_size()]).split(_CHUNK)):
        odd = torch.arange(1, 2 * len(bits), 2)
        found += int((bits.long() * (odd + 2 * _CHUNK * number)).sum())
    return found & _MASK


def _sketch(tensor: Tensor) -> Tensor:
    """1, the norm, and sums of the elements with signs drawn by chance, the same on all ranks: of two tensors these are
    as far apart, in the mean of squares, as the tensors are."""
    data = tensor.detach().cpu().double().reshape(-1)
    generator = torch.Generator().manual_seed(0)
    signs = (torch.randint(0, 2, data.shape, generator=generator).double() * 2 - 1 for _ in range(_SKETCH))
    return torch.stack([torch.ones((), dtype=torch.float64), data.norm(), *(data @ s for s in signs)])
