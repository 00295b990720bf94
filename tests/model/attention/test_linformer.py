"""Linformer: with as many mixtures as tokens, each a token, it is softmax attention; and what it refuses."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff import Linformer
from lightning_eff.model.attention.linformer import KEYS, VALUES, Linformed, projected
from tests.cases import Case, classifier
from tests.model.attention.nets import Net, reference
from tests.models import hugging_face, loader, make_batch, module, trainer
from tests.runs import fit_yaml

CAUSAL = "it is causal, and mixtures of keys would show later tokens to earlier queries"
CASES = {
    "Linformer": Case(
        active=lambda: Linformer(rank=4),
        neutral=lambda: Linformer(rank=0),
        model="vit",
        architecture=True,
        stays="attention to all keys computes something else",
        refuses={
            **dict.fromkeys(("tiny_gpt", "gpt2", "llama", "translator", "padded", "t5"), CAUSAL),
            "bert": "give length=32",
            "classifier": "found no attention in TinyClassifier",
        },
        lost=(classifier, "classifier", "found no attention in TinyClassifier"),
    )
}


def made(net: nn.Module) -> list[Linformed]:
    return [m for m in net.modules() if isinstance(m, Linformed)]


@torch.no_grad()
def be_exact(net: nn.Module) -> None:
    """Each mixture a token of its own, in another order."""
    for m in made(net):
        for name in (KEYS, VALUES):
            p = m.get_parameter(name)
            p.copy_(torch.eye(len(p), dtype=p.dtype).flip(0))


def applied(name: str, rank: int | None = None) -> tuple[nn.Module, nn.Module, Any]:
    """A module in float64, the same with Linformer, and a batch."""
    torch.manual_seed(0)
    if name in ("vit", "bert"):
        plain: nn.Module = hugging_face(name, num_layers=2).double()
        batch = {k: v.double() if v.is_floating_point() else v for k, v in make_batch(name, 2).items()}
        tokens = 17 if name == "vit" else 32
    else:
        plain, tokens = Net(name).double(), 13
        batch = torch.randint(0, 61, (2, tokens))
    plain.eval()
    return plain, eff.apply(copy.deepcopy(plain), Linformer(rank=rank or tokens, length=tokens)), batch


def out(net: Any, batch: Any) -> Tensor:
    return net.model(**batch).logits if isinstance(batch, dict) else net(batch)


@pytest.mark.parametrize("name", ["vit", "bert", "plain", "heads in front", "module", "encoder"])
def test_with_as_many_mixtures_as_tokens_it_is_exact(name: str) -> None:
    plain, net, batch = applied(name)
    assert len(made(net)) == 2
    wanted = out(plain, batch)
    assert not torch.allclose(out(net, batch), wanted)
    be_exact(net)
    torch.testing.assert_close(out(net, batch), wanted, rtol=1e-9, atol=1e-9)
    if name == "bert":  # padding has no part in what is exact
        batch["attention_mask"] = (torch.arange(32) < torch.tensor([[32], [20]])).long()
        there = torch.arange(32) < torch.tensor([[32], [20]])
        first = out(net, batch)[there]
        batch["input_ids"] = batch["input_ids"].where(there, 5)
        torch.testing.assert_close(out(net, batch)[there], first, rtol=1e-9, atol=1e-9)


def test_the_rule() -> None:
    torch.manual_seed(0)
    x, maps = torch.randn(2, 3, 7, 5, dtype=torch.float64), torch.randn(4, 7, dtype=torch.float64)
    found = projected(x, maps, torch.arange(7).expand(2, 1, 7) < 6)
    wanted = torch.stack([sum((maps[k, i] * x[:, :, i] for i in range(6)), torch.zeros(2, 3, 5)) for k in range(4)], 2)
    torch.testing.assert_close(found, wanted)
    _, net, _ = applied("plain", rank=3)
    (m, *_) = made(net)
    seen: list[tuple[Tensor, ...]] = []
    own: Any = m
    own.out.register_forward_pre_hook(lambda m, args: seen.append(args))
    own(y := torch.randn(2, 13, 16, dtype=torch.float64))
    q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in own.qkv(own.norm(y)).chunk(3, -1))
    e, f = m.get_parameter(KEYS), m.get_parameter(VALUES)
    expected = reference(q, e @ k, f @ v, None, causal=False, scale=8**-0.5)
    torch.testing.assert_close(seen[0][0], expected.transpose(1, 2).flatten(2))


def test_maps_begin_with_variance_one_over_k_are_of_the_run_s_seed_and_copies_compute_the_same() -> None:
    nets = [eff.apply(Net("plain"), Linformer(rank=64, length=2000)) for _ in range(2)]
    p = [made(net)[1].get_parameter(KEYS) for net in nets]
    assert torch.equal(p[0], p[1]) and float(p[0].detach().std()) == pytest.approx(1 / 8, rel=0.02)
    _, net, batch = applied("plain", rank=3)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(out(other, batch), out(net, batch))
    net.load_state_dict(eff.apply(Net("plain").double(), Linformer(rank=3, length=13)).state_dict())
    with pytest.raises(RuntimeError, match="linformer_keys"):
        Net("plain").load_state_dict(net.state_dict())


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match=f"Linformer: the attention of blocks.0 cannot be replaced: {CAUSAL}"):
        eff.apply(Net("causal"), Linformer(rank=2))
    with pytest.raises(ValueError, match=r"Linformer\(rank=99\): .* attends to only 17 tokens.*Use rank=17 or less"):
        eff.apply(module("vit"), Linformer(rank=99))
    net = eff.apply(Net("plain"), Linformer(rank=2, length=13))
    with pytest.raises(ValueError, match=r"it has 12 tokens, but its projections are for 13: give length=12"):
        net(torch.randint(0, 61, (2, 12)))
    with pytest.raises(ValueError, match="it returns attention weights"):
        eff.apply(Net("module with weights"), Linformer(rank=2))
    with pytest.raises(ValueError, match=r"found no attention in Net: .* ran without attention"):
        eff.apply(Net("by hand"), Linformer(rank=2))
    for settings in ({"rank": -1}, {"rank": 2.0}, {"length": 0}):
        with pytest.raises(ValueError, match=r"Linformer\(.*expected"):
            Linformer(**settings)


def test_maps_are_trained() -> None:
    net: Any = Net("module")
    trainer(Linformer(rank=4, length=32), max_steps=2).fit(net, loader("tiny_gpt"))
    before = eff.apply(Net("module"), Linformer(rank=4, length=32))
    for a, b in zip(made(net), made(before), strict=True):
        assert not any(torch.equal(a.get_parameter(n), b.get_parameter(n)) for n in (KEYS, VALUES))


def test_in_a_config(tmp_path: Path) -> None:
    settings = {"rank": 4, "length": 32}
    fit_yaml(
        tmp_path,
        "Linformer",
        settings,
        model="tests.model.attention.nets.Net",
        data="Sequences",
        max_steps=2,
        keeps_state=False,
    )
