"""Memory, time and loss of the recipes ``low-memory`` and ``finetune``.

    python -m benchmarks.shipped.memory [--out benchmarks/results/shipped_memory.json]

Memory and time: short fits of transformers' GPT-2 with random weights, in float32 under AdamW. Bytes are those that
``EfficiencyMonitor`` counts, and do not depend on the machine. Times are processor seconds of a step, the median of those after
the first two, relative to plain training in the same process; arms take turns.

Loss: the GPT of ``benchmarks/fine_tuning.py`` is trained on one half of the standard library, and tuned to the other half by
all weights and by both variants of ``finetune``. Their learning rates are those that ``benchmarks/results/fine_tuning.json``
has for all weights and for LoRA, which were chosen on seed 0; the seeds here are others.
"""

import argparse
import logging
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

import lightning_eff as eff
from benchmarks import fine_tuning
from benchmarks.adapter_memory import CATEGORIES, GPT2
from benchmarks.machine import described, publish

RECIPES = ("low-memory:safe", "low-memory:fast", "finetune:safe", "finetune:fast")
SEEDS = (21, 22, 23)


class Clock(Callback):
    """Processor seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._since = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._since = time.process_time()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seconds.append(time.process_time() - self._since)


def measured(recipe: str | None, args: argparse.Namespace) -> dict[str, Any]:
    """Bytes by category, the median processor time of a step, and the techniques of one short fit."""
    seed_everything(0, verbose=False)
    module = GPT2(args.layers, args.heads, args.dim, args.vocabulary, args.length)
    callbacks = [] if recipe is None else eff.recipe(recipe, module)
    monitor, clock = eff.EfficiencyMonitor(), Clock()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=args.steps,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, monitor, clock],
    )
    ids = torch.randint(0, args.vocabulary, (args.steps * args.batch_size, args.length))
    trainer.fit(module, DataLoader(TensorDataset(ids), args.batch_size))
    held = monitor.summary()["memory"]
    buffers = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in module.buffers()}
    return {
        "weights": held["parameters"] + sum(buffers.values()),
        "gradients": held["gradients"],
        "optimizer": held["optimizer"],
        "activations": held["activations"],
        "seconds": statistics.median(clock.seconds[2:]),
        "techniques": [repr(one) for one in callbacks[:-1]],
    }


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Each arm in turns; bytes are those of the first."""
    arms: dict[str, Any] = {}
    times: dict[str, list[float]] = {}
    for _ in range(args.turns):
        for recipe in (None, *RECIPES):
            name = recipe or "plain training"
            found = measured(recipe, args)
            arms.setdefault(name, found)
            times.setdefault(name, []).append(found.pop("seconds"))
            print(f"{name:<18} {times[name][-1]:.3f} s {found}", flush=True)
    for name, arm in arms.items():
        arm["ratios"] = [own / plain for own, plain in zip(times[name], times["plain training"], strict=True)]
    return arms


def losses(args: argparse.Namespace) -> dict[str, Any]:
    """Test losses by arm and seed."""
    first, second = fine_tuning.halves(args)
    seed_everything(0, verbose=False)
    base = fine_tuning.model(args, 2e-3)
    fine_tuning.train(base, [], first, args.pretraining, 0)
    began = {name: p.clone() for name, p in base.state_dict().items()}
    found: dict[str, Any] = {"untuned": fine_tuning.loss_on(base, second["test"]), "arms": {}}
    for name, rate in (("all weights", 3e-3), ("finetune:safe", 1e-2), ("finetune:fast", 1e-2)):
        ends: list[float] = []
        trained = 0
        for seed in SEEDS:
            net = fine_tuning.model(args, rate)
            net.load_state_dict(began)
            techniques = [] if name == "all weights" else eff.recipe(name, net, max_steps=args.tuning)
            trained = fine_tuning.train(net, techniques, second["train"], args.tuning, seed)
            ends.append(fine_tuning.loss_on(net, second["test"]))
        found["arms"][name] = {"rate": rate, "trained": trained, "test": ends}
        print(name, ends, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--dim", type=int, default=256)
    add("--vocabulary", type=int, default=20_000)
    add("--length", type=int, default=128, help="tokens of a text, in both parts")
    add("--batch-size", type=int, default=2)
    add("--steps", type=int, default=4)
    add("--turns", type=int, default=2)
    add("--pretraining", type=int, default=250)
    add("--tuning", type=int, default=60)
    add("--windows", type=int, default=96)
    add("--max-bytes", type=int, default=1_000_000)
    add("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    result: dict[str, Any] = {"benchmark": "shipped_memory", **described(), "settings": settings, "seeds": SEEDS}
    result["memory"] = memory(args)
    args.dim, args.layers = 48, 4
    publish({**result, "categories": CATEGORIES, "loss": losses(args)}, args.out)


if __name__ == "__main__":
    main()
