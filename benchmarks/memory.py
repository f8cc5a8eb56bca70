"""How much memory a training step takes at its fullest, as torch's CPU allocator counts it.

All that was allocated since before the parameters were made counts: parameters, gradients, activations, what is
gathered. Gloo's own buffers are no tensors, and do not.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.common import Step

_MARK = "measured step"


def peak_bytes(build: Callable[[], Step]) -> int:
    """The most bytes of tensors that are alive in the third step of what ``build`` makes, over what was there before.

    What it makes is gone afterwards.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = build()
        for _ in range(2):
            step()
        gc.collect()
        with record_function(_MARK):
            step()
    del step
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    mark = next(e for e in events if e.get("name") == _MARK and e.get("ph") == "X")
    # the total knows what threads of a library give back; mapped files are told without one
    told = (e for e in events if e.get("name") == "[memory]" and e["args"]["Total Allocated"])
    changes = sorted(told, key=lambda e: e["ts"])
    before = changes[0]["args"]["Total Allocated"] - changes[0]["args"]["Bytes"]
    inside = [e for e in changes if mark["ts"] <= e["ts"] <= mark["ts"] + mark["dur"]]
    return max(e["args"]["Total Allocated"] for e in inside) - before
