"""Time, money and energy of a whole training run under a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from partitioner.errors import PlanError
from partitioner.passes.errors import InputsError
from partitioner.plan import Plan
from partitioner.plans.figures import waiting_shares
from partitioner.units import count_text, format_digits, format_plural, seconds_text

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


@dataclass(frozen=True)
class TrainingRun:
    """What a whole training run takes on a cluster.

    ``steps``, ``samples``, ``tokens``: length of the run in optimizer steps, samples and tokens (0 if the model has no
    sequences). ``seconds``: time of all steps, without restarts, evaluation and other pauses. ``num_devices``: number
    of devices. ``money``: US dollars; ``None`` if the topology gives no price. ``energy``: joules of the devices;
    ``None`` if the topology gives no power.
    """

    steps: int
    samples: int
    tokens: int
    seconds: float
    num_devices: int
    money: float | None = None
    energy: float | None = None

    @property
    def days(self) -> float:
        return self.seconds / 86400

    @property
    def device_hours(self) -> float:
        return self.seconds / 3600 * self.num_devices

    def __str__(self) -> str:
        of = f"{count_text(self.tokens)} tokens" if self.tokens else f"{count_text(self.samples)} samples"
        time = f"{format_digits(self.days)} days" if self.days >= 1 else seconds_text(self.seconds)
        more = [f"{_amount_text(self.device_hours)} device hours"]
        more += [f"{_amount_text(self.money)} USD"] if self.money is not None else []
        more += [f"{format_digits(self.energy / 3.6e9)} MWh"] if self.energy is not None else []
        return (
            f"{of} are {format_plural(self.steps, 'step')}: {time} on {format_plural(self.num_devices, 'device')}, "
            f"{', '.join(more)}; without restarts, evaluation and other pauses"
        )


def _amount_text(amount: float) -> str:
    """Return ``amount`` as text: with three significant digits below 1,000, otherwise as a whole number, from 10,000 on
    with a suffix such as ``k``."""
    return format_digits(amount) if amount < 1000 else count_text(amount)


def training_run(
    plan: Plan,
    *,
    tokens: float | None = None,
    samples: float | None = None,
    steps: int | None = None,
    price: float | None = None,
) -> TrainingRun:
    """Return the time, money and energy that a training run under ``plan`` takes. The length of the run is given by
    exactly one of ``tokens``, ``samples`` and ``steps``; the others are ``None``. An incomplete last step counts as a
    whole one.

    Args:
        price: US dollars per device and hour; ``None``: the price in the topology.

    Raise :class:`InputsError` unless exactly one length is given and it is positive, and :class:`PlanError` if the plan
    does not train, or if ``tokens`` is given for a model without sequences.
    """
    given = {"tokens": tokens, "samples": samples, "steps": steps}
    known = {name: value for name, value in given.items() if value is not None}
    if len(known) != 1:
        names = ", ".join(known) or "none"
        raise InputsError(
            f"the length of a run is given in tokens, samples or steps; expected one of these, got {names}"
        )
    ((name, number),) = known.items()
    for what, value in ((name, number), ("price", price)):
        if value is not None and not is_positive(value):
            raise InputsError(f"{what} must be a positive number; got {value!r}")
    if plan.objective != "train":
        raise PlanError(
            "this plan is for inference, but the figures are those of a training run; expected a plan with "
            "objective='train'"
        )
    if name == "tokens" and not plan.tokens_per_step:
        raise PlanError(
            "the model reads no sequences, so the length of the run cannot be given in tokens; give it in "
            "samples or steps"
        )
    each = {"tokens": plan.tokens_per_step, "samples": plan.global_batch, "steps": 1}[name]
    if not each:
        raise PlanError(
            "no input of the model has a batch dim, so the length of the run cannot be given in samples; give it "
            "in steps"
        )
    count = math.ceil(number / each)
    money, energy = money_of(plan, price), energy_of(plan)
    return TrainingRun(
        count,
        count * plan.global_batch,
        count * plan.tokens_per_step,
        count * plan.estimate.step_time,
        plan.world_size,
        None if money is None else count * money,
        None if energy is None else count * energy,
    )


def parse_count(text: str) -> float:
    """Return the number in ``text``, such as ``15T``, ``1.5e12`` or ``300 B`` (B is 1e9). Raise :class:`InputsError` if
    it is not a positive number.
    """
    words = text.strip().lower().replace(",", "").replace("_", "")
    scale = _SCALES.get(words[-1:], 1.0)
    try:
        found = float(words[:-1] if words[-1:] in _SCALES else words) * scale
    except ValueError:
        found = math.nan
    if not is_positive(found):
        raise InputsError(f"{text!r} is not a positive number; expected one like 15T, 300B or 1.5e12")
    return found


def is_positive(value: Any) -> bool:
    """Return whether ``value`` is a positive finite number."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf


def money_of(plan: Plan, price: float | None = None) -> float | None:
    """Return the cost of one step of ``plan`` on all devices in US dollars. ``price``: US dollars per device and hour;
    ``None``: the prices in the plan's topology. ``None`` is returned if the topology lacks a price.
    """
    hours = plan.estimate.step_time / 3600
    if price is not None:
        return price * plan.world_size * hours
    prices = [plan.topology.types[device.kind].price for device in plan.topology.devices]
    known = [each for each in prices if each is not None]
    return sum(known) * hours if len(known) == len(prices) else None


def energy_of(plan: Plan) -> float | None:
    """Return the energy in joules that all devices of ``plan`` use in one step, or ``None`` if the topology does not
    give their power. Devices take their busy power while ranks work, and their idle power while the mean rank waits in
    the pipeline.
    """
    kinds = [plan.topology.types[device.kind] for device in plan.topology.devices]
    shares = waiting_shares(plan)
    waiting = min(1.0, shares.slowest if shares.mean is None else shares.mean)
    watts = [
        min(kind.power_busy, kind.power_limit or kind.power_busy) * (1 - waiting) + (kind.power_idle or 0.0) * waiting
        for kind in kinds
        if kind.power_busy is not None
    ]
    return sum(watts) * plan.estimate.step_time if len(watts) == len(kinds) else None
