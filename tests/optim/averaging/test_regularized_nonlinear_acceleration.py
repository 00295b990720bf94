"""RNA: the exact minimiser of a quadratic, coefficients against the paper's formula, and training that feels nothing of it."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff.optim.averaging.regularized_nonlinear_acceleration import (
    RegularizedNonlinearAcceleration,
    coefficients,
    combination,
    gram,
)
from tests.cases import Case
from tests.models import TinyClassifier, loader, trainer
from tests.optim.watch import Watch, differing, state_of
from tests.runs import MODES, checkpoints, fit, resume_from_batches

CASES = {
    "RegularizedNonlinearAcceleration": Case(
        active=lambda: RegularizedNonlinearAcceleration(window=4, interval=1),
        neutral=lambda: RegularizedNonlinearAcceleration(start=1.0),
        anywhere=True,
    )
}


def by_numpy(points: np.ndarray, regularization: float) -> tuple[np.ndarray, np.ndarray]:
    """``z = (R^T R / ||R^T R|| + lambda I)^-1 1``, ``c = z / sum z``, and ``sum c_i x_i``, as the paper writes them."""
    r = np.diff(points, axis=0).T
    k = r.T @ r
    z = np.linalg.solve(k / np.linalg.norm(k, 2) + regularization * np.eye(len(k)), np.ones(len(k)))
    c = z / z.sum()
    return c, c @ points[:-1]


@pytest.mark.parametrize("regularization", [1e-8, 1e-4, 1.0, 1e4])
def test_coefficients_are_those_of_the_paper(regularization: float) -> None:
    points = torch.randn(6, 40, dtype=torch.float64)
    c = coefficients(gram(list(points)), regularization=regularization)
    expected, point = by_numpy(points.numpy(), regularization)
    np.testing.assert_allclose(c.numpy(), expected, rtol=1e-9, atol=1e-12)
    got = combination(list(points), c, device=torch.device("cpu"))
    np.testing.assert_allclose(got.numpy(), point, rtol=1e-9, atol=1e-12)
    assert float(c.sum()) == pytest.approx(1.0)
    if regularization == 1e4:
        np.testing.assert_allclose(c.numpy(), np.full(5, 0.2), rtol=1e-3)  # the plain mean


def test_residuals_that_are_all_zero_have_equal_parts() -> None:
    c = coefficients(torch.zeros(3, 3, dtype=torch.float64), regularization=0.0)
    torch.testing.assert_close(c, torch.full((3,), 1 / 3, dtype=torch.float64))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_run_that_has_diverged_is_shown_as_it_is(value: float) -> None:
    broken = torch.eye(3, dtype=torch.float64)
    broken[1, 1] = value
    assert coefficients(broken, regularization=1e-4).tolist() == [1 / 3] * 3
    points = [torch.ones(2), torch.full((2,), value), torch.ones(2)]
    c = coefficients(gram(points), regularization=1e-4)
    assert not combination(points, c, device=torch.device("cpu")).isfinite().any()


class Bowl(pl.LightningModule):
    """``L(w) = (w - w*)^T H (w - w*) / 2`` under gradient descent, in two tensors."""

    def __init__(self, h: Tensor, minimum: Tensor) -> None:
        super().__init__()
        self.h, self.minimum = h, minimum
        self.a, self.b = (
            nn.Parameter(torch.zeros(2, dtype=h.dtype)),
            nn.Parameter(torch.zeros(len(h) - 2, dtype=h.dtype)),
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        d = torch.cat([self.a, self.b]) - self.minimum
        return 0.5 * d @ self.h @ d

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5 / float(torch.linalg.matrix_norm(self.h, 2)))


def test_a_quadratic_ends_at_its_exact_minimiser() -> None:
    d = 4
    q, _ = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))
    h, minimum = q @ torch.diag(torch.tensor([1.0, 2.0, 4.0, 5.0]).double()) @ q.T, torch.randn(d, dtype=torch.float64)
    net = Bowl(h, minimum)
    technique = RegularizedNonlinearAcceleration(window=d + 2, interval=1, regularization=0.0)  # d + 1 residuals
    watch = Watch()
    trainer(technique, watch, max_steps=d + 2).fit(net, DataLoader(torch.zeros(50, 1)))
    found = torch.cat([net.a, net.b]).detach()
    raw = torch.cat([watch.raw[d + 2]["a"], watch.raw[d + 2]["b"]])
    assert (found - minimum).norm() < 1e-6
    assert (raw - minimum).norm() > 0.05
    assert technique.report()["largest"] > 1.0


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("model", ["tiny_gpt", "classifier"])
def test_training_goes_on_from_the_raw_weights(model: str, mode: str) -> None:
    watch, plain = Watch(), Watch()
    technique = RegularizedNonlinearAcceleration(window=4, interval=2, regularization=1e-4)
    net, _ = fit(model, lambda: [technique], callbacks=[watch], **MODES[mode])
    fit(model, list, callbacks=[plain], **MODES[mode])
    assert [step for step in plain.raw if differing(watch.raw[step], plain.raw[step])] == []
    names = [name for name, _ in net.named_parameters()]
    points = np.stack(
        [np.concatenate([plain.raw[s][n].double().numpy().ravel() for n in names]) for s in (6, 8, 10, 12)]
    )
    _, expected = by_numpy(points, 1e-4)
    state = state_of(net)
    got = np.concatenate([state[n].double().numpy().ravel() for n in names])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert "extrapolated from 4 snapshots" in technique.summary()


def test_shown_from_the_third_snapshot_on(tmp_path: Path) -> None:
    watch = Watch()
    fit(
        "tiny_gpt",
        lambda: [RegularizedNonlinearAcceleration(window=4, interval=2)],
        callbacks=[watch],
        directory=tmp_path,
        limit_val_batches=1,
        val_check_interval=3,
    )
    shown = [
        bool(differing(torch.load(path, weights_only=True)["state_dict"], watch.raw[step]))
        for step, path in enumerate(checkpoints(tmp_path), start=1)
    ]
    assert shown == [step >= 6 for step in range(1, 13)]
    assert [bool(differing(state, watch.raw[step])) for step, (state, _) in sorted(watch.validated.items())] == [
        False,
        True,
    ]


def test_parameters_that_are_thawed_later_join_when_all_snapshots_have_them() -> None:
    class Thaws(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
            pl_module.get_submodule("embed").requires_grad_(trainer.global_step >= self.at)

    for at, joined in ((9, True), (10, False)):  # with snapshots of the steps 10, 11 and 12
        thaws, watch = Thaws(), Watch()
        thaws.at = at
        technique = RegularizedNonlinearAcceleration(window=3, interval=1)
        net, _ = fit("tiny_gpt", lambda technique=technique: [technique], callbacks=[thaws, watch])
        assert torch.equal(state_of(net)["embed.weight"], watch.raw[12]["embed.weight"]) is not joined
        assert not torch.equal(state_of(net)["head.weight"], watch.raw[12]["head.weight"])


def test_resumes_within_windows(tmp_path: Path) -> None:
    def build() -> list[Any]:
        return [RegularizedNonlinearAcceleration(window=3, interval=1)]

    assert resume_from_batches("classifier", build, tmp_path, (4, 7, 9, 11)) == {}


def test_too_few_snapshots_are_told() -> None:
    technique = RegularizedNonlinearAcceleration(window=4, interval=5)
    with pytest.warns(UserWarning, match=r"ends after 12 steps, and snapshot 3 would be taken after 15 \(interval=5\)"):
        fit("tiny_gpt", lambda: [technique])
    assert "too few snapshots to extrapolate (2)" in technique.summary()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"window": 2}, r"window=2\): expected an integer >= 3"),
        ({"interval": 0}, r"RegularizedNonlinearAcceleration\(interval=0\): expected 'epoch' or an integer"),
        ({"regularization": -1.0}, r"regularization=-1.0\): expected a finite number >= 0"),
        ({"start": 2.0}, r"RegularizedNonlinearAcceleration\(start=2.0\): expected a number in \[0, 1\]"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RegularizedNonlinearAcceleration(**kwargs)


def test_offloaded_snapshots_give_the_same() -> None:
    nets = []
    for offload in (False, True):
        technique = RegularizedNonlinearAcceleration(window=3, interval=2, offload=offload)
        nets.append(state_of(fit("tiny_gpt", lambda technique=technique: [technique])[0]))
    assert differing(*nets) == []


def test_statistics_are_those_of_update_bn() -> None:
    net: Any = TinyClassifier()
    technique = RegularizedNonlinearAcceleration(window=4, interval=2, bn_batches=None)
    trainer(technique, max_steps=12).fit(net, loader("classifier", shuffle=False))
    got = {name: b.clone() for name, b in net.norm.named_buffers()}
    torch.optim.swa_utils.update_bn(loader("classifier", shuffle=False), net)
    for name, b in net.norm.named_buffers():
        torch.testing.assert_close(got[name], b, rtol=1e-6, atol=1e-7)
