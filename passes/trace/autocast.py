"""Trace regions of ``torch.autocast`` in a model's forward with the casts that torch would make.

Inside :func:`trace_autocast`, the operators of such a region are traced one by one, after their operands were cast. The
graph then contains every cast and no region, and code in forward that reads a tensor's dtype sees the dtype of a real
run.

There is no list of the operators whose operands are cast. Instead, :func:`find_cast_dtype` runs an operator on fake
tensors with autocast on, and looks for the dtype to which the operands must be cast by hand to compute the same with
autocast off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp import autocast_mode
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.passes.errors import UnsupportedError

aten = torch.ops.aten

DEVICES = ("cpu", "cuda")  # device types whose autocast regions can be traced
Asked = tuple[str, torch.dtype]  # (device type, dtype) of an autocast region
_DECOMPOSE = "apart"  # the operator must be traced as the operators into which it decomposes
# Operators that only move or copy numbers, so that it makes no difference whether they are before or after a cast.
_COPY_OPERATORS = frozenset({aten._to_copy, aten.clone, aten._unsafe_view, aten._reshape_copy, aten.lift_fresh})
# GPUs have a kernel for these that takes all operands in the dtype of the region. A run on fake tensors does not show
# this.
_WHOLE_ON_GPU = frozenset(
    {aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input, aten.gru_cell.default}
)
_known: dict[Any, Any] = {}


@contextmanager
def trace_autocast(device: str | None, line: Callable[[], str]) -> Iterator[None]:
    """Return a context for tracing a model's forward, in which autocast regions cast the operands of traced operators
    as they would on a device of the type ``device``. If ``device`` is ``None``, nothing is cast, which is right for a
    model in float64.

    Tensors are on the CPU during a trace, so a region that forward opens for the CPU is opened for ``device`` instead.

    Args:
        device: ``cpu``, ``cuda`` or ``None``.
        line: returns the line of the model's forward that is running, as text for error messages.
    """
    plain_init, plain_call = autocast_mode.autocast.__init__, proxy_tensor.proxy_call

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        own = device if device_type == "cpu" and device is not None else device_type
        plain_init(self, own, *args, **kwargs)

    def call(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        """Trace a call of the operator ``func`` with ``args`` and ``kwargs``, and return its result. This replaces
        torch's own function for tracing a call. Operands are cast as autocast would cast them. If autocast casts inside
        of the operator, the operators into which it decomposes are traced instead.

        ``mode``: torch's dispatch mode that records the trace. ``pre_dispatch``: whether the trace records operators
        before autograd and autocast handle them; if not, nothing is cast.
        """
        region = _read_autocast_request(device)
        with _disable_torch_autocast():
            if region is None or not pre_dispatch:
                return plain_call(mode, func, pre_dispatch, args, kwargs)
            to = find_cast_dtype(func, args, kwargs, region, line)
            if to is not _DECOMPOSE:

                def cast(value: Any) -> Any:
                    if to is None or not _is_cast(value) or value.dtype == to:
                        return value
                    return plain_call(mode, aten.to.dtype, pre_dispatch, (value, to), {})

                args, kwargs = pytree.tree_map(cast, (args, kwargs))
                return plain_call(mode, func, pre_dispatch, args, kwargs)
        with mode:
            return func.decompose(*args, **kwargs)

    patches: list[Any] = [
        mock.patch.object(autocast_mode.autocast, "__init__", init),
        mock.patch.object(autocast_mode.autocast, "__enter__", _enter_autocast_region),
        mock.patch.object(autocast_mode.autocast, "__exit__", _exit_autocast_region),
        mock.patch.object(proxy_tensor, "proxy_call", call),
    ]
    if device == "cuda":  # even if this machine has no GPU
        patches.append(mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False))
        patches.append(mock.patch("torch.cuda.is_bf16_supported", return_value=True))
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def get_autocast_region() -> Asked | None:
    """Return (device type, dtype) of the autocast region that is active; ``None`` outside of any region."""
    return next(filter(None, map(_read_autocast_request, DEVICES)), None)


@contextmanager
def _disable_torch_autocast() -> Iterator[None]:
    """Return a context in which torch's own autocast is off, so that torch casts no operands. When the context ends,
    autocast is on again where it was on before."""
    autocast_on = [device for device in DEVICES if torch.is_autocast_enabled(device)]
    for device in autocast_on:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in autocast_on:
            torch.set_autocast_enabled(device, True)


without_autocast = _disable_torch_autocast


def _read_autocast_request(device: str | None) -> Asked | None:
    """If autocast is on for the device type ``device``, such as ``"cuda"``, return (device type, dtype) of autocast. If
    autocast is off or ``device`` is ``None``, return ``None``."""
    if device is None or not torch.is_autocast_enabled(device):
        return None
    return device, torch.get_autocast_dtype(device)


def _enter_autocast_region(self: Any) -> Any:
    """Set the autocast flags of ``self``, a ``torch.autocast`` object, and return ``self``. This replaces
    ``autocast.__enter__``, to avoid the marker node that torch.export would add."""
    self.prev = torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device)
    torch.set_autocast_enabled(self.device, self._enabled)
    torch.set_autocast_dtype(self.device, self.fast_dtype)
    return self


def _exit_autocast_region(self: Any, *_: Any) -> bool:
    """Restore the autocast flags from before the region of ``self``, a ``torch.autocast`` object. This replaces
    ``autocast.__exit__``. Return ``False``, so that exceptions propagate."""
    torch.set_autocast_enabled(self.device, self.prev[0])
    torch.set_autocast_dtype(self.device, self.prev[1])
    return False


def _is_cast(value: Any) -> bool:
    """Return whether autocast may cast ``value``: it is a floating-point tensor of a dtype other than float64."""
    return isinstance(value, Tensor) and value.dtype.is_floating_point and value.dtype != torch.float64


def find_cast_dtype(func: Any, args: Any, kwargs: Any, region: Asked, line: Callable[[], str]) -> Any:
    """Return the dtype to which autocast casts the operands of the operator ``func``; ``None`` if it does not cast
    them. Return the constant ``_DECOMPOSE`` if it casts inside of the operator, so that the caller must trace the
    operators into which it decomposes.

    Raise :class:`UnsupportedError` if the effect of autocast on the operator cannot be found or traced, for example
    because sizes depend on data.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
        region: (device type, dtype) of the autocast region, such as ``("cuda", torch.bfloat16)``.
        line: returns the line of the model's forward that is running, as text for error messages.
    """
    device, narrow = region
    if func in _WHOLE_ON_GPU and device == "cuda":
        return narrow
    own = _has_cast_rule(func.name(), device)
    made_of_others = func._can_decompose() and not func.is_view
    leaves, tree = pytree.tree_flatten((args, kwargs))
    if not (own or made_of_others) or not any(map(_is_cast, leaves)):
        return None
    try:
        arguments = [
            _build_tensor_spec(leaf) if isinstance(leaf, Tensor) else _require_plain_value(leaf) for leaf in leaves
        ]
    except TypeError:
        if not own:
            return None
        raise UnsupportedError(_format_autocast_refusal(func, region, line, "its sizes depend on data")) from None
    key = (func, region, tuple(map(repr, arguments)), repr(tree))
    if key not in _known:
        _known[key] = _run_in_thread(lambda: _observe_operand_cast(func, arguments, tree, region))
    found = _known[key]
    if isinstance(found, Exception):
        raise UnsupportedError(
            _format_autocast_refusal(func, region, line, f"torch says: {str(found).splitlines()[0]}")
        )
    if found is not None and (own if found is _DECOMPOSE else func._schema.is_mutable):
        raise UnsupportedError(
            _format_autocast_refusal(func, region, line, "torch does more there than cast its operands")
        )
    return found


def _format_autocast_refusal(func: Any, region: Asked, line: Callable[[], str], reason: str) -> str:
    """Return the message of the error for an operator ``func`` that a plan cannot compute as it runs in an autocast
    region. ``region``: (device type, dtype) of the region. ``line``: returns the line of the model's forward that is
    running, as text. ``reason``: why it cannot be computed, as text."""
    return (
        f"{func.name()}{line()} in a region of torch.autocast({region[0]!r}, {region[1]}) cannot be kept exact "
        f"({reason}): "
        "take it out of the region, or cast its operands yourself within autocast(enabled=False)"
    )


class _TensorKey(NamedTuple):
    """The shape, strides and dtype of a tensor, as a hashable key."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _build_tensor_spec(tensor: Tensor) -> _TensorKey:
    """Return the shape, strides and dtype of ``tensor``. Raise :class:`TypeError` if a size depends on data."""
    return _TensorKey(
        tuple(map(_require_plain_value, tensor.shape)), tuple(map(_require_plain_value, tensor.stride())), tensor.dtype
    )


def _require_plain_value(value: Any) -> Any:
    """Return ``value`` unchanged. Raise :class:`TypeError` if it is a symbolic number of a trace, which depends on
    data."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise TypeError("depends on numbers")
    return value


def _run_in_thread(function: Callable[[], Any]) -> Any:
    """Run ``function`` in a new thread, where no trace is active, and wait for it. Return its result. If it raises an
    exception, return the exception object."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def _observe_operand_cast(func: Any, arguments: list[Any], tree: pytree.TreeSpec, region: Asked) -> Any:
    """Return the dtype to which autocast casts the operands of the operator ``func``; ``None`` for no cast. It is found
    by experiment: with operands cast to this dtype by hand and autocast off, the operator runs the same operators on
    the same dtypes as with autocast on. These are tried in order: ``None``, the dtype of the autocast region, float32.
    If none of them matches, return the constant ``_DECOMPOSE``.

    Args:
        func: the operator.
        arguments: its flattened arguments; in place of each tensor, its shape, strides and dtype.
        tree: the structure of the arguments, which turns the flattened list into (args, kwargs).
        region: (device type, dtype) of the autocast region.
    """
    _, narrow = region
    with mock.patch.object(fake_tensor, "init_gpu_context"):
        try:
            wanted = _log_operator_run(func, arguments, tree, region, None, autocast_on=True)
        except Exception:
            if _has_no_cast_rule(func, arguments, tree, region):
                return None
            raise
        for to in (None, narrow, torch.float32):
            try:
                if _log_operator_run(func, arguments, tree, region, to, autocast_on=False) == wanted:
                    return to
            except Exception:  # the operator does not take operands of these dtypes
                continue
    return _DECOMPOSE


def _has_no_cast_rule(func: Any, arguments: list[Any], tree: pytree.TreeSpec, region: Asked) -> bool:
    """Return whether autocast has no rule for the operator ``func``, nor for any operator into which it decomposes, and
    so casts nothing. The decomposition is found by running ``func`` on fake CPU tensors, because some operators cannot
    be run for a GPU on a machine without one.

    Args:
        func: the operator.
        arguments: its flattened arguments; in place of each tensor, its shape, strides and dtype.
        tree: the structure of the arguments, which turns the flattened list into (args, kwargs).
        region: (device type, dtype) of the autocast region.
    """
    log, _ = _run_with_cast_operands(func, arguments, tree, ("cpu", region[1]), None, autocast_on=False)
    return not any(_has_cast_rule(name, region[0]) for name in (func.name(), *log.names))


def _has_cast_rule(name: str, device: str) -> bool:
    """Return whether autocast has a rule for the operator with the name ``name`` on the device type ``device``, such as
    ``"cuda"``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, f"Autocast{device.upper()}")


def _log_operator_run(*call: Any, autocast_on: bool) -> Any:
    """Run an operator on fake tensors, and return two lists. The first has an entry for each operator that is executed
    and computes something: (operator, dtypes of the floating-point tensors that it reads, dtypes of those that it
    returns). The second has the floating-point dtypes of the results.

    ``call``: the first five arguments of :func:`_run_with_cast_operands`. ``autocast_on``: whether autocast is on.
    """
    log, made = _run_with_cast_operands(*call, autocast_on=autocast_on)
    return log.entries, made


def _run_with_cast_operands(
    func: Any, arguments: list[Any], tree: pytree.TreeSpec, region: Asked, to: torch.dtype | None, *, autocast_on: bool
) -> tuple[_AutocastLog, list[torch.dtype]]:
    """Run the operator ``func`` on fake tensors, with its floating-point operands cast by hand to ``to``. Return two
    values: the log of the executed operators, and a list of the floating-point dtypes of the results.

    Args:
        func: the operator.
        arguments: its flattened arguments; in place of each tensor, its shape, strides and dtype.
        tree: the structure of the arguments, which turns the flattened list into (args, kwargs).
        region: (device type, dtype) of autocast.
        to: the dtype to which operands are cast; ``None`` means that they are not cast.
        autocast_on: whether autocast is on during the run.
    """
    device, narrow = region
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    torch.set_autocast_cache_enabled(False)
    torch.set_autocast_dtype(device, narrow)

    def operand(given: Any) -> Any:
        if not isinstance(given, _TensorKey):
            return given
        made = torch.empty_strided(given.shape, given.stride, dtype=given.dtype, device=device)
        return made.to(to) if to is not None and _is_cast(made) else made

    with torch.no_grad(), mode:
        args, kwargs = pytree.tree_unflatten([operand(s) for s in arguments], tree)
        log = _AutocastLog()
        torch.set_autocast_enabled(device, autocast_on)
        try:
            with log:
                made = func(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(device, False)
    return log, _list_floating_dtypes(made)


class _AutocastLog(TorchDispatchMode):
    """Dispatch mode that records the operators that run in it, except those that only move or copy values. ``entries``:
    a list of (operator, dtypes of the floating-point tensors that it reads, dtypes of those that it returns).
    ``names``: the names of the operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[tuple[Any, list[torch.dtype], list[torch.dtype]]] = []
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator ``func`` on ``args`` and ``kwargs`` and return its result. Record its name, and the
        floating-point dtypes that it reads and returns, unless it only moves or copies values. ``types`` is not used.
        """
        made = func(*args, **(kwargs or {}))
        read, gives = _list_floating_dtypes((args, kwargs or {})), _list_floating_dtypes(made)
        if gives and func.overloadpacket not in _COPY_OPERATORS and not func.is_view:
            if _operator_casts_input(func, args, kwargs or {}):
                read = [gives[0] for _ in read]
            self.names.add(func.name())
            self.entries.append((func.overloadpacket, read, gives))
        return made


def _operator_casts_input(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the operator ``func``, called with ``args`` and ``kwargs``, casts its input to the dtype of its
    result, as ``sum(x, dtype=...)`` does.
    """
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return given.get("dtype") is not None or bool(given.get("half_to_float"))


def _list_floating_dtypes(values: Any) -> list[torch.dtype]:
    """Return the dtypes of all floating-point tensors in ``values``, which may be nested, in order."""
    tensors = [v for v in pytree.tree_leaves(values) if isinstance(v, Tensor)]
    return [t.dtype for t in tensors if t.dtype.is_floating_point]
