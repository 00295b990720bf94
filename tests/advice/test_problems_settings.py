"""Padding, number formats and settings of the trainer that cost time for nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff.advice._looking import clock
from tests.advice.planted import Experts, Rows, Well, rows, watch


@pytest.fixture(autouse=True)
def time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "perf_counter", lambda: 0.0)


# -- batches


class Texts(Well):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 32), nn.ReLU())

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["ids"]).mean(1), batch["label"])


def texts(fill: Callable[[int, Tensor], Tensor], *, mask: bool = False) -> DataLoader[Any]:
    """Rows of 16 tokens, of which the last ``n % 12`` are what ``fill`` makes of them."""

    def collate(samples: list[Any]) -> dict[str, Tensor]:
        ids = torch.stack([torch.arange(16) % 7 + 3 + i % 5 for i in range(len(samples))])
        kept = torch.ones_like(ids)
        for i in range(len(samples)):
            n = 5 + i % 7
            ids[i] = fill(n, ids[i])
            kept[i, 16 - n :] = 0
        batch = {"ids": ids, "label": torch.stack([y for _, y in samples])}
        return {**batch, "attention_mask": kept} if mask else batch

    return DataLoader(Rows(), batch_size=8, collate_fn=collate)


def padded(n: int, ids: Tensor) -> Tensor:
    return torch.cat([ids[: 16 - n], torch.zeros(n, dtype=torch.int64)])


@pytest.mark.parametrize("mask", [True, False])
def test_padding(mask: bool) -> None:
    problem = watch(Texts(), train=texts(padded, mask=mask), val=texts(padded))["padding"]
    expected = sum(5 + i % 7 for i in range(8)) / 128
    assert problem.share == pytest.approx(expected) and f"{expected:.0%} of the positions" in problem.what


def test_full_batches_have_no_padding() -> None:
    full = texts(lambda n, ids: ids)
    assert watch(Texts(), train=full, val=full) == {}
    same_end = texts(lambda n, ids: torch.cat([ids[:15], torch.tensor([2])]))
    assert watch(Texts(), train=same_end, val=full) == {}


# -- settings


def test_anomaly_detection_and_deterministic_algorithms() -> None:
    assert set(watch(Well(), detect_anomaly=True)) == {"detect-anomaly"}
    try:
        assert set(watch(Well(), deterministic=True)) == {"deterministic-algorithms"}
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_search_for_unused_parameters_that_finds_none() -> None:
    def strategy() -> DDPStrategy:
        return DDPStrategy(find_unused_parameters=True, process_group_backend="gloo")

    try:
        assert set(watch(Well(), strategy=strategy(), devices=1)) == {"find-unused-parameters"}
        assert watch(Experts(), strategy=strategy(), devices=1) == {}
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_float64() -> None:
    class Wide(Well):
        def loss(self, batch: Any) -> Tensor:
            return super().loss((batch[0].float(), batch[1]))

    doubled = rows(change=lambda sample: (sample[0].double(), sample[1]))
    assert "batch[0]" in watch(Wide(), train=doubled)["float64-batch"].what
    unread = rows(change=lambda sample: (*sample, torch.tensor(1.0).double()))

    class Ignores(Well):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch[:2])

    assert watch(Ignores(), train=unread) == {}

    class WideWeights(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.head = self.head.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x).double())

    assert "head.weight" in watch(WideWeights())["float64-parameters"].what
    assert watch(Well(), precision="64-true") == {}
