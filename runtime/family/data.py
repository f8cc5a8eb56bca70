"""Further programs of a plan, as data: what each is for, and how a batch is padded to its shape.

All programs of a plan have one layout of the state, that of its first program (``runtime/prove/layouts.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from pydantic import Field

from partitioner.runtime.program.instructions import Data
from partitioner.runtime.program.program import Program


class InputPadding(Data):
    """How one input tensor of a batch is padded to the shape of a plan's program: the indices of the dims that grow,
    and the number in the new elements.
    """

    batch_dim: int | None = Field(default=None, description="The dim of samples. None: the input has none.")
    length_dim: int | None = Field(default=None, description="The dim of positions. None: the input has none.")
    batch_fill: float | None = Field(default=None, description="Number in new samples. None: the last sample again.")
    length_fill: float | None = Field(
        default=None, description="Number at new positions. None: what is at the last position again."
    )
    hides: float | None = Field(
        default=None,
        description="Number that hides a position from attention in which a query that sees no position reads all of "
        "them, also new ones. None: the input hides none from such an attention.",
    )
    unseen: Literal["all", "first", "gap"] = Field(
        default="all",
        description="Which positions have to be hidden so that a query sees none: all of its sample, the first, as "
        "under a causal mask, or also those of a gap before one that is not hidden, as under a causal window.",
    )


class BatchPadding(Data):
    """The shape of the batches of a program, and how smaller batches are padded to it.

    Padding changes neither the loss, nor a gradient, nor the outputs at the samples and positions that the batch had
    before. ``passes/padding`` proved this from the model's graph.
    """

    batch: int = Field(description="Samples of the program's batch.")
    length: int = Field(default=0, description="Positions of the program's batch; 0: inputs have no such dim.")
    weight: float = Field(default=1.0, description="Share of the batches that have this shape.")
    inputs: dict[str, InputPadding] = Field(default_factory=dict, description="Path of an input to its padding.")
    outputs: dict[str, tuple[int | None, int | None]] = Field(
        default_factory=dict, description="Output to its dims of samples and of positions."
    )
    trimmed: dict[str, int] = Field(
        default_factory=dict, description="Output to the positions that it has more than the batch, where it has."
    )
    fewer: str = Field(default="", description="Why a batch may not have fewer samples; empty: it may.")
    shorter: str = Field(default="", description="Why a batch may not have fewer positions; empty: it may.")


def name_shape(shape: tuple[int, int]) -> str:
    """Return the name of the training step for batches of ``shape``, the pair (samples, positions), such as
    ``step 8x4096``. If the second number is 0, the batch has no positions, and the name is ``step 8``.
    """
    return f"step {shape[0]}x{shape[1]}" if shape[1] else f"step {shape[0]}"


class FurtherProgram(Data):
    """One more program of a plan, such as one for evaluation or for another batch shape. It uses the parameters and
    buffers in the layout of the plan's first program.
    """

    program: Program = Field(description="The program of all ranks.")
    purpose: Literal["evaluate", "step", "prefill", "decode"] = Field(
        description="What runs it: Engine.run, Engine.step, or Engine.generate for a prompt or for further tokens."
    )
    seconds: float = Field(description="Estimated seconds of one run.")
    memory: int = Field(description="Most bytes of a rank while it runs, the state included.")
    caches: tuple[str, ...] = Field(
        default=(), description="Paths of the inputs that are key/value caches, which the program changes in place."
    )
    first_token: int | None = Field(
        default=None, description="Token with which a decoder begins to generate. None: it begins with the prompt."
    )
    padding: BatchPadding | None = Field(default=None, description="Its shape. None: batches have the planned shape.")


class ProgramFamily(NamedTuple):
    """All programs of a plan.

    ``first``: the program of a training step. ``padding``: how its batches are padded; ``None``: batches have exactly
    the planned shape. ``further``: the other programs by name.
    """

    first: Program
    padding: BatchPadding | None
    further: Mapping[str, FurtherProgram]
