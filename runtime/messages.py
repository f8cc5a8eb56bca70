"""What a rank and its owner say to each other: ``(kind, content)``, pickled as plain bytes.

``Connection.send`` would hand tensors over as shared memory, which a process that ends at once cannot keep alive.
"""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any


def put(connection: Connection, kind: str, content: Any = None) -> None:
    connection.send_bytes(pickle.dumps((kind, content)))


def get(connection: Connection) -> tuple[str, Any]:
    """The next message. Raises ``EOFError`` or ``OSError`` when the other side is gone."""
    kind, content = pickle.loads(connection.recv_bytes())
    return kind, content
