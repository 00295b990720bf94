"""The GPT example trained exactly and with what is not exact: final validation loss, bytes held, time.

    python benchmarks/training_loss.py --seeds 0 1 2 --out benchmarks/results/training_loss_act.json
    python benchmarks/training_loss.py --arms bf16 fp8 fp8-rowwise fp8-blockwise s2fp8 wang int8 \
        --out benchmarks/results/training_loss_precision.json

Each arm of a seed starts from the same weights and sees the same batches. It prints one line for each run, and in the
end each arm's mean validation loss relative to that of the first arm with the same seeds. ``--out`` is written after each
run, and a run that it holds already is not made again. Model, data and steps are by default those of
examples/gpt/baseline.yaml.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
import yaml

from examples.gpt.data import StdlibText
from examples.gpt.module import GPT
from lightning_eff import (
    ActivationCompression,
    FP8Precision,
    INT8Precision,
    S2FP8Precision,
    StochasticRoundingBF16,
    Wang2018FP8Precision,
)

Settings = dict[str, Any]
BASELINE = Path(__file__).parent.parent / "examples/gpt/baseline.yaml"
ARMS: dict[str, Callable[[], Settings]] = {
    "exact": dict,
    "8": lambda: {"callbacks": [ActivationCompression(bits=8)]},
    "4": lambda: {"callbacks": [ActivationCompression(bits=4)]},
    "2": lambda: {"callbacks": [ActivationCompression(bits=2)]},
    "auto 3": lambda: {"callbacks": [ActivationCompression(bits="auto", budget=3.0)]},
    "mesa": lambda: {"callbacks": [ActivationCompression(bits=8, method="mesa")]},
    "bf16": lambda: {"precision": "bf16-mixed"},
    "fp8": lambda: {"plugins": [FP8Precision(backend="emulated")]},
    "fp8-delayed": lambda: {"plugins": [FP8Precision(amax="delayed", backend="emulated")]},
    "fp8-rowwise": lambda: {"plugins": [FP8Precision(scaling="rowwise", backend="emulated")]},
    "fp8-blockwise": lambda: {"plugins": [FP8Precision(scaling="blockwise", backend="emulated")]},
    "s2fp8": lambda: {"plugins": [S2FP8Precision()]},
    "wang": lambda: {"plugins": [Wang2018FP8Precision(accumulate="float32")]},
    "wang-exact": lambda: {"plugins": [Wang2018FP8Precision()]},  # a hundred times as long as bf16
    "int8": lambda: {"plugins": [INT8Precision()]},
    "stochastic-rounding": lambda: {"plugins": [StochasticRoundingBF16()]},
}


def train(arm: str, seed: int, steps: int, data: Settings, model: Settings, clip: float) -> dict[str, Any]:
    """One run, from the seed's weights to the validation loss at the end."""
    pl.seed_everything(seed, verbose=False)
    settings = ARMS[arm]()
    plain = {"accelerator": "auto", "devices": 1, "logger": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        **plain,
        max_steps=steps,
        gradient_clip_val=clip,
        enable_checkpointing=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        **settings,
    )
    module, text = GPT(**model), StdlibText(**data)
    began, cpu = time.perf_counter(), time.process_time()
    trainer.fit(module, datamodule=text)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    metrics = pl.Trainer(**plain).validate(module, datamodule=text, verbose=False)[0]
    run = {"arm": arm, "seed": seed, "val_loss": float(metrics["val_loss"])}
    for callback in settings.get("callbacks", []):
        report = callback.report()
        run |= {name: float(report[name]) for name in ("saved_bytes", "exact_bytes", "ratio", "bits", "unfit")}
    return {**run, "seconds": seconds, "cpu_seconds": cpu_seconds}


def summarize(runs: list[dict[str, Any]], arms: list[str]) -> dict[str, dict[str, float]]:
    """Mean loss of each arm, and relative to the first arm's: its mean, its least and its greatest over the seeds."""
    of = {(r["arm"], r["seed"]): r["val_loss"] for r in runs}
    found: dict[str, dict[str, float]] = {}
    for arm in arms:
        seeds = [seed for a, seed in of if a == arm and (arms[0], seed) in of]
        if seeds:
            change = [of[arm, seed] / of[arms[0], seed] - 1 for seed in seeds]
            found[arm] = {
                "val_loss": statistics.mean(of[arm, seed] for seed in seeds),
                "change": statistics.mean(change),
                "least": min(change),
                "greatest": max(change),
            }
    return found


def main() -> None:
    baseline = yaml.safe_load(BASELINE.read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=baseline["trainer"]["max_steps"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=["exact", "4", "auto 3"], choices=list(ARMS))
    parser.add_argument("--data", type=json.loads, default={}, help="further arguments of the example's data, as JSON")
    parser.add_argument("--model", type=json.loads, default={}, help="further arguments of its module, as JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data, model = ({**baseline[key]["init_args"], **getattr(args, key)} for key in ("data", "model"))
    record = {"steps": args.steps, "data": data, "model": model, "device": "cpu", "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        record["device"] = torch.cuda.get_device_name()
    record |= {"torch": torch.__version__, "lightning": lightning.__version__}
    runs: list[dict[str, Any]] = []
    if args.out is not None and args.out.is_file():
        runs = json.loads(args.out.read_text())["runs"]
    for seed in args.seeds:
        for arm in args.arms:
            if any((r["arm"], r["seed"]) == (arm, seed) for r in runs):
                continue
            runs.append(train(arm, seed, args.steps, data, model, baseline["trainer"]["gradient_clip_val"]))
            print(json.dumps(runs[-1]), flush=True)
            if args.out is not None:
                summary = summarize(runs, args.arms)
                args.out.write_text(json.dumps({**record, "summary": summary, "runs": runs}, indent=1) + "\n")
    for arm, line in summarize(runs, args.arms).items():
        print(
            f"{arm:>19}: {line['val_loss']:.4f}, {line['change']:+.2%} ({line['least']:+.2%} to {line['greatest']:+.2%})"
        )


if __name__ == "__main__":
    main()
