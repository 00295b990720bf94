"""What the processes of the tests of JointSpar run: ``python -m tests.strategies.joint_spar_jobs DIRECTORY JOB ...``."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_eff._core.session import Session
from lightning_eff.strategies.joint_spar import JointSpar
from tests.models import TinyGPT, flat, loader, trainer
from tests.strategies.communication_launch import alike, counting, gathered, main


class All(JointSpar):
    """All layers, each with a probability of 1."""

    def on_optimizers(self, session: Session) -> None:
        super().on_optimizers(session)
        self._p = torch.ones(len(self._layers), dtype=torch.float64)


class Bytes(pl.Callback):
    """What each batch sends, in the bytes of all gradients."""

    def __init__(self) -> None:
        self.bytes: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.scope = counting()
        self.sums = self.scope.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.scope.__exit__(None, None, None)
        self.bytes.append(self.sums["all_reduce"] / (4 * flat(pl_module).numel()))


def run(*callbacks: Any, steps: int) -> TinyGPT:
    pl.seed_everything(1, verbose=False)
    net = TinyGPT(2, dropout=0.0)
    trainer(*callbacks, max_steps=steps, strategy="ddp", devices=2).fit(net, loader("tiny_gpt", 80))
    return net


def all_drawn(name: str, root: Path) -> dict[str, Any]:
    """Against plain DDP."""
    sent = Bytes()
    plain, every = run(steps=4), run(All(share=0.5, rate=0.0), sent, steps=4)
    return {"same": all(gathered(torch.equal(flat(plain), flat(every)))), "bytes": sent.bytes}


def some_drawn(name: str, root: Path) -> dict[str, Any]:
    """What is sent, and what gradients are, of what each rank computes by itself."""

    class Look(Bytes):
        def __init__(self) -> None:
            super().__init__()
            self.alike: list[bool] = []
            self.drawn: list[float] = []
            self.error = 0.0

        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            with torch.enable_grad():
                logits = pl_module(batch["input_ids"])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
                own = torch.autograd.grad(loss, [*pl_module.parameters()])
            self.means: list[Tensor] = []
            for ranks in zip(*gathered(list(own)), strict=True):
                self.means.append(torch.stack(ranks).mean(0))
            self.p = technique._p.clone() if technique._p is not None else None
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
            numbers = [sum(w.numel() for w in layer.values()) for layer in technique._layers]
            z = technique._z.tolist()
            self.drawn.append(sum(n for n, one in zip(numbers, z, strict=True) if one) / sum(numbers))
            self.z, self.weights = z, {id(w): d for d, layer in enumerate(technique._layers) for w in layer.values()}

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, *args)
            self.alike.append(alike(flat(pl_module)))
            assert self.p is not None
            for w, mean in zip(pl_module.parameters(), self.means, strict=True):
                d = self.weights[id(w)]
                expected = mean / float(self.p[d]) if self.z[d] else torch.zeros_like(mean)
                self.error = max(self.error, float((w.grad - expected).abs().max()))

    technique, look = JointSpar(share=0.5, rate=0.1), Look()
    run(technique, look, steps=8)
    return {"alike": look.alike, "bytes": look.bytes, "drawn": look.drawn, "error": max(gathered(look.error))}


if __name__ == "__main__":
    main((all_drawn, some_drawn))
