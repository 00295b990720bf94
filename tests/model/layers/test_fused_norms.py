"""FusedNorms: what is a norm is told by what it computes, and the kernels' values and gradients are torch's."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_eff as eff
from lightning_eff import FusedNorms
from lightning_eff.kernels import _launch
from lightning_eff.model.layers._fused_norms.finding import Kind, kind_of, norms
from tests import families
from tests.cases import Case, classifier
from tests.kernels.conftest import interpret
from tests.models import TinyGPT, flat, loader, trainer
from tests.runs import fit, fit_yaml, plain

_ON_CPU = not torch.cuda.is_available()
CASES = {
    "FusedNorms": Case(
        active=lambda: FusedNorms(),
        neutral=lambda: FusedNorms(names=[]),
        rounds=True,
        idle=("gpt2", "llama", "bert", "vit") if _ON_CPU else (),  # there the kernels are torch's, to the bit
        refuses={"classifier": "has no LayerNorm or RMSNorm to act on"},
        lost=(classifier, "classifier", r"has no LayerNorm or RMSNorm to act on\. .*norms of BatchNorm1d"),
    )
}


class RMS(nn.Module):
    """As many write it."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.scale, self.epsilon = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.scale


class RMSNormBySum(RMS):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5 + self.epsilon) * self.scale


class LayerNormByHand(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma, self.beta, self.eps = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim)), 1e-4

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (
            x.var(-1, keepdim=True, correction=0) + self.eps
        ).sqrt() * self.gamma + (self.beta)


class NormOfSample(LayerNormByHand):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean()) / (x.var() + self.eps).sqrt() * self.gamma + self.beta


class MyRMSNorm(RMS):
    pass


def test_norms_are_told_by_what_they_compute() -> None:
    assert kind_of(nn.LayerNorm(8, eps=1e-3)) == Kind(True, 1e-3, 0.0, "weight", "bias")
    assert kind_of(nn.LayerNorm(8, bias=False)) == Kind(True, 1e-5, 0.0, "weight", None)
    assert kind_of(nn.LayerNorm(8, elementwise_affine=False)) == Kind(True, 1e-5, 0.0, None, None)
    assert kind_of(nn.RMSNorm(8)) == Kind(False, None, 0.0, "weight", None)
    assert kind_of(RMS(8)) == Kind(False, 1e-5, 0.0, "scale", None)
    assert kind_of(LayerNormByHand(8)) == Kind(True, 1e-4, 0.0, "gamma", "beta")
    assert kind_of(RMSNormBySum(8)) is None and kind_of(NormOfSample(8)) is None
    assert "over 2 dimensions" in str(kind_of(nn.LayerNorm([3, 8])))
    assert "8,193 elements, and the kernels take at most 8,192" in str(kind_of(nn.RMSNorm(8193)))
    net = nn.Sequential(nn.Linear(4, 4), RMS(4), MyRMSNorm(4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4))
    assert list(norms(net)) == ["2"], "norms by name alone are looked at"


@pytest.mark.parametrize(
    ("name", "count", "kind"),
    [
        ("gpt2", 9, Kind(True, 1e-5, 0.0, "weight", "bias")),
        ("qwen3", 17, Kind(False, 1e-6, 0.0, "weight", None)),
        ("gemma2", 17, Kind(False, 1e-6, 1.0, "weight", None)),
        ("t5", 18, Kind(False, 1e-6, 0.0, "weight", None)),
        ("modernbert", 10, Kind(True, 1e-5, 0.0, "weight", None)),
    ],
)
def test_hugging_faces_norms(name: str, count: int, kind: Kind) -> None:
    found = norms(families.module(name))
    assert len(found) == count and {one for _, one in found.values()} == {kind}


def loaded(*batches: Any) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None)  # pyright: ignore[reportArgumentType]


class Grads(pl.Callback):
    """The first step's loss and gradients."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.loss = float(trainer.callback_metrics.get("loss", 0.0))
        self.found = {n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None}


def gradients(build: Any, data: Any, *techniques: pl.Callback) -> dict[str, Tensor]:
    torch.manual_seed(0)
    seen = Grads()
    trainer(*techniques, seen, max_steps=1).fit(build(), data)
    return seen.found


def test_kernels_give_torchs_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through whole models, with all norms by Triton: LayerNorm, RMSNorm of queries and keys, and gains of 1 + g."""
    pytest.importorskip("triton")
    calls = []
    plain = {name: gradients(*_small(name)) for name in ("tiny", "gemma2", "qwen3")}
    if _ON_CPU:
        interpret(monkeypatch)
    from lightning_eff.kernels import _norm_triton

    for name in ("forward", "backward"):
        kernel = getattr(_norm_triton, name)
        monkeypatch.setattr(_norm_triton, name, lambda *a, kernel=kernel, name=name: calls.append(name) or kernel(*a))
    for name, wanted in plain.items():
        calls.clear()
        technique = FusedNorms()
        got = gradients(*_small(name), technique)
        backward = calls.count("backward")
        assert backward == calls[-2 * backward :].count("forward") == technique.report()["norms"] > 2
        assert got.keys() == wanted.keys()
        for key, value in wanted.items():
            assert float((got[key] - value).norm()) <= 1e-6 * float(value.norm()) + 1e-6 * float(
                max(v.norm() for v in wanted.values())
            ), key


def _small(name: str) -> tuple[Any, Any]:
    if name == "tiny":
        return lambda: TinyGPT(1, dropout=0.0), loader("tiny_gpt", 4)
    return lambda: families.module(name), loaded(families.batch(name, 2))


def test_on_a_cpu_layer_norm_is_as_it_was_to_the_bit_and_that_is_said(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        net, _ = fit("tiny_gpt", lambda: [FusedNorms()])
    if _ON_CPU:
        assert torch.equal(flat(net), flat(plain("tiny_gpt")[0]))
        assert "9 norms are computed by torch's own functions" in caplog.text


def test_the_module_afterwards_and_in_evaluation_is_plain() -> None:
    net = families.module("qwen3")
    before = {path: type(m) for path, m in net.named_modules()}
    inside = []

    class Look(pl.Callback):
        def on_validation_batch_start(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
            inside.append({path: type(m) for path, m in net.named_modules()} == before)

    data = loaded(families.batch("qwen3", 2))
    trainer(FusedNorms(), Look(), max_steps=1, limit_val_batches=1).fit(net, data, data)
    assert inside == [True] and {path: type(m) for path, m in net.named_modules()} == before


def test_bfloat16_in_is_bfloat16_out() -> None:
    kind = Kind(True, 1e-5, 0.0, "weight", "bias")
    norm, x = nn.LayerNorm(8), torch.randn(3, 8).bfloat16()
    assert kind(norm, x).dtype == torch.bfloat16
    torch.testing.assert_close(kind(norm, x), norm(x.float()).bfloat16())
    t = trainer(FusedNorms(), max_steps=2, precision="bf16-mixed")
    t.fit(families.module("qwen3"), loaded(families.batch("qwen3", 2), families.batch("qwen3", 2)))
    assert t.global_step == 2


def test_what_cannot_be_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"none of the 9 norms of TinyGPT; .*Nearest: .*norm1"):
        fit("tiny_gpt", lambda: [FusedNorms(names=["nrm1"])])
    net: Any = classifier()
    net.norm = nn.Sequential(nn.Unflatten(1, (2, 4)), nn.LayerNorm([2, 4]), nn.Flatten())
    with pytest.raises(
        ValueError, match=r"no LayerNorm or RMSNorm to act on\. norm.1: it normalises over 2 dimensions"
    ):
        trainer(FusedNorms(), max_steps=1).fit(net, loader("classifier"))
    with pytest.raises(
        ValueError, match=r"norm.1 \(LayerNorm\) cannot be changed: it normalises over 2 dimensions.*Leave it out"
    ):
        trainer(FusedNorms(names=["norm.1"]), max_steps=1).fit(net, loader("classifier"))
    with pytest.raises(
        ValueError,
        match=r"names='norm'\): expected a list of dotted paths or patterns, or None: dotted paths of the norms",
    ):
        FusedNorms(names="norm")

    def missing(name: str) -> Any:
        raise ImportError(f"no triton for {name}")

    monkeypatch.setattr(_launch, "triton_module", missing)
    t = trainer(FusedNorms(), max_steps=1)
    monkeypatch.setattr(type(t.strategy), "root_device", torch.device("cuda"))
    with pytest.raises(ImportError, match="no triton for norm"):
        FusedNorms().check(type("S", (), {"trainer": t})())  # pyright: ignore[reportArgumentType]


def test_some_norms_by_name() -> None:
    technique = FusedNorms(names=["norm1"])
    fit("tiny_gpt", lambda: [technique], max_steps=1)
    assert technique.report() == {"norms": 4} and "4 norms" in technique.summary()


def test_in_a_config(tmp_path: Path) -> None:
    kinds = {"model": "TinyGPT", "data": "Sequences"}
    fit_yaml(tmp_path, "FusedNorms", {"names": ["blocks.*.norm1"]}, keeps_state=False, max_steps=3, **kinds)
    assert eff.FusedNorms().names is None
