"""LinearScaling: the batch that a run has, the rate of every step against the rule by hand, and its equivalence for SGD."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_eff import BatchSizeWarmup, LearningRateSchedule, LinearScaling, TokenBudgetBatches
from lightning_eff._core.search_space import RunProfile
from lightning_eff.budget.linear_scaling import factor_at
from tests.budget.budget_jobs import two_processes
from tests.budget.budget_jobs import without_dropout as still
from tests.cases import Case
from tests.conftest import Once
from tests.models import Samples, flat, loader, module, trainer
from tests.runs import fit_yaml

CASES = {
    "LinearScaling": Case(
        active=lambda: LinearScaling(2, 0.4, power=0.5), neutral=lambda: LinearScaling(2, power=0.0), anywhere=True
    )
}


class Rates(pl.Callback):
    """The rate that each step was made with, and the one that the group shows after it."""

    def __init__(self) -> None:
        self.within, self.between = [], []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizer = trainer.optimizers[0]
        optimizer.register_step_post_hook(lambda o, args, kwargs: self.within.append(float(o.param_groups[0]["lr"])))
        # hooks of others come first: what the groups hold within the step is read before they are put back
        optimizer._optimizer_step_post_hooks.move_to_end(list(optimizer._optimizer_step_post_hooks)[-1], last=False)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step > len(self.between):
            self.between.append(float(trainer.optimizers[0].param_groups[0]["lr"]))


def rates(*techniques: Any, data: Any = None, **settings: Any) -> Rates:
    """Of eight steps at a rate of 1 that no schedule changes."""
    found = Rates()
    data = loader("classifier", 400) if data is None else data
    trainer(*techniques, found, **{"max_steps": 8, **settings}).fit(still(1e-3), data)
    return found


# -- the rate


def test_the_rate_rises_from_the_bases_by_equal_parts() -> None:
    assert [factor_at(u, 8.0, 0.5) for u in (0.0, 0.25, 0.5, 1.0)] == [1.0, 4.5, 8.0, 8.0]
    assert factor_at(0.0, 8.0, 0.0) == 8.0 and factor_at(0.1, 0.5, 0.2) == 0.75
    # Goyal et al.: 0.1 for 256 images, 8,192 of them, 5 of 90 epochs
    assert 0.1 * factor_at(5 / 90, 8192 / 256, 5 / 90) == pytest.approx(3.2)


@pytest.mark.parametrize(("power", "k"), [(1.0, 6.0), (0.5, 6**0.5)])
def test_steps_are_made_at_the_rate_of_their_batch(power: float, k: float) -> None:
    """Batches of 4 in windows of 3, the rate tuned for 2: six times the batch; four of eight steps warm up."""
    technique = LinearScaling(2, 0.5, power=power)
    found = rates(technique, accumulate_grad_batches=3)
    by_hand = [1 + (k - 1) * step / 4 for step in range(4)] + [k] * 4
    assert found.within == pytest.approx([1e-3 * factor for factor in by_hand])
    assert found.between == [1e-3] * 8, "who looks at the groups between steps sees the schedule's own rate"
    assert technique.report() == {"batch": 12, "rate_factor": pytest.approx(k)}


@pytest.mark.parametrize("first", [True, False])
def test_a_schedule_goes_on_beside_it(first: bool) -> None:
    both = [LinearScaling(2, 0.0), LearningRateSchedule()]
    found = rates(*both[:: 1 if first else -1])
    assert found.within == pytest.approx([1e-3 * 2 * (1 - step / 8) for step in range(8)])


def test_k_steps_at_frozen_weights_are_one_step_of_the_joined_batch() -> None:
    """T: k steps of SGD at eta on k batches, all at the first weights, end where one step at k eta does."""
    k, data = 5, list(loader("classifier", 20, shuffle=False))
    by_hand = still(0.1)
    moves = torch.zeros_like(flat(by_hand))
    for batch in data:
        by_hand.zero_grad()
        by_hand.training_step(batch, 0).backward()
        moves -= 0.1 * torch.cat([p.grad.flatten() for p in by_hand.parameters() if p.grad is not None])
    expected = flat(by_hand) + moves
    for size, window in ((4, k), (4 * k, 1)):
        net = still(0.1)
        trainer(LinearScaling(4, 0.0), max_steps=1, accumulate_grad_batches=window).fit(
            net, loader("classifier", 20, size, shuffle=False)
        )
        torch.testing.assert_close(flat(net), expected, rtol=1e-5, atol=1e-6)
    assert moves.abs().max() > 1e-3


# -- the batch


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Samples("classifier", 80, 0)[i] for i in range(80))


class ByTokens:
    """Batches of different sizes: 2, 3, 2, 3, ..."""

    def __iter__(self) -> Any:
        return iter([[*range(5 * i, 5 * i + 2)] if i % 2 else [*range(5 * i, 5 * i + 3)] for i in range(16)])

    def __len__(self) -> int:
        return 16


class Plain:
    def __iter__(self) -> Any:
        return iter(loader("classifier", 80, 5))

    def __len__(self) -> int:
        return 16


def data(kind: str) -> Any:
    samples = Samples("classifier", 80, 0)
    return {
        "loader": lambda: loader("classifier", 80, 5),
        "list of one": lambda: [loader("classifier", 80, 5)],
        "batch sampler": lambda: DataLoader(samples, batch_sampler=BatchSampler(SequentialSampler(samples), 5, True)),
        "stream": lambda: DataLoader(Stream(), 5),
        "by tokens": lambda: DataLoader(samples, batch_sampler=ByTokens()),  # pyright: ignore[reportArgumentType]
        "made batches": lambda: DataLoader([next(iter(loader("classifier", 5, 5)))] * 16, batch_size=None),
        "own iterable": Plain,
        "several": lambda: CombinedLoader([loader("classifier", 80), loader("classifier", 80)], "min_size"),
    }[kind]()


def taking(net: Any) -> Any:
    """``net``, for which the first of several batches is the batch."""
    step = net.training_step
    net.training_step = lambda batch, batch_idx: step(
        batch[0] if isinstance(batch[0], list | tuple) else batch, batch_idx
    )
    return net


@pytest.mark.parametrize("kind", ["loader", "list of one", "batch sampler", "stream"])
def test_the_batch_is_found_from_the_run(kind: str) -> None:
    technique = LinearScaling(5, 0.0)
    trainer(technique, max_steps=2, accumulate_grad_batches=2).fit(taking(still()), data(kind))
    assert technique.report() == {"batch": 10, "rate_factor": 2.0}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("by tokens", "found a DataLoader without batch_size"),
        ("made batches", "found a DataLoader without batch_size"),
        ("own iterable", "found a Plain without batch_size"),
        ("several", "found 2 training loaders"),
    ],
)
def test_a_batch_that_is_not_known_is_refused_and_may_be_given(kind: str, message: str) -> None:
    net = taking(still())
    before = flat(net)
    with pytest.raises(ValueError, match=rf"{message}.* Give the samples .* LinearScaling\(5, batch_size="):
        trainer(LinearScaling(5), max_steps=2).fit(net, data(kind))
    assert torch.equal(flat(net), before)
    technique = LinearScaling(5, 0.0, batch_size=2.5)
    trainer(technique, max_steps=2, accumulate_grad_batches=4).fit(taking(still()), data(kind))
    assert technique.report() == {"batch": 10.0, "rate_factor": 2.0}


def test_batches_by_tokens_are_as_many_samples_as_are_given() -> None:
    """The loader, of which they are made, says another number; test_pairs.py has what is refused."""
    both = [TokenBudgetBatches(64), LinearScaling(5, 0.0, batch_size=10)]
    trainer(*both, max_steps=2).fit(module("padded"), DataLoader(Samples("padded", 20), 4))
    assert both[1].report() == {"batch": 10, "rate_factor": 2.0}


def test_two_processes(once: Once) -> None:
    """Ranks with batches of 2 and 4, in windows of 3; and a batch that one rank alone does not know stops both."""
    found = two_processes(once)["linear"]
    assert found["reports"] == [{"batch": 18, "rate_factor": 3.0}] * 2 and found["alike"]
    assert len(found["refused"]) == 2 and "found a DataLoader without batch_size" in found["refused"][0]
    assert "found batches of 4 on this rank, and" in found["refused"][1]


# -- a search, a comparison, a YAML, and bad input


def test_a_search_tries_rates_around_the_runs_own() -> None:
    space, profile = LinearScaling.search_space, RunProfile(batch_size=16, world_size=4)
    assert space is not None
    built = space.build(LinearScaling, {"times": 2.0, "warmup": 0.1, "power": 0.5}, profile)
    assert (built.base_batch_size, built.warmup, built.power) == (32, 0.1, 0.5)


def test_it_is_held_against_the_full_rate_at_once() -> None:
    (arm,) = LinearScaling.control.arms(LinearScaling(2, 0.5, power=0.5, batch_size=8)).values()
    assert isinstance(arm, LinearScaling)
    assert (arm.base_batch_size, arm.warmup, arm.power, arm.batch_size) == (2, 0.0, 0.5, 8)
    assert not LinearScaling.control.arms(LinearScaling(2, 0.0))


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"base_batch_size": 4, "warmup": 0.5}
    fit_yaml(tmp_path, "LinearScaling", arguments, keeps_state=False, max_steps=6, accumulate_grad_batches=2)
    assert "8 samples per step, the last at 2 times the learning rate for 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base_batch_size": 0}, r"base_batch_size=0\): expected an integer >= 1"),
        ({"base_batch_size": 2.5}, "base_batch_size=2.5"),
        ({"warmup": 5}, r"warmup=5\): expected a number in \[0, 1\]"),
        ({"warmup": math.nan}, "warmup=nan"),
        ({"power": -1.0}, "power=-1.0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": math.inf}, "batch_size=inf"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearScaling(**{"base_batch_size": 4, **arguments})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (GradientAccumulationScheduler({0: 1, 1: 2}), "LinearScaling and GradientAccumulationScheduler cannot train"),
        (BatchSizeWarmup(full=2), "cannot train together: both scale the learning rate with the batch"),
    ],
)
def test_what_changes_the_batch_is_refused(other: Any, message: str) -> None:
    for order in (1, -1):
        with pytest.raises(ValueError, match=message):
            trainer(*[LinearScaling(4), other][::order], max_steps=4).fit(still(), loader("classifier"))


def test_a_run_without_an_end_has_no_warmup() -> None:
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            trainer.should_stop = trainer.global_step >= 3

    endless: dict[str, Any] = {"max_steps": -1, "max_epochs": -1}
    with pytest.raises(ValueError, match=r"warmup=0.05\): the Trainer has no end .* or warmup=0"):
        trainer(LinearScaling(2), Stop(), **endless).fit(still(), loader("classifier"))
    technique = LinearScaling(2, 0.0)
    trainer(technique, Stop(), **endless).fit(still(), loader("classifier"))
    assert technique.report() == {"batch": 4, "rate_factor": 2.0}


def test_afterwards_the_rates_are_as_they_were() -> None:
    class Fails(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                raise RuntimeError("in the midst of a step")

    t = trainer(LinearScaling(2, 0.0), Fails(), max_steps=8)
    with pytest.raises(RuntimeError, match="in the midst"):
        t.fit(still(), loader("classifier"))
    assert [group["lr"] for group in t.optimizers[0].param_groups] == [0.1]
    assert not t.optimizers[0]._optimizer_step_pre_hooks and not t.optimizers[0]._optimizer_step_post_hooks
