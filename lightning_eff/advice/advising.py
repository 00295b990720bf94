"""Advice on a run: exact changes that make it faster, measured on the run itself."""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_eff._cli.errors import UsageError
from lightning_eff._core import rng
from lightning_eff._core._lightning.names import is_a
from lightning_eff.advice._running.subject import Subject, from_configs
from lightning_eff.advice.engine import Engine, Findings
from lightning_eff.advice.outcomes import Outcome, Stack
from lightning_eff.advice.problems import Problem
from lightning_eff.advice.progress import Watchman
from lightning_eff.advice.reports.page import page
from lightning_eff.advice.reports.recipe import python, recipe
from lightning_eff.advice.reports.table import headline, record, text
from lightning_eff.advice.suggestions import Suggestion
from lightning_eff.bench.reports.drawing import require_extra

RECIPE, LOWER = "recipe.yaml", "recipe-lower-precision.yaml"


class Advice:
    """The result of :func:`advise`. ``print`` shows it as text, and a notebook as a page.

    Attributes:
        found: all findings.
    """

    def __init__(self, found: Findings) -> None:
        self.found = found

    @property
    def headline(self) -> str:
        """The advice in one sentence."""
        return headline(self.found)

    @property
    def stack(self) -> Stack:
        """The best exact stack, with its measured speed-up."""
        return self.found.stack

    @property
    def trials(self) -> list[Outcome]:
        """The result of each trial."""
        return self.found.outcomes

    @property
    def problems(self) -> list[Problem]:
        """Problems that were seen in the run."""
        return self.found.problems

    @property
    def suggestions(self) -> list[Suggestion]:
        """Techniques that change training and are worth a bench or a tune."""
        return self.found.suggestions

    @property
    def recipe(self) -> str:
        """The best exact stack as a config for ``lightning-eff fit``."""
        return recipe(self.found, self.found.stack, RECIPE)

    @property
    def python(self) -> str:
        """The best exact stack as Python; empty where nothing is gained."""
        return python(self.found.stack)

    def record(self) -> dict[str, Any]:
        """The advice as JSON."""
        return record(self.found)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``advice.html``, ``advice.json``, ``recipe.yaml`` and, where it gains, ``recipe-lower-precision.yaml``.

        Args:
            folder: it is made if it does not exist.

        Returns:
            The folder.
        """
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        (place / "advice.html").write_text(page(self.found), encoding="utf-8")
        (place / "advice.json").write_text(json.dumps(self.record(), indent=1) + "\n", encoding="utf-8")
        (place / RECIPE).write_text(self.recipe, encoding="utf-8")
        if self.found.lower.gains:
            (place / LOWER).write_text(recipe(self.found, self.found.lower, LOWER), encoding="utf-8")
        else:
            (place / LOWER).unlink(missing_ok=True)
        return place

    def __str__(self) -> str:
        return text(self.found)

    def _repr_html_(self) -> str:
        return page(self.found)


def advise(
    module: LightningModule | Callable[[], LightningModule],
    data: LightningDataModule | Any = None,
    *,
    trainer: Trainer | None = None,
    minutes: float = 3.0,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Advice:
    """Find out what makes a run faster without changing its numbers, by trying it.

    It trains copies of the module for some steps, and tries each exact technique and setting that could gain something. It
    measures the best ones together, and compares loss and gradients with those of the plain run. It also lists techniques that
    change training and are worth a ``bench``, and problems of the run. Your module, its data, the Trainer, the random state and
    the current folder stay unchanged.

    Args:
        module: the LightningModule, or a function that returns a new one.
        data: a LightningDataModule, a training loader, a pair of training and validation loaders, or None if the module has
            its own.
        trainer: the Trainer whose settings and callbacks the trials take over. None takes Lightning's defaults.
        minutes: the time that it may take, besides start-up.
        out: the folder for ``advice.html``, ``advice.json`` and ``recipe.yaml``. None writes no file.
        progress: show a progress bar.

    Returns:
        The advice. Print it, or show it in a notebook.

    Raises:
        ValueError: for a value out of range, or a module, data or callbacks that cannot be used.
        Exception: whatever the run itself raises in its first steps.

    Example:
        >>> advice = advise(model, datamodule, trainer=trainer, minutes=1)
        >>> print(advice)
    """
    _check(minutes)
    if trainer is not None and not is_a(trainer, Trainer):
        raise UsageError(
            f"advise(trainer={type(trainer).__name__}): expected a Lightning Trainer. Pass trainer=Trainer(...)."
        )
    if data is not None and not is_a(data, LightningDataModule) and not hasattr(data, "__iter__"):
        raise UsageError(
            f"advise(data={type(data).__name__}): expected a LightningDataModule or loaders. Pass advise(module, datamodule)."
        )
    return _advice(lambda folder: Subject(module, data, trainer, folder=folder), minutes, out, progress=progress)


def advise_configs(
    configs: list[str], *, minutes: float = 3.0, out: str | os.PathLike[str] | None = None, progress: bool = True
) -> Advice:
    """:func:`advise` for the run that ``lightning-eff fit`` would start with these configs."""
    _check(minutes)
    return _advice(lambda folder: from_configs(configs, folder), minutes, out, progress=progress)


def _check(minutes: float) -> None:
    require_extra()
    if not 0 < minutes < 24 * 60:
        raise UsageError(f"advise(minutes={minutes}): expected a number above 0. Use minutes=3.")


def _advice(subject: Callable[[str], Subject], minutes: float, out: Any, *, progress: bool) -> Advice:
    with tempfile.TemporaryDirectory(prefix="advise-") as folder, untouched():
        made = subject(folder)
        watch = Watchman(60 * minutes, enabled=progress)
        try:
            advice = Advice(Engine(made, watch).run())
        finally:
            watch.close()
    if out is not None:
        advice.save(out)
    return advice


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Leave random state, the environment and the current folder as they were."""
    environment, folder = dict(os.environ), os.getcwd()
    try:
        with rng.fork():
            yield
    finally:
        os.chdir(folder)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
