"""SequencePacking: loss and gradients of the padded batch, fewer tokens computed, and what reads padding is refused."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from lightning_eff.data.tokens._packing.attention import attend
from lightning_eff.data.tokens._packing.padding import find_padding
from lightning_eff.data.tokens._packing.rows import first_fit, in_rows
from lightning_eff.data.tokens.sequence_packing import SequencePacking
from tests.cases import Case, classifier
from tests.models import VOCAB, HuggingFace, trainer
from tests.runs import fit_yaml

_NO_MASK = "found no mask of padding in the batch"
CASES = {
    "SequencePacking": Case(
        active=SequencePacking,
        neutral=lambda: SequencePacking(max_tokens=0),
        model="padded",
        rounds=True,
        idle=("bert",),
        refuses=dict.fromkeys(("gpt2", "llama", "vit", "tiny_gpt"), _NO_MASK),
        lost=(classifier, "classifier", "has the shape|" + _NO_MASK),
    )
}
B, T = 5, 12
LENGTHS = {"right": (12, 3, 7, 5, 4), "left": (12, 3, 7, 5, 4), "one a row": (7, 7, 8, 7, 8)}


def batch(side: str = "right", *, masked: bool = False, seed: int = 0, lengths: tuple[int, ...] | None = None) -> Any:
    """Ids, a mask of padding, and labels that are ignored there; of a masked language model also elsewhere."""
    g = torch.Generator().manual_seed(seed)
    lengths = lengths or LENGTHS[side]
    keep = torch.arange(T).expand(len(lengths), T) < torch.tensor(lengths)[:, None]
    keep = keep.flip(1) if side == "left" else keep
    ids = torch.randint(1, VOCAB, keep.shape, generator=g)  # at padding, too: what stands there has no effect
    labels = ids.masked_fill(~keep, -100)
    if side == "left":  # what stands before a sample's first token would predict it
        labels = torch.where(keep & (keep.cumsum(1) == 1), -100, labels)
    if masked:
        labels = labels.masked_fill(torch.rand(keep.shape, generator=g) < 0.5, -100)
    return {"input_ids": ids, "attention_mask": keep.long(), "labels": labels}


class Taken(pl.Callback):
    """The loss and gradients of each step, and how many tokens the blocks were called on, if ``counted``."""

    def __init__(self, *, counted: bool = True) -> None:
        self.counted = counted
        self.losses: list[Tensor] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.flops: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        if self.counted:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_before_optimizer_step(self, trainer: Any, net: Any, optimizer: Any) -> None:
        if self.counted:
            self._counter.__exit__(None, None, None)
            self.flops.append(self._counter.get_total_flops())
        self.gradients.append({name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})

    def on_train_batch_end(self, trainer: Any, net: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"].detach())


def taken(
    build: Callable[[], Any],
    batches: list[Any],
    *techniques: pl.Callback,
    precision: Any = "64-true",
    counted: bool = True,
) -> Taken:
    """Some steps that change no weight."""
    torch.manual_seed(0)
    net, found = build(), Taken(counted=counted)
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.0)
    run = trainer(*techniques, found, max_steps=len(batches), precision=precision)
    run.fit(net, DataLoader(batches, batch_size=None))
    return found


def same(
    build: Callable[[], Any],
    batches: list[Any],
    technique: SequencePacking,
    precision: Any = "64-true",
    **settings: Any,
) -> tuple[Taken, Taken]:
    """The padded and the packed run; the same losses and gradients."""
    plain = taken(build, batches, precision=precision, **settings)
    packed = taken(build, batches, technique, precision=precision, **settings)
    loss, gradient = (1e-10, 1e-8) if precision == "64-true" else (1e-6, 1e-4)
    torch.testing.assert_close(packed.losses, plain.losses, rtol=loss, atol=0.0)
    for got, expected in zip(packed.gradients, plain.gradients, strict=True):
        assert got.keys() == expected.keys()
        torch.testing.assert_close(got, expected, rtol=gradient, atol=gradient / 100)
    return plain, packed


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "use_cache": False,
    "pad_token_id": 0,
}
HUGGING_FACE: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (hf.AutoModelForCausalLM, {"bos_token_id": 0, "eos_token_id": 0}),
    "llama": (hf.AutoModelForCausalLM, {"num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 0}),
    "qwen3": (hf.AutoModelForCausalLM, {"num_key_value_heads": 1, "head_dim": 8}),
    "bert": (hf.AutoModelForMaskedLM, {}),
    "modernbert": (hf.AutoModelForMaskedLM, {"local_attention": 4, "global_attn_every_n_layers": 2}),
}

WITH_TABLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "deberta-v2": (hf.AutoModelForMaskedLM, {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]})
}


def hugging_face(name: str, attention: str = "sdpa", **settings: Any) -> Callable[[], HuggingFace]:
    def build() -> HuggingFace:
        auto, own = {**HUGGING_FACE, **WITH_TABLES}[name]
        config = hf.AutoConfig.for_model(name, **{**SIZES, **own, **settings})
        for key, value in config.to_dict().items():
            if ("drop" in key or key.endswith("pdrop")) and isinstance(value, float):
                setattr(config, key, 0.0)
        torch.manual_seed(0)
        model = auto.from_config(config, attn_implementation=attention)
        model.train()
        return HuggingFace(model)

    return build


# -- T: losses equal those of padded batches, gradients too, on unchanged modules


QUICK = [("gpt2", "sdpa"), ("qwen3", "sdpa"), ("bert", "eager"), ("modernbert", "sdpa")]


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        pytest.param(*which, marks=() if which in QUICK else pytest.mark.slow)
        for which in ((name, attention) for name in HUGGING_FACE for attention in ("sdpa", "eager"))
    ],
)
def test_losses_and_gradients_of_hugging_face_models(name: str, attention: str) -> None:
    masked = HUGGING_FACE[name][0] is hf.AutoModelForMaskedLM
    batches = [batch(masked=masked, lengths=(T,) * B)]
    batches += 2 * [batch(side, masked=masked, seed=i) for i, side in enumerate(("right", "left", "one a row"))]
    technique = SequencePacking()
    # in eager attention Hugging Face computes the softmax in float32, and what padding sees of a float64 mask is NaN
    precision = "64-true" if attention == "sdpa" else "32-true"
    plain, packed = same(hugging_face(name, attention), batches, technique, precision)
    shares = [b / a for a, b in zip(plain.flops, packed.flops, strict=True)]
    assert shares[0] == 1.0 and all(share < 0.8 for share in shares[-3:]), shares
    assert technique.report() == {"tokens": 40, "rows": 5, "share": 40 / (B * T)}


def test_a_table_of_relative_positions_goes_along_with_rows_of_any_length() -> None:
    """DeBERTa hands its blocks one table (1, T, T) for all samples. Rows of T slots could take it whole, shorter ones not."""
    batches = [batch(masked=True, lengths=lengths) for lengths in ((12, 7, 3, 5, 4), (7, 7, 8, 7, 8), (4, 4, 3, 2, 2))]
    technique = SequencePacking()
    same(hugging_face("deberta-v2", "eager"), batches, technique, "32-true", counted=False)
    assert technique.report() == {"tokens": 15, "rows": 1, "share": 15 / (B * T)}


class Mix(nn.Module):
    """A pre-norm block whose way to mix tokens is ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 8)
        self.qkv = nn.Linear(8, 24)
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(8)

    def attend(self, x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        if self.kind == "flat heads":
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal).unflatten(0, (len(x), -1))
        elif self.kind == "written out":
            scores = (q @ k.transpose(-1, -2)) / 2 + torch.full((x.shape[1],) * 2, -torch.inf).triu(1).to(q)
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return y.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, mask: Tensor | None = None, table: Tensor | None = None) -> Tensor:
        if self.kind == "tokens first":
            return self.mixed(x.transpose(0, 1), mask, table).transpose(0, 1)
        return self.mixed(x, mask, table)

    def mixed(self, x: Tensor, mask: Tensor | None, table: Tensor | None) -> Tensor:
        y = self.norm(x)
        y = y if table is None else y * table
        if self.kind == "mha":
            y = self.mha(y, y, y, key_padding_mask=mask, need_weights=False)[0]
        elif self.kind.startswith("checkpoint"):
            reentrant = self.kind == "checkpoint, reentrant"
            y = torch.utils.checkpoint.checkpoint(self.attend, y, mask, mask is None, use_reentrant=reentrant)
        else:
            y = self.attend(y, mask, mask is None)
        if self.kind == "conv":
            y = self.conv(y.transpose(1, 2)).transpose(1, 2)
        if self.kind == "batch norm":
            y = self.batch_norm(y.flatten(0, 1)).view_as(y)
        return x + self.out(y.tanh())


class Net(pl.LightningModule):
    """Hand-written: what blocks are handed is ``kind``, and what the loss is of is ``head``."""

    def __init__(self, kind: str = "causal", head: str = "tokens") -> None:
        super().__init__()
        self.kind, self.head = kind, head
        self.embed, self.place = nn.Embedding(VOCAB, 8), nn.Embedding(T, 8)
        self.blocks = nn.ModuleList(Mix(kind) for _ in range(2))
        if kind == "torch":
            self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.out = nn.Linear(8, VOCAB)

    def handed(self, keep: Tensor) -> tuple[Any, ...]:
        if self.kind == "mha":
            return (~keep,)
        if self.kind == "torch":  # as nn.TransformerEncoder hands it on
            return (None, torch.zeros(keep.shape, dtype=self.out.weight.dtype).masked_fill(~keep, -torch.inf))
        if self.kind == "keys":
            return (keep[:, None, None, :],)
        if self.kind == "square":
            return ((keep[:, None, :, None] & keep[:, None, None, :]) | torch.eye(T, dtype=torch.bool),)
        if self.kind == "no samples":  # a mask of all samples, and a table of places
            return (torch.full((T, T), -torch.inf, dtype=self.out.weight.dtype).triu(1), self.place.weight.detach())
        return ()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        keep = batch["attention_mask"].bool()
        x = self.embed(batch["input_ids"]) + self.place.weight
        x = x.transpose(0, 1) if self.kind == "tokens first" else x
        for block in self.blocks:
            x = block(x, *self.handed(keep))
        x = x.transpose(0, 1) if self.kind == "tokens first" else x
        if self.head == "tokens":
            return F.cross_entropy(self.out(x).flatten(0, 1), batch["labels"].flatten())
        if self.head == "every label":
            return F.cross_entropy(self.out(x).flatten(0, 1), batch["input_ids"].flatten())
        pooled = {
            "first": lambda: x[:, 0],
            "last token": lambda: x[torch.arange(len(x)), keep.sum(1) - 1],
            "mean of tokens": lambda: (x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True),
            "mean": lambda: x.mean(1),
        }[self.head]()
        return F.cross_entropy(self.out(pooled), batch["input_ids"][:, 0])


RIGHT = [
    *((kind, "tokens") for kind in ("causal", "flat heads", "mha", "keys", "square", "no samples", "tokens first")),
    ("torch", "tokens"),
    *(("keys", head) for head in ("first", "last token", "mean of tokens")),
]


@pytest.mark.parametrize(("kind", "head"), RIGHT)
def test_losses_and_gradients_of_modules_written_by_hand(kind: str, head: str) -> None:
    technique = SequencePacking()
    plain, packed = same(lambda: Net(kind, head), 2 * [batch()], technique)
    if kind == "tokens first":  # and as many samples as tokens
        same(lambda: Net(kind, head), [batch(lengths=(12, *range(1, 12)))], SequencePacking())
    assert packed.flops[1] < 0.8 * plain.flops[1]
    assert technique.report()["rows"] == (1 if kind == "no samples" else 3)


# -- FlexAttention: block masks and scores of the padded batch, or made within the block of what it was handed in rows


class FlexMix(Mix):
    """A block whose attention is FlexAttention, found by the name and with the functions that ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.slopes = nn.Parameter(torch.tensor([0.5, -1.0]))
        self.called = {"attribute": torch.compile(flex_attention), "hidden": partial(flex_attention)}.get(kind)

    def forward(self, x: Tensor, mask: Any = None, table: Any = None, score: Any = None) -> Tensor:
        if self.kind == "slots":  # adds what it was handed, (B, T), which then is in rows in its functions, too
            x = x + (mask * table).unsqueeze(-1)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        if self.kind == "slots":
            keep, places, tokens = mask, table, x.shape[1]

            def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return keep[b, k] & (q >= k)

            def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return s + places[b, k]

            mask = create_block_mask(seen, len(x), None, tokens, tokens, device="cpu")
        elif score is None:

            def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return s + self.slopes[h] * (q - k) + (0 if table is None else table[b, q])

        call = self.called or flex_attention
        y = call(q, k, v, score, block_mask=mask) if self.kind == "attribute" else call(q, k, v, score, mask)
        return x + self.out(y.transpose(1, 2).flatten(2).tanh())


class FlexNet(Net):
    """A block of each of ``kinds``."""

    def __init__(self, kinds: Sequence[str], *, frozen: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FlexMix(kind) for kind in kinds)
        self.requires_grad_(not frozen)
        self.out.requires_grad_(True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        keep = self.seen(batch["attention_mask"].bool())
        places = torch.linspace(-1, 1, keep.numel(), dtype=self.out.weight.dtype).view(keep.shape)

        def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return keep[b, k] & ((q >= k) | (h == 1))

        def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s + places[b, q] * places[b, k]

        mask = create_block_mask(seen, len(keep), 2, T, T, device="cpu")
        handed = {"slots": (keep, places), "score by places": (mask, None, score), "score by slots": (mask, places)}
        x = self.embed(batch["input_ids"]) + self.place.weight
        for block in self.blocks:
            x = block(x, *handed.get(str(block.kind), (mask,)))
        return F.cross_entropy(self.out(x).flatten(0, 1), batch["labels"].flatten())

    def seen(self, keep: Tensor) -> Tensor:
        return keep


UNFUSED = pytest.mark.filterwarnings("ignore:flex_attention called without")
FLEX = ["places", "score by places", "score by slots", "slots", "attribute"]


@pytest.fixture
def eager() -> Iterator[None]:
    """What is compiled runs as it is written: compiling FlexAttention takes seconds, for each of its shapes."""
    with torch.compiler.set_stance("force_eager"):
        yield


@UNFUSED
def test_losses_of_flex_attention(eager: None) -> None:
    """With blocks that do not train, since FlexAttention has no backward pass on a CPU."""
    technique = SequencePacking()
    same(lambda: FlexNet(["places", "slots", "attribute"], frozen=True), [batch("left")], technique, counted=False)
    assert technique.report() == {"tokens": 36, "rows": 3, "share": 36 / (B * T)}
    assert flex.flex_attention is flex_attention and flex_attention.__module__ == flex.__name__, "and nothing is left"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own insides
def test_gradients_of_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own derivation of them, which it keeps from CPUs; with the slopes that a function of scores learns."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    build = lambda: FlexNet([kind for kind in FLEX if kind != "attribute"], frozen=False)  # noqa: E731
    _, packed = same(build, [batch(side) for side in ("right", "left", "one a row")], SequencePacking(), counted=False)
    assert bool(packed.gradients[0]["blocks.0.slopes"].any())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers makes block masks in a way that torch deprecates
@pytest.mark.parametrize("name", ["llama", "qwen3", "modernbert"])
def test_hugging_faces_flex_attention(name: str, eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    technique = SequencePacking()
    batches = [batch(side, masked=name == "modernbert") for side in ("right", "left", "one a row")]
    same(hugging_face(name, "flex_attention"), batches, technique, counted=False)
    assert technique.report() == {"tokens": 40, "rows": 5, "share": 40 / (B * T)}


@UNFUSED
def test_flex_attention_that_cannot_be_met_is_refused(eager: None) -> None:
    refused(FlexNet(["hidden"] * 2, frozen=True), [batch()], "flex_attention, by a global of a file or an attribute")

    class Seen(FlexNet):
        def seen(self, keep: Tensor) -> Tensor:
            return torch.ones_like(keep) if self.trainer.global_step else keep

    net = Seen(["places"] * 2, frozen=True)
    refused(net, [batch(), batch()], "FlexAttention's block mask lets tokens see padding")


def test_on_other_devices_attention_has_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, too, one call with a block-diagonal mask computes what one call a sample does."""
    called: list[int] = []
    plain = F.scaled_dot_product_attention

    def count(*args: Any, **kwargs: Any) -> Tensor:
        called.append(len(args[0]))
        return plain(*args, **kwargs)

    keep = batch()["attention_mask"].bool()
    rows = in_rows(keep, None)
    assert rows is not None and rows.slots is not None
    q, k, v = torch.randn(3, rows.count, 2, rows.length, 4).double()
    masks = [
        None,
        torch.rand(rows.count, 1, rows.length, rows.length) < 0.7,
        torch.randn(rows.length, rows.length).double(),
    ]
    for mask in masks:
        if mask is not None and mask.dtype == torch.bool:
            mask |= torch.eye(rows.length, dtype=torch.bool)
        for causal in (False, True)[: 2 if mask is None else 1]:
            called.clear()
            apart = attend(count, rows, q, k, v, mask, is_causal=causal)
            assert called == [1] * B
            whole = attend(count, rows, q, k, v, mask, is_causal=causal, apart=False)
            assert called == [1] * B + [rows.count]
            a, b = (t.transpose(1, 2).flatten(0, 1)[rows.slots] for t in (apart, whole))
            torch.testing.assert_close(a, b)
    same(lambda: Net("causal"), [batch()], SequencePacking())
    monkeypatch.setattr("lightning_eff.data.tokens._packing.attention.APART", ())
    same(lambda: Net("causal"), [batch()], SequencePacking())


def test_rows_hold_each_token_once_in_its_order() -> None:
    assert first_fit([3, 9, 0, 6, 1], 10) == [[1, 4], [3, 0]]
    keep = torch.rand(7, 20, generator=torch.Generator().manual_seed(0)) < 0.4
    for capacity in (None, 1, 15, 100):
        rows = in_rows(keep, capacity)
        assert rows is not None
        longest = int(keep.sum(1).max())
        assert rows.length <= (20 if capacity is None else max(capacity, longest))
        told = [
            (s, p)
            for s, p, g in zip(*(t.flatten().tolist() for t in (rows.sample, rows.place, rows.segment)), strict=True)
            if g >= 0
        ]
        assert sorted(told) == [tuple(place) for place in keep.nonzero().tolist()]
        for piece in rows.pieces:
            if piece.sample >= 0:
                assert (
                    rows.place[piece.row, piece.start : piece.stop].tolist()
                    == keep[piece.sample].nonzero().flatten().tolist()
                )
    assert in_rows(torch.ones(3, 4, dtype=torch.bool), None) is None and in_rows(~keep & keep, None) is None


# -- what reads padding, or mixes tokens otherwise, is refused before weights change


def refused(net: pl.LightningModule, batches: list[Any], message: str, technique: Any = None) -> None:
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=f"SequencePacking.*{message}"):
        trainer(technique or SequencePacking(), max_steps=len(batches)).fit(net, DataLoader(batches, batch_size=None))
    if len(batches) == 1:
        assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


WRONG = {
    "mean": (lambda: Net("keys", "mean"), "with other values at padding.*reads padding"),
    "every label": (lambda: Net("keys", "every label"), "with other values at padding.*reads padding"),
    "conv": (lambda: Net("conv"), r"block 0 of 'blocks' .* cannot be called without padding: .*convolutions"),
    "batch norm": (lambda: Net("batch norm"), "statistics of the batch"),
    "written out": (lambda: Net("written out"), "attention written out with a mask of its own"),
    "checkpoint, reentrant": (
        lambda: Net("checkpoint, reentrant"),
        "attention is within a checkpoint inside of its block",
    ),
    "checkpoint": (lambda: Net("checkpoint"), "attention is within a checkpoint inside of its block"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", [*WRONG])
def test_what_padding_has_an_effect_on_is_refused(name: str) -> None:
    build, message = WRONG[name]
    refused(build(), [batch()], message)


def test_what_a_later_batch_changes_is_looked_at() -> None:
    """Causal blocks without a mask are right with padding behind the tokens, and wrong with padding in front."""
    refused(Net("causal"), [batch(), batch("left")], "cannot be called without padding: .*its tokens see padding")
    other = batch(seed=1)
    other["labels"] = other["input_ids"]
    refused(Net("causal"), [batch(), other], "the loss reads what the blocks return at padding")

    class Seen(Net):
        def handed(self, keep: Tensor) -> tuple[Any, ...]:
            return super().handed(torch.ones_like(keep) if self.trainer.global_step else keep)

    refused(Seen("keys"), [batch(), batch()], "the mask 1 that blocks receive lets tokens see padding")


def test_routers_losses_are_refused() -> None:
    config = hf.MixtralConfig(
        **SIZES, num_local_experts=2, num_experts_per_tok=1, num_key_value_heads=1, output_router_logits=True
    )
    refused(HuggingFace(hf.MixtralForCausalLM(config).train()), [batch()], "router's loss")


def test_compiled_blocks_are_refused() -> None:
    net = Net()
    out: Any = net.blocks[1].get_submodule("out")
    out._compiled_call_impl = out._call_impl  # as compile() leaves it, which takes seconds
    refused(net, [batch()], "block 1 of .* is compiled in out, but attention")


# -- how padding is found


def test_padding_is_found_by_masks_of_many_makes() -> None:
    keep, ids = batch("left")["attention_mask"], batch("left")["input_ids"]
    found = [
        find_padding({"ids": ids, "padding_mask": keep == 0}, None, None, who="t"),
        find_padding((ids, keep.bool()), None, None, who="t"),
        find_padding({"ids": ids, "mask": keep.float(), "loss_mask": keep}, None, None, who="t"),
        find_padding({"attention_mask": keep, "pad_mask": keep}, None, None, who="t"),
        find_padding({"a": ids, "b": keep}, "b", None, who="t"),
    ]
    for padding, data in zip(
        found,
        [
            {"ids": ids, "padding_mask": keep == 0},
            (ids, keep.bool()),
            {"ids": ids, "mask": keep.float()},
            {"attention_mask": keep},
            {"b": keep},
        ],
        strict=True,
    ):
        got = padding.keep(data)
        assert got is not None and torch.equal(got, keep.bool())
        assert padding.keep({"ids": ids}) is None
    by_id = find_padding({"ids": ids}, None, 7, who="t")
    padded = torch.tensor([[7, 7, 1, 7, 2], [1, 2, 7, 7, 7]])
    got = by_id.keep({"ids": padded})
    assert got is not None and got.tolist() == [[False, False, True, True, True], [True, True, False, False, False]]
    with pytest.raises(ValueError, match=r"several masks in the batch.*mask="):
        find_padding({"x_mask": keep, "y_mask": keep}, None, None, who="t")
    with pytest.raises(ValueError, match=r"mask='z'\): the batch holds"):
        find_padding({"x_mask": keep}, "z", None, who="t")
    with pytest.raises(ValueError, match="in a later batch, but must be"):
        found[4].keep({"b": keep + 1})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"max_tokens": -1}, r"max_tokens=-1\): expected"), ({"pad_token_id": 0.5}, r"pad_token_id=0.5\): expected")],
)
def test_arguments_out_of_their_range(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"SequencePacking.*{message}"):
        SequencePacking(**kwargs)


def test_yaml_runs(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "SequencePacking", {"max_tokens": 32}, model="TinyGPT", data="Padded", max_steps=2)
