"""Blocks on some of their tokens: against plain blocks on inputs cut by hand, and on all tokens with the others masked."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_eff as eff
from lightning_eff._core._tokens.checking import CannotTake, find_plan
from lightning_eff._core._tokens.inputs import Kept
from lightning_eff._core._tokens.window import At, Tokens
from lightning_eff._core.blocks import find_stack
from lightning_eff._core.steps import Stage
from lightning_eff._core.technique import Technique
from tests.models import VOCAB, HuggingFace, hugging_face, make_batch, trainer
from tests.runs import MODES, differences, final_state, fit

B, T, D = 3, 12, 16


class SomeTokens(Technique):
    """Gives blocks ``k`` random tokens, the first one always among them, or what a test chooses."""

    saves = "nothing"
    paper = "none"

    def __init__(
        self,
        k: int = 5,
        *,
        choose: Callable[[At], Kept | None] | None = None,
        per_sample: bool = False,
        first: int = 0,
        stop: int | None = None,
        layers: str | None = None,
    ) -> None:
        self.k, self.own, self.per_sample = k, choose, per_sample
        self.first, self.stop, self.layers = first, stop, layers
        self.chosen: list[tuple[int, Tensor]] = []

    def attach(self, session: Any) -> None:
        self.tokens = Tokens(
            session, "SomeTokens", self._choose, first=self.first, stop=self.stop, per_sample=self.per_sample
        )
        session.chain.add(Stage.TRANSFORM, self.tokens.link)

    def on_model(self, session: Any) -> None:
        if session.fitting:
            self.tokens.find(self.layers)

    def _choose(self, at: At) -> Kept | None:
        if self.own is not None:
            return self.own(at)
        size, count = at.hidden.shape[:2]
        g = at.generator()
        rows = [torch.randperm(count - 1, generator=g)[: self.k - 1] + 1 for _ in range(size if self.per_sample else 1)]
        index = torch.cat([torch.zeros(len(rows), 1, dtype=torch.long), torch.stack(rows)], dim=1)
        index = index if self.per_sample else index[0]
        self.chosen.append((at.block, index.sort(dim=-1).values))
        return Kept(index)


class Gradients(pl.Callback):
    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in pl_module.parameters()]
        self.found.append(torch.cat([g.flatten() for g in grads]).clone())


def gradient(net: pl.LightningModule, batch: Any, *techniques: pl.Callback, **kwargs: Any) -> Tensor:
    keep = Gradients()
    trainer(*techniques, keep, max_steps=1, **kwargs).fit(net, DataLoader([batch], batch_size=None))
    return keep.found[0]


def places(index: Tensor, size: int, count: int) -> Tensor:
    """Whether each token of each sample is among the chosen, (B, T)."""
    index = index.expand(size, -1) if index.ndim == 1 else index
    return torch.zeros(size, count, dtype=torch.bool).scatter(1, index, True)


def by_masks(
    net: nn.Module, blocks: nn.ModuleList, chosen: dict[int, Tensor], *, causal: bool, mask: str | int
) -> None:
    """Let ``net`` compute the same by full-length blocks: attention sees chosen tokens alone, others keep their state."""
    for i, block in enumerate(blocks):
        if i not in chosen:
            continue

        def forward(x: Tensor, *args: Any, plain: Any = block.forward, at: Tensor = chosen[i], **kwargs: Any) -> Any:
            seen = places(at, *x.shape[:2])
            allowed = seen[:, None, None, :] | torch.eye(x.shape[1], dtype=torch.bool)
            allowed = allowed.expand(-1, 1, x.shape[1], -1)
            given = kwargs.get(mask) if isinstance(mask, str) else args[mask]
            if causal:
                allowed = allowed & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            if given is not None:
                allowed = allowed & (given if given.dtype == torch.bool else given > -1)
            if isinstance(mask, str):
                kwargs[mask] = allowed
            else:
                args = (*args[:mask], allowed, *args[mask + 1 :])
            out = plain(x, *args, **kwargs)
            new = out[0] if isinstance(out, tuple) else out
            new = torch.where(seen.unsqueeze(-1), new, x)
            return (new, *out[1:]) if isinstance(out, tuple) else new

        block.forward = forward


def _config(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **more,
    }


def model(name: str) -> tuple[HuggingFace, nn.ModuleList, dict[str, Any]]:
    """A random-initialised model without dropout, its blocks, and a batch with padding, labels there ignored."""
    torch.manual_seed(0)
    batch = make_batch("llama", length=T, size=B)
    padding = torch.ones(B, T, dtype=torch.long)
    padding[1, 9:] = 0
    batch = {**batch, "attention_mask": padding, "labels": batch["labels"].masked_fill(padding == 0, -100)}
    net: Any
    if name == "gpt2":
        net = hugging_face("gpt2", 3).model
        return HuggingFace(net), net.transformer.h, batch  # pyright: ignore[reportReturnType]
    if name == "llama":
        net = hf.LlamaForCausalLM(hf.LlamaConfig(**_config(num_key_value_heads=2)))
    elif name == "qwen3":  # as many channels in a head as tokens
        net = hf.Qwen3ForCausalLM(hf.Qwen3Config(**_config(num_key_value_heads=2, head_dim=T)))
    elif name == "mixtral":
        net = hf.MixtralForCausalLM(hf.MixtralConfig(**_config(num_key_value_heads=2, num_local_experts=4)))
    elif name == "gemma3":  # windows of 4 tokens, by the mask
        config = _config(num_key_value_heads=2, head_dim=8, sliding_window=4)
        net = hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**config))
    elif name == "modernbert":  # local and global rotary tables
        net = hf.ModernBertForMaskedLM(
            hf.ModernBertConfig(**_config(local_attention=4, cls_token_id=0, sep_token_id=0))
        )
        return HuggingFace(net), net.model.layers, batch
    elif name == "bert":
        config = _config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        net = hf.BertForMaskedLM(hf.BertConfig(**config))
        return HuggingFace(net), net.bert.encoder.layer, batch
    else:
        raise ValueError(name)
    return HuggingFace(net), net.model.layers, batch


MASK = {"gpt2": 1, "bert": 0}  # given by place, after the hidden state
CAUSAL = ("gpt2", "llama", "qwen3", "mixtral", "gemma3")


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [*CAUSAL, "modernbert", "bert"])
def test_hugging_face_blocks_on_some_tokens(name: str, padded: bool, per_sample: bool) -> None:
    """Masks, positions, rotary tables, grouped queries, routers, caches: by full-length blocks with the others masked.

    In the reference no input is cut: attention is given a mask that hides the tokens that are not chosen.
    """
    net, _, batch = model(name)
    if not padded:
        del batch["attention_mask"]
    technique = SomeTokens(6, per_sample=per_sample, first=1)
    got = gradient(net, batch, technique)
    assert [i for i, _ in technique.chosen] == [1, 2]
    assert all(index.shape == ((B, 6) if per_sample else (6,)) for _, index in technique.chosen)
    net, blocks, _ = model(name)
    by_masks(net, blocks, dict(technique.chosen), causal=name in CAUSAL, mask=MASK.get(name, "attention_mask"))
    expected = gradient(net, batch)
    plain = gradient(model(name)[0], batch)
    assert (expected - plain).abs().max() > 2e-4
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_vit_keeps_its_class_token() -> None:
    torch.manual_seed(0)
    net = hugging_face("vit", 3)
    batch = make_batch("vit")
    other = copy.deepcopy(net)
    technique = SomeTokens(6, per_sample=True)
    got = gradient(net, batch, technique)
    assert all((index[:, 0] == 0).all() for _, index in technique.chosen)
    for i, block in enumerate(find_stack(other, None, who="test").container.children()):
        plain, index = block.forward, dict(technique.chosen)[i]

        def forward(x: Tensor, *args: Any, plain: Any = plain, index: Tensor = index, **kwargs: Any) -> Tensor:
            x = x.clone()
            some = plain(torch.stack([row[at] for row, at in zip(x, index, strict=True)]), *args, **kwargs)
            for i, at in enumerate(index):
                x[i, at] = some[i]
            return x

        block.forward = forward
    torch.testing.assert_close(got, gradient(other, batch), rtol=1e-4, atol=1e-6)


# -- hand-written blocks


class Attention(nn.Module):
    """A pre-norm residual block of attention; what it does with places is for subclasses to say."""

    causal = False

    def __init__(self, tokens: int = T) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        return x + self.out(self.attend(q, k, v, *args, **kwargs).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class Causal(Attention):
    causal = True


class Masked(Attention):
    """A handwritten softmax, with a mask of any form."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if mask is not None:
            mask = mask[:, None, None, :] if mask.ndim == 2 and mask.shape[0] == len(q) else mask
            scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask.bool(), float("-inf"))
        return scores.softmax(-1) @ v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


def tables(count: int, channels: int = D // 4) -> tuple[Tensor, Tensor]:
    angles = torch.arange(count)[:, None] / 10 ** torch.linspace(0, 1, channels // 2)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


class Rotary(Attention):
    """Tables (T, channels) are handed to it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        return F.scaled_dot_product_attention(rotate(q, *tables), rotate(k, *tables), v, is_causal=True)


class Positions(Attention):
    """Computes its tables from positions (B, T)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None, :, None] / torch.tensor([1.0, 3.0, 1.0, 3.0])
        cos, sin = angles.cos(), angles.sin()
        return F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)


class OwnTables(Rotary):
    """Tables (T, channels) are buffers of its own, cut to the length."""

    def __init__(self, tokens: int = T) -> None:
        super().__init__()
        cos, sin = tables(64)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().attend(q, k, v, (self.cos[: q.shape[2]], self.sin[: q.shape[2]]))  # pyright: ignore[reportIndexIssue]


class FixedTables(OwnTables):
    """Tables of its own for one length."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Rotary.attend(self, q, k, v, (self.cos[:T], self.sin[:T]))  # pyright: ignore[reportIndexIssue]


class RelativeBias(Attention):
    """A bias by distance, 0 at the start, as Swin and T5 learn one."""

    def __init__(self, tokens: int = T) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2 * 64, 4))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[2])
        bias = self.bias[at[:, None] - at[None, :] + 64].permute(2, 0, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class Conv(Attention):
    def __init__(self, tokens: int = T) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, D, 3, padding=1, groups=D)

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x + 1e-2 * self.conv(x.transpose(1, 2)).transpose(1, 2))


class Shifted(Attention):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x + 0.1 * F.pad(x, (0, 0, 1, 0))[:, :-1])


class Windows(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[2])
        near = (at[:, None] - at[None, :]).abs() <= 3
        return F.scaled_dot_product_attention(q, k, v, attn_mask=near)


class ByLength(Attention):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x + self.out(x.sum(dim=1, keepdim=True))


class Net(pl.LightningModule):
    """Blocks of a class between an embedding and a head, on batches of (ids, labels); ``given`` makes blocks' inputs."""

    def __init__(
        self, cls: type[nn.Module], given: Callable[[Tensor], tuple[Any, ...]] = lambda ids: (), count: int = 3
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB)
        self.blocks = nn.ModuleList(cls() for _ in range(count))
        self.given = given
        self.lengths: list[int] = []

    def run(self, index: int, x: Tensor, *given: Any) -> Tensor:
        return self.blocks[index](x, *given)

    def forward(self, ids: Tensor) -> Tensor:
        x, given = self.embed(ids), self.given(ids)
        for i in range(len(self.blocks)):
            x = self.run(i, x, *given)
            self.lengths.append(x.shape[1])
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def ids(size: int = B, length: int = T, seed: int = 0) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, VOCAB, (size, length + 1), generator=torch.Generator().manual_seed(seed))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def _square(ids: Tensor) -> Tensor:
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()


GIVEN: dict[str, tuple[type[nn.Module], Callable[[Tensor], tuple[Any, ...]], Callable[[Tensor, tuple[Any, ...]], Any]]] = {
    "none": (Attention, lambda ids: (), lambda s, g: ()),
    "is_causal": (Causal, lambda ids: (), lambda s, g: ()),
    "bool mask": (Masked, lambda ids: (_square(ids),), lambda s, g: (g[0][s][:, s],)),
    "4-D additive mask": (
        Masked,
        lambda ids: (torch.zeros(1, 1, T, T).masked_fill(~_square(ids), -1e30),),
        lambda s, g: (g[0][:, :, s][..., s],),
    ),
    "4-D bool mask of samples": (
        Masked,
        lambda ids: ((ids % 5 != 0)[:, None, None, :] | torch.eye(T, dtype=torch.bool),),
        lambda s, g: (g[0][:, :, s][..., s],),
    ),
    "2-D padding mask": (Masked, lambda ids: ((ids % 7 != 0) | (torch.arange(T) < 6),), lambda s, g: (g[0][:, s],)),
    "tables": (Rotary, lambda ids: (tables(T),), lambda s, g: (tuple(t[s] for t in g[0]),)),
    "tables of samples": (
        Rotary,
        lambda ids: (tuple(t.expand(B, 1, T, 4) for t in tables(T)),),
        lambda s, g: (tuple(t[:, :, s] for t in g[0]),),
    ),
    "positions": (Positions, lambda ids: (torch.arange(T).expand(B, T),), lambda s, g: (g[0][:, s],)),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_hand_written_blocks_on_some_tokens(name: str) -> None:
    """A plain block on inputs cut by hand, put back by hand; and all tokens through the way in are the plain step."""
    cls, given, cut = GIVEN[name]
    technique = SomeTokens(7)
    net = Net(cls, given)
    got = gradient(net, ids(), technique)
    chosen = dict(technique.chosen)
    assert len({tuple(index.tolist()) for index in chosen.values()}) == 3, "each block draws its own"

    class ByHand(Net):
        def run(self, index: int, x: Tensor, *given: Any) -> Tensor:
            s = chosen[index]
            return x.index_copy(1, s, self.blocks[index](x[:, s], *cut(s, given)))

    torch.testing.assert_close(got, gradient(ByHand(cls, given), ids()), rtol=1e-5, atol=1e-7)
    every = SomeTokens(choose=lambda at: Kept(torch.arange(T).flip(0)))
    torch.testing.assert_close(gradient(Net(cls, given), ids(), every), gradient(Net(cls, given), ids()))
    nothing = SomeTokens(choose=lambda at: None)
    assert torch.equal(gradient(Net(cls, given), ids(), nothing), gradient(Net(cls, given), ids()))
    assert set(net.lengths) == {T}, "the module's own code sees all tokens"


def test_tokens_that_are_not_chosen_bypass_their_block_bit_for_bit() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    class Watched(Net):
        def run(self, index: int, x: Tensor, *given: Any) -> Tensor:
            out = self.blocks[index](x, *given)
            if x.requires_grad:
                seen.append((x.detach(), out.detach()))
            return out

    technique = SomeTokens(7, per_sample=True)
    gradient(Watched(Causal), ids(), technique)
    for (_, index), (x, out) in zip(technique.chosen, seen, strict=True):
        same = (x == out).all(dim=-1)
        assert torch.equal(same, ~places(index, B, T))


@pytest.mark.parametrize("size", [B, T])
def test_time_first(size: int) -> None:
    """nn.TransformerEncoderLayer on (T, B, D), with a square mask and a padding mask; also with T samples."""

    class First(Net):
        def __init__(self, *args: Any) -> None:
            super().__init__(lambda: nn.TransformerEncoderLayer(D, 4, 32, dropout=0.0), *args)  # type: ignore[arg-type]

        def run(self, index: int, x: Tensor, *given: Any) -> Tensor:
            mask, padding = given
            return self.blocks[index](x, src_mask=mask, src_key_padding_mask=padding)

        def forward(self, ids: Tensor) -> Tensor:
            x, given = self.embed(ids).transpose(0, 1), self.given(ids)
            for i in range(len(self.blocks)):
                x = self.run(i, x, *given)
            return self.head(x.transpose(0, 1))

    def given(ids: Tensor) -> tuple[Any, ...]:
        hidden = torch.zeros(T, T).masked_fill(~_square(ids), float("-inf"))
        return hidden, torch.zeros(size, T).masked_fill(torch.arange(T) > 9, float("-inf"))

    technique, batch = SomeTokens(7), ids(size)
    got = gradient(First(given), batch, technique)
    chosen = dict(technique.chosen)

    class ByHand(First):
        def run(self, index: int, x: Tensor, *given: Any) -> Tensor:
            s = chosen[index]
            return x.index_copy(0, s, super().run(index, x[s], given[0][s][:, s], given[1][:, s]))

    torch.testing.assert_close(got, gradient(ByHand(given), batch), rtol=1e-5, atol=1e-7)


def test_rows_of_a_mask_that_would_see_nothing_see_themselves() -> None:
    """The only keys that a padded query may see are not among the chosen: attention would make it NaN."""
    allowed = torch.eye(T, dtype=torch.bool)
    allowed[:, 0] = True
    allowed[5] = False
    allowed[5, 0] = True  # sees the first token alone

    technique = SomeTokens(choose=lambda at: Kept(torch.tensor([3, 5, 7])))
    for mask in (allowed, torch.zeros(T, T).masked_fill(~allowed, float("-inf"))):
        assert gradient(Net(Masked, lambda ids, mask=mask: (mask,)), ids(), technique).isfinite().all()


# -- what is refused


def test_caches_are_off_and_what_they_hold_is_refused() -> None:
    net, blocks, batch = model("llama")
    handed: list[Any] = []
    for block in blocks:
        block.register_forward_pre_hook(lambda m, a, k: handed.append(k["past_key_values"]), with_kwargs=True)
    inner: list[Any] = []
    attention = blocks[1].self_attn
    attention.register_forward_pre_hook(lambda m, a, k: inner.append(k["past_key_values"]), with_kwargs=True)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    net.model.config.use_cache = True
    gradient(net, batch, SomeTokens(6, first=1))
    assert all(cache is not None for cache in handed[-3:]) and inner[-1] is None
    cache = hf.DynamicCache()
    cache.update(torch.randn(B, 2, T, 8), torch.randn(B, 2, T, 8), 1)
    rotary = tuple(t.expand(1, T, 8) for t in tables(T, 8))
    call = ((torch.randn(B, T, 32),), {"position_embeddings": rotary, "past_key_values": cache, "attention_mask": None})
    g = torch.Generator().manual_seed(0)
    del call[1]["past_key_values"]
    find_plan(blocks[1], call, B, per_sample=True, generator=g)
    call[1]["past_key_values"] = cache
    with pytest.raises(CannotTake, match="without caches, it computes something else than plainly"):
        find_plan(blocks[1], call, B, per_sample=True, generator=g)


class OwnMask(OwnTables):
    """Tables and a causal mask of its own, both for more than there is, the mask by a dimension of each."""

    def __init__(self, tokens: int = T) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(1, 1, 40, 40, dtype=torch.bool).tril())

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        n = q.shape[2]
        q, k = (rotate(x, self.cos[:n], self.sin[:n]) for x in (q, k))  # pyright: ignore[reportIndexIssue, reportArgumentType]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.seen[:, :, :n, :n])  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("cls", [OwnTables, FixedTables, OwnMask])
def test_rotary_tables_of_a_blocks_own_go_along(cls: type[nn.Module], checkpointed: bool) -> None:
    """Against blocks that are handed the tables of the chosen places; other places in each sample are refused."""

    class ByHand(Net):
        def run(self, index: int, x: Tensor, *given: Any) -> Tensor:
            some = dict(technique.chosen)[index]
            cos, sin = tables(64)
            return x.index_copy(1, some, self.blocks[index](x[:, some], (cos[some], sin[some])))

    class Checkpointed(Net):
        def run(self, index: int, x: Tensor, *given: Any) -> Tensor:
            return checkpoint(self.blocks[index], x, use_reentrant=False)  # pyright: ignore[reportReturnType]

    technique = SomeTokens(5)
    net = (Checkpointed if checkpointed else Net)(cls)
    held = {name: id(value) for name, value in net.named_buffers()}
    got = gradient(net, ids(), technique)
    torch.testing.assert_close(got, gradient(ByHand(Rotary), ids()), rtol=1e-4, atol=1e-6)
    assert {name: id(value) for name, value in net.named_buffers()} == held
    with pytest.raises(ValueError, match="cannot be given fewer of its tokens"):
        gradient(Net(cls), ids(), SomeTokens(per_sample=True))


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (lambda: eff.TokenDropping(), "take RandomLTD instead"),
        (lambda: eff.TokenMerging(r=2), "take RandomLTD instead"),
        (lambda: eff.PatchDropout(), "set per_image=False"),
        (lambda: eff.PartialTokenTraining(reconstruction_weight=0.0), "set per_sample=False"),
        (lambda: eff.RandomLTD(multiple_of=4, per_sample=True), "set per_sample=False"),
    ],
)
def test_the_same_tokens_of_all_samples_are_offered_where_blocks_can_be_given_those(make: Any, way: str) -> None:
    """Tables (T, d) have no dimension for the samples; what is offered does train, and is not where nothing would."""
    cls, given, _ = GIVEN["tables"]
    told = r"\(12, 4\) has no dimension for the 3 samples, whose tokens differ\)"
    with pytest.raises(
        ValueError, match=rf"{told}.* It supports the same tokens for all samples: {way}\. Or take other"
    ):
        gradient(Net(cls, given, 4), ids(), make())
    assert gradient(Net(cls, given, 4), ids(), eff.RandomLTD(multiple_of=4)).isfinite().all()
    with pytest.raises(ValueError, match=r"cannot be given fewer of its tokens.*\. Take other blocks") as refused:
        gradient(Net(ByLength, count=4), ids(), make())
    assert "same tokens" not in str(refused.value)


@pytest.mark.parametrize("cls", [RelativeBias, Conv, Shifted, Windows, ByLength])
def test_blocks_that_go_by_places_are_refused(cls: type[nn.Module]) -> None:
    with pytest.raises(
        ValueError,
        match=r"SomeTokens: block 0 of 'blocks' .* cannot be given fewer .*its output depends on token positions.*layers=",
    ):
        gradient(Net(cls), ids(), SomeTokens())


def test_t5_and_swin_are_refused() -> None:
    """The first block of T5 makes the bias of all from places; Swin's windows are of its grid."""
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"block 0 of 'model.encoder.block' .* cannot be given fewer of its tokens"):
        gradient(hugging_face("t5"), make_batch("t5"), SomeTokens(layers="model.encoder.block"))
    swin = hf.SwinForImageClassification(
        hf.SwinConfig(
            image_size=16, patch_size=2, num_channels=1, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4
        )
    )
    batch = {"pixel_values": torch.randn(4, 1, 16, 16), "labels": torch.tensor([0, 1, 0, 1])}
    with pytest.raises(ValueError, match=r"block 0 of .* cannot be given fewer of its tokens"):
        gradient(HuggingFace(swin), batch, SomeTokens(layers="model.swin.encoder.layers.0.blocks"))


def test_other_things_that_are_refused() -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
    call = ((torch.randn(B, 128, D),), {"mask": mask})
    g = torch.Generator().manual_seed(0)
    with pytest.raises(CannotTake, match="mask BlockMask cannot be cut"):
        find_plan(Attention(), call, B, per_sample=False, generator=g)
    with pytest.raises(CannotTake, match=r"hidden state has the shape \(3, 4, 4, 16\); expected \(B, T, D\)"):
        find_plan(Attention(), ((torch.randn(B, 4, 4, D),), {}), B, per_sample=False, generator=g)
    with pytest.raises(CannotTake, match="it has 2 tokens; expected 4 or more"):
        find_plan(Attention(), ((torch.randn(B, 2, D),), {}), B, per_sample=False, generator=g)
    with pytest.raises(CannotTake, match=r"no dimension for the 3 samples.*argument 1.0 \(12, 4\)"):
        find_plan(Rotary(), ((torch.randn(B, T, D), tables(T)), {}), B, per_sample=True, generator=g)

    class Weights(Attention):
        def forward(self, x: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(x), x @ x.transpose(1, 2)

    with pytest.raises(CannotTake, match=r"it also returns \(3, 12, 12\)"):
        find_plan(Weights(), ((torch.randn(B, T, D),), {}), B, per_sample=False, generator=g)


def test_blocks_are_tried_on_few_samples() -> None:
    """Of large batches, where as few do; an input may have as many rows as there are samples by chance."""
    seen: list[int] = []

    class Seen(Masked):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
            seen.append(len(q))
            return super().attend(q, k, v, *args)

    def plan(size: int, *given: Tensor) -> Any:
        seen.clear()
        g = torch.Generator().manual_seed(0)
        return find_plan(Seen(), ((torch.randn(size, T, D), *given), {}), size, per_sample=False, generator=g)

    assert plan(40, torch.zeros(40, T)).dims == {(1,): (1,)} and set(seen) == {3}
    by_head = torch.randn(4, T, T)
    assert plan(4, by_head).dims == {(1,): (1, 2)} and set(seen) == {3, 4}


def test_a_first_step_without_room_says_so() -> None:
    class Full(Net):
        def forward(self, ids: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(ids)

    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory"):
        gradient(Full(Causal), ids(), SomeTokens(7))


def test_torchs_encoder_with_padding_and_a_later_batch_of_one_token() -> None:
    """nn.TransformerEncoder hands its layers an additive mask, which in evaluation they would take for a boolean one."""

    class Encoder(Net):
        def __init__(self) -> None:
            super().__init__(Causal)
            layer = nn.TransformerEncoderLayer(D, 4, 32, dropout=0.0, batch_first=True)
            self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).layers
            self.encoder = nn.TransformerEncoder(layer, 1)
            self.encoder.layers = self.blocks

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(
                self.encoder(self.embed(ids), src_key_padding_mask=torch.arange(ids.shape[1]) > 9 + 0 * ids)
            )

    technique = SomeTokens(7)
    trainer(technique, max_steps=2).fit(Encoder(), DataLoader([ids(), ids(length=1)], batch_size=None))
    assert len(technique.chosen) == 3, "of the first batch"


def test_choices_and_ranges_that_are_wrong() -> None:
    for choice, message in (
        (Kept(torch.zeros(B, 2, dtype=torch.long)), r"choice of the shape \(3, 2\) .* expected \(k,\)"),
        (Kept(torch.arange(T + 1)), r"shape \(13,\) for 3 samples of 12 tokens"),
        (Kept(torch.zeros(B, 0).long()), "per_sample=False"),
    ):
        with pytest.raises(ValueError, match=message):
            gradient(Net(Causal), ids(), SomeTokens(choose=lambda at, choice=choice: choice))
    with pytest.raises(ValueError, match=r"the range \[3:\] contains no block"):
        gradient(Net(Causal), ids(), SomeTokens(first=3))

    class Twice(SomeTokens):
        pass

    with pytest.raises(ValueError, match="both choose the tokens of block 0"):
        gradient(Net(Causal), ids(), SomeTokens(), Twice())
    two = [SomeTokens(stop=1), Twice(first=1)]
    gradient(Net(Causal), ids(), *two)
    assert {i for i, _ in two[0].chosen} == {0} and [i for i, _ in two[1].chosen] == [1, 2]

    class Uncalled(Net):
        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids))

    with pytest.raises(ValueError, match="called none of the blocks"):
        gradient(Uncalled(Causal), ids(), SomeTokens())


def test_what_a_model_makes_of_its_routers() -> None:
    """Mixtral's balancing loss counts the tokens that were routed; with padding it wants all, and says so at once."""
    net, _, batch = model("mixtral")
    net.model.config.output_router_logits = True
    with pytest.raises(ValueError, match="SomeTokens: training_step ran on all tokens, but fails with fewer of them"):
        gradient(net, batch, SomeTokens(6, first=1))
    net, blocks, batch = model("mixtral")
    net.model.config.output_router_logits = True
    del batch["attention_mask"]
    technique = SomeTokens(6, first=1)
    got = gradient(net, batch, technique)
    assert got.isfinite().all()
    seen: list[int] = []
    for block in blocks:
        block.mlp.gate.register_forward_hook(lambda m, a, out: seen.append(out[0].shape[0]))  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    gradient(net, batch, SomeTokens(6, first=1))
    assert seen[-3:] == [B * T, B * 6, B * 6] and seen[:3] == [B * T] * 3


# -- later batches


def fit_batches(net: pl.LightningModule, batches: list[Any], *techniques: pl.Callback, **kwargs: Any) -> list[Tensor]:
    keep = Gradients()
    trainer(*techniques, keep, max_steps=len(batches), **kwargs).fit(net, DataLoader(batches, batch_size=None))
    return keep.found


def test_a_mask_that_appears_later_is_taken_along() -> None:
    net, _, batch = model("bert")
    padded = dict(batch)
    batch = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    technique = SomeTokens(6, first=1)
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.0)  # type: ignore[method-assign]
    got = fit_batches(net, [batch, padded], technique)[1]
    kinds = {len(plan.dims) for _, plan in technique.tokens._plans.values()}
    assert kinds == {0, 1}
    net, blocks, _ = model("bert")
    by_masks(net, blocks, dict(technique.chosen[2:]), causal=False, mask=MASK["bert"])
    torch.testing.assert_close(got, gradient(net, padded), rtol=1e-4, atol=1e-5)


def test_a_window_that_is_reached_later_is_refused_then() -> None:
    short, long = ids(length=4), ids(length=T)
    technique = SomeTokens(2)
    with pytest.raises(ValueError, match="its output depends on token positions"):
        fit_batches(Net(Windows), [short, short, long], technique)
    assert len(technique.chosen) == 6
    assert len(fit_batches(Net(Causal), [short, long, ids(length=7), ids(2, 9)], SomeTokens(2))) == 4


# -- where it acts


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad", "ignore:.gradient_checkpointing_enable")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_chooses_the_same_tokens_again(reentrant: bool) -> None:
    class Checkpointed(Net):
        def run(self, index: int, x: Tensor, *given: Any) -> Tensor:
            return checkpoint(self.blocks[index], x, *given, use_reentrant=reentrant)  # pyright: ignore[reportReturnType]

    technique, plain = SomeTokens(7), SomeTokens(7)
    got = gradient(Checkpointed(Causal), ids(), technique)
    assert len(technique.chosen) == 6
    for block in range(3):
        first, again = (index for i, index in technique.chosen if i == block)
        assert torch.equal(first, again)
    torch.testing.assert_close(got, gradient(Net(Causal), ids(), plain))
    torch.manual_seed(0)
    net = hugging_face("llama", 3)
    other = copy.deepcopy(net)
    other.model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # pyright: ignore[reportCallIssue]
    got = gradient(other, make_batch("llama"), SomeTokens(9, first=1))
    torch.testing.assert_close(got, gradient(net, make_batch("llama"), SomeTokens(9, first=1)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("way", ["compile()", "torch.compile"])
def test_compiled_blocks(way: str) -> None:
    """Blocks stay compiled, and choosing stays outside of them; compiled with what is around them they are refused."""
    made: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph

    net = Net(Causal)
    for i, block in enumerate(net.blocks):
        if way == "compile()":
            block.compile(backend=backend, fullgraph=True)
        else:
            net.blocks[i] = torch.compile(block, backend=backend, fullgraph=True)  # pyright: ignore[reportArgumentType]
    layers = "blocks"
    technique = SomeTokens(7, layers=layers)
    got = gradient(net, ids(), technique)
    torch.compiler.reset()
    assert 1 <= len(made) <= 12
    torch.testing.assert_close(got, gradient(Net(Causal), ids(), SomeTokens(7)))
    whole = Net(Causal)
    whole.compile(backend="eager")
    with pytest.raises(ValueError, match="compile"):
        gradient(whole, ids(), SomeTokens())
    torch.compiler.reset()


def test_validation_and_what_comes_after_are_plain() -> None:
    net, technique = Net(Causal), SomeTokens(5)
    data = DataLoader([ids()], batch_size=None)
    t = trainer(technique, max_steps=2, limit_val_batches=1, val_check_interval=1, num_sanity_val_steps=1)
    t.fit(net, data, data)
    assert len(technique.chosen) == 6
    with torch.no_grad():
        expected = F.cross_entropy(net(ids()[0]).flatten(0, 1), ids()[1].flatten())
    assert t.callback_metrics["val"].item() == pytest.approx(expected.item())
    before = {id(m): dict(m.__dict__) for m in net.modules()}
    assert not any("forward" in names for names in before.values())

    class Fails(pl.Callback):
        def on_before_zero_grad(self, *args: Any) -> None:
            raise RuntimeError("in the middle of a step")

    with pytest.raises(RuntimeError, match="in the middle"):
        gradient(net, ids(), SomeTokens(5), Fails())
    assert not any("forward" in m.__dict__ for m in net.modules())


def test_a_copy_made_in_a_step_is_of_the_plain_block() -> None:
    copies: list[nn.Module] = []

    class Copies(Net):
        def run(self, index: int, x: Tensor, *given: Any) -> Tensor:
            copies.append(copy.deepcopy(self.blocks[index]))
            return super().run(index, x, *given)

    net, technique = Copies(Causal), SomeTokens(5)
    gradient(net, ids(), technique)
    chosen = len(technique.chosen)
    x = torch.randn(B, T, D)
    for other in copies[-3:]:
        for p in other.parameters():
            p.data.zero_()
        assert torch.equal(other(x), x)
    assert len(technique.chosen) == chosen


@pytest.mark.parametrize("mode", ["accumulate_clip", "bf16"])
def test_modes(mode: str) -> None:
    """Under accumulation and bf16 the gradients are those of the same choice by hand."""
    technique = SomeTokens(7)
    net = Net(Causal)
    settings = {**MODES[mode], "gradient_clip_val": None}
    keep = Gradients()
    data = [ids(seed=1), ids(seed=2)]
    trainer(technique, keep, max_steps=1, **settings).fit(net, DataLoader(data, batch_size=None))
    chosen = list(technique.chosen)
    assert len(chosen) == 3 * len(keep.found)

    class ByHand(Net):
        def run(self, index: int, x: Tensor, *given: Any) -> Tensor:
            s = chosen.pop(0)[1]
            out = self.blocks[index](x[:, s], *given)
            return x.to(out.dtype).index_copy(1, s, out)

    other, expected = ByHand(Causal), Gradients()
    trainer(expected, max_steps=1, **settings).fit(other, DataLoader(data, batch_size=None))
    torch.testing.assert_close(keep.found[-1], expected.found[-1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["tiny_gpt", "llama"])
def test_resume_equals_uninterrupted(name: str, tmp_path: Path) -> None:
    def build() -> list[Technique]:
        return [SomeTokens(9, first=1, per_sample=True)]

    whole = final_state(*fit(name, build, directory=tmp_path))
    assert differences(whole, final_state(*fit(name, list)))
    assert differences(whole, final_state(*fit(name, build, resume=next(tmp_path.glob("step=7*.ckpt"))))) == []


def test_who_listens_to_a_block_may_hold_what_cannot_be_copied() -> None:
    """As what keeps activations of the step under way does: it has no part in the trial."""

    class Keeps:
        output: Any = None

        def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
            self.output = output

    net, keeps, technique = Net(Causal), Keeps(), SomeTokens(2)
    for block in net.blocks:
        next(m for m in block.modules() if isinstance(m, nn.Linear)).register_forward_hook(keeps)
    fit_batches(net, [ids(length=4), ids(length=T)], technique)  # the longer one is tried within its step
    assert keeps.output.grad_fn is not None and technique.chosen


def test_a_first_step_that_runs_no_block_is_not_looked_at() -> None:
    class DropsAll(Technique):
        """Passes over every block in the first step."""

        saves = paper = "nothing"

        def on_model(self, session: Any) -> None:
            self.stack = session.stack(None, who="DropsAll")

        def on_batch_start(self, session: Any, batch: Any, batch_idx: int) -> None:
            self.stack.dropped = frozenset(() if session.trainer.global_step else range(3))

    looked: list[int] = []
    technique = SomeTokens(5)
    net = Net(Causal)
    attach = technique.attach

    def watched(session: Any) -> None:
        attach(session)
        technique.tokens.also = lambda step, batch: looked.append(step.global_step)

    technique.attach = watched  # type: ignore[method-assign]
    fit_batches(net, [ids(), ids(), ids()], technique, DropsAll())
    assert looked == [1] and [i for i, _ in technique.chosen] == [0, 1, 2] * 2


def test_samples_are_those_that_the_step_gets() -> None:
    """Behind a link that makes 32 samples of 4 tokens of 4 samples of 32: what has 4 entries there are tokens."""

    class Whole(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step((batch["input_ids"], batch["labels"]), batch_idx)

    technique = SomeTokens(2, per_sample=True)
    pieces = eff.SequenceLengthWarmup(start=4, multiple_of=4, until=1.0)
    net = Whole(Causal)
    gradient(net, make_batch("tiny_gpt", size=4), technique, pieces)
    assert net.lengths[-3:] == [4] * 3
    assert [index.shape for _, index in technique.chosen] == [(32, 2)] * 3


def test_with_techniques_that_change_blocks_or_run_the_step_twice() -> None:
    """SAM's passes see the same tokens; dropped and rerun blocks, and shorter sequences, go with it."""
    technique = SomeTokens(5)
    gradient(Net(Causal), ids(), technique, eff.SharpnessAwareMinimization(rho=0.1))
    assert len(technique.chosen) == 6
    for (i, first), (j, again) in zip(technique.chosen[:3], technique.chosen[3:], strict=True):
        assert i == j and torch.equal(first, again)
    reference = gradient(Net(Causal), ids(), SomeTokens(5))
    again = gradient(Net(Causal), ids(), SomeTokens(5), eff.Rematerialization(policy="full"))
    torch.testing.assert_close(again, reference)
    for other in (
        eff.ProgressiveLayerDropping(theta_min=0.3, gamma=20.0),
        eff.SequenceLengthWarmup(start=4, multiple_of=4),
    ):
        technique = SomeTokens(4)
        found = fit_batches(Net(Causal), [ids(seed=i) for i in range(4)], technique, other)
        assert all(g.isfinite().all() for g in found) and technique.chosen
