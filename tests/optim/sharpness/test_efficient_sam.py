"""ESAM against a loop written by hand; with beta = gamma = 1 it is SAM."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_eff._core._samples.scoring import Scorer
from lightning_eff.optim.sharpness.efficient_sam import EfficientSAM, sharpest
from tests.cases import Case, own_loss
from tests.models import TinyClassifier, loader, trainer
from tests.optim.sharpness.test_sharpness_aware_minimization import AS_SAM, both, ends_as_sam
from tests.runs import fit, resume_from_batches

CASES = {
    "EfficientSAM": Case(
        active=lambda: EfficientSAM(rho=0.1),
        neutral=lambda: EfficientSAM(rho=0.0),
        lost=(own_loss, "classifier", "sample_loss"),
    )
}


def test_the_samples_that_rise_most() -> None:
    rise = torch.tensor([0.3, -0.1, 0.5, 0.3, 0.2])
    assert sharpest(rise, gamma=0.4).tolist() == [0, 2]
    assert sharpest(rise, gamma=0.6).tolist() == [0, 2, 3]
    assert sharpest(rise, gamma=0.01).tolist() == [2]
    assert sharpest(rise, gamma=1.0).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("name", "mode"), AS_SAM)
def test_all_parameters_and_all_samples_are_sam(name: str, mode: str) -> None:
    assert ends_as_sam(EfficientSAM(rho=0.1, beta=1.0, gamma=1.0), name, mode)


class Plain(TinyClassifier):
    def __init__(self) -> None:
        super().__init__(batch_norm=False)
        self.head = torch.nn.Linear(8, 3)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def by_hand(net: Plain, batches: list[Any], drawn: list[list[str]], gamma: float) -> None:
    """ESAM without Lightning, with the parameters that each step draws."""
    params, optimizer = dict(net.named_parameters()), torch.optim.SGD(net.parameters(), lr=0.3)
    for (x, y), names in zip(batches, drawn, strict=True):
        before = F.cross_entropy(net(x), y, reduction="none")
        found = torch.autograd.grad(before.mean(), [params[n] for n in names])
        norm = torch.cat([g.flatten() for g in found]).norm()
        old = {n: params[n].detach().clone() for n in names}
        with torch.no_grad():
            for n, g in zip(names, found, strict=True):
                params[n] += 0.5 / 0.4 * g / norm
            rise = F.cross_entropy(net(x), y, reduction="none") - before
        chosen = rise.topk(round(gamma * len(y))).indices
        optimizer.zero_grad()
        F.cross_entropy(net(x[chosen]), y[chosen]).backward()
        with torch.no_grad():
            for n in names:
                params[n].copy_(old[n])
        optimizer.step()


class Drawn(EfficientSAM):
    """Tells what it draws."""

    def _reset(self) -> None:
        super()._reset()
        self.drawn: list[list[str]] = []

    def ascended(self, step: Any, named: Any) -> Any:
        found = super().ascended(step, named)
        self.drawn.append([name for name, _ in found])
        return found


def test_equals_the_loop_by_hand() -> None:
    net, reference = both("classifier", Plain)
    batches = loader("classifier", samples=96, batch_size=8, shuffle=False)
    technique = Drawn(rho=0.5, beta=0.4, gamma=0.5)
    trainer(technique, max_epochs=1).fit(net, batches)
    by_hand(reference, list(batches), technique.drawn, 0.5)  # pyright: ignore[reportArgumentType]
    for a, b in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert len({tuple(names) for names in technique.drawn}) > 3, "each step draws anew"
    assert min(map(len, technique.drawn)) >= 1


def test_tensors_are_drawn_with_their_chance() -> None:
    technique = Drawn(rho=0.1, beta=0.6)
    net, _ = fit("tiny_gpt", lambda: [technique], max_steps=12)
    share = sum(map(len, technique.drawn)) / (12 * len(list(net.parameters())))
    assert share == pytest.approx(0.6, abs=0.05)  # of 636 draws, whose share deviates by 0.02


def test_what_a_step_costs() -> None:
    technique, found = EfficientSAM(rho=0.1, gamma=0.5), list[tuple[int, int, int]]()

    class Costs(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            cost = technique.session.chain.cost
            found.append((cost.forward_passes, cost.backward_passes, cost.forward_samples))

    trainer(technique, Costs(), max_steps=2).fit(Plain(), loader("classifier", batch_size=8, samples=32))
    first, second = found
    assert tuple(b - a for a, b in zip(first, second, strict=True)) == (2, 1, 8 + 4)


def test_sharpness_is_the_mean_rise_of_all_samples() -> None:
    technique = EfficientSAM(rho=0.5, beta=1.0, gamma=0.5)
    whole = EfficientSAM(rho=0.5, beta=1.0, gamma=1.0)
    for one, net in zip((technique, whole), both("classifier", Plain), strict=True):
        trainer(one, max_steps=1).fit(net, loader("classifier", batch_size=8, shuffle=False))
    assert float(technique.report()["sharpness"]) == pytest.approx(float(whole.report()["sharpness"]), rel=1e-4)


def test_a_loss_that_cannot_be_seen_is_told_by_a_function() -> None:
    def losses(module: Any, batch: Any) -> Tensor:
        return torch.logsumexp(module(batch[0]), dim=1)

    technique = EfficientSAM(rho=0.1, sample_loss=losses)
    t = trainer(technique, max_steps=3)
    t.fit(own_loss(), loader("classifier"))
    assert t.global_step == 3 and technique.state_dict()["passes"] == 3


def test_a_batch_of_one_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="EfficientSAM: got a batch of 1 sample; expected several"):
        trainer(EfficientSAM(), max_steps=3).fit(TinyClassifier(), loader("classifier", batch_size=1))


def test_a_resumed_run_does_not_look_at_its_first_batch_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    by_sample = Scorer._lies_by_sample
    monkeypatch.setattr(Scorer, "_lies_by_sample", lambda *args: looks.append(1) or by_sample(*args))
    build = lambda: [EfficientSAM(rho=0.1)]  # noqa: E731
    fit("classifier", build, directory=tmp_path, max_steps=2)
    assert looks == [1]
    fit("classifier", build, resume=tmp_path / "step=1.ckpt", max_steps=2)
    assert looks == [1]


def test_resumes_within_accumulation_windows(tmp_path: Path) -> None:
    assert resume_from_batches("classifier", lambda: [EfficientSAM(rho=0.1)], tmp_path, (2, 4, 9)) == {}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rho": float("nan")}, r"EfficientSAM\(rho=nan\): expected a finite number >= 0"),
        ({"beta": 0.0}, r"EfficientSAM\(beta=0.0\): expected a number in \(0, 1\]"),
        ({"gamma": 1.2}, r"EfficientSAM\(gamma=1.2\): expected a number in \(0, 1\]"),
        ({"sample_loss": 3}, r"EfficientSAM\(sample_loss=3\): expected a function"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EfficientSAM(**kwargs)
