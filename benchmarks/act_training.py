"""The GPT example trained with exact and with compressed activations: final validation loss, bytes held, time.

    python benchmarks/act_training.py --steps 2000 --seeds 0 1 2 --out benchmarks/results/act_training.json

Each arm of a seed starts from the same weights and sees the same batches. It prints one line for each run, and in the
end each arm's mean validation loss relative to that of exact training of the same seeds; 1 % is what 4 bits, and an
average of 3 bits by sensitivity, must stay within.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch

from examples.gpt.data import StdlibText
from examples.gpt.module import GPT
from lightning_eff.memory.activation_compression import ActivationCompression

ARMS: dict[str, Callable[[], list[pl.Callback]]] = {
    "exact": list,
    "8": lambda: [ActivationCompression(bits=8)],
    "4": lambda: [ActivationCompression(bits=4)],
    "2": lambda: [ActivationCompression(bits=2)],
    "auto 3": lambda: [ActivationCompression(bits="auto", budget=3.0)],
}


def train(arm: str, seed: int, steps: int, data: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """One run, from the seed's weights to the validation loss at the end."""
    pl.seed_everything(seed, verbose=False)
    callbacks = ARMS[arm]()
    trainer = pl.Trainer(
        accelerator="auto",
        devices=1,
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    module, text = GPT(**model), StdlibText(**data)
    began, cpu = time.perf_counter(), time.process_time()
    trainer.fit(module, datamodule=text)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    judge = pl.Trainer(accelerator="auto", devices=1, logger=False, enable_progress_bar=False)
    metrics = judge.validate(module, datamodule=text, verbose=False)[0]
    report = callbacks[0].report() if callbacks else {}  # pyright: ignore[reportAttributeAccessIssue]
    kept = {name: float(report[name]) for name in ("saved_bytes", "exact_bytes", "ratio", "bits", "unfit") if report}
    run = {"arm": arm, "seed": seed, "seconds": seconds, "cpu_seconds": cpu_seconds, **kept}
    return {**run, "val_loss": float(metrics["val_loss"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=["exact", "4", "auto 3"], choices=list(ARMS))
    parser.add_argument("--data", type=json.loads, default={}, help="arguments of the example's data, as JSON")
    parser.add_argument("--model", type=json.loads, default={}, help="arguments of the example's module, as JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in args.seeds:
        for arm in args.arms:
            runs.append(train(arm, seed, args.steps, args.data, args.model))
            print(json.dumps(runs[-1]), flush=True)
    means = {arm: statistics.mean(r["val_loss"] for r in runs if r["arm"] == arm) for arm in args.arms}
    summary = {arm: mean / means["exact"] - 1 for arm, mean in means.items()} if "exact" in means else {}
    for arm, change in summary.items():
        print(f"{arm:>8}: {means[arm]:.4f}, {change:+.2%} of exact")
    if args.out is not None:
        machine = {"machine": platform.machine(), "threads": torch.get_num_threads(), "cpus": platform.processor()}
        versions = {"torch": torch.__version__, "lightning": lightning.__version__}
        record = {**vars(args), "out": None, "device": "cuda" if torch.cuda.is_available() else "cpu"}
        args.out.write_text(json.dumps({**record, **machine, **versions, "change": summary, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
