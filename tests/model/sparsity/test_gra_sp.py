"""GraSP against the change of the gradient's norm as weights are removed, by differences."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff import GraSP
from lightning_eff.model.sparsity.gra_sp import gradient_flow
from tests.cases import Case, no_map, own_loss
from tests.families import module as family
from tests.model.sparsity.sparse import fit_on, flat_mask, sparsity_of
from tests.models import TinyGPT, hugging_face, loader, make_batch, trainer
from tests.runs import fit_yaml

CASES = {
    "GraSP": Case(
        active=lambda: GraSP(sparsity=0.5),
        neutral=lambda: GraSP(sparsity=0.0),
        lost=(no_map, "classifier", "no trainable weight of a linear layer or convolution"),
    )
}


def network(w: Tensor) -> Tensor:
    """A network of 5 inputs, 4 hidden and 3 outputs, of one vector."""
    x = torch.linspace(-1, 1, 10, dtype=torch.float64).view(2, 5)
    one, two = w[:20].view(4, 5), w[20:].view(3, 4)
    return F.cross_entropy(torch.tanh(x @ one.mT) @ two.mT, torch.tensor([0, 2]))


def test_the_score_is_half_of_how_the_squared_gradient_changes_under_removal() -> None:
    w = torch.randn(32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def squared(at: Tensor) -> float:
        return float(torch.autograd.functional.jacobian(network, at).square().sum())

    g = torch.autograd.functional.jacobian(network, w)
    scores = gradient_flow(w, torch.autograd.functional.hessian(network, w) @ g)  # pyright: ignore[reportOperatorIssue]
    h = 1e-6
    for i in range(32):
        removed = torch.zeros_like(w)
        removed[i] = -w[i]
        change = (squared(w + h * removed) - squared(w - h * removed)) / (2 * h)
        assert float(scores[i]) == pytest.approx(change / 2, rel=1e-5, abs=1e-9)


class Small(pl.LightningModule):
    """Two maps and tanh, of double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.maps(batch[0].double()), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


@pytest.mark.parametrize(("temperature", "batches"), [(200.0, 1), (1.0, 1), (5.0, 3)])
def test_prunes_the_highest_of_all_together_at_divided_logits(temperature: float, batches: int) -> None:
    torch.manual_seed(0)
    net = Small()
    flat = torch.cat([net.get_parameter(f"maps.{i}.weight").detach().flatten() for i in (0, 2)])
    biases = [net.get_parameter(f"maps.{i}.bias").detach().clone() for i in (0, 2)]
    data = loader("classifier", 12, shuffle=False)

    def loss(w: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for x, y in list(data)[:batches]:
            inner = torch.tanh(F.linear(x.double(), w[:48].view(6, 8), biases[0]))
            total = total + F.cross_entropy(F.linear(inner, w[48:].view(3, 6), biases[1]) / temperature, y) / batches
        return total

    g = torch.autograd.functional.jacobian(loss, flat)
    scores = -flat * (torch.autograd.functional.hessian(loss, flat) @ g)  # pyright: ignore[reportOperatorIssue]
    technique = GraSP(sparsity=0.6, temperature=temperature, batches=batches)
    trainer(technique, max_steps=1).fit(net, data)
    pruned = ~flat_mask(technique.masks)
    assert int(pruned.sum()) == 66 - round(0.4 * 66)
    assert torch.equal(pruned, scores >= scores.topk(int(pruned.sum())).values[-1])


@pytest.mark.parametrize("name", ["qwen3", "modernbert", "resnet", "vit", "gpt2"])
def test_unchanged_modules(name: str) -> None:
    net: Any = hugging_face("gpt2", 2) if name == "gpt2" else family(name)
    kind = {"vit": "vit", "resnet": "vit"}.get(name, "gpt2")
    counts = fit_on(net, make_batch(kind), GraSP(sparsity=0.5), steps=1)
    assert counts.leaks == [] and sparsity_of(counts) == pytest.approx(0.5, abs=1e-3)


def test_a_loss_without_cross_entropy_needs_a_temperature_of_one() -> None:
    with pytest.raises(ValueError, match=r"GraSP\(temperature=200.0\): .* calls no cross_entropy .* Set temperature=1"):
        trainer(GraSP(sparsity=0.5), max_steps=1).fit(own_loss(), loader("classifier"))
    technique = GraSP(sparsity=0.5, temperature=1.0)
    trainer(technique, max_steps=1).fit(own_loss(), loader("classifier"))
    assert 0.4 < float(flat_mask(technique.masks).float().mean()) < 0.6


class Constant(torch.autograd.Function):
    """Its backward pass computes by what autograd does not see, as a kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * gradient.detach() * ctx.saved_tensors[0].detach()


def test_what_has_no_second_derivative_is_refused_by_name() -> None:
    class ByHand(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(Constant.apply(self.maps(batch[0].double())), batch[1])  # pyright: ignore[reportArgumentType]

    with pytest.raises(ValueError, match=r"cannot be differentiated twice \(.*Constant has no derivative\)"):
        trainer(GraSP(sparsity=0.5), max_steps=1).fit(ByHand(), loader("classifier"))


def test_dropout_draws_nothing_and_the_run_is_the_plain_one_but_for_the_masks() -> None:
    ends: list[Tensor] = []
    for _ in range(2):
        torch.manual_seed(0)
        fit_on(TinyGPT(2), make_batch("tiny_gpt"), GraSP(sparsity=0.3), steps=2)
        ends.append(torch.rand(3))
    torch.manual_seed(0)
    trainer(max_steps=2).fit(TinyGPT(2), loader("tiny_gpt", 8, shuffle=False))
    assert torch.equal(ends[0], ends[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 1.2}, r"GraSP\(sparsity=1.2\)"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"batches": True}, "batches"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GraSP(**settings)


def test_from_yaml(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "GraSP", {"sparsity": 0.5, "temperature": 200.0}, max_steps=3)
