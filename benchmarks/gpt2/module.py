"""Transformers' GPT-2 at its published size of 124 million parameters, with random weights, over bytes."""

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB_SIZE = 50304  # GPT-2's 50,257 rounded up to a multiple of 64; text uses the 256 bytes among them


class ByteGPT2(LightningModule):
    """Predicts the next byte with GPT-2's own vocabulary, so that a step costs what GPT-2's does.

    Args:
        n_embd: D, the width; a multiple of ``n_head``.
        n_layer: blocks.
        n_head: attention heads.
        block_size: the longest sequence, in bytes; GPT-2's is 1024.
        vocab_size: rows of the embedding, >= 256.
        dropout: probability, in [0, 1), for embeddings, attention weights and both residual branches.
        lr: peak learning rate, reached after ``warmup_steps``, then falling linearly to zero at the end of the run.
        weight_decay: AdamW's, on matrices only.
        warmup_steps: optimizer steps.
    """

    def __init__(
        self,
        n_embd: int = 768,
        n_layer: int = 12,
        n_head: int = 12,
        block_size: int = 1024,
        vocab_size: int = VOCAB_SIZE,
        dropout: float = 0.1,
        lr: float = 6e-4,
        weight_decay: float = 0.1,
        warmup_steps: int = 200,
    ) -> None:
        super().__init__()
        if vocab_size < 256:
            raise ValueError(f"ByteGPT2({vocab_size=}): expected at least 256, one row for each byte.")
        self.save_hyperparameters()
        config = GPT2Config(
            vocab_size=vocab_size,
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
        """Bytes (B, T) to logits (B, T, ``vocab_size``), for T up to ``block_size``."""
        return self.model(input_ids=input_ids).logits

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
