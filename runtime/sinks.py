"""Where gradients of parameters go, and are added up."""

from __future__ import annotations

import torch
from torch import Tensor

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

    def settle(self) -> None:
        """A gradient that nothing was added to is zero."""
        if self.fresh:
            self.view.zero_()
            self.fresh = False


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
