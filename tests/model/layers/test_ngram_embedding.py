"""Tables of n-grams: the rows against a loop in float64, causality, the optimizer against torch's, and where it is refused."""

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_eff as eff
from lightning_eff import LayerScale, NgramEmbedding, QKNorm
from lightning_eff._core._optim.combined import CombinedOptimizer
from lightning_eff.model.layers._ngrams.row_adam import RowAdam
from lightning_eff.model.layers._ngrams.table import Ngrams, NgramTable, beside, ngram_rows
from tests.cases import Case, classifier
from tests.models import VOCAB, HuggingFace, TinyGPT, flat, loader, make_batch, module, trainer
from tests.runs import fit

CASES = {
    "NgramEmbedding": Case(
        active=lambda: NgramEmbedding(buckets=128),
        neutral=lambda: NgramEmbedding(buckets=0),
        architecture=True,
        stays="NgramEmbedding put NgramEmbedding in the place of embed: its output depends on 2 tokens",
        own_optimizer=True,
        refuses={"vit": "HuggingFace has no token embedding"},
        lost=(classifier, "classifier", "TinyClassifier has no token embedding"),
    )
}

# -- the rule


def slow_rows(ids: list[int], n: int, rows: int, vocabulary: int, padding: int | None) -> list[int]:
    """One position after the other, in Python's integers."""
    found = []
    for t in range(len(ids)):
        gram = ids[t - n + 1 : t + 1] if t >= n - 1 else []
        if not gram or padding in gram:
            found.append(rows)
        elif vocabulary**n <= rows:
            number = 0
            for x in gram:  # Horner's scheme to the base of the vocabulary
                number = number * vocabulary + x
            found.append(number)
        else:
            prime, number = 2**31 - 1, 0
            for x in gram:
                number = (number + x) * 950706376 % prime
            for _ in range(2):
                number = ((number >> 16) ^ number) * 0x45D9F3B % 2**32
            found.append(((number >> 16) ^ number) % rows)
    return found


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize(("n", "buckets"), [(1, 50), (1, 7), (2, 400), (2, 399), (2, 17), (3, 8000), (3, 101), (9, 64)])
def test_each_position_gets_the_row_of_its_n_gram(
    n: int, buckets: int, padding: int | None, batch_first: bool, dtype: torch.dtype
) -> None:
    """Against a loop over positions, in float64."""
    vocabulary, rows = 20, min(20**n, buckets)
    plain = nn.Embedding(vocabulary, 5, padding_idx=padding, dtype=torch.float64)
    table = NgramTable(rows, 5).double()
    with torch.no_grad():
        table.weight[:-1].normal_()
    ids = torch.randint(0, vocabulary, (4, 12), dtype=dtype)
    got = beside(plain, table, [n], [rows], batch_first=batch_first)(ids if batch_first else ids.T)
    got = got if batch_first else got.transpose(0, 1)
    for b, row in enumerate(ids.tolist()):
        for t, at in enumerate(slow_rows(row, n, rows, vocabulary, padding)):
            added = table.weight[at] if at < rows else torch.zeros(5, dtype=torch.float64)
            torch.testing.assert_close(got[b, t], plain.weight[row[t]] + added, rtol=0, atol=0)


@pytest.mark.parametrize("padding", [None, 3])
def test_n_grams_of_several_orders_have_each_their_part_of_one_table(padding: int | None) -> None:
    """Against a loop over positions, each order with its own rows, in float64; and gradients of both layouts."""
    torch.manual_seed(0)
    plain = nn.Embedding(20, 5, padding_idx=padding, dtype=torch.float64)
    net = eff.apply(nn.Sequential(plain), NgramEmbedding(n=[1, 3, 2], buckets=399)).double()
    made, ids = net[0], torch.randint(0, 20, (4, 12))
    assert made.orders == (1, 3, 2) and made.rows == (20, 399, 399)
    assert [made.exact(k) for k in range(3)] == [True, False, False] and made.ngrams.num_embeddings == 819
    with torch.no_grad():
        made.ngrams.weight[:-1].normal_()
    weight = made.ngrams.weight.detach().clone().requires_grad_()
    wanted = []
    for row in ids.tolist():
        parts = [(slow_rows(row, n, r, 20, padding), r, at) for n, r, at in ((1, 20, 0), (3, 399, 20), (2, 399, 419))]
        told = [sum(weight[f[t] + at] for f, r, at in parts if f[t] < r) for t in range(12)]
        wanted.append(torch.stack([plain.weight[row[t]] + told[t] for t in range(12)]))
    torch.testing.assert_close(net(ids), torch.stack(wanted))
    torch.stack(wanted).square().sum().backward()
    for sparse in (False, True):
        made.ngrams.sparse, made.ngrams.weight.grad = sparse, None
        net(ids).square().sum().backward()
        grad = made.ngrams.weight.grad
        assert grad.is_sparse == sparse
        torch.testing.assert_close(grad.to_dense() if sparse else grad, weight.grad)
    assert "n=1 exact, n=3 hashed, n=2 hashed" in repr(net)


def test_an_exact_table_has_a_row_for_each_n_gram() -> None:
    grams = torch.cartesian_prod(*[torch.arange(9)] * 3)
    rows = ngram_rows(grams, 3, 9**3, vocabulary=9)[:, -1]
    assert rows.unique().numel() == 9**3 and int(rows.max()) == 9**3 - 1 and int(rows.min()) == 0


@pytest.mark.parametrize(
    ("vocabulary", "buckets", "rows"), [(256, None, 65536), (257, None, 65536), (50304, None, 251520)]
)
def test_tables_have_a_row_for_each_n_gram_where_that_is_few(vocabulary: int, buckets: int | None, rows: int) -> None:
    net = eff.apply(nn.Sequential(nn.Embedding(vocabulary, 1)), NgramEmbedding(buckets=buckets))
    (found,) = (m for m in net.modules() if isinstance(m, Ngrams))
    assert found.ngrams.num_embeddings == rows + 1 and found.exact(0) == (vocabulary**2 <= rows)
    assert not found.ngrams.weight.any()


def in_a_square() -> Tensor:
    """The bigrams of 300 tokens in order: 90,000, which a poor hash folds onto few rows."""
    return torch.cartesian_prod(torch.arange(300), torch.arange(300))


def in_strides() -> Tensor:
    """90,000 bigrams of a vocabulary of 50,304, in steps of 128 and 64."""
    return torch.cartesian_prod(torch.arange(300) * 128, torch.arange(300) * 64)


def at_random() -> Tensor:
    return torch.randint(0, 50304, (90000, 2), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rows", [4096, 65536, 10007, 251520])
@pytest.mark.parametrize("grams", [in_a_square, in_strides, at_random])
def test_hashes_spread_n_grams_over_all_rows(grams: Callable[[], Tensor], rows: int) -> None:
    """As evenly as a random function would, at least: in rows that are met, and in how many meet in the fullest."""
    load = torch.bincount(ngram_rows(grams(), 2, rows, vocabulary=50304)[:, -1], minlength=rows).double()
    mean = 90000 / rows
    at_chance = rows * (1 - (1 - 1 / rows) ** 90000)
    assert (load > 0).sum() > 0.97 * at_chance
    assert load.max() <= mean + 6 * mean**0.5 + 6


# -- the module


def grown(net: Any, **kwargs: Any) -> Any:
    """With a table that holds something."""
    eff.apply(net, NgramEmbedding(**kwargs))
    for m in net.modules():
        if isinstance(m, Ngrams):
            with torch.no_grad():
                m.ngrams.weight[:-1].normal_(generator=torch.Generator().manual_seed(3))
    return net


def qwen3(**kwargs: Any) -> HuggingFace:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tied = {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True, "use_cache": False}
    return HuggingFace(Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, **sizes, **tied, **kwargs)).train())


def mixtral() -> HuggingFace:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "use_cache": False}
    return HuggingFace(MixtralForCausalLM(MixtralConfig(vocab_size=VOCAB, **sizes, **experts)).train())


def modern_bert() -> HuggingFace:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "cls_token_id": 0, "sep_token_id": 0}
    return HuggingFace(ModernBertForMaskedLM(ModernBertConfig(vocab_size=VOCAB, **sizes, **ids)).train())


def gpt() -> pl.LightningModule:
    from examples.gpt.module import GPT

    return GPT(dim=16, num_layers=2, num_heads=2, block_size=32, num_samples=0)


MODELS: dict[str, tuple[Callable[[], pl.LightningModule], str, str]] = {
    "tiny_gpt": (lambda: module("tiny_gpt", dropout=0.0), "tiny_gpt", "embed"),
    "gpt": (gpt, "tiny_gpt", "token"),
    "gpt2": (lambda: module("gpt2"), "gpt2", "model.transformer.wte"),
    "llama": (lambda: module("llama"), "llama", "model.model.embed_tokens"),
    "qwen3": (qwen3, "llama", "model.model.embed_tokens"),
    "mixtral": (mixtral, "llama", "model.model.embed_tokens"),
    "modern_bert": (modern_bert, "bert", "model.model.embeddings.tok_embeddings"),
    "bert": (lambda: module("bert"), "bert", "model.bert.embeddings.word_embeddings"),
    "t5": (lambda: module("t5"), "t5", "model.shared"),
}


def build(name: str) -> pl.LightningModule:
    pl.seed_everything(1, verbose=False)
    return MODELS[name][0]()


def loss_of(net: Any, batch: Any) -> Tensor:
    net.__dict__["log"] = lambda *args, **kwargs: None
    return net.training_step(batch, 0)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_with_a_table_of_zeros_every_model_is_the_plain_one_and_learns(name: str) -> None:
    net, batch, path = build(name), make_batch(MODELS[name][1]), MODELS[name][2]
    plain = copy.deepcopy(net)
    eff.apply(net, NgramEmbedding(buckets=500))
    ours = net.get_submodule(path)
    assert isinstance(ours, Ngrams) and type(plain.get_submodule(path)) in type(ours).__mro__
    state = plain.state_dict()
    assert list(net.state_dict()) != list(state) and set(net.state_dict()) > set(state)
    assert {k.rpartition(".ngrams.")[2] for k in net.state_dict().keys() - state.keys()} == {"weight"}
    assert sum(p.numel() for p in net.parameters()) - sum(p.numel() for p in plain.parameters()) == (
        501 * ours.embedding_dim
    ), "one table, however many look it up"
    heads = [m.weight for m in net.modules() if isinstance(m, nn.Linear)]
    tied = [m.weight for m in plain.modules() if isinstance(m, nn.Linear)]
    assert any(w is ours.weight for w in heads) == any(w is plain.get_submodule(path).weight for w in tied)
    if isinstance(net, HuggingFace):
        assert net.model.get_input_embeddings().weight is ours.weight
    torch.manual_seed(0)
    losses = [loss_of(plain, batch)]
    torch.manual_seed(0)
    losses.append(loss_of(net, batch))
    assert torch.equal(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    for key, p in plain.named_parameters():
        grad = net.get_parameter(key).grad
        assert (grad is None) == (p.grad is None) and (grad is None or torch.equal(grad, p.grad)), key
    net = build(name)
    before = flat(net)
    technique = NgramEmbedding(buckets=500)
    trainer(technique, max_steps=3).fit(net, loader(MODELS[name][1]))
    table = net.get_submodule(path).ngrams.weight
    moved = (table != 0).any(1)
    assert 0 < moved.sum() < 501 and not moved[-1] and technique.report()["sparse"] == 1
    assert not torch.equal(flat(build(name)), before) or before.isfinite().all()
    copied = pickle.loads(pickle.dumps(net.get_submodule(path)))
    ids = torch.arange(20).view(2, 10)
    for again in (copied, copy.deepcopy(net).get_submodule(path)):
        assert torch.equal(again(ids), net.get_submodule(path)(ids)) and type(again) is type(ours)


@pytest.mark.parametrize("name", ["tiny_gpt", "gpt", "llama"])
@pytest.mark.parametrize("n", [2, 3])
def test_no_output_depends_on_a_later_id(name: str, n: int) -> None:
    net: Any = grown(build(name), n=n, buckets=500).eval()
    ids = make_batch("tiny_gpt")["input_ids"]
    found = (lambda x: net.model(x).logits) if isinstance(net, HuggingFace) else net
    earlier = later = 0
    with torch.no_grad():
        before = found(ids)
        for t in range(1, ids.shape[1]):
            other = ids.clone()
            other[:, t] = (other[:, t] + 7) % VOCAB
            changed = (found(other) != before).any(-1).any(0)
            earlier += int(changed[:t].sum())
            later += int(changed[t : t + n].sum())
    assert earlier == 0 and later > 20, (earlier, later)


def test_the_embedding_itself_sees_n_ids_and_no_more() -> None:
    for orders, n in ((1, 1), (2, 2), (3, 3), ([2, 3], 3)):
        net = grown(nn.Sequential(nn.Embedding(VOCAB, 4)), n=orders, buckets=10**6)
        ids = torch.randint(0, VOCAB, (1, 16))
        other = ids.clone()
        other[0, 5] = (other[0, 5] + 1) % VOCAB
        changed = (net(ids) != net(other)).any(-1)[0].nonzero().flatten().tolist()
        assert changed == list(range(5, 5 + n))


def test_padding_has_no_n_grams_so_that_left_padding_changes_nothing() -> None:
    net = grown(nn.Sequential(nn.Embedding(VOCAB, 4, padding_idx=0)), buckets=500)
    ids = torch.randint(1, VOCAB, (3, 8))
    padded = F.pad(ids, (3, 2))
    assert torch.equal(net(padded)[:, 3:-2], net(ids))
    assert not net(padded)[:, :3].any() and not net(padded)[:, -2:].any()


def test_embeddings_of_another_class_stay_of_it() -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: Tensor, scale: float = 3.0) -> Tensor:
            return super().forward(input) * scale

    net = nn.Sequential(Scaled(VOCAB, 4))
    ids = torch.randint(0, VOCAB, (2, 8))
    before = net(ids)
    eff.apply(net, NgramEmbedding())
    assert isinstance(net[0], Scaled) and torch.equal(net(ids), before)
    assert torch.equal(net[0](ids, scale=1.0), F.embedding(ids, net[0].weight))
    one = eff.apply(nn.Sequential(Scaled(VOCAB, 4)), NgramEmbedding(n=1))
    with pytest.raises(ValueError, match="the output of Scaled is not just rows of its weight"):
        eff.export(one)


# -- what it is applied to


class TwoTables(nn.Module):
    def __init__(self, tie: bool = False) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(50, 8), nn.Embedding(60, 8)
        self.position, self.out = nn.Embedding(9, 8), nn.Linear(8, 60, bias=False)
        if tie:
            self.out.weight = self.target.weight


def test_which_embedding_is_meant_is_found_or_asked() -> None:
    with pytest.raises(
        ValueError,
        match=r"the token embedding is ambiguous: TwoTables has source \(50 x 8\), target \(60 x 8\), position",
    ):
        eff.apply(TwoTables(), NgramEmbedding())
    with pytest.raises(ValueError, match=r"no nn.Embedding is named 'sauce'"):
        eff.apply(TwoTables(), NgramEmbedding(embeddings=["sauce"]))
    tied = eff.apply(TwoTables(tie=True), NgramEmbedding())
    assert isinstance(tied.target, Ngrams) and type(tied.source) is nn.Embedding
    assert tied.out.weight is tied.target.weight
    both = eff.apply(TwoTables(), NgramEmbedding(embeddings=["source", "target"]))
    assert both.source.ngrams.num_embeddings == 2501 and both.target.ngrams.num_embeddings == 3601
    assert both.source.ngrams.weight is not both.target.ngrams.weight
    one = eff.apply(TwoTables(), NgramEmbedding(embeddings="source"))
    assert isinstance(one.source, Ngrams) and not isinstance(one.target, Ngrams)


def test_a_t5_has_one_table_for_what_its_encoder_and_its_decoder_read() -> None:
    net: Any = grown(build("t5"), buckets=500)
    tables = {id(m.ngrams.weight) for m in net.modules() if isinstance(m, Ngrams)}
    assert len(tables) == 1 and sum(isinstance(m, Ngrams) for m in net.modules()) >= 1
    loss_of(net, make_batch("t5")).backward()
    assert net.model.get_input_embeddings().ngrams.weight.grad.any()


def test_generation_without_a_cache_is_right_and_with_one_refused() -> None:
    for name in ("gpt2", "llama", "t5"):
        net: Any = grown(build(name), buckets=500).eval()
        ids = make_batch(name)["input_ids"][:, :6].clamp(min=1)  # 0 is padding's
        net.model.generation_config.eos_token_id = None
        settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        with pytest.raises(
            ValueError, match=r"called with past_key_values, which holds earlier tokens.*use_cache=False"
        ):
            net.model.generate(ids, **settings, use_cache=True)
        got = net.model.generate(ids, **settings, use_cache=False)
        if name == "t5":
            continue
        wanted = ids
        for _ in range(4):
            wanted = torch.cat([wanted, net.model(wanted).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(got, wanted)
        one = eff.apply(build(name), NgramEmbedding(n=1))  # of one token alone, so that a cache is as before
        assert one.model.generate(ids, **settings, use_cache=True).shape == got.shape


class Cached(nn.Module):
    """Hand-written, with a cache that is a list of tensors by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, 8)

    def forward(self, ids: Tensor, past: Any = None, start_pos: int = 0) -> Tensor:
        return self.token(ids)


def test_caches_of_hand_written_models_are_refused_too() -> None:
    net, ids = eff.apply(Cached(), NgramEmbedding()), torch.zeros(1, 4, dtype=torch.long)
    for empty in (None, [], [(torch.zeros(1, 2, 0, 8), torch.zeros(1, 2, 0, 8))]):
        net(ids, empty)
    with pytest.raises(ValueError, match="Cached is called with past, which holds earlier tokens"):
        net(ids, [(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))])
    with pytest.raises(ValueError, match="Cached is called with start_pos"):
        net(ids, start_pos=4)
    assert eff.apply(Cached(), NgramEmbedding(n=1))(ids, start_pos=4).shape == (1, 4, 8)


def test_ids_whose_order_is_not_known_are_refused() -> None:
    net = eff.apply(nn.Sequential(nn.Embedding(VOCAB, 4)), NgramEmbedding())
    for shape in ((12,), (2, 3, 4)):
        with pytest.raises(ValueError, match=r"got ids of shape .*; expected \(B, T\)"):
            net(torch.zeros(shape, dtype=torch.long))

    class Transposing(TinyGPT):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids.T).transpose(0, 1) + self.position.weight[: ids.shape[1]]
            for block in self.blocks or ():
                x = block(x)
            return self.head(self.norm(x))

    with pytest.raises(ValueError, match=r"gets the batch's ids transposed, with shape \(32, 4\).*batch_first=False"):
        trainer(NgramEmbedding(), max_steps=2).fit(Transposing(), loader("tiny_gpt"))
    trainer(NgramEmbedding(batch_first=False), max_steps=2).fit(Transposing(), loader("tiny_gpt"))

    def first() -> nn.Module:
        return nn.ModuleDict({"token": nn.Embedding(VOCAB, 8), "layer": nn.TransformerEncoderLayer(8, 2)})

    with pytest.raises(ValueError, match=r"layer.self_attn \(MultiheadAttention\) has batch_first=False"):
        eff.apply(first(), NgramEmbedding())
    assert eff.apply(first(), NgramEmbedding(batch_first=False)).token.batch_first is False


def test_a_table_that_is_never_looked_up_is_an_error() -> None:
    class OneHot(TinyGPT):
        def forward(self, ids: Tensor) -> Tensor:
            return self.head(F.one_hot(ids, VOCAB).float() @ self.embed.weight)

    net = OneHot()
    with pytest.raises(ValueError, match="the training step never calls the token embedding"):
        trainer(NgramEmbedding(), max_steps=2).fit(net, loader("tiny_gpt"))
    assert type(net.embed) is nn.Embedding or isinstance(net.embed, Ngrams)

    class HandTied(TinyGPT):
        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(self.norm(self.embed(ids)), self.embed.weight)

    trainer(NgramEmbedding(), max_steps=2).fit(HandTied(), loader("tiny_gpt"))


# -- export


def test_export_is_refused_in_words_but_for_one_token() -> None:
    net = grown(build("tiny_gpt"))
    with pytest.raises(ValueError, match=r"its output depends on 2 tokens, .*lightning_eff.apply\(plain"):
        eff.export(net)
    for buckets in (None, 10):
        one: Any = grown(build("tiny_gpt"), n=1, buckets=buckets).eval()
        plain = eff.export(one)
        ids = make_batch("tiny_gpt")["input_ids"]
        assert type(plain.embed) is nn.Embedding and list(plain.state_dict()) == list(build("tiny_gpt").state_dict())
        torch.testing.assert_close(plain(ids), one(ids), rtol=0, atol=1e-6)
    with pytest.raises(
        ValueError, match="What NgramEmbedding learnt at token folds into its weight, but head uses this tensor too"
    ):
        eff.export(grown(build("gpt"), n=1))


# -- the optimizer


def stepped(
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer], *, sparse: bool, steps: int = 30
) -> tuple[Any, ...]:
    """A table after some steps, what its optimizer keeps for it, and the rows that had gradients."""
    g = torch.Generator().manual_seed(5)
    w = nn.Parameter(torch.randn(50, 6, generator=g))
    made, seen = optimizer([w]), set()
    for _ in range(steps):
        rows = torch.randint(0, 40, (9,), generator=g)
        values = torch.randn(9, 6, generator=g)
        seen |= set(rows.tolist())
        gradient = torch.sparse_coo_tensor(rows[None], values, (50, 6), check_invariants=True)
        w.grad = gradient if sparse else gradient.to_dense()
        made.step()
    return w, made.state[w], seen


def test_its_steps_are_those_of_sparse_adam_and_no_other_row_is_touched() -> None:
    settings = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6}
    ours, state, seen = stepped(lambda p: RowAdam(p, **settings), sparse=True)
    theirs, reference, _ = stepped(lambda p: torch.optim.SparseAdam(p, **settings), sparse=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(state[name], reference[name], rtol=1e-6, atol=1e-6)
    start = torch.randn(50, 6, generator=torch.Generator().manual_seed(5))
    rest = [row for row in range(50) if row not in seen]
    assert len(rest) >= 10 and torch.equal(ours.detach()[rest], start[rest]) and not state["exp_avg_sq"][rest].any()
    assert all(not torch.equal(ours.detach()[row], start[row]) for row in seen)
    dense, _, _ = stepped(lambda p: RowAdam(p, **settings), sparse=False)
    torch.testing.assert_close(dense, ours, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rows", [1_000, 1_000_000])
def test_a_step_costs_as_many_elements_whatever_the_size_of_the_table(rows: int) -> None:
    """Those written by the step, and those that the gradient holds."""
    net = nn.Sequential(nn.Embedding(5000, 4))
    eff.apply(net, NgramEmbedding(buckets=rows))
    table: Any = net[0].ngrams
    table.sparse = True
    optimizer = RowAdam([table.weight], lr=0.02)
    ids = torch.randint(0, 5000, (4, 17), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        optimizer.zero_grad()
        net(ids).square().sum().backward()
        gradient = table.weight.grad
        assert gradient.is_sparse and gradient.coalesce().values().numel() <= 4 * 16 * 4
        optimizer.step()
    assert optimizer.rows > 50 and optimizer.written == 3 * 4 * optimizer.rows <= 3 * 4 * 4 * 16


class Scheduled(TinyGPT):
    """With groups, a scheduler and, if asked, lists of parameters by name."""

    def __init__(self, how: str = "groups") -> None:
        super().__init__(num_layers=2, dropout=0.0)
        self.how = how

    def configure_optimizers(self) -> Any:
        every = list(self.parameters())
        if self.how == "named":
            parts = [self.embed.weight, self.position.weight, *self.norm.parameters(), *self.head.parameters()]
            every = [*parts, *(self.blocks or nn.ModuleList()).parameters()]
        groups = [
            {"params": [p for p in every if p.ndim > 1], "lr": 0.01, "weight_decay": 0.1},
            {"params": [p for p in every if p.ndim < 2], "lr": 0.002, "weight_decay": 0.0},
        ]
        if self.how == "two":
            return [torch.optim.AdamW(groups[:1]), torch.optim.AdamW(groups[1:])], []
        if self.how == "lbfgs":
            return torch.optim.LBFGS(every)
        optimizer = torch.optim.AdamW(groups)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


class Rates(pl.Callback):
    """Each step's rates of the groups, by the name of the group's first parameter."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        names = {id(p): name for name, p in pl_module.named_parameters()}
        groups = trainer.optimizers[0].param_groups
        self.seen.append({names[id(group["params"][0])]: group["lr"] for group in groups})


@pytest.mark.parametrize("how", ["groups", "named"])
def test_the_tables_rate_follows_the_modules_schedule_in_proportion(how: str, tmp_path: Path) -> None:
    rates, net = Rates(), Scheduled(how)
    monitor = LearningRateMonitor("step")
    t = trainer(NgramEmbedding(lr=0.05), rates, monitor, max_steps=4, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    t.fit(net, loader("tiny_gpt"))
    for step, seen in enumerate(rates.seen):
        share = (step + 1) / 10
        assert seen == pytest.approx(
            {"embed.ngrams.weight": 0.05 * share, "embed.weight": 0.01 * share, "norm.weight": 0.002 * share}
        )
    held = [id(p) for group in t.optimizers[0].param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(net.parameters()))
    assert isinstance(t.optimizers[0], CombinedOptimizer)


def test_one_optimizer_must_have_the_embedding_and_need_gradients_alone() -> None:
    trainer(NgramEmbedding(optimizer="module"), max_steps=2).fit(Scheduled(), loader("tiny_gpt"))
    with pytest.raises(ValueError, match="LBFGS evaluates the loss within its step"):
        trainer(NgramEmbedding(), max_steps=2).fit(Scheduled("lbfgs"), loader("tiny_gpt"))
    net = Scheduled("two")
    net.automatic_optimization = False
    plain = net.training_step

    def step(batch: Any, batch_idx: int) -> None:
        optimizers: Any = net.optimizers()
        for one in optimizers:
            one.zero_grad()
        net.manual_backward(plain(batch, batch_idx))
        for one in optimizers:
            one.step()

    net.training_step = step  # type: ignore[method-assign]
    t = trainer(NgramEmbedding(), max_steps=4)
    t.fit(net, loader("tiny_gpt"))
    assert [isinstance(o, CombinedOptimizer) for o in t.optimizers] == [True, False]
    assert net.embed.ngrams.weight.any()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]


@pytest.mark.parametrize("parameters", ["matrices", "all"])
@pytest.mark.parametrize("first", [True, False])
def test_beside_another_optimizer_put_in_the_place_of_the_modules(
    parameters: str, first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    replaced = eff.ReplaceOptimizer(eff.Muon if parameters == "matrices" else eff.Lion, parameters, lr=0.003)
    rates, mine = Rates(), NgramEmbedding(lr=0.05)
    pair = [mine, replaced] if first else [replaced, mine]
    net = Scheduled()
    t = trainer(*pair, rates, max_steps=3)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        t.fit(net, loader("tiny_gpt"))
    assert [seen["embed.ngrams.weight"] for seen in rates.seen] == pytest.approx([0.005, 0.01, 0.015])
    held = [id(p) for group in t.optimizers[0].param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(net.parameters()))
    others = len(held) - 1 if parameters == "all" else sum(p.ndim == 2 for p in net.blocks.parameters())  # pyright: ignore[reportOptionalMemberAccess]
    assert replaced.report()["tensors"] == others
    assert mine.report()["sparse"] == 1
    (told,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("ReplaceOptimizer:")]
    (row,) = [line for line in told.splitlines() if "embed.ngrams.weight" in line]
    assert row.startswith("  RowAdam, learning rate 0.05 (AdamW had 0.01) under LambdaLR: 1 tensors")


@pytest.mark.parametrize(
    "settings", [{"group_lr": {"*.ngrams.*": 0.3}}, {"optimizer": eff.Lion, "parameters": ["*.ngrams.weight"]}]
)
def test_a_rate_that_another_gives_the_tables_rows_is_refused(settings: dict[str, Any]) -> None:
    net, alone = Scheduled(), eff.ReplaceOptimizer(group_lr={"embedding": 0.3, "head": 0.2})
    before = flat(net).clone()
    (name,) = settings.keys() - {"optimizer"}
    message = rf"ReplaceOptimizer\({name}='.*'\): another technique's RowAdam steps embed.ngrams.weight"
    with pytest.raises(ValueError, match=message):
        trainer(NgramEmbedding(), eff.ReplaceOptimizer(**settings), max_steps=1).fit(net, loader("tiny_gpt"))
    assert torch.equal(flat(net), before)
    trainer(NgramEmbedding(), alone, max_steps=1).fit(net, loader("tiny_gpt"))
    assert alone.report()["tensors"] == len(list(net.parameters())) - 1, "the table's rate is not by its group"


class Reads(pl.Callback):
    def on_before_optimizer_step(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize(
    "settings", [{}, {"gradient_clip_val": 0.05}, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}]
)
def test_sparse_and_dense_gradients_give_the_same_training(settings: dict[str, Any]) -> None:
    """With accumulation and clipping, whose norm is that of all gradients."""

    # norms are sums of squares, which take another order without the zeros: to the bit but for clipping by them
    common: dict[str, Any] = {"accumulate_grad_batches": 3, "precision": "64-true" if settings else "32-true"}

    def run(*callbacks: pl.Callback) -> tuple[Tensor, NgramEmbedding]:
        technique = NgramEmbedding(buckets=200)
        net, _ = fit("tiny_gpt", lambda: [technique], callbacks=callbacks, **common, **settings)
        return flat(net), technique

    (sparse, first), (dense, second) = run(), run(Reads())
    assert (first.report()["sparse"], second.report()["sparse"]) == (1, 0)
    torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-9 if settings else 0.0)
    if settings:
        free, _ = fit("tiny_gpt", lambda: [NgramEmbedding(buckets=200)], **common)
        assert (flat(free) - sparse).abs().max() > 1e-3


def test_afterwards_gradients_are_dense_and_clipping_is_lightnings_own() -> None:
    net = TinyGPT()
    t = trainer(NgramEmbedding(), max_steps=2, gradient_clip_val=1.0)
    t.fit(net, loader("tiny_gpt"))
    assert "main_params" not in vars(t.strategy.precision_plugin)
    loss_of(net, make_batch("tiny_gpt")).backward()
    assert not net.embed.ngrams.weight.grad.is_sparse  # pyright: ignore[reportAttributeAccessIssue]
    trainer(max_steps=2, gradient_clip_val=1.0).fit(net, loader("tiny_gpt"))


def test_the_controls_table_is_stepped_by_the_modules_optimizer() -> None:
    technique = NgramEmbedding(buckets=200)
    (arm,) = technique.control.arms(technique).values()
    assert isinstance(arm, NgramEmbedding) and arm.settings() == technique.settings() and arm.optimizer == "module"
    assert arm.control.arms(arm) == {}
    t = trainer(arm, max_steps=2)
    net = TinyGPT()
    t.fit(net, loader("tiny_gpt"))
    assert type(t.optimizers[0]) is torch.optim.AdamW and net.embed.ngrams.weight.any()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    assert set(arm.report()) == {"parameters"}


def test_a_checkpoint_of_the_other_optimizer_is_refused(tmp_path: Path) -> None:
    from tests.runs import checkpoints

    fit("tiny_gpt", lambda: [NgramEmbedding(optimizer="module")], directory=tmp_path, max_steps=2)
    with pytest.raises(ValueError, match=r"NgramEmbedding\(optimizer='rows'\): the checkpoint was saved with 'module'"):
        fit("tiny_gpt", lambda: [NgramEmbedding()], resume=checkpoints(tmp_path)[0])


def test_a_module_that_is_compiled_as_a_whole_has_dense_gradients() -> None:
    class Whole(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
            self.net.compile(backend="eager")

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return F.cross_entropy(self.net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    technique, net = NgramEmbedding(), Whole()
    trainer(technique, max_steps=2).fit(net, loader("tiny_gpt"))
    assert technique.report()["sparse"] == 0
    assert net.net[0].ngrams.weight.any()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_tables_are_looked_up_in_their_own_dtype(precision: Any) -> None:
    net = TinyGPT()
    trainer(NgramEmbedding(), max_steps=2, precision=precision).fit(net, loader("tiny_gpt"))
    dtype = torch.float32 if precision == "bf16-mixed" else torch.bfloat16
    table: Any = net.embed.ngrams  # pyright: ignore[reportAttributeAccessIssue]
    assert table.weight.dtype == dtype == net.embed(torch.zeros(1, 3, dtype=torch.long)).dtype and table.weight.any()


def test_it_learns_what_one_token_does_not_tell() -> None:
    """A sequence whose next id is a function of the last two: a table and a head learn it, an embedding cannot."""

    class Shallow(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.head = nn.Embedding(16, 16), nn.Linear(16, 16)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.head(self.token(batch[:, :-1]))[:, 1:].flatten(0, 1), batch[:, 2:].flatten())
            self.last = float(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    rows = torch.randint(0, 16, (64, 2), generator=torch.Generator().manual_seed(1))
    ids = [rows[:, 0], rows[:, 1]]
    for _ in range(30):
        ids.append((5 * ids[-2] + 3 * ids[-1] + ids[-1] * ids[-2]) % 16)
    data = torch.stack(ids, 1)
    losses = []
    for technique in (NgramEmbedding(), NgramEmbedding(buckets=0)):
        pl.seed_everything(1, verbose=False)
        net = Shallow()
        trainer(technique, max_steps=60).fit(net, DataLoader(data, 16))
        losses.append(net.last)
    assert losses[0] < 0.4 * losses[1], losses


# -- what is refused as it is made


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, r"NgramEmbedding\(n=0\): expected an integer >= 1"),
        ({"n": True}, r"n=True"),
        (
            {"n": []},
            r"n=\[\]\): expected an integer >= 1 or a sequence, each an integer >= 1: the number of tokens in",
        ),
        ({"n": [2, 2]}, r"n=\(2, 2\)\): the same number of tokens is given twice"),
        ({"n": [2, 0]}, r"n=\[2, 0\]"),
        ({"n": [2, True]}, r"n=\[2, True\]"),
        ({"n": "23"}, r"n='23'"),
        ({"buckets": -1}, r"buckets=-1\): expected an integer in \[0, "),
        (
            {"buckets": 2**31},
            r"buckets=2147483648\): expected an integer in \[0, .*, or None: the largest number of rows",
        ),
        ({"lr": 0.0}, r"lr=0.0\): expected a finite number > 0, or None: the learning rate"),
        ({"lr": float("nan")}, r"lr=nan"),
        ({"lr": 0.1, "optimizer": "module"}, "the module's optimizer has its own learning rate"),
        ({"optimizer": "adam"}, "expected 'rows' or 'module'"),
        ({"embeddings": []}, "expected a dotted path or a list of dotted paths, or None"),
        ({"batch_first": "yes"}, r"expected True or False, or None: whether the ids have shape"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NgramEmbedding(**settings)


def test_the_monitor_counts_the_bytes_of_sparse_gradients() -> None:
    technique, monitor = NgramEmbedding(), eff.EfficiencyMonitor()
    net = TinyGPT()
    trainer(technique, monitor, max_steps=2, log_every_n_steps=1).fit(net, loader("tiny_gpt"))
    assert technique.report()["sparse"] == 1
    plain = sum(p.numel() * 4 for name, p in net.named_parameters() if "ngrams" not in name)
    most = 4 * 31 * (net.dim * 4 + 8)  # a row of floats and its number for each look-up
    assert plain < monitor._memory["gradients"] <= plain + most


@pytest.mark.parametrize("other", [LayerScale, QKNorm])
def test_groups_are_the_same_in_either_order(other: Any) -> None:
    """What others add and decay passes over has its group wherever they stand."""
    found = []
    for backwards in (False, True):
        net, techniques = TinyGPT(2), [NgramEmbedding(), other()]
        t = trainer(*techniques[:: -1 if backwards else 1], max_steps=1)
        t.fit(net, loader("tiny_gpt"))
        found.append([(len(group["params"]), group.get("weight_decay")) for group in t.optimizers[0].param_groups])
    assert found[0] == found[1] and len(found[0]) == 3
