"""A slow run with a stack of techniques, to be killed: ``python tests/killed_run.py DIRECTORY``."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

sys.path.insert(0, str(Path(__file__).parent.parent))

from lightning_eff._core.technique import Technique
from tests.cases import CASES
from tests.runs import fit


def stack() -> Sequence[Technique]:
    """All techniques but one of each two that refuse each other."""
    left_out = ("ActivationOffload", "ImportanceSampling", "LocalSGD")
    return [case.active() for name, case in CASES.items() if name not in left_out]


class Slow(pl.Callback):
    """Leaves time for the kill between two steps."""

    def on_train_batch_start(self, *args: Any) -> None:
        time.sleep(0.5)


if __name__ == "__main__":
    fit("tiny_gpt", stack, directory=Path(sys.argv[1]), callbacks=[Slow()])
