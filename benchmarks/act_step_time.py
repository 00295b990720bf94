"""What compressed activations add to a training step's time, beside what recomputing every block adds.

    python benchmarks/act_step_time.py [--pairs 21] [--out benchmarks/results/act_step_time.json]

A GPT-2 of 4 blocks of width 256 runs forward and backward on 4 windows of 256 tokens, in this process's CPU seconds on one
thread: an exact pass and another one in turn, A B A B, and their ratio within each turn. The other pass is the engine of
`ActivationCompression` at 8, 4 or 2 bits, or transformers' own checkpointing of every block. With dropout, and without.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from lightning_eff.memory._compression.engine import Engine

SIZES: dict[str, Any] = {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 256, "vocab_size": 512}
BATCH, LENGTH = 4, 256
ARMS = ("8", "4", "2", "checkpoint")
TARGET = 1.35  # the most that 4 bits may cost

Pass = Callable[[int], None]


def make(dropout: float) -> tuple[transformers.GPT2LMHeadModel, dict[str, Tensor]]:
    """The model, with the given dropout everywhere, and a batch."""
    torch.manual_seed(0)
    drop: dict[str, Any] = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = transformers.GPT2Config(**SIZES, **drop, bos_token_id=0, eos_token_id=0, use_cache=False)
    ids = torch.randint(0, SIZES["vocab_size"], (BATCH, LENGTH))
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}


def passes(model: transformers.GPT2LMHeadModel, batch: dict[str, Tensor], arm: str) -> Pass:
    """A forward and a backward pass of that arm, by the number of the turn."""
    engine = Engine(model, bits=int(arm)) if arm.isdigit() else None

    def run(turn: int) -> None:
        model.zero_grad()
        if engine is not None:
            with engine.forward(turn, batch):
                loss = model(**batch).loss
        else:
            loss = model(**batch).loss
        loss.backward()

    def recompute(turn: int) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        run(turn)
        model.gradient_checkpointing_disable()

    return recompute if arm == "checkpoint" else run


def seconds(run: Pass, turn: int) -> float:
    """CPU seconds of this process."""
    began = time.process_time()
    run(turn)
    return time.process_time() - began


def compare(dropout: float, arm: str, pairs: int) -> dict[str, Any]:
    """The ratio of an arm to the exact pass in each turn, after two turns that do not count."""
    model, batch = make(dropout)
    exact, other = passes(model, batch, "exact"), passes(model, batch, arm)
    turns = [(seconds(exact, turn), seconds(other, turn)) for turn in range(pairs + 2)][2:]
    ratios = sorted(b / a for a, b in turns)
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "dropout": dropout,
        "arm": arm,
        "ratio": round(statistics.median(ratios), 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "range": [round(ratios[0], 3), round(ratios[-1], 3)],
        "exact_seconds": round(statistics.median(a for a, _ in turns), 4),
        "pairs": pairs,
    }


def cpu_model() -> str:
    """The processor as the kernel names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--dropouts", type=float, nargs="+", default=[0.1, 0.0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for dropout in args.dropouts:
        for arm in args.arms:
            found.append(compare(dropout, arm, args.pairs))
            print(json.dumps(found[-1]), flush=True)
    machine = {
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": 1,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    within = all(row["ratio"] <= TARGET for row in found if row["arm"] == "4")
    record = {
        "benchmark": "act_step_time",
        "clock": "process_time",
        "model": {**SIZES, "batch": BATCH, "length": LENGTH},
        "machine": machine,
        "target": {"arm": "4", "ratio": TARGET, "met": within},
        "results": found,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
