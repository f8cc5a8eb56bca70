"""A U-Net: skips that reach over many stages, convolutions, group norms, pooling and interpolation.

python examples/unet.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class UNet(nn.Module):
    """Denoises images: what each level makes on the way down is read again on the way up."""

    def __init__(self, channels: int = 16, levels: int = 3) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(levels)]
        self.inward = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList(Residual(a, b) for a, b in zip([channels, *widths], widths, strict=False))
        self.middle = Residual(widths[-1], widths[-1])
        self.up = nn.ModuleList(
            Residual(a + b, b) for a, b in zip([widths[-1], *widths[:0:-1]], widths[::-1], strict=True)
        )
        self.outward = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, image: Tensor, noise: Tensor) -> Tensor:
        x, skips = self.inward(image + noise), []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], 1))
        return F.mse_loss(self.outward(x), noise)


def example() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and one global batch."""
    torch.manual_seed(0)
    return UNet(), {"image": torch.randn(8, 3, 32, 32), "noise": torch.randn(8, 3, 32, 32)}


if __name__ == "__main__":
    from shown import show

    from partitioner import Constraints

    show(*example(), Constraints(tp=2), Constraints(pp=4))
