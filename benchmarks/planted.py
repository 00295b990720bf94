"""Does the bench tell the truth? Two copies of one recipe, a planted slow-down of a fifth and a planted speed-up of a tenth.

    python benchmarks/planted.py [--repetitions 20] [--budget 2s] [--out benchmarks/results/planted.json]

The baseline is a small GPT that sleeps for a tenth of its own step's time before each batch; the copy does the same, the
fast arm sleeps not at all (1.1 times as fast) and the slow one so long that it takes 1.2 times the baseline's time. Each
repetition is a whole bench of its own. Counted are the intervals that cover 1.0, and the verdicts.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from lightning import Callback, Trainer  # noqa: E402

from examples.gpt.data import StdlibText  # noqa: E402
from examples.gpt.module import GPT  # noqa: E402
from lightning_eff import Benchmark  # noqa: E402
from lightning_eff.bench.machine import fingerprint  # noqa: E402


class Delay(Callback):
    """Takes so many seconds more for each batch."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, *args: object) -> None:
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:  # a sleep would give the core away, and the next step would find cold caches
            pass


def build(delay: float) -> Any:
    """A function as the bench takes it."""

    def arm() -> tuple[Trainer, GPT, StdlibText]:
        callbacks = [Delay(delay)] if delay else []
        trainer = Trainer(accelerator="cpu", devices=1, max_steps=1, callbacks=callbacks)
        model = GPT(dim=32, num_layers=4, num_heads=2, block_size=64, warmup_steps=5, num_samples=0)
        return trainer, model, StdlibText(block_size=64, batch_size=16, max_bytes=1_000_000, num_eval_windows=32)

    return arm


def step_seconds() -> float:
    """Of the plain arm: the median of 60 steps."""

    class Clock(Callback):
        times: list[float] = []  # noqa: RUF012

        def on_train_batch_end(self, *args: object) -> None:
            self.times.append(time.perf_counter())

    trainer, model, data = build(0.0)()
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=60,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        limit_val_batches=0,
    )
    trainer.fit(model, data)
    return statistics.median(b - a for a, b in zip(clock.times, clock.times[1:], strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--budget", default="2s")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "planted.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain = step_seconds()
    delay = plain / 10
    recipes = {"copy": build(delay), "fast": build(0.0), "slow": build(delay + 0.2 * (plain + delay))}
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in recipes}
    for repetition in range(1, options.repetitions + 1):
        with tempfile.TemporaryDirectory() as folder:
            results = Benchmark(
                build(delay),
                recipes,
                target="val_loss",
                budget=options.budget,
                seeds=2,
                evaluations=2,
                out=folder,
                threads=1,
            ).run(progress=False, report=False)
        for name in recipes:
            found = results["summary"][name]
            told[name].append({"speedup": found["speedup"], "verdict": found["verdict"]})
        print(f"{repetition}/{options.repetitions}", {name: told[name][-1]["verdict"] for name in told}, flush=True)
    covered = sum(one["speedup"]["low"] <= 1 <= one["speedup"]["high"] for one in told["copy"])
    counts = {
        name: {word: sum(o["verdict"] == word for o in ones) for word in ("faster", "slower", "no difference shown")}
        for name, ones in told.items()
    }
    record = {
        "machine": fingerprint(1),
        "budget": options.budget,
        "repetitions": options.repetitions,
        "step_seconds": plain,
        "copies_covering_1": covered,
        "verdicts": counts,
        "speedups": {name: [one["speedup"] for one in ones] for name, ones in told.items()},
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"copies: the interval covers 1.0 in {covered} of {options.repetitions}; verdicts: {counts}")


if __name__ == "__main__":
    main()
