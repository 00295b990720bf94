"""Epochs whose samples a technique chooses: what the step sees, Lightning's counts, and resumes in mid-epoch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, WeightedRandomSampler

import lightning_eff as eff
from lightning_eff._core._samples.chosen import interleaved, share
from lightning_eff._core._samples.technique import Choice, Epoch
from tests.cases import Case
from tests.core.choosers import Again, Easier, Some
from tests.models import trainer

N = 23

EXAMPLES = {
    "Easier": Case(active=lambda: Easier(), neutral=lambda: Easier()),
    "Some": Case(active=lambda: Some(grow=0.2), neutral=lambda: Some(1.0)),
}


class Numbered(Dataset[Any]):
    """Sample i is its number and a label that follows from it."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index), 1.0]), torch.tensor(index % 3)


class Net(pl.LightningModule):
    """A classifier that notes the samples of each step, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 3)
        self.drop = nn.Dropout(0.2)
        self.seen: list[list[int]] = []
        self.bars: list[int] = []
        self.validated: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.bars.append(int(self.trainer.num_training_batches))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch
        x, y = batch
        self.seen.append(x.reshape(-1, 2)[:, 0].long().tolist())
        return F.cross_entropy(self.fc(self.drop(x / N)).reshape(-1, 3), y.reshape(-1))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(len(self.seen))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Counts(Sampler[int]):
    """A user's own sampler, whose order follows from how often it was begun."""

    def __init__(self) -> None:
        self.begun = 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter(torch.randperm(N, generator=torch.Generator().manual_seed(self.begun)).tolist())


class Groups:
    """A user's own batch sampler: neighbours together, groups in random order, of no regular size."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        for start in torch.randperm(6).tolist():
            yield list(range(4 * start, min(4 * start + 4, N)))


LOADERS: dict[str, Any] = {
    "shuffle": lambda: DataLoader(Numbered(), 4, shuffle=True),
    "in order, drop_last": lambda: DataLoader(Numbered(), 4, drop_last=True),
    "own generator": lambda: DataLoader(Numbered(), 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "weighted": lambda: DataLoader(Numbered(), 4, sampler=WeightedRandomSampler([1.0] * (N - 1) + [9.0], N)),
    "counts": lambda: DataLoader(Numbered(), 4, sampler=Counts()),
    "batch sampler": lambda: DataLoader(Numbered(), batch_sampler=Groups()),  # pyright: ignore[reportArgumentType]
    "no batches": lambda: DataLoader(Numbered(), batch_size=None, shuffle=True),
    "in a dict": lambda: {"a": DataLoader(Numbered(), 4, shuffle=True)},
    "workers": lambda: DataLoader(Numbered(), 4, shuffle=True, num_workers=2, prefetch_factor=3),
    "persistent workers": lambda: DataLoader(Numbered(), 4, shuffle=True, num_workers=1, persistent_workers=True),
}


def run(data: Any, *callbacks: Callback, resume: Path | None = None, **kwargs: Any) -> tuple[Net, pl.Trainer]:
    pl.seed_everything(3 if resume is None else 44, verbose=False)
    net, t = Net(), trainer(*callbacks, **{"max_steps": 13, **kwargs})
    validate = DataLoader(Numbered(), 4) if kwargs.get("limit_val_batches") else None
    t.fit(net, data, validate, ckpt_path=resume)
    return net, t


def by_epoch(net: Net) -> list[list[int]]:
    """The samples of each epoch."""
    seen, found = list(net.seen), []
    for count in net.bars:
        found.append([i for batch in seen[:count] for i in batch])
        seen = seen[count:]
    return found


@pytest.mark.parametrize("kind", sorted(LOADERS))
def test_epochs_have_the_chosen_samples_in_the_loaders_order(kind: str) -> None:
    technique = Some(0.6)
    loader = LOADERS[kind]()
    plain = loader if isinstance(loader, DataLoader) else loader["a"]
    before = {key: id(value) for key, value in plain.__dict__.items() if key in ("sampler", "batch_sampler")}
    net, t = run(loader, technique, max_steps=-1, max_epochs=3)
    size = plain.batch_size or (1 if kind == "no batches" else 4)
    orders = []
    for epoch, seen in zip(technique.epochs, by_epoch(net), strict=True):
        assert epoch.size == N and epoch.left is None and len(epoch.order) == N
        drawn = torch.rand(N, generator=torch.Generator().manual_seed(0))  # any
        kept = set(seen)
        expected = [i for i in epoch.order.tolist() if i in kept]
        if plain.drop_last:
            expected = expected[: len(expected) // size * size]
        assert seen == expected and 0 < len(kept) < N and len(drawn) == N
        orders.append(epoch.order.tolist())
    assert [e.number for e in technique.epochs] == [0, 1, 2]
    assert ("in order" in kind) == (orders[0] == orders[1]), "the user's sampler is begun once in each epoch"
    if kind not in ("weighted", "in order, drop_last"):
        assert all(sorted(order) == list(range(N)) for order in orders)
    assert {len(batch) for batch in net.seen[: net.bars[0] - 1]} == {size}
    assert t.fit_loop.epoch_loop.batch_progress.total.completed == sum(net.bars) == len(net.seen)
    after = {key: id(value) for key, value in plain.__dict__.items() if key in ("sampler", "batch_sampler")}
    assert after == before and "on_advance_start" not in t.fit_loop.__dict__


@pytest.mark.parametrize("kind", sorted(LOADERS))
@pytest.mark.parametrize(
    "build", [lambda: Some(0.5, grow=0.2), lambda: Again(0.5, grow=0.2), Easier], ids=["some", "again", "easier"]
)
def test_resume_is_bit_for_bit(kind: str, build: Any, tmp_path: Path) -> None:
    """Also at the ends of epochs of other lengths, and where what is to come was chosen in mid-epoch."""
    if kind == "counts" or (build is Easier and kind == "no batches"):
        return  # a sampler that is made anew counts from the beginning; and losses of what has no batches are refused below
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole, t = run(LOADERS[kind](), build(), saver, enable_checkpointing=True)
    assert len(set(whole.bars)) > 1 or kind == "no batches"
    ends = [sum(whole.bars[: i + 1]) for i in range(len(whole.bars) - 1)]
    for step in sorted({4, ends[0]} if "workers" in kind else {1, 7, ends[0], ends[0] + 1, ends[-1]}):
        resumed, other = run(LOADERS[kind](), build(), resume=tmp_path / f"step={step}.ckpt")
        assert resumed.seen == whole.seen[step:], step
        assert all(
            torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
        ), step
        assert other.current_epoch == t.current_epoch, step
        assert other.num_training_batches == t.num_training_batches


def test_a_resumed_run_validates_at_the_end_of_an_epoch_of_fewer_batches(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    loader = LOADERS["shuffle"]
    whole, _ = run(loader(), Some(0.5), saver, enable_checkpointing=True, limit_val_batches=2)
    end = whole.bars[0]
    resumed, _ = run(loader(), Some(0.5), resume=tmp_path / f"step={end}.ckpt", limit_val_batches=2)
    assert resumed.validated == [n - end for n in whole.validated if n >= end]
    assert resumed.seen == whole.seen[end:]


def test_checkpoints_load_with_weights_only_and_go_on_without_the_technique(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    run(LOADERS["shuffle"](), Easier(), saver, enable_checkpointing=True, max_steps=8)
    path = tmp_path / "step=7.ckpt"
    torch.load(path, weights_only=True)
    for callbacks in ([], [eff.ExactResume()], [Some(0.5)]):
        net, t = run(LOADERS["shuffle"](), *callbacks, resume=path)
        assert t.global_step == 13 and len(net.seen) == 6


@pytest.mark.parametrize("limit", [1.0, 0.5, 2])
def test_lightnings_counts_follow(limit: Any) -> None:
    """Limits, the bar's total, the share of an epoch after which to validate, and accumulation windows."""
    technique = Some(0.4, grow=0.3)
    net, t = run(
        LOADERS["shuffle"](),
        technique,
        max_steps=-1,
        max_epochs=3,
        limit_train_batches=limit,
        limit_val_batches=1,
        val_check_interval=0.5,
        accumulate_grad_batches=2,
    )
    drawn = [torch.rand(N, generator=torch.Generator()) for _ in range(3)]
    assert len(drawn) == 3
    chosen = [len(kept) for kept in _chosen(technique)]
    batches = [-(-n // 4) for n in chosen]
    expected = [min(b, limit) if isinstance(limit, int) else int(b * limit) for b in batches]
    assert net.bars == expected and len(set(batches)) > 1
    assert t.global_step == sum(-(-n // 2) for n in expected), "the last window of an epoch is a short one"
    at, done = [], 0
    for n in expected:
        every = max(1, int(n * 0.5))
        at += [done + i for i in range(every, n + 1, every)]
        done += n
    assert net.validated == at


def _chosen(technique: Some) -> list[list[int]]:
    """What the technique chose of each epoch, as it would again."""
    found = []
    for epoch in technique.epochs:
        keep = min(1.0, technique.keep + technique.grow * epoch.number)
        session = technique._past
        assert session is not None
        drawn = torch.rand(N, generator=session.generator("Some", epoch.number))
        found.append(epoch.order[drawn[epoch.order] < keep].tolist())
    return found


def test_the_progress_bars_total_is_the_epochs() -> None:
    from lightning.pytorch.callbacks import TQDMProgressBar

    class Bar(TQDMProgressBar):
        totals: list[int] = []

        def on_train_epoch_start(self, trainer: Any, *args: Any) -> None:
            super().on_train_epoch_start(trainer, *args)
            self.totals.append(int(self.train_progress_bar.total))

    net, _ = run(LOADERS["shuffle"](), Some(0.4, grow=0.3), Bar(), max_steps=-1, max_epochs=3, enable_progress_bar=True)
    assert Bar.totals == net.bars and len(set(net.bars)) > 1


def test_loaders_that_are_reloaded() -> None:
    net, _ = run(
        LOADERS["shuffle"](), Some(0.5, grow=0.2), max_steps=-1, max_epochs=4, reload_dataloaders_every_n_epochs=1
    )
    assert len(net.bars) == 4 and len(net.seen) == sum(net.bars)

    class Indices(Some):
        def on_batch_start(self, session: Any, batch: Any, batch_idx: int) -> None:
            found.append((session.sample_indices, batch[0][:, 0].long().tolist()))

    found: list[Any] = []
    run(LOADERS["shuffle"](), Indices(0.5), max_steps=-1, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert found and all(indices == samples for indices, samples in found)


def test_indices_and_weights_are_those_of_the_step() -> None:
    class Weighs(Some):
        def choose(self, epoch: Epoch) -> Choice:
            return Choice(epoch.order.repeat_interleave(2)[5:], epoch.order.repeat_interleave(2)[5:] / 10)

        def on_batch_start(self, session: Any, batch: Any, batch_idx: int) -> None:
            found.append((session.sample_indices, session.sample_weights, batch[0][:, 0]))

    for kind in ("shuffle", "persistent workers"):
        found: list[Any] = []
        net, _ = run(LOADERS[kind](), Weighs())
        assert net.bars[0] == -(-(2 * N - 5) // 4)
        for indices, weights, samples in found:
            assert indices == samples.long().tolist()
            torch.testing.assert_close(weights, samples / 10)


def test_weights_multiply_each_samples_loss_before_the_mean() -> None:
    """Of one step: the gradient against one by hand; weights of one are the plain run to the bit."""

    class Fixed(Some):
        def choose(self, epoch: Epoch) -> Choice:
            return Choice([1, 5, 6, 9], [0.5, 2.0, 0.0, 1.0])

    net = Net()
    net.drop = nn.Dropout(0.0)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), 1.0)  # type: ignore[method-assign]
    trainer(Fixed(), max_steps=1).fit(net, DataLoader(Numbered(), 4))
    x, y = (torch.stack(part) for part in zip(*(Numbered()[i] for i in (1, 5, 6, 9)), strict=True))
    w, b = before["fc.weight"].requires_grad_(), before["fc.bias"].requires_grad_()
    losses = F.cross_entropy(F.linear(x / N, w, b), y, reduction="none")
    (losses * torch.tensor([0.5, 2.0, 0.0, 1.0])).mean().backward()
    torch.testing.assert_close(net.fc.weight, w - w.grad)
    torch.testing.assert_close(net.fc.bias, b - b.grad)
    one, none = (run(LOADERS["shuffle"](), Some(0.6, weight))[0] for weight in (1.0, None))
    assert torch.equal(one.fc.weight, none.fc.weight)
    other, _ = run(LOADERS["shuffle"](), Some(0.6, 1.5))
    assert not torch.equal(one.fc.weight, other.fc.weight)


def test_losses_come_with_the_training_pass() -> None:
    """No pass is added, and the losses are those of the step, dropout included."""

    class Notes(Easier):
        def on_losses(self, indices: list[int], losses: Tensor) -> None:
            super().on_losses(indices, losses)
            found.append((indices, losses))

        def choose(self, epoch: Epoch) -> None:
            return None

    found: list[tuple[list[int], Tensor]] = []
    net = Net()
    logits: list[Tensor] = []
    net.fc.register_forward_hook(lambda m, args, out: logits.append(out.detach()))
    t = trainer(Notes(), max_steps=5)
    t.fit(net, DataLoader(Numbered(), 4, shuffle=True))
    assert len(found) == 5
    looked = len(logits) - 5  # to find the labels, once
    assert looked == 1
    for (indices, losses), z in zip(found, logits[1:], strict=True):
        torch.testing.assert_close(losses, F.cross_entropy(z, torch.tensor(indices) % 3, reduction="none"))


def test_a_technique_that_chooses_nothing_is_plain_training() -> None:
    class Nothing(Some):
        def choose(self, epoch: Epoch) -> None:
            return None

    for kind in ("shuffle", "in order, drop_last", "batch sampler", "own generator"):
        plain, _ = run(LOADERS[kind](), eff.ExactResume())
        net, _ = run(LOADERS[kind](), Some(1.0))
        assert net.seen == plain.seen and torch.equal(net.fc.weight, plain.fc.weight), kind
        net, _ = run(LOADERS[kind](), Nothing())
        assert net.seen == plain.seen or "in order" not in kind
        assert net.bars == plain.bars
        if kind == "batch sampler":  # its groups stay together
            assert all(batch == list(range(batch[0], min(batch[0] + 4, N))) for batch in net.seen)


def test_the_share_of_a_rank_is_distributed_samplers() -> None:
    for n in (1, 5, 12, 23):
        for drop_last in (False, True):
            for rank in range(4):
                expected = DistributedSampler(range(n), 4, rank, shuffle=False, drop_last=drop_last)  # pyright: ignore[reportArgumentType]
                if not (drop_last and n < 4):
                    assert share(torch.arange(n), rank, 4, drop_last=drop_last).tolist() == list(expected)
        ranks = [share(torch.arange(n), rank, 4, drop_last=False) for rank in range(4)]
        assert interleaved(ranks)[:n].tolist() == list(range(n))
    assert interleaved([torch.tensor([0, 1, 2]), torch.tensor([5])]).tolist() == [0, 5, 1, 2]


# -- what is refused


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Numbered()[i] for i in range(N))


class Stateful(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: DataLoader(Stream(), 4), r"streams an iterable data set \(Stream\), whose samples have no indices"),
        (lambda: Stateful(Numbered(), 4), r"\(Stateful\) keeps its own state"),
        (
            lambda: [DataLoader(Numbered(), 4), DataLoader(Numbered(), 4)],
            "is one of several, so its samples cannot be chosen by index. Use one torch DataLoader",
        ),
        (lambda: {"a": [Numbered()[0]] * 3}, "is not a torch DataLoader"),
    ],
)
def test_loaders_whose_samples_cannot_be_chosen(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"Some: the training loader .*{message}"):
        run(data(), Some())


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice([0, N]), rf"chose indices between 0 and {N}; expected at least one, all in \[0, {N}\)"),
        (Choice(torch.empty(0, dtype=torch.long)), "chose indices none; expected at least one"),
        (Choice(torch.ones(3)), r"chose torch.float32 values of shape \(3,\)"),
        (Choice([1, 2], [1.0]), r"gave weights of shape \(1,\) for 2 samples"),
        (Choice([1, 2], [1.0, -1.0]), "expected one finite weight >= 0 per sample"),
        (Choice([1]), "epoch 0 has 1 chosen samples, too few for a batch of 4 on each of"),
    ],
)
def test_choices_that_cannot_be(choice: Choice, message: str) -> None:
    class Wrong(Some):
        def choose(self, epoch: Epoch) -> Choice:
            return choice

    with pytest.raises(ValueError, match=message):
        run(DataLoader(Numbered(), 4, drop_last=True), Wrong())


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match="Some and Easier cannot train together: both choose the samples of an epoch"):
        run(LOADERS["shuffle"](), Some(), Easier())
    with pytest.raises(ValueError, match="Some: got weights of samples and a DataLoader with batch_size=None"):
        run(LOADERS["no batches"](), Some(weight=2.0))
    with pytest.raises(ValueError, match=r"Some: limit_train_batches=0.1 leaves none of the epoch's \d batches"):
        run(DataLoader(Numbered(), 2), Some(0.3), limit_train_batches=0.1)
    from lightning_eff.data.selection._random_subset import RandomSubset

    with pytest.raises(ValueError, match="the loader gave 4 indices and the step has 2 samples"):
        run(LOADERS["shuffle"](), Some(weight=2.0), RandomSubset(keep=0.5))
    with pytest.warns(UserWarning, match=r"this epoch has \d batches, and val_check_interval=5 is more"):
        run(LOADERS["shuffle"](), Some(0.4), val_check_interval=5, limit_val_batches=1)
