"""The generated parts of ``docs/recipes``, from the recipes and the committed results.

python -m benchmarks.shipped.page
"""

import json
import statistics
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
#: By recipe, the bench's results and what its task is.
BENCHES = {
    "gpt": ("shipped_gpt", "the byte-level GPT of `benchmarks/gpt`"),
    "masked-lm": ("shipped_bert", "the byte-level ModernBERT of `benchmarks/bert`"),
    "vit": ("shipped_vit", "the ViT on noisy digits of `benchmarks/vit`"),
    "cnn": ("shipped_cnn", "a small ResNet on the rings, `benchmarks/cnn`"),
    "exact": ("shipped_bert8k", "the masked language model with 8,255 pieces of `benchmarks/bert8k`"),
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


def benched(recipe: Recipe) -> tuple[list[str], str]:
    """Rows of the recipe's bench, and what was measured; none if there are no results."""
    part, task = BENCHES[recipe.name]
    file = RESULTS / f"{part}.json"
    if not file.is_file():
        return [], ""
    results = load(file)
    summary, plan, machine = summarize(results), results["plan"], results["machine"]
    rows: list[str] = []
    for arm in plan["arms"]:
        found = summary[arm["name"]]
        final = found["final"]
        loss = "–" if final["mean"] is None else f"{final['mean']:.4f}"
        change = _change(found)
        if arm["kind"] == "baseline":
            rows.append(f"| baseline | – | {loss} | – | – |")
        else:
            rows.append(
                f"| `{arm['name']}` | {arm['description']} | {loss} | {change} | {speed(found)} | {verdict(found)} |"
            )
    rows[0] = f"| baseline | no technique | {summary[plan['arms'][0]['name']]['final']['mean']:.4f} | – | – | – |"
    seconds, seeds = plan["budget"]["seconds"], ", ".join(str(seed) for seed in plan["seeds"])
    told = (
        f"Task: {task}. Each arm trained for {seconds:g} reference seconds on one thread, on seeds {seeds}"
        f" ({machine['cpu']}, torch {machine['torch']})."
    )
    return rows, told


def _change(found: dict[str, Any]) -> str:
    known = found.get("difference")
    return "–" if not known else f"{known['estimate']:+.4f} [{known['low']:+.4f}, {known['high']:+.4f}]"


def bench_table(recipe: Recipe) -> str:
    """The evidence of a recipe that gains time."""
    rows, told = benched(recipe)
    if not rows:
        return "This release has no measurement of this recipe."
    head = [
        "| arm | techniques | final loss | change, 95 % interval | speed-up, 95 % interval | verdict |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([told, "", *head, *rows])


def memory_table(recipe: Recipe) -> str:
    """The evidence of a recipe that saves memory."""
    if not MEMORY.is_file():
        return "This release has no measurement of this recipe."
    found = json.loads(MEMORY.read_text())
    asked, arms = found["settings"], found["memory"]
    plain = sum(arms["plain training"][category] for category in found["categories"])
    lines = [
        f"The table shows the peak memory of a step in MiB, and the processor time of a step relative to plain training (median"
        f" and range of {asked['turns']} turns). The model is GPT-2 with {asked['layers']} blocks of width {asked['dim']} and random weights, in float32"
        f" with AdamW. Batches have {asked['batch_size']} x {asked['length']} tokens (one thread, torch {found['torch']}).",
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
