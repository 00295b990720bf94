"""``docs/memory.md`` from its text and the results: ``python -m benchmarks.memory.page``."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import page as gpu
from benchmarks.memory import show

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "memory.md"
Found = dict[str, Any]


def load(name: str) -> Found:
    """A result by its file's name."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def remat(found: Found) -> str:
    """A line for each chain and arm."""
    rows = [
        [
            row["model"],
            row["arm"],
            show.middle(row["ratio"], 2),
            show.mib(row["beyond_bytes"]),
            show.mib(row["plain_beyond_bytes"]),
            str(row.get("plan_forward_calls", "-")),
        ]
        for row in found["rows"]
    ]
    headings = ["chain", "arm", "time over plain", "MiB of a step", "plain's", "forward calls of the plan"]
    return show.table(headings, rows)


def sizes(found: Found) -> str:
    """Ratios by model and bits."""
    kinds = list(dict.fromkeys((row["model"], row["dropout"]) for row in found["rows"]))
    of = {(row["model"], row["dropout"], row["bits"]): row for row in found["rows"]}
    rows = [
        [model, f"{dropout:g}", f"{of[model, dropout, 8]['exact_bytes'] / 2**20:.1f}"]
        + [f"{of[model, dropout, bits]['ratio']:.2f}" for bits in (8, 4, 2)]
        for model, dropout in kinds
    ]
    return show.table(["model", "dropout", "exact, MiB", "8 bits", "4 bits", "2 bits"], rows)


def left(found: Found) -> str:
    """What is held at 4 bits with dropout, by category."""
    chosen = [row for row in found["rows"] if row["bits"] == 4 and row["dropout"]]
    categories = list(dict.fromkeys(category for row in chosen for category in row["left"]))
    rows = [[row["model"], *(f"{row['left'].get(c, 0) / 1024:,.0f}" for c in categories)] for row in chosen]
    return show.table(["model", *categories], rows)


def times(found: Found) -> str:
    """Step times by dropout and arm."""
    rows = [
        [
            f"{row['dropout']:g}",
            f"{row['arm']} bits" if row["arm"].isdigit() else row["arm"],
            f"{row['ratio']:.2f} ({row['quartiles'][0]:.2f} - {row['quartiles'][1]:.2f})",
            str(row["pairs"]),
        ]
        for row in found["results"]
    ]
    return show.table(["dropout", "arm", "time over exact", "pairs"], rows)


def training(found: Found) -> str:
    """Final losses by arm."""
    rows = []
    for arm, line in found["summary"].items():
        runs = [run for run in found["runs"] if run["arm"] == arm]
        bits = [run["bits"] for run in runs if "bits" in run]
        ratio = [run["ratio"] for run in runs if "ratio" in run]
        rows.append(
            [
                arm if not arm.isdigit() else f"{arm} bits",
                f"{line['val_loss']:.4f}",
                f"{line['change']:+.2%} ({line['least']:+.2%} to {line['greatest']:+.2%})",
                f"{sum(bits) / len(bits):.2f}" if bits else "-",
                f"{sum(ratio) / len(ratio):.1f}" if ratio else "1",
                str(len(runs)),
            ]
        )
    headings = ["arm", "validation loss", "relative to exact (seeds)", "bits an element", "bytes saved, times", "seeds"]
    return show.table(headings, rows)


def page() -> str:
    """The whole text."""
    loss = load("training_loss_act")
    fill: dict[str, Callable[[], str]] = {
        "remat": lambda: remat(load("remat_cpu")),
        "bytes": lambda: sizes(load("act_bytes")),
        "left": lambda: left(load("act_bytes")),
        "time": lambda: times(load("act_step_time")),
        "training": lambda: training(loss),
        "steps": lambda: str(loss["steps"]),
        "kernels": lambda: show.of_kernels(load("memory_kernels_cpu")["kernels"]),
    }
    text = Path(__file__).with_name("page.md").read_text()
    for name, value in fill.items():
        text = text.replace("{{" + name + "}}", value())
    return gpu.filled(text, gpu.committed())


def main() -> None:
    PAGE.write_text(page())
    show.draw(load("remat_cpu")["rows"], PAGE.with_suffix(".png"))


if __name__ == "__main__":
    main()
