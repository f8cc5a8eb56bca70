"""The user's requests for further programs of a plan: :class:`Evaluate`, :class:`Generate` and :class:`Shapes`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Integral
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator

from partitioner.constraints import Constraints
from partitioner.errors import PlanError
from partitioner.option_text import explain_validation_error
from partitioner.passes.documented_model import DocumentedModel
from partitioner.pretrained.generation import GenerationError


class ShapeError(PlanError):
    """Error: a plan cannot have a requested batch shape and still compute exactly the results of the model, or the
    request is malformed.
    """


class Generate(BaseModel, metaclass=DocumentedModel):
    """Programs that generate tokens with a model of transformers, on the weights that the plan trains, for
    :meth:`partitioner.Engine.generate`.

    Keys and values of all positions are kept in caches of a fixed length. One program (``prefill``) reads a prompt,
    another one (``decode``) reads one token of each sample. The model is causal, or has an encoder, which reads the
    prompt, and a decoder.

    Raises :class:`GenerationError` for an invalid value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: PositiveInt = Field(
        description="Number of samples that are generated at once. A batch may have fewer samples."
    )
    prompt: PositiveInt = Field(
        description="Number of tokens of each sample that one run of the prefill program reads. Shorter prompts are "
        "padded. Longer prompts are read in several runs; with an encoder they are not possible."
    )
    length: PositiveInt = Field(
        description="Number of positions in the key/value caches: prompt and new tokens together; for a model with "
        "an encoder, new tokens alone."
    )
    model: str = Field(
        default="",
        description="Path of the submodule that generates, such as 'policy' in a model that computes a loss with "
        "it. Empty: the whole model generates.",
    )

    def __init__(self, **data: Any) -> None:
        """Check ``data``, the values of the fields by name. Raise :class:`GenerationError` for an invalid value."""
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise GenerationError(
                explain_validation_error(error, [*Generate.model_fields], "field of Generate")
            ) from None


class Evaluate(BaseModel, metaclass=DocumentedModel):
    """The user's request for a program that runs only the forward of the model, in evaluation mode, on the weights that
    the plan trains. ``inputs``: one global batch; ``None``: as in training. ``loss``: function that computes the scalar
    loss from the model's output; ``None``: as in training.

    Raises :class:`ShapeError` for an invalid field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    inputs: Any = Field(
        default=None,
        description="One global batch, in the form that partition() takes; meta tensors are allowed. None: batches "
        "have the shape of the training batch.",
    )
    loss: Any = Field(
        default=None,
        description="Function that computes the scalar loss from the model's output. None: the loss function of "
        "training, or the loss that the model itself returns.",
    )

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ShapeError(explain_validation_error(error, [*Evaluate.model_fields], "field of Evaluate")) from None


class Shapes(BaseModel, metaclass=DocumentedModel):
    """The shapes of batches that a plan trains on: every number of samples in ``batch`` with every number of positions
    (such as tokens of a sample) in ``length``. ``weights``: how often batches of each length occur.

    All shapes share one division of the model over the ranks. A batch that has none of these shapes is padded to the
    next larger one. Raises :class:`ShapeError` for a malformed value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: tuple[PositiveInt, ...] = Field(
        default=(),
        description="Numbers of samples that batches can have. (): the number in the inputs, or global_batch.",
    )
    length: tuple[PositiveInt, ...] = Field(
        default=(),
        description="Numbers of positions that a sample can have, such as tokens. (): the number in the inputs.",
    )
    weights: Mapping[int, float] = Field(
        default_factory=dict[int, float],
        description="Relative frequency of each length: length -> frequency. A length that is missing has frequency "
        "0. {}: all lengths are equally frequent.",
    )

    @field_validator("batch", "length", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        return (given,) if isinstance(given, int) and not isinstance(given, bool) else given

    @field_validator("batch", "length")
    @classmethod
    def _sorted(cls, given: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(given)))

    def __init__(self, **data: Any) -> None:
        """Check ``data``, the values of the fields by name. Raise :class:`ShapeError` for an invalid value, or if
        ``weights`` has keys that are not in ``length``, a negative value, or only zeros."""
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ShapeError(explain_validation_error(error, [*Shapes.model_fields], "field of Shapes")) from None
        unknown = sorted(set(self.weights) - set(self.length))
        if unknown or any(w < 0 for w in self.weights.values()) or (self.weights and not any(self.weights.values())):
            raise ShapeError(
                f"weights has {unknown or dict(self.weights)}; expected lengths among {list(self.length)}, each with a "
                "number of 0 or more, and one above 0: correct weights, or leave it out"
            )

    @classmethod
    def of_lengths(
        cls,
        lengths: Sequence[int] | Mapping[int, float],
        *,
        count: int = 8,
        batch: int | tuple[int, ...] = (),
        multiple: int = 64,
    ) -> Shapes:
        """Return the batch shapes with which batches of given lengths need the least padding: at most ``count`` numbers
        of positions (such as tokens of a sample), with weights that say how often batches have each. The largest length
        always fits.

        The sum of the padded lengths is minimised exactly, by dynamic programming over the sorted lengths. ``lengths``:
        the positions of each batch in a typical series of batches, or a mapping from numbers of positions to how often
        batches have them. If a sampler puts texts of similar lengths into a batch, the lengths of the texts can be
        given instead. ``batch``: the numbers of samples that batches may have. ``multiple``: each returned number of
        positions is a multiple of this number.

        Raise :class:`ShapeError` if there are no lengths, or if a number is not a positive whole number.
        """
        given: dict[int, float] = dict(lengths if isinstance(lengths, Mapping) else Counter(lengths))
        _check_lengths(given, count, multiple)
        rounded: dict[int, float] = {}
        for length, number in given.items():
            size = -(-length // multiple) * multiple
            rounded[size] = rounded.get(size, 0.0) + number
        sizes = sorted(rounded)
        often = np.array([rounded[size] for size in sizes], dtype=np.float64)
        ends = _choose_buckets(np.array(sizes, dtype=np.float64), often, count)
        starts = [0, *(end + 1 for end in ends[:-1])]
        weights = {sizes[b]: float(often[a : b + 1].sum() / often.sum()) for a, b in zip(starts, ends, strict=True)}
        return cls(batch=batch, length=tuple(weights), weights=weights)


def _check_lengths(lengths: Mapping[int, float], count: int, multiple: int) -> None:
    """Raise :class:`ShapeError` unless ``lengths`` maps positive whole numbers to frequencies above 0, and ``count``
    and ``multiple`` are positive whole numbers.
    """
    for name, number in (("count", count), ("multiple", multiple)):
        if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
            raise ShapeError(f"{name} is {number!r}; expected a whole number, at least 1")
    if not lengths:
        raise ShapeError("lengths is empty; expected the length of at least one batch: pass a sample of them")
    for length, often in lengths.items():
        if isinstance(length, bool) or not isinstance(length, Integral) or length < 1 or not 0 < often < math.inf:
            raise ShapeError(
                f"lengths has {length!r} with frequency {often!r}; expected whole numbers of positions of 1 or more, "
                "with finite frequencies above 0: remove it"
            )


def _choose_buckets(sizes: NDArray[np.float64], often: NDArray[np.float64], count: int) -> list[int]:
    """Choose at most ``count`` of the batch lengths ``sizes``. Every batch is padded to the smallest chosen length that
    is at least its own. The choice minimises the sum of the padded lengths, weighted by frequency. Return the indices
    of the chosen lengths, ascending. The last (largest) length is always chosen.

    ``sizes``: in increasing order. ``often``: the frequency of each length.
    """
    total = np.cumsum(often)
    before = np.concatenate(([0.0], total))  # frequency of all sizes before an index
    least = sizes * total  # sum of padded lengths with one bucket that ends at an index
    chosen: list[NDArray[np.int64]] = []
    for _ in range(min(count, len(sizes)) - 1):
        previous = np.concatenate(([0.0], least))
        start = np.zeros(len(sizes), dtype=np.int64)  # for each end, the start of the last bucket
        least = np.empty(len(sizes))
        for end, size in enumerate(sizes):
            sums = previous[: end + 1] + size * (total[end] - before[: end + 1])
            start[end] = int(sums.argmin())
            least[end] = sums[start[end]]
        chosen.append(start)
    ends = [len(sizes) - 1]
    for start in reversed(chosen):
        if start[ends[-1]] == 0:
            break
        ends.append(int(start[ends[-1]]) - 1)
    return ends[::-1]


Request = Evaluate | Generate
NO_PROGRAMS: Mapping[str, Request] = MappingProxyType({})


def constrain_for_programs(constraints: Constraints | None, programs: Mapping[str, Request]) -> Constraints:
    """Return ``constraints`` (``None``: no constraints) with a constraint that generation needs: if one of ``programs``
    generates tokens and ``cp`` is free, then ``cp=1``, because context parallelism would divide the positions of
    key/value caches. ``programs``: the requested further programs by name. Raise :class:`ShapeError` for malformed
    ``programs``.
    """
    check_programs(programs)
    constraints = constraints or Constraints()
    generates = any(isinstance(asked, Generate) for asked in programs.values())
    return constraints.model_copy(update={"cp": 1}) if generates and constraints.cp is None else constraints


def check_programs(programs: Any) -> None:
    """Raise :class:`ShapeError` unless ``programs`` is a mapping of names to :class:`Evaluate` or :class:`Generate`."""
    if not isinstance(programs, Mapping):
        raise ShapeError(f"programs is a {type(programs).__name__}; expected a dict like {{'eval': Evaluate()}}")
    for name, asked in programs.items():
        if not isinstance(name, str) or not name or not isinstance(asked, Request):
            raise ShapeError(
                f"programs[{name!r}] is a {type(asked).__name__}; expected a name and Evaluate(inputs=...) or "
                "Generate(batch=..., prompt=..., length=...)"
            )
