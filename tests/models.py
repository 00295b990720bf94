"""Plain LightningModules for the tests: hand-written ones, and Hugging Face models with random weights."""

import os
from functools import cache
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.fabric.utilities import registry
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    VideoMAEConfig,
    VideoMAEForVideoClassification,
    ViTConfig,
    ViTForImageClassification,
)

# each Trainer asks all that is installed for callbacks, file by file; what is installed stays the same while tests run
registry.entry_points = cache(registry.entry_points)

VOCAB, LENGTH = 61, 32
SHORT = LENGTH - 8  # of texts that leave room in the table of places


class Block(nn.Module):
    """A pre-norm residual block with attention and an MLP."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.proj(attended))
        return x + self.drop(self.mlp(self.norm2(x)))


class TinyGPT(pl.LightningModule):
    """A language model on dict batches of ``input_ids`` and already shifted ``labels``, both (B, T).

    Args:
        built: where the blocks are made: "init", "setup" or "configure_model".
        batch_norm: norm each feature over the tokens of all samples behind the blocks.
        convolved: convolve the hidden states as images of tokens and features behind the blocks, and train by SGD.
    """

    def __init__(
        self,
        num_layers: int = 4,
        dim: int = 16,
        dropout: float = 0.1,
        built: str = "init",
        lr: float = 1e-2,
        batch_norm: bool = False,
        convolved: bool = False,
    ) -> None:
        super().__init__()
        self.num_layers, self.dim, self.dropout, self.built, self.lr = num_layers, dim, dropout, built, lr
        self.embed, self.position = nn.Embedding(VOCAB, dim), nn.Embedding(LENGTH, dim)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        self.batch_norm = nn.BatchNorm1d(dim) if batch_norm else None
        self.convolutions: nn.Sequential | None = None
        if convolved:
            self.convolutions = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1))
        self.blocks: nn.ModuleList | None = self._blocks() if built == "init" else None

    def _blocks(self) -> nn.ModuleList:
        return nn.ModuleList(Block(self.dim, self.dropout) for _ in range(self.num_layers))

    def setup(self, stage: str) -> None:
        if self.built == "setup" and self.blocks is None:
            self.blocks = self._blocks()

    def configure_model(self) -> None:
        if self.built == "configure_model" and self.blocks is None:
            self.blocks = self._blocks()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        assert self.blocks is not None
        for block in self.blocks:
            x = block(x)
        if self.batch_norm is not None:
            x = self.batch_norm(x.flatten(0, 1)).view_as(x)
        if self.convolutions is not None:
            x = self.convolutions(x[:, None]).sum(1)
        return self.head(self.norm(x))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.convolutions is not None:
            return torch.optim.SGD(self.parameters(), lr=10 * self.lr, momentum=0.9, weight_decay=1e-3)
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Translator(pl.LightningModule):
    """An encoder-decoder on dict batches of ``input_ids``, ``decoder_input_ids`` and ``labels``, each (B, T).

    The decoder has the mean of what the encoder makes of a text, and itself: attention to each place costs tests time, and
    shows nothing more of what is hidden.
    """

    def __init__(self, num_layers: int = 4, dim: int = 16, dropout: float = 0.1, lr: float = 1e-2) -> None:
        super().__init__()
        self.lr = lr
        self.embed, self.position = nn.Embedding(VOCAB, dim), nn.Embedding(LENGTH, dim)
        self.encoder = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU())
        self.decoder = nn.ModuleList(Block(dim, dropout) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)

    def forward(self, ids: Tensor, decoder_ids: Tensor) -> Tensor:
        place = self.position.weight[: ids.shape[1]]
        x = self.embed(decoder_ids) + place + self.encoder(self.embed(ids) + place).mean(dim=1, keepdim=True)
        for block in self.decoder:
            x = block(x)
        return self.head(self.norm(x))

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self(batch["input_ids"], batch["decoder_input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class TinyClassifier(pl.LightningModule):
    """An MLP with BatchNorm and dropout on (features, label) tuples: (B, 8) and (B,)."""

    def __init__(self, lr: float = 0.05, momentum: float = 0.9, batch_norm: bool = True) -> None:
        super().__init__()
        self.lr, self.momentum = lr, momentum
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        self.norm = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(x)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


class HuggingFace(pl.LightningModule):
    """Any transformers model that computes its own loss, on dict batches that are its keyword arguments."""

    def __init__(self, model: PreTrainedModel, lr: float = 1e-3) -> None:
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def hugging_face(name: str, num_layers: int = 4, dropout: float = 0.0) -> HuggingFace:
    """A random-initialised ``gpt2``, ``llama``, ``bert``, ``vit``, ``videomae`` or ``t5`` of width 32."""
    model: PreTrainedModel
    if name == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB,
                n_positions=LENGTH,
                n_embd=32,
                n_layer=num_layers,
                n_head=2,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
                bos_token_id=0,
                eos_token_id=0,
                use_cache=False,
            )
        )
    elif name == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=num_layers,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=LENGTH,
                attention_dropout=dropout,
                bos_token_id=0,
                eos_token_id=0,
                use_cache=False,
            )
        )
    elif name == "bert":
        model = BertForMaskedLM(
            BertConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                num_hidden_layers=num_layers,
                num_attention_heads=2,
                intermediate_size=64,
                max_position_embeddings=LENGTH,
                hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
            )
        )
    elif name == "vit":
        model = ViTForImageClassification(
            ViTConfig(
                hidden_size=32,
                num_hidden_layers=num_layers,
                num_attention_heads=2,
                intermediate_size=64,
                image_size=8,
                patch_size=2,
                num_channels=1,
                num_labels=5,
                hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
            )
        )
    elif name == "videomae":
        model = VideoMAEForVideoClassification(
            VideoMAEConfig(
                hidden_size=32,
                num_hidden_layers=num_layers,
                num_attention_heads=2,
                intermediate_size=64,
                image_size=8,
                patch_size=2,
                num_channels=1,
                num_frames=4,
                tubelet_size=2,
                num_labels=5,
                hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
            )
        )
    elif name == "t5":
        model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCAB,
                d_model=32,
                d_kv=16,
                d_ff=64,
                num_layers=num_layers,
                num_heads=2,
                dropout_rate=dropout,
                decoder_start_token_id=0,
                use_cache=False,
            )
        )
    else:
        raise ValueError(name)
    model.train()
    return HuggingFace(model)


class VideoMAE(HuggingFace):
    """A video transformer, made without arguments."""

    def __init__(self) -> None:
        super().__init__(hugging_face("videomae", num_layers=2).model)


def make_batch(name: str, size: int = 4, length: int = LENGTH, seed: int = 0) -> Any:
    """A learnable batch for a name of :func:`module`."""
    g = torch.Generator().manual_seed(seed)
    if name == "classifier":
        x = torch.randn(size, 8, generator=g)
        return x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long()
    if name == "vit":
        pixels = torch.randn(size, 1, 8, 8, generator=g)
        return {"pixel_values": pixels, "labels": (pixels.mean((1, 2, 3)) * 20).long().clamp(0, 4)}
    if name == "videomae":  # (B, T, C, H, W): stripes that move
        at = torch.arange(8) + torch.arange(4)[:, None] + torch.randint(0, 8, (size, 1, 1), generator=g)
        return {
            "pixel_values": at.mul(0.8).sin()[:, :, None, None].expand(-1, -1, 1, 8, -1).contiguous(),
            "labels": torch.randint(0, 5, (size,), generator=g),
        }
    length = min(length, SHORT) if name == "short" else length
    start = torch.randint(0, VOCAB, (size, 1), generator=g)
    step = torch.randint(1, 4, (size, 1), generator=g)
    ids = (start + step * torch.arange(length + 1)) % VOCAB
    if name in ("tiny_gpt", "short", "normed", "convolved"):
        return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    if name == "padded":
        keep = torch.arange(length) < torch.randint(length // 8, length // 2, (size, 1), generator=g)
        labels = ids[:, 1:].masked_fill(~keep, -100)
        return {"input_ids": ids[:, :-1].masked_fill(~keep, 0), "attention_mask": keep, "labels": labels}
    ids = ids[:, :-1].contiguous()
    if name == "translator":
        return {"input_ids": ids, "decoder_input_ids": ids.roll(1, 1), "labels": ids.clone()}
    if name == "bert":
        masked = torch.rand(size, length, generator=g) < 0.3
        masked[:, 0] = True
        return {
            "input_ids": ids.masked_fill(masked, 0),
            "attention_mask": torch.ones_like(ids),
            "labels": ids.masked_fill(~masked, -100),
        }
    return {"input_ids": ids, "labels": ids.clone()}


class Samples(Dataset[Any]):
    """The samples of one large batch, one at a time."""

    def __init__(self, name: str, size: int, seed: int = 0) -> None:
        self.batch, self.size = make_batch(name, size, seed=seed), size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.batch, dict):
            return {key: value[index] for key, value in self.batch.items()}
        return tuple(value[index] for value in self.batch)


def loader(
    name: str, samples: int = 20, batch_size: int = 4, *, shuffle: bool = True, seed: int = 0
) -> DataLoader[Any]:
    """A loader over learnable samples for the model ``name``."""
    return DataLoader(Samples(name, samples, seed), batch_size, shuffle=shuffle)


def module(name: str, **kwargs: Any) -> pl.LightningModule:
    """``tiny_gpt``, ``short``, ``normed``, ``convolved``, ``padded``, ``translator``, ``classifier`` or a Hugging Face name."""
    if name in ("tiny_gpt", "short", "padded"):
        return TinyGPT(**kwargs)
    if name == "normed":
        return TinyGPT(batch_norm=True, **kwargs)
    if name == "convolved":
        return TinyGPT(convolved=True, **kwargs)
    if name == "translator":
        return Translator(**kwargs)
    return TinyClassifier(**kwargs) if name == "classifier" else hugging_face(name, **kwargs)


def accelerator() -> str:
    """What the tests' trainers compute on: a CPU, or what LIGHTNING_EFF_TEST_ACCELERATOR names, such as "gpu"."""
    return os.environ.get("LIGHTNING_EFF_TEST_ACCELERATOR", "cpu")


def on_gpu() -> bool:
    """Whether the tests' trainers compute on a GPU."""
    return accelerator() == "gpu"


#: Techniques that compare the micro-batches of a step, and refuse a single one: by name, as many as their trainers have.
WINDOWS = {"AdaScale": 2}


def _window(callbacks: tuple[pl.Callback, ...]) -> dict[str, int]:
    found = [WINDOWS[n] for c in callbacks if (n := type(c).__name__) in WINDOWS and not getattr(c, "neutral", True)]
    return {"accumulate_grad_batches": max(found)} if found else {}


def trainer(*callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    """A quiet trainer: no logger, no bar, no checkpoints, no validation unless asked for.

    It accumulates gradients for a technique of ``WINDOWS``, unless ``kwargs`` say otherwise. It computes on a CPU, or on what
    the environment variable LIGHTNING_EFF_TEST_ACCELERATOR names, such as "gpu".
    """
    settings: dict[str, Any] = {
        "accelerator": accelerator(),
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "callbacks": list(callbacks),
        **_window(callbacks),
    }
    return pl.Trainer(**{**settings, **kwargs})


def flat(module: nn.Module) -> Tensor:
    """All parameters in one vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])
