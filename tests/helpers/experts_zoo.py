"""Tiny mixtures of experts, one per family, whose routing can be forced.

All have four layers or fewer, rows to every expert number that divide over four ranks, and hidden channels that carry
nothing but a token's preference among the experts where :func:`force` has put it there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, SEQ, HIDDEN, VOCAB = 8, 8, 32, 64

_DECODER: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    attention_dropout=0.0,
    use_cache=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)

# model type -> (experts, its configuration)
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "mixtral": (4, dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": (
        8,
        dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8, decoder_sparse_step=1)
        | dict(mlp_only_layers=[], norm_topk_prob=True),
    ),
    "deepseek_v3": (
        8,
        dict(num_local_experts=8, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, n_group=4)
        | dict(topk_group=2, n_shared_experts=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16)
        | dict(qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4),
    ),
    "gpt_oss": (4, dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8)),
    "olmoe": (8, dict(num_experts=8, num_experts_per_tok=2)),
    "granitemoe": (4, dict(num_local_experts=4, num_experts_per_tok=2)),
    "llama4_text": (4, dict(num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=48, head_dim=8)),
}
ROUTINGS = ("random", "balanced", "one", "empty")


def build(family: str, implementation: str = "grouped_mm", **options: Any) -> nn.Module:
    """A model of random weights in eval mode; ``implementation``: how the library computes its experts."""
    import transformers

    config = transformers.AutoConfig.for_model(family, **(_DECODER | FAMILIES[family][1] | options))
    chosen = {} if family == "llama4_text" else {"experts_implementation": implementation}
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, **chosen)
    return model.eval()


def inputs(batch: int = BATCH) -> dict[str, Tensor]:
    """``[batch, SEQ]`` tokens and targets, some of which are ignored."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(4, VOCAB, (batch, SEQ), generator=generator) for _ in range(2))
    labels[:, 0] = -100
    return {"input_ids": tokens, "labels": labels}


def preferences(routing: str, num_experts: int) -> Tensor:
    """``[VOCAB, num_experts]``: how much each token wants each expert; no two alike."""
    token, expert = torch.arange(VOCAB)[:, None], torch.arange(num_experts)[None, :]
    if routing == "balanced":  # each expert is the first choice of as many tokens
        return 8.0 - (expert - token) % num_experts
    if routing == "one":  # all choose the first, then the second
        return (8.0 - expert).expand(VOCAB, num_experts)
    assert routing == "empty"  # the last two are chosen by none
    return 8.0 - (expert - token) % (num_experts - 2) - 8.0 * (expert >= num_experts - 2)


def force(model: nn.Module, family: str, routing: str) -> None:
    """Let each token's own preference choose its experts: kept in the first hidden channels, which nothing writes to
    behind the embedding, and which alone the routers read."""
    if routing == "random":
        return
    num_experts = FAMILIES[family][0]
    forced = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter[:, :num_experts] = preferences(routing, num_experts)
            elif tuple(parameter.shape) == (num_experts, HIDDEN) and ("gate" in name or "router" in name):
                parameter.zero_()
                parameter[:, :num_experts] = torch.eye(num_experts)
                forced += 1
            elif "o_proj" in name or "down_proj" in name:  # what is added to the hidden state
                dim = next(d for d, size in enumerate(parameter.shape) if size == HIDDEN and (d or parameter.dim() < 3))
                parameter.narrow(dim, 0, num_experts).zero_()
    assert forced, f"{family} has no router that is known here"


class _Counting(TorchDispatchMode):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.counts: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default and args[0].shape[-1] == self.num_experts:
            self.counts.append(torch.bincount(result[1].flatten(), minlength=self.num_experts))
        return result


def chosen_experts(model: nn.Module, family: str, batch: dict[str, Tensor]) -> Tensor:
    """How many rows each expert of each router gets, ``[routers, experts]``, in the unmodified model."""
    with _Counting(FAMILIES[family][0]) as counting:
        model(**batch)
    return torch.stack(counting.counts)


class PlainExperts(nn.Module):
    """A residual layer of experts with biases as one might write it; ``aux``: how much the balance counts in the loss.

    ``form``: ``"gathered"``, one matrix for each row from a stack; ``"dense"``, all experts on all tokens, those that
    were not chosen times zero.
    """

    def __init__(self, num_experts: int = 4, aux: float = 0.0, form: str = "gathered") -> None:
        super().__init__()
        self.num_experts, self.aux, self.form = num_experts, aux, form
        self.norm = nn.LayerNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, num_experts)
        self.up = nn.Parameter(torch.randn(num_experts, HIDDEN, 48) * 0.2)
        self.up_bias = nn.Parameter(torch.randn(num_experts, 48) * 0.2)
        self.down = nn.Parameter(torch.randn(num_experts, 48, HIDDEN) * 0.2)
        self.down_bias = nn.Parameter(torch.randn(num_experts, HIDDEN) * 0.2)
        self.head = nn.Linear(HIDDEN, 8)

    def experts(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        expert = chosen.reshape(-1)
        rows = x.repeat_interleave(chosen.shape[1], 0)
        inner = torch.bmm(rows.unsqueeze(1), self.up[expert]).squeeze(1) + self.up_bias[expert]
        made = torch.bmm(nn.functional.gelu(inner).unsqueeze(1), self.down[expert]).squeeze(1) + self.down_bias[expert]
        return (made * weights.reshape(-1, 1)).view(*chosen.shape, -1).sum(1)

    def dense(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        gates = x.new_zeros(x.shape[0], self.num_experts).scatter(1, chosen, weights)
        inner = torch.baddbmm(self.up_bias.unsqueeze(1), x.expand(self.num_experts, *x.shape), self.up)
        made = torch.bmm(nn.functional.gelu(inner), self.down) + self.down_bias.unsqueeze(1)
        return (made * gates.t().unsqueeze(-1)).sum(0)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        made = (self.experts if self.form == "gathered" else self.dense)(tokens, chosen, weights)
        loss = ((self.head(x + made.view_as(x)) - target) ** 2).mean()
        if self.aux:
            often = nn.functional.one_hot(chosen, self.num_experts).to(scores.dtype).mean((0, 1))
            loss = loss + self.aux * self.num_experts * (often * scores.mean(0)).sum()
        return loss


def plain(**options: Any) -> PlainExperts:
    torch.manual_seed(0)
    return PlainExperts(**options)


def plain_inputs(batch: int = BATCH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(batch, 4, HIDDEN, generator=generator),
        "target": torch.randn(batch, 4, 8, generator=generator),
    }


class _Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * 48), nn.Linear(48, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


class ListedExperts(nn.Module):
    """Experts as modules in a list, each on all rows; ``form``: how the rows that count are told, by ``"gates"``, a
    column of weights for each expert, or by ``"masks"``, where the choice is its number."""

    def __init__(self, form: str = "gates", num_experts: int = 4) -> None:
        super().__init__()
        self.form = form
        self.router = nn.Linear(HIDDEN, num_experts, bias=False)
        self.experts = nn.ModuleList(_Feed() for _ in range(num_experts))
        self.head = nn.Linear(HIDDEN, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2, -1)
        gates = torch.zeros(len(rows), len(self.experts)).to(rows).scatter(1, chosen, weights)
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            if self.form == "gates":
                made = made + expert(rows) * gates[:, number : number + 1]
            else:
                made = made + expert(rows) * (weights * (chosen == number)).sum(-1, keepdim=True)
        return ((self.head(x + made.view_as(x)) - target) ** 2).mean()


def listed(form: str = "gates") -> ListedExperts:
    torch.manual_seed(0)
    return ListedExperts(form)
