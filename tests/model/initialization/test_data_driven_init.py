"""DataDrivenInit: a first loss that is the entropy of the tokens, bigrams, and patches of identity covariance."""

import itertools
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff import DataDrivenInit
from lightning_eff.model.initialization._data.counting import ClassLoss, Counts, text_in
from lightning_eff.model.initialization.data_driven_init import associations, factors, log_frequencies, whitening
from tests.cases import Case, classifier
from tests.models import VOCAB, TinyGPT, flat, hugging_face, loader, trainer
from tests.runs import fit_yaml

CASES = {
    "DataDrivenInit": Case(
        active=lambda: DataDrivenInit(batches=3),
        neutral=lambda: DataDrivenInit(batches=0),
        lost=(classifier, "classifier", "neither a language model .* nor starts with a convolution"),
    )
}


def texts(count: int = 12, length: int = 16) -> Tensor:
    """Rows of tokens of which some are frequent, each followed by its double, mostly: (count, length + 1)."""
    g = torch.Generator().manual_seed(0)
    tokens = (torch.rand(count, length + 1, generator=g).square() * 20).long()
    follows = torch.rand(count, length, generator=g) < 0.8
    for t in range(length):
        tokens[:, t + 1] = torch.where(follows[:, t], tokens[:, t] * 2 % 20, tokens[:, t + 1])
    return tokens


def causal(tokens: Tensor) -> list[dict[str, Tensor]]:
    return [{"input_ids": part[:, :-1], "labels": part[:, 1:]} for part in tokens.split(4)]


def begun(m: Any, batches: list[Any], **settings: Any) -> tuple[DataDrivenInit, list[float]]:
    """The technique, and the losses in training before anything has moved."""
    losses, step = list[float](), m.training_step

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        loss = step(batch, batch_idx)
        losses.append(loss.item())
        return loss

    m.training_step = training_step
    m.configure_optimizers = lambda: torch.optim.SGD(m.parameters(), 0.0)
    technique = DataDrivenInit(**settings)
    data: DataLoader[Any] = DataLoader(batches, batch_size=None)  # pyright: ignore[reportArgumentType]
    trainer(technique, max_steps=len(batches)).fit(m, data)
    return technique, losses[-len(batches) :]


class Biased(TinyGPT):
    """A head with a bias."""

    def __init__(self) -> None:
        super().__init__(2, dropout=0.0)
        self.head = nn.Linear(16, VOCAB)


def entropy(tokens: Tensor) -> float:
    p = tokens.flatten().bincount().double() / tokens.numel()
    return -(p[p > 0] * p[p > 0].log()).sum().item()


@pytest.mark.parametrize("build", [Biased, lambda: TinyGPT(2, dropout=0.0)], ids=["bias", "no bias"])
def test_the_first_loss_is_the_entropy_of_the_tokens(build: Any) -> None:
    tokens = texts()
    m = build()
    technique, losses = begun(m, causal(tokens), bigram=False, smoothing=1e-6)
    assert sum(losses) / 3 == pytest.approx(entropy(tokens[:, 1:]), abs=1e-4)
    assert ("norm.bias and head.weight" if build is not Biased else "head.bias") in technique.summary()


def test_bigrams_begin_below_the_entropy() -> None:
    tokens = texts(48)
    torch.manual_seed(0)
    m = Biased()
    rms = m.embed.weight.square().mean().sqrt().item()
    technique, losses = begun(m, causal(tokens))
    print(technique.summary(), losses, entropy(tokens[:, 1:]))
    assert sum(losses) / 12 < entropy(tokens[:, 1:]) - 0.2
    assert m.embed.weight.square().mean().sqrt().item() == pytest.approx(rms, rel=0.2)
    assert "of the bigram fit" in technique.summary()


def test_a_tied_head_begins_as_the_embedding_and_without_a_bias_says_so() -> None:
    m: Any = hugging_face("gpt2", 1)
    tokens = texts()
    technique, _ = begun(m, [{"input_ids": part, "labels": part} for part in tokens.split(4)])
    assert "has no bias for them" in technique.summary()
    n = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for row in tokens.tolist():
        for x, y in itertools.pairwise(row):
            n[x, y] += 1
            n[y, x] += 1
    pmi = (n * n.sum() / n.sum(0) / n.sum(1)[:, None]).log().nan_to_num(nan=0.0, neginf=0.0).clamp_min(0)
    values, vectors = torch.linalg.eigh(pmi)
    met = n.sum(0) > 0
    expected = ((vectors * values.abs()) @ vectors.T)[met][:, met].float()  # E E^T of E = U sqrt(S)
    table = m.model.transformer.wte.weight.detach()
    found = table[met] @ table[met].T
    torch.testing.assert_close(found / found.norm(), expected / expected.norm(), rtol=0, atol=1e-4)
    assert m.model.lm_head.weight is m.model.transformer.wte.weight


def test_masked_labels_are_filled_in() -> None:
    tokens = texts()[:, :-1]
    masked = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(1)) < 0.2
    batch = {
        "input_ids": tokens.masked_fill(masked, 60),
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(~masked, -100),
    }
    batch["attention_mask"][:, -3:] = 0
    m: Any = hugging_face("bert", 1)
    technique, _ = begun(m, [batch], smoothing=1e-6)
    counts = tokens[:, :-3].flatten().bincount(minlength=VOCAB) + (
        tokens[:, -3:][masked[:, -3:]].bincount(minlength=VOCAB) * 0
    )
    expected = ((counts + 1e-6) / (counts.sum() + VOCAB * 1e-6)).log()
    torch.testing.assert_close(m.model.cls.predictions.bias, expected)
    assert "bigrams" in technique.summary()


@pytest.mark.parametrize("form", ["shifted inside", "padded inside", "counted alone"])
def test_where_texts_stand(form: str) -> None:
    ids = texts(3, 5)
    labels = ids.clone()
    labels[0, -2:] = -100
    later = labels[:, 1:]
    target = {
        "shifted inside": later.flatten(),
        "padded inside": torch.cat([later, torch.full((3, 1), -100)], 1).flatten(),
        "counted alone": later[later != -100],
    }[form]
    found = text_in({"input_ids": ids, "labels": labels}, ClassLoss(VOCAB, target, -100))
    assert found is not None and found.labels == "['labels']" and not found.masked
    assert text_in({"input_ids": ids}, ClassLoss(VOCAB, torch.randint(20, (18,)), -100)) is None


def test_counts_and_associations_against_loops() -> None:
    tokens = torch.tensor([[0, 1, 2, 1], [1, 2, 0, 1]])
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[1, 2] = False
    counts = Counts(3)
    counts.add(tokens, valid)
    counts.merge()
    assert counts.single.tolist() == [1, 4, 2]
    assert dict(zip(counts.pairs.tolist(), counts.times.tolist(), strict=True)) == {1: 1, 5: 2, 7: 1}
    table = associations(counts.pairs, counts.times, 3).to_dense()
    assert table[1, 2].item() == pytest.approx(math.log(2 * 4 / (2 * 2)))
    assert table[0, 1].item() == pytest.approx(math.log(1 * 4 / (1 * 2))) and table[2, 0] == 0
    left, right = factors(table.to_sparse_coo(), 3)
    torch.testing.assert_close(left @ right.mT, table)
    assert log_frequencies(counts.single, smoothing=1.0).exp().tolist() == pytest.approx([0.2, 0.5, 0.3])


@pytest.mark.slow
def test_a_vocabulary_of_50_000() -> None:
    """Eight groups of tokens that follow upon their own, against Lanczos' method."""
    svds = pytest.importorskip("scipy.sparse.linalg").svds
    from scipy.sparse import coo_matrix

    c = 50_257
    x, y = torch.randint(250, (2, 400_000)) * 8 + torch.randint(8, (400_000,))
    pairs, times = torch.unique(x * c + y, return_counts=True)
    table = associations(pairs, times, c)
    left, right = factors(table, 64)
    expected = svds(coo_matrix((table.values().double(), table.indices().numpy()), (c, c)), 8)[1][::-1]
    norms = left.norm(dim=0) * right.norm(dim=0)
    torch.testing.assert_close(norms[:8].double(), torch.tensor(expected.copy()), rtol=0.02, atol=0.0)


class Patches(pl.LightningModule):
    """A classifier of images whose first map is ``first``."""

    def __init__(self, first: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.first, self.head = nn.Identity(), first, nn.Linear(width, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        if isinstance(self.first, nn.Linear):
            x = x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
            return F.cross_entropy(self.head(F.relu(self.first(x)).mean(1)), batch[1])
        return F.cross_entropy(self.head(F.relu(self.first(x)).flatten(2).mean(2)), batch[1])


def pictures() -> list[Any]:
    g = torch.Generator().manual_seed(0)
    mixed = torch.randn(8, 3, 6, 6, generator=g).cumsum(2).cumsum(1) + 2.0
    return [[part, torch.arange(4) % 3] for part in mixed.split(4)]


MAPS = {
    "both signs": (lambda: nn.Conv2d(3, 30, 2, 2), 30, 12, True),
    "room for one": (lambda: nn.Conv2d(3, 16, 2), 16, 12, False),
    "fewer": (lambda: nn.Conv2d(3, 5, 2, bias=False), 5, 5, False),
    "linear": (lambda: nn.Linear(12, 26), 26, 12, True),
    "padded": (lambda: nn.Conv2d(3, 16, 2, padding=1), 16, 12, False),
}


@pytest.mark.parametrize("name", MAPS)
def test_whitened_patches_have_identity_covariance(name: str) -> None:
    build, width, size, both = MAPS[name]
    torch.manual_seed(0)
    m: Any = Patches(build(), width)
    before = m.first.weight.detach().clone()
    technique, _ = begun(m, pictures(), eps=0.0)
    x = torch.cat([batch[0] for batch in pictures()])
    if isinstance(m.first, nn.Linear):
        y = m.first(x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3)).flatten(0, 2)
    else:
        m.first.padding = (0, 0)
        y = m.first(x).movedim(1, -1).flatten(0, 2)
    torch.testing.assert_close(y[:, :size].T.cov(correction=0), torch.eye(size), rtol=0, atol=1e-3)
    if m.first.bias is not None:
        torch.testing.assert_close(y[:, :size].mean(0), torch.zeros(size), rtol=0, atol=1e-3)
    used = 2 * size if both else size
    if both:
        torch.testing.assert_close(y[:, size:used], -y[:, :size], rtol=0, atol=1e-4)
    assert torch.equal(m.first.weight[used:], before[used:])
    assert f"first.weight whitens {len(y)} patches in {size} of {width}" in technique.summary()


def test_whitening_of_what_does_not_vary() -> None:
    rows = whitening(torch.diag(torch.tensor([4.0, 0.0, 1.0])), eps=0.0)
    torch.testing.assert_close(rows.abs().float(), torch.tensor([[0.5, 0, 0], [0, 0, 1], [0, 0, 0]]))
    torch.testing.assert_close(whitening(torch.eye(2) * 3, eps=1.0).square().sum(1).float(), torch.tensor([0.25, 0.25]))


def test_the_order_of_data_and_random_numbers_stay() -> None:
    """With a rate of zero, what the run sees and draws does not depend on the weights."""
    seen: dict[bool, list[Tensor]] = {}
    for act in (False, True):
        torch.manual_seed(0)
        m, seen[act] = TinyGPT(2), []
        step = m.training_step

        def training_step(batch: Any, batch_idx: int, act: bool = act, step: Any = step, m: TinyGPT = m) -> Tensor:
            if m.training:
                seen[act].append(torch.cat([batch["input_ids"].flatten().float(), torch.rand(1)]))
            return step(batch, batch_idx)

        m.training_step = training_step
        pl.seed_everything(5, verbose=False)
        trainer(DataDrivenInit(batches=4 if act else 0), max_steps=6).fit(m, loader("tiny_gpt"))
    assert len(seen[True]) == 6
    for one, other in zip(seen[True], seen[False], strict=True):
        assert torch.equal(one, other)


def test_labels_that_are_not_in_the_batch_are_refused() -> None:
    class Own(TinyGPT):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            labels = (batch["input_ids"] * 7 + 1) % VOCAB
            return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), labels.flatten())

    m = Own(1)
    before = flat(m).clone()
    with pytest.raises(ValueError, match=r"labels are in no tensor \(B, T\) of the batch"):
        begun(m, causal(texts()))
    assert torch.equal(flat(m), before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batches": -1}, "batches=-1.: expected an integer >= 0: the number of training batches"),
        ({"smoothing": 0.0}, "smoothing=0.0.: expected a finite number > 0"),
        ({"smoothing": math.nan}, "smoothing=nan.: expected"),
        ({"eps": -1.0}, "eps=-1.0.: expected a finite number >= 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataDrivenInit(**settings)


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "DataDrivenInit", {"batches": 2}, model="TinyGPT", data="Sequences", max_steps=2)
    assert "of the bigram fit" in capsys.readouterr().out
