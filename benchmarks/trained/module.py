"""The GPT of :mod:`examples.gpt`, which begins with the weights of a training that has ended.

    python -m benchmarks.trained.module

makes these weights: the GPT task's baseline, trained for its budget of 60 s of the reference clock on a seed that no evaluation
uses. It takes about a minute, and the file is not committed.
"""

from pathlib import Path

import torch

from examples.gpt.module import GPT

ROOT = Path(__file__).resolve().parent.parent.parent
KEPT = ROOT / "benchmarks" / "out" / "trained" / "dense.ckpt"
STEPS = 1170  #: of the dense training, as many as its baseline makes in 60 s


class TrainedGPT(GPT):
    """Predicts the next byte, and begins where another training ended.

    Args:
        dim: D, the width; a multiple of ``num_heads``.
        num_layers: blocks.
        num_heads: attention heads.
        block_size: the longest sequence, in bytes.
        lr: peak learning rate, reached after ``warmup_steps``, then falling linearly to zero at the end of the run.
        weight_decay: AdamW's, on matrices only.
        warmup_steps: optimizer steps.
        num_samples: what the model writes at the end of training; 0 for none.
        dense: the checkpoint of the dense training, of the same sizes. None is the one that this script makes.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
    """

    def __init__(
        self,
        dim: int = 48,
        num_layers: int = 4,
        num_heads: int = 2,
        block_size: int = 128,
        lr: float = 1e-2,
        weight_decay: float = 0.1,
        warmup_steps: int = 50,
        num_samples: int = 0,
        dense: str | None = None,
    ) -> None:
        super().__init__(dim, num_layers, num_heads, block_size, 0.0, True, lr, weight_decay, warmup_steps)
        file = KEPT if dense is None else Path(dense)
        if not file.is_file():
            raise FileNotFoundError(
                f"TrainedGPT(dense={dense!r}): {file} does not exist. Run `python -m benchmarks.trained.module` to make the"
                " default one, or name a checkpoint of a GPT of these sizes."
            )
        self.load_state_dict(torch.load(file, map_location="cpu", weights_only=True)["state_dict"])


def make(file: Path = KEPT, steps: int = STEPS) -> float:
    """Train the GPT task's baseline, keep its checkpoint, and return its validation loss."""
    from benchmarks import tune

    torch.set_num_threads(1)
    cli = tune.built(tune.settings("gpt", {}), seed=0, max_steps=steps, callbacks=[])
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    file.parent.mkdir(parents=True, exist_ok=True)
    cli.trainer.save_checkpoint(file)
    return float(cli.trainer.callback_metrics["val_loss"])


if __name__ == "__main__":
    print(f"{KEPT}: validation loss {make():.4f}")
