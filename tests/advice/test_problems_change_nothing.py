"""Watching changes no bit of a run, and accuses no module that is well made."""

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import Tensor, _tensor_str, nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from examples.gpt.data import StdlibText
from examples.gpt.module import GPT
from examples.huggingface.module import HuggingFaceGPT2
from examples.mae.module import MaskedAutoencoder
from examples.vit.data import Digits
from examples.vit.module import ViT
from lightning_eff.advice._looking import clock
from lightning_eff.advice.problems import Problems
from tests import models
from tests.advice.planted import STEPS, Experts, Gan, Well, fit, rows

Made = tuple[pl.LightningModule, dict[str, Any]]


class Convolutions(Well):
    """Dropout, BatchNorm and a recurrent layer, whose random numbers and buffers must stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.encoder = nn.Sequential(
            nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.encoder(x))[0])


class Penalized(Gan):
    """A critic whose gradient is penalized, with backward passes by hand, an average of the weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.slow = copy.deepcopy(self.generator).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        real = batch[0]
        with torch.no_grad():
            fake = self.generator(torch.randn(len(real), 4))
        mixed = torch.lerp(real, fake, torch.rand(len(real), 1)).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        loss = (self.critic(fake) - self.critic(real)).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        second.zero_grad()
        loss.backward()
        second.step()
        first.zero_grad()
        (-self.critic(self.generator(torch.randn(len(real), 4)))).mean().backward()
        first.step()
        with torch.no_grad():
            self.seen += len(real)
            for old, new in zip(self.slow.parameters(), self.generator.parameters(), strict=True):
                old.lerp_(new, 0.1)


class Checkpointed(Well):
    """Recomputes its encoder, by a part that is compiled, in both of the ways that there are."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.compiled = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        x = self.compiled(x)
        return self.head(checkpoint(self.encoder, x, use_reentrant=self.reentrant))


class FineTuned(Well):
    """A frozen backbone in eval mode, as a feature extractor is."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.1)).requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.encoder.eval()

    def trained(self) -> Any:
        return self.head.parameters()


class Solved(Well):
    """LBFGS, which calls the step several times."""

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class HuggingFace(models.HuggingFace):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LinearLR(optimizer, 1.0, 0.0, STEPS), "interval": "step"},
        }


def family(name: str) -> Callable[[], Made]:
    def make() -> Made:
        module = models.hugging_face(name, dropout=0.1)
        module.__class__ = HuggingFace
        data = models.loader(name)
        return module, {"train": data, "val": data}

    return make


def text() -> dict[str, Any]:
    return {"train": StdlibText(block_size=64, batch_size=4), "limit_val_batches": 2, "val_check_interval": STEPS}


def digits() -> dict[str, Any]:
    return {"train": Digits(batch_size=16), "limit_val_batches": 2}


MODULES: dict[str, Callable[[], Made]] = {
    "plain": lambda: (Well(), {}),
    "convolutions": lambda: (Convolutions(), {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "bf16": lambda: (Convolutions(), {"precision": "bf16-mixed"}),
    "gan": lambda: (Gan(), {}),
    "penalized": lambda: (Penalized(), {}),
    "experts": lambda: (Experts(), {}),
    "fine-tuned": lambda: (FineTuned(), {}),
    "checkpointed": lambda: (Checkpointed(reentrant=False), {}),
    "checkpointed, reentrant": lambda: (Checkpointed(reentrant=True), {}),
    "lbfgs": lambda: (Solved(), {}),
    "gpt": lambda: (GPT(dim=32, num_layers=2, num_heads=2, block_size=64, dropout=0.1), text()),
    "huggingface": lambda: (HuggingFaceGPT2(n_layer=2), text()),
    "vit": lambda: (ViT(dim=48, num_layers=2, dropout=0.1), digits()),
    "mae": lambda: (MaskedAutoencoder(num_layers=2), digits()),
    **{name: family(name) for name in ("gpt2", "bert", "t5")},
}


def state(module: pl.LightningModule, trainer: pl.Trainer) -> list[Tensor]:
    """All numbers of a run."""
    optimizers = [v for o in trainer.optimizers for s in o.state.values() for v in s.values() if isinstance(v, Tensor)]
    rates = [torch.tensor([g["lr"] for g in o.param_groups]) for o in trainer.optimizers]
    return [*module.state_dict().values(), *optimizers, *rates, torch.get_rng_state()]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("name", MODULES)
def test_a_watched_run_is_the_same_and_a_good_module_has_no_problem(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "perf_counter", lambda: 0.0)  # how long things take is no matter of the module here
    runs: list[list[Tensor]] = []
    attributes: list[list[set[str]]] = []
    problems = Problems()
    for callbacks in ((), (problems,)):
        torch.compiler.reset()
        pl.seed_everything(1)
        module, given = MODULES[name]()
        trainer = fit(module, *callbacks, **given)
        runs.append(state(module, trainer))
        attributes.append([set(vars(m)) for m in module.modules()])
    plain, watched = runs
    assert attributes[0] == attributes[1]
    assert len(plain) == len(watched) and all(map(torch.equal, plain, watched))
    assert problems.problems() == []


def patched() -> list[dict[str, Any]]:
    """What is in the classes and modules of others that a watched step changes."""
    return [dict(vars(one)) for one in (Tensor, torch.autograd, _tensor_str, torchmetrics.Metric)]


def test_what_was_patched_is_put_back() -> None:
    before = patched()
    trainer = fit(Well(), Problems())
    assert patched() == before
    assert "training_step" not in vars(trainer.strategy) and "validation_step" not in vars(trainer.strategy)

    class Fails(Well):
        def loss(self, batch: Any) -> Tensor:
            if self.trainer.training:
                raise KeyError("planted")
            return super().loss(batch)

    with pytest.raises(KeyError, match="planted"):
        fit(Fails(), Problems())
    assert patched() == before


def test_two_fits_are_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "perf_counter", lambda: 0.0)
    problems = Problems()

    class Bad(Well):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * float("nan")

    fit(Bad(), problems)
    assert [one.name for one in problems.problems()] == ["loss-not-finite"]
    alone = pl.Trainer(accelerator="cpu", logger=False, callbacks=Problems(), enable_progress_bar=False)
    alone.validate(Well(), rows(), verbose=False)
    fit(Well(), problems)
    assert problems.problems() == []


class Spied(torch.autograd.Function):
    """Notes the mode under which its backward pass runs."""

    modes: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Spied.modes.append(_get_current_dispatch_mode())
        return gradients[0]


def test_autograd_runs_without_a_mode_and_compiled_parts_stay_compiled() -> None:
    """Under a mode autograd takes other ways, and torch.compile falls back to eager mode."""
    compiled = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    class Inner(Gan):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.compile(self.generator, backend=backend)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(Spied.apply(self.generator(batch[0][:, :4])).mean())
            gradient, *_ = torch.autograd.grad(
                Spied.apply(self.critic(batch[0])).mean(), list(self.critic.parameters())[:1]
            )
            assert gradient.ndim == 2

    torch.compiler.reset()
    Spied.modes.clear()
    fit(Inner(), Problems(), max_epochs=1, max_steps=-1)
    assert len(Spied.modes) == 16 and set(Spied.modes) == {None}
    assert compiled == 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_runs_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A higher-order operator, which modes refuse unless they take it."""
    monkeypatch.setattr(clock, "perf_counter", lambda: 0.0)
    from torch.nn.attention.flex_attention import flex_attention

    class Flexible(Well):
        def loss(self, batch: Any) -> Tensor:
            with torch.no_grad():
                heads = batch[0].view(1, 1, -1, 8)
                x = flex_attention(heads, heads, heads).view(-1, 8)
            return super().loss((x, batch[1]))

    problems = Problems()
    fit(Flexible(), problems)
    assert problems.problems() == []
