"""The step within the backward pass against plain training, bit for bit; the gradients that are held; and when all are kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.checkpoint import checkpoint

from lightning_eff import (
    LAMB,
    LARS,
    SOAP,
    ACClip,
    Adan,
    ExponentialMovingAverage,
    Lion,
    Rematerialization,
    ReplaceOptimizer,
    SharpnessAwareMinimization,
)
from lightning_eff._core._optim.chunks import chunk_size
from lightning_eff.memory.optimizer_in_backward import OptimizerInBackward
from tests.cases import Case
from tests.memory.test_optimizer_offload import OPTIMIZERS, with_lbfgs
from tests.models import TinyClassifier, TinyGPT, loader, module, trainer
from tests.runs import MODES, checkpoints, differences, final_state, fit

CASES = {
    "OptimizerInBackward": Case(
        active=lambda: OptimizerInBackward(),
        neutral=lambda: OptimizerInBackward(),
        exact=True,
        figure="released_bytes",
        neutral_by_machine=True,
        yields=True,  # most stacks hold something that may use all gradients, beside which they are kept
        lost=(with_lbfgs, "classifier", "LBFGS evaluates"),
    )
}


def both(build: Callable[[], pl.LightningModule], data: str = "classifier", others: Any = list, **kwargs: Any):
    """What differs between the end of a run with the technique and of one without; and the technique."""
    found = []
    technique = OptimizerInBackward()
    for extra in ([], [technique]):
        pl.seed_everything(1, verbose=False)
        net = build()
        t = trainer(*others(), *extra, **{"max_steps": 6, **kwargs})
        t.fit(net, loader(data), loader(data, 8, shuffle=False) if kwargs.get("limit_val_batches") else None)
        found.append(final_state(net, t))
    return differences(*found), technique


def configured(make: Callable[[pl.LightningModule], Any]) -> Callable[[], pl.LightningModule]:
    class Net(TinyClassifier):
        def configure_optimizers(self) -> Any:
            return make(self)

    return Net


def trained_bytes(net: nn.Module) -> int:
    return sum(4 * p.numel() for p in net.parameters() if p.requires_grad)


# -- the plain optimizer's steps, bit for bit


@pytest.mark.parametrize("mode", ["plain", "validate"])
@pytest.mark.parametrize("model", ["tiny_gpt", "gpt2"])  # the latter has a tied table
def test_it_trains_as_plain_and_releases_every_gradient(model: str, mode: str) -> None:
    technique = OptimizerInBackward()
    whole = final_state(*fit(model, list, **MODES[mode]))
    net, t = fit(model, lambda: [technique], **MODES[mode])
    assert differences(whole, final_state(net, t)) == []
    assert technique.report()["released_bytes"] == trained_bytes(net)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch(name: str) -> None:
    found, technique = both(configured(OPTIMIZERS[name]), gradient_clip_val=0.01, gradient_clip_algorithm="value")
    assert found == []
    assert technique.report()["released_bytes"] > 0


class _Wide(TinyClassifier):
    """With a weight that our optimizers step in slices, and one that they skip in the first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(65, chunk_size(torch.device("cpu")) // 64)
        self.around = nn.ModuleList([nn.Linear(8, 65), nn.Linear(self.wide.out_features, 8)])
        self.late = nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.around[1](self.wide(self.around[0](self.blocks(batch[0]))))
        return F.cross_entropy(self.head(self.norm(self.late(h) if self.global_step >= 2 else h)), batch[1])


@pytest.mark.parametrize("optimizer", [Lion, Adan, LAMB, LARS, ACClip])
def test_our_optimizers_that_step_each_parameter_by_itself(optimizer: Any) -> None:
    assert _Wide().wide.weight.numel() > chunk_size(torch.device("cpu"))
    found, technique = both(_Wide, others=lambda: [ReplaceOptimizer(optimizer, parameters="all", lr=1e-3)])
    assert found == [] and technique.report()["released_bytes"] == trained_bytes(_Wide())


@pytest.mark.parametrize("made", ["list", "each step"])
def test_schedules_and_groups(made: str) -> None:
    def make(net: nn.Module) -> Any:
        named = list(net.named_parameters())
        groups = [
            {"params": [p for name, p in named if "weight" in name], "weight_decay": 0.1},
            {"params": [p for name, p in named if "weight" not in name], "lr": 0.003},
        ]
        optimizer = AdamW(groups, lr=0.01)
        if made == "list":
            return [optimizer], [LambdaLR(optimizer, lambda epoch: 0.5**epoch)]
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": OneCycleLR(optimizer, 0.1, total_steps=20), "interval": "step"},
        }

    found, technique = both(configured(make), max_steps=12)
    assert found == [] and technique.report()["released_bytes"] == trained_bytes(TinyClassifier())


class _Sparse(TinyClassifier):
    def __init__(self) -> None:
        super().__init__(batch_norm=False)
        self.table = nn.Embedding(20, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x) + self.table((x[:, 0] * 3).long().clamp(0, 19)))

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1)


class _Skips(TinyClassifier):
    """Skips batches, and leaves a part unused in others."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            return None
        return F.cross_entropy(self.head(self.norm(self.blocks[batch_idx % 3 :](batch[0]))), batch[1])


class _RunsTheClosure(TinyClassifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (batch_idx + 1)
        optimizer.step()


class _WarmsUp(TinyClassifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (batch_idx + 1)
        optimizer.step(closure=optimizer_closure)


class _Frozen(TinyClassifier):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))


class _CheckpointsShared(TinyClassifier):
    """One block three times, checkpointed."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(self.blocks[0], x, use_reentrant=False)
        return self.head(self.norm(self.blocks[1:](x)))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("net", [_Sparse, _Skips, _WarmsUp, _Frozen, _CheckpointsShared])
def test_other_modules(net: Any) -> None:
    found, technique = both(net, max_steps=8)
    assert found == [] and technique.report()["released_bytes"] > 0


def test_a_module_that_runs_the_closure_before_the_step_keeps_its_gradients() -> None:
    found, technique = both(_RunsTheClosure)
    assert found == [] and technique.report()["released_bytes"] == 0


@pytest.mark.parametrize(
    "other",
    [lambda: Rematerialization(), lambda: ExponentialMovingAverage(half_life=2)],
    ids=["recomputed", "averaged"],
)
def test_beside_others(other: Any) -> None:
    found, technique = both(TinyGPT, "tiny_gpt", lambda: [other()])
    assert found == [] and technique.report()["released_bytes"] == trained_bytes(TinyGPT())


def test_runs_resume_with_and_without(tmp_path: Path) -> None:
    class Nothing(OptimizerInBackward):
        """Resumes exactly, as techniques do, and leaves the optimizer alone."""

        def on_optimizers(self, session: Any) -> None:
            pass

    whole = final_state(*fit("tiny_gpt", lambda: [OptimizerInBackward()], directory=tmp_path / "with"))
    fit("tiny_gpt", lambda: [Nothing()], directory=tmp_path / "without")
    saved = [checkpoints(tmp_path / name)[4] for name in ("with", "without")]
    for path, technique in zip(saved, (Nothing, OptimizerInBackward), strict=True):
        assert (
            differences(whole, final_state(*fit("tiny_gpt", lambda technique=technique: [technique()], resume=path)))
            == []
        )
    ours, plain = (torch.load(path, weights_only=True)["optimizer_states"][0] for path in saved)
    assert ours["param_groups"] == plain["param_groups"]


# -- the gradients that are held


def test_one_gradient_is_held_at_a_time() -> None:
    seen: list[list[int]] = []

    class Noting(SGD):
        steps_apart = True

        def step(self, closure: Any = None) -> Any:
            seen[-1].append(sum(p.grad is not None for p in every))
            return super().step(closure)

    class Net(TinyClassifier):
        def configure_optimizers(self) -> Optimizer:
            every[:] = self.parameters()
            return Noting(self.parameters(), lr=0.1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append([])
            return super().training_step(batch, batch_idx)

    every: list[Tensor] = []
    trainer(OptimizerInBackward(), max_steps=3).fit(Net(), loader("classifier"))
    assert seen == [[1] * len(every) + [0]] * 3  # and the last call, for parameters that are left


# -- runs that need all gradients keep them


class _Reads(TinyClassifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        assert self.norms


class _Backward(TinyClassifier):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        for p in self.parameters():
            if p.grad is not None:
                p.grad *= 0.1


class _Closure(TinyClassifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def scaled() -> Any:
            loss = optimizer_closure()
            for p in self.parameters():
                if p.grad is not None:
                    p.grad *= 0.1
            return loss

        optimizer.step(closure=scaled)


class _Callback(pl.Callback):
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert all(p.grad is not None for p in pl_module.parameters())


def _hooked(net: nn.Module) -> Optimizer:
    optimizer = SGD(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda o, args, kwargs: None)
    return optimizer


class _Joint(Lion):
    """Steps by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        every = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(every)
        for g in every:
            g.div_(norm)
        super().step()
        return loss


HELD: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "norm": (TinyClassifier, list, {"gradient_clip_val": 0.1}, "clipping by norm"),
    "accumulation": (TinyClassifier, list, {"accumulate_grad_batches": 2}, "accumulated over several batches"),
    "module": (_Reads, list, {}, "_Reads.on_before_optimizer_step may read"),
    "backward": (_Backward, list, {}, "_Backward.backward may read"),
    "closure": (_Closure, list, {}, "the module puts code around the closure"),
    "callback": (TinyClassifier, lambda: [_Callback()], {}, "_Callback may read"),
    "hooks": (configured(_hooked), list, {}, "SGD has step hooks"),
    "SAM": (TinyClassifier, lambda: [SharpnessAwareMinimization()], {}, "SharpnessAwareMinimization may use"),
    "optimizer": (
        TinyGPT,
        lambda: [ReplaceOptimizer(SOAP, lr=1e-3)],
        {},
        "SOAP may step several parameters together",
    ),
    "subclass": (
        configured(lambda net: _Joint(net.parameters(), lr=1e-3)),
        list,
        {},
        "_Joint may step several parameters together",
    ),
    "scaler": (
        TinyClassifier,
        list,
        {"plugins": lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))},
        "scaler looks for overflow",
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_gradients_are_kept_where_all_are_needed(name: str) -> None:
    build, others, settings, message = HELD[name]
    settings = {key: value() if callable(value) else value for key, value in settings.items()}
    with pytest.warns(UserWarning, match=f"OptimizerInBackward: all gradients are kept, .*{message}"):
        found, technique = both(build, "tiny_gpt" if build is TinyGPT else "classifier", others, **settings)
    assert found == [] and technique.report()["released_bytes"] == 0


def test_a_shared_weight_under_reentrant_checkpointing_is_an_error() -> None:
    class Net(TinyClassifier):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[1](x)
            for _ in range(2):
                x = checkpoint(self.blocks[0], x, use_reentrant=True)
            return self.head(self.norm(x))

    with pytest.raises(
        RuntimeError, match=r"gradient of blocks.0.0.\w+ is computed in several parts.*use_reentrant=False"
    ):
        trainer(OptimizerInBackward(), max_steps=2).fit(Net(), loader("classifier"))


def test_hooks_are_gone_after_the_fit() -> None:
    net = module("classifier")
    trainer(OptimizerInBackward(), max_steps=2).fit(net, loader("classifier"))
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
