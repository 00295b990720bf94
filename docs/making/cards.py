"""A card for each technique: what its class, its case, the committed results and the pairs say of it."""

import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer

import lightning_eff
from benchmarks import evidence_page as evidence
from docs.making import facts, layouts, prose
from lightning_eff._catalogue import catalogue
from lightning_eff._core._arguments.declared import arguments_of
from lightning_eff._exports import public
from tests import test_exported
from tests.cases import CASES
from tests.plugins import PLUGINS
from tests.stacks import declared

VERDICTS = Path(__file__).parent.parent / "verdicts.md"
BUSY = "It was not held against a tuned baseline here. What it gains on the reference tasks is not known."


def names() -> list[str]:
    """What has a card: every callback, precision plugin, strategy and optimizer that is exported."""
    return sorted({name for entry in catalogue.entries() for name in entry.by})


def file_of(name: str) -> str:
    """The page of a card, from the folder of pages."""
    return f"techniques/{public.HOMES[name].rpartition('.')[2]}.md"


@cache
def told() -> dict[str, tuple[str, str]]:
    """Of each technique that has a row in ``docs/verdicts.md``: what it does, and the last cell, the verdict of others."""
    found = {}
    for line in VERDICTS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) >= 3:
            for name in re.findall(r"`(\w+)`", cells[0]):
                found[name] = (cells[1], cells[-1])
    return found


@cache
def refused() -> dict[frozenset[str], str]:
    """The pairs that may not train together, and why, as the pair tests have them."""
    return declared(CASES, PLUGINS)


def card(name: str) -> str:
    """The page of one technique."""
    cls = public.found(name)
    doc = prose.read(cls)
    entry = next(entry for entry in catalogue.entries() if name in entry.by)
    lines = [f"# {name}", "", doc.summary, ""]
    if name in told():  # a class without a row has its card all the same
        lines += [f"In short: {told()[name][0]}.", ""]
    lines += ["## How to use it", "", *use(name), ""]
    lines += ["## What it does", "", doc.text, ""] if doc.text else []
    if rules := list(_rules(cls)):
        lines += ["## The rule", "", "In the paper's symbols, as the code has it:", "", *rules, ""]
    if rows := list(_settings(cls, doc)):
        lines += [
            "## Settings",
            "",
            "| argument | default | values | meaning | `lightning-eff tune` tries |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    lines += ["## What it saves, and where it does not work", ""]
    lines += [f"- **Saves:** {cls.saves}." if getattr(cls, "saves", "") else "- **Saves:** see the measurements below."]
    lines += [f"- **Needs, and limits:** {cls.constraints}."] if getattr(cls, "constraints", "") else []
    lines += [f"- **Strategies:** {layouts.line(cls)}"] if layouts.line(cls) else []
    lines += [f"- **Refused:** {prose.cell(text)}" for text in doc.sections.get("Raises", {}).values()]
    lines += ["", "## Measured here", "", *measured(name), ""]
    if control := getattr(cls, "control", None):
        lines += [f"**An honest comparison holds it against:** {control.text}.", ""]
    lines += ["## With other techniques", "", *company(name), ""]
    lines += ["## When to use it, and when not", "", *advice(name), ""]
    lines += ["## Sources", "", f"- {getattr(cls, 'paper', '') or entry.source}"]
    survey = getattr(cls, "survey", None)
    lines += [f"- In the surveys: {survey}."] if survey else []
    room = public.HOMES[name].split(".")[1]
    lines += [
        f"- [Reference](../reference/{room}.md#{public.HOMES[name]}.{name}); tests: `{catalogue.tests_of(name)}`.",
        "",
    ]
    return "\n".join(lines)


def use(name: str) -> list[str]:
    """A recipe in YAML and the same in Python, with the settings of its case: those of a short run."""
    trainer, own = _recipe(name)
    cls = public.found(name)
    rate = 0.01
    if issubclass(cls, Optimizer):
        default = inspect.signature(cls).parameters["lr"].default
        rate = rate if default is inspect.Parameter.empty else default
        trainer["callbacks"][0]["init_args"]["optimizer"]["init_args"] = {"lr": rate}
    text = yaml.safe_dump({"trainer": trainer}, sort_keys=False, default_flow_style=None, width=100)
    text = re.sub(r"\{(class_path: \w+)\}", r"\1", text)
    lines = ["```yaml", *text.strip().splitlines(), "```", ""]
    if issubclass(cls, Optimizer):
        call = f"ReplaceOptimizer(functools.partial({name}, lr={rate}))"
        return [
            *lines,
            "```python",
            "import functools",
            "",
            "import lightning as L",
            f"from lightning_eff import {name}, ReplaceOptimizer",
            "",
            f"trainer = L.Trainer(callbacks=[{call}])",
            "```",
        ]
    if example := prose.read(cls).example:
        code = prose.code(example)
        given = [n for n in ("torch", "nn") if re.search(rf"\b{n}\.", code)]
        imports = {"torch": "import torch", "nn": "from torch import nn"}
        used = [n for n in lightning_eff.__all__ if re.search(rf"\b{n}\b", code)]
        head = ["import lightning as L", *(imports[n] for n in given), f"from lightning_eff import {', '.join(used)}"]
        return [*lines, "```python", *head, "", *code.strip().splitlines(), "```"]
    ((kind, what),) = trainer.items()
    given = (what[0] if isinstance(what, list) else what).get("init_args", {})
    if "class_path" in str(given) or any(isinstance(v, str) and v.startswith("tests.") for v in given.values()):
        return lines
    call = f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
    place = f"{kind}={call}" if issubclass(cls, Strategy) else f"{kind}=[{call}]"
    note = (
        ["", "These are the settings of its tests, for a run of a few steps; defaults and advice stand below."]
        if own
        else []
    )
    return [
        *lines,
        "```python",
        "import lightning as L",
        f"from lightning_eff import {name}",
        "",
        f"trainer = L.Trainer({place})",
        "```",
        *note,
    ]


def _recipe(name: str) -> tuple[dict[str, Any], bool]:
    """The trainer's part of a config: with the defaults where these act, else with its case's settings, which it says."""
    trainer = test_exported.recipe(name)
    ((kind, what),) = trainer.items()
    if name not in CASES or "init_args" not in what[0]:
        return trainer, "init_args" in (what[0] if isinstance(what, list) else what)
    needs = any(
        p.default is p.empty
        for p in inspect.signature(public.found(name)).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )
    if needs or public.found(name)().neutral:
        return trainer, True
    return {kind: [{"class_path": what[0]["class_path"]}]}, False


def _range(space: Any) -> str:
    """What a search tries of a setting, in words."""
    if hasattr(space, "values"):
        return ", ".join(f"`{value!r}`" for value in space.values)
    return f"`{space.low!r}` to `{space.high!r}`{', evenly by ratio' if space.log else ''}"


def _cases() -> set[str]:
    return {*CASES, *PLUGINS}


def _rules(cls: type) -> Iterator[str]:
    module = inspect.getmodule(cls)
    for name, function in vars(module).items():
        own = inspect.isfunction(function) and function.__module__ == cls.__module__ and not name.startswith("_")
        if own and function.__doc__ and "``" in function.__doc__:
            doc = prose.read(function)
            yield f"- `{name}`: {doc.summary}"
            if doc.text:
                yield "\n" + "\n".join(f"    {line}".rstrip() for line in doc.text.splitlines()) + "\n"


def _settings(cls: type, doc: prose.Doc) -> Iterator[str]:
    space = getattr(getattr(cls, "search_space", None), "settings", {})
    parameters = inspect.signature(cls).parameters
    for name, text in doc.sections.get("Args", {}).items():
        parameter = parameters.get(name.strip("*"))
        default = "–" if parameter is None or parameter.default is parameter.empty else f"`{parameter.default!r}`"
        tries = _range(space[name]) if name in space else ""
        known = arguments_of(cls).get(name)
        values = known.kind.expected + (" or None" if known.optional else "") if known and known.kind else ""
        yield f"| `{name}` | {prose.cell(default)} | {prose.cell(values)} | {prose.cell(text)} | {prose.cell(tries)} |"


def measured(name: str) -> list[str]:
    """The figures of the committed results, with the control's and the paper's claim; or that there are none."""
    found = facts.measurements(name)
    if not found:
        room = public.HOMES[name].split(".")[1]
        more = {
            "memory": " Bytes and times are in [Memory](../memory.md).",
            "precision": " Losses are in [Verdicts](../verdicts.md).",
        }
        return [BUSY + more.get(room, "")]
    lines = ["| task | speed-up [95 % interval], verdict | its control | budget, seeds |", "|---|---|---|---|"]
    for recipe, task, _, results in found:
        plan = results["plan"]
        held = "; ".join(f"{arm}: {evidence.cell(one)}" for arm, one in evidence.controls(results, recipe)) or "–"
        budget = f"{plan['budget']['seconds']:g} s, {len(results['summary'][recipe]['final']['values'])} seeds"
        budget += facts.label(task, recipe, results)
        lines.append(f"| {evidence.TASKS[task]} | {evidence.cell(results['summary'][recipe])} | {held} | {budget} |")
    lines += ["", "Below 1 is slower. All figures, with what they mean: [Evidence](../evidence.md).", ""]
    claim = next((claim for _, _, claim, _ in found if claim), None)
    return [*lines, f"**What its paper claims:** {claim}."] if claim else lines[:-1]


def advice(name: str) -> list[str]:
    """What others found, and where it lost or its control did as well here."""
    others = re.sub(r" ?Not measured here( yet)?\.", "", told().get(name, ("", ""))[1]).strip()
    lines = [f"- {others}"] if others else []
    found = [
        (
            f"{evidence.TASKS[task]}{facts.label(task, recipe, results)}",
            results["summary"][recipe],
            evidence.controls(results, recipe),
        )
        for recipe, task, _, results in facts.measurements(name)
    ]
    gains = [(task, one["speedup"], one["verdict"], held) for task, one, held in found if one["speedup"]]
    for words, verdict in (
        ("It gained", "faster"),
        ("It lost", "slower"),
        ("Nothing was shown", "no difference shown"),
    ):
        tasks = dict.fromkeys(task for task, _, said, _ in gains if said == verdict)
        lines += [f"- {words} here, at equal time, on: {'; '.join(tasks)}."] if tasks else []
    for task, speed, said, held in gains:
        level = [arm for arm, one in held if one["speedup"] and one["speedup"]["estimate"] >= speed["estimate"]]
        if level and said != "slower":
            lines.append(
                f"- {task[0].upper()}{task[1:]}: its control ({'; '.join(level)}) did as well or better. Take that."
            )
    return lines


def company(name: str) -> list[str]:
    """What it refuses to train with, and that all else was tried."""
    enemies = {next(iter(pair - {name})): why for pair, why in refused().items() if name in pair and len(pair) == 2}
    known = {
        enemy: why
        for enemy, why in enemies.items()
        if enemy in public.HOMES and why != "a trainer has one precision plugin"
    }
    cls = public.found(name)
    lines = []
    if issubclass(cls, Precision):
        lines = ["A trainer has one precision plugin; plugins wrap one another where that makes sense (`inner=`).", ""]
    if name not in _cases():
        return [*lines, "It is tried by tests of its own; it stands outside of the tests of all pairs."]
    lines += [
        "It trains together with every technique that is not named here, which the tests try, and resumes exactly."
    ]
    if known:
        lines += ["", "It is refused at setup, with the reason, beside:", ""]
        lines += [f"- [{enemy}]({Path(file_of(enemy)).name}): {why}" for enemy, why in sorted(known.items())]
    return lines


def overview() -> str:
    """All techniques in one table, by group: made from the classes, so that a new one needs no row."""
    lines = [
        "# All techniques",
        "",
        "Each name leads to its card. What the surveys name and nothing does here yet is in",
        "[the catalogue](../catalogue.md).",
        "",
    ]
    seen: set[str] = set()
    for group, title in catalogue.GROUPS.items():
        rows = []
        for name in dict.fromkeys(n for e in catalogue.entries() if e.group == group for n in e.by):
            if name not in seen:
                seen.add(name)
                what = catalogue.facts()["measured"].get(name, {})
                figures = "<br>".join(f"{task} {cell}" for task, cell in what.items()) or "–"
                summary = prose.cell(prose.read(public.found(name)).summary)
                rows.append(f"| [{name}]({Path(file_of(name)).name}) | {summary} | {figures} |")
        if rows:
            lines += [f"## {title}", "", "| technique | what it does | measured here |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def whole_catalogue() -> str:
    """Every row of the surveys: what does it here, its tests, its verdict; or why nothing does."""
    lines = [
        "# The catalogue",
        "",
        "Every technique and system that two surveys name, in their order: Zhuang et al. 2023, *A Survey on Efficient Training",
        "of Transformers* (arXiv:2302.01107), and Shen et al. 2024, *On Efficient Training of Large-Scale Deep Learning",
        "Models* (arXiv:2304.03589). `lightning-eff techniques --search WORD` shows the same.",
        "",
    ]
    for group, title in catalogue.GROUPS.items():
        lines += [f"## {title}", "", "| what they name | here | tests | measured here |", "|---|---|---|---|"]
        for entry in (e for e in catalogue.entries() if e.group == group):
            links = ", ".join(f"[{name}]({file_of(name)})" for name in entry.by)
            here = f"{links}{f', {entry.how}' if entry.how else ''}" if links else f"**{entry.status}**"
            here += f": {entry.why or entry.how}" if not links and (entry.why or entry.how) else ""
            tests = "<br>".join(f"`{part}`" for part in re.split(r"(?<=/)(?=\w+\.py$)", entry.tests) if part) or "–"
            lines.append(f"| {entry.name} ({entry.source or '–'}) | {here} | {tests} | {catalogue.verdict(entry)} |")
        lines.append("")
    return "\n".join(lines)
