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
    """All techniques for this module but the later of each two that refuse each other, and but lossy ones.

    What a measured plan recomputes, a lossy one does not round: plans that differ between two processes would show.
    """
    taken: list[Technique] = []
    for case in CASES.values():
        technique = case.active()
        if case.lossy or case.model != "tiny_gpt":
            continue
        refused = {name for other in taken for name in other.conflicts}
        if type(technique).__name__ not in refused and not technique.conflicts.keys() & {
            type(t).__name__ for t in taken
        }:
            taken.append(technique)
    return taken


class Slow(pl.Callback):
    """Leaves time for the kill between two steps."""

    def on_train_batch_start(self, *args: Any) -> None:
        time.sleep(0.5)


if __name__ == "__main__":
    fit("tiny_gpt", stack, directory=Path(sys.argv[1]), callbacks=[Slow()])
