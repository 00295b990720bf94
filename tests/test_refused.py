"""The page of refusals: each message that it quotes is what such a run is told."""

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_eff as le
from lightning_eff import cli
from lightning_eff._core._run.checks import check_run
from lightning_eff.bench.calibration import check_rate, check_same
from tests import cases, models
from tests.models import TinyClassifier, TinyGPT

PAGE = (Path(__file__).parent.parent / "docs" / "how" / "refused.md").read_text()


def fit(module: pl.LightningModule, *callbacks: pl.Callback, data: Any = "classifier", **settings: Any) -> None:
    """Two steps."""
    loader = models.loader(data) if isinstance(data, str) else data
    path = settings.pop("ckpt_path", None)
    models.trainer(*callbacks, **{"max_steps": 2, **settings}).fit(module, loader, ckpt_path=path)


def command(*words: str) -> None:
    """A command, whose words on the standard error stand in for an exception's."""
    cli.main(["fit", "--model", "tests.models.TinyClassifier", "--data", "tests.cli_data.Classes", *words])


class Manual(TinyClassifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Idle(TinyClassifier):
    def configure_optimizers(self) -> None:
        return None


class Newton(TinyClassifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class Pretrained(models.HuggingFace):
    """A model that says where its weights came from, as ``from_pretrained`` leaves it."""

    def __init__(self) -> None:
        model = models.hugging_face("gpt2").model
        model.config._name_or_path = model.name_or_path = "gpt2"
        super().__init__(model)


def sharded() -> None:
    t = models.trainer()
    t._accelerator_connector.strategy = pl.strategies.ModelParallelStrategy(1, 1)
    check_run(t, TinyGPT(), [le.SharpnessAwareMinimization()], has_end=True)


def other_recipe(folder: Path) -> None:
    trainer = models.trainer(max_steps=1)
    trainer.fit(TinyGPT(), models.loader("tiny_gpt"))
    trainer.save_checkpoint(folder / "plain.ckpt")
    fit(TinyGPT(), replaced(), data="tiny_gpt", max_steps=3, ckpt_path=folder / "plain.ckpt")


def replaced() -> pl.Callback:
    return le.ReplaceOptimizer(functools.partial(le.Muon, lr=0.1))


def without_extra() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "kornia", None)
        fit(TinyClassifier(), le.RandAugment())


def stacking(last: int) -> pl.Callback:
    return le.ProgressiveStacking(stages=[(0.0, 2), (0.5, last)])


DATA = {"validation": ["a"], "training": {"length": 1, "items": ""}}
#: What the page quotes, and a run that is told so.
REFUSED: dict[str, Callable[[Path], Any]] = {
    "SelectiveBackprop(keep=1.5): expected a number in (0, 1]": lambda _: le.SelectiveBackprop(keep=1.5),
    "is not installed. In a clone of lightning_eff, run: pip install -c constraints.txt '.[...]'": lambda _: (
        without_extra()
    ),
    "Did you mean 'SelectiveBackprop'?": lambda _: command("--trainer.callbacks+=SelectivBackprop"),
    "needs 'score': expected it under its init_args": lambda _: command("--trainer.callbacks+=DifficultyPacing"),
    "is a precision plugin; expected it under trainer.plugins": lambda _: command("--trainer.callbacks+=FP8Precision"),
    "no linear layer of TinyGPT is named 'nothing'": lambda _: le.apply(TinyGPT(), le.LowRankLinear(names=["nothing"])),
    "found no stack of repeated blocks": lambda _: fit(cases.no_blocks(), stacking(4)),
    "matches no submodule of": lambda _: fit(TinyGPT(), le.LayerFreezing(layers="blok.*"), data="tiny_gpt"),
    "stage 1 needs 99 blocks": lambda _: fit(TinyGPT(), stacking(99), data="tiny_gpt"),
    "training_step called none of torch.nn.functional's": lambda _: fit(cases.own_loss(), le.ImportanceSampling()),
    "has automatic_optimization=False": lambda _: fit(Manual(), le.SelectiveBackprop()),
    "returned no optimizer": lambda _: fit(Idle(), replaced()),
    "returned LBFGS": lambda _: fit(Newton(), le.ScheduleFree()),
    "which is compiled as a whole": lambda _: fit(torch.compile(TinyGPT()), stacking(4), data="tiny_gpt"),  # pyright: ignore[reportArgumentType]
    "is for random weights": lambda _: fit(Pretrained(), le.OrthogonalInit(), data="gpt2"),
    "the Trainer has no end": lambda _: fit(TinyClassifier(), le.LearningRateSchedule(), max_steps=-1, max_epochs=-1),
    "is not a torch DataLoader": lambda _: fit(
        TinyClassifier(), le.DifficultyPacing(score="loss"), data=[torch.zeros(1)]
    ),
    "keeps each parameter in pieces on several processes": lambda _: sharded(),
    "which has no float8 matrix units": lambda _: fit(TinyClassifier(), plugins=[le.FP8Precision()]),
    "the checkpoint was saved without it": other_recipe,
    "cannot train together: both choose the samples": lambda _: fit(
        TinyClassifier(), le.ImportanceSampling(), le.SelectiveBackprop()
    ),
    "Found more than one stateful callback": lambda _: fit(
        TinyClassifier(), le.SelectiveBackprop(), le.SelectiveBackprop(keep=0.3)
    ),
    "Choose one.": lambda _: models.trainer(plugins=[le.FP8Precision()], precision="bf16-mixed"),
    "cannot be made plain": lambda _: le.export(le.apply(TinyGPT(), le.SwapActivation("relu2"))),
    "got a learning rate that ends at 100% of its peak": lambda _: check_rate(
        "a", {"peak_at": 0.0, "last": 1.0, "peak": 1.0}, 20
    ),
    "metrics on other data do not compare": lambda _: check_same(
        "b", {"data": DATA}, {"data": {**DATA, "validation": ["c"]}}, other_training_data=False
    ),
}


def quoted() -> list[str]:
    """The left cells of the page's tables."""
    return re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


def test_the_page_and_this_list_are_of_the_same_kinds() -> None:
    assert quoted() == list(REFUSED)


@pytest.mark.parametrize("words", REFUSED)
def test_such_a_run_is_told_so(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available() and "float8" in words:
        pytest.skip("this machine may have them")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)
    with pytest.raises((ValueError, RuntimeError, ImportError, SystemExit)) as told:
        REFUSED[words](tmp_path)
    text = " ".join(f"{told.value} {capsys.readouterr().err}".split())
    before, _, after = words.partition("[...]")
    assert before in text and after in text
    assert not any(Path(tmp_path).rglob("*.ckpt")) or words == "the checkpoint was saved without it", (
        "before the first step"
    )
