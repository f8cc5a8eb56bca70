"""The shapes of a plan's batches: the inputs of each shape, and the padding of smaller batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from partitioner.background import Future, can_help
from partitioner.passes.capture.capture import find_batch_dims
from partitioner.passes.capture.export import map_leaves
from partitioner.passes.capture.inputs import split_inputs
from partitioner.passes.errors import PartitionError
from partitioner.passes.ir.gradient_flow import mark_gradients
from partitioner.passes.ir.model import Captured, FoldedModel, leaf_paths
from partitioner.passes.ir.serialize import block_from_data, block_to_data
from partitioner.passes.padding.find import AxisPadding, find_axis_padding
from partitioner.passes.padding.resize import copy_captured, resize_captured, resize_folded
from partitioner.programs.requests import ShapeError, Shapes
from partitioner.runtime.family.data import BatchPadding, InputPadding
from partitioner.solve.evaluate.prepared_model import PreparedModel
from partitioner.topology import Topology
from partitioner.validate import torch_device

_LEAST = 2  # elements along an axis of the graph that another one is compared with
_PATIENCE_S = 600.0  # seconds to wait for the forked process that captures the model for other shapes

Shape = tuple[int, int]  # samples and positions; 0 positions: the inputs have no such dim


class _BlockData(NamedTuple):
    """The graph of a piece of the model, such as a layer, in a form that can be pickled. ``name``: name of the piece.
    ``nodes``: the operators of its graph as dicts. ``states``: names of its inputs that are parameters or buffers.
    ``inputs``: names of its other inputs.
    """

    name: str
    nodes: tuple[dict[str, Any], ...]
    states: tuple[str, ...]
    inputs: tuple[str, ...]


class _FoundAhead(NamedTuple):
    """Results of a forked process that captured the model for several batch shapes. ``folded``: shape (samples,
    positions) -> the model as a list of calls of blocks (such as layers), and the graphs of these blocks in a form that
    can be pickled. ``axes``: how batches are padded to more samples, to more positions, and to longer targets.
    """

    folded: dict[Shape, tuple[FoldedModel, list[_BlockData]]]
    axes: tuple[AxisPadding, AxisPadding, AxisPadding]


@dataclass(frozen=True)
class ShapeFamily:
    """A model and all batch shapes of its plan. A shape is a pair (samples, positions); positions are 0 if no input has
    a dim of positions, such as tokens in a sequence.

    ``sample``: the model with the inputs that the user gave. ``shapes``: all shapes, the largest first. ``batch_dims``,
    ``length_dims``, ``target_dims``: input path -> index of the dim of samples, of positions, or of positions of
    targets. ``targets``: number of positions of targets, which is the same in all shapes; 0 if no input has such a dim.
    ``topology``: the cluster. ``weights``: number of positions -> relative frequency of such batches; empty if all are
    equally frequent.
    """

    sample: PreparedModel
    shapes: tuple[Shape, ...]
    batch_dims: Mapping[str, int]
    length_dims: Mapping[str, int]
    target_dims: Mapping[str, int]
    targets: int
    topology: Topology
    weights: Mapping[int, float]
    _normals: dict[Shape, Captured] = field(default_factory=dict[Shape, Captured], repr=False, compare=False)
    _prepared: dict[Shape, PreparedModel] = field(default_factory=dict[Shape, PreparedModel], repr=False, compare=False)
    _ahead: list[Future[_FoundAhead]] = field(default_factory=list[Future[_FoundAhead]], repr=False, compare=False)
    _found: list[_FoundAhead] = field(default_factory=list[_FoundAhead], repr=False, compare=False)

    @staticmethod
    def of(sample: PreparedModel, asked: Shapes, global_batch: int | None, topology: Topology) -> ShapeFamily:
        """Return the family of all combinations of the numbers of samples and of positions (such as tokens of a sample)
        that the user requested by ``asked``. ``sample``: the model with the user's inputs. ``global_batch``: the number
        of samples if ``asked`` has none; ``None``: the number of samples in the inputs. If ``asked`` has no numbers of
        positions, the number in the inputs is used. ``topology``: the cluster.

        Raise :class:`ShapeError` if the inputs cannot have these shapes.
        """
        if not isinstance(sample.model, nn.Module) or sample.inputs is None:
            raise ShapeError("shapes= needs a module and inputs= of one shape; pass the module and one global batch")
        batch, dims = find_batch_dims(sample.model, sample.inputs)
        batch_dims = {path: dim for path, dim in dims.items() if dim is not None}
        leaves = dict(_list_leaves(sample.model, sample.inputs))
        length_dims, length = _find_length_dims(leaves, batch_dims)
        if asked.length and not length:
            raise ShapeError(
                f"length={asked.length}, but no input has a dim of positions: expected tokens of shape [batch, "
                "length], got "
                f"{', '.join(f'{p} {list(x.shape)}' for p, x in leaves.items())}; leave length out"
            )
        batches, lengths = asked.batch or (global_batch or batch,), asked.length or (length,)
        shapes = [(b, s) for b in batches for s in lengths]
        shapes.sort(reverse=True)
        target_dims, targets = _find_target_dims(leaves, batch_dims, length_dims)
        weights = dict(asked.weights)
        return ShapeFamily(sample, tuple(shapes), batch_dims, length_dims, target_dims, targets, topology, weights)

    def weight_of(self, shape: Shape) -> float:
        """Return the fraction of all batches that have ``shape``. All numbers of samples are equally frequent."""
        batches = len({b for b, _ in self.shapes})
        lengths = {s for _, s in self.shapes}
        given = self.weights or dict.fromkeys(lengths, 1.0)
        return given.get(shape[1], 0.0) / sum(given.values()) / batches

    @property
    def largest(self) -> PreparedModel:
        """Return the model with inputs of the largest batch shape."""
        return self.prepared_at(self.shapes[0])

    def prepared_at(self, shape: Shape) -> PreparedModel:
        """Return the model with inputs of ``shape`` (samples, positions), the same object for equal shapes. Inputs
        whose size differs from that of the user's inputs are zeros. The model's graph is captured when it is first
        needed.
        """
        if shape not in self._prepared:
            self._prepared[shape] = self._prepare(shape)
        return self._prepared[shape]

    def _prepare(self, shape: Shape) -> PreparedModel:
        """Return a new model with inputs of ``shape`` (samples, positions). Inputs whose size differs from that of the
        user's inputs are zeros.
        """
        return replace(
            self._resize_inputs((*shape, self.targets)),
            given=lambda: copy_captured(self._normal_at(shape)),
            given_folded=lambda: self._derive_folded(shape),
        )

    def _resize_inputs(self, wanted: tuple[int, int, int]) -> PreparedModel:
        """Return a new model with inputs of the sizes ``wanted``: samples, positions, and positions of targets. Inputs
        whose size differs from that of the user's inputs are zeros.
        """

        def resize(path: str, leaf: Any) -> Any:
            """Return ``leaf``, the input at ``path``, with the sizes of the requested shape: a tensor of zeros if a
            size changes, otherwise ``leaf`` itself.
            """
            if not isinstance(leaf, Tensor):
                return leaf
            sizes = list(leaf.shape)
            for dims, size in zip((self.batch_dims, self.length_dims, self.target_dims), wanted, strict=True):
                if path in dims:
                    sizes[dims[path]] = size
            return leaf if sizes == list(leaf.shape) else leaf.new_zeros(sizes)

        args, kwargs = split_inputs(self.sample.model, self.sample.inputs)
        args, kwargs = map_leaves(resize, args), map_leaves(resize, kwargs)
        return replace(self.sample, inputs=kwargs or args, given=None, given_folded=None, _known={})

    def _normal_at(self, shape: Shape) -> Captured:
        """Return the model's graph in normal form (each computation has a single form) for ``shape`` (samples,
        positions). The model is captured for the largest and the smallest sizes; graphs for sizes between are derived
        from these two if possible, which is faster, and captured otherwise."""
        if shape not in self._normals:
            self._normals[shape] = self._derive(shape) or self._capture(shape)
        return self._normals[shape]

    def _derive(self, shape: Shape) -> Captured | None:
        """Return the graph for ``shape`` (samples, positions), derived from the graphs for the largest and the smallest
        number of positions, or else of samples. ``None`` if neither number lies between the largest and the smallest,
        or if the graph cannot be derived."""
        ends = self._list_surrounding_shapes(shape)
        if not ends:
            return None
        first, last, line = ends[0]
        return resize_captured(self._normal_at(first), self._normal_at(last), line)

    def _derive_folded(self, shape: Shape) -> FoldedModel | None:
        """Return the model as calls of blocks (such as layers) for ``shape`` (samples, positions), without capturing it
        for this shape. A shape whose number of positions (or else of samples) lies between the largest and the smallest
        is derived from the models for these two numbers. If that is impossible, it is derived from the models for the
        second largest and the smallest number. (It is impossible, for example, if the largest batch reads all of a
        table of positions, and smaller batches read a part.) For other shapes the model that a forked process has
        captured is returned. ``None`` if neither is possible; the caller then captures the model."""
        ends = self._list_surrounding_shapes(shape)
        if not ends:
            return self._read_folded(shape)
        for first, last, line in ends:
            main, other = (
                self.prepared_at(end).at(None, None, torch_device(self.topology))[0] for end in (first, last)
            )
            found = resize_folded(main, other, line)
            if found is not None:
                return found
        return None

    @contextmanager
    def look_ahead(self) -> Iterator[None]:
        """Return a context manager within which a forked process works ahead. It captures the model for the shapes with
        the smallest numbers of samples or positions, and finds how batches are padded. Other methods use its results
        when they first need them. If the machine has no second processor, or there is a single shape, no process is
        started. If the process fails, the results are computed here. The model must have been captured for the largest
        shape before."""
        if len(self.shapes) < 2 or not can_help():
            yield
            return
        with Future(self._find_ahead, most_s=_PATIENCE_S) as ahead:
            self._ahead.append(ahead)
            try:
                yield
                self._read_ahead()
            finally:
                self._ahead.clear()

    def _find_ahead(self) -> _FoundAhead:
        """Do the work of the forked process and return its results in a form that can be pickled: the model for the
        shapes with the smallest or largest numbers of samples and positions, except the largest shape, and how batches
        are padded.
        """
        folded = {}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a forked process has none of the threads of its parent
        try:
            for shape in self._list_ends():
                model = self.prepared_at(shape).at(None, None, torch_device(self.topology))[0]
                every = model.blocks.values()
                blocks = [_BlockData(b.name, block_to_data(b), b.states, b.inputs) for b in every]
                folded[shape] = model.with_(blocks={}), blocks
            return _FoundAhead(folded, self._find_axes())
        finally:
            torch.set_num_threads(threads)

    def _list_ends(self) -> list[Shape]:
        """Return the shapes (samples, positions) with the largest or smallest numbers of samples and of positions,
        except the largest shape."""
        batches, lengths = zip(*self.shapes, strict=True)
        corners = {(b, s) for b in (max(batches), min(batches)) for s in (max(lengths), min(lengths))}
        return sorted(corners - {self.shapes[0]}, reverse=True)

    def capture_ends(self) -> None:
        """Capture the model for a few batch shapes, from which the models for all other shapes are derived: the shapes
        with the smallest and the largest numbers of samples and positions. If some models cannot be derived from these,
        also capture the shapes with the second largest numbers. Processes that are forked from this one afterwards need
        not capture them again.
        """
        ends = self._list_ends()
        others = [s for s in self.shapes[1:] if s not in ends and len(self._list_surrounding_shapes(s)) == 1]
        for shape in (*ends, *others):
            self.prepared_at(shape).at(None, None, torch_device(self.topology))

    def _read_ahead(self) -> _FoundAhead | None:
        """Wait for the forked process that captures the model for other batch shapes, and return its results. Later
        calls return the same results. ``None`` if no such process was started."""
        if self._ahead:
            self._found.append(self._ahead.pop().result())
        return self._found[0] if self._found else None

    def _read_folded(self, shape: Shape) -> FoldedModel | None:
        """Return the model as calls of blocks (such as layers) for ``shape`` (samples, positions) if the forked process
        has captured it, else ``None``."""
        ahead = self._read_ahead()
        if ahead is None or shape not in ahead.folded:
            return None
        model, blocks = ahead.folded[shape]
        model = model.with_(blocks={data.name: block_from_data(*data) for data in blocks})
        mark_gradients(model, self.sample.objective == "train")
        return model

    def _list_surrounding_shapes(self, shape: Shape) -> list[tuple[Shape, Shape, tuple[int, int, int]]]:
        """Return the pairs of batch shapes (samples, positions) between which ``shape`` lies, so that its graph may be
        derived from theirs. Each is a tuple (larger, smaller, sizes), in the order in which to try them.

        The two shapes differ in the number of positions, and the number of ``shape`` lies in between. If ``shape`` has
        the largest or the smallest number of positions, they differ in the number of samples instead. The first pair
        has the largest and the smallest number, the second pair the second largest and the smallest. ``sizes`` has the
        number in which they differ: of the larger shape, of the smaller one and of ``shape``. The list is empty if both
        numbers of ``shape`` are the largest or smallest ones.
        """
        for axis in (1, 0):
            low, *others = sorted({each[axis] for each in self.shapes})
            if not others or not low < shape[axis] < others[-1]:
                continue
            found = []
            for high in (size for size in others[:-3:-1] if size > shape[axis]):
                first, last = ((shape[0], s) if axis else (s, shape[1]) for s in (high, low))
                found.append((first, last, (high, low, shape[axis])))
            return found
        return []

    def _capture(self, shape: Shape) -> Captured:
        return replace(self.prepared_at(shape), given=None).normalize_capture(None, torch_device(self.topology))

    def padding_at(self, shape: Shape) -> BatchPadding:
        """Return an object that says how a batch that is smaller than ``shape`` (samples, positions) is padded to
        ``shape``: the dims and fill values of each input, and the dims in which outputs are cut afterwards."""
        fewer, shorter, targets = self._axes
        inputs = {}
        for path in {**self.batch_dims, **self.length_dims, **self.target_dims}:
            hiding = shorter.hiding.get(path, targets.hiding.get(path))
            inputs[path] = InputPadding(
                batch_dim=self.batch_dims.get(path),
                length_dim=self.length_dims.get(path),
                batch_fill=fewer.fills.get(path),
                length_fill=shorter.fills.get(path),
                target_dim=self.target_dims.get(path),
                target_fill=targets.fills.get(path),
                hides=None if hiding is None else hiding.number,
                unseen="all" if hiding is None else hiding.unseen,
            )
        outputs: dict[str, tuple[int | None, int | None]] = {}
        for path in {**fewer.outputs, **shorter.outputs}:
            outputs[path] = (fewer.outputs.get(path, (None, 0))[0], shorter.outputs.get(path, (None, 0))[0])
        return BatchPadding(
            batch=shape[0],
            length=shape[1],
            targets=self.targets,
            target_outputs=targets.outputs,
            shorter_targets=targets.fault if self.targets else "",
            weight=self.weight_of(shape),
            inputs=inputs,
            outputs=outputs,
            trimmed={path: more for path, (_, more) in shorter.outputs.items() if more},
            fewer=fewer.fault,
            shorter=shorter.fault,
        )

    @cached_property
    def _axes(self) -> tuple[AxisPadding, AxisPadding, AxisPadding]:
        """Return three objects that say how batches are padded: to more samples, to more positions, and to longer
        targets."""
        ahead = self._read_ahead()
        return self._find_axes() if ahead is None else ahead.axes

    def _find_axes(self) -> tuple[AxisPadding, AxisPadding, AxisPadding]:
        """Return three objects that say how batches are padded: to more samples, to more positions, and to longer
        targets. If one of these is impossible, the attribute ``fault`` of its object is a text that says why."""
        batch, length = self.shapes[0]
        whole = self._normal_at((batch, length))
        fewer = shorter = AxisPadding(fault="the plan's batches have one sample")
        if batch >= _LEAST:
            other = min((b for b, _ in self.shapes if _LEAST <= b < batch), default=2 * batch)
            found = self._normal_at((other, length))
            fewer = find_axis_padding(whole, found, self.batch_dims, (batch, other))
        if length >= _LEAST:
            least = min((s for _, s in self.shapes if _LEAST <= s < length), default=max(1, length // 2))
            other = self._find_own_size(least, length)
            found = self._normal_at((batch, other))
            shorter = find_axis_padding(whole, found, self.length_dims, (length, other))
        else:
            shorter = AxisPadding(fault="the inputs have no dim of positions")
        return fewer, shorter, self._find_target_axis(whole)

    def _find_target_axis(self, whole: Captured) -> AxisPadding:
        """Return an object that says how batches are padded to longer targets. ``whole``: the model's graph for the
        largest shape."""
        if not self.targets:
            return AxisPadding(fault="the inputs have no targets of another length")
        sizes = {int(n) for _, leaf in _list_leaves(self.sample.model, self.sample.inputs) for n in leaf.shape}
        avoided = sizes | set(self.shapes[0])
        smaller = min((n for n in range(1, self.targets) if n not in avoided), key=self._distance_to_half, default=1)
        try:
            other = self._resize_inputs((*self.shapes[0], smaller)).normalize_capture(None, torch_device(self.topology))
        except PartitionError as error:
            why = str(error).partition("\n")[0]
            return AxisPadding(fault=f"the model cannot be captured with targets of {smaller} positions: {why}")
        return find_axis_padding(whole, other, self.target_dims, (self.targets, smaller))

    def _distance_to_half(self, size: int) -> float:
        return abs(size - self.targets / 2)

    def _find_own_size(self, size: int, length: int) -> int:
        """Return a number of positions near ``size`` and below ``length``, for a batch from which padding is derived.
        It differs from the sizes of all dims of the inputs that are neither samples nor positions. (If two sizes were
        equal by chance, the graph would have fewer operators, because equal tables are computed once.) ``size``: the
        preferred number. ``length``: the largest number of positions of the plan's batch shapes."""
        leaves = _list_leaves(self.sample.model, self.sample.inputs)
        fixed = {
            int(number)
            for path, leaf in leaves
            for dim, number in enumerate(leaf.shape)
            if dim not in (self.batch_dims.get(path), self.length_dims.get(path))
        }
        return min((n for n in range(1, length) if n not in fixed), key=lambda n: abs(n - size), default=size)


def look_ahead(family: ShapeFamily | None) -> AbstractContextManager[None]:
    """Return a context manager within which a forked process captures the model for further batch shapes of ``family``
    (all batch shapes of a plan) ahead of time. The context does nothing if ``family`` is ``None``, because the plan
    then has a single shape."""
    return nullcontext() if family is None else family.look_ahead()


def _list_leaves(model: nn.Module | ExportedProgram, inputs: Any) -> Iterator[tuple[str, Tensor]]:
    for part in split_inputs(model, inputs):
        for path, leaf in leaf_paths(part):
            if isinstance(leaf, Tensor):
                yield path, leaf


def _find_target_dims(
    leaves: Mapping[str, Tensor], batch_dims: Mapping[str, int], length_dims: Mapping[str, int]
) -> tuple[dict[str, int], int]:
    """Return two values: a dict, input path -> index of its dim of target positions, for the inputs that have such a
    dim; and the number of target positions. ``({}, 0)`` if no targets have another length than the samples.

    The first two-dimensional integer input ``[samples, positions]`` whose number of positions is not that of the
    samples decides the number. ``leaves``: input path -> tensor. ``batch_dims``, ``length_dims``: input path -> dim of
    samples, or of positions.
    """
    targets = next(
        (
            int(leaf.shape[1])
            for path, leaf in leaves.items()
            if leaf.dim() == 2 and not leaf.is_floating_point() and batch_dims.get(path) == 0 and length_dims
            if path not in length_dims and leaf.shape[1] >= _LEAST
        ),
        0,
    )
    dims = dict[str, int]()
    for path, leaf in leaves.items():
        taken = batch_dims.get(path), length_dims.get(path)
        found = [d for d, size in enumerate(leaf.shape) if targets and size == targets and d not in taken]
        if len(found) > 1:
            return {}, 0
        dims |= dict.fromkeys([path] * len(found), found[0] if found else 0)
    return dims, targets


def _find_length_dims(leaves: Mapping[str, Tensor], batch_dims: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return two values: a dict, input path -> index of its dim of positions, for the inputs that have such a dim; and
    the number of positions. ``({}, 0)`` if no input holds tokens.

    The first two-dimensional integer input ``[samples, positions]`` decides the number of positions. In every other
    input, the dim of positions is the one with this size. ``leaves``: input path -> tensor. ``batch_dims``: input path
    -> dim of samples. Raise :class:`ShapeError` for an input with two such dims.
    """
    tokens = (x for p, x in leaves.items() if x.dim() == 2 and not x.is_floating_point() and batch_dims.get(p) == 0)
    first = next(tokens, None)
    if first is None:
        return {}, 0
    length, dims = int(first.shape[1]), dict[str, int]()
    for path, leaf in leaves.items():
        found = [d for d, size in enumerate(leaf.shape) if size == length and d != batch_dims.get(path)]
        if len(found) > 1:
            raise ShapeError(
                f"input {path!r} of shape {list(leaf.shape)} has {len(found)} dims of {length} positions; expected at "
                "most one: pass a mask as [batch, length], or inputs in which these dims differ"
            )
        dims |= dict.fromkeys([path] * len(found), found[0] if found else 0)
    return dims, length
