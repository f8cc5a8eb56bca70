"""One layout, several programs: batches of several shapes and evaluation between steps, as one process has them."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import (
    BatchError,
    Checkpoints,
    ConstraintError,
    Constraints,
    Engine,
    Evaluate,
    InputsError,
    LaunchError,
    LocalRanks,
    Plan,
    PlanError,
    RankError,
    ShapeError,
    Shapes,
    StepLog,
    Topology,
    partition,
)
from partitioner.runtime.engine.outputs import select_outputs
from partitioner.runtime.family.load import load_family
from partitioner.runtime.prove.layouts import LayoutError, prove_same_layout
from tests.helpers.every_rank import on_every_rank
from tests.helpers.models import CASES, float64, keep_layers
from tests.helpers.shape_training import (
    MESHES,
    VOCAB,
    Trained,
    list_batches,
    planned,
    train_alone,
    train_rank,
    writer,
    written,
)

pytestmark = pytest.mark.usefixtures("without_baselines")

EVALUATED = written(5, 12, seed=9)  # fewer and shorter than what was planned
CLOSE = 1e-9


def check_runs(runs: list[Trained], alone: Trained) -> None:
    for run in runs:
        assert run.losses == pytest.approx(alone.losses, rel=CLOSE)
        assert run.evaluations == pytest.approx(alone.evaluations, rel=CLOSE)
    first = runs[0]
    for name, gradient in alone.gradients.items():
        assert (first.gradients[name] - gradient).abs().max() < CLOSE, name
    for name, weight in alone.weights.items():
        assert (first.weights[name] - weight).abs().max() < CLOSE, name


def train_over_gloo(plan: str) -> Trained:
    return train_rank(plan, writer(), list_batches(written), EVALUATED)


@pytest.mark.parametrize(
    "mesh", [pytest.param(m, marks=pytest.mark.slow if m in ("cp2", "dp2 zero1") else ()) for m in MESHES]
)
def test_mixed_shapes_train_as_one_process_does(mesh: str, tmp_path: Path):
    """Losses, evaluations, every gradient and the weights after steps of six shapes, on processes over Gloo."""
    plan = planned(mesh)
    assert plan.padding is not None and (plan.padding.fewer, plan.padding.shorter) == ("", "")
    assert [*plan.further] == ["step 8x8", "step 4x16", "step 4x8", "eval"]
    plan.prove()
    plan.save(tmp_path / "plan.json")
    with LocalRanks(plan.world_size) as ranks:
        runs = ranks.call(train_over_gloo, str(tmp_path / "plan.json"))
    check_runs(runs, train_alone(writer(), list_batches(written), EVALUATED))


# Epochs of 13 batches of 8 samples and a last one of 5, in lengths that change; evaluated every 20 steps.
EPOCH, LAST, TOTAL, EVERY, KILLED_AT = 14, 5, 50, 20, 33
RESUMED = (("dp2 tp2", "tp2"), ("tp2", "dp2 zero3"), ("dp2 zero1", "tp2"), ("pp2", "dp2 zero3"), ("tp2", "pp2"))


def draw_batch(step: int) -> dict[str, Tensor]:
    samples = LAST if step % EPOCH == EPOCH - 1 else 8
    return written(samples, (16, 9, 12, 8, 5)[step % 5], seed=step)


def train_until_killed(plan: str, folder: str, dies: bool) -> None:
    """Go on from the last checkpoint, and write each loss to a file; one rank may kill itself."""
    engine = Engine(plan, writer())
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    checkpoints = Checkpoints(Path(folder) / "checkpoints", engine, optimizer, every=4, behind=False)
    checkpoints.restore()
    start, rank = engine.steps, engine.rank_program.rank
    while engine.steps < TOTAL:
        row = {"start": start, "step": engine.steps + 1, "loss": float(engine.step(draw_batch(engine.steps)))}  # type: ignore[arg-type]
        optimizer.step()
        if engine.steps % EVERY == 0:
            row["evaluation"] = float(engine.run("eval", EVALUATED))  # type: ignore[arg-type]
        if rank == 0:
            with (Path(folder) / "losses.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        checkpoints.after_step()
        if dies and rank == 1 and engine.steps == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pp2", "dp2 tp2"),
        *(pytest.param(*m, marks=pytest.mark.slow) for m in RESUMED),
    ],
)
def test_a_killed_run_goes_on_over_another_mesh_with_the_losses_of_one_process(before: str, after: str, tmp_path: Path):
    """Losses of all steps, of those that were done again, and of evaluations, over epochs with a smaller last batch."""
    for mesh, dies in ((before, True), (after, False)):
        path = planned(mesh).save(tmp_path / f"{mesh}.json")
        with LocalRanks(planned(mesh).world_size) as ranks, pytest.raises(RankError) if dies else nullcontext():
            ranks.call(train_until_killed, str(path), str(tmp_path), dies)
    rows = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["start"] == 0][-1] in (KILLED_AT, KILLED_AT + 1)
    assert [row["step"] for row in rows if row["start"] > 0] == [*range(KILLED_AT, TOTAL + 1)], "from the last save"

    model, losses, evaluations = writer(), list[float](), dict[int, float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(TOTAL):
        optimizer.zero_grad()
        loss = model(**draw_batch(step))["loss"]
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if (step + 1) % EVERY == 0:
            evaluations[step + 1] = float(model.eval()(**EVALUATED)["loss"].detach())
            model.train()
    assert losses[-1] < losses[0]
    for row in rows:
        assert row["loss"] == pytest.approx(losses[row["step"] - 1], rel=1e-8)
    found = {row["step"]: row["evaluation"] for row in rows if "evaluation" in row}
    assert found == pytest.approx(evaluations, rel=1e-8)


def test_outputs_have_the_real_places_alone():
    plan, batches, weights = planned("dp2 tp2"), list_batches(written), writer()
    runs = on_every_rank(plan.program, lambda c: train_rank(plan, weights, batches, EVALUATED, c))
    alone = train_alone(writer(), batches, EVALUATED)
    for step, (expected,) in enumerate(alone.logits):  # such as three samples of seven positions, in a program of 4x8
        halves = []  # of the samples, each on two ranks of tp
        for place in (0, 2):
            parts = [torch.cat(run.logits[step]) for run in runs[place : place + 2]]
            halves.append(parts[0] if parts[0].shape[-1] == VOCAB else torch.cat(parts, -1))
        whole = torch.cat(halves)
        assert whole.shape == expected.shape
        assert (whole - expected).abs().max() < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp2", "pp2", "dp2 tp2", "dp2 zero3", "cp2"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "bert", "t5", "gemma2", "gpt2"])
def test_families_of_models(family: str, mesh: str):
    case = CASES[family]
    whole = dict(case.inputs(8))

    def cut(samples: int, positions: int, seed: int) -> dict[str, Tensor]:
        order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))[:samples]
        return {n: x[order][:, :positions].contiguous() for n, x in whole.items()}

    batches, evaluated = list_batches(cut), cut(5, 12, 9)
    axes = MESHES[mesh]
    ranks = axes["dp"] * axes["tp"] * axes["pp"] * axes.get("cp", 1)
    with float64():
        plan = partition(
            case.build().double(),
            Topology.local(ranks),
            whole,
            constraints=Constraints(**axes),
            precision="fp64",
            shapes=Shapes(batch=(4, 8), length=(8, 16)),
            programs={"eval": Evaluate()},
        )
        weights, reference = case.build().double(), case.build().double()
    runs = on_every_rank(plan.program, lambda c: train_rank(plan, weights, batches, evaluated, c))
    with float64():
        alone = train_alone(reference, batches, evaluated)
    check_runs(runs, alone)


# Samples, positions of sources and positions of targets; the plan has 8x16 and 8x32 with targets of 12.
SIZES = ((8, 32, 12), (8, 16, 12), (8, 16, 5), (5, 9, 12), (3, 30, 1), (8, 10, 11), (7, 31, 8))


def translated(samples: int, positions: int, targets: int, seed: int = 0) -> dict[str, Tensor]:
    """Sources, of which some are padded on the right, and targets, of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 64, (samples, positions), generator=generator)
    labels = torch.randint(4, 64, (samples, targets), generator=generator)
    labels[:-1] = labels[:-1].masked_fill(torch.rand(samples - 1, targets, generator=generator) < 0.2, -100)
    mask = (torch.arange(positions) < positions - torch.arange(samples)[:, None] % 5).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def decoded(samples: int, positions: int, targets: int, seed: int = 0) -> dict[str, Tensor]:
    """The same with inputs of the decoder, whose mask hides some targets."""
    batch = translated(samples, positions, targets, seed)
    shown = (torch.arange(targets) < targets - torch.arange(samples)[:, None] % targets).long()
    return batch | {"decoder_input_ids": batch["labels"].clamp(min=4).roll(1, 1), "decoder_attention_mask": shown}


@pytest.mark.parametrize(
    ("family", "draw", "mesh"),
    [
        ("t5", translated, "dp2 tp2"),
        ("bart", decoded, "pp2"),
        *(
            pytest.param(family, draw, mesh, marks=pytest.mark.slow)
            for family in ("t5", "bart")
            for draw in (translated, decoded)
            for mesh in ("tp2", "pp2", "dp2 zero3", "cp2")
        ),
    ],
)
def test_sources_and_targets_vary_by_themselves(family: str, draw: Any, mesh: str):
    case, axes = CASES[family], MESHES[mesh]
    with float64():
        plan = partition(
            case.build().double(),
            Topology.local(axes["dp"] * axes["tp"] * axes["pp"] * axes.get("cp", 1)),
            draw(8, 32, 12),
            constraints=Constraints(**axes),
            precision="fp64",
            shapes=Shapes(batch=8, length=(16, 32)),
            programs={"eval": Evaluate()},
        )
        assert plan.padding is not None and plan.padding.targets == 12
        assert (plan.padding.fewer, plan.padding.shorter, plan.padding.shorter_targets) == ("", "", "")
        batches, evaluated = [draw(*sizes, seed) for seed, sizes in enumerate(SIZES)], draw(5, 12, 7, 9)
        weights, reference = case.build().double(), case.build().double()
    runs = on_every_rank(plan.program, lambda c: train_rank(plan, weights, batches, evaluated, c))
    with float64():
        check_runs(runs, train_alone(reference, batches, evaluated))


def test_outputs_have_the_real_targets_alone():
    case = CASES["t5"]
    with float64():
        plan = partition(
            case.build().double(),
            Topology.local(1),
            translated(8, 32, 12),
            precision="fp64",
            shapes=Shapes(batch=8, length=(16, 32)),
        )
        weights, batch = case.build().double(), translated(3, 9, 5)

    def run(communicator: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        engine = Engine(plan, weights, communicator=communicator, keep_outputs=True)
        engine.step(batch)  # type: ignore[arg-type]
        latest = engine.latest_outputs
        whole = latest.join({0: select_outputs(latest.rank, latest.shards)})
        own = {o.path: engine.outputs[o.value][0] for o in plan.program.outputs if o.value in engine.outputs}
        return whole, own

    ((whole, own),) = on_every_rank(plan.program, run)
    with float64():
        expected = case.build().double()(**batch)
    for found in (whole, own):
        for name in ("logits", "encoder_last_hidden_state"):
            assert found[name].shape == expected[name].shape, name
            assert (found[name] - expected[name]).abs().max() < CLOSE, name


def test_lengths_that_are_equal_in_the_plan_vary_together():
    case = CASES["t5"]
    with float64():
        plan = partition(case.build(), Topology.local(1), translated(8, 32, 32), shapes=Shapes(length=(16, 32)))

    def step(communicator: Any) -> None:
        Engine(plan, case.build(), communicator=communicator).step(translated(8, 16, 7))  # type: ignore[arg-type]

    with pytest.raises(BatchError, match="if targets vary by themselves, plan with inputs in which they have another"):
        on_every_rank(plan.program, step)


def test_an_evaluation_changes_nothing_of_the_training():
    """Dropout and batch norm: gradients, buffers, random numbers and later losses are those without evaluations."""
    plan = planned("dp2 tp2", 0.3, True)
    batch, model = written(8, 16), writer(0.3, True)

    def train(communicator: Any, evaluates: bool) -> tuple[list[float], list[Tensor], dict[str, Tensor]]:
        engine = Engine(plan, model, communicator=communicator)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
        losses, gradients = [], []
        for _ in range(3):
            losses.append(float(engine.step(batch)))  # type: ignore[arg-type]
            if evaluates:
                engine.run("eval", written(6, 16))
                assert engine.steps == len(losses)
            gradients += [p.grad.clone() for p in engine.parameters() if p.grad is not None]
            optimizer.step()
        return losses, gradients, engine.state_dict(full=True)

    plain, mixed = (on_every_rank(plan.program, lambda c, e=e: train(c, e)) for e in (False, True))
    for one, other in zip(plain, mixed, strict=True):
        assert one[0] == other[0]
        assert all(map(torch.equal, one[1], other[1]))
        assert all(torch.equal(t, other[2][n]) for n, t in one[2].items())


@pytest.mark.parametrize("mesh", ["pp2", "dp2 zero3"])
def test_an_evaluation_is_the_model_in_evaluation_mode(mesh: str):
    plan, model, batch = planned(mesh, 0.3, True), writer(0.3, True), written(6, 16)
    losses = on_every_rank(plan.program, lambda c: float(Engine(plan, model, communicator=c).run("eval", batch)))
    assert model.training
    with torch.no_grad():
        expected = float(model.eval()(**batch)["loss"])
    assert losses == pytest.approx([expected] * plan.world_size, rel=CLOSE)


# --- what is refused --------------------------------------------------------------------------------------------------


class Mean(nn.Module):
    """A mean over all positions, whatever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(8, 4), nn.Linear(4, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.tokens(tokens)).square().mean()


def plan_small(model: nn.Module, inputs: Any, shapes: Shapes | None = None, **more: Any) -> Plan:
    fixed = Constraints(dp=1, tp=1, pp=1)
    return partition(model, Topology.local(1), inputs, constraints=fixed, shapes=shapes, **more)


def test_a_mean_over_all_places_is_not_padded():
    tokens = torch.randint(8, (4, 6))
    plan = plan_small(Mean(), {"tokens": tokens}, Shapes(batch=(2, 4), length=(3, 6)))
    engine = Engine(plan, Mean())
    assert engine.step({"tokens": tokens[:2, :3]}) is not None  # a planned shape, which needs no padding
    with pytest.raises(BatchError, match=r"3 samples of 6 positions.*test_shapes.py:\d+\) adds up padded numbers"):
        engine.step({"tokens": tokens[:3]})
    with pytest.raises(BatchError, match="fewer positions cannot be padded exactly"):
        engine.step({"tokens": tokens[:, :4]})


def test_statistics_of_the_batch_are_not_padded():
    plan = planned("dp2 tp2", 0.3, True)
    assert plan.padding is not None
    assert "batch_norm" in plan.padding.fewer or "adds up" in plan.padding.fewer or "number" in plan.padding.fewer
    evaluation = plan.further["eval"].padding
    assert evaluation is not None and (evaluation.fewer, evaluation.shorter) == ("", "")


def test_batches_that_fit_no_program():
    plan, weights = planned("tp2"), writer()

    def refused(communicator: Any) -> list[str]:
        engine, told = Engine(plan, weights, communicator=communicator), []
        wrong = {"tokens": written(4, 8)["tokens"], "labels": written(4, 7)["labels"]}
        for batch in (written(9, 16), written(8, 17), wrong):
            with pytest.raises(BatchError) as error:
                engine.step(batch)
            told.append(str(error.value))
        with pytest.raises(BatchError, match="larger than 6 samples of 16 positions"):
            engine.run("eval", written(7, 16))
        with pytest.raises(LaunchError, match=r"no program 'test' to evaluate: it has 'eval'"):
            engine.run("test", written(6, 16))
        return told

    for told in on_every_rank(plan.program, refused):
        assert "the batch has 9 samples of 16 positions: expected one of the plan's shapes" in told[0]
        assert "the batch has 8 samples of 17 positions" in told[1]
        assert "the inputs differ in their positions: tokens has 8, labels has 7" in told[2]


def mask_left(family: str, samples: int, positions: int, hidden: slice) -> dict[str, Tensor]:
    """A batch of a family of transformers whose mask hides the positions ``hidden`` of sample 1."""
    batch = {name: x[:samples, :positions].clone() for name, x in dict(CASES[family].inputs(8)).items()}
    mask = torch.ones(samples, positions, dtype=torch.long)
    mask[1, hidden] = 0
    batch["labels"][mask == 0] = -100
    return {**batch, "attention_mask": mask}


@pytest.mark.parametrize(
    ("family", "attention", "refused"),
    [("llama", "eager", True), ("gemma2", "eager", True), ("llama", "sdpa", False), ("bert", "eager", False)],
)
def test_padding_on_the_left(family: str, attention: str, refused: bool):
    """Positions are added only where no query without keys reads them; a batch of a planned length always runs."""
    with float64():
        model, reference = (keep_layers(CASES[family].build(), 2 if family == "gemma2" else 1).double() for _ in "12")
        for each in (model, reference):
            each.set_attn_implementation(attention)
        plan = plan_small(
            model,
            mask_left(family, 4, 16, slice(0)),
            Shapes(length=(8, 16)),
            precision="fp64",
            programs={"eval": Evaluate()},
        )
        engine = Engine(plan, model)
        for positions, hidden in ((16, slice(3)), (8, slice(3)), (11, slice(8, None)), (11, slice(3))):
            batch = mask_left(family, 4, positions, hidden)
            if refused and (positions, hidden.stop) == (11, 3):
                told = r"attention_mask hides the first position.* of sample 1, .*; pad on the right, or .*sdpa"
                with pytest.raises(BatchError, match=f"4 samples of 11 positions.*{told}"):
                    engine.step(batch)
                with pytest.raises(BatchError, match=told):
                    engine.run("eval", batch)
                continue
            expected = pytest.approx(reference(**batch).loss.item(), rel=CLOSE)
            assert float(engine.step(batch)) == expected
            if positions > 8:
                assert float(engine.run("eval", batch)) == expected


def test_requests_that_say_nothing():
    inputs = written(4, 8)
    with pytest.raises(ShapeError, match="expected a name and Evaluate"):
        plan_small(writer(), inputs, programs={"eval": inputs})
    with pytest.raises(ShapeError, match="expected a dict"):
        plan_small(writer(), inputs, programs=[Evaluate()])
    with pytest.raises(ShapeError, match="unknown field of Shapes 'lengths'"):
        Shapes(lengths=(4,))
    with pytest.raises(ShapeError, match="expected lengths among"):
        Shapes(length=(4, 8), weights={6: 1.0})
    with pytest.raises(ShapeError, match="no input has a dim of positions"):
        plan_small(nn.Linear(4, 4), (torch.zeros(2, 4),), Shapes(length=8), loss=lambda y: y.sum())
    with pytest.raises(ConstraintError, match="need a plan that can be executed"):
        plan_small(writer(), inputs, programs={"eval": Evaluate()}, estimate_only=True)
    exported = torch.export.export(writer(), (), inputs, strict=False)
    with pytest.raises(InputsError, match="an exported program has one mode"):
        plan_small(exported, None, programs={"eval": Evaluate()})
    for error in (ShapeError, BatchError):
        assert issubclass(error, ValueError)


# --- plans and their files --------------------------------------------------------------------------------------------


def test_files_hold_all_programs(tmp_path: Path):
    plan = planned("dp2 zero3")
    path = plan.save(tmp_path / "plan.json")
    assert Plan.load(path) == plan
    family = load_family(path)
    assert (family.first, family.further, family.padding) == (plan.program, plan.further, plan.padding)
    alone = plan.model_copy(update={"further": {}, "padding": None})
    old = alone.save(tmp_path / "old.json")
    assert "further" not in json.loads(old.read_text())
    assert Plan.load(old) == alone
    each = path.stat().st_size - old.stat().st_size
    whole = len(json.dumps([f.model_dump(mode="json", exclude_defaults=True) for f in plan.further.values()]))
    assert each < whole / 2  # what programs have in common is there once


def test_the_layout_minimises_the_expected_step_time():
    """Long batches are divided by samples and positions, short ones by weights: how often they come decides."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    inputs = {n: torch.empty(2, 8192, dtype=torch.int64, device="meta") for n in ("input_ids", "labels")}
    topology = Topology.preset("dgx-h100", nodes=1)
    plans = {
        weights: partition(model, topology, inputs, shapes=Shapes(length=(256, 8192), weights={weights: 1.0}))
        for weights in (256, 8192)
    }
    assert plans[256].mesh != plans[8192].mesh
    short = {length: plan.further["step 2x256"].seconds for length, plan in plans.items()}
    assert plans[256].expected_step_time == short[256] < short[8192]
    assert plans[8192].expected_step_time == plans[8192].estimate.step_time < plans[256].estimate.step_time
    assert any("least expected step time" in note for note in plans[256].notes)
    assert plans[256].certificate.gap > 0
    for plan in plans.values():
        plan.prove()


def test_the_summary_lists_the_programs():
    text = planned("tp2").summary()
    for shown in ("step 4x8", "eval", "8 samples of 16 positions"):
        assert shown in text, text


def test_another_layout_is_refused():
    plan = planned("dp2 zero3")
    program = plan.further["eval"].program
    name = next(n for n, s in program.states.items() if s.zero_axes)
    other = program.states[name].model_copy(update={"zero_axes": ()})
    changed = program.model_copy(update={"states": {**program.states, name: other}})
    with pytest.raises(LayoutError, match=f"'{name}' in program 'eval' has zero_axes"):
        prove_same_layout(plan.program, "eval", changed)
    further = {**plan.further, "eval": plan.further["eval"].model_copy(update={"program": changed})}
    with pytest.raises(LayoutError):
        Engine(plan.model_copy(update={"further": further}), communicator=_Rank())


class _Rank:
    """Enough of a communicator for an engine that is refused before anything is sent."""

    rank, device = 0, torch.device("cpu")


@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_further_programs_are_verified_drawn_and_exported(mesh: str, tmp_path: Path):
    plan, model = planned(mesh, dropout=0.5), writer(dropout=0.5)
    with pytest.raises(BatchError):
        plan.verify(model, written(8, 16), program="step 4x8")
    plain = planned(mesh)
    assert plain.verify(writer(), written(4, 8), program="step 4x8").ok
    assert plain.verify(writer(), written(8, 16), program="step 8x16").ok
    result = plan.verify(model, written(6, 16), program="eval")
    assert result.ok and not any(name.startswith("grad") for name in result.errors)
    assert model.training, "the model has its mode again"
    for name in ("eval", "step 4x8"):
        assert plain.to_svg(program=name) != plain.to_svg()
        assert plain.to_svg(view="timeline", program=name) != plain.to_svg(view="timeline")
        files = plain.export_ranks(tmp_path / name, program=name)
        assert [json.loads(f.read_text())["program"]["inputs"][0]["shape"] for f in files] == [
            [i.shape[0], i.shape[1]] for i in plain.further[name].program.inputs[:1]
        ] * len(files)
    for call in (plain.to_svg, plain.export_ranks):
        with pytest.raises(PlanError, match="no program 'evil'; expected 'step 8x16', 'step 8x8'"):
            call(tmp_path / "x", program="evil")  # type: ignore[operator]


def test_the_log_counts_the_tokens_of_the_shapes_that_ran():
    def count_tokens(communicator: Any) -> list[float]:
        engine = Engine(planned("tp2"), writer(), communicator=communicator)
        found, log = [], StepLog(engine, planned("tp2"))
        for samples, positions in ((8, 16), (4, 8), (3, 7)):
            engine.step(written(samples, positions))
            line = log.step()
            assert (line.mfu is None) == (samples < 8)
            found.append((line.tokens_per_s or 0.0) * line.seconds)
        return found

    for counts in on_every_rank(planned("tp2").program, count_tokens):
        assert counts == pytest.approx([128, 32, 32])
