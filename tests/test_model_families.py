"""Sixty families of models, six steps each: as one process trains them, or refused in words at setup.

The table of what is refused stands in ``tests.families``; what is not in it is right.
"""

import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Optimizer

import lightning_eff
from lightning_eff import ReplaceOptimizer
from tests.cases import CASES
from tests.families import FAMILIES, STEPS, FourGroups, module, refusal, train
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
            if layout == "pp2" and FAMILIES[family].by_batch:
                assert all(map(math.isfinite, losses)) and losses != expected
                continue
            assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5, (layout, losses, expected)


@every
def test_techniques_train_or_are_refused(family: str) -> None:
    plain, _, _ = train(family)
    found = {name: refusal(family, case.active()) for name, case in CASES.items()}
    _compare(family, found)
    for name, case in CASES.items():
        if case.exact and not found[name]:
            net, _, _ = train(family, case.active())
            got, expected = flat(net), flat(plain)
            apart = float((got - expected).norm() / expected.norm())
            assert apart <= (1e-4 if case.rounds else 0.0), f"{name} changed weights"


@every
def test_plugins_train_or_are_refused(family: str) -> None:
    found: dict[str, str] = {}
    for name, case in PLUGINS.items():
        for precision in case.precisions:
            found[name] = refusal(family, plugins=[case.build(precision)]) or found.get(name, "")
    _compare(family, found)


# -- what moves the weights, in modules whose optimizer has groups and a schedule of its own

ROOMS = ("lightning_eff.optim.", "lightning_eff.budget.", "lightning_eff.memory.eight_bit_optimizer")
GROUPED = ("gpt2", "qwen3", "modernbert", "vit", "qwen3_moe", "resnet")


def _replaced(optimizer: type[Optimizer]) -> ReplaceOptimizer:
    low = {"rank": 4} if "rank" in inspect.signature(optimizer).parameters else {}  # the models' matrices are small
    return ReplaceOptimizer(f"lightning_eff.{optimizer.__name__}", lr=1e-3, **low)


def moving() -> dict[str, Callable[[], pl.Callback]]:
    """Every technique that moves weights or sets rates, and every optimizer in the place of the module's own."""
    exported = {name: getattr(lightning_eff, name) for name in lightning_eff.__all__}
    optimizers = [name for name, one in exported.items() if inspect.isclass(one) and issubclass(one, Optimizer)]
    return {
        **{name: case.active for name, case in CASES.items() if exported[name].__module__.startswith(ROOMS)},
        **{name: lambda name=name: _replaced(exported[name]) for name in optimizers},
    }


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "resnet" else pytest.mark.slow) for name in GROUPED]
)
def test_what_moves_weights_trains_four_groups_and_resumes(family: str, tmp_path: Path) -> None:
    """Under a list of schedules, accumulation, clipping and bf16-mixed, and bit for bit from the third step."""
    settings: dict[str, Any] = {
        "cls": FourGroups,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "precision": "bf16-mixed",
    }
    plain, _, _ = train(family, **settings)
    wrong: dict[str, str] = {}
    builders = moving()
    assert {"Muon", "SOAP", "LookSAM", "ExponentialMovingAverage", "BatchSizeWarmup"} <= builders.keys()
    for name, build in builders.items():
        saving = ModelCheckpoint(tmp_path / name, "{step}", every_n_train_steps=3, save_top_k=-1)
        net, losses, steps = train(family, build(), saving, enable_checkpointing=True, **settings)
        path = tmp_path / name / "step=3.ckpt"
        saved = torch.load(path, weights_only=True)
        module(family).load_state_dict(saved["state_dict"])
        again, _, _ = train(family, build(), resume=path, **settings)
        exact = name in CASES and CASES[name].exact
        held = {
            "finite": all(p.isfinite().all() for p in net.parameters()) and all(map(math.isfinite, losses)),
            "six steps": steps == STEPS,
            "acts": torch.equal(flat(net), flat(plain)) == exact,
            "resumes": torch.equal(flat(again), flat(net)),
        }
        if not all(held.values()):
            wrong[name] = str(held)
    assert wrong == {}
