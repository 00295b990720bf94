"""Modules with a mixture of experts in each block, whose routers' balance losses reach the loss in various ways."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import LENGTH, VOCAB, HuggingFace

WEIGHT = 0.1
EXPERTS = 4


def balance_of(logits: Tensor) -> Tensor:
    """The balance loss of Switch Transformers, for the two most probable experts of each token: a product of means."""
    shares = logits.softmax(-1).flatten(0, -2)
    chosen = F.one_hot(shares.topk(2, dim=-1).indices, shares.shape[-1]).sum(1).to(shares.dtype)
    return shares.shape[-1] * (chosen.mean(0) * shares.mean(0)).sum()


class Mixture(nn.Module):
    """Each token has its two most probable experts of four; returns the router's logits too."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        values, chosen = logits.softmax(-1).topk(2, dim=-1)
        weights = torch.zeros_like(logits).scatter(-1, chosen, values)
        every = torch.stack([expert(x) for expert in self.experts], -1)
        return (every * weights[..., None, :]).sum(-1), logits


class Block(nn.Module):
    """A causal pre-norm block.

    Args:
        gives: "list" appends the balance loss to ``store``, "pair" returns it, "attribute" keeps it in ``balance``.
        logits: whether it gives the router's logits, (B, T, E), instead.
    """

    def __init__(self, dim: int, gives: str, logits: bool, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mixture, self.drop, self.gives, self.logits = Mixture(dim), nn.Dropout(dropout), gives, logits
        self.store: list[Tensor] = []
        self.balance: Tensor | None = None
        self.balances = True

    def forward(self, x: Tensor) -> Any:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.proj(attended))
        y, logits = self.mixture(self.norm2(x))
        balance = logits if self.logits else balance_of(logits)
        x = x + self.drop(y)
        if not self.balances:
            return (x, None) if self.gives == "pair" else x
        if self.gives == "pair":
            return x, balance
        if self.gives == "list":
            self.store.append(balance)
        else:
            self.balance = balance
        return x


class Routed(pl.LightningModule):
    """A language model on dict batches of ``input_ids`` and already shifted ``labels``, (B, T).

    Args:
        gives: as in :class:`Block`.
        logits: as in :class:`Block`.
        num_layers: number of blocks.
        recompute: whether its own code checkpoints each block.
        since: the first step with balance losses.
    """

    def __init__(
        self,
        gives: str,
        num_layers: int = 4,
        logits: bool = False,
        dim: int = 16,
        dropout: float = 0.0,
        recompute: bool = False,
        lr: float = 0.1,
        since: int = 0,
    ) -> None:
        super().__init__()
        self.since = since
        self.gives, self.lr, self.recompute, self.logits = gives, lr, recompute, logits
        self.embed, self.position = nn.Embedding(VOCAB, dim), nn.Embedding(LENGTH, dim)
        self.blocks = nn.ModuleList(Block(dim, gives, logits, dropout) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        self.router_losses: list[Tensor] = []
        for block in self.blocks:
            block.store = self.router_losses  # pyright: ignore[reportArgumentType]

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and the sum of the blocks' balance losses."""
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        self.router_losses.clear()
        found: list[Tensor] = []
        for block in self.blocks:
            output: Any = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            if self.gives == "pair":
                x, balance = output
                found.append(balance)
            else:
                x = output
        if self.gives == "list":
            found = [*self.router_losses]
        elif self.gives == "attribute":
            found = [block.balance for block in self.blocks]  # pyright: ignore[reportAssignmentType]
        losses = [balance_of(logits) if self.logits else logits for logits in found if logits is not None]
        return self.head(self.norm(x)), torch.stack(losses).sum() if losses else x.new_zeros(())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        for block in self.blocks:
            block.balances = not self.since or self.global_step >= self.since  # pyright: ignore[reportAttributeAccessIssue]
        logits, balance = self(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("ce", loss)
        self.log("balance", balance)
        return loss + WEIGHT * balance

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits, _ = self(batch["input_ids"])
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def mixtral(num_layers: int = 4, *, routed: bool = True) -> HuggingFace:
    """A small Mixtral, with its routers' loss if ``routed``."""
    from transformers import MixtralConfig, MixtralForCausalLM

    more: dict[str, Any] = {"experts_implementation": "eager"}  # the others have no float64
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        output_router_logits=routed,
        router_aux_loss_coef=WEIGHT,
        use_cache=False,
        pad_token_id=0,
        **more,
    )
    return HuggingFace(MixtralForCausalLM(config).train())


def built(name: str, **kwargs: Any) -> pl.LightningModule:
    """A mixture in float64, with weights that are always the same.

    Args:
        name: "mixtral", or what the blocks of :class:`Routed` give, such as "list" or "pair of logits".
        kwargs: arguments of the module.
    """
    pl.seed_everything(1, verbose=False)
    gives, _, logits = name.partition(" of ")
    net = mixtral(**kwargs) if name == "mixtral" else Routed(gives, logits=bool(logits), **kwargs)
    with torch.no_grad():  # so that routers prefer some experts, and the balance losses have gradients to speak of
        for key, p in net.named_parameters():
            if "router" in key or "gate.weight" in key:
                p.mul_(20)
    return net.double()
