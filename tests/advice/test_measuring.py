"""The parts that measure: ratios over turns, the rule of exactness, loaders built again, and attention written by hand."""

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from lightning_eff.advice._running import measuring
from lightning_eff.advice._running.measuring import Referee
from lightning_eff.advice._running.subject import Change
from lightning_eff.advice.applied import FusedOptimizer, LargerBatch, LoaderWorkers, rebuilt
from lightning_eff.advice.fused_attention import ByHand, FusedAttention
from lightning_eff.advice.intervals import EXACT, LEAST, Numbers, Turn, keeps_numbers, narrow, speed_up
from lightning_eff.advice.limits import conflict, largest
from lightning_eff.advice.outcomes import Outcome, closest
from lightning_eff.advice.trials import Trial
from lightning_eff.bench.reports.intervals import Interval
from tests.advice.tasks import Plain, Rows, Table, token_loader


def turns(*seconds: float, queued: float = 0.0, workers: bool = False, samples: int = 4, tokens: int = 0) -> list[Turn]:
    return [Turn(s, samples, tokens, 1, queued, workers) for s in seconds]


# -- ratios


def test_the_closest_to_a_gain_are_tried_again_only_beside_their_own_kind() -> None:
    def outcome(name: str, estimate: float, high: float = 1.2, **settings: Any) -> Outcome:
        trial = Trial(name, Change(), EXACT, "", **settings)
        return Outcome(trial, speed=Interval(estimate, 0.9, high, 3))

    one, two, three = outcome("one", 1.03), outcome("two", 1.05), outcome("three", 1.01)
    far, none = outcome("none", 0.99), outcome("far", 1.01, high=1.015)
    loader, compiled = outcome("loader", 1.04, group="loader"), outcome("compiled", 1.02, slow=True)
    every = [one, far, compiled, two, none, loader, three]
    assert closest(every, 3) == [two, one, three]
    assert closest(every, 2) == [two, one]
    assert closest([loader, one], 3) == [loader]
    assert closest([compiled, three], 3) == [compiled]
    assert closest([far, none], 3) == []


def test_the_speed_up_is_the_geometric_mean_of_paired_turns() -> None:
    found = speed_up(turns(2.0, 4.0, 3.0), turns(1.0, 2.0, 1.5))
    assert found is not None and found.n == 3
    assert found.estimate == pytest.approx(2.0) and found.high - found.low < 1e-9
    assert speed_up(turns(1.0), turns(1.0)) is None


def test_time_counts_by_sample_or_by_token() -> None:
    base, larger = turns(1.0, 1.0, samples=4, tokens=10), turns(1.5, 1.5, samples=8, tokens=30)
    by_sample, by_token = speed_up(base, larger), speed_up(base, larger, "token")
    assert by_sample is not None and by_sample.estimate == pytest.approx(2 / 1.5)
    assert by_token is not None and by_token.estimate == pytest.approx(3 / 1.5)


def test_time_of_other_processes_does_not_count_unless_they_may_be_the_loaders_own() -> None:
    busy = turns(3.0, 3.0, queued=1.0)
    alone, with_workers = speed_up(busy, turns(1.0, 1.0)), speed_up(busy, turns(1.0, 1.0, workers=True))
    assert alone is not None and alone.estimate == pytest.approx(2.0)
    assert with_workers is not None and with_workers.estimate == pytest.approx(3.0)


def test_single_disturbed_turns_are_left_out_and_frequent_ones_count() -> None:
    once = speed_up(turns(*[1.0] * 9, 5.0), turns(*[1.0] * 10))
    assert once is not None and once.n == 9 and once.estimate == pytest.approx(1.0)
    often = speed_up(turns(*[1.0] * 6, *[5.0] * 4), turns(*[1.0] * 10))
    assert often is not None and often.n == 10 and often.estimate == pytest.approx(5**0.4)


def test_a_referee_ends_what_is_known_or_slow_and_the_baseline_last(monkeypatch: pytest.MonkeyPatch) -> None:
    referee = Referee(["sample", "sample"], deadline=math.inf)
    for place, seconds in ((0, [1.0, 1.1] * LEAST), (1, [0.5, 0.55] * LEAST), (2, [0.5, 1.2] * LEAST)):
        referee.tracks[place] += turns(*seconds)
    assert not referee.go_on(1) and referee.gone == {1}  # narrow
    assert referee.go_on(2) and referee.go_on(0)
    referee.tracks[2][:] = turns(*[3.0, 9.0] * LEAST)
    assert not referee.go_on(2) and not referee.go_on(0)  # slow, and wide
    thorough = Referee(["sample"], deadline=math.inf, thorough=True)
    thorough.tracks[0] += turns(*[1.0] * LEAST)
    thorough.tracks[1] += turns(*[3.0, 9.0] * (LEAST // 2))
    assert thorough.go_on(1)
    late = Referee(["sample"], deadline=0.0)
    late.tracks[0] += turns(1.0, 1.0)
    late.tracks[1] += turns(1.0, 3.0)
    assert not late.go_on(1)
    monkeypatch.setattr(measuring.time, "monotonic", lambda: 5.0)
    compiled = Referee(["sample"], deadline=0.0, compiled=True)  # its first step has used up the time
    compiled.tracks[0] += turns(1.0, 1.0)
    compiled.tracks[1] += turns(1.0, 3.0)
    assert compiled.go_on(1)
    monkeypatch.setattr(measuring.time, "monotonic", lambda: 1e9)
    assert not compiled.go_on(1)


def test_trials_end_where_the_baseline_has_failed() -> None:
    referee = Referee(["sample"], deadline=math.inf)
    referee.gone.add(0)
    assert not referee.go_on(1)


def test_narrow_intervals_are_three_percent_either_way() -> None:
    assert narrow(speed_up(turns(*[1.0, 1.01] * 5), turns(*[1.0] * 10)))
    assert not narrow(speed_up(turns(*[1.0, 1.2] * 5), turns(*[1.0] * 10)))


# -- numbers


def test_differences_are_relative_norms_over_all_parameters() -> None:
    first = Numbers(2.0, {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])})
    assert first.differences(first) == (0.0, 0.0)
    second = Numbers(2.2, {"a": torch.tensor([3.0, 0.5]), "b": torch.tensor([4.0])})
    loss, gradients = first.differences(second)
    assert loss == pytest.approx(0.1) and gradients == pytest.approx(0.1)
    assert first.differences(Numbers(2.0, {"a": first.gradients["a"]}))[1] == math.inf
    assert first.differences(Numbers(math.nan, first.gradients))[0] == math.inf
    assert first.differences(Numbers(None, first.gradients))[0] == math.inf


def test_rounding_is_judged_by_the_runs_own_precision_and_noise() -> None:
    assert keeps_numbers(0.0, 1e-5, "32-true") and not keeps_numbers(0.0, 1e-3, "32-true")
    assert not keeps_numbers(1e-3, 0.0, "32-true")
    assert keeps_numbers(0.0, 1e-2, "bf16-mixed") and not keeps_numbers(0.0, 0.1, "bf16-mixed")
    assert not keeps_numbers(0.0, 1e-5, "64-true")
    assert keeps_numbers(0.0, 1e-3, "32-true", noise=5e-4)
    assert not keeps_numbers(math.inf, 0.0, "bf16-mixed")


# -- conflicts


def test_declared_conflicts_and_two_precisions_are_not_stacked() -> None:
    def trial(change: Change) -> Trial:
        return Trial("one", change, "exact", "")

    def of(*names: str) -> list[Trial]:
        return [trial(Change(({"class_path": f"lightning_eff.{name}"},))) for name in names]

    assert conflict(of("ChannelsLast", "FusedNorms")) is None
    assert "RegionalCompilation" in str(conflict(of("SequencePacking", "RegionalCompilation")))
    plugin = trial(Change(plugins=({"class_path": "lightning_eff.StochasticRoundingBF16"},)))
    assert conflict([plugin, trial(Change(trainer={"precision": "bf16-mixed"}))]) == "a Trainer has one precision"


def test_the_largest_batch_doubles_until_memory_the_data_or_the_time_ends() -> None:
    def fails(factor: int) -> str | None:
        return "CUDA out of memory" if factor > 8 else None

    assert largest(fails, 100, math.inf) == (8, "twice as many do not fit")
    assert largest(fails, 7, math.inf) == (4, "an epoch has no larger ones")
    assert largest(fails, 100, 0.0) == (1, "there was no time to try larger ones")
    assert largest(lambda factor: "odd shapes", 100, math.inf) == (1, "twice as many fail: odd shapes")


# -- loaders


def test_a_loader_is_built_again_with_its_own_settings() -> None:
    rows = Rows()
    collate: Callable[[Any], Any] = lambda items: items  # noqa: E731
    generator = torch.Generator()
    loader = DataLoader(rows, 4, shuffle=True, drop_last=True, collate_fn=collate, generator=generator, timeout=0)
    made = rebuilt(loader, batch_size=8)
    assert (made.batch_size, made.drop_last, made.collate_fn, made.generator) == (8, True, collate, generator)
    assert made.dataset is rows and type(made.sampler) is RandomSampler
    assert type(rebuilt(DataLoader(rows, 4), num_workers=0).sampler) is SequentialSampler
    weighted = WeightedRandomSampler([1.0] * 64, 8)
    assert rebuilt(DataLoader(rows, 4, sampler=weighted)).sampler is weighted
    assert rebuilt(DataLoader(rows, 4, num_workers=2, prefetch_factor=3)).prefetch_factor == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rows: DataLoader(rows, batch_sampler=BatchSampler(SequentialSampler(rows), 4, False)), "batch sampler"),
        (lambda rows: type("Own", (DataLoader,), {})(rows, 4), "it is a Own"),
        (lambda rows: [1, 2], "it is a list"),
    ],
)
def test_a_loader_that_cannot_be_built_again_says_why(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rebuilt(make(Rows()))


def fit(module: Any, data: Any, *callbacks: Any, **settings: Any) -> pl.Trainer:
    silent = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=3, limit_val_batches=0, callbacks=list(callbacks), **silent, **settings
    )
    trainer.fit(module, data)
    return trainer


def test_loader_settings_hold_for_a_data_module_and_a_loader() -> None:
    for data in (Table(), DataLoader(Rows(), 4)):
        trainer = fit(Plain(), data, LargerBatch(2))
        assert trainer.train_dataloader is not None and trainer.train_dataloader.batch_size == 8
        trainer = fit(Plain(), data, LoaderWorkers(1))
        assert trainer.train_dataloader is not None and trainer.train_dataloader.num_workers == 1


# -- optimizers


@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_a_fused_optimizer_makes_the_same_steps(kind: Any) -> None:
    class Adam(Plain):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.01)

    weights = []
    for callbacks in ((), (FusedOptimizer(kind),)):
        pl.seed_everything(0, verbose=False)
        module = Adam()
        trainer = fit(module, DataLoader(Rows(), 4), *callbacks)
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert trainer.optimizers[0].param_groups[0][kind] is True  # pyright: ignore[reportPossiblyUnboundVariable]
    assert torch.allclose(*weights, rtol=1e-5, atol=1e-7)


def test_an_optimizer_without_a_fused_step_is_refused() -> None:
    class Rprop(Plain):
        def configure_optimizers(self) -> Any:
            return torch.optim.Rprop(self.parameters(), 0.01)

    with pytest.raises(ValueError, match=r"FusedOptimizer\(kind='fused'\): Rprop has no argument fused. Remove"):
        fit(Rprop(), DataLoader(Rows(), 4), FusedOptimizer())


# -- attention by hand


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-2, -1)).masked_fill(hidden, -torch.inf) * 0.3
    return F.softmax(scores, dim=-1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.linspace(-1, 1, k.shape[-2])
    return torch.matmul(nn.Softmax(-1)(bias + torch.matmul(q / 2, k.mT) / 1.5), v)


def filled(q: Tensor, k: Tensor, v: Tensor, whole: bool = False) -> Tensor:
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    hidden[:, : 0 if whole else 2] = False
    weights = (0.5 * (q @ k.transpose(2, 3))).masked_fill_(hidden, -1e9).softmax(-1)
    return F.dropout(weights.to(v.dtype), 0.5, training=False) @ v


def whole_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return filled(q, k, v, whole=True)  # all weights are then equal, and have no gradient


def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(-2, -1)).softmax(-1)
    return weights @ v + weights.mean() + weights.amax(-1, keepdim=True)


def of_three(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2))
    assert (
        scores.shape == (q.shape[0], q.shape[1], k.shape[1]) and scores.size(-1) == k.shape[1] and scores.requires_grad
    )
    return torch.bmm(torch.softmax(scores, 2), v)


def no_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    return torch.softmax(scores - scores.amax(-1, keepdim=True), dim=-1) @ v + scores[..., :1].relu()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("attention", "fused"),
    [(masked, 1), (biased, 1), (filled, 1), (whole_rows, 0), (read, 1), (of_three, 1), (no_attention, 0)],
)
def test_attention_by_hand_keeps_its_output_and_gradients(attention: Any, fused: int, autocast: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4, generator=generator, requires_grad=True) for _ in range(3))

    def run() -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = torch.clone(attention(q, k, v))
        return out.float(), *torch.autograd.grad(out.float().square().sum(), (q, k, v), allow_unused=True)

    expected = run()
    with ByHand() as mode:
        found = run()
    assert sum(mode.sites.values()) == fused
    if fused:
        assert next(iter(mode.sites)).startswith(__file__)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert type(one) is Tensor
            assert torch.dist(one, other) <= (0.03 if autocast else 1e-6) * torch.linalg.vector_norm(other)


def test_a_tensor_that_is_changed_before_attention_is_computed_is_refused() -> None:
    q = torch.randn(1, 2, 4, 4)
    with ByHand():
        weights = (q @ q.transpose(-2, -1)).softmax(-1)
        q.mul_(2)
        with pytest.raises(
            RuntimeError, match=r"FusedAttention: a tensor that the attention at .* was changed in place"
        ):
            weights @ q


def test_weights_that_are_read_after_dropout_are_refused() -> None:
    q = torch.randn(1, 2, 4, 4, requires_grad=True)
    with ByHand():
        weights = F.dropout((q @ q.transpose(-2, -1)).softmax(-1), 0.5)
        out = weights @ q
        with pytest.raises(
            RuntimeError, match=r"FusedAttention: the attention weights at .*test_measuring.py:\d+ are also used"
        ):
            weights.sum()
    assert out.shape == q.shape


def test_a_module_without_attention_by_hand_is_refused() -> None:
    with pytest.raises(ValueError, match="FusedAttention: found no attention that is computed by hand"):
        fit(Plain(), DataLoader(Rows(), 4), FusedAttention())


def test_training_with_fused_attention_follows_plain_training() -> None:
    from tests.advice.tasks import HandWritten

    weights = []
    for callbacks in ((), (FusedAttention(),)):
        pl.seed_everything(0, verbose=False)
        module = HandWritten()
        fit(module, token_loader(), *callbacks)
        assert "training_step" not in vars(module)
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.allclose(*weights, rtol=1e-4, atol=1e-6) and not torch.equal(*weights)
