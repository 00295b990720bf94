"""An advice in the terminal, and its rows for the page."""

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from lightning_eff.advice.engine import Findings
from lightning_eff.advice.intervals import BATCHES, EXACT, PRECISION
from lightning_eff.advice.outcomes import OTHER, UNKNOWN, Outcome, Stack, in_words, plain
from lightning_eff.advice.reports.recipe import explained, python, trainer_section

NOTHING = "Nothing to gain here: none of the exact changes that were tried makes this run faster."
OPEN = "No gain was found yet."
SECOND = "Changes training: worth a bench or a tune"
THIRD = "Problems in this run"
FAILED = "Failed, and therefore not measured"
PROBLEMS, SUGGESTIONS, VALIDATION = "problems", "suggestions", "validation"  #: parts that can fail
_ORDER = {EXACT: 0, PRECISION: 1, OTHER: 2, BATCHES: 3}


def headline(found: Findings) -> str:
    """The advice in one sentence."""
    stack = found.stack
    if stack.gains and stack.speed is not None:
        names = " + ".join(trial.name for trial in stack.trials)
        return (
            f"Use {names}: this run is then {stack.speed.estimate:.2f} times as fast [{stack.speed.low:.2f},"
            f" {stack.speed.high:.2f}], with {kept(stack)}."
        )
    by_code = [o for o in found.outcomes if o.faster and o.kind == EXACT and not o.trial.recipe]
    if by_code:
        return f"No technique makes this run faster. A change of your code does: {', '.join(o.trial.name for o in by_code)}."
    return " ".join([OPEN, *still_open(found)]) if still_open(found) else NOTHING


def kept(stack: Stack) -> str:
    """What a stack does to the numbers, in words."""
    if stack.noisy:
        return "numbers that differ as those of two plain runs do"
    return "the same numbers" + ("" if stack.loss == stack.gradients == 0 else " up to rounding")


def still_open(found: Findings) -> list[str]:
    """What keeps an advice without a gain from being final, and what to do; nothing if it is."""
    wide = [o.trial.name for o in found.outcomes if o.undecided and o.kind == EXACT]
    if found.stack.trials and found.stack.speed is not None and found.stack.speed.high > UNKNOWN:
        wide += [f"the stack {' + '.join(trial.name for trial in found.stack.trials)}"]
    told = [f"The intervals of {', '.join(wide)} are too wide to exclude one."] if wide else []
    told += [f"There was no time for {', '.join(found.skipped)}."] if found.skipped else []
    told += ["Use more minutes, on an idle machine."] if told else []
    names = ", ".join(found.unmeasured)
    return [*told, *([f"{names} could not be measured, because the run failed beside them."] if names else [])]


def lower_line(found: Findings) -> str:
    """The gain from lower precision in a sentence; empty if there is none."""
    stack = found.lower
    if not stack.gains or stack.speed is None:
        return ""
    return (
        f"With lower precision ({' + '.join(trial.name for trial in stack.trials)}): {stack.speed.estimate:.2f} times as fast"
        f" [{stack.speed.low:.2f}, {stack.speed.high:.2f}]. Gradients of the first step differ by {stack.gradients:.0e}."
    )


def ordered(found: Findings) -> list[Outcome]:
    """The measured outcomes: exact ones first, and the fastest of each kind first."""
    measured = [o for o in found.outcomes if o.speed is not None]
    return sorted(measured, key=lambda o: (_ORDER.get(o.kind, 9), -(o.speed.estimate if o.speed else 0.0)))


def row(found: Findings, one: Outcome) -> dict[str, str]:
    """An outcome as texts."""
    assert one.speed is not None
    speed = f"{one.speed.estimate:.2f} × [{one.speed.low:.2f}, {one.speed.high:.2f}]"
    taken = "in the recipe" if found.stack.gains and one.trial in found.stack.trials else ""
    if one.faster and one.kind == EXACT and one.trial.recipe and (found.stack.trials or not one.pays):
        taken = taken or (
            "faster alone, not in the stack" if one.pays else "faster, but this run is too short for its start"
        )
    unclear = "undecided" if one.undecided else "no measurable difference"
    verdict = taken or ("faster" if one.faster else "slower" if one.slower else unclear)
    if one.error:
        verdict += ", then it failed"
    cost = one.trial.cost
    if one.start_seconds:
        cost = f"{one.start_seconds:.0f} s at the start"
        cost += f", paid for after {one.pays_after:,} batches" if one.pays_after else ""
    return {
        "arm": one.trial.name,
        "speed": speed,
        "memory": f"{one.bytes:.2f} ×",
        "numbers": in_words(one.kind, one.loss, one.gradients, noisy=one.noisy),
        "cost": cost,
        "verdict": verdict,
    }


def none_of(found: Findings, part: str, words: str) -> str:
    """``words`` where a part of the advice has nothing to show, or that it is not known because the part failed."""
    if part in found.failures:
        return f"Not known, because this part failed: {found.failures[part]}"
    beside = (
        " Validation failed, so this is of training alone." if part == PROBLEMS and VALIDATION in found.failures else ""
    )
    return words + beside


def not_measured(found: Findings) -> list[str]:
    """Parts of the advice that failed, with the error and what was therefore not measured."""
    return [f"{part}: {why}" for part, why in found.failures.items()]


def failed(found: Findings) -> list[str]:
    """Trials that were not measured, and why."""
    return [f"{o.trial.name}: {o.error}" for o in found.outcomes if o.speed is None]


def code_of(found: Findings) -> list[str]:
    """Changes of the user's own code that pay, and settings that techniques found."""
    lines = []
    for one in found.outcomes:
        used = found.stack.gains and one.trial in found.stack.trials
        if one.faster and one.kind == EXACT and (not one.trial.recipe or (used and "callbacks=" not in one.trial.code)):
            lines.append(f"{one.trial.name}: write {one.trial.code}, because {one.trial.reason}.")
        if one.faster and "loader" in one.settings:
            lines.append(f"{one.trial.name} chose {one.settings['loader']}.")
        lines += [f"{one.trial.name}: {note}" for note in one.notes if one.trial.group == "loader" and "stays" in note]
    return lines


def where(phases: Mapping[str, float]) -> str:
    """Where a step's time goes, in words."""
    total = sum(phases.values()) or 1.0
    return ", ".join(
        f"{name} {seconds / total:.0%}" for name, seconds in sorted(phases.items(), key=lambda kv: -kv[1]) if seconds
    )


def text(found: Findings, width: int = 110) -> str:
    """The advice as the terminal shows it."""
    lines = [headline(found)]
    if lower := lower_line(found):
        lines.append(lower)
    view = found.view
    lines += ["", f"{found.name}: {1000 * view.step_seconds:.3g} ms per batch. {_capital(where(view.phases))}."]
    rows = [row(found, one) for one in ordered(found)]
    if rows:
        heads = {"arm": "tried", "speed": "speed-up", "memory": "memory", "numbers": "numbers", "verdict": "verdict"}
        sizes = {key: max(len(head), *(len(r[key]) for r in rows)) for key, head in heads.items()}
        lines += ["", "Measured, with 95 % intervals", ""]
        lines += ["  ".join(r[key].ljust(sizes[key]) for key in heads).rstrip() for r in ({**heads}, *rows)]
    lines += _part("What they cost", [f"{r['arm']}: {r['cost']}" for r in rows if r["cost"] != "nothing"], width)
    lines += _part("In your code", code_of(found), width)
    lines += _part("How the recipe came about", found.stack.tried, width)
    problems = [f"{p.what} {p.fix}" for p in found.problems]
    changing = [f"{s.name}: {s.reason} {s.expected} Code: {s.code}" for s in found.suggestions]
    lines += _part(SECOND, changing or [none_of(found, SUGGESTIONS, "Nothing.")], width)
    lines += _part(THIRD, problems or [none_of(found, PROBLEMS, "None found.")], width)
    lines += _part(FAILED, not_measured(found), width)
    lines += _part("Failed trials", failed(found), width)
    lines += _part("Not tried", [f"{name}: {why}" for name, why in found.left.items()], width)
    lines += _part("Notes", found.notes, width)
    return "\n".join(lines)


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _part(head: str, entries: Iterable[str], width: int) -> list[str]:
    wrapped = [
        textwrap.fill(
            " ".join(entry.split()), width, initial_indent="  - ", subsequent_indent="    ", break_long_words=False
        )
        for entry in entries
    ]
    return ["", head, "", *wrapped] if wrapped else []


def record(found: Findings) -> dict[str, Any]:
    """The advice as JSON."""
    view = found.view
    return plain(
        {
            "schema": 1,
            "module": found.name,
            "headline": headline(found),
            "configs": found.configs,
            "seconds": found.seconds,
            "seconds_to_first_ratio": found.first,
            "profile": {
                "step_seconds": view.step_seconds,
                "phases": view.phases,
                "memory": view.memory,
                "peak_bytes": view.peak_bytes,
                "padding": view.padding,
                "waiting": view.waiting,
                "run": asdict(view.run),
                "why": view.why,
            },
            "trials": [one.record() for one in found.outcomes],
            "not_tried": found.left,
            "stack": {**found.stack.record(), "gains": found.stack.gains, "python": python(found.stack)},
            "lower_precision": {**found.lower.record(), "gains": found.lower.gains, "python": python(found.lower)},
            "recipe": trainer_section(found.stack),
            "explained": explained(found, found.stack),
            "changes_training": [asdict(one) for one in found.suggestions],
            "problems": [asdict(one) for one in found.problems],
            "failures": found.failures,
            "notes": found.notes,
        }
    )
