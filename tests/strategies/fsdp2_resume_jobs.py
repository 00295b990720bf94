"""What two processes run for the tests of resumed runs under Lightning's FSDP2; see :mod:`tests.strategies.launch`."""

import logging
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from lightning_eff import ReplaceOptimizer
from lightning_eff.strategies._hybrid.shards import whole_of
from tests.cases import case_of
from tests.models import loader, trainer
from tests.strategies.technique_jobs import DIVIDED, TIMEOUT, shard_itself, without_noise

STEPS, SAVED = 6, (2, 3)  # the second step is the last one of some pairs and windows
ENDS = ("file", "folder")


def made(name: str) -> Any:
    """A technique by its name, or ``ReplaceOptimizer`` by the optimizer's."""
    if name.startswith("optimizer "):
        return ReplaceOptimizer(name.split()[1], lr=0.01)
    return DIVIDED.get(name, case_of(name).active)()


def run(name: str, form: str, root: Path, resume: Path | None = None) -> dict[str, Tensor]:
    """The weights and losses of a run that saves checkpoints, or that resumes."""
    model = "tiny_gpt" if name.startswith("optimizer ") else case_of(name).model
    pl.seed_everything(1, verbose=False)
    net, technique = without_noise(model), made(name)
    shard_itself(net, [technique])
    losses: list[Tensor] = []
    step = net.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        output: Any = step(*args, **kwargs)
        losses.append((output["loss"] if isinstance(output, dict) else output).detach().clone())
        return output

    net.training_step = training_step
    pl.seed_everything(1 if resume is None else 7, verbose=False)
    strategy = ModelParallelStrategy(
        2, 1, save_distributed_checkpoint=form == "folder", process_group_backend="gloo", timeout=TIMEOUT
    )
    saver = ModelCheckpoint(
        root if resume is None else root / "again",
        "{step}",
        every_n_train_steps=1,
        save_top_k=-1,
        enable_version_counter=False,
    )
    t = trainer(technique, saver, max_steps=STEPS, strategy=strategy, devices=2, enable_checkpointing=True)
    t.fit(net, loader(model, 4 * STEPS, shuffle=True), ckpt_path=resume)
    held = {name: whole_of(value).clone() for name, value in net.state_dict().items()}
    return {**held, "last loss": losses[-1]}


def all_of(pairs: list[list[str]], directory: str) -> dict[str, Any]:
    """Of each technique and form of checkpoint, by each step: what differs after a resumed run, or what it raised."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: dict[str, Any] = {}
    for name, form in pairs:
        print(name, form, flush=True)
        mine: dict[str, Any] = {}
        root = Path(directory, f"{name} {form}")
        try:
            whole = run(name, form, root)
            for at in SAVED:
                again = run(name, form, root, root / f"step={at}.ckpt")
                mine[str(at)] = [key for key in whole if key not in again or not torch.equal(whole[key], again[key])]
        except Exception as error:
            traceback.print_exc()
            mine["error"] = f"{type(error).__name__}: {error}"
        every: list[Any] = [None, None]
        torch.distributed.all_gather_object(every, mine)
        found[f"{name} {form}"] = every
    return found
