"""Modules of unusual kinds, each with what it asks of a layout: that it trains as in one process, or is refused with a reason.

A kind is a LightningModule with a stack of blocks, its parameters, its buffers and its hooks; each has one thing that a
layout might get wrong. :data:`KINDS` says which layouts refuse it, and by which words.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, LENGTH, DIM, CLASSES, DEPTH = 32, 8, 16, 4, 4


class Mlp(pl.LightningModule):
    """An embedding, residual blocks and a head, on (B, T) tokens and classes.

    Attributes:
        synced: whether the training loss is logged with ``sync_dist``.
    """

    synced = True
    embed: Any
    blocks: Any
    head: Any
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = self.embedding()
        self.blocks = nn.ModuleList(self.block() for _ in range(DEPTH))
        self.head = self.last()
        self.extra()

    def embedding(self) -> nn.Module:
        return nn.Embedding(VOCAB, DIM)

    def wrap(self, layer: nn.Module) -> nn.Module:
        return layer

    def block(self) -> nn.Module:
        return nn.Sequential(self.wrap(nn.Linear(DIM, 2 * DIM)), nn.GELU(), self.wrap(nn.Linear(2 * DIM, DIM)))

    def last(self) -> nn.Module:
        return nn.Linear(DIM, CLASSES)

    def extra(self) -> None:
        """What else the module has."""

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens).mean(1)

    def run(self, block: nn.Module, x: Tensor, index: int) -> Tensor:
        return x + block(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for index, block in enumerate(self.blocks):
            x = self.run(block, x, index)
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        tokens, classes = batch
        return F.cross_entropy(self(tokens), classes)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=self.synced)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.log("val_loss", F.cross_entropy(logits, batch[1]), sync_dist=True)
        return {"logits": logits}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


class Transformer(Mlp):
    """torch's own encoder layers on all tokens."""

    def block(self) -> nn.Module:
        return nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.0, batch_first=True, norm_first=True)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)

    def run(self, block: nn.Module, x: Tensor, index: int) -> Tensor:
        return block(x)

    def last(self) -> nn.Module:
        return nn.Sequential(Mean(), nn.Linear(DIM, CLASSES))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Gru(Transformer):
    def block(self) -> nn.Module:
        return nn.GRU(DIM, DIM, batch_first=True)

    def run(self, block: nn.Module, x: Tensor, index: int) -> Tensor:
        return x + block(x)[0]


class Lstm(Transformer):
    """No stack of blocks."""

    def extra(self) -> None:
        del self.blocks
        self.lstm = nn.LSTM(DIM, DIM, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class Convolutions(Transformer):
    def block(self) -> nn.Module:
        return nn.Sequential(nn.Conv1d(DIM, DIM, 3, padding=1), nn.GroupNorm(4, DIM), nn.SiLU())

    def run(self, block: nn.Module, x: Tensor, index: int) -> Tensor:
        return x + block(x.transpose(1, 2)).transpose(1, 2)


class QKNormed(nn.Module):
    """Attention whose queries and keys are normed for each head, with a scale for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.q_norm, self.k_norm = nn.LayerNorm(DIM // 4), nn.LayerNorm(DIM // 4)
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 4).view(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        q = self.q_norm(q) * self.scale
        return self.o(F.scaled_dot_product_attention(q, self.k_norm(k), v).transpose(1, 2).flatten(2))


class QKNorm(Transformer):
    def block(self) -> nn.Module:
        return QKNormed()

    def run(self, block: nn.Module, x: Tensor, index: int) -> Tensor:
        return x + block(x)


class HandBlock(nn.Module):
    """Attention and a feed-forward network, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (m(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Hand(Transformer):
    def block(self) -> nn.Module:
        return HandBlock()


# -- parameters


class WeightNorm(Mlp):
    def wrap(self, layer: nn.Module) -> nn.Module:
        return nn.utils.parametrizations.weight_norm(layer)


class OldWeightNorm(Mlp):
    def wrap(self, layer: nn.Module) -> nn.Module:
        return nn.utils.weight_norm(layer)


class SpectralNorm(Mlp):
    def wrap(self, layer: nn.Module) -> nn.Module:
        return nn.utils.parametrizations.spectral_norm(layer)


class Orthogonal(Mlp):
    def wrap(self, layer: nn.Module) -> nn.Module:
        return nn.utils.parametrizations.orthogonal(layer)


class ComplexBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(DIM // 2 + 1, DIM // 2 + 1, dtype=torch.cfloat) * 0.2)
        self.bias = nn.Parameter(torch.randn(DIM // 2 + 1, dtype=torch.cfloat) * 0.2)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.fft.irfft(torch.fft.rfft(x) @ self.filter + self.bias, n=DIM))


class Complex(Mlp):
    def block(self) -> nn.Module:
        return ComplexBlock()


class Float64(Mlp):
    """One block computes in float64."""

    def extra(self) -> None:
        self.blocks[1].double()

    def run(self, block: nn.Module, x: Tensor, index: int) -> Tensor:
        return x + (block(x.double()).float() if index == 1 else block(x))


class Mixed(Mlp):
    """Each block, and what is around them, has parameters of two dtypes; and a head in bfloat16 that does not train."""

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), Double(DIM))

    def extra(self) -> None:
        self.shift = nn.Parameter(torch.zeros(CLASSES, dtype=torch.float64))
        self.frozen_head = nn.Linear(DIM, CLASSES, dtype=torch.bfloat16).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        half = F.linear(self.embedded(tokens), self.frozen_head.weight.float())
        return super().forward(tokens) + self.shift.float() + half


class Double(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width, dtype=torch.float64)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.double()).float()


class Scalars(Mlp):
    """CLIP's ``logit_scale``, a parameter of one element, an empty one, and one of an odd size."""

    def extra(self) -> None:
        self.logit_scale = nn.Parameter(torch.tensor(0.7))
        self.one, self.odd = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3))
        self.empty = nn.Parameter(torch.empty(0))
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.logit_scale.exp() * self.odd.mean() * self.one + self.empty.sum()


class EverythingBlock(ComplexBlock):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.gain = Double(DIM), nn.Parameter(torch.tensor(0.8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.wide(super().forward(x))


class Everything(Mlp):
    """Parameters of all dtypes and shapes together, in blocks and around them."""

    def block(self) -> nn.Module:
        return EverythingBlock()

    def run(self, block: nn.Module, x: Tensor, index: int) -> Tensor:
        return block(x)

    def extra(self) -> None:
        self.phase = nn.Parameter(torch.tensor(0.5 + 0.5j))
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.phase.real + self.phase.imag + self.empty.sum()


class ScalarBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.alpha, self.gamma = (
            nn.Linear(DIM, DIM),
            nn.Parameter(torch.zeros(())),
            nn.Parameter(torch.ones(DIM)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.alpha * (self.gamma * self.map(x).tanh())


class BranchScales(Mlp):
    """ReZero's number and LayerScale's vector, written by hand."""

    def block(self) -> nn.Module:
        return ScalarBlock()

    def run(self, block: nn.Module, x: Tensor, index: int) -> Tensor:
        return block(x)


class Gates(Mlp):
    """Parameters of the module itself, one for each block, used between blocks."""

    def extra(self) -> None:
        self.gates = nn.ParameterList([nn.Parameter(torch.full((DIM,), 0.5)) for _ in range(DEPTH)])

    def run(self, block: nn.Module, x: Tensor, index: int) -> Tensor:
        return x + self.gates[index] * block(x)


class RawWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh()


class Raw(Mlp):
    def block(self) -> nn.Module:
        return RawWeights()


class Tied(Transformer):
    """The head is the embedding's weight."""

    def last(self) -> nn.Module:
        return nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(super().forward(tokens), self.embed.weight).mean(1)[:, :CLASSES]


class TiedBlocks(Mlp):
    """Blocks that share one of their layers."""

    def extra(self) -> None:
        for block in self.blocks:
            block[2] = self.blocks[0][2]


class Frozen(Mlp):
    def extra(self) -> None:
        self.embed.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[2][0].weight.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Thawed(Mlp):
    """The embedding trains from the third batch on."""

    def extra(self) -> None:
        self.embed.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.embed.requires_grad_(batch_idx >= 2)


class NeverUsed(Mlp):
    def extra(self) -> None:
        self.spare = nn.Linear(DIM, DIM)


# -- layers


class Prelu(Mlp):
    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.PReLU(2 * DIM), nn.Linear(2 * DIM, DIM))


class InPlace(Mlp):
    """Activations changed in place, in blocks and between them."""

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(inplace=True), nn.Linear(DIM, DIM))

    def run(self, block: nn.Module, x: Tensor, index: int) -> Tensor:
        out = block(x)
        out += x
        return out


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] @ w, grads[0].t() @ x


class OwnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return Product.apply(input, self.weight) + self.bias


class OwnFunction(Mlp):
    def block(self) -> nn.Module:
        return nn.Sequential(OwnLinear(DIM, 2 * DIM), nn.GELU(), OwnLinear(2 * DIM, DIM))


class BilinearBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(DIM, DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x, x).tanh()


class Bilinear(Mlp):
    def block(self) -> nn.Module:
        return BilinearBlock()


class Padding(Mlp):
    def embedding(self) -> nn.Module:
        return nn.Embedding(VOCAB, DIM, padding_idx=0)


class Bag(Mlp):
    def embedding(self) -> nn.Module:
        return nn.EmbeddingBag(VOCAB, DIM)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)


class Experts(nn.Module):
    """Each sample goes to its best expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 2)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        best = shares.argmax(-1)
        parts = [(best == i).unsqueeze(-1) * shares[:, i : i + 1] * e(x) for i, e in enumerate(self.experts)]
        return torch.stack(parts).sum(0)


class Mixture(Mlp):
    def block(self) -> nn.Module:
        return Experts()


class Recomputed(Mlp):
    def run(self, block: nn.Module, x: Tensor, index: int) -> Tensor:
        out: Any = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return x + out


class Conditioned(Mlp):
    """Each block is given what the embedding says, too."""

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.embedded(tokens)
        for block in self.blocks:
            x = x + block(x * first.sigmoid())
        return self.head(x)


class Hooked(Mlp):
    """A forward hook and a forward pre-hook of the user's own."""

    def extra(self) -> None:
        self.blocks[1].register_forward_hook(lambda module, args, output: output * 0.5)
        self.blocks[2].register_forward_pre_hook(lambda module, args: (args[0] * 2.0,))


# -- states


class BatchNorm(Mlp):
    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.GELU())


class Counter(Mlp):
    def extra(self) -> None:
        self.register_buffer("seen", torch.tensor(0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        return super().training_step(batch, batch_idx)


class Teacher(Mlp):
    """A moving average of weights, which the loss follows, moved after each batch."""

    def extra(self) -> None:
        self.register_buffer("average", torch.zeros(CLASSES, DIM))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weight: Any = self.head.weight.detach()
        self.average.lerp_(weight.full_tensor() if hasattr(weight, "full_tensor") else weight, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + 0.1 * F.linear(self.embedded(tokens), self.average)


class MaxNorm(Mlp):
    def embedding(self) -> nn.Module:
        return nn.Embedding(VOCAB, DIM, max_norm=1.0)


class ClampedBlock(RawWeights):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class Clamped(Mlp):
    """Weights that each forward pass clamps."""

    def block(self) -> nn.Module:
        return ClampedBlock()


# -- between blocks


class Skips(Mlp):
    """The head sees what each block returned."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, total = self.embedded(tokens), 0.0
        for block in self.blocks:
            x = x + block(x)
            total = total + x
        return self.head(total)


class Penalty(Mlp):
    """The loss has a term for each parameter."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 1e-3 * torch.stack([p.square().sum() for p in self.parameters()]).sum()


class Alternating(Mlp):
    """Which blocks run changes from batch to batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.turn = batch_idx
        return super().training_step(batch, batch_idx)

    def run(self, block: nn.Module, x: Tensor, index: int) -> Tensor:
        left_out = self.training and index in (1, 2) and (index + getattr(self, "turn", 0)) % 2
        return x if left_out else x + block(x)


class Scheduled(Mlp):
    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.05}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.2, 0.1], total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@dataclass(frozen=True)
class Kind:
    """A module, and what layouts say of it.

    Attributes:
        make: builds it.
        refused: for a layout that refuses it, words of the reason; of torch's DDP in the second step, if that does.
        apart: of a layout in which it trains otherwise by design, which the user is told; of Lightning's own DDP, because
            that lets ranks drift apart.
        callbacks: techniques by name, with their arguments.
    """

    make: Callable[[], pl.LightningModule]
    refused: Mapping[str, str] = field(default_factory=dict)
    apart: tuple[str, ...] = ()
    callbacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_PLAIN = (
    *(
        Mlp,
        Transformer,
        QKNorm,
        WeightNorm,
        OldWeightNorm,
        Orthogonal,
        Complex,
        Float64,
        Mixed,
        Scalars,
    ),
    *(BranchScales, Gates, Raw, Tied, TiedBlocks, Frozen, Prelu, InPlace, OwnFunction, Bilinear, Padding, Bag),
    *(Mixture, Recomputed, Hooked, Teacher, Scheduled),
)
KINDS: dict[str, Kind] = {
    **{cls.__name__: Kind(cls) for cls in _PLAIN},
    **{cls.__name__: Kind(cls, {"pp2": "than the hidden state"}) for cls in (Gru, Convolutions, Conditioned)},
    "Everything": Kind(Everything),
    "Thawed": Kind(Thawed, apart=("ddp",)),
    "Lstm": Kind(Lstm, {"pp2": "stack"}),
    "NeverUsed": Kind(NeverUsed, dict.fromkeys(("ddp", "replicas"), "find_unused_parameters")),
    "SpectralNorm": Kind(SpectralNorm, {"pp2": "loss depends on them"}),
    "BatchNorm": Kind(BatchNorm, apart=("ddp", "replicas", "shards", "pp2")),
    "Counter": Kind(Counter, {"pp2": "'seen'"}),
    "MaxNorm": Kind(MaxNorm, dict.fromkeys(("replicas", "shards", "tp2"), "'embed.weight' in place"), apart=("ddp",)),
    "Clamped": Kind(Clamped, dict.fromkeys(("shards", "tp2", "pp2"), "in place")),
    "Skips": Kind(Skips, {"pp2": "than the hidden state"}),
    "Penalty": Kind(Penalty, {"pp2": "self.parameters()", "tp2": "mixed torch.Tensor and DTensor"}),
    "Hand": Kind(Hand),
    "LayerScale": Kind(Hand, callbacks={"LayerScale": {"init": 0.1}}),
    "ReZero": Kind(Hand, callbacks={"ReZero": {}}),
    "SkipInit": Kind(Hand, callbacks={"SkipInit": {}}),
    "QKNormTechnique": Kind(Hand, callbacks={"QKNorm": {}}),
    "Alternating": Kind(Alternating, {**dict.fromkeys(("ddp", "replicas"), "find_unused_parameters"), "pp2": "block"}),
}
