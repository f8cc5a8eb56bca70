"""Data types of the further programs of a plan: the purpose of each program, and how a batch is padded to its shape.

All programs of a plan have one layout of the state, that of its first program (``runtime/prove/layouts.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from pydantic import Field

from partitioner.runtime.program.instructions import Data
from partitioner.runtime.program.program import Program


class InputPadding(Data):
    """How one input tensor of a batch is padded to the batch shape of one of a plan's programs: the indices of the dims
    that grow, and the number that fills the new elements."""

    batch_dim: int | None = Field(
        default=None, description="The index of the input's dim of samples; None if it has none."
    )
    length_dim: int | None = Field(
        default=None, description="The index of the input's dim of positions; None if it has none."
    )
    batch_fill: float | None = Field(
        default=None, description="The number in added samples; None means that the last sample is repeated."
    )
    target_dim: int | None = Field(
        default=None, description="The index of the input's dim of target positions; None if it has none."
    )
    target_fill: float | None = Field(
        default=None,
        description="The number at added target positions; None means that the last position is repeated.",
    )
    length_fill: float | None = Field(
        default=None, description="The number at added positions; None means that the last position is repeated."
    )
    hides: float | None = Field(
        default=None,
        description="The number by which the input hides a position from an attention in which a query that sees no "
        "position attends to all of them, also to added ones. None if the input hides none from such an attention.",
    )
    unseen: Literal["all", "first", "gap"] = Field(
        default="all",
        description="Which positions must be hidden for a query to see none: all of its sample (all); the first one, "
        "as under a causal mask (first); or also those of a gap before a visible one, as under a causal window (gap).",
    )


class BatchPadding(Data):
    """The shape of the batches of a program, and how smaller batches are padded to it.

    Padding changes neither the loss, nor a gradient, nor the outputs at the samples and positions that the batch had
    before. ``passes/padding`` proved this from the model's graph.
    """

    batch: int = Field(description="The number of samples in a batch of the program.")
    length: int = Field(
        default=0, description="The number of positions of each sample; 0 if the inputs have no dim of positions."
    )
    targets: int = Field(
        default=0,
        description="The number of positions of each target, if it is another one than that of the positions, as in a "
        "model with an encoder and a decoder; 0 if there is none.",
    )
    weight: float = Field(default=1.0, description="The share of batches that have this shape, from 0 to 1.")
    inputs: dict[str, InputPadding] = Field(default_factory=dict, description="How each input is padded, by its path.")
    outputs: dict[str, tuple[int | None, int | None]] = Field(
        default_factory=dict, description="The dims of samples and of positions of each output, by name."
    )
    trimmed: dict[str, int] = Field(
        default_factory=dict,
        description="The number of positions that an output has beyond those of the batch, by name, if there are any.",
    )
    target_outputs: dict[str, tuple[int, int]] = Field(
        default_factory=dict,
        description="The dim of target positions of each output that has one, and the number of positions that it has "
        "beyond those of the targets, by name.",
    )
    fewer: str = Field(default="", description="The reason why a batch may not have fewer samples; empty if it may.")
    shorter: str = Field(
        default="", description="The reason why a batch may not have fewer positions; empty if it may."
    )
    shorter_targets: str = Field(
        default="", description="The reason why a batch may not have fewer target positions; empty if it may."
    )


def name_shape(shape: tuple[int, int]) -> str:
    """Return the name of the training step for batches of ``shape``, the pair (samples, positions), such as
    ``step 8x4096``. If the second number is 0, the batch has no positions, and the name is ``step 8``.
    """
    return f"step {shape[0]}x{shape[1]}" if shape[1] else f"step {shape[0]}"


class FurtherProgram(Data):
    """One more program of a plan, such as one for evaluation or for another batch shape. It uses the parameters and
    buffers as the plan's main program (the training step) lays them out over the ranks."""

    program: Program = Field(description="The program of all ranks.")
    purpose: Literal["evaluate", "step", "prefill", "decode"] = Field(
        description="What the program is for: Engine.run (evaluate), Engine.step (step), or the prompts (prefill) "
        "and further tokens (decode) of Engine.generate."
    )
    seconds: float = Field(description="The estimated seconds of one run.")
    memory: int = Field(
        description="The peak bytes of a rank while the program runs, including parameters and other states."
    )
    caches: tuple[str, ...] = Field(
        default=(), description="The paths of the inputs that are key/value caches, which the program changes in place."
    )
    first_token: int | None = Field(
        default=None,
        description="The token with which a decoder begins to generate; None if it begins with the prompt.",
    )
    padding: BatchPadding | None = Field(
        default=None,
        description="The shape of the program's batches and how smaller ones are padded; None for the planned shape.",
    )


class ProgramFamily(NamedTuple):
    """All programs of a plan.

    ``first``: the program of a training step. ``padding``: how its batches are padded; ``None``: batches have exactly
    the planned shape. ``further``: the other programs by name.
    """

    first: Program
    padding: BatchPadding | None
    further: Mapping[str, FurtherProgram]
