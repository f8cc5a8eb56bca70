"""Ranks on several hosts: each host's folder is copied to the others' through the store that the ranks met at.

One rank of every host does it. What is copied are the files that ranks write about themselves. A thread talks to the
store: a host that has lost the store's host waits for its answer for as long as TCP does.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from pathlib import Path
from typing import Protocol

from runtime.files import write_bytes

_KINDS = ("times", "json", "place", "failure", "addresses")
_CAUSE = "cause"
_EVERY_S = 1.0


class Store(Protocol):
    """What is asked of a ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class Mirror:
    """Host ``host`` of ``num_hosts``, whose own ranks are ``ranks`` and write to ``folder``.

    ``store``: a client of its own, since one that waits for a key serves nobody else.
    """

    def __init__(self, folder: Path, store: Store, host: int, num_hosts: int, ranks: frozenset[int]) -> None:
        self.folder = folder
        self.store = store
        self.host = host
        self.others = [h for h in range(num_hosts) if h != host]
        self.ranks = ranks

        self._wanted = threading.Event()
        self._done = threading.Condition()
        self._begun = self._ended = 0  # exchanges
        self._closed = False
        self._thread: threading.Thread | None = None

    def exchange(self, within_s: float = _EVERY_S) -> None:
        """Give what this host's ranks have written, take what others have given; at most for so long.

        From the first time on this is also done every second.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
            self._thread.start()
        with self._done:
            next_one = self._begun + 1
            self._wanted.set()
            self._done.wait_for(lambda: self._ended >= next_one, within_s)

    def close(self) -> None:
        """Exchange nothing any more."""
        self._closed = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(_EVERY_S)

    def _run(self) -> None:
        while not self._closed:
            with self._done:
                self._begun += 1
            self._exchange()
            with self._done:
                self._ended = self._begun
                self._done.notify_all()
            self._wanted.wait(_EVERY_S)
            self._wanted.clear()

    def _exchange(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # the store's host may be the one that has died
            own = {name: base64.b64encode(content).decode() for name, content in self._own().items()}
            self.store.set(_key(self.host), json.dumps(own))
            for other in self.others:
                if self.store.check([_key(other)]):
                    self._take(json.loads(self.store.get(_key(other))))

    def _own(self) -> dict[str, bytes]:
        names = [f"rank-{rank}.{kind}" for rank in self.ranks for kind in _KINDS]
        found = {}
        for name in [*names, _CAUSE]:
            with contextlib.suppress(FileNotFoundError):
                found[name] = (self.folder / name).read_bytes()
        return found

    def _take(self, files: dict[str, str]) -> None:
        for name in sorted(files, key=lambda n: n.endswith(".times")):  # last: it says that a rank is there
            if name == _CAUSE and (self.folder / name).exists():
                continue
            write_bytes(self.folder / name, base64.b64decode(files[name]), durable=False)


def _key(host: int) -> str:
    return f"watch {host}"
