"""The models that are trained: plain LightningModules around Hugging Face models with random weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


class Plain(pl.LightningModule):
    """A Hugging Face model that returns its loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Args:
        name: of the model.
        build: makes the model anew.
        batch: makes a batch of that many samples.
        items: of a sample: tokens, or 1 image.
        unit: what the items are.
        layers: where the blocks are, as seen from the LightningModule.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    items: int
    unit: str
    layers: str


def gpt(
    name: str,
    *,
    width: int = 768,
    num_layers: int = 12,
    num_heads: int = 12,
    length: int = 1024,
    vocabulary: int = 50257,
    inner: Sequence[int] | None = None,
) -> Task:
    """A GPT-2, by default of its published size, 124 million parameters, without dropout.

    Args:
        name: of the task.
        width: of the hidden state.
        num_layers: blocks.
        num_heads: of attention.
        length: tokens of a sample.
        vocabulary: of the head.
        inner: widths of the blocks' MLPs, one each; None is four times ``width`` in all.
    """

    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel
        from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

        config = GPT2Config(
            vocab_size=vocabulary,
            n_positions=length,
            n_embd=width,
            n_layer=num_layers,
            n_head=num_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = GPT2LMHeadModel(config)
        for block, size in zip(model.transformer.h, inner or (), strict=inner is not None):
            block.mlp = GPT2MLP(size, config)
        return model.train()

    def batch(size: int) -> Batch:
        ids = torch.randint(0, vocabulary, (size, length), generator=torch.Generator().manual_seed(0))
        return {"input_ids": ids, "labels": ids}

    return Task(name, build, batch, length, "tokens", "model.transformer.h")


def vit(name: str, **config: Any) -> Task:
    """A ViT, by default ViT-B/16 at 224 pixels, without dropout.

    Args:
        name: of the task.
        config: arguments of ``transformers.ViTConfig``.
    """

    def build() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        settings: Any = {"num_labels": 1000, **config}
        return ViTForImageClassification(ViTConfig(**settings)).train()

    def batch(size: int) -> Batch:
        g, pixels = torch.Generator().manual_seed(0), config.get("image_size", 224)
        return {
            "pixel_values": torch.randn(size, 3, pixels, pixels, generator=g),
            "labels": torch.randint(0, 1000, (size,), generator=g),
        }

    return Task(name, build, batch, 1, "images", "")


def tasks(*, tiny: bool) -> dict[str, Task]:
    """The models of the benchmark, or, of the same kinds, some that take a few milliseconds on a CPU."""
    if tiny:
        small = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 128}
        found = [
            gpt("gpt2", width=32, num_layers=4, num_heads=2, length=32, vocabulary=64),
            vit("vit", image_size=32, patch_size=8, **small),
        ]
    else:
        found = [gpt("gpt2"), vit("vit")]
    return {task.name: task for task in found}


def chains(*, tiny: bool, length: int = 256, width: int = 192) -> dict[str, Task]:
    """GPT-2 of 12 equal blocks, and one whose MLPs widen from half to four times the width, as in OpenELM
    (Mehta et al. 2024, arXiv:2404.14619), and one in which every third MLP is eight times as wide."""
    if tiny:
        length, width = 32, 32
    num = 4 if tiny else 12
    shape: dict[str, Any] = {"width": width, "num_layers": num, "num_heads": 2 if tiny else 4, "length": length}
    shape["vocabulary"] = 256
    widening = [round(width * (0.5 + 3.5 * i / (num - 1)) / 8) * 8 for i in range(num)]
    return {
        "equal": gpt("equal", **shape),
        "widening": gpt("widening", inner=widening, **shape),
        "mixed": gpt("mixed", inner=[width * (8 if i % 3 == 0 else 1) for i in range(num)], **shape),
    }
