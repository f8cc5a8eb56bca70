"""Run one step of a plan on this machine, with every rank as a process over Gloo, or as a thread of this process."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.passes.faults import typed_errors
from partitioner.runtime.comm.failure_origin import is_rank_error, is_secondary
from partitioner.runtime.comm.thread_backend import ThreadWorld
from partitioner.runtime.engine.batches import check_batch
from partitioner.runtime.engine.defaults import make_one_step_folder
from partitioner.runtime.engine.engine import Engine
from partitioner.runtime.errors import Failure, InstructionError, LaunchError, RankError
from partitioner.runtime.execute.bind import BlockLibrary
from partitioner.runtime.launch.process_pool import (
    LocalRanks,
    RankResults,
    Run,
    StepFiles,
    collect_rank_results,
    join_rank_results,
    make_unread_gradients,
    run_program,
)
from partitioner.runtime.program.load import load_placement, load_program
from partitioner.runtime.program.precision import convert_precision
from partitioner.runtime.program.program import Program
from partitioner.runtime.state.parameters import check_weights, list_names_read
from partitioner.runtime.state.weights import (
    FileWeights,
    TensorWeights,
    Weights,
    list_module_tensors,
    open_weights,
    write_weights,
)
from partitioner.runtime.watch.stragglers import Monitor

Model = nn.Module | Mapping[str, Tensor] | str | Path

_SHARED_MEMORY = Path("/dev/shm")


@typed_errors("run_local()", passing=is_rank_error)
def run_local(
    plan: Any,
    model: Model,
    inputs: Any,
    *,
    precision: str | None = None,
    timeout: float = 300.0,
    outputs: bool = True,
    grads: bool = True,
    seed: int = 0,
    ranks: LocalRanks | None = None,
) -> Run:
    """Run one step of ``plan`` with every rank as a process of this machine, over Gloo, and return the whole results.

    Args:
        plan: a plan, a :class:`Program`, or the path of a plan file.
        model: the weights: a module, a dict of tensors, or the path of a safetensors file or folder.
        inputs: the whole global batch, in the form that the model takes.
        precision: floating dtype to use instead of the planned one, such as ``fp64`` for comparisons.
        timeout: seconds after which all ranks are ended.
        outputs, grads: whether to collect the model's results, and the gradients.
        seed: seed of the model's random operators.
        ranks: running processes to use, which stay alive; by default new ones are started and ended.

    Raise :class:`RankError` if a rank fails (the others are ended within a second; the message ends with the first
    cause), :class:`RankTimeout` after ``timeout``, :class:`WeightsError` or :class:`BatchError` if ``model`` or
    ``inputs`` do not match the plan, and :class:`LaunchError` if ``ranks`` has too few processes.
    """
    program = convert_precision(load_program(plan), precision)
    if ranks is not None and ranks.num_ranks < program.world_size:
        raise LaunchError(
            f"the plan is for {program.world_size} ranks, but the pool has {ranks.num_ranks}: create a larger pool"
        )
    weights = open_weights(model, list_names_read(program))
    check_weights(program, weights)
    batch = check_batch(program, inputs)
    with (
        tempfile.TemporaryDirectory(prefix="run-", dir=_find_scratch_folder(program)) as name,
        _open_ranks(program, ranks) as pool,
    ):
        folder = Path(name)
        (folder / "program.json").write_text(program.model_dump_json(exclude_defaults=True))
        torch.save(batch, folder / "inputs.pt")
        files = StepFiles(
            program=str(folder / "program.json"),
            weights=str(_ensure_weights_file(program, weights, folder / "weights.safetensors")),
            inputs=str(folder / "inputs.pt"),
            results=[str(folder / f"{rank}.pt") for rank in range(program.world_size)],
            watch=str(folder / "watch"),
        )
        arguments = (files, load_placement(plan), seed, outputs, grads)
        pool.call(run_program, *arguments, timeout=timeout, watch=Monitor(folder / "watch", timeout))
        parts = [RankResults(rank, **torch.load(path, weights_only=True)) for rank, path in enumerate(files.results)]
    return join_rank_results(program, parts, _compute_unread_gradients(program, model))


@typed_errors("run_threads()", passing=is_rank_error)
def run_threads(
    plan: Any,
    model: Model,
    inputs: Any,
    *,
    precision: str | None = None,
    timeout: float = 300.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Run:
    """Run one step of ``plan`` with every rank as a thread of this process, on ``device``, and return the whole
    results.

    Args:
        plan: a plan, a :class:`Program`, or the path of a plan file.
        model: the weights: a module, a dict of tensors, or the path of a safetensors file or folder.
        inputs: the whole global batch, in the form that the model takes.
        precision: floating dtype to use instead of the planned one, such as ``fp64`` for comparisons.
        timeout: seconds that a rank waits for the others.
        seed: seed of the model's random operators.

    Raise :class:`RankError` if a rank fails, :class:`WeightsError` or :class:`BatchError` if ``model`` or ``inputs`` do
    not match the plan.
    """
    device = torch.device(device)
    program = convert_precision(load_program(plan), precision)
    weights = open_weights(model, list_names_read(program))
    check_weights(program, weights)
    batch = check_batch(program, inputs)
    world = ThreadWorld(program.world_size, device, timeout)
    library = BlockLibrary(program, world.device)
    parts: dict[int, RankResults] = {}
    failures: list[Failure] = []

    def work(rank: int) -> None:
        """Run the step of ``rank`` in this thread, and store its results. If it fails, release the ranks that wait for
        this rank.
        """
        try:
            communicator = world.communicator(rank)
            engine = Engine(
                program,
                weights,
                seed=seed,
                keep_outputs=True,
                communicator=communicator,
                library=library,
                offload_folder=make_one_step_folder(),
            )
            engine.step(batch)
            parts[rank] = collect_rank_results(engine, outputs=True, grads=True)
        except Exception as error:
            failure = (
                error.failure
                if isinstance(error, InstructionError)
                else Failure(rank, str(error), type(error).__name__, secondary=is_secondary(error))
            )
            failures.append(failure)
            world.abort(str(failure))

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}") for rank in range(program.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if isinstance(weights, FileWeights):
        weights.close()
    if failures:
        raise RankError(tuple(failures), program.world_size)
    return join_rank_results(program, [parts[r] for r in sorted(parts)], _compute_unread_gradients(program, model))


def _open_ranks(program: Program, ranks: LocalRanks | None) -> Any:
    return LocalRanks(program.world_size) if ranks is None else nullcontext(ranks)


def _find_scratch_folder(program: Program) -> Path | None:
    """Return the folder for the temporary files through which local ranks get their weights and return their results:
    ``/dev/shm``, a folder in memory, if it has space for twice the weights and results of ``program``; otherwise
    ``None``, which means the system's temporary folder.
    """
    needed = 4 * sum(torch.Size(s.shape).numel() * 8 for s in program.states.values())
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > needed:
        return _SHARED_MEMORY
    return None


def _ensure_weights_file(program: Program, weights: Weights, path: Path) -> Path:
    """Return the path of a file or folder with ``weights``, the weights that ``program`` reads. All ranks map it into
    memory. If the weights are already in files, these are used; otherwise the file ``path`` is written.
    """
    if isinstance(weights, FileWeights):
        return Path(weights.origin)
    assert isinstance(weights, TensorWeights)
    content: dict[str, Tensor] = {}
    for name, state in program.states.items():
        if state.parts:
            content |= {p: weights.tensors[p] for p in state.parts}
            continue
        found = next((n for n in (name, *state.aliases) if weights.spec(n) is not None), None)
        if found is not None:
            content[name] = weights.tensors[found]
    return write_weights(content, path)


def _compute_unread_gradients(program: Program, model: Model) -> dict[str, Tensor]:
    if program.objective != "train" or not isinstance(model, nn.Module):
        return {}
    return make_unread_gradients(program, list_module_tensors(model))
