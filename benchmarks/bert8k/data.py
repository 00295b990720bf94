"""Windows of the standard library's source text in pieces, some masked: anew for each training batch, fixed for validation."""

from pathlib import Path

from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from benchmarks.bert.data import FixedMask, mask_bytes
from benchmarks.bert8k.pieces import pieces
from examples.gpt.data import SPLIT_PERIOD, TEST_FILE, VAL_FILE, read_bytes, stdlib_files


class MaskedPieces(LightningDataModule):
    """Batches ``{"input_ids": (B, T), "labels": (B, T)}`` of the standard library's source text in pieces, some masked.

    Files are split as in :class:`examples.gpt.data.StdlibText`. The token after the pieces hides. No special tokens stand
    at windows' ends, which lie anywhere in the text.

    Args:
        block_size: T, the pieces in a window.
        batch_size: B, the windows in a batch.
        probability: of a piece to be chosen for prediction, in (0, 1].
        num_pieces: how many there are; a multiple of 64 with the mask, by default.
        max_bytes: read no more text than this.
        num_eval_windows: windows of the validation text that an evaluation uses, evenly spaced over it.
        folder: where the text in pieces is kept; None for ``benchmarks/out/pieces``.
    """

    def __init__(
        self,
        block_size: int = 64,
        batch_size: int = 16,
        probability: float = 0.15,
        num_pieces: int = 8255,
        max_bytes: int = 16_000_000,
        num_eval_windows: int = 640,
        folder: Path | None = None,
    ) -> None:
        super().__init__()
        if not 0 < probability <= 1:
            raise ValueError(f"MaskedPieces({probability=}): expected a probability in (0, 1]; 0.15 is BERT's.")
        if num_pieces < 256:
            raise ValueError(f"MaskedPieces({num_pieces=}): expected at least the 256 bytes.")
        self.block_size = block_size
        self.batch_size = batch_size
        self.probability = probability
        self.num_pieces = num_pieces
        self.max_bytes = max_bytes
        self.num_eval_windows = num_eval_windows
        self.folder = folder

    def setup(self, stage: str) -> None:
        texts = read_bytes(stdlib_files(), self.max_bytes)
        train = [text for i, text in enumerate(texts) if i % SPLIT_PERIOD not in (VAL_FILE, TEST_FILE)]
        train, val = pieces(train, texts[VAL_FILE::SPLIT_PERIOD], self.num_pieces, self.folder)
        self.train_set = self._windows(train)
        windows = self._windows(val)
        count = min(self.num_eval_windows, len(windows))
        chosen = windows[[i * len(windows) // count for i in range(count)]]
        self.val_set = FixedMask(chosen.long(), self.probability, self.num_pieces)

    def _windows(self, tokens: Tensor) -> Tensor:
        """(N,) to (N // T, T)."""
        count = len(tokens) // self.block_size
        if count < 1:
            raise ValueError(
                f"Got a text of {len(tokens)} pieces, expected at least {self.block_size}: raise max_bytes."
            )
        return tokens[: count * self.block_size].view(count, self.block_size)

    def _mask(self, windows: list[Tensor]) -> dict[str, Tensor]:
        """A training batch with a mask of its own, drawn from torch's global generator."""
        return mask_bytes(default_collate(windows).long(), probability=self.probability, mask=self.num_pieces)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True, collate_fn=self._mask)  # pyright: ignore[reportArgumentType]

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.val_set, self.batch_size)
