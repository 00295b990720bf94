"""SNIP against derivatives by a factor before each weight, its global choice, and what leaves no gradient."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lightning_eff import SNIP
from tests.cases import Case, no_map
from tests.families import module as family
from tests.model.sparsity.sparse import fit_on, flat_mask, sparsity_of
from tests.models import TinyClassifier, TinyGPT, hugging_face, loader, make_batch, trainer
from tests.runs import fit_yaml

CASES = {
    "SNIP": Case(
        active=lambda: SNIP(sparsity=0.5),
        neutral=lambda: SNIP(sparsity=0.0),
        lost=(no_map, "classifier", "no trainable weight of a linear layer or convolution"),
    )
}


def sensitivities(net: pl.LightningModule, batches: list[Any], names: list[str]) -> dict[str, Tensor]:
    """``|dL/dc|`` at ``c = 1``, with a factor ``c`` before each number of the weights; no dropout, BatchNorm by the batch."""
    for m in net.modules():
        m.train(isinstance(m, nn.BatchNorm1d))
    named = dict(net.named_parameters())
    c = {name: torch.ones_like(named[name], requires_grad=True) for name in names}

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, batch: Any) -> Tensor:
            return self.net.training_step(batch, 0)  # pyright: ignore[reportReturnType]

    net.log = lambda *args, **kwargs: None  # pyright: ignore[reportAttributeAccessIssue]
    scaled = {f"net.{name}": named[name].detach() * c[name] for name in names}
    loss = sum(functional_call(Step(), scaled, (batch,)) for batch in batches) / len(batches)
    grads = torch.autograd.grad(loss, [*c.values()])  # pyright: ignore[reportArgumentType, reportCallIssue]
    del net.log
    net.train()
    return {name: g.abs() for name, g in zip(c, grads, strict=True)}


@pytest.mark.parametrize(("model", "batches"), [("classifier", 3), ("tiny_gpt", 1)])
def test_keeps_the_largest_derivatives_by_a_factor_of_all_together(model: str, batches: int) -> None:
    made: Any = TinyClassifier if model == "classifier" else lambda: TinyGPT(2)
    torch.manual_seed(0)
    reference = made()
    torch.manual_seed(0)
    net, technique, data = made(), SNIP(sparsity=0.75, batches=batches), loader(model, 12, shuffle=False)
    trainer(technique, max_steps=1).fit(net, data)
    masks = technique.masks
    c = sensitivities(reference, list(data)[:batches], [*masks])
    every = torch.cat([c[name].flatten() for name in masks])
    count = round(0.25 * every.numel())
    expected = every >= every.topk(count).values[-1]
    assert int(flat_mask(masks).sum()) == count
    assert (flat_mask(masks) != expected).float().mean() < 2e-3, "but for the rounding of scores that are nearly equal"
    densities = [float(m.float().mean()) for m in masks.values()]
    assert max(densities) > 1.5 * min(densities), "layers keep what they need, not the same share"


def test_masks_stay_zero_in_every_step_and_scoring_leaves_no_trace() -> None:
    torch.manual_seed(0)
    net = TinyClassifier()
    counts = fit_on(net, make_batch("classifier"), SNIP(sparsity=0.6), steps=4)
    assert counts.leaks == [] and sparsity_of(counts) == pytest.approx(0.6, abs=5e-3)
    assert all(torch.equal(counts.masks[0][n], m) for n, m in counts.masks[-1].items())
    assert int(net.norm.num_batches_tracked) == 4  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["qwen3", "modernbert", "resnet", "vit", "gpt2"])
def test_unchanged_modules(name: str) -> None:
    net: Any = hugging_face("gpt2", 2) if name == "gpt2" else family(name)
    kind = {"vit": "vit", "resnet": "vit"}.get(name, "gpt2")
    counts = fit_on(net, make_batch(kind), SNIP(sparsity=0.5), steps=1)
    assert counts.leaks == [] and sparsity_of(counts) == pytest.approx(0.5, abs=1e-3)


class Routed(TinyClassifier):
    """Two experts, of which the first batch needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(self.experts[batch_idx % 2](batch[0])), batch[1])


def test_an_expert_that_no_sample_went_to_is_an_error_and_more_batches_help() -> None:
    net = Routed()
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(
        ValueError, match=r"SNIP\(batches=1\): 1 weights have no gradient on these batches, such as experts.1.weight"
    ):
        trainer(SNIP(), max_steps=2).fit(net, loader("classifier"))
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    technique = SNIP(dense=["experts.1"])
    trainer(technique, max_steps=2).fit(net, loader("classifier"))
    assert "experts.0.weight" in technique.masks and "experts.1.weight" not in technique.masks


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 1}, r"SNIP\(sparsity=1\): expected"),
        ({"batches": 0}, r"batches=0.: expected an integer >= 1: the number of batches"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SNIP(**settings)


def test_from_yaml(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "SNIP", {"sparsity": 0.5, "batches": 2}, max_steps=3)
