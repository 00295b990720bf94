"""UpdatePeriods against a loop with an optimizer for each period; resumes, clipping, scalers, and what is refused."""

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff import OptimizerInBackward, UpdatePeriods
from lightning_eff.optim.preconditioning.update_periods import Accumulator
from tests.cases import Case, no_blocks
from tests.models import TinyGPT, make_batch, module, trainer

CASES = {
    "UpdatePeriods": Case(
        active=lambda: UpdatePeriods({"*": 2}),
        neutral=lambda: UpdatePeriods({"*": 1}),
        anywhere=True,
    )
}
Batches = list[dict[str, Tensor]]


def batches(count: int = 7) -> Batches:
    return [make_batch("tiny_gpt", 3, 8, seed) for seed in range(count)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-1, momentum=0.9, weight_decay=0.1)


class Net(TinyGPT):
    """Trained by an optimizer of choice."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer] = adamw) -> None:
        super().__init__(2, dropout=0.0)
        self.make = make

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


def by_hand(net: Net, every: Batches, periods: dict[str, int], *, mean: bool, clip: float, window: int) -> None:
    """Train with an optimizer for each period, which steps at its multiples."""
    named = dict(net.named_parameters())
    groups = {n: [name for name in named if periods.get(name, 1) == n] for n in {1, *periods.values()}}
    optimizers = {n: net.make([named[name] for name in names]) for n, names in groups.items()}
    kept = {name: torch.zeros_like(p) for name, p in named.items()}
    for t in range(1, len(every) // window + 1):
        net.zero_grad()
        for batch in every[(t - 1) * window : t * window]:
            logits = net(batch["input_ids"]).flatten(0, 1)
            (F.cross_entropy(logits, batch["labels"].flatten()) / window).backward()
        for name, p in named.items():
            assert p.grad is not None
            kept[name] += p.grad
        now = [n for n in groups if t % n == 0]
        for n, names in groups.items():
            for name in names:
                named[name].grad = kept[name].clone() / (n if mean else 1) if n in now else None
                kept[name] *= n not in now
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        for n in now:
            optimizers[n].step()


@pytest.mark.parametrize(
    ("given", "periods"),
    [
        ({"embedding": 2, "head": 3}, {"embed.weight": 2, "position.weight": 2, "head.weight": 3}),
        ({"blocks.0.*": 4, "norm.bias": 2}, {}),
    ],
)
@pytest.mark.parametrize("make", [adamw, momentum])
@pytest.mark.parametrize(("reduce", "clip", "window"), [("mean", 0.0, 1), ("sum", 0.1, 1), ("mean", 0.1, 2)])
def test_steps_equal_those_of_an_optimizer_per_period(
    given: dict[str, int], periods: dict[str, int], make: Any, reduce: Any, clip: float, window: int
) -> None:
    torch.manual_seed(0)
    ours = Net(make).double()
    reference = copy.deepcopy(ours)
    if not periods:
        periods = {
            n: 4 if n.startswith("blocks.0.") else 2
            for n, _ in ours.named_parameters()
            if n[:9] in ("blocks.0.", "norm.bias")
        }
    every = batches(14 if window == 2 else 7)
    by_hand(reference, every, periods, mean=reduce == "mean", clip=clip, window=window)
    t = trainer(
        UpdatePeriods(given, reduce=reduce),
        max_epochs=1,
        gradient_clip_val=clip or None,
        accumulate_grad_batches=window,
        precision="64-true",
    )
    t.fit(ours, DataLoader(every, batch_size=None))  # pyright: ignore[reportArgumentType]
    assert t.global_step == 7
    expected = dict(reference.named_parameters())
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p, expected[name], rtol=1e-10, atol=1e-12, msg=name)


def test_moments_and_steps_of_waiting_parameters_stay() -> None:
    net, technique = Net(), UpdatePeriods({"head.weight": 3})
    t = trainer(technique, max_steps=5)
    t.fit(net, DataLoader(batches(), batch_size=None))  # pyright: ignore[reportArgumentType]
    state = t.optimizers[0].state
    assert float(state[net.head.weight]["step"]) == 1 and float(state[net.embed.weight]["step"]) == 5
    assert technique.report() == {"updated": 0, "waiting": 1}
    assert set(technique.state_dict()["sums"]) == {"head.weight"}


def test_a_tied_head_is_the_embedding() -> None:
    net = module("gpt2", num_layers=2)
    every = [make_batch("gpt2", 2)] * 2
    t = trainer(UpdatePeriods({"embedding": 2, "head": 2}), max_steps=1)
    t.fit(net, DataLoader(every, batch_size=None))  # pyright: ignore[reportArgumentType]
    assert {n for n, p in net.named_parameters() if p not in t.optimizers[0].state} == {
        "model.transformer.wte.weight",
        "model.transformer.wpe.weight",
    }
    with pytest.raises(ValueError, match=r"'embedding' gives model.transformer.wte.weight the period 2, and 'head' 3"):
        trainer(UpdatePeriods({"embedding": 2, "head": 3}), max_steps=1).fit(
            net,
            DataLoader(every, batch_size=None),  # pyright: ignore[reportArgumentType]
        )


class Overflowing(Net):
    """One of its losses overflows."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if batch_idx == 1 else loss


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_does_not_count(fused: bool) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 1e-1, fused=fused)

    found: list[Tensor] = []
    for every in (batches(5), [one for i, one in enumerate(batches(5)) if i != 1]):
        torch.manual_seed(0)
        net = Overflowing(make) if len(every) == 5 else Net(make)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10**6, backoff_factor=0.5)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        trainer(UpdatePeriods({"embedding": 2, "head": 4}), plugins=[plugin], max_epochs=1).fit(
            net,
            DataLoader(every, batch_size=None),  # pyright: ignore[reportArgumentType]
        )
        found.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert found[0].isfinite().all()
    torch.testing.assert_close(*found, rtol=0, atol=2e-4)


def test_a_parameter_without_a_gradient_counts_as_zero() -> None:
    one = Accumulator(3, mean=True)
    assert one.take(None, 1) is None and one.take(torch.ones(2), 2) is None
    found = one.take(None, 3)
    assert found is not None
    torch.testing.assert_close(found, torch.full((2,), 1 / 3))
    assert one.take(None, 6) is None


@pytest.mark.parametrize(
    ("net", "periods", "message"),
    [
        (Net, {"heat": 2}, r"'heat' matches no trained parameter; .* 'embedding', 'head', .* Nearest: .*head"),
        (lambda: no_blocks(), {"embedding": 2}, r"'embedding' matches no trained parameter"),
        (
            lambda: Net(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True)),
            {"head": 2},
            "cannot begin parameters of a group at different steps",
        ),
        (lambda: Net(lambda p: torch.optim.LBFGS(p)), {"head": 2}, "computes the loss anew within its step"),
    ],
)
def test_what_it_cannot_step_is_refused(net: Any, periods: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(UpdatePeriods(periods), max_steps=1).fit(net(), DataLoader(batches(1), batch_size=None))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("periods", [{}, {"head": 0}, {"head": 1.5}, ["head"], {"": 2}])
def test_settings_that_cannot_be_are_refused(periods: Any) -> None:
    with pytest.raises(ValueError, match=r"UpdatePeriods\(periods=.*expected a dict from kinds or patterns"):
        UpdatePeriods(periods)


def test_an_optimizer_within_the_backward_pass_is_refused() -> None:
    with pytest.raises(ValueError, match="before they could be kept"):
        trainer(UpdatePeriods({"head": 2}), OptimizerInBackward(), max_steps=1).fit(
            Net(),
            DataLoader(batches(1), batch_size=None),  # pyright: ignore[reportArgumentType]
        )


def test_a_checkpoint_within_a_period_needs_the_same_periods(tmp_path: Any) -> None:
    every: Any = DataLoader(batches(), batch_size=None)  # pyright: ignore[reportArgumentType]
    t: pl.Trainer = trainer(UpdatePeriods({"head.weight": 3}), max_steps=2)
    t.fit(Net(), every)
    t.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"holds gradients of head\.weight, which would now be stepped each time"):
        trainer(UpdatePeriods({"embed.weight": 3}), max_steps=4).fit(Net(), every, ckpt_path=tmp_path / "a.ckpt")
