"""Capped logits: the rule, the head that is found in each family, ties that stay, and where it is refused."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM

import lightning_eff as eff
from lightning_eff import LogitSoftcap
from lightning_eff.model.layers.logit_softcap import CappedLinear, softcap
from tests import families
from tests.cases import Case, no_map
from tests.models import VOCAB, TinyGPT, flat, module
from tests.runs import checkpoints, fit, fit_yaml

CASES = {
    "LogitSoftcap": Case(
        active=lambda: LogitSoftcap(2.0),
        neutral=lambda: LogitSoftcap(math.inf),
        architecture=True,
        stays="LogitSoftcap replaced Linear at head: a plain head has no cap",
        on_classifier=lambda: LogitSoftcap(2.0, names=["head.1"]),
        lost=(no_map, "classifier", "Scaled has no linear layer that could be a head"),
    )
}


def test_logits_stay_between_the_caps_and_small_ones_what_they_are() -> None:
    z = torch.linspace(-200, 200, 4001, dtype=torch.float64, requires_grad=True)
    y = softcap(z, 15.0)
    expected = [15.0 * math.tanh(x / 15.0) for x in z.tolist()]
    torch.testing.assert_close(y, torch.tensor(expected, dtype=torch.float64))
    assert float(y.detach().abs().max()) <= 15.0 and bool((y.detach().diff() >= 0).all())
    (slope,) = torch.autograd.grad(y.sum(), z)
    torch.testing.assert_close(slope, 1.0 - (y.detach() / 15.0).square())
    small = torch.linspace(-0.1, 0.1, 11, dtype=torch.float64)
    torch.testing.assert_close(softcap(small, 15.0), small, rtol=2e-5, atol=0)


HEADS = {"gpt2": "lm_head", "qwen3": "lm_head", "modernbert": "decoder", "vit": "classifier", "resnet": "fc"}


@pytest.mark.parametrize("name", HEADS)
def test_the_head_of_every_family_is_found_and_its_logits_are_capped(name: str) -> None:
    plain, batch = families.module(name), families.batch(name, 2)
    with torch.no_grad():
        for key, p in plain.named_parameters():
            if "head" in key or "wte" in key or "embed" in key or "classifier" in key or "fc." in key:
                p.mul_(20)  # so that logits are large
    net = eff.apply(copy.deepcopy(plain), LogitSoftcap(1.0))
    (made,) = (path for path, m in net.named_modules() if isinstance(m, CappedLinear))
    assert made.rpartition(".")[2] == HEADS[name]
    seen: list[Tensor] = []
    plain.get_submodule(made).register_forward_hook(lambda m, args, y: seen.append(y) or torch.tanh(y))
    net.get_submodule(made).register_forward_hook(lambda m, args, y: seen.append(y))
    with torch.no_grad():
        expected, got = (m.eval().model(**batch).loss for m in (plain, net))
    torch.testing.assert_close(got, expected)
    raw, capped = seen
    assert raw.abs().max() > 1.5 > 1.0 >= capped.abs().max()


def test_ties_stay_and_gradients_go_through_both() -> None:
    net = eff.apply(families.module("gpt2"), LogitSoftcap(5.0))
    head, table = net.model.lm_head, net.model.transformer.wte
    assert isinstance(head, CappedLinear) and head.weight is table.weight
    assert sum(p is head.weight for p in net.parameters()) == 1


def test_a_models_own_cap_is_this_one() -> None:
    """Gemma 2 with its cap, and without it under the technique."""
    settings: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
    settings["attn_implementation"] = "eager"
    torch.manual_seed(0)
    own = Gemma2ForCausalLM(Gemma2Config(**settings, final_logit_softcapping=2.5)).eval()
    plain = Gemma2ForCausalLM(Gemma2Config(**settings, final_logit_softcapping=None)).eval()
    plain.load_state_dict(own.state_dict())
    with torch.no_grad():
        for p in (own.model.embed_tokens.weight, plain.model.embed_tokens.weight):
            p.mul_(30)
    net = eff.apply(plain, LogitSoftcap(2.5, names=["lm_head"]))
    ids = torch.randint(0, VOCAB, (2, 7))
    with torch.no_grad():
        torch.testing.assert_close(net(ids).logits, own(ids).logits)
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM caps its logits at 2.5 already"):
        eff.apply(own, LogitSoftcap())


def test_what_cannot_be_told_must_be_named() -> None:
    mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(
        ValueError,
        match=r"found no head in Sequential.*the layer whose outputs are logits .*candidates: 0 \(.*\), 2 \(",
    ):
        eff.apply(copy.deepcopy(mlp), LogitSoftcap())
    assert isinstance(eff.apply(copy.deepcopy(mlp), LogitSoftcap(names=["2"]))[2], CappedLinear)
    with pytest.raises(ValueError, match=r"it matches none of the 17 linear layers of TinyGPT; .*Nearest: head"):
        eff.apply(TinyGPT(), LogitSoftcap(names=["haed"]))

    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    with pytest.raises(
        ValueError, match=r"the head 0 \(4 to 3\) cannot be replaced: a subclass of nn.Linear with its own"
    ):
        eff.apply(nn.Sequential(Own(4, 3)), LogitSoftcap(names=["0"]))


class Aside(nn.Module):
    """Blocks and their stream alone; a head that another method calls, and behind it a map of hidden states."""

    def __init__(self, tied: bool, rows: int = 29) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))
        self.head = nn.Linear(8, rows, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.next = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize(
    ("tied", "rows", "way"),
    [
        (True, 29, r"Name it, such as LogitSoftcap\(names=\['head'\]\), which shares the weight of an embedding"),
        (False, 29, r"Name it, such as LogitSoftcap\(names=\['head'\]\), which has as many outputs as an embedding"),
        (
            False,
            5,
            r"Name the layer whose outputs are logits .*\[...\]\); candidates: head \(8 to 5\), next \(8 to 8\)\.",
        ),
    ],
)
def test_the_likely_head_is_offered_and_no_map_of_hidden_states(tied: bool, rows: int, way: str) -> None:
    with pytest.raises(
        ValueError, match=rf"expected one linear layer that computes the output of Aside, found none\. {way}"
    ):
        eff.apply(Aside(tied, rows), LogitSoftcap())
    net = eff.apply(Aside(tied, rows), LogitSoftcap(names=["head"]))
    assert isinstance(net.head, CappedLinear) and (net.head.weight is net.embed.weight) == tied


@pytest.mark.parametrize("cap", [0, -1.0, math.nan, True, "30"])
def test_other_caps_are_refused(cap: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a finite number > 0 or inf: the largest absolute value of a logit"):
        LogitSoftcap(cap)


def test_checkpoints_resume_to_the_bit_and_plain_modules_refuse_them(tmp_path: Path) -> None:
    net, _ = fit("tiny_gpt", lambda: [LogitSoftcap(2.0)], directory=tmp_path)
    again, t = fit("tiny_gpt", lambda: [LogitSoftcap(2.0)], resume=tmp_path / "step=4.ckpt")
    assert t.global_step == 12 and torch.equal(flat(net), flat(again))
    state = torch.load(checkpoints(tmp_path)[0], weights_only=True)["state_dict"]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*head.lightning_eff_mark"):
        module("tiny_gpt").load_state_dict(state)
    with pytest.raises(ValueError, match=r"head of the checkpoint is not logits capped at 3 \(its mark is 2\)"):
        eff.apply(TinyGPT(), LogitSoftcap(3.0)).load_state_dict(state)


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "LogitSoftcap", {"cap": 5, "names": ["head.1"]}, keeps_state=False, max_steps=3)
