"""QuantizedBase against the papers' tables by hand; with LoRA it is QLoRA: what trains, what it takes, and the way out."""

import copy
import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff import BitFit, LoRA, QuantizedBase
from lightning_eff.model.adapters._quantized import rounding
from tests import families
from tests.cases import Case, no_map
from tests.models import TinyGPT, loader, make_batch, trainer
from tests.runs import fit_yaml, resume_from_every_step

CASES = {
    "QuantizedBase": Case(
        active=lambda: QuantizedBase(4, names=["*.[0-9].[imo]*.*"]),  # of most feed-forward networks
        on_classifier=lambda: QuantizedBase(4, names=["blocks.*"]),
        neutral=lambda: QuantizedBase(names=[]),
        architecture=True,
        stays="cannot be merged into them; first call lightning_eff.dequantize",
        lost=(no_map, "classifier", "none of the 0 linear layers"),
    )
}
# peft asks transformers' models for it by the name of before
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
#: Dettmers et al. 2023, appendix E.
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)


def by_hand(w: Tensor, bits: int) -> Tensor:
    """NF4 in blocks of 64 with exact scales, or int8 by rows of what is 16 bits long."""
    if bits == 8:
        w = w.half().float()
        c = w.abs().amax(dim=1, keepdim=True)
        return (w * 127 / c).round() * c / 127
    flat = nn.functional.pad(w.flatten(), (0, -w.numel() % 64)).view(-1, 64)
    c = flat.abs().amax(dim=1, keepdim=True)
    return (NF4[(flat[..., None] / c[..., None] - NF4).abs().argmin(-1)] * c).flatten()[: w.numel()].view_as(w)


def qlora(net: Any, bits: Any = 4, **settings: Any) -> Any:
    return eff.apply(net, QuantizedBase(bits), LoRA(rank=2, **settings))


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_rounded_as_by_hand_and_gradients_are_those_of_the_rounded(bits: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 5))
    net: Any = eff.apply(copy.deepcopy(plain), QuantizedBase(bits, names=["0", "2"]))  # pyright: ignore[reportArgumentType]
    for at in (0, 2):
        w: Any = plain[at].weight.detach()  # pyright: ignore[reportCallIssue]
        # NF4's scales are in 8 bits themselves
        torch.testing.assert_close(net[at].weight, by_hand(w, bits), rtol=0.03 if bits == 4 else 1e-6, atol=1e-7)
        assert 0 < (net[at].weight - w).abs().max() < (0.2 if bits == 4 else 0.005) * w.abs().max()
    same: Any = eff.dequantize(net)
    assert [type(m) for m in same] == [type(m) for m in plain]
    x = torch.randn(3, 7, 48, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    net(x).square().sum().backward()
    same(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(net[0].bias.grad, same[0].bias.grad)
    assert torch.equal(net(x), same(x))
    again = eff.apply(copy.deepcopy(same), QuantizedBase(12 - bits, names=["0"]))  # pyright: ignore[reportArgumentType]
    assert again[0].bits == 12 - bits and not hasattr(again[2], "bits")  # pyright: ignore[reportIndexIssue]
    with torch.autocast("cpu", torch.bfloat16):
        half, other = net(x), same(y)
        torch.testing.assert_close(half, other)
        for at in (torch.autograd.grad(half.float().sum(), x), torch.autograd.grad(other.float().sum(), y)):
            assert at[0].dtype == torch.float32
    low = net.to(torch.bfloat16)  # the scales stay whole
    assert low[0].weight.dtype == torch.bfloat16
    assert torch.equal(low[0].weight, same[0].weight.to(torch.bfloat16))
    plain_again: Any = eff.dequantize(low)
    assert {p.dtype for p in plain_again.parameters()} == {torch.bfloat16}
    z = x.detach().to(torch.bfloat16)
    assert torch.equal(plain_again(z), low(z))


def test_int8_weights_have_the_bits_of_bitsandbytes() -> None:
    weight = torch.randn(33, 20)
    stored = rounding.quantized(weight, 8)
    scales = stored["scales"].view(torch.float32)
    theirs = rounding.bnb.int8_vectorwise_dequant(stored["codes"].view(torch.int8), scales)
    assert torch.equal(rounding.dequantized(stored, 8, (33, 20), torch.float32), theirs)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_map_of_zeros_and_of_odd_sizes(bits: int) -> None:
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    nn.init.zeros_(plain[0].weight)  # pyright: ignore[reportArgumentType]
    net: Any = eff.apply(plain, QuantizedBase(bits, names=["*"]))  # pyright: ignore[reportArgumentType]
    assert torch.equal(net[0].weight, torch.zeros(7, 5)) and net[1].weight.shape == (3, 7)
    assert net(torch.randn(2, 5)).isfinite().all()


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "modernbert", "vit", "t5", "qwen3_moe"])
def test_qlora_on_models_of_others(name: str) -> None:
    """Bases are rounded, heads and embeddings are not; merged is unmerged once the base is dequantised."""
    plain = families.module(name)
    net = qlora(copy.deepcopy(plain))
    layers = {p: m for p, m in net.named_modules() if type(m).__name__ == "QuantizedLinear"}
    assert layers and all(p.endswith(".base_layer") for p in layers)
    assert len(layers) == sum(hasattr(m, "lora_A") for m in net.modules())
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    with pytest.raises(ValueError, match=r"QuantizedBase replaced .* first call lightning_eff.dequantize"):
        eff.export(net)
    whole = eff.export(eff.dequantize(net))
    assert whole.state_dict().keys() == plain.state_dict().keys()
    assert all(p.requires_grad for p in whole.parameters())
    batch = families.batch(name, 2)
    with torch.no_grad():
        torch.testing.assert_close(
            whole.model.eval()(**batch).logits, net.model.eval()(**batch).logits, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("bits", [4, 8])
def test_after_a_run_in_bfloat16_the_plain_maps_are_bfloat16(bits: Any) -> None:
    net = qlora(families.module("gpt2"), bits).to(torch.bfloat16)
    rounded = eff.dequantize(net)
    merged = eff.export(rounded)
    assert {p.dtype for p in (*rounded.parameters(), *merged.parameters())} == {torch.bfloat16}
    batch = families.batch("gpt2", 2)
    with torch.no_grad():
        wanted = net.model.eval()(**batch).logits
        assert torch.equal(rounded.model.eval()(**batch).logits, wanted)
        torch.testing.assert_close(merged.model.eval()(**batch).logits, wanted, rtol=0.02, atol=0.02)


def test_peft_reads_what_was_learnt_beside_the_rounded_weights(tmp_path: Path) -> None:
    """Given the rounded weights in plain maps, and the folder, peft computes what QLoRA does."""
    plain = families.module("gpt2")
    net = qlora(copy.deepcopy(plain))
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    rounded = eff.dequantize(eff.apply(copy.deepcopy(plain), QuantizedBase(names=["transformer.h.*"])))
    folder = eff.export_adapter(net.model, tmp_path)
    loaded: Any = peft.PeftModel.from_pretrained(rounded.model, folder)  # pyright: ignore[reportArgumentType]
    batch = families.batch("gpt2", 2)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.eval()(**batch).logits, net.model.eval()(**batch).logits, rtol=1e-5, atol=1e-5
        )


def test_what_trains_what_it_takes_and_that_the_plain_weights_are_gone() -> None:
    net = TinyGPT(2, dim=64)
    weights = [weakref.ref(m.qkv.weight) for m in net.blocks]  # pyright: ignore[reportOptionalIterable, reportGeneralTypeIssues, reportArgumentType]
    alive: list[int] = []

    class Look(families.Losses):
        def on_train_batch_end(self, *args: Any) -> None:
            gc.collect()
            alive.append(sum(w() is not None for w in weights))

    technique = QuantizedBase(4)
    t = trainer(LoRA(rank=2), technique, Look(), max_steps=2)
    t.fit(net, loader("tiny_gpt"))
    assert alive == [0, 0]
    held = {id(p) for group in t.optimizers[0].param_groups for p in group["params"]}
    assert held == {id(p) for n, p in net.named_parameters() if "lora_" in n}
    numbers = 2 * 12 * 64 * 64
    told = technique.report()
    assert told["maps"] == 8
    assert (
        told["base_bytes"]
        == sum(b.nbytes for n, b in net.named_buffers() if ".base_layer." in n)
        <= numbers * (0.5 + 1 / 64 + 4 / 64 / 256) + 8 * 8
    )
    assert told["saved_bytes"] == 4 * numbers - told["base_bytes"]  # pyright: ignore[reportOperatorIssue]


def test_nothing_is_kept_for_the_backward_pass_but_codes() -> None:
    net = eff.apply(nn.Sequential(nn.Linear(64, 64)), QuantizedBase(names=["0"]))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        net(torch.randn(2, 64, requires_grad=True)).sum()
    assert saved == []


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # which the compiler does
@pytest.mark.parametrize("bits", [4, 8])
def test_it_compiles_in_one_piece(bits: Any) -> None:
    net = eff.apply(nn.Sequential(nn.Linear(16, 16)), QuantizedBase(bits, names=["0"]))
    x = torch.randn(2, 16, requires_grad=True)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), net(x))
    of = [torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, net)]
    torch.testing.assert_close(of[0], of[1])


@pytest.mark.parametrize(("bits", "save"), [(4, "adapter"), (8, "all")])
def test_qlora_resumes_exactly_and_either_order_is_the_same(bits: Any, save: Any, tmp_path: Path) -> None:
    assert (
        resume_from_every_step("tiny_gpt", lambda: [LoRA(rank=2, save=save), QuantizedBase(bits)], tmp_path / "a") == {}
    )
    ends: list[Any] = []
    for order in (1, -1):
        torch.manual_seed(0)
        t = trainer(*[QuantizedBase(bits), LoRA(rank=2, save=save)][::order], max_steps=2)
        t.fit(net := TinyGPT(2), loader("tiny_gpt", shuffle=False))
        t.save_checkpoint(tmp_path / f"{order}.ckpt")
        ends.append(net.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ends[0].values(), ends[1].values(), strict=True))
    held = torch.load(tmp_path / "1.ckpt", weights_only=True)["state_dict"]
    if save == "adapter":
        assert held and all("lora_" in key for key in held)
    else:
        qlora(TinyGPT(2), bits, save="all").load_state_dict(held, strict=True)


def test_dora_and_biases_stand_beside() -> None:
    net = qlora(TinyGPT(2), dora=True)
    x = make_batch("tiny_gpt")["input_ids"]
    torch.testing.assert_close(net.eval()(x), eff.dequantize(net).eval()(x), rtol=1e-5, atol=1e-5)
    biases = eff.apply(TinyGPT(2), QuantizedBase(8), BitFit())
    assert {n.rpartition(".")[2] for n, p in biases.named_parameters() if p.requires_grad} == {"bias"}
    biases(x).sum().backward()
    assert all(p.grad is not None for p in biases.parameters() if p.requires_grad)


def test_what_trains_is_not_rounded() -> None:
    net = eff.apply(TinyGPT(2), BitFit(also=["blocks.0.qkv"]), QuantizedBase())
    names = [p for p, m in net.named_modules() if type(m).__name__ == "QuantizedLinear"]
    assert "blocks.0.qkv" not in names and len(names) == 7


def test_names_do_not_mean_the_factors_beside_a_map() -> None:
    net = eff.apply(TinyGPT(2), QuantizedBase(names=["blocks.*"]), LoRA(rank=2))
    names = [p for p, m in net.named_modules() if type(m).__name__ == "QuantizedLinear"]
    assert len(names) == 8 and all(p.endswith(".base_layer") for p in names)
    assert sum(p.requires_grad for n, p in net.named_parameters() if ".lora_" in n) == 16


def test_what_cannot_be_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"bits=3\): expected 4 or 8: the number of bits per weight"):
        QuantizedBase(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"names='qkv'\): expected a list of dotted paths or patterns, or None"):
        QuantizedBase(names="qkv")
    with pytest.raises(
        ValueError, match=r"TinyGPT has no frozen linear layer that can be rounded.*Add an adapter such as LoRA\(\)"
    ):
        eff.apply(TinyGPT(2), QuantizedBase())
    with pytest.raises(ValueError, match=r"none of the 9 linear layers of TinyGPT.*Nearest: .*qkv"):
        eff.apply(TinyGPT(2), QuantizedBase(names=["qvk"]))
    with pytest.raises(ValueError, match="nothing of TinyGPT is left to train"):
        eff.apply(TinyGPT(2).requires_grad_(False), QuantizedBase())
    with pytest.raises(ValueError, match=r"out_proj .* cannot be rounded: its weight is used by nn.MultiheadAttention"):
        eff.apply(nn.Sequential(nn.MultiheadAttention(8, 2)), QuantizedBase(names=["out_proj"]))
    with pytest.raises(ValueError, match=r"lm_head .* rounded: it shares its weight with model.transformer.wte"):
        eff.apply(families.module("gpt2"), QuantizedBase(names=["lm_head"]))
    large = nn.Sequential(nn.Linear(4, 4))
    nn.init.constant_(large[0].weight, 1e5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"bits=8\): the weight of 0 .* too large for float16"):
        eff.apply(large, QuantizedBase(8, names=["0"]))
    with pytest.raises(ValueError, match="the base weight is quantised"):
        qlora(TinyGPT(1)).blocks[0].qkv.merge()
    with pytest.raises(ValueError, match=r"names=\['\*out_proj'\]\): none of these layers .* nn.MultiheadAttention"):
        eff.apply(nn.Sequential(nn.MultiheadAttention(8, 2)), QuantizedBase(names=["*out_proj"]))
    with pytest.raises(ValueError, match="no linear layer of TinyGPT is quantised"):
        eff.dequantize(TinyGPT(2))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        ImportError, match=r"QuantizedBase: cannot import bitsandbytes.*pip install .*\.\[bitsandbytes\]"
    ):
        QuantizedBase()


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "QuantizedBase", {"bits": 8, "names": ["0"]}, keeps_state=False, max_steps=3)
