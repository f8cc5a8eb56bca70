"""A script for ``L.Trainer``, by itself in one process or with ``PartitionedStrategy`` on two.

    python lightning_script.py '{"folder": "alone"}'
    python lightning_script.py '{"folder": "planned", "constraints": {"tp": 2}}'
    python lightning_script.py '{"folder": "out", "refused": true}'

The argument is a JSON dict. ``folder``: for results. ``constraints``: of the plan; without it Lightning trains by
itself. ``resume``: a checkpoint. ``points``: train a model on tuples instead of a language model. ``options``: of
``L.Trainer``. ``refused``: write what is raised for modules and trainers that a plan cannot honour. The first
rank writes ``history.json``: the logged values after each batch, sums of the trained weights, and evaluations after
training.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, LENGTH, SAMPLES, BATCH = 64, 16, 40, 4


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Tokens that count upwards from a random start by a random stride; some are noise."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(VOCAB, (count, 1), generator=generator)
        strides = torch.randint(1, 4, (count, 1), generator=generator)
        noise = torch.randint(VOCAB, (count, LENGTH), generator=generator)
        noise *= torch.rand(count, LENGTH, generator=generator) < 0.2
        self.tokens = (starts + strides * torch.arange(LENGTH) + noise) % VOCAB

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Language(L.LightningModule):
    """A small Llama, whose steps log the loss and an accuracy."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        found = self.model(**batch)
        right = (found.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).float().mean()
        self.log("train_loss", found.loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"train_accuracy": right, "half": 0.5})
        return found.loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = self.model(**batch).loss
        self.log("val_loss", loss)
        return {"loss": loss, "twice": 2 * loss}

    def configure_optimizers(self) -> dict[str, Any]:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Points(L.LightningModule):
    """A perceptron on tuples with batch statistics in a buffer, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))
        self.unused = nn.Linear(3, 3)
        self.net[3].bias.requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return {"loss": loss}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y), reduce_fx="mean")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class History(Callback):
    """The values that a trainer has after each batch and each evaluation, and what validation returns."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []
        self.samples: set[int] = set()  # numbers of samples of the training batches that this process has read

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        self.samples.add(len(batch[0] if isinstance(batch, list) else batch["input_ids"]))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.values.append({"rate": rate, **{k: float(v) for k, v in trainer.callback_metrics.items()}})

    def on_validation_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        if isinstance(outputs, dict):
            self.values.append({k: float(v) for k, v in outputs.items()})

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.values.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def make_loaders(points: bool) -> tuple[DataLoader[Any], DataLoader[Any]]:
    if not points:
        return DataLoader(Texts(SAMPLES, 1), BATCH, shuffle=True), DataLoader(Texts(10, 2), BATCH)
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(
        torch.randn(SAMPLES, 8, generator=generator), torch.randint(4, (SAMPLES,), generator=generator)
    )
    return DataLoader(data, BATCH, shuffle=True, drop_last=True), DataLoader(data, BATCH)


def make_trainer(folder: Path, constraints: dict[str, Any] | None, devices: int, **options: Any) -> L.Trainer:
    if constraints is not None:
        from partitioner import Constraints, PartitionedStrategy
        from partitioner.solve.search import search

        for name in ("compare_standard_layouts", "without_laggards", "faster_batches"):
            setattr(search, name, lambda *_, **__: ())  # as the fixture without_baselines, which saves time
        options["strategy"] = PartitionedStrategy(constraints=Constraints(**constraints))
    settings: dict[str, Any] = dict(
        accelerator="cpu",
        devices=devices,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        log_every_n_steps=1,
    )
    return L.Trainer(**settings | options)


def list_refusals(folder: Path) -> dict[str, str]:
    """What is raised for modules and trainers that a plan cannot honour, by a name of the case."""

    class Manual(Points):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    class Indexed(Points):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch_idx % 2 == 0 else None

    class Stepped(Points):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx)["loss"] * self.global_step}

    class Backward(Points):
        def backward(self, loss: Tensor) -> None:
            (2 * loss).backward()

    class Early(Points):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adagrad(self.net.parameters())

    class Vector(Points):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("rows", batch[0].sum(1))
            return super().training_step(batch, batch_idx)

    class Collecting(Points):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(batch[0].mean())
            return super().training_step(batch, batch_idx)

    data = make_loaders(points=True)[0]
    rest = DataLoader(data.dataset, 12, shuffle=True)
    shared = torch.utils.data.DistributedSampler(data.dataset, num_replicas=1, rank=0)  # type: ignore[arg-type]
    cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "manual": (Manual(), data, {}),
        "index": (Indexed(), data, {}),
        "step": (Stepped(), data, {}),
        "backward": (Backward(), data, {}),
        "states": (Early(), data, {}),
        "vector": (Vector(), data, {}),
        "kept": (Collecting(), data, {}),
        "callback": (Points(), data, {"callbacks": [StochasticWeightAveraging(1e-2)]}),
        "precision": (Points(), data, {"precision": "16-true"}),
        "anomaly": (Points(), data, {"detect_anomaly": True}),
        "iterator": (Points(), iter(data), {}),
        "last": (Points(), rest, {}),
        "sampler": (Points(), DataLoader(data.dataset, BATCH, sampler=shared), {}),
        "checkpoint": (Points(), data, {"ckpt_path": __file__}),
    }
    found = {}
    for name, (module, loader, options) in cases.items():
        path = options.pop("ckpt_path", None)
        trainer = make_trainer(folder, {}, 1, max_steps=2, limit_val_batches=0, enable_checkpointing=False, **options)
        try:
            trainer.fit(module, loader, ckpt_path=path)
            found[name] = "nothing"
        except ValueError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def main() -> None:
    given: dict[str, Any] = json.loads(sys.argv[1])
    folder, constraints = Path(given["folder"]), given.get("constraints")
    folder.mkdir(parents=True, exist_ok=True)
    if given.get("refused"):
        (folder / "refused.json").write_text(json.dumps(list_refusals(folder)))
        os._exit(0)
    L.seed_everything(0)
    module = Points() if given.get("points") else Language()
    history = History()
    saved = ModelCheckpoint(folder / "saved", filename="{step}", save_top_k=-1, save_on_train_epoch_end=True)
    planned = constraints is not None
    options = given.get("options", {}) | {"callbacks": [history, saved]}
    trainer = make_trainer(folder, constraints, 2 if planned else 1, **options)
    train, val = make_loaders(bool(given.get("points")))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*sync_dist=True")  # logged values are the same on all ranks
        trainer.fit(module, train, val, ckpt_path=given.get("resume"))
    found: dict[str, Any] = {"values": [*history.values], "samples": sorted(history.samples)}
    found["state"] = {name: float(x.double().sum()) for name, x in module.state_dict().items()}
    [found["validated"]] = trainer.validate(module, val, verbose=False)
    [found["first"]] = trainer.validate(
        module, val, ckpt_path=min((folder / "saved").iterdir(), key=lambda p: p.stat().st_mtime), verbose=False
    )
    if trainer.is_global_zero:
        (folder / "history.json").write_text(json.dumps(found))
    if planned:
        torch.distributed.barrier()
        sys.stdout.flush()
        os._exit(0)  # Gloo's tear-down may abort after all is done


if __name__ == "__main__":
    main()
