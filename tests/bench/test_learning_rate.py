"""A recipe's own learning rate and warm-up: their course over the budget, the schedule's shape, and the arms that have them."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_eff import LearningRateSchedule, ReplaceOptimizer, ShallowToDeep, StochasticWeightAveraging
from lightning_eff.bench.arms import Arm, lay_out
from lightning_eff.bench.benchmark import Benchmark
from lightning_eff.bench.pace import Incomparable, Pace, decay, warm_up_share
from lightning_eff.bench.references import References
from lightning_eff.budget._shapes import rex
from lightning_eff.monitor.machine import fingerprint
from tests.bench.tasks import Constant, Small, arm
from tests.bench.test_pacer import KIND, reference, run


class Cosine(Small):
    """A recursive scheduler, which reads the group's learning rate."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        length = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Deep(Small):
    """Two blocks between the maps."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
        self.net = nn.Sequential(nn.Sequential(*blocks), nn.Linear(8, 1))


class OneCycle(Small):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        length = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=length + 1, pct_start=0.25)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize("module", [Small, Cosine, OneCycle])
def test_a_rate_scales_the_schedule_and_nothing_else(module: type[Small]) -> None:
    _, plain = run(reference(4.0, steps=40), arm(module))
    pacer, twice = run(reference(4.0, steps=40, rate=2 * max(plain.rates)), arm(module))
    assert twice.rates == pytest.approx([2 * rate for rate in plain.rates])
    assert pacer.rate()["peak"] == pytest.approx(2 * max(plain.rates))


@pytest.mark.parametrize(("module", "peak"), [(Small, 2 / 40), (OneCycle, 9 / 40), (Cosine, 0.0)])
def test_a_warm_up_moves_the_peak_and_keeps_the_shape(module: type[Small], peak: float) -> None:
    """Peaks at 2 and at 9 or 10 of 40 steps, and at the first one, go to the 12th; each rate is one of the plain schedule."""
    _, plain = run(reference(4.0, steps=40), arm(module))
    pacer, late = run(reference(4.0, steps=40, warm_up=0.3), arm(module))
    assert pacer.rate()["peak_at"] == pytest.approx(0.3, abs=0.06)
    top = late.rates.index(max(late.rates))
    assert late.rates[: top + 1] == sorted(late.rates[: top + 1]) and late.rates[top:] == sorted(late.rates[top:])[::-1]
    assert max(late.rates) == pytest.approx(max(plain.rates)) and late.rates[-1] <= plain.rates[-2] + 1e-12
    if peak:
        assert all(min(abs(rate - one) for one in plain.rates) < 1e-9 for rate in late.rates)
    else:
        assert late.rates[6] == pytest.approx(0.1 * 6 / 12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_benchs_own_schedules_take_both(schedule: str) -> None:
    pacer, module = run(reference(4.0, schedule=schedule, rate=0.3, warm_up=0.25), arm(Constant))
    assert module.rates == pytest.approx([0.3 * decay(schedule, n / 40, 0.25) for n in range(40)])
    assert pacer.rate()["peak_at"] == pytest.approx(0.25, abs=0.03)


def test_manual_optimization_is_refused() -> None:
    class Manual(Small):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            optimizer.step()

    with pytest.raises(Incomparable, match="manual optimization"):
        run(reference(1.0, rate=0.1), arm(Manual))


class Manual(Small):
    """It steps its optimizer and its schedule by itself."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        self.lr_schedulers().step()


def test_a_rehearsal_passes_through_a_schedule_that_the_module_steps() -> None:
    """Of 400 steps it makes 40, and ends where 400 end; so does a run of 20."""
    for pace in (Pace("val_loss", steps=400, sweep=40), reference(2.0)):
        pacer, module = run(pace, arm(Manual))
        assert len(module.rates) == (pace.sweep or 20)
        assert pacer.rate()["last"] == pytest.approx(0.0) and pacer.rate()["peak_at"] < 0.2
    pacer, module = run(Pace("val_loss", steps=400, sweep=40), arm(Small))
    assert pacer.rate()["last"] < 0.1 * pacer.rate()["peak"], "as that of one which Lightning steps"


@pytest.mark.parametrize(
    ("text", "share"), [("5s", 0.1), ("5rs", 0.1), ("0.1m", 0.12), ("5%", 0.05), ("0.2", 0.2), (0.2, 0.2), (0, 0.0)]
)
def test_warm_ups_are_seconds_or_shares(text: str | float, share: float) -> None:
    assert warm_up_share(text, 50.0) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "fast", "-1s", "60%", "40s", 0.7, math.nan])
def test_warm_ups_that_are_none(text: str | float) -> None:
    with pytest.raises(ValueError, match="expected seconds"):
        warm_up_share(text, 50.0)


def test_a_warm_up_must_fit_into_every_budget_of_the_ladder(tmp_path: Path) -> None:
    """It is said before anything is run: 5 s are more than half of 8 s, at which the baseline runs, too."""
    settings = {"target": "val_loss", "budget": "20rs", "ladder": (0.4,), "out": tmp_path}
    with pytest.raises(ValueError, match="of the budget of 8 s, at most half of it"):
        Benchmark(arm(), {}, warm_ups={"baseline": "5s"}, **settings)
    Benchmark(arm(), {"a": arm()}, warm_ups={"a": "5s"}, **settings)


def test_whose_they_are(tmp_path: Path) -> None:
    """A recipe's and its own alone; they stand in the plan, and the rehearsal meets them."""
    arms = lay_out(("base", arm()), {"a": arm(), "b": arm()}, controls=False, ladder=(2.0,), rates={"b": 0.2})
    assert [one.rate for one in arms] == [None, None, 0.2, None]
    with pytest.raises(
        ValueError, match=r"warm_ups=\['c'\]\): there are no such arms. Use names from \['base', 'a', 'b'\]"
    ):
        lay_out(("base", arm()), {"a": arm(), "b": arm()}, controls=False, ladder=(), warm_ups={"c": "5s"})
    settings = {"target": "val_loss", "budget": "0.4rs", "seeds": 1, "rounds": 2, "evaluations": 2, "threads": 1}
    baseline, prices = arm(), tmp_path / "prices.json"
    told = {"baseline": [{"kind": KIND, "seconds": 0.002, "share": 1.0}]}
    References(prices).apply(
        Arm("baseline", "baseline", baseline), fingerprint(1), told
    )  # 200 steps, however busy it is
    settings["reference"] = prices
    results = Benchmark(
        baseline, {"hot": arm()}, rates={"hot": 0.4}, warm_ups={"hot": "0.1rs"}, out=tmp_path / "out", **settings
    ).run(progress=False, report=False)
    found = results["calibration"]
    assert found["hot"]["lr"]["peak"] == pytest.approx(4 * found["baseline"]["lr"]["peak"], rel=0.2)
    assert found["hot"]["lr"]["peak_at"] == pytest.approx(0.25, abs=0.05) and found["baseline"]["lr"]["peak_at"] < 0.2
    assert [(one.get("rate"), one.get("warm_up")) for one in results["plan"]["arms"]] == [(None, None), (0.4, "0.1rs")]
    assert not found["hot"]["same_training"]


@pytest.mark.parametrize("schedule", ["own", "linear"])
@pytest.mark.parametrize("rate", [None, 0.4])
def test_a_recipe_that_sets_the_rate_by_a_technique_has_it(schedule: str, rate: float | None) -> None:
    """Over the bench's own budget, whatever the module or the bench would set; an arm's own rate is its highest."""
    pacer, module = run(
        reference(4.0, schedule=schedule, rate=rate), arm(OneCycle, callbacks=lambda: [LearningRateSchedule("rex")])
    )
    assert module.rates == pytest.approx([(rate or 0.1) * rex(step / 40) for step in range(40)])
    assert pacer.last_rate == pytest.approx(module.rates[-1])
    with pytest.raises(Incomparable, match="Set the warm-up in that technique's settings"):
        run(reference(4.0, warm_up=0.3), arm(callbacks=lambda: [LearningRateSchedule()]))


def test_a_rate_that_a_technique_holds_up_is_told_as_it_was() -> None:
    """StochasticWeightAveraging sets it for each step, between those at which the bench leads the schedule on."""
    averaging = lambda: [StochasticWeightAveraging(start=0.75, rate=0.5, cycle=2)]  # noqa: E731
    pacer, module = run(reference(4.0, steps=60), arm(callbacks=averaging))
    assert module.rates[-10:] == pytest.approx([0.05] * 10) and len(module.rates) == 40
    assert pacer.last_rate == pytest.approx(0.05)
    assert [rate for _, rate in pacer.rates] == pytest.approx(module.rates)


def test_a_technique_that_leaves_the_rate_to_the_module_by_a_setting_does_so_in_a_bench() -> None:
    """ShallowToDeep sets a rate for each of its stages, but not with ``rate=None``."""
    _, plain = run(reference(4.0, steps=40), arm(Deep))
    grown = lambda **given: arm(Deep, callbacks=lambda: [ShallowToDeep(group=1, until=0.0, **given)])  # noqa: E731
    _, left = run(reference(4.0, steps=40), grown(rate=None))
    assert left.rates == pytest.approx(plain.rates) and max(plain.rates) > 0.09
    _, own = run(reference(4.0, steps=40), grown(rate="cosine"))
    assert own.rates != pytest.approx(plain.rates)


@pytest.mark.parametrize("module", [Small, Cosine, OneCycle])
def test_a_rate_scales_all_groups_of_two_optimizers(module: type[Small]) -> None:
    """Where the peak is, is found by stepping through the schedule, and putting back also what it acts on."""
    replace = lambda: [ReplaceOptimizer(torch.optim.SGD, ["*weight"], lr=0.3)]  # noqa: E731
    _, plain = run(reference(4.0, steps=40), arm(module, callbacks=replace))
    _, twice = run(reference(4.0, steps=40, rate=0.6), arm(module, callbacks=replace))
    # the task shows the first group's rate, which is a third of the highest
    assert twice.rates == pytest.approx([rate * 0.6 / (3 * max(plain.rates)) for rate in plain.rates])
