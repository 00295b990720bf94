"""``optimal`` against ``full``, ``sqrt`` and torch's compiler, each on the memory that another one takes.

    python -m benchmarks.memory.policies --out benchmarks/results/remat_cpu

The budgets are what ``full`` and ``sqrt`` hold of the chain of blocks as it was measured, and half of what storing
all takes. ``optimal`` gets each budget in bytes. The compiler's ``activation_memory_budget`` is a fraction of its own
making, so a grid of fractions is measured first, and the one taken that needs the most of at most the memory that
``optimal`` needs in a step. Times are ratios to plain training in turns, A B A B; memory is what torch's
allocator gave out during a step, what is outside the blocks included. On a CPU the compiler only partitions the graph
(aot_eager): it fuses nothing, and its gain in time is not seen; ``compile 1.0`` is its time without a budget.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.memory import show
from benchmarks.memory.arms import arms, compiled, within
from benchmarks.memory.measure import CUDA, Arm, compare, quiet, run
from benchmarks.memory.models import Task, chains
from lightning_eff.memory._planning.plan import full, keep_all, sqrt

GRID = (0.1, 0.2, 0.3, 0.45, 0.6, 0.8)
FRACTIONS = (0.5,)


def parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.memory.policies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--chains", nargs="+", choices=["equal", "widening", "mixed"], default=["equal", "widening"])
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--precision", default="bf16-mixed" if CUDA else "32-true")
    parser.add_argument("--no-compile", action="store_true", help="leave torch's compiler out")
    parser.add_argument("--out", type=Path, help="of the files, without the ending: .json and .txt are written")
    return parser.parse_args(given)


def contest(task: Task, args: argparse.Namespace, tell: Any) -> list[dict[str, Any]]:
    """The rows of one chain: each with the ``budget`` that it belongs to."""
    model, policies = task.build(), arms()

    def once(arm: Arm) -> Any:
        turn = run(task, model, arm, args.batch_size, 1, args.precision)
        tell(f"{task.name}, {arm.name}: {turn.error or f'{turn.beyond_bytes / 2**20:.1f} MiB'}")
        return turn

    probe = once(within(0.9))
    if probe.error:
        return [{"model": task.name, "arm": "optimal 0.9", "batch_size": args.batch_size, "error": probe.error}]
    stages = probe.told["stages"]
    everything = keep_all(stages).peak_bytes
    budgets = {"full": full(stages).peak_bytes, "sqrt": sqrt(stages).peak_bytes}
    budgets |= {f"{fraction}": int(fraction * everything) for fraction in FRACTIONS}
    grid = () if args.no_compile else [(fraction, once(compiled(fraction))) for fraction in GRID]
    chosen: list[tuple[str, Arm]] = []
    for name, nbytes in budgets.items():
        if name in policies:
            chosen.append((name, policies[name]))
        ours = within(nbytes, name=f"optimal, as {name}")
        chosen.append((name, ours))
        most = once(ours).beyond_bytes
        fits = [(t.beyond_bytes, fraction) for fraction, t in grid if not t.error and t.beyond_bytes <= most]
        if fits:
            chosen.append((name, compiled(max(fits)[1], name=f"compile {max(fits)[1]}, as {name}")))
    if not args.no_compile:
        chosen.append(("1.0", compiled(1.0)))
    rows = compare(task, [arm for _, arm in chosen], args.batch_size, args.rounds, args.steps, args.precision, tell)
    for row, (name, _) in zip(rows, chosen, strict=True):
        row |= {"budget": name, "budget_bytes": budgets.get(name, everything), "storing_all_bytes": everything}
    return rows


def view(rows: list[dict[str, Any]]) -> str:
    """A line for each row; the plan's figures are what was predicted of the blocks."""
    headings = [
        "chain",
        "arm",
        "time over plain",
        "by quartiles",
        "MiB of a step",
        "plain's",
        "forward calls",
        "plan's MiB",
        "budget",
    ]
    cells = []
    for row in rows:
        if "error" in row:
            cells.append([row["model"], row["arm"], row["error"][:60], *"------"])
            continue
        cells.append(
            [
                row["model"],
                row["arm"],
                show.middle(row.get("ratio")),
                f"{row['quartile_ratio']:.3f}" if "quartile_ratio" in row else "-",
                show.mib(row["beyond_bytes"]),
                show.mib(row["plain_beyond_bytes"]),
                str(row.get("plan_forward_calls", "-")),
                show.mib(row.get("plan_peak_bytes")),
                show.mib(row["budget_bytes"]),
            ]
        )
    return show.table(headings, cells)


@quiet()
def main(given: list[str] | None = None) -> dict[str, Any]:
    """Run what the command line says; the result, as it is written."""
    args = parse(given)
    began = time.perf_counter()

    def tell(text: str) -> None:
        print(f"{time.perf_counter() - began:7.0f} s  {text}", flush=True)

    settings = {key: value for key, value in vars(args).items() if key != "out"}
    found: dict[str, Any] = {"benchmark": "remat", "settings": settings, **show.fingerprint(), "rows": []}
    for name, task in chains(tiny=args.tiny, length=args.length, width=args.width).items():
        if name not in args.chains:
            continue
        found["rows"] += contest(task, args, tell)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
            args.out.with_suffix(".txt").write_text(view(found["rows"]) + "\n")
    print("\n" + view(found["rows"]))
    return found


if __name__ == "__main__":
    main()
