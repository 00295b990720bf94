"""What a token may not see changes nothing: later tokens under causal attention, and what stands at padding.

Every technique that touches attention or tokens trains a small transformer whose learning rate is 0, so that weights
stay. The first batch is the same in both runs, because some techniques learn from it. Then the tokens that may not be
seen change, and outputs at the other places must stay, in the training step and in validation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_eff
from lightning_eff import (
    A3Attention,
    DOTAAttention,
    ELSAAttention,
    Linformer,
    MemoryEfficientAttention,
    Reformer,
    SangerAttention,
)
from tests.cases import CASES
from tests.models import trainer
from tests.selection import share_of

LENGTH, REAL, VOCAB = 24, 15, 31
ROOMS = ("model.attention", "model.layers", "model.shortcuts", "data.tokens", "data.curriculum", "model.adapters")
KINDS = ("causal", "padded", "causal and padded")


class Block(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.act, self.down = nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal and mask is None)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Net(pl.LightningModule):
    """Keeps the outputs of the last training step and the last validation step, (B, T, VOCAB)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.token, self.position = nn.Embedding(VOCAB, 16), nn.Parameter(0.1 * torch.randn(1, LENGTH, 16))
        self.blocks = nn.ModuleList(Block("causal" in kind) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, VOCAB)
        self.outputs: dict[str, Tensor] = {}

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.token(ids) + self.position[:, : ids.shape[1]]
        mask = None
        if "padded" in self.kind:
            mask = attention_mask.bool()[:, None, None]
            if "causal" in self.kind:
                each = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool)
                mask = mask & each.tril() | each.tril().triu()  # padding sees itself
        for block in self.blocks:
            h = block(h, mask)
        return self.head(self.norm(h))

    def _run(self, batch: dict[str, Tensor], stage: str) -> Tensor:
        logits = self(batch["input_ids"], batch["attention_mask"])
        self.outputs[stage] = logits.detach().clone()
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self._run(batch, "training")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._run(batch, "validation")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def hidden(kind: str) -> slice:
    """The places of tokens that others may not see. Padding stands in front where attention is causal too."""
    return slice(0, LENGTH - REAL) if kind == "causal and padded" else slice(REAL, LENGTH)


def samples(kind: str, *, changed: bool) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCAB, (4, LENGTH), generator=g)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, hidden(kind)] = -100
    if "padded" in kind:
        mask[:, hidden(kind)] = 0
    if changed:
        ids[:, hidden(kind)] = (ids[:, hidden(kind)] + 6) % (VOCAB - 1) + 1
    return [{"input_ids": i, "attention_mask": m, "labels": y} for i, m, y in zip(ids, mask, labels, strict=True)]


def seen(make: Callable[[], Any], kind: str, *, changed: bool) -> dict[str, Tensor]:
    """The outputs at the places that must not change, by stage."""
    pl.seed_everything(3, verbose=False)
    net, second = Net(kind), samples(kind, changed=changed)
    train, val = DataLoader(samples(kind, changed=False) + second, batch_size=4), DataLoader(second, batch_size=4)
    trainer(make(), max_steps=2, limit_val_batches=1).fit(net, train, val)
    keep = torch.ones(LENGTH, dtype=torch.bool)
    keep[hidden(kind)] = False
    outputs = {
        stage: z.reshape(4, -1, VOCAB) for stage, z in net.outputs.items()
    }  # shorter rows are put together again
    return {stage: z[:, keep[: z.shape[1]]] for stage, z in outputs.items()}


#: Settings under which more keys are left out than in a technique's case, or that this network needs.
MORE: dict[str, Callable[[], Any]] = {
    "A3Attention, aggressive": partial(A3Attention, search=0.125, cut=0.1),
    "DOTAAttention, few keys": partial(DOTAAttention, share=0.1),
    "ELSAAttention, coarse": partial(ELSAAttention, p=4.0, bits=8),
    "ELSAAttention, fine": partial(ELSAAttention, p=0.5, bits=64),
    "Linformer, of this length": partial(Linformer, rank=8, length=LENGTH),
    "MemoryEfficientAttention": MemoryEfficientAttention,
    "Reformer, two buckets": partial(Reformer, buckets=2),
    "Reformer, many buckets": partial(Reformer, buckets=12, rounds=3),
    "SangerAttention, coarse": partial(SangerAttention, threshold=0.04, bits=2),
    "SangerAttention, fine": partial(SangerAttention, threshold=0.06, bits=8),
}
REGROUPS = {"TokenBudgetBatches"}  # batches hold other samples, so outputs cannot be compared
ROWS = {
    **{
        name: case.active
        for name, case in CASES.items()
        if getattr(lightning_eff, name).__module__.removeprefix("lightning_eff.").startswith(ROOMS)
        and name not in REGROUPS
    },
    **MORE,
}
#: What a technique's docstring says of itself, by name, kind and stage.
DOCUMENTED = {
    ("TokenDropping", "causal", "training"): "ids of the whole sequence decide which tokens skip blocks",
    ("NgramEmbedding", "causal and padded", "training"): "an n-gram reaches into padding in front of it",
    ("NgramEmbedding", "causal and padded", "validation"): "an n-gram reaches into padding in front of it",
    ("SparseUpcycling", "causal and padded", "training"): "padding in front takes places of experts",
    ("SparseUpcycling", "causal and padded", "validation"): "padding in front takes places of experts",
}
#: What a refusal says, in part, where this network is none for the technique.
REFUSALS = (
    "found no images in the batch",
    "is causal, and",
    "that depend on later tokens",
    "has no BatchNorm",
    "has no convolution",
    "found no convolution",
    "but its projections are for",
    "holds no nn.Conv",
    "holds no encoder-decoder",
    "matches none of the",
    "means none of the",
    "were not seen to be run on tokens",
    "fewer than the",
    "so none is masked",
    "of an image",
    "its maps on",
    "merged tokens have",
    "runs along the text",
    "contains more than padding and causality",
    "it is pre-norm already",
)


def _kinds(name: str) -> list[Any]:
    """`make test` tries one of the kinds, by the row's name, and `make test-full` all."""
    tried = KINDS[share_of(len(KINDS), name)]
    return [pytest.param(name, kind, marks=() if kind == tried else pytest.mark.full) for kind in KINDS]


@pytest.mark.parametrize(("name", "kind"), [one for name in sorted(ROWS) for one in _kinds(name)])
def test_what_may_not_be_seen_changes_no_output(name: str, kind: str) -> None:
    try:
        before = seen(ROWS[name], kind, changed=False)
    except ValueError as e:
        assert any(text in str(e) for text in REFUSALS) or pytest.fail(f"refused otherwise: {e}")
        return
    after = seen(ROWS[name], kind, changed=True)
    assert set(before) == {"training", "validation"}
    for stage, outputs in before.items():
        moved = float((outputs - after[stage]).abs().max())
        if (name, kind, stage) in DOCUMENTED:
            assert moved > 1e-3, "this is no exception any more"
        else:
            assert moved < 1e-5, f"outputs of size {float(outputs.abs().max()):.2f} moved by {moved:.2g} in {stage}"
