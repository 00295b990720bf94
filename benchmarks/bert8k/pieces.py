"""Source text cut into pieces by byte pair encoding (Sennrich et al. 2015), learnt here from the training files alone.

The same text gives the same pieces, whatever the run, the machine and its threads. What was learnt, and the text in pieces,
is kept in a folder that is not committed, under a name that follows from all of that.
"""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

KEPT = Path(__file__).resolve().parent.parent / "out" / "pieces"


def learn(texts: Sequence[bytes], num_pieces: int) -> Tokenizer:
    """The ``num_pieces`` pieces of ``texts``: 256 bytes, and what their most frequent neighbours make, again and again.

    Words, numbers, runs of signs and of blanks are told apart first, as for GPT-2 (Radford et al. 2019).

    Raises:
        ValueError: if the text has fewer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=num_pieces, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(map(_read, texts), trainer)
    if (found := tokenizer.get_vocab_size()) != num_pieces:
        raise ValueError(
            f"Got {found:,} pieces of a text of {sum(map(len, texts)):,} bytes, expected {num_pieces:,}: raise max_bytes, or"
            " ask for fewer, of which the 256 bytes are the first."
        )
    return tokenizer


def cut(tokenizer: Tokenizer, texts: Sequence[bytes]) -> Tensor:
    """The texts in pieces, one after the other, int32 (N,)."""
    encoded = tokenizer.encode_batch_fast([_read(text) for text in texts])
    return torch.cat([torch.tensor(one.ids, dtype=torch.int32) for one in encoded])


def pieces(train: Sequence[bytes], val: Sequence[bytes], num_pieces: int, folder: Path | None = None) -> list[Tensor]:
    """Both texts in pieces learnt from ``train``, int32 (N,) each; those kept in ``folder``, where they are there.

    Args:
        train: what the pieces are learnt from.
        val: what is cut into them, too.
        num_pieces: how many, >= 256.
        folder: where the texts in pieces are kept, and the tokenizer beside them; None for :data:`KEPT`.
    """
    folder = KEPT if folder is None else folder
    key = hashlib.sha256(f"{num_pieces} {tokenizers.__version__} {len(train)}".encode())
    for text in (*train, *val):
        key.update(hashlib.sha256(text).digest())
    file = folder / f"{key.hexdigest()[:16]}.pt"
    if not file.is_file():
        tokenizer = learn(train, num_pieces)
        folder.mkdir(parents=True, exist_ok=True)
        # Another run may be at the same: each writes a file of its own, and puts it there whole.
        with tempfile.TemporaryDirectory(dir=folder) as own:
            tokenizer.save(f"{own}/tokenizer.json")
            torch.save([cut(tokenizer, train), cut(tokenizer, val)], f"{own}/pieces.pt")
            os.replace(f"{own}/tokenizer.json", file.with_suffix(".json"))
            os.replace(f"{own}/pieces.pt", file)
    return torch.load(file)


def _read(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")
