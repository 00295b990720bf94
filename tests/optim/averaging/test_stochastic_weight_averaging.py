"""SWA: the rate that is asked for, the exact mean of the ends of cycles, and BatchNorm's statistics at it."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, IterableDataset

import lightning_eff
from lightning_eff.optim.averaging.stochastic_weight_averaging import StochasticWeightAveraging, cycle_rate
from tests.cases import Case
from tests.models import TinyClassifier, TinyGPT, loader, make_batch, trainer
from tests.optim.watch import Watch, differing, reference, state_of
from tests.runs import MODES, fit, resume_from_batches, resume_from_every_step

CASES = {
    "StochasticWeightAveraging": Case(
        active=lambda: StochasticWeightAveraging(start=0.5, cycle=2, low=0.1, rate=0.8),
        neutral=lambda: StochasticWeightAveraging(start=1.0),
        anywhere=True,
    )
}


class Rates(pl.Callback):
    """The rates of every group with which each step is made."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.seen.append([group["lr"] for group in optimizer.param_groups])


class Scheduled(TinyClassifier):
    """Two groups under a schedule that decays at every step."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.blocks.parameters()}, {"params": self.head.parameters(), "lr": 0.4}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_a_cycle_falls_to_its_end_as_in_the_paper() -> None:
    rates = [cycle_rate(i, 4, high=0.8, low=0.2) for i in range(8)]
    assert rates == pytest.approx([0.65, 0.5, 0.35, 0.2] * 2)


def test_the_rate_is_constant_from_the_start_on_each_group_in_proportion() -> None:
    rates = Rates()
    trainer(StochasticWeightAveraging(rate=0.25, cycle=1), rates, max_steps=8).fit(Scheduled(), loader("classifier"))
    own = [[0.1 * 0.5**i, 0.4 * 0.5**i] for i in range(6)]
    assert [x for step in rates.seen for x in step] == pytest.approx(
        [x for step in own for x in step] + [0.025, 0.1] * 2
    )


@pytest.mark.parametrize(
    ("cycle", "expected"), [(3, [0.85, 0.7, 0.55] * 2), ("epoch", [0.55, *[0.91, 0.82, 0.73, 0.64, 0.55]])]
)
def test_cycles_count_from_the_start_or_by_epochs(cycle: Any, expected: list[float]) -> None:
    class Plain(TinyClassifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    rates = Rates()
    technique = StochasticWeightAveraging(start=0.4, rate=1.0, low=0.55, cycle=cycle)
    trainer(technique, rates, max_steps=10, accumulate_grad_batches=2).fit(Plain(), loader("classifier", samples=40))
    assert [x for (x,) in rates.seen] == pytest.approx([1.0] * 4 + expected)


def rounded_each_time(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Each is the mean to a few roundings of float32: the mean itself is kept, as the checkpoint's weights, and not a sum."""
    assert expected
    for name, value in expected.items():
        largest = float(value.abs().max())
        torch.testing.assert_close(got[name], value, rtol=2**-22, atol=2**-24 * largest, msg=name)


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("model", ["tiny_gpt", "classifier"])
def test_what_is_left_is_the_mean_of_the_ends_of_cycles(model: str, mode: str) -> None:
    watch, technique = Watch(), StochasticWeightAveraging(start=0.5, cycle=2)
    net, _ = fit(model, lambda: [technique], callbacks=[watch], **MODES[mode])
    rounded_each_time(state_of(net), reference(watch.raw, [8, 10, 12]))
    assert technique.report() == {"active": 1, "averaged": 3}
    assert "mean of the weights at 3 cycle ends" in technique.summary()


def test_parameters_that_are_thawed_later_are_the_mean_of_fewer() -> None:
    class Thaw(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
            pl_module.get_submodule("embed").requires_grad_(trainer.global_step >= 9)

    watch = Watch()
    build = lambda: [StochasticWeightAveraging(start=0.5, cycle=1)]  # noqa: E731
    net, _ = fit("tiny_gpt", build, callbacks=[Thaw(), watch], max_steps=12)
    expected = reference(watch.raw, [7, 8, 9, 10, 11, 12])
    expected["embed.weight"] = reference(watch.raw, [10, 11, 12])["embed.weight"]
    rounded_each_time(state_of(net), expected)


def test_ends_of_epochs() -> None:
    watch, technique = Watch(), StochasticWeightAveraging(start=0.5)
    net, _ = fit("tiny_gpt", lambda: [technique], callbacks=[watch], max_steps=-1, max_epochs=4)
    rounded_each_time(state_of(net), reference(watch.raw, [15, 20]))


def test_statistics_are_those_of_update_bn() -> None:
    net, data = TinyClassifier(), loader("classifier", shuffle=False)
    watch = Watch()
    trainer(StochasticWeightAveraging(start=0.5, cycle=2, bn_batches=None), watch, max_steps=12).fit(net, data)
    got = {name: b.clone() for name, b in net.norm.named_buffers()}  # pyright: ignore[reportAttributeAccessIssue]
    assert not torch.equal(got["running_var"], watch.raw[12]["norm.running_var"])
    update_bn(data, net)
    for name, b in net.norm.named_buffers():  # pyright: ignore[reportAttributeAccessIssue]
        torch.testing.assert_close(got[name], b, rtol=1e-6, atol=1e-7)


def test_validation_and_checkpoints_hold_the_mean_once_there_is_one(tmp_path: Path) -> None:
    watch = Watch()
    fit(
        "tiny_gpt",
        lambda: [StochasticWeightAveraging(start=0.5, cycle=1)],
        callbacks=[watch],
        limit_val_batches=1,
        val_check_interval=3,
    )
    assert sorted(watch.validated) == [3, 8]
    assert differing(watch.validated[3][0], watch.raw[3]) == []
    rounded_each_time(watch.validated[8][0], reference(watch.raw, [7, 8]))


def test_resumes_from_every_step_and_within_windows(tmp_path: Path) -> None:
    def build() -> list[Any]:
        return [StochasticWeightAveraging(start=0.4, cycle=2, low=0.1)]

    assert resume_from_batches("classifier", build, tmp_path / "windows", (4, 7, 8, 11)) == {}
    assert resume_from_every_step("classifier", build, tmp_path / "steps") == {}


def test_no_cycle_ended_is_told() -> None:
    technique = StochasticWeightAveraging(cycle=100)
    with pytest.warns(
        UserWarning, match=r"ends after 12 steps, and no cycle \(cycle=100\) ends within the last 3 steps"
    ):
        fit("tiny_gpt", lambda: [technique])
    assert "no cycle ended after 75% of the run" in technique.summary()


@pytest.mark.parametrize(
    ("steps", "start", "averaged"), [(12, 0.8, 0), (12, 0.75, 1), (15, 0.8, 1), (9, 0.4, 1), (9, 0.5, 0)]
)
def test_epochs_that_end_before_it_starts_are_told(steps: int, start: float, averaged: int) -> None:
    """Epochs of five steps: an end counts if its step began at ``start`` or later."""
    technique = StochasticWeightAveraging(start=start)
    told = pytest.warns(UserWarning, match=r"no cycle \(cycle='epoch' of 5 steps\) .* cycle=1, or an earlier start=")
    with nullcontext() if averaged else told:
        trainer(technique, max_steps=steps).fit(TinyGPT(1), loader("tiny_gpt"))
    assert technique.report()["averaged"] == averaged


def test_where_seconds_end_the_run_it_is_told_as_it_ends() -> None:
    technique, within = StochasticWeightAveraging(cycle=100), StochasticWeightAveraging(start=0.0, cycle=2)
    with pytest.warns(UserWarning, match="the run ended after 4 steps, and no cycle"):
        trainer(technique, max_steps=4, max_time={"hours": 1}).fit(TinyGPT(1), loader("tiny_gpt"))
    trainer(within, max_steps=4, max_time={"hours": 1}).fit(TinyGPT(1), loader("tiny_gpt"))
    assert within.report()["averaged"] == 2


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"start": 1.5}, r"start=1.5\): expected a number in \[0, 1\]"),
        ({"rate": 0.0}, r"rate=0.0\): expected a finite number > 0"),
        ({"rate": 0.5, "low": 0.6}, r"low=0.6, rate=0.5\): low must be at most rate"),
        ({"cycle": 0}, r"cycle=0\): expected 'epoch' or an integer"),
        ({"bn_batches": 0}, r"bn_batches=0\): expected an integer >= 1, or None: the number of training batches"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StochasticWeightAveraging(**kwargs)


def test_a_run_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="StochasticWeightAveraging: the Trainer has no end"):
        fit("tiny_gpt", lambda: [StochasticWeightAveraging()], max_steps=-1, max_epochs=-1)


def test_another_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot train together: both set the learning rate"):
        fit("tiny_gpt", lambda: [StochasticWeightAveraging(), lightning_eff.LearningRateSchedule()])


def test_a_cycle_of_an_epoch_without_length_is_refused() -> None:
    class Streams(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return zip(*make_batch("classifier", 20), strict=True)

    with pytest.raises(ValueError, match=r"low=0.1, cycle='epoch'\): the training loader has no length.*cycle=500"):
        trainer(StochasticWeightAveraging(low=0.1), max_steps=4).fit(TinyClassifier(), DataLoader(Streams(), 4))
