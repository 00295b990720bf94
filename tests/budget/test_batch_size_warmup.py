"""BatchSizeWarmup: the batches and rates of every step, against loops written by hand, and that windows resume."""

import dataclasses
import math
from collections import namedtuple
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from transformers import BatchEncoding

from lightning_eff import BatchSizeWarmup, LearningRateSchedule, Muon, OptimizerOffload, ReplaceOptimizer
from lightning_eff._core.batches import join, like, plain
from lightning_eff.budget.batch_size_warmup import batch_at, batch_sizes
from tests.budget.budget_jobs import two_processes
from tests.budget.budget_jobs import without_dropout as still
from tests.cases import Case
from tests.conftest import Once
from tests.core.choosers import Some
from tests.models import flat, loader, module, trainer
from tests.runs import MODES, checkpoints, fit, fit_yaml, resume_from_batches, resume_from_every_step

CASES = {
    "BatchSizeWarmup": Case(
        active=lambda: BatchSizeWarmup(1, 0.4, full=2), neutral=lambda: BatchSizeWarmup(full=1), anywhere=True
    )
}


class Seen(pl.Callback):
    """The loader's batches of every step, and the rate that the step was made with."""

    def __init__(self) -> None:
        self.batches, self.rates, self.between, self._count = [], [], [], 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizer = trainer.optimizers[0]
        optimizer.register_step_post_hook(lambda o, args, kwargs: self.rates.append(self._rate(o)))
        # hooks of others come first: what the groups hold within the step is read before they are put back
        optimizer._optimizer_step_post_hooks.move_to_end(list(optimizer._optimizer_step_post_hooks)[-1], last=False)

    @staticmethod
    def _rate(optimizer: torch.optim.Optimizer) -> list[float]:
        return [float(group["lr"]) for group in optimizer.param_groups]

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._count += 1
        if len(self.rates) > len(self.batches):
            self.batches.append(self._count)
            self._count = 0
            self.between.append(self._rate(trainer.optimizers[0]))


def seen(technique: Any, net: Any = None, *, samples: int = 400, **kwargs: Any) -> Seen:
    found = Seen()
    net = still(1.0) if net is None else net
    trainer(technique, found, **{"max_steps": 12, **kwargs}).fit(net, loader("classifier", samples, shuffle=False))
    return found


# -- which batch


def test_batches_rise_by_equal_parts_of_the_time() -> None:
    assert batch_sizes(1, 3, 2, "linear") == [1, 2, 3] == batch_sizes(1, 3, None, "linear")
    assert batch_sizes(1, 25, 2, "geometric") == [1, 5, 25]  # Smith et al.: by five where the rate would fall by five
    assert batch_sizes(2, 16, None, "geometric") == [2, 4, 8, 16] and batch_sizes(1, 6, 2, "linear") == [1, 4, 6]
    assert [batch_at(u, [1, 2, 3], 2 / 3) for u in (0.0, 0.3, 1 / 3, 0.5, 2 / 3, 1.0)] == [1, 1, 2, 2, 3, 3]


def test_steps_take_the_batches_and_are_made_at_their_rates() -> None:
    """8, 16, 24 by thirds of the run, at the rates of the record that it comes from."""
    found = seen(BatchSizeWarmup(1, 2 / 3, full=3, steps=2, power=0.5))
    # to 2 at the third of twelve steps at once; to 3 where windows of both sizes begin, one step late
    assert found.batches == [1] * 4 + [2] * 4 + [3] * 4
    assert [rate for (rate,) in found.rates] == pytest.approx([m**0.5 for m in found.batches])
    assert found.between == [[1.0]] * 12, "who looks at the groups between steps sees the schedule's own rate"


def test_a_rise_waits_for_windows_that_begin_together() -> None:
    found = seen(BatchSizeWarmup(1, 0.6, full=4))
    assert found.batches == sorted(found.batches) and found.batches[0] == 1 and found.batches[-1] == 4
    at = 0
    for before, after in zip([1, *found.batches], found.batches, strict=False):
        if after != before:
            assert at % before == 0 and at % after == 0
        at += after


def test_it_counts_in_the_runs_own_windows() -> None:
    found = seen(BatchSizeWarmup(1, 0.5, full=2), accumulate_grad_batches=3, max_steps=8)
    assert found.batches == [3] * 4 + [6] * 4
    assert [rate for (rate,) in found.rates] == pytest.approx([(m / 3) ** 0.5 for m in found.batches])


# -- T: what it is equivalent to


@pytest.mark.parametrize("by", ["accumulation", "batch"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_micro_means_are_the_gradient_of_the_large_batch(by: Any, clip: float | None) -> None:
    """A loop by hand over batches that are really as large, at the rates that fit; clipped as a whole."""
    net, data = still(), loader("classifier", 96, shuffle=False)
    technique = BatchSizeWarmup(1, 0.5, full=3, steps=1, power=1.0, by=by)
    trainer(technique, max_steps=10, gradient_clip_val=clip).fit(net, data)
    by_hand, batches = still(), iter(data)
    optimizer = by_hand.configure_optimizers()
    for step in range(10):
        m = 1 if step < 6 else 3  # 5 of 10 steps, and one until windows of both sizes begin
        parts = [next(batches) for _ in range(m)]
        optimizer.zero_grad()
        by_hand.training_step(tuple(torch.cat(t) for t in zip(*parts, strict=True)), 0).backward()
        if clip is not None:
            assert nn.utils.clip_grad_norm_(by_hand.parameters(), clip) > clip
        optimizer.param_groups[0]["lr"] = 0.1 * m
        optimizer.step()
    torch.testing.assert_close(flat(net), flat(by_hand), rtol=1e-5, atol=1e-6)
    assert technique.report() == {"batches": 3, "rate_factor": 3.0}


def test_rate_over_batch_is_the_decayed_schedules() -> None:
    """Smith et al.: five times the batch for a rate divided by five, on one path of rate / batch."""
    settings: dict[str, Any] = {"full": 25, "steps": 2, "growth": "geometric", "until": 0.8, "power": 0.0}
    grown, decayed = (
        seen(BatchSizeWarmup(**settings, by=by), samples=4 * 1000, max_steps=30) for by in ("accumulation", "rate")
    )
    paths = [[r[0] / m for r, m in zip(f.rates, f.batches, strict=True)] for f in (grown, decayed)]
    assert set(decayed.batches) == {1} and set(grown.batches) == {1, 5, 25}
    assert {r for (r,) in grown.rates} == {1.0}
    # the same values at the same steps, but for rises that wait for their windows
    assert paths[1] == pytest.approx([1.0] * 12 + [0.2] * 12 + [0.04] * 6)
    assert sum(a != pytest.approx(b) for a, b in zip(*paths, strict=True)) <= 7 and sorted(set(paths[0])) == [
        0.04,
        0.2,
        1,
    ]


def test_batch_norm_sees_the_large_batch_where_batches_are_put_together() -> None:
    together, apart = still(batch_norm=True), still(batch_norm=True)
    data = loader("classifier", 96, shuffle=False)
    for net, by in ((together, "batch"), (apart, "accumulation")):
        technique: Any = BatchSizeWarmup(2, 1.0, full=3, power=0.0, by=by)
        trainer(technique, max_steps=1).fit(net, data)
    first = torch.cat([x for x, _ in list(data)[:2]])
    with torch.no_grad():
        # batch statistics of the first step, by the momentum of BatchNorm
        expected = 0.1 * still(batch_norm=True).blocks(first).mean(0)
    torch.testing.assert_close(together.norm.running_mean, expected)
    assert int(together.norm.num_batches_tracked) == 1 and int(apart.norm.num_batches_tracked) == 2  # pyright: ignore[reportArgumentType]


# -- schedules, other optimizers, other counts


class Scheduled(pl.LightningModule):
    """Its schedule multiplies the rate that it finds, and it asks how many steps there will be."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.net, self.make, self.told = still(), make, None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        self.told = self.trainer.estimated_stepping_batches
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make(optimizer, self.told), "interval": "step"},
        }


def test_a_schedule_goes_on_as_it_is() -> None:
    found = seen(BatchSizeWarmup(1, 0.5, full=2, power=1.0), Scheduled(lambda o, _: schedulers.ExponentialLR(o, 0.9)))
    expected = [0.5 * 0.9**i for i in range(12)]
    assert [rate for (rate,) in found.rates] == pytest.approx(
        [m * r for m, r in zip(found.batches, expected, strict=True)]
    )
    assert set(found.batches) == {1, 2}


@pytest.mark.parametrize("first", [True, False])
def test_beside_another_schedule_and_another_optimizer(first: bool) -> None:
    both = [BatchSizeWarmup(1, 0.5, full=2, power=1.0), LearningRateSchedule(), ReplaceOptimizer(Muon, lr=0.02)]
    found = Seen()
    trainer(*both[:: 1 if first else -1], found, max_steps=12).fit(still(), loader("classifier", 400))
    for step, (rates, m) in enumerate(zip(found.rates, found.batches, strict=True)):
        assert max(rates) == pytest.approx(0.1 * (1 - step / 12) * m)
        assert any(rate == pytest.approx(0.02 * (1 - step / 12) * m) for rate in rates)


def test_an_optimizer_on_the_host_steps_at_the_same_rates() -> None:
    ends = []
    for others in ([], [OptimizerOffload()]):
        net = still()
        trainer(BatchSizeWarmup(1, 0.5, full=2), *others, max_steps=8).fit(
            net, loader("classifier", 400, shuffle=False)
        )
        ends.append(flat(net))
    assert torch.equal(*ends)


@pytest.mark.parametrize("own", [1, 2])
def test_a_module_that_asks_is_told_the_steps_that_there_will_be(own: int) -> None:
    net, found = Scheduled(lambda o, steps: schedulers.OneCycleLR(o, 1.0, total_steps=steps)), Seen()
    technique = BatchSizeWarmup(1, 0.5, full=3, steps=1, power=0.0)
    t = trainer(technique, found, max_steps=-1, max_epochs=4, accumulate_grad_batches=own)
    t.fit(net, loader("classifier", 4 * 60, shuffle=False))
    # half of 4 x 60 batches one by one, half in threes
    assert net.told == (120 + 40) // own == len(found.rates) and type(net.told) is int
    assert t.accumulate_grad_batches == own, "the trainer is as it was"
    assert found.rates[-1][0] < 1e-3


def test_an_epoch_of_fewer_batches_than_a_full_step_is_the_largest_step() -> None:
    found = seen(BatchSizeWarmup(1, 0.5, full=8, steps=1, power=0.0), samples=20)
    assert found.batches == [1] * 10 + [5] * 2


# -- resume


@pytest.mark.parametrize("by", ["batch", pytest.param("rate", marks=pytest.mark.slow)])
def test_it_resumes_from_every_step(by: Any, tmp_path: Path) -> None:
    build = lambda: [BatchSizeWarmup(1, 0.6, full=3, by=by)]  # noqa: E731
    assert resume_from_every_step("tiny_gpt", build, tmp_path) == {}


@pytest.mark.parametrize("by", ["accumulation", "batch"])
def test_it_resumes_within_its_own_windows(by: Any, tmp_path: Path) -> None:
    """After each batch of a run whose windows grow from 1 to 3: what waits to be put together is in the checkpoint."""
    build = lambda: [BatchSizeWarmup(1, 0.5, full=3, by=by)]  # noqa: E731
    settings: dict[str, Any] = {"accumulate_grad_batches": 1, "max_steps": 7, "samples": 40}
    assert resume_from_batches("tiny_gpt", build, tmp_path, (3, 5, 7, 8, 11, 12), **settings) == {}
    saved = torch.load(tmp_path / "batch=8.ckpt", weights_only=True)
    assert saved["lightning_eff"]["window"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", sorted(set(MODES) - {"plain"}))
@pytest.mark.parametrize("by", ["batch", "rate"])
def test_it_resumes_in_every_mode(by: Any, mode: str, tmp_path: Path) -> None:
    build = lambda: [BatchSizeWarmup(1, 0.6, full=3, by=by)]  # noqa: E731
    assert resume_from_every_step("gpt2", build, tmp_path, **MODES[mode]) == {}


def test_a_plain_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    fit("tiny_gpt", lambda: [BatchSizeWarmup(1, 0.2, full=2, by="batch")], directory=tmp_path, samples=40)
    _, t = fit("tiny_gpt", list, resume=checkpoints(tmp_path)[7], samples=40)
    assert t.global_step == 12


def test_two_processes(once: Once) -> None:
    """Batches put together on each rank: alike ends, and a resumed run as the undisturbed one, within a window too."""
    found = two_processes(once)["batch"]
    for by in ("accumulation", "batch"):
        assert found[by] == {"alike": True, "differences": [[], []], "window": found[by]["window"]}
        assert found[by]["window"] > 1
    assert found["close"] < 1e-5, "both are the gradient of the large batch"


# -- batches put together


@dataclasses.dataclass(frozen=True)
class Held:
    x: Tensor
    names: list[str]


Pair = namedtuple("Pair", ["x", "y"])


def test_batches_of_any_make_are_put_together_and_saved() -> None:
    def make(size: int, fill: float) -> Any:
        x, mask = torch.full((size, 2), fill), torch.ones(7, 7)
        held = Held(x, [f"{fill}"] * size)
        return {
            "a": x,
            "mask": mask,
            "deep": [Pair(x, x.numpy()), held],
            "k": 3,
            "enc": BatchEncoding({"ids": x.long()}),
        }

    first, second = make(2, 1.0), make(3, 2.0)
    whole = join([like(second, plain(first)), second])
    assert whole["a"].shape == (5, 2) and whole["mask"].shape == (7, 7) and whole["k"] == 3
    assert whole["a"][:, 0].tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    pair, held = whole["deep"]
    assert isinstance(pair, Pair) and pair.y.shape == (5, 2) and held.names == ["1.0"] * 2 + ["2.0"] * 3
    assert isinstance(whole["enc"], BatchEncoding) and whole["enc"]["ids"].shape == (5, 2)
    assert first["a"].shape == (2, 2)


def test_batches_that_do_not_fit_say_where() -> None:
    for other, message in (
        ({"x": torch.zeros(2, 4)}, r"shapes \[\(2, 3\), \(2, 4\)\] at \['x'\]"),
        ({"y": torch.zeros(2, 3)}, "expected the same in all"),
        ([torch.zeros(2, 3)], "expected one type"),
    ):
        with pytest.raises(ValueError, match=message):
            join([{"x": torch.zeros(2, 3)}, other])
    with pytest.raises(ValueError, match=r"different values at \['m'\]"):
        join([{"x": torch.zeros(2), "m": torch.ones(5, 5)}, {"x": torch.zeros(2), "m": torch.zeros(5, 5)}])

    class Lengths(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            ids = torch.arange(8 + 4 * (i // 4 % 2))
            return {"input_ids": ids, "labels": ids}

    with pytest.raises(ValueError, match=r"\(by='batch'\): Got batches with tensors of shapes.*Use by='accumulation'"):
        data = torch.utils.data.DataLoader(Lengths(), 4)
        trainer(BatchSizeWarmup(2, 0.5, full=3, by="batch"), max_steps=3).fit(module("tiny_gpt"), data)


# -- a YAML, and bad input


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "BatchSizeWarmup", {"start": 1, "full": 3, "steps": 2, "until": 0.5, "power": 0.5}, max_steps=6)
    assert "of the loader's batches, at 1.73 times the learning rate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": 0}, r"start=0\): expected an integer >= 1"),
        ({"start": 4, "full": 2}, "full must be above start"),
        ({"start": 2, "full": 2}, r"set Trainer\(accumulate_grad_batches=...\)"),
        ({"full": 2.5}, "full=2.5"),
        ({"until": 0.0}, r"until=0.0\): expected a number in \(0, 1\]: the fraction of the budget"),
        ({"until": math.nan}, "until=nan"),
        ({"steps": 0}, "steps=0"),
        ({"full": 3, "steps": 5}, "has only 2 increases by whole batches. Set steps=2 or less"),
        ({"growth": "cubic"}, "growth='cubic'"),
        ({"power": -1.0}, "power=-1.0"),
        ({"by": "loader"}, "by='loader'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSizeWarmup(**arguments)


@pytest.mark.parametrize("other", [GradientAccumulationScheduler({0: 1, 1: 2}), StochasticWeightAveraging(0.1)])
def test_what_changes_windows_too_is_refused(other: pl.Callback) -> None:
    with pytest.raises(
        ValueError, match=f"BatchSizeWarmup and {type(other).__name__} cannot train together: both change"
    ):
        trainer(BatchSizeWarmup(), other, max_epochs=3, max_steps=-1).fit(still(), loader("classifier"))


@pytest.mark.parametrize("order", [1, -1])
def test_what_chooses_samples_is_refused_where_batches_are_put_together(order: int) -> None:
    both = [BatchSizeWarmup(by="batch"), Some()][::order]
    with pytest.raises(ValueError, match=r"and Some cannot train together: .* Use by='accumulation'"):
        trainer(*both, max_steps=3).fit(module("tiny_gpt"), loader("tiny_gpt"))
    both = [BatchSizeWarmup(), Some()][::order]
    trainer(*both, max_steps=3).fit(module("tiny_gpt"), loader("tiny_gpt", 40))


def test_a_batch_that_cannot_grow_is_refused_before_any_step() -> None:
    class Taken(pl.Callback):
        def on_train_epoch_start(self, *args: Any) -> None:
            raise AssertionError("training has begun")

    with pytest.raises(
        ValueError, match=r"an epoch has 5 batches and the first steps take 6 each, so the batch cannot grow"
    ):
        trainer(BatchSizeWarmup(2, full=3), Taken(), accumulate_grad_batches=3).fit(still(), loader("classifier"))


def test_afterwards_the_rates_and_the_trainer_are_as_they_were() -> None:
    class Fails(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 6:
                raise RuntimeError("in the midst of a step")

    t = trainer(BatchSizeWarmup(1, 0.5, full=2), Fails(), max_steps=8)
    with pytest.raises(RuntimeError, match="in the midst"):
        t.fit(still(), loader("classifier", 400))
    assert t.accumulate_grad_batches == 1
    assert [group["lr"] for group in t.optimizers[0].param_groups] == [0.1]
    assert not t.optimizers[0]._optimizer_step_pre_hooks and not t.optimizers[0]._optimizer_step_post_hooks
