"""The best stack as a config for ``lightning-eff fit``, and as Python."""

from typing import Any

import yaml

from lightning_eff.advice.engine import Findings
from lightning_eff.advice.outcomes import Stack

_COMMAND = "lightning-eff fit --config {mine} --config {name}"


def recipe(found: Findings, stack: Stack, name: str) -> str:
    """The text of a recipe's file.

    Args:
        found: the advice.
        stack: of trials.
        name: of the file.
    """
    head = [f"# {line}" for line in explained(found, stack)]
    if stack.gains:
        mine = found.configs[-1] if len(found.configs) == 1 else "mine.yaml"
        head.append(f"# Run it: {_COMMAND.format(mine=mine, name=name)}")
    return "\n".join([*head, yaml.safe_dump({"trainer": trainer_section(stack)}, sort_keys=False, width=120)])


def trainer_section(stack: Stack) -> dict[str, Any]:
    """The entries that a recipe adds to the section ``trainer`` of a config; empty if the stack gains nothing."""
    if not stack.gains:
        return {}
    change = stack.change
    section: dict[str, Any] = dict(change.trainer)
    if change.callbacks:
        section["callbacks+"] = [dict(one) for one in change.callbacks]
    if change.plugins:
        section["plugins"] = [dict(one) for one in change.plugins]
    return section


def explained(found: Findings, stack: Stack) -> list[str]:
    """A stack in words, line by line."""
    if not stack.gains or stack.speed is None:
        return ["No exact change that was tried makes this run faster, so this recipe changes nothing."]
    speed = stack.speed
    names = " + ".join(trial.name for trial in stack.trials)
    return [
        f"{names}: {speed.estimate:.2f} times as fast as the run without it [{speed.low:.2f}, {speed.high:.2f}].",
        "Two plain runs differ already, so what it does to the numbers is not known."
        if stack.noisy
        else "Loss and gradients of the first step are bit-equal."
        if stack.loss == stack.gradients == 0
        else f"Loss and gradients of the first step differ by {stack.loss:.0e} and {stack.gradients:.0e} (relative).",
    ]


def python(stack: Stack) -> str:
    """The stack as Python that can be pasted; an empty text where it gains nothing."""
    if not stack.gains:
        return ""
    change, imports, arguments = stack.change, dict[str, list[str]](), list[str]()
    for where, entries in (("callbacks", change.callbacks), ("plugins", change.plugins)):
        calls = []
        for entry in entries:
            home, _, name = str(entry["class_path"]).rpartition(".")
            imports.setdefault(home, []).append(name)
            given = ", ".join(f"{key}={value!r}" for key, value in entry.get("init_args", {}).items())
            calls.append(f"{name}({given})")
        if calls:
            arguments.append(f"{where}=[{', '.join(calls)}]")
    arguments += [f"{key}={value!r}" for key, value in change.trainer.items()]
    lines = [f"from {home} import {', '.join(dict.fromkeys(names))}" for home, names in imports.items()]
    return "\n".join([*lines, "", f"trainer = Trainer(..., {', '.join(arguments)})"]).strip()
