"""Modules and callbacks whose hooks look at gradients or parameters, as users write them, and runs of them."""

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm, rank_zero_only
from torch import Tensor, nn

from tests.models import TinyGPT
from tests.strategies.hybrid_jobs import SaveAt, Settings, everywhere, fit, strategy_of, values

CLIP = 0.05  # of gradients whose norm is about 0.5, and whose largest element is about 0.05


class Base(TinyGPT):
    """With SGD, whose steps are as long as the gradients, so that a wrong norm shows."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Gated(Base):
    """Clips by Lightning's own method, at a value of its own."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=CLIP / (1 + self.global_step), gradient_clip_algorithm="norm")


class ByTorch(Base):
    """Clips by torch's function, and logs what it gives."""

    order, most = 2.0, CLIP

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), self.most, norm_type=self.order))


class ByTorchMost(ByTorch):
    order, most = float("inf"), CLIP / 10


class ByGroups(Base):
    """Clips each of the optimizer's groups by itself, of which one has no parameters on some stage."""

    def configure_optimizers(self) -> Any:
        groups: list[list[nn.Parameter]] = [[], []]
        for name, p in self.named_parameters():
            groups[name.startswith("head")].append(p)
        return torch.optim.SGD([{"params": group} for group in groups], lr=1.0)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], CLIP)


class OneByOne(Base):
    """Clips each parameter's gradient by itself, then looks at all of them."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for p in self.parameters():
            torch.nn.utils.clip_grad_norm_(p, CLIP / 10)
        self.log_dict(grad_norm(self, 2))


class ByValue(Base):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_value_(list(self.parameters()), CLIP / 100)
        self.log("after", grad_norm(self, "inf")["grad_inf_norm_total"])


class Logging(Base):
    """Logs norms of all and of a part, before Lightning clips and after."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))
        self.log_dict(grad_norm(self.head, 1, group_separator="-head-"))

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        self.log("after", grad_norm(self, 2)["grad_2.0_norm_total"])


class Helped(Base):
    """A method of the module's own looks at norms, by a name that the hook's function imports."""

    def _look(self) -> Any:
        from lightning.pytorch.utilities import grad_norm as norms_of

        return norms_of(self, 2)

    def on_after_backward(self) -> None:
        self.log("helped", self._look()["grad_2.0_norm_total"])


class Clipping(pl.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.log("clipped", torch.nn.utils.clip_grad_norm_(pl_module.parameters(), CLIP))


class First(pl.Callback):
    """Looks at norms on one rank alone."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    @rank_zero_only
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append(float(grad_norm(pl_module, 2)["grad_2.0_norm_total"]))


RIGHT: dict[str, tuple[type[Base], Settings]] = {
    "gated": (Gated, {}),
    "by torch": (ByTorch, {}),
    "by torch, most": (ByTorchMost, {}),
    "by groups": (ByGroups, {}),
    "one by one": (OneByOne, {}),
    "by value": (ByValue, {}),
    "logging": (Logging, {"gradient_clip_val": CLIP}),
    "logging, accumulated": (Logging, {"gradient_clip_val": CLIP, "accumulate_grad_batches": 2}),
    "helped": (Helped, {}),
    "double, by norm": (Base, {"gradient_clip_val": CLIP}),
    "double, by torch": (ByTorch, {}),
}


def gpt(cls: type[Base], name: str = "") -> Base:
    """One with first weights that are always the same; in float64 where the case's name says so."""
    pl.seed_everything(1, verbose=False)
    model = cls(num_layers=4, dim=16, dropout=0.0)
    return model.double() if name.startswith("double") else model


def run(strategy: Any, devices: int, names: list[str] | None = None) -> dict[str, Any]:
    """Losses, what was logged last, and the weights' sum, of each case."""
    found: dict[str, Any] = {}
    for name in names or RIGHT:
        cls, settings = RIGHT[name]
        model = gpt(cls, name)
        losses, done = fit(model, "tiny_gpt", strategy(), devices=devices, batch_size=8, steps=4, **settings)
        logged = {key: float(value) for key, value in done.callback_metrics.items() if key != "train_loss"}
        patched = [key for key in ("configure_gradient_clipping", "on_before_optimizer_step") if key in model.__dict__]
        found[name] = {"losses": losses, "logged": logged, "left": patched}
    return found


def run_beside(strategy: Any, devices: int, directory: str) -> dict[str, Any]:
    """A run with callbacks: what they saw, what was logged, and the weights in a checkpoint that has nothing else."""
    first, model = First(), gpt(Base)
    saving = ModelCheckpoint(directory, filename="weights", save_weights_only=True, every_n_train_steps=2)
    callbacks = (first, Clipping(), LearningRateMonitor(), saving)
    logger = CSVLogger(directory)
    losses, done = fit(
        model,
        "tiny_gpt",
        strategy,
        devices=devices,
        batch_size=8,
        steps=4,
        callbacks=callbacks,
        logger=logger,
        enable_checkpointing=True,
        log_every_n_steps=1,
    )
    saved = torch.load(saving.best_model_path, weights_only=True)
    plain = gpt(Base)
    plain.load_state_dict(saved["state_dict"], strict=True)
    sums = {name: float(p.double().sum()) for name, p in values(plain).items()}
    clipped = float(done.callback_metrics["clipped"])
    return {"losses": losses, "seen": first.seen, "clipped": clipped, "saved": sums, "keys": sorted(saved)}


# -- what is refused


class Adaptive(Base):
    """Clips each gradient by its parameter's norm."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_((0.01 * p.norm() / (p.grad.norm() + 1e-6)).clamp(max=1.0))


class Total(Base):
    """Takes the norm of what it finds, in a method that the hook calls."""

    def _norm(self) -> Tensor:
        return torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])

    def on_after_backward(self) -> None:
        self.log("norm", self._norm())


class Spoilt(Base):
    """Leaves out steps with gradients that are no numbers."""

    def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        if all(getattr(p, "grad").isfinite().all() for p in self.parameters()):  # noqa: B009 - as users write it
            optimizer.step()


class Stepping(Base):
    """Clips in the optimizer's step."""

    def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP)
        optimizer.step()


class Weighing(Base):
    """Logs the norms of its weights."""

    def on_train_epoch_end(self) -> None:
        self.log_dict({name: p.detach().norm() for name, p in self.named_parameters()})


class WeighingOne(Base):
    def on_train_batch_end(self, *args: Any) -> None:
        self.log("head", self.head.weight.norm())


class Averaging(pl.Callback):
    """An average of the weights, by hand."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = copy.deepcopy(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for mine, p in zip(self.average.parameters(), pl_module.parameters(), strict=True):
            mine.data.lerp_(p.data, 0.1)


class Harmless(Base):
    """Hooks that look at neither, or change gradients element by element."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.nan_to_num_()

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        print(sum(t.numel() for t in checkpoint["state_dict"].values()))

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.log("double", 2 * outputs["loss"].mean())

    def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = max(group["lr"], 1e-3)
        optimizer.step(closure=optimizer_closure)


def refused(layouts: dict[str, Settings], world: int) -> dict[str, dict[str, str]]:
    """What is said to each of them in each layout; "nothing" if it trains."""
    found: dict[str, dict[str, str]] = {}
    for layout, settings in layouts.items():
        for cls in (Adaptive, Stepping):
            strategy = strategy_of(settings, failure_timeout=None)
            try:
                fit(gpt(cls), "tiny_gpt", strategy, devices=world, batch_size=8, steps=2)
                said = "nothing"
            except ValueError as error:
                said = str(error)
            found.setdefault(layout, {})[cls.__name__] = said
    return found


class Adding(Base):
    """A hook gives the last block to the optimizer after two batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if batch_idx == 2 and len(optimizer.param_groups) == 1:
            late = [p for name, p in self.named_parameters() if name in self.late]
            optimizer.add_param_group({"params": late, "lr": 0.5})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.late = [name for name, _ in self.named_parameters() if name.startswith("head")]
        held = [p for name, p in self.named_parameters() if name not in self.late]
        return torch.optim.SGD(held, lr=1.0, momentum=0.9)


def adding(world: int, directory: str) -> dict[str, Any]:
    """Losses of one process and of two, which save after a group was added, and what is said as they go on from there."""
    alone, _ = fit(gpt(Adding), "tiny_gpt", "auto", devices=1, batch_size=8, steps=6)
    kinds: dict[str, Any] = {"devices": world, "batch_size": 8, "steps": 6}
    found: dict[str, Any] = {"alone": alone, "said": []}
    for sharded in (True, False):
        path = f"{directory}/{sharded}.ckpt"
        strategy = {"save_distributed_checkpoint": sharded}
        whole, _ = fit(gpt(Adding), "tiny_gpt", strategy_of(strategy), callbacks=(SaveAt(4, path),), **kinds)
        found[f"sharded={sharded}"] = whole
        try:
            fit(gpt(Adding), "tiny_gpt", strategy_of(strategy), ckpt_path=path, **kinds)
        except ValueError as error:
            found["said"].append(str(error))
    return found


def observe(layouts: dict[str, Settings], world: int, directory: str) -> dict[str, Any]:
    """All at once, in each layout."""
    found: dict[str, Any] = {"refused": everywhere(refused(layouts, world)) if world == 2 else []}
    for name, settings in layouts.items():
        found[name] = {
            "cases": everywhere(run(lambda s=settings: strategy_of(s), world)),
            "beside": run_beside(strategy_of(settings), world, f"{directory}/{name}"),
        }
    return found
