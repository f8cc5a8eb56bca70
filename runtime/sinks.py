"""Where gradients of parameters go, and are added up."""

from __future__ import annotations

import torch
from torch import Tensor

from passes.grouped import add_weight_gradient, grouped_mm_weight
from runtime.sharded import Room


class Sink:
    """Where the gradient of one parameter is added up. The first gradient of a step overwrites the last step's."""

    __slots__ = ("fresh", "view")

    def __init__(self, view: Tensor) -> None:
        self.view = view
        self.fresh = True

    def add(self, gradient: Tensor) -> None:
        if self.fresh:
            self.view.copy_(gradient)
            self.fresh = False
        else:
            self.view.add_(gradient)

    def addmm(self, a: Tensor, b: Tensor) -> None:
        if self.fresh:
            torch.mm(a, b, out=self.view)
            self.fresh = False
        else:
            self.view.addmm_(a, b)

    def sum(self, x: Tensor, dims: list[int] | tuple[int, ...]) -> None:
        if self.fresh:
            torch.sum(x, dims, out=self.view)
            self.fresh = False
        else:
            self.view.add_(torch.sum(x, dims))

    def grouped(self, rows: Tensor, grads: Tensor, ends: Tensor, transposed: bool) -> None:
        """Add the gradient of a stack of experts' matrices, which are ``transposed`` in the product."""
        if rows.device.type == "cpu":
            total = self.view.transpose(1, 2) if transposed else self.view
            add_weight_gradient(total, rows, grads, ends, self.fresh)
            self.fresh = False
        else:  # ends are known on the device alone
            self.add(_grouped(rows, grads, ends, transposed))

    def settle(self) -> None:
        """A gradient that nothing was added to is zero."""
        if self.fresh:
            self.view.zero_()
            self.fresh = False


class WideSink(Sink):
    """A sink in float32 of a parameter in a shorter type: what comes is added up in float32."""

    __slots__ = ()

    def addmm(self, a: Tensor, b: Tensor) -> None:
        self.add(torch.mm(a, b))

    def sum(self, x: Tensor, dims: list[int] | tuple[int, ...]) -> None:
        self.add(torch.sum(x, dims, dtype=self.view.dtype))

    def grouped(self, rows: Tensor, grads: Tensor, ends: Tensor, transposed: bool) -> None:
        self.add(_grouped(rows, grads, ends, transposed))


def _grouped(rows: Tensor, grads: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    made = grouped_mm_weight(rows, grads, ends)
    return made.transpose(1, 2) if transposed else made


def sink_of(shard: Tensor, view: Tensor) -> Sink:
    """The sink of a parameter's gradient, which is added up in ``view``."""
    return Sink(view) if view.dtype == shard.dtype else WideSink(view)


class RoomSink(Sink):
    """A sink whose memory is there from the first gradient until it is given away."""

    __slots__ = ("room",)

    def __init__(self, room: Room) -> None:
        self.room = room
        self.fresh = True

    @property
    def view(self) -> Tensor:  # type: ignore[override]  # nobody sets it
        self.room.take()
        return self.room.tensor


class WideRoomSink(RoomSink):
    """One in float32 of a parameter in a shorter type."""

    __slots__ = ()

    addmm = WideSink.addmm
    sum = WideSink.sum
    grouped = WideSink.grouped
