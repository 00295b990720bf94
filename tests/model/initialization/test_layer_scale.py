"""LayerScale: a factor for each channel, whatever holds the last weights; what it shares with ReZero is tested there."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff import LayerScale
from lightning_eff.model.initialization.layer_scale import layer_scale
from tests.cases import Case, classifier
from tests.model.initialization.test_re_zero import Plain, moved, scales
from tests.model.initialization.test_zero_projections import with_experts
from tests.models import TinyGPT, hugging_face, make_batch

CASES = {
    "LayerScale": Case(
        active=lambda: LayerScale(),
        neutral=lambda: LayerScale(branches=[]),
        architecture=True,
        lost=(classifier, "classifier", "found no residual branch"),
    )
}


@pytest.mark.parametrize(("blocks", "value"), [(2, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6), (48, 1e-6)])
def test_lambda_begins_by_depth(blocks: int, value: float) -> None:
    assert layer_scale(blocks) == value
    m = eff.apply(nn.Sequential(nn.Linear(4, 16), *(Plain() for _ in range(blocks))), LayerScale())
    assert len(scales(m)) == blocks and all((p == value).all() and p.shape == (16,) for p in scales(m).values())


def outputs(m: nn.Module, path: str, run: Callable[[], Any]) -> Tensor:
    """What the submodule at ``path`` returns while ``run`` runs."""
    found: list[Any] = []
    handle = m.get_submodule(path).register_forward_hook(lambda b, args, y: found.append(y))
    with torch.no_grad():
        run()
    handle.remove()
    return found[0]


ENDS = {
    "linear": (lambda: TinyGPT(2, dropout=0.0), lambda m: m(make_batch("tiny_gpt")["input_ids"]), "blocks.0.proj"),
    "experts": (with_experts, lambda m: m(make_batch("tiny_gpt")["input_ids"]), "blocks.0.mlp"),
    "Conv1D": (
        lambda: hugging_face("gpt2", 2),
        lambda m: m.model(make_batch("gpt2")["input_ids"]),
        "model.transformer.h.0.attn.c_proj",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_a_branch_adds_is_multiplied_channel_by_channel(name: str) -> None:
    build, run, path = ENDS[name]
    plain = build().eval()
    m = moved(eff.apply(copy.deepcopy(plain), LayerScale()))
    with torch.no_grad():
        for scale in (p for part, p in scales(m).items() if not part.startswith(path)):
            scale.fill_(1.0)
    before, after = outputs(plain, path, lambda: run(plain)), outputs(m, path, lambda: run(m))
    factor = dict(m.named_parameters())[f"{path}.branch_scale"]
    torch.testing.assert_close(after, before * factor)
    with torch.no_grad():
        factor.mul_(2)
    torch.testing.assert_close(outputs(m, path, lambda: run(m)), 2 * after)
    with torch.no_grad():
        for p in scales(m).values():
            p.mul_(0)
    assert not outputs(m, path, lambda: run(m)).any()


class Square(nn.Module):
    """Its last weight is a parameter of its own, of as many inputs as outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x)) @ self.down


def test_the_product_tells_which_dimension_of_a_square_are_channels() -> None:
    net = nn.Sequential(nn.Linear(4, 16), Square(), Square())
    m, x = eff.apply(copy.deepcopy(net), LayerScale(init=1.0)), torch.randn(3, 4)
    factor = torch.arange(16.0)
    with torch.no_grad():
        m[1].branch_scale.copy_(factor)  # pyright: ignore[reportCallIssue]
    y = net[0](x)
    torch.testing.assert_close(m[1](y), y + factor * (net[1](y) - y))
    with pytest.raises(ValueError, match=r"which dimension .*1.down of shape \(16, 16\).*ReZero, which has one"):
        eff.apply(net, LayerScale(branches=["1.down", "2.down"]))
    assert len(scales(eff.apply(net, eff.ReZero(branches=["1.down", "2.down"])))) == 2


@pytest.mark.parametrize("init", ["deep", math.nan, math.inf, True])
def test_bad_first_values_are_refused(init: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a finite number, or None"):
        LayerScale(init=init)
