"""K-FAC: exact on linear regression, its factors those of per-sample gradients, and the traps of hooks, windows and ranks."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from transformers.pytorch_utils import Conv1D

from lightning_eff import KFAC, SharpnessAwareMinimization, cli
from lightning_eff.optim.preconditioning import _sampled_labels
from lightning_eff.optim.preconditioning._maps import maps_of
from lightning_eff.optim.preconditioning._taps import Taps, last_reached
from tests.cases import Case, no_map
from tests.models import flat, hugging_face, loader, trainer

CASES = {
    "KFAC": Case(
        active=lambda: KFAC(every=2, inverse_every=4),
        neutral=lambda: KFAC(every=0),
        lost=(no_map, "classifier", "no optimizer of Scaled has the weight of an nn.Linear"),
    )
}


def data(*tensors: Tensor, batch_size: int | None = None) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size or len(tensors[0]))


class Net(pl.LightningModule):
    """Any network on (x, y), with SGD and any loss."""

    def __init__(self, net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy, lr: float = 1.0):
        super().__init__()
        self.net, self.loss, self.lr = net, loss, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


def run(net: pl.LightningModule, loader: DataLoader[Any], technique: KFAC | None = None, **kwargs: Any) -> pl.Trainer:
    t = trainer(technique or KFAC(), **{"max_steps": 1, "max_epochs": -1, **kwargs})
    t.fit(net, loader)
    return t


def factors(technique: KFAC) -> dict[str, tuple[Tensor, Tensor]]:
    """``A`` and ``S`` of each map, without the dimension of groups."""
    found = technique.state_dict()["factors"]
    return {name: ((f["A"] / f["rows"].view(-1, 1, 1))[0], f["S"][0]) for name, f in found.items()}


def same(a: dict[str, tuple[Tensor, Tensor]], b: dict[str, tuple[Tensor, Tensor]]) -> None:
    assert a.keys() == b.keys() and a
    for name, pair in a.items():
        torch.testing.assert_close(pair, b[name], rtol=1e-4, atol=1e-7)


def mlp(*sizes: int, act: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [[nn.Linear(n, m), act()] for n, m in itertools.pairwise(sizes)]
    return nn.Sequential(*[layer for pair in layers for layer in pair][:-1])


def classes(size: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(size, 5, generator=g), torch.randint(0, 3, (size,), generator=g)


# -- T: one undamped step solves linear regression


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "by_hand"])
@pytest.mark.parametrize("layer", ["linear", "conv1d_of_transformers", "convolution"])
def test_one_undamped_step_solves_linear_regression(outputs: int, reduction: str, layer: str) -> None:
    """Whatever the loss is multiplied by, however the features are scaled: the least squares' own solution."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, generator=g) * torch.arange(1, 7) + 1
    y = torch.randn(40, outputs, generator=g)
    solution = torch.linalg.lstsq(F.pad(x, (0, 1), value=1.0).double(), y.double()).solution

    def by_hand(f: Tensor, y: Tensor) -> Tensor:
        return 7 * F.mse_loss(f, y, reduction="none").sum(-1).mean()

    loss: Any = by_hand if reduction == "by_hand" else functools.partial(F.mse_loss, reduction=reduction)
    if layer == "convolution":
        own: nn.Module = nn.Conv2d(2, outputs, (1, 3))
        net = Net(nn.Sequential(nn.Unflatten(1, (2, 1, 3)), own, nn.Flatten()), loss)
    else:
        own = nn.Linear(6, outputs) if layer == "linear" else Conv1D(outputs, 6)
        net = Net(own, loss)
    run(net, data(x, y), KFAC(damping=0.0, kl_clip=None))
    weight = own.weight.detach().flatten(1) if layer != "conv1d_of_transformers" else own.weight.detach().T
    found = torch.cat([weight, own.bias.detach().unsqueeze(1)], dim=1).double()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    torch.testing.assert_close(found.T, solution, rtol=1e-4, atol=1e-5)


# -- factors against per-sample gradients


def test_empirical_factors_are_those_of_per_sample_gradients() -> None:
    """``S = (1/N) sum g g^T`` and ``A = (1/N) sum a a^T``, with g and a out of torch.func's gradients of each sample."""
    x, y = classes()
    net, technique = Net(mlp(5, 4, 3), lr=0.0), KFAC(fisher="empirical")
    run(net, data(x, y), technique)
    params = {name: p.detach() for name, p in net.net.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(net.net, params, (x,)), y)

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, x, y)
    for name in ("0", "2"):
        g, G = each[f"{name}.bias"], each[f"{name}.weight"]
        a = torch.einsum("nm,nmk->nk", g, G) / g.square().sum(1, keepdim=True)
        a = F.pad(a, (0, 1), value=1.0)
        A, S = factors(technique)[f"net.{name}.weight"]
        torch.testing.assert_close(S, g.T @ g / 12, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(A, a.T @ a / 12, rtol=1e-4, atol=1e-5)


def test_factors_of_drawn_labels_are_in_the_mean_those_of_the_gauss_newton_matrix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exactly, over all labels of one sample by their probabilities, against Jacobians by torch.func."""
    x, y = classes(1)
    net = Net(mlp(5, 4, 3), lr=0.0)
    p = net.net(x).softmax(1).detach()[0]
    mean = {name: torch.zeros(m, m) for name, m in (("0", 4), ("2", 3))}
    for label in range(3):
        monkeypatch.setattr(_sampled_labels, "draw_classes", lambda p, g, label=label: torch.full(p.shape[:-1], label))
        technique = KFAC()
        run(net, data(x, y), technique)
        for name, S in mean.items():
            S += p[label] * factors(technique)[f"net.{name}.weight"][1]
    H = torch.diag(p) - torch.outer(p, p)
    params = {name: q.detach() for name, q in net.net.named_parameters()}
    J = torch.func.jacrev(lambda params: torch.func.functional_call(net.net, params, (x,))[0])(params)
    for name, S in mean.items():
        of_bias = J[f"{name}.bias"]
        torch.testing.assert_close(S, of_bias.T @ H @ of_bias, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("fisher", ["model", "empirical"])
def test_the_step_is_the_same_whatever_reduces_the_loss(fisher: Any) -> None:
    x, y = classes()
    reductions: list[Callable[[Tensor, Tensor], Tensor]] = [
        F.cross_entropy,
        functools.partial(F.cross_entropy, reduction="sum"),
        lambda z, y: 100 * F.cross_entropy(z, y, reduction="none").mean(),
        lambda z, y: F.nll_loss(z.log_softmax(1), y) / 3,
    ]
    ends = []
    for loss in reductions:
        net = Net(mlp(5, 4, 3), loss, lr=0.1)
        run(net, data(x, y), KFAC(fisher=fisher, every=1, inverse_every=1), max_steps=3)
        ends.append(flat(net))
    assert float((ends[0] - flat(mlp(5, 4, 3))).norm()) > 0.01
    for end in ends[1:3] if fisher == "model" else ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-4, atol=1e-5)


# -- rows: shared weights, sequences, padding, windows


class Twice(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.map, self.head, self.times = nn.Linear(5, 5), nn.Linear(5, 3), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.map(x).tanh()
        return self.head(x)


def test_a_map_that_is_called_twice_has_the_rows_of_both_calls() -> None:
    """As has a weight that two modules share."""
    x, y = classes()
    found = []
    for net in (Twice(2), nn.Sequential(*(tied := mlp(5, 5, 5, 3)))):
        if not isinstance(net, Twice):
            tied[2].weight, tied[2].bias = tied[0].weight, tied[0].bias
            tied.load_state_dict({**tied.state_dict(), **{f"4.{k}": v for k, v in Twice(2).head.state_dict().items()}})
        technique = KFAC(fisher="empirical")
        run(Net(net, lr=0.0), data(x, y), technique)
        found.append(list(factors(technique).values()))
        rows = [f["rows"].item() for f in technique.state_dict()["factors"].values()]
        assert rows == [24.0, 12.0]
    torch.testing.assert_close(*found)


def test_a_shared_weight_with_biases_of_its_own_has_none() -> None:
    tied = mlp(5, 5, 5, 3)
    tied[2].weight = tied[0].weight
    technique = KFAC()
    run(Net(tied, lr=0.1), data(*classes()), technique)
    assert [A.shape[0] for A, _ in factors(technique).values()] == [5, 6]


@pytest.mark.parametrize("fisher", ["model", "empirical"])
def test_padding_has_no_part_in_the_factors(fisher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignored tokens, and whole samples of them, are as if they were not there."""
    monkeypatch.setattr(_sampled_labels, "draw_classes", lambda p, g: p.argmin(-1))
    x, y = classes(12)
    found = []
    for padded in (False, True):
        xs, ys = x.view(3, 4, 5), y.view(3, 4)
        if padded:
            xs = torch.cat([torch.cat([xs, torch.randn(3, 2, 5)], dim=1), torch.randn(1, 6, 5)])
            ys = F.pad(ys, (0, 2, 0, 1), value=-100)
        technique = KFAC(fisher=fisher)
        net = Net(mlp(5, 4, 3), lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()), lr=0.0)
        run(net, data(xs, ys), technique)
        found.append(factors(technique))
    same(*found)


def test_a_window_is_one_batch() -> None:
    x, y = classes(24)
    found, ends = [], []
    for window in (1, 3):
        technique, net = KFAC(fisher="empirical"), Net(mlp(5, 4, 3), lr=0.1)
        loader = data(x, y, batch_size=24 // window)
        run(net, loader, technique, accumulate_grad_batches=window, gradient_clip_val=0.05)
        found.append(factors(technique))
        ends.append(flat(net))
        step = float((flat(net) - flat(mlp(5, 4, 3))).norm())
        assert step == pytest.approx(0.1 * 0.05, rel=1e-3), "clipped is what was preconditioned"
    same(*found)
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)


# -- graphs of other kinds


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks, self.reentrant = mlp(5, 5, 5, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        inner = self.blocks[1:4]
        x = inner(x) if self.reentrant is None else checkpoint(inner, x, use_reentrant=self.reentrant)
        return self.blocks[4](x.tanh())


@pytest.mark.parametrize(("fisher", "reentrant"), [("model", False), ("empirical", False), ("empirical", True)])
def test_what_is_run_again_counts_once(fisher: Any, reentrant: bool) -> None:
    found = []
    for kind in (None, reentrant):
        technique, net = KFAC(fisher=fisher, every=1), Net(Checkpointed(kind), lr=0.1)
        run(net, data(*classes()), technique, max_steps=2)
        assert [f["rows"].item() for f in technique.state_dict()["factors"].values()] == [12.0] * 3
        found.append(factors(technique))
    same(*found)


def test_checkpoints_of_the_old_kind_need_the_empirical_matrix() -> None:
    with pytest.raises(ValueError, match=r"KFAC: .*use_reentrant=True.* Set use_reentrant=False.*fisher='empirical'"):
        run(Net(Checkpointed(True)), data(*classes()))


def test_checkpoints_of_the_old_kind_that_modules_tell_of_are_refused_at_setup() -> None:
    net = hugging_face("gpt2", num_layers=1)
    checkpointing: Any = net.model
    checkpointing.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    steps: list[int] = []
    net.training_step = lambda batch, batch_idx: steps.append(batch_idx)  # type: ignore[method-assign]
    wrapped = Net(checkpoint_wrapper(mlp(5, 4, 3), CheckpointImpl.REENTRANT))
    for one, batches in ((net, loader("gpt2")), (wrapped, data(*classes()))):
        with pytest.raises(ValueError, match=r"KFAC: .*use_reentrant=True.*fisher='empirical'"):
            trainer(KFAC(), max_steps=1).fit(one, batches)
    assert steps == []
    net = hugging_face("gpt2", num_layers=1)
    checkpointing = net.model
    checkpointing.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    trainer(KFAC(every=1), max_steps=1).fit(net, loader("gpt2"))


@pytest.mark.parametrize("fisher", ["model", "empirical"])
def test_a_compiled_network_has_the_factors_of_a_plain_one(fisher: Any) -> None:
    found = []
    for compiled in (False, True):
        technique, own = KFAC(fisher=fisher, every=2), mlp(5, 4, 3)
        net = Net(torch.compile(own, backend="eager") if compiled else own, lr=0.1)  # pyright: ignore[reportArgumentType]
        run(net, data(*classes()), technique, max_steps=4)
        found.append({name.replace("_orig_mod.", ""): pair for name, pair in factors(technique).items()})
    same(*found)


@pytest.mark.parametrize("sizes", [(5, 4, 3), (5, 3)])
def test_outputs_that_are_written_to_and_maps_without_a_bias(sizes: tuple[int, ...]) -> None:
    found = []
    for inplace in (False, True):
        own = mlp(*sizes, act=lambda inplace=inplace: nn.ReLU(inplace))
        own[0].bias = None
        technique = KFAC()
        xs, ys = (t.unsqueeze(0) for t in classes())
        run(Net(own, lambda z, y: F.cross_entropy(z[0], y[0]), lr=0.1), data(xs, ys), technique)
        found.append(factors(technique))
        assert found[0]["net.0.weight"][0].shape == (5, 5)
    same(*found)


def test_in_bf16_inputs_are_those_that_the_map_got() -> None:
    """A residual that is added in place under autocast changes them afterwards."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.map, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).float()
            if torch.is_autocast_enabled("cpu"):
                x += self.map(x)
            else:  # torch refuses it in place
                x = x + self.map(x)
            return self.head(x)

    found = []
    for precision in ("32-true", "bf16-mixed"):
        technique, net = KFAC(fisher="empirical"), Net(Residual(), lr=0.1)
        run(net, data(*classes()), technique, precision=precision)
        found.append(factors(technique)["net.map.weight"])
    torch.testing.assert_close(*found, rtol=0.1, atol=0.02)


def test_a_scaler_is_out_of_the_factors() -> None:
    def plugin() -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1000))

    found = []
    for kwargs in ({}, {"plugins": [plugin()]}):
        technique, net = KFAC(fisher="empirical"), Net(mlp(5, 4, 3), lr=0.1)
        run(net, data(*classes()), technique, **kwargs)
        found.append(factors(technique))
    for name, pair in found[0].items():
        torch.testing.assert_close(pair, found[1][name], rtol=0.05, atol=0.01)


# -- what takes no part


class Experts(nn.Module):
    """Two experts, of which the second sees the samples whose first feature is large; and parameters that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts, self.unused = nn.ModuleList(nn.Linear(5, 3) for _ in range(2)), nn.Linear(5, 3)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.table, self.tied = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.tied.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        far = x[:, 0] > 5
        z = torch.empty(len(x), 3)
        z[~far] = self.experts[0](self.frozen(x[~far]))
        z[far] = self.experts[1](x[far])
        return z + self.tied(x).mean()


def test_an_expert_without_a_token_keeps_its_factors() -> None:
    x, y = classes(24)
    x[:3, 0] = 6.0  # in the first batch alone
    technique, net = KFAC(every=1, inverse_every=1, decay=0.5), Net(Experts(), lr=1e-3)
    run(net, data(x, y, batch_size=12), technique, max_steps=2)
    saved = technique.state_dict()["factors"]
    assert {name: (f["number"], f["rows"].item()) for name, f in saved.items()} == {
        "net.experts.0.weight": (2, 10.5),
        "net.experts.1.weight": (1, 3.0),
    }
    assert technique.report()["maps"] == 2  # a gradient of zeros


def test_a_frozen_bias_is_no_part_of_the_inverse() -> None:
    x, y = torch.randn(30, 4), torch.randn(30, 2)
    own = nn.Linear(4, 2)
    assert own.bias is not None
    own.bias.requires_grad_(False)
    run(Net(own, F.mse_loss), data(x, y), KFAC(damping=0.0, kl_clip=None))
    solution = torch.linalg.lstsq(x, y - own.bias).solution
    torch.testing.assert_close(own.weight.detach().T, solution, rtol=1e-4, atol=1e-5)


def test_a_large_factor_is_its_diagonal() -> None:
    technique = KFAC(max_size=4)
    run(Net(mlp(5, 4, 3), lr=0.1), data(*classes()), technique)
    shapes = {n: (f["A"].shape, f["S"].shape) for n, f in technique.state_dict()["factors"].items()}
    assert shapes == {"net.0.weight": ((1, 6), (1, 4, 4)), "net.2.weight": ((1, 5), (1, 3, 3))}


# -- passes


class Logging(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("fisher", ["model", "empirical"])
def test_drawn_labels_take_a_backward_pass_in_steps_with_statistics_and_nothing_else(fisher: Any) -> None:
    """The forward pass is the step's own; global random numbers are not touched."""
    technique, net = KFAC(fisher=fisher, every=3), Logging(nn.Sequential(mlp(5, 4, 3), nn.Dropout(0.5)), lr=0.1)
    costs: list[tuple[int, int]] = []

    class Cost(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            cost = technique.session.chain.cost
            costs.append((cost.forward_passes, cost.backward_passes))

    torch.manual_seed(5)
    t = trainer(technique, Cost(), max_steps=5, max_epochs=-1)
    t.fit(net, data(*classes()))
    after = torch.get_rng_state()
    assert costs == [(0, n if fisher == "model" else 0) for n in (1, 1, 1, 2, 2)]
    assert net.calls == 5 and technique.report()["statistics"] == 2
    plain = Logging(nn.Sequential(mlp(5, 4, 3), nn.Dropout(0.5)), lr=0.1)
    torch.manual_seed(5)
    trainer(max_steps=5, max_epochs=-1).fit(plain, data(*classes()))
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("fisher", ["model", "empirical"])
def test_of_two_passes_the_one_at_the_weights_counts(fisher: Any) -> None:
    """SharpnessAwareMinimization's second pass is at others."""
    found = []
    for others in ([], [SharpnessAwareMinimization(rho=0.5)]):
        technique = KFAC(fisher=fisher)
        t = trainer(technique, *others, max_steps=1)
        t.fit(Net(mlp(5, 4, 3), lr=0.1), data(*classes()))
        found.append(factors(technique))
    same(*found)


def test_a_loss_of_its_own_is_refused_or_taken_for_a_mean(capsys: pytest.CaptureFixture[str]) -> None:
    def own(z: Tensor, y: Tensor) -> Tensor:
        return (z.logsumexp(1) - z.gather(1, y.unsqueeze(1)).squeeze(1)).mean()

    with pytest.raises(
        ValueError, match=r"KFAC\(fisher='model'\): .* known loss call \(seen: none\)\. Compute it with one of F"
    ):
        run(Net(mlp(5, 4, 3), own), data(*classes()))
    found = []
    for loss in (own, F.cross_entropy):
        technique = KFAC(fisher="empirical")
        run(Net(mlp(5, 4, 3), loss, lr=0.1), data(*classes()), technique)
        found.append(factors(technique))
    same(*found)


def test_a_map_that_no_seen_loss_depends_on_has_no_factors() -> None:
    """The step's own backward pass comes to it, and is not that of drawn labels."""

    class Two(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            h = self.net[0](batch[0])  # pyright: ignore[reportIndexIssue]
            return F.cross_entropy(h[:, :3], batch[1]) + self.net[2](h).square().mean()  # pyright: ignore[reportIndexIssue]

    technique = KFAC()
    run(Two(mlp(5, 4, 3), lr=0.1), data(*classes()), technique)
    assert list(factors(technique)) == ["net.0.weight"]


def test_a_backward_pass_ends_at_the_first_maps() -> None:
    """Gradients of the others are kept no longer than plain training would."""
    first, second, third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    taps = Taps({m: m.weight for m in (first, second, third)}, lambda *args: None)
    x = torch.randn(2, 3)
    h = first(x).tanh()
    z = second(h) + third(h) + third(x)
    taps.close()
    ends = last_reached([z], taps.edges)
    assert len(taps.edges) == 4 and ends == [taps.edges[0], taps.edges[3]]
    taps.remove()


# -- two processes


def test_two_processes(two_processes: dict[str, Any]) -> None:
    """Factors are those of all samples in one process, and gradients are equal on the ranks."""
    found = two_processes["kfac"]
    assert found["alike"]
    x, y = classes(24)
    technique, net = KFAC(fisher="empirical"), Net(mlp(5, 4, 3), lr=0.1)
    run(net, data(x, y), technique)
    for name, pair in factors(technique).items():
        torch.testing.assert_close([t.tolist() for t in pair], found["factors"][name], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(flat(net).tolist(), found["weights"], rtol=1e-4, atol=1e-5)


# -- bad input, and a recipe


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"damping": -1.0}, r"damping=-1.0\): expected a finite number >= 0"),
        ({"damping": float("nan")}, "expected a finite number >= 0"),
        ({"kl_clip": 0.0}, r"kl_clip=0.0\): expected a finite number > 0, or None: the bound kappa"),
        ({"decay": 1.0}, r"decay=1.0\): expected a number in \[0, 1\)"),
        ({"every": -1}, r"every=-1\): expected an integer >= 0"),
        ({"every": 2.5}, "expected an integer >= 0"),
        ({"inverse_every": 0}, "inverse_every=0.*expected an integer >= 1"),
        ({"max_size": True}, "max_size=True"),
        ({"fisher": "true"}, "expected 'model' or 'empirical'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"KFAC\(.*{message}"):
        KFAC(**arguments)


def test_what_has_no_map_is_refused_with_what_is_left_alone() -> None:
    class Tied(Experts):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.unused, self.frozen = nn.ModuleList(), nn.Identity(), nn.Identity()

    with pytest.raises(
        ValueError, match=r"Left alone: net\.table\.weight, for it is tied to an embedding\. Give one to an"
    ):
        run(Net(Tied()), data(*classes()))


def test_layers_with_a_forward_of_their_own_are_left_alone() -> None:
    """The gradient at their output is not that at ``W a``."""

    class Capped(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).tanh()

    net = nn.Sequential(nn.Linear(4, 5), Capped(5, 3))
    found, left = maps_of(net, {id(p) for p in net.parameters()})
    assert [one.name for one in found] == ["0.weight"]
    assert "Capped has a forward of its own" in left["1.weight"]


def test_a_group_without_a_rate_is_refused_unless_nothing_is_clipped() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> Any:
            return closure()

    net = Net(mlp(5, 4, 3))
    net.configure_optimizers = lambda: Own(net.parameters())  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"parameter group 0 has no learning rate 'lr'.*Set kl_clip=None"):
        run(net, data(*classes()))
    run(net, data(*classes()), KFAC(kl_clip=None))


def test_factors_of_another_module_are_refused(tmp_path: Path) -> None:
    t = run(Net(mlp(5, 4, 3)), data(*classes()))
    t.save_checkpoint(tmp_path / "one.ckpt")
    net = Net(nn.Sequential(*mlp(5, 4, 3)))
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), 1.0)  # type: ignore[method-assign]
    net.net = nn.ModuleDict({"other": mlp(5, 4, 3)})
    net.strict_loading = False
    with pytest.raises(
        ValueError, match=r"factors of net\.0\.weight, net\.2\.weight, which .* some of net\.other\.0\.weight"
    ):
        trainer(KFAC(), max_steps=2).fit(net, data(*classes()), ckpt_path=tmp_path / "one.ckpt")


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
trainer:
  max_steps: 5
  accelerator: cpu
  logger: false
  enable_progress_bar: false
  default_root_dir: {tmp_path}
  callbacks:
    - class_path: KFAC
      init_args: {{damping: 0.01, every: 2, fisher: model}}
model: {{class_path: tests.models.TinyClassifier}}
data: {{class_path: tests.cli_data.Classes}}
"""
    )
    cli.main(["fit", "--config", str(path)])
    assert "statistics of 4 layers in 3 steps" in capsys.readouterr().out
