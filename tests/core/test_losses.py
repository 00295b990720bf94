"""Losses taken apart by sample: every loss function against one call for each sample, sums, bounds and weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff._core import losses
from lightning_eff._core.losses import (
    CutAtLosses,
    LossNotVisible,
    ObserveLosses,
    WeighLosses,
    check_visible,
    contributions,
    gradient_bounds,
    loss_of,
    mean_by_sample,
)

B, T, C = 6, 4, 5
g = torch.Generator().manual_seed(0)
CLASS_WEIGHTS = torch.rand(C, generator=g) + 0.1


def _labels(*shape: int) -> Tensor:
    return torch.randint(0, C, shape, generator=torch.Generator().manual_seed(1))


def _ragged(ignore: int) -> Tensor:
    """Labels of ``B`` sequences: sample ``i`` has ``i`` ignored tokens at its end, at most ``T``."""
    y = _labels(B, T)
    for i in range(B):
        y[i, T - min(i, T) :] = ignore
    return y


@dataclass
class Case:
    """One way to call a loss function.

    ``z`` and ``y`` begin with the samples' dimension, or with samples times ``rows``; ``w`` is a weight for each entry.
    The reference knows neither rows nor means: it calls ``call`` with reduction="sum" on each sample by itself.
    """

    call: Callable[[Tensor, Tensor, Any, str], Tensor]
    z: Tensor
    y: Tensor
    w: Any = None
    rows: int = 1
    counts: Callable[[Tensor, Any], float] = lambda y, w: float(y.numel())

    def sample(self, i: int, z: Tensor | None = None) -> tuple[Tensor, Tensor, Any]:
        part = slice(i * self.rows, (i + 1) * self.rows)
        z = self.z if z is None else z
        return z[part], self.y[part], None if self.w is None else self.w[part]


def _z(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def _p(*shape: int) -> Tensor:
    return _z(*shape).sigmoid()


def _valid(ignore: int) -> Callable[[Tensor, Any], float]:
    return lambda y, w: float((y != ignore).sum())


def _weighted(ignore: int) -> Callable[[Tensor, Any], float]:
    return lambda y, w: sum(float(CLASS_WEIGHTS[k]) for k in y.flatten().tolist() if k != ignore)


CASES = {
    "classes": Case(lambda z, y, w, r: F.cross_entropy(z, y, reduction=r), _z(B, C), _labels(B)),
    "module": Case(lambda z, y, w, r: nn.CrossEntropyLoss(reduction=r)(z, y), _z(B, C), _labels(B)),
    "tokens": Case(
        lambda z, y, w, r: F.cross_entropy(z, y, reduction=r),
        _z(B * T, C),
        _ragged(-100).flatten(),
        rows=T,
        counts=_valid(-100),
    ),
    "channels_second": Case(
        lambda z, y, w, r: F.cross_entropy(z, y, reduction=r, ignore_index=3),
        _z(B, C, T),
        _ragged(3),
        counts=_valid(3),
    ),
    "images": Case(lambda z, y, w, r: F.cross_entropy(z, y, reduction=r), _z(B, C, T, 3), _labels(B, T, 3)),
    "class_weights": Case(
        lambda z, y, w, r: F.cross_entropy(z, y, CLASS_WEIGHTS, ignore_index=255, reduction=r),
        _z(B * T, C),
        _ragged(255).flatten(),
        rows=T,
        counts=_weighted(255),
    ),
    "smoothing": Case(
        lambda z, y, w, r: F.cross_entropy(z, y, CLASS_WEIGHTS, label_smoothing=0.2, reduction=r),
        _z(B * T, C),
        _ragged(-100).flatten(),
        rows=T,
        counts=_weighted(-100),
    ),
    "soft_targets": Case(
        lambda z, y, w, r: F.cross_entropy(z, y, CLASS_WEIGHTS, label_smoothing=0.1, reduction=r),
        _z(B, C),
        _z(B, C).flip(0).softmax(1),
        counts=lambda y, w: float(len(y)),
    ),
    "nll": Case(
        lambda z, y, w, r: F.nll_loss(z.log_softmax(1), y, CLASS_WEIGHTS, reduction=r),
        _z(B, C),
        _labels(B),
        counts=_weighted(-100),
    ),
    "bce": Case(lambda z, y, w, r: F.binary_cross_entropy(z, y, w, reduction=r), _p(B, T), _p(B, T).flip(0), _p(B, T)),
    "bce_logits": Case(
        lambda z, y, w, r: F.binary_cross_entropy_with_logits(z, y, w, reduction=r, pos_weight=torch.full((T,), 2.0)),
        _z(B, T),
        _p(B, T).flip(0),
        _p(B, T),
    ),
    "mse": Case(lambda z, y, w, r: F.mse_loss(z, y, reduction=r), _z(B, T), _p(B, T)),
    "mse_of_scalars": Case(lambda z, y, w, r: F.mse_loss(z, y, reduction=r), _z(B), _p(B)),
    "mse_weight": Case(
        lambda z, y, w, r: F.mse_loss(z, y, reduction=r, weight=w),
        _z(B, T),
        _p(B, T),
        _p(B, T),
        counts=lambda y, w: float(w.sum()),
    ),
    "l1": Case(lambda z, y, w, r: F.l1_loss(z, y, reduction=r), _z(B, T), _p(B, T)),
    "l1_weight": Case(
        lambda z, y, w, r: F.l1_loss(z, y, reduction=r, weight=w),
        _z(B, T),
        _p(B, T),
        _p(B, T),
        counts=lambda y, w: float(w.sum()),
    ),
    "smooth_l1": Case(lambda z, y, w, r: F.smooth_l1_loss(z, y, reduction=r, beta=0.3), _z(B, T), _p(B, T)),
    "huber_weight": Case(
        lambda z, y, w, r: F.huber_loss(z, y, reduction=r, delta=0.7, weight=w), _z(B, T), _p(B, T), _p(B, T)
    ),
}
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def _by_hand(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """``s_i``, the counts and ``||d s_i / d z_i||`` of each sample, from one call for each."""
    sums, counts, norms = [], [], []
    for i in range(B):
        z, y, w = case.sample(i)
        z = z.clone().requires_grad_()
        s = case.call(z, y, w, "sum")
        (gradient,) = torch.autograd.grad(s, z)
        sums.append(s.item())
        counts.append(case.counts(y, w))
        norms.append(gradient.square().sum().sqrt().item())
    return torch.tensor(sums), torch.tensor(counts), torch.tensor(norms)


@every
@pytest.mark.parametrize("chunk", [2**24, 1, B * T * C // 2])
def test_taken_apart_as_one_call_for_each_sample(case: Case, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_CHUNK", chunk)
    sums, counts, norms = _by_hand(case)
    plain = case.call(case.z, case.y, case.w, "mean")
    observed = ObserveLosses(B, bounds=True)
    with observed:
        loss = case.call(case.z, case.y, case.w, "mean")
    assert torch.equal(loss, plain), "the observer changed the loss"
    (call,) = observed.calls
    torch.testing.assert_close(call.sums, sums)
    torch.testing.assert_close(call.counts, counts)
    assert call.total.item() == pytest.approx(counts.sum().item())
    # L = (1/B) sum_i l_i
    torch.testing.assert_close(contributions(observed.calls).mean(), plain)
    torch.testing.assert_close(contributions(observed.calls), sums * B / counts.sum())
    means = torch.where(counts > 0, sums / counts.clamp_min(1e-30), 0)
    torch.testing.assert_close(mean_by_sample(observed.calls), means)
    if case is not CASES["nll"]:  # its input is the log-probabilities, not z
        torch.testing.assert_close(call.bounds, norms)
        torch.testing.assert_close(gradient_bounds(observed.calls), norms * B / counts.sum())
    check_visible(observed, plain)


@every
def test_weighted_mean_and_its_gradient(case: Case) -> None:
    sums, counts, _ = _by_hand(case)
    index = torch.tensor([4, 1, 1])
    w = torch.tensor([0.3, 2.0, 0.7])
    rows = (index[:, None] * case.rows + torch.arange(case.rows)).flatten()
    z = case.z[rows].clone().requires_grad_()
    with WeighLosses(w, size=B, totals=[counts.sum()]):
        loss = case.call(z, case.y[rows], None if case.w is None else case.w[rows], "mean")
    expected = (w * sums[index]).sum() * B / (3 * counts.sum())
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, z)
    by_hand = []
    for j, i in enumerate(index.tolist()):
        z_i, y, entry = case.sample(i)
        z_i = z_i.clone().requires_grad_()
        (of_one,) = torch.autograd.grad(case.call(z_i, y, entry, "sum"), z_i)
        by_hand.append(w[j] * of_one * B / (3 * counts.sum()))
    torch.testing.assert_close(gradient, torch.cat(by_hand).reshape(gradient.shape))


@every
def test_other_reductions_pass_through(case: Case) -> None:
    for mode in (ObserveLosses(B, bounds=True), WeighLosses(torch.ones(B), size=B, totals=[])):
        for reduction in ("sum", "none"):
            plain = case.call(case.z, case.y, case.w, reduction)
            with mode:
                assert torch.equal(case.call(case.z, case.y, case.w, reduction), plain)
    assert not mode.num_calls


def test_legacy_reduction_arguments_pass_through() -> None:
    z, y = _z(B, C), _labels(B)
    observed = ObserveLosses(B)
    with pytest.warns(UserWarning, match="size_average and reduce"):
        with observed:
            loss = F.cross_entropy(z, y, size_average=False)
    assert torch.isclose(loss, F.cross_entropy(z, y, reduction="sum"))
    assert not observed.calls


def test_softmax_minus_onehot_is_the_bound() -> None:
    z, y = _z(B, C), _labels(B)
    observed = ObserveLosses(B, bounds=True)
    with observed:
        F.cross_entropy(z, y)
    torch.testing.assert_close(gradient_bounds(observed.calls), (z.softmax(1) - torch.eye(C)[y]).norm(dim=1))


def test_the_network_s_gradients_do_not_feel_the_observer() -> None:
    x = _z(B, 3)
    net = nn.Linear(3, C)

    def gradients(mode: Any) -> list[Tensor]:
        net.zero_grad()
        if mode is None:
            F.cross_entropy(net(x), _labels(B)).backward()
        else:
            with mode:
                F.cross_entropy(net(x), _labels(B)).backward()
        return [p.grad.clone() for p in net.parameters()]

    before = torch.get_rng_state()
    for a, b in zip(gradients(None), gradients(ObserveLosses(B, bounds=True)), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), before)


def test_several_calls_add_up() -> None:
    z, y, w = _z(B * T, C), _ragged(-100).flatten(), _z(B)
    observed = ObserveLosses(B, bounds=True)
    with observed:
        loss = F.cross_entropy(z, y) + F.mse_loss(w, torch.zeros(B))
    check_visible(observed, loss)
    tokens = Case(CASES["tokens"].call, z, y, rows=T, counts=_valid(-100))
    sums, counts, norms = _by_hand(tokens)
    torch.testing.assert_close(contributions(observed.calls), sums * B / counts.sum() + w.square())
    expected = ((norms * B / counts.sum()).square() + (2 * w).square()).sqrt()
    torch.testing.assert_close(gradient_bounds(observed.calls), expected)
    index, weights = torch.tensor([2, 0]), torch.tensor([1.5, 0.5])
    rows = (index[:, None] * T + torch.arange(T)).flatten()
    with WeighLosses(weights, size=B, totals=[call.total for call in observed.calls]):
        weighted = F.cross_entropy(z[rows], y[rows]) + F.mse_loss(w[index], torch.zeros(2))
    torch.testing.assert_close(weighted, (weights * contributions(observed.calls)[index]).mean())


def test_only_the_first_pass_is_observed() -> None:
    observed = ObserveLosses(B)
    for z in (_z(B, C), _z(B, C) + 1):
        with observed:
            F.mse_loss(z, torch.zeros(B, C))
    (call,) = observed.calls
    torch.testing.assert_close(call.sums, _z(B, C).square().sum(1))


def test_half_precision_logits_are_summed_in_float() -> None:
    z, y = _z(B, C).bfloat16(), _labels(B)
    observed = ObserveLosses(B, bounds=True)
    with observed:
        loss = F.cross_entropy(z, y) + F.cross_entropy(2 * z, y)
    assert loss.dtype == torch.bfloat16
    check_visible(observed, loss)  # a sum rounded in bfloat16
    assert contributions(observed.calls).dtype == gradient_bounds(observed.calls).dtype == torch.float32
    with WeighLosses(torch.ones(B), size=B, totals=[torch.tensor(float(B))]):
        assert F.cross_entropy(z, y).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: 2 * F.cross_entropy(_z(B, C), _labels(B)), "loss of .* but the 1 mean-reduced loss call.* sum to"),
        (lambda: F.cross_entropy(_z(B, C), _labels(B)) + 0.1, "loss of .* but the 1 mean-reduced loss call.* sum to"),
        (lambda: F.cross_entropy(_z(B, C), _labels(B), reduction="none").mean(), "none of .*cross_entropy.*'mean'"),
        (lambda: torch.logsumexp(_z(B, C), 1).mean(), "none of .*cross_entropy.*'mean'"),
        (
            lambda: F.mse_loss(_z(B + 1), _p(B + 1)),
            r"F.mse_loss got \(7,\) loss values, which do not split .* 6 samples",
        ),
        (lambda: F.mse_loss(_z(()), _p(())), r"F.mse_loss got \(1,\) loss values"),
    ],
)
def test_what_is_not_visible(run: Callable[[], Tensor], message: str) -> None:
    observed = ObserveLosses(B)
    with observed:
        loss = run()
    with pytest.raises(LossNotVisible, match=message):
        check_visible(observed, loss)


def test_nan_is_visible() -> None:
    z = _z(B, C)
    z[2] = float("nan")
    observed = ObserveLosses(B, bounds=True)
    with observed:
        loss = F.cross_entropy(z, _labels(B))
    check_visible(observed, loss)
    assert contributions(observed.calls).isnan().tolist() == [i == 2 for i in range(B)]


def test_other_numbers_of_calls_than_weighed_are_refused() -> None:
    z, y = _z(B, C), _labels(B)
    for calls, totals in ((1, 2), (2, 1), (0, 1)):
        mode = WeighLosses(torch.ones(B), size=B, totals=[torch.tensor(6.0)] * totals)
        with pytest.raises(LossNotVisible, match=f"made {calls} mean-reduced .* chosen samples, but {totals} on all 6"):
            with mode:
                for _ in range(calls):
                    F.cross_entropy(z, y)
    again = WeighLosses(torch.ones(B), size=B, totals=[torch.tensor(6.0)])
    for _ in range(2):  # each pass counts by itself
        with again:
            F.cross_entropy(z, y)
    with pytest.raises(RuntimeError, match="the user's own"):
        with again:
            raise RuntimeError("the user's own")


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_bounds_of_told_losses(reduction: str) -> None:
    """The gradient of any per-sample losses at the logits, by autograd in the whole graph."""
    net, x, y = nn.Linear(3, T * C), _z(B, 3), _labels(B, T)

    def told(z: Tensor) -> Tensor:
        if reduction == "none":
            return F.cross_entropy(z, y.flatten(), reduction="none").reshape(B, T).square().mean(1)
        by_sample = z.reshape(B, T, C)
        return torch.stack([F.cross_entropy(by_sample[i], y[i], reduction=reduction) for i in range(B)])

    z = net(x).reshape(B * T, C)
    expected = []
    for i in range(B):
        (gradient,) = torch.autograd.grad(told(z)[i], z, retain_graph=True)
        expected.append(gradient.norm())
    cut = CutAtLosses()
    with torch.no_grad():
        with cut:
            found = told(net(x).reshape(B * T, C))
    assert torch.is_grad_enabled()
    if reduction == "none":
        torch.testing.assert_close(cut.bounds(found), torch.stack(expected))
    else:  # one call for each sample: an input of one sample lies not sample by sample
        with pytest.raises(LossNotVisible, match=r"do not split evenly over the 6 samples"):
            cut.bounds(found)


def test_bounds_of_told_losses_need_a_loss_call() -> None:
    cut = CutAtLosses()
    with torch.no_grad(), cut:
        losses = torch.logsumexp(_z(B, C), 1)
    with pytest.raises(LossNotVisible, match=r"sample_loss called none of .*Use score='loss'"):
        cut.bounds(losses)


def test_loss_of() -> None:
    loss = torch.tensor(1.0)
    assert loss_of(loss) is loss
    assert loss_of({"loss": loss, "n": 2}) is loss
    assert loss_of(None) is None
    assert loss_of({"n": 2}) is None
