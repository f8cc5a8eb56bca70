"""The command ``torchrun --nproc-per-node 4 -m partitioner.runtime plan.json --weights folder/``: train a plan.

Rank 0 prints one line per step. Ranks are watched: if one fails, is killed or stalls, its instruction and graph node
are printed, and reported to torchrun, which ends the others immediately. With ``--checkpoints`` a restarted run
continues from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from partitioner.passes.errors import PartitionError
from partitioner.passes.ir.serialize import dtype_of
from partitioner.runtime.checkpoint.series import Checkpoints
from partitioner.runtime.comm.failure_origin import is_secondary
from partitioner.runtime.comm.rendezvous import init_process_group
from partitioner.runtime.debug import check_finite
from partitioner.runtime.engine.defaults import select_local_gpu
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.errors import InstructionError, LaunchError
from partitioner.runtime.observe.metrics import LossSpikes, StepLog
from partitioner.runtime.program.load import load_program
from partitioner.runtime.program.program import Program
from partitioner.runtime.watch.watchdog import Watch

_PATIENCE_S = 5.0

_Number = TypeVar("_Number", int, float)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run ``python -m partitioner.runtime``, which trains a plan, with the command line ``arguments`` (by default those
    of the process), and exit the process. The exit status is 0, 1 if a rank failed, 2 for a wrong command line, 130
    after Ctrl-C, or 143 if a signal asked the run to end and its last step is saved.
    """
    options = _build_parser().parse_args(arguments)
    status = 0
    try:
        record(_train_patiently)(options)
    except SystemExit as error:
        status = int(error.code or 0)
    except PartitionError as error:
        status = 1
        print(f"rank {_read_rank()}: {type(error).__name__}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
        print(f"rank {_read_rank()}: interrupted", file=sys.stderr)
    except BaseException:
        status = 1
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # otherwise Gloo's shutdown sometimes aborts the process


def _make_bounded_parser(kind: Callable[[str], _Number], least: _Number) -> Callable[[str], _Number]:
    """Return a function for the argument ``type`` of ``argparse`` that parses a number with ``kind`` (``int`` or
    ``float``) and rejects numbers below ``least``.
    """

    def number(text: str) -> _Number:
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"expected {least} or more, got {text}")
        return value

    return number


def _build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line of ``python -m partitioner.runtime``."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m partitioner.runtime",
        description="Train a plan on its ranks for some steps.",
    )
    parser.add_argument("plan", help="JSON file of the plan, as Plan.save() writes it")
    parser.add_argument(
        "--weights",
        help="safetensors file, or folder of such files, with the initial weights; default: small random weights",
    )
    parser.add_argument(
        "--steps",
        type=_make_bounded_parser(int, 0),
        default=1,
        help="number of steps in total, including those before a restart",
    )
    parser.add_argument(
        "--batch",
        default="random",
        help="safetensors file with one global batch, which every step reads: input path -> tensor; or 'random': "
        "a new random batch for each step",
    )
    parser.add_argument("--lr", type=_make_bounded_parser(float, 0.0), default=1e-4, help="learning rate of AdamW")
    parser.add_argument(
        "--clip",
        type=_make_bounded_parser(float, 0.0),
        help="maximum norm of the gradient over all parameters; larger gradients are scaled down; default: no clipping",
    )
    parser.add_argument("--save", help="folder to which the weights are written at the end, as safetensors files")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        help="folder for checkpoints that all ranks can read; training continues from the newest one in it",
    )
    parser.add_argument(
        "--every",
        type=_make_bounded_parser(int, 0),
        default=100,
        help="number of steps between checkpoints; the last step is saved in any case",
    )
    parser.add_argument(
        "--copies-every",
        type=_make_bounded_parser(int, 0),
        default=0,
        help="number of steps between copies of the training state in the memory of the nodes, for faster "
        "restarts; needs --checkpoints; 0: no copies",
    )
    parser.add_argument(
        "--offload-folder", help="folder on the local disk of each node, for plans that keep optimizer states on disk"
    )
    parser.add_argument(
        "--metrics", help="folder for the metrics of each step: metrics.jsonl and event files of TensorBoard"
    )
    parser.add_argument(
        "--check", action="store_true", help="stop with an error if the loss or a gradient is NaN or infinite"
    )
    parser.add_argument(
        "--patience",
        type=_make_bounded_parser(float, 0.0),
        default=300.0,
        help="seconds without progress on any rank after which the ranks count as stalled",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of random weights, random batches and dropout")
    parser.add_argument(
        "--timeout",
        type=_make_bounded_parser(float, 0.0),
        default=600.0,
        help="maximum seconds that a rank waits for another rank in a collective",
    )
    return parser


def _train_patiently(options: argparse.Namespace) -> None:
    """Train the plan according to the command line ``options``. If this rank fails only because it has lost another
    one, wait for some seconds before raising the error, so that torchrun ends this rank and records only the first
    cause.
    """
    try:
        _train_plan(options)
    except Exception as error:
        if error.failure.secondary if isinstance(error, InstructionError) else is_secondary(error):
            time.sleep(_PATIENCE_S)
        raise


def _has_gpu() -> bool:
    """Return whether each rank of this node has its own GPU: there are at least as many GPUs as ranks on the node, or
    each rank sees only its own GPU.
    """
    if not torch.cuda.is_available():
        return False
    ranks, count = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    alone = count == 1 and "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ",")
    if count >= ranks or alone:
        return True
    if os.environ.get("LOCAL_RANK") == "0":
        print(
            f"this node has {ranks} ranks but only {count} GPUs: the ranks run on the CPU, over Gloo", file=sys.stderr
        )
    return False


def _train_plan(options: argparse.Namespace) -> None:
    """Create the engine of this rank, and train the plan according to the command line ``options``. If they name a
    folder for weights, save the weights at the end.
    """
    program = load_program(options.plan)
    _check_world(program)
    if options.copies_every and options.checkpoints is None:
        raise LaunchError("--copies-every needs --checkpoints, a folder that all ranks share: name one")
    with ExitStack() as stack:
        if "RANK" in os.environ:
            on_gpu = _has_gpu()
            if on_gpu:
                select_local_gpu()
            init_process_group("nccl" if on_gpu else "gloo", timedelta(seconds=options.timeout))
        engine = Engine(options.plan, options.weights, seed=options.seed, offload_folder=options.offload_folder)
        stack.callback(sys.stdout.flush)
        if "RANK" in os.environ:
            stack.enter_context(Watch(engine, patience_s=options.patience))
        _run_steps(engine, options)
        if options.save:
            engine.export_weights(options.save)
        engine.barrier()


def _run_steps(engine: Engine, options: argparse.Namespace) -> None:
    """Train ``engine`` for the number of steps in the command line ``options``, with the requested metrics, checkpoints
    and checks. After a SIGTERM or SIGINT, exit the process with status 143 when the last step is saved.
    """
    trained = [p for p in engine.parameters() if p.requires_grad]
    program = engine.program
    train = program.objective == "train" and any(state.requires_grad for state in program.states.values())
    on_gpu = all(p.is_cuda for p in trained)  # torch's default passes over memory three times as often as fused kernels
    optimizer = None
    if train and trained:  # a stage may be frozen
        optimizer = torch.optim.AdamW(trained, lr=options.lr, fused=on_gpu or None)
    if optimizer is not None:
        engine.on_disk(optimizer)
    kept = None
    if options.checkpoints is not None:
        kept = Checkpoints(
            options.checkpoints,
            engine,
            optimizer,
            every=options.every,
            copies_every=options.copies_every,
            signals=(signal.SIGTERM, signal.SIGINT),
        )
        found = kept.restore()
        if _read_rank() == 0:
            where = (
                "no checkpoint found, training starts from the beginning"
                if found is None
                else f"training continues from step {found}"
            )
            print(f"{options.checkpoints}: {where}", file=sys.stderr, flush=True)
    spikes = LossSpikes()
    first, told = _read_rank() == 0, False
    with StepLog(engine, options.plan, options.metrics if first else None) as log:
        for batch in _iterate_batches(engine.program, options, engine.steps):
            loss = engine.step(batch)
            if options.check:
                check_finite(engine, batch)
            more = {}
            if options.clip is not None and train:
                more["norm"] = engine.clip_grad_norm_(options.clip).item()
            if optimizer is not None:
                optimizer.step()
            metrics = log.step(loss, **more)
            if first:
                print(metrics, *(f"{k} {v:.4f}" for k, v in more.items()), sep="  ", flush=True)
            spike = spikes.see(metrics.step, metrics.loss) if metrics.loss is not None else None
            if spike is not None and first:
                print(f"loss spike: {spike}", file=sys.stderr, flush=True)
            if kept is not None:
                kept.after_step()
                told = told or _print_copies(kept)
                if kept.interrupted:
                    break
    if kept is not None:
        kept.close()
        if kept.interrupted:
            if first:
                print(f"stopped by a signal: step {engine.steps} is saved in {options.checkpoints}", file=sys.stderr)
            sys.exit(
                128 + signal.SIGTERM
            )  # not complete: the status tells the launcher that the run can be started again


def _print_copies(kept: Checkpoints) -> bool:
    """On rank 0, print the memory that the in-memory copies of the training state take. Return ``True`` if there is a
    copy; otherwise return ``False``, so that the caller tries again later. ``kept``: the checkpoints of the training,
    which make these copies.
    """
    copies = kept.copies
    if copies is None or not copies.nbytes:
        return False
    if _read_rank() == 0:
        told = f"{copies.nbytes / 2**30:.2f} GiB of this node's memory, in {copies.folder}"
        print(f"copies of the state: {told}", file=sys.stderr, flush=True)
    return True


def _iterate_batches(program: Program, options: argparse.Namespace, done: int) -> Iterator[dict[str, Tensor]]:
    fixed = None if options.batch == "random" else _check_batch_file(Path(options.batch))
    for index in range(done, options.steps):
        yield make_random_batch(program, options.seed + index) if fixed is None else fixed


def _check_batch_file(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except Exception as error:
        raise LaunchError(f"the batch {path} cannot be read as safetensors: {error}") from None


def make_random_batch(program: Program, seed: int) -> dict[str, Tensor]:
    """Return a random global batch for ``program``, as a dict: path of the input -> tensor. It is equal on all ranks
    with the same ``seed``. Integers are below the number of rows of the smallest embedding table; masks are all ones.
    """
    generator = torch.Generator().manual_seed(seed)
    high = _find_smallest_table(program)
    batch = {}
    for data in program.inputs:
        dtype = dtype_of(data.dtype)
        if dtype.is_floating_point:
            batch[data.path] = torch.randn(data.shape, generator=generator).to(dtype)
        elif dtype == torch.bool or "mask" in data.path:
            batch[data.path] = torch.ones(data.shape, dtype=dtype)
        else:
            batch[data.path] = torch.randint(high, data.shape, generator=generator, dtype=dtype)
    return batch


def _find_smallest_table(program: Program) -> int:
    """Return the smallest number of rows of an embedding table of ``program``, below which random token ids are drawn;
    2 if ``program`` has no table.
    """
    rows = []
    for stage in program.stages:
        for call in stage.calls:
            block = program.blocks[call.block]
            named = dict(zip(block.states, call.states, strict=True))
            for node in block.nodes:
                if node.get("target") == "aten.embedding.default":
                    table = named.get(node["args"][0].get("node", ""))
                    rows += [program.states[table].shape[0]] if table else []
    return min(rows, default=2)


def _check_world(program: Program) -> None:
    """Raise :class:`LaunchError` if torchrun did not start the number of ranks that ``program`` needs."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != program.world_size:
        mesh = ", ".join(f"{axis}={n}" for axis, n in program.mesh.items() if n > 1) or "one rank"
        raise LaunchError(
            f"the plan is for {program.world_size} ranks ({mesh}), {world_size} were started: use "
            f"torchrun --nproc-per-node {program.world_size} (nodes x processes per node), or plan for {world_size}"
        )


def _read_rank() -> int:
    return int(os.environ.get("RANK", "0"))
