"""Norms by the root mean square: invariant to scale and not to shifts, LayerNorm's values on what is centred, and refusals."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff import RMSNormalization
from lightning_eff.model.layers.rms_normalization import RMSNorm
from tests import families
from tests.cases import Case, classifier
from tests.models import TinyGPT, flat, make_batch, module, trainer
from tests.runs import checkpoints, fit, fit_yaml

CASES = {
    "RMSNormalization": Case(
        active=lambda: RMSNormalization(),
        neutral=lambda: RMSNormalization(names=[]),
        architecture=True,
        stays="RMSNormalization replaced LayerNorm at .*: a LayerNorm subtracts the mean",
        refuses=dict.fromkeys(("llama", "classifier"), "has no LayerNorm to act on"),
        lost=(classifier, "classifier", r"TinyClassifier has no LayerNorm to act on; .*1 BatchNorm1d"),
    )
}


def swapped(norm: nn.LayerNorm) -> Any:
    return eff.apply(nn.Sequential(copy.deepcopy(norm)), RMSNormalization())[0]


@pytest.mark.parametrize("shape", [(16,), (3, 5)])
@pytest.mark.parametrize("affine", [True, False])
def test_it_is_its_equation(shape: tuple[int, ...], affine: bool) -> None:
    plain = nn.LayerNorm(shape, eps=1e-3, elementwise_affine=affine, dtype=torch.float64)
    if affine:
        nn.init.normal_(plain.weight)
    norm, x = swapped(plain), torch.randn(4, *shape, dtype=torch.float64, requires_grad=True)
    dims = tuple(range(1, 1 + len(shape)))
    gain = norm.weight if affine else torch.ones((), dtype=torch.float64)
    torch.testing.assert_close(norm(x), x / (x.square().mean(dims, keepdim=True) + 1e-3).sqrt() * gain)
    assert torch.autograd.gradcheck(norm, (x,))
    assert [name for name, _ in norm.named_parameters()] == (["weight"] if affine else [])


def test_scale_does_not_matter_and_shifts_do() -> None:
    norm = swapped(nn.LayerNorm(32, eps=1e-12))
    x = torch.randn(8, 32)
    for c in (0.01, 3.0, 1e3):
        torch.testing.assert_close(norm(c * x), norm(x), rtol=1e-4, atol=1e-5)
    assert (norm(x + 2.0) - norm(x)).abs().max() > 0.1
    layer_norm = nn.LayerNorm(32, eps=1e-12)
    torch.testing.assert_close(layer_norm(x + 2.0), layer_norm(x), rtol=1e-4, atol=1e-4)


def test_on_what_is_centred_it_is_a_layer_norm_without_bias() -> None:
    plain = nn.LayerNorm(24, eps=1e-4)
    nn.init.normal_(plain.weight)
    x = torch.randn(6, 24)
    x = x - x.mean(-1, keepdim=True)
    torch.testing.assert_close(swapped(plain)(x), plain(x))


@pytest.mark.parametrize("name", ["gpt2", "modernbert", "vit"])
def test_a_model_is_the_one_that_was_written_with_it(name: str) -> None:
    plain = families.module(name)
    names = [path for path, m in plain.named_modules() if isinstance(m, nn.LayerNorm)]
    net: Any = eff.apply(families.module(name), RMSNormalization())
    assert [path for path, m in net.named_modules() if isinstance(m, RMSNorm)] == names != []
    for path in names:

        def hook(m: Any, args: Any, y: Tensor) -> Tensor:
            x = args[0]
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + m.eps) * m.weight

        plain.get_submodule(path).register_forward_hook(hook)
    with torch.no_grad():
        got, expected = (m.eval().model(**families.batch(name, 2)).logits for m in (net, plain))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"lightning_eff_mark|Missing key"):
        families.module(name).load_state_dict(net.state_dict())


def test_models_that_have_it_already_and_those_of_batch_norms_are_refused_with_what_they_have() -> None:
    with pytest.raises(ValueError, match=r"has no LayerNorm to act on; .*Qwen3RMSNorm"):
        eff.apply(families.module("qwen3"), RMSNormalization())
    with pytest.raises(ValueError, match=r"has no LayerNorm to act on; .*BatchNorm2d"):
        eff.apply(families.module("resnet"), RMSNormalization())


class Own(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps).type_as(x)


def test_what_cannot_be_replaced_says_why() -> None:
    net = nn.Sequential(nn.LayerNorm(8), Own(8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    made = eff.apply(copy.deepcopy(net), RMSNormalization())
    assert [type(m) for m in made.modules()].count(RMSNorm) == 1 and type(made[1]) is Own
    with pytest.raises(
        ValueError, match=r"1 \(Own\) cannot be changed: it is a subclass of nn.LayerNorm with its own forward"
    ):
        eff.apply(copy.deepcopy(net), RMSNormalization(names=["1"]))
    with pytest.raises(
        ValueError, match=r"2.norm1 \(LayerNorm\) cannot be changed: the nn.TransformerEncoderLayer around it"
    ):
        eff.apply(copy.deepcopy(net), RMSNormalization(names=["norm1"]))
    with pytest.raises(ValueError, match=r"no LayerNorm of Sequential can be changed\. 0: it is a subclass"):
        eff.apply(nn.Sequential(Own(8)), RMSNormalization())
    with pytest.raises(ValueError, match=r"it matches none of the 9 LayerNorms of TinyGPT; .*Nearest: .*norm1"):
        eff.apply(TinyGPT(), RMSNormalization(names=["nrm1"]))
    with pytest.raises(
        ValueError,
        match=r"names='norm1'\): expected a list of dotted paths or patterns, or None: dotted paths of the LayerNorms",
    ):
        RMSNormalization(names="norm1")


def test_norms_by_name() -> None:
    net = eff.apply(TinyGPT(2), RMSNormalization(names=["norm1"]))
    assert [path for path, m in net.named_modules() if isinstance(m, RMSNorm)] == ["blocks.0.norm1", "blocks.1.norm1"]


def test_it_resumes_to_the_bit_and_the_plain_module_does_not_load_it(tmp_path: Path) -> None:
    net, _ = fit("tiny_gpt", lambda: [RMSNormalization()], directory=tmp_path)
    again, t = fit("tiny_gpt", lambda: [RMSNormalization()], resume=tmp_path / "step=4.ckpt")
    assert t.global_step == 12 and torch.equal(flat(net), flat(again))
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        module("tiny_gpt").load_state_dict(torch.load(checkpoints(tmp_path)[0], weights_only=True)["state_dict"])


def test_under_bf16_it_computes_as_layer_norm_does() -> None:
    technique = RMSNormalization()
    net = TinyGPT(2)
    from tests.models import loader

    trainer(technique, max_steps=3, precision="bf16-true").fit(net, loader("tiny_gpt"))
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16} and technique.report() == {"norms": 5}
    assert net(make_batch("tiny_gpt")["input_ids"]).isfinite().all()


def test_in_a_config(tmp_path: Path) -> None:
    arguments = {"names": ["blocks.*.norm1"]}
    kinds = {"model": "TinyGPT", "data": "Sequences"}
    fit_yaml(tmp_path, "RMSNormalization", arguments, keeps_state=False, max_steps=3, **kinds)
