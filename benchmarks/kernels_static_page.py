"""Tables of what `benchmarks/kernels_static.py` finds, and its part of the README."""

from pathlib import Path
from typing import Any

from benchmarks.gpu.page import table

README = Path(__file__).parent / "README.md"
Row = dict[str, Any]


def launch_table(rows: list[Row]) -> str:
    """The rows as a markdown table."""
    heads = "launch|loads|stores|registers|spilled|shared|barriers|warps held|bytes|instructions|H100 µs|of a copy|H200|limit"
    cells = []
    for r in rows:
        loads, stores = (" ".join(f"{n:g}x{bits}" for bits, n in r[kind].items()) for kind in ("loads", "stores"))
        plain = (r["registers"], r["spilled"], r["shared"], r["barriers"], r["resident"], r["bytes_per_element"])
        of = r["of_copy"]
        front = [named(r, rows), loads, stores, *(f"{v:.3g}" for v in plain), f"{r['instructions_per_element']:.1f}"]
        cells.append([*front, f"{r['microseconds']['H100']:.0f}", f"{of['H100']:.2f}", f"{of['H200']:.2f}", r["limit"]])
    return table(heads.split("|"), cells)


def named(row: Row, rows: list[Row]) -> str:
    """The name of a row, with its kernel if the program launches several."""
    alone = sum(other["row"] == row["row"] for other in rows) == 1
    return row["row"] if alone else f"{row['row']} ({row['kernel'].split('.')[1]})"


def told_pages(result: Row) -> str:
    """The part of the README: the model's errors, and each kernel before and after."""
    calibration = result["calibration"]
    version = calibration["triton"]
    cells = []
    for row in calibration["rows"]:
        name = f"{row['kernel']}" + ("" if row["aligned"] else ", sizes' divisors unknown")
        times = [row[key] * 1e6 for key in ("seconds", "predicted", "predicted_without_its_module")]
        cells.append([name, *(f"{t:.0f}" for t in times), f"{times[1] / times[0]:.2f}"])
    predictions = table(("kernel", "measured µs", "predicted", "fitted without its module", "ratio"), cells)
    before = {named(r, result["before"][version]): r for r in result["before"][version]}
    cells = []
    for r in (rows := result["after"][version]):
        old = before.get(named(r, rows))
        both = [
            ["-"] * 5
            if x is None
            else [
                f"{x['instructions_per_element']:.1f}",
                f"{x['registers']}",
                f"{min(map(int, x['loads']))}",
                f"{x['of_copy']['H100']:.2f}",
                x["limit"],
            ]
            for x in (old, r)
        ]
        pairs = [a if a == b else f"{a} → {b}" for a, b in zip(*both, strict=True)]
        cells.append([named(r, rows), *pairs, f"{r['of_copy']['H200']:.2f}"])
    heads = ("kernel", "instructions per element", "registers", "narrowest load", "of a copy, H100", "limit", "H200")
    errors = [calibration[key] for key in ("predicted", "predicted_without_its_module")]
    return "\n\n".join(
        (
            f"The model predicts {len(calibration['rows'])} times of an H100 with a median error of"
            f" {errors[0]['median_error']:.0%} (at most {errors[0]['largest_error']:.0%}). If the fit leaves out the kernel's"
            f" own module, the median error is {errors[1]['median_error']:.0%} (at most {errors[1]['largest_error']:.0%})."
            f" Triton {version} compiled the kernels, as on the H100.",
            predictions,
            "The next table compares the kernels before and after their redesign. Its fractions of a copy's bandwidth are"
            " predictions. They are not measurements.",
            table(heads, cells),
        )
    )


def write_page(result: Row) -> None:
    """Write the part of the README between its marks."""
    text = README.read_text()
    start, end = "<!-- kernels static -->\n", "<!-- end of kernels static -->"
    before, rest = text.split(start)
    README.write_text(before + start + told_pages(result) + "\n" + end + rest.split(end)[1])
