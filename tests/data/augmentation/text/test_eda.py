"""EDA: what each operation does to a text, how often, and what becomes of labels, masks, padding and special tokens."""

from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_eff as eff
from lightning_eff.data.augmentation.text.eda import delete, insert, num_changed, replace, swap
from tests.cases import Case, classifier
from tests.data.augmentation.modules import Ids, train
from tests.data.augmentation.text.test_token_noise import Seen
from tests.models import VOCAB, hugging_face, make_batch, trainer
from tests.runs import fit_yaml

_NONE = "found no tokens in the batch"
SYNONYMS = {x: [(x + 1) % VOCAB, (x + 7) % VOCAB] for x in range(1, VOCAB, 2)}

CASES = {
    "EDA": Case(
        active=lambda: eff.EDA(alpha=0.3, prob=1.0, pad_token_id=0, synonyms=SYNONYMS),
        neutral=lambda: eff.EDA(alpha=0.0),
        refuses={"vit": _NONE, "classifier": _NONE},
        lost=(classifier, "classifier", _NONE),
    )
}


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


TEXT = [5, 8, 8, 13, 2, 21, 34, 3, 1, 40]


# -- the operations


def test_a_swap_keeps_the_multiset_of_tokens() -> None:
    moved = Counter[int]()
    for seed in range(400):
        found = swap(TEXT, 2, draws(seed))
        assert Counter(x for x, _ in found) == Counter(TEXT)
        assert sorted(t for _, t in found if t is not None) == [*range(10)]
        assert all(x == TEXT[t] for x, t in found if t is not None)
        away = [place for place, (_, t) in enumerate(found) if place != t]
        assert len(away) in (0, 3, 4), "two swaps"
        moved.update(away)
    assert min(moved.values()) > 0.6 * max(moved.values()), "all places alike"
    assert swap([7], 3, draws(0)) == [(7, 0)] and swap([], 3, draws(0)) == []


def test_a_deletion_never_empties() -> None:
    kept = [len(delete(TEXT, 0.3, draws(seed))) for seed in range(600)]
    assert sum(kept) / 600 == pytest.approx(7, abs=4 * (10 * 0.3 * 0.7 / 600) ** 0.5)
    for seed in range(50):
        for text in (TEXT, [3]):
            assert len(delete(text, 1.0, draws(seed))) == 1
        found = delete(TEXT, 0.5, draws(seed))
        places = [t for _, t in found if t is not None]
        assert places == sorted(set(places)) and [x for x, _ in found] == [TEXT[t] for t in places]
    last = Counter(delete(TEXT, 1.0, draws(seed))[0][1] for seed in range(500))
    assert len(last) == 10 and min(last.values()) > 20, "whichever"
    assert delete([], 1.0, draws(0)) == []


def test_synonyms_replace_as_many_as_there_are() -> None:
    table = {8: [100], 13: [101, 102], 1: [103]}
    seen = Counter[int]()
    for seed in range(300):
        found = replace(TEXT, 2, table, draws(seed))
        assert [t for _, t in found] == [*range(10)]
        other = [(TEXT[t], x) for t, (x, _) in enumerate(found) if x != TEXT[t]]
        assert len(other) == 2 and all(x in table[old] for old, x in other)
        seen.update(x for _, x in other)
    assert set(seen) == {100, 101, 102, 103}
    assert seen[100] == pytest.approx(300, rel=0.2) and seen[101] == pytest.approx(75, rel=0.4), "4 places, 2 of them"
    assert sum(x != y for (x, _), y in zip(replace(TEXT, 9, table, draws(0)), TEXT, strict=True)) == 4
    assert [x for x, _ in replace(TEXT, 3, {}, draws(0))] == TEXT


def test_insertions_are_synonyms_of_tokens_of_the_text_anywhere() -> None:
    table = {8: [100], 77: [101]}
    where = Counter[int]()
    for seed in range(600):
        found = insert(TEXT, 2, table, draws(seed))
        assert [x for x, t in found if t is not None] == TEXT
        assert [x for x, t in found if t is None] == [100, 100]
        where.update(place for place, (_, t) in enumerate(found) if t is None)
    assert len(where) == 12 and min(where.values()) > 60
    assert [x for x, _ in insert(TEXT, 2, {77: [101]}, draws(0))] == TEXT


def test_the_number_follows_the_length() -> None:
    assert [num_changed(0.1, length) for length in (0, 1, 4, 10, 16, 100)] == [0, 1, 1, 1, 2, 10]


# -- in a batch


def one(batch: Any, seed: int = 0, **kwargs: Any) -> Any:
    """What the step is given of ``batch`` by one step with every text changed."""
    net = Seen()
    pl.seed_everything(seed, verbose=False)
    train(net, eff.EDA(prob=1.0, **kwargs), data=[batch])
    return net.given[-1]


def test_masks_padding_and_special_tokens_of_a_text() -> None:
    """[1] is a class token, [2] ends a text, 0 pads; what was seen is seen, and nothing else."""
    ids = torch.tensor([[1, 9, 8, 7, 6, 5, 2, 0, 0, 0], [1, 9, 9, 2, 4, 3, 8, 7, 2, 0]])
    mask = (ids != 0).long()
    types = torch.tensor([[0] * 7 + [0] * 3, [0] * 4 + [1] * 5 + [0]])
    labels = torch.tensor([[30], [31]]).expand(2, 10).masked_fill(ids == 0, -100).clone()
    batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "labels": labels}
    batch["position_ids"] = torch.arange(10).expand(2, 10)
    lengths = set()
    for seed in range(5):
        for operation in ("replace", "insert", "swap", "delete"):
            got = one(
                batch,
                seed,
                alpha=0.4,
                operations=[operation],
                special_tokens=[1, 2],
                pad_token_id=0,
                synonyms={9: [20]},
            )
            new, seen = got["input_ids"], got["attention_mask"].bool()
            assert torch.equal(new != 0, seen) and torch.equal(got["position_ids"], batch["position_ids"])
            for row, old, shown in zip(new.tolist(), ids.tolist(), seen.tolist(), strict=True):
                text = [x for x, s in zip(row, shown, strict=True) if s]
                assert shown == sorted(shown, reverse=True), "padding stays behind"
                assert text[0] == 1 and text[-1] == 2 and text.count(2) == old.count(2)
                lengths.add((operation, len(text) - sum(x != 0 for x in old)))
                if operation == "swap":
                    assert Counter(row) == Counter(old)
                if operation == "delete":
                    assert not Counter(text) - Counter(old) and len(text) > old.count(1) + old.count(2)
            added = new == 20
            assert torch.equal(
                got["labels"] == -100, ~seen | (added if operation == "insert" else torch.zeros_like(added))
            )
            if operation in ("replace", "insert"):
                assert (got["token_type_ids"][0] == 0).all() and (got["token_type_ids"][1][~seen[1]] == 0).all()
    changes = {
        operation: {n for name, n in lengths if name == operation} for operation in ("replace", "insert", "delete")
    }
    assert changes["replace"] == {0} and changes["insert"] == {1, 2} and min(changes["delete"]) < -1
    assert max(changes["delete"]) <= 0, "the second text has room for one alone"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["own", "next", "one tensor"])
def test_a_language_model_is_asked_for_the_text_as_it_is_now(kind: str, side: str) -> None:
    """Each place that counts is asked for the new token there, or behind it."""
    text, width = torch.arange(10, 22), 16
    ids = torch.zeros(1, width, dtype=torch.long)
    places = slice(4, 16) if side == "left" else slice(0, 12)
    ids[0, places] = text
    labels = torch.full_like(ids, -100)
    if kind == "next":
        labels[0, places] = torch.cat([text[1:], torch.tensor([22])])
    else:
        labels[0, places] = text
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}
    if kind == "one tensor":
        batch = {"input_ids": ids, "attention_mask": batch["attention_mask"], "labels": ids}
    lengths = set()
    for seed in range(8):
        got = one(batch, seed, alpha=0.3, synonyms={x: [x + 20] for x in range(10, 22, 2)}, pad_token_id=0)
        row, asked = got["input_ids"][0].tolist(), got["labels"][0].tolist()
        shown = [t for t, s in enumerate(got["attention_mask"][0].tolist()) if s]
        assert shown == list(range(shown[0], shown[-1] + 1)) and shown[-1 if side == "left" else 0] == (
            15 if side == "left" else 0
        )
        lengths.add(len(shown))
        counted = [t for t in shown if asked[t] != -100]
        if kind == "next":
            assert asked[shown[-1]] == 22, "what comes behind the text"
            assert all(asked[t] == row[t + 1] for t in counted[:-1])
        else:
            assert all(asked[t] == row[t] for t in counted)
        unasked = len(shown) - len(counted)
        assert unasked == max(0, len(shown) - 12) or (kind == "next" and unasked >= max(0, len(shown) - 12) - 1)
        assert all(asked[t] == -100 for t in range(width) if t not in shown)
    assert min(lengths) < 12 < max(lengths)


def test_tags_go_with_their_tokens() -> None:
    ids = torch.arange(1, 25).reshape(2, 12)
    got = one({"input_ids": ids, "labels": ids % 5}, alpha=0.5, pad_token_id=0, operations=["swap", "delete"])
    new, tags = got["input_ids"], got["labels"]
    assert torch.equal(tags[new != 0], new[new != 0] % 5) and (tags[new == 0] == -100).all()
    assert not torch.equal(new, ids)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_hugging_face(name: str) -> None:
    """Evaluation sees the texts as they are; labels of another text stay."""
    net, batch = hugging_face(name), make_batch(name)
    given: list[Any] = []
    forward = net.model.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        given.append((kwargs["input_ids"].clone(), kwargs["labels"].clone(), net.training))
        return forward(*args, **kwargs)

    net.model.forward = spy
    technique = eff.EDA(alpha=0.3, prob=1.0, pad_token_id=0)
    train(net, technique, data=[batch] * 3, limit_val_batches=1, val_check_interval=3)
    ids, labels, _ = next(found for found in reversed(given) if found[2])
    assert not torch.equal(ids, batch["input_ids"])
    assert torch.equal(labels, batch["labels"]) == (name == "t5")
    assert all(torch.equal(ids, batch["input_ids"]) for ids, _, training in given if not training)


def test_a_classifier_of_texts_and_how_many_stay() -> None:
    g = torch.Generator().manual_seed(0)
    data = [
        {"input_ids": torch.randint(1, 11, (40, 20), generator=g), "labels": torch.arange(40) % 4} for _ in range(3)
    ]
    kept: list[int] = []

    class Notes(Ids):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if torch.is_grad_enabled() and self.trainer.global_step == len(kept):
                kept.append(int((batch["input_ids"] == data[batch_idx]["input_ids"]).all(1).sum()))
            assert torch.equal(batch["labels"], data[batch_idx]["labels"])
            return super().training_step(batch, batch_idx)

    technique = eff.EDA(alpha=0.3, prob=0.6, operations=["swap"])
    train(Notes(), technique, data=data)
    assert sum(kept) == pytest.approx(0.4 * 120, abs=4 * (120 * 0.24) ** 0.5)
    assert "changed 3 of 3 batches" in technique.summary()


# -- where synonyms come from


def test_neighbours_in_the_embedding_are_those_of_numpy() -> None:
    """The nearest by cosine, of the weights of each step, without special tokens and the token itself."""
    given: list[tuple[Any, Any]] = []

    class Keeps(Ids):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if torch.is_grad_enabled():
                given.append((batch["input_ids"].clone(), self.embed.weight.detach().double().numpy().copy()))
            return super().training_step(batch, batch_idx)

    g = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 11, (40, 12), generator=g)
    data = [{"input_ids": ids, "labels": torch.arange(40) % 4}] * 6
    technique = eff.EDA(
        alpha=0.5,
        prob=1.0,
        synonyms="embedding",
        num_neighbors=3,
        operations=["replace"],
        special_tokens=[1],
        pad_token_id=0,
    )
    net = Keeps()
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=20.0)
    train(net, technique, data=data)
    tables = []
    for new, weight in given[-6:]:
        unit = weight / np.linalg.norm(weight, axis=1, keepdims=True)
        order = [[t for t in np.argsort(-row) if t not in (0, 1, own)] for own, row in enumerate(unit @ unit.T)]
        changed = new != ids
        assert (changed.sum(1) == 6).all()
        pairs = Counter(zip(ids[changed].tolist(), new[changed].tolist(), strict=True))
        assert all(other in order[own][:3] for own, other in pairs)
        assert {other for own, other in pairs if own == 5} == set(order[5][:3]), "all of them are drawn"
        tables.append([row[:3] for row in order])
    assert tables[0] != tables[-1], "weights changed"


def test_a_resumed_run_replaces_by_the_same_neighbours(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    data = [{"input_ids": torch.randint(1, 11, (8, 12), generator=g), "labels": torch.arange(8) % 4} for _ in range(6)]

    def run(steps: int, path: Path | None = None) -> tuple[Any, Any]:
        pl.seed_everything(0, verbose=False)
        net = Ids()
        net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=20.0)
        technique = eff.EDA(0.5, prob=1.0, synonyms="embedding", pad_token_id=0, num_neighbors=2)
        fit = trainer(technique, max_steps=steps)
        fit.fit(net, DataLoader(data, batch_size=None), ckpt_path=path)
        return net, fit

    whole, _ = run(6)
    _, first = run(3)
    first.save_checkpoint(tmp_path / "middle.ckpt")
    resumed, _ = run(6, tmp_path / "middle.ckpt")
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert resumed.losses == whole.losses[-len(resumed.losses) :] and len(resumed.losses) >= 3


def test_inserted_neighbours_are_tokens_too() -> None:
    ids = torch.tensor([[5, 6, 7, 8, 0, 0, 0, 0]])
    given: list[Tensor] = []

    class Keeps(Ids):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            given.append(batch["input_ids"].clone())
            return super().training_step(batch, batch_idx)

    technique = eff.EDA(
        alpha=0.5, prob=1.0, synonyms="embedding", operations=["insert"], pad_token_id=0, num_neighbors=1
    )
    net = Keeps()
    unit = F.normalize(net.embed.weight.detach(), dim=1)
    near = (unit @ unit.T - 2 * torch.eye(11)).index_fill(1, torch.tensor([0]), -2).argmax(1)
    train(net, technique, data=[{"input_ids": ids, "labels": torch.tensor([1])}])
    (row,) = given[-1].tolist()
    added = Counter(row) - Counter([5, 6, 7, 8])
    assert row.count(0) == 2 and added[0] == 2 and sum(added.values()) == 4
    assert set(added) - {0} <= {int(near[t]) for t in (5, 6, 7, 8)}


def test_words_become_tokens_with_a_space_before_them_or_without() -> None:
    vocabulary = {"big": 3, " big": 4, "large": 5, " large": 6, "huge": 7, "red": 8, " crimson": 9}

    def tokenizer(text: str) -> list[int]:
        return [vocabulary[text]] if text in vocabulary else [1, 2]

    words = {"big": ["large", "huge", "great", "big"], "red": ["crimson"], "great": ["big"]}
    assert eff.EDA(synonyms=words, tokenizer=tokenizer).synonyms == {3: [5, 7], 4: [6]}

    class HuggingFaceLike:
        def __call__(self, text: str) -> Any:
            raise AssertionError("it would add special tokens")

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return tokenizer(text)

    assert eff.EDA(synonyms=words, tokenizer=HuggingFaceLike()).synonyms == {3: [5, 7], 4: [6]}


def test_a_file_holds_tokens_or_words(tmp_path: Path) -> None:
    path = tmp_path / "synonyms.json"
    path.write_text('{"17": [4, 231], "3": [3]}')
    assert eff.EDA(synonyms=path).synonyms == eff.EDA(synonyms=str(path)).synonyms == {17: [4, 231]}
    path.write_text('{"big": ["large"]}')
    assert eff.EDA(synonyms=path, tokenizer=lambda w: [len(w)]).synonyms == {3: [5], 4: [6]}
    with pytest.raises(
        ValueError, match=r"EDA\(tokenizer=None\): the synonyms are words, such as 'big', .* Give tokenizer="
    ):
        eff.EDA(synonyms=path)
    with pytest.raises(ValueError, match=r"EDA\(synonyms=...\): none of the 1 words is a single token"):
        eff.EDA(synonyms=path, tokenizer=lambda w: [1, 2])
    path.write_text("big: large")
    with pytest.raises(ValueError, match=r"EDA\(synonyms=.*The file is not JSON"):
        eff.EDA(synonyms=path)
    with pytest.raises(ValueError, match=r"EDA\(synonyms='no.json'\): .*The file cannot be read: No such file"):
        eff.EDA(synonyms="no.json")


def test_embeddings_that_cannot_be_used_are_refused_before_any_weight_changes() -> None:
    batch = {"input_ids": torch.randint(1, 11, (4, 6)), "labels": torch.arange(4)}

    class Codes(Ids):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            hot = F.one_hot(batch["input_ids"], 11).float() @ self.embed.weight
            return F.cross_entropy(self.head(hot.mean(1)), batch["labels"])

    for net, count, message in (
        (Codes(), 1, r"EDA\(synonyms='embedding'\): no nn.Embedding was called on the tokens"),
        (Ids(), 10, r"EDA\(num_neighbors=10\): the embedding 'embed' has 11 tokens, of which 9 can replace another"),
    ):
        before = [p.clone() for p in net.parameters()]
        with pytest.raises(ValueError, match=message):
            train(net, eff.EDA(synonyms="embedding", pad_token_id=0, num_neighbors=count), data=[batch])
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


# -- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 1.5}, r"alpha=1.5\): expected a number in \[0, 1\]"),
        ({"prob": -1}, r"prob=-1\)"),
        ({"operations": ["translate"]}, r"operations=\['translate'\]\): expected a list of some of 'replace'"),
        ({"operations": "swap"}, r"operations='swap'\)"),
        (
            {"operations": ["insert"]},
            r"operations=\['insert'\], synonyms=None\): there are no synonyms for insert\. Give synonyms=",
        ),
        ({"synonyms": [1, 2]}, r"synonyms=\[1, 2\]\): expected a mapping of token ids to lists of token ids"),
        ({"synonyms": {3: 4}}, r"synonyms=\{3: 4\}\): expected a mapping of token ids to lists of token ids"),
        ({"synonyms": {3: [-4]}}, r"synonyms=\{3: \[-4\]\}\): expected a mapping of token ids to lists of token ids"),
        ({"pad_token_id": -1}, r"pad_token_id=-1\): expected an integer >= 0"),
        ({"special_tokens": ["a"]}, r"special_tokens=\['a'\]\): expected a list of token ids, each an integer >= 0"),
        ({"keys": "input_ids"}, r"keys='input_ids'\): expected a list"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^EDA\({message}"):
        eff.EDA(**arguments)


def test_padding_must_be_known_where_texts_become_shorter() -> None:
    with pytest.raises(
        ValueError, match=r"length of texts changes with delete, and no config in Seen has a pad_token_id"
    ):
        train(Seen(), eff.EDA(), data=[make_batch("tiny_gpt")])
    train(Seen(), eff.EDA(operations=["swap"]), data=[make_batch("tiny_gpt")])


def test_a_mask_of_pairs_is_refused() -> None:
    batch = {
        **make_batch("tiny_gpt"),
        "mask": torch.ones(4, 1, 1, 1).expand(4, 1, *[make_batch("tiny_gpt")["labels"].shape[1]] * 2),
    }
    with pytest.raises(ValueError, match=r"EDA: \['mask'\] .* is an attention mask of pairs of tokens"):
        train(Seen(), eff.EDA(pad_token_id=0), data=[batch])


def test_yaml(tmp_path: Path) -> None:
    names: Any = {"model": "tests.models.TinyGPT", "data": "tests.data.augmentation.modules.Texts"}
    fit_yaml(tmp_path, "EDA", {"alpha": 0.2, "synonyms": {3: [4, 5]}, "pad_token_id": 0}, max_steps=4, **names)
