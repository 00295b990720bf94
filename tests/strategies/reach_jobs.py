"""Modules that reach beyond their step, by lists, metrics and ``all_gather``, and what they see on each rank."""

import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from lightning_eff.strategies.hybrid_parallel import HybridParallelStrategy
from tests.models import trainer
from tests.strategies.hybrid_jobs import Settings, everywhere

DIM, CLASSES, SAMPLES, BATCH = 8, 3, 24, 8


class Data(pl.LightningDataModule):
    """The same samples in every layout: each data-parallel rank takes its part of each batch."""

    def __init__(self) -> None:
        super().__init__()
        x = torch.randn(SAMPLES, 5, DIM, generator=torch.Generator().manual_seed(1))
        self.data = TensorDataset(x, x[:, 0, :CLASSES].argmax(-1))

    def _loader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        kwargs = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler: Any = DistributedSampler(self.data, shuffle=False, **kwargs)
        return DataLoader(self.data, batch_size=BATCH // kwargs["num_replicas"], sampler=sampler)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


class Plain(pl.LightningModule):
    """A stack of blocks whose caller adds what they return."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)) for _ in range(4)
        )
        self.head = nn.Linear(DIM, CLASSES)

    def hidden(self, x: Tensor) -> list[Tensor]:
        found = [x]
        for block in self.blocks:
            found.append(found[-1] + block(found[-1]))
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x)[-1].mean(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Collecting(Plain):
    """Lightning 2's pattern: steps keep what the epoch's end puts together."""

    def __init__(self) -> None:
        super().__init__()
        scores = {"accuracy": MulticlassAccuracy(CLASSES), "f1": MulticlassF1Score(CLASSES)}
        self.scores, self.val_scores = MetricCollection(dict(scores), prefix="train_"), MulticlassAUROC(CLASSES)
        self.curve = MulticlassAUROC(CLASSES)
        self.losses: list[Tensor] = []
        self.kept: dict[str, list[Any]] = {"sizes": [], "right": []}
        self.tables: list[list[int]] = [[], []]
        self.last: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept["sizes"].append(len(batch[1]))  # before the blocks, which every stage comes to
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.losses.append(loss)  # with its graph, as Lightning's own documentation does
        self.tables[1].append(len(logits))
        self.last = logits.detach()
        self.scores.update(logits, batch[1])
        self.curve.update(logits, batch[1])
        return loss

    def on_train_epoch_end(self) -> None:
        assert self.last is not None
        self.log("train_loss", torch.stack(self.losses).mean().detach(), sync_dist=True)
        self.log("train_seen", float(sum(self.kept["sizes"])), sync_dist=True, reduce_fx="sum")
        self.log("train_rows", float(sum(self.tables[1])), sync_dist=True, reduce_fx="sum")
        self.log("train_last", self.last.square().sum(), sync_dist=True, reduce_fx="sum")
        self.log("train_curve", self.curve.compute())
        self.log_dict(self.scores.compute())
        self.losses.clear()
        self.tables[1].clear()
        self.kept["sizes"].clear()
        self.scores.reset()
        self.curve.reset()

    def on_validation_epoch_start(self) -> None:
        self.rows = SumMetric()  # which is not there at setup

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.rows.update(len(batch[1]))
        logits = self(batch[0])
        right = (logits.argmax(-1) == batch[1]).float()
        self.kept["right"].append(right)
        self.val_scores.update(logits, batch[1])
        self.log("val_curve", self.val_scores)
        self.log("val_loss", F.cross_entropy(logits, batch[1]), sync_dist=True)
        self.log("val_count", float(len(right)), sync_dist=True, reduce_fx="sum")
        every: Any = self.all_gather(right)
        self.log("val_step_seen", float(every.numel()), reduce_fx="sum")
        return {"right": right, "name": "batch"}

    def on_validation_epoch_end(self) -> None:
        self.log("val_rows", self.rows.compute())
        every: Any = self.all_gather(torch.cat(self.kept["right"]))
        self.kept["right"].clear()
        self.log("val_right", every.sum())
        self.log("val_seen", float(every.numel()))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.kept["right"].append(len(batch[1]))
        return {"logits": self(batch[0]), "batch": batch_idx}


class Recurrent(Collecting):
    """A head that lies on the last stage alone: an LSTM, which refers to its weights, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm = nn.LSTM(DIM, DIM, batch_first=True), nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.lstm(self.hidden(x)[-1])[0][:, -1]))


class Looking(Plain):
    """Evaluation that looks at every block's output, and calls the blocks several times."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        for i, hidden in enumerate(self.hidden(x)):
            self.log(f"norm_{i}", hidden.norm())
        for _ in range(3):
            x = torch.cat([x, self.hidden(x)[-1][:, -1:].round(decimals=1)], 1)
        self.log("made", x[:, -3:].sum())


class Contrastive(Plain):
    """Compares each sample with those of all data-parallel ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mine, other = (F.normalize(self(view), dim=-1) for view in (batch[0], batch[0] + 0.1))
        every: Any = self.all_gather(other, sync_grads=True)
        rank = (self.trainer.distributed_sampler_kwargs or {"rank": 0})["rank"]
        return F.cross_entropy(mine @ every.reshape(-1, CLASSES).T / 0.1, torch.arange(len(mine)) + rank * len(mine))


class WithGradients(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            self.log("slope", torch.autograd.grad(self(x := batch[0].requires_grad_()).sum(), x)[0].norm())


class Waiting(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.trainer.strategy.barrier()
        return loss


class Outputs(pl.Callback):
    """What callbacks are told of evaluation steps."""

    def __init__(self) -> None:
        self.right: list[float] = []

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any) -> None:
        if outputs is not None:
            assert outputs["name"] == "batch"
            self.right.append(float(outputs["right"].sum()))


MODULES: dict[str, type[Plain]] = {
    "Collecting": Collecting,
    "Recurrent": Recurrent,
    "Looking": Looking,
    "Contrastive": Contrastive,
    "WithGradients": WithGradients,
    "Waiting": Waiting,
}


def observe(name: str, strategy: Settings | str) -> dict[str, Any]:
    """What a run of the module sees here."""
    model, data, outputs, world = MODULES[name](), Data(), Outputs(), int(os.environ.get("WORLD_SIZE", "1"))
    given: Any = strategy
    if isinstance(strategy, dict):
        given = HybridParallelStrategy(**{"min_num_params": 0, "failure_timeout": None, **strategy})
    run = trainer(outputs, strategy=given, devices=world, max_epochs=2, limit_val_batches=1.0, inference_mode=False)
    try:
        run.fit(model, datamodule=data)
    except ValueError as error:
        return {"error": str(error)}
    found: dict[str, Any] = {"logged": {k: float(v) for k, v in run.callback_metrics.items()}, "outputs": outputs.right}
    found["weights"] = {
        n: p.detach().flatten().tolist() for n, p in model.state_dict().items() if p.is_floating_point()
    }
    if isinstance(model, Collecting):
        (found["tested"],) = run.test(model, datamodule=data, verbose=False)
        predicted: Any = run.predict(model, datamodule=data)
        found["predicted"] = [[part["batch"], part["logits"].tolist()] for part in predicted]
        found["noted"] = list(model.kept["right"])
    return found


def observe_all(cases: dict[str, tuple[str, Settings]]) -> dict[str, list[Any]]:
    """Of each case what each rank saw."""
    found = {name: observe(module, strategy) for name, (module, strategy) in cases.items()}
    ranks = everywhere(found)  # at the end: a run that is refused at setup leaves no process group
    return {name: [rank[name] for rank in ranks] for name in found}
