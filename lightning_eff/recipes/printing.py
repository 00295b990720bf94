"""A recipe's techniques as Python and YAML that can be pasted."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from lightning_eff.recipes.parts import Pick


def call(pick: Pick) -> str:
    """The technique as Python, such as ``ReplaceOptimizer("muon", lr=0.02)``."""
    settings = dict(pick.settings)
    optimizer = settings.pop("optimizer", None)
    first: list[str] = []
    if isinstance(optimizer, Mapping):
        first = [f'"{optimizer["class_path"].removeprefix("lightning_eff.").lower()}"']
        settings = {**optimizer.get("init_args", {}), **settings}
    return f"{pick.technique}({', '.join([*first, *(f'{key}={_value(value)}' for key, value in settings.items())])})"


def _value(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def as_python(picks: Sequence[Pick], max_steps: int) -> str:
    """A Trainer with the techniques."""
    names = ", ".join(sorted({pick.technique for pick in picks}))
    lines = ["import lightning as L", f"from lightning_eff import {names}", ""]
    lines += ["trainer = L.Trainer(", f"    max_steps={max_steps},", "    callbacks=["]
    lines += [f"        {call(pick)},  # {pick.why}" for pick in picks]
    return "\n".join([*lines, "    ],", ")"])


def as_yaml(entries: Sequence[Mapping[str, Any]], max_steps: int) -> str:
    """The ``trainer`` section of a config with these entries of ``callbacks``."""
    lines = ["trainer:", f"  max_steps: {max_steps}", "  callbacks:"]
    for one in entries:
        lines.append(f"    - class_path: {one['class_path'].removeprefix('lightning_eff.')}")
        if one.get("init_args"):
            flow = yaml.safe_dump(
                dict(one["init_args"]), default_flow_style=True, sort_keys=False, width=10_000
            ).strip()
            lines.append(f"      init_args: {flow}")
    return "\n".join(lines)
