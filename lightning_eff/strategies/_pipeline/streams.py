"""Random streams of a pipelined step: every draw follows from the step, the micro-batch and the block, on any layout.

Before a micro-batch runs, before each block and after each block, the global generators (Python's, NumPy's, torch's and
the device's) are set to a number that follows from ``(seed, pass, micro-batch, place)`` alone. A block therefore draws
the same dropout mask whichever rank runs it and in whichever order, and so does code outside the blocks, which every
pipeline rank runs. The single process that draws the same is one that runs the same micro-batches inside
:func:`lightning_eff.strategies._pipeline.view.uncut` with the same seed and pass: its masks are those of a plain
process in distribution, not in value, since a plain process draws from one stream in the order of execution.
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
        seed: the run's, the same on all pipeline ranks.
        kind: "train", "evaluate", "look" or "verify".
        number: of the pass, counted from the start of the run.
        microbatch: its index in the batch.
    """

    seed: int
    kind: str
    number: int
    microbatch: int

    def start(self) -> None:
        """Before the user's step."""
        self._set("start", 0)

    def enter(self, block: int) -> None:
        """Before a block."""
        self._set("block", block)

    def leave(self, block: int) -> None:
        """After a block, whether it ran here or was passed over."""
        self._set("after", block)

    def _set(self, place: str, block: int) -> None:
        reseed("pipeline", self.seed, self.kind, self.number, self.microbatch, place, block)
