"""Where checkpoints and weights are written, nothing of anybody else's is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from partitioner import CheckpointError
from partitioner.runtime.checkpoint import atomic_folder
from tests.helpers.net_training import one_rank, run
from tests.helpers.paths import ROOT


def test_what_others_have_put_into_a_folder_stays(tmp_path: Path):
    """Notes in a checkpoint, the checkpoints of a run whose folder is named by mistake, a model's configuration."""
    engine, optimizer, checkpoints = one_rank(tmp_path / "run", every=1)
    run(engine, optimizer, checkpoints, 1)
    checkpoints.wait()
    (tmp_path / "run" / "notes.txt").write_text("of mine")
    for write in (engine.save, engine.export_weights):
        write(tmp_path / "run")
        write(tmp_path / "run")
        assert (tmp_path / "run" / "notes.txt").read_text() == "of mine"
        engine.load(tmp_path / "run" / "step-0000000001", optimizer)
        assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_what_others_have_put_into_a_folder_stays_where_replacing_it_was_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine, optimizer, _ = one_rank(tmp_path)
    engine.save(tmp_path / "out", optimizer)
    (tmp_path / "out" / "notes.txt").write_text("of mine")
    with monkeypatch.context() as patched:

        def cut_short(target: atomic_folder.CheckpointTarget) -> None:
            if target.old.exists():
                raise OSError("lost the disk")

        patched.setattr(atomic_folder.CheckpointTarget, "_move_foreign_files", cut_short)
        with pytest.raises(CheckpointError, match="lost the disk"):
            engine.save(tmp_path / "out", optimizer)
    assert not (tmp_path / "out" / "notes.txt").exists()
    engine.save(tmp_path / "out", optimizer)
    assert (tmp_path / "out" / "notes.txt").read_text() == "of mine"


def test_places_that_no_folder_can_take_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine, optimizer, _ = one_rank(tmp_path)
    (tmp_path / "file").write_text("of mine")
    monkeypatch.chdir(tmp_path)
    for place, told in (("file", "is a file"), (".", "is the current folder"), ("/proc", "is a mount point")):
        with pytest.raises(CheckpointError, match=told):
            engine.save(place, optimizer)
    with pytest.raises(CheckpointError, match="cannot be written"):
        engine.save("file/out", optimizer)
    assert (tmp_path / "file").read_text() == "of mine"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_text("of mine")
    with pytest.raises(CheckpointError, match=r"other weights, model\.safetensors"):
        engine.export_weights("model")
    assert (tmp_path / "model" / "model.safetensors").read_text() == "of mine"


def test_a_link_to_a_folder_stays_one(tmp_path: Path):
    engine, optimizer, _ = one_rank(tmp_path)
    (tmp_path / "large disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "large disk")
    for _ in range(2):
        engine.save(tmp_path / "out", optimizer)
    assert (tmp_path / "out").is_symlink()
    engine.load(tmp_path / "large disk", optimizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["large disk", "out"]


def test_a_script_that_has_ended_does_not_wait_for_a_first_rank_that_may_be_gone(tmp_path: Path):
    script = (
        "import sys, threading\nfrom pathlib import Path\n"
        "from partitioner.runtime.checkpoint.atomic_folder import CheckpointTarget\n"
        "target = CheckpointTarget(Path(sys.argv[1]), 'f' * 15)\n"
        "threading.Thread(target=target.wait_until_complete, args=(1800.0,)).start()\n"
        "raise SystemExit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], cwd=ROOT, timeout=120)
    assert done.returncode == 3
