"""Gradient centralisation: the authors' line, what it keeps as it is, and that it does so for outputs along any dimension."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff import GradientCentralization, OptimizerOffload
from lightning_eff.optim.optimizers.gradient_centralization import centralize, output_dims
from tests.cases import Case, no_map
from tests.models import TinyClassifier, flat, hugging_face, loader, module, trainer
from tests.runs import fit, fit_yaml

CASES = {
    "GradientCentralization": Case(
        active=lambda: GradientCentralization(),
        neutral=lambda: GradientCentralization(strength=0.0),
        lost=(no_map, "classifier", "no optimizer of Scaled has the weight of a linear layer or a convolution"),
    )
}

# -- the rule


@pytest.mark.parametrize("shape", [(5, 7), (4, 3, 3, 3), (4, 1, 5), (6, 2, 3, 1, 2)])
def test_it_is_the_authors_line(shape: tuple[int, ...]) -> None:
    g = torch.randn(shape)
    expected = g - g.mean(dim=tuple(range(1, len(shape))), keepdim=True)  # centralized_gradient of their SGD.py
    got = g.clone()
    removed = centralize(got, dim=0)
    assert torch.equal(got, expected)
    torch.testing.assert_close(removed, (g - expected).norm())
    assert got.flatten(1).sum(1).abs().max() < 1e-5
    along_last = g.movedim(0, -1).clone()
    centralize(along_last, dim=len(shape) - 1)
    torch.testing.assert_close(along_last, expected.movedim(0, -1))


def test_half_the_strength_takes_half_the_mean_out() -> None:
    g = torch.randn(3, 50) + 2
    half, whole = g.clone(), g.clone()
    centralize(half, dim=0, strength=0.5)
    centralize(whole, dim=0)
    torch.testing.assert_close(half, (g + whole) / 2)


def test_what_all_inputs_have_in_common_moves_no_weight() -> None:
    """The gradient at inputs that are all higher by a constant is the same, once it is centralised."""
    layer, x, target = nn.Linear(20, 5), torch.randn(8, 20), torch.randn(8, 5)
    found = []
    for shift in (0.0, 3.0):
        layer.weight.grad = None
        y = F.linear(x + shift, layer.weight) - shift * layer.weight.detach().sum(1)
        F.mse_loss(y, target).backward()
        assert layer.weight.grad is not None
        found.append(layer.weight.grad.clone())
    plain = (found[0] - found[1]).abs().max()
    for g in found:
        centralize(g, dim=0)
    assert plain > 0.1 and (found[0] - found[1]).abs().max() < 1e-6


# -- which weights


def test_outputs_lie_along_the_dimension_that_each_map_has_them_along() -> None:
    net = nn.ModuleDict(
        {
            "linear": nn.Linear(4, 6),
            "conv": nn.Conv2d(4, 6, 3, groups=2),
            "up": nn.ConvTranspose2d(4, 6, 3),
            "grouped_up": nn.ConvTranspose2d(4, 6, 3, groups=2),
            "attention": nn.MultiheadAttention(8, 2),
            "rnn": nn.GRU(4, 6),
            "norm": nn.LayerNorm(4),
            "embedding": nn.Embedding(9, 4),
            "head": nn.Linear(4, 9, bias=False),
        }
    )
    net["head"].weight = net["embedding"].weight
    assert output_dims(net) == {
        "linear.weight": 0,
        "conv.weight": 0,
        "up.weight": 1,
        "attention.in_proj_weight": 0,
        "attention.out_proj.weight": 0,
        "rnn.weight_ih_l0": 0,
        "rnn.weight_hh_l0": 0,
    }


def with_sgd(net: pl.LightningModule, **kwargs: Any) -> pl.LightningModule:
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), 0.05, **kwargs)  # type: ignore[method-assign]
    return net


@pytest.mark.parametrize("name", ["classifier", "gpt2", "vit"])
def test_the_mean_of_each_outputs_weights_stays_what_it_was(name: str) -> None:
    """In a network, under SGD with momentum; transformers' Conv1D has its outputs along the other dimension."""

    def means(net: pl.LightningModule) -> list[Tensor]:
        dims = output_dims(net)
        return [p.detach().movedim(dims[n], 0).flatten(1).mean(1) for n, p in net.named_parameters() if n in dims]

    moved = []
    for techniques in ([], [GradientCentralization()]):
        pl.seed_everything(1, verbose=False)
        net = with_sgd(module(name), momentum=0.9)
        before, weights = means(net), flat(net)
        trainer(*techniques, max_steps=12).fit(net, loader(name))
        assert not torch.equal(flat(net), weights)
        moved.append(max(float((a - b).abs().max()) for a, b in zip(before, means(net), strict=True)))
    plain, centralized = moved
    assert plain > 1e-3 and centralized < 1e-6


def test_all_but_maps_steps_as_before() -> None:
    ends = []
    for techniques in ([], [GradientCentralization()]):
        pl.seed_everything(1, verbose=False)
        net = with_sgd(hugging_face("gpt2"))
        trainer(*techniques, max_steps=1).fit(net, loader("gpt2"))
        ends.append({name: p.detach() for name, p in net.named_parameters()})
    changed = {name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])}
    # behind a LayerNorm inputs have no mean, and so their maps' gradients next to none: not all must change
    assert changed <= set(output_dims(net)) and "model.transformer.h.0.mlp.c_proj.weight" in changed


# -- beside accumulation, clipping and others


def test_it_comes_after_the_windows_sum_and_before_clipping() -> None:
    """Bit for bit a loop written by hand."""

    def build() -> TinyClassifier:
        pl.seed_everything(1, verbose=False)
        net = TinyClassifier(momentum=0.9)
        net.head[0].p = 0.0  # pyright: ignore[reportAttributeAccessIssue]
        return net

    data = loader("classifier", 48, shuffle=False)
    net = build()
    trainer(GradientCentralization(), max_steps=6, accumulate_grad_batches=2, gradient_clip_val=0.05).fit(net, data)
    by_hand = build()
    optimizer = by_hand.configure_optimizers()
    clipped = []
    for index, batch in enumerate(data):
        (by_hand.training_step(batch, index) / 2).backward()
        if index % 2:
            for p in by_hand.parameters():
                if p.ndim > 1 and p.grad is not None:
                    p.grad.add_(-p.grad.mean(dim=1, keepdim=True))
            clipped.append(float(nn.utils.clip_grad_norm_(by_hand.parameters(), 0.05)) > 0.05)
            optimizer.step()
            optimizer.zero_grad()
    assert len(clipped) == 6 and all(clipped)
    assert torch.equal(flat(net), flat(by_hand))


def test_an_optimizer_on_the_host_gets_the_same_gradients() -> None:
    alone, _ = fit("tiny_gpt", lambda: [GradientCentralization()])
    both, _ = fit("tiny_gpt", lambda: [GradientCentralization(), OptimizerOffload()])
    plain, _ = fit("tiny_gpt", list)
    assert torch.equal(flat(alone), flat(both)) and not torch.equal(flat(alone), flat(plain))


def test_it_tells_how_much_it_took_out() -> None:
    technique = GradientCentralization()
    net, _ = fit("classifier", lambda: [technique], max_steps=3)
    told = technique.report()
    assert told["centralized"] == len(output_dims(net)) == 4
    assert 0 < float(told["removed_norm"]) < 10
    assert technique.summary().startswith("centralized the gradients of 4 weights; ")


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "GradientCentralization", {"strength": 0.5}, max_steps=3)
    assert "centralized the gradients of 4 weights" in capsys.readouterr().out


# -- bad input


@pytest.mark.parametrize("strength", [-0.1, 1.5, float("nan")])
def test_bad_strengths_are_refused(strength: float) -> None:
    with pytest.raises(ValueError, match=r"GradientCentralization\(strength=.*expected a number in \[0, 1\]"):
        GradientCentralization(strength=strength)


def test_an_optimizer_without_a_map_is_refused_with_the_maps_that_there_are() -> None:
    net = TinyClassifier()
    net.configure_optimizers = lambda: torch.optim.SGD(net.norm.parameters(), 0.1)  # type: ignore[method-assign]
    with pytest.raises(
        ValueError, match=r"no optimizer of TinyClassifier has .*there are: blocks\.0\.0\.weight, .*head\.1"
    ):
        trainer(GradientCentralization(), max_steps=1).fit(net, loader("classifier"))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weights_with_one_input_for_each_output_keep_their_gradients() -> None:
    class One(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.depthwise = nn.Linear(1, 8), nn.Conv1d(8, 8, 1, groups=8)
            self.scaled = torch.nn.utils.weight_norm(nn.Linear(8, 8))
            self.columns = torch.nn.utils.weight_norm(nn.Linear(8, 8), dim=1)
            self.last = nn.Linear(8, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            h = self.depthwise(self.first(batch).tanh().unsqueeze(-1)).squeeze(-1)
            return self.last(self.columns(self.scaled(h).tanh()).tanh()).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    net = One()
    assert output_dims(net) == {"scaled.weight_v": 0, "columns.weight_v": 0, "last.weight": 0}
    data = torch.randn(8, 1, generator=torch.Generator().manual_seed(1))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    grads = torch.autograd.grad(net.training_step(data, 0), list(net.parameters()))
    trainer(GradientCentralization(), max_steps=1).fit(net, torch.utils.data.DataLoader(data, 8))
    for (name, p), grad in zip(net.named_parameters(), grads, strict=True):
        if name not in output_dims(net):
            torch.testing.assert_close(p.detach(), before[name] - 0.1 * grad, msg=name)
            assert not torch.equal(p.detach(), before[name])
