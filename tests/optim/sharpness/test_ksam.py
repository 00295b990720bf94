"""K-SAM: all samples are SAM, no radius is Ordered SGD, and both together a loop written by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_eff._core._samples.scoring import Scorer
from lightning_eff.optim.sharpness.ksam import KSAM, largest
from tests.cases import Case, own_loss
from tests.models import TinyClassifier, loader, trainer
from tests.optim.sharpness.test_sharpness_aware_minimization import AS_SAM, both, ends_as_sam
from tests.runs import fit, resume_from_batches

CASES = {
    "KSAM": Case(
        active=lambda: KSAM(rho=0.1, keep=0.5),
        neutral=lambda: KSAM(rho=0.0, keep=1.0),
        lost=(own_loss, "classifier", "sample_loss"),
    )
}


def test_the_samples_of_largest_loss() -> None:
    losses = torch.tensor([0.3, 0.1, 0.5, 0.3, 0.2])
    assert largest(losses, k=2).tolist() == [0, 2]
    assert largest(losses, k=5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("name", "mode"), AS_SAM)
def test_all_samples_are_sam(name: str, mode: str) -> None:
    assert ends_as_sam(KSAM(rho=0.1, keep=1.0), name, mode)


class Plain(TinyClassifier):
    def __init__(self) -> None:
        super().__init__(batch_norm=False)
        self.head = torch.nn.Linear(8, 3)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_equals_the_loop_by_hand(rho: float) -> None:
    """Without a radius that is Ordered SGD: the mean gradient of the q largest of s losses."""
    net, reference = both("classifier", Plain)
    batches = loader("classifier", samples=48, batch_size=8, shuffle=False)
    technique = KSAM(rho=rho, keep=0.25)
    trainer(technique, max_epochs=1).fit(net, batches)
    params, optimizer = list(reference.parameters()), torch.optim.SGD(reference.parameters(), lr=0.3)
    for x, y in batches:
        top = F.cross_entropy(reference(x), y, reduction="none").topk(2).indices
        x, y = x[top], y[top]
        found = torch.autograd.grad(F.cross_entropy(reference(x), y), params)
        norm = torch.cat([g.flatten() for g in found]).norm()
        old = [p.detach().clone() for p in params]
        with torch.no_grad():
            for p, g in zip(params, found, strict=True):
                p += rho * g / norm
        optimizer.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        with torch.no_grad():
            for p, w in zip(params, old, strict=True):
                p.copy_(w)
        optimizer.step()
    for a, b in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert technique.report()["fraction"] == 0.25
    assert technique.state_dict()["passes"] == (6 if rho else 0)


def test_a_batch_of_one_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="KSAM: got a batch of 1 sample; expected several"):
        trainer(KSAM(), max_steps=3).fit(TinyClassifier(), loader("classifier", batch_size=1))


def test_a_resumed_run_does_not_look_at_its_first_batch_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    by_sample = Scorer._lies_by_sample
    monkeypatch.setattr(Scorer, "_lies_by_sample", lambda *args: looks.append(1) or by_sample(*args))
    build = lambda: [KSAM(rho=0.1, keep=0.5)]  # noqa: E731
    fit("classifier", build, directory=tmp_path, max_steps=2)
    assert looks == [1]
    fit("classifier", build, resume=tmp_path / "step=1.ckpt", max_steps=2)
    assert looks == [1]


def test_resumes_within_accumulation_windows(tmp_path: Path) -> None:
    assert resume_from_batches("classifier", lambda: [KSAM(rho=0.1, keep=0.5)], tmp_path, (2, 4, 9)) == {}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rho": float("inf")}, r"KSAM\(rho=inf\): expected a finite number >= 0"),
        ({"keep": 0.0}, r"KSAM\(keep=0.0\): expected a number in \(0, 1\]"),
        ({"sample_loss": "x"}, r"KSAM\(sample_loss='x'\): expected a function"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KSAM(**kwargs)
