"""Short runs, checkpointed at every step and resumed from each: what the contract is tested with, alone and under DDP."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_eff import cli
from lightning_eff._core.technique import Technique
from tests.models import loader, module, trainer

Build = Callable[[], Sequence[Technique]]
NUM_STEPS = 12

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate_clip": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "bf16": {"precision": "bf16-mixed", "gradient_clip_val": 0.5},
    "validate": {"limit_val_batches": 2, "num_sanity_val_steps": 1, "val_check_interval": 2},
}


def fit(
    model: str,
    build: Build,
    *,
    directory: Path | None = None,
    resume: Path | None = None,
    callbacks: Sequence[pl.Callback] = (),
    samples: int = 20,
    **kwargs: Any,
) -> tuple[pl.LightningModule, pl.Trainer]:
    """Fit ``model`` with the techniques that ``build`` makes: 12 steps, 5 shuffled batches an epoch, dropout on.

    With a ``directory``, every step is checkpointed there. A resumed run starts from another seed, and so must get all its
    randomness from the checkpoint.
    """
    pl.seed_everything(1, verbose=False)
    net = module(model)
    if resume is not None:
        pl.seed_everything(99, verbose=False)
    extra: list[pl.Callback] = []
    if directory is not None:
        extra.append(ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=-1, filename="{step}"))
    settings = {"max_steps": NUM_STEPS, "enable_checkpointing": directory is not None, **kwargs}
    t = trainer(*build(), *callbacks, *extra, **settings)
    validate = loader(model, 8, shuffle=False, seed=5) if settings.get("limit_val_batches") else None
    t.fit(net, loader(model, samples), validate, ckpt_path=resume)
    return net, t


class SaveBatches(pl.Callback):
    """Saves a checkpoint as each of these batches of the run ends (all, if None), also within accumulation windows."""

    def __init__(self, directory: Path, batches: Sequence[int] | None = None) -> None:
        self.directory, self.batches = directory, batches

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        done = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        if self.batches is None or done in self.batches:
            trainer.save_checkpoint(self.directory / f"batch={done}.ckpt")


def resume_from_batches(
    model: str, build: Build, directory: Path, batches: Sequence[int] | None, **kwargs: Any
) -> dict[str, list[str]]:
    """Train five steps of three batches, two to close an epoch; what differs after a resume from each of ``batches``.

    The epoch has 5 batches of each process, so steps end with the batches 3, 5, 8, 10 and 13.
    """
    settings: dict[str, Any] = {"max_steps": 5, "accumulate_grad_batches": 3, **kwargs}
    whole = final_state(*fit(model, build, callbacks=[SaveBatches(directory, batches)], **settings))
    found: dict[str, list[str]] = {}
    for batch in batches or range(1, 13):
        path = directory / f"batch={batch}.ckpt"
        names = differences(whole, final_state(*fit(model, build, resume=path, **settings)))
        if names:
            found[path.stem] = names
    return found


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a run, by step."""
    return sorted(directory.glob("step=*.ckpt"), key=lambda path: int(path.stem.split("=")[1].split("-")[0]))


def final_state(net: pl.LightningModule, t: pl.Trainer) -> dict[str, torch.Tensor]:
    """Everything that a run leaves behind, by name: weights, buffers, optimizer state, and the global random state."""
    found = {f"weights/{name}": value.detach().clone() for name, value in net.state_dict().items()}
    for i, optimizer in enumerate(t.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[f"optimizer{i}/{index}/{name}"] = value.detach().clone()
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


def resume_from_every_step(model: str, build: Build, directory: Path, **kwargs: Any) -> dict[str, list[str]]:
    """Train, then resume from each checkpoint; what differs at the end from the undisturbed run, by checkpoint."""
    whole = final_state(*fit(model, build, directory=directory, **kwargs))
    saved = checkpoints(directory)
    assert len(saved) == NUM_STEPS, [path.name for path in saved]
    found: dict[str, list[str]] = {}
    for path in saved:
        found[path.stem] = differences(whole, final_state(*fit(model, build, resume=path, **kwargs)))
    # from the last one nothing is left to do: Lightning does not even start, but the weights must be there
    found[saved[-1].stem] = [name for name in found[saved[-1].stem] if name not in ("rng", "steps")]
    return {name: names for name, names in found.items() if names}


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
