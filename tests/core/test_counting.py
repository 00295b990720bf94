"""How many samples a batch holds, against the number that the loader was asked for."""

import threading
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

import lightning_eff as eff
from lightning_eff._core._samples.counting import Counting, current_rule, own_count
from lightning_eff._core.batches import num_samples, num_tokens, tensors


class Graphs(NamedTuple):
    nodes: Tensor
    edges: Tensor
    graph: Tensor
    targets: Tensor


class Whole:
    """A batch object with a count of its own."""

    num_graphs = 3


DATA: Any = [(torch.rand(3 + i % 3, 5), torch.rand(1)) for i in range(20)]


def collate(items: Any) -> Graphs:
    sizes = torch.tensor([len(v) for v, _ in items])
    at = torch.repeat_interleave(torch.arange(len(items)), sizes)
    edges = torch.stack([torch.arange(len(at)), torch.arange(len(at)).roll(1)])
    return Graphs(torch.cat([v for v, _ in items]), edges, at, torch.stack([y for _, y in items]))


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 1)
        self.counts: list[tuple[int, int]] = []

    def training_step(self, batch: Graphs, batch_idx: int) -> Tensor:
        self.counts.append((num_samples(batch), num_tokens(batch)))
        out = torch.zeros(len(batch.targets), 1).index_add(0, batch.graph, self.net(batch.nodes))
        return F.mse_loss(out, batch.targets)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


def fitted(size: int, *callbacks: pl.Callback) -> Net:
    module = Net()
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[eff.GradientNoiseScale(), *callbacks],
    )
    trainer.fit(module, DataLoader(DATA, size, collate_fn=collate))
    return module


def test_graphs_are_counted_and_not_their_nodes() -> None:
    assert fitted(6).counts == [(6, 0), (6, 0), (6, 0), (2, 0)] * 2
    assert current_rule() is None


def test_runs_that_take_turns_count_by_themselves() -> None:
    """A run within another's hook, and one in a thread that begins first and ends last."""
    begun, over = threading.Event(), threading.Event()
    found: list[Net] = []

    class Within(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if not found:
                found.append(Net())
                found[0] = fitted(7)

    class Waits(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            begun.set()
            assert over.wait(60)

    inside = threading.Thread(target=lambda: found.append(fitted(5, Waits())))
    inside.start()
    assert begun.wait(60)
    outer = fitted(6, Within())
    over.set()
    inside.join()
    assert outer.counts == [(6, 0), (6, 0), (6, 0), (2, 0)] * 2
    assert [net.counts[0][0] for net in found] == [7, 5]
    assert current_rule() is None


def test_batches_with_a_count_of_their_own() -> None:
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    nested = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)], layout=torch.jagged)
    assert (num_samples(packed), num_samples((nested, torch.zeros(2)))) == (2, 2)
    assert num_samples((Whole(), torch.zeros(9))) == 3
    assert own_count((torch.zeros(4), [1, 2])) is None


def test_parts_of_a_batch_are_counted_as_the_whole_was() -> None:
    rule = Counting()
    for start in (0, 6):
        rule.learn(tensors(collate(DATA[start : start + 6])), 6)
    part = collate(DATA[12:15])
    assert rule.count(part, tensors(part)) == 3


def test_the_size_that_the_user_logs_is_trusted_most() -> None:
    rule, batch = Counting(), collate(DATA[:6])
    rule.learn(tensors(batch), len(batch.nodes))
    rule.hear(tensors(batch), [6])
    rule.learn(tensors(batch), len(batch.nodes))
    assert rule.count(batch, tensors(batch)) == 6


def test_a_size_that_only_one_batch_has_by_chance_counts_nothing_later() -> None:
    """Four images, one with four objects; then four images whose objects are fewer."""
    rule = Counting()
    for counts in ((1, 4, 2, 2), (1, 2, 2, 3)):
        batch = [torch.zeros(3, 8, 8)] * 4, [torch.zeros(n) for n in counts]
        rule.learn(tensors(batch), 4)
        assert rule.count(batch, tensors(batch)) == 4
