"""The clock of a run: charges, learning rates, validation, stopping, and the undoing of patches."""

import contextlib
import math

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_eff import LatestWeightAveraging, SequenceLengthWarmup, SharpnessAwareMinimization
from lightning_eff.bench import pacer as pacer_module
from lightning_eff.bench.arms import ready
from lightning_eff.bench.pace import Diverged, Horizon, Incomparable, Pace, Rehearsed, decay
from lightning_eff.bench.pacer import Pacer
from tests.bench.tasks import Constant, Delay, Fail, Small, arm, built, dataset
from tests.models import TinyGPT

KIND = "8x8,8x1"


def run(pace: Pace, function=None, seed: int = 1):
    seed_everything(seed, verbose=False)
    ready_made = built(function or arm())
    pacer = Pacer(pace)
    ready(ready_made, pacer)
    with pytest.raises(Rehearsed) if pace.sweep is not None else contextlib.nullcontext():
        ready_made.trainer.fit(ready_made.module, **ready_made.data)
    pacer.release()
    return pacer, ready_made.module


def reference(budget: float = 2.0, steps: int = 20, **more) -> Pace:
    return Pace("val_loss", budget, reference=True, prices={KIND: 0.1}, steps=steps, **more)


def test_each_step_costs_the_price_of_its_kind() -> None:
    pacer, _ = run(reference(2.0))
    assert pacer.steps == 20 and pacer.seconds == pytest.approx(2.0) and set(pacer.kinds) == {KIND}
    assert pacer.samples == 160 and pacer.uncalibrated == 0


def test_a_slow_machine_changes_nothing_in_reference_time() -> None:
    plain, module = run(reference(2.0, evaluations=4))
    slow, slowed = run(reference(2.0, evaluations=4), arm(callbacks=lambda: [Delay(0.003)]))
    drop = [{k: v for k, v in p.items() if k != "wall_seconds"} for p in plain.points]
    assert drop == [{k: v for k, v in p.items() if k != "wall_seconds"} for p in slow.points]
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), slowed.parameters(), strict=True))
    assert slow.wall_seconds > plain.wall_seconds


@pytest.mark.parametrize("watch", [False, True])
def test_weights_that_are_not_finite_are_a_divergence_and_no_fraud(watch: bool) -> None:
    class Explode(Callback):
        def on_validation_start(self, trainer, pl_module):
            pass

        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == 10:
                next(pl_module.parameters()).data.fill_(math.nan)

    with pytest.raises(Diverged):
        run(reference(2.0, watch=watch, evaluations=2), arm(callbacks=lambda: [Explode()]))


@pytest.mark.parametrize("steps", [20, 40, 7])
def test_the_rate_decays_over_the_budget_whatever_number_of_steps_it_is_laid_out_for(steps: int) -> None:
    pacer, module = run(reference(2.0, steps=steps))
    assert pacer.steps == 20
    for done, rate in enumerate(module.rates):
        position = min(int(done / 20 * steps + 1e-9), steps - 1)
        assert rate == pytest.approx(0.1 * module.factor(position, steps)), done
    assert pacer.last_rate == pytest.approx(0.1 * module.factor(steps - 1, steps))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_bench_has_schedules_of_its_own(schedule: str) -> None:
    pacer, module = run(reference(2.0, schedule=schedule), arm(Constant))
    assert module.rates[10] == pytest.approx(0.1 * decay(schedule, 0.5))
    assert pacer.last_rate == pytest.approx(0.0, abs=1e-12)
    assert decay("linear", 0.05) == 1 and decay("cosine", 0.525) == pytest.approx(0.5) and decay("linear", 0.0) < 0.03


def test_validates_evenly_over_the_budget_and_at_its_end() -> None:
    pacer, _ = run(reference(2.0, evaluations=5))
    assert [point["step"] for point in pacer.points] == [4, 8, 12, 16, 20]
    assert [point["seconds"] for point in pacer.points] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])


def test_the_trainers_own_limits_do_not_stop_it() -> None:
    """64 samples in batches of 8 are 8 steps an epoch: 100 steps are beyond the trainer's three epochs."""
    pacer, _ = run(reference(10.0, steps=100))
    assert pacer.steps == 100


def test_accumulation_validates_and_stops_at_whole_steps() -> None:
    pace = Pace(
        "val_loss", 2.0, reference=True, prices={KIND: 0.1, f"{KIND} (accumulates)": 0.1}, steps=10, evaluations=2
    )
    pacer, module = run(pace, arm(accumulate_grad_batches=2))
    assert pacer.steps == 10 and len(pacer.times) == 20 and [p["step"] for p in pacer.points] == [5, 10]
    assert module.rates[::2] == module.rates[1::2], "the rate changes within a step"


def test_a_run_of_long_steps_ends_with_the_one_that_is_nearest_to_its_budget() -> None:
    prices = {KIND: 0.1, f"{KIND} (accumulates)": 0.1}
    for budget, steps in ((1.9, 2), (2.1, 3)):
        pace = Pace("val_loss", budget, reference=True, prices=prices, steps=2)
        pacer, _ = run(pace, arm(accumulate_grad_batches=8))
        assert (pacer.steps, pacer.seconds) == (steps, pytest.approx(0.8 * steps)), budget


def test_wall_clock_leaves_out_validation_and_the_first_steps_excess(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of our own: a batch takes 0.1 s, the first one 5 s, a validation 7 s."""
    now = [0.0]
    monkeypatch.setattr(pacer_module.time, "perf_counter", lambda: now[0])

    class Tick(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            now[0] += 5.0 if trainer.global_step == 0 else 0.1

        def on_validation_start(self, *args):
            now[0] += 7.0

    pacer, _ = run(Pace("val_loss", 2.0, prices={KIND: 0.1}, steps=20, evaluations=4), arm(callbacks=lambda: [Tick()]))
    assert pacer.steps == 20
    assert pacer.seconds == pytest.approx(2.0) and pacer.wall_seconds == pytest.approx(2.0)
    assert pacer.validation_seconds == pytest.approx(28.0) and pacer.warmup_seconds == pytest.approx(4.9)


@pytest.mark.parametrize("clock", ["wall", "reference"])
@pytest.mark.parametrize("common", [True, False])
def test_the_first_step_of_a_kind_that_the_baseline_does_not_make_is_the_arms_own_cost(
    monkeypatch: pytest.MonkeyPatch, clock: str, common: bool
) -> None:
    """Steps take 0.2 s and cost 0.1, the first of all 5 s; that of the second kind takes 4.1 s instead of 0.2.

    The machine is half as fast as the prices say: what goes beyond, 3.9 s, is 1.95 s of the reference clock.
    """
    now, small = [0.0], [0]
    monkeypatch.setattr(pacer_module.time, "perf_counter", lambda: now[0])

    class Tick(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            small[0] += len(batch[0]) < 8
            first = trainer.global_step == 0
            now[0] += 5.0 if first else 4.1 if len(batch[0]) < 8 and small[0] == 1 else 0.2

    kinds = {KIND: 0.1, "4x8,4x1": 0.1}
    pace = Pace(
        "val_loss", 8.0, clock == "reference", kinds, list(kinds) if common else [KIND], steps=20, evaluations=2
    )
    pacer, _ = run(pace, arm(callbacks=lambda: [Tick()], train=lambda: dataset(60)))  # the 8th batch has 4 samples
    own = {"wall": 3.9, "reference": 1.95}[clock]
    assert pacer.caused_seconds == pytest.approx(0.0 if common else own)
    assert pacer.warmup_seconds == pytest.approx(4.9 + (3.9 if common else 0.0))
    cost = 0.1 if clock == "reference" else 0.2
    begun = 0.1 if clock == "wall" else 0.0  # the first step's price is 0.1, whatever the clock
    assert pacer.seconds == pytest.approx(cost * pacer.steps - begun + pacer.caused_seconds, abs=1e-6)
    assert pacer.seconds == pytest.approx(8.0, abs=0.11)


def test_unknown_kinds_are_charged_at_the_machines_present_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known steps take 0.2 s and cost 0.1; one of another shape takes 0.6 s, so it costs 0.3."""
    now = [0.0]
    monkeypatch.setattr(pacer_module.time, "perf_counter", lambda: now[0])

    class Tick(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            now[0] += 0.2 if len(batch[0]) == 8 else 0.6

    data = lambda: dataset(60)  # noqa: E731 - the last batch of an epoch has 4 samples
    pace = Pace("val_loss", 1.0, reference=True, prices={KIND: 0.1}, steps=8)
    pacer, _ = run(pace, arm(callbacks=lambda: [Tick()], train=data))
    assert pacer.kinds == [KIND] * 7 + ["4x8,4x1"] and pacer.seconds == pytest.approx(1.0)
    assert pacer.uncalibrated == pytest.approx(0.3)


def test_a_sweep_passes_through_the_whole_schedule() -> None:
    pacer, module = run(Pace("val_loss", steps=200, sweep=25, inspect=True))
    assert pacer.steps == 25 and len(pacer.points) == 1
    assert module.rates[12] == pytest.approx(0.1 * module.factor(96, 200))
    assert pacer.rate()["last"] == pytest.approx(0.1 / 200) and pacer.rate()["peak_at"] < 0.1


def test_a_rehearsal_leaves_out_what_a_module_does_at_the_end_and_leaves_no_trace() -> None:
    class Writes(Small):
        def on_train_end(self):
            raise AssertionError("a rehearsal is no whole run")

    for inspect in (False, True):
        _, module = run(Pace("val_loss", steps=8, sweep=4, inspect=inspect), arm(Writes))
        assert "training_step" not in vars(module)
    with pytest.raises(AssertionError, match="no whole run"):
        run(reference(1.0), arm(Writes))


def test_techniques_follow_the_same_clock() -> None:
    """Half of the budget at length 4: at half the price a step, two thirds of the steps."""

    def short():
        trainer, _, _ = arm(callbacks=lambda: [SequenceLengthWarmup(start=8, until=0.5, mode="truncate")])()
        module = TinyGPT()
        return trainer, module, {"train_dataloaders": _tokens(), "val_dataloaders": _tokens()}

    probe, _ = run(Pace("val_loss", steps=8, sweep=8), short)
    lengths = {int(kind.split("x")[1].split()[0]) for kind in probe.kinds}
    assert len(lengths) > 1
    prices = {kind: int(kind.split("x")[1].split()[0]) / 100 for kind in probe.kinds}
    pacer, _ = run(Pace("val_loss", 4.0, reference=True, prices=prices, steps=50), short)
    spent = 0.0
    for kind in pacer.kinds:
        length = int(kind.split("x")[1].split()[0])
        assert (length == 16) == (spent / 4.0 >= 0.5 - 1e-9), (kind, spent)
        spent += prices.get(kind, length / 100)


def _tokens():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 16, (32, 16), generator=generator)
    return torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in ids], 4)


def test_extra_passes_are_kinds_of_their_own() -> None:
    pacer, _ = run(Pace("val_loss", steps=8, sweep=8), arm(callbacks=lambda: [SharpnessAwareMinimization(interval=2)]))
    assert pacer.kinds[0] == f"{KIND} + {KIND}" and pacer.kinds[1] == KIND


def test_what_is_validated_is_the_average() -> None:
    """The metric that the bench records is that of the weights which a technique puts in for validation."""
    raw, _ = run(reference(2.0))
    mean, _ = run(reference(2.0), arm(callbacks=lambda: [LatestWeightAveraging(window=4, interval=2)]))
    assert raw.losses == mean.losses and raw.points[-1]["metric"] != mean.points[-1]["metric"]


@pytest.mark.parametrize(
    ("function", "target", "message"),
    [
        (arm(), "val_f1", r"\['val_acc', 'val_loss'\]"),
        (arm(), "train_loss", "training logs it"),
        (arm(limit_val_batches=0), "val_loss", "without validation"),
        (arm(fast_dev_run=True), "val_loss", "a Trainer with fast_dev_run=True; .* Remove fast_dev_run"),
        (arm(barebones=True), "val_loss", "a Trainer with barebones=True"),
    ],
)
def test_refuses_what_it_cannot_measure(function, target: str, message: str) -> None:
    with pytest.raises(Incomparable, match=message):
        run(Pace(target, 1.0, reference=True, prices={KIND: 0.1}, steps=10), function)


def test_a_mean_over_validation_goes_by_its_name_where_each_step_is_logged_too() -> None:
    """As ModelCheckpoint's ``monitor`` has it."""

    class Both(Small):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val_loss", self.net(batch[0]).square().mean(), on_step=True, on_epoch=True)

    for several, name in ((False, "val_loss"), (True, "val_loss/dataloader_idx_1")):

        def function(several: bool = several):
            made = built(arm(module=Both))
            loader = made.data["val_dataloaders"]
            return made.trainer, made.module, {**made.data, "val_dataloaders": [loader] * 2 if several else loader}

        pacer, _ = run(Pace(name, 1.0, reference=True, prices={KIND: 0.1}, steps=10), function)
        head, separator, index = name.partition("/")
        assert pacer.metrics[name] == pacer.metrics[f"{head}_epoch{separator}{index}"] == pacer.points[-1]["metric"]


def test_refuses_a_rate_that_follows_the_metric() -> None:
    class Plateau(Small):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    with pytest.raises(Incomparable, match="ReduceLROnPlateau"):
        run(reference(1.0), arm(Plateau))


def test_divergence_ends_the_run() -> None:
    class Explode(Small):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (math.nan if self.trainer.global_step == 5 else 1.0)

    with pytest.raises(Diverged, match="step 5"):
        run(reference(2.0), arm(Explode))


@pytest.mark.parametrize("technique", [None, LatestWeightAveraging])
@pytest.mark.parametrize("fails", [False, True])
def test_leaves_no_trace(technique, fails: bool) -> None:
    """Also with techniques, which put theirs back as the fit ends, and after an exception."""
    seed_everything(1, verbose=False)
    callbacks = [technique()] if technique else []
    made = built(arm(callbacks=lambda: [*callbacks, *([Fail(5, RuntimeError("bad luck"))] if fails else [])]))
    before = [dict(vars(o)) for o in (made.trainer.fit_loop.epoch_loop, made.trainer.fit_loop.epoch_loop.val_loop)]
    pacer = Pacer(reference(1.0))
    ready(made, pacer)
    with pytest.raises(RuntimeError, match="bad luck") if fails else contextlib.nullcontext():
        made.trainer.fit(made.module, **made.data)
    pacer.release()
    loop = made.trainer.fit_loop.epoch_loop
    for had, obj in zip(before, (loop, loop.val_loop), strict=True):
        for name in ("run", "_should_check_val_fx", "update_lr_schedulers", "max_steps", "min_steps"):
            assert vars(obj).get(name) == had.get(name), name
    assert "training_step" not in vars(made.module) and "configure_optimizers" not in vars(made.module)
    assert isinstance(made.trainer, Trainer) and made.trainer.max_epochs == 3


def test_what_the_bench_itself_takes_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that takes a second to step, twenty times a step: the bench's doing in a rehearsal."""
    now = [0.0]
    monkeypatch.setattr(pacer_module.time, "perf_counter", lambda: now[0])

    class Slow(Small):
        def lr_scheduler_step(self, scheduler, metric):
            now[0] += 1.0
            scheduler.step()

        def training_step(self, batch, batch_idx):
            now[0] += 0.1
            return super().training_step(batch, batch_idx)

    pacer, _ = run(Pace("val_loss", steps=80, sweep=4), arm(Slow))
    assert pacer.times == pytest.approx([0.1] * 4)


def test_a_horizon_is_a_number_that_is_never_reached() -> None:
    horizon = Horizon(10)
    assert horizon == 10 and horizon * 2 == 20 and min(horizon, 12) == 10 and max(horizon, 1) == 10
    assert not horizon <= 10 and not horizon <= 11 and horizon >= 10 and horizon < 11


def test_validation_data_is_told_apart_however_it_is_cut_into_batches() -> None:
    pace = Pace("val_loss", steps=4, sweep=4, inspect=True)

    def look(size: int, **other) -> dict:
        seed_everything(1, verbose=False)
        made = built(arm(val=lambda: dataset(32, 1, **other)))
        made.data["val_dataloaders"] = torch.utils.data.DataLoader(made.data["val_dataloaders"].dataset, size)
        pacer = Pacer(pace)
        ready(made, pacer)
        with pytest.raises(Rehearsed):
            made.trainer.fit(made.module, **made.data)
        return pacer.data(made.trainer)

    assert look(16) == look(7)
    assert look(16)["validation"] != look(16, shift=1e-6)["validation"]
    assert look(16)["training"]["length"] == 64


@pytest.mark.parametrize("count", [0, 1, 5, 6, 23])
def test_the_loss_curve_begins_with_the_first_batch(count: int) -> None:
    """Arms of one seed have the first point in common, however many steps the machine makes."""
    pacer = Pacer(reference(1.0))
    pacer._losses = [(float(i), float(i * i)) for i in range(count)]
    curve = pacer.loss_curve(5)
    assert len(curve) <= 5 and curve[:1] == pacer._losses[:1]
    if count == 23:  # the other 22 by sixes
        assert [x for x, _ in curve] == [0, 6, 12, 18, 22]
        assert curve[1][1] == pytest.approx(sum(i * i for i in range(1, 7)) / 6)
    if count == 5:
        assert curve == pacer._losses
