"""ScheduleFree against the paper's three sequences written out, the library's own AdamW, and plain training."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.live_bytes import LiveBytes
from lightning_eff import LatestWeightAveraging, ReplaceOptimizer, ScheduleFree
from lightning_eff._core._optim.chunks import chunk_size
from lightning_eff.optim.averaging._sequences import Sequences
from tests.cases import Case
from tests.models import flat, loader, module, trainer
from tests.optim.watch import Watch, differing, state_of
from tests.runs import (
    checkpoints,
    differences,
    final_state,
    fit,
    fit_yaml,
    resume_from_batches,
    resume_from_every_step,
)

schedulefree = pytest.importorskip("schedulefree")

CASES = {
    "ScheduleFree": Case(
        active=lambda: ScheduleFree(momentum=0.8, warmup_steps=3),
        neutral=lambda: ScheduleFree(momentum=None),
        anywhere=True,
    )
}


class Regression(pl.LightningModule):
    """A linear map with a scalar scale, on fixed batches."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.map, self.scale = nn.Linear(4, 3, dtype=torch.float64), nn.Parameter(torch.ones((), dtype=torch.float64))
        self.make = make

    def loss(self, batch: Tensor) -> Tensor:
        return (self.scale * self.map(batch[:, :4]) - batch[:, 4:]).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def batches(num: int = 8) -> DataLoader[Any]:
    g = torch.Generator().manual_seed(1)
    data = torch.randn(num * 4, 7, generator=g, dtype=torch.float64)
    return DataLoader(list(data), batch_size=4)  # type: ignore[arg-type]


def run(make: Any, *callbacks: pl.Callback, **settings: Any) -> tuple[Regression, pl.Trainer]:
    net = Regression(make)
    t = trainer(*callbacks, max_epochs=1, **settings)
    t.fit(net, batches(), batches(2) if settings.get("limit_val_batches") else None)
    return net, t


# -- the rule


@pytest.mark.parametrize(("momentum", "power", "warmup"), [(0.9, 0.0, 0), (0.6, 1.0, 0), (0.95, 0.0, 4)])
def test_it_is_the_papers_three_sequences(momentum: float, power: float, warmup: int) -> None:
    make = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.7, nesterov=True)  # noqa: E731
    technique = ScheduleFree(momentum=momentum, power=power, warmup_steps=warmup, lr_factor=2.0)
    net, t = run(make, technique)
    theirs = Regression(make)
    params = list(theirs.parameters())
    x, z = ([p.detach().clone() for p in params] for _ in range(2))
    total = 0.0
    for k, batch in enumerate(batches(), start=1):
        for p, a, b in zip(params, x, z, strict=True):
            p.data = (1 - momentum) * b + momentum * a  # y
        grads = torch.autograd.grad(theirs.loss(batch), params)
        lr = 0.2 * (min(1.0, k / warmup) if warmup else 1.0)
        weight = k**power * lr**2
        total += weight
        for a, b, g in zip(x, z, grads, strict=True):
            b -= lr * g
            a += weight / total * (b - a)
    for p, a in zip(net.parameters(), x, strict=True):
        torch.testing.assert_close(p.detach(), a, rtol=1e-10, atol=1e-12)
    assert technique.report()["steps"] == 8 and technique.summary() == "the weights are the average of 8 steps"
    (group,) = t.optimizers[0].param_groups
    assert group["momentum"] == 0.7 and group["nesterov"], "its own momentum rests in its steps alone"


def test_around_adamw_it_is_the_librarys_own() -> None:
    make = lambda params: torch.optim.AdamW(params, lr=0.05, betas=(0.9, 0.95), weight_decay=0.0)  # noqa: E731
    net, _ = run(make, ScheduleFree(momentum=0.9))
    theirs = Regression(make)
    optimizer = schedulefree.AdamWScheduleFree(theirs.parameters(), lr=0.05, betas=(0.9, 0.95), weight_decay=0.0)
    optimizer.train()
    for batch in batches():
        optimizer.zero_grad()
        theirs.loss(batch).backward()
        optimizer.step()
    optimizer.eval()
    for p, q in zip(net.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("settings", "layout", "fused"),
    [
        ({}, torch.contiguous_format, True),
        ({}, torch.channels_last, False),
        ({"foreach": False}, torch.contiguous_format, False),
        ({"foreach": True}, torch.contiguous_format, False),
    ],
)
def test_adamw_is_fused_where_torch_may_choose(settings: dict[str, Any], layout: Any, fused: bool) -> None:
    p = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=layout))
    optimizer = torch.optim.AdamW([p], lr=0.1, **settings)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append((optimizer.param_groups[0]["fused"], p.detach().clone())))
    sequences = Sequences(optimizer, optimizer.step, 0.9, 0.0)
    z = p.detach().clone()
    for _ in range(3):
        p.grad = torch.randn(p.shape)  # contiguous, whatever the parameter's layout
        sequences.look()
        sequences.step()
        assert torch.equal(seen[-1][1], z), "the step begins at z"
        z = sequences.z[p].clone()
    assert [bool(found) for found, _ in seen] == [fused] * 3 and not optimizer.param_groups[0]["fused"]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_a_step_takes_the_memory_of_a_few_chunks() -> None:
    params = [nn.Parameter(torch.randn(300, 1000)) for _ in range(20)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW(params)
    sequences = Sequences(optimizer, optimizer.step, 0.9, 0.0)
    sequences.step()
    with LiveBytes() as live:
        sequences.step()
    assert live.peak - live.total <= 2 * 4 * chunk_size(torch.device("cpu"))


# -- who sees which weights


def test_validation_and_checkpoints_see_the_average(tmp_path: Path) -> None:
    watch = Watch()
    settings: dict[str, Any] = {"limit_val_batches": 2, "num_sanity_val_steps": 1, "val_check_interval": 2}
    net, _ = fit(
        "tiny_gpt", lambda: [ScheduleFree(momentum=0.8)], callbacks=[watch], directory=tmp_path, max_steps=6, **settings
    )
    assert set(watch.validated) == {2, 4}
    for step, (state, _) in watch.validated.items():
        saved = torch.load(checkpoints(tmp_path)[step - 1], weights_only=True)
        assert differing(state, saved["state_dict"]) == []
        assert differing(state, watch.raw[step]) != []
    last = torch.load(checkpoints(tmp_path)[-1], weights_only=True)["state_dict"]
    assert differing(state_of(net), last) == [] and differing(watch.raw[6], last) != []


def test_training_feels_nothing_of_validation() -> None:
    make = lambda params: torch.optim.AdamW(params, lr=0.05)  # noqa: E731
    watch, alone = Watch(), Watch()
    net, _ = run(make, ScheduleFree(), watch, limit_val_batches=2, val_check_interval=1)
    other, _ = run(make, ScheduleFree(), alone)
    assert len(watch.validated) == 8
    assert [s for s in alone.raw if differing(watch.raw[s], alone.raw[s])] == []
    assert torch.equal(flat(net), flat(other)) and differing(watch.raw[8], state_of(net)) != []


def test_the_modules_schedule_rests_and_its_rate_is_the_highest() -> None:
    def make(params: Any) -> Any:
        optimizer = torch.optim.SGD(params, lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: s / 10),
        }

    net = Regression(make)
    t = trainer(ScheduleFree(), max_epochs=1)
    t.fit(net, batches())
    assert t.optimizers[0].param_groups[0]["lr"] == 0.1
    plain, _ = run(lambda params: torch.optim.SGD(params, lr=0.1), ScheduleFree())
    assert torch.equal(flat(net), flat(plain))


def test_batch_norms_statistics_are_those_of_the_average() -> None:
    net, _ = fit("classifier", lambda: [ScheduleFree()])
    raw, _ = fit("classifier", lambda: [ScheduleFree(bn_batches=1)])
    differ = [name for name, value in net.named_buffers() if not torch.equal(value, dict(raw.named_buffers())[name])]
    assert differ and int(net.norm.num_batches_tracked) != 12
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), raw.parameters(), strict=True))


def test_a_rate_of_zero_trains_nothing_and_does_not_fail() -> None:
    start = Regression(None)
    net, _ = run(lambda params: torch.optim.AdamW(params, lr=0.0), ScheduleFree())
    assert torch.equal(flat(net), flat(start))


# -- resume


@pytest.mark.parametrize("optimizer", [None, "torch.optim.RMSprop", "lightning_eff.SOAP"])
def test_it_resumes_bit_for_bit(optimizer: str | None, tmp_path: Path) -> None:
    def build() -> list[Any]:
        own = [] if optimizer is None else [ReplaceOptimizer(optimizer, "matrices", lr=0.01)]
        return [ScheduleFree(momentum=0.8, warmup_steps=5), *own]

    settings: dict[str, Any] = {"limit_val_batches": 1, "val_check_interval": 2, "max_steps": 6}
    whole = final_state(*fit("tiny_gpt", build, directory=tmp_path, **settings))
    for path in checkpoints(tmp_path)[:5:2]:
        assert differences(whole, final_state(*fit("tiny_gpt", build, resume=path, **settings))) == []


def test_a_plain_run_goes_on_from_its_checkpoint_and_validates_the_average(tmp_path: Path) -> None:
    whole, _ = fit("tiny_gpt", lambda: [ScheduleFree()], directory=tmp_path)
    path = checkpoints(tmp_path)[-1]
    net, t = fit("tiny_gpt", list, resume=checkpoints(tmp_path)[5])
    assert t.global_step == 12 and flat(net).isfinite().all()
    other = module("tiny_gpt")
    trainer(ScheduleFree()).validate(other, loader("tiny_gpt", 8), ckpt_path=path, verbose=False, weights_only=True)
    assert torch.equal(flat(other), flat(whole))


def test_an_exception_leaves_the_trained_weights() -> None:
    class Fails(Watch):
        def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.global_step == 4:
                raise KeyError("planted")

    watch = Fails()
    net = Regression(lambda params: torch.optim.SGD(params, lr=0.1))
    t = trainer(ScheduleFree(), watch, max_epochs=1, limit_val_batches=1, val_check_interval=2)
    with pytest.raises(KeyError, match="planted"):
        t.fit(net, batches(), batches(1))
    assert differing(state_of(net), watch.raw[4]) == []


# -- what it refuses


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 1.0}, r"ScheduleFree\(momentum=1.0\): expected a number in \(0, 1\), or None"),
        ({"lr_factor": 0.0}, "lr_factor=0.0"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"power": -0.5}, "power=-0.5"),
        ({"bn_batches": 0}, "bn_batches=0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleFree(**settings)


def test_runs_that_it_cannot_train_are_refused() -> None:
    make = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    with pytest.raises(ValueError, match=r"AdamWScheduleFree, which is already schedule-free\. Return a plain"):
        run(schedulefree.AdamWScheduleFree, ScheduleFree())
    with pytest.raises(ValueError, match=r"returned LBFGS, which evaluates the loss again within its step\. Return an"):
        run(torch.optim.LBFGS, ScheduleFree())
    for other in (EMAWeightAveraging(), LatestWeightAveraging()):
        with pytest.raises(ValueError, match="cannot train together: both replace the weights"):
            run(make, ScheduleFree(), other)
    stray = nn.Parameter(torch.zeros(2))
    with pytest.raises(
        ValueError, match=r"SGD updates 1 tensors that are not parameters of Regression \(shapes \[\(2,\)\]\)"
    ):
        run(lambda params: torch.optim.SGD([*params, stray], lr=0.1), ScheduleFree())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    fit("tiny_gpt", lambda: [ScheduleFree()], directory=tmp_path, max_steps=1)
    net = Regression(lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.raises(ValueError, match=r"the checkpoint has averages of \d+ parameters that Regression lacks"):
        trainer(ScheduleFree(), max_steps=2).fit(net, batches(), ckpt_path=checkpoints(tmp_path)[0])


@pytest.mark.slow
def test_it_resumes_from_everywhere(tmp_path: Path) -> None:
    build = lambda: [ScheduleFree(momentum=0.8)]  # noqa: E731
    for model in ("classifier", "gpt2"):
        assert resume_from_every_step(model, build, tmp_path / model) == {}
        assert resume_from_batches(model, build, tmp_path / f"{model}-batches", None) == {}


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "ScheduleFree", {"momentum": 0.8, "warmup_steps": 2}, max_steps=3)
    assert "ScheduleFree" in capsys.readouterr().out
