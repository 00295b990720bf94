"""Train a package's module with a technique, resume it, load its checkpoint, and look for what is left behind."""

import contextlib
import functools
import importlib
import logging
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lightning_eff as eff
from tests.published.package import Package
from tests.published.techniques import TRIED, Tried

STEPS = 12
SAVED = 8  # in the middle of the second epoch, since a package's loader has six batches
SEED = 7
_WARNED = "does not repeat the batches of the interrupted epoch"


@dataclass(frozen=True)
class Outcome:
    """What came of one technique on one package: "works", "refused" or "failed", with the reason or the fault."""

    outcome: str
    reason: str = ""
    seconds: float = 0.0


class Failed(Exception):
    """A promise that was not kept."""


def _namespace(package: Package) -> Any:
    return importlib.import_module(package.trainer)


def built(package: Package) -> tuple[Any, Any]:
    _namespace(package).seed_everything(SEED, verbose=False)
    return package.build()


def fit(package: Package, tried: Tried | None, folder: Path, resume: Path | None = None) -> Any:
    """The module after twelve steps, of which the eighth is saved."""
    pl = _namespace(package)
    module, loader = built(package)
    one = tried.build() if tried is not None else None
    plugin = tried is not None and tried.plugin
    beside = [eff.ExactResume()] if tried is not None and tried.beside else []
    before = traces(module)
    saving = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED, save_top_k=-1)
    settings = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False} | {
        "enable_model_summary": False,
        "max_epochs": -1,
        "max_steps": STEPS,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
    }
    make = pl.Trainer if package.trainer_of is None else functools.partial(package.trainer_of, module)
    trainer = make(
        **{**settings, **package.settings},
        callbacks=[saving, *beside, *([one] if one is not None and not plugin else [])],
        **({"plugins": [one]} if plugin else {}),
    )
    pl.seed_everything(SEED, verbose=False)
    data = {"datamodule": loader} if isinstance(loader, pl.LightningDataModule) else {"train_dataloaders": loader}
    trainer.fit(module, **data, ckpt_path=resume, weights_only=not package.trusted)
    if trainer.global_step != STEPS:
        raise Failed(f"trained {trainer.global_step} of {STEPS} steps")
    return module, before, traces(module)


def traces(module: nn.Module) -> dict[str, Any]:
    """What a technique might leave behind: names on instances, classes, hooks and frozen parameters."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        hooks = {
            key: len(value) for key, value in vars(part).items() if key.endswith("hooks") and hasattr(value, "__len__")
        }
        own = {key for key in vars(part) if key not in ("_modules", "_parameters", "_buffers")}
        found[name] = {type(part).__qualname__, *own, *(f"{key}: {n}" for key, n in hooks.items() if n)}
    found |= {f"parameter {name}": p.requires_grad for name, p in module.named_parameters()}
    return found


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def _differs(one: dict[str, Tensor], two: dict[str, Tensor]) -> str:
    if one.keys() != two.keys():
        return f"names: {sorted(one.keys() ^ two.keys())[:3]}"
    apart = [name for name in one if not torch.equal(one[name].nan_to_num(), two[name].nan_to_num())]
    return f"{len(apart)} of {len(one)} tensors, such as {apart[0]}" if apart else ""


class Check:
    """All techniques on one package, each held against one plain run."""

    def __init__(self, package: Package, folder: Path) -> None:
        self.package = package
        self.folder = folder
        module, _, self.left = fit(package, None, folder / "plain")
        self.plain = _state(module)
        again, _, _ = fit(package, None, folder / "again")
        if differs := _differs(self.plain, _state(again)):
            raise Failed(f"plain Lightning does not repeat itself from a seed: {differs}")

    def outcome(self, name: str) -> Outcome:
        begun = time.perf_counter()
        try:
            outcome = Outcome("works", self._try(name, TRIED[name]))
        except Failed as failed:
            outcome = Outcome("failed", str(failed))
        except Exception as error:
            outcome = _judged(self.package, name, error)
        return Outcome(outcome.outcome, outcome.reason, round(time.perf_counter() - begun, 2))

    def _try(self, name: str, tried: Tried) -> str:
        """Hold the technique to what it promises; what it warned of, where that is a resume that cannot be exact."""
        folder = self.folder / name
        module, _, left = fit(self.package, tried, folder)
        whole = _state(module)
        if bad := [key for key, value in whole.items() if value.is_floating_point() and not value.isfinite().all()]:
            raise Failed(f"not finite: {bad[:3]}")
        self._acts(name, tried, whole)
        self._traces(tried, left)
        saved = next(iter(folder.glob(f"*step={SAVED}*.ckpt")), None)
        if saved is None:
            raise Failed("no checkpoint was saved")
        checkpoint = torch.load(saved, weights_only=not self.package.trusted)
        if self.package.trusted:
            torch.save(
                {key: checkpoint[key] for key in ("state_dict", "callbacks", "optimizer_states")}, folder / "own.ckpt"
            )
            torch.load(folder / "own.ckpt", weights_only=True)
        self._loads(tried, checkpoint["state_dict"])
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                again, _, _ = fit(self.package, tried, self.folder / f"{name}-resumed", resume=saved)
        except Exception as error:
            raise Failed(f"resume raises {told(error)}") from error
        if differs := _differs(whole, _state(again)):
            if any(re.search(_WARNED, str(one.message)) for one in said):
                return "a resumed run trains on other batches, and says so in a warning"
            raise Failed(f"resume differs: {differs}")
        return ""

    def _acts(self, name: str, tried: Tried, whole: dict[str, Tensor]) -> None:
        differs = _differs(self.plain, whole)
        if tried.close and differs:
            differs = (
                ""
                if all(torch.allclose(whole[k].float(), v.float(), 1e-4, 1e-6) for k, v in self.plain.items())
                else differs
            )
        if tried.exact and differs:
            raise Failed(f"changes what is trained: {differs}")
        if not tried.exact and not differs and name not in self.package.idle:
            raise Failed("does nothing, in silence: weights are those of plain Lightning")

    def _traces(self, tried: Tried, left: dict[str, Any]) -> None:
        if tried.architecture:
            return
        wrong = [key for key in self.left.keys() | left.keys() if self.left.get(key) != left.get(key)]
        if wrong:
            raise Failed(f"leaves a trace: {wrong[0]!r}: {self._apart(self.left.get(wrong[0]), left.get(wrong[0]))}")

    @staticmethod
    def _apart(plain: Any, left: Any) -> str:
        if isinstance(plain, set) and isinstance(left, set):
            return f"more {sorted(left - plain)}, fewer {sorted(plain - left)}"
        return f"{plain} became {left}"

    def _loads(self, tried: Tried, state: dict[str, Tensor]) -> None:
        plain, _ = built(self.package)
        if hasattr(plain, "configure_model"):
            plain.configure_model()
        if tried.architecture:
            technique = tried.build()
            eff.apply(plain, technique)
            missing, unexpected = plain.load_state_dict(state, strict=False)
            frozen = {key for key, p in plain.named_parameters(remove_duplicate=False) if not p.requires_grad}
            if unexpected or set(missing) - frozen:
                raise Failed(
                    f"checkpoint does not load into apply(plain): missing {missing[:3]}, unexpected {unexpected[:3]}"
                )
            return
        try:
            plain.load_state_dict(state)
        except RuntimeError as error:
            raise Failed(f"checkpoint does not load strictly: {told(error)}") from error


def told(error: BaseException) -> str:
    """An error in one line, with where it comes from."""
    at = traceback.extract_tb(error.__traceback__)[-3:]
    where = " < ".join(f"{'/'.join(Path(f.filename).parts[-2:])}:{f.lineno}" for f in reversed(at))
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]} [{where}]"


def _judged(package: Package, name: str, error: Exception) -> Outcome:
    """A refusal begins with the technique's name and says what its package's file expects; all else is a failure."""
    text = " ".join(str(error).split())
    if not text.startswith(name.partition("(")[0]):
        return Outcome("failed", f"crash: {told(error)}")
    expected = package.refused.get(name)
    if expected is None or not re.search(expected, text):
        return Outcome("failed", f"refused, which was not expected: {text[:900]}")
    return Outcome("refused", text)


def quiet() -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "pytorch_lightning", "lightning", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)


def check(package: Package, names: Sequence[str]) -> dict[str, Outcome]:
    """What came of these techniques on the package."""
    quiet()
    found = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # some packages write beside the process
        one = Check(package, Path(folder))
        for name in names:
            found[name] = one.outcome(name)
            print(package.distribution, name, *asdict(found[name]).values(), flush=True)
    return found


#: What is tried through a package's own fit, too. The average is of the whole run, since a fit may return its best checkpoint,
#: which may be of a time before a tail.
OWN_FIT = {
    **{
        name: TRIED[name].build
        for name in ("ExactResume", "ReplaceOptimizer", "LearningRateSchedule", "SharpnessAwareMinimization")
    },
    "ExponentialMovingAverage": lambda: eff.ExponentialMovingAverage(3.0),
}


def own_fit(package: Package) -> dict[str, Outcome]:
    """What came of techniques that the package's own fit was given as callbacks."""
    if package.fit is None:
        return {}
    quiet()
    found: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        _namespace(package).seed_everything(SEED, verbose=False)
        plain = _state(package.fit([]))
        for name, build in OWN_FIT.items():
            begun = time.perf_counter()
            _namespace(package).seed_everything(SEED, verbose=False)
            try:
                differs = _differs(plain, _state(package.fit([build()])))
                acted = bool(differs) != TRIED[name].exact
                wrong = f"changes what is trained: {differs}" if differs else "does nothing, in silence"
                outcome = Outcome("works") if acted else Outcome("failed", wrong)
            except Exception as error:
                outcome = _judged(package, name, error)
            found[name] = Outcome(outcome.outcome, outcome.reason, round(time.perf_counter() - begun, 2))
            print(package.distribution, "own fit", name, *asdict(found[name]).values(), flush=True)
    return found
