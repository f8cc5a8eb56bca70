"""What a user asks of further programs: :class:`Evaluate`, :class:`Generate` and :class:`Shapes`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator

from partitioner.errors import PlanError
from partitioner.option_text import explain_validation_error
from partitioner.passes.documented_model import DocumentedModel
from partitioner.pretrained.generation import GenerationError


class ShapeError(PlanError):
    """Error: a plan cannot have a requested batch shape and still compute exactly the results of the model, or the
    request is malformed.
    """


class Generate(BaseModel, metaclass=DocumentedModel):
    """Programs that generate tokens with a causal model of transformers, on the weights that the plan trains, for
    :meth:`partitioner.Engine.generate`.

    Keys and values of all positions are kept in caches of a fixed length. One program (``prefill``) reads a prompt,
    another one (``decode``) reads one token of each sample.

    Raises :class:`GenerationError` for a malformed value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: PositiveInt = Field(description="Samples that are generated at once; a batch may have fewer.")
    prompt: PositiveInt = Field(
        description="Tokens of each sample that prefill reads at once. Shorter prompts are padded on the left, and "
        "longer ones are read in several runs."
    )
    length: PositiveInt = Field(description="Positions of the caches: the prompt and the new tokens.")

    def __init__(self, **data: Any) -> None:
        """Check the fields. Raise :class:`GenerationError` for an invalid value, or if a cache has no room for a
        prompt and a new token.
        """
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise GenerationError(
                explain_validation_error(error, [*Generate.model_fields], "field of Generate")
            ) from None
        if self.length <= self.prompt:
            raise GenerationError(
                f"Generate has length={self.length} and prompt={self.prompt}; expected a length above prompt, which is "
                "the prompt and the new tokens: increase length"
            )


class Evaluate(BaseModel, metaclass=DocumentedModel):
    """A program that runs forward alone, of the model in evaluation mode, on the weights that the plan trains.

    Raises :class:`ShapeError` for a malformed value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    inputs: Any = Field(
        default=None,
        description="One global batch, as for partition; meta tensors are fine. None: the shape of the training batch.",
    )
    loss: Any = Field(
        default=None, description="Makes the scalar loss of the output. None: as in training, or the model's own."
    )

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ShapeError(explain_validation_error(error, [*Evaluate.model_fields], "field of Evaluate")) from None


class Shapes(BaseModel, metaclass=DocumentedModel):
    """The shapes of batches that a plan trains on: every number of samples with every number of positions.

    The layout is that of the largest shape. A batch that has none of these shapes is padded to the next larger one.

    Raises :class:`ShapeError` for a malformed value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: tuple[PositiveInt, ...] = Field(
        default=(), description="Numbers of samples. (): that of the inputs, or global_batch."
    )
    length: tuple[PositiveInt, ...] = Field(
        default=(), description="Numbers of positions, as tokens of a sample. (): that of the inputs."
    )
    weights: Mapping[int, float] = Field(
        default_factory=dict[int, float],
        description="Length to how often batches have it; those left out never. {}: all equally often.",
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
        """Check the fields. Raise :class:`ShapeError` for an invalid value, or if ``weights`` has keys that are not in
        ``length``, a negative value, or only zeros.
        """
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


Request = Evaluate | Generate
NO_PROGRAMS: Mapping[str, Request] = MappingProxyType({})


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
