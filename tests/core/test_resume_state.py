"""What a run's hooks change beside weights, and what a checkpoint cannot hold."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MetricCollection
from torchmetrics.classification import BinaryPrecision, BinaryRecall

from lightning_eff import (
    MFAC,
    EightBitOptimizer,
    ExactResume,
    GradientNoiseScale,
    Mixup,
    ReplaceOptimizer,
    ScheduleFree,
    StochasticWeightAveraging,
)
from lightning_eff._core._resume.logged_metrics import Metrics

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory",
    "ignore:The dirpath has changed",
    "ignore:Be aware that",
    "ignore:The provided params",
)


class Tuned(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64))
        self.head = nn.Linear(64, 4)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def loader(count: int = 20, seed: int = 0, **settings: Any) -> DataLoader:
    g = torch.Generator().manual_seed(seed)
    data = TensorDataset(torch.randn(count, 8, generator=g), torch.randint(0, 4, (count,), generator=g))
    return DataLoader(data, 4, **{"shuffle": True, **settings})


def fit(
    callbacks: list[pl.Callback],
    folder: Path | None = None,
    resume: Path | None = None,
    make: Callable[[], pl.LightningModule] = Tuned,
    train: Any = None,
    **settings: Any,
) -> tuple[dict[str, Tensor], pl.Trainer]:
    pl.seed_everything(2 if resume else 1, verbose=False)
    module = make()
    saver = [ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")] if folder else []
    trainer = pl.Trainer(
        **{"accelerator": "cpu", "max_epochs": 3, "logger": False, **settings},
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(folder),
        callbacks=[*callbacks, *saver],
    )
    trainer.fit(module, train or loader(), loader(8, 1, shuffle=False), ckpt_path=resume)
    return {name: value.clone() for name, value in module.state_dict().items()}, trainer


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [name for name in a if not torch.equal(a[name].nan_to_num(-7.0), b[name].nan_to_num(-7.0))]


class Thaws(BaseFinetuning):
    """A user's own: another part in each epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch:
            self.unfreeze_and_add_param_group(pl_module.backbone[3 if epoch == 1 else 0], optimizer, lr=1e-3)
        if epoch == 2:
            self.make_trainable(pl_module.backbone[1])


BESIDE: dict[str, Callable[[], pl.Callback]] = {
    "alone": ExactResume,
    "eight_bit": lambda: EightBitOptimizer(min_size=128),
    "group_lr": lambda: ReplaceOptimizer(group_lr={"head": 1e-3}),
    "schedule_free": lambda: ScheduleFree(),
    "swa": lambda: StochasticWeightAveraging(start=0.1),
    "mfac": lambda: MFAC(num_gradients=4),
}


@pytest.mark.parametrize("finetuning", [lambda: BackboneFinetuning(1, backbone_initial_lr=1e-2), Thaws])
@pytest.mark.parametrize("beside", BESIDE)
def test_parts_that_are_thawed_as_the_run_goes_on(beside: str, finetuning: Any, tmp_path: Path) -> None:
    if beside == "schedule_free":
        pytest.importorskip("schedulefree")
    whole, _ = fit([BESIDE[beside](), finetuning()], tmp_path)
    for step in (3, 5, 8, 13):
        again, trainer = fit([BESIDE[beside](), finetuning()], resume=tmp_path / f"step={step}.ckpt")
        assert differing(whole, again) == [], step
        module: Any = trainer.lightning_module
        assert module.backbone[0].weight.requires_grad


def test_what_the_user_freezes_between_two_runs_stays_frozen(tmp_path: Path) -> None:
    fit([ExactResume()], tmp_path)

    def frozen() -> pl.LightningModule:
        module = Tuned()
        module.backbone[0].weight.requires_grad_(False)
        module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=1e-2)
        return module

    _, trainer = fit([ExactResume()], resume=tmp_path / "step=3.ckpt", make=frozen)
    module: Any = trainer.lightning_module
    assert not module.backbone[0].weight.requires_grad


@pytest.mark.parametrize("kind", ["window", "early"])
def test_callbacks_that_steer_the_run(kind: str, tmp_path: Path) -> None:
    """The window that an epoch's beginning set, and an early stop that a validation decided."""

    def callbacks() -> list[pl.Callback]:
        if kind == "window":
            return [ExactResume(), GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})]
        return [ExactResume(), EarlyStopping("val_loss", patience=1, min_delta=10.0)]

    whole, trainer = fit(callbacks(), tmp_path, max_epochs=4)
    steps = trainer.global_step
    assert steps < 20
    for path in sorted(tmp_path.glob("step=*.ckpt"))[::2]:
        again, trainer = fit(callbacks(), resume=path, max_epochs=4)
        assert trainer.global_step == steps, path.stem
        assert differing(whole, again) == [], path.stem


def test_an_early_stop_does_not_bind_a_run_without_it(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_on_train_epoch_end=True, filename="{epoch}", save_top_k=-1)
    stops: list[pl.Callback] = [ExactResume(), EarlyStopping("val_loss", patience=1, min_delta=10.0), saver]
    _, trainer = fit(stops, tmp_path / "steps", max_epochs=4)
    last = trainer.current_epoch - 1
    _, trainer = fit([ExactResume()], resume=tmp_path / f"epoch={last}.ckpt", max_epochs=4)
    assert trainer.current_epoch == 4


def test_held_gradients_of_the_noise_scale(tmp_path: Path) -> None:
    """Two consecutive steps are one measurement: of the first the gradient is held."""
    _, trainer = fit([GradientNoiseScale()], tmp_path)
    name = "eff/gradient_noise_scale/"
    whole = {k: v for k, v in trainer.callback_metrics.items() if k.startswith(name)}
    assert whole[f"{name}steps"] == 7
    for step in (3, 6):
        _, trainer = fit([GradientNoiseScale()], resume=tmp_path / f"step={step}.ckpt")
        again = {k: v for k, v in trainer.callback_metrics.items() if k.startswith(name)}
        assert differing(whole, again) == [], step


class Skips(Tuned):
    """Its training step returns None at every third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 3 else self.loss(batch)


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_batches_without_a_loss_are_counted_alike(tmp_path: Path) -> None:
    """A resumed run that begins with such a batch has not yet seen which tensors are labels."""
    technique = Mixup(alpha=1.0)
    fit([technique], tmp_path, make=Skips)
    again = Mixup(alpha=1.0)
    fit([again], resume=tmp_path / "step=3.ckpt", make=Skips)
    counts = ("batches", "changed", "shares")
    assert {k: again.state_dict()[k] for k in counts} == {k: technique.state_dict()[k] for k in counts}
    assert technique.state_dict()["batches"] == 15


class Sample:
    """What a checkpoint cannot hold."""

    def __init__(self, items: list[Any]) -> None:
        self.tensors = torch.utils.data.default_collate(items)

    def to(self, device: Any, **kwargs: Any) -> "Sample":
        return self


class Looks(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch.tensors if isinstance(batch, Sample) else batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert len(batch.tensors[0]) == 4


def test_a_batch_that_no_checkpoint_can_hold_is_told_once(tmp_path: Path) -> None:
    train = loader(collate_fn=Sample)
    with pytest.warns(
        UserWarning, match="Looks.on_train_batch_end: a resumed run skips .* cannot hold the Sample"
    ) as told:
        fit([ExactResume()], tmp_path, make=Looks, train=train)
    assert len([w for w in told if "a resumed run skips" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit([ExactResume()], resume=tmp_path / "step=3.ckpt", make=Looks, train=loader(collate_fn=Sample))


def test_metrics_that_share_a_state() -> None:
    """The members of a collection's compute group: one is updated, and the others are told later."""

    def made() -> nn.ModuleDict:
        return nn.ModuleDict({"all": MetricCollection([BinaryPrecision(), BinaryRecall()]), "seen": CatMetric()})

    g = torch.Generator().manual_seed(0)
    batches = [(torch.rand(8, generator=g), torch.randint(0, 2, (8,), generator=g)) for _ in range(5)]
    whole, again = made(), made()
    kept, taken = Metrics(whole), Metrics(again)
    for i, (scores, labels) in enumerate(batches):
        for held in (whole, again) if i >= 3 else (whole,):
            held["all"].update(scores, labels)
            held["seen"].update(scores)
        if i == 2:
            assert kept.state_dict()["all.BinaryRecall"]["_update_count"] == 3
            taken.load_state_dict(kept.state_dict(), torch.device("cpu"))
    expected: Any = {**whole["all"].compute(), "seen": whole["seen"].compute()}
    found: Any = {**again["all"].compute(), "seen": again["seen"].compute()}
    assert differing(expected, found) == []
    scores, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    hits = float(((scores >= 0.5) & (labels == 1)).sum())
    assert float(found["BinaryRecall"]) == pytest.approx(hits / float(labels.sum()))
    assert torch.equal(found["seen"], scores)


class Midway(pl.Callback):
    def __init__(self, hook: str, path: Path) -> None:
        setattr(self, hook, lambda trainer, *args: trainer.save_checkpoint(path))


@pytest.mark.parametrize(
    ("hook", "text"),
    [("on_before_optimizer_step", "while a step is under way"), ("on_validation_batch_end", "validation is under way")],
)
def test_hooks_within_a_step_are_told_of_once(hook: str, text: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=text) as told:
        fit([ExactResume(), Midway(hook, tmp_path / "a.ckpt")], num_sanity_val_steps=0)
    assert len([w for w in told if text in str(w.message)]) == 1
    fit([ExactResume()], resume=tmp_path / "a.ckpt")


def test_a_plain_trainer_resumes_from_such_checkpoints(tmp_path: Path) -> None:
    """Of what is beside Lightning's own it takes no notice."""
    fit([ExactResume(), GradientAccumulationScheduler({0: 1, 2: 2})], tmp_path)
    for step in (3, 5, 12):
        torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        _, trainer = fit([], resume=tmp_path / f"step={step}.ckpt")
        assert trainer.current_epoch == 3
