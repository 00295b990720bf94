"""Fastformer: permuted with its tokens, of identical ones each is the global; against a reference token by token."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff import Fastformer
from lightning_eff.model.attention.fastformer import Fastformed, additive_attention, pooled
from tests.cases import Case, classifier
from tests.model.attention.nets import Net
from tests.models import hugging_face, loader, make_batch, trainer
from tests.runs import fit_yaml

CAUSAL = "it is causal, and global queries and keys would show later tokens to earlier ones"
CASES = {
    "Fastformer": Case(
        active=lambda: Fastformer(),
        neutral=lambda: Fastformer(active=False),
        model="vit",
        architecture=True,
        stays="attention to single tokens computes something else",
        refuses={
            **dict.fromkeys(("tiny_gpt", "gpt2", "llama", "translator", "padded", "t5"), CAUSAL),
            "classifier": "found no attention in TinyClassifier",
        },
        lost=(classifier, "classifier", "found no attention in TinyClassifier"),
    )
}


def numbers(n: int = 7) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 4, generator=g, dtype=torch.float64) for _ in range(3))
    w_q, w_k = (torch.randn(3, 4, generator=g, dtype=torch.float64) for _ in range(2))
    return q, k, v, w_q, w_k, torch.randn(12, 12, generator=g, dtype=torch.float64)


def test_it_is_the_paper_s_sum_token_by_token() -> None:
    q, k, v, w_q, w_k, mix = numbers()
    got = additive_attention(q, k, v, w_q, w_k, mix)
    for b in range(2):
        u = torch.zeros(7, 3, 4, dtype=torch.float64)
        for h in range(3):
            a = [math.exp(float(w_q[h] @ q[b, h, i]) / 2) for i in range(7)]
            global_query = sum((a[i] / sum(a) * q[b, h, i] for i in range(7)), torch.zeros(4))
            p = [global_query * k[b, h, i] for i in range(7)]
            c = [math.exp(float(w_k[h] @ p[i]) / 2) for i in range(7)]
            global_key = sum((c[i] / sum(c) * p[i] for i in range(7)), torch.zeros(4))
            for i in range(7):
                u[i, h] = global_key * v[b, h, i]
        for i in range(7):
            torch.testing.assert_close(got[b, :, i].flatten(), mix @ u[i].flatten() + q[b, :, i].flatten())


def test_permuted_tokens_give_permuted_outputs_and_of_identical_tokens_each_is_the_global_one() -> None:
    q, k, v, w_q, w_k, mix = numbers()
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    permuted = additive_attention(q[:, :, order], k[:, :, order], v[:, :, order], w_q, w_k, mix)
    torch.testing.assert_close(permuted, additive_attention(q, k, v, w_q, w_k, mix)[:, :, order])
    same = q[:, :, :1].expand(-1, -1, 7, -1)
    torch.testing.assert_close(pooled(same, w_q, None), q[:, :, :1])
    hidden = torch.tensor([False] * 5 + [True] * 2).expand(2, 1, 7)
    torch.testing.assert_close(pooled(q, w_q, hidden), pooled(q[:, :, :5], w_q, None))


@pytest.mark.parametrize("name", ["vit", "bert", "plain", "heads in front", "module", "encoder"])
def test_modules_are_permuted_with_their_tokens_and_padding_has_no_part(name: str) -> None:
    """Without positions: a second argument of blocks that attend alone."""
    torch.manual_seed(0)
    net: Any
    batch: Any
    if name in ("vit", "bert"):
        net = hugging_face(name, num_layers=2)
        batch = make_batch(name, 2)
    else:
        net, batch = Net(name), torch.randint(0, 61, (2, 13))
    eff.apply(net, Fastformer()).double().eval()
    found = [m for m in net.modules() if isinstance(m, Fastformed)]
    assert len(found) == 2
    with torch.no_grad():
        for m in found:
            for p in (m.fastformer_query, m.fastformer_key, m.fastformer_mix):  # type: ignore[union-attr]
                p.normal_()
    if name == "vit":
        assert net.model(**{k: v.double() if v.is_floating_point() else v for k, v in batch.items()}).loss.isfinite()
    elif name == "bert":
        there = torch.arange(32) < torch.tensor([[32], [20]])
        batch["attention_mask"] = there.long()
        first = net.model(**batch).logits[there]
        batch["input_ids"] = batch["input_ids"].where(there, 5)
        torch.testing.assert_close(net.model(**batch).logits[there], first, rtol=1e-9, atol=1e-9)
    else:
        order = torch.randperm(13)
        torch.testing.assert_close(net(batch[:, order]), net(batch)[:, order], rtol=1e-9, atol=1e-9)
        assert net(batch).std(1).min() > 0


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match=f"Fastformer: the attention of blocks.0 cannot be replaced: {CAUSAL}"):
        eff.apply(Net("causal"), Fastformer())
    with pytest.raises(ValueError, match="it drops 10% of its weights, and Fastformer has none"):
        trainer(Fastformer(), max_steps=2).fit(Net("plain", 0.1), loader("tiny_gpt"))
    with pytest.raises(ValueError, match="it has 5 queries and 3 keys"):
        eff.apply(nn.Sequential(Crossing()), Fastformer(), batch=torch.randn(2, 5, 8))
    with pytest.raises(ValueError, match=r"active=2\): expected True or False"):
        Fastformer(active=2)  # type: ignore[arg-type]


class Crossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x[:, :3], x[:, :3], need_weights=False)[0]


def test_in_a_config(tmp_path: Path) -> None:
    net = "tests.model.attention.nets.Net"
    fit_yaml(tmp_path, "Fastformer", {}, model=net, data="Sequences", max_steps=2, keeps_state=False)
