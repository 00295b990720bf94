"""A masked language model over bytes: transformers' ModernBERT with random weights, in a LightningModule.

ModernBERT (Warner et al. 2024, arXiv:2412.13663) is BERT with rotary positions, norms before the branches and gated MLPs.
BERT itself, with learnt absolute positions, has hardly left the bytes' frequencies behind after a minute on one thread.
"""

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ModernBertConfig, ModernBertForMaskedLM

VOCAB_SIZE = 257  # bytes, and the mask
IGNORED = -100  # the label of a position that was not masked


class ByteBert(LightningModule):
    """Predicts the bytes that were masked.

    Args:
        dim: D, the width; a multiple of ``num_heads``.
        num_layers: blocks, all alike: the first one has its norm, too.
        num_heads: attention heads.
        block_size: the longest sequence, in bytes.
        dropout: probability, in [0, 1), for embeddings, attention weights and MLPs.
        lr: peak learning rate, reached after ``warmup_steps``, then falling linearly to zero at the end of the run.
        weight_decay: AdamW's, on matrices only.
        warmup_steps: optimizer steps.
        vocab_size: of tokens, the mask among them.
    """

    def __init__(
        self,
        dim: int = 64,
        num_layers: int = 4,
        num_heads: int = 2,
        block_size: int = 128,
        dropout: float = 0.0,
        lr: float = 8e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = ModernBertConfig(
            vocab_size=vocab_size,
            hidden_size=dim,
            intermediate_size=2 * dim,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            max_position_embeddings=block_size,
            global_attn_every_n_layers=1,
            global_rope_theta=1000.0,
            initializer_range=dim**-0.5,  # BERT's 0.02 suits 768 features
            attention_dropout=dropout,
            embedding_dropout=dropout,
            mlp_dropout=dropout,
            pad_token_id=None,  # pyright: ignore[reportArgumentType] (a byte would be taken for padding)
            bos_token_id=None,
            eos_token_id=None,
            cls_token_id=None,
            sep_token_id=None,
        )
        self.model = ModernBertForMaskedLM(config)
        self.model.model.layers[0].attn_norm = nn.LayerNorm(dim, eps=config.norm_eps, bias=config.norm_bias)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Bytes and masks (B, T) to logits (B, T, 257), for T up to ``block_size``."""
        return self.model(input_ids=input_ids).logits

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross-entropy in nats per masked byte, of ``input_ids`` and ``labels`` (B, T), -100 where not masked."""
        logits = self(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        masked = int((batch["labels"] != IGNORED).sum())
        # Weighted by its masked bytes, so that the epoch's value is the mean over all of them.
        self.log("val_loss", self._loss(batch), on_epoch=True, prog_bar=True, sync_dist=True, batch_size=masked)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.hparams["weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"], betas=(0.9, 0.98))
        warmup, total = self.hparams["warmup_steps"], self.trainer.estimated_stepping_batches

        def rate(step: int) -> float:
            return min((step + 1) / (warmup + 1), max(0.0, 1 - step / total))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
