"""The ledger of compressed activations, and how many bytes fewer are held for the usual models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import GPT2LMHeadModel

from lightning_eff.memory._compression.engine import Engine
from tests.memory.test_act_engine import _gpt2_config
from tests.models import hugging_face, make_batch


def _plain_bytes(loss: Callable[[], Tensor], alive: list[Tensor]) -> int:
    """Bytes of the distinct storages that plain autograd saves: nothing is freed while they are counted."""
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.detach())
        return x.detach()

    with saved_tensors_hooks(pack, lambda x: x):
        loss()
    there = {t.untyped_storage().data_ptr() for t in alive}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved if t.numel()}
    return sum(size for at, size in storages.items() if at not in there)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_the_ledger_counts_what_plain_autograd_would_hold(name: str) -> None:
    net, batch = hugging_face(name, num_layers=2, dropout=0.1), make_batch(name)
    engine = Engine(net, bits=4)
    with engine.forward(0, batch):
        net.training_step(batch, 0)
    ledger = engine.ledger
    assert ledger.saved_bytes == ledger.exact_bytes == 0  # the graph is gone by the end of the pass
    with engine.forward(0, batch):
        loss = net.training_step(batch, 0)
    ledger = engine.ledger
    alive = [*net.parameters(), *net.buffers(), *batch.values()]
    expected = _plain_bytes(lambda: net.training_step(batch, 0), alive)
    assert ledger.exact_bytes == pytest.approx(expected, rel=0.01)
    assert sum(ledger.exact_by_category.values()) == ledger.exact_bytes
    assert ledger.saved_bytes < ledger.exact_bytes / 3
    loss.backward()


@pytest.mark.parametrize(("name", "least"), [("gpt2", (5.2, 9, 14)), ("bert", (4.3, 7.5, 12)), ("vit", (4.6, 8.6, 15))])
def test_saved_bytes_fall(name: str, least: tuple[float, ...]) -> None:
    """4 blocks of width 256 on 256 tokens with the models' own dropout of 0.1; 2 samples, for time."""
    from transformers import BertConfig, BertForMaskedLM, ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    }
    drop: dict[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    ids = torch.randint(0, 512, (2, 256))
    batch: dict[str, Tensor] = {"input_ids": ids, "labels": ids}
    if name == "gpt2":
        net: nn.Module = GPT2LMHeadModel(_gpt2_config(256, 256, 512, dropout=0.1))
    elif name == "bert":
        net = BertForMaskedLM(BertConfig(vocab_size=512, max_position_embeddings=256, **sizes, **drop))
    else:
        net = ViTForImageClassification(ViTConfig(image_size=32, patch_size=2, num_channels=1, **sizes, **drop))
        batch = {"pixel_values": torch.randn(2, 1, 32, 32), "labels": torch.tensor([0, 1])}
    net.train()
    for bits, ratio in zip((8, 4, 2), least, strict=True):
        engine = Engine(net, bits=bits)
        with engine.forward(0, batch):
            loss = net(**batch).loss
        assert engine.ledger.exact_bytes / engine.ledger.saved_bytes >= ratio, (bits, engine.ledger.by_category)
        assert engine.ledger.unfit == 0
        del loss


def test_a_small_backward_pass_within_the_forward_pass_does_not_close_the_ledger() -> None:
    """As where samples are scored by their gradient first, and trained on afterwards."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = torch.randn(32, 64)

    def held(*, scored: bool) -> int:
        engine = Engine(net, bits=8)
        with engine.forward(0, ()):
            if scored:
                logits = torch.randn(16, 16, requires_grad=True)
                torch.autograd.grad(logits.square().sum(), logits)
            loss = net(x * 1.0).square().mean()
        loss.backward()
        return engine.ledger.exact_bytes

    plain = held(scored=False)
    assert plain >= 2 * x.numel() * 4 and held(scored=True) >= plain
