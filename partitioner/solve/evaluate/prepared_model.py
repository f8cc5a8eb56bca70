"""Capture a model as a graph and fold equal layers into one block once, to plan the model many times.

Planning creates many objects (graphs) that live until the plan is made. ``rare_collections`` therefore reduces the
number of passes of Python's cyclic garbage collector while a plan is made. A full pass right afterwards would take
longer than the rest of the work. Instead, the objects are moved to the oldest generation, which is collected before a
later plan, after several plans have left objects there."""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from partitioner.constraints import Constraints
from partitioner.passes.capture.buffers import collect_initial_values
from partitioner.passes.capture.capture import PRECISIONS, capture, find_batch_dims
from partitioner.passes.capture.inputs import Inputs, split_inputs
from partitioner.passes.capture.wrappers import refuse_sharded, unwrap_model
from partitioner.passes.errors import InputsError, PartitionError
from partitioner.passes.faults import typed_errors
from partitioner.passes.ir.gradient_flow import freeze_unreached, mark_gradients
from partitioner.passes.ir.model import Captured, FoldedModel, leaf_paths
from partitioner.passes.normalize.document_masks import (
    list_chunked_attentions,
    list_document_attentions,
    list_prefix_attentions,
    set_document_lengths,
)
from partitioner.passes.normalize.pipeline import normalize
from partitioner.passes.ops.random import SEED
from partitioner.passes.shard.fold import fold
from partitioner.passes.shard.sample_groups import average_over_groups
from partitioner.passes.trace.autocast import DEVICES
from partitioner.solve.sharding.batch import batch_size, of_groups, shard_batch
from partitioner.solve.sharding.sharding import ShardingSolution
from partitioner.units import format_plural
from partitioner.validate import OBJECTIVES, check_callback, check_work, type_of

Objective = Literal["train", "infer"]

_SHOWN = 3  # greatest number of module classes that a note lists
Work = tuple[FoldedModel, ShardingSolution, int]  # the folded model, the split of its batch, and the global batch size


@dataclass
class PreparedModel:
    """A model that can be planned many times, made by :func:`prepare`. :func:`partitioner.partition` accepts it in
    place of the module.

    The model is captured when it is first planned, once for each combination of global batch, size of groups of
    samples, and device type. ``model``, ``inputs``: the model, and one batch of its arguments. ``loss``: computes the
    loss from the output; ``None``: the output contains the loss. ``objective``: ``train`` or ``infer``. ``precision``:
    such as ``bf16``; ``None``: that of the parameters. ``notes``: sentences for the user about parts of the given
    module that are left out. ``given``: function that returns the captured graph for ``inputs`` without a capture, such
    as from the graphs for other batch shapes; ``None``: the model has to be captured. ``given_folded``: function that
    returns the model as calls of blocks for ``inputs``, made from the blocks for other batch shapes, or ``None`` if
    that is not possible. The field itself is ``None`` if there are no other batch shapes. ``documents``: the typical
    lengths of packed documents in positions, for the cost model; empty: the lengths are read from ``inputs``, if these
    have values."""

    model: nn.Module | ExportedProgram
    inputs: Inputs = None
    loss: Callable[[Any], Tensor] | None = None
    objective: Objective = "train"
    precision: str | None = None
    notes: tuple[str, ...] = ()
    given: Callable[[], Captured] | None = None
    given_folded: Callable[[], FoldedModel | None] | None = None
    documents: tuple[int, ...] = ()
    _known: dict[tuple[int | None, int | None, str], Work] = field(default_factory=dict, repr=False)

    def at(self, global_batch: int | None, constraints: Constraints | None = None, device: str = "cpu") -> Work:
        """Return three values, from which planning starts: the model as calls of blocks (equal layers share one), the
        layouts that split its batch, and the global batch size.

        ``global_batch``: the number of samples of a step; ``None``: as many as the given inputs have. If
        ``constraints`` say that samples interact within groups, the graphs are for one group, and the inputs are those
        of all groups. ``device``: the device type to capture for, such as ``"cpu"``. Raises :class:`InputsError` if
        there is no batch, and :class:`ConstraintError` if the batch is not a whole number of groups.
        """
        whole = isinstance(global_batch, Integral) and not isinstance(global_batch, bool)
        if global_batch is not None and (not whole or global_batch < 1):
            raise InputsError(
                f"global_batch must be a whole number of samples, 1 or more, or None; got {global_batch!r}"
            )
        size = None if constraints is None else constraints.group_size
        key = global_batch, size, device
        if key not in self._known:
            if constraints is None or size is None:
                folded = self.given_folded() if self.given_folded is not None and global_batch is None else None
                if folded is None:
                    folded = self._fold_normal_graph(self.normalize_capture(global_batch, device))
                batch = batch_size(folded, global_batch)
                self._known[key] = folded, shard_batch(folded, batch), batch
            else:
                self._known[key] = self._of_groups(global_batch, size, constraints, device)
        return self._known[key]

    def captured_as(self, global_batch: int | None, folded: FoldedModel) -> PreparedModel:
        """Store ``folded``, the model as calls of blocks (such as layers), as if it were the result of capturing the
        model with ``global_batch`` samples on any device type, and return this object. No capture is then made for that
        batch. The nodes of ``folded`` must be marked with the gradients that they need.
        """
        batch = batch_size(folded, global_batch)
        work = folded, shard_batch(folded, batch), batch
        self._known |= {(global_batch, None, device): work for device in DEVICES}
        return self

    def _of_groups(self, global_batch: int | None, size: int, constraints: Constraints, device: str) -> Work:
        """Return three values for a model whose samples interact within groups, such as in a contrastive loss or in
        batch norm: the model as calls of blocks (such as layers), the layouts that split its batch, and the global
        batch size. The graphs are for one group of ``size`` samples, and the loss is that group's part of the mean over
        all groups.

        ``global_batch``: number of samples of a step; ``None``: as many as the inputs have. ``constraints``: the user's
        constraints, which check that the batch is a whole number of groups. ``device``: the device type to capture for,
        such as ``"cpu"``."""
        given, dims = find_batch_dims(self.model, self.inputs)
        batch = given if global_batch is None else global_batch
        constraints.check_groups(batch)
        with _explain_input_errors(size):
            group = self.normalize_capture(size, device)
        found = average_over_groups(group, dims, batch // size, partial(self._capture_group, 2 * size, device))
        return *of_groups(self._fold_normal_graph(found.captured), found, batch // size), batch

    def _capture_group(self, size: int, device: str) -> Captured:
        with _explain_input_errors(size):
            return self._capture_model(size, device)

    def normalize_capture(self, global_batch: int | None, device: str) -> Captured:
        """Capture the model and return its graph in normal form: operators are rewritten into a smaller set, which
        planning knows. Numbers among the inputs become tensors in the graph. If that graph cannot be rewritten, it is
        captured again with the numbers as constants. ``global_batch``: number of samples in the graph; ``None``: as
        many as the inputs have. ``device``: the device type to capture for, such as ``"cpu"``."""
        if self.given is not None and global_batch is None:
            return self.given()
        captured = self._capture_model(global_batch, device)
        try:
            return normalize(captured)
        except PartitionError:
            if all(i.number is None for i in captured.inputs):
                raise
            return normalize(self._capture_model(global_batch, device, lift_numbers=False))

    def _capture_model(self, global_batch: int | None, device: str, lift_numbers: bool = True) -> Captured:
        """Capture the model as a graph. ``global_batch``: number of samples in the graph; ``None``: as many as the
        inputs have. ``device``: the device type to capture for. ``lift_numbers``: whether numbers among the inputs
        become tensors in the graph; if not, they become constants."""
        return capture(
            self.model,
            self.inputs,
            loss=self.loss,
            global_batch=global_batch,
            precision=type_of(self.precision),
            objective=self.objective,
            device=device,
            lift_numbers=lift_numbers,
        )

    def _fold_normal_graph(self, normal: Captured) -> FoldedModel:
        """Return the captured graph ``normal`` as calls of blocks (equal layers share one block). In the result, nodes
        are marked with the gradients that they need, states (parameters and buffers) have their initial values, and
        ``notes`` has sentences for the user, such as warnings about evaluation mode.
        """
        train = self.objective == "train"
        packed = self._set_document_lengths(normal)
        folded = fold(freeze_unreached(normal) if train else normal)
        check_work(folded, train)
        modes = _warn_about_evaluation_mode(self.model) if train else _list_inference_warnings(folded, self.model)
        folded = folded.with_(notes=(*self.notes, *folded.notes, *packed, *modes))
        mark_gradients(folded, train)
        return folded.with_(initial=collect_initial_values(self.model, folded))

    def _set_document_lengths(self, normal: Captured) -> tuple[str, ...]:
        """Store the typical lengths of packed documents in the attention nodes of the graph ``normal``, in place.
        Return one note for the user about these lengths, or an empty tuple if no attention is within documents.

        Raises :class:`InputsError` if lengths were given and no attention is within documents.
        """
        chunked = len(list_chunked_attentions(normal))
        count = len(list_document_attentions(normal.graph)) - chunked
        if not count and self.documents:
            raise InputsError(
                f"documents has {format_plural(len(self.documents), 'length')}, but no attention of the model "
                "is restricted to packed documents; expected a mask that compares the documents of query and "
                "key: leave documents out, or pass position_ids that restart at each document"
            )
        if not count and not chunked and not list_prefix_attentions(normal.graph):
            return ()
        values = {}
        if self.given is None:  # otherwise inputs of another shape have no values
            leaves = (leaf for part in split_inputs(self.model, self.inputs) for leaf in leaf_paths(part))
            values = {path: leaf for path, leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_meta}
        lengths = set_document_lengths(normal, self.documents, values)
        if not count and chunked:
            mean = sum(lengths) / len(lengths)
            return (
                f"{format_plural(chunked, 'attention call')} restricted to chunks of the sequence; the cost model "
                f"assumes chunks of {mean:.0f} positions, the mean",
            )
        if not count:
            return ()
        attended = f"{format_plural(count, 'attention call')} restricted to packed documents"
        if not lengths:
            return (
                f"{attended}; the cost model assumes one document per row, because the lengths are not known: "
                "pass documents=, or inputs with values",
            )
        return (
            f"{attended}; the cost model assumes documents of {sum(lengths) / len(lengths):.0f} positions, the mean",
        )


@contextmanager
def _explain_input_errors(size: int) -> Iterator[None]:
    """Return a context manager that adds to errors about inputs that the model is captured with ``size`` samples, the
    size of a group of interacting samples."""
    try:
        yield
    except InputsError as error:
        raise InputsError(
            f"couple='microbatch' traces the model with {size} samples, the size of a microbatch, and the "
            f"model fails with this batch size: {error}"
        ) from error


def _warn_about_evaluation_mode(asked: nn.Module | ExportedProgram) -> Iterator[str]:
    """Yield one warning for the user if the model ``asked``, which is to be trained, is in evaluation mode and some of
    its modules (such as dropout) depend on the mode. Otherwise yield nothing."""
    if isinstance(asked, ExportedProgram) or asked.training:
        return
    kinds = sorted({type(module).__name__ for module in asked.modules() if _acts_by_mode(module)})
    if kinds:
        names = ", ".join(kinds[:_SHOWN]) + (", ..." if len(kinds) > _SHOWN else "")
        yield (
            f"the model is in evaluation mode, in which {names} may behave differently from training (no "
            "dropout, fixed statistics); call model.train() before planning if this is not intended"
        )


def _acts_by_mode(module: nn.Module) -> bool:
    """Return whether the forward of ``module`` reads ``self.training``, so that it acts differently in evaluation.
    Dropout with probability 0 does not count."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "training" in code.co_names and getattr(module, "p", None) != 0


def _list_inference_warnings(model: FoldedModel, asked: nn.Module | ExportedProgram) -> Iterator[str]:
    """Yield warnings for the user about inference with a model that draws random numbers or changes its own buffers.
    ``model``: the model's graphs. ``asked``: the module or ``torch.export`` program that the user gave."""
    if SEED in model.states and isinstance(asked, nn.Module) and asked.training:
        yield (
            "the forward draws random numbers, as dropout in training mode does; call model.eval() before "
            "planning if this is not intended"
        )
    if model.updates:
        names = ", ".join(list(model.updates)[:3]) + (", ..." if len(model.updates) > 3 else "")
        training = isinstance(asked, nn.Module) and asked.training
        yield (
            f"inference changes {format_plural(len(model.updates), 'buffer')} ({names}), as the model's "
            "forward does" + ("; call model.eval() before planning if this is not intended" if training else "")
        )


@contextmanager
def modes_of_a_new_process() -> Iterator[None]:
    """Return a context manager in which gradients are enabled and tensors are created on the CPU.

    A caller may be inside ``no_grad``, ``inference_mode`` or ``torch.device``. These modes are not part of the model,
    and ranks run in processes of their own."""
    elsewhere = torch.get_default_device().type != "cpu"
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu") if elsewhere else nullcontext():
        yield


@typed_errors("prepare()")
def prepare(
    model: nn.Module | ExportedProgram | PreparedModel,
    inputs: Inputs = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    objective: Objective = "train",
    precision: str | None = None,
    documents: Sequence[int] = (),
) -> PreparedModel:
    """Prepare ``model`` to be planned many times: for several clusters, batches or constraints. The model is captured
    once, which takes most of the time of a small plan. The values of the weights may change afterwards. If layers,
    types, or the choice of trained parameters change, prepare the module again.

    Args:
        model: a module, an exported program, or a model that is prepared already, which is returned.
        inputs: one global batch, as a tuple or dict of arguments; ``None``: an exported program's own, or dummy inputs.
        loss: computes the scalar loss from the output; ``None``: the output is, or contains, the loss.
        objective: what a step is: ``train`` or ``infer``.
        precision: such as ``bf16``, ``fp32``, ``fp8`` or ``nvfp4``; ``None``: that of the parameters.
        documents: typical lengths of packed documents in positions, for the cost model; empty: the lengths are read
            from ``inputs``, if these have values.

    Raises :class:`InputsError` if ``model`` is not a model, or if it was prepared with other arguments."""
    if not isinstance(model, nn.Module | ExportedProgram | PreparedModel):
        raise InputsError(
            "model must be a torch.nn.Module, an exported program or the result of prepare(); got "
            f"{type(model).__name__}"
        )
    if isinstance(model, PreparedModel):
        given = {"inputs": inputs, "loss": loss, "precision": precision}
        other = [n for n, v in given.items() if v is not None and v is not getattr(model, n) and n != "precision"]
        other += ["precision"] if precision not in (None, model.precision) else []
        other += ["documents"] if documents and tuple(documents) != model.documents else []
        other += ["objective"] if objective not in ("train", model.objective) else []
        if other:
            raise InputsError(
                f"model is the result of prepare(), which was called with another {', '.join(other)}; expected "
                f"the same value here: leave {', '.join(other)} out, or call prepare() with it"
            )
        return model
    if objective not in OBJECTIVES:
        raise InputsError(f"objective must be one of {', '.join(OBJECTIVES)}; got {objective!r}")
    check_callback("loss", loss)
    if precision not in (None, *PRECISIONS, *_OF_PRODUCTS):
        names = ", ".join((*PRECISIONS, *_OF_PRODUCTS))
        raise InputsError(f"precision must be one of {names} or None; got {precision!r}")
    if any(isinstance(n, bool) or not isinstance(n, Integral) or n < 1 for n in documents):
        raise InputsError(
            f"documents must be the lengths of typical documents in positions, whole numbers of 1 or more; got "
            f"{list(documents)!r}"
        )
    notes: tuple[str, ...] = ()
    if isinstance(model, nn.Module):
        refuse_sharded(model)
        model, notes = unwrap_model(model)
    return PreparedModel(model, inputs, loss, objective, precision, notes, documents=tuple(int(n) for n in documents))


_OF_PRODUCTS = ("tf32", "fp8", "nvfp4")  # precisions of matrix products only

_RARELY = (2_000_000, 10, 10)  # thresholds of the collector: more objects than a usual plan creates

_MANY = 50_000  # number of young objects above which a pass takes a noticeable time
_TOO_MANY = 1_500_000  # number of objects moved to the oldest generation before a full pass: some 200 MB

_put_off = 0


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Return a context manager in which Python's cyclic garbage collector runs after many more allocations than usual.
    At its end the user's thresholds are restored, and the new objects are moved to the oldest generation, so that they
    do not trigger a full pass."""
    global _put_off
    before = gc.get_threshold()
    rarely = gc.isenabled() and before[0] > 0
    if rarely:
        if _put_off > _TOO_MANY:
            gc.collect()
            _put_off = 0
        gc.set_threshold(*(max(pair) for pair in zip(_RARELY, before, strict=True)))
    try:
        yield
    finally:
        young = gc.get_count()[0]
        if rarely and young > _MANY and not gc.get_freeze_count():  # objects that the user has frozen stay frozen
            _put_off += young
            gc.freeze()
            gc.unfreeze()  # moves them to the oldest generation
        gc.set_threshold(*before)
