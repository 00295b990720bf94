"""Pictures of a search: what each technique adds, the best so far, the trials per technique, the target and the memory."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_eff.bench.reports import words
from lightning_eff.bench.reports.drawing import COLOURS, INK, PAPER, Drawing, label, one, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEFT = "not in the best third"  # the beginning of the reason for a trial that was stopped early
ENDS = (("the whole budget", COLOURS[0]), ("stopped early", COLOURS[5]), ("refused, crashed or diverged", COLOURS[1]))


def contributions(record: Mapping[str, Any]) -> Drawing | None:
    """Return a picture with one bar per technique, its gain in the recipe, with the interval."""
    parts = [part for part in record["contribution_figures"] if part["estimate"] is not None]
    if not parts:
        return None
    with style():
        figure, axes = one(0.8 + 0.46 * len(parts))
        for row, part in enumerate(parts):
            y, helps = -row, part["estimate"] > 0
            colour = COLOURS[0] if helps else COLOURS[1]
            axes.barh([y], [part["estimate"]], height=0.3, color=colour, alpha=0.55)
            axes.plot([part["low"], part["high"]], [y, y], color=INK, linewidth=1.6, solid_capstyle="butt")
            for end in (part["low"], part["high"]):
                axes.plot([end], [y], marker="|", color=INK, markersize=7, linestyle="none")
            place: Any = axes.get_yaxis_transform()
            text = words.bracket(part, words.differences)
            name = f"{_short(part['name'], 30)}{' (dropped)' if part['dropped'] else ''}"
            axes.text(0.0, y + 0.2, name, fontsize=9, transform=place, va="bottom", fontweight="bold")
            axes.text(1.0, y + 0.2, text, fontsize=8, transform=place, va="bottom", ha="right")
            axes.plot([0.0, 0.0], [y - 0.25, y + 0.15], color=INK, linewidth=1)  # not across the labels
        axes.grid(visible=False)
        axes.set_ylim(-len(parts) + 0.6, 0.75)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.locator_params(axis="x", nbins=6)
        axes.set_xlabel(f"what it adds to {label(record['target'], 20)}; right of 0 it helps")
    told = "; ".join(f"{p['name']} {words.bracket(p, words.differences)}" for p in parts)
    caption = (
        f"{record['target']} of the recipe without each technique minus that of the whole recipe. Right of 0 the technique"
        " helps. Lines are 95 % intervals over seeds. An interval that touches 0 may be chance."
    )
    return Drawing("contributions", caption, f"What each technique adds, with 95 % intervals: {told}.", figure)


def history(record: Mapping[str, Any]) -> Drawing | None:
    """Return a picture of the best target so far over the time of the search, for the baseline and for recipes."""
    every = [one for one in record["history"] if one["value"] is not None]
    if not every:
        return None
    last = max(one["seconds"] for one in record["history"])
    unit, name = (3600.0, "hours") if last >= 7200 else (60.0, "minutes") if last >= 120 else (1.0, "seconds")
    told: list[str] = []
    values = [one["value"] for one in every]
    with style():
        figure, axes = one(3.0)
        for kind, colour, marker in (("baseline", INK, "s"), ("recipes", COLOURS[0], "o")):
            own = [one for one in every if one["kind"] == kind]
            if not own:
                continue
            best = bests([one["value"] for one in own], record["mode"])
            xs = [one["seconds"] / unit for one in own]
            axes.plot(xs, [one["value"] for one in own], marker, color=colour, markerfacecolor=PAPER, markersize=4)
            axes.step(
                [*xs, last / unit], [*best, best[-1]], where="post", color=colour, linewidth=1.8, label=f"best: {kind}"
            )
            told.append(f"{kind} {words.number(best[0])} at first, {words.number(best[-1])} at the end")
        _frame(axes, values, record["mode"])
        axes.set_xlabel(f"{name} of the search")
        axes.set_ylabel(label(record["target"], 30))
        figure.legend(loc="outside upper center", ncols=2)
    caption = (
        f"The best {record['target']} so far. Each mark is a trial with the whole budget. The worst trials may lie outside the"
        " frame. Squares are the baseline, circles are recipes."
    )
    return Drawing("history", caption, f"Best so far over the search: {'; '.join(told)}.", figure)


def bests(values: Sequence[float], mode: str) -> list[float]:
    """Return the best value up to each place."""
    choose = min if mode == "min" else max
    found: list[float] = []
    for value in values:
        found.append(choose(found[-1], value) if found else value)
    return found


def _frame(axes: "Axes", values: Sequence[float], mode: str) -> None:
    """Limit the axis to the better three quarters of the values, with a margin."""
    ordered = sorted(values, reverse=mode == "max")
    first, last = ordered[0], ordered[max(0, (3 * len(ordered)) // 4 - 1)]
    if len(ordered) > 3 and first != last:
        room = 0.12 * abs(last - first)
        axes.set_ylim(min(first, last) - room, max(first, last) + room)


def tries(record: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return for each technique how many of its trials had the whole budget, were stopped early, or failed."""
    found: dict[str, list[int]] = {}
    for trial in record["trials"]:
        if trial["free"]:
            continue
        left = trial["state"] == "running" or (trial["why"] or "").startswith(LEFT)
        end = 0 if trial["value"] is not None else 1 if left else 2
        for name in trial["choices"]["techniques"]:
            found.setdefault(name, [0, 0, 0])[end] += 1
    return dict(sorted(found.items(), key=lambda kv: (-sum(kv[1]), kv[0])))


def tried(record: Mapping[str, Any]) -> Drawing | None:
    """Return a picture of the trials per technique, and how far they came."""
    from matplotlib.ticker import MaxNLocator

    found = tries(record)
    if not found:
        return None
    with style():
        figure, axes = one(0.95 + 0.24 * len(found))
        rows = [-row for row in range(len(found))]
        ends, bars = [0] * len(found), []
        for index, (_, colour) in enumerate(ENDS):
            widths = [counts[index] for counts in found.values()]
            bars.append(
                axes.barh(rows, widths, left=ends, height=0.62, color=colour, edgecolor=PAPER, linewidth=0.8)[0]
            )
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        axes.set_yticks(rows, [_short(name, 26) for name in found])
        axes.set_ylim(-len(found) + 0.4, 0.6)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("trials")
        figure.legend(bars, [name for name, _ in ENDS], loc="outside lower center", ncols=2)
    told = "; ".join(f"{name} {sum(counts)} ({counts[0]} whole)" for name, counts in found.items())
    caption = "The trials of each technique, and how far they came."
    return Drawing("tried", caption, f"Trials of each technique: {told}.", figure)


def memory(record: Mapping[str, Any]) -> Drawing | None:
    """Return a picture of target and peak memory of the trials with the whole budget. Undominated ones are filled."""
    found = [
        (trial["peak_bytes"], trial["value"], trial["kind"])
        for trial in record["trials"]
        if trial["value"] is not None and trial.get("peak_bytes")
    ]
    if len(found) < 2:
        return None
    sign = 1 if record["mode"] == "min" else -1
    unit, name = (2**30, "GiB") if max(x for x, _, _ in found) >= 2**30 else (2**20, "MiB")
    front = [not any(a <= x and sign * b <= sign * y and (a, b) != (x, y) for a, b, _ in found) for x, y, _ in found]
    with style():
        figure, axes = one(3.0)
        for (x, y, kind), filled in zip(found, front, strict=True):
            colour = INK if kind == "baseline" else COLOURS[0]
            face = colour if filled else PAPER
            marker = "s" if kind == "baseline" else "o"
            axes.plot([x / unit], [y], marker, color=colour, markerfacecolor=face, markersize=5, linestyle="none")
        _frame(axes, [y for _, y, _ in found], record["mode"])
        axes.set_xlabel(f"peak memory of a trial ({name})")
        axes.set_ylabel(label(record["target"], 30))
    told = "; ".join(
        f"{kind} {words.number(y)} at {words.amount(x)}"
        for (x, y, kind), filled in sorted(zip(found, front, strict=True))
        if filled
    )
    limit = record.get("memory_bytes")
    caption = (
        f"{record['target']} and peak memory of every trial with the whole budget. No other trial is as good in both as a"
        " filled one. Squares are the baseline, circles are recipes."
        + (f" At most {words.amount(limit)} were allowed." if limit else "")
    )
    return Drawing("trials_memory", caption, f"On the front of {record['target']} and memory: {told}.", figure)


def _short(name: str, size: int) -> str:
    """Return a technique's name. It is the last part of a class path."""
    return label(name.rpartition(".")[2], size)


#: All pictures of a search, in the order of the report.
ALL = (contributions, history, tried, memory)
