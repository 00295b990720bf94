"""Short runs, checkpointed at every step and resumed from each: what the contract is tested with, alone and under DDP."""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_eff import cli
from lightning_eff._core.technique import Technique
from lightning_eff.strategies._hybrid.shards import local
from tests.models import loader, module, trainer

Build = Callable[[], Sequence[Technique]]
NUM_STEPS = 12

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate_clip": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "bf16": {"precision": "bf16-mixed", "gradient_clip_val": 0.5},
    "validate": {"limit_val_batches": 2, "num_sanity_val_steps": 1, "val_check_interval": 2},
}


class _SaveSteps(ModelCheckpoint):
    """Saves a checkpoint after each of these optimizer steps, or after every step if None: saving takes as long as training."""

    def __init__(self, directory: Path, steps: Collection[int] | None) -> None:
        super().__init__(directory, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        self.steps = steps

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.steps is None or trainer.global_step in self.steps:
            super().on_train_batch_end(trainer, *args)


def fit(
    model: str,
    build: Build,
    *,
    directory: Path | None = None,
    steps: Collection[int] | None = None,
    resume: Path | None = None,
    callbacks: Sequence[pl.Callback] = (),
    samples: int = 20,
    **kwargs: Any,
) -> tuple[pl.LightningModule, pl.Trainer]:
    """Fit ``model`` with the techniques that ``build`` makes: 12 steps, 5 shuffled batches an epoch, dropout on.

    With a ``directory``, every step is checkpointed there, or each of ``steps``. A resumed run starts from another seed, and so
    must get all its randomness from the checkpoint.
    """
    pl.seed_everything(1, verbose=False)
    net = module(model)
    if resume is not None:
        pl.seed_everything(99, verbose=False)
    extra: list[pl.Callback] = []
    if directory is not None:
        extra.append(_SaveSteps(directory, steps))
    settings = {"max_steps": NUM_STEPS, "enable_checkpointing": directory is not None, **kwargs}
    t = trainer(*build(), *callbacks, *extra, **settings)
    validate = loader(model, 8, shuffle=False, seed=5) if settings.get("limit_val_batches") else None
    t.fit(net, loader(model, samples), validate, ckpt_path=resume)
    return net, t


@functools.cache
def plain(model: str, precision: Any = "32-true") -> tuple[pl.LightningModule, dict[str, torch.Tensor]]:
    """The module after a run of no technique, which is the same for all, and what that run leaves behind: both only read."""
    net, t = fit(model, list, precision=precision)
    return net, final_state(net, t)


class _Later:
    """An executor that does its work when it is shut down."""

    def __init__(self) -> None:
        self.work: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.work.append(functools.partial(fn, *args, **kwargs))

    def shutdown(self, **kwargs: Any) -> None:
        for do in self.work:
            do()
        self.work.clear()


class LateFiles(AsyncCheckpointIO):
    """Writes checkpoints as slowly as a background thread may: when the run is over, and all tensors have changed."""

    def _ensure_setup(self) -> None:
        if self._executor is None:
            self._executor = _Later()  # pyright: ignore[reportAttributeAccessIssue]


class SaveBatches(pl.Callback):
    """Saves a checkpoint as each of these batches of the run ends (all, if None), also within accumulation windows."""

    def __init__(self, directory: Path, batches: Sequence[int] | None = None) -> None:
        self.directory, self.batches = directory, batches

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        done = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        if self.batches is None or done in self.batches:
            trainer.save_checkpoint(self.directory / f"batch={done}.ckpt")


class Interrupt(pl.Callback):
    """Saves a checkpoint as this batch of the run ends, or as this optimizer step does, and stops the run there."""

    def __init__(self, path: Path, *, batch: int | None = None, step: int | None = None) -> None:
        self.path, self.batch, self.step = path, batch, step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        done = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        if (self.batch is not None and done >= self.batch) or (
            self.step is not None and trainer.global_step >= self.step
        ):
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def interrupted(
    model: str,
    build: Build,
    first: Path,
    then: Sequence[Interrupt],
    **kwargs: Any,
) -> dict[str, torch.Tensor]:
    """What a run leaves behind that goes on from a checkpoint, and is interrupted and resumed again at each of ``then``."""
    path = first
    for stop in then:
        fit(model, build, resume=path, callbacks=[stop], **kwargs)
        path = stop.path
    return final_state(*fit(model, build, resume=path, **kwargs))


def _anywhere(found: Any) -> bool:
    """Whether some rank has found something: what is looked for then, all ranks look for together."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return bool(found)
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, bool(found))
    return any(every)


LIVES = 4  # of one run that is interrupted again and again, at most


def resume_from_batches(
    model: str,
    build: Build,
    directory: Path,
    batches: Sequence[int] | None,
    *,
    look: Callable[[pl.LightningModule, pl.Trainer], None] | None = None,
    **kwargs: Any,
) -> dict[str, list[str]]:
    """Train five steps of three batches, two to close an epoch; what differs after a resume from each of ``batches``.

    The epoch has 5 batches of each process, so steps end with the batches 3, 5, 8, 10 and 13. A run that is resumed from
    one of them is interrupted at a later one, and goes on from there; where that ends otherwise, each is tried alone.

    Args:
        model: a module of ``tests.models``.
        build: makes the techniques.
        directory: for checkpoints.
        batches: of the run, counted from 1; all but the last ones, if None.
        look: called with the undisturbed run's module and trainer.
        kwargs: of the trainer.
    """
    settings: dict[str, Any] = {"max_steps": 5, "accumulate_grad_batches": 3, **kwargs}
    net, t = fit(model, build, callbacks=[SaveBatches(directory, batches)], **settings)
    whole = final_state(net, t)
    if look is not None:
        look(net, t)
    asked = sorted(batches or range(1, 13))
    paths = {batch: directory / f"batch={batch}.ckpt" for batch in asked}
    found: dict[str, list[str]] = {}
    every = -(-len(asked) // LIVES)
    for i in range(every):
        first, *later = asked[i::every]
        stops = [Interrupt(directory / f"again-{batch}.ckpt", batch=batch) for batch in later]
        names = differences(whole, interrupted(model, build, paths[first], stops, **settings))
        if names:
            found[f"{paths[first].stem}, then {later}"] = names
    if not _anywhere(found):
        return {}
    return _one_by_one(model, build, whole, paths.values(), **settings) or found


def _one_by_one(
    model: str, build: Build, whole: dict[str, torch.Tensor], paths: Iterable[Path], **kwargs: Any
) -> dict[str, list[str]]:
    """What differs after a resume from each checkpoint alone, to the end."""
    found = {path.stem: differences(whole, final_state(*fit(model, build, resume=path, **kwargs))) for path in paths}
    return {name: names for name, names in found.items() if names}


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a run, by step."""
    return sorted(directory.glob("step=*.ckpt"), key=step_of)


def step_of(checkpoint: Path) -> int:
    """After which step of a run it was saved."""
    return int(checkpoint.stem.split("=")[1].split("-")[0])


def final_state(net: pl.LightningModule, t: pl.Trainer) -> dict[str, torch.Tensor]:
    """All that a run leaves on this process, by name, on the host: weights, buffers, optimizer state, global random state."""
    found = {f"weights/{name}": value.detach().cpu().clone() for name, value in net.state_dict().items()}
    for i, optimizer in enumerate(t.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[f"optimizer{i}/{index}/{name}"] = local(value).detach().cpu().clone()
    found["rng"] = torch.get_rng_state()
    found["steps"] = torch.tensor([t.global_step, t.current_epoch])
    return found


def largest(values: Iterable[float]) -> float:
    """The largest of them, or NaN if there is one, which max() may pass over."""
    return float(torch.tensor([*values], dtype=torch.float64).max())


def differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """The names under which two final states are not bit for bit the same."""
    return sorted(
        name for name in a.keys() | b.keys() if name not in a or name not in b or not torch.equal(a[name], b[name])
    )


def resume_from_every_step(
    model: str,
    build: Build,
    directory: Path,
    *,
    each: bool = False,
    third: int | None = None,
    whole: dict[str, torch.Tensor] | None = None,
    late: bool = False,
    **kwargs: Any,
) -> dict[str, list[str]]:
    """Train, then resume from each step; what differs at the end from the undisturbed run, by checkpoint.

    A run that is resumed from a step is interrupted three steps on, and goes on from there, so that few runs resume from all
    of them; where one ends otherwise, each checkpoint is tried alone.

    Args:
        model: a module of ``tests.models``.
        build: makes the techniques.
        directory: for checkpoints.
        each: resume from each of the undisturbed run's checkpoints and train to the end, whatever comes of it.
        third: 0, 1 or 2: resume from a third of the steps only, every third one from this one on.
        whole: what an undisturbed run left behind whose checkpoints are in ``directory`` already, those of the steps that are
            resumed from and the last one; it is made, if None.
        late: write the undisturbed run's checkpoints when it is over.
        kwargs: of the trainer.
    """
    every = NUM_STEPS // LIVES
    firsts = [i + 1 for i in (range(every) if third is None else [third])]
    steps = range(1, NUM_STEPS + 1) if each else [*firsts, NUM_STEPS]
    if whole is None:
        files = {"plugins": [*kwargs.get("plugins", []), LateFiles()]} if late else {}
        whole = final_state(*fit(model, build, directory=directory, steps=steps, **{**kwargs, **files}))
    saved = {step_of(path): path for path in checkpoints(directory)}
    assert saved.keys() >= {*steps}, [*saved]
    found: dict[str, list[str]] = {}
    for first in [] if each else firsts:
        stops = [
            Interrupt(directory / f"again-{step}.ckpt", step=step) for step in range(first + every, NUM_STEPS, every)
        ]
        names = differences(whole, interrupted(model, build, saved[first], stops, **kwargs))
        if names:
            found[f"{saved[first].stem}, then every {every} steps"] = names
    if each:
        found = _one_by_one(model, build, whole, [saved[step] for step in range(1, NUM_STEPS)], **kwargs)
    elif _anywhere(found):
        fit(model, build, directory=directory / "each", **kwargs)
        found = _one_by_one(model, build, whole, checkpoints(directory / "each")[:-1], **kwargs) or found
    # from the last one nothing is left to do: Lightning does not even start, but the weights must be there
    names = differences(whole, final_state(*fit(model, build, resume=saved[NUM_STEPS], **kwargs)))
    if left := [name for name in names if name not in ("rng", "steps")]:
        found[saved[NUM_STEPS].stem] = left
    return found


def fit_yaml(
    folder: Path,
    technique: str,
    arguments: dict[str, Any],
    *,
    model: str = "TinyClassifier",
    data: str = "Classes",
    keeps_state: bool = True,
    **settings: Any,
) -> None:
    """Train ``TinyClassifier`` by the command line, from a YAML whose trainer has these settings and the one technique.

    Raises an AssertionError unless the run took its steps, and its checkpoint holds what the technique keeps.

    Args:
        folder: of the YAML.
        technique: its name.
        arguments: of it.
        model: another module of ``tests.models``, or a dotted path.
        data: of ``tests.cli_data``, what it trains on, or a dotted path.
        keeps_state: whether the technique has anything to keep.
        settings: of the trainer.
    """
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "default_root_dir": str(folder)}
    named = [{"class_path": technique, "init_args": arguments}]
    config = {
        "trainer": {**quiet, **settings, "callbacks": named},
        "model": {"class_path": model if "." in model else f"tests.models.{model}"},
        "data": {"class_path": data if "." in data else f"tests.cli_data.{data}"},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    cli.main(["fit", "--config", str(path)])
    newest = max(folder.rglob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns)
    saved = torch.load(newest, weights_only=True)
    assert saved["global_step"] == settings.get("max_steps", saved["global_step"]) > 0
    assert keeps_state == any(key.split("{")[0] == technique for key in saved["callbacks"]), [*saved["callbacks"]]
