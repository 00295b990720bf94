"""A byte-level GPT: pre-norm blocks, rotary positions, GELU, GPT-2's scaled residual initialisation."""

import math

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB_SIZE = 256  # bytes


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021): turns pairs of features by angles that grow with the position.

    Args:
        dim: features of a head; even.
        max_length: the longest sequence.
        base: the slowest pair turns by about ``1 / base`` per position.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, max_length: int, base: float = 1000.0) -> None:
        super().__init__()
        frequencies = base ** -(torch.arange(0, dim, 2) / dim)
        angles = torch.outer(torch.arange(max_length), frequencies).repeat(1, 2)  # (max_length, dim)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Queries or keys (B, H, T, dim) to the same shape, for T up to ``max_length``."""
        length = x.shape[2]
        first, second = x.chunk(2, dim=-1)
        turned = x * self.cos[:length] + torch.cat((-second, first), dim=-1) * self.sin[:length]
        return turned.type_as(x)


class Attention(nn.Module):
    """Causal self-attention, (B, T, D) to (B, T, D)."""

    def __init__(self, dim: int, num_heads: int, block_size: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.rotary = Rotary(dim // num_heads, block_size)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        # (B, T, 3D) -> three of (B, H, T, D/H)
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, dropout_p=dropout, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``; (B, T, D) to (B, T, D)."""

    def __init__(self, dim: int, num_heads: int, block_size: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads, block_size, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim, bias=False), nn.GELU(), nn.Linear(4 * dim, dim, bias=False))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(LightningModule):
    """Predicts the next byte.

    Args:
        dim: D, the width; a multiple of ``num_heads``.
        num_layers: blocks.
        num_heads: attention heads.
        block_size: the longest sequence, in bytes.
        dropout: probability, in [0, 1), for embeddings, attention weights and both residual branches.
        tie_embeddings: use the byte embedding as the output layer, too.
        lr: peak learning rate, reached after ``warmup_steps``, then falling linearly to zero at the end of the run.
        weight_decay: AdamW's, on matrices only.
        warmup_steps: optimizer steps.
        prompt: what the samples that the model writes at the end of training start with.
        num_samples: how many of them; 0 for none.
        sample_bytes: bytes to write in each.
    """

    def __init__(
        self,
        dim: int = 128,
        num_layers: int = 12,
        num_heads: int = 4,
        block_size: int = 256,
        dropout: float = 0.0,
        tie_embeddings: bool = True,
        lr: float = 2e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 50,
        prompt: str = "def ",
        num_samples: int = 2,
        sample_bytes: int = 160,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.block_size = block_size
        self.token = nn.Embedding(VOCAB_SIZE, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, num_heads, block_size, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB_SIZE, bias=False)
        if tie_embeddings:
            self.head.weight = self.token.weight
        self._init_weights()

    def _init_weights(self) -> None:
        """Std 1/sqrt(inputs), to suit any width; what writes to the residual stream, 1/sqrt(2 layers) of that."""
        depth_scale = 1 / math.sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                scale = depth_scale if name.endswith(("attention.proj.weight", "mlp.2.weight")) else 1.0
                nn.init.normal_(parameter, std=scale / math.sqrt(parameter.shape[1]))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Bytes (B, T) to logits (B, T, 256), for T up to ``block_size``."""
        x = self.dropout(self.token(input_ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross-entropy in nats per byte, of ``input_ids`` and ``labels`` (B, T), labels already shifted."""
        logits = self(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), on_epoch=True, prog_bar=True, sync_dist=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch), on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.hparams["weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"], betas=(0.9, 0.95))
        warmup, total = self.hparams["warmup_steps"], self.trainer.estimated_stepping_batches

        def rate(step: int) -> float:
            return min((step + 1) / (warmup + 1), max(0.0, 1 - step / total))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: bytes, num_bytes: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
        """``prompt`` and ``num_bytes`` more, sampled one by one. The global random state is not touched."""
        modes = {module: module.training for module in self.modules()}
        self.eval()
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt)
        for _ in range(num_bytes):
            context = torch.tensor([text[-self.block_size :]], device=self.device)
            logits = self(context)[0, -1].float().cpu()
            text.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
        for module, mode in modes.items():
            module.training = mode
        return bytes(text)

    def on_train_end(self) -> None:
        """Let the trained model write a little: on all ranks, as sharded weights need them all; the first one prints."""
        for seed in range(self.hparams["num_samples"]):
            text = self.generate(self.hparams["prompt"].encode(), self.hparams["sample_bytes"], seed=seed)
            if self.trainer.is_global_zero:
                print(f"\n--- sample {seed}\n{text.decode(errors='replace')}")
