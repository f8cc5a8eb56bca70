"""Lightning's Trainer around an engine: its processes, loop, callbacks and loggers; the plan's layout and collectives.

    pip install lightning
    python examples/lightning_style.py --devices 4 --steps 20
    python examples/lightning_style.py --devices 2 --steps 40              # another plan, on from the last checkpoint
    torchrun --nproc-per-node 4 examples/lightning_style.py --devices 4

What Lightning does: it starts the processes and their process group, runs the loop and the hooks, and calls callbacks
and loggers. What the engine does: forward, backward, the reduction of gradients, the type that the model computes in,
clipping, and checkpoints. What would be done twice is left out: the strategy does not wrap the module, optimisation is
manual, and of the Trainer's arguments ``precision``, ``accumulate_grad_batches``, ``gradient_clip_val`` and
``enable_checkpointing`` stay as here. (Plan with ``partition(..., precision="bf16")`` instead.)

The LightningModule holds no parameter: the model's are in the engine, this rank's shards of them. So what Lightning
reads off a module (its summary, ``ModelCheckpoint``, ``StochasticWeightAveraging``) has nothing to read.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import Checkpoints, Constraints, Engine, Loader, Topology, partition

BATCH, SEQ, VOCAB = 8, 32, 128
LEARNING_RATE, WARMUP, CLIP = 3e-3, 4, 1.0


def build() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Counting:
    """Sequences that count upwards, each from its own start by its own stride: a map-style dataset."""

    def __len__(self) -> int:
        return 4 * VOCAB

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (index % VOCAB + (1 + index // VOCAB) * torch.arange(SEQ)) % VOCAB
        return {"input_ids": tokens, "labels": tokens}


def optimizer_of(parameters: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW, and its warm-up."""
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))


class Unwrapped(DDPStrategy):
    """Lightning's processes and process group without torch's DDP: the plan says what is reduced, where and when."""

    def configure_ddp(self) -> None:
        pass


class Rest:
    """A loader's batches up to the last step, with a length.

    Of a loader without one the Trainer asks for a batch ahead of the step, and a checkpoint would count it as read.
    """

    def __init__(self, loader: Loader, steps: int) -> None:
        self.loader = loader
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        return islice(self.loader, self.steps)


class Planned(L.LightningModule):
    """A model as its plan runs it."""

    def __init__(self, path: Path, steps: int, mesh: str = "", precision: str = "fp32") -> None:
        super().__init__()
        self.path, self.steps, self.mesh, self.precision = path, steps, mesh, precision
        self.automatic_optimization = False
        self.trusted = False
        self.prepare_data_per_node = False  # one process plans

    def prepare_data(self) -> None:
        """The first process plans; the others wait, and read the plan."""
        constraints = Constraints.parse(self.mesh or "")
        inputs = {name: torch.zeros(BATCH, SEQ, dtype=torch.long) for name in ("input_ids", "labels")}
        topology = Topology.local(self.trainer.world_size)
        plan = partition(build(), topology, inputs, precision=self.precision, constraints=constraints)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(self.path)
        print(plan.summary(), flush=True)

    def configure_model(self) -> None:
        """In the process group that Lightning has made; its ranks are the plan's."""
        self.engine = Engine(self.path, weights=build(), device=self.trainer.strategy.root_device)
        self.loader = Loader(Counting(), self.engine, seed=0)

    def configure_optimizers(self) -> Any:
        optimizer, schedule = optimizer_of([*self.engine.parameters()])
        return [optimizer], [schedule]

    def train_dataloader(self) -> Rest:
        return Rest(self.loader, self.steps - self.engine.steps)

    def training_step(self, batch: dict[str, Tensor], index: int) -> None:
        if not self.trusted:
            self.engine.trust_optimizer(self.optimizers())  # Lightning's wrapper: all it does is step the optimizer
            self.trusted = True
        loss = self.engine.step(batch, local=True)
        norm = self.engine.clip_grad_norm_(CLIP)
        self.optimizers().step()
        self.lr_schedulers().step()
        # the same on all ranks, so that nothing is synchronised; the size, since in a pipeline some get an empty batch
        self.log_dict({"loss": loss, "norm": norm}, prog_bar=True, batch_size=BATCH)
        self.log("step", float(self.engine.steps), batch_size=BATCH)  # what loggers count by, also in a resumed run


class Checkpointed(Callback):
    """``partitioner.Checkpoints`` in the Trainer's hooks: every rank writes its own shards, any plan reads them."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every

    def on_fit_start(self, trainer: L.Trainer, module: Planned) -> None:
        self.checkpoints = Checkpoints(
            self.folder,
            module.engine,
            trainer.optimizers[0],
            every=self.every,
            extra={"schedule": module.lr_schedulers(), "data": module.loader},
        )
        if self.checkpoints.restore() is not None and trainer.is_global_zero:
            print(f"going on from step {module.engine.steps}", flush=True)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.checkpoints.after_step()

    def on_train_end(self, trainer: L.Trainer, module: Planned) -> None:
        self.checkpoints.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4, help="of this machine")
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mesh", default="", metavar="NAME=VALUE,...", help="constraints on the plan, pp=2,dp=2")
    parser.add_argument("--precision", choices=["fp64", "fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=20, help="in all, those before the last checkpoint too")
    parser.add_argument("--folder", type=Path, default=Path("out/lightning"))
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    options = parser.parse_args()

    trainer = L.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=Unwrapped(),
        max_epochs=1,  # all steps that are left
        log_every_n_steps=1,
        logger=CSVLogger(options.folder, name="metrics"),
        callbacks=[Checkpointed(options.folder / "checkpoints", options.save_every)],
        enable_checkpointing=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Planned(options.folder / "plan.json", options.steps, options.mesh, options.precision))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's tear-down may abort after all is done


if __name__ == "__main__":
    main()
