"""MAE's decoder, which reconstructs dropped tubes, and its optimizer (He et al. 2021, arXiv:2111.06377)."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_eff._core import rng


def normalized(pixels: Tensor) -> Tensor:
    """Return ``(x - mean(x)) / sqrt(var(x) + 1e-6)`` of each tube's pixels, (..., P): MAE's targets."""
    var, mean = torch.var_mean(pixels, dim=-1, keepdim=True)
    return (pixels - mean) / (var + 1e-6).sqrt()


def reconstruction_loss(painted: Tensor, pixels: Tensor) -> Tensor:
    """Return ``1/(|D| P) sum_{i in D} ||y_i - x_i||^2``, with ``x_i`` the normalized pixels of the dropped tubes D.

    Args:
        painted: ``y``, (B, m, P).
        pixels: the pixels as the embedding gets them, (B, m, P).
    """
    return (painted.float() - normalized(pixels.float())).square().mean()


def places_of(place: Tensor, width: int) -> Tensor:
    """Return sines and cosines of ``place / 10000^(2i / width)``, i < width / 2, shape (*place.shape, width)."""
    rates = torch.arange(0, width, 2, device=place.device, dtype=torch.float32).div(width)
    angles = place.unsqueeze(-1).float() / 10000.0**rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Layer(nn.Module):
    """A pre-norm block of attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """MAE's decoder: mask tokens at the places of dropped tubes become their pixels.

    Args:
        dim: the width of the kept tokens' hidden state.
        pixels: the pixels of a tube, over all channels.
        width: the decoder's width, even.
        depth: the number of its layers.
    """

    def __init__(self, dim: int, pixels: int, width: int, depth: int) -> None:
        super().__init__()
        self.norm, self.embed = nn.LayerNorm(dim), nn.Linear(dim, width)
        self.mask = nn.Parameter(torch.randn(width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, width // 32 if width % 32 == 0 else 1) for _ in range(depth))
        self.out, self.head = nn.LayerNorm(width), nn.Linear(width, pixels)

    def forward(self, hidden: Tensor, kept: Tensor, dropped: Tensor) -> Tensor:
        """Predict the pixels (B, m, P) of the tubes ``dropped`` (B, m) from ``hidden`` (B, k, D) of those ``kept`` (B, k)."""
        width = len(self.mask)
        seen = self.embed(self.norm(hidden)) + places_of(kept, width)
        masks = (self.mask + places_of(dropped, width)).expand(len(hidden), -1, -1)
        x = torch.cat([seen, masks.to(seen.dtype)], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.out(x[:, kept.shape[1] :]))


class Painter:
    """A decoder and its AdamW, which belong to the technique and not to the module.

    Args:
        decoder: the decoder, on the device, in float32.
        lr: the learning rate.
    """

    def __init__(self, decoder: Decoder, lr: float) -> None:
        self.decoder = decoder
        self.optimizer = AdamW(decoder.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.05)  # MAE's

    def step(self, trainer: Trainer) -> None:
        """Step on the gradients accumulated so far, averaged over ranks, with the module's optimizer; all ranks call it."""
        parameters = [*self.decoder.parameters()]
        if trainer.world_size == 1 and all(p.grad is None for p in parameters):
            return
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        if trainer.world_size > 1:
            flat = trainer.strategy.reduce(flat, reduce_op="mean")
            assert isinstance(flat, Tensor)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            flat = flat / scaler.get_scale()
        if scaler is None or bool(flat.isfinite().all()):  # a scaler skips such steps
            for p, g in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                p.grad = g.view_as(p)
            self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> list[Tensor]:
        """Return the gradients accumulated so far in a window, if any."""
        return [p.grad.clone() for p in self.decoder.parameters() if p.grad is not None]

    def state_dict(self) -> dict[str, Any]:
        return {"weights": dict(self.decoder.state_dict()), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any], gradients: list[Tensor]) -> None:
        """Load a state.

        Args:
            state: the result of :meth:`state_dict`.
            gradients: the result of :meth:`gradients` on this rank.
        """
        self.decoder.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        if gradients:
            for p, g in zip(self.decoder.parameters(), gradients, strict=True):
                p.grad = g.to(p.device)


def make_painter(
    dim: int, pixels: int, *, width: int | None, depth: int, lr: float, seed: int, device: torch.device
) -> Painter:
    """Create a painter with weights drawn from ``seed``. ``width`` None is half of ``dim``, in whole heads of 32."""
    with rng.keyed(seed, "decoder"):
        decoder = Decoder(dim, pixels, width or max(dim // 64, 1) * 32, depth)
    return Painter(decoder.float().to(device), lr)
