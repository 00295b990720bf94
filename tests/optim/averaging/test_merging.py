"""Merging checkpoints: the mean against numpy, BatchNorm against ``update_bn``, and greedy soups against the paper's recipe."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import pytorch_lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import ExponentialMovingAverage, LoRA, cli, merge
from lightning_eff.optim.averaging import _soups as soups
from tests.models import TinyClassifier, trainer


class Body(nn.Module):
    """A classifier of digits, with or without BatchNorm, that logs ``val_loss`` and ``val_acc``."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        both: Any = self  # a LightningModule of either package
        both.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.ReLU())
        self.head = nn.Linear(16, 10)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        both: Any = self
        both.log("val_loss", F.cross_entropy(out, batch[1]))
        both.log("val_acc", (out.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


class Digits(Body, pl.LightningModule):
    pass


class OtherDigits(Body, pytorch_lightning.LightningModule):
    pass


def loaders() -> tuple[Any, Any]:
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    return (
        DataLoader(TensorDataset(x[:1200], y[:1200]), 60),
        DataLoader(TensorDataset(x[1200:], y[1200:]), 200),
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Three runs of each kind from the same start, with different orders and noise, and one that was spoilt."""
    found: dict[str, list[str]] = {}
    folder = tmp_path_factory.mktemp("runs")
    train, _ = loaders()
    for kind in ("plain", "norm"):
        for seed in range(4):
            torch.manual_seed(0)
            net = Digits(norm=kind == "norm")
            pl.seed_everything(seed, verbose=False)
            t = trainer(max_epochs=2, limit_train_batches=16 + seed)
            t.fit(net, DataLoader(train.dataset, 60, shuffle=True))
            with torch.no_grad():  # noise that the mean of several runs reduces, and much of it in the last run
                for p in net.parameters():
                    p += torch.randn_like(p) * (0.15 if seed < 3 else 3.0)
            found.setdefault(kind, []).append(str(folder / f"{kind}{seed}.ckpt"))
            t.save_checkpoint(found[kind][-1])
    return found


def states(paths: list[str]) -> list[dict[str, Tensor]]:
    return [torch.load(path, weights_only=True)["state_dict"] for path in paths]


@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 0.0]])
def test_a_uniform_soup_is_the_mean(weights: list[float] | None, runs: dict[str, list[str]], tmp_path: Path) -> None:
    paths = runs["plain"][:3]
    found = merge(paths, weights=weights)
    a = np.array(weights or [1, 1, 1], dtype=np.float64)
    for name, value in found.state_dict.items():
        each = np.stack([state[name].double().numpy() for state in states(paths)])
        expected = np.tensordot(a / a.sum(), each, 1)
        np.testing.assert_allclose(value.double().numpy(), expected, rtol=1e-6, atol=1e-7)
    found.save(tmp_path / "new" / "soup.ckpt")
    loaded = Digits.load_from_checkpoint(tmp_path / "new" / "soup.ckpt")
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in found.state_dict.items())


def test_dtypes_and_integers_are_kept() -> None:
    one = {"w": torch.ones(2, dtype=torch.bfloat16), "n": torch.tensor(3), "c": torch.ones(1, dtype=torch.complex64)}
    two = {"w": torch.full((2,), 2.0, dtype=torch.bfloat16), "n": torch.tensor(5), "c": torch.full((1,), 3j)}
    found = soups.mean([one, two], [1.0, 1.0])
    assert found["w"].dtype == torch.bfloat16 and found["w"].tolist() == [1.5, 1.5]
    assert found["n"].item() == 3 and soups.unequal([one, two]) == ["n"]
    assert found["c"].item() == pytest.approx(0.5 + 1.5j)


@pytest.mark.parametrize("kind", [Digits, OtherDigits], ids=["lightning", "pytorch_lightning"])
def test_batch_norm_is_recomputed_as_update_bn_does(kind: Any, runs: dict[str, list[str]]) -> None:
    paths, data = runs["norm"][:3], loaders()
    net = kind(norm=True)
    found = merge(paths, net, data, metric="val_loss", bn_batches=20)
    reference = Digits(norm=True)
    reference.load_state_dict(soups.mean(states(paths), [1.0] * 3))
    torch.optim.swa_utils.update_bn(data[0], reference)
    for name in ("net.1.running_mean", "net.1.running_var"):
        torch.testing.assert_close(found.state_dict[name], reference.state_dict()[name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(net.state_dict()[name], found.state_dict[name])
    reference.eval()
    losses = [F.cross_entropy(reference(x), y).detach() * len(x) for x, y in data[1]]
    expected = float(torch.stack(losses).sum()) / len(data[1].dataset)
    assert found.score == pytest.approx(expected, rel=1e-4)
    plain = merge(paths, bn_batches=0).state_dict["net.1.running_mean"]
    torch.testing.assert_close(plain, torch.stack([s["net.1.running_mean"] for s in states(paths)]).mean(0))


def with_second_norm(paths: list[str], tmp_path: Path, spread: float) -> tuple[list[str], type[Digits]]:
    """The runs with a second BatchNorm layer, which no training step calls, and its means ``spread`` apart."""

    class Two(Digits):
        def __init__(self, norm: bool = True) -> None:
            super().__init__(norm)
            self.teacher = nn.BatchNorm1d(16)

    found = []
    for i, path in enumerate(paths):
        checkpoint, teacher = torch.load(path, weights_only=True), nn.BatchNorm1d(16)
        teacher.running_mean.add_(1 + spread * i)  # type: ignore[union-attr]
        checkpoint["state_dict"] |= {f"teacher.{name}": value for name, value in teacher.state_dict().items()}
        found.append(str(tmp_path / f"two{i}.ckpt"))
        torch.save(checkpoint, found[-1])
    return found, Two


@pytest.mark.parametrize("case", ["unused layer", "no batches", "evaluation mode"])
def test_statistics_that_no_batch_recomputed_are_refused(case: str, runs: dict[str, list[str]], tmp_path: Path) -> None:
    paths, net, layer = runs["norm"][:2], Digits(norm=True), "net.1"
    train, val = loaders()
    if case == "unused layer":
        paths, kind = with_second_norm(paths, tmp_path, 1.0)
        net, layer = kind(), "teacher"
    elif case == "no batches":
        train = DataLoader(TensorDataset(*train.dataset[:0]), 60)
    else:
        net.eval()
    with pytest.raises(ValueError, match=rf"in training mode: {layer}\. Pass .* or use bn_batches=0"):
        merge(paths, net, (train, val))
    assert torch.isfinite(merge(paths, net, (train, val), bn_batches=0).state_dict[f"{layer}.running_mean"]).all()


def test_an_unused_layer_keeps_the_statistics_that_all_checkpoints_have(
    runs: dict[str, list[str]], tmp_path: Path
) -> None:
    paths, kind = with_second_norm(runs["norm"][:2], tmp_path, 0.0)
    net = kind()
    found = merge(paths, net, loaders())
    for held in (found.state_dict, net.state_dict()):
        assert torch.equal(held["teacher.running_mean"], torch.ones(16))
    assert not torch.equal(found.state_dict["net.1.running_mean"], states(paths)[0]["net.1.running_mean"])


def by_hand(paths: list[str]) -> tuple[list[str], float]:
    """Recipe 1 of the paper, on accuracies."""
    x, y = loaders()[1].dataset.tensors
    net = Digits().eval()

    def accuracy(some: list[str]) -> float:
        each = states(some)
        net.load_state_dict({n: torch.stack([s[n].double() for s in each]).mean(0).to(v) for n, v in each[0].items()})
        return float((net(x).argmax(1) == y).float().mean())

    order = sorted(paths, key=lambda path: -accuracy([path]))
    soup = order[:1]
    for path in order[1:]:
        if accuracy([*soup, path]) >= accuracy(soup):
            soup.append(path)
    return soup, accuracy(soup)


def test_a_greedy_soup_is_the_papers(runs: dict[str, list[str]]) -> None:
    found = merge(runs["plain"], Digits(), loaders(), method="greedy", metric="val_acc", mode="max")
    soup, accuracy = by_hand(runs["plain"])
    assert found.used == soup and runs["plain"][3] not in soup and len(soup) > 1
    assert found.score == pytest.approx(accuracy, abs=1e-6)
    assert found.score is not None and found.score >= max(found.scores.values())
    assert [*found.scores] == runs["plain"]


def test_a_score_that_is_not_a_number_leaves_a_checkpoint_out() -> None:
    scores = {(0,): 1.0, (1,): 2.0, (2,): float("nan"), (0, 1): float("nan"), (0, 2): 0.5}
    chosen, score = soups.greedy([1.0, 2.0, 3.0], lambda some: scores[tuple(some)], better=lambda a, b: a < b)
    assert chosen == [0, 2] and score == 0.5


def test_averages_of_runs_are_merged(tmp_path: Path) -> None:
    """A checkpoint of an averaging technique holds the average."""
    nets, paths = [], []
    for seed in range(2):
        torch.manual_seed(0)
        nets.append(Digits())
        t = trainer(ExponentialMovingAverage(half_life=4), max_epochs=1, limit_train_batches=4 + seed)
        t.fit(nets[-1], loaders()[0])
        paths.append(str(tmp_path / f"{seed}.ckpt"))
        t.save_checkpoint(paths[-1])
    found = merge(paths).state_dict["head.weight"]
    torch.testing.assert_close(found, torch.stack([net.head.weight.detach() for net in nets]).mean(0))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (lambda p: {"checkpoints": p["plain"][:1]}, "there is nothing to merge. Pass two or more paths"),
        (lambda p: {"checkpoints": [*p["plain"][:1], "gone.ckpt"]}, "merge('gone.ckpt'): there is no such file"),
        (lambda p: {"checkpoints": [p["plain"][0], p["norm"][0]]}, "have different weights (net.1.bias,"),
        (lambda p: {"checkpoints": p["norm"]}, "merge(module=None): BatchNorm statistics must be recomputed"),
        (lambda p: {"checkpoints": p["plain"], "method": "greedy"}, "merge(module=None): evaluating val_loss needs"),
        (lambda p: {"checkpoints": p["plain"], "method": "best"}, "merge(method='best'): expected 'uniform'"),
        (lambda p: {"checkpoints": p["plain"], "weights": [1, 2]}, "expected 4 numbers >= 0, one for each checkpoint"),
        (lambda p: {"checkpoints": p["plain"], "weights": [0, 0, 0, 0]}, "not all 0. Omit it"),
        (lambda p: {"checkpoints": p["plain"], "bn_batches": -1}, "merge(bn_batches=-1): expected"),
        (
            lambda p: {"checkpoints": p["plain"], "module": Digits(), "data": loaders(), "metric": "loss"},
            "merge(metric='loss'): validation logged val_acc, val_loss.",
        ),
        (
            lambda p: {"checkpoints": p["plain"], "module": TinyClassifier()},
            "merge(module=TinyClassifier): the weights do not fit the module",
        ),
        (
            lambda p: {"checkpoints": p["plain"], "module": Digits(), "data": loaders()[1]},
            "merge(data=a loader): expected a LightningDataModule or (train_loader, val_loader)",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused(arguments: Any, says: str, runs: dict[str, list[str]]) -> None:
    with pytest.raises((ValueError, TypeError, FileNotFoundError)) as raised:
        merge(**arguments(runs))
    assert says in str(raised.value)


def test_other_shapes_and_other_files_are_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}}, tmp_path / "a.ckpt")
    torch.save({"state_dict": {"w": torch.ones(3)}}, tmp_path / "b.ckpt")
    torch.save({"w": torch.ones(3)}, tmp_path / "c.ckpt")
    (tmp_path / "sharded").mkdir()
    for other, says in (
        ("b.ckpt", "w has shape (2,)"),
        ("c.ckpt", "no 'state_dict'"),
        ("sharded", "sharded checkpoint"),
    ):
        with pytest.raises(ValueError, match=says.replace("(", r"\(").replace(")", r"\)")):
            merge([str(tmp_path / "a.ckpt"), str(tmp_path / other)])


def test_adapters_get_a_note(tmp_path: Path) -> None:
    paths = []
    for seed in range(2):
        torch.manual_seed(0)
        t = trainer(LoRA(2, names=["net.0"]), max_steps=2 + seed)
        t.fit(Digits(), loaders()[0])
        paths.append(str(tmp_path / f"{seed}.ckpt"))
        t.save_checkpoint(paths[-1])
    (note,) = merge(paths).notes
    assert note.startswith("The mean of two LoRA factors")


# -- the command


CONFIG = """\
model: {class_path: tests.optim.averaging.test_merging.Digits, init_args: {norm: true}}
data: {class_path: tests.optim.averaging.test_merging.DigitsData}
trainer: {accelerator: cpu, max_epochs: 1}
"""


class DigitsData(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loaders()[0]

    def val_dataloader(self) -> Any:
        return loaders()[1]


def test_the_command(runs: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = tmp_path / "mine.yaml", tmp_path / "soup.ckpt"
    config.write_text(CONFIG)
    arguments = ["--config", str(config), "--method", "greedy", "--metric", "val_acc", "--mode", "max"]
    cli.main(["merge", *runs["norm"], *arguments, "--bn-batches", "20", "--out", str(out)])
    told = capsys.readouterr().out
    assert f"{runs['norm'][3]}: " in told and "(left out)" in told and f"wrote {out}" in told
    net = Digits.load_from_checkpoint(out).eval()
    x, y = loaders()[1].dataset.tensors
    accuracy = float((net(x).argmax(1) == y).float().mean())
    assert f"checkpoints: {accuracy:.6g}" in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a.ckpt", "--out", "b.ckpt"], "there is nothing to merge"),
        (
            ["a.ckpt", "b.ckpt", "--metric", "val_loss", "--out", "c.ckpt"],
            "--metric val_loss: evaluating needs the module",
        ),
        (["a.ckpt", "b.ckpt", "--out", "c.ckpt"], "there is no such file"),
    ],
)
def test_wrong_arguments_of_the_command(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["merge", *arguments])
    assert raised.value.code == 2 and says in " ".join(capsys.readouterr().err.split())
