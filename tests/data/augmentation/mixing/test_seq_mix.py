"""SeqMix: mixed one-hot codes times the embedding, by hand and by Hugging Face's own ``inputs_embeds``; and what it refuses."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_eff as eff
from lightning_eff.data.augmentation._lookups import made_of
from lightning_eff.data.augmentation.mixing._hook import mixed_rows
from tests.cases import Case, classifier
from tests.data.augmentation.modules import CLASSES, Ids, Spied
from tests.models import VOCAB, HuggingFace, TinyGPT, Translator, flat, hugging_face, make_batch, trainer
from tests.runs import fit_yaml

_NO_TOKENS = "found no tokens in the batch"

CASES = {
    "SeqMix": Case(
        active=lambda: eff.SeqMix(alpha=1.0),
        neutral=lambda: eff.SeqMix(alpha=0.0),
        refuses={"vit": _NO_TOKENS, "videomae": _NO_TOKENS},
        lost=(classifier, "classifier", _NO_TOKENS),
    )
}


def technique(**kwargs: Any) -> Any:
    return eff.SeqMix(**{"alpha": 1.0, "per_sample": True, **kwargs})


def train(net: Any, *callbacks: pl.Callback, data: list[Any]) -> Any:
    trainer(*callbacks, max_steps=len(data)).fit(net, DataLoader(data, batch_size=None))
    return net


def still(net: nn.Module) -> Any:
    """The same network without dropout."""
    for m in net.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
        elif isinstance(getattr(m, "dropout", None), float):
            m.dropout = 0.0  # pyright: ignore[reportArgumentType]
    return net


def codes(ids: Tensor, partner: Tensor, share: Tensor) -> Tensor:
    """``lambda X + (1 - lambda) X'`` of one-hot codes, (B, T, V)."""
    x = F.one_hot(ids, VOCAB).float()
    return share[:, None, None] * x + (1 - share[:, None, None]) * x[partner]


def mean_losses(z: Tensor, y: Tensor, partner: Tensor, share: Tensor) -> Tensor:
    """``lambda L(y) + (1 - lambda) L(y')`` by sample, each over the labels of its own that count in the whole batch."""
    total = torch.zeros(())
    for labels, weight in ((y, share), (y[partner], 1 - share)):
        rows = F.cross_entropy(z.transpose(1, 2), labels, reduction="none").sum(1)
        total = total + (weight * rows).sum() / (labels != -100).sum()
    return total


class Loss(pl.Callback):
    def __init__(self) -> None:
        self.found: list[float] = []
        self.gradients: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append(torch.cat([p.grad.flatten() for p in pl_module.parameters() if p.grad is not None]))


def test_mixed_codes_times_the_embedding_are_mixed_embeddings() -> None:
    g = torch.Generator().manual_seed(0)
    table, ids = torch.randn(VOCAB, 5, generator=g), torch.randint(0, VOCAB, (4, 7), generator=g)
    partner, share = torch.tensor([2, 3, 0, 1]), torch.tensor([0.5, 0.7, 0.9, 1.0])
    made = mixed_rows(table[ids], partner, share)
    torch.testing.assert_close(made, codes(ids, partner, share) @ table)
    assert torch.equal(made[3], table[ids[3]])


class TiedGPT(TinyGPT):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("build", [lambda: TinyGPT(dropout=0.0), TiedGPT], ids=["own", "tied"])
def test_a_language_model_written_by_hand(build: Any) -> None:
    batch, net, one, loss = make_batch("tiny_gpt"), build(), technique(), Loss()
    twin, spied = copy.deepcopy(net), Spied(one)
    train(net, one, loss, data=[batch])
    partner, share = spied.partners[0], spied.shares[0]
    h = codes(batch["input_ids"], partner, share) @ twin.embed.weight + twin.position.weight
    for block in twin.blocks:
        h = block(h)
    expected = mean_losses(twin.head(twin.norm(h)), batch["labels"], partner, share)
    assert loss.found[0] == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    by_hand = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])
    torch.testing.assert_close(loss.gradients[0], by_hand, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
def test_hugging_faces_models_by_their_inputs_embeds(name: str, again: bool) -> None:
    batch, net, one, loss = make_batch(name), still(hugging_face(name, num_layers=2)), technique(), Loss()
    twin, spied = copy.deepcopy(net), Spied(one)
    if again:
        net.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    train(net, one, loss, data=[batch])
    partner, share = spied.partners[0], spied.shares[0]
    table = twin.model.get_input_embeddings()
    E = table.weight  # of which a padding token's row gets no gradient
    E = E if table.padding_idx is None else torch.cat([E[:1].detach(), E[1:]])
    embeds = codes(batch["input_ids"], partner, share) @ E
    z, y = twin.model(inputs_embeds=embeds, attention_mask=batch.get("attention_mask")).logits, batch["labels"]
    expected = mean_losses(z, y, partner, share) if name == "bert" else mean_losses(z[:, :-1], y[:, 1:], partner, share)
    assert loss.found[0] == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    by_hand = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])
    torch.testing.assert_close(loss.gradients[0], by_hand, rtol=1e-4, atol=1e-5)


def test_an_encoder_decoder_whose_decoder_reads_its_labels_shifted() -> None:
    """T5: source and target are mixed, and the ignored labels of either are its own."""
    net, one, loss = still(hugging_face("t5", num_layers=2)), technique(), Loss()
    batch = make_batch("translator")
    ids, y = batch["input_ids"], batch["labels"].clone()
    y[0, 20:], y[2, 9:] = -100, -100
    keep = torch.ones_like(ids)
    keep[1, 25:] = 0
    twin, spied = copy.deepcopy(net), Spied(one)
    train(net, one, loss, data=[{"input_ids": ids, "attention_mask": keep, "labels": y}])
    partner, share = spied.partners[0], spied.shares[0]
    model = twin.model
    before = model._shift_right(y)
    z = model(
        inputs_embeds=codes(ids, partner, share) @ model.shared.weight,
        attention_mask=torch.maximum(keep, keep[partner]),
        decoder_inputs_embeds=codes(before, partner, share) @ model.shared.weight,
    ).logits
    assert loss.found[0] == pytest.approx(mean_losses(z, y, partner, share).item(), rel=1e-5)


def test_two_vocabularies_of_an_encoder_decoder() -> None:
    class Two(Translator):
        def __init__(self) -> None:
            super().__init__(dropout=0.0)
            self.embed_out = nn.Embedding(VOCAB, 16)

        def forward(self, ids: Tensor, decoder_ids: Tensor) -> Tensor:
            return self.rest(self.embed(ids), self.embed_out(decoder_ids))

        def rest(self, source: Tensor, x: Tensor) -> Tensor:
            place = self.position(torch.arange(source.shape[1]))
            x = x + place + self.encoder(source + place).mean(dim=1, keepdim=True)
            for block in self.decoder:
                x = block(x)
            return self.head(self.norm(x))

    batch, net, one, loss = make_batch("translator"), Two(), technique(), Loss()
    twin, spied = copy.deepcopy(net), Spied(one)
    train(net, one, loss, data=[batch])
    partner, share = spied.partners[0], spied.shares[0]
    source = codes(batch["input_ids"], partner, share) @ twin.embed.weight
    target = codes(batch["decoder_input_ids"], partner, share) @ twin.embed_out.weight
    expected = mean_losses(twin.rest(source, target), batch["labels"], partner, share)
    assert loss.found[0] == pytest.approx(expected.item(), rel=1e-5)


def test_a_classifier_of_texts_with_a_mask_and_types() -> None:
    """A BERT: the mask becomes that of either text, places stay, and a text's types are mixed as its tokens are."""
    torch.manual_seed(0)
    config = hf.BertConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    config.intermediate_size, config.num_labels, config.hidden_dropout_prob = 16, CLASSES, 0.0
    config.attention_probs_dropout_prob, config.max_position_embeddings = 0.0, 16
    net = HuggingFace(hf.BertForSequenceClassification(config).train())
    still(net)
    g = torch.Generator().manual_seed(0)
    ids, y = torch.randint(1, VOCAB, (4, 9), generator=g), torch.randint(0, CLASSES, (4,), generator=g)
    keep = (torch.arange(9) < torch.tensor([9, 4, 6, 8])[:, None]).long()
    types = (torch.arange(9) > torch.tensor([2, 3, 4, 5])[:, None]).long()
    one, loss = technique(), Loss()
    twin, spied = copy.deepcopy(net), Spied(one)
    batch = {"input_ids": ids * keep, "attention_mask": keep, "token_type_ids": types, "labels": y}
    train(net, one, loss, data=[batch])
    partner, share = spied.partners[0], spied.shares[0]
    embeddings, weight = twin.model.bert.embeddings, share[:, None, None]
    kinds = embeddings.token_type_embeddings(types)
    h = codes(ids * keep, partner, share) @ embeddings.word_embeddings.weight
    h = h + weight * kinds + (1 - weight) * kinds[partner] + embeddings.position_embeddings.weight[:9]
    seen = torch.maximum(keep, keep[partner])[:, None, None, :].bool()
    h = embeddings.LayerNorm(h)
    h = twin.model.bert.encoder(h, attention_mask=seen.expand(-1, -1, 9, -1))[0]
    z = twin.model.classifier(twin.model.bert.pooler(h))
    rows = F.cross_entropy(z, y, reduction="none"), F.cross_entropy(z, y[partner], reduction="none")
    expected = (share * rows[0] + (1 - share) * rows[1]).mean()
    assert loss.found[0] == pytest.approx(expected.item(), rel=1e-5)


def test_places_that_a_module_makes_of_ids_by_itself_are_not_mixed() -> None:
    """As BART does, whose embedding of places is handed the ids, and returns one row for all."""

    class Places(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(torch.arange(input.shape[1]))[None]

    class Texts(Ids):
        def __init__(self) -> None:
            super().__init__()
            self.place = Places(7, 8)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            ids = batch["input_ids"]
            return F.cross_entropy(self.head((self.embed(ids) * self.place(ids)).mean(1)), batch["labels"])

    g = torch.Generator().manual_seed(0)
    ids, y = torch.randint(0, 11, (6, 7), generator=g), torch.randint(0, CLASSES, (6,), generator=g)
    net, one, loss = Texts(), technique(), Loss()
    twin, spied = copy.deepcopy(net), Spied(one)
    train(net, one, loss, data=[{"input_ids": ids, "labels": y}])
    h = mixed_rows(twin.embed.weight[ids], spied.partners[0], spied.shares[0])
    z = twin.head((h * twin.place.weight).mean(1)).log_softmax(-1)
    assert loss.found[0] == pytest.approx(-(spied.targets(0, y) * z).sum(-1).mean().item(), rel=1e-5)


def test_a_share_of_one_is_plain_training_bit_for_bit() -> None:
    runs = []
    for one in (technique(), None):
        if one is not None:
            one.shares = lambda size, generator: torch.ones(size)
        pl.seed_everything(0, verbose=False)
        net = TinyGPT()
        train(net, *([one] if one else []), data=[make_batch("padded", seed=k) for k in range(3)])
        runs.append(flat(net))
    assert torch.equal(*runs)


def test_parts_of_sequences_are_mixed_with_the_same_parts() -> None:
    """SideOutputs a warm-up that cuts each sequence into several: the mixture of the whole, cut."""

    class Seen(TinyGPT):
        def __init__(self) -> None:
            super().__init__(dropout=0.0)
            self.given: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.given.append(batch)
            return super().training_step(batch, batch_idx)

    batch, net, one, loss = make_batch("tiny_gpt"), Seen(), technique(), Loss()
    twin, spied = copy.deepcopy(net), Spied(one)
    warm_up = eff.SequenceLengthWarmup(start=8, until=0.9)
    train(net, one, warm_up, loss, data=[batch])
    ids, y = batch["input_ids"], batch["labels"]
    parts, length = len(net.given[-1]["input_ids"]) // len(ids), net.given[-1]["input_ids"].shape[1]
    assert parts > 1
    share, partner = spied.shares[0], spied.partners[0]
    h = (codes(ids, partner, share) @ twin.embed.weight).reshape(-1, length, 16) + twin.position.weight[:length]
    for block in twin.blocks:
        h = block(h)
    z = twin.head(twin.norm(h)).reshape(len(ids), -1, VOCAB)
    assert loss.found[0] == pytest.approx(mean_losses(z, y, partner, share).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("ids", "tokens", "expected"),
    [
        ([[1, 2, 3]], [[1, 2, 3]], True),
        ([[1, 2]], [[1, 2, 3]], True),
        ([[2, 3]], [[1, 2, 3]], True),
        ([[0, 1, 2]], [[1, 2, 3]], True),  # a decoder's inputs
        ([[0, 1, 9]], [[1, -100, 3]], True),  # of labels that are ignored
        ([[0, 1, 3]], [[1, 2, 3]], False),
        ([[1, 2, 3], [1, 2, 3]], [[1, 2, 3]], False),
        ([[1]], [[2]], False),
    ],
)
def test_which_ids_are_made_of_tokens(ids: Any, tokens: Any, expected: bool) -> None:
    assert made_of(torch.tensor(ids), torch.tensor(tokens)) == expected


class Weights(Ids):
    """Looks its tokens up by no module."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, 8))
        self.embed = nn.Embedding(3, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.table[batch["input_ids"]].mean(1) + self.embed(torch.zeros(1).long())
        return F.cross_entropy(self.head(h), batch["labels"])


class Turned(Ids):
    """Has its sequences in the second dimension."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.embed(batch["input_ids"].T).mean(0)), batch["labels"])


@pytest.mark.parametrize(("net", "shape"), [(Weights, r"embed \(1,\)"), (Turned, r"embed \(7, 6\)")])
def test_tokens_that_no_embedding_looks_up_are_refused_before_any_weight_changes(net: Any, shape: str) -> None:
    built = net()
    before = flat(built)
    g = torch.Generator().manual_seed(0)
    batch = {
        "input_ids": torch.randint(0, 11, (6, 7), generator=g),
        "labels": torch.randint(0, CLASSES, (6,), generator=g),
    }
    with pytest.raises(ValueError, match=rf"SeqMix: no nn.Embedding was called on the tokens \(6, 7\).*{shape}"):
        train(built, technique(), data=[batch])
    assert torch.equal(flat(built), before)


def test_arguments_and_yaml(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"SeqMix\(alpha=-1\): expected a finite number >= 0"):
        eff.SeqMix(alpha=-1)
    names: Any = {"model": "tests.models.TinyGPT", "data": "tests.data.augmentation.modules.Texts"}
    fit_yaml(tmp_path, "SeqMix", {"alpha": 0.5, "until": 0.8}, max_steps=4, **names)
