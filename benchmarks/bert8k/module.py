"""The masked language model of :mod:`benchmarks.bert` over pieces, whose head is most of a step."""

from torch import Tensor

from benchmarks.bert.module import ByteBert


class PieceBert(ByteBert):
    """Predicts the pieces that were masked: :class:`ByteBert` with the vocabulary and sizes of the reference task.

    Args:
        dim: D, the width; a multiple of ``num_heads``.
        num_layers: blocks, all alike.
        num_heads: attention heads.
        block_size: the longest sequence, in pieces.
        lr: peak learning rate, reached after ``warmup_steps``, then falling linearly to zero at the end of the run.
        weight_decay: AdamW's, on matrices only.
        warmup_steps: optimizer steps.
        vocab_size: pieces and the mask.
        sparse: train with the model's own sparse prediction (ModernBERT's ``sparse_prediction``): the head gets none but the
            masked positions. The loss is the same. A module has to be written for it, as this one is.
    """

    def __init__(
        self,
        dim: int = 64,
        num_layers: int = 4,
        num_heads: int = 2,
        block_size: int = 64,
        lr: float = 8e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
        vocab_size: int = 8256,
        sparse: bool = False,
    ) -> None:
        super().__init__(dim, num_layers, num_heads, block_size, 0.0, lr, weight_decay, warmup_steps, vocab_size)
        self.sparse = sparse
        self.model.sparse_prediction = True  # where the model is given labels

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross-entropy in nats per masked piece; evaluation never computes the head where nothing is masked."""
        if self.training and not self.sparse:
            return super()._loss(batch)
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
