"""The report of a plan: the ten best layouts, the time and memory of the best, why others are slower, the assumptions."""

from collections.abc import Sequence
from dataclasses import fields

from lightning_eff.planner.evaluator import Candidate
from lightning_eff.planner.layouts import Layout
from lightning_eff.planner.search import Plan


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return the lines of a table; the first ``left`` columns are left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, ["-" * w for w in widths], *rows]:
        cells = [
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def report(plan: Plan, config: str | None = None) -> str:
    """Return the report for a terminal of about 120 columns, with the best layout as a config."""
    p, a = plan.profile, plan.accelerator
    unit = p.tokens or 1
    size = f", {p.tokens:,} tokens per sample" if p.tokens else ""
    stack = f"{len(p.blocks)} blocks in {p.stack!r}" if p.stack else "no stack of blocks (data parallelism only)"
    lines = [
        f"Plan for {p.name}: {_count(p.parameters)} parameters, {stack}{size}, {p.precision.name}"
        + (", linear layers in FP8" if p.precision.fp8 else ""),
        f"on {plan.gpus:,} x {a.name} ({a.memory_bytes / 1e9:.0f} GB, {a.node_size} per node),"
        f" {plan.global_batch:,} samples per step, {p.model_flops(1.0) * plan.global_batch / 1e15:,.4g} PFLOP per step;"
        f" {_ceiling(plan)}",
        "",
    ]
    if plan.best:
        lines += [
            "The fastest layouts, simulated:",
            *_best(plan, unit, "tokens/s" if p.tokens else "samples/s"),
            "",
        ]
        lines += _parts(plan.best[0])
        lines += _launches(plan)
        if config is not None:
            lines += ["", "Layout 1 as a config (--out FILE writes it):", "", *config.rstrip().splitlines()]
    else:
        lines += [
            f"No layout fits: the smallest of {plan.enumerated:,} needs {plan.smallest / 1e9:,.4g} GB, but only"
            f" {a.memory_bytes * plan.assumptions.usable_memory / 1e9:,.4g} GB are usable. Use more or larger accelerators,"
            " shorter samples, or a global batch with more divisors."
            if plan.enumerated
            else "No layout is possible, for the reasons below. Change --gpus or --global-batch.",
        ]
    if plan.families:
        rows = [
            (f.setting, f"{f.count:,}", f"{f.fitting:,}", "-" if f.seconds is None else f"{f.seconds:.4g}", f.reason)
            for f in plan.families
        ]
        lines += ["", "Why other layouts are slower (each row simulates its most promising layout):"]
        lines += _reasons(rows)
    beaten = plan.enumerated - plan.out_of_memory - plan.simulated
    lines += [
        "",
        f"Of {plan.enumerated:,} layouts, {plan.out_of_memory:,} run out of memory, {plan.simulated:,} were simulated, and"
        f" {beaten:,} cannot be faster than these. Impossible combinations:",
    ]
    lines += [f"  {count:>8,}  {reason}" for reason, count in plan.refused.items()] or ["  none"]
    lines += ["", "Assumptions (--assume name=value changes one; docs/planner.md explains them):"]
    lines += [f"  {f.name} = {getattr(plan.assumptions, f.name)}" for f in fields(plan.assumptions)]
    lines += [f"  {note}" for note in p.notes]
    lines += [f"  {a.name}: {a.source}"]
    return "\n".join(lines)


def _ceiling(plan: Plan) -> str:
    a, precision = plan.accelerator, plan.profile.precision
    reached = (a.fp8_matmul_flops or 0.0) if precision.fp8 else a.matmul_flops * (0.5 if precision.tf32 else 1.0)
    return f"MFU at most {plan.assumptions.efficiency * reached / a.peak_flops:.0%} of the dense BF16 peak"


def _best(plan: Plan, unit: int, name: str) -> list[str]:
    header = (
        "",
        "dp",
        "tp",
        "pp",
        "sharding",
        "schedule",
        "micro-batch",
        "techniques",
        "GB",
        "s/step",
        name,
        "MFU",
        "bubble",
        "ties",
    )
    rows = []
    for i, c in enumerate(plan.best, 1):
        at = c.layout
        schedule = at.schedule + (f" x{at.stages_per_rank}" if at.stages_per_rank > 1 else "")
        samples = at.dp * at.micro_batch * at.num_microbatches
        rows.append(
            (
                f"{i}",
                f"{at.dp}",
                f"{at.tp}",
                f"{at.pp}",
                sharding(at),
                schedule,
                f"{at.num_microbatches} of {at.micro_batch}",
                techniques(at),
                f"{c.memory.total / 1e9:.3g}",
                f"{c.seconds:.4g}",
                f"{samples * unit / c.seconds:,.0f}",
                f"{c.mfu:.1%}",
                f"{c.bubble:.1%}",
                f"{len(plan.ties[i - 1])}",
            )
        )
    if not any(plan.ties):
        return table(header[:-1], [row[:-1] for row in rows])
    return [
        *table(header, rows),
        "A row shows the layout with the least memory. `ties` counts other layouts with the same time; --json lists them.",
    ]


def sharding(layout: Layout) -> str:
    """Describe how the data ranks hold the parameters."""
    if layout.shard == "none":
        return "none"
    return f"groups of {layout.shards}" if layout.shards else f"all {layout.dp}"


def techniques(layout: Layout) -> str:
    """List the techniques of a layout in a few words."""
    words = [] if layout.remat == "none" else [f"remat {layout.remat}"]
    if layout.remat == "optimal":
        words[-1] += f" {layout.budget:g}"
    words += [f"{layout.bits} bits saved"] if layout.bits < 32 else []
    words += ["optimizer on host"] if layout.offload else []
    words += ["FP8"] if layout.fp8 else []
    return ", ".join(words) or "-"


def _parts(best: Candidate) -> list[str]:
    memory = best.memory
    sizes = [f.name for f in fields(memory) if getattr(memory, f.name)]
    parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in best.parts.items() if seconds > 0)
    memory_parts = ", ".join(f"{name} {getattr(memory, name) / 1e9:.3g} GB" for name in sizes)
    return [f"Layout 1, time on its busiest rank: {parts}.", f"Layout 1, memory on its fullest rank: {memory_parts}."]


def _launches(plan: Plan) -> list[str]:
    """Warn if the kernels are so short that launching them, which the model ignores, takes longer than running them."""
    best = plan.best[0]
    passes = 2 * best.layout.num_microbatches * max(1, len(plan.profile.blocks)) / best.layout.pp
    seconds = best.parts["compute"] / passes
    if seconds > 1e-3:
        return []
    return [
        f"Expect a slower step: a pass through a block takes only {seconds * 1e6:.0f} us, and the model ignores the time to"
        " launch kernels."
    ]


def _reasons(rows: Sequence[tuple[str, str, str, str, str]]) -> list[str]:
    lines = table(("setting", "layouts", "fit", "s/step"), [row[:4] for row in rows])
    return [lines[0] + "  why", lines[1], *(f"{line}  {row[4]}" for line, row in zip(lines[2:], rows, strict=True))]


def _count(n: int) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.4g} {letter}"
    return str(n)
