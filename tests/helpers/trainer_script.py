"""A script for ``Trainer`` that two lines turn into one for ``PartitionedTrainer``: one process, or torchrun.

    python trainer_script.py '{"output_dir": "alone", ...}'
    torchrun --nproc-per-node 2 trainer_script.py '{"constraints": {"tp": 2}, "output_dir": "planned", ...}'

The argument is a JSON dict. ``constraints``: of the plan; without it the unmodified ``Trainer`` trains. ``resume``: a
checkpoint. ``samples``: number of training samples. ``vary``: whether samples have several lengths. ``plain``: train a
module that does not take ``num_items_in_batch``, with a frozen parameter. ``predict``: write predictions, too. The rest
are fields of ``TrainingArguments``. The first rank writes ``history.json`` into the output folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import EvalPrediction, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCAB, IGNORED, SHORT, LONG = 64, -100, 9, 16


class Texts(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Tokens that count upwards from a random start by a random stride; some are noise.

    ``vary``: samples have from ``SHORT`` to ``LONG`` tokens.
    """

    def __init__(self, count: int, seed: int, vary: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(VOCAB, (count, 1), generator=generator)
        strides = torch.randint(1, 4, (count, 1), generator=generator)
        noise = torch.randint(VOCAB, (count, LONG), generator=generator) * (
            torch.rand(count, LONG, generator=generator) < 0.2
        )
        self.tokens = ((starts + strides * torch.arange(LONG) + noise) % VOCAB).tolist()
        lengths = torch.randint(SHORT, LONG + 1, (count,), generator=generator).tolist()
        self.lengths = lengths if vary else [LONG] * count

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.tokens[index][: self.lengths[index]]}


def pad(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch as long as its longest sample; what is padded is masked, and no target."""
    length = max(len(s["input_ids"]) for s in samples)
    tokens, mask, labels = [], [], []
    for sample in samples:
        own = sample["input_ids"]
        rest = length - len(own)
        tokens.append(own + [0] * rest)
        mask.append([1] * len(own) + [0] * rest)
        labels.append(own + [IGNORED] * rest)
    return {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask), "labels": torch.tensor(labels)}


class Plain(nn.Module):
    """A model outside of transformers, whose loss is the mean over the targets of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.tokens(input_ids)) * attention_mask[..., None])
        targets = labels[:, 1:].flatten()
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=IGNORED), "logits": logits}


def build(plain: bool = False) -> nn.Module:
    torch.manual_seed(0)
    if plain:
        model = Plain()
        model.tokens.weight.requires_grad_(False)
        return model
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def accuracy(found: EvalPrediction) -> dict[str, float]:
    counted = found.label_ids[:, 1:] != IGNORED
    right = found.predictions[:, :-1] == found.label_ids[:, 1:]
    return {"accuracy": float(right[counted].mean())}


def guesses(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.argmax(-1)


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    constraints, resume = options.pop("constraints", None), options.pop("resume", None)
    samples, vary = options.pop("samples", 42), options.pop("vary", True)
    predict, plain = options.pop("predict", False), options.pop("plain", False)
    arguments = TrainingArguments(use_cpu=True, report_to=[], disable_tqdm=True, **options)
    trainer_class: Any = Trainer
    more: dict[str, Any] = {}
    if constraints is not None:
        from partitioner import Constraints, PartitionedTrainer
        from partitioner.solve.search import search

        for name in ("compare_standard_layouts", "without_laggards", "faster_batches"):
            setattr(search, name, lambda *_, **__: ())  # as the fixture without_baselines, which saves time
        trainer_class, more = PartitionedTrainer, {"constraints": Constraints(**constraints)}
    trainer = trainer_class(
        model=build(plain),
        args=arguments,
        data_collator=pad,
        train_dataset=Texts(samples, 1, vary),
        eval_dataset=Texts(10, 2, vary),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=guesses,
        **more,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    folder = Path(arguments.output_dir)
    if predict:
        found = trainer.predict(Texts(10, 3, vary))
        if trainer.is_world_process_zero():
            np.save(folder / "predictions.npy", found.predictions)
    if trainer.is_world_process_zero():
        (folder / "history.json").write_text(json.dumps(trainer.state.log_history))
    if constraints is not None:
        torch.distributed.barrier()
        sys.stdout.flush()
        os._exit(0)  # Gloo's tear-down may abort after all is done


if __name__ == "__main__":
    main()
