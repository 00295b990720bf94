"""What channels last makes of the time of a step: of a ResNet with BatchNorm, and of transformers' ConvNeXt.

    python benchmarks/layout_time.py [--rounds 6] [--steps 6] [--precision bf16-mixed] [--threads N] [--out layout_time.json]

For each network two arms alternate in one process, each a Trainer fit of the same seed: plain, and under ``ChannelsLast``.
A round gives one ratio, of the medians of its steps. Prints a table and JSON, with the medians over the rounds and their
range. FLOPs are the same in both, and numbers too, to rounding.
"""

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import ConvNextConfig, ConvNextForImageClassification

sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning_eff as eff
from benchmarks.machine import described, publish


class Basic(nn.Module):
    """He et al.'s basic block (2016): two convolutions of 3 x 3 with BatchNorm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride) if (inputs, stride) != (outputs, 1) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.short(x))


def resnet(width: int) -> nn.Module:
    """Eight convolutions of 3 x 3 behind a stem, at three sides."""
    blocks = (Basic(width, width, 1), Basic(width, 2 * width, 2), Basic(2 * width, 4 * width, 2))
    stem = nn.Conv2d(3, width, 3, 1, 1)
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


class ConvNeXt(nn.Module):
    """Three stages of transformers' ConvNeXt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        config = ConvNextConfig(num_stages=3, depths=[2, 2, 2], hidden_sizes=sizes, patch_size=4, num_labels=10)
        self.model = ConvNextForImageClassification(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(pixel_values=x).logits


class Classifies(LightningModule):
    """Any network that gives logits (N, 10) for images."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


class Meter(Callback):
    """Each step's seconds, from the end of the one before, but for those of the warm-up."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.seconds, self._ended = warm_up, list[float](), 0.0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if args[-1] >= self.warm_up:
            self.seconds.append(time.perf_counter() - self._ended)
        self._ended = time.perf_counter()


def measure(
    build: Callable[[int], nn.Module], techniques: list[Callback], args: argparse.Namespace, seed: int
) -> float:
    """The median seconds of a step of one short fit."""
    seed_everything(seed, verbose=False)
    module, steps, meter = Classifies(build(args.width)), args.warm_up + args.steps, Meter(args.warm_up)
    x = torch.randn(steps * args.batch_size, 3, args.side, args.side)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        precision=args.precision,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*techniques, meter],
    )
    trainer.fit(module, DataLoader(TensorDataset(x, torch.randint(0, 10, (len(x),))), args.batch_size))
    return statistics.median(meter.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each fit")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--precision", default="32-true", help="the Trainer's, such as bf16-mixed")
    parser.add_argument("--threads", type=int, help="torch's, on CPU; fewer than the cores on a shared machine")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if args.threads:
        torch.set_num_threads(args.threads)
    networks: dict[str, Callable[[int], nn.Module]] = {"resnet": resnet, "convnext": ConvNeXt}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in networks}
    for round_ in range(args.rounds + 1):
        for name, build in networks.items():
            arms: list[list[Callback]] = [[], [eff.ChannelsLast()]]
            backwards = round_ % 2 == 1  # each begins in turn
            timed = [measure(build, arm, args, round_) for arm in (arms[::-1] if backwards else arms)]
            if round_:  # the first round warms the process up
                plain, last = timed[::-1] if backwards else timed
                seconds[name].append((plain, last))
                print(f"round {round_}/{args.rounds}: {name} {last / plain:.3f}", flush=True)
    result: dict[str, Any] = {"benchmark": "layout_time", "step_over_plain": {}}
    print(f"\n{'network':<10} {'plain, ms':>10} {'channels last, ms':>18} {'over plain':>11} {'range':>15}")
    for name, pairs in seconds.items():
        ratios = [last / plain for plain, last in pairs]
        plain, last = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
        spread = f"{min(ratios):.3f} - {max(ratios):.3f}"
        print(f"{name:<10} {plain:10.1f} {last:18.1f} {statistics.median(ratios):11.3f} {spread:>15}")
        found = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        result["step_over_plain"][name] = {**found, "plain_ms": plain, "channels_last_ms": last}
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    publish({**result, "settings": settings, **described()}, args.out)


if __name__ == "__main__":
    main()
