"""Windows of the standard library's source text with masked bytes: anew for each training batch, fixed for validation."""

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.bert.module import IGNORED
from examples.gpt.data import StdlibText

MASK = 256  # the token after the bytes
MASKED, KEPT = 0.8, 0.1  # of the chosen bytes; the rest become random bytes
VAL_MASK_SEED = 0  # The validation mask is part of the data set: it stays the same whatever seed a run has.


def mask_bytes(
    text: Tensor, *, probability: float = 0.15, mask: int = MASK, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """BERT's masking (Devlin et al. 2019): of the bytes chosen, 80 % hidden, 10 % replaced by any byte, 10 % left.

    Args:
        text: bytes of any shape, int64 in 0..255, or other tokens below ``mask``.
        probability: of each byte to be chosen, in [0, 1].
        mask: the token that hides; those below it are what may replace a byte.
        generator: where the draws come from; None is torch's global generator.

    Returns:
        ``input_ids``, with ``mask`` for what is hidden, and ``labels``, the bytes where chosen and -100 elsewhere.
    """
    chosen = torch.rand(text.shape, generator=generator) < probability
    fate = torch.rand(text.shape, generator=generator)
    noise = torch.randint(0, mask, text.shape, generator=generator)
    changed = torch.where(fate < MASKED, mask, torch.where(fate < MASKED + KEPT, text, noise))
    return {"input_ids": torch.where(chosen, changed, text), "labels": torch.where(chosen, text, IGNORED)}


class FixedMask(Dataset[dict[str, Tensor]]):
    """Windows (N, T) masked once and for all, ``{"input_ids": (T,), "labels": (T,)}`` each."""

    def __init__(self, text: Tensor, probability: float, mask: int = MASK) -> None:
        generator = torch.Generator().manual_seed(VAL_MASK_SEED)
        self.batch = mask_bytes(text, probability=probability, mask=mask, generator=generator)

    def __len__(self) -> int:
        return len(self.batch["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.batch.items()}


class MaskedStdlibText(LightningDataModule):
    """Batches ``{"input_ids": (B, T), "labels": (B, T)}`` of the standard library's source text, some bytes masked.

    The text, its split and its windows are those of :class:`examples.gpt.data.StdlibText`.

    Args:
        block_size: T, the bytes in a window.
        batch_size: B, the windows in a batch.
        probability: of a byte to be chosen for prediction, in (0, 1].
        max_bytes: read no more text than this.
        num_eval_windows: windows of the validation text that an evaluation uses.
    """

    def __init__(
        self,
        block_size: int = 128,
        batch_size: int = 8,
        probability: float = 0.15,
        max_bytes: int = 16_000_000,
        num_eval_windows: int = 320,
    ) -> None:
        super().__init__()
        if not 0 < probability <= 1:
            raise ValueError(f"MaskedStdlibText({probability=}): expected a probability in (0, 1]; 0.15 is BERT's.")
        self.batch_size = batch_size
        self.probability = probability
        self.text = StdlibText(block_size, batch_size, max_bytes, num_eval_windows)

    def setup(self, stage: str) -> None:
        self.text.setup(stage)
        windows = self.text.val_set
        text = torch.stack([windows[i]["input_ids"] for i in range(len(windows))])
        self.val_set = FixedMask(text, self.probability)

    def _mask(self, windows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """A training batch with a mask of its own, drawn from torch's global generator."""
        return mask_bytes(default_collate(windows)["input_ids"], probability=self.probability)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.text.train_set, self.batch_size, shuffle=True, drop_last=True, collate_fn=self._mask)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.val_set, self.batch_size)
