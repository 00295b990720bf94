"""Learning rates that a module or a callback writes by hand, against the same run with parameter groups made by hand."""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import (
    LearningRateSchedule,
    LinearScaling,
    LoRA,
    ReplaceOptimizer,
    ScheduleFree,
    StochasticWeightAveraging,
)
from lightning_eff._core._optim.external_rates import Known, Share, after_closure, interpret
from lightning_eff._core._optim.pinned_rates import HeldRates
from tests.models import flat, trainer

LR, HEAD, STEPS = 0.1, 0.5, 8


def scale(step: int) -> float:
    """A warm-up of four steps, and a decay after it."""
    return min(1.0, (step + 1) / 4) * (1.0 if step < 5 else 0.5)


class Hand(pl.LightningModule):
    """Writes ``scale`` times its learning rate at one of the places where users do.

    Args:
        place: where it writes.
        relative: it multiplies what stands there, instead of setting it.
        rates: parameter groups made by hand, with the multiples written by hand too: the reference.
        first: it writes into the first group alone.
    """

    def __init__(self, place: str, *, relative: bool = False, rates: bool = False, first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.place, self.relative, self.rates, self.first = place, relative, rates, first
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(6, 3)
        self.last = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(batch[0])), batch[1])

    def write(self, step: int) -> None:
        optimizer: Any = self.optimizers()
        groups = optimizer.param_groups[: 1 if self.first and not self.rates else None]
        for group in groups:
            if self.relative:
                group["lr"] *= scale(step) / self.last
            else:
                group["lr"] = group.get("full", LR) * scale(step)
        self.last = scale(step)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.place == "on_train_batch_start":
            self.write(self.global_step)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.place == "on_before_optimizer_step":
            self.write(self.global_step)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.place == "optimizer_step":
            self.write(self.global_step)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.write(self.global_step)

    def configure_optimizers(self) -> Any:
        if not self.rates:
            optimizer = torch.optim.SGD(self.parameters(), lr=LR, momentum=0.9)
        else:
            rest = [p for name, p in self.named_parameters() if name != "head.weight"]
            groups = [{"params": rest, "lr": LR, "full": LR}, {"params": [self.head.weight], "lr": HEAD, "full": HEAD}]
            optimizer = torch.optim.SGD(groups, momentum=0.9)
        if self.place == "lr_scheduler_step":
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        return optimizer


class Writer(pl.Callback):
    """Writes as the module would, from a callback of the user's."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.write(trainer.global_step)


class Rates(pl.Callback):
    """The learning rates of all groups at each step."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(
                lambda o, *_: self.seen.append([round(float(g["lr"]), 9) for g in o.param_groups])
            )


def data() -> DataLoader[Any]:
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(4 * STEPS, 6, generator=g), torch.randint(0, 3, (4 * STEPS,), generator=g)
    return DataLoader(TensorDataset(x, y), 4)


def run(net: Hand, *callbacks: Any, ckpt: Any = None, **keywords: Any) -> Any:
    t = trainer(*callbacks, **{"max_steps": STEPS, **keywords})
    t.fit(net, data(), ckpt_path=ckpt)
    return t


PLACES = ["on_train_batch_start", "on_before_optimizer_step", "optimizer_step", "lr_scheduler_step", "callback"]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_group_of_its_own_rate_follows_what_is_written(place: str, relative: bool, first: bool) -> None:
    ours, reference = (Hand(place, relative=relative, rates=rates, first=first) for rates in (False, True))
    writer = [Writer()] if place == "callback" else []
    t = run(ours, *writer, ReplaceOptimizer(group_lr={"head": HEAD}))
    run(reference, *writer)
    assert torch.allclose(flat(ours), flat(reference), atol=1e-6)
    assert not torch.allclose(flat(ours), flat(Hand(place)), atol=1e-3)
    rates = sorted(g["lr"] for g in t.optimizers[0].param_groups)
    assert rates[1] / rates[0] == pytest.approx(HEAD / LR)


@pytest.mark.parametrize("relative", [False, True])
def test_one_group_for_all_parameters_follows_too_and_says_how(relative: bool) -> None:
    seen = Rates()
    means = "multiples of the previous ones" if relative else "the module's own"
    with pytest.warns(UserWarning, match=f"are interpreted as {means}, and every group keeps its proportion"):
        run(Hand("on_train_batch_start", relative=relative), seen, ReplaceOptimizer(torch.optim.SGD, "all", lr=2.0))
    assert [rate for (rate,) in seen.seen] == pytest.approx([2.0 * scale(step) for step in range(STEPS)])


@pytest.mark.parametrize("place", ["optimizer_step", "on_before_optimizer_step"])
def test_factors_b_of_lora_keep_their_multiple(place: str) -> None:
    seen = Rates()
    run(Hand(place), seen, LoRA(2, b_rate=16.0))
    late = int(place == "optimizer_step")  # it writes after the step, with the number of that step
    for step, (a, b) in enumerate(seen.seen[late:]):
        assert (a, b) == pytest.approx((LR * scale(step), 16 * LR * scale(step)))


def test_a_multiple_beside_a_scheduler_is_left_to_the_scheduler() -> None:
    class Scheduled(Hand):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=LR)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4, eta_min=0.05)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()

    seen = Rates()
    run(Scheduled("nowhere"), seen, LoRA(2, b_rate=4.0))
    # at the end of the cosine both groups are at eta_min, though nobody wrote that by hand
    assert seen.seen[4] == pytest.approx([0.05, 0.05])
    assert seen.seen[0] == pytest.approx([LR, 4 * LR])


def test_a_factor_for_the_step_multiplies_what_is_written_within_it() -> None:
    ours, reference = Hand("on_before_optimizer_step"), Hand("on_before_optimizer_step")
    run(ours, LinearScaling(2, power=1.0, warmup=0.0))
    reference.write = lambda step: [g.update(lr=2 * LR * scale(step)) for g in reference.optimizers().param_groups]  # type: ignore[method-assign,assignment,union-attr]
    run(reference)
    assert torch.allclose(flat(ours), flat(reference), atol=1e-6)


@pytest.mark.parametrize("place", ["on_train_batch_start", "on_before_optimizer_step", "optimizer_step", "callback"])
def test_a_schedule_of_ours_holds_and_says_so_once(place: str) -> None:
    seen = Rates()
    writer = [Writer()] if place == "callback" else []
    with pytest.warns(UserWarning, match="LearningRateSchedule: the module or another callback wrote a") as warned:
        run(Hand(place), *writer, LearningRateSchedule("linear"), seen)
    assert sum("wrote a learning rate" in str(w.message) for w in warned) == 1
    assert [rate for (rate,) in seen.seen] == pytest.approx([LR * (1 - step / STEPS) for step in range(STEPS)])


def test_the_averages_own_rate_holds_from_its_start() -> None:
    seen = Rates()
    averaging = StochasticWeightAveraging(start=0.5, rate=0.25, cycle=1)
    with pytest.warns(UserWarning, match="StochasticWeightAveraging: the module or another callback wrote a"):
        run(Hand("on_before_optimizer_step"), averaging, seen)
    assert [rate for (rate,) in seen.seen] == pytest.approx([LR * scale(step) for step in range(4)] + [0.25 * LR] * 4)


@pytest.mark.filterwarnings("ignore:Learning rates written into")
def test_schedule_free_keeps_its_factor() -> None:
    seen = Rates()
    run(Hand("on_train_batch_start"), ScheduleFree(lr_factor=3.0), seen)
    assert [rate for (rate,) in seen.seen] == pytest.approx([3 * LR * scale(step) for step in range(STEPS)])


MAKES: dict[str, Callable[[], Any]] = {
    "group_lr": lambda: ReplaceOptimizer(group_lr={"head": HEAD}),
    "all": lambda: ReplaceOptimizer(functools.partial(torch.optim.SGD, momentum=0.9), "all", lr=2.0),
    "lora": lambda: LoRA(2, b_rate=16.0),
}


@pytest.mark.filterwarnings("ignore:Learning rates written into")
@pytest.mark.parametrize("place", ["optimizer_step", "on_before_optimizer_step", "lr_scheduler_step"])
@pytest.mark.parametrize("name", sorted(MAKES))
def test_a_resumed_run_goes_on_as_the_undisturbed_one(name: str, place: str, tmp_path: Path) -> None:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    whole = Hand(place)
    run(whole, MAKES[name](), Save())
    for step in (2, 5):
        resumed = Hand(place)
        run(resumed, MAKES[name](), ckpt=tmp_path / f"{step}.ckpt")
        assert torch.equal(flat(whole), flat(resumed))


def test_what_a_written_value_means() -> None:
    shares = [Share(0, 1.0), Share(0, 20.0)]

    def meant(known: list[float], now: dict[int, float]) -> dict[int, float]:
        return interpret(shares, known, now).rates

    assert meant([1e-3, 2e-2], {0: 5e-4, 1: 5e-4}) == {0: 5e-4}
    assert meant([1e-3, 2e-2], {0: 5e-4, 1: 1e-2}) == {0: pytest.approx(5e-4)}
    assert meant([1e-3, 2e-2], {1: 1e-3}) == {0: 1e-3}  # the same value again, which shows in one group alone
    assert meant([1e-3, 2e-2], {0: 0.0, 1: 0.0}) == {0: 0.0}
    assert meant([0.0, 0.0], {0: 1e-4, 1: 1e-4}) == {0: 1e-4}
    assert meant([1e-3, 2e-2], {0: 2e-4}) == {0: pytest.approx(2e-4)}  # the module knows one group alone
    assert meant([1e-3, 2e-2], {1: 3e-2}) == {}  # who writes the second knows both
    assert interpret(shares, [1e-3, 2e-2], {1: 3e-2}).left == (1,)
    assert interpret([Share(0, 20.0)], [0.0], {0: 1e-4}).rates == {0: 1e-4}  # nothing is a multiple of zero
    assert interpret([Share(0, 1.0), Share(0, 0.0)], [1e-3, 0.0], {0: 5e-4}).rates == {0: 5e-4}
    # a group that follows nothing tells nothing
    assert interpret([None, *shares], [1.0, 1e-3, 2e-2], {0: 0.5, 1: 5e-4, 2: 5e-4}).rates == {0: 5e-4}


def test_a_tensor_that_is_changed_in_place_is_another_rate() -> None:
    rate = torch.tensor(0.1)
    known = Known([{"lr": rate}, {"lr": None}])
    assert known.changed([{"lr": rate}, {"lr": 1.0}]) == {}
    rate.mul_(1.0)
    assert known.changed([{"lr": rate}]) == {}
    rate.mul_(0.5)
    assert known.changed([{"lr": rate}]) == {0: pytest.approx(0.05)}


@pytest.mark.parametrize("positional", [True, False])
def test_something_is_done_as_a_closure_ends(positional: bool) -> None:
    events: list[str] = []

    def closure() -> str:
        events.append("closure")
        return "loss"

    args, keywords = ((0, closure), {}) if positional else ((0,), {"closure": closure})
    found = after_closure(args, keywords, lambda: events.append("after"))
    assert found is not None and events == []
    assert (found[0][1] if positional else found[1]["closure"])() == "loss" and events == ["closure", "after"]
    assert after_closure((0, None), {}, lambda: events.append("never")) is None


def one_weight(lr: Any = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


def test_held_rates_override_schedulers_in_silence_and_hands_aloud() -> None:
    optimizer, ours = one_weight(), HeldRates("Ours")
    group = optimizer.param_groups[0]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    ours.set(optimizer, [1.0], 0.9, [scheduler])
    optimizer.step()
    scheduler.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.set(optimizer, [1.0], 0.8, [scheduler])
    assert group["lr"] == 0.8
    group["lr"] = 0.3
    with pytest.warns(UserWarning, match=r"wrote a learning rate of 0\.3 .* overrides it with 0\.7"):
        ours.set(optimizer, [1.0], 0.7, [scheduler])
    assert group["lr"] == 0.7
    group["lr"] = 0.3
    optimizer.step()
    assert group["lr"] == 0.7


def test_held_rates_take_new_groups_and_leave_those_without_a_rate() -> None:
    optimizer, ours, bases = one_weight(), HeldRates("Ours"), [1.0]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 2.0})
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    del optimizer.param_groups[2]["lr"]
    ours.set(optimizer, bases, 0.5)
    assert bases == [1.0, 2.0, None]
    assert [group.get("lr") for group in optimizer.param_groups] == [0.5, 1.0, None]


def test_held_rates_are_let_go_and_warn_anew_in_the_next_run() -> None:
    optimizer, ours = one_weight(), HeldRates("Ours")
    group = optimizer.param_groups[0]
    for _ in range(2):
        ours.set(optimizer, [1.0], 0.5)
        group["lr"] = 3.0
        with pytest.warns(UserWarning, match="overrides it with 0.5"):
            optimizer.step()
        assert group["lr"] == 0.5
        ours.release()
        group["lr"] = 4.0
        optimizer.step()
        assert group["lr"] == 4.0


@pytest.mark.parametrize("ratio", [20.0, 3.0, 0.3, 0.03])
@pytest.mark.parametrize("length", [20, 500])
def test_a_group_alone_tells_a_warm_up_from_a_decay(ratio: float, length: int) -> None:
    stands, absolute = ratio, False
    for step in range(length):
        meant = interpret([Share(0, ratio)], [stands], {0: (step + 1) / length}, absolute)
        assert meant.absolute and meant.rates == {0: (step + 1) / length}
        stands, absolute = ratio * meant.rates[0], meant.absolute
    for factor in (0.99, 0.5, 0.97):
        assert interpret([Share(0, ratio)], [ratio], {0: factor * ratio}).rates == {0: pytest.approx(factor)}


@pytest.mark.filterwarnings("ignore:Learning rates written into")
@pytest.mark.parametrize("writes", ["both", "second", "zip"])
@pytest.mark.parametrize("replaced", ["blocks.*.weight", "blocks.*"])
def test_param_groups_are_counted_as_the_module_made_them(replaced: str, writes: str) -> None:
    class Two(Hand):
        def write(self, step: int) -> None:
            groups = self.optimizers().param_groups  # type: ignore[union-attr]
            if writes == "zip":
                for group, rate in zip(groups, (LR, 0.02), strict=False):
                    group["lr"] = rate * scale(step)
                return
            if writes == "both":
                groups[0]["lr"] = LR * scale(step)
            groups[1]["lr"] = 0.02 * scale(step)

        def configure_optimizers(self) -> Any:
            parts = [{"params": self.blocks.parameters()}, {"params": self.head.parameters(), "lr": 0.02}]
            return torch.optim.SGD(parts, lr=LR)

    seen = Rates()
    run(Two("on_train_batch_start"), seen, ReplaceOptimizer(torch.optim.SGD, [replaced], lr=2.0))
    for step, rates in enumerate(seen.seen):
        low = LR * (1.0 if writes == "second" else scale(step))
        plain = [low] if replaced == "blocks.*.weight" else []
        assert sorted(rates) == pytest.approx(sorted([20 * low, *plain, 0.02 * scale(step)])), step


def test_what_stays_as_written_is_told() -> None:
    class Second(Hand):
        def write(self, step: int) -> None:
            self.optimizers().param_groups[1]["lr"] = 0.3 / (1 + step)  # type: ignore[union-attr]

    with pytest.warns(UserWarning, match=r"by hand into optimizer.param_groups\[1\], not in proportion"):
        run(Second("on_train_batch_start"), ReplaceOptimizer(group_lr={"head": HEAD}))
