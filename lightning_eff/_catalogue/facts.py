"""Read the committed results in ``facts.json``, which ``python -m docs.making facts`` writes."""

import json
import pkgutil
from functools import cache
from typing import Any


@cache
def facts() -> dict[str, Any]:
    """Return verdicts by technique and task, the speeds that a search begins with, and tests in unusual places."""
    return json.loads(pkgutil.get_data("lightning_eff._catalogue", "facts.json") or b"")


def speed(technique: str) -> float:
    """Return how many times as fast as its baseline a technique was on the reference tasks (``docs/evidence.md``).

    This is the geometric mean over the tasks, with the best settings on each. It is 1 for techniques that were not measured,
    without a measurable difference, or with a gain on one task and a loss on another.
    """
    return facts()["speed"].get(technique, 1.0)
