"""Trace equal modules once: each further call becomes one operator ``partition::layer`` in the exported graph.

The model's own ``forward`` runs in full, so everything that it does between its layers (skips, early exits, collected
outputs, other kinds of layers) is traced unchanged. ``passes/trace/layer_equality.py`` finds the equal modules. Of the
calls of such modules with equal kinds of arguments, the first is traced. The second runs outside of the trace, and each
attribute in which the modules differ (an index, a name) is replaced by an object that raises an error if it is read.
The second call must record the same :class:`Journal` as the first. The second and all later calls add the operator
``partition::layer``, which returns tensors like the results of the first call. ``passes/trace/layer_expansion.py`` then
shows that the first call's operators read only the call's own states and arguments, and replaces each
``partition::layer`` operator by a copy of them.

A journal has one entry for each torch function that a call runs. It names a tensor by its origin (an argument by its
position, a result by the entry that made it), and any other object by its value. Two calls with equal journals
therefore run the same operators on corresponding operands.

A call is traced in full if arguments are neither tensors nor plain values, inside ``no_grad``, or with hooks, because
the result might then not be exact. All calls of a group of modules are traced in full if a call changes an argument, a
state or an attribute, returns a view of one, or reads an attribute in which the modules differ.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, nn
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from partitioner.passes.trace.autocast import get_autocast_region
from partitioner.passes.trace.layer_equality import (
    ModuleGroup,
    NotEquivalent,
    ParkedParameterError,
    ParkedParameters,
    UnreadableAttribute,
    build_value_key,
    describe_module_state,
    find_equal_layers,
    has_call_hooks,
    is_simple,
    tensor_spec,
)

_SYMBOLS = (SymInt, SymFloat, SymBool)


class Journal(TorchFunctionMode):
    """Torch function mode that records every torch function that a call of a module runs, so that two calls of equal
    modules can be compared.

    ``entries``: for each torch function, in order: the function, keys of its arguments, and the positions of its
    results. The position of a tensor is its index in the order in which tensors first occur in the call.
    ``needs_trace``: whether only a real trace can tell what the call computes, because sizes depend on data or autocast
    is on. ``operands``: the tensors that the call of the module reads, in order; they have the first positions.
    """

    def __init__(self, operands: Sequence[Tensor]) -> None:
        """Start a journal without entries. ``operands``: the tensors that the recorded call of a module reads, in
        order; they get the positions 0, 1, ..."""
        super().__init__()
        self.entries: list[Any] = []
        self.needs_trace = False
        self._places: dict[int, int] = {}
        self._held: list[Tensor] = []  # tensors that are kept alive, so that their ids are not reused
        for operand in operands:
            self._assign_tensor_place(operand)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the torch function ``func`` with ``args`` and ``kwargs``, add an entry for it to this journal of a
        module's call, and return its result. ``types`` is not used."""
        kwargs = kwargs or {}
        asked = self._build_argument_key(args), self._build_argument_key(kwargs)
        self.needs_trace |= get_autocast_region() is not None
        result = func(*args, **kwargs)
        self.entries.append((func, *asked, self._record_result_places(result)))
        return result

    def mark(self) -> tuple[int, int]:
        """Return (number of recorded torch functions, number of tensors seen) for the present end of this journal.
        :meth:`sum_up` later replaces the entries after this point."""
        return len(self.entries), len(self._held)

    def sum_up(self, mark: tuple[int, int], number: int, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Replace all entries since ``mark``, which record the torch functions of a call of an inner module, by one
        entry for this inner call. The entry is the same whether the inner call was run in full or was replaced by one
        operator.

        Args:
            mark: the result of :meth:`mark` before the inner call.
            number: the number of the group of equal calls to which the inner call belongs.
            operands: tensors that the inner call reads.
            results: tensors that the inner call returns.
        """
        entries, held = mark
        del self.entries[entries:]
        for tensor in self._held[held:]:
            self._places.pop(id(tensor), None)
        del self._held[held:]
        asked = self._build_argument_key(list(operands))
        self.entries.append((number, asked, self._record_result_places(list(results))))

    def _assign_tensor_place(self, tensor: Tensor) -> int:
        """Return the position of ``tensor`` in this journal: its index, from 0, in the order in which tensors first
        occur in the recorded call. A new tensor gets the next position."""
        if id(tensor) not in self._places:
            self._places[id(tensor)] = len(self._held)
            self._held.append(tensor)
        return self._places[id(tensor)]

    def _record_result_places(self, result: Any) -> Any:
        """Return ``result``, the result of a torch function, with each tensor replaced by its position in this journal
        and every other value by ``None``. The position of a tensor is its index, from 0, in the order in which tensors
        first occur in the recorded call. A symbolic size sets ``needs_trace``."""
        if isinstance(result, Tensor):
            with torch._C.DisableTorchFunction():
                self.needs_trace |= any(isinstance(size, SymInt) for size in result.shape)
            return self._assign_tensor_place(result)
        if isinstance(result, tuple | list):
            return [self._record_result_places(item) for item in result]
        self.needs_trace |= isinstance(result, _SYMBOLS)
        return None

    def _build_argument_key(self, value: Any) -> Any:
        """Return a hashable key of ``value``, an argument of a torch function. Corresponding arguments of two calls of
        equal modules have equal keys. The key of an unknown object is its ``id``."""
        return build_value_key(value, self._build_tensor_key)

    def _build_tensor_key(self, tensor: Tensor) -> tuple[str, Any]:
        """Return a key of ``tensor``, an argument of a torch function. If the tensor is an operand of the recorded
        module call or was computed in it, the key is ("tensor", position), where the position is the tensor's index in
        the order in which tensors first occur in the call. Otherwise the key is ("other", ``id`` of the tensor)."""
        place = self._places.get(id(tensor))
        return ("tensor", place) if place is not None else ("other", self._keep_foreign_tensor(tensor))

    def _keep_foreign_tensor(self, tensor: Tensor) -> int:
        """Store a reference to ``tensor``, so that its ``id`` is not reused for another object, and return the ``id``.
        The tensor is neither an operand of the recorded call nor made by it."""
        self._held.append(tensor)
        return id(tensor)


@contextlib.contextmanager
def run_without_tracing(operands: Sequence[Tensor]) -> Iterator[None]:
    """Return a context inside of a trace, in which operators are computed on fake tensors but are not recorded in the
    graph. ``operands``: fake tensors of the trace, which determine the fake tensor mode.

    Function modes that the user has entered around the trace stay active: they change what operators compute, and the
    calls that are compared must compute the same.
    """
    modes = torch.overrides._get_current_function_mode_stack()
    with contextlib.ExitStack() as stack:
        for _ in modes:
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        for mode in modes:
            if type(mode).__module__.partition(".")[0] not in ("torch", "partitioner"):
                torch.overrides._push_mode(mode)
                stack.callback(torch.overrides._pop_mode)
        stack.enter_context(disable_proxy_modes_tracing())
        fake = detect_fake_mode(list(operands))
        if fake is not None and fake.shape_env is not None:
            stack.enter_context(fake.shape_env.ignore_fresh_unbacked_symbols())
        yield


@contextlib.contextmanager
def pause_trace_and_journal() -> Iterator[None]:
    """Return a context inside of a trace, in which operators are recorded neither by the trace nor by a
    :class:`Journal` (a list of the torch functions of a module call). Function modes that the model's own code entered
    stay active."""
    modes = torch.overrides._get_current_function_mode_stack()
    with contextlib.ExitStack() as stack:
        for _ in modes:
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        for mode in modes:
            if not isinstance(mode, Journal) and type(mode).__module__.split(".")[0] != "torch":
                torch.overrides._push_mode(mode)
                stack.callback(torch.overrides._pop_mode)
        stack.enter_context(disable_proxy_modes_tracing())
        yield


_MIN_GROUP_SIZE = 3  # fewest equal modules for which it pays: one is traced, and one is run outside of the trace

_NUM_CALLS_RUN = 2  # calls that are run to show what the others compute

Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]

_made_by: dict[int, list[Spec]] = {}  # number of a group of equal calls -> specs of their result tensors
_numbers = itertools.count()

_library = torch.library.Library("partition", "FRAGMENT")  # traced faster than a custom_op, and called often

_library.define("layer(Tensor[] operands, Tensor[] results, int memo, int member) -> Tensor[]")


def _make_layer_results(operands: list[Tensor], results: list[Tensor], memo: int, member: int) -> list[Tensor]:
    """Return new tensors of the shapes and dtypes that a call of a module returns. This is the fake implementation of
    the operator ``partition::layer(operands, results, memo, member)``, which stands for the call in a traced graph and
    is never executed.

    Args:
        operands: parameters, buffers and tensor arguments that the call reads.
        results: the tensors that the call returned, if it was traced; if empty, the shapes are those of an earlier
          equal
            call.
        memo: number of the group of equal calls.
        member: number of the module if its parameters are removed and so are not among the operands; otherwise -1.
    """
    specs = [(tuple(r.shape), r.stride(), r.dtype) for r in results] or _made_by[memo]
    return [operands[0].new_empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in specs]


torch.library.register_fake("partition::layer", _make_layer_results, lib=_library)

LAYER = torch.ops.partition.layer.default


@dataclass
class _CallMemo:
    """What is known of a group of equal calls: calls of modules of equal structure, with arguments of the same shapes
    and types.

    ``number``: the number of the group. ``num_run``: how many of the calls were run in full. ``journal``: the torch
    functions that the first call ran. ``must_trace``: whether every call must be traced, because one operator cannot
    represent the first call, which, for example, writes to an argument or returns a view of one. ``leaves``: for each
    value in the result, ("made", index of a new tensor), ("operand", index of an operand that is returned unchanged) or
    ("plain", (type, value)). ``tree``: the pytree structure of the result. ``journal`` and ``tree`` are ``None`` before
    the first call.
    """

    number: int
    num_run: int = 0
    journal: Journal | None = None  # record of the first call
    must_trace: bool = False  # whether every call must be traced
    leaves: tuple[tuple[str, Any], ...] = ()
    tree: pytree.TreeSpec | None = None


@dataclass
class LayerRepeats:
    """Groups of modules of equal structure, such as decoder layers, and what one trace found out about their calls.
    Only the first calls are traced; each other call becomes one operator ``partition::layer``.

    ``groups``: the groups. ``memos``: (index of the group, key of the call) -> what is known of calls with this key.
    ``refused``: the groups in which every call must be traced. ``parked``: the parameters that are removed from modules
    during the trace; ``None`` if none are removed.
    """

    groups: list[ModuleGroup]
    parked: ParkedParameters | None = None
    memos: dict[Any, _CallMemo] = field(default_factory=dict)
    refused: list[ModuleGroup] = field(default_factory=list)
    _called: set[int] = field(default_factory=set)
    # journals of the calls that are being recorded, outermost first
    _journals: list[Journal] = field(default_factory=list)
    _beside: bool = False  # whether one of these calls runs outside of the trace

    @classmethod
    def find(cls, model: nn.Module) -> LayerRepeats:
        """Return a :class:`LayerRepeats` for one trace of ``model``, with the groups of equal modules of the model,
        such as its layers, of which only one needs to be traced."""
        return cls(find_equal_layers(model, _MIN_GROUP_SIZE))

    def select_parked_parameters(self, model: nn.Module) -> LayerRepeats:
        """Select the parameters that are removed from ``model`` during the trace, which makes the trace faster: the
        parameters of modules whose calls will not be run, because an equal module is called before. Return self.

        The first members of each group of equal modules keep their parameters, because their calls are run.
        """
        self.parked = ParkedParameters(model)
        outer = {name for group in self.groups for name in group.names}
        for group in self.groups:
            # One more module keeps its parameters: the first call may be of another kind, if its input needs no
            # gradient.
            for module, name in list(zip(group.members, group.names, strict=True))[_NUM_CALLS_RUN + 1 :]:
                if not any(name.startswith(other + ".") for other in outer):
                    self.parked.select(module, name, group.members[0])
        return self

    def exclude(self, refused: Sequence[ModuleGroup]) -> LayerRepeats:
        """Return a new :class:`LayerRepeats` for another trace of the model, with the groups of equal modules of this
        one except those in ``refused``. All calls of the modules in ``refused`` are then traced."""
        names = {group.names for group in refused}
        return LayerRepeats([g for g in self.groups if g.names not in names])

    def refuse(self, number: int) -> None:
        """Add a group of equal modules to :attr:`refused`, so that every call of its modules is traced in the next
        trace. ``number``: the number of a group of equal calls; the group of modules to which these calls belong is
        added."""
        for (group, _), memo in self.memos.items():
            if memo.number == number:
                self.refused.append(self.groups[group])

    @contextlib.contextmanager
    def trace(self) -> Iterator[None]:
        """Return a context for a trace of the model, in which the first call of a module in a group of equal modules is
        traced, and each later one becomes one operator ``partition::layer``. The second call is run as well, to compare
        it with the first."""
        root = self.parked.model if self.parked is not None else None
        before = root.__dict__.get("forward") if root is not None else None
        try:
            for index, group in enumerate(self.groups):
                for module in group.members:
                    run = functools.partial(self._run_or_reuse_call, index, module, module.forward)
                    module.__dict__["forward"] = run
            if self.parked is not None and root is not None:
                root.__dict__["forward"] = functools.wraps(root.forward)(self.parked.guard_reads(root.forward))
                self.parked.remove_selected()
            yield
        finally:
            if self.parked is not None and root is not None:
                self.parked.restore()
                root.__dict__.pop("forward", None)
                if before is not None:
                    root.__dict__["forward"] = before
            for group in self.groups:
                for module in group.members:
                    module.__dict__.pop("forward", None)
            for memo in self.memos.values():
                _made_by.pop(memo.number, None)

    def _run_or_reuse_call(
        self, index: int, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call ``module`` with ``args`` and ``kwargs``, and return its output. ``index``: the index of the group of
        equal modules to which ``module`` belongs.

        The first two of equal calls run ``forward``, the module's own. A later call only appends the operator
        ``partition::layer`` to the graph. A call that cannot be compared with others, or that such an operator cannot
        represent because of an effect or a result, always runs ``forward``.
        """
        if self.parked is not None and id(module) in self.parked.names:
            return self._append_layer_operator(self.parked, index, module, args, kwargs)
        again = id(module) in self._called
        self._called.add(id(module))
        with torch._C.DisableTorchFunction():  # the tracer's function mode would record reads of tensor attributes
            call = None if again else _RepeatedCall.describe(module, self.groups[index].own_attributes, args, kwargs)
        if call is None:
            return forward(*args, **kwargs)
        memo = self.memos.setdefault((index, call.key), _CallMemo(next(_numbers)))
        if memo.must_trace or (memo.num_run == 0 and self._beside):
            return forward(*args, **kwargs)
        outer = self._journals[-1] if self._journals else None
        mark = outer.mark() if outer is not None else (0, 0)
        traced: list[Tensor] = []
        if memo.num_run < _NUM_CALLS_RUN:
            group = self.groups[index]
            try:
                output, found = self._trace_example_call(
                    memo, call, module, group.own_attributes, functools.partial(forward, *args, **kwargs)
                )
            except Exception:
                self.refused.append(group)
                raise
            if found is None:
                memo.must_trace = True
                return output
            traced = found
            memo.num_run += 1
        tensors = LAYER(call.operands, traced, memo.number, -1)
        if outer is not None:
            outer.sum_up(mark, memo.number, call.operands, tensors)
        return _rebuild_call_output(memo, call.operands, tensors)

    def _trace_example_call(
        self,
        memo: _CallMemo,
        call: _RepeatedCall,
        module: nn.Module,
        own_attributes: tuple[tuple[str, str], ...],
        forward: Callable[[], Any],
    ) -> tuple[Any, list[Tensor] | None]:
        """Run one of the first two of several equal module calls, from which the outputs of the later calls are known.
        Return its output and a list of its result tensors that are in the graph (empty if the call was not traced). If
        this is the first call and one operator cannot represent it, the list is ``None``, and all calls must be traced;
        for example, the call writes to an argument or returns a view of one. Raise :class:`NotEquivalent` if the second
        call differs from the first.

        Args:
            memo: what is known of these equal calls; it is updated.
            call: the tensors that the call reads.
            module: the module that is called.
            own_attributes: attributes in which the modules differ, as (path of a submodule, attribute name).
            forward: runs the module and returns its output.
        """
        with _hide_own_attributes(module, own_attributes if memo.num_run else ()):
            before, buffers = _read_module_state(module), _list_module_buffers(module)
            output, traced = self._run_once(memo, call, forward)
            after, set_anew = (
                _read_module_state(module),
                list(map(id, buffers)) != list(map(id, _list_module_buffers(module))),
            )
        try:
            with torch._C.DisableTorchFunction():
                results = _record_call_results(memo, call, output)
            if before != after or set_anew or not call.is_unchanged():
                raise NotEquivalent("a call changes what it is given")
        except NotEquivalent:
            if memo.num_run:
                raise
            return output, None
        return output, results if traced else []

    def _run_once(self, memo: _CallMemo, call: _RepeatedCall, forward: Callable[[], Any]) -> tuple[Any, bool]:
        """Run one of the first two of several equal module calls. Return (its output, whether its operators are in the
        graph).

        The first call is traced. The second runs outside of the graph, only to compare the torch functions that it
        calls with those of the first; if they differ, :class:`NotEquivalent` is raised. If these functions do not show
        what the call computes, because sizes depend on data or autocast is on, the second call is traced, too.

        Args:
            memo: what is known of these equal calls.
            call: the tensors that the call reads.
            forward: runs the module and returns its output.
        """
        journal = Journal(call.operands)
        if memo.num_run == 0:
            memo.journal = journal
            with self._record_torch_functions(journal):
                return forward(), True
        first = memo.journal
        assert first is not None
        if first.needs_trace:
            return forward(), True
        beside, self._beside = self._beside, True
        try:
            with run_without_tracing(call.operands), self._record_torch_functions(journal):
                output = forward()
        finally:
            self._beside = beside
        if journal.entries != first.entries:
            raise NotEquivalent("two calls ask different things of torch")
        return output, False

    @contextlib.contextmanager
    def _record_torch_functions(self, journal: Journal) -> Iterator[None]:
        """Return a context in which ``journal`` records the torch functions that are called, so that two calls of equal
        modules can be compared.
        """
        self._journals.append(journal)
        try:
            with journal:
                yield
        finally:
            self._journals.pop()

    def _append_layer_operator(
        self, parked: ParkedParameters, index: int, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Append an operator ``partition::layer`` to the graph in place of a call of ``module``, whose parameters are
        removed, and return the output of the call. Raise :class:`ParkedParameterError` if no equal calls were run
        before.

        ``parked``: the removed parameters. ``index``: the index of the module's group of equal modules. ``args``,
        ``kwargs``: the arguments of the call.
        """
        again = id(module) in self._called
        self._called.add(id(module))
        lent = parked.lend(module)
        try:
            with torch._C.DisableTorchFunction():
                call = (
                    None if again else _RepeatedCall.describe(module, self.groups[index].own_attributes, args, kwargs)
                )
        finally:
            parked.take_back(lent)
        memo = self.memos.get((index, call.key)) if call is not None else None
        if call is None or memo is None or memo.num_run < _NUM_CALLS_RUN:
            raise ParkedParameterError("a layer whose weights are put away is to be traced")
        names = parked.names[id(module)]
        here = [i for i in range(len(call.operands)) if i >= len(names) or names[i] is None]
        if not here or any(kind == "operand" and what not in here for kind, what in memo.leaves):
            raise ParkedParameterError("a layer reads or gives nothing but its weights")
        tensors = LAYER([call.operands[i] for i in here], [], memo.number, parked.numbers[id(module)])
        return _rebuild_call_output(memo, call.operands, tensors)


@contextlib.contextmanager
def _hide_own_attributes(module: nn.Module, own_attributes: tuple[tuple[str, str], ...]) -> Iterator[None]:
    """Return a context in which reading an attribute of ``module`` that differs between equal modules raises
    :class:`NotEquivalent`. ``own_attributes``: these attributes as (path of a submodule of ``module``, attribute
    name)."""
    kept = [(vars(module.get_submodule(path)), name) for path, name in own_attributes]
    values = [held[name] for held, name in kept]
    for held, name in kept:
        held[name] = UnreadableAttribute(held[name])
    try:
        yield
    finally:
        for (held, name), value in zip(kept, values, strict=True):
            held[name] = value


@dataclass(frozen=True)
class _RepeatedCall:
    """The tensors that a call of a module reads, and a key that is equal for calls of equal modules with arguments of
    the same shapes and types.

    ``operands``: the module's parameters and buffers, then the tensors among the arguments. ``key``: the hashable key.
    ``versions``: for each operand, torch's counter of in-place writes before the call. ``leaves``: the values in the
    arguments, in order. ``arguments``: (positional arguments, keyword arguments).
    """

    operands: list[Tensor]
    key: Any
    versions: list[int]
    leaves: list[Any]
    arguments: Any

    @classmethod
    def describe(
        cls, module: nn.Module, own_attributes: tuple[tuple[str, str], ...], args: Any, kwargs: Any
    ) -> _RepeatedCall | None:
        """Return a description of a call of ``module`` with ``args`` and ``kwargs``: the tensors that it reads and a
        key for comparison with other calls. Return ``None`` if the call may depend on more than the key contains, such
        as hooks or objects.

        ``own_attributes``: attributes that are left out of the key, as (path of a submodule, attribute name).
        """
        if not torch.is_grad_enabled() or has_call_hooks(module):
            return None
        leaves, tree = pytree.tree_flatten((args, kwargs))
        plain = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        states = [t for m in module.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        operands = [*states, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        if not all(map(is_simple, plain)) or any(getattr(t, "constant", None) is not None for t in operands):
            return None
        if any(isinstance(size, SymInt) for t in operands for size in t.shape):  # sizes that depend on data
            return None
        places: dict[int, int] = {}
        stored: dict[int, int] = {}
        specs = [
            (
                *tensor_spec(t),
                places.setdefault(id(t), len(places)),
                stored.setdefault(_identify_storage(t), len(stored)),
            )
            for t in operands
        ]
        texts: dict[tuple[str, str], Any] = {}
        key = (
            describe_module_state(module, texts),
            tuple([(place, type(text), text) for place, text in texts.items() if place not in own_attributes]),
            repr(tree),
            tuple([isinstance(leaf, Tensor) for leaf in leaves]),
            tuple([(type(p), repr(p)) for p in plain]),
            tuple(specs),
            torch.get_default_dtype(),
            get_autocast_region(),
        )
        return cls(operands, key, [t._version for t in operands], leaves, (args, kwargs))

    def is_unchanged(self) -> bool:
        """Return whether this module call, which has been run, has written to none of the tensors that it reads and to
        none of the lists and dictionaries in its arguments."""
        leaves = pytree.tree_leaves(self.arguments)
        same = len(leaves) == len(self.leaves) and all(a is b for a, b in zip(leaves, self.leaves, strict=True))
        return same and self.versions == [t._version for t in self.operands]


def _read_module_state(module: nn.Module) -> Any:
    """Return a hashable value that describes ``module``, to detect whether a call changes it: its submodules,
    attributes, and shapes and flags of its tensors."""
    with torch._C.DisableTorchFunction():
        return describe_module_state(module)


def _list_module_buffers(module: nn.Module) -> list[Tensor | None]:
    """Return all buffers of ``module`` and its submodules, in order. A buffer that is registered without a tensor is
    ``None``."""
    return [buffer for m in module.modules() for buffer in m._buffers.values()]


def _identify_storage(tensor: Tensor) -> int:
    """Return an integer that identifies the memory of ``tensor``; tensors that share their memory have the same
    integer."""
    return int(tensor.untyped_storage()._cdata)


def _record_call_results(memo: _CallMemo, call: _RepeatedCall, output: Any) -> list[Tensor]:
    """Store the structure of ``output``, the result of the module call ``call``, in ``memo``, which describes all equal
    calls. Return a list of the tensors in the output that the call made.

    Raise :class:`NotEquivalent` if the output contains a view of an operand or an object that is not a plain value, or
    differs from the output of the first equal call.
    """
    values, tree = pytree.tree_flatten(output)
    results: list[Tensor] = []
    leaves: list[tuple[str, Any]] = []
    stored = {_identify_storage(t) for t in call.operands}
    trains = any(t.requires_grad for t in call.operands)
    for value in values:
        passed = next((i for i, t in enumerate(call.operands) if t is value), None)
        if passed is not None:
            leaves.append(("operand", passed))
        elif isinstance(value, Tensor):
            floating = value.dtype.is_floating_point or value.dtype.is_complex
            if _identify_storage(value) in stored or value.requires_grad != (trains and floating):
                raise NotEquivalent("a result is a view, or takes no gradient")
            stored.add(_identify_storage(value))
            leaves.append(("made", len(results)))
            results.append(value)
        elif is_simple(value):
            leaves.append(("plain", (type(value), value)))
        else:
            raise NotEquivalent(f"a result is a {type(value).__name__}")
    if not results:
        raise NotEquivalent("nothing is made")
    specs: list[Spec] = [(tuple(r.shape), r.stride(), r.dtype) for r in results]
    known = (tuple(leaves), tree, specs)
    if memo.num_run and known != (memo.leaves, memo.tree, _made_by[memo.number]):
        raise NotEquivalent("calls differ in what they return")
    memo.leaves, memo.tree, _made_by[memo.number] = known
    return results


def _rebuild_call_output(memo: _CallMemo, operands: list[Tensor], tensors: list[Tensor]) -> Any:
    """Return the output of a module call that was not run, in the structure that ``memo`` has from an equal call.
    ``operands``: the tensors that the call reads. ``tensors``: the new tensors of the output."""
    assert memo.tree is not None
    leaves = [
        tensors[what] if kind == "made" else operands[what] if kind == "operand" else what[1]
        for kind, what in memo.leaves
    ]
    return pytree.tree_unflatten(leaves, memo.tree)
