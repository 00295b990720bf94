"""A small ResNet (He et al. 2016) with batch norm, for images of 64 x 64 pixels."""

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two convolutions of 3 x 3 beside a shortcut; (B, in, H, W) to (B, out, H / stride, W / stride)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        alike = inside == outside and stride == 1
        self.shortcut = nn.Identity() if alike else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.shortcut(x) + self.norm2(self.conv2(y)))


class ResNet(LightningModule):
    """Classifies images.

    Args:
        num_classes: classes.
        widths: channels of each stage; every stage but the first halves the side.
        depth: residual blocks of a stage.
        lr: peak learning rate, reached after ``warmup_steps``, then falling linearly to zero at the end of the run.
        weight_decay: AdamW's, on all but norms and biases.
        warmup_steps: optimizer steps.
    """

    def __init__(
        self,
        num_classes: int = 8,
        widths: tuple[int, ...] = (8, 16, 32),
        depth: int = 2,
        lr: float = 1e-2,
        weight_decay: float = 0.05,
        warmup_steps: int = 50,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Sequential(
            nn.Conv2d(1, widths[0], 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        stages: list[nn.Module] = []
        for i, width in enumerate(widths):
            before = widths[max(i - 1, 0)]
            first = Residual(before, width, 1 if i == 0 else 2)
            stages.append(nn.Sequential(first, *(Residual(width, width, 1) for _ in range(depth - 1))))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 1, H, W) to logits (B, num_classes)."""
        return self.head(self.stages(self.stem(images)).mean((2, 3)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_accuracy", (logits.argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        groups = [
            {"params": [p for p in self.parameters() if p.ndim >= 2], "weight_decay": self.hparams["weight_decay"]},
            {"params": [p for p in self.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"])
        warmup, total = self.hparams["warmup_steps"], self.trainer.estimated_stepping_batches

        def rate(step: int) -> float:
            return min((step + 1) / (warmup + 1), max(0.0, 1 - step / total))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
