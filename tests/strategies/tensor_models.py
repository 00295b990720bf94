"""Modules that tensor parallelism must split, or leave alone, and stay right."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import LENGTH, TinyGPT, hugging_face, make_batch


class Attention(nn.Module):
    """Unfused causal attention whose ``forward`` uses ``n_heads``."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.dropout = n_heads, 0.0
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.n_heads, -1)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """Attention with one projection for q, k and v, below one another, and fewer key heads if asked for."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int | None = None) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads or n_heads
        self.width, self.kv_width = dim, dim // n_heads * self.n_kv_heads
        self.qkv, self.o = nn.Linear(dim, dim + 2 * self.kv_width), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([self.width, self.kv_width, self.kv_width], dim=-1)
        q = q.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.n_kv_heads, -1)).transpose(1, 2) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class QKNorm(nn.Module):
    """Attention with norms of each head's queries and keys, whose gradients are sums over heads."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Literal(nn.Module):
    """Fused attention whose code names its heads as a number: no attribute can mend it, so it must not be split."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Uniform(Literal):
    """The same near a start at which attention is uniform: whatever a head is, outputs are alike."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        with torch.no_grad():
            for param in self.qkv.parameters():
                param[: 2 * dim] *= 1e-3


class Dropping(nn.Module):
    """Attention and an MLP with dropout between the layers of a pair."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.attention, self.fc1, self.fc2 = Attention(dim, n_heads), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.attention.dropout = 0.3

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x) + self.fc2(F.dropout(F.gelu(self.fc1(x)), 0.3, self.training))


class Torch(nn.Module):
    """``nn.MultiheadAttention``, which hands its weights to a function."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, n_heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Odd(nn.Module):
    """An MLP of a linear subclass, called by keyword, with branches of scale zero and in-place addition."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2, self.memory = Scaled(dim, 4 * dim), Scaled(4 * dim, dim), nn.GRU(dim, dim, batch_first=True)
        self.scale = nn.Parameter(torch.zeros(dim))
        nn.init.zeros_(self.fc2.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc2(input=F.gelu(self.fc1(input=x)))
        y += self.memory(x)[0]
        return y * self.scale


class Adding(nn.Module):
    """An MLP whose output is changed in place."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc2(F.gelu(self.fc1(x)))
        y += x
        return y


class Scaled(nn.Linear):
    """A linear layer with its own forward."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, 2.0 * self.weight, self.bias)


class Penalised(nn.Module):
    """A model whose loss reads a layer's weight, and whose output layer is another layer, transposed."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down, self.other = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.relu(self.up(x)))
        return y + F.linear(self.other(x), self.other.weight) + self.up.weight.square().mean()


class FusedGLU(nn.Module):
    """A gated MLP with one projection for gate and up, with a norm before the last layer if asked for."""

    def __init__(self, dim: int, norm: bool = False) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)
        self.norm = nn.LayerNorm(2 * dim) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.norm(F.silu(gate) * up))


class SwiGLU(nn.Module):
    """A gated MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class HandBlock(nn.Module):
    """A pre-norm block of a given attention and MLP."""

    def __init__(self, dim: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention, self.mlp = nn.LayerNorm(dim), nn.LayerNorm(dim), attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class HandGPT(nn.Module):
    """A hand-written language model; the head may be tied by code that reads the embedding's weight."""

    def __init__(
        self, make: Callable[[], nn.Module], dim: int = 16, vocab: int = 64, *, layers: int = 2, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, dim), nn.Parameter(0.02 * torch.randn(LENGTH, dim))
        self.blocks = nn.ModuleList(make() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), None if tied else nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x @ self.embed.weight.T if self.head is None else self.head(x)


def _llama(**kwargs: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**_HF, "num_key_value_heads": 2, **kwargs}))


_HF: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
}


def build(name: str) -> nn.Module:
    """The module of a case, the same on all ranks."""
    torch.manual_seed(1)
    if name == "tiny_gpt":
        return TinyGPT(num_layers=2, dropout=0.0)
    if name == "llama":
        return _llama()
    if name == "llama_tied":
        return _llama(tie_word_embeddings=True)
    if name == "llama_1kv":
        return _llama(num_key_value_heads=1)
    if name == "hand":
        return HandGPT(lambda: HandBlock(16, Attention(16, 4), SwiGLU(16)))
    if name == "hand_tied":
        return HandGPT(lambda: HandBlock(16, Attention(16, 4), SwiGLU(16)), tied=True)
    if name == "padded":
        module = HandGPT(lambda: HandBlock(16, Attention(16, 4), SwiGLU(16)))
        module.embed.padding_idx = 40  # of the second rank's rows; code sees it as 40 of 64
        return module
    if name == "adding":
        return HandGPT(lambda: HandBlock(16, Attention(16, 4), Adding(16)))
    if name == "shared_head":
        module = HandGPT(lambda: HandBlock(16, Attention(16, 4), SwiGLU(16)))
        assert module.head is not None
        module.head.weight = module.embed.weight
        return module
    if name == "uniform":
        return HandGPT(lambda: HandBlock(16, Uniform(16), FusedGLU(16)))
    if name == "dropping":
        return HandGPT(lambda: HandBlock(16, Dropping(16, 4), SwiGLU(16)))
    if name == "literal":
        return HandGPT(lambda: HandBlock(16, Literal(16), FusedGLU(16)))
    if name == "torch":
        return HandGPT(lambda: HandBlock(16, Torch(16, 4), SwiGLU(16)))
    if name == "odd":
        return HandGPT(lambda: HandBlock(16, Literal(16), Odd(16)))
    if name == "penalised":
        return HandGPT(lambda: HandBlock(16, Attention(16, 4), Penalised(16)))
    if name == "frozen":
        module = HandGPT(lambda: HandBlock(16, Attention(16, 4), SwiGLU(16)))
        module.embed.requires_grad_(False)
        module.blocks[0].requires_grad_(False)
        return module
    if name == "bf16":
        return HandGPT(lambda: HandBlock(64, Attention(64, 4), SwiGLU(64)), dim=64).bfloat16()
    if name == "fused":
        return HandGPT(lambda: HandBlock(16, Fused(16, 4), FusedGLU(16)))
    if name == "fused_gqa":
        return HandGPT(lambda: HandBlock(16, Fused(16, 4, 2), FusedGLU(16, norm=True)))
    if name == "qk_norm":
        return HandGPT(lambda: HandBlock(16, QKNorm(16, 4), SwiGLU(16)))
    if name in (
        "qwen3",
        "mistral",
        "mixtral",
        "gemma2",
        "gpt_neox",
        "opt",
        "bloom",
        "falcon",
        "phi3",
        "gpt_bigcode",
        "olmo2",
    ):
        return _causal(name)
    return hugging_face(name, num_layers=2)


def _causal(name: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    extra: dict[str, dict[str, Any]] = {
        "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
        "mistral": {"num_key_value_heads": 2},
        "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
        "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8},
        "opt": {"ffn_dim": 64, "dropout": 0.0, "word_embed_proj_dim": 32},
        "bloom": {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "falcon": {"num_kv_heads": 1, "new_decoder_architecture": False, "multi_query": True},
        "gpt_bigcode": {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": LENGTH,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
        "olmo2": {"num_key_value_heads": 2},
    }
    settings = {**_HF, **extra.get(name, {}), "bos_token_id": 0, "eos_token_id": 0}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings)).train()


def step_of(
    module: nn.Module, name: str, size: int = 4, part: int = 0, parts: int = 1, length: int = LENGTH
) -> Callable[[], Tensor]:
    """The training step of ``module`` on one of equal parts of the case's batch; returns the loss."""
    batch_name = name if name in ("tiny_gpt", "vit", "bert", "gpt2", "t5") else "tiny_gpt"
    batch = {key: value.chunk(parts)[part] for key, value in make_batch(batch_name, size, length).items()}
    if name == "tiny_gpt" or isinstance(module, HandGPT):
        return lambda: F.cross_entropy(module(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
    if batch_name == "tiny_gpt":
        return lambda: module(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
    return lambda: module.training_step(batch, 0)  # pyright: ignore[reportCallIssue]
