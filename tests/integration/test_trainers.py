"""``PartitionedTrainer`` trains as transformers' ``Trainer`` does in one process with the whole batch."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from partitioner import PartitionedTrainer, TrainerError
from partitioner.trainers.arguments import HONOURED, IRRELEVANT, REFUSED, check_arguments
from tests.helpers.paths import ROOT
from tests.helpers.trainer_script import Texts, build, pad

pytestmark = pytest.mark.usefixtures("without_baselines")
SCRIPT = str(ROOT / "tests" / "helpers" / "trainer_script.py")
CLOSE = 1e-5
# 42 samples are ten batches of 4 and one of 2; two batches are accumulated, and of the last one of an epoch just one.
OPTIONS: dict[str, Any] = dict(
    max_steps=50,
    gradient_accumulation_steps=2,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=10,
    save_steps=20,
    save_total_limit=2,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=5,
    weight_decay=0.1,
    max_grad_norm=0.9,
)


def run(folder: Path, ranks: int, **options: Any) -> list[dict[str, float]]:
    """The log history of the script, on ``ranks`` processes whose batches have 4 samples together."""
    each = 4 // ranks
    asked = {"output_dir": str(folder), **OPTIONS, **options}
    asked |= {"per_device_train_batch_size": each, "per_device_eval_batch_size": each}
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, SCRIPT, json.dumps(asked)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        capture_output=True,
        text=True,
        timeout=400,
        cwd=folder.parent,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    history: list[dict[str, float]] = json.loads((folder / "history.json").read_text())
    return history


def check_histories(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """The same entries, and the same numbers in them but for times and speeds."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert set(mine) == set(theirs)
        for key, value in theirs.items():
            if "runtime" not in key and "per_second" not in key:
                assert mine[key] == pytest.approx(value, abs=CLOSE, rel=CLOSE), (key, mine, theirs)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """Output folder and log history of the unmodified ``Trainer``."""
    folder = tmp_path_factory.mktemp("alone") / "out"
    return folder, run(folder, 1, predict=True)


MESHES = {
    "tp2": dict(tp=2, dp=1, pp=1),
    "dp2 zero2": dict(tp=1, dp=2, pp=1, zero=2),
    "pp2": dict(tp=1, dp=1, pp=2),
}


@pytest.mark.parametrize("mesh", ["tp2", "dp2 zero2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_history_checkpoints_and_weights_are_those_of_one_process(mesh: str, alone: Any, tmp_path: Path):
    """50 steps with evaluations, accumulation, padding and last smaller batches; then a resumed run under this plan."""
    folder, expected = alone
    mine = tmp_path / "out"
    history = run(mine, 2, constraints=MESHES[mesh], predict=True)
    check_histories(history, expected)
    losses = [entry["loss"] for entry in expected if "loss" in entry]
    assert len(losses) == 50 and losses[-1] < losses[0] - 0.5
    assert sorted(p.name for p in mine.glob("checkpoint-*")) == sorted(p.name for p in folder.glob("checkpoint-*"))
    for place in ("", "checkpoint-40"):
        found, reference = (AutoModelForCausalLM.from_pretrained(each / place) for each in (mine, folder))
        for name, weight in reference.state_dict().items():
            assert (found.state_dict()[name] - weight).abs().max() < 1e-4, name
    guessed, theirs = (np.load(each / "predictions.npy") for each in (mine, folder))
    assert guessed.shape == theirs.shape
    assert (guessed == theirs).mean() > 0.99  # the largest of two nearly equal numbers may be another
    resumed = run(tmp_path / "resumed", 2, constraints=MESHES[mesh], resume=str(mine / "checkpoint-40"))
    check_histories([e for e in resumed if "train_loss" not in e], [e for e in expected if "train_loss" not in e])


@pytest.mark.slow
def test_a_run_goes_on_under_another_plan(alone: Any, tmp_path: Path):
    _, expected = alone
    run(tmp_path / "out", 2, constraints=MESHES["tp2"], max_steps=50)
    checkpoint = str(tmp_path / "out" / "checkpoint-40")
    resumed = run(tmp_path / "resumed", 2, constraints=MESHES["dp2 zero2"], resume=checkpoint)
    check_histories([e for e in resumed if "train_loss" not in e], [e for e in expected if "train_loss" not in e])


@pytest.mark.slow
def test_accumulated_gradients_of_a_plain_module_are_means_over_batches(tmp_path: Path):
    """``Trainer`` divides by the number of batches where the model does not take ``num_items_in_batch``.

    A parameter is frozen. The "best" checkpoint, here the one with the largest loss, is loaded at the end.
    """
    short = dict(plain=True, max_steps=12, gradient_accumulation_steps=3, logging_steps=2, eval_steps=4, save_steps=4)
    short |= dict(load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True)
    expected = run(tmp_path / "alone", 1, **short)
    check_histories(run(tmp_path / "out", 2, constraints=MESHES["dp2 zero2"], **short), expected)
    found, reference, first = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "alone", "out/checkpoint-4")
    )
    assert set(found) == set(reference)
    for name, weight in reference.items():
        assert (found[name] - weight).abs().max() < CLOSE, name
        assert torch.equal(found[name], first[name])


def test_every_field_of_the_installed_version_is_sorted():
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    tables = [HONOURED, frozenset(IRRELEVANT), frozenset(REFUSED), frozenset({"accelerator_config"})]
    assert fields - frozenset().union(*tables) == set()
    assert sum(map(len, tables)) == len(frozenset().union(*tables))


def arguments(**options: Any) -> TrainingArguments:
    return TrainingArguments(use_cpu=True, report_to=[], **options)


def test_default_arguments_are_accepted(tmp_path: Path):
    check_arguments(arguments(output_dir=str(tmp_path)))


@pytest.mark.parametrize("name", [*REFUSED])
def test_each_refused_field_is_named(name: str, tmp_path: Path):
    given = arguments(output_dir=str(tmp_path))
    setattr(given, name, {"optim": "adafactor", "average_tokens_across_devices": False}.get(name, "unusual"))
    with pytest.raises(TrainerError, match=rf"{name}=.*expected"):
        check_arguments(given)


def test_an_unknown_field_is_refused_unless_it_has_its_default(tmp_path: Path):
    @dataclasses.dataclass
    class Newer(TrainingArguments):
        added_later: int = 3

    check_arguments(Newer(output_dir=str(tmp_path), use_cpu=True, report_to=[]))
    with pytest.raises(TrainerError, match="added_later=4"):
        check_arguments(Newer(output_dir=str(tmp_path), use_cpu=True, report_to=[], added_later=4))


def make(folder: Path, kind: type[Trainer] = PartitionedTrainer, **options: Any) -> Any:
    given = options.pop("args", None) or arguments(output_dir=str(folder), disable_tqdm=True)
    options = {"model": build(), "args": given, "data_collator": pad, "train_dataset": Texts(9, 1)} | options
    return kind(**options)


def test_split_batches_of_accelerate_are_refused(tmp_path: Path):
    given = arguments(output_dir=str(tmp_path), accelerator_config={"split_batches": True})
    with pytest.raises(TrainerError, match=r"accelerator_config\.split_batches=True"):
        make(tmp_path, args=given)


def test_what_the_constructor_cannot_honour_is_refused(tmp_path: Path):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(TrainerError, match="optimizer_cls_and_kwargs"):
        make(tmp_path, model=model, optimizers=(optimizer, None))
    with pytest.raises(TrainerError, match="model_init"):
        make(tmp_path, model=None, model_init=build)
    with pytest.raises(TrainerError, match="compute_loss_func"):
        make(tmp_path, compute_loss_func=lambda outputs, labels, num_items_in_batch: outputs.loss)


def test_a_loss_of_a_subclass_is_refused(tmp_path: Path):
    class Weighted(PartitionedTrainer):
        def compute_loss(self, model: nn.Module, inputs: Any, **options: Any) -> Any:
            return 2 * super().compute_loss(model, inputs, **options)

    with pytest.raises(TrainerError, match="Weighted overrides compute_loss"):
        make(tmp_path, Weighted)


def test_evaluation_needs_a_data_set_when_the_plan_is_made(tmp_path: Path):
    trainer = make(tmp_path)
    with pytest.raises(TrainerError, match="eval_dataset"):
        trainer.evaluate(Texts(3, 5))


def test_one_process_trains_without_a_launcher(tmp_path: Path):
    """A plan of one rank: the whole history of the unmodified ``Trainer``."""
    options = dict(output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=4, logging_steps=1)
    options |= dict(disable_tqdm=True, save_strategy="no", learning_rate=3e-3)
    histories = []
    for kind in (PartitionedTrainer, Trainer):
        trainer = make(tmp_path, kind, args=arguments(**options))
        trainer.train()
        histories.append(trainer.state.log_history)
    check_histories(*histories)


def test_a_stream_is_read_in_its_own_order(tmp_path: Path):
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            texts = Texts(14, 1, vary=False)
            return (texts[i] for i in range(len(texts)))

    options = dict(output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=4, logging_steps=1)
    options |= dict(disable_tqdm=True, save_strategy="no", learning_rate=3e-3)
    histories = []
    for kind in (PartitionedTrainer, Trainer):
        trainer = make(tmp_path, kind, args=arguments(**options), train_dataset=Stream())
        trainer.train()
        histories.append(trainer.state.log_history)
    check_histories(*histories)


def test_bf16_trains_short_parameters_with_float32_copies(tmp_path: Path):
    options = dict(output_dir=str(tmp_path), max_steps=8, per_device_train_batch_size=4, logging_steps=1, bf16=True)
    trainer = make(tmp_path, args=arguments(**options, disable_tqdm=True, save_strategy="no", learning_rate=1e-2))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert {s.dtype for s in trainer.plan.program.states.values() if s.kind == "parameter"} == {"bfloat16"}
    assert {p.dtype for p in trainer.engine.parameters()} == {torch.float32}


class Mean(nn.Module):
    """A model whose loss is a mean over all samples and positions, padded or not."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.tokens(input_ids) * attention_mask[..., None] + labels[..., None]).square().mean()}


def test_batches_that_cannot_be_padded_exactly_are_refused_beforehand(tmp_path: Path):
    options = dict(output_dir=str(tmp_path), per_device_train_batch_size=4, disable_tqdm=True, save_strategy="no")
    with pytest.raises(TrainerError, match=r"the last batch of the train data set has 1 samples .*drop_last"):
        make(tmp_path, model=Mean(), args=arguments(**options), train_dataset=Texts(9, 1, vary=False)).train()
    with pytest.raises(TrainerError, match="samples of the train data set have several lengths"):
        make(tmp_path, model=Mean(), args=arguments(**options), train_dataset=Texts(8, 1)).train()
    whole = arguments(**options, dataloader_drop_last=True, max_steps=2)
    make(tmp_path, model=Mean(), args=whole, train_dataset=Texts(9, 1, vary=False)).train()


def test_a_version_whose_loop_calls_other_methods_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(Trainer, "_clip_grad_norm")
    with pytest.raises(TrainerError, match=r"has no Trainer\._clip_grad_norm"):
        make(tmp_path)


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    with pytest.raises(TrainerError, match="has no folder 'engine'"):
        make(tmp_path).train(resume_from_checkpoint=str(folder))
