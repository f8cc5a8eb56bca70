"""Generation under a plan, between training steps: tokens, losses and weights are those of the model in one process."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from partitioner import (
    BatchError,
    Constraints,
    Engine,
    Evaluate,
    Generate,
    GenerationError,
    LaunchError,
    LocalRanks,
    Plan,
    PlanError,
    Topology,
    partition,
)
from partitioner.pretrained.generation import find_first_token
from partitioner.programs.requests import constrain_for_programs
from partitioner.runtime.prove.layouts import LayoutError, prove_same_caches
from tests.helpers.every_rank import on_every_rank
from tests.helpers.models import CASES, float64, keep_layers

pytestmark = pytest.mark.usefixtures("without_baselines")

CLOSE = 1e-9
VOCAB, NEW, LAYERS = 64, 6, 2
PROMPTS = ((4, 8), (3, 5), (4, 11), (1, 19))  # samples and tokens: as planned, fewer, and more than are read at once
ASKED = Generate(batch=4, prompt=8, length=28)


class Generated(NamedTuple):
    """What came of some steps with a generation after each: losses, generated tokens, and weights."""

    losses: list[float]
    tokens: list[Tensor]
    weights: dict[str, Tensor]


def model_of(family: str) -> nn.Module:
    """The test model of a family in float64. The first one has two layers, because most tests use it."""
    with float64():
        model = CASES[family].build().double()
        return keep_layers(model, LAYERS) if family == "llama" else model


def draw_prompt(samples: int, positions: int) -> Tensor:
    return torch.randint(3, VOCAB, (samples, positions), generator=torch.Generator().manual_seed(positions))


def draw_mask(samples: int, positions: int) -> Tensor:
    """A mask of prompts that are shorter by one token from sample to sample, padded on the left."""
    missing = torch.arange(samples)[:, None] % max(1, positions - 1)
    return (torch.arange(positions)[None] >= missing).long()


ENCODERS = ("t5", "bart")  # families with an encoder and a decoder
ENCODED = Generate(batch=4, prompt=19, length=NEW)


@cache
def plan_generation(family: str, pp: int = 1, dp: int = 1, tp: int = 1, **others: Any) -> Plan:
    with float64():
        return partition(
            model_of(family),
            Topology.local(pp * dp * tp),
            dict(CASES[family].inputs(8)),
            constraints=Constraints(pp=pp, dp=dp, tp=tp, cp=1, **others),  # type: ignore[arg-type]
            precision="fp64",
            programs={"generate": ENCODED if family in ENCODERS else ASKED},
        )


def generate_on_rank(plan: Any, family: str, communicator: Any = None, model: nn.Module | None = None) -> Generated:
    """Two steps of training, each followed by generations, on one rank of ``plan``, a plan or its file."""
    engine = Engine(plan, model or model_of(family), communicator=communicator)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)

    def step(batch: Any) -> float:
        loss = float(engine.step(batch))  # type: ignore[arg-type]
        optimizer.step()
        return loss

    def generate(tokens: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        return engine.generate(tokens, attention_mask=mask, max_new_tokens=NEW, **options)

    return _alternate(dict(CASES[family].inputs(8)), step, generate, lambda: engine.state_dict(full=True))


def generate_alone(family: str) -> Generated:
    """The same in one process, with the model's own ``generate``."""
    model = model_of(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(batch: Any) -> float:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def generate(tokens: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        options = {"eos_token_id": None, "pad_token_id": 0, "forced_eos_token_id": None} | options
        mask = torch.ones_like(tokens) if mask is None else mask
        model.eval()
        found: Tensor = model.generate(  # type: ignore[operator]
            tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options
        )
        model.train()
        return found

    batch = dict(CASES[family].inputs(8))
    with float64():
        return _alternate(batch, step, generate, model.state_dict)


def _alternate(
    batch: Any, step: Callable[[Any], float], generate: Callable[..., Tensor], weights: Callable[[], dict[str, Tensor]]
) -> Generated:
    losses, tokens = [], []
    for _ in range(2):
        losses.append(step(batch))
        for samples, positions in PROMPTS:
            prompt = draw_prompt(samples, positions)
            for mask in (None, draw_mask(samples, positions)):
                tokens.append(generate(prompt, mask))
        ends = int(tokens[-2][0, -2])
        tokens.append(generate(draw_prompt(4, 8), None, eos_token_id=ends, pad_token_id=1))
    return Generated(losses, tokens, {name: value.clone() for name, value in weights().items()})


FAMILIES = ("llama", "qwen3", "gpt2", "mistral", "gemma2", "opt")


def check_runs(runs: list[Generated], alone: Generated) -> None:
    for run in runs:
        assert run.losses == pytest.approx(alone.losses, rel=CLOSE)
        assert len(run.tokens) == len(alone.tokens)
        for own, expected in zip(run.tokens, alone.tokens, strict=True):
            assert torch.equal(own, expected)
    for name, weight in alone.weights.items():
        if name in runs[0].weights:
            assert (runs[0].weights[name] - weight).abs().max() < CLOSE, name


def generate_over_gloo(plan: str, family: str) -> Generated:
    return generate_on_rank(plan, family)


MESHES: dict[str, dict[str, int]] = {
    "tp2": dict(tp=2),
    "pp2": dict(pp=2),
    "pp2 tp2": dict(pp=2, tp=2),
    "dp2 tp2": dict(dp=2, tp=2),
    "dp2 zero3": dict(dp=2, zero=3),
}


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=() if m == "tp2" else pytest.mark.slow) for m in MESHES])
def test_processes_generate_what_the_model_does(mesh: str, tmp_path: Path):
    """Between training steps: prompts as planned, shorter, padded on the left, longer than prefill, and fewer."""
    plan = plan_generation("llama", **MESHES[mesh])
    assert [*plan.further] == ["generate prefill", "generate decode"]
    plan.prove()
    plan.save(tmp_path / "plan.json")
    with LocalRanks(plan.world_size, debug=True) as ranks:
        runs = ranks.call(generate_over_gloo, str(tmp_path / "plan.json"), "llama")
    check_runs(runs, generate_alone("llama"))


@pytest.mark.parametrize(
    ("family", "mesh"),
    [("t5", "tp2"), *(pytest.param(f, m, marks=pytest.mark.slow) for f, m in (("t5", "pp2"), ("bart", "pp2 tp2")))],
)
def test_processes_generate_with_a_decoder_what_the_model_does(family: str, mesh: str, tmp_path: Path):
    """Prompts are read by the encoder once; stages without calls of the decoder only wait."""
    plan = plan_generation(family, **MESHES[mesh])
    plan.prove()
    plan.save(tmp_path / "plan.json")
    with LocalRanks(plan.world_size, debug=True) as ranks:
        runs = ranks.call(generate_over_gloo, str(tmp_path / "plan.json"), family)
    check_runs(runs, generate_alone(family))


ENCODER_MESHES = {
    "tp2": dict(tp=2),
    "pp2": dict(pp=2),
    "pp4 1f1b": dict(pp=4, schedule="1f1b"),
    "pp2 tp2": dict(pp=2, tp=2),
    "pp2 dp2 zero3": dict(pp=2, dp=2, zero=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ENCODER_MESHES)
@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_with_decoders(family: str, mesh: str):
    plan, weights = plan_generation(family, **ENCODER_MESHES[mesh]), model_of(family)
    runs = on_every_rank(plan.program, lambda c: generate_on_rank(plan, family, c, weights))
    check_runs(runs, generate_alone(family))


def test_the_decoder_does_not_run_the_encoder():
    """Keys and values of the encoder's results are caches that prefill writes and decode reads."""
    further = plan_generation("t5").further
    prefill, decode = further["generate prefill"], further["generate decode"]
    assert prefill.caches == decode.caches
    assert {path for path in decode.caches if path.startswith("cross_caches.")} == {
        f"cross_caches.{layer}.{part}" for layer in (0, 1) for part in (0, 1)
    }
    read = {state for stage in decode.program.stages for call in stage.calls for state in call.states}
    assert not any(state.startswith("encoder.block") or "EncDecAttention.k" in state for state in read)
    writes = [
        sum(node.get("target") == "partition.write_cache.default" for node in program.blocks[call.block].nodes)
        for program in (prefill.program, decode.program)
        for stage in program.stages
        for call in stage.calls
    ]
    assert sum(writes) == 2 * 4 + 2 * 2  # keys and values: prefill of both kinds, decode of its own, in two layers
    assert (prefill.first_token, decode.first_token) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp2", "pp2 tp2", "dp2 tp2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_models(family: str, mesh: str):
    plan, weights = plan_generation(family, **MESHES[mesh]), model_of(family)
    runs = on_every_rank(plan.program, lambda c: generate_on_rank(plan, family, c, weights))
    check_runs(runs, generate_alone(family))


LONG = 64  # new tokens of the long runs


def experts() -> nn.Module:
    """In float32: the products of the model's experts have no other type on CPUs."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        use_cache=False,
    )
    return MixtralForCausalLM(config).eval()


def long_model(family: str) -> nn.Module:
    return experts() if family == "mixtral" else with_long_texts(family)


def with_long_texts(family: str) -> nn.Module:
    """The test model of a family, with positions for the prompt and the new tokens if it has a table of them."""
    model: Any = CASES[family].build()
    model.config.max_position_embeddings = 128
    config = copy.deepcopy(model.config)
    with float64():
        torch.manual_seed(0)
        return type(model)(config).eval().double()


def generate_long(plan: str, family: str) -> Tensor:
    engine = Engine(plan, long_model(family))
    return engine.generate(draw_prompt(4, 9), attention_mask=draw_mask(4, 9), max_new_tokens=LONG)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp2", "pp2", "pp2 tp2"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mixtral", "t5"])
def test_many_tokens_are_those_of_the_model(family: str, mesh: str, tmp_path: Path):
    """64 greedy tokens after prompts of different lengths, on processes over Gloo."""
    tokens = draw_prompt(4, 16)
    size = LONG if family in ENCODERS else 8 + 16 + LONG
    sizes = {"pp": 1, "dp": 1, "tp": 1, "cp": 1} | MESHES[mesh] | ({"ep": 1} if family == "mixtral" else {})
    with nullcontext() if family == "mixtral" else float64():
        model = long_model(family)
        plan = partition(
            model,
            Topology.local(sizes["pp"] * sizes["tp"]),
            {"input_ids": tokens, "labels": tokens},
            constraints=Constraints(**sizes),  # type: ignore[arg-type]
            programs={"generate": Generate(batch=4, prompt=16, length=size)},
        )
        plan.prove()
        plan.save(tmp_path / "plan.json")
        with LocalRanks(plan.world_size, debug=True) as ranks:
            runs = ranks.call(generate_long, str(tmp_path / "plan.json"), family)
        expected = model.generate(  # type: ignore[operator]
            draw_prompt(4, 9),
            attention_mask=draw_mask(4, 9),
            max_new_tokens=LONG,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert expected.shape[1] == LONG + (1 if family in ENCODERS else 9)
    assert all(torch.equal(run, expected) for run in runs)


def test_one_process_generates_what_the_model_does():
    check_runs([generate_on_rank(plan_generation("llama"), "llama")], generate_alone("llama"))


def test_caches_are_sharded_as_heads_and_layers_are():
    plan = plan_generation("llama", tp=2)
    further = plan.further["generate decode"]
    caches = {i.value: i for i in further.program.inputs if i.path in further.caches}
    assert len(caches) == 2 * LAYERS  # keys and values of each layer
    for value, data in caches.items():
        assert data.shape == (ASKED.batch, 4, ASKED.length, 8)
        assert (data.batch_dim, further.program.values[value].layout) == (0, "S1")


@pytest.mark.slow
def test_a_stage_has_the_caches_of_its_layers():
    further = plan_generation("llama", pp=2).further["generate decode"]
    caches = {i.value for i in further.program.inputs if i.path in further.caches}
    loaded = [
        {v for i in stage.instructions if i.op == "LOAD" for v in i.values if v in caches}
        for stage in further.program.stages
    ]
    assert all(loaded)
    assert loaded[0] | loaded[1] == caches
    assert not loaded[0] & loaded[1]


def test_a_program_that_copies_a_cache_is_refused():
    plan = plan_generation("llama", tp=2)
    further = dict(plan.further)
    prove_same_caches(further)
    decode = further["generate decode"]
    values = dict(decode.program.values)
    name = next(i.value for i in decode.program.inputs if i.path in decode.caches)
    values[name] = values[name].model_copy(update={"layout": "R"})
    other = decode.program.model_copy(update={"values": values})
    with pytest.raises(LayoutError, match=re.escape("'caches.0.0' is placed as")):
        prove_same_caches(further | {"generate decode": decode.model_copy(update={"program": other})})
    changed = further | {"generate decode": decode.model_copy(update={"program": other})}
    with pytest.raises(LayoutError, match=re.escape("'caches.0.0' is placed as")):
        plan.model_copy(update={"further": changed}).prove()


def test_generation_leaves_context_parallelism_out_of_the_search():
    assert constrain_for_programs(None, {"generate": ASKED}).cp == 1
    assert constrain_for_programs(Constraints(cp=2), {"generate": ASKED}).cp == 2
    assert constrain_for_programs(None, {"eval": Evaluate()}).cp is None


def engine_of_llama() -> Engine:
    return Engine(plan_generation("llama"), model_of("llama"), seed=3)


@pytest.mark.parametrize(
    "options", [{}, dict(top_k=5), dict(top_p=0.6), dict(temperature=0.5, top_k=20, top_p=0.9)], ids=str
)
def test_drawn_tokens_are_those_of_the_model(options: dict[str, Any]):
    """With the same seed, on one process."""
    model, prompt, mask = model_of("llama"), draw_prompt(3, 7), draw_mask(3, 7)
    found = engine_of_llama().generate(
        prompt, attention_mask=mask, max_new_tokens=NEW, do_sample=True, seed=5, **options
    )
    torch.manual_seed(5)
    with float64():
        expected = model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=mask,
            max_new_tokens=NEW,
            do_sample=True,
            eos_token_id=None,
            **({"top_k": 0} | options),
        )
    assert torch.equal(found, expected)


def test_ranks_draw_the_same_tokens_under_every_mesh():
    prompt, options = draw_prompt(4, 8), dict(max_new_tokens=NEW, do_sample=True, seed=5, temperature=2.0)
    plan, weights = plan_generation("llama", tp=2), model_of("llama")
    runs = on_every_rank(plan.program, lambda c: Engine(plan, weights, communicator=c).generate(prompt, **options))
    alone = engine_of_llama().generate(prompt, **options)
    assert all(torch.equal(run, alone) for run in runs)


def test_calls_draw_other_tokens_and_no_random_number_of_others():
    engine, prompt = engine_of_llama(), draw_prompt(4, 8)
    before = torch.random.get_rng_state()
    first, second = (engine.generate(prompt, max_new_tokens=NEW, do_sample=True, temperature=2.0) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_generation_changes_nothing_of_the_training():
    engine = engine_of_llama()
    engine.step(dict(CASES["llama"].inputs(8)))
    states = {n: t.clone() for n, t in engine.state_dict().items()}
    gradients = {n: p.grad.clone() for n, p in engine.named_parameters() if p.grad is not None}
    places = {n: p.data_ptr() for n, p in engine.named_parameters()}
    assert gradients
    engine.generate(draw_prompt(2, 8), max_new_tokens=NEW)
    assert engine.steps == 1
    assert all(torch.equal(t, states[n]) for n, t in engine.state_dict().items())
    assert all(torch.equal(p.grad, gradients[n]) for n, p in engine.named_parameters() if p.grad is not None)
    assert {n: p.data_ptr() for n, p in engine.named_parameters()} == places


@pytest.mark.slow
def test_the_estimate_counts_the_caches():
    def plan_length(length: int) -> Plan:
        with float64():
            return partition(
                model_of("llama"),
                Topology.local(1),
                dict(CASES["llama"].inputs(8)),
                constraints=Constraints(pp=1, dp=1, tp=1, cp=1),
                programs={"generate": Generate(batch=4, prompt=8, length=length)},
                precision="fp64",
            )

    shorter = plan_generation("llama").further["generate decode"].memory
    longer = plan_length(ASKED.length + 3000).further["generate decode"].memory
    cache = 4 * 4 * 3000 * 8 * 8  # samples, heads, places, width, bytes
    caches = 2 * LAYERS * cache  # keys and values of each layer
    assert caches <= longer - shorter < caches + 5 * cache  # and the mask, and temporary tensors of one layer
    with pytest.raises(PlanError, match=r"program 'generate prefill' .*too much"):
        plan_length(100_000_000)


ODD: list[tuple[dict[str, Any], str]] = [
    (dict(input_ids=draw_prompt(4, 25)), "need 30 positions of the key/value caches, which have 28"),
    (dict(input_ids=draw_prompt(4, 3), max_new_tokens=22), "(padded to 8) and 22 new tokens need 29 positions"),
    (dict(input_ids=draw_prompt(5, 8)), "input_ids has 5 samples, but 'generate' is planned for at most 4"),
    (dict(input_ids=draw_prompt(4, 8)[0]), "input_ids has shape [8]"),
    (dict(input_ids=draw_prompt(4, 8).float()), "type torch.float32; expected integers"),
    (dict(max_new_tokens=0), "max_new_tokens is 0; expected 1 or more"),
    (dict(attention_mask=draw_mask(4, 8).flip(1)), "expected [4, 8], with the padding on the left"),
    (dict(attention_mask=torch.ones(4, 7)), "attention_mask has shape [4, 7]"),
    (dict(top_k=5), "expected do_sample=True"),
    (dict(do_sample=True, top_p=1.5), "top_p is 1.5; expected a number above 0 and at most 1"),
    (dict(do_sample=True, temperature=0.0), "temperature is 0.0; expected a number above 0"),
]


@pytest.mark.parametrize(("options", "message"), ODD, ids=[message for _, message in ODD])
def test_odd_arguments_are_refused(options: dict[str, Any], message: str):
    arguments = dict(input_ids=draw_prompt(4, 8), max_new_tokens=NEW) | options
    with pytest.raises(BatchError, match=re.escape(message)):
        engine_of_llama().generate(**arguments)


def test_an_unknown_generation_is_refused():
    with pytest.raises(LaunchError, match="can generate with the programs 'generate', but program is 'other'"):
        engine_of_llama().generate(draw_prompt(4, 8), max_new_tokens=NEW, program="other")


class WithReference(nn.Module):
    """A loss with a policy that is trained, and a frozen reference. ``first``: whether the reference runs first."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.policy = model_of("llama")
        self.reference = model_of("llama").requires_grad_(False)
        self.first = first

    def forward(self, input_ids: Tensor, weights: Tensor) -> Tensor:
        def read(model: nn.Module) -> Tensor:
            found: Tensor = model(input_ids=input_ids).logits[:, :-1].log_softmax(-1)
            return found.gather(-1, input_ids[:, 1:, None])[..., 0]

        if self.first:
            with torch.no_grad():
                expected = read(self.reference)
            learned = read(self.policy)
        else:
            learned = read(self.policy)
            with torch.no_grad():
                expected = read(self.reference)
        return ((learned - expected).square() - weights * learned).mean()


class Rollouts(NamedTuple):
    """The tokens that were generated before and after a step, its loss, and where it left gradients and states."""

    tokens: list[Tensor]
    loss: float
    with_gradient: set[str]
    states: int


def roll_out(plan: Plan, model: nn.Module, communicator: Any) -> Rollouts:
    engine = Engine(plan, model, communicator=communicator)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    tokens = [engine.generate(draw_prompt(4, 8), max_new_tokens=NEW)]
    loss = float(engine.step(reference_batch()))  # type: ignore[arg-type]
    optimizer.step()
    tokens.append(engine.generate(draw_prompt(4, 8), max_new_tokens=NEW))
    named = {n for n, p in engine.named_parameters() if p.grad is not None}
    return Rollouts(tokens, loss, named, sum(s["exp_avg"].numel() for s in optimizer.state.values()))


def reference_batch() -> dict[str, Tensor]:
    weights = torch.randn(8, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return {"input_ids": draw_prompt(8, 16), "weights": weights}


POLICY_MESHES = MESHES | {"pp2 1f1b": dict(pp=2, schedule="1f1b"), "pp2 last": dict(pp=2, schedule="1f1b")}


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=[pytest.mark.slow] * (m != "pp2 1f1b")) for m in POLICY_MESHES])
def test_the_policy_of_a_loss_generates_with_the_weights_that_are_trained(mesh: str):
    """Also where all its layers are in one stage of a pipeline; the reference has neither gradients nor states."""
    sizes, first = POLICY_MESHES[mesh], mesh == "pp2 last"
    with float64():
        model = WithReference(first).double()
        plan = partition(
            model,
            Topology.local(sizes.get("pp", 1) * sizes.get("dp", 1) * sizes.get("tp", 1)),
            reference_batch(),
            constraints=Constraints(**{"pp": 1, "dp": 1, "tp": 1, "cp": 1} | sizes),  # type: ignore[arg-type]
            precision="fp64",
            programs={"generate": ASKED.model_copy(update={"model": "policy"})},
        )
        plan.prove()
        runs = on_every_rank(plan.program, lambda c: roll_out(plan, model, c))
        options = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        before = model.policy.generate(draw_prompt(4, 8), **options)  # type: ignore[operator]
        loss = model(**reference_batch())
        loss.backward()
        optimizer = torch.optim.AdamW(model.policy.parameters(), lr=0.01)
        optimizer.step()
        after = model.policy.generate(draw_prompt(4, 8), **options)  # type: ignore[operator]
    assert not torch.equal(before, after)
    for run in runs:
        assert run.loss == pytest.approx(float(loss.detach()), rel=CLOSE)
        assert torch.equal(run.tokens[0], before)
        assert torch.equal(run.tokens[1], after)
        assert all(name.startswith("policy.") for name in run.with_gradient)
    trained = sum(p.numel() for p in model.policy.parameters())
    copies = 2 * sizes.get("tp", 1) * sizes.get("dp", 1)  # norms are whole on each rank of tp
    assert trained <= sum(run.states for run in runs) < trained * copies
    assert all(stage.memory.get("gradients", 0) <= trained * 8 for stage in plan.estimate.stages)


def test_an_unknown_submodule_is_refused():
    request = ASKED.model_copy(update={"model": "actor"})
    with pytest.raises(
        GenerationError, match=r"model='actor', but LlamaForCausalLM has no such submodule.*'model', 'lm_head'"
    ):
        partition(model_of("llama"), Topology.local(1), dict(CASES["llama"].inputs(8)), programs={"g": request})


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x).pow(2).mean()
        return out


def test_a_model_without_caches_is_refused():
    with pytest.raises(
        GenerationError, match="has no argument input_ids and no past_key_values, so it cannot generate"
    ):
        partition(Plain(), Topology.local(1), (torch.ones(4, 4),), programs={"g": ASKED})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(input_ids=draw_prompt(4, 20)), "is planned for at most 19"),
        (
            dict(max_new_tokens=NEW + 1),
            f"{NEW + 1} new tokens need {NEW + 1} positions of the key/value caches, which have {NEW}",
        ),
        (dict(attention_mask=torch.zeros(4, 8)), "or a row of zeros; expected [4, 8]"),
        (dict(attention_mask=torch.full((4, 8), 2)), "or other numbers than 0 and 1"),
    ],
)
def test_odd_arguments_for_an_encoder_are_refused(options: dict[str, Any], message: str):
    engine = Engine(plan_generation("t5"), model_of("t5"))
    with pytest.raises(BatchError, match=re.escape(message)):
        engine.generate(**dict(input_ids=draw_prompt(4, 8), max_new_tokens=NEW) | options)


def test_a_decoder_without_a_first_token_is_refused():
    model: Any = CASES["t5"].build()
    assert find_first_token("g", model) == 0
    for config in (model.config, model.generation_config):
        config.decoder_start_token_id = config.bos_token_id = None
    with pytest.raises(GenerationError, match="has no start token of the decoder"):
        find_first_token("g", model)


def test_caches_without_room_for_a_new_token_are_refused():
    request = Generate(batch=4, prompt=8, length=8)
    with pytest.raises(GenerationError, match="length=8 and prompt=8; expected a length above prompt"):
        partition(model_of("llama"), Topology.local(1), dict(CASES["llama"].inputs(8)), programs={"g": request})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(batch=0, prompt=8, length=9), "batch"),
        (dict(batch=1, prompt=8), "length"),
    ],
    ids=str,
)
def test_malformed_requests_are_refused(sizes: dict[str, int], message: str):
    with pytest.raises(GenerationError, match=message):
        Generate(**sizes)


@pytest.mark.slow
def test_evaluation_and_generation_share_an_engine():
    inputs = dict(CASES["llama"].inputs(8))
    programs: dict[str, Any] = {"eval": Evaluate(), "short": ASKED, "long": Generate(batch=2, prompt=16, length=40)}
    with float64():
        plan = partition(model_of("llama"), Topology.local(1), inputs, precision="fp64", programs=programs)
    engine, model = Engine(plan, model_of("llama")), model_of("llama")
    with pytest.raises(LaunchError, match="can generate with the programs 'short', 'long', but program is None"):
        engine.generate(draw_prompt(2, 8), max_new_tokens=NEW)
    for program, positions in (("short", 8), ("long", 30)):
        prompt = draw_prompt(2, positions)
        found = engine.generate(prompt, max_new_tokens=NEW, program=program)
        with float64():
            expected = model.generate(  # type: ignore[operator]
                prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert torch.equal(found, expected)
    with float64(), torch.no_grad():
        assert float(engine.run("eval", inputs)) == pytest.approx(float(model(**inputs).loss), rel=CLOSE)  # type: ignore[arg-type]
