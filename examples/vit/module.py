"""A small vision transformer (Dosovitskiy et al. 2021): patches and a class token through pre-norm blocks."""

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Self-attention over all tokens, (B, N, D) to (B, N, D)."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, num_tokens, dim = x.shape
        # (B, N, 3D) -> three of (B, H, N, D/H)
        q, k, v = self.qkv(x).view(batch, num_tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.proj(y.transpose(1, 2).reshape(batch, num_tokens, dim))


class EncoderBlock(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``; (B, N, D) to (B, N, D)."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class ViT(LightningModule):
    """Classifies images.

    Args:
        image_size: height and width, in pixels; a multiple of ``patch_size``.
        patch_size: height and width of a patch, in pixels.
        num_channels: C.
        num_classes: K.
        dim: D, the width; a multiple of ``num_heads``.
        num_layers: blocks.
        num_heads: attention heads.
        dropout: probability, in [0, 1), for embeddings, attention weights and both residual branches.
        lr: peak learning rate, reached after ``warmup_steps``, then falling linearly to zero at the end of the run.
        weight_decay: AdamW's, on matrices only.
        warmup_steps: optimizer steps.
    """

    def __init__(
        self,
        image_size: int = 8,
        patch_size: int = 2,
        num_channels: int = 1,
        num_classes: int = 10,
        dim: int = 48,
        num_layers: int = 6,
        num_heads: int = 3,
        dropout: float = 0.1,
        lr: float = 3e-3,
        weight_decay: float = 0.05,
        warmup_steps: int = 50,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        num_patches = (image_size // patch_size) ** 2
        self.patches = nn.Conv2d(num_channels, dim, kernel_size=patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(0.5 * torch.randn(1, num_patches + 1, dim))  # About as large as the patches'.
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(EncoderBlock(dim, num_heads, dropout) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) to logits (B, K)."""
        patches = self.patches(images).flatten(2).transpose(1, 2)  # (B, N, D)
        tokens = torch.cat((self.class_token.expand(len(images), -1, -1), patches), dim=1)  # (B, 1 + N, D)
        x = self.blocks(self.dropout(tokens + self.position))
        return self.head(self.norm(x[:, 0]))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: tuple[Tensor, Tensor], name: str) -> None:
        images, labels = batch
        logits = self(images)
        metrics = {
            f"{name}_loss": F.cross_entropy(logits, labels),
            f"{name}_accuracy": (logits.argmax(dim=-1) == labels).float().mean(),
        }
        self.log_dict(metrics, on_epoch=True, prog_bar=True, sync_dist=True, batch_size=len(labels))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        # Biases, norms, the class token and the positions are not decayed.
        matrices = [p for p in self.parameters() if p.ndim >= 2 and p.shape[0] > 1]
        others = [p for p in self.parameters() if p.ndim < 2 or p.shape[0] == 1]
        groups = [
            {"params": matrices, "weight_decay": self.hparams["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"])
        warmup, total = self.hparams["warmup_steps"], self.trainer.estimated_stepping_batches

        def rate(step: int) -> float:
            return min((step + 1) / (warmup + 1), max(0.0, 1 - step / total))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
