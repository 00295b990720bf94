"""Sixty families of Hugging Face models, six steps each: as one process trains them, or refused in words at setup.

The table of what is refused stands in ``tests.families``; what is not in it is right.
"""

import re

import pytest
import torch

from tests.cases import CASES
from tests.families import FAMILIES, refusal, train
from tests.models import flat
from tests.plugins import PLUGINS
from tests.strategies.launch import launch

QUICK = ("electra",)
every = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)


def _compare(family: str, found: dict[str, str]) -> None:
    """Hold what was refused, and why, against the table; other names of the table are not looked at."""
    expected = {name: why for name, why in FAMILIES[family].refused.items() if name in found}
    expected |= {name: "^not finite$" for name in FAMILIES[family].wrong if name in found}
    assert {name for name, why in found.items() if why} == set(expected), found
    for name, why in expected.items():
        who = "HybridParallelStrategy" if name in ("tp2", "pp2") else name
        assert found[name].startswith(who) or found[name] == "not finite", f"not ours: {found[name]}"
        assert re.search(why, found[name]), (name, found[name])


def test_the_table_is_of_sixty() -> None:
    assert len(FAMILIES) >= 60 and set(QUICK) <= FAMILIES.keys()
    known = {"tp2", "pp2", *CASES, *PLUGINS}
    assert all(set(family.refused) <= known for family in FAMILIES.values())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_train_as_one_process(family: str) -> None:
    """Losses of six steps in float32, within 1e-5."""
    _, expected, _ = train(family)
    found = launch("tests.families", "layouts", family, world_size=2, timeout=250)
    _compare(family, {layout: losses if isinstance(losses, str) else "" for layout, losses in found.items()})
    for layout, losses in found.items():
        if not isinstance(losses, str):
            assert len(losses) == len(expected)
            assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5, (layout, losses, expected)


@every
def test_techniques_train_or_are_refused(family: str) -> None:
    plain, _, _ = train(family)
    found = {name: refusal(family, case.active()) for name, case in CASES.items()}
    _compare(family, found)
    for name, case in CASES.items():
        if case.exact and not found[name]:
            net, _, _ = train(family, case.active())
            assert torch.equal(flat(net), flat(plain)), f"{name} changed weights"


@every
def test_plugins_train_or_are_refused(family: str) -> None:
    found: dict[str, str] = {}
    for name, case in PLUGINS.items():
        for precision in case.precisions:
            found[name] = refusal(family, plugins=[case.build(precision)]) or found.get(name, "")
    _compare(family, found)
