"""DifficultyPacing: no sample outside the prefix is drawn, all of it is, and once all samples are in, epochs are plain."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler

from lightning_eff import DifficultyPacing, ExactResume
from lightning_eff.data.curriculum._difficulty import sample_length
from lightning_eff.data.curriculum.difficulty_pacing import paced_share, passes_over, places, prefix_size
from tests.cases import Case
from tests.models import TinyClassifier, trainer
from tests.runs import fit_yaml

CASES = {
    "DifficultyPacing": Case(
        active=lambda: DifficultyPacing("loss", 0.5, 0.75),
        neutral=lambda: DifficultyPacing("loss", c0=1.0),
        anywhere=True,
        refuses_manual=True,
    )
}
N = 30
SCORES = torch.randn(N, generator=torch.Generator().manual_seed(5))
EASIEST = SCORES.argsort().tolist()


class Numbered(Dataset[Any]):
    """Sample i is its number and a label that follows from it."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index), 1.0]), torch.tensor(index % 3)


class Net(pl.LightningModule):
    """A classifier with BatchNorm and dropout that notes the samples of each training step."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.2)
        self.seen: list[list[int]] = []
        self._modes: list[bool] = []  # private, and so not put back after a pass that leaves no trace

    def logits(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.fc(x / N)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self._modes.append(self.training)
        if self.training:
            self.seen.append(x[:, 0].long().tolist())
        self.log("steps", float(len(self.seen)))
        return F.cross_entropy(self.logits(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


LOADERS: dict[str, Any] = {
    "shuffle": lambda: DataLoader(Numbered(), 4, shuffle=True),
    "in order, drop_last": lambda: DataLoader(Numbered(), 4, drop_last=True),
    "workers": lambda: DataLoader(Numbered(), 4, shuffle=True, num_workers=2),
}
WORKERS = pytest.param("workers", marks=pytest.mark.slow)
KINDS = ["shuffle", "in order, drop_last", WORKERS]


def run(
    technique: Callback | None, data: Any = None, *others: Callback, resume: Path | None = None, **kwargs: Any
) -> Net:
    pl.seed_everything(3 if resume is None else 44, verbose=False)
    net = Net()
    callbacks = [c for c in (technique, *others) if c is not None]
    data = LOADERS["shuffle"]() if data is None else data
    trainer(*callbacks, **{"max_steps": 24, **kwargs}).fit(net, data, ckpt_path=resume)
    return net


def allowed(step: int, steps: int, c0: float, until: float, p: float) -> set[int]:
    """The easiest samples at a step, by hand."""
    c = (c0**p + (1 - c0**p) * (step / steps) / until) ** (1 / p) if step / steps < until else 1.0
    return set(EASIEST[: int(min(c, 1.0) * N + 1e-6)])


@pytest.mark.parametrize("kind", KINDS)
def test_no_index_outside_the_prefix_is_ever_drawn(kind: str) -> None:
    """And of what is inside all: the prefix of the step before at least, but for what workers have begun to load."""
    c0, until, p = 0.2, 0.75, 2.0
    technique = DifficultyPacing(SCORES, c0, until, p=p)
    net = run(technique, LOADERS[kind](), max_steps=48)
    drawn: set[int] = set()
    for step, batch in enumerate(net.seen):
        assert set(batch) <= allowed(step, 48, c0, until, p), step
        drawn |= set(batch)
        if step in (3, 16, 24):
            assert len(drawn - allowed(max(step - 6, 0), 48, c0, until, p)) <= len(drawn) / 2
    late = {i for batch in net.seen[36:] for i in batch}
    assert len(late) > 0.8 * N and late - allowed(20, 48, c0, until, p), "the hardest come in the end"
    assert technique.report() == {"share": 1.0, "samples": N}
    assert "to all of them from step 37 on" in technique.summary()


def test_the_whole_of_a_prefix_is_drawn_evenly() -> None:
    """In passes: half of the samples come twice in an epoch of the same length."""
    net = run(DifficultyPacing(SCORES.tolist(), 0.5, 1.0, granularity=1.0), max_steps=16)
    for epoch in (net.seen[:8], net.seen[8:]):
        assert sorted(i for batch in epoch for i in batch) == sorted(EASIEST[:15] * 2)


def test_once_all_are_in_epochs_are_the_users_own() -> None:
    """To the bit: the same samples in the same order as of a plain run, whose random state has gone as far."""
    plain = run(ExactResume(), max_steps=32)
    net = run(DifficultyPacing(SCORES, 0.3, 0.2), max_steps=32)
    assert net.seen[:8] != plain.seen[:8]
    assert all(sorted(i for batch in net.seen[a : a + 8] for i in batch) == [*range(N)] for a in (8, 16, 24))
    ordered = LOADERS["in order, drop_last"]
    net, plain = run(DifficultyPacing(SCORES, 0.3, 0.2), ordered(), max_steps=28), run(None, ordered(), max_steps=28)
    assert net.seen[7:] == plain.seen[7:] and net.seen[:7] != plain.seen[:7]


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0])
def test_the_rule(p: float) -> None:
    c0, until = 0.25, 0.5
    found = [paced_share(u, c0=c0, until=until, p=p) for u in (0.0, 0.1, 0.3, 0.5, 0.9)]
    for u, c in zip((0.0, 0.1, 0.3), found, strict=False):
        assert (c**p - c0**p) / (1 - c0**p) == pytest.approx(u / until, abs=1e-12), "c^p moves evenly"
    assert found[0] == pytest.approx(c0) and found[3:] == [1.0, 1.0]
    # DeepSpeed's, of a root r: floor((t/T_c)^(1/r) (max - min) + min), here without the floor, max = 1 and min = c0
    rooted = [(u / until) ** (1 / p) * (1 - c0) + c0 for u in (0.0, 0.1, 0.3)]
    from_nothing = [c0 + (1 - c0) * paced_share(u, c0=0.0, until=until, p=p) for u in (0.0, 0.1, 0.3)]
    assert rooted == pytest.approx(from_nothing)
    assert (rooted == pytest.approx(found[:3])) == (p == 1.0)


def test_sizes_places_and_passes() -> None:
    assert [prefix_size(c, 100) for c in (0.29, 0.294, 1.0, 0.001)] == [29, 29, 100, 1]
    assert places(torch.tensor([3.0, 1.0, 2.0, 1.0])).tolist() == [3, 0, 2, 1]
    g = torch.Generator().manual_seed(0)
    assert passes_over(torch.tensor([4, 2, 9]), 3, g, in_order=True).tolist() == [4, 2, 9]
    many = passes_over(torch.tensor([4, 2, 9]), 8, g, in_order=False).tolist()
    assert sorted(many[:3]) == sorted(many[3:6]) == [2, 4, 9] and len(many) == 8
    steps = DifficultyPacing(SCORES, 0.2, 1.0, granularity=0.25)
    assert [steps.share_at(u) for u in (0.0, 0.3, 0.32, 0.99, 1.0)] == pytest.approx([0.2, 0.2, 0.45, 0.95, 1.0])


@pytest.mark.parametrize("kind", ["shuffle", WORKERS])
def test_resume_is_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """In mid-epoch, where the prefix has grown since the epoch began, and at an epoch's end; scores are those of the start."""
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = run(DifficultyPacing("loss", 0.3, 0.9), LOADERS[kind](), saver, enable_checkpointing=True)
    for step in (3, 8, 21) if kind == "shuffle" else (11,):
        technique = DifficultyPacing("loss", 0.3, 0.9)
        resumed = run(technique, LOADERS[kind](), resume=tmp_path / f"step={step}.ckpt")
        assert resumed.seen == whole.seen[step:], step
        assert all(
            torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
        )
        assert resumed._modes == [True] * (24 - step), "no sample was scored again"


# -- scores


class Scores(Callback):
    """The technique's scores once there are any, and what the module's own pass over all samples says at the start."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.rng = torch.get_rng_state()
        self.before = copy.deepcopy(pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            x, y = (torch.stack(part) for part in zip(*(Numbered()[i] for i in range(N)), strict=True))
            same = zip(pl_module.state_dict().values(), self.before.state_dict().values(), strict=True)
            assert all(torch.equal(a, b) for a, b in same), "weights and statistics"
            self.training = all(m.training for m in pl_module.modules())
            self.losses = F.cross_entropy(self.before.eval().logits(x), y, reduction="none").detach()


def test_losses_are_the_modules_own_at_the_start_without_a_trace() -> None:
    scores, technique = Scores(), DifficultyPacing("loss", 0.3, 0.9)
    net = run(technique, DataLoader(Numbered(), 4), scores, max_steps=8)
    found = technique.state_dict()["scores"]
    torch.testing.assert_close(found.float(), scores.losses)
    assert scores.training and net._modes.count(True) == 8
    session = technique._past
    assert session is not None and net._modes.count(False) == session.chain.cost.forward_passes
    assert session.chain.cost.forward_samples >= N
    plain = run(ExactResume(), DataLoader(Numbered(), 4), max_steps=8)
    given = run(DifficultyPacing(found, 0.3, 0.9), DataLoader(Numbered(), 4), max_steps=8)
    assert given.seen == net.seen and given.seen != plain.seen
    assert torch.equal(given.fc.weight, net.fc.weight), "random numbers were drawn by the scoring"


def test_a_reference_modules_losses() -> None:
    pl.seed_everything(8, verbose=False)
    reference, technique = Net(), DifficultyPacing("loss", 0.3, 0.9)
    nn.init.normal_(reference.fc.weight, 0, 9)
    before = copy.deepcopy(reference)
    technique = DifficultyPacing("loss", 0.3, 0.9, reference=reference)
    run(technique, max_steps=1)
    x, y = (torch.stack(part) for part in zip(*(Numbered()[i] for i in range(N)), strict=True))
    wanted = F.cross_entropy(before.eval().logits(x), y, reduction="none")
    torch.testing.assert_close(technique.state_dict()["scores"].float(), wanted.detach())
    assert reference.training and reference.norm.num_batches_tracked == 0 and "log" not in reference.__dict__
    told = DifficultyPacing("loss", 0.3, 0.9, sample_loss=lambda module, batch: batch[0][:, 0].sin())
    run(told, max_steps=1)
    torch.testing.assert_close(told.state_dict()["scores"].float(), torch.arange(N).float().sin())


class Texts(Dataset[Any]):
    """Sample i has (7 i) % 11 + 1 tokens, in one of several makes."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.make(7 * index % 11 + 1)


MAKES: dict[str, Any] = {
    "padded": lambda n: {"input_ids": torch.zeros(16).long(), "attention_mask": (torch.arange(16) < n).long()},
    "list": lambda n: {"label": 2, "input_ids": [5] * n},
    "tuple": lambda n: (torch.ones(n).long(), torch.tensor(1)),
    "array": lambda n: {"x": torch.randn(3), "y": torch.arange(n).numpy()},
}


@pytest.mark.parametrize("make", sorted(MAKES))
def test_lengths(make: str) -> None:
    data = Texts(MAKES[make])
    assert [sample_length(data[i]) for i in range(N)] == [7 * i % 11 + 1 for i in range(N)]


def test_pacing_by_length() -> None:
    seen: list[int] = []

    class Spy(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.extend(batch["attention_mask"].sum(dim=1).tolist())
            return self.fc.weight.sum()

    technique = DifficultyPacing("length", 0.4, 1.0, granularity=1.0)
    trainer(technique, max_steps=7).fit(Spy(), DataLoader(Texts(MAKES["padded"]), 4, shuffle=True))
    shortest = sorted(7 * i % 11 + 1 for i in range(N))[:12]
    assert max(seen) == shortest[-1] and sorted(seen[:12]) == shortest


# -- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"c0": 0.0}, r"c0=0.0\): expected a number in \(0, 1\]"),
        ({"c0": 1.2}, r"c0=1.2\): expected"),
        ({"c0": float("nan")}, r"c0=nan\): expected"),
        ({"until": 1.5}, r"until=1.5\): expected a number in \[0, 1\]: the fraction"),
        ({"p": 0.0}, r"p=0.0\): expected a finite number > 0"),
        ({"granularity": -0.1}, r"granularity=-0.1\): expected a number in \[0, 1\]: the step"),
        ({"score": "hardest"}, r"score='hardest'\): expected 'length', 'loss' or 'random' or one number for each sample"),
        ({"score": [1.0, float("nan")]}, r"1 of 2 are NaN, the first at index 1"),
        ({"score": torch.zeros(2, 2)}, r"expected .* one number for each sample .* Its shape is \(2, 2\)"),
        ({"score": []}, r"expected .* one number for each sample .* Its shape is \(0,\)"),
        ({"score": [[1.0], 2.0]}, r"expected .* one number for each sample .* It cannot be a tensor"),
        ({"reference": TinyClassifier()}, r"reference=...\): only score='loss' uses it"),
        ({"score": "loss", "reference": nn.Linear(1, 1)}, r"reference=Linear\(...\)\): expected a LightningModule"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"DifficultyPacing\(.*{message}"):
        DifficultyPacing(**{"score": [1.0, 2.0], **arguments})


@pytest.mark.parametrize(
    ("technique", "data", "message"),
    [
        (DifficultyPacing([0.0] * 29), None, "got 29 scores for a data set of 30 samples; expected one per sample"),
        (DifficultyPacing(SCORES, 0.1), None, "the easiest 3 of 30 .* fewer than the 4 of a batch.*Use c0=0.133"),
        (DifficultyPacing("length"), None, r"found no sequence of integers in a sample of the data set \(tuple\)"),
        (
            DifficultyPacing("length"),
            DataLoader(Texts(lambda n: torch.zeros(9).long()), 4),
            "all 30 samples have 9 tokens",
        ),
        (
            DifficultyPacing(SCORES, 0.2),
            DataLoader(Numbered(), 4, sampler=SubsetRandomSampler(EASIEST[3:])),
            "the easiest 6 of 30 samples, of which the loader's sampler yields 3, are fewer",
        ),
        (
            DifficultyPacing("loss", sample_loss=lambda module, batch: batch[0][:, 0] / 0),
            DataLoader(Subset(Numbered(), range(1, N)), 4),
            "is NaN or infinite",
        ),
        (DifficultyPacing("loss", sample_loss=lambda module, batch: batch[0]), None, r"sample_loss returned shape \(4, 2\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_paced_is_refused_before_the_first_step(technique: Any, data: Any, message: str) -> None:
    net = Net()
    with pytest.raises(ValueError, match=message):
        trainer(technique, max_steps=3).fit(net, LOADERS["shuffle"]() if data is None else data)
    assert not net.seen


def test_the_control_has_the_same_pacing_in_a_random_order() -> None:
    recipe = DifficultyPacing("loss", 0.4, 0.6, p=2.0, granularity=0.05)
    (arm,) = recipe.control.arms(recipe).values()
    assert isinstance(arm, DifficultyPacing)
    assert (arm.score, arm.c0, arm.until, arm.p, arm.granularity) == ("random", 0.4, 0.6, 2.0, 0.05)
    assert arm.control.arms(arm) == {} and recipe.control.arms(DifficultyPacing("loss", 1.0)) == {}
    net = run(DifficultyPacing("random", 0.4, 1.0, granularity=1.0), max_steps=7)
    drawn = {i for batch in net.seen for i in batch}
    assert len(drawn) == 12 and drawn != set(EASIEST[:12])


@pytest.mark.parametrize(
    "score", ["loss", pytest.param([float(i) for i in range(20)], marks=pytest.mark.slow, id="given")]
)
def test_the_command_line_runs_it(score: Any, tmp_path: Path) -> None:
    fit_yaml(tmp_path, "DifficultyPacing", {"score": score, "c0": 0.5, "until": 0.5}, max_steps=6)
