"""Trace the fake copy of a model, and decide what happens to Python state that forward reads or changes.

Requires: a fake copy (a copy with fake parameters, from ``passes/capture/export.py``) and its arguments. Provides: a
captured graph in which Python numbers of the inputs are 0-dimensional tensors, and Python numbers that forward changes
(counters) are buffers. If forward changes other Python state, and this has an effect on what forward computes, an error
is raised.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from partitioner.passes.capture.assemble import assemble_program_graph
from partitioner.passes.capture.export import (
    Counter,
    ParameterlessCopy,
    export_parameterless_copy,
    make_fake_copy,
    try_forward,
)
from partitioner.passes.capture.functionalize import flatten_program
from partitioner.passes.capture.inputs import Bound, find_plain_numbers, lift_leaves, list_forward_arguments
from partitioner.passes.capture.python_state import (
    Attributes,
    ClockObserver,
    PythonState,
    StateChange,
    are_computations_equal,
    collect_attributes,
    find_draw,
)
from partitioner.passes.capture.wrappers import take_hooks_into_forward
from partitioner.passes.errors import CaptureError, PartitionError, UnsupportedError
from partitioner.passes.experts.traced_loops import TracedLoops
from partitioner.passes.ir.lifted_numbers import Expression, Guard, LiftScope, NotLiftable
from partitioner.passes.ir.model import CallSignature, Captured, ModelState, TensorSpec
from partitioner.passes.trace.autograd_functions import add_loss_terms, drop_looking_hooks
from partitioner.passes.trace.layer_equality import ModuleGroup, ParkedParameters
from partitioner.passes.trace.layer_expansion import NotRepeatable, expand_layer_operators, sort_states
from partitioner.passes.trace.layer_reuse import LayerRepeats


@dataclass(frozen=True)
class Trace:
    """Result of one trace of ``fake_copy``, a copy of the model with fake tensors.

    ``captured``: the model's graph with the names of its parameters, buffers, inputs and outputs. ``attributes_after``:
    the attributes of the fake copy's modules after forward: (module path, attribute name) -> (comparison key, value),
    where equal keys mean that an attribute has not changed. ``arguments``: (positional arguments, keyword arguments) of
    forward. ``uses``: path of an input that is a Python number and fixed in the plan -> what forward uses it for, as
    text.
    """

    captured: Captured
    fake_copy: ParameterlessCopy
    attributes_after: Attributes
    arguments: Bound
    uses: Mapping[str, str]  # path of a number that stays fixed -> what forward uses it for


@dataclass(frozen=True)
class Tracer:
    """Settings that all traces of ``model`` share.

    ``dtype``: the dtype to which floating-point tensors are cast; ``None`` keeps their dtypes. ``loss``: computes the
    loss from the model's output; ``None`` if there is none. ``train``: whether gradients are traced. ``canonical``:
    name of a parameter or buffer -> the one name that is used for it. ``functions``: code outside of modules that a
    trace calls, such as hooks.
    """

    model: nn.Module
    dtype: torch.dtype | None
    loss: Callable[[Any], Tensor] | None
    canonical: Mapping[str, str]
    train: bool
    functions: tuple[Any, ...] = ()

    def take_snapshot(self, module: nn.Module) -> PythonState:
        """Return a snapshot of the Python state (attributes, globals, random generators) that the forward of ``module``
        can change.

        Args:
            module: a copy of the model, whose forward has not yet been called.
        """
        return PythonState.take(module, self.model.forward, self.loss, *self.functions)

    def capture(self, fake_copy: ParameterlessCopy, arguments: Bound, lift_numbers: bool, before: PythonState) -> Trace:
        """Trace the forward of ``fake_copy`` and return the result. Python state that forward changed is restored
        afterwards.

        Raises :class:`UnsupportedError` if forward changes Python state that has an effect on what it computes and that
        cannot become a buffer of the plan.

        Args:
            fake_copy: the copy of the model with fake tensors that is traced.
            arguments: (positional arguments, keyword arguments) of forward.
            lift_numbers: whether to read Python numbers of the inputs as tensors if forward allows it.
            before: the Python state from which forward starts.
        """
        clock = ClockObserver()
        before.restore()
        try:
            with clock.observe(fake_copy.module):
                trace = self._trace_with_numbers(fake_copy, arguments, lift_numbers)
            changes = before.find_changes(trace.attributes_after)
            if changes or clock.asked_at:
                trace = _StateChangeResolver(self, before, trace).resolve(changes, clock)
        finally:
            before.restore()
        return trace

    def trace(self, fake_copy: ParameterlessCopy, arguments: Bound, uses: Mapping[str, str]) -> Trace:
        """Trace ``fake_copy``, a copy of the model with fake tensors, and return the captured graph with a record of
        the trace.

        A loop of forward over the experts that some row (token) chose is traced over all experts. A branch of forward
        on whether an expert has rows is traced as if the expert had rows. In both cases, forward is traced twice more,
        as if even experts had no rows, and as if odd ones had none. These traces serve to prove that an expert without
        rows has no effect; they are stored in ``captured.turns`` of the result.

        Args:
            arguments: (positional arguments, keyword arguments) of forward.
            uses: path of an input that is a Python number and fixed in the plan -> what forward uses it for, as text.
              It is
                stored in the result.
        """
        attributes_after: Attributes = {}
        captured, traced = self._trace_module(fake_copy, arguments, attributes_after)
        scope, loops, pairs = fake_copy.scope, traced.loops, list[Captured]()
        guards = tuple(scope.guards)
        for parity, empty in enumerate(captured.turns):
            fake_copy = self.renew_copy(fake_copy, hits=loops.without_parity(parity))
            pairs += [empty, self._trace_module(fake_copy, arguments, {})[0]]
        signature = replace(captured.signature, arguments=list_forward_arguments(self.model), guards=guards)
        return Trace(captured.with_(turns=tuple(pairs), signature=signature), traced, attributes_after, arguments, uses)

    def renew_copy(self, fake_copy: ParameterlessCopy, **changes: Any) -> ParameterlessCopy:
        """Return a new copy of the model with fake tensors for another trace, with the options of ``fake_copy``, an
        earlier copy.

        Args:
            changes: name of a field of the fake copy -> its new value. Two keys are not field names. ``hits`` has the
              record
                of loops over experts (the field ``loops``). ``flipped`` has conditions on lifted numbers (Python
                  numbers that
                are traced as tensors), at which the next trace takes the other branch.
        """
        scope = LiftScope(fake_copy.scope.find_line, changes.pop("flipped", ()))
        loops = changes.pop("hits", None) or TracedLoops()
        made = make_hookless_copy(self.model, self.dtype, fake_copy.mode, fake_copy.casts, fake_copy.caches_kept)
        given: dict[str, Any] = {
            "numbers": fake_copy.numbers,
            "counters": fake_copy.counters,
            "attributes": fake_copy.attributes,
        }
        given |= {"warm_up": fake_copy.warm_up, **changes}
        made = replace(made, read_buffers=fake_copy.read_buffers, loops=loops, scope=scope, **given)
        for (path, name), value in made.attributes.items():
            vars(made.module.get_submodule(path))[name] = _copy_container(value)
        for counter in made.counters:
            made.module.register_buffer(counter.buffer, made.empty((), counter.dtype))
        if made.warm_up is not None:
            made.warm_up(made)
        return made

    # -- numbers of the inputs

    def _trace_with_numbers(self, fake_copy: ParameterlessCopy, arguments: Bound, lift_numbers: bool) -> Trace:
        """Trace ``fake_copy``, a copy of the model with fake tensors, and return the result. Inputs that are Python
        numbers become tensors if forward accepts tensors; otherwise their values are fixed in the graph.

        ``lift_numbers``: whether tensors are tried at all. ``arguments``: (positional, keyword) arguments of forward.
        """
        numbers, uses = self._choose_numbers(fake_copy, arguments) if lift_numbers else ({}, {})
        if numbers:
            lifted = self.renew_copy(fake_copy, numbers=numbers)
            with contextlib.suppress(NotLiftable, CaptureError, UnsupportedError):
                return self.trace(lifted, lift_leaves(arguments, lifted), uses)
            fake_copy = self.renew_copy(fake_copy)
        return self.trace(fake_copy, arguments, uses)

    def _choose_numbers(
        self, fake_copy: ParameterlessCopy, arguments: Bound
    ) -> tuple[dict[str, int | float], dict[str, str]]:
        """Choose the inputs that are Python numbers and that forward accepts as tensors. Return two dicts by path of
        the input: the values of the chosen inputs; and texts on what forward uses numbers for, among them one for each
        number that was not chosen.

        Args:
            fake_copy: copy of the model with fake tensors.
            arguments: (positional arguments, keyword arguments) of forward.
        """
        numbers, uses = find_plain_numbers(arguments), dict[str, str]()

        def runs(chosen: dict[str, int | float]) -> bool:
            """Return whether the model's forward runs if the inputs ``chosen``, which are Python numbers, are passed as
            tensors. ``chosen``: input path -> value.

            If ``chosen`` has a single number, also store a text in the dict ``uses`` of the enclosing function, under
            the path of the number. The text says what forward needs a Python number for; it is empty if a tensor
            suffices.
            """
            tried = self.renew_copy(fake_copy, numbers=chosen)
            result = try_forward(tried, *lift_leaves(arguments, tried))
            if len(chosen) == 1:
                uses.update(dict.fromkeys(chosen, tried.scope.problem))
            return not isinstance(result, Exception) and not tried.scope.problem

        if not numbers or runs(numbers) or not runs({}):  # if forward fails in any case, the trace reports it
            return numbers, {}
        return {path: value for path, value in numbers.items() if runs({path: value})}, uses

    # -- one trace

    def _trace_module(
        self, fake_copy: ParameterlessCopy, arguments: Bound, attributes_after: Attributes
    ) -> tuple[Captured, ParameterlessCopy]:
        """Trace a copy of the model with fake tensors (a fake copy) once. Return (captured graph, fake copy that was
        traced).

        Of equal layers only one is traced. If that fails, a new fake copy is traced with all layers, and this copy is
        returned.

        Args:
            fake_copy: the fake copy to trace.
            arguments: (positional arguments, keyword arguments) of forward.
            attributes_after: a dict that is filled with the attributes after forward, (module path, attribute name) ->
                (comparison key, value), because torch.export resets them.
        """
        args, kwargs = arguments
        canonical = {**self.canonical, **{c.buffer: c.full_name for c in fake_copy.counters}}
        self.prepare(fake_copy, attributes_after)

        def made(
            fake_copy: ParameterlessCopy, program: ExportedProgram, finish: Callable[[Captured], Captured]
        ) -> tuple[Captured, ParameterlessCopy]:
            """Return (captured graph of ``program``, ``fake_copy``). ``program``: the result of torch.export for
            ``fake_copy``, a copy of the model. ``finish``: rewrites the captured graph at the end.

            A loop of forward over the experts that some row (token) chose was traced as a loop over all experts, and a
            branch on whether an expert has rows as if it had rows. If there are any, the field ``turns`` of the
            captured graph gets two more captures of the same program. In the first, the masks of the rows that chose an
            even expert are zeros; in the second, those of odd experts. The caller uses them to prove that an expert
            without rows changes nothing. Raise :class:`UnsupportedError` if a loop was left early, or if such masks
            were written in place.
            """
            loops = fake_copy.loops
            loops.check_complete()

            def captured(parity: int | None) -> Captured:
                """Return the captured graph of the traced program. The masks of the rows that chose an expert with an
                even (``parity`` 0) or odd (1) number are replaced by masks of zeros; ``None`` leaves all masks
                unchanged."""
                decided = loops.branches.decided if loops.branches is not None else ()
                with_loss, numbers = self.loss is not None, fake_copy.numbers
                found = assemble_program_graph(
                    program, canonical, with_loss, parity=parity, decided=decided, numbers=numbers
                )
                return add_loss_terms(_add_counter_updates(finish(found), fake_copy.counters))

            whole = captured(loops.leaves_out if loops.branches is not None else None)
            pairs = [captured(parity) for parity in range(2)] if loops.found and loops.leaves_out is None else []
            return whole.with_(turns=tuple(pairs)), fake_copy

        own = _map_tensor_addresses(self.model)
        repeats, given_up = (
            LayerRepeats.find(fake_copy.module).select_parked_parameters(fake_copy.module),
            list[ModuleGroup](),
        )
        while repeats.groups and fake_copy.loops.branches is None:
            parked = repeats.parked
            try:
                with repeats.trace():
                    program = flatten_program(
                        export_parameterless_copy(fake_copy, args, kwargs, train=self.train, diagnose=False), own
                    )
                if parked is None:
                    return made(fake_copy, program, expand_layer_operators)
                return made(
                    fake_copy,
                    program,
                    functools.partial(_expand_shared_layers, _list_removed_states(parked, canonical), canonical),
                )
            except NotRepeatable as error:
                repeats.refuse(error.number)
            except Exception:  # caused by the shortcut or by the model: the full trace shows which
                pass
            refused, given_up = repeats.refused, given_up + repeats.refused
            fake_copy = self._prepare_retry_copy(
                fake_copy, fake_copy.loops.without_parity(fake_copy.loops.leaves_out), attributes_after
            )
            remaining = LayerRepeats.find(fake_copy.module).exclude(given_up)
            if refused:
                repeats = remaining.select_parked_parameters(fake_copy.module) if parked is not None else remaining
            else:  # the trace may have failed because parameters were removed
                repeats = remaining if parked is not None else LayerRepeats([])
        try:
            program = export_parameterless_copy(fake_copy, args, kwargs, train=self.train)
        except CaptureError as error:
            if not isinstance(error.__cause__, GuardOnDataDependentSymNode) or fake_copy.loops.branches is not None:
                raise
            fake_copy = self._prepare_retry_copy(fake_copy, fake_copy.loops.with_branches(), attributes_after)
            try:
                program = export_parameterless_copy(fake_copy, args, kwargs, train=self.train, diagnose=False)
            except Exception:  # report the first error, which names the condition
                raise error from error.__cause__
        return made(fake_copy, flatten_program(program, own), lambda captured: captured)

    def _prepare_retry_copy(
        self, fake_copy: ParameterlessCopy, loops: TracedLoops, attributes_after: Attributes
    ) -> ParameterlessCopy:
        """Return a new copy of the model with fake tensors for another trace after a trace of ``fake_copy`` (an earlier
        copy) has failed. The new copy has the options of ``fake_copy``.

        Args:
            loops: an empty record of loops over experts for the new trace.
            attributes_after: a dict that the new copy's forward fills with the attributes of its modules, by (module
              path,
                attribute name).
        """
        made = replace(self.renew_copy(fake_copy, hits=loops), scope=fake_copy.scope)
        self.prepare(made, attributes_after)
        return made

    def prepare(self, fake_copy: ParameterlessCopy, attributes_after: Attributes) -> None:
        """Replace the forward of ``fake_copy``, a copy of the model with fake tensors. The new forward returns (output,
        loss) if there is a loss, otherwise the output. At its end, it also stores the attributes of the fake copy's
        modules in ``attributes_after``, as (module path, attribute name) -> (comparison key, value)."""
        loss, forward = self.loss, fake_copy.module.forward

        @functools.wraps(forward)
        def with_loss(*args: Any, **kwargs: Any) -> Any:
            """Call the model's forward, and return its output, or (output, loss) if there is a loss function. At the
            end, store the attributes of all modules, to find out later which of them forward changed.
            """
            output = forward(*args, **kwargs)
            output = output if loss is None else (output, loss(output))
            attributes_after.clear()
            attributes_after.update(collect_attributes(fake_copy.module))
            return output

        fake_copy.module.forward = with_loss


def make_hookless_copy(
    model: nn.Module,
    dtype: torch.dtype | None,
    mode: FakeTensorMode | None = None,
    casts: str | None = None,
    keep_caches: bool = False,
) -> ParameterlessCopy:
    """Return a copy of ``model`` with fake tensors, without the hooks that only observe, that is, return ``None`` and
    change nothing. Forward hooks of the outermost module become part of its forward.

    Args:
        dtype: dtype of the copy's floating-point tensors; ``None`` keeps their dtypes.
        mode: fake tensor mode of the copy; ``None`` creates one.
        casts: device type (``cpu`` or ``cuda``) whose ``torch.autocast`` regions take effect; ``None`` if none do.
        keep_caches: whether generation caches that the model's configurations switch on stay on; if false, they are
            switched off.
    """
    fake_copy = make_fake_copy(model, dtype, mode, casts, keep_caches)
    drop_looking_hooks(fake_copy.module)
    take_hooks_into_forward(fake_copy.module)
    return fake_copy


def list_fixed_input_notes(signature: CallSignature, uses: Mapping[str, str]) -> Iterator[str]:
    """Yield one note for the user that lists the inputs whose values are fixed in the plan. If there are none, yield
    nothing.

    Args:
        signature: how forward is called; its field ``fixed`` has these values by path.
        uses: path of a fixed input that is a Python number -> what forward uses it for, as text.
    """
    given = {path: value for path, value in signature.fixed.items() if value is not None}
    if given:
        texts = [
            f"{path}={value!r}" + (f" (used as {uses[path]})" if uses.get(path) else "")
            for path, value in given.items()
        ]
        yield f"fixed inputs: {', '.join(texts)}: a batch with another value is refused; plan again for it"


def _add_counter_updates(captured: Captured, counters: Sequence[Counter]) -> Captured:
    """Return the captured model ``captured`` with final entries for the buffers that stand for ``counters``, the Python
    numbers that forward changes, such as a count of calls. The only name of such a buffer becomes the name of its
    number, such as ``layers.0.calls``. Under this name, ``constants`` gets the number's value before the first call."""
    states, constants = dict(captured.states), dict(captured.constants)
    for counter in counters:
        if counter.full_name in states:
            states[counter.full_name] = replace(states[counter.full_name], aliases=())
            constants[counter.full_name] = torch.tensor(counter.value, dtype=counter.dtype)
    return captured.with_(states=states, constants=constants)


# --- Python state that the forward changes ----------------------------------------------------------------------------
class _ForwardFailed(Exception):
    """Raised if forward fails when it is called without a trace."""


@dataclass
class _StateChangeResolver:
    """Decides what happens to Python state (attributes, globals, random generators) that forward changed during a
    trace. A change without effect on results is ignored, with a note for the user. A number that forward changes can
    become a buffer of the plan. Any other change raises :class:`UnsupportedError`.

    ``before``: the state before forward. ``first``: the trace in which forward changed the state. ``tracer``: makes
    further traces.
    """

    tracer: Tracer
    before: PythonState
    first: Trace

    def resolve(self, changes: Sequence[StateChange], clock: ClockObserver) -> Trace:
        """Check the changes of Python state by forward, and return the trace to use, with notes for the user added to
        its graph.

        Raise :class:`UnsupportedError` for a change that has an effect on what forward computes and cannot be a buffer.
        ``changes``: the changes in the first trace. ``clock``: records whether the first trace read the time.
        """
        notes = [*self._check_draws([c for c in changes if c.generator]), *self._check_clock(clock)]
        changes = [c for c in changes if not c.generator]
        trace = self.first
        if changes:
            trace, more = self._resolve_changes(changes)
            notes += more
        return replace(trace, captured=trace.captured.with_(notes=(*trace.captured.notes, *notes)))

    # -- random draws and the clock

    def _check_draws(self, changes: Sequence[StateChange]) -> Iterator[str]:
        """For each random generator of Python or NumPy from which forward drew numbers, yield a note that the draws
        have no effect on what forward computes.

        Raise :class:`UnsupportedError` if traces with other random numbers compute something else. ``changes``: the
        changes of the generators.
        """
        for below in (True, False) if changes else ():
            self.before.restore()
            fake_copy = self.tracer.renew_copy(self.first.fake_copy)
            self.before.draw_first(fake_copy.module, below)
            other = self._trace_if_possible(fake_copy, self.first.arguments)
            if other is None or not are_computations_equal(self.first.captured, other.captured):
                self.before.restore()
                fake_copy = self.tracer.renew_copy(self.first.fake_copy)
                at = find_draw(functools.partial(try_forward, fake_copy, *self.first.arguments))
                raise UnsupportedError(
                    f"forward draws random numbers from {changes[0].description}{at}, and its results depend on "
                    "them: a plan "
                    "would use the same numbers at every step; expected random numbers of torch, which differ at "
                    "every step, as in torch.where(torch.rand(()) < p, a, b); or draw outside of the model and pass "
                    "the numbers as an input"
                )
        self.before.restore()
        for change in changes:
            yield (
                f"forward draws from {change.description}: other draws changed nothing that was traced; the plan "
                "draws none"
            )

    def _check_clock(self, clock: ClockObserver) -> Iterator[str]:
        """If forward read the time, yield a note that this has no effect on what forward computes; otherwise yield
        nothing.

        Raise :class:`UnsupportedError` if a trace at another time computes something else. ``clock``: records where
        forward read the time.
        """
        if not clock.asked_at:
            return
        later = ClockObserver(shift_s=86_399)
        with later.observe(self.first.fake_copy.module):
            other = self._trace_if_possible(self.tracer.renew_copy(self.first.fake_copy), self.first.arguments)
        if other is None or not are_computations_equal(self.first.captured, other.captured):
            raise UnsupportedError(
                f"forward reads the time{clock.asked_at}, and its results depend on it: a plan would always have "
                "the time "
                "at which it was made; pass the time, or what is computed from it, as an input"
            )
        yield f"forward asks for the time{clock.asked_at}, which has no effect on what it computes"

    # -- attributes, globals, closures

    def _resolve_changes(self, changes: Sequence[StateChange]) -> tuple[Trace, list[str]]:
        """Find out whether changes of attributes, globals and closure variables by forward have an effect on later
        calls of forward. Return (the trace to use, a list of notes for the user). The trace is the first one, or one in
        which the changed numbers are buffers. Raise :class:`UnsupportedError` if a change has an effect on the next
        call of forward and cannot be a buffer. ``changes``: the changes in the first trace."""
        second, changed_again = self._trace_after(self.first)
        same = second is not None and are_computations_equal(self.first.captured, second.captured)
        if same and not changed_again:  # later calls change no state either, and compute the same
            return self.first, []
        others = [c for c in changes if not c.is_number]
        counted = self._trace_with_counters([c for c in changes if c.is_number])
        if counted is not None:
            return self._check_counted_trace(counted, others)
        if not same:
            self._refuse_state_changes(changes)
        return self.first, [_format_unused_note(changes)]

    def _check_counted_trace(self, counted: Trace, others: Sequence[StateChange]) -> tuple[Trace, list[str]]:
        """Check ``counted``, the trace in which the Python numbers that forward changes are buffers. Return (the trace
        to use, a list of notes for the user). The trace is ``counted``, or the first trace if no result depends on
        these numbers.

        Raises :class:`UnsupportedError` if forward branches on such a number and the other branch would compute
        something else, or if another change has an effect on the next call of forward.

        Args:
            counted: the trace with buffers in place of the numbers.
            others: the other changes of Python state, which must have no effect.
        """
        for guard in (g for g in counted.captured.signature.guards if g.reads_state):
            flipped = self._count_flipped(counted, guard.expression)
            if flipped is None or not are_computations_equal(counted.captured, flipped.captured):
                self._refuse_decision(guard)
        if others:
            second, _ = self._trace_after(counted)
            if second is None or not are_computations_equal(counted.captured, second.captured):
                self._refuse_state_changes(others)
        counters = counted.fake_copy.counters
        used = {c.full_name for c in counters if _is_state_used(counted.captured, c.full_name)}
        notes = [_format_unused_note(others)] if others else []
        if not used:
            changes = [*(StateChange(f"the attribute {c.full_name!r}") for c in counters), *others]
            return self.first, [_format_unused_note(changes)]
        names = ", ".join(sorted(used))
        notes.append(
            f"forward changes the Python numbers {names}: the plan keeps them as state, like buffers; a run "
            "starts from their values in the module that it is given, otherwise from their values at "
            "planning time, and does not change the module"
        )
        guards = tuple(g for g in counted.captured.signature.guards if not g.reads_state)
        captured = counted.captured.with_(signature=replace(counted.captured.signature, guards=guards))
        return replace(counted, captured=captured), notes

    def _trace_with_counters(self, numbers: Sequence[StateChange]) -> Trace | None:
        """Trace forward with a buffer in place of each Python number that forward changes, such as a counter of calls,
        and return the result. ``numbers``: the records of these changes.

        Return ``None`` if there are no such numbers, or if forward uses them in a way that a tensor cannot represent.
        """
        counters = tuple(
            Counter(c.module or "", c.name, f"counter_{k}", c.before)
            for k, c in enumerate(numbers)
            if c.before is not None
        )
        if not counters:
            return None
        self.before.restore()
        fake_copy = self.tracer.renew_copy(self.first.fake_copy, counters=counters)
        try:
            return self.tracer.trace(fake_copy, self.first.arguments, self.first.uses)
        except (NotLiftable, PartitionError):
            return None

    def _count_flipped(self, counted: Trace, expression: Expression) -> Trace | None:
        self.before.restore()
        return self._trace_if_possible(
            self.tracer.renew_copy(counted.fake_copy, flipped=(expression,)), counted.arguments
        )

    def _trace_after(self, trace: Trace) -> tuple[Trace | None, list[StateChange]]:
        """Trace a second call of forward, from the Python state after the first call.

        Return (that trace, a list of the changes of Python state by the second call, without those of random
        generators). If the trace fails, return (``None``, an empty list). ``trace``: the trace of the first call.
        """
        try:
            fake_copy = self.tracer.renew_copy(
                trace.fake_copy, warm_up=functools.partial(self._run_once, trace.arguments)
            )
        except _ForwardFailed:
            self.before.restore()
            attributes_after = {
                key: v
                for key, (_, v) in trace.attributes_after.items()
                if not _is_unchanged(self.before, trace.attributes_after, key)
            }
            counters = {(c.path, c.name) for c in trace.fake_copy.counters}
            fake_copy = self.tracer.renew_copy(
                trace.fake_copy, attributes={k: v for k, v in attributes_after.items() if k not in counters}
            )
        state = self.tracer.take_snapshot(fake_copy.module)
        second = self._trace_if_possible(fake_copy, trace.arguments)
        changed = [] if second is None else state.find_changes(second.attributes_after)
        return second, [c for c in changed if not c.generator]

    def _run_once(self, arguments: Bound, fake_copy: ParameterlessCopy) -> None:
        """Call the forward of ``fake_copy`` (a copy of the model with fake tensors) once, from the Python state before
        the first call, so that the fake copy is in the state after one call.

        Tensors that forward stores have values if these depend on neither inputs nor weights. Raises
        :class:`_ForwardFailed` if forward fails. ``arguments``: (positional, keyword) arguments of forward.
        """
        self.before.restore()
        own = vars(fake_copy.module).get("forward")
        self.tracer.prepare(fake_copy, {})
        result = try_forward(fake_copy, *arguments, constants=True)
        vars(fake_copy.module).pop("forward")
        if own is not None:
            vars(fake_copy.module)["forward"] = own
        if isinstance(result, Exception):
            raise _ForwardFailed from result

    def _trace_if_possible(self, fake_copy: ParameterlessCopy, arguments: Bound) -> Trace | None:
        """Trace ``fake_copy``, a copy of the model with fake tensors, and return the result; ``None`` if it cannot be
        traced. ``arguments``: (positional arguments, keyword arguments) of forward."""
        try:
            return self.tracer.trace(fake_copy, arguments, self.first.uses)
        except (PartitionError, NotLiftable, _ForwardFailed):
            return None

    # -- error messages

    def _refuse_state_changes(self, changes: Sequence[StateChange]) -> None:
        """Raise :class:`UnsupportedError` with the message that forward makes the changes ``changes`` of Python state,
        which have an effect on its next call."""
        raise UnsupportedError(
            f"the forward changes {_format_changed_names(changes)}, and the results of its next call depend on this: "
            "a plan would repeat the first call at every step; keep it in a buffer of the module "
            "(self.register_buffer, a tensor that forward changes in place), or pass it as an input"
        )

    def _refuse_decision(self, guard: Guard) -> None:
        """Raise :class:`UnsupportedError` with the message that forward branches on a Python number that it changes
        itself. ``guard``: the condition of the branch, with its source line."""
        where = f" ({guard.where})" if guard.where else ""
        raise UnsupportedError(
            f"forward branches on {guard}{where}, a Python number that it changes itself, but a plan contains only "
            "one branch; compute it without a branch (torch.where, min and max), or branch outside of the model and "
            "pass the number as an input"
        )


def _format_unused_note(changes: Sequence[StateChange]) -> str:
    """Return a note for the user that forward changes Python state, but that this has no effect on what forward
    computes. ``changes``: the changed variables."""
    return (
        f"forward changes {_format_changed_names(changes)}, which has no effect on the results of its next "
        "call: the plan does not change it"
    )


def _format_changed_names(changes: Sequence[StateChange]) -> str:
    names = list(dict.fromkeys(c.description for c in changes))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _is_state_used(captured: Captured, name: str) -> bool:
    """Return whether an output, the loss or another parameter or buffer of the model ``captured`` is computed from the
    parameter or buffer ``name``."""
    nodes = {n.name: n for n in captured.graph.nodes}
    placeholder = next((nodes[p] for p, state in captured.placeholders.items() if state == name and p in nodes), None)
    if placeholder is None:
        return False
    reached = {placeholder}
    for node in captured.graph.nodes:
        if node.op == "call_function" and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    results = {captured.loss, *(o.value for o in captured.outputs)}
    results |= {value for state, value in captured.updates.items() if state != name}
    return any(node.name in results for node in reached)


def _is_unchanged(before: PythonState, after: Attributes, key: tuple[str, str]) -> bool:
    """Return whether an attribute of a module has the same value after forward as before.

    Args:
        before: the snapshot of Python state before forward.
        after: the attributes after forward, by (module path, attribute name), each as (comparison key, value).
        key: (module path, attribute name) of the attribute.
    """
    return key in before.attributes and before.attributes[key][0] == after[key][0]


def _map_tensor_addresses(model: nn.Module) -> dict[int, str]:
    """Return a dict for the parameters and buffers of ``model`` that have values: memory address of the tensor's data
    -> name."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    known = [(n, t) for n, t in named if not (t.is_meta or isinstance(t, FakeTensor))]
    return {t.data_ptr(): name for name, t in known if t.numel()}


def _copy_container(value: Any) -> Any:
    """Return a shallow copy of ``value``, such as a list, so that forward does not change the original in place.
    Tensors, modules and functions are returned themselves.
    """
    if isinstance(value, Tensor | nn.Module | type) or callable(value):
        return value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # copying an iterator is deprecated in Python
        return copy.copy(value)


# --- layers that are alike --------------------------------------------------------------------------------------------
def _expand_shared_layers(
    states: Mapping[int, Sequence[ModelState | None]], canonical: Mapping[str, str], captured: Captured
) -> Captured:
    """Return ``captured``, in which only one of several equal layers was traced, with the operators of all layers. The
    operator that stands for a call of another layer is replaced by copies of the traced layer's operators.

    ``states``: number of a module whose parameters were removed for the trace -> its states in order, with ``None`` in
    place of a state that was not removed. ``canonical``: name of a state (parameter or buffer) -> the one name that is
    used for it, in the order of the model.
    """
    return sort_states(expand_layer_operators(captured, states), canonical.values())


def _list_removed_states(parked: ParkedParameters, canonical: Mapping[str, str]) -> dict[int, list[ModelState | None]]:
    """Return the states of each module whose parameters were removed for the trace, as a dict: number of the module ->
    a list in order, with a :class:`ModelState` for each removed parameter and ``None`` for a state that was not
    removed.

    ``parked``: the removed parameters. ``canonical``: name of a state -> the one name that is used for it.
    """
    names: dict[str, list[str]] = {}
    for alias, name in canonical.items():
        names.setdefault(name, []).append(alias)

    def state(alias: str) -> ModelState:
        name, parameter = canonical[alias], parked.parameters[alias]
        others = tuple(n for n in names[name] if n != name)
        return ModelState(name, TensorSpec.from_tensor(parameter), "parameter", parameter.requires_grad, others)

    return {
        number: [state(name) if name is not None else None for name in of_module]
        for number, of_module in parked.list_names_by_number().items()
    }
