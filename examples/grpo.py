"""Reinforcement learning by group relative policy optimisation (GRPO): rollouts and updates with one engine.

    python examples/grpo.py [--mesh tp=2,pp=1,dp=1] [--steps 2]

The model of the plan is a loss: a policy that learns, and a frozen reference model. Four processes of this machine run
it, data-parallel over two groups of two tensor-parallel ranks. Before each update ``engine.generate`` samples several
answers to each prompt with the policy's own weights. A rule gives each answer a reward, and rewards are compared within
the answers to one prompt. Every answer, every loss and all gradients are compared with one process in float64.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import Constraints, Engine, Generate, LocalRanks, Plan, Topology, partition

STEPS, VOCAB, END = 6, 64, 1
PROMPTS, GROUP, PROMPT, NEW = 4, 8, 8, 12  # each prompt has a group of answers


class GroupLoss(nn.Module):
    """The loss of GRPO (Shao et al. 2024, equation 3) with one update for each set of answers.

    The policy that is updated is then the one that has sampled, so the ratio of their probabilities is 1 and is never
    clipped. ``beta``: weight of the distance from the reference.
    """

    def __init__(self, policy: nn.Module, reference: nn.Module, beta: float = 0.04) -> None:
        super().__init__()
        self.policy = policy
        self.reference = reference.requires_grad_(False)
        self.beta = beta

    def forward(self, tokens: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        """``tokens`` ``[answers, positions]``: prompts and answers. ``mask``, of the same shape: 1 at the tokens of the
        answers. ``advantages`` ``[answers]``: by how much an answer is better than the others to the same prompt.
        """
        with torch.no_grad():
            expected = log_probabilities(self.reference, tokens)
        learned = log_probabilities(self.policy, tokens)
        ratio = (learned - learned.detach()).exp()
        missing = expected - learned
        distance = missing.exp() - missing - 1  # estimates the Kullback-Leibler divergence from the reference
        losses = self.beta * distance - ratio * advantages[:, None]
        counted = mask[:, 1:]
        return ((losses * counted).sum(1) / counted.sum(1)).mean()


def log_probabilities(model: nn.Module, tokens: Tensor) -> Tensor:
    """The log-probability of each token but the first, given those before it: ``[answers, positions - 1]``."""
    logits = model(input_ids=tokens).logits[:, :-1]
    found: Tensor = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return found


def build_llama(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def build() -> nn.Module:
    """The policy begins as a copy of the reference."""
    return GroupLoss(build_llama(0), build_llama(0)).double()


def count_ranks(mesh: Constraints) -> int:
    return math.prod((mesh.pp or 1, mesh.dp or 1, mesh.tp or 1))


def make_plan(mesh: Constraints) -> Plan:
    """``model="policy"`` names the submodule that generates; the plan keeps one copy of its weights."""
    texts = torch.full((PROMPTS * GROUP, PROMPT + NEW), END)
    return partition(
        build(),
        Topology.local(count_ranks(mesh)),
        compare(texts),
        constraints=mesh,
        programs={"rollout": Generate(batch=PROMPTS * GROUP, prompt=PROMPT, length=PROMPT + NEW, model="policy")},
    )


def find_mask(texts: Tensor) -> Tensor:
    """1 at the tokens of the answers, up to the first token that ends one."""
    ended = (texts == END) & (torch.arange(texts.shape[1]) >= PROMPT)
    mask = (ended.cumsum(1) - ended.long() == 0).double()
    mask[:, :PROMPT] = 0
    return mask


def rate(texts: Tensor) -> Tensor:
    """The reward of an answer: the share of its tokens that are even."""
    mask = find_mask(texts)
    return ((texts % 2 == 0) * mask).sum(1) / mask.sum(1)


def compare(texts: Tensor) -> dict[str, Tensor]:
    """A batch of answers, with their advantages: rewards relative to the mean of the group, in standard deviations."""
    rewards = rate(texts).unflatten(0, (PROMPTS, GROUP))
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return {"tokens": texts, "mask": find_mask(texts), "advantages": advantages.flatten()}


class Found(NamedTuple):
    """The sampled texts, the loss and the norm of all gradients in each step."""

    texts: list[Tensor]
    losses: list[float]
    norms: list[float]


def run(
    generate: Callable[[Tensor, int], Tensor],
    step: Callable[[dict[str, Tensor]], tuple[float, float]],
    steps: int,
) -> Found:
    """``generate``: samples a text after each prompt, by a seed. ``step``: trains on a batch, and returns its loss and
    the norm of its gradients.
    """
    prompts = torch.randint(2, VOCAB, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(1))
    texts, losses, norms = [], [], []
    for number in range(steps):
        made = generate(prompts.repeat_interleave(GROUP, 0), number)
        texts.append(nn.functional.pad(made, (0, PROMPT + NEW - made.shape[1]), value=END))
        loss, norm = step(compare(texts[-1]))
        losses.append(loss)
        norms.append(norm)
    return Found(texts, losses, norms)


def train(path: str, steps: int) -> Found:
    """One rank."""
    engine = Engine(path, build())
    optimizer = torch.optim.AdamW(engine.parameters(), lr=3e-3)

    def generate(prompts: Tensor, seed: int) -> Tensor:
        return engine.generate(prompts, max_new_tokens=NEW, do_sample=True, eos_token_id=END, seed=seed)

    def step(batch: dict[str, Tensor]) -> tuple[float, float]:
        loss = float(engine.step(batch))  # type: ignore[arg-type]
        norm = float(engine.clip_grad_norm_(1.0))
        optimizer.step()
        return loss, norm

    return run(generate, step, steps)


def train_alone(steps: int) -> Found:
    """The same in one process, without a plan."""
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)

    def generate(prompts: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)
        policy = model.get_submodule("policy")
        given = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
        found: Tensor = policy.generate(  # type: ignore[operator]
            **given, max_new_tokens=NEW, do_sample=True, top_k=0, eos_token_id=END, pad_token_id=END
        )
        return found

    def step(batch: dict[str, Tensor]) -> tuple[float, float]:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        return float(loss.detach()), norm

    return run(generate, step, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", type=Constraints.parse, default="dp=2,tp=2,pp=1", help="sizes of pp, dp and tp")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    plan = make_plan(options.mesh)
    print(plan.summary())
    path = plan.save(Path("out") / "grpo.json")
    with LocalRanks(plan.world_size) as ranks:
        from examples.grpo import train as on_rank  # ranks import it by its name

        results = ranks.call(on_rank, str(path.resolve()), options.steps)
    alone = train_alone(options.steps)
    print("step  loss      norm      reward")
    for number, (texts, *row) in enumerate(zip(*alone, strict=True)):
        print(f"{number + 1:<5}", *(f"{value:<9.5f}" for value in row), f"{float(rate(texts).mean()):.3f}")
    for found in results:
        assert all(torch.equal(own, other) for own, other in zip(found.texts, alone.texts, strict=True))
        assert torch.allclose(torch.tensor(found[1:]), torch.tensor(alone[1:]), rtol=1e-9, atol=1e-12)
    report = plan.verify(build(), compare(alone.texts[0]))
    assert report.ok
    print(
        f"all answers and losses are those of one process; largest relative error of a gradient {report.max_error:.1e}"
    )


if __name__ == "__main__":
    main()
