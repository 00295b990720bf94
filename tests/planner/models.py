"""Plain LightningModules whose shapes are those of published runs; nothing in them knows of a planner."""

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_eff.planner.profiling import ModuleProfile, Precision, profile_module


class Layer(nn.Module):
    """A pre-norm GPT layer with attention written out, as Megatron-LM had it in 2021."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        split = self.qkv(self.norm1(x)).split(width, -1)
        q, k, v = (y.view(b, t, self.n_heads, -1).transpose(1, 2) for y in split)
        weights = F.dropout(((q @ k.transpose(-1, -2)) * 0.1).softmax(-1), self.dropout)
        mixed = (weights @ v).transpose(1, 2).reshape(b, t, width)
        x = x + F.dropout(self.out(mixed), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class GPT(pl.LightningModule):
    """A GPT with tied embeddings."""

    def __init__(
        self, layers: int, width: int, heads: int, vocab: int = 51200, length: int = 2048, dropout: float = 0.1
    ):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.stack = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.tokens(batch) + self.places(torch.arange(batch.shape[1]))
        for layer in self.stack:
            x = layer(x)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), batch.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Llama(pl.LightningModule):
    """A Hugging Face Llama with random weights."""

    def __init__(self, layers: int, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128256,
                hidden_size=width,
                intermediate_size=inner,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=8,
                max_position_embeddings=8192,
                use_cache=False,
                bos_token_id=0,
                eos_token_id=0,
            )
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss


class Flat(pl.LightningModule):
    """A module with no stack of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 96), nn.Linear(96, 10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.two(self.one(batch[0]).relu()), batch[1])


def deep(cls: Any, layers: int, length: int, precision: Precision, *args: int, **kwargs: Any) -> ModuleProfile:
    """The profile of ``cls(layers, ...)`` on ``length`` tokens, from four layers: the third stands for all."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        module = cls(4, *args, **kwargs)
    batch = torch.zeros(1, length, dtype=torch.long)
    profile = profile_module(module, batch, precision=precision, fake_mode=mode)
    return replace(profile, blocks=(profile.blocks[2],) * layers, tokens=length)
