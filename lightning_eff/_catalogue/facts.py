"""The committed results in ``facts.json``, which ``python -m docs.making facts`` writes."""

import json
import pkgutil
from functools import cache
from typing import Any


@cache
def facts() -> dict[str, Any]:
    """The verdicts by technique and task, the speeds that a search begins with, and tests off the usual place."""
    return json.loads(pkgutil.get_data("lightning_eff._catalogue", "facts.json") or b"")


def speed(technique: str) -> float:
    """About how many times as fast as its baseline a technique was on the reference tasks (``docs/evidence.md``).

    The geometric mean over the tasks, with the best of the settings that were tried on each; 1 where no difference was shown,
    where one task speaks for it and another against it, and where nothing is known.
    """
    return facts()["speed"].get(technique, 1.0)
