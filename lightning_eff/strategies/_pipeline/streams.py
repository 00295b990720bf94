"""Random streams of a pipelined step, which depend on the step, the micro-batch and the block, and not on the layout.

The global generators (Python's, NumPy's, torch's and the device's) are seeded before a micro-batch, before each block and
after each block. The seed depends only on ``(seed, pass, micro-batch, place)``. So a block draws the same dropout mask on any
rank and in any order. The code outside the blocks, which every rank runs, does too.

A single process draws the same numbers if it runs the same micro-batches inside
:func:`lightning_eff.strategies._pipeline.view.uncut`, with the same seed and pass. The masks have the same distribution as in
a plain process but not the same values, because a plain process draws from one stream in order.
"""

import hashlib
import random
from dataclasses import dataclass

import numpy as np
import torch


def reseed(*key: int | str) -> None:
    """Set the global generators from ``key``."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little", signed=False) >> 1
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)


@dataclass(frozen=True)
class Stream:
    """The random numbers of one micro-batch in one pass.

    Attributes:
        seed: the run's seed, the same on all pipeline ranks.
        kind: "train", "evaluate", "look" or "verify".
        number: number of the pass since the start of the run.
        microbatch: index of the micro-batch.
    """

    seed: int
    kind: str
    number: int
    microbatch: int

    def start(self) -> None:
        """Seed the generators before the user's step."""
        self._set("start", 0)

    def enter(self, block: int) -> None:
        """Seed the generators before a block."""
        self._set("block", block)

    def leave(self, block: int) -> None:
        """Seed the generators after a block, whether it ran or was skipped."""
        self._set("after", block)

    def _set(self, place: str, block: int) -> None:
        reseed("pipeline", self.seed, self.kind, self.number, self.microbatch, place, block)
