"""Hugging Face's GPT-2 in a LightningModule: a small one with random weights, over bytes; nothing is downloaded."""

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB_SIZE = 256  # bytes


class HuggingFaceGPT2(LightningModule):
    """Predicts the next byte.

    Args:
        n_embd: D, the width; a multiple of ``n_head``.
        n_layer: blocks.
        n_head: attention heads.
        block_size: the longest sequence, in bytes.
        dropout: probability, in [0, 1), for embeddings, attention weights and both residual branches.
        lr: peak learning rate, reached after ``warmup_steps``, then falling linearly to zero at the end of the run.
        weight_decay: AdamW's, on matrices only.
        warmup_steps: optimizer steps.
    """

    def __init__(
        self,
        n_embd: int = 96,
        n_layer: int = 6,
        n_head: int = 3,
        block_size: int = 256,
        dropout: float = 0.0,
        lr: float = 4e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 50,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_positions=block_size,
            n_embd=n_embd,
            n_layer=n_layer,
            n_head=n_head,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            resid_pdrop=dropout,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
        self.model = GPT2LMHeadModel(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Bytes (B, T) to logits (B, T, 256), for T up to ``block_size``."""
        return self.model(input_ids=input_ids).logits

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross-entropy in nats per byte, of ``input_ids`` and ``labels`` (B, T).

        The batch's labels are shifted already, and the model would shift what it gets as ``labels`` once more: the loss
        is computed here, on the logits.
        """
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
