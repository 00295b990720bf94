"""The picture on the first page: the time to the baseline's own final loss, from the committed results."""

from benchmarks import evidence_page as evidence
from benchmarks import goal
from docs.making.facts import ROOT

FILE = ROOT / "docs" / "time_to_loss.svg"
#: The recipe of each task in the picture.
SHOWN = {
    "gpt": "muon_grown_ngrams",
    "bert8k": "muon_fused_mask_rate",
    "rings": "soap_patches",
    "vit": "soap",
    "bert": "muon_grown_length_mask_rate",
    "gpt256": "muon_grown_length_schedule",
}
#: A line below the recipe of a task, on what the bars do not show.
NOTES = {"gpt256": "For a minute of training this model is deep: smaller ones, trained alike, end lower."}


def svg() -> str:
    """Draw two bars per task: the baseline's time, and the recipe's time to the same loss with its 95 % interval."""
    rows, top = [], 34
    for task, recipe in SHOWN.items():
        arms = goal.gathered(goal.read(task, evidence.RESULTS))
        budget = evidence.LEAST.get(task, 60.0)
        found = goal.share(arms[recipe], arms["baseline"], budget)
        if found is None or found.estimate is None or found.low is None or found.high is None:
            raise ValueError(
                f"{recipe} of {task}: its time to the baseline's loss is unknown. Run it at several budgets."
            )
        width, low, high = (400 * x for x in (found.estimate, found.low, found.high))
        told = f"{budget * found.estimate:.0f} s [{budget * found.low:.0f}, {budget * found.high:.0f}]"
        title = evidence.TASKS[task]
        rows += [
            f'<text x="10" y="{top}" font-weight="bold">{title[0].upper()}{title[1:]}</text>',
            f'<rect x="10" y="{top + 8}" width="400" height="16" fill="#9aa0a6"/>',
            f'<text x="418" y="{top + 21}">baseline: {budget:g} s</text>',
            f'<rect x="10" y="{top + 28}" width="{width:.1f}" height="16" fill="#7e57c2"/>',
            f'<path d="M{10 + low:.1f} {top + 36}H{10 + high:.1f}" stroke="#202124" stroke-width="2"/>',
            f'<text x="418" y="{top + 41}">recipe: {told}</text>',
            f'<text x="10" y="{top + 60}" fill="#5f6368">{evidence.GOAL[recipe]}</text>',
        ]
        top += 88
        if task in NOTES:
            rows.append(f'<text x="10" y="{top - 12}" fill="#5f6368">{NOTES[task]}</text>')
            top += 16
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {top - 8}" width="640" height="{top - 8}"'
        ' font-family="system-ui, sans-serif" font-size="13" fill="#202124" role="img">'
    )
    text = "Seconds of one CPU thread to the baseline's own final loss; shorter is better"
    title, note = f"<title>{text}</title>", f'<text x="10" y="14" fill="#5f6368">{text}</text>'
    return "\n".join([head, title, '<rect width="100%" height="100%" fill="white"/>', note, *rows, "</svg>"]) + "\n"
