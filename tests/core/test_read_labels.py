"""Tokens that are labels and the network's input at once: the network's own terms, as a router's, may depend on them."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_eff import LabelSmoothing
from lightning_eff._core.losses import LossNotVisible
from tests.models import VOCAB, HuggingFace, loader, trainer

D = 16


class Experts(nn.Module):
    """Two of four experts for each token, and a loss that balances their load."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        chances = self.router(flat).softmax(-1)
        weight, chosen = chances.topk(2)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, place, None])
        load = F.one_hot(chosen, 4).float().mean((0, 1))
        return out.view_as(x), 4 * (load * chances.mean(0)).sum()


class MixtureLM(pl.LightningModule):
    """A language model of experts, which predicts each next token of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.labels = nn.Embedding(VOCAB, D), nn.Embedding(VOCAB, D)
        self.layers, self.head = nn.ModuleList(Experts() for _ in range(2)), nn.Linear(D, VOCAB)

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, balance = self.embed(ids), ids.new_zeros((), dtype=torch.float32)
        for layer in self.layers:
            more, one = layer(x + x.cumsum(1) / 10)
            x, balance = x + more, balance + one
        return x, balance

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        hidden, balance = self.read(ids)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * balance

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def fit(module: pl.LightningModule) -> LabelSmoothing:
    technique = LabelSmoothing(0.1)
    trainer(technique, max_steps=2).fit(module, loader("gpt2"))
    return technique


def test_a_balancing_loss_on_routed_tokens_is_the_networks_own() -> None:
    assert fit(MixtureLM()).report()["calls"] == 1


@pytest.mark.parametrize("router_loss", [True, False])
def test_mixtral_is_smoothed(router_loss: bool) -> None:
    settings: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        output_router_logits=router_loss,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        **settings,
    )
    assert fit(HuggingFace(MixtralForCausalLM(config).train())).report()["calls"] == 1


def test_labels_that_the_network_does_not_read_are_refused() -> None:
    class Centred(MixtureLM):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            ids, labels = batch["input_ids"], batch["labels"]
            hidden, balance = self.read(ids.roll(1, 1))
            loss = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
            return loss + 0.01 * balance + (hidden - self.labels(labels)).square().mean()

    with pytest.raises(LossNotVisible, match="torch's 'embedding', and not only"):
        fit(Centred())


@pytest.mark.parametrize("by", ["value", "class"])
def test_another_way_of_tokens_that_are_read_is_refused(by: str) -> None:
    class SideOutputs(MixtureLM):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            ids = batch["input_ids"]
            loss = super().training_step(batch, batch_idx)
            hidden, _ = self.read(ids)
            if by == "value":
                return loss + (hidden.mean(-1) - ids / VOCAB).square().mean()
            return loss + (hidden.mean(1) - self.labels(ids[:, -1])).square().mean()

    with pytest.raises(LossNotVisible, match="and not only"):
        fit(SideOutputs())
