"""The shapes of a plan's batches: inputs of each shape, and how smaller batches are padded to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from partitioner.passes.capture.capture import given_samples
from partitioner.passes.capture.export import leaf_paths, map_leaves
from partitioner.passes.capture.inputs import split_inputs
from partitioner.passes.ir.model import Captured
from partitioner.passes.padding.find import AxisPadding, find_axis_padding
from partitioner.passes.padding.resize import copy_captured, resize_captured
from partitioner.programs.requests import ShapeError, Shapes
from partitioner.runtime.family.data import BatchPadding, InputPadding
from partitioner.solve.evaluate.prepared_model import PreparedModel
from partitioner.topology import Topology
from partitioner.validate import torch_device

_LEAST = 2  # elements along an axis of the graph that another one is compared with

Shape = tuple[int, int]  # samples and positions; 0 positions: the inputs have no such dim


@dataclass(frozen=True)
class ShapeFamily:
    """A model and all batch shapes of its plan. A shape is a pair (samples, positions); positions are 0 if no input has
    a dim of positions, such as tokens in a sequence.

    ``sample``: the model with the inputs that the user gave. ``shapes``: all shapes, the largest first. ``batch_dims``,
    ``length_dims``: input path -> index of the dim of samples, or of positions. ``topology``: the cluster. ``weights``:
    number of positions -> relative frequency of such batches; empty if all are equally frequent.
    """

    sample: PreparedModel
    shapes: tuple[Shape, ...]
    batch_dims: Mapping[str, int]
    length_dims: Mapping[str, int]
    topology: Topology
    weights: Mapping[int, float]
    _normals: dict[Shape, Captured] = field(default_factory=dict[Shape, Captured], repr=False, compare=False)

    @staticmethod
    def of(sample: PreparedModel, asked: Shapes, global_batch: int | None, topology: Topology) -> ShapeFamily:
        """Return the family of all combinations of the batch sizes and lengths that the user requested by ``asked``. If
        ``asked`` has no batch sizes, the only one is ``global_batch`` (a number of samples) or that of the inputs; if
        it has no lengths, the only one is that of the inputs. ``sample``: the model with its inputs. ``topology``: the
        cluster.

        Raise :class:`ShapeError` if the inputs cannot have these shapes.
        """
        if not isinstance(sample.model, nn.Module) or sample.inputs is None:
            raise ShapeError("shapes= needs a module and inputs= of one shape; pass the module and one global batch")
        batch, dims = given_samples(sample.model, sample.inputs)
        batch_dims = {path: dim for path, dim in dims.items() if dim is not None}
        leaves = dict(_list_leaves(sample.model, sample.inputs))
        length_dims, length = _find_length_dims(leaves, batch_dims)
        if asked.length and not length:
            raise ShapeError(
                f"length={asked.length}, but no input has a dim of positions: expected tokens as [batch, length], got "
                f"{', '.join(f'{p} {list(x.shape)}' for p, x in leaves.items())}; leave length out"
            )
        batches, lengths = asked.batch or (global_batch or batch,), asked.length or (length,)
        shapes = [(b, s) for b in batches for s in lengths]
        shapes.sort(reverse=True)
        return ShapeFamily(sample, tuple(shapes), batch_dims, length_dims, topology, dict(asked.weights))

    def weight_of(self, shape: Shape) -> float:
        """Return the fraction of all batches that have ``shape``. All numbers of samples are equally frequent."""
        batches = len({b for b, _ in self.shapes})
        lengths = {s for _, s in self.shapes}
        given = self.weights or dict.fromkeys(lengths, 1.0)
        return given.get(shape[1], 0.0) / sum(given.values()) / batches

    @property
    def largest(self) -> PreparedModel:
        """Return the model with inputs of the largest shape."""
        return self.prepared_at(self.shapes[0])

    def prepared_at(self, shape: Shape) -> PreparedModel:
        """Return the model with inputs of ``shape`` (samples, positions). Inputs that differ from the given ones in
        size are zeros. The model's graph is captured when it is first needed.
        """

        def resize(path: str, leaf: Any) -> Any:
            """Return ``leaf``, the input at ``path``, with the sizes of the requested shape: a tensor of zeros if a
            size changes, otherwise ``leaf`` itself.
            """
            if not isinstance(leaf, Tensor):
                return leaf
            sizes = list(leaf.shape)
            for dims, size in zip((self.batch_dims, self.length_dims), shape, strict=True):
                if path in dims:
                    sizes[dims[path]] = size
            return leaf if sizes == list(leaf.shape) else leaf.new_zeros(sizes)

        args, kwargs = split_inputs(self.sample.model, self.sample.inputs)
        args, kwargs = map_leaves(resize, args), map_leaves(resize, kwargs)
        return replace(
            self.sample, inputs=kwargs or args, given=lambda: copy_captured(self._normal_at(shape)), _known={}
        )

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
        for axis in (1, 0):
            sizes = [each[axis] for each in self.shapes]
            low, high = min(sizes), max(sizes)
            if low < shape[axis] < high:
                first, last = (self._normal_at((shape[0], s) if axis else (s, shape[1])) for s in (high, low))
                return resize_captured(first, last, (high, low, shape[axis]))
        return None

    def _capture(self, shape: Shape) -> Captured:
        return replace(self.prepared_at(shape), given=None).normalize_capture(None, torch_device(self.topology))

    def padding_at(self, shape: Shape) -> BatchPadding:
        """Return how a batch that is smaller than ``shape`` (samples, positions) is padded to it: the dims and fill
        values of each input, and the dims in which outputs are cut afterwards.
        """
        fewer, shorter = self._axes
        inputs = {}
        for path in {**self.batch_dims, **self.length_dims}:
            inputs[path] = InputPadding(
                batch_dim=self.batch_dims.get(path),
                length_dim=self.length_dims.get(path),
                batch_fill=fewer.fills.get(path),
                length_fill=shorter.fills.get(path),
            )
        outputs: dict[str, tuple[int | None, int | None]] = {}
        for path in {**fewer.outputs, **shorter.outputs}:
            outputs[path] = (fewer.outputs.get(path, (None, 0))[0], shorter.outputs.get(path, (None, 0))[0])
        return BatchPadding(
            batch=shape[0],
            length=shape[1],
            weight=self.weight_of(shape),
            inputs=inputs,
            outputs=outputs,
            trimmed={path: more for path, (_, more) in shorter.outputs.items() if more},
            fewer=fewer.fault,
            shorter=shorter.fault,
        )

    @cached_property
    def _axes(self) -> tuple[AxisPadding, AxisPadding]:
        """Return how batches are padded in two directions, as a pair: to more samples, and to more positions. If
        padding in a direction is impossible, the ``fault`` of that element says why."""
        batch, length = self.shapes[0]
        whole = self._normal_at((batch, length))
        fewer = shorter = AxisPadding(fault="the plan's batches have one sample")
        if batch >= _LEAST:
            other = min((b for b, _ in self.shapes if _LEAST <= b < batch), default=2 * batch)
            found = self._normal_at((other, length))
            fewer = find_axis_padding(whole, found, self.batch_dims, (batch, other))
        if length >= _LEAST:
            other = min((s for _, s in self.shapes if _LEAST <= s < length), default=max(1, length // 2))
            found = self._normal_at((batch, other))
            shorter = find_axis_padding(whole, found, self.length_dims, (length, other))
        else:
            shorter = AxisPadding(fault="the inputs have no dim of positions")
        return fewer, shorter


def _list_leaves(model: nn.Module, inputs: Any) -> Iterator[tuple[str, Tensor]]:
    for part in split_inputs(model, inputs):
        for path, leaf in leaf_paths(part):
            if isinstance(leaf, Tensor):
                yield path, leaf


def _find_length_dims(leaves: Mapping[str, Tensor], batch_dims: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return the dim of positions of each input that has one (input path -> dim index), and the number of positions.
    ``({}, 0)`` if no input holds tokens.

    The first two-dimensional integer input ``[samples, positions]`` decides the number of positions. In other inputs
    the dim with this size is taken. ``leaves``: input path -> tensor. ``batch_dims``: input path -> dim of samples.
    Raise :class:`ShapeError` for an input with two such dims.
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
