"""Direct preference optimisation (DPO) with answers that the trained policy samples between the steps.

    python examples/dpo.py [--mesh tp=2,pp=1,dp=1] [--steps 2]

The model of the plan is a loss: a policy that learns, and a frozen reference model. Four processes of this machine run
it, with two pipeline stages of two tensor-parallel ranks. Before each step ``engine.generate`` samples two answers to
each prompt with the policy's own weights, and a rule says which one is preferred. Every answer, every loss and
all gradients are compared with one process in float64.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import Constraints, Engine, Generate, LocalRanks, Plan, Topology, partition

STEPS, VOCAB = 5, 64
PROMPTS, PROMPT, NEW = 8, 8, 12


class PreferenceLoss(nn.Module):
    """The loss of DPO (Rafailov et al. 2023, equation 7). ``beta``: weight of the distance from the reference."""

    def __init__(self, policy: nn.Module, reference: nn.Module, beta: float = 0.1) -> None:
        super().__init__()
        self.policy = policy
        self.reference = reference.requires_grad_(False)
        self.beta = beta

    def forward(self, chosen: Tensor, rejected: Tensor, mask: Tensor) -> Tensor:
        """``chosen``, ``rejected`` ``[prompts, positions]``: tokens of the preferred and of the other text. ``mask``,
        of the same shape: 1 at the tokens of the answers, 0 at those of the prompt.
        """
        tokens = torch.stack([chosen, rejected], 1).flatten(0, 1)  # one pass of each model over both
        learned = torch.stack([mask, mask], 1).flatten(0, 1)
        with torch.no_grad():
            expected = log_probability(self.reference, tokens, learned)
        gains = (log_probability(self.policy, tokens, learned) - expected).unflatten(0, (-1, 2))
        return -F.logsigmoid(self.beta * (gains[:, 0] - gains[:, 1])).mean()


def log_probability(model: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    """The log-probability of the tokens where ``mask`` is 1, given those before them: ``[texts]``."""
    logits = model(input_ids=tokens).logits[:, :-1]
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return (chosen * mask[:, 1:]).sum(-1)


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
    return PreferenceLoss(build_llama(0), build_llama(0)).double()


def count_ranks(mesh: Constraints) -> int:
    return math.prod((mesh.pp or 1, mesh.dp or 1, mesh.tp or 1))


def make_plan(mesh: Constraints) -> Plan:
    """``model="policy"`` names the submodule that generates; the plan keeps one copy of its weights."""
    return partition(
        build(),
        Topology.local(count_ranks(mesh)),
        prefer(torch.zeros(2 * PROMPTS, PROMPT + NEW, dtype=torch.long)),
        constraints=mesh,
        programs={"answers": Generate(batch=2 * PROMPTS, prompt=PROMPT, length=PROMPT + NEW, model="policy")},
    )


def rate(answers: Tensor) -> Tensor:
    """The rule: an answer is better, the more of its tokens are even."""
    return (answers % 2 == 0).double().mean(-1)


def prefer(texts: Tensor) -> dict[str, Tensor]:
    """A batch of pairs, the better answer first. ``texts``: two answers to each prompt, one after the other."""
    pairs = texts.unflatten(0, (PROMPTS, 2))
    order = rate(pairs[..., PROMPT:]).argsort(dim=1, descending=True, stable=True)
    chosen, rejected = pairs.gather(1, order[..., None].expand_as(pairs)).unbind(1)
    mask = (torch.arange(PROMPT + NEW) >= PROMPT).double().expand(chosen.shape).contiguous()
    return {"chosen": chosen, "rejected": rejected, "mask": mask}


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
    prompts = torch.randint(VOCAB, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(1))
    texts, losses, norms = [], [], []
    for number in range(steps):
        texts.append(generate(prompts.repeat_interleave(2, 0), number))
        loss, norm = step(prefer(texts[-1]))
        losses.append(loss)
        norms.append(norm)
    return Found(texts, losses, norms)


def train(path: str, steps: int) -> tuple[Found, int]:
    """One rank: what it found, and the number of elements that its optimizer has states for."""
    engine = Engine(path, build())
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)

    def generate(prompts: Tensor, seed: int) -> Tensor:
        return engine.generate(prompts, max_new_tokens=NEW, do_sample=True, seed=seed)

    def step(batch: dict[str, Tensor]) -> tuple[float, float]:
        loss = float(engine.step(batch))  # type: ignore[arg-type]
        norm = float(engine.clip_grad_norm_(1.0))
        optimizer.step()
        return loss, norm

    found = run(generate, step, steps)
    return found, sum(state["exp_avg"].numel() for state in optimizer.state.values())


def train_alone(steps: int) -> Found:
    """The same in one process, without a plan."""
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def generate(prompts: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)
        policy = model.get_submodule("policy")
        given = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
        found: Tensor = policy.generate(  # type: ignore[operator]
            **given, max_new_tokens=NEW, do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0
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
    parser.add_argument("--mesh", type=Constraints.parse, default="pp=2,tp=2,dp=1", help="sizes of pp, dp and tp")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    plan = make_plan(options.mesh)
    print(plan.summary())
    path = plan.save(Path("out") / "dpo.json")
    with LocalRanks(plan.world_size) as ranks:
        from examples.dpo import train as on_rank  # ranks import it by its name

        results = ranks.call(on_rank, str(path.resolve()), options.steps)
    alone = train_alone(options.steps)
    print("step  loss      norm      even tokens")
    for number, (texts, *row) in enumerate(zip(*alone, strict=True)):
        print(f"{number + 1:<5}", *(f"{value:<9.5f}" for value in row), f"{float(rate(texts[:, PROMPT:]).mean()):.3f}")
    for found, _ in results:
        assert all(torch.equal(own, other) for own, other in zip(found.texts, alone.texts, strict=True))
        assert torch.allclose(torch.tensor(found[1:]), torch.tensor(alone[1:]), rtol=1e-9)
    report = plan.verify(build(), prefer(alone.texts[0]))
    assert report.ok
    trained = sum(p.numel() for p in build().parameters() if p.requires_grad)
    print(f"optimizer states of {sum(held for _, held in results)} elements; the policy has {trained}")
    print(
        f"all answers and losses are those of one process; largest relative error of a gradient {report.max_error:.1e}"
    )


if __name__ == "__main__":
    main()
