"""The generated parts of ``docs/recipes``, from the recipes and the committed results.

python -m benchmarks.shipped.page
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.evidence_tasks import speed, verdict
from lightning_eff.bench.reports.statistics import summarize
from lightning_eff.bench.results import load
from lightning_eff.recipes.parts import Pick, Recipe
from lightning_eff.recipes.printing import call
from lightning_eff.recipes.shipped import RECIPES

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS, RESULTS = ROOT / "docs" / "recipes", ROOT / "benchmarks" / "results"
MEMORY = RESULTS / "shipped_memory.json"


@dataclass(frozen=True)
class Bench:
    """A bench of what a recipe chooses on a reference task.

    Attributes:
        variant: of the recipe.
        results: the name of the committed results.
        arm: in them.
        task: the folder of the task under ``benchmarks``.
        config: the arm's config there, whose callbacks are those of the recipe.
        given: settings that only the config gives, and what the recipe does instead.
        optional: the row is left out while there are no results.
    """

    variant: str
    results: str
    arm: str
    task: str
    config: str = ""
    given: str = ""
    optional: bool = False


#: By recipe; a test compares each config with what the recipe chooses on the task.
BENCHES: dict[str, tuple[Bench, ...]] = {
    "gpt": (
        Bench("safe", "weights_gpt", "muon", "gpt", "recipes/muon"),
        Bench("fast", "compute_gpt", "muon_grown", "gpt", "stacks/muon_grown"),
        Bench("safe", "shipped_gpt", "gpt:safe", "gpt"),
        Bench("fast", "shipped_gpt", "gpt:fast", "gpt"),
    ),
    "masked-lm": (
        Bench("safe", "weights_bert", "muon", "bert", "recipes/muon"),
        Bench(
            "fast",
            "goal_bert_30",
            "muon_grown_length_mask_rate",
            "bert",
            "stacks/muon_grown_length_mask_rate",
            "The measured run was given the mask token and the vocabulary, which the recipe leaves to the first batch.",
        ),
        Bench("safe", "shipped_masked_lm", "masked-lm:safe", "bert", optional=True),
        Bench("fast", "shipped_masked_lm", "masked-lm:fast", "bert", optional=True),
    ),
    "vit": (
        Bench("safe", "weights_vit", "soap", "vit", "recipes/soap"),
        Bench("fast", "goal_vit_24", "soap_patches", "vit", "stacks/soap_patches"),
        Bench("safe", "shipped_vit", "vit:safe", "vit", optional=True),
        Bench("fast", "shipped_vit", "vit:fast", "vit", optional=True),
    ),
    "cnn": (
        Bench("safe", "shipped_cnn", "cnn:safe", "cnn"),
        Bench(
            "fast",
            "shipped_cnn",
            "cnn:fast",
            "cnn",
            given="The runs are very short, and the baseline's learning rate is not tuned: `python -m benchmarks.shipped.bench"
            " --budget 60rs` repeats them with a larger budget. Measure `cnn` on your own task before you adopt it.",
        ),
    ),
    "exact": (
        Bench(
            "fast",
            "compute_bert8k",
            "fused_head",
            "bert8k",
            "recipes/fused_head",
            "The measured run did not have `LoaderTuning`, which leaves its weights equal bit for bit. `exact:safe` is"
            " `LoaderTuning` alone. Its data are in memory, so it has nothing to gain here and was not benched.",
        ),
        Bench("fast", "shipped_exact", "exact:fast", "bert8k", optional=True),
    ),
}
TASKS = {
    "gpt": "a byte-level GPT (4 blocks, width 48) on source text",
    "bert": "a byte-level ModernBERT (4 blocks, width 64) on masked source text",
    "vit": "a ViT (4 blocks, width 48) on noisy digits",
    "cnn": "a small ResNet on drawn rings, whose answer only full images show",
    "bert8k": "ModernBERT (2 blocks, width 64) on masked source text in 8,255 pieces",
}


def page_of(recipe: Recipe) -> Path:
    return DOCS / f"{recipe.name.replace('-', '_')}.md"


def chosen(recipe: Recipe) -> str:
    """What the recipe takes on its example."""
    lines = [f"{recipe.about} Version {recipe.version}.", ""]
    lines += [f"The table shows the choice for {recipe.example.module}: {recipe.example.told()}.", ""]
    lines += ["| variant | technique | why |", "|---|---|---|"]
    for variant in recipe.variants:
        for choice in recipe.choose(recipe.example, variant):
            if isinstance(choice, Pick):
                lines.append(f"| {variant} | `{call(choice)}` | {choice.why} |")
            else:
                lines.append(f"| {variant} | without `{choice.technique}` | {choice.why} |")
    return "\n".join(lines)


def bench_table(recipe: Recipe) -> str:
    """The evidence of a recipe that gains time."""
    rows: list[str] = []
    notes: list[str] = []
    tasks: dict[str, None] = {}
    for one in BENCHES[recipe.name]:
        file = RESULTS / f"{one.results}.json"
        if not file.is_file() and one.optional:
            continue
        if not file.is_file():
            rows.append(f"| `{recipe.name}:{one.variant}` | not measured in this release | – | – | – | – |")
            continue
        tasks[one.task] = None
        results = load(file)
        plan, summary = results["plan"], summarize(results)
        found, baseline = summary[one.arm], summary[plan["arms"][0]["name"]]
        seeds = [int(seed) for seed in found["final"]["values"]]
        shared = [baseline["final"]["values"][str(seed)] for seed in seeds]
        losses = f"{statistics.fmean(shared):.3f} | {found['final']['mean']:.3f}"
        told = f"{plan['budget']['seconds']:g} s, {len(seeds)} seeds ({min(seeds)} to {max(seeds)})"
        rows.append(f"| `{recipe.name}:{one.variant}` | {told} | {losses} | {speed(found)} | {verdict(found)} |")
        notes += [one.given] if one.given else []
    lines = [f"Task: {'; '.join(TASKS[task] for task in tasks)}.", ""] if tasks else []
    lines += [
        "| | budget | baseline's loss | recipe's loss | speed-up, 95 % interval | verdict |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *rows, *(["", *notes] if notes else [])])


def memory_table(recipe: Recipe) -> str:
    """The evidence of a recipe that saves memory."""
    if not MEMORY.is_file():
        return "This release has no measurement of this recipe."
    found = json.loads(MEMORY.read_text())
    asked, arms = found["settings"], found["memory"]
    plain = sum(arms["plain training"][category] for category in found["categories"])
    lines = [
        f"The table shows the peak memory of a step in MiB, and the processor time of a step relative to plain training (median"
        f" and range of {asked['turns']} turns). The model is GPT-2 with {asked['layers']} blocks of width {asked['dim']} and a"
        f" vocabulary of {asked['vocabulary']:,}, with random weights, in float32 with AdamW. Batches have"
        f" {asked['batch_size']} x {asked['length']} tokens (one thread, torch {found['torch']}).",
        "",
        "| | weights | gradients | optimizer | activations | total, relative | step time, relative |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, arm in arms.items():
        if name != "plain training" and not name.startswith(f"{recipe.name}:"):
            continue
        cells = " | ".join(f"{arm[category] / 2**20:,.1f}" for category in found["categories"])
        share = sum(arm[category] for category in found["categories"]) / plain
        ratios = arm["ratios"]
        times = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        label = name if name == "plain training" else f"`{name}`"
        lines.append(f"| {label} | {cells} | {share:.2f} | {'1' if name == 'plain training' else times} |")
    return "\n".join(lines + (_losses(found) if recipe.name == "finetune" else []))


def _losses(found: dict[str, Any]) -> list[str]:
    loss, asked = found["loss"], found["settings"]
    lines = [
        "",
        f"The second table shows the test loss after fine-tuning. A byte-level GPT with 4 blocks of width 48 trained for"
        f" {asked['pretraining']} steps on half of the standard library. Its loss on the other half is {loss['untuned']:.3f}"
        f" nats per byte. Each arm then trained for {asked['tuning']} steps there, on seeds"
        f" {', '.join(map(str, found['seeds']))}.",
        "",
        "| | trained parameters | learning rate | test loss, mean | range |",
        "|---|---|---|---|---|",
    ]
    for name, arm in loss["arms"].items():
        ends = arm["test"]
        told = f"{min(ends):.3f} to {max(ends):.3f}"
        lines.append(f"| {name} | {arm['trained']:,} | {arm['rate']:g} | {statistics.fmean(ends):.3f} | {told} |")
    return lines


def evidence(recipe: Recipe) -> str:
    """The measured part of a recipe's page."""
    return bench_table(recipe) if recipe.name in BENCHES else memory_table(recipe)


def overview() -> str:
    """The table of all recipes."""
    lines = ["| recipe | version | for | safe | fast |", "|---|---|---|---|---|"]
    for one in RECIPES.values():
        link = f"[{one.name}]({page_of(one).name})"
        lines.append(f"| {link} | {one.version} | {one.about} | {one.variants['safe']} | {one.variants['fast']} |")
    return "\n".join(lines)


def filled(text: str, mark: str, part: str) -> str:
    """A page's text with this part between its marks."""
    begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    head, found, rest = text.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"expected {begin} and {end} in the page.")
    return f"{head}{begin}\n\n{part}\n\n{end}{rest.partition(end)[2]}"


def pages() -> dict[Path, str]:
    """Every page as it should be."""
    made = {DOCS / "index.md": filled((DOCS / "index.md").read_text(), "recipes", overview())}
    for one in RECIPES.values():
        text = filled(page_of(one).read_text(), "chosen", chosen(one))
        made[page_of(one)] = filled(text, "evidence", evidence(one))
    return made


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
