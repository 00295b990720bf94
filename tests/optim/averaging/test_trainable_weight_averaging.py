"""TWA: a basis by Gram-Schmidt, the projected gradient by an explicit matrix, and the optimum of a quadratic in the span."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff import ProgressiveStacking, TrainableWeightAveraging
from lightning_eff._core.session import Session
from lightning_eff.optim.averaging.trainable_weight_averaging import coordinates, mean_and_basis, orthonormal, point
from tests.cases import Case
from tests.core.nop import Nop
from tests.models import TinyClassifier, flat, loader, module, trainer
from tests.optim.averaging.test_regularized_nonlinear_acceleration import Bowl
from tests.optim.watch import Watch, differing, state_of
from tests.runs import MODES, checkpoints, fit, fit_yaml, resume_from_batches

CASES = {
    "TrainableWeightAveraging": Case(
        active=lambda: TrainableWeightAveraging(window=2, start=0.45, until=0.75, lr=0.1, bn_batches=2),  # after growth
        neutral=lambda: TrainableWeightAveraging(until=1.0),
        anywhere=True,
    )
}


def gram_schmidt(w: np.ndarray) -> np.ndarray:
    """An orthonormal basis of the rows of ``w``, (n, D), one after the other as in the authors' code; (n, D)."""
    p: list[np.ndarray] = []
    for row in w:
        rest = row.copy()
        for _ in range(2):
            for q in p:
                rest = rest - (q @ rest) * q
        p.append(rest / np.linalg.norm(rest))
    return np.stack(p)


def snapshots(n: int = 4, seed: int = 0) -> list[dict[str, Tensor]]:
    """Nearby weights in two tensors, as those of a run's tail are."""
    g = torch.Generator().manual_seed(seed)
    first = {"a": torch.randn(3, 5, generator=g), "b": torch.randn(7, generator=g)}
    return [{k: w + 0.01 * torch.randn(w.shape, generator=g) for k, w in first.items()} for _ in range(n)]


def rows(named: dict[str, Tensor]) -> np.ndarray:
    return np.concatenate(
        [w.double().numpy().reshape(len(w) if w.ndim == 3 else 1, -1) for w in named.values()], axis=-1
    )


def vector(named: dict[str, Tensor]) -> np.ndarray:
    return np.concatenate([w.detach().double().numpy().ravel() for w in named.values()])


def test_the_projected_gradient_is_that_of_an_explicit_matrix() -> None:
    taken = snapshots()
    mean, basis = mean_and_basis(taken)
    g = {"a": torch.randn(3, 5), "b": torch.randn(7)}
    p = gram_schmidt(np.stack([vector(w) for w in taken]))
    c = coordinates(basis, g)
    zero = {k: torch.zeros_like(w) for k, w in mean.items()}
    got = vector({k: point(zero[k], basis[k], c) for k in basis})
    np.testing.assert_allclose(got, p.T @ (p @ vector(g)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(vector(mean), np.mean([vector(w) for w in taken], axis=0), rtol=1e-6)
    made = np.concatenate([basis[k].double().numpy().reshape(4, -1) for k in basis], axis=1)
    np.testing.assert_allclose(made @ made.T, np.eye(4), atol=1e-5)
    assert coordinates(basis, {"a": g["a"]}) == pytest.approx(coordinates(basis, {**g, "b": 0 * g["b"]}))


def test_snapshots_that_add_nothing_have_no_coefficient() -> None:
    taken = snapshots(3)
    _, basis = mean_and_basis([*taken, taken[1]])
    assert len(basis["a"]) == 3
    assert orthonormal(torch.ones(3, 3, dtype=torch.float64)).shape == (3, 1)


def bowl(d: int = 6) -> tuple[Tensor, Tensor, Bowl]:
    q, _ = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))
    h = q @ torch.diag(torch.linspace(1.0, 4.0, d).double()) @ q.T
    minimum = torch.randn(d, dtype=torch.float64)
    return h, minimum, Bowl(h, minimum)


class Path_(pl.Callback):
    """All weights, as they are after each step."""

    def __init__(self) -> None:
        self.weights: list[np.ndarray] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.weights.append(vector(dict(pl_module.named_parameters())))


def test_a_quadratic_ends_at_its_optimum_in_the_span() -> None:
    h, minimum, net = bowl()
    technique = TrainableWeightAveraging(window=3, start=0.0, until=0.02, lr=0.2, momentum=0.0)
    path = Path_()
    trainer(technique, path, max_steps=300).fit(net, DataLoader(torch.zeros(300, 1)))
    # u is 2/300, 4/300, 6/300 as the steps 3, 5, 7 begin
    w = np.stack([_plain(h, minimum, step) for step in (3, 5, 7)])
    # min_a (W^T a - w*)^T H (W^T a - w*): least squares
    root = np.linalg.cholesky(h.numpy()).T
    a, *_ = np.linalg.lstsq(root @ w.T, root @ minimum.numpy(), rcond=None)
    np.testing.assert_allclose(path.weights[-1], a @ w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(path.weights[6], w.mean(axis=0), rtol=1e-10, err_msg="it begins at the mean")
    p = gram_schmidt(w)
    for weights in path.weights[6:]:
        np.testing.assert_allclose(p.T @ (p @ weights), weights, rtol=1e-9, atol=1e-10, err_msg="left the span")
    one = path.weights[6] - 0.2 * (1 - 7 / 300) / (1 - 0.02) * p.T @ (
        p @ (h.numpy() @ (path.weights[6] - minimum.numpy()))
    )
    np.testing.assert_allclose(path.weights[7], one, rtol=1e-9, err_msg="w - lr P P^T g")
    assert technique.report()["coefficients"] == 3


def test_coefficients_have_momentum() -> None:
    h, minimum, net = bowl()
    technique, path = TrainableWeightAveraging(window=3, start=0.0, until=0.02, lr=0.2, momentum=0.5), Path_()
    trainer(technique, path, max_steps=300).fit(net, DataLoader(torch.zeros(300, 1)))
    p = gram_schmidt(np.stack([_plain(h, minimum, step) for step in (3, 5, 7)]))
    w, v = path.weights[6], np.zeros(3)
    for step in range(7, 12):
        v = 0.5 * v + p @ (h.numpy() @ (w - minimum.numpy()))
        w = w - 0.2 * (1 - step / 300) / (1 - 0.02) * p.T @ v
        np.testing.assert_allclose(path.weights[step], w, rtol=1e-8)


def test_a_fused_steps_scaler_is_heeded() -> None:
    """A fused optimizer is given the scale of its gradients, and whether one is not finite; it looks at both by itself."""
    *_, net = bowl()
    technique = TrainableWeightAveraging(window=3, start=0.0, until=0.5, lr=0.2, momentum=0.0)
    ends: list[Tensor] = []

    class Steps(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            begin = technique._c.clone()
            for scale, found in ((None, None), (4.0, 0.0), (4.0, 1.0)):
                technique._c = begin.clone()
                for w in pl_module.parameters():
                    w.grad = torch.ones_like(w) * (scale or 1.0)
                optimizer: Any = SimpleNamespace(grad_scale=scale, found_inf=found)
                technique._stepped_by(optimizer, (), {})
                ends.append(technique._c - begin)

    trainer(technique, Steps(), max_steps=20).fit(net, DataLoader(torch.zeros(20, 1)))
    assert ends[0].abs().max() > 1e-4
    torch.testing.assert_close(ends[1], ends[0])
    assert not ends[2].any()


def test_other_techniques_are_told_that_weights_were_overwritten() -> None:
    told: list[int] = []

    class Told(Nop):
        def on_blocks_changed(self, session: Session) -> None:
            told.append(session.trainer.global_step)

    technique = TrainableWeightAveraging(window=3, start=0.0, until=0.5, lr=0.1, bn_batches=2)
    fit("tiny_gpt", lambda: [technique, Told()])
    assert told == [7]


class Sparse(pl.LightningModule):
    """A table whose gradients torch keeps sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(3, 8, sparse=True), nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(batch[0] + self.table(batch[1] % 2)), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def test_what_is_kept_is_taken_up_and_no_hook_stays() -> None:
    technique = TrainableWeightAveraging(window=3, start=0.0, until=0.5, lr=0.1)
    net = Sparse()
    t = trainer(technique, max_steps=12)
    t.fit(net, loader("classifier"))
    assert not t.optimizers[0]._optimizer_step_post_hooks
    saved = technique.saved()
    assert technique.saved_weights(saved).keys() == dict(net.named_parameters()).keys()
    again = TrainableWeightAveraging(window=3, start=0.0, until=0.5, lr=0.1)
    again.restore(saved)
    assert (again._due, again._over) == (3, True) and len(again._c) == 3
    for name in ("_c", "_velocity"):
        assert torch.equal(getattr(again, name), getattr(technique, name)) and getattr(again, name).all()


def _plain(h: Tensor, minimum: Tensor, steps: int) -> np.ndarray:
    """The weights after so many steps of the module's own gradient descent from zero."""
    w = torch.zeros_like(minimum)
    for _ in range(steps):
        w = w - 0.5 / float(torch.linalg.matrix_norm(h, 2)) * h @ (w - minimum)
    return w.numpy()


@pytest.mark.parametrize("mode", [*sorted(MODES), "momentum"])
@pytest.mark.parametrize("model", ["tiny_gpt", "classifier"])
def test_the_weights_stay_in_the_span_whatever_the_optimizer(model: str, mode: str) -> None:
    """AdamW with decay, and SGD with momentum: their own steps would leave it."""
    path, plain = Path_(), Path_()
    technique = TrainableWeightAveraging(
        window=3, start=0.0, until=0.5, lr=0.05, momentum=0.9 * (mode == "momentum"), bn_batches=2
    )
    settings = MODES.get(mode, {})
    fit(model, lambda: [technique], callbacks=[path], **settings)
    fit(model, list, callbacks=[plain], **settings)
    taken = [3, 5, 7]  # u is 2/12, 4/12, 6/12 as these steps begin
    at = 2 if "accumulate_grad_batches" in settings and settings["accumulate_grad_batches"] == 2 else 1
    ends = _ends(path, at)
    before = _ends(plain, at)
    for i in range(6):
        np.testing.assert_array_equal(ends[i], before[i], err_msg="plain training up to until")
    w = np.stack([before[step - 1] for step in taken])
    np.testing.assert_allclose(ends[6], w.mean(axis=0), rtol=1e-6, atol=1e-7)
    p = gram_schmidt(w)
    for weights in ends[6:]:
        np.testing.assert_allclose(p.T @ (p @ weights), weights, rtol=1e-4, atol=2e-6)
    assert len({weights.tobytes() for weights in ends[6:]}) == 6, "they move"
    assert np.abs(ends[-1] - ends[6]).max() > 1e-5


def _ends(path: Path_, at: int) -> list[np.ndarray]:
    """The weights after each of the 12 optimizer steps; with windows of 2 the last batch of 5 is one of its own."""
    if at == 1:
        return path.weights
    return [weights for i, weights in enumerate(path.weights) if i % 5 in (1, 3, 4)][:12]


def test_clipping_and_accumulation_are_those_of_the_gradient() -> None:
    """A first step from the mean, along the clipped mean of the window's gradients."""
    h, minimum, net = bowl()
    technique = TrainableWeightAveraging(window=2, start=0.0, until=0.5, lr=1.0, momentum=0.0)
    path = Path_()
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}
    trainer(technique, path, max_steps=8, **settings).fit(net, DataLoader(torch.zeros(16, 1)))
    third, mean, sixth = (path.weights[2 * step - 1] for step in (3, 5, 6))
    p = gram_schmidt(np.stack([third, 2 * mean - third]))  # the snapshots are of the steps 3 and 5
    g = h.numpy() @ (mean - minimum.numpy())
    assert np.linalg.norm(g) > 0.1
    clipped = 0.01 * g / np.linalg.norm(g)
    np.testing.assert_allclose(sixth - mean, -(1 - 5 / 8) / (1 - 0.5) * p.T @ (p @ clipped), rtol=1e-4, atol=1e-9)


def test_validation_and_checkpoints_see_the_weights_that_train(tmp_path: Path) -> None:
    watch = Watch()
    fit(
        "classifier",
        lambda: [TrainableWeightAveraging(window=3, start=0.0, until=0.5, lr=0.1, bn_batches=2)],
        callbacks=[watch],
        limit_val_batches=1,
        val_check_interval=1,
        directory=tmp_path,
    )
    for step, (state, _) in watch.validated.items():
        assert differing(state, watch.raw[step]) == []
        saved = torch.load(checkpoints(tmp_path)[step - 1], weights_only=True)
        assert differing(saved["state_dict"], watch.raw[step]) == []


def test_batch_norm_statistics_are_those_of_the_mean() -> None:
    """As torch's ``update_bn`` finds them, over an epoch."""
    from torch.optim.swa_utils import update_bn

    technique = TrainableWeightAveraging(window=3, start=0.0, until=0.5, lr=0.1, bn_batches=None)
    watch = Watch()
    pl.seed_everything(1, verbose=False)
    net = module("classifier")
    data = loader("classifier", shuffle=False)
    trainer(technique, watch, max_steps=12).fit(net, data)
    reference: Any = module("classifier")
    reference.load_state_dict(watch.raw[7])
    reference.head[0].eval()
    update_bn([x for x, _ in data], reference)
    for name, value in reference.norm.named_buffers():
        torch.testing.assert_close(watch.raw[7][f"norm.{name}"], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [4, 7])
def test_weights_that_thaw_later_are_left_to_the_optimizer(step: int) -> None:
    """After the last snapshot, or after the first."""

    class Thaws(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            pl_module.head.requires_grad_(trainer.global_step >= step)

    net, watch = TinyClassifier(batch_norm=False), Watch()
    technique = TrainableWeightAveraging(window=3, start=0.0, until=0.5, lr=0.1)
    trainer(Thaws(), technique, watch, max_steps=12).fit(net, loader("classifier"))
    assert not any(name.startswith("head") for name in technique._basis)
    assert differing(watch.raw[12], {k: watch.raw[8][k] for k in ("head.1.weight", "head.1.bias")}) != []


def test_a_network_that_changes_is_averaged_from_then_on_or_not_at_all() -> None:
    build = [
        ProgressiveStacking(stages=[(0.0, 2), (0.3, 4)]),
        TrainableWeightAveraging(window=4, start=0.0, until=0.8, lr=0.1),
    ]
    trainer(*build, max_steps=20).fit(module("tiny_gpt"), loader("tiny_gpt"))
    assert build[1].report()["coefficients"] == 3, "the first snapshot was of fewer blocks"
    late = [
        ProgressiveStacking(stages=[(0.0, 2), (0.8, 4)]),
        TrainableWeightAveraging(window=4, start=0.0, until=0.6, lr=0.1),
    ]
    with pytest.warns(UserWarning, match=r"another technique changed the network after until=0.6.*plain training"):
        trainer(*late, max_steps=20).fit(module("tiny_gpt"), loader("tiny_gpt"))
    assert late[1].report()["coefficients"] == 0
    assert "no coefficient was trained" in late[1].summary()


def test_too_few_snapshots_are_told_of() -> None:
    technique, watch, plain = TrainableWeightAveraging(window=8, start=0.9, until=0.91), Watch(), Watch()
    with pytest.warns(
        UserWarning,
        match=r"only 1 snapshot\(s\) with \d+ trained parameters were taken before until=0.91, so .* plain training",
    ):
        net, _ = fit("tiny_gpt", lambda: [technique], callbacks=[watch])
    fit("tiny_gpt", list, callbacks=[plain])
    assert differing(state_of(net), plain.raw[12]) == []


def test_a_network_whose_weights_are_no_parameters_trains_plainly_and_is_told_so() -> None:
    class Bare(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.ones(3, requires_grad=True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self.w * batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.w], 0.1)

    net, technique = Bare(), TrainableWeightAveraging(window=2, start=0.0, until=0.5)
    with pytest.warns(UserWarning, match=r"only 2 snapshot\(s\) with 0 trained parameters"):
        trainer(technique, max_steps=6).fit(net, DataLoader(torch.ones(6, 3)))  # type: ignore[arg-type]
    assert (net.w < 0.8).all() and technique.report()["coefficients"] == 0


def test_the_last_moment_is_plain_training_and_takes_no_snapshot() -> None:
    technique = TrainableWeightAveraging(window=2, start=0.0, until=1.0)
    trainer(technique, max_steps=4).fit(TinyClassifier(), loader("classifier"))
    assert technique.report()["snapshots"] == 0


def test_offloading_changes_no_weight_by_more_than_rounding() -> None:
    ends = []
    for offload in (False, True):
        net, _ = fit(
            "tiny_gpt", lambda o=offload: [TrainableWeightAveraging(window=3, start=0.0, until=0.5, lr=0.1, offload=o)]
        )
        ends.append(flat(net))
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"window": 1}, r"window=1\): expected an integer >= 2"),
        ({"start": 0.9, "until": 0.5}, r"start=0.9, until=0.5\): start must be below until"),
        ({"lr": 0.0}, r"lr=0.0\): expected a finite number > 0"),
        ({"momentum": 1.0}, r"momentum=1.0\): expected a number in \[0, 1\)"),
        ({"bn_batches": 0}, r"bn_batches=0\): expected an integer >= 1, or None: the number of training batches"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"TrainableWeightAveraging\({message}"):
        TrainableWeightAveraging(**kwargs)


def test_it_needs_an_end_and_automatic_optimization_and_no_other_average() -> None:
    with pytest.raises(ValueError, match=r"TrainableWeightAveraging: the Trainer has no end"):
        fit("tiny_gpt", lambda: [TrainableWeightAveraging()], max_steps=-1, max_epochs=-1)
    with pytest.raises(ValueError, match=r"and EMAWeightAveraging cannot train together"):
        fit("tiny_gpt", lambda: [TrainableWeightAveraging()], callbacks=[EMAWeightAveraging()])
    net = TinyClassifier()
    net.automatic_optimization = False
    with pytest.raises(ValueError, match=r"TrainableWeightAveraging.* has automatic_optimization=False; expected True"):
        trainer(TrainableWeightAveraging(), max_steps=4).fit(net, loader("classifier"))


def test_resumes_within_accumulation_windows_of_coefficients(tmp_path: Path) -> None:
    """The Case trains coefficients at the run's end, when blocks have grown; here they train for half of the run."""
    found = resume_from_batches(
        "tiny_gpt",
        lambda: [TrainableWeightAveraging(window=3, start=0.0, until=0.5, lr=0.1, bn_batches=2)],
        tmp_path,
        (2, 9, 11),
    )
    assert found == {}


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"window": 2, "start": 0.0, "until": 0.5, "lr": 0.1, "bn_batches": 1}
    fit_yaml(tmp_path, "TrainableWeightAveraging", settings, max_steps=6)
    assert "trained 2 coefficients of 2 snapshots" in capsys.readouterr().out
