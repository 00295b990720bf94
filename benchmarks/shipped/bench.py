"""Bench a recipe's variants on the task of ``benchmarks/cnn``, at prices that are the same on a busy machine.

    python -m benchmarks.shipped.bench [--budget 30rs] [--seeds 21,22,23] [--jobs 1]

The results go to ``benchmarks/results/shipped_cnn.json``; interrupted, it goes on where it was. The other recipes choose what
committed benches have measured already (``benchmarks/shipped/page.py`` names them).
"""

import argparse
import shutil
from pathlib import Path

from lightning_eff.bench.command import main as bench

ROOT = Path(__file__).resolve().parent.parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="30rs")
    parser.add_argument("--seeds", default="21,22,23")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    asked = parser.parse_args()
    base = "benchmarks/cnn/baseline.yaml,benchmarks/shipped/short.yaml"
    out = ROOT / "benchmarks" / "out" / f"shipped_cnn_{asked.budget}"
    arguments = [f"--baseline=baseline={base}"]
    arguments += [f"--recipe=cnn:{one}={base},benchmarks/shipped/arms/cnn_{one}.yaml" for one in ("safe", "fast")]
    arguments += ["--target=val_loss", f"--budget={asked.budget}", f"--seeds={asked.seeds}", f"--jobs={asked.jobs}"]
    arguments += ["--controls=none", "--threads=1", f"--rounds={asked.rounds}", "--evaluations=4", "--quiet"]
    arguments += ["--reference=benchmarks/results/prices.json", f"--out={out}"]
    bench(arguments)
    shutil.copyfile(out / "results.json", ROOT / "benchmarks" / "results" / "shipped_cnn.json")


if __name__ == "__main__":
    main()
