"""Generate tokens with the two programs of a plan that have key/value caches.

``prefill`` reads as many tokens of each sample as it was planned for, and is run several times for a longer prompt.
``decode`` reads one token of each sample. Both return the logits of their last position and write keys and values to
the caches, which exist only during a generation. Each rank has the caches of its layers, samples and heads. All samples
end at the same position of the caches: shorter prompts are padded on the left, and masked there.

If a model has an encoder, ``prefill`` reads the prompts with the encoder, and one token with the decoder. Shorter
prompts may then be padded on the right, because the decoder's positions do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from partitioner.passes.ir.layouts import Layout, take_shard
from partitioner.passes.ir.serialize import dtype_of
from partitioner.passes.ops.caches import CACHE_DIM
from partitioner.runtime.comm.group import Communicator, get_world_group
from partitioner.runtime.engine.batches import BatchShare, get_share
from partitioner.runtime.errors import BatchError, LaunchError
from partitioner.runtime.execute.executor import Executor
from partitioner.runtime.family.data import ProgramFamily
from partitioner.runtime.program.program import InputData, RankProgram

_FIRST_CACHE = "caches.0.0"  # path of the input that is the cache of the first layer's keys

Run = Callable[[str, Mapping[str, Tensor]], Executor]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from logits. If ``sample`` is false, it is the one with the largest logit; otherwise
    it is drawn at random. ``temperature`` divides the logits. Then only the ``top_k`` largest logits are kept, then the
    smallest set of the most probable tokens whose probabilities sum to at least ``top_p``; ``None`` keeps all.
    """

    sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        """Raise :class:`BatchError` if ``temperature``, ``top_k`` or ``top_p`` is out of range, or if one of them is
        set although ``sample`` is false.
        """
        ranges = (
            ("temperature", self.temperature > 0, "a number above 0"),
            ("top_k", self.top_k is None or self.top_k >= 1, "a whole number of 1 or more, or None"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "a number above 0 and at most 1, or None"),
        )
        for name, valid, expected in ranges:
            if not valid:
                raise BatchError(f"{name} is {getattr(self, name)!r}; expected {expected}: correct it")
        if not self.sample and (self.temperature, self.top_k, self.top_p) != (1.0, None, None):
            raise BatchError(
                "temperature, top_k and top_p have no effect without sampling; expected do_sample=True: add it, or "
                "leave them out"
            )

    def choose(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """Return the next token of each sample, ``[batch]``. ``logits``: ``[batch, vocabulary]``. ``noise``: random
        numbers of the exponential distribution with rate 1, in the shape of ``logits``; ``None`` without sampling. The
        token with the largest quotient of probability and noise is a sample of the distribution.
        """
        logits = logits.float()
        if noise is None:
            return logits.argmax(-1)
        logits = logits / self.temperature
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        if self.top_p is not None:
            ordered, order = logits.sort(descending=False)
            dropped = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            dropped[:, -1:] = False
            logits = logits.masked_fill(dropped.scatter(1, order, dropped), float("-inf"))
        return (logits.softmax(-1) / noise).argmax(-1)


@dataclass(frozen=True)
class Prompt:
    """The prompts of one call that generates text, padded to the sizes of the plan's programs.

    Args:
        tokens: ``[batch, positions]``, with the planned number of samples, and at least as many positions as prefill
            (the program that reads prompts) takes at a time.
        mask: ``[batch, length]``, for each position of the key/value caches: 0 for padding, 1 if the position has, or
            will have, a token of the sample. With an encoder ``[batch, positions]``, 1 at the tokens of the sample.
        positions: ``[batch, length]``, for each position of the caches, the position of its token in the sample without
            padding.
        samples: number of samples that the user passed, which come first; the others repeat the last one to fill the
            batch.
        width: number of positions of the caches that prefill fills.
    """

    tokens: Tensor
    mask: Tensor
    positions: Tensor
    samples: int
    width: int


def find_generation(family: ProgramFamily, name: str | None) -> str:
    """Return the name of the generation (a pair of programs that generate text) that is called ``name``; if ``name`` is
    ``None``, of the only one in the plan. ``family``: all programs of the plan. Raise :class:`LaunchError` if the plan
    does not have ``name``, or if ``name`` is ``None`` and the plan has none or several.
    """
    known = [n.removesuffix(" decode") for n, further in family.further.items() if further.purpose == "decode"]
    if name is None and len(known) == 1:
        return known[0]
    if name not in known:
        raise LaunchError(
            f"the plan can generate with the programs {', '.join(map(repr, known)) or 'none'}, but program is "
            f"{name!r}; expected one of them: plan with partition(..., programs={{'generate': Generate(batch=..., "
            "prompt=..., length=...)}), or give its name as program="
        )
    return name


@dataclass
class TokenGenerator:
    """Generates text on one rank, with two programs of a plan: ``prefill`` reads prompts, and ``decode`` reads one
    further token of each sample. Both write to the key/value caches, of which this rank has a part.

    Args:
        name: the name of the two programs in the plan, without "prefill" and "decode".
        family: all programs of the plan.
        communicator: connects this rank with the others.
        run: function that runs one of the two programs and returns its executor; its arguments are the name of the
            program and this rank's inputs, as a dict: name in the program -> tensor.
        caches: path of a cache among the inputs of the program -> this rank's part; empty while no text is generated.
    """

    name: str
    family: ProgramFamily
    communicator: Communicator
    run: Run
    caches: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prefill, self.decode = (self.family.further[f"{self.name} {p}"] for p in ("prefill", "decode"))
        self.rank: RankProgram = self.decode.program.rank(self.communicator.rank)
        self.shares: dict[str, BatchShare] = {}

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return three planned numbers: of samples, of tokens that prefill (the program that reads prompts) takes at a
        time, and of positions of the key/value caches.
        """
        sizes = {data.path: data.shape for data in self.prefill.program.inputs}
        return *sizes["input_ids"], sizes[_FIRST_CACHE][CACHE_DIM]  # type: ignore[return-value]

    @property
    def first_token(self) -> int | None:
        """Return the token with which the decoder begins; ``None`` for a model without an encoder."""
        return self.decode.first_token

    def prepare_prompt(self, tokens: Tensor, mask: Tensor | None, new: int, pad_token: int) -> Prompt:
        """Return the prompts ``tokens`` ``[batch, positions]``, padded to the sizes of the plan's programs. The last
        sample is repeated to fill the batch. If the prompts have fewer positions than prefill (the program that reads
        prompts) takes at a time, they are padded on the left, or, with an encoder, on the right.

        ``mask``: in the shape of ``tokens``, 0 at padding (on the left, or with an encoder anywhere), 1 elsewhere;
        ``None``: there is no padding. ``new``: the number of tokens to generate. ``pad_token``: the token that fills
        padding. Raise :class:`BatchError` if the prompts do not fit the caches, or are malformed.
        """
        batch, read, length = self.shape
        self._check_prompt(tokens, mask, new)
        samples, given = tokens.shape
        device = self.communicator.device
        tokens = tokens.to(device, torch.int64)
        mask = torch.ones_like(tokens) if mask is None else mask.to(device, torch.int64)
        rows = torch.arange(batch, device=device).clamp(max=samples - 1)  # new samples repeat the last one
        missing = max(0, read - given)
        if self.first_token is not None:
            tokens = torch.nn.functional.pad(tokens, (0, missing), value=pad_token)[rows]
            mask = torch.nn.functional.pad(mask, (0, missing))[rows]
            return Prompt(tokens, mask, torch.zeros_like(mask), samples, 1)
        tokens = torch.nn.functional.pad(tokens, (missing, 0), value=pad_token)
        mask = torch.nn.functional.pad(
            torch.nn.functional.pad(mask, (missing, 0)), (0, length - missing - given), value=1
        )
        tokens, mask = tokens[rows], mask[rows]
        return Prompt(tokens, mask, (mask.cumsum(1) - 1).clamp(min=0), samples, tokens.shape[1])

    def _check_prompt(self, tokens: Tensor, mask: Tensor | None, new: int) -> None:
        """Raise :class:`BatchError` if the prompts ``tokens`` ``[batch, positions]`` and ``new`` further tokens do not
        fit the key/value caches, or if ``tokens`` or ``mask`` is malformed. ``mask``: in the shape of ``tokens``, 0 at
        padding on the left, 1 elsewhere; ``None``: there is no padding.
        """
        batch, read, length = self.shape
        if tokens.dim() != 2 or tokens.is_floating_point() or 0 in tokens.shape:
            raise BatchError(
                f"input_ids has shape {list(tokens.shape)} and type {tokens.dtype}; expected integers [batch, "
                "positions], one or more of each"
            )
        if tokens.shape[0] > batch:
            raise BatchError(
                f"input_ids has {tokens.shape[0]} samples, but {self.name!r} is planned for at most {batch}: "
                f"pass fewer at once, or plan with Generate(batch={tokens.shape[0]}, ...)"
            )
        if new < 1:
            raise BatchError(f"max_new_tokens is {new}; expected 1 or more")
        if self.first_token is not None:
            self._check_encoded(tokens, mask, new)
            return
        width = max(read, tokens.shape[1])
        if width + new - 1 > length:
            raise BatchError(
                f"prompts of {tokens.shape[1]} tokens (padded to {width}) and {new} new tokens need {width + new - 1} "
                f"positions of the key/value caches, which have {length}: generate fewer tokens, shorten the "
                f"prompts, or plan with Generate(length={width + new - 1}, ...)"
            )
        if mask is not None and (mask.shape != tokens.shape or not _is_padded_left(mask)):
            raise BatchError(
                f"attention_mask has shape {list(mask.shape)}, or rows that are not zeros followed by ones; expected "
                f"{list(tokens.shape)}, with the padding on the left: pad with padding_side='left'"
            )

    def _check_encoded(self, tokens: Tensor, mask: Tensor | None, new: int) -> None:
        """Raise :class:`BatchError` if prompts do not fit a model with an encoder: ``tokens`` ``[batch, positions]``
        have more positions than the encoder is planned for, ``new`` further tokens do not fit the decoder's caches, or
        ``mask`` is malformed. ``mask``: in the shape of ``tokens``, 1 at tokens and 0 at padding; ``None``: there is no
        padding.
        """
        _, read, length = self.shape
        if tokens.shape[1] > read:
            raise BatchError(
                f"prompts have {tokens.shape[1]} tokens, but the encoder of {self.name!r} is planned for at "
                f"most {read}: shorten the prompts, or plan with Generate(prompt={tokens.shape[1]}, ...)"
            )
        if new > length:
            raise BatchError(
                f"{new} new tokens need {new} positions of the key/value caches, which have {length}: "
                f"generate fewer tokens, or plan with Generate(length={new}, ...)"
            )
        if mask is not None and (mask.shape != tokens.shape or not _is_mask(mask) or not mask.any(1).all()):
            raise BatchError(
                f"attention_mask has shape {list(mask.shape)}, or other numbers than 0 and 1, or a row of zeros; "
                f"expected {list(tokens.shape)}, with 1 at the tokens and 0 at the padding: correct it"
            )

    def generate(
        self,
        prompt: Prompt,
        new: int,
        sampling: Sampling,
        ends: Sequence[int],
        pad_token: int,
        generator: torch.Generator,
    ) -> Tensor:
        """Generate at most ``new`` tokens after each of the prompts in ``prompt``. Return the new tokens, ``[samples,
        positions]``, on every rank, for the samples that the caller passed, without those that were added to fill the
        planned batch. The key/value caches are allocated at the start and released at the end.

        ``sampling``: how a token is chosen from the logits. ``ends``: tokens that end a sample; further positions of
        the sample get the token ``pad_token``. ``generator``: random generator in the same state on all ranks.
        """
        self.caches = self._allocate_caches()
        try:
            made: list[Tensor] = []
            running = torch.ones(prompt.samples, dtype=torch.bool, device=self.communicator.device)
            logits = self._read_prompt(prompt)
            last = torch.tensor(list(ends), device=self.communicator.device)
            while True:
                chosen = self._agree_on_tokens(logits, prompt.samples, sampling, generator)
                chosen = torch.where(running, chosen, pad_token)
                made.append(chosen)
                running = running & ~torch.isin(chosen, last)
                if len(made) == new or (ends and not running.any()):
                    return torch.stack(made, 1)
                logits = self._read_tokens(prompt, chosen, prompt.width + len(made) - 1)
        finally:
            self.caches = {}

    def _allocate_caches(self) -> dict[str, Tensor]:
        """Return this rank's part of the key/value caches (its samples, heads and layers), filled with zeros, as a
        dict: path of the cache among the inputs of the program -> tensor.
        """
        program, found = self.decode.program, {}
        share, at = get_share(self.rank), self.rank.coordinates["tp"]
        for data in program.inputs:
            if data.path in self.decode.caches and data.path in share.paths:
                whole = torch.empty(data.shape, dtype=dtype_of(data.dtype), device="meta")
                layout = Layout.parse(program.values[data.value].layout)
                part = take_shard(_select_rows(data, whole, share), layout, program.mesh.get("tp", 1), at)
                found[data.path] = torch.zeros(part.shape, dtype=part.dtype, device=self.communicator.device)
        return found

    def _read_prompt(self, prompt: Prompt) -> Tensor | None:
        """Run prefill, the program that reads prompts, on all tokens of ``prompt``, as many positions at a time as it
        is planned for. Return the logits for the next token of each of this rank's samples, ``[samples, vocabulary]``;
        ``None`` on a rank that does not compute them.

        For a model with an encoder, prefill runs once, and the logits are those after the decoder's first token.
        Otherwise the last execution ends at the end of the prompts. If it overlaps the one before, the keys and values
        of the common positions are written twice, with equal values.
        """
        if self.first_token is not None:
            return self._run("prefill", prompt, prompt.tokens.new_full((len(prompt.tokens), 1), self.first_token), 0)
        read, logits = self.shape[1], None
        for start in (*range(0, prompt.width - read, read), prompt.width - read):
            places = slice(start, start + read)
            logits = self._run("prefill", prompt, prompt.tokens[:, places], start)
        return logits

    def _read_tokens(self, prompt: Prompt, chosen: Tensor, place: int) -> Tensor | None:
        """Run decode, the program that reads one further token of each sample, on the tokens ``chosen`` ``[samples]``.
        Their keys and values are written to the caches at the position ``place``. ``prompt``: the prompts that the
        tokens continue. Return the logits for this rank's samples, ``[samples, vocabulary]``; ``None`` on a rank that
        does not compute them.
        """
        rows = torch.arange(self.shape[0], device=chosen.device).clamp(max=prompt.samples - 1)
        return self._run("decode", prompt, chosen[rows, None], place)

    def _run(self, purpose: str, prompt: Prompt, tokens: Tensor, start: int) -> Tensor | None:
        """Run one of the two programs that generate text on ``tokens`` ``[batch, positions]`` (in a model with an
        encoder, the decoder's tokens). Their keys and values are written to the caches from the position ``start`` on.
        ``purpose``: "prefill", which reads prompts, or "decode", which reads one further token of each sample.
        ``prompt``: the prompts, with the mask and the positions of all tokens.

        Return the logits of the last position of ``tokens`` for the samples of this rank, ``[samples, vocabulary]``;
        ``None`` on a rank that does not compute them.
        """
        name = f"{self.name} {purpose}"
        program = self.family.further[name].program
        given = {"input_ids": tokens, "attention_mask": prompt.mask, "start": torch.tensor(start)}
        if self.first_token is None:
            given["position_ids"] = prompt.positions[:, start : start + tokens.shape[1]]
        else:
            given |= {"input_ids": prompt.tokens, "decoder_input_ids": tokens}
        if name not in self.shares:
            self.shares[name] = get_share(program.rank(self.communicator.rank))
        share = self.shares[name]
        values = {
            i.value: _select_rows(i, given[i.path], share) for i in program.inputs if i.path in share.paths & {*given}
        }
        values |= {i.value: self.caches[i.path] for i in program.inputs if i.path in self.caches}
        executor = self.run(name, values)
        output = program.outputs[0]
        if output.stage != self.rank.stage_index or output.value is None:
            return None
        parts = executor.outputs[output.value]
        return torch.cat([parts[m] for m in sorted(parts)])

    def _agree_on_tokens(
        self, logits: Tensor | None, samples: int, sampling: Sampling, generator: torch.Generator
    ) -> Tensor:
        """Choose the next token of each sample, and return the tokens ``[samples]``, the same on all ranks. All ranks
        call this. For the samples of each data-parallel rank, one rank chooses. The tokens are then summed over all
        ranks, to which the other ranks contribute zeros.

        ``logits``: of this rank's samples, ``[batch of the rank, vocabulary]``; ``None`` on ranks that do not compute
        them. ``samples``: the number of samples that the user passed; further samples, which only fill the planned
        batch, get no token. ``sampling``: how a token is chosen from the logits. ``generator``: random generator in the
        same state on all ranks.
        """
        batch, device = self.shape[0], self.communicator.device
        tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        if logits is not None and not (self.rank.coordinates["tp"] or self.rank.coordinates["cp"]):
            rows = share_of_rows(self.rank, batch)
            noise = None
            if sampling.sample:
                drawn = logits.new_ones((batch, logits.shape[1]), dtype=torch.float32)
                drawn[:samples].exponential_(generator=generator)
                noise = drawn[rows.start : rows.stop]
            tokens[rows.start : rows.stop] = sampling.choose(logits, noise)
        if self.rank.program.world_size > 1:
            tokens = get_world_group(self.communicator, self.rank.program.world_size).all_reduce(tokens).wait()
        return tokens[:samples]


def share_of_rows(rank: RankProgram, batch: int) -> range:
    """Return the indices of the samples of a global batch of ``batch`` samples that ``rank`` computes, as a range, from
    its data-parallel coordinate.
    """
    each = batch // rank.program.mesh.get("dp", 1)
    at = rank.coordinates["dp"]
    return range(at * each, (at + 1) * each)


def _select_rows(data: InputData, whole: Tensor, share: BatchShare) -> Tensor:
    """Return one data-parallel rank's samples of ``whole``, an input of the global batch. ``data``: describes the
    input; if it has no batch dim, ``whole`` is returned. ``share``: the rank's part of the samples.
    """
    if data.batch_dim is None:
        return whole
    rows = share.rows(data.shape[data.batch_dim])
    return whole.narrow(data.batch_dim, rows.start, len(rows))


def _is_padded_left(mask: Tensor) -> bool:
    """Return whether each row of ``mask`` is zeros followed by at least one 1."""
    mask = mask.to(torch.int64)
    steps = mask[:, 1:] - mask[:, :-1]
    return bool(_is_mask(mask) and (mask[:, -1] == 1).all() and (steps >= 0).all())


def _is_mask(mask: Tensor) -> bool:
    """Return whether ``mask`` has only the numbers 0 and 1."""
    return bool(((mask == 0) | (mask == 1)).all())
