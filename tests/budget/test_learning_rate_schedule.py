"""LearningRateSchedule: each shape against its paper's or torch's own, and its end at the end of any budget."""

import itertools
import math
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, Timer
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.optim import lr_scheduler as schedulers

from lightning_eff import BatchSizeWarmup, LearningRateSchedule, Muon, ReplaceOptimizer
from lightning_eff._core.technique import Technique
from lightning_eff.budget._shapes import esd, rex
from tests.cases import Case, classifier
from tests.models import LENGTH, flat, loader, module, trainer
from tests.runs import differences, final_state, fit

CASES = {
    "LearningRateSchedule": Case(
        active=lambda: LearningRateSchedule("wsd", warmup=0.2, decay=0.5),
        neutral=lambda: LearningRateSchedule("constant"),
        lost=(classifier, "classifier", "max_tokens=100.: the first batch, a .*, has no tokens"),
        as_is=lambda: LearningRateSchedule(max_tokens=100),
    )
}


class Seen(pl.Callback):
    """The rates and momenta of every step, and when it was."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.rates, self.momenta, self.times = seconds, [], [], []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        time.sleep(self.seconds)
        self.times.append(time.monotonic())
        self.rates.append([float(group["lr"]) for group in optimizer.param_groups])
        self.momenta.append([group.get("momentum", group.get("betas")) for group in optimizer.param_groups])


def rates(technique: Technique, steps: int = 20, name: str = "classifier", **kwargs: Any) -> list[float]:
    seen = Seen()
    net = module(name, lr=1.0) if name == "classifier" else module(name)
    trainer(technique, seen, **{"max_steps": steps, **kwargs}).fit(net, loader(name))
    return [rate for (rate,) in seen.rates]


# -- the shapes


def torchs(make: Any, steps: int = 20) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("technique", "make"),
    [
        (lambda: LearningRateSchedule(), lambda o: schedulers.LinearLR(o, 1.0, 0.0, total_iters=20)),
        (lambda: LearningRateSchedule("linear", 0, 0.1), lambda o: schedulers.LinearLR(o, 1.0, 0.1, total_iters=20)),
        (lambda: LearningRateSchedule("cosine", final=0.2), lambda o: schedulers.CosineAnnealingLR(o, 20, 0.2)),
        (
            lambda: LearningRateSchedule("sgdr", cycles=2, cycle_growth=3.0),
            lambda o: schedulers.CosineAnnealingWarmRestarts(o, 5, 3),
        ),
        (
            lambda: LearningRateSchedule("clr", cycles=2, final=0.25),
            lambda o: schedulers.CyclicLR(o, 0.25, 1.0, step_size_up=5, cycle_momentum=False),
        ),
        (
            lambda: LearningRateSchedule("constant", warmup=0.5, start=0.2),
            lambda o: schedulers.LinearLR(o, 0.2, 1.0, 10),
        ),
    ],
)
def test_shapes_are_torchs(technique: Any, make: Any) -> None:
    assert rates(technique()) == pytest.approx(torchs(make), abs=1e-12)


def test_one_cycle_is_torchs_with_its_momentum() -> None:
    """torch's ends one step before the last, so it is told one step more."""
    seen = Seen()
    net = module("classifier", lr=0.3)
    trainer(LearningRateSchedule("one_cycle", final=1 / 25e4), seen, max_steps=20).fit(net, loader("classifier"))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    scheduler = schedulers.OneCycleLR(optimizer, 0.3, total_steps=21, pct_start=7 / 21, final_div_factor=1e4)
    for step in range(20):
        # torch's peak is at pct_start * total_steps - 1 = 6 of 20 steps, ours at 0.3 of them
        assert seen.rates[step][0] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        assert seen.momenta[step][0] == pytest.approx(optimizer.param_groups[0]["momentum"], rel=1e-9)
        optimizer.step()
        scheduler.step()
    # T: momentum is lowest where the rate is highest
    highest = max(range(20), key=lambda step: seen.rates[step][0])
    assert seen.momenta[highest][0] == min(m for (m,) in seen.momenta) == 0.85


def test_cramming_is_a_triangle_over_the_whole_budget() -> None:
    found = rates(LearningRateSchedule("one_cycle", start=0.0, peak=0.5, ramp="linear", momentum=None))
    assert found == pytest.approx([1 - abs(1 - step / 10) for step in range(20)])


def test_rex_and_elastic_steps_are_their_papers() -> None:
    assert rex(0.5) == pytest.approx(2 / 3) and rex(0.0) == 1.0 and rex(1.0) == 0.0
    r = 1 / math.sqrt(2)
    for k in range(8):
        assert esd(1 - r**k) == esd((1 - r**k + 1 - r ** (k + 1)) / 2) == esd(1 - r ** (k + 1) - 1e-9) == 2.0**-k
    assert rates(LearningRateSchedule("esd"))[:16] == [1.0] * 6 + [0.5] * 4 + [0.25] * 3 + [0.125] * 2 + [0.0625]
    assert rates(LearningRateSchedule("rex", warmup=0.5))[10:] == pytest.approx([rex(i / 10) for i in range(10)])


def test_a_trapezoid_and_what_it_ends_in() -> None:
    found = rates(LearningRateSchedule("wsd", warmup=0.2, decay=0.5, final=0.1))
    assert found == pytest.approx([i / 4 for i in range(4)] + [1.0] * 8 + [1 - 0.9 * i / 8 for i in range(8)])
    falling = rates(LearningRateSchedule("wsd", decay=0.5, ramp="cosine"))
    assert falling[15] == pytest.approx(0.5) and falling[:10] == [1.0] * 10


def test_warm_up_ends_where_the_shape_begins() -> None:
    found = rates(LearningRateSchedule("clr", warmup=0.2, final=0.5, cycles=1, start=0.1))
    assert found[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4]) and found[4] == pytest.approx(0.5)


# -- the budget


@pytest.mark.parametrize(
    ("budget", "data", "steps"),
    [
        ({"max_steps": 10}, 20, 10),
        ({"max_steps": -1, "max_epochs": 2}, 20, 10),
        ({"max_steps": 5, "accumulate_grad_batches": 2}, 40, 5),
    ],
)
def test_the_rate_is_at_its_end_with_steps_and_epochs(budget: dict[str, Any], data: int, steps: int) -> None:
    seen = Seen()
    trainer(LearningRateSchedule(), seen, **budget).fit(module("classifier", lr=1.0), loader("classifier", data))
    assert [rate for (rate,) in seen.rates] == pytest.approx([1 - step / steps for step in range(steps)])


def test_the_rate_is_at_its_end_with_tokens_and_so_is_the_run() -> None:
    technique = LearningRateSchedule(max_tokens=1000)  # a batch has 4 x 32
    found = rates(technique, name="tiny_gpt", max_steps=-1, max_epochs=100)
    assert found == pytest.approx([1e-2 * (1 - 128 * i / 1000) for i in range(8)])
    assert technique.report()["tokens"] == 1024


@pytest.mark.parametrize("pace", [0.01, 0.05])
def test_the_rate_is_at_its_end_at_the_deadline_whatever_the_speed(pace: float) -> None:
    """T: zero at the deadline, within one step: the last step's rate is what it takes of the budget."""
    seen, seconds = Seen(pace), 1.0
    t = trainer(LearningRateSchedule(), seen, max_steps=-1, max_epochs=-1, max_time=timedelta(seconds=seconds))
    t.fit(module("classifier", lr=1.0), loader("classifier"))
    (timer,) = [c for c in t.callbacks if isinstance(c, Timer)]
    started = timer.start_time() or 0.0
    before = [started, *seen.times]
    longest = max(b - a for a, b in itertools.pairwise(before))
    assert seen.times[-1] - started >= seconds - longest
    assert seen.rates[-1][0] <= 2 * longest / seconds
    for rate, (begun, ended) in zip(seen.rates, itertools.pairwise(before), strict=True):
        # the rate is that of a moment within the step
        assert 1 - (ended - started) / seconds - 1e-6 <= rate[0] <= 1 - (begun - started) / seconds + 1e-6


def test_the_deadline_holds_across_a_resume(tmp_path: Path) -> None:
    class Half(pl.Callback):
        at = 0

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if not self.at and first.rates[-1][0] < 0.6:
                self.at = len(first.rates)
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    first, half, second = Seen(0.02), Half(), Seen(0.01)
    settings: dict[str, Any] = {"max_steps": -1, "max_epochs": -1, "max_time": timedelta(seconds=1)}
    trainer(LearningRateSchedule(), first, half, **settings).fit(module("classifier", lr=1.0), loader("classifier"))
    time.sleep(0.5)  # does not count
    t = trainer(LearningRateSchedule(), second, **settings)
    t.fit(module("classifier", lr=1.0), loader("classifier"), ckpt_path=tmp_path / "half.ckpt")
    (timer,) = [c for c in t.callbacks if isinstance(c, Timer)]
    offset = 1.0 - (timer.time_remaining() or 0.0) - ((timer.end_time() or 0.0) - (timer.start_time() or 0.0))
    assert 0.4 < offset < 1.0
    steps = [timer.start_time() or 0.0, *second.times]
    longest = max(b - a for a, b in itertools.pairwise(steps))
    assert second.rates[0][0] <= 1 - offset < first.rates[half.at - 1][0], "it goes on where it was"
    assert second.rates[0][0] >= 1 - offset - longest
    assert second.rates[-1][0] <= 2 * longest


def test_it_resumes_bit_for_bit_and_keeps_the_rates_it_began_with(tmp_path: Path) -> None:
    def build() -> list[Technique]:
        return [LearningRateSchedule("cosine", warmup=0.2, max_tokens=1500)]

    def run(**kwargs: Any) -> Any:
        return final_state(*fit("tiny_gpt", build, max_steps=-1, max_epochs=50, **kwargs))

    whole = run(directory=tmp_path)
    assert whole["steps"][0] == 12
    for step in (1, 5, 9):
        assert differences(whole, run(resume=tmp_path / f"step={step}.ckpt")) == []


# -- in the place of the module's own


class Scheduled(pl.LightningModule):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.net, self.make, self.looked = module("classifier"), make, []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scheduler: Any = self.lr_schedulers()
        self.looked.append(scheduler.get_last_lr() if scheduler is not None else None)
        return self.net.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(
            [{"params": self.net.blocks.parameters(), "lr": 0.5}, {"params": self.net.head.parameters()}],
            lr=0.1,
            momentum=0.9,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.make(optimizer), "interval": "step"}}


MADE = {
    "warm-up": (lambda o: schedulers.LinearLR(o, 0.01, total_iters=5), (0.5, 0.1)),
    "one cycle": (lambda o: schedulers.OneCycleLR(o, [0.4, 0.2], total_steps=50), (0.4, 0.2)),
    "cycles": (lambda o: schedulers.CyclicLR(o, 0.01, [0.4, 0.2]), (0.4, 0.2)),
    "sequence": (
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.ExponentialLR(o, 0.5)], [2]
        ),
        (0.5, 0.1),
    ),
}


@pytest.mark.parametrize("name", sorted(MADE))
def test_it_takes_the_place_of_the_modules_schedule(name: str) -> None:
    make, highest = MADE[name]
    net, seen = Scheduled(make), Seen()
    t = trainer(LearningRateSchedule(), seen, max_steps=10)
    t.fit(net, loader("classifier"))
    assert seen.rates == [pytest.approx([(1 - step / 10) * rate for rate in highest]) for step in range(10)]
    # the module may look at its scheduler, and sees what is
    assert net.looked[5] == pytest.approx(seen.rates[5])
    assert isinstance(t.lr_scheduler_configs[0].scheduler, type(make(net.configure_optimizers()["optimizer"])))


@pytest.mark.parametrize("name", [None, *sorted(MADE)])
def test_beside_another_optimizer_in_either_order(name: str | None) -> None:
    make, highest = MADE[name] if name is not None else (None, (0.05,))
    ends = []
    for order in (1, -1):
        pl.seed_everything(1, verbose=False)
        net: Any = Scheduled(make) if make is not None else module("classifier")
        seen = Seen()
        both = [ReplaceOptimizer(Muon, lr=0.02, group_lr={"head": 0.07}), LearningRateSchedule("cosine")][::order]
        trainer(*both, seen, max_steps=8).fit(net, loader("classifier", shuffle=False))
        for step, rates in enumerate(seen.rates):
            factor = 0.5 * (1 + math.cos(math.pi * step / 8))
            assert max(rates) == pytest.approx(factor * max(*highest, 0.07))
            assert any(rate == pytest.approx(factor * 0.02) for rate in rates)
            assert any(rate == pytest.approx(factor * 0.07) for rate in rates)
        ends.append(flat(net))
    assert torch.equal(*ends)


def test_the_rate_that_a_finder_found_is_the_highest() -> None:
    net = module("classifier", lr=1.0)
    seen = Seen()
    t = trainer(LearningRateSchedule(), seen, max_steps=4)
    finder = pl.callbacks.LearningRateFinder(num_training_steps=40, early_stop_threshold=None)
    t.callbacks.append(finder)
    t.fit(net, loader("classifier"))
    assert net.lr != 1.0
    assert [rate for (rate,) in seen.rates][-4:] == pytest.approx([net.lr * (1 - step / 4) for step in range(4)])
    assert Tuner(trainer(LearningRateSchedule(), max_steps=4)).lr_find(net, loader("classifier"), num_training=6)


def test_a_checkpoint_of_another_schedule_begins_from_the_modules_rate(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, filename="plain")
    make = lambda o: schedulers.ExponentialLR(o, 0.5)  # noqa: E731
    trainer(save, max_epochs=1, enable_checkpointing=True).fit(Scheduled(make), loader("classifier"))
    seen = Seen()
    t = trainer(LearningRateSchedule(), seen, max_epochs=2)
    t.fit(Scheduled(make), loader("classifier"), ckpt_path=tmp_path / "plain.ckpt")
    assert seen.rates[0] == pytest.approx([0.25, 0.05])


# -- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": "cos"}, r"shape='cos'\): expected 'linear', 'cosine', 'rex', .* or 'constant'"),
        ({"warmup": 1.0}, r"warmup=1.0\): expected a number in \[0, 1\)"),
        ({"shape": "one_cycle", "warmup": 0.1}, "one cycle has its own rise. Set warmup=0"),
        ({"final": 2.0}, "final=2.0"),
        ({"start": -0.1}, "start=-0.1"),
        ({"peak": 0.0}, "peak=0.0"),
        ({"ramp": "square"}, "ramp='square'"),
        ({"decay": 1.5}, "decay=1.5"),
        ({"cycles": 0}, "cycles=0"),
        ({"cycle_growth": 0.5}, "cycle_growth=0.5"),
        ({"momentum": (0.9, 0.8)}, r"first value must be the lower one. Write momentum=\(0.8, 0.9\)"),
        ({"max_tokens": 0}, "max_tokens=0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearningRateSchedule(**arguments)


@pytest.mark.parametrize("order", [1, -1])
def test_its_tokens_are_an_end_for_others_too(order: int) -> None:
    both = [LearningRateSchedule(max_tokens=8 * 4 * LENGTH), BatchSizeWarmup(1, 0.5, full=2)]
    t = trainer(*both[::order], max_steps=-1, max_epochs=-1)
    t.fit(module("tiny_gpt"), loader("tiny_gpt", 400))
    assert t.fit_loop.total_batch_idx == 7 and t.global_step == 4 + 2


def test_a_run_without_a_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=r"there is no budget to schedule over\. Set max_steps"):
        trainer(LearningRateSchedule(), max_steps=-1, max_epochs=-1).fit(module("classifier"), loader("classifier"))
    with pytest.raises(ValueError, match="both set the learning rate"):
        t = trainer(LearningRateSchedule(), StochasticWeightAveraging(0.1), max_epochs=2)
        t.fit(module("classifier"), loader("classifier"))
