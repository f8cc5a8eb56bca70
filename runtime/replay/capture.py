"""Record the operators that run between two points of a step, and repeat them on the same memory.

A :class:`Capture` has two implementations. :class:`CudaGraphCapture` records kernels in CUDA graphs: a replay launches
all kernels of a graph at once. :class:`OperatorCapture` records PyTorch operators with their tensors, and calls them
again one by one. It works on every device, needs no compiler and is not faster than the step itself: it exists to
check, on a machine without a GPU, that a program can be recorded and that its replay computes the same results.

Both have one rule: a recorded operator reads and writes the memory that it had when it was recorded. The caller must
keep tensors that are read or written from outside at their addresses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.runtime.comm.storage import record_storages, share_memory
from partitioner.runtime.errors import ReplayError

Replay = Callable[[], object]


class Capture(Protocol):
    """Interface of an object that records the operators that run on one thread, so that they can be repeated. A
    recording consists of segments, the operators between :meth:`begin` and :meth:`end`. ``kind``: name of this way of
    recording, such as ``"CUDA graphs"``, for reports. ``collectives``: whether a segment may contain collectives, which
    the device then runs by itself.
    """

    kind: str
    collectives: bool

    def begin(self) -> None:
        """Start to record a segment: all operators of this thread until :meth:`end`."""

    def end(self) -> Replay | None:
        """End the segment that is being recorded, and return a function that repeats its operators; ``None`` if the
        segment has no operators. When this returns, the operators of the segment have run once.
        """

    def abort(self) -> None:
        """Drop the segment that is being recorded, after an error. Do nothing if there is none."""

    def watch(self) -> AbstractContextManager[list[str]]:
        """Return a context manager that detects whether the code inside, which is not being recorded, could be
        recorded. Its value is a list, which finally has a text for each place at which the host read a value from the
        device. Such code cannot be recorded, because a replay does not run it on the host.
        """

    def pause_watch(self) -> AbstractContextManager[None]:
        """Return a context manager, for use inside of :meth:`watch`, in which reads of device values by the host, such
        as those of collectives, are ignored.
        """


def copy_values(target: Tensor, source: Tensor) -> None:
    """Copy the values of ``source`` to ``target``, a tensor of the same shape and strides, unless both have the same
    memory. Expanded dims (stride 0) are allowed.
    """
    if source is target or (share_memory(source, target) and source.data_ptr() == target.data_ptr()):
        return
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def _reads_device(operator: Any, result: Any) -> bool:
    """Return whether the host needs values from the device to run ``operator``, which returned ``result``: the result
    is a number, or its shape depends on the data.
    """
    tags = getattr(operator, "tags", ())
    depends = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    return depends or any(isinstance(x, bool | int | float) for x in pytree.tree_leaves(result))


class _DeviceReadMode(TorchDispatchMode):
    """Torch dispatch mode that adds a text to ``found`` for each operator for which the host reads values from the
    device, unless ``paused`` is true.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused and _reads_device(func, result):
            self.found.append(str(func))
        return result


class _OperatorLog(TorchDispatchMode):
    """Torch dispatch mode that appends a function without arguments to ``calls`` for each operator that runs. The
    function repeats the operator on the same tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Replay] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _reads_device(func, result):
            raise ReplayError(
                f"the host reads a value from the device in {func}, so that the step cannot be recorded and replayed; "
                "expected operators whose results have fixed sizes: run with execution='compiled' or 'eager'"
            )
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        fresh = [not any(share_memory(x, other) for other in given) for x in results]
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        if any(fresh):
            self.calls.append(_repeat_into(func, args, kwargs, results, fresh))
        elif writes:
            self.calls.append(lambda: func(*args, **kwargs))
        return result  # if neither applies, the result is a view, which stays valid in replays


def _repeat_into(func: Any, args: Any, kwargs: Any, results: Sequence[Tensor], fresh: Sequence[bool]) -> Replay:
    """Return a function that runs the operator ``func`` again with ``args`` and ``kwargs``, and copies its results to
    ``results``, the tensors that it returned when it was recorded. ``fresh``: for each of these, whether it has its own
    memory; views are not copied.
    """

    def repeat() -> None:
        again = [x for x in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
        for old, new, own in zip(results, again, fresh, strict=True):
            if own:
                copy_values(old, new)

    return repeat


class OperatorCapture:
    """Records PyTorch operators in Python, and repeats them one by one. One object records all segments of a step, one
    after the other. Collectives are not recorded, so a segment ends before each collective. All results of recorded
    operators keep their memory between steps.
    """

    kind = "recorded operators"
    collectives = False

    def __init__(self) -> None:
        self._log: _OperatorLog | None = None
        self._watch: _DeviceReadMode | None = None

    def begin(self) -> None:
        log = self._log = _OperatorLog()
        record_storages(log.calls.append)
        log.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> Replay | None:
        log = self._log
        self.abort()
        if log is None or not log.calls:
            return None
        calls = tuple(log.calls)

        def replay() -> None:
            for call in calls:
                call()

        return replay

    def abort(self) -> None:
        if self._log is not None:
            self._log.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            record_storages(None)
            self._log = None

    @contextmanager
    def watch(self) -> Iterator[list[str]]:
        watch = self._watch = _DeviceReadMode()
        try:
            with watch:
                yield watch.found
        finally:
            self._watch = None

    @contextmanager
    def pause_watch(self) -> Iterator[None]:
        watch = self._watch
        if watch is None:
            yield
            return
        watch.paused = True
        try:
            yield
        finally:
            watch.paused = False


class CudaGraphCapture:
    """Records kernels in CUDA graphs. All graphs of one engine share a memory pool, in which a tensor's memory is
    reused after the program has released the tensor, as in a step that is not recorded. Graphs of one step must be
    replayed in the order in which they were recorded. NCCL's collectives are recorded like kernels.
    """

    kind = "CUDA graphs"
    collectives = True

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._on_stream: Any = None

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        torch.cuda.synchronize(self.device)
        self._on_stream = torch.cuda.stream(self._stream)
        self._on_stream.__enter__()
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog and a data loader's, may call CUDA meanwhile.
        self._graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")

    def end(self) -> Replay | None:
        graph, self._graph = self._graph, None
        if graph is None:
            return None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            graph.capture_end()
        self._leave_stream()
        graph.replay()
        return graph.replay

    def abort(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            with suppress(RuntimeError):  # the error that is being reported may have ended the capture
                graph.capture_end()
            self._leave_stream()

    def _leave_stream(self) -> None:
        self._on_stream.__exit__(None, None, None)
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    @contextmanager
    def watch(self) -> Iterator[list[str]]:
        found: list[str] = []
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in caught:
            if "synchroniz" in str(warning.message):
                found.append(str(warning.message))
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def pause_watch(self) -> AbstractContextManager[None]:
        return nullcontext()  # NCCL's collectives do not synchronise


def capture_for(device: torch.device, pool: Any = None) -> Capture:
    """Return the object that records steps on ``device``: CUDA graphs on a GPU, otherwise a list of operators.
    ``pool``: the memory pool that CUDA graphs share; ``None``: a new one.
    """
    return CudaGraphCapture(device, pool) if device.type == "cuda" else OperatorCapture()
