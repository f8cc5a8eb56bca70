"""Damaged and hostile files: each is read, or refused with a typed error. None runs code, writes, hangs or fills
memory."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import random
import resource
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from partitioner import (
    Engine,
    LaunchError,
    LayoutError,
    PartitionError,
    Plan,
    ScheduleTable,
    Topology,
    WeightsError,
    partition,
    read_layout,
)
from partitioner.passes.errors import InternalError
from partitioner.passes.ir.serialize import block_from_data
from partitioner.plans.files import FORMAT, RANK_FORMAT, VERSION, export_ranks
from partitioner.pretrained.configuration import read_configuration
from partitioner.runtime.checkpoint.file_sums import METADATA, compute_file_sum
from partitioner.runtime.checkpoint.save import TRAINING
from partitioner.runtime.checkpoint.training_state import unpack_plain_data
from partitioner.runtime.execute.bind import SharedDerivatives
from partitioner.runtime.family.load import load_family
from partitioner.runtime.observe.trace_events import read_spans
from partitioner.runtime.program.load import load_disk_bytes, load_placement, load_program
from partitioner.runtime.state.weights import FileWeights
from tests.helpers.mutations import guarded_reading, mutate_bytes, mutate_tree, write_syntax
from tests.helpers.runtime_programs import Net, program_of_net
from tests.helpers.square_layers import Tower, inputs

pytestmark = pytest.mark.usefixtures("without_baselines")

SECONDS = 10.0  # of processor time for one file
MOST_BYTES = 1 << 30  # of memory that all files together may add


@dataclass(frozen=True)
class FileKind:
    """One kind of file: a valid one, how it is damaged and how it is read.

    ``content``: the bytes of a valid file. ``name``: what the file is called. ``syntax``: of its bytes. ``read``: reads
    the file at a path. ``tree``: its content as dicts and lists, if it can be damaged in this form; ``write`` turns it
    into bytes again. ``seal``: corrects checksums after the change, as an attacker would.
    """

    content: bytes
    name: str
    syntax: str
    read: Callable[[Path], object]
    tree: Any = None
    write: Callable[[Any, str], bytes] = write_syntax
    seal: Callable[[Path], object] = lambda path: None

    def damage(self, draw: random.Random) -> bytes:
        """Return the content of the file with random changes."""
        content = self.content
        if self.tree is not None and draw.random() < 0.75:
            try:
                content = self.write(mutate_tree(self.tree, draw), self.syntax)
            except (ValueError, TypeError, RecursionError, yaml.YAMLError):  # what the syntax has no form for
                return mutate_bytes(content, self.syntax, draw)
            if draw.random() < 0.9:
                return content
        return mutate_bytes(content, self.syntax, draw)


def seal_plan(path: Path) -> None:
    """Write the checksum that belongs to the content of the plan file ``path``, and its format and version."""
    try:
        content = json.loads(path.read_bytes())
        kind = RANK_FORMAT if path.name.startswith("rank") else FORMAT
        body = {k: v for k, v in content.items() if k not in ("format", "version", "checksum")}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        checksum = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(json.dumps({"format": kind, "version": VERSION, "checksum": checksum, **body}))
    except (ValueError, AttributeError, RecursionError):
        return


def seal_checkpoint(path: Path) -> None:
    """Write length and checksum of ``path``, a file of a checkpoint, into the manifest beside it."""
    manifest = path.with_name("manifest.json")
    content = json.loads(manifest.read_text())
    total = compute_file_sum(path)
    content["files"][path.name] = {"nbytes": total.nbytes, "sha256": total.sha256}
    manifest.write_text(json.dumps(content))


def read_plan(path: Path) -> None:
    """Read a plan, all of its programs, and the graphs of their blocks."""
    plan = Plan.load(path)
    family = load_family(path)
    load_placement(path)
    load_disk_bytes(path, 0)
    for program in (plan.program, family.first, *(one.program for one in family.further.values())):
        read_blocks(program)


def read_blocks(program: Any) -> None:
    for name, block in program.blocks.items():
        block_from_data(name, block.nodes, block.states, block.inputs)


def read_config(path: Path) -> None:
    read_configuration(path)


def write_plain_data(tree: Any, _: str) -> bytes:
    """Return ``tree`` as ``torch.save`` writes it."""
    file = io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()


def read_weights(path: Path) -> None:
    """Read all tensors of a folder of safetensors files."""
    weights = FileWeights(path.parent)
    try:
        for name in list(weights._files):
            weights.spec(name)
    finally:
        weights.close()


LAYOUTS: dict[str, tuple[str, Any]] = {
    "deepspeed.json": ("json", {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }),
    "transformers.json": ("json", {"output_dir": "x", "per_device_train_batch_size": 2, "bf16": True}),
    "accelerate.yaml": ("yaml", {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 8, "num_machines": 1,
        "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": False}, "mixed_precision": "bf16",
    }),
    "delegating.yaml": ("yaml", {
        "distributed_type": "DEEPSPEED", "num_processes": 4,
        "deepspeed_config": {"deepspeed_config_file": "deepspeed.json", "zero3_init_flag": True},
    }),
    "bridge.yaml": ("yaml", {
        "model": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "num_layers": 8},
        "train": {"micro_batch_size": 1, "global_batch_size": 8},
    }),
}  # fmt: skip
TEXTS = {
    "megatron.sh": (
        "shell",
        "#!/bin/bash\nTP=2\nARGS=(\n  --tensor-model-parallel-size $TP\n  --micro-batch-size 2 --bf16\n)\n"
        "case ${SIZE:-7b} in\n  7b) PP=2;;\n  *) PP=4;;\nesac\n[ $TP -gt 1 ] && ARGS+=(--sequence-parallel)\n"
        'run() {\n  torchrun --nproc-per-node 8 train.py "$@"\n}\nif [[ $PP == 2 ]]; then\n  run ${ARGS[@]} '
        "--pipeline-model-parallel-layout 'Ett|ttL' --global-batch-size $((8 * (TP + 2)))\nfi\n",
    ),
    "torchtitan.toml": ("toml", "[training]\nseq_len = 128\n[parallelism]\ntensor_parallel_degree = 2\n"),
    "torchtitan.py": (
        "python",
        "LENGTH = 4096\ndef base():\n    return Trainer.Config(training=TrainingConfig(seq_len=LENGTH))\n"
        "def larger() -> Trainer.Config:\n    config = base()\n    config.parallelism.tensor_parallel_degree = 2\n"
        "    return config\n",
    ),
}
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 64,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FileKind]:
    """All kinds of files, with valid content."""
    folder = tmp_path_factory.mktemp("valid")
    found: dict[str, FileKind] = {}

    plan = partition(Tower(), Topology.local(2), inputs())
    text = plan.save(folder / "plan.json").read_bytes()
    found["plan"] = FileKind(text, "plan.json", "json", read_plan, json.loads(text), seal=seal_plan)
    text = export_ranks(plan, folder)[1].read_bytes()
    found["rank"] = FileKind(
        text, "rank_00001.json", "json", lambda p: read_blocks(load_program(p)), json.loads(text), seal=seal_plan
    )

    tree = plan.topology.model_dump(mode="json", exclude_defaults=True)
    for name, cluster in (("cluster.yaml", {"machine": "dgx-h100", "nodes": 2}), ("measured.yaml", tree)):
        found[name] = FileKind(write_syntax(cluster, "yaml"), name, "yaml", Topology.load, cluster)
    found["cluster.json"] = FileKind(write_syntax(tree, "json"), "cluster.json", "json", Topology.load, tree)

    for name, (syntax, tree) in LAYOUTS.items():
        found[name] = FileKind(write_syntax(tree, syntax), name, syntax, read_layout, tree)
    for name, (syntax, text) in TEXTS.items():
        form = "megatron" if syntax == "shell" else None
        found[name] = FileKind(text.encode(), name, syntax, lambda p, form=form: read_layout(p, form))  # type: ignore[misc]

    text = ScheduleTable.of("1f1b", 2, 4).save(folder / "schedule.csv").read_bytes()
    found["schedule"] = FileKind(text, "schedule.csv", "csv", lambda p: ScheduleTable.load(p).timetable(2, 4), None)
    found["config"] = FileKind(write_syntax(CONFIG, "json"), "config.json", "json", read_config, CONFIG)
    span = {"ph": "X", "name": "0F0", "ts": 1.0, "dur": 2.0, "pid": 0, "tid": 0,
            "args": {"kind": "measured", "rank": 0, "stage": 0, "index": 0, "op": "F", "waiting_s": 0.0}}  # fmt: skip
    trace = {"traceEvents": [span, {**span, "name": "0B0"}], "displayTimeUnit": "ms"}
    found["trace"] = FileKind(write_syntax(trace, "json"), "trace.json", "json", read_spans, trace)
    index = {"metadata": {"total_size": 16}, "weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}
    found["index"] = FileKind(write_syntax(index, "json"), "model.safetensors.index.json", "json", read_weights, index)
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, folder / "model-1.safetensors")
    found["weights"] = FileKind(
        (folder / "model-1.safetensors").read_bytes(), "model-1.safetensors", "binary", read_weights
    )

    engine = Engine(program_of_net(), Net())
    optimizer = torch.optim.AdamW(engine.parameters())
    saved = engine.save(folder / "checkpoint", optimizer).directory

    def read_checkpoint(path: Path) -> None:
        engine.load(path.parent, optimizer)

    for name, syntax in (("manifest.json", "json"), (TRAINING, "binary"), (METADATA, "binary")):
        content = (saved / name).read_bytes()
        tree = {"manifest.json": json.loads, TRAINING: unpack_plain_data, METADATA: lambda _: None}[name](content)
        found[f"checkpoint {name}"] = FileKind(
            content, name, syntax, read_checkpoint, tree, write_syntax if syntax == "json" else write_plain_data,
            (lambda _: None) if syntax == "json" else seal_checkpoint,
        )  # fmt: skip
    return found


@pytest.fixture
def around(kinds: dict[str, FileKind], tmp_path: Path) -> Callable[[FileKind], Path]:
    """What gives the path for a damaged file, in a folder that has the valid files that belong to it."""
    valid = {name: kind for name, kind in kinds.items() if not name.startswith("checkpoint")}

    def place(kind: FileKind) -> Path:
        folder = tmp_path / "files"
        shutil.rmtree(folder, ignore_errors=True)
        if kind.name in ("manifest.json", TRAINING, METADATA):
            shutil.copytree(find_valid_folder(tmp_path) / "checkpoint", folder)
            return folder / kind.name
        folder.mkdir()
        for other in valid.values():
            if other.name != kind.name and other.name.startswith(("model", "deepspeed")):
                (folder / other.name).write_bytes(other.content)
        return folder / kind.name

    return place


def find_valid_folder(tmp_path: Path) -> Path:
    """Return the folder with the valid files, which the fixture of the module made beside the test's own folder."""
    return next(p for p in tmp_path.parent.iterdir() if p.name.startswith("valid"))


def read_damaged(kind: FileKind, path: Path) -> str:
    """Read a damaged file, and return the name of the typed error or ``read``. Raise ``AssertionError`` for other
    errors.
    """
    try:
        with guarded_reading(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind.read(path)
    except InternalError as error:
        raise AssertionError(f"untyped: {error}") from error
    except PartitionError as error:
        if len(str(error)) < 10:
            raise AssertionError(f"no message: {error!r}") from error
        return type(error).__name__
    return "read"


def fuzz(kinds: dict[str, FileKind], around: Callable[[FileKind], Path], seed: int, count: int) -> dict[str, set[str]]:
    """Read ``count`` damaged files, as many of each kind, and return the outcomes of each kind. Raise
    ``AssertionError`` with the seeds of files that end otherwise than they may, or if the process has grown.
    """
    outcomes: dict[str, set[str]] = {name: set() for name in kinds}
    wrong: list[str] = []
    for kind in kinds.values():  # what is imported on first use is imported now
        path = around(kind)
        path.write_bytes(kind.content)
        kind.read(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        name = list(kinds)[number % len(kinds)]
        draw = random.Random(f"{seed} {number}")
        path = around(kinds[name])
        path.write_bytes(kinds[name].damage(draw))
        kinds[name].seal(path)
        try:
            outcomes[name].add(read_damaged(kinds[name], path))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            cause = error.__cause__ or error
            wrong.append(f"{name}, seed {seed} {number}: {type(cause).__name__}: {str(cause)[:300]}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:40])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MOST_BYTES, f"the process has grown by {grown / 2**20:.0f} MiB"
    return outcomes


def test_damaged_files_are_read_or_refused(kinds: dict[str, FileKind], around: Callable[[FileKind], Path]) -> None:
    outcomes = fuzz(kinds, around, 0, 220)
    assert all(found - {"read"} for found in outcomes.values()), outcomes  # of each kind some are refused


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_damaged_files_are_read_or_refused(
    seed: int, kinds: dict[str, FileKind], around: Callable[[FileKind], Path]
) -> None:
    fuzz(kinds, around, seed, 250)


class Runs:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.called = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.called


@pytest.mark.parametrize("call", [(exec, "raise SystemExit"), (open, "/tmp/never", "w"), (getattr, dict, "fromkeys")])
@pytest.mark.parametrize("name", [METADATA, TRAINING])
def test_pickles_in_checkpoints_call_nothing(
    name: str, call: tuple[Any, ...], kinds: dict[str, FileKind], around: Callable[[FileKind], Path]
) -> None:
    kind = kinds[f"checkpoint {name}"]
    path = around(kind)
    if name == METADATA:
        path.write_bytes(pickle.dumps(Runs(*call)))
    else:
        torch.save({"steps": Runs(*call)}, path)
    kind.seal(path)
    assert read_damaged(kind, path) == "DamagedCheckpointError"


@pytest.mark.parametrize(
    "change",
    [{"relative_path": "../elsewhere"}, {"relative_path": "/dev/zero"}, {"offset": -1}, {"length": 1}, {"length": "x"}],
    ids=str,
)
def test_parts_of_tensors_lie_in_files_of_the_checkpoint(
    change: dict[str, Any], kinds: dict[str, FileKind], around: Callable[[FileKind], Path]
) -> None:
    kind = kinds[f"checkpoint {METADATA}"]
    path = around(kind)
    metadata = pickle.loads(kind.content)
    vars(next(iter(metadata.storage_data.values()))).update(change)
    path.write_bytes(pickle.dumps(metadata))
    kind.seal(path)
    assert read_damaged(kind, path) == "DamagedCheckpointError"


@pytest.mark.parametrize("name", ["../other.safetensors", "/dev/zero", "..", "a/b.safetensors", 7])
def test_files_outside_of_a_folder_are_not_read(
    name: object, kinds: dict[str, FileKind], around: Callable[[FileKind], Path]
) -> None:
    index, manifest = around(kinds["index"]), dict(kinds["checkpoint manifest.json"].tree)
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(WeightsError, match="the name of a file in the same folder"):
        FileWeights(index.parent)
    path = around(kinds["checkpoint manifest.json"])
    path.write_text(json.dumps({**manifest, "files": {str(name): {"nbytes": 1, "sha256": ""}, **manifest["files"]}}))
    assert read_damaged(kinds["checkpoint manifest.json"], path) == "DamagedCheckpointError"


def test_files_that_are_nested_too_deeply_are_damaged(
    kinds: dict[str, FileKind], around: Callable[[FileKind], Path], tmp_path: Path
) -> None:
    nested = "[" * 200_000 + "]" * 200_000
    path = around(kinds["checkpoint manifest.json"])
    path.write_text(nested)
    assert read_damaged(kinds["checkpoint manifest.json"], path).endswith("CheckpointError")
    trace = tmp_path / "trace.json"
    trace.write_text(nested)
    with pytest.raises(LaunchError):
        read_spans(trace)


def test_folders_that_others_can_write_to_are_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "derived"
    SharedDerivatives(folder)
    folder.chmod(0o777)
    with pytest.raises(LaunchError, match="other users may write to it"):
        SharedDerivatives(folder)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(LaunchError, match="it is a link"):
        SharedDerivatives(tmp_path / "link")


def test_a_device_in_place_of_a_configuration_is_refused() -> None:
    with guarded_reading(SECONDS), pytest.raises(LayoutError, match="no regular file"):
        read_layout("/dev/zero", "deepspeed")
