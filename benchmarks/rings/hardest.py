"""Which images a run on the rings ends with: how much of its last validation loss a few of them make up.

    python benchmarks/rings/hardest.py [--stack benchmarks/rings/stacks/soap_patches.yaml] [--seeds 4 5] [--steps 2968]
        [--out FILE]

Trained for minutes, a model knows nearly all of the 512 images, and the mean over them is that of the few that it does not.
Steps are those that the bench gave a run of this stack for 120 s. Training images are looked at once more, under noise that
they have not had.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import yaml  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import lightning_eff  # noqa: E402, F401  (its techniques' names are known to a config by it)
from benchmarks import tune  # noqa: E402
from benchmarks.machine import described, publish  # noqa: E402

TASK = ROOT / "benchmarks" / "rings"


def weighed(losses: Tensor) -> dict[str, Any]:
    """The mean of ``losses`` (N,), N >= 5, in nats, its five largest, and what part of the sum the largest and these five are.

    An image is counted as wrong where less than half of the probability is on its label.
    """
    largest = losses.topk(5).values
    return {
        "images": len(losses),
        "mean": losses.mean().item(),
        "largest": [round(loss, 3) for loss in largest.tolist()],
        "share_of_one": (largest[0] / losses.sum()).item(),
        "share_of_five": (largest.sum() / losses.sum()).item(),
        "wrong": int((losses > torch.tensor(2.0).log()).sum()),
        "mean_without_one": ((losses.sum() - largest[0]) / (len(losses) - 1)).item(),
    }


@torch.no_grad()
def losses_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The loss (N,) of each of ``images`` (N, 1, 64, 64)."""
    parts = zip(images.split(256), labels.split(256), strict=True)
    return torch.cat([F.cross_entropy(model(x), y, reduction="none") for x, y in parts])


def trained(stack: Path, seed: int, steps: int) -> dict[str, Any]:
    """One run of ``stack``, and what its losses are made up of."""
    print(f"seed {seed}: {steps} steps, which take minutes", file=sys.stderr)
    configs = (yaml.safe_load(path.read_text()) for path in (TASK / "baseline.yaml", stack))
    cli = tune.built(tune.merged(*configs), seed, steps, [])
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    model, data = cli.model.eval(), cli.datamodule
    images, labels = data.train_set.tensors
    images = images + data.noise * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    return {
        "seed": seed,
        "validation": weighed(losses_of(model, *data.val_set.tensors)),
        "training": weighed(losses_of(model, images, labels)),
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stack", type=Path, default=TASK / "stacks" / "soap_patches.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[4, 5])
    parser.add_argument("--steps", type=int, default=2968)
    parser.add_argument("--out", type=Path, help="a file for the result")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    runs = [trained(options.stack, seed, options.steps) for seed in options.seeds]
    result = {"benchmark": "rings_hardest", "stack": options.stack.stem, "steps": options.steps, "runs": runs}
    publish({**result, "machine": described()}, options.out)
    return result


if __name__ == "__main__":
    main()
