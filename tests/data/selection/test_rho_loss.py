"""RHO-LOSS: what a loss has above its irreducible one, irreducible losses by halves, by index, kept; and its errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_eff._core.session import Session
from lightning_eff.data.selection import rho_loss
from lightning_eff.data.selection._choosing import largest
from lightning_eff.data.selection.ordered_sgd import OrderedSGD
from lightning_eff.data.selection.rho_loss import RHOLoss, reducible
from tests.cases import Case, own_loss
from tests.data.selection.test_selective_backprop import still
from tests.models import TinyClassifier, flat, loader, make_batch, module, trainer
from tests.runs import SaveBatches, fit_yaml

CASES = {
    "RHOLoss": Case(
        active=lambda: RHOLoss(keep=0.5),
        neutral=lambda: RHOLoss(keep=1.0),
        lost=(own_loss, "classifier", "sample_loss"),
    )
}

N = 12


class Numbered(Dataset[Any]):
    """Samples that tell their index by their first feature."""

    def __init__(self) -> None:
        self.x, self.y = make_batch("classifier", N)
        self.x[:, 0] = torch.arange(N) / N

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


class Sees(TinyClassifier):
    """Notes the indices of the samples of each pass, whether it has a gradient, and how far the run is."""

    def __init__(self, lr: float = 0.0) -> None:
        super().__init__(lr=lr, batch_norm=False)
        self.head[0] = nn.Identity()
        self.__dict__["_passes"] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index = (batch[0][:, 0] * N).round().long().tolist()
        self._passes.append((index, torch.is_grad_enabled()))
        return super().training_step(batch, batch_idx)

    @property
    def trained(self) -> list[list[int]]:
        return [index for index, grad in self._passes if grad]


def data(size: int = 4, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Numbered(), size, shuffle=True, **kwargs)


def fit(technique: Any, net: Sees | None = None, *others: Any, **kwargs: Any) -> Sees:
    torch.manual_seed(5)
    net = Sees() if net is None else net
    ckpt = kwargs.pop("ckpt_path", None)
    trainer(technique, *others, **{"max_steps": 6, **kwargs}).fit(net, data(), ckpt_path=ckpt)
    return net


# -- the rule


def test_no_irreducible_loss_is_top_loss() -> None:
    """IL = 0: the same samples as Ordered SGD, and the same weights bit for bit."""
    torch.manual_seed(0)
    ours = fit(RHOLoss(keep=0.5, irreducible=[0.0] * N), Sees(0.1))
    torch.manual_seed(0)
    theirs = fit(OrderedSGD(keep=0.5), Sees(0.1))
    assert len(ours.trained) == 6 and ours.trained == theirs.trained
    assert torch.equal(flat(ours), flat(theirs))


def test_irreducible_losses_as_they_are_now_are_ties() -> None:
    """Then none can fall: the first of each batch are trained on, and all reducible losses are 0."""
    net = Sees()
    whole = Numbered()
    with torch.no_grad():
        now = F.cross_entropy(net(whole.x), whole.y, reduction="none")
    assert reducible(now, now).tolist() == [0.0] * N
    assert largest(reducible(now, now), k=3).tolist() == [0, 1, 2]


def test_of_equal_losses_the_higher_irreducible_one_never_outranks() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        losses, il = torch.rand(8, generator=g), torch.rand(8, generator=g)
        losses[1:4] = losses[0]
        chosen = set(largest(reducible(losses, il), k=4).tolist())
        for a in range(4):
            for b in range(4):
                assert not (il[a] > il[b] and a in chosen and b not in chosen)


def test_trained_on_are_those_of_largest_reducible_loss_by_index() -> None:
    il = torch.rand(N, generator=torch.Generator().manual_seed(1)) * 2
    net = fit(RHOLoss(keep=0.5, irreducible=il))
    whole = Numbered()
    with torch.no_grad():
        rho = F.cross_entropy(net(whole.x), whole.y, reduction="none") - il
    asked = [index for index, grad in net._passes if not grad and len(index) == 4][-6:]
    for batch, trained in zip(asked, net.trained, strict=True):
        assert set(trained) == set(sorted(batch, key=lambda i: -float(rho[i]))[:2])


# -- irreducible losses that are found


def by_hand(net: Sees, halves: list[list[int]], orders: list[list[list[int]]], lr: float) -> Tensor:
    """Each half's losses by a copy that learnt the batches of the other."""
    import copy

    whole, found = Numbered(), torch.zeros(N)
    for half, batches in zip(halves, orders, strict=True):
        model = copy.deepcopy(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        for done, index in enumerate(batches):
            optimizer.param_groups[0]["lr"] = lr * (1 - done / len(batches))
            optimizer.zero_grad()
            F.cross_entropy(model(whole.x[index]), whole.y[index]).backward()
            optimizer.step()
        with torch.no_grad():
            found[half] = F.cross_entropy(model(whole.x[half]), whole.y[half], reduction="none")
    return found


def test_each_half_is_scored_by_a_model_that_learnt_the_other() -> None:
    """Against a loop by hand on the batches that were seen; each sample is learnt ``epochs`` times, and scored once."""
    net, technique = Sees(), RHOLoss(keep=0.5, epochs=2, lr=0.05)
    torch.manual_seed(5)
    first = {name: value.clone() for name, value in net.state_dict().items()}
    t = trainer(technique, max_steps=1)
    costs: list[Any] = []
    original = rho_loss.irreducible_losses

    def watched(session: Session, *args: Any, **kwargs: Any) -> Tensor:
        net._passes.clear()
        found = original(session, *args, **kwargs)
        costs.append(session.chain.cost.state_dict())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rho_loss, "irreducible_losses", watched)
        t.fit(net, data())
    passes = net._passes[: 2 * (4 + 2)]  # two epochs of two batches, and two that are scored, of each half
    learnt = [[index for index, grad in passes[a : a + 6] if grad] for a in (0, 6)]
    scored = [[i for index, grad in passes[a : a + 6] if not grad for i in index] for a in (0, 6)]
    for one, other in ((0, 1), (1, 0)):
        assert sorted(i for index in learnt[one] for i in index) == sorted(scored[other] * 2)
    assert sorted(scored[0] + scored[1]) == [*range(N)]
    assert all(torch.equal(value, first[name]) for name, value in net.state_dict().items()), "a rate of 0: as they were"
    expected = by_hand(net, scored, learnt, 0.05)
    assert technique.irreducible_losses is not None
    torch.testing.assert_close(technique.irreducible_losses, expected, rtol=1e-4, atol=1e-5)
    assert technique.report()["irreducible_loss"] == pytest.approx(float(expected.mean()), rel=1e-4)
    (cost,) = costs
    assert cost["backward_passes"] == 8 and cost["forward_samples"] >= 3 * N and cost["seconds"] > 0


def test_a_wrong_label_is_not_chosen() -> None:
    """Learnable classes and one wrong label: top-loss takes it whenever it comes, and RHO never does once others are learnt."""
    x = torch.zeros(16, 8)
    y = torch.arange(16) % 2
    x[torch.arange(16), y] = 3.0
    y[5] = 1 - y[5]

    class Counts(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if torch.is_grad_enabled() and self.global_step >= 8:
                chosen.append(bool((batch[0].argmax(1) != batch[1]).any()))
            return super().training_step(batch, batch_idx)

    shares = {}
    for technique in (OrderedSGD(keep=0.25), RHOLoss(keep=0.25, epochs=20, lr=0.02)):
        chosen: list[bool] = []
        torch.manual_seed(0)
        net = Counts(batch_norm=False, lr=0.02)
        net.head[0] = nn.Identity()
        batches = DataLoader(list(zip(x, y, strict=True)), 16)
        trainer(technique, max_steps=16, logger=False).fit(net, batches)
        shares[type(technique).__name__] = sum(chosen[-8:]) / 8
    assert shares == {"OrderedSGD": 1.0, "RHOLoss": 0.0}


def test_another_model_finds_them_and_is_as_before() -> None:
    torch.manual_seed(1)
    model = TinyClassifier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    net = Sees(0.1)
    technique = RHOLoss(keep=0.5, model=model)
    fit(technique, net)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(len(index) == 2 for index in net.trained), "the module itself learnt nothing else"
    assert technique.irreducible_losses is not None and bool(technique.irreducible_losses.isfinite().all())


@pytest.mark.parametrize("name", ["tiny_gpt", "gpt2", "bert", "vit"])
def test_models_of_others(name: str) -> None:
    net, technique = module(name, num_layers=2), RHOLoss(keep=0.5)
    trainer(technique, max_steps=2).fit(net, loader(name, 8))
    found = technique.irreducible_losses
    assert found is not None and found.shape == (8,) and bool((found > 0).all())


def test_a_half_that_leaves_one_sample_over_has_no_batch_of_it() -> None:
    """Batch statistics need two: of nine samples, eight are learnt, and all are scored."""
    technique = RHOLoss(keep=0.5)
    trainer(technique, max_steps=1).fit(TinyClassifier(), loader("classifier", 18))
    assert technique.irreducible_losses is not None and bool(technique.irreducible_losses.isfinite().all())


def test_a_file_and_a_resumed_run_find_none_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = RHOLoss(keep=0.5)
    whole = fit(first, Sees(0.1), SaveBatches(tmp_path, [2]))
    torch.save(first.irreducible_losses, tmp_path / "il.pt")

    def never(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("found again")

    monkeypatch.setattr(rho_loss, "irreducible_losses", never)
    resumed = fit(RHOLoss(keep=0.5), Sees(0.1), ckpt_path=tmp_path / "batch=2.ckpt")
    assert whole.trained[-4:] == resumed.trained[-4:] and torch.equal(flat(whole), flat(resumed))
    given = fit(RHOLoss(keep=0.5, irreducible=tmp_path / "il.pt"), Sees(0.1))
    assert given.trained[-1:] and len(given.trained) == 6


# -- what is refused


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(list(zip(*make_batch("classifier", 8), strict=True)))


def test_loaders_that_do_not_tell_indices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"RHOLoss: the training loader does not say .*or use OrderedSGD"):
        trainer(RHOLoss(), max_steps=2).fit(still("classifier"), DataLoader(Stream(), 4))
    with pytest.raises(ValueError, match=r"RHOLoss: got 3 irreducible losses for a data set of 12 samples"):
        fit(RHOLoss(irreducible=[1.0, 2.0, 3.0]))

    def two(samples: Any) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return torch.cat([x, x]), torch.cat([y, y])

    with pytest.raises(ValueError, match=r"RHOLoss: the loader gave 4 indices for a batch of 8 samples"):
        trainer(RHOLoss(irreducible=[0.0] * N), max_steps=2).fit(Sees(), data(collate_fn=two))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0.0}, r"keep=0.0\): expected a number in \(0, 1\]"),
        ({"epochs": 0}, r"epochs=0\): expected an integer >= 1"),
        ({"lr": 0.0}, r"lr=0.0\): expected a finite number > 0"),
        ({"irreducible": [[1.0]]}, r"Its shape is \(1, 1\) and its type torch.float32"),
        (
            {"irreducible": [float("nan")]},
            r"expected one finite number for each sample .* 1 of 1 are NaN, the first at",
        ),
        ({"irreducible": "nowhere.pt"}, r"irreducible='nowhere.pt'\): this file cannot be read: .*torch.save"),
        ({"irreducible": ["a"]}, r"expected one finite number for each sample .* It cannot be a tensor"),
        ({"model": nn.Linear(2, 2)}, r"model=Linear\(.*\)\): expected a LightningModule"),
        (
            {"model": Sees(), "irreducible": [0.0]},
            r"irreducible=..., model=Sees\(...\)\): both give the irreducible losses",
        ),
        ({"sample_loss": 3}, r"sample_loss=3\): expected a function"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RHOLoss(**arguments)


def test_a_yaml_trains(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "RHOLoss", {"keep": 0.5, "epochs": 1}, max_steps=4)
