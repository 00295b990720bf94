"""Each problem is found where it is planted, and its twin without it is not accused."""

import inspect
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from lightning_eff import ExponentialMovingAverage, LearningRateSchedule, ScheduleFree
from lightning_eff.advice._looking import clock
from lightning_eff.advice.problems import Problems
from tests.advice.planted import STEPS, Experts, Well, fit, watch


@pytest.fixture(autouse=True)
def time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "perf_counter", lambda: 0.0)


def line_of(function: Any, text: str) -> str:
    """The place of a line in this file, as a problem gives it."""
    lines, first = inspect.getsourcelines(function)
    return f"test_problems.py:{first + next(i for i, line in enumerate(lines) if text in line)}"


def test_a_run_without_problems_has_none() -> None:
    assert watch(Well()) == {}


# -- learning rates


class Scheduled(Well):
    def __init__(self, make: Any, lr: float = 1e-3, **config: Any) -> None:
        super().__init__()
        self.make, self.lr, self.config = make, lr, config

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        if self.make is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.make(optimizer), **self.config}}


CONSTANT = {
    "none": Scheduled(None),
    "warm-up alone": Scheduled(lambda o: LambdaLR(o, lambda step: min(1.0, step / 4)), interval="step"),
    "steps counted as epochs": Scheduled(lambda o: LambdaLR(o, lambda step: 1 - step / 100)),
    "too late": Scheduled(lambda o: StepLR(o, step_size=1000), interval="step"),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_a_learning_rate_that_never_decays(name: str) -> None:
    found = watch(CONSTANT[name], optimizer_steps=16)
    assert set(found) == {"learning-rate-never-decays"}
    assert (
        "0.001" in found["learning-rate-never-decays"].what
        and "16 planned steps" in found["learning-rate-never-decays"].what
    )


class ByHand(Well):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_epoch_start(self) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 1e-3 * 0.9**self.current_epoch


class InItsStep(Well):
    """Hands its learning rate to a function of another module."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


DECAYED = {
    "linear": (Well(), ()),
    "late, but within the plan": (Scheduled(lambda o: StepLR(o, step_size=900), interval="step"), ()),
    "by epochs": (Scheduled(lambda o: StepLR(o, step_size=1)), ()),
    "a metric": (Scheduled(lambda o: ReduceLROnPlateau(o), monitor="val_loss"), ()),
    "by hand": (ByHand(), ()),
    "in optimizer_step": (InItsStep(), ()),
    "by a callback": (Scheduled(None), (LearningRateSchedule("cosine"),)),
    "a cycle that ends high": (Scheduled(lambda o: LambdaLR(o, lambda s: abs(1 - s % 100 / 50)), interval="step"), ()),
    "schedule-free": (Scheduled(None), (ScheduleFree(),)),
    "averaged": (Scheduled(None), (ExponentialMovingAverage(half_life=10),)),
    "ends before the plan": (
        Scheduled(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-3, total_steps=100), interval="step"),
        (),
    ),
}


@pytest.mark.parametrize("name", DECAYED)
def test_a_learning_rate_that_decays_in_some_way_is_no_problem(name: str) -> None:
    module, callbacks = DECAYED[name]
    assert "learning-rate-never-decays" not in watch(module, *callbacks, optimizer_steps=1000)


def test_a_learning_rate_of_zero_and_one_that_is_absurd() -> None:
    class Zero(Well):
        def optimizer(self) -> torch.optim.Optimizer:
            groups = [{"params": self.encoder.parameters()}, {"params": self.head.parameters(), "lr": 0.0}]
            return torch.optim.AdamW(groups, lr=1e-3)

    found = watch(Zero())
    assert set(found) == {"learning-rate-zero"} and "group 1 of AdamW" in found["learning-rate-zero"].what
    decay = LambdaLR
    found = watch(Scheduled(lambda o: decay(o, lambda step: 1 - step / STEPS), lr=3.0, interval="step"))
    assert "learning-rate-too-large" in found


# -- losses


class NotFinite(Well):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        penalty = torch.log(x - 100.0).mean()
        return F.cross_entropy(self(x), y) + penalty


class Infinite(Well):
    def loss(self, batch: Any) -> Tensor:
        chosen = F.softmax(1000 * self(batch[0]), dim=-1)[:, 0] * 0
        return -torch.log(chosen).mean()


@pytest.mark.parametrize(("cls", "text"), [(NotFinite, "torch.log("), (Infinite, "torch.log(")])
def test_a_loss_that_is_not_finite_is_traced_to_its_line(cls: type[Well], text: str) -> None:
    problem = watch(cls())["loss-not-finite"]
    assert "step 1 " in problem.what and "torch's log" in problem.what
    assert line_of(cls.loss, text) in problem.what


def test_a_loss_that_becomes_infinite_later_gives_the_step() -> None:
    class Later(Well):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (float("inf") if self.global_step == 7 else 1.0)

    assert "The loss of step 8 is infinite" in watch(Later())["loss-not-finite"].what


class Masked(Well):
    """Attention with a mask of minus infinity, rows that are masked whole, and NaN that is replaced."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        scores = (x @ x.T).masked_fill(torch.eye(len(x), dtype=torch.bool), float("-inf"))
        hidden = torch.softmax(scores, -1) @ x
        broken = torch.softmax(torch.full((3,), float("-inf")), -1)
        return F.cross_entropy(self(hidden), y) + torch.where(broken.isnan(), 0.0, broken).sum()


def test_infinities_that_masks_need_are_no_problem() -> None:
    assert watch(Masked()) == {}


def test_a_loss_without_any_parameter() -> None:
    class Detached(Well):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch).detach()

    class OfTheBatch(Well):
        def loss(self, batch: Any) -> Tensor:
            return batch[0].clone().requires_grad_().square().mean()

    problems = Problems()
    with pytest.raises(RuntimeError, match="does not require grad"):
        fit(Detached(), problems, num_sanity_val_steps=0)
    assert [one.name for one in problems.problems()] == ["loss-without-parameters"]
    assert set(watch(OfTheBatch())) == {"loss-without-parameters"}


# -- parameters


class Unused(Well):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


def test_parameters_that_never_get_a_gradient() -> None:
    problem = watch(Unused())["unused-parameters"]
    assert "8 parameter tensors (80 numbers)" in problem.what
    assert "spare.0.weight, spare.0.bias, spare.1.weight, spare.1.bias, spare.2.weight and 3 more" in problem.what


class Frozen(Unused):
    def __init__(self) -> None:
        super().__init__()
        self.spare.requires_grad_(False)


class Tied(Well):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 32, bias=False)
        self.out.weight = next(self.encoder.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x) + self.out(x))


class Teacher(Well):
    """Has a teacher that follows the encoder, and whose parameters nobody froze."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 3)

    def trained(self) -> Any:
        return [*self.encoder.parameters(), *self.head.parameters()]

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0]).softmax(-1)
        return super().loss(batch) + F.cross_entropy(self(batch[0] + 0.1), target)


class Averaged(Unused):
    """Whoever moves parameters without a gradient does so on purpose."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for p in self.spare.parameters():
                p.mul_(0.9)


@pytest.mark.parametrize("cls", [Frozen, Experts, Tied, Teacher, Averaged])
def test_parameters_that_are_frozen_shared_or_used_now_and_then_are_no_problem(cls: type[Well]) -> None:
    assert watch(cls()) == {}


def test_parameters_in_no_optimizer() -> None:
    class Forgotten(Well):
        def trained(self) -> Any:
            return self.head.parameters()

    problem = watch(Forgotten())["parameters-in-no-optimizer"]
    assert "4 parameter tensors (1,344 numbers): encoder.0.weight" in problem.what


class Manual(Well):
    """Two optimizers that the module steps by itself."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.shared = False, shared

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # pyright: ignore[reportGeneralTypeIssues]
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        first = self.parameters() if self.shared else self.encoder.parameters()
        return torch.optim.SGD(first, lr=0.1), torch.optim.SGD(self.head.parameters(), lr=0.1)


def test_parameters_in_two_optimizers() -> None:
    found = watch(Manual(shared=True))
    assert "2 parameter tensors (99 numbers): head.weight, head.bias" in found["parameters-in-two-groups"].what
    assert watch(Manual(shared=False)) == {}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_a_group_has_twice() -> None:
    class Twice(Well):
        def trained(self) -> Any:
            return [*self.parameters(), self.head.bias]

    assert "head.bias more than once" in watch(Twice())["parameters-in-two-groups"].what


def test_frozen_parameters_whose_state_is_kept() -> None:
    class FrozenLater(Well):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.encoder.requires_grad_(self.global_step < 3)

    class FrozenBefore(Well):
        def __init__(self) -> None:
            super().__init__()
            self.encoder.requires_grad_(False)

    problem = watch(FrozenLater())["frozen-parameters-with-state"]
    assert "0.0103 MiB of state for 4 parameter tensors" in problem.what
    assert watch(FrozenBefore()) == {}


def test_a_matrix_whose_gradient_is_always_zero() -> None:
    class Dead(Well):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 32)
            nn.init.constant_(self.gate.bias, -100.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x) + torch.relu(self.gate(x)))

    class Adapter(Well):
        """As LoRA begins: a factor of zeros."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(4, 32)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x) + self.b(self.a(x)))

    problem = watch(Dead())["zero-gradients"]
    assert "gate.weight" in problem.what and "encoder" not in problem.what
    assert watch(Adapter()) == {}


# -- modes


class Dropped(Well):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 32))


class Asleep(Dropped):
    def on_train_start(self) -> None:
        self.encoder.eval()


class FrozenAsleep(Asleep):
    def __init__(self) -> None:
        super().__init__()
        self.encoder.requires_grad_(False)


class KeptStatistics(Dropped):
    def on_train_start(self) -> None:
        self.encoder[1].eval()


class AwayForAMoment(Dropped):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.encoder.eval()
        with torch.no_grad():
            self.encoder(batch[0] * 2)
        self.encoder.train()
        return self.loss(batch)


def test_a_module_that_trains_in_eval_mode() -> None:
    problem = watch(Asleep())["eval-mode-in-training"]
    assert "encoder (1 dropout layer and 1 BatchNorm layer)" in problem.what
    whole = Dropped()
    whole.eval()
    assert "the whole module" in watch(whole)["eval-mode-in-training"].what


@pytest.mark.parametrize("cls", [Dropped, FrozenAsleep, KeptStatistics, AwayForAMoment])
def test_eval_mode_on_purpose_is_no_problem(cls: type[Well]) -> None:
    assert watch(cls()) == {}


def test_a_module_in_train_mode_in_validation() -> None:
    class Awake(Dropped):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.encoder.train()
            super().validation_step(batch, batch_idx)

    class Uncertain(Dropped):
        """Asks for several answers, with dropout alone."""

        def on_validation_start(self) -> None:
            self.encoder[2].train()

    assert "encoder (1 dropout layer and 1 BatchNorm layer)" in watch(Awake())["train-mode-in-validation"].what
    assert watch(Uncertain()) == {}


def test_the_worst_comes_first_and_each_says_what_to_do() -> None:
    class Both(Unused):
        def loss(self, batch: Any) -> Tensor:
            super().loss(batch).item()
            return super().loss(batch) * float("nan")

    found = list(watch(Both()).values())
    assert [one.name for one in found] == [
        "loss-not-finite",
        "unused-parameters",
        "duplicate-work",
        "host-synchronisation",
    ]
    assert all(re.search(r"[.)]$", one.fix) and one.what.endswith(".") for one in found)
