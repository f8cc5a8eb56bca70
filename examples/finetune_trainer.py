"""A script for transformers' Trainer, which trains by a plan: the import and the constructor are all that changed.

    pip install -e '.[trainer]'  # in the folder of this repository
    torchrun --nproc-per-node 2 examples/finetune_trainer.py --mesh tp=2
    torchrun --nproc-per-node 2 examples/finetune_trainer.py --steps 40 --resume   # goes on, under another plan

A small Llama learns sequences of several lengths, and is evaluated and saved in between. The planner chooses how the
processes share the model, unless ``--mesh`` says it.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from partitioner import Constraints, PartitionedTrainer

VOCAB, IGNORED, SHORT, LONG = 256, -100, 20, 32


class Texts(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Sequences that count upwards, each from its own start by its own stride."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.start = torch.randint(VOCAB, (count,), generator=generator).tolist()
        self.stride = torch.randint(1, 5, (count,), generator=generator).tolist()
        self.length = torch.randint(SHORT, LONG + 1, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        places = range(self.length[index])
        return {"input_ids": [(self.start[index] + self.stride[index] * place) % VOCAB for place in places]}


def pad(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch as long as its longest sample. What is padded is masked, and no target."""
    length = max(len(sample["input_ids"]) for sample in samples)
    tokens, mask, labels = [], [], []
    for sample in samples:
        own, rest = sample["input_ids"], length - len(sample["input_ids"])
        tokens.append(own + [0] * rest)
        mask.append([1] * len(own) + [0] * rest)
        labels.append(own + [IGNORED] * rest)
    return {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask), "labels": torch.tensor(labels)}


def build() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="out/trainer")
    parser.add_argument("--mesh", default="", metavar="NAME=VALUE,...", help="constraints on the plan, pp=2,dp=2")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the folder")
    options = parser.parse_args()

    arguments = TrainingArguments(
        output_dir=options.folder,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=options.steps,
        learning_rate=3e-3,
        warmup_steps=2,
        weight_decay=0.1,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        save_total_limit=2,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    trainer = PartitionedTrainer(
        model=build(),
        args=arguments,
        data_collator=pad,
        train_dataset=Texts(100, 0),
        eval_dataset=Texts(20, 1),
        constraints=Constraints.parse(options.mesh) if options.mesh else None,
    )
    if trainer.is_world_process_zero():
        print(trainer.plan.summary())  # the first rank makes the plan, for which the others wait in train
    trainer.train(resume_from_checkpoint=options.resume or None)
    trainer.save_model()
    if dist.is_initialized():
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # Gloo's tear-down may abort after all is done


if __name__ == "__main__":
    main()
