"""What the processes of the tests of local SGD run: ``python -m tests.strategies.local_sgd_jobs DIRECTORY JOB ...``."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_eff.strategies.local_sgd import LocalSGD
from tests.models import flat, loader, module, trainer
from tests.runs import checkpoints, differences, final_state, fit
from tests.strategies.communication_launch import alike, counting, gathered, main, neutral


def local_equals_ddp(name: str, root: Path) -> dict[str, Any]:
    """Averaging after every step of SGD with momentum against DDP; and with an interval of 3, how far ranks drift."""

    class Drift(pl.Callback):
        def __init__(self) -> None:
            self.alike: list[bool] = []
            self.bytes: list[float] = []

        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            self.scope = counting()
            self.sums = self.scope.__enter__()

        def on_train_batch_end(self, trainer: pl.Trainer, net: pl.LightningModule, *args: Any) -> None:
            self.scope.__exit__(None, None, None)
            self.bytes.append(sum(self.sums.values()))
            self.alike.append(alike(flat(net)))

    def run(*techniques: Any) -> tuple[pl.LightningModule, Drift]:
        drift = Drift()
        pl.seed_everything(1, verbose=False)
        net = module("classifier", batch_norm=False, momentum=0.9)
        net.head[0].p = 0.0  # type: ignore[union-attr]
        trainer(*techniques, drift, max_steps=12, strategy="ddp", devices=2).fit(net, loader("classifier", 40))
        return net, drift

    plain, _ = run()
    every, _ = run(LocalSGD(interval=1))
    third, drift = run(LocalSGD(interval=3, warmup_steps=2))
    numel = sum(p.numel() for p in plain.parameters())
    return {
        "error": float((flat(every) - flat(plain)).abs().max()),
        "moved": float((flat(third) - flat(plain)).abs().max()),
        "alike": drift.alike,
        "bytes": [b / (4 * numel) for b in drift.bytes],
    }


def local_resume(name: str, root: Path) -> dict[str, Any]:
    """Resume from where ranks met and from between; what all checkpoints hold; and going on in plain DDP."""
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "samples": 40}

    def build() -> list[Any]:
        return [LocalSGD(interval=3, warmup_steps=2)]

    class Own(pl.Callback):
        """The mean of all ranks' own weights after each step, computed here."""

        means: dict[int, Tensor] = {}

        def on_train_batch_end(self, trainer: pl.Trainer, net: pl.LightningModule, *args: Any) -> None:
            every = gathered(flat(net))
            self.means[trainer.global_step] = torch.stack(every).double().mean(dim=0)

    directory = root / "local"
    own = Own()
    net, t = fit("tiny_gpt", build, directory=directory, callbacks=[own], **settings)
    whole = final_state(net, t)
    same = alike(flat(net))
    saved = checkpoints(directory)
    dist.barrier()
    found: dict[str, list[str]] = {}
    error, sizes = 0.0, []
    for path in saved:
        names = []
        if path in saved[:2] + saved[4:7] + saved[-1:]:
            names = differences(whole, final_state(*fit("tiny_gpt", build, resume=path, **settings)))
        if path is saved[-1]:
            names = [key for key in names if key not in ("rng", "steps")]
        if names:
            found[path.stem] = names
        checkpoint = torch.load(path, weights_only=True)
        again = module("tiny_gpt")
        again.load_state_dict(checkpoint["state_dict"], strict=True)
        error = max(error, float((flat(again).double() - own.means[checkpoint["global_step"]]).abs().max()))
        state = next(value for key, value in checkpoint["callbacks"].items() if key.startswith("LocalSGD"))
        sizes.append([len(state["weights"]), len(state["optimizers"])])
    _, plain = fit("tiny_gpt", neutral, resume=saved[6], **settings)
    return {
        "differences": gathered(found),
        "alike": same,
        "error": error,
        "sizes": sizes,
        "plain": plain.global_step,
    }


def local_validates(name: str, root: Path) -> dict[str, Any]:
    """What validation sees: the mean on all ranks, and afterwards each rank's own weights again."""
    seen: list[bool] = []
    before: list[Tensor] = []
    kept: list[bool] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, net: pl.LightningModule, *args: Any) -> None:
            before.append(flat(net).clone())

        def on_validation_batch_start(self, trainer: pl.Trainer, net: pl.LightningModule, *args: Any) -> None:
            seen.append(alike(flat(net)))

        def on_train_batch_start(self, trainer: pl.Trainer, net: pl.LightningModule, *args: Any) -> None:
            if before:
                kept.append(torch.equal(flat(net), before[-1]))

    technique = LocalSGD(interval=4)
    fit(
        "tiny_gpt",
        lambda: [technique],
        callbacks=[Look()],
        strategy="ddp",
        devices=2,
        samples=40,
        limit_val_batches=1,
        val_check_interval=1,
    )
    return {"seen": seen, "kept": kept, "report": {k: float(v) for k, v in technique.report().items()}}


if __name__ == "__main__":
    main((local_equals_ddp, local_resume, local_validates))
