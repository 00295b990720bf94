"""Lightning's two names: what is of both, which objects are taken by which, and that no import depends on the other."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as own
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

import lightning_eff
from lightning_eff._core._lightning import names
from lightning_eff._core.wrapping import WrappingPrecision
from tests.pl import pytorch_lightning as other

ROOT = Path(__file__).parent.parent.parent
PACKAGES = {"lightning.pytorch": own, "pytorch_lightning": other}


class Inner(Precision):
    """Of somebody's own, written with lightning.pytorch."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().optimizer_step(*args, **kwargs)


def test_a_class_of_either_package_is_of_the_kind_that_is_asked_for() -> None:
    for package in PACKAGES.values():
        strategy = package.Trainer(accelerator="cpu", devices=1, logger=False, barebones=True).strategy
        assert names.is_a(strategy, SingleDeviceStrategy) and names.is_exactly(strategy, SingleDeviceStrategy)
        assert names.is_a(strategy, DDPStrategy, Strategy) and not names.is_a(strategy, DDPStrategy)
        assert not names.is_exactly(strategy, Strategy)
        assert names.is_subclass(type(strategy), Strategy) and not names.is_subclass(type(strategy), DDPStrategy)
    assert names.both(DDPStrategy, int) == (DDPStrategy, int, other.strategies.DDPStrategy)
    assert names.is_a(3, int) and not names.is_a("3", int, DDPStrategy)


def test_what_belongs_to_which_package() -> None:
    for name, package in PACKAGES.items():
        assert names.package_of(package.LightningModule()) == names.package_of(package.Trainer) == name
        assert names.like(package.LightningModule(), Precision) is package.plugins.precision.Precision
        assert names.renamed(other.callbacks.EarlyStopping, name) == f"{name}.callbacks.EarlyStopping"
        assert names.module_like(package.Trainer, "lightning.pytorch.strategies") is package.strategies
    assert names.package_of(torch.nn.Linear(1, 1)) is None
    assert names.like(torch.nn.Linear(1, 1), Precision) is Precision


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_overridden_hooks_are_told_in_either_package(package: str) -> None:
    pl = PACKAGES[package]

    class Net(pl.LightningModule):
        def training_step(self, batch: Any) -> None: ...

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any: ...

    assert names.is_overridden("training_step", Net()) and not names.is_overridden("backward", Net())
    assert names.is_overridden("train_dataloader", Data()) and not names.is_overridden("val_dataloader", Data())
    assert not names.is_overridden("backward", Net(), own.LightningModule)
    assert not names.is_overridden("training_step", None)
    with pytest.raises(ValueError, match="int is not a module, data module or callback"):
        names.is_overridden("setup", 3)


def test_what_is_exported_is_of_both_packages() -> None:
    exported = [getattr(lightning_eff, name) for name in lightning_eff.__all__]
    kinds = {"Callback": 0, "Precision": 0, "Strategy": 0}
    for cls in (one for one in exported if isinstance(one, type)):
        for kind in (Precision, Strategy, own.Callback):
            if issubclass(cls, kind):
                assert issubclass(cls, names.both(kind)[1]), cls
                kinds[kind.__name__] += 1
    assert min(kinds.values()) > 1


def test_a_plugin_inherits_from_the_package_of_the_module_that_it_converts() -> None:
    plugin = lightning_eff.FP8Precision(base="bf16-mixed", backend="emulated")
    inner = plugin.inner
    assert isinstance(plugin, (Precision, other.plugins.Precision)) and type(inner) is MixedPrecision
    for package in (other, own, other):
        names.adapt(plugin, package.LightningModule())
        WrappingPrecision.convert_module(plugin, package.LightningModule())
        assert type(plugin).__mro__[-1] is object and isinstance(plugin, lightning_eff.FP8Precision)
        assert type(plugin).__qualname__ == "FP8Precision"  # its name in checkpoints
        assert type(inner) is package.plugins.MixedPrecision
        assert next(c for c in type(plugin).__mro__ if names.is_lightnings(c)) is package.plugins.Precision
    assert type(copy.deepcopy(plugin)) is type(plugin) is type(pickle.loads(pickle.dumps(plugin)))
    names.adapt(plugin, own.LightningModule())
    assert type(plugin) is lightning_eff.FP8Precision


def test_super_of_an_adapted_class_is_the_other_packages() -> None:
    made = names.adapted(Inner, "pytorch_lightning")
    assert made is names.adapted(Inner, "pytorch_lightning") is names.adapted(made, "pytorch_lightning")
    assert Precision not in made.__mro__ and made.__mro__[1:3] == (Inner, other.plugins.Precision)
    assert names.adapted(Inner, "lightning.pytorch") is Inner and names.adapted(Inner, None) is Inner

    class Further(made):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
        pass

    assert Further.__mro__[1] is made and isinstance(Further(), other.plugins.Precision)


@pytest.mark.parametrize("first", ["lightning_eff", "pytorch_lightning", "lightning.pytorch"])
def test_the_order_of_imports_does_not_matter_and_none_brings_the_other_package(first: str) -> None:
    code = f"""
import sys, {first}, lightning_eff
assert ("pytorch_lightning" in sys.modules) == {first == "pytorch_lightning"}
from lightning_eff import Mixup, FP8Precision, CompressedDDPStrategy
assert ("pytorch_lightning" in sys.modules) == {first == "pytorch_lightning"}
import pytorch_lightning as pl
assert issubclass(Mixup, pl.Callback) and issubclass(FP8Precision, pl.plugins.Precision)
from lightning_eff import SharpnessAwareMinimization, HybridParallelStrategy
assert issubclass(SharpnessAwareMinimization, pl.Callback) and issubclass(HybridParallelStrategy, pl.strategies.Strategy)
for name in ("hybrid", "ddp_powersgd"):
    trainer = pl.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, barebones=True)
    assert isinstance(trainer.strategy, pl.strategies.Strategy)
    assert any(c is pl.strategies.ParallelStrategy for c in type(trainer.strategy).__mro__)
    assert not any(c.__module__.startswith("lightning.") for c in type(trainer.strategy).__mro__)
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringModel
args = ["--trainer.callbacks+=SequenceLengthWarmup", "--trainer.callbacks.start=8", "--trainer.accelerator=cpu"]
cli = LightningCLI(BoringModel, run=False, args=args, save_config_callback=None)
assert isinstance(cli.trainer.callbacks[0], lightning_eff.SequenceLengthWarmup)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT, env=environment)


def test_a_module_and_a_trainer_of_different_packages_are_refused_by_lightning_and_nothing_is_left() -> None:
    from tests.models import loader, trainer
    from tests.pl.models import module

    net, technique = module("tiny_gpt"), lightning_eff.SharpnessAwareMinimization()
    before = dict(vars(net))
    with pytest.raises(TypeError, match="`model` must be a `LightningModule`"):
        trainer(technique, max_steps=1).fit(net, loader("tiny_gpt"))
    assert vars(net) == before and technique._session is None
