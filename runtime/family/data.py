"""Data types of the further programs of a plan: the purpose of each program, and how a batch is padded to its shape.

All programs of a plan have the same layout of parameters and buffers, that of its first program
(``runtime/prove/layouts.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from pydantic import Field

from partitioner.runtime.program.instructions import Data
from partitioner.runtime.program.program import Program


class InputPadding(Data):
    """How one input tensor of a batch is padded to the batch shape of one of a plan's programs: the indices of the dims
    that grow, and the values of the new elements.
    """

    batch_dim: int | None = Field(
        default=None,
        description="Index of the input's dim whose size is the number of samples; None if it has no such dim.",
    )
    length_dim: int | None = Field(
        default=None,
        description="Index of the input's dim whose size is the number of positions (such as tokens) of a sample; "
        "None if it has no such dim.",
    )
    batch_fill: float | None = Field(
        default=None,
        description="Number that fills the elements of added samples; None means that the last sample is repeated.",
    )
    target_dim: int | None = Field(
        default=None,
        description="Index of the input's dim whose size is the number of target positions, such as decoder tokens; "
        "None if it has no such dim.",
    )
    target_fill: float | None = Field(
        default=None,
        description="Number that fills added target positions; None means that the last position is repeated.",
    )
    length_fill: float | None = Field(
        default=None, description="Number that fills added positions; None means that the last position is repeated."
    )
    hides: float | None = Field(
        default=None,
        description="Number in this input that masks a position, for attention in which a query with all positions "
        "masked attends to all of them, also to added ones. None if the input masks no position of such "
        "an attention.",
    )
    unseen: Literal["all", "first", "gap"] = Field(
        default="all",
        description="Condition under which a query sees no position: all positions of its sample are masked (all); "
        "the first one is masked, as under a causal mask (first); or also positions of a gap before a "
        "visible one are masked, as under a causal window (gap).",
    )


class BatchPadding(Data):
    """The shape of the batches of a program, and how smaller batches are padded to it.

    Padding changes neither the loss, nor a gradient, nor the outputs at the samples and positions that the batch had
    before. ``passes/padding`` proved this from the model's graph.
    """

    batch: int = Field(description="Number of samples in a batch of the program.")
    length: int = Field(
        default=0,
        description="Number of positions (such as tokens) of each sample; 0 if no input has a dim of positions.",
    )
    targets: int = Field(
        default=0,
        description="Number of target positions of each sample, if targets have a length of their own, as in a "
        "model with an encoder and a decoder; otherwise 0.",
    )
    weight: float = Field(default=1.0, description="Fraction of the batches that have this shape, from 0 to 1.")
    inputs: dict[str, InputPadding] = Field(
        default_factory=dict, description="Padding of each input, by the path of the input in the batch."
    )
    outputs: dict[str, tuple[int | None, int | None]] = Field(
        default_factory=dict,
        description="Two dim indices for each output, by name: the dim of samples and the dim of positions; null if "
        "the output has no such dim.",
    )
    trimmed: dict[str, int] = Field(
        default_factory=dict,
        description="Number of positions that an output has in addition to those of the batch, by name of the "
        "output. Outputs without additional positions are left out.",
    )
    target_outputs: dict[str, tuple[int, int]] = Field(
        default_factory=dict,
        description="Two numbers for each output with a dim of target positions, by name: the index of this dim, "
        "and the number of positions that the output has in addition to the targets.",
    )
    fewer: str = Field(
        default="", description="Reason why a batch may not have fewer samples than the program; empty if it may."
    )
    shorter: str = Field(
        default="",
        description="Reason why samples may not have fewer positions than in the program; empty if they may.",
    )
    shorter_targets: str = Field(
        default="",
        description="Reason why samples may not have fewer target positions than in the program; empty if they may.",
    )


def name_shape(shape: tuple[int, int]) -> str:
    """Return the name of the training step for batches of ``shape``, the pair (samples, positions), such as ``step
    8x4096``. If the second number is 0, the batch has no positions, and the name is like ``step 8``.
    """
    return f"step {shape[0]}x{shape[1]}" if shape[1] else f"step {shape[0]}"


class FurtherProgram(Data):
    """One more program of a plan, such as one for evaluation or for another batch shape. It uses the parameters and
    buffers in the layout of the plan's first program (the training step).
    """

    program: Program = Field(description="Program of all ranks.")
    purpose: Literal["evaluate", "step", "prefill", "decode"] = Field(
        description="Use of the program: Engine.run (evaluate), Engine.step on batches of another shape (step), or "
        "Engine.generate, which uses one program for prompts (prefill) and one for further tokens "
        "(decode)."
    )
    seconds: float = Field(description="Estimated time of one run in seconds.")
    memory: int = Field(
        description="Peak memory in bytes of the rank that needs most while this program runs, including parameters "
        "and other states."
    )
    caches: tuple[str, ...] = Field(
        default=(), description="Paths of the inputs that are key/value caches. The program changes them in place."
    )
    first_token: int | None = Field(
        default=None,
        description="Token id with which a decoder begins to generate; None if generation continues the prompt.",
    )
    padding: BatchPadding | None = Field(
        default=None,
        description="Batch shape of the program, and how smaller batches are padded to it; None if batches have "
        "exactly the planned shape.",
    )


class ProgramFamily(NamedTuple):
    """All programs of a plan. ``first``: the program of a training step. ``padding``: the padding of its batches;
    ``None``: batches have exactly the planned shape. ``further``: the other programs by name.
    """

    first: Program
    padding: BatchPadding | None
    further: Mapping[str, FurtherProgram]
