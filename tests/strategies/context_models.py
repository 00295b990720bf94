"""Modules with the blocks that context parallelism meets: positions computed inside, heads that do not divide, mixing."""

from typing import cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import LENGTH, VOCAB


class Attention(nn.Module):
    """Causal attention that turns queries and keys by their positions.

    Args:
        positions: "table" reads rotary angles of the first tokens from a buffer, "range" computes them from their number,
            "mask" takes its causal mask from a buffer, "by hand" computes a softmax of the scores, "none" has no positions.
    """

    rates: Tensor
    angles: Tensor
    below: Tensor

    def __init__(self, dim: int, heads: int, positions: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.positions, self.dropout = heads, positions, dropout
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        half = dim // heads // 2
        self.register_buffer("rates", 100.0 ** -(torch.arange(half) / half), persistent=False)
        self.register_buffer("angles", torch.outer(torch.arange(LENGTH + 1), self.rates), persistent=False)
        self.register_buffer("below", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        if self.positions == "table":
            angles = self.angles[:length]
        elif self.positions == "range":
            angles = torch.outer(torch.arange(length, device=x.device), self.rates)
        else:
            return x
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        p = self.dropout if self.training else 0.0
        if self.positions == "by hand":
            y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
            return self.proj(y.transpose(1, 2).flatten(2))
        if self.positions == "mask":
            length = x.shape[1]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.below[:length, :length], dropout_p=p)
        else:
            y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True, dropout_p=p)
        return self.proj(y.transpose(1, 2).flatten(2))


def _raise_on_second_rank() -> None:
    if dist.is_initialized() and dist.get_rank() == 1:
        raise MemoryError("the second rank alone has too little")


class Block(nn.Module):
    """A pre-norm block; with ``mixing``, another path between tokens."""

    def __init__(self, dim: int, heads: int, positions: str, mixing: str, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, positions, dropout)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.conv = nn.Conv1d(dim, dim, 3, padding=1, groups=dim) if mixing == "convolution" else None
        self.router = nn.Linear(dim, 4, bias=False) if mixing == "router" else None
        if self.router is not None:
            nn.init.normal_(self.router.weight, std=0.02)
        self.balance = torch.zeros(())
        self.drop, self.inner, self.mixing = nn.Dropout(dropout), mixing == "inner", mixing

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if self.mixing == "rank whole" or (self.mixing == "rank divided" and x.shape[1] < LENGTH):
            _raise_on_second_rank()
        if self.conv is not None:
            x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        y = self.norm1(x)
        attended = checkpoint(self.attention, y, use_reentrant=False) if self.inner else self.attention(y)
        x = x + self.drop(attended)
        y = self.norm2(x)
        if self.router is not None:  # the balance loss of Switch Transformers, a product of means over tokens
            shares = self.router(y).softmax(-1).flatten(0, 1)
            self.balance = 4 * (F.one_hot(shares.argmax(-1), 4).float().mean(0) * shares.mean(0)).sum()
        return x + self.drop(self.mlp(y if scale is None else y * scale[:, None]))


class Rotary(pl.LightningModule):
    """A tied language model.

    Args:
        positions: see :class:`Attention`.
        heads: number of heads.
        mixing: "convolution", "skip" (the sum of all hidden states), "condition" (a learned scale for all blocks),
            "checkpoint" or "reentrant" (blocks run again), "inner" (attention runs again), "router" (a balance loss of the
            blocks' tokens), "rank whole", "rank divided" or "rank later" (the second rank raises: always, on a part of the
            tokens, or there after the first block) or "".
        dropout: its probability, in [0, 1).
    """

    def __init__(
        self, positions: str = "table", heads: int = 2, mixing: str = "", dropout: float = 0.0, lr: float = 1e-2
    ) -> None:
        super().__init__()
        dim = 12
        self.mixing, self.lr = mixing, lr
        self.embed = nn.Embedding(VOCAB, dim)
        self.condition = nn.Linear(dim, dim) if mixing == "condition" else None
        later = "rank divided" if mixing == "rank later" else mixing
        self.blocks = nn.ModuleList(Block(dim, heads, positions, later if i else mixing, dropout) for i in range(3))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        scale = None if self.condition is None else self.condition(x.mean(1))
        total = torch.zeros_like(x)
        for block in self.blocks:
            if self.mixing in ("checkpoint", "reentrant"):
                x = checkpoint(block, x, use_reentrant=self.mixing == "reentrant")
            else:
                x = block(x) if scale is None else block(x, scale)
            total = total + x
        return self.head(self.norm(total if self.mixing == "skip" else x))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        if self.mixing == "router":
            loss = loss + 0.01 * torch.stack([cast(Block, block).balance for block in self.blocks]).sum()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
