"""What the benchmarks share: the models, two processes over Gloo, and a fair clock.

The models are plain modules so that ours and every peer run the same mathematics: eight MLP layers, and a Llama, with
experts or without.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], float]  # one forward and backward with all gradients reduced; the loss of the whole batch


class MlpLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Mlp(nn.Module):
    def __init__(self, dim: int, num_layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MlpLayer(dim) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True)
class LlamaConfig:
    dim: int = 256
    num_heads: int = 8
    num_kv_heads: int = 4
    ffn_dim: int = 512
    vocab: int = 1024
    num_layers: int = 4
    seq: int = 32
    num_experts: int = 0
    num_chosen: int = 2

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; a rank that holds fewer heads has narrower projections."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            proj(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, seq, -1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Every token goes through its best ``num_chosen`` experts: rows are sorted by expert for a grouped product."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_experts, self.num_chosen = config.num_experts, config.num_chosen
        self.router = nn.Linear(config.dim, config.num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(config.num_experts, config.dim, 2 * config.ffn_dim))
        self.down = nn.Parameter(torch.empty(config.num_experts, config.ffn_dim, config.dim))
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``[t, num_chosen]`` shares and experts of ``[t, dim]`` rows."""
        shares, experts = self.router(rows).softmax(-1).topk(self.num_chosen)
        return shares / shares.sum(-1, keepdim=True), experts

    def by_expert(self, rows: Tensor, ends: Tensor) -> Tensor:
        """What experts make of ``[rows, dim]`` in their order, where the rows of each end at ``ends``."""
        gate, up = F.grouped_mm(rows, self.gate_up, offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        shares, experts = self.choose(rows)
        experts, order = experts.flatten().sort()
        counts = torch.histc(experts.float(), bins=self.num_experts, min=0, max=self.num_experts - 1)
        y = self.by_expert(rows[order // self.num_chosen], counts.cumsum(0).int())
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        y = y[back] * shares.reshape(-1, 1)
        return y.view(len(rows), self.num_chosen, -1).sum(1).view_as(x)


class LlamaLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.ffn = Experts(config) if config.num_experts else FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """Tokens ``[batch, seq]`` to logits ``[batch, seq, vocab]``; a pipeline stage lacks ``embedding`` or ``head``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config.num_layers))
        self.norm: nn.Module | None = nn.RMSNorm(config.dim, eps=1e-6)
        self.head: nn.Module | None = nn.Linear(config.dim, config.vocab, bias=False)
        angles = torch.arange(config.seq)[:, None] / 10_000 ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        self.register_buffer("cos", angles.repeat(1, 2).cos(), persistent=False)
        self.register_buffer("sin", angles.repeat(1, 2).sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class WithLoss(nn.Module):
    """A model and its loss as one module of inputs and targets."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.model(x), target)


@dataclass(frozen=True)
class Workload:
    """A model, its loss and one batch, the same in every process."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def whole(self) -> WithLoss:
        return WithLoss(self.model(), self.loss)


def _vectors(dim: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(64, dim, generator=generator), torch.randn(64, dim, generator=generator)


LONG = LlamaConfig(dim=128, num_heads=4, num_kv_heads=2, ffn_dim=256, vocab=512, num_layers=2, seq=2048)
VOCABULARY = LlamaConfig(num_layers=2, seq=128, vocab=32_768)
EXPERTS = LlamaConfig(num_layers=2, seq=128, num_experts=8)


def _tokens(config: LlamaConfig, batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab, (batch, config.seq + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


WORKLOADS = {
    w.name: w
    for w in (
        Workload("mlp64", lambda: Mlp(64), lambda: _vectors(64), squared_error),
        Workload("mlp256", lambda: Mlp(256), lambda: _vectors(256), squared_error),
        Workload("llama", lambda: Llama(LlamaConfig()), lambda: _tokens(LlamaConfig(), 8), cross_entropy),
        Workload("vocabulary", lambda: Llama(VOCABULARY), lambda: _tokens(VOCABULARY, 8), cross_entropy),
        Workload("experts", lambda: Llama(EXPERTS), lambda: _tokens(EXPERTS, 8), cross_entropy),
        Workload("long", lambda: Llama(LONG), lambda: _tokens(LONG, 1), cross_entropy),
    )
}


# --- processes --------------------------------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _worker(rank: int, world_size: int, port: int, function: Callable[..., Any], args: Any, results: Any) -> None:
    os.environ |= dict(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
        results.put((rank, function(*args), None))
        dist.barrier()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    # Gloo's tear-down sometimes aborts: flush, and leave without it.
    results.close()
    results.join_thread()
    os._exit(0)


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 600) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` processes of one Gloo group; what each rank returned.

    Raises:
        RuntimeError: with the traceback of the first rank that failed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = mp.get_context("spawn")
    results = context.Queue()
    rest = (world_size, _free_port(), function, args, results)
    processes = [context.Process(target=_worker, args=(rank, *rest), daemon=True) for rank in range(world_size)]
    for process in processes:
        process.start()
    answers: dict[int, Any] = {}
    try:
        while len(answers) < world_size:
            rank, answer, failure = results.get(timeout=timeout_s)
            if failure is not None:
                raise RuntimeError(f"rank {rank} failed:\n{failure}")
            answers[rank] = answer
    finally:
        for process in processes:
            process.join(timeout=5 if len(answers) == world_size else 0)
            if process.is_alive():
                process.kill()
    return [answers[rank] for rank in range(world_size)]


# --- the clock --------------------------------------------------------------------------------------------------------


def _block_s(step: Step, num_steps: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    return time.perf_counter() - start


MIN_REPETITIONS = 5


def interleaved(
    steps: Mapping[str, Step], *, repetitions: int, block_s: float, budget_s: float
) -> dict[str, list[float]]:
    """Seconds per step of each contender, one figure per repetition, as the slowest rank saw it.

    Contenders take turns in blocks of about ``block_s`` seconds, in an order that rotates, so that a machine that slows
    down or speeds up does so for all of them. Fewer than ``repetitions`` are made where ``budget_s`` is over.
    """
    names = list(steps)
    for name in names:
        for _ in range(3):
            steps[name]()
    first = torch.tensor([_block_s(steps[name], 3) / 3 for name in names], dtype=torch.float64)
    dist.all_reduce(first, dist.ReduceOp.MAX)
    num_steps = {name: max(1, round(block_s / s)) for name, s in zip(names, first.tolist(), strict=True)}
    times = torch.zeros(repetitions, len(names), dtype=torch.float64)
    start, made = time.perf_counter(), 0
    for repetition in range(repetitions):
        over = torch.tensor(int(time.perf_counter() - start > budget_s))
        dist.all_reduce(over, dist.ReduceOp.MAX)
        if over and repetition >= MIN_REPETITIONS:
            break
        made += 1
        for i in range(len(names)):
            index = (i + repetition) % len(names)
            name = names[index]
            times[repetition, index] = _block_s(steps[name], num_steps[name]) / num_steps[name]
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return {name: times[:made, i].tolist() for i, name in enumerate(names)}


def median_ratio(ours: list[float], peer: list[float]) -> float:
    """The median of the ratios of neighbouring repetitions: what the machine does to both cancels."""
    return statistics.median(a / b for a, b in zip(ours, peer, strict=True))
