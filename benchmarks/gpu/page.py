"""What the docs say of GPUs, from the committed results or that there are none: ``python -m benchmarks.gpu.page``.

Figures stand between ``<!-- gpu: NAME -->`` and ``<!-- end of gpu -->``, and nowhere else; ``NAME`` is a section below.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu import files

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "docs" / "verdicts.md", ROOT / "docs" / "memory.md", ROOT / "benchmarks" / "README.md")
MARKED = re.compile(r"<!-- gpu: ([a-z ]+) -->\n.*?<!-- end of gpu -->", re.DOTALL)
NONE = "No GPU was at hand: nothing is known of {what} on one. `make gpu` finds it."
Results = dict[str, files.Result]


def committed(folder: Path = RESULTS) -> Results:
    """The results of units that computed on a GPU, by unit."""
    found = (files.read(file) for file in sorted(folder.glob("gpu_*.json")))
    return {r["unit"]: r for r in found if r is not None and r.get("rows") and not r["environment"].get("tiny")}


def rows(results: Results, prefix: str) -> dict[str, list[dict[str, Any]]]:
    """The rows that were got, of each unit whose name begins so."""
    return {
        name: [row for row in result["rows"] if "error" not in row and "skipped" not in row]
        for name, result in results.items()
        if name.startswith(prefix)
    }


def table(headings: Iterable[str], cells: Iterable[Iterable[str]]) -> str:
    """A markdown table."""
    heads = list(headings)
    lines = [heads, ["---"] * len(heads), *map(list, cells)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine(results: Results, prefix: str) -> str:
    """A line on what the figures were got with, each machine once."""
    seen = {
        f"{e['device']}, driver {e['driver']}, torch {e['torch']}, Triton {e['triton']}"
        for name, result in results.items()
        if name.startswith(prefix)
        for e in [result["environment"]]
    }
    return f"Measured on {'; '.join(sorted(seen))} (`benchmarks/results/gpu_*.json`)."


def middle(values: Any, digits: int = 2) -> str:
    """Median and, in brackets, least and most; a number as it is."""
    if isinstance(values, dict):
        return f"{values['median']:.{digits}f} ({values['min']:.{digits}f} to {values['max']:.{digits}f})"
    return "-" if values is None else f"{values:.{digits}f}"


def ceilings(results: Results) -> str:
    """The best of all sizes in each format, and of copies."""
    best: dict[str, tuple[float, str]] = {}
    for row in rows(results, "ceilings").get("ceilings", []):
        value, unit = (row["tflops"], "TFLOP/s") if "tflops" in row else (row["gigabytes_per_second"], "GB/s")
        key = row.get("format") or row.get("kind") or row["row"]
        best[key] = max(best.get(key, (0.0, "")), (value["median"], f"{value['median']:.4g} {unit}"))
    return table(("what", "at most"), [(key, told) for key, (_, told) in best.items()])


def kernels(results: Results) -> str:
    """Every kernel's rate against that of a copy, or of a product in bfloat16."""
    cells = []
    for row in rows(results, "bandwidth").get("bandwidth", []):
        rate = row["tflops" if "tflops" in row else "gigabytes_per_second"]
        cells.append(
            (
                row["row"],
                f"{rate['median']:.4g} {'TFLOP/s' if 'tflops' in row else 'GB/s'}",
                f"{middle(row['of_copy'])} of a copy"
                if "of_copy" in row
                else f"{middle(row['of_product'])} of bfloat16",
            )
        )
    return table(("kernel", "rate", "share"), cells)


def compiled_alone(row: dict[str, Any]) -> bool:
    """Whether it is a plain run that others of its kind, in processes of their own, are held against."""
    return row["row"] == "bf16" and isinstance(row.get("seconds"), float)


def low_precision(results: Results) -> str:
    """Speed-ups over bfloat16, by arm and case."""
    found = {name.removeprefix("low precision "): some for name, some in rows(results, "low precision").items() if some}
    columns = list(dict.fromkeys(re.sub(r" \d+$", "", name) for name in found))
    cells: dict[str, dict[str, str]] = {}
    alone = {
        re.sub(r" \d+$", "", name): r["seconds"] for name, some in found.items() for r in some if compiled_alone(r)
    }
    for name, some in found.items():
        for row in some:
            base = alone.get(re.sub(r" \d+$", "", name))
            if "speedup" in row:
                told = middle(row["speedup"])
            elif isinstance(ratio := row.get("ratio"), dict):
                told = middle({"median": 1 / ratio["median"], "min": 1 / ratio["max"], "max": 1 / ratio["min"]})
            elif ratio is not None:
                told = f"{1 / ratio:.2f}"
            elif base is not None and isinstance(row.get("seconds"), float):  # each compiled in a process of its own
                told = f"{base / row['seconds']:.2f}"
            else:
                continue
            cells.setdefault(row["row"], {})[re.sub(r" \d+$", "", name)] = told
    told_rows = [(arm, *(of.get(column, "-") for column in columns)) for arm, of in cells.items()]
    return table(("speed-up over bfloat16", *columns), told_rows)


def sparse(results: Results) -> str:
    """Speed-ups over dense products, by arm and case."""
    found = {name.removeprefix("sparse "): some for name, some in rows(results, "sparse").items()}
    arms = dict.fromkeys(row["row"] for some in found.values() for row in some if "speedup" in row)
    of = {
        (name, row["row"]): middle(row["speedup"]) for name, some in found.items() for row in some if "speedup" in row
    }
    return table(
        ("speed-up over dense", *found), [(arm, *(of.get((name, arm), "-") for name in found)) for arm in arms]
    )


def memory(results: Results) -> str:
    """Time and bytes of a step, and largest batches, by arm."""
    largest = {row["row"]: row for some in rows(results, "largest").values() for row in some}
    cells = []
    for some in rows(results, "memory").values():
        for row in some:
            top = largest.get(row["row"], {})
            held = row.get("beyond_bytes")
            cells.append(
                (
                    row["row"],
                    middle(row.get("ratio")),
                    "out of memory" if "out_of_memory" in row else "-" if held is None else f"{held / 2**20:,.0f}",
                    str(top.get("largest_batch", "-")),
                    f"{top['items_per_second']:,.0f}" if "items_per_second" in top else "-",
                )
            )
    return table(("GPT-2 124M", "time over plain", "MiB of a step", "largest batch", "tokens/s with it"), cells)


def training(results: Results) -> str:
    """Where each arm ended."""
    cells = [
        (
            name.removeprefix("training "),
            str(row["steps"]),
            f"{row['seconds']:.0f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['val_loss']:.4f}",
        )
        for name, some in rows(results, "training").items()
        for row in some
    ]
    return table(("GPT-2 124M", "steps", "seconds", "tokens/s", "validation loss"), cells)


def tests(results: Results) -> str:
    """How many tests passed on the device."""
    cells = []
    for name, result in results.items():
        if name.startswith(("tests", "contract")):
            of = result["rows"]
            failed, skipped = sum("error" in row for row in of), sum("skipped" in row for row in of)
            cells.append((name, str(len(of) - failed - skipped), str(failed), str(skipped)))
    return table(("tests on the device", "passed", "failed", "skipped"), cells)


SECTIONS: dict[str, tuple[str, str, Callable[[Results], str]]] = {
    "ceilings": ("ceilings", "what a device gives at most", ceilings),
    "kernels": ("bandwidth", "the kernels' speeds", kernels),
    "low precision": ("low precision", "the plugins' speeds", low_precision),
    "sparse": ("sparse", "the speed of sparse kernels", sparse),
    "memory": ("memory", "the speeds of these techniques", memory),
    "training": ("training", "what training gains", training),
    "tests": ("tests", "how the tests end", tests),
}
"""By name: what the units' names begin with, what is not known without them, and what tells the figures."""


def section(name: str, results: Results) -> str:
    """The text between a section's marks.

    Raises:
        KeyError: there is no such section.
    """
    prefix, what, told = SECTIONS[name]
    if not any(unit.startswith(prefix) for unit in results):
        return NONE.format(what=what)
    return f"{told(results)}\n\n{machine(results, prefix)}"


def filled(text: str, results: Results) -> str:
    """A text with its sections as the results have them."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- gpu: {match[1]} -->\n{section(match[1], results)}\n<!-- end of gpu -->"

    return MARKED.sub(fill, text)


def main() -> None:
    """Write the sections of all pages anew."""
    results = committed()
    for page in PAGES:
        page.write_text(filled(page.read_text(), results))


if __name__ == "__main__":
    main()
