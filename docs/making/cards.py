"""Writes a card for each technique from its class, its case, the committed results and the pairs."""

import ast
import inspect
import json
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
from benchmarks.evidence_tasks import speed, verdict
from docs.making import choices, facts, layouts, prose
from lightning_eff._catalogue import catalogue
from lightning_eff._core._arguments.declared import arguments_of
from lightning_eff._core._surveys import items as surveys
from lightning_eff._exports import public
from tests import test_exported
from tests.cases import CASES
from tests.plugins import PLUGINS
from tests.stacks import declared

UNMEASURED = "Its effect on training time was not measured on the reference tasks."


def names() -> list[str]:
    """Return the names with a card: every exported callback, precision plugin, strategy and optimizer."""
    return sorted({name for entry in catalogue.entries() for name in entry.by})


def file_of(name: str) -> str:
    """Return the path of a card's page in the folder of pages."""
    return f"techniques/{public.HOMES[name].rpartition('.')[2]}.md"


@cache
def refused() -> dict[frozenset[str], str]:
    """Return the pairs that cannot train together, with the reasons, from the pair tests."""
    return declared(CASES, PLUGINS)


def card(name: str) -> str:
    """Return the page of one technique."""
    cls = public.found(name)
    doc = prose.read(cls)
    entry = next(entry for entry in catalogue.entries() if name in entry.by)
    lines = [f"# {name}", "", doc.summary, ""]
    lines += [doc.text, ""] if doc.text else []
    lines += ["## When to use it", "", *advice(name), ""]
    lines += ["## How to use it", "", *use(name), ""]
    if rows := list(_settings(cls, doc)):
        head = "| argument | meaning | default | values | `tune` tries |"
        lines += ["## Settings", "", head, "|---|---|---|---|---|", *rows, ""]
    if rules := list(_rules(cls)):
        lines += [
            '??? note "The rule, in the paper\'s symbols"',
            "",
            *("    " + line for line in "\n".join(rules).splitlines()),
            "",
        ]
    lines += ["## Cost and measured gain", ""]
    lines += [f"**Saves:** {cls.saves}.", ""] if getattr(cls, "saves", "") else []
    lines += [*measured(name), ""]
    control = getattr(cls, "control", None)
    if control and "*control: " not in "\n".join(lines):
        lines += [f"Compare it with its control: {control.text}.", ""]
    limits = [f"- {cls.constraints[0].upper()}{cls.constraints[1:]}."] if getattr(cls, "constraints", "") else []
    limits += [f"- Strategies: {layouts.line(cls)}"] if layouts.line(cls) else []
    lines += ["## Limits", "", *limits, ""] if limits else []
    lines += ["## Works with", "", *company(name), ""]
    lines += ["## References", "", f"- {getattr(cls, 'paper', '') or entry.source}"]
    lines += [f"- In the [surveys](../catalogue.md): {found}."] if (found := surveys.survey(name)) else []
    room = public.HOMES[name].split(".")[1]
    reference = f"[API reference](../reference/{room}.md#{public.HOMES[name]}.{name})"
    return "\n".join([*lines, f"- {reference}", ""])


def use(name: str) -> list[str]:
    """Show the same settings in Python and YAML, from the docstring's example or the technique's tests."""
    trainer, own = _recipe(name)
    cls = public.found(name)
    ((kind, what),) = trainer.items()
    entry = what[0] if isinstance(what, list) else what
    note: list[str] = []
    if issubclass(cls, Optimizer):
        default = inspect.signature(cls).parameters["lr"].default
        rate = 0.01 if default is inspect.Parameter.empty else default
        entry["init_args"]["optimizer"]["init_args"] = {"lr": rate}
        call = f"ReplaceOptimizer(functools.partial({name}, lr={rate}))"
        imports = f"import functools\n\nimport lightning as L\nfrom lightning_eff import {name}, ReplaceOptimizer\n"
        python = f"{imports}\ntrainer = L.Trainer(callbacks=[{call}])"
    elif example := prose.read(cls).example:
        code = prose.code(example).replace("lightning_eff.", "")
        given = [n for n in ("torch", "nn") if re.search(rf"\b{n}\.", code)]
        imports = {"torch": "import torch", "nn": "from torch import nn"}
        used = [n for n in lightning_eff.__all__ if re.search(rf"\b{n}\b", code)]
        head = ["import lightning as L", *(imports[n] for n in given), f"from lightning_eff import {', '.join(used)}"]
        python = "\n".join([*head, "", code.strip()])
        if (settings := _literal(name, code)) is not None:
            entry.pop("init_args", None)
            entry |= {"init_args": settings} if settings else {}
    else:
        given = entry.get("init_args", {})
        python = ""
        if "class_path" not in str(given) and not any(str(v).startswith("tests.") for v in given.values()):
            call = f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
            place = f"{kind}={call}" if issubclass(cls, Strategy) else f"{kind}=[{call}]"
            python = f"import lightning as L\nfrom lightning_eff import {name}\n\ntrainer = L.Trainer({place})"
            note = ["", "These settings are for a run of a few steps."] if own else []
    text = yaml.safe_dump({"trainer": trainer}, sort_keys=False, default_flow_style=None, width=100)
    text = re.sub(r"(?m)^( *- )\{(class_path: \w+)\}$", r"\1\2", text)
    lines = ["```python", *python.splitlines(), "```", ""] if python else []
    return [*lines, "```yaml", *text.strip().splitlines(), "```", *note]


def _literal(name: str, code: str) -> dict[str, Any] | None:
    """Return the arguments of the first call of a class in some code, or None if a config cannot have them."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    call = next((one for one in calls if isinstance(one.func, ast.Name) and one.func.id == name), None)
    if call is None or any(word.arg is None for word in call.keywords):
        return None
    try:
        values = [ast.literal_eval(value) for value in call.args]
        named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except ValueError:
        return None
    bound = inspect.signature(public.found(name)).bind(*values, **named).arguments
    return json.loads(json.dumps(bound))


def _recipe(name: str) -> tuple[dict[str, Any], bool]:
    """Return the trainer's part of a config with the defaults, or with the case's settings if the defaults do nothing."""
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
    """Describe the values of a setting that a search tries."""
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
        values = "" if values and prose.cell(text).startswith(values.removesuffix(" or None")) else values
        yield f"| `{name}` | {prose.cell(text)} | {prose.cell(default)} | {prose.cell(values)} | {prose.cell(tries)} |"


def measured(name: str) -> list[str]:
    """Return the figures of the committed results with the control's and the paper's claim, or a note without results."""
    found = facts.measurements(name)
    if not found:
        reason = choices.reasons()[name].replace("](", "](../")
        return [f"{UNMEASURED} {reason}"]
    lines = ["| task | speed-up [95 %] | result | runs |", "|---|---|---|---|"]
    for recipe, task, _, results in found:
        seconds = results["plan"]["budget"]["seconds"]
        title = f"[{evidence.TASKS[task]}](../evidence/{task}.md){facts.label(task, recipe, results)}"
        arms = [(title, results["summary"][recipe])]
        arms += [(f"*control: {arm}*", one) for arm, one in evidence.controls(results, recipe)]
        for what, one in arms:
            lines.append(f"| {what} | {speed(one)} | {verdict(one)} | {seconds:g} s × {len(one['final']['values'])} |")
    lines += ["", "Below 1 is slower. The last column is the budget times the number of seeds."]
    claim = next((claim for _, _, claim, _ in found if claim), None)
    return [*lines, "", f"The paper claims: {claim}."] if claim else lines


def advice(name: str) -> list[str]:
    """Return the recommendation, the results of others, and the tasks on which it gained or lost here."""
    one = choices.choices()[name]
    lines = [f"- **{one.recommendation.capitalize()}.** {one.elsewhere}"]
    scope = {"any": "any model", "several GPUs": "training on several GPUs", "images": "image models"}
    works = scope.get(one.works_for, f"{one.works_for.removesuffix(' model')} models")
    cost = {"less": "less than", "same": "the same as", "more": "more than", "much more": "much more than"}[one.cost]
    risk = {
        "exact": "It is exact, except for rounding.",
        "training": "It changes training.",
        "model": "It changes the model.",
    }
    lines.append(f"- For {works}. A step costs {cost} a plain one. {risk[one.risk]}")
    found = choices.best(name)
    for words, result in (("Faster", "faster"), ("Slower", "slower"), ("Undecided", "undecided")):
        tasks = [evidence.SHORT[task] for task, _, summary in found if verdict(summary) == result]
        lines += [f"- {words} here, with its best settings, on: {', '.join(tasks)}."] if tasks else []
    for recipe, task, _, results in facts.measurements(name):
        own = results["summary"][recipe]
        level = [
            arm
            for arm, other in evidence.controls(results, recipe)
            if own["speedup"] and other["speedup"] and other["speedup"]["estimate"] >= own["speedup"]["estimate"]
        ]
        if level and verdict(own) != "slower":
            lines.append(f"- On {evidence.SHORT[task]}, its control did as well or better: {'; '.join(level)}.")
    return lines


def company(name: str) -> list[str]:
    """Return the techniques with which it cannot train, and a note on the tested ones."""
    enemies = {next(iter(pair - {name})): why for pair, why in refused().items() if name in pair and len(pair) == 2}
    known = {
        enemy: why
        for enemy, why in enemies.items()
        if enemy in public.HOMES and why != "a trainer has one precision plugin"
    }
    cls = public.found(name)
    lines = []
    if issubclass(cls, Precision):
        lines = ["A trainer has one precision plugin. Pass another one as `inner=` to wrap it.", ""]
    if name not in _cases():
        return [*lines, "It has its own tests. The tests of all pairs leave it out."]
    lines += ["The tests train it together with every other technique, and such runs resume exactly."]
    if known:
        reasons: dict[str, list[str]] = {}
        for enemy, why in sorted(known.items()):
            reasons.setdefault(why, []).append(f"[{enemy}]({Path(file_of(enemy)).name})")
        lines += ["", "These raise an error at setup:", ""]
        lines += [f"- {', '.join(links)}: {why}." for why, links in reasons.items()]
    return lines


def overview() -> str:
    """Return the table of all techniques from ``choices.txt``, the classes and the results."""
    heads = (
        "technique",
        "recommendation",
        "effect",
        "step cost",
        "risk",
        "works for",
        "measured here",
        "elsewhere",
        "purpose",
    )
    lines = [
        "---",
        "hide: [toc]",
        "---",
        "",
        "# Choose a technique",
        "",
        "Each name leads to a card with code, settings and limits. **Recommended** techniques are good defaults.",
        "**Situational** ones gain under the condition that *elsewhere* names. Those **for research** rarely gain today.",
        "",
        "*Step cost* compares a training step with a plain one. *Risk*: an exact technique computes the same training, except",
        "for rounding. *Measured here* is the speed-up on our [reference tasks](../evidence.md). Below 1 is slower.",
        "*Elsewhere* is what papers report, or what the technique is good for.",
        "",
        '<div class="choose" data-filter="purpose,works for,effect,step cost,risk,recommendation" markdown>',
        "",
        "| " + " | ".join(heads) + " |",
        "|---" * len(heads) + "|",
    ]
    for name, one in choices.choices().items():
        cells = [f"[{name}]({Path(file_of(name)).name})", one.recommendation, ", ".join(one.effect), one.cost]
        cells += [
            choices.RISKS[one.risk],
            one.works_for,
            choices.measured(name),
            prose.cell(one.elsewhere),
            one.purpose,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "</div>", ""])


def whole_catalogue() -> str:
    """Return every row of the surveys with the technique that implements it, its tests and verdict, or the reason."""
    lines = [
        "# The surveys' catalogue",
        "",
        "This page lists every technique and system that two surveys name, in their order: Zhuang et al. 2023, *A Survey on",
        "Efficient Training of Transformers* (arXiv:2302.01107), and Shen et al. 2024, *On Efficient Training of Large-Scale",
        "Deep Learning Models* (arXiv:2304.03589). `lightning-eff techniques --search WORD` searches it.",
        "",
    ]
    for group, title in catalogue.GROUPS.items():
        lines += [
            f"## {title}",
            "",
            "| name in the survey | section | in this package | tests | measured here |",
            "|---|---|---|---|---|",
        ]
        for entry in (e for e in catalogue.entries() if e.group == group):
            links = ", ".join(f"[{name}]({file_of(name)})" for name in entry.by)
            here = f"{links}{f', {entry.how}' if entry.how else ''}" if links else f"**{entry.status}**"
            here += f": {entry.why or entry.how}" if not links and (entry.why or entry.how) else ""
            tests = "<br>".join(f"`{part}`" for part in re.split(r"(?<=/)(?=\w+\.py$)", entry.tests) if part) or "–"
            where = "–" if group == "beside" else entry.surveys
            name = f"{entry.name} ({entry.source or '–'})"
            lines.append(f"| {name} | {where} | {here} | {tests} | {catalogue.verdict(entry)} |")
        lines.append("")
    return "\n".join(lines)
