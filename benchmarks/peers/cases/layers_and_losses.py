"""Losses, norms and attention, beside torch."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import lightning_eff as eff
from benchmarks.peers.case import Arm, Case
from benchmarks.peers.fits import fit_arm
from benchmarks.peers.modules import Convolutions, Encoder
from lightning_eff.kernels.linear_cross_entropy import linear_cross_entropy

ROWS, WIDTH, CLASSES = 1024, 128, 8192


class Head(LightningModule):
    """Nothing but an output layer and its loss."""

    def __init__(self, own: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.own = own

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        hidden = self.body(batch[0])
        if self.own is not None:
            return self.own(hidden, self.head.weight, batch[1])
        return F.cross_entropy(self.head(hidden), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def _rows(labelled: float = 1.0) -> tuple[Tensor, Tensor]:
    labels = torch.randint(CLASSES, (ROWS,))
    return torch.randn(ROWS, WIDTH), torch.where(torch.rand(ROWS) < labelled, labels, -100)


def _head(labelled: float) -> Callable[[], tuple[Arm, Arm]]:
    def build() -> tuple[Arm, Arm]:
        batch = _rows(labelled)
        return fit_arm(Head(), batch, [eff.FusedLinearCrossEntropy()]), fit_arm(Head(), batch)

    return build


def _chunks() -> tuple[Arm, Arm]:
    """The same function of torch, which computes in chunks too."""
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError("this torch has no linear_cross_entropy")
    batch = _rows()
    peer = lambda x, weight, target: F.linear_cross_entropy(  # noqa: E731
        x, weight, target, options=nn.LinearCrossEntropyOptions()
    )
    return fit_arm(Head(linear_cross_entropy), batch), fit_arm(Head(peer), batch)


class Smoothed(Encoder):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], label_smoothing=0.1)


def _smoothing() -> tuple[Arm, Arm]:
    batch = torch.randn(8, 64, 128), torch.randint(64, (8, 64))
    return fit_arm(Encoder(), batch, [eff.LabelSmoothing(0.1)]), fit_arm(Smoothed(), batch)


class Chunked(nn.BatchNorm2d):
    """Ghost BatchNorm in its usual form."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(Chunked, self).forward(part) for part in x.split(32)])


def _ghosts() -> tuple[Arm, Arm]:
    peer, batch = Convolutions(), (torch.randn(128, 3, 16, 16), torch.randint(10, (128,)))
    for layer in peer.layers:
        if isinstance(layer, nn.BatchNorm2d):
            layer.__class__ = Chunked
    return fit_arm(Convolutions(), batch, [eff.GhostNorm(32)]), fit_arm(peer, batch)


def _norms() -> tuple[Arm, Arm]:
    peer, batch = Encoder(), (torch.randn(8, 64, 128), torch.randint(64, (8, 64)))
    for block in peer.blocks:
        for name in ("norm1", "norm2"):
            setattr(block, name, nn.RMSNorm(128, eps=1e-5))
    return fit_arm(Encoder(), batch, [eff.RMSNormalization()]), fit_arm(peer, batch)


class Materialized(Encoder):
    """With all scores of its attention in memory."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().training_step(batch, batch_idx)


def _attention(kernel: Any, peer: type[Encoder]) -> Callable[[], tuple[Arm, Arm]]:
    def build() -> tuple[Arm, Arm]:
        batch = torch.randn(1, 1024, 128), torch.randint(64, (1, 1024))
        ours = eff.MemoryEfficientAttention(256, kernel=kernel)
        return fit_arm(Encoder(depth=1), batch, [ours]), fit_arm(peer(depth=1), batch)

    return build


def cases() -> list[Case]:
    head = "FusedLinearCrossEntropy"
    return [
        Case("fused head, 8,192 classes", head, "torch F.cross_entropy", "torch", _head(1.0), goal=1.0),
        Case("fused head, 15 % of the rows labelled", head, "torch F.cross_entropy", "torch", _head(0.15), goal=1.0),
        Case("the head's function", head, "torch F.linear_cross_entropy, in chunks", "torch", _chunks, goal=1.0),
        Case("label smoothing", "LabelSmoothing", "torch F.cross_entropy(label_smoothing=0.1)", "torch", _smoothing),
        Case(
            "BatchNorm in groups of 32", "GhostNorm", "torch BatchNorm2d on split batches", "torch", _ghosts, rounds=20
        ),
        Case("RMSNorm", "RMSNormalization", "torch.nn.RMSNorm", "torch", _norms),
        Case(
            "attention",
            "MemoryEfficientAttention",
            "torch scaled_dot_product_attention",
            "torch",
            _attention("auto", Encoder),
            goal=1.1,
        ),
        Case(
            "attention in chunks",
            "MemoryEfficientAttention",
            "torch scaled_dot_product_attention with all scores",
            "torch",
            _attention("chunks", Materialized),
        ),
    ]
