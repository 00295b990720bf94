"""Bench the variants of shipped recipes on a reference task, at prices that are the same on a busy machine.

    python -m benchmarks.shipped.bench [gpt masked-lm vit exact cnn] [--budget 30rs] [--seeds 31,32,33] [--jobs 1]

Each recipe is benched as ``lightning-eff fit --recipe`` resolves it. Its results go to ``benchmarks/results/shipped_*.json``.
Interrupted, a bench goes on where it was. A step costs what the same techniques cost in committed benches, which were made on
quiet cores, so that this bench may run on a busy machine. ``exact:safe`` has no such cost, and is not benched. No search used
these seeds: searches and tuning used 0, and earlier benches 1 to 5.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from lightning_eff.bench.command import main as bench

ROOT = Path(__file__).resolve().parent.parent.parent
#: The configs of each recipe's baseline.
BASELINES = {
    "gpt": "benchmarks/gpt/baseline.yaml",
    "masked-lm": "benchmarks/bert/baseline.yaml",
    "vit": "benchmarks/vit/baseline.yaml",
    "exact": "benchmarks/bert8k/baseline.yaml",
    "cnn": "benchmarks/cnn/baseline.yaml,benchmarks/shipped/short.yaml",
}
#: Committed benches of the same techniques on the same baseline, by variant: the results' name and the arm in them.
COSTS = {
    "gpt": {
        "baseline": ("compute_gpt", "baseline"),
        "safe": ("weights_gpt", "muon"),
        "fast": ("compute_gpt", "muon_grown"),
    },
    "masked-lm": {
        "baseline": ("weights_bert", "baseline"),
        "safe": ("weights_bert", "muon"),
        "fast": ("goal_bert_30", "muon_grown_length_mask_rate"),
    },
    "vit": {
        "baseline": ("weights_vit", "baseline"),
        "safe": ("weights_vit", "soap"),
        "fast": ("goal_vit_24", "soap_patches"),
    },
    "exact": {"baseline": ("compute_bert8k", "baseline"), "fast": ("compute_bert8k", "fused_head")},
}


def costs(recipe: str) -> dict[str, Any]:
    """The results of a bench whose step costs are those of committed ones."""
    found: dict[str, Any] = {}
    for variant, (name, arm) in COSTS[recipe].items():
        results = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        if not found:
            found = {**results, "runs": [], "calibration": {}, "plan": {**results["plan"], "arms": []}}
        label = variant if variant == "baseline" else f"{recipe}:{variant}"
        found["calibration"][label] = results["calibration"][arm]
        own = next(one for one in results["plan"]["arms"] if one["name"] == arm)
        found["plan"]["arms"].append({**own, "name": label})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", choices=[[], *BASELINES], metavar="RECIPE", help="all by default")
    parser.add_argument("--budget", default="30rs")
    parser.add_argument("--seeds", default="", help="31,32,33 by default, and 21,22,23 for cnn")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    asked = parser.parse_args()
    for recipe in asked.recipes or BASELINES:
        base, name = BASELINES[recipe], f"shipped_{recipe.replace('-', '_')}"
        seeds = asked.seeds or ("21,22,23" if recipe == "cnn" else "31,32,33")
        out = ROOT / "benchmarks" / "out" / f"{name}_{asked.budget}"
        reference = ROOT / "benchmarks" / "results" / "prices.json"
        if recipe in COSTS:
            reference = ROOT / "benchmarks" / "out" / f"{name}_costs.json"
            reference.parent.mkdir(exist_ok=True)
            reference.write_text(json.dumps(costs(recipe)))
        arguments = [f"--baseline=baseline={base}"]
        arguments += [
            f"--recipe={recipe}:{one}={base},benchmarks/shipped/arms/{recipe.replace('-', '_')}_{one}.yaml"
            for one in ("safe", "fast")
            if one in COSTS.get(recipe, ("safe", "fast"))
        ]
        arguments += ["--target=val_loss", f"--budget={asked.budget}", f"--seeds={seeds}", f"--jobs={asked.jobs}"]
        arguments += ["--controls=none", "--threads=1", f"--rounds={asked.rounds}", "--evaluations=4", "--quiet"]
        arguments += [f"--reference={reference.relative_to(ROOT)}", f"--out={out}"]
        bench(arguments)
        shutil.copyfile(out / "results.json", ROOT / "benchmarks" / "results" / f"{name}.json")


if __name__ == "__main__":
    main()
