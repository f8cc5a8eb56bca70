"""Hooks, which a trace does not see or must not call: those that only look are left out, and a note says so.

Requires: a module before it is traced. Provides: that nothing but its forward, and functions with gradients of their
own, says what its gradients are; and that no tensor without numbers is left in what a hook collects. Hooks on gradients
that do more than look are refused; hooks on forward that do are traced with it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import getattr_static
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn.modules import module as modules
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

from passes.errors import UnsupportedError
from passes.faults import is_users, shorten
from passes.looking import GIVEN, MODEL, HookValue, code_of, what_it_does
from passes.wrappers import CHECKPOINT_NOTE, OFFLOAD_NOTE

_ADVICE = (
    "which a plan would leave out; expected hooks that only look (they return nothing and change nothing): write what "
    "it does as a torch.autograd.Function in forward, or do it to the gradients after the step's backward, and remove "
    "the hook"
)
_BACKWARD = {"_backward_hooks": (MODEL, GIVEN, GIVEN), "_backward_pre_hooks": (MODEL, GIVEN)}
_FORWARD = {"_forward_hooks": (MODEL, GIVEN, GIVEN), "_forward_pre_hooks": (MODEL, GIVEN)}
_WITH_KWARGS = (MODEL, GIVEN, GIVEN, GIVEN)
_GLOBAL_BACKWARD = {"_global_backward_hooks": (MODEL, GIVEN, GIVEN), "_global_backward_pre_hooks": (MODEL, GIVEN)}
_GLOBAL_FORWARD = {"_global_forward_hooks": (MODEL, GIVEN, GIVEN), "_global_forward_pre_hooks": (MODEL, GIVEN)}


def check_hooks(model: nn.Module, *, train: bool) -> tuple[str, ...]:
    """What is to be said of the hooks that a plan of ``model`` leaves out; without ``train`` there are no gradients.

    Raises :class:`UnsupportedError` where a parameter or module has a hook on gradients that does more than look, and
    where a hook on the forward of all modules does.
    """
    notes = []
    for name, parameter in model.named_parameters() if train else ():
        for table in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
            for hook in (table or {}).values():
                _check(hook, (GIVEN,), f"the parameter {name!r} has a hook on its gradient")
                notes.append(_note(hook, f"of the parameter {name!r}", "gradients"))
    for name, module in model.named_modules():
        of = f"of the module {name!r}" if name else "of the model"
        for hook, given in _of_tables(module, _BACKWARD) if train else ():
            _check(hook, given, f"{f'the module {name!r}' if name else 'the model'} has a backward hook")
            notes.append(_note(hook, of, "gradients"))
        for hook, given in _forward_hooks(module).values():
            if what_it_does(hook, given) is None:
                notes.append(_note(hook, of, "what forward computes"))
    for hook, given in _of_tables(modules, _GLOBAL_BACKWARD) if train else ():
        _check(hook, given, "a backward hook of all modules (register_module_full_backward_hook) is set")
        notes.append(_note(hook, "of all modules", "gradients"))
    for hook, given in _of_tables(modules, _GLOBAL_FORWARD):
        _check(hook, given, "a forward hook of all modules (register_module_forward_hook) is set")
        notes.append(_note(hook, "of all modules", "what forward computes"))
    return tuple(dict.fromkeys(notes))


def _of_tables(owner: Any, tables: dict[str, tuple[HookValue, ...]]) -> list[tuple[Any, tuple[HookValue, ...]]]:
    return [(hook, given) for table, given in tables.items() for hook in getattr(owner, table).values()]


def _forward_hooks(module: nn.Module) -> dict[tuple[str, int], tuple[Any, tuple[HookValue, ...]]]:
    """The hooks on a module's forward, and what they are given."""
    found = {}
    for table, given in _FORWARD.items():
        for key, hook in getattr(module, table).items():
            named = key in getattr(module, f"{table}_with_kwargs")
            found[table, key] = hook, _WITH_KWARGS[: len(given) + 1] if named else given
    return found


def forward_hooks_of(model: nn.Module) -> list[Any]:
    """All hooks on the forward of the model and its modules."""
    return [hook for module in model.modules() for hook, _ in _forward_hooks(module).values()]


def _check(hook: Any, given: Sequence[HookValue], what: str) -> None:
    reason = what_it_does(hook, given)
    if reason is not None:
        raise UnsupportedError(f"{what}, {_ADVICE}. The hook is {_described(hook)}; it {reason}")


def _note(hook: Any, of: str, at: str) -> str:
    return f"the hook {_described(hook)} {of} only looks at {at}: the plan does not call it"


def _described(hook: Any) -> str:
    name, code = code_of(hook)
    return f"{name} ({shorten(code.co_filename)}:{code.co_firstlineno})" if code is not None else name


def drop_looking_hooks(model: nn.Module) -> None:
    """Remove from a copy of a model the hooks that only look."""
    for module in model.modules():
        for table, given in _BACKWARD.items():
            for key, hook in list(getattr(module, table).items()):
                if what_it_does(hook, given) is None:
                    del getattr(module, table)[key]
        for (table, key), (hook, given) in _forward_hooks(module).items():
            if what_it_does(hook, given) is None:
                del getattr(module, table)[key]


@contextlib.contextmanager
def global_hooks_dropped() -> Iterator[None]:
    """Inside, hooks of all modules that only look are not called."""
    with contextlib.ExitStack() as stack:
        for table, given in (*_GLOBAL_BACKWARD.items(), *_GLOBAL_FORWARD.items()):
            hooks = getattr(modules, table)
            acting = {key: hook for key, hook in hooks.items() if what_it_does(hook, given) is not None}
            stack.enter_context(mock.patch.dict(hooks, acting, clear=True))
        yield


@contextlib.contextmanager
def hooks_refused(notes: list[str]) -> Iterator[None]:
    """Inside, forward cannot hook into gradients, but to look: that is left out, which ``notes`` say. Anything else
    raises :class:`UnsupportedError`."""

    def checked(given: Sequence[HookValue], what: str) -> Callable[..., RemovableHandle]:
        def register(owner: Any, hook: Any, *args: Any, **kwargs: Any) -> RemovableHandle:
            reason = what_it_does(hook, given)
            if reason is not None:
                raise UnsupportedError(
                    f"forward gives a {what} a hook on its gradient{_where()}, {_ADVICE}. The hook is "
                    f"{_described(hook)}; it {reason}"
                )
            notes.append(_note(hook, f"that forward gives a {what}", "gradients"))
            return RemovableHandle(collections.OrderedDict())

        return register

    def refused(what: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise UnsupportedError(f"forward gives {what} a hook{_where()}, {_ADVICE}")

        return refuse

    class WatchedNode:
        """A node of the gradient's graph, as forward sees it."""

        register_hook, register_prehook = refused("grad_fn"), refused("grad_fn")

        def __init__(self, node: Any) -> None:
            self._node = node

        def __getattr__(self, name: str) -> Any:
            return getattr(self._node, name)

    native = getattr_static(Tensor, "grad_fn")

    def grad_fn(tensor: Tensor) -> Any:
        node = native.__get__(tensor)
        caller = traceback.extract_stack(limit=2)[0].filename
        return WatchedNode(node) if node is not None and is_users(caller) else node

    with contextlib.ExitStack() as stack:
        for owner, name, given, what in (
            (Tensor, "register_hook", (GIVEN,), "tensor"),
            (Tensor, "register_post_accumulate_grad_hook", (GIVEN,), "tensor"),
            (nn.Module, "register_full_backward_hook", (MODEL, GIVEN, GIVEN), "module"),
            (nn.Module, "register_backward_hook", (MODEL, GIVEN, GIVEN), "module"),
            (nn.Module, "register_full_backward_pre_hook", (MODEL, GIVEN), "module"),
            (graph, "register_multi_grad_hook", (GIVEN,), "list of tensors"),
        ):
            stack.enter_context(mock.patch.object(owner, name, checked(given, what)))
        stack.enter_context(mock.patch.object(Tensor, "grad_fn", property(grad_fn), create=True))
        stack.enter_context(_memory_left_to_plan(notes))
        yield


@contextlib.contextmanager
def looking_hooks_skipped() -> Iterator[None]:
    """Inside, hooks on gradients that only look are not registered by forward, nor called if all modules have them."""
    native = Tensor.register_hook

    def register(tensor: Tensor, hook: Any) -> Any:
        looks = what_it_does(hook, (GIVEN,)) is None
        return RemovableHandle(collections.OrderedDict()) if looks else native(tensor, hook)  # type: ignore[no-untyped-call]

    with global_hooks_dropped(), mock.patch.object(Tensor, "register_hook", register):
        yield


_REENTRANT_NOTE = (
    "torch gives no gradients to what is checkpointed with use_reentrant=True and inputs that ask for none ({where}); "
    "the plan does, as torch does with use_reentrant=False"
)


@dataclass
class LeftToPlan:
    """What forward says of the memory that it takes, and a plan decides by itself: where it says so."""

    checkpointed: set[str] = field(default_factory=set)
    offloaded: set[str] = field(default_factory=set)
    without_gradients: set[str] = field(default_factory=set)

    @property
    def notes(self) -> tuple[str, ...]:
        told = (
            (CHECKPOINT_NOTE, self.checkpointed),
            (OFFLOAD_NOTE, self.offloaded),
            (_REENTRANT_NOTE, self.without_gradients),
        )
        return tuple(note.format(where=", ".join(sorted(places))) for note, places in told if places)


@contextlib.contextmanager
def _memory_left_to_plan(notes: list[str]) -> Iterator[None]:
    """Inside, ``save_on_cpu`` and checkpointed calls are noted and left to the plan, and other hooks on what is saved
    for backward are refused."""
    left = LeftToPlan()
    enter, leave = graph.saved_tensors_hooks.__enter__, graph.saved_tensors_hooks.__exit__
    run_later, run_twice = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction.apply

    def entered(hooks: Any) -> Any:
        if isinstance(hooks, graph.save_on_cpu):
            left.offloaded.add(_line())
            return None
        if not type(hooks).__module__.startswith("torch.") or type(hooks) is graph.saved_tensors_hooks:
            raise UnsupportedError(
                f"forward packs what is saved for backward (saved_tensors_hooks){_where()}, which a plan would leave "
                "out; expected forward without it: let the plan choose what is recomputed (recompute=) or offloaded, "
                "or write what it does to gradients as a torch.autograd.Function"
            )
        return enter(hooks)

    def exited(hooks: Any, *error: Any) -> None:
        if not isinstance(hooks, graph.save_on_cpu):
            leave(hooks, *error)

    def noted(run: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        name = _class_of(function)
        left.checkpointed.add(f"{name} at {_line()}" if name else _line())
        takes_gradient = any(isinstance(a, Tensor) and a.requires_grad for a in args)
        if run is run_twice and torch.is_grad_enabled() and not takes_gradient:
            left.without_gradients.add(_line())
        return run(function, *args, **kwargs)

    with (
        mock.patch.object(graph.saved_tensors_hooks, "__enter__", entered),
        mock.patch.object(graph.saved_tensors_hooks, "__exit__", exited),
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", functools.partial(noted, run_later)),
        mock.patch.object(checkpoint.CheckpointFunction, "apply", functools.partial(noted, run_twice)),
    ):
        try:
            yield
        finally:
            notes += left.notes


def _class_of(function: Any) -> str:
    """The class of the module that a checkpointed function runs; empty where that is not known."""
    if isinstance(function, functools.partial):
        return _class_of(function.func) or next((_class_of(a) for a in function.args if isinstance(a, nn.Module)), "")
    module = getattr(function, "__self__", function)
    return type(module).__name__ if isinstance(module, nn.Module) else ""


def _line() -> str:
    """``file:line`` of the user's code that is run now."""
    frames = [f for f in traceback.extract_stack()[:-1] if is_users(f.filename)]
    return f"{shorten(frames[-1].filename)}:{frames[-1].lineno}" if frames else "a line that is not known"


def _where() -> str:
    frames = [f for f in traceback.extract_stack()[:-1] if is_users(f.filename)]
    return f" at {shorten(frames[-1].filename)}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


# --- what hooks on forward collect ------------------------------------------------------------------------------------

_CONTAINERS = (list, dict, set, collections.deque)
_NO_OWNERS = (nn.Module, Tensor, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, logging.Logger)


@contextlib.contextmanager
def collections_kept(model: nn.Module, notes: list[str]) -> Iterator[None]:
    """Afterwards, what the hooks on forward keep outside of the model is as it was, and ``notes`` say which keep
    something."""
    before = [
        (hook, name, _HookState.of(hook))
        for name, module in model.named_modules()
        for hook, _ in _forward_hooks(module).values()
    ]
    try:
        yield
    finally:
        for hook, name, held in before:
            if held.restore():
                of = f"of the module {name!r}" if name else "of the model"
                notes.append(f"the hook {_described(hook)} {of} keeps values outside of the model: the plan does not")


class _HookState:
    """The containers and variables that a function reaches, as they are now."""

    def __init__(self, cells: Sequence[Any], containers: Sequence[Any]) -> None:
        self.cells = [(cell, cell.cell_contents) for cell in cells]
        self.containers = [(c, list(c.items()) if isinstance(c, dict) else list(c)) for c in containers]

    @staticmethod
    def of(hook: Any) -> _HookState:
        function = getattr(hook, "func", hook)
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        cells = [c for c in getattr(function, "__closure__", None) or () if _is_set(c)]
        reached = [c.cell_contents for c in cells] + list(getattr(function, "__defaults__", None) or ())
        if code is not None:
            reached += [function.__globals__[n] for n in code.co_names if n in function.__globals__]
        owners = [vars(r) for r in reached if hasattr(r, "__dict__") and not isinstance(r, _NO_OWNERS)]
        containers = [*owners, *(r for r in reached if isinstance(r, _CONTAINERS))]
        inner = [
            i for c in containers for i in (c.values() if isinstance(c, dict) else c) if isinstance(i, _CONTAINERS)
        ]
        return _HookState(cells, [*containers, *inner])

    def restore(self) -> bool:
        """Whether something had changed."""
        changed = False
        for cell, held in self.cells:
            if cell.cell_contents is not held:
                cell.cell_contents, changed = held, True
        for container, items in self.containers:
            now = list(container.items()) if isinstance(container, dict) else list(container)
            if len(now) != len(items) or any(not _same(a, b) for a, b in zip(now, items, strict=True)):
                changed = True
                container.clear()
                (container.update if isinstance(container, dict | set) else container.extend)(items)
        return changed


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) == 2:
        return a[0] is b[0] and a[1] is b[1]
    return a is b


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
