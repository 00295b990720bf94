"""HoulsbyAdapters against networks with bottlenecks written by hand: where they stand, what trains, what checkpoints hold."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff import HoulsbyAdapters, QuantizedBase
from tests import families
from tests.cases import Case, classifier
from tests.models import TinyGPT, loader, make_batch, trainer
from tests.runs import fit, fit_yaml

STAYS = "an adapter has an activation function, so it cannot be merged"
CASES = {
    "HoulsbyAdapters": Case(
        active=lambda: HoulsbyAdapters(4),
        neutral=lambda: HoulsbyAdapters(names=[]),
        architecture=True,
        partial=True,
        stays=STAYS,
        lost=(classifier, "classifier", "found no residual branch"),
    )
}


class ByHand(TinyGPT):
    """TinyGPT with the paper's adapters written into its blocks, whose numbers are ``adapters``, (W_d, b_d, W_u, b_u) each."""

    def adapt(self, numbers: list[tuple[Tensor, ...]]) -> list[nn.Parameter]:
        self.requires_grad_(False)
        adapters = [[nn.Parameter(t.detach().clone()) for t in four] for four in numbers]
        blocks: Any = self.blocks
        ends = [m for block in blocks for m in (block.proj, block.mlp[2])]
        for m, four in zip(ends, adapters, strict=True):

            def behind(m: nn.Module, args: Any, h: Tensor, four: list[nn.Parameter] = four) -> Tensor:
                wd, bd, wu, bu = four
                return h + (F.gelu(h @ wd.T + bd) @ wu.T + bu)

            m.register_forward_hook(behind)
        return [p for four in adapters for p in four]


def numbers_of(net: nn.Module) -> list[tuple[Tensor, ...]]:
    found: list[Any] = [m.adapter for m in net.modules() if hasattr(m, "adapter")]
    return [(a.down.weight, a.down.bias, a.up.weight, a.up.bias) for a in found]


def shaken(net: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return net


# -- the rule


def test_steps_are_those_of_adapters_written_by_hand() -> None:
    """torch's AdamW on the adapters alone, with the same batches; every other weight is bit for bit what it was."""
    torch.manual_seed(0)
    net = TinyGPT(2, dropout=0.0)
    before = copy.deepcopy(net.state_dict())
    torch.manual_seed(7)
    eff.apply(net, HoulsbyAdapters(4))
    by_hand = ByHand(2, dropout=0.0)
    by_hand.load_state_dict(before)
    mine = by_hand.adapt(numbers_of(net))
    optimizer = torch.optim.AdamW(mine, lr=net.lr)
    by_hand.log = lambda *args, **kwargs: None  # pyright: ignore[reportAttributeAccessIssue]
    for batch in loader("tiny_gpt", shuffle=False):
        optimizer.zero_grad()
        by_hand.training_step(batch, 0).backward()
        optimizer.step()
    t = trainer(HoulsbyAdapters(4), max_steps=5)
    t.fit(net, loader("tiny_gpt", shuffle=False))
    theirs = [p for four in numbers_of(net) for p in four]
    for p, q in zip(theirs, mine, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert all(p.any() for p in theirs)
    for name, p in net.named_parameters():
        plain = name.replace(".base_layer", "")
        assert ".adapter." in name or torch.equal(p, before[plain]), name
    held = [p for group in t.optimizers[0].param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in theirs} == {id(p) for p in t.optimizers[0].state}
    assert all(p.grad is None for name, p in net.named_parameters() if ".adapter." not in name)


#: By family, how many sublayers have an adapter, each of which ends in 32 numbers.
SUBLAYERS = {"gpt2": 8, "qwen3": 8, "modernbert": 8, "vit": 8, "t5": 4 * 3 + 2 * 2, "phi": 8, "gemma2": 8, "albert": 2}


@pytest.mark.parametrize("name", SUBLAYERS)
def test_the_function_is_unchanged_bit_for_bit_and_each_adapter_has_the_papers_numbers(name: str) -> None:
    plain = families.module(name)
    net = eff.apply(copy.deepcopy(plain), HoulsbyAdapters(m := 5))
    batch = families.batch(name, 2)
    with torch.no_grad():
        first, was = net.eval().model(**batch).logits, plain.eval().model(**batch).logits
        assert torch.equal(first, was)
        shaken(net)
        assert (net.model(**batch).logits - was).abs().max() > 1e-3
    trained = {n: p for n, p in net.named_parameters() if p.requires_grad}
    assert all(".adapter." in n for n in trained)
    d = 32
    assert sum(p.numel() for p in trained.values()) == SUBLAYERS[name] * (2 * m * d + d + m)


def test_down_begins_as_in_the_paper_and_up_at_zero() -> None:
    net = eff.apply(TinyGPT(2, dim=256), HoulsbyAdapters(64))
    for wd, bd, wu, bu in numbers_of(net):
        assert not bd.any() and not wu.any() and not bu.any()
        assert wd.abs().max() <= 0.02
        assert float(wd.detach().std()) == pytest.approx(
            0.01 * 0.88, rel=0.02
        )  # of a normal that is cut off at two deviations


# -- where they stand


def test_they_stand_behind_attention_and_feed_forward_network_and_that_is_printed(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        eff.apply(TinyGPT(2), technique := HoulsbyAdapters(4))
    assert (
        "HoulsbyAdapters: adapters of 4 hidden units after 4 linear layers: blocks.*.proj (2), blocks.*.mlp.2 (2); trains 592"
        in caplog.text.replace("blocks.*.mlp.*", "blocks.*.mlp.2")
    )
    assert technique.report() == {
        "trained": 4 * (2 * 4 * 16 + 16 + 4),
        "frozen": sum(p.numel() for p in TinyGPT(2).parameters()),
        "adapters": 4,
    }


def test_names_and_what_trains_beside() -> None:
    net = eff.apply(TinyGPT(2), HoulsbyAdapters(4, names=["blocks.1.proj"], also=["*norm*", "head"]))
    assert {n for n, p in net.named_parameters() if p.requires_grad} == {
        *(n for n, _ in net.named_parameters() if "norm" in n),
        "head.weight",
        *(f"blocks.1.proj.adapter.{n}" for n in ("down.weight", "down.bias", "up.weight", "up.bias")),
    }


def test_experts_in_one_parameter_are_left_in_words(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        eff.apply(families.module("qwen3_moe"), technique := HoulsbyAdapters(4))
    assert "experts.down_proj (4) (it belongs to no nn.Linear or Conv1D)" in caplog.text
    assert technique.report()["adapters"] == 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # of the plain encoder, which reads
def test_torchs_own_encoder_calls_what_it_would_read_in_evaluation(caplog: Any) -> None:
    """Its attention reads its last map, and is left; the feed-forward network's adapter counts in evaluation too."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    plain = nn.Sequential(nn.TransformerEncoder(layer, 2))
    x = torch.randn(2, 5, 16)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        net = eff.apply(copy.deepcopy(plain), HoulsbyAdapters(4), batch=(x,))
    assert "nn.MultiheadAttention reads it and does not call its layer" in caplog.text
    assert len(numbers_of(net)) == 2
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(x), plain.eval()(x), rtol=1e-4, atol=1e-5)
    learnt = shaken(net).train()(x)
    assert (learnt - plain.train()(x)).abs().max() > 1e-3
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(x), learnt, rtol=1e-4, atol=1e-5)


def test_beside_a_quantized_base() -> None:
    net = eff.apply(TinyGPT(2, dim=64), HoulsbyAdapters(4), QuantizedBase(4))
    rounded = {p for p, m in net.named_modules() if type(m).__name__ == "QuantizedLinear"}
    assert rounded == {
        f"blocks.{i}.{n}" for i in (0, 1) for n in ("qkv", "proj.base_layer", "mlp.0", "mlp.2.base_layer")
    }
    x = make_batch("tiny_gpt")["input_ids"]
    shaken(net)
    torch.testing.assert_close(net.eval()(x), eff.dequantize(net).eval()(x), rtol=1e-5, atol=1e-5)


# -- checkpoints, and the way out


def test_a_checkpoint_is_kilobytes_and_loads_beside_the_base(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = TinyGPT(4, dim=128)
    plain = copy.deepcopy(net)
    t = trainer(HoulsbyAdapters(2), max_steps=2)
    t.fit(net, loader("tiny_gpt"))
    t.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == {n for n, _ in net.named_parameters() if ".adapter." in n}
    assert sum(p.numel() for p in saved.values()) == 8 * (2 * 2 * 128 + 128 + 2)
    assert (tmp_path / "a.ckpt").stat().st_size < sum(p.numel() * 4 for p in net.parameters()) / 10
    other = eff.apply(plain, HoulsbyAdapters(2))
    missing, unexpected = other.load_state_dict(saved, strict=False)
    assert not unexpected and not any(".adapter." in name for name in missing)
    x = make_batch("tiny_gpt")["input_ids"]
    assert torch.equal(other.eval()(x), net.eval()(x))
    with pytest.raises(ValueError, match=f"HoulsbyAdapters replaced Linear at blocks.0.mlp.2.*{STAYS}"):
        eff.export(net)


# -- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bottleneck": 0}, r"bottleneck=0\): expected an integer >= 1"),
        ({"bottleneck": 2.0}, r"bottleneck=2.0\): expected an integer >= 1"),
        ({"names": "proj"}, r"names='proj'\): expected a list of dotted paths or patterns, or None"),
        ({"also": "head"}, r"also='head'\): expected a list of dotted paths"),
        ({"save": "none"}, r"save='none'\): expected 'adapter' or 'all'"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HoulsbyAdapters(**settings)


def test_what_cannot_be_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"bottleneck=64\): blocks.0.proj .* has only 16 outputs\. Give bottleneck=4"):
        eff.apply(TinyGPT(2), HoulsbyAdapters())
    with pytest.raises(ValueError, match=r"no linear layer of TinyGPT is named 'porj'; .*Nearest: .*proj"):
        eff.apply(TinyGPT(2), HoulsbyAdapters(4, names=["porj"]))
    with pytest.raises(
        ValueError, match=r"no residual branch of HuggingFace ends in nn.Linear or Conv1D\. .*conv2.weight"
    ):
        eff.apply(families.module("resnet"), HoulsbyAdapters(4))
    with pytest.raises(ValueError, match=r"found no residual branch.*names=\[\.\.\.\]"):
        eff.apply(classifier(), HoulsbyAdapters(4))


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "HoulsbyAdapters", {"bottleneck": 2, "names": ["0"]}, max_steps=3)


def test_a_run_is_that_of_apply() -> None:
    net, _ = fit("tiny_gpt", lambda: [HoulsbyAdapters(4)], max_steps=1)
    assert set(net.state_dict()) == set(eff.apply(TinyGPT(), HoulsbyAdapters(4)).state_dict())
