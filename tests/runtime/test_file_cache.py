"""Files that processes share: damage is noticed, others see whole files, and a full disk is no error."""

from __future__ import annotations

import logging
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from partitioner.runtime.file_cache import FileCache, open_cache


@contextmanager
def no_room() -> Iterator[None]:
    """Every write to a file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_what_is_written_is_read(tmp_path: Path):
    kept = open_cache(tmp_path / "new" / "folder")
    assert kept.read("code") is None
    assert kept.write("code", b"abc" * 100)
    assert kept.read("code") == b"abc" * 100
    assert kept.write("code", b"")
    assert open_cache(tmp_path / "new" / "folder").read("code") == b""


@pytest.mark.parametrize("length", [0, 5, 30, 60, 300])
def test_a_file_that_is_cut_off_is_removed(tmp_path: Path, length: int, caplog: pytest.LogCaptureFixture):
    kept = FileCache(tmp_path)
    kept.write("code", b"abc" * 100)
    path = tmp_path / "code"
    path.write_bytes(path.read_bytes()[:length])
    with caplog.at_level(logging.WARNING):
        assert kept.read("code") is None
    assert f"{path} is damaged" in caplog.text
    assert not path.exists()


def test_a_changed_byte_is_noticed_wherever_it_is(tmp_path: Path):
    kept = FileCache(tmp_path)
    kept.write("code", b"abc" * 10)
    whole = (tmp_path / "code").read_bytes()
    for place in range(len(whole)):
        (tmp_path / "code").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert kept.read("code") is None, place
    (tmp_path / "code").write_bytes(whole)
    assert kept.read("code") == b"abc" * 10


def test_readers_see_whole_files_while_two_write(tmp_path: Path):
    """A part of a file would be noticed as damage and read as nothing."""
    kept, contents = FileCache(tmp_path), [letter * 200_000 for letter in (b"a", b"b")]
    kept.write("code", contents[0])
    threads = [threading.Thread(target=lambda c=c: [kept.write("code", c) for _ in range(50)]) for c in contents]
    for thread in threads:
        thread.start()
    found = []
    while any(thread.is_alive() for thread in threads):
        found.append(kept.read("code"))
    for thread in threads:
        thread.join()
    assert found and set(found) <= {*contents}
    assert [path.name for path in tmp_path.iterdir()] == ["code"]


def test_a_full_disk_is_told_once_and_leaves_no_part(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    kept = FileCache(tmp_path)
    kept.write("old", b"old")
    with caplog.at_level(logging.WARNING), no_room():
        assert not kept.write("code", b"abc" * 100)
        assert not kept.write("old", b"new")
        with kept.hold_lock("code") as held:
            assert held
    assert kept.read("code") is None
    assert kept.read("old") == b"old"
    assert caplog.text.count(f"files cannot be kept in {tmp_path}") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"old", "code.lock"}


def test_a_folder_that_cannot_be_made_or_that_others_write_to_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with caplog.at_level(logging.WARNING):
        for folder in (tmp_path / "file" / "folder", tmp_path / "open"):
            kept = open_cache(folder)
            assert not kept.write("code", b"abc")
            assert kept.read("code") is None
            with kept.hold_lock("code") as held, kept.hold_lock("code", wait=False) as twice:
                assert held and twice
            assert f"{folder} is not used to keep files" in caplog.text
    assert "other users may write to it" in caplog.text


def test_one_at_a_time_holds_a_lock(tmp_path: Path):
    kept = FileCache(tmp_path)
    with kept.hold_lock("graph") as held:
        with kept.hold_lock("graph", wait=False) as twice:
            assert held and not twice
        with kept.hold_lock("other", wait=False) as other:
            assert other
    with kept.hold_lock("graph", wait=False) as later:
        assert later
