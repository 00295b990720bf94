"""A masked autoencoder (He et al. 2021) in a LightningModule: transformers' ViTMAEForPreTraining, random weights."""

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from transformers import ViTMAEConfig, ViTMAEForPreTraining

VALIDATION_SEED = 0  # Which patches are hidden in validation stays the same, so that its losses compare.


def sine_positions(side: int, dim: int) -> Tensor:
    """Sines and cosines of row and column, (1, 1 + side ** 2, dim), 0 for the class token; ``dim`` is a multiple of 4."""
    rates = 10_000.0 ** -(torch.arange(dim // 4) / (dim / 4))
    angles = torch.arange(side)[:, None] * rates  # (side, dim / 4)
    waves = torch.cat((angles.sin(), angles.cos()), dim=1)  # (side, dim / 2)
    rows, columns = waves[:, None].expand(-1, side, -1), waves[None].expand(side, -1, -1)
    patches = torch.cat((rows, columns), dim=-1).flatten(0, 1)  # (side ** 2, dim)
    return torch.cat((torch.zeros(1, dim), patches))[None]


class MaskedAutoencoder(LightningModule):
    """Predicts the hidden patches of images from the others.

    The encoder runs on the patches that are not hidden and a class token, 1 + N / 4 tokens at the default ratio; the decoder,
    which is smaller, on all. The loss is the mean squared error of the hidden patches' pixels.

    Args:
        image_size: height and width, in pixels; a multiple of ``patch_size``.
        patch_size: height and width of a patch, in pixels.
        num_channels: C.
        mask_ratio: the share of the N patches that are hidden, in (0, 1).
        dim: D, the encoder's width; a multiple of 4 and of ``num_heads``.
        num_layers: blocks of the encoder.
        num_heads: its attention heads.
        decoder_dim: the decoder's width; a multiple of 4 and of ``decoder_heads``.
        decoder_layers: its blocks.
        decoder_heads: its attention heads.
        norm_pixels: let each patch's pixels have mean 0 and deviation 1 in the loss.
        lr: peak learning rate, reached after ``warmup_steps``, then falling linearly to zero at the end of the run.
        weight_decay: AdamW's, on matrices only.
        warmup_steps: optimizer steps.
    """

    def __init__(
        self,
        image_size: int = 8,
        patch_size: int = 2,
        num_channels: int = 1,
        mask_ratio: float = 0.75,
        dim: int = 96,
        num_layers: int = 6,
        num_heads: int = 3,
        decoder_dim: int = 48,
        decoder_layers: int = 2,
        decoder_heads: int = 3,
        norm_pixels: bool = False,
        lr: float = 2e-3,
        weight_decay: float = 0.05,
        warmup_steps: int = 50,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = ViTMAEConfig(
            image_size=image_size,
            patch_size=patch_size,
            num_channels=num_channels,
            mask_ratio=mask_ratio,
            hidden_size=dim,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            intermediate_size=4 * dim,
            decoder_hidden_size=decoder_dim,
            decoder_num_hidden_layers=decoder_layers,
            decoder_num_attention_heads=decoder_heads,
            decoder_intermediate_size=4 * decoder_dim,
            norm_pix_loss=norm_pixels,
            # The default, 0.02, is for large widths: with it a small one predicts means for long.
            initializer_range=dim**-0.5,
        )
        self.num_patches = (image_size // patch_size) ** 2
        self.model = ViTMAEForPreTraining(config)
        # With random weights, transformers 5 leaves the fixed positions of encoder and decoder at zero: patches were all alike.
        side = image_size // patch_size
        self.model.vit.embeddings.position_embeddings.data.copy_(sine_positions(side, dim))
        self.model.decoder.decoder_pos_embed.data.copy_(sine_positions(side, decoder_dim))

    def forward(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """The loss of images (B, C, H, W); the patches of the largest ``noise``, (B, N), are hidden, random ones if None."""
        return self.model(pixel_values=images, noise=noise).loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self(batch[0])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "test")

    def _evaluate(self, batch: tuple[Tensor, Tensor], batch_idx: int, name: str) -> None:
        images = batch[0]
        generator = torch.Generator().manual_seed(VALIDATION_SEED + batch_idx)
        noise = torch.rand(len(images), self.num_patches, generator=generator).to(images.device)
        loss = self(images, noise)
        self.log(f"{name}_loss", loss, on_epoch=True, prog_bar=True, sync_dist=True, batch_size=len(images))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        trained = [p for p in self.parameters() if p.requires_grad]  # The positions are fixed.
        # Biases, norms, the class token and the mask token are not decayed.
        matrices = [p for p in trained if p.ndim >= 2 and p.shape[0] > 1]
        others = [p for p in trained if p.ndim < 2 or p.shape[0] == 1]
        groups = [
            {"params": matrices, "weight_decay": self.hparams["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"], betas=(0.9, 0.95))
        warmup, total = self.hparams["warmup_steps"], self.trainer.estimated_stepping_batches

        def rate(step: int) -> float:
            return min((step + 1) / (warmup + 1), max(0.0, 1 - step / total))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
