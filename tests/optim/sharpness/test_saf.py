"""SAF against loops written by hand, with each sample's scores found again epochs later, on whichever rank it comes."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_eff import KSAM, SAF, BatchSizeWarmup, SelectiveBackprop, SharpnessAwareMinimization, TokenDropping
from lightning_eff.optim.sharpness import _scores
from lightning_eff.optim.sharpness._scores import ScoreStore, latest, store_bytes
from lightning_eff.optim.sharpness._trajectory import divergence
from tests.cases import Case, own_loss
from tests.models import Samples, TinyClassifier, TinyGPT, flat, loader, module, trainer
from tests.runs import differences, final_state, fit, fit_yaml

CASES = {
    "SAF": Case(
        active=lambda: SAF(weight=1.0, lag=1, start=0.0),
        neutral=lambda: SAF(weight=0.0),
        lost=(own_loss, "classifier", "SAF: no loss call of training_step was seen"),
    )
}


# -- the rule


@pytest.mark.parametrize("tau", [1.0, 5.0])
def test_the_divergence_is_torchs(tau: float) -> None:
    z, old = torch.randn(2, 7, 5, dtype=torch.float64), torch.randn(2, 7, 5, dtype=torch.float64)
    old[0, 0, 1] = -torch.inf  # a class that was impossible
    ours, theirs = z.clone().requires_grad_(), z.clone().requires_grad_()
    got = divergence(ours, old, temperature=tau)
    p, q = (theirs / tau).log_softmax(-1), (old / tau).softmax(-1)
    expected = F.kl_div(p, q, reduction="none").sum(-1)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
    weights = torch.randn(2, 7, dtype=torch.float64)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-14)
    assert torch.autograd.gradcheck(lambda z: divergence(z, old[1], temperature=tau), (z[1].clone().requires_grad_(),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_scores_have_no_divergence_and_no_gradient(dtype: torch.dtype) -> None:
    z = (10 * torch.randn(64, 33)).to(dtype).requires_grad_()
    found = divergence(z, z.detach().clone(), temperature=5.0)
    found.sum().backward()
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.zeros(64))
    assert z.grad is not None and torch.equal(z.grad, torch.zeros_like(z))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_what_is_added_is_of_labels_that_count_and_scores_that_are_known(reduction: str) -> None:
    z, old = torch.randn(2, 5, 3)
    valid, known = torch.tensor([True, True, True, False, True]), torch.tensor([True, False, True, True, True])
    plain = torch.arange(5.0) if reduction == "none" else torch.tensor(7.0)
    call: Any = SimpleNamespace(scores=z, valid=valid, reduction=reduction, plain=lambda: plain)
    found: list[tuple[Tensor, Tensor]] = []
    got = SAF(weight=3.0, temperature=2.0)._added(call, (old, known), found)
    kl = F.kl_div((z / 2).log_softmax(-1), (old / 2).softmax(-1), reduction="none").sum(-1) * (valid & known)
    of_all = {"mean": kl.sum() / 4, "sum": kl.sum(), "none": kl}
    torch.testing.assert_close(got, plain + 3.0 * of_all[reduction])
    ((total, count),) = found
    assert float(total) == pytest.approx(float(kl.sum())) and int(count) == 3


def test_settings_that_are_plain_training() -> None:
    assert SAF(weight=0.0).neutral and SAF(start=1.0).neutral and not SAF().neutral


# -- the store


def test_the_last_of_equal_places() -> None:
    places = torch.tensor([3, 1, 3, 0, 1, 3])
    assert latest(places).tolist() == [3, 4, 5]
    assert latest(places[:0]).tolist() == []


def test_scores_are_found_just_lag_epochs_later() -> None:
    store = ScoreStore(5, 1, 2, lag=2, dtype=torch.float32, device=torch.device("cpu"))
    of = {epoch: torch.randn(5, 2) for epoch in range(5)}
    seen = {0: [0, 1, 2], 1: [1, 2, 3], 2: [2, 3, 4], 3: [0, 1], 4: []}
    for epoch, samples in seen.items():
        scores, known = store.read(torch.arange(5), epoch)
        before = seen.get(epoch - 2, [])
        assert known.nonzero().flatten().tolist() == before
        assert torch.equal(scores[before], of[max(epoch - 2, 0)][before])
        assert not store.read(torch.tensor([-1]), epoch)[1].any()
        store.put_by(torch.tensor([*samples, -1]), torch.cat([of[epoch][samples], torch.ones(1, 2)]))  # of no label
        store.close(epoch, lambda value: [value])


def test_ranks_have_one_store_after_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with samples of their own, one of both, exchanged in parts of two."""
    monkeypatch.setattr(_scores, "CHUNK", 6)
    stores = [ScoreStore(6, 1, 3, lag=1, dtype=torch.float32, device=torch.device("cpu")) for _ in range(2)]
    scores = [torch.randn(4, 3), torch.randn(3, 3)]
    places = [torch.tensor([0, 2, 4, 5]), torch.tensor([5, 1, 3])]
    for store, at, values in zip(stores, places, scores, strict=True):
        store.put_by(at, values)
    parts = [[(at[i : i + 2], z[i : i + 2]) for at, z in zip(places, scores, strict=True)] for i in (0, 2)]
    for rank, store in enumerate(stores):
        told: Iterator[Any] = iter([[4, 3], *parts])

        def gather(value: Any, told: Iterator[Any] = told, rank: int = rank) -> list[Any]:
            every = next(told)
            own = every[rank]
            assert value == own if isinstance(own, int) else all(map(torch.equal, value, own))
            return every

        store.close(0, gather)
        assert next(told, None) is None
    found = [store.read(torch.arange(6), 1) for store in stores]
    assert torch.equal(found[0][0], found[1][0]) and found[0][1].all() and found[1][1].all()
    assert torch.equal(found[0][0][[0, 2, 4, 1, 3]], torch.cat([scores[0][:3], scores[1][1:]]))


def test_bytes_are_those_of_the_tensors() -> None:
    store = ScoreStore(50, 4, 10, lag=3, dtype=torch.bfloat16, device=torch.device("cpu"))
    store.put_by(torch.arange(200), torch.randn(200, 10))
    held = [store._scores, store._epochs, store._fresh[0][1]]
    assert sum(t.nbytes for t in held) == store_bytes(50, 4, 10, 3, 2)


# -- training by it


class Turns(Sampler[int]):
    """Another order in each epoch, the same in every run; of some epochs the last samples are left out."""

    def __init__(self, size: int, short: int = 0) -> None:
        self.size, self.short, self.epoch = size, short, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self, epoch: int) -> list[int]:
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(epoch)).tolist()
        return order[: self.size - self.short * (epoch % 2)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self.epoch))

    def __len__(self) -> int:
        return self.size


class Plain(TinyClassifier):
    """Without batch statistics and dropout; it keeps what it said of each sample in the last step."""

    def __init__(self) -> None:
        super().__init__(batch_norm=False)
        self.head = nn.Linear(8, 3)
        self.said: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def twins(build: Any) -> tuple[Any, Any]:
    torch.manual_seed(4)
    net = build()
    other = build()
    other.load_state_dict(net.state_dict())
    return net, other


@pytest.mark.parametrize(("lag", "start"), [(1, 0.0), (2, 0.0), (2, 0.75)])
def test_equals_the_loop_by_hand(lag: int, start: float) -> None:
    net, reference = twins(Plain)
    samples, sampler = Samples("classifier", 24), Turns(24)
    technique = SAF(weight=3.0, temperature=2.0, lag=lag, start=start)
    trainer(technique, max_epochs=5).fit(net, DataLoader(samples, 4, sampler=sampler))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.3)
    old: dict[tuple[int, int], Tensor] = {}
    for epoch in range(5):
        order = sampler.order(epoch)
        for at in range(0, 24, 4):
            index = order[at : at + 4]
            x, y = (torch.stack(list(parts)) for parts in zip(*(samples[i] for i in index), strict=True))
            z = reference(x)
            kl = torch.zeros(())
            loss = F.cross_entropy(z, y)
            if epoch >= lag and (epoch + at / 24) / 5 >= start:
                q = torch.stack([old[epoch - lag, i] for i in index])
                kl = F.kl_div((z / 2).log_softmax(-1), (q / 2).softmax(-1), reduction="batchmean")
                assert kl > 0
                loss = loss + 3.0 * kl
            old |= {(epoch, i): row for i, row in zip(index, z.detach(), strict=True)}
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.testing.assert_close(flat(net), flat(reference), rtol=1e-5, atol=1e-6)
    assert float(technique.report()["divergence"]) == pytest.approx(kl.item(), rel=1e-4)
    assert technique.report()["known"] == 1.0
    plain, _ = twins(Plain)
    trainer(max_epochs=5).fit(plain, DataLoader(samples, 4, sampler=Turns(24)))
    assert (flat(net) - flat(plain)).abs().max() > 1e-3


def test_nothing_is_looked_up_before_there_is_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first epochs cost no comparison."""
    looked: list[int] = []
    read = ScoreStore.read
    monkeypatch.setattr(
        ScoreStore, "read", lambda self, places, epoch: (looked.append(epoch), read(self, places, epoch))[1]
    )
    net = TinyClassifier(batch_norm=False)
    trainer(SAF(lag=2, start=0.0), max_epochs=3).fit(net, DataLoader(Samples("classifier", 8), 4))
    assert looked == [2, 2]


def test_every_row_of_a_sequence_has_its_own_scores() -> None:
    """Labels of rows that are ignored, and a loss summed by the module itself, as Hugging Face's is."""

    class Summed(TinyGPT):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            y = F.pad(batch["labels"], (0, 1), value=-100)[..., 1:]
            z = self(batch["input_ids"])
            return F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum") / (y != -100).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    net, reference = twins(lambda: Summed(num_layers=1, dropout=0.0))
    samples, sampler = Samples("tiny_gpt", 8), Turns(8)
    trainer(SAF(weight=2.0, lag=1, start=0.0), max_epochs=2).fit(net, DataLoader(samples, 4, sampler=sampler))
    optimizer, old = torch.optim.SGD(reference.parameters(), lr=0.5), {}
    for epoch in range(2):
        for index in torch.tensor(sampler.order(epoch)).split(4):
            ids, labels = (samples.batch[key][index] for key in ("input_ids", "labels"))
            z = reference(ids)[:, :-1]
            loss = F.cross_entropy(z.flatten(0, 1), labels[:, 1:].flatten())
            if epoch:
                q = torch.stack([old[int(i)] for i in index])
                kl = F.kl_div((z / 5).log_softmax(-1), (q / 5).softmax(-1), reduction="none").sum(-1)
                loss = loss + 2.0 * kl.mean()
            else:
                old |= {int(i): row for i, row in zip(index, z.detach(), strict=True)}
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.testing.assert_close(flat(net), flat(reference), rtol=1e-4, atol=1e-5)


class Recording(Plain):
    """Keeps what it said of each sample, told by the sample itself, in the first pass of the last step that had it."""

    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self(batch[0])
        key = self.trainer.fit_loop.epoch_loop.total_batch_idx
        if torch.is_grad_enabled() and key != self.__dict__.get("_last_key"):
            self.__dict__["_last_key"] = key
            store = self.__dict__.setdefault("_rows", {})
            store |= {float(x.sum()): row for x, row in zip(batch[0], z.detach().clone(), strict=True)}
        return F.cross_entropy(z, batch[1])


@pytest.mark.parametrize(
    "other",
    [
        lambda: SharpnessAwareMinimization(rho=0.5),
        lambda: SelectiveBackprop(keep=0.5, start=0.0, end=1.0),
        lambda: KSAM(rho=0.5, keep=0.5),
    ],
    ids=["SAM", "SelectiveBackprop", "KSAM"],
)
def test_what_is_stored_is_of_the_sample_and_of_the_first_pass(other: Any) -> None:
    """SideOutputs what chooses among a batch's samples, or runs a second pass elsewhere."""
    torch.manual_seed(4)
    net, technique, samples = Recording(), SAF(lag=1, start=0.0), Samples("classifier", 24)
    trainer(other(), technique, max_epochs=2).fit(net, DataLoader(samples, 8, shuffle=True))
    (store,) = technique._stores.values()
    places, scores = store._joined()
    rows = net.__dict__["_rows"]
    assert len(places) == (24 if isinstance(other(), SharpnessAwareMinimization) else 12)
    for i, row in zip(places.tolist(), scores, strict=True):
        torch.testing.assert_close(row, rows[float(samples[i][0].sum())], rtol=0, atol=0)


def test_a_look_of_token_dropping_at_the_first_batch_is_no_loss_call() -> None:
    """There is one store, of the one call, and each later epoch finds all of the samples of the one before."""
    technique = SAF(lag=1, start=0.0)
    fit("tiny_gpt", lambda: [technique, TokenDropping(keep=0.4)])
    assert [name.rpartition(" ")[2] for name in technique._stores] == ["#0"]
    assert technique.report()["known"] == 1.0 and float(technique.report()["divergence"]) > 0


def test_samples_that_an_epoch_left_out_count_nothing() -> None:
    technique = SAF(lag=1, start=0.0)
    shares: list[float] = []

    class Reads(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            shares.append(float(technique.report()["known"]))

    class Halves(Turns):
        def __len__(self) -> int:
            return self.size - self.short * (self.epoch % 2)

    sampler = Halves(24, short=12)
    data = DataLoader(Samples("classifier", 24), 4, sampler=sampler)
    t = trainer(technique, Reads(), max_epochs=3, reload_dataloaders_every_n_epochs=1)
    t.fit(Plain(), data)
    had, now = set(sampler.order(1)), sampler.order(2)
    expected = [len(had & set(now[4 * i : 4 * i + 4])) / 4 for i in range(len(shares) - 9)]
    assert shares == [0.0] * 6 + [1.0] * 3 + expected
    assert len(had) == 12 and 0 < sum(expected) < len(expected)


def test_what_a_later_batch_has_beyond_the_first_is_told_of() -> None:
    """More labels of a sample than there is room for, and a loss that the first step had not."""

    class Longer(TinyGPT):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            z, y = self(batch["input_ids"]), batch["labels"]
            loss = F.cross_entropy(z.flatten(0, 1), y.flatten())
            return loss + F.nll_loss(z[:, 0, :].log_softmax(-1)[:, :60], y[:, 0]) if batch_idx == 2 else loss

    def collate(items: list[Any]) -> dict[str, Tensor]:
        collated.append(len(items))
        length = 16 if len(collated) == 1 else 32
        return {key: torch.stack([item[key][:length] for item in items]) for key in items[0]}

    collated: list[int] = []
    samples = Samples("tiny_gpt", 20)
    samples.batch["labels"].clamp_(max=59)
    technique, data = SAF(lag=1, start=0.0), DataLoader(samples, 4, collate_fn=collate)
    with pytest.warns(UserWarning) as told:
        trainer(technique, max_epochs=3).fit(Longer(num_layers=1), data)
    told_of = [str(one.message) for one in told if str(one.message).startswith("SAF: a batch has")]
    assert len(told_of) == 2 and "32 labels per sample, more than the first batch's 16" in told_of[0]
    assert "F.nll_loss on 60 classes, which the first batch did not have" in told_of[1]
    (store,) = technique._stores.values()
    assert store.num_rows == 16 and technique.report()["known"] == 0.5


class Checkpointed(TinyClassifier):
    """Its loss is computed in a gradient checkpoint, and so twice in each step."""

    rerun = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        def losses(h: Tensor) -> Tensor:
            z = self.head(h)
            return F.cross_entropy(z, batch[1]) + F.cross_entropy(-2 * z, batch[1])

        h = self.norm(self.blocks(batch[0]))
        return checkpoint(losses, h, use_reentrant=False) if self.rerun else losses(h)  # pyright: ignore[reportReturnType]


def test_a_loss_that_is_checkpointed_is_the_same_loss() -> None:
    ends = []
    for rerun in (True, False):
        torch.manual_seed(4)
        net = Checkpointed()
        net.rerun = rerun
        technique = SAF(weight=3.0, lag=1, start=0.0)
        trainer(technique, max_epochs=3).fit(net, loader("classifier", shuffle=False))
        assert len(technique._stores) == 2
        ends.append(flat(net))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*returned .None.")  # which Lightning says once in a process
def test_a_first_step_without_a_loss_is_no_first_step() -> None:
    class Passes(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if self.trainer.fit_loop.epoch_loop.total_batch_idx == 0 else loss

    technique = SAF(lag=1, start=0.0)
    trainer(technique, max_epochs=2).fit(Passes(), loader("classifier", shuffle=False))
    (store,) = technique._stores.values()
    assert store._epochs[0].ne(0).nonzero().flatten().tolist() == [0, 1, 2, 3], "of the first batch nothing is known"


def test_two_heads_have_a_store_each() -> None:
    class TwoHeads(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 7)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            h = self.norm(self.blocks(batch[0]))
            entries = F.binary_cross_entropy_with_logits(self.head(h)[:, 0], batch[1].clamp(max=1).float())
            return (
                F.cross_entropy(self.head(h), batch[1]) + F.nll_loss(self.other(h).log_softmax(-1), batch[1]) + entries
            )

    technique = SAF(lag=1, start=0.0)
    trainer(technique, max_epochs=2).fit(TwoHeads(), loader("classifier"))
    assert sorted(store.num_classes for store in technique._stores.values()) == [3, 7]
    assert float(technique.report()["divergence"]) > 0


def test_the_store_may_stay_in_cpu_memory() -> None:
    ends = [final_state(*fit("classifier", lambda o=o: [SAF(lag=1, start=0.0, offload=o)])) for o in (False, True)]
    assert differences(*ends) == []


def test_ranks_whose_first_batches_differ_have_room_for_the_longest() -> None:
    technique, calls = SAF(lag=1, start=0.0), []
    technique._size = 2
    session: Any = SimpleNamespace(
        loaders=SimpleNamespace(num_samples=5),
        trainer=SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu"))),
    )
    for dtype, rows in ((torch.bfloat16, 2), (torch.float32, 4), (torch.bfloat16, 3)):
        call = SimpleNamespace(scores=torch.zeros(2, rows, 3, dtype=dtype), shape=(2, rows), sample=None)
        calls.append(("y 3 #0", call))
    told = [technique.describe(session, calls[i:]) for i in (2, 1, 0)]
    technique.begin(session, [{"y 3 #0": [rows, 3]} for rows in (3, 4, 2)])
    (store,) = technique._stores.values()
    assert told == [{"y 3 #0": [3, 3]}] * 3 and store.num_rows == 4
    assert store._scores.dtype == torch.float32, "the widest of a rank's calls"


def test_each_rank_takes_up_what_it_has_put_by_and_others_ranks_all_of_it() -> None:
    technique = SAF(lag=1, start=0.0)
    trainer(technique, max_steps=8).fit(Plain(), loader("classifier"))  # of the second epoch's five batches, three
    (name,) = technique._stores
    places, scores = technique._stores[name]._joined()
    technique._past = SimpleNamespace(gather=lambda own: [own, (own[0] + 1, 2 * own[1])])  # type: ignore[assignment]
    state = technique.state_dict()
    for rank, world_size, found in ((0, 2, (0,)), (1, 2, (1,)), (0, 3, (0, 1)), (1, 3, ())):
        again = SAF(lag=1, start=0.0)
        replicas = SimpleNamespace(count=world_size)
        again._session = SimpleNamespace(rank=rank, fitting=True, replicas=replicas)  # type: ignore[assignment]
        again.load_state_dict(state)
        assert (again._epoch, again._known) == (1, 1.0) == (technique._epoch, float(technique._known))
        assert again._checked and again.report()["divergence"] == float(technique._last) > 0
        store = again._stores[name]
        assert torch.equal(store._scores, technique._stores[name]._scores)
        at, values = store._joined()
        assert torch.equal(at, torch.cat([places[:0], *(places + i for i in found)])) and len(places) == 12
        assert torch.equal(values, torch.cat([scores[:0], *((1 + i) * scores for i in found)]))


# -- under DDP


def test_under_ddp_the_scores_follow_the_sample(two_processes: dict[str, Any]) -> None:
    """Each rank's samples change from epoch to epoch, and the weights are those of one process with both ranks' batches."""
    found = two_processes["trajectory"]
    net, samples = module("classifier", batch_norm=False), Samples("classifier", 32)
    technique = SAF(weight=3.0, lag=1, start=0.0)
    pl.seed_everything(3, verbose=False)
    net = Plain()
    trainer(technique, max_epochs=4).fit(net, DataLoader(samples, 8, sampler=Turns(32)))
    assert found["known"] == [1.0, 1.0]
    assert found["moved"] > 8, "of the 16 samples of rank 0 in the last epoch, rank 1 had had some"
    for rank in found["weights"]:
        torch.testing.assert_close(torch.tensor(rank), flat(net), rtol=1e-4, atol=1e-5)


# -- refused


def test_a_store_that_is_too_large_is_refused_with_its_bytes() -> None:
    net = module("gpt2")
    before = flat(net).clone()
    message = (
        r"the scores of 3 past epochs and the current one, of 20 samples with 32 x 61 each, would take 163,840 bytes"
        r" \(160 KiB\)\. Use a smaller lag, more max_bytes, or MESA"
    )
    assert store_bytes(20, 32, 61, 3, 4) != 163_840
    message = message.replace("163,840", f"{store_bytes(20, 32, 61, 3, 4):,}").replace("160 KiB", ".* KiB")
    with pytest.raises(ValueError, match=message):
        trainer(SAF(max_bytes=100_000), max_epochs=9).fit(net, loader("gpt2"))
    assert torch.equal(flat(net), before)


def test_real_language_models_are_beyond_any_memory() -> None:
    # 10 million samples of 1,024 tokens, GPT-2's vocabulary, float32
    assert store_bytes(10**7, 1024, 50257, 3, 4) > 8e15


class Streams(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        samples = Samples("classifier", 20)
        return (samples[i] for i in range(20))


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


class Keyed(Samples):
    """Its samples are asked for by a pair, as samplers do that say how each is augmented."""

    def __getitem__(self, i: Any) -> Any:
        return super().__getitem__(i[0])


def _pairs(items: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = (torch.stack(list(parts)) for parts in zip(*items, strict=True))
    return torch.cat([x, x]), torch.cat([y, y])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: DataLoader(Streams(), 4), "does not tell which samples a batch has.*IterableDataset|MESA"),
        (lambda: DataLoader(Samples("classifier", 20), 4, sampler=Endless()), "map-style data set with a length.*MESA"),
        (lambda: [loader("classifier"), loader("classifier")], "Use one DataLoader.*MESA"),
        (
            lambda: DataLoader(Samples("classifier", 20), 4, collate_fn=_pairs),
            "gave 4 indices for a batch of 8 samples",
        ),
        (
            lambda: DataLoader(Keyed("classifier", 20), 4, sampler=[(i, 0) for i in range(20)]),  # pyright: ignore[reportArgumentType]
            "gave 4 indices for a batch of 4 samples, and it needs one integer for each",
        ),
    ],
    ids=["stream", "no length", "two loaders", "two of each", "pairs"],
)
def test_a_loader_that_does_not_tell_samples_is_refused(data: Any, message: str) -> None:
    class First(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch[0] if isinstance(batch[0], list | tuple) else batch, batch_idx)

    net = First()
    before = flat(net).clone()
    with pytest.raises(ValueError, match=message):
        trainer(SAF(lag=1, start=0.0), max_epochs=3).fit(net, data())
    assert torch.equal(flat(net), before)


@pytest.mark.parametrize("stacked", [False, True])
def test_labels_without_a_row_per_sample_are_refused(stacked: bool) -> None:
    """A detector's labels are of objects: in a list with one item per image, or those of all images one after the other."""

    class Detector(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            images, labels = batch
            z = self(torch.stack(list(images)))
            if stacked:
                counts = torch.tensor([1, 2, 1, 2])[: len(z)]
                return F.cross_entropy(z.repeat_interleave(counts, 0), labels)
            return torch.stack([F.cross_entropy(z[i].expand(len(y), -1), y) for i, y in enumerate(labels)]).mean()

    def collate(items: list[Any]) -> Any:
        images, labels = zip(*[(x, y.expand(1 + i % 2)) for i, (x, y) in enumerate(items)], strict=True)
        return images, torch.cat(labels) if stacked else labels

    net = Detector()
    before = flat(net).clone()
    message = r"have the shape \(6,\), so" if stacked else "lie in a list with one item per sample, so"
    with pytest.raises(ValueError, match=f"SAF: the labels .* {message} their rows are not the 4 samples"):
        trainer(SAF(lag=1, start=0.0), max_epochs=3).fit(
            net, DataLoader(Samples("classifier", 20), 4, collate_fn=collate)
        )
    assert torch.equal(flat(net), before)


def test_a_loss_on_no_classes_is_refused() -> None:
    class Regression(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.mse_loss(self(batch[0]), F.one_hot(batch[1], 3).float())

    with pytest.raises(
        ValueError, match=r"SAF: no loss call on the labels is a classification loss. Use F.cross_entropy"
    ):
        trainer(SAF(start=0.0), max_epochs=5).fit(Regression(), loader("classifier"))


def test_joined_batches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"BatchSizeWarmup\(by='batch'\) and SAF cannot train together"):
        trainer(SAF(lag=1), BatchSizeWarmup(full=2, by="batch"), max_epochs=5).fit(Plain(), loader("classifier"))


def test_a_run_that_is_too_short_is_told_of() -> None:
    with pytest.warns(
        UserWarning, match=r"SAF\(lag=3\): the run ends after 2 epochs, and nothing is compared before epoch 3"
    ):
        trainer(SAF(start=0.0), max_epochs=2).fit(Plain(), loader("classifier"))


def test_checkpoints_of_another_lag_or_data_set_are_refused(tmp_path: Path) -> None:
    t = trainer(SAF(lag=1, start=0.0), max_epochs=2)
    t.fit(Plain(), loader("classifier"))
    t.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"SAF\(lag=2\): the checkpoint holds the scores of 1 epochs"):
        trainer(SAF(lag=2, start=0.0), max_epochs=3).fit(Plain(), loader("classifier"), ckpt_path=tmp_path / "a.ckpt")
    with pytest.raises(
        ValueError, match=r"the checkpoint's store has 20 samples and the data set has 24. Scores are found"
    ):
        trainer(SAF(lag=1, start=0.0), max_epochs=3).fit(
            Plain(), loader("classifier", 24), ckpt_path=tmp_path / "a.ckpt"
        )


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"weight": -1.0}, r"SAF\(weight=-1.0\): expected a finite number >= 0"),
        ({"temperature": 0.0}, r"SAF\(temperature=0.0\): expected a finite number > 0"),
        ({"start": 1.5}, r"SAF\(start=1.5\): expected a number in \[0, 1\]"),
        ({"lag": 0}, r"SAF\(lag=0\): expected an integer >= 1: the number of epochs"),
        ({"max_bytes": 1e9}, r"SAF\(max_bytes=1000000000.0\): expected an integer >= 1: the largest size of the store"),
        ({"labels": "y"}, r"SAF\(labels='y'\): expected a list"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SAF(**kwargs)


def test_a_start_needs_an_end() -> None:
    with pytest.raises(ValueError, match=r"SAF\(start=0.5\): this is a fraction of the run, and the Trainer has no"):
        trainer(SAF(start=0.5), max_epochs=-1).fit(Plain(), loader("classifier"))


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "SAF", {"weight": 1.0, "lag": 1, "start": 0.0}, max_epochs=3)
    assert "SAF, lambda 1: the last batch diverged by" in capsys.readouterr().out
