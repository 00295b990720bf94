"""What the processes of the hybrid strategy's tests run, and the single process that they are compared with."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_eff.strategies._hybrid.shards import local
from lightning_eff.strategies.hybrid_parallel import HybridParallelStrategy
from tests.models import LENGTH, VOCAB, Samples, flat, module, trainer
from tests.runs import largest
from tests.strategies import pipeline_models

Settings = dict[str, Any]


class Recorder(pl.Callback):
    """The training losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))


def averaged(losses: list[float]) -> list[float]:
    """The mean over data-parallel ranks of each step's loss: over all ranks, since those of a replica have the same."""
    if not torch.distributed.is_initialized():
        return losses
    total = torch.tensor(losses, dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return (total / torch.distributed.get_world_size()).tolist()


def values(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters, by name."""
    return {name: p.detach().float().cpu().clone() for name, p in model.named_parameters()}


def apart(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference between values of the same name."""
    assert first.keys() == second.keys()
    return largest(float((first[name] - second[name]).abs().max()) for name in first)


class Ordered(pl.LightningDataModule):
    """The same samples in the same order in every layout: each data-parallel rank takes its part of each batch.

    Args:
        padded: samples of unequal lengths; "alike": those of each replica have as many labels as those of any other.
    """

    def __init__(self, name: str, samples: int, batch_size: int, padded: bool | Literal["alike"] = False) -> None:
        super().__init__()
        self.data, self.batch_size = Samples(name, samples), batch_size
        if name == "bert" and not padded:  # each token counts: else replicas have other numbers of labels, as under DDP
            self.data.batch["labels"] = self.data.batch["labels"].clamp(min=0)
        elif padded:
            labels = self.data.batch["labels"]
            lengths = torch.arange(samples)[:, None] * 7 % (LENGTH - 4) + 4  # all of them
            if padded == "alike":  # of two or four replicas, which take every second or fourth sample
                lengths = torch.where(torch.arange(samples)[:, None] // 4 % 2 == 0, LENGTH, 4)
            self.data.batch["attention_mask"] = (torch.arange(LENGTH) < lengths).long()
            self.data.batch["labels"] = labels.masked_fill(torch.arange(LENGTH) >= lengths, -100)
            if padded != "alike":
                self.data.batch["labels"][batch_size : batch_size + 2] = -100  # a whole micro-batch

    def _loader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        kwargs = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler: Any = DistributedSampler(self.data, shuffle=False, **kwargs)
        return DataLoader(self.data, self.batch_size // kwargs["num_replicas"], sampler=sampler)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader()

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader()


def fit(
    model: pl.LightningModule,
    data: str,
    strategy: Any,
    *,
    devices: int,
    batch_size: int,
    steps: int,
    samples: int = 96,
    ckpt_path: str | None = None,
    callbacks: tuple[pl.Callback, ...] = (),
    padded: bool | Literal["alike"] = False,
    **kwargs: Any,
) -> tuple[list[float], pl.Trainer]:
    """Train on the same samples in the same order, whatever the layout; ``batch_size`` is that of all replicas together.

    Returns:
        The mean loss of each batch, and the trainer.
    """
    recorder = Recorder()
    run = trainer(recorder, *callbacks, strategy=strategy, devices=devices, max_steps=steps, max_epochs=-1, **kwargs)
    run.fit(model, datamodule=Ordered(data, samples, batch_size, padded), ckpt_path=ckpt_path)
    return averaged(recorder.losses), run


class SaveAt(pl.Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class Holdings(pl.Callback):
    """What a rank holds while it trains: elements of parameters and of optimizer state, and of the whole module."""

    def __init__(self) -> None:
        self.parameters = self.state = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.parameters = sum(
            local(p).numel() for m in pl_module.modules() for p in m._parameters.values() if p is not None
        )
        states = (s for o in trainer.optimizers for s in o.state.values())
        self.state = sum(local(t).numel() for s in states for t in s.values() if isinstance(t, Tensor) and t.ndim > 0)


def made(name: str, **kwargs: Any) -> pl.LightningModule:
    """The module of that name with first weights that are always the same, without dropout unless asked for."""
    pl.seed_everything(1, verbose=False)
    if name in pipeline_models.SLOW:
        return pipeline_models.model(name)
    return module(name, **{"dropout": 0.0, **kwargs})


def strategy_of(settings: Settings, **further: Any) -> HybridParallelStrategy:
    """The strategy with blocks divided one by one, small as they are, unless the settings say otherwise."""
    return HybridParallelStrategy(**{"min_num_params": 0, **settings, **further})


def run_case(case: Settings, directory: str) -> list[float]:
    """Fit as ``case`` says.

    Args:
        case: "model", "strategy" (settings of HybridParallelStrategy, or a name), "devices", "fit" (of the Trainer), "steps",
            "padded" (labels of -100 in unequal numbers), "save" and "resume" (names of checkpoints in ``directory``),
            "keep" (name of a file for the weights).
    """
    model = made(case["model"], **case.get("module", {}))
    strategy = case["strategy"]
    if isinstance(strategy, dict):
        strategy = strategy_of(strategy)
        if case["devices"] > 1 and int(os.environ["RANK"]):
            with torch.no_grad():  # other ranks' first weights must not count
                for p in model.parameters():
                    p.add_(0.1)
    callbacks: tuple[pl.Callback, ...] = (SaveAt(3, f"{directory}/{case['save']}"),) if "save" in case else ()
    losses, _ = fit(
        model,
        case["model"],
        strategy,
        devices=case["devices"],
        batch_size=8,
        steps=case.get("steps", 20),
        samples=24,
        ckpt_path=f"{directory}/{case['resume']}" if "resume" in case else None,
        callbacks=callbacks,
        padded=case.get("padded", False),
        **case.get("fit", {}),
    )
    if "keep" in case and int(os.environ.get("RANK", "0")) == case["devices"] - 1:
        torch.save(values(model), Path(directory, case["keep"]))
    return losses


def run_cases(directory: str, cases: dict[str, Settings]) -> dict[str, list[float]]:
    """The losses of each case, by its name."""
    return {name: run_case(case, directory) for name, case in cases.items()}


def everywhere(value: Any) -> list[Any]:
    """``value`` of every rank."""
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


def observe_shares(layouts: dict[str, Settings], world: int) -> dict[str, Any]:
    """What each rank holds of parameters and of AdamW's two moments, as parts of the whole."""
    shares: dict[str, Any] = {}
    for name, settings in layouts.items():
        model = made("tiny_gpt", num_layers=8, dim=64)
        whole, holdings = sum(p.numel() for p in model.parameters()), Holdings()
        fit(
            model,
            "tiny_gpt",
            strategy_of(settings),
            devices=world,
            batch_size=8,
            steps=2,
            callbacks=(holdings,),
        )
        shares[name] = everywhere([holdings.parameters / whole, holdings.state / (2 * whole)])
    return shares


class Watching(pl.LightningModule):
    """Logs in every way, and predicts; around a module whose step is known."""

    def __init__(self, inner: pl.LightningModule) -> None:
        super().__init__()
        self.inner = inner
        self.trained, self.seen, self.right = SumMetric(), SumMetric(), MulticlassAccuracy(VOCAB, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch["labels"].flatten()
        self.trained.update(labels.numel())
        loss = nn.functional.cross_entropy(self.inner(batch["input_ids"]).flatten(0, 1), labels)
        self.log("train", loss, on_step=True, on_epoch=True)
        self.log("trained", self.trained, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, labels = self.inner(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        loss = nn.functional.cross_entropy(logits, labels)
        self.seen.update(labels.numel())
        self.right(logits, labels)
        self.log("val_seen", self.seen)
        self.log("val_right", self.right)
        self.log("val", loss)
        self.log("val_synced", loss, sync_dist=True)
        self.log("val_sum", loss, sync_dist=True, reduce_fx="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.inner(batch["input_ids"]).argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def observe_logs(strategy: Any, devices: int) -> dict[str, Any]:
    """What a run logs, validates and predicts, on every rank."""
    model = Watching(made("tiny_gpt"))
    data = Ordered("tiny_gpt", 24, 8)
    run = trainer(strategy=strategy, devices=devices, max_epochs=2, limit_val_batches=1.0)
    run.fit(model, datamodule=data)
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    (again,) = run.validate(model, datamodule=data, verbose=False)
    predicted = run.predict(model, dataloaders=data.val_dataloader())
    assert predicted is not None
    numbers: list[Any] = [part.tolist() for part in predicted]  # pyright: ignore[reportAttributeAccessIssue]
    found = {"logged": logged, "again": again, "predicted": numbers, "weights": float(flat(model).double().sum())}
    return {"ranks": everywhere(found) if devices > 1 else [found]}


def shape_of(model: nn.Module) -> dict[str, Any]:
    """All of a module but the values of its tensors: classes, attributes, hooks, names in order."""
    found: dict[str, Any] = {}
    for path, m in model.named_modules():
        inside = {k: list(v) for k, v in m.__dict__.items() if isinstance(v, dict) and k != "_hparams"}
        names = sorted(k for k in m.__dict__ if k not in ("_trainer", "_device", "_hparams"))
        found[path] = (
            type(m),
            names,
            inside,
            [(k, id(p), tuple(p.shape)) for k, p in m._parameters.items() if p is not None],
        )
    return found


class Failing(pl.Callback):
    """An exception on every rank."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        raise ArithmeticError("on purpose")


def observe_traces(layouts: dict[str, Settings], world: int) -> dict[str, list[str]]:
    """Submodules that a run left changed, by layout; and what an exception leaves."""
    changed: dict[str, list[str]] = {}
    for name, settings in layouts.items():
        model = made("gpt2")
        connector = None
        before = shape_of(model)
        _, run = fit(model, "gpt2", strategy_of(settings), devices=world, batch_size=8, steps=2)
        connector = run._accelerator_connector
        after = shape_of(model)
        changed[name] = [path for path in before if before[path] != after.get(path)]
        if not connector.use_distributed_sampler:
            changed[name].append("use_distributed_sampler")
        model, stopped = made("gpt2"), False
        before = {path: (entry[0], entry[1]) for path, entry in shape_of(model).items()}
        try:
            strategy = strategy_of(settings, failure_timeout=None)
            fit(model, "gpt2", strategy, devices=world, batch_size=8, steps=2, callbacks=(Failing(),))
        except ArithmeticError:
            stopped = True
        after = {path: (entry[0], entry[1]) for path, entry in shape_of(model).items()}
        assert stopped
        changed[f"{name} after an exception"] = [path for path in before if before[path] != after.get(path)]
    return changed


def observe_starts(layouts: dict[str, Settings], world: int) -> dict[str, Any]:
    """Losses from weights that were made on all ranks, on rank 0 alone, or a module at a time."""
    found: dict[str, Any] = {}
    for where in ("all", "rank0", "meta"):
        for name, settings in layouts.items():
            model = made("tiny_gpt", built="configure_model")
            strategy = strategy_of(settings, init_on=where, gather_after_fit=where != "meta")
            losses, _ = fit(model, "tiny_gpt", strategy, devices=world, batch_size=8, steps=3, padded="alike")
            meta = sum(p.is_meta for p in model.parameters())
            weights = 0.0 if meta else float(flat(model).double().sum())
            found[f"{where} {name}"] = {"losses": losses, "meta": meta, "weights": everywhere(weights)}
    return found


def observe_refused(layout: Settings, world: int) -> dict[str, str]:
    """What is said to optimizers and callbacks that cannot work on a part of the model."""
    found: dict[str, str] = {}
    optimizers: dict[str, Any] = {"LBFGS": torch.optim.LBFGS, "Adafactor": torch.optim.Adafactor}
    for name in (*optimizers, "EMAWeightAveraging"):
        model: Any = made("gpt2")
        callbacks: tuple[pl.Callback, ...] = ()
        if name in optimizers:
            model.configure_optimizers = lambda m=model, n=name: optimizers[n](m.parameters(), 0.01)
        else:
            callbacks = (EMAWeightAveraging(),)
        strategy = strategy_of(layout, failure_timeout=None)
        try:
            fit(model, "gpt2", strategy, devices=world, batch_size=8, steps=2, callbacks=callbacks)
            found[name] = "nothing"
        except ValueError as error:
            found[name] = str(error)
    return found


def observe_pipelines() -> dict[str, list[str]]:
    """What whole runs say to modules of the zoo that a pipeline would train wrongly, on each rank; "" if nothing."""
    from torch.utils.data import default_collate

    from tests.strategies import pipeline_zoo as zoo

    found: dict[str, str] = {}
    wrong = {**zoo.NO_RULE, **zoo.SIDEWAYS, **zoo.MOVING}
    right = {"class weights, given": zoo.WEIGHED["class weights"][0], "Residual": zoo.RESIDUALS["Residual"]}
    for name, (make, data) in (wrong | right).items():
        module: Any = make().double()
        module.__dict__["configure_optimizers"] = lambda m=module: torch.optim.AdamW(m.parameters(), lr=1e-2)
        whole = data()[0]
        loader = DataLoader([{k: v[i % 8] for k, v in whole.items()} for i in range(16)], 8, collate_fn=default_collate)
        weight = "tests.strategies.pipeline_zoo.class_weights" if name == "class weights, given" else None
        strategy = HybridParallelStrategy(pipeline_parallel_size=2, failure_timeout=None, microbatch_weight=weight)
        found[name] = ""
        try:
            trainer(strategy=strategy, devices=2, max_steps=2, max_epochs=-1).fit(module, loader)
        except ValueError as error:
            found[name] = str(error)
    ranks = everywhere(found)  # at the end: a run that is refused at setup leaves no process group
    return {name: [rank[name] for rank in ranks] for name in found}


def precision_of(name: str) -> Settings:
    """Trainer settings."""
    from lightning_eff import ACTPrecision, FP8Precision

    return {
        "bf16-mixed": {"precision": "bf16-mixed"},
        "bf16-true": {"precision": "bf16-true"},
        "fp8": {"plugins": [FP8Precision(backend="emulated", base="32-true")]},
        "fp8, delayed": {"plugins": [FP8Precision(backend="emulated", amax="delayed", base="32-true")]},
        "act": {"plugins": [ACTPrecision(8)]},
        "16-mixed": {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))]},
    }[name]


def observe_precision(precisions: list[str], layouts: dict[str, Settings], world: int) -> dict[str, Any]:
    """Losses, or the error, with each precision plugin in each layout."""
    found: dict[str, Any] = {}
    for precision in precisions:
        for name, settings in layouts.items():
            model = made("tiny_gpt", dim=32, num_layers=2)
            try:
                losses, _ = fit(
                    model,
                    "tiny_gpt",
                    strategy_of(settings, failure_timeout=None) if world > 1 else "auto",
                    devices=world,
                    batch_size=8,
                    steps=4,
                    gradient_clip_val=0.5,
                    **precision_of(precision),
                )
                found[f"{precision} {name}"] = losses
            except ValueError as error:
                found[f"{precision} {name}"] = str(error)
    return found


def observe(asked: dict[str, Any]) -> dict[str, Any]:
    """All that the processes are asked at once: the layouts for each question."""
    world = int(os.environ["WORLD_SIZE"])
    return {
        "shares": observe_shares(asked["shares"], world),
        "logs": {name: observe_logs(strategy_of(s), world) for name, s in asked["logs"].items()},
        "traces": observe_traces(asked["traces"], world),
        "starts": observe_starts(asked["starts"], world),
        "precision": observe_precision(asked["precisions"], asked["precision"], world),
        "refused": observe_refused({"tensor_parallel_size": 2}, world),
    }


class Ending(pl.Callback):
    """Ends rank 1 before the fifth step: "kill" by a signal that cannot be caught, "raise" by an exception, "term" by SIGTERM.

    With "term all", each rank gets SIGTERM, as a scheduler sends it.
    """

    def __init__(self, how: str, directory: str) -> None:
        self.how, self.directory = how, directory

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.how == "term all":
            if trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
        elif trainer.global_step == 4 and trainer.global_rank == 1:
            Path(self.directory, "ended").write_text(str(time.time()))
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "term":
                os.kill(os.getpid(), signal.SIGTERM)
                return
            raise ArithmeticError("on purpose")


def end_early(directory: str, how: str) -> None:
    """Train with a checkpoint after the third step, and lose rank 1 before the fifth."""
    strategy = HybridParallelStrategy(pipeline_parallel_size=2)
    callbacks = (SaveAt(3, f"{directory}/saved.ckpt"), Ending(how, directory))
    fit(made("gpt2"), "gpt2", strategy, devices=2, batch_size=8, steps=6, samples=24, callbacks=callbacks)


class Stopped(pl.Callback):
    """What a run is stopped by, after how many batches, and a checkpoint of all ranks that is saved then."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        trainer.save_checkpoint(f"{self.directory}/stopped.ckpt")
        found = {"by": type(exception).__name__, "says": str(exception), "steps": trainer.global_step}
        Path(self.directory, f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


def end_by_signal(directory: str, how: str, environment: dict[str, str]) -> None:
    """Train until a signal comes, on both ranks or one."""
    os.environ.update(environment)
    if environment:
        os.environ.update(SLURM_PROCID=os.environ["RANK"], SLURM_LOCALID=os.environ["RANK"])
    strategy = HybridParallelStrategy(pipeline_parallel_size=2)
    callbacks = (Ending(how, directory), Stopped(directory))
    run: Any = {"devices": 2, "batch_size": 8, "steps": 2000, "samples": 24, "callbacks": callbacks}
    if environment:
        run["plugins"] = [SLURMEnvironment(auto_requeue=True)]
    fit(made("gpt2"), "gpt2", strategy, **run)


def start_by_environment(directory: str) -> None:
    """A fit whose processes Lightning, or a cluster, starts."""
    pl.seed_everything(1, verbose=False)
    losses, run = fit(made("gpt2"), "gpt2", "hybrid_pp2", devices=2, batch_size=8, steps=4, samples=24)
    name = type(run._accelerator_connector.cluster_environment).__name__
    Path(directory, f"rank{run.global_rank}.json").write_text(json.dumps({"losses": losses, "environment": name}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    start_by_environment(sys.argv[1])
