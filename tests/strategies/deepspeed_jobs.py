"""What the processes of the DeepSpeed tests run, on CPU: ``python -m tests.strategies.deepspeed_jobs DIRECTORY JOB ...``."""

import importlib
import os
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

from lightning_eff.strategies.deep_speed import DeepSpeedEffStrategy
from tests.models import Samples, flat, module, trainer
from tests.strategies.communication_launch import alike, gathered, main, neutral


class OnCPU(DeepSpeedEffStrategy):
    """DeepSpeed refuses CPUs through Lightning, though its own CPU accelerator runs there."""

    @property
    @override
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    @override
    def setup_environment(self) -> None:
        # compiles for more than a minute, and only saves time; `deepspeed.comm.torch` by attribute is torch itself
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        DDPStrategy.setup_environment(self)

    @override
    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class Scheduled(pl.LightningModule):
    """A classifier without randomness, with two parameter groups and a schedule."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.net = module("tiny_gpt", dropout=0.0)
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 2e-3},
        ]
        optimizer = getattr(torch.optim, self.optimizer)(groups, lr=5e-3, eps=1e-4)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Watch(pl.Callback):
    """After each step: the loss, the learning rates, the weights, and each parameter's second moment."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[list[float]] = []
        self.variances: list[Tensor] = []
        self.alike: list[bool] = []
        self.counters: list[dict[str, Any]] = []
        self.ratios: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, net: pl.LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.rates.append([float(group["lr"]) for group in trainer.optimizers[0].param_groups])
        own: Any = getattr(trainer.strategy, "_optimizer", None)
        if own is not None and own.steps:
            self.variances.append(torch.cat([own.state[p]["exp_avg_sq"].flatten() for _, p, _ in own.named()]))
            self.counters.append({**getattr(own, "counters", {}), "kept": len(own.residuals.worker)})
            self.ratios.append(float(trainer.callback_metrics["eff/deepspeed/ratio"]))
        self.alike.append(alike(flat(net)))


def data(samples: int = 96) -> Any:
    """Batches of 4 a rank, in a fixed order, of which two ranks see what one with batches of 8 sees."""
    dataset = Samples("tiny_gpt", samples)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return DataLoader(dataset, 8)
    return DataLoader(dataset, 4, sampler=DistributedSampler(dataset, shuffle=False))


def fit(
    strategy: Any,
    *,
    max_steps: int = 12,
    directory: Path | None = None,
    resume: Path | None = None,
    optimizer: str = "AdamW",
    **kwargs: Any,
) -> tuple[pl.LightningModule, Watch, pl.Trainer]:
    pl.seed_everything(1, verbose=False)
    net, watch = Scheduled(optimizer), Watch()
    callbacks: list[pl.Callback] = [*neutral(), watch]
    if directory is not None:
        callbacks.append(ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=-1, filename="{step}"))
    settings: dict[str, Any] = {"devices": 2, "use_distributed_sampler": False, "enable_checkpointing": bool(directory)}
    t = trainer(*callbacks, max_steps=max_steps, strategy=strategy, **{**settings, **kwargs})
    validate = data(16) if kwargs.get("limit_val_batches") else None
    t.fit(net, data(), validate, ckpt_path=resume)
    return net, watch, t


def whole(net: pl.LightningModule) -> Tensor:
    """All parameters; under stage 3 they are gathered."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        return flat(net).clone()


def single(steps: int, clip: float, optimizer: str = "AdamW") -> Tensor:
    """What one process computes by hand on both ranks' batches."""
    pl.seed_everything(1, verbose=False)
    net = Scheduled(optimizer)
    net.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    configured = net.configure_optimizers()
    opt, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    dataset = Samples("tiny_gpt", 96)
    for step in range(steps):
        # rank r has the samples r, r + 2, r + 4, ...
        batch = [dataset[i] for i in range(8 * step, 8 * step + 8)]
        loss = net.training_step({key: torch.stack([b[key] for b in batch]) for key in batch[0]}, step)
        opt.zero_grad()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        opt.step()
        schedule.step()
    return flat(net)


def stages(name: str, root: Path) -> dict[str, Any]:
    """Each stage of ZeRO, offload and not, against a single process, with clipping and a schedule."""
    expected = single(12, 0.5)
    found: dict[str, Any] = {}
    settings: dict[str, dict[str, Any]] = {
        "0": {"stage": 0},
        "1": {"stage": 1},
        "2": {"stage": 2},
        "3": {"stage": 3},
        "2 offload": {"stage": 2, "offload": "cpu"},
        "3 offload": {"stage": 3, "offload": "cpu"},
    }
    for key, options in settings.items():
        net, watch, _ = fit(OnCPU(**options), gradient_clip_val=0.5)
        found[key] = {"error": float((whole(net) - expected).abs().max()), "rates": watch.rates[-1]}
    return found


def stage_resume(name: str, root: Path) -> dict[str, Any]:
    """Resume ZeRO from a checkpoint in the middle, and from one of a 1-bit optimizer."""
    found: dict[str, Any] = {}
    for stage in (1, 2, 3):
        net, _, _ = fit(OnCPU(stage=stage), directory=root / f"stage{stage}")
        expected = whole(net)
        dist.barrier()
        path = root / f"stage{stage}" / "step=6.ckpt"
        again, _, _ = fit(OnCPU(stage=stage), resume=path)
        found[str(stage)] = float((whole(again) - expected).abs().max())
    return found


def start(name: str, root: Path) -> dict[str, Any]:
    """Before the freeze, and where all steps are before it, an optimizer is the user's own."""
    found: dict[str, Any] = {}
    for optimizer in ("Adam", "AdamW"):
        expected = single(12, 0.5, optimizer)
        net, watch, _ = fit(OnCPU("onebit_adam", freeze_step=100), gradient_clip_val=0.5, optimizer=optimizer)
        found[optimizer] = {"error": float((flat(net) - expected).abs().max()), "rates": watch.rates}
        net, _, _ = fit(
            OnCPU("zero_one_adam", freeze_step=100, variance_updates=100), gradient_clip_val=0.5, optimizer=optimizer
        )
        found[optimizer]["zero_one"] = float((flat(net) - expected).abs().max())
    return found


def frozen(name: str, root: Path) -> dict[str, Any]:
    """A run past the freeze: what stays, what is sent, how far it gets; and the run from many of its checkpoints."""
    options: dict[str, Any] = {"freeze_step": 4}
    if name == "zero_one_adam":
        options |= {"freeze_step": 6, "variance_updates": 2, "local_updates": 2, "max_local_interval": 2}
    net, watch, _ = fit(OnCPU(name, **options), directory=root / name)  # type: ignore[arg-type]
    expected = flat(net).clone()
    dist.barrier()
    differences: dict[str, float] = {}
    for step in (1, 3, 4, 5, 7, 9, 11, 12):
        again, _, _ = fit(OnCPU(name, **options), resume=root / name / f"step={step}.ckpt")  # type: ignore[arg-type]
        differences[str(step)] = float((flat(again) - expected).abs().max())
    saved = torch.load(root / name / "step=11.ckpt" / "checkpoint" / "mp_rank_00_model_states.pt", weights_only=False)
    fresh = Scheduled()
    fresh.load_state_dict(saved["module"], strict=True)
    return {
        "changes": [bool((a != b).any()) for a, b in zip(watch.variances, watch.variances[1:], strict=False)],
        "zeros": int((watch.variances[-1] == 0).sum()),
        "ratios": watch.ratios,
        "alike": watch.alike,
        "end": alike(flat(net)),
        "counters": watch.counters,
        "differences": gathered(differences),
        "losses": watch.losses,
        "rates": watch.rates,
        "ranks": len(saved["DeepSpeedEffStrategy"]["ranks"]),
    }


def architecture(name: str, root: Path) -> list[str]:
    """What a technique that swaps submodules is told, on every rank."""
    from tests.core.architectures import LowRankAdapter

    try:
        settings: dict[str, Any] = {"devices": 2, "use_distributed_sampler": False}
        trainer(LowRankAdapter(), max_steps=1, strategy=OnCPU(stage=2), **settings).fit(Scheduled(), data())
    except ValueError as error:
        return gathered(str(error))
    return gathered("trained")


def lamb_reference(name: str, root: Path) -> dict[str, Any]:
    """The start of 1-bit LAMB against LAMB written out."""
    pl.seed_everything(1, verbose=False)
    net = Scheduled()
    net.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    groups = net.configure_optimizers()["optimizer"].param_groups
    moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in net.parameters()}
    dataset = Samples("tiny_gpt", 96)
    for step in range(5):
        batch = [dataset[i] for i in range(8 * step, 8 * step + 8)]
        loss = net.training_step({key: torch.stack([b[key] for b in batch]) for key in batch[0]}, step)
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for group in groups:
                rate = group["initial_lr"] / (1 + 0.1 * step)
                for p in group["params"]:
                    m, v = moments[p]
                    m.copy_(0.9 * m + 0.1 * p.grad)
                    v.copy_(0.999 * v + 0.001 * p.grad**2)
                    u = m / (v.sqrt() + 1e-4) + group["weight_decay"] * p
                    ratio = float((p.norm() / u.norm()).clamp(0.01, 10)) if p.norm() > 0 else 1.0
                    p -= rate * ratio * u
    got, _, _ = fit(OnCPU("onebit_lamb", freeze_step=100), max_steps=5)
    return {"error": float((flat(got) - flat(net)).abs().max())}


def reference(name: str, root: Path) -> dict[str, Any]:
    """1-bit Adam past its freeze, against both ranks played by one process, with loops for signs and residuals."""
    freeze, steps = 3, 8
    pl.seed_everything(1, verbose=False)
    net = Scheduled()
    net.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    groups = net.configure_optimizers()["optimizer"].param_groups
    m = {p: torch.zeros_like(p) for p in net.parameters()}
    v = {p: torch.zeros_like(p) for p in net.parameters()}
    kept: dict[Any, Tensor] = {}
    dataset = Samples("tiny_gpt", 96)

    def signs(x: Tensor) -> Tensor:
        live = (x != 0).any(dim=0)
        rows = [torch.where(row >= 0, 1.0, -1.0) * row[live].abs().mean() * live for row in x]
        return torch.stack([row.nan_to_num(0.0) for row in rows])

    def send(key: Any, x: Tensor) -> Tensor:
        x = x + kept.get(key, 0.0)
        sent = signs(x)
        kept[key] = x - sent
        return sent

    for step in range(1, steps + 1):
        gradients = []
        for rank in (0, 1):
            batch = [dataset[i] for i in range(8 * (step - 1) + rank, 8 * step, 2)]
            loss = net.training_step({key: torch.stack([b[key] for b in batch]) for key in batch[0]}, step)
            net.zero_grad()
            loss.backward()
            gradients.append({p: p.grad.clone() for p in net.parameters()})
        with torch.no_grad():
            for group in groups:
                rate = group["initial_lr"] / (1 + 0.1 * (step - 1))
                for p in group["params"]:
                    own = [0.9 * m[p] + 0.1 * g[p] for g in gradients]
                    if step <= freeze or p.ndim < 2:
                        m[p] = sum(own) / 2
                    else:
                        half = -(-p.shape[0] // 2)
                        shares = [torch.cat([x.flatten(1), torch.zeros(2 * half - len(x), x[0].numel())]) for x in own]
                        means = []
                        for s in (0, 1):  # the owner of each half of the rows
                            got = [send((p, r, s), x[s * half : (s + 1) * half]) for r, x in enumerate(shares)]
                            means.append(send((p, "server", s), sum(got) / 2))
                        m[p] = torch.cat(means)[: p.shape[0]].view_as(p)
                    if step <= freeze:
                        v[p] = 0.999 * v[p] + 0.001 * (sum(g[p] for g in gradients) / 2) ** 2
                    denominator = (v[p] / (1 - 0.999 ** min(step, freeze))).sqrt() + 1e-4
                    p *= 1 - rate * group["weight_decay"]
                    p -= rate * m[p] / (1 - 0.9**step) / denominator
                    if step == freeze:
                        v[p] = torch.where(v[p] > 0, v[p], v[p][v[p] > 0].mean())
    got, _, _ = fit(OnCPU("onebit_adam", freeze_step=freeze), max_steps=steps)
    return {
        "error": float((flat(got) - flat(net)).abs().max()),
        "from_adam": float((flat(got) - single(steps, 0.0)).abs().max()),
    }


def modes(name: str, root: Path) -> dict[str, Any]:
    """Accumulation, bf16 and validation past the freeze."""
    found: dict[str, Any] = {}
    for key, kwargs in {
        "accumulate": {"accumulate_grad_batches": 2, "max_steps": 6},
        "bf16": {"precision": "bf16-mixed"},
        "validate": {"limit_val_batches": 1, "val_check_interval": 1},
    }.items():
        options: dict[str, Any] = {"freeze_step": 3}
        if name == "zero_one_adam":
            options |= {"local_updates": 1, "max_local_interval": 4}
        net, watch, t = fit(OnCPU(name, **options), **kwargs)  # type: ignore[arg-type]
        found[key] = {
            "steps": t.global_step,
            "finite": bool(flat(net).isfinite().all()),
            "alike": alike(flat(net).float()),
            "apart": not all(watch.alike),
            "losses": watch.losses,
        }
    return found


if __name__ == "__main__":
    main((stages, stage_resume, start, frozen, architecture, lamb_reference, reference, modes))
