"""Modules that attend in several ways, and a reference of attention by hand."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_eff._core._attention.calls import Call
from lightning_eff._core._attention.mode import Replacing
from tests import families
from tests.models import VOCAB, TinyGPT, module


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, scale: float) -> Tensor:
    """Softmax attention by hand, in the dtype of its arguments; rows that see nothing are zero."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    none = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(none, 0.0).softmax(-1).masked_fill(none, 0.0) @ v


class Own(nn.Module):
    """A block that attends by hand-written calls."""

    def __init__(self, kind: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind, self.dropout = kind, dropout
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, dropout, batch_first=True) if kind.startswith("module") else None

    def forward(self, x: Tensor) -> Tensor:
        if self.attention is not None:
            y = self.norm(x)
            return x + self.attention(y, y, y, need_weights=self.kind == "module with weights")[0]
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        p = self.dropout if self.training else 0.0
        if self.kind == "by hand":
            y = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1) @ v
        elif self.kind == "heads in front":
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p).unflatten(0, (-1, 2))
        else:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.kind == "causal")
        return x + self.out(y.transpose(1, 2).flatten(2))


class Net(pl.LightningModule):
    """Two such blocks, or torch's own encoder layers, over ids."""

    def __init__(self, kind: str = "plain", dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        if kind == "encoder":
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
            self.blocks: nn.Module = nn.TransformerEncoder(layer, 2)
        else:
            self.blocks = nn.Sequential(Own(kind, dropout), Own(kind, dropout))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Checkpointed(TinyGPT):
    """Its blocks run again in the backward pass."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        assert self.blocks is not None
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


HUGGING = ("gpt2", "llama", "qwen3", "modernbert", "vit")
OWN = ("plain", "causal", "heads in front", "module", "encoder")


def loss_of(name: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A module in float64 and evaluation mode, and what computes its loss: with padding where it takes a mask."""
    torch.manual_seed(0)
    if name in OWN:
        net = Net(name).double().eval()
        ids = torch.randint(0, VOCAB, (2, 13))
        return net, lambda: F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    hf: Any = (module("llama", num_layers=2) if name == "llama" else families.module(name)).double().eval()
    batch = families.batch(name, 2)
    if "input_ids" in batch:
        length = batch["input_ids"].shape[1]
        batch["attention_mask"] = (torch.arange(length) < torch.tensor([[length], [length - 9]])).long()
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    else:
        batch["pixel_values"] = batch["pixel_values"].double()
    return hf, lambda: hf.model(**batch).loss


def gradients(net: nn.Module, loss: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, [p for p in net.parameters() if p.requires_grad], allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


@contextlib.contextmanager
def replaced(attend: Callable[[Call], Tensor]) -> Iterator[Replacing]:
    """Attention is what ``attend`` makes of it."""
    with Replacing(attend, "Test") as mode:
        yield mode


def weights_of(attend: Callable[[Call], Tensor], call: Call) -> Tensor:
    """The weights that attention gives each key, (B, H, L, S): what it makes of values that are each key's own."""
    keys, heads = call.key.shape[-2], call.key.shape[1]
    eye = torch.eye(keys, dtype=call.value.dtype).expand(len(call.key), heads, keys, keys)
    return attend(Call(call.query, call.key, eye, call.mask, 0.0, call.causal, call.scale))


def a_call(*, causal: bool = False, mask: Tensor | None = None, length: int = 13, groups: int = 2, **kw: Any) -> Call:
    g = torch.Generator().manual_seed(kw.pop("seed", 0))
    q, k, v = (torch.randn(2, h, length, 8, generator=g, dtype=torch.float64) for h in (4, 4 // groups, 4 // groups))
    size = kw.get("size", 1.0)
    return Call(size * q, size * k, v, mask, 0.0, causal, 8**-0.5)
